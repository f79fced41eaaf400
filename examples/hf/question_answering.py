"""Answer questions on functions of Python's standard library by a span of their source.

    python examples/hf/question_answering.py
    python examples/hf/question_answering.py --num_train_epochs 10 --eval_strategy epoch --load_best_model_at_end

A script as transformers' users write them; `--help` lists its arguments, which are those of `TrainingArguments` and a
few of its own. A source that is too long for the model is cut into overlapping parts, and the answer is the likeliest
span of any of them: the trainer makes answers of its predictions before they are scored. Nothing is downloaded; the
tokenizer is made here, and the model is a BERT of two layers that starts from nothing. Needs the extra `hf` and the
package `datasets`.
"""

from __future__ import annotations

import ast
import functools
import json
import random
import sysconfig
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset, disable_progress_bars
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from transformers import (
    AutoModelForQuestionAnswering,
    AutoTokenizer,
    BertConfig,
    EvalPrediction,
    HfArgumentParser,
    PreTrainedTokenizerFast,
    TrainingArguments,
    set_seed,
)
from transformers.trainer_utils import PredictionOutput

from omnitrain import HFTrainer as Trainer  # or: from transformers import Trainer

PACKAGES = ("asyncio", "email", "http", "logging", "multiprocessing", "unittest", "xml")


@dataclass
class ModelArguments:
    model_name_or_path: str | None = field(default=None, metadata={"help": "A model to go on from; else a new one."})
    hidden_size: int = field(default=64, metadata={"help": "Of a new model."})
    dropout: float = field(default=0.0, metadata={"help": "Of a new model."})


@dataclass
class DataArguments:
    max_seq_length: int = field(default=64, metadata={"help": "Tokens of a question and a part of a source."})
    doc_stride: int = field(default=16, metadata={"help": "Tokens that two parts of a source have in common."})
    max_answer_length: int = field(default=12, metadata={"help": "Tokens of an answer."})
    max_train_samples: int = field(default=1400, metadata={"help": "Questions to train on."})
    max_eval_samples: int = field(default=200, metadata={"help": "Questions to evaluate on."})
    max_predict_samples: int = field(default=200, metadata={"help": "Questions to answer at the end."})


class QuestionAnsweringTrainer(Trainer):
    """Scores the answers that are made of the predictions, instead of the predictions."""

    def __init__(self, *args: Any, eval_examples: Any = None, post_process_function: Any = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.eval_examples = eval_examples
        self.post_process_function = post_process_function

    def answered(self, examples: Any, features: Any, loader: Any, prefix: str) -> Any:
        """Return the answers to questions, and their scores."""
        compute_metrics: Any = self.compute_metrics
        self.compute_metrics = None  # which is of answers, and not of what the model returns
        try:
            output = self.evaluation_loop(loader, description=prefix, metric_key_prefix=prefix)
        finally:
            self.compute_metrics = compute_metrics
        answers = self.post_process_function(examples, features, output.predictions)
        scores = {f"{prefix}_{name}": value for name, value in compute_metrics(answers).items()}
        return PredictionOutput(answers.predictions, answers.label_ids, {**scores, **(output.metrics or {})})

    def evaluate(
        self,
        eval_dataset: Any = None,
        eval_examples: Any = None,
        ignore_keys: Any = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        features: Any = self.eval_dataset if eval_dataset is None else eval_dataset
        examples = self.eval_examples if eval_examples is None else eval_examples
        metrics = self.answered(examples, features, self.get_eval_dataloader(features), metric_key_prefix).metrics
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def predict(
        self, predict_dataset: Any, predict_examples: Any, ignore_keys: Any = None, metric_key_prefix: str = "test"
    ) -> Any:
        loader = self.get_test_dataloader(predict_dataset)
        return self.answered(predict_examples, predict_dataset, loader, metric_key_prefix)


def questions_on(source: str) -> Iterator[dict[str, Any]]:
    """Yield questions on the functions of a module, with their answers and where these begin."""
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef) or node.decorator_list:
            continue
        context = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno]))[:240]
        parts: dict[str, ast.AST | None] = {"the last argument": [None, *node.args.args][-1]}
        for statement in node.body:
            if isinstance(statement, ast.Return):
                parts["what it returns"] = statement.value
            elif isinstance(statement, ast.Assign):
                parts["what it sets"] = statement.targets[0]
        answers = {question: ast.unparse(part) for question, part in parts.items() if part is not None}
        for question, answer in {"its name": node.name, **answers}.items():
            start = context.find(answer, 4)
            if start > 0 and len(answer) < 40:
                yield {"question": question, "context": context, "answer": answer, "answer_start": start}


