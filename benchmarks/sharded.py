"""Sharded checkpoints against `torch.distributed.checkpoint`: time and memory of writing the same state.

    python benchmarks/sharded.py                  # 500 MB on two processes, five rounds
    python benchmarks/sharded.py --megabytes 50 --rounds 2

Both write DTensors (fp32, sharded along dimension 0) on gloo, round after round in turns: `dcp.save` with
`HuggingFaceStorageWriter(save_distributed=True)`, and `write_shards`, which also hashes what it writes. Both wait until
the disk has it. Memory is the growth of a process's peak in a round, of the rank where it grew most, each variant in
processes of its own.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from _report import table
from torch.distributed.checkpoint import HuggingFaceStorageWriter, save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from omnitrain.checkpoint.disk import FileSystem
from omnitrain.checkpoint.shards import own_blocks, write_shards

PROCESSES = 2
VARIANTS = ("dcp.save", "write_shards")


def with_dcp(tensors: dict[str, torch.Tensor], folder: Path, rank: int) -> None:
    save(dict(tensors), storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True))


def with_shards(tensors: dict[str, torch.Tensor], folder: Path, rank: int) -> None:
    write_shards({name: own_blocks(one, rank) for name, one in tensors.items()}, folder, rank, FileSystem())


def peak_growth(work: Callable[[], None]) -> float:
    """Return by how many bytes the memory of this process grew at most while `work` ran."""
    process, ended = psutil.Process(), threading.Event()
    before = peak = process.memory_info().rss

    def watch() -> None:
        nonlocal peak
        while not ended.wait(0.002):
            peak = max(peak, process.memory_info().rss)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        work()
    finally:
        ended.set()
        thread.join()
    return float(peak - before)


def measure(rank: int, place: str, megabytes: int, rounds: int, only: str | None) -> None:
    """Write the state by each variant in turns, and leave seconds and bytes of memory in a file."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=Path(place, f"meeting-{only}").as_uri(), rank=rank, world_size=PROCESSES
    )
    mesh = init_device_mesh("cpu", (PROCESSES,))
    rows = megabytes * 250_000 // (16 * 1024)
    tensors = {f"layer.{i}": distribute_tensor(torch.randn(rows, 1024), mesh, [Shard(0)]) for i in range(16)}
    found: list[tuple[str, list[float]]] = []
    for turn in range(rounds + 1):
        for name, work in zip(VARIANTS, (with_dcp, with_shards), strict=True):
            if only not in (None, name):
                continue
            folder = Path(place) / name
            if rank == 0:
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()
            dist.barrier()
            began = time.perf_counter()
            if only is None:
                work(tensors, folder, rank)
                value = 0.0
            else:
                value = peak_growth(lambda work=work, folder=folder: work(tensors, folder, rank))
            dist.barrier()
            figures = torch.tensor([time.perf_counter() - began, value], dtype=torch.float64)
            dist.all_reduce(figures, dist.ReduceOp.MAX)
            if turn or only is not None:  # the first round of the times warms up
                found.append((name, figures.tolist()))
    if rank == 0:
        torch.save(found, Path(place) / f"figures-{only}")
    dist.destroy_process_group()


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--megabytes", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    figures: dict[str | None, list[tuple[str, list[float]]]] = {}
    with tempfile.TemporaryDirectory() as place:
        for only in (None, *VARIANTS):
            rounds = options.rounds if only is None else 1
            mp.spawn(measure, (place, options.megabytes, rounds, only), nprocs=PROCESSES)
            figures[only] = torch.load(Path(place) / f"figures-{only}")
    times = {name: [one[0] for variant, one in figures[None] if variant == name] for name in VARIANTS}
    ratios = [mine / theirs for mine, theirs in zip(times[VARIANTS[1]], times[VARIANTS[0]], strict=True)]
    rows = []
    for name in VARIANTS:
        relative = "1" if name == VARIANTS[0] else f"{statistics.median(ratios):.2f}"
        spread = "" if name == VARIANTS[0] else f" [{min(ratios):.2f}, {max(ratios):.2f}]"
        memory = max(one[1] for _, one in figures[name])
        rows.append([name, f"{statistics.median(times[name]):.2f}", relative + spread, f"{memory / 1e6:.0f}"])
    print(f"{options.megabytes} MB on {PROCESSES} processes, {options.rounds} rounds in turns\n")
    print("\n".join(table(["variant", "seconds", "x dcp.save [min, max]", "MB of memory"], rows, (1, 2, 3))))


if __name__ == "__main__":
    main()
