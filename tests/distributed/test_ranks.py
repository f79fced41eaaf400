"""Exchanges between ranks, exchanges that only some of them make, and differences that all of them report."""

import atexit
import contextlib
import datetime
import itertools
import signal
import threading
import time
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import programs
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


def exchange(listed: int) -> None:
    """Make every exchange, with as few ranks as can be listed, or as many ones, of which each gets only sums."""
    ranks_module._LISTED = listed
    ranks = join()
    rank = ranks.rank
    assert (ranks.world_size, ranks.is_main) == (2, rank == 0)
    assert ranks.sum("a", rank + 1, 10.0, *range(12)) == [3.0, 20.0, *(2.0 * number for number in range(12))]
    assert ranks.gather("b", {"rank": rank, "long": "x" * rank * 100_000})[1]["rank"] == 1
    assert ranks.gather("b", None) == [None, None]
    assert ranks.on_main("c", lambda: [rank, "done"]) == [0, "done"]
    for dtype, values in itertools.product(DTYPES, (torch.arange(6).reshape(2, 3), torch.tensor(1), torch.ones(0, 3))):
        expected = values.float().to(dtype)
        tensor = ranks.broadcast(expected.clone() if rank == 0 else torch.zeros_like(expected))
        assert (tensor.float() == expected.float()).all(), dtype
    with ranks.collective_call("d"):
        pass
    both = Control(log=rank == 0, save=rank == 1, stop=["early_stopping", "max_steps"][rank])
    signalled = Control(stop="epochs") if rank else Control(stop="signal", signal=signal.SIGINT)
    # requests add up, and the first reason to stop counts
    for requests, expected in (
        (both, (True, True, "max_steps", 0)),
        (signalled, (False, False, "signal", signal.SIGINT)),
    ):
        agreed, totals = ranks.start_sync_requests("e", requests, 2.0)()
        assert (agreed.log, agreed.save, agreed.stop, agreed.signal) == expected
        assert totals == [4.0] and not agreed.evaluate


def exchange_sums() -> None:
    """Make the exchanges of many ranks, also while they wait for one that works, or whose fork ends."""
    ranks_module._LISTED = 1
    ranks = join()
    rank = ranks.rank
    for forks in (False, True):
        if forks:
            programs.exit_code(programs.fork(atexit._run_exitfuncs))
        if ranks.is_main:
            time.sleep(0.5)  # several polls
        assert ranks.sum("late", 1) + ranks.on_main("later", lambda: time.sleep(0.3) or [3.0]) == [2.0, 3.0]
    bits = [value.hex() for value in ranks.sum("floats", 0.1 + rank, 1e-17 * (rank + 1), 1 / 3)]
    ranks.check_equal("The bits", {"bits": bits}, "")
    assert ranks.combine("f", {rank}, lambda each: sorted(set().union(*each))) == [0, 1]
    parts = [ranks.scatter("g", lambda count=count: ["a" * 9, "b", "c"][:count]) for count in (0, 1, 2, 3)]
    assert parts == ([None, None, "b", "b"] if rank else [None, *["a" * 9] * 3])
    ranks.check_equal("The numbers", {"a": 1, "b": [2, 3]}, "Do.")
    with pytest.raises(DistributedError, match=r"^The numbers differ: `a` is 0 on rank 0 and 1 on rank 1. Do.$"):
        ranks.check_equal("The numbers", {"a": rank}, "Do.")


def fail() -> None:
    try:
        raise OSError(28, "full")
    except OSError as cause:
        raise CheckpointError("cannot") from cause


def raise_unsendable() -> None:
    raise Unsendable("one", "two")