def load_data(*sizes: int) -> list[Any]:
    """Return sets of these sizes, which have no question in common."""
    files = [file for name in PACKAGES for file in sorted(Path(sysconfig.get_path("stdlib"), name).rglob("*.py"))]
    rows = [row for file in files for row in questions_on(file.read_text(encoding="utf-8"))]
    random.Random(0).shuffle(rows)
    whole = Dataset.from_list([{"id": str(number), **row} for number, row in enumerate(rows[: sum(sizes)])])
    return [whole.select(range(sum(sizes[:i]), sum(sizes[: i + 1]))) for i in range(len(sizes))]


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer made from these texts; a token is a part of a name, or one other character."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Punctuation(), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=1000, special_tokens=["[PAD]", "[CLS]", "[SEP]"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]",
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )  # fmt: skip


def best_answers(max_answer_length: int, examples: Any, features: Any, predictions: Any) -> EvalPrediction:
    """Return the likeliest span of each example, over all parts of its source."""
    best: dict[str, tuple[float, str]] = {}
    contexts = dict(zip(examples["id"], examples["context"], strict=True))
    for feature, starts, ends in zip(features, *predictions, strict=True):
        offsets = feature["offset_mapping"]
        scores = np.add.outer(starts[: len(offsets)], ends[: len(offsets)])
        inside = np.array([offset is not None for offset in offsets])
        length = np.subtract.outer(np.arange(len(offsets)), np.arange(len(offsets))).T
        scores[~(np.outer(inside, inside) & (length >= 0) & (length < max_answer_length))] = -np.inf
        start, end = np.unravel_index(scores.argmax(), scores.shape)
        name, score = feature["example_id"], float(scores[start, end])
        if score > best.get(name, (-np.inf, ""))[0]:
            best[name] = score, contexts[name][offsets[start][0] : offsets[end][1]].strip()
    answers: Any = [best.get(name, (0.0, ""))[1] for name in examples["id"]]
    return EvalPrediction(answers, examples["answer"])


def compute_metrics(answers: EvalPrediction) -> dict[str, float]:
    pairs: Any = zip(answers.predictions, answers.label_ids, strict=True)
    exact = [float(answer == expected) for answer, expected in pairs]
    return {"exact_match": 100 * sum(exact) / len(exact)}


