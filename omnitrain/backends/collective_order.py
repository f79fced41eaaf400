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
    "Call every layer on every rank in each forward pass, in the same order, with an empty batch if need be, and let "
    "the loss depend on it"
)
# The most ranks that an error lists.
_MAX_LISTED = 4


class LayerOrder:
    """Checks that all ranks call the same layers in a step, where each call gathers weights from all ranks.

    A rank that calls different layers gets parts of the wrong weights, or waits forever. At the end of each window,
    before the update, the order of its calls is compared. In windows 0, 1, 2, 4, 8, ... each call is also compared
    before it runs, which takes an exchange per layer. `is_collective` tells whether a call of a layer gathers weights;
    `remedy` is one more remedy for the error.
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
        # from 1, as 0 is the number of the end of a forward pass
        for number, layer in enumerate(layers.values(), start=1):
            layer.register_forward_pre_hook(functools.partial(self._record, number), prepend=True)

    def begin_window(self) -> None:
        """Begin a window, or run one again."""
        number, self._windows = self._windows, self._windows + 1
        self._compares_calls = number & (number - 1) == 0  # 0 or a power of 2
        self._called, self._digest = {}, 0

    def _record(self, number: int, layer: nn.Module, args: Any) -> None:
        if not torch.is_grad_enabled() or not self._is_collective(layer):
            return
        self._called[number] = None
        self._digest = zlib.crc32(number.to_bytes(4), self._digest)
        if self._compares_calls:
            self._compare_call(number, repr(self._names[number - 1]))

    def end_forward(self) -> None:
        """Check that the other ranks end their forward passes too, instead of calling a layer."""
        if self._compares_calls:
            self._compare_call(0, "none")

    def _compare_call(self, number: int, name: str) -> None:
        if not self._ranks.are_equal(_LAYERS, number):
            calls = self._ranks.gather(_LAYERS, name)
            raise self._error(", ".join(f"rank {rank} {call}" for rank, call in enumerate(calls[:_MAX_LISTED])))

    def error(self, names_by_rank: Sequence[Sequence[str]]) -> DistributedError:
        """Return the error for ranks that called these layers."""
        return self._error(_describe_difference(names_by_rank))

    def end_window(self) -> None:
        """Compare the calls of the window.

        Raises:
            DistributedError: On all ranks, if they differ.
        """
        if not self._ranks.are_equal(_LAYERS, self._digest):
            raise self.error(self._ranks.gather(_LAYERS, [self._names[number - 1] for number in self._called]))
        self._called, self._digest = {}, 0

    def _error(self, difference: str) -> DistributedError:
        return DistributedError(
            "The ranks call different layers in a step, and each call gathers weights from all ranks: "
            f"{difference}. {_REMEDY}; or {self._remedy}."
        )


def check_gradients(ranks: Ranks, names: Sequence[str]) -> bool:
    """Return whether all ranks are about to reduce gradients of the same parameters, `names`, in the same order.

    Raises:
        DistributedError: On all ranks, if they are gradients of different parameters.
    """
    if ranks.are_equal(_GRADIENTS, zlib.crc32("\n".join(names).encode())):
        return True
    names_by_rank = ranks.gather(_GRADIENTS, list(names))
    if any(set(rank_names) != set(names_by_rank[0]) for rank_names in names_by_rank):
        raise DistributedError(
            "The ranks have gradients of different parameters in a step, which DeepSpeed adds up as they come: "
            f"{_describe_difference(names_by_rank)}. {_REMEDY}; or use ZeRO 1, FSDP or DDP."
        )
    return False


def _describe_difference(names_by_rank: Sequence[Sequence[str]]) -> str:
    all_names = dict.fromkeys(itertools.chain(*names_by_rank))
    parts = [
        f"{format_list(map(repr, missing))} not on rank {rank}"
        for rank, names in enumerate(names_by_rank)
        if (missing := [name for name in all_names if name not in names])
    ]
    return "; ".join(parts[:_MAX_LISTED]) or "the same ones in another order"
