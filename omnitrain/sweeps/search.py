"""Hyperparameter search with optuna for any trainer.

Each trial is a run in its own folder. `spaces.py` has the search space, `hf/search.py` the search of transformers.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import json
import logging
import math
import os
import statistics
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from omnitrain.arguments import describe
from omnitrain.checkpoint.lock import Lock
from omnitrain.checkpoint.remote import one_line_error
from omnitrain.compute.random_state import derive_seed, isolated_rng
from omnitrain.core.display import ResultView, Table, create_panels
from omnitrain.core.errors import (
    CheckpointError,
    ConfigError,
    DistributedError,
    MissingExtraError,
    Tolerance,
    check_choice,
    check_number,
)
from omnitrain.core.events import Callback
from omnitrain.core.files import check_not_link, replace_file
from omnitrain.core.metric_format import get_descriptor
from omnitrain.core.paths import folder_path
from omnitrain.distributed.ranks import Ranks
from omnitrain.sweeps.spaces import Space
from omnitrain.trainer.base import BaseTrainer

logger: logging.Logger = logging.getLogger("omnitrain")

T = TypeVar("T")
MakeTrainer = Callable[[dict[str, Any], Path], BaseTrainer]

_JOURNAL_FILE = "search.journal"
_SETTINGS_FILE = "search.json"
_STUDY_NAME = "search"
_SAMPLERS = ("tpe", "random", "grid")
_PRUNERS = ("median", "none")
# If the first trials all fail, so many of them end the search: the cause is not in their values.
_MAX_FIRST_FAILURES = 3


@dataclass(frozen=True, slots=True)
class SearchTrial:
    """One trial of a search.

    Attributes:
        number: From 0.
        params: Its values by name, as JSON types.
        score: Its best value of the metric; None without a finite value.
        score_step: The step of that evaluation.
        step: The step at which the run ended.
        state: "complete", "pruned" or "failed".
        seconds: How long the run took.
        folder: The folder of the run.
        error: The error as one line; "" without one.
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


class SeedMean(NamedTuple):
    """The scores of complete trials that differ only in their seed.

    Attributes:
        params: Their values by name, without the seed.
        mean: The mean of their scores.
        deviation: The standard deviation of their scores, of a sample (divided by n - 1); None for one trial.
        trials: How many they are.
    """

    params: dict[str, Any]
    mean: float
    deviation: float | None
    trials: int


