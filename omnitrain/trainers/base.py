"""BaseTrainer: the arguments, and the calls that a user makes. The loop that they start is in `loop.py`."""

from __future__ import annotations

import logging
from abc import ABC
from collections.abc import Callable, Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from omnitrain import evaluation
from omnitrain.callbacks.cadence import Cadence
from omnitrain.callbacks.early_stopping import EarlyStopping
from omnitrain.callbacks.interrupt import Interrupt
from omnitrain.callbacks.jsonl import JsonlLogger
from omnitrain.callbacks.progress_bar import ProgressBar
from omnitrain.callbacks.retention import Retention
from omnitrain.checkpoint.state import class_of
from omnitrain.checkpoint.store import Store
from omnitrain.duration import Duration, Every, Limits
from omnitrain.errors import ConfigError
from omnitrain.events import Algorithm, Callback
from omnitrain.finite import FiniteGuard, LossMeter
from omnitrain.lifecycle import Lifecycle
from omnitrain.data.loaders import GivenLoader, make_loader
from omnitrain.objective import Objective
from omnitrain.optimization import build_optimizer, build_scheduler, follows_evaluations
from omnitrain.precision import Precision, choose_device
from omnitrain.reproducibility import derive_seed, seed_everything
from omnitrain.scoring import make_scorer
from omnitrain.trainers.calls import Calls
from omnitrain.settings import check_settings, describe, describe_data, refuse_unknown, resolve_accumulation
from omnitrain.units import ModelUnit

__all__ = ["BaseTrainer"]

logger = logging.getLogger("omnitrain")


