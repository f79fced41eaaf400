"""Watching changes no bit on two ranks either: runs with every watcher, and the same without."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path[:0] = [str(Path(__file__).resolve().parent)]

import torch  # noqa: E402
from backends import Job, launch_all, make_trainer, sound  # noqa: E402
from watchers import TRACES, outcome, run  # noqa: E402

pytestmark = pytest.mark.distributed

BACKENDS = ("ddp", "fsdp", "hf2")


def train(backend: str, folder: str | None = None) -> dict[str, Any]:
    """Train on two ranks, watched by all where there is a folder."""

    def make(*args: Any, **options: Any) -> Any:
        return make_trainer(backend, *args, **options)

    return outcome(run(make, folder if folder is None else Path(folder)))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("watched")
    jobs = []
    for backend in BACKENDS:
        watched = {"folder": str(folder / backend)}
        jobs += [
            Job(f"{backend}-bare", backend, "test_watched:train"),
            Job(f"{backend}-watched", backend, "test_watched:train", watched),
        ]
    return folder, sound(launch_all(jobs, folder / "launch"))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_run_that_everything_watches_has_the_bits_of_one_that_nothing_does(runs: Any, backend: str) -> None:
    folder, found = runs
    for watched, bare in zip(found[f"{backend}-watched"], found[f"{backend}-bare"], strict=True):
        assert watched["history"] == bare["history"] and watched["tensors"].keys() == bare["tensors"].keys()
        for name, tensor in bare["tensors"].items():
            assert torch.equal(watched["tensors"][name], tensor), name
    for trace in TRACES:
        assert list((folder / backend).glob(trace)), trace


def test_what_ran_names_all_ranks_and_is_written_once(runs: Any) -> None:
    folder, found = runs
    assert found["ddp-watched"]
    (start,) = json.loads((folder / "ddp" / "run" / "run.json").read_text())["starts"]
    assert start["processes"] == 2 and sum(sum(one.values()) for one in start["hosts"].values()) == 2
