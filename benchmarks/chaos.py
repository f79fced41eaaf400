"""Interrupts runs at random moments, resumes them until they are done, and compares them bit for bit.

    python benchmarks/chaos.py [--trials N] [--seed N] [--backends NAME ...] [--faults NAME ...] [--json FILE]

Each trial is one run with one kind of fault, which comes again and again at random moments. After each the program is
started anew with `resume_from="auto"`, and the last time it is left alone. Weights, moments, history and metrics are
then those of a run that nothing has disturbed, or the trial has failed. Programs are forked from one that has imported
everything, so that a start takes as long as what it does. Every wait is bounded, and nothing is left behind.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import hashlib
import itertools
import json
import os
import random
import resource
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ |= {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}

import numpy as np
import psutil
import torch
import torch.nn.functional as F
from _report import table
from torch import nn
from torch.utils.data import Dataset

from omnitrain import Callback, Trainer
from omnitrain.checkpoint.tensor_files import gather_to_host

BACKENDS: dict[str, int] = {
    "native": 1, "native async": 1, "native workers": 1, "ddp": 2, "ddp async": 2, "ddp workers": 2, "fsdp": 2,
    "zero2": 2, "zero3": 2, "hf": 1, "hf2": 2,
}  # fmt: skip
"""Every backend and option, and on how many processes it runs."""
FAULTS: dict[str, set[int]] = {
    "kill": {-9, 0, 1},
    "stop": {0},
    "term": {143, -15, 0, 1},
    "int": {130, -2, 0, 1},
    "full disk": {-9, 0, 1},
    "dead worker": {0, 1},
}
"""What may happen, and the exit codes that may come of it: 1 is the error of a process that has lost another one."""
INTERRUPTIONS = 4
"""How often a trial is interrupted, at most."""
UNTOUCHED = 8
"""How often a trial begins anew that has ended before it was interrupted."""
LIMIT = 240.0
"""Seconds after which a start of the program has hung."""
TIMEOUT = 60.0
"""The trainer's `timeout`, and what it waits at the start for a process that was killed before it came."""
FILE_LIMIT = 6000
"""Bytes of a file in a trial with a full disk: less than a checkpoint needs."""


# --- what is trained


class Rows(Dataset[Any]):
    """Rows with an augmentation that draws from all generators; each takes a moment to read."""

    def __init__(self, size: int, seconds: float) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(size, 4, generator=generator)
        self.y = self.x.sum(1, keepdim=True)
        self.seconds = seconds

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        time.sleep(self.seconds)
        return self.x[index] + 0.1 * torch.randn(4) + 0.1 * random.random() + 0.1 * float(np.random.rand()), self.y[
            index
        ]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 1))


class FullDisk(Callback):
    """Lets no file of this process grow beyond a size."""

    def on_train_start(self, trainer: Any) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_LIMIT, resource.RLIM_INFINITY))


def train(backend: str, folder: Path, has_full_disk: bool) -> dict[str, Any]:
    """Train, or go on with it, and return all that is to be the same; called on each process."""
    kind, _, extra = backend.partition(" ")
    processes = BACKENDS[backend]
    options: dict[str, Any] = {
        "loss_fn": F.mse_loss, "batch_size": 8 // processes, "epochs": 3, "learning_rate": 0.05, "max_grad_norm": 0.5,
        "lr_scheduler": "cosine", "warmup_steps": 2, "eval_steps": 5, "save_steps": 3, "save_total_limit": 2,
        "log_steps": 1, "compute_metrics": "mae", "load_best_at_end": False, "progress_bar": False,
        "save_dir": folder, "callbacks": [FullDisk()] if has_full_disk else [], "timeout": TIMEOUT,
    }  # fmt: skip
    options |= {"async": {"async_save": True}, "workers": {"num_workers": 2}}.get(extra, {})
    data = Rows(76, 0.002 * processes), Rows(24, 0.0)
    if kind == "native":
        trainer: Any = Trainer(network(), *data, device="cpu", **options)
    elif kind.startswith("hf"):
        from omnitrain import HFTrainer

        trainer = HFTrainer(network(), None, *data, **options)
    else:
        from accelerate.utils import FullyShardedDataParallelPlugin

        from omnitrain import AccelerateTrainer

        if kind == "fsdp":
            options["fsdp_plugin"] = FullyShardedDataParallelPlugin(fsdp_version=2)
        elif kind.startswith("zero"):
            options["deepspeed_config"] = {"zero_optimization": {"stage": int(kind[-1])}}
        trainer = AccelerateTrainer(network(), *data, **options)
    metrics = trainer.train(resume_from="auto")
    tensors = {f"weights/{name}": tensor for name, tensor in trainer.backend.model_tensors().items()}
    tensors |= {f"moments/{name}": tensor for name, tensor in trainer.backend.optimizer_state()[0].items()}
    digests = {
        name: hashlib.sha256(gather_to_host(tensors[name]).numpy().tobytes()).hexdigest() for name in sorted(tensors)
    }
    return {
        "tensors": digests,
        "metrics": {name: value for name, value in metrics.to_dict().items() if name != "best_checkpoint"},
        "progress": {**trainer.progress.state_dict(), "seconds": 0},
    }


