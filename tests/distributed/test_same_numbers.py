"""Every backend takes the native trainer's steps: losses, norms, weights; also if it recomputes or compiles."""

import tempfile
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import backends as on
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin
from backends import BACKENDS, DTYPES, MAIN, RECIPE, Jobs, asked_for, bound, dtype_of, gap, make_trainer, tensors_of
from marks import thinned
from recipes import Blank, Graphs, Overflowing, Tagger, Trace, fit, rows, t16
from torch import nn
from transformers import TrainingArguments

from omnitrain import AccelerateTrainer, Callback, GradualUnfreezing, HFTrainer, SpikeGuard
from omnitrain.core.errors import NonFiniteError
from omnitrain.data.sampling import EpochSampler

SPREAD = tuple(backend for backend in BACKENDS if on.PROCESSES[backend] > 1)
STEPS = [*((backend, True) for backend in MAIN[1:]),
         *((backend, False) for backend in ("ddp", "accelerate", "hf", "zero1", "fsdp")),
         *((backend, True) for backend in SPREAD if backend not in MAIN)]  # fmt: skip
"""Backend, and whether two sentences in five have no label at all."""
TARGETS = [("ddp", "mean"), ("ddp", "sum"), ("zero3", "mean"), ("hf2", "sum"), ("fsdp", "sum"), ("zero1", "sum"),
           ("accelerate", "mean"), ("hf_fsdp", "mean"), ("hf_zero2", "sum")]  # fmt: skip
SKIPS = [("ddp", False), ("fsdp", True), ("hf2", True), ("zero3", False), ("hf_zero2", True)]
SCALED = [("ddp", "skip"), ("fsdp", "skip"), ("ddp", "rewind"), ("hf2", "rewind")]
"""Backend, and what is done about a loss that is scaled and not finite."""
REDUCED = ["ddp", "ddp eager", "fsdp", "hf2 eager", "zero1", "hf2"]
CHANGED = [
    ("recomputed", "fsdp"), ("compiled", "fsdp"), ("thawed compiled", "ddp"), ("recomputed", "ddp"),
    ("compiled", "ddp"), ("thawed compiled", "fsdp"), ("recomputed", "zero3"), ("compiled", "zero2"),
    ("compiled", "hf_fsdp"), ("recomputed", "hf_fsdp"), ("compiled", "zero3"),
]  # fmt: skip
"""How a model is changed without another number, and on which backend."""
POISONED = {"first batch, second process": 10, "last batch, second process": 14, "first batch, first process": 8}
"""Where in the second step, of 2 batches of 2 samples on each of two processes, a sample gives NaN."""


