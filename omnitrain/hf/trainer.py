"""HFTrainer: transformers' own loop and arguments, under the same contract as the other trainers."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from omnitrain.checkpoint.state import unwrap
from omnitrain.checkpoint.tensors import whole
from omnitrain.distributed import Ranks
from omnitrain.errors import ConfigError
from omnitrain.events import Callback
from omnitrain.data.loaders import MapLoader
from omnitrain.optimization import SCHEDULES, TRANSFORMERS_SCHEDULES
from omnitrain.precision import choose_device
from omnitrain.data.sampling import Window
from omnitrain.trainers.accelerators import (
    adopt_precision,
    find_ranks,
    refuse_lost_processes,
    sharding_of,
    start_from_main,
)
from omnitrain.hf.engine import Boundary, Bridge, Engine, Schedule
from omnitrain.hf.generation import take_generation
from omnitrain.hf.arguments import (
    HFTrainingArguments,
    adopt,
    adopt_arguments,
    engine_arguments,
    is_delayed,
    policies_of,
    refuse_of_datasets,
    sharding_accelerator,
    word_of,
)
from omnitrain.hf.data import without_unused_columns
from omnitrain.hf.evaluation import HFEvaluation
from omnitrain.hf.files import adapters_of, write_adapters
from omnitrain.hf.batch_size import check_sparing, is_out_of_memory
from omnitrain.hf.label_smoothing import smooth_labels
from omnitrain.hf.search import Renewable, check_model_init, remembered
from omnitrain.trainers.zero import schedule_of
from omnitrain.units import StepOutput, without_effect

__all__ = ["HFTrainer", "HFTrainingArguments"]

_PADS = (transformers.PreTrainedTokenizerBase, transformers.SequenceFeatureExtractor)

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


class HFTrainer(Renewable, HFEvaluation):
    """Trains with `transformers.Trainer`, and gives what the other trainers give: numbers, checkpoints, guarantees.

    Takes the arguments of `BaseTrainer` except `device`, and those below. `trainer.engine` is the real
    `transformers.Trainer`, for everything that is not ours (`engine.push_to_hub()`, `engine.add_callback(...)`, ...).
    FSDP and DeepSpeed are asked for by the training arguments or by `accelerate launch`, as in transformers.

    Args:
        model: As in `BaseTrainer`; left out where there is a `model_init`.
        training_args: transformers' TrainingArguments, or `HFTrainingArguments`, which takes older names too. They
            fill our arguments; where both speak and differ, that is an error.
        args: As in `BaseTrainer`.
        processing_class: Tokenizer or processor: pads batches unless `data_collator` is given, and is saved.
        preprocess_logits_for_metrics: Called as f(logits, labels) in evaluations; its result goes to the metrics.
        compute_loss_func: transformers' name of `loss_fn`, called as f(outputs, labels, num_items_in_batch=None).
        optimizers: transformers' pair of optimizer and schedule.
        model_init: Returns a new model, for each `train()` that starts afresh and for each trial of a search, which it
            may take as an argument.
        kwargs: As in `BaseTrainer`. `callbacks` may hold transformers' callbacks too.

    Raises:
        ConfigError: If the training arguments and ours contradict each other.
        TypeError: At the definition of a subclass that overrides what transformers' loop never calls.
    """

    engine_class: type[Engine] = Engine
    engine: Engine

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__init__" in vars(cls):
            cls.__init__ = remembered(cls.__init__)
        for name, instead in NEVER_CALLED.items():
            if name in vars(cls):
                raise TypeError(
                    f"{cls.__name__} overrides {name}, which transformers' loop never calls. Use {instead} instead."
                )
        for name in vars(cls):
            if hasattr(transformers.Trainer, name) and not hasattr(HFTrainer, name):
                other = "Pass `loss_fn` or `unit`, or put it" if name == "compute_loss" else "Put it"
                raise TypeError(
                    f"{cls.__name__} overrides {name} of transformers.Trainer, which would never be called here. "
                    f"{other} into a subclass of omnitrain.hf.engine.Engine, and name that as `engine_class`."
                )

    @remembered
    def __init__(
        self,
        model: nn.Module | None = None,
        training_args: transformers.TrainingArguments | None = None,
        *args: Any,
        processing_class: Any = None,
        preprocess_logits_for_metrics: Any = None,
        compute_loss_func: Any = None,
        optimizers: tuple[Any, Any] = (None, None),
        model_init: Callable[..., nn.Module] | None = None,
        callbacks: Iterable[Any] = (),
        **kwargs: Any,
    ) -> None:
        training_args = training_args if training_args is not None else kwargs.pop("args", None)  # as theirs is called
        if training_args is not None and not isinstance(training_args, transformers.TrainingArguments):
            args, training_args = (training_args, *args), None  # HFTrainer(model, train_dataset): as the other trainers
        if kwargs.get("device") is not None:
            raise ConfigError(
                f"`device={str(kwargs['device'])!r}` is an argument of Trainer. Pass "
                "training_args=TrainingArguments(..., use_cpu=True) to keep a run off the GPUs."
            )
        if kwargs.get("async_save"):
            raise ConfigError("`async_save=True` is not supported by HFTrainer, whose own files are written at once.")
        callbacks = self._callbacks = list(callbacks)
        if self._trial is not None and training_args is not None:
            training_args, callbacks = self._trial.arguments(training_args), self._trial.engine.owner._callbacks
            kwargs |= {"save_dir": training_args.output_dir} if kwargs.get("save_dir") is not None else {}
        self.training_args = training_args
        self.processing_class = processing_class
        self._preprocess = preprocess_logits_for_metrics
        self._adopt(kwargs, compute_loss_func, optimizers)
        self._evaluates = training_args is None or word_of(training_args.eval_strategy) != "no"
        own = self._split(callbacks, kwargs)
        self._scratch = tempfile.TemporaryDirectory(prefix="omnitrain-")
        self._output_dir = kwargs.get("save_dir") or (training_args and training_args.output_dir)
        ours: dict[str, Any] = {}
        if training_args is None:  # on processors alone transformers forms a group of processes only if told of them
            ours = {"seed": kwargs.get("seed", 42), "use_cpu": choose_device(None).type == "cpu"}
            ours["ddp_find_unused_parameters"] = False
        self._engine_args = engine_arguments(training_args, str(self._output_dir or self._scratch.name), **ours)
        if self._engine_args.n_gpu > 1:
            self._engine_args._n_gpu = 1  # else transformers copies the model to all of them, with other numbers
        self._make_accelerator(kwargs)
        self.ranks = find_ranks(_Processes(self._engine_args)) if self._engine_args.world_size > 1 else Ranks()
        refuse_lost_processes(self.world_size)
        check_model_init(model, model_init, kwargs)
        self.model_init = model_init
        if model is None:
            model = self._new_model(kwargs.get("seed", 42), self._engine_args.device)
        smooth_labels(training_args, model, kwargs)
        with self.ranks.calling(f"{type(self).__name__}()"):
            super().__init__(model, *args, callbacks=[*policies_of(training_args), *own], **kwargs)

    def _adopt(self, kwargs: dict[str, Any], compute_loss_func: Any, optimizers: tuple[Any, Any]) -> None:
        """Take over what transformers' arguments say into ours."""
        if compute_loss_func is not None:
            if kwargs.get("loss_fn") is not None:
                raise ConfigError(
                    "`loss_fn` and `compute_loss_func` are two names for one thing. Leave one of them out."
                )
            kwargs["loss_fn"] = lambda outputs, labels: compute_loss_func(outputs, labels, num_items_in_batch=None)
        adopt(dict(zip(("optimizer", "lr_scheduler"), optimizers, strict=True)), kwargs, "`optimizers`")
        if self.training_args is not None:
            adopt_arguments(self.training_args, kwargs)
        else:
            adopt_precision(kwargs)
        if isinstance(self.processing_class, _PADS) and kwargs.get("data_collator") is None:
            padding: Any = transformers.DataCollatorWithPadding
            kwargs["data_collator"] = padding(self.processing_class)

    def _split(self, callbacks: Iterable[Any], kwargs: dict[str, Any]) -> list[Callback]:
        """Set transformers' callbacks apart; its early stopping is ours, whose state is kept in checkpoints."""
        self._foreign: list[Any] = []
        own: list[Callback] = []
        for callback in callbacks:
            if isinstance(callback, transformers.EarlyStoppingCallback):
                meant = {"patience": callback.early_stopping_patience, "delta": callback.early_stopping_threshold}
                adopt(meant, kwargs, "transformers' EarlyStoppingCallback")
            else:
                (own if isinstance(callback, Callback) else self._foreign).append(callback)
        for callback in self._foreign:
            kind = callback if isinstance(callback, type) else type(callback)
            if not issubclass(kind, transformers.TrainerCallback):
                raise ConfigError(
                    f"`callbacks` must hold callbacks of omnitrain or of transformers, got {callback!r}. "
                    "Make it a subclass of omnitrain.Callback (and pass an instance, not the class)."
                )
        return own

    # --- setting up

    def _choose_device(self, device: Any) -> torch.device:
        return self._engine_args.device

    @property
    def _has_eval(self) -> bool:
        return super()._has_eval and self._evaluates

    @property
    def _finds_batch_size(self) -> bool:
        return self.training_args is not None and self.training_args.auto_find_batch_size

    @property
    def _by_window(self) -> bool:
        """Whether transformers' loop gets whole windows, for data whose length it cannot go by, or that may change."""
        return self._finds_batch_size or not isinstance(self.train_loader, MapLoader)

    def _set_up_data(self) -> None:
        given = self.train_dataset
        self.train_dataset = self._without_unused_columns(given)
        super()._set_up_data()
        self.train_dataset = given
        if self._finds_batch_size:
            check_sparing(self)
        if self.train_loader is not None and self._by_window:
            refuse_of_datasets(self.training_args, isinstance(self.train_loader, MapLoader))

    @property
    def _sampling(self) -> dict[str, Any]:
        args = self.training_args
        found: dict[str, Any] = {"drop_last": True} if args is not None and args.dataloader_drop_last else {}
        return found if args is None or args.data_seed in (None, args.seed) else {**found, "order_seed": args.data_seed}

    def resolved_config(self) -> dict[str, Any]:
        """Return every setting as it is in force, as JSON types."""
        return {**super().resolved_config(), "order_seed": self._sampling.get("order_seed")}

    def _evaluation_loader(self, dataset: Any, loader: Any, name: str) -> Any:
        return super()._evaluation_loader(self._without_unused_columns(dataset), loader, name)

    def _without_unused_columns(self, dataset: Any) -> Any:
        return without_unused_columns(dataset, self.model, self.training_args)

    def _make_accelerator(self, given: dict[str, Any]) -> None:
        """Have an accelerator of our own where weights are to be cut up; else transformers makes one."""
        self.accelerator, self._scheduler_config = sharding_accelerator(self.training_args, given)
        self._sharded_by = sharding_of(self.accelerator)

    def _setup_training_components(self) -> None:
        """Build the engine around the model; FSDP and DeepSpeed take the optimizer with it."""
        if self._sharded_by and hasattr(self, "engine"):  # for a model made anew
            in_config = self._scheduler_config is not None
            self._make_accelerator({**self._given, **({"lr_scheduler": None} if in_config else {})})
        self._engine_args.per_device_train_batch_size = self.batch_size
        self._engine_args.gradient_accumulation_steps = self.gradient_accumulation_steps
        if self._by_window:  # of any length: the lifecycle ends the run, and the data an epoch
            self._engine_args.gradient_accumulation_steps = 1
            self._engine_args.max_steps = _ENDLESS
            self._engine_args.ignore_data_skip = True
        self.engine = self.engine_class(
            self,
            model=self.model,
            args=self._engine_args,
            data_collator=self.data_collator,
            train_dataset=self.train_dataset if not self._by_window else [None],
            eval_dataset=self.eval_dataset,
            processing_class=self.processing_class,
            compute_loss_func=_never,  # so that no version divides the loss again; see Engine.compute_loss
            callbacks=[Bridge(self), *self._foreign, Boundary(self)],
        )
        for callback in (transformers.PrinterCallback, transformers.ProgressCallback, transformers.DefaultFlowCallback):
            self.engine.remove_callback(callback)
        self.engine.train_dataset = self.train_dataset
        self.engine.loss_is_scaled_for_ga = True
        if self._sharded_by:
            self._shard()
            self.engine.model_wrapped = self.model
            return
        self.accelerator = self.engine.accelerator
        self.model.to(self.device)
        if self.world_size > 1:
            start_from_main(self.model, self.ranks)  # DDP comes with the loop, and an evaluation may come before it

    def _build_optimizer(self) -> torch.optim.Optimizer:
        if self.training_args is None or self._given["optimizer"] is not None:
            return super()._build_optimizer()
        self.engine.args.learning_rate, self.engine.optimizer = self.learning_rate, None
        optimizer = self.engine.create_optimizer()
        groups = [group for group in optimizer.param_groups if group["params"]]
        options = [{name: value for name, value in group.items() if name != "params"} for group in groups]
        if options[1:] and all(one == options[0] for one in options):  # with a decay of 0 nothing sets them apart
            held = {id(parameter) for group in groups for parameter in group["params"]}
            groups = [{**options[0], "params": [one for one in self.model.parameters() if id(one) in held]}]
        optimizer.param_groups[:] = groups
        return optimizer

    def _finish_setup(self) -> None:
        args = self.training_args
        self._generation = take_generation(args, unwrap(self.model), self.compute_metrics, self.processing_class)
        if args is not None and self._can_train and self._given["lr_scheduler"] is None:
            total = self.total_steps
            warmup = args.get_warmup_steps(total or 0) if total or args.warmup_steps >= 1 else 0
            options: Any = args.lr_scheduler_kwargs or {}
            name = word_of(args.lr_scheduler_type)
            is_known = name in SCHEDULES or name in TRANSFORMERS_SCHEDULES
            if self._scheduler_config is not None:
                self._given["lr_scheduler"] = schedule_of(
                    self._scheduler_config, warmup_min_lr=0, warmup_max_lr=self.learning_rate,
                    warmup_num_steps=warmup, total_num_steps=total,
                )  # fmt: skip
            elif is_known and not options and (total is None or warmup < total):
                self._given["lr_scheduler"] = name
                self.warmup_steps = self._given["warmup_steps"] = warmup
            else:  # what a name alone does not say, and a warm-up that is longer than the run
                self._given["lr_scheduler"] = functools.partial(
                    transformers.get_scheduler, args.lr_scheduler_type, num_warmup_steps=warmup,
                    num_training_steps=total, scheduler_specific_kwargs=options,
                )  # fmt: skip
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
            self.engine.optimizer, self.engine.lr_scheduler = self.optimizer, Schedule(self)
            self.accelerator.scaler = self.scaler if self.scaler.is_enabled() else None
            self.engine.has_ended, self.engine.is_asked_for = False, True
            trial = self._trial and self._trial.trial
            self.engine.train(resume_from_checkpoint=self._start_of_engine(), trial=trial)
        if not self.lifecycle.is_closing:
            self._close()

    def _start_of_engine(self) -> str | None:
        """Return a folder with the state that transformers needs to begin where the run is."""
        progress = self.progress
        if not (progress.epoch or progress.samples_in_epoch):
            return None
        share = self.batch_size * self.world_size * self.gradient_accumulation_steps
        state = self._engine_state()
        # it tells their loop where the data are; the Bridge says which step it is
        state.global_step = progress.epoch * (self.steps_per_epoch or 0) + -(-progress.samples_in_epoch // share)
        folder = Path(self._scratch.name) / "start"
        folder.mkdir(exist_ok=True)
        state.save_to_json(str(folder / "trainer_state.json"))
        return str(folder)

    def _engine_state(self) -> transformers.TrainerState:
        """Return what transformers is to know of the run so far: its own history, and what its callbacks keep."""
        state = transformers.TrainerState()
        left = None if self._resumed is None else self._resumed[0] / "trainer_state.json"
        if left is not None and left.exists():
            state = transformers.TrainerState.load_from_json(str(left))
        state.global_step = self.progress.step + self.progress.skipped_steps
        state.epoch, state.train_batch_size = self.progress.epochs, self.batch_size
        return state

    def _restore_generators(self) -> None:
        if self._resumed is not None:
            self._restore_random_numbers(*self._resumed)

    def _finish_gradients(self, window: Window) -> bool:
        """Do what comes between the last backward pass and the update; return whether it may be made.

        DeepSpeed makes it here, at once with the rest.
        """
        self._divide_by_targets(self._divisor(window))
        if self._zero is not None:
            return self._update_by_zero(self._zero, window)
        self._grad_norm = self._clip_gradients()
        self.lifecycle.before_optimizer_step()
        admitted = self._is_admitted(self._grad_norm, window)
        if not admitted:
            for parameter in self._parameters:
                parameter.grad = None  # the optimizer leaves out what has no gradient
        return admitted

    def _idle_loss(self, output: StepOutput) -> torch.Tensor | None:
        return without_effect(output)  # transformers' loop runs backward for every micro-batch

    def _evaluate_for_engine(self) -> dict[str, float]:
        """Evaluate in the run, unless this step has been; return the metrics."""
        if self.lifecycle.evaluated_step != self.progress.step:
            self._evaluate_in_run()
        if self.lifecycle.evaluated_step != self.progress.step:
            return {}  # a signal has cut it short
        return self._latest_metrics()

    def _evaluate_in_run(self, counts: bool = True) -> None:
        if self.lifecycle.is_closing and is_delayed(self.training_args, self.progress):
            return
        try:
            super()._evaluate_in_run(counts)
        except RuntimeError as error:
            if is_out_of_memory(error):
                error.add_note("It was an evaluation, whose batches `eval_batch_size` makes smaller.")
            raise
        if self.lifecycle.evaluated_step != self.progress.step:
            return
        if self.engine.is_in_train:
            self.engine.tell_evaluation(self._latest_metrics())
        else:
            self.engine.has_untold_evaluation = not self.lifecycle.is_closing
        if self._trial is not None:
            self._trial.report(self)

    def _latest_metrics(self) -> dict[str, float]:
        return {key: value for key, value in self.metrics["valid"][-1].items() if key not in ("epoch", "step")}

    def evaluate(self, dataset: Any = None, prefix: str = "eval") -> dict[str, float]:
        metrics = super().evaluate(dataset, prefix)
        self.engine.tell_evaluation(metrics)
        return metrics

    # --- checkpoints

    def _save(self, history: dict[str, Any] | None = None) -> None:
        engine = self.engine
        if self._engine_args.push_to_hub and self.store is not None:
            engine.await_folder(self.store.path(self.progress.step))
        super()._save(history)
        if self._engine_args.push_to_hub and self.store is not None and self.lifecycle.saved_at is not None:
            engine.push_checkpoint(self.lifecycle.saved_path)
        if self.lifecycle.is_closing and self.engine.is_in_train:  # else transformers' loop says so
            engine.control = engine.callback_handler.on_save(engine.args, engine.state, engine.control)

    def _write_beside(self, folder: Path) -> None:
        self.engine.write_own_files(folder)

    def save_metrics(self, split: str, metrics: Mapping[str, Any]) -> Path:
        """Write metrics as `<split>_results.json` into `save_dir`, else where the training arguments write."""
        if self.save_dir is not None or self._output_dir is None:
            return super().save_metrics(split, metrics)
        self.save_dir = Path(self._output_dir)
        try:
            return super().save_metrics(split, metrics)
        finally:
            self.save_dir = None

    def save_model(self, path: str | Path, overwrite: bool = False) -> Path:
        """Write the weights as safetensors, the model's config, and the tokenizer or processor if there is one.

        Of a model with adapters of PEFT, these are written, in PEFT's own form.
        """
        self._write_model(Path(path), overwrite)
        if self._engine_args.push_to_hub:
            self.engine.push_to_hub(commit_message="Model save")
        return Path(path)

    def _write_model(self, path: Path, overwrite: bool) -> None:
        if hasattr(unwrap(self.model), "peft_config"):
            with self.ranks.calling("save_model()"):
                adapters = {name: whole(tensor) for name, tensor in adapters_of(self).items()}
                self.ranks.on_main(
                    "the writing of adapters", lambda: write_adapters(self.model, path, adapters, overwrite)
                )
        else:
            super().save_model(path, overwrite)
        if self.processing_class is not None and self.is_main_process:
            self.processing_class.save_pretrained(path)

    def push_to_hub(self, *args: Any, **kwargs: Any) -> Any:
        """Upload model, tokenizer and a model card, as `transformers.Trainer.push_to_hub` does."""
        return self.engine.push_to_hub(*args, **kwargs)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Write a draft of a model card, as `transformers.Trainer.create_model_card` does."""
        self.engine.create_model_card(*args, **kwargs)


_ENDLESS = 1 << 40


class _Processes:
    """What `find_ranks` asks of an accelerator, from TrainingArguments."""

    def __init__(self, args: transformers.TrainingArguments) -> None:
        self.num_processes = args.world_size


def _never(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("Engine.compute_loss computes the loss")
