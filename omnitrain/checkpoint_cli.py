"""The `omnitrain checkpoint` command: lists, verifies, shows, exports and compares the checkpoints of a run.

Only reading and telling belong here. Which words may be typed is in `cli.py`, what a checkpoint is, in `checkpoint/`.
torch is loaded by `diff` alone, which computes with the weights. A terminal gets tables, all else plain columns.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import sys
from collections.abc import Collection, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omnitrain.checkpoint.header import read_header
from omnitrain.checkpoint.schema import validate
from omnitrain.checkpoint.store import MANIFEST, Store, is_pointer
from omnitrain.errors import CheckpointError, ConfigError
from omnitrain.progress import Progress

if TYPE_CHECKING:
    import torch

__all__ = ["diff", "export", "ls", "show", "verify"]

WEIGHTS = "model.safetensors"  # as in checkpoint/state.py, which would load torch
CONFIGS = ("config.json", "generation_config.json")
ADAPTERS = ("adapter_config.json", "adapter_model.safetensors")
MOST_ROWS = 10
"""How many tensors `diff` names: those that differ most."""

_FOLDER = re.compile(r"checkpoint-([0-9]+)(\.old)?")


def ls(path: Path) -> None:
    """Print one row per checkpoint: where in the run it was saved, its score, and whether all of it is there.

    Args:
        path: A run folder or a checkpoint. Sizes are compared, contents are not: that is `verify`'s.
    """
    store, folders = _checkpoints(path)
    marks = _marks(store)
    rows, problems, metric = [], [], ""
    for folder in folders:
        name = _FOLDER.fullmatch(folder.name)
        step, epoch, score, date, state = str(int(name[1])) if name else "", "", "", _date(folder), "complete"
        try:
            content = store.verify(folder, hashes=False, accept=_check)
        except CheckpointError as error:
            state = "damaged"
            problems.append(str(error))
        else:
            step, epoch, score = str(content["step"]), _epochs(content), _number(content["score"])
            date, metric = _date(folder, content), _metric(content) or metric
        rows.append([folder.name, step, epoch, score, marks.get(folder.name, ""), _size(folder), date, state])
    _print_table("checkpoint >step >epoch >score ~mark >size ~saved state", rows)
    for line in ([f"\nscore: {metric}"] if metric else []) + problems:
        _print(line)


def verify(path: Path) -> int:
    """Read every file of one checkpoint, or of all of a run, and compare it with its hash.

    Returns:
        The exit code: 1 if anything is missing or damaged, which is named; else 0.
    """
    store, folders = _checkpoints(path)
    damaged = 0
    for folder in folders:
        try:
            content = store.verify(folder, accept=_check)
        except CheckpointError as error:
            damaged += 1
            _print(f"damaged   {error}")
        else:
            _print(f"complete  {folder}: {len(content['files']) + 1} files, {_size(folder)}")
    _print(f"{len(folders) - damaged} of {len(folders)} complete.")
    return 1 if damaged else 0


def show(path: Path) -> None:
    """Print what a checkpoint says of the run, and the tensors in it."""
    folder, content = _one_checkpoint(path)
    _print(f"{folder}: {_size(folder)}, saved {_date(folder, content)}, format version {content['format_version']}")
    if content.get("frozen"):
        _print(f"without the {len(content['frozen'])} tensors that did not train, whose hashes it has")
    for title in ("progress", "objective", "settings", "versions"):
        entries = content.get(title, {})
        if title == "versions" and "world_size" in content:
            entries = {**entries, "world_size": content["world_size"]}
        _print_title(title)
        _print_table("name ~value", [[name, _say(value)] for name, value in entries.items()])
    for file in content["files"]:
        if file.endswith(".safetensors"):
            rows = list(_tensors(folder / file))
            _print_title(f"{file}: {len(rows)} tensors")
            _print_table("~tensor dtype shape", rows)


def export(path: Path, out: Path, merge: Path | bool = False, adapter: str | None = None) -> None:
    """Write the weights of a checkpoint, and what opens them, as a folder of their own.

    `from_pretrained` of transformers opens the folder if the model is one of theirs, that of PEFT if it has adapters.

    Args:
        path: A checkpoint, or the run whose last one is meant.
        out: A new folder.
        merge: The folder of the base that adapters, or weights that trained beside frozen ones, are to become one model
            with; True if the checkpoint has it.
        adapter: Which of several adapters is merged; None if there is one.

    Raises:
        CheckpointError: The checkpoint is damaged, or its weights are not in one file, or are of another base.
        ConfigError: `out` is there already and is not an empty folder, or there is nothing to merge, or too little.
    """
    folder, content = _one_checkpoint(path)
    if WEIGHTS not in content["files"]:
        raise CheckpointError(f"{str(folder)!r} has no {WEIGHTS!r} to export, only {', '.join(content['files'])}.")
    if out.is_symlink() or (out.exists() and not (out.is_dir() and not any(out.iterdir()))):
        raise ConfigError(f"{str(out)!r} already exists and is not overwritten. Give the path of a new folder.")
    if adapter is not None and not merge:
        raise ConfigError("--adapter says which adapter is merged. Pass --merge, or leave it out: all are exported.")
    if merge:
        from omnitrain.checkpoint.merging import write_merged

        with _undone(out):
            done = write_merged(folder, content, None if merge is True else Path(merge), adapter, out)
        _print(f"{out}: {done}, from {folder.name}")
        return
    names = [name for name in content["files"] if Path(name).name in ADAPTERS]
    is_old = not names and any(name.startswith("base_model.model.") for name in read_header(folder / WEIGHTS))
    if content.get("frozen") and not names:
        raise ConfigError(
            f"{str(folder)!r} was saved without the {len(content['frozen'])} tensors that did not train. Pass the "
            "folder of the weights that the run began with: --merge BASE."
        )
    if not names:
        names = [WEIGHTS, *(name for name in CONFIGS if name in content["files"] and not is_old)]
    with _undone(out):
        for name in reversed(names):  # the weights last: a folder with weights in it is complete
            (out / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(folder / name, out / f"{name}.tmp")
            os.replace(out / f"{name}.tmp", out / name)
    _print(f"{out}: {', '.join(names)} of {folder.name}")
    lost = _outside_of_adapters(folder, content) if WEIGHTS not in names else []
    if lost:
        _print(
            f"{len(lost)} tensors of the checkpoint are none of the adapters', and are not in it: {', '.join(lost[:3])}"
            f"{', ...' if lost[3:] else ''}. --merge BASE makes a model with them."
        )
    if is_old:
        _print("The weights have the names that PEFT gives them inside: load them into a model with the same adapters.")
    elif names == [WEIGHTS]:
        _print("The model had no config, so there is none. safetensors.torch.load_file reads the weights.")


def _outside_of_adapters(folder: Path, content: Mapping[str, Any]) -> list[str]:
    """Return the names of the tensors that trained, or are buffers, and that no file of an adapter holds."""
    if not content.get("frozen"):  # it has the whole base as well
        return []
    lost = {name for name in read_header(folder / WEIGHTS) if ".original_module." not in name}
    for file in content["files"]:
        if Path(file).name == ADAPTERS[1]:
            held = {name.removeprefix("base_model.model.") for name in read_header(folder / file)}
            mark = f".{Path(file).parent.as_posix()}." if "/" in file else ".default."
            lost -= {
                name for name in lost
                if mark in f".{name}."
                or name.replace(".modules_to_save", "").replace(mark, ".").removeprefix("base_model.model.") in held
            }  # fmt: skip
    return sorted(lost)


@contextlib.contextmanager
def _undone(out: Path) -> Iterator[None]:
    """Make a folder, and leave nothing in it if what is done inside fails."""
    out.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(exist_ok=True)
        raise


def diff(a: Path, b: Path) -> None:
    """Print the settings in which two checkpoints differ, and the tensors of the model that differ most."""
    (folder_a, content_a), (folder_b, content_b) = _one_checkpoint(a), _one_checkpoint(b)
    rows = [
        [label, str(folder), str(content["step"]), _epochs(content), _number(content["score"])]
        for label, folder, content in (("A", folder_a, content_a), ("B", folder_b, content_b))
    ]
    _print_table("side ~checkpoint >step >epoch >score", rows)
    flat_a, flat_b = _comparable(content_a), _comparable(content_b)
    names = [name for name in {**flat_a, **flat_b} if flat_a.get(name, _ABSENT) != flat_b.get(name, _ABSENT)]
    _print_title(f"{len(names)} settings differ")
    if names:
        sides = ([_say(flat.get(name, _ABSENT)) for flat in (flat_a, flat_b)] for name in names)
        _print_table("~setting ~A ~B", [[name, *side] for name, side in zip(names, sides, strict=True)])
    frozen_a, frozen_b = (content.get("frozen") or {} for content in (content_a, content_b))
    _print_weight_differences(folder_a / WEIGHTS, folder_b / WEIGHTS, frozen_a, frozen_b)
    _print_frozen_differences(folder_a / WEIGHTS, folder_b / WEIGHTS, frozen_a, frozen_b)


# --- weights


def _print_frozen_differences(a: Path, b: Path, hashes_a: Mapping[str, str], hashes_b: Mapping[str, str]) -> None:
    """Say in how many of the tensors that one of two checkpoints has left out they differ."""
    from safetensors import safe_open

    from omnitrain.checkpoint.tensors import fingerprints
    from omnitrain.distributed import Ranks

    wanted = hashes_a.keys() | hashes_b.keys()
    if not wanted:
        return
    found: list[dict[str, str]] = []
    for path, hashes in ((a, hashes_a), (b, hashes_b)):
        with safe_open(path, "pt") as held:
            rest = {name: held.get_tensor(name) for name in wanted.intersection(held.keys())}
        found.append({**hashes, **fingerprints(rest, Ranks())})
    both = sorted(found[0].keys() & found[1].keys())
    others = [name for name in both if found[0][name] != found[1][name]]
    _print_title(f"{len(others)} of {len(both)} tensors that did not train differ")
    if others:
        _print(f"{', '.join(others[:MOST_ROWS])}{', ...' if len(others) > MOST_ROWS else ''}")


def _print_weight_differences(
    a: Path, b: Path, left_out_a: Collection[str] = (), left_out_b: Collection[str] = ()
) -> None:
    from safetensors import safe_open

    with safe_open(a, "pt") as in_a, safe_open(b, "pt") as in_b:
        names_a, names_b = set(in_a.keys()), set(in_b.keys())
        both = sorted(names_a & names_b)
        shapes = {name: (in_a.get_slice(name).get_shape(), in_b.get_slice(name).get_shape()) for name in both}
        fitting = [name for name in both if shapes[name][0] == shapes[name][1]]
        found = [(_largest_difference(in_a.get_tensor(name), in_b.get_tensor(name)), name) for name in fitting]
    differing = sorted((pair for pair in found if pair[0] != 0), key=_by_difference)
    _print_title(f"{len(differing)} of {len(fitting)} tensors differ")
    if differing:
        rows = [[name, str(shapes[name][0]), _number(value)] for value, name in differing[:MOST_ROWS]]
        _print_table("~tensor shape >difference", rows)
    if len(differing) > MOST_ROWS:
        _print(f"and {len(differing) - MOST_ROWS} more that differ less")
    for name in both:
        if name not in fitting:
            _print(f"{name}: shape {shapes[name][0]} in A, {shapes[name][1]} in B")
    for label, only in (("A", names_a - names_b - {*left_out_b}), ("B", names_b - names_a - {*left_out_a})):
        if only:
            _print(f"only in {label}: {', '.join(sorted(only))}")


def _by_difference(pair: tuple[float, str]) -> tuple[bool, float, str]:
    """Sort NaN, then the largest, first."""
    value, name = pair
    return value == value, -value, name


def _largest_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the largest absolute difference; NaN and NaN are equal here, and so are two equal infinities."""
    import torch

    if a.dtype == b.dtype and torch.equal(a, b):
        return 0.0
    wide = torch.complex128 if a.is_complex() or b.is_complex() else torch.float64
    a, b = a.to(wide), b.to(wide)
    distance = (a - b).abs()
    distance[(a == b) | (a.isnan() & b.isnan())] = 0
    return float(distance.max()) if distance.numel() else 0.0


