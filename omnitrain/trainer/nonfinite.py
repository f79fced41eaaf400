"""Reports of losses and gradients that are not finite."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from omnitrain.core.errors import NonFiniteError, Tolerance, format_list
from omnitrain.core.files import replace_file
from omnitrain.optim.sparse_gradients import stored_values
from omnitrain.trainer.evaluation import Evaluation
from omnitrain.trainer.hooks import Hooks


class WindowPosition(NamedTuple):
    """The position of a window in the run, from which its samples can be named later."""

    step: int
    epoch: int
    position: int
    samples: int


def nonfinite_error(trainer: Hooks, loader: Any, place: WindowPosition) -> NonFiniteError:
    """Return the error for a window that is not finite, and write `nonfinite.json` to the folder of the run, if any."""
    # then computing a gradient needs all ranks too
    checks = (_is_bad,) if trainer.backend.forward_is_collective else (_is_bad, _has_bad_gradient)
    indices = _suspects(trainer, loader, place.epoch, place.position, place.samples, checks)
    rank = trainer.ranks.data.rank
    _report(trainer, {**place._asdict(), "rank": rank, "sample_indices": indices})
    which = f" It comes from these samples of the training set: {format_list(indices)}." if indices else ""
    return NonFiniteError(
        f"The loss or a gradient is not finite at step {place.step} (epoch {place.epoch + 1}, rank {rank})."
        f"{which} The weights were not updated by it. Look at these samples, lower the learning rate, or pass "
        "on_nonfinite='skip'."
    )


def evaluation_error(evaluation: Evaluation, loader: Any, loss: float, step: int) -> NonFiniteError:
    """Return the error for a set whose loss is not finite, and write `nonfinite.json` to the folder of the run, if any.

    The evaluation goes through the set again up to the first bad batch.
    """
    trainer, number = evaluation.trainer, None
    with trainer.backend.eval_mode(trainer.settings.seed):
        for place, (batch, _) in enumerate(evaluation.feed.lockstep_batches(loader)):
            if any(trainer.ranks.sum("the search for a loss that is not finite", _is_bad(trainer, batch))):
                number = place
                break
    sampler, indices = getattr(loader, "sampler", None), []
    if number is not None and sampler is not None:
        first, end = sampler.rounds.start(number), sampler.rounds.start(number + 1)
        indices = _suspects(trainer, loader, 0, first, end - first, (_is_bad,))
    _report(trainer, {"step": step, "set": loader.name, "batch": number, "sample_indices": indices})
    which = "" if number is None else f" It comes from batch {number + 1} of it."
    if indices:
        which = f" It comes from these samples of it: {format_list(indices)}."
    return NonFiniteError(
        f"The loss of {loader.name} is {loss} at step {step}.{which} Look at these samples, or pass "
        "on_nonfinite='skip' to continue without such an evaluation."
    )


def _report(trainer: Hooks, report: dict[str, Any]) -> None:
    if trainer.settings.save_dir is not None and trainer.ranks.is_main:
        save_dir = Path(trainer.settings.save_dir)
        with Tolerance("nonfinite.json", "Its content is in the error that follows."):
            save_dir.mkdir(parents=True, exist_ok=True)
            replace_file(save_dir / "nonfinite.json", (json.dumps(report, indent=2) + "\n").encode())


def _suspects(
    trainer: Hooks, loader: Any, epoch: int, position: int, samples: int, checks: Sequence[Callable[[Hooks, Any], bool]]
) -> list[int]:
    """Return the indices of the samples that fail the first check that any of them fails, or of all samples."""
    sampler, fetch = getattr(loader, "sampler", None), getattr(loader, "fetch", None)
    if sampler is None or fetch is None:
        return []  # samples of a stream or of the user's own loader have no indices
    window = sampler.samples(epoch, position, position + samples)
    for is_bad in checks:
        try:
            with trainer.backend.eval_mode(trainer.settings.seed):
                bad = [int(index) for index in window if is_bad(trainer, fetch(epoch, np.array([index])))]
        except Exception:  # the model cannot process a single sample: report the full window
            break
        if bad:
            return bad
    return window.tolist()


def _is_bad(trainer: Hooks, batch: Any) -> bool:
    weight, batch = trainer._weigh(batch), trainer._prepare_batch(batch)
    with trainer._autocast():
        loss = trainer.backend.forward(trainer._forward, batch).loss
    return loss is not None and bool(weight) and not math.isfinite(float(loss))


def _has_bad_gradient(trainer: Hooks, batch: Any) -> bool:
    """Whether a batch with a finite loss has a gradient that is not finite; all weights must be on this rank."""
    batch = trainer._prepare_batch(batch)
    with torch.enable_grad(), trainer._autocast():
        loss = trainer._forward(trainer.backend.model, batch).loss  # without DDP, which would wait for all ranks
    if loss is None or not loss.requires_grad:
        return False
    trained = [parameter for parameter in trainer.backend.model.parameters() if parameter.requires_grad]
    gradients = torch.autograd.grad(loss, trained, allow_unused=True)
    return not all(gradient is None or bool(stored_values(gradient).isfinite().all()) for gradient in gradients)
