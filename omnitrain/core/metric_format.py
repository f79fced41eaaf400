"""Display of metrics: title, unit, format and order.

The console, tables, CSV columns and plots use it. `objective.py` decides which evaluation is the best.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from omnitrain.core.errors import ConfigError

_PREFIXES = ("eval_", "test_", "train_")


def bare_name(name: str) -> str:
    """Return a metric's name without `eval_`, `test_` or `train_`."""
    return next((name.removeprefix(prefix) for prefix in _PREFIXES if name.startswith(prefix)), name)


@dataclass(frozen=True, slots=True)
class MetricDescriptor:
    """The display of a value.

    Args:
        title: Its name on the console; None is its name in the row, "" omits it, if the unit is enough.
        unit: Written after the value, such as "tok/s".
        format: A format of Python for the value, such as ".4g" or ".1%".
        order: Values are shown in ascending order, then as they come; those without a descriptor have 50.
        higher_is_better: Whether it is, if `optimization_direction` and the metric itself do not.
    """

    title: str | None = None
    unit: str = ""
    format: str = ".4g"
    order: int = 50
    higher_is_better: bool | None = None


_PLAIN = MetricDescriptor()
_KNOWN: dict[str, MetricDescriptor] = {
    "step": MetricDescriptor(format=".0f", order=0),
    "epoch": MetricDescriptor(format=".2f", order=1),
    "loss": MetricDescriptor(order=10),
    "learning_rate": MetricDescriptor("lr", format=".2e", order=60),
    "grad_norm": MetricDescriptor(format=".3g", order=61),
    "samples_per_second_per_device": MetricDescriptor("", "samples/s/device", order=71),
    "tokens_per_second_per_device": MetricDescriptor("", "tokens/s/device", order=72),
    "tflops_per_device": MetricDescriptor("", "TFLOP/s/device", order=73),
    "mfu": MetricDescriptor("MFU", format=".1%", order=74),
    "hfu": MetricDescriptor("HFU", format=".1%", order=75),
    "data_share": MetricDescriptor("data", format=".1%", order=76),
    "waiting_share": MetricDescriptor("waiting", format=".1%", order=77),
    "goodput": MetricDescriptor(format=".1%", order=78),
}


# The names passed to `describe_metric`.
_DESCRIBED: set[str] = set()


def describe_metric(name: str, descriptor: MetricDescriptor) -> None:
    """Set how values of a name are shown in this process, with or without `eval_`, `test_` or `train_` before it.

    Raises:
        ConfigError: If the format is not one of Python for numbers.

    >>> describe_metric("wer", MetricDescriptor("WER", unit="%", format=".1f", order=11))
    >>> format_metric("eval_wer", 12.34)
    'eval WER 12.3 %'
    """
    try:
        format(1.0, descriptor.format)
    except ValueError as error:
        raise ConfigError(
            f"{descriptor.format!r} is no format for a number, such as '.4g', '.2e' or '.1%': {error}."
        ) from error
    _KNOWN[bare_name(name)] = descriptor
    _DESCRIBED.add(bare_name(name))


def get_descriptor(name: str) -> MetricDescriptor:
    """Return the display of the values of a name."""
    known = _KNOWN.get(bare_name(name))
    if known is None and name.endswith("_per_second"):
        known = MetricDescriptor("", name.removesuffix("_per_second") + "/s", order=70)
    if known is None and name.startswith("memory_"):
        known = MetricDescriptor(name.replace("_", " "), "GiB", ".2f", order=80)
    return known or _PLAIN


def is_described(name: str) -> bool:
    """Return whether the name was passed to `describe_metric`."""
    return bare_name(name) in _DESCRIBED


def format_title(name: str) -> str:
    """Return the title of a column or an axis: the name of a value, or what `describe_metric` calls it, with its unit.

    >>> describe_metric("cer", MetricDescriptor("CER", unit="%", format=".1f"))
    >>> format_title("eval_cer"), format_title("eval_accuracy")
    ('eval CER (%)', 'eval_accuracy')
    """
    descriptor, bare = get_descriptor(name), bare_name(name)
    if not is_described(name):
        return name
    title = f"{name.removesuffix(bare).replace('_', ' ')}{descriptor.title}" if descriptor.title else name
    return f"{title} ({descriptor.unit})" if descriptor.unit else title


def sort_for_display(values: Mapping[str, float]) -> dict[str, float]:
    """Return values in their display order."""
    names: Iterable[str] = sorted(values, key=lambda name: get_descriptor(name).order)
    return {name: values[name] for name in names}


def format_metric(name: str, value: float) -> str:
    """Return a value with its title and unit.

    >>> format_metric("loss", 0.51234), format_metric("samples_per_second", 20860.5)
    ('loss 0.5123', '20860 samples/s')
    """
    descriptor = get_descriptor(name)
    bare = bare_name(name)
    title = bare if descriptor.title is None else descriptor.title
    before = name.removesuffix(bare) if title == bare else name.removesuffix(bare).replace("_", " ")
    # ".4g" writes 20860 as 2.086e+04, which nobody reads
    form = ".0f" if descriptor.format == ".4g" and 1e4 <= abs(value) < 1e9 else descriptor.format
    return " ".join(f"{before}{title} {format(value, form)} {descriptor.unit}".split())


def to_python_scalar(value: Any) -> Any:
    """Return a number or a bool of NumPy as one of Python, and any other value unchanged."""
    is_scalar = type(value).__module__ == "numpy" and getattr(value, "shape", None) == () and hasattr(value, "dtype")
    return value.item() if is_scalar else value
