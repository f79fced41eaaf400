"""HFTrainer on two processes, with transformers' arguments and models: the numbers of one process."""

import os
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch
import torch.nn.functional as F
from backends import PROCESSES, Jobs, gap, launch_all, sound, tensors_of
from forking import current_rank
from recipes import rows, setting, t16
from tiny import Tokens, llama, t5
from torch.utils.data import DataLoader, DistributedSampler, default_collate
from transformers import Seq2SeqTrainingArguments, TrainerCallback, TrainingArguments

from omnitrain import HFTrainer


class Prepares(HFTrainer):
    """Hands its loaders to accelerate, as subclasses of transformers.Trainer do."""

    def _loader(self, dataset: Any) -> Any:
        loader = DataLoader(dataset, batch_size=8 // int(os.environ.get("WORLD_SIZE", "1")))
        return self.accelerator.prepare(loader)

    def get_train_dataloader(self) -> Any:
        return self._loader(self.train_dataset)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        return self._loader(self.eval_dataset if eval_dataset is None else eval_dataset)


def prepare(backend: str, folder: str) -> dict[str, Any]:
    """Train on 21 rows and evaluate 11 by loaders that accelerate has prepared; predict by transformers' loop."""
    trainer = Prepares(
        t16(), None, rows(21), rows(11), loss_fn=F.mse_loss, epochs=2, learning_rate=0.05, batch_size=2,
        progress_bar=False, load_best_at_end=False, data_collator=default_collate,
    )  # fmt: skip
    metrics = trainer.train()
    output = trainer.evaluation_loop(trainer.get_test_dataloader(rows(11)), "Prediction", metric_key_prefix="loop")
    return {
        "losses": [row["eval_loss"] for row in metrics["valid"]], "tensors": tensors_of(trainer),
        "predictions": output.predictions.tolist(), "loop": [output.metrics["loop_loss"], output.num_samples],
        "shares": sum(len(labels) for _, labels in trainer.get_test_dataloader(rows(11))),
    }  # fmt: skip


def search(backend: str, folder: str) -> dict[str, Any]:
    """Search over the learning rate, where the second trial is pruned; then train as without a search."""

    class PrunesSecond(optuna.pruners.BasePruner):
        def prune(self, study: Any, trial: Any) -> bool:
            return trial.number == 1 and len(trial.intermediate_values) == 2

    args = TrainingArguments(
        folder, per_device_train_batch_size=8 // PROCESSES[backend], max_steps=6, optim="sgd", eval_strategy="steps",
        eval_steps=2, save_strategy="no", use_cpu=True, report_to="none", disable_tqdm=True, learning_rate=0.01,
    )  # fmt: skip
    trainer = HFTrainer(
        None, args, rows(20), rows(10), loss_fn=F.mse_loss, progress_bar=False,
        model_init=lambda: t16(seed=current_rank()),
    )  # fmt: skip
    evaluations = []
    best = trainer.engine.hyperparameter_search(
        lambda trial: {"learning_rate": trial.suggest_float("learning_rate", 1e-3, 0.1, log=True)}, n_trials=3,
        sampler=optuna.samplers.RandomSampler(seed=0), pruner=PrunesSecond(), backend="optuna",
        compute_objective=lambda metrics: evaluations.append(metrics["eval_loss"]) or metrics["eval_loss"],
    )  # fmt: skip
    trainer.train()
    chosen = None if best is None else [best.run_id, best.objective, best.hyperparameters["learning_rate"]]
    return {"best": chosen, "evaluations": evaluations, "tensors": tensors_of(trainer)}


def flag(backend: str, folder: str) -> dict[str, Any]:
    """Set transformers' flags on the second process only."""
    steps = {"should_save": 2, "should_evaluate": 3, "should_training_stop": 5}
    flags = [
        setting(TrainerCallback, "on_step_end", name, step=step if current_rank() == 1 else -1)
        for name, step in steps.items()
    ]
    trainer = HFTrainer(
        t16(), None, rows(24), rows(3), loss_fn=F.mse_loss, epochs=2, save_dir=folder, batch_size=2, save_steps=100,
        keep_best=0, eval_steps=100, progress_bar=False, callbacks=flags, load_best_at_end=False,
    )  # fmt: skip
    metrics = trainer.train()
    saved = [path.name for path in trainer.store.checkpoints()]
    return {"saved": saved, "valid": [row["step"] for row in metrics["valid"]], "step": trainer.progress.step}


def arguments(backend: str, folder: str, **options: Any) -> Seq2SeqTrainingArguments:
    """Arguments for steps of 8 sequences, whatever the number of processes."""
    processes = PROCESSES[backend]
    defaults = {
        "per_device_train_batch_size": 1, "gradient_accumulation_steps": 8 // processes, "num_train_epochs": 1,
        "learning_rate": 0.5, "optim": "sgd", "save_strategy": "no", "use_cpu": True, "report_to": "none",
        "per_device_eval_batch_size": 2 // processes, "disable_tqdm": True,
    }  # fmt: skip
    return Seq2SeqTrainingArguments(folder, **{**defaults, **options})


def learn(backend: str, folder: str) -> dict[str, Any]:
    """Train on 15 sequences in full micro-batches of 4 over all processes, in the order of another seed."""
    args = arguments(
        backend, folder, label_smoothing_factor=0.2, dataloader_drop_last=True, data_seed=9, num_train_epochs=2,
        per_device_train_batch_size=4 // PROCESSES[backend], gradient_accumulation_steps=1,
    )  # fmt: skip
    trainer = HFTrainer(llama(), args, Tokens(15), Tokens(7))
    metrics = trainer.train()
    progress = [trainer.progress.step, trainer.progress.samples, trainer.progress.epochs]
    losses = [metrics["train_metrics_history"][0]["train_loss"], trainer.evaluate()["eval_loss"]]
    return {"progress": progress, "losses": losses, "tensors": tensors_of(trainer)}


def generate(backend: str, folder: str) -> dict[str, Any]:
    """Generate for 7 sequences; of the last batch one process has one, and the other none."""
    args = arguments(backend, folder, predict_with_generate=True, generation_max_length=30, eval_strategy="epoch")
    model = t5()
    model.generation_config.eos_token_id = list(range(2, 8))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4)
    calls: list[Any] = []

    def note(prediction: Any) -> dict[str, float]:
        calls.append((prediction.predictions.tolist(), prediction.label_ids.tolist()))
        return {"ends": float((prediction.predictions == 5).sum())}

    trainer = HFTrainer(model, args, Tokens(8, "pairs"), Tokens(7, "pairs"), compute_metrics=note)
    metrics = trainer.train()
    output = trainer.predict(Tokens(7, "pairs"))
    predictions = [output.predictions.tolist(), output.labels.tolist()]
    return {"valid": metrics["valid"], "predictions": predictions, "calls": calls}


