"""The backend for one device, and base class of the others.

A backend owns the model, its wrapper, the optimizer and the loss scaler, and is responsible for everything in a step
that depends on where the weights are. `trainer/step.py` decides when to call it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar

import torch
from torch import nn
from torch._utils import _flatten_dense_tensors

from omnitrain.backends.start import WeightInitializer, full_target, named_tensors, preserve_shared_buffers
from omnitrain.checkpoint import state_dicts
from omnitrain.checkpoint.initial_weights import InitialWeights
from omnitrain.checkpoint.tensor_files import host_copy
from omnitrain.compute.precision import Dtypes
from omnitrain.compute.random_state import isolated_rng
from omnitrain.compute.tensor_digests import digest_tensors
from omnitrain.core.errors import ConfigError, format_list
from omnitrain.core.events import ProfilerRanges, wrap_in_range
from omnitrain.distributed.ranks import Ranks
from omnitrain.optim.sparse_gradients import check_optimizer, coalesce

Output = TypeVar("Output")

NOTHING = contextlib.nullcontext()
# The most parameters whose gradients are copied for their norm.
_SMALL_MODEL = 1 << 15


class Backend:
    """One device. The loss scaler is disabled (`enabled=False`) unless the precision is fp16.

    `build_optimizer` is called once the model is in place.

    Attributes:
        model: The user's module, on every backend.
        wrapped: The module that runs in a forward pass: the model, or its wrapper by DDP, `torch.compile` or DeepSpeed.
        optimizers: Several optimizers by name, if the user's own loop has them; the first is `optimizer`.
        parameters: Every parameter whose gradient a step clears: those of the model and of the optimizer.
    """

    sharding: ClassVar[str | None] = None
    """What shards the parameters, the gradients or the optimizer's state over the ranks ("FSDP" or "DEEPSPEED"); None
    if each rank has all of them."""
    forward_is_collective: ClassVar[bool] = False
    """Whether all ranks must take part in each forward pass."""
    has_master_weights: ClassVar[bool] = False
    """Whether 16-bit weights are updated in a 32-bit copy."""
    unsupported: Mapping[str, str] = MappingProxyType({})
    """What algorithms, optimizers and monitors cannot do here, and why: a method's name, one of `Algorithm.needs`,
    "closure", "sparse_gradients"; "weights", "updates" and "gradients" cannot be monitored."""
    clips_in_update: ClassVar[bool] = False
    """Whether `clip_gradients` makes the update too: then nothing can be done between the two."""
    closure: Callable[[], torch.Tensor] | None = None
    """The argument of the optimizer's step, if it needs one: computes loss and gradients again."""
    dry_run_completes_gradients: ClassVar[bool] = True
    """Whether a dry run completes its gradients, which are dropped, as the last micro-batch of a step does."""
    compile_options: Mapping[str, Any] | None = None
    """The options of `torch.compile`; None if nothing is compiled. To be set before `prepare`."""
    initial: InitialWeights | None = None
    """Initial weights that are read once the model is on its device."""
    missing_error: str = ""
    """Why the model has no weights yet, if so: it is on the meta device, and waits for a checkpoint."""
    # The names of the weights that it waits for.
    _missing_names: Collection[str] = frozenset()
    # The hook that raises if the model runs without weights.
    _forward_guard: Any = None
    accelerator: Any = None
    """accelerate's `Accelerator`, if there is one."""

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        scaler: torch.amp.GradScaler,
        build_optimizer: Callable[[], torch.optim.Optimizer],
        ranks: Ranks,
    ) -> None:
        self.model: nn.Module = model
        self.wrapped: nn.Module = model
        self.device = device
        self.scaler = scaler
        self.ranks = ranks
        self.parameters: list[nn.Parameter] = []
        # Whether all parameters are plain tensors of the same device and dtype; on a CPU, whether they are also few.
        self._is_uniform = self._is_small = False
        # Whether a gradient has been sparse.
        self._has_sparse_gradients = False
        self.optimizers: dict[str, torch.optim.Optimizer] = {}
        # The names of the parameters that require a gradient.
        self._trainable: set[str] = set()
        self._build_optimizer = build_optimizer
        self._optimizer: torch.optim.Optimizer | None = None

    def maybe_compile(self, model: nn.Module) -> nn.Module:
        """Return the module to run: compiled, if asked for; compilation takes place in its first run."""
        if self.compile_options is None:
            return model
        if hasattr(model, "_orig_mod"):
            raise ConfigError(
                f"`compile={dict(self.compile_options)!r}`, but the model is compiled already. Pass the plain model, "
                "or leave that to accelerate, if its own settings (ACCELERATE_DYNAMO_BACKEND) ask for it."
            )
        try:
            run: Any = torch.compile(model, **self.compile_options)
            return run
        except Exception as error:
            raise ConfigError(
                f"`compile={dict(self.compile_options)!r}`: torch.compile rejects these options: {error}"
            ) from error

    def set_dtypes(self, dtypes: Dtypes) -> None:
        """Set the dtype in which gradients are added up over the ranks; call this before `prepare`.

        Raises:
            ConfigError: If this backend cannot do what `dtypes` says.
        """
        if dtypes.reductions is not None:
            raise ConfigError(
                "`dtypes` sets 'reductions', the dtype in which gradients are added up over several processes, and "
                "Trainer has only one. Leave it out, or use AccelerateTrainer or HFTrainer."
            )

    def prepare(self) -> None:
        """Put the model on the device and wrap it; a backend that shards wraps the optimizer too."""
        self.model, self.wrapped = self._wrap()
        self._trainable = self._trainable_names()

    def _wrap(self) -> tuple[nn.Module, nn.Module]:
        """Return the model on its device, and the module that runs in a forward pass."""
        self._load_full_weights()
        with preserve_shared_buffers(self.model):
            model = self.model.to(self.device)
        return model, self.maybe_compile(model)

    def _load_full_weights(self, always: bool = False) -> None:
        """Allocate and initialize the weights on the meta device, in full on each rank.

        Args:
            always: Whether to copy the main rank's weights even if each rank has all of them.
        """
        initializer = WeightInitializer(self.model, self.ranks, self.initial)
        if always or not initializer.is_materialized:
            initializer.allocate()
            initializer.collect_tensors()
            tensors = named_tensors(self.model)
            initializer.load({name: full_target(tensor) for name, tensor in tensors})
        self._finish_initialization(initializer)

    def _finish_initialization(self, initializer: WeightInitializer) -> None:
        """Release the initial weights; a model without any raises in its forward pass."""
        self.initial = None
        self.missing_error, self._missing_names = initializer.missing_error, initializer.missing
        if self.missing_error:
            self._forward_guard = self.model.register_forward_pre_hook(
                lambda *_: self.check_weights_loaded(), prepend=True
            )

    def check_weights_loaded(self) -> None:
        """Raise ConfigError if the model is on the meta device, and no weights have been loaded."""
        if self.missing_error:
            raise ConfigError(self.missing_error)

    def mark_weights_loaded(self, absent: Collection[str] = ()) -> None:
        """Note that the weights of a checkpoint have been loaded, which may leave some out."""
        if self.missing_error and not set(absent) & set(self._missing_names):
            self.missing_error = ""
            self._forward_guard.remove()

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer, built on first use, after the model is on its device."""
        if self._optimizer is None:
            self._optimizer = self._build_optimizer()
        return self._optimizer

    @optimizer.setter
    def optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer

    @property
    def built_optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers, as far as they have been built."""
        return list(self.optimizers.values()) or ([] if self._optimizer is None else [self._optimizer])

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The groups of the optimizer, or of all of them."""
        return [group for optimizer in self.optimizers.values() or [self.optimizer] for group in optimizer.param_groups]

    @property
    def can_skip(self) -> bool:
        """Whether a loss scaler may skip updates."""
        return self.scaler.is_enabled()

    def reset_optimizer(self) -> None:
        """Reset the optimizer to one without state."""
        self._optimizer = None  # built on its next use

    def release(self) -> None:
        """Release everything that would keep the model in memory."""

    # --- a step

    def forward(self, run: Callable[[nn.Module, Any], Output], batch: Any) -> Output:
        """Return `run(model, batch)`, called in a way that averages its gradients over the ranks."""
        return run(self.wrapped, batch)

    def begin_window(self) -> None:
        """Prepare for the first forward pass of a window, or for one that is run again."""

    def sync_buffers(self) -> None:
        """Broadcast the main rank's buffers where they differ: forward passes update those of their own rank.

        All ranks call it, before an evaluation, before a save and at the end of a run. Any other time costs an
        exchange.
        """

    def accumulating(self, last: bool) -> AbstractContextManager[Any]:
        """Return the context for forward and backward of one micro-batch; the `last` one completes the gradients."""
        return NOTHING if last or not self._runs_cuda_graphs else self._copying_gradients()

    @functools.cached_property
    def _runs_cuda_graphs(self) -> bool:
        """Whether the model, or a part of it, was compiled to run as CUDA graphs."""
        modules = list(self.wrapped.modules())
        # `torch.compile(module)` returns another module; `module.compile()` has what runs in place of it
        calls = [*modules, *(module._compiled_call_impl for module in modules)]
        configs = [getattr(call, "get_compiler_config", dict)() for call in calls]
        return any((config or {}).get("triton.cudagraphs", False) for config in configs)

    @contextlib.contextmanager
    def _copying_gradients(self) -> Iterator[None]:
        """Copy the gradients of a micro-batch, whose memory belongs to a CUDA graph that the next one overwrites."""
        yield
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.grad = parameter.grad.clone()

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradients of `loss`."""
        self.scaler.scale(loss).backward()

    def annotate(self, ranges: ProfilerRanges | None) -> None:
        """Run forward, backward and update inside `ranges(name)` each; None removes these ranges."""
        for name in ("forward", "backward", "update"):
            vars(self).pop(name, None)
            if ranges is not None:
                vars(self)[name] = wrap_in_range(ranges, name, getattr(self, name))

    def check_separate_all_reduce(self) -> None:
        """Raise ConfigError if only `reduce_gradients` cannot average gradients over the ranks."""

    def reduce_gradients(self) -> None:
        """Average over the ranks the gradients of backward passes of which none was the last."""

    def discard_gradients(self) -> None:
        """Discard the gradients of a window whose last micro-batch has not run."""
        self.clear_gradients()

    def scale_gradients(self, factor: float) -> None:
        """Multiply all gradients by `factor`."""
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(factor)

    def gradient_norm(self) -> torch.Tensor:
        """Return the L2 norm of all gradients together, a scalar on the device; sparse ones are coalesced before.

        That of a small model on a CPU may be rounded otherwise than by `torch.nn.utils.get_total_norm`.
        """
        gradients = self._stored_gradients()
        try:
            if not gradients or not self._is_uniform:
                return nn.utils.get_total_norm(gradients)
            if self._is_small:  # a copy takes less time than one kernel for each gradient
                return torch.linalg.vector_norm(_flatten_dense_tensors(gradients))
            # get_total_norm first sorts the gradients by device and dtype: half its time for a small model
            return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))  # pyright: ignore
        except RuntimeError:  # looking at each gradient in every step would be slow
            if self._has_sparse_gradients or not any(gradient.is_sparse for gradient in gradients):
                raise
            self._has_sparse_gradients = True
            return self.gradient_norm()

    def _stored_gradients(self) -> list[torch.Tensor]:
        if self._has_sparse_gradients:
            return coalesce(self.parameters)
        return [parameter.grad for parameter in self.parameters if parameter.grad is not None]

    def clip_gradients(self, max_norm: float | None, norm: torch.Tensor | None = None) -> torch.Tensor:
        """Scale all gradients down to an L2 norm of at most `max_norm`, and return their norm before that.

        Args:
            max_norm: The norm; None does not clip.
            norm: The norm that they have, if it is known.
        """
        may_round = norm is None and self._is_small
        norm = self.gradient_norm() if norm is None else norm
        # Reading the norm is free on a CPU, and most steps need no clipping: the factor would be exactly 1.
        if max_norm is None or (norm.is_cpu and norm.item() < max_norm * (1 - 1e-5) - 1e-6):
            return norm
        if may_round:  # clip by the same bits as torch.nn.utils.clip_grad_norm_
            norm = nn.utils.get_total_norm(self._stored_gradients())
        nn.utils.clip_grads_with_norm_(self.parameters, max_norm, norm)
        return norm

    def update(self) -> bool:
        """Step the optimizer; return False if the loss scaler skipped the step."""
        if self.closure is not None:
            self.optimizer.step(self.closure)  # type: ignore[arg-type]
            return True
        if not self.scaler.is_enabled():
            self.optimizer.step()
            return True
        scale = self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return self.scaler.get_scale() >= scale  # the scale falls only after a skipped step

    def reset_scaler(self) -> None:
        """Forget that gradients were unscaled for an update that is not made; the loss scale is unchanged."""
        self.scaler.scale(torch.zeros((), device=self.device))  # it has no scale to update before its first use
        self.scaler.update(self.scaler.get_scale())

    def check_all_reduced(self) -> None:
        """Raise DistributedError if the gradients were not averaged over the ranks."""

    def clear_gradients(self) -> None:
        """Free all gradients."""
        for parameter in self.parameters:
            parameter.grad = None

    def collect_parameters(self) -> None:
        """List the parameters, once per epoch: going through the modules in every step would be slow.

        The list includes parameters that the optimizer does not hold, or their gradients would accumulate.
        """
        if (trainable := self._trainable_names()) != self._trainable:
            self._trainable = trainable
            self.wrapped = self._update_frozen()
        parameters = {id(parameter): parameter for parameter in self.model.parameters()}
        for group in self.groups:
            parameters |= {id(parameter): parameter for parameter in group["params"]}
        self.parameters = list(parameters.values())
        kinds = {(type(parameter), parameter.device, parameter.dtype) for parameter in self.parameters}
        self._is_uniform = len(kinds) == 1 and type(self.parameters[0]) is nn.Parameter
        size = sum(parameter.numel() for parameter in self.parameters)
        self._is_small = self._is_uniform and self.device.type == "cpu" and size <= _SMALL_MODEL

    def _trainable_names(self) -> set[str]:
        return {name for name, parameter in self.model.named_parameters() if parameter.requires_grad}

    def _update_frozen(self) -> nn.Module:
        """Update the wrapper after parameters were frozen or unfrozen, and return it."""
        return self.wrapped

    def has_gradients(self) -> bool:
        """Return whether any parameter of the optimizer has a gradient."""
        return any(parameter.grad is not None for group in self.optimizer.param_groups for parameter in group["params"])

    def check_update(self) -> None:
        """Raise ConfigError if the optimizer cannot update the weights of this backend."""

    def check_layouts(self, sparse: Mapping[int, str], dense: Mapping[int, str]) -> None:
        """Raise ConfigError if parameters cannot be trained by gradients that are sparse or dense.

        Args:
            sparse: The names of those with sparse gradients, by the `id` of the parameter.
            dense: The names of those with dense ones.
        """
        if sparse and "sparse_gradients" in self.unsupported:
            raise ConfigError(
                f"The gradients of {format_list(map(repr, sparse.values()))} are sparse, which cannot be trained here: "
                f"{self.unsupported['sparse_gradients']}. Make the layer with sparse=False."
            )
        for optimizer in self.optimizers.values() or [self.optimizer]:
            check_optimizer(optimizer, sparse, dense)

    def ungrouped_parameters(self) -> list[str]:
        """Return the names of the model's parameters that require a gradient but are not in the optimizer."""
        grouped = {id(parameter) for group in self.groups for parameter in group["params"]}
        return [
            name
            for name, parameter in self.model.named_parameters()
            if parameter.requires_grad and id(parameter) not in grouped
        ]

    @contextlib.contextmanager
    def eval_mode(self, seed: int) -> Iterator[None]:
        """Put the model into evaluation mode without gradients; modes and random numbers are restored afterwards.

        Random numbers inside start from the seed every time, so a repeated evaluation gives the same result.
        """
        training = [module for module in self.wrapped.modules() if module.training]
        self.wrapped.eval()
        try:
            # no_grad, not inference_mode: tensors that a model caches here must be usable in training
            with isolated_rng(self.device, seed=seed), torch.no_grad():
                yield
        finally:
            for module in training:
                module.training = True
            self.end_evaluation()

    def end_evaluation(self) -> None:
        """Clean up after forward passes without a backward pass."""

    def shard_and_groups(self, tensor: torch.Tensor) -> tuple[torch.Tensor, list[Any]]:
        """Return this rank's shard of a weight or gradient, and the process groups of the other shards."""
        return tensor, []

    def digest(self, tensors: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
        """Return the digest of weights or gradients, two int64 on the device, on the main rank; all ranks call it."""
        return digest_tensors(tensors) if self.ranks.is_main else None

    # --- checkpoints

    def model_tensors(self) -> dict[str, Any]:
        """Return the weights by the names of the user's module; sharded ones stay sharded."""
        return state_dicts.model_tensors(self.model)

    def check_weights(self, tensors: Mapping[str, Any], where: str, absent: Collection[str] = ()) -> None:
        """Raise the CheckpointError of `load_weights`, if there is one; nothing is changed."""
        state_dicts.check_weights(self.model, tensors, where, absent)

    def snapshot_weights(self, snapshot: dict[str, torch.Tensor], tensors: Mapping[str, Any]) -> None:
        """Copy this rank's shards of the weights to the host.

        Args:
            snapshot: An earlier copy, whose memory is reused; empty for the first one.
            tensors: The weights, as `model_tensors` returns them.
        """
        for name, tensor in tensors.items():
            snapshot[name] = host_copy(self.local_shard(tensor), snapshot.get(name))

    def restore_snapshot(self, snapshot: Mapping[str, torch.Tensor], extra: Mapping[str, Any]) -> None:
        """Copy the weights of `snapshot_weights` and the state of `extra_state` back to the model."""
        self.load_weights(snapshot, "the weights on the host", extra)

    def local_shard(self, tensor: Any) -> torch.Tensor:
        """Return this rank's shard of a parameter, or of an entry of `model_tensors`."""
        return tensor.detach().to_local() if hasattr(tensor, "to_local") else tensor.detach()

    def load_weights(
        self, tensors: Mapping[str, torch.Tensor], where: str, extra: Mapping[str, Any], absent: Collection[str] = ()
    ) -> None:
        """Copy weights into the model.

        Args:
            tensors: What `model_tensors` returned.
            where: Their name in errors.
            extra: What `state_dicts.extra_state` returned.
            absent: Names of weights that were left out, and stay unchanged.

        Raises:
            CheckpointError: On all ranks, if they do not fit this model or a rank cannot read them; the model is
                unchanged.
        """
        state_dicts.load_weights(self.model, tensors, where, extra, absent, self.ranks)

    def optimizer_state(self) -> tuple[dict[str, Any], Any]:
        """Return the optimizer's tensors, keyed "<parameter>/<entry>", and the rest as JSON types."""
        return state_dicts.optimizer_state(self.optimizer, self.model)

    def names_by_group(self) -> list[list[str]]:
        """Return the names of the parameters in each of the optimizer's groups."""
        return state_dicts.names_by_group(self.optimizer, self.model)

    def check_optimizer(self, tensors: Mapping[str, Any], saved: Any, where: str) -> None:
        """Raise the CheckpointError of `load_optimizer`, if there is one; nothing is changed."""
        state_dicts.check_optimizer(self.optimizer, self.model, tensors, saved, where)

    def load_optimizer(self, tensors: Mapping[str, torch.Tensor], saved: Any, where: str) -> None:
        """Restore what `optimizer_state` returned.

        Raises:
            CheckpointError: If it is from an optimizer with other parameters or groups, or a tensor in it is not what
                this optimizer holds for the parameter; then nothing is changed.
        """
        state_dicts.restore_optimizer(self.optimizer, self.model, tensors, saved, where)
