"""Model and optimizer state dicts by parameter name, for safetensors and JSON.

Nothing is pickled or unpickled. `contents.py` has the parts of a trainer that are saved, `model_files.py` the folders
of models. In all functions here `model` may be wrapped, `tensors` are saved ones by name, `saved` is the rest of an
optimizer's state, `where` names a checkpoint in errors, and an error leaves model and optimizer unchanged.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import math
import operator
import random
import reprlib
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from omnitrain.checkpoint.tensor_files import Spec, TensorFile, read_part, spec_of
from omnitrain.core.errors import CheckpointError
from omnitrain.distributed.ranks import Ranks
from omnitrain.optim.muon import Muon
from omnitrain.optim.optimizer_kwargs import IMPLEMENTATION

WEIGHTS, ADAPTER = "model.safetensors", "adapter_model.safetensors"

# --- models


def unwrap(model: nn.Module) -> nn.Module:
    """Return the user's module, without the wrappers of `torch.compile`, DDP and DeepSpeed.

    >>> unwrap(torch.compile(nn.Linear(1, 1)))
    Linear(in_features=1, out_features=1, bias=True)
    """
    while True:
        is_engine = type(model).__name__ == "DeepSpeedEngine"  # by name, as DeepSpeed may not be installed
        if is_engine or isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            model = model.module  # type: ignore[assignment]
        # the wrapper of torch.compile; it has no public attribute for the module in it
        elif hasattr(model, "_orig_mod"):
            model = model._orig_mod  # type: ignore[assignment]
        else:
            return model


def class_of(model: nn.Module) -> type:
    """Return the class of the user's module, which FSDP 2 replaces by a derived class."""
    # `fully_shard` swaps the class of a module for one made of FSDPModule and the class itself
    cls, *bases = type(unwrap(model)).__mro__
    return bases[1] if bases[0].__name__ == "FSDPModule" else cls


def bare_name(name: str) -> str:
    """Return a parameter's name without the prefixes of `torch.compile` and activation checkpointing."""
    return name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")


def named_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters with the names of the bare module; tied ones under each of their names."""
    parameters = unwrap(model).named_parameters(remove_duplicate=False)
    return [(bare_name(name), parameter) for name, parameter in parameters]


def model_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors of the bare module by name; tied ones under their first name."""
    return {name: tensor for name, tensor, first in _named_tensors(model) if name == first}


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor, str]]:
    """Yield name, tensor, and the tensor's first name: tied weights have several names."""
    first_names: dict[Any, str] = {}
    module = unwrap(model)
    parameters = dict(module.named_parameters(remove_duplicate=False))
    for name, value in module.state_dict().items():
        if not isinstance(value, torch.Tensor):
            continue  # see `extra_state`
        tensor = value.detach()
        if hasattr(tensor, "full_tensor"):  # the address of the local shard does not identify a DTensor
            key: Any = id(parameters.get(name, name))
        else:
            # the address is not enough: a view of another shape may begin at the same one
            key = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        name = bare_name(name)
        # all empty tensors have the address 0, without being tied
        yield name, tensor, first_names.setdefault(key if tensor.numel() else name, name)


def extra_state(model: nn.Module) -> dict[str, Any]:
    """Return what the modules' `get_extra_state` returns, by name, as JSON types.

    Raises:
        CheckpointError: If it has something that JSON cannot hold.
    """
    entries = unwrap(model).state_dict().items()
    return {bare_name(name): to_json(value, name) for name, value in entries if not isinstance(value, torch.Tensor)}


def load_weights(
    model: nn.Module,
    tensors: Mapping[str, torch.Tensor],
    where: str,
    extra: Mapping[str, Any] | None = None,
    absent: Collection[str] = (),
    ranks: Ranks | None = None,
) -> None:
    """Copy tensors into a model in place, so optimizers and tied weights stay valid; names, shapes and dtypes must fit.

    Each of the `ranks` loads its shard. A module with custom loading code decides about its buffers. `extra` is from
    `extra_state`; the tensors in `absent` were left out, and stay unchanged.

    Raises:
        CheckpointError: On all ranks, if one rank cannot read a tensor, or as for `check_weights`.
    """
    ranks = ranks or Ranks()
    check_weights(model, tensors, where, absent)
    content: dict[str, Any] = {}

    def read() -> None:
        unread = dict.fromkeys(tensors)
        for name, target, first in _named_tensors(model):
            unread.pop(name, None)
            if first in tensors:
                content[name] = read_part(tensors, first, target)
        for name in unread:  # custom loading code handles them
            content[name] = read_part(tensors, name)

    # everything is read before anything is changed: an unreadable file leaves the model as it was
    ranks.run_on_all("the reading of weights", read)
    for name, value in (extra or {}).items():
        content[name] = from_json(value)
    load_with_custom_hooks(model, content, where, ranks)


