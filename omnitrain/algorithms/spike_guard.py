"""SpikeGuard: samples of a step with a loss spike are left out."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal

from omnitrain.core.errors import ConfigError, check_choice, check_number
from omnitrain.core.events import Algorithm, TrainerLike

# Of a normal distribution, the standard deviation divided by the median absolute deviation.
_DEVIATION_PER_MAD = 1.4826
# The smallest deviation, as a share of the median: a loss that hardly varies has no spike at the least change.
_SMALLEST_DEVIATION = 0.01
# A gradient norm that is at most this many times the largest of the latest ones only grows, as at the end of the
# plateau that many runs begin with: far above the median of the window, but with no sample to blame.
_GROWTH, _LATEST = 1.75, 8
# The least values whose deviation says anything.
_LEAST = 6

LOSS, NORM = "loss", "grad_norm"


@dataclass(frozen=True, slots=True)
class Spike:
    """A step whose loss or gradient norm is far above those before it.

    Attributes:
        step: The number of the step, from 1 on.
        epoch: The number of its epoch, from 0 on.
        start: The position in the epoch, in samples, at which the step begins.
        stop: The position after it.
        kind: "loss" or "grad_norm".
        value: The value.
        limit: What it could have been at most.
    """

    step: int
    epoch: int
    start: int
    stop: int
    kind: str
    value: float
    limit: float

    def to_dict(self) -> dict[str, Any]:
        """Return it as values of strict JSON: a value that is not finite as text."""
        entries = asdict(self)
        return {
            name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in entries.items()
        }

    def __str__(self) -> str:
        """Return it as text."""
        name = "loss" if self.kind == LOSS else "gradient norm"
        above = f", above {self.limit:.4g}" if math.isfinite(self.value) else ""
        return f"the {name} of step {self.step} (epoch {self.epoch + 1}) is {self.value:.4g}{above}"


class SpikeGuard(Algorithm):
    """Leaves out the samples of steps whose loss or gradient norm spikes, and trains as if the data never had them.

    A step spikes if its loss or norm is not finite, or lies more than `threshold` deviations above the median of the
    last `window` steps, the deviation being 1.4826 times the median absolute deviation, and at least 1 % of the
    median; a norm also above 1.75 times the largest of the last 8, as norms grow early in a run. Judging begins
    with 6 values, or a quarter of a window above 24.

    "rewind" restores the newest checkpoint, or copy in memory, from before the step, and trains from there without its
    samples: bit for bit the run of data that never had them, up to the counts of samples and epochs. Steps are judged
    at most 16 steps late, so that no step waits for the device, and always before a log, an evaluation or a checkpoint.
    "skip" leaves out the update of the step, and "stop" ends the run as well; both wait for the device in each step.

    A spike is logged, written to `run.json` with its samples, and counted in `metrics["left_out_samples"]`.
    Checkpoints have what is left out, so a resumed run leaves out the same.

    Args:
        threshold: Deviations above the median from which on a value is a spike.
        window: Steps that a value is compared with, at least 8.
        action: "rewind", "skip" or "stop".
        every: Steps between copies of the run's state in host memory, from which "rewind" starts; None starts from
            checkpoints, and before the first one from a copy of the beginning.
        limit: Rewinds in a row, less than a quarter of `window` apart, after which the next spike is an error.

    Raises:
        ConfigError: If an argument is wrong; before the first step, under DeepSpeed, in a custom `_train_epoch`, or for
            "rewind" without `save_dir` and `every`.
        NonFiniteError: If a run spikes again after `limit` rewinds in a row.

    >>> SpikeGuard(threshold=6.0, every=50).action
    'rewind'
    """

    asks_alone = False
    conflicts: ClassVar[Collection[str]] = ("SpikeGuard",)

    def __init__(
        self,
        threshold: float = 8.0,
        window: int = 100,
        action: Literal["rewind", "skip", "stop"] = "rewind",
        every: int | None = None,
        limit: int = 3,
    ) -> None:
        check_number("threshold", threshold, above=0)
        check_number("window", window, least=8, is_whole=True)
        check_choice("action", action, ("rewind", "skip", "stop"))
        check_number("limit", limit, least=1, is_whole=True)
        if every is not None:
            check_number("every", every, least=1, is_whole=True)
            if action != "rewind":
                raise ConfigError(f"`every={every}` has no effect with action={action!r}. Leave it out.")
        self.threshold = threshold
        self.window = window
        self.action: str = action
        self.every = every
        self.limit = limit
        self.needs: Collection[str] = ("rewinding" if action == "rewind" else "skipping",)
        self.left_out: list[Spike] = []
        """The steps of the run whose samples are left out."""
        self._recent: dict[str, deque[float]] = {kind: deque(maxlen=window) for kind in (LOSS, NORM)}

    def set_up(self, trainer: TrainerLike) -> None:
        self.left_out = []
        for values in self._recent.values():
            values.clear()
        settings = trainer.settings
        if self.action != "rewind" or self.every is not None:
            return
        if settings.save_dir is None or settings.save_only_model:
            reason = "no `save_dir`" if settings.save_dir is None else f"save_only_model={settings.save_only_model!r}"
            raise ConfigError(
                f"SpikeGuard(action='rewind') goes back to a checkpoint, and the run has {reason}. Pass `every`, the "
                "steps between copies in memory, or action='skip'."
            )

    def find_spike(self, position: Mapping[str, int], loss: float, norm: float) -> Spike | None:
        """Return the spike if the next step is one, given its position; otherwise its values count from then on."""
        for kind, value in ((LOSS, loss), (NORM, norm)):
            limit = self._limit(kind)
            if not value <= limit or not math.isfinite(value):  # NaN is not below anything
                return Spike(**position, kind=kind, value=value, limit=limit)
        self._recent[LOSS].append(loss)
        self._recent[NORM].append(norm)
        return None

    def _limit(self, kind: str) -> float:
        values = self._recent[kind]
        if len(values) < max(self.window // 4, _LEAST):
            return math.inf
        median = statistics.median(values)
        deviation = _DEVIATION_PER_MAD * statistics.median(abs(value - median) for value in values)
        deviation = max(deviation, _SMALLEST_DEVIATION * abs(median))
        limit = median + self.threshold * deviation if deviation else math.inf
        return max(limit, _GROWTH * max(itertools.islice(reversed(values), _LATEST))) if kind == NORM else limit

    def is_left_out(self, epoch: int, start: int, stop: int) -> bool:
        """Return whether any sample at these positions of an epoch is left out."""
        return any(spike.epoch == epoch and spike.start < stop and start < spike.stop for spike in self.left_out)

    @property
    def left_out_samples(self) -> int:
        """How many samples are left out."""
        return sum(spike.stop - spike.start for spike in self.left_out)

    def state_dict(self) -> dict[str, Any]:
        recent = {kind: list(values) for kind, values in self._recent.items()}
        return {"left_out": [asdict(spike) for spike in self.left_out], "recent": recent}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.left_out = [Spike(**spike) for spike in state["left_out"]]
        self._recent = {kind: deque(map(float, state["recent"][kind]), self.window) for kind in (LOSS, NORM)}
