"""The `omnitrain launch` command, which starts a script on several processes.

torchrun's agent starts, watches and restarts the processes. `AccelerateTrainer` reads the environment variables that
`accelerate launch` would set; that launcher itself would start only one process on a CPU. `main.py` parses the command
line.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from omnitrain.core.errors import ConfigError, MissingExtraError


@dataclass(slots=True)
class Launch:
    """The options of `omnitrain launch`.

    >>> launch = Launch("train.py", ["--lr", "0.1"], processes=2, zero=3)
    >>> launch.command()
    ['--nproc-per-node', '2', '--max-restarts', '0', '--standalone', 'train.py', '--lr', '0.1']
    >>> launch.environment(cores=8)["ACCELERATE_DEEPSPEED_ZERO_STAGE"]
    '3'
    """

    script: str
    """The path of a script, or the name of a module."""
    arguments: Sequence[str] = ()
    processes: int = 1
    """The number of processes on this machine."""
    fsdp: bool = False
    zero: int | None = None
    """The ZeRO stage of DeepSpeed; None without DeepSpeed."""
    cpu: bool = False
    """Whether to use no GPUs."""
    is_module: bool = False
    machines: int | str = "1"
    """The number of machines, or "MIN:MAX" for a run that continues as machines are lost and come back."""
    endpoint: str | None = None
    """The rendezvous of the machines: host:port of one of them."""
    max_restarts: int = 0

    def check(self, gpus: int = 0) -> None:
        """Raise ConfigError for options that cannot work on a machine with so many GPUs."""
        min_machines, max_machines = self._machine_range()
        if self.processes < 1 or min_machines < 1 or self.max_restarts < 0:
            raise ConfigError(
                f"Cannot start {self.processes} process(es) on {self.machines} machine(s) with {self.max_restarts} "
                "restarts. There must be at least one process and one machine, and no negative number of restarts."
            )
        if min_machines != max_machines and not self.max_restarts:
            raise ConfigError(
                f"`--nnodes {self.machines}` needs `--max-restarts N`: the run continues on other machines by a "
                "restart of all processes."
            )
        if max_machines > 1 and not self.endpoint:
            raise ConfigError(
                f"`--nnodes {self.machines}` needs `--rdzv-endpoint HOST:PORT`, the same on each machine: the name of "
                "one of them, where they meet."
            )
        if max_machines == 1 and self.endpoint:
            raise ConfigError(f"`--rdzv-endpoint {self.endpoint}` is for several machines. Give `--nnodes` too.")
        if not self.is_module and not Path(self.script).is_file():
            raise ConfigError(f"There is no script {self.script!r} here. (A module is started with `-m`.)")
        if gpus and not self.cpu and self.processes > gpus:
            raise ConfigError(
                f"`-n {self.processes}` asks for more processes than this machine has GPUs ({gpus}). Each process "
                "needs its own. `--cpu` uses none."
            )
        if self.zero is not None and find_spec("deepspeed") is None:
            raise MissingExtraError("--zero", "deepspeed", "deepspeed")

    def _machine_range(self) -> tuple[int, int]:
        """Return the minimum and the maximum number of machines."""
        words = str(self.machines).split(":")
        numbers = [int(word) for word in words if word.removeprefix("-").isdecimal()]
        if len(words) > 2 or len(numbers) != len(words) or numbers[0] > numbers[-1]:
            raise ConfigError(
                f"`--nnodes {self.machines}` must be a number of machines, or the fewest and the most, such as 1:4."
            )
        return numbers[0], numbers[-1]

    def command(self) -> list[str]:
        """Return the command line for torchrun."""
        words = ["--nproc-per-node", str(self.processes), "--max-restarts", str(self.max_restarts)]
        if self._machine_range() == (1, 1):
            words.append("--standalone")  # uses a free port, so several runs can share a machine
        else:
            words += ["--nnodes", str(self.machines), "--rdzv-backend", "c10d", "--rdzv-endpoint", str(self.endpoint)]
        return [*words, *(["-m"] if self.is_module else []), self.script, *self.arguments]

    def environment(self, cores: int) -> dict[str, str]:
        """Return the environment variables to set for the processes, which share so many cores."""
        min_machines, max_machines = self._machine_range()
        variables = {}
        if min_machines == max_machines:
            variables["OMNITRAIN_NUM_PROCESSES"] = str(self.processes * min_machines)
        if max_machines > 1 and self.max_restarts:
            # torchrun shares one store between attempts, and a machine that joins later does not get its address
            variables["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        if self.fsdp or self.zero is not None:
            variables["ACCELERATE_USE_FSDP"] = str(self.fsdp).lower()
            variables["ACCELERATE_USE_DEEPSPEED"] = str(self.zero is not None).lower()
        if self.fsdp:
            variables["FSDP_VERSION"] = "2"
        if self.zero is not None:
            variables["ACCELERATE_DEEPSPEED_ZERO_STAGE"] = str(self.zero)
        if self.cpu and self.zero is not None:  # accelerate turns DeepSpeed off if ACCELERATE_USE_CPU is set
            variables |= {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "false"}
        elif self.cpu:
            variables["ACCELERATE_USE_CPU"] = "true"
        if "OMP_NUM_THREADS" not in os.environ:
            variables["OMP_NUM_THREADS"] = str(max(1, cores // self.processes))
        # torchrun's 30 seconds are too short to save a large model after a signal
        variables["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "300")
        return variables


def start(launch: Launch) -> int:
    """Run the script on its processes, forward signals, and return an exit code as a shell would.

    It is that of the first process that failed, 0 if none did, and 128 plus the number of a signal that ended them.
    """
    launch.check()  # most mistakes are reported before the slow import of torch
    import torch
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    launch.check(torch.cuda.device_count())
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    os.environ.update(launch.environment(cores))
    try:
        run.run(run.parse_args(launch.command()))
    except SignalException as error:
        return 128 + int(error.sigval)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        code = failure.exitcode if failure.exitcode >= 0 else 128 - failure.exitcode
        print(f"omnitrain: rank {rank} was the first to end with an error: exit code {code}.", file=sys.stderr)
        return code
    return 0
