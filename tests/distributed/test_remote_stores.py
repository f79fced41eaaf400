"""Two processes and a remote store: its runs can be resumed anywhere, and no upload keeps an error from the others."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch.nn.functional as F

sys.path[:0] = [str(Path(__file__).resolve().parent)]

from backends import gap  # noqa: E402
from forking import Case, Found, Outcome, mark, play  # noqa: E402
from recipes import rows, t16  # noqa: E402
from stores import Watched, shelf_of, watching  # noqa: E402

from omnitrain import AccelerateTrainer, Callback, Trainer  # noqa: E402
from omnitrain.checkpoint.tensors import whole  # noqa: E402

pytestmark = pytest.mark.distributed

ADDRESS = "watched://bucket/run"


class EndsAt(Callback):
    """Ends the run at a step as a kill would: nothing is saved, and nothing more is uploaded."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, trainer: Any) -> None:
        if trainer.progress.step == self.step:
            trainer.store.finish()
            os._exit(0)


def make(backend: str, **options: Any) -> Any:
    """Return a trainer for 8 steps an epoch, two epochs."""
    defaults = {
        "train_dataset": rows(64), "loss_fn": F.mse_loss, "batch_size": 8 if backend == "one" else 4, "epochs": 2,
        "learning_rate": 0.01, "progress_bar": False, "save_dir": ADDRESS, "save_steps": 2, "save_total_limit": 3,
    }  # fmt: skip
    options = {**defaults, **options}
    if backend == "one":
        return Trainer(t16(), device="cpu", **options)
    if backend == "fsdp":
        from accelerate.utils import FullyShardedDataParallelPlugin

        options["fsdp_plugin"] = FullyShardedDataParallelPlugin(fsdp_version=2)
    return AccelerateTrainer(t16(), **options)


def run(backend: str, resume: bool = False, ends_at: int = 0, **options: Any) -> dict[str, Any]:
    """Train, with the store on the main process alone: any other one that asks for it fails."""
    if os.environ.get("RANK", "0") != "0":
        Watched.does = None  # type: ignore[method-assign, assignment]
    trainer = make(backend, callbacks=[EndsAt(ends_at)] if ends_at else [], **options)
    trainer.train(resume_from="last" if resume else None)
    tensors = trainer.backend.model_tensors()
    return {"weights": {name: whole(one).tolist() for name, one in tensors.items()}, "step": trainer.progress.step}


def fail(rank: int) -> None:
    """Fail on one process while the upload of a checkpoint hangs until the other process has ended."""
    own, folder = int(os.environ["RANK"]), Path(os.environ["CASE_FOLDER"])

    class Fails(Callback):
        def on_step_end(self, trainer: Any) -> None:
            if trainer.progress.step == 3 and own == rank:
                mark()
                raise ValueError("boom")

    def hang(what: str, path: str) -> None:
        if what == "write" and "checkpoint-2/model" in path:
            end = time.monotonic() + 60
            while not (folder / "ended-1").exists() and time.monotonic() < end:
                time.sleep(0.02)
            if time.monotonic() >= end:
                print("The other process waited for the upload.")

    with watching():
        Watched.fault = staticmethod(hang)
        make("ddp", callbacks=[Fails()]).train()


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Found[list[Outcome]]:
    folder = tmp_path_factory.mktemp("remote")
    on = {"ACCELERATE_USE_CPU": "true"}

    def case(name: str, backend: str, shelf: str, machine: str, **options: Any) -> Case:
        (folder / shelf / "bucket").mkdir(parents=True, exist_ok=True)
        environment = {**on, **shelf_of(folder / shelf), "OMNITRAIN_LOCAL_DIR": str(folder / machine)}
        options = {"backend": backend, "save_dir": "shelf://bucket/run", **options}
        return Case(name, "test_remote_stores:run", options, processes=2 - (backend == "one"), environment=environment)

    first = [case("one", "one", "a", "a")]
    for backend in ("ddp", "fsdp"):
        first.append(case(f"{backend} cut", backend, backend, backend, ends_at=5))
    for rank in (0, 1):
        local = {**on, "OMNITRAIN_LOCAL_DIR": str(folder / f"fail {rank}")}
        first.append(Case(f"fail {rank}", "test_remote_stores:fail", {"rank": rank}, environment=local))
    found = play(first, folder / "first")
    second = [
        case("ddp on", "ddp", "fsdp", "new ddp", resume=True),
        case("fsdp on", "fsdp", "ddp", "new fsdp", resume=True),
    ]
    found |= play(second, folder / "second")
    return found


@pytest.mark.parametrize("name", ["ddp on", "fsdp on"])
def test_a_run_goes_on_on_other_machines_of_which_one_alone_reaches_the_store(outcomes: Any, name: str) -> None:
    """On DDP from what FSDP 2 has uploaded, and the other way round."""
    expected = outcomes["one"][0]
    assert expected.code == 0, expected.output
    for one in (*outcomes["ddp cut"], *outcomes["fsdp cut"]):
        assert one.code == 0, one.output[-4000:]
    for one in outcomes[name]:
        assert one.code == 0, one.output[-4000:]
        assert one.result["step"] == 16
        assert gap(one.result["weights"], expected.result["weights"]) < 1e-9


@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_reaches_the_other_process_before_any_upload(outcomes: Any, rank: int) -> None:
    for one in outcomes[f"fail {rank}"]:
        assert one.code == 1 and "boom" in one.output and not one.left, one.output[-4000:]
        assert "waited for the upload" not in one.output
