"""Arguments of transformers on two processes: the same numbers as on one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from backends import Job, gap, launch, sound
from recipes import weights
from tiny import Tokens, llama, t5
from torch.utils.data import DataLoader, DistributedSampler
from transformers import Seq2SeqTrainingArguments

from omnitrain import HFTrainer

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


def generate(backend: str, folder: str) -> dict[str, Any]:
    """Generate for 7 sequences; of the last batch one process has one, and the other none."""
    args = arguments(folder, predict_with_generate=True, generation_max_length=30, eval_strategy="epoch")
    model = t5()
    model.generation_config.eos_token_id = list(range(2, 8))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4)
    seen: list[Any] = []

    def note(prediction: Any) -> dict[str, float]:
        seen.append((prediction.predictions.tolist(), prediction.label_ids.tolist()))
        return {"ends": float((prediction.predictions == 5).sum())}

    trainer = HFTrainer(model, args, Tokens(8, "pairs"), Tokens(7, "pairs"), compute_metrics=note)
    metrics = trainer.train()
    predictions = trainer.predict(Tokens(7, "pairs"))
    return {
        "valid": metrics["valid"],
        "predictions": predictions.predictions.tolist(),
        "labels": predictions.labels.tolist(),
        "seen": seen,
    }


def batches(backend: str, folder: str, shared: bool = False) -> dict[str, Any]:
    """Evaluate 7 sequences batch by batch; if `shared`, a sampler of PyTorch distributes them."""
    data, seen = Tokens(7), []
    size = 4 // int(os.environ.get("WORLD_SIZE", "1"))
    args = arguments(folder, batch_eval_metrics=True, per_device_eval_batch_size=size)
    loader: Any = data
    if shared:
        sampler = DistributedSampler(data, shuffle=False) if "WORLD_SIZE" in os.environ else None
        loader = DataLoader(data, batch_size=size, sampler=sampler)

    def note(prediction: Any, compute_result: bool) -> dict[str, float]:
        seen.append([prediction.predictions.argmax(-1).tolist(), prediction.label_ids.tolist(), compute_result])
        return {"rows": float(sum(len(one[0]) for one in seen))} if compute_result else {}

    metrics = HFTrainer(llama(), args, compute_metrics=note).evaluate(loader)
    return {"metrics": metrics, "seen": seen}


def inputs(backend: str, folder: str) -> dict[str, Any]:
    seen: list[Any] = []

    def note(prediction: Any) -> dict[str, float]:
        seen.append([prediction.inputs.tolist(), prediction.losses.tolist()])
        return {"rows": len(prediction.inputs)}

    args = arguments(folder, include_for_metrics=["inputs", "loss"], per_device_eval_batch_size=1)
    return {"metrics": HFTrainer(llama(), args, compute_metrics=note).evaluate(Tokens(7)), "seen": seen}


def drop(backend: str, folder: str) -> dict[str, Any]:
    """Train on 15 sequences in full micro-batches of 4 over all processes, in the order of another seed."""
    size = 4 // int(os.environ.get("WORLD_SIZE", "1"))
    args = arguments(
        folder, dataloader_drop_last=True, data_seed=9, per_device_train_batch_size=size, gradient_accumulation_steps=1,
        num_train_epochs=2,
    )  # fmt: skip
    trainer = HFTrainer(llama(), args, Tokens(15))
    trainer.train()
    return {
        "progress": [trainer.progress.step, trainer.progress.samples, trainer.progress.epochs],
        "weights": [one.tolist() for one in weights(trainer.get_model())],
    }


# --- what came of it


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hf")


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[str, list[dict[str, Any]]]:
    options = {"folder": str(folder / "run")}
    jobs = [
        Job(one.__name__, "hf2", f"{HERE}:{one.__name__}", options) for one in (smooth, generate, batches, inputs, drop)
    ]
    jobs.append(Job("shared batches", "hf2", f"{HERE}:batches", {**options, "shared": True}))
    return sound(launch(jobs, folder / "launch"))


def test_label_smoothing_matches_one_process(results: Any, folder: Path) -> None:
    expected = smooth("hf", str(folder / "single"))
    for rank in results["smooth"]:
        assert gap(rank, expected) <= 1e-12


def test_generated_answers_keep_the_order_of_the_data(results: Any, folder: Path) -> None:
    """`compute_metrics` gets them on the main process."""
    expected = generate("hf", str(folder / "single"))
    assert len({tuple(row) for row in expected["predictions"]}) > 1
    for rank in results["generate"]:
        assert (rank["predictions"], rank["labels"]) == (expected["predictions"], expected["labels"])
        assert gap(rank["valid"], expected["valid"]) <= 1e-6
    assert [rank["seen"] for rank in results["generate"]] == [[*map(list, expected["seen"])], []]


@pytest.mark.parametrize("name", ["batches", "shared batches"])
def test_batch_metrics_get_the_batches_of_all_processes(results: Any, folder: Path, name: str) -> None:
    expected = batches("hf", str(folder / "single"))
    assert [len(batch[0]) for batch in expected["seen"]] == [4, 3]
    main, other = results[name]
    assert main["seen"] == expected["seen"] and other["seen"] == []
    assert main["metrics"] == other["metrics"]
    assert gap(main["metrics"], expected["metrics"]) <= 1e-6


def test_inputs_and_losses_keep_the_order_of_the_data(results: Any, folder: Path) -> None:
    expected = inputs("hf", str(folder / "single"))
    main, other = results["inputs"]
    assert main["seen"][0][0] == expected["seen"][0][0] == Tokens(7).ids.tolist() and other["seen"] == []
    assert gap(main["seen"][0][1], expected["seen"][0][1]) <= 1e-6
    assert len(set(expected["seen"][0][1])) == 7 and gap(other["metrics"], expected["metrics"]) <= 1e-6


def test_drop_last_counts_batches_of_all_processes(results: Any, folder: Path) -> None:
    expected = drop("hf", str(folder / "single"))
    assert expected["progress"] == [6, 24, 2]
    for rank in results["drop"]:
        assert rank["progress"] == expected["progress"]
        assert gap(rank["weights"], expected["weights"]) <= 1e-7  # transformers computes the loss in float32
