import copy
import os
import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import programs
import pytest
import torch
from marks import thinned
from recipes import fit
from safetensors.torch import load_file

from omnitrain import ConfigError, Trainer

ROOT = Path(__file__).resolve().parent.parent


def names_of(example: str) -> dict[str, Any]:
    """Return what an example defines; its `main()` has not run."""
    return runpy.run_path(str(ROOT / "examples" / example))


@pytest.fixture(autouse=True)
def somewhere_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


# whole scripts


@pytest.mark.parametrize(("epochs", "accuracy"), thinned([(1, 0.6), (3, 0.85)], [(1, 0.6)]))
def test_native_digits_learns_reproducibly(epochs: int, accuracy: float, tmp_path: Path) -> None:
    example = names_of("native_digits.py")
    metrics = example["main"](epochs=epochs, out=tmp_path / "run")
    assert metrics["best_valid"]["eval_accuracy"] > accuracy
    assert epochs == 1 or example["main"](epochs=epochs, out=tmp_path / "run") == metrics
    example["DigitReader"]().load_state_dict(load_file(tmp_path / "run" / "model" / "model.safetensors"))


def test_custom_trainer_learns() -> None:
    metrics = names_of("custom_trainer.py")["train_by_hand"](epochs=3)
    assert metrics["best_valid"]["eval_accuracy"] > 0.85
    assert [row["step"] for row in metrics["train_metrics_history"]] == [47, 94, 141]
    losses = [row["train_loss"] for row in metrics["train_metrics_history"]]
    assert losses == sorted(set(losses), reverse=True)


@pytest.mark.parametrize("infinite_at", [None, 2])
def test_custom_trainer_scales_loss(infinite_at: int | None) -> None:
    # fp16 itself needs a GPU; a scaler scales on a CPU too, by powers of two, which cost no digit.
    trainers = []
    for scales in (False, True):
        torch.manual_seed(0)
        data, model = (torch.rand(32, 8), torch.randint(0, 3, (32,))), torch.nn.Linear(8, 3)
        trainer = names_of("custom_trainer.py")["CustomTrainer"](
            model, data, epochs=1, batch_size=8, learning_rate=1e-2, progress_bar=False
        )
        if scales:
            trainer.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
            calls = iter(range(4))
            model.weight.register_hook(lambda g: g * torch.inf if next(calls) == infinite_at else g)  # noqa: B023
        trainers.append(fit(trainer))
    plain, scaled = trainers
    if infinite_at is None:
        torch.testing.assert_close(scaled.model.weight, plain.model.weight, rtol=0, atol=0)
        assert (plain.progress.step, scaled.progress.step) == (4, 4)
    else:
        assert torch.isfinite(scaled.model.weight).all()
        assert (scaled.progress.step, scaled.scaler.get_scale()) == (3, 2.0**9)


@pytest.mark.parametrize(("epochs", "accuracy"), thinned([(2, 0.6), (6, 0.85)], [(2, 0.6)]))
def test_multi_task_trainer_learns_all_tasks(epochs: int, accuracy: float) -> None:
    last = names_of("custom_trainer.py")["train_two_tasks"](epochs=epochs)["valid"][-1]
    assert min(last["eval_wine_accuracy"], last["eval_cancer_accuracy"]) > accuracy


def test_multi_task_trainer_uses_task_weights() -> None:
    example = names_of("custom_trainer.py")
    model = example["SharedBody"]({"wine": (13, 3), "cancer": (30, 2)})
    loads = {"wine": example["load_wine"], "cancer": example["load_breast_cancer"]}
    before = copy.deepcopy(model.state_dict())
    data = {task: example["load_task"](task, *load(return_X_y=True))[0] for task, load in loads.items()}
    options = {"loss_fn": torch.nn.functional.cross_entropy, "epochs": 1, "learning_rate": 1e-2, "progress_bar": False}
    state = fit(example["MultiTaskTrainer"](model, data, {"wine": 0.0}, **options)).model.state_dict()
    changed = {name.split(".")[1] for name, tensor in state.items() if not torch.equal(before[name], tensor)}
    assert "cancer" in changed and "wine" not in changed
    with pytest.raises(ConfigError, match="vine"):
        example["MultiTaskTrainer"](torch.nn.Linear(1, 1), {"wine": []}, {"vine": 1.0})


# one file for each common job


def test_readme_lists_examples() -> None:
    folder = ROOT / "examples"
    jobs, rest = (folder / "README.md").read_text(encoding="utf-8").split("## Whole scripts")
    files = {text: re.findall(r"\]\((\w+\.py)\)", text) for text in (jobs, rest)}
    assert sorted(files[jobs] + files[rest]) == sorted(path.name for path in folder.glob("*.py"))
    for name in files[jobs]:
        text = (folder / name).read_text(encoding="utf-8")
        assert text.count("\n") <= 90, name
        assert f"python examples/{name}\n" in text and "\nIn plain PyTorch" in text, name


