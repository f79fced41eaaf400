"""Fingerprints of data and user code, to detect changes in resumed runs.

`setting_changes.py` compares settings by name; this module compares the objects behind the names.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import hashlib
import inspect
import numbers
import operator
import sys
import sysconfig
import textwrap
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import FunctionType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from omnitrain.arguments import Settings
from omnitrain.checkpoint.state_dicts import unwrap
from omnitrain.compute.random_state import derive_seed, isolated_rng
from omnitrain.core.errors import DistributedError
from omnitrain.data.loaders import Loader, MapLoader, UserLoader, by_name, count_rows, is_stream
from omnitrain.data.sampling import Fetch
from omnitrain.data.sets import Sets
from omnitrain.data.workers import outlive_signals
from omnitrain.distributed.ranks import Ranks
from omnitrain.model.losses import WeightedLosses

# The names in `allow_change` besides the settings: objects known only by fingerprint.
IDENTITIES = ("train_dataset", "eval_dataset", "data_collator", "compute_metrics", "preprocess_logits_for_metrics")

_SAMPLES = 32
# How many samples of a set are compared between ranks.
_COMPARED = 8
# How long to read samples of one set for a fingerprint; slow data get one from fewer samples.
_LIMIT_S = 2.0
_PYTHON = ".".join(map(str, sys.version_info[:2]))
_PLAIN = {bool, int, float, str, bytes, type(None)}
_INSTALLED = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})


# --- data


def content_digest(value: Any, means: list[float] | None = None, is_partial: bool = False) -> str | None:
    """Return a digest of tensors, arrays, text, numbers, and lists and dicts of these; None for anything else.

    Of a tensor that is sharded over ranks, it is that of this rank's part.

    Args:
        value: The content.
        means: A list to which the means of floats and images are added, which count by their shapes only.
        is_partial: Whether of anything else only its attributes that are tensors count, so that the rest has a digest.

    >>> content_digest({"x": [1, 2.5], "y": "a"}) == content_digest({"y": "a", "x": [1, 2.5]}), content_digest(object())
    (True, None)
    """
    hasher = hashlib.blake2b(digest_size=8)
    return hasher.hexdigest() if _digest(value, hasher.update, means, is_partial) else None


def _digest(
    value: Any, update: Callable[[Any], None], means: list[float] | None = None, is_partial: bool = False
) -> bool:
    """Feed a value to a hash, and return whether all of its content is stable."""
    value = value if means is None else _without_floats(value, means)
    if isinstance(value, torch.Tensor):
        local: Any = value.detach()
        local = local.to_local() if hasattr(local, "to_local") else local
        local = local if local.layout is torch.strided else local.to_dense()
        # the bytes below follow the strides, which do not belong to the content
        local = local.cpu().contiguous()
        update(f"{local.dtype}{tuple(local.shape)}".encode())
        update(local.reshape(-1).view(torch.uint8).numpy() if local.numel() else b"")
    elif isinstance(value, np.ndarray) and value.dtype.kind != "O":
        update(f"{value.dtype}{value.shape}".encode() + value.tobytes())
    elif value is None or isinstance(value, (bool, str, bytes, numbers.Number, np.generic)):
        update(f"{type(value).__name__}{value!r};".encode())
    elif isinstance(value, Mapping):
        update(f"dict{len(value)}".encode())
        return all(
            _digest(key, update, None, is_partial) and _digest(value[key], update, means, is_partial)
            for key in sorted(value, key=repr)
        )
    elif isinstance(value, (list, tuple, np.ndarray)):
        update(f"list{len(value)}".encode())
        if {type(entry) for entry in value} <= (_PLAIN if means is None else _PLAIN - {float}):
            update(repr(list(value)).encode())  # a hundred times faster, for lists of tokens
            return True
        return all(_digest(entry, update, means, is_partial) for entry in value)
    elif hasattr(value, "tobytes") and hasattr(value, "mode"):  # a PIL image
        update(f"{value.mode}{value.size}".encode() + value.tobytes())
    elif is_partial:
        attributes = {} if isinstance(value, type) else getattr(value, "__dict__", {})
        return _digest({name: part for name, part in attributes.items() if isinstance(part, torch.Tensor)}, update)
    else:
        return False
    return True


class _Digests(Dataset[tuple[int, dict[str, Any]]]):
    """What `describe` returns for the parts of samples, except None and what differs when a sample is read twice."""

    def __init__(self, dataset: Any, describe: Callable[[Any], Any]) -> None:
        self.fetch = Fetch(dataset, operator.itemgetter(0), seed=0)
        self.describe = describe

    def __getitem__(self, index: int) -> tuple[int, dict[str, Any]]:
        reads = list[dict[str, Any]]()
        try:
            # read twice: what augmentation changes between two reads cannot be compared between two runs
            for _ in range(2):
                sample: Any = self.fetch(0, np.array([index]))
                if isinstance(sample, (tuple, list)):
                    sample = dict(enumerate(sample))
                parts = sample.items() if isinstance(sample, Mapping) else [("", sample)]
                reads.append({str(name): self.describe(part) for name, part in parts})
        except Exception:  # training raises it again, with its own report
            return index, {}
        first, second = reads
        return index, {name: part for name, part in first.items() if part is not None and second.get(name) == part}


def _read_samples(
    dataset: Any, count: int, has_workers: bool, describe: Callable[[Any], Any]
) -> dict[str, dict[str, Any]]:
    """Return `_Digests` of `count` samples by index and part, in a worker if asked; of fewer if reading takes long."""
    size, samples = count_rows(dataset), dict[str, dict[str, Any]]()
    # by the size only, so that a resumed run reads the same samples
    indices = list(dict.fromkeys(derive_seed(size, draw) % size for draw in range(count))) if size else []
    end = time.monotonic() + _LIMIT_S
    with isolated_rng():
        # h5py and lmdb handles must not be opened before workers fork, so data with workers are read by one
        loader = DataLoader(
            _Digests(dataset, describe), sampler=indices, batch_size=None, num_workers=int(has_workers),
            generator=torch.Generator(), worker_init_fn=outlive_signals,
        )  # fmt: skip
        for index, parts in loader:
            if parts:
                samples[str(index)] = parts
            # slow data, such as images in a store, must not delay the start of a run
            if time.monotonic() > end:
                break
    return samples


def _map_style_dataset(loader: Any) -> tuple[Any, bool]:
    """Return the map-style dataset of a loader, or None, and whether worker processes read it."""
    if isinstance(loader, MapLoader):
        return loader.dataset, loader.has_workers
    if isinstance(loader, UserLoader) and isinstance(loader.loader, DataLoader):
        dataset = loader.loader.dataset
        return (None, False) if is_stream(dataset) else (dataset, loader.loader.num_workers > 0)
    return None, False


def data_fingerprint(loader: Any) -> dict[str, Any] | None:
    """Return the size of a loader's dataset, and digests of some samples by index; None for data without indices.

    Reading draws none of the run's random numbers. If the loader has workers, a worker process reads, so files that the
    dataset opens on first use are not shared with the workers.
    """
    dataset, has_workers = _map_style_dataset(loader)
    if dataset is None or (isinstance(loader, UserLoader) and not loader.reads_all):
        return None
    samples = _read_samples(dataset, _SAMPLES, has_workers, content_digest)
    fingerprint = {"size": count_rows(dataset), "samples": samples}
    rules = {} if loader.rules is None else loader.rules.to_dict()
    options = getattr(dataset, "order_options", None)
    if callable(options):
        rules |= {"order": type(dataset).__name__, **options()}  # type: ignore[operator]
    return {**fingerprint, "rules": rules} if rules else fingerprint


def check_same_data(ranks: Ranks, loaders: Iterable[Any]) -> None:
    """Check, once for each loader, that map-style data, which ranks share out by index, are the same on all ranks.

    Floats may differ as they do between kinds of processors.

    Raises:
        DistributedError: On all ranks, if a sample differs.
    """
    loaders = [loader for loader in loaders if isinstance(loader, Loader) and not loader.is_compared]
    if not loaders:
        return
    samples: dict[tuple[str, str, str], tuple[str, list[float]]] = {}
    with ranks.in_phase("data"):
        for loader in loaders:
            dataset, has_workers = _map_style_dataset(loader)
            if dataset is not None:
                for index, parts in _read_samples(dataset, _COMPARED, has_workers, _summarize).items():
                    samples |= {(loader.name, index, part): parts[part] for part in parts}
        difference = ranks.combine("some samples of the data", samples, _differing_sample)
    if difference:
        name, index = difference
        raise DistributedError(
            f"Sample {index} of {name} is not the same on all ranks, which share the samples out by index: some would "
            "be used several times, and others never. Give every rank the same data: seed a random split, as in "
            "random_split(dataset, lengths, generator=torch.Generator().manual_seed(0)), and sort lists of files."
        )
    for loader in loaders:
        loader.is_compared = True


def _differing_sample(by_rank: Sequence[Mapping[Any, tuple[str, list[float]]]]) -> tuple[str, str] | None:
    """Return the set and the index of a sample that differs between ranks, or None."""
    reference: dict[Any, tuple[str, list[float]]] = {}
    for summaries in by_rank:
        for key, (digest, means) in summaries.items():
            # each rank may have stopped at another sample, so only those that several have are compared
            first, first_means = reference.setdefault(key, (digest, means))
            if digest != first or not np.allclose(first_means, means, 1e-3, 1e-6, equal_nan=True):
                return key[:2]
    return None


def _summarize(value: Any) -> tuple[str, list[float]] | None:
    """Return a digest of the exact values in a part of a sample, and means of its floats; None as `content_digest`.

    >>> _summarize([torch.tensor([1.0, -3.0]), 2])[1]
    [-1.0, 2.0]
    """
    means: list[float] = []
    digest = content_digest(value, means)
    return None if digest is None else (digest, means)


def _without_floats(value: Any, means: list[float]) -> Any:
    """Return dtype and shape of floats or an image, whose means are added to `means`; another value unchanged."""
    array = value
    if isinstance(value, torch.Tensor):
        array = value.detach().cpu()
        array = array.float().numpy() if array.is_floating_point() else array.numpy()
    elif isinstance(value, (float, np.floating)) or (hasattr(value, "tobytes") and hasattr(value, "mode")):
        array = np.asarray(value)
    if not isinstance(array, np.ndarray) or array.dtype.kind not in "biuf" or not array.size:
        return value
    if array.dtype.kind != "f" and array.ndim < 2:
        return value
    means += [float(array.mean(dtype=np.float64)), float(np.abs(array, dtype=np.float64).mean())]
    return f"{array.dtype}{array.shape}"


def changed_data(name: str, saved: Mapping[str, Any], current: Mapping[str, Any]) -> str:
    """Return the difference between two fingerprints of the set `name` as text; empty if none is found."""
    if current["size"] != saved["size"]:
        return f"{name} has {current['size']} samples now, and had {saved['size']}"
    before, after = saved.get("rules", {}), current.get("rules", {})
    rules = {"order", *(before.keys() & after.keys())}
    for rule in (*sorted(rules - {"lengths"}), "lengths"):  # lengths last: their values say little
        if rule in rules and before.get(rule) != after.get(rule):
            return f"{name} has {rule}={after.get(rule)!r} now, and had {before.get(rule)!r}"
    for index, parts in saved["samples"].items():
        present = current["samples"].get(index, {})
        changed = [part for part, digest in parts.items() if present.get(part, digest) != digest]
        if changed or (present and not parts.keys() & present.keys()):
            labels = [
                f"entry {part}" if part.isdigit() else part if part.isprintable() else repr(part) for part in changed
            ]
            entries = f" (its {', '.join(labels)})" if any(changed) else ""
            return f"sample {index} of {name} is not the one that the run was trained with{entries}"
    return ""


# --- code


def code_digest(value: Any) -> str | None:
    """Return a digest of the code of a function or of an object's class, and of the object's attributes.

    Comments, docstrings and formatting do not count. Of installed code, such as PyTorch's losses, the name and the
    options count; of a model, its `forward` and those of its submodules. None if nothing can be compared.

    >>> code_digest(nn.CrossEntropyLoss(label_smoothing=0.1)) == code_digest(nn.CrossEntropyLoss())
    False
    """
    if value is None:
        return None
    parts = list(filter(None, _code_parts(value)))
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=8).hexdigest() if parts else None


def _code_parts(value: Any, callers: tuple[FunctionType, ...] = ()) -> list[str]:
    if isinstance(value, functools.partial):
        options = [content_digest(argument) or "" for argument in (list(value.args), value.keywords)]
        return [*_code_parts(value.func), *options]
    if inspect.ismethod(value):
        return [value.__func__.__qualname__, *_code_parts(value.__self__)]
    if isinstance(value, FunctionType):
        return [_normalized_source(value), *_closure_parts(value, (*callers, value))]
    if not hasattr(value, "__dict__") or isinstance(value, type):
        return [_qualified_name(value)]  # a built-in, or a class
    if isinstance(value, WeightedLosses):
        inner = [part for loss in value.losses.values() for part in _code_parts(loss)]
        return [_qualified_name(value), content_digest(value.weights) or "", *inner]
    options = {}
    if isinstance(value, nn.Module):
        options = {name: getattr(value, name, None) for name in getattr(value, "__constants__", ())}
        options |= {name: buffer for name, buffer in value._buffers.items() if buffer is not None}
    elif dataclasses.is_dataclass(value):
        options = {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
    digests = {name: content_digest(option) for name, option in sorted(options.items())}
    return [_normalized_source(type(value)), *(f"{name}={digest}" for name, digest in digests.items() if digest)]


def _closure_parts(function: FunctionType, callers: tuple[FunctionType, ...]) -> list[str]:
    """Return the closure and the defaults of a function, as far as training does not change them.

    `callers` are the functions whose closures are being read, itself the last: functions may call each other.
    """
    constants, tensors, functions = [], [], []
    for cell in function.__closure__ or ():
        try:
            value: Any = cell.cell_contents
        except ValueError:  # it is empty
            continue
        if isinstance(value, (str, int, float, tuple)):
            constants.append(content_digest(value) or "")
        elif isinstance(value, torch.Tensor) and not value.requires_grad:
            tensors.append(content_digest(value) or "")
        elif isinstance(value, FunctionType) and value not in callers:
            functions += _code_parts(value, callers)
    for value in function.__defaults__ or ():
        if isinstance(value, (str, int, float, tuple)):
            constants.append(content_digest(value) or "")
    return [*constants, *tensors, *functions]


def _qualified_name(value: Any) -> str:
    """Return the name of a class or function; ours as 0.1.0 had them, as digests in checkpoints outlive moves."""
    cls: Any = value if hasattr(value, "__qualname__") else type(value)
    return f"{cls.__module__.replace('omnitrain.model.', 'omnitrain.')}.{cls.__qualname__}"


def _normalized_source(value: Any) -> str:
    """Return the code of the user's function or class in a normal form; of installed code its name."""
    module = sys.modules.get(value.__module__)
    file = getattr(module, "__file__", None) or ""
    if file.startswith(_INSTALLED) or value.__module__.partition(".")[0] in ("builtins", "omnitrain"):
        return _qualified_name(value)
    if getattr(value, "__name__", "") != "<lambda>":  # the source of a lambda is the full statement around it
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(value)))
        except (OSError, TypeError, SyntaxError, ValueError):
            pass
        else:
            for node in ast.walk(tree):
                is_scope = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
                if is_scope and ast.get_docstring(node):
                    node.body = node.body[1:] or [ast.Pass()]
            return ast.dump(tree)
    code = getattr(value, "__code__", None)
    return _qualified_name(value) if code is None else _normalized_bytecode(code)


