"""HFTrainer on two processes, with transformers' arguments and models; its numbers on plain ones are in the matrix."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

sys.path[:0] = [str(Path(__file__).resolve().parent)]

from backends import Job, gap, launch, sound  # noqa: E402
from forking import Case, Outcome, mark, play  # noqa: E402
from recipes import Noisy, StopAt, Trace, rows, t16, weights  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback, TrainingArguments  # noqa: E402

from omnitrain import Callback, HFTrainer, Trainer  # noqa: E402

pytestmark = pytest.mark.distributed

HERE = "test_hf_two_processes"
CUT = 4


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


# --- what runs on every process, and on one


class Tokens(Dataset[dict[str, torch.Tensor]]):
    """Sequences of which the first tokens are a prompt without labels, longer or shorter; of some, everything."""

    def __init__(self, size: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.ids = torch.randint(3, 40, (size, 9), generator=generator)
        self.labels = self.ids.clone()
        for index in range(size):
            self.labels[index, : 1 + index * 5 % 12] = -100

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[index], "labels": self.labels[index]}


def llama(seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=40, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=1, max_position_embeddings=16, bos_token_id=1, eos_token_id=2, pad_token_id=0,
        )
    ).double()  # fmt: skip


def correct(prediction: Any) -> dict[str, float]:
    kept = prediction.label_ids != -100
    return {"accuracy": float((prediction.predictions == prediction.label_ids)[kept].mean()), "rows": len(kept)}


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
    history = [row["loss"] for row in trainer.engine.state.log_history if "loss" in row]
    return {
        "losses": [row["loss"] for row in trace.logs],
        "norms": [row["grad_norm"] for row in trace.logs],
        "theirs": history,
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
    """Save in the middle of an epoch, or go on from there; dropout is off, the data are noisy."""
    trainer = HFTrainer(
        t16(), None, Noisy(27), Noisy(5), loss_fn=F.mse_loss, learning_rate=0.05, epochs=2, save_dir=folder,
        batch_size=2, global_batch_size=8, save_steps=2, progress_bar=False, callbacks=[StopAt(CUT)] if cut else [],
        lr_scheduler="linear", load_best_at_end=False,
    )  # fmt: skip
    trainer.train(resume_from=None if cut else "auto")
    moments = [state[key] for state in trainer.optimizer.state_dict()["state"].values() for key in sorted(state)]
    rows_ = [[row["epoch"], row["step"], row["train_loss"]] for row in trainer.metrics["train_metrics_history"]]
    return {
        "state": [one.tolist() for one in (*weights(trainer.get_model()), *moments)],
        "history": rows_,
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
    output = trainer.evaluation_loop(trainer.get_test_dataloader(rows(11)), "Prediction", metric_key_prefix="own")
    shares = sum(len(labels) for _, labels in trainer.get_test_dataloader(rows(11)))
    return {
        "losses": [row["eval_loss"] for row in metrics["valid"]],
        "weights": [one.tolist() for one in weights(trainer.get_model())],
        "predictions": output.predictions.tolist(),
        "own": [output.metrics["own_loss"], output.num_samples],
        "shares": shares,
    }


class Counts(Callback):
    """Counts the exchanges of gradients in each step."""

    def __init__(self) -> None:
        self.count = 0
        self.seen: list[int] = []

    def on_epoch_start(self, trainer: Any) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

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
    """Search over the learning rate, with the second trial given up; then train as if nothing had been."""
    import optuna

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


class AsksOnRankOne(TrainerCallback):
    """Raises transformers' flags on the second process alone."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        control.should_save |= rank() == 1 and state.global_step == 2
        control.should_evaluate |= rank() == 1 and state.global_step == 3
        control.should_training_stop |= rank() == 1 and state.global_step == 5
        return control