@dataclass(frozen=True, slots=True)
class SearchResult(ResultView):
    """The trials of a search, which print as a table; `plot()` draws the scores, in order and over each parameter.

    Attributes:
        trials: All finished trials, by number.
        metric: The metric of the score.
        direction: Whether a higher score is better ("max"), or a lower one ("min").
        folder: The `save_dir` of the search.
    """

    trials: list[SearchTrial]
    metric: str
    direction: str
    folder: Path

    @property
    def best(self) -> SearchTrial:
        """The trial with the best score of those that are complete; on a tie, the first.

        Raises:
            ConfigError: No trial is complete.
        """
        best = _select_best(_scores_of_complete(self.trials), self.direction)
        if best is None:
            raise ConfigError(f"No trial of {str(self.folder)!r} is complete, so there is no best:\n{self}")
        return next(trial for trial in self.trials if trial.number == best)

    @property
    def seed_means(self) -> list[SeedMean]:
        """The mean and deviation over seeds for all other values, best first; empty if no value is called "seed"."""
        scores: dict[str, list[float]] = {}
        params_by_group: dict[str, dict[str, Any]] = {}
        for trial in self.trials:
            # `trainer.seed` of a command line too
            params = {name: value for name, value in trial.params.items() if name.rpartition(".")[2] != "seed"}
            if trial.state == "complete" and trial.score is not None and len(params) < len(trial.params):
                group = json.dumps(params, sort_keys=True)
                params_by_group[group] = params
                scores.setdefault(group, []).append(trial.score)
        means = []
        for group, values in scores.items():
            deviation = statistics.stdev(values) if len(values) > 1 else None
            means.append(SeedMean(params_by_group[group], statistics.fmean(values), deviation, len(values)))
        return sorted(means, key=lambda mean: mean.mean, reverse=self.direction == "max")

    def table(self) -> str:
        """Return a row per trial: number, values, score and its step, last step, state and seconds; `*` is the best."""
        return str(self)

    def _table(self) -> Table:
        names, best = self._params(), _select_best(_scores_of_complete(self.trials), self.direction)
        form = get_descriptor(f"eval_{self.metric}").format
        rows = []
        for trial in self.trials:
            values = [trial.params.get(name, "-") for name in names]
            score = "-" if trial.score is None else f"{format(trial.score, form)} @{trial.score_step}"
            rows.append([
                str(trial.number),
                *(f"{value:.4g}" if isinstance(value, float) else str(value) for value in values),
                score + (" *" if trial.number == best else "  "), str(trial.step), trial.state, f"{trial.seconds:.1f}",
            ])  # fmt: skip
        below = [f"trial {trial.number}: {trial.error}" for trial in self.trials if trial.error]
        for mean in self.seed_means:
            values = ", ".join(f"{name}={value}" for name, value in mean.params.items())
            spread = "" if mean.deviation is None else f" ± {format(mean.deviation, form)}"
            seeds = f"{mean.trials} seed{'' if mean.trials == 1 else 's'}"
            place = f"{values}: " if values else ""
            below.append(f"{place}{self.metric} {format(mean.mean, form)}{spread} over {seeds}")
        return Table(["trial", *names, f"{self.metric}  ", "step", "state", "seconds"], rows, below=below)

    def _params(self) -> list[str]:
        return list(dict.fromkeys(name for trial in self.trials for name in trial.params))

    def _figure(self) -> Any:
        names, scored = self._params(), [trial for trial in self.trials if trial.score is not None]
        figure, (overview, *parameter_axes) = create_panels("SearchResult", len(names) + 1, has_one_axis=False)
        complete = [trial for trial in scored if trial.state == "complete"]
        _draw_scores(overview, scored, [trial.number for trial in scored])
        if complete:
            choose: Any = max if self.direction == "max" else min
            best = [*itertools.accumulate([trial.score for trial in complete], choose)]
            numbers = [trial.number for trial in complete]
            overview.step(numbers, best, where="post", color="C1", label="best so far")
            overview.legend(fontsize="small")
        for axes, name in zip(parameter_axes, names, strict=True):
            trials = [trial for trial in scored if name in trial.params]
            values = [trial.params[name] for trial in trials]
            is_number = all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values)
            _draw_scores(axes, trials, values if is_number else [*map(str, values)])
            if values and is_number and min(values) > 0 and max(values) >= 30 * min(values):
                axes.set_xscale("log")
        for axes, label in zip((overview, *parameter_axes), ("trial", *names), strict=True):
            axes.set(xlabel=label, ylabel=self.metric)
        return figure


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
    """Search hyperparameters, with one run per trial, and return the trials.

    The score of a trial is the best value of its trainer's objective (`optimization_metric`). Called again with the
    same `save_dir`, a search continues: finished trials are kept, and an interrupted trial resumes from its last
    checkpoint. Evaluations are reported to the pruner, which may stop a trial. A trial that raises an error has
    failed, and the search continues.

    Args:
        make_trainer: Called as `make_trainer(params, folder)`; returns a new trainer with `save_dir=folder`. It is
            called with the random generators seeded equally for each trial, and once more at the start of a search,
            to read the objective.
        space: The values by the name in `params`: a list of choices, a range such as {"low": 1e-5, "high": 1e-2,
            "log": True} or {"low": 16, "high": 128, "step": 16} (of integers if `low`, `high` and `step` are), or a
            function of optuna's trial.
        trials: The total number of trials, with those of earlier calls; None, for "grid", tries each point once.
        save_dir: The folder of the search; trials are in trial-0000, trial-0001, ... in it.
        direction: "max" or "min", to check that of the trainers' objective; None takes theirs.
        sampler: "tpe" (default), "random", "grid", or a sampler of optuna, whose random numbers start again when a
            search is continued.
        pruner: "median" (default; it stops no trial before five are complete), "none", or a pruner of optuna.
        seed: Seed for the choices and for `make_trainer`; default 42.

    Returns:
        The trials. `save_dir` gets their table, search.txt, and with matplotlib a plot, search.png.

    Raises:
        ConfigError: An argument is wrong, `save_dir` holds another search, or a trainer does not fit: no evaluation
            set, another folder or another objective.
        CheckpointError: The folder is in use or not writable when the search begins; a file of the search is damaged;
            or the trainer of `make_trainer` cannot resume a trial.
        MissingExtraError: optuna is not installed.
        Exception: That of a trial, if each of the first three has failed.
    """
    try:
        import optuna
    except ImportError:
        raise MissingExtraError("search", "optuna", "search") from None
    if not callable(make_trainer):
        raise ConfigError(f"`make_trainer` must be callable as make_trainer(params, folder), got {make_trainer!r}.")
    folder, search_space = folder_path(os.fspath(save_dir), "save_dir"), Space(space)
    _check_arguments(trials, direction, sampler, pruner, seed)
    if sampler == "grid":
        size = len(search_space.points())
        trials = size if trials is None else min(trials, size)
    if trials is None:
        raise ConfigError(
            "`trials` is the total number of trials, and may be left out only with sampler='grid'. Pass a number."
        )
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)  # optuna logs a line per trial
    try:
        run = _Search(make_trainer, search_space, folder, sampler or "tpe", pruner or "median", seed)
        return run.run_trials(trials, direction)
    finally:
        optuna.logging.set_verbosity(verbosity)


