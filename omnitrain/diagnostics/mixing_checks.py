"""Checks of samples that change the outputs of each other."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from omnitrain.compute.random_state import seed_everything
from omnitrain.core.errors import DataError
from omnitrain.data.collation import count_samples, map_entries, split_batch, tensors_in
from omnitrain.data.loaders import MapLoader
from omnitrain.diagnostics.findings import CheckFinding, NotTried, Outcome, Severity
from omnitrain.diagnostics.pass_probe import PassProbe, brief_error, module_title
from omnitrain.trainer.compilation import transformed


def check_mixing(probe: PassProbe) -> Outcome:
    """Change a sample of the batch, and look at the outputs of the others."""
    try:
        return _find_mixing(probe)
    except NotTried as reason:
        return f"not tried: {reason}", _norm_notes(probe)


def _norm_notes(probe: PassProbe) -> list[CheckFinding]:
    """Return what BatchNorm does, which is known without a trial."""
    norms = [
        _norm_note(name, module) for name, module in probe.model.named_modules()
        if isinstance(module, _BatchNorm) and module not in probe.evaluating
    ]  # fmt: skip
    return norms[:1]


def _norm_note(name: str, module: nn.Module) -> CheckFinding:
    return CheckFinding(
        "note", "mixing", module_title(name, module),
        "in training the samples of a batch see each other by its statistics",
        "The numbers depend on `batch_size`, accumulation and processes; GroupNorm or LayerNorm do not.",
    )  # fmt: skip


def _find_mixing(probe: PassProbe) -> Outcome:
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
        where = module_title(name, module)
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


def _run_rows(probe: PassProbe, batch: Any, is_training: bool) -> list[torch.Tensor] | None:
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
def _recording(probe: PassProbe) -> Iterator[dict[str, tuple[list[torch.Tensor], list[torch.Tensor]]]]:
    """Yield a dict that gets the inputs and outputs of each module inside, in the order in which they end."""
    records: dict[str, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    rows = count_samples(probe.batch)

    def rows_in(value: Any) -> list[torch.Tensor]:
        tensors = (tensor.detach() for tensor in tensors_in(value) if tensor.is_floating_point())
        return [tensor.clone() for tensor in tensors if tensor.ndim and tensor.shape[0] == rows]

    def record(name: str, module: nn.Module, inputs: Any, options: Any, output: Any) -> None:
        records.setdefault(name, (rows_in([*inputs, *options.values()]), rows_in(output)))

    with contextlib.ExitStack() as hooks:
        for name, module in probe.model.named_modules():
            hooks.enter_context(module.register_forward_hook(functools.partial(record, name), with_kwargs=True))
        yield records


def _mixes(plain: Any, other: Any, probe: PassProbe) -> bool:
    """Whether a module's outputs differ in rows in which its inputs do not."""
    if other is None or [len(part) for part in plain] != [len(part) for part in other]:
        return False
    return _other_rows_differ(plain[1], other[1], probe) and not _other_rows_differ(plain[0], other[0], probe)


def _rounding(probe: PassProbe) -> float:
    """Return the largest difference of equal outputs, relative to the largest of them."""
    is_exact = probe.trainer.precision.name == "fp32" and probe.trainer.device.type == "cpu"
    return 1e-5 if is_exact else 2e-2


def _other_rows_differ(first: Sequence[torch.Tensor], second: Sequence[torch.Tensor], probe: PassProbe) -> bool:
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
            return torch.cat([value[row : row + 1], value[1:]])
        is_column = isinstance(value, list) and len(value) == rows
        if is_column and not any(isinstance(entry, torch.Tensor) and entry.ndim for entry in value):
            return [value[row], *value[1:]]
        return map_entries(value, lambda entry: replace(entry, row))

    for row in range(1, rows):
        changed = replace(batch, row)
        if any(not torch.equal(a, b) for a, b in zip(tensors_in(batch), tensors_in(changed), strict=True)):
            return changed
    return None


# --- padding


