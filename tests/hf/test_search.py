"""`model_init`, which makes a new model for each run, and searches for hyperparameters."""

import random
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from recipes import Noisy, StopAt, callback, fit, rows, same, t16, weights
from torch import nn
from transformers import TrainerCallback

from omnitrain import Callback, HFTrainer
from omnitrain.core.errors import ConfigError
from omnitrain.model.units import ModelUnit

optuna = pytest.importorskip("optuna")

RATES = [0.3, 0.001, 0.05]
DEFAULTS = {
    "max_steps": 4, "per_device_train_batch_size": 4, "learning_rate": 0.05, "eval_strategy": "steps", "eval_steps": 2,
    "logging_steps": 2, "seed": 3,
}  # fmt: skip
"""20 rows in steps of 4, an evaluation every other step."""


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.CRITICAL)
    yield
    optuna.logging.set_verbosity(before)


def fresh() -> nn.Module:
    """A model whose weights come from the generators of the program, and which draws from them in training."""
    body = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 1)).double()
    with torch.no_grad():
        body[3].bias.add_(random.random() + np.random.rand())
    return body


def noting(models: list[Any]) -> Any:
    """Return a `model_init` that keeps its models."""

    def init() -> nn.Module:
        models.append(fresh())
        return models[-1]

    return init


def counting(events: list[str], base: Any = TrainerCallback, *names: str) -> Any:
    """Return a callback that notes these events, or those of steps and of the start of a run."""
    names = names or ("on_train_begin", "on_step_end")
    return callback(base, **{name: lambda *_, name=name, **__: events.append(name) for name in names})


def build(args: Any = None, kind: Any = HFTrainer, **options: Any) -> Any:
    options = {"loss_fn": F.mse_loss, "progress_bar": False, "eval_dataset": rows(10), **options}
    options = {"model_init": fresh, **options} if "model" not in options else options
    return kind(training_args=args, train_dataset=Noisy(20), **options)


def weights_of(trainer: Any) -> list[torch.Tensor]:
    return weights(trainer.get_model())


def by_rate(trial: Any) -> dict[str, Any]:
    return {"learning_rate": trial.suggest_float("learning_rate", 1e-3, 0.3, log=True)}


def search(trainer: Any, **options: Any) -> Any:
    """Three trials, of the three rates in turn."""
    grid = optuna.samplers.GridSampler({"learning_rate": RATES}, seed=0)
    defaults = {"hp_space": by_rate, "n_trials": 3, "backend": "optuna", "sampler": grid}
    return trainer.engine.hyperparameter_search(**{**defaults, **options})


# --- model_init


def draws() -> tuple[float, ...]:
    return torch.rand(1).item(), random.random(), np.random.rand()


def test_model_init_is_called_after_the_seed(arguments: Any) -> None:
    """That of either side; the generators of the program are unchanged."""
    transformers.set_seed(11)
    expected = draws()
    transformers.set_seed(11)
    trainers = build(arguments()), build(seed=3, eval_dataset=None), build(seed=6, eval_dataset=None)
    assert draws() == expected
    transformers.set_seed(3)
    plain = build(arguments(), model=fresh(), model_init=None)
    assert [same(weights_of(trainer), weights_of(plain)) for trainer in trainers] == [True, True, False]
    assert trainers[0].train() == plain.train() and same(weights_of(trainers[0]), weights_of(plain))


def test_model_init_makes_a_new_model_for_each_run(arguments: Any) -> None:
    models, events = list[Any](), list[str]()
    trainer = build(arguments(optim="sgd"), model_init=noting(models))
    trainer.engine.add_callback(counting(events))
    results = []
    for run in (1, 2):
        unit = trainer.unit
        results.append((dict(trainer.train()), weights_of(trainer)))
        assert trainer.get_model() is models[-1] and len(models) == 1 + run
        assert isinstance(trainer.unit, ModelUnit) and trainer.unit is not unit
    assert results[0][0] == results[1][0] and same(results[0][1], results[1][1])
    assert isinstance(trainer.optimizer, torch.optim.SGD)
    assert events.count("on_step_end") == 8  # what was added to the engine stays


