"""Interrupted and resumed runs, which end like uninterrupted ones, and further guarantees of checkpoint folders."""

import copy
import errno
import functools
import itertools
import json
import logging
import math
import os
import pickle
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import programs
import pytest
import resuming
import torch
import torch.nn.functional as F
from counting import Streamed
from forging import content_of, copied, seal, spoil
from marks import make_small, thinned
from recipes import Pages, StopAt, callback, fit, rows, small_trainer
from resuming import Cut, Net, Numbered, assert_same, comparable, outcome, train
from torch import nn
from torch.optim import lr_scheduler as schedules
from torch.utils.data import DataLoader

from omnitrain import Algorithm, Callback, CheckpointError, ConfigError, Trainer
from omnitrain.checkpoint import state_dicts, tensor_files
from omnitrain.checkpoint.manifest import HISTORY
from omnitrain.checkpoint.store import MANIFEST, Store
from omnitrain.core.events import INNER_STEP_EVENTS
from omnitrain.core.files import FileSystem
from omnitrain.data import sampling


def build(save_dir: Path | None, **options: Any) -> Trainer:
    """Return a trainer that ends with its last weights, unless a test is about the best ones."""
    return resuming.build(save_dir, **{"load_best_at_end": False, **options})


play = functools.partial(resuming.play, make=build)


@pytest.fixture(scope="module")
def stopped_run() -> Iterator[Path]:
    with resuming.memory_folder() as path:
        play(path / "run", [{"cut": ("stop", 4)}])
        yield path / "run"


@pytest.fixture
def stopped(stopped_run: Path, folder: Path) -> Path:
    """A run without options that was stopped after step 4 of 9."""
    return copied(stopped_run, folder / "run")


@functools.cache
def straight(**options: Any) -> dict[str, Any]:
    """Return the outcome of a run that is not interrupted."""
    with resuming.memory_folder() as path:
        return play(path / "run", **options)


def assert_resumes_identically(run: Path, *parts: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Play a run in parts, compare it with an uninterrupted one, and return its outcome."""
    result = play(run, parts, **options)
    assert_same(result, straight(**options), parts)
    return result


def names(run: Path) -> list[str]:
    return [path.name for path in Store(run).checkpoints()]


def numbered(*steps: int) -> list[str]:
    return [f"checkpoint-{step}" for step in steps]


def best_of(run: Path) -> str:
    return (Store(run).resolve("best") or [Path()])[0].name


def contents(folder: Path) -> dict[Path, tuple[bytes, int]]:
    """Return the bytes and the time of each file, in order."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return tensor_files.load_tensors(folder / state_dicts.WEIGHTS)


def on(event: str, action: Callable[[Any], object], step: int | None = None) -> Callback:
    """Return a callback that does something at each event, or at those after a step, skipped ones included."""

    def handle(self: Any, trainer: Any, *details: Any) -> None:
        if step in (None, resuming.windows_of(trainer)):
            action(trainer)

    return type("Handler", (Callback,), {f"on_{event}": handle, "order": 90})()


def terminate(trainer: Any) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


FULL = OSError(errno.ENOSPC, "No space left on device")


def is_tensor_file(path: Path) -> bool:
    return path.suffix == ".safetensors"


def failing_write(condition: Callable[[Path], bool], error: Exception = FULL) -> Callable[..., Any]:
    """Return a `FileSystem.write` that fails for some files."""
    write = FileSystem.write

    def write_or_fail(fs: FileSystem, path: Path, content: Any) -> Any:
        if condition(path):
            raise error
        return write(fs, path, content)

    return write_or_fail


# --- interrupted anywhere


def scale(trainer: Trainer) -> None:
    trainer.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)


class Seekable(Pages):
    """A stream of 22 samples with a nested state."""

    def __init__(self) -> None:
        super().__init__(22)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "share": self.at / 22, "file": {"shard": "a"}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        assert state["file"]["shard"] == "a"


