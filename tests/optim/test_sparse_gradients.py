"""Sparse gradients train as dense ones, or raise before the first step; on two processes: test_kinds_of_training.py."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from recipes import Bags, StopAt, Trace, bags, distance, fit, same, small_trainer, weights
from torch import nn

from omnitrain import SAM, ConfigError, Distributions, GradientClipping, MagnitudePruning, NonFiniteError, Trainer


def make(model: nn.Module, kind: type[Any] = Trainer, **options: Any) -> Any:
    defaults = {"batch_size": 8, "optimizer": "sgd", "max_grad_norm": 0.3, "log_steps": 1}
    return small_trainer(kind=kind, model=model, **{"data": bags(22), **defaults, **options})


def trained(sparse: bool, **options: Any) -> tuple[list[torch.Tensor], list[float]]:
    trace = Trace()
    trainer = fit(make(Bags(sparse), callbacks=[trace], **options))
    return weights(trainer.get_model()), [row["grad_norm"] for row in trace.logs]


def test_sparse_gradients_train_as_dense_ones(trainer_class: Any) -> None:
    """Rows come several times in a batch, and the norm is that of the sum."""
    sparse, norms = trained(True, kind=trainer_class)
    expected, expected_norms = trained(False, kind=trainer_class)
    assert distance(sparse, expected) < 1e-14 and norms == pytest.approx(expected_norms, rel=1e-14)
    assert max(norms) > 0.3  # so that some are clipped
    split, split_norms = trained(True, kind=trainer_class, batch_size=2, gradient_accumulation_steps=4)
    assert distance(split, expected) < 1e-14 and split_norms == pytest.approx(norms)


@pytest.mark.parametrize("options", [
    lambda: {"optimizer": "adagrad"},
    lambda: {"optimizer": "lbfgs", "max_grad_norm": None},
    lambda: {"algorithms": [SAM()]},
    lambda: {"algorithms": [GradientClipping("value", 0.01)], "max_grad_norm": None},
    lambda: {"algorithms": [GradientClipping("adaptive", 0.01)], "max_grad_norm": None},
    lambda: {"algorithms": [MagnitudePruning(0.5, match=["table.weight"])]},
], ids=["adagrad", "lbfgs", "SAM", "by value", "adaptive", "pruning"])  # fmt: skip
def test_optimizers_and_algorithms_train_sparse_as_dense(options: Any) -> None:
    (sparse, norms), (dense, dense_norms) = (trained(is_sparse, **options()) for is_sparse in (True, False))
    assert distance(sparse, dense) < 1e-14 and norms == pytest.approx(dense_norms)


def test_distributions_measure_sparse_as_dense_gradients() -> None:
    rows = []
    for sparse in (True, False):
        trace = Trace()
        make(Bags(sparse), callbacks=[Distributions(of=("gradients",), every=1), trace]).train()
        rows.append([{key: value for key, value in row.items() if "table" in key} for row in trace.logs])
    assert rows[0] and rows[0][0] and rows[0] == [pytest.approx(row) for row in rows[1]]


def test_infinite_sparse_gradients_name_their_sample() -> None:
    model, data = Bags(True, has_head=False), bags(8)
    data.tensors[1].copy_(torch.arange(8) == 5)  # the root of zero has an infinite slope
    with torch.no_grad():
        model.table.weight.zero_()

    def root_of_marked(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return torch.where(target == 1, output.clamp(min=0.0), output + 1).sqrt().sum()

    with pytest.raises(NonFiniteError, match=r"samples of the training set: 5\."):
        make(model, data=data, loss_fn=root_of_marked).train()
    assert not model.table.weight.count_nonzero()


@pytest.mark.parametrize("name", ["adagrad", "sparseadam"])
def test_sparse_gradients_resume_to_the_bit(name: str, tmp_path: Path) -> None:
    def build(folder: str, *callbacks: Any) -> Any:
        options = {"optimizer": name, "save_dir": tmp_path / folder, "save_steps": 1, "callbacks": callbacks}
        return make(Bags(True, has_head=name != "sparseadam"), **options)

    straight = fit(build("straight"))
    build("cut", StopAt(4)).train()
    resumed = fit(build("cut"), resume_from="auto")
    assert resumed.progress.step == 6 and same(weights(straight.model), weights(resumed.model))


@pytest.mark.parametrize(("options", "words"), [
    ({"optimizer": "adamw"}, r"\(AdamW\) cannot train 'table.weight', .* sparse: .*\. Make .* sparse=False"),
    ({"optimizer": partial(torch.optim.SGD, lr=0.1, momentum=0.9), "learning_rate": 2e-5}, "sparse momentum"),
    ({"weight_decay": 0.1}, r"\(SGD\) cannot train 'table.weight'"),
    ({"optimizer": "sparseadam"}, r"SparseAdam\) takes sparse gradients only, and those of 'head.weight', 'head.bias'"),
], ids=["adamw", "momentum", "weight decay", "sparseadam"])  # fmt: skip
def test_optimizer_that_cannot_train_them_raises(trainer_class: Any, options: Any, words: str, tmp_path: Path) -> None:
    folder, model = tmp_path / "run", Bags(True)
    before = weights(model)
    trainer = make(model, trainer_class, save_dir=folder, **options)
    with pytest.raises(ConfigError, match=words):
        trainer.train()
    assert trainer.progress.step == 0 and same(before, weights(model)) and not list(folder.glob("*"))


class Table(nn.Module):
    """A table of its own, from which PyTorch cannot be asked for its gradient's layout."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.ones(20, 1, dtype=torch.float64))

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        return F.embedding(indices, self.table, sparse=True).sum((1, 2))


def test_layout_is_seen_in_the_first_gradient() -> None:
    with pytest.raises(ConfigError, match="cannot train 'table', whose gradients are sparse"):
        make(Table(), optimizer="adamw").train()
    model = Table()
    make(model).train()
    assert not torch.equal(model.table, torch.ones_like(model.table))


def test_tied_and_frozen_embeddings_are_dense() -> None:
    model, tied = Bags(True), Bags(True, has_head=False)
    model.table.weight.requires_grad_(False)
    make(model, optimizer="adamw").train()
    tied.other = nn.Linear(4, 20, bias=False).double()
    tied.other.weight = tied.table.weight
    tied.forward = lambda x: tied.other(tied.table(x)).mean(1)  # type: ignore[method-assign]
    make(tied, optimizer="adamw").train()
