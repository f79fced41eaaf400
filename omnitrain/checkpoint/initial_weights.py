"""Initial weights of a model (`init_from`), from checkpoints, model folders and files.

They may be some of the model's, or more; a report of what was loaded is logged. `checkpointer.py` resumes runs.
"""

from __future__ import annotations

import fnmatch
import json
import logging
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from omnitrain.checkpoint.manifest import MANIFEST, Check, check_hashes, find_with_shared_hashing, validate
from omnitrain.checkpoint.remote import local_copy
from omnitrain.checkpoint.safetensors_header import find_tensor_files
from omnitrain.checkpoint.state_dicts import (
    ADAPTER,
    WEIGHTS,
    bare_name,
    from_json,
    has_custom_loader,
    load_with_custom_hooks,
    unwrap,
)
from omnitrain.checkpoint.store import Store, is_pointer
from omnitrain.checkpoint.tensor_files import Spec, TensorFile, spec_of
from omnitrain.core.errors import CheckpointError, ConfigError, format_list
from omnitrain.core.paths import is_address
from omnitrain.distributed.ranks import Ranks

logger: logging.Logger = logging.getLogger("omnitrain")

_INDEX = ".index.json"
_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
# Files with the weights of a folder; the first that exists is used.
_WEIGHT_FILES = (WEIGHTS, WEIGHTS + _INDEX, "pytorch_model.bin", "pytorch_model.bin" + _INDEX)


@dataclass(slots=True)
class InitialWeights:
    """Weights that are read after the model is placed, because it was built on the meta device.

    Attributes:
        names: Their names in the files, by bare names in the model.
        dtypes: The model's dtypes, by bare names in the model.
        specs: Their shapes and dtypes in the files, by names there.
        files: Files of safetensors, if each rank can read its shards of them.
        content: The weights by names in the files, if they are in memory already; only on the main rank.
    """

    names: dict[str, str]
    dtypes: dict[str, torch.dtype]
    specs: dict[str, Spec]
    files: list[Path] = field(default_factory=list)
    content: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def open(self, ranks: Ranks) -> Any:
        """Return the weights by names in the files; opening them and each look-up are collective."""
        return TensorFile(self.files, ranks) if self.files else _BroadcastTensors(self, ranks)


class _BroadcastTensors:
    """Tensors of the main rank, which are broadcast one at a time."""

    def __init__(self, initial: InitialWeights, ranks: Ranks) -> None:
        self._initial, self._ranks = initial, ranks

    def __getitem__(self, name: str) -> torch.Tensor:
        if self._ranks.is_main:
            return self._ranks.broadcast(self._initial.content[name].detach().cpu().contiguous())
        shape, dtype = self._initial.specs[name]
        return self._ranks.broadcast(torch.empty(shape, dtype=dtype))


def load_initial(model: nn.Module, source: Mapping[str, Any], ranks: Ranks) -> InitialWeights | None:
    """Copy weights into a model before it is placed, on the main rank, from which they are broadcast later.

    The `source` is from `parse_init_from`. If the main rank's model is on the meta device, the weights to read after
    it is placed are returned.

    Raises:
        ConfigError: On all ranks, if there are no weights, none that the model has, or some of another shape; nothing
            is changed.
        CheckpointError: If a file is damaged.
    """
    path, content = source["path"], dict[str, torch.Tensor]()
    path = local_copy(path, "init_from") if is_address(path) else path
    states, initial = find_with_shared_hashing(
        ranks, lambda check: _load(model, path, source["ignore"], source["convert"], content, check)
    )
    if states and (not ranks.is_main or initial is not None):
        load_with_custom_hooks(model, states, "`init_from`")
    if initial is not None:
        initial.content = content
    return initial


