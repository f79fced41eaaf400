from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from omnitrain import ConfigError

ROOT = Path(__file__).resolve().parent.parent


def names_of(example: str) -> dict[str, Any]:
    """Return what an example defines; its `main()` has not run."""
    return runpy.run_path(str(ROOT / "examples" / example))


@pytest.fixture(autouse=True)
def somewhere_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


# native_digits.py


def test_native_digits_learns_and_leaves_its_weights(tmp_path: Path) -> None:
    example = names_of("native_digits.py")
    metrics = example["main"](epochs=3, out=tmp_path / "run")
    assert metrics["best_valid"]["eval_accuracy"] > 0.85
    model = example["DigitReader"]()
    model.load_state_dict(load_file(tmp_path / "run" / "model" / "model.safetensors"))


def test_native_digits_runs_a_second_time_with_the_same_numbers(tmp_path: Path) -> None:
    main = names_of("native_digits.py")["main"]
    assert main(epochs=1, out=tmp_path / "run") == main(epochs=1, out=tmp_path / "run")


# custom_trainer.py


def test_the_loop_written_by_hand_learns_and_keeps_the_history() -> None:
    metrics = names_of("custom_trainer.py")["train_by_hand"](epochs=4)
    assert metrics["best_valid"]["eval_accuracy"] > 0.9
    assert [row["step"] for row in metrics["train_metrics_history"]] == [47, 94, 141, 188]
    losses = [row["train_loss"] for row in metrics["train_metrics_history"]]
    assert losses == sorted(set(losses), reverse=True)


@pytest.mark.parametrize("infinite_at", [None, 2])
def test_the_loop_written_by_hand_trains_with_a_working_loss_scaler(infinite_at: int | None) -> None:
    # fp16 itself needs a GPU; a scaler scales on a CPU too, by powers of two, which cost no digit.
    def trained(scales: bool) -> Any:
        torch.manual_seed(0)
        data = torch.utils.data.TensorDataset(torch.rand(32, 8), torch.randint(0, 3, (32,)))
        model = torch.nn.Linear(8, 3)
        trainer = names_of("custom_trainer.py")["CustomTrainer"](
            model, data, epochs=1, batch_size=8, learning_rate=1e-2, progress_bar=False
        )
        if scales:
            trainer.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
            if infinite_at is not None:
                calls = iter(range(4))
                model.weight.register_hook(lambda g: g * torch.inf if next(calls) == infinite_at else g)
        trainer.train()
        return trainer

    plain, scaled = trained(False), trained(True)
    if infinite_at is None:
        torch.testing.assert_close(scaled.model.weight, plain.model.weight, rtol=0, atol=0)
        assert (plain.progress.step, scaled.progress.step) == (4, 4)
    else:
        assert torch.isfinite(scaled.model.weight).all()
        assert (scaled.progress.step, scaled.scaler.get_scale()) == (3, 2.0**9)


def test_the_multi_task_trainer_learns_all_its_tasks() -> None:
    metrics = names_of("custom_trainer.py")["train_two_tasks"](epochs=6)
    last = metrics["valid"][-1]
    assert last["eval_wine_accuracy"] > 0.85
    assert last["eval_cancer_accuracy"] > 0.85


def test_a_task_of_weight_zero_is_not_learned() -> None:
    example = names_of("custom_trainer.py")
    model = example["SharedBody"]({"wine": (13, 3), "cancer": (30, 2)})
    loads = {"wine": example["load_wine"], "cancer": example["load_breast_cancer"]}
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    trainer = example["MultiTaskTrainer"](
        model,
        {task: example["load_task"](task, *load(return_X_y=True))[0] for task, load in loads.items()},
        {"wine": 0.0},
        loss_fn=torch.nn.functional.cross_entropy,
        epochs=1,
        learning_rate=1e-2,
        progress_bar=False,
    )
    trainer.train()
    changed = {
        name.split(".")[1] for name, tensor in model.state_dict().items() if not torch.equal(before[name], tensor)
    }
    assert "cancer" in changed
    assert "wine" not in changed


def test_a_weight_for_no_task_is_an_error_that_names_it() -> None:
    example = names_of("custom_trainer.py")
    with pytest.raises(ConfigError, match="vine"):
        example["MultiTaskTrainer"](torch.nn.Linear(1, 1), {"wine": []}, {"vine": 1.0})


def test_a_task_is_standardized_by_its_training_samples_alone() -> None:
    example = names_of("custom_trainer.py")
    train, valid = example["load_task"]("wine", *example["load_wine"](return_X_y=True))
    values = np.stack([sample["inputs"] for sample in train])
    np.testing.assert_allclose(values.mean(axis=0), 0, atol=1e-5)
    assert {sample["task"] for sample in (*train, *valid)} == {"wine"}
    assert len(train) + len(valid) == 178


# three_trainers.py


def test_the_three_trainers_agree_and_hand_a_run_on_in_the_middle_of_epochs(capsys: pytest.CaptureFixture[str]) -> None:
    losses_apart, weights_apart = names_of("three_trainers.py")["main"](epochs=2)
    assert losses_apart < 1e-6
    assert weights_apart < 1e-6
    steps = [line for line in capsys.readouterr().out.splitlines() if "took it to step" in line]
    assert [line.split(" ")[0] for line in steps] == ["Trainer", "AccelerateTrainer", "HFTrainer"]
    assert [line.split("step ")[1].split(",")[0] for line in steps] == ["33 of 94", "65 of 94", "94 of 94"]
