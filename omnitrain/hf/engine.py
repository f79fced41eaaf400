"""transformers' own Trainer as the engine of `HFTrainer`: its loop, with our data, losses, evaluation and checkpoints.

`Engine` overrides where their loop asks for something, `Bridge` tells our lifecycle what their loop does and puts our
requests onto their flags. What the user says is in `huggingface.py`.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import nn
from torch.utils.data import DataLoader
from transformers.trainer_callback import ExportableState

from omnitrain.errors import ConfigError, DataError
from omnitrain.data.sampling import Window
from omnitrain.hf.data import Windows, train_loader_of
from omnitrain.hf.files import write_model_files, write_optimizer, write_state
from omnitrain.hf.batch_size import sparing
from omnitrain.hf.search import Searching, run_trial

if TYPE_CHECKING:
    from omnitrain.hf.trainer import HFTrainer

__all__ = ["Boundary", "Bridge", "Engine", "Schedule"]


class Engine(Searching):
    """transformers' Trainer, asked for its loop alone.

    A subclass for `HFTrainer.engine_class` may override `training_step`, `log` and whatever else their loop calls.
    """

    is_asked_for = False
    """Whether it is our trainer that has their loop run."""
    has_ended = False
    """Whether the present epoch is over."""
    has_untold_evaluation = False
    """Whether there was an evaluation before the first step, when their callbacks had not heard of the run."""
    stops: bool | None = None
    """Whether transformers' callbacks had asked for the end of the run when the data of an epoch ended."""
    rate: float | None = None
    """The learning rate of the latest update, which transformers logs; the schedule has moved on by then."""
    _window: Window
    _turn: int
    _last: Any = None
    _rest: Iterator[list[Any]] | None = None
    """The rest of an epoch's data, where memory has run out in the middle of it."""

    def __init__(self, owner: HFTrainer, *args: Any, **kwargs: Any) -> None:
        self.owner = owner
        super().__init__(*args, **kwargs)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Run their loop, for `HFTrainer.train`, or a trial of a search.

        Raises:
            ConfigError: If somebody else asks for it.
        """
        if not self.is_asked_for and self.hp_search_backend is not None:
            return run_trial(self, *args, **kwargs)
        if not self.is_asked_for:
            raise ConfigError(
                "`engine.train()` would train without checkpoints, history and limits. Call HFTrainer.train()."
            )
        self.is_asked_for = False
        return super().train(*args, **kwargs)

    def create_accelerator_and_postprocess(self) -> None:
        """Make accelerate's `Accelerator`, unless the trainer has one to cut up the weights with."""
        if not self.owner._sharded_by:
            super().create_accelerator_and_postprocess()
            return
        self.accelerator = Wrapped(self.owner)  # type: ignore[assignment]
        self.gather_function = self.accelerator.gather_for_metrics
        self.is_deepspeed_enabled = self.is_fsdp_enabled = self.is_tp_enabled = False  # so it is no business of theirs

    def _move_model_to_device(self, model: nn.Module, device: Any) -> None:
        if not self.owner._sharded_by:
            super()._move_model_to_device(model, device)

    # --- data

    def get_train_dataloader(self) -> DataLoader[Any]:
        return train_loader_of(self.owner)

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: Any) -> tuple[list[Any], None]:
        """Take the micro-batches of a window, and weigh them while they are on the host."""
        owner, by_window = self.owner, self.owner._by_window
        source = self._rest or epoch_iterator
        taken = next(source, []) if by_window else list(itertools.islice(source, num_batches))
        group = list(owner._weighed(iter(taken)))
        self._last = group[-1] if group else self._last
        window, self._turn = owner._window_of(group, self._last), 0
        if window is None:
            # their loop goes by a length, which data need not have, and ends the run over an epoch without a step
            self.control.should_epoch_stop, self.stops = True, self.control.should_training_stop
            return [], None
        self._window = window
        return [window.batches] if by_window else window.batches, None

    def begin_anew(self) -> list[Any]:
        """Return the micro-batches of the present step, cut anew; so are those of the rest of the epoch."""
        self._rest = iter(Windows(self.owner))
        (batches,), _ = self.get_batch_samples(self._rest, 1, self.args.device)
        return batches

    def _prepare_inputs(self, inputs: Any) -> Any:
        return inputs  # `_loss_of` does it

    # --- a step

    @sparing
    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Run a micro-batch forward and backward; where data have no length, all those of a window in turn."""
        owner, last = self.owner, len(self._window.batches) - 1
        if not owner._by_window and not owner._sharded_by:
            return super().training_step(model, inputs, num_items_in_batch)
        if not owner._by_window:
            with owner._accumulating(last=self._turn == last):
                return super().training_step(model, inputs, num_items_in_batch)
        total = torch.zeros((), device=self.args.device)
        for turn, batch in enumerate(inputs):
            with owner._accumulating(last=turn == last):
                total += super().training_step(model, batch, num_items_in_batch)
        return total

    def floating_point_ops(self, inputs: Any) -> int:
        """Return how many there are in a micro-batch, or in those of a window."""
        batches = inputs if self.owner._by_window else [inputs]
        return sum(super(Engine, self).floating_point_ops(dict(one)) for one in batches if isinstance(one, Mapping))

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Any,
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """Return a micro-batch's part of the window's loss; outside of training, the plain loss."""
        owner = self.owner
        if not (model.training and self.is_in_train):
            output = owner._forward(model, owner._prepare_batch(inputs))
            return (output.loss, {"loss": output.loss, "logits": output.outputs}) if return_outputs else output.loss
        window, turn = self._window, self._turn
        self._turn += 1
        loss = owner._loss_of(
            model, inputs, window.weights[turn], owner._divisor(window), last=self._turn == len(window.batches)
        )
        return (loss, {}) if return_outputs else loss

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> None:
        """Leave norm and clipping to the Bridge, which does them once, as every trainer does."""

    # --- logs, evaluation, checkpoints

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "train_runtime" in logs:  # the end of the run, whose length theirs does not know
            seconds = logs["train_runtime"] or 1.0
            logs["train_samples_per_second"] = round(self.owner.progress.samples / seconds, 3)
        elif "loss" in logs and self.is_in_train:
            logs.update(self.owner._read_grad_norm())
        super().log(logs, start_time)

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        self.settle("the end of a step", "log", "evaluate", "save")
        super()._maybe_log_save_evaluate(*args, **kwargs)
        if self.has_ended and self.owner.lifecycle.stop:
            self.owner._close()  # while transformers' callbacks can still hear of it

    def _get_learning_rate(self) -> float:
        return self.rate if self.rate is not None else super()._get_learning_rate()

    def settle(self, where: str, *requests: str) -> None:
        """Put what our callbacks and theirs ask for together, agree on it with all processes, and raise the flags."""
        owner, control = self.owner, self.control
        for name in requests:
            setattr(owner.control, name, getattr(owner.control, name) or getattr(control, f"should_{name}"))
        if control.should_training_stop:
            owner.stop()
        if control.should_evaluate and owner.eval_loader is None:
            owner.request_evaluate()  # which says why there is none
        asked = owner._agree(where, *requests)
        if asked.log and owner._logged[0] < owner.progress.step:
            owner._log()
        for name in requests:
            setattr(control, f"should_{name}", getattr(asked, name))
        control.should_training_stop = bool(owner.lifecycle.stop)

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Evaluate as every trainer does, and tell transformers' callbacks of it."""
        owner = self.owner
        if not (self.is_in_train and eval_dataset is None and metric_key_prefix == "eval"):
            return owner.evaluate(eval_dataset, metric_key_prefix)
        metrics = owner._evaluate_for_engine()
        self.settle("the end of an evaluation", "save")
        return metrics

    def tell_evaluation(self, metrics: Mapping[str, float]) -> None:
        """Let transformers' history and callbacks know of an evaluation."""
        self.log(dict(metrics))
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, dict(metrics))

    def _determine_best_metric(self, *args: Any, **kwargs: Any) -> bool:
        """Tell their state what our objective knows: direction and gain are judged once."""
        objective = self.owner.objective
        self.state.best_metric, self.state.best_global_step = objective.best, objective.best_step
        return self.owner.lifecycle.improved

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        owner = self.owner
        if owner.store is None and not owner._sharded_by:
            super()._save_checkpoint(model, trial)  # asked for by a callback of transformers' kind
        elif owner.store is None:
            owner.request_save()  # which says why that cannot be
        elif owner.lifecycle.saved_at != owner.progress.position:
            owner._save()
            self.settle("the end of a save")

    def write_own_files(self, folder: Path) -> None:
        """Write what a stock `transformers.Trainer` resumes from beside our files; none of it is read by us."""
        if not self.owner._given["save_only_model"]:
            write_optimizer(self, Schedule(self.owner), folder)
            self._save_rng_state(str(folder))
        write_state(self, folder)
        write_model_files(self, folder)

    def _stateful_callbacks(self) -> list[Any]:
        return [one for one in self.callback_handler.callbacks if isinstance(one, ExportableState)]

    def _load_callback_state(self) -> None:
        """Give transformers' callbacks back what they keep, by default and to the very objects that the user has."""
        states: Any = self.state.stateful_callbacks
        for name, kept in states.items():
            own = [one for one in self._stateful_callbacks() if type(one).__name__ == name]
            for callback, held in zip(own, kept if isinstance(kept, list) else [kept], strict=False):
                vars(callback).update(held.get("attributes", {}))

    # Whatever is to be restored has been restored from our files, or is in `_load_rng_state`.

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        pass

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        pass

    def _load_scaler(self, checkpoint: str | None) -> None:
        pass

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Put the generators back; called when the first batch of the resumed run is there."""
        self.owner._restore_generators()


class Bridge(transformers.TrainerCallback):
    """Their events onto our lifecycle, our requests onto their flags."""

    def __init__(self, owner: HFTrainer) -> None:
        self.owner = owner
        self._applied = True

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Say how long the run is, which only our limits know."""
        owner = self.owner
        wrapped = owner.engine.model_wrapped  # as a unit of the user's own is to see it
        owner.model = owner.model if wrapped is None else wrapped
        state.max_steps = owner.total_steps or state.max_steps
        state.num_train_epochs = math.ceil(owner.epochs or state.num_train_epochs)
        state.global_step = owner.progress.step + owner.progress.skipped_steps
        owner.engine._globalstep_last_logged = owner.engine._initial_global_step = state.global_step
        return control

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """An epoch begins."""
        self.owner.engine.has_ended, self.owner.engine._rest = False, None
        self.owner.lifecycle.begin_epoch()
        self.owner.model.train()
        self.owner._collect_parameters()
        return control

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """A window begins."""
        owner = self.owner
        owner.lifecycle.begin_step()
        if owner._must_undo:
            owner._loss.begin_step()
        owner._targets = None
        return control

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """The gradients are there: clip and check them."""
        self.owner.engine.rate = self.owner._learning_rate
        self._applied = self.owner._finish_gradients(self.owner.engine._window)
        return control

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """The optimizer has stepped, unless it was kept from it."""
        owner = self.owner
        self._applied = self._applied and not owner.engine.accelerator.optimizer_step_was_skipped
        owner._check_loss_scale(self._applied)
        owner._conclude_step(self._applied)
        return control

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """A window is done."""
        owner, window = self.owner, self.owner.engine._window
        owner.lifecycle.end_step(window.samples, window.tokens, skipped=not self._applied)
        if owner._by_window:  # else theirs is as good
            state.epoch = owner.progress.epochs
        return self._ask(control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """An epoch is over, or the run."""
        owner, engine = self.owner, self.owner.engine
        if engine.stops is not None:
            control.should_training_stop, engine.stops = engine.stops, None
        if owner.world_size == 1 and owner.control.stop == "signal":
            owner._agree("the end of the data")  # which may have come with the signal
        stops = bool(owner.lifecycle.stop)
        owner._epoch_is_complete = not stops or (owner.progress.is_epoch_consumed and not owner._owes_evaluation)
        if not owner.progress.samples_in_epoch and not stops:
            raise DataError(f"Epoch {owner.progress.epoch + 1} has no samples: the training data yielded none.")
        owner._end_epoch(owner._loss.mean())
        control.should_epoch_stop, engine.has_ended = False, True
        return self._ask(control)

    def _ask(self, control: Any) -> Any:
        """Show what our callbacks ask for on their flags, where their callbacks may see it; `settle` comes later."""
        asked, lifecycle = self.owner.control, self.owner.lifecycle
        control.should_log |= asked.log
        control.should_evaluate |= asked.evaluate and lifecycle.evaluated_step != self.owner.progress.step
        control.should_save |= asked.save
        control.should_training_stop |= bool(asked.stop or lifecycle.stop)
        asked.log = asked.evaluate = asked.save = False
        return control


class Wrapped:
    """accelerate's Accelerator as transformers' loop may see it where our trainer has wrapped the model already."""

    def __init__(self, trainer: HFTrainer) -> None:
        self._trainer = trainer
        self._optimizer: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trainer.accelerator, name)

    def prepare(self, *objects: Any, **kwargs: Any) -> Any:
        """Return the model as it is, and the optimizer in accelerate's wrapper, whose step the loop takes."""
        zero = self._trainer._zero
        self._optimizer = self._trainer.accelerator.prepare_optimizer(objects[-1]) if zero is None else zero.prepared
        return (*objects[:-1], self._optimizer) if len(objects) > 1 else self._optimizer

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether the latest step of the optimizer was left out."""
        return self._optimizer.step_was_skipped

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Do nothing: `Engine.training_step` says to the model which micro-batch is the last."""
        return contextlib.nullcontext()

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Run backward as the model's wrapper wants it."""
        self._trainer._backward(loss)

    def free_memory(self, *objects: Any) -> Any:
        """Keep what there is: it is still needed."""
        return objects

    clear = free_memory


