"""What is computed on one batch: every shape of model, loss and unit that is promised to work."""

from __future__ import annotations

import logging
from collections import namedtuple
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from omnitrain.errors import DataError
from omnitrain.units import (
    EvalUnit,
    ModelUnit,
    StepOutput,
    TrainUnit,
    WholeBatchUnit,
    count_labels,
    count_tokens,
    run_unit,
    shifts_labels,
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


def returning(shape: Callable[[Tensor, Tensor], Any]) -> Any:
    """A model that takes `x` and `labels` and returns a shape of its own from loss and scores."""

    class Model(Scores):
        def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:  # type: ignore[override]
            scores = self.scores(x)
            loss = F.mse_loss(scores, labels) if labels is not None else None
            return shape(loss, scores)  # type: ignore[arg-type]

    return Model()


def same(one: Any, other: Any) -> bool:
    return torch.equal(one, other)


Named = namedtuple("Named", "logits loss")
Second = namedtuple("Second", "scores loss")


# Where the loss is found

SHAPES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "an object": lambda loss, scores: SimpleNamespace(loss=loss, logits=scores),
    "a dict": lambda loss, scores: {"loss": loss, "logits": scores},
    "a dict with predictions": lambda loss, scores: {"predictions": scores, "hidden": scores + 1, "loss": loss},
    "a dict with another name": lambda loss, scores: {"loss": loss, "scores": scores},
    "a dict with a total": lambda loss, scores: {"total": loss, "scores": scores},
    "a tuple": lambda loss, scores: (loss, scores),
    "a list": lambda loss, scores: [loss, scores],
    "a named tuple": lambda loss, scores: Named(scores, loss),
    "a named tuple with other names": lambda loss, scores: Second(scores, loss),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_unit_finds_loss_of_model(shape: str) -> None:
    model = returning(SHAPES[shape])
    output = ModelUnit(model)(model, {"x": X, "labels": Y})
    scores = model.scores(X)
    assert same(output.loss, F.mse_loss(scores, Y))
    assert same(output.outputs, scores)
    assert output.labels is Y
    assert output.loss is not None and output.loss.requires_grad


@pytest.mark.parametrize("shape", SHAPES)
def test_unit_without_labels_has_scores(shape: str) -> None:
    if shape in ("a tuple", "a list"):
        pytest.skip("a tuple starts with the loss")
    model = returning(SHAPES[shape])
    with torch.no_grad():
        output = ModelUnit(model)(model, {"x": X})
    assert (output.loss, output.labels) == (None, None)
    assert same(output.outputs, model.scores(X))


def test_unit_scalar_output_is_loss() -> None:
    model = returning(lambda loss, scores: loss)
    output = ModelUnit(model)(model, {"x": X, "labels": Y})
    assert same(output.loss, F.mse_loss(model.scores(X), Y))
    assert output.outputs is None


def test_unit_loss_of_one_element() -> None:
    for shape in (
        lambda loss, scores: {"loss": loss.reshape(1), "logits": scores},
        lambda loss, scores: SimpleNamespace(loss=loss.reshape(1, 1), logits=scores),
    ):
        model = returning(shape)
        assert ModelUnit(model)(model, {"x": X, "labels": Y}).loss.shape == ()  # type: ignore[union-attr]


def test_unit_returns_several_scores() -> None:
    model = returning(lambda loss, scores: {"loss": loss, "start": scores, "end": scores + 1, "none": None})
    outputs = ModelUnit(model)(model, {"x": X, "labels": Y}).outputs
    assert same(outputs[0] + 1, outputs[1]) and len(outputs) == 2


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("dims", [1, 2])
@pytest.mark.parametrize("wrap", [lambda scores: scores, lambda scores: (scores, scores)], ids=["tensor", "tuple"])
@pytest.mark.parametrize("kind", ["tuple", "dict"])
def test_unit_score_of_one_sample_is_no_loss(kind: str, wrap: Any, dims: int, batch_size: int) -> None:
    class Model(Scores):
        def forward(self, x: Tensor) -> Any:
            scores = self.out(x)
            return wrap(scores if dims == 2 else scores[:, 0])

    model, x, y = Model(), X[:batch_size], Y[:batch_size]
    batch = (x, y) if kind == "tuple" else {"x": x, "labels": y}
    with torch.no_grad():
        output = ModelUnit(model)(model, batch)
    assert output.loss is None
    first = output.outputs if isinstance(output.outputs, Tensor) else output.outputs[0]
    assert first.shape == ((batch_size, 1) if dims == 2 else (batch_size,))
    with pytest.raises(DataError, match="No loss found"):
        ModelUnit(model)(model, batch)
    loss = ModelUnit(model, lambda outputs, labels: 7 * labels.sum())(model, batch)
    assert same(loss.loss, 7 * y.sum())
    assert loss.outputs is not None


# loss_fn


@pytest.mark.parametrize("batch", [(X, Y), [X, Y], {"x": X, "labels": Y}, {"x": X, "target": Y}], ids=str)
def test_loss_fn_gets_outputs_and_labels(batch: Any) -> None:
    model = Scores()
    output = ModelUnit(model, F.mse_loss)(model, batch)
    assert same(output.loss, F.mse_loss(model.scores(X), Y))
    assert same(output.outputs, model.scores(X))
    assert output.labels is Y


def test_loss_fn_replaces_loss_of_model() -> None:
    model = returning(lambda loss, scores: {"loss": loss, "logits": scores})
    seen: list[Any] = []

    def loss_fn(outputs: Any, labels: Tensor) -> Tensor:
        seen.append(outputs["loss"])
        return 2 * F.mse_loss(outputs["logits"], labels)

    output = ModelUnit(model, loss_fn)(model, {"x": X, "labels": Y})
    assert same(output.loss, 2 * F.mse_loss(model.scores(X), Y))
    assert seen == [None]  # the labels were not passed to the model, which would have computed a loss in vain
    assert same(output.outputs, model.scores(X))


def test_loss_fn_with_model_that_needs_labels() -> None:
    class Model(Scores):
        def forward(self, x: Tensor, labels: Tensor) -> Tensor:  # type: ignore[override]
            return self.scores(x) + 0 * labels

    model = Model()
    assert ModelUnit(model, F.mse_loss)(model, {"x": X, "labels": Y}).loss is not None


def test_unit_passes_inputs_in_order() -> None:
    class Model(Scores):
        def forward(self, x: Tensor, shift: Tensor) -> Tensor:  # type: ignore[override]
            return self.scores(x) + shift

    model = Model()
    output = ModelUnit(model, F.mse_loss)(model, (X, Y, Y + 1))
    assert same(output.outputs, model.scores(X) + Y)
    assert same(output.labels, Y + 1)


@pytest.mark.parametrize("batch", [X, (X,), [X], {"x": X}], ids=["tensor", "tuple", "list", "dict"])
def test_loss_fn_without_labels_in_training(batch: Any) -> None:
    model = Scores()
    output = ModelUnit(model, lambda outputs, labels: outputs.sum() if labels is None else Y)(model, batch)
    assert same(output.loss, model.scores(X).sum())
    with torch.no_grad():
        output = ModelUnit(model, F.mse_loss)(model, batch)  # which would fail on labels=None
    assert output.loss is None
    assert same(output.outputs, model.scores(X))


# What is passed to the model


def test_unit_drops_unknown_keys_and_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    model = returning(lambda loss, scores: {"loss": loss, "logits": scores})
    unit = ModelUnit(model)
    with caplog.at_level(logging.WARNING, "omnitrain"):
        for _ in range(3):
            unit(model, {"x": X, "labels": Y, "text": ["a"], "idx": Y})
    assert [record.getMessage().split()[2] for record in caplog.records] == ["'text'", "'idx'"]


def test_unit_passes_labels_to_loss_fn_silently(caplog: pytest.LogCaptureFixture) -> None:
    model = Scores()
    with caplog.at_level(logging.WARNING, "omnitrain"):
        ModelUnit(model, F.mse_loss)(model, {"x": X, "label": Y})
    assert not caplog.records


@pytest.mark.parametrize("loss_fn", [None, lambda outputs, labels: outputs["sum"]])
def test_unit_passes_every_key_to_kwargs(loss_fn: Any, caplog: pytest.LogCaptureFixture) -> None:
    class Model(Scores):
        def forward(self, **batch: Any) -> Any:
            return {"loss": self.scores(batch["x"]).sum(), "sum": self.scores(batch["x"]).sum(), "keys": list(batch)}

    model = Model()
    with caplog.at_level(logging.WARNING, "omnitrain"):
        output = ModelUnit(model, loss_fn)(model, {"x": X, "labels": Y, "text": ["a"]})
    assert output.outputs[-1] == (["x", "labels", "text"] if loss_fn is None else ["x", "text"])
    assert not caplog.records


@pytest.mark.parametrize("key", ["label", "label_ids", "targets", "target"])
@pytest.mark.parametrize("any_keyword", [False, True])
def test_unit_passes_labels_of_other_name(key: str, any_keyword: bool) -> None:
    class Any_(Scores):
        def forward(self, x: Tensor, labels: Tensor | None = None, **rest: Any) -> Any:  # type: ignore[override]
            assert not rest
            return {"loss": F.mse_loss(self.scores(x), labels)}  # type: ignore[arg-type]

    model = Any_() if any_keyword else returning(lambda loss, scores: {"loss": loss})
    output = ModelUnit(model)(model, {"x": X, key: Y})
    assert same(output.loss, F.mse_loss(model.scores(X), Y))
    assert output.labels is Y


def test_unit_passes_label_by_name() -> None:
    class Model(Scores):
        def forward(self, x: Tensor, label: Tensor, labels: Tensor | None = None) -> Any:  # type: ignore[override]
            assert labels is None
            return {"loss": F.mse_loss(self.scores(x), label)}

    model = Model()
    assert ModelUnit(model)(model, {"x": X, "label": Y}).loss is not None


def test_unit_signature_of_compiled_model(caplog: pytest.LogCaptureFixture) -> None:
    model = returning(lambda loss, scores: {"loss": loss, "logits": scores})
    compiled = torch.compile(model, backend="eager")
    output = ModelUnit(compiled)(model, {"x": X, "label": Y, "text": ["a"]})  # type: ignore[arg-type]
    assert same(output.loss, F.mse_loss(model.scores(X), Y))
    assert "'text'" in caplog.text


# Composer's shape


def composer(loss: Callable[[Tensor, Any], Any]) -> Any:
    class Model(Scores):
        def forward(self, batch: Any) -> Tensor:
            return self.scores(batch[0])

        def loss(self, outputs: Any, batch: Any) -> Any:
            return loss(outputs, batch[1])

    return Model()


@pytest.mark.parametrize(
    "loss",
    [
        F.mse_loss,
        lambda outputs, labels: (F.mse_loss(outputs, labels) / 2, F.mse_loss(outputs, labels) / 2),
        lambda outputs, labels: {"total": F.mse_loss(outputs, labels), "part": outputs.sum()},
        lambda outputs, labels: {"a": F.mse_loss(outputs, labels) / 2, "b": F.mse_loss(outputs, labels) / 2},
    ],
    ids=["tensor", "tuple", "total", "parts"],
)
def test_unit_calls_composer_loss(loss: Any) -> None:
    model = composer(loss)
    output = ModelUnit(model)(model, (X, Y))
    assert torch.allclose(output.loss, F.mse_loss(model.scores(X), Y))  # type: ignore[arg-type]
    assert same(output.outputs, model.scores(X))
    assert output.labels is Y


def test_unit_skips_composer_loss() -> None:
    def fail(outputs: Any, labels: Any) -> Tensor:
        raise AssertionError

    model = composer(fail)
    with torch.no_grad():
        assert ModelUnit(model)(model, (X,)).loss is None
    plain = Scores()
    plain.loss = fail  # type: ignore[assignment]
    assert ModelUnit(plain, F.mse_loss)(plain, (X, Y)).loss is not None


def test_unit_ignores_other_loss_methods() -> None:
    class Model(Scores):
        def loss(self, scores: Tensor, labels: Tensor) -> Tensor:
            return F.mse_loss(scores, labels)

        def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:  # type: ignore[override]
            scores = self.scores(x)
            return {"loss": self.loss(scores, labels), "logits": scores}  # type: ignore[arg-type]

    model = Model()
    assert same(ModelUnit(model)(model, {"x": X, "labels": Y}).loss, F.mse_loss(model.scores(X), Y))


# What is no loss


@pytest.mark.parametrize(
    "shape, words",
    [
        (lambda loss, scores: scores, r"a tensor of shape \(3,\)"),
        (lambda loss, scores: {"logits": scores}, "a dict with the keys 'logits'"),
        (lambda loss, scores: (scores, loss), r"a tuple of 2: a tensor of shape \(3,\)"),
        (lambda loss, scores: {"loss": None, "logits": scores}, "No loss found"),
        (lambda loss, scores: {"loss": 0.5}, "No loss found"),
        (lambda loss, scores: SimpleNamespace(logits=scores), "SimpleNamespace"),
        (lambda loss, scores: None, "None"),
        (lambda loss, scores: (), "a tuple of 0"),
        (lambda loss, scores: {"loss": scores}, r"must be a scalar, got a tensor of shape \(3,\)"),
    ],
)
def test_unit_rejects_output_without_loss(shape: Any, words: str) -> None:
    model = returning(shape)
    with pytest.raises(DataError, match=words):
        ModelUnit(model)(model, {"x": X, "labels": Y})


def test_unit_rejects_loss_per_sample() -> None:
    model = Scores()
    unit = ModelUnit(model, nn.MSELoss(reduction="none"))
    for context in (torch.no_grad(), torch.enable_grad()):
        with context, pytest.raises(DataError, match=r"scalar, got a tensor of shape \(3,\).*reduction='mean'"):
            unit(model, (X, Y))


def test_unit_needs_loss_in_training() -> None:
    with pytest.raises(DataError, match="needs a loss"):
        StepOutput(None).required_loss()
    assert StepOutput(Y.sum()).required_loss() == 6


# Dicts of losses, and metrics


class InComposersShape(Scores):
    def forward(self, batch: Any) -> Tensor:  # type: ignore[override]
        return self.scores(batch[0])

    def loss(self, outputs: Tensor, batch: Any) -> Any:
        return losses_of(outputs, batch[1])


def losses_of(scores: Tensor, labels: Tensor) -> dict[str, Tensor]:
    return {"mse": F.mse_loss(scores, labels), "loss_l1": F.l1_loss(scores, labels)}


def outputs_of(model: Any) -> list[StepOutput]:
    """What comes of the same model where its loss is a dict, by each way that there is for it to be one."""
    composer, inside = InComposersShape(), returning(lambda loss, scores: {"loss": losses_of(scores, Y), "y": scores})
    for one in (composer, inside):
        one.load_state_dict(model.state_dict())
    return [
        ModelUnit(model, losses_of)(model, (X, Y)),
        ModelUnit(composer)(composer, (X, Y)),
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


def test_unit_total_is_loss() -> None:
    model = Scores()
    output = ModelUnit(model, lambda s, y: {**losses_of(s, y), "total": s.sum()})(model, (X, Y))
    assert torch.equal(output.required_loss(), model.scores(X).sum())
    assert list(output.metrics or {}) == ["loss_mse", "loss_l1"]


def test_unit_divides_parts_of_sum() -> None:
    losses = {"a": torch.tensor(6.0), "b": torch.tensor(3.0)}
    for count in (4, torch.tensor(4)):
        output = run_unit(lambda batch, count=count: (losses, count), None, (X, Y))
        assert (output.loss, output.num_targets) == (9.0, 4)
        assert output.metrics == {"loss_a": 1.5, "loss_b": 0.75}
    assert run_unit(lambda batch: (losses, 0), None, (X, Y)).loss == 9.0


def test_unit_rejects_part_called_loss() -> None:
    model = Scores()
    with pytest.raises(DataError, match=r"'loss', 'kl', .* Call the sum 'total'"):
        ModelUnit(model, lambda s, y: {"loss": s.sum(), "kl": s.mean()})(model, (X, Y))


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


def test_unit_rejects_unnamed_metrics() -> None:
    with pytest.raises(DataError, match=r"`metrics` must be a dict.*a tuple of 1"):
        StepOutput(Y.sum(), metrics=(1.0,))  # type: ignore[arg-type]


# Units of the user's own


def unit_returning(result: Any) -> Any:
    return lambda batch: result


def test_unit_returns_mean_or_sum() -> None:
    loss = torch.tensor(2.0)
    batch = {"x": X, "labels": Y}
    mean = run_unit(unit_returning(loss), None, batch)
    assert (mean.loss, mean.num_targets, mean.labels) == (loss, None, Y)
    total = run_unit(unit_returning((loss, 5)), None, batch)
    assert (total.loss, total.num_targets) == (loss, 5)
    assert run_unit(unit_returning((loss, None)), None, batch).num_targets is None
    assert run_unit(unit_returning((loss, torch.tensor(5))), None, batch).num_targets == 5
    assert run_unit(unit_returning(loss.reshape(1)), None, batch).loss.shape == ()  # type: ignore[union-attr]
    output = StepOutput(loss)
    assert run_unit(unit_returning(output), None, batch) is output


@pytest.mark.parametrize("result", [None, 1.0, X, (X, 2), (), (Y.sum(), 1, 2), {}, {"a": X}], ids=str)
def test_unit_rejects_wrong_results(result: Any) -> None:
    with pytest.raises(DataError, match="`unit` must return a scalar loss or"):
        run_unit(unit_returning(result), None, (X, Y))


def test_unit_evaluate_runs_without_gradients() -> None:
    class Both:
        def __call__(self, batch: Any) -> Tensor:
            return Y.sum()

        def evaluate(self, batch: Any) -> StepOutput:
            return StepOutput(Y.mean(), outputs=batch)

    unit = Both()
    assert isinstance(unit, TrainUnit) and isinstance(unit, EvalUnit)
    assert run_unit(unit, None, X).loss == 6
    with torch.no_grad():
        assert run_unit(unit, None, X).loss == 2
        assert run_unit(unit_returning(Y.sum()), None, X).loss == 6


def test_unit_runs_given_model() -> None:
    bare, wrapped = Scores(), Scores()
    assert same(run_unit(ModelUnit(bare, F.mse_loss), wrapped, (X, Y)).outputs, wrapped.scores(X))


# Counting


LABELS = torch.tensor([[1, -100, 2], [-100, -100, 3]])


@pytest.mark.parametrize(
    "batch, count, shifted",
    [
        ({"labels": LABELS}, 3, 2),
        ((X, LABELS), 3, 2),
        ({"targets": LABELS.int()}, 3, 2),
        ({"labels": LABELS, "shift_labels": LABELS[:, :2]}, 1, 1),
        ({"labels": torch.full((2, 3), -100)}, 0, 0),
        ({"labels": torch.ones(2, 3, dtype=torch.bool)}, 6, 4),
        ({"labels": torch.ones(2, 3, dtype=torch.uint8)}, 6, 4),
        ({"labels": torch.ones(2, 3)}, None, None),
        ({"labels": torch.tensor([1, 2])}, None, None),
        ({"labels": ["a", "b"]}, None, None),
        ({"x": LABELS}, None, None),
        (LABELS, None, None),
    ],
    ids=lambda value: "" if isinstance(value, (dict, tuple, Tensor)) else str(value),
)
def test_count_labels(batch: Any, count: int | None, shifted: int | None) -> None:
    assert count_labels(batch) == count
    assert count_labels(batch, shifted=True) == shifted


@given(st.lists(st.lists(st.sampled_from([-100, 0, 5]), min_size=4, max_size=4), min_size=1, max_size=4))
def test_count_labels_by_hand(rows: list[list[int]]) -> None:
    batch = {"labels": torch.tensor(rows)}
    assert count_labels(batch) == sum(label != -100 for row in rows for label in row)
    assert count_labels(batch, shifted=True) == sum(label != -100 for row in rows for label in row[1:])


def test_count_tokens() -> None:
    mask, ids = torch.tensor([[1, 1, 0], [1, 0, 0]]), torch.ones(2, 3, dtype=torch.long)
    assert count_tokens({"input_ids": ids, "attention_mask": mask, "labels": LABELS}) == 3
    assert count_tokens({"input_ids": ids, "labels": LABELS}) == 6
    assert count_tokens({"labels": LABELS}) == 3
    assert count_tokens((X, Y)) == count_tokens(X) == count_tokens({"x": X}) == 0


# transformers


@pytest.fixture(scope="module")
def hf() -> Any:
    return pytest.importorskip("transformers")


TINY = {"vocab_size": 20, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
IDS = torch.randint(1, 20, (2, 5), generator=torch.Generator().manual_seed(0))


def llama(hf: Any) -> nn.Module:
    return hf.LlamaForCausalLM(hf.LlamaConfig(**TINY, num_key_value_heads=2))


def gpt2(hf: Any) -> nn.Module:
    ids = {"bos_token_id": 1, "eos_token_id": 2}
    return hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=20, n_embd=8, n_layer=1, n_head=2, **ids))


@pytest.mark.parametrize("key", ["labels", "label"])
def test_unit_transformers_classifier(hf: Any, key: str) -> None:
    model = hf.BertForSequenceClassification(hf.BertConfig(**TINY)).eval()
    labels = torch.tensor([0, 1])
    output = ModelUnit(model)(model, {"input_ids": IDS, key: labels, "idx": labels})
    expected = model(input_ids=IDS, labels=labels)
    assert same(output.loss, expected.loss)
    assert same(output.outputs, expected.logits)
    assert output.labels is labels


def test_unit_transformers_tuples(hf: Any) -> None:
    model = hf.BertForSequenceClassification(hf.BertConfig(**TINY, return_dict=False)).eval()
    output = ModelUnit(model)(model, {"input_ids": IDS, "labels": torch.tensor([0, 1])})
    assert output.loss is not None and output.loss.shape == ()
    assert output.outputs.shape == (2, 2)


def test_unit_takes_batch_encoding(hf: Any) -> None:
    model = hf.BertForSequenceClassification(hf.BertConfig(**TINY)).eval()
    batch = hf.BatchEncoding({"input_ids": IDS, "labels": torch.tensor([0, 1])})
    assert ModelUnit(model)(model, batch).loss is not None
    assert (
        ModelUnit(model, lambda outputs, labels: F.cross_entropy(outputs.logits, labels))(model, batch).loss is not None
    )


def test_unit_transformers_regression_batch_of_one(hf: Any) -> None:
    model = hf.BertForSequenceClassification(hf.BertConfig(**TINY, num_labels=1)).eval()
    with torch.no_grad():
        output = ModelUnit(model)(model, {"input_ids": IDS[:1]})
    assert output.loss is None
    assert output.outputs.shape == (1, 1)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])  # GPT2's loss has no name in transformers, and shifts all the same
