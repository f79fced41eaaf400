"""Markdown of what was measured. Knows no torch, so that a report can be written where there is none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["show_throughput", "table"]


def table(head: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[int] = ()) -> list[str]:
    """Return the lines of a Markdown table.

    Args:
        head: The names of the columns.
        rows: The cells.
        numbers: The columns that are set to the right.
    """

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"

    marks = ["---:" if column in numbers else "---" for column in range(len(head))]
    return [line(head), line(marks), *map(line, rows)]


def _spread(values: Sequence[float] | None) -> str:
    """Return [median, least, greatest] as text."""
    return "" if values is None else f"{values[0]:.3f} [{values[1]:.2f}, {values[2]:.2f}]"


def show_throughput(results: Mapping[str, Any]) -> list[str]:
    """Return the lines that say what `throughput.py` found."""
    work = results["work"]
    lines = [
        f"{work['model']}: {work['parameters'] / 1e6:.3g} million parameters, {work['length']} tokens x batch of "
        f"{work['batch_size']}, {work['precision']}{', compiled' if work['compiled'] else ''}, on {work['device']}. "
        f"{work['steps'] - work['warm_up']} steps measured after {work['warm_up']} to warm up, "
        f"{results['rounds']} rounds in turns. {work['mfu']}",
        "",
    ]
    rows = []
    for row in results["rows"]:
        if row["status"] != "measured":
            rows.append([row["variant"], f"{row['status']}: {row['reason']}", "", "", "", "", ""])
            continue
        mfu, memory, loss = row["mfu"], row["peak_memory"], row["losses"][-1]
        rows.append(
            [
                row["variant"],
                f"{row['tokens_per_second']:,.0f}",
                "unknown device" if mfu is None else f"{100 * mfu:.1f} %",
                "not counted" if memory is None else f"{memory / 2**30:.2f} GiB",
                _spread(row["to_hand"]),
                _spread(row["to_stock"]),
                f"{loss:.4f}",
            ]
        )
    ratios = ["x hand-written [min, max]", "x transformers [min, max]"]
    head = ["variant", "tokens/s", "MFU", "peak memory", *ratios, "last loss"]
    return lines + table(head, rows, (1, 2, 3, 4, 5, 6))