def raise_on_main() -> None:
    """Raise errors on the main rank, which the other one gets with their origin."""
    ranks = join()
    with pytest.raises(CheckpointError) as caught:
        ranks.on_main("the work", fail)
    assert str(caught.value) == "cannot" and type(caught.value.__cause__) is OSError
    notes = "".join(getattr(caught.value, "__notes__", []))
    assert ranks.is_main or ("Raised on rank 0, in the work:\nTraceback" in notes and "in fail\n" in notes)
    with pytest.raises(Unsendable if ranks.is_main else RuntimeError) as raised:
        ranks.on_main("the work", raise_unsendable)
    assert str(raised.value) == ("one two" if ranks.is_main else "Unsendable: one two")
    with pytest.raises(Exception, match="lock"):  # a result that cannot be sent
        ranks.on_main("the work", threading.Lock)


def survive_late() -> None:
    """Raise the same error on both, on one of them after the other has stopped waiting for it."""
    ranks, folder = join(), case_folder()
    watchdog.ERROR_SYNC_S = 0.2
    with contextlib.suppress(ValueError), ranks.collective_call("work"):
        if not ranks.is_main:
            wait_for(folder / "given up")
        raise ValueError("of both")
    (folder / ("given up" if ranks.is_main else "late")).touch()
    wait_for(folder / "late")  # the main process is still there when the other comes
    with pytest.raises(DistributedError, match="this run has ended by an error on one of its ranks"):
        ranks.sum("after", 1)


def wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.01)


def call_differently(listed: int = 64) -> None:
    ranks_module._LISTED = listed
    ranks = join()
    with ranks.collective_call("work"):
        ranks.sum("this" if ranks.is_main else "that", 1)


CASES = [
    Case("few", "test_ranks:exchange", {"listed": 64}), Case("many", "test_ranks:exchange", {"listed": 1}),
    Case("sums", "test_ranks:exchange_sums"), Case("errors", "test_ranks:raise_on_main"),
    Case("late", "test_ranks:survive_late"), Case("few differ", "test_ranks:call_differently"),
    Case("many differ", "test_ranks:call_differently", {"listed": 1}),
]  # fmt: skip


