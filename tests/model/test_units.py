"""What is computed on one batch: every shape of model, loss and unit that is promised to work."""

import functools
import itertools
import logging
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from recipes import fit, rows, same, t16, weights
from tiny import bert, gpt, llama, t5
from torch import Tensor, nn
from transformers import BatchEncoding, BertForMaskedLM, BertForTokenClassification, TrainingArguments

from omnitrain.core.errors import DataError
from omnitrain.model.losses import count_labels, shifts_by_default
from omnitrain.model.units import (
    EvalUnit,
    ModelUnit,
    StepOutput,
    TrainUnit,
    WholeBatchUnit,
    count_tokens,
    move_loss,
    move_unit,
    run_unit,
    without_effect,
)

X, Y = torch.arange(6.0).reshape(3, 2), torch.tensor([1.0, 2.0, 3.0])


class Scores(nn.Module):
    """Gives one score a sample; subclasses say what they take and what they return."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(2, 1)

    def scores(self, x: Tensor) -> Tensor:
        return self.out(x)[:, 0]

    def forward(self, x: Tensor) -> Any:
        return self.scores(x)


def model_of(forward: Callable[..., Any], **methods: Any) -> Any:
    """A model with the scores of `Scores`, this forward pass and more methods."""
    return type("Model", (Scores,), {"forward": forward, **methods})()


def returning(shape: Callable[[Any, Tensor], Any]) -> Any:
    """A model that takes `x` and `labels` and returns this shape of its loss and scores."""

    def forward(self: Any, x: Tensor, labels: Tensor | None = None) -> Any:
        scores = self.scores(x)
        return shape(F.mse_loss(scores, labels) if labels is not None else None, scores)

    return model_of(forward)


def composer(loss: Callable[[Tensor, Any], Any]) -> Any:
    """A model whose passes take a batch, with a method for the loss."""
    return model_of(
        lambda self, batch: self.scores(batch[0]), loss=lambda self, outputs, batch: loss(outputs, batch[1])
    )


def fail(*arguments: Any) -> Tensor:
    raise AssertionError


def check(output: StepOutput, model: Any) -> None:
    """Check that the loss is the squared error of the scores, and that these and the labels are there."""
    loss = output.required_loss()
    assert torch.allclose(loss, F.mse_loss(model.scores(X), Y)) and loss.requires_grad
    assert torch.equal(output.outputs, model.scores(X)) and output.labels is Y


# Where the loss is found

NAMED = {"x": X, "labels": Y}
ALWAYS_NAMED: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "an object": lambda loss, scores: SimpleNamespace(loss=loss, logits=scores),
    "a dict": lambda loss, scores: {"loss": loss, "logits": scores},
    "a dict with predictions": lambda loss, scores: {"predictions": scores, "hidden": scores + 1, "loss": loss},
    "a dict with another name": lambda loss, scores: {"loss": loss, "scores": scores},
    "a dict with a total": lambda loss, scores: {"total": loss, "scores": scores},
    "a named tuple": lambda loss, scores: namedtuple("Named", "logits loss")(scores, loss),
    "a named tuple with other names": lambda loss, scores: namedtuple("Named", "scores loss")(scores, loss),
}
SHAPES = {**ALWAYS_NAMED, "a tuple": lambda loss, scores: (loss, scores), "a list": lambda loss, scores: [loss, scores]}


def score_alone(outputs: Any, labels: Tensor) -> Tensor:
    """A loss of the outputs of a model that got no labels, of which it would have computed a loss in vain."""
    return F.mse_loss(outputs["logits"], labels) if outputs["loss"] is None else fail()


def with_rest(self: Any, x: Tensor, labels: Tensor, **rest: Any) -> Any:
    return fail() if rest else {"loss": F.mse_loss(self.scores(x), labels), "logits": self.scores(x)}


def with_label(self: Any, x: Tensor, label: Tensor, labels: Tensor | None = None) -> Any:
    return {"loss": F.mse_loss(self.scores(x), label), "logits": self.scores(x) if labels is None else None}


def with_method(self: Any, x: Tensor, labels: Tensor) -> Any:
    return {"loss": self.loss(self.scores(x), labels), "logits": self.scores(x)}


def halves(outputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    return F.mse_loss(outputs, labels) / 2, F.mse_loss(outputs, labels) / 2


FOUND: dict[str, tuple[Any, Any, Any]] = {
    **{shape: (returning(SHAPES[shape]), NAMED, None) for shape in SHAPES},
    **{key: (returning(SHAPES["a dict"]), {"x": X, key: Y}, None) for key in ("label", "label_ids", "target")},
    **{f"{key} and rest": (model_of(with_rest), {"x": X, key: Y}, None) for key in ("label", "label_ids", "targets")},
    "label of the model": (model_of(with_label), {"x": X, "label": Y}, None),
    "loss_fn, tuple": (Scores(), (X, Y), F.mse_loss),
    "loss_fn, list": (Scores(), [X, Y], F.mse_loss),
    "loss_fn, dict": (Scores(), NAMED, F.mse_loss),
    "loss_fn, target": (Scores(), {"x": X, "target": Y}, F.mse_loss),
    "loss_fn, labels as input": (model_of(lambda self, x, labels: self.scores(x) + 0 * labels), NAMED, F.mse_loss),
    "loss_fn, two inputs": (model_of(lambda self, x, more: self.scores(x) + more), (X, 0 * Y, Y), F.mse_loss),
    "loss_fn, not the model's": (returning(SHAPES["a dict"]), NAMED, score_alone),
    "loss_fn, not the method": (model_of(lambda self, x: self.scores(x), loss=fail), (X, Y), F.mse_loss),
    "method": (composer(F.mse_loss), (X, Y), None),
    "method, tuple": (composer(halves), (X, Y), None),
    "method, total": (composer(lambda scores, y: {"total": F.mse_loss(scores, y), "part": scores.sum()}), (X, Y), None),
    "method, parts": (composer(lambda scores, y: dict(zip("ab", halves(scores, y), strict=True))), (X, Y), None),
    "method of another shape": (model_of(with_method, loss=lambda self, x, y: F.mse_loss(x, y)), NAMED, None),
}


@pytest.mark.parametrize("case", FOUND)
def test_unit_finds_loss_scores_and_labels(case: str) -> None:
    model, batch, loss_fn = FOUND[case]
    check(ModelUnit(model, loss_fn)(model, batch), model)


@pytest.mark.parametrize("shape", [*ALWAYS_NAMED, "method"])
def test_unit_finds_scores_without_labels(shape: str) -> None:
    model, batch = (composer(fail), (X,)) if shape == "method" else (returning(SHAPES[shape]), {"x": X})
    with torch.no_grad():
        output = ModelUnit(model)(model, batch)
    assert (output.loss, output.labels) == (None, None) and torch.equal(output.outputs, model.scores(X))


def test_unit_scalar_is_loss_and_rest_are_outputs() -> None:
    model = returning(lambda loss, scores: loss)
    output = ModelUnit(model)(model, {"x": X, "labels": Y})
    assert torch.equal(output.loss, F.mse_loss(model.scores(X), Y)) and output.outputs is None
    for shape in (
        lambda loss, scores: {"loss": loss.reshape(1), "start": scores, "end": scores + 1, "none": None},
        lambda loss, scores: SimpleNamespace(loss=loss.reshape(1, 1), logits=(scores, scores + 1)),
    ):
        model = returning(shape)
        output = ModelUnit(model)(model, {"x": X, "labels": Y})
        assert output.required_loss().shape == () and len(output.outputs) == 2
        assert torch.equal(output.outputs[0] + 1, output.outputs[1])


@pytest.mark.parametrize(("batch_size", "dims"), [(1, 1), (1, 2), (3, 1)])
def test_unit_score_of_one_sample_is_no_loss(dims: int, batch_size: int) -> None:
    x, y = X[:batch_size], Y[:batch_size]
    for wrap, batch in itertools.product((lambda y: y, lambda y: (y, y)), ((x, y), {"x": x, "labels": y})):
        model = model_of(lambda self, x, wrap=wrap: wrap(self.out(x) if dims == 2 else self.scores(x)))
        with torch.no_grad():
            output = ModelUnit(model)(model, batch)
        first = output.outputs if isinstance(output.outputs, Tensor) else output.outputs[0]
        assert output.loss is None and first.shape == ((batch_size, 1) if dims == 2 else (batch_size,))
        with pytest.raises(DataError, match="No loss found"):
            ModelUnit(model)(model, batch)
        output = ModelUnit(model, lambda outputs, labels: 7 * labels.sum())(model, batch)
        assert torch.equal(output.loss, 7 * y.sum()) and output.outputs is not None


def test_loss_fn_without_labels_in_training() -> None:
    model = Scores()
    for batch in (X, (X,), [X], {"x": X}):
        output = ModelUnit(model, lambda outputs, labels: outputs.sum() if labels is None else Y)(model, batch)
        assert torch.equal(output.loss, model.scores(X).sum())
        with torch.no_grad():
            output = ModelUnit(model, F.mse_loss)(model, batch)  # which would fail on labels=None
        assert output.loss is None and torch.equal(output.outputs, model.scores(X))


# What is passed to the model


@pytest.mark.parametrize("compiles", [False, True], ids=["plain", "compiled"])
def test_unit_drops_unknown_keys_and_warns_once(compiles: bool, caplog: pytest.LogCaptureFixture) -> None:
    model = returning(lambda loss, scores: {"loss": loss, "logits": scores})
    called: Any = torch.compile(model, backend="eager") if compiles else model
    unit = ModelUnit(called)
    with caplog.at_level(logging.WARNING, "omnitrain"):
        for _ in range(3):
            output = unit(called, {"x": X, "label": Y, "text": ["a"], "idx": Y})
    assert [record.getMessage().split()[2] for record in caplog.records] == ["'text'", "'idx'"]
    check(output, model)  # pyright: ignore[reportPossiblyUnbound]


@pytest.mark.parametrize("loss_fn", [None, lambda outputs, labels: outputs["sum"]])
def test_unit_passes_every_key_to_kwargs(loss_fn: Any, caplog: pytest.LogCaptureFixture) -> None:
    def forward(self: Any, **batch: Any) -> Any:
        return {"loss": self.scores(batch["x"]).sum(), "sum": self.scores(batch["x"]).sum(), "keys": list(batch)}

    model = model_of(forward)
    output = ModelUnit(model, loss_fn)(model, {"x": X, "labels": Y, "text": ["a"]})
    assert output.outputs[-1] == (["x", "labels", "text"] if loss_fn is None else ["x", "text"])
    assert not caplog.records


NO_LOSS: list[tuple[Any, str]] = [
    (lambda loss, scores: scores, r"a tensor of shape \(3,\)"),
    (lambda loss, scores: {"logits": scores}, "a dict with the keys 'logits'"),
    (lambda loss, scores: (scores, loss), r"a tuple of 2: a tensor of shape \(3,\)"),
    (lambda loss, scores: {"loss": 0.5}, "No loss found"),
    (lambda loss, scores: SimpleNamespace(logits=scores), "SimpleNamespace"),
    (lambda loss, scores: None, "None"),
    (lambda loss, scores: (), "a tuple of 0"),
    (lambda loss, scores: {"loss": scores}, r"must be a scalar, got a tensor of shape \(3,\)"),
]
NO_RESULTS = (None, 1.0, X, (X, 2), (), (Y.sum(), 1, 2), {}, {"a": X})
NO_SCALARS = (1.0, X, torch.zeros(0), (Y.sum(), 3))
PER_SAMPLE = nn.MSELoss(reduction="none")
SCALAR_LOSS = r"scalar, got a tensor of shape \(3,\).*reduction='mean'"


def computed(model: Any, batch: Any, loss_fn: Any = None) -> Any:
    return lambda: ModelUnit(model, loss_fn)(model, batch)


WRONG_CALLS: list[tuple[Callable[[], Any], str]] = [
    *((computed(returning(shape), {"x": X, "labels": Y}), words) for shape, words in NO_LOSS),
    (computed(Scores(), (X, Y), PER_SAMPLE), SCALAR_LOSS),
    (torch.no_grad()(computed(Scores(), (X, Y), PER_SAMPLE)), SCALAR_LOSS),
    (computed(nn.Linear(2, 1), {"input": X, "answer": Y}, F.mse_loss),
     r"needs labels.*the keys 'input', 'answer'.*label_names=\['answer'\]"),
    *((computed(nn.Linear(2, 1), {"x": X, "labels": Y}, loss), r"forward\(\) needs 'input', and .* keys 'x', 'labels'")
      for loss in (None, len)),
    (computed(Scores(), (X, Y), lambda outputs, labels: None), "`loss_fn` returned NoneType"),
    (computed(Scores(), (X, Y), lambda outputs, labels: 0.5), "`loss_fn` returned float"),
    (computed(Scores(), (X, Y), lambda s, y: {"loss": s.sum(), "kl": s.mean()}), r"'loss', 'kl', .* the sum 'total'"),
    (lambda: StepOutput(None).required_loss(), "needs a loss"),
    (lambda: StepOutput({"a": Y.sum()}), r"got a dict with the keys 'a'. .* a dict of losses"),  # type: ignore[arg-type]
    (lambda: StepOutput(Y.sum(), metrics=(1.0,)), r"`metrics` must be a dict.*a tuple of 1"),  # type: ignore[arg-type]
    *((lambda result=result: run_unit(lambda batch: result, None, (X, Y)), "`unit` must return a scalar loss or")
      for result in NO_RESULTS),
    *((lambda loss=loss: StepOutput(loss), "`loss` of a StepOutput must be a scalar tensor, got")
      for loss in NO_SCALARS),
]  # fmt: skip


@pytest.mark.parametrize(("call", "words"), WRONG_CALLS, ids=range(len(WRONG_CALLS)))
def test_unit_rejects_what_is_no_loss(call: Any, words: str) -> None:
    with pytest.raises(DataError, match=words):
        call()


# Dicts of losses, and metrics


def losses_of(scores: Tensor, labels: Tensor) -> dict[str, Tensor]:
    return {"mse": F.mse_loss(scores, labels), "loss_l1": F.l1_loss(scores, labels)}


def outputs_of(model: Any) -> list[StepOutput]:
    """Outputs of the same model where its loss is a dict, by each way for it to be one."""
    in_method, inside = composer(losses_of), returning(lambda loss, scores: {"loss": losses_of(scores, Y), "y": scores})
    for other in (in_method, inside):
        other.load_state_dict(model.state_dict())
    return [
        ModelUnit(model, losses_of)(model, (X, Y)),
        ModelUnit(in_method)(in_method, (X, Y)),
        ModelUnit(inside)(inside, {"x": X, "labels": Y}),
        run_unit(lambda batch: losses_of(model(X), Y), None, (X, Y)),
    ]


def test_unit_sums_dict_of_losses() -> None:
    model = Scores()
    scores = model.scores(X)
    for output in outputs_of(model):
        loss, metrics = output.required_loss(), output.metrics or {}
        assert torch.equal(loss, F.mse_loss(scores, Y) + F.l1_loss(scores, Y)) and loss.requires_grad
        assert list(metrics) == ["loss_mse", "loss_l1"]
        assert torch.equal(metrics["loss_l1"], F.l1_loss(scores, Y)) and not metrics["loss_l1"].requires_grad
        assert output.outputs is None or torch.equal(output.outputs, scores)
    output = ModelUnit(model, lambda s, y: {**losses_of(s, y), "total": s.sum()})(model, (X, Y))
    assert torch.equal(output.required_loss(), scores.sum())
    assert list(output.metrics or {}) == ["loss_mse", "loss_l1"]


@pytest.mark.parametrize("shape", [dict, SimpleNamespace], ids=["dict", "object"])
def test_unit_logs_metrics_of_output(shape: Any) -> None:
    model = returning(lambda loss, scores: shape(loss=loss, logits=scores, metrics={"bias": scores.mean()}))
    output = ModelUnit(model)(model, {"x": X, "labels": Y})
    assert torch.equal(output.outputs, model.scores(X))
    assert torch.equal(output.metrics["bias"], model.scores(X).mean())  # type: ignore[index]
    assert not output.metrics["bias"].requires_grad  # type: ignore[index]
    tensor = returning(lambda loss, scores: {"loss": loss, "metrics": scores})  # an output of that name
    output = ModelUnit(tensor)(tensor, {"x": X, "labels": Y})
    assert output.metrics is None and torch.equal(output.outputs, tensor.scores(X))


# Units of the user's own


def test_unit_returns_mean_or_sum() -> None:
    loss, batch = torch.tensor(2.0), {"x": X, "labels": Y}
    mean = run_unit(lambda batch: loss, None, batch)
    assert (mean.loss, mean.num_targets, mean.labels) == (loss, None, Y)
    for count, expected in ((5, 5), (None, None), (torch.tensor(5), 5)):
        total = run_unit(lambda batch, count=count: (loss, count), None, batch)
        assert (total.loss, total.num_targets) == (loss, expected)
    assert run_unit(lambda batch: loss.reshape(1), None, batch).required_loss().shape == ()
    output = StepOutput(loss)
    assert run_unit(lambda batch: output, None, batch) is output
    losses = {"a": torch.tensor(6.0), "b": torch.tensor(3.0)}
    for count in (4, torch.tensor(4)):
        output = run_unit(lambda batch, count=count: (losses, count), None, batch)
        assert (output.loss, output.num_targets, output.metrics) == (9.0, 4, {"loss_a": 1.5, "loss_b": 0.75})
    assert run_unit(lambda batch: (losses, 0), None, batch).loss == 9.0


def test_unit_evaluate_runs_without_gradients() -> None:
    class Both:
        def __call__(self, batch: Any) -> Tensor:
            return Y.sum()

        def evaluate(self, batch: Any) -> StepOutput:
            return StepOutput(Y.mean(), outputs=batch)

    unit, bare, wrapped = Both(), Scores(), Scores()
    assert isinstance(unit, TrainUnit) and isinstance(unit, EvalUnit)
    assert run_unit(unit, None, X).loss == 6
    with torch.no_grad():
        assert run_unit(unit, None, X).loss == 2
        assert run_unit(lambda batch: Y.sum(), None, X).loss == 6
    assert torch.equal(run_unit(ModelUnit(bare, F.mse_loss), wrapped, (X, Y)).outputs, wrapped.scores(X))


LABELS = torch.tensor([[1, -100, 2], [-100, -100, 3]])


COUNTED: list[tuple[Any, int | None, int | None]] = [
    ({"labels": LABELS}, 3, 2),
    ((X, LABELS), 3, 2),
    ({"targets": LABELS.int()}, 3, 2),
    ({"labels": LABELS, "shift_labels": LABELS[:, :2]}, 1, 1),
    ({"labels": torch.full((2, 3), -100)}, 0, 0),
    *(({"labels": torch.ones(2, 3, dtype=dtype)}, 6, 4) for dtype in (torch.bool, torch.uint8)),
    *((batch, None, None) for batch in ({"labels": torch.ones(2, 3)}, {"labels": torch.tensor([1, 2])})),
    *((batch, None, None) for batch in ({"labels": ["a", "b"]}, {"x": LABELS}, LABELS)),
]


def test_count_labels_and_tokens() -> None:
    for batch, count, shifted in COUNTED:
        assert (count_labels(batch), count_labels(batch, shift=True)) == (count, shifted), batch
    mask, ids = torch.tensor([[1, 1, 0], [1, 0, 0]]), torch.ones(2, 3, dtype=torch.long)
    assert count_tokens({"input_ids": ids, "attention_mask": mask, "labels": LABELS}) == 3
    assert count_tokens({"input_ids": ids, "labels": LABELS}) == 6
    assert count_tokens({"labels": LABELS}) == 3
    assert count_tokens((X, Y)) == count_tokens(X) == count_tokens({"x": X}) == 0


# transformers


IDS = torch.randint(1, 20, (2, 5), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("returns_dict", [True, False], ids=["dict", "tuple"])
def test_unit_transformers_classifier(returns_dict: bool) -> None:
    model, labels = bert(return_dict=returns_dict).eval(), torch.tensor([0, 1])
    batch = BatchEncoding({"input_ids": IDS, "label": labels, "idx": labels})
    output, expected = ModelUnit(model)(model, batch), model(input_ids=IDS, labels=labels)
    assert torch.equal(output.loss, expected[0]) and torch.equal(output.outputs, expected[1])
    assert output.labels is labels
    if returns_dict:
        unit = ModelUnit(model, lambda outputs, labels: F.cross_entropy(outputs.logits, labels))
        assert torch.allclose(unit(model, batch).required_loss(), expected[0])
        with torch.no_grad():  # for a regression of one row, whose only score is no loss
            model = bert(num_labels=1).eval()
            output = ModelUnit(model)(model, {"input_ids": IDS[:1]})
        assert output.loss is None and output.outputs.shape == (1, 1)


def test_causal_loss_counts_as_transformers(tmp_path: Path) -> None:
    config, labels = bert().config, torch.tensor([[1, 2, -100, 4], [5, -100, -100, 1]])
    for model in (llama(), BertForMaskedLM(config), BertForTokenClassification(config), t5()):
        trainer = transformers.Trainer(model, TrainingArguments(str(tmp_path), report_to=[], use_cpu=True))
        if not hasattr(trainer, "_loss_shifts_labels"):
            pytest.skip("this transformers does not count shifted labels yet")
        trainer.model_accepts_loss_kwargs = True
        expected = trainer._get_num_items_in_batch([{"labels": labels}], torch.device("cpu"))
        assert count_labels({"labels": labels}, shifts_by_default(model)) == int(expected), type(model)


@pytest.mark.parametrize("make", [llama, gpt])  # GPT2's loss has no name in transformers, and shifts all the same
def test_causal_loss_counts_shifted_labels(make: Any) -> None:
    model, labels = make().eval(), torch.tensor([[1, 2, -100, 4], [5, -100, -100, 1]])
    batch = {"input_ids": IDS[:, :4], "labels": labels}
    assert shifts_by_default(model) and count_labels(batch, True) == 3 and not shifts_by_default(Scores())
    total = model(**batch, num_items_in_batch=1).loss
    assert torch.allclose(ModelUnit(model)(model, batch).required_loss() * 3, total)


def test_loss_fn_error_reports_outputs() -> None:
    model = model_of(lambda self, x: (self.out(x), x))
    with pytest.raises(AttributeError) as caught:
        ModelUnit(model, F.mse_loss)(model, (X, Y))
    assert "a tuple of 2: a tensor of shape (3, 1), a tensor of shape (3, 2)" in caught.value.__notes__[0]


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.first, self.second, self.unused = (nn.Linear(2, 2) for _ in range(4))

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        hidden = self.body(x)
        return {"logits": self.first(hidden), "others": [self.second(hidden), self.unused(hidden)]}


@pytest.mark.parametrize("label", [1, -100])
def test_zero_grad_loss_keeps_graph(label: int) -> None:
    def loss_fn(outputs: dict[str, Any], labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(outputs["logits"], labels) + outputs["others"][0].square().mean()

    model = TwoHeads()
    output = ModelUnit(model, loss_fn)(model, (torch.ones(1, 2), torch.tensor([label])))
    assert bool(output.required_loss().isnan()) is (label == -100)
    without_effect(output, output.required_loss()).backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert {name for name, gradient in gradients.items() if gradient is None} == {"unused.weight", "unused.bias"}
    assert not any(gradient.any() for gradient in gradients.values() if gradient is not None)


@pytest.mark.parametrize("returns_more", [False, True])
def test_unit_of_whole_batches(returns_more: bool) -> None:
    def forward(self: Any, data: Any, scale: float = 1.0) -> Any:
        x, y = data.values() if isinstance(data, dict) else data
        loss = scale * F.mse_loss(self.scores(x), y)
        return (loss, self.scores(x)) if returns_more else loss

    model = model_of(forward)
    for batch in ({"x": X, "labels": Y}, (X, Y), [X, Y]):
        output = run_unit(WholeBatchUnit(), model, batch)
        assert output.required_loss().equal(F.mse_loss(model.scores(X), Y))
        assert (output.outputs is not None) == returns_more
        with torch.no_grad():
            assert run_unit(WholeBatchUnit(), model, batch).required_loss() == output.loss


def test_move_loss_moves_what_is_not_the_models() -> None:
    model, loss, meta = nn.Linear(2, 2), nn.CrossEntropyLoss(weight=torch.ones(2)), torch.device("meta")
    loss.teacher, loss.student = nn.Linear(2, 2), model
    move_loss(functools.partial(loss), model, meta)
    assert loss.teacher.weight.is_meta and not model.weight.is_meta
    del loss.student
    move_loss(loss, model, meta)
    assert loss.weight is not None and loss.weight.is_meta


class Weighted:
    """A unit with tensors and a loss as attributes, a frozen parameter, and parts of its model."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.bias = model, next(model.parameters())
        self.weights, self.scale = torch.ones(2), nn.Parameter(torch.ones(1), requires_grad=False)
        self.losses = {"ce": nn.CrossEntropyLoss(torch.ones(2)), "shares": torch.ones(2)}
        self.steps, self.name = [torch.ones(1), 3], "unit"

    def __call__(self, batch: Any) -> Any:
        return (self.model(batch[0]) - batch[1]).square().mean() * self.weights.mean()


