"""File system calls of a save, which do not grow with the checkpoints in the folder or their files."""

from __future__ import annotations

import builtins
import contextlib
import io
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.nn.functional as F
from marks import thinned
from recipes import StopAt, rows, t16

from omnitrain import AccelerateTrainer, Callback, HFTrainer, Trainer
from omnitrain.checkpoint.manifest import MANIFEST, encode, read_manifest

TRAINERS: dict[str, Any] = {"native": Trainer, "accelerate": AccelerateTrainer, "hf": HFTrainer}
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


class Watch(Callback):
    """Records the calls of a run after its first save, until a step begins."""

    order = 0

    def __init__(self, folder: Path, until: int) -> None:
        self.folder, self.until = folder, until
        self.calls: Calls | None = None
        self._stack = contextlib.ExitStack()

    def on_save_end(self, trainer: Any) -> None:
        if self.calls is None:
            self.calls = self._stack.enter_context(recorded(self.folder))

    def on_step_start(self, trainer: Any) -> None:
        if trainer.progress.step + 1 == self.until:
            self._stack.close()

    def on_train_end(self, trainer: Any) -> None:
        self._stack.close()


def make(kind: str, run: Path, *callbacks: Callback, **options: Any) -> Any:
    options |= {"device": "cpu"} if kind == "native" else {}
    return TRAINERS[kind](
        t16(), rows(24), loss_fn=F.mse_loss, epochs=1, batch_size=4, save_steps=1, save_dir=run, progress_bar=False,
        callbacks=list(callbacks), optimization_metric="loss", **options,
    )  # fmt: skip


def add_checkpoints(run: Path, source: Path, checkpoints: int, ranks: int) -> None:
    """Put copies of a checkpoint into a run folder as older ones, with a further file of each of so many ranks."""
    content = read_manifest(source)
    for number in range(1, checkpoints + 1):
        folder, files = run / f"checkpoint-{1000 + number}", dict(content["files"])
        (folder / "rng").mkdir(parents=True)
        for name in files:
            (folder / name).parent.mkdir(exist_ok=True)
            os.link(source / name, folder / name)
        file = next(iter(files))
        for rank in range(ranks):
            os.link(source / file, folder / "rng" / f"rank-{rank:05d}")
            files[f"rng/rank-{rank:05d}"] = files[file]
        changes = {"step": 1000 + number, "sequence": number, "files": files}
        facts = {key: value for key, value in {**content, **changes}.items() if key not in ("format_version", "sha256")}
        (folder / MANIFEST).write_bytes(encode(facts))


def calls_among(kind: str, folder: Path, checkpoints: int, ranks: int, until: int, **options: Any) -> Calls:
    """Return the calls of a run that resumes and saves each step among so many older checkpoints."""
    source, run, watch = folder / "first", folder / "run", Watch(folder / "run", until)
    make(kind, source, StopAt(1)).train()
    add_checkpoints(run, source / "checkpoint-1", checkpoints, ranks)
    make(kind, run, watch, StopAt(until), **options).train(resume_from=source / "checkpoint-1")
    return watch.calls or []


CASES = [("native", True), *((kind, False) for kind in TRAINERS)]


@pytest.mark.parametrize(("kind", "is_async"), thinned(CASES, [("native", True), ("hf", False)]))
def test_save_lists_the_folder_once(kind: str, is_async: bool, tmp_path: Path) -> None:
    """It does not look at the checkpoints that are there."""
    calls = calls_among(kind, tmp_path, 5, 2, 6, async_save=is_async)
    listings = sum(path == str(tmp_path / "run") for what, path in calls if what in LISTINGS)
    assert 3 - is_async <= listings <= 3  # the last may be in flight
    assert not [path for _, path in calls if "checkpoint-10" in path]


@pytest.mark.parametrize("kind", thinned(TRAINERS, ["native"]))
def test_save_makes_as_many_calls_among_many_checkpoints(kind: str, tmp_path: Path) -> None:
    counts = []
    for checkpoints, ranks in ((3, 1), (12, 4)):
        folder = tmp_path / str(checkpoints)
        calls = calls_among(kind, folder, checkpoints, ranks, 4, save_total_limit=checkpoints)
        deleted = [path for _, path in calls if "checkpoint-10" in path]
        names = {path.name for path in (folder / "run").iterdir()}
        assert deleted and names.isdisjoint({Path(path).relative_to(folder / "run").parts[0] for path in deleted})
        assert sum(path == str(folder / "run") for what, path in calls if what in LISTINGS) == 1
        counts.append(Counter(what for what, path in calls if path not in deleted))
    assert counts[0] == counts[1]
