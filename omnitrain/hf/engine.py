"""transformers' Trainer as the engine of `HFTrainer`.

`Engine` overrides the methods by which that loop gets data, steps and saves. `Bridge` passes its events to our
lifecycle, and `Reporter` passes our events to transformers' callbacks. The facades replace the accelerator, optimizer
and schedule that the loop expects.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import math
import os
from collections.abc import Iterator, Mapping, Sequence
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
from omnitrain.compute.random_state import restore_rng, snapshot_rng
from omnitrain.core.errors import ConfigError, Tolerance
from omnitrain.core.events import Callback, Control, Event
from omnitrain.data.sampling import Window
from omnitrain.hf.arguments import accumulation_options, enum_value
from omnitrain.hf.callbacks import TransformersCallbacks, is_delayed
from omnitrain.hf.data import loader_for_callbacks
from omnitrain.hf.files import write_optimizer, write_state
from omnitrain.hf.search import SearchTrainer, Trial, run_trial
from omnitrain.trainer.base import BaseTrainer
from omnitrain.trainer.loop import Loop

logger: logging.Logger = logging.getLogger("omnitrain")


class EngineLoop(Loop):
    """Our loop when transformers' loop runs the epochs; it acts on requests as usual."""

    trainer: Any
    evaluation: Any

    def train(self) -> None:
        if not self.lifecycle.stop:
            self.trainer.engine.run()
        elif self.checkpointer.is_resuming:  # a run that has ended
            engine = self.trainer.engine
            engine.state = engine.current_state()
            engine._load_callback_state()

    @property
    def has_rank_local_requests(self) -> bool:
        return True  # transformers' callbacks may have some

    @property
    def has_requests(self) -> bool:
        return self.trainer.engine.is_in_train or super().has_requests

    def agree(self, where: str, *requests: str, ahead: Sequence[float] = ()) -> Control:
        engine = self.trainer.engine
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
        engine, lifecycle = self.trainer.engine, self.lifecycle
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
        if "evaluate" in self.trainer._overridden:  # the user's `evaluate` may need no loss
            self.evaluation.run_first_batches(self.sets.eval)
        else:
            super().sanity_check()

    def finish_run(self) -> None:
        engine = self.trainer.engine
        engine.count_operations()
        engine.final_state = copy.deepcopy(engine.state)
        super().finish_run()

    def _save(self, is_asked: bool) -> None:
        """Save as usual; a callback's request with `save_strategy="no"` saves to `output_dir`."""
        trainer, engine = self.trainer, self.trainer.engine
        if is_asked or self.checkpointer.requires_best_save:
            engine.count_operations()
        if not is_asked or self.checkpointer.store is not None:
            super()._save(is_asked)
            return
        trainer.store = self.checkpointer.store = Store(engine.args.output_dir)
        try:
            super()._save(is_asked)
        finally:
            trainer.store = self.checkpointer.store = None

    def finish_run_by_steps(self) -> None:
        """Finish a run at its limit, if its evaluations and checkpoints come at intervals of steps.

        transformers' callbacks expect these before the end of the epoch.
        """
        args = self.trainer.engine.callback_args
        if "epoch" not in (enum_value(args.eval_strategy), enum_value(args.save_strategy)):
            self.agree("the end of an epoch")
            if self.is_at_limit:
                self.finish_run()

    def evaluate(self, counts: bool = True) -> None:
        """Evaluate as part of the run, unless it is the last evaluation and too early by `eval_delay`."""
        lifecycle = self.lifecycle
        if not (lifecycle.is_closing and is_delayed(self.trainer.training_args, lifecycle.progress)):
            super().evaluate(counts)