def batches(backend: str, folder: str, shared: bool = False) -> dict[str, Any]:
    """Evaluate 7 sequences batch by batch; if `shared`, a sampler of PyTorch distributes them."""
    data, calls, size = Tokens(7), [], 4 // PROCESSES[backend]
    args = arguments(backend, folder, batch_eval_metrics=True, per_device_eval_batch_size=size)
    loader: Any = data
    if shared:
        sampler = DistributedSampler(data, shuffle=False) if PROCESSES[backend] > 1 else None
        loader = DataLoader(data, batch_size=size, sampler=sampler)

    def note(prediction: Any, compute_result: bool) -> dict[str, float]:
        calls.append([prediction.predictions.argmax(-1).tolist(), prediction.label_ids.tolist(), compute_result])
        return {"rows": float(sum(len(call[0]) for call in calls))} if compute_result else {}

    metrics = HFTrainer(llama(), args, compute_metrics=note).evaluate(loader)
    return {"metrics": metrics, "calls": calls}


def inputs(backend: str, folder: str) -> dict[str, Any]:
    calls: list[Any] = []

    def note(prediction: Any) -> dict[str, float]:
        calls.append([prediction.inputs.tolist(), prediction.losses.tolist()])
        return {"rows": len(prediction.inputs)}

    args = arguments(backend, folder, include_for_metrics=["inputs", "loss"], per_device_eval_batch_size=1)
    return {"metrics": HFTrainer(llama(), args, compute_metrics=note).evaluate(Tokens(7)), "calls": calls}


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[str, Any]:
    """What came of each function on two processes, and as "<name> single" on one."""
    jobs = Jobs()
    for function in (prepare, flag, search, learn, generate, batches, inputs):
        for name, backend in ((function.__name__, "hf2"), (f"{function.__name__} single", "hf")):
            jobs.add(name, backend, function, folder=str(folder / name))
    jobs.add("shared batches", "hf2", batches, folder=str(folder / "shared batches"), shared=True)
    return sound(launch_all(jobs, folder / "launch"))