class Schedule:
    """Our schedule as transformers' loop may see it: it reads the rate and saves the state; we step."""

    def __init__(self, trainer: HFTrainer) -> None:
        self._trainer = trainer

    def step(self, *args: Any) -> None:
        """Do nothing: the trainer has stepped its schedule already, if the update was made."""

    def get_last_lr(self) -> list[float]:
        """Return the rates in force."""
        return [float(group["lr"]) for group in self._trainer.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the real schedule."""
        trainer = self._trainer
        if trainer.lr_scheduler is not None:
            return trainer.lr_scheduler.state_dict()
        rates, step = self.get_last_lr(), trainer.progress.step  # what transformers' constant schedule would keep
        steps = {"last_epoch": step, "_step_count": step + 1}
        return {"base_lrs": rates, "_last_lr": rates, "lr_lambdas": [None] * len(rates), **steps}


class Boundary(transformers.TrainerCallback):
    """Comes after the user's callbacks: what they end between two micro-batches ends with the step."""

    def __init__(self, owner: HFTrainer) -> None:
        self.owner = owner
        self._ends_epoch = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """All callbacks know that the run has begun."""
        owner, engine = self.owner, self.owner.engine
        is_untold, engine.has_untold_evaluation = engine.has_untold_evaluation, False
        if is_untold and owner.lifecycle.evaluated_step == owner.progress.step:  # else of a run that came to no step
            engine.tell_evaluation(owner._latest_metrics())
        return control

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """A micro-batch is done, and the step is not."""
        if control.should_training_stop:
            self.owner.stop()
        self._ends_epoch |= control.should_epoch_stop
        control.should_training_stop = control.should_epoch_stop = False
        return control

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """The step is done."""
        control.should_epoch_stop |= self._ends_epoch
        self._ends_epoch = False
        return control
