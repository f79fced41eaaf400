"""Model and optimizer state by name: weights under the bare module's names, moments under parameter names.

Only safetensors and JSON: nothing is pickled and nothing is unpickled. Folders, manifests and retention are in
`store.py`; what of a trainer is kept, in `trainers/saving.py`.
"""

from __future__ import annotations

import contextlib
import copy
import math
import os
import random
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from omnitrain.checkpoint.tensors import (
    Gather,
    digest,
    host_tensors,
    is_in_parts,
    load_tensors,
    placed_like,
    save_tensors,
    shape_of,
    whole,
    written_by_main,
)
from omnitrain.distributed import Ranks
from omnitrain.errors import CheckpointError, ConfigError

__all__ = [
    "Gather",
    "check_fit",
    "check_groups",
    "class_of",
    "digest",
    "extra_state",
    "from_json",
    "host_tensors",
    "is_in_parts",
    "like",
    "load_tensors",
    "load_weights",
    "model_tensors",
    "optimizer_state",
    "restore_optimizer",
    "restore_rng_tensors",
    "rng_tensors",
    "save_tensors",
    "save_weights",
    "to_json",
    "unwrap",
    "whole",
    "write_config",
    "written_by_main",
]

WEIGHTS = "model.safetensors"
IMPLEMENTATION = ("fused", "foreach", "capturable", "differentiable")
"""Options of optimizers that say how they compute; what is here need not be there, so they are not restored."""

# --- models


def unwrap(model: nn.Module) -> nn.Module:
    """Return the module that the user made, without what `torch.compile`, DDP and DeepSpeed wrap around it.

    >>> unwrap(torch.compile(nn.Linear(1, 1)))
    Linear(in_features=1, out_features=1, bias=True)
    """
    while True:
        is_engine = type(model).__name__ == "DeepSpeedEngine"  # DeepSpeed need not be installed
        if is_engine or isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            model = model.module  # type: ignore[assignment]
        elif hasattr(model, "_orig_mod"):
            model = model._orig_mod  # type: ignore[assignment]
        else:
            return model


def class_of(model: nn.Module) -> type:
    """Return the class that the user's module has; FSDP 2 gives it one of its own, derived from it."""
    own, *bases = type(unwrap(model)).__mro__
    return bases[1] if bases[0].__name__ == "FSDPModule" else own


def bare_name(name: str) -> str:
    """Return a parameter's name without what `torch.compile` or activation checkpointing of a submodule put into it."""
    return name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")


def model_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors of the bare module by name; one that is there under several names comes under the first."""
    return {name: tensor for name, tensor, first in _named(model) if name == first}


def _named(model: nn.Module) -> Iterator[tuple[str, torch.Tensor, str]]:
    """Yield name, tensor, and the first name of the same tensor: tied weights have several names."""
    seen: dict[Any, str] = {}
    module = unwrap(model)
    parameters = dict(module.named_parameters(remove_duplicate=False))
    for name, value in module.state_dict().items():
        if not isinstance(value, torch.Tensor):
            continue  # see `extra_state`
        tensor = value.detach()
        if hasattr(tensor, "full_tensor"):  # this process's part of it says nothing about where the whole is
            place: Any = id(parameters.get(name, name))
        else:
            place = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        name = bare_name(name)
        yield name, tensor, seen.setdefault(place if tensor.numel() else name, name)


def save_weights(
    model: nn.Module,
    folder: Path,
    overwrite: bool,
    tensors: Mapping[str, Any] | None = None,
    ranks: Ranks | None = None,
) -> Path:
    """Write `model.safetensors` into `folder`, and `config.json` beside it where the model has one.

    The file appears whole or not at all. A folder of a transformers model opens with `from_pretrained`.

    Args:
        model: The model, wrapped or not.
        folder: Made if it is not there.
        overwrite: Whether to replace weights that are there.
        tensors: Its weights by name, where it does not hold them itself.
        ranks: The ranks that have the weights; the main one writes.

    Raises:
        ConfigError: If there is one already and `overwrite` is False, or `folder` is a file.
    """
    weights = model_tensors(model) if tensors is None else tensors

    def write(gather: Gather) -> Path:
        path = folder / WEIGHTS
        if folder.exists() and not folder.is_dir():
            raise ConfigError(f"Cannot save the model to {str(folder)!r}: it is a file. Give the path of a folder.")
        if path.exists() and not overwrite:
            raise ConfigError(
                f"{str(path)!r} is there already. Pass overwrite=True to replace it, or give another path."
            )
        folder.mkdir(parents=True, exist_ok=True)
        part = folder / f"{WEIGHTS}.tmp"
        try:
            save_tensors(weights, part, gather=gather)
            os.replace(part, path)
        finally:
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)
        write_config(model, folder)
        return folder

    return written_by_main(ranks or Ranks(), [weights], write)


def write_config(model: nn.Module, folder: Path) -> None:
    """Write the model's own config next to its weights, if it has one that can be saved."""
    bare = unwrap(model)
    modeling = sys.modules.get("transformers.modeling_utils")  # loaded if the model is one of transformers'
    for name in ("config", "generation_config"):
        config: Any = getattr(bare, name, None)
        if not callable(getattr(config, "save_pretrained", None)):
            continue
        if name == "config" and modeling is not None and isinstance(bare, modeling.PreTrainedModel):
            # as the model's own save_pretrained does; a config that was built in code says neither
            config = copy.deepcopy(config)
            config.architectures = [class_of(bare).__name__]
            config.dtype = str(bare.dtype).removeprefix("torch.")
        config.save_pretrained(folder)


