"""The same training by a plain loop, by the three trainers and by others that are installed: the time of a step.

    python benchmarks/peers/training.py [--quick] [--rounds N] [--cpu-time] [--json FILE]

All train the model of the case "plain" of `overhead.py` from the same weights on the same samples in the same order,
with the same AdamW, which is not fused, and end with the same weights; a variant with other weights is an error.
"""

from __future__ import annotations

import argparse
import copy
import functools
import logging
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for the modules of the benchmarks

import torch
from _timing import interleaved, machine, show, summarize, timed, use_cpu_time, write_json
from overhead import (
    LEARNING_RATE,
    SEED,
    Outcome,
    SameOrder,
    SameWork,
    Samples,
    Training,
    WithLoss,
    mlp,
    plain_by_hand,
    plain_by_trainer,
    points,
)
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from omnitrain import AccelerateTrainer

Run = Callable[[], Outcome]


def parts(work: Training) -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[Any]]:
    """Return a copy of the model, its optimizer, and a loader of the samples in the same order for all."""
    model = copy.deepcopy(work.model)
    optimizer = work.note_times(torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0))
    return model, optimizer, DataLoader(work.dataset, work.batch_size, sampler=SameOrder(len(work.dataset)))  # type: ignore[arg-type]


def run_loop(
    work: Training, bare: nn.Module, model: Any, optimizer: Any, batches: Any, backward: Callable[[Tensor], Any]
) -> Outcome:
    """Run the loop of a library that wraps the model and has a backward pass of its own."""
    for _ in range(work.epochs):
        for x, labels in batches:
            backward(cross_entropy(model(x), labels))
            optimizer.step()
            optimizer.zero_grad()
    return bare, []


def by_accelerate(work: Training) -> Run:
    """Prepare the loop of accelerate's documentation."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    bare, optimizer, batches = parts(work)
    model, optimizer, batches = accelerator.prepare(bare, optimizer, batches)

    return lambda: run_loop(work, bare, model, optimizer, batches, accelerator.backward)


def by_ignite(work: Training) -> Run:
    """Prepare ignite's engine."""
    from ignite.engine import create_supervised_trainer

    model, optimizer, batches = parts(work)
    engine = create_supervised_trainer(model, optimizer, cross_entropy)

    def run() -> Outcome:
        engine.run(batches, max_epochs=work.epochs)
        return model, []

    return run


def by_fabric(work: Training) -> Run:
    """Prepare a loop with Lightning's Fabric."""
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1)
    bare, optimizer, batches = parts(work)
    model, optimizer = fabric.setup(bare, optimizer)
    batches = fabric.setup_dataloaders(batches, use_distributed_sampler=False)

    return lambda: run_loop(work, bare, model, optimizer, batches, fabric.backward)


def by_lightning(work: Training) -> Run:
    """Prepare lightning.Trainer without what it writes."""
    import lightning

    bare, optimizer, batches = parts(work)

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = bare

        def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
            x, labels = batch
            return cross_entropy(self.model(x), labels)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer

    module = Module()
    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, max_epochs=work.epochs, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
    )  # fmt: skip

    def run() -> Outcome:
        trainer.fit(module, batches)
        return bare, []

    return run


def by_transformers(work: Training, *, ours: bool) -> Run:
    """Prepare `transformers.Trainer`, or HFTrainer with the same arguments, on samples that are dicts."""
    import transformers

    model = WithLoss(copy.deepcopy(work.model), cross_entropy)
    optimizer = work.note_times(torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0))
    assert isinstance(work.dataset, TensorDataset)
    data = Samples(*work.dataset.tensors)
    arguments = transformers.TrainingArguments(
        str(Path(tempfile.gettempdir(), "unused")), per_device_train_batch_size=work.batch_size,
        num_train_epochs=work.epochs, logging_steps=work.log_every, save_strategy="no", report_to="none", use_cpu=True,
        disable_tqdm=True, seed=SEED, dataloader_pin_memory=False, lr_scheduler_type="constant", max_grad_norm=1e6,
    )  # fmt: skip
    trainer: Any
    if ours:
        from omnitrain import HFTrainer

        trainer = HFTrainer(model, arguments, data, optimizers=(optimizer, None), progress_bar=False)
    else:

        class Stock(transformers.Trainer):
            def _get_train_sampler(self, *_: Any) -> SameOrder:
                return SameOrder(len(data))

        trainer = Stock(model, arguments, train_dataset=data, optimizers=(optimizer, None))
        trainer.remove_callback(transformers.PrinterCallback)

    def run() -> Outcome:
        trainer.train()
        return model.body, []

    return run


def variants(work: Training) -> dict[str, tuple[str, Run | Callable[[], Run]]]:
    """Return how each variant is prepared, by name, with the package that it needs."""
    return {
        "plain loop": ("torch", lambda: plain_by_hand(work)),
        "plain loop again (A/A)": ("torch", lambda: plain_by_hand(work)),
        "omnitrain.Trainer": ("torch", lambda: plain_by_trainer(work, same_optimizer=True, clip=True)),
        "omnitrain.AccelerateTrainer": (
            "accelerate",
            lambda: plain_by_trainer(work, same_optimizer=True, clip=True, kind=AccelerateTrainer),
        ),
        "omnitrain.HFTrainer": ("transformers", lambda: by_transformers(work, ours=True)),
        "ignite": ("ignite", lambda: by_ignite(work)),
        "Lightning Fabric": ("lightning", lambda: by_fabric(work)),
        "accelerate by hand": ("accelerate", lambda: by_accelerate(work)),
        "lightning.Trainer": ("lightning", lambda: by_lightning(work)),
        "transformers.Trainer": ("transformers", lambda: by_transformers(work, ours=False)),
    }


def measurements(work: Training) -> Mapping[str, Any]:
    """Return what measures each variant whose package is installed."""
    same = SameWork()
    return {
        name: timed(prepare, functools.partial(same, tolerance=1e-5), work.stretches)
        for name, (package, prepare) in variants(work).items()
        if find_spec(package) is not None
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="seconds instead of minutes; the figures mean little")
    parser.add_argument("--rounds", type=int, default=7, help="how many; default 7")
    parser.add_argument("--cpu-time", action="store_true", help="measure CPU time: on a machine that others use too")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    if options.cpu_time:
        use_cpu_time()
    about = {**machine(), "quick": options.quick, "clock": "CPU" if options.cpu_time else "wall"}
    data = TensorDataset(*points(400 if options.quick else 8000))
    work = Training(mlp(), data, batch_size=8, epochs=2, log_every=10 if options.quick else 100, loss_fn=cross_entropy)
    samples = interleaved(measurements(work), 1 if options.quick else options.rounds)
    rows = summarize("peers", samples, "us/step", 1e6 / work.steps)
    print(", ".join(f"{key} {value}" for key, value in about.items()), "\n", sep="\n")
    print(show(rows))
    if options.json is not None:
        write_json(options.json, rows, about)


if __name__ == "__main__":
    main()
