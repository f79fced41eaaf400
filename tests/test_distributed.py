"""What processes tell each other: exchanges, and what comes of those that not all of them make."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

sys.path[:0] = [str(Path(__file__).resolve().parent / "distributed")]

from forking import Case, Found, Outcome, play  # noqa: E402

from omnitrain import distributed, rendezvous  # noqa: E402
from omnitrain.checkpoint.reading import DTYPES  # noqa: E402
from omnitrain.distributed import ProcessRanks, Ranks  # noqa: E402
from omnitrain.errors import CheckpointError, DistributedError  # noqa: E402
from omnitrain.events import Control  # noqa: E402
from omnitrain.rendezvous import connected_ranks  # noqa: E402


def join() -> ProcessRanks:
    dist.init_process_group("gloo")
    return connected_ranks()


class Unsendable(Exception):
    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} {second}")


# --- what the processes of the cases do


def is_sent(ranks: ProcessRanks, dtype: torch.dtype) -> bool:
    """Whether tensors of a dtype reach all ranks, with and without values."""
    found = []
    for shape in ((2, 3), (), (0, 3)):
        wanted = torch.arange(6).reshape(2, 3).expand(2, 3)[: shape[0]] if shape else torch.tensor(1)
        wanted = wanted.to(torch.float32).to(dtype)
        tensor = wanted.clone() if ranks.is_main else torch.zeros(shape).to(dtype)
        found.append(bool((ranks.broadcast(tensor).float() == wanted.float()).all()))
    return all(found)


def exchange() -> dict[str, Any]:
    ranks = join()
    rank = ranks.rank
    found: dict[str, Any] = {"who": [ranks.rank, ranks.world_size, ranks.is_main]}
    found["sum"] = ranks.sum("a", rank + 1, 10.0, *range(12))
    found["gather"] = ranks.gather("b", {"rank": rank, "long": "x" * rank * 100_000})[1]["rank"]
    found["nothing"] = ranks.gather("b", None)
    found["main"] = ranks.on_main("c", lambda: [rank, "done"])
    tensor = torch.arange(6.0).reshape(2, 3) if rank == 0 else torch.zeros(2, 3)
    found["broadcast"] = ranks.broadcast(tensor).tolist()
    found["dtypes"] = [str(dtype) for dtype in DTYPES if not is_sent(ranks, dtype)]
    with ranks.calling("d"):
        found["called"] = True
    asked = Control(log=rank == 0, save=rank == 1, stop=["early_stopping", "max_steps"][rank])
    agreed, totals = ranks.agree("e", asked, 2.0)
    assert totals == [2.0 * ranks.world_size]
    found["agreed"] = [agreed.log, agreed.evaluate, agreed.save, agreed.stop, agreed.signal]
    asked = Control(stop="epochs") if rank else Control(stop="signal", signal=signal.SIGINT)
    agreed, totals = ranks.agree("e", asked, 2.0)
    assert totals == [2.0 * ranks.world_size]
    found["signalled"] = [agreed.stop, agreed.signal]
    return found


def exchange_as_many() -> dict[str, Any]:
    """Exchange as ranks do of which there are too many for each to get the numbers of all."""
    distributed._LISTED = 1
    found = exchange()
    ranks: Any = rendezvous._met
    rank = ranks.rank
    found["bits"] = [value.hex() for value in ranks.sum("floats", 0.1 + rank, 1e-17 * (rank + 1), 1 / 3)]
    found["combined"] = ranks.combine("f", {rank}, lambda each: sorted(set().union(*each)))
    found["dealt"] = [ranks.deal("g", lambda count=count: ["a" * 9, "b", "c"][:count]) for count in (0, 1, 2, 3)]
    ranks.check_alike("The numbers", {"a": 1, "b": [2, 3]}, "Do.")
    try:
        ranks.check_alike("The numbers", {"a": rank}, "Do.")
    except DistributedError as error:
        found["unlike"] = str(error)
    return found


def differ_as_many() -> None:
    distributed._LISTED = 1
    differ()


def raise_on_main() -> list[list[str]]:
    ranks, found = join(), []

    def fail() -> None:
        try:
            raise OSError(28, "full")
        except OSError as cause:
            raise CheckpointError("cannot") from cause

    def unsendable() -> None:
        raise Unsendable("one", "two")

    for work in (fail, unsendable, lambda: threading.Lock()):
        try:
            ranks.on_main("the work", work)
        except Exception as error:
            notes = "".join(getattr(error, "__notes__", []))
            found.append([type(error).__name__, str(error), type(error.__cause__).__name__, notes])
    assert ranks.sum("they go on", 1) == [2]
    return found


def wait_long() -> list[float]:
    """One process works for longer than any wait is tried at once, the other waits for it."""
    ranks = join()
    if ranks.is_main:
        time.sleep(3.5)
    found = ranks.sum("late", 1)
    return found + ranks.on_main("later", lambda: time.sleep(1.5) or [3.0])


def survive_late() -> list[Any]:
    """Come to the same error, one of them late, the second time after the other has given up waiting for it.

    Then it is the end for both.
    """
    ranks = join()
    folder, found = Path(os.environ["CASE_FOLDER"]), list[Any]()
    for too_late in (False, True):
        distributed._ERROR_SYNC_S = 0.5 if too_late else 600.0
        try:
            with ranks.calling("work"):
                if too_late and not ranks.is_main:
                    wait_for(folder / "given up")
                time.sleep(0.5 * ranks.rank)
                raise ValueError("of both")
        except ValueError:
            found.append("both")
        if too_late:
            (folder / ("given up" if ranks.is_main else "late")).touch()
            wait_for(folder / "late")  # the main process is still there when the other comes
        try:
            found += ranks.sum("after", 1)
        except DistributedError as error:
            found.append(str(error).partition(":")[2])
    return found


def wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.01)


def differ() -> None:
    ranks = join()
    with ranks.calling("work"):
        ranks.sum("this" if ranks.is_main else "that", 1)


def fork_ends() -> list[Any]:
    """A fork of a process ends in order, which is nobody else's business."""
    ranks = join()
    child = os.fork()
    if not child:
        import atexit

        atexit._run_exitfuncs()
        os._exit(0)
    os.waitpid(child, 0)
    return [ranks._has_exited(), *ranks.sum("they go on", 1)]


