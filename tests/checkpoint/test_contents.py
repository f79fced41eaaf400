"""Forged and damaged checkpoints: one is restored completely, or rejected with the trainer unchanged."""

import contextlib
import copy
import functools
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from forging import ODDITIES, content_of, copied, forge_tensors, places, put, seal
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from marks import make_small, thinned
from recipes import callback, fit, rows, same, t16
from resuming import assert_same, build, memory_folder, outcome
from tiny import Tokens, gpt
from torch import nn

from omnitrain import Algorithm, Callback, CheckpointError, DataError, NonFiniteError, Trainer
from omnitrain.checkpoint.contents import OPTIMIZER, RNG, STATES
from omnitrain.checkpoint.manifest import LARGEST_MANIFEST, MANIFEST, read_manifest
from omnitrain.checkpoint.state_dicts import WEIGHTS

STEPS = 4


class Keeper(Callback):
    """Has a state of tensors, lists and numbers."""

    def __init__(self) -> None:
        self.state: Any = {"mean": torch.zeros(3), "pair": (torch.zeros(()), [1])}

    def on_step_end(self, trainer: Any) -> None:
        self.state["mean"] = self.state["mean"] + 1
        self.state["pair"] = (self.state["pair"][0] + 0.5, [trainer.progress.step])

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["mean"].shape == (3,)
        number, steps = state["pair"]
        assert isinstance(number, torch.Tensor) and isinstance(steps, list)
        self.state = state


def make(kind: str, save_dir: Path, **options: Any) -> Any:
    defaults: dict[str, Any] = {
        "eval_steps": 2, "learning_rate": 0.01, "log_steps": 1, "lr_scheduler": "cosine", "max_steps": STEPS,
        "save_steps": 2, "load_best_at_end": False, "callbacks": [Keeper()], "eval_dataset": rows(4),
    }  # fmt: skip
    return make_small(kind, t16(dropout=0.1), rows(12), save_dir=save_dir, **{**defaults, **options})


@pytest.fixture(scope="module")
def saved() -> Iterator[Callable[[str], Path]]:
    """Return a run of a trainer with two checkpoints, of steps 2 and 4, which no test may change."""
    with memory_folder() as path:
        yield functools.cache(lambda kind: fit(make(kind, path / kind)).save_dir)


def newest(run: Path) -> Path:
    return max(path for path in run.glob("checkpoint-*") if path.is_dir())


def state_of(trainer: Any) -> dict[str, Any]:
    """Return a copy of all that a checkpoint could change."""
    return copy.deepcopy({key: value for key, value in outcome(trainer).items() if key != "last"})


def with_tensor(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[dict[str, torch.Tensor]], Any]:
    return lambda tensors: tensors.update({name: change(tensors[name])})


GROWN = functools.partial(torch.Tensor.new_zeros, size=(64,))
SHRUNK = functools.partial(torch.Tensor.new_zeros, size=(1,))
COMPLEX = functools.partial(torch.Tensor.to, dtype=torch.complex64)


FORGED: dict[str, tuple[str, Any]] = {
    "small moment": (OPTIMIZER, with_tensor("0.weight/exp_avg", SHRUNK)),
    "large moment": (OPTIMIZER, with_tensor("3.bias/exp_avg_sq", GROWN)),
    "complex moment": (OPTIMIZER, with_tensor("0.bias/exp_avg", COMPLEX)),
    "large step": (OPTIMIZER, with_tensor("0.weight/step", GROWN)),
    "no moment": (OPTIMIZER, lambda tensors: tensors.pop("0.weight/exp_avg_sq")),
    "NaN step": (OPTIMIZER, lambda tensors: tensors["0.weight/step"].fill_(float("nan"))),
    "negative step": (OPTIMIZER, lambda tensors: tensors["3.bias/step"].neg_()),
    "unknown parameter": (OPTIMIZER, lambda tensors: tensors.update({"9.weight/exp_avg": torch.zeros(1)})),
    "small torch state": (RNG, with_tensor("0/torch", SHRUNK)),
    "negative python state": (RNG, lambda tensors: tensors["0/python"].neg_()),
    "float numpy state": (RNG, with_tensor("0/numpy", torch.Tensor.float)),
    "no torch state": (RNG, lambda tensors: tensors.pop("0/torch")),
    "no states": (STATES, lambda tensors: tensors.clear()),
}
OTHER_TRAINERS = [("hf", "large moment"), ("accelerate", "no torch state")]
NATIVE = [("native", case) for case in FORGED]
QUICK = [("native", case) for case in ("no moment", "NaN step", "unknown parameter", "float numpy state", "no states")]


