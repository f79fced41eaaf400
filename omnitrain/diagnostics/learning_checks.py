"""Checks of loss, gradients and updates before a run."""

from __future__ import annotations

import contextlib
import math
import time
from typing import Any

import torch
from torch import nn

from omnitrain.core.errors import DataError, format_list
from omnitrain.data.collation import count_samples, tensors_in
from omnitrain.data.loaders import MapLoader
from omnitrain.diagnostics.findings import CheckFinding, NotTried, Outcome, Severity
from omnitrain.diagnostics.pass_probe import PassProbe, module_title, scores_and_labels
from omnitrain.diagnostics.rehearsal import clone_optimizer, unchanged_weights
from omnitrain.optim.build import needs_closure

_OVERFIT_RATES = (1e-3, 1e-2, 1e-4)
# A loss of one batch that falls by less than this share of itself does not learn.
_LEAST_FALL = 0.02


def check_loss(probe: PassProbe) -> Outcome:
    """Compare the loss at the start with that of guessing."""
    if not math.isfinite(probe.loss):
        finding = CheckFinding(
            "error", "loss", "the first batch", f"the loss is {probe.loss}",
            "Look for NaN or infinity in the data, a division by 0 or log(0) in the loss, or weights that overflow.",
        )  # fmt: skip
        return f"{probe.loss} at the start", [finding]
    assert probe.output is not None
    text, pair = f"{probe.loss:.4g} at the start", scores_and_labels(probe.output)
    if pair is None:
        return text, []
    scores, labels = pair
    classes, is_cross_entropy = scores.shape[-1], False
    chance = math.log(classes)
    for shift in range(min(labels.ndim, 2)):  # the labels as they are, and those one place later
        logits, targets = (scores[..., :-1, :], labels[..., 1:]) if shift else (scores, labels)
        counted = (targets >= 0) & (targets < classes) & (targets != probe.trainer.loss_mean.ignore_index)
        loss = nn.functional.cross_entropy(logits[counted], targets[counted])
        is_cross_entropy = is_cross_entropy or math.isclose(float(loss), probe.loss, rel_tol=0.02)
    if not is_cross_entropy:
        return text, []
    text += f"; by chance ln {classes} = {chance:.4g}"
    if probe.loss > 1.5 * chance + 0.5:
        return text, [CheckFinding(
            "warning", "loss", "the first batch",
            f"it is {probe.loss:.4g} at the start, and by chance ln {classes} = {chance:.4g}: the model is "
            "confident and wrong",
            "Normalize the inputs, begin the last layer with smaller weights, or compare the labels with the classes "
            "that a pretrained model knows.",
        )]  # fmt: skip
    return text, []


def check_shapes(probe: PassProbe) -> Outcome:
    """Look for outputs and labels that are broadcast."""
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


def check_gradients(probe: PassProbe) -> Outcome:
    """Look for parameters without a gradient, or with one that is not finite."""
    missing = [name for name, gradient in probe.gradients.items() if gradient is None]
    set_step_nr = getattr(probe.trainer.unit, "set_step_nr", None)
    if missing and set_step_nr is not None:  # a unit may train its parts in turns
        with probe.training():
            for number in (1, 2, 3):
                set_step_nr(number)
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


def check_overfitting(probe: PassProbe, steps: int = 30) -> Outcome:
    """Train on one batch with Adam; look at layers before and after it."""
    seconds = probe.seconds
    findings = list[CheckFinding]()
    if not any(gradient is not None for gradient in probe.gradients.values()):
        raise NotTried("nothing has a gradient")
    begin, best, taken_steps, rate_used = time.perf_counter(), math.inf, 0, 0.0
    start, zero = probe.loss, {name for name, gradient in probe.gradients.items() if _is_zero(gradient)}
    silent: dict[str, str] = {}
    for rate in _OVERFIT_RATES:
        with probe.training(), unchanged_weights(probe.backend):
            optimizer = torch.optim.Adam(dict(probe.trainable()).values(), rate)
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
                optimizer.zero_grad()
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
        findings.append(CheckFinding("warning", "layers", module_title(name, module), f"it {what}", remedy))
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


def check_rate(probe: PassProbe) -> Outcome:
    """Compare the first update, at the peak of the learning rate, with the weights."""
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
            f"{remedy} Try a rate of {rates[-1] * 1e-2 / median:.1g}.",
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


def check_time(probe: PassProbe) -> Outcome:
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
