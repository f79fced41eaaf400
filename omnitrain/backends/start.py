"""How the weights that a model begins with get to each rank, which keeps its part of them.

A model may be real on all ranks, on the main rank alone, or on none (`torch.device("meta")`). Its backend divides it
while it has no memory; then each weight arrives, one at a time, from the main rank or from a file, and is cut.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from omnitrain.backends.initialization import OwnWeights
from omnitrain.checkpoint.initial_weights import InitialWeights
from omnitrain.checkpoint.state_dicts import bare_name, unwrap
from omnitrain.core.errors import CheckpointError, ConfigError, format_list
from omnitrain.distributed.ranks import Ranks


class Slot(NamedTuple):
    """A tensor, or the part of one that this rank keeps.

    Attributes:
        local: The memory of the part.
        cut: Returns the part of a whole tensor.
        read: Returns the part of a tensor of a source, by its name there, without the other ranks.
    """

    local: torch.Tensor
    cut: Callable[[torch.Tensor], torch.Tensor]
    read: Callable[[Any, str], torch.Tensor]


def whole_slot(tensor: torch.Tensor) -> Slot:
    """Return the slot of a tensor that each rank has whole."""
    local, shape = tensor.detach(), tensor.shape
    size = local.numel()
    return Slot(local, lambda whole: whole, lambda source, name: source.part(name, 0, size).view(shape))


def block_slot(tensor: Any) -> Slot:
    """Return the slot of a DTensor: this rank's rectangle of it."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    found = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    sizes, offsets = map(tuple, found)

    def cut(whole: torch.Tensor) -> torch.Tensor:
        for dimension, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
            whole = whole.narrow(dimension, min(offset, whole.shape[dimension] - size), size)
        return whole

    return Slot(tensor.to_local().detach(), cut, lambda source, name: source.block(name, offsets, sizes))


def flat_slot(local: torch.Tensor, begin: int, end: int) -> Slot:
    """Return the slot of the values [begin, end) of a tensor in row-major order; `local` may be longer."""
    own = local.detach().narrow(0, 0, end - begin)
    return Slot(own, lambda whole: whole.reshape(-1)[begin:end], lambda source, name: source.part(name, begin, end))


