"""nnScaler's configuration files, key by key, and runs that are made of what they become."""

from __future__ import annotations

import dataclasses
import operator
import textwrap
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import torch
from counting import Streamed
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from omnitrain import ConfigError, TrainHook
from omnitrain.cli.main import main
from omnitrain.config.configuration import Config
from omnitrain.config.plain_yaml import write
from omnitrain.contrib import nnscaler
from omnitrain.contrib.nnscaler import convert, make_loader, of_value

PLAIN: dict[str, Any] = {
    "model": {"type": "my.Net"},
    "optimizer": {"type": "torch.optim.Adam"},
    "dataset": {"type": "my.Rows"},
    "max_epochs": 1,
}


def trainer_of(**values: Any) -> dict[str, Any]:
    return convert({**PLAIN, **values})[0]["trainer"]


def notes_of(**values: Any) -> str:
    return "\n".join(convert({**PLAIN, **values})[1])


# --- models, data and hooks for runs


CALLS: list[Any] = []


class Net(nn.Module):
    """Takes a whole batch and returns its loss first, as nnScaler wants it; notes what else it is made of."""

    def __init__(self, dim: int = 4, shape: Shape | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(dim, 1, dtype=torch.float64)
        CALLS.append(shape)

    def forward(self, data: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        outputs = self.layer(data["data"])
        return ((outputs - data["target"]) ** 2).mean(), outputs


class Rows(Dataset[dict[str, torch.Tensor]]):
    """Rows of numbers, and a target for each."""

    def __init__(self, dim: int = 4, size: int = 12) -> None:
        self.data = torch.randn(size, dim, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        self.target = self.data.sum(1, keepdim=True)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: Any) -> dict[str, torch.Tensor]:
        return {"data": self.data[index], "target": self.target[index]}


class Backwards(DistributedSampler[Any]):
    """The other way round, every `step`-th."""

    def __init__(self, dataset: Any, num_replicas: int, rank: int, step: int = 1) -> None:
        super().__init__(dataset, num_replicas, rank, shuffle=False)
        self.step = step

    def __iter__(self) -> Any:
        return iter(list(super().__iter__())[:: -self.step])


class Counting(TrainHook):
    """Notes losses of evaluations."""

    def __init__(self, name: str) -> None:
        self.name = name

    def on_val_end(self, trainer: Any, val_loss: float) -> None:
        CALLS.append((self.name, val_loss))


@dataclasses.dataclass
class Shape:
    size: int
    kind: str
    width: int
    names: list[str]
    folder: PurePosixPath
    act: Any


# --- what keys become


def part(path: str, **init_args: Any) -> dict[str, Any]:
    return {"class_path": path, "init_args": init_args}


def model_of(**arguments: Any) -> dict[str, Any]:
    return {"model": {"type": "my.Net", "args": arguments}}


def optimizer(**values: Any) -> dict[str, Any]:
    return {"optimizer": {"type": "torch.optim.SGD", **values}}


SGD, STEPS = {"lr": 0.1, "momentum": 0.9}, {"type": "torch.optim.lr_scheduler.StepLR", "args": {"step_size": 1}}
LOADING = {"num_workers": 2, "pin_memory": True, "prefetch_factor": 4, "drop_last": True}
TWO_BY_FOUR = {"micro_batch_size": 4, "grad_accumulation_steps": 2}
SAVES = {"save_dir": "runs", "every_n_train_steps": 50, "keep_last_n_checkpoints": 3, "save_best": False}
BF16 = {"parameters": "bf16", "buffers": "bf16", "inputs": "bf16"}
HERE = "omnitrain.contrib.nnscaler"
INNER = {"__type": "my.Config", "parts": [{"__type": "my.Part", "sizes": {"a": {"__type": "my.Size"}}}]}
TYPED = {
    "text": {"__value_type": "str", "value": "1e3"},
    "number": {"__value_type": "float", "value": "1e-3"},
    "function": {"__value_type": "function", "value": "my.function"},
    "folder": {"__value_type": "pathlib.Path", "value": "runs"},
    "made": {"__value_type": "set", "value": [{"__type": "my.Thing"}]},
}
LITERALS = dict(zip("abcdefgh", ["1e-3", "true", "[1, 'x']", "(0.9, 0.99)", "None", "plain", "1/2", "1j"], strict=True))
CONVERSIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "defaults": (
        {},
        {"class_path": "AccelerateTrainer", "unit": {"class_path": "omnitrain.model.units.WholeBatchUnit"},
         "save_dir": "./checkpoints", "batch_size": 1, "shuffle": ..., "global_batch_size": ..., "eval_steps": ...,
         "save_steps": ..., "progress_bar": ...}),
    "steps": (
        {**model_of(width=32, name="small"), **optimizer(args=SGD), "lr_scheduler": STEPS, "seed": 0, "max_epochs": 4,
         "max_train_steps": "100", "tracing_from_weights": "w.pt", "precision": "bf16", "checkpoint": SAVES,
         "compute_config": {"plan_ngpus": 1, "runtime_ngpus": 1}, "enable_progress_bar": False,
         "dataset": {"type": "my.Rows", "val_args": {"split": "val"}, "test_args": {}},
         "dataset_sampler": {"train_args": {"shuffle": False}}},
        {"model": part("my.Net", width=32, name="small"), "optimizer": part("torch.optim.SGD", **SGD), "seed": 0,
         "max_grad_norm": None, "grad_reduction": ..., "lr_scheduler": part(STEPS["type"], step_size=1),
         "scheduler_interval": "epoch", "epochs": 4, "max_steps": 100, "init_from": "w.pt", "dtypes": BF16,
         "save_dir": "runs", "save_steps": 50, "save_total_limit": 3, "keep_best": 0, "class_path": "Trainer",
         "progress_bar": False, "train_dataset": {"class_path": "my.Rows"}, "test_dataset": ...,
         "eval_dataset": part("my.Rows", split="val"), "shuffle": False}),
    "epochs": (
        {**optimizer(clip_gnorm=0.0, grad_reduction="sum"), "lr_scheduler": {**STEPS, "interval": "step"},
         "dataset": {"type": "my.Rows", "test_args": {"a": 1}}, "checkpoint": {"every_n_epochs": 2},
         "dataloader": {"train_args": {**LOADING, "collate_fn": "my.collate", "persistent_workers": True}},
         "precision": {"param": "bf16", "buffer": "fp32"}, "enable_progress_bar": True,
         "micro_batch_size": 4, "global_batch_size": 16},
        {"max_grad_norm": None, "grad_reduction": "sum", "scheduler_interval": "step", "save_steps": "2ep",
         "test_dataset": part("my.Rows", a=1), **LOADING, "data_collator": {"import_path": "my.collate"},
         "dtypes": {"parameters": "bf16", "buffers": "fp32"}, "progress_bar": ..., "batch_size": 4,
         "global_batch_size": 16}),
    "every epoch": (  # which is the default
        {**optimizer(clip_gnorm="5e-1", grad_reduction="per-token-mean", aggregate_outputs_fn="my.f"),
         "dataloader": {"train_args": {"collate_fn": {"__type": "my.Collator", "size": 8}}}, **TWO_BY_FOUR,
         "checkpoint": {"every_n_epochs": 1}, "precision": "none"},
        {"max_grad_norm": 0.5, "grad_reduction": "per-token-mean", "data_collator": part("my.Collator", size=8),
         "batch_size": 4, "gradient_accumulation_steps": 2, "global_batch_size": ..., "save_steps": ...,
         "dtypes": ...}),
    "no saves": (
        {"checkpoint": {"no_save": True, "keep_last_n_checkpoints": 3}, "precision": {"input": "fp16"},
         "hook": {"type": "my.Hook", "args": {"every": 2}}},
        {"save_dir": ..., "dtypes": {"inputs": "fp16"},
         "callbacks": [part("HookCallback", hooks=part("my.Hook", every=2))]}),
    "fp16": (
        {"precision": "fp16", "compute_config": {"plan_ngpus": 1},
         "hook": {"on_epoch_end": "my.end", "before_sync_grad": "my.sync", "after_setup": None}},
        {"autocast": "fp16", "dtypes": ..., "class_path": "AccelerateTrainer",
         "callbacks": [part("HookCallback", hooks={"on_epoch_end": {"import_path": "my.end"}})]}),
    "loader": (
        {"dataloader": {"type": "my.Loader", "train_args": {"turns": 2}}, "micro_batch_size": 2,
         "dataset": {"type": "my.Rows", "train_args": {"size": 8}}, "grad_accumulation_steps": 3},
        {"train_loader": part(f"{HERE}.make_loader", loader={"import_path": "my.Loader"}, batch_size=2,
                              dataset=part("my.Rows", size=8), sampler_args={"shuffle": True}, turns=2),
         "gradient_accumulation_steps": 3, "train_dataset": ..., "batch_size": ..., "global_batch_size": ...}),
    "loader of four": (
        {"dataloader": {"type": "my.Loader"}, "micro_batch_size": 2, "global_batch_size": 16,
         "compute_config": {"runtime_ngpus": 4, "plan_ngpus": 1}},
        {"gradient_accumulation_steps": 2}),
    "model on two devices": (  # two replicas of it, and four processes here
        {**TWO_BY_FOUR, "compute_config": {"plan_ngpus": 2, "runtime_ngpus": 4}},
        {"batch_size": 4, "global_batch_size": 16, "gradient_accumulation_steps": ...}),
    "loggers": (
        {"seed": 7, "log": [
            {"type": "TensorBoardLogger", "args": {"name": "tb", "root_dir": "logs/$(seed)", "max_queue": 3}},
            {"type": "nnscaler.cli.loggers.WandbLogger", "args": {"project": "p", "entity": "e"}},
        ]},
        {"loggers": [part("TensorBoardLogger", log_dir="logs/7/tb"), part("WandbLogger", project="p", entity="e")]}),
    "values": (
        model_of(config=INNER, sizes={"1": "a", "[1]": "b"}, dollar="$$(vars.dim)", two="$$x", other="$$!(vars.dim)"),
        {"model": part(
            "my.Net", config=part("my.Config", parts=[part("my.Part", sizes={"a": {"class_path": "my.Size"}})]),
            sizes={1: "a", "[1]": "b"}, dollar="$(vars.dim)", two="$$x", other="$$!(vars.dim)",
        )}),
    "types": (
        model_of(**TYPED, **LITERALS),
        {"model": part(
            "my.Net", text="1e3", number=0.001, function={"import_path": "my.function"},
            folder=part(f"{HERE}.of_value", type={"import_path": "pathlib.Path"}, value="runs"),
            made=part(f"{HERE}.of_value", type={"import_path": "builtins.set"}, value=[{"class_path": "my.Thing"}]),
            a=0.001, b=True, c=[1, "x"], d=[0.9, 0.99], e=None, f="plain", g="1/2", h="1j",
        )}),
    "references": (
        {"micro_batch_size": 2, "log": [{"type": "TensorBoardLogger", "args": {"root_dir": "logs"}}],
         "dataset": {"type": "my.Rows", "train_args": {"size": "$(micro_batch_size)", "name": "b${micro_batch_size}"},
                     "val_args": "$(dataset.train_args)"},
         **model_of(logs="$(log.0.args.root_dir)", home="${HOME}/data", user="$(USER)"),
         "checkpoint": {"save_dir": "${RUNS}"}},
        {"train_dataset": part("my.Rows", size=2, name="b2"), "eval_dataset": part("my.Rows", size=2, name="b2"),
         "model": part("my.Net", logs="logs", home="${env:HOME}/data", user="${env:USER}"), "save_dir": "${env:RUNS}"}),
}  # fmt: skip
"""Sections of nnScaler and the arguments that they set; `...` for those that are not set."""


@pytest.mark.parametrize(("values", "expected"), CONVERSIONS.values(), ids=CONVERSIONS)
def test_convert_sets_arguments(values: dict[str, Any], expected: dict[str, Any]) -> None:
    trainer = trainer_of(**values)
    assert {name: trainer.get(name, ...) for name in expected} == expected


@pytest.mark.parametrize(("values", "expected"), [
    ({}, None),
    ({"val_every_n_train_steps": 5}, [5, "1ep"]),
    ({"val_every_n_epochs": 2, "checkpoint": {"no_save": True}}, "2ep"),
    # where it saves, it evaluates
    ({"val_every_n_epochs": 2}, ["1ep", "2ep"]),
    ({"val_every_n_epochs": 0, "checkpoint": {"every_n_train_steps": "7"}}, 7),
    ({"val_every_n_train_steps": 5, "checkpoint": {"every_n_train_steps": 7}}, [7, 5, "1ep"]),
    ({"val_every_n_train_steps": 7, "val_every_n_epochs": 0, "checkpoint": {"every_n_train_steps": 7}}, 7),
    ({"val_every_n_epochs": 0, "checkpoint": {"every_n_epochs": 3}}, "3ep"),
    ({"val_every_n_epochs": 0, "checkpoint": {"no_save": True}}, None),
])  # fmt: skip
def test_convert_evaluation_intervals(values: dict[str, Any], expected: Any) -> None:
    """A converted run evaluates what it saves, so that it has the same best."""
    assert trainer_of(**values, dataset={"type": "my.Rows", "val_args": {"size": 1}}).get("eval_steps") == expected
    assert "eval_steps" not in trainer_of(**values)  # there is nothing to evaluate


def test_convert_reports_launcher() -> None:
    assert "omnitrain launch --fsdp" in notes_of(compute_config={"plan_ngpus": 1, "use_zero": True})
    assert "omnitrain launch -n 4" in notes_of(compute_config={"plan_ngpus": 1, "runtime_ngpus": 4})


def test_convert_loaders_of_custom_samplers_and_collators() -> None:
    sampler = {"dataset_sampler": {"type": "my.Sampler", "train_args": {"length": 3}}}
    for values in (sampler, {"dataloader": {"train_args": {"timeout": 5}}}):
        loader = trainer_of(**values)["train_loader"]["init_args"]["loader"]
        assert loader == {"import_path": "torch.utils.data.DataLoader"} and "takes every n-th" in notes_of(**values)
    dataset, collators = {"type": "my.Rows", "val_args": {"size": 4}}, {"collate_fn": "my.one"}
    trainer = trainer_of(dataset=dataset, dataloader={"train_args": collators, "val_args": {"collate_fn": "my.two"}})
    assert trainer["data_collator"] == {"import_path": "my.one"}
    assert trainer["eval_loader"]["init_args"]["collate_fn"] == {"import_path": "my.two"}
    trainer = trainer_of(dataset=dataset, dataloader={"type": "my.Loader"})
    assert trainer["eval_loader"]["init_args"]["sampler_args"] == {"shuffle": False} and "eval_dataset" not in trainer


def test_make_loader_keeps_sampler_order() -> None:
    def batches(data: Any, size: int, *args: Any, **options: Any) -> list[Any]:
        return [batch.tolist() for batch in make_loader(DataLoader, data, size, *args, **options)]

    assert batches([10, 11, 12, 13], 2, Backwards, {"step": 1}) == [[13, 12], [11, 10]]
    assert batches([10, 11, 12], 2, sampler_args={"shuffle": False}, drop_last=True) == [[10, 11]]
    assert batches(Streamed(range(6)), 3) == [[0, 1, 2], [3, 4, 5]]
    with pytest.raises(ConfigError, match="no effect on Stream"):
        make_loader(DataLoader, Streamed(range(6)), 3, Backwards)
    assert of_value(Path, "runs") == Path("runs")


@pytest.mark.parametrize(("values", "expected"), [
    ("last", "auto"), ("best", "best"), ("runs/a", "runs/a"), ({}, "auto"),
    ({"checkpoint": "runs/a", "convert_fn": "my.convert"}, "runs/a"),
    ({"checkpoint": {"__type": "my.choose", "kind": "x"}}, part("my.choose", kind="x")),
])  # fmt: skip
def test_convert_resume(values: Any, expected: Any) -> None:
    config, notes = convert({**PLAIN, "checkpoint": {"resume_from": values}})
    assert config["train"] == {"resume_from": expected}
    assert ("convert_fn" in values) == any("checkpoint.resume_from.convert_fn" in note for note in notes)


def test_convert_every_hook() -> None:
    never_called = ["after_aggregate_train_step_outputs", "after_aggregate_val_step_outputs", "before_sync_grad"]
    for name in [*(name for name in vars(TrainHook) if not name.startswith("_")), *never_called]:
        config, notes = convert({**PLAIN, "hook": {name: "my.function"}})
        assert ("callbacks" in config["trainer"]) or any(name in note for note in notes), name


def test_convert_references_to_vars() -> None:
    values = {
        "vars": {"dim": 16, "rate": "1e-3", "double": "$(vars.dim)", "name": "a", "shape": {"dim": 3},
                 "tokens": {"__type": "my.Tokens"}},
        **model_of(dim="$(vars.dim)", shape="$(vars.shape)", tokens="$!(vars.tokens)"),
        "checkpoint": {"save_dir": "runs/$(vars.name)/x"}, "max_epochs": "$(vars.dim)",
    }  # fmt: skip
    config, _ = convert({**PLAIN, **values})
    changed = {"rate": 0.001, "double": "${vars.dim}", "tokens": {"class_path": "my.Tokens"}}
    assert config["vars"] == {**values["vars"], **changed}
    assert config["trainer"]["model"]["init_args"] == {name: f"${{vars.{name}}}" for name in ("dim", "shape", "tokens")}
    assert (config["trainer"]["save_dir"], config["trainer"]["epochs"]) == ("runs/${vars.name}/x", "${vars.dim}")


CIRCLE = {"vars": {"a": "$(vars.b)", "b": "$(vars.a)"}}
DIM = {"vars": {"dim": 1}}
REJECTED: list[tuple[str, dict[str, Any]]] = [
    ("`max_epoch` is no key of nnScaler. Did you mean 'max_epochs'", {"max_epoch": 1}),
    ("`optimizer.clip_norm` .*Did you mean 'clip_gnorm'", {"optimizer": {"type": "a.B", "clip_norm": 1}}),
    ("`hook.on_epoch_ends` .*Did you mean 'on_epoch_end'", {"hook": {"on_epoch_ends": "my.f"}}),
    ("train_args.num_worker` .*Did you mean 'num_workers'", {"dataloader": {"train_args": {"num_worker": 4}}}),
    ("train_args.shufle` .*Did you mean 'shuffle'", {"dataset_sampler": {"train_args": {"shufle": False}}}),
    ("`max_epochs` must be an integer, got 'many'", {"max_epochs": "many"}),
    ("`max_epochs` must be an integer, got 1.5", {"max_epochs": 1.5}),
    ("`max_epochs` must be an integer, got '.*EPOCHS.*'", {"max_epochs": "${EPOCHS}"}),
    ("`micro_batch_size` must be an integer of at least 1, got 0", {"micro_batch_size": 0}),
    ("`enable_progress_bar` must be true or false, got 'maybe'", {"enable_progress_bar": "maybe"}),
    ("`model` must be a map, got 'my.Net'", {"model": "my.Net"}),
    ("`optimizer.clip_gnorm` must be a number", {"optimizer": {"type": "a.B", "clip_gnorm": [1]}}),
    ("`lr_scheduler.type` is missing", {"lr_scheduler": {"args": {"gamma": 1}}}),
    ("`max_epochs` or `max_train_steps` is missing", {"max_epochs": None}),
    ("names of arguments as keys, got 1", {"model": {"type": "a.B", "args": {"x": {"__type": "a.C", 1: 2}}}}),
    ("is 8, .* is 2 x 25 x 1 = 50. Make it a multiple",
     {"micro_batch_size": 2, "global_batch_size": 8, "compute_config": {"plan_ngpus": 4, "runtime_ngpus": 100}}),
    ("= 6. Make it a multiple", {"micro_batch_size": 3, "global_batch_size": 9, "grad_accumulation_steps": 2}),
    ("Write `compute_config.runtime_ngpus`", {"dataloader": {"type": "my.Loader"}, "global_batch_size": 16}),
    ("`?vars.dims`?.* refers to nothing. Did you mean 'vars.dim'", {**model_of(x="$(vars.dims)"), **DIM}),
    ("must be in `vars`", {**model_of(x="$!(model.type)"), **DIM}),
    ("one by one", {**model_of(x="$!(self)"), **DIM}),
    ("literal", {**model_of(x=r"$\{x}"), **DIM}),
    ("literal", {**model_of(x="$${x}"), **DIM}),
    ("describes an object here", {**model_of(x={"class_path": "y"}), **DIM}),
    ("vars.a -> vars.b -> vars.a leads back", {**model_of(x="$(vars.a)"), **CIRCLE}),
]  # fmt: skip


@pytest.mark.parametrize(("match", "values"), REJECTED)
def test_convert_rejects_values(match: str, values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=match):
        convert({**PLAIN, **values})


def test_every_key_without_counterpart_has_note() -> None:
    for key in nnscaler._UNSUPPORTED:
        section, _, name = key.rpartition(".")
        value: Any = {"map": {"a": 1}, "int": 3}.get(nnscaler._KEYS[section][name], "x")
        for word in reversed(key.split(".")[1:]):
            value = {word: value}
        word = key.split(".")[0]
        assert f"`{key}`: " in notes_of(**{word: {**PLAIN[word], **value} if word in PLAIN else value}), key


LOGS = [{"type": "TensorBoardLogger", "args": {"root_dir": "a", "max_queue": 3}}, {"type": "my.Logger"}]
NOTES: list[tuple[dict[str, Any], str]] = [
    ({"run_mode": "compile", "precision": "fp16", "enable_progress_bar": False},
     "run_mode precision enable_progress_bar"),
    ({"compute_config": {"plan_ngpus": 2}, "vars": {"a": {"__type": "my.A"}},
      **model_of(x="$!(vars.a)", y="$!{vars.a}")}, "compute_config.plan_ngpus vars.a"),
    (optimizer(loss_reduction="sum"), "optimizer.loss_reduction"),
    ({"log": LOGS, "checkpoint": {"save_last": False}}, "log[0].args.max_queue log[1] checkpoint.save_last"),
    ({"hook": {"type": "my.Hook"}}, "hook.type"),
    ({"hook": dict.fromkeys(("on_expire_checkpoint", "before_sync_grad", "on_step_end"), "my.f")},
     "hook.on_expire_checkpoint hook.before_sync_grad hook.on_step_end"),
    ({"dataloader": {"train_args": {"persistent_workers": False}}}, "dataloader.train_args.persistent_workers"),
    ({"compute_config": {"plan_ngpus": 1, "use_end2end": True, "use_zero": False}}, ""),
]  # fmt: skip
"""Sections of nnScaler, and the other keys for which there is a note."""


@pytest.mark.parametrize(("values", "keys"), NOTES, ids=[keys for _, keys in NOTES])
def test_convert_notes_keys_that_differ(values: dict[str, Any], keys: str) -> None:
    notes = convert({**PLAIN, **values})[1]
    assert all(note.endswith(".") for note in notes)
    assert sorted(note.split("`")[1] for note in notes) == sorted(keys.split())


@pytest.mark.parametrize("command", [["train"], ["config", "check"]], ids=" ".join)
@pytest.mark.parametrize("extra", [{}, {"compute_config": {"plan_ngpus": 1}, "vars": {"a": "$(max_epochs)"}}], ids=len)
def test_other_commands_name_convert(command: list[str], extra: dict[str, Any], tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "nnscaler.yaml"
    file.write_text(write({**extra, **PLAIN}))
    assert main([*command, str(file), "--trainer.epochs", "1"]) == 2
    assert f"Convert it with `omnitrain config convert {file} > converted.yaml`" in capsys.readouterr().err


# --- runs


def test_converted_run_equals_nnscaler_loop(tmp_path: Path) -> None:
    values = {
        "compute_config": {"plan_ngpus": 1, "runtime_ngpus": 1, "use_end2end": True}, "vars": {"dim": 4, "size": 12},
        "micro_batch_size": 2, "global_batch_size": 4, "max_epochs": 3,
        "model": {"type": f"{__name__}.Net", "args": {"dim": "$(vars.dim)"}},
        **optimizer(args={"lr": "1e-1", "momentum": 0.9}, clip_gnorm=0.5),
        "lr_scheduler": {"type": STEPS["type"], "args": {"step_size": 1, "gamma": 0.5}},
        "dataset": {"type": f"{__name__}.Rows", "train_args": {"size": "$(vars.size)"}, "val_args": {"size": 6}},
        "dataset_sampler": {"train_args": {"shuffle": False}}, "enable_progress_bar": False,
        "checkpoint": {"save_dir": f"{tmp_path}/runs", "keep_last_n_checkpoints": 1},
    }  # fmt: skip
    (tmp_path / "ours.yaml").write_text(write(convert(values)[0]))
    trainer = Config.read(tmp_path / "ours.yaml").make_trainer()
    trainer.train()

    model, rows, valid = Net(4), Rows(4, 12), Rows(4, 6)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(sgd, 1, 0.5)
    losses = []
    for _ in range(3):
        for start in range(0, 12, 4):
            sgd.zero_grad()
            for first in (start, start + 2):
                (model(rows[first : first + 2])[0] / 2).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            sgd.step()
        schedule.step()
        losses.append(model(valid[:])[0].item())
    assert trainer.progress.step == 9
    assert [row["eval_loss"] for row in trainer.metrics["valid"]] == pytest.approx(losses, rel=1e-12)


DOCUMENTED = """
    compute_config: {plan_ngpus: 1, runtime_ngpus: 1, use_end2end: true, constant_folding: true}
    run_mode: run
    pas_policy: autodist
    vars:
      width: 16
      rate: 1e-2
      shape:
        __type: HERE.Shape
        size: 8
        kind: {__value_type: str, value: 12}
        width: $(vars.width)
        names: "['a', 'b']"
        folder: {__value_type: pathlib.PurePosixPath, value: data/$(vars.width)}
        act: {__value_type: function, value: operator.neg}
    micro_batch_size: 4
    global_batch_size: 8
    max_epochs: 3
    seed: 1
    val_every_n_epochs: 1
    enable_progress_bar: true
    precision: bf16
    model: {type: HERE.Net, args: {shape: $!(vars.shape), dim: "8"}}
    optimizer:
      type: torch.optim.AdamW
      args: {lr: $(vars.rate), betas: "(0.9, 0.99)", fused: false}
      clip_gnorm: 1.0
    lr_scheduler: {type: torch.optim.lr_scheduler.CosineAnnealingLR, args: {T_max: 12}, interval: step}
    dataset:
      type: HERE.Rows
      train_args: {dim: 8, size: 32}
      val_args: {dim: 8, size: 8}
    dataloader:
      train_args:
        collate_fn: {__value_type: function, value: torch.utils.data.default_collate}
        drop_last: true
        num_workers: 0
      type: torch.utils.data.DataLoader
    dataset_sampler: {type: HERE.Backwards, train_args: {step: 1}}
    checkpoint: {save_dir: runs, every_n_epochs: 1, keep_last_n_checkpoints: 2, resume_from: last}
    log:
      - {type: nnscaler.cli.loggers.TensorBoardLogger, args: {root_dir: logs, name: small}}
    hook: {type: HERE.Counting, args: {name: mean}}
"""


def test_convert_and_train_every_section(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    pytest.importorskip("tensorboard")
    monkeypatch.chdir(tmp_path)
    Path("nnscaler.yaml").write_text(textwrap.dedent(DOCUMENTED).replace("HERE", __name__))
    assert main(["config", "convert", "nnscaler.yaml"]) == 0
    Path("a.yaml").write_text(capsys.readouterr().out)
    assert "# `pas_policy`: the model runs unchanged" in Path("a.yaml").read_text()
    for options, epochs in ((["--trainer.epochs", "2"], 2), ([], 1)):  # the second run resumes the first
        CALLS.clear()
        assert main(["train", "a.yaml", "--vars.width", "24", *options]) == 0, capsys.readouterr().err
        assert CALLS[0] == Shape(8, "12", 24, ["a", "b"], PurePosixPath("data/24"), operator.neg)
        assert [name for name, _ in CALLS[1:]] == ["mean"] * epochs
    assert (Path("logs") / "small").is_dir()
    assert Path("runs/last").resolve().name == "checkpoint-12"
    weights = load_file("runs/checkpoint-12/model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
