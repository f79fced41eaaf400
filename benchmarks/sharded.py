"""Sharded checkpoints against `torch.distributed.checkpoint` (DCP) and against a state that is put together whole.

    python benchmarks/sharded.py                             # a model of 1 GB on 1, 2 and 4 processes
    python benchmarks/sharded.py --only times --rounds 3
    python benchmarks/sharded.py --quick                     # does it run? The figures mean little

A model of square matrices (fp32, AdamW) under FSDP 2; on one process it is not sharded. The script starts itself under
torchrun; what is measured is in README.md beside this file.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from _memory import MIB, peak_of, return_freed_memory
from _report import table
from _timing import machine
from accelerate.utils import FullyShardedDataParallelPlugin
from memory_of_start import made
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

from omnitrain import AccelerateTrainer, Callback

LAYERS = 16
WAYS = {"omnitrain": "omnitrain", "dcp": "DCP", "whole": "put together whole"}
"""Who starts, saves and loads."""
SAVES = {"parts": {"consolidate": False}, "consolidated": {"consolidate": True}, "async": {"async_save": True}}
"""Arguments of the trainers whose saves are measured."""


class Pauses(Callback):
    """A callback that times how long training stands still for a save, and then gives it time to be written."""

    def __init__(self, every: int, seconds: float) -> None:
        self.every, self.seconds, self.ended, self.took = every, seconds, 0.0, list[float]()

    def on_step_end(self, trainer: Any) -> None:
        self.ended = time.perf_counter()

    def on_step_start(self, trainer: Any) -> None:
        if self.ended and trainer.progress.step % self.every == 0:
            self.took.append(time.perf_counter() - self.ended)
            time.sleep(self.seconds)


def make_trainer(folder: Path, width: int, model: torch.nn.Module | None = None, **options: Any) -> Any:
    """Return a trainer of the model, under FSDP 2 if there are several processes."""
    if int(os.environ["WORLD_SIZE"]) > 1:
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Linear"]
        )
        options["fsdp_plugin"] = plugin
    x = torch.randn(256, width, generator=torch.Generator().manual_seed(0))  # the same on all ranks
    return AccelerateTrainer(
        made(width, LAYERS) if model is None else model, TensorDataset(x, x), loss_fn=mse_loss, batch_size=1,
        **{"max_steps": 1, "save_dir": folder, "save_steps": 1000, "progress_bar": False, "log_steps": 100} | options,
    )  # fmt: skip


def empty(width: int) -> torch.nn.Module:
    """Return the model on the meta device."""
    with torch.device("meta"):
        return made(width, LAYERS)


def sharded(model: torch.nn.Module) -> torch.nn.Module:
    """Return the model, divided layer by layer if there are several processes."""
    if dist.is_initialized():
        for layer in model.children():
            fully_shard(layer)
        fully_shard(model)
    return model


# --- the start


def start(way: str, weights: Path, width: int) -> Any:
    """Return what is ready for its first step, with the weights of a file."""
    if way == "omnitrain":
        return make_trainer(weights / "unused", width, empty(width), init_from=weights / f"{width}.safetensors")
    if way == "whole":
        model = made(width, LAYERS)
        model.load_state_dict(load_file(weights / f"{width}.safetensors"))
        return sharded(model)
    model = sharded(empty(width)).to_empty(device="cpu")
    state = model.state_dict()
    reader = dcp.HuggingFaceStorageReader(str(weights / f"{width}"))
    dcp.load(state, storage_reader=reader)
    model.load_state_dict(state)
    return model


# --- a save and a load of a trainer's state by others


def state_of(trainer: Any, **options: Any) -> dict[str, Any]:
    model, optimizer = get_state_dict(trainer.model, trainer.optimizer, options=StateDictOptions(**options))
    return {"model": model, "optimizer": optimizer}


def save_with_dcp(trainer: Any, folder: Path) -> None:
    dcp.save(state_of(trainer), checkpoint_id=folder)


def load_with_dcp(trainer: Any, folder: Path) -> None:
    state = state_of(trainer)
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(
        trainer.model, trainer.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )


def save_whole(trainer: Any, folder: Path) -> None:
    state = state_of(trainer, full_state_dict=True, cpu_offload=True)
    if trainer.is_main_process:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "state.pt").open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())


def load_whole(trainer: Any, folder: Path) -> None:
    state: dict[str, Any] = {"model": {}, "optimizer": {}}
    if trainer.is_main_process:
        state = torch.load(folder / "state.pt", weights_only=True)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=dist.is_initialized())
    set_model_state_dict(trainer.model, state["model"], options=options)
    set_optimizer_state_dict(trainer.model, trainer.optimizer, state["optimizer"], options=options)


def work_of(way: str, trainer: Any, folder: Path) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Return what saves and what loads."""
    if way == "omnitrain":
        return trainer.save_checkpoint, lambda: trainer.load_checkpoint("last")
    save, load = {"dcp": (save_with_dcp, load_with_dcp), "whole": (save_whole, load_whole)}[way]
    return lambda: save(trainer, folder), lambda: load(trainer, folder)


