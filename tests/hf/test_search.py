"""Models that are made anew, for each run and for each trial of a search."""

from __future__ import annotations

import random
import shutil
import signal
import threading
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from recipes import Noisy, StopAt, rows, same, t16, weights
from torch import nn
from transformers import TrainerCallback, TrainingArguments

from omnitrain import Callback, HFTrainer
from omnitrain.errors import ConfigError
from omnitrain.hf.model_init import new_model
from omnitrain.units import ModelUnit

optuna = pytest.importorskip("optuna")

RATES = [0.3, 0.001, 0.05]


@pytest.fixture(autouse=True)
def _quiet() -> Any:
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.CRITICAL)
    yield
    optuna.logging.set_verbosity(before)


@pytest.fixture
def arguments(tmp_path: Path) -> Any:
    """Makes TrainingArguments: 20 rows in steps of 4, an evaluation every other step."""

    def make(**options: Any) -> TrainingArguments:
        defaults = {
            "output_dir": str(tmp_path / "run"), "num_train_epochs": 2, "per_device_train_batch_size": 4,
            "learning_rate": 0.05, "eval_strategy": "steps", "eval_steps": 2, "save_strategy": "no",
            "logging_steps": 2, "use_cpu": True, "report_to": "none", "seed": 3,
        }  # fmt: skip
        return TrainingArguments(**{**defaults, **options})

    return make


def fresh() -> nn.Module:
    """A model whose weights come from the generators of the program, and which draws from them in training."""
    body = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 1)).double()
    with torch.no_grad():
        body[3].bias.add_(random.random() + np.random.rand())
    return body


def build(args: Any = None, kind: Any = HFTrainer, **options: Any) -> Any:
    options = {"loss_fn": F.mse_loss, "progress_bar": False, "eval_dataset": rows(10), **options}
    options = {"model_init": fresh, **options} if "model" not in options else options
    return kind(training_args=args, train_dataset=Noisy(20), **options)


def by_rate(trial: Any) -> dict[str, Any]:
    return {"learning_rate": trial.suggest_float("learning_rate", 1e-3, 0.3, log=True)}


def search(trainer: Any, **options: Any) -> Any:
    """Three trials, of the three rates in turn."""
    grid = optuna.samplers.GridSampler({"learning_rate": RATES}, seed=0)
    defaults = {"hp_space": by_rate, "n_trials": 3, "backend": "optuna", "sampler": grid}
    return trainer.engine.hyperparameter_search(**{**defaults, **options})


# --- model_init


@pytest.mark.parametrize("given", [{}, {"model": t16(), "model_init": fresh}])
def test_exactly_one_of_model_and_model_init_says_what_to_train(given: dict[str, Any], arguments: Any) -> None:
    said = "both are" if given else "neither is"
    with pytest.raises(ConfigError, match=f"needs `model` or `model_init`, and {said} given. Pass one of them"):
        HFTrainer(**given, training_args=arguments(), train_dataset=rows(20))


def test_a_run_with_model_init_is_that_of_a_model_made_after_the_same_seed(arguments: Any) -> None:
    made = build(arguments())
    transformers.set_seed(3)
    given = build(arguments(), model=fresh(), model_init=None)
    assert same(weights(made.get_model()), weights(given.get_model()))
    assert made.train() == given.train()
    assert same(weights(made.get_model()), weights(given.get_model()))


def test_without_training_arguments_the_seed_of_the_trainer_makes_the_model() -> None:
    one, other = build(seed=5, eval_dataset=None), build(seed=6, eval_dataset=None)
    transformers.set_seed(5)
    alike = weights(fresh())
    assert same(weights(one.get_model()), alike)
    assert not same(weights(other.get_model()), alike)


def test_making_a_model_leaves_the_random_numbers_of_the_program_alone() -> None:
    transformers.set_seed(11)
    expected = torch.rand(1), random.random(), np.random.rand()
    transformers.set_seed(11)
    new_model(fresh, None, 3, torch.device("cpu"))
    assert (torch.rand(1), random.random(), np.random.rand()) == expected


def test_each_run_begins_with_a_new_model_and_is_the_same_run(arguments: Any) -> None:
    made = []

    def model_init() -> nn.Module:
        made.append(fresh())
        return made[-1]

    trainer = build(arguments(optim="sgd"), model_init=model_init)
    first = trainer.train()
    assert trainer.get_model() is made[-1] and len(made) == 2
    after = weights(trainer.get_model())
    assert trainer.train() == first
    assert trainer.get_model() is made[-1] and len(made) == 3
    assert same(weights(trainer.get_model()), after)
    assert isinstance(trainer.optimizer, torch.optim.SGD)


