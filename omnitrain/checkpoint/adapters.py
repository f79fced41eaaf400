"""PEFT adapters: which weights of a model belong to them, and folders in PEFT's format.

`PeftModel.from_pretrained` opens these folders. `frozen.py` decides which weights a checkpoint holds.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from omnitrain.checkpoint.state_dicts import WEIGHTS, bare_name, save_weights, unwrap, write_config
from omnitrain.checkpoint.tensor_files import TensorFile, gather_to_host, load_tensors, save_tensors, spec_of
from omnitrain.core.errors import ConfigError
from omnitrain.distributed.ranks import Ranks

logger: logging.Logger = logging.getLogger("omnitrain")

BASE = "base_model"
"""The folder in a checkpoint for the config of the adapters' base model: next to the weights, transformers would take
these for the weights of the base model."""
ADAPTER, CONFIG = "adapter_model.safetensors", "adapter_config.json"


def has_adapters(model: nn.Module) -> bool:
    """Return whether a model has PEFT adapters: from `get_peft_model`, or from `add_adapter` of transformers."""
    bare, peft = unwrap(model), sys.modules.get("peft")  # imported if there are any
    return peft is not None and (isinstance(bare, peft.PeftModel) or getattr(bare, "_hf_peft_config_loaded", False))


def adapter_names(model: nn.Module, tensors: Mapping[str, Any]) -> set[str]:
    """Return the names of the weights in the files of a model's adapters, active or not, and of layers behind copies.

    A layer that is trained as a copy may have been initialized at random, such as a new head: then only the checkpoint
    has it.

    Args:
        model: A model with adapters.
        tensors: Its weights by name; only their shapes are used.
    """
    from peft.utils import ModulesToSaveWrapper

    copied = [name for name, one in unwrap(model).named_modules() if isinstance(one, ModulesToSaveWrapper)]
    behind = tuple(f"{bare_name(name)}.original_module." for name in copied)
    return _names(model, tensors, "auto") | {name for name in tensors if name.startswith(behind)}


def _names(model: nn.Module, tensors: Mapping[str, Any], embeddings: bool | Literal["auto"]) -> set[str]:
    from peft import get_peft_model_state_dict

    bare: Any = unwrap(model)
    raw = _raw_names(bare)
    blank = torch.zeros(1)
    stand_ins = {raw.get(name, name): blank.expand(spec_of(tensors, name)[0]) for name in tensors}
    name_of = {id(one): bare_name(name) for name, one in stand_ins.items()}
    found = set[str]()
    for adapter in bare.peft_config:
        found |= {name for name in tensors if _without_adapter(name, adapter, _entries(bare, adapter)) != name}
        held = get_peft_model_state_dict(
            bare, state_dict=stand_ins, adapter_name=adapter, save_embedding_layers=embeddings
        )
        found |= {name_of[id(one)] for one in held.values() if id(one) in name_of}
    return found


def _entries(bare: nn.Module, adapter: str) -> set[str]:
    """Return the bare names of what PEFT's layers hold under the name of an adapter, in dicts by adapter.

    A layer of the model may have the same name.
    """
    names = set[str]()
    for name, module in bare.named_modules(remove_duplicate=False):
        if any(kind.__module__.startswith("peft.") for kind in type(module).__mro__):
            for child, entries in module.named_children():
                is_dict = isinstance(entries, (nn.ModuleDict, nn.ParameterDict))
                if is_dict or type(entries).__name__ == "BufferDict":  # PEFT's own
                    names.add(bare_name(".".join(filter(None, (name, child, adapter)))))
    return names


def _without_adapter(name: str, adapter: str, entries: set[str]) -> str:
    """Return the name of a tensor in PEFT's files, which is without that of its adapter; others are unchanged."""
    parts = name.split(".")
    for end, part in enumerate(parts):
        if part == adapter and ".".join(parts[: end + 1]) in entries:
            return ".".join(parts[:end] + parts[end + 1 :])
    return name


def _raw_names(bare: nn.Module) -> dict[str, str]:
    """Return the names under which PEFT looks for tensors, by bare name: they include wrappers inside the model."""
    # the names of the modules, not of the state dict, from which activation checkpointing removes its prefix
    named = [*bare.named_parameters(remove_duplicate=False), *bare.named_buffers(remove_duplicate=False)]
    return {bare_name(name): name for name, _ in named}


def _folder_of(folder: Path, adapter: str) -> Path:
    return folder if adapter == "default" else folder / adapter


