"""Checks before a run: they leave no trace, and find planted faults."""

import copy
import itertools
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import retentive
import torch
import torch.nn.functional as F
from counting import Streamed
from diagnostics.faults import ChannelNorm, Pooled, Sentences
from marks import TRAINERS
from recipes import Composed, Trace, fit, rows, same, t16, trainer_on_cpu, weights
from torch import nn
from torch.utils.data import Dataset, Subset, TensorDataset

from omnitrain import EMA, SAM, ConfigError, EvalSet, GradualUnfreezing, MixUp, MultiTask, MultiTaskUnit, Trainer
from omnitrain.diagnostics import data_checks
from omnitrain.diagnostics.rehearsal import unchanged_attributes


def noisy_trainer(kind: Any, folder: Path, **options: Any) -> Any:
    defaults = {
        "data_collator": retentive.collate, "batch_size": 8, "learning_rate": 1e-2, "epochs": 2, "warmup_steps": 2,
        "lr_scheduler": "cosine", "loss_fn": nn.CrossEntropyLoss(), "save_dir": folder, "callbacks": [Trace()],
    }  # fmt: skip
    data = retentive.Drawn(40)
    return trainer_on_cpu(kind, retentive.Noisy(), data, eval_dataset=retentive.Drawn(8), **{**defaults, **options})


def state_of(trainer: Any) -> dict[str, Any]:
    model, data = trainer.get_model(), trainer.train_dataset
    generators = (model.generator, retentive.COLLATING, torch.default_generator, data.generator)
    return {
        "weights": [tensor.clone() for tensor in model.state_dict().values()],
        "gradients": [parameter.grad is None for parameter in model.parameters()],
        "modes": [module.training for module in model.modules()],
        "hooks": [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()],
        "attributes": [sorted(vars(module)) for module in model.modules()],
        "plain": (model.passes, list(model.seen), float(model.state), data.count),
        "generators": [generator.get_state().tolist() for generator in generators],
        "optimizer": copy.deepcopy(trainer.optimizer.state_dict()),
        "rest": (copy.copy(trainer.progress), copy.copy(trainer.loss_mean)),
    }


OPTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    **dict.fromkeys(TRAINERS, dict),
    "averages": lambda: {"algorithms": [EMA(0.9)]},
    "mixing": lambda: {"algorithms": [MixUp(3, alpha=1.0)]},
    "unfreezing": lambda: {"algorithms": [GradualUnfreezing(0.5), SAM(0.1)]},
    "closure": lambda: {
        "optimizer": "torch.optim.LBFGS", "max_grad_norm": None, "lr_scheduler": None, "warmup_steps": 0,
    },
    "microbatches": lambda: {"microbatch_size": 3, "gradient_accumulation_steps": 2},
    "workers": lambda: {"num_workers": 1, "data_collator": None},
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.processes] * (name == "workers")) for name in OPTIONS]
)
def test_check_and_plan_leave_no_trace(name: str, tmp_path: Path) -> None:
    """A run after it equals one without it to the bit, with parts that keep something from every pass."""
    ends = []
    for checks in (False, True):
        retentive.COLLATING.manual_seed(3)
        trainer = noisy_trainer(TRAINERS.get(name, Trainer), tmp_path / str(checks), **OPTIONS[name]())
        if checks:
            before = state_of(trainer)
            trainer.check()
            trainer.plan()
            trainer.plan(device="80GB", ranks=4)
            after = state_of(trainer)
            assert same(before.pop("weights"), after.pop("weights")) and before == after
            assert not list(tmp_path.glob("True/*")) and not trainer._callbacks[0].events
        metrics = trainer.train()
        ends.append((weights(trainer.get_model()), metrics["train_metrics_history"], metrics["valid"]))
    assert same(ends[0][0], ends[1][0]) and ends[0][1:] == ends[1][1:]


def images(size: int = 40, seed: int = 0) -> TensorDataset:
    x = torch.randn(size, 6, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, x[:, :3].argmax(1))


def spoilt(column: int, place: Any, value: float) -> TensorDataset:
    data = images()
    data.tensors[column][place] = value
    return data


class Augmented(Dataset[Any]):
    """Samples with noise, of a dataset or of tensors."""

    def __init__(self, base: TensorDataset, stores_tensors: bool = False) -> None:
        self.x, self.labels = base.tensors if stores_tensors else (None, [0] * len(base))
        self.base = None if stores_tensors else Subset(base, range(len(base)))

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Any:
        x, label = (self.x[index], self.labels[index]) if self.base is None else self.base[index]  # type: ignore[index]
        return x + 0.1 * torch.randn(x.shape), label