@pytest.mark.parametrize(("kind", "case"), thinned(NATIVE + OTHER_TRAINERS, QUICK + OTHER_TRAINERS))
def test_forged_tensors_are_rejected(kind: str, case: str, saved: Any, folder: Path, caplog: Any) -> None:
    """The trainer is unchanged, and "auto" resumes from the checkpoint before."""
    run = copied(saved(kind), folder / "forged")
    forge_tensors(newest(run), *FORGED[case])
    trainer = make(kind, run)
    before = state_of(trainer)
    for call in (trainer.train, trainer.load_checkpoint):
        with pytest.raises(CheckpointError):
            call(newest(run))
    assert_same(state_of(trainer), before)
    caplog.clear()
    trainer.train(resume_from="auto")
    assert trainer.progress.step == STEPS
    assert any("Skipped:" in message and newest(run).name in message for message in caplog.messages)


def forge_content(folder: Path, path: tuple[Any, ...], value: Any = None) -> None:
    """Replace what is at a path in omnitrain.json, or delete it."""
    content = content_of(folder)
    put(content, path, value, delete=value is None)
    seal(folder, content)


def test_forged_weights_and_callbacks_are_rejected(saved: Any, folder: Path) -> None:
    """Weights of another shape or dtype are for another model: "auto" does not take an earlier checkpoint."""
    mean, rate = ("callbacks", -1, "state", "mean"), ("settings", "optimizer_groups", 0, "lr")
    changes = [with_tensor("0.weight", SHRUNK), with_tensor("3.bias", GROWN), with_tensor("0.bias", COMPLEX)]
    changes.append(lambda tensors: tensors.pop("0.bias"))
    cases: list[Any] = [(partial(forge_tensors, file=WEIGHTS, change=change), "fit the model") for change in changes]
    cases.append((partial(forge_content, path=mean, value=3), r"Keeper.load_state_dict rejected .*: AttributeError"))
    cases.append((partial(forge_content, path=rate), r"has no settings.optimizer_groups\[0\].lr"))
    for forge, message in cases:
        run = copied(saved("native"), folder / "forged")
        forge(newest(run))
        trainer = make("native", run)
        before = state_of(trainer)
        for which in (newest(run), "last", *(["auto"] if message == "fit the model" else [])):
            with pytest.raises(CheckpointError, match=message):
                trainer.train(resume_from=which)
        assert_same(state_of(trainer), before)


def test_unsavable_callback_state_ends_the_run_at_once(trainer_class: Any, tmp_path: Path) -> None:
    keeper = Keeper()
    keeper.state["odd"] = [{1, 2}]
    trainer = make(trainer_class, tmp_path / "run", callbacks=[keeper])
    with pytest.raises(CheckpointError, match="Keeper/odd/0` holds a set"):
        trainer.train()
    assert trainer.progress.step == 0


def attempt(run: Path, which: Any) -> None:
    """Resume, or be rejected; an error that is not ours is raised."""
    save_dir = run if which == "auto" else run.with_name("resumed")
    trainer = make("native", save_dir, max_steps=STEPS + 1, overwrite=True, save_steps=50)
    try:
        trainer.train(resume_from=which, allow_change={"lr_scheduler_options"})
    except (CheckpointError, DataError) as error:  # the latter for a length that the training set does not have
        text = str(error).replace("\n", "")
        assert text.isprintable(), text
    except NonFiniteError:
        pass  # resumed with a number that no run writes, such as 1e308, under a correct hash


@pytest.mark.parametrize("examples", thinned([6, 1000], [6]))
def test_changed_manifest_is_rejected_or_resumed(examples: int, saved: Any, folder: Path) -> None:
    """A changed setting is an error under "auto", too: it would resume an older run otherwise."""

    @settings(max_examples=examples, database=None, suppress_health_check=list(HealthCheck))
    @given(
        index=st.integers(0, 2000), kind=st.sampled_from(["delete", "replace", "replace"]),
        oddity=st.sampled_from(ODDITIES), which=st.sampled_from([None, "auto"]),
    )  # fmt: skip
    def check(index: int, kind: str, oddity: Any, which: str | None) -> None:
        checkpoint = newest(copied(saved("native"), folder / "changed"))
        content = content_of(checkpoint)
        paths = [path for path in places(content) if path[0] not in ("format_version", "sha256")]
        put(content, paths[index % len(paths)], copy.deepcopy(oddity), delete=kind == "delete")
        with contextlib.suppress(UnicodeEncodeError):  # no JSON
            seal(checkpoint, content)
            attempt(folder / "changed", which or checkpoint)

    check()


