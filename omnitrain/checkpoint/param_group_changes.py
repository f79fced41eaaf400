"""Optimizer state for changed parameter groups (`param_groups`, `freeze`)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from omnitrain.checkpoint.setting_changes import GROUPING
from omnitrain.checkpoint.state_dicts import check_references
from omnitrain.checkpoint.tensor_reader import TensorFile
from omnitrain.core.errors import CheckpointError


def has_other_groups(changed: Collection[str], saved: Mapping[str, Any], groups: Sequence[Any]) -> bool:
    """Return whether the number of groups differs from the checkpoint's, and may.

    Args:
        changed: The settings that were allowed to change.
        saved: The optimizer's state in the checkpoint.
        groups: The present groups.
    """
    return not GROUPING.isdisjoint(changed) and len(saved["groups"]) != len(groups)


def check_schedule(is_supported: bool, where: str) -> None:
    """Reject another number of groups under a schedule with state for each group.

    Args:
        is_supported: Whether the schedule has none: its rates follow from the progress.
        where: The name of the checkpoint in errors.

    Raises:
        CheckpointError: If it has.
    """
    if not is_supported:
        raise CheckpointError(
            f"{where} has another number of parameter groups, and `lr_scheduler` is a schedule with state for each. "
            "Use a schedule by name ('cosine', ...), or keep the number of groups."
        )


def regroup_state(
    saved: Mapping[str, Any],
    tensors: TensorFile,
    groups: Sequence[tuple[list[str], Mapping[str, Any]]],
    where: str,
) -> tuple[dict[str, Any], TensorFile]:
    """Return a saved optimizer state, rest and tensors, for other groups; no tensor is read.

    Parameters that did not train have no state; the state of those that no longer train is excluded.

    Args:
        saved: The rest of the saved state.
        tensors: The saved tensors, keyed "<parameter>/<entry>".
        groups: The names and options of each of the present groups.
        where: The name of the checkpoint in errors.
    """
    present = {name for names, _ in groups for name in names}
    rest = {name: entries for name, entries in saved["rest"].items() if name in present}
    nested = check_references([rest, saved["shared"]], tensors, where)
    keys = {key for key in tensors if key.rpartition("/")[0] in present or key in nested}
    saved_groups = saved["groups"]
    new_groups = []
    for index, (names, options) in enumerate(groups):
        group = saved_groups[min(index, len(saved_groups) - 1)]
        new_groups.append({**{key: value for key, value in group.items() if key in options}, "params": names})
    return {**saved, "rest": rest, "groups": new_groups}, tensors.subset(keys)