def _load(
    model: nn.Module,
    path: Path,
    ignore: Sequence[str],
    convert: Callable[[Any], Any] | None,
    content: dict[str, torch.Tensor],
    check: Check,
) -> tuple[dict[str, Any], InitialWeights | None]:
    """Load the weights, and return the extra states of modules, which cannot be broadcast.

    Weights to load later are returned, too; those of them that are in memory are added to `content`.
    """
    where = f"`init_from={str(path)[:500]!r}`"
    content_of_files, files, states = _read(path, where, check)
    tensors, states = _split_states(content_of_files, states, convert, where)
    targets = _named_targets(model)
    state_names = [bare_name(name) for name in unwrap(model).state_dict() if _is_state(name)]
    every_name = dict.fromkeys([*tensors, *states, *targets, *state_names])
    for pattern in ignore:
        if not fnmatch.filter(every_name, pattern):
            raise ConfigError(f"{where}: 'ignore' has {pattern!r}, which is no name in the model or in the file.")
    ignored = {name for name in every_name for pattern in ignore if fnmatch.fnmatchcase(name, pattern)}
    present = tensors.keys() - states.keys() - ignored
    names_of: dict[int, list[str]] = {}
    for name, tensor in targets.items():
        names_of.setdefault(id(tensor), []).append(name)
    # tied weights may be saved under any of their names
    matches = {names[0]: next((name for name in names if name in present), None) for names in names_of.values()}
    file_names = {first: name for first, name in matches.items() if name is not None}
    _check_fit(targets, tensors, file_names, where)
    loaded = {name: states[name] for name in state_names if name in states and name not in ignored}
    initial = _defer(model, targets, tensors, file_names, where)
    if initial is not None:
        if isinstance(tensors, TensorFile):
            initial.files = files
        else:
            content.update({file_name: tensors[file_name] for file_name in file_names.values()})
    elif any(map(has_custom_loader, unwrap(model).modules())):
        weights = {first: tensors[name] for first, name in file_names.items()}
        load_with_custom_hooks(model, weights | loaded, where)
    else:
        for first, name in file_names.items():  # one at a time in memory
            with torch.no_grad():
                targets[first].copy_(tensors[name])
        if loaded:
            load_with_custom_hooks(model, loaded, where)
    absent = [first for first, name in matches.items() if name is None]
    absent += [name for name in state_names if name not in loaded]
    extra = [name for name in tensors if name in present and name not in targets]
    extra += [name for name in states if name not in loaded]
    names_by_kind = {
        "loaded by modules themselves": list(loaded),
        "not in the file, unchanged": [name for name in absent if name not in ignored],
        "not in the model": [name for name in extra if name not in ignored],
        "ignored": sorted(ignored),
    }
    dtypes = {first: spec_of(tensors, name)[1] for first, name in file_names.items()}
    cast = sorted({str(dtype) for first, dtype in dtypes.items() if dtype != targets[first].dtype})
    values = sum(targets[first].numel() for first in dtypes)
    rows = [f"loaded: {len(dtypes)} tensors, {values} values{f', cast from {format_list(cast)}' if cast else ''}"]
    rows += [f"{kind}: {len(names)}: {format_list(names)}" for kind, names in names_by_kind.items() if names]
    is_partial = names_by_kind["not in the file, unchanged"] or names_by_kind["not in the model"]
    level = logging.WARNING if is_partial else logging.INFO
    logger.log(level, "The model begins with weights of %s.%s", path, "".join(f"\n  {row}" for row in rows))
    return loaded, initial