def _tensors(path: Path) -> Iterator[list[str]]:
    """Yield name, dtype and shape of each tensor in a file, whose numbers are not read."""
    for name, entry in read_header(path).items():
        yield [name, entry.dtype, str(list(entry.shape))]


# --- finding


def _locate(path: Path) -> tuple[Store, Path | None]:
    """Return the run that a path belongs to, and the folder of the one checkpoint that it is, if it is one.

    Raises:
        ConfigError: It is neither a run nor a checkpoint.
    """
    if path.name in ("", ".."):
        path = path.resolve()  # the name of a folder and that of its run are asked for
    if is_pointer(path) and Store(path.parent).folders():
        return Store(path.parent), Store(path.parent).named(path.name)
    if (path / MANIFEST).is_file():
        return Store(path.parent), path
    if Store(path).folders():
        return Store(path), None
    if _FOLDER.fullmatch(path.name) and path.is_dir():
        return Store(path.parent), path  # nothing but the name says that it was one
    what = "holds no checkpoints" if path.is_dir() else "is no folder" if path.exists() else "does not exist"
    raise ConfigError(
        f"{str(path)!r} {what}. Give a run's `save_dir`, one of the checkpoint folders in it, or its 'last' or 'best'."
    )


def _checkpoints(path: Path) -> tuple[Store, list[Path]]:
    """Return a run and its checkpoints by step, damaged ones included; or the one that `path` is."""
    store, folder = _locate(path)
    return store, [step_folder for _, step_folder in sorted(store.folders().items())] if folder is None else [folder]


