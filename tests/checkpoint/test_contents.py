"""Forged and damaged checkpoints: one is restored completely, or rejected with the trainer unchanged."""

from __future__ import annotations

import copy
import hashlib
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from forging import ODDITIES, SPOILINGS, content_of, copied, forge_tensors, places, put, seal, spoil
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from marks import thinned
from recipes import rows, t16
from resuming import assert_same, memory_folder
from tiny import Tokens, gpt
from torch import nn

from omnitrain import AccelerateTrainer, Algorithm, Callback, CheckpointError, HFTrainer, NonFiniteError, Trainer
from omnitrain.checkpoint.contents import OPTIMIZER, RNG, STATES
from omnitrain.checkpoint.manifest import LARGEST_MANIFEST, MANIFEST, read_manifest
from omnitrain.checkpoint.state_dicts import WEIGHTS

TRAINERS = {"native": Trainer, "accelerate": AccelerateTrainer, "hf": HFTrainer}
STEPS = 4


class Keeper(Callback):
    """Has a state of tensors, lists and numbers, and records the calls of two events."""

    def __init__(self) -> None:
        self.state: Any = {"mean": torch.zeros(3), "pair": (torch.zeros(()), [1])}
        self.calls: list[str] = []

    def on_step_end(self, trainer: Any) -> None:
        self.state["mean"] = self.state["mean"] + 1
        self.state["pair"] = (self.state["pair"][0] + 0.5, [trainer.progress.step])

    def on_checkpoint_loaded(self, trainer: Any) -> None:
        self.calls.append(f"loaded {trainer.progress.step} {float(self.state['mean'][0])}")

    def on_train_start(self, trainer: Any) -> None:
        self.calls.append("start")

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert isinstance(state["mean"], torch.Tensor) and state["mean"].shape == (3,)
        number, steps = state["pair"]
        assert isinstance(number, torch.Tensor) and isinstance(steps, list)
        self.state = state


def make(kind: str, save_dir: Path, **options: Any) -> Any:
    device = {"device": "cpu"} if kind == "native" else {}
    defaults: dict[str, Any] = {
        "batch_size": 4, "eval_steps": 2, "learning_rate": 0.01, "log_steps": 1, "loss_fn": F.mse_loss,
        "lr_scheduler": "cosine", "max_steps": STEPS, "progress_bar": False, "save_steps": 2, "load_best_at_end": False,
    }  # fmt: skip
    defaults |= {"callbacks": [Keeper()], "eval_dataset": rows(4), "save_dir": save_dir, **device, **options}
    return TRAINERS[kind](t16(dropout=0.1), train_dataset=rows(12), **defaults)


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with memory_folder() as path:
        yield path


def saved(kind: str, folder: Path) -> Path:
    """Return a run with two checkpoints, of steps 2 and 4, which no test may change."""
    run = folder / kind
    if not run.exists():
        make(kind, run).train()
    return run


def newest(run: Path) -> Path:
    return max(path for path in run.glob("checkpoint-*") if path.is_dir())


def state_of(trainer: Any) -> Any:
    """Return everything of a trainer that a checkpoint could change."""
    groups = [
        {key: copy.copy(value) for key, value in group.items() if key != "params"}
        for group in trainer.optimizer.param_groups
    ]
    return (
        {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()},
        [dict(entry) for entry in trainer.optimizer.state.values()],
        groups,
        None if trainer.lr_scheduler is None else copy.deepcopy(trainer.lr_scheduler.state_dict()),
        trainer.progress.state_dict(),
        trainer.objective.state_dict(),
        next(callback for callback in trainer.lifecycle.callbacks if isinstance(callback, Keeper)).state,
    )


# --- what does not fit


def grow(name: str) -> Any:
    return lambda tensors: tensors.update({name: torch.zeros(64, dtype=tensors[name].dtype)})


def shrink(name: str) -> Any:
    return lambda tensors: tensors.update({name: tensors[name].flatten()[:1].clone()})