def poison(
    backend: str, dtype: str, place: str, policy: str, finite_gradient: bool, scales: bool = False
) -> dict[str, Any]:
    """Train on 24 rows of which one makes the loss NaN, and with it the gradient or not; with a loss scaler or not."""
    data = rows(24, DTYPES[dtype])
    data.tensors[1][int(EpochSampler(24, 8).order(0)[POISONED[place]])] = 1e3

    def loss_fn(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        is_bad = labels > 100
        loss = F.mse_loss(outputs, torch.where(is_bad, 0.0, labels))
        if not is_bad.any():
            return loss
        return loss + torch.tensor(float("nan")) if finite_gradient else loss * float("nan")

    options = {**RECIPE, "epochs": 1, "batch_size": 2, "global_batch_size": 8, "on_nonfinite": policy}
    if policy == "rewind":
        options |= {"on_nonfinite": "raise", "algorithms": [SpikeGuard(every=1)]}
    trainer = make_trainer(backend, t16(dtype=DTYPES[dtype]), data, loss_fn=loss_fn, callbacks=[Trace()], **options)
    if scales:
        trainer.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    message = ""
    try:
        trainer.train()
    except NonFiniteError as error:
        message = str(error)
    return {
        **end_of(trainer),
        "raised": message.replace("rank 1", "rank 0"),
        "history": trainer.metrics["train_metrics_history"],
        "scale": trainer.scaler.get_scale() if scales else 1024.0,
    }


def end_of(trainer: Any, *names: str) -> dict[str, Any]:
    logs = [callback.logs for callback in trainer.lifecycle.callbacks if isinstance(callback, Trace)]
    return {
        "steps": [trainer.progress.step, trainer.progress.skipped_steps],
        "logs": [[row[name] for name in ("loss", *names)] for rows in logs for row in rows],
        "weights": [tensor.tolist() for tensor in tensors_of(trainer).values()],
    }


def sum_unit(model: nn.Module) -> Any:
    """Return a unit that returns (sum of losses, number of targets), of which a batch may have none."""

    def unit(batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        is_target = batch["labels"] != -100
        logits = model(**batch)["logits"]
        return F.cross_entropy(logits[is_target], batch["labels"][is_target], reduction="sum"), is_target.sum()

    return unit


def count_targets(backend: str, dtype: str, reduction: str) -> dict[str, Any]:
    model = Tagger(dtype=DTYPES[dtype])
    return end_of(fit(make_trainer(
        backend, model, on.masked_sentences(29), unit=sum_unit(model), callbacks=[Trace()], batch_size=1,
        global_batch_size=16, grad_reduction=reduction, **{**RECIPE, "epochs": 2},
    )), "grad_norm")  # fmt: skip


class Reductions(Callback):
    """Counts the exchanges of gradients in each step, and how often the schedule is stepped."""

    def __init__(self) -> None:
        self.count = self.depth = 0
        self.seen: list[list[int]] = []

    def on_step_start(self, trainer: Any) -> None:
        self.count, self.before = 0, trainer.lr_scheduler._step_count

    def on_step_end(self, trainer: Any) -> None:
        self.seen.append([self.count, trainer.lr_scheduler._step_count - self.before])

    def call(self, reduce: Any, *args: Any, **options: Any) -> Any:
        """Reduce, and count it unless another reduction does so; of single numbers, some are no gradients."""
        sizes = [tensor.numel() for tensor in (*args, *options.values()) if isinstance(tensor, torch.Tensor)]
        self.count += self.depth == 0 and max(sizes, default=0) > 40
        self.depth += 1
        try:
            return reduce(*args, **options)
        finally:
            self.depth -= 1


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
    if is_eager and backend == "hf2":
        config = {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
        args = TrainingArguments(tempfile.mkdtemp(), accelerator_config=config, save_strategy="no", use_cpu=True)
        trainer: Any = HFTrainer(t16(), args, rows(52), progress_bar=False, **options)
    else:
        plugin = GradientAccumulationPlugin(num_steps=1, sync_each_batch=is_eager)
        options |= {"accelerator": Accelerator(cpu=True, gradient_accumulation_plugin=plugin)} if is_eager else {}
        trainer = make_trainer(backend, t16(dtype=dtype), rows(52, dtype), **options)
    if backend in ("ddp", "hf2"):

        def hook(state: Any, bucket: Any) -> Any:
            counter.count += 1
            return allreduce_hook(state, bucket)

        hook.__annotations__.clear()  # DDP compares them with classes, not with their names
        trainer.model_wrapped.register_comm_hook(None, hook)
        trainer.train()
    else:
        names = ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_single")
        with pytest.MonkeyPatch.context() as patch:
            for name in filter(partial(hasattr, dist), names):
                patch.setattr(dist, name, partial(counter.call, getattr(dist, name)))
            trainer.train()
    return {"seen": counter.seen}


def draw(backend: str) -> dict[str, Any]:
    """Train with dropout, and return which numbers it has left."""
    model, masks = nn.Sequential(nn.Linear(4, 32), nn.Dropout(), nn.Linear(32, 1)), list[Any]()
    model[1].register_forward_hook(lambda module, inputs, output: masks.append((output == 0).int().tolist()))
    make_trainer(backend, model, rows(16, torch.float32), loss_fn=F.mse_loss, batch_size=2, epochs=1).train()
    return {"masks": masks}


def skip(backend: str, dtype: str, counts: bool) -> dict[str, Any]:
    """Train on sentences of which one window has no label, by the labels or by the targets of a unit."""
    model = Tagger(dtype=DTYPES[dtype])
    return end_of(fit(make_trainer(
        backend, model, Blank(20, EpochSampler(20, 4).order(0)[8:12]), batch_size=1, global_batch_size=4, epochs=1,
        learning_rate=0.05, optimizer="torch.optim.AdamW", **({"unit": sum_unit(model)} if counts else {}),
    )))  # fmt: skip


def overflow(backend: str) -> dict[str, Any]:
    trainer = make_trainer(
        backend, Overflowing(at=(3, 8)), rows(40, torch.float32), loss_fn=F.mse_loss, batch_size=2,
        global_batch_size=4, epochs=1, lr_scheduler="linear", learning_rate=0.01,
    )  # fmt: skip
    trainer.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    trainer.train()
    return {**end_of(trainer), "scale": trainer.scaler.get_scale(), "scheduled": trainer.lr_scheduler.last_epoch}


def loop_by_hand(backend: str, wrapped: bool) -> dict[str, Any]:
    """Train by a custom loop on DDP's wrapper, or after a step on the bare module; ranks see 6 and 5 samples."""

    class CustomLoop(AccelerateTrainer):
        def _train_epoch(self, epoch: int) -> float:
            total, samples = 0.0, 0
            for batch in self.train_loader:
                x, y = self._prepare_batch(batch)
                model = self.model_wrapped if wrapped or not samples else self.model
                loss = self.loss_fn(model(x), y)
                loss.backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
                total, samples = total + loss.item() * len(x), samples + len(x)
            self.totals = [total, samples]
            return total / samples

    trainer = CustomLoop(
        t16(), rows(11), loss_fn=F.mse_loss, batch_size=3, epochs=1, learning_rate=0.01, progress_bar=False,
        shuffle=False,
    )  # fmt: skip
    loss = trainer.train()["train_metrics_history"][0]["train_loss"]
    return {**end_of(trainer), "totals": trainer.totals, "loss": loss}


class Blocks(nn.Sequential):
    """A model with a custom forward pass: under the hooks of FSDP, PyTorch compiles none of its own modules."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self:
            x = block(x)
        return x


def learn(backend: str, how: list[str]) -> dict[str, Any]:
    """Train a model of blocks with dropout and BatchNorm; a compiled one then again, compiled ahead."""
    again = train_blocks(backend, how, ahead=True) if "compiled" in how else {}
    return {"tensors": train_blocks(backend, how) | {f"ahead {name}": tensor for name, tensor in again.items()}}


def train_blocks(backend: str, how: list[str], ahead: bool = False) -> dict[str, Any]:
    torch.manual_seed(0)
    compiler, dtype = Graphs(), DTYPES[dtype_of(backend)]
    recomputes, compiles, thaws = (word in how for word in ("recomputed", "compiled", "thawed"))
    blocks = [nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.3)) for _ in range(2)]
    trainer = make_trainer(
        backend, Blocks(nn.Linear(4, 16), *blocks, nn.Linear(16, 1)).to(dtype), rows(32, dtype), loss_fn=F.mse_loss,
        batch_size=4, learning_rate=0.05, gradient_checkpointing=recomputes, epochs=4 if thaws else 1,
        algorithms=[GradualUnfreezing()] if thaws else [], compile={"backend": compiler} if compiles else False,
    )  # fmt: skip
    if ahead:
        compiled = trainer.compile()
        assert compiled.graphs and compiled.shapes == {"train": ["[4, 4], [4, 1]"]}
    graphs = compiler.count
    trainer.train()
    assert bool(compiler.count) is compiles and (thaws or not ahead or compiler.count == graphs)
    assert any("forward" in vars(module) for module in trainer.get_model().modules()) is recomputes
    return tensors_of(trainer)


@pytest.fixture(scope="module")
def results(folder: Path, request: pytest.FixtureRequest) -> dict[str, Any]:
    jobs = Jobs()
    asked = {test: asked_for(request, "backend", test=f"test_{test}") for test in ("nan", "gradients", "dropout")}
    targets, steps = asked_for(request, "backend", "reduction"), asked_for(request, "backend", "masked")

    def add(backends: Iterable[str], name: str, function: Any, **options: Any) -> None:
        """Add a job for backends, and for the native trainer in their types of numbers."""
        runs = {(backend, dtype_of(other)) for other in backends for backend in (other, "native")}
        for backend, dtype in sorted(runs):
            jobs.add(f"{backend}-{dtype}-{name}", backend, function, dtype=dtype, **options)

    for masked in sorted({masked for _, masked in steps}):
        jobs += on.parity_jobs(sorted(backend for backend, how in steps if how == masked), masked)
    for place, policy, finite in poisoned("native"):
        options = {"place": place, "policy": policy, "finite_gradient": finite}
        backends = {backend for backend in asked["nan"] if (place, policy, finite) in poisoned(backend)}
        add(backends, f"{place}-{policy}-{finite}", poison, **options)
    for reduction in sorted({reduction for _, reduction in targets}):
        backends = {backend for backend, how in targets if how == reduction}
        add(backends, f"targets-{reduction}", count_targets, reduction=reduction)
    for name in sorted(asked["gradients"]):
        backend, _, word = name.partition(" ")
        jobs.add(f"{name}-reductions", backend, count_reductions, is_eager=bool(word))
    for backend in sorted({"native", "ddp"} | asked["dropout"]):
        jobs.add(f"{backend}-draw", backend, draw)
    skipped = asked_for(request, "backend", "counts")
    for counts in sorted({counts for _, counts in skipped}):
        add(sorted(backend for backend, how in skipped if how == counts), f"skip-{counts}", skip, counts=counts)
    for backend in ("ddp", "hf2"):
        jobs.add(f"overflow-{backend}", backend, overflow)
    for backend, policy in [("native", "skip"), ("native", "rewind"), *SCALED]:
        options = {"dtype": "float32", "policy": policy, "finite_gradient": True, "scales": backend != "native"}
        jobs.add(f"scaled-{backend}-{policy}", backend, poison, place="last batch, second process", **options)
    changed = asked_for(request, "how", "backend")
    plain = {("thawed" if "thawed" in how else "plain", backend) for how, backend in changed}
    for how, backend in sorted(changed | plain):
        jobs.add(f"{how} {backend}", backend, learn, how=how.split())
    for wrapped in (True, False):  # the error ends the launch
        jobs.add(f"loop-{wrapped}", "ddp", loop_by_hand, wrapped=wrapped)
    return on.launch_all(jobs, folder)


def poisoned(backend: str) -> list[tuple[str, str, bool]]:
    """Return the cases of a NaN: all places under DDP, one under the others."""
    last = "last batch, second process"
    places = POISONED if backend in ("native", "accelerate", "ddp") else [last]
    return [(place, policy, (place == last) == (policy == "skip")) for place in places for policy in ("raise", "skip")]


def assert_native(results: Any, backend: str, name: str, limit: float | None = None) -> None:
    dtype = dtype_of(backend)
    reference, ranks = results[f"native-{dtype}-{name}"][0], results[f"{backend}-{dtype}-{name}"]
    for rank in ranks:
        assert "error" not in rank, rank
        assert gap(rank, reference) <= (bound(backend) if limit is None else limit), name


@pytest.mark.parametrize(("backend", "masked"), thinned(STEPS, STEPS[:8]))
def test_steps_match_one_process(results: Any, backend: str, masked: bool) -> None:
    (reference,), ranks = (results[f"{name}-{dtype_of(backend)}-{masked}"] for name in ("native", backend))
    assert max(on.parity(ranks, reference).values()) <= bound(backend)
    assert len(reference["logs"]) == 6 and reference["progress"]["skipped_steps"] == 0
    assert gap(ranks[0]["tensors"], ranks[-1]["tensors"]) == 0, "the ranks have other weights"


@pytest.mark.parametrize("backend", thinned([*SPREAD, "hf"], ("ddp", "fsdp", "hf2")))
def test_nan_on_one_process_is_raised_or_skipped_on_all(results: Any, backend: str) -> None:
    for place, policy, finite in poisoned(backend):
        name = f"{place}-{policy}-{finite}"
        assert_native(results, backend, name)
        rank = results[f"{backend}-{dtype_of(backend)}-{name}"][-1]
        assert rank["steps"] == ([1, 0] if policy == "raise" else [2, 1]), name
        assert ("not finite at step 2" in rank["raised"]) == (policy == "raise"), name


@pytest.mark.parametrize(("backend", "reduction"), thinned(TARGETS, TARGETS[:4]))
def test_unit_targets_are_weighed_over_all_processes(results: Any, backend: str, reduction: str) -> None:
    assert_native(results, backend, f"targets-{reduction}")


@pytest.mark.parametrize("backend", thinned(REDUCED, REDUCED[:4]))
def test_gradients_are_reduced_once_a_step(results: Any, backend: str) -> None:
    """And the schedule is stepped once."""
    expected = [[4, 1]] * 6 + [[2, 1]] if "eager" in backend else [[1, 1]] * 7
    for rank in results[f"{backend}-reductions"]:
        assert rank["seen"] == expected, rank


@pytest.mark.parametrize("backend", thinned(["ddp", "fsdp", "hf2", "zero2"], ("ddp", "fsdp")))
def test_dropout_differs_between_ranks(results: Any, backend: str) -> None:
    first, second = results[f"{backend}-draw"]
    assert "error" not in first, first
    assert all(mask != other for mask, other in zip(first["masks"], second["masks"], strict=True))
    if backend == "ddp":
        assert first["masks"][:4] == results["native-draw"][0]["masks"][:4]


@pytest.mark.parametrize(("backend", "counts"), thinned(SKIPS, SKIPS[:3]))
def test_windows_without_labels_are_skipped(results: Any, backend: str, counts: bool) -> None:
    assert_native(results, backend, f"skip-{counts}", 1e-6 if "zero" in backend else 1e-12)
    assert results[f"{backend}-{dtype_of(backend)}-skip-{counts}"][0]["steps"] == [4, 1]


@pytest.mark.parametrize("backend", ["ddp", "hf2"])
def test_overflow_on_one_rank_skips_the_step_on_all(results: Any, backend: str) -> None:
    first, second = results[f"overflow-{backend}"]
    assert first == second
    assert (first["steps"], first["scheduled"], first["scale"]) == ([8, 2], 8, 256.0)


@pytest.mark.parametrize(("backend", "policy"), SCALED)
def test_nan_on_one_rank_keeps_the_scale_on_all(results: Any, backend: str, policy: str) -> None:
    (reference,) = results[f"scaled-native-{policy}"]
    assert reference["steps"] == ([2, 1] if policy == "skip" else [2, 0])
    for rank in results[f"scaled-{backend}-{policy}"]:
        assert "error" not in rank, rank
        assert gap(rank, reference) <= bound("zero2")


def test_custom_loop_needs_the_wrapped_model(results: Any) -> None:
    """Each update from gradients that were not averaged is an error."""
    for rank in results["loop-False"]:
        assert rank["error"] == "DistributedError" and "model_wrapped" in rank["message"]
        assert "not averaged over the 2 ranks" in rank["message"]
    first, second = results["loop-True"]
    assert first["weights"] == second["weights"]
    (total, count), (other_total, other_count) = first["totals"], second["totals"]
    assert (count, other_count) == (6, 5)  # the loss is the mean over the samples of all ranks
    assert first["loss"] == second["loss"] == pytest.approx((total + other_total) / 11, rel=1e-12)


@pytest.mark.parametrize(("how", "backend"), thinned(CHANGED, CHANGED[:3]))
def test_recomputing_and_compiling_change_no_bit(results: Any, how: str, backend: str) -> None:
    """Also if a model is compiled ahead, or if its layers are frozen at first."""
    plain_job = "thawed" if "thawed" in how else "plain"
    plain, changed = (results[f"{name} {backend}"][0]["tensors"] for name in (plain_job, how))
    ahead = {f"ahead {name}": tensor for name, tensor in plain.items()} if "compiled" in how else {}
    assert len(plain) == 18 and gap(plain | ahead, changed) == 0
