"""Model folders for `from_pretrained`: weights, config, PEFT adapters, frozen weights.

A checkpoint is such a folder too. It may exclude frozen weights, of which it has fingerprints.
"""

from __future__ import annotations

import copy
import logging
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from omnitrain.backends.backend import Backend
from omnitrain.checkpoint.safetensors_header import find_tensor_files
from omnitrain.checkpoint.state_dicts import (
    ADAPTER,
    WEIGHTS,
    bare_name,
    class_of,
    model_tensors,
    named_parameters,
    unwrap,
)
from omnitrain.checkpoint.tensor_files import (
    Gather,
    TensorFile,
    change_marker,
    file_content,
    fingerprints,
    gather_to_host,
    load_tensors,
    save_tensors,
    spec_of,
    write_on_main,
)
from omnitrain.core.errors import CheckpointError, ConfigError
from omnitrain.core.files import replace_file
from omnitrain.distributed.ranks import Ranks

logger: logging.Logger = logging.getLogger("omnitrain")

# The folder in a checkpoint for the config of the adapters' base model.
#
# Next to the weights, transformers would take those for the weights of the base model.
BASE = "base_model"
CONFIG = "adapter_config.json"
# The name of the frozen weights in `allow_change`.
FROZEN = "frozen_weights"

# --- writing


def save_model(
    model: nn.Module,
    folder: Path,
    overwrite: bool,
    tensors: Mapping[str, Any] | None = None,
    ranks: Ranks | None = None,
    extras: Iterable[Any] = (),
) -> Path:
    """Write a folder that `from_pretrained` opens: weights and config, or only the adapters if the model has any.

    The file of the weights is replaced atomically.

    Args:
        model: The model, wrapped or not.
        folder: Created if needed.
        overwrite: Whether to replace an earlier model.
        tensors: Its weights by name; None reads them from the model. Sharded ones are gathered; all ranks call this.
        ranks: The ranks that have the weights; the main one writes.
        extras: Further objects with a `save_pretrained`, such as a tokenizer.

    Raises:
        ConfigError: If there are weights already and `overwrite` is False, or `folder` is a file.
    """
    ranks, bare = ranks or Ranks(), unwrap(model)
    weights: Mapping[str, Any] = model_tensors(model) if tensors is None else tensors
    files = [WEIGHTS]
    is_adapted = has_adapters(model)
    if is_adapted:
        peft_model: Any = bare
        files += [str(_adapter_folder(Path(), adapter) / CONFIG) for adapter in peft_model.peft_config]
        names = _adapter_names(model, weights, "auto")
        trained = {name for name, parameter in named_parameters(model) if parameter.requires_grad}
        omitted = sorted(trained.intersection(weights) - names)
        if omitted and ranks.is_main:
            logger.warning(
                "%d weights that train belong to no adapter, and PEFT's format cannot store them: %s%s. Name "
                "their modules in `modules_to_save`; checkpoints have them.",
                len(omitted), ", ".join(omitted[:3]), ", ..." if omitted[3:] else "",
            )  # fmt: skip
        weights = {name: gather_to_host(weights[name]) for name in sorted(names)}

    def write(gather: Gather) -> Path:
        if folder.exists() and not folder.is_dir():
            raise ConfigError(f"Cannot save the model to {str(folder)!r}: it is a file. Give the path of a folder.")
        existing = [folder / file for file in files if (folder / file).exists()]
        if existing and not overwrite:
            raise ConfigError(
                f"{str(existing[0])!r} already exists. Pass overwrite=True to replace it, or give another path."
            )
        folder.mkdir(parents=True, exist_ok=True)
        if is_adapted:
            write_adapters(model, folder, weights)
        else:
            replace_file(folder / WEIGHTS, file_content(weights, gather), sync=False)
            write_config(model, folder)
        for extra in extras:
            extra.save_pretrained(str(folder))
        return folder

    return write_on_main(ranks, [weights], write)


