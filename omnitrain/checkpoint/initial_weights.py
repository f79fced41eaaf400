"""Weights that a model begins with (`init_from`), from checkpoints, model folders and files of other programs.

They may be a part of the model's, or more; what was loaded and what was not is logged. How a run goes on from its own
checkpoint is in `checkpointer.py`.
"""

from __future__ import annotations

import fnmatch
import json
import logging
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from omnitrain.checkpoint.adapters import ADAPTER
from omnitrain.checkpoint.manifest import MANIFEST, Check, check_hashes
from omnitrain.checkpoint.remote import local_copy
from omnitrain.checkpoint.sharded_files import files_of
from omnitrain.checkpoint.state_dicts import (
    WEIGHTS,
    bare_name,
    from_json,
    has_custom_loader,
    load_with_custom_hooks,
    unwrap,
)
from omnitrain.checkpoint.store import Store, is_pointer
from omnitrain.checkpoint.tensor_files import Spec, TensorFile
from omnitrain.checkpoint.verifying import hashed_by_all
from omnitrain.core.errors import CheckpointError, ConfigError, format_list
from omnitrain.core.paths import is_address
from omnitrain.distributed.ranks import Ranks

logger: logging.Logger = logging.getLogger("omnitrain")

_INDEX = ".index.json"
_PICKLED = (".bin", ".pt", ".pth", ".ckpt")
_IN_FOLDERS = (WEIGHTS, WEIGHTS + _INDEX, "pytorch_model.bin", "pytorch_model.bin" + _INDEX)
"""Files with the weights of a folder, the first of which is taken."""


@dataclass(slots=True)
class Initial:
    """Weights that are read once the model is in its place, because it was made on the meta device.

    Attributes:
        names: Their names in the files, by bare names in the model.
        dtypes: What the model casts them to, by the same.
        specs: Their shapes and dtypes in the files, by names there.
        files: Files of safetensors, if each rank may read its parts of them.
        content: The weights by names in the files, on the main rank alone, if it holds them already.
    """

    names: dict[str, str]
    dtypes: dict[str, torch.dtype]
    specs: dict[str, Spec]
    files: list[Path] = field(default_factory=list)
    content: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def open(self, ranks: Ranks) -> Any:
        """Return the weights by names in the files; all ranks open them together, and look up each together."""
        return TensorFile(self.files, ranks) if self.files else _Sent(self, ranks)


class _Sent(Mapping[str, torch.Tensor]):
    """Tensors that the main rank holds, and sends one at a time."""

    is_local = False

    def __init__(self, initial: Initial, ranks: Ranks) -> None:
        self._initial, self._ranks = initial, ranks

    def __getitem__(self, name: str) -> torch.Tensor:
        if self._ranks.is_main:
            return self._ranks.broadcast(self._initial.content[name].detach().cpu().contiguous())
        shape, dtype = self._initial.specs[name]
        return self._ranks.broadcast(torch.empty(shape, dtype=dtype))

    def __iter__(self) -> Iterator[str]:
        return iter(self._initial.specs)

    def __len__(self) -> int:
        return len(self._initial.specs)


def load_initial(model: nn.Module, source: Mapping[str, Any], ranks: Ranks) -> Initial | None:
    """Copy weights into a model that is not in its place yet, on the main rank, from which all ranks start.

    Args:
        model: The user's model.
        source: "path", "ignore" (globs of names) and "convert" (a function, or None), as `settings.source_of` has them.
        ranks: The ranks of the run.

    Returns:
        What is to be read when the model is in its place, if the main rank's has no memory yet.

    Raises:
        ConfigError: If there are no weights, none that the model has, or some of another shape; on all ranks, and
            nothing is changed.
        CheckpointError: If a file is damaged.
    """
    content: dict[str, torch.Tensor] = {}
    states, initial = hashed_by_all(ranks, lambda check: _load(model, **_here(source), content=content, check=check))
    if states and (not ranks.is_main or initial is not None):
        load_with_custom_hooks(model, states, "`init_from`")
    if initial is not None:
        initial.content = content
    return initial


