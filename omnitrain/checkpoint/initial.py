"""Weights that a model begins with (`init_from`), from checkpoints, model folders and files of other programs.

They may be a part of the model's, or more; what was loaded and what was not is logged. How a run goes on from its own
checkpoint is in `checkpointer.py`.
"""

from __future__ import annotations

import fnmatch
import json
import logging
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from omnitrain.backends.ddp import start_from_main
from omnitrain.checkpoint.adapters import ADAPTER
from omnitrain.checkpoint.disk import hashing
from omnitrain.checkpoint.manifest import MANIFEST
from omnitrain.checkpoint.state import WEIGHTS, bare_name, from_json, load_by_own_way, unwrap
from omnitrain.checkpoint.store import Store, is_pointer
from omnitrain.checkpoint.tensors import TensorFile, spec_of
from omnitrain.distributed import Ranks
from omnitrain.errors import CheckpointError, ConfigError, listed

__all__ = ["load_initial"]

logger: logging.Logger = logging.getLogger("omnitrain")

_INDEX = ".index.json"
_PICKLED = (".bin", ".pt", ".pth", ".ckpt")
_IN_FOLDERS = (WEIGHTS, WEIGHTS + _INDEX, "pytorch_model.bin", "pytorch_model.bin" + _INDEX)
"""Files with the weights of a folder, the first of which is taken."""


def load_initial(model: nn.Module, source: Mapping[str, Any], ranks: Ranks) -> None:
    """Copy weights into a model that is not in its place yet; the main rank reads them, and all ranks have them.

    Args:
        model: The user's model.
        source: "path", "ignore" (globs of names) and "convert" (a function, or None), as `settings.source_of` has them.
        ranks: The ranks of the run.

    Raises:
        ConfigError: If there are no weights, none that the model has, or some of another shape; on all ranks, and
            nothing is changed.
        CheckpointError: If a file is damaged.
    """
    states = ranks.on_main("the weights of `init_from`", lambda: _load(model, **source))
    if ranks.world_size > 1:
        start_from_main(unwrap(model), ranks)
    if states and not ranks.is_main:
        load_by_own_way(model, states, "`init_from`")


def _load(model: nn.Module, path: Path, ignore: Sequence[str], convert: Callable[[Any], Any] | None) -> dict[str, Any]:
    """Load what fits, and return the states of modules among it, which are no tensors that ranks could share."""
    where = f"`init_from={str(path)[:500]!r}`"
    tensors, states = _divided(*_read(path, where), convert, where)
    kinds = _kinds(model, where)
    with_state = [bare_name(name) for name in unwrap(model).state_dict() if _is_state(name)]
    names = dict.fromkeys([*tensors, *states, *kinds, *with_state])
    for pattern in ignore:
        if not fnmatch.filter(names, pattern):
            raise ConfigError(f"{where}: 'ignore' has {pattern!r}, which is no name in the model or in the file.")
    ignored = {name for name in names for one in ignore if fnmatch.fnmatchcase(name, one)}
    present = tensors.keys() - states.keys() - ignored
    names_of: dict[int, list[str]] = {}
    for name, tensor in kinds.items():
        names_of.setdefault(id(tensor), []).append(name)
    content: dict[str, torch.Tensor] = {}
    missing, wrong = list[str](), list[str]()
    for first, *others in names_of.values():  # of tied weights, any name does
        name = next((name for name in (first, *others) if name in present), None)
        if name is None:
            missing += [first] if first not in ignored else []
            continue
        shape, dtype = spec_of(tensors, name)
        own = kinds[first]
        if shape != tuple(own.shape) or dtype.is_floating_point != own.dtype.is_floating_point:
            wrong.append(f"{name} ({_spec(shape, dtype)} there, {_spec(tuple(own.shape), own.dtype)} in the model)")
        content[first] = tensors[name]
    if wrong:
        raise ConfigError(
            f"{where} has weights that do not fit the model: {listed(wrong)}. Name them in 'ignore' to leave them out, "
            "as in init_from={'path': ..., 'ignore': ['head.*']}, or build the model to fit."
        )
    if not content:
        raise ConfigError(
            f"{where} has none of the model's weights. Names there: {listed(list(tensors)[:5])}; in the model: "
            f"{listed(list(kinds)[:5])}. If they differ by a prefix, rename them: init_from={{'path': ..., 'convert': "
            "lambda weights: {name.removeprefix('model.'): one for name, one in weights.items()}}."
        )
    loaded = {name: states[name] for name in with_state if name in states and name not in ignored}
    load_by_own_way(model, content | loaded, where)
    missing += [name for name in with_state if name not in loaded and name not in ignored]
    left_over = [name for name in tensors if name in present and name not in kinds]
    left_over += [name for name in states if name not in loaded and name not in ignored]
    _tell(path, content, kinds, list(loaded), missing, left_over, sorted(ignored))
    return loaded