class Start:
    """The weights that a model begins with, on their way to the ranks.

    All ranks make it at the same place: they agree on where each tensor comes from before the first is sent.

    Args:
        model: The user's model.
        ranks: The ranks of the run.
        initial: What `load_initial` left to be read, if it did.

    Attributes:
        is_real: Whether each rank has all of the tensors, and none is to be read.
        unfilled: Why the model cannot be used until a checkpoint is loaded; "" if it can.
        lacking: The names of the tensors that it lacks until then.

    Raises:
        DistributedError: If the models of the ranks differ.
    """

    def __init__(self, model: nn.Module, ranks: Ranks, initial: InitialWeights | None = None) -> None:
        held = named_tensors(model)
        ranks.check_equal("The models of the ranks", dict(map(_described, held)), "Make the same model on every rank.")
        empty = [name for name, one in held if one.device.type == "meta"]
        everywhere = ranks.gather("the tensors on the meta device", empty)
        self._model, self._ranks, self._initial = model, ranks, initial
        self.is_real: bool = not any(everywhere) and initial is None
        self.unfilled: str = ""
        self.lacking: set[str] = set()
        kept = {bare_name(name) for name in unwrap(model).state_dict()}
        self._persistent: set[str] = kept
        # a buffer that no state_dict has may differ between ranks, unless one of them does not have it
        self._taken = [name for name, _ in held if name in kept or any(everywhere)]
        self._nowhere = set(everywhere[0]) - (set() if initial is None else initial.names.keys())
        self._dtypes = {name: one.dtype for name, one in held}
        self._shapes = {name: one.shape for name, one in held}
        self._whole: dict[str, torch.Tensor] = {}
        """The main rank's tensors, until they are sent."""

    def give_memory(self) -> None:
        """Give each tensor that is on the meta device memory of its own, on the host, for `fill`."""
        self._swap(lambda tensor: torch.empty_like(tensor, device="cpu", requires_grad=False))

    def pretend(self) -> None:
        """Have tensors on the meta device look like such of the host, without memory.

        Optimizers choose their kernels by device and dtype, and are to choose as they do with the weights of all.
        """
        self._swap(lambda tensor: torch.empty((), dtype=tensor.dtype).expand(tensor.shape))

    def _swap(self, made: Callable[[torch.Tensor], torch.Tensor]) -> None:
        for name, tensor in named_tensors(self._model):
            if tensor.device.type == "meta":
                # swapped in place, so that every reference to the parameter, such as an optimizer's, gets the new one
                new = made(tensor)
                if isinstance(tensor, nn.Parameter):
                    new = nn.Parameter(new, tensor.requires_grad)
                attributes = dict(vars(tensor))
                torch.utils.swap_tensors(tensor, new)
                vars(tensor).update(attributes)
                self._whole.pop(name, None)

    def take(self) -> None:
        """Take hold of the main rank's tensors, which the model is about to lose."""
        for name, tensor in named_tensors(self._model) if self._ranks.is_main else ():
            if name in self._taken and name not in self._nowhere and not self._is_read(name):
                self._whole[name] = tensor.detach()

    def empty(self) -> None:
        """Put the tensors of the model on the meta device, with the main rank's taken hold of."""
        self.take()
        new: dict[int, torch.Tensor] = {}
        for name, tensor in named_tensors(self._model):
            if name in self._taken:
                new[id(tensor)] = _on_meta(tensor)
        _replace(self._model, new)

    def place_buffer(self, name: str, buffer: torch.Tensor, device: torch.device) -> Slot:
        """Put a buffer on a device, with memory of its own if it is to be filled, and return its slot."""
        new = torch.empty_like(buffer, device=device) if name in self._taken else buffer.to(device)
        _replace(self._model, {id(buffer): new})
        return whole_slot(new)

    def fill(self, slots: Mapping[str, Slot]) -> None:
        """Have each part arrive.

        Args:
            slots: The part of each tensor by its bare name; in the same order on all ranks.

        Raises:
            CheckpointError: On all ranks, if a file cannot be read.
            ConfigError: If there are no values for a tensor.
        """
        if self._initial is not None:
            self._read(self._initial, {name: slot for name, slot in slots.items() if self._is_read(name)})
        for name, slot in slots.items():
            if name in self._taken and name not in self._nowhere and not self._is_read(name):
                self._send(name, slot, self._whole.pop(name, None))
        wanted = {name: slot for name, slot in slots.items() if name in self._nowhere}
        if self._nowhere:
            self._make(wanted)

    def _is_read(self, name: str) -> bool:
        return self._initial is not None and name in self._initial.names

    def _send(self, name: str, slot: Slot, whole: torch.Tensor | None) -> None:
        """Cut this rank's part of a tensor that the main rank has."""
        shape = self._shapes[name]
        if not shape.numel():
            return
        if whole is None:
            whole = torch.empty(shape, dtype=self._dtypes[name])
        with torch.no_grad():
            slot.local.copy_(slot.cut(self._ranks.broadcast(whole.cpu().contiguous())))

    def _read(self, initial: InitialWeights, slots: Mapping[str, Slot]) -> None:
        """Fill parts from files: each rank reads its own, or the main rank reads them whole."""
        source = initial.open(self._ranks)
        failed = ""
        for name, slot in slots.items():
            if not self._shapes[name].numel():
                continue
            own = initial.names[name]
            if not source.is_local:
                part = slot.cut(source[own])
            elif failed:
                break
            else:
                try:
                    part = slot.read(source, own)
                except CheckpointError as error:
                    failed = str(error)
                    continue
            with torch.no_grad():
                # as if a whole model had been loaded, and cast afterwards
                slot.local.copy_(part.to(initial.dtypes[name]).to(self._dtypes[name]))
            self._ranks.progress_count += 1
        errors = [one for one in self._ranks.gather("the parts that were read", failed) if one]
        if errors:
            raise CheckpointError(errors[0])

    def _make(self, slots: Mapping[str, Slot]) -> None:
        """Fill what no rank and no file has with what the modules make of it, on the main rank."""
        ranks, specs = self._ranks, {name: (self._shapes[name], self._dtypes[name]) for name in self._shapes}
        own = OwnWeights(self._model, specs, self._nowhere) if ranks.is_main else None
        steps = own.steps() if own is not None else None
        made: dict[str, torch.Tensor] = {}

        def step() -> list[str] | None:
            assert steps is not None
            made.clear()
            found = next(steps, None)
            if found is None:
                return None
            made.update(found)
            return list(made)

        try:
            while (names := ranks.on_main("the weights that modules make", step)) is not None:
                for name in names:
                    self._send(name, slots[name], made.get(name))
        finally:
            if own is not None:
                own.end()
        lacking = ranks.on_main("the weights that are lacking", lambda: own.lacking() if own is not None else {})
        if lacking:
            self._note_lacking(lacking)

    def _note_lacking(self, lacking: Mapping[str, str]) -> None:
        ways = (
            "Pass init_from=... with weights that have them, make the model outside of `torch.device('meta')` on the "
            "main rank, or give these modules a `reset_parameters` that sets them"
        )
        derived = [f"{name} ({kind})" for name, kind in lacking.items() if name not in self._persistent]
        if derived:  # of which no file has a value
            raise ConfigError(
                f"The model was made on the meta device, and nothing computes {len(derived)} of its buffers, which no "
                f"file has: {format_list(derived)}. Give these modules a `reset_parameters` that sets them, or make "
                "the model outside of `torch.device('meta')` on the main rank."
            )
        named = [f"{name} ({kind})" for name, kind in lacking.items()]
        self.lacking = set(lacking)
        self.unfilled = (
            f"{len(named)} tensors of the main rank's model are on the meta device, and there is nothing to begin "
            f"them with: {format_list(named)}. {ways}. A resumed run (resume_from) has its weights."
        )


