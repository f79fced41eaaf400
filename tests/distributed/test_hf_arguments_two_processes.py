"""What transformers' arguments ask for, on two processes: the same numbers as on one."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path[:0] = [str(Path(__file__).resolve().parent)]

from backends import Job, gap, launch  # noqa: E402
from recipes import weights  # noqa: E402
from tiny import Tokens, llama  # noqa: E402
from transformers import Seq2SeqTrainingArguments  # noqa: E402

from omnitrain import HFTrainer  # noqa: E402

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(200)]

HERE = "test_hf_arguments_two_processes"


# --- what runs on every process, and on one


def arguments(folder: str, **options: Any) -> Seq2SeqTrainingArguments:
    """Arguments for steps of 8 sequences, whatever the number of processes."""
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    defaults = {
        "per_device_train_batch_size": 1, "gradient_accumulation_steps": 8 // processes, "num_train_epochs": 1,
        "learning_rate": 0.5, "optim": "sgd", "save_strategy": "no", "use_cpu": True, "report_to": "none",
        "per_device_eval_batch_size": 2 // processes, "disable_tqdm": True,
    }  # fmt: skip
    return Seq2SeqTrainingArguments(folder, **{**defaults, **options})


def smooth(backend: str, folder: str) -> dict[str, Any]:
    trainer = HFTrainer(llama(), arguments(folder, label_smoothing_factor=0.2), Tokens(13), Tokens(7))
    metrics = trainer.train()
    return {
        "loss": [metrics["train_metrics_history"][0]["train_loss"], trainer.evaluate()["eval_loss"]],
        "weights": [one.tolist() for one in weights(trainer.get_model())],
    }


# --- what came of it


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hf")


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[str, list[dict[str, Any]]]:
    options = {"folder": str(folder / "run")}
    jobs = [Job(one.__name__, "hf2", f"{HERE}:{one.__name__}", options) for one in (smooth,)]
    found = launch(jobs, folder / "launch")
    for result in (one for ranks in found.values() for one in ranks):
        assert "error" not in result, f"{result['error']}: {result['message']}"
    return found


def test_smoothed_labels_weigh_the_same_on_whatever_process_they_are(results: Any, folder: Path) -> None:
    expected = smooth("hf", str(folder / "alone"))
    for found in results["smooth"]:
        assert gap(found, expected) <= 1e-12
