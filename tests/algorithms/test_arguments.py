"""Arguments of algorithms are validated, by themselves and against the run."""

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from recipes import small_trainer, t16
from torch import nn
from torch.utils.data import TensorDataset

from omnitrain import (
    EMA,
    SAM,
    SWA,
    Algorithm,
    ConfigError,
    DataError,
    GradientClipping,
    GradualUnfreezing,
    LabelSmoothing,
    LayerFreezing,
    MagnitudePruning,
    MixUp,
    ProgressiveResizing,
    SeqLengthWarmup,
    StochasticDepth,
    StraightThrough,
)


def one_by_one(kind: Any, **options: Any) -> list[tuple[Any, dict[str, Any], str]]:
    """Return rows for single arguments, each of which is in its message."""
    return [(kind, {name: value}, f"`{name}`") for name, value in options.items()]


@pytest.mark.parametrize(("kind", "options", "message"), [
    *((EMA, {"decay": value}, "decay") for value in (0, 1, True, "0.9", float("nan"))),
    *((SAM, {"rho": value}, "rho") for value in (0, -1, True, float("inf"))),
    *one_by_one(MagnitudePruning, sparsity=1, initial=0.6, every=0, match="0", scope="all", start="2h"),
    *one_by_one(MagnitudePruning, sparsity=True, end="1e3tok"),
    *one_by_one(LayerFreezing, freeze_start=1, freeze_level=0, layers="head"),
    *one_by_one(StochasticDepth, layers="a"),
    (StochasticDepth, {"layers": [3]}, "`layers`"),
    (StochasticDepth, {"layers": ["a"], "drop_rate": 1}, "`drop_rate`"),
    (StochasticDepth, {"layers": ["a"], "distribution": "square"}, "`distribution`"),
    (StraightThrough, {"function": 4}, "must be callable, got 4"),
    (StraightThrough, {"function": torch.relu, "match": "weight"}, "`match` must be a list"),
    (GradientClipping, {"kind": "norm", "limit": 1.0}, "'value' or 'adaptive', got 'norm'"),
    (GradientClipping, {"kind": "value", "limit": 0}, "limit"),
    (MixUp, {"alpha": 0}, "alpha"),
    (LabelSmoothing, {"num_classes": 3, "smoothing": 1.0}, "smoothing"),
])  # fmt: skip
def test_arguments_are_validated(kind: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        kind(**options)


First, Second = type("First", (Algorithm,), {"conflicts": ("Second",)}), type("Second", (Algorithm,), {})
build = functools.partial(small_trainer, max_grad_norm=None)


@pytest.mark.parametrize(("algorithms", "message"), [
    ([First(), Second()], "exclude each other"), ([Second(), First()], "exclude each other"),
    ([LayerFreezing(), GradualUnfreezing()], "exclude each other"),
    ([MagnitudePruning(), EMA()], "exclude each other"), ([EMA(), EMA()], "EMA and EMA, and only one"),
    ([StraightThrough(torch.relu), EMA()], "only one may set the weights"),
])  # fmt: skip
def test_conflicts_are_an_error_of_the_constructor(algorithms: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(*algorithms)
    build(Second(), Second())


TIMED = {"epochs": None, "max_duration": "1h"}
GROWING = {"epochs": 4, "global_batch_size": {0: 4, "2ep": 8}}
FROZEN = {"model": nn.Sequential(nn.Linear(4, 1)), "freeze": ["weight"]}
CLIPPING = GradientClipping("value", 1.0, exclude=["head"])


@pytest.mark.parametrize(("algorithms", "options", "message"), [
    ([EMA()], {"model": t16(dtype=torch.bfloat16)}, r"EMA.*bfloat16.*autocast='bf16'"),
    *(([part], TIMED, f"{type(part).__name__} needs the share of the run.*in time or tokens, or its data have no le")
      for part in (LayerFreezing(), SWA(), ProgressiveResizing(), SeqLengthWarmup(8), MagnitudePruning())),
    *(([part], GROWING, r"`global_batch_size=\{0: 4, '2ep': 8\}` changes in the run")
      for part in (GradualUnfreezing(), LayerFreezing(), ProgressiveResizing())),
    ([LayerFreezing(layers=["0", "9"])], {}, "no module is called '9'"),
    ([LayerFreezing(layers=["0"])], {}, "two layers"),
    ([GradientClipping("value", 1.0)], {"max_grad_norm": 1.0}, r"max_grad_norm=1\.0` clips as well"),
    ([CLIPPING], {}, "`exclude`: 'head' is found in no name"),
    ([MagnitudePruning(end=9)], {}, "would end at update 9 .*the run has 8"),
    ([SWA(9)], {}, r"average nothing: .* from '9ba' on, .* has 8 updates, 4 in an epoch\..*`every`"),
    ([SWA()], {"epochs": 1.5}, "average nothing.*from '0.7dur' on, .* has 6 updates"),
    ([SWA("3ep", every=1)], {}, "average nothing.*end of each 1 updates from '3ep'"),
    ([SWA("9tok")], {"epochs": None, "max_duration": "8tok"}, "average nothing.*from '9tok' on, .*run has 8tok"),
    ([LayerFreezing(0.5)], {}, "in each of the run's 2 epochs it would freeze 0 of 1"),
    ([GradualUnfreezing()], {"epochs": 1}, "in each of the run's 1 epochs it would freeze 1 of 1"),
    ([MagnitudePruning(start="0.9dur")], {}, "begin at update 8 and end at update 4"),
    ([MagnitudePruning(match=["head"])], {}, "'head' is found in no name"),
    ([MagnitudePruning()], FROZEN, "no parameter that trains and has two dim"),
    ([SAM()], {"microbatch_size": "auto"}, "SAM.*microbatch_size='auto'"),
    ([StochasticDepth(["block"])], {}, "no module is called 'block'"),
    ([StochasticDepth(["0"])], {}, "'0' changes the shape of its input"),
    ([StraightThrough(torch.relu, ["head"])], {}, "'head' is found in no name"),
    ([StraightThrough(torch.sum)], {}, r"tensor of the shape of its argument, \(16, 4\) for '0.weight'"),
    ([StraightThrough(torch.relu)], {"microbatch_size": "auto"}, "microbatch_size='auto'"),
])  # fmt: skip
def test_algorithms_are_checked_against_the_run(algorithms: Any, options: dict[str, Any], message: str) -> None:
    trainer = build(*algorithms, **options)
    with pytest.raises(ConfigError, match=message):
        trainer.train()
    assert trainer.progress.step == 0


def test_algorithm_with_an_unknown_method_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"after_updates would never be called.*'?after_update'?"):
        type("Odd", (Algorithm,), {"after_updates": lambda self, trainer: None})


@pytest.mark.parametrize("algorithm", [LabelSmoothing, MixUp])
def test_wrong_number_of_classes_is_an_error(algorithm: Any) -> None:
    data = TensorDataset(torch.randn(8, 4), torch.arange(8) % 3)
    trainer = build(algorithm(num_classes=5), model=nn.Linear(4, 3), data=data, loss_fn=F.cross_entropy, batch_size=8)
    with pytest.raises(DataError, match=r"outputs of shape \(8, 3\) and probabilities of shape \(8, 5\).*Correct the"):
        trainer.train()
