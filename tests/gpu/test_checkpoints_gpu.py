"""Checkpoints of runs on a GPU: resumed there to the bit, by every trainer, and moved to the CPU and back."""

from pathlib import Path
from typing import Any

import pytest
import torch
from devices import KINDS, make
from recipes import StopAt, Trace, assert_equal, callback, distance, fit, rows, same, t16, weights

from omnitrain.checkpoint.store import Store
from omnitrain.checkpoint.tensor_files import load_tensors

FP32 = torch.float32
CPU = torch.device("cpu")
STEPS, CUT = 30, 19
"""Of a run of two epochs, and where it is cut: in the middle of the second."""
SPEEDS = ("samples_per_second", "tokens_per_second")


def run(kind: str, device: torch.device, folder: Path, *guests: Any, resume: Any = None, **options: Any) -> Any:
    """Train two epochs of 15 steps, evaluated every 5, with or without dropout."""
    trainer = make(
        kind, device, t16(options.pop("dropout", 0.2), FP32), rows(60, FP32), rows(12, FP32), epochs=2,
        lr_scheduler="cosine", warmup_steps=3, max_grad_norm=0.5, log_steps=5, eval_steps=5, save_steps=1000,
        save_dir=folder, load_best_at_end=False, callbacks=guests, **options,
    )  # fmt: skip
    trainer.train(resume_from=resume)
    return trainer


def state_of(trainer: Any) -> dict[str, torch.Tensor]:
    """Return weights and the optimizer's tensors, on the host."""
    tensors = {f"weights/{name}": tensor for name, tensor in trainer.backend.model_tensors().items()}
    tensors |= {f"moments/{name}": tensor for name, tensor in trainer.backend.optimizer_state()[0].items()}
    return {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}


