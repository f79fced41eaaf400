"""Tell from four lines of Python which package they are from, with `HFTrainer`.

    python examples/hf_text_classification.py

A script for `transformers.Trainer` with another import. The text is the source of Python's own standard library, so
nothing is downloaded; the tokenizer is trained here, and the model is a BERT of two layers that starts from nothing. It
takes less than half a minute on one core. Needs the extra `hf` and the package `datasets`.
"""

from __future__ import annotations

import argparse
import random
import sysconfig
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, disable_progress_bars
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    EvalPrediction,
    PreTrainedTokenizerFast,
    TrainingArguments,
    pipeline,
)

from omnitrain import HFTrainer, MetricsDict

PACKAGES = ("asyncio", "email", "http", "multiprocessing", "unittest", "xml")

# --- data


def load_data(size: int) -> tuple[Dataset, Dataset, Dataset]:
    """Return pieces of four lines to train on, to evaluate on and to test on, as many of each package."""
    rows = []
    chance = random.Random(0)
    for label, package in enumerate(PACKAGES):
        pieces = set()
        for module in sorted(Path(sysconfig.get_path("stdlib"), package).rglob("*.py")):
            lines = [line for line in module.read_text(encoding="utf-8").splitlines() if line.strip()]
            pieces |= {"\n".join(lines[start : start + 4]) for start in range(0, len(lines), 4)}
        rows += [{"text": text, "label": label} for text in chance.sample(sorted(pieces), size // len(PACKAGES))]
    parts = Dataset.from_list(rows).train_test_split(0.3, seed=0)
    rest = parts["test"].train_test_split(0.5, seed=0)
    return parts["train"], rest["train"], rest["test"]


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer made from these texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    special = ["[PAD]", "[CLS]"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=2000, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A", special_tokens=[("[CLS]", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", cls_token="[CLS]", model_max_length=64
    )


# --- training: from here on, all but the import is what a script for transformers.Trainer has


def compute_metrics(evaluation: EvalPrediction) -> dict[str, float]:
    return {"accuracy": float((evaluation.predictions.argmax(axis=-1) == evaluation.label_ids).mean())}


def main(size: int = 4800, epochs: float = 4, out: Path = Path("runs/hf_text_classification")) -> MetricsDict:
    disable_progress_bars()
    train, valid, test = load_data(size)
    tokenizer = train_tokenizer(train["text"])

    def tokenized(dataset: Dataset) -> Any:
        return dataset.map(lambda rows: tokenizer(rows["text"], truncation=True), batched=True, remove_columns="text")

    args = TrainingArguments(
        output_dir=str(out),
        num_train_epochs=epochs,
        per_device_train_batch_size=32,
        per_device_eval_batch_size=128,
        learning_rate=1e-3,
        weight_decay=0.01,
        lr_scheduler_type="cosine",
        warmup_steps=0.1,
        eval_strategy="epoch",
        save_strategy="epoch",
        save_total_limit=1,
        logging_steps=50,
        load_best_model_at_end=True,
        metric_for_best_model="accuracy",
        report_to="none",
        seed=42,
    )
    torch.manual_seed(0)  # for the weights that the model starts from
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=64,
        pad_token_id=tokenizer.pad_token_id,
        id2label=dict(enumerate(PACKAGES)),
    )
    trainer = HFTrainer(
        model=BertForSequenceClassification(config),
        training_args=args,
        train_dataset=tokenized(train),
        eval_dataset=tokenized(valid),
        processing_class=tokenizer,
        compute_metrics=compute_metrics,
    )
    metrics = trainer.train(resume_from="auto")  # stop it (Ctrl-C), start it again: it goes on from the same step
    print(metrics)

    results = trainer.evaluate(tokenized(test), prefix="test")
    print(f"accuracy on {len(test)} pieces that it has not seen: {results['test_accuracy']:.3f} (chance: 0.167)")
    trainer.save_metrics("test", results)

    folder = trainer.save_model(out / "model", overwrite=True)  # weights, config and tokenizer
    tell = pipeline("text-classification", model=str(folder), device="cpu")
    for text in ("loop.call_soon(callback)", "self.assertEqual(first, second)", "msg['Subject'] = header"):
        answer = tell(text)[0]
        print(f"{text}: {answer['label']} ({answer['score']:.2f})")
    return metrics


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=4800, help="pieces of text; default: %(default)s")
    parser.add_argument("--epochs", type=float, default=4, help="default: %(default)s")
    parser.add_argument("--out", type=Path, default=Path("runs/hf_text_classification"), help="default: %(default)s")
    main(**vars(parser.parse_args()))
