"""How a trainer comes back from a checkpoint: finding, checking and restoring it, resuming, and loading the best.

What is in one and how it is written is in `saving.py`. A backend overrides `_load_weights` and `_load_optimizer`.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR

from omnitrain.checkpoint import state
from omnitrain.checkpoint.store import Store
from omnitrain.checkpoint.tensors import TensorFile
from omnitrain.errors import CheckpointError, ConfigError
from omnitrain.data.loaders import MapLoader, Mark, StreamLoader
from omnitrain.progress import Progress
from omnitrain.reproducibility import GENERATORS, derive_seed, seed_everything
from omnitrain.trainers.changes import DECIDING, changed_settings, optimizer_options, schedule_options
from omnitrain.trainers.saving import OPTIMIZER, Saving, rng_file

__all__ = ["Resumable"]

logger = logging.getLogger("omnitrain")


class Resumable(Saving):
    """A training loop that goes on from a checkpoint as if it had not been interrupted."""

    _optimizer_groups: list[dict[str, Any]] | None = None
    """The options of the optimizer's groups as the run began, before any schedule moved them."""
    _schedule_options: dict[str, Any] | None = None
    """What a schedule of the user's own was made with; None for a named one, which the settings describe."""
    _resumed: tuple[Path, dict[str, Any]] | None = None
    """The checkpoint that this run goes on from."""
    _origin: Path | None = None
    """Where the checkpoint was that the run resumed from, which need not be the `save_dir`."""
    _weights_from: Progress | None = None
    """Where in the run the weights are from, if they are not those of the last step."""

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
        elif isinstance(self.train_loader, StreamLoader):
            mark = state.from_json(content.get("stream"))  # the first checkpoints of format 1 lack it
            self.train_loader.start_from(None if mark is None else Mark(**mark))

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
            tensors = dict(TensorFile(folder / rng_file(rank), self.ranks))
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
