"""Kinds of training on two ranks: models, units, tasks, groups, schedules, sparse gradients, algorithms.

Each takes the steps of one process, and resumes there or on another backend.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from backends import DTYPES, PROCESSES, Jobs, asked_for, bound, dtype_of, gap, launch_all, make_trainer, tensors_of
from forking import joined
from marks import thinned
from recipes import Bags, Holding, ScheduleFree, Sentences, StopAt, Tagger, Trace, bags, callback, rows, t16
from tiny import Short, Tokens, bert, gpt, t5
from torch import nn
from torch.utils.data import TensorDataset
from transformers import DataCollatorWithFlattening

import omnitrain

Recipe = dict[str, Any]
"""The arguments of a trainer, and as "micro" the samples of a micro-batch over all processes."""


# --- algorithms and optimizers


def deep(dtype: torch.dtype, classes: int = 1) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, classes)).to(dtype)


def regression(dtype: torch.dtype, **options: Any) -> Recipe:
    data = {"train_dataset": rows(24, dtype), "eval_dataset": rows(7, dtype), "loss_fn": F.mse_loss}
    return {"model": deep(dtype), **data, "micro": 8, "eval_steps": 2, "max_grad_norm": None, **options}


def classes(dtype: torch.dtype) -> Recipe:
    """Classes of other weights each, mixed."""
    train, evaluation = (TensorDataset(x, x.argmax(1) % 3) for x in (rows(size, dtype).tensors[0] for size in (24, 7)))
    loss = nn.CrossEntropyLoss(torch.tensor([1.0, 4.0, 0.3], dtype=dtype))
    data = {"train_dataset": train, "eval_dataset": evaluation, "loss_fn": loss}
    return regression(dtype, model=deep(dtype, classes=3), **data, algorithms=[omnitrain.MixUp(3, alpha=1.0)])


def tokens(dtype: torch.dtype, **options: Any) -> Recipe:
    data = {"train_dataset": Sentences(24), "eval_dataset": Sentences(7), "loss_fn": None}
    return regression(dtype, model=Tagger(dtype=dtype), **data, **options)


def groups(dtype: torch.dtype) -> Recipe:
    patterns = [{"match": r"^2.*weight", "lr_scale": 0.5}, {"match": "bias", "weight_decay": 0.0}]
    options = {"optimizer": "adamw", "weight_decay": 0.1, "freeze": [r"^0\."], "param_groups": patterns}
    return regression(dtype, lr_scheduler="cosine", **options)


ALGORITHMS: dict[str, Callable[[], Any]] = {
    "ema": lambda: omnitrain.EMA(0.8),
    "swa": lambda: omnitrain.SWA("0.3dur"),
    "freezing": lambda: omnitrain.LayerFreezing(0.0),
    "unfreezing": lambda: omnitrain.GradualUnfreezing(0.5),
    "value": lambda: omnitrain.GradientClipping("value", 0.01),
    "agc": lambda: omnitrain.GradientClipping("adaptive", 0.05),
    "mixup": lambda: omnitrain.MixUp(alpha=1.0),
    "sam": lambda: omnitrain.SAM(0.5),
    "depth": lambda: omnitrain.StochasticDepth(["[13]"], 0.5),
    "rounding": lambda: omnitrain.StraightThrough(
        lambda weight: (weight * 8 / weight.max()).round() * weight.max() / 8
    ),
    "pruning": lambda: omnitrain.MagnitudePruning(0.7, end=5, every=2, scope="global"),
    "rewind": lambda: omnitrain.SpikeGuard(every=3),
    "skip": lambda: omnitrain.SpikeGuard(action="skip"),
}


def spikes(dtype: torch.dtype, **options: Any) -> Recipe:
    """Data of which one sample is far from the others."""
    x = rows(128, dtype).tensors[0]
    data = TensorDataset(x, x.sum(1, True).index_fill(0, torch.tensor(100), 100.0))
    algorithms = [omnitrain.SpikeGuard(threshold=30.0, window=16, **options), omnitrain.EMA(0.9)]
    recipe = {"model": t16(dtype=dtype), "train_dataset": data, "loss_fn": F.mse_loss, "algorithms": algorithms}
    return {**recipe, "micro": 4, "epochs": 1, "learning_rate": 0.01}


def line_search(parameters: Any) -> torch.optim.Optimizer:
    """Takes loss and gradients several times in a step."""
    return torch.optim.LBFGS(parameters, lr=0.5, max_iter=4, line_search_fn="strong_wolfe")


# --- tasks and schedules


class TaskHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(4, 4)
        self.heads = nn.ModuleDict({"kind": nn.Linear(4, 3), "rare": nn.Linear(4, 1)})

    def forward(self, x: torch.Tensor, task: str) -> torch.Tensor:
        return self.heads[task](self.body(x).tanh())


def tasks(dtype: torch.dtype) -> Recipe:
    """A task of 22 samples and one of 3: most micro-batches have none of the second."""
    x, class_weights = rows(25, dtype).tensors[0], torch.tensor([1.0, 3.0, 0.2], dtype=dtype)
    sets = {"kind": TensorDataset(x[:22], x[:22].argmax(1) % 3), "rare": TensorDataset(x[22:], x[22:].sum(1, True))}
    model, data = TaskHeads().to(dtype), omnitrain.MultiTask(sets)
    losses = {"kind": nn.CrossEntropyLoss(class_weights), "rare": F.mse_loss}
    return {
        "model": model, "train_dataset": data, "eval_dataset": data.evaluation(sets, {"kind": "accuracy"}),
        "unit": omnitrain.MultiTaskUnit(model, losses, {"rare": 2.0}),
        "micro": 4, "global_batch_size": 8, "lr_scheduler": "linear",
    }  # fmt: skip


def in_time(dtype: torch.dtype, growing: bool = False) -> Recipe:
    """Over 200 tokens, in steps of four sequences, or of more and more."""
    return {
        "model": Tagger(dtype=dtype), "train_dataset": Sentences(20), "micro": 4, "max_duration": "200tok",
        "epochs": None, "global_batch_size": {0: 4, "0.2dur": 8, "0.6dur": 12} if growing else None,
        "lr_scheduler": omnitrain.LinearScheduler(warmup=2, min_lr=0.01) * omnitrain.WSDScheduler("0.4dur"),
    }  # fmt: skip


# --- models, units and data


class TwoOutputs(nn.Module):
    """Classes of sequences of one token, and a value; only the first is called `logits`."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.classes, self.value = nn.Linear(4, 8), nn.Linear(8, 3), nn.Linear(8, 1)

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
    values = outputs["value"][labels != -100]
    return F.cross_entropy(outputs["logits"].flatten(0, 1), labels.flatten()) + values.square().mean()


