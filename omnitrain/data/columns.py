"""Removal of unused columns of Hugging Face datasets."""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Any

from torch import nn

from omnitrain.data.collation import LABEL_KEYS
from omnitrain.data.grouping import GroupByLength
from omnitrain.data.packing import PackedDataset

logger: logging.Logger = logging.getLogger("omnitrain")


class Columns:
    """Drops the columns that a model does not accept, and logs which."""

    def __init__(self, used: Collection[str] | None, model: nn.Module | None = None) -> None:
        self._taken = used
        self._model = model
        self._reported: list[set[str]] = []

    def __call__(self, dataset: Any) -> Any:
        """Return a Hugging Face dataset without unused columns; one with a transform, or other data, unchanged.

        Raises:
            ConfigError: If the dataset is packed, and the model does not accept what separates its sequences.
        """
        if isinstance(dataset, GroupByLength):
            return dataset.with_dataset(self(dataset.dataset))
        if isinstance(dataset, PackedDataset):
            if self._taken is not None and self._model is not None:
                dataset.check_model(self._model, self._taken)
            return dataset
        columns = getattr(dataset, "column_names", None)
        if self._taken is None or not columns or not hasattr(dataset, "remove_columns"):
            return dataset
        if (getattr(dataset, "format", None) or {}).get("type") == "custom":
            return dataset  # its `set_transform` may turn any column into what the model takes
        unused = {name for name in columns if name not in self._taken}
        if not unused or set(columns) - unused <= {*LABEL_KEYS}:
            return dataset  # no column would be left: the model's own error is clearer
        if unused not in self._reported:
            self._reported.append(unused)
            names = ", ".join(map(repr, sorted(unused)))
            logger.warning("Columns that the model's forward() does not accept are dropped: %s.", names)
        return dataset.remove_columns(sorted(unused))


def is_user_defined(value: Any) -> bool:
    """Return whether a function or object is user code, which may use any column."""
    module = getattr(value, "__module__", None) or ""
    return value is not None and module.partition(".")[0] not in ("omnitrain", "transformers")
