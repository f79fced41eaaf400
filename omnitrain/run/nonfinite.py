"""The report on a NaN or infinity: which samples it came from. Its detection is in `finite.py`."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from omnitrain.errors import NonFiniteError
from omnitrain.run.evaluation import evaluating
from omnitrain.run.hooks import Hooks

__all__ = ["Place", "nonfinite_error"]


class Place(NamedTuple):
    """Where in the run a window was: enough to name its samples later."""

    step: int
    epoch: int
    position: int
    samples: int


def nonfinite_error(hooks: Hooks, loader: Any, save_dir: Path | None, place: Place) -> NonFiniteError:
    """Return the error for a window that is not finite, and leave `nonfinite.json` in `save_dir`.

    Args:
        hooks: The trainer's, to run single samples forward.
        loader: The loader of the training set.
        save_dir: The folder of the run; None writes no file.
        place: Where the window was.
    """
    indices, rank = _suspects(hooks, loader, place), hooks.ranks.rank
    if save_dir is not None and hooks.ranks.is_main:
        save_dir.mkdir(parents=True, exist_ok=True)
        report = {**place._asdict(), "rank": rank, "sample_indices": indices}
        (save_dir / "nonfinite.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    shown = ", ".join(map(str, indices[:20])) + (", ..." if len(indices) > 20 else "")
    which = f" It comes from these samples of the training set: {shown}." if indices else ""
    return NonFiniteError(
        f"The loss or a gradient is not finite at step {place.step} (epoch {place.epoch + 1}, rank {rank})."
        f"{which} The weights were not updated by it. Look at these samples, lower the learning rate, or pass "
        "on_nonfinite='skip'."
    )


def _suspects(hooks: Hooks, loader: Any, place: Place) -> list[int]:
    """Return the indices of the window's samples that are not finite by themselves, else of all its samples."""
    sampler, fetch = getattr(loader, "sampler", None), getattr(loader, "fetch", None)
    if sampler is None or fetch is None:
        return []  # a stream or a user's own loader: its samples have no indices
    window = sampler.order(place.epoch)[place.position : place.position + place.samples]
    bad = []
    with evaluating(hooks):
        for index in window:
            try:
                batch = hooks._prepare_batch(fetch(place.epoch, np.array([index])))
                with hooks._autocast():
                    loss = hooks.backend.forward(hooks._forward, batch).loss
                if loss is not None and hooks._weigh(batch) and not math.isfinite(float(loss)):
                    bad.append(int(index))
            except Exception:  # a model that cannot take one sample by itself: then the whole window is named
                return window.tolist()
    return bad or window.tolist()
