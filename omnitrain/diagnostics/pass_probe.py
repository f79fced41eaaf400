"""Passes of one batch for the checks before a run."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from omnitrain.backends.backend import Backend
from omnitrain.checkpoint.state_dicts import class_of
from omnitrain.compute.random_state import isolated_rng, seed_everything
from omnitrain.core.errors import DataError
from omnitrain.data.collation import IGNORED_LABEL, split_batch, tensors_in
from omnitrain.data.loaders import MapLoader
from omnitrain.diagnostics.findings import CheckFinding
from omnitrain.diagnostics.rehearsal import unchanged_attributes
from omnitrain.model.units import StepOutput
from omnitrain.trainer.buffers import unchanged_buffers
from omnitrain.trainer.compilation import transformed
from omnitrain.trainer.loop import Loop
from omnitrain.trainer.step import modules_in_eval_mode

# Rows of the batch that is run: few, as it is run up to a hundred times.
_ROWS = 16
# Places of an epoch that are looked at where the first batch may have samples of one task or class only.
_PLACES = 8
_SATURATING = {nn.Sigmoid: (0.01, 0.99), nn.Tanh: (-0.99, 0.99), nn.Hardtanh: (-0.999, 0.999)}
_RECTIFYING = (nn.ReLU, nn.ReLU6, nn.GELU, nn.SiLU)


class PassProbe:
    """Runs one batch through the model, in training or evaluation mode, as if each pass were the first."""

    def __init__(self, loop: Loop, batch: Any, seconds: float) -> None:
        self.loop = loop
        self.trainer: Any = loop.trainer
        self.backend: Backend = loop.trainer.backend
        self.model: nn.Module = self.backend.model
        synchronizes = any(isinstance(module, nn.SyncBatchNorm) for module in self.model.modules())
        self.is_collective: bool = self.backend.forward_is_collective or (synchronizes and loop.ranks.world_size > 1)
        """Whether ranks wait for each other in a pass, so that none may run one more than the others."""
        self.full_batch: Any = batch
        self.seconds = seconds
        self.share: float = 1.0
        """How much of the batch is run."""
        self.batch: Any = batch
        self.output: StepOutput | None = None
        self.loss: float = math.nan
        self.classes: int | None = None
        self.mixes = False
        """Whether samples see each other in evaluation mode."""
        self.gradients: dict[str, torch.Tensor | None] = {}
        self.silent: set[str] = set()
        """The activations that give nothing but zeros, or are saturated, in the first pass."""
        self.evaluating: list[nn.Module] = modules_in_eval_mode(self.model)

    def begin(self) -> CheckFinding | None:
        """Run the first pass, and return what is wrong with it, if it fails."""
        with contextlib.suppress(DataError):
            parts = split_batch(self.full_batch, _ROWS)
            self.full_batch, self.share = parts[0], 1 / len(parts)
        path = list[tuple[str, nn.Module, Any]]()

        def leave(*_: Any) -> None:  # a hook that returned anything would replace the output
            path.pop()

        with contextlib.ExitStack() as hooks:
            for name, module in self.model.named_modules():
                enter = functools.partial(lambda name, module, inputs: path.append((name, module, inputs)), name)
                hooks.enter_context(module.register_forward_pre_hook(enter))
                hooks.enter_context(module.register_forward_hook(leave))
            try:
                self._run_first()
            except Exception as error:
                if self.loop.ranks.world_size > 1 and self.is_collective:
                    raise
                where, detail = "the first batch", ""
                if path:
                    name, module, inputs = path[-1]
                    where = module_title(name, module)
                    shapes = ", ".join(str(list(tensor.shape)) for tensor in tensors_in(inputs))
                    detail = f"it gets {shapes or 'no tensors'}{_expected(module)}; "
                text = f"{detail}{brief_error(error)}"
                return CheckFinding("error", "batch", where, text, "Training would fail in step 1.")
        self.classes = _classes_of(self)
        return None

    # --- passes

    def _run_first(self) -> None:
        self.batch = transformed(self.loop, self.full_batch, prepares=True)
        if self.is_collective:
            with self.backend.eval_mode(self.trainer.settings.seed), self.autocast():
                self.output = self.backend.forward(self.trainer._forward, self.batch)
            self.loss = float(mean_loss(self.output))
        else:
            # what a model makes in its very first pass stays for the others
            with self.training(is_first=True), self.watching() as activations:
                loss = self.run(self.batch)
                self.loss = float(loss.detach())
                self.gradients = self.gradients_of(loss)
            self.silent = {name for name, word in activations.items() if word}

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context of a forward pass; without a loss scale, fp16 would lose small gradients."""
        return contextlib.nullcontext() if self.trainer.precision.name == "fp16" else self.trainer._autocast()

    def run(self, batch: Any) -> torch.Tensor:
        """Return the loss of a batch on the device; the same random numbers each time."""
        seed_everything(self.trainer.settings.seed)
        with self.autocast():
            output: StepOutput = self.trainer._forward(self.model, batch)
        self.output = output
        return mean_loss(output)

    @contextlib.contextmanager
    def training(self, is_first: bool = False) -> Iterator[None]:
        """Put the model into training mode; buffers and random numbers are restored afterwards, and attributes too."""
        self.model.train()
        for module in self.evaluating:
            module.training = False
        with isolated_rng(self.trainer.device), unchanged_buffers(self.model) if is_first else self.repeatable():
            yield

    @contextlib.contextmanager
    def repeatable(self) -> Iterator[None]:
        """Restore buffers and attributes on exit, so that the next pass has the same counters and generators."""
        with unchanged_buffers(self.model), unchanged_attributes([*self.model.modules(), self.trainer.unit]):
            yield

    def forward(self, batch: Any) -> StepOutput:
        """Return the output of a batch in evaluation mode; together on all ranks, if passes are collective."""
        with self.backend.eval_mode(self.trainer.settings.seed), self.repeatable(), self.autocast():
            return self.backend.forward(self.trainer._forward, batch)

    def evaluate(self, batch: Any) -> tuple[float, Any]:
        """Return loss and outputs of a batch in evaluation mode."""
        output = self.forward(batch)
        return (math.nan if output.loss is None else float(mean_loss(output))), output.outputs

    def other_batches(self) -> Iterator[Any]:
        """Yield batches of other places of the epoch on the device, on all ranks as many; None for one that fails."""
        loader: Any = self.loop.sets.train
        if not isinstance(loader, MapLoader):
            if self.loop.ranks.world_size == 1:  # on several, data that are not read by index end at different times
                for counted in itertools.islice(loader.counted_batches(0), 1, _PLACES):
                    yield self._prepare(counted.batch)
            return
        size, rows = loader.size or 0, self.trainer.batch_size
        for start in sorted({size * place // _PLACES // rows * rows for place in range(1, _PLACES)} - {0}):
            batch = None
            with contextlib.suppress(Exception):  # of a broken sample, which is found as the set is read
                indices = loader.sampler.samples(0, start, start + min(_ROWS, rows))
                batch = self._prepare(loader.fetch(0, indices))
            yield batch

    def _prepare(self, batch: Any) -> Any:
        with contextlib.suppress(DataError):
            batch = split_batch(batch, _ROWS)[0]
        return transformed(self.loop, batch, prepares=True)

    def passes_elsewhere(self) -> Iterator[tuple[dict[str, torch.Tensor | None], dict[str, str]]]:
        """Yield the gradients of other batches, and the states of activations; nothing for one that fails."""
        first, output = self.batch, self.output
        try:
            for batch in self.other_batches():
                self.batch, gradients = batch, dict[str, torch.Tensor | None]()
                with self.watching() as activations, contextlib.suppress(Exception), self.training():
                    gradients = self.gradients_of(self.run(batch))
                yield gradients, activations
        finally:
            self.batch, self.output = first, output

    def count_classes(self) -> int | None:
        """Return the number of classes, if other batches have as many; with several tasks they may have others."""
        classes = self.classes
        if classes is not None and not self.is_collective:
            for batch in self.other_batches():
                with contextlib.suppress(Exception):
                    pair = scores_and_labels(self.forward(batch))
                    classes = classes if pair is None or pair[0].shape[-1] == self.classes else None
        return classes

    def is_any(self, flag: bool) -> bool:
        """Return whether something is true on any rank; called on all of them."""
        return self.loop.ranks.sum("a step of check()", float(flag))[0] > 0

    def agrees(self, flag: bool) -> bool:
        """Return whether something is true on this rank; on any rank, if passes are collective."""
        return self.is_any(flag) if self.is_collective else flag

    def trainable(self) -> list[tuple[str, nn.Parameter]]:
        """Return the parameters that train, by name."""
        return [(name, parameter) for name, parameter in self.model.named_parameters() if parameter.requires_grad]

    def gradients_of(self, loss: torch.Tensor) -> dict[str, torch.Tensor | None]:
        """Return the gradient of each parameter that trains; None for one that the loss does not depend on."""
        trainable = dict(self.trainable())
        parameters = list(trainable.values())
        if not loss.requires_grad or not parameters:
            return dict.fromkeys(trainable)
        try:  # no hook of DDP runs in it
            gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
        except RuntimeError as error:
            if "heckpoint" not in str(error):
                raise
            gradients = list[Any]()  # reentrant activation checkpoints support backward() only
            for parameter in parameters:
                parameter.grad = None
            self.run(self.batch).backward()
            for parameter in parameters:
                gradients.append(parameter.grad)
                parameter.grad = None
        return dict(zip(trainable, gradients, strict=True))

    @contextlib.contextmanager
    def watching(self) -> Iterator[dict[str, str]]:
        """Yield a dict that gets, for each activation module that runs inside, "dead", "saturated" or ""."""
        states: dict[str, str] = {}

        def look(name: str, module: nn.Module, inputs: Any, output: Any) -> None:
            if not isinstance(output, torch.Tensor) or not output.numel():
                return
            values, state = output.detach(), ""
            if isinstance(module, _RECTIFYING) and bool((values.abs() < 1e-7).all()):
                state = "dead"
            for kind, (low, high) in _SATURATING.items():
                if isinstance(module, kind) and float(((values < low) | (values > high)).float().mean()) > 0.99:
                    state = "saturated"
            states[name] = state if states.get(name, state) == state else ""

        with contextlib.ExitStack() as hooks:
            for name, module in self.model.named_modules():
                if isinstance(module, (*_RECTIFYING, *_SATURATING)):
                    hooks.enter_context(module.register_forward_hook(functools.partial(look, name)))
            yield states


def mean_loss(output: StepOutput) -> torch.Tensor:
    """Return the mean loss of a batch; a unit may return the sum over its targets."""
    loss, targets = output.required_loss(), output.num_targets
    return loss if targets is None else loss / max(float(targets), 1)


def brief_error(error: BaseException) -> str:
    """Return the class and the first line of an error."""
    text = str(error).strip().splitlines()[0] if str(error).strip() else ""
    return f"{type(error).__name__}: {text}"[:300].rstrip(".")


def module_title(name: str, module: nn.Module | None) -> str:
    """Return the class and the name of a module, as reports call it."""
    kind = "forward()" if module is None else class_of(module).__name__
    return f"{kind} {name!r}" if name else f"forward() of {kind}"


def _expected(module: nn.Module) -> str:
    """Return what a layer expects, as text."""
    for attribute, words in (("in_features", "features"), ("in_channels", "channels"), ("num_embeddings", "codes"),
                             ("normalized_shape", "features"), ("num_features", "features")):  # fmt: skip
        value = getattr(module, attribute, None)
        if value is not None:
            size = f"codes from 0 to {value - 1}" if words == "codes" else f"{value} {words}"
            return f" and expects {size}"
    return ""


def _classes_of(probe: PassProbe) -> int | None:
    """Return the number of classes, if the outputs are scores of classes and the labels are their numbers."""
    if probe.output is None or (pair := scores_and_labels(probe.output)) is None:
        return None
    scores, labels = pair
    ignored = (labels == IGNORED_LABEL) | (labels == probe.trainer.loss_mean.ignore_index)
    valid = (labels >= 0) & (labels < scores.shape[-1])
    # a loss that takes other labels compares them with something else, such as embeddings with identities
    return scores.shape[-1] if bool((valid | ignored).all()) else None


def scores_and_labels(output: StepOutput) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return scores of shape (..., classes) and the labels of class numbers that they are compared with."""
    scores, labels = output.outputs, output.labels
    if not isinstance(scores, torch.Tensor) or not isinstance(labels, torch.Tensor):
        return None
    if labels.is_floating_point() or labels.dtype == torch.bool or not scores.is_floating_point() or scores.ndim < 2:
        return None
    if scores.shape[:-1] != labels.shape:
        scores = scores.movedim(1, -1)  # of images and sequences
    if scores.shape[:-1] != labels.shape or scores.shape[-1] < 2:
        return None
    return scores.detach().float(), labels.detach()
