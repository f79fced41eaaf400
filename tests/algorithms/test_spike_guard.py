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
from recipes import StopAt, callback, same, small_trainer, weights
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
from omnitrain.algorithms.spike_guard import Spike

KINDS = [Trainer, AccelerateTrainer, HFTrainer]
BAD = (30, 100)  # in steps of one sample, the 4th epoch of 40 samples has them at fixed positions
POSITION = {"step": 1, "epoch": 0, "start": 0, "stop": 4}


class Killed(BaseException):
    """Ends a run as a kill does: nothing is saved any more."""


class Rows(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Rows of a regression, of which some are far from all others; `keep` is the order of the only epoch."""

    def __init__(self, bad: tuple[int, ...] = BAD, value: float = 1000.0, keep: Any = None, size: int = 160) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(size, 4, dtype=torch.float64, generator=generator)
        self.y = self.x.sum(dim=1, keepdim=True)
        for index in bad:
            self.y[index] = value
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
        rows = Rows()
        return (rows[index] for index in range(len(rows)))


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
    options = {"epochs": 1, "learning_rate": 0.01, "save_steps": 10, "log_steps": 1000, **options}
    return small_trainer(*guards, model=model(), data=data or Rows(), save_dir=folder, **options)


def guard(**options: Any) -> SpikeGuard:
    return SpikeGuard(**{"threshold": 30.0, "window": 16, **options})


def kept(trainer: Any) -> np.ndarray:
    """The order of the epoch, without what is left out."""
    order = trainer.train_loader.sampler.order(0)
    mask = np.ones(len(order), dtype=bool)
    for spike in trainer.algorithms[0].left_out:
        mask[spike.start : spike.stop] = False
    return order[mask]


def assert_as_without(trainer: Any) -> None:
    """Check that a run has the weights of one whose data never had the samples that it has left out."""
    assert same(train_reference(tuple(kept(trainer).tolist())), trainer.model.state_dict().values())


@functools.cache
def train_reference(order: tuple[int, ...]) -> list[torch.Tensor]:
    """The weights and statistics of a run on one epoch of these samples."""
    reference = build(None, data=Rows(keep=np.array(order)), save_steps=None)
    reference.train()
    return list(reference.model.state_dict().values())


# --- going back


@pytest.mark.parametrize(("kind", "every"), [*[(kind, None) for kind in KINDS], (Trainer, 3)])
def test_rewind_equals_data_without_the_samples(kind: Any, every: int | None, tmp_path: Path) -> None:
    trainer = build(tmp_path / "run", guard(every=every), kind=kind)
    trainer.train()
    assert {index for index in BAD if index in kept(trainer)} == set()
    assert trainer.progress.step == 38 and trainer.metrics["left_out_samples"] == 8
    assert_as_without(trainer)


def test_rewind_without_checkpoint_uses_copies_in_memory() -> None:
    trainer = build(None, guard(every=7), save_steps=None)
    trainer.train()
    assert trainer.metrics["left_out_samples"] == 8


def test_rewind_before_first_checkpoint_begins_again(tmp_path: Path) -> None:
    trainer = build(tmp_path / "run", guard(), save_steps=1000)
    trainer.train()
    assert trainer.metrics["left_out_samples"] == 8
    assert_as_without(trainer)


@pytest.mark.parametrize("kind", [Trainer, HFTrainer])
def test_rewind_goes_back_over_the_end_of_an_epoch(kind: Any, tmp_path: Path) -> None:
    """A run of several epochs leaves the samples out only where they spike; each row of the history is there once."""
    ends: list[int] = []
    watch = callback(on_epoch_end=lambda trainer: ends.append(trainer.progress.epoch))
    data = Rows(bad=(5,), size=24)
    trainer = build(tmp_path / "run", guard(), data=data, kind=kind, epochs=6, save_steps=1000, callbacks=[watch])
    trainer.train()
    steps = [row["step"] for row in trainer.metrics["train_metrics_history"]]
    assert trainer.progress.epoch == 6 and steps == sorted(set(steps)) and len(steps) == 6
    spikes = trainer.algorithms[0].left_out
    assert spikes and ends != sorted(ends)
    assert trainer.progress.step == 36 - len(spikes)


def test_rewind_leaves_the_rest_of_the_history_as_it_was(tmp_path: Path) -> None:
    """Logs, evaluations and checkpoints never show a step that is undone."""
    options = {"eval_steps": 1, "log_steps": 1, "eval_dataset": Rows(bad=(), size=8), "load_best_at_end": False}
    trainer = build(tmp_path / "run", guard(every=7), **options)
    trainer.train()
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    for name in ("train", "eval"):
        assert [row["step"] for row in rows if row["kind"] == name] == list(range(1, 39))
    assert [row["step"] for row in trainer.metrics["valid"]] == list(range(1, 39))
    assert max(row["loss"] for row in rows if row["kind"] == "train") < 1000
    assert_as_without(trainer)


def test_rewind_to_the_beginning_keeps_the_first_evaluation(tmp_path: Path) -> None:
    options = {"eval_on_start": True, "eval_dataset": Rows(bad=(), size=8), "load_best_at_end": False}
    trainer = build(tmp_path / "run", guard(), save_steps=1000, keep_best=0, **options)
    trainer.train()
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert trainer.metrics["left_out_samples"] == 8
    assert [row["step"] for row in trainer.metrics["valid"]] == [0, 38]
    assert [row["step"] for row in rows if row["kind"] == "eval"] == [0, 38]


def test_rewind_of_a_stream_leaves_out_its_samples(tmp_path: Path) -> None:
    trainer = build(tmp_path / "run", guard(), data=StreamOfRows(), max_steps=30, epochs=None)
    trainer.train()
    assert [(spike.start, spike.stop) for spike in trainer.algorithms[0].left_out] == [(28, 32), (100, 104)]


@pytest.mark.parametrize(("saves", "every"), [(True, None), (False, 3), (False, 1000)])
def test_rewind_of_a_stream_with_state(saves: bool, every: int | None, tmp_path: Path) -> None:
    """From checkpoints, from copies within an epoch, and from the beginning."""
    options = {"max_steps": 30, "epochs": None, "save_steps": 10 if saves else None}
    run, plain = (
        build(tmp_path / name if saves else None, guard(every=every), data=data, **options)
        for name, data in {"run": StreamWithState(), "plain": StreamOfRows()}.items()
    )
    run.train()
    plain.train()
    assert run.algorithms[0].left_out == plain.algorithms[0].left_out != []
    assert same(weights(run.model), weights(plain.model))


@pytest.mark.parametrize(
    ("average", "options"),
    [
        (lambda: EMA(0.9), {"every": 3}),
        (lambda: EMA(0.9), {"save_steps": 1000}),
        (lambda: SWA("12ba", every=1), {"save_steps": 10}),
        (lambda: SWA("12ba", every=1), {"every": 10, "save_steps": 1000}),
    ],
)
def test_rewind_restores_averages(average: Any, options: dict[str, Any], tmp_path: Path) -> None:
    """The run ends with them; a state from before the first average has none."""
    every = options.get("every")
    trainer = build(tmp_path / "run", guard(every=every), average(), save_steps=options.get("save_steps", 10))
    trainer.train()
    reference = build(None, average(), data=Rows(keep=kept(trainer)), save_steps=None)
    reference.train()
    assert trainer.metrics["left_out_samples"] == 8
    assert same(weights(trainer.model), weights(reference.model))


def test_rewind_takes_the_intervals_of_callbacks_along(tmp_path: Path) -> None:
    """The step that spikes is the end of an interval, and follows the copy; rates count no step twice."""
    expected = build(None, guard(every=1), save_steps=None)
    expected.train()
    step = expected.algorithms[0].left_out[0].step
    every = f"{step}ba"
    callbacks = [Periodic(lambda trainer: {"drawn": 1.0}, every), Throughput(), CsvLogger(every=every)]
    trainer = build(tmp_path / "run", guard(every=1), callbacks=callbacks, save_steps=1000)
    trainer.train()
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "drawn" in row] == [step, 2 * step]
    assert all(row["steps_per_second"] > 0 for row in rows if "steps_per_second" in row)
    table = (tmp_path / "run/metrics.csv").read_text().splitlines()
    assert [int(line.split(",")[1]) for line in table[1:]] == [step, 2 * step, 38]


def test_rewind_drops_values_of_undone_steps(tmp_path: Path) -> None:
    """The log that shows them begins with the rewind."""
    expected = build(tmp_path / "expected", guard(every=3), log_steps=1)
    expected.train()
    step = expected.algorithms[0].left_out[0].step
    callbacks = [Periodic(lambda trainer: {"at": trainer.progress.step}, every=lambda progress: progress.step >= step)]
    trainer = build(tmp_path / "run", guard(every=3), callbacks=callbacks, log_steps=1)
    trainer.train()
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [(row["step"], row["at"]) for row in rows if "at" in row] == [(at, at) for at in range(step, 39)]


def test_rewind_drops_the_traced_row_of_a_skipped_step(tmp_path: Path) -> None:
    """That of a loss that is not finite, which has the number of the step before."""
    trainer = build(tmp_path / "run", guard(every=1), data=Rows(value=math.nan), callbacks=[Trace()])
    trainer.train()
    rows = [json.loads(line) for line in (tmp_path / "run/trace.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if row["kind"] == "step"] == list(range(1, 39))


@pytest.mark.processes
def test_rewind_with_worker_processes(tmp_path: Path) -> None:
    trainer = build(tmp_path / "run", guard(), num_workers=1)
    trainer.train()
    assert_as_without(trainer)


def test_rewind_takes_samples_that_are_not_finite(tmp_path: Path) -> None:
    trainer = build(tmp_path / "run", guard(), data=Rows(value=math.nan))
    trainer.train()
    assert trainer.metrics["left_out_samples"] == 8
    assert all(weight.isfinite().all() for weight in weights(trainer.model))
    assert "nan" in json.dumps(json.loads((tmp_path / "run/run.json").read_text())["starts"][0]["left_out"])


def test_rewind_is_recorded_and_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = build(tmp_path / "run", guard())
    trainer.train()
    (first, second) = json.loads((tmp_path / "run/run.json").read_text())["starts"][0]["left_out"]
    assert set(BAD) <= {*first["samples"], *second["samples"]} and first["kind"] == "loss"
    assert f"A spike: the loss of step {first['step']} (epoch 1) is " in caplog.text
    assert "The run continues from step 10 (checkpoint-10), and leaves out its 4 samples: " in caplog.text
    content = json.loads((tmp_path / "run/last/omnitrain.json").read_text())
    assert content["metrics"]["left_out_samples"] == trainer.metrics["left_out_samples"] == 8


# --- resumed runs


@pytest.mark.parametrize("step", [25, 36])
def test_resumed_run_leaves_out_the_same(step: int, tmp_path: Path) -> None:
    expected = build(tmp_path / "expected", guard())
    expected.train()

    def kill(trainer: Any) -> None:
        if trainer.progress.step == step and trainer.algorithms[0].left_out:
            raise Killed

    with pytest.raises(Killed):
        build(tmp_path / "run", guard(), callbacks=[callback(on_step_end=kill)]).train()
    resumed = build(tmp_path / "run", guard(), callbacks=[callback()])
    resumed.train(resume_from="auto")
    assert resumed.algorithms[0].left_out == expected.algorithms[0].left_out
    assert resumed.metrics["left_out_samples"] == 8
    assert same(weights(resumed.model), weights(expected.model))


def test_resumed_run_rewinds_past_a_reduced_checkpoint(tmp_path: Path) -> None:
    """`save_only_model` has reduced the one from which it was resumed."""
    options = {"save_only_model": "all_but_last", "save_steps": 2}
    build(tmp_path / "run", guard(every=1), callbacks=[StopAt(3)], **options).train()
    resumed = build(tmp_path / "run", guard(every=1), callbacks=[callback()], **options)
    resumed.train(resume_from="auto")
    assert resumed.metrics["left_out_samples"] == 8
    assert_as_without(resumed)


def test_kill_within_a_rewind_is_resumed(tmp_path: Path) -> None:
    expected = build(tmp_path / "expected", guard())
    expected.train()

    def kill(trainer: Any) -> None:
        raise Killed

    with pytest.raises(Killed):
        build(tmp_path / "run", guard(), callbacks=[callback(on_checkpoint_loaded=kill)]).train()
    resumed = build(tmp_path / "run", guard(), callbacks=[callback()])
    resumed.train(resume_from="auto")
    assert resumed.algorithms[0].left_out == expected.algorithms[0].left_out
    assert same(weights(resumed.model), weights(expected.model))


@pytest.mark.parametrize("every", [None, 3])
def test_signal_at_a_spike_saves_what_is_left_out(every: int | None, tmp_path: Path) -> None:
    expected = build(tmp_path / "expected", guard(every=every))
    expected.train()
    step = expected.algorithms[0].left_out[0].step

    def stop(trainer: Any) -> None:
        if trainer.progress.step == step:
            trainer.stop("signal")

    build(tmp_path / "run", guard(every=every), callbacks=[callback(on_step_end=stop)]).train()
    content = json.loads((tmp_path / "run/last/omnitrain.json").read_text())
    assert content["step"] < step and content["metrics"]["left_out_samples"] == 4
    resumed = build(tmp_path / "run", guard(every=every), callbacks=[callback()])
    resumed.train(resume_from="auto")
    assert resumed.algorithms[0].left_out == expected.algorithms[0].left_out
    assert same(weights(resumed.model), weights(expected.model))


# --- its limits


def test_rewinds_in_a_row_end_in_an_error(tmp_path: Path) -> None:
    """All data from some point on are bad: the samples are not the cause."""
    trainer = build(tmp_path / "run", guard(limit=2), data=Rows(bad=tuple(range(60, 160))), shuffle=False)
    with pytest.raises(NonFiniteError, match=r"^The loss of step 16 .* after 2 rewinds in a row .* 60 to 63, 64 to 67"):
        trainer.train()


def test_rewind_needs_a_state_from_before(tmp_path: Path) -> None:
    def save(trainer: Any) -> None:
        trainer.save_checkpoint()

    trainer = build(tmp_path / "run", guard(), callbacks=[callback(on_step_end=save)])
    with pytest.raises(CheckpointError, match="there is no checkpoint and no copy from before step"):
        trainer.train()


@pytest.mark.parametrize("kind", KINDS)
def test_skip_leaves_out_the_update(kind: Any, tmp_path: Path) -> None:
    trainer = build(tmp_path / "run", guard(action="skip"), kind=kind)
    trainer.train()
    assert trainer.progress.skipped_steps == 2 and trainer.progress.step == 38
    assert trainer.metrics["left_out_samples"] == 8


def test_stop_ends_the_run_before_the_update(tmp_path: Path) -> None:
    trainer = build(tmp_path / "run", guard(action="stop"))
    metrics = trainer.train()
    assert metrics["stop_reason"] == "requested" and trainer.progress.skipped_steps == 1
    assert trainer.progress.step < 38


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"threshold": 0}, "`threshold` must be"),
        ({"window": 4}, "`window` must be"),
        ({"action": "halt"}, "`action` must be one of 'rewind', 'skip', 'stop'"),
        ({"every": 0}, "`every` must be"),
        ({"limit": 0}, "`limit` must be"),
        ({"every": 5, "action": "skip"}, "`every=5` has no effect with action='skip'"),
    ],
)
def test_wrong_arguments_are_rejected(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SpikeGuard(**options)


def test_rewind_without_anything_to_go_back_to_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the run has no `save_dir`. Pass `every`"):
        build(None, guard(), save_steps=None).train()
    with pytest.raises(ConfigError, match="the run has save_only_model=True"):
        build(tmp_path / "run", guard(), save_only_model=True).train()


def test_custom_epoch_is_rejected(tmp_path: Path) -> None:
    class Custom(Trainer):
        def _train_epoch(self, epoch: int) -> float:
            return 0.0

    with pytest.raises(ConfigError, match="whose steps nothing judges"):
        build(tmp_path / "run", guard(), kind=Custom, device="cpu").train()


# --- what is a spike


def judge(values: list[float], **options: Any) -> list[Spike | None]:
    spike_guard = SpikeGuard(**options)
    return [spike_guard.find_spike(POSITION, value, 1.0) for value in values]


def test_spike_is_far_above_the_recent_median() -> None:
    noise = [1 + 0.1 * math.sin(number) for number in range(40)]
    assert judge([*noise, 1.3], window=20) == [None] * 41
    spike = judge([*noise, 3.0], window=20)[-1]
    assert spike is not None and spike.kind == "loss" and spike.value == 3.0 and 1.3 < spike.limit < 3.0


def test_spike_of_a_constant_loss_is_no_rounding() -> None:
    assert judge([1.0] * 30 + [1.01], window=20)[-1] is None
    assert judge([1.0] * 30 + [1.1], window=20)[-1] is not None


def test_spike_does_not_count_for_the_median() -> None:
    assert all(judge([1.0] * 30 + [9.0] * 50, window=20)[30:])


def test_falling_loss_has_no_spike() -> None:
    assert judge([math.exp(-number / 20) for number in range(200)]) == [None] * 200


def test_growing_norm_has_no_spike() -> None:
    """At the end of a plateau it grows tenfold in 20 steps, each time by little; a jump is a spike even then."""
    spike_guard = SpikeGuard()
    norms = [0.3 + 0.05 * math.sin(number) for number in range(30)]
    norms += [norms[-1] * 1.12**number * (1 + 0.2 * math.sin(2 * number)) for number in range(20)]
    assert [spike_guard.find_spike(POSITION, 1.0, norm) for norm in norms] == [None] * 50
    spike = spike_guard.find_spike(POSITION, 1.0, 3 * max(norms))
    assert spike is not None and spike.kind == "grad_norm" and max(norms) < spike.limit


def test_norm_spikes_too() -> None:
    spike_guard = SpikeGuard(window=8)
    for norm in (1.0, 1.1, 0.9, 1.0) * 2:
        assert spike_guard.find_spike(POSITION, 1.0, norm) is None
    spike = spike_guard.find_spike(POSITION, 1.0, 5.0)
    assert spike is not None and spike.kind == "grad_norm" and "the gradient norm of step 1" in str(spike)