def load_with_custom_hooks(
    model: nn.Module, content: Mapping[str, Any], where: str, ranks: Ranks | None = None
) -> None:
    """Load tensors and extra state, by bare names, through a model's `load_state_dict` with its hooks and custom code.

    Raises:
        CheckpointError: On all ranks, if the model rejects them on one of them.
    """
    bare = unwrap(model)
    unshare_elements((*bare.parameters(), *bare.buffers()))  # a forward pass may have expanded a buffer since
    present, content = bare.state_dict(), dict(content)
    for name in present:
        if name not in content and bare_name(name) in content:
            content[name] = content.pop(bare_name(name))
    loads = getattr(bare.load_state_dict, "__func__", None)
    accepted = inspect.signature(bare.load_state_dict).parameters
    is_strict = loads is nn.Module.load_state_dict or "strict" in accepted
    if not is_strict:  # custom code without `strict` may need every entry
        content = {**present, **content}
    before = {}
    # PyTorch checks all names and shapes first, so that a rejected state changes nothing; custom code may stop halfway
    if any(map(has_custom_loader, bare.modules())):
        before = {name: value.detach().clone() for name, value in present.items() if isinstance(value, torch.Tensor)}

    def load() -> None:
        try:
            bare.load_state_dict(content, **({"strict": False} if is_strict else {}))
        except Exception as error:
            raise CheckpointError(
                f"{where} does not fit the model, which rejected it: {type(error).__name__}: {error}. "
                "Build the model as it was built for that run."
            ) from error

    try:
        (ranks or Ranks()).run_on_all("the loading of weights", load)
    except CheckpointError:
        _restore_copies(bare, before)
        raise


def is_expanded(tensor: torch.Tensor) -> bool:
    """Return whether elements of a tensor share memory, as after `expand`; such a tensor cannot be written to.

    >>> is_expanded(torch.zeros(1).expand(4)), is_expanded(torch.zeros(1, 4).expand(1, 4))
    (True, False)
    """
    if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.layout != torch.strided:
        return False
    return 0 in tensor.detach().squeeze().stride()  # which dimensions of size 1 may have, too


def unshare_elements(tensors: Iterable[torch.Tensor]) -> None:
    """Allocate memory for each element of those tensors that are expanded, as `Module.to` does for another device.

    No checkpoint could be loaded into them, and an optimizer would update an element several times.
    """
    for tensor in tensors:
        if is_expanded(tensor):
            tensor.data = tensor.detach().clone(memory_format=torch.contiguous_format)


def _restore_copies(model: nn.Module, before: Mapping[str, torch.Tensor]) -> None:
    present = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    for name in before.keys() & present.keys():
        with torch.no_grad():
            if present[name].shape == before[name].shape:
                present[name].copy_(before[name])
            else:  # custom loading code may have replaced the tensor by one of another shape
                parent, _, attribute = name.rpartition(".")
                setattr(model.get_submodule(parent), attribute, before[name])


def has_custom_loader(module: nn.Module) -> bool:
    """Return whether a module has loading code that is not PyTorch's."""
    kind = type(module)
    for loader in (kind.load_state_dict, kind._load_from_state_dict, *module._load_state_dict_pre_hooks.values()):
        if not getattr(getattr(loader, "hook", loader), "__module__", "").startswith("torch."):
            return True
    return False


