"""Checks of a run before its first step: `trainer.check()`."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from omnitrain.checkpoint.state_dicts import class_of
from omnitrain.compute.random_state import isolated_rng, seed_everything
from omnitrain.core.display import ProofResult, Table
from omnitrain.core.errors import DataError, format_list
from omnitrain.data.collation import IGNORED_LABEL, DictBatch, count_samples, split_batch, tensors_in
from omnitrain.data.loaders import MapLoader
from omnitrain.diagnostics.data_checks import DataSample, describe_data
from omnitrain.diagnostics.rehearsal import clone_optimizer, unchanged_attributes, unchanged_run, unchanged_weights
from omnitrain.model.units import StepOutput
from omnitrain.optim.build import needs_closure
from omnitrain.trainer.buffers import unchanged_buffers
from omnitrain.trainer.compilation import transformed
from omnitrain.trainer.loop import Loop
from omnitrain.trainer.step import modules_in_eval_mode

Severity = Literal["error", "warning", "note"]

# Rows of the batch that is run: few, as it is run up to a hundred times.
_ROWS = 16
# Places of an epoch that are looked at where the first batch may have samples of one task or class only.
_PLACES = 8
_OVERFIT_RATES = (1e-3, 1e-2, 1e-4)
# A loss of one batch that falls by less than this share of itself does not learn.
_LEAST_FALL = 0.02
_SATURATING = {nn.Sigmoid: (0.01, 0.99), nn.Tanh: (-0.99, 0.99), nn.Hardtanh: (-0.999, 0.999)}
_RECTIFYING = (nn.ReLU, nn.ReLU6, nn.GELU, nn.SiLU)


@dataclass(frozen=True, slots=True)
class CheckFinding:
    """Something that `trainer.check()` has found.

    Attributes:
        severity: "error" if training fails or learns nothing so, "warning" for a likely fault, "note" for the rest.
        check: The name of the check.
        where: The parameter, module, sample or argument that it concerns.
        what: What it is.
        remedy: What to do about it; empty if nothing has to be done.
    """

    severity: Severity
    check: str
    where: str
    what: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class CheckResult(ProofResult):
    """The result of `trainer.check()`, which prints as a list and shows as a table in notebooks.

    Attributes:
        findings: What was found, errors first.
        outcomes: A line for each check: what was measured, or why it was not tried.
        seconds: How long it took.

    >>> finding = CheckFinding("warning", "labels", "the training set", "all 8 samples have label 0", "Look at them.")
    >>> print(CheckResult([finding], {"labels": "1 of 2 classes"}, 0.5))
    1 warning, in 0.5 s
      labels  1 of 2 classes
    warning: labels, the training set: all 8 samples have label 0. Look at them.
    """

    findings: list[CheckFinding]
    outcomes: dict[str, str]
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether there is no error and no warning."""
        return all(finding.severity == "note" for finding in self.findings)

    def to_json(self) -> dict[str, Any]:
        """Return the result as JSON types."""
        findings = [asdict(finding) for finding in self.findings]
        return {"ok": self.ok, "findings": findings, "outcomes": self.outcomes, "seconds": round(self.seconds, 3)}

    def __str__(self) -> str:
        """Return the outcome of each check, then the findings."""
        width = max(map(len, self.outcomes), default=0)
        lines = [f"{self._count()}, in {self.seconds:.1f} s"]
        lines += [f"  {name:<{width}}  {outcome}" for name, outcome in self.outcomes.items()]
        for finding in self.findings:
            text = f"{finding.severity}: {finding.check}, {finding.where}: {finding.what}. {finding.remedy}".rstrip()
            lines += textwrap.wrap(text, 118, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
        return "\n".join(lines)

    def _count(self) -> str:
        counts = {kind: sum(finding.severity == kind for finding in self.findings) for kind in _SEVERITIES}
        words = [f"{count} {kind}{'s' * (count > 1)}" for kind, count in counts.items() if count]
        return ", ".join(words) if words else "nothing found"

    def _table(self) -> Table:
        rows = [list(asdict(finding).values()) for finding in self.findings]
        above = [f"{self._count()}, in {self.seconds:.1f} s"]
        below = [f"{name}: {outcome}" for name, outcome in self.outcomes.items()]
        return Table(["severity", "check", "where", "what", "remedy"], rows, above=above, below=below)


_SEVERITIES = ("error", "warning", "note")

Outcome = tuple[str, list[CheckFinding]]


class NotTried(Exception):
    """Why a check was not tried."""


def check_run(loop: Loop, samples: int, seconds: float) -> CheckResult:
    """Check the data, the model and the loss of a run that has not begun; called on all ranks.

    Args:
        loop: The loop of the run.
        samples: How many samples of each set are read, at most.
        seconds: The limit of reading each set, and of overfitting.
    """
    begin, ranks = time.perf_counter(), loop.ranks
    outcomes, findings = dict[str, str](), list[CheckFinding]()

    def add(name: str, check: Callable[[], Outcome]) -> None:
        try:
            outcomes[name], entries = check()
            findings.extend(entries)
        except NotTried as reason:
            outcomes[name] = f"not tried: {reason}"
        except Exception as error:
            outcomes[name] = f"not tried: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"

    with unchanged_run(loop):
        batch, problem = _read_batch(loop)
        probe: _BatchProbe | None = None
        if batch is not None and not loop.has_custom_epoch:
            probe = _BatchProbe(loop, batch, seconds)
            problem = probe.begin()
        findings += [] if problem is None else [problem]
        sample = DataSample.read(loop, samples, seconds) if ranks.is_main else None
        for name, check in _CHECKS.items():
            if problem is not None or probe is None:
                reason = "its own `_train_epoch` computes the loss" if loop.has_custom_epoch else "the batch fails"
                outcomes[name] = f"not tried: {reason}"
            elif probe.is_collective and name not in _FORWARD_CHECKS:
                outcomes[name] = f"not tried: {_SHARDED}"
            else:
                add(name, functools.partial(check, probe))
        classes = None if probe is None or problem is not None else probe.count_classes()
        if sample is not None:
            for name, (outcome, entries) in describe_data(sample, classes).items():
                outcomes[name] = outcome
                findings += [CheckFinding(*entry) for entry in entries]
    gathered = ranks.gather("the findings of check()", (outcomes, [asdict(finding) for finding in findings]))
    unique, known = list[CheckFinding](), set[tuple[str, str]]()
    for _, entries in gathered:  # what several ranks find is reported once
        unique += [CheckFinding(**entry) for entry in entries if (entry["check"], entry["where"]) not in known]
        known |= {(entry["check"], entry["where"]) for entry in entries}
    ordered = sorted(unique, key=lambda finding: _SEVERITIES.index(finding.severity))
    return CheckResult(ordered, gathered[0][0], time.perf_counter() - begin)


def _read_batch(loop: Loop) -> tuple[Any, CheckFinding | None]:
    """Return the first batch of this rank, or what its reading raised."""
    loader = loop.sets.train
    if loader is None:
        return None, None
    try:
        counted = next(loop.feed.lockstep_batches(loader, only_first=True), None)
    except Exception as error:
        if loop.ranks.world_size > 1:
            raise
        return None, CheckFinding("error", "batch", loader.name, _brief(error), "Correct the data or the collator.")
    return None if counted is None else counted.batch, None


class _BatchProbe:
    """Runs one batch through the model, in training or evaluation mode, as if each pass were the first."""

    def __init__(self, loop: Loop, batch: Any, seconds: float) -> None:
        self.loop = loop
        self.trainer: Any = loop.trainer
        self.backend = loop.trainer.backend
        self.model: nn.Module = self.backend.model
        synchronizes = any(isinstance(module, nn.SyncBatchNorm) for module in self.model.modules())
        self.is_collective: bool = self.backend.forward_is_collective or (synchronizes and loop.ranks.world_size > 1)
        """Whether ranks wait for each other in a pass, so that none may run one more than the others."""
        self.full_batch = batch
        self.seconds = seconds
        self.share = 1.0
        """How much of the batch is run."""
        self.batch: Any = batch
        self.output: StepOutput | None = None
        self.loss = math.nan
        self.classes: int | None = None
        self.mixes = False
        """Whether samples see each other in evaluation mode."""
        self.gradients: dict[str, torch.Tensor | None] = {}
        self.silent: set[str] = set()
        """The activations that give nothing but zeros, or are saturated, in the first pass."""
        self._evaluating = modules_in_eval_mode(self.model)
        self._set_step_nr = getattr(self.trainer.unit, "set_step_nr", None)

    def begin(self) -> CheckFinding | None:
        """Run the first pass, and return what is wrong with it, if it fails."""
        with contextlib.suppress(DataError):
            parts = split_batch(self.full_batch, _ROWS)
            self.full_batch, self.share = parts[0], 1 / len(parts)
        path, hooks = list[tuple[str, nn.Module, Any]](), list[Any]()

        def leave(*_: Any) -> None:  # a hook that returned anything would replace the output
            path.pop()

        for name, module in self.model.named_modules():
            enter = functools.partial(lambda name, module, inputs: path.append((name, module, inputs)), name)
            hooks += [module.register_forward_pre_hook(enter), module.register_forward_hook(leave)]
        try:
            self.batch = transformed(self.loop, self.full_batch, prepares=True)
            if self.is_collective:
                with self.backend.eval_mode(self.trainer.settings.seed), self.autocast():
                    self.output = self.backend.forward(self.trainer._forward, self.batch)
                self.loss = float(_mean_loss(self.output))
            else:
                # what a model makes in its very first pass stays for the others
                with self.training(is_first=True), self.watching() as activations:
                    loss = self.run(self.batch)
                    self.loss = float(loss.detach())
                    self.gradients = self.gradients_of(loss)
                self.silent = {name for name, word in activations.items() if word}
        except Exception as error:
            if self.loop.ranks.world_size > 1 and self.is_collective:
                raise
            where, detail = "the first batch", ""
            if path:
                name, module, inputs = path[-1]
                where = _title(name, module)
                shapes = ", ".join(str(list(tensor.shape)) for tensor in tensors_in(inputs))
                detail = f"it gets {shapes or 'no tensors'}{_expected(module)}; "
            return CheckFinding("error", "batch", where, f"{detail}{_brief(error)}", "Training would fail in step 1.")
        finally:
            for hook in hooks:
                hook.remove()
        self.classes = _classes_of(self)
        return None

    # --- passes

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context of a forward pass; without a loss scale, fp16 would lose small gradients."""
        return contextlib.nullcontext() if self.trainer.precision.name == "fp16" else self.trainer._autocast()

    def run(self, batch: Any) -> torch.Tensor:
        """Return the loss of a batch on the device; the same random numbers each time."""
        seed_everything(self.trainer.settings.seed)
        with self.autocast():
            output: StepOutput = self.trainer._forward(self.model, batch)
        self.output = output
        return _mean_loss(output)

    @contextlib.contextmanager
    def training(self, is_first: bool = False) -> Iterator[None]:
        """Put the model into training mode; buffers and random numbers are restored afterwards, and attributes too."""
        self.model.train()
        for module in self._evaluating:
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
        return (math.nan if output.loss is None else float(_mean_loss(output))), output.outputs

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
                    pair = _scores_and_labels(self.forward(batch))
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
        named = self.trainable()
        parameters = [parameter for _, parameter in named]
        if not loss.requires_grad or not parameters:
            return dict.fromkeys(name for name, _ in named)
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
        return {name: gradient for (name, _), gradient in zip(named, gradients, strict=True)}

    @contextlib.contextmanager
    def watching(self) -> Iterator[dict[str, str]]:
        """Yield a dict that gets, for each activation module that runs inside, "dead", "saturated" or ""."""
        states: dict[str, str] = {}

        def look(name: str, module: nn.Module, output: Any) -> None:
            if not isinstance(output, torch.Tensor) or not output.numel():
                return
            values, state = output.detach(), ""
            if isinstance(module, _RECTIFYING) and bool((values.abs() < 1e-7).all()):
                state = "dead"
            for kind, (low, high) in _SATURATING.items():
                if isinstance(module, kind) and float(((values < low) | (values > high)).float().mean()) > 0.99:
                    state = "saturated"
            states[name] = state if states.get(name, state) == state else ""

        kinds = (*_RECTIFYING, *_SATURATING)
        hooks = [
            module.register_forward_hook(lambda module, _, output, name=name: look(name, module, output))
            for name, module in self.model.named_modules() if isinstance(module, kinds)
        ]  # fmt: skip
        try:
            yield states
        finally:
            for hook in hooks:
                hook.remove()


def _mean_loss(output: StepOutput) -> torch.Tensor:
    """Return the mean loss of a batch; a unit may return the sum over its targets."""
    loss, targets = output.required_loss(), output.num_targets
    return loss if targets is None else loss / max(float(targets), 1)


def _brief(error: BaseException) -> str:
    text = str(error).strip().splitlines()[0] if str(error).strip() else ""
    return f"{type(error).__name__}: {text}"[:300].rstrip(".")


def _title(name: str, module: nn.Module | None) -> str:
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


# --- the loss at the start


def _classes_of(probe: _BatchProbe) -> int | None:
    """Return the number of classes, if the outputs are scores of classes and the labels are their numbers."""
    if probe.output is None or (pair := _scores_and_labels(probe.output)) is None:
        return None
    scores, labels = pair
    ignored = (labels == IGNORED_LABEL) | (labels == probe.trainer.loss_mean.ignore_index)
    valid = (labels >= 0) & (labels < scores.shape[-1])
    # a loss that takes other labels compares them with something else, such as embeddings with identities
    return scores.shape[-1] if bool((valid | ignored).all()) else None


def _scores_and_labels(output: StepOutput) -> tuple[torch.Tensor, torch.Tensor] | None:
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


def _check_loss(probe: _BatchProbe) -> Outcome:
    if not math.isfinite(probe.loss):
        finding = CheckFinding(
            "error", "loss", "the first batch", f"the loss is {probe.loss}",
            "Look for NaN or infinity in the data, a division by 0 or log(0) in the loss, or weights that overflow.",
        )  # fmt: skip
        return f"{probe.loss} at the start", [finding]
    assert probe.output is not None
    text, pair = f"{probe.loss:.4g} at the start", _scores_and_labels(probe.output)
    if pair is None:
        return text, []
    scores, labels = pair
    mean = probe.trainer.loss_mean
    chance, is_cross_entropy = math.log(scores.shape[-1]), False
    for shift in (0, 1):
        logits, targets = scores, labels.clone()
        if shift and labels.ndim < 2:
            continue
        if shift:
            logits, targets = scores[..., :-1, :], labels[..., 1:]
        targets = targets.reshape(-1)
        targets[(targets < 0) | (targets >= scores.shape[-1])] = -100
        if mean.ignore_index >= 0:
            targets[targets == mean.ignore_index] = -100
        loss = nn.functional.cross_entropy(logits.reshape(-1, scores.shape[-1]), targets)
        is_cross_entropy = is_cross_entropy or math.isclose(float(loss), probe.loss, rel_tol=0.02)
    if not is_cross_entropy:
        return text, []
    text += f"; by chance ln {scores.shape[-1]} = {chance:.4g}"
    if probe.loss > 1.5 * chance + 0.5:
        return text, [CheckFinding(
            "warning", "loss", "the first batch",
            f"it is {probe.loss:.4g} at the start, and by chance ln {scores.shape[-1]} = {chance:.4g}: the model is "
            "confident and wrong",
            "Normalize the inputs, begin the last layer with smaller weights, or compare the labels with the classes "
            "that a pretrained model knows.",
        )]  # fmt: skip
    return text, []


# --- gradients and layers


def _check_gradients(probe: _BatchProbe) -> Outcome:
    missing = [name for name, gradient in probe.gradients.items() if gradient is None]
    if missing and probe._set_step_nr is not None:  # a unit may train its parts in turns
        with probe.training():
            for number in (1, 2, 3):
                probe._set_step_nr(number)
                gradients = probe.gradients_of(probe.run(probe.batch))
                missing = [name for name in missing if gradients[name] is None]
    if probe.is_any(bool(missing)):
        for gradients, _ in probe.passes_elsewhere():
            missing = [name for name in missing if gradients.get(name) is None]
            if not probe.is_any(bool(missing)):
                break
    count = len(probe.gradients)
    if not count:
        remedy = "Unfreeze what is to train: requires_grad_(True), or fewer patterns in `freeze`."
        return "no parameter trains", [
            CheckFinding("error", "gradients", "the model", "no parameter requires a gradient", remedy)
        ]
    infinite = [name for name, gradient in probe.gradients.items()
                if gradient is not None and not bool(_values(gradient).isfinite().all())]  # fmt: skip
    findings = []
    if infinite:
        findings.append(CheckFinding(
            "error", "gradients", format_list(infinite), "the gradient is not finite",
            "Look for sqrt(0), log(0), a norm of zeros or a division by 0 in the backward pass.",
        ))  # fmt: skip
    if missing:
        severity: Severity = "error" if len(missing) == count else "warning"
        findings.append(CheckFinding(
            severity, "gradients", format_list(missing),
            f"{'it gets' if len(missing) == 1 else f'these {len(missing)} get'} no gradient, as the loss does not "
            "depend on them",
            "Use them in forward(), without .detach() in between, or freeze them with requires_grad_(False).",
        ))  # fmt: skip
    return f"{count - len(missing)} of {count} parameters that train have one", findings


def _values(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def _check_overfitting(probe: _BatchProbe, steps: int = 30) -> Outcome:
    """Train on one batch with Adam; look at layers before and after it."""
    seconds = probe.seconds
    findings = list[CheckFinding]()
    if not any(gradient is not None for gradient in probe.gradients.values()):
        raise NotTried("nothing has a gradient")
    begin, best, taken_steps, rate_used = time.perf_counter(), math.inf, 0, 0.0
    start, zero = probe.loss, {name for name, gradient in probe.gradients.items() if _is_zero(gradient)}
    silent: dict[str, str] = {}
    parameters = [parameter for _, parameter in probe.trainable()]
    for rate in _OVERFIT_RATES:
        with probe.training(), unchanged_weights(probe.backend):
            optimizer = torch.optim.Adam(parameters, rate)
            for number in range(steps):
                with probe.watching() as activations:
                    loss = probe.run(probe.batch)
                    gradients = probe.gradients_of(loss)
                value = float(loss.detach())
                start = value if not number else start
                if rate == _OVERFIT_RATES[0]:
                    zero -= {name for name, gradient in gradients.items() if not _is_zero(gradient)}
                    if number:
                        silent = activations
                if number and value < best:
                    best, rate_used = value, rate
                taken_steps = max(taken_steps, number)
                # together, as a loss may gather the outputs of all ranks
                if probe.is_any(not math.isfinite(value) or time.perf_counter() - begin > seconds):
                    break
                if any(gradient is not None and gradient.is_sparse for gradient in gradients.values()):
                    raise NotTried("gradients are sparse")
                for name, parameter in probe.trainable():
                    parameter.grad = gradients[name]
                optimizer.step()
                for parameter in parameters:
                    parameter.grad = None
        has_fallen = start - best > 0.1 * max(abs(start), 1e-6)
        if not probe.is_any(not has_fallen) or probe.is_any(time.perf_counter() - begin > seconds):
            break
    dead = {name: word for name, word in silent.items() if word and name in probe.silent}
    if probe.is_any(bool(zero or dead)):
        for gradients, activations in probe.passes_elsewhere():
            zero -= {name for name, gradient in gradients.items() if gradient is not None and not _is_zero(gradient)}
            dead = {name: word for name, word in dead.items() if activations.get(name, word) == word}
            if not probe.is_any(bool(zero or dead)):
                break
    for name, word in dead.items():
        module = dict(probe.model.named_modules())[name]
        what = "gives only zeros" if word == "dead" else "is saturated in more than 99 % of its outputs"
        remedy = "Begin the layers before it with smaller weights or a larger bias, or normalize its inputs."
        findings.append(CheckFinding("warning", "layers", _title(name, module), f"it {what}", remedy))
    if zero and len(zero) < len(probe.gradients) and taken_steps > 2:
        findings.append(CheckFinding(
            "warning", "layers", format_list(sorted(zero)),
            f"the gradient is exactly 0 in each of {taken_steps + 1} updates",
            "Look for a dead activation or a factor of 0 behind it.",
        ))  # fmt: skip
    if taken_steps < 3:
        return f"not tried: a step takes {time.perf_counter() - begin:.1f} s", findings
    text = f"{start:.4g} to {best:.4g} in {taken_steps} updates of one batch"
    if abs(start) < 1e-6 or (start - best) > _LEAST_FALL * max(abs(start), 1e-6):
        return f"{text} at a rate of {rate_used:g}", findings
    if taken_steps < steps - 1:
        return f"{text}, too few to tell", findings
    findings.append(CheckFinding(
        "warning", "overfitting", "the first batch",
        f"{taken_steps} updates by Adam on {count_rows(probe.batch)} of its samples take the loss from {start:.4g} to "
        f"{best:.4g} only",
        "A model that can learn fits a few samples: look at the labels and their scale, at the sign of the loss, and "
        "at what is detached from the graph.",
    ))  # fmt: skip
    return text, findings


def count_rows(batch: Any) -> str:
    """Return the rows of a batch as text."""
    with contextlib.suppress(DataError):
        return str(count_samples(batch))
    return "all"


def _is_zero(gradient: torch.Tensor | None) -> bool:
    return gradient is not None and not bool(_values(gradient).any())


# --- samples that see each other


def _check_mixing(probe: _BatchProbe) -> Outcome:
    try:
        return _find_mixing(probe)
    except NotTried as reason:
        return f"not tried: {reason}", _norm_notes(probe)


def _norm_notes(probe: _BatchProbe) -> list[CheckFinding]:
    """Return what BatchNorm does, which is known without a trial."""
    norms = [
        _norm_note(name, module) for name, module in probe.model.named_modules()
        if isinstance(module, _BatchNorm) and module not in probe._evaluating
    ]  # fmt: skip
    return norms[:1]


def _norm_note(name: str, module: nn.Module) -> CheckFinding:
    return CheckFinding(
        "note", "mixing", _title(name, module), "in training the samples of a batch see each other by its statistics",
        "The numbers depend on `batch_size`, accumulation and processes; GroupNorm or LayerNorm do not.",
    )  # fmt: skip


def _find_mixing(probe: _BatchProbe) -> Outcome:
    changed = _with_other_first_row(probe.batch)
    if probe.agrees(changed is None):
        raise NotTried("the samples of the batch cannot be told apart")
    findings, names = list[CheckFinding](), {True: "training", False: "evaluation"}
    mixing: dict[bool, str | None] = {}
    for is_training in (False,) if probe.is_collective else (False, True):
        with _recording(probe) as plain:
            first = _run_rows(probe, probe.batch, is_training)
        with _recording(probe) as other:
            second = _run_rows(probe, changed, is_training)
        repeated = _run_rows(probe, probe.batch, is_training)
        if probe.agrees(first is None or second is None or repeated is None):
            raise NotTried("the outputs have no row for each sample")
        assert first is not None and second is not None and repeated is not None
        if probe.agrees(_other_rows_differ(first, repeated, probe)):
            raise NotTried("two passes of one batch differ")
        mixing[is_training] = None
        if _other_rows_differ(first, second, probe):
            mixing[is_training] = next((name for name in plain if _mixes(plain[name], other.get(name), probe)), "")
    probe.mixes = probe.agrees(mixing[False] is not None)
    modules = dict(probe.model.named_modules())
    for is_training, name in mixing.items():
        if name is None or (is_training and name == mixing[False]):
            continue
        module = modules.get(name)
        where = _title(name, module)
        if is_training and isinstance(module, _NormBase):
            findings.append(_norm_note(str(name), module))
            continue
        remedy = "Look for a mean, a softmax or an attention over the first dimension of its inputs."
        if name and getattr(module, "batch_first", None) is False:
            remedy = "Make it with batch_first=True: it takes the first dimension for the sequence."
        elif isinstance(module, _NormBase):
            remedy = "It has no running statistics (track_running_stats=False), or is never in evaluation mode."
        what = f"in {names[is_training]} a change of sample 0 changes the outputs of the others"
        findings.append(CheckFinding("warning", "mixing", where, what, remedy))
    if not any(name is not None for name in mixing.values()):
        scope = " in evaluation mode" if probe.is_collective else ""
        findings += _norm_notes(probe) if probe.is_collective else []
        return f"no sample changes the outputs of another{scope}", findings
    return "samples of a batch see each other", findings


def _run_rows(probe: _BatchProbe, batch: Any, is_training: bool) -> list[torch.Tensor] | None:
    """Return the outputs that have a row for each sample."""
    if is_training:
        with probe.training(), torch.no_grad():
            seed_everything(probe.trainer.settings.seed)
            with probe.autocast():
                outputs = probe.trainer._forward(probe.model, batch).outputs
    else:
        outputs = probe.evaluate(batch)[1]
    rows = count_samples(batch)
    tensors = [tensor.detach() for tensor in tensors_in(outputs) if tensor.is_floating_point()]
    tensors = [tensor for tensor in tensors if tensor.ndim and tensor.shape[0] == rows]
    return tensors or None


@contextlib.contextmanager
def _recording(probe: _BatchProbe) -> Iterator[dict[str, tuple[list[torch.Tensor], list[torch.Tensor]]]]:
    """Yield a dict that gets the inputs and outputs of each module inside, in the order in which they end."""
    records: dict[str, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    rows = count_samples(probe.batch)

    def rows_in(value: Any) -> list[torch.Tensor]:
        tensors = (tensor.detach() for tensor in tensors_in(value) if tensor.is_floating_point())
        return [tensor.clone() for tensor in tensors if tensor.ndim and tensor.shape[0] == rows]

    def record(name: str, inputs: Any, options: Any, output: Any) -> None:
        records.setdefault(name, (rows_in([*inputs, *options.values()]), rows_in(output)))

    hooks = [
        module.register_forward_hook(
            lambda _, inputs, options, output, name=name: record(name, inputs, options, output), with_kwargs=True
        )
        for name, module in probe.model.named_modules()
    ]
    try:
        yield records
    finally:
        for hook in hooks:
            hook.remove()


def _mixes(plain: Any, other: Any, probe: _BatchProbe) -> bool:
    """Whether a module's outputs differ in rows in which its inputs do not."""
    if other is None or [len(part) for part in plain] != [len(part) for part in other]:
        return False
    return _other_rows_differ(plain[1], other[1], probe) and not _other_rows_differ(plain[0], other[0], probe)


def _rounding(probe: _BatchProbe) -> float:
    """Return the largest difference of equal outputs, relative to the largest of them."""
    is_exact = probe.trainer.precision.name == "fp32" and probe.trainer.device.type == "cpu"
    return 1e-5 if is_exact else 2e-2


def _other_rows_differ(first: Sequence[torch.Tensor], second: Sequence[torch.Tensor], probe: _BatchProbe) -> bool:
    """Whether rows other than the first differ by more than rounding."""
    for a, b in zip(first, second, strict=True):
        if a.shape == b.shape:
            gap = (a[1:].double() - b[1:].double()).abs().max() if a[1:].numel() else 0.0
            scale = float(a[1:].double().abs().max()) if a[1:].numel() else 0.0
            if float(gap) > _rounding(probe) * max(scale, 1e-6):
                return True
    return False


def _with_other_first_row(batch: Any) -> Any:
    """Return a batch whose first sample is another one of it; None if it has no rows, or all are alike."""
    try:
        rows = count_samples(batch)
    except DataError:
        return None
    if rows < 3 or not isinstance(batch, (torch.Tensor, Mapping, tuple, list)) or hasattr(batch, "parts"):
        return None

    def replace(value: Any, row: int) -> Any:
        if isinstance(value, torch.Tensor) and value.ndim and value.shape[0] == rows:
            changed = value.clone()
            changed[0] = value[row]
            return changed
        if isinstance(value, Mapping):
            entries = {key: replace(entry, row) for key, entry in value.items()}
            return value.with_entries(entries) if isinstance(value, DictBatch) else entries
        if isinstance(value, tuple):
            return tuple(replace(entry, row) for entry in value)
        if isinstance(value, list):
            if len(value) == rows and not any(isinstance(entry, torch.Tensor) and entry.ndim for entry in value):
                return [value[row], *value[1:]]
            return [replace(entry, row) for entry in value]
        return value

    for row in range(1, rows):
        changed = replace(batch, row)
        pairs = zip(tensors_in(batch), tensors_in(changed), strict=True)
        if any(a.is_floating_point() and not torch.equal(a, b) for a, b in pairs):
            return changed
        pairs = zip(tensors_in(batch), tensors_in(changed), strict=True)
        if any(not torch.equal(a, b) for a, b in pairs):
            return changed
    return None


# --- padding


def _check_padding(probe: _BatchProbe) -> Outcome:
    loader = probe.loop.sets.train
    if not isinstance(loader, MapLoader) or loader.fetch.columns is not None:
        raise NotTried("samples cannot be read one by one")
    if probe.mixes:
        raise NotTried("the samples of a batch see each other")
    numbers = list(range(min(loader.size or 0, 32)))
    dataset = loader.fetch.dataset
    lengths = [_length(dataset[number]) for number in numbers]
    short, long = (choose(numbers, key=lambda number: lengths[number]) for choose in (min, max))
    if not lengths or lengths[short] == lengths[long]:
        raise NotTried("the samples looked at have one length")
    collate = loader.fetch.collate
    single, pair = (
        transformed(probe.loop, collate([dataset[number] for number in indices]), prepares=True)
        for indices in ([short], [short, long])
    )
    if not _is_padded_copy(single, pair):
        raise NotTried("the collator changes the samples")
    where, lengthening = f"sample {short} of {loader.name}", f"from {lengths[short]} to {lengths[long]} entries"
    (alone, outputs), (_, pair_outputs) = probe.evaluate(single), probe.evaluate(pair)
    gap = _output_gap(outputs, pair_outputs, _rounding(probe))
    change = f"change by {gap:.1%} of what tells two samples apart" if gap else "do not change"
    text = f"outputs {change} {lengthening}"
    if gap > 1e-3:
        severity: Severity = "warning" if gap > 1e-2 else "note"
        return text, [CheckFinding(
            severity, "padding", where,
            f"its outputs change by {gap:.1%} of their distance to those of sample {long} when it is padded "
            f"{lengthening}",
            "Give the model a mask of the padding (attention_mask), and use it in means, poolings and attention.",
        )]  # fmt: skip
    padded, _ = probe.evaluate(split_batch(pair, 1)[0])
    limit = 1e-3 if probe.trainer.precision.name == "fp32" else 5e-2
    if abs(padded - alone) > limit * abs(alone):  # NaN, of a sample without a target, is not above anything
        return text, [CheckFinding(
            "warning", "padding", where,
            f"its loss changes from {alone:.4g} to {padded:.4g} when it is padded {lengthening}, though its outputs do "
            "not",
            "Label the padding -100 in the collator, and divide the loss by the targets that count.",
        )]  # fmt: skip
    return text, []


def _output_gap(single: Any, pair: Any, rounding: float) -> float:
    """Return how far the outputs of a sample move, alone and padded as the first of a pair, compared with the pair's.

    An untrained head gives all samples almost the same outputs, which would hide a change relative to themselves.
    """
    alone, padded = (next((tensor for tensor in tensors_in(output) if tensor.is_floating_point()), None)
                     for output in (single, pair))  # fmt: skip
    if alone is None or padded is None or alone.ndim != padded.ndim or not alone.ndim or len(padded) != 2:
        raise NotTried("the outputs have no row for each sample")
    a, b = alone[0].double(), padded[0].double()
    candidates = [b]
    if a.shape != b.shape:
        if a.ndim == 0 or a.shape[1:] != b.shape[1:] or len(a) > len(b):
            raise NotTried("the outputs of a padded sample have another shape")
        candidates = [b[: len(a)], b[len(b) - len(a) :]]
    gap = min(float((a - candidate).abs().max()) for candidate in candidates)
    if gap <= rounding * max(float(a.abs().max()), 1e-6):
        return 0.0
    return gap / max(float((b - padded[1].double()).abs().max()), gap)


def _length(sample: Any) -> int:
    """Return the length of the longest sequence of a sample."""
    entries = sample.values() if isinstance(sample, Mapping) else sample if isinstance(sample, (tuple, list)) else []
    if isinstance(sample, list) and not any(hasattr(entry, "__len__") for entry in sample):
        return len(sample)
    sizes = [0]
    for entry in entries:
        if isinstance(entry, torch.Tensor) or hasattr(entry, "shape"):
            sizes += [entry.shape[0]] if len(entry.shape) else []
        elif isinstance(entry, (list, tuple)):
            sizes.append(len(entry))
    return max(sizes)


def _is_padded_copy(single: Any, pair: Any) -> bool:
    """Whether the first row of a batch is that of a single sample, but for padding at one of its ends."""
    alone, both = list(tensors_in(single)), list(tensors_in(pair))
    if len(alone) > len(both) or not alone:
        return False
    if isinstance(single, Mapping) and isinstance(pair, Mapping):  # a mask is added where there is padding
        alone = [single[key] for key in single if key in pair and isinstance(single[key], torch.Tensor)]
        both = [pair[key] for key in single if key in pair and isinstance(single[key], torch.Tensor)]
    for a, b in zip(alone, both, strict=False):
        if not a.ndim or not b.ndim or len(a) != 1 or len(b) != 2:
            return False
        a, b = a[0], b[0]
        if a.shape == b.shape:
            parts = [b]
        elif a.ndim and a.shape[1:] == b.shape[1:] and len(a) < len(b):
            parts = [b[: len(a)], b[len(b) - len(a) :]]
        else:
            return False
        if not any(torch.equal(a, part) for part in parts):
            return False
    return True


# --- shapes, rates, time


def _check_shapes(probe: _BatchProbe) -> Outcome:
    assert probe.output is not None
    outputs, labels, loss_fn = probe.output.outputs, probe.output.labels, probe.trainer.settings.loss_fn
    tensors = list(tensors_in(outputs))
    shapes = ", ".join(str(list(tensor.shape)) for tensor in tensors[:3])
    label_shapes = ", ".join(str(list(tensor.shape)) for tensor in list(tensors_in(labels))[:3])
    text = f"outputs {shapes or 'unknown'}, labels {label_shapes or 'unknown'}"
    if loss_fn is None or not isinstance(outputs, torch.Tensor) or not isinstance(labels, torch.Tensor):
        return text, []
    if outputs.shape == labels.shape or outputs.numel() != labels.numel() or not labels.is_floating_point():
        return text, []
    with torch.no_grad(), probe.autocast():
        same = float(loss_fn(outputs.detach().reshape(labels.shape), labels))
    if math.isclose(same, probe.loss, rel_tol=1e-4):
        return text, []
    broadcast = list(torch.broadcast_shapes(outputs.shape, labels.shape))
    return text, [CheckFinding(
        "error", "shapes", "`loss_fn`",
        f"outputs of shape {list(outputs.shape)} and labels of shape {list(labels.shape)} are broadcast to "
        f"{broadcast}, so each output is compared with the labels of all samples",
        "Give both one shape: outputs.squeeze(-1) in the model, or labels of shape (samples, 1) in the dataset.",
    )]  # fmt: skip


def _check_rate(probe: _BatchProbe) -> Outcome:
    backend = probe.backend
    if backend.clips_in_update or needs_closure(backend.optimizer) or len(backend.built_optimizers) != 1:
        raise NotTried("the optimizer has steps of its own")
    clone, ratios = clone_optimizer(backend.optimizer), dict[str, float]()
    rates = sorted({float(group["lr"]) for group in clone.param_groups})
    with unchanged_weights(backend), probe.training():
        weights = {name: parameter.detach().clone() for name, parameter in probe.trainable()}
        moved = {name for name, gradient in probe.gradients.items() if gradient is not None and not _is_zero(gradient)}
        norm = torch.stack([_values(g).float().norm() for g in probe.gradients.values() if g is not None]).norm()
        limit = probe.trainer.settings.max_grad_norm
        factor = 1.0 if limit is None else min(1.0, limit / (float(norm) + 1e-6))
        for name, parameter in probe.trainable():
            gradient = probe.gradients[name]
            parameter.grad = None if gradient is None else gradient * factor
        clone.step()
        for name, parameter in probe.trainable():
            parameter.grad = None
            size = float(weights[name].float().norm())
            if parameter.ndim > 1 and size > 0 and name in moved:
                ratios[name] = float((parameter.detach() - weights[name]).float().norm()) / size
    if not ratios:
        raise NotTried("no matrix trains")
    name, median = max(ratios, key=lambda name: ratios[name]), sorted(ratios.values())[len(ratios) // 2]
    text = f"the first update at a rate of {rates[-1]:g} changes weights by {median:.1e} of their norm"
    remedy = "Healthy updates are about a thousandth of the weights."
    if median > 0.5:
        return text, [CheckFinding(
            "warning", "rate", f"`learning_rate`, {name!r}",
            f"at its peak of {rates[-1]:g} the first update changes weights by {median:.0%} of their norm",
            f"{remedy} Try a rate of {_round_rate(rates[-1] * 1e-2 / median):g}.",
        )]  # fmt: skip
    total = probe.trainer.total_steps
    if median < 1e-7 or (total is not None and median * total < 1e-3):
        move = "" if total is None else f", so in {total} steps by {min(median * total, 1):.1e} at most"
        severity: Severity = "warning" if median < 1e-7 else "note"
        return text, [CheckFinding(
            severity, "rate", "`learning_rate`",
            f"at its peak of {rates[-1]:g} the first update changes weights by {median:.1e} of their norm{move}",
            f"{remedy} Try a higher rate, or train longer.",
        )]  # fmt: skip
    return text, []


def _round_rate(rate: float) -> float:
    return float(f"{rate:.0e}") if rate > 0 else rate


def _check_time(probe: _BatchProbe) -> Outcome:
    """Compare the time of reading a batch with that of its passes."""
    loader, workers = probe.loop.sets.train, max(probe.trainer.settings.num_workers, 1)
    if not isinstance(loader, MapLoader) or loader.fetch is None:
        raise NotTried("batches cannot be read by their number")
    indices = [entry for _, entry in zip(range(3), loader.sampler.batches(0), strict=False)]
    data_times = list[float]()
    for entry in indices:
        began = time.perf_counter()
        loader.fetch(0, entry)
        data_times.append(time.perf_counter() - began)
    with probe.training():
        step_times = list[float]()
        for _ in range(2):
            began = time.perf_counter()
            gradients = probe.gradients_of(probe.run(probe.batch))
            next((_is_zero(gradient) for gradient in gradients.values()), None)  # waits for the device
            step_times.append(time.perf_counter() - began)
    read, passes = min(data_times) / workers, min(step_times) / probe.share
    text = f"{read * 1e3:.1f} ms to read a batch, {passes * 1e3:.1f} ms for its passes"
    if read <= passes or read < 5e-3:
        return text, []
    return text, [CheckFinding(
        "note", "time", "`num_workers`",
        f"reading a batch takes {read * 1e3:.0f} ms and its passes {passes * 1e3:.0f} ms: the model waits for data",
        f"Try num_workers={min(8, math.ceil(read * workers / max(passes, 1e-3)))}, or prepare the data once.",
    )]  # fmt: skip


# The checks that need no more than passes that all ranks make together.
_FORWARD_CHECKS = ("loss", "shapes", "mixing", "padding")
_SHARDED = "gradients of sharded weights need backward passes on all ranks; run check() on one process"
_CHECKS: dict[str, Callable[[_BatchProbe], Outcome]] = {
    "loss": _check_loss,
    "shapes": _check_shapes,
    "gradients": _check_gradients,
    "overfitting": _check_overfitting,
    "mixing": _check_mixing,
    "padding": _check_padding,
    "rate": _check_rate,
    "time": _check_time,
}
