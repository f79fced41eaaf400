"""The backend for DDP, and for one process under accelerate."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import operator
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import fields
from typing import Any, ClassVar, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from omnitrain.backends.backend import NOTHING, Backend, Output
from omnitrain.backends.collective_order import LayerOrder
from omnitrain.backends.start import preserve_shared_buffers
from omnitrain.checkpoint.state_dicts import unshare_elements
from omnitrain.compute.precision import Dtypes
from omnitrain.core.errors import ConfigError, DistributedError, format_list
from omnitrain.distributed.ranks import as_bytes
from omnitrain.model.units import StepOutput
from omnitrain.optim.build import has_sparse_gradients
from omnitrain.optim.sparse_gradients import parameters_by_layout


class Runner(nn.Module):
    """The module that DDP or DeepSpeed wraps: calls the model, or runs the whole forward pass of a unit.

    The wrappers do their part of a step only if the forward pass goes through their own `forward`. A unit that holds
    the user's model calls that directly, so the call of the unit must go through the wrapper.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._orig_mod = model  # torch.compile's name for it, so that unwrapping works
        self.config: Any = getattr(model, "config", None)  # accelerate fills in DeepSpeed's "auto" values from it
        self.has_run: bool = False
        """Whether there was a forward pass with gradients since this was last set to False."""

    def forward(self, *args: Any, run_step: Callable[[nn.Module], Any] | None = None, **kwargs: Any) -> Any:
        """Return `model(*args, **kwargs)`, or `run_step(model)` as a dict, where DDP and DeepSpeed find the tensors."""
        self.has_run |= torch.is_grad_enabled()
        if run_step is None:
            return self._orig_mod(*args, **kwargs)
        output = run_step(self._orig_mod)
        if not isinstance(output, StepOutput):
            return output
        return {field.name: getattr(output, field.name) for field in fields(output)}


def run_wrapped(wrapper: Any, run: Callable[[nn.Module, Any], Output], batch: Any) -> Output:
    """Return `run(model, batch)`, called inside the forward pass of a Runner's wrapper."""
    output = wrapper(run_step=lambda model: run(model, batch))
    return StepOutput(**output) if isinstance(output, dict) else output  # type: ignore[return-value]