def extra_state(model: nn.Module) -> dict[str, Any]:
    """Return what modules keep besides tensors (`get_extra_state`) by name, as JSON types.

    Raises:
        CheckpointError: If it holds something that is neither plain nor a number.
    """
    found = unwrap(model).state_dict().items()
    return {bare_name(name): to_json(value, name) for name, value in found if not isinstance(value, torch.Tensor)}


def load_weights(
    model: nn.Module, tensors: Mapping[str, torch.Tensor], where: str, extra: Mapping[str, Any] | None = None
) -> None:
    """Copy tensors into a model in place, so that optimizers and ties hold; every name and shape must fit.

    Args:
        model: The model, wrapped or not.
        tensors: What `model_tensors` returned.
        where: What an error calls them.
        extra: What `extra_state` returned.

    Raises:
        CheckpointError: If a tensor is missing, left over, or of another shape.
    """
    wanted = list(_named(model))
    check_fit({name: (first, tuple(tensor.shape)) for name, tensor, first in wanted}, tensors, where)
    content: dict[str, Any] = {name: placed_like(tensors[first], tensor) for name, tensor, first in wanted}
    content |= {name: from_json(value) for name, value in (extra or {}).items()}
    # by the model's own way of loading: its modules may have hooks, and what state_dict() returns may be copies
    bare = unwrap(model)
    names = [name for name in bare.state_dict() if bare_name(name) in content]
    bare.load_state_dict({name: content[bare_name(name)] for name in names}, strict=False)


def check_fit(
    wanted: Mapping[str, tuple[str, tuple[int, ...]]], tensors: Mapping[str, torch.Tensor], where: str
) -> None:
    """Refuse tensors that are not those of a model.

    Args:
        wanted: For each name in the model, the first name of the same tensor, and its shape.
        tensors: What was saved.
        where: What an error calls it.

    Raises:
        CheckpointError: If one is missing, left over, or of another shape.
    """
    expected = {first for first, _ in wanted.values()}
    missing, left_over = sorted(expected - tensors.keys()), sorted(tensors.keys() - wanted.keys())
    if missing or left_over:
        raise CheckpointError(
            f"{where} does not fit the model: missing {missing[:5]}, not in the model {left_over[:5]}. "
            "Build the model as it was built for that run."
        )
    for name, (first, shape) in wanted.items():
        if name == first and shape_of(tensors, name) != shape:
            raise CheckpointError(
                f"{where} does not fit the model: {name!r} has shape {shape_of(tensors, name)} there and {shape} in "
                "the model."
            )


# --- optimizers


def parameter_names(model: nn.Module) -> dict[int, str]:
    """Return the bare name of every parameter by its identity."""
    return {id(parameter): bare_name(name) for name, parameter in unwrap(model).named_parameters()}