def _normalized_bytecode(code: Any) -> str:
    """Return bytecode and the names in it, in a form without addresses."""
    constants = [_normalized_bytecode(c) if hasattr(c, "co_code") else _stable_repr(c) for c in code.co_consts]
    return f"{code.co_code.hex()}{constants}{code.co_names}{code.co_varnames}"


def _stable_repr(value: Any) -> str:
    return str(sorted(map(repr, value))) if isinstance(value, frozenset) else repr(value)


def _model_code(model: nn.Module) -> str:
    sources = set[str]()
    for cls in set(map(type, unwrap(model).modules())):
        if isinstance(cls.forward, FunctionType):
            sources.add(_normalized_source(cls.forward))
    return hashlib.blake2b("\n".join(sorted(sources)).encode(), digest_size=8).hexdigest()


# --- both


class Difference(NamedTuple):
    """A difference from a checkpoint, and the name in `allow_change` that allows it."""

    name: str
    text: str

    @property
    def kind(self) -> str:
        """The kind of the difference: "data" or "code"."""
        return "data" if self.name.endswith("_dataset") else "code"


def fingerprint_run(settings: Settings, sets: Sets, model: nn.Module) -> dict[str, Any]:
    """Return digests of the data and the code of a run, by argument and then by name, as JSON types."""
    loaders = {"train_dataset": by_name(sets.train), "eval_dataset": by_name(sets.eval)}
    data: dict[str, dict[str, Any]] = {}
    for name, by_set in loaders.items():
        data[name] = dict(zip(by_set, map(data_fingerprint, by_set.values()), strict=True))
    code: dict[str, dict[str, str]] = {"model": {"": _model_code(model)}}
    for name in ("loss_fn", "unit", "data_collator", "preprocess_logits_for_metrics", "compute_metrics"):
        value = getattr(settings, name)
        for function in value if isinstance(value, (list, tuple)) else [value]:
            digest = None if isinstance(function, str) else code_digest(function)
            if digest is not None:
                code.setdefault(name, {})[_qualified_name(function) if name == "compute_metrics" else ""] = digest
    return {"python": _PYTHON, "data": data, "code": code}


