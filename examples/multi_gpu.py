"""Several GPUs, or several processes without any: the script does not know how many there are.

    python examples/multi_gpu.py
    omnitrain launch -n 2 examples/multi_gpu.py
    omnitrain launch -n 2 --fsdp examples/multi_gpu.py
    omnitrain launch -n 2 --zero 3 examples/multi_gpu.py
    torchrun --nproc-per-node 2 examples/multi_gpu.py
    accelerate launch --config_file examples/accelerate_configs/ddp_cpu.yaml examples/multi_gpu.py

Stop it (Ctrl-C) and start it in another of these ways: it goes on from the same step, on the same samples. The batch
of a step has 64 samples however many processes share it, so the curve is the same too, but for rounding.
In plain PyTorch: about 60 lines for DDP alone, and for a resume between epochs alone; with the trainer 17.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset, random_split

from omnitrain import AccelerateTrainer, MetricsDict


def digits(part: int) -> Dataset[tuple[Tensor, ...]]:
    """Return those to train on (0), to evaluate on (1), or to test on (2)."""
    pixels, labels = load_digits(return_X_y=True)
    samples = TensorDataset(torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(labels))
    return random_split(samples, [1200, 297, 300], torch.Generator().manual_seed(0))[part]


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def main(epochs: int = 10, out: Path = Path("runs/multi_gpu")) -> MetricsDict:
    train, valid, test = map(digits, range(3))
    torch.manual_seed(0)  # for the weights; all processes start from those of the main one
    trainer = AccelerateTrainer(
        network(),
        train,
        valid,
        loss_fn=F.cross_entropy,
        compute_metrics="accuracy",
        epochs=epochs,
        batch_size=8,  # on each process, in one forward pass
        global_batch_size=64,  # in a step, on all of them: sets the accumulation
        learning_rate=3e-3,
        lr_scheduler="cosine",
        log_steps="1ep",
        save_dir=out,
        save_total_limit=1,
    )
    metrics = trainer.train(resume_from="auto")  # this and what follows is called on every process
    results = trainer.evaluate(test, prefix="test")
    trainer.save_model(out / "model", overwrite=True)

    if trainer.is_main_process:  # only what prints is for the main one alone
        print(metrics)
        print(f"{trainer.world_size} process(es), {type(trainer.model_wrapped).__name__}: {results}")
    return metrics


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10, help="default: %(default)s")
    parser.add_argument("--out", type=Path, default=Path("runs/multi_gpu"), help="default: %(default)s")
    main(**vars(parser.parse_args()))