def saved_at(folder: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """Return the last checkpoint, and what it holds of weights and optimizer."""
    checkpoint = Store(folder).resolve("last")
    assert checkpoint is not None
    files = {"weights": "model.safetensors", "moments": "optimizer/state.safetensors"}
    parts = [(kind, load_tensors(checkpoint[0] / file)) for kind, file in files.items()]
    return checkpoint[0], {f"{kind}/{name}": tensor for kind, part in parts for name, tensor in part.items()}


# --- on one device


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_run_with_dropout_resumes_bit_exactly(device: torch.device, kind: str, precision: str, tmp_path: Path) -> None:
    trace, rest = Trace(), Trace()
    straight = run(kind, device, tmp_path / "straight", trace, autocast=precision)
    run(kind, device, tmp_path / "parts", StopAt(CUT), autocast=precision)
    torch.manual_seed(12345)  # all generators are somewhere else when the run goes on
    second = run(kind, device, tmp_path / "parts", rest, autocast=precision, resume="auto")
    assert_equal(state_of(straight), state_of(second))
    assert straight.metrics.to_dict() == second.metrics.to_dict()
    ends = [[{key: row[key] for key in row if key not in SPEEDS} for row in run.logs] for run in (trace, rest)]
    assert ends[0][-len(ends[1]) :] == ends[1] and len(ends[1]) >= 2


@pytest.mark.parametrize("first", KINDS)
def test_run_resumes_in_another_trainer_bit_exactly(
    device: torch.device, kind: str, first: str, tmp_path: Path
) -> None:
    if first == "hf":
        pytest.importorskip("transformers", reason="HFTrainer needs transformers, which is not installed")
    straight = run(kind, device, tmp_path / "straight")
    run(first, device, tmp_path / "parts", StopAt(CUT))
    second = run(kind, device, tmp_path / "parts", resume="auto")
    assert second.progress.step == STEPS
    assert_equal(state_of(straight), state_of(second))


def test_checkpoint_equals_state_on_device(device: torch.device, kind: str, tmp_path: Path) -> None:
    states = list[torch.Tensor]()  # of the GPU's generator at the end of training, after which it is as before

    def note_state(trainer: Any) -> None:
        if trainer.device.type == "cuda":
            states.append(torch.cuda.get_rng_state(trainer.device))

    trainer = run(kind, device, tmp_path, StopAt(CUT), callback(on_train_end=note_state))
    folder, saved = saved_at(tmp_path)
    assert_equal(saved, state_of(trainer))
    generators = load_tensors(folder / "rng/state.safetensors")
    assert_equal([generators[name] for name in generators if name == "0/device"], states)
    assert len(states) == (device.type == "cuda")


def test_async_save_holds_state_of_request(device: torch.device, tmp_path: Path) -> None:
    ends = []
    for name, saves_async in (("sync", False), ("async", True)):
        trainer = fit(make(
            "native", device, t16(0.2, FP32), rows(60, FP32), save_dir=tmp_path / name, save_steps=1,
            async_save=saves_async,
        ))  # fmt: skip
        ends.append([load_tensors(path / "model.safetensors") for path in trainer.store.checkpoints()])
    assert len(ends[0]) == 15
    assert_equal(*ends)


# --- from the GPU to the CPU, and back


def test_run_moves_to_cpu_and_back(device: torch.device, kind: str, tmp_path: Path) -> None:
    straight = run("native", CPU, tmp_path / "straight", dropout=0.0)
    run(kind, device, tmp_path / "parts", StopAt(7), dropout=0.0)
    folder, saved = saved_at(tmp_path / "parts")

    on_cpu = run("native", CPU, tmp_path / "parts", StopAt(CUT), dropout=0.0, resume="auto")
    assert on_cpu.device.type == "cpu" and on_cpu.progress.step == CUT
    assert {tensor.device.type for state in on_cpu.optimizer.state.values() for tensor in state.values()} == {"cpu"}

    back = run(kind, device, tmp_path / "parts", dropout=0.0, resume="auto")
    assert back.progress.step == STEPS
    assert {parameter.device.type for parameter in back.get_model().parameters()} == {device.type}
    assert distance([tensor.cpu() for tensor in weights(back.get_model())], weights(straight.get_model())) < 1e-4
    rows_back, expected = (trainer.metrics["valid"] for trainer in (back, straight))
    assert [row["step"] for row in rows_back] == [5, 10, 15, 20, 25, 30]
    assert rows_back == [pytest.approx(row, abs=1e-4) for row in expected]
    # what was loaded is what was saved
    loaded = make(
        "native", CPU, t16(dtype=FP32), rows(60, FP32), rows(12, FP32), epochs=2, lr_scheduler="cosine",
        warmup_steps=3, max_grad_norm=0.5, save_dir=tmp_path / "parts",
    )  # fmt: skip
    loaded.load_checkpoint(folder)
    assert_equal(saved, state_of(loaded))


def test_generator_of_other_device_is_unchanged(device: torch.device, kind: str, tmp_path: Path) -> None:
    run("native", CPU, tmp_path, StopAt(CUT))
    second = run(kind, device, tmp_path, resume="auto")
    assert second.progress.step == STEPS
    assert "0/device" not in load_tensors(tmp_path / "checkpoint-19/rng/state.safetensors")


def test_model_saved_on_device_loads_on_host(device: torch.device, kind: str, tmp_path: Path) -> None:
    trainer = run(kind, device, tmp_path / "run")
    trainer.save_model(tmp_path / "model")
    tensors = load_tensors(tmp_path / "model/model.safetensors")
    plain = t16(dtype=FP32)
    plain.load_state_dict(tensors)
    assert same(weights(plain), [parameter.cpu() for parameter in weights(trainer.get_model())])


def test_exported_model_runs_on_a_cpu(device: torch.device, kind: str, tmp_path: Path) -> None:
    trainer = fit(make(kind, device, t16(dtype=FP32), rows(32, FP32), rows(8, FP32)))
    program = torch.export.load(trainer.export(tmp_path / "model.pt2")).module()
    expected = torch.as_tensor(trainer.predict(rows(8, FP32)).predictions)
    torch.testing.assert_close(program(rows(8, FP32)[:][0]), expected, rtol=1e-5, atol=1e-5)