def write_config(model: nn.Module, folder: Path) -> None:
    """Write the model's config next to its weights, if it has one that can be saved."""
    bare: Any = unwrap(model)
    modeling = sys.modules.get("transformers.modeling_utils")  # imported if the model is one of transformers'
    for name in ("config", "generation_config"):
        config: Any = getattr(bare, name, None)
        if not callable(getattr(config, "save_pretrained", None)):
            continue
        if name == "config" and modeling is not None and isinstance(bare, modeling.PreTrainedModel):
            # as the model's save_pretrained does; a config created in code has neither
            config = copy.deepcopy(config)
            config.architectures = [class_of(bare).__name__]
            config.dtype = str(bare.dtype).removeprefix("torch.")
        config.save_pretrained(folder)


def write_model_files(model: nn.Module, folder: Path, has_all_weights: bool, files: Iterable[str]) -> None:
    """Write what opening the weights among the files of a checkpoint needs: the model's config, or PEFT's adapters.

    Without the frozen weights, if it has not all weights, no config can open it.
    """
    if has_adapters(model):
        write_adapters(model, folder, TensorFile(find_tensor_files(folder, files, WEIGHTS)))
        bare: Any = unwrap(model)
        write_config(bare.get_base_model() if hasattr(bare, "get_base_model") else bare, folder / BASE)
    elif has_all_weights:
        write_config(model, folder)


# --- adapters


def has_adapters(model: nn.Module) -> bool:
    """Return whether a model has PEFT adapters: from `get_peft_model`, or from `add_adapter` of transformers."""
    bare, peft = unwrap(model), sys.modules.get("peft")  # imported if there are any
    return peft is not None and (isinstance(bare, peft.PeftModel) or getattr(bare, "_hf_peft_config_loaded", False))