class Requesting(Callback):
    """Has a state, requests saves after some evaluations, and an evaluation after a step."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_step_end(self, trainer: Any) -> None:
        self.steps.append(trainer.progress.step)
        if trainer.progress.step == 5:
            trainer.request_evaluate()

    def on_eval_end(self, trainer: Any, metrics: Any) -> None:
        if trainer.progress.step % 4 == 0:
            trainer.request_save()

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]


def scheduled(make: Any, **options: Any) -> dict[str, Any]:
    return {"lr_scheduler": make, "save_steps": 2, **options}


def with_optimizer(make: Any) -> dict[str, Any]:
    return {"optimizer": make, "learning_rate": 2e-5}


def two_groups(parameters: Any) -> torch.optim.Optimizer:
    first, *rest = list(parameters)
    return torch.optim.AdamW([{"params": rest, "weight_decay": 0.1}, {"params": [first], "lr": 0.1}], lr=0.05)


SINGLE = {"model": lambda: Net(torch.float32), "dataset": lambda: Numbered(dtype=torch.float32)}


RECIPES: dict[str, dict[str, Any]] = {
    "odd intervals": {"eval_steps": 2, "save_steps": 3, "log_steps": 3},
    "each step": {"eval_steps": 3, "save_steps": 1, "log_steps": 1, "save_total_limit": 1},
    "samples": {
        "epochs": None, "max_duration": "50sp", "save_steps": "20sp", "eval_steps": "0.5ep", "log_steps": "10sp",
    },
    "end in steps": {"epochs": None, "max_steps": 6, "save_steps": 3, "eval_steps": 4},
    "requests": {"callbacks": lambda: [Requesting()], "eval_steps": 1, "save_steps": 3},
    "skipped steps": scheduled(
        "linear", **SINGLE | {"model": lambda: resuming.Overflowing(torch.float32)}, prepare=scale, eval_steps=2
    ),
    "bf16": {"autocast": "bf16", **SINGLE, "save_steps": 2},
    "stream": {"dataset": lambda: Streamed(Numbered()), "save_steps": 2, "eval_steps": 2},
    "seekable stream": {"dataset": Seekable, "save_steps": 2, "eval_steps": 2},
    "loader": {"train_loader": lambda: DataLoader(Numbered(), batch_size=4, shuffle=True), "save_steps": 2},
    "warm-up": {"lr_scheduler": "cosine", "warmup_steps": 2, "save_steps": 1},
    "CosineAnnealingLR": scheduled(lambda optimizer: schedules.CosineAnnealingLR(optimizer, 5)),
    "SequentialLR": scheduled(
        lambda optimizer: schedules.SequentialLR(
            optimizer, [schedules.LinearLR(optimizer, 0.1, total_iters=3), schedules.ExponentialLR(optimizer, 0.8)], [3]
        )
    ),
    "ReduceLROnPlateau": scheduled(
        lambda optimizer: schedules.ReduceLROnPlateau(optimizer, factor=0.5, patience=0), eval_steps=2, save_steps=3
    ),
    "MultiStepLR per epoch": scheduled(
        lambda optimizer: schedules.MultiStepLR(optimizer, [1, 2, 2]), scheduler_interval="epoch"
    ),
    "CyclicLR": scheduled(
        lambda optimizer: schedules.CyclicLR(optimizer, 0.01, 0.1, 2),
        **with_optimizer(lambda parameters: torch.optim.SGD(parameters, 0.05, momentum=0.9)),
    ),
    "tensor rate": scheduled(
        "linear", **with_optimizer(lambda parameters: torch.optim.AdamW(parameters, lr=torch.tensor(0.05)))
    ),
    "two groups": scheduled("linear", **with_optimizer(two_groups)),
    "part of an epoch": {
        "epochs": 2.5, "gradient_accumulation_steps": 3, "save_total_limit": 2, "async_save": True, "save_steps": 3,
    },
}  # fmt: skip
COMBINED: dict[str, dict[str, Any]] = {
    " + ".join(parts): functools.reduce(lambda a, b: a | b, map(RECIPES.__getitem__, parts), {"epochs": 2})
    for parts in (
        ("tensor rate", "warm-up", "samples"),
        ("two groups", "SequentialLR", "requests"),
        ("loader", "MultiStepLR per epoch"),
        ("stream", "CyclicLR"),
        ("bf16", "skipped steps"),
        ("odd intervals", "part of an epoch"),
    )
}
"""The quick cases: several recipes in one run of 2 epochs."""


@pytest.mark.parametrize("name", thinned([*RECIPES, *COMBINED], COMBINED))
def test_cut_run_resumes_identically(name: str, folder: Path) -> None:
    """Cut once at several steps; or, of combined recipes, three times."""
    number, options = [*COMBINED, *RECIPES].index(name), {**RECIPES, **COMBINED}[name]
    position = straight(**options)["position"]
    windows = range(1, position["step"] + position["skipped_steps"] + 1)
    assert len(windows) >= 5
    cuts = [("stop", "signal", "kill")[(window + number) % 3] for window in windows]
    parts = [{"cut": cut} for cut in zip(cuts, windows, strict=True)]
    for case in [parts[1:4]] if name in COMBINED else [[part] for part in parts[:: 1 if number < 8 else 2]]:
        assert_resumes_identically(folder / str(case[0]["cut"]), *case, {}, **options)


def test_run_killed_at_event_resumes_identically(folder: Path) -> None:
    """At the middle one of each third kind outside of steps."""
    recorder, options = resuming.KillAtEvent(), {**RECIPES["odd intervals"], "epochs": 2}
    expected = play(folder / "straight", [{"cut": recorder}], **options)
    kinds = [event for event in dict.fromkeys(recorder.names) if event not in INNER_STEP_EVENTS]
    assert len(kinds) > 10
    for kind in kinds[1::3]:
        numbers = [number for number, event in enumerate(recorder.names, 1) if event == kind]
        number = numbers[len(numbers) // 2]
        result = play(folder / kind, [{"cut": resuming.KillAtEvent(number)}, {}], **options)
        assert_same(result, expected, f"killed at event {number}, {kind}")


def test_resumed_run_keeps_its_kind_of_order(stopped: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Larger datasets are shuffled without a full permutation."""
    drawn = straight()
    assert content_of(stopped / "checkpoint-4")["order"] == "drawn"
    monkeypatch.setattr(sampling, "_DRAWN_WHOLE", 10)
    assert_same(play(stopped)["tensors"], drawn["tensors"])
    assert [step for step, score in scores_of(stopped).items() if score is None] == [4]
    keyed = play(folder / "keyed")
    assert keyed["stream"] != drawn["stream"]
    assert_same(play(folder / "parts", [{"cut": ("stop", 2)}, {}])["tensors"], keyed["tensors"])