class _ZeroLoss(torch.autograd.Function):
    """A loss whose gradients are zeros, sparse or dense, for any number of tensors.

    The zeros are negative: a sum over ranks is -0.0 only if all of them add -0.0, and so shows if any has a gradient.
    """

    @staticmethod
    def forward(ctx: Any, are_sparse: Sequence[bool], *tensors: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*tensors)
        ctx.are_sparse = are_sparse
        return tensors[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        zeros = (tensor.new_full((), -0.0).expand_as(tensor) for tensor in ctx.saved_tensors)
        sparse = (
            zero.to_sparse(1) if is_sparse else zero for zero, is_sparse in zip(zeros, ctx.are_sparse, strict=True)
        )
        return None, *sparse


def lacking_gradients(gradients: Sequence[torch.Tensor]) -> list[bool]:
    """Return for each sum of gradients over the ranks whether it holds only the zeros of `_ZeroLoss`."""
    lacking = [
        torch.signbit(gradient.real).all() & (gradient == 0).all()
        if not gradient.is_sparse
        else torch.tensor(gradient.coalesce()._nnz() == 0, device=gradient.device)
        for gradient in gradients
    ]
    return torch.stack(lacking).tolist() if lacking else []


class _BufferCopies:
    """A hook that gives buffers which forward has replaced by expanded ones memory, before DDP writes to them.

    Tensors are compared by identity, since the strides of a hundred buffers take as long to read as a small layer.
    """

    def __init__(self, model: nn.Module) -> None:
        self._slots = [(module._buffers, name) for module in model.modules() for name in module._buffers]
        self._latest: list[torch.Tensor | None] = []

    def __call__(self, ddp: Any, *_: Any) -> None:
        if not ddp.will_sync_module_buffers():
            return
        current = [buffers.get(name) for buffers, name in self._slots]
        if len(current) == len(self._latest) and all(map(operator.is_, current, self._latest)):
            return
        unshare_elements(buffer for buffer in current if buffer is not None)
        self._latest = current


def syncs_each_batch(accelerator: Any) -> bool:
    """Return whether an `Accelerator` averages gradients after each micro-batch, and not once in a step."""
    state = getattr(accelerator, "gradient_state", None)
    return bool(state is not None and state.plugin_kwargs.get("sync_each_batch"))


class DDP(Backend):
    """accelerate puts the model on its device; with several ranks, PyTorch's DistributedDataParallel wraps it.

    Args:
        accelerator: accelerate's `Accelerator`; None if it is set before `prepare`.
        parts: The arguments of `Backend`.
    """

    dry_run_completes_gradients: ClassVar[bool] = False  # or DDP would rebuild its buckets before the first step
    _ddp: DistributedDataParallel | None = None
    # The dtype in which gradients are added up over the ranks; None is their own.
    _reductions: torch.dtype | None = None
    # How many windows have begun.
    _windows = 0
    # The names of the buffers in which ranks have differed.
    _differing: Collection[str] = frozenset()

    # Compares the layers that ranks call, if calls gather weights.
    _order: LayerOrder | None = None

    def __init__(self, accelerator: Any, *parts: Any) -> None:
        super().__init__(*parts)
        self.accelerator = accelerator
        self._syncs_each_batch: bool = syncs_each_batch(accelerator)

    def set_dtypes(self, dtypes: Dtypes) -> None:
        self._reductions = dtypes.reductions

    def _wrap(self) -> tuple[nn.Module, nn.Module]:
        self._load_full_weights()
        with preserve_shared_buffers(self.model):
            model = self.accelerator.prepare_model(self.model, evaluation_mode=True)  # and compiled, if asked for
        model = self.maybe_compile(model)
        trains = any(parameter.requires_grad for parameter in self.model.parameters())
        if self.ranks.world_size == 1 or not trains:
            return self.model, model
        self._ddp = self._wrap_ddp(model)
        return self.model, self._ddp

    def _wrap_ddp(self, model: nn.Module) -> DistributedDataParallel:
        handler = self.accelerator.ddp_handler
        options = {} if handler is None else handler.to_kwargs()
        ddp = DistributedDataParallel(Runner(model), **options)
        if ddp.modules_buffers:
            ddp.register_forward_pre_hook(_BufferCopies(model))
        hook = "no" if handler is None else handler.comm_hook.value
        if self._reductions is not None:
            if hook != "no":
                raise ConfigError(
                    f"`dtypes` sets 'reductions', and accelerate is to average gradients by the hook {hook!r}. "
                    "Leave one of them out."
                )
            dtype = self._reductions
            ddp.register_comm_hook(None, lambda state, bucket: _all_reduce_mean(bucket, dtype))
        elif handler is not None:
            handler.register_comm_hook(ddp)
        return ddp

    def _update_frozen(self) -> nn.Module:
        """Wrap the model again: DDP fixes which gradients it waits for when it wraps a model."""
        if self._ddp is None:
            return self.wrapped
        model, self._ddp = self._ddp.module._orig_mod, None  # the old one's hooks go with it
        self._ddp = self._wrap_ddp(model)
        return self._ddp

    def forward(self, run: Callable[[nn.Module, Any], Output], batch: Any) -> Output:
        if self._ddp is None:
            return run(self.wrapped, batch)
        if not torch.is_grad_enabled():
            return run(self._ddp.module._orig_mod, batch)
        return run_wrapped(self._ddp, run, batch)

    def begin_window(self) -> None:
        """Broadcast the main rank's buffers before the window, as DDP does in its forward pass.

        Which buffers forward passes update is seen after 1, 2, 4, 8, ... windows; a model without such buffers pays
        nothing in the others.
        """
        if self._order is not None:
            self._order.begin_window()
        number, self._windows = self._windows, self._windows + 1
        if self._ddp is not None:
            return
        if number & (number - 1) == 0:
            self.sync_buffers()
        elif self._differing:
            self._broadcast_buffers(self._differing)

    def sync_buffers(self) -> None:
        ranks = self.ranks
        if ranks.world_size == 1 or ranks.data.size != ranks.world_size:  # tensor parallelism may cut them up
            return
        digests = {name: _digest(buffer) for name, buffer in self.model.named_buffers()}
        if not digests:
            return
        different = ranks.combine("the buffers of the model", digests, _differing_names)
        self._differing = sorted({*self._differing, *different})
        self._broadcast_buffers(different)

    def _broadcast_buffers(self, names: Collection[str]) -> None:
        named_buffers = dict(self.model.named_buffers())
        buffers = [named_buffers[name] for name in names if name in named_buffers]
        if not buffers:
            return
        unshare_elements(buffers)
        with torch.no_grad():
            flat = torch.cat([as_bytes(buffer.contiguous()).to(self.device) for buffer in buffers])
            dist.broadcast(flat, src=0)
            parts = flat.split([buffer.numel() * buffer.element_size() for buffer in buffers])
            for buffer, part in zip(buffers, parts, strict=True):
                buffer.copy_(part.clone().view(buffer.dtype).view(buffer.shape))

    def accumulating(self, last: bool) -> AbstractContextManager[Any]:
        if last:
            return NOTHING
        if self._syncs_each_batch or self._ddp is None:
            return super().accumulating(last)
        if self._ddp.static_graph:
            raise ConfigError(
                "static_graph=True of DDP cannot be used with several micro-batches in a step: PyTorch learns from the "
                "first backward pass when to average gradients, and only that of the last micro-batch does. Leave it "
                "out, or pass a `batch_size` that makes steps of one micro-batch."
            )
        return self._without_sync(self._ddp)

    @contextlib.contextmanager
    def _without_sync(self, ddp: DistributedDataParallel) -> Iterator[None]:
        with ddp.no_sync(), super().accumulating(last=False):
            yield

    def check_separate_all_reduce(self) -> None:
        if self.sharding is not None:
            raise ConfigError(
                "`microbatch_size='auto'` cannot be used where the weights are sharded (FSDP, DeepSpeed): each forward "
                "pass gathers them, and a rank that runs out of memory in the middle of one leaves the others waiting. "
                "Pass a number, such as microbatch_size=4."
            )
        if self._syncs_each_batch and self.ranks.world_size > 1:
            raise ConfigError(
                "`microbatch_size='auto'` cannot be used with sync_each_batch=True of an `Accelerator`, which "
                "exchanges gradients in each backward pass. Leave that out, or pass a number of rows."
            )
        if self._ddp is not None and self._ddp.static_graph:
            raise ConfigError(
                "`microbatch_size='auto'` cannot be used with static_graph=True of DDP, which learns from the first "
                "backward pass when to average what. Leave that out, or pass a number, such as microbatch_size=4."
            )

    def check_layouts(self, sparse: Mapping[int, str], dense: Mapping[int, str]) -> None:
        super().check_layouts(sparse, dense)
        if self._ddp is None:
            return
        if sparse and f"{self.device.type}:nccl" in str(dist.get_backend_config()):
            raise ConfigError(
                f"The gradients of {format_list(map(repr, sparse.values()))} are sparse, and NCCL averages dense ones "
                "only. Make the layer with sparse=False."
            )
        expected, _ = parameters_by_layout(self.model)
        layers = [module for module in self.model.modules() if has_sparse_gradients(module)]
        shared = {
            id(parameter) for module in layers for parameter in module.parameters(recurse=False)
        } - expected.keys()
        names = [
            name
            for name, parameter in self.model.named_parameters()
            if parameter.requires_grad and id(parameter) in shared
        ]
        if names:
            raise ConfigError(
                f"{format_list(map(repr, names))} belongs to an embedding with sparse=True and to another layer too, "
                "so that its gradient is dense, and DDP takes only sparse ones for it. Make the embedding with "
                "sparse=False."
            )

    def backward(self, loss: torch.Tensor) -> None:
        try:
            super().backward(loss)
        except NotImplementedError as error:
            if "SparseTensorImpl" not in str(error):
                raise
            raise ConfigError(
                "A gradient is sparse of which DDP did not know that: it checks only nn.Embedding and nn.EmbeddingBag. "
                "Use these, or sparse=False."
            ) from error
        if self._ddp is not None and self._ddp.require_backward_grad_sync:
            self._complete_gradients(self._ddp)

    def _complete_gradients(self, ddp: DistributedDataParallel) -> None:
        """Pass zeros for parameters that the loss does not depend on to DDP, which waits for their gradients.

        The losses of other ranks may depend on them, and these ranks wait as well. PyTorch reports the parameters only
        in the next forward pass, after an update with gradients that were not averaged.

        Raises:
            DistributedError: On all ranks, if the loss of none depends on a parameter.
        """
        try:
            ddp._check_reducer_finalized()
            return
        except RuntimeError as error:
            match = re.search(r"did not receive grad for rank \d+: ([\d ]+)", str(error))
            if match is None or ddp.find_unused_parameters:
                raise
        trained = [(name, parameter) for name, parameter in self.model.named_parameters() if parameter.requires_grad]
        unused = dict(trained[int(index)] for index in match[1].split())
        first = [name for name, parameter in unused.items() if parameter.grad is None]
        sparse, _ = parameters_by_layout(self.model)
        _ZeroLoss.apply([id(parameter) in sparse for parameter in unused.values()], *unused.values()).backward()
        ddp._check_reducer_finalized()
        are_lacking = lacking_gradients([cast("torch.Tensor", unused[name].grad) for name in first])
        if any(are_lacking):
            names = list(itertools.compress(first, are_lacking))
            raise DistributedError(
                f"The loss of this step does not depend on {len(names)} parameters on any rank: "
                f"{', '.join(names[:5])}{', ...' if len(names) > 5 else ''}. Pass `find_unused_parameters=True` to "
                "AccelerateTrainer, or `ddp_find_unused_parameters=True` in the arguments of HFTrainer; or freeze "
                "them, if no step uses them."
            )

    def reduce_gradients(self) -> None:
        """Have DDP average the accumulated gradients, in a backward pass that adds zeros to them."""
        if self._ddp is None:
            return
        trained = [parameter for parameter in self._ddp.module.parameters() if parameter.requires_grad]
        used = (
            [parameter for parameter in trained if parameter.grad is not None]
            if self._ddp.find_unused_parameters
            else trained
        )
        members = used or trained[:1]
        sparse, _ = parameters_by_layout(self.model)
        are_sparse = [id(parameter) in sparse for parameter in members]
        self._ddp(run_step=lambda model: _ZeroLoss.apply(are_sparse, *members)).backward()

    def discard_gradients(self) -> None:
        super().discard_gradients()
        if self._ddp is not None:  # some ranks may have been past the forward pass that shares out buffers
            self._ddp.require_forward_param_sync = True

    def update(self) -> bool:
        self.check_all_reduced()
        try:
            return super().update()
        except RuntimeError:
            if self._ddp is not None:
                self._ddp.module.has_run = True  # it may be made once more
            raise

    def check_all_reduced(self) -> None:
        """Raise DistributedError if no forward pass has gone through DDP since the latest update."""
        if self._ddp is None:
            return
        if not self._ddp.module.has_run:
            raise DistributedError(
                f"The gradients of this step were not averaged over the {self.ranks.world_size} ranks, whose weights "
                "would drift apart: no forward pass went through DDP. Call `self.model_wrapped(...)` instead of "
                "`self.model(...)` in a custom training loop."
            )
        self._complete_gradients(self._ddp)
        self._ddp.module.has_run = False


def _digest(tensor: torch.Tensor) -> str:
    """Return a digest of the shape, the dtype and the bits of a tensor; the shape and the dtype as its first part."""
    content = hashlib.sha256(as_bytes(tensor.detach().cpu().contiguous()).numpy().data)
    return f"{tuple(tensor.shape)} {tensor.dtype} {content.hexdigest()}"


def _differing_names(digests: list[dict[str, str]]) -> list[str]:
    """Return the names of the tensors that are not the same on all ranks, but of one shape and dtype."""
    first, *rest = digests
    return [
        name
        for name, digest in first.items()
        if any(rank.get(name) != digest for rank in rest)
        and all(rank.get(name, "").rpartition(" ")[0] == digest.rpartition(" ")[0] for rank in rest)
    ]


def _all_reduce_mean(bucket: Any, dtype: torch.dtype) -> torch.futures.Future[torch.Tensor]:
    """Average the gradients of a bucket over the ranks in a dtype; PyTorch's own hooks support only NCCL."""
    buffer = bucket.buffer()
    work: Any = dist.all_reduce(buffer.to(dtype).div_(dist.get_world_size()), async_op=True)
    return work.get_future().then(lambda done: buffer.copy_(done.value()[0]))
