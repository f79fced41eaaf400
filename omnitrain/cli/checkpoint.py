"""The command `omnitrain checkpoint`.

Only reading and reporting belong here. `main.py` has the command line, `checkpoint/` the checkpoints themselves. Only
code that computes with weights, or joins shards, imports torch. A terminal gets tables, everything else plain columns.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shlex
import shutil
import sys
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box, filesize
from rich.console import Console
from rich.table import Table

from omnitrain.checkpoint.lookup import FOLDER, check_content, find_checkpoints, resolve_checkpoint
from omnitrain.checkpoint.run_record import RUN_FILE, read_starts
from omnitrain.checkpoint.safetensors_header import read_header
from omnitrain.checkpoint.store import MANIFEST
from omnitrain.core.display import flatten
from omnitrain.core.errors import CheckpointError, ConfigError, escape_unprintable, format_list
from omnitrain.core.progress import Progress
from omnitrain.diagnostics.verify import verify_files

if TYPE_CHECKING:
    import torch

    from omnitrain.checkpoint.tensor_files import TensorFile

WEIGHTS = "model.safetensors"  # as in checkpoint/state_dicts.py, which would import torch
CONFIGS = ("config.json", "generation_config.json")
ADAPTERS = ("adapter_config.json", "adapter_model.safetensors")
# How many tensors `diff` lists: those that differ most.
MAX_ROWS = 10

_PART = re.compile(r"model(/rank-\d{5,}(\.\d+)?|-\d{5,}-of-\d{5,})\.safetensors")
_SHARD = re.compile(r"/rank-\d{5,}(\.\d+)?\.safetensors$")


def ls(path: Path) -> None:
    """Print one row per checkpoint of a run. Only sizes are compared; `verify` checks contents."""
    store, folders = find_checkpoints(path)
    pointers: dict[str, list[str]] = {}
    for which in ("last", "best"):
        with contextlib.suppress(CheckpointError):  # no checkpoint was saved as the best, or none is complete
            pointers.setdefault(store.locate(which).name, []).append(which)
    rows, problems, objective = [], [], None
    for folder in folders:
        name, content = FOLDER.fullmatch(folder.name), dict[str, Any]()
        try:
            content = store.verify(folder, hashes=False, accept=check_content)
        except CheckpointError as error:
            problems.append(str(error))
        objective = content.get("objective") or objective
        step = content.get("step", int(name[1]) if name else "")
        rows.append([
            folder.name, str(step), _format_epochs(content), _format_number(content.get("score")),
            ", ".join(pointers.get(folder.name, ())), _format_size(folder), _format_date(folder, content),
            "complete" if content else "damaged",
        ])  # fmt: skip
    _print_table("checkpoint >step >epoch >score ~mark >size ~saved state", rows)
    if objective:
        better = "lower" if objective["direction"] == "min" else "higher"
        _print(f"\nscore: {objective['metric']}, {better} is better")
    for problem in problems:
        _print(problem)


def verify(path: Path) -> int:
    """Compare the files of one checkpoint, or of all of a run, with their hashes; return 1 if any is damaged."""
    checkpoints = verify_files(path)
    for checkpoint in checkpoints:
        for problem in checkpoint.problems:
            _print(f"damaged   {checkpoint.folder}: {problem}")
        if not checkpoint.problems:
            _print(f"complete  {checkpoint.folder}: {checkpoint.files} files, {_format_size(checkpoint.folder)}")
    damaged = sum(bool(checkpoint.problems) for checkpoint in checkpoints)
    _print(f"{len(checkpoints) - damaged} of {len(checkpoints)} complete.")
    return 1 if damaged else 0


def show(path: Path, as_json: bool = False) -> None:
    """Print a checkpoint's information about the run, and its tensors; as JSON with the tensors of each file."""
    folder, content = resolve_checkpoint(path)
    frozen, tensors = content.get("frozen") or {}, _read_tensors(folder, content)
    sections = {title: content.get(title) or {} for title in ("progress", "objective", "settings")}
    world_size = {name: content[name] for name in ("world_size",) if name in content}
    sections["versions"] = {**content.get("versions", {}), **world_size}
    sections["record"] = content.get("record") or {}
    if as_json:
        shown = {"path": str(folder), "bytes": _count_bytes(folder), "saved": _format_date(folder, content)}
        shown |= {name: content.get(name) for name in ("format_version", "step", "score")}
        specs = {
            part: {name: {"dtype": dtype, "shape": shape} for name, (dtype, shape) in entries.items()}
            for part, (entries, _) in tensors.items()
        }
        print(json.dumps({**shown, **sections, "frozen": [*frozen], "tensors": specs}, indent=2), flush=True)
        return
    version = f"format version {content['format_version']}"
    _print(f"{folder}: {_format_size(folder)}, saved {_format_date(folder, content)}, {version}")
    if frozen:
        _print(f"without the {len(frozen)} tensors that did not train, whose hashes it has")
    for title, entries in sections.items():
        _print_section(*(("what ran", flatten(entries)) if title == "record" else (title, entries)))
    for part, (entries, files) in tensors.items():
        rows = [[name, dtype, str(shape)] for name, (dtype, shape) in entries.items()]
        _print(f"\n{part}: {len(rows)} tensors{f' in {files} files' if files > 1 else ''}")
        _print_table("~tensor dtype shape", rows)


