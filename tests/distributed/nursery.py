"""Runs whose processes are meant to fail, hang or be killed: many at once, forked from one process.

A case is a function `case(**options)` of a module beside this one, run by two processes as by torchrun: with a store
that outlives them or, `hosted=True`, with one that goes with rank 0. Nobody ends a process whose partner has failed,
so each must end by itself. Starting Python takes longer than most cases, so all are forked from one process that has
imported everything.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [path for path in (str(HERE), str(HERE.parent)) if path not in sys.path]

AT_ONCE = 6
LIMIT = 45.0
"""Seconds after which a case has hung."""


@dataclass(slots=True)
class Case:
    """One program on two processes.

    Attributes:
        name: What its outcome comes under.
        function: "module:function", of a module in this folder.
        options: Its arguments, as JSON types.
        hosted: Whether the store is rank 0's and ends with it.
    """

    name: str
    function: str
    options: dict[str, Any] = field(default_factory=dict)
    hosted: bool = False


@dataclass(slots=True)
class Outcome:
    """How one process of a case ended.

    Attributes:
        code: Its exit code; minus the signal it died of; None if it was still there at the limit.
        seconds: From the moment that `mark()` was called on any process, or from the start, to its end.
        output: What it wrote to stdout and stderr.
        result: What the function returned, if it did.
    """

    code: int | None
    seconds: float
    output: str
    result: Any


def play(cases: Sequence[Case], folder: Path, timeout: float) -> dict[str, list[Outcome]]:
    """Run the cases, several at once, and return the outcomes by name and rank."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cases.json").write_text(json.dumps([asdict(case) for case in cases]))
    unwanted = ("ACCELERATE_", "WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_", "TORCHELASTIC_")
    environment = {key: value for key, value in os.environ.items() if not key.startswith(unwanted)}
    environment |= {
        "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "PYTHONPATH": os.pathsep.join([str(HERE.parent.parent)]),
    }  # fmt: skip
    command = [sys.executable, str(Path(__file__).resolve()), str(folder)]
    with open(folder / "nursery.txt", "w") as output:
        child = subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)
        try:
            child.wait(timeout)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    if child.returncode != 0:
        raise RuntimeError((folder / "nursery.txt").read_text()[-4000:])
    found = json.loads((folder / "outcomes.json").read_text())
    return {name: [Outcome(**outcome) for outcome in outcomes] for name, outcomes in found.items()}


# --- in the process of a case


def mark() -> None:
    """Say that the fault happens now; the seconds of all processes count from the first time."""
    with contextlib.suppress(FileExistsError), open(os.environ["CASE_FAULT"], "x"):
        pass


def _live(case: Case, rank: int, port: int, folder: Path) -> None:
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "CASE_FAULT": str(folder / "fault"),
    }  # fmt: skip
    if not case.hosted:
        os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    output = os.open(folder / f"output-{rank}.txt", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    module, _, function = case.function.partition(":")
    code: Any = 0
    try:
        result = getattr(importlib.import_module(module), function)(**case.options)
        (folder / f"result-{rank}.json").write_text(json.dumps(result))
    except SystemExit as error:
        code = error.code
    except KeyboardInterrupt:
        code = 130
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    atexit._run_exitfuncs()
    os._exit(code)


def _keep_store(port: int) -> None:
    from torch.distributed import TCPStore

    kept = TCPStore("localhost", port, is_master=True, wait_for_workers=False)
    while kept is not None:
        signal.pause()


# --- in the process that they are forked from


class _Running:
    def __init__(self, case: Case, folder: Path) -> None:
        self.case, self.folder, self.start = case, folder / case.name, time.time()
        self.folder.mkdir()
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        self.store = None if case.hosted else self._fork(lambda: _keep_store(port))
        self.ranks = {self._fork(lambda r=rank: _live(case, r, port, self.folder)): rank for rank in (0, 1)}
        self.ended: dict[int, tuple[int | None, float]] = {}

    @staticmethod
    def _fork(life: Any) -> int:
        child = os.fork()
        if not child:
            try:
                life()
            finally:
                traceback.print_exc()
                os._exit(99)
        return child

    def is_over(self) -> bool:
        for child, rank in self.ranks.items():
            if rank not in self.ended:
                found, status = os.waitpid(child, os.WNOHANG)
                if found:
                    self.ended[rank] = os.waitstatus_to_exitcode(status), time.time()
                elif time.time() - self.start > LIMIT:
                    os.kill(child, signal.SIGKILL)
                    os.waitpid(child, 0)
                    self.ended[rank] = None, time.time()
        if len(self.ended) == 2 and self.store is not None:
            os.kill(self.store, signal.SIGKILL)
            os.waitpid(self.store, 0)
        return len(self.ended) == 2

    def outcomes(self) -> list[dict[str, Any]]:
        fault = self.folder / "fault"
        start = fault.stat().st_mtime if fault.exists() else self.start
        found = []
        for rank in (0, 1):
            code, end = self.ended[rank]
            result = self.folder / f"result-{rank}.json"
            kept = json.loads(result.read_text()) if result.exists() else None
            output = (self.folder / f"output-{rank}.txt").read_text(errors="replace")
            found.append(asdict(Outcome(code, round(end - start, 2), output, kept)))
        return found


def _main(folder: Path) -> None:
    import accelerate.utils  # noqa: F401
    import torch

    import omnitrain.trainers.accelerated  # noqa: F401

    torch.set_num_threads(1)
    waiting = [Case(**entry) for entry in json.loads((folder / "cases.json").read_text())]
    for module in {case.function.partition(":")[0] for case in waiting}:
        importlib.import_module(module)
    running: list[_Running] = []
    outcomes = {}
    while waiting or running:
        while waiting and len(running) < AT_ONCE:
            running.append(_Running(waiting.pop(0), folder))
        for one in list(running):
            if one.is_over():
                running.remove(one)
                outcomes[one.case.name] = one.outcomes()
        time.sleep(0.02)
    (folder / "outcomes.json").write_text(json.dumps(outcomes))


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