def _one_checkpoint(path: Path) -> tuple[Path, dict[str, Any]]:
    """Return the verified checkpoint that `path` is, or the last one of the run that it is."""
    store, folder = _locate(path)
    folder = folder or store.named("last")
    return folder, store.verify(folder, accept=_check)


def _check(folder: Path, content: Mapping[str, Any]) -> None:
    """Refuse what no run can have written; a checkpoint of another program need not have all that a run needs."""
    validate(content, repr(str(folder)), complete=False)
    for name in content["files"]:
        if name.endswith(".safetensors"):
            read_header(folder / name)


def _marks(store: Store) -> dict[str, str]:
    """Return "last", "best" or "last, best" by the name of a folder."""
    marks: dict[str, str] = {}
    for which in ("last", "best"):
        with contextlib.suppress(CheckpointError):  # none was saved as the best, or none is complete
            name = store.named(which).name
            marks[name] = f"{marks[name]}, {which}" if name in marks else which
    return marks


# --- wording

_ABSENT = object()


def _comparable(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings, and what else may explain a difference, by dotted names."""
    parts = {"world_size": content.get("world_size"), "versions": content.get("versions", {})}
    return dict(_flattened({**content.get("settings", {}), **parts}, ""))


def _flattened(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield a nested setting as its plain values, so that a difference is named by what differs."""
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    empty = True
    for key, entry in entries:
        empty = False
        yield from _flattened(entry, f"{name}.{key}" if name else str(key))
    if empty:
        yield name, value


def _say(value: Any) -> str:
    """Return a setting as a person would write it."""
    if value is _ABSENT:
        return "(absent)"
    return value if isinstance(value, str) else json.dumps(value)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"


def _epochs(content: Mapping[str, Any]) -> str:
    return f"{Progress.from_state(content['progress']).epochs:.6g}" if "progress" in content else ""


def _metric(content: Mapping[str, Any]) -> str:
    objective = content.get("objective")
    if not objective:
        return ""
    return f"{objective['metric']}, {'lower' if objective['direction'] == 'min' else 'higher'} is better"


def _size(folder: Path) -> str:
    """Return the size of all files of a checkpoint, in decimal units."""
    size = float(sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()))
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.2f} GB"