def test_causal_loss_counts_shifted_labels(hf: Any, kind: str) -> None:
    model = llama(hf).eval() if kind == "llama" else gpt2(hf).eval()
    labels = IDS.clone()
    labels[0, :3] = -100
    labels[1, 4] = -100
    batch = {"input_ids": IDS, "labels": labels}
    assert shifts_labels(model)
    output, count = ModelUnit(model)(model, batch), count_labels(batch, shifts_labels(model))
    assert count == 5
    total = model(**batch, num_items_in_batch=1).loss
    assert torch.allclose(output.loss * count, total)  # type: ignore[operator]


def test_causal_loss_counts_as_transformers(hf: Any, tmp_path: Any) -> None:
    config = hf.BertConfig(**TINY)
    models = {
        "causal": llama(hf),
        "masked": hf.BertForMaskedLM(config),
        "tokens": hf.BertForTokenClassification(config),
        "both": hf.T5ForConditionalGeneration(
            hf.T5Config(vocab_size=20, d_model=8, d_ff=8, d_kv=4, num_layers=1, num_heads=2, decoder_start_token_id=0)
        ),
    }
    labels = torch.tensor([[1, 2, -100, 4], [5, -100, -100, 1]])
    for name, model in models.items():
        trainer = hf.Trainer(model, hf.TrainingArguments(str(tmp_path), report_to=[], use_cpu=True))
        if not hasattr(trainer, "_loss_shifts_labels"):
            pytest.skip("this transformers does not count shifted labels yet")
        trainer.model_accepts_loss_kwargs = True
        theirs = trainer._get_num_items_in_batch([{"labels": labels}], torch.device("cpu"))
        assert (name, count_labels({"labels": labels}, shifts_labels(model))) == (name, int(theirs))


