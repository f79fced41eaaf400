"""AccelerateTrainer on two GPUs, by `omnitrain launch`: NCCL, the fp16 scaler, and memory."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import programs
import pytest
import torch
import torch.nn.functional as F
from recipes import Trace, fit, rows, t16
from torch import nn
from torch.utils.data import TensorDataset

from omnitrain import AccelerateTrainer

WAYS = {"ddp": [], "fsdp2": ["--fsdp"], "zero1": ["--zero", "1"], "zero3": ["--zero", "3"]}
pytestmark = [
    pytest.mark.gpu, pytest.mark.processes,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]  # fmt: skip


def make(model: nn.Module, data: Any, **options: Any) -> AccelerateTrainer:
    return AccelerateTrainer(
        model, data, **{"progress_bar": False, "loss_fn": F.mse_loss, "learning_rate": 0.01, **options}
    )


# this file is also the script that the two processes run


def launch(way: str, tmp_path: Path, *words: str) -> list[dict[str, Any]]:
    """Run `main` on two GPUs, and return what each process has said."""
    command = [sys.executable, "-m", "omnitrain", "launch", "-n", "2", *WAYS[way], __file__, str(tmp_path), *words]
    done = programs.run(*command, env=programs.launch_environment())
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads((tmp_path / f"said-{rank}.json").read_text()) for rank in range(2)]


def wide() -> tuple[nn.Module, TensorDataset]:
    """A model whose parameters, gradients and moments are nearly all the memory that it needs: about 540 MB."""
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(2048, 2048), nn.ReLU())))
    return model, TensorDataset(torch.randn(32, 2048), torch.randn(32, 2048))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--wide", action="store_true")
    parser.add_argument("--precision", default="fp32")
    args = parser.parse_args()
    model, data = wide() if args.wide else (t16(dtype=torch.float32), rows(60, torch.float32))
    size, trace = 2 if args.wide else 4, Trace()
    trainer = fit(make(
        model, data, batch_size=size, epochs=2, log_steps=1, autocast=args.precision, callbacks=[trace],
        max_grad_norm=0.5,
    ))  # fmt: skip
    results = {
        "backend": torch.distributed.get_backend(),
        "device": str(trainer.device),
        "losses": [row["loss"] for row in trace.logs],
        "model": type(trainer.model_wrapped).__name__,
        "scales": [row.get("loss_scale") for row in trace.logs],
        "peak": torch.cuda.max_memory_allocated(),
    }
    (args.out / f"said-{trainer.rank}.json").write_text(json.dumps(results))


@pytest.mark.parametrize("way", WAYS)
def test_ddp_over_nccl_follows_single_gpu_curve(way: str, tmp_path: Path) -> None:
    trace = Trace()
    make(
        t16(dtype=torch.float32), rows(60, torch.float32), batch_size=8, epochs=2, log_steps=1, callbacks=[trace],
        max_grad_norm=0.5,
    ).train()  # fmt: skip
    first, second = launch(way, tmp_path)
    assert "nccl" in first["backend"]
    assert (first["device"], second["device"]) == ("cuda:0", "cuda:1")
    assert first["losses"] == second["losses"]
    assert first["losses"] == pytest.approx([row["loss"] for row in trace.logs], abs=1e-5)


def test_fp16_scaler_is_equal_on_both_gpus(tmp_path: Path) -> None:
    first, second = launch("ddp", tmp_path, "--precision", "fp16")
    assert first["scales"] == second["scales"]
    assert first["scales"][-1] > 0
    assert first["losses"][-1] < first["losses"][0]


@pytest.mark.parametrize("way", ["fsdp2", "zero3"])
def test_sharded_model_needs_less_memory_than_ddp(way: str, tmp_path: Path) -> None:
    folders = {name: tmp_path / name for name in ("ddp", way)}
    for folder in folders.values():
        folder.mkdir()
    whole, parts = ([result["peak"] for result in launch(name, folder, "--wide")] for name, folder in folders.items())
    assert max(parts) < 0.8 * min(whole)


if __name__ == "__main__":
    main()
