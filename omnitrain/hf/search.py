"""Models made anew by `model_init`, and the trials of a search, each a whole run of a trainer like the one that asks.

Which values are tried next is for the backend of `transformers.Trainer.hyperparameter_search` to say; how a run goes,
for the trainer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import logging
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import nn
from transformers.hyperparameter_search import default_hp_search_backend

from omnitrain.errors import ConfigError, NonFiniteError, did_you_mean
from omnitrain.reproducibility import isolated_rng
from omnitrain.hf.hub import Uploading
from omnitrain.trainers.sharding import Sharding
from omnitrain.units import ModelUnit

if TYPE_CHECKING:
    from omnitrain.hf.engine import Engine
    from omnitrain.hf.trainer import HFTrainer

__all__ = ["Renewable", "Searching", "Trial", "check_model_init", "made_model", "remembered", "run_trial"]

logger = logging.getLogger("omnitrain")


# --- model_init


def check_model_init(model: Any, model_init: Any, given: Mapping[str, Any]) -> None:
    """Refuse what does not say what is to be trained, or is bound to one model where each run has its own.

    Raises:
        ConfigError: If so.
    """
    if (model is None) == (model_init is None):
        said = "neither is given" if model is None else "both are given"
        raise ConfigError(f"HFTrainer needs `model` or `model_init`, and {said}. Pass one of them.")
    if model_init is None:
        return
    if not callable(model_init) or isinstance(model_init, nn.Module):
        raise ConfigError(f"`model_init` must be a function that returns a model, got {type(model_init).__name__}.")
    if hasattr(given.get("optimizer"), "param_groups"):
        raise ConfigError(
            "`optimizer` belongs to one model, but `model_init` makes a new one for each run. Pass the optimizer's "
            "class, or a function of the parameters."
        )
    if given.get("unit") is not None:
        raise ConfigError(
            "`unit` has a model of its own, but `model_init` makes a new one for each run. Pass `model` instead."
        )


def made_model(model_init: Callable[..., Any], trial: Any, seed: int, device: torch.device) -> nn.Module:
    """Return a new model, whose weights depend on the seed alone; the program's random numbers stay as they are.

    Raises:
        ConfigError: If `model_init` takes more than a trial, or returns no model.
    """
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    taken = [one for one in inspect.signature(model_init).parameters.values() if one.kind in positional]
    if len(taken) > 1:
        names = ", ".join(one.name for one in taken)
        raise ConfigError(f"`model_init` must take no argument, or one, the trial of a search. It takes {names}.")
    with isolated_rng(device, seed):
        model = model_init(*[trial][: len(taken)])
    if not isinstance(model, nn.Module):
        raise ConfigError(f"`model_init` must return an nn.Module, got {type(model).__name__}.")
    return model


def take_callbacks(new: Engine, old: Engine) -> None:
    """Give an engine the callbacks of another, the very objects, but for those that speak for a trainer of ours."""
    own = {type(one): one for one in new.callback_handler.callbacks if getattr(one, "owner", None) is new.owner}
    new.callback_handler.callbacks = [own.get(type(one), one) for one in old.callback_handler.callbacks]


class Renewable(Sharding):
    """A trainer that makes its model by `model_init`."""

    engine: Any
    model_init: Callable[..., nn.Module] | None
    _made_with: tuple[tuple[Any, ...], dict[str, Any]]
    _trial: Trial | None = None
    """The trial of a search that this trainer is for."""

    def _new_model(self, seed: int, device: torch.device) -> nn.Module:
        trial = self._trial and self._trial.trial
        return made_model(self.model_init, trial, seed, device)  # type: ignore[arg-type]

    def _renew_model(self) -> bool:
        """Begin with a new model, if there is a `model_init`; that of a trial is new already."""
        if self.model_init is None or self._trial is not None:
            return False
        former = self.engine
        former._finish_current_push()
        self._release()
        self.model = self._new_model(self.seed, self.device)
        self.unit = ModelUnit(self.model, self.loss_fn)
        vars(self).pop("optimizer", None)
        self._setup_training_components()
        take_callbacks(self.engine, former)
        self._finish_setup()
        return True

    def _train(self, resume_from: str | Path | None, allow_change: Collection[str]) -> None:
        if resume_from is None:
            self._renew_model()
        super()._train(resume_from, allow_change)

    def _resume(self, which: str | Path, allow_change: Collection[str]) -> tuple[Path, dict[str, Any]] | None:
        found = super()._resume(which, allow_change)
        if found is None and self._renew_model():
            self._begin_run()  # with the optimizer of this model
        return found

    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> Any:
        """Search as `transformers.Trainer.hyperparameter_search` does; each trial is a run of a trainer like this."""
        return self.engine.hyperparameter_search(*args, **kwargs)


# --- a search


def remembered(init: Callable[..., None]) -> Callable[..., None]:
    """Return a constructor that notes what it was called with, so that a search can make trainers alike."""

    @functools.wraps(init)
    def noting(self: Any, *args: Any, **kwargs: Any) -> None:
        vars(self).setdefault("_made_with", (args, kwargs))  # of a subclass, whose constructor comes first, its own
        init(self, *args, **kwargs)

    return noting


@contextlib.contextmanager
def searching(engine: Searching, backend: Any, options: Mapping[str, Any]) -> Iterator[None]:
    """Have `engine` search: until the end of this context it trains trials.

    Raises:
        ConfigError: If there is nothing to search with, or in a way that would not give the same result twice.
    """
    owner = engine.owner
    for name, value, why in (
        ("model_init", owner.model_init, "makes the model of each trial"),
        ("training_args", owner.training_args, "hold what a trial changes"),
        ("eval_dataset", owner.eval_loader, "is what trials are judged by"),
    ):
        if value is None:
            raise ConfigError(f"A search for hyperparameters needs `{name}`, which {why}. Pass it to HFTrainer.")
    if (backend or default_hp_search_backend()) == "ray":
        raise ConfigError(
            "backend='ray' would send the trainer to other processes, which HFTrainer cannot be. Use backend='optuna'."
        )
    if options.get("n_jobs", 1) != 1:
        raise ConfigError(
            f"n_jobs={options['n_jobs']} would have trials draw from each other's random numbers. Leave it out."
        )
    for name in ("timeout", "catch"):
        if owner.world_size > 1 and options.get(name):
            raise ConfigError(
                f"`{name}` would be heeded on the main process alone, and there are {owner.world_size}. Leave it out."
            )
    kept = engine.model, engine.model_wrapped
    setattr(engine, "model_init", owner.model_init)  # noqa: B010 - transformers looks for it, and types it as None
    try:
        yield
    finally:
        engine.hp_search_backend = engine.model_init = None
        engine.model, engine.model_wrapped = kept


def run_trial(engine: Engine, resume_from_checkpoint: str | None = None, trial: Any = None) -> None:
    """Train a trainer like the one of `engine` with the values of a trial, and leave the objective with `engine`.

    A trial whose loss is not finite has NaN for its objective: a backend counts it as failed, and goes on.

    Raises:
        ConfigError: If the trial names what is no training argument.
        optuna.TrialPruned: If the backend has given the trial up.
    """
    owner = engine.owner
    args, kwargs = owner._made_with
    trainer = type(owner).__new__(type(owner))
    own = trainer._trial = Trial(engine, trial)
    trainer.__init__(*args, **kwargs)
    take_callbacks(trainer.engine, engine)
    trainer.engine.hp_name = engine.hp_name
    try:
        trainer.train(resume_from=resume_from_checkpoint)
        if engine.objective is None:
            engine.objective = engine.compute_objective(trainer.evaluate())
    except NonFiniteError as error:
        logger.warning("Trial %s has failed: %s", own.name, error)
        engine.objective = math.nan
    except Exception as error:
        if owner.is_main_process or not _is_pruned(error):
            raise  # what comes of a pruned trial, the main process alone is asked
    finally:
        trainer._release()
        trainer._scratch.cleanup()


class Searching(Uploading):
    """transformers' Trainer, whose search has a trainer of ours for each trial."""

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
        """Search as theirs does, with a whole run of a trainer like ours for each trial."""
        with searching(self, backend, kwargs), self.owner.ranks.calling("hyperparameter_search()"):
            return super().hyperparameter_search(
                hp_space, compute_objective, n_trials, direction, backend, hp_name, **kwargs
            )


