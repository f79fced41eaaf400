"""Initialize sharded weights.

A model may have memory on all ranks, only on the main rank, or on none (`torch.device("meta")`). What no rank and no
file has, the main rank initializes by the modules' own methods. The backend shards the model on the meta device; then
each rank fills its shards, one weight at a time, from the main rank or from a file.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from omnitrain.checkpoint.initial_weights import InitialWeights
from omnitrain.checkpoint.state_dicts import bare_name, class_of, unwrap
from omnitrain.core.errors import CheckpointError, ConfigError, format_list
from omnitrain.distributed.ranks import Ranks, as_bytes


class ShardTarget(NamedTuple):
    """The memory of a tensor, or of this rank's shard of it.

    Attributes:
        local: The memory of the shard.
        select: Returns the shard of a full tensor.
        read: Reads the shard from a source, by its name there, without the other ranks.
    """

    local: torch.Tensor
    select: Callable[[torch.Tensor], torch.Tensor]
    read: Callable[[Any, str], torch.Tensor]


def full_target(tensor: torch.Tensor) -> ShardTarget:
    """Return the target of a tensor that is not sharded."""
    local, shape = tensor.detach(), tensor.shape
    size = local.numel()
    return ShardTarget(local, lambda full: full, lambda source, name: source.part(name, 0, size).view(shape))


def block_target(tensor: Any) -> ShardTarget:
    """Return the target of a DTensor: this rank's rectangle of it."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    layout = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    sizes, offsets = map(tuple, layout)

    def select(full: torch.Tensor) -> torch.Tensor:
        for dimension, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
            full = full.narrow(dimension, min(offset, full.shape[dimension] - size), size)
        return full

    return ShardTarget(tensor.to_local().detach(), select, lambda source, name: source.block(name, offsets, sizes))


def flat_target(local: torch.Tensor, begin: int, end: int) -> ShardTarget:
    """Return the target of the values [begin, end) of a tensor in row-major order; `local` may be longer."""
    part = local.detach().narrow(0, 0, end - begin)
    return ShardTarget(
        part, lambda full: full.reshape(-1)[begin:end], lambda source, name: source.part(name, begin, end)
    )