def _here(source: Mapping[str, Any]) -> dict[str, Any]:
    """Return `source` with a path of this machine, for weights that an address names."""
    place = source["path"]
    return {**source, "path": local_copy(place, "init_from") if is_address(place) else place}


def _load(
    model: nn.Module,
    path: Path,
    ignore: Sequence[str],
    convert: Callable[[Any], Any] | None,
    content: dict[str, torch.Tensor],
    check: Check,
) -> tuple[dict[str, Any], Initial | None]:
    """Load what fits, or say what is to be loaded later.

    Returns:
        The states of modules among it, which are no tensors that ranks could share; and what is to be loaded later, of
        which `content` gets what is in memory already.
    """
    where = f"`init_from={str(path)[:500]!r}`"
    read, files, states = _read(path, where, check)
    tensors, states = _divided(read, states, convert, where)
    kinds = _kinds(model)
    with_state = [bare_name(name) for name in unwrap(model).state_dict() if _is_state(name)]
    ignored = _ignored(dict.fromkeys([*tensors, *states, *kinds, *with_state]), ignore, where)
    present = tensors.keys() - states.keys() - ignored
    pairs, missing = _pairs(kinds, present, ignored)
    _check_fit(kinds, tensors, pairs, where)
    loaded = {name: states[name] for name in with_state if name in states and name not in ignored}
    initial = _later(model, kinds, tensors, pairs, where)
    if initial is None:
        _copy(model, kinds, tensors, pairs, loaded, where)
    elif isinstance(tensors, TensorFile):
        initial.files = files
    else:
        content.update({own: tensors[own] for own in pairs.values()})
    missing += [name for name in with_state if name not in loaded and name not in ignored]
    left_over = [name for name in tensors if name in present and name not in kinds]
    left_over += [name for name in states if name not in loaded and name not in ignored]
    dtypes = {name: _spec_of(tensors, own)[1] for name, own in pairs.items()}
    _tell(path, dtypes, kinds, list(loaded), missing, left_over, sorted(ignored))
    return loaded, initial


def _ignored(names: Iterable[str], ignore: Sequence[str], where: str) -> set[str]:
    for pattern in ignore:
        if not fnmatch.filter(names, pattern):
            raise ConfigError(f"{where}: 'ignore' has {pattern!r}, which is no name in the model or in the file.")
    return {name for name in names for one in ignore if fnmatch.fnmatchcase(name, one)}


def _pairs(
    kinds: Mapping[str, torch.Tensor], present: Iterable[str], ignored: Iterable[str]
) -> tuple[dict[str, str], list[str]]:
    """Return the name in the file for each tensor of the model, by its first name there, and those without one."""
    present, ignored = set(present), set(ignored)
    names_of: dict[int, list[str]] = {}
    for name, tensor in kinds.items():
        names_of.setdefault(id(tensor), []).append(name)
    pairs, missing = dict[str, str](), list[str]()
    for first, *others in names_of.values():  # of tied weights, any name does
        name = next((name for name in (first, *others) if name in present), None)
        if name is not None:
            pairs[first] = name
        elif first not in ignored:
            missing.append(first)
    return pairs, missing


def _check_fit(
    kinds: Mapping[str, torch.Tensor], tensors: Mapping[str, Any], pairs: Mapping[str, str], where: str
) -> None:
    wrong: list[str] = []
    for first, name in pairs.items():
        (shape, dtype), own = _spec_of(tensors, name), kinds[first]
        if shape != tuple(own.shape) or dtype.is_floating_point != own.dtype.is_floating_point:
            wrong.append(f"{name} ({_spec(shape, dtype)} there, {_spec(tuple(own.shape), own.dtype)} in the model)")
    if wrong:
        raise ConfigError(
            f"{where} has weights that do not fit the model: {format_list(wrong)}. Name them in 'ignore' to leave them "
            "out, as in init_from={'path': ..., 'ignore': ['head.*']}, or build the model to fit."
        )
    if not pairs:
        raise ConfigError(
            f"{where} has none of the model's weights. Names there: {format_list(list(tensors)[:5])}; in the model: "
            f"{format_list(list(kinds)[:5])}. If they differ by a prefix, rename them: init_from={{'path': ..., "
            "'convert': lambda weights: {name.removeprefix('model.'): one for name, one in weights.items()}}."
        )


