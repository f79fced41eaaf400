"""The training loop, once: epochs, windows, steps, and the answers to what callbacks ask for.

The order of events is printed in `Event`. A backend or a user changes the loop by overriding the hooks in `hooks.py`,
whose defaults are plain PyTorch on one device. Arguments are in `base.py`, public calls in `calls.py`.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from omnitrain import evaluation
from omnitrain.errors import ConfigError, DataError, NonFiniteError
from omnitrain.events import Algorithm
from omnitrain.finite import FiniteGuard, LossMeter
from omnitrain.lifecycle import Control
from omnitrain.data.loaders import Loader
from omnitrain.data.sampling import Window
from omnitrain.trainers.feeding import Feeding
from omnitrain.trainers.nonfinite import Place, nonfinite_error
from omnitrain.units import ModelUnit

__all__ = ["TrainingLoop"]

logger = logging.getLogger("omnitrain")

_NOTHING = contextlib.nullcontext()
_BATCHES_BETWEEN_AGREEMENTS = 8


class TrainingLoop(Feeding):
    """A template method: `_fit` calls the hooks, and the lifecycle after each of them."""

    lr_scheduler: Any
    scheduler_interval: str
    eval_loader: Any
    algorithms: list[Algorithm]
    on_nonfinite: str

    _guard: FiniteGuard
    _loss: LossMeter
    _grad_norm: torch.Tensor | None = None
    _targets: int | None = None
    """The targets of this window so far, where the unit counts them."""
    _epoch_is_complete: bool
    _logged: tuple[int, float, int, int]
    """Step, seconds, samples and tokens at the latest log."""

    # --- the loop

    def _fit(self) -> None:
        """Train epoch by epoch until something ends the run."""
        self._epoch_is_complete = not self.progress.samples_in_epoch
        # A checkpoint on an epoch's last step comes before the epoch's end, which is then still to come.
        goes_on = not self.lifecycle.stop or (self.progress.is_epoch_consumed and not self._owes_evaluation)
        while goes_on:
            self.lifecycle.begin_epoch()
            self._epoch_is_complete = True
            with self._counting_steps_of_others():
                train_loss = self._train_epoch(self.progress.epoch)
            self._end_epoch(train_loss)
            self._answer_requests()
            goes_on = not self.lifecycle.stop
        self._close()

    def _train_epoch(self, epoch: int) -> float:
        """Train on the data of an epoch, or the rest of it, and return its mean loss.

        Override it for a loop of your own: events of steps then do not fire, everything else stays as it is.
        """
        self.model.train()
        self._collect_parameters()
        for window in self._until_signal(self._windows(epoch)):
            self.lifecycle.begin_step()
            applied = self._train_step(window)
            self.lifecycle.end_step(window.samples, window.tokens, skipped=not applied)
            self._answer_requests()
            if self.lifecycle.stop:
                break
        if self.world_size == 1 and self.control.stop == "signal":
            self._agree("the end of the data")  # which may have come with the signal
        if self.lifecycle.stop:
            # an evaluation that a signal cut short belongs before the epoch's end
            self._epoch_is_complete = self.progress.is_epoch_consumed and not self._owes_evaluation
        if not self.progress.samples_in_epoch and not self.lifecycle.stop:
            raise DataError(f"Epoch {epoch + 1} has no samples: the training data yielded none.")
        return self._loss.mean()

    def _train_step(self, window: Window) -> bool:
        """Train on one window, and return whether the weights were updated."""
        if self._must_undo:
            self._loss.begin_step()
        if hasattr(self.unit, "set_step_nr"):
            self.unit.set_step_nr(self.progress.step + 1)
        divisor, last = self._divisor(window), len(window.batches) - 1
        self._targets = None
        for i, (batch, weight) in enumerate(zip(window.batches, window.weights, strict=True)):
            with self._accumulating(last=i == last):
                loss = self._loss_of(self.model, batch, weight, divisor, last=i == last)
                if loss is not None:
                    self._backward(loss)
        self._divide_by_targets(divisor)
        return self._optimizer_step(window)

    def _loss_of(self, model: nn.Module, batch: Any, weight: float, divisor: float, last: bool) -> torch.Tensor | None:
        """Run a micro-batch forward, and return its part of the window's loss; None if it has nothing to predict."""
        batch = self._prepare_batch(batch)
        for algorithm in self.algorithms:
            batch = algorithm.transform_batch(self, batch)  # type: ignore[arg-type]
        with self._autocast():
            output = self._forward(model, batch)
            loss = output.required_loss()
            for algorithm in reversed(self.algorithms):
                loss = algorithm.transform_loss(self, loss)  # type: ignore[arg-type]
        if output.num_targets is None:
            if self.grad_reduction == "per-token-mean" and not isinstance(self.unit, ModelUnit):
                raise self._no_token_counts()
            self._loss.add(loss, weight)
        else:  # the loss is the sum over targets, which only the forward could count
            count = int(output.num_targets) if weight else 0
            self._targets = (self._targets or 0) + count
            self._loss.add(loss / max(count, 1), count)
            weight = 1.0 if count else 0.0
        # a mean over nothing is NaN, and 0 x NaN is NaN
        scaled = self._idle_loss(output) if not weight else loss if weight == divisor else loss * (weight / divisor)
        if last and self.world_size > 1 and scaled is not None:
            # A loss that is not finite must be seen by all processes: its gradients are, once they are averaged.
            scaled = scaled * (self._loss.sum * 0 + 1).to(scaled.dtype)
        return scaled

    def _divide_by_targets(self, divisor: float) -> None:
        """Divide the gradients by the targets of the window, where only the forward passes could count them."""
        if self._targets is not None and self.grad_reduction != "sum":
            (targets,) = self.ranks.sum("the targets of a step", self._targets)
            if targets:
                self._scale_gradients(divisor * self.world_size / targets)

    def _optimizer_step(self, window: Window) -> bool:
        """Clip, check, update and clear the gradients; return whether the update was made."""
        self._grad_norm = self._clip_gradients()
        self.lifecycle.before_optimizer_step()
        return self._conclude_step(self._is_admitted(self._grad_norm, window) and self._apply_update())

    def _conclude_step(self, applied: bool) -> bool:
        """Clear the gradients, and step the schedule if the update was made."""
        for parameter in self._parameters:
            parameter.grad = None
        if not applied:
            self._loss.undo_step()
        elif self.lr_scheduler is not None and self.scheduler_interval == "step":
            self.lr_scheduler.step()
        return applied

    def _answer_requests(self) -> None:
        """Do what callbacks have asked for: the only place where a run logs, evaluates or saves."""
        asked = self._agree("the end of a step", "log", "evaluate", "save", ahead=self._read_ahead())
        if asked.log:
            self._log()
        if asked.evaluate and self.lifecycle.evaluated_step != self.progress.step:
            self._evaluate_in_run()
            asked.save |= self._agree("the end of an evaluation", "save").save
        if asked.save and self.lifecycle.saved_at != self.progress.position:
            self._save()
            self._agree("the end of a save")
        self._await_background(wait=False)

    def _agree(self, where: str, *requests: str, ahead: Sequence[float] = ()) -> Control:
        """Return which of these requests any process has made, and note the end of the run if one asked for it.

        What is known of the next step goes along, as every exchange costs about as much as a small model's forward.
        """
        asked, totals = self.ranks.agree(where, self.control.taken(*requests), *ahead)
        self._totals_ahead = totals or self._totals_ahead
        if asked.stop and not self.lifecycle.stop:
            self.lifecycle.stop, self.lifecycle.signal = asked.stop, asked.signal
        return asked

    def _is_interrupted(self, batches: int) -> bool:
        """Return whether a signal on any process is to cut an evaluation short; asked before each of its batches."""
        if self.world_size == 1:
            return self.control.stop == "signal"
        if batches % _BATCHES_BETWEEN_AGREEMENTS:
            return False
        return self._agree("a batch of an evaluation").stop == "signal"

    def _evaluate_in_run(self, counts: bool = True) -> None:
        self.lifecycle.begin_evaluation()
        metrics = evaluation.evaluate(self, self.eval_loader, "eval")
        self._owes_evaluation = metrics is None and not self.lifecycle.is_closing
        if metrics is None:
            return  # cut short by a signal: half an evaluation is none, and a resumed run does it again
        for algorithm in self.algorithms:
            metrics = algorithm.transform_metrics(self, metrics)  # type: ignore[arg-type]
        self.lifecycle.evaluated(metrics, counts)
        if self.lr_scheduler is not None and self.scheduler_interval == "evaluation" and not self.lifecycle.is_closing:
            self.lr_scheduler.step(metrics[self.lifecycle.objective.key(metrics)])

    def _close(self) -> None:
        """Bring a run that has ended in order to its end: the last evaluation, checkpoint and log.

        What falls on no interval is not kept in the checkpoint: a longer run would not have had it, and one that is
        resumed here without being longer does it again.
        """
        self._await_background()
        history = self.lifecycle.state_dict() if self.store is not None else None
        self.lifecycle.is_closing = True
        has_time = self.lifecycle.stop != "signal"
        at_a_limit = self.lifecycle.stop in ("epochs", "max_steps", "max_duration")
        if at_a_limit and self._has_eval and self.lifecycle.evaluated_step != self.progress.step:
            self._evaluate_in_run()
        if self.lifecycle.saved_at != self.progress.position or self._has_uncredited_best:
            self._save(history)
        self._await_background()
        if not self._epoch_is_complete and self.progress.samples_in_epoch:
            self.lifecycle.add_epoch_row(self._epoch_row(self._loss.mean()))
        if has_time and self._logged[0] < self.progress.step:
            self._log()
        if has_time and self._loads_best:
            self._load_best()
        elif self._loads_best:
            logger.info("A signal ended the run: the model keeps its last weights, and not the best ones.")

    def _epoch_row(self, train_loss: float) -> dict[str, float]:
        return {"train_loss": train_loss, "learning_rate": self._learning_rate, **self._read_grad_norm()}

    def _end_epoch(self, train_loss: float) -> None:
        self._raise_if_bad(wait=True)
        if not isinstance(train_loss, (int, float)) and not hasattr(train_loss, "__float__"):
            raise ConfigError(
                f"{type(self).__name__}._train_epoch must return the epoch's mean loss as a float, got {train_loss!r}."
            )
        train_loss = float(train_loss)
        if not self._loss.weight and math.isfinite(train_loss):
            self._loss.add(torch.tensor(train_loss), 1)  # a loop of the user's own: its mean is what there is to log
        elif not math.isfinite(train_loss) and self.on_nonfinite == "raise" and self._has_own_epoch:
            raise NonFiniteError(f"{type(self).__name__}._train_epoch returned {train_loss} as the epoch's loss.")
        row = self._epoch_row(train_loss)
        if self._epoch_is_complete:
            if self.lr_scheduler is not None and self.scheduler_interval == "epoch":
                self.lr_scheduler.step()
            self._loss.begin_epoch()
        self.lifecycle.end_epoch(self._epoch_is_complete, row)

    def _log(self) -> None:
        """Read the loss off the device, once per log, and send the row out."""
        self.lifecycle.tick()
        self._raise_if_bad(wait=True)
        progress, (_, seconds, samples, tokens) = self.progress, self._logged
        passed = max(progress.seconds - seconds, 1e-9)
        logs: dict[str, Any] = {
            "step": progress.step,
            "epoch": round(progress.epochs, 6),
            "loss": self._loss.mean_since_last(),
            "learning_rate": self._learning_rate,
            **self._read_grad_norm(),
        }
        if progress.samples:  # a loop of the user's own counts none
            logs["samples_per_second"] = (progress.samples - samples) / passed
        if progress.tokens:
            logs["tokens_per_second"] = (progress.tokens - tokens) / passed
        if progress.skipped_steps:
            logs["skipped_steps"] = progress.skipped_steps
        logs.update(self._backend_logs())
        self._logged = (progress.step, progress.seconds, progress.samples, progress.tokens)
        self.lifecycle.logged(logs)

    def _collect_parameters(self) -> None:
        """List the parameters once per epoch: walking through the modules in every step would take long.

        Those of the model that the optimizer does not hold are among them, or their gradients would pile up.
        """
        listed = {id(parameter): parameter for parameter in self.model.parameters()}
        for group in self.optimizer.param_groups:
            listed |= {id(parameter): parameter for parameter in group["params"]}
        self._parameters = list(listed.values())

    @property
    def _learning_rate(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])

    def _read_grad_norm(self) -> dict[str, float]:
        return {} if self._grad_norm is None else {"grad_norm": float(self._grad_norm)}

    # --- non-finite losses and gradients

    @property
    def _must_undo(self) -> bool:
        """Whether a step may turn out to be skipped, so that its loss has to be taken back."""
        return self.on_nonfinite != "raise"

    def _is_admitted(self, norm: torch.Tensor, window: Window) -> bool:
        """Return whether the update may be made, under the policy for non-finite numbers."""
        progress = self.progress
        place = Place(progress.step + 1, progress.epoch, progress.samples_in_epoch, window.samples)
        if self._guard.admits(self._finite_evidence(norm), place):
            if self._guard.deferred:
                self._raise_if_bad()
            return True
        if self.on_nonfinite == "raise":
            raise nonfinite_error(self, place)
        skips = self.on_nonfinite == "skip"
        todo = "the step is skipped" if skips else "the update is made all the same (on_nonfinite='warn')"
        logger.warning("The loss or a gradient is not finite at step %d: %s.", place.step, todo)
        if not skips:
            self._loss.undo_step()
        return not skips

    def _finite_evidence(self, norm: torch.Tensor) -> torch.Tensor:
        """Return a number that is finite exactly if the losses so far and the gradients are."""
        return norm + self._loss.sum

    def _raise_if_bad(self, wait: bool = False) -> None:
        place = self._guard.first_bad(wait)
        if place is not None:
            raise nonfinite_error(self, place)

    # --- a loop of the user's own

    @property
    def _has_own_epoch(self) -> bool:
        return type(self)._train_epoch is not TrainingLoop._train_epoch

    @contextlib.contextmanager
    def _counting_steps_of_others(self) -> Iterator[None]:
        """Count the optimizer steps of a `_train_epoch` of the user's own, which does not count them itself."""
        if not self._has_own_epoch:
            yield
            return
        if isinstance(self.train_loader, Loader):
            self.train_loader.set_epoch(self.progress.epoch)
        before, taken = self.progress.step, [0]
        handle = self.optimizer.register_step_post_hook(lambda *_: taken.append(taken.pop() + 1))
        try:
            yield
        finally:
            handle.remove()
        if self.progress.step == before:
            self.progress.step += taken[0]

    # --- where there are checkpoints; see saving.py and resumable.py

    store: Any = None
    seed: int
    save_dir: Path | None = None
    _owes_evaluation: bool = False
    _loads_best: bool = False
    _has_uncredited_best: bool = False

    @property
    def _has_eval(self) -> bool:
        return self.eval_loader is not None

    @property
    def _can_train(self) -> bool:
        return self.train_loader is not None or self._has_own_epoch

    def resolved_config(self) -> dict[str, Any]:
        """Return every setting as it is in force, as JSON types."""
        raise NotImplementedError

    def _save(self, history: dict[str, Any] | None = None) -> None:
        """Save a checkpoint of the run, with the lifecycle's state in `history` instead of the present one if given."""

    def _await_background(self, wait: bool = True) -> None:
        """Take note of a checkpoint that was written in the background."""

    def _load_best(self) -> None:
        """Put the best weights into the model."""