def write_adapters(model: nn.Module, folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write all adapters of a model to a folder in PEFT's format; the one named "default" is at the top.

    Args:
        model: A model with adapters.
        folder: Created if needed.
        tensors: Weights by name, including those of `adapter_names`; others are not read.
    """
    import peft

    bare: Any = unwrap(model)
    names = _names(model, tensors, "auto")
    has_embeddings = names != _names(model, tensors, False)  # so that PEFT does not ask the Hub again
    raw = _raw_names(bare)
    held = {raw.get(name, name): tensors[name] for name in tensors if name in names}
    if isinstance(bare, peft.PeftModel):
        bare.save_pretrained(str(folder), state_dict=held, save_embedding_layers=has_embeddings)
    for adapter, config in bare.peft_config.items():
        place = _folder_of(folder, adapter)
        if isinstance(bare, peft.PeftModel):
            written = load_tensors(place / ADAPTER)
        else:  # transformers itself writes only the active adapter
            place.mkdir(parents=True, exist_ok=True)
            config.save_pretrained(str(place))
            found = peft.get_peft_model_state_dict(
                bare, state_dict=held, adapter_name=adapter, save_embedding_layers=has_embeddings
            )
            written = {f"base_model.model.{name}": one for name, one in found.items()}
        prefix = "" if isinstance(bare, peft.PeftModel) else "base_model.model."
        entries = _entries(bare, adapter)
        short = {prefix + name: prefix + _without_adapter(name, adapter, entries) for name in names}
        renamed = {short.get(bare_name(name), bare_name(name)): one for name, one in written.items()}
        if renamed.keys() != written.keys() or not (place / ADAPTER).exists():
            save_tensors(renamed, place / ADAPTER)


def save_model(
    model: nn.Module,
    folder: Path,
    overwrite: bool,
    tensors: Mapping[str, Any],
    ranks: Ranks,
    beside: Iterable[Any] = (),
) -> Path:
    """Write a folder that `from_pretrained` opens: weights and config, or only the adapters if the model has any.

    Args:
        model: The model, wrapped or not.
        folder: Created if needed.
        overwrite: Whether to replace an earlier model.
        tensors: Its weights by name. Sharded ones are gathered; all ranks call this.
        ranks: The ranks that have the weights; the main one writes.
        beside: Other objects to save there by their `save_pretrained`, such as a tokenizer.

    Raises:
        ConfigError: If there are weights already and `overwrite` is False, or `folder` is a file.
    """

    def write() -> None:
        if has_adapters(model):
            _check_place(model, folder, overwrite)
            write_adapters(model, folder, adapters)
        for one in beside:
            one.save_pretrained(str(folder))

    adapters: dict[str, torch.Tensor] = {}
    if has_adapters(model):
        names = _names(model, tensors, "auto")
        adapters = {name: gather_to_host(tensors[name]) for name in sorted(names)}
        trained = {bare_name(name) for name, one in unwrap(model).named_parameters() if one.requires_grad}
        lost = sorted(trained.intersection(tensors) - names)
        if lost and ranks.is_main:
            logger.warning(
                "%d weights that train are none of the adapters', and PEFT's form has no place for them: %s%s. Name "
                "their modules in `modules_to_save`; checkpoints hold them.",
                len(lost), ", ".join(lost[:3]), ", ..." if lost[3:] else "",
            )  # fmt: skip
    else:
        save_weights(model, folder, overwrite, tensors, ranks)
    ranks.on_main("the writing of a model", write)
    return folder


def _check_place(model: nn.Module, folder: Path, overwrite: bool) -> None:
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"Cannot save the model to {str(folder)!r}: it is a file. Give the path of a folder.")
    bare: Any = unwrap(model)
    places = [_folder_of(folder, adapter) / CONFIG for adapter in bare.peft_config]
    there = [place for place in [*places, folder / WEIGHTS] if place.exists()]
    if there and not overwrite:
        raise ConfigError(f"{str(there[0])!r} already exists. Pass overwrite=True to replace it, or give another path.")


def write_model_files(model: nn.Module, folder: Path, is_whole: bool, weights: Sequence[Path]) -> None:
    """Write the files with which the weights of a checkpoint can be opened: the model's config, or PEFT's adapters.

    Args:
        model: The model, wrapped or not.
        folder: The folder with the weights.
        is_whole: Whether the folder has all weights of the model; without the frozen ones no config can open it.
        weights: The files with the weights.
    """
    if has_adapters(model):
        write_adapters(model, folder, TensorFile(list(weights)))
        bare: Any = unwrap(model)
        write_config(bare.get_base_model() if hasattr(bare, "get_base_model") else bare, folder / BASE)
    elif is_whole:
        write_config(model, folder)