def _later(
    model: nn.Module,
    kinds: Mapping[str, torch.Tensor],
    tensors: Mapping[str, Any],
    pairs: Mapping[str, str],
    where: str,
) -> Initial | None:
    """Return what is to be read later, if the model has tensors without memory."""
    empty = [name for name, one in kinds.items() if one.device.type == "meta"]
    if not empty:
        return None
    bare = unwrap(model)
    for path, module in bare.named_modules():
        if has_custom_loader(module) and (
            module is bare or any(name.startswith(f"{bare_name(path)}.") for name in pairs)
        ):
            raise ConfigError(
                f"{where}: {type(module).__name__} has loading code of its own, which needs the whole model, and "
                f"{len(empty)} of its tensors are on the meta device, {empty[0]!r} for instance. Make the model "
                "outside of `torch.device('meta')`, on the main rank at least."
            )
    specs = {own: _spec_of(tensors, own) for own in pairs.values()}
    return Initial(dict(pairs), {name: kinds[name].dtype for name in pairs}, specs)


def _copy(
    model: nn.Module,
    kinds: Mapping[str, torch.Tensor],
    tensors: Mapping[str, torch.Tensor],
    pairs: Mapping[str, str],
    states: Mapping[str, Any],
    where: str,
) -> None:
    if any(map(has_custom_loader, unwrap(model).modules())):
        load_with_custom_hooks(model, {first: tensors[own] for first, own in pairs.items()} | dict(states), where)
        return
    for first, own in pairs.items():  # one at a time in memory
        with torch.no_grad():
            kinds[first].copy_(tensors[own])
    if states:
        load_with_custom_hooks(model, states, where)


def _spec_of(tensors: Mapping[str, Any], name: str) -> Spec:
    if isinstance(tensors, TensorFile):
        return tensors.spec_of(name)
    return tuple(tensors[name].shape), tensors[name].dtype


def _is_state(name: str) -> bool:
    """Whether this is PyTorch's name for what a module's `get_extra_state` returns."""
    return name.rpartition(".")[2] == "_extra_state"