CASES = [
    Case(name, f"test_distributed:{name}")
    for name in (
        "exchange",
        "exchange_as_many",
        "differ_as_many",
        "raise_on_main",
        "wait_long",
        "survive_late",
        "differ",
        "fork_ends",
    )
]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Found[list[Outcome]]:
    return play(CASES, tmp_path_factory.mktemp("ranks"))


def results(outcomes: dict[str, list[Outcome]], name: str) -> list[Any]:
    for outcome in outcomes[name]:
        assert outcome.code == 0, outcome.output
    return [outcome.result for outcome in outcomes[name]]


# --- what must come of it


def test_process_alone_answers_itself() -> None:
    ranks = Ranks()
    tensor, asked = torch.ones(2), Control(save=True)
    assert (ranks.rank, ranks.world_size, ranks.is_main) == (0, 1, True)
    assert ranks.sum("a", 1, 2) == [1, 2] and ranks.gather("b", "x") == ["x"] and ranks.on_main("c", lambda: 3) == 3
    assert ranks.agree("d", asked) == (asked, []) and ranks.broadcast(tensor) is tensor
    with pytest.raises(KeyError), ranks.calling("e"):
        raise KeyError


@pytest.mark.distributed
def test_exchanges_give_all_processes_the_same(outcomes: dict[str, list[Outcome]]) -> None:
    first, second = results(outcomes, "exchange")
    assert (first.pop("who"), second.pop("who")) == ([0, 2, True], [1, 2, False])
    assert first == second
    assert first["sum"] == [3.0, 20.0, *(2.0 * i for i in range(12))]
    assert (first["gather"], first["nothing"], first["main"]) == (1, [None, None], [0, "done"])
    assert first["broadcast"] == [[0, 1, 2], [3, 4, 5]] and first["called"] and first["dtypes"] == []


@pytest.mark.distributed
def test_requests_of_all_are_taken_together_and_the_first_reason_to_stop_counts(
    outcomes: dict[str, list[Outcome]],
) -> None:
    found = results(outcomes, "exchange")[0]
    assert found["agreed"] == [True, False, True, "max_steps", 0]
    assert found["signalled"] == ["signal", signal.SIGINT]


@pytest.mark.distributed
def test_error_of_the_main_process_is_raised_on_all_and_says_where_it_comes_from(
    outcomes: dict[str, list[Outcome]],
) -> None:
    main, other = results(outcomes, "raise_on_main")
    assert [entry[:3] for entry in main[:2]] == [
        ["CheckpointError", "cannot", "OSError"], ["Unsendable", "one two", "NoneType"],
    ]  # fmt: skip
    assert other[0][:3] == main[0][:3] and other[1][:2] == ["RuntimeError", "Unsendable: one two"]
    assert "Raised on rank 0, in the work:\nTraceback" in other[0][3] and "in fail\n" in other[0][3]
    assert "lock" in main[2][1] and "lock" in other[2][1]  # a result that cannot be sent


@pytest.mark.distributed
def test_waiting_has_no_limit_while_the_others_are_well(outcomes: dict[str, list[Outcome]]) -> None:
    assert results(outcomes, "wait_long") == [[2.0, 3.0], [2.0, 3.0]]


@pytest.mark.distributed
def test_processes_agree_on_whether_an_error_was_common(outcomes: dict[str, list[Outcome]]) -> None:
    ended = " this run has ended by an error on one of its ranks. Start it again."
    assert results(outcomes, "survive_late") == [["both", 2.0, "both", ended]] * 2


@pytest.mark.distributed
def test_processes_at_different_places_are_told_at_once_who_is_where(outcomes: dict[str, list[Outcome]]) -> None:
    for outcome in outcomes["differ"]:
        assert outcome.code == 1
        assert "DistributedError: The processes of the run are at different places" in outcome.output
        assert "rank 0: this; rank 1: that." in outcome.output


@pytest.mark.distributed
def test_end_of_a_forked_process_is_not_the_end_of_the_run(outcomes: dict[str, list[Outcome]]) -> None:
    assert results(outcomes, "fork_ends") == [[False, 2.0]] * 2


def test_ranks_of_which_there_are_many_exchange_sums_alone(outcomes: dict[str, list[Outcome]]) -> None:
    few, (main, other) = results(outcomes, "exchange"), results(outcomes, "exchange_as_many")
    for one, many in zip(few, (main, other), strict=True):
        assert one == {name: many[name] for name in one}
    assert main["bits"] == other["bits"] and main["combined"] == other["combined"] == [0, 1]
    assert main["dealt"] == [None, *["a" * 9] * 3] and other["dealt"] == [None, None, "b", "b"]
    assert main["unlike"] == other["unlike"] == "The numbers differ: `a` is 0 on rank 0 and 1 on rank 1. Do."


def test_a_rank_in_another_call_is_noticed_by_sums_alone(outcomes: dict[str, list[Outcome]]) -> None:
    for outcome in outcomes["differ_as_many"]:
        assert outcome.code != 0
        assert "rank 0: this; rank 1: that" in outcome.output