def _check_arguments(trials: Any, direction: Any, sampler: Any, pruner: Any, seed: Any) -> None:
    import optuna

    if trials is not None:
        check_number("trials", trials, least=1, is_whole=True)
    check_number("seed", seed, least=0, is_whole=True)
    if direction not in ("max", "min", None):
        raise ConfigError(f"`direction` must be 'max', 'min' or None, got {direction!r}.")
    for name, value, known, kind in (
        ("sampler", sampler, _SAMPLERS, optuna.samplers.BaseSampler),
        ("pruner", pruner, _PRUNERS, optuna.pruners.BasePruner),
    ):
        if value is not None and not isinstance(value, kind):
            check_choice(name, value, known, f", or a {name} of optuna")


@dataclass
class _Search:
    """An active search, on each rank; only the main rank has its journal."""

    make_trainer: MakeTrainer
    space: Space
    folder: Path
    sampler: Any
    pruner: Any
    seed: int
    ranks: Ranks = field(default_factory=Ranks)
    metric: str = ""
    direction: str = ""
    study: Any = None
    trial: Any = None
    storage: Any = None
    reported: dict[int, float] = field(default_factory=dict)
    """The values of the current trial's evaluations by step."""

    def run_trials(self, trials: int, direction: str | None) -> SearchResult:
        """Run trials up to this total number, and return all."""
        if not (self.folder / _SETTINGS_FILE).exists() or os.environ.get("WORLD_SIZE", "1") != "1":
            self._probe_trainer()
            gc.collect()  # a trainer and its parts refer to each other
        failures, has_trained = list[str](), False
        with contextlib.ExitStack() as stack:
            settings = self._on_main("the journal of the search", lambda: self._open_journal(stack, direction))
            self.metric, self.direction = settings["metric"], settings["direction"]
            while (turn := self._on_main("the next trial", lambda: self._next_trial(trials))) is not None:
                error = self._run_trial(*turn)
                has_trained = has_trained or error is None
                if error is None or has_trained:
                    continue
                failures.append(f"trial {turn[0]}: {one_line_error(error)}")
                if len(failures) == min(_MAX_FIRST_FAILURES, trials):
                    error.add_note(f"Every trial so far has failed: {'; '.join(failures)}")
                    raise error
            return self._on_main("the result of the search", self._write_result)

    def _on_main(self, what: str, work: Callable[[], T]) -> T:
        with self.ranks.collective_call("search()"):
            return self.ranks.on_main(what, work)

    # --- trials

    def _probe_trainer(self) -> None:
        """Read the objective and the ranks from the first trainer that can be created; nothing is trained."""
        import optuna

        probe = optuna.create_study(sampler=copy.deepcopy(self._make_sampler(0)))
        for number in range(_MAX_FIRST_FAILURES):
            if isinstance(self.sampler, str):
                probe.sampler = self._make_sampler(number)
            params = self.space.suggest(probe.ask())
            try:
                trainer = self._make(params, number)
            except Exception:
                if number == _MAX_FIRST_FAILURES - 1:
                    raise
                continue
            self._check_trainer(trainer, number)
            self.ranks = trainer.ranks
            self.metric, self.direction = trainer.objective.metric, trainer.objective.direction
            trainer.backend.release()
            break

    def _trial_folder(self, number: int) -> Path:
        return self.folder / f"trial-{number:04d}"

    def _make(self, params: dict[str, Any], number: int) -> BaseTrainer:
        with isolated_rng(None, self.seed):
            return self.make_trainer(dict(params), self._trial_folder(number))

    def _check_trainer(self, trainer: Any, number: int) -> None:
        """Raise ConfigError for a trainer that a search cannot use."""
        folder = self._trial_folder(number)
        if not isinstance(trainer, BaseTrainer):
            raise ConfigError(f"`make_trainer` must return a trainer, got {type(trainer).__name__}.")
        if trainer.save_dir is None or trainer.save_dir.resolve() != folder.resolve():
            save_dir = None if trainer.save_dir is None else str(trainer.save_dir)
            hint = " With TrainingArguments, `save_strategy` must not be 'no'." if save_dir is None else ""
            raise ConfigError(
                f"The trainer of trial {number} has save_dir={save_dir!r}, and each trial needs its own folder. Pass "
                f"the second argument of `make_trainer` as `save_dir`, here {str(folder)!r}.{hint}"
            )
        if trainer.progress.step:
            raise ConfigError(
                f"The trainer of trial {number} has trained before. `make_trainer` must return a new one each time."
            )
        if trainer.eval_loader is None:
            what = "A search compares the evaluations of its trials"
            raise ConfigError(f"{what}, and the trainer has no evaluation set. Pass `eval_dataset`.")
        metric, direction = trainer.objective.metric, trainer.objective.direction
        if self.metric and (metric, direction) != (self.metric, self.direction):
            raise ConfigError(
                f"The trainer of trial {number} optimizes {metric!r} ({direction}), and this search {self.metric!r} "
                f"({self.direction}). All trainers of a search need the same `optimization_metric` and direction."
            )

    def _run_trial(self, number: int, params: dict[str, Any]) -> Exception | None:
        """Run a trial to its end, record it and free its trainer; return the error if it has failed."""
        trainer, error, pruning = None, None, _Pruning(self)
        try:
            try:
                trainer = self._make(params, number)
            except Exception as raised:
                error = raised
            if trainer is not None:
                self._check_trainer(trainer, number)
                trainer._callbacks.append(pruning)  # `model_init` makes a new model, which registers these again
                trainer.lifecycle.register([*trainer.lifecycle.callbacks, pruning])
                try:
                    trainer.train(resume_from="auto")
                except (CheckpointError, DistributedError):
                    raise  # not due to the values of the trial, which can be resumed
                except Exception as raised:
                    error = raised
                if error is None and trainer.objective.best is None:
                    error = ConfigError(f"No evaluation had a finite value of {self.metric!r}.")
            # if only this rank has failed, the others wait in another collective, which raises on all of them
            with self.ranks.collective_call("search()"):
                errors = self.ranks.gather("the end of a trial", "" if error is None else one_line_error(error))
            message = next(filter(None, errors), "")
            self._on_main("the record of a trial", lambda: self._record(trainer, pruning.has_pruned, message))
            error = error or (DistributedError(message) if message else None)
        finally:
            if trainer is not None:
                trainer.backend.release()
            trainer = None  # the frame of an error outlives the call
        if error is not None:
            logger.warning("Trial %d has failed: %s", number, one_line_error(error), exc_info=error)
            traceback.clear_frames(error.__traceback__)  # they keep the model
        gc.collect()
        return error

    # --- the journal, on the main rank

    def _open_journal(self, stack: contextlib.ExitStack, direction: str | None) -> dict[str, Any]:
        """Open or create the journal of this search; return the settings that must stay the same."""
        file = self.folder / _SETTINGS_FILE
        try:
            settings = self._check_settings(_read_settings(file), direction)
            self.folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(Lock(self.folder).hold())
            journal = _Journal(self.folder / _JOURNAL_FILE)
            if not file.exists():
                if journal.entries:
                    raise _damage_error(file, "it is missing")
                replace_file(file, (json.dumps(settings, indent=2) + "\n").encode())
        except OSError as error:
            raise CheckpointError(
                f"A search cannot use its folder {str(self.folder)!r}: {error}. Free space or allow writing there, or "
                "pass another `save_dir`."
            ) from error
        stack.callback(journal.close)
        try:
            import optuna

            pruners = {"median": optuna.pruners.MedianPruner, "none": optuna.pruners.NopPruner}
            goal = "maximize" if settings["direction"] == "max" else "minimize"
            is_new = not journal.entries
            self.storage = optuna.storages.JournalStorage(journal)  # type: ignore[arg-type]
            if is_new:
                optuna.create_study(direction=goal, storage=self.storage, study_name=_STUDY_NAME)
            pruner = pruners[self.pruner]() if isinstance(self.pruner, str) else self.pruner
            self.study = optuna.load_study(study_name=_STUDY_NAME, storage=self.storage, pruner=pruner)
            self._finished_trials()
        except Exception as error:
            raise _damage_error(journal.path, f"its entries do not fit together ({one_line_error(error)})") from error
        return settings

    def _check_settings(self, saved: dict[str, Any] | None, direction: str | None) -> dict[str, Any]:
        """Return the settings of this search; raise ConfigError if they differ from those of its folder."""
        objective = {"metric": self.metric, "direction": self.direction}
        if saved is not None and not self.metric:  # no trainer was made to read it from
            objective = {name: saved[name] for name in objective}
        space, sampler = self.space.describe(), describe(self.sampler)
        settings = {**objective, "space": space, "sampler": sampler, "seed": self.seed}
        if direction not in (None, settings["direction"]):
            raise ConfigError(
                f"direction={direction!r}, but the objective of the trainers is {settings['metric']!r} with direction "
                f"{settings['direction']!r}. Pass `optimization_metric` and `optimization_direction` to the trainer."
            )
        before, after = (
            {f"space[{name!r}]": value for name, value in entries["space"].items()} | {**entries, "space": None}
            for entries in (saved or settings, settings)
        )
        changed = [
            f"`{name}` was {before.get(name, 'not there')!r} and is {after.get(name, 'not there')!r}"
            for name in dict.fromkeys([*before, *after]) if before.get(name, ...) != after.get(name, ...)
        ]  # fmt: skip
        if changed:
            raise ConfigError(
                f"{str(self.folder)!r} holds another search: {'; '.join(changed)}. Pass the earlier values to continue "
                "it, or another `save_dir`."
            )
        return settings

    def _make_sampler(self, number: int) -> Any:
        """Return the sampler of a trial, seeded by its number: an interruption changes no choice."""
        import optuna

        seed = derive_seed(self.seed, number) % 2**32
        if self.sampler == "tpe":
            return optuna.samplers.TPESampler(seed=seed)
        if self.sampler == "random":
            return optuna.samplers.RandomSampler(seed=seed)
        return _grid_sampler(self.space.points()) if self.sampler == "grid" else self.sampler

    def _next_trial(self, trials: int) -> tuple[int, dict[str, Any]] | None:
        """Return number and values of the next trial, an interrupted one first; None after the last."""
        import optuna

        existing = self.study.get_trials(deepcopy=False)
        interrupted = [trial for trial in existing if trial.state == optuna.trial.TrialState.RUNNING]
        if not interrupted and len(existing) >= trials:
            return None
        number = interrupted[0].number if interrupted else len(existing)
        self.study.sampler = self._make_sampler(number)
        if interrupted:
            study_id = self.storage.get_study_id_from_name(_STUDY_NAME)
            trial_id = self.storage.get_trial_id_from_study_id_trial_number(study_id, number)
            self.trial = optuna.trial.Trial(self.study, trial_id)
        elif any((folder := self._trial_folder(number)).glob("checkpoint-*")):  # the trial would resume from them
            raise ConfigError(
                f"{str(folder)!r} has checkpoints, and trial {number} of this search has not begun. Delete the files "
                "of an earlier search, or pass another `save_dir`."
            )
        else:
            self.trial = self.study.ask()
        self.reported = dict(interrupted[0].intermediate_values) if interrupted else {}
        params = self.space.suggest(self.trial)
        self.trial.set_user_attr("params", describe(params))
        return number, params

    def _record(self, trainer: BaseTrainer | None, is_pruned: bool, error: str) -> None:
        """Record the result of the current trial."""
        from optuna.trial import TrialState

        end: dict[str, Any] = {"step": 0, "seconds": 0.0, "score": None, "score_step": None, "error": error}
        state = TrialState.FAIL if error else TrialState.COMPLETE
        if trainer is not None:
            objective, progress = trainer.objective, trainer.progress
            end |= {"step": progress.step, "seconds": progress.seconds}
            end |= {"score": objective.best, "score_step": objective.best_step}
            if not error and is_pruned and trainer.stop_reason == "requested":  # otherwise it had ended anyway
                state, best = TrialState.PRUNED, _select_best(self.reported, self.direction)
                score = None if best is None else self.reported[best]
                end |= {"step": max(self.reported), "score": score, "score_step": best}  # also of a resumed run
        self.trial.set_user_attr("end", end)
        value = end["score"] if state == TrialState.COMPLETE else None
        self.study.tell(self.trial, value, state=state)
        logger.info("Trial %d: %s, %s %s.", self.trial.number, state.name.lower(), self.metric, end["score"])

    def _finished_trials(self) -> list[SearchTrial]:
        states = {"COMPLETE": "complete", "PRUNED": "pruned", "FAIL": "failed"}
        trials = []
        for trial in self.study.get_trials(deepcopy=False):
            if trial.state.name in states:
                params, end = trial.user_attrs["params"], trial.user_attrs["end"]
                state, folder = states[trial.state.name], self._trial_folder(trial.number)
                trials.append(SearchTrial(number=trial.number, params=params, state=state, folder=folder, **end))
        return trials

    def _write_result(self) -> SearchResult:
        """Write table and plot of the result, and return it."""
        result = SearchResult(self._finished_trials(), self.metric, self.direction, self.folder)
        with Tolerance("search.txt", "The result is returned without it."):
            replace_file(self.folder / "search.txt", f"{result}\n".encode())
        with Tolerance("search.png", "The result is returned without it."), contextlib.suppress(MissingExtraError):
            check_not_link(self.folder / "search.png")
            result.plot(self.folder / "search.png")
        return result