def _adapter_names(model: nn.Module, tensors: Mapping[str, Any], embeddings: bool | Literal["auto"]) -> set[str]:
    """Return the names of the weights of a model's adapters, active or not."""
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

    Of the weights `tensors` only those of the adapters are read.
    """
    import peft

    bare: Any = unwrap(model)
    names = _adapter_names(model, tensors, "auto")
    has_embeddings = names != _adapter_names(model, tensors, False)  # so that PEFT does not ask the Hub again
    raw = _raw_names(bare)
    state_dict = {raw.get(name, name): tensors[name] for name in tensors if name in names}
    is_peft_model = isinstance(bare, peft.PeftModel)
    prefix = "" if is_peft_model else "base_model.model."
    if is_peft_model:
        bare.save_pretrained(str(folder), state_dict=state_dict, save_embedding_layers=has_embeddings)
    for adapter, config in bare.peft_config.items():
        target = _adapter_folder(folder, adapter)
        if is_peft_model:
            written = load_tensors(target / ADAPTER)
        else:  # transformers writes only the active adapter
            target.mkdir(parents=True, exist_ok=True)
            config.save_pretrained(str(target))
            active = peft.get_peft_model_state_dict(
                bare, state_dict=state_dict, adapter_name=adapter, save_embedding_layers=has_embeddings
            )
            written = {prefix + name: tensor for name, tensor in active.items()}
        entries = _adapter_entries(bare, adapter)
        short = {prefix + name: prefix + _strip_adapter(name, adapter, entries) for name in names}
        renamed = {short.get(bare_name(name), bare_name(name)): tensor for name, tensor in written.items()}
        if renamed.keys() != written.keys() or not (target / ADAPTER).exists():
            save_tensors(renamed, target / ADAPTER)


# --- frozen weights


class FrozenWeights:
    """The frozen weights of a run: fingerprints are computed once, and again for weights that were written to.

    Args:
        backend: Has the weights.
        ranks: The ranks of the run.
        save_frozen: Whether checkpoints have them; None leaves them out if there are adapters.
    """

    def __init__(self, backend: Backend, ranks: Ranks, save_frozen: bool | None) -> None:
        self._backend = backend
        self._ranks = ranks
        self._save_frozen = save_frozen
        # Version and fingerprint of each weight, by name.
        self._known: dict[str, tuple[Any, str]] = {}
        self._excluded: dict[str, str] | None = None

    def excluded(self) -> dict[str, str]:
        """Return the fingerprints, by name, of the weights that a checkpoint excludes.

        They have not changed since the first call and were not trained at any checkpoint since, so building the model
        of the run again restores them. A collective call.
        """
        model = self._backend.model
        is_adapted = has_adapters(model)
        if self._save_frozen or (self._save_frozen is None and not is_adapted):
            return {}
        tensors = self._backend.model_tensors()
        trained = {name for name, parameter in named_parameters(model) if parameter.requires_grad}
        if self._excluded is None:
            # buffers may change without training
            changing = trained | {bare_name(name) for name, _ in unwrap(model).named_buffers(remove_duplicate=False)}
            if is_adapted:
                changing |= _adapter_names(model, tensors, "auto") | _original_names(model, tensors)
            self._excluded = self.fingerprints([name for name in tensors if name not in changing], tensors)
        saved = {name: digest for name, digest in self._excluded.items() if name in tensors and name not in trained}
        current = self.fingerprints(saved, tensors)
        self._excluded = {name: digest for name, digest in saved.items() if current[name] == digest}
        return self._excluded

    def fingerprints(self, names: Iterable[str], tensors: Mapping[str, Any]) -> dict[str, str]:
        """Return the fingerprints of some of the present weights, of which `tensors` has all; a collective call."""
        names = list(names)
        if not names:
            return {}
        # hashing all frozen weights of a large model at each save would take minutes
        versions = {name: change_marker(tensors[name]) for name in names}
        stale = [name for name in names if self._known.get(name, (None,))[0] != versions[name]]
        # computing them is collective, so all ranks must agree on the names
        stale = self._ranks.combine("the frozen weights that were written to", stale, lambda each: set().union(*each))
        if stale:
            computed = fingerprints({name: tensors[name] for name in stale}, self._ranks)
            self._known |= {name: (change_marker(tensors[name]), computed[name]) for name in stale}
        return {name: self._known[name][1] for name in names}

    def check(self, saved: Mapping[str, str], where: str) -> None:
        """Reject the checkpoint `where` if the run has other frozen weights than it excludes; a collective call."""
        remedy = (
            "Build the model on the weights of that run (random ones need its seed), or continue with "
            f"these: train(resume_from=..., allow_change={ {FROZEN}!r}). `save_frozen=True` saves them from now on."
        )
        check_fingerprints(saved, self.fingerprints(saved, self._backend.model_tensors()), where, remedy)


def _original_names(model: nn.Module, tensors: Mapping[str, Any]) -> set[str]:
    """Return the names of the originals of copied layers.

    The original may be random, such as a new head: then only the checkpoint has it.
    """
    from peft.utils import ModulesToSaveWrapper

    wrapped = [name for name, module in unwrap(model).named_modules() if isinstance(module, ModulesToSaveWrapper)]
    prefixes = tuple(f"{bare_name(name)}.original_module." for name in wrapped)
    return {name for name in tensors if name.startswith(prefixes)}


def check_fingerprints(saved: Mapping[str, str], current: Mapping[str, str], where: str, remedy: str) -> None:
    """Reject the checkpoint `where` if the weights that it excludes have other fingerprints now.

    Raises:
        CheckpointError: With the name of the first weight that differs, and `remedy` as the last sentences.
    """
    changed = [name for name in saved if current[name] != saved[name]]
    if changed:
        raise CheckpointError(
            f"{where} was saved without the weights that did not train, and {len(changed)} of the {len(saved)} differ "
            f"in this model, the first of them {changed[0]!r}. {remedy}"
        )
