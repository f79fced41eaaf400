"""Comparison of the collectives that ranks are about to run."""

from __future__ import annotations

import functools
import itertools
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from omnitrain.core.errors import DistributedError, format_list
from omnitrain.distributed.ranks import Ranks

_LAYERS = "the layers of a step"
_GRADIENTS = "the gradients of a step"
_REMEDY = (
    "Call every layer on every rank in each forward pass, in the same order and if only on no rows, and let the loss "
    "depend on it"
)
_LISTED = 4
"""The most ranks that an error lists."""


class LayerOrder:
    """Compares over the ranks which layers a step calls, where each call gathers weights from all ranks.

    A rank that calls other layers gets parts of other weights, or waits forever. In windows 1, 2, 4, 8, ... each call
    is compared before it runs, which takes an exchange per layer; after all windows, before the update, their order.

    Args:
        ranks: The ranks of the run.
        layers: The layers, by name.
        remedy: What else the user can do.
        is_collective: Whether a call of this layer gathers weights.
    """

    def __init__(
        self,
        ranks: Ranks,
        layers: Mapping[str, nn.Module],
        remedy: str,
        is_collective: Callable[[Any], bool] = lambda layer: True,
    ) -> None:
        self._remedy = remedy
        self._ranks = ranks
        self._names: list[str] = list(layers)
        self._is_collective = is_collective
        self._windows = 0
        self._compares_calls = False
        self._called: dict[int, None] = {}
        self._digest = 0
        for number, layer in enumerate(layers.values(), start=1):
            layer.register_forward_pre_hook(functools.partial(self._record, number), prepend=True)

    def begin_window(self) -> None:
        """Begin a window, or run one again."""
        number, self._windows = self._windows, self._windows + 1
        self._compares_calls = number & (number - 1) == 0
        self._called, self._digest = {}, 0

    def _record(self, number: int, layer: nn.Module, args: Any) -> None:
        if not torch.is_grad_enabled() or not self._is_collective(layer):
            return
        self._called[number] = None
        self._digest = zlib.crc32(number.to_bytes(4), self._digest)
        if self._compares_calls:
            self._compare_call(number, repr(self._names[number - 1]))

    def end_forward(self) -> None:
        """Compare the end of a forward pass with the calls of the other ranks."""
        if self._compares_calls:
            self._compare_call(0, "none")

    def _compare_call(self, number: int, name: str) -> None:
        if not are_equal(self._ranks, _LAYERS, number):
            names = self._ranks.gather(_LAYERS, name)
            raise self._error(", ".join(f"rank {rank} {name}" for rank, name in enumerate(names[:_LISTED])))

    def error(self, names: Sequence[Sequence[str]]) -> DistributedError:
        """Return the error for calls of these layers on the ranks."""
        return self._error(_describe_difference(names))

    def end_window(self) -> None:
        """Compare the calls of the window.

        Raises:
            DistributedError: On all ranks, if they differ.
        """
        if not are_equal(self._ranks, _LAYERS, self._digest):
            names = self._ranks.gather(_LAYERS, [self._names[number - 1] for number in self._called])
            raise self.error(names)
        self._called, self._digest = {}, 0

    def _error(self, difference: str) -> DistributedError:
        return DistributedError(
            "The ranks call other layers in a step, and each call gathers weights from all ranks: "
            f"{difference}. {_REMEDY}; or {self._remedy}."
        )


def are_equal(ranks: Ranks, what: str, code: int) -> bool:
    """Return whether all ranks have the same code; all call it."""
    code &= 2**24 - 1  # whose square float64 holds for a thousand ranks
    total, squares = ranks.sum(what, code, code * code)
    return total == ranks.world_size * code and squares == ranks.world_size * code * code


def check_gradients(ranks: Ranks, names: Sequence[str]) -> bool:
    """Return whether all ranks are about to add up gradients of the same parameters in the same order.

    Args:
        ranks: The ranks of the run.
        names: The names of the parameters, in the order of their gradients.

    Raises:
        DistributedError: On all ranks, if they are gradients of other parameters.
    """
    if are_equal(ranks, _GRADIENTS, zlib.crc32("\n".join(names).encode())):
        return True
    everywhere = ranks.gather(_GRADIENTS, list(names))
    if any(set(names) != set(everywhere[0]) for names in everywhere):
        raise DistributedError(
            "The ranks have gradients of other parameters in a step, which DeepSpeed adds up as they come: "
            f"{_describe_difference(everywhere)}. {_REMEDY}; or use ZeRO 1, FSDP or DDP."
        )
    return False


def _describe_difference(everywhere: Sequence[Sequence[str]]) -> str:
    """Return which names are missing on which ranks."""
    rows = [
        f"{format_list(map(repr, missing))} not on rank {rank}"
        for rank, names in enumerate(everywhere)
        if (missing := [name for name in dict.fromkeys(itertools.chain(*everywhere)) if name not in names])
    ]
    return "; ".join(rows[:_LISTED]) or "the same ones in another order"
