"""HFTrainer on two processes, with transformers' arguments and models."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch.nn.functional as F
from backends import Job, gap, launch, sound
from forking import Case, mark, play
from recipes import Noisy, StopAt, Trace, rows, t16, weights
from tiny import Tokens, llama
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.utils.data import DataLoader, IterableDataset, default_collate
from transformers import TrainerCallback, TrainingArguments

from omnitrain import Callback, HFTrainer, Trainer

HERE = "test_hf_two_processes"
CUT = 4


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


# --- what runs on every process, and on one


def correct(prediction: Any) -> dict[str, float]:
    labelled = prediction.label_ids != -100
    hits = (prediction.predictions == prediction.label_ids)[labelled]
    return {"accuracy": float(hits.mean()), "rows": len(labelled)}


def speak(backend: str, folder: str) -> dict[str, Any]:
    """Train a language model with transformers' arguments; 29 sequences in steps of 8, 7 to evaluate."""
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    args = TrainingArguments(
        folder, per_device_train_batch_size=1, gradient_accumulation_steps=8 // processes, num_train_epochs=2,
        learning_rate=0.5, optim="sgd", lr_scheduler_type="cosine", warmup_steps=2, max_grad_norm=0.5,
        per_device_eval_batch_size=2, eval_strategy="steps", eval_steps=3, save_strategy="no", logging_steps=1,
        use_cpu=True, report_to="none", disable_tqdm=True,
    )  # fmt: skip
    trace = Trace()
    trainer = HFTrainer(
        llama(rank()), args, Tokens(29), Tokens(7), compute_metrics=correct, callbacks=[trace],
        preprocess_logits_for_metrics=lambda logits, _: logits.argmax(-1), optimization_metric="accuracy",
    )  # fmt: skip
    metrics = trainer.train()
    predictions = trainer.predict(Tokens(7))
    return {
        "losses": [row["loss"] for row in trace.logs],
        "norms": [row["grad_norm"] for row in trace.logs],
        "log_history": [row["loss"] for row in trainer.engine.state.log_history if "loss" in row],
        "valid": metrics["valid"],
        "best": metrics["best_step"],
        "predictions": predictions.predictions.tolist(),
        "weights": [parameter.tolist() for parameter in weights(trainer.get_model())],
    }


class Uneven(IterableDataset[Any]):
    """A stream of 21 rows."""

    def __iter__(self) -> Iterator[Any]:
        yield from zip(*rows(21).tensors, strict=True)


def stream(backend: str) -> dict[str, Any]:
    """Train on a stream, which each process reads its share of."""
    trace = Trace()
    options = {"device": "cpu"} if backend == "native" else {}
    kind: Any = Trainer if backend == "native" else HFTrainer
    trainer = kind(
        t16(), train_dataset=Uneven(), loss_fn=F.mse_loss, learning_rate=0.05, epochs=2, log_steps=1,
        batch_size=4 if backend == "native" else 2, progress_bar=False, callbacks=[trace], **options,
    )  # fmt: skip
    trainer.train()
    return {
        "losses": [row["loss"] for row in trace.logs],
        "weights": [one.tolist() for one in weights(trainer.get_model())],
    }


def move(backend: str, folder: str, cut: bool = False) -> dict[str, Any]:
    """Save in the middle of an epoch, or resume there; dropout is off, the data are noisy."""
    trainer = HFTrainer(
        t16(), None, Noisy(27), Noisy(5), loss_fn=F.mse_loss, learning_rate=0.05, epochs=2, save_dir=folder,
        batch_size=2, global_batch_size=8, save_steps=2, progress_bar=False, callbacks=[StopAt(CUT)] if cut else [],
        lr_scheduler="linear", load_best_at_end=False,
    )  # fmt: skip
    trainer.train(resume_from=None if cut else "auto")
    moments = [state[key] for state in trainer.optimizer.state_dict()["state"].values() for key in sorted(state)]
    history = trainer.metrics["train_metrics_history"]
    return {
        "state": [one.tolist() for one in (*weights(trainer.get_model()), *moments)],
        "history": [[row["epoch"], row["step"], row["train_loss"]] for row in history],
        "step": trainer.progress.step,
    }