def check_weights(model: nn.Module, tensors: Mapping[str, Any], where: str, absent: Collection[str] = ()) -> None:
    """Reject tensors that do not fit a model, of which `absent` were left out.

    Modules with custom loading code decide about their buffers.

    Raises:
        CheckpointError: If one is missing, left over, of another shape, or of a dtype that would lose precision.
    """
    bare, prefixes, specs, further = unwrap(model), tuple[str, ...](), dict[str, Spec](), set[str]()
    for name, module in bare.named_modules():
        if has_custom_loader(module):
            prefixes += (f"{bare_name(name)}." if name else "",)
    parameters = set(map(bare_name, dict(bare.named_parameters(remove_duplicate=False))))
    for name, tensor, first in _named_tensors(model):
        further.add(name)
        if name in parameters or not name.startswith(prefixes):
            specs[first] = tuple(tensor.shape), tensor.dtype
    if prefixes:  # such a module may save more, or fewer, buffers than it has now
        further |= {name for name in tensors if name.startswith(prefixes)} - parameters
    check_fit(specs, tensors, where, further, absent)


def check_fit(
    specs: Mapping[str, Spec],
    tensors: Mapping[str, Any],
    where: str,
    further: Collection[str] = (),
    absent: Collection[str] = (),
) -> None:
    """Reject tensors that do not fit a model, as `check_weights` does.

    Besides those with shape and dtype in `specs`, the tensors may have the names in `further`, with any content.
    """
    missing = sorted(specs.keys() - tensors.keys() - set(absent))
    left_over = sorted({*tensors, *absent} - specs.keys() - set(further))
    if missing or left_over:
        raise CheckpointError(
            f"{where} does not fit the model: missing {missing[:5]}, not in the model {left_over[:5]}. "
            "Build the model as it was built for that run."
        )
    for name, (shape, dtype) in specs.items():
        if name not in tensors:
            continue
        saved_shape, saved_dtype = spec_of(tensors, name)
        if saved_shape != shape:
            raise CheckpointError(
                f"{where} does not fit the model: {name!r} has shape {saved_shape} there and {shape} in the model. "
                "Build the model as it was built for that run; a buffer that changes its shape needs a module with a "
                "custom `load_state_dict` or `_load_from_state_dict`."
            )
        if not holds(dtype, saved_dtype):
            raise CheckpointError(
                f"{where} does not fit the model: {name!r} is of {saved_dtype} there and of {dtype} in the model, "
                "which cannot hold it. Build the model with the dtype of that run."
            )


def holds(dtype: torch.dtype, other: torch.dtype) -> bool:
    """Return whether a dtype can represent all values of another.

    >>> holds(torch.float32, torch.bfloat16), holds(torch.bfloat16, torch.float32), holds(torch.float32, torch.int64)
    (True, False, False)
    """
    if dtype == other:
        return True
    return dtype.is_floating_point and other.is_floating_point and torch.promote_types(dtype, other) == dtype


# --- optimizers


def parameter_names(model: nn.Module) -> dict[int, str]:
    """Return the bare name of every parameter by its `id`."""
    return {id(parameter): bare_name(name) for name, parameter in unwrap(model).named_parameters()}


def names_by_group(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[list[str]]:
    """Return the bare names of the parameters in each group of an optimizer; "?" for one not in the model."""
    names = parameter_names(model)
    return [[names.get(id(parameter), "?") for parameter in group["params"]] for group in optimizer.param_groups]


def optimizer_state(optimizer: torch.optim.Optimizer, model: nn.Module) -> tuple[dict[str, torch.Tensor], Any]:
    """Return an optimizer's tensors, keyed "<parameter>/<entry>", and the rest as JSON types.

    Raises:
        CheckpointError: If it has a parameter that is not in the model and so has no name.
    """
    names, tensors, rest, groups = parameter_names(model), {}, {}, []
    for group in optimizer.param_groups:
        options = {key: to_json(value, key) for key, value in group.items() if key != "params"}
        groups.append({**options, "params": []})
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise CheckpointError(
                    f"The optimizer holds a parameter of shape {tuple(parameter.shape)} that is not the model's, so it "
                    "has no name to be saved under. Make it part of the model."
                )
            name = names[id(parameter)]
            groups[-1]["params"].append(name)
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor):
                    tensors[f"{name}/{key}"] = value
                else:
                    rest.setdefault(name, {})[key] = to_json(value, f"{name}/{key}", tensors)
    shared = {key: value for key, value in optimizer.state.items() if not isinstance(key, torch.Tensor)}
    saved = {"groups": groups, "rest": rest, "shared": to_json(shared, "", tensors)}
    if extra := custom_entries(optimizer):
        saved["own"] = to_json(extra, "own", tensors)
    return tensors, saved