def optimizer_state(optimizer: torch.optim.Optimizer, model: nn.Module) -> tuple[dict[str, torch.Tensor], Any]:
    """Return an optimizer's tensors, keyed "<parameter>/<entry>", and the rest as JSON types.

    Raises:
        CheckpointError: If it holds a parameter that is not the model's, and so has no name.
    """
    names, tensors, rest = parameter_names(model), {}, {}
    groups = []
    for group in optimizer.param_groups:
        unnamed = [tuple(parameter.shape) for parameter in group["params"] if id(parameter) not in names]
        if unnamed:
            raise CheckpointError(
                f"The optimizer holds parameters of shapes {unnamed[:3]} that are not the model's, so they have no "
                "name to be saved under. Make them part of the model."
            )
        options = {key: to_json(value, key) for key, value in group.items() if key != "params"}
        groups.append({**options, "params": [names[id(parameter)] for parameter in group["params"]]})
        for parameter in group["params"]:
            name = names[id(parameter)]
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor):
                    tensors[f"{name}/{key}"] = value
                else:
                    rest.setdefault(name, {})[key] = to_json(value, f"{name}/{key}", tensors)
    shared = {key: value for key, value in optimizer.state.items() if not isinstance(key, torch.Tensor)}
    return tensors, {"groups": groups, "rest": rest, "shared": to_json(shared, "", tensors)}


def restore_optimizer(
    optimizer: torch.optim.Optimizer, model: nn.Module, tensors: Mapping[str, torch.Tensor], saved: Any, where: str
) -> None:
    """Put back what `optimizer_state` returned, by parameter name.

    Raises:
        CheckpointError: If the optimizer's parameters, or their groups, are not those that were saved.
    """
    names = parameter_names(model)
    parameters = {names.get(id(one), ""): one for group in optimizer.param_groups for one in group["params"]}
    now = [[names.get(id(parameter), "?") for parameter in group["params"]] for group in optimizer.param_groups]
    then = [group["params"] for group in saved["groups"]]
    check_groups(now, then, where)
    optimizer.state.clear()  # before the new state is read: there need not be room for both
    state: dict[str, dict[str, Any]] = {name: dict(from_json(entry, tensors)) for name, entry in saved["rest"].items()}
    for key in tensors:
        name, _, entry = key.rpartition("/")
        state.setdefault(name, {})[entry] = placed_like(tensors[key], parameters.get(name))
    order = [name for group in now for name in group]
    groups, start = [], 0
    for group, present, options in zip(now, optimizer.param_groups, saved["groups"], strict=True):
        plain = {key: like(from_json(value), present.get(key)) for key, value in options.items() if key != "params"}
        plain |= {key: present[key] for key in IMPLEMENTATION if key in present}
        groups.append({**plain, "params": list(range(start, start + len(group)))})
        start += len(group)
    # torch's own loading places each tensor beside its parameter
    entries = {i: state[name] for i, name in enumerate(order) if name in state}
    shared = from_json(saved["shared"], tensors)
    optimizer.load_state_dict({"state": {**shared, **entries}, "param_groups": groups})
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        held = optimizer.state.get(parameter, {})
        for key, tensor in state.get(names[id(parameter)], {}).items():
            if not isinstance(tensor, torch.Tensor):
                continue
            if held[key].dtype != tensor.dtype:
                held[key] = tensor.to(parameter.device)  # torch casts to the parameter's dtype, which is lossy
            if held[key].shape == parameter.shape and held[key].stride() != parameter.stride():
                # fused kernels walk through both as they lie in memory, channels last for example
                held[key] = torch.empty_like(parameter, dtype=held[key].dtype).copy_(held[key])


def check_groups(now: list[list[str]], then: list[list[str]], where: str) -> None:
    """Raise CheckpointError if an optimizer's groups hold other parameters than those that were saved.

    Args:
        now: Names of the parameters of each group.
        then: Those that were saved.
        where: What an error calls these.
    """
    if [sorted(group) for group in now] != [sorted(group) for group in then]:
        changed = sorted({name for group in now for name in group} ^ {name for group in then for name in group})
        raise CheckpointError(
            f"{where} does not fit the optimizer: its parameter groups hold other parameters"
            f"{': ' + ', '.join(changed[:5]) if changed else ' in other groups'}. "
            "Build it as it was built for that run."
        )


def like(value: Any, present: Any) -> Any:
    """Return a saved option with tensors where the present one has them, such as a rate that a compiled step reads."""
    if isinstance(present, torch.Tensor) and isinstance(value, (int, float)):
        return torch.full_like(present, value)
    if isinstance(present, list) and isinstance(value, list) and len(present) == len(value):
        return [like(one, other) for one, other in zip(value, present, strict=True)]
    return value


