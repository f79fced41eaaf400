"""Rehearsals of a run that leave no trace."""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import random
import sys
from collections.abc import Iterable, Iterator
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

from omnitrain.backends.backend import Backend
from omnitrain.core.events import Algorithm, find_overrides
from omnitrain.data.loaders import Loader, by_name
from omnitrain.data.stateful import preserve_state, stateful_parts
from omnitrain.trainer.buffers import unchanged_buffers
from omnitrain.trainer.loop import Loop

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_CONTAINERS = (list, dict, set, collections.deque, collections.OrderedDict)
# The largest tensors outside of parameters and buffers, and the longest containers, that are copied; and the longest
# whose entries are, too, so that no list of a million lists is.
_MAX_BYTES, _MAX_ENTRIES, _MAX_NESTED = 1 << 24, 1 << 20, 1000
# Packages whose objects keep nothing that a pass of a user's model changes.
_LIBRARIES = ("accelerate", "builtins", "datasets", "numpy", "omnitrain", "pandas", "PIL", "tokenizers", "torch")


def rehearse(trainer: Any, call: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return the result of `check` or `plan` of a trainer, as text and as JSON types."""
    result = getattr(trainer, call)(**options)
    return {"trainer": type(trainer).__name__, "text": str(result), "result": result.to_json()}


@contextlib.contextmanager
def unchanged_run(loop: Loop) -> Iterator[None]:
    """Restore on exit what passes of the model and reading of the data change, but for weights.

    Nothing is compiled inside.
    """
    trainer, lifecycle, sets = loop.trainer, loop.lifecycle, loop.sets
    model = trainer.backend.model
    loaders = [loader for loader in (sets.train, *by_name(sets.eval).values()) if isinstance(loader, Loader)]
    settings = trainer.settings
    sources = [settings.data_collator, settings.loss_fn, trainer.unit, *(loader.dataset for loader in loaders
               if hasattr(loader, "dataset")), settings.train_loader]  # fmt: skip
    attributes = _Attributes([trainer, *model.modules(), *_reachable(sources), *loaders])
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    states = [copy.deepcopy(algorithm.state_dict()) for algorithm in trainer.algorithms]
    mean, progress, clock = trainer.loss_mean, lifecycle.progress, lifecycle.clock
    mean_values = {name: getattr(mean, name) for name in mean.__dataclass_fields__}
    lifecycle.progress, lifecycle.clock = copy.copy(progress), copy.deepcopy(clock)
    is_compiled = "torch._dynamo" in sys.modules  # which takes seconds to import
    stance = torch.compiler.set_stance("force_eager") if is_compiled else contextlib.nullcontext()
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(stance)
            stack.enter_context(unchanged_buffers(model))
            stack.enter_context(preserve_state(stateful_parts(settings, model)))
            for loader in loaders:
                stack.enter_context(loader.preserve_state())
            yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        lifecycle.progress, lifecycle.clock = progress, clock
        attributes.restore()
        for name, value in mean_values.items():
            setattr(mean, name, value)
        for algorithm, state in zip(trainer.algorithms, states, strict=True):
            for forget in find_overrides([algorithm], "set_up"):
                forget(trainer)
            if type(algorithm).state_dict is not Algorithm.state_dict:
                algorithm.load_state_dict(state)


@contextlib.contextmanager
def unchanged_attributes(objects: Iterable[Any]) -> Iterator[None]:
    """Restore what objects have as attributes on exit: numbers, generators, lists, small tensors."""
    attributes = _Attributes(objects)
    try:
        yield
    finally:
        attributes.restore()


@contextlib.contextmanager
def unchanged_weights(backend: Backend) -> Iterator[None]:
    """Restore on exit the parameters that require gradients, from copies on the host."""
    parameters = [parameter for parameter in backend.model.parameters() if parameter.requires_grad]
    copies = [backend.local_shard(parameter).to("cpu", copy=True) for parameter in parameters]
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, weights in zip(parameters, copies, strict=True):
                backend.local_shard(parameter).copy_(weights)


def clone_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """Return an optimizer of the same parameters and options without state and hooks, at the peak of its rates."""
    optimizer = getattr(optimizer, "optimizer", optimizer)  # accelerate wraps it
    clone = object.__new__(type(optimizer))
    vars(clone).update(vars(optimizer))
    vars(clone).pop("step", None)  # a schedule counts the steps there
    for name, hooks in vars(optimizer).items():
        if "_hooks" in name and isinstance(hooks, dict):
            setattr(clone, name, type(hooks)())
    clone.state = collections.defaultdict(dict)
    clone.param_groups = []
    for group in optimizer.param_groups:
        rate = group.get("initial_lr", group["lr"])
        rate = rate.clone() if isinstance(rate, torch.Tensor) else rate
        clone.param_groups.append({**group, "params": list(group["params"]), "lr": rate})
    return clone


class _Attributes:
    """Numbers, text, generators, lists and dicts, and small tensors that objects have as attributes."""

    def __init__(self, objects: Iterable[Any]) -> None:
        self._values: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._contents: list[tuple[Any, Any]] = []
        self._generators: list[tuple[Any, Any]] = []
        self._tensors: list[tuple[torch.Tensor, torch.Tensor]] = []
        for thing in objects:
            if state := generator_state(thing):
                self._generators.append((thing, state))
            elif isinstance(attributes := getattr(thing, "__dict__", None), dict):
                self._values.append((attributes, dict(attributes)))
                for name, value in attributes.items():
                    if name not in ("_parameters", "_buffers"):  # FSDP exchanges them, and puts them back itself
                        self._add(value)

    def _add(self, value: Any, depth: int = 3) -> None:
        if type(value) in _CONTAINERS and len(value) <= _MAX_ENTRIES:
            self._contents.append((value, copy.copy(value)))
            if depth and len(value) <= _MAX_NESTED:
                for entry in value.values() if isinstance(value, dict) else value:
                    self._add(entry, depth - 1)
        elif isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
            if value.layout == torch.strided and value.numel() * value.element_size() <= _MAX_BYTES:
                self._tensors.append((value, value.detach().clone()))
        elif state := generator_state(value):
            self._generators.append((value, state))

    def restore(self) -> None:
        """Restore them, and remove attributes that were added."""
        for tensor, content in self._tensors:
            if not torch.equal(tensor, content):
                with torch.no_grad():
                    tensor.copy_(content)
        for container, content in self._contents:
            if isinstance(container, dict):
                if list(container) != list(content) or any(container[key] is not content[key] for key in content):
                    container.clear()
                    container.update(content)
            elif len(container) != len(content) or any(a is not b for a, b in zip(container, content, strict=True)):
                container.clear()
                (container.update if isinstance(container, set) else container.extend)(content)
        for attributes, values in self._values:
            for name in attributes.keys() - values.keys():
                del attributes[name]
            attributes.update(values)
        for generator, state in self._generators:
            _set_generator_state(generator, state)


def generator_state(value: Any) -> Any:
    """Return the state of a generator of random numbers; None for anything else."""
    if isinstance(value, torch.Generator):
        return (value.get_state(),)
    if isinstance(value, np.random.Generator):
        return (copy.deepcopy(value.bit_generator.state),)
    if isinstance(value, np.random.RandomState):
        return (value.get_state(legacy=False),)
    return (value.getstate(),) if isinstance(value, random.Random) else None


def _set_generator_state(generator: Any, state: Any) -> None:
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state[0]
    elif isinstance(generator, random.Random):
        generator.setstate(state[0])
    else:
        generator.set_state(state[0])


def _reachable(roots: Iterable[Any], depth: int = 4) -> list[Any]:
    """Return objects of the user's classes that roots have as attributes, in closures or as globals they name."""
    objects, known, level = list[Any](), set[int](), list(roots)
    for _ in range(depth):
        following = list[Any]()
        for thing in level:
            if id(thing) in known or isinstance(thing, (type, ModuleType, torch.Tensor, *_PLAIN)):
                continue
            known.add(id(thing))
            if isinstance(thing, MethodType):
                following += [thing.__self__, thing.__func__]
            elif isinstance(thing, (list, tuple)):
                following += thing[:1000]
            elif generator_state(thing):
                objects.append(thing)
            elif isinstance(thing, nn.Module):
                objects += thing.modules()
            else:
                is_library = type(thing).__module__.partition(".")[0] in _LIBRARIES
                has_state = isinstance(getattr(thing, "__dict__", None), dict)
                if has_state and (not is_library or isinstance(thing, torch.utils.data.Dataset)):
                    objects.append(thing)
                following += members_of(thing).values()
        level = following
    return objects


def members_of(thing: Any) -> dict[str, Any]:
    """Return the attributes of an object by name; of a function the names that it uses."""
    members: dict[str, Any] = dict(getattr(thing, "__dict__", None) or {})
    while isinstance(thing, functools.partial):
        members, thing = members | thing.keywords, thing.func
    if isinstance(thing, FunctionType):
        code = thing.__code__
        members |= {name: thing.__globals__[name] for name in code.co_names if name in thing.__globals__}
        for name, cell in zip(code.co_freevars, thing.__closure__ or (), strict=False):
            with contextlib.suppress(ValueError):  # not assigned yet
                members[name] = cell.cell_contents
    return members