class WeightInitializer:
    """Distributes the initial weights of a model to the ranks.

    All ranks create it at the same place: they agree on the source of each tensor before the first is sent.

    Attributes:
        is_materialized: Whether each rank has all of the tensors, and none is to be read.
        missing_error: Why the model cannot be used until a checkpoint is loaded; "" if it can.
        missing: The names of the tensors without values until then.

    Raises:
        ConfigError: If there are no values for a buffer that no checkpoint has.
        DistributedError: If the models of the ranks differ.
    """

    def __init__(self, model: nn.Module, ranks: Ranks, initial: InitialWeights | None = None) -> None:
        tensors = named_tensors(model)
        ranks.check_equal(
            "The models of the ranks", dict(map(_describe_tensor, tensors)), "Make the same model on every rank."
        )
        empty = [name for name, tensor in tensors if tensor.device.type == "meta"]
        everywhere = ranks.gather("the tensors on the meta device", empty)
        self._model, self._ranks, self._initial = model, ranks, initial
        self.is_materialized: bool = not any(everywhere) and initial is None
        self.missing_error: str = ""
        self.missing: set[str] = set()
        persistent = {bare_name(name) for name in unwrap(model).state_dict()}
        # a buffer that no state_dict has may differ between ranks, unless one of them does not have it
        self._synced = [name for name, _ in tensors if name in persistent or any(everywhere)]
        uninitialized = set(everywhere[0]) - (set() if initial is None else initial.names.keys())
        self._dtypes = {name: tensor.dtype for name, tensor in tensors}
        self._shapes = {name: tensor.shape for name, tensor in tensors}
        # The main rank's tensors, until they are sent.
        self._full: dict[str, torch.Tensor] = {}
        if uninitialized:
            what = "the weights that modules make"
            self._set_missing(ranks.on_main(what, lambda: initialize_missing(model, uninitialized)), persistent)

    def allocate(self) -> None:
        """Allocate each tensor that is on the meta device in host memory, for `load`."""
        self._replace_meta(lambda tensor: torch.empty_like(tensor, device="cpu", requires_grad=False))

    def fake_cpu_tensors(self) -> None:
        """Make tensors on the meta device look like CPU tensors, without memory.

        Optimizers choose their kernels by device and dtype, and are to choose as they do with the weights of all.
        """
        self._replace_meta(lambda tensor: torch.empty((), dtype=tensor.dtype).expand(tensor.shape))

    def _replace_meta(self, replacement: Callable[[torch.Tensor], torch.Tensor]) -> None:
        for _, tensor in named_tensors(self._model):
            if tensor.device.type == "meta":
                _swap(tensor, replacement(tensor))

    def collect_tensors(self) -> None:
        """Keep references to the main rank's tensors, which the model is about to lose."""
        for name, tensor in named_tensors(self._model) if self._ranks.is_main else ():
            if self._is_sent(name):
                self._full[name] = tensor.detach()

    def move_to_meta(self) -> None:
        """Move the tensors of the model to the meta device, and keep references to the main rank's."""
        self.collect_tensors()
        new: dict[int, torch.Tensor] = {}
        for name, tensor in named_tensors(self._model):
            if name in self._synced:
                new[id(tensor)] = _on_meta(tensor)
        _replace(self._model, new)

    def move_buffer(self, name: str, buffer: torch.Tensor, device: torch.device) -> ShardTarget:
        """Move a buffer to a device, with new memory if it is to be loaded, and return its target."""
        new = torch.empty_like(buffer, device=device) if name in self._synced else buffer.to(device)
        _replace(self._model, {id(buffer): new})
        return full_target(new)

    def load(self, targets: Mapping[str, ShardTarget]) -> None:
        """Fill each shard.

        Args:
            targets: The shard of each tensor by its bare name; in the same order on all ranks.

        Raises:
            CheckpointError: On all ranks, if a file cannot be read.
        """
        if self._initial is not None:
            self._read(self._initial, {name: target for name, target in targets.items() if self._is_read(name)})
        for name, target in targets.items():
            if self._is_sent(name):
                self._broadcast(name, target, self._full.pop(name, None))

    def _is_read(self, name: str) -> bool:
        return self._initial is not None and name in self._initial.names

    def _is_sent(self, name: str) -> bool:
        return name in self._synced and name not in self.missing and not self._is_read(name)

    def _broadcast(self, name: str, target: ShardTarget, full: torch.Tensor | None) -> None:
        shape = self._shapes[name]
        if not shape.numel():
            return
        if full is None:
            full = torch.empty(shape, dtype=self._dtypes[name])
        with torch.no_grad():
            target.local.copy_(target.select(self._ranks.broadcast(full.cpu().contiguous())))

    def _read(self, initial: InitialWeights, targets: Mapping[str, ShardTarget]) -> None:
        """Fill shards from files: each rank reads its own, or the main rank reads full tensors."""
        source = initial.open(self._ranks)
        failed = ""
        for name, target in targets.items():
            if not self._shapes[name].numel():
                continue
            source_name = initial.names[name]
            if not source.is_local:
                part = target.select(source[source_name])
            elif failed:
                break
            else:
                try:
                    part = target.read(source, source_name)
                except CheckpointError as error:
                    failed = str(error)
                    continue
            with torch.no_grad():
                # as if a full model had been loaded, and cast afterwards
                target.local.copy_(part.to(initial.dtypes[name]).to(self._dtypes[name]))
            self._ranks.progress_count += 1
        errors = [error for error in self._ranks.gather("the parts that were read", failed) if error]
        if errors:
            raise CheckpointError(errors[0])

    def _set_missing(self, missing: Mapping[str, str], persistent: Collection[str]) -> None:
        """Note the tensors without values, and raise ConfigError for buffers among them, which no file has."""
        if not missing:
            return
        buffers = [f"{name} ({kind})" for name, kind in missing.items() if name not in persistent]
        if buffers:
            raise ConfigError(
                f"The model was made on the meta device, and nothing computes {len(buffers)} of its buffers, which no "
                f"file has: {format_list(buffers)}. Give these modules a `reset_parameters` that sets them, or make "
                "the model outside of `torch.device('meta')` on the main rank."
            )
        described = [f"{name} ({kind})" for name, kind in missing.items()]
        self.missing = set(missing)
        self.missing_error = (
            f"{len(described)} tensors of the main rank's model are on the meta device, and there is nothing to begin "
            f"them with: {format_list(described)}. Pass init_from=... with weights that have them, make the model "
            "outside of `torch.device('meta')` on the main rank, or give these modules a `reset_parameters` that sets "
            "them. A resumed run (resume_from) has its weights."
        )


