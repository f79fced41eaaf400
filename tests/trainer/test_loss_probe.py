"""What a loss is a mean over, and which labels scores are compared with: as the loss itself shows."""

import copy
import functools
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from marks import TRAINERS
from recipes import Holding, StopAt, distance, fit, trainer_on_cpu, weights
from tiny import VOCABULARY, Tokens, bert, gpt
from torch import nn
from transformers import BartConfig, BartForCausalLM, BertForMaskedLM

from omnitrain import ConfigError, CrossEntropy, StepOutput, Trainer
from omnitrain.algorithms.label_smoothing import LabelSmoothing
from omnitrain.algorithms.seq_length_warmup import SeqLengthWarmup
from omnitrain.model.multitask import MultiTask, MultiTaskUnit

SPLITS = [(8, 1), (2, 4)]


class Wrapped(nn.Module):
    """A causal language model inside of a module that says nothing about it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = gpt()

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None, task: str = "") -> Any:
        return self.inner(input_ids=input_ids, labels=labels)


class Own(nn.Module):
    """A model that predicts the next token, and shifts labels in its own loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Embedding(VOCABULARY, 16), nn.Linear(16, VOCABULARY)).double()

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        logits = self.body(input_ids)
        if labels is None:
            return {"logits": logits}
        return {"loss": F.cross_entropy(logits[:, :-1].mT, labels[:, 1:]), "logits": logits}


