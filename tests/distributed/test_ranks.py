"""Exchanges between ranks, exchanges that only some of them make, and differences that all of them report."""

import atexit
import contextlib
import datetime
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from backends import asked_for, make_trainer
from compiled import compile_once
from forking import Case, Found, Outcome, case_folder, current_rank, play
from marks import thinned
from recipes import rows, t16
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, random_split

from omnitrain import Callback
from omnitrain.checkpoint.tensor_files import DTYPES
from omnitrain.core.errors import CheckpointError, DistributedError
from omnitrain.core.events import Control
from omnitrain.distributed import ranks as ranks_module
from omnitrain.distributed import watchdog
from omnitrain.distributed.ranks import ProcessRanks, Ranks
from omnitrain.distributed.rendezvous import connected_ranks


class Unsendable(Exception):
    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} {second}")


def join() -> ProcessRanks:
    watchdog.POLL_INTERVAL = datetime.timedelta(seconds=0.1)
    dist.init_process_group("gloo")
    return connected_ranks()


def exchange() -> dict[str, Any]:
    """Make every exchange, first as few ranks do, then as many, of which each one gets only sums."""
    ranks = join()
    results = {"few": exchange_values(ranks), "errors": raise_on_main(ranks), "waits": wait_long(ranks)}
    results["fork"] = exit_in_fork(ranks)
    ranks_module._LISTED = 1
    rank, many = ranks.rank, exchange_values(ranks)
    results |= {
        "many": many,
        "bits": [value.hex() for value in ranks.sum("floats", 0.1 + rank, 1e-17 * (rank + 1), 1 / 3)],
        "combined": ranks.combine("f", {rank}, lambda each: sorted(set().union(*each))),
        "dealt": [ranks.scatter("g", lambda count=count: ["a" * 9, "b", "c"][:count]) for count in (0, 1, 2, 3)],
    }
    ranks.check_equal("The numbers", {"a": 1, "b": [2, 3]}, "Do.")
    try:
        ranks.check_equal("The numbers", {"a": rank}, "Do.")
    except DistributedError as error:
        results["unlike"] = str(error)
    return results


def exchange_values(ranks: ProcessRanks) -> dict[str, Any]:
    rank = ranks.rank
    results: dict[str, Any] = {"who": [ranks.rank, ranks.world_size, ranks.is_main]}
    results["sum"] = ranks.sum("a", rank + 1, 10.0, *range(12))
    results["gather"] = ranks.gather("b", {"rank": rank, "long": "x" * rank * 100_000})[1]["rank"]
    results["nothing"] = ranks.gather("b", None)
    results["main"] = ranks.on_main("c", lambda: [rank, "done"])
    tensor = torch.arange(6.0).reshape(2, 3) if rank == 0 else torch.zeros(2, 3)
    results["broadcast"] = ranks.broadcast(tensor).tolist()
    results["unsent dtypes"] = [str(dtype) for dtype in DTYPES if not is_broadcast(ranks, dtype)]
    with ranks.collective_call("d"):
        results["called"] = True
    requests = Control(log=rank == 0, save=rank == 1, stop=["early_stopping", "max_steps"][rank])
    agreed, totals = ranks.start_sync_requests("e", requests, 2.0)()
    assert totals == [2.0 * ranks.world_size]
    results["agreed"] = [agreed.log, agreed.evaluate, agreed.save, agreed.stop, agreed.signal]
    requests = Control(stop="epochs") if rank else Control(stop="signal", signal=signal.SIGINT)
    agreed, _ = ranks.start_sync_requests("e", requests, 2.0)()
    results["signalled"] = [agreed.stop, agreed.signal]
    return results


def is_broadcast(ranks: ProcessRanks, dtype: torch.dtype) -> bool:
    """Whether tensors of a dtype reach all ranks, with and without values."""
    equal = []
    for shape in ((2, 3), (), (0, 3)):
        values = torch.arange(6).reshape(2, 3)[: shape[0]] if shape else torch.tensor(1)
        expected = values.to(torch.float32).to(dtype)
        tensor = expected.clone() if ranks.is_main else torch.zeros(shape).to(dtype)
        equal.append(bool((ranks.broadcast(tensor).float() == expected.float()).all()))
    return all(equal)