class _Journal:
    """The journal of a search in a file, for optuna's JournalStorage: JSON, a line for each entry, with its number.

    One process writes it, which holds the lock of the folder. While the disk fails, entries are kept in memory. An
    incomplete last line, of a killed process, is dropped; any other damage is a CheckpointError.
    """

    def __init__(self, path: Path) -> None:
        check_not_link(path)
        content = path.read_bytes() if path.exists() else b""
        self.path = path
        self.entries: list[dict[str, Any]] = []
        self._lines = content.splitlines(keepends=True)
        if self._lines and not content.endswith(b"\n"):
            self._lines.pop()
        self._tolerance = Tolerance(path.name, "Its entries are kept in memory until they can be written.")
        for number, line in enumerate(self._lines, 1):
            try:
                entry = json.loads(line)
                entry_number = entry.pop("line", None)
            except (ValueError, AttributeError) as error:
                raise _damage_error(path, f"line {number} is no entry ({error})") from error
            if entry_number != number:
                problem = f"line {number} has the number {entry_number}: a line was deleted, added or moved"
                raise _damage_error(path, problem)
            self.entries.append(entry)

    def read_logs(self, log_number_from: int) -> list[dict[str, Any]]:
        return self.entries[log_number_from:]

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        for number, log in enumerate(logs, len(self.entries) + 1):
            self.entries.append(json.loads(json.dumps(log)))
            self._lines.append(f"{json.dumps({'line': number, **log}, separators=(',', ':'))}\n".encode())
        with self._tolerance:
            replace_file(self.path, self._lines)

    def close(self) -> None:
        """Write the entries missing in the file; log an error if the disk still fails."""
        if self._tolerance.has_failed:
            self.append_logs([])
        if self._tolerance.has_failed:
            logger.error(
                "%r lacks the entries since the disk failed: a continued search repeats these trials.", str(self.path)
            )