class Tagged(nn.Module):
    """A model of tokens, each by itself, which returns its loss."""

    def __init__(self, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(20, 8), norm or nn.Identity(), nn.Linear(8, 20)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        logits = self.head(self.norm(self.embed(input_ids)))
        return {"loss": F.cross_entropy(logits.transpose(1, 2), labels), "logits": logits}


def unlabelled() -> list[Any]:
    return [{"input_ids": sample["input_ids"]} for sample in Sentences()]


def pad(samples: list[Any], label: int) -> dict[str, torch.Tensor]:
    """Return tokens that are their own labels; those of the padding have this one."""
    tokens = [sample["input_ids"] for sample in samples]
    rows, labels = (nn.utils.rnn.pad_sequence(tokens, batch_first=True, padding_value=value) for value in (0, label))
    return {"input_ids": rows, "labels": labels}


def pack(samples: list[Any]) -> dict[str, torch.Tensor]:
    tokens = torch.cat([sample["input_ids"] for sample in samples])[None]
    return {"input_ids": tokens, "labels": tokens}


def attending(batch_first: bool) -> nn.Module:
    """Return attention that takes the samples for the sequence, unless `batch_first` says otherwise."""

    def attend(model: Any, x: torch.Tensor) -> torch.Tensor:
        x = x[:, None].expand(-1, 5, -1)
        return model.head(model.attention(x, x, x, need_weights=False)[0].mean(1))

    attention = nn.MultiheadAttention(6, 2, batch_first=batch_first)
    return Composed(attend, attention=attention, head=nn.Linear(6, 3))


def forgetful() -> nn.Module:
    layers = {"first": nn.Linear(6, 6), "unused": nn.Linear(6, 6), "head": nn.Linear(6, 3)}
    return Composed(lambda model, x: model.head(model.first(x).detach()), **layers)


def adapted() -> nn.Module:
    """Return a frozen layer with a low-rank adapter whose second matrix begins at 0."""
    layers = {"base": nn.Linear(6, 3).requires_grad_(False), "down": nn.Linear(6, 2), "up": nn.Linear(2, 3, bias=False)}
    nn.init.zeros_(layers["up"].weight)
    return Composed(lambda model, x: model.base(x) + model.up(model.down(x)), **layers)


def classifier(outputs: int = 3, bias: float | None = None) -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, outputs))
    if bias is not None:
        nn.init.constant_(model[0].bias, bias)
    return model


def with_targets(targets: torch.Tensor | None = None) -> TensorDataset:
    x = images().tensors[0]
    return TensorDataset(x, x.sum(1) if targets is None else targets)


def flat_loss(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(scores, labels).detach() + 0 * scores.mean()


def contrastive_loss(embeddings: torch.Tensor, identities: torch.Tensor) -> torch.Tensor:
    is_same = (identities[:, None] == identities).float()
    return F.binary_cross_entropy_with_logits(embeddings @ embeddings.T, is_same)


CE, MSE = nn.CrossEntropyLoss(), nn.MSELoss()
TRAINING, OVERLAP = "of the training set", ("warning", "overlap", "the evaluation set")
LEAK: dict[str, Any] = {"eval_dataset": images(8)}
PLANTED: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any], dict[str, Any], str, str, str]] = {
    "label out of range": (classifier, lambda: spoilt(1, 17, 3), {}, "error", "labels", f"sample 17 {TRAINING}"),
    "negative label": (classifier, lambda: spoilt(1, 17, -1), {}, "error", "labels", f"sample 17 {TRAINING}"),
    "constant input": (classifier, lambda: spoilt(0, ..., 1), {}, "warning", "features", "entry 0 of a sample"),
    "NaN": (classifier, lambda: spoilt(0, (33, 2), torch.nan), {}, "error", "features", f"sample 33 {TRAINING}"),
    "leak": (classifier, images, LEAK, *OVERLAP),
    "leak behind augmentation": (classifier, lambda: Augmented(images(), True), LEAK, *OVERLAP),
    "leak behind augmentation of a part": (
        classifier, lambda: Subset(Augmented(images()), range(4, 40)), LEAK, *OVERLAP
    ),
    "leak between augmented sets": (
        classifier, lambda: Augmented(images()), {"eval_dataset": Augmented(images(8))}, *OVERLAP
    ),
    "labels of padding": (
        Tagged, unlabelled, {"data_collator": partial(pad, label=0), "loss_fn": None}, "warning", "padding", TRAINING
    ),
    "batch norm of packed samples": (
        lambda: Tagged(ChannelNorm(8)), unlabelled, {"data_collator": pack, "loss_fn": None}, "note", "mixing",
        "ChannelNorm 'norm'",
    ),
    "unused layer": (forgetful, images, {}, "warning", "gradients", "unused.weight"),
    "detached layer": (forgetful, images, {}, "warning", "gradients", "first.weight"),
    "dead layer": (lambda: classifier(bias=-1e3), images, {}, "warning", "layers", "ReLU '1'"),
    "attention over samples": (lambda: attending(False), images, {}, "warning", "mixing", "MultiheadAttention"),
    "batch norm": (lambda: nn.Sequential(nn.BatchNorm1d(6), classifier()), images, {}, "note", "mixing", "'0'"),
    "batch norm without statistics": (
        lambda: nn.Sequential(nn.BatchNorm1d(6, track_running_stats=False), classifier()), images, {}, "warning",
        "mixing", "BatchNorm1d '0'",
    ),
    "padding": (lambda: Pooled(False), Sentences, {}, "warning", "padding", TRAINING),
    "padding, small head": (lambda: Pooled(False, 1e-3), Sentences, {}, "warning", "padding", TRAINING),
    "broadcast": (lambda: classifier(1), with_targets, {"loss_fn": MSE}, "error", "shapes", "`loss_fn`"),
    "large rate": (classifier, images, {"learning_rate": 5.0}, "warning", "rate", "`learning_rate`"),
    "tiny rate": (classifier, images, {"learning_rate": 1e-9}, "warning", "rate", "`learning_rate`"),
    "scale": (classifier, lambda: [(1e3 * x, y) for x, y in images()], {}, "warning", "loss", "the first batch"),
    "wrong size": (classifier, lambda: [(x[:5], y) for x, y in images()], {}, "error", "batch", "Linear '0'"),
    "loss without slope": (classifier, images, {"loss_fn": flat_loss}, "warning", "overfitting", "the first batch"),
}  # fmt: skip


