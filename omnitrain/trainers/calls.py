"""The calls that a user makes on a trainer: train, evaluate, test, predict, and what can be asked for during a run.

Saving is in `saving.py`, loading in `resumable.py`, the loop that `train` starts in `loop.py`, the arguments in
`base.py`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from omnitrain import evaluation
from omnitrain.callbacks.interrupt import error_of
from omnitrain.checkpoint.state import unwrap
from omnitrain.errors import ConfigError
from omnitrain.lifecycle import STOP_REASONS
from omnitrain.data.loaders import end_workers
from omnitrain.metrics import MetricsDict
from omnitrain.objective import Objective
from omnitrain.reproducibility import deterministic as deterministic_kernels
from omnitrain.trainers.resumable import Resumable

__all__ = ["Calls"]

logger = logging.getLogger("omnitrain")


class Calls(Resumable):
    """What can be called on every trainer. Those that concern the whole run are called on all its processes."""

    test_loader: Any
    eval_dataset: Any
    test_dataset: Any
    deterministic: bool
    eval_on_start: bool

    def _begin_run(self) -> None:
        raise NotImplementedError

    def _evaluation_loader(self, dataset: Any, loader: Any, name: str) -> Any:
        raise NotImplementedError

    def train(self, resume_from: str | Path | None = None, allow_change: Collection[str] = ()) -> MetricsDict:
        """Train to the first limit, and return history and best.

        A second call trains once more from the present weights, with progress and history started anew.

        Args:
            resume_from: A checkpoint's folder, "last", "best", or "auto": the newest one in `save_dir` that is
                undamaged, else a fresh start.
            allow_change: Settings that may differ from those of the checkpoint, by name.

        Raises:
            CheckpointError: If the checkpoint is damaged, or was saved under settings that would change the run.
            NonFiniteError: If a loss or gradient is not finite and `on_nonfinite="raise"`; nothing was updated by it.
            KeyboardInterrupt, SystemExit: After a run that SIGINT or SIGTERM has ended in order.
        """
        with self.ranks.calling("train()"):
            self._train(resume_from, allow_change)
        if self.lifecycle.stop == "signal":
            raise error_of(self.lifecycle.signal)
        return self.metrics

    def _train(self, resume_from: str | Path | None, allow_change: Collection[str]) -> None:
        self._begin_run()
        found = None
        if resume_from is not None:
            found = self._resume(resume_from, allow_change)
        if found is None and resume_from != "auto":
            self._check_save_dir()
        self._check_disk()
        failed = True
        try:
            with deterministic_kernels(self.deterministic), self._writing_in_background(), self._detecting_anomalies():
                self.lifecycle.begin_train()
                self._resumed = found
                if found is not None:
                    self._restore_random_numbers(*found)
                else:
                    self._owes_evaluation = self.eval_on_start
                self._agree("the beginning of the run")
                if self._owes_evaluation and self.lifecycle.stop != "signal":
                    self.control.save = self.control.save or self._owes_save
                    self._evaluate_in_run(counts=self.progress.step > 0)
                    self._answer_requests()
                self._fit()
            failed = False
        except BaseException as error:
            self.lifecycle.failed(error)
            raise
        finally:
            self._guard.release(self.optimizer)
            end_workers(self.train_loader, self.eval_loader)
            self.lifecycle.end_train(failed)

    def evaluate(self, dataset: Any = None, prefix: str = "eval") -> dict[str, float]:
        """Return `<prefix>_loss` and the metrics of a dataset, a loader, a dict of named sets, or of the eval set.

        Leaves the run as it is: history, best and random numbers are not touched.
        """
        chosen = self.eval_loader if dataset is None else self._loader_for(dataset)
        if chosen is None:
            raise ConfigError("There is nothing to evaluate: pass a dataset, or `eval_dataset` to the constructor.")
        with self.ranks.calling("evaluate()"):
            return self._evaluated(chosen, prefix)

    def test(self, dataset: Any = None) -> dict[str, float]:
        """Return `test_loss` and the metrics of a dataset, or of the test set; never used to select anything."""
        chosen = self.test_loader if dataset is None else self._loader_for(dataset)
        if chosen is None:
            raise ConfigError("There is nothing to test: pass a dataset, or `test_dataset` to the constructor.")
        with self.ranks.calling("test()"):
            metrics = self._evaluated(chosen, "test")
        progress = self._weights_from or self.progress
        row = {"step": progress.step, "epoch": round(progress.epochs, 6), **metrics}
        self.metrics.add_test(row)
        self.lifecycle.logged(row)
        return metrics

    def _evaluated(self, loader: Any, prefix: str) -> dict[str, float]:
        try:
            metrics = evaluation.evaluate(self, loader, prefix)
        finally:
            end_workers(loader)
        if metrics is None:
            raise KeyboardInterrupt("The evaluation was cut short by a signal.")
        return metrics

    def predict(self, dataset: Any) -> evaluation.Predictions:
        """Return predictions and labels as arrays in the dataset's order, one row a sample, and the metrics if any."""
        loader = self._loader_for(dataset)
        if isinstance(loader, dict):
            raise ConfigError(
                f"`predict` takes one dataset, got the sets {', '.join(loader)}. Call it for each of them."
            )
        try:
            with self.ranks.calling("predict()"):
                return evaluation.predict(self, loader)
        finally:
            end_workers(loader)

    def save_metrics(self, split: str, metrics: Mapping[str, Any]) -> Path:
        """Write metrics as `<split>_results.json` into `save_dir`, or into the current folder without one."""
        path = (self.save_dir or Path()) / f"{split}_results.json"
        if self.is_main_process:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(dict(metrics), indent=2) + "\n", encoding="utf-8")
        return path

    def get_model(self) -> nn.Module:
        """Return the bare module, without what a backend or `torch.compile` has wrapped around it."""
        return unwrap(self.model)

    unwrap_model = get_model

    def stop(self, reason: str = "requested") -> None:
        """Ask for the end of the run at the next step boundary; the first reason is the one that counts."""
        if reason not in STOP_REASONS:
            logger.info("The run was asked to stop: %s", reason)
            reason = "requested"
        self.control.stop = self.control.stop or reason

    def request_evaluate(self) -> None:
        """Ask for an evaluation at the next step boundary."""
        if not self._has_eval:
            raise ConfigError("An evaluation was requested, but there is no evaluation set. Pass `eval_dataset`.")
        self.control.evaluate = True

    def request_log(self) -> None:
        """Ask for a row of logs at the next step boundary."""
        self.control.log = True

    @property
    def objective(self) -> Objective:
        """What evaluations are judged by."""
        return self.lifecycle.objective

    @property
    def metrics(self) -> MetricsDict:
        """History and best of the run."""
        return self.lifecycle.metrics

    @property
    def stop_reason(self) -> str:
        """Why the run is ending or has ended; empty while nothing ends it."""
        return self.lifecycle.stop or self.control.stop

    @property
    def is_main_process(self) -> bool:
        """Whether this process is the one that prints and writes."""
        return self.ranks.is_main

    def _loader_for(self, dataset: Any) -> Any:
        """Return the loader of a set to evaluate; the constructor's own keep theirs, so workers start only once."""
        for own, loader in ((self.eval_dataset, self.eval_loader), (self.test_dataset, self.test_loader)):
            if dataset is own:
                return loader
        return self._evaluation_loader(dataset, None, "dataset")
