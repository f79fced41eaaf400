"""The figures of the page "Performance": measures them, and draws the picture and the tables of the page from a file.

    python benchmarks/performance.py --measure  # about nine minutes; writes results/performance.json
    python benchmarks/performance.py            # writes the picture and the tables of docs/performance.md

Packages that are not installed are left out; how to install them is in peers/README.md.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from _report import table

HERE = Path(__file__).resolve().parent
RESULTS, GPU = HERE / "results" / "performance.json", HERE / "results" / "h200-2026-11-27.json"
PAGE = HERE.parent / "docs" / "performance.md"
PICTURE = HERE.parent / "docs" / "images" / "performance.svg"
SCRIPTS = (
    ("peers/training.py", "--rounds", "9"),
    ("distributed.py", "--only", "tiny MLP"),
    ("overhead.py", "--only", "construction", "imports", "hf"),
    ("overhead.py", "--only", "watchers", "algorithms", "--rounds", "4"),
)
"""What is measured, one script after the other; the cases of the first one come first in the file."""

Rows = list[dict[str, Any]]


def measure(path: Path) -> None:
    """Run all scripts, and write after each of them what has been measured so far."""
    rows: Rows = []
    about: dict[str, Any] = {}
    for script, *options in SCRIPTS:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder, "out.json")
            command = [sys.executable, str(HERE / script), *options, "--json", str(out)]
            subprocess.run(command, check=True, timeout=1800, stdout=subprocess.DEVNULL)
            figures = json.loads(out.read_text())
        rows += figures.pop("rows")
        about = {**figures, **about}
        path.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n", encoding="utf-8")


def of_case(rows: Rows, *cases: str) -> Rows:
    return [row for row in rows if row["case"] in cases]


def is_ours(row: dict[str, Any]) -> bool:
    return "omnitrain" in row["variant"] or row["variant"] in ("AccelerateTrainer", "HFTrainer", "Trainer")


def ratio(row: dict[str, Any]) -> str:
    """Return the ratio to the reference with the least and greatest of the rounds."""
    median, least, greatest = row["ratio"]
    return f"{median:.2f} [{least:.2f}, {greatest:.2f}]"


def steps(rows: Rows, reference: str) -> list[str]:
    """Return a table of the variants of a training step, ours in bold, from the least to the greatest."""
    rows = sorted(rows, key=lambda row: row["ratio"][0])
    lines = [[f"**{row['variant']}**" if is_ours(row) else row["variant"], ratio(row)] for row in rows]
    return table(["", f"x {reference} [least, greatest]"], lines, (1,))


def features(rows: Rows) -> list[str]:
    """Return a table of what each feature adds to a step, after the noise of the same case."""
    lines = []
    for row in rows:
        if not row["variant"].startswith("no"):
            lines.append([f"`{row['variant']}`" if row["variant"].isidentifier() else row["variant"], added(row)])
        elif "A/A" in row["variant"]:
            lines.append(["nothing (the noise)", added(row)])
    return table(["", "adds to a step, µs [least, greatest]"], lines, (1,))


def added(row: dict[str, Any]) -> str:
    median, least, greatest = row["added"]
    return f"{median:+.0f} [{least:+.0f}, {greatest:+.0f}]"


def gpu() -> list[str]:
    """Return a table of the speeds on a GPU, from the report of `gpu.py`."""
    report = json.loads(GPU.read_text())
    (part,) = (part for part in report["parts"] if part["name"] == "throughput")
    lines = [
        [f"**{row['variant']}**" if is_ours(row) else row["variant"], f"{row['tokens_per_second']:,.0f}",
         "1" if row["to_hand"] is None else f"{row['to_hand'][0]:.3f}"]
        for row in part["found"]["rows"]
    ]  # fmt: skip
    return table(["", "tokens/s", "speed x loop by hand"], lines, (1, 2))


def starts(rows: Rows) -> list[str]:
    """Return a table of the import, the construction and the step of HFTrainer against their references."""
    names = {
        ("imports", "from omnitrain import Trainer"): ("`from omnitrain import Trainer`", "`import torch`"),
        ("imports", "import omnitrain (loads on first use)"): ("`import omnitrain`", "`import torch`"),
        ("construction", "omnitrain.Trainer"): ("`Trainer(...)`, the second one", "model, AdamW, loader"),
        ("hf", "omnitrain.HFTrainer"): ("a step of `HFTrainer`, fused AdamW", "transformers.Trainer"),
    }
    lines = []
    for row in rows:
        if (row["case"], row["variant"]) in names:
            unit = "µs" if row["unit"] == "us/step" else row["unit"]
            lines.append([*names[row["case"], row["variant"]], f"{row['value']:.1f} {unit}", ratio(row)])
    return table(["", "against", "takes", "x [least, greatest]"], lines, (2, 3))


def draw(rows: Rows, path: Path, is_dark: bool) -> None:
    """Draw what a step takes with each variant, in times of the plain loop."""
    from matplotlib import pyplot

    ink, grey = ("#e3e3e6", "#7c7f87") if is_dark else ("#202124", "#b4b8be")
    style = {"svg.hashsalt": "omnitrain", "font.size": 10, "text.color": ink, "axes.labelcolor": ink}
    style |= {"xtick.color": ink, "ytick.color": ink, "axes.edgecolor": grey}
    if is_dark:
        style |= dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), "#131416")
    noise = next(row for row in rows if "A/A" in row["variant"])
    bars = sorted((row for row in rows if row is not noise), key=lambda row: -row["ratio"][0])
    with pyplot.rc_context(style):
        figure, axes = pyplot.subplots(figsize=(7.2, 0.34 * len(bars) + 0.7), layout="constrained")
        values = [row["ratio"][0] for row in bars]
        colors = ["#2f7ed8" if is_ours(row) else grey for row in bars]
        drawn = axes.barh([row["variant"] for row in bars], values, color=colors, height=0.7)
        axes.bar_label(drawn, [f"{value:.2f}" for value in values], padding=3)
        axes.axvspan(*noise["ratio"][1:], color=grey, alpha=0.3, linewidth=0)
        axes.set_xlabel("time of a training step, x plain loop (band: the plain loop against itself)")
        axes.set_xlim(0, 1.1 * max(values))
        axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(path, metadata={"Date": None})
        pyplot.close(figure)


def fill(text: str, name: str, lines: list[str]) -> str:
    """Return the page with other lines between the comments `<!-- name -->` and `<!-- end -->`."""
    pattern = rf"(<!-- {name} -->\n).*?(<!-- end -->)"
    filled, count = re.subn(pattern, lambda match: f"{match[1]}\n{chr(10).join(lines)}\n\n{match[2]}", text, flags=re.S)
    if count != 1:
        raise ValueError(f"{PAGE} has {count} places for {name!r}")
    return filled


def page_of(rows: Rows) -> str:
    """Return the page with the tables of these rows."""
    text = PAGE.read_text(encoding="utf-8")
    for name, lines in {
        "one process": steps(of_case(rows, "peers"), "plain loop"),
        "two processes": steps(of_case(rows, "tiny MLP"), "DDP by hand"),
        "starts": starts(of_case(rows, "imports", "construction", "hf")),
        "gpu": gpu(),
        "features": features(of_case(rows, "watchers", "algorithms", "algorithms, sequences")),
    }.items():
        text = fill(text, name, lines)
    return text


def main() -> None:
    """Measure, or write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--measure", action="store_true", help="measure first, and write the figures to --json")
    parser.add_argument("--json", type=Path, default=RESULTS, metavar="FILE", help="the figures; default %(default)s")
    options = parser.parse_args()
    if options.measure:
        measure(options.json)
        return
    rows = json.loads(options.json.read_text(encoding="utf-8"))["rows"]
    for path, is_dark in ((PICTURE, False), (PICTURE.with_stem(f"{PICTURE.stem}-dark"), True)):
        draw(of_case(rows, "peers")[1:], path, is_dark)  # the first one is 1
    PAGE.write_text(page_of(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
