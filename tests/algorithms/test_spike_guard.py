"""SpikeGuard, against runs whose data never had the samples that it leaves out."""

from __future__ import annotations

import functools
import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from recipes import StopAt, callback, fit, same, small_trainer, weights
from resuming import Killed, memory_folder
from torch import nn
from torch.utils.data import Dataset, IterableDataset

from omnitrain import (
    EMA,
    SWA,
    AccelerateTrainer,
    CheckpointError,
    ConfigError,
    CsvLogger,
    HFTrainer,
    NonFiniteError,
    Periodic,
    SpikeGuard,
    Throughput,
    Trace,
    Trainer,
)

SAVED, UNSAVED = {"save_steps": 10}, {"save_dir": None, "save_steps": None}
BAD = (30, 100)  # in steps of one sample, the 4th epoch of 40 samples has them at fixed positions


class Rows(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Rows of a regression, of which some are far from all others; `keep` is the order of the only epoch."""

    def __init__(self, bad: tuple[int, ...] = BAD, value: float = 1000.0, keep: Any = None, size: int = 160) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(size, 4, dtype=torch.float64, generator=generator)
        self.y = self.x.sum(dim=1, keepdim=True)
        self.y[[*bad]] = value
        if keep is not None:
            self.epoch_size = len(keep)
            self.epoch_order = lambda epoch, seed: keep

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[index], self.y[index]


class StreamOfRows(IterableDataset[tuple[torch.Tensor, torch.Tensor]]):
    """The same rows in order."""

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return map(Rows().__getitem__, range(160))


class StreamWithState(StreamOfRows):
    """The same, which a new pass continues where the one before was left."""

    at = 0

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for row in itertools.islice(super().__iter__(), self.at, None):
            self.at += 1
            yield row
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 1)).double()


def build(folder: Path | None, *guards: Any, data: Any = None, **options: Any) -> Any:
    defaults: dict[str, Any] = {"epochs": 1, "learning_rate": 0.01, "log_steps": 1000, **(SAVED if folder else UNSAVED)}
    return small_trainer(*guards, model=model(), data=data or Rows(), **{**defaults, "save_dir": folder, **options})


def guard(**options: Any) -> SpikeGuard:
    return SpikeGuard(**{"threshold": 30.0, "window": 16, **options})


def rows_of(folder: Path, kind: str | None = None) -> list[dict[str, Any]]:
    """The rows of the log, or of one kind."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if kind in (None, row["kind"])]


def kept(trainer: Any) -> np.ndarray:
    """The order of the epoch, without what is left out."""
    order = trainer.train_loader.sampler.order(0)
    mask = np.ones(len(order), dtype=bool)
    for spike in trainer.algorithms[0].left_out:
        mask[spike.start : spike.stop] = False
    return order[mask]


def assert_as_without(trainer: Any) -> None:
    """Check that a run has the weights of one whose data never had the 8 samples that it has left out."""
    assert trainer.metrics["left_out_samples"] == 8 and not {*BAD} & {*kept(trainer)}
    assert same(train_reference(tuple(kept(trainer).tolist())), trainer.model.state_dict().values())


@functools.cache
def train_reference(order: tuple[int, ...]) -> list[torch.Tensor]:
    """The weights and statistics of a run on one epoch of these samples."""
    return list(fit(build(None, data=Rows(keep=np.array(order)))).model.state_dict().values())


@functools.cache
def straight_run(every: int | None = None) -> Any:
    """A run that was not interrupted."""
    with memory_folder() as folder:
        return fit(build(folder, guard(every=every)))


def assert_as_straight(trainer: Any, every: int | None = None) -> None:
    """Check that a resumed run has left out and ends with what one that was not interrupted has."""
    assert trainer.algorithms[0].left_out == straight_run(every).algorithms[0].left_out
    assert trainer.metrics["left_out_samples"] == 8
    assert same(weights(trainer.model), weights(straight_run(every).model))


def first_spike(every: int) -> int:
    return straight_run(every).algorithms[0].left_out[0].step


# --- going back


@pytest.mark.parametrize(("kind", "every", "options"), [
    (Trainer, None, {}),
    (AccelerateTrainer, None, {}),
    (HFTrainer, None, {}),
    (Trainer, 3, {}),
    (Trainer, None, {"save_steps": 1000}),  # which begins again
    (Trainer, 7, UNSAVED),  # from copies in memory
    pytest.param(Trainer, None, {"num_workers": 1}, marks=pytest.mark.processes),
])  # fmt: skip
def test_rewind_equals_data_without_the_samples(kind: Any, every: int | None, options: Any, tmp_path: Path) -> None:
    trainer = fit(build(tmp_path, guard(every=every), kind=kind, **options))
    assert trainer.progress.step == 38
    assert_as_without(trainer)


def test_rewind_starts_from_the_latest_copy(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    step = fit(build(tmp_path, guard(every=7), **UNSAVED)).algorithms[0].left_out[0].step
    assert step > 8 and f"continues from step {(step - 1) // 7 * 7} (a copy in memory)" in caplog.text


@pytest.mark.parametrize("kind", [Trainer, HFTrainer])
def test_rewind_goes_back_over_the_end_of_an_epoch(kind: Any, tmp_path: Path) -> None:
    """A run of several epochs leaves the samples out only where they spike; each row of the history is there once."""
    ends: list[int] = []
    watch = callback(on_epoch_end=lambda trainer: ends.append(trainer.progress.epoch))
    options = {"data": Rows(bad=(5,), size=24), "kind": kind, "epochs": 6, "save_steps": 1000, "callbacks": [watch]}
    trainer = fit(build(tmp_path / "run", guard(), **options))
    steps = [row["step"] for row in trainer.metrics["train_metrics_history"]]
    assert trainer.progress.epoch == 6 and steps == sorted(set(steps)) and len(steps) == 6
    spikes = trainer.algorithms[0].left_out
    assert spikes and ends != sorted(ends)
    assert trainer.progress.step == 36 - len(spikes)


EVALUATED = {"eval_dataset": Rows(bad=(), size=8), "load_best_at_end": False}


def test_rewind_leaves_the_rest_of_the_history_as_it_was(tmp_path: Path) -> None:
    """Logs, evaluations and checkpoints never show a step that is undone."""
    trainer = fit(build(tmp_path, guard(every=7), eval_steps=1, log_steps=1, **EVALUATED))
    for rows in (rows_of(tmp_path, "train"), rows_of(tmp_path, "eval"), trainer.metrics["valid"]):
        assert [row["step"] for row in rows] == list(range(1, 39))
    assert max(row["loss"] for row in rows_of(tmp_path, "train")) < 1000
    assert_as_without(trainer)


def test_rewind_to_the_beginning_keeps_the_first_evaluation(tmp_path: Path) -> None:
    trainer = fit(build(tmp_path, guard(), save_steps=1000, keep_best=0, eval_on_start=True, **EVALUATED))
    assert trainer.metrics["left_out_samples"] == 8
    for rows in (trainer.metrics["valid"], rows_of(tmp_path, "eval")):
        assert [row["step"] for row in rows] == [0, 38]


@pytest.mark.parametrize(("saves", "every"), [(True, None), (False, 3), (False, 1000)])
def test_rewind_of_a_stream_leaves_out_its_samples(saves: bool, every: int | None, tmp_path: Path) -> None:
    """With and without a state: from checkpoints, from copies within an epoch, and from the beginning."""
    run, plain = (
        fit(build(tmp_path / name if saves else None, guard(every=every), data=data, max_steps=30, epochs=None))
        for name, data in {"run": StreamWithState(), "plain": StreamOfRows()}.items()
    )
    for trainer in (run, plain):
        assert [(spike.start, spike.stop) for spike in trainer.algorithms[0].left_out] == [(28, 32), (100, 104)]
    assert same(weights(run.model), weights(plain.model))


@pytest.mark.parametrize(("average", "every", "save_steps"), [
    (lambda: EMA(0.9), 3, 10),
    (lambda: EMA(0.9), None, 1000),
    (lambda: SWA("12ba", every=1), None, 10),
    (lambda: SWA("12ba", every=1), 10, 1000),
])  # fmt: skip
def test_rewind_restores_averages(average: Any, every: int | None, save_steps: int, tmp_path: Path) -> None:
    """The run ends with them; a state from before the first average has none."""
    trainer = fit(build(tmp_path / "run", guard(every=every), average(), save_steps=save_steps))
    reference = fit(build(None, average(), data=Rows(keep=kept(trainer))))
    assert trainer.metrics["left_out_samples"] == 8
    assert same(weights(trainer.model), weights(reference.model))


def test_rewind_takes_the_intervals_of_callbacks_along(tmp_path: Path) -> None:
    """The step that spikes is the end of an interval, and follows the copy; rates count no step twice."""
    step = first_spike(1)
    callbacks = [Periodic(lambda trainer: {"drawn": 1.0}, f"{step}ba"), Throughput(), CsvLogger(every=f"{step}ba")]
    fit(build(tmp_path, guard(every=1), callbacks=callbacks, save_steps=1000))
    assert [row["step"] for row in rows_of(tmp_path) if "drawn" in row] == [step, 2 * step]
    assert all(row["steps_per_second"] > 0 for row in rows_of(tmp_path) if "steps_per_second" in row)
    table = (tmp_path / "metrics.csv").read_text().splitlines()
    assert [int(line.split(",")[1]) for line in table[1:]] == [step, 2 * step, 38]


def test_rewind_drops_values_of_undone_steps(tmp_path: Path) -> None:
    """The log that shows them begins with the rewind."""
    step = first_spike(3)
    callbacks = [Periodic(lambda trainer: {"at": trainer.progress.step}, every=lambda progress: progress.step >= step)]
    fit(build(tmp_path, guard(every=3), callbacks=callbacks, log_steps=1))
    assert [(row["step"], row["at"]) for row in rows_of(tmp_path) if "at" in row] == [
        (at, at) for at in range(step, 39)
    ]


def test_rewind_takes_samples_that_are_not_finite(tmp_path: Path) -> None:
    """And drops the traced row of the skipped step, which has the number of the step before."""
    trainer = fit(build(tmp_path, guard(every=1), data=Rows(value=math.nan), callbacks=[Trace()]))
    assert_as_without(trainer)
    assert "nan" in json.dumps(json.loads((tmp_path / "run.json").read_text())["starts"][0]["left_out"])
    rows = [json.loads(line) for line in (tmp_path / "trace.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if row["kind"] == "step"] == list(range(1, 39))


def test_rewind_is_recorded_and_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fit(build(tmp_path, guard()))
    (first, second) = json.loads((tmp_path / "run.json").read_text())["starts"][0]["left_out"]
    assert set(BAD) <= {*first["samples"], *second["samples"]} and first["kind"] == "loss"
    assert f"A spike: the loss of step {first['step']} (epoch 1) is " in caplog.text
    assert "The run continues from step 10 (checkpoint-10), and leaves out its 4 samples: " in caplog.text
    assert json.loads((tmp_path / "last/omnitrain.json").read_text())["metrics"]["left_out_samples"] == 8


# --- resumed runs


@pytest.mark.parametrize(
    ("event", "step"), [("on_step_end", 25), ("on_step_end", 36), ("on_checkpoint_loaded", None)],
    ids=["between", "after", "in a rewind"],
)  # fmt: skip
def test_killed_run_leaves_out_the_same_when_resumed(event: str, step: int | None, tmp_path: Path) -> None:
    def kill(trainer: Any) -> None:
        if step is None or (trainer.progress.step == step and trainer.algorithms[0].left_out):
            raise Killed

    with pytest.raises(Killed):
        build(tmp_path, guard(), callbacks=[callback(**{event: kill})]).train()
    assert_as_straight(fit(build(tmp_path, guard(), callbacks=[callback()]), resume_from="auto"))


def test_resumed_run_rewinds_past_a_reduced_checkpoint(tmp_path: Path) -> None:
    """`save_only_model` has reduced the one from which it was resumed."""
    options = {"save_only_model": "all_but_last", "save_steps": 2}
    fit(build(tmp_path, guard(every=1), callbacks=[StopAt(3)], **options))
    assert_as_without(fit(build(tmp_path, guard(every=1), callbacks=[callback()], **options), resume_from="auto"))


@pytest.mark.parametrize("every", [None, 3])
def test_signal_at_a_spike_saves_what_is_left_out(every: int | None, tmp_path: Path) -> None:
    step = straight_run(every).algorithms[0].left_out[0].step

    def stop(trainer: Any) -> None:
        if trainer.progress.step == step:
            trainer.stop("signal")

    fit(build(tmp_path, guard(every=every), callbacks=[callback(on_step_end=stop)]))
    content = json.loads((tmp_path / "last/omnitrain.json").read_text())
    assert content["step"] < step and content["metrics"]["left_out_samples"] == 4
    resumed = fit(build(tmp_path, guard(every=every), callbacks=[callback()]), resume_from="auto")
    assert_as_straight(resumed, every)


# --- its limits


def test_rewinds_in_a_row_end_in_an_error(tmp_path: Path) -> None:
    """All data from some point on are bad: the samples are not the cause."""
    trainer = build(tmp_path, guard(limit=2), data=Rows(bad=tuple(range(60, 160))), shuffle=False)
    with pytest.raises(NonFiniteError, match=r"^The loss of step 16 .* after 2 rewinds in a row .* 60 to 63, 64 to 67"):
        trainer.train()


def test_rewind_needs_a_state_from_before(tmp_path: Path) -> None:
    saves = callback(on_step_end=lambda trainer: trainer.save_checkpoint())
    with pytest.raises(CheckpointError, match="there is no checkpoint and no copy from before step"):
        build(tmp_path, guard(), callbacks=[saves]).train()


@pytest.mark.parametrize("kind", [Trainer, AccelerateTrainer, HFTrainer])
def test_skip_leaves_out_the_update(kind: Any, tmp_path: Path) -> None:
    trainer = fit(build(tmp_path, guard(action="skip"), kind=kind))
    assert trainer.progress.skipped_steps == 2 and trainer.progress.step == 38
    assert trainer.metrics["left_out_samples"] == 8


def test_stop_ends_the_run_before_the_update(tmp_path: Path) -> None:
    trainer = fit(build(tmp_path, guard(action="stop")))
    assert trainer.metrics["stop_reason"] == "requested" and trainer.progress.skipped_steps == 1
    assert trainer.progress.step < 38


class Custom(Trainer):
    def _train_epoch(self, epoch: int) -> float:
        return 0.0


REJECTED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"threshold": 0}, {}, "`threshold` must be"),
    ({"window": 4}, {}, "`window` must be"),
    ({"action": "halt"}, {}, "`action` must be one of 'rewind', 'skip', 'stop'"),
    ({"every": 0}, {}, "`every` must be"),
    ({"limit": 0}, {}, "`limit` must be"),
    ({"every": 5, "action": "skip"}, {}, "`every=5` has no effect with action='skip'"),
    ({}, UNSAVED, r"the run has no `save_dir`. Pass `every`"),
    ({}, {"save_only_model": True}, "the run has save_only_model=True"),
    ({}, {"kind": Custom, "device": "cpu"}, "whose steps nothing judges"),
]


@pytest.mark.parametrize(("options", "run", "message"), REJECTED)
def test_spike_guard_rejects_what_it_cannot_do(options: Any, run: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        build(tmp_path, SpikeGuard(**options), **run).train()


# --- what is a spike

NOISE = [1 + 0.1 * math.sin(number) for number in range(40)]
POSITION = {"step": 1, "epoch": 0, "start": 0, "stop": 4}


@pytest.mark.parametrize(("values", "count"), [
    ([*NOISE, 1.3], 0),
    ([*NOISE, 3.0], 1),
    ([1.0] * 30 + [1.01], 0),  # which is little for a constant loss
    ([1.0] * 30 + [1.1], 1),
    ([1.0] * 30 + [9.0] * 50, 50),  # which do not count for the median
    ([math.exp(-number / 20) for number in range(200)], 0),
], ids=["noise", "spike", "rounding", "constant", "many", "falling"])  # fmt: skip
def test_spike_is_far_above_the_recent_median(values: list[float], count: int) -> None:
    judge = SpikeGuard(window=20)
    spikes = [judge.find_spike(POSITION, value, 1.0) for value in values]
    assert [spike is not None for spike in spikes] == [False] * (len(values) - count) + [True] * count
    for spike in filter(None, spikes):
        assert spike.kind == "loss" and spike.value == values[-1] and values[0] < spike.limit < spike.value


def test_growing_norm_has_no_spike() -> None:
    """At the end of a plateau it grows tenfold in 20 steps, each time by little; a jump is a spike even then."""
    judge = SpikeGuard()
    norms = [0.3 + 0.05 * math.sin(number) for number in range(30)]
    norms += [norms[-1] * 1.12**number * (1 + 0.2 * math.sin(2 * number)) for number in range(20)]
    assert [judge.find_spike(POSITION, 1.0, norm) for norm in norms] == [None] * 50
    spike = judge.find_spike(POSITION, 1.0, 3 * max(norms))
    assert spike is not None and spike.kind == "grad_norm" and max(norms) < spike.limit
    assert "the gradient norm of step 1" in str(spike)
