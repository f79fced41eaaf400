"""transformers' own Trainer as the engine of `HFTrainer`: its loop, with our data, losses, evaluation and checkpoints.

`Engine` overrides where their loop asks for something, `Bridge` tells our lifecycle what their loop does and puts our
requests onto their flags. What the user says is in `huggingface.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from omnitrain.loaders import MapLoader
from omnitrain.sampling import Window
from omnitrain.workers import outlive_signals

if TYPE_CHECKING:
    from omnitrain.trainers.huggingface import HFTrainer

__all__ = ["Bridge", "Engine"]


class Engine(transformers.Trainer):
    """transformers' Trainer, asked for its loop alone.

    A subclass for `HFTrainer.engine_class` may override `training_step`, `log` and whatever else their loop calls.
    """

    owner: HFTrainer
    _window: Window
    _turn: int
    _last: Any = None

    def __init__(self, owner: HFTrainer, *args: Any, **kwargs: Any) -> None:
        self.owner = owner
        super().__init__(*args, **kwargs)

    # --- data

    def get_train_dataloader(self) -> DataLoader[Any]:
        return _train_loader(self.owner)

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: Any) -> tuple[list[Any], None]:
        """Take the micro-batches of a window, and weigh them while they are on the host."""
        taken = list(itertools.islice(epoch_iterator, num_batches))
        owner = self.owner
        group = list(owner._weighed(iter(taken)))
        self._last = group[-1] if group else self._last
        window, self._turn = owner._window_of(group, self._last), 0
        if window is None:
            return [], None
        self._window = window
        return window.batches, None

    def _prepare_inputs(self, inputs: Any) -> Any:
        return inputs  # `_loss_of` does it

    # --- a step

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
        if "loss" in logs and self.is_in_train:
            logs.update(self.owner._read_grad_norm())
        super().log(logs, start_time)

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Evaluate as every trainer does, and tell transformers' callbacks of it."""
        owner = self.owner
        if self.is_in_train and eval_dataset is None and metric_key_prefix == "eval":
            metrics = dict(owner._evaluate_for_engine())
        else:
            metrics = dict(owner._evaluated(owner._loader_or_own(eval_dataset), metric_key_prefix))
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        if self.is_in_train:
            self.control.should_save |= owner._agree("the end of an evaluation", "save").save
            self.control.should_training_stop |= bool(owner.lifecycle.stop)
        return metrics

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        owner = self.owner
        if owner.store is None:
            super()._save_checkpoint(model, trial)  # asked for by a callback of transformers' kind
        elif owner.lifecycle.saved_at != owner.progress.position:
            owner._save()
            owner._agree("the end of a save")
            self.control.should_training_stop |= bool(owner.lifecycle.stop)

    def write_own_files(self, folder: Path) -> None:
        """Write what a stock `transformers.Trainer` resumes from beside our files; none of it is read by us."""
        where = str(folder)
        self._save_optimizer_and_scheduler(where)
        self._save_rng_state(where)
        self.state.save_to_json(str(folder / "trainer_state.json"))
        torch.save(self.args, folder / "training_args.bin")
        if self.processing_class is not None:
            self.processing_class.save_pretrained(where)

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
        state.max_steps = self.owner.total_steps or state.max_steps
        return control

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """An epoch begins."""
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
        self._applied = self.owner._finish_gradients(self.owner.engine._window)
        return control

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """The optimizer has stepped, unless it was kept from it."""
        owner = self.owner
        self._applied = self._applied and not owner.engine.accelerator.optimizer_step_was_skipped
        owner._conclude_step(self._applied)
        return control

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """A window is done."""
        owner, window = self.owner, self.owner.engine._window
        owner.lifecycle.end_step(window.samples, window.tokens, skipped=not self._applied)
        state.epoch = owner.progress.epochs
        return self._ask(control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """An epoch is over, or the run."""
        owner = self.owner
        ended = owner.lifecycle.stop or control.should_epoch_stop
        owner._epoch_is_complete = not ended or (owner.progress.is_epoch_consumed and not owner._owes_evaluation)
        owner._end_epoch(owner._loss.mean())
        return self._ask(control)

    def _ask(self, control: Any) -> Any:
        owner = self.owner
        asked = owner._agree("the end of a step", "log", "evaluate", "save")
        if asked.log:
            owner._log()
            control.should_log = True
        control.should_evaluate |= asked.evaluate and owner.lifecycle.evaluated_step != owner.progress.step
        control.should_save |= asked.save
        control.should_training_stop |= bool(owner.lifecycle.stop)
        return control


# --- our order of samples in a DataLoader that transformers and accelerate know how to wind forward


class _Requests(Sampler[Any]):
    """The micro-batches of the present epoch as (epoch, indices); skipping some of them reads nothing."""

    def __init__(self, owner: HFTrainer) -> None:
        self.owner = owner

    def __len__(self) -> int:
        return len(self.owner.train_loader)

    def __iter__(self) -> Iterator[list[Any]]:
        epoch = self.owner.progress.epoch
        for indices in self.owner.train_loader.sampler.batches(epoch):
            yield [(epoch, indices)]


class _Fetched(Dataset[Any]):
    def __init__(self, fetch: Any, size: int) -> None:
        self.fetch = fetch
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, request: Any) -> Any:
        return self.fetch(*request)


class _Batches(IterableDataset[Any]):
    """The batches of a stream or of a user's own loader, from the epoch's beginning."""

    def __init__(self, owner: HFTrainer) -> None:
        self.owner = owner

    def __len__(self) -> int:
        return len(self.owner.train_loader)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.owner.train_loader.batches(self.owner.progress.epoch, 0))


def _only(batches: list[Any]) -> Any:
    return batches[0]


def _as_is(batch: Any) -> Any:
    return batch


def _train_loader(owner: HFTrainer) -> DataLoader[Any]:
    loader = owner.train_loader
    generator = torch.Generator().manual_seed(owner.seed)  # else it draws from the training's generator
    if not isinstance(loader, MapLoader):
        return DataLoader(_Batches(owner), batch_size=None, collate_fn=_as_is, generator=generator)
    workers = owner._given["num_workers"]
    return DataLoader(
        _Fetched(loader.fetch, loader.sampler.size),
        batch_sampler=_Requests(owner),
        collate_fn=_only,
        num_workers=workers,
        pin_memory=loader.pin_memory,
        prefetch_factor=owner._given["prefetch_factor"],
        worker_init_fn=outlive_signals if workers else None,
        generator=generator,
    )