class Prepares(HFTrainer):
    """Hands its loaders to accelerate, as subclasses of transformers.Trainer do."""

    def _loader(self, dataset: Any) -> Any:
        loader = DataLoader(dataset, batch_size=8 // int(os.environ.get("WORLD_SIZE", "1")))
        return self.accelerator.prepare(loader)

    def get_train_dataloader(self) -> Any:
        return self._loader(self.train_dataset)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        return self._loader(self.eval_dataset if eval_dataset is None else eval_dataset)


def prepare(backend: str) -> dict[str, Any]:
    """Train on 21 rows and evaluate 11 by loaders that accelerate has prepared; predict by transformers' loop."""
    trainer = Prepares(
        t16(), None, rows(21), rows(11), loss_fn=F.mse_loss, epochs=2, learning_rate=0.05, batch_size=2,
        progress_bar=False, load_best_at_end=False, data_collator=default_collate,
    )  # fmt: skip
    metrics = trainer.train()
    output = trainer.evaluation_loop(trainer.get_test_dataloader(rows(11)), "Prediction", metric_key_prefix="loop")
    shares = sum(len(labels) for _, labels in trainer.get_test_dataloader(rows(11)))
    return {
        "losses": [row["eval_loss"] for row in metrics["valid"]],
        "weights": [one.tolist() for one in weights(trainer.get_model())],
        "predictions": output.predictions.tolist(),
        "loop": [output.metrics["loop_loss"], output.num_samples],
        "shares": shares,
    }


class Counts(Callback):
    """Counts the exchanges of gradients in each step."""

    def __init__(self) -> None:
        self.count = 0
        self.seen: list[int] = []

    def on_epoch_start(self, trainer: Any) -> None:
        def hook(state: Any, bucket: Any) -> Any:
            self.count += 1
            return allreduce_hook(state, bucket)

        hook.__annotations__.clear()  # DDP compares them with classes, not with their names
        trainer.model_wrapped.register_comm_hook(None, hook)

    def on_step_start(self, trainer: Any) -> None:
        self.count = 0

    def on_step_end(self, trainer: Any) -> None:
        self.seen.append(self.count)


def exchange(backend: str, has_length: bool, folder: str = "") -> dict[str, Any]:
    """Train on windows of 3 micro-batches, the last one shorter; with a folder, gradients go out after each."""
    counts, args = Counts(), None
    if folder:
        eager = {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
        args = TrainingArguments(folder, accelerator_config=eager, save_strategy="no", use_cpu=True, report_to="none")
    trainer = HFTrainer(
        t16(), args, rows(21) if has_length else Uneven(), loss_fn=F.mse_loss, epochs=1, batch_size=1,
        gradient_accumulation_steps=3, progress_bar=False, callbacks=[counts], optimizer="adamw",
        learning_rate=0.01, lr_scheduler="constant",
    )  # fmt: skip
    trainer.train()
    return {"seen": counts.seen, "weights": [one.tolist() for one in weights(trainer.get_model())]}


def search(backend: str, folder: str) -> dict[str, Any]:
    """Search over the learning rate, where the second trial is pruned; then train as without a search."""

    class PrunesSecond(optuna.pruners.BasePruner):
        def prune(self, study: Any, trial: Any) -> bool:
            return trial.number == 1 and len(trial.intermediate_values) == 2

    processes = int(os.environ.get("WORLD_SIZE", "1"))
    args = TrainingArguments(
        folder, per_device_train_batch_size=8 // processes, max_steps=6, optim="sgd", eval_strategy="steps",
        eval_steps=2, save_strategy="no", use_cpu=True, report_to="none", disable_tqdm=True, learning_rate=0.01,
    )  # fmt: skip
    trainer = HFTrainer(
        None, args, rows(20), rows(10), loss_fn=F.mse_loss, model_init=lambda: t16(seed=rank()), progress_bar=False
    )
    evaluations = []
    best = trainer.engine.hyperparameter_search(
        lambda trial: {"learning_rate": trial.suggest_float("learning_rate", 1e-3, 0.1, log=True)}, n_trials=3,
        sampler=optuna.samplers.RandomSampler(seed=0), pruner=PrunesSecond(), backend="optuna",
        compute_objective=lambda metrics: evaluations.append(metrics["eval_loss"]) or metrics["eval_loss"],
    )  # fmt: skip
    trainer.train()
    return {
        "best": None if best is None else [best.run_id, best.objective, best.hyperparameters["learning_rate"]],
        "evaluations": evaluations,
        "weights": [one.tolist() for one in weights(trainer.get_model())],
    }


class FlagsOnRankOne(TrainerCallback):
    """Sets transformers' flags on the second process only."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        control.should_save |= rank() == 1 and state.global_step == 2
        control.should_evaluate |= rank() == 1 and state.global_step == 3
        control.should_training_stop |= rank() == 1 and state.global_step == 5
        return control


def flag(backend: str, folder: str) -> dict[str, Any]:
    trainer = HFTrainer(
        t16(), None, rows(24), rows(3), loss_fn=F.mse_loss, epochs=2, save_dir=folder, batch_size=2, save_steps=100,
        keep_best=0, eval_steps=100, progress_bar=False, callbacks=[FlagsOnRankOne()], load_best_at_end=False,
    )  # fmt: skip
    metrics = trainer.train()
    saved = [path.name for path in trainer.store.checkpoints()]
    return {"saved": saved, "valid": [row["step"] for row in metrics["valid"]], "step": trainer.progress.step}


def perish(how: str, folder: str) -> None:
    """Train until the second process is killed, or raises an error, after a step."""

    class Ends(Callback):
        def on_step_end(self, trainer: Any) -> None:
            if rank() == 1 and trainer.progress.step == 3:
                mark()
                if how == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                raise ValueError("boom")

    HFTrainer(
        t16(), None, rows(64), loss_fn=F.mse_loss, epochs=4, batch_size=4, save_dir=folder, save_steps=2,
        progress_bar=False, callbacks=[Ends()],
    ).train()  # fmt: skip


# --- what came of it


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hf")


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """One launch of two processes; what one process has saved is there before, what two have saved after."""
    move("hf", str(folder / "from one"), cut=True)
    options: dict[str, tuple[str, dict[str, Any]]] = {
        "speak": ("speak", {"folder": str(folder / "speak")}),
        "stream": ("stream", {}),
        "cut": ("move", {"folder": str(folder / "from two"), "cut": True}),
        "moved": ("move", {"folder": str(folder / "from one")}),
        "exchange": ("exchange", {"has_length": True}),
        "eager exchange": ("exchange", {"has_length": True, "folder": str(folder / "eager")}),
        "exchange of a stream": ("exchange", {"has_length": False}),
        "prepare": ("prepare", {}),
        "flag": ("flag", {"folder": str(folder / "flag")}),
        "search": ("search", {"folder": str(folder / "search")}),
    }
    jobs = [Job(name, "hf2", f"{HERE}:{function}", more) for name, (function, more) in options.items()]
    return sound(launch(jobs, folder / "launch"))


def test_language_model_matches_one_process(results: Any, folder: Path) -> None:
    """With masked prompts, and an evaluation that counts each of 7 samples once."""
    expected = speak("hf", str(folder / "single"))
    first, second = results["speak"]
    assert first["losses"] == second["losses"] and first["log_history"] == second["log_history"]
    assert gap(first["log_history"], first["losses"]) <= 1e-6
    for result in (first, second):
        for name in ("losses", "norms", "weights"):
            assert gap(result[name], expected[name]) <= 1e-7, name  # transformers computes the loss in float32
        assert [row["eval_rows"] for row in result["valid"]] == [7] * len(expected["valid"])
        assert gap(result["valid"], expected["valid"]) <= 1e-6
        assert (result["best"], result["predictions"]) == (expected["best"], expected["predictions"])


def test_stream_is_split_as_the_native_trainer_reads_it(results: Any) -> None:
    expected = stream("native")
    assert all(gap(result, expected) <= 1e-10 for result in results["stream"])


def test_run_resumes_on_another_number_of_processes(results: Any, folder: Path) -> None:
    straight = move("hf", str(folder / "straight"))
    resumed = move("hf", str(folder / "from two"))
    assert resumed["step"] == straight["step"] == 8 and results["cut"][0]["step"] == CUT
    assert all(gap(result, straight) <= 1e-10 for result in (resumed, *results["moved"]))


def test_prepared_loaders_are_split_once(results: Any) -> None:
    expected = prepare("hf")
    assert expected.pop("shares") == expected["loop"][1] == len(expected["predictions"]) == 11
    assert [result.pop("shares") for result in results["prepare"]] == [6, 6]  # code that reads one gets a share
    assert all(gap(result, expected) <= 1e-10 for result in results["prepare"])


def test_gradients_are_exchanged_once_a_step(results: Any) -> None:
    """Or after each micro-batch, if the arguments say so."""
    for lazy, eager in zip(results["exchange"], results["eager exchange"], strict=True):
        assert (lazy["seen"], eager["seen"]) == ([1, 1, 1, 1], [3, 3, 3, 2])
        assert gap(lazy["weights"], eager["weights"]) <= 1e-10
    assert all(result["seen"] == [1, 1, 1, 1] for result in results["exchange of a stream"])


def test_flags_of_one_process_hold_for_all(results: Any) -> None:
    expected = {"saved": ["checkpoint-2", "checkpoint-5"], "valid": [3], "step": 5}
    assert results["flag"] == [expected, expected]


def test_search_on_two_processes_matches_one(results: Any, folder: Path) -> None:
    expected = search("hf", str(folder / "single search"))
    main, other = results["search"]
    assert len(expected["evaluations"]) == 3 + 2 + 3
    assert gap(main, expected) <= 1e-10
    assert other["best"] is None and gap({**other, "best": expected["best"]}, expected) <= 1e-10


@pytest.mark.parametrize("how", ["kill", "raise"])
def test_failure_of_one_process_ends_the_other(how: str, tmp_path: Path) -> None:
    case = Case(how, f"{HERE}:perish", {"how": how, "folder": str(tmp_path / "run")})
    other, failed = play([case], tmp_path / "forking")[how]
    assert other.code == 1, other.output  # None if it still waits
    if how == "kill":
        assert failed.code == -signal.SIGKILL
        assert (tmp_path / "run" / "checkpoint-2" / "omnitrain.json").exists()
    else:
        assert failed.code == 1 and "ValueError: boom" in failed.output
        assert "DistributedError: Rank 1 failed in train()" in other.output