def raise_on_main(ranks: ProcessRanks) -> list[list[str]]:
    errors = []

    def fail() -> None:
        try:
            raise OSError(28, "full")
        except OSError as cause:
            raise CheckpointError("cannot") from cause

    def raise_unsendable() -> None:
        raise Unsendable("one", "two")

    for work in (fail, raise_unsendable, threading.Lock):
        try:
            ranks.on_main("the work", work)
        except Exception as error:
            notes = "".join(getattr(error, "__notes__", []))
            errors.append([type(error).__name__, str(error), type(error.__cause__).__name__, notes])
    return errors


def wait_long(ranks: ProcessRanks) -> list[float]:
    """Work on one rank for several polls, while the other waits for it."""
    if ranks.is_main:
        time.sleep(0.5)
    return ranks.sum("late", 1) + ranks.on_main("later", lambda: time.sleep(0.3) or [3.0])


def exit_in_fork(ranks: ProcessRanks) -> list[float]:
    """End a fork of this process, and let the other rank wait long enough to notice if that counted as this one."""
    child = os.fork()
    if not child:
        atexit._run_exitfuncs()
        os._exit(0)
    os.waitpid(child, 0)
    return wait_long(ranks)


def survive_late() -> list[Any]:
    """Raise the same error on both, one of them late; the second time after the other has stopped waiting for it."""
    ranks = join()
    folder, results = case_folder(), list[Any]()
    for too_late in (False, True):
        watchdog.ERROR_SYNC_S = 0.2 if too_late else 600.0
        with contextlib.suppress(ValueError), ranks.collective_call("work"):
            if too_late and not ranks.is_main:
                wait_for(folder / "given up")
            time.sleep(0.2 * ranks.rank)
            raise ValueError("of both")
        if too_late:
            (folder / ("given up" if ranks.is_main else "late")).touch()
            wait_for(folder / "late")  # the main process is still there when the other comes
        try:
            results += ranks.sum("after", 1)
        except DistributedError as error:
            results.append(str(error).partition(":")[2])
    return results


def wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.01)


def call_differently(listed: int = 64) -> None:
    ranks_module._LISTED = listed
    ranks = join()
    with ranks.collective_call("work"):
        ranks.sum("this" if ranks.is_main else "that", 1)


CASES = [
    Case("exchange", "test_ranks:exchange"),
    Case("late", "test_ranks:survive_late"),
    Case("few", "test_ranks:call_differently"),
    Case("many", "test_ranks:call_differently", {"listed": 1}),
]


def train(backend: str, what: str, values: list[Any] | None) -> list[float]:
    """Train on two ranks that differ in one thing; return the weights."""
    rank, folder = current_rank(), case_folder() / "run"
    model, data, evaluation = t16(dtype=torch.float32), rows(32, torch.float32), rows(8, torch.float32)
    torch.manual_seed(rank)  # by default, every process has another seed
    part = random_split(data, [24, 8])[0]
    changes: dict[str, dict[str, Any]] = {
        "samples of evaluation": {"eval_dataset": TensorDataset(*(tensor + rank for tensor in evaluation.tensors))},
        "evaluation set": {"eval_dataset": evaluation if rank == 0 else None},
        "loss_fn": {"loss_fn": F.mse_loss if rank == 0 else F.l1_loss},
        "samples": {"train_dataset": part},
        "samples in a loader": {"train_dataset": DataLoader(part, 4, sampler=DistributedSampler(rows(24), 2, rank))},
        "length": {"train_dataset": rows(32 - 4 * rank, torch.float32)},
        "optimizer": {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1 / (1 + rank))},
        "shape": {"model": nn.Linear(4, 1 + rank)},
        "resume_from": {"save_dir": folder},
        "save_dir": {"save_dir": folder if rank == 0 else None},
        "allowed": {
            "save_dir": folder / f"{rank}", "callbacks": [Callback()] * rank, "num_workers": rank,
            "train_dataset": TensorDataset(*(tensor * (1 + 1e-6 * rank) for tensor in data.tensors)),  # other hardware
            "progress_bar": rank == 0, "timeout": 600 + rank, "trial_name": f"rank {rank}",
        },
    }  # fmt: skip
    options = {"model": model, "train_dataset": data, "eval_dataset": evaluation, "batch_size": 4, "epochs": 1}
    options |= {"loss_fn": F.mse_loss, **changes.get(what, {what: values[rank]} if values else {})}
    if what == "frozen":
        next(model.children()).requires_grad_(rank == 0)
    trainer = make_trainer(backend, **options)
    if what == "evaluate":
        trainer.evaluate(rows(8 + rank, torch.float32))
    if what == "rate":
        trainer.optimizer.param_groups[0]["lr"] = 0.1 * rank
    trainer.train(resume_from="auto" if what == "resume_from" and rank else None)
    return [float(parameter.sum()) for parameter in trainer.model.parameters()]


