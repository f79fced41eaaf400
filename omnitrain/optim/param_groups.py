"""Parameter groups by name, frozen parameters and layer-wise decay.

Parameters go by the names of the user's own module. A pattern counts as a match if it is found anywhere in a name.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from omnitrain.compute.activation_checkpointing import blocks_in
from omnitrain.core.errors import ConfigError, check_number, did_you_mean, format_list
from omnitrain.optim.muon import Muon

logger: logging.Logger = logging.getLogger("omnitrain")

T = TypeVar("T")
Named = Sequence[tuple[str, nn.Parameter]]
"""Parameters with their names; tied ones come under each of theirs."""


def freeze_parameters(named_parameters: Named, patterns: Iterable[str]) -> None:
    """Have parameters in whose names a pattern is found require no gradient, for good.

    Raises:
        ConfigError: If a pattern is found in no name, or nothing would be left to train; nothing is changed then.
    """
    frozen = {id(parameter): parameter for parameter in find_matches("`freeze`", patterns, named_parameters).values()}
    trains = any(parameter.requires_grad for _, parameter in named_parameters)
    if trains and not any(parameter.requires_grad and id(parameter) not in frozen for _, parameter in named_parameters):
        raise ConfigError(
            f"`freeze={list(patterns)!r}` leaves no parameter that trains. Leave out the part that is to be trained."
        )
    for parameter in frozen.values():
        parameter.requires_grad_(False)


def group_parameters(
    optimizer: torch.optim.Optimizer, named_parameters: Named, specs: Sequence[Mapping[str, Any]], tells: bool = True
) -> None:
    """Divide each group of a new optimizer by the names of its parameters, and give the parts their options.

    Parameters that match no pattern keep the options of the optimizer.

    Args:
        optimizer: Its groups are changed in place.
        named_parameters: All parameters of the model.
        specs: Dicts of a regular expression, "match", and of options of the optimizer, or of "lr_scale", a factor of
            the group's rate. The first that matches a name of the parameter counts.
        tells: Whether to log the groups.

    Raises:
        ConfigError: If a pattern is found in no name, or earlier ones have taken all that it matches; or an option is
            unknown or out of its range.
    """
    names: dict[int, list[str]] = {}
    for name, parameter in named_parameters:
        names.setdefault(id(parameter), []).append(name)
    groups: list[dict[str, Any]] = []
    rows: list[tuple[str, dict[str, Any]]] = []
    used: set[int] = set()
    for group in optimizer.param_groups:
        parts: dict[int, list[nn.Parameter]] = {}
        for parameter in group["params"]:
            parts.setdefault(_place_of(names.get(id(parameter), []), specs), []).append(parameter)
        used |= parts.keys()
        for place, parameters in sorted(parts.items()):
            options = {} if place == len(specs) else _options(optimizer, group, specs[place], place)
            groups.append({**group, **options, "params": parameters})
            rows.append(("the rest" if place == len(specs) else specs[place]["match"], groups[-1]))
    for place, spec in enumerate(specs):
        if place not in used:
            _check_frozen(f"`param_groups[{place}]`", spec["match"], named_parameters)
            rows.append((spec["match"], {"params": []}))
    optimizer.param_groups[:] = groups
    if tells:
        logger.info("The optimizer's groups:%s", "".join(f"\n  {_row(*row)}" for row in rows))


def layerwise_decay(model: nn.Module, decay: float = 0.75) -> list[dict[str, Any]]:
    """Return `param_groups` in which the learning rate shrinks by a factor from each block of a model to the one below.

    What comes after the last block (a head) has the full rate, the last block `decay` times that, the one before it
    `decay**2`, and what comes before the first (embeddings) the least. Blocks are the parts of an `nn.ModuleList` or
    `nn.Sequential` that are made of layers. As in ULMFiT (arXiv 1801.06146) and BEiT (arXiv 2106.08254).

    Args:
        model: The model that is to be trained.
        decay: The factor, above 0 and at most 1.

    Raises:
        ConfigError: If the model has no blocks, or `decay` is out of its range.

    >>> block = lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    >>> model = nn.Sequential(nn.Linear(4, 4), nn.ModuleList([block(), block()]), nn.Linear(4, 1))
    >>> [group["lr_scale"] for group in layerwise_decay(model, decay=0.5)]
    [0.125, 0.25, 0.5, 1.0]
    """
    check_number("decay", decay, above=0, most=1)
    blocks = list(dict.fromkeys(blocks_in(model)))
    if not blocks:
        raise ConfigError(
            f"layerwise_decay() finds no blocks in {type(model).__name__}: none of its parts is an nn.ModuleList or "
            "nn.Sequential of modules that are made of layers. Write the groups by hand: param_groups=[{'match': "
            "r'^stem\\.', 'lr_scale': 0.5}, ...]."
        )
    depth_of = {id(parameter): depth for depth, block in enumerate(blocks, 1) for parameter in block.parameters()}
    names = {id(block): _bare(name) for name, block in model.named_modules()}
    patterns = {depth: [rf"{re.escape(names[id(block)])}\."] for depth, block in enumerate(blocks, 1)}
    parameters = list(model.named_parameters())
    last = max(place for place, (_, parameter) in enumerate(parameters) if id(parameter) in depth_of)
    depth = 0
    for place, (name, parameter) in enumerate(parameters):
        if id(parameter) in depth_of:
            depth = depth_of[id(parameter)]
            continue
        level = depth if place < last else len(blocks) + 1
        patterns.setdefault(level, []).append(f"{re.escape(_bare(name))}$")
    scales = {depth: decay ** (len(blocks) + 1 - depth) for depth in sorted(patterns)}
    return [{"match": f"^({'|'.join(patterns[depth])})", "lr_scale": scale} for depth, scale in scales.items()]


def _bare(name: str) -> str:
    return name.replace("_orig_mod.", "")


def _place_of(names: Iterable[str], specs: Sequence[Mapping[str, Any]]) -> int:
    """Return the place of the first pattern that is found in one of a parameter's names; past the last for none."""
    places = (place for place, spec in enumerate(specs) if any(re.search(spec["match"], name) for name in names))
    return next(places, len(specs))


