"""Steps of 7 samples on one, two and three ranks with micro-batches of 2: the same numbers, also over resumes."""

import functools
import math
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from backends import asked_for, bound, dtype_of, gap, make_trainer, masked_sentences, parity, regress, tensors_of
from compiled import compile_once
from counting import Streamed
from forking import Case, Found, Outcome, play
from marks import thinned
from recipes import Tagger, Trace, fit, rows, t16

from omnitrain import Throughput
from omnitrain.data.grouping import GroupByLength
from omnitrain.trainer import feed

SPREAD = [
    ("ddp", 3), ("fsdp", 3), ("hf2", 2), ("zero1", 2), ("zero2", 3), ("zero3", 2), ("hf_fsdp", 2), ("hf_zero2", 3),
]  # fmt: skip
"""Backends, by their names on two ranks, and on how many they run."""


def train(backend: str, dtype: str, folder: str, cut: int = 0, resume: str = "", **options: Any) -> dict[str, Any]:
    """Train on 25 rows in steps of 7, 7, 7 and 4 an epoch; return the results, with tensors as lists."""
    options = {"eval_steps": None, "save_steps": 6, "load_best_at_end": False, "keep_best": 0, **options}
    result = regress(backend, dtype, cut=cut, resume=resume, global_batch_size=7, save_dir=folder, **options)
    return result | {"tensors": {name: tensor.double().tolist() for name, tensor in result["tensors"].items()}}


def case(name: str, where: tuple[str, int], dtype: str, folder: Path, **options: Any) -> Case:
    kind, ranks = where
    options = {"backend": kind, "dtype": dtype, "folder": str(folder / name), **options}
    return Case(name, "test_uneven_steps:train", options, processes=ranks)


@pytest.fixture(scope="module")
def outcomes(folder: Path, request: pytest.FixtureRequest) -> Found[list[Outcome]]:
    places = sorted(asked_for(request, "kind", "ranks"))
    dtypes = sorted({dtype_of(kind) for kind, _ in places})
    cases = [case(f"native-{dtype}", ("native", 1), dtype, folder) for dtype in dtypes]
    cases += [case(f"{kind} on {ranks}", (kind, ranks), dtype_of(kind), folder) for kind, ranks in places]
    compile_once()
    return play(cases, folder / "cases")


def results(outcomes: Found[list[Outcome]], name: str) -> list[dict[str, Any]]:
    ranks = outcomes[name]
    assert {rank.code for rank in ranks} == {0}, [rank.output[-3000:] for rank in ranks]
    return [rank.result for rank in ranks]


@pytest.mark.parametrize(("kind", "ranks"), thinned(SPREAD, SPREAD[:1]))
def test_uneven_steps_match_one_process(outcomes: Any, kind: str, ranks: int) -> None:
    ranks_of_run = results(outcomes, f"{kind} on {ranks}")
    assert max(parity(ranks_of_run, results(outcomes, f"native-{dtype_of(kind)}")[0]).values()) <= bound(kind)
    for result in ranks_of_run:
        assert len(result["logs"]) == 12 and result["progress"]["samples"] == 75


# --- what steps are made of, and how a run ends


