"""Arguments of callbacks and loggers are validated."""

from typing import Any

import pytest
from accelerate.tracking import GeneralTracker

import omnitrain
from omnitrain import ConfigError, Distributions, HookCallback, MemoryMonitor, Periodic, Preview, TimeLimit, Tracking


class Service(GeneralTracker):
    name, requires_logging_directory, tracker = "service", False, None


def rows(name: str, message: str, *values: tuple[str, Any]) -> list[tuple[Any, dict[str, Any], str]]:
    """Return the rows for single arguments, whose name is {} in the message."""
    return [(getattr(omnitrain, name), {option: value}, message.format(option)) for option, value in values]


WORK = {"function": print, "every": 1}
HOOK = r"The hook on_epoch_end is called with trainer, epoch, got .*\(a, b, c\)"


@pytest.mark.parametrize(("kind", "options", "message"), [
    *rows("EarlyStopping", "{}", *(("patience", value) for value in (0, -2, 1.5, True, "3", "-1ep")), ("stopper", 3)),
    *rows("GarbageCollection", "{}", ("every", 0), ("every", "1h"), ("every", "0.1dur")),
    *rows("GradientCheck", "{}", ("every", 0), ("every", "1h"), ("every", "0.1dur")),
    *rows("GarbageCollection", "{}", ("generation", 3), ("generation", True)),
    *rows("Profiler", "`{}` must be an integer of at least", ("skip", -1), ("wait", 0.5), ("warmup", True)),
    *rows("Profiler", "`{}` must be an integer of at least", ("active", 0), ("repeat", -2), ("rows", 0)),
    *rows("Profiler", "`{}` must be an integer.*, got one of more than 40 digits", ("skip", 10**5000)),
    *rows("Throughput", "`{}` must be", ("window", 0), ("window", 1.5), ("window", True), ("flops", -1), ("peak", "1")),
    *rows("ProgressBar", "`{}` must be a positive duration", *(("every", value) for value in ("25", 0, "fast", -3))),
    *rows("TimeLimit", "{}", ("limit", 0)),
    *rows("Trace", "{}", ("every", 0)),
    (TimeLimit, {"limit": "3ep"}, "`limit` must be a time"), (TimeLimit, {"limit": "1h", "margin": "x"}, "margin"),
    (TimeLimit, {"limit": "2m"}, "`limit='2m'` is not longer than `margin='2m'`"),
    (Distributions, {"of": ("weigths",)}, r"`of` must hold some of 'weights', .*Did you mean 'weights'"),
    (Distributions, {"bins": 3}, "`bins` must be an even number"),
    (MemoryMonitor, {"folder": "traces"}, "is for snapshots"),
    (Periodic, {**WORK, "on_error": "warm"}, "`on_error` must be one of 'raise', 'warn', 'disable', got 'warm'"),
    (Periodic, {**WORK, "timeout": "3ep"}, "`timeout` must be a time"),
    (Preview, {"prompts": "text", "every": 1}, "`prompts` must be a list"),
    (Tracking, {"tracker": Service(), "tags": ["a"]}, "no options with a tracker,"),
    (Tracking, {"tracker": Service(), "every": "often"}, "every"),
    (HookCallback, {"hooks": {"on_epoch_end": lambda a, b, c: None}}, HOOK),
    (HookCallback, {"hooks": {"on_epoch_end": 3}}, "'on_epoch_end' must be a function of the trainer, got 3"),
    (HookCallback, {"hooks": omnitrain.TrainHook}, r"Pass an instance, such as HookCallback\(MyHook\(\)\)"),
])  # fmt: skip
def test_arguments_are_validated(kind: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        kind(**options)
