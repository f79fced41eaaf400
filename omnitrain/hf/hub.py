"""Uploads to the Hub by transformers' Trainer: when, and with which arguments.

`checkpoint/contents.py` and `files.py` have the contents of a checkpoint.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import transformers
from transformers.trainer_utils import HubStrategy

from omnitrain.arguments import samples_of_step
from omnitrain.checkpoint.lock import LOCK
from omnitrain.checkpoint.run_record import CONFIG_FILE, RUN_FILE
from omnitrain.core.errors import ConfigError
from omnitrain.core.files import check_not_link
from omnitrain.hf.files import write_model
from omnitrain.trainer.base import BaseTrainer

logger: logging.Logger = logging.getLogger("omnitrain")

EXCLUDED_FILES = (
    RUN_FILE, CONFIG_FILE, LOCK, "metrics.jsonl", "metrics.csv", "nonfinite.json", "tracking-*.json", "profile/*",
    "memory/*", "*.tmp",
)  # fmt: skip
"""Files of a run folder that stay there: they have command lines, hosts and paths, and a repository may be public."""


class _Api:
    """The Hub's API with another `upload_folder`."""

    def __init__(self, api: Any, upload_folder: Any) -> None:
        self._api = api
        self.upload_folder = upload_folder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._api, name)


class HubTrainer(transformers.Trainer):
    """transformers' Trainer, which uploads whole checkpoints and the user's own arguments."""

    trainer: BaseTrainer
    training_args: transformers.TrainingArguments | None
    callback_args: transformers.TrainingArguments
    _has_output_dir = True
    """Whether the user set an output folder, from which a model on the Hub gets its name."""
    _uploaded_checkpoint: Path | None = None
    """The checkpoint that was uploaded last."""

    @contextlib.contextmanager
    def expose_run_args(self) -> Iterator[transformers.TrainingArguments]:
        """Let transformers use the arguments of the run inside, where it writes them; its loop has others."""
        trainer, own = self.trainer, self.args
        shown = copy.copy(self.callback_args)
        shown.output_dir, shown._n_gpu = own.output_dir, own.n_gpu
        shown.per_device_train_batch_size, shown.per_device_eval_batch_size = (
            trainer.batch_size,
            trainer.eval_batch_size,
        )
        shown.gradient_accumulation_steps = trainer.gradient_accumulation_steps
        self.args: Any = shown
        try:
            yield shown
        finally:
            self.args = own

    @property
    def saved_processor(self) -> Any:
        """What is saved with the model: the tokenizer or processor, or otherwise the collator's tokenizer."""
        return self.processing_class or getattr(self.data_collator, "tokenizer", None)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the model as transformers does, except for sharded weights, which our trainer gathers."""
        if self.trainer.backend.sharding is None:
            super().save_model(output_dir, _internal_call)
        else:
            path = Path(output_dir or str(self.args.output_dir))
            write_model(self.trainer, self.saved_processor, path, overwrite=True)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        with self.expose_run_args() as shown:
            check_not_link(Path(str(shown.output_dir)) / "README.md")
            super().create_model_card(*args, **kwargs)
            if self.is_world_process_zero():
                self._write_total_batch_size(Path(str(shown.output_dir)) / "README.md", shown)

    def _write_total_batch_size(self, card: Path, shown: transformers.TrainingArguments) -> None:
        """Write into the card how many samples a step has, where that is no product of the batch sizes in it."""
        step = samples_of_step(self.trainer.settings, self.trainer._sets.share.size)
        if step == shown.train_batch_size * shown.world_size * shown.gradient_accumulation_steps or not card.is_file():
            return
        text, line = card.read_text(encoding="utf-8"), f"- total_train_batch_size: {step}"
        text, found = re.subn("^- total_train_batch_size: .*$", line, text, count=1, flags=re.MULTILINE)
        if not found:
            text = re.sub("^(- train_batch_size: .*)$", rf"\1\n{line}", text, count=1, flags=re.MULTILINE)
        card.write_text(text, encoding="utf-8")

    @contextlib.contextmanager
    def _exclude_run_files(self) -> Iterator[None]:
        """Have transformers upload what its own Trainer would inside, and not what else a run folder has.

        Raises:
            OSError: The folder has a link to elsewhere, through which transformers would write.
        """
        for path in Path(str(self.args.output_dir)).glob("*.*"):
            if path.is_symlink():
                check_not_link(path)
        module: Any = transformers.trainer
        name = "hf_api" if hasattr(module, "hf_api") else "upload_folder"  # the second in older versions
        before = getattr(module, name)

        def upload_folder(*, ignore_patterns: Any = None, **options: Any) -> Any:
            patterns = [ignore_patterns] if isinstance(ignore_patterns, str) else list(ignore_patterns or ())
            upload = before().upload_folder if name == "hf_api" else before
            return upload(ignore_patterns=[*patterns, *EXCLUDED_FILES], **options)

        setattr(module, name, (lambda: _Api(before(), upload_folder)) if name == "hf_api" else upload_folder)
        try:
            yield
        finally:
            setattr(module, name, before)

    def push_to_hub(self, *args: Any, **kwargs: Any) -> Any:
        """Upload the model as it is now, with a model card.

        Raises:
            ConfigError: If the model has no name.
        """
        if self.hub_model_id is None and self.args.hub_model_id is None and not self._has_output_dir:
            raise ConfigError(
                "The model has no name on the Hub. Pass training_args=TrainingArguments(..., hub_model_id='me/model')."
            )
        with self.expose_run_args(), self._exclude_run_files():
            return super().push_to_hub(*args, **kwargs)

    def push_checkpoint(self, folder: Path) -> None:
        """Upload a checkpoint in the background, as `hub_strategy` says; the last one of a run in any case."""
        if self.trainer.lifecycle.is_closing:
            if self.trainer.lifecycle.stop == "signal":
                return  # there is little time after a signal
            self._finish_current_push()  # otherwise this upload would be skipped
        self._warn_failed_pushes()
        self._uploaded_checkpoint = folder
        try:
            with self.expose_run_args(), self._exclude_run_files():
                self._push_from_checkpoint(str(folder))
        except Exception as error:  # from the network, or the disk of a copy: the checkpoint itself is safe
            if self.trainer.settings.save_required:
                raise
            logger.warning("%s could not be sent to the Hub: %s. The run goes on.", folder.name, error)

    def wait_for_upload(self, folder: Path) -> None:
        """Wait for an upload that reads what the next checkpoint will replace or delete."""
        if self.args.hub_strategy not in (HubStrategy.CHECKPOINT, HubStrategy.ALL_CHECKPOINTS):
            return  # for other strategies a copy is uploaded
        if self._uploaded_checkpoint == folder or self.trainer.settings.save_total_limit is not None:
            self._finish_current_push()

    def _finish_current_push(self) -> None:
        super()._finish_current_push()
        self._warn_failed_pushes()

    def _warn_failed_pushes(self) -> None:
        """Warn about failed uploads, which transformers does not."""
        jobs: list[Any] = getattr(getattr(self, "push_in_progress", None), "jobs", [])
        for job in [job for job in jobs if job.done() and job.exception() is not None]:
            jobs.remove(job)
            logger.warning("An upload to the Hub has failed: %s. The files are in this run's folder.", job.exception())
