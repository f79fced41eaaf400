"""Every backend takes the native trainer's steps: losses, rates, norms, weights, random numbers."""

from __future__ import annotations

import contextlib
import itertools
import tempfile
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from backends import (
    BACKENDS,
    DTYPES,
    MAIN,
    PROCESSES,
    RECIPE,
    Job,
    asked_for,
    bound,
    dtype_of,
    gap,
    launch_all,
    make_trainer,
    masked_sentences,
    named,
    parity,
    parity_jobs,
    tensors_of,
)
from marks import thinned
from recipes import Tagger, Trace, rows, t16
from torch import nn
from transformers import TrainingArguments

from omnitrain import Callback, HFTrainer
from omnitrain.core.errors import NonFiniteError
from omnitrain.data.sampling import EpochSampler

OTHERS = BACKENDS[1:]
SPREAD = tuple(one for one in BACKENDS if PROCESSES[one] > 1)
POISONED = {"first batch, second process": 10, "last batch, second process": 14, "first batch, first process": 8}
"""Where in the second step, of 2 batches of 2 samples on each of two processes, a sample gives NaN."""

HERE = "test_same_numbers"

# --- what runs on every process


def poison(backend: str, dtype: str, place: str, policy: str, finite_gradient: bool) -> dict[str, Any]:
    """Train on 24 rows of which one makes the loss NaN, and with it the gradient or not."""
    data = rows(24, DTYPES[dtype])
    data.tensors[1][int(EpochSampler(24, 8).order(0)[POISONED[place]])] = 1e3

    def loss_fn(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        is_bad = labels > 100
        loss = F.mse_loss(outputs, torch.where(is_bad, 0.0, labels))
        if not is_bad.any():
            return loss
        return loss + torch.tensor(float("nan")) if finite_gradient else loss * float("nan")

    trace = Trace()
    options = {**RECIPE, "epochs": 1, "batch_size": 2, "global_batch_size": 8, "on_nonfinite": policy}
    trainer = make_trainer(backend, t16(dtype=DTYPES[dtype]), data, loss_fn=loss_fn, callbacks=[trace], **options)
    message = ""
    try:
        trainer.train()
    except NonFiniteError as error:
        message = str(error)
    return {
        "raised": message.replace("rank 1", "rank 0"),
        "steps": [trainer.progress.step, trainer.progress.skipped_steps],
        "losses": [row["loss"] for row in trace.logs],
        "history": trainer.metrics["train_metrics_history"],
        "weights": [tensor.tolist() for tensor in tensors_of(trainer).values()],
    }


class Logits(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.tagger = Tagger(dtype=dtype)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.tagger.out(self.tagger.embed(ids))


class SumOfTokens:
    """A unit that returns (sum of losses, number of targets), of which a batch may have none."""

    trainer: Any

    def __call__(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        kept = batch["labels"] != -100
        logits = self.trainer.model(batch["ids"])
        return F.cross_entropy(logits[kept], batch["labels"][kept], reduction="sum"), kept.sum()


def count_targets(backend: str, dtype: str, reduction: str) -> dict[str, Any]:
    unit, trace = SumOfTokens(), Trace()
    trainer = make_trainer(
        backend, Logits(DTYPES[dtype]), masked_sentences(29), unit=unit, callbacks=[trace], grad_reduction=reduction,
        batch_size=1, global_batch_size=16, **{**RECIPE, "epochs": 2},
    )  # fmt: skip
    unit.trainer = trainer
    trainer.train()
    return {
        "logs": [[row["loss"], row["grad_norm"]] for row in trace.logs],
        "weights": [tensor.tolist() for tensor in tensors_of(trainer).values()],
    }


class Reductions(Callback):
    """Counts the exchanges of gradients in each step, and how often the schedule is stepped."""

    def __init__(self) -> None:
        self.count = 0
        self.seen: list[list[int]] = []

    def on_step_start(self, trainer: Any) -> None:
        self.count, self.before = 0, trainer.lr_scheduler._step_count

    def on_step_end(self, trainer: Any) -> None:
        self.seen.append([self.count, trainer.lr_scheduler._step_count - self.before])


@contextlib.contextmanager
def counted(counter: Reductions) -> Iterator[None]:
    """Count the calls by which FSDP and DeepSpeed reduce gradients; of single numbers they reduce others too."""
    names = ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_single")
    originals = {name: getattr(dist, name) for name in names if hasattr(dist, name)}
    depth = 0

    def counting(call: Any) -> Any:
        def counted_call(*args: Any, **options: Any) -> Any:
            nonlocal depth
            sizes = [one.numel() for one in (*args, *options.values()) if isinstance(one, torch.Tensor)]
            counter.count += depth == 0 and max(sizes, default=0) > 40
            depth += 1
            try:
                return call(*args, **options)
            finally:
                depth -= 1

        return counted_call

    with pytest.MonkeyPatch.context() as patch:
        for name, call in originals.items():
            patch.setattr(dist, name, counting(call))
        yield


def count_reductions(backend: str, is_eager: bool = False) -> dict[str, Any]:
    """Count the reductions in 6 windows of 4 micro-batches and one shorter one.

    If it is eager, transformers' arguments or the `Accelerator` have gradients reduced after each micro-batch.
    """
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    counter, dtype = Reductions(), DTYPES[dtype_of(backend)]
    options: dict[str, Any] = {
        "callbacks": [counter], "loss_fn": F.mse_loss, "batch_size": 1, "gradient_accumulation_steps": 4, "epochs": 1,
        "lr_scheduler": "linear",
    }  # fmt: skip
    if is_eager and backend == "ddp":
        from accelerate import Accelerator
        from accelerate.utils import GradientAccumulationPlugin

        plugin = GradientAccumulationPlugin(num_steps=1, sync_each_batch=True)
        options["accelerator"] = Accelerator(cpu=True, gradient_accumulation_plugin=plugin)
        trainer: Any = make_trainer(backend, t16(dtype=dtype), rows(52, dtype), **options)
    elif is_eager:
        config = {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
        args = TrainingArguments(tempfile.mkdtemp(), accelerator_config=config, save_strategy="no", use_cpu=True)
        trainer = HFTrainer(t16(), args, rows(52), progress_bar=False, **options)
    else:
        trainer = make_trainer(backend, t16(dtype=dtype), rows(52, dtype), **options)
    if backend in ("ddp", "hf2"):

        def hook(state: Any, bucket: Any) -> Any:
            counter.count += 1
            return allreduce_hook(state, bucket)

        hook.__annotations__.clear()  # DDP compares them with classes, not with their names
        trainer.model_wrapped.register_comm_hook(None, hook)
        trainer.train()
    else:
        with counted(counter):
            trainer.train()
    return {"seen": counter.seen}


class Drops(nn.Module):
    """A linear layer behind a dropout whose masks are kept."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.linear = nn.Linear(4, 1)
        self.masks: list[list[float]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = F.dropout(torch.ones(32), 0.5, self.training)
        self.masks.append(mask.tolist())
        return self.linear(x) * mask.mean()


class Beginning(Callback):
    """Keeps the weights that training begins with."""

    def on_train_start(self, trainer: Any) -> None:
        self.weights = [tensor.tolist() for tensor in tensors_of(trainer).values()]


def draw(backend: str, seeds: list[int]) -> dict[str, Any]:
    """Train a model that each process has made from another seed."""
    beginning = Beginning()
    model = Drops(seeds[dist.get_rank() if dist.is_initialized() else 0])
    trainer = make_trainer(
        backend, model, rows(16, torch.float32), loss_fn=F.mse_loss, callbacks=[beginning], batch_size=2, epochs=1,
        learning_rate=0.05,
    )  # fmt: skip
    trainer.train()
    last = [tensor.tolist() for tensor in tensors_of(trainer).values()]
    return {"masks": model.masks, "first": beginning.weights, "last": last}


# --- what came of it


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[str, Any]:
    jobs: list[Job] = []
    tests = ("nan", "gradients", "dropout", "weights")
    asked = {test: asked_for(request, "backend", test=f"test_{test}") for test in tests}
    targets = asked_for(request, "backend", "reduction")
    steps = asked_for(request, "backend", "masked") | {(backend, True) for backend in asked["weights"]}

    def add(backends: Iterable[str], name: str, function: str, **options: Any) -> None:
        """Add a job for backends, and for the native trainer in their types of numbers."""
        runs = {(backend, dtype_of(other)) for other in backends for backend in (other, "native")}
        for backend, dtype in sorted(runs):
            jobs.append(Job(f"{backend}-{dtype}-{name}", backend, f"{HERE}:{function}", {"dtype": dtype, **options}))

    for masked in sorted({masked for _, masked in steps}):
        jobs += parity_jobs(sorted(backend for backend, how in steps if how == masked), masked)
    for place, policy, finite in poisoned("native"):
        options = {"place": place, "policy": policy, "finite_gradient": finite}
        backends = {one for one in asked["nan"] if (place, policy, finite) in poisoned(one)}
        add(backends, f"{place}-{policy}-{finite}", "poison", **options)
    for reduction in sorted({reduction for _, reduction in targets}):
        backends = {backend for backend, how in targets if how == reduction}
        add(backends, f"targets-{reduction}", "count_targets", reduction=reduction)
    for name in sorted(asked["gradients"]):
        backend, _, word = name.partition(" ")
        jobs.append(Job(f"{name}-reductions", backend, f"{HERE}:count_reductions", {"is_eager": bool(word)}))
    for backend in sorted({"native", "ddp"} | asked["dropout"]):
        jobs.append(Job(f"{backend}-draw", backend, f"{HERE}:draw", {"seeds": [1, 2]}))
    return launch_all(jobs, tmp_path_factory.mktemp("numbers"))


def poisoned(backend: str) -> list[tuple[str, str, bool]]:
    """Return the cases of a NaN: all places under DDP, one under the others."""
    last = "last batch, second process"
    places = POISONED if backend in ("native", "accelerate", "ddp") else [last]
    return [(place, policy, (place == last) == (policy == "skip")) for place in places for policy in ("raise", "skip")]


def assert_native(results: Any, backend: str, name: str) -> None:
    dtype = dtype_of(backend)
    reference, ranks = results[f"native-{dtype}-{name}"][0], results[f"{backend}-{dtype}-{name}"]
    for rank in ranks:
        assert "error" not in rank, rank
        assert gap(rank, reference) <= bound(backend), name


@pytest.mark.parametrize(
    ("backend", "masked"),
    thinned(
        itertools.product(OTHERS, [False, True]),
        [*((one, True) for one in MAIN[1:]), *((one, False) for one in ("ddp", "accelerate", "hf", "zero1"))],
    ),
)
def test_steps_match_one_process(results: Any, backend: str, masked: bool) -> None:
    dtype = dtype_of(backend)
    reference = results[f"native-{dtype}-{masked}"][0]
    found = parity(results[f"{backend}-{dtype}-{masked}"], reference)
    assert {name: value for name, value in found.items() if value > bound(backend)} == {}
    assert len(reference["logs"]) == 6 and reference["progress"]["skipped_steps"] == 0


def test_masked_sentences_leave_one_process_without_labels() -> None:
    """The data of the test above has all four kinds of pairs of batches."""
    labels = masked_sentences(29).labels
    order = EpochSampler(29, 16).order(0)
    pairs = [[bool((labels[int(i)] != -100).any()) for i in order[turn : turn + 2]] for turn in range(0, 28, 2)]
    assert {(True, False), (False, True), (False, False), (True, True)} == {tuple(pair) for pair in pairs}


@pytest.mark.parametrize("backend", thinned(OTHERS, ("ddp", "fsdp", "hf2")))
def test_nan_on_one_process_is_raised_or_skipped_on_all(results: Any, backend: str) -> None:
    for place, policy, finite in poisoned(backend):
        name = f"{place}-{policy}-{finite}"
        assert_native(results, backend, name)
        rank = results[f"{backend}-{dtype_of(backend)}-{name}"][-1]
        assert rank["steps"] == ([1, 0] if policy == "raise" else [2, 1]), name
        assert ("not finite at step 2" in rank["raised"]) == (policy == "raise"), name


@pytest.mark.parametrize(
    ("backend", "reduction"),
    thinned(
        itertools.product(OTHERS, ["mean", "sum"]), [("ddp", "mean"), ("ddp", "sum"), ("zero3", "mean"), ("hf2", "sum")]
    ),
)
def test_unit_targets_are_weighed_over_all_processes(results: Any, backend: str, reduction: str) -> None:
    assert_native(results, backend, f"targets-{reduction}")


@pytest.mark.parametrize(
    "backend",
    thinned(["ddp", "ddp eager", "fsdp", "zero1", "hf2", "hf2 eager"], ["ddp", "ddp eager", "fsdp", "hf2 eager"]),
)
def test_gradients_are_reduced_once_a_step(results: Any, backend: str) -> None:
    """And the schedule is stepped once."""
    expected = [[4, 1]] * 6 + [[2, 1]] if "eager" in backend else [[1, 1]] * 7
    for rank in results[f"{backend}-reductions"]:
        assert rank["seen"] == expected, rank


@pytest.mark.parametrize("backend", thinned(SPREAD, ("ddp", "fsdp")))
def test_dropout_differs_between_ranks_and_weights_do_not(results: Any, backend: str) -> None:
    first, second = results[f"{backend}-draw"]
    assert "error" not in first, first
    assert all(one != other for one, other in zip(first["masks"], second["masks"], strict=True))
    assert first["first"] == second["first"] == results["native-draw"][0]["first"]
    assert first["last"] == second["last"] != first["first"]
    if backend == "ddp":
        assert first["masks"][:4] == results["native-draw"][0]["masks"][:4]


@pytest.mark.parametrize("backend", thinned(SPREAD, MAIN[1:]))
def test_weights_are_bit_identical_on_both_ranks(results: Any, backend: str) -> None:
    first, second = results[f"{backend}-{dtype_of(backend)}-True"]
    assert gap(named(first, ""), named(second, "")) == 0
