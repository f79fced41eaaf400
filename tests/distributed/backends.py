"""Every backend by name, and jobs that run on them: many of them in one launch of two processes.

A job is a function `job(backend, **options)` of any module beside this one. It runs on every process, and what it
returns there (plain values, and tensors under "tensors") comes back as one dict per rank. Starting processes takes
longer than most jobs, so they go together.
"""

import importlib
import itertools
import json
import random
import tempfile
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import FullyShardedDataParallelPlugin
from compiled import compile_once
from forking import Case, Found, Outcome, case_folder, current_rank, joined, play, show_life
from recipes import Blank, Sentences, StopAt, Tagger, Trace, t16
from resuming import Numbered
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional as F
from transformers import TrainingArguments

from omnitrain import AccelerateTrainer, Algorithm, HFTrainer, Trainer
from omnitrain.checkpoint.safetensors_header import find_tensor_files
from omnitrain.checkpoint.tensor_files import TensorFile, gather_to_host

PROCESSES = {
    "native": 1, "accelerate": 1, "hf": 1, "ddp": 2, "fsdp": 2, "hf2": 2, "zero1": 2, "zero2": 2, "zero3": 2,
    "hf_fsdp": 2, "hf_zero2": 2, "hf_zero3": 2,
}  # fmt: skip
BACKENDS = tuple(PROCESSES)
MAIN = ("native", "ddp", "fsdp", "zero3", "hf2")
"""One of each kind; the others differ from one of them in less."""
LAUNCHES = (
    ("native", "accelerate", "hf"),
    ("ddp", "fsdp", "hf2"),
    ("zero1", "zero2", "zero3"),
    ("hf_fsdp", "hf_zero2", "hf_zero3"),
)
"""Which backends share a launch."""
DTYPES = {"float32": torch.float32, "float64": torch.float64}


def make_trainer(backend: str, model: nn.Module, *data: Any, **options: Any) -> Any:
    """Return a trainer of this backend; on two processes `batch_size` is that of each of them."""
    options = {"progress_bar": False, "log_steps": 1, **options}
    if "_" not in backend and "save_dir" not in options and (len(data) > 1 or "eval_dataset" in options):
        options.setdefault("load_best_at_end", False)  # what is compared are the last weights
    if backend == "native":
        return Trainer(model, *data, device="cpu", **options)
    if backend.startswith("hf"):
        has_eval = len(data) > 1 or "eval_dataset" in options
        return HFTrainer(model, sharding_arguments(backend, has_eval, options), *data, **options)
    if backend == "fsdp":
        options.setdefault("fsdp_plugin", FullyShardedDataParallelPlugin(fsdp_version=2))
    elif backend.startswith("zero"):
        options.setdefault("deepspeed_config", {"zero_optimization": {"stage": int(backend[-1])}})
    return AccelerateTrainer(model, *data, **options)


def sharding_arguments(backend: str, has_eval: bool, options: dict[str, Any]) -> Any:
    """Return transformers' arguments that cut the weights up, and else say what `options` say; None for no cutting."""
    if "_" not in backend:
        return None
    how: dict[str, Any] = {"fsdp": True, "fsdp_config": {"version": 2}}
    if "zero" in backend:
        how = {"deepspeed": {"zero_optimization": {"stage": int(backend[-1])}}}
    options.setdefault("optimizer", "torch.optim.AdamW")  # theirs has two groups
    folder = str(options.get("save_dir") or tempfile.mkdtemp())
    processes, micro = PROCESSES[backend], options.get("batch_size", 8)
    uneven = options.get("global_batch_size", 0) % (processes * micro)  # which their arguments have no word for
    accumulation = 1 if uneven else options.pop("global_batch_size", processes * micro) // (processes * micro)
    return TrainingArguments(
        folder, use_cpu=True, report_to="none", per_device_train_batch_size=micro,
        gradient_accumulation_steps=options.pop("gradient_accumulation_steps", accumulation),
        num_train_epochs=options.get("epochs", 3), max_steps=options.get("max_steps") or -1,
        learning_rate=options.get("learning_rate", 2e-5), max_grad_norm=options.get("max_grad_norm", 1.0),
        lr_scheduler_type=options.pop("lr_scheduler", None) or "constant", warmup_steps=options.pop("warmup_steps", 0),
        eval_strategy=("steps" if options.get("eval_steps") else "epoch") if has_eval else "no",
        eval_steps=options.pop("eval_steps", None),
        save_strategy=("steps" if "save_steps" in options else "epoch") if "save_dir" in options else "no",
        save_steps=options.pop("save_steps", 500),
        # transformers refuses it where nothing is saved, so there it is said in our words
        load_best_model_at_end="save_dir" in options and options.pop("load_best_at_end", False),
        logging_steps=options.pop("log_steps", 1), **how,
    )  # fmt: skip