def custom_entries(optimizer: torch.optim.Optimizer, is_sharded: bool = False) -> dict[str, Any]:
    """Return the entries of an optimizer's `state_dict()` other than PyTorch's "state" and "param_groups".

    Raises:
        CheckpointError: If PyTorch's two are missing, or there are others and each rank has a shard of the weights.
    """
    if type(optimizer).state_dict is torch.optim.Optimizer.state_dict:
        return {}
    state, kind = optimizer.state_dict(), type(optimizer).__name__
    if state and not {"state", "param_groups"} <= state.keys():
        raise CheckpointError(
            f"`optimizer` ({kind}) has a state_dict() with {', '.join(map(repr, state))}, where checkpoints need "
            "PyTorch's 'state' and 'param_groups', and accept further entries. Return both, or pass another optimizer."
        )
    extra = {key: value for key, value in state.items() if key not in ("state", "param_groups")}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if extra and (is_sharded or any(hasattr(parameter, "to_local") for parameter in parameters)):
        raise CheckpointError(
            f"`optimizer` ({kind}) has {next(iter(extra))!r} in its state_dict(), which is none of PyTorch's entries. "
            "If the weights are sharded (FSDP, DeepSpeed), it cannot be split between the ranks. Keep it in "
            "`self.state[parameter]`, or use DDP."
        )
    return extra


def restore_optimizer(
    optimizer: torch.optim.Optimizer, model: nn.Module, tensors: Mapping[str, torch.Tensor], saved: Any, where: str
) -> None:
    """Restore what `optimizer_state` returned, by parameter name.

    Raises:
        CheckpointError: As for `check_optimizer`.
    """
    known, names = check_optimizer(optimizer, model, tensors, saved, where), parameter_names(model)
    nested = check_references([saved["rest"], saved["shared"], saved.get("own")], tensors, where)
    entries_of = defaultdict[str, list[str]](list)
    for key in tensors:
        if key not in nested:
            name, _, entry = key.rpartition("/")
            entries_of[name].append(entry)
    optimizer.state.clear()  # before reading the new state: there may not be room for both
    groups, state, restored = [], from_json(saved["shared"], tensors), list[tuple[nn.Parameter, dict[str, Any]]]()
    for present, options in zip(optimizer.param_groups, saved["groups"], strict=True):
        # options of this version of the optimizer that the saved one did not have keep their values
        groups.append({**present, "params": []})
        for key in options.keys() - {"params", *IMPLEMENTATION}:
            groups[-1][key] = like(from_json(options[key]), present.get(key))
        for parameter in present["params"]:
            number, name = len(restored), names[id(parameter)]  # PyTorch numbers parameters over all groups
            groups[-1]["params"].append(number)
            values, specs = from_json(saved["rest"].get(name, {}), tensors), known[name].specs
            # as the optimizer lists them after a step; a file has its tensors in another order
            for entry in sorted(entries_of[name], key=[*specs, *entries_of[name]].index):
                tensor = read_part(tensors, f"{name}/{entry}", parameter)
                values[entry] = tensor if entry not in specs else tensor.to(specs[entry][1])
            restored.append((parameter, values))
            if values:
                state[number] = values
    # as torch's own loading does, place each tensor on the device of its parameter
    extra, custom = saved.get("own", {}), dict[str, torch.Tensor]()
    for key in sorted(check_references([extra], tensors, where)):
        custom[key], devices = tensors[key], {parameter.device for parameter, _ in restored}
        if len(devices) == 1 and custom[key].dim():  # numbers, such as counts, stay on the host
            custom[key] = custom[key].to(devices.pop())
    optimizer.load_state_dict({"state": state, "param_groups": groups, **from_json(extra, custom)})
    for parameter, values in restored:
        loaded = optimizer.state.get(parameter, {})
        for key, tensor in values.items():
            if not isinstance(tensor, torch.Tensor):
                continue
            if loaded[key].dtype != tensor.dtype:
                loaded[key] = tensor.to(parameter.device)  # torch would cast to the parameter's dtype, losing precision
            if loaded[key].shape == parameter.shape and loaded[key].stride() != parameter.stride():
                # fused kernels need both in the same memory layout, such as channels last
                loaded[key] = torch.empty_like(parameter, dtype=loaded[key].dtype).copy_(loaded[key])


