"""Programs that tests start, and how they end: with all the processes that they have started."""

import contextlib
import os
import random
import signal
import socket
import subprocess
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil

LIMIT = 300.0
"""Seconds after which a program hangs: many times what any of them takes, also where others use the machine."""
_NAME = "TEST_PROGRAM"
"""The variable in the environment by which the processes of a program are found, whatever session they are in."""


def free_port() -> int:
    """Return a port that nothing listens on, below those that systems hand out to outgoing connections."""
    choices = random.SystemRandom()
    while True:
        port = choices.randrange(15_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("localhost", port))
            return port


def launch_environment(**variables: str) -> dict[str, str]:
    """Return the environment for a launch of its own, in which the package and the modules of the tests are found."""
    unwanted = ("ACCELERATE_", "FSDP_", "WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_", "TORCHELASTIC_", "OMNITRAIN_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(unwanted)}
    tests = Path(__file__).resolve().parent
    path = [str(tests.parent), str(tests), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**environment, "PYTHONPATH": os.pathsep.join(path), **variables}


@contextlib.contextmanager
def started(
    *command: str | Path, env: Mapping[str, str] | None = None, **options: Any
) -> Iterator[subprocess.Popen[str]]:
    """Start a program in a session of its own; at the end of the block, end all of its processes.

    torchrun's workers are in sessions of their own too, and outlive torchrun if that is killed.
    """
    name = uuid.uuid4().hex
    environment = {**(os.environ if env is None else env), _NAME: name}
    options = {"text": True, "start_new_session": True, **options}
    process = subprocess.Popen([*map(str, command)], env=environment, **options)
    try:
        yield process
    finally:
        kill_all(_NAME, name)
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None:
                stream.close()
        process.wait(LIMIT)


def run(
    *command: str | Path, timeout: float = LIMIT, check: bool = False, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, and return its exit code and what it wrote to stdout and stderr.

    Raises:
        subprocess.TimeoutExpired: If it hangs; what it has written by then is in the error.
        subprocess.CalledProcessError: If `check` is set, and the exit code is not 0.
    """
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    with started(*command, **options) as process:
        output, errors = process.communicate(timeout=timeout)
    done = subprocess.CompletedProcess([*map(str, command)], process.returncode, output, errors)
    if check:
        done.check_returncode()
    return done


class AnsweredGit:
    """Takes the place of the product's `Git` and answers at once: no test depends on how fast git is."""

    is_done = True

    def __init__(self, folder: Path) -> None:
        pass

    def answer(self, seconds: float = 0.0) -> dict[str, Any]:
        return {"commit": "0" * 40, "branch": "main", "clean": True}

    def close(self) -> None:
        pass


def answer_git() -> None:
    """Have runs in this process ask the stand-in for git."""
    from omnitrain.checkpoint import run_record

    run_record.Git = AnsweredGit  # type: ignore[misc, assignment]


def kill_all(variable: str, value: str) -> list[str]:
    """Kill the processes that were started with this in their environment; return what they were.

    A process that is being started meanwhile is found in a later round.
    """
    ended: dict[int, str] = {}
    exempt = {os.getpid(), os.getppid()}
    end = time.monotonic() + LIMIT
    while time.monotonic() < end:
        running = [other for other in psutil.process_iter() if other.pid not in exempt and _has(other, variable, value)]
        if not running:
            break
        for candidate in running:
            with contextlib.suppress(psutil.Error):
                ended[candidate.pid] = f"{candidate.pid} {' '.join(candidate.cmdline())[:200]}"
                candidate.kill()
        psutil.wait_procs(running, 0.5)
    return list(ended.values())


def _has(process: psutil.Process, variable: str, value: str) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE and process.environ().get(variable) == value
    except (psutil.Error, OSError):  # it has gone, or belongs to someone else
        return False


def fork(action: Callable[[], object]) -> int:
    """Call a function in a child process, which exits with the number that it returns, else 0, or 1 after an error."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        os.setpgid(0, 0)
        result = action()
        code = result if isinstance(result, int) else 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def exit_code(child: int) -> int:
    """Wait for a child and kill what it has started; return its exit code, or minus the signal that ended it."""
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    return code