class Trial:
    """What one trial changes of a trainer, and where its evaluations are told.

    Args:
        engine: The one that searches.
        trial: The backend's: an object of optuna, or a dict of values.
    """

    def __init__(self, engine: Engine, trial: Any) -> None:
        self.engine = engine
        self.trial = trial
        self.values = self._values()
        self.folder = engine._get_output_dir(trial)
        self.name = Path(self.folder).name

    def _values(self) -> dict[str, Any]:
        engine, trial = self.engine, self.trial
        asked: Any = None if isinstance(trial, dict) else trial
        space: Any = engine.hp_space(asked)
        if not isinstance(space, Mapping):
            raise ConfigError(f"`hp_space` must return a dict of training arguments, got {space!r}.")
        if isinstance(trial, dict):  # of W&B, whose space is the description of a sweep
            space = {name: trial[name] for name in space["parameters"] if name in trial}
        given: Any = engine.owner.training_args
        known = [field.name for field in dataclasses.fields(given) if field.init]
        for name in space:
            if name not in known:
                raise ConfigError(
                    f"`hp_space` names {name!r}, which is no field of TrainingArguments.{did_you_mean(name, known)} "
                    "What is for the model, `model_init(trial)` asks the trial for."
                )
        return dict(space)

    def arguments(self, given: transformers.TrainingArguments) -> transformers.TrainingArguments:
        """Return the training arguments of the trial, which writes into a folder of its own."""
        changed = dataclasses.replace(given, **{**self.values, "output_dir": self.folder, "push_to_hub": False})
        for name, value in vars(given).items():  # what is no field
            vars(changed).setdefault(name, value)
        return changed

    def report(self, trainer: HFTrainer) -> None:
        """Tell the backend of an evaluation.

        Raises:
            optuna.TrialPruned: On all processes, if the backend gives the trial up.
        """
        self.engine.objective = self.engine.compute_objective(trainer._latest_metrics())
        if trainer.ranks.on_main("the pruning of a trial", lambda: self._is_given_up(trainer.progress.step)):
            from optuna import TrialPruned

            engine = trainer.engine
            engine.control = engine.callback_handler.on_train_end(engine.args, engine.state, engine.control)
            raise TrialPruned

    def _is_given_up(self, step: int) -> bool:
        trial = self.trial
        if not hasattr(trial, "study") or len(trial.study.directions) > 1:
            return False
        trial.report(self.engine.objective, step)
        return trial.should_prune()


def _is_pruned(error: Exception) -> bool:
    from optuna import TrialPruned

    return isinstance(error, TrialPruned)
