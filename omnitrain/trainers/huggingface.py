"""HFTrainer: transformers' own loop and arguments, under the same contract as the other trainers."""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from omnitrain.checkpoint.state import unwrap
from omnitrain.distributed import Ranks
from omnitrain.errors import ConfigError
from omnitrain.events import Callback
from omnitrain.precision import choose_device
from omnitrain.sampling import Window
from omnitrain.trainers.accelerators import find_ranks, refuse_lost_processes
from omnitrain.trainers.base import BaseTrainer
from omnitrain.trainers.engine import Bridge, Engine
from omnitrain.trainers.hf_arguments import HFTrainingArguments, adopt_arguments, engine_arguments, word_of
from omnitrain.units import StepOutput, without_effect

__all__ = ["HFTrainer", "HFTrainingArguments"]

NEVER_CALLED = {
    "_fit": "HFTrainer's own; transformers' loop is Engine.train",
    "_train_epoch": "engine_class, as a subclass of Engine that overrides `_run_epoch`",
    "_train_step": "engine_class, as a subclass of Engine that overrides `training_step`",
    "_optimizer_step": "a callback's on_before_optimizer_step",
    "_apply_update": "the optimizer's own step()",
    "_backward": "engine_class, as a subclass of Engine that overrides `training_step`",
    "_accumulating": "engine_class, as a subclass of Engine that overrides `training_step`",
    "_answer_requests": "a callback",
}
"""Hooks that transformers' loop does not call, and where to put what they were to do."""