SHAPES = '"torch.float32 of shape (16, 4), which trains" on rank 0 and'
DIFFERENCES: dict[str, tuple[str, str, list[Any] | None]] = {
    "batch_size": ("ddp", "`batch_size` is 4 on rank 0 and 2 on rank 1", [4, 2]),
    "loss_fn": ("ddp", '`loss_fn` is "torch.nn.functional.mse_loss" on rank 0 and "torch.nn.functional.l1_loss"', None),
    "evaluation set": ("ddp", '`eval_dataset` is "torch.utils.data.dataset.TensorDataset" on rank 0 and null on', None),
    "length": ("ddp", "`the training set` is 32 on rank 0 and 28 on rank 1", None),
    "samples": ("ddp", "of the training set is not the same on all ranks", None),
    "samples of evaluation": ("ddp", "of the evaluation set is not the same on all ranks", None),
    "samples in a loader": ("ddp", "of the training set is not the same on all ranks", None),
    "samples of HFTrainer": ("hf2", "of the training set is not the same on all ranks", None),
    "evaluate": ("ddp", "`the dataset` is 8 on rank 0 and 9 on rank 1", None),
    "shape": ("ddp", '`weight` is "torch.float32 of shape (1, 4), which trains" on rank 0 and', None),
    "optimizer": ("ddp", '`optimizer_groups` is [{"lr": 0.1, ', None),
    "rate": ("ddp", "`learning_rates` is [0.0] on rank 0 and [0.1] on rank 1", None),
    "resume_from": ("ddp", '`resume_from` is null on rank 0 and "auto" on rank 1', None),
    "save_dir": ("ddp", '`save_dir` is "a folder" on rank 0 and null on rank 1', None),
    "batch_size of HFTrainer": ("hf2", "`batch_size` is 4 on rank 0 and 2 on rank 1", [4, 2]),
    "frozen of ZeRO": ("zero3", SHAPES, None),
}
"""What differs: on which backend, what the error says, and the values of the ranks."""
QUICK = (
    "batch_size", "length", "samples", "samples of evaluation", "shape", "resume_from", "batch_size of HFTrainer",
    "frozen of ZeRO",
)  # fmt: skip


@pytest.fixture(scope="module")
def outcomes(folder: Path, request: pytest.FixtureRequest) -> Found[list[Outcome]]:
    cases = list(CASES)
    for name in sorted({"allowed"} | asked_for(request, "name")):
        backend, _, values = DIFFERENCES.get(name, ("ddp", "", None))
        what = name.removesuffix(" of HFTrainer").removesuffix(" of ZeRO")
        options = {"backend": backend, "what": what, "values": values}
        cases.append(Case(name, "test_ranks:train", options))
    compile_once()
    return play(cases, folder)


def results_of(outcomes: list[Outcome]) -> list[Any]:
    assert [outcome.code for outcome in outcomes] == [0, 0], outcomes
    return [outcome.result for outcome in outcomes]


@pytest.fixture
def exchanged(outcomes: dict[str, list[Outcome]]) -> list[Any]:
    return results_of(outcomes["exchange"])