class Engine(SearchTrainer):
    """transformers' Trainer, used only for its loop.

    A subclass for `HFTrainer.engine_class` may override `training_step`, `log` and other methods that the loop calls.

    Args:
        trainer: The trainer of the run.
        callback_args: The arguments that callbacks see, theirs and ours.
        kwargs: The arguments of `transformers.Trainer`, of which `args` is for its loop.
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
    """Transformers' state at the end of the latest run, before its last rows, for a continued run in this process."""
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
    # The state of the generators with which a resumed run continues.
    _random_state: dict[str, Any] | None = None
    # The step of the last checkpoint for which callbacks were called.
    _reported_save: int = -1
    # The arguments of `_maybe_log_save_evaluate` at this step.
    _log_arguments: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})

    def __init__(self, trainer: Any, callback_args: transformers.TrainingArguments, **kwargs: Any) -> None:
        self.trainer = trainer
        self.callback_args: transformers.TrainingArguments = callback_args
        self.training_args: transformers.TrainingArguments | None = trainer.training_args
        self.scratch: Path = Path(trainer._scratch.name)
        self.search_trial: Trial | None = trainer._trial
        self.syncs_each_batch: bool = bool(accumulation_options(self.training_args).get("sync_each_batch"))
        self.real_accelerator = trainer._sharding  # None lets transformers create one
        self._tolerance = Tolerance("output_dir", "The next write there tries again.")
        output_dir: Any = kwargs["args"].output_dir
        with self._tolerance:
            os.makedirs(output_dir, exist_ok=True)
        if self._tolerance.has_failed:  # transformers creates the folder, and would raise the disk's error
            kwargs["args"].output_dir = str(self.scratch)
        super().__init__(**kwargs)
        self.args.output_dir = output_dir

    def _get_callbacks(self) -> TransformersCallbacks:
        return self._callbacks

    def _set_callbacks(self, handler: CallbackHandler) -> None:
        self._callbacks = TransformersCallbacks(handler, self.callback_args, Bridge(self))

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
        # not read again from the checkpoint, which the run may have replaced, at the end of its epoch
        self._random_state = snapshot_rng(trainer.device) if trainer._checkpointer.is_resuming else None
        trial = self.search_trial and self.search_trial.trial
        self.output = self.train(resume_from_checkpoint=self._write_start_state(), trial=trial)

    def _write_start_state(self) -> str | None:
        """Return a folder with the state that transformers needs to start at the current position; None at 0."""
        progress = self.trainer.progress
        if not (progress.epoch or progress.samples_in_epoch):
            return None
        state = self.current_state()
        for name in ("logging_steps", "eval_steps", "save_steps"):  # our callbacks have the intervals
            setattr(state, name, getattr(self.args, name) or getattr(state, name))  # without evaluations None
        folder = self.scratch / "start"
        folder.mkdir(exist_ok=True)
        state.save_to_json(str(folder / "trainer_state.json"))
        return str(folder)

    def get_total_train_batch_size(self, args: transformers.TrainingArguments) -> int:
        """Return the samples of an optimizer step over all ranks."""
        return samples_of_step(self.trainer.settings, self.trainer._sets.share.size)

    def current_state(self) -> transformers.TrainerState:
        """Return transformers' state of the run so far: its history, and the states of its callbacks."""
        trainer, state = self.trainer, transformers.TrainerState()
        checkpointer = trainer._checkpointer
        if checkpointer.continued_state is not None and self.final_state is not None:
            state = copy.deepcopy(self.final_state)
        elif checkpointer.resumed is not None and (path := checkpointer.resumed.folder / "trainer_state.json").exists():
            state = transformers.TrainerState.load_from_json(str(path))
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

    def _move_model_to_device(self, model: nn.Module, device: Any) -> None:
        pass  # the backend does it

    # --- data

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Return an endless loader, which is never read: `get_batch_samples` ends an epoch."""
        generator = torch.Generator().manual_seed(0)  # otherwise it draws from the generator of training
        return DataLoader(range(1 << 40), batch_size=1, generator=generator)  # type: ignore[arg-type]

    def stock_train_dataloader(self) -> DataLoader[Any]:
        """Return the loader that transformers builds for the training set."""
        return super().get_train_dataloader()

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: Any) -> tuple[list[Any], None]:
        """Return the micro-batches of the next window, as the single item of a step of transformers' loop."""
        window = next(self.windows, None)
        if window is None:
            # transformers' loop relies on a length, and would end the run after an epoch without a step
            self.control.should_epoch_stop, self.stop_requested = True, self.control.should_training_stop
            return [], None
        self.window = window
        return [window.batches], None

    def start_windows(self) -> None:
        """Start the windows of the epoch at the current position."""
        trainer, progress, feed = self.trainer, self.trainer.progress, self.trainer._feed
        windows = feed.windows(trainer.train_loader, progress.epoch, progress)
        self.windows = iter(feed.until_signal(windows))

    def _prepare_inputs(self, inputs: Any) -> Any:
        return inputs  # the step does it

    # --- a step

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Run forward and backward on the micro-batches of a window, and return their losses together."""
        if not self.window.weight:
            return torch.zeros((), device=self.args.device)
        return self.trainer._step.run(functools.partial(self._run_micro_batches, model))

    def _run_micro_batches(self, model: nn.Module) -> torch.Tensor:
        trainer, emit = self.trainer, self.trainer.lifecycle.emit_in_step
        total, step = None, trainer._step
        for batch in step.window.batches:
            with trainer._accumulating(last=step.completes or self.syncs_each_batch):
                loss = trainer.call_training_step(model, batch)
            total = loss if total is None else total + loss
            if emit is not None:
                emit(Event.BATCH_END)
            if step.turn < len(step.window.batches) and trainer.settings.microbatch_size is None:
                self.control = self.callback_handler.on_substep_end(self.args, self.state, self.control)
        assert total is not None  # as the window has a weight
        return total

    def run_micro_batch(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Run forward and backward on a micro-batch as transformers does, and return its part of the step's loss."""
        with _preserve_modes(model):
            return super().training_step(model, inputs, num_items_in_batch)

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return a micro-batch's part of the window's loss; outside training, the plain loss."""
        trainer = self.trainer
        if not (model.training and self.is_in_train):
            output = trainer.backend.forward(trainer._forward, trainer._prepare_batch(inputs))
            return (output.loss, {"loss": output.loss, "logits": output.outputs}) if return_outputs else output.loss
        loss = trainer._step.loss_of(inputs)
        return (loss, {}) if return_outputs else loss

    def floating_point_ops(self, inputs: Any) -> int:
        """Return the floating-point operations of a micro-batch, or of the list of those of a window."""
        batches = inputs if isinstance(inputs, list) else [inputs]
        operations = 0
        for batch in batches:
            operations += super().floating_point_ops(dict(batch)) if isinstance(batch, Mapping) else 0
        return operations

    def _track_num_input_tokens(self, inputs: Any) -> None:
        for batch in inputs:
            super()._track_num_input_tokens(batch)

    def count_operations(self) -> None:
        """Add the operations since the latest log to transformers' state."""
        if self.is_in_train:
            self.store_flos()

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> None:
        """Leave norm and clipping to our step, which does them once, as in every trainer."""

    def _get_learning_rate(self) -> float:
        return self.trainer._loop.learning_rates()[0]  # asked for at each step: the norm would wait for the GPU

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
        if self.epoch_has_ended and loop.is_rewinding:
            self._rewind()
            return
        if self.ends_in_epoch and loop.checkpointer.store is not None:
            self.control.should_save = False  # `close` saves, after the last evaluation
        loop.handle_requests()
        if loop.is_rewinding:
            self.control.should_epoch_stop, self.stop_requested = True, False
        elif self.epoch_has_ended and self.trainer.lifecycle.stop:
            loop.close()  # before transformers' own end-of-training code

    @property
    def ends_in_epoch(self) -> bool:
        """Whether the run ends within an epoch."""
        lifecycle = self.trainer.lifecycle
        return self.epoch_has_ended and bool(lifecycle.stop) and not lifecycle.is_epoch_complete

    def _rewind(self) -> None:
        """Restore the run from before a spike, with transformers' counts and history."""
        trainer, state = self.trainer, self.state
        trainer._loop.rewind()
        state.global_step = self._globalstep_last_logged = trainer.progress.step + trainer.progress.skipped_steps
        state.epoch = trainer.progress.epochs
        state.log_history = [row for row in state.log_history if row["step"] <= state.global_step]
        self.control.should_training_stop = bool(trainer.lifecycle.stop)

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

        With `is_reported`, the user's own `evaluate` has written the row of logs and called the callbacks.
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
        """Write transformers' history and model files into a checkpoint.

        With `stock`, also the files from which its stock Trainer resumes: they are pickled, and we read none of them.
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
                if self.args.restore_callback_states_from_checkpoint:
                    vars(callback).update(vars(type(callback)(**state_of_callback.get("args", {}))))
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
        if self._random_state is not None:  # once the first batch of the resumed run is ready
            restore_rng(self._random_state, self.trainer.device)


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

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
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

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        trainer, engine = self.trainer, self.engine
        metrics, engine._initial_evaluation = engine._initial_evaluation, None
        if metrics is not None and trainer.lifecycle.evaluated_step == trainer.lifecycle.progress.step:
            engine.report_evaluation(metrics)  # otherwise it belongs to a run without a step
        engine.epoch_has_ended = False
        trainer._loop.begin_epoch()
        trainer._step.begin_epoch()
        engine.start_windows()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.lifecycle.begin_step(self.engine.window.batches)
        self.trainer._step.begin(self.engine.window)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.engine.accelerator.optimizer.should_update = self.trainer._step.finish()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer._step.end_step(self.engine.accelerator.optimizer.was_applied)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        trainer, window = self.trainer, self.engine.window
        skipped = not self.engine.accelerator.optimizer.was_applied
        trainer.lifecycle.end_step(window.samples, window.tokens, skipped, window.micro_batches)
        state.epoch = round(trainer.progress.epochs, 9)  # which is below a whole number until the epoch ends
        self._export_requests(control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        engine = self.engine
        loop: Any = self.trainer._loop
        if engine.stop_requested is not None:
            control.should_training_stop, engine.stop_requested = engine.stop_requested, None
        loop.end_epoch(loop.finish_data())
        control.should_epoch_stop, engine.epoch_has_ended = False, True
        if loop.is_rewinding:
            return
        loop.finish_run_by_steps()
        self._export_requests(control)
        if engine.ends_in_epoch:
            control.should_save |= enum_value(engine.callback_args.save_strategy) == "epoch"

    def _export_requests(self, control: Any) -> None:
        """Copy the requests of our callbacks to transformers' flags, which its callbacks can read and change."""
        lifecycle = self.trainer.lifecycle
        asked = lifecycle.control
        control.should_log |= asked.log
        control.should_evaluate |= asked.evaluate and lifecycle.evaluated_step != self.trainer.progress.step
        control.should_save |= asked.save
        control.should_training_stop |= bool(asked.stop or lifecycle.stop)
        asked.log = asked.evaluate = asked.save = False


