"""Models of transformers, units that hold their model, packed rows, custom loops: on two processes as on one."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from backends import DTYPES, PROCESSES, Job, asked_for, dtype_of, gap, launch_all, make_trainer, named, tensors_of
from marks import thinned
from recipes import Blank, Holding, Overflowing, Tagger, Trace, rows, t16
from tiny import Short, Tokens, bert, gpt, t5
from torch import nn
from transformers import DataCollatorWithFlattening

from omnitrain import AccelerateTrainer, DistributedError, GroupByLength, PackedDataset
from omnitrain.data.sampling import EpochSampler

HERE = "test_models"
KINDS = ("gpt", "bert", "t5", "unit", "packed", "heads", "rows", "by length", "wrapped")
UNSUPPORTED = {"fsdp": ("t5",), "hf_fsdp": ("t5", "bert")}
"""PyTorch's FSDP 2 with accelerate's policy takes no model of tied weights such as T5. The policy of HFTrainer's
arguments has it shard BERT's word embeddings twice, by themselves and in `BertEmbeddings`, which PyTorch rejects."""
SPREAD = [backend for backend, processes in PROCESSES.items() if processes > 1]
CASES = [
    (backend, kind) for backend in SPREAD for kind in KINDS[SPREAD.index(backend) % 2 :: 2]
    if kind not in UNSUPPORTED.get(backend, ())
]  # fmt: skip
QUICK = [*(("ddp", kind) for kind in KINDS if kind not in ("bert", "t5"))]
QUICK += [("fsdp", "wrapped"), ("zero2", "t5"), ("zero3", "heads"), ("hf2", "packed")]
SKIPS = [("ddp", False), ("fsdp", True), ("hf2", True)]


class Heads(nn.Module):
    """Classes of sequences of one token, and a value; only the first is called `logits`."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.classes, self.value = nn.Linear(4, 8), nn.Linear(8, 3), nn.Linear(8, 1)
        for one in self.parameters():
            nn.init.normal_(one, std=0.3, generator=torch.Generator().manual_seed(one.numel()))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.body(x).tanh()
        return {"logits": self.classes(hidden)[:, None], "value": self.value(hidden)}


class Wrapped(nn.Module):
    """A causal language model inside of a module that says nothing about its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = gpt()

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        return self.inner(input_ids=input_ids, labels=labels)


def both(outputs: dict[str, torch.Tensor], labels: torch.Tensor) -> torch.Tensor:
    labelled = outputs["value"][labels != -100]
    return F.cross_entropy(outputs["logits"].flatten(0, 1), labels.flatten()) + labelled.square().mean()


def some_labelled(size: int, dtype: torch.dtype) -> list[dict[str, torch.Tensor]]:
    """Rows of which every third has no label."""
    features = rows(size, dtype).tensors[0]
    return [{"x": x, "labels": torch.tensor([-100 if i % 3 == 1 else i % 3])} for i, x in enumerate(features)]


# --- what runs on every process


def learn(backend: str, kind: str, dtype: str) -> dict[str, Any]:
    """Train a model for an epoch in steps of 8 samples; evaluate before it and after it."""
    data: Any
    options: dict[str, Any] = {"compute_metrics": "accuracy"}
    if kind == "unit":
        model: nn.Module = t16(dtype=DTYPES[dtype])
        data, evaluation = rows(21, DTYPES[dtype]), rows(7, DTYPES[dtype])
        options = {"unit": Holding(model)}
    elif kind == "wrapped":
        model, data, evaluation = Wrapped(), Tokens(21), Tokens(7)
        options = {"compute_metrics": ["accuracy", "perplexity"]}
    elif kind == "heads":
        model, options = Heads(), {"compute_metrics": "accuracy", "loss_fn": both}
        data, evaluation = some_labelled(21, DTYPES[dtype]), some_labelled(7, DTYPES[dtype])
    elif kind == "packed":
        model, data, evaluation = gpt(), Short(21), Short(7)
        options = {"data_collator": DataCollatorWithFlattening()}
    elif kind == "rows":
        model, data, evaluation = gpt(), PackedDataset(Short(60), 16), PackedDataset(Short(20), 16)
    elif kind == "by length":
        texts = [{**one, "labels": one["input_ids"]} for one in Short(28)]
        model, data, evaluation = gpt(), GroupByLength(texts[:21], 8), texts[21:]
    else:
        sequences, make_model = {"gpt": ("tokens", gpt), "bert": ("classes", bert), "t5": ("pairs", t5)}[kind]
        model, data, evaluation = make_model(), Tokens(21, sequences), Tokens(7, sequences)
    trace = Trace()
    trainer = make_trainer(
        backend, model.to(DTYPES[dtype]), data, evaluation, callbacks=[trace], optimizer="torch.optim.SGD",
        learning_rate=0.05, epochs=1, batch_size=1, global_batch_size=8, max_grad_norm=0.5,
        **({} if "_" in backend else {"eval_on_start": True}), **options,
    )  # fmt: skip
    trainer.train()
    return {
        "logs": [[row["loss"], row["grad_norm"]] for row in trace.logs],
        "valid": [{k: v for k, v in row.items() if k != "epoch"} for row in trainer.metrics["valid"] if row["step"]],
        "is bare": trainer.model is trainer.get_model(),
        "tensors": {f"weights/{name}": one for name, one in tensors_of(trainer).items()},
    }


