"""File system calls of a save, which do not grow with the checkpoints in the folder."""

import builtins
import contextlib
import io
import itertools
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from marks import make_small
from recipes import callback, rows, t16

LISTINGS = ("listdir", "scandir")
Calls = list[tuple[str, str]]


@contextlib.contextmanager
def recorded(folder: Path) -> Iterator[Calls]:
    """Record the calls about a folder and what is in it, of all threads."""
    calls: Calls = []

    def recording(module: Any, what: str) -> Any:
        original = getattr(module, what)

        def call(path: Any = ".", *args: Any, **kwargs: Any) -> Any:
            name = os.fspath(path) if isinstance(path, (str, os.PathLike)) else ""
            # run.json is written again when git has answered, which may be after any step
            if Path(name).is_relative_to(folder) and not os.path.basename(name).startswith("run.json"):
                calls.append((what, name))
            return original(path, *args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for module in (io, builtins):
            patch.setattr(module, "open", recording(module, "open"))
        for what in ("open", "stat", "lstat", "readlink", "access", *LISTINGS):
            patch.setattr(os, what, recording(os, what))
        yield calls


def calls_by_step(kind: str, run: Path, **options: Any) -> list[Calls]:
    """Return the calls of each step of a run of 16, from its start to that of the next; each ends with a save."""
    begins: list[int] = []
    with recorded(run) as calls:
        watch = callback(on_step_start=lambda trainer: begins.append(len(calls)), order=0)
        make_small(
            kind, t16(), rows(64), epochs=1, save_steps=1, save_dir=run, optimization_metric="loss",
            callbacks=[watch], **options,
        ).train()  # fmt: skip
    return [calls[begin:end] for begin, end in itertools.pairwise(begins)]


@pytest.mark.parametrize(
    ("kind", "options"),
    [("native", {}), ("native", {"async_save": True}), ("native", {"save_total_limit": 2}), ("hf", {})],
    ids=["native", "async", "that deletes", "hf"],
)
def test_save_makes_as_many_calls_among_many_checkpoints(kind: str, options: dict[str, Any], tmp_path: Path) -> None:
    """It lists the folder once, and does not look at earlier checkpoints."""
    steps, is_async = calls_by_step(kind, tmp_path / "run", **options)[3:], "async_save" in options
    listings = [what for calls in steps for what, path in calls if path == str(tmp_path / "run") and what in LISTINGS]
    assert len(steps) - is_async <= len(listings) <= len(steps)  # the last may be in flight
    assert not [path for calls in steps for _, path in calls if "checkpoint-1/" in path or "checkpoint-2/" in path]
    if not is_async:
        assert Counter(what for what, _ in steps[0]) == Counter(what for what, _ in steps[-1])
