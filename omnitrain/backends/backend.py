"""The backend of one device, which is plain PyTorch, and the base of the others.

A backend owns the model, its wrapper, the optimizer and the loss scaler, and answers for everything about a step that
depends on where the weights are. When it is called is decided in `run/step.py`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from typing import Any, ClassVar, TypeVar

import torch
from torch import nn

from omnitrain.checkpoint import state
from omnitrain.checkpoint.tensors import host_copy
from omnitrain.distributed import Ranks
from omnitrain.errors import ConfigError

__all__ = ["Backend"]

Output = TypeVar("Output")

_NOTHING = contextlib.nullcontext()


class Backend:
    """One device. The loss scaler is PyTorch's null object (`enabled=False`) unless the precision is fp16.

    Args:
        model: The user's model.
        device: Where the model is to be.
        scaler: The loss scaler.
        build_optimizer: Returns the optimizer; called once the model is in place.
        ranks: The ranks of the run.

    Attributes:
        model: The user's module, on every backend.
        wrapped: What runs in a forward pass: the model itself, or what DDP, `torch.compile` or DeepSpeed made of it.
        optimizers: Several by name, the first of which is `optimizer`, where a loop of the user's own has them.
        parameters: Every parameter whose gradient a step clears: those of the model and those of the optimizer.
    """

    sharding: ClassVar[str | None] = None
    """What shards the weights over the ranks ("FSDP" or "DEEPSPEED"); None where each rank has all of them."""
    keeps_masters: ClassVar[bool] = False
    """Whether weights of 16 bits are updated in a copy of 32 bits."""
    takes_optimizers: ClassVar[bool] = True
    """Whether a loop of the user's own may have several optimizers."""
    _compile_options: Mapping[str, Any] | None = None
    """Those of `torch.compile`; None where nothing is compiled."""
    accelerator: Any = None
    """accelerate's `Accelerator`, where there is one."""

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
        self._are_alike = False
        """Whether they are all plain parameters of one device and dtype."""
        self.optimizers: dict[str, torch.optim.Optimizer] = {}
        self._build_optimizer = build_optimizer
        self._optimizer: torch.optim.Optimizer | None = None

    def compile_by(self, options: bool | Mapping[str, Any] | None) -> None:
        """Have what runs compiled by `torch.compile`; called before `place`.

        Args:
            options: Its options; True for none, None and False to compile nothing.

        Raises:
            ConfigError: If the model is compiled already, or an option is wrong.
        """
        if options is None or options is False:
            return
        self._compile_options = {} if options is True else options
        self.compiled(self.model)

    def compiled(self, model: nn.Module) -> nn.Module:
        """Return what is to run of a model: compiled, if that is asked for; nothing is until it first runs."""
        if self._compile_options is None:
            return model
        if hasattr(model, "_orig_mod"):
            raise ConfigError(
                f"`compile={dict(self._compile_options)!r}`, but the model is compiled already. Pass the plain model, "
                "or leave that to accelerate, if its own settings (ACCELERATE_DYNAMO_BACKEND) ask for it."
            )
        try:
            run: Any = torch.compile(model, **self._compile_options)
            return run
        except Exception as error:
            raise ConfigError(
                f"`compile={dict(self._compile_options)!r}`: torch.compile refuses these options: {error}"
            ) from error

    def place(self) -> None:
        """Put the model on the device and wrap it; a backend that shards wraps the optimizer too."""
        self.model, self.wrapped = self._wrap()

    def _wrap(self) -> tuple[nn.Module, nn.Module]:
        """Return the model in its place, and what runs in a forward pass."""
        model = self.model.to(self.device)
        return model, self.compiled(model)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer, built when it is first used, so that the model is in place by then."""
        if self._optimizer is None:
            self._optimizer = self._build_optimizer()
        return self._optimizer

    @optimizer.setter
    def optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The groups of the optimizer, or of all of them."""
        return [group for one in self.optimizers.values() or [self.optimizer] for group in one.param_groups]

    @property
    def may_skip(self) -> bool:
        """Whether a loss scaler may leave updates out."""
        return self.scaler.is_enabled()

    def reset_optimizer(self) -> None:
        """Start over with an optimizer that has no state."""
        self._optimizer = None  # built when it is next used

    def release(self) -> None:
        """Free what would keep the model in memory."""

    # --- a step

    def forward(self, run: Callable[[nn.Module, Any], Output], batch: Any) -> Output:
        """Return `run(model, batch)`, called so that the gradients of whatever it runs are averaged over the ranks."""
        return run(self.wrapped, batch)

    def accumulating(self, last: bool) -> AbstractContextManager[Any]:
        """Return the context of one micro-batch's forward and backward; `last` ones complete the gradients."""
        return _NOTHING

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradients of `loss`."""
        self.scaler.scale(loss).backward()

    def scale_gradients(self, factor: float) -> None:
        """Multiply all gradients by `factor`."""
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(factor)

    def gradient_norm(self) -> torch.Tensor:
        """Return the L2 norm of all gradients together: a scalar on the device."""
        gradients = [one.grad for one in self.parameters if one.grad is not None]
        if not gradients or not self._are_alike:
            return nn.utils.get_total_norm(gradients)
        # what get_total_norm does, which first sorts the gradients by device and dtype: for a small model half its time
        return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))  # pyright: ignore

    def finish_gradients(self, clip: Callable[[], torch.Tensor], announce: Callable[[], None]) -> torch.Tensor:
        """Unscale and clip the gradients; return their norm before clipping.

        Args:
            clip: Clips them and returns that norm.
            announce: Tells the callbacks that the gradients are final.
        """
        self.scaler.unscale_(self.optimizer)
        norm = clip()
        announce()
        return norm

    def update(self) -> bool:
        """Take the optimizer's step; return False if the loss scaler skipped it."""
        if not self.may_skip:
            self.optimizer.step()
            return True
        scale = self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return self.scaler.get_scale() >= scale  # the scale is lowered after a skipped step only

    def check_reduced(self) -> None:
        """Refuse an update with gradients that were not averaged over the ranks."""

    def clear_gradients(self) -> None:
        """Free all gradients."""
        for parameter in self.parameters:
            parameter.grad = None

    def collect_parameters(self) -> None:
        """List the parameters, once per epoch: walking through the modules in every step would be slow.

        Those that the optimizer does not hold are listed too, or their gradients would pile up.
        """
        listed = {id(parameter): parameter for parameter in self.model.parameters()}
        for group in self.groups:
            listed |= {id(parameter): parameter for parameter in group["params"]}
        self.parameters = list(listed.values())
        self._are_alike = len({(type(one), one.device, one.dtype) for one in self.parameters}) == 1
        self._are_alike = self._are_alike and type(self.parameters[0]) is nn.Parameter

    def has_gradients(self) -> bool:
        """Return whether any parameter of the optimizer has a gradient."""
        return any(one.grad is not None for group in self.optimizer.param_groups for one in group["params"])

    def parameters_without_group(self) -> list[str]:
        """Return the names of the model's parameters that require a gradient and that the optimizer does not hold."""
        held = {id(one) for group in self.groups for one in group["params"]}
        return [name for name, one in self.model.named_parameters() if one.requires_grad and id(one) not in held]

    def end_evaluation(self) -> None:
        """Undo what forward passes without a backward pass leave behind."""

    # --- checkpoints

    def model_tensors(self) -> dict[str, Any]:
        """Return the weights by the names of the user's module; sharded ones as they are."""
        return state.model_tensors(self.model)

    def check_weights(self, tensors: Mapping[str, Any], where: str, absent: Collection[str] = ()) -> None:
        """Raise the CheckpointError of `load_weights`, if there is one; nothing is changed."""
        state.check_weights(self.model, tensors, where, absent)

    def keep_weights(self, kept: dict[str, torch.Tensor]) -> None:
        """Copy this rank's part of the weights to the host.

        Args:
            kept: An earlier copy, whose memory is taken; empty for the first one.
        """
        for name, tensor in self.model_tensors().items():
            kept[name] = host_copy(self._own_part(tensor), kept.get(name))

    def put_back_weights(self, kept: Mapping[str, torch.Tensor], extra: Mapping[str, Any]) -> None:
        """Copy what `keep_weights` kept, and what `checkpoint.state.extra_state` returned, back into the model."""
        self.load_weights(kept, "the weights on the host", extra)

    def _own_part(self, tensor: Any) -> torch.Tensor:
        """Return what of an entry of `model_tensors` this rank is to keep."""
        return tensor.detach()

    def load_weights(
        self, tensors: Mapping[str, torch.Tensor], where: str, extra: Mapping[str, Any], absent: Collection[str] = ()
    ) -> None:
        """Copy weights into the model.

        Args:
            tensors: What `model_tensors` returned.
            where: What an error calls them.
            extra: What `checkpoint.state.extra_state` returned.
            absent: Names of weights that were left out, and stay as they are.

        Raises:
            CheckpointError: If they are not this model's.
        """
        state.load_weights(self.model, tensors, where, extra, absent)

    def optimizer_state(self) -> tuple[dict[str, Any], Any]:
        """Return the optimizer's tensors, keyed "<parameter>/<entry>", and the rest as JSON types."""
        return state.optimizer_state(self.optimizer, self.model)

    def check_groups(self, saved: Any, where: str) -> None:
        """Raise a CheckpointError if the optimizer's groups hold other parameters than those that were saved."""
        now = state.names_by_group(self.optimizer, self.model)
        state.check_groups(now, [group["params"] for group in saved["groups"]], where)

    def check_optimizer(self, tensors: Mapping[str, Any], saved: Any, where: str) -> None:
        """Raise the CheckpointError of `load_optimizer`, if there is one; nothing is changed."""
        state.check_optimizer(self.optimizer, self.model, tensors, saved, where)

    def load_optimizer(self, tensors: Mapping[str, torch.Tensor], saved: Any, where: str) -> None:
        """Put back what `optimizer_state` returned.

        Raises:
            CheckpointError: If it is of an optimizer with other parameters or groups, or a tensor in it is not what
                this one holds for its parameter; nothing is changed then.
        """
        state.restore_optimizer(self.optimizer, self.model, tensors, saved, where)
