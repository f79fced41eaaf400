"""Plans of a run before its first step: `trainer.plan()`."""

from __future__ import annotations

import contextlib
import copy
import datetime
import math
import os
import re
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_map_only

from omnitrain.arguments import samples_of_step
from omnitrain.compute.device_runtime import device_runtime
from omnitrain.core.display import ProofResult, Table, create_panels, draw_curve
from omnitrain.core.duration import Every, make_interval, parse_interval
from omnitrain.core.errors import ConfigError, check_number
from omnitrain.core.progress import Progress
from omnitrain.data.loaders import by_name
from omnitrain.data.sampling import Window
from omnitrain.diagnostics.rehearsal import clone_optimizer, unchanged_attributes, unchanged_run, unchanged_weights
from omnitrain.optim.build import ScheduleLR, follows_evaluations, needs_closure
from omnitrain.optim.schedules import RunPosition
from omnitrain.trainer.compilation import transformed
from omnitrain.trainer.loop import Loop
from omnitrain.trainer.out_of_memory import bytes_of, future_optimizer_bytes, size_of

# Points of the curve of rates, and columns of its picture.
_POINTS, _COLUMNS = 240, 60
_BARS = " ▁▂▃▄▅▆▇█"
_SIZES = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
# More steps than this of a schedule or an interval without a formula are not simulated.
_MAX_UPDATES = 50_000
# What a checkpoint has besides its tensors and the tokenizer: a header entry for each, and the JSON of the run.
_ENTRY_BYTES, _RECORD_BYTES = 110, 16_000


@dataclass(frozen=True, slots=True)
class RunPlan(ProofResult):
    """The plan of a run by `trainer.plan()`, which prints as a table; `plot()` draws learning rate and memory.

    What is unknown is None or absent.

    Attributes:
        length: "steps", "epochs", "samples" and "tokens" of the run, "steps_per_epoch" and "samples_per_step".
        rates: The learning rate at steps from the first to the last.
        memory: Bytes on each device: "weights", "gradients", "optimizer", "activations", their sum "total", "sharded"
            (the same, sharded by FSDP or ZeRO 3 over the ranks) and "capacity".
        disk: Bytes: "checkpoint", the "total" that is kept at most, and "free"; and how many are "kept".
        counts: How many "evaluations" and "saves" there are.
        seconds: "data", "passes" and "update" of a step, "evaluation", and the "total" without saves.
        end: When a run that starts now would end, as ISO 8601.
        warnings: What does not fit.
    """

    length: dict[str, Any]
    rates: list[tuple[float, float]]
    memory: dict[str, int]
    disk: dict[str, int]
    counts: dict[str, int]
    seconds: dict[str, float]
    end: str | None = None
    warnings: list[str] = field(default_factory=list)
    _ranks: int = field(default=1, repr=False)

    @property
    def ok(self) -> bool:
        """Whether everything fits, as far as that is known."""
        return not self.warnings

    def _table(self) -> Table:
        length, memory, disk, seconds = self.length, self.memory, self.disk, self.seconds
        lines: dict[str, str] = {}
        lengths = [f"{length[name]:,} {name}" for name in ("steps", "samples", "tokens") if length.get(name)]
        lengths.insert(1, f"{length['epochs']:g} epochs") if length.get("epochs") else None
        lines["length"] = (", ".join(lengths) or "unknown") + f"; {length['samples_per_step']:,} samples a step"
        if self.rates:
            top, last = max(rate for _, rate in self.rates), self.rates[-1]
            lines["rate"] = f"{self.rates[0][1]:.3g} at first, {top:.3g} at most, {last[1]:.3g} at the end"
            if top > min(rate for _, rate in self.rates):
                lines[""] = draw_rates(self.rates)
        parts = [f"{name} {size_of(memory[name])}" for name in _PARTS if name in memory]
        if "total" in memory:
            of = f" of {size_of(memory['capacity'])}" if "capacity" in memory else ""
            lines["memory"] = f"{size_of(memory['total'])}{of} on each device: {', '.join(parts)}"
            if "sharded" in memory:
                lines["sharded"] = f"{size_of(memory['sharded'])} with FSDP or ZeRO 3 over {self._ranks} ranks"
        lines["evaluations"] = str(self.counts["evaluations"]) if "evaluations" in self.counts else "unknown"
        if seconds.get("evaluation") and self.counts.get("evaluations"):
            lines["evaluations"] += f", {_duration(seconds['evaluation'])} each"
        if "checkpoint" in disk:
            free = f"; {size_of(disk['free'])} are free" if "free" in disk else ""
            count = str(self.counts.get("saves", "unknown"))
            if disk.get("kept", 0) > self.counts.get("saves", math.inf):
                count += " and new bests between them"
            total = f"; {disk['kept']} are kept, {size_of(disk['total'])} in all" if "kept" in disk else ""
            lines["saves"] = f"{count}, {size_of(disk['checkpoint'])} each{total}{free}"
        else:
            lines["saves"] = "none: there is no `save_dir`"
        if "passes" in seconds:
            step = sum(seconds[name] for name in ("data", "passes", "update"))
            text = f"{_duration(step)} a step (data {_duration(seconds['data'])})"
            lines["time"] = f"{_duration(seconds['total'])}, {text}; ends {self.end}" if self.end else text
        lines |= {"warning" + " " * number: text for number, text in enumerate(self.warnings)}
        return Table(["", ""], [], below=[f"{name:<12}{text}" for name, text in lines.items()])

    def _figure(self) -> Any:
        figure, (rates, memory) = create_panels("RunPlan", 2, has_one_axis=False)
        draw_curve(rates, self.rates, "learning rate", marker=None)
        rates.set(xlabel="step", ylabel="learning rate")
        rates.set_ylim(bottom=0)
        names = [name for name in reversed(_PARTS) if name in self.memory]
        bars = memory.barh(names, [self.memory[name] for name in names])
        memory.bar_label(bars, [size_of(self.memory[name]) for name in names], padding=3, fontsize="small")
        memory.set_xlabel("bytes on each device")
        memory.margins(x=0.15)
        return figure


