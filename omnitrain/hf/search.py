"""Hyperparameter search by transformers' backends.

Each trial runs a full trainer built with the same arguments, and the backend chooses its values.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

import transformers
from transformers.hyperparameter_search import default_hp_search_backend

from omnitrain.core.errors import ConfigError, NonFiniteError, did_you_mean
from omnitrain.hf.hub import HubTrainer

Constructor = TypeVar("Constructor", bound=Callable[..., None])

logger: logging.Logger = logging.getLogger("omnitrain")


def transfer_callbacks(new: SearchTrainer, old: SearchTrainer) -> None:
    """Share the callback objects of an engine with a new one, including those that get no events."""
    ours: Any = new.callback_handler
    theirs: Any = old.callback_handler
    ours.callbacks = list(theirs.callbacks)
    ours.replaced += [callback for callback in theirs.replaced if callback not in ours.replaced]


def record_arguments(init: Constructor) -> Constructor:
    """Return a constructor that records its arguments, so that a search can create equal trainers."""

    @functools.wraps(init)
    def recording(self: Any, *args: Any, **kwargs: Any) -> None:
        # a subclass's constructor comes first and sets its own
        vars(self).setdefault("_constructor_arguments", (args, kwargs))
        init(self, *args, **kwargs)

    return cast(Constructor, recording)


def run_trial(engine: SearchTrainer, resume_from_checkpoint: str | None = None, trial: Any = None) -> None:
    """Train a trainer like that of `engine` with the values of a trial, and set the objective on `engine`.

    A trial whose loss is not finite gets NaN as its objective: the backend counts it as failed, and continues.
    """
    search_trainer: Any = engine.trainer
    args, kwargs = search_trainer._constructor_arguments
    trainer = object.__new__(type(search_trainer))
    trainer._trial = Trial(engine, trial)
    trainer.__init__(*args, **kwargs)
    transfer_callbacks(trainer.engine, engine)
    trainer.engine.hp_name = engine.hp_name
    try:
        trainer.train(resume_from=resume_from_checkpoint)
        if engine.objective is None:
            engine.objective = engine.compute_objective(trainer.evaluate())
    except NonFiniteError as error:
        logger.warning("Trial %s has failed: %s", trainer._trial.name, error)
        engine.objective = math.nan
    except Exception as error:
        if search_trainer.is_main_process or not _is_pruned(error):
            raise  # only the main process returns the result of a pruned trial to the backend
    finally:
        trainer.backend.release()
        trainer._scratch.cleanup()


class SearchTrainer(HubTrainer):
    """transformers' Trainer, whose search runs one of our trainers for each trial."""

    # The folders of the trials of the current search.
    _folders: tuple[str, ...] = ()

    def new_folder(self, trial: Any) -> str:
        """Return the folder for a trial, with a number appended if another trial of the search has that name."""
        name = super()._get_output_dir(trial)
        numbered = (f"{name}-{number}" for number in itertools.count(2))
        folder = next(candidate for candidate in itertools.chain([name], numbered) if candidate not in self._folders)
        self._folders += (folder,)
        return folder

    def hyperparameter_search(
        self,
        hp_space: Any = None,
        compute_objective: Any = None,
        n_trials: int = 20,
        direction: str | list[str] = "minimize",
        backend: Any = None,
        hp_name: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Search as transformers does, with a full run of a trainer like ours for each trial."""
        trainer: Any = self.trainer
        for name, value, why in (
            ("model_init", trainer.model_init, "makes the model of each trial"),
            ("training_args", trainer.training_args, "have the fields that a trial changes"),
            ("eval_dataset", trainer.eval_loader, "gives the score of each trial"),
        ):
            if value is None:
                raise ConfigError(f"A search for hyperparameters needs `{name}`, which {why}. Pass it to HFTrainer.")
        if (backend or default_hp_search_backend()) == "ray":
            raise ConfigError(
                "backend='ray' would send the trainer to other processes, which HFTrainer cannot be. Use "
                "backend='optuna'."
            )
        if kwargs.get("n_jobs", 1) != 1:
            raise ConfigError(f"n_jobs={kwargs['n_jobs']} would make trials share a random generator. Leave it out.")
        for name in ("timeout", "catch"):
            if trainer.world_size > 1 and kwargs.get(name):
                raise ConfigError(
                    f"`{name}` would only act on the main process, and there are {trainer.world_size}. Leave it out."
                )
        before = {
            "hp_search_backend": None,
            "model_init": None,
            "model": self.model,
            "model_wrapped": self.model_wrapped,
        }
        self._folders = ()
        setattr(self, "model_init", trainer.model_init)  # noqa: B010 - transformers needs it, and types it as None
        try:
            with trainer._calling("hyperparameter_search()"):
                return super().hyperparameter_search(
                    hp_space, compute_objective, n_trials, direction, backend, hp_name, **kwargs
                )
        finally:
            vars(self).update(before)


class Trial:
    """The changes of one trial to a trainer, and the reporting of its evaluations.

    `trial` is that of the backend: an object from optuna, or a dict of values. `engine` is the one that searches.
    """

    def __init__(self, engine: SearchTrainer, trial: Any) -> None:
        self.engine = engine
        self.trial = trial
        self.values: dict[str, Any] = self._values()
        self.folder: Any = engine.new_folder(trial)
        self.name: str = Path(self.folder).name

    def _values(self) -> dict[str, Any]:
        engine, trial = self.engine, self.trial
        optuna_trial: Any = None if isinstance(trial, dict) else trial
        space: Any = engine.hp_space(optuna_trial)
        if not isinstance(space, Mapping):
            raise ConfigError(f"`hp_space` must return a dict of training arguments, got {space!r}.")
        if isinstance(trial, dict):  # from W&B, whose search space is the configuration of a sweep
            space = {name: trial[name] for name in space["parameters"] if name in trial}
        training_args: Any = engine.training_args
        fields = [field.name for field in dataclasses.fields(training_args) if field.init]
        for name in space:
            if name not in fields:
                raise ConfigError(
                    f"`hp_space` has {name!r}, which is not a field of TrainingArguments.{did_you_mean(name, fields)} "
                    "Suggest values for the model in `model_init(trial)`."
                )
        return dict(space)

    def arguments(self, training_args: transformers.TrainingArguments) -> transformers.TrainingArguments:
        """Return the training arguments of the trial, which has its own folder."""
        changed = dataclasses.replace(training_args, **{**self.values, "output_dir": self.folder, "push_to_hub": False})
        for name, value in vars(training_args).items():  # attributes that are not fields
            vars(changed).setdefault(name, value)
        return changed

    def report(self, trial_engine: SearchTrainer, metrics: Mapping[str, float]) -> None:
        """Report an evaluation to the backend; if it prunes the trial, raise optuna's TrialPruned on all ranks."""
        trainer = trial_engine.trainer
        self.engine.objective = self.engine.compute_objective(dict(metrics))
        if trainer.ranks.on_main("the pruning of a trial", lambda: self._should_prune(trainer.progress.step)):
            from optuna import TrialPruned

            trial_engine.control = trial_engine.callback_handler.on_train_end(
                trial_engine.args, trial_engine.state, trial_engine.control
            )
            raise TrialPruned

    def _should_prune(self, step: int) -> bool:
        trial = self.trial
        if not hasattr(trial, "study") or len(trial.study.directions) > 1:
            return False
        trial.report(self.engine.objective, step)
        return trial.should_prune()


def _is_pruned(error: Exception) -> bool:
    from optuna import TrialPruned

    return isinstance(error, TrialPruned)