def to_complex(name: str) -> Any:
    return lambda tensors: tensors.update({name: tensors[name].to(torch.complex64)})


FORGED: dict[str, tuple[str, Any]] = {
    "small moment": (OPTIMIZER, shrink("0.weight/exp_avg")),
    "large moment": (OPTIMIZER, grow("3.bias/exp_avg_sq")),
    "complex moment": (OPTIMIZER, to_complex("0.bias/exp_avg")),
    "large step": (OPTIMIZER, grow("0.weight/step")),
    "no moment": (OPTIMIZER, lambda tensors: tensors.pop("0.weight/exp_avg_sq")),
    "NaN step": (OPTIMIZER, lambda tensors: tensors["0.weight/step"].fill_(float("nan"))),
    "negative step": (OPTIMIZER, lambda tensors: tensors["3.bias/step"].neg_()),
    "unknown parameter": (OPTIMIZER, lambda tensors: tensors.update({"9.weight/exp_avg": torch.zeros(1)})),
    "small torch state": (RNG, shrink("0/torch")),
    "negative python state": (RNG, lambda tensors: tensors["0/python"].neg_()),
    "float numpy state": (RNG, lambda tensors: tensors.update({"0/numpy": tensors["0/numpy"].float()})),
    "no torch state": (RNG, lambda tensors: tensors.pop("0/torch")),
    "no states": (STATES, lambda tensors: tensors.clear()),
}


QUICK = [
    *(("native", case) for case in ("no moment", "NaN step", "unknown parameter", "float numpy state", "no states")),
    ("hf", "large moment"),
    ("accelerate", "no torch state"),
]