def test_prepared_loaders_are_split_once(results: Any) -> None:
    (expected,) = results["prepare single"]
    assert expected.pop("shares") == expected["loop"][1] == len(expected["predictions"]) == 11
    assert [result.pop("shares") for result in results["prepare"]] == [6, 6]  # code that reads one gets a share
    assert all(gap(result, expected) <= 1e-10 for result in results["prepare"])


def test_flags_of_one_process_hold_for_all(results: Any) -> None:
    expected = {"saved": ["checkpoint-2", "checkpoint-5"], "valid": [3], "step": 5}
    assert results["flag"] == [expected, expected]


def test_search_on_two_processes_matches_one(results: Any) -> None:
    (expected,), (main, other) = results["search single"], results["search"]
    assert len(expected["evaluations"]) == 3 + 2 + 3
    assert gap(main, expected) <= 1e-10
    assert other["best"] is None and gap({**other, "best": expected["best"]}, expected) <= 1e-10


def test_smoothing_and_drop_last_match_one_process(results: Any) -> None:
    (expected,) = results["learn single"]
    assert expected["progress"] == [6, 24, 2]
    assert all(gap(rank, expected) <= 1e-7 for rank in results["learn"])  # transformers computes the loss in float32


def test_generated_answers_keep_the_order_of_the_data(results: Any) -> None:
    """`compute_metrics` gets them on the main process."""
    (expected,), ranks = results["generate single"], results["generate"]
    assert len({tuple(row) for row in expected["predictions"][0]}) > 1
    assert [rank["predictions"] for rank in ranks] == [expected["predictions"]] * 2
    assert all(gap(rank["valid"], expected["valid"]) <= 1e-6 for rank in ranks)
    assert [rank["calls"] for rank in ranks] == [expected["calls"], []]


@pytest.mark.parametrize("name", ["batches", "shared batches"])
def test_batch_metrics_get_the_batches_of_all_processes(results: Any, name: str) -> None:
    (expected,), (main, other) = results["batches single"], results[name]
    assert [len(batch[0]) for batch in expected["calls"]] == [4, 3]
    assert main["calls"] == expected["calls"] and other["calls"] == []
    assert main["metrics"] == other["metrics"] and gap(main["metrics"], expected["metrics"]) <= 1e-6


def test_inputs_and_losses_keep_the_order_of_the_data(results: Any) -> None:
    (expected,), (main, other) = results["inputs single"], results["inputs"]
    assert main["calls"][0][0] == expected["calls"][0][0] == Tokens(7).ids.tolist() and other["calls"] == []
    assert gap(main["calls"][0][1], expected["calls"][0][1]) <= 1e-6
    assert len(set(expected["calls"][0][1])) == 6  # two sequences have no label, and NaN as their loss
    assert gap(other["metrics"], expected["metrics"]) <= 1e-6