def initialize_missing(model: nn.Module, names: Collection[str]) -> dict[str, str]:
    """Initialize tensors on the meta device by the modules' own methods, in host memory.

    Return the names of those that no module has initialized, and the classes of their modules.
    """
    bare, missing, present = unwrap(model), set[int](), list[Any]()
    for name, tensor in named_tensors(model):
        if name not in names:
            vars(tensor)["_is_hf_initialized"] = True  # transformers leaves such tensors unchanged
            present.append(tensor)
            continue
        memory = torch.empty(tensor.shape, dtype=tensor.dtype)
        as_bytes(memory).fill_(_UNSET)
        _swap(tensor, memory)
        missing.add(id(tensor))
    owned_by = {id(tensor): module for module in reversed([*bare.modules()]) for tensor in _tensors_of(module)}
    with torch.no_grad(), _skip_initialized():
        for module, owner in _in_order(bare, None, set()):
            # of the modules that share a tensor, the first one draws it
            has_missing = any(
                id(tensor) in missing and owned_by[id(tensor)] is module for tensor in _tensors_of(module)
            )
            if has_missing or owner is not None:
                _initialize_module(module, owner, has_missing)
    for tensor in present:
        del tensor._is_hf_initialized
    unset: dict[str, str] = {}
    for name, tensor in named_tensors(model):  # again, as a module may have replaced them
        if name in names and _is_unset(tensor):
            holders = (module for module in bare.modules() if any(entry is tensor for entry in _tensors_of(module)))
            unset[name] = class_of(next(holders)).__name__
    return unset


# Fills every byte of a tensor without values: NaN, or -1 as an integer.
_UNSET = 255


def _tensors_of(module: nn.Module, recurse: bool = False) -> list[torch.Tensor]:
    return [*module.parameters(recurse), *module.buffers(recurse)]


def _is_unset(tensor: torch.Tensor) -> bool:
    is_meta = tensor.device.type == "meta"
    return bool(tensor.numel()) and (is_meta or bool((as_bytes(tensor.contiguous()) == _UNSET).all()))


def _in_order(module: nn.Module, owner: Any, visited: set[int]) -> Iterator[tuple[nn.Module, Any]]:
    """Yield modules after their children, each with the nearest one around it that has `_init_weights`."""
    if id(module) in visited:
        return
    visited.add(id(module))
    owner = module if callable(getattr(module, "_init_weights", None)) else owner
    for child in module.children():
        yield from _in_order(child, owner, visited)
    yield module, owner


def _initialize_module(module: nn.Module, owner: Any, has_missing: bool) -> None:
    tensors = [tensor for tensor in _tensors_of(module, recurse=True) if hasattr(tensor, "_is_hf_initialized")]
    values = [tensor.clone() for tensor in tensors]
    is_complete = owner is not None and hasattr(owner, "_initialize_weights")  # transformers' sets all tensors
    reset: Any = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    if has_missing and callable(reset) and not is_complete:
        reset()
    if owner is not None:
        owner._init_weights(module)
    for tensor, value in zip(tensors, values, strict=True):
        tensor.copy_(value)


def _skip_initialized() -> Any:
    """Return a context in which transformers skips tensors marked as initialized."""
    known = sys.modules.get("transformers.initialization")
    guard = getattr(known, "guard_torch_init_functions", None)
    return contextlib.nullcontext() if guard is None else guard()


def _swap(tensor: torch.Tensor, memory: torch.Tensor) -> None:
    """Give a tensor other memory in place, so that every reference to it, such as an optimizer's, has that too."""
    new = nn.Parameter(memory, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else memory
    attributes = dict(vars(tensor))
    torch.utils.swap_tensors(tensor, new)
    vars(tensor).update(attributes)


def _replace(model: nn.Module, new: Mapping[int, torch.Tensor]) -> None:
    """Replace tensors of a model by identity: under all names of tied ones."""
    for module in model.modules():
        for entries in (module._parameters, module._buffers):
            for name, tensor in entries.items():
                if tensor is not None and id(tensor) in new:
                    entries[name] = new[id(tensor)]  # type: ignore[assignment]


@contextlib.contextmanager
def preserve_shared_buffers(model: nn.Module) -> Iterator[None]:
    """Keep buffers with several names shared while the model is moved inside: `Module.to` copies each name."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                places.setdefault(id(buffer), []).append((module, name))
    yield
    for (module, name), *aliases in places.values():
        for alias_module, alias_name in aliases:
            alias_module._buffers[alias_name] = module._buffers[name]


def is_plain(model: nn.Module) -> bool:
    """Return whether all tensors of a model are ordinary ones, of which an empty copy can be made."""
    return all(type(tensor) in (torch.Tensor, nn.Parameter) for _, tensor in named_tensors(model))


def named_tensors(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Return each tensor of a model once, by its first bare name."""
    bare = unwrap(model)
    return [(bare_name(name), tensor) for name, tensor in (*bare.named_parameters(), *bare.named_buffers())]


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    empty = torch.empty_like(tensor, device="meta", requires_grad=False)
    if isinstance(tensor, nn.Parameter):
        empty = nn.Parameter(empty, tensor.requires_grad)
    vars(empty).update(vars(tensor))
    return empty


def _describe_tensor(entry: tuple[str, torch.Tensor]) -> tuple[str, str]:
    name, tensor = entry
    trains = ", which trains" if tensor.requires_grad else ""
    return name, f"{tensor.dtype} of shape {tuple(tensor.shape)}{trains}"
