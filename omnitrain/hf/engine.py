"""transformers' Trainer as the engine of `HFTrainer`.

`Engine` overrides the methods by which that loop gets data, steps and saves. `Bridge` and `Boundary` pass its events to
our lifecycle, and `Reporter` passes our events to transformers' callbacks. The facades replace the accelerator,
optimizer and schedule that the loop expects.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from torch.utils.data import DataLoader
from transformers.trainer_callback import CallbackHandler, ExportableState

from omnitrain.arguments import samples_of_step
from omnitrain.checkpoint.state_dicts import unwrap
from omnitrain.checkpoint.store import Store
from omnitrain.core.errors import ConfigError, Tolerance
from omnitrain.core.events import Callback, Control, Event
from omnitrain.data.sampling import Window
from omnitrain.hf.arguments import enum_value, syncs_each_batch
from omnitrain.hf.callbacks import TransformersCallbacks
from omnitrain.hf.data import counting_loader, loader_for_callbacks
from omnitrain.hf.files import write_optimizer, write_state
from omnitrain.hf.policies import is_delayed
from omnitrain.hf.search import SearchTrainer, Trial, run_trial
from omnitrain.trainer.base import BaseTrainer
from omnitrain.trainer.loop import Loop

logger: logging.Logger = logging.getLogger("omnitrain")


class EngineLoop(Loop):
    """Our loop when transformers' loop runs the epochs; it acts on requests as usual.

    Args:
        engine: Returns the engine, which is created after the loop.
        parts: The arguments of `Loop`.
    """

    def __init__(self, engine: Callable[[], Engine], *parts: Any) -> None:
        super().__init__(*parts)
        self._engine = engine

    def train(self) -> None:
        """Run transformers' loop until the run ends."""
        if not self.lifecycle.stop:
            self._engine().run()
        elif self.checkpointer.is_resuming:
            self._engine().restore_state()

    @property
    def has_rank_local_requests(self) -> bool:
        """Whether this rank may have requests that other ranks lack; transformers' callbacks may."""
        return True

    @property
    def has_requests(self) -> bool:
        """Whether anything may have been requested on this rank, including by transformers' callbacks."""
        return self._engine().is_in_train or super().has_requests

    def agree(self, where: str, *requests: str, ahead: Sequence[float] = ()) -> Control:
        """Return which of these requests any rank has, including those of transformers' callbacks."""
        engine = self._engine()
        if not engine.is_in_train:  # the flags belong to an earlier run
            return super().agree(where, *requests, ahead=ahead)
        engine.sync_control_flags(requests)
        agreed = super().agree(where, *requests, ahead=ahead)
        engine.control.should_training_stop = bool(self.lifecycle.stop)
        return agreed

    def _act_on(self, asked: Control) -> None:
        """Act on requests as usual, including those that transformers' callbacks cancel or add meanwhile.

        When they are called for a log or an evaluation, their flags show the requests still pending.
        """
        engine, lifecycle = self._engine(), self.lifecycle
        if engine.is_in_train:
            control = engine.control
            asked.evaluate &= lifecycle.evaluated_step != lifecycle.progress.step
            if asked.log:
                control.should_evaluate, control.should_save = asked.evaluate, asked.save
                self.log()
                asked = self.agree("the end of a log", "evaluate", "save")
            if asked.evaluate:
                control.should_save, asked.save = asked.save, False
        super()._act_on(asked)

    def sanity_check(self) -> None:
        evaluation: Any = self.evaluation
        with self.mute_callbacks():
            if "evaluate" in self._engine().trainer._overridden:  # the user's `evaluate` may need no loss
                evaluation.run_first_batches(self.sets.eval, self.is_interrupted)
            else:
                super().sanity_check()

    @contextlib.contextmanager
    def mute_callbacks(self) -> Iterator[None]:
        """Evaluate without calling transformers' callbacks, for which the run has not begun yet."""
        evaluation: Any = self.evaluation
        evaluation.reports_batches = False
        try:
            yield
        finally:
            evaluation.reports_batches = True

    def finish_run(self) -> None:
        self._engine().count_operations()
        self._engine().record_final_state()
        super().finish_run()

    def _save(self, is_asked: bool) -> None:
        """Save as usual; a callback's request with `save_strategy="no"` saves to `output_dir`."""
        trainer: Any = self.trainer
        if is_asked or self.checkpointer.requires_best_save:
            self._engine().count_operations()
        if not is_asked or self.checkpointer.store is not None:
            super()._save(is_asked)
            return
        trainer.store = self.checkpointer.store = Store(self._engine().args.output_dir)
        try:
            super()._save(is_asked)
        finally:
            trainer.store = self.checkpointer.store = None

    def finish_run_by_steps(self) -> None:
        """Finish a run at its limit, if its evaluations and checkpoints come at intervals of steps.

        transformers' callbacks expect these before the end of the epoch.
        """
        args = self._engine().callback_args
        if "epoch" not in (enum_value(args.eval_strategy), enum_value(args.save_strategy)):
            self.agree("the end of an epoch")
            if self.is_at_limit:
                self.finish_run()

    def evaluate(self, counts: bool = True) -> None:
        """Evaluate as part of the run, unless it is the last evaluation and too early by `eval_delay`."""
        engine, lifecycle = self._engine(), self.lifecycle
        if not (lifecycle.is_closing and is_delayed(engine.training_args, lifecycle.progress)):
            with contextlib.nullcontext() if engine.is_in_train else self.mute_callbacks():
                super().evaluate(counts)


