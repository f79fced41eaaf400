"""Two processes and a remote store: resumes on other machines, and errors that wait for no upload."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.nn.functional as F
from backends import PROCESSES, gap, make_trainer, tensors_of
from forking import ON_CPU, Case, Found, Outcome, case_folder, current_rank, joined, mark, play
from recipes import callback, rows, t16
from stores import Watched, shelf_of, watching


def make(backend: str, save_dir: str, on_step_end: Callable[[Any], None]) -> Any:
    return make_trainer(
        backend, t16(), rows(32), loss_fn=F.mse_loss, batch_size=8 // PROCESSES[backend], epochs=2, learning_rate=0.01,
        save_dir=save_dir, save_steps=2, save_total_limit=3, callbacks=[callback(on_step_end=on_step_end)],
    )  # fmt: skip


def run(backend: str, resume: bool = False, ends_at: int = 0) -> dict[str, Any]:
    """Train with the store on the main process only: another one that uses it fails."""
    if current_rank():
        Watched.does = None  # type: ignore[method-assign, assignment]

    def end(trainer: Any) -> None:
        """End as a kill would: nothing is saved, and nothing more is uploaded."""
        if trainer.progress.step == ends_at:
            trainer.store.finish()
            os._exit(0)

    trainer = make(backend, "shelf://bucket/run", end)
    trainer.train(resume_from="last" if resume else None)
    weights = {name: tensor.tolist() for name, tensor in tensors_of(trainer).items()}
    return {"weights": weights, "step": trainer.progress.step}


def fail(rank: int) -> None:
    """Fail on one process while the upload of a checkpoint hangs until the other process has ended."""
    ended = case_folder() / "ended-1"

    def raise_error(trainer: Any) -> None:
        if trainer.progress.step == 3 and trainer.rank == rank:
            mark()
            raise ValueError("boom")

    def hang(what: str, path: str) -> None:
        if what == "write" and "checkpoint-2/model" in path:
            deadline = time.monotonic() + 120
            while not ended.exists() and time.monotonic() < deadline:
                time.sleep(0.02)
            if time.monotonic() >= deadline:
                print("The other process waited for the upload.")

    with watching():
        Watched.fault = staticmethod(hang)
        make("ddp", "watched://bucket/run", raise_error).train()


@pytest.fixture(scope="module")
def outcomes(folder: Path) -> Found[list[Outcome]]:

    def case(name: str, backend: str, shelf: str, machine: str, **options: Any) -> Case:
        (folder / shelf / "bucket").mkdir(parents=True, exist_ok=True)
        environment = {**ON_CPU, **shelf_of(folder / shelf), "OMNITRAIN_LOCAL_DIR": str(folder / machine)}
        options = {"backend": backend, **options}
        return Case(name, "test_remote_stores:run", options, processes=PROCESSES[backend], environment=environment)

    first = [case("native", "native", "native", "native")]
    first += [case(f"cut {backend}", backend, backend, backend, ends_at=5) for backend in ("ddp", "fsdp")]
    for rank in (0, 1):
        environment = {**ON_CPU, "OMNITRAIN_LOCAL_DIR": str(folder / f"fail {rank}")}
        first.append(Case(f"fail {rank}", "test_remote_stores:fail", {"rank": rank}, environment=environment))
    second = [case("ddp", "ddp", "fsdp", "new ddp", resume=True), case("fsdp", "fsdp", "ddp", "new fsdp", resume=True)]
    return joined(play(first, folder / "first"), play(second, folder / "second"))


@pytest.mark.parametrize("backend", ["ddp", "fsdp"])
def test_remote_run_resumes_on_other_machines(outcomes: Any, backend: str) -> None:
    """Only one rank reaches the store; DDP resumes what FSDP 2 has uploaded, and the other way round."""
    (expected,) = outcomes["native"]
    for outcome in (expected, *outcomes["cut ddp"], *outcomes["cut fsdp"], *outcomes[backend]):
        assert outcome.code == 0, outcome.output[-4000:]
    for outcome in outcomes[backend]:
        assert outcome.result["step"] == 8
        assert gap(outcome.result["weights"], expected.result["weights"]) < 1e-9


@pytest.mark.parametrize("rank", [0, 1])
def test_error_reaches_other_process_before_any_upload(outcomes: Any, rank: int) -> None:
    for outcome in outcomes[f"fail {rank}"]:
        assert outcome.code == 1 and "boom" in outcome.output and not outcome.left, outcome.output[-4000:]
        assert "waited for the upload" not in outcome.output
