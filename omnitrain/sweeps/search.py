"""Search for hyperparameters: each trial is a run of any trainer, in a folder of its own. optuna chooses the values.

What is `search` for its callers, and how trials are kept and continued, belongs here. What the values of a search may
be is in `omnitrain/sweeps/spaces.py`; the search that transformers' Trainer has is in `hf/search.py`.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import gc
import itertools
import json
import logging
import math
import os
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, overload

from omnitrain.arguments import describe
from omnitrain.checkpoint.lock import Lock
from omnitrain.compute.random_state import derive_seed, isolated_rng
from omnitrain.core.errors import (
    CheckpointError,
    ConfigError,
    DistributedError,
    MissingExtraError,
    Tolerance,
    did_you_mean,
)
from omnitrain.core.events import Callback
from omnitrain.core.files import check_not_link, open_to_append, replace_file
from omnitrain.core.history import create_figure, save_figure
from omnitrain.core.metric_format import get_descriptor
from omnitrain.core.paths import folder_path
from omnitrain.distributed.ranks import Ranks
from omnitrain.sweeps.spaces import Space
from omnitrain.trainer.base import BaseTrainer

logger: logging.Logger = logging.getLogger("omnitrain")

T = TypeVar("T")
MakeTrainer = Callable[[dict[str, Any], Path], BaseTrainer]

_JOURNAL = "search.journal"
_FACTS = "search.json"
_NAME = "search"
_SAMPLERS = ("tpe", "random", "grid")
_PRUNERS = ("median", "none")
_TRIES = 3
"""So many trials in a row from the first on end a search by failing: then it is not their values that are wrong."""


@dataclass(frozen=True, slots=True)
class SearchTrial:
    """One trial of a search.

    Attributes:
        number: From 0.
        params: Its values by name, as JSON types.
        score: Its best value of the metric; None if it has none.
        score_step: The step of that evaluation.
        step: The step at which the run ended.
        state: "complete", "pruned" or "failed".
        seconds: How long the run took.
        folder: The folder of the run.
        error: What it failed with; "" if it did not.
    """

    number: int
    params: dict[str, Any]
    score: float | None
    score_step: int | None
    step: int
    state: str
    seconds: float
    folder: Path
    error: str = ""


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The trials of a search, which print as a table.

    Attributes:
        trials: All trials that have ended, by number.
        metric: The metric of the score.
        direction: Whether a higher score is better ("max"), or a lower one ("min").
        folder: The `save_dir` of the search.
    """

    trials: list[SearchTrial]
    metric: str
    direction: str
    folder: Path

    @property
    def _complete(self) -> list[SearchTrial]:
        return [one for one in self.trials if one.state == "complete"]

    @property
    def best(self) -> SearchTrial:
        """The trial with the best score of those that are complete; on a tie, the first.

        Raises:
            ConfigError: No trial is complete.
        """
        best = _best_of(self._complete, _score, self.direction)
        if best is None:
            raise ConfigError(f"No trial of {str(self.folder)!r} is complete, so none is the best:\n{self.table()}")
        return best

    def table(self) -> str:
        """Return a row per trial: number, values, score and its step, last step, state and seconds; `*` is the best."""
        names = list(dict.fromkeys(name for one in self.trials for name in one.params))
        best, form = _best_of(self._complete, _score, self.direction), get_descriptor(f"eval_{self.metric}").format
        rows = [["trial", *names, f"{self.metric}  ", "step", "state", "seconds"]]
        for one in self.trials:
            score = "-" if one.score is None else f"{format(one.score, form)} @{one.score_step}"
            values = [_cell(one.params.get(name, "-")) for name in names]
            mark = " *" if one is best else "  "
            rows.append([str(one.number), *values, score + mark, str(one.step), one.state, f"{one.seconds:.1f}"])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.rjust, row, widths)).rstrip() for row in rows]
        return "\n".join([*lines, *(f"trial {one.number}: {one.error}" for one in self.trials if one.error)])

    def __str__(self) -> str:
        """Return the table."""
        return self.table()

    @overload
    def plot(self, path: str | os.PathLike[str]) -> Path: ...
    @overload
    def plot(self, path: None = None) -> Any: ...
    def plot(self, path: str | os.PathLike[str] | None = None) -> Any:
        """Draw the scores in the order of the trials with the best so far, and over each parameter.

        Args:
            path: The image to write; its suffix is the format, PNG by default. None returns a figure instead, which a
                notebook shows.

        Returns:
            The path of the image, or the figure of matplotlib.

        Raises:
            MissingExtraError: matplotlib is not installed.
        """
        names = list(dict.fromkeys(name for one in self.trials for name in one.params))
        figure = create_figure("SearchResult.plot", 2.8 * (len(names) + 1) + 0.4)
        first, *others = figure.subplots(len(names) + 1, squeeze=False)[:, 0]
        _draw(first, self.trials, lambda one: one.number)
        _draw_best(first, self._complete, self.direction)
        first.set_xlabel("trial")
        for axes, name in zip(others, names, strict=True):
            values = [one.params[name] for one in self.trials if name in one.params]
            is_number = all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values)
            _draw(axes, self.trials, lambda one, name=name, is_number=is_number: _place(one.params, name, is_number))
            if is_number and min(values) > 0 and max(values) >= 30 * min(values):
                axes.set_xscale("log")
            axes.set_xlabel(name)
        for axes in (first, *others):
            axes.set_ylabel(self.metric)
            axes.grid(alpha=0.3)
        if first.get_legend_handles_labels()[0]:
            first.legend(fontsize="small")
        return figure if path is None else save_figure(figure, path)