def _is_state(name: str) -> bool:
    """Whether this is PyTorch's name for what a module's `get_extra_state` returns."""
    return name.rpartition(".")[2] == "_extra_state"


def _kinds(model: nn.Module, where: str) -> dict[str, torch.Tensor]:
    """Return the model's tensors by bare name, tied ones under each of theirs."""
    bare = unwrap(model)
    kept = bare.state_dict().keys()
    held = [*bare.named_parameters(remove_duplicate=False), *bare.named_buffers(remove_duplicate=False)]
    found = {bare_name(name): one for name, one in held if name in kept or bare_name(name) in kept}
    empty = [name for name, one in found.items() if one.device.type == "meta"]
    if empty:
        raise ConfigError(
            f"{where}: {len(empty)} tensors of the model are on the meta device, {empty[0]!r} for instance, which has "
            "no memory for weights. Make the model outside of `torch.device('meta')`, on the main rank at least."
        )
    return found


def _tell(
    path: Path,
    content: Mapping[str, torch.Tensor],
    kinds: Mapping[str, torch.Tensor],
    states: Sequence[str],
    missing: Sequence[str],
    left_over: Sequence[str],
    ignored: Sequence[str],
) -> None:
    cast = sorted({str(one.dtype) for name, one in content.items() if one.dtype != kinds[name].dtype})
    values = sum(one.numel() for one in content.values())
    rows = [("loaded", f"{len(content)} tensors, {values} values{f', cast from {listed(cast)}' if cast else ''}")]
    rows += [("loaded by modules themselves", _counted(states))] if states else []
    rows += [("not in the file, and left as they are", _counted(missing))] if missing else []
    rows += [("not in the model", _counted(left_over))] if left_over else []
    rows += [("ignored", _counted(ignored))] if ignored else []
    level = logging.WARNING if missing or left_over else logging.INFO
    text = "".join(f"\n  {name}: {what}" for name, what in rows)
    logger.log(level, "The model begins with weights of %s.%s", path, text)


def _counted(names: Sequence[str]) -> str:
    return f"{len(names)}: {listed(names)}"


def _spec(shape: tuple[int, ...], dtype: torch.dtype) -> str:
    return f"{list(shape)} {str(dtype).removeprefix('torch.')}"


# --- files


def _read(path: Path, where: str) -> tuple[Any, dict[str, Any]]:
    """Return what is in a file, or in the files of a folder, mostly a dict of tensors; and states beside these."""
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
    if path.is_dir():
        path, states = _file_in(path, where)
    if not path.name.endswith(_INDEX):
        return _read_file(path, where), states
    found: dict[str, torch.Tensor] = {}
    try:
        files = set(json.loads(path.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ConfigError(f"{where}: {path.name!r} is no index of files of weights: {error}.") from error
    for name in sorted(files):
        part = path.parent / Path(str(name)).name
        if not part.is_file():
            raise CheckpointError(f"{str(path.parent)!r} is incomplete: {part.name!r} is missing. Fetch it again.")
        found |= _read_file(part, where)
    return found, states


def _file_in(folder: Path, where: str) -> tuple[Path, dict[str, Any]]:
    if (folder / MANIFEST).is_file():
        manifest = Store(folder.parent).verify(folder, hashes=False)
        entry = manifest["files"].get(WEIGHTS)
        if entry is None:
            raise CheckpointError(f"{str(folder)!r} is incomplete: {WEIGHTS!r} is not among its files.")
        with hashing([folder / WEIGHTS]) as digests:
            if next(iter(digests)) != entry["sha256"]:
                raise CheckpointError(f"{str(folder)!r} is damaged: {WEIGHTS!r} does not match its sha256.")
        kept = manifest.get("extra_state") or {}
        return folder / WEIGHTS, {name: from_json(value) for name, value in kept.items()}
    for name in _IN_FOLDERS:
        if (folder / name).is_file():
            return folder / name, {}
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
        return TensorFile(path)
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
        f"{where}: {who} no dict of tensors by name, but {listed(keys)}. Have 'convert' return one{hint}."
    )