def _date(folder: Path, content: Mapping[str, Any] | None = None) -> str:
    """Return when a checkpoint was saved, in local time; if it does not say so, when its last file was written."""
    if content and content.get("saved_at"):
        saved = datetime.fromisoformat(content["saved_at"]).astimezone()
    else:
        manifest = folder / MANIFEST
        saved = datetime.fromtimestamp((manifest if manifest.exists() else folder).stat().st_mtime)
    return saved.replace(tzinfo=None).isoformat(" ", "minutes")


def _escaped(text: str) -> str:
    """Return text that a terminal only shows: what is in a checkpoint may have been written by anyone."""
    return "".join(one if one.isprintable() or one == "\n" else repr(one)[1:-1] for one in text)


def _print(text: str) -> None:
    print(_escaped(text), flush=True)


def _print_title(text: str) -> None:
    _print(f"\n{text}")


def _print_table(columns: str, rows: list[list[str]]) -> None:
    """Print rows as a table on a terminal, and as plain columns of any width elsewhere.

    Args:
        columns: Their names. One with ">" is flush right; one with "~" may be broken into lines to fit a terminal.
        rows: The cells of each.
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table

    plain: dict[str, Any] = {"markup": False, "highlight": False, "emoji": False}  # a name may be "a[0]" or ":b:"
    # asked before rich is, which takes FORCE_COLOR, as CI systems and notebooks set it, for a terminal
    if sys.stdout.isatty():
        console = Console(**plain)
        console.width = max(console.width, 80)  # a narrower one breaks the lines by itself; rich would cut them
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    else:
        console = Console(**plain, width=100_000, force_terminal=False)
        table = Table(box=None, padding=(0, 2, 0, 0))
    for column in columns.split():
        kind = column[0]
        justify = "right" if kind == ">" else "left"
        table.add_column(column.lstrip(">~"), justify=justify, no_wrap=kind != "~", overflow="fold")
    for row in rows:
        table.add_row(*(_escaped(cell) or "-" for cell in row))
    with console.capture() as capture:
        console.print(table)
    for line in capture.get().splitlines():
        print(line.rstrip())
