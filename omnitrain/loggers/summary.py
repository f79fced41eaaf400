"""First and last lines of a run on the console.

Only text, which `progress_bar.py` and `notebook.py` show; ASCII, for every console.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any

from omnitrain.arguments import Settings
from omnitrain.callbacks.early_stopping import EarlyStopping
from omnitrain.compute.device_runtime import device_runtime
from omnitrain.core.duration import IntervalRule, parse_interval
from omnitrain.core.events import TrainerLike
from omnitrain.core.metric_format import format_metric

_REASONS = {
    "epochs": "all epochs are done",
    "max_steps": "max_steps is reached",
    "max_duration": "max_duration is reached",
    "early_stopping": "early stopping",
    "requested": "a stop was requested",
}


def opening(trainer: TrainerLike, is_start: bool = True) -> list[str]:
    """Return three lines: the model and device, the length and optimizer, and the files of a run.

    A trainer without training data has only the first line. `is_start` says that a run starts, either resumed or fresh.
    """
    config = trainer.resolved_config()
    line = _model_line(trainer, config)
    if config["optimizer"] is None:
        return [line]
    return [line, _length_line(trainer, config), _files_line(trainer, is_start)]


def closing(trainer: TrainerLike, error: BaseException | None = None) -> str:
    """Return a line with the reason for the end of a run, its best evaluation, its checkpoint, and how to continue."""
    lifecycle, progress = trainer.lifecycle, trainer.progress
    is_signal = trainer.stop_reason == "signal"
    if error is not None:
        reason = type(error).__name__
    elif is_signal:
        reason = signal.Signals(lifecycle.signal).name if lifecycle.signal else "a signal"
    else:
        reason = _REASONS.get(trainer.stop_reason, trainer.stop_reason or "the end")
    parts = [f"{reason} at step {progress.step}, epoch {progress.epochs:.2f}, after {clock(progress.seconds)}"]
    metrics, best = trainer.metrics, trainer.metrics["best_valid"]
    if best and "best_step" in metrics:
        key = trainer.objective.key(best)
        place = f", {metrics['best_checkpoint']}" if "best_checkpoint" in metrics else ""
        parts.append(f"best: {format_metric(key, best[key])} at step {metrics['best_step']}{place}")
    saved = lifecycle.saved_path or lifecycle.resumed_from
    keeps_all = trainer.settings.save_only_model is not True
    if saved is not None:
        parts.append(f"{'saved in' if lifecycle.saved_path else 'last saved in'} {_relative_path(saved)}")
    elif is_signal or error is not None:
        parts.append("nothing is saved" + ("" if trainer.save_dir else " without save_dir"))
    outlives_signal = "ipykernel" in sys.modules or hasattr(sys, "ps1")  # the process of a notebook or a prompt
    if is_signal or error is not None or trainer.stop_reason == "requested":
        if saved is not None and keeps_all:
            parts.append('continue: trainer.train(resume_from="auto")')
        elif error is None and trainer.total_steps is not None and (not is_signal or outlives_signal):
            parts.append(f'continue: trainer.train(more="{trainer.total_steps - progress.step}ba")')
    elif keeps_all:
        parts.append("continue: trainer.train(more=1)")
    return "end    " + "; ".join(parts)


def clock(seconds: float) -> str:
    """Return hours, minutes and seconds: 1:02:03."""
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"


def position(step: float, total_steps: int | None, fraction: float) -> str:
    """Return the position of a run: "step 10/60", or "step 10 (17%)" if the total is unknown."""
    return f"step {step:.0f} ({fraction:.0%})" if total_steps is None else f"step {step:.0f}/{total_steps}"


def may_stop_early(settings: Settings) -> bool:
    """Whether `patience`, `early_stopper` or a callback may end the run early."""
    callbacks = [callback for callback in settings.callbacks if isinstance(callback, EarlyStopping)]
    stoppers = [settings.early_stopper, *(callback.stopper for callback in callbacks)]
    patiences = [settings.patience, *(callback.patience for callback in callbacks)]
    return any(patience not in (None, -1) for patience in patiences) or any(s is not None for s in stoppers)


def _model_line(trainer: TrainerLike, config: dict[str, Any]) -> str:
    counts = [0, 0]  # trained and frozen
    for parameter in trainer.model.parameters():
        full_size = getattr(parameter, "ds_numel", None)  # ZeRO 3 of DeepSpeed leaves an empty tensor
        counts[not parameter.requires_grad] += parameter.numel() if full_size is None else int(full_size)
    split = f"{counts[0]:,} trained, {counts[1]:,} frozen" if counts[1] else "all trained"
    device, name = str(trainer.device), device_runtime(trainer.device).name
    words = [device if name == trainer.device.type else f"{device} ({name})"]
    words += [f"{trainer.world_size} processes"] if trainer.world_size > 1 else []
    words.append(str(config["autocast"]))
    return f"model  {_base_name(config['model'])}, {sum(counts):,} parameters, {split}; {', '.join(words)}"


def _length_line(trainer: TrainerLike, config: dict[str, Any]) -> str:
    samples, total = config["samples_per_epoch"], trainer.total_steps
    limits = [str(IntervalRule(limit)) for limit in trainer.limits.durations if limit.unit != "ba" or total is None]
    length = " or ".join(limits)
    if total is not None:
        length = f"{total:,} steps" + (f" in {length}" if length else "")
    words = [f"{samples:,} samples" if samples else "samples as they come", length]
    optimizer = [_base_name(type(trainer.optimizer).__name__)]
    optimizer += [f"lr {group.get('initial_lr', group['lr']):.2e}" for group in trainer.optimizer.param_groups[:1]]
    scheduler = getattr(trainer.lr_scheduler, "schedule", trainer.lr_scheduler)  # of `Schedule`, what the user knows
    schedule = "constant" if scheduler is None else type(scheduler).__name__
    optimizer.append(str(config["lr_scheduler"]) if isinstance(trainer.settings.lr_scheduler, str) else schedule)
    return f"train  {', '.join(words)}; {_batch_size(trainer, config)}; {', '.join(optimizer)}"


def _batch_size(trainer: TrainerLike, config: dict[str, Any]) -> str:
    size, accumulated = config["global_batch_size"], config["gradient_accumulation_steps"]
    if not isinstance(size, int):
        return f"batch {size}"
    ranks = trainer.ranks.data.size  # ranks that compute one model together have the same samples
    processes = f"{ranks} processes" if ranks == trainer.world_size else f"{ranks} groups of processes"
    factors = [str(trainer.batch_size)]
    factors += [processes] if ranks > 1 else []
    factors += [f"{accumulated} accumulated"] if accumulated > 1 else []
    largest = trainer.batch_size * ranks * accumulated
    return f"batch {size}" + (f" = {'' if largest == size else 'up to '}{' x '.join(factors)}" if factors[1:] else "")


def _files_line(trainer: TrainerLike, is_start: bool) -> str:
    lifecycle, step, interval = trainer.lifecycle, trainer.progress.step, trainer.settings.save_steps
    rules = [] if interval is None else parse_interval(interval, "save_steps")
    pace = " and ".join(f"at {rule}" if rule.is_function else f"every {rule}" for rule in rules) or "after each epoch"
    text = f"{_relative_path(trainer.save_dir)}, {pace}" if trainer.save_dir else "nothing, as there is no save_dir"
    if not is_start:
        pass
    elif lifecycle.resumed_from is not None:
        text += f"; resumed from {lifecycle.resumed_from.name} at step {step}"
    elif step:
        text += f"; continues at step {step}"
    elif steps := lifecycle.trained_before:
        text += f"; starts again from the weights of {steps} steps; train(more=...) continues instead"
    return f"save   {text}"


def _base_name(name: str) -> str:
    return name.rpartition(".")[2]


def _relative_path(path: Path) -> str:
    """Return a path relative to the current folder, if it is inside."""
    path = Path(path).absolute()
    try:
        return str(path.relative_to(Path.cwd()))
    except (ValueError, OSError):  # outside, or the current folder is gone
        return str(path)