class _Pruning(Callback):
    """Reports the evaluations of a trial, and stops its run if it is pruned."""

    order = 20

    def __init__(self, run: _Search) -> None:
        self.run = run
        self.has_pruned: bool = False

    def on_train_start(self, trainer: Any) -> None:
        """Stop a resumed run that was pruned before it was killed."""
        run = self.run
        if trainer.ranks.on_main("the pruning of a trial", lambda: bool(run.reported) and run.trial.should_prune()):
            self.has_pruned = True
            trainer.stop()

    def on_eval_end(self, trainer: Any, metrics: Mapping[str, float]) -> None:
        """Report the objective, and stop the run if it is pruned."""
        step, value = trainer.progress.step, metrics[trainer.objective.key(metrics)]

        def report() -> None:
            if step not in self.run.reported:  # a resumed run repeats evaluations
                self.run.reported[step] = value
                self.run.trial.report(value, step)

        trainer.ranks.on_main("the report of a trial", report)
        self.on_train_start(trainer)


def _grid_sampler(points: list[dict[str, Any]]) -> Any:
    """Return an optuna sampler that gives trial n the n-th point."""
    from optuna.samplers import BaseSampler

    class GridSampler(BaseSampler):
        def infer_relative_search_space(self, study: Any, trial: Any) -> dict[str, Any]:
            return {}

        def sample_relative(self, study: Any, trial: Any, search_space: Any) -> dict[str, Any]:
            return {}

        def sample_independent(self, study: Any, trial: Any, param_name: str, param_distribution: Any) -> Any:
            return points[trial.number % len(points)][param_name]

    return GridSampler()