class Engine(SearchTrainer):
    """transformers' Trainer, used only for its loop.

    A subclass for `HFTrainer.engine_class` may override `training_step`, `log` and other methods that the loop calls.

    Args:
        trainer: The trainer of the run.
        training_args: The user's TrainingArguments, or None.
        by_window: Whether transformers' loop gets full windows, because the data's length is unknown or may change.
        callback_args: The arguments that callbacks see, theirs and ours; `args` is for transformers' loop.
        scratch: A folder for temporary files.
        trial: The trial of a search, or None.
        accelerator: The `Accelerator` of a backend that shards; None lets transformers create one.
        kwargs: The arguments of `transformers.Trainer`.
    """

    epoch_has_ended: bool = False
    """Whether the current epoch has ended."""
    stop_requested: bool | None = None
    """Whether transformers' callbacks had requested a stop when the data of an epoch ended."""
    trainer: Any
    state: transformers.TrainerState
    control: transformers.TrainerControl
    train_dataset: Any
    optimizer: Any
    lr_scheduler: Any
    accelerator: Any
    real_accelerator: Any
    """accelerate's `Accelerator`; transformers' loop sees a facade of it."""
    gather_function: Any
    window: Window
    """The window of the current step."""
    windows: Iterator[Window]
    """The windows of the rest of the epoch."""
    final_state: transformers.TrainerState | None = None
    """Transformers' state at the end of the latest run, before its last rows."""
    output: Any = None
    """The return value of transformers' loop."""
    # The means of the row of logs that transformers is about to write.
    _row_means: Mapping[str, float] | None = None
    # The loader of the latest evaluation, and the loader that callbacks see.
    _eval_loaders: tuple[Any, Any] = (None, None)
    # The flags for an evaluation and a checkpoint after callbacks were called for a log.
    _flags_after_log = (False, False)
    # Whether our trainer runs transformers' loop.
    _is_called_by_trainer = False
    # The evaluation before the first step, until transformers' callbacks know that the run has begun.
    _initial_evaluation: dict[str, float] | None = None
    # The step of the last checkpoint for which callbacks were called.
    _reported_save: int = -1
    # The arguments of `_maybe_log_save_evaluate` at this step.
    _log_arguments: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})

    def __init__(
        self,
        trainer: BaseTrainer,
        training_args: transformers.TrainingArguments | None,
        by_window: bool,
        callback_args: transformers.TrainingArguments,
        scratch: Path,
        trial: Trial | None,
        accelerator: Any,
        **kwargs: Any,
    ) -> None:
        self.trainer = trainer
        self.training_args = training_args
        self.callback_args = callback_args
        self.by_window = by_window
        self.scratch = scratch
        self.search_trial = trial
        self.syncs_each_batch: bool = syncs_each_batch(training_args)
        self.real_accelerator = accelerator
        self._tolerance = Tolerance("output_dir", "The next write there tries again.")
        output_dir: Any = kwargs["args"].output_dir
        with self._tolerance:
            os.makedirs(output_dir, exist_ok=True)
        if self._tolerance.has_failed:  # transformers creates the folder, and would raise the disk's error
            kwargs["args"].output_dir = str(scratch)
        super().__init__(**kwargs)
        self.args.output_dir = output_dir

    def _get_callbacks(self) -> TransformersCallbacks:
        return self._callbacks

    def _set_callbacks(self, handler: CallbackHandler) -> None:
        self._callbacks = TransformersCallbacks(handler, self.callback_args, Bridge(self), Boundary(self))

    callback_handler: Any = property(_get_callbacks, _set_callbacks, doc="The callbacks, which get each event.")
    """A property, because transformers creates a handler and calls it before it could be replaced."""

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Run transformers' loop for `HFTrainer.train`, or for a trial of a search.

        Raises:
            ConfigError: If HFTrainer did not call it.
        """
        if not self._is_called_by_trainer and self.hp_search_backend is not None:
            return run_trial(self, *args, **kwargs)
        if not self._is_called_by_trainer:
            raise ConfigError(
                "`engine.train()` would train without checkpoints, history and limits. Call HFTrainer.train()."
            )
        self._is_called_by_trainer = False
        return super().train(*args, **kwargs)

    def run(self) -> None:
        """Run transformers' loop from the current position."""
        trainer = self.trainer
        self.optimizer, self.lr_scheduler = trainer.optimizer, ScheduleFacade(trainer)  # type: ignore[assignment]
        self.epoch_has_ended, self._is_called_by_trainer, self._reported_save = False, True, -1
        trial = self.search_trial and self.search_trial.trial
        self.output = self.train(resume_from_checkpoint=self._write_start_state(), trial=trial)

    def restore_state(self) -> None:
        """Restore transformers' history and the states of its callbacks if a run is resumed after its end."""
        self.state = self.current_state()
        self._load_callback_state()

    def _write_start_state(self) -> str | None:
        """Return a folder with the state that transformers needs to start at the current position; None at 0."""
        trainer, progress = self.trainer, self.trainer.progress
        if not (progress.epoch or progress.samples_in_epoch):
            return None
        share = samples_of_step(trainer.settings, trainer._sets.share.size)
        state = self.current_state()
        # transformers' loop derives the position in the data from this; the Bridge sets the step
        state.global_step = progress.epoch * (trainer.steps_per_epoch or 0) + -(-progress.samples_in_epoch // share)
        for name in ("logging_steps", "eval_steps", "save_steps"):  # our callbacks have the intervals
            setattr(state, name, getattr(self.args, name))
        folder = self.scratch / "start"
        folder.mkdir(exist_ok=True)
        state.save_to_json(str(folder / "trainer_state.json"))
        return str(folder)

    def get_total_train_batch_size(self, args: transformers.TrainingArguments) -> int:
        """Return the samples of an optimizer step over all ranks."""
        return samples_of_step(self.trainer.settings, self.trainer._sets.share.size)

    def record_final_state(self) -> None:
        """Record transformers' state at the end of a run, for a continued run in this process."""
        self.final_state = copy.deepcopy(self.state)

    def current_state(self) -> transformers.TrainerState:
        """Return transformers' state of the run so far: its history, and the states of its callbacks."""
        trainer, state = self.trainer, transformers.TrainerState()
        checkpointer = trainer._checkpointer
        resumed = checkpointer.resumed
        state_file = None if resumed is None else resumed[0] / "trainer_state.json"
        if checkpointer.continued_state is not None and self.final_state is not None:
            state = copy.deepcopy(self.final_state)
        elif state_file is not None and state_file.exists():
            state = transformers.TrainerState.load_from_json(str(state_file))
        state.global_step = trainer.progress.step + trainer.progress.skipped_steps
        state.epoch, state.train_batch_size = trainer.progress.epochs, trainer.batch_size
        return state

    # --- set-up

    def create_accelerator_and_postprocess(self) -> None:
        """Use the accelerator of a backend that shards, or create one; transformers' loop sees a facade of it."""
        if self.real_accelerator is None:
            super().create_accelerator_and_postprocess()
            self.real_accelerator = self.accelerator
        self.accelerator = AcceleratorFacade(self.trainer, self.real_accelerator)  # type: ignore[assignment]
        self.gather_function = self.real_accelerator.gather_for_metrics
        self.is_deepspeed_enabled = self.is_fsdp_enabled = self.is_tp_enabled = False  # the backend shards

    @property
    def optimizer_facade(self) -> OptimizerFacade:
        """The optimizer of transformers' loop."""
        return self.accelerator.optimizer  # type: ignore[attr-defined]

    def _move_model_to_device(self, model: nn.Module, device: Any) -> None:
        pass  # the backend does it

    # --- data

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Return a loader by which transformers' loop counts; batches come from `get_batch_samples`."""
        return counting_loader(self.trainer, self.by_window)

    def stock_train_dataloader(self) -> DataLoader[Any]:
        """Return the loader that transformers builds for the training set."""
        with self._prepare_with_accelerate():
            return super().get_train_dataloader()

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any]:
        """Return the loader that transformers builds for an evaluation set."""
        with self._prepare_with_accelerate():
            return super().get_eval_dataloader(eval_dataset)

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader[Any]:
        """Return the loader that transformers builds for a test set."""
        with self._prepare_with_accelerate():
            return super().get_test_dataloader(test_dataset)

    @contextlib.contextmanager
    def _prepare_with_accelerate(self) -> Iterator[None]:
        """Make accelerate split the samples of loaders built inside, and move their batches to the device."""
        self.accelerator.prepares_loaders = True  # type: ignore[attr-defined]
        try:
            yield
        finally:
            self.accelerator.prepares_loaders = False  # type: ignore[attr-defined]

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: Any) -> tuple[list[Any], None]:
        """Return the micro-batches of the next window: one by one, or as a single item if their number is unknown."""
        window = next(self.windows, None)
        if window is None:
            # transformers' loop relies on a length, and would end the run after an epoch without a step
            self.control.should_epoch_stop, self.stop_requested = True, self.control.should_training_stop
            return [], None
        self.window = window
        return [window.batches] if self.by_window else window.batches, None

    def _run_epoch(self, *args: Any, **kwargs: Any) -> Any:
        """Run one epoch of the data's current length; transformers reads the length only once."""
        if not self.by_window and "steps_in_epoch" in kwargs:
            batches = len(self.trainer.train_loader)
            kwargs["steps_in_epoch"] = batches
            kwargs["num_update_steps_per_epoch"] = -(-batches // self.args.gradient_accumulation_steps)
        return super()._run_epoch(*args, **kwargs)

    def start_windows(self) -> None:
        """Start the windows of the epoch at the current position."""
        trainer, progress, feed = self.trainer, self.trainer.progress, self.trainer._feed
        windows = feed.windows(trainer.train_loader, progress.epoch, progress)
        self.windows = iter(feed.until_signal(windows))

    def _prepare_inputs(self, inputs: Any) -> Any:
        return inputs  # the step does it

    # --- a step

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Run forward and backward on a micro-batch, or on each one of a window; return the loss."""
        if not self.window.weight:
            return torch.zeros((), device=self.args.device)
        if self.by_window:
            return self.trainer._step.run(lambda: self._run_micro_batches(model))
        return self._train_micro_batch(model, inputs)

    def _train_micro_batch(self, model: nn.Module, inputs: Any) -> torch.Tensor:
        trainer, emit = self.trainer, self.trainer.lifecycle.emit_in_step
        with trainer._accumulating(last=trainer._step.completes or self.syncs_each_batch):
            loss = trainer.call_training_step(model, inputs)
        if emit is not None:
            emit(Event.BATCH_END)
        return loss

    def _run_micro_batches(self, model: nn.Module) -> torch.Tensor:
        total = torch.zeros((), device=self.args.device)
        for batch in self.trainer._step.window.batches:
            total += self._train_micro_batch(model, batch)
        return total

    def run_micro_batch(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Run forward and backward on a micro-batch as transformers does, and return its part of the step's loss."""
        with _preserve_modes(model):
            return super().training_step(model, inputs, num_items_in_batch)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Any,
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """Return a micro-batch's part of the window's loss; outside training, the plain loss."""
        trainer = self.trainer
        if not (model.training and self.is_in_train):
            output = trainer.backend.forward(trainer._forward, trainer._prepare_batch(inputs))
            return (output.loss, {"loss": output.loss, "logits": output.outputs}) if return_outputs else output.loss
        loss = trainer._step.loss_of(inputs)
        return (loss, {}) if return_outputs else loss

    def floating_point_ops(self, inputs: Any) -> int:
        """Return the floating-point operations of a micro-batch, or of a window."""
        batches = inputs if self.by_window else [inputs]
        count = super().floating_point_ops
        return sum(count(dict(batch)) for batch in batches if isinstance(batch, Mapping))

    def count_operations(self) -> None:
        """Add the operations since the latest log to transformers' state, which is in checkpoints."""
        if self.is_in_train:
            self.store_flos()

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> None:
        """Leave norm and clipping to our step, which does them once, as in every trainer."""

    def _get_learning_rate(self) -> float:
        return self.trainer._loop.rates_and_norm()["learning_rate"]

    # --- logs, evaluation, checkpoints

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "train_runtime" in logs:  # the end of the run; transformers does not know its length
            seconds = logs["train_runtime"] or 1.0
            logs["train_samples_per_second"] = round(self.trainer.progress.samples / seconds, 3)
        elif "loss" in logs and self.is_in_train and (norm := self.trainer._step.grad_norm) is not None:
            logs["grad_norm"] = float(norm)
        if "loss" in logs and self._row_means is not None:
            logs |= self._row_means  # transformers' loss lacks the steps before a resume
            self._row_means = None
        self.trainer.call_log(logs, start_time)
        # our loop acts on the requests of callbacks, not transformers'
        self._flags_after_log = self.control.should_evaluate, self.control.should_save
        if "loss" in logs:
            self.control.should_evaluate = self.control.should_save = False

    def write_log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add a row to transformers' history, and call its callbacks."""
        super().log(logs, start_time)

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Act on the requests of our callbacks and transformers', and end the run at its limit."""
        self._log_arguments = args, kwargs
        loop = self.trainer._loop
        loop.handle_requests()
        if self.epoch_has_ended and self.trainer.lifecycle.stop:
            loop.close()  # before transformers' own end-of-training code

    def _get_output_dir(self, trial: Any) -> str:
        """Return the folder only for saving: transformers lists it at the end, which would raise on a bad disk."""
        return super()._get_output_dir(trial) if self.control.should_save else os.devnull

    def sync_control_flags(self, requests: Sequence[str]) -> None:
        """Turn the flags of transformers' callbacks into our requests."""
        trainer, control = self.trainer, self.control
        if control.should_training_stop:
            trainer.stop()
        if "log" in requests and control.should_log:
            trainer.control.log |= trainer.lifecycle.logged_at[0] < trainer.progress.step
            control.should_log = False
        if "evaluate" in requests and control.should_evaluate:
            if trainer.eval_loader is None:
                trainer.request_evaluate()  # raises, without an evaluation set
            trainer.control.evaluate, control.should_evaluate = True, False
        if "save" in requests and control.should_save:
            trainer.control.save, control.should_save = True, False

    def report_log(self, logs: Mapping[str, float]) -> None:
        """Write transformers' row of logs for this step, with our means."""
        means = ("loss", *self.trainer._step.latest_metrics)
        self._row_means = {name: logs[name] for name in means if name in logs}
        self.control.should_log = True
        args, kwargs = self._log_arguments
        super()._maybe_log_save_evaluate(*args, **kwargs)
        self.control.should_log = False
        self.control.should_evaluate, self.control.should_save = self._flags_after_log

    def report_evaluation(self, metrics: Mapping[str, float], is_reported: bool = False) -> None:
        """Report an evaluation and its timings to transformers' history, state and callbacks.

        Args:
            metrics: The result.
            is_reported: Whether the user's own `evaluate` has written the row of logs and called the callbacks.
        """
        if not is_reported:
            logs = {**metrics, **self.trainer._evaluation.speeds}  # type: ignore[attr-defined]
            self.log(logs)
            self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, logs)
        objective = self.trainer.objective
        self.state.best_metric, self.state.best_global_step = objective.best, objective.best_step
        for callback in self.callback_handler.replaced:
            callback.early_stopping_patience_counter = objective.evaluations_without_gain

    def report_batch(self, loader: Any) -> None:
        """Call transformers' callbacks for a finished batch of an evaluation or a prediction."""
        if loader is not self._eval_loaders[0]:
            self._eval_loaders = loader, loader_for_callbacks(loader, self.trainer.eval_batch_size)
        self.callback_handler.eval_dataloader = self._eval_loaders[1]
        self.control = self.callback_handler.on_prediction_step(self.args, self.state, self.control)

    def report_prediction(self, metrics: Mapping[str, float]) -> None:
        """Call transformers' callbacks for finished predictions."""
        self.control = self.callback_handler.on_predict(self.args, self.state, self.control, dict(metrics))

    def report_save(self) -> None:
        """Call transformers' callbacks once for a checkpoint, which may be written again at the end."""
        if self._reported_save == self.state.global_step:
            return
        self._reported_save = self.state.global_step
        self.control = self.callback_handler.on_save(self.args, self.state, self.control)

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Evaluate as every trainer does, and call transformers' callbacks."""
        return self.trainer.evaluate(eval_dataset, metric_key_prefix)

    def write_transformers_files(self, folder: Path, stock: bool) -> None:
        """Write transformers' history, model files, and optionally the files from which its stock Trainer resumes.

        Args:
            folder: The folder of the checkpoint.
            stock: Whether to write the latter: they are pickled, and we read none of them.
        """
        trainer = self.trainer
        store: Any = trainer.store
        if self.args.push_to_hub:
            self.wait_for_upload(store.path(trainer.progress.step))
        if stock:
            is_ours = trainer.settings.optimizer is None
            decaying = self.get_decay_parameter_names(unwrap(trainer.model)) if is_ours else None  # type: ignore[arg-type]
            write_optimizer(trainer.backend, decaying, ScheduleFacade(trainer).state_dict(), folder)
            self._save_rng_state(str(folder))
        if self.state.global_step != trainer.progress.step + trainer.progress.skipped_steps:
            self.state = self.current_state()  # transformers' loop has not begun yet
        best = trainer.metrics.get("best_checkpoint")
        if trainer._checkpointer.has_unsaved_best:
            best = store.path(trainer.progress.step).name
        self.state.best_model_checkpoint = best and str(store.root / best)
        with self.expose_run_args() as run_args:
            stateful = [*self.stateful_callbacks(), self.control]
            write_state(self.state, stateful, run_args if stock else None, folder)
        if self.saved_processor is not None:
            self.saved_processor.save_pretrained(str(folder))

    def stateful_callbacks(self) -> list[Any]:
        """Return the callbacks of transformers that have a state."""
        return [callback for callback in self.callback_handler.callbacks if isinstance(callback, ExportableState)]

    def _load_callback_state(self) -> None:
        """Restore the states of transformers' callbacks, in the user's objects."""
        states: Any = self.state.stateful_callbacks
        for name, state in states.items():
            callbacks = [callback for callback in self.stateful_callbacks() if type(callback).__name__ == name]
            states_of_name = state if isinstance(state, list) else [state]
            for callback, state_of_callback in zip(callbacks, states_of_name, strict=False):
                vars(callback).update(state_of_callback.get("attributes", {}))
            is_ours = name in (type(self.control).__name__, transformers.EarlyStoppingCallback.__name__)
            if len(callbacks) < len(states_of_name) and not is_ours:
                logger.warning("The checkpoint has the state of a callback %r, which is not among the callbacks.", name)

    # Our checkpoint has restored these, or `_load_rng_state` does.

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        pass

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        pass

    def _load_scaler(self, checkpoint: str | None) -> None:
        pass

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Restore the generators; called once the first batch of the resumed run is ready."""
        checkpointer = self.trainer._checkpointer
        checkpointer.resume_random_numbers()


@contextlib.contextmanager
def _preserve_modes(model: nn.Module) -> Iterator[None]:
    """Keep the modules' modes in transformers' step, which calls `model.train()`."""
    original = vars(model).get("train")
    vars(model)["train"] = lambda mode=True: model
    try:
        yield
    finally:
        del vars(model)["train"]
        if original is not None:
            vars(model)["train"] = original


class Bridge(transformers.TrainerCallback):
    """Passes transformers' events to our lifecycle, and our requests to its flags. Runs before the user's callbacks."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.trainer: BaseTrainer = engine.trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Set the length of the run from our limits."""
        trainer, engine = self.trainer, self.engine
        state.max_steps = trainer.total_steps or state.max_steps
        epochs = trainer.epochs or (trainer.total_steps or 0) / (trainer.steps_per_epoch or 1) or state.num_train_epochs
        state.num_train_epochs = math.ceil(epochs)
        state.compute_steps(args, state.max_steps)
        handler = engine.callback_handler
        handler.optimizer, handler.lr_scheduler = trainer.optimizer, trainer.lr_scheduler or engine.lr_scheduler
        handler.train_dataloader = loader_for_callbacks(trainer.train_loader, trainer.batch_size)
        state.global_step = trainer.progress.step + trainer.progress.skipped_steps
        engine._globalstep_last_logged = engine._initial_global_step = state.global_step
        return control

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Begin an epoch."""
        trainer, engine = self.trainer, self.engine
        engine.epoch_has_ended = False
        trainer._loop.begin_epoch()
        trainer._step.begin_epoch()
        engine.start_windows()
        return control

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Begin a step."""
        self.trainer.lifecycle.begin_step(self.engine.window.batches)
        self.trainer._step.begin(self.engine.window)
        return control

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Clip the complete gradients and call our callbacks."""
        self.engine.optimizer_facade.should_update = self.trainer._step.finish()
        return control

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Finish the update, or the skipped one."""
        self.trainer._step.end_step(self.engine.optimizer_facade.was_applied)
        return control

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """End a step."""
        trainer, window = self.trainer, self.engine.window
        skipped = not self.engine.optimizer_facade.was_applied
        trainer.lifecycle.end_step(window.samples, window.tokens, skipped, window.micro_batches)
        if self.engine.by_window:  # otherwise transformers counts the same
            state.epoch = trainer.progress.epochs
        return self._export_requests(control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """End an epoch, or the run."""
        engine = self.engine
        loop: Any = self.trainer._loop
        if engine.stop_requested is not None:
            control.should_training_stop, engine.stop_requested = engine.stop_requested, None
        loop.end_epoch(loop.finish_data())
        control.should_epoch_stop, engine.epoch_has_ended = False, True
        loop.finish_run_by_steps()
        return self._export_requests(control)

    def _export_requests(self, control: Any) -> Any:
        """Copy the requests of our callbacks to transformers' flags, which its callbacks can read and change."""
        lifecycle = self.trainer.lifecycle
        asked = lifecycle.control
        control.should_log |= asked.log
        control.should_evaluate |= asked.evaluate and lifecycle.evaluated_step != self.trainer.progress.step
        control.should_save |= asked.save
        control.should_training_stop |= bool(asked.stop or lifecycle.stop)
        asked.log = asked.evaluate = asked.save = False
        return control


class Boundary(transformers.TrainerCallback):
    """Runs after the user's callbacks: a stop requested between two micro-batches takes effect after the step."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.trainer: BaseTrainer = engine.trainer
        self._ends_epoch = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Report the evaluation before the run, once all callbacks have begun."""
        engine, lifecycle = self.engine, self.trainer.lifecycle
        metrics, engine._initial_evaluation = engine._initial_evaluation, None
        if metrics is not None and lifecycle.evaluated_step == lifecycle.progress.step:
            engine.report_evaluation(metrics)  # otherwise it belongs to a run without a step
        return control

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Defer stops between micro-batches to the end of the step."""
        if control.should_training_stop:
            self.trainer.stop()
        self._ends_epoch |= control.should_epoch_stop
        control.should_training_stop = control.should_epoch_stop = False
        return control

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """End the epoch if a callback requested it between micro-batches."""
        control.should_epoch_stop |= self._ends_epoch
        self._ends_epoch = False
        return control


class Reporter(Callback):
    """Reports our events to transformers' callbacks, the search and the Hub; runs after all our callbacks."""

    order = 95

    def __init__(self, engine: Callable[[], Engine]) -> None:
        self._engine = engine

    def on_log(self, trainer: Any, logs: Any) -> None:
        """Report a row of logs, except rows written only because the run ends."""
        engine, lifecycle = self._engine(), self._engine().trainer.lifecycle
        logs_nothing = enum_value(engine.callback_args.logging_strategy) == "no"
        is_final_row = lifecycle.is_closing or (logs_nothing and lifecycle.stop)
        if engine.is_in_train and not is_final_row:
            engine.report_log(logs)

    def on_eval_end(self, trainer: Any, metrics: Mapping[str, float]) -> None:
        """Report an evaluation of the run."""
        engine = self._engine()
        evaluation: Any = engine.trainer._evaluation
        is_reported, evaluation.is_reported_by_user = evaluation.is_reported_by_user, False
        if engine.is_in_train:
            engine.report_evaluation(metrics, is_reported)
        elif not is_reported and not engine.trainer.lifecycle.is_closing:
            engine._initial_evaluation = dict(metrics)
        if engine.search_trial is not None:
            engine.search_trial.report(engine, metrics)

    def on_save_end(self, trainer: Any) -> None:
        """Upload and report a complete checkpoint."""
        engine, path = self._engine(), self._engine().trainer.lifecycle.saved_path
        if engine.args.push_to_hub and path is not None:
            engine.push_checkpoint(path)
        if engine.is_in_train:
            engine.report_save()


# --- facades for transformers' loop


class AcceleratorFacade:
    """accelerate's Accelerator as transformers' loop sees it: the backend has wrapped the model, and steps."""

    def __init__(self, trainer: BaseTrainer, accelerator: Any) -> None:
        self._trainer = trainer
        self._accelerator = accelerator
        self.prepares_loaders = False
        self.optimizer: OptimizerFacade

    def __getattr__(self, name: str) -> Any:
        return getattr(self._accelerator, name)

    def prepare(self, *objects: Any, **kwargs: Any) -> Any:
        """Return the wrapped model for a model, a loader unchanged, and a facade for the optimizer."""
        if objects and all(isinstance(entry, DataLoader) for entry in objects):
            if self.prepares_loaders:
                objects = tuple(self._accelerator.prepare_data_loader(entry) for entry in objects)
            return objects if objects[1:] else objects[0]
        self.optimizer = OptimizerFacade(self._trainer)
        wrapped = self._trainer.backend.wrapped
        prepared = [wrapped if isinstance(entry, nn.Module) else self.optimizer for entry in objects]
        return tuple(prepared) if len(prepared) > 1 else prepared[0]

    def prepare_model(self, model: nn.Module, **kwargs: Any) -> nn.Module:
        """Return the wrapped model."""
        return self._trainer.backend.wrapped

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether the latest step of the optimizer was skipped."""
        return not self.optimizer.was_applied

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Do nothing: `Engine.training_step` knows which micro-batch is the last."""
        return contextlib.nullcontext()

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Run backward as the trainer does."""
        self._trainer._backward(loss)
        emit = self._trainer.lifecycle.emit_in_step
        if emit is not None:
            emit(Event.AFTER_BACKWARD)

    def free_memory(self, *objects: Any) -> Any:
        """Do nothing: the objects are still needed."""
        return objects

    clear = free_memory


class OptimizerFacade(torch.optim.Optimizer):
    """The optimizer for transformers' loop: its step is the trainer's update, if the gradients are finite."""

    def __init__(self, trainer: BaseTrainer) -> None:
        self._trainer = trainer
        self.should_update: bool = True
        self.was_applied: bool = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trainer.optimizer, name)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update the weights."""
        self.was_applied = self.should_update and self._trainer._step.update()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: the step has cleared the gradients."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the real optimizer."""
        return self._trainer.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of the real optimizer."""
        self._trainer.optimizer.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the real optimizer."""
        self._trainer.optimizer.add_param_group(param_group)


class ScheduleFacade:
    """Our schedule as transformers' loop sees it, which reads the rate and saves the state; our step advances it."""

    def __init__(self, trainer: BaseTrainer) -> None:
        self._trainer = trainer

    def step(self, *args: Any) -> None:
        """Do nothing: our step has already advanced the schedule, after the update."""

    def get_last_lr(self) -> list[float]:
        """Return the rates in force."""
        return [float(group["lr"]) for group in self._trainer.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the real schedule."""
        if self._trainer.lr_scheduler is not None:
            return self._trainer.lr_scheduler.state_dict()
        rates, step = self.get_last_lr(), self._trainer.progress.step  # as in transformers' constant schedule
        steps = {"last_epoch": step, "_step_count": step + 1}
        return {"base_lrs": rates, "_last_lr": rates, "lr_lambdas": [None] * len(rates), **steps}
