"""Summarize functions of Python's standard library: what statements are they made of?

    python examples/hf/summarization.py
    python examples/hf/summarization.py --eval_strategy epoch --generation_num_beams 2

A script as transformers' users write them; `--help` lists its arguments, which are those of `Seq2SeqTrainingArguments`
and a few of its own. A summary is such as "assign if return", and in evaluations the model generates it. Nothing is
downloaded; the tokenizer is made here, and the model is a T5 of two layers that starts from nothing. Needs the extra
`hf` and the package `datasets`.
"""

from __future__ import annotations

import ast
import random
import sysconfig
import textwrap
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset, disable_progress_bars
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    EvalPrediction,
    HfArgumentParser,
    PreTrainedTokenizerFast,
    Seq2SeqTrainingArguments,
    T5Config,
    set_seed,
)

from omnitrain import HFTrainer as Seq2SeqTrainer  # or: from transformers import Seq2SeqTrainer


@dataclass
class ModelArguments:
    model_name_or_path: str | None = field(default=None, metadata={"help": "A model to go on from; else a new one."})
    hidden_size: int = field(default=64, metadata={"help": "Of a new model."})
    dropout: float = field(default=0.0, metadata={"help": "Of a new model."})


@dataclass
class DataArguments:
    max_source_length: int = field(default=48, metadata={"help": "Tokens of a function; the rest is left out."})
    max_target_length: int = field(default=8, metadata={"help": "Tokens of a summary; the rest is left out."})
    max_train_samples: int = field(default=1400, metadata={"help": "Functions to train on."})
    max_eval_samples: int = field(default=200, metadata={"help": "Functions to evaluate on."})
    max_predict_samples: int = field(default=200, metadata={"help": "Functions to summarize at the end."})


def functions_in(source: str) -> Iterator[dict[str, str]]:
    """Yield what short functions of a module do, and the kinds of their statements."""
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef):
            text = textwrap.dedent("\n".join(lines[node.body[0].lineno - 1 : node.end_lineno]))
            if len(node.body) > 1 and len(text) < 240:
                yield {"text": text, "summary": " ".join(type(statement).__name__.lower() for statement in node.body)}


def load_data(*sizes: int) -> list[Any]:
    """Return sets of these sizes, which have no function in common."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    rows = {row["text"]: row for file in files for row in functions_in(file.read_text(encoding="utf-8"))}
    chosen = random.Random(0).sample(list(rows.values()), sum(sizes))
    whole = Dataset.from_list(chosen)
    return [whole.select(range(sum(sizes[:i]), sum(sizes[: i + 1]))) for i in range(len(sizes))]


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer made from these texts, which ends each of them."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Punctuation(), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=1000, special_tokens=["<pad>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>")


def f1_of_words(text: str, expected: str) -> float:
    """Return how well the words of two texts agree, as ROUGE-1 does."""
    shared = (Counter(text.split()) & Counter(expected.split())).total()
    return 2 * shared / max(1, len(text.split()) + len(expected.split()))


def main() -> None:
    parser = HfArgumentParser((ModelArguments, DataArguments, Seq2SeqTrainingArguments))  # type: ignore[arg-type]
    parser.set_defaults(
        output_dir="runs/hf/summarization",
        do_train=True,
        do_eval=True,
        do_predict=True,
        num_train_epochs=4,
        per_device_train_batch_size=32,
        per_device_eval_batch_size=100,
        learning_rate=3e-3,
        warmup_steps=0.1,
        logging_steps=50,
        save_strategy="epoch",
        metric_for_best_model="rouge1",
        predict_with_generate=True,
    )
    model_args, data_args, training_args = parser.parse_args_into_dataclasses()
    training_args.generation_max_length = training_args.generation_max_length or data_args.max_target_length + 1
    disable_progress_bars()
    set_seed(training_args.seed)

    train, valid, test = load_data(
        data_args.max_train_samples, data_args.max_eval_samples, data_args.max_predict_samples
    )
    tokenizer: Any
    model: Any
    if model_args.model_name_or_path is not None:
        tokenizer = AutoTokenizer.from_pretrained(model_args.model_name_or_path)
        model = AutoModelForSeq2SeqLM.from_pretrained(model_args.model_name_or_path)
    else:
        tokenizer = train_tokenizer([*train["text"], *train["summary"]])
        special = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
        special["decoder_start_token_id"] = tokenizer.pad_token_id
        config = T5Config(
            vocab_size=len(tokenizer),
            d_model=model_args.hidden_size,
            d_kv=model_args.hidden_size // 4,
            d_ff=2 * model_args.hidden_size,
            num_layers=2,
            num_heads=4,
            dropout_rate=model_args.dropout,
            **special,
        )
        model = AutoModelForSeq2SeqLM.from_config(config)

    def tokenized(rows: dict[str, list]) -> Any:
        features = tokenizer(rows["text"], truncation=True, max_length=data_args.max_source_length)
        labels = tokenizer(text_target=rows["summary"], truncation=True, max_length=data_args.max_target_length)
        return {**features, "labels": labels["input_ids"]}

    with training_args.main_process_first(desc="tokenizing"):
        columns = train.column_names
        train, valid, test = (
            part.map(tokenized, batched=True, remove_columns=columns) for part in (train, valid, test)
        )

    def texts_of(tokens: Any) -> list[str]:
        known = np.where(tokens == -100, tokenizer.pad_token_id, tokens)
        return [text.strip() for text in tokenizer.batch_decode(known, skip_special_tokens=True)]

    def compute_metrics(evaluation: EvalPrediction) -> dict[str, float]:
        summaries, expected = texts_of(evaluation.predictions), texts_of(evaluation.label_ids)
        pairs = list(zip(summaries, expected, strict=True))
        return {
            "rouge1": 100 * float(np.mean([f1_of_words(*pair) for pair in pairs])),
            "exact": 100 * float(np.mean([summary == reference for summary, reference in pairs])),
        }

    trainer = Seq2SeqTrainer(
        model=model,
        args=training_args,
        train_dataset=train if training_args.do_train else None,
        eval_dataset=valid if training_args.do_eval else None,
        processing_class=tokenizer,
        data_collator=DataCollatorForSeq2Seq(tokenizer, model=model),
        compute_metrics=compute_metrics if training_args.predict_with_generate else None,
    )

    if training_args.do_train:
        result = trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
        trainer.save_model()
        metrics = {**result.metrics, "train_samples": len(train)}
        trainer.log_metrics("train", metrics)
        trainer.save_metrics("train", metrics)
        trainer.save_state()

    if training_args.do_eval:
        metrics = trainer.evaluate(metric_key_prefix="eval")
        trainer.log_metrics("eval", metrics)
        trainer.save_metrics("eval", metrics)

    if training_args.do_predict:
        output: Any = trainer.predict(test, metric_key_prefix="predict")
        trainer.log_metrics("predict", output.metrics)
        trainer.save_metrics("predict", output.metrics)
        if trainer.is_world_process_zero() and training_args.predict_with_generate:
            summaries = texts_of(output.predictions)
            Path(training_args.output_dir, "predictions.txt").write_text("\n".join(summaries), encoding="utf-8")


if __name__ == "__main__":
    main()