def main() -> None:
    parser = HfArgumentParser((ModelArguments, DataArguments, TrainingArguments))  # type: ignore[arg-type]
    parser.set_defaults(
        output_dir="runs/hf/question_answering",
        do_train=True,
        do_eval=True,
        do_predict=True,
        num_train_epochs=4,
        per_device_train_batch_size=32,
        per_device_eval_batch_size=128,
        learning_rate=2e-3,
        warmup_steps=0.1,
        logging_steps=50,
        save_strategy="epoch",
        metric_for_best_model="exact_match",
    )
    model_args, data_args, training_args = parser.parse_args_into_dataclasses()
    disable_progress_bars()
    set_seed(training_args.seed)

    train_examples, eval_examples, predict_examples = load_data(
        data_args.max_train_samples, data_args.max_eval_samples, data_args.max_predict_samples
    )
    tokenizer: Any
    model: Any
    if model_args.model_name_or_path is not None:
        tokenizer = AutoTokenizer.from_pretrained(model_args.model_name_or_path)
        model = AutoModelForQuestionAnswering.from_pretrained(model_args.model_name_or_path)
    else:
        tokenizer = train_tokenizer([*train_examples["context"], *train_examples["question"]])
        config = BertConfig(
            vocab_size=len(tokenizer),
            hidden_size=model_args.hidden_size,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=2 * model_args.hidden_size,
            max_position_embeddings=data_args.max_seq_length,
            hidden_dropout_prob=model_args.dropout,
            attention_probs_dropout_prob=model_args.dropout,
            pad_token_id=tokenizer.pad_token_id,
        )
        model = AutoModelForQuestionAnswering.from_config(config)

    def parts_of(rows: dict[str, list]) -> Any:
        """Return questions with parts of their sources, and which characters each token of a source is."""
        features = tokenizer(
            rows["question"], rows["context"], truncation="only_second", max_length=data_args.max_seq_length,
            stride=data_args.doc_stride, return_overflowing_tokens=True, return_offsets_mapping=True,
        )  # fmt: skip
        features["row"] = features.pop("overflow_to_sample_mapping")
        for i, offsets in enumerate(features["offset_mapping"]):
            features["offset_mapping"][i] = [
                offset if sequence == 1 else None
                for offset, sequence in zip(offsets, features.sequence_ids(i), strict=True)
            ]
        return features

    def to_train(rows: dict[str, list]) -> Any:
        """Return the parts with the first and the last token of the answer; of those without it, that is the first."""
        features = parts_of(rows)
        features["start_positions"], features["end_positions"] = [], []
        for row, offsets in zip(features.pop("row"), features.pop("offset_mapping"), strict=True):
            first = rows["answer_start"][row]
            last = first + len(rows["answer"][row])
            starts = [i for i, offset in enumerate(offsets) if offset and offset[0] <= first < offset[1]]
            ends = [i for i, offset in enumerate(offsets) if offset and offset[0] < last <= offset[1]]
            is_inside = bool(starts and ends)
            features["start_positions"].append(starts[0] if is_inside else 0)
            features["end_positions"].append(ends[0] if is_inside else 0)
        return features

    def to_answer(rows: dict[str, list]) -> Any:
        """Return the parts, each with the question that it belongs to."""
        features = parts_of(rows)
        features["example_id"] = [rows["id"][row] for row in features.pop("row")]
        return features

    with training_args.main_process_first(desc="tokenizing"):
        columns = train_examples.column_names
        train = train_examples.map(to_train, batched=True, remove_columns=columns)
        valid, test = (
            part.map(to_answer, batched=True, remove_columns=columns) for part in (eval_examples, predict_examples)
        )

    trainer = QuestionAnsweringTrainer(
        model=model,
        args=training_args,
        train_dataset=train if training_args.do_train else None,
        eval_dataset=valid if training_args.do_eval else None,
        eval_examples=eval_examples,
        processing_class=tokenizer,
        compute_metrics=compute_metrics,
        post_process_function=functools.partial(best_answers, data_args.max_answer_length),
    )

    if training_args.do_train:
        result = trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
        trainer.save_model()
        metrics = {**result.metrics, "train_samples": len(train)}
        trainer.log_metrics("train", metrics)
        trainer.save_metrics("train", metrics)
        trainer.save_state()

    if training_args.do_eval:
        metrics = trainer.evaluate()
        trainer.log_metrics("eval", metrics)
        trainer.save_metrics("eval", metrics)

    if training_args.do_predict:
        answers, _, metrics = trainer.predict(test, predict_examples, metric_key_prefix="predict")
        trainer.log_metrics("predict", metrics)
        trainer.save_metrics("predict", metrics)
        if trainer.is_world_process_zero():
            answered = dict(zip(predict_examples["id"], answers, strict=True))
            Path(training_args.output_dir, "predictions.json").write_text(json.dumps(answered), encoding="utf-8")


if __name__ == "__main__":
    main()