def check_optimizer(
    optimizer: torch.optim.Optimizer, model: nn.Module, tensors: Mapping[str, Any], saved: Any, where: str
) -> dict[str, ParamState]:
    """Reject a saved state that does not fit this optimizer, or return the expected one by names of parameters.

    Only shapes and dtypes are read.

    Raises:
        CheckpointError: If its parameters, groups, or state tensors differ.
    """
    names = parameter_names(model)
    check_groups(names_by_group(optimizer, model), saved["groups"], where)
    check_options(optimizer, saved["groups"], where)
    nested = check_references([saved["rest"], saved["shared"], saved.get("own")], tensors, where)
    expected = {names[key]: state for key, state in state_specs(optimizer).items()}
    check_state(expected, tensors, nested, where)
    return expected


def check_options(optimizer: torch.optim.Optimizer, saved: Iterable[Mapping[str, Any]], where: str) -> None:
    """Reject options that do not fit an optimizer's groups; those of the implementation are not compared.

    The constructors of PyTorch's optimizers check the range of each option.
    """
    for present, options in zip(optimizer.param_groups, saved, strict=True):
        kind: Any = stepping_class(optimizer, present)
        is_known = f"{kind.__module__}.".startswith("torch.optim.")
        accepted = inspect.signature(kind).parameters if is_known else ()
        arguments = {}
        for key, value in present.items():
            if key in ("params", *IMPLEMENTATION):
                continue
            if key in options:
                is_number = isinstance(value, torch.Tensor) and value.numel() == 1
                expected, value = value.item() if is_number else value, from_json(options[key])
                check_like(value, expected, f"optimizer option {key!r}", where)
            if key in accepted:
                is_zero = isinstance(value, float) and -_ROUNDING < value < 0  # a schedule that ends at zero
                arguments[key] = 0.0 if is_zero else value
        if not is_known:
            continue
        try:  # all at once, as one may depend on another: Nesterov momentum needs momentum
            kind([nn.Parameter(torch.empty(1, 1))], **arguments)
        except (TypeError, ValueError) as error:
            raise CheckpointError(
                f"{where} is damaged: {kind.__name__} rejects the options of the optimizer there ({error}). Use "
                "another checkpoint."
            ) from None


# How far below zero a schedule that ends at zero may get by rounding.
_ROUNDING = 1e-9
# Entries that PyTorch's optimizers keep for each parameter as a single number; "step" is a count.
_BOOKKEEPING = {"step", "eta", "mu", "mu_product"}


def check_numbers(tensors: TensorFile, saved: Any, where: str) -> None:
    """Reject single numbers of an optimizer's state that would spoil all further steps: NaN, or a negative count.

    Other tensors are not read.
    """
    names, numbers = [], {}
    for key in tensors:
        if key.rpartition("/")[2] in _BOOKKEEPING and tensors.spec_of(key)[0] == ():
            names.append(key)
    for key, number in tensors.read_tensors(names).items():
        numbers[key] = number.item()
    for name, entries in saved["rest"].items():
        for key in entries.keys() & _BOOKKEEPING:
            numbers[f"{name}/{key}"] = from_json(entries[key], tensors)
    for key, value in numbers.items():
        check_like(value, 0.0, f"{key!r} of the optimizer", where)
        if value < 0 and key.endswith("/step"):
            raise CheckpointError(
                f"{where} is damaged: {key!r} of the optimizer is {value} there, which no step leaves. Use another "
                "checkpoint."
            )


def check_references(values: Any, tensors: Mapping[str, Any], where: str) -> set[str]:
    """Return the names of the tensors to which a state from `to_json` refers; one that is missing is an error."""
    names: set[str] = set()
    waiting = [values]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            if "__tensor__" in value:
                names.add(value["__tensor__"])
            waiting.extend(value.values())
        elif isinstance(value, list):
            waiting.extend(value)
    missing = sorted(names - tensors.keys())
    if missing:
        raise CheckpointError(f"{where} is damaged: the tensor {missing[0]!r} is missing. Use another checkpoint.")
    return names


