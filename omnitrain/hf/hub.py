"""Uploads to the Hub by transformers' Trainer.

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
from omnitrain.trainer.base import BaseTrainer

logger: logging.Logger = logging.getLogger("omnitrain")

# Files of a run that are not uploaded: they have command lines, hosts and paths, and a repository may be public.
EXCLUDED_FILES = (
    RUN_FILE, CONFIG_FILE, LOCK, "metrics.jsonl", "metrics.csv", "nonfinite.json", "tracking-*.json", "profile/*",
    "memory/*", "*.tmp",
)  # fmt: skip


class HubTrainer(transformers.Trainer):
    """transformers' Trainer, which uploads complete checkpoints and the user's arguments."""

    trainer: BaseTrainer
    training_args: transformers.TrainingArguments | None
    callback_args: transformers.TrainingArguments
    # Whether the user set an output folder, from which a model on the Hub gets its name.
    _has_output_dir = True
    # The checkpoint that was uploaded last.
    _uploaded_checkpoint: Path | None = None

    @contextlib.contextmanager
    def expose_run_args(self) -> Iterator[transformers.TrainingArguments]:
        """Use the arguments of the run inside, for transformers to write; its loop has others."""
        trainer, engine_args = self.trainer, self.args
        run_args = copy.copy(self.callback_args)
        run_args.output_dir, run_args._n_gpu = engine_args.output_dir, engine_args.n_gpu
        run_args.per_device_train_batch_size = trainer.batch_size
        run_args.per_device_eval_batch_size = trainer.eval_batch_size
        run_args.gradient_accumulation_steps = trainer.gradient_accumulation_steps
        self.args: Any = run_args
        try:
            yield run_args
        finally:
            self.args = engine_args

    @property
    def saved_processor(self) -> Any:
        """The processor saved with the model: `processing_class`, or otherwise the collator's tokenizer."""
        return self.processing_class or getattr(self.data_collator, "tokenizer", None)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the model as transformers does, except for sharded weights, which our trainer gathers."""
        if self.trainer.backend.sharding is None:
            super().save_model(output_dir, _internal_call)
        else:
            path = Path(output_dir or str(self.args.output_dir))
            self.trainer._write_model(path, True, self.saved_processor)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        with self.expose_run_args() as run_args:
            check_not_link(Path(str(run_args.output_dir)) / "README.md")
            super().create_model_card(*args, **kwargs)
            if self.is_world_process_zero():
                self._write_total_batch_size(Path(str(run_args.output_dir)) / "README.md", run_args)

    def _write_total_batch_size(self, card: Path, run_args: transformers.TrainingArguments) -> None:
        """Write the samples per step into the card, unless they are the product of its batch sizes."""
        step = samples_of_step(self.trainer.settings, self.trainer._sets.share.size)
        product = run_args.train_batch_size * run_args.world_size * run_args.gradient_accumulation_steps
        if step == product or not card.is_file():
            return
        text, line = card.read_text(encoding="utf-8"), f"- total_train_batch_size: {step}"
        text, replacements = re.subn("^- total_train_batch_size: .*$", line, text, count=1, flags=re.MULTILINE)
        if not replacements:
            text = re.sub("^(- train_batch_size: .*)$", rf"\1\n{line}", text, count=1, flags=re.MULTILINE)
        card.write_text(text, encoding="utf-8")

    @contextlib.contextmanager
    def _exclude_run_files(self) -> Iterator[None]:
        """Limit transformers' uploads to the files that its own Trainer writes; a link is an error."""
        for path in Path(str(self.args.output_dir)).glob("*.*"):
            if path.is_symlink():
                check_not_link(path)
        module: Any = transformers.trainer
        name = "hf_api" if hasattr(module, "hf_api") else "upload_folder"  # the second in older versions
        original = getattr(module, name)

        def upload_folder(*, ignore_patterns: Any = None, **options: Any) -> Any:
            patterns = [ignore_patterns] if isinstance(ignore_patterns, str) else list(ignore_patterns or ())
            upload = original().upload_folder if name == "hf_api" else original
            return upload(ignore_patterns=[*patterns, *EXCLUDED_FILES], **options)

        def limited_api() -> Any:
            api = copy.copy(original())
            api.upload_folder = upload_folder
            return api

        setattr(module, name, limited_api if name == "hf_api" else upload_folder)
        try:
            yield
        finally:
            setattr(module, name, original)

    def push_to_hub(self, *args: Any, **kwargs: Any) -> Any:
        """Upload the current model, with a model card.

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
            logger.warning("%s could not be sent to the Hub: %s. The run continues.", folder.name, error)

    def wait_for_upload(self, folder: Path) -> None:
        """Wait for an upload whose files the next checkpoint will replace or delete."""
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
