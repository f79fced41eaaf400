"""An optimizer's state for other groups than those it was saved from, where `param_groups` or `freeze` may change."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from omnitrain.checkpoint.setting_changes import GROUPING
from omnitrain.checkpoint.state_dicts import check_references
from omnitrain.checkpoint.tensor_reader import TensorFile
from omnitrain.core.errors import CheckpointError


def has_other_groups(changed: Collection[str], saved: Mapping[str, Any], groups: Sequence[Any]) -> bool:
    """Return whether there are more groups now than in a checkpoint, or fewer, and this is allowed.

    Args:
        changed: The settings that were allowed to change.
        saved: The optimizer's state in the checkpoint.
        groups: Those of the present one.
    """
    return not GROUPING.isdisjoint(changed) and len(saved["groups"]) != len(groups)


def check_schedule(finds_place: bool, where: str) -> None:
    """Refuse other groups under a schedule that keeps something of each in a way of its own.

    Args:
        finds_place: Whether there is none, or one whose rates follow from the progress alone.
        where: What an error calls the checkpoint.

    Raises:
        CheckpointError: If it is not.
    """
    if not finds_place:
        raise CheckpointError(
            f"{where} has another number of parameter groups, and `lr_scheduler` is a schedule that "
            "keeps something of each. Take one by name ('cosine', ...), or keep as many groups as there were."
        )


def regrouped(
    saved: Mapping[str, Any],
    tensors: TensorFile,
    groups: Sequence[tuple[list[str], Mapping[str, Any]]],
    where: str,
) -> tuple[dict[str, Any], TensorFile]:
    """Return an optimizer's state, rest and tensors, as if it had been saved from other groups; no tensor is read.

    Parameters that train only now have none; that of those which no longer do is left out.

    Args:
        saved: The rest of what was saved.
        tensors: What was saved, keyed "<parameter>/<entry>".
        groups: The names and options of each of the present ones.
        where: What an error calls the checkpoint.
    """
    held = {name for names, _ in groups for name in names}
    rest = {name: entries for name, entries in saved["rest"].items() if name in held}
    nested = check_references([rest, saved["shared"]], tensors, where)
    kept = {key for key in tensors if key.rpartition("/")[0] in held or key in nested}
    moved = []
    for place, (names, options) in enumerate(groups):
        former = saved["groups"][min(place, len(saved["groups"]) - 1)]
        moved.append({**{key: value for key, value in former.items() if key in options}, "params": names})
    return {**saved, "rest": rest, "groups": moved}, tensors.only(kept)
