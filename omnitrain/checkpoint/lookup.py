"""Lookup of runs and checkpoints by path or address. No torch."""

from __future__ import annotations

import contextlib
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omnitrain.checkpoint.manifest import validate
from omnitrain.checkpoint.safetensors_header import read_header
from omnitrain.checkpoint.store import MANIFEST, Store, is_pointer
from omnitrain.core.errors import ConfigError

# The name of a checkpoint's folder; an `.old` one is being replaced.
FOLDER: re.Pattern[str] = re.compile(r"checkpoint-([0-9]+)(\.old)?")


@contextlib.contextmanager
def local_copies(*places: Path | str, whole: bool = True) -> Iterator[list[Path]]:
    """Yield a local path for each place; remote runs are downloaded, and deleted afterwards.

    Args:
        places: Paths, and addresses of remote stores.
        whole: Whether files are downloaded with their contents; otherwise only with their sizes.
    """
    from omnitrain.checkpoint.remote import download_run
    from omnitrain.core.paths import is_address

    with contextlib.ExitStack() as ends:
        paths: list[Path] = []
        for place in places:
            if is_address(place):
                folder = Path(ends.enter_context(tempfile.TemporaryDirectory(prefix="omnitrain-")))
                place = download_run(str(place), folder, whole)
            paths.append(Path(place))
        yield paths


def locate(path: Path) -> tuple[Store, Path | None]:
    """Return the run of a path, and the folder of the checkpoint if the path is a checkpoint."""
    if path.name in ("", ".."):
        path = path.resolve()  # the names of the folder and of its run are needed
    if is_pointer(path) and Store(path.parent).folders():
        return Store(path.parent), Store(path.parent).locate(path.name)
    if (path / MANIFEST).is_file():
        return Store(path.parent), path
    if Store(path).folders():
        return Store(path), None
    if FOLDER.fullmatch(path.name) and path.is_dir():
        return Store(path.parent), path  # only the name shows that it was a checkpoint
    what = "holds no checkpoints" if path.is_dir() else "is no folder" if path.exists() else "does not exist"
    raise ConfigError(
        f"{str(path)!r} {what}. Give a run's `save_dir`, one of the checkpoint folders in it, or its 'last' or 'best'."
    )


def find_checkpoints(path: Path) -> tuple[Store, list[Path]]:
    """Return a run and its checkpoints by step, including damaged ones; or only the one at `path`."""
    store, folder = locate(path)
    return store, [step_folder for _, step_folder in sorted(store.folders().items())] if folder is None else [folder]


def resolve_checkpoint(path: Path) -> tuple[Path, dict[str, Any]]:
    """Return the verified checkpoint at `path`, or the last one if `path` is a run."""
    store, folder = locate(path)
    folder = folder or store.locate("last")
    return folder, store.verify(folder, accept=check_content)


def check_content(folder: Path, content: dict[str, Any]) -> dict[str, Any]:
    """Return the content; raise a CheckpointError if no run can have written it, or the headers of the tensors."""
    validate(content, repr(str(folder)), complete=False)
    for name in content["files"]:
        if name.endswith(".safetensors"):
            read_header(folder / name)
    return content