class Expanded(nn.Module):
    """Has a buffer and a parameter whose elements share memory, and one that each forward pass replaces by such."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.scale = nn.Linear(4, 1), nn.Parameter(torch.ones(1).expand(4))
        self.register_buffer("offset", torch.full((1,), 0.5).expand(4))
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean = x.detach().mean().expand(4)
        return self.layer(x * self.scale + self.offset - self.mean)


@pytest.mark.parametrize(
    ("kind", "option"), [("native", {}), ("accelerate", {"microbatch_size": "auto"}), ("hf", {"on_nonfinite": "skip"})]
)
def test_expanded_tensors_are_restored(kind: str, option: dict[str, Any], folder: Path) -> None:
    def trained(run: str, steps: int) -> dict[str, torch.Tensor]:
        nan = on("after_backward", lambda trainer: trainer.model.layer.weight.grad.fill_(math.nan), 1)
        trainer = make_small(
            kind, Expanded(), rows(22, torch.float32), max_steps=steps, save_dir=folder / run, learning_rate=0.05,
            callbacks=[nan] if "on_nonfinite" in option else [], **option,
        )  # fmt: skip
        return dict(fit(trainer, resume_from="auto").model.state_dict())

    straight = trained("straight", 4)
    trained("run", 2)
    assert straight["scale"].unique().numel() == 4
    assert_same(trained("run", 4), straight)


def test_run_ended_by_patience_resumes_only_with_more(folder: Path) -> None:
    options: dict[str, Any] = {"epochs": 9, "eval_steps": 1, "save_steps": 1, "patience": 2}
    expected = straight(**options)
    last = expected["position"]["step"]
    assert expected["metrics"]["stop_reason"] == "early_stopping" and 3 < last < 27
    assert_resumes_identically(folder / "run", {"cut": ("kill", last - 1)}, {}, **options)
    again = play(folder / "run", **options)
    assert (again["position"], again["metrics"]) == (expected["position"], expected["metrics"])
    assert play(folder / "run", **{**options, "patience": 4, "max_steps": last + 2})["position"]["step"] > last


# --- folders


def test_run_resumes_in_another_save_dir(folder: Path) -> None:
    """It finds its best checkpoint in the first folder, and adds nothing there."""
    options = {"eval_steps": 1, "save_steps": 1, "load_best_at_end": True}
    expected = straight(**options)
    best = expected["metrics"]["best_step"]
    assert 2 < best < 9
    play(folder / "first", [{"cut": ("stop", best + 1)}], **options)
    source = folder / "first" / f"checkpoint-{best + 1}"
    result = outcome(train(build(folder / "second", **options), resume_from=source))
    for key in ("tensors", "metrics", "objective", "position", "last"):
        assert_same(result[key], expected[key], key)
    assert result["journal"] == [row for row in expected["journal"] if row["step"] > best + 1]
    assert not (folder / "first" / "checkpoint-9").exists()


def test_moved_run_resumes_from_another_working_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"eval_steps": 1, "save_steps": 1, "load_best_at_end": True}
    for name in ("before", "after"):
        (folder / name).mkdir()
    monkeypatch.chdir(folder / "before")
    play(Path("run"), [{"cut": ("kill", 5)}], **options, save_total_limit=2)
    shutil.move("run", folder / "elsewhere")
    monkeypatch.chdir(folder / "after")
    result = play(Path("../elsewhere"), **options, save_total_limit=2)
    assert_same(comparable(result), comparable(straight(**options)))


def test_folder_with_checkpoints_is_unchanged_until_a_save(stopped: Path) -> None:
    """Without `overwrite` it is rejected, and a run that is killed before its first save leaves it."""
    before = contents(stopped)
    trainer = build(stopped)
    with pytest.raises(ConfigError, match=r"already holds checkpoints.*checkpoint-4.*resume_from.*overwrite"):
        trainer.train()
    assert trainer.progress.step == 0 and contents(stopped) == before
    train(build(stopped, overwrite=True, callbacks=lambda: [Cut("kill", 1)]))
    assert Store(stopped).resolve("auto")[0].name == "checkpoint-4"  # type: ignore[index]


@pytest.mark.parametrize("is_async", [False, True])
def test_overwrite_replaces_the_run_at_the_first_save(is_async: bool, stopped: Path) -> None:
    present: list[list[str]] = []
    looks = [on(event, lambda trainer: present.append(names(stopped))) for event in ("train_start", "save_end")]
    options = {"save_steps": 5, "async_save": is_async, "seed": 1, "keep_best": 0, "overwrite": True}
    train(build(stopped, **options, callbacks=lambda: looks))
    assert (present[0], present[1], present[-1]) == (numbered(3, 4), numbered(5), numbered(5, 9))
    assert {row["step"] for row in resuming.journal(stopped)} <= set(range(10))


# --- best and retention


SCORES = [3.0, 9.0, 1.0, 2.0, 8.0, 4.0]


def scored(scores: list[float] = SCORES, **options: Any) -> dict[str, Any]:
    """Return options of a run whose evaluation after step n has the n-th score."""

    def transform(trainer: Any, metrics: dict[str, float]) -> dict[str, float]:
        return {**metrics, "eval_score": scores[trainer.progress.step - 1]}

    defaults = {"optimization_metric": "score", "eval_steps": 1, "save_steps": 1, "epochs": 2, "load_best_at_end": True}
    algorithms = lambda: [callback(Algorithm, transform_metrics=transform)]  # noqa: E731
    return {"algorithms": algorithms, "compute_metrics": lambda y_true, y_pred: {"score": 0.0}, **defaults, **options}


def scores_of(run: Path) -> dict[int, float | None]:
    return {entry.step: entry.score for entry in sorted(Store(run).checkpoint_infos(), key=lambda entry: entry.step)}


def test_newest_and_best_exist_after_every_save(folder: Path) -> None:
    steps: list[int] = []

    def look(trainer: Any) -> None:
        step = int(trainer.lifecycle.saved_path.name.removeprefix("checkpoint-"))
        best = max(range(1, step + 1), key=lambda n: SCORES[n - 1])
        pointers = [trainer.store.resolve(which)[0].name for which in ("last", "best")]
        assert pointers == numbered(step, best)
        assert names(folder / "run") == numbered(*sorted({*range(max(1, step - 1), step + 1), best}))
        steps.append(step)

    options = scored(save_total_limit=2, async_save=True, callbacks=lambda: [on("save_end", look)])
    trainer = train(build(folder / "run", **options))
    assert steps[-1] == 6 and len(steps) >= 6
    assert trainer.metrics["best_step"] == 2 and trainer.metrics["best_checkpoint"] == "checkpoint-2"


def test_keep_best_and_keep_every_add_checkpoints(folder: Path) -> None:
    """`keep_best` counts evaluations, not the checkpoints after them."""
    train(build(folder / "run", **scored(save_total_limit=1, keep_best=2, keep_every=3)))
    assert names(folder / "run") == numbered(2, 3, 5, 6)
    train(build(folder / "few", **scored(SCORES * 2, eval_steps=3, epochs=3, save_total_limit=1, keep_best=3)))
    assert names(folder / "few") == numbered(3, 6, 9)


EACH_THIRD, THIRD_SCORES = range(3, 13, 3), {6: 2.0, 9: 9.0, 12: 4.0}
SAVES_AT_EPOCHS = {"callbacks": lambda: [on("epoch_end", lambda trainer: trainer.request_save())]}
SCORED: dict[str, tuple[dict[str, Any], list[dict[str, Any]], range, dict[int, float]]] = {
    "async": ({"eval_steps": 3, "epochs": 3, "async_save": True}, [{}], range(1, 10), {3: 1.0, 6: 4.0, 9: 1.0}),
    "requested saves": (
        {"eval_steps": 4, "save_steps": 3, "epochs": 4, **SAVES_AT_EPOCHS}, [{}], EACH_THIRD, THIRD_SCORES),
    "killed": (
        {"eval_steps": 4, "save_steps": 3, "epochs": 4}, [{"cut": ("kill", 5)}, {}], EACH_THIRD, THIRD_SCORES),
    "killed after a save": (
        {"eval_steps": 4, "epochs": 4}, [{"cut": ("kill", 5)}, {}], range(1, 13), {4: 2.0, 8: 9.0, 12: 4.0}),
    "closing evaluation": (
        {"eval_steps": 4, "epochs": 3}, [{"max_steps": 6}, {}], range(1, 10), {4: 2.0, 6: 4.0, 8: 9.0, 9: 1.0}),
}  # fmt: skip
"""Options and parts of a run, the steps of its checkpoints, and the scores that some of them have."""


@pytest.mark.parametrize("case", SCORED)
def test_score_goes_to_first_checkpoint_after_evaluation(case: str, folder: Path) -> None:
    options, parts, steps, scores = SCORED[case]
    play(folder / "run", parts, **scored(SCORES * 2, keep_best=0, **options))
    assert scores_of(folder / "run") == dict.fromkeys(steps) | scores


def test_score_of_failed_checkpoint_goes_to_the_next(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FileSystem, "write", failing_write(lambda path: "checkpoint-3" in str(path)))
    play(folder / "run", **scored(eval_steps=3, max_steps=5, epochs=None))
    assert scores_of(folder / "run") == {1: None, 2: None, 4: 1.0, 5: 8.0}


@pytest.mark.parametrize(("end", "step"), [
    ({"patience": 2}, 2), ({"callbacks": lambda: [Cut("stop", 4)]}, 2),
    ({"callbacks": lambda: [Cut("signal", 5)]}, 5), ({"load_best_at_end": False}, 6),
], ids=["patience", "stop", "signal", "not wanted"])  # fmt: skip
def test_best_weights_are_loaded_at_the_end(end: Any, step: int, folder: Path, caplog: Any) -> None:
    """Except after a signal, or if that is not wanted, which is logged."""
    caplog.set_level(logging.INFO, "omnitrain")
    trainer = train(build(folder / "run", **scored(**end)))
    assert_same(dict(trainer.model.state_dict()), weights_of(folder / "run" / f"checkpoint-{step}"))
    assert ("keeps its last weights" in caplog.text) == (step != 2)
    assert best_of(folder / "run") == "checkpoint-2"


@pytest.mark.parametrize("name", [MANIFEST, state_dicts.WEIGHTS])
def test_damaged_best_is_reported_and_last_weights_stay(name: str, folder: Path, caplog: Any) -> None:
    damage = on("step_start", lambda trainer: spoil(trainer.store.path(2) / name, "flip", 200), 5)
    trainer = train(build(folder / "run", **scored(), callbacks=lambda: [damage]))
    assert trainer.metrics["stop_reason"] == "epochs" and trainer.metrics["best_checkpoint"] == "checkpoint-2"
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "checkpoint-2" in warning and repr(name) in warning
    assert_same(dict(trainer.model.state_dict()), weights_of(folder / "run" / "checkpoint-6"))


def test_best_by_closing_evaluation_gets_existing_checkpoint(folder: Path) -> None:
    """The checkpoint of step 4 is saved before anybody knows that it is the best."""
    trainer = train(build(folder / "run", **scored([1.0, 2.0, 3.0, 4.0], eval_steps=3, save_steps=2, max_steps=4)))
    assert trainer.metrics["best_step"] == 4 and trainer.metrics["best_checkpoint"] == "checkpoint-4"
    assert best_of(folder / "run") == "checkpoint-4"


@pytest.mark.parametrize("schedule", ["CosineAnnealingLR", "ReduceLROnPlateau"])
def test_lengthened_run_equals_the_long_run(schedule: str, folder: Path) -> None:
    """The evaluation after step 4 closed the shorter run; the longer one has none there, also not for its best.

    If only the best and the newest are kept, the shorter run has deleted the longer one's best.
    """
    options = scored([0.0, 0.0, 5.0, 9.0, 0.0, 1.0], eval_steps=3, async_save=schedule == "CosineAnnealingLR")
    options["lr_scheduler"] = RECIPES[schedule]["lr_scheduler"]
    result = assert_resumes_identically(folder / "run", {"max_steps": 4}, {}, **options)
    assert result["metrics"]["best_checkpoint"] == "checkpoint-3"
    result = play(folder / "few", [{"max_steps": 4}, {}], **options, save_total_limit=1)
    assert names(folder / "few") == numbered(4, 6)
    weights = weights_of(folder / "few" / "checkpoint-4").items()
    assert_same({**result["tensors"], **{f"model/{name}": tensor for name, tensor in weights}}, result["tensors"])


def test_resuming_from_best_equals_the_first_time(folder: Path) -> None:
    run, options = folder / "run", scored([1.0, 9.0, 2.0, 3.0, 4.0, 5.0], save_steps=2)
    expected = comparable(play(run, **options))
    assert_same(outcome(train(build(run, **options), resume_from="best")), expected)
    assert names(run) == numbered(2, 4, 6)
    train(build(run, **options, callbacks=lambda: [Cut("stop", 3)]), resume_from="best")
    assert_same(comparable(play(run, **options)), expected, "3 was saved last, not 6")


# --- settings that have changed


class Wider(Net):
    pass


CHANGES: dict[str, dict[str, Any]] = {
    "model": {"model": Wider},
    "optimizer": {"optimizer": torch.optim.SGD},
    "learning_rate": {"learning_rate": 0.01},
    "weight_decay": {"weight_decay": 0.1},
    "optimizer_groups": with_optimizer(
        lambda parameters: torch.optim.AdamW(parameters, 0.05, (0.8, 0.99), weight_decay=0)
    ),
    "lr_scheduler": {"lr_scheduler": "linear"},
    "warmup_steps": {"warmup_steps": 2},
    "global_batch_size": {"batch_size": 8},
    "max_grad_norm": {"max_grad_norm": 0.5},
    "grad_reduction": {"grad_reduction": "sum"},
    "loss_fn": {"loss_fn": F.l1_loss},
    "unit": {"unit": lambda model: lambda batch: F.mse_loss(model(batch[0]), batch[1]), "loss_fn": None},
    "algorithms": {"algorithms": lambda: [callback(Algorithm, transform_loss=lambda trainer, loss: 2 * loss)]},
    "optimization_metric": {"optimization_metric": "mae", "compute_metrics": lambda t, p: {"mae": abs(t - p).mean()}},
    "optimization_direction": {"optimization_direction": "max"},
    "autocast": {"autocast": "bf16"},
    "seed": {"seed": 1},
    "shuffle": {"shuffle": False},
    "samples_per_epoch": {"dataset": lambda: Numbered(24)},
}


EFFECTS: dict[str, Callable[[Trainer], object]] = {
    "weight_decay": lambda trainer: trainer.optimizer.param_groups[0]["weight_decay"] == 0.1,
    "optimizer_groups": lambda trainer: trainer.optimizer.param_groups[0]["betas"] == (0.8, 0.99),
    "optimizer": lambda trainer: isinstance(trainer.optimizer, torch.optim.SGD),
}
SAME_NUMBERS = ("autocast", "model", "optimization_direction", "optimization_metric", "unit", "warmup_steps")
"""As the run is in double precision, and past its warm-up."""


@pytest.mark.parametrize(
    "name",
    thinned(
        CHANGES,
        ["model", "optimizer", "optimizer_groups", "lr_scheduler", "global_batch_size", "unit", "samples_per_epoch"],
    ),
)
def test_changed_setting_is_rejected_unless_allowed(name: str, stopped: Path) -> None:
    """The error has both values, and nothing is restored; a change that is allowed takes effect."""
    trainer = build(stopped, **CHANGES[name])
    before = {key: tensor.clone() for key, tensor in trainer.model.state_dict().items()}
    with pytest.raises(CheckpointError, match=rf"other settings.*\b{name}: .* -> .*allow_change=") as caught:
        trainer.train(resume_from="auto")
    reported = re.findall(r"(\w+): (?:(?!; |\. Set).)* -> ", str(caught.value).split("change the run: ")[1])
    changes = {name, "loss_fn"} if name == "unit" else {name}
    assert {*reported} == changes, "and no other setting"
    assert_same(dict(trainer.model.state_dict()), before)
    assert trainer.progress.step == 0
    trainer = build(stopped, **CHANGES[name])
    metrics = trainer.train(resume_from="auto", allow_change=changes)
    assert metrics["train_metrics_history"][-1]["epoch"] == 3
    weight = straight()["tensors"]["model/head.weight"]
    assert torch.equal(trainer.model.head.weight, weight) == (name in SAME_NUMBERS)
    assert EFFECTS.get(name, bool)(trainer)


EARLIER, LATER = range(4), range(4, 9)


def exponential(factor: float) -> Any:
    return lambda optimizer: schedules.ExponentialLR(optimizer, factor)


def chained(factor: float) -> Any:
    return lambda optimizer: schedules.ChainedScheduler([schedules.ExponentialLR(optimizer, factor)])


RATES: dict[str, tuple[dict[str, Any], str, dict[str, Any], list[float]]] = {
    "rate": (
        {"lr_scheduler": exponential(0.5)}, "learning_rate", {"learning_rate": 0.01},
        [*(0.05 * 0.5**step for step in EARLIER), *(0.01 * 0.5**step for step in LATER)]),
    "linear to cosine": (
        {"lr_scheduler": "linear"}, "lr_scheduler", {"lr_scheduler": "cosine"},
        [*(0.05 * (9 - step) / 9 for step in EARLIER), *(0.025 * (1 + math.cos(math.pi * step / 9)) for step in LATER)],
    ),
    "constant to custom": (
        {"lr_scheduler": "constant"}, "lr_scheduler", {"lr_scheduler": exponential(0.5)},
        [*(0.05 for _ in EARLIER), *(0.05 * 0.5**step for step in range(5))]),
    "custom options": (
        {"lr_scheduler": exponential(0.5)}, "lr_scheduler_options", {"lr_scheduler": exponential(0.1)},
        [*(0.05 * 0.5**step for step in EARLIER), *(0.003125 * 0.1**step for step in range(5))]),
    "options of a part": (
        {"lr_scheduler": chained(0.5)}, "lr_scheduler_options", {"lr_scheduler": chained(0.1)},
        [*(0.05 * 0.5**step for step in EARLIER), *(0.05 * 0.1**step for step in range(5))]),
    "warm-up": (
        {"warmup_steps": 2}, "warmup_steps", {"warmup_steps": 8},
        [0.0, 0.025, 0.05, 0.05, *(0.05 * step / 8 for step in LATER)]),
}  # fmt: skip


@pytest.mark.parametrize("case", thinned(RATES, RATES.keys() - {"constant to custom"}))
def test_allowed_rate_or_schedule_takes_effect_at_once(case: str, folder: Path) -> None:
    options, name, change, expected = RATES[case]
    rates: list[float] = []
    record = on("before_optimizer_step", lambda trainer: rates.append(trainer.optimizer.param_groups[0]["lr"]))
    options = {**options, "eval_dataset": None, "callbacks": lambda: [record]}
    play(folder / "run", [{"cut": ("stop", 4)}], **options)
    with pytest.raises(CheckpointError, match=rf"\b{name}: .* -> "):
        build(folder / "run", **{**options, **change}).train(resume_from="auto")
    play(folder / "run", [{**change, "allow_change": {name}}], **options)
    assert rates == pytest.approx(expected)


def test_allowed_change_of_seed_changes_the_dropout(folder: Path) -> None:
    """Neither the order nor the samples depend on the seed here."""
    options = {"shuffle": False, "dataset": lambda: Numbered(noisy=False), "eval_dataset": None}
    result = play(folder / "run", [{"cut": ("stop", 4)}, {"seed": 1, "allow_change": {"seed"}}], **options)
    weights = [outcome["tensors"]["model/head.weight"] for outcome in (result, straight(**options))]
    assert not torch.equal(*weights)


def test_allowed_change_of_objective_selects_again(folder: Path) -> None:
    options = {"epochs": 2, "eval_steps": 1, "save_steps": 1}
    play(folder / "run", [{"cut": ("stop", 4)}], **options)
    trainer = build(folder / "run", **options, **CHANGES["optimization_metric"])
    metrics = trainer.train(resume_from="auto", allow_change={"optimization_metric"})
    assert trainer.objective.metric == "mae" and metrics["best_step"] in (5, 6)
    assert "eval_mae" in metrics["best_valid"] and len(metrics["valid"]) == 6
    assert metrics["best_checkpoint"] == f"checkpoint-{metrics['best_step']}"


def test_settings_that_do_not_alter_numbers_may_change(stopped: Path) -> None:
    change = {
        "epochs": None, "max_steps": 12, "patience": 50, "eval_steps": 4, "save_steps": 3, "log_steps": 5,
        "eval_batch_size": 3, "callbacks": lambda: [Requesting()], "keep_best": 3, "on_nonfinite": "skip",
        "delta": 0.1, "async_save": True,
    }  # fmt: skip
    assert play(stopped, **change)["position"]["step"] == 12


def test_checkpoints_need_a_folder() -> None:
    for call, message in (
        (lambda: build(None).train(resume_from=True), r"`resume_from=True`: pass 'auto' .* or 'last'"),  # type: ignore[arg-type]
        (lambda: build(None).train(resume_from="auto"), r"resume_from='auto'.*save_dir"),
        (lambda: build(None).save_checkpoint(), "save_dir"),
        (lambda: build(None, save_only_model=True), r"save_only_model=True.*save_dir"),
    ):
        with pytest.raises(ConfigError, match=message):
            call()


def test_errors_of_resuming_come_before_the_first_step(stopped_run: Path) -> None:
    sgd = lambda parameters: torch.optim.SGD([*parameters, nn.Parameter(torch.zeros(7))], 0.1)  # noqa: E731
    narrow = {"model": lambda: nn.Linear(5, 1)}
    for options, arguments, message in (
        ({}, {"resume_from": "auto", "allow_change": {"lerning_rate"}}, r"'lerning_rate'.*learning_rate"),
        (narrow, {"resume_from": "auto", "allow_change": {"model"}}, "does not fit the model"),
        ({**with_optimizer(sgd), "overwrite": True}, {}, r"of shape \(7,\) that is not the model's"),
    ):
        trainer = build(stopped_run, **options)
        with pytest.raises((ConfigError, CheckpointError), match=message):
            trainer.train(**arguments)
        assert trainer.progress.step == 0 and names(stopped_run) == numbered(3, 4)


def test_files_have_no_pickles_and_no_absolute_paths(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And their JSON is strict: it has no NaN and Infinity, which the state of this schedule has."""

    def fail(*arguments: Any, **options: Any) -> Any:
        raise AssertionError(arguments)

    for name in ("Unpickler", "Pickler", "loads", "dumps", "load", "dump"):
        monkeypatch.setattr(pickle, name, fail)
    for name in ("torch.load", "torch.save", "torch.serialization.load", "torch.serialization.save"):
        monkeypatch.setattr(name, fail)
    options = scheduled(lambda optimizer: schedules.ReduceLROnPlateau(optimizer), eval_steps=5, load_best_at_end=True)
    play(folder / "run", [{"cut": ("stop", 4)}, {"max_steps": 6}], **options)
    files = [path for path in (folder / "run").rglob("*") if path.is_file()]
    assert {".json", ".jsonl"} <= {path.suffix for path in files} <= {".safetensors", ".json", ".jsonl", ".yaml", ""}
    for path in files:
        assert not path.read_bytes().startswith((b"\x80", b"PK"))
        if path.suffix in (".json", ".jsonl", ""):
            assert str(folder) not in path.read_text(), path
        if path.suffix == ".json":
            json.loads(path.read_text(), parse_constant=fail)