def checked(model: nn.Module, data: Any, **options: Any) -> Any:
    options = {"loss_fn": CE, "batch_size": 8, "epochs": 20, "learning_rate": 1e-3, **options}
    return trainer_on_cpu(Trainer, model, data, **options).check()


@pytest.mark.parametrize("fault", PLANTED)
def test_check_finds_planted_fault(fault: str) -> None:
    make_model, make_data, options, severity, name, where = PLANTED[fault]
    torch.manual_seed(0)
    result = checked(make_model(), make_data(), **options)
    matches = [finding for finding in result.findings if finding.check == name and where in finding.where]
    assert [finding.severity for finding in matches] == [severity], str(result)
    assert result.ok is (severity == "note") and matches[0].remedy


FAULTLESS: dict[str, Callable[[], Any]] = {
    "classifier": lambda: checked(classifier(), images(), eval_dataset=images(8, seed=1)),
    "adapter": lambda: checked(adapted(), images()),
    "frozen": lambda: checked(classifier(), images(), freeze=["^0"]),
    "attention": lambda: checked(attending(True), images()),
    "masked padding": lambda: checked(Pooled(True), Sentences()),
    "masked padding, small head": lambda: checked(Pooled(True, 1e-3), Sentences(), learning_rate=1e-6),
    "padding without labels": lambda: checked(
        Tagged(), unlabelled(), data_collator=partial(pad, label=-100), loss_fn=None
    ),
    "augmentation": lambda: checked(classifier(), Augmented(images()), eval_dataset=images(8, seed=1)),
    "regression": lambda: checked(t16(), rows(), loss_fn=MSE, batch_size=8),
    "stream": lambda: checked(classifier(), Streamed(images()), max_steps=4, epochs=None),
    "named sets": lambda: checked(classifier(), images(), eval_dataset={"a": images(8, 1), "b": EvalSet(images(8, 2))}),
    "embeddings": lambda: checked(classifier(), with_targets(torch.arange(40)), loss_fn=contrastive_loss),
    "rows of one": lambda: checked(classifier(), images(), batch_size=1),
    "tasks in turn": lambda: checked(RowHeads(), tasks(), loss_fn=None, shuffle=False),
    "tasks of a stream": lambda: checked(RowHeads(), Streamed(tasks()), loss_fn=None, max_steps=4, epochs=None),
    "tasks with other classes": lambda: checked(BatchHeads(), tasks(), shuffle=False),
    "rare task": lambda: checked(
        model := TaskHeads(), RARE, loss_fn=None, unit=MultiTaskUnit(model, {"a": CE, "b": MSE})
    ),
}


