"""What a save asks of the disk does not grow with the checkpoints that are there, nor with their files."""

from __future__ import annotations

import contextlib
import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.nn.functional as F
from recipes import rows, t16

from omnitrain import AccelerateTrainer, Callback, HFTrainer, Trainer
from omnitrain.checkpoint.manifest import MANIFEST, encode, read_manifest

TRAINERS: dict[str, Any] = {"native": Trainer, "accelerate": AccelerateTrainer, "hf": HFTrainer}
LISTINGS = ("listdir", "scandir")
ASKED = ("stat", "lstat", "readlink", "access", *LISTINGS)

Asked = list[tuple[str, str]]
recordings: list[tuple[str, Asked]] = []


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if recordings and event == "open" and isinstance(args[0], (str, os.PathLike)):
        _record("open", args[0])


sys.addaudithook(_audit)


def _record(what: str, path: Any) -> None:
    folder, asked = recordings[-1]
    name = os.fspath(path) if isinstance(path, (str, os.PathLike)) else ""
    if os.path.basename(name).startswith("run.json"):
        return  # written once more when git has answered, which may be after any step
    if name == folder or name.startswith(folder + os.sep):
        asked.append((what, name))


@contextlib.contextmanager
def recorded(folder: Path) -> Iterator[Asked]:
    """What is asked of the disk inside about a folder and what is in it, in any thread."""
    asked: Asked = []

    def heard(what: str) -> Any:
        real = getattr(os, what)

        def ask(path: Any = ".", *args: Any, **kwargs: Any) -> Any:
            _record(what, path)
            return real(path, *args, **kwargs)

        return ask

    with pytest.MonkeyPatch.context() as patch:
        for what in ASKED:
            patch.setattr(os, what, heard(what))
        recordings.append((str(folder), asked))
        try:
            yield asked
        finally:
            recordings.pop()


class Watch(Callback):
    """Records what a run asks of the disk after its first save, until a step begins."""

    order = 0

    def __init__(self, folder: Path, until: int) -> None:
        self.folder, self.until = folder, until
        self.asked: Asked | None = None
        self._open = contextlib.ExitStack()

    def on_save_end(self, trainer: Any) -> None:
        if self.asked is None:
            self.asked = self._open.enter_context(recorded(self.folder))

    def on_step_start(self, trainer: Any) -> None:
        if trainer.progress.step + 1 == self.until:
            self._open.close()

    def on_train_end(self, trainer: Any) -> None:
        self._open.close()


def make(kind: str, run: Path, *guests: Callback, **options: Any) -> Any:
    options |= {"device": "cpu"} if kind == "native" else {}
    return TRAINERS[kind](
        t16(), rows(24), loss_fn=F.mse_loss, epochs=1, batch_size=4, save_steps=1, save_dir=run, callbacks=list(guests),
        progress_bar=False, optimization_metric="loss", **options,
    )  # fmt: skip


def filled(run: Path, first: Path, checkpoints: int, ranks: int) -> None:
    """Put older checkpoints into a run folder: that of a run, with a file of each of so many ranks."""
    content = read_manifest(first)
    for number in range(1, checkpoints + 1):
        folder = run / f"checkpoint-{1000 + number}"
        (folder / "rng").mkdir(parents=True)
        files = dict(content["files"])
        for name in files:
            (folder / name).parent.mkdir(exist_ok=True)
            os.link(first / name, folder / name)
        source = next(iter(files))
        for rank in range(ranks):
            os.link(first / source, folder / "rng" / f"rank-{rank:05d}")
            files[f"rng/rank-{rank:05d}"] = files[source]
        own = {"step": 1000 + number, "sequence": number, "files": files}
        facts = {key: value for key, value in {**content, **own}.items() if key not in ("format_version", "sha256")}
        (folder / MANIFEST).write_bytes(encode(facts))


def among(kind: str, folder: Path, checkpoints: int, ranks: int, until: int, **options: Any) -> tuple[Path, Asked]:
    """Resume a run that saves each step among so many older checkpoints; return its folder, and what `Watch` saw."""
    first, run, watch = folder / "first", folder / "run", Watch(folder / "run", until)
    make(kind, first).train()
    filled(run, first / "checkpoint-1", checkpoints, ranks)
    make(kind, run, watch, **options).train(resume_from=first / "checkpoint-1")
    return run, watch.asked or []


@pytest.mark.parametrize(("kind", "asynchronous"), [*((kind, False) for kind in TRAINERS), ("native", True)])
def test_a_save_lists_the_folder_once_and_asks_nothing_of_the_checkpoints_there(
    kind: str, asynchronous: bool, tmp_path: Path
) -> None:
    run, asked = among(kind, tmp_path, 5, 2, 6, **({"async_save": True} if asynchronous else {}))
    listings = sum(path == str(run) for what, path in asked if what in LISTINGS)
    assert 3 - asynchronous <= listings <= 3  # the last may be in flight
    assert not [path for _, path in asked if "checkpoint-10" in path]


@pytest.mark.parametrize("kind", TRAINERS)
def test_a_save_asks_as_much_among_100_checkpoints_of_64_ranks_as_among_10_of_one(kind: str, tmp_path: Path) -> None:
    counts = []
    for checkpoints, ranks in ((10, 1), (100, 64)):
        run, asked = among(kind, tmp_path / str(checkpoints), checkpoints, ranks, 4, save_total_limit=checkpoints)
        deleted = [path for _, path in asked if "checkpoint-10" in path]
        there = {path.name for path in run.iterdir()}
        assert deleted and there.isdisjoint({Path(path).relative_to(run).parts[0] for path in deleted})
        assert sum(path == str(run) for what, path in asked if what in LISTINGS) == 1
        counts.append(Counter(what for what, path in asked if path not in deleted))
    assert counts[0] == counts[1]
