"""The first and last lines of a run on the console: what runs, and how it ended.

Only wording belongs here. `progress_bar.py` and `notebook.py` show it. The words are ASCII, which every console has.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from omnitrain.callbacks.early_stopping import EarlyStopping
from omnitrain.core.duration import Duration
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
    """Return three lines on the model and its device, the length and the optimizer, and the files of a run.

    A trainer that has nothing to train on has the first line alone.

    Args:
        trainer: The trainer.
        is_start: Whether a run starts, which goes on from somewhere or begins afresh.
    """
    config = trainer.resolved_config()
    line = _model_line(trainer, config)
    if config["optimizer"] is None:
        return [line]
    return [line, _length_line(trainer, config), _files_line(trainer, config, is_start)]


def closing(trainer: TrainerLike, error: BaseException | None = None) -> str:
    """Return a line on why a run ended, its best evaluation, where it is saved, and how to go on.

    Args:
        trainer: The trainer, at the end of the run.
        error: What ended it, if that was an error.
    """
    lifecycle, progress = trainer.lifecycle, trainer.progress
    is_signal = trainer.stop_reason == "signal"
    if error is not None:
        reason = type(error).__name__
    elif is_signal:
        reason = signal.Signals(lifecycle.signal).name if lifecycle.signal else "a signal"
    else:
        reason = _REASONS.get(trainer.stop_reason, trainer.stop_reason or "the end")
    parts = [f"{reason} at step {progress.step}, epoch {progress.epochs:.2f}, after {clock(progress.seconds)}"]
    parts += _best(trainer)
    saved = lifecycle.saved_path or lifecycle.resumed_from
    keeps_all = not trainer.settings.save_only_model
    if saved is not None:
        parts.append(f"{'saved in' if lifecycle.saved_path else 'last saved in'} {_place(saved)}")
    elif is_signal or error is not None:
        parts.append("nothing is saved" + ("" if trainer.save_dir else " without save_dir"))
    if is_signal or error is not None or trainer.stop_reason == "requested":
        if saved is not None and keeps_all:
            parts.append('go on: trainer.train(resume_from="auto")')
    elif keeps_all:
        parts.append("go on: trainer.train(more=1)")
    return "end    " + "; ".join(parts)


def clock(seconds: float) -> str:
    """Return hours, minutes and seconds: 1:02:03."""
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"


def position(step: float, total_steps: int | None, fraction: float) -> str:
    """Return the place of a run: "step 10/60", or "step 10 (17%)" where the steps of the run are not known."""
    return f"step {step:.0f} ({fraction:.0%})" if total_steps is None else f"step {step:.0f}/{total_steps}"


def may_stop_early(trainer: TrainerLike) -> bool:
    """Whether the run may end before its planned end, by `patience`, `early_stopper` or a callback."""
    settings = trainer.settings
    own = [one for one in settings.callbacks if isinstance(one, EarlyStopping)]
    stoppers = [settings.early_stopper, *(one.stopper for one in own)]
    patience = [settings.patience, *(one.patience for one in own)]
    return any(one not in (None, -1) for one in patience) or any(one is not None for one in stoppers)


def _model_line(trainer: TrainerLike, config: dict[str, Any]) -> str:
    trained, frozen = _parameters(trainer.model.parameters())
    weights = f"{trained + frozen:,} parameters, "
    if not frozen:
        weights += "all trained"
    else:
        weights += f"{trained:,} trained, {frozen:,} frozen"
    where = [_device(trainer), *([f"{trainer.world_size} processes"] if trainer.world_size > 1 else [])]
    return f"model  {_last(config['model'])}, {weights}; {', '.join([*where, str(config['autocast'])])}"


def _device(trainer: TrainerLike) -> str:
    name = str(trainer.device)
    if trainer.device.type != "cuda":
        return name
    import torch

    return f"{name} ({torch.cuda.get_device_name(trainer.device)})"


def _parameters(parameters: Iterable[Any]) -> tuple[int, int]:
    """Return how many numbers are trained, and how many are frozen; of sharded parameters all shards count."""
    counts = [0, 0]
    for parameter in parameters:
        sharded = getattr(parameter, "ds_numel", None)  # DeepSpeed's ZeRO 3 leaves an empty tensor
        counts[not parameter.requires_grad] += parameter.numel() if sharded is None else int(sharded)
    return counts[0], counts[1]


def _length_line(trainer: TrainerLike, config: dict[str, Any]) -> str:
    samples, total = config["samples_per_epoch"], trainer.total_steps
    ends = [_length(one) for one in trainer.limits.durations if one.unit != "ba" or total is None]
    length = " or ".join(ends)
    if total is not None:
        length = f"{total:,} steps" + (f" in {length}" if length else "")
    words = [f"{samples:,} samples" if samples else "samples as they come", length]
    optimizer = [_last(type(trainer.optimizer).__name__), *_rate(trainer)]
    optimizer.append(_schedule(trainer, config["lr_scheduler"]))
    return f"train  {', '.join(words)}; {_batch(trainer, config)}; {', '.join(optimizer)}"


def _batch(trainer: TrainerLike, config: dict[str, Any]) -> str:
    size, accumulated = config["global_batch_size"], config["gradient_accumulation_steps"]
    if not isinstance(size, int):
        return f"batch {size}"
    ranks = trainer.ranks.data.size  # those that compute one model together have the same samples
    shared = f"{ranks} processes" if ranks == trainer.world_size else f"{ranks} groups of processes"
    factors = [str(trainer.batch_size)]
    factors += [shared] if ranks > 1 else []
    factors += [f"{accumulated} accumulated"] if accumulated > 1 else []
    most = trainer.batch_size * ranks * accumulated
    return f"batch {size}" + (f" = {'' if most == size else 'up to '}{' x '.join(factors)}" if factors[1:] else "")


def _rate(trainer: TrainerLike) -> list[str]:
    """Return the learning rate that the schedule starts from."""
    for group in trainer.optimizer.param_groups:
        return [f"lr {group.get('initial_lr', group['lr']):.2e}"]
    return []


def _schedule(trainer: TrainerLike, spec: Any) -> str:
    if isinstance(trainer.settings.lr_scheduler, str):
        return str(spec)
    return "constant" if trainer.lr_scheduler is None else type(trainer.lr_scheduler).__name__


def _files_line(trainer: TrainerLike, config: dict[str, Any], is_start: bool) -> str:
    lifecycle, step = trainer.lifecycle, trainer.progress.step
    if trainer.save_dir is None:
        where = "nothing, as there is no save_dir"
    else:
        where = f"{_place(trainer.save_dir)}, {_every(config['save_steps'])}"
    if not is_start:
        pass
    elif lifecycle.resumed_from is not None:
        where += f"; resumed from {lifecycle.resumed_from.name} at step {step}"
    elif step:
        where += f"; goes on at step {step}"
    elif lifecycle.trained_before:
        where += (
            f"; begins afresh with the weights of {lifecycle.trained_before} steps, which train(more=...) would go on "
            "with"
        )
    return f"save   {where}"


def _every(steps: Any) -> str:
    if steps is None:
        return "after each epoch"
    return f"every {_length(Duration.parse(steps, 'ba', 'save_steps'))}"


def _length(duration: Duration) -> str:
    words = {"ep": "epoch", "ba": "step"}.get(duration.unit)
    if words is None:
        return str(duration)
    return f"{duration.value:,} {words}{'' if duration.value == 1 else 's'}"


def _best(trainer: TrainerLike) -> list[str]:
    metrics = trainer.metrics
    best = metrics["best_valid"]
    if not best or "best_step" not in metrics:
        return []
    key = trainer.objective.key(best)
    words = f"best: {format_metric(key, best[key])} at step {metrics['best_step']}"
    if "best_checkpoint" in metrics:
        words += f", {metrics['best_checkpoint']}"
    return [words]


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _place(path: Path) -> str:
    """Return a path from the current folder, if it is in it."""
    path = Path(path).absolute()
    try:
        return str(path.relative_to(Path.cwd()))
    except (ValueError, OSError):  # elsewhere, or the current folder is gone
        return str(path)