def test_move_unit_moves_tensors_and_modules() -> None:
    """What it shares with the model stays, and a function has nothing."""
    model = Scores()
    unit, meta = Weighted(model), torch.device("meta")
    move_unit(unit, model, meta)
    moved = [unit.weights, unit.losses["ce"].weight, unit.losses["shares"], unit.steps[0], unit.scale]
    assert {tensor.device for tensor in moved} == {meta} and type(unit.scale) is nn.Parameter
    assert unit.bias is next(model.parameters()) and {one.device.type for one in model.parameters()} == {"cpu"}
    assert (unit.steps[1], unit.name) == (3, "unit")
    move_unit(lambda batch: batch, model, meta)
    move_unit(None, model, meta)


def test_unit_is_moved_to_the_device_of_the_trainer(trainer_class: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[torch.device] = []
    unit = Weighted(model := Scores())
    monkeypatch.setattr(unit.losses["ce"], "to", lambda device: moved.append(device))
    trainer = trainer_class(model, (X, Y), unit=unit, epochs=1, progress_bar=False)
    assert moved == [trainer.device]


def error_of(model: Any, batch: Any) -> torch.Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


class ModelTakingUnit(nn.Module):
    """Its method for evaluations takes the model, too; arguments with defaults do not count."""

    def forward(self, model: Any, batch: Any, scale: float = 1.0) -> torch.Tensor:
        return error_of(model, batch) * scale

    def evaluate(self, model: Any, batch: Any) -> StepOutput:
        return StepOutput(error_of(model, batch), model(batch[0]), batch[1])


def test_unit_with_two_arguments_gets_the_model(trainer_class: Any) -> None:
    first, *rest = (
        fit(trainer_class(t16(), rows(16), rows(4), learning_rate=0.1, batch_size=4, epochs=1, **options))
        for options in ({"loss_fn": F.mse_loss}, {"unit": error_of}, {"unit": ModelTakingUnit()})
    )
    assert all(same(weights(first.model), weights(other.model)) for other in rest)