def _check_fit(
    targets: Mapping[str, torch.Tensor], tensors: Mapping[str, Any], file_names: Mapping[str, str], where: str
) -> None:
    mismatches: list[str] = []
    for first, name in file_names.items():
        (shape, dtype), target = spec_of(tensors, name), targets[first]
        if shape != tuple(target.shape) or dtype.is_floating_point != target.dtype.is_floating_point:
            saved, expected = _format_spec(shape, dtype), _format_spec(tuple(target.shape), target.dtype)
            mismatches.append(f"{name} ({saved} there, {expected} in the model)")
    if mismatches:
        raise ConfigError(
            f"{where} has weights that do not fit the model: {format_list(mismatches)}. Name them in 'ignore' to leave "
            "them out, as in init_from={'path': ..., 'ignore': ['head.*']}, or build the model to fit."
        )
    if not file_names:
        raise ConfigError(
            f"{where} has none of the model's weights. Names there: {format_list(list(tensors)[:5])}; in the model: "
            f"{format_list(list(targets)[:5])}. If they differ by a prefix, rename them: init_from={{'path': ..., "
            "'convert': lambda weights: {name.removeprefix('model.'): w for name, w in weights.items()}}."
        )


def _defer(
    model: nn.Module,
    targets: Mapping[str, torch.Tensor],
    tensors: Mapping[str, Any],
    file_names: Mapping[str, str],
    where: str,
) -> InitialWeights | None:
    """Return the weights to read later, if the model has tensors on the meta device."""
    meta_names = [name for name, tensor in targets.items() if tensor.device.type == "meta"]
    if not meta_names:
        return None
    bare = unwrap(model)
    for path, module in bare.named_modules():
        if has_custom_loader(module) and (
            module is bare or any(name.startswith(f"{bare_name(path)}.") for name in file_names)
        ):
            raise ConfigError(
                f"{where}: {type(module).__name__} has custom loading code, which needs the full model, and "
                f"{len(meta_names)} of its tensors are on the meta device, {meta_names[0]!r} for instance. Build the "
                "model outside of `torch.device('meta')`, at least on the main rank."
            )
    specs = {name: spec_of(tensors, name) for name in file_names.values()}
    return InitialWeights(dict(file_names), {name: targets[name].dtype for name in file_names}, specs)


def _is_state(name: str) -> bool:
    """Return whether this is PyTorch's name for what a module's `get_extra_state` returns."""
    return name.rpartition(".")[2] == "_extra_state"