def test_model_init_is_called_unless_a_checkpoint_is_resumed(arguments: Any) -> None:
    fields = {"save_strategy": "steps", "save_steps": 3}
    straight = build(arguments("straight", **fields))
    metrics = straight.train()
    args, models = arguments("parts", **fields), list[Any]()
    build(args, callbacks=[StopAt(3)]).train()
    resumed = build(args, model_init=noting(models))
    assert resumed.train(resume_from="auto") == metrics
    assert len(models) == 1 and same(weights_of(resumed), weights_of(straight))
    empty = build(arguments("empty", **fields), model_init=noting(models))
    with torch.no_grad():
        models[1][0].weight.zero_()  # of which the run must not start
    empty.train(resume_from="auto")
    assert len(models) == 3 and empty.get_model() is models[-1]
    assert same(weights_of(empty), weights_of(straight))


def test_model_init_may_take_the_trial(arguments: Any) -> None:
    trials: list[Any] = []
    search(build(arguments(max_steps=1), model_init=lambda trial: trials.append(trial) or fresh()), n_trials=1)
    assert trials[0] is None and trials[-1].params.keys() == {"learning_rate"}  # outside of a search, and in it


@pytest.mark.parametrize(("options", "message"), [
    ({"model_init": None}, "needs `model` or `model_init`, and neither is given. Pass one of them"),
    ({"model": t16(), "model_init": fresh}, "needs `model` or `model_init`, and both are given. Pass one of them"),
    ({"model_init": lambda trial, size: fresh()}, "must take no argument, or one.* It takes trial, size"),
    ({"model_init": lambda: None}, "must return an nn.Module, got NoneType"),
    ({"model_init": 3}, "must be a function that returns a model, got int"),
    ({"optimizer": torch.optim.SGD(t16().parameters(), lr=0.1)}, "`optimizer` belongs to one model"),
    ({"unit": lambda batch: None}, "`unit` has its own model"),
])  # fmt: skip
def test_model_init_rejects_what_makes_no_models(arguments: Any, options: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(arguments(), **options)


# --- a search


def test_search_finds_the_best_of_a_loop_over_trainers(arguments: Any) -> None:
    trainer, events = build(arguments()), list[str]()
    trainer.engine.add_callback(counting(events))
    best = search(trainer)
    losses = {rate: build(arguments(learning_rate=rate)).train()["valid"][-1]["eval_loss"] for rate in RATES}
    rate = min(losses, key=losses.__getitem__)
    assert best.hyperparameters == {"learning_rate": rate} and best.objective == losses[rate]
    assert len(set(losses.values())) == 3 and events.count("on_train_begin") == 3
    assert trainer.train() == build(arguments()).train()  # with the arguments of before the search
    options = {"direction": ["minimize", "maximize"], "compute_objective": lambda metrics: [metrics["eval_loss"]] * 2}
    assert len(search(build(arguments(max_steps=1)), n_trials=2, **options)) == 2


def test_search_repeats_with_a_seeded_sampler(arguments: Any) -> None:
    def space(trial: Any) -> dict[str, Any]:
        size = trial.suggest_categorical("per_device_train_batch_size", [2, 4])
        return {**by_rate(trial), "per_device_train_batch_size": size, "seed": trial.suggest_int("seed", 1, 40)}

    def find() -> Any:
        random.random()  # as the rest of the program continues too
        sampler = optuna.samplers.TPESampler(seed=1, n_startup_trials=2)
        trainer = build(arguments(max_steps=2))
        return trainer.hyperparameter_search(space, n_trials=3, sampler=sampler, backend="optuna")

    assert find() == find()


def test_trial_has_its_values_and_its_folder(arguments: Any, tmp_path: Path) -> None:
    runs: list[Any] = []
    args = arguments(save_strategy="epoch", max_steps=-1)
    trainer = build(args, callbacks=[callback(on_train_end=runs.append)], save_dir=args.output_dir)
    values = {"num_train_epochs": 1, "per_device_train_batch_size": 5, "seed": 9, "bf16": True, "optim": "sgd"}
    values |= {"lr_scheduler_type": "cosine"}
    search(trainer, hp_space=lambda trial: {**by_rate(trial), **values}, n_trials=2)
    first, second, folder = *runs, tmp_path / "run"
    assert (first.progress.step, first.batch_size, first.seed, first.precision.name) == (4, 5, 9, "bf16")
    assert isinstance(first.optimizer, torch.optim.SGD) and first.settings.lr_scheduler == "cosine"
    assert (folder / "run-0" / "checkpoint-4" / "omnitrain.json").exists()
    assert sorted(path.name for path in folder.iterdir()) == ["run-0", "run-1"]
    assert first.get_model() is not second.get_model()
    assert trainer.progress.step == 0 and trainer.training_args is args and args.output_dir == str(folder)
    assert trainer.engine.model is trainer.get_model()


class Scaled(HFTrainer):
    """A subclass with another argument, and callbacks from a generator."""

    def __init__(self, scale: float, callbacks: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, callbacks=(each for each in callbacks), **kwargs)
        self.scale = scale

    def _prepare_batch(self, batch: Any) -> Any:
        inputs, labels = super()._prepare_batch(batch)
        return inputs, labels * self.scale


def test_trial_has_the_arguments_of_the_trainer(arguments: Any) -> None:
    scores, events, trials = list[dict[str, float]](), list[str](), list[Any]()

    def error(outputs: Any) -> dict[str, float]:
        return {"error": float(np.abs(outputs.predictions - outputs.label_ids).mean())}

    def note(args: Any, state: Any, *_: Any, **__: Any) -> None:
        trials.append((state.is_hyper_param_search, state.trial_name, state.trial_params))

    counts = counting(events, Callback, "on_step_end", "on_train_end")
    options = {"scale": 3.0, "compute_metrics": error, "patience": 1}
    callbacks = [counts, callback(TrainerCallback, on_train_begin=note)]
    trainer = build(arguments(max_steps=6), Scaled, callbacks=callbacks, **options)
    best = search(
        trainer,
        compute_objective=lambda metrics: scores.append(metrics) or metrics["eval_error"],
        hp_name=lambda trial: f"rate-{trial.params['learning_rate']}",
    )
    expected = build(arguments(max_steps=6, **best.hyperparameters), Scaled, callbacks=[], **options)
    assert expected.train()["valid"][-1]["eval_error"] == best.objective
    assert {*scores[0]} == {"eval_loss", "eval_error"}
    assert events.count("on_train_end") == 3 and events.count("on_step_end") == 2 * len(scores)
    assert sorted(trials) == sorted((True, f"rate-{rate}", {"learning_rate": rate}) for rate in RATES)


class PrunesSecond(optuna.pruners.BasePruner):
    """Prunes the second trial at its second evaluation."""

    def __init__(self) -> None:
        self.reported: dict[int, dict[int, float]] = {}

    def prune(self, study: Any, trial: Any) -> bool:
        self.reported[trial.number] = dict(trial.intermediate_values)
        return trial.number == 1 and len(trial.intermediate_values) == 2


def test_pruned_trial_ends_at_once_and_leaves_nothing_open(arguments: Any, tmp_path: Path, monkeypatch: Any) -> None:
    events: list[Any] = []

    def check_folders(trainer: Any) -> None:
        assert len(list(tmp_path.glob("omnitrain-*"))) == 2  # of the search and of this trial

    ours = callback(
        order=99,
        on_train_start=check_folders,
        on_exception=lambda trainer, error: events.append(type(error)),
        on_train_end=lambda trainer: events.append(trainer.progress.step),
    )
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    threads, handler, pruner = threading.active_count(), signal.getsignal(signal.SIGTERM), PrunesSecond()
    args = arguments(save_strategy="steps", save_steps=4, max_steps=6)
    stock = counting(events, TrainerCallback, "on_evaluate", "on_train_end")
    best = search(build(args, callbacks=[ours, stock]), pruner=pruner)
    assert {number: [*values] for number, values in pruner.reported.items()} == {0: [2, 4, 6], 1: [2, 4], 2: [2, 4, 6]}
    assert best.run_id in ("0", "2") and best.objective == pruner.reported[int(best.run_id)][6]
    full = [*["on_evaluate"] * 3, "on_train_end", 6]
    assert events == [*full, *["on_evaluate"] * 2, "on_train_end", optuna.TrialPruned, 4, *full]
    assert len(list(tmp_path.glob("omnitrain-*"))) <= 1
    assert threading.active_count() == threads
    assert signal.getsignal(signal.SIGTERM) is handler


def test_trial_is_evaluated_at_its_end(arguments: Any) -> None:
    best = search(build(arguments(eval_strategy="no")), n_trials=1)
    expected = fit(build(arguments(eval_strategy="no", **best.hyperparameters)))
    assert expected.evaluate()["eval_loss"] == best.objective


def test_trial_that_diverges_fails_and_the_search_continues(arguments: Any, caplog: pytest.LogCaptureFixture) -> None:
    rates = iter([1e200, 0.05, 0.1])
    best = search(build(arguments(optim="sgd")), hp_space=lambda trial: {"learning_rate": next(rates)}, sampler=None)
    assert best.run_id in ("1", "2")
    assert [text for text in caplog.messages if "Trial run-0 has failed: " in text]


@pytest.mark.parametrize(("trainer_options", "options", "message"), [
    ({"model": t16(), "model_init": None}, {}, "needs `model_init`, which makes the model of each trial"),
    ({"eval_dataset": None}, {}, "needs `eval_dataset`, which gives the score of each trial"),
    ({"args": None}, {}, "needs `training_args`, which have the fields that a trial changes"),
    ({}, {"backend": "ray"}, "backend='ray' would send the trainer to other processes.*backend='optuna'"),
    ({}, {"n_jobs": 2}, "n_jobs=2 would make trials share a random generator"),
    ({}, {"hp_space": lambda trial: {"learning_rat": 0.1}},
     "'learning_rat', which is not a field.*Did you mean 'learning_rate'"),
    ({}, {"hp_space": lambda trial: None}, "must return a dict of training arguments, got None"),
])  # fmt: skip
def test_search_is_rejected_before_the_first_step(
    arguments: Any, trainer_options: Any, options: Any, message: str
) -> None:
    events: list[str] = []
    callbacks = [counting(events)]
    trainer = build(**{"args": arguments(eval_strategy="no"), "callbacks": callbacks, **trainer_options})
    with pytest.raises(ConfigError, match=message):
        search(trainer, **options)
    assert events == []
    with pytest.raises(ConfigError, match=r"Call HFTrainer\.train"):
        trainer.engine.train()


def test_trials_of_the_same_name_have_different_folders(arguments: Any, tmp_path: Path) -> None:
    trainer = build(arguments(save_strategy="steps", save_steps=1, max_steps=1))
    for _ in range(2):  # a second search starts over
        search(trainer, hp_name=lambda trial: "mine", n_trials=2)
        assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["mine", "mine-2"]
        assert len(list((tmp_path / "run").glob("*/checkpoint-1"))) == 2
        shutil.rmtree(tmp_path / "run")


def test_search_prints_rows_if_the_trainer_does(arguments: Any, capsys: Any) -> None:
    for progress_bar in (False, None):
        search(build(arguments(disable_tqdm=True), progress_bar=progress_bar), n_trials=1)
        assert ("eval_loss" in capsys.readouterr().out) is (progress_bar is None)