@pytest.mark.parametrize(("kind", "case"), thinned([(kind, case) for kind in TRAINERS for case in FORGED], QUICK))
def test_forged_tensors_are_rejected(kind: str, case: str, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The trainer is unchanged, and "auto" resumes from the checkpoint before."""
    run = copied(saved(kind, folder), folder / "forged")
    forge_tensors(newest(run), *FORGED[case])
    trainer = make(kind, run)
    before = state_of(trainer)
    for call in (trainer.train, trainer.load_checkpoint):
        with pytest.raises(CheckpointError):
            call(newest(run))
    assert_same(state_of(trainer), before)
    trainer.train(resume_from="auto")
    assert trainer.progress.step == STEPS
    assert any("Skipped:" in message and newest(run).name in message for message in caplog.messages)


def forge_callback(folder: Path) -> None:
    content = content_of(folder)
    content["callbacks"][-1]["state"]["mean"] = 3
    seal(folder, content)


@pytest.mark.parametrize("kind", thinned(TRAINERS, ["native"]))
def test_forged_weights_and_callbacks_are_rejected(kind: str, folder: Path) -> None:
    """Weights of another shape or dtype are for another model: "auto" does not take an earlier checkpoint."""
    changes = (shrink("0.weight"), grow("3.bias"), to_complex("0.bias"), lambda tensors: tensors.pop("0.bias"))
    cases: list[Any] = [(partial(forge_tensors, file=WEIGHTS, change=change), "fit the model") for change in changes]
    for forge, message in [*cases, (forge_callback, r"Keeper.load_state_dict rejected .*: AssertionError")]:
        run = copied(saved(kind, folder), folder / "forged")
        forge(newest(run))
        trainer = make(kind, run)
        before = state_of(trainer)
        for which in (newest(run), "last", *(["auto"] if forge is not forge_callback else [])):
            with pytest.raises(CheckpointError, match=message):
                trainer.train(resume_from=which)
        assert_same(state_of(trainer), before)


# --- callbacks


@pytest.mark.parametrize("kind", thinned(TRAINERS, ["native", "hf"]))
def test_callback_tensors_are_restored_before_its_event(kind: str, folder: Path, tmp_path: Path) -> None:
    run = saved(kind, folder)
    keeper = Keeper()
    trainer = make(kind, tmp_path / "further", max_steps=6, callbacks=[keeper])
    trainer.train(resume_from=newest(run), allow_change={"lr_scheduler_options"})
    assert keeper.calls == [f"loaded {STEPS} {float(STEPS)}", "start"]
    assert keeper.state["mean"].tolist() == [6.0] * 3 and float(keeper.state["pair"][0]) == 3.0
    assert keeper.state["pair"][1] == [6]
    keeper.calls.clear()
    trainer.load_checkpoint(newest(run))
    assert keeper.calls == [f"loaded {STEPS} {float(STEPS)}"] and keeper.state["mean"].tolist() == [4.0] * 3


@pytest.mark.parametrize("kind", TRAINERS)
def test_unsavable_callback_state_ends_the_run_at_once(kind: str, tmp_path: Path) -> None:
    keeper = Keeper()
    keeper.state["odd"] = [{1, 2}]
    trainer = make(kind, tmp_path / "run", callbacks=[keeper])
    with pytest.raises(CheckpointError, match="Keeper/odd/0` holds a set"):
        trainer.train()
    assert trainer.progress.step == 0


# --- fuzzing


def attempt(run: Path, which: Any) -> str:
    """Return how resuming ended; an error that is not ours is raised."""
    save_dir = run if which == "auto" else run.with_name("resumed")
    trainer = make("native", save_dir, max_steps=STEPS + 1, overwrite=True, save_steps=50)
    try:
        trainer.train(resume_from=which, allow_change={"lr_scheduler_options"})
    except CheckpointError as error:
        message = str(error)
        assert message.isprintable() or "\n" in message, message
        assert "\x1b" not in message
        return "rejected"
    except NonFiniteError:
        return "resumed"  # with a number that no run writes, such as 1e308, under a correct hash
    return "resumed"


def change_manifest(run: Path, target: Path, index: int, kind: str, oddity: Any, which: Any = None) -> str:
    folder = newest(copied(run, target))
    content = content_of(folder)
    paths = [path for path in places(content) if path[0] not in ("format_version", "sha256")]
    put(content, paths[index % len(paths)], copy.deepcopy(oddity), delete=kind == "delete")
    try:
        seal(folder, content)
    except UnicodeEncodeError:
        return "rejected"  # no JSON
    return attempt(target, which or folder)


def damage_file(run: Path, target: Path, file: int, how: str, position: int, fill: int, which: Any = None) -> str:
    folder = newest(copied(run, target))
    names = [MANIFEST, *content_of(folder)["files"]]
    spoil(folder / names[file % len(names)], how, position, fill)
    return attempt(target, which or folder)


WHICH = st.sampled_from([None, "auto"])
CHANGES: dict[str, Any] = {
    "index": st.integers(0, 2000), "kind": st.sampled_from(["delete", "replace", "replace"]),
    "oddity": st.sampled_from(ODDITIES), "which": WHICH,
}  # fmt: skip
DAMAGE: dict[str, Any] = {
    "file": st.integers(0, 4), "how": st.sampled_from(SPOILINGS), "position": st.integers(0, 1 << 20),
    "fill": st.integers(0, 255), "which": WHICH,
}  # fmt: skip


def fuzz(examples: int) -> Any:
    checks = list(HealthCheck)
    return settings(max_examples=examples, deadline=None, derandomize=True, database=None, suppress_health_check=checks)


@pytest.mark.parametrize("examples", thinned([6, 4000], [6]))
def test_changed_manifest_is_rejected_or_resumed(examples: int, folder: Path) -> None:
    """A changed setting is an error under "auto", too: it would resume an older run otherwise."""

    @fuzz(examples)
    @given(**CHANGES)
    def check(**change: Any) -> None:
        assert change_manifest(saved("native", folder), folder / "changed", **change) in ("rejected", "resumed")

    check()


@pytest.mark.parametrize("examples", thinned([6, 2000], [6]))
def test_damaged_file_is_rejected_or_passed_over(examples: int, folder: Path) -> None:
    @fuzz(examples)
    @given(**DAMAGE)
    def check(which: Any, **damage: Any) -> None:
        expected = "resumed" if which else "rejected"
        assert damage_file(saved("native", folder), folder / "damaged", **damage, which=which) == expected

    check()


# --- files


PREFIX = '{"format_version": 1, "sha256": "%s", '
MANIFESTS = {
    "depth": (PREFIX + '"a": ' + "[" * 100_000 + "]" * 100_000 + "}", "nested too deeply"),
    "150 levels": (PREFIX + '"a": ' + "[" * 150 + "]" * 150 + "}", "more than 100 nested lists and objects"),
    "double key": (PREFIX + '"step": 1, "step": 2}', "the same key twice"),
    "digits": (PREFIX + '"step": ' + "9" * 5000 + "}", "digits"),
    "escape": (PREFIX + '"step": "\\u001b[2J"}', r"step = .*x1b"),
    "hash": ("[]", "does not match its own sha256"),
}


@pytest.mark.parametrize("case", MANIFESTS)
def test_read_manifest_checks_hash_and_limits(case: str, tmp_path: Path) -> None:
    text, message = MANIFESTS[case]
    blank = text.replace("%s", "0" * 64)
    (tmp_path / MANIFEST).write_text(blank.replace("0" * 64, hashlib.sha256(blank.encode()).hexdigest(), 1))
    with pytest.raises(CheckpointError, match=message) as caught:
        read_manifest(tmp_path)
    assert str(caught.value).isprintable()


def test_read_manifest_rejects_large_files(tmp_path: Path) -> None:
    (tmp_path / MANIFEST).touch()
    os.truncate(tmp_path / MANIFEST, LARGEST_MANIFEST + 1)
    with pytest.raises(CheckpointError, match=f"{LARGEST_MANIFEST + 1} bytes"):
        read_manifest(tmp_path)


def test_pointers_open_with_from_pretrained(tmp_path: Path) -> None:
    model = gpt()
    options: dict[str, Any] = {"progress_bar": False, "device": "cpu", "max_steps": 1, "batch_size": 2}
    Trainer(model, Tokens(4), Tokens(2), save_dir=tmp_path / "run", **options).train()
    for which in ("last", "best"):
        loaded = type(model).from_pretrained(tmp_path / "run" / which)
        assert_same(dict(loaded.state_dict()), dict(model.state_dict()))


class InfiniteOnce(Algorithm):
    """Has the loss of the third step be infinite, at first."""

    def transform_loss(self, trainer: Any, loss: torch.Tensor) -> torch.Tensor:
        return loss * float("inf") if trainer.progress.step == 2 and not trainer.progress.skipped_steps else loss


class SaveSkipped(Callback):
    def on_step_end(self, trainer: Any) -> None:
        if trainer.progress.skipped_steps and trainer.progress.step == 2:
            trainer.request_save()


@pytest.mark.parametrize("trainer_class", [Trainer, AccelerateTrainer, HFTrainer])
def test_save_after_a_skipped_step_keeps_the_best(trainer_class: Any, tmp_path: Path) -> None:
    """It has the name of the best, which was saved before it, and all of its weights and buffers."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    trainer = trainer_class(
        model, rows(16, torch.float32), rows(8, torch.float32), loss_fn=F.mse_loss, batch_size=4, max_steps=3,
        eval_steps=2, save_steps=10, on_nonfinite="skip", learning_rate=0.05,
        algorithms=[InfiniteOnce()], callbacks=[SaveSkipped()], progress_bar=False, save_dir=tmp_path,
        **({"device": "cpu"} if trainer_class is Trainer else {}),
    )  # fmt: skip
    trainer.train()
    assert (trainer.metrics["best_step"], trainer.progress.skipped_steps) == (2, 1)
    assert content_of(tmp_path / "checkpoint-2")["progress"]["skipped_steps"] == 1
    assert trainer.evaluate()["eval_loss"] == trainer.metrics["best_valid"]["eval_loss"]