def train(backend: str, what: str) -> list[float]:
    rank, folder = current_rank(), case_folder() / "run"
    model, data, evaluation = t16(dtype=torch.float32), rows(32, torch.float32), rows(8, torch.float32)
    torch.manual_seed(rank)  # by default, every process has another seed
    part = random_split(data, [24, 8])[0]
    changes: dict[str, dict[str, Any]] = {
        "batch_size": {"batch_size": 4 - 2 * rank},
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
    options |= {"loss_fn": F.mse_loss, **changes.get(what, {})}
    if what == "frozen":
        next(model.children()).requires_grad_(rank == 0)
    trainer = make_trainer(backend, **options)
    if what == "evaluate":
        trainer.evaluate(rows(8 + rank, torch.float32))
    if what == "rate":
        trainer.optimizer.param_groups[0]["lr"] = 0.1 * rank
    trainer.train(resume_from="auto" if what == "resume_from" and rank else None)
    return [float(parameter.sum()) for parameter in trainer.model.parameters()]


DIFFERENCES = {
    "batch_size": "`batch_size` is 4 on rank 0 and 2 on rank 1",
    "loss_fn": '`loss_fn` is "torch.nn.functional.mse_loss" on rank 0 and "torch.nn.functional.l1_loss"',
    "evaluation set": '`eval_dataset` is "torch.utils.data.dataset.TensorDataset" on rank 0 and null on',
    "length": "`the training set` is 32 on rank 0 and 28 on rank 1",
    "samples": "of the training set is not the same on all ranks",
    "samples of evaluation": "of the evaluation set is not the same on all ranks",
    "samples in a loader": "of the training set is not the same on all ranks",
    "samples of HFTrainer": "of the training set is not the same on all ranks",
    "evaluate": "`the dataset` is 8 on rank 0 and 9 on rank 1",
    "shape": '`weight` is "torch.float32 of shape (1, 4), which trains" on rank 0 and',
    "optimizer": '`optimizer_groups` is [{"lr": 0.1, ',
    "rate": "`learning_rates` is [0.0] on rank 0 and [0.1] on rank 1",
    "resume_from": '`resume_from` is null on rank 0 and "auto" on rank 1',
    "save_dir": '`save_dir` is "a folder" on rank 0 and null on rank 1',
    "batch_size of HFTrainer": "`batch_size` is 4 on rank 0 and 2 on rank 1",
    "frozen of ZeRO": '"torch.float32 of shape (16, 4), which trains" on rank 0 and',
}  # fmt: skip
"""What differs, on another backend than DDP if it is named, and what the error says."""
QUICK = (
    "batch_size", "length", "samples", "samples of evaluation", "shape", "resume_from", "batch_size of HFTrainer",
    "frozen of ZeRO",
)  # fmt: skip


@pytest.fixture(scope="module")
def outcomes(folder: Path, request: pytest.FixtureRequest) -> Found[list[Outcome]]:
    cases = list(CASES)
    for name in sorted({"allowed"} | asked_for(request, "name")):
        what, _, trainer = name.partition(" of ") if name.endswith(("HFTrainer", "ZeRO")) else (name, "", "")
        options = {"backend": {"HFTrainer": "hf2", "ZeRO": "zero3"}.get(trainer, "ddp"), "what": what}
        cases.append(Case(name, "test_ranks:train", options))
    compile_once()
    return play(cases, folder)


def test_ranks_of_one_process_return_their_own_values() -> None:
    ranks = Ranks()
    tensor, requests = torch.ones(2), Control(save=True)
    assert (ranks.rank, ranks.world_size, ranks.is_main) == (0, 1, True)
    assert ranks.sum("a", 1, 2) == [1, 2] and ranks.gather("b", "x") == ["x"] and ranks.on_main("c", lambda: 3) == 3
    assert ranks.start_sync_requests("d", requests)() == (requests, []) and ranks.broadcast(tensor) is tensor
    with pytest.raises(KeyError), ranks.collective_call("e"):
        raise KeyError


class RanksWithCodes(Ranks):
    """Rank 0 of many ranks, whose sums are those of `ProcessRanks`, in float64; the code of the last one may differ."""

    def __init__(self, size: int, difference: int) -> None:
        self.world_size, self._difference = size, difference

    def sum(self, what: str, *values: float) -> list[float]:
        """Return the sums of a code and of its square."""
        codes = np.full(self.world_size, values[0])
        codes[-1] += self._difference
        return [float(np.cumsum(np.float64(codes) ** power)[-1]) for power in (1, 2)]


@pytest.mark.parametrize("size", [2, 33, 1000])
def test_are_equal_is_exact_for_many_ranks(size: int) -> None:
    """A sum that float64 rounds would report a difference between ranks that call the same layers."""
    for number in range(100):
        code = zlib.crc32(number.to_bytes(4))
        assert RanksWithCodes(size, 0).are_equal("the layers of a step", code)
        assert not RanksWithCodes(size, 1).are_equal("the layers of a step", code)


@pytest.mark.parametrize("case", ["few", "many", "sums", "errors", "late"])
def test_exchanges_agree_on_all_ranks(outcomes: Any, case: str) -> None:
    assert [outcome.code for outcome in outcomes[case]] == [0, 0], "\n".join(rank.output for rank in outcomes[case])


@pytest.mark.parametrize("case", ["few differ", "many differ"])
def test_exchange_reports_ranks_in_different_calls(outcomes: Any, case: str) -> None:
    for outcome in outcomes[case]:
        assert outcome.code == 1 and "rank 0: this; rank 1: that." in outcome.output
        assert "DistributedError: The processes of the run are at different places" in outcome.output


@pytest.mark.parametrize("name", thinned(DIFFERENCES, QUICK))
def test_difference_between_ranks_is_an_error_on_all(name: str, outcomes: Any) -> None:
    for outcome in outcomes[name]:
        assert outcome.code == 1
        before, _, message = outcome.output.partition("DistributedError")
        assert DIFFERENCES[name] in message and "every rank" in message and DIFFERENCES[name] not in before


def test_allowed_differences_between_ranks_are_no_error(outcomes: Any) -> None:
    first, second = outcomes["allowed"]
    assert (first.code, second.code) == (0, 0), first.output + second.output
    assert first.result == second.result