def _named_targets(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the model's tensors by bare name, tied ones under each of their names."""
    bare = unwrap(model)
    saved_names = bare.state_dict().keys()
    tensors = [*bare.named_parameters(remove_duplicate=False), *bare.named_buffers(remove_duplicate=False)]
    return {
        bare_name(name): tensor for name, tensor in tensors if name in saved_names or bare_name(name) in saved_names
    }


def _format_spec(shape: tuple[int, ...], dtype: torch.dtype) -> str:
    return f"{list(shape)} {str(dtype).removeprefix('torch.')}"


# --- files


def read_weights(path: Path, where: str) -> Mapping[str, torch.Tensor]:
    """Return the weights of a checkpoint, a model folder or a file by name; most are read one at a time.

    Raises:
        ConfigError: If there are none.
        CheckpointError: If a file is missing or damaged.
    """
    content, _, states = _read(path, where)
    return _split_states(content, states, None, where)[0]


def _read(path: Path, where: str, check: Check = check_hashes) -> tuple[Any, list[Path], dict[str, Any]]:
    """Return the content of a file or folder, usually a dict of tensors; its files; and extra states."""
    try:
        path.lstat()
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        raise ConfigError(
            f"{where} does not exist, or cannot be read. Pass a checkpoint, a folder with {WEIGHTS!r}, or a file "
            "of weights; a model of the Hub is loaded by `from_pretrained`."
        ) from error
    if is_pointer(path):
        path = Store(path.parent).locate(path.name)
    states: dict[str, Any] = {}
    files = [path]
    if path.is_dir():
        files, states = _files_in(path, where, check)
    if files[0].name.endswith(_INDEX):
        files = _files_of_index(files[0], where)
    if all(file.suffix == ".safetensors" for file in files):
        return TensorFile(files), files, states
    if len(files) == 1:
        return _read_file(files[0], where), files, states
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        tensors |= _read_file(file, where)
    return tensors, files, states


def _files_of_index(path: Path, where: str) -> list[Path]:
    try:
        names = set(json.loads(path.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ConfigError(f"{where}: {path.name!r} is no index of files of weights: {error}.") from error
    files = [path.parent / Path(str(name)).name for name in sorted(names)]
    for part in files:
        if not part.is_file():
            raise CheckpointError(f"{str(path.parent)!r} is incomplete: {part.name!r} is missing. Fetch it again.")
    return files


def _files_in(folder: Path, where: str, check: Check) -> tuple[list[Path], dict[str, Any]]:
    if (folder / MANIFEST).is_file():
        manifest = Store(folder.parent).verify(folder, hashes=False)
        validate(manifest, repr(str(folder)), complete=False)
        files = find_tensor_files(folder, manifest["files"], WEIGHTS)
        if not files:
            raise CheckpointError(f"{str(folder)!r} is incomplete: {WEIGHTS!r} is not among its files.")
        names = [file.relative_to(folder).as_posix() for file in files]
        check(folder, {name: manifest["files"][name] for name in names})
        extra_state = manifest.get("extra_state") or {}
        return files, {name: from_json(value) for name, value in extra_state.items()}
    for name in _WEIGHT_FILES:
        if (folder / name).is_file():
            return [folder / name], {}
    if (folder / ADAPTER).is_file():
        raise ConfigError(
            f"{where} has only adapters of PEFT. Load them before the model is passed: "
            "PeftModel.from_pretrained(model, path, is_trainable=True)."
        )
    checkpoints = Store(folder).checkpoint_infos()
    if checkpoints:
        newest = str(Store(folder).path(checkpoints[-1].step))
        raise ConfigError(f"{where} is the folder of a run. Pass one of its checkpoints, such as {newest!r}.")
    raise ConfigError(f"{where} has no weights: none of {', '.join(map(repr, _WEIGHT_FILES))}.")


def _read_file(path: Path, where: str) -> Any:
    if path.suffix == ".safetensors":
        return dict(TensorFile(path))
    if path.suffix not in _PICKLE_SUFFIXES:
        raise ConfigError(
            f"{where}: {path.name!r} is not a supported file: .safetensors, {', '.join(_PICKLE_SUFFIXES)}, or {_INDEX}."
        )
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise ConfigError(
            f"{where}: {path.name!r} cannot be loaded with `weights_only=True` ({str(error).splitlines()[0]:.200}). "
            "Files that would run code are rejected: load it yourself if you trust it, and save its weights as "
            "safetensors."
        ) from error


def _split_states(
    content: Any, states: dict[str, Any], convert: Callable[[Any], Any] | None, where: str
) -> tuple[Mapping[str, torch.Tensor], dict[str, Any]]:
    """Return tensors and extra states of modules by name, after `convert`."""
    if convert is not None:
        content, states = convert({**content, **states} if isinstance(content, TensorFile) else content), {}
    if isinstance(content, TensorFile):
        return content, states | {name: content[name] for name in content if _is_state(name)}
    if isinstance(content, Mapping):
        entries = {bare_name(str(name)): entry for name, entry in content.items()}
        states = states | {name: entry for name, entry in entries.items() if _is_state(name)}
        if all(isinstance(entry, torch.Tensor) for name, entry in entries.items() if name not in states):
            return {name: entry for name, entry in entries.items() if name not in states}, states
    subject = "'convert' returned" if convert is not None else "it has"
    keys: Iterable[Any] = content if isinstance(content, Mapping) else [type(content).__name__]
    inner = next((key for key in keys if isinstance(content, Mapping) and isinstance(content[key], Mapping)), None)
    hint = "" if inner is None else f", as in 'convert': lambda content: content[{inner!r}]"
    raise ConfigError(
        f"{where}: {subject} no dict of tensors by name, but {format_list(keys)}. Have 'convert' return one{hint}."
    )
