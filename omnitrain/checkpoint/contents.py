"""Capture and restore of each part of a run for checkpoints.

The backend reads and writes weights and optimizer state; `store.py` has folders and manifests, and `checkpointer.py`
decides when to save. Everywhere here `content` is the omnitrain.json of a checkpoint, `changed` are settings that were
allowed to change and keep their new values, and `undo` restores objects if a checkpoint is rejected.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib.metadata
import logging
import math
import platform
import reprlib
import socket
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch.optim.lr_scheduler import LambdaLR

from omnitrain import __version__
from omnitrain.arguments import Settings
from omnitrain.backends.backend import Backend
from omnitrain.checkpoint import state_dicts
from omnitrain.checkpoint.eval_weights import EvalWeights
from omnitrain.checkpoint.fingerprints import Difference, find_differences, fingerprint_run, summarize_data
from omnitrain.checkpoint.manifest import read_history, validate
from omnitrain.checkpoint.model_files import FROZEN, FrozenWeights
from omnitrain.checkpoint.run_record import CONFIG_FILE, StartRecord, device_name, write_config
from omnitrain.checkpoint.safetensors_header import find_tensor_files
from omnitrain.checkpoint.setting_changes import GROUPING, InitialOptions, changed_settings, regroup_state
from omnitrain.checkpoint.tensor_files import Catalogue, TensorFile
from omnitrain.compute.precision import growth_interval
from omnitrain.compute.random_state import GENERATORS, derive_seed, seed_everything
from omnitrain.config.instantiation import TrainerConfig
from omnitrain.core.errors import CheckpointError
from omnitrain.core.events import Algorithm, TrainerLike, restore_with_undo
from omnitrain.core.progress import Progress
from omnitrain.data.loaders import MapLoader, StreamLoader
from omnitrain.data.sets import Sets
from omnitrain.data.stateful import check_parts, data_parts, has_state, preserve_state, stateful_parts
from omnitrain.data.streams import StreamPosition
from omnitrain.distributed.ranks import Ranks
from omnitrain.optim.build import ScheduleLR

logger: logging.Logger = logging.getLogger("omnitrain")

OPTIMIZER = "optimizer/state.safetensors"

# The random number generators of all ranks.
RNG = "rng/state.safetensors"
# The weights in training, if the model's file has others, such as averages of them.
TRAINED = "trained.safetensors"
# The tensors in the states of callbacks, algorithms and data.
STATES = "states.safetensors"
# How many seconds a checkpoint outside of a run waits for git.
_GIT_S = 2.0
# The prefix of the names of tensors in the state of data.
_STREAM = "stream"

Files = dict[str, dict[str, torch.Tensor]]
"""Tensors by file and name."""


def optimizer_file(name: str) -> str:
    """Return the name of the file of one of several optimizers."""
    return f"optimizer/{name}.safetensors"


class CheckpointedTrainer(TrainerLike, Protocol):
    """The part of a trainer that a checkpoint uses."""

    config: TrainerConfig
    settings: Settings
    ranks: Ranks
    backend: Backend
    algorithms: list[Algorithm]
    scheduler_interval: str


@dataclass(slots=True)
class Snapshot:
    """One checkpoint on its way to the disk: tensors by file and name, and the payload of omnitrain.json."""

    files: Files
    payload: dict[str, Any]
    step: int
    score: float | None
    best: bool
    evaluated_step: int
    rows: bytes
    """The history as lines of JSON."""


@dataclass(slots=True)
class Checkpoint:
    """A verified checkpoint.

    Attributes:
        folder: Its folder.
        where: Its name in errors.
        content: Its omnitrain.json, with the rows of the history.
        parts: The files of each part with tensors, such as `OPTIMIZER`, and the tensors in them.
    """

    folder: Path
    where: str
    content: dict[str, Any]
    parts: dict[str, tuple[list[Path], Catalogue]] = field(default_factory=dict)

    def open(self, part: str, ranks: Ranks | None = None) -> TensorFile:
        """Return the tensors of a part, which may be sharded; none if the checkpoint does not have it.

        This rank reads them, or all of `ranks`.
        """
        paths, catalogue = self.parts[part]
        return TensorFile(paths, ranks, catalogue)


Use = Literal["resume", "load", "weights"]
"""What a checkpoint is for: a resumed run, `load_checkpoint()`, or only its weights."""


class Contents:
    """The contents of a run's checkpoints.

    Args:
        trainer: Model, optimizer, schedule, scaler, algorithms and settings.
        lifecycle: The run's `Lifecycle`: progress, objective, history, and the states of the callbacks.
        step: The run's `Step`: losses and norm of the current epoch.
        sets: The data.
        initial: The options of optimizer and schedule at the beginning of the run.
        eval_weights: The weights for evaluations.

    Attributes:
        record: The record of this start since the latest `record_start`; only on the main rank.
    """

    def __init__(
        self,
        trainer: CheckpointedTrainer,
        lifecycle: Any,
        step: Any,
        sets: Sets,
        initial: InitialOptions,
        eval_weights: EvalWeights,
    ) -> None:
        self._trainer = trainer
        self._lifecycle = lifecycle
        self._step = step
        self._sets = sets
        self._initial = initial
        self._eval_weights = eval_weights
        self._identity: dict[str, Any] | None = None
        self.record: StartRecord | None = None
        self._frozen = FrozenWeights(trainer.backend, trainer.ranks, trainer.settings.save_frozen)

    def record_start(self, resumed: str | None = None, folder: Path | None = None, replaces_all: bool = False) -> None:
        """Begin the record of this start of a run, and compute the fingerprints of data and code for its checkpoints.

        Args:
            resumed: The checkpoint from which the run is resumed, which was compared with these fingerprints before.
            folder: The folder of the run, to which the record and the configuration are written.
            replaces_all: Whether the run replaces those that were recorded there.
        """
        ranks, device = self._trainer.ranks, self._trainer.device
        gathered = ranks.gather_on_main("the hosts of a run", [(socket.gethostname(), device_name(device))])
        if ranks.is_main:
            if self.record is not None:
                self.record.close()
            position = {"step": self._lifecycle.progress.step, "resumed_from": resumed}
            self.record = StartRecord(device, [process for (process,) in gathered], position)
        if resumed is None:
            self._identify()
        if folder is not None and self.record is not None and self._identity is not None:
            settings = self._trainer.resolved_config()
            del settings["save_dir"]  # the folder can be moved
            data = summarize_data(self._identity["data"])
            details = {"data": data, "code": self._identity["code"], "settings": settings}
            self.record.write(folder, details, replaces_all)
            write_config(folder / CONFIG_FILE, self._trainer.config.text())

    def _identify(self) -> dict[str, Any]:
        """Compute the fingerprints of data and code.

        On the main rank only: datasets are compared between ranks elsewhere, and hashing on all would read each file n
        times.
        """
        settings, model = self._trainer.settings, self._trainer.backend.model
        with self._trainer.ranks.in_phase("data"), preserve_state(data_parts(settings)):
            identity = self._trainer.ranks.on_main(
                "the fingerprints of data and code", lambda: fingerprint_run(settings, self._sets, model)
            )
        self._identity = identity
        return identity

    def differences(self, content: Mapping[str, Any]) -> list[Difference]:
        """Return the differences of data and code from a checkpoint's."""
        return find_differences(content["identity"], self._identify(), self._sets)

    def capture(self, history: dict[str, Any]) -> tuple[Files, dict[str, Any]]:
        """Return the state of the run: references to its live tensors by file and name, and the rest as JSON types.

        The state `history` of the lifecycle is, at the end of a run, that from before its closing evaluation, which a
        longer run would not have.
        """
        files, payload = self.capture_tensors()
        if self._identity is None:  # outside of train()
            self.record_start()
            if self.record is not None:
                self.record.to_dict(_GIT_S)
                self.record.close()
        tensors, states = self.capture_states(history["callbacks"])
        if not payload["only_model"]:
            states["stream"] = self._capture_stream(tensors)
        if tensors and not payload["only_model"]:
            files[STATES] = tensors
        payload |= self._capture_history(history) | states
        settings = self._trainer.resolved_config()
        del settings["save_dir"]
        payload |= {
            "settings": settings,
            "identity": self._identity,
            "record": None if self.record is None else self.record.to_dict(),
            "world_size": self._trainer.ranks.world_size,
            "versions": _versions(),
            "saved_at": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        if self.record is not None:
            self.record.complete()
        return files, payload

    def check_live_position(self) -> None:
        """Raise CheckpointError if only a checkpoint has the position in the training data."""
        loader = self._sets.train
        source = getattr(loader, "loader", getattr(loader, "dataset", None))
        if self._lifecycle.progress.samples_in_epoch and not isinstance(loader, MapLoader) and has_state(source):
            raise CheckpointError("the position of data with a `state_dict()` inside an epoch needs a `save_dir`")

    def capture_live_state(self) -> dict[str, Any]:
        """Return the state that live objects lose when a run ends, for continuing the run in this process."""
        trainer, lifecycle = self._trainer, self._lifecycle
        loop = self._capture_history(lifecycle.state_dict())  # collective
        return {
            **loop,
            "callbacks": copy.deepcopy(loop["callbacks"]),
            "metrics": lifecycle.metrics.to_dict(),
            "settings": trainer.resolved_config(),
            "scheduler": None if trainer.lr_scheduler is None else copy.deepcopy(trainer.lr_scheduler.state_dict()),
            "groups": group_options(trainer.backend.groups),
            "rng": state_dicts.rng_tensors(trainer.device),
        }

    def restore_live_state(self, state: Mapping[str, Any]) -> None:
        """Restore the state from `capture_live_state`; weights, optimizer state and algorithms are live."""
        scheduler, groups = self._trainer.lr_scheduler, self._trainer.backend.groups
        fresh = self._fresh_schedule()
        with contextlib.ExitStack() as undo:  # undone if the code of a callback or schedule rejects its state
            self._lifecycle.load_callbacks(state["callbacks"], undo)
            self._restore_epoch_size(state, ())
            if scheduler is not None:
                restore_with_undo(scheduler, state["scheduler"], undo)
            undo.pop_all()
        for group, options in zip(groups, state["groups"], strict=True):
            group |= options
        self._restore_schedule(state, (), fresh)
        self._restore_history(state, ())

    def capture_tensors(self) -> tuple[Files, dict[str, Any]]:
        """Return weights, optimizer, schedule, scaler, random numbers and data.

        The tensors are references to live ones: the writer copies them, or writes before training continues.
        """
        trainer, backend, ranks = self._trainer, self._trainer.backend, self._trainer.ranks
        frozen, only_model = self._frozen.excluded(), trainer.settings.save_only_model is True
        backend.sync_buffers()
        trained = backend.model_tensors()
        eval_weights = self._eval_weights.differing(trained)
        files: Files = {state_dicts.WEIGHTS: {**trained, **eval_weights}}
        for name in frozen:
            del files[state_dicts.WEIGHTS][name]
        extra_state = state_dicts.extra_state(backend.model)
        payload: dict[str, Any] = {"extra_state": extra_state, "frozen": frozen, "only_model": only_model}
        if only_model:
            return files, payload
        if eval_weights:
            files[TRAINED] = {name: trained[name] for name in eval_weights}
        files[OPTIMIZER], payload["optimizer"] = backend.optimizer_state()
        payload["optimizers"] = dict.fromkeys(backend.optimizers)  # None for the one that is saved as `optimizer`
        for name, optimizer in backend.optimizers.items():
            if optimizer is not backend.optimizer:
                state = state_dicts.optimizer_state(optimizer, backend.model)
                files[optimizer_file(name)], payload["optimizers"][name] = state
        scheduler, loader = trainer.lr_scheduler, self._sets.train
        schedule = None if scheduler is None else state_dicts.to_json(scheduler.state_dict(), "scheduler")
        is_map = isinstance(loader, MapLoader)
        drawn = set(map(GENERATORS.index, loader.fetch.drawn)) if is_map else set[int]()
        gathered = ranks.gather_on_main(
            "the random numbers for a checkpoint", [(*state_dicts.rng_tensors(trainer.device), drawn)]
        )
        files[RNG], payload["rng"] = {}, []
        for rank, ((generators, rest, _),) in enumerate(ranks.one_per_share(gathered)):
            for name, tensor in generators.items():
                files[RNG][f"{rank}/{name}"] = tensor
            payload["rng"].append(rest)
        for ((_, _, drawn_there),) in gathered:
            drawn |= drawn_there
        payload |= {
            "scheduler": schedule,
            "scaler": state_dicts.to_json(backend.scaler.state_dict(), "scaler"),
            # the generators from which the data draw, and the kind of order
            "drawn": sorted(drawn),
            "order": "keyed" if is_map and loader.sampler.is_keyed else "drawn",
        }
        return files, payload

    def open(self, folder: Path, content: dict[str, Any], use: Use) -> Checkpoint:
        """Return a checkpoint, after checking that a run can have written it and its parts fit together.

        On the main rank. `restore` checks whether it fits this run.

        Raises:
            CheckpointError: If it is damaged or incomplete; nothing has changed.
        """
        checkpoint = Checkpoint(folder, repr(str(folder)), content)
        validate(content, checkpoint.where)
        is_full, optional = use != "weights" and not content["only_model"], (TRAINED, STATES)
        full = [RNG, *optional, *_optimizer_states(content)] if is_full else []
        for part in (state_dicts.WEIGHTS, *full):
            paths = find_tensor_files(folder, content["files"], part)
            if not paths and part not in optional:
                raise CheckpointError(f"{checkpoint.where} is incomplete: {part!r} is not among its files.")
            checkpoint.parts[part] = paths, TensorFile(paths).catalogue
        content["metrics"] = read_history(folder, content)
        if not is_full:
            return checkpoint
        # states that no run has left for the present objects
        where = checkpoint.where
        states = [content["callbacks"], content["algorithms"], content["stream"], content.get("parts")]
        state_dicts.check_references(states, checkpoint.open(STATES), where)
        for tensors, rest in _generators(checkpoint):
            state_dicts.check_rng_tensors(tensors, rest, self._trainer.device, where)
        loader, position = self._sets.train, content["stream"]
        if position is not None and isinstance(loader, StreamLoader) and not self._has_other_data(content):
            _check_stream(loader.dataset, state_dicts.from_json(position["state"]), where)
        changed: Collection[str] = ()
        if use == "resume":  # whether these were allowed to change is only known in `Checkpointer.resume`
            changed = changed_settings(content["settings"], self._trainer.resolved_config())
        try:
            changed = self._with_dependent(checkpoint, changed)
            self._check_model(checkpoint, changed)
        except CheckpointError:
            return checkpoint  # from another model, so `restore` will reject it
        self._check_state(checkpoint, changed)
        for part, (_, saved) in _optimizer_states(content).items() if "optimizer" not in changed else ():
            state_dicts.check_numbers(checkpoint.open(part), saved, repr(str(checkpoint.folder / part)))
        return checkpoint

    def _has_other_data(self, content: Mapping[str, Any], *names: str) -> bool:
        """Return whether a checkpoint's position in the data is that of other data."""
        saved, current = content["settings"], self._trainer.resolved_config()
        return any(saved.get(name) != current[name] for name in ("train_dataset", *names))

    def restore(self, checkpoint: Checkpoint, changed: Collection[str] = ()) -> None:
        """Restore a checkpoint, except for its random numbers; if it is rejected, the run is unchanged."""
        trainer, content, scheduler = self._trainer, checkpoint.content, self._trainer.lr_scheduler
        changed = self._with_dependent(checkpoint, changed)

        def check() -> None:
            self._check_model(checkpoint, changed)
            self._check_state(checkpoint, changed)

        trainer.ranks.on_main("the check of a checkpoint", check)
        self._frozen.excluded()  # of the user's model, before a full checkpoint loads other frozen weights
        if content["frozen"] and FROZEN not in changed:
            self._frozen.check(content["frozen"], checkpoint.where)
        states, trained = checkpoint.open(STATES, trainer.ranks), checkpoint.open(TRAINED, trainer.ranks)
        fresh = self._fresh_schedule()
        with contextlib.ExitStack() as undo:
            # first the states that only the objects' own code can check
            self._lifecycle.load_callbacks(state_dicts.from_json(content["callbacks"], states), undo)
            if "algorithms" not in changed:
                algorithm_states = state_dicts.from_json(content["algorithms"], states)
                for algorithm, state in zip(trainer.algorithms, algorithm_states, strict=True):
                    restore_with_undo(algorithm, state, undo)
            self._restore_parts(content, changed, states, undo)
            self._restore_epoch_size(content, changed)  # after callbacks and datasets, which may set the length
            if scheduler is not None and "lr_scheduler" not in changed:
                restore_with_undo(scheduler, state_dicts.from_json(content["scheduler"]), undo)
            self.restore_weights(checkpoint)
            self._eval_weights.are_loaded = False
            if trainer.algorithms and "algorithms" not in changed:
                self._eval_weights.restore(trained)  # the model has the weights for evaluations, which belong to them
            if trained:
                where, rest = _trained_weights(checkpoint)
                trainer.backend.load_weights(trained, where, content["extra_state"], rest)
            undo.pop_all()
        self._restore_optimizer(checkpoint, changed)
        self._restore_schedule(content, changed, fresh)
        if trainer.backend.scaler.is_enabled() and content["scaler"]:
            trainer.backend.scaler.load_state_dict(state_dicts.from_json(content["scaler"]))
            if "fp16_loss_scale" in changed:
                trainer.backend.scaler.set_growth_interval(growth_interval(trainer.settings.fp16_loss_scale))
        self._restore_history(content, changed)
        self._restore_data(content, states)

    def _with_dependent(self, checkpoint: Checkpoint, changed: Collection[str]) -> Collection[str]:
        """Return the changed settings, with those that have to change with them."""
        content, scheduler = checkpoint.content, self._trainer.lr_scheduler
        is_composed = "lr_scheduler_options" in changed and hasattr(scheduler, "_schedulers")
        if (content["scheduler"] is None) != (scheduler is None) or is_composed:
            changed = {*changed, "lr_scheduler"} - {"lr_scheduler_options"}  # a warm-up without decay is a schedule too
        if "optimizer" not in changed and self._has_other_groups(content, changed):
            is_counted = isinstance(scheduler, LambdaLR) and not callable(self._trainer.settings.lr_scheduler)
            if scheduler is not None and not is_counted:
                raise CheckpointError(
                    f"{checkpoint.where} has another number of parameter groups, and `lr_scheduler` is a schedule with "
                    "state for each. Use a schedule by name ('cosine', ...), or keep the number of groups."
                )
            changed = {*changed, "lr_scheduler"}  # its state has rates for the old groups
        return changed

    def _has_other_groups(self, content: Mapping[str, Any], changed: Collection[str]) -> bool:
        """Return whether the number of the optimizer's groups differs from the checkpoint's, and may."""
        return not GROUPING.isdisjoint(changed) and len(content["optimizer"]["groups"]) != len(
            self._trainer.backend.groups
        )

    def _check_model(self, checkpoint: Checkpoint, changed: Collection[str]) -> None:
        """Reject a checkpoint from another model, optimizer or objective."""
        content, where, trainer, backend = checkpoint.content, checkpoint.where, self._trainer, self._trainer.backend
        backend.check_weights(checkpoint.open(state_dicts.WEIGHTS), where, content["frozen"])
        if trained := checkpoint.open(TRAINED):
            backend.check_weights(trained, *_trained_weights(checkpoint))
        if "optimizer" not in changed:
            if content["optimizers"] or backend.optimizers:
                self._check_names_of_optimizers(content["optimizers"], where)
            if GROUPING.isdisjoint(changed):
                state_dicts.check_groups(backend.names_by_group(), content["optimizer"]["groups"], where)
        if "algorithms" not in changed and len(content["algorithms"]) != len(trainer.algorithms):
            raise CheckpointError(
                f"{where} has the states of {len(content['algorithms'])} algorithms, and this run has "
                f"{len(trainer.algorithms)}. Pass the algorithms of that run."
            )
        if not resets_best(changed):
            self._lifecycle.objective.check_state(content["objective"])

    def _check_names_of_optimizers(self, saved: Mapping[str, Any], where: str) -> None:
        backend = self._trainer.backend
        expected = {name: entry is None for name, entry in saved.items()}
        present = {name: entry is backend.optimizer for name, entry in backend.optimizers.items()}
        if expected != present:
            old, new = (", ".join(map(repr, names)) or "nothing" for names in (expected, present))
            raise CheckpointError(
                f"{where} was saved with {old} in `self.optimizers`, and the trainer has {new} there. Give it the "
                "same names, in the same order."
            )

    def _check_state(self, checkpoint: Checkpoint, changed: Collection[str]) -> None:
        """Reject the states of optimizers, schedule and loss scaler that no run has left for these objects."""
        content, where = checkpoint.content, checkpoint.where
        backend, scheduler = self._trainer.backend, self._trainer.lr_scheduler
        if "optimizer" not in changed:
            backend.check_optimizer(*self._saved_optimizer(checkpoint, changed), where)
            for part, (name, saved) in _optimizer_states(content).items():
                if part != OPTIMIZER:
                    optimizer, tensors = backend.optimizers[name], checkpoint.open(part)
                    state_dicts.check_optimizer(optimizer, backend.model, tensors, saved, where)
        if scheduler is not None and "lr_scheduler" not in changed:
            saved, present = state_dicts.from_json(content["scheduler"]), scheduler.state_dict()
            clobbered = sorted(key for key in saved.keys() - present.keys() if hasattr(scheduler, str(key)))
            if clobbered:
                raise CheckpointError(
                    f"{where} is damaged: the schedule's state has {clobbered[0]!r}, which is not a state."
                )
            is_ours = type(scheduler).__module__.startswith(("torch.", "omnitrain."))
            if is_ours and "lr_scheduler_options" not in changed:
                required = [key for key in present if isinstance(present[key], list)]
                state_dicts.check_like(saved, present, "the schedule's state", where, required)
        if backend.scaler.is_enabled() and content["scaler"]:
            saved, present = state_dicts.from_json(content["scaler"]), backend.scaler.state_dict()
            state_dicts.check_like(saved, present, "the loss scaler's state", where, present.keys() - {"deepspeed"})

    def restore_weights(self, checkpoint: Checkpoint) -> None:
        """Copy only the weights of a checkpoint into the model; frozen weights that it excludes are unchanged."""
        content, tensors = checkpoint.content, checkpoint.open(state_dicts.WEIGHTS, self._trainer.ranks)
        self._trainer.backend.load_weights(tensors, checkpoint.where, content["extra_state"], content["frozen"])

    # --- the optimizer

    def _restore_optimizer(self, checkpoint: Checkpoint, changed: Collection[str]) -> None:
        content, where, backend = checkpoint.content, checkpoint.where, self._trainer.backend
        if "optimizer" in changed:
            logger.warning("The optimizer has changed: it starts without the state of the saved one.")
            return
        # before loading overwrites them: options that were allowed to change keep their new values
        fresh = list(map(dict, backend.groups))
        backend.load_optimizer(*self._saved_optimizer(checkpoint, changed, self._trainer.ranks), where)
        for part, (name, saved) in _optimizer_states(content).items():
            if part != OPTIMIZER:
                tensors = checkpoint.open(part, self._trainer.ranks)
                state_dicts.restore_optimizer(backend.optimizers[name], backend.model, tensors, saved, where)
        if self._has_other_groups(content, changed):
            # the saved options belong to other groups
            for group, new in zip(backend.groups, fresh, strict=True):
                group |= {key: value for key, value in new.items() if key != "params"}
            return
        before = content["settings"]["optimizer_groups"]
        after = self._initial.optimizer or before  # unknown for a trainer without training data
        for group, new, current, previous in zip(backend.groups, fresh, after, before, strict=True):
            if "lr_scheduler" in changed:
                group |= {key: new[key] for key in ("lr", "initial_lr") if key in new}
            elif current["lr"] != previous["lr"]:  # allowed to change: the current rate changes in proportion
                group["lr"] = group["lr"] * (current["lr"] / previous["lr"]) if previous["lr"] else current["lr"]
                group |= {"initial_lr": current["lr"]} if "initial_lr" in group else {}
            group |= {key: new[key] for key in current.keys() - {"lr"} if current[key] != previous.get(key)}

    def _saved_optimizer(
        self, checkpoint: Checkpoint, changed: Collection[str], ranks: Ranks | None = None
    ) -> tuple[Mapping[str, Any], Any]:
        """Return the saved optimizer state, tensors and rest, regrouped if the groups were allowed to change."""
        tensors, saved = checkpoint.open(OPTIMIZER, ranks), checkpoint.content["optimizer"]
        if GROUPING.isdisjoint(changed):
            return tensors, saved
        backend = self._trainer.backend
        groups = list(zip(backend.names_by_group(), backend.groups, strict=True))
        saved, selected = regroup_state(saved, tensors, groups, checkpoint.where)
        return selected, saved

    # --- the schedule

    def _fresh_schedule(self) -> list[dict[str, Any]]:
        """Return the present attributes of the schedule and of its parts."""
        scheduler = self._trainer.lr_scheduler
        parts = [] if scheduler is None else [scheduler, *getattr(scheduler, "_schedulers", ())]
        return list(map(dict, map(vars, parts)))

    def _restore_schedule(
        self, content: Mapping[str, Any], changed: Collection[str], fresh: list[dict[str, Any]]
    ) -> None:
        """Apply the changed settings to a restored schedule; a named one continues at the same step of the new one.

        Its attributes before, `fresh`, are from `_fresh_schedule`.
        """
        scheduler = self._trainer.lr_scheduler
        if scheduler is None:
            return
        if content["progress"]["step"]:  # PyTorch warns of a schedule that moves before the first update
            # the flag by which torch.optim.lr_scheduler knows that the optimizer has stepped
            optimizer: Any = getattr(scheduler, "optimizer", self._trainer.backend.optimizer)
            optimizer._opt_called = True
        parts = [scheduler, *getattr(scheduler, "_schedulers", ())]
        if "lr_scheduler_options" in changed:
            previous, current = content["settings"]["lr_scheduler_options"] or {}, self._initial.schedule or {}
            vars(scheduler).update({key: fresh[0][key] for key in current if current[key] != previous.get(key)})
        has_new_rates = not {"learning_rate", "optimizer_groups", *GROUPING}.isdisjoint(changed)
        for part, attributes in zip(parts, fresh, strict=True):
            if (rates := attributes.get("base_lrs")) is not None:
                part.base_lrs = rates if has_new_rates else state_dicts.like(part.base_lrs, rates)
        previous, current = content["settings"], self._trainer.resolved_config()
        lengths = [_format_length(settings) for settings in (previous, current)]
        is_other = not {"lr_scheduler", "lr_scheduler_kwargs", "warmup_steps"}.isdisjoint(changed) or (
            has_new_rates and isinstance(scheduler, ScheduleLR)  # `min_lr` stays
        )
        is_counted = not callable(self._trainer.settings.lr_scheduler)  # else it has its own count
        if isinstance(scheduler, LambdaLR) and (lengths[0] != lengths[1] or is_other):
            if is_counted:
                scheduler.last_epoch = content["progress"][self._trainer.scheduler_interval]
                scheduler._step_count = scheduler.last_epoch + 1
            if is_counted or "lr_scheduler" not in changed:
                self._update_rates(scheduler, Progress.from_state(content["progress"]), lengths)

    def _update_rates(self, scheduler: LambdaLR, progress: Progress, lengths: list[str]) -> None:
        """Set the rates of a changed schedule, which follow from steps or progress, and log how they change.

        The texts `lengths` are the lengths of the saved and of the present run.
        """
        groups = self._trainer.backend.optimizer.param_groups
        if isinstance(scheduler, ScheduleLR) and scheduler.follows:
            scheduler.progress = progress
        before = [float(group["lr"]) for group in groups]
        for group, rate, factor in zip(groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True):
            group["lr"] = state_dicts.like(float(rate) * factor(scheduler.last_epoch), group["lr"])
        after = [float(group["lr"]) for group in groups]
        if all(math.isclose(old, new, rel_tol=1e-9) for old, new in zip(before, after, strict=True)):
            return
        first = next(number for number, pair in enumerate(zip(before, after, strict=True)) if pair[0] != pair[1])
        reason = "its settings have changed" if lengths[0] == lengths[1] else f"the schedule spans {lengths[1]} now"
        logger.warning(
            "The learning rate at step %d%s goes from %.6g to %.6g, since %s (before: %s).",
            progress.step, f", of group {first} of the optimizer," if first else "", before[first], after[first],
            reason, lengths[0],
        )  # fmt: skip

    # --- random numbers

    def restore_random_numbers(self, checkpoint: Checkpoint) -> None:
        """Restore the random number generators of training from a checkpoint."""
        ranks, seed = self._trainer.ranks, self._trainer.settings.seed
        if checkpoint.content["settings"]["seed"] != seed:
            return  # it was allowed to change
        alike = ranks.world_size // ranks.data.size  # ranks that have the same samples
        saved = ranks.scatter("the random numbers of a checkpoint", functools.partial(_generators, checkpoint, alike))
        if saved is not None:
            state_dicts.restore_rng_tensors(*saved, self._trainer.device)
        # derived from the step, so that two resumes on as many ranks draw the same numbers
        else:  # more ranks than in the checkpoint
            seed_everything(derive_seed(seed, ranks.data.rank, self._lifecycle.progress.step) & 0x7FFFFFFF)

    # --- progress, history, best, callbacks, losses

    def capture_states(self, callbacks: list[dict[str, Any]]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Return the states of callbacks and algorithms: the tensors in them, and the rest as JSON types.

        Raises:
            CheckpointError: If a state has something that cannot be saved; the message has the object and the key.
        """
        tensors: dict[str, torch.Tensor] = {}
        entries, algorithms = [], []
        for index, entry in enumerate(callbacks):
            name = f"callbacks/{index}/{entry['callback']}"
            entries.append({**entry, "state": state_dicts.to_json(entry["state"], name, tensors)})
        for index, algorithm in enumerate(self._trainer.algorithms):
            name = f"algorithms/{index}/{type(algorithm).__qualname__}"
            algorithms.append(state_dicts.to_json(algorithm.state_dict(), name, tensors))
        if self._trainer.settings.save_only_model is True:
            return tensors, {"callbacks": entries}
        return tensors, {"callbacks": entries, "algorithms": algorithms, **self._capture_parts(tensors)}

    def _capture_parts(self, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
        """Return the states of the user's parts, by argument: one for all ranks, or a list where they differ.

        The tensors in them are added to `tensors`.
        """
        settings, ranks = self._trainer.settings, self._trainer.ranks
        parts = stateful_parts(settings, self._trainer.backend.model)
        if not parts:
            return {}
        local: dict[str, torch.Tensor] = {}
        states = {name: state_dicts.to_json(parts[name].state_dict(), f"parts/{name}", local) for name in parts}
        local = {name: tensor.detach().cpu() for name, tensor in local.items()}
        gathered = ranks.gather_on_main("the states of the user's parts", [(states, local)])
        entries = [entry for (entry,) in ranks.one_per_share(gathered)] or [(states, local)]
        (first, first_tensors), *other_entries = entries
        if all(
            states == first and all(map(torch.equal, local.values(), first_tensors.values()))
            for states, local in other_entries
        ):
            tensors |= first_tensors
            return {"parts": [first]}
        return {
            "parts": [
                {
                    name: state_dicts.to_json(state_dicts.from_json(state, local), f"parts/{rank}/{name}", tensors)
                    for name, state in states.items()
                }
                for rank, (states, local) in enumerate(entries)
            ]
        }

    def _restore_parts(
        self, content: Mapping[str, Any], changed: Collection[str], tensors: TensorFile, undo: contextlib.ExitStack
    ) -> None:
        """Restore the states of the user's parts; those that were allowed to change keep theirs."""
        if (saved := content.get("parts")) is None:  # no part had a state
            return
        data, parts = self._trainer.ranks.data, stateful_parts(self._trainer.settings, self._trainer.backend.model)
        if len(saved) not in (1, data.size):
            logger.warning(
                "The states of %s differ between the %d ranks of the checkpoint, and this run has %d: all get those "
                "of the main one.", ", ".join(f"`{name}`" for name in saved[0]), len(saved), data.size,
            )  # fmt: skip
        states = [state_dicts.from_json(entry, tensors) for entry in saved]  # reading is collective: all ranks read all
        for name, entry in states[data.rank if len(saved) == data.size else 0].items():
            if name.partition(".")[0] in changed:
                continue
            if name in parts:
                restore_with_undo(parts[name], entry, undo)
            else:
                logger.warning("The checkpoint has a state of `%s`, which has none in this run.", name)

    def check_states(self) -> None:
        """Check before the first step that the states of callbacks, algorithms and the user's parts can be saved."""
        if self._trainer.settings.save_only_model is not True:
            check_parts(self._trainer.settings, stateful_parts(self._trainer.settings, self._trainer.backend.model))
        try:
            self.capture_states(self._lifecycle.state_dict()["callbacks"])
        except CheckpointError:
            raise
        except Exception:  # a state that exists only once the run has begun: the first save tries again
            logger.debug("A state cannot be captured before the run.", exc_info=True)

    def _capture_history(self, history: dict[str, Any]) -> dict[str, Any]:
        lifecycle = self._lifecycle
        loop = {**self._step.state_dict(), "logged": list(lifecycle.logged_at)}
        owes = lifecycle.pending_evaluation or lifecycle.control.evaluate
        return {
            **history,
            "loop": state_dicts.to_json(loop, "loop"),
            "owes": {"evaluation": owes, "save": lifecycle.pending_save},
        }

    def _restore_history(self, content: Mapping[str, Any], changed: Collection[str]) -> None:
        lifecycle, loop = self._lifecycle, state_dicts.from_json(content["loop"])
        lifecycle.load_state_dict(content, resets_best(changed))
        self._step.load_state_dict(loop)
        step, seconds, samples, tokens = loop["logged"]
        lifecycle.logged_at = (step, seconds, samples, tokens)
        lifecycle.pending_evaluation = content["owes"]["evaluation"] and lifecycle.evaluates
        lifecycle.pending_save = content["owes"]["save"]
        if lifecycle.pending_save:
            lifecycle.saved_at = None

    def _restore_epoch_size(self, content: Mapping[str, Any], changed: Collection[str]) -> None:
        """Give an epoch that has begun the samples that it began with; a DataError if the training set has fewer."""
        loader, progress = self._sets.train, Progress.from_state(content["progress"])
        size = progress.epoch_size
        is_within = progress.samples_in_epoch > 0 and size is not None and "samples_per_epoch" not in changed
        if isinstance(loader, MapLoader) and is_within:  # a callback may have changed the dataset before this epoch
            loader.update(size)
            self._lifecycle.progress.epoch_size = size

    # --- data

    def _restore_data(self, content: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        loader = self._sets.train
        if isinstance(loader, MapLoader):
            loader.fetch.drawn = [GENERATORS[index] for index in content["drawn"]]
            loader.sampler.is_keyed = content["order"] == "keyed"
        elif loader is not None:
            position = state_dicts.from_json(content["stream"], tensors)
            if self._has_other_data(content, "train_loader"):
                position = None
            if position is not None and loader.is_split:
                # None for a rank beyond those that saved: it reads its share of the stream again
                position["state"] = loader.local_state(position["state"])
                position = None if position["state"] is None else position
            loader.resume_at(None if position is None else StreamPosition(**position))

    def data_position(self) -> StreamPosition | None:
        """Return this rank's position in data that have states; None for other data."""
        loader, progress = self._sets.train, self._lifecycle.progress
        if loader is None:
            return None
        return loader.position_at(progress.epoch, progress.samples_in_epoch, progress.batches_in_epoch)

    def resume_data(self, position: StreamPosition | None) -> None:
        """Begin the next pass over the data at the result of `data_position`."""
        if self._sets.train is not None:
            self._sets.train.resume_at(position)

    def _capture_stream(self, tensors: dict[str, torch.Tensor]) -> Any:
        """Return the position of data that have states, as JSON types; None for data without states.

        The tensors in the state are added to `tensors`.
        """
        loader, ranks = self._sets.train, self._trainer.ranks
        if loader is None or isinstance(loader, MapLoader):
            return None
        position = self.data_position()
        if loader.is_split:
            state = None if position is None else position.state
            gathered = ranks.gather_on_main("the states of the training data", [state])
            states = list(ranks.one_per_share([state for (state,) in gathered]))  # empty except on the main rank
            if position is not None:
                is_complete = states and None not in states
                position = position._replace(state=loader.merge_states(states)) if is_complete else None
        try:
            return None if position is None else state_dicts.to_json(position._asdict(), _STREAM, tensors)
        except CheckpointError as error:
            logger.warning("A resumed run will read the epoch again from its beginning: %s", error)
            return None


def _optimizer_states(content: Mapping[str, Any]) -> dict[str, tuple[str, Any]]:
    """Return name and state of each optimizer in a checkpoint by its file, that of `optimizer` first."""
    states = {OPTIMIZER: ("", content["optimizer"])}
    for name, saved in content["optimizers"].items():
        if saved is not None:  # else it is saved as `optimizer`
            states[optimizer_file(name)] = name, saved
    return states


def resets_best(changed: Collection[str]) -> bool:
    """Return whether another objective discards the best evaluation so far."""
    return not {"optimization_metric", "optimization_direction"}.isdisjoint(changed)


def group_options(groups: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the options of an optimizer's groups, without their parameters."""
    return [{key: copy.deepcopy(value) for key, value in group.items() if key != "params"} for group in groups]


def _format_length(settings: Mapping[str, Any]) -> str:
    """Return the length of a run as text: in steps, if their number is known."""
    if settings["total_steps"] is not None:
        return f"{settings['total_steps']} steps"
    limits = {name: settings.get(name) for name in ("epochs", "max_steps", "max_duration")}
    return ", ".join(f"{name}={value!r}" for name, value in limits.items() if value is not None)


def _trained_weights(checkpoint: Checkpoint) -> tuple[str, set[str]]:
    """Return the name of the file of the weights in training, for errors, and the names of those not in it."""
    weights, trained = (checkpoint.parts[part][1].locations for part in (state_dicts.WEIGHTS, TRAINED))
    names, where = {*weights, *checkpoint.content["frozen"]}, repr(str(checkpoint.folder / TRAINED))
    if left_over := sorted(trained.keys() - names):  # which custom loading code might accept
        raise CheckpointError(
            f"{where} is damaged: {left_over[0]!r} is not in {state_dicts.WEIGHTS!r}. Use another checkpoint."
        )
    return where, names - trained.keys()


def _check_stream(dataset: Any, state: Any, where: str) -> None:
    """Reject a state from a checkpoint that a stream cannot restore; the stream's position is unchanged afterwards.

    Raises:
        CheckpointError: With the key, or the stream's error.
    """
    name, present = type(dataset).__qualname__, None
    with contextlib.suppress(Exception):  # it may have no state before it is read
        present = dataset.state_dict()
    for key, value, other in state_dicts.mismatches(state, present):
        raise CheckpointError(
            f"{where} is damaged: 'omnitrain.json' has {reprlib.repr(value)} for {key or 'all'} of the state of "
            f"`train_dataset` ({name}), where {reprlib.repr(other)} was expected, or another of its kind. Use another "
            "checkpoint."
        )
    try:
        with contextlib.ExitStack() as undo:
            restore_with_undo(dataset, state, undo)
    except CheckpointError as error:
        raise CheckpointError(f"{where}: the state of `train_dataset` in 'omnitrain.json': {error}") from error


def _generators(checkpoint: Checkpoint, repeats: int = 1) -> list[tuple[dict[str, torch.Tensor], Any]]:
    """Return the states of the generators of each rank, as of `state_dicts.rng_tensors`, each `repeats` times."""
    tensors, states = checkpoint.open(RNG), list[tuple[dict[str, torch.Tensor], Any]]()
    by_rank = defaultdict[str, dict[str, torch.Tensor]](dict)
    for name, tensor in tensors.read_tensors(list(tensors)).items():  # opened once for all ranks
        rank, _, generator = name.partition("/")
        by_rank[rank][generator] = tensor
    for rank, rest in enumerate(checkpoint.content["rng"]):
        states += [(by_rank[str(rank)], rest)] * repeats
    return states


@functools.cache
def _versions() -> dict[str, str]:
    packages = {name: importlib.metadata.version(name) for name in ("torch", "numpy", "safetensors")}
    return {"omnitrain": __version__, "python": platform.python_version(), **packages}