def search(
    make_trainer: MakeTrainer,
    space: Mapping[str, Any],
    *,
    trials: int | None = None,
    save_dir: str | os.PathLike[str],
    direction: Literal["max", "min"] | None = None,
    sampler: Any = None,
    pruner: Any = None,
    seed: int = 42,
) -> SearchResult:
    """Train with many values of hyperparameters, one run for each, and return what they gave.

    The score of a trial is the best value of its trainer's objective (`optimization_metric`). Called again with the
    same `save_dir`, a search goes on: trials that have ended are kept, one that was interrupted or killed resumes
    from its last checkpoint. Evaluations are reported to the pruner, which may stop a trial. A trial that raises an
    error has failed, and the search goes on.

    Args:
        make_trainer: Called as `make_trainer(params, folder)`; returns a new trainer with `save_dir=folder`. It is
            called with the random generators seeded alike for each trial, and once more at the beginning of a search,
            for the objective.
        space: What to try, by the name in `params`: a list of choices, a range such as {"low": 1e-5, "high": 1e-2,
            "log": True} or {"low": 16, "high": 128, "step": 16} (of integers if `low`, `high` and `step` are), or a
            function of optuna's trial.
        trials: How many trials in all, with those of earlier calls; None, for "grid", tries everything once.
        save_dir: The folder of the search; trials are in trial-0000, trial-0001, ... in it.
        direction: "max" or "min", to be sure that it is that of the trainers' objective; None takes theirs.
        sampler: "tpe" (default), "random", "grid", or a sampler of optuna, whose random numbers begin anew when a
            search is continued.
        pruner: "median" (default; it stops no trial before five are complete), "none", or a pruner of optuna.
        seed: Seed for the choices and for `make_trainer`; default 42.

    Returns:
        The trials. `save_dir` gets their table, search.txt, and with matplotlib a picture, search.png.

    Raises:
        ConfigError: An argument is wrong, `save_dir` holds another search, or a trainer does not fit: nothing to
            evaluate on, another folder or another objective.
        CheckpointError: The folder is in use, or cannot be written when the search begins; a file of the search is
            damaged; or a trial cannot be resumed as `make_trainer` makes it now.
        MissingExtraError: optuna is not installed.
        Exception: That of a trial, if each of the first three has failed.
    """
    try:
        import optuna
    except ImportError:
        raise MissingExtraError("search", "optuna", "search") from None
    if not callable(make_trainer):
        raise ConfigError(f"`make_trainer` must be callable as make_trainer(params, folder), got {make_trainer!r}.")
    folder, described = folder_path(os.fspath(save_dir), "save_dir"), Space(space)
    _check_arguments(trials, direction, sampler, pruner, seed)
    if sampler == "grid":
        size = len(described.points())
        trials = size if trials is None else min(trials, size)
    if trials is None:
        raise ConfigError(
            "`trials` says how many trials there are in all; it may be left out with sampler='grid' only."
        )
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)  # each of its trials would be a line
    try:
        run = _Run(make_trainer, described, folder, sampler or "tpe", pruner or "median", seed)
        return run.until(trials, direction)
    finally:
        optuna.logging.set_verbosity(before)