def test_ranks_of_one_process_return_their_own_values() -> None:
    ranks = Ranks()
    tensor, requests = torch.ones(2), Control(save=True)
    assert (ranks.rank, ranks.world_size, ranks.is_main) == (0, 1, True)
    assert ranks.sum("a", 1, 2) == [1, 2] and ranks.gather("b", "x") == ["x"] and ranks.on_main("c", lambda: 3) == 3
    assert ranks.start_sync_requests("d", requests)() == (requests, []) and ranks.broadcast(tensor) is tensor
    with pytest.raises(KeyError), ranks.collective_call("e"):
        raise KeyError


@pytest.mark.parametrize("count", ["few", "many"])
def test_exchanges_return_the_same_on_all_ranks(exchanged: list[Any], count: str) -> None:
    first, second = (result[count] for result in exchanged)
    assert (first.pop("who"), second.pop("who")) == ([0, 2, True], [1, 2, False])
    assert first == second
    assert first["sum"] == [3.0, 20.0, *(2.0 * number for number in range(12))]
    assert (first["gather"], first["nothing"], first["main"]) == (1, [None, None], [0, "done"])
    assert first["broadcast"] == [[0, 1, 2], [3, 4, 5]] and first["called"] and first["unsent dtypes"] == []
    assert first["agreed"] == [True, False, True, "max_steps", 0]  # requests add up, the first reason to stop counts
    assert first["signalled"] == ["signal", signal.SIGINT]


def test_exchanges_of_many_ranks_by_sums(exchanged: list[Any]) -> None:
    """They wait for ranks that work, or whose forks end."""
    main, other = exchanged
    assert main["waits"] == other["waits"] == main["fork"] == other["fork"] == [2.0, 3.0]
    assert main["bits"] == other["bits"] and main["combined"] == other["combined"] == [0, 1]
    assert main["dealt"] == [None, *["a" * 9] * 3] and other["dealt"] == [None, None, "b", "b"]
    assert main["unlike"] == other["unlike"] == "The numbers differ: `a` is 0 on rank 0 and 1 on rank 1. Do."


def test_on_main_raises_on_all_ranks_with_origin(exchanged: list[Any]) -> None:
    main, other = (result["errors"] for result in exchanged)
    assert [entry[:3] for entry in main[:2]] == [
        ["CheckpointError", "cannot", "OSError"], ["Unsendable", "one two", "NoneType"],
    ]  # fmt: skip
    assert other[0][:3] == main[0][:3] and other[1][:2] == ["RuntimeError", "Unsendable: one two"]
    assert "Raised on rank 0, in the work:\nTraceback" in other[0][3] and "in fail\n" in other[0][3]
    assert "lock" in main[2][1] and "lock" in other[2][1]  # a result that cannot be sent


def test_calling_agrees_if_an_error_was_common(outcomes: dict[str, list[Outcome]]) -> None:
    ended = " this run has ended by an error on one of its ranks. Start it again."
    assert results_of(outcomes["late"]) == [[2.0, ended]] * 2


@pytest.mark.parametrize("count", ["few", "many"])
def test_exchange_reports_ranks_in_different_calls(outcomes: dict[str, list[Outcome]], count: str) -> None:
    for outcome in outcomes[count]:
        assert outcome.code == 1
        assert "DistributedError: The processes of the run are at different places" in outcome.output
        assert "rank 0: this; rank 1: that." in outcome.output


@pytest.mark.parametrize("name", thinned(DIFFERENCES, QUICK))
def test_difference_between_ranks_is_an_error_on_all(name: str, outcomes: Any) -> None:
    words = DIFFERENCES[name][1]
    for outcome in outcomes[name]:
        assert outcome.code == 1
        assert "DistributedError" in outcome.output
        assert words in outcome.output
        assert "every rank" in outcome.output
    assert words not in outcomes[name][0].output.partition("DistributedError")[0]


def test_allowed_differences_between_ranks_are_no_error(outcomes: Any) -> None:
    first, second = outcomes["allowed"]
    assert (first.code, second.code) == (0, 0), (first.output, second.output)
    assert first.result == second.result