PREFIX = '{"format_version": 1, "sha256": "%s", '


def test_read_manifest_checks_hash_and_limits(tmp_path: Path) -> None:
    for text, message in (
        (PREFIX + '"a": ' + "[" * 100_000 + "]" * 100_000 + "}", "nested too deeply"),
        (PREFIX + '"a": ' + "[" * 150 + "]" * 150 + "}", "more than 100 nested lists and objects"),
        (PREFIX + '"step": 1, "step": 2}', "the same key twice"),
        (PREFIX + '"step": ' + "9" * 5000 + "}", "digits"),
        (PREFIX + '"step": "\\u001b[2J"}', r"step = .*x1b"),
        ("[]", "does not match its own sha256"),
    ):
        blank = text.replace("%s", "0" * 64)
        (tmp_path / MANIFEST).write_text(blank.replace("0" * 64, hashlib.sha256(blank.encode()).hexdigest(), 1))
        with pytest.raises(CheckpointError, match=message) as caught:
            read_manifest(tmp_path)
        assert str(caught.value).isprintable()
    os.truncate(tmp_path / MANIFEST, LARGEST_MANIFEST + 1)
    with pytest.raises(CheckpointError, match=f"{LARGEST_MANIFEST + 1} bytes"):
        read_manifest(tmp_path)


def test_pointers_open_with_from_pretrained(tmp_path: Path) -> None:
    model = gpt()
    make_small("native", model, Tokens(4), loss_fn=None, eval_dataset=Tokens(2), save_dir=tmp_path, max_steps=1).train()
    for which in ("last", "best"):
        assert_same(dict(type(model).from_pretrained(tmp_path / which).state_dict()), dict(model.state_dict()))


def test_save_after_a_skipped_step_keeps_the_best(trainer_class: Any, tmp_path: Path) -> None:
    """It has the name of the best, which was saved before it, and all of its weights and buffers."""

    def infinite_once(trainer: Any, loss: torch.Tensor) -> torch.Tensor:
        return loss * float("inf") if trainer.progress.step == 2 and not trainer.progress.skipped_steps else loss

    def save_skipped(trainer: Any) -> None:
        if trainer.progress.skipped_steps and trainer.progress.step == 2:
            trainer.request_save()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    trainer = fit(make_small(
        trainer_class, model, rows(16, torch.float32), eval_dataset=rows(8, torch.float32), max_steps=3, eval_steps=2,
        save_steps=10, on_nonfinite="skip", learning_rate=0.05, callbacks=[callback(on_step_end=save_skipped)],
        algorithms=[callback(Algorithm, transform_loss=infinite_once)], save_dir=tmp_path,
    ))  # fmt: skip
    assert (trainer.metrics["best_step"], trainer.progress.skipped_steps) == (2, 1)
    assert content_of(tmp_path / "checkpoint-2")["progress"]["skipped_steps"] == 1
    assert trainer.evaluate()["eval_loss"] == trainer.metrics["best_valid"]["eval_loss"]


def test_history_is_in_a_checkpoint_that_is_copied_away(tmp_path: Path) -> None:
    build(tmp_path / "run", epochs=2).train()
    folder = shutil.copytree(tmp_path / "run" / "last", tmp_path / "alone")
    shutil.rmtree(tmp_path / "run")
    trainer = build(tmp_path / "other")
    trainer.load_checkpoint(folder)
    assert [row["step"] for row in trainer.metrics["valid"]] == [3, 6]
    assert [row["epoch"] for row in trainer.metrics["train_metrics_history"]] == [1, 2]
    assert "valid" not in content_of(folder)["metrics"]


def test_load_checkpoint_takes_trainer_without_data(tmp_path: Path) -> None:
    trained = fit(make_small(Trainer, t16(), rows(16), save_dir=tmp_path, max_steps=2))
    trainer = make_small(Trainer, t16(seed=1))
    trainer.load_checkpoint(tmp_path / "checkpoint-2")
    assert same(trainer.model.parameters(), trained.model.parameters())
