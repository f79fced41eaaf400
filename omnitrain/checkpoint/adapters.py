"""PEFT adapters: their weights in a model, and folders in PEFT's format.

`PeftModel.from_pretrained` opens these folders. `frozen_weights.py` decides which weights a checkpoint has.
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

# The folder in a checkpoint for the config of the adapters' base model.
#
# Next to the weights, transformers would take those for the weights of the base model.
BASE = "base_model"
ADAPTER, CONFIG = "adapter_model.safetensors", "adapter_config.json"


def has_adapters(model: nn.Module) -> bool:
    """Return whether a model has PEFT adapters: from `get_peft_model`, or from `add_adapter` of transformers."""
    bare, peft = unwrap(model), sys.modules.get("peft")  # imported if there are any
    return peft is not None and (isinstance(bare, peft.PeftModel) or getattr(bare, "_hf_peft_config_loaded", False))


def adapter_names(model: nn.Module, tensors: Mapping[str, Any]) -> set[str]:
    """Return the names of the weights of a model's adapters, active or not, and of the originals of copied layers.

    The original of a copied layer may be random, such as a new head: then only the checkpoint has it.

    Args:
        model: A model with adapters.
        tensors: Its weights by name; only their shapes are used.
    """
    from peft.utils import ModulesToSaveWrapper

    wrapped = [name for name, module in unwrap(model).named_modules() if isinstance(module, ModulesToSaveWrapper)]
    prefixes = tuple(f"{bare_name(name)}.original_module." for name in wrapped)
    return _adapter_names(model, tensors, "auto") | {name for name in tensors if name.startswith(prefixes)}


def _adapter_names(model: nn.Module, tensors: Mapping[str, Any], embeddings: bool | Literal["auto"]) -> set[str]:
    from peft import get_peft_model_state_dict

    bare: Any = unwrap(model)
    raw = _raw_names(bare)
    blank = torch.zeros(1)  # PEFT reads only names and shapes, so the placeholders share one element
    placeholders = {raw.get(name, name): blank.expand(spec_of(tensors, name)[0]) for name in tensors}
    names_by_id = {id(placeholder): bare_name(name) for name, placeholder in placeholders.items()}
    names = set[str]()
    for adapter in bare.peft_config:
        names |= {name for name in tensors if _strip_adapter(name, adapter, _adapter_entries(bare, adapter)) != name}
        entries = get_peft_model_state_dict(
            bare, state_dict=placeholders, adapter_name=adapter, save_embedding_layers=embeddings
        )
        names |= {names_by_id[id(placeholder)] for placeholder in entries.values() if id(placeholder) in names_by_id}
    return names


def _adapter_entries(bare: nn.Module, adapter: str) -> set[str]:
    """Return the bare names of an adapter's entries in the dicts of PEFT's layers; a layer may have the same name."""
    names = set[str]()
    for name, module in bare.named_modules(remove_duplicate=False):
        if any(kind.__module__.startswith("peft.") for kind in type(module).__mro__):
            for child, entries in module.named_children():
                is_dict = isinstance(entries, (nn.ModuleDict, nn.ParameterDict))
                if is_dict or type(entries).__name__ == "BufferDict":  # a class of PEFT
                    names.add(bare_name(".".join(filter(None, (name, child, adapter)))))
    return names


def _strip_adapter(name: str, adapter: str, entries: set[str]) -> str:
    """Return the name of a tensor in PEFT's files, which lacks the name of its adapter."""
    parts = name.split(".")
    for end, part in enumerate(parts):
        if part == adapter and ".".join(parts[: end + 1]) in entries:
            return ".".join(parts[:end] + parts[end + 1 :])
    return name


def _raw_names(bare: nn.Module) -> dict[str, str]:
    """Return the names under which PEFT looks for tensors, with those of wrappers inside the model, by bare name."""
    # the names of the modules, not of the state dict, from which activation checkpointing removes its prefix
    tensors = [*bare.named_parameters(remove_duplicate=False), *bare.named_buffers(remove_duplicate=False)]
    return {bare_name(name): name for name, _ in tensors}


