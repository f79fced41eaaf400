"""Compiled models: ahead of a run, in a run, and with algorithms."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from marks import make_small
from recipes import CountsPasses, Graphs, Pages, Sentences, StopAt, Tagger, fit, rows, same, t16, weights
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import TensorDataset
from transformers import TrainingArguments

import omnitrain
from omnitrain import EMA, Algorithm, ConfigError, HFTrainer, SeqLengthWarmup, ShardedStream, Trainer


@pytest.fixture(autouse=True)
def forget_graphs() -> Iterator[None]:
    yield
    torch.compiler.reset()


def make(model: nn.Module, data: Any = None, kind: Any = Trainer, **options: Any) -> Any:
    return make_small(kind, model, data, **{"learning_rate": 0.05, "batch_size": 8, "epochs": 2, **options})


def words(size: int, lengths: int = 1) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(x.repeat(1 + i // 8 % lengths), y) for i, (x, y) in enumerate(rows(size, torch.float32))]


class Mean(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.out = nn.Linear(1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(x.mean(1, keepdim=True))


class Batches(Pages):
    def __iter__(self) -> Iterator[tuple[torch.Tensor, ...]]:
        while self.at < 16:
            self.at += 4
            self.read.extend(range(self.at - 4, self.at))
            yield rows(16)[self.at - 4 : self.at]
        self.at = 0


@pytest.mark.parametrize("kind", ["loader", "shards"])
def test_compile_restores_the_state_of_data(kind: str) -> None:
    parts = [Batches(16)] if kind == "loader" else [Pages(16), Pages(16)]
    data = {"train_loader": parts[0]} if kind == "loader" else {"train_dataset": ShardedStream(parts), "batch_size": 4}
    options = {"compile": {"backend": Graphs()}, "max_steps": 4 * len(parts), "loss_fn": nn.functional.mse_loss}
    trainer = Trainer(t16(), device="cpu", progress_bar=False, **options, **data)
    trainer.compile(steps=2)
    count = 8 // len(parts)
    assert [(part.read, part.at) for part in parts] == [(list(range(count)), 0)] * len(parts)
    trainer.train()
    assert [part.read[count : count + 16] for part in parts] == [list(range(16))] * len(parts)


class CountsBatches(Algorithm):
    def set_up(self, trainer: Any) -> None:
        self.batches = 0

    def transform_batch(self, trainer: Any, batch: Any) -> Any:
        self.batches += 1
        return batch


def test_compile_covers_the_shapes_of_training_and_evaluation() -> None:
    graphs, algorithm = Graphs(), CountsBatches()
    options = {"eval_dataset": {"dev": words(5), "web": words(8)}, "eval_batch_size": 4, "shuffle": False}
    options |= {"compile": {"backend": graphs, "dynamic": False}, "algorithms": [algorithm, EMA()]}
    trainer = make(Mean(), words(60, lengths=3), **options)
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
    graphs, ends = Graphs(), []
    for compiles in (False, {"backend": graphs, "dynamic": False}):
        growing = SeqLengthWarmup(6, min_length=2, duration=0.4, step_size=2)
        options = {"loss_fn": None, "batch_size": 4, "algorithms": [growing], "shuffle": False}
        trainer = make(Tagger(), Sentences(32), compile=compiles, **options)
        report = trainer.compile(steps=8) if compiles else None
        ends.append(weights(fit(trainer).get_model()))
    assert report.shapes == {"train": [f"ids [4, {length}], labels [4, {length}]" for length in (2, 4, 6)]}
    assert graphs.count == report.graphs and same(*ends)


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
    custom: Any = type("Own", (Trainer,), {"_train_epoch": lambda self, epoch: 0.0})
    for trainer, options, message in (
        (make(t16(), rows(8), custom), {}, r"cannot know what Own\._train_epoch runs"),
        (make(t16(), rows(8)), {"steps": 0}, r"`steps` of `compile\(\)` must be a positive integer, got 0"),
        (make(t16()), {}, r"nothing for `compile\(\)` to look at"),
    ):
        with pytest.raises(ConfigError, match=message):
            trainer.compile(**options)


def test_compile_restores_everything_after_an_error() -> None:
    class Failing(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if len(x) == 3:
                raise ValueError("three rows")
            return super().forward(x).float()

    counts = CountsPasses()
    model = Failing(nn.Linear(4, 1), nn.BatchNorm1d(1), counts).eval()
    before, state = weights(model), torch.get_rng_state()
    trainer = make(model, words(11), eval_dataset=words(8))
    with pytest.raises(ValueError, match="three rows") as raised:
        trainer.compile()
    assert "step 2" in str(raised.value.__notes__)
    assert same(before, weights(model)) and torch.equal(state, torch.get_rng_state())
    assert not model.training and all(parameter.grad is None for parameter in model.parameters())
    assert trainer.progress.step == trainer.progress.samples_in_epoch == 0
    make(model, words(8), eval_dataset=words(8)).compile()  # which ends well, and counts as little
    assert counts.passes == counts.replaced == 0


@pytest.mark.parametrize("algorithm", ["GradualUnfreezing", "LayerFreezing", "ProgressiveResizing"])
def test_algorithms_with_a_compiled_model_equal_a_plain_one(algorithm: str) -> None:
    ends: list[Any] = []
    for graphs in (None, Graphs()):
        torch.manual_seed(0)
        if algorithm == "ProgressiveResizing":
            layers = nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 1)
            data = TensorDataset(torch.arange(1024.0).double().sin().reshape(16, 1, 8, 8), rows(16).tensors[1])
        else:
            layers, data = (nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)), rows(32)
        compile = False if graphs is None else {"backend": graphs}
        options = {"algorithms": [getattr(omnitrain, algorithm)()], "compile": compile, "epochs": 4}
        trainer = make(nn.Sequential(*layers).double(), data, **options)
        if graphs is not None:
            trainer.compile()
        ends.append(weights(fit(trainer).get_model()))
    assert graphs is not None and graphs.count and same(*ends)


def test_compiled_run_equals_plain(trainer_class: Any, tmp_path: Path) -> None:
    compiler, plain, model = Graphs(), t16(dropout=0.2), t16(dropout=0.2)
    options: dict[str, Any] = {"kind": trainer_class, "eval_dataset": rows(8)}
    expected = make(plain, rows(24), **options).train()
    options |= {"compile": {"backend": compiler}, "save_dir": tmp_path}
    make(t16(dropout=0.2), rows(24), callbacks=[StopAt(2)], **options).train()
    assert compiler.count
    trainer = make(model, rows(24), **options)
    assert trainer.train(resume_from="auto")["valid"] == expected["valid"]
    assert same(weights(plain), weights(model))
    assert trainer.model is model and trainer.model_wrapped._orig_mod is model
    assert set(load_file(tmp_path / "checkpoint-6" / "model.safetensors")) == set(plain.state_dict())
    trainer.model = other = t16(seed=1)
    assert trainer.model is other and trainer.model_wrapped._orig_mod is other


def test_compile_rejects_wrong_values(trainer_class: Any, tmp_path: Path) -> None:
    compiled: Any = torch.compile(t16(), backend="eager")
    args = TrainingArguments(str(tmp_path), torch_compile=True, use_cpu=True, report_to="none")
    unset = {"batch_size": None, "epochs": None}
    for model, options, words in (
        (t16(), {"compile": "yes"}, "compile.*True, False or a dict.*'yes'"),
        (t16(), {"compile": {"bakend": "eager"}}, "compile.*bakend"),
        (t16(), {"compile": {"backend": "nowhere"}}, "compile.*nowhere"),
        (t16(), {"compile": True, "unit": lambda batch: 0, "loss_fn": None}, "compile.*unit"),
        (compiled, {"compile": True}, "compiled already"),
        (t16(), {"compile": True, "args": args, "learning_rate": None, **unset}, "torch_compile=True"),
    ):
        if "args" not in options or trainer_class is HFTrainer:
            with pytest.raises(ConfigError, match=words):
                make(model, rows(24), trainer_class, **options)