# --- one start of the program


@dataclass(slots=True)
class Start:
    """The processes of one start, forked from this one.

    Attributes:
        backend: What they train on.
        folder: The run's; outputs and results of the processes go beside it.
        codes: The exit codes by rank; None for one that has hung.
    """

    backend: str
    folder: Path
    has_full_disk: bool = False
    pids: dict[int, int] = field(default_factory=dict)
    codes: dict[int, int | None] = field(default_factory=dict)

    def __enter__(self) -> Start:
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        for rank in range(BACKENDS[self.backend]):
            self._path("result", rank).unlink(missing_ok=True)
            pid = os.fork()
            if not pid:
                self._live(rank, port)
            self.pids[rank] = pid
        return self

    def __exit__(self, *_: object) -> None:
        for rank, pid in self.pids.items():
            for process in [*_children(pid), pid] if rank not in self.codes else []:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            if rank not in self.codes:
                os.waitpid(pid, 0)
                self.codes[rank] = None

    def _path(self, what: str, rank: int) -> Path:
        return self.folder.with_name(f"{self.folder.name}-{what}-{rank}")

    def _live(self, rank: int, port: int) -> None:
        """Be one of the processes."""
        code: Any = 1
        try:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            processes = BACKENDS[self.backend]
            if "zero" not in self.backend:
                os.environ["ACCELERATE_USE_CPU"] = "true"
            if processes > 1:
                os.environ |= {
                    "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(processes),
                    "LOCAL_WORLD_SIZE": str(processes), "MASTER_ADDR": "localhost", "MASTER_PORT": str(port),
                }  # fmt: skip
            output = os.open(self._path("output", rank), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(output, 1)
            os.dup2(output, 2)
            try:
                result = train(self.backend, self.folder, self.has_full_disk and not rank)
                resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
                self._path("result", rank).write_text(json.dumps(result))
                code = 0
            except SystemExit as error:
                code = error.code
            except KeyboardInterrupt:
                code = 130
            except BaseException:
                traceback.print_exc()
            with contextlib.suppress(OSError):
                sys.stdout.flush()
                sys.stderr.flush()
            atexit._run_exitfuncs()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code if isinstance(code, int) else 1)

    def poll(self) -> bool:
        """Return whether all processes have ended."""
        for rank, pid in self.pids.items():
            if rank not in self.codes:
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    self.codes[rank] = os.waitstatus_to_exitcode(status)
        return len(self.codes) == len(self.pids)

    def wait(self, seconds: float) -> bool:
        """Wait so long for the end of all processes, and return whether it has come."""
        end = time.monotonic() + seconds
        while not self.poll() and time.monotonic() < end:
            time.sleep(0.01)
        return self.poll()

    def results(self) -> list[Any]:
        """Return what each process has come to; None for one that has not."""
        paths = [self._path("result", rank) for rank in self.pids]
        return [json.loads(path.read_text()) if path.exists() else None for path in paths]

    def last_words(self) -> str:
        """Return the ends of what the processes have written."""
        texts = [self._path("output", rank).read_text(errors="replace")[-1500:] for rank in self.pids]
        return "\n---\n".join(texts)