def _check_arguments(trials: Any, direction: Any, sampler: Any, pruner: Any, seed: Any) -> None:
    import optuna

    if trials is not None and (isinstance(trials, bool) or not isinstance(trials, int) or trials < 1):
        raise ConfigError(f"`trials` must be a positive integer, got {trials!r}.")
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise ConfigError(f"`seed` must be an integer of at least 0, got {seed!r}.")
    if direction not in ("max", "min", None):
        raise ConfigError(f"`direction` must be 'max', 'min' or None, got {direction!r}.")
    for name, value, known, kind in (
        ("sampler", sampler, _SAMPLERS, optuna.samplers.BaseSampler),
        ("pruner", pruner, _PRUNERS, optuna.pruners.BasePruner),
    ):
        if value is not None and value not in known and not isinstance(value, kind):
            near = did_you_mean(value, known) if isinstance(value, str) else ""
            words = ", ".join(map(repr, known))
            raise ConfigError(f"`{name}` must be one of {words}, or a {name} of optuna, got {value!r}.{near}")


class _Run:
    """A search that is under way, on each rank; only the main one has its journal.

    Args:
        make_trainer: Makes the trainer of a trial.
        space: What to try.
        folder: Where the search is kept.
        sampler: A name or a sampler.
        pruner: A name or a pruner.
        seed: The seed.
    """

    def __init__(
        self, make_trainer: MakeTrainer, space: Space, folder: Path, sampler: Any, pruner: Any, seed: int
    ) -> None:
        self.make_trainer = make_trainer
        self.space = space
        self.folder = folder
        self.sampler = sampler
        self.pruner = pruner
        self.seed = seed
        self.ranks: Ranks = Ranks()
        self.metric: str = ""
        self.direction: str = ""
        self.study: Any = None
        self.trial: Any = None
        self._storage: Any = None
        self._reported: dict[int, float] = {}
        """The values of the present trial's evaluations by their step."""

    def until(self, trials: int, direction: str | None) -> SearchResult:
        """Run trials until there are so many, and return all."""
        if not (self.folder / _FACTS).exists() or os.environ.get("WORLD_SIZE", "1") != "1":
            self._look_at_a_trainer()
            gc.collect()  # a trainer and its parts know each other
        failures, has_trained = list[str](), False
        with contextlib.ExitStack() as stack:
            facts = self._on_main("the journal of the search", lambda: self._open(stack, direction))
            self.metric, self.direction = facts["metric"], facts["direction"]
            while (turn := self._on_main("the next trial", lambda: self._next(trials))) is not None:
                error = self._play(*turn)
                has_trained = has_trained or error is None
                if error is None or has_trained:
                    continue
                failures.append(f"trial {turn[0]}: {_words(error)}")
                if len(failures) == min(_TRIES, trials):
                    error.add_note(f"Every trial so far has failed: {'; '.join(failures)}")
                    raise error
            return self._on_main("the result of the search", self._conclude)

    def _on_main(self, what: str, work: Callable[[], T]) -> T:
        with self.ranks.calling("search()"):
            return self.ranks.on_main(what, work)

    # --- trials

    def _look_at_a_trainer(self) -> None:
        """Learn the objective, and the ranks, from the first trainer that can be made; nothing is trained."""
        import optuna

        study = optuna.create_study(sampler=copy.deepcopy(self._sampler_of(0)))
        for number in range(_TRIES):
            if isinstance(self.sampler, str):
                study.sampler = self._sampler_of(number)
            params = self.space.suggest(study.ask())
            try:
                trainer = self._make(params, number)
            except Exception:
                if number == _TRIES - 1:
                    raise
                continue
            self._check(trainer, number)
            self.ranks = trainer.ranks
            self.metric, self.direction = trainer.objective.metric, trainer.objective.direction
            trainer.backend.release()
            break

    def _folder_of(self, number: int) -> Path:
        return self.folder / f"trial-{number:04d}"

    def _make(self, params: dict[str, Any], number: int) -> BaseTrainer:
        with isolated_rng(None, self.seed):
            return self.make_trainer(dict(params), self._folder_of(number))

    def _check(self, trainer: Any, number: int) -> None:
        """Refuse a trainer that a search cannot use.

        Raises:
            ConfigError: Says why.
        """
        folder = self._folder_of(number)
        if not isinstance(trainer, BaseTrainer):
            raise ConfigError(f"`make_trainer` must return a trainer, got {type(trainer).__name__}.")
        if trainer.save_dir is None or trainer.save_dir.resolve() != folder.resolve():
            given = None if trainer.save_dir is None else str(trainer.save_dir)
            hint = " With TrainingArguments, `save_strategy` must not be 'no'." if given is None else ""
            raise ConfigError(
                f"The trainer of trial {number} has save_dir={given!r}, and a trial must save into a folder of its "
                f"own. Pass on the second argument of `make_trainer`: save_dir=folder, here {str(folder)!r}.{hint}"
            )
        if trainer.progress.step:
            raise ConfigError(
                f"The trainer of trial {number} has trained before. `make_trainer` must make a new one each time."
            )
        if trainer.eval_loader is None:
            raise ConfigError(
                "A search compares what trials evaluate, and the trainer has nothing to evaluate on. Pass "
                "`eval_dataset`."
            )
        now, then = (trainer.objective.metric, trainer.objective.direction), (self.metric, self.direction)
        if self.metric and now != then:
            raise ConfigError(
                f"The trainer of trial {number} optimizes {now[0]!r} ({now[1]}), and this search {then[0]!r} "
                f"({then[1]}). All trainers of a search need the same `optimization_metric` and direction."
            )

    def _play(self, number: int, params: dict[str, Any]) -> Exception | None:
        """Run a trial to its end, and let go of its trainer; return the error if it has failed."""
        error = self._attempt(number, params)
        if error is not None:
            logger.warning("Trial %d has failed: %s", number, _words(error), exc_info=error)
            traceback.clear_frames(error.__traceback__)  # they keep the model
        gc.collect()
        return error

    def _attempt(self, number: int, params: dict[str, Any]) -> Exception | None:
        trainer, error, pruning = None, None, _Pruning(self)
        try:
            trainer = self._make(params, number)
        except Exception as raised:
            error = raised
        try:
            if trainer is not None:
                self._check(trainer, number)
                trainer._callbacks.append(pruning)  # a new model, from `model_init`, has these registered again
                trainer.lifecycle.register([*trainer.lifecycle.callbacks, pruning])
                error = self._train(trainer)
            # a rank that has failed alone meets the others at another call, which is an error on all of them
            with self.ranks.calling("search()"):
                told = self.ranks.gather("the end of a trial", "" if error is None else _words(error))
            words = next(filter(None, told), "")
            self._on_main("the record of a trial", lambda: self._record(trainer, pruning.has_pruned, words))
            return error or (DistributedError(words) if words else None)
        finally:
            if trainer is not None:
                trainer.backend.release()
            trainer = None  # the frame of an error outlives the call

    def _train(self, trainer: BaseTrainer) -> Exception | None:
        try:
            trainer.train(resume_from="auto")
        except (CheckpointError, DistributedError):
            raise  # it is not due to the values of the trial, which can be continued
        except Exception as error:
            return error
        if trainer.objective.best is None:
            return ConfigError(f"No evaluation has given a finite value of {self.metric!r}.")
        return None

    # --- the journal, on the main rank

    def _open(self, stack: contextlib.ExitStack, direction: str | None) -> dict[str, Any]:
        """Open the journal of this search, or begin it; return its metric and direction.

        Raises:
            CheckpointError: Another process searches here, a file is damaged, or the folder cannot be written.
            ConfigError: It is the journal of another search.
        """
        try:
            facts = self._facts(direction)
            self.folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(Lock(self.folder).held())
            file = self.folder / _FACTS
            journal = _Journal(self.folder / _JOURNAL)
            if not file.exists():
                if journal.entries:
                    raise _damage(file, "it is missing")
                replace_file(file, (json.dumps(facts, indent=2) + "\n").encode())
        except OSError as error:
            raise CheckpointError(
                f"A search cannot use its folder {str(self.folder)!r}: {error}. Make room or allow writing there, or "
                "pass another `save_dir`."
            ) from error
        stack.callback(journal.close)
        self._open_study(journal, facts["direction"])
        return facts

    def _open_study(self, journal: _Journal, direction: str) -> None:
        """Make the study of a journal.

        Raises:
            CheckpointError: The entries do not fit together.
        """
        import optuna
        from optuna.storages import JournalStorage

        pruners = {"median": optuna.pruners.MedianPruner, "none": optuna.pruners.NopPruner}
        pruner = pruners[self.pruner]() if isinstance(self.pruner, str) else self.pruner
        goal, is_new = "maximize" if direction == "max" else "minimize", not journal.entries
        try:
            self._storage = JournalStorage(journal)  # type: ignore[arg-type]
            if is_new:
                self.study = optuna.create_study(storage=self._storage, study_name=_NAME, direction=goal, pruner=pruner)
            else:
                self.study = optuna.load_study(storage=self._storage, study_name=_NAME, pruner=pruner)
            self._ended_trials()
        except Exception as error:
            raise _damage(journal.path, f"its entries do not fit together ({_words(error)})") from error

    def _facts(self, direction: str | None) -> dict[str, Any]:
        """Return what must stay the same when a search is continued.

        Raises:
            CheckpointError: The file of a search that is continued is damaged.
            ConfigError: It does not.
        """
        now = {
            "metric": self.metric,
            "direction": self.direction,
            "space": self.space.described(),
            "sampler": describe(self.sampler),
            "seed": self.seed,
        }
        then = _read_facts(self.folder / _FACTS)
        if then is not None and not self.metric:
            now |= {"metric": then["metric"], "direction": then["direction"]}
        if direction not in (None, now["direction"]):
            raise ConfigError(
                f"direction={direction!r}, but the objective of the trainers is {now['metric']!r} with direction "
                f"{now['direction']!r}. Pass `optimization_metric` and `optimization_direction` to the trainer."
            )
        if then is None:
            return now
        before, after = ({**facts, **_by_parameter(facts["space"])} for facts in (then, now))
        changed = [
            f"`{name}` was {before.get(name, 'not there')!r} and is {after.get(name, 'not there')!r}"
            for name in dict.fromkeys([*before, *after])
            if name != "space" and before.get(name, ...) != after.get(name, ...)
        ]
        if changed:
            raise ConfigError(
                f"{str(self.folder)!r} holds another search: {'; '.join(changed)}. Pass what it was to go on with it, "
                "or another `save_dir`."
            )
        return now

    def _sampler_of(self, number: int) -> Any:
        """Return the sampler for a trial, which chooses the same whether the search was interrupted or not."""
        import optuna

        seed = derive_seed(self.seed, number) % 2**32
        if self.sampler == "tpe":
            return optuna.samplers.TPESampler(seed=seed)
        if self.sampler == "random":
            return optuna.samplers.RandomSampler(seed=seed)
        return _in_order(self.space.points()) if self.sampler == "grid" else self.sampler

    def _next(self, trials: int) -> tuple[int, dict[str, Any]] | None:
        """Return number and values of the next trial: first one that was interrupted; None after the last.

        Raises:
            ConfigError: There is a run in its folder already.
        """
        import optuna

        found = self.study.get_trials(deepcopy=False)
        begun = [one for one in found if one.state == optuna.trial.TrialState.RUNNING]
        if not begun and len(found) >= trials:
            return None
        number = begun[0].number if begun else len(found)
        self.study.sampler = self._sampler_of(number)
        if begun:
            study_id = self._storage.get_study_id_from_name(_NAME)
            known = self._storage.get_trial_id_from_study_id_trial_number(study_id, number)
            self.trial = optuna.trial.Trial(self.study, known)
        elif any((folder := self._folder_of(number)).glob("checkpoint-*")):  # from which it would go on
            raise ConfigError(
                f"{str(folder)!r} has checkpoints, and trial {number} of this search has not begun. Delete what an "
                "earlier search has left, or pass another `save_dir`."
            )
        else:
            self.trial = self.study.ask()
        self._reported = dict(begun[0].intermediate_values) if begun else {}
        params = self.space.suggest(self.trial)
        self.trial.set_user_attr("params", describe(params))
        return number, params

    def report(self, step: int, value: float) -> None:
        """Note the value of an evaluation; one that a resumed run repeats is there already."""
        if step not in self._reported:
            self._reported[step] = value
            self.trial.report(value, step)

    def is_pruned(self) -> bool:
        """Return whether the pruner gives up the present trial, by what was reported."""
        return bool(self._reported) and self.trial.should_prune()

    def _record(self, trainer: BaseTrainer | None, is_pruned: bool, error: str) -> None:
        """Note how the present trial has ended."""
        from optuna.trial import TrialState

        end: dict[str, Any] = {"step": 0, "seconds": 0.0, "score": None, "score_step": None, "error": error}
        state, values = TrialState.FAIL, self._reported
        if trainer is not None:
            objective = trainer.objective
            end |= {"step": trainer.progress.step, "seconds": trainer.progress.seconds}
            end |= {"score": objective.best, "score_step": objective.best_step}
            if not error and is_pruned and trainer.stop_reason == "requested":  # else it had come to its end anyway
                state = TrialState.PRUNED
                best = _best_of(values, values.get, self.direction)
                end |= {
                    "step": max(values),
                    "score": None if best is None else values[best],
                    "score_step": best,
                }  # also of a resumed run
            elif not error:
                state = TrialState.COMPLETE
        self.trial.set_user_attr("end", end)
        value = end["score"] if state == TrialState.COMPLETE else None
        self.study.tell(self.trial, value, state=state)
        logger.info("Trial %d: %s, %s %s.", self.trial.number, state.name.lower(), self.metric, end["score"])

    def _ended_trials(self) -> list[SearchTrial]:
        states = {"COMPLETE": "complete", "PRUNED": "pruned", "FAIL": "failed"}
        trials = []
        for one in self.study.get_trials(deepcopy=False):
            if one.state.name in states:
                params, end = one.user_attrs["params"], one.user_attrs["end"]
                state, folder = states[one.state.name], self._folder_of(one.number)
                trials.append(SearchTrial(number=one.number, params=params, state=state, folder=folder, **end))
        return trials

    def _conclude(self) -> SearchResult:
        """Return the result, after writing its table and its picture."""
        result = SearchResult(self._ended_trials(), self.metric, self.direction, self.folder)
        with Tolerance("search.txt", "The result is returned without it."):
            replace_file(self.folder / "search.txt", f"{result}\n".encode())
        with Tolerance("search.png", "The result is returned without it."), contextlib.suppress(MissingExtraError):
            check_not_link(self.folder / "search.png")
            result.plot(self.folder / "search.png")
        return result