def check_padding(probe: PassProbe) -> Outcome:
    """Compare the outputs of a short sample with those of the same sample next to a long one."""
    single = pair = cast("Any", None)
    where, other, lengthening, reason = "", 0, "", "another rank reads other samples"
    try:
        single, pair, where, other, lengthening = _read_pair(probe)
    except NotTried as error:
        reason = str(error)
    except Exception as error:
        reason = brief_error(error)
    if probe.agrees(pair is None):  # of random augmentation, each rank draws another
        raise NotTried(reason)
    (loss, outputs), (_, pair_outputs) = probe.evaluate(single), probe.evaluate(pair)
    gap = _output_gap(outputs, pair_outputs, _rounding(probe))
    change = f"change by {gap:.1%} of what tells two samples apart" if gap else "do not change"
    text = f"outputs {change} {lengthening}"
    if probe.agrees(gap > 1e-3):
        if gap <= 1e-3:
            return text, []
        severity: Severity = "warning" if gap > 1e-2 else "note"
        return text, [CheckFinding(
            severity, "padding", where,
            f"its outputs change by {gap:.1%} of their distance to those of sample {other} when it is padded "
            f"{lengthening}",
            "Give the model a mask of the padding (attention_mask), and use it in means, poolings and attention.",
        )]  # fmt: skip
    padded_loss, _ = probe.evaluate(split_batch(pair, 1)[0])
    limit = 1e-3 if probe.trainer.precision.name == "fp32" else 5e-2
    if abs(padded_loss - loss) > limit * abs(loss):  # NaN, of a sample without a target, is not above anything
        return text, [CheckFinding(
            "warning", "padding", where,
            f"its loss changes from {loss:.4g} to {padded_loss:.4g} when it is padded {lengthening}, though its "
            "outputs do not",
            "Label the padding -100 in the collator, and divide the loss by the targets that count.",
        )]  # fmt: skip
    return text, []


def _read_pair(probe: PassProbe) -> tuple[Any, Any, str, int, str]:
    """Return a batch of a short sample, one of it and a long one; the title of the one, the number of the other."""
    loader: Any = probe.loop.sets.train
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
    return single, pair, where, long, lengthening


def _output_gap(single: Any, pair: Any, rounding: float) -> float:
    """Return how far the outputs of a sample move, alone and padded as the first of a pair, compared with the pair's.

    An untrained head gives all samples almost the same outputs, which would hide a change relative to themselves.
    """
    single_rows, pair_rows = (
        next((tensor for tensor in tensors_in(output) if tensor.is_floating_point()), None) for output in (single, pair)
    )
    if single_rows is None or pair_rows is None or not single_rows.ndim == pair_rows.ndim > 0 or len(pair_rows) != 2:
        raise NotTried("the outputs have no row for each sample")
    a, b = single_rows[0].double(), pair_rows[0].double()
    candidates = _ends(a, b)
    if not candidates:
        raise NotTried("the outputs of a padded sample have another shape")
    gap = min(float((a - candidate).abs().max()) for candidate in candidates)
    if gap <= rounding * max(float(a.abs().max()), 1e-6):
        return 0.0
    return gap / max(float((b - pair_rows[1].double()).abs().max()), gap)


def _length(sample: Any) -> int:
    """Return the length of the longest sequence of a sample."""
    entries = sample.values() if isinstance(sample, Mapping) else sample if isinstance(sample, (tuple, list)) else []
    if isinstance(sample, list) and not any(hasattr(entry, "__len__") for entry in sample):
        return len(sample)
    return max(
        (len(entry) for entry in entries if isinstance(entry, (list, tuple)) or getattr(entry, "shape", ())), default=0
    )


def _is_padded_copy(single: Any, pair: Any) -> bool:
    """Whether the first row of a batch is that of a single sample, but for padding at one of its ends."""
    singles, pairs = list(tensors_in(single)), list(tensors_in(pair))
    if len(singles) > len(pairs) or not singles:
        return False
    if isinstance(single, Mapping) and isinstance(pair, Mapping):  # a mask is added where there is padding
        singles = [single[key] for key in single if key in pair and isinstance(single[key], torch.Tensor)]
        pairs = [pair[key] for key in single if key in pair and isinstance(single[key], torch.Tensor)]
    for a, b in zip(singles, pairs, strict=False):
        if not a.ndim or not b.ndim or len(a) != 1 or len(b) != 2:
            return False
        if not any(torch.equal(a[0], part) for part in _ends(a[0], b[0])):
            return False
    return True


def _ends(single: torch.Tensor, padded: torch.Tensor) -> list[torch.Tensor]:
    """Return what may be the rows of a sample in those of its padded copy; nothing if its shape is another one."""
    if single.shape == padded.shape:
        return [padded]
    if not single.ndim or single.shape[1:] != padded.shape[1:] or len(single) > len(padded):
        return []
    return [padded[: len(single)], padded[len(padded) - len(single) :]]
