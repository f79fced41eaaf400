"""Tell from four lines of Python which package they are from.

    python examples/hf/text_classification.py
    python examples/hf/text_classification.py --num_train_epochs 8 --eval_strategy epoch --load_best_model_at_end

A script as transformers' users write them; `--help` lists its arguments, which are those of `TrainingArguments` and a
few of its own. The text is the source of Python's own standard library, so that nothing is downloaded; the tokenizer is
made here, and the model is a BERT of two layers that starts from nothing. Needs the extra `hf` and the package
`datasets`.
"""

from __future__ import annotations

import random
import sysconfig
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from datasets import Dataset, disable_progress_bars
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    EvalPrediction,
    HfArgumentParser,
    PreTrainedTokenizerFast,
    TrainingArguments,
    pipeline,
    set_seed,
)

from omnitrain import HFTrainer as Trainer  # or: from transformers import Trainer

PACKAGES = ("asyncio", "email", "http", "multiprocessing", "unittest", "xml")


@dataclass
class ModelArguments:
    model_name_or_path: str | None = field(default=None, metadata={"help": "A model to go on from; else a new one."})
    hidden_size: int = field(default=64, metadata={"help": "Of a new model."})
    dropout: float = field(default=0.1, metadata={"help": "Of a new model."})


@dataclass
class DataArguments:
    max_seq_length: int = field(default=48, metadata={"help": "Tokens of a piece of text; the rest is left out."})
    max_train_samples: int = field(default=2400, metadata={"help": "Pieces to train on."})
    max_eval_samples: int = field(default=600, metadata={"help": "Pieces to evaluate on."})
    max_predict_samples: int = field(default=600, metadata={"help": "Pieces to predict."})


def pieces_of(package: str) -> list[str]:
    """Return the sources of a package in pieces of four lines, none of them twice."""
    pieces: dict[str, None] = {}
    for module in sorted(Path(sysconfig.get_path("stdlib"), package).rglob("*.py")):
        lines = [line for line in module.read_text(encoding="utf-8").splitlines() if line.strip()]
        pieces.update(dict.fromkeys("\n".join(lines[start : start + 4]) for start in range(0, len(lines), 4)))
    return list(pieces)


def load_data(*sizes: int) -> list[Any]:
    """Return sets of these sizes, which have no piece in common, with about as many pieces of each package."""
    chance, rows = random.Random(0), []
    for label, package in enumerate(PACKAGES):
        pieces = pieces_of(package)
        chosen = chance.sample(pieces, min(len(pieces), -(-sum(sizes) // len(PACKAGES))))
        rows += [{"text": piece, "label": label} for piece in chosen]
    chance.shuffle(rows)
    return [Dataset.from_list(rows[sum(sizes[:i]) : sum(sizes[: i + 1])]) for i in range(len(sizes))]


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer made from these texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=2000, special_tokens=["[PAD]", "[CLS]"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A", special_tokens=[("[CLS]", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", cls_token="[CLS]")


def compute_metrics(evaluation: EvalPrediction) -> dict[str, float]:
    scores: Any = evaluation.predictions
    return {"accuracy": float((scores.argmax(axis=-1) == evaluation.label_ids).mean())}


def main() -> None:
    parser = HfArgumentParser((ModelArguments, DataArguments, TrainingArguments))  # type: ignore[arg-type]
    parser.set_defaults(
        output_dir="runs/hf/text_classification",
        do_train=True,
        do_eval=True,
        do_predict=True,
        num_train_epochs=4,
        per_device_train_batch_size=32,
        per_device_eval_batch_size=128,
        learning_rate=2e-3,
        lr_scheduler_type="cosine",
        warmup_steps=0.1,
        logging_steps=50,
        save_strategy="epoch",
        metric_for_best_model="accuracy",
    )
    model_args, data_args, training_args = parser.parse_args_into_dataclasses()
    disable_progress_bars()
    set_seed(training_args.seed)

    train, valid, test = load_data(
        data_args.max_train_samples, data_args.max_eval_samples, data_args.max_predict_samples
    )
    tokenizer: Any
    model: Any
    if model_args.model_name_or_path is not None:
        tokenizer = AutoTokenizer.from_pretrained(model_args.model_name_or_path)
        model = AutoModelForSequenceClassification.from_pretrained(model_args.model_name_or_path)
    else:
        tokenizer = train_tokenizer(train["text"])
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
            id2label=dict(enumerate(PACKAGES)),
            label2id={package: label for label, package in enumerate(PACKAGES)},
        )
        model = AutoModelForSequenceClassification.from_config(config)

    def tokenized(rows: dict[str, list]) -> Any:
        return tokenizer(rows["text"], truncation=True, max_length=data_args.max_seq_length)

    with training_args.main_process_first(desc="tokenizing"):
        train, valid, test = (part.map(tokenized, batched=True, remove_columns="text") for part in (train, valid, test))

    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=train if training_args.do_train else None,
        eval_dataset=valid if training_args.do_eval else None,
        processing_class=tokenizer,
        compute_metrics=compute_metrics,
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
        output: Any = trainer.predict(test, metric_key_prefix="predict")
        trainer.log_metrics("predict", output.metrics)
        trainer.save_metrics("predict", output.metrics)
        if trainer.is_world_process_zero():
            pairs = zip(output.label_ids, output.predictions.argmax(axis=-1), strict=True)
            lines = [f"{PACKAGES[label]}\t{PACKAGES[guess]}\n" for label, guess in pairs]
            Path(training_args.output_dir, "predictions.tsv").write_text("".join(lines), encoding="utf-8")

    if training_args.do_train and trainer.is_world_process_zero():
        tell = pipeline("text-classification", model=training_args.output_dir, device="cpu")
        for text in ("loop.call_soon(callback)", "self.assertEqual(first, second)", "msg['Subject'] = header"):
            answer = tell(text)[0]
            print(f"{text}: {answer['label']} ({answer['score']:.2f})")


if __name__ == "__main__":
    main()