def skip(backend: str, dtype: str, counts: bool) -> dict[str, Any]:
    """Train on sentences of which one window has no label, by the labels or by the targets of a unit."""
    model = Tagger(dtype=DTYPES[dtype])

    def unit(batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        kept = batch["labels"] != -100
        scores = model(**batch)["logits"]
        return F.cross_entropy(scores[kept], batch["labels"][kept], reduction="sum"), kept.sum()

    trainer = make_trainer(
        backend, model, Blank(20, EpochSampler(20, 4).order(0)[8:12]), batch_size=1, global_batch_size=4, epochs=1,
        learning_rate=0.05, optimizer="torch.optim.AdamW", **({"unit": unit} if counts else {}),
    )  # fmt: skip
    trainer.train()
    return {
        "steps": [trainer.progress.step, trainer.progress.skipped_steps],
        "tensors": {f"weights/{name}": one for name, one in tensors_of(trainer).items()},
    }


def overflow(backend: str) -> dict[str, Any]:
    """Train with a loss scaler where two steps overflow on one rank."""
    trainer = make_trainer(
        backend, Overflowing(at=(3, 8)), rows(40, torch.float32), loss_fn=F.mse_loss, batch_size=2,
        global_batch_size=4, epochs=1, lr_scheduler="linear", learning_rate=0.01,
    )  # fmt: skip
    trainer.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    trainer.train()
    return {
        "steps": [trainer.progress.step, trainer.progress.skipped_steps, trainer.lr_scheduler.last_epoch],
        "scale": trainer.scaler.get_scale(),
        "weights": torch.cat([one.flatten() for one in trainer.get_model().parameters()]).tolist(),
    }


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
    try:
        metrics = trainer.train()
    except DistributedError as error:
        return {"raised": str(error)}
    return {
        "raised": "", "weights": [one.tolist() for one in trainer.get_model().parameters()], "totals": trainer.totals,
        "loss": metrics["train_metrics_history"][0]["train_loss"],
    }  # fmt: skip


# --- what came of it


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[str, Any]:
    jobs = []
    for name, option in (("learn", "kind"), ("skip", "counts")):
        asked = {(backend, dtype_of(backend), how) for backend, how in asked_for(request, "backend", option)}
        for backend, dtype, how in sorted(asked | {("native", dtype, how) for _, dtype, how in asked}):
            options = {option: how, "dtype": dtype}
            jobs.append(Job(f"{name}-{backend}-{how}-{dtype}", backend, f"{HERE}:{name}", options))
    jobs += [Job(f"overflow-{backend}", backend, f"{HERE}:overflow") for backend in ("ddp", "hf2")]
    for wrapped in (True, False):  # the error ends the launch
        jobs.append(Job(f"loop-{wrapped}", "ddp", f"{HERE}:loop_by_hand", {"wrapped": wrapped}))
    return launch_all(jobs, tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize(("backend", "kind"), thinned(dict.fromkeys([*QUICK, *CASES]), QUICK))
def test_models_take_the_steps_of_one_process(results: Any, backend: str, kind: str) -> None:
    dtype = dtype_of(backend)
    (reference,), ranks = results[f"learn-native-{kind}-{dtype}"], results[f"learn-{backend}-{kind}-{dtype}"]
    # transformers computes losses in fp32, whatever the model is in
    bound = 1e-10 if kind in ("unit", "heads") and dtype == "float64" else 2e-5
    for rank in ranks:
        assert "error" not in rank, rank
        assert gap(rank["logs"], reference["logs"]) <= bound
        assert gap(rank["valid"], reference["valid"]) <= bound
        assert gap(named(rank, "weights/"), named(reference, "weights/")) <= bound
        assert rank["is bare"]
    assert ranks[0]["valid"] == ranks[1]["valid"]


@pytest.mark.parametrize(("backend", "counts"), thinned(itertools.product(SPREAD, [False, True]), SKIPS))
def test_windows_without_labels_are_skipped(results: Any, backend: str, counts: bool) -> None:
    dtype = dtype_of(backend)
    (reference,) = results[f"skip-native-{counts}-{dtype}"]
    for rank in (reference, *results[f"skip-{backend}-{counts}-{dtype}"]):
        assert "error" not in rank, rank
        assert rank["steps"] == [4, 1]
        assert gap(named(rank, "weights/"), named(reference, "weights/")) <= (1e-6 if dtype == "float32" else 1e-12)


@pytest.mark.parametrize("backend", ["ddp", "hf2"])
def test_overflow_on_one_rank_skips_the_step_on_all(results: Any, backend: str) -> None:
    first, second = results[f"overflow-{backend}"]
    assert first == second
    assert first["steps"] == [8, 2, 8] and first["scale"] == 256.0
    assert all(math.isfinite(weight) for weight in first["weights"])


def test_custom_loop_needs_the_wrapped_model(results: Any) -> None:
    """Each update from gradients that were not averaged is an error."""
    for rank in results["loop-False"]:
        assert "not averaged over the 2 ranks" in rank["raised"] and "model_wrapped" in rank["raised"]
    first, second = results["loop-True"]
    assert first["raised"] == "" and first["weights"] == second["weights"]
    (total, count), (other_total, other_count) = first["totals"], second["totals"]
    assert (count, other_count) == (6, 5)  # the loss is the mean over the samples of all ranks
    assert first["loss"] == second["loss"] == pytest.approx((total + other_total) / 11, rel=1e-12)