def test_other_models_do_not_shift() -> None:
    assert not shifts_labels(Scores())


def test_unit_annotates_batch() -> None:
    class Own(TrainUnit[dict[str, torch.Tensor]]):
        def __call__(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            return batch["x"].sum()

    assert isinstance(Own(), TrainUnit)


def test_unit_missing_labels_reports_keys() -> None:
    unit = ModelUnit(nn.Linear(4, 1), F.mse_loss)
    with pytest.raises(DataError, match=r"labels=None.*the keys 'input', 'answer'.*label_names=\['answer'\]"):
        unit(nn.Linear(4, 1), {"input": torch.ones(2, 4), "answer": torch.ones(2, 1)})


def test_unit_loss_without_labels() -> None:
    unit = ModelUnit(nn.Linear(4, 1), lambda outputs, labels: outputs.mean())
    assert unit(nn.Linear(4, 1), {"input": torch.ones(2, 4)}).loss is not None


@pytest.mark.parametrize("loss", [None, 0.5])
def test_loss_fn_rejects_non_tensor(loss: Any) -> None:
    unit = ModelUnit(nn.Linear(4, 1), lambda outputs, labels: loss)
    with pytest.raises(DataError, match=r"`loss_fn` returned (NoneType|float)"):
        unit(nn.Linear(4, 1), (torch.ones(2, 4), torch.ones(2, 1)))


def test_loss_fn_error_reports_outputs() -> None:
    class Pair(nn.Linear):
        def forward(self, x: torch.Tensor) -> Any:
            return super().forward(x), x

    with pytest.raises(AttributeError) as caught:
        ModelUnit(Pair(4, 1), F.mse_loss)(Pair(4, 1), (torch.ones(2, 4), torch.ones(2, 1)))
    assert "a tuple of 2: a tensor of shape (2, 1), a tensor of shape (2, 4)" in caught.value.__notes__[0]


@pytest.mark.parametrize("loss_fn", [None, F.mse_loss])
def test_unit_missing_input_reports_keys(loss_fn: Any) -> None:
    with pytest.raises(DataError, match=r"forward\(\) needs 'input', and the batch has the keys 'x', 'labels'"):
        ModelUnit(nn.Linear(4, 1), loss_fn)(nn.Linear(4, 1), {"x": torch.ones(2, 4), "labels": torch.ones(2, 1)})


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
    loss = output.required_loss()
    assert bool(loss.isnan()) is (label == -100)
    without_effect(output, loss).backward()
    gradients = {name: one.grad for name, one in model.named_parameters()}
    assert {name for name, one in gradients.items() if one is None} == {"unused.weight", "unused.bias"}
    assert not any(one.any() for one in gradients.values() if one is not None)


@pytest.mark.parametrize("batch", [{"x": X, "labels": Y}, (X, Y), [X, Y]])
@pytest.mark.parametrize("returns_more", [False, True])
def test_unit_of_whole_batches(batch: Any, returns_more: bool) -> None:
    class Whole(Scores):
        def forward(self, data: Any, scale: float = 1.0) -> Any:
            x, y = data.values() if isinstance(data, dict) else data
            scores = self.out(x).squeeze(1)
            loss = scale * F.mse_loss(scores, y)
            return (loss, scores) if returns_more else loss

    model = Whole()
    output = run_unit(WholeBatchUnit(), model, batch)
    assert output.required_loss().equal(F.mse_loss(model.out(X).squeeze(1), Y))
    assert (output.outputs is not None) == returns_more
    with torch.no_grad():
        assert run_unit(WholeBatchUnit(), model, batch).required_loss() == output.loss
