"""The backend for FSDP 2."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from types import MappingProxyType
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Shard

from omnitrain.backends.backend import NOTHING
from omnitrain.backends.collective_order import LayerOrder
from omnitrain.backends.ddp import DDP, lacking_gradients
from omnitrain.backends.norms import match_norm_dtypes
from omnitrain.backends.start import WeightInitializer, block_target, full_target, is_plain, named_tensors
from omnitrain.checkpoint.state_dicts import from_json, load_with_custom_hooks, parameter_names
from omnitrain.compute.activation_checkpointing import blocks_in
from omnitrain.compute.tensor_digests import digest_words, to_words
from omnitrain.core.errors import ConfigError, format_list
from omnitrain.optim.build import try_step
from omnitrain.optim.muon import Muon

logger: logging.Logger = logging.getLogger("omnitrain")


class FSDP(DDP):
    """Shards every weight, gradient and moment over the ranks; PyTorch gathers the weights layer by layer.

    accelerate shards the model in place, so every call of it is a sharded one, even by a unit that holds it.
    """

    sharding: ClassVar[str | None] = "FSDP"
    unsupported: Mapping[str, str] = MappingProxyType(
        {
            "closure": "each rank has a part of every weight, and such optimizers go by all weights at once",
            "sparse_gradients": "each rank has a part of every weight, and PyTorch shards only dense gradients",
        }
    )
    forward_is_collective: ClassVar[bool] = True
    dry_run_completes_gradients: ClassVar[bool] = True  # which leaves no gathered gradients behind
    # Whether backward passes currently average the gradients.
    _reduces = True

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        # Parameters without a gradient on this rank in the latest backward pass, by `id`, as FSDP holds them.
        self._unused: dict[int, Any] = {}

    def _wrap(self) -> tuple[nn.Module, nn.Module]:
        self._check_dimensions()
        if is_plain(self.model):
            model = self._divided()
        else:  # sharded by tensor parallelism already, or of classes that have no empty instances
            self._load_full_weights(always=True)
            with self._reducing():
                model, prepared = self.accelerator.prepare(self.model, self._build_optimizer())
            self.optimizer, self._prepared = prepared.optimizer, prepared
        bare = getattr(model, "_orig_mod", model)  # accelerate compiles it if its own settings say so
        self._add_up_by_sums(bare)
        self._watch_collectives(bare)
        if self.ranks.is_main:
            _warn_if_undivided(bare)
        if self.device.type == "cpu":  # FSDP gathers weights in the dtype of autocast and leaves statistics in fp32
            policy = self.accelerator.state.fsdp_plugin.mixed_precision_policy
            match_norm_dtypes(bare, getattr(policy, "param_dtype", None))
        return bare, self.maybe_compile(model)

    def _check_dimensions(self) -> None:
        """Raise ConfigError if a parameter has no dimension along which it could be sharded."""
        names = [
            name for name, tensor in named_tensors(self.model) if isinstance(tensor, nn.Parameter) and not tensor.ndim
        ]
        if names and not self.accelerator.state.fsdp_plugin.ignored_modules:
            raise ConfigError(
                f"{format_list(map(repr, names))} has no dimension, and FSDP shards parameters along their first one. "
                "Give it one, as nn.Parameter(torch.tensor([1.0])) has it, or use DDP or ZeRO."
            )

    def _divided(self) -> nn.Module:
        """Shard the model on the meta device, then fill each rank's shards."""
        initializer = WeightInitializer(self.model, self.ranks, self.initial)
        initializer.fake_cpu_tensors()
        optimizer = self._build_optimizer()
        names = parameter_names(self.model)
        groups = [[names.get(id(tensor), tensor) for tensor in group["params"]] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["params"] = []  # or it would keep the weights that the model loses
        initializer.move_to_meta()
        unused = torch.optim.SGD([{"params": []}])  # accelerate tells parameters apart by their memory
        with self._reducing():
            model, prepared = self.accelerator.prepare(self.model, unused)
        bare = getattr(model, "_orig_mod", model)
        offloads = isinstance(self.accelerator.state.fsdp_plugin.cpu_offload, CPUOffloadPolicy)
        device = self.accelerator.device
        home = "cpu" if offloads else device
        for name, tensor in named_tensors(bare):
            if not isinstance(tensor, nn.Parameter):
                initializer.move_buffer(name, tensor, device)

        def with_memory(tensor: torch.Tensor) -> torch.Tensor:
            return tensor if tensor.device.type != "meta" else torch.empty_like(tensor, device=home)

        bare._apply(with_memory)  # as `to_empty` does, which would clear buffers that are filled
        tensors = dict(named_tensors(bare))
        initializer.load(
            {
                name: block_target(tensor) if isinstance(tensor, DTensor) else full_target(tensor)
                for name, tensor in tensors.items()
            }
        )
        for group, members in zip(optimizer.param_groups, groups, strict=True):
            group["params"] = [tensors[member] if isinstance(member, str) else member for member in members]
        optimizer.state.clear()  # of the weights that the model lost: some optimizers make it when they are made
        prepared.optimizer, self._prepared = optimizer, prepared
        self.optimizer = optimizer
        self._finish_initialization(initializer)
        return model

    def check_update(self) -> None:
        """Raise ConfigError if the optimizer does to sharded weights what DTensor cannot do."""
        if isinstance(self.optimizer, Muon):  # which gathers them
            return
        for group in self.optimizer.param_groups:
            sharded = {shard.dim(): shard for shard in group["params"] if isinstance(shard, DTensor)}
            for shard in sharded.values():
                zeros = torch.zeros([1] * shard.dim(), dtype=shard.dtype, device=shard.device)
                small = DTensor.from_local(zeros, shard.device_mesh, shard.placements, run_check=False)
                parameter = nn.Parameter(small)
                parameter.grad = torch.zeros_like(small)
                try:
                    try_step(type(self.optimizer), group, parameter)
                except (RuntimeError, ValueError) as error:
                    raise ConfigError(
                        f"`optimizer` ({type(self.optimizer).__name__}) cannot update weights that FSDP shards: "
                        f"{str(error).partition('. ')[0].rstrip('.')}. Use another one, such as 'adamw', or DDP."
                    ) from error

    def reset_optimizer(self) -> None:
        super().reset_optimizer()
        self._prepared.optimizer = self.optimizer  # accelerate would keep the state of the former one

    def _add_up_by_sums(self, model: nn.Module) -> None:
        for module in model.modules():
            if isinstance(module, FSDPModule) and self.accelerator.device.type == "cpu":
                # gloo of PyTorch 2.8, asked for the average, gives the sum. In 2.13 the bits are the same either way.
                module.set_force_sum_reduction_for_comms(True)

    def _watch_collectives(self, model: nn.Module) -> None:
        if self.ranks.world_size == 1:
            return
        layers: dict[str, Any] = {
            name: module for name, module in model.named_modules() if isinstance(module, FSDPModule)
        }
        for layer in layers.values():
            for group in _param_groups(layer):
                group.post_backward = functools.partial(self._fill_gradients, group, group.post_backward)
        if len(layers) > 1 and self.compile_options is None:
            remedy = (
                "have the FSDP plugin shard the module that chooses among them as one (transformer_cls_names_to_wrap)"
            )
            self._order = LayerOrder(self.ranks, layers, remedy, _is_sharded)

    def _fill_gradients(self, group: Any, post_backward: Callable[..., None], *args: Any) -> None:
        """Add zeros for parameters without a gradient, which other ranks may have, before gradients are averaged."""
        for member in group.fsdp_params if group.reduce_grads else ():
            parameter = getattr(member, "_unsharded_param", None)
            if parameter is None or not parameter.requires_grad or parameter.grad is not None:
                continue
            if member.unsharded_accumulated_grad is None:
                self._unused[id(member)] = member
                parameter.grad = torch.full_like(parameter, -0.0)
        post_backward(*args)

    def backward(self, loss: torch.Tensor) -> None:
        if self._order is not None:
            self._order.end_forward()
        self._unused.clear()
        super().backward(loss)
        self._clear_unused_gradients()
        if self._order is not None and self._reduces:
            self._order.end_window()

    def _clear_unused_gradients(self) -> None:
        """Free the gradients that are zeros of all ranks, so that the optimizer leaves their parameters unchanged."""
        unused = [member.sharded_param for member in self._unused.values()]
        # a rank without a part of a parameter cannot see what others have added
        unused = [parameter for parameter in unused if parameter.grad is not None and _is_on_all_ranks(parameter)]
        for parameter, is_lacking in zip(
            unused, lacking_gradients([self.local_shard(parameter.grad) for parameter in unused]), strict=True
        ):
            if is_lacking:
                parameter.grad = None

    @contextlib.contextmanager
    def _reducing(self) -> Iterator[None]:
        """Set the dtype of gradient reductions in accelerate's plugin inside; the plugin is the user's own object."""
        plugin = self.accelerator.state.fsdp_plugin
        policy, efficient = plugin.mixed_precision_policy, plugin.cpu_ram_efficient_loading
        plugin.cpu_ram_efficient_loading = False  # it would fill the shards itself, from whole weights
        if self._reductions is not None:
            plugin.mixed_precision_policy = replace(policy or MixedPrecisionPolicy(), reduce_dtype=self._reductions)
        try:
            yield
        finally:
            plugin.mixed_precision_policy = policy
            plugin.cpu_ram_efficient_loading = efficient

    def restore_snapshot(self, snapshot: Mapping[str, torch.Tensor], extra: Mapping[str, Any]) -> None:
        with torch.no_grad():
            for name, tensor in self.model_tensors().items():
                self.local_shard(tensor).copy_(snapshot[name])
        if extra:
            load_with_custom_hooks(
                self.model, {name: from_json(value) for name, value in extra.items()}, "the best weights"
            )

    def shard_and_groups(self, tensor: torch.Tensor) -> tuple[torch.Tensor, list[Any]]:
        if not isinstance(tensor, DTensor):
            return tensor, []
        mesh = tensor.device_mesh
        if any(placement.is_partial() for placement in tensor.placements):
            tensor = tensor.redistribute(placements=[Shard(0) for _ in tensor.placements])
        groups = [
            mesh.get_group(number) for number, placement in enumerate(tensor.placements) if not placement.is_replicate()
        ]
        return tensor.to_local(), groups

    def digest(self, tensors: Sequence[torch.Tensor | None]) -> torch.Tensor:
        total, start = torch.zeros(2, dtype=torch.int64, device=self.device), 0
        sums: dict[tuple[Any, ...], torch.Tensor] = {}
        for tensor in tensors:
            if tensor is None:
                continue
            size = -(-tensor.numel() * tensor.element_size() // 8)
            offset = _first_word(tensor) if isinstance(tensor, DTensor) else None
            if offset is None:
                full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
                total += digest_words(to_words(full), start).to(self.device)
            else:  # every rank digests its shard
                local, groups = self.shard_and_groups(tensor)
                part, key = digest_words(to_words(local), start + offset).to(self.device), tuple(groups)
                sums[key] = sums[key] + part if key in sums else part
            start += size
        for groups, part in sums.items():
            for group in groups:
                dist.all_reduce(part, group=group)
            total += part
        return total

    def accumulating(self, last: bool) -> AbstractContextManager[Any]:
        last = last or self._syncs_each_batch
        if not isinstance(self.model, FSDPModule):
            return NOTHING if last else self.accelerator.no_sync(self.model)
        # on a CPU accelerate's no_sync does nothing, because its state there has no FSDP
        if last is not self._reduces:
            self.model.set_requires_gradient_sync(last)
            self._reduces = last
        return NOTHING

    def _update_frozen(self) -> nn.Module:
        """Freeze and unfreeze the gathered weights too, which backward passes use."""
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.unshard()
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(name in self._trainable)
        self.end_evaluation()
        return self.wrapped

    def gradient_norm(self) -> torch.Tensor:
        norm = super().gradient_norm()
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def end_evaluation(self) -> None:
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # as backward does: before that, the parameters are not those of the optimizer


def _param_groups(module: Any) -> list[Any]:
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)  # since PyTorch 2.11
    return [group for group in (groups if groups is not None else [state._fsdp_param_group]) if group is not None]


def _is_sharded(module: Any) -> bool:
    """Return whether a call of a module gathers its weights."""
    return any(not group.is_unsharded for group in _param_groups(module))


def _is_on_all_ranks(parameter: DTensor) -> bool:
    mesh = parameter.device_mesh
    for number, placement in enumerate(parameter.placements):
        if isinstance(placement, Shard):
            size, parts = parameter.size(placement.dim), mesh.size(number)
            if math.ceil(size / parts) * (parts - 1) >= size:
                return False
    return True


def _warn_if_undivided(model: nn.Module) -> None:
    """Log a warning if a model made of layers is a single unit, whose weights are all gathered at once."""
    layers = sorted({type(block).__name__ for block in blocks_in(model)})
    if layers and sum(isinstance(module, FSDPModule) for module in model.modules()) == 1:
        logger.warning(
            "FSDP takes %s as one unit: in every pass each rank gathers all of its weights. Name the layers that are "
            "gathered one by one: FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="
            "'transformer_based_wrap', transformer_cls_names_to_wrap=%s).", type(model).__name__.removeprefix("FSDP"),
            layers,
        )  # fmt: skip


def _first_word(tensor: DTensor) -> int | None:
    """Return where this rank's shard begins, in words of 8 bytes; None if it is not one block of words."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    is_by_rows = all(placement.is_replicate() or placement == Shard(0) for placement in tensor.placements)
    row = math.prod(tensor.shape[1:]) * tensor.element_size()
    if not is_by_rows or row % 8 or not tensor.ndim:
        return None
    _, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return offsets[0] * row // 8
