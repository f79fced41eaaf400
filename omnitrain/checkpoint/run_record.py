"""Record of each start of a run, in `run.json` and in checkpoints.

It has the command, code, packages, devices and hosts, and no secrets: only listed environment variables, and no value
that looks like a token. `fingerprints.py` computes the digests of data and code. Only the functions for devices import
torch.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import json
import logging
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from omnitrain import __version__
from omnitrain.core.errors import CheckpointError, Tolerance
from omnitrain.core.files import open_regular, replace_file, unique_keys
from omnitrain.core.secrets import is_secret_name, mask_command, mask_secrets, mask_text

if TYPE_CHECKING:
    import torch

logger: logging.Logger = logging.getLogger("omnitrain")

RUN_FILE = "run.json"
CONFIG_FILE = "config.yaml"
FORMAT_VERSION = 1
# The most bytes of run.json that are read.
_LARGEST = 1 << 28
# The most characters of a value that is recorded.
_LONGEST = 2000
# How many seconds the start of a run waits for git; a later answer is written with the first checkpoint.
_GIT_S = 0.03

# The packages whose versions are recorded, in addition to omnitrain and Python.
PACKAGES = ("torch", "numpy", "accelerate", "transformers", "deepspeed", "safetensors", "datasets", "peft", "torchao")

# The environment variables that are recorded, in addition to those with a prefix below.
VARIABLES = {
    "CUBLAS_WORKSPACE_CONFIG", "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_DEVICE_ORDER", "CUDA_LAUNCH_BLOCKING",
    "CUDA_MODULE_LOADING", "CUDA_VISIBLE_DEVICES", "NVIDIA_TF32_OVERRIDE", "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK", "OMP_NUM_THREADS", "OMP_PROC_BIND", "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS", "KMP_AFFINITY", "GOMP_CPU_AFFINITY", "PYTHONHASHSEED", "PYTHONOPTIMIZE", "HF_HOME",
    "HF_DATASETS_CACHE", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE",
    "TOKENIZERS_PARALLELISM", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "SLURM_JOB_ID",
    "SLURM_JOB_NUM_NODES", "SLURM_NTASKS",
}  # fmt: skip
# The prefixes of further variables that are recorded.
FAMILIES = ("NCCL_", "GLOO_", "TORCH_", "TORCHDYNAMO_", "TORCHINDUCTOR_", "PYTORCH_", "ACCELERATE_", "FSDP_")


def recorded_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the recorded variables, which affect what a run computes or where, without those that may be secret."""
    recorded = {}
    for name in sorted(variables):
        value, is_listed = variables[name], name in VARIABLES or name.startswith(FAMILIES)
        if is_listed and not is_secret_name(name) and mask_text(value) == value and len(value) <= _LONGEST:
            recorded[name] = _shorten_paths(value)
    return recorded


# --- software and devices