# --- what a process of a launch measures


def barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def cleared(folder: Path, rank: int) -> Path:
    barrier()
    if rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
    barrier()
    return folder


def memory(width: int, folder: Path, rank: int) -> dict[str, int]:
    """Return by how many bytes this process grew at most, by phase and way.

    Everything is done with a small model first, which brings in the code that it takes.
    """
    peaks: dict[str, int] = {}
    for size in (64, width):
        for way in WAYS:
            peaks[f"start {way}"] = peak_of(lambda size=size, way=way: start(way, folder, size))[0]
        for way in (*SAVES, "dcp", "whole"):
            trainer = make_trainer(cleared(folder / "run", rank), size, **SAVES.get(way, {}))
            trainer.train()
            if way == "async":  # staged in a step of the run, whose end waits until it is written
                peaks["save async"] = peak_of(lambda trainer=trainer: trainer.train(more="1ba"))[0]
                continue
            save, load = work_of(way if way in WAYS else "omnitrain", trainer, cleared(folder / "theirs", rank))
            peaks[f"save {way}"] = peak_of(save)[0]
            barrier()
            peaks[f"load {way}"] = peak_of(load)[0]
            del trainer, save, load
    return peaks


def times(rounds: int, width: int, folder: Path, rank: int) -> dict[str, list[float]]:
    """Return the seconds of a save and of a load by each way, until all ranks have ended, in turns on one state."""
    trainer = make_trainer(folder / "run", width, consolidate=False, save_total_limit=None)
    trainer.train()
    seconds: dict[str, list[float]] = {}
    for turn in range(rounds + 1):
        for way in WAYS:
            save, load = work_of(way, trainer, folder / "theirs")
            cleared(folder / "theirs", rank)
            if way == "omnitrain":  # nobody deletes an earlier checkpoint while the time is taken
                cleared(folder / "run" / f"checkpoint-{trainer.progress.step}", rank)
            os.sync()
            for phase, work in (("save", save), ("load", load)):
                barrier()
                began = time.perf_counter()
                work()
                barrier()
                if turn:  # the first round warms up
                    seconds.setdefault(f"{phase} {way}", []).append(time.perf_counter() - began)
    return seconds


def stalls(kind: str, pause: float, width: int, folder: Path, rank: int) -> dict[str, list[float]]:
    """Return the seconds that training stood still for each of the saves of a run."""
    watch = Pauses(2, pause)
    options = {"consolidate": False, "save_total_limit": 1} | ({"async_save": True} if kind == "async" else {})
    trainer = make_trainer(
        cleared(folder / "run", rank), width, max_steps=7, save_steps=2, callbacks=[watch], **options
    )
    trainer.train()
    return {"stalls": watch.took}


# --- launches


def launch(processes: int, folder: Path, words: Sequence[str]) -> list[dict[str, Any]]:
    """Return what each rank of a launch has found."""
    shutil.rmtree(folder / "found", ignore_errors=True)
    (folder / "found").mkdir()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true"}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command = [*launcher, str(Path(__file__).resolve()), "--worker", str(folder), *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr[-4000:])
    for name in ("run", "theirs", "unused"):
        shutil.rmtree(folder / name, ignore_errors=True)
    return [json.loads((folder / "found" / f"{rank}.json").read_text()) for rank in range(processes)]


def worker(folder: Path, task: str, width: int, number: float) -> None:
    """Measure in a process of a launch."""
    warnings.simplefilter("ignore")
    return_freed_memory()
    torch.set_num_threads(1)
    rank, several = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]) > 1
    if several:
        dist.init_process_group("gloo")
    measured: dict[str, Any]
    if task == "memory":
        measured = memory(width, folder, rank)
    elif task == "times":
        measured = times(int(number), width, folder, rank)
    else:
        measured = stalls(task, number, width, folder, rank)
    (folder / "found" / f"{rank}.json").write_text(json.dumps(measured))
    if several:
        dist.destroy_process_group()


def measure_memory(folder: Path, width: int, processes: Sequence[int]) -> list[dict[str, Any]]:
    """Return rows of the greatest growth of a process, by phase, way and number of processes."""
    rows: list[dict[str, Any]] = []
    for count in processes:
        ranks = launch(count, folder, ["memory", str(width), "0"])
        for name in ranks[0]:
            phase, _, way = name.partition(" ")
            rows.append({"phase": phase, "way": way, "processes": count, "bytes": [peaks[name] for peaks in ranks]})
    return rows