def check_state(
    expected: Mapping[str, ParamState], tensors: Mapping[str, Any], nested: Collection[str], where: str
) -> None:
    """Reject tensors that do not fit an optimizer, whose kernels do not check them; those in `nested` may be any.

    Raises:
        CheckpointError: If one belongs to no parameter, is missing, of another shape, or of a dtype that would lose
            precision.
    """
    entries_of: dict[str, set[str]] = {}
    for key in tensors:
        name, _, entry = key.rpartition("/")
        if key in nested:
            continue
        if name not in expected:
            raise CheckpointError(
                f"{where} does not fit the optimizer: {key!r} belongs to none of its parameters. Take another "
                "checkpoint."
            )
        entries_of.setdefault(name, set()).add(entry)
        spec = expected[name].specs.get(entry)
        if spec is None:
            continue
        shape, dtype = spec_of(tensors, key)
        is_number = shape == () and not (dtype.is_complex or dtype is torch.bool)
        if shape != spec[0] or not (holds(spec[1], dtype) or (is_number and spec[0] == ())):
            raise CheckpointError(
                f"{where} does not fit the optimizer: {key!r} is of shape {shape} and {dtype} there, and of shape "
                f"{spec[0]} and {spec[1]} in the optimizer. Build model and optimizer as they were built for that run, "
                "or use another checkpoint."
            )
    for name, entries in entries_of.items():
        missing = sorted(set(expected[name].required) - entries)
        if missing:
            raise CheckpointError(
                f"{where} does not fit the optimizer: {name + '/' + missing[0]!r} is missing. Build the optimizer as "
                "it was built for that run, or use another checkpoint."
            )


class ParamState(NamedTuple):
    """The state of an optimizer for a parameter: what is known of its tensors, and those that a step needs."""

    specs: Mapping[str, Spec]
    required: Collection[str] = ()


def state_specs(optimizer: torch.optim.Optimizer) -> dict[int, ParamState]:
    """Return the state of an optimizer for each parameter, by the `id` of the parameter.

    It is read from the optimizer, and from a copy that takes a step on the meta device. Only steps of PyTorch's
    optimizers are taken, as others may have side effects. For an optimizer with a custom step nothing is known while
    it has no state: its arithmetic rejects tensors that do not fit, except in fused kernels, which need the state of
    the PyTorch optimizer that it derives from.
    """
    states: dict[int, ParamState] = {}
    for group in optimizer.param_groups:
        kind: Any = stepping_class(optimizer, group)
        step = inspect.unwrap(kind.step)
        # by module, not by class: a subclass that inherits the step allocates the same state
        is_custom = not step.__module__.startswith("torch.optim.")
        if is_custom:
            bases = [cls for cls in kind.__mro__ if cls.__module__.startswith("torch.optim.")]
            step = inspect.unwrap(bases[0].step) if bases and group.get("fused") else None
        fresh: dict[Any, dict[str, Spec]] = {}
        for parameter in group["params"]:
            specs, key = _specs(optimizer.state.get(parameter, {})), (parameter.shape, parameter.dtype)
            if key not in fresh:
                fresh[key] = {} if step is None else _specs_after_step(optimizer, step, group, parameter)
            states[id(parameter)] = ParamState(specs | fresh[key], () if is_custom else (fresh[key] or specs).keys())
    return states


def stepping_class(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> type:
    """Return the class of optimizer that steps a group; Muon steps some of its groups with another."""
    return optimizer.stepping(group) if isinstance(optimizer, Muon) else type(optimizer)


def _specs(state: Mapping[str, Any]) -> dict[str, Spec]:
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in state.items() if torch.is_tensor(tensor)}


