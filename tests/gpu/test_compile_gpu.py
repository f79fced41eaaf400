"""Models that `torch.compile` has compiled: the same numbers, names without `_orig_mod.`, and runs that go on."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.utils
from devices import make
from recipes import StopAt, distance, rows, same, t16, weights
from torch import nn

from omnitrain.checkpoint.tensor_files import load_tensors

FP32 = torch.float32
NAMES = {"0.weight", "0.bias", "3.weight", "3.bias"}
"""Of the tensors of the small model."""
pytestmark = [pytest.mark.timeout(300), pytest.mark.processes]  # inductor compiles in processes of its own


@pytest.fixture
def compiler(device: torch.device) -> str:
    """What compiles: on the GPU inductor, where this machine can; on a CPU nothing is made faster, which is quicker."""
    torch._dynamo.reset()
    if device.type == "cpu":
        return "eager"
    try:
        torch.compile(lambda x: torch.relu(x) + 1)(torch.ones(8, device=device))
    except Exception as error:
        pytest.skip(f"this machine cannot compile: {type(error).__name__}: {' '.join(str(error).split())[:300]}")
    return "inductor"


def graphs() -> int:
    """How many graphs have been compiled."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def run(kind: str, device: torch.device, model: Any, folder: Path, *guests: Any, resume: Any = None) -> Any:
    trainer = make(
        kind, device, model, rows(64, FP32), rows(16, FP32), loss_fn=nn.functional.mse_loss, epochs=2, batch_size=8,
        lr_scheduler="cosine", save_dir=folder, save_steps=1000, load_best_at_end=False, callbacks=guests,
    )  # fmt: skip
    trainer.train(resume_from=resume)
    return trainer


def test_compiled_model_equals_plain_and_resumes(
    device: torch.device, kind: str, compiler: str, tmp_path: Path
) -> None:
    def compiled() -> Any:
        return torch.compile(t16(dtype=FP32), backend=compiler)

    plain, before = run(kind, device, t16(dtype=FP32), tmp_path / "plain"), graphs()
    straight = run(kind, device, compiled(), tmp_path / "straight")
    assert graphs() > before
    run(kind, device, compiled(), tmp_path / "parts", StopAt(11))
    second = run(kind, device, compiled(), tmp_path / "parts", resume="auto")
    assert second.progress.step == 16
    assert same(weights(straight.get_model()), weights(second.get_model()))
    assert distance(weights(plain.get_model()), weights(straight.get_model())) < 1e-4
    assert plain.metrics["valid"][-1] == pytest.approx(straight.metrics["valid"][-1], abs=1e-4)

    straight.save_model(tmp_path / "model")
    names = [tmp_path / "model/model.safetensors", tmp_path / "straight/checkpoint-16/model.safetensors"]
    assert [set(load_tensors(name)) for name in names] == [NAMES, NAMES]
    moments = load_tensors(tmp_path / "straight/checkpoint-16/optimizer/state.safetensors")
    assert {name.rpartition("/")[0] for name in moments} == NAMES


def test_compiled_model_resumes_as_plain(device: torch.device, kind: str, compiler: str, tmp_path: Path) -> None:
    plain = run(kind, device, t16(dtype=FP32), tmp_path / "plain")
    run(kind, device, torch.compile(t16(dtype=FP32), backend=compiler), tmp_path / "parts", StopAt(11))
    second = run(kind, device, t16(dtype=FP32), tmp_path / "parts", resume="auto")
    assert distance(weights(plain.get_model()), weights(second.get_model())) < 1e-4


def test_cuda_graphs_train_and_evaluate_as_plain_model(device: torch.device, kind: str, compiler: str) -> None:
    """Their memory is overwritten: gradients of micro-batches and outputs in evaluations must not be kept in it."""
    if device.type != "cuda":
        pytest.skip("CUDA graphs need a CUDA GPU")
    ends, rows_of_runs = [], []
    for mode in (None, "reduce-overhead"):
        model: Any = t16(dtype=FP32)
        trainer = make(
            kind, device, model if mode is None else torch.compile(model, mode=mode), rows(64, FP32), rows(16, FP32),
            loss_fn=nn.functional.mse_loss, epochs=2, gradient_accumulation_steps=2,
            compute_metrics=["mae", lambda prediction: {"largest": float(prediction.predictions.max())}],
        )  # fmt: skip
        trainer.train()
        ends.append(weights(trainer.get_model()))
        rows_of_runs.append(trainer.metrics["valid"][-1])
    assert distance(*ends) < 1e-4
    assert rows_of_runs[1] == pytest.approx(rows_of_runs[0], abs=1e-4)


def test_torch_compile_argument_saves_bare_names(device: torch.device, compiler: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="HFTrainer needs transformers, which is not installed")
    from omnitrain import HFTrainer

    ends, before = [], graphs()
    for compiles in (False, True):
        args = transformers.TrainingArguments(
            str(tmp_path / f"run-{compiles}"), num_train_epochs=2, per_device_train_batch_size=8, learning_rate=0.01,
            report_to="none", save_strategy="epoch", load_best_model_at_end=False, torch_compile=compiles,
            torch_compile_backend=compiler if compiles else None,
        )  # fmt: skip
        trainer = HFTrainer(t16(dtype=FP32), args, rows(64, FP32), loss_fn=nn.functional.mse_loss, progress_bar=False)
        trainer.train()
        assert trainer.device.type == device.type
        assert hasattr(trainer.model_wrapped, "_orig_mod") == compiles
        ends.append(weights(trainer.get_model()))
        assert set(load_tensors(tmp_path / f"run-{compiles}/checkpoint-16/model.safetensors")) == NAMES
    assert graphs() > before
    assert distance(*ends) < 1e-4