# --- asynchronous saves


def test_async_save_writes_the_state_of_its_step(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The list of a callback grows while its earlier state is written."""
    options: dict[str, Any] = {"save_steps": 3, "keep_best": 0, "epochs": 2}
    play(folder / "straight", callbacks=lambda: [Requesting()], **options)
    may_write, write = threading.Event(), FileSystem.write

    def wait_and_write(fs: FileSystem, path: Path, content: Any) -> Any:
        assert not is_tensor_file(path) or may_write.wait(programs.LIMIT)
        return write(fs, path, content)

    def release(trainer: Any) -> None:
        assert not trainer.store.checkpoints()
        may_write.set()

    monkeypatch.setattr(FileSystem, "write", wait_and_write)
    callbacks = [Requesting(), on("step_end", release, 5)]
    train(build(folder / "run", async_save=True, callbacks=lambda: callbacks, **options))
    for step in (3, 6):
        paths = [folder / run / f"checkpoint-{step}" for run in ("run", "straight")]
        assert_same(*map(weights_of, paths))
        result, expected = map(content_of, paths)
        assert result["callbacks"] == expected["callbacks"] and result["progress"]["step"] == step


def test_async_saves_do_not_overlap(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock, write = threading.Lock(), FileSystem.write

    def write_slowly(*arguments: Any) -> Any:
        assert lock.acquire(blocking=False), "another file is being written"
        time.sleep(0.01)
        entry = write(*arguments)
        lock.release()
        return entry

    monkeypatch.setattr(FileSystem, "write", write_slowly)
    train(build(folder / "run", save_steps=1, epochs=1, async_save=True))
    assert len(names(folder / "run")) == 3
    assert not [thread for thread in threading.enumerate() if "omnitrain-save" in thread.name]


def test_failed_save_costs_only_the_checkpoint(folder: Path, monkeypatch: Any, caplog: Any) -> None:
    """One that is written in the background; the last one is saved again at the end."""
    monkeypatch.setattr(FileSystem, "write", failing_write(lambda path: "checkpoint-3" in str(path)))
    train(build(folder / "async", save_steps=3, async_save=True, keep_best=0))
    assert caplog.text.count("Cannot save") == 1 and names(folder / "async") == numbered(6, 9)
    caplog.clear()
    attempts = itertools.count()
    second = failing_write(lambda path: is_tensor_file(path) and next(attempts) == 1)
    monkeypatch.setattr(FileSystem, "write", second)
    train(build(folder / "run", save_steps=4, eval_steps=2, max_steps=4))
    assert names(folder / "run") == numbered(4) and caplog.text.count("Cannot save") == 1


@pytest.mark.parametrize(
    ("error", "is_async"),
    [(FULL, False), (FULL, True), (RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos"), False)],
)
def test_save_required_failure_ends_the_run(error: Exception, is_async: bool, folder: Path, monkeypatch: Any) -> None:
    """The earlier checkpoint stays; PyTorch's own writer reports a full disk in its own way."""
    monkeypatch.setattr(FileSystem, "write", failing_write(lambda path: "checkpoint-4" in str(path), error))
    options = {"epochs": 2, "save_steps": 2, "eval_dataset": None, "save_required": True, "async_save": is_async}
    trainer = build(folder / "run", **options)
    with pytest.raises(CheckpointError, match=r"checkpoint-4.*(No space left|unexpected pos)"):
        trainer.train()
    assert names(folder / "run") == numbered(2) and trainer.progress.step in ((4, 5, 6) if is_async else (4,))


@pytest.mark.parametrize("fails", [True, False])
def test_error_of_the_run_waits_for_the_async_save(fails: bool, folder: Path, monkeypatch: Any, caplog: Any) -> None:
    """The checkpoint counts, and an error of the save is logged."""
    write, saved = failing_write(is_tensor_file) if fails else FileSystem.write, list[Any]()

    def write_slowly(*arguments: Any) -> Any:
        time.sleep(0.05)
        return write(*arguments)

    callbacks = [on("step_start", lambda trainer: 1 / 0, 4), on("save_end", saved.append)]
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):  # noqa: PT012
        patch.setattr(FileSystem, "write", write_slowly)
        build(folder / "run", save_steps=4, async_save=True, keep_best=0, callbacks=lambda: callbacks).train()
    assert caplog.text.count("Cannot save") == fails and names(folder / "run") == ([] if fails else numbered(4))
    assert not saved if fails else Store(folder / "run").resolve("auto") is not None