@pytest.mark.slow
@pytest.mark.parametrize(("file", "options", "is_good"), [
    ("images.py", {"epochs": 2}, lambda result: result["test_accuracy"] > 0.5),
    ("object_detection.py", {}, lambda result: result["best_valid"]["eval_recall"] > 0.9),
    ("text.py", {"epochs": 3, "per_package": 800}, lambda result: result["test_accuracy"] > 0.5),  # by chance: 0.25
    ("tabular.py", {"epochs": 20}, lambda result: result["network"] > result["linear"] - 0.05 > 0.25),
    # an end everywhere: 0.36
    ("sequence_labelling.py", {"epochs": 3, "limit": 1000}, lambda result: result["eval_f1"] > 0.5),
    ("character_model.py", {"modules": 8}, lambda result: result["eval_loss"] < 4),  # 4.9 before training
    ("seq2seq.py", {"epochs": 4, "count": 1500}, lambda result: result > 0.3),  # by chance: none
    ("lora.py", {"epochs": 3}, lambda result: result["after"] > result["before"] + 0.3),
    ("contrastive.py", {"epochs": 8}, lambda result: result["features"] > result["pixels"] + 0.03),
    ("gan.py", {"epochs": 16}, lambda result: result["noise"] / 2 > result["first half"] > result["resumed"]),
    # by chance: 0.1 and 0.25
    ("multi_task.py", {"epochs": 4}, lambda best: best["eval_digit_accuracy"] > 0.5 < best["eval_turns_accuracy"]),
    ("mixed_tasks.py", {"epochs": 4}, lambda result: result["eval_digit_accuracy"] > 0.5),
    ("regularized.py", {"epochs": 6}, lambda result: result["test_accuracy"] > 0.5),
    ("causal_lm.py", {"epochs": 1, "size": 600}, lambda result: result["perplexity"] < 6),  # of 30 words
    # of the teacher, the student alone, and taught
    ("distillation.py", {"epochs": 10}, lambda result: (s := [*result.values()])[0] > s[2] > s[1] + 0.2),
    ("segmentation.py", {"epochs": 3}, lambda result: result["eval_miou"] > 0.5),  # a background everywhere: 0.29
    ("speech_ctc.py", {"epochs": 6}, lambda result: result["eval_digit_error_rate"] < 0.1),
    ("graphs.py", {"epochs": 8}, lambda result: result["with messages"] - 0.3 > result["nodes only"]),
    ("curriculum.py", {}, lambda result: result["curriculum"] - 0.3 > result["all at once"]),  # by chance: 0.5
    ("active_learning.py", {"rounds": 6}, lambda result: result["uncertain"][-1] > result["random"][-1]),
    ("preferences.py", {}, lambda result: result["forwards after"] > result["forwards before"] + 0.1),
    ("diffusion.py", {"epochs": 20}, lambda result: result["drawn"] > 0.8),  # by chance: 0.1
    ("reinforce.py", {"steps": 30}, lambda result: result["best"] > 3 * result["first"]),
    ("streaming.py", {"steps": 120}, lambda result: result[0] > 0.7 and result[1] == 0),  # equal when resumed
])  # fmt: skip
def test_example_learns(file: str, options: dict[str, Any], is_good: Callable[[Any], bool]) -> None:
    result = names_of(file)["main"](**options)
    assert is_good(result), result


@pytest.mark.slow
def test_tabular_frame_beats_linear_model() -> None:
    pytest.importorskip("pandas")
    results = names_of("tabular_frame.py")["main"](epochs=8)
    assert results["network"] > results["linear"] > 0.7


def test_images_augments_each_time() -> None:
    augmented = names_of("images.py")["Augmented"](torch.rand(1, 1, 8, 8), torch.zeros(1))
    assert not torch.equal(augmented[0][0], augmented[0][0])


def test_speech_ctc_ignores_padding() -> None:
    model, features = names_of("speech_ctc.py")["Recognizer"](), torch.rand(1, 9, 129)
    padded = torch.cat([features, torch.zeros(1, 4, 129)], dim=1)
    torch.testing.assert_close(model(padded)[:, :9], model(features))


def test_graphs_joins_without_mixing() -> None:
    example = names_of("graphs.py")
    graphs, model = example["draw"](3, seed=0), example["GraphNetwork"](rounds=2)
    apart = torch.cat([model(example["join"]([graph])) for graph in graphs])
    torch.testing.assert_close(model(example["join"](graphs)), apart)


