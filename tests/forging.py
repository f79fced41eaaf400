"""Checkpoints that nobody has saved: one is changed, and hashed again so that nothing but its sense is wrong."""

import functools
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from omnitrain.checkpoint.manifest import MANIFEST, encode
from omnitrain.checkpoint.sharded_files import Block, local_blocks, write_shards
from omnitrain.checkpoint.tensor_files import Gathered, load_tensors, save_tensors
from omnitrain.core.files import FileSystem


def content_of(folder: Path) -> dict[str, Any]:
    """What omnitrain.json of a checkpoint says."""
    return json.loads((folder / MANIFEST).read_text())


def seal(folder: Path, content: dict[str, Any]) -> None:
    """Write an omnitrain.json that is right about its own hash."""
    entries = {key: value for key, value in content.items() if key not in ("format_version", "sha256")}
    (folder / MANIFEST).write_bytes(encode(entries))


def forge_tensors(folder: Path, file: str, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    """Change the tensors of a file, whose hash is right again afterwards."""
    tensors = load_tensors(folder / file)
    change(tensors)
    save_tensors(tensors, folder / file)
    content = content_of(folder)
    data = (folder / file).read_bytes()
    content["files"][file] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    seal(folder, content)


def _slice_of(tensor: torch.Tensor, begin: int, end: int) -> tuple[int, torch.Tensor]:
    return begin, tensor.reshape(-1)[begin:end]


def shard(folder: Path, ranks: int = 2) -> None:
    """Make a checkpoint one whose ranks have written their parts of the weights and of the optimizer's tensors."""
    content = content_of(folder)
    for file, part in (("model.safetensors", "model"), ("optimizer/state.safetensors", "optimizer")):
        if content["files"].pop(file, None) is None:
            continue
        tensors = load_tensors(folder / file)
        (folder / file).unlink()
        (folder / part).mkdir(exist_ok=True)
        for rank in range(ranks):
            blocks: dict[str, list[Block]] = {}
            for name, tensor in tensors.items():
                begin, end = (tensor.numel() * (rank + step) // ranks for step in (0, 1))
                flat = functools.partial(_slice_of, tensor, begin, end)
                blocks[name] = local_blocks(Gathered(tuple(tensor.shape), tensor.dtype, tensor.clone, flat=flat), rank)
            entries = write_shards(blocks, folder / part, rank, FileSystem())
            content["files"] |= {f"{part}/{name}": entry for name, entry in entries.items()}
    seal(folder, content)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value in nested dicts and lists."""
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in entries:
        yield (*path, key)
        yield from places(inner, (*path, key))


def put(value: Any, path: tuple[Any, ...], new: Any, delete: bool = False) -> None:
    """Replace or delete what is at a path."""
    for key in path[:-1]:
        value = value[key]
    if delete:
        del value[path[-1]]
    else:
        value[path[-1]] = new


def nested(depth: int) -> Any:
    """Lists in each other."""
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


ODDITIES: list[Any] = [
    None, True, False, 0, 1, -1, 7, 2**31, 2**53 + 1, 2**62, 2**63, 2**64, 10**400, -(10**18), 0.5, -0.5, 1e308, 1e-320,
    float("nan"), float("inf"), float("-inf"), "", "x", "nan", "../../x", "\x1b[2J\x07", "\ud800", "a" * 5000,
    [], {}, [1], [[]],
    ["x", None], {"x": 1}, {"__tensor__": "x"}, {"__tensor__": []}, {"__float__": []}, {"__float__": "nan"},
    {"__tuple__": 3},
    {"__dict__": [[{}, 1]]}, {"__dict__": [1]}, {"__counter__": 3}, {"__tuple__": [1], "x": 2}, {"__class__": 1},
    nested(50), nested(150),
]  # fmt: skip
"""What no run would write where something else stood."""


def spoil(path: Path, how: str, position: int = -1) -> None:
    """Flip a bit at a position, cut the file off there or empty it, or put something else in its place."""
    data = bytearray(path.read_bytes())
    if how == "flip":
        data[position] ^= 1
    elif how in ("truncate", "empty"):
        del data[position if how == "truncate" else 0 :]
    path.unlink()
    if how == "folder":
        path.mkdir()
    elif how == "pipe":
        os.mkfifo(path)
    elif how in ("device", "dangling"):
        path.symlink_to("/dev/zero" if how == "device" else "nowhere")
    else:
        path.write_bytes(data)


def copied(run: Path, target: Path) -> Path:
    """A copy of a run, in which links stay links."""
    shutil.rmtree(target, ignore_errors=True)
    return shutil.copytree(run, target, symlinks=True)