def labelled(size: int, dtype: torch.dtype) -> list[dict[str, torch.Tensor]]:
    """Rows of which every third has no label."""
    features = rows(size, dtype).tensors[0]
    return [{"x": x, "labels": torch.tensor([-100 if i % 3 == 1 else i % 3])} for i, x in enumerate(features)]


def trained(model: nn.Module, dtype: torch.dtype, train: Any, evaluation: Any, **options: Any) -> Recipe:
    """An epoch of 21 samples in steps of 8, with an evaluation before it."""
    data = {"model": model.to(dtype), "train_dataset": train, "eval_dataset": evaluation}
    defaults = {"batch_size": 1, "global_batch_size": 8, "epochs": 1, "max_grad_norm": 0.5, "eval_on_start": True}
    return {**data, **defaults, "optimizer": "torch.optim.SGD", "compute_metrics": "accuracy", **options}


def unit(dtype: torch.dtype) -> Recipe:
    model = t16(dtype=dtype)
    return trained(model, dtype, rows(21, dtype), rows(7, dtype), unit=Holding(model), compute_metrics=None)


def by_length(dtype: torch.dtype) -> Recipe:
    texts = [{**sample, "labels": sample["input_ids"]} for sample in Short(28)]
    return trained(gpt(), dtype, omnitrain.GroupByLength(texts[:21], 8), texts[21:])


def transformer(dtype: torch.dtype, model: nn.Module, kind: str = "tokens", **options: Any) -> Recipe:
    return trained(model, dtype, Tokens(21, kind), Tokens(7, kind), **options)


def sparse(dtype: torch.dtype, kind: str, is_reference: bool) -> Recipe:
    """Bags of an embedding whose gradients are sparse, or dense on one process."""
    data = {"model": Bags(not is_reference, dtype=dtype), "train_dataset": bags(22, dtype), "loss_fn": F.mse_loss}
    options = {"optimizer": "sgd", "batch_size": 4, "global_batch_size": 8, "learning_rate": 0.1, "max_grad_norm": 0.3}
    return {**data, **options, **SPARSE["sparse" if is_reference and kind == "sparse reductions" else kind]}