def _specs_after_step(optimizer: Any, step: Any, group: Mapping[str, Any], present: torch.Tensor) -> dict[str, Spec]:
    parameter = nn.Parameter(torch.empty(present.shape, dtype=present.dtype, device="meta"))
    parameter.grad = torch.empty_like(parameter)
    # without the constructor, which may register hooks, or reject parameters on the meta device
    copied = object.__new__(stepping_class(optimizer, group))
    # a compiled or profiled step is an attribute of the instance
    copied.__dict__.update(vars(optimizer))
    copied.__dict__.pop("step", None)
    # fused and foreach kernels do not run on the meta device
    plain = dict.fromkeys(group.keys() & IMPLEMENTATION, False)
    copied.param_groups, copied.state = [{**group, **plain, "params": [parameter]}], defaultdict(dict)
    # an optimizer that reads values fails on the meta device, but its state exists by then
    with torch.no_grad(), contextlib.suppress(Exception):
        step(copied)
    specs = _specs(copied.state.get(parameter, {}))
    if group.get("fused") and "step" in specs:  # which fused kernels count in this dtype
        specs["step"] = (), torch.float32
    return specs


def check_like(value: Any, present: Any, what: str, where: str, required: Collection[str] = ()) -> None:
    """Reject a saved value, `what` in errors, of another kind than the present one; None accepts any.

    A number needs a number, a list one as long, a dict the `required` keys.
    """
    if isinstance(value, Mapping) and (missing := sorted(set(required) - value.keys())):
        raise CheckpointError(f"{where} is damaged: {what} lacks {missing[0]!r}. Use another checkpoint.")
    for key, wrong, expected in mismatches(value, present, what, is_exact=True):
        raise CheckpointError(
            f"{where} is damaged: {key} is {reprlib.repr(wrong)} there, where {reprlib.repr(expected)} was expected, "
            "or another of its kind. Use another checkpoint."
        )


def mismatches(value: Any, present: Any, key: str = "", is_exact: bool = False) -> Iterator[tuple[str, Any, Any]]:
    """Yield the values of a state that cannot replace the present ones, as they are of another kind.

    Args:
        value: The state, or a value in it.
        present: The present one.
        key: The name of the value.
        is_exact: Whether lists need the same length, and neither None nor NaN replaces a number.

    Yields:
        The name of the value in the state, the value, and the present one.
    """
    if isinstance(present, Mapping):
        fits = isinstance(value, Mapping)
        for inner in present.keys() & value.keys() if fits else ():
            yield from mismatches(value[inner], present[inner], f"{key}[{inner!r}]", is_exact)
    elif isinstance(present, (list, tuple)):
        fits = isinstance(value, (list, tuple)) and not (is_exact and len(value) != len(present))
        for index, pair in enumerate(zip(value, present, strict=True) if fits and is_exact else ()):
            yield from mismatches(*pair, f"{key}[{index}]", is_exact)
    elif isinstance(present, bool):
        fits = isinstance(value, bool)
    elif isinstance(present, (int, float)):
        fits = isinstance(value, (int, float)) and not isinstance(value, bool)
        fits = fits and (math.isfinite(value) or not (math.isfinite(present) or (is_exact and math.isnan(value))))
    else:
        fits = present is None or isinstance(value, str) or not isinstance(present, str)
    if not fits and (is_exact or value is not None):
        yield key, value, present


def check_groups(present: list[list[str]], saved: Iterable[Mapping[str, Any]], where: str) -> None:
    """Reject groups of an optimizer, by names of their parameters, that hold others than the saved groups."""
    expected = list(map(operator.itemgetter("params"), saved))
    if list(map(sorted, present)) != list(map(sorted, expected)):
        changed = sorted(set(itertools.chain(*present)) ^ set(itertools.chain(*expected)))
        raise CheckpointError(
            f"{where} does not fit the optimizer: its parameter groups hold different parameters"
            f"{': ' + ', '.join(changed[:5]) if changed else ' in other groups'}. "
            "Build it as it was built for that run."
        )


def like(value: Any, present: Any) -> Any:
    """Return a saved option, as a tensor if the present one is one, such as the rate of a compiled step."""
    if isinstance(present, torch.Tensor) and isinstance(value, (int, float)):
        # in place of the number: compiled code would be compiled again for another type
        return torch.full_like(present, value)
    if isinstance(present, list) and isinstance(value, list) and len(present) == len(value):
        return [like(entry, reference) for entry, reference in zip(value, present, strict=True)]
    return value


# --- random numbers


