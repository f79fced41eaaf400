"""Functions that run on two processes: many at once, forked from one process that has imported everything.

A case is a function `case(**options)` of a module beside this one, run as by torchrun: with a store that outlives the
processes or, `hosted=True`, with one that goes with rank 0. Nobody ends a process whose partner has failed, so each
must end by itself. Starting Python takes longer than most cases, so all are forked from multiprocessing's fork server.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import fcntl
import importlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing import forkserver
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import programs
import psutil
from torch.distributed import TCPStore  # type: ignore[attr-defined]

HERE = Path(__file__).resolve().parent
LIMIT = 180.0
"""Seconds without a sign of life after which a case has hung: many times what one takes on a busy machine, and less
than what torch itself waits for."""
T = TypeVar("T")
HUNG = 3
"""After so many cases that have hung, the rest of them is not run."""
ON_CPU = {"ACCELERATE_USE_CPU": "true"}
CONTEXT = multiprocessing.get_context("forkserver")


@dataclass(slots=True)
class Case:
    """One program on two processes, or on one.

    Attributes:
        name: What its outcome comes under.
        function: "module:function", of a module in this folder.
        options: Its arguments.
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
    left: list[str]


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


def play(cases: Sequence[Case], folder: Path, at_once: int = 6) -> Found[list[Outcome]]:
    """Run the cases, several at once, and return the outcomes by name and rank."""
    _start_server()
    outcomes, waiting, running, hung = Found[list[Outcome]](), list(cases), list[_Running](), list[str]()
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                running.append(_Running(waiting.pop(0), folder))
            for run in [run for run in running if run.is_over()]:
                running.remove(run)
                outcomes[run.case.name] = run.outcomes()
                hung += [run.case.name] if None in run.codes.values() else []
            if len(hung) >= HUNG:
                waiting.clear()
            time.sleep(0.02)
    finally:
        for run in running:
            run.kill()
    reason = f"Some were not run, as these have hung: {', '.join(map(repr, hung))}"
    outcomes.broken |= {case.name: reason for case in cases if case.name not in outcomes}
    return outcomes


def environment_on_cpu() -> dict[str, str]:
    """Return the environment of tests about processors, also on a machine that has more."""
    path = os.pathsep.join(map(str, (HERE.parents[1], HERE.parent, HERE)))
    on_cpu = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
    return programs.launch_environment(PYTHONPATH=path, **on_cpu)


def _start_server() -> None:
    """Start the process that others are forked from, if there is none."""
    # Few large pages instead of many small ones: a fork copies the table of them.
    pages = {"PYTHONMALLOC": "malloc", "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
    environment = environment_on_cpu() | pages
    environment.pop("TEST_SUITE", None)  # it ends with this process, and so does what is forked: no leftovers
    CONTEXT.set_forkserver_preload(["imported"])
    with mock.patch.dict(os.environ, environment, clear=True):
        forkserver.ensure_running()


class _Running:
    """The processes of a case, and the store, whose threads must not be in the process that they are forked from."""

    def __init__(self, case: Case, folder: Path) -> None:
        self.case, self.folder, self.start = case, folder / case.name, time.time()
        self.folder.mkdir(parents=True)
        has_store = case.processes > 1 and not case.hosted
        self.store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False) if has_store else None
        port = programs.free_port() if self.store is None else self.store.port
        self.ranks = [
            CONTEXT.Process(target=_live, args=(case, rank, port, self.folder)) for rank in range(case.processes)
        ]
        for rank, process in enumerate(self.ranks):
            (self.folder / f"output-{rank}.txt").touch()
            process.start()
        self.codes: dict[int, int | None] = {}
        self.left: dict[int, list[str]] = {}

    def is_over(self) -> bool:
        has_hung = time.time() - self._last_sign_of_life() > LIMIT
        for rank, process in enumerate(self.ranks):
            code = process.exitcode
            if rank in self.codes or (code is None and not has_hung):
                continue
            if code is None:
                os.kill(process.pid, signal.SIGUSR2)  # it writes down where it is
                time.sleep(1)
            self.codes[rank], self.left[rank] = code, _kill_group(process)
            (self.folder / f"ended-{rank}").touch()
        return len(self.codes) == len(self.ranks)

    def _last_sign_of_life(self) -> float:
        signs = [path for name in ("life", "fault") if (path := self.folder / name).exists()]
        return max([self.start, *(path.stat().st_mtime for path in signs)])

    def kill(self) -> None:
        for process in self.ranks:
            _kill_group(process)

    def outcomes(self) -> list[Outcome]:
        outcomes = []
        for rank, code in sorted(self.codes.items()):
            path = self.folder / f"result-{rank}.json"
            result = json.loads(path.read_text()) if path.exists() else None
            output = (self.folder / f"output-{rank}.txt").read_text(errors="replace")
            outcomes.append(Outcome(code, output, result, self.left[rank]))
        return outcomes


def _kill_group(leader: Any) -> list[str]:
    """Kill what is left of the process group of a rank, and return what it was besides the rank itself."""
    survivors = []
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader.pid, 0)
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, ProcessLookupError):
                is_other = process.pid != leader.pid and process.status() != psutil.STATUS_ZOMBIE
                if is_other and os.getpgid(process.pid) == leader.pid:
                    survivors.append(f"{process.pid} {process.name()}")
        os.killpg(leader.pid, signal.SIGKILL)
    leader.kill()
    leader.join()
    return survivors


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


def _end_with_parent() -> None:
    """Have the kernel end this process group when the process of the test has gone."""
    sentinel: Any = multiprocessing.parent_process().sentinel  # type: ignore[union-attr]
    fcntl.fcntl(sentinel, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(sentinel, fcntl.F_SETFL, fcntl.fcntl(sentinel, fcntl.F_GETFL) | os.O_ASYNC)


def _live(case: Case, rank: int, port: int, folder: Path) -> None:
    os.setpgrp()  # it ends with all that it has started
    _end_with_parent()
    multiprocessing.set_start_method(None, force=True)  # type: ignore[arg-type]  # the platform's own again
    os.environ |= {**(case.environment or {}), "CASE_FOLDER": str(folder)}
    if case.processes > 1:
        os.environ |= {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(case.processes),
            "LOCAL_WORLD_SIZE": str(case.processes), "MASTER_ADDR": "localhost", "MASTER_PORT": str(port),
        }  # fmt: skip
        if not case.hosted:
            os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    output = os.open(folder / f"output-{rank}.txt", os.O_WRONLY)
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
