"""Compiled models: ahead of a run, in a run, and with algorithms."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from recipes import (
    CountsPasses,
    Graphs,
    Holding,
    Pages,
    Sentences,
    StopAt,
    Tagger,
    rows,
    same,
    t16,
    trainer_on_cpu,
    weights,
)
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import TensorDataset
from transformers import TrainingArguments

from omnitrain import (
    EMA,
    Algorithm,
    Callback,
    ConfigError,
    GradualUnfreezing,
    HFTrainer,
    LayerFreezing,
    ProgressiveResizing,
    SeqLengthWarmup,
    ShardedStream,
    Trainer,
)


@pytest.fixture(autouse=True)
def forget_graphs() -> Iterator[None]:
    yield
    torch.compiler.reset()


def make(model: nn.Module, data: Any = None, *guests: Callback, **options: Any) -> Trainer:
    options = {"loss_fn": F.mse_loss, "learning_rate": 0.05, "batch_size": 8, "epochs": 2, **options}
    if "train_loader" in options:
        del options["batch_size"]  # which is that of the loader
    return trainer_on_cpu(Trainer, model, data, callbacks=guests, **options)


def words(size: int, lengths: int = 1) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return rows of 4 numbers with a target, repeated to a number of lengths."""
    return [(x.repeat(1 + i // 8 % lengths), y) for i, (x, y) in enumerate(rows(size, torch.float32))]


class Mean(nn.Module):
    """Predicts from the mean of a row, whatever its length."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.out = nn.Linear(1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(x.mean(1, keepdim=True))


class Batches(Pages):
    """A loader of batches of four with a state."""

    def __iter__(self) -> Iterator[tuple[torch.Tensor, ...]]:
        while self.at < 16:
            self.at += 4
            self.read.extend(range(self.at - 4, self.at))
            yield rows(16)[self.at - 4 : self.at]
        self.at = 0


@pytest.mark.parametrize("kind", ["loader", "shards"])
def test_compile_restores_the_state_of_data(kind: str) -> None:
    parts = [Batches(16)] if kind == "loader" else [Pages(16), Pages(16)]
    data = {"train_loader": parts[0]} if kind == "loader" else {"data": ShardedStream(parts), "batch_size": 4}
    trainer = make(t16(), compile={"backend": Graphs()}, epochs=None, max_steps=4 * len(parts), **data)
    trainer.compile(steps=2)
    count = 8 // len(parts)
    assert [(part.read, part.at) for part in parts] == [(list(range(count)), 0)] * len(parts)
    trainer.train()
    assert [part.read[count : count + 16] for part in parts] == [list(range(16))] * len(parts)


class CountsBatches(Algorithm):
    """Counts batches, from 0 in each run."""

    def set_up(self, trainer: Any) -> None:
        self.batches = 0

    def transform_batch(self, trainer: Any, batch: Any) -> Any:
        self.batches += 1
        return batch


def test_compile_covers_the_shapes_of_training_and_evaluation() -> None:
    graphs, algorithm = Graphs(), CountsBatches()
    data, sets = words(60, lengths=3), {"dev": words(5), "web": words(8)}
    trainer = make(
        Mean(), data, compile={"backend": graphs, "dynamic": False}, batch_size=8, shuffle=False, eval_dataset=sets,
        eval_batch_size=4, algorithms=[algorithm, EMA()],
    )  # fmt: skip
    report = trainer.compile(steps=4)
    assert report.shapes == {
        "train": ["[8, 4], [8, 1]", "[8, 8], [8, 1]", "[8, 12], [8, 1]", "[4, 8], [4, 1]"],
        "dev": ["[4, 4], [4, 1]", "[1, 4], [1, 1]"],
        "web": ["[4, 4], [4, 1]"],
    }
    assert report.graphs == graphs.count == 6 and not report.breaks and report.seconds > 0
    assert not algorithm.batches
    trainer.train()
    assert graphs.count == 6
    with pytest.raises(ConfigError, match="before a run, and this trainer is at step 16"):
        trainer.compile()


def test_compile_covers_growing_sequences() -> None:
    def build(compiles: Any) -> Trainer:
        growing = SeqLengthWarmup(6, min_length=2, duration=0.4, step_size=2)
        options = {"loss_fn": None, "batch_size": 4, "learning_rate": 0.05, "compile": compiles}
        return make(Tagger(), Sentences(32), algorithms=[growing], shuffle=False, **options)

    graphs = Graphs()
    trainer, plain = build({"backend": graphs, "dynamic": False}), build(False)
    report = trainer.compile(steps=8)
    assert report.shapes == {"train": [f"ids [4, {length}], labels [4, {length}]" for length in (2, 4, 6)]}
    plain.train()
    trainer.train()
    assert graphs.count == report.graphs and same(weights(plain.get_model()), weights(trainer.get_model()))


def test_compile_reports_graph_breaks() -> None:
    class Broken(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self[0](x)
            torch._dynamo.graph_break()
            return self[1](x)

    report = make(Broken(nn.Linear(4, 4), nn.Linear(4, 1)), words(8), compile={"backend": Graphs()}).compile()
    ((reason, count),) = report.breaks.items()
    assert report.graphs == 2 and count == 1 and "graph_break" in reason and "\n" not in reason


def test_compile_of_a_plain_model_warns(caplog: pytest.LogCaptureFixture) -> None:
    trainer = make(t16(), rows(8))
    assert trainer.compile().graphs == 0 and "nothing of the model was compiled" in caplog.text
    caplog.clear()
    graphs = Graphs()
    model = nn.Sequential(torch.compile(nn.Linear(4, 4), backend=graphs), nn.Linear(4, 1))  # type: ignore[arg-type]
    assert make(model, words(8)).compile().graphs == graphs.count == 1 and "compiled. Pass" not in caplog.text


def test_compile_validates_steps_data_and_loop() -> None:
    class Own(Trainer):
        def _train_epoch(self, epoch: int) -> float:
            return 0.0

    for trainer, options, message in (
        (Own(t16(), rows(8), device="cpu"), {}, r"cannot know what Own\._train_epoch runs"),
        (make(t16(), rows(8)), {"steps": 0}, r"`steps` of `compile\(\)` must be a positive integer, got 0"),
        (make(t16(), None), {}, "nothing to compile for"),
    ):
        with pytest.raises(ConfigError, match=message):
            trainer.compile(**options)


def test_compile_restores_everything_after_an_error() -> None:
    class Failing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out, self.norm, self.counts = nn.Linear(4, 1), nn.BatchNorm1d(1), CountsPasses()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if len(x) == 3:
                raise ValueError("three rows")
            return self.norm(self.out(self.counts(x).float()))

    model = Failing().eval()
    before, state = weights(model), torch.get_rng_state()
    trainer = make(model, words(11), eval_dataset=words(8))
    with pytest.raises(ValueError, match="three rows") as raised:
        trainer.compile()
    assert "step 2" in str(raised.value.__notes__)
    assert same(before, weights(model)) and torch.equal(state, torch.get_rng_state())
    assert not model.training and all(parameter.grad is None for parameter in model.parameters())
    assert trainer.progress.step == trainer.progress.samples_in_epoch == 0
    make(model, words(8), eval_dataset=words(8)).compile()  # which ends well, and counts as little
    assert model.counts.passes == model.counts.replaced == 0


@pytest.mark.slow
@pytest.mark.processes
def test_resumed_compiled_run_equals_a_straight_one(tmp_path: Path) -> None:
    def run(folder: str, *guests: Callback, resume: Any = None, ahead: bool = False) -> Trainer:
        torch.compiler.reset()  # as another process would begin
        torch.manual_seed(0)
        layers = nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.3), nn.Linear(16, 1)
        trainer = make(
            nn.Sequential(*layers).double(), rows(28), *guests, eval_dataset=rows(8), eval_batch_size=8,
            save_dir=tmp_path / folder, load_best_at_end=False, save_steps=100, algorithms=[EMA(0.9)],
            compile={"backend": "inductor", "dynamic": False},
        )  # fmt: skip
        if ahead:
            assert trainer.compile().graphs == 3
        trainer.train(resume_from=resume)
        return trainer

    straight = run("straight")
    run("parts", StopAt(3))
    resumed, ahead = run("parts", resume="auto", ahead=True), run("ahead", ahead=True)
    assert resumed.progress.step == 8
    assert same(weights(straight.get_model()), weights(resumed.get_model()))
    assert same(weights(straight.get_model()), weights(ahead.get_model()))
    assert straight.metrics["valid"] == resumed.metrics["valid"] == ahead.metrics["valid"]


@pytest.mark.parametrize("algorithm", [GradualUnfreezing, LayerFreezing, ProgressiveResizing])
def test_algorithms_with_a_compiled_model_equal_a_plain_one(algorithm: Any) -> None:
    ends = []
    for compiles in (False, True):
        graphs = Graphs()
        torch.manual_seed(0)
        if algorithm is ProgressiveResizing:
            layers = nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 1)
            data = TensorDataset(torch.arange(1024.0).double().sin().reshape(16, 1, 8, 8), rows(16).tensors[1])
        else:
            layers, data = (nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)), rows(32)
        backend = {"backend": graphs} if compiles else False
        trainer = make(nn.Sequential(*layers).double(), data, epochs=4, algorithms=[algorithm()], compile=backend)
        if compiles:
            trainer.compile()
        trainer.train()
        assert bool(graphs.count) is compiles
        ends.append(weights(trainer.get_model()))
    assert same(*ends)


def on(kind: Any, model: nn.Module, **options: Any) -> Any:
    options = {"learning_rate": 1e-2, "loss_fn": F.mse_loss, "eval_dataset": rows(8), **options}
    return trainer_on_cpu(kind, model, rows(24), **options)


def test_compiled_run_equals_plain(trainer_class: Any, tmp_path: Path) -> None:
    compiler, plain, model = Graphs(), t16(dropout=0.2), t16(dropout=0.2)
    expected = on(trainer_class, plain, epochs=2).train()
    options: dict[str, Any] = {"compile": {"backend": compiler}, "epochs": 2, "save_dir": tmp_path}
    on(trainer_class, t16(dropout=0.2), callbacks=[StopAt(4)], **options).train()
    assert compiler.count
    trainer = on(trainer_class, model, **options)
    assert trainer.train(resume_from="auto")["valid"] == expected["valid"]
    assert same(weights(plain), weights(model))
    assert trainer.model is model and trainer.model_wrapped._orig_mod is model
    assert set(load_file(tmp_path / "checkpoint-6" / "model.safetensors")) == set(plain.state_dict())
    trainer.model = other = t16(seed=1)
    assert trainer.model is other and trainer.model_wrapped._orig_mod is other


def test_compile_rejects_wrong_values(trainer_class: Any, tmp_path: Path) -> None:
    compiled: Any = torch.compile(t16(), backend="eager")
    args = TrainingArguments(str(tmp_path), torch_compile=True, use_cpu=True, report_to="none")
    for model, options, words in (
        (t16(), {"compile": "yes"}, "compile.*True, False or a dict.*'yes'"),
        (t16(), {"compile": {"bakend": "eager"}}, "compile.*bakend"),
        (t16(), {"compile": {"backend": "nowhere"}}, "compile.*nowhere"),
        (t16(), {"compile": True, "unit": Holding(t16()), "loss_fn": None}, "compile.*unit"),
        (compiled, {"compile": True}, "compiled already"),
        (t16(), {"compile": True, "args": args, "learning_rate": None}, "torch_compile=True"),
    ):
        if "args" not in options or trainer_class is HFTrainer:
            with pytest.raises(ConfigError, match=words):
                on(trainer_class, model, **options)