def _read_tensors(folder: Path, content: Mapping[str, Any]) -> dict[str, tuple[dict[str, tuple[str, list[int]]], int]]:
    """Return the dtype and shape of each tensor by file or group of shards, and how many files are in the group."""
    parts: dict[str, list[Path]] = {}
    for file in content["files"]:
        if file.endswith(".safetensors"):
            parts.setdefault(_SHARD.sub("", file), []).append(folder / file)
    tensors_of: dict[str, tuple[dict[str, tuple[str, list[int]]], int]] = {}
    for part, files in parts.items():
        tensors: dict[str, tuple[str, list[int]]] = {}
        for path in files:  # whose blocks may be parts of tensors
            for name, entry in read_header(path).entries.items():
                ends = [begin + size for begin, size in zip(entry.corner, entry.shape, strict=True)]
                known = tensors[name][1] if name in tensors else ends
                tensors[name] = entry.dtype, list(entry.full_shape or map(max, zip(known, ends, strict=False)))
        tensors_of[part] = tensors, len(files)
    return tensors_of


def record(path: Path) -> None:
    """Print the starts of a run, everything known of the last one, and its changes from the one before."""
    starts = read_starts(path / RUN_FILE) or _read_record(path)
    rows = []
    for number, start in enumerate(starts, 1):
        hosts, git = start.get("hosts") or {}, start.get("git")
        devices = Counter(device for devices in hosts.values() for device in devices)
        rows.append([
            str(number), _format_time(start.get("started_at"), "seconds"), str(start.get("step", "")),
            start.get("resumed_from") or "", ", ".join(map(str, hosts)), str(start.get("processes", "")),
            ", ".join(f"{count} x {name}" for name, count in devices.items()),
            f"{git['commit'][:10]}{'' if git.get('clean') else ', changed'}" if git else "",
        ])  # fmt: skip
    _print_table(">start ~began >step ~resumed_from ~host >processes ~devices ~commit", rows)
    last = {**starts[-1], "command": shlex.join(starts[-1].get("command", []))}
    sections = {title: last.pop(title, {}) for title in ("settings", "data", "code")}
    for title, entries in {f"start {len(starts)}": last, **sections}.items():
        _print_section(title, flatten(entries))
    if len(starts) > 1:
        before, after = (
            flatten({name: value for name, value in start.items() if name not in _PER_START}) for start in starts[-2:]
        )
        _print_changes(f"changes since start {len(starts) - 1}", "~name ~before ~now", before, after)


# Entries that differ between any two starts.
_PER_START = ("started_at", "step", "resumed_from")


