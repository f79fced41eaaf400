"""The training loop: epochs, windows and requests of callbacks.

`Event` shows the order of events. `step.py` has what happens in a step, `checkpoint/checkpointer.py` what is saved.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch

from omnitrain.arguments import Settings
from omnitrain.checkpoint.checkpointer import Checkpointer
from omnitrain.checkpoint.fingerprints import check_same_data
from omnitrain.core.errors import ConfigError, DataError, NonFiniteError, ObjectiveError, add_location
from omnitrain.core.events import Control, Event, find_overrides
from omnitrain.data.loaders import Loader, by_name, close_loaders
from omnitrain.data.sets import Sets
from omnitrain.data.stateful import preserve_state, stateful_parts
from omnitrain.data.workers import worker_death
from omnitrain.distributed.ranks import Ranks
from omnitrain.model.units import ModelUnit
from omnitrain.trainer.buffers import unchanged_buffers
from omnitrain.trainer.evaluation import Evaluation, Inconclusive
from omnitrain.trainer.feed import Feed
from omnitrain.trainer.hooks import Hooks
from omnitrain.trainer.lifecycle import Lifecycle
from omnitrain.trainer.nonfinite import evaluation_error
from omnitrain.trainer.out_of_memory import Work, explain_memory, has_batch_norm
from omnitrain.trainer.step import IN_STEPS, Step

logger: logging.Logger = logging.getLogger("omnitrain")

Result = TypeVar("Result")

_BATCHES_BETWEEN_AGREEMENTS = 8
_REQUESTS = ("log", "evaluate", "save")


class Loop:
    """Calls the hooks of each epoch and step, and the lifecycle after each of them."""

    def __init__(
        self,
        trainer: Hooks,
        lifecycle: Lifecycle,
        sets: Sets,
        feed: Feed,
        step: Step,
        evaluation: Evaluation,
        checkpointer: Checkpointer,
    ) -> None:
        self.trainer = trainer
        self.ranks: Ranks = trainer.ranks
        self.settings: Settings = trainer.settings
        self.lifecycle = lifecycle
        self.sets = sets
        self.feed = feed
        self.step = step
        self.evaluation = evaluation
        evaluation.is_interrupted = self.is_interrupted
        self.checkpointer = checkpointer
        self.is_evaluating: bool = False
        """Whether an evaluation that belongs to the run is under way."""
        self.is_rewinding: bool = False
        """Whether there was a spike, and the run is about to be restored from before it."""
        self.has_custom_epoch: bool = type(trainer)._train_epoch is not Hooks._train_epoch
        """Whether the trainer's class overrides `_train_epoch`."""
        # Whether the ranks exchange the requests of a step before it, while the step runs.
        self._exchanges_early = False
        # Whether they exchange them in the next step, though they know its window: something may have been requested.
        self._must_exchange = False
        # Waits for the exchange begun before this step.
        self._exchange: Callable[[], tuple[Control, list[float]]] | None = None

    # --- the run

    def run(self) -> None:
        """Train from the current position until something ends the run, and close it."""
        lifecycle = self.lifecycle
        self.checkpointer.eval_weights.begin_training()
        with lifecycle.untimed(), lifecycle.clock.during("setup"):
            lifecycle.begin_train()
        if self.trainer.algorithms:
            order = ", ".join(type(algorithm).__name__ for algorithm in self.trainer.algorithms)
            logger.info("Algorithms in the order they run: %s.", order)
        with lifecycle.untimed(), lifecycle.clock.during("setup"):
            # both read data, which can take seconds, so only now that signals are handled
            if self.ranks.world_size > 1:
                check_same_data(self.ranks, [self.sets.train, *by_name(self.sets.eval).values()])
            self.checkpointer.record_start()
        self._warn_batch_norm()
        self._exchange = None
        self._exchanges_early = False
        if self.ranks.world_size > 1:
            (local_requests,) = self.ranks.sum("what may be requested in a step", self.has_rank_local_requests)
            self._exchanges_early = not local_requests
        if self.checkpointer.is_resuming:
            self.checkpointer.resume_random_numbers()
        else:
            lifecycle.pending_evaluation = self.settings.eval_on_start
        if self.step.spikes is not None and self.has_custom_epoch:
            raise ConfigError(
                f"`algorithms` holds SpikeGuard, and {type(self.trainer).__name__} has a custom `_train_epoch`, whose "
                "steps nothing judges. Leave one of them out."
            )
        self.agree("the beginning of the run")
        if lifecycle.pending_evaluation and lifecycle.stop != "signal":
            lifecycle.control.save = lifecycle.control.save or lifecycle.pending_save
            with lifecycle.untimed():
                self.evaluate(counts=lifecycle.progress.step > 0)
            self.handle_requests()
            self._save(is_asked=False)
        elif self.settings.sanity and lifecycle.evaluates and not lifecycle.stop:
            model = self.trainer.backend.model
            parts = stateful_parts(self.settings, model)
            with (
                lifecycle.untimed(),
                lifecycle.clock.during("setup"),
                lifecycle.suppress_events(),
                preserve_state(parts),
                unchanged_buffers(model),
            ):
                self.sanity_check()
            self.agree("the end of the rehearsal")
        if self.step.spikes is not None:
            self.step.spikes.begin_run()
        lifecycle.is_epoch_complete = not lifecycle.progress.samples_in_epoch
        if self.has_epoch_to_end:  # a checkpoint on the last step of an epoch is saved before the epoch ends
            self.begin_epoch()
            self.end_epoch(self.step.loss.mean())
            self.handle_requests()
        self.train()
        if not lifecycle.is_closing:
            self.close()

    @contextlib.contextmanager
    def explaining_memory(self, work: Work) -> Iterator[None]:
        """Add to an error of memory that runs out inside what took it, unless that was added further inside."""
        try:
            yield
        except Exception as error:
            explain_memory(error, self.trainer, work)
            raise

    def _warn_batch_norm(self) -> None:
        size, splits = self.settings.microbatch_size, self.feed.accumulation * self.ranks.world_size
        if isinstance(size, int):
            splits *= -(-self.settings.batch_size // size)
        if splits > 1 and has_batch_norm(self.trainer.backend.model):
            logger.info(
                "The model has BatchNorm, whose statistics are of one micro-batch on one rank: a step of %d of them "
                "does not give the numbers of one large batch.", splits,
            )  # fmt: skip

    def train(self) -> None:
        """Train epoch by epoch until something ends the run."""
        while not self.lifecycle.stop:
            self.begin_epoch()
            with self._counting_user_steps() if self.has_custom_epoch else contextlib.nullcontext():
                train_loss = self.trainer._train_epoch(self.lifecycle.progress.epoch)
            self.end_epoch(train_loss)
            if self.is_rewinding:
                self.rewind()
            else:
                self.handle_requests()

    def train_epoch(self, epoch: int) -> float:
        """Train on an epoch, or the rest of one, and return its mean loss."""
        trainer, lifecycle = self.trainer, self.lifecycle
        self.step.begin_epoch()
        windows = self.feed.windows(self.sets.train, epoch, lifecycle.progress)
        for window in self.feed.until_signal(windows):
            lifecycle.begin_step(window.batches)
            if self._exchanges_early:
                self._start_exchange()
            applied = trainer._train_step(window)
            lifecycle.end_step(window.samples, window.tokens, not applied, window.micro_batches)
            self.handle_requests()
            if lifecycle.stop or self.is_rewinding:
                break
        return self.finish_data()

    def rewind(self) -> None:
        """Restore the state from before a spike, and continue from there."""
        assert self.step.spikes is not None
        self.step.spikes.rewind()
        self.is_rewinding = False

    def finish_data(self) -> float:
        """Decide whether the epoch is complete, now that its data have ended, and return its mean loss."""
        lifecycle = self.lifecycle
        if self.step.spikes is not None:
            self.is_rewinding = self.step.spikes.detect(wait=True)
        if self.is_rewinding:
            lifecycle.is_epoch_complete = False
            return self.step.loss.mean()
        if self.ranks.world_size == 1 and lifecycle.control.stop == "signal":
            self.agree("the end of the data")  # the signal may have ended the data
        if lifecycle.stop:
            lifecycle.is_epoch_complete = self.has_epoch_to_end
        elif not lifecycle.progress.samples_in_epoch:
            raise DataError(f"Epoch {lifecycle.progress.epoch + 1} has no samples: the training data yielded none.")
        return self.step.loss.mean()

    @property
    def has_epoch_to_end(self) -> bool:
        """Whether the data of the epoch are consumed, and only the end of the epoch remains.

        An evaluation that a signal interrupted belongs before the end of the epoch.
        """
        return self.lifecycle.progress.is_epoch_consumed and not self.lifecycle.pending_evaluation

    def begin_epoch(self) -> None:
        """Begin an epoch, or the rest of one."""
        self._must_exchange = True
        self.lifecycle.begin_epoch()
        self.lifecycle.is_epoch_complete = True
        for begin in find_overrides(self.trainer.algorithms, "begin_epoch"):
            begin(self.trainer)
        self._update_training_set()

    def _update_training_set(self) -> None:
        """Apply changes of the training set since the latest epoch; the epoch keeps its initial length."""
        loader, progress, trainer = self.sets.train, self.lifecycle.progress, self.trainer
        if not isinstance(loader, Loader) or progress.is_epoch_consumed:
            return
        before = progress.epoch_size
        loader.update(progress.epoch_size if progress.samples_in_epoch else None)
        if self.ranks.world_size > 1:
            self.sets.check_sizes(loader)
        progress.epoch_size = loader.size
        if loader.size != before and self.ranks.is_main:
            has_steps = trainer.lr_scheduler is not None and trainer.scheduler_interval == "step"
            logger.info(
                "%s has %s samples from epoch %d on, and had %s.%s", loader.name[:1].upper() + loader.name[1:],
                loader.size, progress.epoch + 1, before,
                " The schedule of the learning rate keeps the steps that it was made for." if has_steps else "",
            )  # fmt: skip

    def _update_sets(self, loaders: Any) -> None:
        """Apply changes of evaluation sets since they were read."""
        for loader in by_name(loaders).values():
            if isinstance(loader, Loader):
                loader.update()
        if self.ranks.world_size > 1:
            self.sets.check_sizes(loaders)

    def end_epoch(self, train_loss: Any) -> None:
        """End an epoch, or the part of one in which the run ends."""
        trainer, lifecycle = self.trainer, self.lifecycle
        self.step.raise_if_nonfinite(wait=True)
        row = self._epoch_row(self._returned_loss(train_loss) if self.has_custom_epoch else train_loss)
        if lifecycle.is_epoch_complete:
            if trainer.lr_scheduler is not None and trainer.scheduler_interval == "epoch":
                self.step.step_schedule(trainer.lr_scheduler, ends_epoch=True)
            self.step.loss.begin_epoch()
            self.step.metrics.begin_epoch()
            for end in find_overrides(trainer.algorithms, "end_epoch"):
                end(trainer)
        lifecycle.end_epoch(lifecycle.is_epoch_complete, row)

    @property
    def is_at_limit(self) -> bool:
        """Whether the run has reached its length."""
        return self.lifecycle.stop in ("epochs", "max_steps", "max_duration")

    def finish_run(self) -> None:
        """Run the last evaluation of a run that has ended, and save its last checkpoint.

        An evaluation that falls on no interval is left out of the saved history, because a longer run would not have
        it; a run that is resumed here and is no longer repeats it.
        """
        lifecycle, checkpointer = self.lifecycle, self.checkpointer
        if self.is_at_limit:
            lifecycle.check_updates()
        checkpointer.await_background()
        self.trainer.backend.sync_buffers()
        history = lifecycle.state_dict() if checkpointer.store is not None else None
        checkpointer.record_end()
        lifecycle.is_closing = True
        if self.is_at_limit and lifecycle.evaluates and lifecycle.evaluated_step != lifecycle.progress.step:
            with lifecycle.untimed():
                self.evaluate()
            self.agree("the end of the last evaluation")
        with lifecycle.untimed(), lifecycle.clock.during("saving"):
            if lifecycle.saved_at != lifecycle.progress.position or checkpointer.has_unsaved_best:
                with self.explaining_memory("saving"):
                    checkpointer.save(history)
            checkpointer.await_background()
        checkpointer.record_last_save()

    def close(self) -> None:
        """Complete a run that has ended: the last evaluation, checkpoint and log, and the best weights."""
        lifecycle, checkpointer = self.lifecycle, self.checkpointer
        if not lifecycle.is_closing:
            self.finish_run()
        self.agree("the end of the last save")
        has_time = lifecycle.stop != "signal"
        if not lifecycle.is_epoch_complete and lifecycle.progress.samples_in_epoch:
            lifecycle.add_epoch_row(self._epoch_row(self.step.loss.mean()))
        if has_time and lifecycle.logged_at[0] < lifecycle.progress.step:
            self.log()
        if checkpointer.should_load_best and has_time:
            checkpointer.load_best()
        elif lifecycle.evaluates:
            checkpointer.log_final_weights(
                "a signal ended the run" if checkpointer.should_load_best else "load_best_at_end=False"
            )
        if has_time:
            checkpointer.load_eval_weights()

    # --- requests

    def handle_requests(self) -> None:
        """Act on the requests of callbacks: the only place where a run logs, evaluates or saves."""
        spikes, lifecycle = self.step.spikes, self.lifecycle
        is_shared = self.ranks.world_size > 1
        if is_shared or self.has_requests:
            asked = self._agree_after_step() if is_shared else self.agree("the end of a step", *_REQUESTS)
            if spikes is not None:  # before anything shows a step that may be undone
                is_visible = asked.log or asked.evaluate or asked.save or bool(lifecycle.stop)
                self.is_rewinding = spikes.detect(wait=is_visible)
            if not self.is_rewinding:
                self._act_on(asked)
        elif spikes is not None:
            self.is_rewinding = spikes.detect(wait=False)
        if spikes is not None and not self.is_rewinding and not lifecycle.stop:
            spikes.keep_copy()
        if self.checkpointer.in_flight is not None:
            self.checkpointer.await_background(wait=False)

    def _act_on(self, asked: Control) -> None:
        lifecycle = self.lifecycle
        self._must_exchange |= asked.log or asked.evaluate or asked.save
        if asked.log:
            self.log()
        if asked.evaluate and lifecycle.evaluated_step != lifecycle.progress.step:
            with lifecycle.untimed():
                self.evaluate()
                asked.save |= self.agree("the end of an evaluation", "save").save
        self._save(asked.save)

    def _save(self, is_asked: bool) -> None:
        """Save if requested and not yet saved here, or if a new best has to be saved."""
        lifecycle, checkpointer = self.lifecycle, self.checkpointer
        is_asked = is_asked and lifecycle.saved_at != lifecycle.progress.position
        if is_asked or checkpointer.requires_best_save:
            with lifecycle.untimed(), lifecycle.clock.during("saving"), self.explaining_memory("saving"):
                checkpointer.save(for_best=not is_asked)
                self.agree("the end of a save")

    @property
    def has_rank_local_requests(self) -> bool:
        """Whether this rank may request something in the middle of a step that others do not."""
        trainer = self.trainer
        is_ours = type(trainer).__module__.startswith("omnitrain.") and isinstance(trainer.unit, ModelUnit)
        return (
            self.lifecycle.has_rank_local_requests
            or not is_ours
            or any(algorithm.asks_alone for algorithm in trainer.algorithms)
        )

    def _start_exchange(self) -> None:
        """Start the exchange that ends a step before the step, as its content is known already.

        It then runs during the step. Later requests are sent with the next one, except intervals and limits, which
        need no exchange. Short steps share one: each of them would wait for it longer than it computes.
        """
        if self.feed.is_ahead and not self._must_exchange:
            self._exchange = lambda: (Control(), [])
            return
        self._must_exchange = False
        asked, ahead = self.lifecycle.control.pop(*_REQUESTS), self.feed.read_ahead(may_share=True)
        self._exchange = self.ranks.start_sync_requests("the end of a step", asked, *ahead)

    def _agree_after_step(self) -> Control:
        """Return the requests of all ranks at the end of a step or an epoch."""
        exchange, self._exchange = self._exchange, None
        if exchange is None:
            return self.agree("the end of a step", *_REQUESTS, ahead=self.feed.read_ahead())
        asked = self._finish_exchange(exchange)
        asked.add_scheduled(self.lifecycle.control)
        return self._record_stop(asked)

    @property
    def has_requests(self) -> bool:
        """Whether anything may have been requested on this rank."""
        control = self.lifecycle.control
        return control.log or control.evaluate or control.save or control.stop != ""

    def agree(self, where: str, *requests: str, ahead: Sequence[float] = ()) -> Control:
        """Return which of these requests any rank has made, and record the end of the run if one requested it.

        The data of the next step go along, as each exchange costs about as much as a small model's forward pass.
        """
        asked = self.lifecycle.control.pop(*requests)
        if self.ranks.world_size > 1:
            asked = self._finish_exchange(self.ranks.start_sync_requests(where, asked, *ahead))
        return self._record_stop(asked)

    def _finish_exchange(self, exchange: Callable[[], tuple[Control, list[float]]]) -> Control:
        began = time.perf_counter()
        asked, totals = exchange()
        self.lifecycle.clock.add("waiting", time.perf_counter() - began)
        self.feed.set_totals(totals)
        return asked

    def _record_stop(self, asked: Control) -> Control:
        lifecycle = self.lifecycle
        if asked.stop == "signal" or (asked.stop and not lifecycle.stop):  # a signal may come while the run closes
            lifecycle.stop, lifecycle.signal = asked.stop, asked.signal
        return asked

    def is_interrupted(self, batches: int) -> bool:
        """Return whether a signal on any rank should interrupt an evaluation; called before each of its batches."""
        if self.ranks.world_size == 1:
            return self.lifecycle.control.stop == "signal"
        # an agreement is a collective: one for each batch would cost more than a small model's forward pass
        if batches % _BATCHES_BETWEEN_AGREEMENTS:
            return False
        return self.agree("a batch of an evaluation").stop == "signal"

    def evaluate_outside_run(self, work: Callable[..., Result | None], loader: Any, *args: Any) -> Result:
        """Return `work(loader, *args)`, an evaluation outside the run; end the workers of its loader.

        Raises:
            KeyboardInterrupt: If a signal has interrupted it.
        """
        self._update_sets(loader)
        if self.ranks.world_size > 1:
            check_same_data(self.ranks, list(by_name(loader).values()))
        try:
            with (
                self.lifecycle.untimed(),
                self.evaluation.outside_run(),
                self.trainer.precision.run_context(),
                self.explaining_memory("evaluation"),
            ):
                result = work(loader, *args)
        except Exception as error:
            death = worker_death(error)
            if death is None:
                raise
            raise death from error
        finally:
            close_loaders(loader)
        if result is None:
            raise KeyboardInterrupt("The evaluation was cut short by a signal.")
        return result

    def evaluate(self, counts: bool = True) -> None:
        """Evaluate as part of the run; `counts=False` leaves patience unchanged."""
        trainer, lifecycle = self.trainer, self.lifecycle
        lifecycle.emit(Event.EVAL_START)
        self.is_evaluating = True
        self._update_sets(self.sets.eval)
        self.evaluation.left_out = self._sets_not_due()
        try:
            with lifecycle.clock.during("evaluation"), self.explaining_memory("evaluation"):
                metrics = self.evaluation.evaluate(self.sets.eval, "eval")
        except Exception as error:
            step, epoch = lifecycle.progress.step, lifecycle.progress.epoch
            add_location(error, f"the evaluation after step {step} (epoch {epoch + 1}), rank {self.ranks.rank}")
            raise
        finally:
            self.is_evaluating, self.evaluation.left_out = False, frozenset()
        # saved with the checkpoint, so that a resumed run evaluates before its next step
        lifecycle.pending_evaluation = metrics is None and not lifecycle.is_closing
        if metrics is None:
            return  # interrupted by a signal: a resumed run repeats the full evaluation
        if self.settings.on_nonfinite == "raise":
            self._raise_if_nonfinite(metrics)
        # as for losses: the algorithm that changed the batch last changes the result first
        for transform in reversed(find_overrides(trainer.algorithms, "transform_metrics")):
            metrics = transform(trainer, metrics)
        key = lifecycle.objective.key(metrics)
        if not all(map(math.isfinite, metrics.values())):
            bad = ", ".join(f"{name}={value}" for name, value in metrics.items() if not math.isfinite(value))
            means = "" if math.isfinite(metrics[key]) else (
                f" `{key}` is what evaluations are judged by: this one cannot be the best, and uses up no patience."
            )  # fmt: skip
            logger.warning("Not finite in the evaluation at step %d: %s.%s", lifecycle.progress.step, bad, means)
        lifecycle.evaluated(metrics, counts)
        if lifecycle.improved:
            self.checkpointer.keep_best()
        follows = trainer.scheduler_interval == "evaluation" and not lifecycle.is_closing
        if trainer.lr_scheduler is not None and follows and math.isfinite(metrics[key]):
            trainer.lr_scheduler.step(metrics[key])

    def _sets_not_due(self) -> frozenset[str]:
        """Return the named sets that have an interval of their own, and that this evaluation leaves out."""
        lifecycle = self.lifecycle
        position, excluded = {"step": lifecycle.progress.step, "epoch": lifecycle.progress.epochs}, set[str]()
        for name, loader in by_name(self.sets.eval).items():
            if loader.rules is not None:
                rows = reversed(lifecycle.metrics["valid"])
                last = next((row for row in rows if f"eval_{name}_loss" in row), None)
                if not loader.rules.is_due(position, last):
                    excluded.add(name)
        return frozenset(excluded)

    def sanity_check(self) -> None:
        """Evaluate the first batch of each set to find errors that would otherwise come after hours of training.

        It leaves no trace: no event, no row, no random number, no change of a buffer, nothing for the best or for
        patience. If one batch is not enough (the user's own metric may need all classes), the full set is evaluated.
        """
        transforms = find_overrides(self.trainer.algorithms, "transform_metrics")
        try:
            for only_first in (True, False):
                try:
                    with self.explaining_memory("evaluation"):
                        metrics = self.evaluation.evaluate(self.sets.eval, "eval", only_first)
                        if metrics is None:  # interrupted by a signal
                            return
                        if self.settings.on_nonfinite == "raise":
                            self._raise_if_nonfinite(metrics)
                        if not transforms:
                            self.lifecycle.objective.key(metrics)
                        return
                except (Inconclusive, ObjectiveError) as error:
                    if not only_first:
                        raise
                    reason = error.__cause__ or error
                    logger.warning(
                        "Before step 1 all of the evaluation set is evaluated, since its first batch cannot be scored "
                        "by itself (%s: %s). `sanity=False` leaves that out.", type(reason).__name__, reason,
                    )  # fmt: skip
        except Exception as error:
            error.add_note(
                "It was the rehearsal of evaluations before the first step; `sanity=False` leaves that out, and the "
                "first evaluation would raise the same."
            )
            raise

    def _raise_if_nonfinite(self, metrics: Mapping[str, float]) -> None:
        """Raise if the loss of a set is not finite, and name the samples."""
        for name, loader in by_name(self.sets.eval).items():
            loss = metrics.get(f"eval_{name}_loss" if name else "eval_loss", 0.0)  # a custom evaluation may have none
            if not math.isfinite(loss):
                raise evaluation_error(self.evaluation, loader, loss, self.lifecycle.progress.step)

    def log(self) -> None:
        """Read the loss from the device, once per log, and emit the row."""
        lifecycle, progress = self.lifecycle, self.lifecycle.progress
        lifecycle.tick()
        self.step.raise_if_nonfinite(wait=True)
        loss, metrics = self.step.means_since_last()
        step, seconds, samples, tokens = lifecycle.logged_at
        if math.isnan(loss) and progress.step == step:
            return  # all steps since the latest log were skipped, so nothing is logged
        # a resumed run may log at once, with no time passed
        passed = max(progress.seconds - seconds, 1e-9)
        logs: dict[str, Any] = {
            "step": progress.step,
            "epoch": round(progress.epochs, 6),
            "loss": loss,
            **metrics,
            **self.rates_and_norm(),
        }
        if progress.samples:  # the user's own loop counts none
            logs["samples_per_second"] = (progress.samples - samples) / passed
        if progress.tokens:
            logs["tokens_per_second"] = (progress.tokens - tokens) / passed
        if progress.skipped_steps:
            logs["skipped_steps"] = progress.skipped_steps
        added = self.trainer._backend_logs()
        if twice := metrics.keys() & added.keys():
            raise ConfigError(
                f"{min(twice)!r} is both a metric of the forward pass and what `_backend_logs` adds to a row of logs. "
                "Rename one of them."
            )
        logs.update(added)
        lifecycle.add_values(logs)
        lifecycle.tick()
        lifecycle.logged_at = (progress.step, progress.seconds, progress.samples, progress.tokens)
        lifecycle.emit(Event.LOG, logs)

    def learning_rates(self) -> list[float]:
        """Return the rate of each group in the latest update."""
        groups = self.trainer.backend.optimizer.param_groups
        return list(map(float, self.step.rates or [group["lr"] for group in groups]))

    def rates_and_norm(self) -> dict[str, float]:
        """Return the rate of the latest update, those of groups that differ from the first, and the gradient norm."""
        first, *groups = self.trainer.backend.optimizer.param_groups
        first_rate, *rates = self.learning_rates()
        logs = {"learning_rate": first_rate}
        for i, (group, rate) in enumerate(zip(groups, rates, strict=False), 1):  # a group may be newer than the rates
            # groups that differ only later, as by a schedule for each of them, keep their rows from the first log on
            has_own_base = group.get("initial_lr", group["lr"]) != first.get("initial_lr", first["lr"])
            if rate != first_rate or has_own_base:
                logs[f"learning_rate_{i}"] = rate
        norm = self.step.grad_norm
        return logs if norm is None else {**logs, "grad_norm": float(norm)}

    def _epoch_row(self, train_loss: float) -> dict[str, float]:
        row = {"train_loss": train_loss}
        (name_count,) = self.ranks.sum("the names of metrics", len(self.step.metrics))
        if name_count:
            row |= {f"train_{name}": value for name, value in self.step.metrics.means().items()}
        return row | self.rates_and_norm()

    # --- custom loops

    def _returned_loss(self, value: Any) -> float:
        """Return what the user's `_train_epoch` has returned, as the mean over all ranks."""
        name, meter = type(self.trainer).__name__, self.step.loss
        if not isinstance(value, (int, float)) and not hasattr(value, "__float__"):
            raise ConfigError(f"{name}._train_epoch must return the epoch's mean loss as a float, got {value!r}.")
        train_loss = self._mean_over_ranks(float(value)) if self.ranks.world_size > 1 else float(value)
        if not math.isfinite(train_loss):
            if self.settings.on_nonfinite == "raise":
                raise NonFiniteError(f"{name}._train_epoch returned {train_loss} as the epoch's loss.")
        elif not meter.weight:
            meter.add(torch.tensor(train_loss), 1)  # the user's own loop: only its mean can be logged
        return train_loss

    def _mean_over_ranks(self, train_loss: float) -> float:
        """Return the mean of the ranks' losses, weighted by the samples that each took from `train_loader`.

        Our own loop has averaged them already.
        """
        samples = getattr(self.sets.train, "samples_iterated", 0)
        weighted = train_loss * samples if samples else 0.0
        done, total, samples, plain = self.ranks.sum(
            "the mean loss of an epoch", self.step.loss.weight, weighted, samples, train_loss
        )
        if done:
            return train_loss
        return total / samples if samples else plain / self.ranks.world_size

    @contextlib.contextmanager
    def _counting_user_steps(self) -> Iterator[None]:
        """Count the optimizer steps of the user's own `_train_epoch`, which does not count them itself."""
        trainer, backend = self.trainer, self.trainer.backend
        progress, window = self.lifecycle.progress, self.step.window
        backend.collect_parameters()  # an algorithm may have frozen or unfrozen layers
        updates = find_overrides(self.trainer.algorithms, "after_update")
        if isinstance(self.sets.train, Loader):
            self.sets.train.set_epoch(progress.epoch)
        before, update_count = progress.step, [0]
        schedule = self.trainer.lr_scheduler if self.trainer.scheduler_interval == "step" else None
        place = getattr(schedule, "last_epoch", None)

        # the weights are there when the optimizer has stepped, and so is `after_update`
        called = {"after_update"} if not backend.has_master_weights else set()

        def check(*_: Any) -> None:
            takes_own_steps = self.step.window is window
            if takes_own_steps and self.settings.microbatch_size is not None:
                raise ConfigError(
                    f"`microbatch_size={self.settings.microbatch_size!r}` has no effect on a custom "
                    "`_train_epoch`, which uses full batches. Make `batch_size` smaller, or split them there."
                )
            for algorithm in trainer.algorithms if takes_own_steps else ():
                uncalled = [name for name in IN_STEPS if find_overrides([algorithm], name) and name not in called]
                if uncalled:
                    raise ConfigError(
                        f"`algorithms` holds {type(algorithm).__name__}, whose {uncalled[0]}() nothing calls in a "
                        "custom `_train_epoch` that steps the optimizer. Leave it out and do the same in your "
                        "loop, or have super()._train_epoch(epoch) take the steps."
                    )
            backend.check_all_reduced()

        def count(*_: Any) -> None:
            update_count[0] += 1
            self.ranks.progress_count += 1
            if self.step.window is window and updates:
                progress.step = before + update_count[0] - 1
                for update in updates:
                    update(self.trainer)
                progress.step = before

        optimizer = backend.optimizer
        # hooks, not a patched step(): accelerate and DeepSpeed replace that method themselves
        handles = [optimizer.register_step_pre_hook(check), optimizer.register_step_post_hook(count)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        if update_count[0] and place is not None and schedule.last_epoch == place:  # type: ignore[union-attr]
            raise ConfigError(
                f"`lr_scheduler` was not stepped in an epoch of {update_count[0]} updates: the learning rate stays "
                "where the schedule begins, which is 0 with `warmup_steps`. Call `self.lr_scheduler.step()` after each "
                "update in `_train_epoch`, or pass scheduler_interval='epoch'."
            )
        if progress.step == before:
            progress.step += update_count[0]