KINDS: dict[str, Callable[[torch.dtype], Recipe]] = {
    "classes": classes,
    "smoothing": lambda dtype: tokens(dtype, algorithms=[omnitrain.LabelSmoothing(5, 0.2)]),
    "lengths": lambda dtype: tokens(dtype, algorithms=[omnitrain.SeqLengthWarmup(6, 2, 0.9, 1)]),
    "lbfgs": lambda dtype: regression(dtype, optimizer=line_search),
    "muon": lambda dtype: regression(dtype, optimizer="muon", lr_scheduler="cosine"),
    "schedule free": lambda dtype: regression(dtype, optimizer=ScheduleFree),
    "groups": groups,
    "tasks": tasks,
    "spikes": lambda dtype: {**spikes(dtype), "save_steps": 10},
    "spikes in memory": lambda dtype: spikes(dtype, every=3),
    "in time": in_time,
    "growing steps": lambda dtype: in_time(dtype, growing=True),
    "unit": unit,
    "by length": by_length,
    "heads": lambda dtype: trained(TwoOutputs(), dtype, *(labelled(size, dtype) for size in (21, 7)), loss_fn=both),
    "packed": lambda dtype: trained(gpt(), dtype, Short(21), Short(7), data_collator=DataCollatorWithFlattening()),
    "rows": lambda dtype: trained(gpt(), dtype, *(omnitrain.PackedDataset(Short(size), 16) for size in (60, 20))),
    "gpt": lambda dtype: transformer(dtype, gpt()),
    "wrapped": lambda dtype: transformer(dtype, Wrapped(), compute_metrics=["accuracy", "perplexity"]),
    "bert": lambda dtype: transformer(dtype, bert(), "classes"),
    "t5": lambda dtype: transformer(dtype, t5(), "pairs"),
}
SPARSE: dict[str, dict[str, Any]] = {
    "sparse": {"batch_size": 2}, "sparse adagrad": {"optimizer": "adagrad"},
    "sparse uneven": {"batch_size": 3, "global_batch_size": 7},
    "sparse auto": {"batch_size": 4, "microbatch_size": "auto"},
    "sparse reductions": {"batch_size": 2, "dtypes": {"reductions": "fp32"}},
}  # fmt: skip
LIMITS = {
    **dict.fromkeys(("gpt", "bert", "t5", "packed", "rows", "by length", "wrapped"), 2e-5),  # losses in fp32
    **dict.fromkeys(SPARSE, 1e-12), "sparse reductions": 1e-6, "muon": 1e-5,
}  # fmt: skip
"""How far from one process a kind may be, where that is not the bound of its backend."""


def recipe_of(kind: str, backend: str, dtype: torch.dtype) -> Recipe:
    if kind in SPARSE:
        return sparse(dtype, kind, backend == "native")
    if kind == "parts":  # steps of 8 sentences, the last of an epoch of 3: a rank has more parts than the other
        size = None if backend == "native" else 3
        return {"model": Tagger(dtype=dtype), "train_dataset": Sentences(19), "micro": 8, "microbatch_size": size}
    return regression(dtype, algorithms=[ALGORITHMS[kind]()]) if kind in ALGORITHMS else KINDS[kind](dtype)


def train(backend: str, kind: str, dtype: str, folder: str = "", stop: int = 0) -> dict[str, Any]:
    """Train, stopped after a step, or resumed from there."""
    options = {"epochs": 2, "learning_rate": 0.05, **recipe_of(kind, backend, DTYPES[dtype])}
    if kind == "lbfgs":
        del options["learning_rate"]  # an instance has its own
    if "micro" in options:
        options["batch_size"] = options.pop("micro") // PROCESSES[backend]
    if "_" in backend:
        options.pop("eval_on_start", None)
    if folder:
        saves = {"save_dir": folder, "save_steps": 100, "keep_best": 0, "load_best_at_end": False}
        options = {**saves, **options}
    trace = Trace()
    trace.asks_alone = bool(stop)  # without such a callback, the next step is read before this one is counted
    trainer = make_trainer(backend, callbacks=[trace, *([StopAt(stop)] if stop else [])], **options)
    trainer.train(resume_from="auto" if folder else None)
    valid = trainer.metrics["valid"]
    return {
        "logs": [[row["loss"], row["grad_norm"], row["learning_rate"]] for row in trace.logs],
        "valid": [{name: value for name, value in row.items() if name != "epoch"} for row in valid if row["step"]],
        "afterwards": trainer.evaluate() if "eval_dataset" in options else {},
        "initial rates": [group.get("initial_lr") for group in trainer.optimizer.param_groups],
        "groups": trainer.backend.names_by_group(),
        "counts": [trainer.progress.samples, trainer.progress.tokens, trainer.progress.step],
        "left out": [
            [spike.step, spike.start, spike.stop]
            for algorithm in trainer.algorithms
            for spike in getattr(algorithm, "left_out", [])
        ],
        "is bare": trainer.model is trainer.get_model(),
        "tensors": tensors_of(trainer),
    }