def _options(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], spec: Mapping[str, Any], place: int
) -> dict[str, Any]:
    options = {name: value for name, value in spec.items() if name not in ("match", "lr_scale")}
    make: Any = optimizer.stepping(group) if isinstance(optimizer, Muon) else type(optimizer)
    known = [name for name in group if name not in ("params", "initial_lr")]
    for name in options:
        if name not in known:
            raise ConfigError(
                f"`param_groups[{place}]` has {name!r}, which is no option of {make.__name__} "
                f"for these parameters. It has {', '.join(['lr_scale', *known])}.{did_you_mean(name, known)}"
            )
    if f"{make.__module__}.".startswith("torch.optim."):
        try:  # only the constructor validates values
            make([nn.Parameter(torch.empty(1, 1))], **options)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"`param_groups[{place}]`: {make.__name__} rejects it: {error}.") from error
    if "lr_scale" in spec:
        if "lr" not in group:
            raise ConfigError(
                f"`param_groups[{place}]` has 'lr_scale', but {type(optimizer).__name__} has no learning rate 'lr'."
            )
        options["lr"] = group["lr"] * spec["lr_scale"]
    return options


def find_matches(where: str, patterns: Iterable[str], named_entries: Iterable[tuple[str, T]]) -> dict[str, T]:
    """Return the entries in whose names a pattern is found, in their order.

    Raises:
        ConfigError: If a pattern, of the argument `where`, is found in no name.
    """
    entries, matches = dict(named_entries), set[str]()
    for pattern in patterns:
        names = [name for name in entries if re.search(pattern, name)]
        if not names:
            raise ConfigError(f"{where}: {pattern!r} is found in no name. The names are {format_list(entries)}.")
        matches.update(names)
    return {name: entry for name, entry in entries.items() if name in matches}


def _check_frozen(where: str, pattern: str, named_parameters: Named) -> None:
    """Raise ConfigError for a pattern that no parameter is left for, unless all that it matches is frozen."""
    if any(parameter.requires_grad for parameter in find_matches(where, [pattern], named_parameters).values()):
        raise ConfigError(
            f"{where}: {pattern!r} is left without a parameter, since earlier entries have taken all that it matches, "
            "or the optimizer does not hold them. Put it further up, or leave it out."
        )


def _row(pattern: str, group: Mapping[str, Any]) -> str:
    shown = pattern if len(pattern) <= 60 else f"{pattern[:57]}..."
    if not group["params"]:
        return f"{shown}: frozen"
    count = sum(parameter.numel() for parameter in group["params"])
    options = [f"{name} {float(group[name]):g}" for name in ("lr", "weight_decay") if name in group]
    return f"{shown}: {len(group['params'])} tensors, {count} values, {', '.join(options)}"