class Reads(Numbered):
    """Rows, and the numbers of those that were read."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.read: list[int] = []

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.read.append(index)
        return super().__getitem__(index)


@pytest.mark.parametrize("dataset", [Seekable, lambda: Reads(noisy=False)], ids=["stream", "rows"])
def test_resume_reads_no_earlier_samples(dataset: Any, folder: Path, caplog: Any) -> None:
    """An epoch of 22 samples and a step of 8 fewer than a run from the start, checks of the data included."""
    straight = train(build(folder / "straight", dataset=dataset))
    play(folder / "run", [{"cut": ("stop", 4)}], dataset=dataset)
    resumed = train(build(folder / "run", dataset=dataset), resume_from="auto")
    assert len(straight.train_dataset.read) - len(resumed.train_dataset.read) == 22 + 8 and "again" not in caplog.text


def test_signals_before_first_step_and_in_an_evaluation(folder: Path) -> None:
    """An evaluation that is cut twice can still be the best."""
    options = {"eval_on_start": True, "patience": 2, "eval_steps": 1, "epochs": 2}
    assert_resumes_identically(folder / "early", {"cut": on("eval_start", terminate, 0)}, {}, **options)
    parts = {"cut": ("signal", 3)}, {"cut": on("train_start", terminate)}, {}
    assert_resumes_identically(folder / "run", *parts, **scored([1.0, 2.0, 9.0, 4.0, 5.0, 6.0]))


def test_signal_while_limits_are_checked_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = build(None)
    reached = trainer.limits.reached

    def interrupted(progress: Any) -> str:
        result = reached(progress)
        if progress.step == 2:
            terminate(trainer)
        return result

    monkeypatch.setattr(trainer.limits, "reached", interrupted)
    with pytest.raises(SystemExit):
        trainer.train()
    assert trainer.progress.step == 2 and trainer.stop_reason == "signal"


def test_sigusr1_saves_and_the_run_continues(folder: Path) -> None:
    request = on("step_start", lambda trainer: os.kill(os.getpid(), signal.SIGUSR1), 4)
    trainer = train(build(folder / "run", save_steps=8, keep_best=0, callbacks=lambda: [request]))
    assert names(folder / "run") == numbered(5, 8, 9)
    assert trainer.metrics["stop_reason"] == "epochs"


def test_small_disk_is_reported_before_first_step(folder: Path, monkeypatch: Any, caplog: Any) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    texts: list[str] = []
    train(build(folder / "run", max_steps=1, callbacks=lambda: [on("step_start", lambda _: texts.append(caplog.text))]))
    assert "GB free" in texts[0]


def test_save_checkpoint_of_callback_resumes(folder: Path) -> None:
    """At STEP_END the evaluation of this step is still to come."""

    def save_and_end(trainer: Any) -> None:
        trainer.save_checkpoint()
        raise resuming.Killed

    options = {"eval_steps": 2, "save_steps": 5, "epochs": 2}
    play(folder / "run", [{"cut": on("step_end", save_and_end, 4)}], **options)
    result, expected = play(folder / "run", **options), straight(**options)
    for key in ("valid", "best_valid", "train_metrics_history"):
        assert_same(result["metrics"][key], expected["metrics"][key])
    assert_same(result["last"], expected["last"])


def test_load_checkpoint_restores_the_trainer(folder: Path) -> None:
    def facts(trainer: Trainer) -> dict[str, Any]:
        return {key: value for key, value in outcome(trainer).items() if key not in ("journal", "callbacks")}

    options = {**RECIPES["skipped steps"], "eval_steps": 5}
    expected = facts(train(build(folder / "run", **options)))
    other = build(folder / "run", **options)
    resuming.disturb_generators()
    assert other.load_checkpoint("last").name == "checkpoint-5"
    result = facts(other)
    result["metrics"]["stop_reason"], result["generator"] = "epochs", [torch.get_rng_state()]
    assert_same(result, expected)
    with pytest.raises(CheckpointError, match=r"Can't find a valid checkpoint at .*nowhere.*does not exist"):
        other.load_checkpoint(folder / "nowhere")


def test_pending_evaluation_without_dataset_is_left_out(folder: Path) -> None:
    play(folder / "run", [{"cut": ("signal", 3)}])
    assert play(folder / "run", max_steps=4, eval_dataset=None)["position"]["step"] == 4


def test_save_only_model_checkpoints_have_weights_only(folder: Path) -> None:
    """They are those of a full checkpoint, and cannot be resumed."""
    options = scored(save_steps=2, save_total_limit=1, async_save=True)
    full, light = folder / "full", folder / "light"
    expected = dict(train(build(full, **options)).model.state_dict())
    assert_same(dict(train(build(light, **options, save_only_model=True)).model.state_dict()), expected)
    assert names(light) == names(full)
    for path in Store(light).checkpoints():
        assert [*contents(path)] == [path / name for name in (HISTORY, state_dicts.WEIGHTS, MANIFEST)]
        assert_same(weights_of(path), weights_of(full / path.name))
        assert Store(light).verify(path)["metrics"]
    before, trainer = contents(light), build(light, **options)
    for which in ("auto", "last", "best", "checkpoint-6"):
        for call in (trainer.train, trainer.load_checkpoint):
            with pytest.raises(CheckpointError, match=r"has only weights, by `save_only_model`: no run can"):
                call(which)
    assert trainer.progress.step == 0 and contents(light) == before


def test_former_checkpoints_are_reduced_to_weights(trainer_class: Any, folder: Path) -> None:
    """The newest is full and resumed bit by bit, the best loads; optimizer and random numbers of others are gone."""
    store, full = Store(folder / "reduced"), folder / "full"
    options: dict[str, Any] = {"kind": trainer_class, "data": rows(16), "eval_dataset": rows(8), "epochs": 3}
    reducing = {**options, "save_dir": store.root, "save_only_model": "all_but_last"}
    small_trainer(**options, save_dir=full).train()
    small_trainer(**reducing, callbacks=[StopAt(9)]).train()
    assert names(store.root) == numbered(4, 8, 9)
    *former, newest = store.checkpoints()
    assert not store.verify(newest)["only_model"] and (newest / "optimizer").exists()
    for path in former:
        assert store.verify(path)["only_model"] and not list(path.glob("optimizer/*.safetensors"))
        assert_same(weights_of(path), weights_of(full / path.name))
        with pytest.raises(CheckpointError, match="has only weights, by `save_only_model`"):
            small_trainer(**options, save_dir=store.root).train(resume_from=path)
    trainer = fit(small_trainer(**reducing), resume_from="auto")
    assert_same(weights_of(store.root / "checkpoint-12"), weights_of(full / "checkpoint-12"))
    assert_same(dict(trainer.model.state_dict()), weights_of(full / best_of(full)))


def test_stream_without_a_state_is_read_again(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Opaque(Seekable):
        def state_dict(self) -> dict[str, Any]:
            return {"what": object()}

    options: dict[str, Any] = {"dataset": Opaque, "eval_dataset": None, "epochs": 2}
    play(folder / "run", [{"cut": ("stop", 2)}], **options)
    assert "will read the epoch again" in caplog.text
    resumed = train(build(folder / "run", **options), resume_from="auto")
    assert (resumed.progress.step, len(resumed.train_dataset.read)) == (6, 44)


def test_impossible_stream_state_is_rejected(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Before anything is restored; "auto" resumes from the checkpoint before."""
    options: dict[str, Any] = {"dataset": Seekable, "save_steps": 2}
    run, newest = folder / "run", folder / "run" / "checkpoint-4"
    play(run, [{"cut": ("stop", 4)}], **options)
    resumed, content = build(run, **options), content_of(newest)
    before = copy.deepcopy(dict(resumed.model.state_dict()))
    for key, value in (
        ("at", "x"), ("at", {"__float__": "nan"}), ("at", True), ("share", {"__float__": "inf"}),
        ("file", {}), ("file", 3), ("file", {"shard": []}), ("file", {"shard": 3}),
    ):  # fmt: skip
        forged = copy.deepcopy(content)
        forged["stream"]["state"][key] = value
        seal(newest, forged)
        with pytest.raises(CheckpointError, match=rf"checkpoint-4.*omnitrain.json.*{key if value else 'shard'}"):
            resumed.train(resume_from=newest)
        assert_same(dict(resumed.model.state_dict()), before)
        assert resumed.train_dataset.state_dict() == Seekable().state_dict()
    train(resumed, resume_from="auto")
    assert resumed.progress.step == 9 and "Skipped:" in caplog.text
