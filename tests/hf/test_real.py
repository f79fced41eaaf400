"""A real tokenizer, collator, dataset and report."""

import random
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from recipes import fit, same, weights
from tiny import bert
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from transformers import BertForSequenceClassification, EvalPrediction, PreTrainedTokenizerFast

from omnitrain import HFTrainer

datasets = pytest.importorskip("datasets")
SIZE = 400
STDLIB = Path(sysconfig.get_path("stdlib"))
TEXTS = [(STDLIB / name).read_text(encoding="utf-8") for name in ("abc.py", "bisect.py", "heapq.py", "queue.py")]
LINES = [line for text in TEXTS for line in text.splitlines() if len(line.split()) > 2]
"""Lines of the standard library's source, which are of many lengths."""


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer that has been trained on the standard library's source."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["[PAD]", "[CLS]", "[SEP]"]
    trainer = trainers.BpeTrainer(
        vocab_size=SIZE, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )  # fmt: skip
    tokenizer.train_from_iterator(LINES, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]", bos_token="[CLS]",
        eos_token="[SEP]", model_max_length=24,
    )  # fmt: skip


@pytest.fixture(scope="module")
def parts(tokenizer: Any) -> Any:
    """Lines to train on and to evaluate on, of which the label says whether they define or return something."""
    datasets.disable_progress_bars()
    lines = random.Random(0).sample(LINES, 48)
    rows = {"text": lines, "label": [int("def" in line or "return" in line) for line in lines]}
    dataset = datasets.Dataset.from_dict({**rows, "number": list(range(48))})  # a column that no model takes
    dataset = dataset.map(lambda row: tokenizer(row["text"], truncation=True))
    return dataset.select(range(35)), dataset.select(range(35, 48))


DEFAULTS = {
    "num_train_epochs": 2, "per_device_train_batch_size": 8, "learning_rate": 1e-2, "logging_steps": 2,
    "disable_tqdm": True,
}  # fmt: skip


def classifier() -> BertForSequenceClassification:
    return bert(num_labels=2, vocab_size=SIZE, max_position_embeddings=32).float()


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    assert isinstance(prediction.predictions, np.ndarray)
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def test_classifier_is_trained_evaluated_reported_and_saved(
    parts: Any, tokenizer: Any, arguments: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "logs"))
    args = arguments(
        per_device_eval_batch_size=5, eval_strategy="epoch", save_strategy="epoch", load_best_model_at_end=True,
        metric_for_best_model="eval_accuracy", report_to=["tensorboard"], logging_steps=4,
    )  # fmt: skip
    if vars(args).get("logging_dir"):  # of older releases
        args.logging_dir = str(tmp_path / "logs")
    trainer = fit(HFTrainer(
        model=classifier(), training_args=args, train_dataset=parts[0], eval_dataset=parts[1],
        processing_class=tokenizer, compute_metrics=accuracy,
    ))  # fmt: skip
    best = trainer.metrics["best_valid"]
    assert best["eval_accuracy"] == max(row["eval_accuracy"] for row in trainer.metrics["valid"])
    losses = [row["train_loss"] for row in trainer.metrics["train_metrics_history"]]
    assert len(losses) == 2 and losses[-1] < losses[0]
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(next((tmp_path / "logs").rglob("events.out.tfevents*"))))
    events.Reload()
    assert [event.step for event in events.Scalars("eval/accuracy")] == [5, 10]
    assert [event.step for event in events.Scalars("train/loss")] == [4, 8]
    assert trainer.evaluate()["eval_accuracy"] == best["eval_accuracy"]  # the best weights are in the model
    predictions = trainer.predict(parts[1])
    assert predictions.predictions.shape == (13, 2) and predictions.labels.tolist() == parts[1]["label"]
    checkpoint = tmp_path / "run" / trainer.metrics["best_checkpoint"]
    for folder in (checkpoint, trainer.save_model(tmp_path / "final")):
        model = BertForSequenceClassification.from_pretrained(folder)
        assert same(weights(model), weights(trainer.get_model()))
        assert PreTrainedTokenizerFast.from_pretrained(folder)("return x") == tokenizer("return x")


def test_tokenizer_of_a_collator_is_saved(parts: Any, tokenizer: Any, arguments: Any, tmp_path: Path) -> None:
    files = []
    for kind in (transformers.Trainer, HFTrainer):
        folder = tmp_path / kind.__name__
        args = arguments(kind.__name__, max_steps=1, save_strategy="steps")
        collator = transformers.DataCollatorWithPadding(tokenizer)
        trainer: Any = fit(kind(classifier(), args, train_dataset=parts[0], data_collator=collator))
        trainer.save_model(str(folder / "model"))
        files.append([{path.name for path in folder.glob(f"{name}/*token*")} for name in ("checkpoint-*", "model")])
        assert transformers.AutoTokenizer.from_pretrained(folder / "model")("a b") == tokenizer("a b")
    assert files[0] == files[1] and all(files[1])