# --- random numbers


def rng_tensors(device: torch.device) -> tuple[dict[str, torch.Tensor], Any]:
    """Return the state of every generator that training draws from: tensors, and the rest as JSON types."""
    version, words, gauss = random.getstate()
    numpy_state = np.random.get_state(legacy=False)
    tensors = {"torch": torch.get_rng_state(), "python": torch.tensor(words, dtype=torch.int64)}
    rest: dict[str, Any] = {"python": {"version": version, "gauss": gauss}}
    if numpy_state["bit_generator"] == "MT19937":
        tensors["numpy"] = torch.from_numpy(numpy_state["state"]["key"].astype(np.int64))
        rest["numpy"] = {
            "pos": int(numpy_state["state"]["pos"]),
            "has_gauss": int(numpy_state["has_gauss"]),
            "gauss": float(numpy_state["gauss"]),
        }
    if device.type not in ("cpu", "meta"):
        tensors["device"] = torch.get_device_module(device).get_rng_state(device)
    return tensors, rest


def restore_rng_tensors(tensors: Mapping[str, torch.Tensor], rest: Any, device: torch.device) -> None:
    """Put the generators back to what `rng_tensors` returned; a device of another kind keeps its own state."""
    torch.set_rng_state(tensors["torch"])
    random.setstate((rest["python"]["version"], tuple(tensors["python"].tolist()), rest["python"]["gauss"]))
    if "numpy" in rest:
        key = tensors["numpy"].numpy().astype(np.uint32)
        np.random.set_state(("MT19937", key, rest["numpy"]["pos"], rest["numpy"]["has_gauss"], rest["numpy"]["gauss"]))
    if "device" in tensors and device.type not in ("cpu", "meta"):
        torch.get_device_module(device).set_rng_state(tensors["device"], device)


# --- JSON


def to_json(value: Any, where: str, tensors: dict[str, torch.Tensor] | None = None) -> Any:
    """Return a state as JSON types, tagged where JSON would give something else back (tuples, keys that are no text).

    Args:
        value: The state.
        where: What an error calls it.
        tensors: Takes the tensors in it, where there is a place for them; otherwise those of one number become numbers.

    Raises:
        CheckpointError: If it holds something that is neither plain nor a number.
    """
    if isinstance(value, torch.Tensor) and tensors is not None:
        tensors[where] = value
        return {"__tensor__": where}
    if isinstance(value, np.generic) or (isinstance(value, torch.Tensor) and value.numel() == 1):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return {"__float__": str(value)}  # JSON has neither NaN nor Infinity
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        entries = [to_json(entry, f"{where}/{i}", tensors) for i, entry in enumerate(value)]
        return entries if isinstance(value, list) else {"__tuple__": entries}
    if isinstance(value, Counter):
        return {"__counter__": [[to_json(k, where), v] for k, v in value.items()]}
    if isinstance(value, Mapping):
        if all(isinstance(key, str) and not key.startswith("__") for key in value):
            return {key: to_json(entry, f"{where}/{key}", tensors) for key, entry in value.items()}
        return {"__dict__": [[to_json(k, where), to_json(v, f"{where}/{k}", tensors)] for k, v in value.items()]}
    raise CheckpointError(
        f"`{where}` holds a {type(value).__name__}, which has no place in a checkpoint of tensors and JSON. "
        "Keep numbers, text, lists and dicts in a state."
    )


def from_json(value: Any, tensors: Mapping[str, torch.Tensor] | None = None) -> Any:
    """Return what `to_json` was given."""
    if isinstance(value, list):
        return [from_json(entry, tensors) for entry in value]
    if not isinstance(value, dict):
        return value
    if "__tensor__" in value:
        return (tensors or {})[value["__tensor__"]]
    if "__float__" in value:
        return float(value["__float__"])
    if "__tuple__" in value:
        return tuple(from_json(entry, tensors) for entry in value["__tuple__"])
    if "__counter__" in value:
        return Counter({from_json(k): v for k, v in value["__counter__"]})
    if "__dict__" in value:
        return {from_json(k): from_json(v, tensors) for k, v in value["__dict__"]}
    return {key: from_json(entry, tensors) for key, entry in value.items()}