@functools.cache
def package_versions() -> dict[str, str]:
    """Return the versions of Python, omnitrain and the installed packages of `PACKAGES`."""
    versions = {"python": platform.python_version(), "omnitrain": __version__}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _first_match(path: str, pattern: str) -> str | None:
    """Return the group of a pattern in the first line of a file that matches; None if no line does."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            matches = (re.search(pattern, line) for line in file)
            return next((match[1].strip() for match in matches if match), None)
    except OSError:
        return None


@functools.cache
def _cpu() -> str:
    return _first_match("/proc/cpuinfo", r"^model name\s*:(.*)") or platform.processor() or platform.machine()


def device_name(device: torch.device) -> str:
    """Return the name of a device, such as "NVIDIA H200"; for the CPU that of the processor."""
    from omnitrain.compute.device_runtime import device_runtime

    return _cpu() if device.type in ("cpu", "meta") else device_runtime(device).name


def describe_devices(device: torch.device) -> dict[str, Any]:
    """Return kind, names, capability and driver of the visible devices of the same type as the given one."""
    import torch

    from omnitrain.compute.device_runtime import device_runtime

    if device.type in ("cpu", "meta"):
        return {"kind": device.type, "names": {_cpu(): 1}, "threads": torch.get_num_threads()}
    runtime, count = device_runtime(device), torch.get_device_module(device).device_count()
    description: dict[str, Any] = {"kind": device.type}
    description["names"] = dict(Counter(device_name(torch.device(device.type, index)) for index in range(count)))
    description["capability"] = runtime.capability and ".".join(map(str, runtime.capability))
    description["memory"] = runtime.total_memory
    description["driver"] = _first_match("/proc/driver/nvidia/version", r"Kernel Module\s+(?:for \S+\s+)?([0-9.]+)")
    description["runtime"] = torch.version.cuda or getattr(torch.version, "hip", None)
    return {name: value for name, value in description.items() if value is not None}


def _script_path() -> Path | None:
    """Return the file that Python was started with; None in a notebook or an interpreter."""
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    return Path(file).absolute() if isinstance(file, str) and os.path.isfile(file) else None


# The folder of the code, if it is not that of the script.
_code_folder: Path | None = None


@contextlib.contextmanager
def code_in(folder: Path) -> Iterator[None]:
    """Record the commit of this folder, such as that of a configuration, for runs that start inside."""
    global _code_folder
    before, _code_folder = _code_folder, folder.absolute()
    try:
        yield
    finally:
        _code_folder = before


class Git:
    """A git process that reads the commit of a folder in the background.

    An installed package has no commit: a repository around its folder is that of a project with a virtual environment.
    """

    def __init__(self, folder: Path) -> None:
        self.is_done: bool = True
        """Whether its answer is final."""
        self._answer: dict[str, Any] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._output: IO[bytes] | None = None
        if {"site-packages", "dist-packages"} & set(folder.parts):
            return
        # without a lock on the user's index, and without starting a file monitor, which outlives the command
        command = ["git", "-C", str(folder), "--no-optional-locks", "-c", "core.fsmonitor=false", "status"]
        command += ["--porcelain=v2", "--branch", "--untracked-files=no"]
        with contextlib.suppress(OSError):  # git is not installed, or the disk for its output is full
            self._output = tempfile.TemporaryFile()  # noqa: SIM115 (a pipe would have to be read while git runs)
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=self._output, stderr=subprocess.DEVNULL
            )
            self.is_done = False

    def answer(self, seconds: float = 0.0) -> dict[str, Any] | None:
        """Return "commit", "branch" and whether the tree is "clean"; None without a repository or an answer in time.

        Untracked files are ignored.
        """
        if self._process is not None and self._output is not None:
            try:
                code = self._process.wait(seconds)
            except subprocess.TimeoutExpired:
                return None
            self._output.seek(0)
            lines = self._output.read().decode(errors="replace").splitlines() if code == 0 else []
            self.close()
            head = dict(line[2:].split(" ", 1) for line in lines if line.startswith("# branch."))
            if "branch.oid" in head:
                self._answer = {
                    "commit": head["branch.oid"],
                    "branch": head.get("branch.head"),
                    "clean": all(line.startswith("#") for line in lines),
                }
        return self._answer

    def close(self) -> None:
        """End the process, if it has not answered."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        if self._output is not None:
            self._output.close()
        self._process = self._output = None
        self.is_done = True


