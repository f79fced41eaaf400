"""Prints how far every backend is from the native trainer, and from a straight run after moving to another backend.

The runs are those of tests/distributed, which hold the same figures to their bounds.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "distributed")]

import backends as on  # noqa: E402

QUICK = ("native", "accelerate", "hf", "ddp", "fsdp", "hf2")


def parity_rows(backends: tuple[str, ...], folder: Path) -> list[list[str]]:
    """Return a row for each backend: its largest differences from the native trainer in the same type of numbers."""
    results: dict[str, Any] = {}
    for masked in (False, True):
        results |= on.launch_all(on.parity_jobs(backends, masked), folder / f"parity-{masked}")
    rows = []
    for backend in backends:
        dtype = on.dtype_of(backend)
        largest: dict[str, float] = {}
        for masked in (False, True):
            name = f"{dtype}-{masked}"
            apart = on.parity(results[f"{backend}-{name}"], results[f"native-{name}"][0])
            largest = {key: max(value, largest.get(key, 0.0)) for key, value in apart.items()}
        figures = [f"{value:.0e}" if value else "0" for value in largest.values()]
        rows.append([f"{backend} x {on.PROCESSES[backend]}", dtype, *figures, f"{on.bound(backend):.0e}"])
    return [["backend", "type", *largest, "bound"], *rows]


def resume_rows(backends: tuple[str, ...], folder: Path) -> list[list[str]]:
    """Return a row for each backend that saves: the largest difference of any kind for each that goes on from there."""
    results = on.resume(folder, backends)
    rows = [["saved on", *backends]]
    for source in backends:
        cells = [max(on.compare_resumed(results, source, target).values()) for target in backends]
        rows.append([source, *(f"{cell:.0e}" if cell else "0" for cell in cells)])
    return rows


def show(rows: list[list[str]]) -> None:
    """Print a table in Markdown."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for number, row in enumerate(rows):
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print(f"| {' | '.join(cells)} |")
        if not number:
            print("|" + "|".join("-" * (width + 2) for width in widths) + "|")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help=f"only {', '.join(QUICK)}")
    backends = QUICK if parser.parse_args().quick else on.BACKENDS
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as scratch:
        print("Largest difference from the native trainer, over all steps\n")
        show(parity_rows(backends, Path(scratch)))
        print("\nSaved at step 5 of 12, resumed on another backend (columns): largest difference from the straight")
        print("native run in loss, learning rate, gradient norm, metrics and history, weights or moments\n")
        show(resume_rows(backends, Path(scratch) / "resume"))
    print(f"\nThe samples of every step, the best step and the history's rows were the same in every cell; "
          f"{time.perf_counter() - start:.0f} s.")  # fmt: skip


if __name__ == "__main__":
    main()