def rng_tensors(device: torch.device) -> tuple[dict[str, torch.Tensor], Any]:
    """Return the state of every generator that training draws from: tensors, and the rest as JSON types."""
    # `gauss` is the second normal number of a pair, which the next call returns
    version, words, gauss = random.getstate()
    numpy_state = np.random.get_state(legacy=False)
    tensors = {"torch": torch.get_rng_state(), "python": torch.tensor(words, dtype=torch.int64)}
    rest: dict[str, Any] = {"python": {"version": version, "gauss": gauss}}
    # another one was put there by the user, who restores it too
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


def restore_rng_tensors(
    tensors: Mapping[str, torch.Tensor], rest: Any, device: torch.device, spare: bool = False
) -> None:
    """Restore the generators from `rng_tensors`; a device of another kind keeps its state.

    With `spare`, the state is only tried on spare generators, which raise the same errors.
    """
    (torch.Generator() if spare else torch.default_generator).set_state(tensors["torch"])
    words = tuple(_check_words(tensors["python"], 625).tolist())
    (random.Random() if spare else random).setstate((rest["python"]["version"], words, rest["python"]["gauss"]))
    if "numpy" in rest:
        key, numpy = _check_words(tensors["numpy"], 624).numpy().astype(np.uint32), rest["numpy"]
        generator = np.random.RandomState() if spare else np.random
        generator.set_state(("MT19937", key, numpy["pos"], numpy["has_gauss"], numpy["gauss"]))
    if "device" in tensors and device.type not in ("cpu", "meta"):
        if spare:
            torch.Generator(device).set_state(tensors["device"])
        else:
            torch.get_device_module(device).set_rng_state(tensors["device"], device)


def check_rng_tensors(tensors: Mapping[str, torch.Tensor], rest: Any, device: torch.device, where: str) -> None:
    """Reject states that are not from `rng_tensors`.

    Raises:
        CheckpointError: If a generator does not accept one.
    """
    try:
        restore_rng_tensors(tensors, rest, device, spare=True)
    except (KeyError, TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise CheckpointError(
            f"{where} is damaged: the random number generators reject its state ({type(error).__name__}: {error}). "
            "Use another checkpoint."
        ) from None


def _check_words(tensor: torch.Tensor, count: int) -> torch.Tensor:
    if tensor.dtype != torch.int64 or tensor.shape != (count,) or tensor.min() < 0 or tensor.max() >= 2**32:
        raise ValueError(f"not {count} words of 32 bits")
    return tensor


# --- JSON


def to_json(value: Any, where: str, tensors: dict[str, torch.Tensor] | None = None) -> Any:
    """Return a state as JSON types, with tags where JSON would change it (tuples, keys that are not strings).

    The tensors in it are added to `tensors`; if that is None, those with a single number become numbers.

    Raises:
        CheckpointError: If it has something that JSON cannot hold.
    """
    if isinstance(value, torch.Tensor) and tensors is not None:
        while where in tensors:  # {"a/b": one, "a": {"b": other}}
            where += "'"
        tensors[where] = value
        return {"__tensor__": where}
    # a number on a GPU is copied here, which waits for the device
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
        f"`{where}` holds a {type(value).__name__}, which checkpoints of tensors and JSON cannot store. "
        "Keep numbers, text, lists and dicts in a state."
    )


def from_json(value: Any, tensors: Mapping[str, torch.Tensor] | None = None) -> Any:
    """Return the state from which `to_json` made these JSON types."""
    if isinstance(value, list):
        return [from_json(entry, tensors) for entry in value]
    if not isinstance(value, dict):
        return value
    if "__tensor__" in value:
        if value["__tensor__"] not in (tensors or {}):
            raise CheckpointError(
                f"A state refers to the tensor {value['__tensor__']!r}, which is missing. Use another checkpoint."
            )
        return (tensors or {})[value["__tensor__"]]
    if "__float__" in value:
        return float(value["__float__"])
    if "__tuple__" in value:
        return tuple(from_json(value["__tuple__"], tensors))
    if "__counter__" in value:
        return Counter({from_json(k): v for k, v in value["__counter__"]})
    if "__dict__" in value:
        return {from_json(k): from_json(v, tensors) for k, v in value["__dict__"]}
    return {key: from_json(entry, tensors) for key, entry in value.items()}