def dtype_of(*backends: str) -> str:
    """Return the type in which these backends can be compared: DeepSpeed keeps its numbers in fp32."""
    return "float32" if any("zero" in backend for backend in backends) else "float64"


def bound(*backends: str) -> float:
    """Return how far from each other runs on these backends may be."""
    return 1e-5 if dtype_of(*backends) == "float32" else 1e-10


# --- launching


@dataclass(slots=True)
class Job:
    """A call of "module:function", with the backend and options, on every process of a launch; it has a unique name."""

    name: str
    backend: str
    function: str
    options: dict[str, Any] = field(default_factory=dict)


class Jobs(list[Job]):
    """Jobs that are launched together."""

    def add(self, name: str, backend: str, function: Callable[..., Any], /, **options: Any) -> None:
        module = Path(function.__code__.co_filename).stem
        self.append(Job(name, backend, f"{module}:{function.__name__}", options))


def launch_all(jobs: Iterable[Job], folder: Path) -> Found[list[dict[str, Any]]]:
    """Run jobs of any backends, in as few launches as there can be; return results by name and rank.

    An error that a job raises is its result: {"error": name of the class, "message": text}. A job that hangs, or ends
    one of its processes, has none: asking for it is an error. The jobs after it are run by other processes, and after
    the second such job not at all.
    """
    jobs, results = list(jobs), Found[list[dict[str, Any]]]()
    groups = [group for backends in LAUNCHES if (group := [job for job in jobs if job.backend in backends])]
    compile_once()
    for attempt in range(2):
        place = folder / f"{attempt}"
        cases = [
            Case(group[0].name, "backends:work", {"jobs": group}, False, PROCESSES[group[0].backend], environment={})
            for group in groups
        ]
        outcomes = play(cases, place, at_once=2)
        groups = [rest for group in groups if (rest := _take(results, group, place / group[0].name, outcomes))]
    for group in groups:
        reason = f"{group[0].name!r} and others were not run, as two jobs of their launch broke before"
        results.broken |= dict.fromkeys((job.name for job in group), reason)
    return results


def sound(results: Found[list[dict[str, Any]]]) -> Found[list[dict[str, Any]]]:
    """Return the same, with jobs that have raised an error among the broken ones."""
    for name, ranks in list(results.items()):
        errors = [f"{result['error']}: {result['message']}" for result in ranks if "error" in result]
        if errors:
            results.broken[name] = f"{name!r} has failed: {'; '.join(errors)}"
            del results[name]
    return results


def _take(
    results: Found[list[dict[str, Any]]], jobs: list[Job], folder: Path, outcomes: Found[list[Outcome]]
) -> list[Job]:
    """Read what a launch has left; return the jobs that are still to be run."""
    ranks = range(PROCESSES[jobs[0].backend])
    for number, job in enumerate(jobs):
        if not all((folder / f"{job.name}.{rank}.json").exists() for rank in ranks):
            ends = outcomes.get(jobs[0].name, [])
            how = ["hung" if end.code is None else f"ended with {end.code}" for end in ends] or ["was not run"]
            texts = "".join(f"\n--- rank {rank}\n{end.output[-3000:]}" for rank, end in enumerate(ends))
            results.broken[job.name] = f"The launch broke in {job.name!r}: it {', and '.join(how)}{texts}"
            return jobs[number + 1 :]
        results[job.name] = [json.loads((folder / f"{job.name}.{rank}.json").read_text()) for rank in ranks]
        for rank, result in enumerate(results[job.name]):
            if (path := folder / f"{job.name}.{rank}.safetensors").exists():
                result["tensors"] = load_file(path)
    return []