def _replace(model: nn.Module, new: Mapping[int, torch.Tensor]) -> None:
    """Put other tensors where a model has some, by identity: under all names of tied ones."""
    for module in model.modules():
        for entries in (module._parameters, module._buffers):
            for name, tensor in entries.items():
                if tensor is not None and id(tensor) in new:
                    entries[name] = new[id(tensor)]  # type: ignore[assignment]


@contextlib.contextmanager
def preserve_shared_buffers(model: nn.Module) -> Iterator[None]:
    """Move a model inside, and keep its buffers that have several names one: `Module.to` makes one of each name."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, one in module._buffers.items():
            if one is not None:
                places.setdefault(id(one), []).append((module, name))
    yield
    for (module, name), *others in places.values():
        for other, alias in others:
            other._buffers[alias] = module._buffers[name]


def names_of(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[int, str]:
    """Return the bare names of tensors by identity."""
    return {id(one): bare_name(name) for name, one in tensors}


def is_plain(model: nn.Module, kinds: Collection[type] = (torch.Tensor, nn.Parameter)) -> bool:
    """Whether all tensors of a model are ordinary ones, of which an empty copy can be made."""
    return all(type(one) in kinds for _, one in named_tensors(model))


def named_tensors(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Return each tensor of a model once, by its first bare name."""
    bare = unwrap(model)
    return [(bare_name(name), one) for name, one in (*bare.named_parameters(), *bare.named_buffers())]


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    empty = torch.empty_like(tensor, device="meta", requires_grad=False)
    if isinstance(tensor, nn.Parameter):
        empty = nn.Parameter(empty, tensor.requires_grad)
    vars(empty).update(vars(tensor))
    return empty


def _described(entry: tuple[str, torch.Tensor]) -> tuple[str, str]:
    name, tensor = entry
    trains = ", which trains" if tensor.requires_grad else ""
    return name, f"{tensor.dtype} of shape {tuple(tensor.shape)}{trains}"