def _read_record(path: Path) -> list[dict[str, Any]]:
    try:
        folder, content = resolve_checkpoint(path)
    except ConfigError:
        problem = f"has no {RUN_FILE!r} and no checkpoints" if path.is_dir() else "is no folder of a run"
        raise ConfigError(
            f"{str(path)!r} {problem if path.exists() else 'does not exist'}. Give a run's `save_dir`."
        ) from None
    if not content.get("record"):
        raise ConfigError(
            f"{str(folder)!r} has no record of its run. `omnitrain checkpoint show` prints its settings and versions."
        )
    return [content["record"]]


def export(path: Path, out: Path, merge: Path | bool = False, adapter: str | None = None) -> None:
    """Write the weights of a checkpoint, with the files to open them, to a new folder.

    `from_pretrained` of transformers opens the folder of a transformers model, that of PEFT if it has adapters. `merge`
    is the folder of a base model, with which adapters are merged and weights joined; True if the checkpoint has the
    base.
    """
    folder, content = resolve_checkpoint(path)
    parts = [WEIGHTS] if WEIGHTS in content["files"] else [name for name in content["files"] if _PART.fullmatch(name)]
    if not parts:
        raise CheckpointError(f"{str(folder)!r} has no {WEIGHTS!r} to export, only {', '.join(content['files'])}.")
    weights = {name for part in parts for name in read_header(folder / part).entries}
    if out.is_symlink() or (out.exists() and not (out.is_dir() and not any(out.iterdir()))):
        raise ConfigError(f"{str(out)!r} already exists and is not overwritten. Give the path of a new folder.")
    if adapter is not None and not merge:
        raise ConfigError("--adapter has no effect without --merge. Pass --merge, or leave it out: all are exported.")
    if merge:
        from omnitrain.checkpoint.merge_adapters import write_merged

        with _clean_on_error(out):
            done = write_merged(folder, content, None if merge is True else Path(merge), adapter, out)
        _print(f"{out}: {done}, from {folder.name}")
        return
    names = [name for name in content["files"] if Path(name).name in ADAPTERS]
    is_old = not names and any(name.startswith("base_model.model.") for name in weights)
    if content.get("frozen") and not names:
        raise ConfigError(
            f"{str(folder)!r} was saved without the {len(content['frozen'])} tensors that did not train. Pass the "
            "folder of the weights that the run began with: --merge BASE."
        )
    if not names:
        names = [WEIGHTS, *(name for name in CONFIGS if name in content["files"] and not is_old)]
    with _clean_on_error(out):
        for name in reversed(names):  # the weights last, so that a folder with weights is complete
            if name == WEIGHTS and name not in content["files"]:
                _consolidate(folder, content, out)
                continue
            (out / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(folder / name, out / f"{name}.tmp")
            os.replace(out / f"{name}.tmp", out / name)
    _print(f"{out}: {', '.join(names)} of {folder.name}")
    missing = _names_outside_adapters(folder, content, weights) if WEIGHTS not in names else []
    if missing:
        _print(
            f"{len(missing)} tensors of the checkpoint belong to no adapter and are left out: {', '.join(missing[:3])}"
            f"{', ...' if missing[3:] else ''}. --merge BASE makes a model with them."
        )
    if is_old:
        _print("The weights have the names that PEFT gives them inside: load them into a model with the same adapters.")
    elif names == [WEIGHTS]:
        _print("The model had no config, so there is none. safetensors.torch.load_file reads the weights.")


def _weights(folder: Path, content: Mapping[str, Any]) -> TensorFile:
    from omnitrain.checkpoint.safetensors_header import find_tensor_files
    from omnitrain.checkpoint.tensor_files import TensorFile

    return TensorFile(find_tensor_files(folder, content["files"], WEIGHTS) or [folder / WEIGHTS])


def _consolidate(folder: Path, content: Mapping[str, Any], out: Path) -> None:
    """Join the weights of a sharded checkpoint; files appear in `out` only once all are written."""
    from omnitrain.checkpoint.sharded_files import write_full_files
    from omnitrain.core.files import FileSystem

    place = out / "weights.tmp"
    place.mkdir()
    for name in write_full_files(_weights(folder, content), place, 0, 1, FileSystem()):  # the index is the last
        os.replace(place / name, out / name)
    place.rmdir()


def _names_outside_adapters(folder: Path, content: Mapping[str, Any], weights: Collection[str]) -> list[str]:
    """Return the names of the trained tensors and buffers that are in no adapter's file."""
    if not content.get("frozen"):  # it has the full base as well
        return []
    outside = {name for name in weights if ".original_module." not in name}
    for file in content["files"]:
        if Path(file).name == ADAPTERS[1]:
            adapted = {name.removeprefix("base_model.model.") for name in read_header(folder / file).entries}
            mark = f".{Path(file).parent.as_posix()}." if "/" in file else ".default."
            outside -= {
                name for name in outside
                if mark in f".{name}."
                or name.replace(".modules_to_save", "").replace(mark, ".").removeprefix("base_model.model.") in adapted
            }  # fmt: skip
    return sorted(outside)


@contextlib.contextmanager
def _clean_on_error(out: Path) -> Iterator[None]:
    """Create a folder, and leave nothing in it if the code inside fails."""
    out.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(exist_ok=True)
        raise


def diff(a: Path, b: Path) -> None:
    """Print the settings in which two checkpoints differ, and the tensors of the model that differ most."""
    places = [resolve_checkpoint(path) for path in (a, b)]
    rows = [
        [label, str(folder), str(content["step"]), _format_epochs(content), _format_number(content["score"])]
        for label, (folder, content) in zip("AB", places, strict=True)
    ]
    _print_table("side ~checkpoint >step >epoch >score", rows)
    flat = [  # the settings, and other possible causes of a difference
        flatten({**content.get("settings", {}), **{name: content.get(name) for name in ("world_size", "versions")}})
        for _, content in places
    ]
    _print_changes("settings differ", "~setting ~A ~B", flat[0], flat[1])
    weights = [_weights(folder, content) for folder, content in places]
    frozen: list[dict[str, str]] = [content.get("frozen") or {} for _, content in places]
    _print_weight_differences(weights[0], weights[1], frozen)
    _print_frozen_differences(weights, frozen)


def _print_changes(title: str, columns: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    names = [name for name in {**before, **after} if before.get(name, _ABSENT) != after.get(name, _ABSENT)]
    _print(f"\n{len(names)} {title}")
    rows = [[name, *(_format_setting(values.get(name, _ABSENT)) for values in (before, after))] for name in names]
    if rows:
        _print_table(columns, rows)


# --- weights


def _print_frozen_differences(weights: Sequence[TensorFile], frozen: Sequence[Mapping[str, str]]) -> None:
    """Print how many of the tensors differ that one of two checkpoints left out."""
    from omnitrain.checkpoint.tensor_files import fingerprints
    from omnitrain.distributed.ranks import Ranks

    names = frozen[0].keys() | frozen[1].keys()
    if not names:
        return
    a, b = (
        {**hashes, **fingerprints({name: tensors[name] for name in names.intersection(tensors)}, Ranks())}
        for tensors, hashes in zip(weights, frozen, strict=True)
    )
    both = sorted(a.keys() & b.keys())
    differing = [name for name in both if a[name] != b[name]]
    _print(f"\n{len(differing)} of {len(both)} tensors that did not train differ")
    if differing:
        _print(format_list(differing))


def _print_weight_differences(a: TensorFile, b: TensorFile, frozen: Sequence[Collection[str]]) -> None:
    both = sorted(set(a) & set(b))
    shapes = {name: [list(side.spec_of(name)[0]) for side in (a, b)] for name in both}
    fitting = [name for name in both if shapes[name][0] == shapes[name][1]]
    differences = {name: _largest_difference(a[name], b[name]) for name in fitting}
    differing = sorted(
        (name for name, value in differences.items() if value != 0),
        key=lambda name: (not math.isnan(differences[name]), -differences[name], name),  # NaN first, then the largest
    )
    _print(f"\n{len(differing)} of {len(fitting)} tensors differ")
    if differing:
        rows = [[name, str(shapes[name][0]), _format_number(differences[name])] for name in differing[:MAX_ROWS]]
        _print_table("~tensor shape >difference", rows)
    if len(differing) > MAX_ROWS:
        _print(f"and {len(differing) - MAX_ROWS} more that differ less")
    for name in both:
        if name not in fitting:
            _print(f"{name}: shape {shapes[name][0]} in A, {shapes[name][1]} in B")
    for label, only in (("A", set(a) - set(b) - {*frozen[1]}), ("B", set(b) - set(a) - {*frozen[0]})):
        if only:
            _print(f"only in {label}: {', '.join(sorted(only))}")


def _largest_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the largest absolute difference; NaN and NaN are equal here, and so are two equal infinities."""
    import numpy as np
    import torch

    if a.dtype == b.dtype and torch.equal(a, b):
        return 0.0
    if any(tensor.is_floating_point() or tensor.is_complex() for tensor in (a, b)):
        wide = torch.complex128 if a.is_complex() or b.is_complex() else torch.float64
        a, b = a.to(wide), b.to(wide)
        distance = (a - b).abs()
        distance[(a == b) | (a.isnan() & b.isnan())] = 0
        return float(distance.max()) if distance.numel() else 0.0
    # of integers, of which float64 does not have all
    first, second = (array.view(np.uint8) if array.dtype == bool else array for array in (a.numpy(), b.numpy()))
    steps: Any = np.maximum(first, second) - np.minimum(first, second)
    if steps.dtype.kind == "i":
        steps = steps.view(f"u{steps.itemsize}")  # which has the distance of any two
    return float(steps.max(initial=0))


# --- formatting

_ABSENT = object()


def _format_setting(value: Any) -> str:
    if value is _ABSENT:
        return "(absent)"
    return value if isinstance(value, str) else json.dumps(value)


def _format_number(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"


def _format_epochs(content: Mapping[str, Any]) -> str:
    return f"{Progress.from_state(content['progress']).epochs:.6g}" if "progress" in content else ""


def _count_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def _format_size(folder: Path) -> str:
    return filesize.decimal(_count_bytes(folder))


def _format_date(folder: Path, content: Mapping[str, Any]) -> str:
    """Return when a checkpoint was saved; if unknown, when its last file was written."""
    manifest = folder / MANIFEST
    written = datetime.fromtimestamp((manifest if manifest.exists() else folder).stat().st_mtime)
    return _format_time(content.get("saved_at")) or written.isoformat(" ", "minutes")


def _format_time(text: Any, timespec: str = "minutes") -> str:
    try:
        return datetime.fromisoformat(text).astimezone().replace(tzinfo=None).isoformat(" ", timespec)
    except (TypeError, ValueError):
        return ""


def _print(text: str) -> None:
    print(escape_unprintable(text), flush=True)  # as a checkpoint can be from anyone


def _print_section(title: str, entries: Mapping[str, Any] | None) -> None:
    """Print names and values under a title, if there are any."""
    if entries:
        _print(f"\n{title}")
        _print_table("name ~value", [[name, _format_setting(value)] for name, value in entries.items()])


def _print_table(columns: str, rows: list[list[str]]) -> None:
    """Print rows as a table on a terminal, and as plain columns of any width elsewhere.

    Args:
        columns: Their names. One with ">" is aligned right; one with "~" may be wrapped to fit a terminal.
        rows: The cells of each row.
    """
    # not by rich, which takes FORCE_COLOR, set by CI systems and notebooks, for a terminal
    is_terminal = sys.stdout.isatty()
    # a name can be "a[0]" or ":b:"
    console = Console(markup=False, highlight=False, emoji=False, force_terminal=is_terminal)
    # a terminal of less than 80 columns wraps lines itself; rich would truncate them
    console.width = max(console.width, 80) if is_terminal else 100_000
    table = Table(box=box.SIMPLE_HEAD if is_terminal else None, show_edge=False, padding=(0, 2, 0, 0))
    for column in columns.split():
        justify = "right" if column[0] == ">" else "left"
        table.add_column(column.lstrip(">~"), justify=justify, no_wrap=column[0] != "~", overflow="fold")
    for row in rows:
        table.add_row(*(escape_unprintable(cell) or "-" for cell in row))
    with console.capture() as capture:
        console.print(table)
    for line in capture.get().splitlines():
        print(line.rstrip())