_NUMBER = "line"
"""The key of an entry's number in the journal, by which a deleted line is noticed."""


class _Journal:
    """The journal of a search in a file, for optuna's JournalStorage: JSON, a line for each entry, with its number.

    One process writes it, which holds the lock of the folder. While the disk fails, entries are kept in memory.

    Args:
        path: The file. What a killed process has left of its last line is cut off with the next entry.

    Raises:
        CheckpointError: A line is damaged or missing. Lines of earlier versions have no numbers.
        OSError: It is a link, or cannot be read.
    """

    def __init__(self, path: Path) -> None:
        check_not_link(path)
        content = path.read_bytes() if path.exists() else b""
        self.path = path
        self.entries: list[dict[str, Any]] = []
        self._content = bytearray(content[: content.rfind(b"\n") + 1])
        self._written = len(self._content)
        """Bytes of the content that are in the file."""
        self._tolerance = Tolerance(path.name, "Its entries are kept in memory until they can be written.")
        is_numbered = False
        for number, line in enumerate(self._content.splitlines(), 1):
            try:
                entry = json.loads(line)
            except ValueError as error:
                raise _damage(path, f"line {number} is not JSON ({error})") from error
            if not isinstance(entry, dict):
                raise _damage(path, f"line {number} is {line.decode()!r:.80} instead of an entry")
            is_numbered = is_numbered or _NUMBER in entry
            found = entry.pop(_NUMBER, None)
            if is_numbered and found != number:
                raise _damage(path, f"line {number} has the number {found}: a line was deleted, added or moved")
            self.entries.append(entry)

    def read_logs(self, log_number_from: int) -> list[dict[str, Any]]:
        """Return the entries from this one on."""
        return self.entries[log_number_from:]

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        """Add entries, and write them if the disk lets it."""
        for number, log in enumerate(logs, len(self.entries) + 1):
            line = json.dumps({_NUMBER: number, **log}, separators=(",", ":"))
            self._content += f"{line}\n".encode()
            entry = json.loads(line)
            del entry[_NUMBER]
            self.entries.append(entry)
        self._write()

    def close(self) -> None:
        """Write what a failing disk has left out; log an error if it still fails."""
        if self._written < len(self._content):
            self._write()
        if self._written < len(self._content):
            logger.error(
                "%r lacks what happened since the disk failed: a search that is continued will repeat it.",
                str(self.path),
            )

    def _write(self) -> None:
        with self._tolerance, open_to_append(self.path) as file:
            if os.fstat(file.fileno()).st_size < self._written:  # it was deleted in the meantime
                self._written = 0
            file.truncate(self._written)
            rest = self._content[self._written :]
            if file.write(rest) != len(rest):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
            os.fsync(file.fileno())
            self._written = len(self._content)


