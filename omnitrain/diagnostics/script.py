"""Runs of a user's script in processes of its own, with overrides."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import omnitrain
from omnitrain.config.overrides import VARIABLE, Overrides, Rehearsal
from omnitrain.core.errors import ConfigError, escape_unprintable

MAX_OUTPUT_BYTES = 1 << 24
_RUN_ID = "OMNITRAIN_SCRIPT_RUN"
_POLL_SECONDS = 0.05
_NO_SERVICES = {
    "WANDB_MODE": "disabled",
    "COMET_START_MODE": "disabled",
    "NEPTUNE_MODE": "debug",
    "DISABLE_MLFLOW_INTEGRATION": "TRUE",
}
"""Environment variables with which trackers that a script starts itself send nothing."""
# What torchrun puts before the lines of a rank.
_RANK = re.compile(r"^\[rank\d+\]: ?")
_LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMNITRAIN_NUM_PROCESSES")


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of one run of a script.

    Attributes:
        code: The exit code as a shell gives it: 128 plus the number for a signal.
        seconds: How long it took.
        output: The file with what it printed, stdout and stderr together; of a long output only the end.
        timed_out: Whether it was ended at its time limit.
    """

    code: int
    seconds: float
    output: Path
    timed_out: bool = False

    def last_lines(self, count: int = 15) -> str:
        """Return the last lines of the output."""
        text = b""
        for path in (_rotated(self.output), self.output):
            with contextlib.suppress(OSError), path.open("rb") as file:
                file.seek(max(0, path.stat().st_size - (1 << 16)))
                text += file.read()
        return "\n".join(text.decode(errors="replace").splitlines()[-count:])

    def last_error(self) -> str:
        """Return the last line of the output that names an error, or the last line of all."""
        return _last_error(self.last_lines(200))

    def reason(self) -> str:
        """Return, as the next line, the error of omnitrain that ended it, or else the last lines of the output."""
        error = self.last_error()
        return f"\n{error if error.startswith('omnitrain.') else self.last_lines()}"


def _last_error(output: str) -> str:
    lines = [_RANK.sub("", line).strip() for line in output.splitlines() if line.strip()]
    kinds = ("Error", "Exception", "Exit")
    errors = [line for line in lines if line.split(":")[0].rpartition(".")[2].endswith(kinds)]
    ours = [line for line in errors if line.startswith("omnitrain.")]
    return escape_unprintable((ours or errors or lines or ["no output"])[-1])[:300]


def without_gpu(error: ConfigError) -> str:
    """Return what to do about a script that differs from run to run on a GPU and cannot run with deterministic=True.

    Its model has an operation that has no deterministic kernel there, as a rule, which `error` names.
    """
    return (
        f"With deterministic=True it failed: {_last_error(str(error))}\nWithout a GPU it can be tried: put "
        "CUDA_VISIBLE_DEVICES= before the command."
    )