class BaseTrainer(Calls, ABC):
    """The common base of all trainers: one lifecycle, one loop, hooks for what differs.

    Every argument is described in `docs/arguments.md`; `Trainer` is the one to use on one device. A subclass that
    overrides `_setup_training_components`, `_prepare_batch` and `_train_epoch` is complete.

    Args:
        model: Any `nn.Module`.
        train_dataset: Map-style or iterable dataset, or tensors.
        eval_dataset: The same, or a dict of named sets.
        test_dataset: The same; never used to select anything.

    Raises:
        ConfigError: If an argument is wrong, or two contradict each other.
        ObjectiveError: If nobody can tell whether a higher or a lower `optimization_metric` is better.
    """

    def __init__(
        self,
        model: nn.Module,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        test_dataset: Any = None,
        *,
        # data
        train_loader: Iterable[Any] | None = None,
        eval_loader: Iterable[Any] | None = None,
        test_loader: Iterable[Any] | None = None,
        data_collator: Callable[[Any], Any] | None = None,
        batch_size: int = 8,
        eval_batch_size: int | None = None,
        global_batch_size: int | None = None,
        shuffle: bool = True,
        num_workers: int = 0,
        pin_memory: bool | None = None,
        prefetch_factor: int | None = None,
        # length
        epochs: int | float | None = 3,
        max_steps: int | None = None,
        max_duration: int | str | Duration | None = None,
        # optimizer
        optimizer: torch.optim.Optimizer | str | Callable[..., torch.optim.Optimizer] | None = None,
        learning_rate: float = 2e-5,
        weight_decay: float = 0.0,
        lr_scheduler: Any = None,
        warmup_steps: int = 0,
        scheduler_interval: str = "step",
        gradient_accumulation_steps: int = 1,
        max_grad_norm: float | None = 1.0,
        grad_reduction: str = "mean",
        # loss and metrics
        loss_fn: Callable[[Any, Any], torch.Tensor] | None = None,
        unit: Any = None,
        compute_metrics: Any = None,
        optimization_metric: str = "loss",
        optimization_direction: str | None = None,
        patience: int | None = None,
        delta: float = 0.0,
        early_stopper: Callable[[int, float], bool] | None = None,
        # cadence
        eval_steps: int | str | Duration | None = None,
        eval_on_start: bool = False,
        save_steps: int | str | Duration | None = None,
        log_steps: int | str | Duration = 10,
        # checkpoints
        save_dir: str | Path | None = None,
        save_total_limit: int | None = None,
        keep_best: int = 1,
        keep_every: int | None = None,
        load_best_at_end: bool | None = None,
        overwrite: bool = False,
        save_required: bool = False,
        save_only_model: bool = False,
        async_save: bool = False,
        # precision and placement
        autocast: str | torch.dtype | None = None,
        fp16_loss_scale: tuple[float, float] = (65536.0, 1e-4),
        device: str | torch.device | None = None,
        # run
        seed: int = 42,
        deterministic: bool = False,
        on_nonfinite: str = "raise",
        detect_anomaly: bool = False,
        callbacks: Iterable[Callback] = (),
        algorithms: Iterable[Algorithm] = (),
        progress_bar: bool | None = None,
        trial_name: str | None = None,
        **unknown: Any,
    ) -> None:
        given = {name: value for name, value in locals().items() if name not in ("self", "__class__", "unknown")}
        refuse_unknown(unknown, type(self))
        if not isinstance(model, nn.Module):
            raise ConfigError(f"`model` must be an nn.Module, got {type(model).__name__}.")
        check_settings(given)
        self._given = {name: value for name, value in given.items() if name != "model"}
        self.model = model
        self.train_dataset, self.eval_dataset, self.test_dataset = train_dataset, eval_dataset, test_dataset
        self.data_collator = data_collator
        self.batch_size, self.eval_batch_size = batch_size, eval_batch_size or batch_size
        self.epochs, self.max_steps = epochs, max_steps
        self.limits = Limits(epochs, max_steps, max_duration)
        self.learning_rate, self.weight_decay, self.warmup_steps = learning_rate, weight_decay, warmup_steps
        self.max_grad_norm, self.grad_reduction = max_grad_norm, grad_reduction
        self.scheduler_interval = scheduler_interval
        self.loss_fn, self.unit = loss_fn, unit if unit is not None else ModelUnit(model, loss_fn)
        self.compute_metrics = compute_metrics
        self.scorer = make_scorer(compute_metrics)
        self.eval_on_start = eval_on_start
        self.save_dir = None if save_dir is None else Path(save_dir)
        self.store = None if self.save_dir is None else Store(self.save_dir)
        self.save_required = save_required
        self.fp16_loss_scale = fp16_loss_scale
        self.seed, self.deterministic, self.on_nonfinite = seed, deterministic, on_nonfinite
        self.trial_name = trial_name
        self.algorithms = list(algorithms)
        for algorithm in self.algorithms:
            if not isinstance(algorithm, Algorithm):
                raise ConfigError(f"`algorithms` must hold omnitrain.Algorithm instances, got {algorithm!r}.")
        self._user_callbacks = list(callbacks)
        self.device = self._choose_device(device)
        self.gradient_accumulation_steps = resolve_accumulation(given, self.world_size)
        self._set_up_data()
        self.precision = Precision.parse(autocast, self.device)
        self._new_run()
        self._setup_training_components()
        self._finish_setup()

    # --- setting up

    def _set_up_data(self) -> None:
        given = self._given
        pin_memory = self.device.type == "cuda" if given["pin_memory"] is None else given["pin_memory"]
        self._loading = {
            "collate": self.data_collator,
            "seed": self.seed,
            "rank": self.rank,
            "world_size": self.world_size,
            "num_workers": given["num_workers"],
            "pin_memory": pin_memory and self.device.type != "cpu",
            "prefetch_factor": given["prefetch_factor"],
        }
        self.train_loader: Any = None
        if given["train_loader"] is not None:
            self.train_loader = GivenLoader(given["train_loader"], self.seed, self.rank, self.world_size)
        elif self.train_dataset is not None:
            self.train_loader = make_loader(
                self.train_dataset, self.batch_size, name="train_dataset", shuffle=given["shuffle"],
                marks=self.store is not None, **self._sampling, **self._loading,
            )  # fmt: skip
        self.eval_loader = self._evaluation_loader(self.eval_dataset, given["eval_loader"], "eval_dataset")
        self.test_loader = self._evaluation_loader(self.test_dataset, given["test_loader"], "test_dataset")

    @property
    def _sampling(self) -> dict[str, Any]:
        """What is said of the order of training samples beside `shuffle` and `seed`; see `make_loader`."""
        return {}

    def _evaluation_loader(self, dataset: Any, loader: Any, name: str) -> Any:
        given = dataset if loader is None else loader
        if evaluation.is_named_sets(given):
            parts = {key: (None, value) if dataset is None else (value, None) for key, value in given.items()}
            return {key: self._evaluation_loader(*part, f"{name}[{key!r}]") for key, part in parts.items()}
        if loader is not None:
            return GivenLoader(loader, self.seed, self.rank, self.world_size)
        if dataset is None:
            return None
        return make_loader(dataset, self.eval_batch_size, name=name, marks=False, **self._loading)

    def _new_run(self) -> None:
        """Start counting from nothing: progress, history, best."""
        given = self._given
        metric = given["optimization_metric"]
        objective = Objective(
            metric,
            given["optimization_direction"],
            given["delta"],
            self.scorer.higher_is_better.get(metric.removeprefix("eval_")),
        )
        self._check_objective(objective)
        log = Every(Duration.parse(given["log_steps"], "ba", "log_steps"), self.limits)
        evaluate = self._interval("eval_steps") if self._has_eval else None
        save = self._interval("save_steps") if self.store is not None else None
        patience = None if given["patience"] == -1 else given["patience"]
        own: list[Callback] = [
            Interrupt(),
            Cadence(self.limits, log, evaluate, save),
            EarlyStopping(patience, given["early_stopper"]),
            ProgressBar(given["progress_bar"]),
        ]
        if self.store is not None:
            kept = given["save_total_limit"], given["keep_best"], given["keep_every"]
            own += [JsonlLogger(), Retention(self.store, *kept, replaces=given["overwrite"])]
        self.lifecycle = Lifecycle(self, [*own, *self._user_callbacks], objective)
        self.progress.epoch_size = None if self.train_loader is None else self.train_loader.size
        self._loss, self._grad_norm, self._logged = LossMeter(self.device, self.ranks), None, (0, 0.0, 0, 0)
        self._weights_from, self._scored = None, (-1, -1)
        self._owes_evaluation, self._owes_save, self._credited_step, self._epoch_is_complete = False, False, -1, True

    def _interval(self, name: str) -> Every:
        value = "1ep" if self._given[name] is None else self._given[name]
        return Every(Duration.parse(value, "ba", name), self.limits)

    def _check_objective(self, objective: Objective) -> None:
        """Refuse a metric that cannot come, where the names of the metrics are known beforehand."""
        names = self.scorer.names
        if not self._has_eval or names is None:
            return
        known = [f"eval_{name}" for name in ("loss", *names)]
        if isinstance(self.eval_loader, dict):
            known += [f"eval_{key}_{name}" for key in self.eval_loader for name in ("loss", *names)]
        objective.key(dict.fromkeys(known, 0.0))

    @property
    def _loads_best(self) -> bool:
        wanted = self._given["load_best_at_end"]
        return self.store is not None and self._has_eval and wanted is not False

    def _finish_setup(self) -> None:
        """Build what `_setup_training_components` left to be built."""
        self.lr_scheduler = None
        if not self._can_train:
            return
        self._note_optimizer()
        self.lr_scheduler = build_scheduler(
            self._given["lr_scheduler"],
            self.optimizer,
            warmup_steps=self.warmup_steps,
            total_steps=self.total_steps if self.scheduler_interval == "step" else self._total_epochs,
        )
        self._note_schedule()
        if follows_evaluations(self.lr_scheduler):
            if not self._has_eval:
                kind = type(self.lr_scheduler).__name__
                raise ConfigError(f"`lr_scheduler={kind}` follows evaluations. Pass `eval_dataset`.")
            self.scheduler_interval = "evaluation"

    @cached_property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer: the user's, or one that is built when it is first looked at, once the model is in place."""
        return self._build_optimizer()

    def _build_optimizer(self) -> torch.optim.Optimizer:
        """Return the optimizer that was asked for, of the model as it is now."""
        return build_optimizer(self._given["optimizer"], self.model, self.learning_rate, self.weight_decay)

    def _renew_optimizer(self) -> None:
        """Have an optimizer without a past, for another run."""
        del self.optimizer  # it is built when it is next looked at

    @property
    def steps_per_epoch(self) -> int | None:
        """Optimizer steps in an epoch, or None for data without length."""
        try:
            batches = len(self.train_loader)
        except TypeError:
            return None
        return -(-batches // self.gradient_accumulation_steps)

    @property
    def total_steps(self) -> int | None:
        """Optimizer steps of the whole run where that can be told."""
        return self.limits.total_steps(
            self.steps_per_epoch, None if self.train_loader is None else self.train_loader.size
        )

    @property
    def _total_epochs(self) -> int | None:
        total, steps = self.total_steps, self.steps_per_epoch
        return None if total is None or not steps else -(-total // steps)

    def _begin_run(self) -> None:
        """Refuse what cannot train, and start counting anew."""
        if not self._can_train:
            raise ConfigError("There is nothing to train on: pass `train_dataset` or `train_loader`.")
        if self.progress.step or self.metrics["train_metrics_history"]:
            self._new_run()
            if self._given["optimizer"] is None or not hasattr(self._given["optimizer"], "param_groups"):
                self._renew_optimizer()
            self._finish_setup()
        self._seed()
        self.optimizer.zero_grad()
        self._collect_parameters()
        deferred = self.on_nonfinite == "raise" and FiniteGuard.can_defer(self.device, self.optimizer)
        self._guard = FiniteGuard(self.device, self.optimizer, deferred and self.precision.name != "fp16")

    # --- settings

    def resolved_config(self) -> dict[str, Any]:
        """Return every setting as it is in force, as JSON types."""
        resolved = {
            "autocast": self.precision.name,
            "device": str(self.device),
            "eval_batch_size": self.eval_batch_size,
            "gradient_accumulation_steps": self.gradient_accumulation_steps,
            "global_batch_size": self.batch_size * self.world_size * self.gradient_accumulation_steps,
            "optimization_direction": self.objective.direction,
            "optimizer": self.optimizer if self._can_train else None,
            "optimizer_groups": self._optimizer_groups,
            "lr_scheduler_options": self._schedule_options,
            "samples_per_epoch": None if self.train_loader is None else self.train_loader.size,
            "total_steps": self.total_steps,
            "unit": self.unit,
        }
        plain = {
            name: describe_data(value) if name.endswith(("_dataset", "_loader")) else describe(value)
            for name, value in {**self._given, **resolved}.items()
        }
        return {"trainer": describe(type(self)), "model": describe(class_of(self.model)), **plain}

    # --- what a backend overrides

    def _choose_device(self, device: str | torch.device | None) -> torch.device:
        """Return the device to train on: the one asked for, else the first there is of cuda, xpu, mps, cpu."""
        return choose_device(device)

    def _seed(self) -> None:
        """Seed the generators that training draws from; dropout on one process must not repeat that on another."""
        seed_everything(self.seed if self.rank == 0 else derive_seed(self.seed, self.rank) & 0x7FFFFFFF)

    def _setup_training_components(self) -> None:
        """Put the model in place. `self.optimizer` is built afterwards, unless this sets it."""
        self.model.to(self.device)