def bart() -> BartForCausalLM:
    """A class whose name says that it shifts labels, and whose loss does not."""
    torch.manual_seed(0)
    sizes = {"d_model": 16, "decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 16}
    sizes |= {"vocab_size": VOCABULARY, "max_position_embeddings": 32}
    return BartForCausalLM(BartConfig(**sizes, dropout=0.0, is_decoder=True, is_encoder_decoder=False)).double()


def mlm() -> nn.Module:
    """A model whose labels are not shifted."""
    torch.manual_seed(0)
    return BertForMaskedLM(bert().config).double()


def make(trainer_class: Any, model: Any, batch: int = 8, accumulation: int = 1, **options: Any) -> Any:
    options = {"optimizer": "sgd", "learning_rate": 0.1, "max_grad_norm": None, "max_steps": 1, **options}
    options = {"eval_batch_size": batch, "log_steps": 1, "data": Tokens(8), **options}
    return trainer_on_cpu(trainer_class, model, batch_size=batch, gradient_accumulation_steps=accumulation, **options)


def split_distance(build: Callable[..., Any], trainer_class: Any = Trainer, **options: Any) -> float:
    """How far the weights are apart after one step of 8 samples and after one of 4 micro-batches."""
    ends = []
    for batch, accumulation in SPLITS:
        trainer = fit(make(trainer_class, build(), batch, accumulation, **options))
        ends.append(weights(trainer.model))
    return distance(*ends)


LOSSES: dict[str, tuple[Any, dict[str, Any]]] = {
    "wrapped": (Wrapped, {}),
    "own": (Own, {}),
    "loss_fn": (Own, {"loss_fn": CrossEntropy(shift=True)}),
    "function": (Own, {"loss_fn": lambda out, y: F.cross_entropy(out["logits"][:, :-1].mT, y[:, 1:])}),
    "bart": (bart, {}),
    "gpt": (gpt, {}),
}


@pytest.mark.parametrize(
    ("name", "kind"), [*(("native", kind) for kind in LOSSES), ("accelerate", "own"), ("hf", "wrapped")]
)
def test_shift_is_that_of_the_loss(name: str, kind: str) -> None:
    """Weights are those of one batch, and metrics by name are of the scores and labels that the loss compares."""
    build, options = LOSSES[kind]
    metrics = {"eval_dataset": Tokens(8), "load_best_at_end": False, "compute_metrics": ["perplexity", "accuracy"]}
    ends, losses = [], []
    for batch, accumulation in SPLITS:
        trainer = make(TRAINERS[name], build(), batch, accumulation, **metrics, **options)
        (row,) = trainer.train()["valid"]
        assert row["eval_perplexity"] == pytest.approx(math.exp(row["eval_loss"]), rel=1e-5)
        ends.append(weights(trainer.model))
        losses.append(row["eval_loss"])
    assert distance(*ends) <= 1e-7 and losses[0] == pytest.approx(losses[1], rel=1e-6)


@pytest.mark.parametrize("algorithm", [LabelSmoothing(VOCABULARY, 0.3), SeqLengthWarmup(9, 4, 1.0, 1)])
def test_algorithms_use_the_labels_of_the_loss(algorithm: Any) -> None:
    for build in (mlm, Wrapped if isinstance(algorithm, LabelSmoothing) else Own):
        assert split_distance(build, algorithms=[copy.copy(algorithm)]) <= 1e-7


@pytest.mark.parametrize("losses", [{}, dict.fromkeys("ab", CrossEntropy(shift=True))], ids=["model", "losses"])
def test_multitask_uses_the_labels_of_each_loss(losses: Any) -> None:
    ends = []
    for batch, accumulation in SPLITS:
        model, tasks = Wrapped(), MultiTask({"a": Tokens(4), "b": Tokens(4)})
        options = {"unit": MultiTaskUnit(model, losses), "data": tasks}
        options |= {"eval_dataset": tasks.evaluation({"a": Tokens(4)}, {"a": "perplexity"})}
        (row,) = make(Trainer, model, batch, accumulation, **options).train()["valid"]
        assert row["eval_a_perplexity"] == pytest.approx(math.exp(row["eval_a_loss"]), rel=1e-5)
        ends.append(weights(model))
    assert distance(*ends) <= 1e-7


def test_unit_says_that_it_shifts(caplog: pytest.LogCaptureFixture) -> None:
    """A unit may compute its loss from what no question reaches; then its word counts, and a wrong one is noticed."""

    class Unit(Holding):
        def __call__(self, batch: Any) -> Any:
            output = self.model(**batch)
            return StepOutput(output["loss"], output["logits"], batch["labels"])

        evaluate = __call__

    for shift in (True, False):
        unit = Unit(Own())
        unit.shift = shift
        caplog.clear()
        row = make(Trainer, unit.model, unit=unit, compute_metrics="perplexity").evaluate(Tokens(8))
        assert math.isclose(math.log(row["eval_perplexity"]), row["eval_loss"], rel_tol=1e-5) is shift
        assert ("shift = True" in caplog.text) is not shift


CLASS_WEIGHTS = torch.tensor([1.0, 5.0, 0.2], dtype=torch.float64)
WEIGHTED = functools.partial(F.cross_entropy, weight=CLASS_WEIGHTS)


def hidden_weights(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs, labels, weight=CLASS_WEIGHTS)


class Weighing(nn.Linear):
    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
        scores = super().forward(x)
        return {"loss": hidden_weights(scores, labels), "logits": scores}


def classes(model: type[nn.Linear] = nn.Linear, **options: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    x, labels = torch.randn(8, 4, dtype=torch.float64), torch.tensor([0, 1, 2, 1, 0, 2, 2, 1])
    data = [{"x": x[i], "labels": labels[i]} if model is Weighing else (x[i], labels[i]) for i in range(8)]
    return {"model": model(4, 3).double(), "data": data, "shuffle": False, **options}


@pytest.mark.skipif(not hasattr(torch.backends, "fp32_precision"), reason="this PyTorch has only one way")
def test_probe_beside_newer_switches_of_precision() -> None:
    """After them, PyTorch's older function for the precision raises."""
    switches: Any = torch.backends.cuda.matmul
    before, switches.fp32_precision = switches.fp32_precision, "tf32"
    try:
        with pytest.raises(RuntimeError, match="mix of the legacy and new"):
            torch.get_float32_matmul_precision()
        make(Trainer, batch=4, accumulation=2, **classes(loss_fn=functools.partial(F.cross_entropy))).train()
    finally:
        switches.fp32_precision = before


NO_MEANS: dict[str, tuple[Any, str]] = {
    "partial": (lambda: classes(loss_fn=WEIGHTED), r"`loss_fn` \(partial\) .*mean_over"),
    "function": (lambda: classes(loss_fn=hidden_weights), r"`loss_fn` \(hidden_weights\) .*mean_over"),
    "model": (lambda: classes(Weighing), "The loss of Weighing .*Pass a `unit`"),
}


@pytest.mark.parametrize("is_evaluated", [False, True], ids=["", "evaluated"])
@pytest.mark.parametrize(
    ("kind", "name"), [*((kind, "native") for kind in NO_MEANS), ("function", "accelerate"), ("model", "hf")]
)
def test_loss_that_is_no_mean_is_rejected_if_split(
    kind: str, name: str, is_evaluated: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The evaluation before step 1 asks the loss first, and only warns."""
    build, message = NO_MEANS[kind]
    options = build()
    options |= {"eval_dataset": options["data"]} if is_evaluated else {}
    with pytest.raises(ConfigError, match=message):
        make(TRAINERS[name], batch=4, accumulation=2, save_dir=tmp_path / "run", **options).train()
    assert not list((tmp_path / "run").glob("checkpoint*"))
    caplog.clear()
    make(TRAINERS[name], **options).train()
    assert caplog.text.count("depends on `eval_batch_size`") == 1


@pytest.mark.parametrize("batch", [1, 2])
def test_small_batches_are_probed_together(batch: int) -> None:
    """The first two rows weigh alike, so that they say nothing, in an evaluation before the first step neither."""
    options = classes(loss_fn=hidden_weights)
    options["data"] = [options["data"][i] for i in (1, 3, 0, 2)]
    options |= {"eval_dataset": options["data"], "eval_batch_size": batch}
    with pytest.raises(ConfigError, match="mean_over"):
        make(Trainer, batch=batch, accumulation=4 // batch, **options).train()


class Masked(Own):
    """A sequence labeller that ignores label 0, which is its padding."""

    config = SimpleNamespace(model_type="masked", pad_token_id=0)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        logits = self.body(input_ids)
        assert labels is not None
        return {"loss": F.cross_entropy(logits.mT, labels.clamp(min=0), ignore_index=0), "logits": logits}


def test_ignored_label_is_that_of_the_loss() -> None:
    data = [{**sample, "labels": sample["labels"].clamp(min=0)} for sample in map(Tokens(8).__getitem__, range(8))]
    assert split_distance(Masked, data=data, shuffle=False) <= 1e-12


def test_resumed_run_keeps_what_the_loss_is(tmp_path: Path) -> None:
    """The first batch after a resume may show nothing: here it has labels of one class only."""
    options: dict[str, Any] = {"shuffle": False, "max_steps": 2, "data": Tokens(16)}
    straight = fit(make(Trainer, Own(), 2, 4, **options))
    options |= {"save_dir": tmp_path, "save_steps": 1}
    make(Trainer, Own(), 2, 4, callbacks=[StopAt(1)], **options).train()
    resumed = make(Trainer, Own(), 2, 4, **options)
    resumed.loss_mean.shift = False  # what a first batch that shows nothing would leave
    resumed.train(resume_from="auto")
    assert resumed.loss_mean.shift and distance(weights(straight.model), weights(resumed.model)) == 0


class Counting(Own):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        self.passes += 1
        return super().forward(F.dropout(input_ids.double(), 0.1, self.training).long() % VOCABULARY, labels)


def test_asking_leaves_no_trace() -> None:
    """A run that asks and one that knows are the same, with dropout and with buffers that count forward passes."""
    asking, knowing = (make(Trainer, Counting(), 4, 2) for _ in range(2))
    knowing.loss_mean.shift, knowing.loss_mean.is_checked = True, True
    for trainer in (asking, knowing):
        trainer.train()
        assert int(trainer.model.passes) == 2
    assert distance(weights(asking.model), weights(knowing.model)) == 0