class StartRecord:
    """The record of one start of a run, which is written to `run.json` at once, and again when git has answered.

    It has the device of the main rank, host and device of all `ranks`, and the `position`: "step" and "resumed_from".
    """

    def __init__(self, device: torch.device, ranks: Sequence[tuple[str, str]], position: Mapping[str, Any]) -> None:
        script, digest, folder = _script_path(), None, ""
        with contextlib.suppress(OSError):  # it was deleted
            folder = os.getcwd()
        with contextlib.suppress(OSError):
            digest = None if script is None else hashlib.sha256(script.read_bytes()).hexdigest()
        self._git = Git(_code_folder or (Path(folder) if script is None else script.parent))
        hosts: dict[str, Counter[str]] = {}
        for host, name in ranks:
            hosts.setdefault(host, Counter())[name] += 1
        self._known = {
            "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
            **position,
            "command": mask_command([_shorten_paths(argument, folder) for argument in sys.orig_argv]),
            "script": None if script is None else {"name": script.name, "sha256": digest},
            "packages": package_versions(),
            "platform": f"{platform.system()} {platform.release()} {platform.machine()}",
            "processor": {"name": _cpu(), "cores": os.cpu_count()},
            "devices": describe_devices(device),
            "processes": len(ranks),
            "hosts": hosts,
            "environment": recorded_environment(os.environ),
        }
        self._folder = Path()
        self._details: Mapping[str, Any] = {}
        # The starts in `run.json` that this one replaces: "all", or the "last", which is itself; None adds it.
        self._replaces: str | None = None
        self._is_complete = True
        self._tolerance = Tolerance(RUN_FILE, "The next save tries again; what ran is in the checkpoints, too.")

    def to_dict(self, seconds: float = 0.0) -> dict[str, Any]:
        """Return the record as JSON types; "git" is null unless git answers within some seconds."""
        return {**self._known, "git": self._git.answer(seconds)}

    def write(self, folder: Path, details: Mapping[str, Any], replaces_all: bool) -> None:
        """Write it with further `details`, of which secrets are masked; a failing disk is only reported."""
        self._folder, self._details, self._replaces = folder, mask_secrets(details), "all" if replaces_all else None
        self._write(_GIT_S)

    def add_left_out(self, spike: Mapping[str, Any]) -> None:
        """Add a step whose samples are left out, and write the record again."""
        self._known.setdefault("left_out", []).append(spike)
        self._write()

    def complete(self) -> None:
        """Write it again if git has answered since the first time, or the disk failed."""
        if not self._is_complete and (self._git.answer() or self._git.is_done or self._tolerance.has_failed):
            self._write()

    def _write(self, seconds: float = 0.0) -> None:
        with self._tolerance:
            append_start(self._folder / RUN_FILE, {**self.to_dict(seconds), **self._details}, self._replaces)
            self._replaces = "last"
        self._is_complete = self._git.is_done and not self._tolerance.has_failed

    def close(self) -> None:
        """End the process of git."""
        self._git.close()


def _shorten_paths(argument: str, folder: str = "") -> str:
    """Return an argument of the command, or a variable, without the working and the home directory."""
    for path, replacement in ((folder, ""), (os.path.expanduser("~"), "~/")):
        if len(path) > 1:
            argument = argument.replace(f"{path}{os.sep}", replacement)
    return argument


# --- the file


def read_starts(path: Path) -> list[dict[str, Any]]:
    """Return the starts in a `run.json`, oldest first; none if it does not exist.

    Raises:
        CheckpointError: If the file is something else.
    """
    try:
        with open_regular(path) as file:
            data = file.read(_LARGEST + 1)
    except FileNotFoundError:
        return []
    problem = ""
    try:
        content: Any = json.loads(data.decode(), object_pairs_hook=unique_keys) if len(data) <= _LARGEST else None
        starts = content["starts"]
        if content["format_version"] > FORMAT_VERSION:
            problem = f" It has format_version {content['format_version']}: upgrade omnitrain."
        elif isinstance(starts, list) and set(map(type, starts)) <= {dict}:
            return starts
    except (ValueError, TypeError, KeyError, RecursionError):
        pass
    raise CheckpointError(f"{str(path)!r} is no record of the starts of a run.{problem}")


def read_record(folder: Path) -> dict[str, Any]:
    """Return the record of the last start of a run; empty if it has none."""
    try:
        starts = read_starts(folder / RUN_FILE)
    except (CheckpointError, OSError):  # it is damaged, or in no folder
        return {}
    return starts[-1] if starts else {}


def append_start(path: Path, start: Mapping[str, Any], replaces: str | None = None) -> None:
    """Append a start to a `run.json`, which is replaced atomically.

    It replaces "all" if the run replaces another one, and the "last" if the start is already in the file.
    """
    try:
        starts = read_starts(path)
    except CheckpointError as error:
        logger.warning("%s Nothing is written into it: move it away.", error)
        return
    previous = [] if replaces == "all" else starts[:-1] if replaces == "last" else starts
    text = json.dumps({"format_version": FORMAT_VERSION, "starts": [*previous, start]}, indent=2) + "\n"
    replace_file(path, text.encode())


def write_config(path: Path, text: str) -> None:
    """Write the configuration of a run unless the file has it already; a failing disk is only reported."""
    with Tolerance(path.name, "The run continues."):
        with contextlib.suppress(OSError, UnicodeDecodeError):
            if path.read_text() == text:
                return
        replace_file(path, text.encode())