NAMES = {
    "parts": "omnitrain, in parts",
    "consolidated": "omnitrain, weights put together (`consolidate=True`)",
    "async": "omnitrain, a step and its save with `async_save=True`",
} | WAYS  # fmt: skip


def show_memory(rows: Sequence[dict[str, Any]], processes: Sequence[int]) -> list[str]:
    """Return a table of the peaks."""
    by = {(row["phase"], row["way"], row["processes"]): max(row["bytes"]) for row in rows}
    cells = [
        [phase, NAMES[way], *(f"{by[phase, way, count] / MIB:,.0f}" for count in processes)]
        for phase, way in dict.fromkeys((row["phase"], row["way"]) for row in rows)
    ]
    cells.sort(key=lambda row: ["start", "save", "load"].index(row[0]))
    head = ["MiB", "", *(f"{count} process{'es' * (count > 1)}" for count in processes)]
    return table(head, cells, range(2, 2 + len(processes)))


def show_times(times_by_name: dict[str, list[float]]) -> list[str]:
    """Return a table of seconds, and of ratios to DCP within a round."""
    rows = []
    for name, seconds in times_by_name.items():
        phase, _, way = name.partition(" ")
        ratios = [mine / theirs for mine, theirs in zip(seconds, times_by_name[f"{phase} dcp"], strict=True)]
        ratio = "1" if way == "dcp" else f"{statistics.median(ratios):.2f} [{min(ratios):.2f}, {max(ratios):.2f}]"
        rows.append([phase, WAYS[way], f"{statistics.median(seconds):.2f}", ratio])
    rows.sort(key=lambda row: row[0], reverse=True)
    return table(["", "", "seconds", "x DCP [min, max]"], rows, (2, 3))


def measure_stalls(folder: Path, width: int, rounds: int, pause: float) -> dict[str, list[list[float]]]:
    """Return the stalls of the saves of each run, the longest of all ranks; runs in turns."""
    stalls_by_kind: dict[str, list[list[float]]] = {"sync": [], "async": []}
    for _ in range(rounds):
        for kind in stalls_by_kind:
            ranks = launch(2, folder, [kind, str(width), str(pause if kind == "async" else 0.0)])
            stalls_by_kind[kind].append(
                [max(pauses) for pauses in zip(*(rank["stalls"] for rank in ranks), strict=True)]
            )
    return stalls_by_kind


def show_stalls(stalls_by_kind: dict[str, list[list[float]]]) -> list[str]:
    """Return a table of how long training stands still for a save."""
    rows = []
    for title, pick in (("first save of a run", slice(0, 1)), ("later ones", slice(1, None))):
        sync, behind = ([statistics.median(run[pick]) for run in stalls_by_kind[kind]] for kind in ("sync", "async"))
        shares = [100 * mine / whole for mine, whole in zip(behind, sync, strict=True)]
        share = f"{statistics.median(shares):.1f} % [{min(shares):.1f}, {max(shares):.1f}]"
        rows.append([title, f"{statistics.median(sync):.2f} s", f"{statistics.median(behind):.2f} s", share])
    return table(["", "synchronous", "`async_save=True`", "share [min, max]"], rows, (1, 2, 3))


def main() -> None:
    """Measure, and print tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--only", nargs="+", choices=("memory", "times", "stalls"), default=["memory", "times", "stalls"]
    )
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    width, rounds = (256, 2) if options.quick else (4096, options.rounds)
    results: dict[str, Any] = {**machine(), "megabytes": LAYERS * width**2 * 4 / 1e6}
    print(f"A model of {LAYERS * width**2 * 4 / MIB:,.0f} MiB, whose largest tensor has {width**2 * 4 / MIB:,.0f} MiB.")
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        for size in (64, width):  # as one file, and in a folder of its own for DCP
            (folder / str(size)).mkdir()
            save_file(made(size, LAYERS).state_dict(), folder / f"{size}.safetensors", metadata={"format": "pt"})
            os.link(folder / f"{size}.safetensors", folder / str(size) / "model.safetensors")
        if "memory" in options.only:
            results["memory"] = measure_memory(folder, width, options.processes)
            print("\n".join(["", *show_memory(results["memory"], options.processes)]))
        if "times" in options.only:
            ranks = launch(2, folder, ["times", str(width), str(rounds)])
            results["times"] = ranks[0]
            print("\n".join(["", *show_times(results["times"])]))
        if "stalls" in options.only:
            results["stalls"] = measure_stalls(folder, width, rounds, 1.0 if options.quick else 12.0)
            print("\n".join(["", *show_stalls(results["stalls"])]))
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]), float(sys.argv[5]))
    else:
        main()