def pack(sentences: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    ids, labels = (torch.cat([sentence[name] for sentence in sentences]) for name in ("ids", "labels"))
    chosen = labels != -100 if (labels != -100).any() else torch.arange(1)
    return {"ids": ids[chosen][None], "labels": labels[chosen][None]}


OPTIONS: dict[str, dict[str, Any]] = {
    "micro-batches": {"microbatch_size": 1}, "whole steps": {"drop_last": True},
    "fewer samples than ranks": {"size": 15}, "a step of one sample each": {"step": 3, "batch_size": 1},
    "masked tokens": {"data": "masked"}, "shared exchanges": {"data": "masked", "short_step": math.inf},
    "a mean over all tokens": {"data": "masked", "grad_reduction": "per-token-mean"},
    "a sum": {"grad_reduction": "sum", "learning_rate": 0.005, "size": 15, "eval_size": 11, "eval_batch_size": 2},
    "micro-batches that fit": {"microbatch_size": "auto"}, "no shuffling": {"shuffle": False},
    "groups by length": {"data": "grouped"}, "packed sentences": {"data": "masked", "data_collator": pack},
    "stream": {"data": "stream", "num_workers": 1}, "steps": {"max_steps": 6, "epochs": None},
    "evaluations": {"eval_size": 11, "eval_steps": 3, "eval_batch_size": 2},
    "a duration": {"max_duration": "30sp", "epochs": None},
}  # fmt: skip


def vary(backend: str, names: list[str]) -> dict[str, Any]:
    """Train in steps of 7 with each of these options; on one process in batches of 7."""
    return {name: train_with(backend, name) for name in names}


def train_with(backend: str, what: str) -> dict[str, Any]:
    options = {"epochs": 2, "batch_size": 2, "step": 7, "learning_rate": 0.05, **OPTIONS[what]}
    kind, step, data = options.pop("data", "rows"), options.pop("step"), rows(options.pop("size", 25))
    short_step, model, sentences = options.pop("short_step", 0.0), Tagger(), masked_sentences(25)
    options["global_batch_size"] = step
    if backend == "native":
        options |= {"batch_size": step, "microbatch_size": None}
    if kind in ("rows", "stream"):
        reduction = "sum" if "sum" in options.values() else "mean"
        model, options["loss_fn"] = t16(), functools.partial(F.mse_loss, reduction=reduction)
    sources = {"rows": data, "stream": Streamed(data), "masked": sentences}
    sources["grouped"] = GroupByLength(sentences, step, [1 + i % 6 for i in range(25)])
    if eval_size := options.pop("eval_size", 0):
        options["eval_dataset"] = rows(eval_size)
    trace, throughput = Trace(), Throughput()
    trainer = make_trainer(backend, model, train_dataset=sources[kind], callbacks=[trace, throughput], **options)
    with mock.patch.object(feed, "_SHORT_STEP", short_step):
        fit(trainer)
    return {
        "losses": [row["loss"] for row in trace.logs], "flops": throughput.flops,
        "eval_losses": [row["eval_loss"] for row in trainer.metrics.to_dict()["valid"]],
        "progress": {**trainer.progress.state_dict(), "seconds": 0, "batches_in_epoch": 0},
        "length": [trainer.steps_per_epoch, trainer.total_steps],
        "weights": [tensor.double().tolist() for tensor in tensors_of(trainer).values()],
    }  # fmt: skip


@pytest.fixture(scope="module")
def varied(folder: Path, request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    names = sorted(asked_for(request, "what"))
    case = Case("varied", "test_uneven_steps:vary", {"backend": "ddp", "names": names}, processes=3)
    return results(play([case], folder / "varied"), "varied")


QUICK = ["shared exchanges", "fewer samples than ranks", "packed sentences", "a sum"]


@pytest.mark.parametrize("what", thinned(OPTIONS, QUICK))
def test_options_mean_the_same_in_uneven_steps(varied: list[dict[str, Any]], what: str) -> None:
    single = train_with("native", what)
    for rank, results in enumerate(varied):
        # others than the main rank count what they compute of stand-ins too, and log nothing; packed rows have any
        # length, so what the main rank computes is no certain share of a step
        names = single.keys() - ({"flops"} if rank or what == "packed sentences" else set())
        gaps = {name: gap(results[what][name], single[name]) for name in names}
        assert max(gaps.values()) < 1e-10, gaps


def test_run_on_fewer_and_fewer_ranks_keeps_its_order(tmp_path: Path) -> None:
    """On three ranks to the sixth step, on two to the ninth, and on one to the end: each time in mid-epoch."""

    def run(name: str, place: tuple[str, int], **options: Any) -> list[dict[str, Any]]:
        launch = play([case(name, place, "float64", tmp_path, **options)], tmp_path / f"launch {name}")
        return results(launch, name)

    (straight,), three = run("one", ("native", 1)), run("3", ("ddp", 3), cut=6)
    two = run("2", ("ddp", 2), cut=9, resume=str(tmp_path / "3" / "last"))
    parts = [three, two, run("1", ("native", 1), resume=str(tmp_path / "2" / "last"))]
    assert [len(ranks[0]["logs"]) for ranks in parts] == [6, 3, 3]
    losses = [[row["step"], row["loss"]] for ranks in parts for row in ranks[0]["logs"]]
    assert gap(losses, [[row["step"], row["loss"]] for row in straight["logs"]]) < 1e-10
    assert gap(parts[-1][0]["tensors"], straight["tensors"]) < 1e-10
    # in a round, ranks take their shares in the order of their numbers; a stand-in is the first sample of the data
    assert order_of(*parts) == order_of([straight])


def order_of(*parts: list[dict[str, Any]]) -> dict[tuple[int, int], list[int]]:
    """Return the samples of each step in the order of the ranks, without the first one of the data."""
    order: dict[tuple[int, int], list[int]] = {}
    for ranks in parts:
        for turn in zip(*(result["indices"] for result in ranks), strict=True):
            for epoch, step, indices in turn:
                order.setdefault((epoch, step), []).extend(index for index in indices if index)
    return order
