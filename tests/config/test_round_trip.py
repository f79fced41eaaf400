"""What a run writes into `config.yaml` starts the same run again, bit for bit."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import named
import pytest
import torch
from marks import thinned
from torch import nn
from transformers import TrainingArguments

from omnitrain import EMA, EarlyStopping, HFTrainer, HFTrainingArguments, Trainer, instantiate
from omnitrain.config.configuration import Config
from omnitrain.config.plain_yaml import write
from omnitrain.optim.schedules import CosineAnnealingScheduler

BASE: dict[str, Any] = {
    "model": "named.Net", "train_dataset": "named.rows", "loss_fn": "named.loss", "epochs": 2, "learning_rate": 1e-2,
    "progress_bar": False,
}  # fmt: skip
EVAL = {"eval_dataset": {"class_path": "named.rows", "init_args": {"seed": 1}}}
ARGUMENTS = {"num_train_epochs": 2, "use_cpu": True, "report_to": "none", "disable_tqdm": True}


def part(class_path: str, **init_args: Any) -> dict[str, Any]:
    return {"class_path": class_path, "init_args": init_args}


RUNS: dict[str, dict[str, Any]] = {
    "parts": {
        "model": part("named.Net", width=5, activation="torch.nn.Tanh", kind="deep", scale=0.5), "learning_rate": 2e-5,
        "optimizer": part("torch.optim.SGD", lr=0.1, momentum=0.9), "scheduler_interval": "epoch",
        "lr_scheduler": part("StepLR", step_size=1, gamma=0.5), "train_dataset": part("named.drawn", size=24),
        "loss_fn": part("CrossEntropyLoss", label_smoothing=0.1), "seed": 7,
    },
    "names": {
        "model": part("named.Net", dropout=0.5), "optimizer": "adamw", "weight_decay": 0.1, "lr_scheduler": "linear",
        "warmup_steps": 0.25, "loss_fn": part("named.weighted_loss", weight=0.25), "batch_size": 4,
        "data_collator": part("named.make_collate", times=0.5), "gradient_accumulation_steps": 2,
        "max_grad_norm": 0.1, "drop_last": True,
    },
    "its own loss": {"model": part("named.Own", width=4), "train_dataset": "named.dicts", "loss_fn": None},
    "several sets": {"eval_dataset": {"a": "named.rows", "b": part("named.rows", size=8)}, "save_total_limit": 1},
    "schedule": {"lr_scheduler": part("CosineAnnealingScheduler", t_max="0.5dur", min_lr=1e-4, warmup="1ba")},
    "loader": {
        "train_dataset": None, "batch_size": None,
        "train_loader": part("named.loader", dataset=part("named.rows"), batch_size=8),
    },
    "groups": {"param_groups": [{"match": "bias", "weight_decay": 0.0, "lr_scale": 2.0}], "freeze": ["body.3"]},
    "growing batch": {"global_batch_size": {0: 8, "0.5dur": 16}, "batch_size": 8},
    "callbacks": {
        **EVAL, "callbacks": [part("EarlyStopping", patience=1), part("named.Counts", every=2, name="n")],
        "compute_metrics": ["accuracy", "named.share_of_ones"], "optimization_metric": "accuracy",
    },
    "algorithms": {**EVAL, "algorithms": [part("EMA", decay=0.9), part("SAM", rho=0.05)]},
    "accelerate": {"class_path": "AccelerateTrainer", **EVAL},
    "transformers": {"class_path": "HFTrainer", "training_args": ARGUMENTS, "epochs": None, "learning_rate": None},
    "ours by transformers": {"class_path": "HFTrainer", **EVAL, "algorithms": ["EMA"]},
    "custom trainer": {"class_path": "named.MyTrainer"},
    "references": {"learning_rate": "${vars.rate}", "model": part("named.Net", width="${trainer.batch_size}")},
}  # fmt: skip


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def outcome(trainer: Any) -> dict[str, Any]:
    """Return weights and rows of a run, as texts that differ if one bit does."""
    history = trainer.train()["train_metrics_history"] + trainer.metrics["valid"]
    rows = [{name: repr(value) for name, value in row.items() if "second" not in name} for row in history]
    assert rows
    return {"rows": rows} | {name: tensor.tolist() for name, tensor in trainer.get_model().state_dict().items()}


SLOW = ("several sets", "growing batch", "accelerate", "ours by transformers", "custom trainer")


@pytest.mark.parametrize("name", thinned(RUNS, RUNS.keys() - SLOW))
def test_written_config_starts_same_run(folder: Path, name: str) -> None:
    arguments = {key: value for key, value in {**BASE, "batch_size": 8, **RUNS[name]}.items() if value is not None}
    place = "save_dir" if "training_args" not in arguments else "training_args.output_dir"
    (folder / "a.yaml").write_text(write({"vars": {"rate": 0.02}, "trainer": arguments}))
    first = outcome(Config.read("a.yaml", overrides={f"trainer.{place}": "one"}).make_trainer())
    written = folder / "one" / "config.yaml"
    assert "???" not in written.read_text()
    again = Config.read(written, overrides={f"trainer.{place}": "two"}).make_trainer()
    torch.rand(3)  # what came before makes no difference
    assert outcome(again) == first
    second = (folder / "two" / "config.yaml").read_text()
    assert second == written.read_text().replace("_dir: one", "_dir: two")


def test_python_run_is_written_by_names(folder: Path) -> None:
    model = instantiate("named.Net", {"width": 5, "activation": nn.Tanh()})
    watching = [EarlyStopping(patience=2), named.Counts(2, name="n")]
    trainer = Trainer(
        model, instantiate("named.rows", {"size": 24}), instantiate("named.rows", [16, 1]), epochs=2,
        max_duration="2ep", loss_fn=nn.CrossEntropyLoss(label_smoothing=0.1), optimizer=torch.optim.SGD,
        learning_rate=0.1, lr_scheduler=CosineAnnealingScheduler(min_lr=1e-3), callbacks=watching,
        compute_metrics=["accuracy", named.share_of_ones], algorithms=[EMA(decay=0.9)], save_dir=folder / "one",
        autocast=torch.float32, progress_bar=False,
    )  # fmt: skip
    assert not trainer.config.missing, trainer.config.text()
    first = outcome(trainer)
    assert outcome(Config.read("one/config.yaml", overrides={"trainer.save_dir": "two"}).make_trainer()) == first


def test_unnamed_part_is_rejected_until_replaced(folder: Path) -> None:
    Trainer(
        nn.Linear(4, 2), named.rows(), loss_fn=lambda a, b: named.loss(a, b), epochs=1, save_dir="one",
        progress_bar=False, callbacks=[named.Counts()], data_collator=lambda samples: named.collate(samples),
    ).train()  # fmt: skip
    lines = (folder / "one" / "config.yaml").read_text().splitlines()
    kinds = {"model": "torch.nn.modules.linear.Linear", "train_dataset": "torch.utils.data.dataset.TensorDataset",
             "loss_fn": "builtins.function"}  # fmt: skip
    comments = {
        f"# trainer.{name}: an object of {kind}, whose arguments are not known." for name, kind in kinds.items()
    }
    assert {"  model: ???", *comments} <= {*lines}
    errors = [
        str(error).partition("`trainer.")[2].partition("`")[0] for error in Config.read("one/config.yaml").check()
    ]
    assert errors == ["model", "train_dataset", "data_collator", "loss_fn"]
    names = {
        "train_dataset": "named.rows", "loss_fn": "named.loss", "data_collator": "named.collate",
        "model": part("torch.nn.Linear", in_features=4, out_features=2),
    }  # fmt: skip
    (folder / "parts.yaml").write_text(write({"trainer": names}))
    Config.read("one/config.yaml", "parts.yaml", overrides={"trainer.save_dir": "two"}).train()
    assert (folder / "two" / "last").exists()


def test_samples_constructors_and_secrets_are_not_written(folder: Path) -> None:
    config = Trainer(named.Own(), named.dicts(), {"a": named.rows()}, progress_bar=False).config
    values = config.values["trainer"]
    assert (values["train_dataset"], values["eval_dataset"]) == ("???", {"a": "???"})
    assert config._repr_html_().startswith("<pre># This run was made in Python")
    assert "a list of samples" in config.missing["trainer", "train_dataset"]
    config = Trainer(named.Own(), instantiate("named.dicts"), progress_bar=False).config
    assert config.values["trainer"]["train_dataset"] == {"class_path": "named.dicts"}
    config = named.OtherTrainer(named.Net(), named.rows(), loss_fn=named.loss, progress_bar=False).config
    assert config.values["trainer"]["class_path"] == "???"
    assert "own constructor" in config.missing["trainer", "class_path"]
    arguments = HFTrainingArguments(output_dir="hf", use_cpu=True, report_to="none", hub_token="hf_abcdefghijklmnop")
    config = HFTrainer(named.Net(), arguments, named.rows(), loss_fn=named.loss, progress_bar=False).config
    assert "hf_abc" not in str(config)
    assert "secret" in config.missing["trainer", "training_args", "init_args", "hub_token"]


def test_unused_parts_are_freed(folder: Path) -> None:
    """Except some lists, to which there are no weak references."""
    models = weakref.WeakSet(instantiate("named.Net") for _ in range(3))
    samples = [weakref.ref(next(iter(instantiate("named.dicts", {"size": 1})[0].values()))) for _ in range(40)]
    gc.collect()
    assert not models and sum(sample() is not None for sample in samples) <= 32


def test_training_arguments_are_written_with_changes(folder: Path) -> None:
    arguments = TrainingArguments(
        output_dir="one", num_train_epochs=2, learning_rate=1e-2, lr_scheduler_type="cosine", warmup_steps=2,
        optim="sgd", per_device_train_batch_size=4, use_cpu=True, report_to="none", seed=3, max_grad_norm=0.1,
    )  # fmt: skip
    parts = instantiate("named.Net"), arguments, instantiate("named.rows")
    first = outcome(HFTrainer(*parts, loss_fn=named.loss, progress_bar=False))
    assert "???" not in (folder / "one" / "config.yaml").read_text()
    again = Config.read("one/config.yaml", overrides={"trainer.training_args.output_dir": "two"}).make_trainer()
    assert outcome(again) == first