def _kinds(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the model's tensors by bare name, tied ones under each of theirs."""
    bare = unwrap(model)
    kept = bare.state_dict().keys()
    held = [*bare.named_parameters(remove_duplicate=False), *bare.named_buffers(remove_duplicate=False)]
    return {bare_name(name): one for name, one in held if name in kept or bare_name(name) in kept}


def _tell(
    path: Path,
    loaded: Mapping[str, torch.dtype],
    kinds: Mapping[str, torch.Tensor],
    states: Sequence[str],
    missing: Sequence[str],
    left_over: Sequence[str],
    ignored: Sequence[str],
) -> None:
    cast = sorted({str(dtype) for name, dtype in loaded.items() if dtype != kinds[name].dtype})
    values = sum(kinds[name].numel() for name in loaded)
    rows = [("loaded", f"{len(loaded)} tensors, {values} values{f', cast from {format_list(cast)}' if cast else ''}")]
    rows += [("loaded by modules themselves", _counted(states))] if states else []
    rows += [("not in the file, and left as they are", _counted(missing))] if missing else []
    rows += [("not in the model", _counted(left_over))] if left_over else []
    rows += [("ignored", _counted(ignored))] if ignored else []
    level = logging.WARNING if missing or left_over else logging.INFO
    text = "".join(f"\n  {name}: {what}" for name, what in rows)
    logger.log(level, "The model begins with weights of %s.%s", path, text)


def _counted(names: Sequence[str]) -> str:
    return f"{len(names)}: {format_list(names)}"


def _spec(shape: tuple[int, ...], dtype: torch.dtype) -> str:
    return f"{list(shape)} {str(dtype).removeprefix('torch.')}"


# --- files


def weights_in(path: Path, where: str) -> Mapping[str, torch.Tensor]:
    """Return the weights of a checkpoint, of the folder of a model or of a file, by name; most are read one at a time.

    Args:
        path: The folder or file.
        where: Its name in errors.

    Raises:
        ConfigError: If there are none.
        CheckpointError: If a file is missing or damaged.
    """
    content, _, states = _read(path, where)
    return _divided(content, states, None, where)[0]


def _read(path: Path, where: str, check: Check = check_hashes) -> tuple[Any, list[Path], dict[str, Any]]:
    """Return what is in a file, or in the files of a folder, mostly a dict of tensors; the files; and states beside."""
    try:
        path.lstat()
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        raise ConfigError(
            f"{where} does not exist, or cannot be looked at. Pass a checkpoint, a folder with {WEIGHTS!r}, or a file "
            "of weights; a model of the Hub is loaded by `from_pretrained`."
        ) from error
    if is_pointer(path):
        path = Store(path.parent).named(path.name)
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
    found: dict[str, torch.Tensor] = {}
    for file in files:
        found |= _read_file(file, where)
    return found, files, states


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
        files = files_of(folder, manifest["files"], "model")
        if not files:
            raise CheckpointError(f"{str(folder)!r} is incomplete: {WEIGHTS!r} is not among its files.")
        names = [file.relative_to(folder).as_posix() for file in files]
        check(folder, {name: manifest["files"][name] for name in names})
        kept = manifest.get("extra_state") or {}
        return files, {name: from_json(value) for name, value in kept.items()}
    for name in _IN_FOLDERS:
        if (folder / name).is_file():
            return [folder / name], {}
    if (folder / ADAPTER).is_file():
        raise ConfigError(
            f"{where} holds adapters of PEFT alone. Load them before the model is passed: "
            "PeftModel.from_pretrained(model, path, is_trainable=True)."
        )
    inside = Store(folder).kept()
    if inside:
        newest = str(Store(folder).path(inside[-1].step))
        raise ConfigError(f"{where} is the folder of a run. Pass one of its checkpoints, such as {newest!r}.")
    raise ConfigError(f"{where} has no weights in it: none of {', '.join(map(repr, _IN_FOLDERS))}.")


def _read_file(path: Path, where: str) -> Any:
    if path.suffix == ".safetensors":
        return dict(TensorFile(path))
    if path.suffix not in _PICKLED:
        raise ConfigError(
            f"{where}: {path.name!r} is of no kind that is read: .safetensors, {', '.join(_PICKLED)}, or {_INDEX}."
        )
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise ConfigError(
            f"{where}: {path.name!r} cannot be read as weights alone ({str(error).splitlines()[0]:.200}). Files that "
            "would run code are refused: load it yourself if you trust it, and save its weights as safetensors."
        ) from error


def _divided(
    content: Any, states: dict[str, Any], convert: Callable[[Any], Any] | None, where: str
) -> tuple[Mapping[str, torch.Tensor], dict[str, Any]]:
    """Return tensors by name, and the states of modules by theirs, as `convert` makes them."""
    if convert is not None:
        content, states = convert({**content, **states} if isinstance(content, TensorFile) else content), {}
    if isinstance(content, TensorFile):
        return content, states | {name: content[name] for name in content if _is_state(name)}
    if isinstance(content, Mapping):
        named = {bare_name(str(name)): one for name, one in content.items()}
        states = states | {name: one for name, one in named.items() if _is_state(name)}
        if all(isinstance(one, torch.Tensor) for name, one in named.items() if name not in states):
            return {name: one for name, one in named.items() if name not in states}, states
    who = "'convert' returned" if convert is not None else "there is"
    keys: Iterable[Any] = content if isinstance(content, Mapping) else [type(content).__name__]
    inner = next((key for key in keys if isinstance(content, Mapping) and isinstance(content[key], Mapping)), None)
    hint = "" if inner is None else f", as in 'convert': lambda content: content[{inner!r}]"
    raise ConfigError(
        f"{where}: {who} no dict of tensors by name, but {format_list(keys)}. Have 'convert' return one{hint}."
    )