class _Pruning(Callback):
    """Reports the evaluations of a trial, and ends its run if it is given up."""

    order = 20

    def __init__(self, run: _Run) -> None:
        self.run = run
        self.has_pruned: bool = False

    def on_train_start(self, trainer: Any) -> None:
        """End a resumed run that had been given up when it was killed."""
        self._ask(trainer)

    def on_eval_end(self, trainer: Any, metrics: Mapping[str, float]) -> None:
        """Report the objective, and end the run if the pruner says so."""
        step, value = trainer.progress.step, metrics[trainer.objective.key(metrics)]
        trainer.ranks.on_main("the report of a trial", lambda: self.run.report(step, value))
        self._ask(trainer)

    def _ask(self, trainer: Any) -> None:
        if trainer.ranks.on_main("the pruning of a trial", self.run.is_pruned):
            self.has_pruned = True
            trainer.stop()


def _in_order(points: list[dict[str, Any]]) -> Any:
    """Return a sampler of optuna that gives each trial the point of its number."""
    from optuna.samplers import BaseSampler

    class InOrder(BaseSampler):
        def infer_relative_search_space(self, study: Any, trial: Any) -> dict[str, Any]:
            return {}

        def sample_relative(self, study: Any, trial: Any, search_space: Any) -> dict[str, Any]:
            return {}

        def sample_independent(self, study: Any, trial: Any, param_name: str, param_distribution: Any) -> Any:
            return points[trial.number % len(points)][param_name]

    return InOrder()