def find_differences(saved: Mapping[str, Any], current: Mapping[str, Any], sets: Sets) -> list[Difference]:
    """Return the differences between two results of `fingerprint_run`, where both have digests."""
    differences = []
    for name, loaders in (("train_dataset", by_name(sets.train)), ("eval_dataset", by_name(sets.eval))):
        for key, loader in loaders.items():
            before, after = saved["data"].get(name, {}).get(key), current["data"][name][key]
            if before and after and before != after and (text := changed_data(loader.name, before, after)):
                differences.append(Difference(name, text))
    if saved["python"] != current["python"]:
        return differences  # `ast` has another form for the same code in another version of Python
    for name, parts in saved["code"].items():
        for part, digest in parts.items():
            if current["code"].get(name, {}).get(part, digest) != digest:
                label = f"{part!r}" if part else f"`{name}`"
                text = f"the code or the options of {label} are not those that the run was trained with"
                differences.append(Difference(name, text))
    return differences


def summarize_data(data: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the size and one digest of each set, of the "data" in a result of `fingerprint_run`."""
    summary: dict[str, dict[str, Any]] = {}
    for name, sets in data.items():
        summary[name] = {}
        for key, entry in sets.items():
            summary[name][key] = entry and {"size": entry["size"], "digest": content_digest(entry)}
    return summary