_PARTS = ("weights", "gradients", "optimizer", "activations")


def draw_rates(rates: list[tuple[float, float]], columns: int = _COLUMNS) -> str:
    """Return a curve as a line of text, from 0 to its largest value.

    >>> draw_rates([(0, 0.0), (1, 0.5), (2, 1.0), (3, 0.25)], columns=4)
    ' ▄█▂'
    """
    top = max(rate for _, rate in rates) or 1.0
    chosen = [rates[round(number * (len(rates) - 1) / max(columns - 1, 1))][1] for number in range(columns)]
    return "".join(_BARS[round(rate / top * (len(_BARS) - 1))] for rate in chosen)


def _duration(seconds: float) -> str:
    """Return a time as text.

    >>> _duration(0.0123), _duration(12.3), _duration(3 * 3600 + 125)
    ('12.3 ms', '12.3 s', '3 h 2 min')
    """
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 100:
        return f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    days, hours = divmod(minutes // 60, 24)
    parts = [(days, "d"), (hours, "h"), (minutes % 60 if not days else 0, "min")]
    return " ".join(f"{count} {unit}" for count, unit in parts if count)


def parse_memory(device: str) -> int:
    """Return the bytes of memory of a device that is described by them.

    Raises:
        ConfigError: If it is no size.

    >>> parse_memory("80GB"), parse_memory("24 GiB")
    (80000000000, 25769803776)
    """
    match = re.fullmatch(r"([\d.]+)\s*([KMGT]?)(i?)B", device.strip()) if isinstance(device, str) else None
    if match is None:
        raise ConfigError(
            f"`device` of `plan()` is the memory of a device that is not here, such as '80GB', got {device!r}."
        )
    base = _SIZES[match[2]]
    return round(float(match[1]) * (1024 ** round(math.log(base, 1000)) if match[3] else base))


def plan_run(loop: Loop, device: str | None, ranks: int | None) -> RunPlan:
    """Return the plan of a run that has not begun; called on all ranks.

    Args:
        loop: The loop of the run.
        device: The memory of each device of another machine, for which nothing is computed; None measures here.
        ranks: The processes of the run; None is as many as there are now.
    """
    capacity = None if device is None else parse_memory(device)
    if ranks is not None:
        check_number("ranks", ranks, least=1, is_whole=True)
    measured = _Measured(loop, is_real=device is None)
    with unchanged_run(loop):
        measured.measure()
    gathered = loop.ranks.gather("what a step takes", (measured.memory, measured.seconds, measured.checkpoint))
    measured.memory, measured.seconds, measured.checkpoint = (
        {name: max(of_rank[name] for of_rank in of_ranks) for name in of_ranks[0]}
        for of_ranks in zip(*gathered, strict=True)
    )
    size = loop.ranks.world_size if ranks is None else ranks
    return _assemble(loop, measured, size, capacity)


class _Measured:
    """What two steps without effect take, and what they count."""

    def __init__(self, loop: Loop, is_real: bool) -> None:
        self.loop = loop
        self.is_real = is_real
        self.seconds: dict[str, float] = {}
        self.memory: dict[str, int] = {}
        self.samples = self.tokens = 0
        """Of a step over all ranks."""
        self.checkpoint: dict[str, int] = {}
        """Bytes of a checkpoint, and of one "reduced" to its weights."""

    def measure(self) -> None:
        loop, backend = self.loop, self.loop.trainer.backend
        model, anywhere = backend.model, backend.device
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.memory["weights"] = bytes_of([*model.parameters(), *model.buffers()], anywhere)
        self.memory["gradients"] = bytes_of(trained, anywhere)
        if not loop.has_custom_epoch:
            self._run_steps()
        self._update()
        if loop.checkpointer.store is not None:
            mode = loop.settings.save_only_model
            self.checkpoint = {"checkpoint": self._checkpoint_bytes(only_model=mode is True)}
            if mode == "all_but_last":
                self.checkpoint["reduced"] = self._checkpoint_bytes(only_model=True)
        if loop.lifecycle.evaluates and self.is_real and not loop.has_custom_epoch:
            self._evaluate()

    def _run_steps(self) -> None:
        """Run two steps without an update, or one micro-batch of fake tensors."""
        loop = self.loop
        lifecycle, loader = loop.lifecycle, loop.sets.train
        windows = loop.feed.windows(loader, 0, lifecycle.progress)
        window, read = None, 0.0
        for number in range(2):
            began = time.perf_counter()
            if (following := next(windows, None)) is not None:  # an epoch of one step is measured by it
                window, read = following, time.perf_counter() - began
            if window is None:
                break
            self.samples, self.tokens = max(self.samples, window.samples), max(self.tokens, window.tokens)
            if not self.is_real:
                with contextlib.suppress(Exception):  # a pass that depends on values is run below
                    self.memory["activations"] = self._fake_activations(window)
                    break
            with _counting_saved(loop.trainer.backend) as count:
                began = time.perf_counter()
                loop.step.dry_run(window if number else _first_micro_batch(window))
                self._synchronize()
            self.memory["activations"] = max(self.memory.get("activations", 0), count["largest"])
            if not self.is_real:
                break
            self.seconds |= {"data": read, "passes": time.perf_counter() - began}
            lifecycle.progress.advance(window.samples, window.tokens, batches=window.micro_batches)
        del windows  # the generator ends
        loader.close()

    def _synchronize(self) -> None:
        device = self.loop.trainer.device
        if device_runtime(device).has_streams:
            torch.accelerator.synchronize(device)

    def _fake_activations(self, window: Window) -> int:
        """Return the bytes that the passes of a micro-batch keep, without computing them."""
        trainer = self.loop.trainer

        class Forward(nn.Module):
            def __init__(self, model: nn.Module) -> None:
                super().__init__()
                self.model = model

            def forward(self, batch: Any) -> Any:
                with trainer._autocast():
                    return trainer._forward(self.model, batch).loss

        batch, model = transformed(self.loop, window.batches[0], prepares=True), Forward(trainer.backend.model)
        with (
            unchanged_attributes(model.modules()),
            FakeTensorMode(allow_non_fake_inputs=True) as mode,
            _counting_saved(trainer.backend) as count,
        ):
            model.train()
            tensors = (*model.named_parameters(), *model.named_buffers())
            state: dict[str, torch.Tensor] = {name: mode.from_tensor(tensor) for name, tensor in tensors}
            count["excluded"].update(map(_key_of, state.values()))
            batch = tree_map_only(torch.Tensor, mode.from_tensor, batch)
            torch.func.functional_call(model, state, (batch,))
        return count["largest"]

    def _update(self) -> None:
        """Measure an update of a copy of the optimizer with gradients of 0."""
        backend = self.loop.trainer.backend
        estimate = sum(
            future_optimizer_bytes(group, bytes_of(group["params"], backend.device)) for group in backend.groups
        )
        self.memory["optimizer"] = estimate
        if not self.is_real or backend.clips_in_update or needs_closure(backend.optimizer):
            return
        with unchanged_weights(backend):
            state_bytes, seconds = 0, 0.0
            for optimizer in backend.optimizers.values() or [backend.optimizer]:
                clone = clone_optimizer(optimizer)
                parameters = [parameter for group in clone.param_groups for parameter in group["params"]]
                for parameter in parameters:
                    parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
                began = time.perf_counter()
                clone.step()
                self._synchronize()
                seconds += time.perf_counter() - began
                clone.zero_grad()  # those of the user are restored when the plan is made
                state = [value for entries in clone.state.values() for value in entries.values()]
                state_bytes += bytes_of(state, None)
            self.memory["optimizer"], self.seconds["update"] = state_bytes, seconds

    def _checkpoint_bytes(self, only_model: bool) -> int:
        loop = self.loop
        size, count = loop.checkpointer.tensor_bytes(only_model)
        if not only_model:
            shards = loop.ranks.world_size if loop.trainer.backend.forward_is_collective else 1
            size += self.memory.get("optimizer", 0) * shards
            count += 3 * len(loop.trainer.backend.parameters)
        with tempfile.TemporaryDirectory(prefix="omnitrain-") as folder:
            if loop.settings.processing_class is not None:
                loop.settings.processing_class.save_pretrained(folder)
            size += sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
        return size + count * _ENTRY_BYTES + _RECORD_BYTES

    def _evaluate(self) -> None:
        loop, total = self.loop, 0.0
        for loader in by_name(loop.sets.eval).values():
            loop.evaluation.rehearse_batches(loader)  # the first pass is slower
            began = time.perf_counter()
            count = len(loop.evaluation.rehearse_batches(loader))
            took = time.perf_counter() - began
            try:
                total += took / max(count, 1) * len(loader)
            except TypeError:  # a stream
                return
        self.seconds["evaluation"] = total


def _first_micro_batch(window: Window) -> Window:
    origins = None if window.origins is None else window.origins[:1]
    return replace(window, batches=window.batches[:1], weights=window.weights[:1], origins=origins)


def _key_of(tensor: torch.Tensor) -> Any:
    return StorageWeakRef(tensor.untyped_storage())


@contextlib.contextmanager
def _counting_saved(backend: Any) -> Iterator[dict[str, Any]]:
    """Count the bytes of tensors that are kept for backward passes: "largest" is the most of one micro-batch.

    On a GPU it is at least what PyTorch counts as its peak.
    """
    count: dict[str, Any] = {"largest": 0, "excluded": set()}
    storages: dict[Any, int] = {}
    for tensor in (*backend.model.parameters(), *backend.model.buffers()):
        with contextlib.suppress(RuntimeError, NotImplementedError):
            count["excluded"].add(_key_of(tensor))

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        with contextlib.suppress(RuntimeError, NotImplementedError, AttributeError):
            key = _key_of(tensor)
            if key not in count["excluded"]:
                storages[key] = tensor.untyped_storage().nbytes()
                count["largest"] = max(count["largest"], sum(storages.values()))
        return tensor

    def unpack(tensor: torch.Tensor) -> torch.Tensor:
        if storages:  # a backward pass has begun: what follows is the next micro-batch
            storages.clear()
        return tensor

    runtime, before = device_runtime(backend.device), 0
    if runtime.has_memory_stats:
        runtime.read_peaks()
        before = torch.accelerator.memory_allocated(backend.device)
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield count
    if runtime.has_memory_stats:
        count["largest"] = max(count["largest"], runtime.read_peaks()[0] - before)


# --- putting it together


def _assemble(loop: Loop, measured: _Measured, ranks: int, capacity: int | None) -> RunPlan:
    trainer: Any = loop.trainer
    settings, store = loop.settings, loop.checkpointer.store
    scale = ranks / loop.ranks.world_size
    fixed = isinstance(settings.global_batch_size, int)
    local = measured.samples or samples_of_step(settings, loop.ranks.data.size) or 1
    samples = max(round(local * (1 if fixed else scale)), 1)
    tokens = round(measured.tokens * (1 if fixed else scale))
    seconds = dict(measured.seconds)
    if fixed:
        seconds |= {name: seconds[name] / scale for name in ("data", "passes") if name in seconds}
    epoch_size = None if loop.sets.train is None else loop.sets.train.size
    steps_per_epoch = trainer.steps_per_epoch
    if steps_per_epoch is not None and scale != 1 and epoch_size:
        steps_per_epoch = -(-epoch_size // samples)
    step_seconds = None
    if "passes" in seconds:
        step_seconds = seconds["data"] + seconds["passes"] + seconds.setdefault("update", 0.0)
    pace = {"ba": 1.0, "sp": float(samples), "tok": float(tokens), "s": step_seconds,
            "ep": 1 / steps_per_epoch if steps_per_epoch else samples / epoch_size if epoch_size else None}  # fmt: skip
    totals = [
        math.ceil(float(limit.exact) / unit - 1e-9) for limit in trainer.limits.durations if (unit := pace[limit.unit])
    ]
    total = trainer.limits.total_steps(steps_per_epoch, epoch_size) or min(totals, default=None)

    def position(steps: int) -> Progress:
        """Return the progress of the run after so many steps."""
        seconds_so_far = steps * (step_seconds or 0.0)
        progress = Progress(step=steps, tokens=steps * tokens, seconds=seconds_so_far, epoch_size=epoch_size)
        progress.samples = steps * samples
        if steps_per_epoch and epoch_size:
            progress.epoch, rest = divmod(steps, steps_per_epoch)
            progress.samples_in_epoch = min(rest * samples, epoch_size)
            progress.samples = progress.epoch * epoch_size + progress.samples_in_epoch
        elif epoch_size:
            progress.epoch, progress.samples_in_epoch = divmod(progress.samples, epoch_size)
        return progress

    end = None if total is None else position(total)
    length = {
        "steps": total, "epochs": round(end.epochs, 4) if end and epoch_size else None,
        "samples": end.samples if end else None, "tokens": (end.tokens or None) if end else None,
        "steps_per_epoch": steps_per_epoch, "samples_per_step": samples,
    }  # fmt: skip
    counts: dict[str, int] = {}
    if end is not None and total is not None:
        intervals = {"evaluations": settings.eval_steps} if loop.lifecycle.evaluates else {}
        intervals |= {"saves": settings.save_steps} if store is not None else {}
        numbers: dict[str, int | None] = {"evaluations": 0, "saves": 0}
        numbers |= {name: _count(every, trainer.limits, position, total) for name, every in intervals.items()}
        counts = {name: number for name, number in numbers.items() if number is not None}
        if "evaluations" in counts and loop.lifecycle.evaluates:
            counts["evaluations"] += settings.eval_on_start
    memory = _memory(loop, measured.memory, ranks, capacity)
    disk = _disk(loop, measured.checkpoint, counts, total)
    finish = None
    if step_seconds is not None and total is not None:
        seconds["total"] = total * step_seconds + counts.get("evaluations", 0) * seconds.get("evaluation", 0.0)
        date = datetime.datetime.now().astimezone() + datetime.timedelta(seconds=min(seconds["total"], 1e9))
        finish = date.isoformat(sep=" ", timespec="minutes")
    rates = [] if total is None else rate_curve(loop, total, position, steps_per_epoch)
    return RunPlan(length, rates, memory, disk, counts, seconds, finish, _warnings(loop, memory, disk), ranks)


def _count(every: Any, limits: Any, position: Callable[[int], Progress], total: int) -> int | None:
    """Return how often something at an interval happens, which it does at the end too; None if that is unknown."""
    rules = parse_interval("1ep" if every is None else every, "every")
    interval = make_interval(rules, limits)
    if isinstance(interval, Every):
        interval.restart(position(total))
        count = interval.count
        interval.restart(position(max(total - 1, 0)))
        return count + (interval.count == count)
    if total > _MAX_UPDATES or any(rule.is_function for rule in rules):
        return None
    due = [interval.due(position(step)) for step in range(1, total + 1)]
    return sum(due[:-1]) + 1


def rate_curve(
    loop: Loop, total: int, position: Callable[[int], Progress], steps_per_epoch: int | None
) -> list[tuple[float, float]]:
    """Return points (step, learning rate of the first group) of a run, before each of its steps."""
    trainer = loop.trainer
    scheduler, optimizer = trainer.lr_scheduler, trainer.backend.optimizer
    optimizer = getattr(optimizer, "optimizer", optimizer)
    places = sorted({round(number * max(total - 1, 0) / (_POINTS - 1)) for number in range(_POINTS)})
    rate = float(optimizer.param_groups[0]["lr"])
    if scheduler is None or follows_evaluations(scheduler):
        return [(place, rate) for place in places]
    by_epoch = trainer.scheduler_interval == "epoch"
    turns = [place // (steps_per_epoch or 1) if by_epoch else place for place in places]
    if isinstance(scheduler, ScheduleLR):
        base, points = float(scheduler.base_lrs[0]), list[tuple[float, float]]()
        for place, turn in zip(places, turns, strict=True):
            progress = position(place) if scheduler.follows else None
            run_position = RunPosition(scheduler.run_length, turn, progress)
            points.append((place, base * scheduler.schedule.factor(run_position, base)))
        return points
    return _simulated(scheduler, optimizer, places, turns)


def _simulated(scheduler: Any, optimizer: Any, places: list[int], turns: list[int]) -> list[tuple[float, float]]:
    """Return the rates of a copy of a schedule that is stepped."""
    stand_in = torch.optim.SGD([torch.zeros(1)], 0.1)
    stand_in.param_groups = [{**group, "params": [torch.zeros(1)]} for group in optimizer.param_groups]
    points = list[tuple[float, float]]()
    try:
        clone = copy.deepcopy(scheduler, {id(optimizer): stand_in})
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            turn = 0
            for place, target in zip(places, turns, strict=True):
                while turn < min(target, _MAX_UPDATES):
                    clone.step()
                    turn += 1
                if target > _MAX_UPDATES:
                    break
                points.append((place, float(stand_in.param_groups[0]["lr"])))
    except Exception:  # of a schedule that cannot be copied, or ends early
        return points
    return points


def _memory(loop: Loop, measured: Mapping[str, int], ranks: int, capacity: int | None) -> dict[str, int]:
    memory = {name: measured[name] for name in _PARTS if name in measured}
    memory["total"] = sum(memory.values())
    backend = loop.trainer.backend
    if ranks > 1 and not backend.forward_is_collective:
        states = sum(memory.get(name, 0) for name in ("weights", "gradients", "optimizer"))
        memory["sharded"] = memory["total"] - states + -(-states // ranks)
    if capacity is None:
        capacity = _capacity(backend.device)
    return memory if capacity is None else {**memory, "capacity": capacity}


def _capacity(device: torch.device) -> int | None:
    if (total := device_runtime(device).total_memory) is not None:
        return total
    if device.type == "cpu" and hasattr(os, "sysconf"):
        with contextlib.suppress(ValueError, OSError):
            return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return None


def _disk(loop: Loop, size: Mapping[str, int], counts: Mapping[str, int], total: int | None) -> dict[str, int]:
    if not size:
        return {}
    settings, disk = loop.settings, {"checkpoint": size["checkpoint"]}
    if "saves" in counts:
        saves, bests = counts["saves"], max(settings.keep_best, 1) if loop.lifecycle.evaluates else 0
        if loop.lifecycle.evaluates and settings.eval_steps != settings.save_steps:
            saves += min(settings.keep_best, counts.get("evaluations", 1))  # of the bests that no other save has
        count = saves if settings.save_total_limit is None else min(saves, settings.save_total_limit + bests)
        if settings.save_total_limit is not None and settings.keep_every and total is not None:
            count = min(saves, count + total // settings.keep_every)
        disk["kept"] = count
        # an old one is deleted or reduced only when the new one is complete
        most = count + (count < saves)
        full = min(most, 2) if "reduced" in size else most
        disk["total"] = full * size["checkpoint"] + (most - full) * size.get("reduced", 0)
    folder = getattr(loop.trainer, "save_dir", None)
    if isinstance(folder, Path):
        existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        disk["free"] = shutil.disk_usage(existing).free
    return disk


def _warnings(loop: Loop, memory: Mapping[str, int], disk: Mapping[str, int]) -> list[str]:
    shortages, folder = list[str](), getattr(loop.trainer, "save_dir", None)
    capacity = memory.get("capacity")
    if capacity is not None and memory["total"] > capacity:
        remedy = "Make `batch_size` smaller, or set microbatch_size='auto' or gradient_checkpointing=True."
        if memory.get("sharded", capacity) < capacity:
            remedy = f"FSDP or ZeRO 3 over the ranks need {size_of(memory['sharded'])} on each."
        shortages.append(f"A step needs {size_of(memory['total'])}, and a device has {size_of(capacity)}. {remedy}")
    needed = disk.get("total", disk.get("checkpoint", 0))
    if "free" in disk and needed > disk["free"]:
        shortages.append(
            f"Checkpoints need {size_of(needed)}, and {str(folder)!r} has {size_of(disk['free'])} free. Keep fewer by "
            "`save_total_limit`, or choose another `save_dir`."
        )
    return shortages