def tasks() -> list[Any]:
    """Return samples of one task with 3 classes, then those of another with 5."""
    x = torch.randn(40, 6, generator=torch.Generator().manual_seed(0))
    return [{"x": x[i], "task": int(i >= 24), "labels": i % (5 if i >= 24 else 3)} for i in range(40)]


class RowHeads(nn.Module):
    """The loss of the rows of each task that a batch has."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 8)
        self.heads = nn.ModuleList([nn.Linear(8, 3), nn.Linear(8, 5)])

    def forward(self, x: torch.Tensor, task: torch.Tensor, labels: torch.Tensor) -> Any:
        hidden, losses = self.body(x), [torch.zeros(())]
        for number, head in enumerate(self.heads):
            if (rows := task == number).any():
                losses.append(F.cross_entropy(head(hidden[rows]), labels[rows], reduction="sum"))
        return {"loss": torch.stack(losses).sum() / len(x)}


class BatchHeads(RowHeads):
    """The scores of the task of a batch."""

    def forward(self, x: torch.Tensor, task: torch.Tensor) -> Any:
        return self.heads[int(task[0])](self.body(x))


class TaskHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleDict({"a": classifier(), "b": classifier(1)})

    def forward(self, x: torch.Tensor, task: str) -> torch.Tensor:
        return self.heads[task](x)


RARE = MultiTask({"a": images(80), "b": (images(6).tensors[0], torch.ones(6, 1))})


@pytest.mark.parametrize("kind", FAULTLESS)
def test_check_raises_no_false_alarm(kind: str) -> None:
    torch.manual_seed(0)
    result = FAULTLESS[kind]()
    assert result.ok and result.findings == [] and str(result).startswith("nothing found"), str(result)


def test_check_reads_sorted_data_in_random_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time ends before all of a set that is sorted by class is read."""
    x = images(200).tensors[0]
    monkeypatch.setattr(data_checks, "time", SimpleNamespace(perf_counter=partial(next, itertools.count())))
    data = list(zip(x, (torch.arange(200) // 50).tolist(), strict=True))
    result = checked(classifier(4), data)
    assert result.outcomes["labels"].startswith("3 classes in 6 samples")
    assert [finding for finding in result.findings if finding.check == "labels"] == []


def test_check_result_is_json_and_html() -> None:
    result = checked(forgetful(), images())
    content = json.loads(json.dumps(result.to_json()))
    assert content["ok"] is False and content["findings"][0]["where"].startswith("first.weight")
    assert "<table>" in result._repr_html_() and "warning: gradients, first.weight" in str(result)


def test_check_rejects_a_run_that_has_begun() -> None:
    trainer = fit(trainer_on_cpu(Trainer, t16(), rows(8), loss_fn=MSE, epochs=1))
    with pytest.raises(ConfigError, match="before a run, and this trainer is at step 1"):
        trainer.check()
    with pytest.raises(ConfigError, match="nothing for `check"):
        trainer_on_cpu(Trainer, t16(), loss_fn=MSE).check()


def test_check_reads_data_of_a_custom_loop() -> None:
    """Its loss is unknown, but not its data."""

    class Custom(Trainer):
        def _train_epoch(self, epoch: int) -> float:
            raise AssertionError

    result = trainer_on_cpu(Custom, t16(), rows(20), eval_dataset=rows(20), loss_fn=MSE).check()
    assert [finding.check for finding in result.findings] == ["overlap"]
    assert result.outcomes["loss"] == "not tried: its own `_train_epoch` computes the loss"


class Broken(list[Any]):
    """Samples of one class, of which the second half cannot be read, or none."""

    def __getitem__(self, index: Any) -> Any:
        if (sample := super().__getitem__(index)) is None:
            raise OSError("disk on fire")
        return sample


@pytest.mark.parametrize("count", [0, 30])
def test_check_survives_failing_data(count: int) -> None:
    data = Broken([(x, 0) for x, _ in images(count)] + [None] * 10)
    result = checked(classifier(), data, shuffle=False)
    severities = {entry.severity for entry in result.findings if entry.check == "labels"}
    assert not result.ok and "disk on fire" in str(result) and ("warning" in severities) == (count > 0)


def test_unchanged_attributes_restores_nested_containers() -> None:
    thing = SimpleNamespace(counts={"calls": [0]}, caches=[{"mean": torch.zeros(2)}])
    with unchanged_attributes([thing]):
        thing.counts["calls"].append(1)
        thing.caches[0]["mean"] += 1
        thing.caches[0]["variance"] = 2
    assert thing.counts == {"calls": [0]}
    assert thing.caches[0].keys() == {"mean"} and not thing.caches[0]["mean"].any()