def test_what_was_added_to_the_engine_stays_when_the_model_is_made_anew(arguments: Any) -> None:
    class Counts(TrainerCallback):
        steps = 0

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            self.steps += 1

    counts = Counts()
    trainer = build(arguments())
    trainer.engine.add_callback(counts)
    trainer.train()
    trainer.train()
    assert counts.steps == 20


def test_a_resumed_run_makes_no_new_model_and_goes_on_to_the_bit(arguments: Any, tmp_path: Path) -> None:
    straight = build(arguments(save_strategy="steps", save_steps=3))
    metrics = straight.train()
    args = arguments(save_strategy="steps", save_steps=3, output_dir=str(tmp_path / "parts"))
    build(args, callbacks=[StopAt(7)]).train()
    made = []
    second = build(args, model_init=lambda: made.append(fresh()) or made[-1])
    assert second.train(resume_from="auto") == metrics
    assert len(made) == 1
    assert same(weights(second.get_model()), weights(straight.get_model()))


def test_a_resume_that_finds_nothing_is_a_fresh_start(arguments: Any) -> None:
    made = []
    args = arguments(save_strategy="steps", save_steps=30)
    trainer = build(args, model_init=lambda: made.append(fresh()) or made[-1])
    with torch.no_grad():
        made[0][0].weight.zero_()  # of which the run must not start
    trainer.train(resume_from="auto")
    other = build(arguments())
    other.train()
    assert len(made) == 2 and trainer.get_model() is made[-1]
    assert same(weights(trainer.get_model()), weights(other.get_model()))


