"""What of a trainer is kept in a checkpoint, and how it comes back: saving, loading, resuming.

Folders and manifests are in `checkpoint/store.py`, tensors in `checkpoint/state.py`. A backend overrides
`_capture_state` and `_restore_state` alone.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import logging
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from omnitrain.checkpoint import state
from omnitrain.checkpoint.disk import check_free_space
from omnitrain.checkpoint.store import Store
from omnitrain.errors import CheckpointError, ConfigError
from omnitrain.loaders import MapLoader
from omnitrain.reproducibility import GENERATORS
from omnitrain.trainers.loop import TrainingLoop
from omnitrain.trainers.settings import describe

__all__ = ["Resumable", "Snapshot"]

logger = logging.getLogger("omnitrain")

OPTIMIZER = "optimizer/state.safetensors"
RNG = "rng/rank-00000.safetensors"

DECIDING = (
    "model",
    "optimizer",
    "learning_rate",
    "weight_decay",
    "optimizer_groups",
    "lr_scheduler",
    "warmup_steps",
    "scheduler_interval",
    "global_batch_size",
    "max_grad_norm",
    "grad_reduction",
    "loss_fn",
    "unit",
    "algorithms",
    "optimization_metric",
    "optimization_direction",
    "autocast",
    "seed",
    "shuffle",
    "samples_per_epoch",
)
"""The settings that decide the numbers of a run: changing one on the way is an error unless it is allowed by name."""


@dataclass(slots=True)
class Snapshot:
    """Everything that a checkpoint holds: tensors by file and name, and the payload of omnitrain.json."""

    files: dict[str, dict[str, torch.Tensor]]
    payload: dict[str, Any]
    step: int
    score: float | None
    best: bool
    evaluated_step: int

    def on_host(self) -> Snapshot:
        """Return a copy that further training cannot change."""
        files = {
            file: {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
            for file, tensors in self.files.items()
        }
        return Snapshot(files, self.payload, self.step, self.score, self.best, self.evaluated_step)


class Resumable(TrainingLoop):
    """A training loop that can be saved at any step boundary and go on as if it had not been interrupted."""

    store: Store | None = None
    save_required: bool = False
    _background: ThreadPoolExecutor | None = None
    _in_flight: tuple[Snapshot, Future[Path]] | None = None
    _credited_step: int = -1
    """The evaluation that the latest checkpoint is judged by; later ones without an evaluation are not the best."""

    # --- saving

    def save_checkpoint(self) -> Path:
        """Save a full checkpoint of the present state, and return its folder.

        Raises:
            ConfigError: If there is no `save_dir`.
            CheckpointError: If it cannot be written; earlier ones are untouched.
        """
        if self.store is None:
            raise ConfigError("There is no place for a checkpoint. Pass `save_dir` to the constructor.")
        self._await_background()
        snapshot = self._snapshot()
        return self._committed(snapshot, self._write(self.store, snapshot))

    def _save(self, history: dict[str, Any] | None = None) -> None:
        """Save during a run; a disk that fails costs this checkpoint, not the run, unless `save_required`.

        Args:
            history: The lifecycle's state to keep instead of the present one.
        """
        if self.store is None:
            return
        self._await_background()
        snapshot = self._snapshot(history)
        self.lifecycle.saved_at = self.progress.position
        if self._background is not None:
            copy = snapshot.on_host()
            self._in_flight = copy, self._background.submit(self._write, self.store, copy)
            return
        try:
            path = self._write(self.store, snapshot)
        except CheckpointError as error:
            self._report_failed_save(error)
        else:
            self._committed(snapshot, path)

    def _await_background(self, wait: bool = True) -> None:
        """Take note of a checkpoint that the background has finished; with `wait`, of one that is still written."""
        if self._in_flight is None or not (wait or self._in_flight[1].done()):
            return
        (snapshot, future), self._in_flight = self._in_flight, None
        try:
            path = future.result()
        except CheckpointError as error:
            self._report_failed_save(error)
        else:
            self._committed(snapshot, path)

    def _committed(self, snapshot: Snapshot, path: Path) -> Path:
        if snapshot.best:
            self.lifecycle.metrics["best_checkpoint"] = path.name
            self._credited_step = snapshot.evaluated_step
        self.lifecycle.saved(path)
        return path

    def _report_failed_save(self, error: CheckpointError) -> None:
        self.lifecycle.saved_at = None
        if self.save_required or not isinstance(error.__cause__, OSError):
            raise error
        logger.error("%s Training goes on without it (save_required=True would end it).", error)

    def _write(self, store: Store, snapshot: Snapshot) -> Path:
        def write(folder: Path) -> None:
            for file, tensors in snapshot.files.items():
                path = folder / file
                path.parent.mkdir(parents=True, exist_ok=True)
                try:
                    state.save_tensors(tensors, path)
                except Exception as error:  # safetensors wraps a full disk in an error of its own
                    if isinstance(error, OSError) or "I/O error" in str(error) or "os error" in str(error).lower():
                        raise OSError(f"{path.name}: {error}") from error
                    raise
            state.write_config(self.model, folder)

        return store.save(snapshot.step, write, snapshot.payload, score=snapshot.score, best=snapshot.best)

    def _snapshot(self, history: dict[str, Any] | None = None) -> Snapshot:
        """Return the present state, as references to the live tensors."""
        objective, evaluated = self.lifecycle.objective, self.lifecycle.evaluated_step
        best = objective.best_step == evaluated != self._credited_step
        history = history or self.lifecycle.state_dict()
        if best and history["evaluated_step"] == evaluated:
            history["metrics"]["best_checkpoint"] = f"checkpoint-{self.progress.step:06d}"
        files, payload = self._capture_state()
        payload |= {
            **history,
            "loop": {"loss": self._loss.state_dict(), "logged": list(self._logged)},
            "owes_evaluation": self._owes_evaluation,
            "settings": self.resolved_config(),
            "world_size": self.world_size,
            "versions": {name: importlib.metadata.version(name) for name in ("torch", "numpy", "safetensors")},
        }
        return Snapshot(files, payload, self.progress.step, objective.latest, best, evaluated)

    def _capture_state(self) -> tuple[dict[str, dict[str, torch.Tensor]], dict[str, Any]]:
        """Return the tensors by file and name, and the rest as JSON types. What the lifecycle knows is added to it."""
        tensors, rest = state.optimizer_state(self.optimizer, self.model)
        generators, generators_rest = state.rng_tensors(self.device)
        scaler = getattr(self, "scaler", None)
        payload = {
            "optimizer": rest,
            "rng": generators_rest,
            "scheduler": None
            if self.lr_scheduler is None
            else state.to_json(self.lr_scheduler.state_dict(), "scheduler"),
            "scaler": state.to_json(scaler.state_dict(), "scaler") if scaler is not None else {},
            "algorithms": [algorithm.state_dict() for algorithm in self.algorithms],
            "drawn": self._drawn(),
        }
        return {state.WEIGHTS: state.model_tensors(self.model), OPTIMIZER: tensors, RNG: generators}, payload

    def _drawn(self) -> list[int]:
        """Return which generators the training data was seen to draw from, so that a resumed run need not find out."""
        loader = self.train_loader
        return [GENERATORS.index(g) for g in loader.fetch.drawn] if isinstance(loader, MapLoader) else []

    # --- coming back

    def load_checkpoint(self, path: str | Path) -> Path:
        """Put the whole trainer back to a checkpoint (a path, "last" or "best"), and return its folder.

        Raises:
            CheckpointError: If it is missing, damaged, or of another model or optimizer.
        """
        folder, content = self._resolve(path) or (None, None)
        if folder is None or content is None:
            raise CheckpointError(f"{str(path)!r} holds no checkpoint.")
        self._restore(folder, content)
        self._restore_random_numbers(folder, content)
        return folder

    def _resolve(self, which: str | Path) -> tuple[Path, dict[str, Any]] | None:
        if self.store is None and str(which) in ("auto", "last", "best"):
            raise ConfigError(
                f"`resume_from={str(which)!r}` looks into `save_dir`, which is not given. Pass it, or a path."
            )
        return (self.store or Store(Path(which).parent)).resolve(which)

    def _resume(self, which: str | Path, allow_change: Collection[str]) -> tuple[Path, dict[str, Any]] | None:
        """Restore the checkpoint that `which` names; None if "auto" finds none and the run starts afresh."""
        unknown = sorted(set(allow_change) - set(DECIDING))
        if unknown:
            raise ConfigError(f"`allow_change` knows no setting {unknown[0]!r}, only {', '.join(DECIDING)}.")
        found = self._resolve(which)
        if found is None:
            logger.info("No checkpoint in %r yet: the run starts afresh.", str(self.save_dir))
            return None
        folder, content = found
        changed = self._changed(content["settings"])
        refused = {name: pair for name, pair in changed.items() if name not in allow_change}
        if refused:
            listed = "; ".join(f"{name}: {old!r} -> {new!r}" for name, (old, new) in refused.items())
            raise CheckpointError(
                f"{str(folder)!r} was saved under other settings, which would change the run: {listed}. "
                f"Set them back, or allow them by name: train(resume_from=..., allow_change={set(refused)!r})."
            )
        self._restore(folder, content, set(changed))
        logger.info("Resumed from %s at step %d.", folder.name, self.progress.step)
        return found

    def _changed(self, saved: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
        now = self.resolved_config()
        return {name: (saved.get(name), now.get(name)) for name in DECIDING if saved.get(name) != now.get(name)}

    def _restore(self, folder: Path, content: Mapping[str, Any], changed: Collection[str] = ()) -> None:
        self._restore_state(folder, content, changed)
        self.lifecycle.load_state_dict(content)
        self._loss.load_state_dict(content["loop"]["loss"])
        step, seconds, samples, tokens = content["loop"]["logged"]
        self._logged = (step, seconds, samples, tokens)
        self._owes_evaluation = content["owes_evaluation"]
        self._credited_step = content["evaluated_step"]
        for algorithm, saved in zip(self.algorithms, content["algorithms"], strict=False):
            algorithm.load_state_dict(saved)
        if isinstance(self.train_loader, MapLoader):
            self.train_loader.fetch.drawn = [GENERATORS[index] for index in content["drawn"]]

    def _restore_state(self, folder: Path, content: Mapping[str, Any], changed: Collection[str] = ()) -> None:
        """Put model, optimizer, schedule and scaler back; of what is in `changed`, the new setting stays."""
        where = repr(str(folder))
        state.load_weights(self.model, state.load_tensors(folder / state.WEIGHTS), where)
        if "optimizer" in changed:
            logger.warning("The optimizer is another one now: it starts without the state of the old one.")
        else:
            fresh = [dict(group) for group in self.optimizer.param_groups]
            tensors = state.load_tensors(folder / OPTIMIZER)
            state.restore_optimizer(self.optimizer, self.model, tensors, content["optimizer"], where)
            self._keep_new_options(fresh, content, changed)
        if self.lr_scheduler is not None and "lr_scheduler" not in changed:
            self._restore_schedule(content)
        scaler = getattr(self, "scaler", None)
        if scaler is not None and scaler.is_enabled() and content["scaler"]:
            scaler.load_state_dict(state.from_json(content["scaler"]))

    def _restore_schedule(self, content: Mapping[str, Any]) -> None:
        base_rates = getattr(self.lr_scheduler, "base_lrs", None)
        self.lr_scheduler.load_state_dict(state.from_json(content["scheduler"]))
        if base_rates is not None:
            self.lr_scheduler.base_lrs = base_rates
        then, now = content["settings"].get("total_steps"), self.resolved_config()["total_steps"]
        if then != now and isinstance(self._given["lr_scheduler"], str):
            logger.warning(
                "The schedule %r was made for %s steps and now ends at step %s: the learning rate follows the new one.",
                self._given["lr_scheduler"], then, now,
            )  # fmt: skip

    def _keep_new_options(
        self, fresh: list[dict[str, Any]], content: Mapping[str, Any], changed: Collection[str]
    ) -> None:
        """Of options of the optimizer that were allowed to change, take the new value, the rate in proportion."""
        if not {"learning_rate", "weight_decay", "optimizer_groups", "lr_scheduler"} & set(changed):
            return
        for group, new, old in zip(
            self.optimizer.param_groups, fresh, content["settings"]["optimizer_groups"], strict=True
        ):
            for key, value in new.items():
                if key == "lr":
                    rate = new.get("initial_lr", value)
                    moved = 1.0 if "lr_scheduler" in changed or not old["lr"] else group["lr"] / old["lr"]
                    group["lr"] = rate * moved
                elif key != "params":
                    group[key] = value

    def _restore_random_numbers(self, folder: Path, content: Mapping[str, Any]) -> None:
        state.restore_rng_tensors(state.load_tensors(folder / RNG), content["rng"], self.device)

    # --- beginning and end of a run

    def _check_save_dir(self) -> None:
        """Refuse to start afresh among the checkpoints of another run, and say so early if the disk is too small."""
        if self.store is None:
            return
        there = self.store.checkpoints()
        if there and not self._given["overwrite"]:
            raise ConfigError(
                f"`save_dir={str(self.save_dir)!r}` already holds checkpoints, the newest being {there[-1].name!r}. "
                "Pass resume_from='auto' to train() to go on with that run, overwrite=True to replace it, "
                "or another `save_dir`."
            )

    def _check_disk(self) -> None:
        if self.store is None:
            return
        sizes = [tensor.numel() * tensor.element_size() for tensor in state.model_tensors(self.model).values()]
        warning = check_free_space(self.store.root, self.store.newest_size() or 3 * sum(sizes))
        if warning:
            logger.warning("%s", warning)

    def _load_best(self) -> None:
        """Put the best weights into the model, if a checkpoint was saved as the best; all else stays as it is."""
        if self.store is None or "best_checkpoint" not in self.lifecycle.metrics:
            return
        folder, _ = self.store.resolve("best") or (None, None)
        if folder is not None:
            state.load_weights(self.model, state.load_tensors(folder / state.WEIGHTS), repr(str(folder)))
            logger.info("The model has the best weights now, those of %s.", folder.name)

    @property
    def _optimizer_groups(self) -> list[dict[str, Any]]:
        """The optimizer's options as they were before any schedule moved the rate."""
        groups = self.optimizer.param_groups if self._can_train else []
        return [
            {key: group.get("initial_lr", value) if key == "lr" else describe(value) for key, value in group.items()
             if key not in ("params", "initial_lr")}
            for group in groups
        ]  # fmt: skip

    @contextlib.contextmanager
    def _writing_in_background(self) -> Iterator[None]:
        """Have a thread that writes checkpoints inside, if that was asked for; on the way out it has finished."""
        if self.store is None or not self._given["async_save"]:
            yield
            return
        with ThreadPoolExecutor(1, thread_name_prefix="omnitrain-save") as self._background:
            try:
                yield
            finally:
                self._background = None