def ask(backend: str, folder: str) -> dict[str, Any]:
    trainer = HFTrainer(
        t16(), None, rows(24), rows(3), loss_fn=F.mse_loss, epochs=2, save_dir=folder, batch_size=2, save_steps=100,
        keep_best=0, eval_steps=100, progress_bar=False, callbacks=[AsksOnRankOne()], load_best_at_end=False,
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
    jobs = [
        Job("speak", "hf2", f"{HERE}:speak", {"folder": str(folder / "speak")}),
        Job("stream", "hf2", f"{HERE}:stream"),
        Job("cut", "hf2", f"{HERE}:move", {"folder": str(folder / "from two"), "cut": True}),
        Job("moved", "hf2", f"{HERE}:move", {"folder": str(folder / "from one")}),
        Job("exchange", "hf2", f"{HERE}:exchange", {"has_length": True}),
        Job("exchange at once", "hf2", f"{HERE}:exchange", {"has_length": True, "folder": str(folder / "eager")}),
        Job("exchange of a stream", "hf2", f"{HERE}:exchange", {"has_length": False}),
        Job("prepare", "hf2", f"{HERE}:prepare"),
        Job("ask", "hf2", f"{HERE}:ask", {"folder": str(folder / "ask")}),
        Job("search", "hf2", f"{HERE}:search", {"folder": str(folder / "search")}),
    ]
    return sound(launch(jobs, folder / "launch"))


def test_a_language_model_with_masked_prompts_takes_the_steps_of_one_process(results: Any, folder: Path) -> None:
    expected = speak("hf", str(folder / "alone"))
    for found in results["speak"]:
        for name in ("losses", "norms", "weights"):
            assert gap(found[name], expected[name]) <= 1e-7, name  # transformers takes the loss in float32
        assert found["losses"] == results["speak"][0]["losses"]


def test_an_evaluation_of_uneven_size_counts_every_sample_once(results: Any, folder: Path) -> None:
    expected = speak("hf", str(folder / "alone"))
    for found in results["speak"]:
        assert [row["eval_rows"] for row in found["valid"]] == [7] * len(expected["valid"])
        assert gap(found["valid"], expected["valid"]) <= 1e-6
        assert (found["best"], found["predictions"]) == (expected["best"], expected["predictions"])


def test_transformers_own_history_has_the_mean_over_all_processes(results: Any, folder: Path) -> None:
    first, second = results["speak"]
    assert first["theirs"] == second["theirs"]
    assert gap(first["theirs"], first["losses"]) <= 1e-6


def test_a_stream_is_shared_out_as_the_native_trainer_reads_it(results: Any) -> None:
    expected = stream("native")
    for found in results["stream"]:
        assert gap(found, expected) <= 1e-10


def test_a_run_saved_on_two_processes_goes_on_on_one(results: Any, folder: Path) -> None:
    resumed = move("hf", str(folder / "from two"))
    straight = move("hf", str(folder / "straight"))
    assert resumed["step"] == straight["step"] == 8 and results["cut"][0]["step"] == CUT
    assert gap(resumed, straight) <= 1e-10


def test_a_run_saved_on_one_process_goes_on_on_two(results: Any, folder: Path) -> None:
    straight = move("hf", str(folder / "straight again"))
    for found in results["moved"]:
        assert gap(found, straight) <= 1e-10


def test_loaders_that_accelerate_has_prepared_are_shared_out_once(results: Any) -> None:
    expected = prepare("hf")
    assert expected.pop("shares") == expected["own"][1] == len(expected["predictions"]) == 11
    assert [found.pop("shares") for found in results["prepare"]] == [6, 6]  # who reads one himself gets a share
    for found in results["prepare"]:
        assert gap(found, expected) <= 1e-10


@pytest.mark.parametrize("name", ["exchange", "exchange of a stream"])
def test_gradients_are_exchanged_once_a_step(results: Any, name: str) -> None:
    for found in results[name]:
        assert found["seen"] == [1, 1, 1, 1]


def test_gradients_are_exchanged_at_once_where_that_is_asked_for(results: Any) -> None:
    for once, at_once in zip(results["exchange"], results["exchange at once"], strict=True):
        assert at_once["seen"] == [3, 3, 3, 2]
        assert gap(once["weights"], at_once["weights"]) <= 1e-10


def test_flags_that_one_process_raises_are_acted_on_by_all(results: Any) -> None:
    expected = {"saved": ["checkpoint-2", "checkpoint-5"], "valid": [3], "step": 5}
    assert results["ask"] == [expected, expected]


def test_a_search_on_two_processes_finds_what_one_finds(results: Any, folder: Path) -> None:
    expected = search("hf", str(folder / "search alone"))
    main, other = results["search"]
    assert len(expected["evaluations"]) == 3 + 2 + 3
    assert gap(main, expected) <= 1e-10
    assert other["best"] is None and gap({**other, "best": expected["best"]}, expected) <= 1e-10


@pytest.fixture(scope="module")
def outcomes(folder: Path) -> dict[str, list[Outcome]]:
    cases = [Case(how, f"{HERE}:perish", {"how": how, "folder": str(folder / how)}) for how in ("kill", "raise")]
    return play(cases, folder / "forking")


def test_a_process_that_is_killed_does_not_leave_the_other_waiting(outcomes: Any, folder: Path) -> None:
    left, killed = outcomes["kill"]
    assert killed.code == -signal.SIGKILL
    assert left.code == 1, left.output  # None would be: still there
    assert (folder / "kill" / "checkpoint-2" / "omnitrain.json").exists()


def test_an_error_on_one_process_is_told_by_the_other(outcomes: Any) -> None:
    other, failed = outcomes["raise"]
    assert (other.code, failed.code) == (1, 1), other.output
    assert "ValueError: boom" in failed.output
    assert "DistributedError: Rank 1 failed in train()" in other.output