def test_model_init_may_take_the_trial_which_is_none_outside_of_a_search(arguments: Any) -> None:
    seen = []

    def model_init(trial: Any) -> nn.Module:
        seen.append(trial)
        return fresh()

    build(arguments(), model_init=model_init)
    assert seen == [None]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"model_init": lambda trial, size: fresh()}, "must take no argument, or one.* It takes trial, size"),
        ({"model_init": lambda: None}, "must return an nn.Module, got NoneType"),
        ({"model_init": t16()}, "must be a function that returns a model, got Sequential"),
        ({"model_init": 3}, "must be a function that returns a model, got int"),
        ({"optimizer": torch.optim.SGD(t16().parameters(), lr=0.1)}, "`optimizer` belongs to one model"),
        ({"unit": lambda batch: None}, "`unit` has a model of its own"),
    ],
)
def test_what_cannot_make_a_model_for_each_run_is_refused(arguments: Any, options: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build(arguments(), **options)


# --- a search


def test_a_search_finds_what_a_loop_over_trainers_finds(arguments: Any) -> None:
    trainer = build(arguments())
    best = search(trainer)
    found = {}
    for rate in RATES:
        one = build(arguments(learning_rate=rate))
        found[rate] = one.train()["valid"][-1]["eval_loss"]
    rate = min(found, key=found.__getitem__)
    assert best.hyperparameters == {"learning_rate": rate}
    assert best.objective == found[rate]
    assert len(set(found.values())) == 3


def test_a_search_with_a_seeded_sampler_finds_the_same_twice(arguments: Any) -> None:
    def find() -> Any:
        random.random()  # as the rest of the program goes on too
        return build(arguments(max_steps=2)).hyperparameter_search(
            lambda trial: {
                **by_rate(trial),
                "per_device_train_batch_size": trial.suggest_categorical("per_device_train_batch_size", [2, 4]),
                "seed": trial.suggest_int("seed", 1, 40),
            },
            n_trials=4, sampler=optuna.samplers.TPESampler(seed=1, n_startup_trials=2), backend="optuna",
        )  # fmt: skip

    assert find() == find()


def test_a_trial_is_a_run_with_its_values_and_a_folder_of_its_own(arguments: Any, tmp_path: Path) -> None:
    runs = []

    class Notes(Callback):
        def on_train_end(self, trainer: Any) -> None:
            runs.append(trainer)

    args = arguments(save_strategy="epoch")
    trainer = build(args, callbacks=[Notes()], save_dir=args.output_dir)
    values = {"num_train_epochs": 1, "per_device_train_batch_size": 5, "seed": 9, "bf16": True, "optim": "sgd",
              "lr_scheduler_type": "cosine"}  # fmt: skip
    search(trainer, hp_space=lambda trial: {**by_rate(trial), **values}, n_trials=2)
    first, second, folder = *runs, tmp_path / "run"
    assert (first.progress.step, first.batch_size, first.seed, first.precision.name) == (4, 5, 9, "bf16")
    assert isinstance(first.optimizer, torch.optim.SGD)
    assert first.settings.lr_scheduler == "cosine"
    assert (folder / "run-0" / "checkpoint-4" / "omnitrain.json").exists()
    assert sorted(path.name for path in folder.iterdir()) == ["run-0", "run-1"]
    assert first.get_model() is not second.get_model()
    assert trainer.progress.step == 0 and trainer.training_args is args and args.output_dir == str(folder)
    assert trainer.engine.model is trainer.get_model()


def test_the_trainer_can_train_after_a_search(arguments: Any) -> None:
    trainer = build(arguments())
    best = search(trainer)
    for name, value in best.hyperparameters.items():
        setattr(trainer.training_args, name, value)
    assert build(trainer.training_args).train()["valid"][-1]["eval_loss"] == best.objective
    plain = build(arguments())
    setattr(trainer.training_args, "learning_rate", 0.05)  # noqa: B010
    assert trainer.train() == plain.train()


def test_what_the_user_gave_holds_in_each_trial(arguments: Any) -> None:
    class Counts(Callback):
        steps, ended = 0, 0

        def on_step_end(self, trainer: Any) -> None:
            self.steps += 1

        def on_train_end(self, trainer: Any) -> None:
            self.ended += 1

    class Theirs(TrainerCallback):
        names: ClassVar[list[Any]] = []

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.names.append((state.is_hyper_param_search, state.trial_name, state.trial_params))

    class Mine(HFTrainer):
        def __init__(self, scale: float, *args: Any, **kwargs: Any) -> None:
            self.callback = Counts()
            super().__init__(*args, callbacks=(one for one in (self.callback, Theirs())), **kwargs)
            self.scale = scale

        def _prepare_batch(self, batch: Any) -> Any:
            inputs, labels = super()._prepare_batch(batch)
            return inputs, labels * self.scale

    def error(outputs: Any) -> dict[str, float]:
        return {"error": float(np.abs(outputs.predictions - outputs.label_ids).mean())}

    trainer = build(arguments(), Mine, scale=3.0, compute_metrics=error, patience=1)
    seen: list[dict[str, float]] = []
    best = search(
        trainer, compute_objective=lambda metrics: seen.append(metrics) or metrics["eval_error"],
        hp_name=lambda trial: f"rate-{trial.params['learning_rate']}",
    )  # fmt: skip
    one = build(arguments(**best.hyperparameters), Mine, scale=3.0, compute_metrics=error, patience=1)
    assert one.train()["valid"][-1]["eval_error"] == best.objective
    assert {*seen[0]} == {"eval_loss", "eval_error"}
    assert trainer.callback.ended == 3 and trainer.callback.steps == 2 * len(seen)
    assert sorted(Theirs.names[:3]) == sorted((True, f"rate-{rate}", {"learning_rate": rate}) for rate in RATES)


def test_a_callback_that_the_engine_was_given_hears_each_trial(arguments: Any) -> None:
    class Begins(TrainerCallback):
        times = 0

        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            self.times += 1

    begins = Begins()
    trainer = build(arguments(max_steps=2))
    trainer.engine.add_callback(begins)
    search(trainer)
    assert begins.times == 3


class PrunesSecond(optuna.pruners.BasePruner):
    """Gives the second trial up at its second evaluation."""

    def __init__(self) -> None:
        self.reported: dict[int, dict[int, float]] = {}

    def prune(self, study: Any, trial: Any) -> bool:
        self.reported[trial.number] = dict(trial.intermediate_values)
        return trial.number == 1 and len(trial.intermediate_values) == 2


def test_a_trial_that_is_pruned_ends_at_once_and_leaves_nothing_open(arguments: Any) -> None:
    told: list[Any] = []

    class Ours(Callback):
        order = 99

        def on_train_start(self, trainer: Any) -> None:
            assert not any(folder.exists() for folder in folders)

        def on_exception(self, trainer: Any, error: BaseException) -> None:
            told.append(type(error))

        def on_train_end(self, trainer: Any) -> None:
            told.append(trainer.progress.step)
            folders.append(Path(trainer._scratch.name))

    class Theirs(TrainerCallback):
        def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            told.append("evaluated")

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            told.append("ended")

    folders: list[Path] = []
    threads, handler, pruner = threading.active_count(), signal.getsignal(signal.SIGTERM), PrunesSecond()
    args = arguments(save_strategy="steps", save_steps=4, max_steps=6)
    best = search(build(args, callbacks=[Ours(), Theirs()]), pruner=pruner)
    assert {number: [*values] for number, values in pruner.reported.items()} == {0: [2, 4, 6], 1: [2, 4], 2: [2, 4, 6]}
    assert best.run_id in ("0", "2") and best.objective == pruner.reported[int(best.run_id)][6]
    whole, pruned = ["evaluated"] * 3 + ["ended", 6], ["evaluated"] * 2 + ["ended", optuna.TrialPruned, 4]
    assert told == whole + pruned + whole
    assert not any(folder.exists() for folder in folders) and len(folders) == 3
    assert threading.active_count() == threads
    assert signal.getsignal(signal.SIGTERM) is handler


def test_a_trial_without_an_evaluation_is_evaluated_at_its_end(arguments: Any) -> None:
    best = search(build(arguments(eval_strategy="no")))
    one = build(arguments(eval_strategy="no", **best.hyperparameters))
    one.train()
    assert one.evaluate()["eval_loss"] == best.objective


def test_a_trial_that_diverges_counts_as_failed_and_the_search_goes_on(
    arguments: Any, caplog: pytest.LogCaptureFixture
) -> None:
    values = iter([1e200, 0.05, 0.1])
    best = search(build(arguments(optim="sgd")), hp_space=lambda trial: {"learning_rate": next(values)}, sampler=None)
    assert best.run_id in ("1", "2")
    assert [text for text in caplog.messages if "Trial run-0 has failed: " in text]


def test_several_objectives_give_several_best_runs(arguments: Any) -> None:
    best = search(
        build(arguments()), direction=["minimize", "maximize"],
        compute_objective=lambda metrics: [metrics["eval_loss"], metrics["eval_loss"]],
    )  # fmt: skip
    assert len(best) == 3


def test_a_space_that_names_an_unknown_field_is_refused_before_anything_is_trained(arguments: Any) -> None:
    steps = []

    class Counts(Callback):
        def on_step_end(self, trainer: Any) -> None:
            steps.append(1)

    trainer = build(arguments(), callbacks=[Counts()])
    with pytest.raises(ConfigError, match=r"names 'learning_rat', which is not a field.*Did you mean 'learning_rate'"):
        search(trainer, hp_space=lambda trial: {"learning_rat": 0.1})
    with pytest.raises(ConfigError, match="must return a dict of training arguments, got None"):
        search(trainer, hp_space=lambda trial: None)
    assert not steps
    with pytest.raises(ConfigError, match=r"Call HFTrainer\.train"):
        trainer.engine.train()


@pytest.mark.parametrize(
    ("given", "options", "words"),
    [
        ({"model": t16(), "model_init": None}, {}, "needs `model_init`, which makes the model of each trial"),
        ({"eval_dataset": None}, {}, "needs `eval_dataset`, which is what trials are judged by"),
        ({}, {"backend": "ray"}, "backend='ray' would send the trainer to other processes.*backend='optuna'"),
        ({}, {"n_jobs": 2}, "n_jobs=2 would have trials draw from each other's random numbers"),
    ],
)
def test_a_search_that_cannot_be_is_refused_in_words(arguments: Any, given: Any, options: Any, words: str) -> None:
    args = arguments(eval_strategy="no")
    with pytest.raises(ConfigError, match=words):
        search(build(args, **given), **options)


def test_a_search_without_training_arguments_is_refused_in_words() -> None:
    with pytest.raises(ConfigError, match="needs `training_args`, which hold what a trial changes"):
        search(build())


def test_the_unit_of_a_new_model_knows_its_signature(arguments: Any) -> None:
    trainer = build(arguments(max_steps=1))
    before = trainer.unit
    trainer.train()
    assert isinstance(trainer.unit, ModelUnit) and trainer.unit is not before


def test_trials_whose_names_are_the_same_write_into_folders_of_their_own(arguments: Any, tmp_path: Path) -> None:
    trainer = build(arguments(save_strategy="steps", save_steps=5))
    for _ in range(2):  # a second search begins anew, and overwrites
        with_name = {"hp_name": lambda trial: "mine", "n_trials": 2}
        search(trainer, **with_name)
        assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["mine", "mine-2"]
        for folder in ("mine", "mine-2"):
            assert list((tmp_path / "run" / folder).glob("checkpoint-*"))
            shutil.rmtree(tmp_path / "run" / folder)


def test_a_search_prints_no_rows_where_the_trainer_prints_none(arguments: Any, capsys: Any) -> None:
    search(build(arguments(disable_tqdm=True), progress_bar=False), n_trials=1)
    assert "loss" not in capsys.readouterr().out
    search(build(arguments(disable_tqdm=True), progress_bar=None), n_trials=1)
    assert "eval_loss" in capsys.readouterr().out