def _read_settings(file: Path) -> dict[str, Any] | None:
    """Return the saved settings of a search; None without a file."""
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise _damage_error(file, f"it is not JSON ({error})") from error
    names = ("metric", "direction", "space", "sampler", "seed")
    missing = [name for name in names if name not in settings] if isinstance(settings, dict) else names
    if missing or not isinstance(settings["space"], dict):
        raise _damage_error(file, f"it lacks {', '.join(map(repr, missing or ['space']))}")
    return settings


def _damage_error(file: Path, problem: str) -> CheckpointError:
    return CheckpointError(
        f"{str(file)!r}, without which a search cannot be continued, is damaged: {problem}. Restore the file from a "
        "copy, or pass another `save_dir` for a new search."
    )


def _scores_of_complete(trials: Iterable[SearchTrial]) -> dict[int, float | None]:
    return {trial.number: trial.score for trial in trials if trial.state == "complete"}


def _select_best(scores: Mapping[int, float | None], direction: str) -> int | None:
    """Return the first key with the best finite score, or None."""
    finite = {key: score for key, score in scores.items() if score is not None and math.isfinite(score)}
    return (max if direction == "max" else min)(finite, key=finite.__getitem__, default=None)


def _draw_scores(axes: Any, trials: list[SearchTrial], xs: list[Any]) -> None:
    """Draw the scores as points, those of pruned trials hollow."""
    for state, style in (("complete", {"color": "C0"}), ("pruned", {"facecolors": "none", "edgecolors": "0.5"})):
        points = [(x, trial.score) for x, trial in zip(xs, trials, strict=True) if trial.state == state]
        if points:
            axes.scatter(*zip(*points, strict=True), label=state, **style)
