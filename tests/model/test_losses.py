"""Losses: PyTorch's numbers, a mean that no split changes, and no more memory than a chunk needs."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from recipes import fit, trainer_on_cpu
from tiny import Tokens, bert, gpt, llama
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaForCausalLM

from omnitrain import CrossEntropy, Trainer, WeightedLosses, chunked_cross_entropy
from omnitrain.checkpoint.fingerprints import code_digest
from omnitrain.core.errors import ConfigError, DataError
from omnitrain.model.losses import divisor_of, total_of

WEIGHTS = torch.tensor([1.0, 10.0, 0.0, 0.1], dtype=torch.float64)


def drawn(rows: int = 12, time: int = 5, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Scores of 4 classes and labels, of which every third is -100 and one 3."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(rows, time, 4, generator=generator, dtype=torch.float64).mul(3).requires_grad_()
    labels = torch.randint(0, 4, (rows, time), generator=generator)
    labels.view(-1)[::3] = -100
    return scores, labels


@pytest.mark.parametrize("weight", [None, WEIGHTS], ids=["", "weights"])
@pytest.mark.parametrize(("ignored", "smoothing"), [(-100, 0.0), (3, 0.1)])
def test_cross_entropy_equals_pytorch(weight: Tensor | None, ignored: int, smoothing: float) -> None:
    scores, labels = drawn()
    weight = weight if weight is None else weight + 0.2
    labels = labels.where(labels >= 0, 3) if ignored == 3 else labels
    theirs = nn.CrossEntropyLoss(weight, ignore_index=ignored, label_smoothing=smoothing)
    expected = theirs(scores.flatten(0, 1), labels.flatten())
    for outputs in (scores, {"logits": scores, "x": 1}, (scores, 1), SimpleNamespace(logits=scores)):
        loss = CrossEntropy(weight, ignored, smoothing)(outputs, labels)
        assert isinstance(loss, Tensor) and torch.equal(loss, expected)
    probabilities = F.one_hot(labels.clamp(min=0), 4).double()
    loss = CrossEntropy(weight, label_smoothing=smoothing)(scores, probabilities)
    theirs = nn.CrossEntropyLoss(weight, label_smoothing=smoothing)
    assert torch.equal(total_of(loss), theirs(scores.flatten(0, 1), probabilities.flatten(0, 1)))


def test_cross_entropy_z_loss() -> None:
    scores, labels = drawn()
    counted = labels != -100
    squares = scores.logsumexp(-1) ** 2
    parts: Any = CrossEntropy(z_loss=0.01)(scores, labels)
    assert list(parts) == ["ce", "z"] and torch.equal(parts["ce"], total_of(CrossEntropy()(scores, labels)))
    torch.testing.assert_close(parts["z"], 0.01 * squares[counted].mean())
    parts = CrossEntropy(WEIGHTS, z_loss=0.01)(scores, labels)
    weights = WEIGHTS[labels[counted]]
    torch.testing.assert_close(parts["z"], 0.01 * (squares[counted] * weights).sum() / weights.sum())
    parts = CrossEntropy(z_loss=0.01)(scores, scores.softmax(-1).detach())
    torch.testing.assert_close(parts["z"], 0.01 * squares.mean())


def test_cross_entropy_shift() -> None:
    scores, labels = drawn()
    shifted, plain = CrossEntropy(shift=True), CrossEntropy()
    assert torch.equal(total_of(shifted(scores, labels)), total_of(plain(scores[:, :-1], labels[:, 1:])))
    assert shifted.mean_over(labels) == plain.mean_over(labels[:, 1:]) != plain.mean_over(labels)


def test_cross_entropy_sums_half_precision_in_fp32() -> None:
    scores, labels = drawn()
    loss = CrossEntropy(WEIGHTS, z_loss=1e-3)
    expected = total_of(loss(scores, labels)).float()
    for dtype in (torch.float16, torch.bfloat16):
        value = total_of(loss(scores.detach().to(dtype), labels.int()))
        assert value.dtype == torch.float32
        torch.testing.assert_close(value, expected, rtol=1e-2, atol=0)


LOSSES: dict[str, Any] = {
    "everything": CrossEntropy(WEIGHTS + 0.2, 3, 0.1, 1e-2),
    "shifted": CrossEntropy(z_loss=1e-2, shift=True),
    "several": WeightedLosses({"a": CrossEntropy(WEIGHTS), "b": CrossEntropy(WEIGHTS, z_loss=0.1)}, {"b": 0.5}),
}


@pytest.mark.parametrize("name", LOSSES)
@settings(max_examples=15)
@given(st.integers(0, 99), st.lists(st.integers(1, 6), min_size=1, max_size=6))
def test_cross_entropy_is_right_in_every_split(name: str, seed: int, sizes: list[int]) -> None:
    loss = LOSSES[name]
    scores, labels = drawn(sum(sizes), 4, seed)
    labels = labels.where(labels >= 0, 3) if name == "everything" else labels
    parts = [*zip(scores.split(sizes), labels.split(sizes), strict=True)]
    counts = [divisor_of(loss, part) or 0.0 for _, part in parts]
    whole = total_of(loss(scores, labels))
    if not sum(counts):
        assert whole.isnan()
        return
    total = sum(count * total_of(loss(*part)) for count, part in zip(counts, parts, strict=True) if count)
    torch.testing.assert_close(total / sum(counts), whole, rtol=1e-12, atol=0)


def test_cross_entropy_ignores_labels_of_one_dimension() -> None:
    labels = torch.tensor([0, 3, -100, 3])
    for loss, count in ((nn.CrossEntropyLoss(ignore_index=3), 2), (nn.CrossEntropyLoss(), 3)):
        assert divisor_of(loss, labels) == count
        assert divisor_of(loss, labels.double()) is None and divisor_of(loss, None) is None
    for other in (nn.CrossEntropyLoss(reduction="sum"), F.cross_entropy):
        assert divisor_of(other, labels) is None


def chunked(**changes: Any) -> Any:
    arguments = {"hidden": torch.ones(4, 3), "weight": torch.ones(9, 3), "labels": torch.ones(4).long(), **changes}
    return chunked_cross_entropy(**arguments)


WRONG_OPTIONS: list[tuple[Any, type[Exception], str]] = [
    (lambda: CrossEntropy(label_smoothing=1.0), ConfigError, "`label_smoothing`.*1.0"),
    (lambda: CrossEntropy(label_smoothing=True), ConfigError, "`label_smoothing`.*True"),
    (lambda: CrossEntropy(z_loss=-1e-4), ConfigError, "`z_loss`.*-0.0001"),
    (lambda: CrossEntropy(z_loss=math.inf), ConfigError, "`z_loss`.*inf"),
    (lambda: CrossEntropy(weight=[1.0, -1.0]), ConfigError, "`weight`.*-1.0"),
    (lambda: CrossEntropy(weight=torch.ones(2, 2)), ConfigError, "`weight`"),
    (lambda: CrossEntropy(weight=[1.0, 0.0], label_smoothing=0.1), ConfigError, "counts 0"),
    (lambda: CrossEntropy()(torch.ones(2, 4, 3), torch.ones(2, 3).long()), DataError,
     r"shape \(2, 4\).*int64 of shape \(2, 3\).*nn.CrossEntropyLoss"),
    (lambda: CrossEntropy()(torch.ones(2, 4), torch.ones(2, 1).long()), DataError, r"\(2,\).*int64 of shape \(2, 1\)"),
    (lambda: CrossEntropy()(torch.ones(2, 4), torch.ones(2)), DataError, r"float32 of shape \(2,\)"),
    (lambda: CrossEntropy()(torch.ones(2, 4), None), DataError, "NoneType"),
    (lambda: CrossEntropy()(torch.ones(4), torch.ones(()).long()), DataError, r"Tensor of shape \(4,\)"),
    (lambda: CrossEntropy()({"loss": 1.0}, torch.ones(2).long()), DataError, "got a dict"),
    (lambda: WeightedLosses({}), ConfigError, "at least one"),
    (lambda: WeightedLosses({"total": F.mse_loss}), ConfigError, "'total'"),
    (lambda: WeightedLosses({"a": 1.0}), ConfigError, "'a': 1.0"),
    (lambda: WeightedLosses({"kl": F.mse_loss}, {"kl_": 1.0}), ConfigError, "'kl_'.*Did you mean 'kl'"),
    (lambda: WeightedLosses({"kl": F.mse_loss}, {"kl": "1"}), ConfigError, "'kl'.*got '1'"),
    (lambda: chunked(chunk_size=0), ConfigError, "`chunk_size`.*0"),
    (lambda: chunked(chunk_size=2.5), ConfigError, "`chunk_size`.*2.5"),
    (lambda: chunked(z_loss=-1), ConfigError, "`z_loss`"),
    (lambda: chunked(labels=torch.ones(5).long()), DataError, r"\(4, 3\).*\(5,\)"),
    (lambda: chunked(labels=torch.ones(4)), DataError, "float32"),
    (lambda: chunked(weight=torch.ones(9, 4)), DataError, r"\(9, 4\)"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "error", "words"), WRONG_OPTIONS)
def test_losses_reject_wrong_values(call: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        call()


def test_unshifted_loss_for_causal_model_is_rejected() -> None:
    options: dict[str, Any] = {"train_dataset": Tokens(4), "device": "cpu"}
    for loss in (CrossEntropy(), WeightedLosses({"ce": CrossEntropy()})):
        with pytest.raises(ConfigError, match=r"GPT2LMHeadModel predicts.*shift=True"):
            Trainer(gpt(), loss_fn=loss, **options)
    Trainer(bert(), loss_fn=CrossEntropy(), **options)
    whole = Trainer(gpt(), eval_dataset=Tokens(6), loss_fn=CrossEntropy(shift=True), eval_batch_size=2, **options)
    theirs = Trainer(gpt(), eval_dataset=Tokens(6), eval_batch_size=6, **options)
    assert whole.evaluate()["eval_loss"] == pytest.approx(theirs.evaluate()["eval_loss"], abs=1e-6)


def test_weighted_losses_are_summed_and_logged() -> None:
    x, y = torch.tensor([3.0, 1.0]), torch.tensor([0.0, 0.0])
    losses = WeightedLosses({"mse": F.mse_loss, "l1": nn.L1Loss()}, {"l1": 0.25})(x, y)
    assert losses == {"mse": 5.0, "l1": 2.0, "total": 5.5}
    losses = WeightedLosses({"lm": CrossEntropy(z_loss=0.1)}, {"lm": 2})(*drawn())
    assert list(losses) == ["lm", "lm_ce", "lm_z", "total"]
    assert torch.equal(losses["total"], 2 * (losses["lm_ce"] + losses["lm_z"]))


def test_weighted_losses_reject_other_denominators() -> None:
    _, labels = drawn()
    both = WeightedLosses({"ce": CrossEntropy(WEIGHTS), "other": nn.CrossEntropyLoss()})
    with pytest.raises(DataError, match=r"over .*\(ce\), 40 \(other\)"):
        both.mean_over(labels)
    assert WeightedLosses({"a": nn.MSELoss(), "b": nn.L1Loss()}).mean_over(labels) is None
    assert WeightedLosses({"a": CrossEntropy(), "b": nn.L1Loss()}).mean_over(labels) == 40
    with pytest.raises(DataError, match=r"3 \(a\), 4 \(b\)"):
        WeightedLosses({"a": CrossEntropy(), "b": nn.L1Loss()}).mean_over(torch.tensor([0, 1, -100, 2]))


def test_resume_reports_other_loss() -> None:
    def make(**options: Any) -> str | None:
        return code_digest(WeightedLosses({"ce": CrossEntropy(**options)}))

    digests = {make(), make(z_loss=1e-4), make(shift=True), make(label_smoothing=0.1), make(weight=[1.0, 2.0])}
    digests |= {code_digest(CrossEntropy()), code_digest(CrossEntropy(z_loss=1e-4))}
    digests |= {code_digest(WeightedLosses({"ce": CrossEntropy()}, {"ce": 2.0}))}
    assert len(digests) == 8 and make() == make()


class Largest(TorchDispatchMode):
    """Notes how many entries the largest tensor has that an operation returns."""

    size = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, (tuple, list)) else [result]:
            self.size = max(self.size, value.numel() if isinstance(value, Tensor) else 0)
        return result


@pytest.mark.parametrize(("chunk", "smoothing", "z_loss"), [(1, 0.1, 1e-2), (7, 0.0, 0.0), (100, 0.1, 1e-2)])
def test_chunked_cross_entropy_equals_full(chunk: int, smoothing: float, z_loss: float) -> None:
    torch.manual_seed(0)
    rows, features, classes = (3, 7), 6, 50
    head = nn.Linear(features, classes, dtype=torch.float64)
    hidden = torch.randn(*rows, features, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, classes, rows)
    labels[0] = -100
    inputs = [hidden, *head.parameters()]
    full = total_of(CrossEntropy(label_smoothing=smoothing, z_loss=z_loss)(head(hidden), labels))
    expected = torch.autograd.grad(3 * full, inputs)
    with Largest() as largest:
        loss = chunked_cross_entropy(
            hidden, head.weight, labels, head.bias, label_smoothing=smoothing, z_loss=z_loss, chunk_size=chunk
        )
        assert isinstance(loss, dict) == bool(z_loss)
        gradients = torch.autograd.grad(3 * total_of(loss), inputs)
    assert largest.size == max(min(chunk, 21) * classes, head.weight.numel())
    torch.testing.assert_close(total_of(loss), full, rtol=1e-12, atol=0)
    torch.testing.assert_close(gradients, expected, rtol=1e-10, atol=1e-12)


def test_chunked_cross_entropy_without_labels() -> None:
    hidden, weight = torch.randn(4, 3, requires_grad=True), torch.randn(9, 3)
    loss = total_of(chunked_cross_entropy(hidden, weight, torch.full((4,), -100), z_loss=1e-3))
    loss.backward()
    assert loss == 0 and not hidden.grad.any()  # type: ignore[union-attr]


def test_chunked_cross_entropy_keeps_autocast() -> None:
    hidden, weight = torch.randn(8, 16, requires_grad=True), torch.randn(30, 16, requires_grad=True)
    labels = torch.randint(0, 30, (8,))
    with torch.autocast("cpu", torch.bfloat16):
        loss = total_of(chunked_cross_entropy(hidden, weight, labels, chunk_size=3))
        full = F.cross_entropy(F.linear(hidden, weight).float(), labels)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, full)
    gradients = [torch.autograd.grad(value, [weight]) for value in (loss, full)]
    torch.testing.assert_close(*gradients, rtol=1e-2, atol=1e-3)


class ChunkedLlama(LlamaForCausalLM):
    """The example of the documentation."""

    def forward(self, input_ids: Any, labels: Any = None, **options: Any) -> Any:
        hidden = self.model(input_ids, **options).last_hidden_state
        return {"loss": chunked_cross_entropy(hidden[:, :-1], self.lm_head.weight, labels[:, 1:], chunk_size=7)}


def test_chunked_cross_entropy_trains_causal_lm() -> None:
    chunked = ChunkedLlama(llama().config).double()
    chunked.load_state_dict(llama().state_dict())
    for model, parts in ((expected := llama(), 1), (chunked, 4)):
        options = {"batch_size": 8 // parts, "gradient_accumulation_steps": parts, "learning_rate": 0.1}
        fit(trainer_on_cpu(Trainer, model, Tokens(24), optimizer="sgd", max_steps=3, **options))
    # transformers takes its scores to float32
    torch.testing.assert_close(chunked.state_dict(), expected.state_dict(), rtol=0, atol=1e-7)
