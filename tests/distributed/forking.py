"""Functions that run on two processes: many at once, forked from one process that has imported everything.

A case is a function `case(**options)` of a module beside this one, run as by torchrun: with a store that outlives the
processes or, `hosted=True`, with one that goes with rank 0. Nobody ends a process whose partner has failed, so each
must end by itself. Starting Python takes longer than most cases, so all are forked from one process, which lives as
long as the one that asks it to.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, TypeVar

HERE = Path(__file__).resolve().parent
sys.path[:0] = [path for path in (str(HERE), str(HERE.parent)) if path not in sys.path]

import programs  # noqa: E402
import psutil  # noqa: E402
from compiled import load_operators  # noqa: E402
from torch.distributed import TCPStore  # noqa: E402  # type: ignore[attr-defined]

AT_ONCE = 6
LIMIT = 180.0
"""Seconds without a sign of life after which a case has hung: many times what one takes on a busy machine, and less
than what torch itself waits for."""
T = TypeVar("T")
HUNG = 3
"""After so many cases that have hung, the rest of them is not run."""
IMPORTED = (
    "accelerate.utils", "deepspeed", "deepspeed.module_inject.auto_ep_layer", "deepspeed.ops.op_builder.all_ops",
    "deepspeed.runtime.zero.muon.muon_optimizer", "optuna", "peft", "sklearn.metrics", "torch._dynamo",
    "torch.distributed.algorithms.ddp_comm_hooks.default_hooks", "torch.distributed.fsdp",
    "torch.profiler", "torch.utils.serialization", "torchmetrics", "transformers.trainer",
    "omnitrain.trainer.accelerated", "omnitrain.hf.trainer",
)  # fmt: skip
ON_CPU = {"ACCELERATE_USE_CPU": "true"}


@dataclass(slots=True)
class Case:
    """One program on two processes, or on one.

    Attributes:
        name: What its outcome comes under.
        function: "module:function", of a module in this folder.
        options: Its arguments, as JSON types.
        hosted: Whether the store is rank 0's and ends with it.
        processes: On how many it runs; with one, nothing says that there are several.
        environment: What is set for it; by default that it runs on the CPU, which DeepSpeed knows by itself.
    """

    name: str
    function: str
    options: dict[str, Any] = field(default_factory=dict)
    hosted: bool = False
    processes: int = 2
    environment: dict[str, str] | None = None

    def __post_init__(self) -> None:
        if self.environment is None:
            self.environment = {} if "zero" in self.options.get("backend", "") else dict(ON_CPU)


def by_name(cases: Sequence[Case]) -> dict[str, Case]:
    return {case.name: case for case in cases}


@dataclass(slots=True)
class Outcome:
    """How one process of a case ended.

    Attributes:
        code: Its exit code; minus the signal it died of; None if it had hung.
        output: What it wrote to stdout and stderr.
        result: What the function returned, if it did.
        left: The processes of its process group that it did not wait for; they have been killed.
    """

    code: int | None
    output: str
    result: Any
    left: list[str] = field(default_factory=list)


class Found(dict[str, T]):
    """What came of several things, by name; `broken` has why there is nothing under a name."""

    def __init__(self) -> None:
        self.broken: dict[str, str] = {}

    def __missing__(self, name: str) -> T:
        if name not in self.broken:
            raise KeyError(name)
        raise RuntimeError(self.broken[name])


def joined(*parts: Found[T]) -> Found[T]:
    """Return several of them as one."""
    whole = Found[T]()
    for part in parts:
        whole.update(part)
        whole.broken |= part.broken
    return whole


def play(cases: Sequence[Case], folder: Path, at_once: int = AT_ONCE) -> Found[list[Outcome]]:
    """Run the cases, several at once, and return the outcomes by name and rank.

    The stores of the cases are here: they have threads, which must not be in the process that ranks are forked from.
    """
    folder.mkdir(parents=True, exist_ok=True)
    host, outcomes, reason = _Host.current(), Found[list[Outcome]](), ""
    with_store = [case.name for case in cases if case.processes > 1 and not case.hosted]
    stores = {name: TCPStore("localhost", 0, is_master=True, wait_for_workers=False) for name in with_store}
    try:
        ports = {name: store.port for name, store in stores.items()}
        request = {"cases": [asdict(case) for case in cases], "folder": str(folder), "at_once": at_once}
        host.ask({**request, "ports": ports, "path": sys.path})
        while (answer := host.answer())["name"] is not None:
            outcomes[answer["name"]] = [Outcome(**outcome) for outcome in answer["outcomes"]]
        reason = f"Some were not run, as these have hung: {', '.join(map(repr, answer['hung']))}"
    except _HostEnded as error:
        reason = str(error)
        host.stop()
    except BaseException:
        host.stop()
        raise
    outcomes.broken |= {case.name: reason for case in cases if case.name not in outcomes}
    return outcomes


def stop() -> None:
    """End the process that others are forked from, if there is one."""
    if _Host._current is not None:
        _Host._current.stop()


class _HostEnded(Exception):
    pass


class _Host:
    """The process that all others are forked from, as seen from this one."""

    _current: _Host | None = None

    def __init__(self) -> None:
        unwanted = ("ACCELERATE_", "WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_", "TORCHELASTIC_")
        environment = {key: value for key, value in os.environ.items() if not key.startswith(unwanted)}
        environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parent.parent)}
        # These tests are about processors, also on a machine that has more.
        environment |= {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
        # Few large pages instead of many small ones: a fork copies the table of them.
        environment |= {"PYTHONMALLOC": "malloc", "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
        self.owner = os.getpid()
        self.log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        self._kept = contextlib.ExitStack()
        self.process = self._kept.enter_context(
            programs.started(
                sys.executable, Path(__file__).resolve(), env=environment, stdin=subprocess.PIPE,
                stdout=subprocess.PIPE, stderr=self.log,
            )
        )  # fmt: skip

    @classmethod
    def current(cls) -> _Host:
        if cls._current is None or cls._current.process.poll() is not None:
            cls._current = cls()
            atexit.register(cls._current.stop)
        return cls._current

    def ask(self, request: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # then there is no answer either
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.log.seek(0)
            raise _HostEnded(f"The process that others are forked from has ended:\n{self.log.read().decode()[-4000:]}")
        return json.loads(line)

    def stop(self) -> None:
        if os.getpid() == self.owner and _Host._current is self:
            _Host._current = None
            self._kept.close()


# --- in the process of a case


def case_folder() -> Path:
    """Return the folder that the processes of this case share."""
    return Path(os.environ["CASE_FOLDER"])


def mark() -> None:
    """Say that the fault happens now, which other processes may wait for."""
    with contextlib.suppress(FileExistsError):
        (case_folder() / "fault").touch(exist_ok=False)


def show_life() -> None:
    """Say that this case goes on: the time after which it counts as hung starts anew."""
    (case_folder() / "life").touch()


def current_rank() -> int:
    """Return the rank of this process, also where it is the only one."""
    return int(os.environ.get("RANK", "0"))


def wait_for_other() -> None:
    """Wait until the process of the other rank has ended, however long that takes."""
    while not (case_folder() / f"ended-{1 - current_rank()}").exists():
        time.sleep(0.02)


def stop_until(file: str, number: signal.Signals = signal.SIGCONT) -> None:
    """Stop this process until a file of the case exists; then it gets a signal."""
    wait = f"while [ ! -e '{case_folder() / file}' ]; do sleep 0.05; done; kill -{number.name[3:]} {os.getpid()}"
    with subprocess.Popen(["sh", "-c", wait]):
        os.kill(os.getpid(), signal.SIGSTOP)


def _live(case: Case, rank: int, port: int, folder: Path) -> None:
    os.setpgrp()  # it ends with all that it has started
    os.environ |= {**(case.environment or {}), "CASE_FOLDER": str(folder)}
    if case.processes > 1:
        os.environ |= {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(case.processes),
            "LOCAL_WORLD_SIZE": str(case.processes), "MASTER_ADDR": "localhost", "MASTER_PORT": str(port),
        }  # fmt: skip
        if not case.hosted:
            os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    output = os.open(folder / f"output-{rank}.txt", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    faulthandler.register(signal.SIGUSR2)
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


# --- in the process that they are forked from


class _Running:
    answers = -1
    """The descriptor through which the process that forks answers, and which is its own."""

    def __init__(self, case: Case, folder: Path, port: int | None) -> None:
        self.case, self.folder, self.start = case, folder / case.name, time.time()
        self.folder.mkdir()
        port = port or programs.free_port()
        self.ranks = {
            self._fork(lambda r=rank: _live(case, r, port, self.folder)): rank for rank in range(case.processes)
        }
        self.ended: dict[int, int | None] = {}
        self.left: dict[int, list[str]] = {}

    @staticmethod
    def _fork(life: Any) -> int:
        child = os.fork()
        if not child:
            try:
                os.close(_Running.answers)
                life()
            finally:
                traceback.print_exc()
                os._exit(99)
        return child

    def is_over(self) -> bool:
        has_hung = self._silence() > LIMIT
        for child, rank in self.ranks.items():
            if rank not in self.ended:
                has_ended, status = os.waitpid(child, os.WNOHANG)
                if not has_ended and has_hung:
                    os.kill(child, signal.SIGUSR2)  # it writes down where it is
                    time.sleep(1)
                    os.kill(child, signal.SIGKILL)
                    os.waitpid(child, 0)
                if has_ended or has_hung:
                    self.left[rank] = _kill_group(child)
                    self.ended[rank] = os.waitstatus_to_exitcode(status) if has_ended else None
                    (self.folder / f"ended-{rank}").touch()
        return len(self.ended) == len(self.ranks)

    def _silence(self) -> float:
        signs = [self.start]
        for name in ("life", "fault"):
            with contextlib.suppress(FileNotFoundError):
                signs.append((self.folder / name).stat().st_mtime)
        return time.time() - max(signs)

    def kill(self) -> None:
        for child, rank in self.ranks.items():
            if rank not in self.ended:
                _kill_group(child)

    @property
    def has_hung(self) -> bool:
        return None in self.ended.values()

    def outcomes(self) -> list[dict[str, Any]]:
        outcomes = []
        for rank in range(self.case.processes):
            path = self.folder / f"result-{rank}.json"
            result = json.loads(path.read_text()) if path.exists() else None
            output = (self.folder / f"output-{rank}.txt").read_text(errors="replace")
            outcomes.append(asdict(Outcome(self.ended[rank], output, result, self.left[rank])))
        return outcomes


def _kill_group(leader: int) -> list[str]:
    """Kill what is left of a process group, and return what it was."""
    survivors = []
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, 0)
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, ProcessLookupError):
                if os.getpgid(process.pid) == leader and process.status() != psutil.STATUS_ZOMBIE:
                    survivors.append(f"{process.pid} {process.name()}")
        os.killpg(leader, signal.SIGKILL)
    return survivors


def _is_alone() -> bool:
    """Whether the process that asks has gone: while cases run, nothing is to be read from it."""
    return bool(select.select([sys.stdin], [], [], 0)[0])


def _play(cases: list[Case], ports: dict[str, int], folder: Path, at_once: int, answers: IO[str]) -> list[str]:
    """Run cases, write down how each has ended as soon as it has, and return the names of those that have hung."""
    waiting, running, hung = list(cases), list[_Running](), list[str]()
    while waiting or running:
        while waiting and len(running) < at_once:
            case = waiting.pop(0)
            running.append(_Running(case, folder, ports.get(case.name)))
        for run in list(running):
            if run.is_over():
                running.remove(run)
                print(json.dumps({"name": run.case.name, "outcomes": run.outcomes()}), file=answers, flush=True)
                hung += [run.case.name] if run.has_hung else []
        if len(hung) >= HUNG:
            waiting.clear()
        if _is_alone():
            for run in running:
                run.kill()
            os._exit(1)
        time.sleep(0.02)
    return hung


def _main() -> None:
    import torch

    _Running.answers = os.dup(1)
    os.dup2(2, 1)
    answers = os.fdopen(_Running.answers, "w")
    for module in IMPORTED:
        with contextlib.suppress(ModuleNotFoundError):  # of a newer release of its package
            importlib.import_module(module)
    torch.set_num_threads(1)
    programs.answer_git()
    load_operators()
    os.fsync = lambda descriptor: None  # type: ignore[assignment]  # no power is cut here, and a busy disk takes long
    while line := sys.stdin.readline():
        request = json.loads(line)
        cases = [Case(**entry) for entry in request["cases"]]
        sys.path += [place for place in request["path"] if place not in sys.path]
        for module in {case.function.partition(":")[0] for case in cases}:
            importlib.import_module(module)
        gc.freeze()  # else the collector of each process makes a copy of every page
        hung = _play(cases, request["ports"], Path(request["folder"]), request["at_once"], answers)
        print(json.dumps({"name": None, "hung": hung}), file=answers, flush=True)


if __name__ == "__main__":
    _main()
