"""Columns of Hugging Face datasets: those that nothing in a run takes are left out."""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Any

from omnitrain.data.collation import LABEL_KEYS

__all__ = ["Columns", "is_of_user"]

logger: logging.Logger = logging.getLogger("omnitrain")


class Columns:
    """Leaves the columns out that a model does not take, and says which.

    Args:
        taken: The columns that are used, labels included; None if any may be.
    """

    def __init__(self, taken: Collection[str] | None) -> None:
        self._taken = taken
        self._told: list[set[str]] = []

    def __call__(self, dataset: Any) -> Any:
        """Return a Hugging Face dataset without the others; anything else, and one with a transform, as it is."""
        columns = getattr(dataset, "column_names", None)
        if self._taken is None or not columns or not hasattr(dataset, "remove_columns"):
            return dataset
        if (getattr(dataset, "format", None) or {}).get("type") == "custom":
            return dataset  # `set_transform` makes of them what the model takes
        unused = {name for name in columns if name not in self._taken}
        if not unused or set(columns) - unused <= {*LABEL_KEYS}:
            return dataset  # nothing would be left for the model, which says best what it lacks
        if unused not in self._told:
            self._told.append(unused)
            names = ", ".join(map(repr, sorted(unused)))
            logger.warning("Columns that the model's forward() does not take are left out of the data: %s.", names)
        return dataset.remove_columns(sorted(unused))


def is_of_user(value: Any) -> bool:
    """Return whether a function or object is of the user's own making, and may look at any column."""
    module = getattr(value, "__module__", None) or ""
    return value is not None and module.partition(".")[0] not in ("omnitrain", "transformers")