@dataclass(frozen=True, slots=True)
class Script:
    """A script, or a YAML file as for `omnitrain train`, with its arguments.

    Attributes:
        path: The script or the file.
        arguments: What it is called with.
        processes: How many processes run it; several are started as by `omnitrain launch`.
        options: More options of the launcher, such as "--fsdp".
        supplied: Arguments of its trainers in each run, in addition to those that a run overrides.

    >>> Script("train.py", ["--lr", "0.1"]).command()[1:]
    ['train.py', '--lr', '0.1']
    >>> Script("run.yaml", processes=2).command()[1:]
    ['-m', 'omnitrain', 'launch', '-n', '2', 'train', 'run.yaml']
    """

    path: str
    arguments: Sequence[str] = ()
    processes: int = 1
    options: Sequence[str] = ()
    supplied: Mapping[str, Any] = field(default_factory=dict)

    def check(self) -> None:
        """Raise ConfigError if there is no such file, or no process to run it."""
        if not Path(self.path).is_file():
            raise ConfigError(f"There is no script {self.path!r} here. Give a Python script, or a YAML file.")
        if self.processes < 1:
            raise ConfigError(f"`-n {self.processes}` must be a number of processes, at least 1.")

    def command(self) -> list[str]:
        """Return the command line."""
        is_config = Path(self.path).suffix in (".yaml", ".yml")
        words = [*(["train"] if is_config else []), self.path, *self.arguments]
        launch = ["launch", "-n", str(self.processes), *self.options] if self.processes > 1 else []
        return [sys.executable, *(["-m", "omnitrain"] if launch or is_config else []), *launch, *words]

    def complete(self, overrides: Overrides) -> str:
        """Return overrides with the arguments that are supplied in each run, as JSON."""
        return json.dumps({**overrides, "arguments": {**self.supplied, **overrides.get("arguments", {})}})

    def run(
        self,
        folder: Path,
        overrides: Overrides,
        *,
        name: str = "output",
        timeout: float = 3600.0,
        is_stuck: Callable[[], bool] = lambda: False,
    ) -> Outcome:
        """Run the script to its end, in the current folder, and end all processes that it has started.

        Args:
            folder: Where its output goes; it is made.
            overrides: What differs for the trainers in it.
            name: The name of the file of the output, without suffix.
            timeout: Seconds after which it is killed.
            is_stuck: Called a few times a second; True kills it, as does the time limit.
        """
        folder.mkdir(parents=True, exist_ok=True)
        output, run_id, start = folder / f"{name}.log", uuid.uuid4().hex, time.monotonic()
        environment = _environment() | {VARIABLE: self.complete(overrides), _RUN_ID: run_id}
        timed_out = False
        with _signals_as_exits():  # before it starts, or a signal in between would leave it running
            process = subprocess.Popen(
                self.command(), env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
            try:
                assert process.stdout is not None
                copier = threading.Thread(target=_copy, args=(process.stdout, output), daemon=True)
                copier.start()
                while process.poll() is None:
                    timed_out = time.monotonic() - start > timeout
                    if timed_out or is_stuck():
                        break
                    time.sleep(_POLL_SECONDS)
            finally:
                _kill_all(process, run_id)
                code = process.wait()
            copier.join(timeout=10)  # a process that has escaped may hold the pipe open
        return Outcome(code if code >= 0 else 128 - code, time.monotonic() - start, output, timed_out)

    def read_result(self, make_overrides: Callable[[Path], Overrides], goal: str, timeout: float = 600.0) -> Any:
        """Run the script until something in it has written a JSON file, and return its content.

        Args:
            make_overrides: Returns what differs for the trainers, given the path of the file; its folder is temporary.
            goal: What the script does not come to if there is no such file, as the end of a sentence.
            timeout: Seconds after which it is killed.

        Raises:
            ConfigError: If the file was not written.
        """
        self.check()
        with tempfile.TemporaryDirectory(prefix="omnitrain-") as folder:
            file = Path(folder) / "result.json"
            outcome = self.run(Path(folder), make_overrides(file), timeout=timeout)
            if not file.is_file():
                end = f"ran longer than {timeout:g} s" if outcome.timed_out else f"ended with exit code {outcome.code}"
                raise ConfigError(f"{self.path} {end}, {goal}{outcome.reason()}")
            return json.loads(file.read_text())

    def call_trainer(self, function: str, timeout: float = 600.0, **arguments: Any) -> Any:
        """Return what a function gives for the first trainer that the script trains, before its first step.

        The script ends where it calls `train()`: nothing is trained.

        Args:
            function: The dotted name of the function, which is called with the trainer and returns JSON types.
            timeout: Seconds after which the script is killed.
            arguments: The other arguments of the function.

        Raises:
            ConfigError: If the script did not come to `train()`, or the function has raised an error.
        """

        def make_overrides(file: Path) -> Overrides:
            return {"rehearsal": Rehearsal(function=function, arguments=arguments, path=str(file))}

        goal = "without calling `train()` of a trainer of omnitrain. Give a script that trains, or a YAML file."
        answer = self.read_result(make_overrides, goal, timeout)
        if "problem" in answer:
            raise ConfigError(f"{self.path}: {answer['problem']}")
        return answer["result"]


def _environment() -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if name not in _LAUNCHER_VARIABLES}
    root = Path(omnitrain.__file__).resolve().parents[1]
    if root.name not in ("site-packages", "dist-packages"):  # a clone that is not installed
        paths = [environment.get("PYTHONPATH"), str(root)]
        environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    return environment | {"PYTHONUNBUFFERED": "1"} | _NO_SERVICES


@contextlib.contextmanager
def _signals_as_exits() -> Iterator[None]:
    """Have SIGTERM and SIGHUP raise SystemExit inside, as otherwise a script would outlive this process."""

    def end(number: int, frame: Any) -> None:
        raise SystemExit(128 + number)

    numbers = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    is_main = threading.current_thread() is threading.main_thread()
    numbers = [number for number in numbers if is_main and signal.getsignal(number) is signal.SIG_DFL]
    for number in numbers:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)


def _rotated(output: Path) -> Path:
    return output.with_suffix(".earlier.log")


def _copy(pipe: IO[bytes], output: Path) -> None:
    """Copy what a script prints to a file, of which only the last `MAX_OUTPUT_BYTES` or so stay."""
    file = output.open("wb")
    try:
        while piece := os.read(pipe.fileno(), 1 << 16):
            file.write(piece)
            file.flush()
            if file.tell() > MAX_OUTPUT_BYTES // 2:
                file.close()
                output.replace(_rotated(output))
                file = output.open("wb")
    finally:
        file.close()
        pipe.close()


def _kill_all(process: subprocess.Popen[bytes], run_id: str) -> None:
    """Kill a process and all that it has started; torchrun's workers are in sessions of their own."""
    with contextlib.suppress(OSError):
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    end = time.monotonic() + 30
    while time.monotonic() < end:
        pids = list(_find_processes(run_id))
        if not pids:
            return
        for pid in pids:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_POLL_SECONDS)


def _find_processes(run_id: str) -> Iterator[int]:
    """Yield the living processes of a run, found by their environment, where /proc has it."""
    needle = f"{_RUN_ID}={run_id}".encode()
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            is_dead = path.joinpath("stat").read_text("utf-8", "replace").rpartition(")")[2].split()[0] in ("Z", "X")
            if not is_dead and needle in path.joinpath("environ").read_bytes():
                yield int(path.name)
