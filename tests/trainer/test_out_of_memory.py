"""Out-of-memory errors: their reports, and `microbatch_size`, a number or "auto", which halves micro-batches."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from devices import KINDS, make
from marks import make_small
from recipes import Holding, Starving, StopAt, distance, fit, no_room, rows, same, t16, trainer_on_cpu, weights
from torch import nn
from torch.utils.data import DataLoader

from omnitrain import Algorithm, BaseTrainer, ConfigError, HookCallback, Trainer
from omnitrain.compute.precision import is_out_of_memory
from omnitrain.trainer.out_of_memory import Shortage, format_oom_report, future_optimizer_bytes, requested_bytes

GB = 10**9


def remedies(shortage: Shortage) -> dict[str, str]:
    lines = format_oom_report(shortage).splitlines()[2:]
    return {name.strip(): gain for name, _, gain in (line.rpartition(": ") for line in lines)}


def test_oom_report_has_remedies_and_their_gains() -> None:
    shortage = Shortage("training", 2 * GB, 2 * GB, 4 * GB, peak=14 * GB, requested=2 * GB, rows=16, world_size=4)
    assert shortage.activations == 8 * GB
    assert remedies(shortage) == {
        "microbatch_size=8 (instead of 16; the same step, in more parts)": "-4.0 GB",
        'autocast="bf16"': "up to -4.0 GB",
        "gradient_checkpointing=True (slower, the same numbers)": "most of 8.0 GB",
        "an optimizer whose state has 8 bits": "-3.0 GB",
        "FSDP or ZeRO 3 over 4 processes": "-6.0 GB",
        "ZeRO 2 over 4 processes": "-4.5 GB",
    }


def test_oom_report_omits_remedies_without_effect() -> None:
    done: dict[str, Any] = {"is_sharded": True, "is_recomputed": True, "is_full_precision": False, "rows": 1}
    (remedy,) = remedies(Shortage("training", 2 * GB, 2 * GB, 4 * GB, peak=14 * GB, **done))
    assert remedy == "an optimizer whose state has 8 bits"
    small = Shortage("training", 10 * GB, 0, 0, peak=10 * GB, requested=100, rows=8, world_size=2)
    assert remedies(small) == {"FSDP or ZeRO 3 over 2 processes": "-5.0 GB"}
    assert format_oom_report(Shortage("evaluation", 0, 0, 0, peak=0)).count("\n") == 0
    gains = remedies(Shortage("evaluation", GB, 0, 0, peak=4 * GB, rows=9, is_sharded=True))
    assert gains == {"eval_batch_size=4 (instead of 9)": "-1.7 GB", 'autocast="bf16"': "up to -1.5 GB"}
    assert remedies(Shortage("saving", GB, 0, 0, peak=4 * GB, rows=9, is_sharded=True)) == {}


def test_oom_report_of_the_first_step_adds_future_state() -> None:
    shortage = Shortage("training", GB, 0, 0, future_gradients=GB, future_optimizer_bytes=2 * GB, peak=None, rows=1)
    text = format_oom_report(shortage)
    words = "optimizer state 0 MB (of the first step, 1.0 GB of gradients and 2.0 GB of state were still to come)"
    assert words in text and "activations" not in text  # which nothing has counted
    assert remedies(shortage)["FSDP or ZeRO 3 over 8 processes"] == "-3.5 GB"
    error = RuntimeError("can't allocate memory: you tried to allocate 4096 bytes. Error code 12")
    assert requested_bytes(error) == 4096
    for options, size in (
        ({"betas": ()}, 20), ({"betas": (), "amsgrad": True}, 30), ({"momentum": 0.9}, 10), ({"momentum": 0}, 0)
    ):  # fmt: skip
        assert future_optimizer_bytes(options, 10) == size


def test_is_out_of_memory_knows_the_errors_of_torch() -> None:
    no_memory = RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 12 bytes")
    for error in (torch.OutOfMemoryError("no room"), RuntimeError("CUDA out of memory."), no_memory):
        assert is_out_of_memory(error)
    for error in (RuntimeError("shapes do not match"), MemoryError("CUDA out of memory.")):
        assert not is_out_of_memory(error)


def oom_note(trainer: Any, work: str = "train") -> str:
    with pytest.raises(RuntimeError) as caught:
        getattr(trainer, work)()
    (note,) = [note for note in caught.value.__notes__ if note.startswith("Memory ran out")]
    return note


def on_cpu(kind: str, model: nn.Module, *data: Any, folder: Path, **options: Any) -> Any:
    options = {"loss_fn": F.mse_loss, "batch_size": 8, "save_dir": folder if kind == "hf" else None, **options}
    return make(kind, torch.device("cpu"), model, *data, **options)


@pytest.mark.parametrize("kind", KINDS)
def test_oom_error_has_a_report_on_every_trainer(kind: str, tmp_path: Path) -> None:
    model = Starving(room=4, start=2)
    text = oom_note(on_cpu(kind, model, rows(32), folder=tmp_path))
    moments = 2 * sum(parameter.nbytes for parameter in model.parameters())
    size = moments / 2 + sum(buffer.nbytes for buffer in model.buffers())
    assert f"in training, and this is what was in it: parameters {size / 1e6:.1f} MB" in text
    assert f"optimizer state {moments / 1e6:.1f} MB" in text and "the 21.0 MB for which there was no room" in text
    assert "microbatch_size=4 (instead of 8; the same step, in more parts)" in text


@pytest.mark.parametrize(("kind", "options"), [*((kind, {"sanity": False}) for kind in KINDS), ("native", {})])
def test_oom_error_in_an_evaluation_reports_its_batch_size(kind: str, options: dict[str, Any], tmp_path: Path) -> None:
    trainer = on_cpu(kind, ShortOfMemory(0), rows(8), rows(8), folder=tmp_path, **options)
    text = oom_note(trainer)
    assert "in evaluation" in text and "eval_batch_size=4 (instead of 8)" in text and "microbatch_size" not in text
    assert "in evaluation" in oom_note(trainer, "evaluate")
    with pytest.raises(RuntimeError) as caught:
        on_cpu(kind, nn.Linear(3, 1).double(), rows(8), folder=tmp_path).train()
    assert not any(note.startswith("Memory") for note in caught.value.__notes__)


def trained(model: nn.Module, data: Any = None, resume_from: str | None = None, **options: Any) -> Trainer:
    """Train in steps of 8 of 20 rows: the last of an epoch has 4."""
    defaults = {"batch_size": 8, "epochs": 3, "learning_rate": 0.05, "log_steps": 1}
    defaults |= {} if "unit" in options else {"loss_fn": F.mse_loss}
    data = rows(20) if data is None and "train_loader" not in options else data
    return fit(trainer_on_cpu(Trainer, model, data, **{**defaults, **options}), resume_from)


def tensors(trainer: Any) -> list[torch.Tensor]:
    return [*weights(trainer.model), *trainer.model.buffers()]


def test_microbatches_of_any_size_weigh_targets_of_a_unit() -> None:
    def run(**options: Any) -> Trainer:
        model = t16()
        return trained(model, rows(13), unit=Holding(model), epochs=2, **options)

    full = run()
    for size, accumulation in ((3, 1), (1, 1), (2, 2)):
        split = run(microbatch_size=size, batch_size=8 // accumulation, gradient_accumulation_steps=accumulation)
        assert distance(weights(full.model), weights(split.model)) <= 1e-12
        last, expected = (trainer.metrics["train_metrics_history"][-1] for trainer in (split, full))
        assert last == pytest.approx(expected, rel=1e-12)
        assert (split.progress.tokens, split.progress.samples) == (full.progress.tokens, full.progress.samples)


class Loader:  # whose rows are not counted, so that a resume goes by batches
    def __iter__(self) -> Any:
        return iter(DataLoader(rows(20), batch_size=4))


def test_microbatches_of_a_loader_are_resumed(tmp_path: Path) -> None:
    def run(folder: str, **options: Any) -> Trainer:
        options |= {"train_loader": Loader(), "gradient_accumulation_steps": 2, "microbatch_size": 2, "save_steps": 100}
        return trained(Starving(), save_dir=tmp_path / folder, **options)

    straight = run("straight")
    assert run("cut", callbacks=[StopAt(5)]).progress.batches_in_epoch == 4
    assert same(tensors(straight), tensors(run("cut", resume_from="auto")))


def test_microbatch_size_is_validated() -> None:
    for size in (0, 2.0, True, "large"):
        with pytest.raises(ConfigError, match="`microbatch_size` must be a positive integer, 'auto' or None, got"):
            Trainer(t16(), rows(8), microbatch_size=size)  # type: ignore[arg-type]
    step = lambda self, epoch: self.optimizer.step() or 0.0  # noqa: E731
    custom = type("Own", (BaseTrainer,), {"_train_epoch": step})
    trainer, updates = custom(t16(), rows(8), device="cpu", microbatch_size=2, progress_bar=False), list[Any]()
    trainer.optimizer.register_step_post_hook(lambda *arguments: updates.append(arguments))
    with pytest.raises(ConfigError, match="`microbatch_size=2` has no effect on a custom `_train_epoch`"):
        trainer.train()
    assert not updates


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_auto_equals_the_size_that_fits(where: str) -> None:
    halved = trained(Starving(room=3, where=where), microbatch_size="auto")
    small = trained(Starving(), batch_size=2, gradient_accumulation_steps=4)
    assert halved.model.sizes[:3] == [8, 4, 2] and set(halved.model.sizes[2:]) == {2}
    assert same(tensors(halved), tensors(small))
    assert halved.metrics == small.metrics
    if where == "forward":  # as does a number, and where nothing is lacking "auto" changes nothing
        assert same(tensors(trained(Starving(), microbatch_size=2)), tensors(small))
        assert same(tensors(trained(Starving(), microbatch_size="auto")), tensors(trained(Starving())))


class Counts(Algorithm):
    count = 0

    def transform_loss(self, trainer: Any, loss: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return loss * (1 + self.count % 3)

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.count = state["count"]


def test_auto_restores_the_state_of_algorithms() -> None:
    class Late(Starving):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.training and len(self.sizes) == 1:
                self.room = 3  # at the second of two micro-batches
            return super().forward(x)

    options = {"batch_size": 4, "gradient_accumulation_steps": 2}
    halved = trained(Late(), microbatch_size="auto", algorithms=[Counts()], **options)
    small = trained(Starving(), microbatch_size=2, algorithms=[Counts()], **options)
    assert halved.model.sizes[:6] == [4, 4, 2, 2, 2, 2]
    assert same(tensors(halved), tensors(small))


KEEPS_NORM = HookCallback({"on_epoch_start": lambda trainer: trainer.model.norm.eval()})  # one row has no statistics


def test_auto_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    options = {"batch_size": 4, "loss_fn": F.l1_loss, "grad_reduction": "mean", "callbacks": [KEEPS_NORM]}
    trained(Starving(room=1, start=1, dropout=0), rows(16), microbatch_size="auto", **options)
    (message,) = (text for text in caplog.messages if "memory" in text)
    assert "Step 2 has run out of memory with micro-batches of 4 rows. From here on they are of 1 at" in message
    assert "Pass microbatch_size=1 to begin with that. BatchNorm takes its statistics of one micro-batch." in message


def test_row_that_never_fits_is_an_error() -> None:
    small = Starving(room=0)
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory") as caught:
        trained(small, rows(8), callbacks=[KEEPS_NORM], microbatch_size="auto")
    assert "at one row at a time" in "".join(caught.value.__notes__) and small.sizes == [8, 4, 2, 1]


class ShortOfMemory(nn.Linear):
    def __init__(self, room: int) -> None:
        torch.manual_seed(0)
        super().__init__(4, 1, dtype=torch.float64)
        self.room, self.sizes = room, list[int]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            self.sizes.append(len(x))
            if len(x) > self.room:
                raise no_room()
        return super().forward(x)


def mean_error(y_true: Any, y_pred: Any) -> dict[str, float]:
    return {"first": float(y_pred[0, 0]), "error": float(abs(y_true - y_pred).mean())}


@pytest.mark.parametrize("kind", KINDS)
def test_auto_halves_batches_of_evaluations(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    results: list[Any] = []
    for room in (100, 3):
        options = {"microbatch_size": "auto", "eval_batch_size": 7, "compute_metrics": ["mae", mean_error]}
        model, folder = ShortOfMemory(room), tmp_path / str(room)
        trainer = fit(on_cpu(kind, model, rows(8), rows(16), folder=folder, sanity=room == 3, **options))
        results.append((trainer.evaluate(), *trainer.predict(rows(16))[:2]))
    assert model.sizes[:4] == [7, 4, 2, 2] and max(model.sizes[4:]) == 2
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)
    assert caplog.text.count("An evaluation has run out of memory") == 2


def test_evaluation_without_room_for_one_row_ends() -> None:
    for room, options in ((0, {"microbatch_size": "auto"}), (3, {"microbatch_size": 2}), (3, {})):
        trainer = make_small(Trainer, ShortOfMemory(room), eval_dataset=rows(8), **options)
        with pytest.raises(torch.OutOfMemoryError):
            trainer.evaluate()
