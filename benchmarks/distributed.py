"""What AccelerateTrainer costs above loops written by hand, on two processes: DDP alone, and accelerate's own way.

    python benchmarks/distributed.py [--quick] [--only NAME ...] [--rounds N] [--json FILE]

The script starts itself twice under torchrun. All variants train the same model on the same samples in the same number
of steps, in turns within each round; how to read the figures is in README.md beside this file.
"""

from __future__ import annotations

import argparse
import copy
import functools
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _timing import Row, interleaved, machine, show, summarize, timed, write_json
from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin
from overhead import LEARNING_RATE, SEED, Encoder, WithLoss, mlp, points
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from omnitrain import AccelerateTrainer, Callback

PROCESSES = 2
WORKER = "--worker"


@dataclass(slots=True)
class Work:
    """A run: so many steps of so many samples on each process."""

    model: nn.Module
    dataset: TensorDataset
    batch_size: int
    steps: int
    log_every: int

    @staticmethod
    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=LEARNING_RATE, weight_decay=0.0, fused=True)


def schedule(optimizer: torch.optim.Optimizer) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: 0.9999**step)


def by_ddp(work: Work) -> Callable[[], int]:
    """Prepare the loop that a user of DistributedDataParallel writes."""
    model = DistributedDataParallel(copy.deepcopy(work.model))
    optimizer = work.optimizer(model.parameters())
    scheduler = schedule(optimizer)
    sampler = DistributedSampler(work.dataset, seed=SEED)
    loader = DataLoader(work.dataset, work.batch_size, sampler=sampler)

    def run() -> int:
        steps, epoch, total = 0, 0, torch.zeros(())
        while steps < work.steps:
            sampler.set_epoch(epoch)
            epoch += 1
            for x, labels in loader:
                loss = model(x=x, labels=labels)["loss"]
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                total += loss.detach()
                steps += 1
                if steps % work.log_every == 0:
                    dist.all_reduce(total)
                    total.zero_()
                if steps == work.steps:
                    break
        return steps

    return run


def by_accelerate(work: Work) -> Callable[[], int]:
    """Prepare the loop of accelerate's documentation: everything prepared, `accumulate()` around each step."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1))
    model = copy.deepcopy(work.model)
    optimizer = work.optimizer(model.parameters())
    loader = DataLoader(work.dataset, work.batch_size, shuffle=True)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, schedule(optimizer))

    def run() -> int:
        steps, total = 0, torch.zeros(())
        while steps < work.steps:
            for x, labels in loader:
                with accelerator.accumulate(model):
                    loss = model(x=x, labels=labels)["loss"]
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                total += loss.detach()
                steps += 1
                if steps % work.log_every == 0:
                    accelerator.reduce(total)
                    total.zero_()
                if steps == work.steps:
                    break
        return steps

    return run


class Listener(Callback):
    """Reads the logs, as a user would."""

    def on_log(self, trainer: Any, logs: dict[str, Any]) -> None:
        assert logs["loss"] == logs["loss"]


def by_trainer(work: Work) -> Callable[[], int]:
    """Prepare AccelerateTrainer for the same number of steps."""
    trainer = AccelerateTrainer(
        copy.deepcopy(work.model),
        {"x": work.dataset.tensors[0], "labels": work.dataset.tensors[1]},
        epochs=None,
        max_steps=work.steps,
        batch_size=work.batch_size,
        optimizer=work.optimizer,
        lr_scheduler=schedule,
        max_grad_norm=1.0,
        log_steps=work.log_every,
        seed=SEED,
        callbacks=[Listener()],
        progress_bar=False,
    )
    trainer_run = trainer.train

    def run() -> int:
        trainer_run()
        return trainer.progress.step

    return run


def measure(name: str, work: Work, rounds: int) -> list[Row]:
    """Measure the variants in turns; times are per step."""

    def check(steps: int) -> None:
        assert steps == work.steps, (steps, work.steps)

    def together(prepare: Callable[[Work], Callable[[], int]]) -> Callable[[], int]:
        run = prepare(work)
        dist.barrier()
        return run

    makers = {
        "DDP by hand": by_ddp,
        "DDP by hand again (A/A)": by_ddp,
        "accelerate by hand": by_accelerate,
        "AccelerateTrainer": by_trainer,
    }
    variants = {label: timed(functools.partial(together, maker), check) for label, maker in makers.items()}
    return summarize(name, interleaved(variants, rounds), "us/step", 1e6 / work.steps)


CASES = ("tiny MLP", "small transformer")


def cases(quick: bool) -> dict[str, Work]:
    """Return what is measured."""
    generator = torch.Generator().manual_seed(SEED)
    x, labels = points(2000)
    words, kinds = torch.randint(0, 1000, (1600, 64), generator=generator), torch.randint(0, 2, (1600,))
    tiny = Work(WithLoss(mlp(), cross_entropy), TensorDataset(x, labels), 4, 20 if quick else 600, 50)
    body = Encoder(1 if quick else 4)
    small = Work(WithLoss(body, cross_entropy), TensorDataset(words, kinds), 16, 3 if quick else 40, 20)
    return dict(zip(CASES, (tiny, small), strict=True))


def work_as_rank(options: argparse.Namespace) -> None:
    """Measure on this process; the first one prints."""
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    Accelerator(cpu=True)  # forms the group of processes that all variants use
    rows: list[Row] = []
    for name, work in cases(options.quick).items():
        if name in options.only:
            rows += measure(name, work, 1 if options.quick else options.rounds)
    if dist.get_rank() == 0:
        about = {**machine(), "processes": PROCESSES, "quick": options.quick}
        print(", ".join(f"{key} {value}" for key, value in about.items()), "\n", sep="\n")
        print(show(rows))
        if options.json is not None:
            write_json(options.json, rows, about)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Start the processes, or be one of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="seconds instead of minutes; the figures mean little")
    parser.add_argument("--only", nargs="+", choices=CASES, default=CASES, metavar="NAME", help=", ".join(CASES))
    parser.add_argument("--rounds", type=int, default=9, help="how many; default 9")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    parser.add_argument(WORKER, action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work_as_rank(options)
        return
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={PROCESSES}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *launcher, __file__, WORKER, *sys.argv[1:]]
    raise SystemExit(subprocess.run(command, env=environment, timeout=1500).returncode)


if __name__ == "__main__":
    main()