class HFTrainer(BaseTrainer):
    """Trains with `transformers.Trainer`, and gives what the other trainers give: numbers, checkpoints, guarantees.

    Takes the arguments of `BaseTrainer` except `device`, and those below. `trainer.engine` is the real
    `transformers.Trainer`, for everything that is not ours (`engine.push_to_hub()`, `engine.add_callback(...)`, ...).

    Args:
        model: As in `BaseTrainer`.
        training_args: transformers' TrainingArguments, or `HFTrainingArguments`, which takes older names too. They
            fill our arguments; where both speak and differ, that is an error.
        args: As in `BaseTrainer`.
        processing_class: Tokenizer or processor: pads batches unless `data_collator` is given, and is saved.
        preprocess_logits_for_metrics: Called as f(logits, labels) in evaluations; its result goes to the metrics.
        compute_loss_func: transformers' name of `loss_fn`, called as f(outputs, labels, num_items_in_batch=None).
        optimizers: transformers' pair of optimizer and schedule.
        kwargs: As in `BaseTrainer`. `callbacks` may hold transformers' callbacks too.

    Raises:
        ConfigError: If the training arguments and ours contradict each other.
        TypeError: At the definition of a subclass that overrides what transformers' loop never calls.
    """

    engine_class: type[Engine] = Engine
    engine: Engine

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name, instead in NEVER_CALLED.items():
            if name in vars(cls):
                raise TypeError(
                    f"{cls.__name__} overrides {name}, which transformers' loop never calls. Use {instead} instead."
                )

    def __init__(
        self,
        model: nn.Module,
        training_args: transformers.TrainingArguments | None = None,
        *args: Any,
        processing_class: Any = None,
        preprocess_logits_for_metrics: Any = None,
        compute_loss_func: Any = None,
        optimizers: tuple[Any, Any] = (None, None),
        callbacks: Iterable[Any] = (),
        **kwargs: Any,
    ) -> None:
        if training_args is not None and not isinstance(training_args, transformers.TrainingArguments):
            args, training_args = (training_args, *args), None  # HFTrainer(model, train_dataset): as the other trainers
        if kwargs.get("device") is not None:
            raise ConfigError(
                f"`device={str(kwargs['device'])!r}` is an argument of Trainer. Pass "
                "training_args=TrainingArguments(..., use_cpu=True) to keep a run off the GPUs."
            )
        if kwargs.get("async_save"):
            raise ConfigError("`async_save=True` is not supported by HFTrainer, whose own files are written at once.")
        self.training_args = training_args
        self.processing_class = processing_class
        self._preprocess = preprocess_logits_for_metrics
        self._adopt(kwargs, compute_loss_func, optimizers)
        self._evaluates = training_args is None or word_of(training_args.eval_strategy) != "no"
        own = [callback for callback in callbacks if isinstance(callback, Callback)]
        self._foreign = [callback for callback in callbacks if not isinstance(callback, Callback)]
        self._scratch = tempfile.TemporaryDirectory(prefix="omnitrain-")
        save_dir = kwargs.get("save_dir")
        ours: dict[str, Any] = {}
        if training_args is None:  # on processors alone transformers forms a group of processes only if told of them
            ours = {"seed": kwargs.get("seed", 42), "use_cpu": choose_device(None).type == "cpu"}
            ours["ddp_find_unused_parameters"] = False
        self._engine_args = engine_arguments(training_args, str(save_dir or self._scratch.name), **ours)
        self.ranks = find_ranks(_Processes(self._engine_args)) if self._engine_args.world_size > 1 else Ranks()
        refuse_lost_processes(self.world_size)
        super().__init__(model, *args, callbacks=[*own, *self._policies()], **kwargs)

    def _adopt(self, kwargs: dict[str, Any], compute_loss_func: Any, optimizers: tuple[Any, Any]) -> None:
        """Take over what transformers' arguments say into ours."""
        if compute_loss_func is not None:
            kwargs["loss_fn"] = lambda outputs, labels: compute_loss_func(outputs, labels, num_items_in_batch=None)
        for name, value in zip(("optimizer", "lr_scheduler"), optimizers, strict=True):
            if value is not None:
                kwargs[name] = value
        if self.training_args is not None:
            adopt_arguments(self.training_args, kwargs)
        if self.processing_class is not None and kwargs.get("data_collator") is None:
            kwargs["data_collator"] = transformers.DataCollatorWithPadding(self.processing_class)

    def _policies(self) -> list[Callback]:
        """Return what transformers' arguments ask for beside intervals."""
        args = self.training_args
        found: list[Callback] = []
        if args is not None and args.logging_first_step:
            found.append(_LogsFirstStep())
        if args is not None and word_of(args.save_strategy) == "best":
            found.append(_SavesBest())
        return found

    # --- setting up

    def _choose_device(self, device: Any) -> torch.device:
        return self._engine_args.device

    @property
    def _has_eval(self) -> bool:
        return super()._has_eval and self._evaluates

    def _set_up_data(self) -> None:
        if self.training_args is None or self.training_args.remove_unused_columns:
            for name in ("train_dataset", "eval_dataset", "test_dataset"):
                setattr(self, name, self._without_unused_columns(getattr(self, name)))
        super()._set_up_data()

    def _without_unused_columns(self, dataset: Any) -> Any:
        """Return a Hugging Face dataset with the columns that the model takes; anything else as it is."""
        if isinstance(dataset, dict):
            return {name: self._without_unused_columns(one) for name, one in dataset.items()}
        if not (hasattr(dataset, "remove_columns") and getattr(dataset, "column_names", None)):
            return dataset
        taken = inspect.signature(unwrap(self.model).forward).parameters
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken.values()) and "input_ids" not in taken:
            return dataset
        kept = {*taken, "label", "labels", "label_ids"}
        return dataset.remove_columns([name for name in dataset.column_names if name not in kept])

    def _setup_training_components(self) -> None:
        """Build the engine around the model, with our optimizer, or the one that its arguments ask for."""
        given, args = self._given, self.training_args
        self._engine_args.per_device_train_batch_size = self.batch_size
        self._engine_args.gradient_accumulation_steps = self.gradient_accumulation_steps
        self.engine = self.engine_class(
            self,
            model=self.model,
            args=self._engine_args,
            train_dataset=self.train_dataset if self.train_dataset is not None else [None],
            eval_dataset=self.eval_dataset,
            processing_class=self.processing_class,
            compute_loss_func=_never,  # so that no version divides the loss again; see Engine.compute_loss
            callbacks=[Bridge(self), *self._foreign],
        )
        for callback in (transformers.PrinterCallback, transformers.ProgressCallback, transformers.DefaultFlowCallback):
            self.engine.remove_callback(callback)
        self.engine.loss_is_scaled_for_ga = True
        self.model.to(self.device)
        if args is not None and given["optimizer"] is None and self._can_train:
            self.engine.args.learning_rate = self.learning_rate
            self.optimizer = self.engine.create_optimizer()

    def _finish_setup(self) -> None:
        args = self.training_args
        if args is not None and self._can_train and self._given["lr_scheduler"] is None:
            total = self.total_steps
            self._given["lr_scheduler"] = getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type)
            self.warmup_steps = args.get_warmup_steps(total or 0) if total or args.warmup_steps >= 1 else 0
        super()._finish_setup()

    # --- the run

    def _fit(self) -> None:
        """Let transformers train; what was left of an epoch that a checkpoint ended in comes first."""
        self._epoch_is_complete = not self.progress.samples_in_epoch
        if self.progress.is_epoch_consumed and not self._owes_evaluation:
            self.lifecycle.begin_epoch()
            self._epoch_is_complete = True
            self._end_epoch(self._loss.mean())
            self._answer_requests()
        if not self.lifecycle.stop:
            self.engine.optimizer, self.engine.lr_scheduler = self.optimizer, _Schedule(self)
            self.engine.train(resume_from_checkpoint=self._start_of_engine())
        self._close()

    def _start_of_engine(self) -> str | None:
        """Return a folder with the state that transformers needs to begin where the run is."""
        progress = self.progress
        if not (progress.epoch or progress.samples_in_epoch):
            return None
        share = self.batch_size * self.world_size * self.gradient_accumulation_steps
        per_epoch = self.steps_per_epoch or 1
        state = transformers.TrainerState()
        left = None if self._resumed is None else self._resumed[0] / "trainer_state.json"
        if left is not None and left.exists():
            state = transformers.TrainerState.load_from_json(str(left))
        state.global_step = progress.epoch * per_epoch + -(-progress.samples_in_epoch // share)
        state.epoch = progress.epochs
        state.train_batch_size = self.batch_size
        folder = Path(self._scratch.name) / "start"
        folder.mkdir(exist_ok=True)
        state.save_to_json(str(folder / "trainer_state.json"))
        return str(folder)

    def _restore_generators(self) -> None:
        if self._resumed is not None:
            self._restore_random_numbers(*self._resumed)

    def _finish_gradients(self, window: Window) -> bool:
        """Do what comes between the last backward pass and the update; return whether it may be made."""
        self._divide_by_targets(self._divisor(window))
        self.engine.accelerator.unscale_gradients(self.engine.optimizer)
        self._grad_norm = self._clip_gradients()
        self.lifecycle.before_optimizer_step()
        admitted = self._is_admitted(self._grad_norm, window)
        if not admitted:
            for parameter in self._parameters:
                parameter.grad = None  # the optimizer leaves out what has no gradient
        return admitted

    def _idle_loss(self, output: StepOutput) -> torch.Tensor | None:
        return without_effect(output)  # transformers' loop runs backward for every micro-batch

    def _finite_evidence(self, norm: torch.Tensor) -> torch.Tensor:
        return norm if self.world_size > 1 else super()._finite_evidence(norm)

    def _forward(self, model: nn.Module, batch: Any) -> StepOutput:
        output = super()._forward(model, batch)
        if self._preprocess is not None and not torch.is_grad_enabled():
            output.outputs = self._preprocess(output.outputs, output.labels)
        return output

    def _evaluate_for_engine(self) -> dict[str, float]:
        """Evaluate in the run, unless this step has been; return the metrics."""
        if self.lifecycle.evaluated_step != self.progress.step:
            self._evaluate_in_run()
        history = self.metrics["valid"]
        return {key: value for key, value in (history[-1] if history else {}).items() if key not in ("epoch", "step")}

    def _loader_or_own(self, dataset: Any) -> Any:
        chosen = self.eval_loader if dataset is None else self._loader_for(dataset)
        if chosen is None:
            raise ConfigError("There is nothing to evaluate: pass a dataset, or `eval_dataset` to the constructor.")
        return chosen

    # --- checkpoints

    def _write_beside(self, folder: Path) -> None:
        self.engine.write_own_files(folder)

    def save_model(self, path: str | Path, overwrite: bool = False) -> Path:
        """Write the weights as safetensors, the model's config, and the tokenizer or processor if there is one."""
        folder = super().save_model(path, overwrite)
        if self.processing_class is not None and self.is_main_process:
            self.processing_class.save_pretrained(folder)
        return folder


class _Processes:
    """What `find_ranks` asks of an accelerator, from TrainingArguments."""

    def __init__(self, args: transformers.TrainingArguments) -> None:
        self.num_processes = args.world_size


def _never(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("Engine.compute_loss computes the loss")


class _Schedule:
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
        schedule = self._trainer.lr_scheduler
        return {} if schedule is None else schedule.state_dict()


class _LogsFirstStep(Callback):
    order = 0

    def on_step_end(self, trainer: Any) -> None:
        if trainer.progress.step == 1:
            trainer.request_log()


class _SavesBest(Callback):
    """Saves after an evaluation that was the best so far, and never else."""

    order = 20

    def on_step_end(self, trainer: Any) -> None:
        trainer.control.save = False

    def on_epoch_end(self, trainer: Any) -> None:
        trainer.control.save = False

    def on_eval_end(self, trainer: Any, metrics: Any) -> None:
        if trainer.lifecycle.improved:
            trainer.request_save()
