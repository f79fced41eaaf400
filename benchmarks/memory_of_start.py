"""How much host memory each process takes until its first step, by where the model is when it is passed.

    python benchmarks/memory_of_start.py [--quick] [--json FILE]

The script starts itself under torchrun for each case; how to read the figures is in README.md beside this file.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from _memory import MIB, peak_of, return_freed_memory
from _report import table
from _timing import machine
from safetensors.torch import save_file
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

LAYERS = 16
BACKENDS = {"fsdp": "FSDP 2", "zero3": "ZeRO 3"}
PLACES = {
    "everywhere": "real on all ranks",
    "main": "real on rank 0, meta elsewhere",
    "file": "meta on all ranks, `init_from`",
    "own": "meta on all ranks, `reset_parameters`",
}


def made(width: int, layers: int) -> nn.Module:
    """Return a model of square matrices."""
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))


def begin(backend: str, place: str, width: int, layers: int, folder: Path) -> Any:
    """Return a trainer that is ready for its first step."""
    from omnitrain import AccelerateTrainer

    is_real = place == "everywhere" or (place == "main" and os.environ.get("RANK", "0") == "0")
    options: dict[str, Any] = {"init_from": folder / f"{width}.safetensors"} if place == "file" else {}
    if backend == "fsdp":
        from accelerate.utils import FullyShardedDataParallelPlugin

        options["fsdp_plugin"] = FullyShardedDataParallelPlugin(fsdp_version=2)
    else:
        options["deepspeed_config"] = {"zero_optimization": {"stage": 3}}
    x = torch.randn(8, width)
    with torch.device("cpu" if is_real else "meta"):
        model = made(width, layers)
    return AccelerateTrainer(
        model, TensorDataset(x, x), loss_fn=mse_loss, batch_size=4, max_steps=1, progress_bar=False, **options
    )


def work(backend: str, place: str, width: int, folder: Path) -> None:
    """Measure in a process of a launch; a small model goes first, which brings in the code that it takes."""
    return_freed_memory()
    torch.set_num_threads(1)
    begin(backend, place, 8, LAYERS, folder)
    peak, after = peak_of(lambda: begin(backend, place, width, LAYERS, folder))
    rank = os.environ.get("RANK", "0")
    (folder / f"found-{rank}.json").write_text(json.dumps({"peak": peak, "after": after}))


def measure(backend: str, place: str, processes: int, width: int, folder: Path) -> list[dict[str, int]]:
    """Return what each rank of a launch has found."""
    for old in folder.glob("found-*.json"):
        old.unlink()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment |= {"DS_ACCELERATOR": "cpu"} if backend == "zero3" else {"ACCELERATE_USE_CPU": "true"}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    words = [str(Path(__file__).resolve()), "--worker", backend, place, str(width), str(folder)]
    done = subprocess.run([*launcher, *words], env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr[-4000:])
    return [json.loads((folder / f"found-{rank}.json").read_text()) for rank in range(processes)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4])
    args = parser.parse_args()
    width = 256 if args.quick else 4096
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for size in (8, width):
            save_file(made(size, LAYERS).state_dict(), folder / f"{size}.safetensors")
        for backend in BACKENDS:
            for processes in args.processes if backend == "zero3" else [count for count in args.processes if count > 1]:
                for place in PLACES:
                    ranks = measure(backend, place, processes, width, folder)
                    rows.append({"backend": backend, "processes": processes, "place": place, "ranks": ranks})
    size, largest = LAYERS * width**2 * 4, width**2 * 4
    print(f"{machine()}\n\nA model of {size / MIB:,.0f} MiB, whose largest tensor has {largest / MIB:,.0f} MiB.\n")
    cells = []
    for row in rows:
        first, *rest = row["ranks"]
        shown = [f"{value / MIB:,.0f}" for value in (first["peak"], max((value["peak"] for value in rest), default=0))]
        part, after = size / row["processes"] / MIB, max(ranks["after"] for ranks in row["ranks"]) / MIB
        cells.append([BACKENDS[row["backend"]], str(row["processes"]), PLACES[row["place"]], f"{part:,.0f}", *shown,
                      f"{after:,.0f}"])  # fmt: skip
    head = ["backend", "ranks", "the model", "a part", "peak of rank 0", "of the others", "when it has begun"]
    print("\n".join(table(head, cells, numbers=(1, 3, 4, 5, 6))))
    if args.json is not None:
        args.json.write_text(json.dumps({**machine(), "rows": rows}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        work(sys.argv[2], sys.argv[3], int(sys.argv[4]), Path(sys.argv[5]))
    else:
        main()