def train_by_clock(backend: str, folder: str) -> dict[str, Any]:
    """Train for 10 steps by the clock of the main rank, and for 5 by the other; evaluate and save by clocks too."""

    def move_clock(trainer: Any) -> None:
        trainer.lifecycle.progress.seconds += 1e5 * (1 + trainer.rank)

    trace = Trace()
    metrics = make_trainer(
        backend, Tagger(dtype=torch.float32), Sentences(20), batch_size=2, max_duration="1000000s",
        learning_rate=0.05, lr_scheduler="linear", callbacks=[callback(on_step_start=move_clock), trace],
        eval_dataset=Sentences(4), eval_steps="250000s", save_dir=folder, save_steps="350000s", load_best_at_end=False,
    ).train()  # fmt: skip
    evaluated = [row["step"] for row in metrics["valid"]]
    return {"rates": trace.learning_rates, "evaluated": evaluated, "reason": metrics["stop_reason"]}


CASES = [
    *(("ddp", kind) for kind in ("ema", "unfreezing", "mixup", "sam", "depth", "rounding", "pruning")),
    *(("ddp", kind) for kind in ("classes", "smoothing", "lengths", "lbfgs", "tasks", "growing steps")),
    *(("ddp", kind) for kind in ("unit", "by length", "heads", "packed", "rows", "gpt", "wrapped", *SPARSE)),
    *(("fsdp", kind) for kind in ("ema", "tasks", "groups", "muon", "schedule free", "wrapped", "parts")),
    *(("zero2", kind) for kind in ("ema", "groups", "t5")), ("zero3", "heads"),
    *(("hf2", kind) for kind in ("in time", "packed", "sparse", "parts")),
]  # fmt: skip
SLOW = [
    *(("ddp", kind) for kind in ("swa", "freezing", "value", "agc", "groups", "muon", "in time", "bert")),
    *(("fsdp", kind) for kind in ("swa", "unfreezing", "value", "agc", "classes", "lengths", "sam", "rounding")),
    *(("fsdp", kind) for kind in ("pruning", "in time", "bert", "unit")),
    *(("zero2", kind) for kind in ("swa", "classes", "smoothing", "depth", "unit")),
    *(("zero3", kind) for kind in ("tasks", "groups", "in time", "bert", "rows")),
    *(("hf2", kind) for kind in ("tasks", "groups", "muon", "schedule free", "growing steps", "t5")),
    *((backend, "parts") for backend in ("ddp", "zero1", "zero2", "zero3", "hf_fsdp", "hf_zero3")),
    *((backend, kind) for backend in ("ddp", "fsdp", "hf2", "hf_fsdp") for kind in ("spikes", "spikes in memory")),
    ("hf_fsdp", "gpt"), ("hf_zero2", "packed"), ("hf_zero3", "heads"), ("hf_zero3", "t5"),
]  # fmt: skip
"""Backend and kind. PyTorch's FSDP 2 with accelerate's policy takes no model of tied weights such as T5. The policy of
HFTrainer's arguments has it shard BERT's word embeddings twice, by themselves and in `BertEmbeddings`."""
UNSUPPORTED = ["sam", "freezing", "unfreezing", "value", "agc", "rounding", "pruning", "rewind", "skip"]
"""Algorithms that do not work with DeepSpeed."""
RESUMED = [
    ("groups", "fsdp", "native"), ("muon", "ddp", "fsdp"), ("tasks", "ddp", "ddp"), ("growing steps", "ddp", "ddp"),
    ("sparse adagrad", "ddp", "ddp"), ("lbfgs", "native", "ddp"), ("lbfgs", "ddp", "native"), ("ema", "native", "fsdp"),
    ("ema", "fsdp", "native"), ("pruning", "native", "ddp"), ("pruning", "ddp", "native"),
    ("schedule free", "ddp", "fsdp"), ("groups", "zero2", "ddp"), ("tasks", "zero3", "zero3"),
    ("in time", "hf2", "hf2"), ("in time", "fsdp", "fsdp"), ("in time", "zero3", "zero3"),
    ("unfreezing", "native", "ddp"), ("unfreezing", "ddp", "native"), ("rounding", "fsdp", "native"),
]  # fmt: skip
"""Kind, where a run is cut, and where it is resumed."""