def _read_facts(file: Path) -> dict[str, Any] | None:
    """Return what a search has written about itself; None if there is no file.

    Raises:
        CheckpointError: The file is damaged.
    """
    try:
        facts = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise _damage(file, f"it is not JSON ({error})") from error
    names = ("metric", "direction", "space", "sampler", "seed")
    missing = [name for name in names if name not in facts] if isinstance(facts, dict) else names
    if missing or not isinstance(facts["space"], dict):
        raise _damage(file, f"it lacks {', '.join(map(repr, missing or ['space']))}")
    return facts


def _damage(file: Path, problem: str) -> CheckpointError:
    return CheckpointError(
        f"{str(file)!r}, without which a search cannot be continued, is damaged: {problem}. Restore the file from a "
        "copy, or pass another `save_dir` for a new search."
    )


def _by_parameter(space: Mapping[str, Any]) -> dict[str, Any]:
    return {f"space[{name!r}]": one for name, one in space.items()}


def _words(error: BaseException) -> str:
    """Return an error as one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def _best_of(found: Iterable[T], score: Callable[[T], float | None], direction: str) -> T | None:
    """Return the first one with the best score; None if no score is a finite number."""
    best, top = None, math.nan
    for one in found:
        value = score(one)
        if value is None or not math.isfinite(value):
            continue
        if math.isnan(top) or (value > top if direction == "max" else value < top):
            best, top = one, value
    return best


def _score(trial: SearchTrial) -> float | None:
    return trial.score


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _place(params: Mapping[str, Any], name: str, is_number: bool) -> Any:
    """Return where a trial is on the axis of a parameter: its number, or its words; None without the parameter."""
    value = params.get(name)
    return value if is_number or name not in params else str(value)


def _draw(axes: Any, trials: list[SearchTrial], place: Callable[[SearchTrial], Any]) -> None:
    """Draw the scores as points, those of pruned trials hollow."""
    for state, style in (("complete", {"color": "C0"}), ("pruned", {"facecolors": "none", "edgecolors": "0.5"})):
        found = [(place(one), one.score) for one in trials if one.state == state and one.score is not None]
        found = [(at, score) for at, score in found if at is not None]
        if found:
            axes.scatter(*zip(*found, strict=True), label=state, **style)


def _draw_best(axes: Any, trials: list[SearchTrial], direction: str) -> None:
    """Draw the best score so far as steps."""
    choose = max if direction == "max" else min
    scores = [one.score for one in trials if one.score is not None]
    if scores:
        best = list(itertools.accumulate(scores, choose))
        axes.step([one.number for one in trials], best, where="post", color="C1", label="best so far")