def test_text_ignores_padding() -> None:
    model = names_of("text.py")["Classifier"](vocabulary=9).eval()
    torch.testing.assert_close(model(torch.tensor([[3, 4]])), model(torch.tensor([[3, 4, 0, 0]])))


def test_gan_resumes_bit_for_bit(tmp_path: Path) -> None:
    train, images = names_of("gan.py")["train"], torch.rand(100, 64)
    whole = train(images, 4, str(tmp_path / "whole"))
    train(images, 2, str(tmp_path / "in two"))
    torch.testing.assert_close(train(images, 4, str(tmp_path / "in two")), whole, rtol=0, atol=0)


def test_preferences_train_the_policy_only(tmp_path: Path) -> None:
    """The reference of the unit is in no optimizer and no checkpoint, and does not change."""
    example = names_of("preferences.py")
    policy = example["GPT2LMHeadModel"](example["GPT2Config"](**example["SHAPE"]))
    unit = example["Preference"](policy)
    before = copy.deepcopy(policy.state_dict())
    texts = {"chosen": example["count"](example["MINUTES"], 1), "rejected": example["count"](example["MINUTES"], -1)}
    options: dict[str, Any] = {"max_steps": 2, "learning_rate": 1e-2, "save_dir": tmp_path, "progress_bar": False}
    trainer = fit(Trainer(policy, texts, unit=unit, **options))
    torch.testing.assert_close(dict(unit.reference.state_dict()), dict(before), rtol=0, atol=0)
    assert not torch.equal(policy.transformer.wte.weight, before["transformer.wte.weight"])
    optimized = {id(weight) for group in trainer.optimizer.param_groups for weight in group["params"]}
    assert optimized == {id(weight) for weight in policy.parameters()}
    files = [load_file(file) for file in tmp_path.rglob("model.safetensors")]
    sizes = [sum(tensor.numel() for tensor in file.values()) for file in files]
    assert sizes and set(sizes) == {policy.num_parameters()}


@pytest.mark.parametrize("accumulation", [1, 2])
def test_reinforce_plays_with_current_weights(accumulation: int) -> None:
    example = names_of("reinforce.py")
    policy = torch.nn.Linear(4, 3)

    class Watched(example["Episodes"]):  # type: ignore[misc]
        def play(self) -> dict[str, torch.Tensor]:
            steps.append(trainer.progress.step)
            return super().play()

    steps: list[int] = []
    trainer = Trainer(
        policy, Watched(policy, rounds=3), unit=example["Reinforce"](policy), epochs=1, batch_size=16 // accumulation,
        gradient_accumulation_steps=accumulation, learning_rate=1e-2, progress_bar=False,
    )  # fmt: skip
    trainer.train()
    assert steps == [0, 1, 2]


def test_export_gives_the_same_outputs(capsys: pytest.CaptureFixture[str]) -> None:
    results = names_of("export.py")["main"](epochs=1)
    assert results.pop("accuracy") > 0.5
    assert results.keys() >= {"model.pt2"} and max(results.values()) < 1e-4
    assert "model.safetensors" in capsys.readouterr().out


def test_k_fold_holds_out_each_fold() -> None:
    assert names_of("k_fold.py")["main"](folds=3, epochs=6)["roc_auc"] > 0.97


def test_weighted_sampling_raises_balanced_accuracy() -> None:
    results = names_of("weighted_sampling.py")["main"](epochs=3)
    assert results["weighted"] > results["as they are"] + 0.1


@pytest.mark.slow
def test_three_trainers_agree(capsys: pytest.CaptureFixture[str]) -> None:
    assert max(names_of("three_trainers.py")["main"](epochs=2)) < 1e-6  # the losses and the weights
    steps = [line for line in capsys.readouterr().out.splitlines() if "took it to step" in line]
    assert [(line.split(" ")[0], line.split("step ")[1].split(",")[0]) for line in steps] == [
        ("Trainer", "33 of 94"), ("AccelerateTrainer", "65 of 94"), ("HFTrainer", "94 of 94"),
    ]  # fmt: skip


@pytest.mark.slow
def test_killed_and_moved_equals_uninterrupted(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    assert names_of("killed_and_moved.py")["main"](tmp_path / "run.svg") < 1e-6
    assert (tmp_path / "run.svg").stat().st_size > 10_000


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.skipif(not hasattr(os, "fork"), reason="a process that kills itself has another exit code on Windows")
def test_resume_ends_with_the_same_weights(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = programs.run(sys.executable, ROOT / "examples" / "resume.py", cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    kills = [line.split(",")[0].strip() for line in done.stdout.splitlines() if "killed after" in line]
    assert kills == [f"killed after step {step}" for step in (23, 67, 110)]
    assert done.stdout.count("equal to the bit") == 2
    assert not list(tmp_path.iterdir())