def work(jobs: Sequence[Job]) -> None:
    """Run jobs in a process of a launch, and write down the results."""
    rank, folder = current_rank(), case_folder()
    for job in jobs:
        show_life()
        print(f"{job.name} on {job.backend}", flush=True)
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(1000 + rank)  # as in a script that seeds nothing: no two processes are in the same state
        module, _, function = job.function.partition(":")
        try:
            result = getattr(importlib.import_module(module), function)(job.backend, **job.options)
        except Exception as error:
            traceback.print_exc()
            result = {"error": type(error).__name__, "message": str(error)}
        if "tensors" in result:
            copies = {name: tensor.clone() for name, tensor in result.pop("tensors").items()}
            save_file(copies, folder / f"{job.name}.{rank}.safetensors")
        path = folder / f"{job.name}.{rank}.part"
        path.write_text(json.dumps(result))
        path.rename(path.with_suffix(".json"))


# --- a training run, and all that is to be the same about it


class Net(nn.Module):
    """4 -> 16 -> 1 over such rows."""

    def __init__(self, dtype: torch.dtype, dropout: float) -> None:
        super().__init__()
        self.body = t16(dropout, dtype, seed=0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x[:, :4])


class Indices(Algorithm):
    """Writes down epoch, step and indices of every batch that this process has trained on."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int, list[int]]] = []

    def transform_batch(self, trainer: Any, batch: Any) -> Any:
        progress = trainer.progress
        self.seen.append((progress.epoch, progress.step, batch[0][:, -1].int().tolist()))
        return batch


def masked_sentences(size: int) -> Blank:
    """Sentences of which two in five have no label at all."""
    return Blank(size, [index for index in range(size) if index * 7 % 5 < 2])


RECIPE: dict[str, Any] = {"epochs": 3, "learning_rate": 0.05, "max_grad_norm": 0.5}
RECIPE |= {"lr_scheduler": "cosine", "warmup_steps": 2}
"""What every run here has: clipping, warm-up and a schedule, for which every step counts."""


def tags(backend: str, dtype: str, masked: bool = False, size: int = 29, **options: Any) -> dict[str, Any]:
    """Train on tokens, of which each counts the same; steps of 16 sentences and one of 13 an epoch.

    Every process makes its model from another seed.
    """
    data = masked_sentences(size) if masked else Sentences(size)
    options = {**RECIPE, "batch_size": 1 if masked else 2, "global_batch_size": 16, **options}
    model = Tagger(dtype=DTYPES[dtype], seed=current_rank())
    return _trained(make_trainer(backend, model, data, Sentences(7), callbacks=[Trace()], **options))


def regress(
    backend: str, dtype: str, dropout: float = 0.0, noisy: bool = False, cut: int = 0, resume: str = "", **options: Any
) -> dict[str, Any]:
    """Train on 25 numbered rows in steps of 8, 8, 8 and 1 an epoch, evaluated every 3 steps; stop after step `cut`."""
    number_type = DTYPES[dtype]
    data = Numbered(25, noisy, number_type), Numbered(7, False, number_type)
    defaults = {**RECIPE, "batch_size": 2, "global_batch_size": 8, "eval_steps": 3, "compute_metrics": "mae"}
    trainer = make_trainer(
        backend, Net(number_type, dropout), *data, loss_fn=F.mse_loss, algorithms=[Indices()],
        callbacks=[Trace(), *([StopAt(cut)] if cut else [])], **{**defaults, **options},
    )  # fmt: skip
    return _trained(trainer, resume or None)


def tensors_of(trainer: Any) -> dict[str, torch.Tensor]:
    """Return copies of the whole weights and buffers; all ranks call this."""
    return {name: gather_to_host(tensor).clone() for name, tensor in sorted(trainer.backend.model_tensors().items())}


def _trained(trainer: Any, resume: str | None = None) -> dict[str, Any]:
    trainer.train(resume_from=resume)
    trace = next(callback for callback in trainer.lifecycle.callbacks if isinstance(callback, Trace))
    speeds = ("samples_per_second", "tokens_per_second")
    tensors = {f"weights/{name}": tensor for name, tensor in tensors_of(trainer).items()}
    moments, _ = trainer.backend.optimizer_state()
    tensors |= {f"moments/{name}": gather_to_host(moment) for name, moment in sorted(moments.items())}
    return {
        "events": trace.events,
        "logs": [{key: value for key, value in row.items() if key not in speeds} for row in trace.logs],
        "rates": trace.learning_rates,
        "metrics": trainer.metrics.to_dict(),
        "indices": [batch for algorithm in trainer.algorithms for batch in algorithm.seen],
        "progress": {**trainer.progress.state_dict(), "seconds": 0},
        "saved": None if trainer.store is None else [path.name for path in trainer.store.checkpoints()],
        "tensors": tensors,
    }


# --- comparing


def indices_by_step(ranks: Sequence[dict[str, Any]]) -> dict[tuple[int, int], list[int]]:
    """Return the samples of each step of `regress` over all processes.

    A batch of one sample on the second process is a stand-in: 25 samples in turns of 4 leave one for the first.
    """
    samples: dict[tuple[int, int], list[int]] = {}
    for rank, result in enumerate(ranks):
        for epoch, step, indices in result["indices"]:
            samples.setdefault((epoch, step), []).extend(indices if rank == 0 or len(indices) > 1 else [])
    return {step: sorted(indices) for step, indices in samples.items()}


def gap(a: Any, b: Any) -> float:
    """Return the largest difference of any two numbers in two results, which else are equal; NaN equals NaN."""
    if isinstance(a, torch.Tensor):
        assert a.shape == b.shape, f"shapes {tuple(a.shape)} and {tuple(b.shape)}"
        return float((a.double() - b.double()).abs().max()) if a.numel() else 0.0
    if isinstance(a, dict):
        assert a.keys() == b.keys(), f"only in one: {sorted(set(a) ^ set(b))}"
        return max((gap(a[key], b[key]) for key in a), default=0.0)
    if isinstance(a, list):
        assert len(a) == len(b), f"{len(a)} and {len(b)} entries"
        return max((gap(item, other) for item, other in zip(a, b, strict=True)), default=0.0)
    if isinstance(a, float) and isinstance(b, float):
        return 0.0 if a == b or (a != a and b != b) else abs(a - b) if abs(a - b) >= 0 else float("inf")
    assert a == b, f"{a!r} and {b!r}"
    return 0.0


def named(result: dict[str, Any], prefix: str) -> dict[str, torch.Tensor]:
    """Return the tensors of a result whose names begin so."""
    return {name: tensor for name, tensor in result["tensors"].items() if name.startswith(prefix)}


def parity(ranks: Sequence[dict[str, Any]], reference: dict[str, Any]) -> dict[str, float]:
    """Return the largest differences of numbers between both ranks of a run and the one it should equal."""
    gaps: dict[str, float] = {}
    for result in (*ranks, reference):
        assert "error" not in result, f"{result['error']}: {result['message']}"
    for result in ranks:
        assert result["saved"] or result["events"] == reference["events"], "other events"
        assert result["progress"] == reference["progress"], "they end at other places"
        pairs = {"metrics": (result["metrics"], reference["metrics"])}
        for name in ("weights", "moments"):
            pairs[name] = (named(result, name), named(reference, name))
        logs, expected = result["logs"], reference["logs"][-len(result["logs"]) :]
        for name in ("loss", "learning_rate", "grad_norm"):
            pairs[name] = ([row[name] for row in logs], [row[name] for row in expected])
        gaps = {name: max(gap(*pair), gaps.get(name, 0.0)) for name, pair in pairs.items()}
    return gaps


# --- every backend's numbers, and every way from one to another


def parity_jobs(backends: Sequence[str], masked: bool) -> list[Job]:
    """Return a run of each backend, and those of the native one that they are compared with."""
    jobs = Jobs()
    for name, dtype in {(name, dtype_of(backend)) for backend in backends for name in (backend, "native")}:
        jobs.add(f"{name}-{dtype}-{masked}", name, tags, dtype=dtype, masked=masked)
    return jobs


def asked_for(request: Any, *names: str, test: str = "") -> set[Any]:
    """Return the arguments, or tuples of them, with which tests of the fixture's file are to be run.

    These are the tests with exactly the parameters `names`, whose names begin with `test`.
    """
    tests = [item for item in request.session.items if item.path == request.path and item.name.startswith(test)]
    asked = [item.callspec.params for item in tests if hasattr(item, "callspec")]
    chosen = [tuple(params[name] for name in names) for params in asked if {*params} == {*names}]
    return {params[0] if len(names) == 1 else params for params in chosen}


def resume(
    folder: Path, backends: Sequence[str], before: Iterable[Job] = (), after: Iterable[Job] = (),
    pairs: Iterable[tuple[str, str]] | None = None,
) -> Found[list[dict[str, Any]]]:  # fmt: skip
    """Save on backends in the middle of an epoch, and resume in pairs of them, by default from each on each.

    Jobs of `before` and `after` join the launches that save and resume. Returns by "<backend>-<dtype>" the runs that
    were cut short, by "straight-<dtype>" the native ones that were not, by "<backend>-<backend>" those that were
    resumed, and the other jobs by their names.
    """
    pairs = list(itertools.product(backends, backends) if pairs is None else pairs)
    first, second = Jobs(), Jobs()

    def add(jobs: Jobs, name: str, backend: str, dtype: str, **options: Any) -> None:
        options |= {"save_dir": str(folder / name), "save_steps": 5, "load_best_at_end": False, "keep_best": 0}
        jobs.add(name, backend, regress, dtype=dtype, **options)

    runs = {(source, dtype_of(source, target)) for source, target in [*pairs, *zip(backends, backends, strict=True)]}
    runs |= {("native", dtype) for _, dtype in runs}
    for source, dtype in sorted(runs):
        add(first, f"{source}-{dtype}", source, dtype, cut=5)
    for dtype in sorted({dtype for _, dtype in runs}):
        add(first, f"straight-{dtype}", "native", dtype)
    for source, target in pairs:
        dtype = dtype_of(source, target)
        checkpoint = str(folder / f"{source}-{dtype}" / "checkpoint-5")
        add(second, f"{source}-{target}", target, dtype, resume=checkpoint)
    return joined(launch_all([*first, *before], folder / "before"), launch_all([*second, *after], folder / "after"))


def compare_resumed(results: dict[str, list[dict[str, Any]]], source: str, target: str) -> dict[str, float]:
    """Return the largest differences of numbers between a run of `resume` and the straight native one."""
    dtype = dtype_of(source, target)
    cut, resumed, straight = results[f"{source}-{dtype}"], results[f"{source}-{target}"], results[f"straight-{dtype}"]
    for result in cut:
        assert "error" not in result, f"{result['error']}: {result['message']}"
    gaps = parity(resumed, straight[0])
    assert [row["step"] for row in resumed[0]["logs"]] == list(range(6, 13)), "other steps"
    assert indices_by_step(cut) | indices_by_step(resumed) == indices_by_step(straight), "other samples"
    return gaps


def saved(checkpoint: Path, file: str) -> dict[str, torch.Tensor]:
    """Return the tensors of a file of a checkpoint, which may be there in parts."""
    names = [path.relative_to(checkpoint).as_posix() for path in checkpoint.rglob("*.safetensors")]
    return dict(TensorFile(find_tensor_files(checkpoint, names, file)))