def _children(pid: int) -> list[int]:
    try:
        return [child.pid for child in psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


# --- faults


def strike(fault: str, start: Start, chance: random.Random) -> bool | None:
    """Do it to one of the processes, or to all; return whether the program may end by it, None if nothing was done."""
    ranks = [rank for rank in start.pids if rank not in start.codes]
    rank = chance.choice(ranks)
    pid = start.pids[rank]
    if fault in ("kill", "full disk"):
        os.kill(pid, signal.SIGKILL)
    elif fault == "stop":
        os.kill(pid, signal.SIGSTOP)
        time.sleep(chance.uniform(0.1, 2.5))
        os.kill(pid, signal.SIGCONT)
        return False
    elif fault in ("term", "int"):
        number = signal.SIGTERM if fault == "term" else signal.SIGINT
        for target in ranks if chance.random() < 0.5 else [rank]:
            os.kill(start.pids[target], number)
    elif children := _children(pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(chance.choice(children), signal.SIGKILL)
    else:
        return None
    return True


def trial(backend: str, fault: str, seconds: float, folder: Path, seed: int, expected: Any) -> dict[str, Any]:
    """Interrupt a run until it is done, and return what came of it.

    Args:
        backend: What it trains on.
        fault: What happens to it.
        seconds: How long a start takes if nothing happens.
        folder: A folder of the trial's own.
        seed: Of moments and ranks.
        expected: The result of a run that nothing happened to.
    """
    chance, remarks, strikes, starts = random.Random(seed), list[str](), 0, 0
    while True:
        starts += 1
        leaves_alone = strikes >= INTERRUPTIONS
        with Start(backend, folder / "run", fault == "full disk" and not leaves_alone) as start:
            ends = False
            while not ends and strikes < INTERRUPTIONS and not start.wait(chance.uniform(0.0, 0.8 * seconds)):
                done = strike(fault, start, chance)
                strikes, ends = strikes + (done is not None), bool(done)
            start.wait(LIMIT)
        codes = [start.codes[rank] for rank in start.pids]
        odd = [code for code in codes if code not in (FAULTS[fault] if ends else {0})]
        if odd:
            remarks.append(f"start {starts} ended with {codes}: {start.last_words()}")
        if not strikes and starts < UNTOUCHED:  # nothing has come in time: the machine has less to do than before
            seconds /= 2
            shutil.rmtree(folder / "run", ignore_errors=True)
        elif all(code == 0 for code in codes) or leaves_alone:
            break
    if not strikes:
        remarks.append("it was never interrupted")
    results = start.results()
    is_same = all(result == expected for result in results)
    if not is_same and all(results):
        remarks += [f"{name}: {_first_difference(results[0][name], expected[name])}" for name in expected]
    return {"backend": backend, "fault": fault, "seed": seed, "same": is_same, "starts": starts, "strikes": strikes,
            "remarks": remarks}  # fmt: skip


def _first_difference(result: Any, expected: Any) -> str:
    if isinstance(result, dict) and isinstance(expected, dict):
        differ = [key for key in {**result, **expected} if result.get(key) != expected.get(key)]
        return f"{differ[0]}: {_first_difference(result.get(differ[0]), expected.get(differ[0]))}" if differ else "same"
    return "same" if result == expected else f"{str(result)[:200]} for {str(expected)[:200]}"


def references(backends: Sequence[str], folder: Path) -> dict[str, tuple[float, Any]]:
    """Return seconds and result of an undisturbed run of each backend.

    Raises:
        RuntimeError: If one does not come to its end.
    """
    results_by_backend = {}
    for backend in backends:
        begin = time.monotonic()
        with Start(backend, folder / backend) as start:
            start.wait(LIMIT)
        results = start.results()
        if not all(results) or any(result != results[0] for result in results):
            raise RuntimeError(f"{backend} ends with {start.codes}, undisturbed: {start.last_words()}")
        results_by_backend[backend] = time.monotonic() - begin, results[0]
    return results_by_backend


# --- all of them


def run(plan: Sequence[tuple[str, str, int]], at_once: int, folder: Path) -> Iterator[dict[str, Any]]:
    """Yield what came of each trial of (backend, fault, seed), so many of them at once in processes of their own."""
    (folder / "reference").mkdir()
    known = references(sorted({backend for backend, _, _ in plan}), folder / "reference")
    waiting, running = list(enumerate(plan)), dict[int, Path]()
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                number, (backend, fault, seed) = waiting.pop(0)
                trial_folder = folder / str(number)
                trial_folder.mkdir()
                pid = os.fork()
                if not pid:
                    _conduct(backend, fault, seed, trial_folder, known[backend])
                running[pid] = trial_folder
            pid, _ = os.waitpid(-1, 0)
            trial_folder = running.pop(pid)
            yield json.loads((trial_folder / "found.json").read_text())
            shutil.rmtree(trial_folder)
    finally:
        for pid in running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
                os.waitpid(pid, 0)


def _load_deepspeed(folder: Path) -> None:
    """Compile and load what DeepSpeed communicates by, for all processes that are forked from this one.

    Each would do it by itself, under a lock that outlives a process that is killed: the next start waits for it.
    """
    from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder

    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(folder))
    ShareMemCommBuilder().load()


def _leave(*_: object) -> None:
    raise SystemExit(143)


def _conduct(backend: str, fault: str, seed: int, folder: Path, known: tuple[float, Any]) -> None:
    """Be the process of a trial."""
    signal.signal(signal.SIGTERM, _leave)  # so that its processes are ended
    result: dict[str, Any] = {
        "backend": backend,
        "fault": fault,
        "seed": seed,
        "same": False,
        "starts": 0,
        "strikes": 0,
    }
    try:
        result = trial(backend, fault, known[0], folder, seed, known[1])
    except BaseException:
        result["remarks"] = [traceback.format_exc()]
    finally:
        (folder / "found.json").write_text(json.dumps(result))
        os._exit(0)


def show(outcomes: Sequence[dict[str, Any]]) -> list[str]:
    """Return the table: of each backend and fault how many trials had the same bits, of how many."""
    faults = [fault for fault in FAULTS if any(outcome["fault"] == fault for outcome in outcomes)]
    trials = Counter((outcome["backend"], outcome["fault"]) for outcome in outcomes)
    same = Counter((outcome["backend"], outcome["fault"]) for outcome in outcomes if outcome["same"])
    rows = []
    for backend in BACKENDS:
        if of_backend := [outcome for outcome in outcomes if outcome["backend"] == backend]:
            cells = [f"{same[backend, fault]} of {trials[backend, fault]}" if trials[backend, fault] else ""
                     for fault in faults]  # fmt: skip
            odd = sum(bool(outcome["remarks"]) for outcome in of_backend)
            rows.append(
                [backend, *cells, str(sum(outcome["strikes"] for outcome in of_backend)), str(odd or "nothing")]
            )
    return table(["backend", *faults, "interruptions", "else"], rows)


def pairs_of(backends: Iterable[str], faults: Iterable[str]) -> list[tuple[str, str]]:
    """Return each backend with each fault that it can have."""
    all_pairs = itertools.product(backends, faults)
    return [pair for pair in all_pairs if pair[1] != "dead worker" or pair[0].endswith("workers")]


def planned(pairs: Sequence[tuple[str, str]], trials: int, chance: random.Random) -> list[tuple[str, str, int]]:
    """Return (backend, fault, seed) of trials in which no backend, and no fault of it, comes much less than others."""
    counts, plan = Counter[object](), list[tuple[str, str, int]]()
    while len(plan) < trials:
        shuffled = chance.sample(pairs, len(pairs))
        backend, fault = pair = min(
            shuffled, key=lambda candidate: (counts[candidate[0]], counts[candidate], counts[candidate[1]])
        )
        counts.update((backend, fault, pair))
        plan.append((backend, fault, chance.getrandbits(32)))
    return plan


def _parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=list(BACKENDS))
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=list(FAULTS))
    parser.add_argument("--at-once", type=int, default=2, help="trials that run at the same time")
    parser.add_argument("--json", type=Path, help="writes what came of each trial into this file")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the trials and print the table; return 1 if any of them failed."""
    args = _parsed(arguments)
    pairs = pairs_of(args.backends, args.faults)
    if not pairs:
        raise SystemExit("Nothing to try: a dead worker needs a backend with workers.")
    signal.signal(signal.SIGTERM, _leave)  # so that nothing is left behind
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))  # no TemporaryDirectory, which each forked process would remove
    tempfile.tempdir = os.environ["TMPDIR"] = str(folder)  # what is killed leaves files
    plan, outcomes = planned(pairs, args.trials, random.Random(args.seed)), list[dict[str, Any]]()
    try:
        for name in ("transformers.trainer", "deepspeed", "omnitrain.trainer.accelerated", "omnitrain.hf.trainer"):
            __import__(name)
        torch.set_num_threads(1)
        if any(backend.startswith("zero") for backend in args.backends):
            _load_deepspeed(folder)
        for outcome in run(plan, args.at_once, folder):
            outcomes.append(outcome)
            verdict = "the same bits" if outcome["same"] else "OTHER BITS"
            print(
                f"{outcome['backend']}, {outcome['fault']}: {verdict} after {outcome['strikes']} interruptions",
                flush=True,
            )
            for remark in outcome["remarks"]:
                print(f"    seed {outcome['seed']}: {remark}", flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print("", *show(outcomes), sep="\n")
    if args.json is not None:
        args.json.write_text(json.dumps(outcomes, indent=1))
    return int(any(not outcome["same"] or outcome["remarks"] for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