@pytest.fixture(scope="module")
def results(folder: Path, request: pytest.FixtureRequest) -> dict[str, Any]:
    moves = sorted(asked_for(request, "kind", "source", "target"))
    runs = {(backend, kind, dtype_of(backend)) for backend, kind in asked_for(request, "backend", "kind")}
    runs |= {("native", kind, dtype) for _, kind, dtype in runs}
    runs |= {("zero2", kind, "float32") for kind in asked_for(request, "algorithm")}
    runs |= {(target, kind, dtype_of(source, target)) for kind, source, target in moves}
    first, second = Jobs(), Jobs()
    for backend, kind, dtype in sorted(runs):
        name = f"{backend}-{kind}-{dtype}"
        first.add(name, backend, train, kind=kind, dtype=dtype, folder=str(folder / name) if kind == "spikes" else "")
    for kind, source, target in moves:
        place = str(folder / f"{kind}-{source}")
        options: dict[str, Any] = {"kind": kind, "dtype": dtype_of(source, target), "folder": place}
        first.add(f"{kind} cut on {source}", source, train, stop=3 if kind == "tasks" else 4, **options)
        second.add(f"{kind} from {source} on {target}", target, train, **options)
    first.add("clock", "ddp", train_by_clock, folder=str(folder / "clock"))
    return joined(launch_all(first, folder / "first"), launch_all(second, folder / "second"))


def assert_close(result: dict[str, Any], expected: dict[str, Any], limit: float) -> None:
    assert "error" not in result, result
    for name in ("logs", "valid", "afterwards", "tensors"):
        assert gap(result[name], expected[name]) <= limit, name


@pytest.mark.parametrize(("backend", "kind"), thinned([*CASES, *SLOW], CASES))
def test_kinds_match_one_process(results: Any, backend: str, kind: str) -> None:
    (expected,) = results[f"native-{kind}-{dtype_of(backend)}"]
    ranks = results[f"{backend}-{kind}-{dtype_of(backend)}"]
    for rank in ranks:
        assert_close(rank, expected, max(LIMITS.get(kind, 0), bound(backend)) if kind not in SPARSE else LIMITS[kind])
        assert rank["is bare"] and rank["counts"] == expected["counts"] and rank["valid"] == ranks[0]["valid"]
        assert rank["groups"] == expected["groups"]
        assert rank["left out"] == expected["left out"] and len(rank["left out"]) == ("spikes" in kind)
        assert expected["initial rates"][0] is None or rank["initial rates"] == expected["initial rates"]
    if kind == "groups":
        assert expected["groups"] == [["2.weight"], ["2.bias", "4.bias"], ["4.weight"]]
        assert expected["initial rates"] == [0.025, 0.05, 0.05]
        initial = deep(DTYPES[dtype_of(backend)])[0].weight
        assert torch.equal(expected["tensors"]["0.weight"], initial)


@pytest.mark.parametrize("algorithm", thinned(UNSUPPORTED, ["sam", "skip"]))
def test_algorithms_that_zero_cannot_run_are_errors(results: Any, algorithm: str) -> None:
    for rank in results[f"zero2-{algorithm}-float32"]:
        assert rank["error"] == "ConfigError"
        assert f"{type(ALGORITHMS[algorithm]()).__name__}, which cannot work here" in rank["message"]


@pytest.mark.parametrize(("kind", "source", "target"), thinned(RESUMED, RESUMED[:11]))
def test_kinds_resume(results: Any, kind: str, source: str, target: str) -> None:
    """To the bit on the same backend."""
    cut, *_ = results[f"{kind} cut on {source}"]
    straight = results[f"{target}-{kind}-{dtype_of(source, target)}"]
    for rank, expected in zip(results[f"{kind} from {source} on {target}"], straight, strict=True):
        limit = 0 if source == target else max(LIMITS.get(kind, 0), bound(source, target))
        assert_close({**rank, "logs": cut["logs"] + rank["logs"]}, expected, limit)
        assert len(expected["logs"]) > len(cut["logs"])


def test_ranks_with_different_clocks_take_the_same_steps(results: Any) -> None:
    """With the rate of the main rank's clock; the run ends when the first of the clocks is there."""
    first, second = results["clock"]
    assert first == second and first["reason"] == "max_duration" and len(first["evaluated"]) >= 2
    assert first["rates"] == pytest.approx([0.045, 0.04, 0.035, 0.03, 0.025], abs=5e-4)