class Reporter(Callback):
    """Reports our events to transformers' callbacks, the search and the Hub; runs after all our callbacks."""

    order = 95

    def on_log(self, trainer: Any, logs: Any) -> None:
        engine, lifecycle = trainer.engine, trainer.lifecycle
        logs_nothing = enum_value(engine.callback_args.logging_strategy) == "no"  # but for the end of the run
        is_final_row = lifecycle.is_closing or (logs_nothing and lifecycle.stop)
        if engine.is_in_train and not is_final_row:
            engine.report_log(logs)

    def on_eval_end(self, trainer: Any, metrics: Mapping[str, float]) -> None:
        engine, evaluation = trainer.engine, trainer._evaluation
        is_reported, evaluation.is_reported_by_user = evaluation.is_reported_by_user, False
        if engine.is_in_train:
            engine.report_evaluation(metrics, is_reported)
        elif not is_reported and not trainer.lifecycle.is_closing:
            engine._initial_evaluation = dict(metrics)
        if engine.search_trial is not None:
            engine.search_trial.report(engine, metrics)

    def on_save_end(self, trainer: Any) -> None:
        engine, path = trainer.engine, trainer.lifecycle.saved_path
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
        self.optimizer: OptimizerFacade

    def __getattr__(self, name: str) -> Any:
        return getattr(self._accelerator, name)

    def prepare(self, *objects: Any, **kwargs: Any) -> Any:
        """Return the wrapped model for a model, accelerate's loader for a loader, and a facade for the optimizer."""
        prepared: list[Any] = []
        for entry in objects:
            if isinstance(entry, DataLoader):
                prepared.append(self._accelerator.prepare_data_loader(entry))
            elif isinstance(entry, nn.Module):
                prepared.append(self._trainer.backend.wrapped)
            else:
                self.optimizer = OptimizerFacade(self._trainer)
                prepared.append(self.optimizer)
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


class OptimizerFacade:
    """The optimizer for transformers' loop: its step is the trainer's update, if the gradients are finite."""

    def __init__(self, trainer: BaseTrainer) -> None:
        self._trainer = trainer
        self.should_update: bool = True
        self.was_applied: bool = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trainer.backend.optimizer, name)

    def step(self, closure: Any = None) -> None:
        """Update the weights."""
        self.was_applied = self.should_update and self._trainer._step.update()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: the step has cleared the gradients."""


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