def _adapter_folder(folder: Path, adapter: str) -> Path:
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
    names = _adapter_names(model, tensors, "auto")
    has_embeddings = names != _adapter_names(model, tensors, False)  # so that PEFT does not ask the Hub again
    raw = _raw_names(bare)
    state_dict = {raw.get(name, name): tensors[name] for name in tensors if name in names}
    if isinstance(bare, peft.PeftModel):
        bare.save_pretrained(str(folder), state_dict=state_dict, save_embedding_layers=has_embeddings)
    for adapter, config in bare.peft_config.items():
        target = _adapter_folder(folder, adapter)
        if isinstance(bare, peft.PeftModel):
            written = load_tensors(target / ADAPTER)
        else:  # transformers writes only the active adapter
            target.mkdir(parents=True, exist_ok=True)
            config.save_pretrained(str(target))
            active = peft.get_peft_model_state_dict(
                bare, state_dict=state_dict, adapter_name=adapter, save_embedding_layers=has_embeddings
            )
            written = {f"base_model.model.{name}": tensor for name, tensor in active.items()}
        prefix = "" if isinstance(bare, peft.PeftModel) else "base_model.model."
        entries = _adapter_entries(bare, adapter)
        short = {prefix + name: prefix + _strip_adapter(name, adapter, entries) for name in names}
        renamed = {short.get(bare_name(name), bare_name(name)): tensor for name, tensor in written.items()}
        if renamed.keys() != written.keys() or not (target / ADAPTER).exists():
            save_tensors(renamed, target / ADAPTER)


def save_model(
    model: nn.Module,
    folder: Path,
    overwrite: bool,
    tensors: Mapping[str, Any],
    ranks: Ranks,
    extras: Iterable[Any] = (),
) -> Path:
    """Write a folder that `from_pretrained` opens: weights and config, or only the adapters if the model has any.

    Args:
        model: The model, wrapped or not.
        folder: Created if needed.
        overwrite: Whether to replace an earlier model.
        tensors: Its weights by name. Sharded ones are gathered; all ranks call this.
        ranks: The ranks that have the weights; the main one writes.
        extras: Further objects with a `save_pretrained`, such as a tokenizer.

    Raises:
        ConfigError: If there are weights already and `overwrite` is False, or `folder` is a file.
    """

    def write() -> None:
        if has_adapters(model):
            _check_overwrite(model, folder, overwrite)
            write_adapters(model, folder, adapters)
        for extra in extras:
            extra.save_pretrained(str(folder))

    adapters: dict[str, torch.Tensor] = {}
    if has_adapters(model):
        names = _adapter_names(model, tensors, "auto")
        adapters = {name: gather_to_host(tensors[name]) for name in sorted(names)}
        trained = {bare_name(name) for name, parameter in unwrap(model).named_parameters() if parameter.requires_grad}
        omitted = sorted(trained.intersection(tensors) - names)
        if omitted and ranks.is_main:
            logger.warning(
                "%d weights that train belong to no adapter, and PEFT's format cannot store them: %s%s. Name "
                "their modules in `modules_to_save`; checkpoints have them.",
                len(omitted), ", ".join(omitted[:3]), ", ..." if omitted[3:] else "",
            )  # fmt: skip
    else:
        save_weights(model, folder, overwrite, tensors, ranks)
    ranks.on_main("the writing of a model", write)
    return folder


def _check_overwrite(model: nn.Module, folder: Path, overwrite: bool) -> None:
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"Cannot save the model to {str(folder)!r}: it is a file. Give the path of a folder.")
    bare: Any = unwrap(model)
    files = [_adapter_folder(folder, adapter) / CONFIG for adapter in bare.peft_config]
    existing = [file for file in [*files, folder / WEIGHTS] if file.exists()]
    if existing and not overwrite:
        raise ConfigError(
            f"{str(existing[0])!r} already exists. Pass overwrite=True to replace it, or give another path."
        )


def write_model_files(model: nn.Module, folder: Path, has_all_weights: bool, weights: Sequence[Path]) -> None:
    """Write the files that opening the weights of a checkpoint needs: the model's config, or PEFT's adapters.

    Args:
        model: The model, wrapped or not.
        folder: The folder with the weights.
        has_all_weights: Whether the folder has the frozen weights too; without them no config can open it.
        weights: The files with the weights.
    """
    if has_adapters(model):
        write_adapters(model, folder, TensorFile(list(weights)))
        bare: Any = unwrap(model)
        write_config(bare.get_base_model() if hasattr(bare, "get_base_model") else bare, folder / BASE)
    elif has_all_weights:
        write_config(model, folder)
