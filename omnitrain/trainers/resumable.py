"""What of a trainer is kept in a checkpoint, and how it comes back: saving, loading, resuming.

Folders and manifests are in `checkpoint/store.py`, tensors in `checkpoint/state.py`. A backend overrides
`_capture_state` and `_restore_state` alone.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR

from omnitrain.checkpoint import state
from omnitrain.checkpoint.disk import check_free_space
from omnitrain.checkpoint.store import Store
from omnitrain.checkpoint.tensors import TensorFile
from omnitrain.errors import CheckpointError, ConfigError
from omnitrain.loaders import MapLoader
from omnitrain.progress import Progress
from omnitrain.reproducibility import GENERATORS, derive_seed, seed_everything
from omnitrain.trainers.changes import DECIDING, changed_settings, optimizer_options, schedule_options
from omnitrain.trainers.loop import TrainingLoop
from omnitrain.trainers.snapshot import Snapshot, versions

__all__ = ["Resumable"]

logger = logging.getLogger("omnitrain")

OPTIMIZER = "optimizer/state.safetensors"


def _rng_file(rank: int) -> str:
    return f"rng/rank-{rank:05d}.safetensors"


class Resumable(TrainingLoop):
    """A training loop that can be saved at any step boundary and go on as if it had not been interrupted."""

    store: Store | None = None
    save_required: bool = False
    _optimizer_groups: list[dict[str, Any]] | None = None
    """The options of the optimizer's groups as the run began, before any schedule moved them."""
    _schedule_options: dict[str, Any] | None = None
    """What a schedule of the user's own was made with; None for a named one, which the settings describe."""
    _background: ThreadPoolExecutor | None = None
    _host_copies: dict[str, torch.Tensor]
    """What was written in the background the last time, whose memory the next copy takes."""
    _in_flight: tuple[Snapshot, Future[Path] | None] | None = None
    _resumed: tuple[Path, dict[str, Any]] | None = None
    """The checkpoint that this run goes on from."""
    _origin: Path | None = None
    """Where the checkpoint was that the run resumed from, which need not be the `save_dir`."""
    _weights_from: Progress | None = None
    """Where in the run the weights are from, if they are not those of the last step."""
    _owes_save: bool = False
    """Whether a checkpoint was due after the evaluation that a signal has cut short."""
    _credited_step: int = -1
    """The best evaluation that has a checkpoint; later checkpoints without a new evaluation are not the best."""
    _scored: tuple[int, int] = (-1, -1)
    """The latest evaluation whose score a checkpoint has, and the step of that checkpoint."""

    # --- saving

    def save_model(self, path: str | Path, overwrite: bool = False) -> Path:
        """Write the weights as safetensors into the folder `path`, and the model's config if it has one."""
        with self.ranks.calling("save_model()"):
            return state.save_weights(self.model, Path(path), overwrite, self._model_tensors(), self.ranks)

    def request_save(self) -> None:
        """Ask for a checkpoint at the next step boundary."""
        if self.store is None:
            raise ConfigError("A checkpoint was requested, but there is no place for it. Pass `save_dir`.")
        self.control.save = True

    def save_checkpoint(self) -> Path:
        """Save a full checkpoint of the present state, and return its folder.

        Raises:
            ConfigError: If there is no `save_dir`.
            CheckpointError: If it cannot be written; earlier ones are untouched.
        """
        if self.store is None:
            raise ConfigError("There is no place for a checkpoint. Pass `save_dir` to the constructor.")
        with self.ranks.calling("save_checkpoint()"):
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
        self._owes_save = self._owes_evaluation and (self._owes_save or history is None)
        snapshot = self._snapshot(history)
        self.lifecycle.saved_at = self.progress.position
        if self._background is not None:
            self._in_flight = snapshot, None
            if self.ranks.is_main:
                copy = snapshot.on_host(self._host_copies)
                self._in_flight = copy, self._background.submit(self._write_here, self.store, copy, state.whole)
            return
        try:
            path = self._write(self.store, snapshot)
        except CheckpointError as error:
            self._report_failed_save(error)
        else:
            self._committed(snapshot, path)

    def _await_background(self, wait: bool = True) -> None:
        """Take note of a checkpoint that the background has finished; with `wait`, of one that is still written."""
        if self._in_flight is None:
            return
        snapshot, future = self._in_flight
        if not wait and not self.ranks.on_main("a checkpoint in the background", lambda: future and future.done()):
            return
        self._in_flight = None
        try:
            path = self.ranks.on_main("the end of a checkpoint in the background", lambda: self._written(future))
        except CheckpointError as error:
            self._report_failed_save(error)
        else:
            self._committed(snapshot, path)

    def _write_beside(self, folder: Path) -> None:
        """Write further files into a checkpoint's folder, on the main process; they get into the manifest."""

    @staticmethod
    def _written(future: Future[Path] | None) -> Path:
        assert future is not None  # on the main process
        return future.result()

    def _committed(self, snapshot: Snapshot, path: Path) -> Path:
        if snapshot.best:
            self.lifecycle.metrics["best_checkpoint"] = path.name
            self._credited_step = snapshot.evaluated_step
        if snapshot.score is not None:
            self._scored = snapshot.evaluated_step, snapshot.step
        self.lifecycle.saved(path)
        return path

    def _report_failed_save(self, error: CheckpointError) -> None:
        self.lifecycle.saved_at = None
        if self.save_required or not isinstance(error.__cause__, OSError):
            raise error
        logger.error("%s Training goes on without it (save_required=True would end it).", error)

    def _write(self, store: Store, snapshot: Snapshot) -> Path:
        """Write a checkpoint, to which all processes give their parts; only the main one touches the disk."""
        files = [snapshot.files[file] for file in snapshot.by_size]
        return state.written_by_main(self.ranks, files, lambda gather: self._write_here(store, snapshot, gather))

    def _write_here(self, store: Store, snapshot: Snapshot, gather: state.Gather) -> Path:
        digests: dict[str, Future[str]] = {}

        def write(folder: Path) -> None:
            # hashing takes longer than writing, so it begins with the largest, and before that is written
            for file in snapshot.by_size:
                tensors, path = snapshot.files[file], folder / file
                path.parent.mkdir(parents=True, exist_ok=True)
                if any(map(state.is_in_parts, tensors.values())):
                    hasher, digests[file] = hashlib.sha256(), Future()
                    state.save_tensors(tensors, path, hasher, gather)
                    digests[file].set_result(hasher.hexdigest())
                    continue
                ready = state.host_tensors(tensors)
                with contextlib.suppress(RuntimeError):  # the interpreter is closing: the file is read back
                    digests[file] = pool.submit(state.digest, ready)
                state.save_tensors(ready, path)
            state.write_config(self.model, folder)
            self._write_beside(folder)

        with ThreadPoolExecutor(2, thread_name_prefix="omnitrain-hash") as pool:
            return store.save(
                snapshot.step, write, snapshot.payload, score=snapshot.score, best=snapshot.best, digests=digests
            )

    def _snapshot(self, history: dict[str, Any] | None = None) -> Snapshot:
        """Return the present state, as references to the live tensors."""
        progress, evaluated, credited = self.progress, self.lifecycle.evaluated_step, self._credited_step
        name = f"checkpoint-{progress.step:06d}"
        best = self._has_uncredited_best or (
            # an epoch's last step is saved again after the epoch's end
            credited == evaluated >= 0 and self.lifecycle.metrics.get("best_checkpoint") == name
        )
        # one checkpoint per evaluation, or the few best would be the same one under several names
        scored = evaluated, progress.step
        score = None if evaluated == self._scored[0] and scored != self._scored else self.lifecycle.objective.latest
        is_final = history is None and not self._owes_evaluation  # else a resumed run may save this step again
        history = history or self.lifecycle.state_dict()
        if best and is_final:
            history["metrics"]["best_checkpoint"], credited = name, evaluated
        loop = {
            "loss": self.ranks.gather("the losses for a checkpoint", self._loss.state_dict()),
            "logged": list(self._logged),
            "grad_norm": self._read_grad_norm().get("grad_norm"),
        }
        only_model = self._given["save_only_model"]
        files, payload = self._capture_model() if only_model else self._capture_state()
        payload |= {
            **history,
            "only_model": only_model,
            "objective": state.to_json(history["objective"], "objective"),
            "callbacks": state.to_json(history["callbacks"], "callbacks"),
            "loop": state.to_json(loop, "loop"),
            "credited_step": credited,
            "scored": list(scored if score is not None and is_final else self._scored),
            "owes": {"evaluation": self._owes_evaluation or self.control.evaluate, "save": self._owes_save},
            # where it lies is no setting of the run: the folder can be moved
            "settings": {key: value for key, value in self.resolved_config().items() if key != "save_dir"},
            "world_size": self.world_size,
            "versions": versions(),
            "saved_at": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        return Snapshot(files, payload, progress.step, score, best, evaluated)

    @property
    def _has_uncredited_best(self) -> bool:
        """Whether the latest evaluation is the best so far, and no checkpoint was saved since."""
        return self.lifecycle.objective.best_step == self.lifecycle.evaluated_step != self._credited_step

    def _capture_model(self) -> tuple[dict[str, dict[str, torch.Tensor]], dict[str, Any]]:
        """Return what `save_only_model` keeps, in the form of `_capture_state`."""
        return {state.WEIGHTS: self._model_tensors()}, {"extra_state": state.extra_state(self.model)}

    def _capture_state(self) -> tuple[dict[str, dict[str, torch.Tensor]], dict[str, Any]]:
        """Return the tensors by file and name, and the rest as JSON types. What the lifecycle knows is added to it."""
        tensors, rest = self._optimizer_state()
        generators = self.ranks.gather("the random numbers for a checkpoint", state.rng_tensors(self.device))
        scaler = getattr(self, "scaler", None)
        weights, payload = self._capture_model()
        payload |= {
            "optimizer": rest,
            "rng": [rest for _, rest in generators],
            "scheduler": None
            if self.lr_scheduler is None
            else state.to_json(self.lr_scheduler.state_dict(), "scheduler"),
            "scaler": state.to_json(scaler.state_dict(), "scaler") if scaler is not None else {},
            "algorithms": state.to_json([algorithm.state_dict() for algorithm in self.algorithms], "algorithms"),
            "drawn": self._drawn(),
        }
        files = {_rng_file(rank): tensors for rank, (tensors, _) in enumerate(generators)}
        return {**weights, OPTIMIZER: tensors, **files}, payload

    def _model_tensors(self) -> dict[str, Any]:
        """Return the weights by bare name; those in parts as they are."""
        return state.model_tensors(self.model)

    def _optimizer_state(self) -> tuple[dict[str, Any], Any]:
        """Return the optimizer's tensors by parameter and entry, and the rest as JSON types."""
        return state.optimizer_state(self.optimizer, self.model)

    def _drawn(self) -> list[int]:
        """Return which generators the training data was seen to draw from, so that a resumed run need not find out."""
        loader = self.train_loader
        own = [GENERATORS.index(g) for g in loader.fetch.drawn] if isinstance(loader, MapLoader) else []
        return sorted(set().union(*self.ranks.gather("what the data draws", own)))

    # --- coming back

    def load_checkpoint(self, path: str | Path) -> Path:
        """Put the whole trainer back to a checkpoint (a path, "last" or "best"), and return its folder.

        Raises:
            CheckpointError: If it is missing, damaged, or of another model or optimizer.
        """
        with self.ranks.calling("load_checkpoint()"):
            folder, content = self._resolve(path) or (None, None)
            if folder is None or content is None:
                raise CheckpointError(f"{str(path)!r} holds no checkpoint.")
            self._restore(folder, content)
            self._restore_random_numbers(folder, content)
        return folder

    def _resolve(self, which: str | Path, whole: bool = True) -> tuple[Path, dict[str, Any]] | None:
        """Return a verified checkpoint's folder and manifest; `whole` ones are those that a run can go on from."""
        if self.store is None and str(which) in ("auto", "last", "best"):
            raise ConfigError(
                f"`resume_from={str(which)!r}` looks into `save_dir`, which is not given. Pass it, or a path."
            )
        store = self.store or Store(Path(which).parent)
        found = self.ranks.on_main("the choice of a checkpoint", lambda: store.resolve(which))
        if whole and found is not None and found[1].get("only_model"):
            raise CheckpointError(
                f"{str(found[0])!r} was saved with save_only_model=True: it holds weights, and nothing else that a run "
                f"could go on from. Load its {state.WEIGHTS!r} into the model (safetensors.torch.load_model) and start "
                "afresh in another `save_dir`, or name a checkpoint that was saved whole."
            )
        return found

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
        self._origin = folder.parent
        changed = changed_settings(content["settings"], self.resolved_config())
        refused = {name: pair for name, pair in changed.items() if name not in allow_change}
        if refused:
            listed = "; ".join(f"{name}: {old!r} -> {new!r}" for name, (old, new) in refused.items())
            kept = ""
            if "global_batch_size" in refused:
                kept = f"global_batch_size={refused['global_batch_size'][0]} keeps it on any number of processes. "
            raise CheckpointError(
                f"{str(folder)!r} was saved under other settings, which would change the run: {listed}. {kept}"
                f"Set them back, or allow them by name: train(resume_from=..., allow_change={set(refused)!r})."
            )
        self._restore(folder, content, set(changed))
        logger.info("Resumed from %s at step %d.", folder.name, self.progress.step)
        return found

    def _restore(self, folder: Path, content: Mapping[str, Any], changed: Collection[str] = ()) -> None:
        self._restore_state(folder, content, changed)
        history = {key: state.from_json(content[key]) for key in ("objective", "callbacks", "loop")}
        selects_anew = not {"optimization_metric", "optimization_direction"}.isdisjoint(changed)
        self.lifecycle.load_state_dict({**content, **history}, selects_anew)
        losses = history["loop"]["loss"]
        self._loss.load_state_dict(losses if isinstance(losses, list) else [losses])  # as it once was
        step, seconds, samples, tokens = history["loop"]["logged"]
        self._logged = (step, seconds, samples, tokens)
        norm = history["loop"]["grad_norm"]
        self._grad_norm = None if norm is None else torch.tensor(norm, dtype=torch.float64)
        self._owes_evaluation = content["owes"]["evaluation"] and self._has_eval
        self._owes_save = content["owes"]["save"]
        if self._owes_save:
            self.lifecycle.saved_at = None
        self._credited_step = -1 if selects_anew else content["credited_step"]
        # the first checkpoints of format 1 lack it: each of them has the score of the evaluation before it
        evaluated, step = content.get("scored") or (content["evaluated_step"], content["step"])
        self._scored = evaluated, step
        if "algorithms" not in changed:
            for algorithm, saved in zip(self.algorithms, state.from_json(content["algorithms"]), strict=True):
                algorithm.load_state_dict(saved)
        if isinstance(self.train_loader, MapLoader):
            self.train_loader.fetch.drawn = [GENERATORS[index] for index in content["drawn"]]

    def _restore_state(self, folder: Path, content: Mapping[str, Any], changed: Collection[str] = ()) -> None:
        """Put model, optimizer, schedule and scaler back; of what is in `changed`, the new setting stays."""
        where = repr(str(folder))
        is_composed = "lr_scheduler_options" in changed and hasattr(self.lr_scheduler, "_schedulers")
        if (content["scheduler"] is None) != (self.lr_scheduler is None) or is_composed:
            changed = {*changed, "lr_scheduler"} - {"lr_scheduler_options"}  # warm-up alone makes a schedule too
        self._load_weights(TensorFile(folder / state.WEIGHTS, self.ranks), where, content["extra_state"])
        if "optimizer" in changed:
            logger.warning("The optimizer is another one now: it starts without the state of the old one.")
        else:
            fresh = [dict(group) for group in self.optimizer.param_groups]
            self._load_optimizer(TensorFile(folder / OPTIMIZER, self.ranks), content["optimizer"], where)
            self._keep_new_options(fresh, content, changed)
        if self.lr_scheduler is not None:
            self._restore_schedule(content, changed)
        scaler = getattr(self, "scaler", None)
        if scaler is not None and scaler.is_enabled() and content["scaler"]:
            scaler.load_state_dict(state.from_json(content["scaler"]))

    def _load_weights(self, tensors: Mapping[str, torch.Tensor], where: str, extra: Mapping[str, Any]) -> None:
        """Copy weights by bare name into the model."""
        state.load_weights(self.model, tensors, where, extra)

    def _load_optimizer(self, tensors: Mapping[str, torch.Tensor], saved: Any, where: str) -> None:
        """Put back what `_optimizer_state` returned."""
        state.restore_optimizer(self.optimizer, self.model, tensors, saved, where)

    def _restore_schedule(self, content: Mapping[str, Any], changed: Collection[str]) -> None:
        """Put the schedule where it was; a named one that has changed goes on from the same step of the new one."""
        schedulers = [self.lr_scheduler, *getattr(self.lr_scheduler, "_schedulers", ())]
        fresh, fresh_rates = dict(vars(self.lr_scheduler)), [getattr(one, "base_lrs", None) for one in schedulers]
        if "lr_scheduler" not in changed:
            self.lr_scheduler.load_state_dict(state.from_json(content["scheduler"]))
        if "lr_scheduler_options" in changed:
            then, now = content["settings"]["lr_scheduler_options"] or {}, self._schedule_options or {}
            vars(self.lr_scheduler).update({key: fresh[key] for key in now if now[key] != then.get(key)})
        has_new_rates = not {"learning_rate", "optimizer_groups"}.isdisjoint(changed)
        for scheduler, rates in zip(schedulers, fresh_rates, strict=True):
            if rates is not None:
                scheduler.base_lrs = rates if has_new_rates else state.like(scheduler.base_lrs, rates)
        then, now = content["settings"]["total_steps"], self.resolved_config()["total_steps"]
        named = isinstance(self.lr_scheduler, LambdaLR) and not callable(self._given["lr_scheduler"])
        if not named or (then == now and not {"lr_scheduler", "warmup_steps"} & set(changed)):
            return
        unit = "step" if self.scheduler_interval == "step" else "epoch"
        self.lr_scheduler.last_epoch = done = content["progress"][unit]
        self.lr_scheduler._step_count = done + 1
        rates = zip(self.optimizer.param_groups, self.lr_scheduler.base_lrs, self.lr_scheduler.lr_lambdas, strict=True)
        for group, rate, factor in rates:
            group["lr"] = rate * factor(done)
        logger.warning(
            "The schedule is another one now, made for %s steps (before: %s): the learning rate follows it from here.",
            now, then,
        )  # fmt: skip

    def _keep_new_options(
        self, fresh: list[dict[str, Any]], content: Mapping[str, Any], changed: Collection[str]
    ) -> None:
        """Of options of the optimizer that were allowed to change, take the new value, the rate in proportion."""
        before = content["settings"]["optimizer_groups"]
        for group, new, now, then in zip(
            self.optimizer.param_groups, fresh, self._optimizer_groups or [], before, strict=True
        ):
            if "lr_scheduler" in changed:
                group |= {key: new[key] for key in ("lr", "initial_lr") if key in new}
            elif now["lr"] != then["lr"]:
                group["lr"] = group["lr"] * (now["lr"] / then["lr"]) if then["lr"] else now["lr"]
                group |= {"initial_lr": now["lr"]} if "initial_lr" in group else {}
            group |= {key: new[key] for key in now.keys() - {"lr"} if now[key] != then.get(key)}

    def _restore_random_numbers(self, folder: Path, content: Mapping[str, Any]) -> None:
        if content["settings"]["seed"] != self.seed:
            return  # it was allowed to change
        saved = content["rng"] if isinstance(content["rng"], list) else [content["rng"]]  # as it once was
        for rank, rest in enumerate(saved):  # all processes read all files, as only the main one looks at the disk
            tensors = dict(TensorFile(folder / _rng_file(rank), self.ranks))
            if rank == self.rank:
                state.restore_rng_tensors(tensors, rest, self.device)
        if self.rank >= len(saved):  # more processes than there were
            seed_everything(derive_seed(self.seed, self.rank, self.progress.step) & 0x7FFFFFFF)

    # --- beginning and end of a run

    def _check_save_dir(self) -> None:
        """Refuse to start afresh among the checkpoints of another run, and say so early if the disk is too small."""
        if self.store is None:
            return
        there = self.ranks.on_main("a look at `save_dir`", self.store.checkpoints)
        if there and not self._given["overwrite"]:
            raise ConfigError(
                f"`save_dir={str(self.save_dir)!r}` already holds checkpoints, the newest being {there[-1].name!r}. "
                "Pass resume_from='auto' to train() to go on with that run, overwrite=True to replace it, "
                "or another `save_dir`."
            )

    def _check_disk(self) -> None:
        """Find out before the first step what could not be saved, and whether there is room for the rest."""
        if self.store is None:
            return
        only_model = self._given["save_only_model"]
        files, _ = self._capture_model() if only_model else self._capture_state()
        if not self.ranks.is_main:
            return
        sizes = [tensor.numel() * tensor.element_size() for tensor in files[state.WEIGHTS].values()]
        needed = (1 if only_model else 3) * sum(sizes)  # with the two moments of Adam
        warning = check_free_space(self.store.root, self.store.newest_size() or needed)
        if warning:
            logger.warning("%s", warning)

    def _load_best(self) -> None:
        """Put the best weights into the model, if a checkpoint was saved as the best; all else stays as it is."""
        name = self.lifecycle.metrics.get("best_checkpoint")
        if self.store is None or name is None:
            return
        if self.lifecycle.objective.best_step != self._credited_step:
            logger.warning(
                "The best evaluation, that of step %s, has no checkpoint: %r is the best of those that have one. "
                "Let `save_steps` divide `eval_steps`.", self.lifecycle.objective.best_step, name,
            )  # fmt: skip
        # by name first: the pointer may stand for an evaluation that closed a shorter run
        roots = [root for root in (self.store.root, self._origin) if root is not None]
        places = [*(root / name for root in roots), *(root / "best" for root in roots)]
        found = self.ranks.on_main("a look for the best", lambda: next((one for one in places if one.exists()), None))
        if found is None:
            logger.warning("The best checkpoint, %r, is gone: the model keeps the weights of the last step.", name)
            return
        try:
            place = self._resolve(found, whole=False)
            if place is None:
                return
            folder, content = place
            tensors = TensorFile(folder / state.WEIGHTS, self.ranks)
            self._load_weights(tensors, repr(str(folder)), content["extra_state"])
        except (CheckpointError, OSError) as error:  # the run itself has ended well
            logger.warning("The best weights cannot be loaded: %s The model keeps those of the last step.", error)
            return
        self._weights_from = Progress.from_state(content["progress"])
        logger.info("The model has the best weights now, those of %s.", folder.name)

    def _note_optimizer(self) -> None:
        if self._optimizer_groups is None:
            self._optimizer_groups = optimizer_options(self.optimizer)

    def _note_schedule(self) -> None:
        if self._schedule_options is None and not isinstance(self._given["lr_scheduler"], str | None):
            self._schedule_options = schedule_options(self.lr_scheduler)

    @contextlib.contextmanager
    def _writing_in_background(self) -> Iterator[None]:
        """Have a thread that writes checkpoints inside, if that was asked for; on the way out it has finished."""
        if self.store is None or not self._given["async_save"]:
            yield
            return
        self._host_copies = {}
        with ThreadPoolExecutor(1, thread_name_prefix="omnitrain-save") as self._background:
            try:
                yield
            finally:
                self._background, self._host_copies = None, {}
                (_, future), self._in_flight = self._in_flight or (None, None), None  # after an error: else awaited
                if future is not None and (error := future.exception()) is not None:
                    logger.error("%s", error)
