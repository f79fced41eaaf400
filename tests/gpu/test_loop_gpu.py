"""A loop that does not wait for the GPU, and batches that are copied ahead and arrive as they were."""

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from devices import forbid_waiting, keep_busy, make, trainer_class, waiting_allowed_at_last
from recipes import Bags, Sentences, Tagger, bags, callback, distance, fit, rows, same, t16, weights
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from omnitrain import SAM, Algorithm, Callback, SpikeGuard, Trace
from omnitrain.data.workers import start_workers

FP32 = torch.float32

# --- waiting


class Forbid(Callback):
    """Makes it an error to wait for the GPU in a step after which nothing is logged and no epoch ends."""

    def __init__(self, steps: int, log_steps: int) -> None:
        self.steps, self.log_steps, self.guarded = steps, log_steps, 0

    def on_step_end(self, trainer: Any) -> None:
        step = trainer.progress.step  # the next one is to be guarded
        guards = step % self.log_steps > 0 and step % self.steps < self.steps - 1
        self.guarded += guards
        forbid_waiting(trainer.device, guards)


TOGETHER = {
    "gradient_accumulation_steps": 2, "lr_scheduler": "cosine", "warmup_steps": 5, "max_grad_norm": 0.01,
    "autocast": "bf16", "weight_decay": 0.1,
}  # fmt: skip


@pytest.mark.parametrize("options", [
    {},
    TOGETHER,
    {"algorithms": [SpikeGuard(threshold=100.0, every=10)]},
    {"callbacks": [Trace()]},
    pytest.param({"num_workers": 2}, marks=pytest.mark.processes),
], ids=["plain", "everything", "spikes", "trace", "workers"])  # fmt: skip
def test_step_does_not_wait_for_device(
    device: torch.device, kind: str, options: dict[str, Any], tmp_path: Path
) -> None:
    forbid = Forbid(50, 10)
    options = {**options, "callbacks": [forbid, *options.get("callbacks", [])]}
    data = rows(200 * options.get("gradient_accumulation_steps", 1), FP32)
    trainer = make(
        kind, device, t16(dropout=0.1, dtype=FP32), data, epochs=2, log_steps=10, save_dir=tmp_path, **options
    )
    with waiting_allowed_at_last(device):
        trainer.train()
    assert trainer.progress.step == 100 and forbid.guarded == 88


class Collects(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        gc.collect()
        return torch.ones(2)


@pytest.mark.gpu
@pytest.mark.processes
def test_workers_do_not_free_what_is_on_the_gpu() -> None:
    """That ends a process for which CUDA does not work, as a forked one."""
    tensor, event = torch.ones(8, device="cuda"), torch.cuda.Event()
    tensor.record_stream(torch.cuda.Stream())
    event.record()
    cycle = [tensor, event]
    cycle.append(cycle)
    del tensor, event, cycle
    assert len(list(start_workers(DataLoader(Collects(), num_workers=2), str))) == 4


class Classifier(nn.Module):
    """Five classes; from the second evaluation batch on to the last one it is an error to wait for the GPU."""

    def __init__(self, batches: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.batches, self.count = nn.Linear(4, 5), batches, 0

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.body(x)
        if not self.training:
            self.count += 1
            forbid_waiting(x.device, self.count < self.batches)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def test_named_metrics_do_not_synchronize(device: torch.device, kind: str) -> None:
    x = rows(40, FP32).tensors[0]
    data = {"x": x, "labels": torch.arange(40) % 5}
    model = Classifier(10)
    trainer = make(kind, device, model, data, data, compute_metrics=["accuracy", "f1_macro", "mcc"])
    trainer.evaluate()  # asks the loss what it is a mean over
    model.count = 0
    with waiting_allowed_at_last(device):
        metrics = trainer.evaluate()
    assert model.count == 10
    with torch.no_grad():
        hits = model.body(x.to(device)).argmax(1).cpu() == data["labels"]
    assert metrics["eval_accuracy"] == pytest.approx(float(hits.float().mean()))


# --- copies


class Reads(nn.Module):
    """Notes what it is fed, long after the host has gone on to other batches, and takes and frees memory."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.seen: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        keep_busy(x.device)
        for _ in range(3):  # what is freed too early is taken by these
            torch.full_like(x, -1.0)
        if self.training:
            self.seen.append(torch.stack(x.aminmax()))
        return {"loss": self.weight**2 + x.mean() * 0}


BATCH = (8, 131072)
"""4 MB: to copy it takes longer than to ask for the copy."""


class Overwrites:
    """A loader that hands out one and the same tensor each time, filled with the number of the batch."""

    def __init__(self, batches: int) -> None:
        self.batches, self.buffer = batches, torch.empty(BATCH)

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        for number in range(self.batches):
            yield {"x": self.buffer.fill_(number)}
            self.buffer.fill_(-2.0)


class Reuses(Overwrites, IterableDataset[dict[str, torch.Tensor]]):
    """The same as a stream of samples."""


class Numbers(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Large samples, each filled with its number."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": torch.full(BATCH, float(index))}


SOURCES: dict[str, dict[str, Any]] = {
    "dataset": {"train_dataset": Numbers(24), "shuffle": False},
    "dataset, not pinned": {"train_dataset": Numbers(24), "shuffle": False, "pin_memory": False},
    "dataset, workers": {"train_dataset": Numbers(24), "shuffle": False, "num_workers": 2},
    "stream that reuses its samples": {"train_dataset": Reuses(24)},
    "loader that reuses its batches": {"train_loader": Overwrites(24)},
}


@pytest.mark.parametrize(
    "source", [pytest.param(name, marks=[pytest.mark.processes] * ("workers" in name)) for name in SOURCES]
)
def test_batches_arrive_intact_under_memory_pressure(device: torch.device, kind: str, source: str) -> None:
    options = dict(SOURCES[source])
    model = Reads()
    options |= {} if "train_loader" in options else {"batch_size": 1}
    make(kind, device, model, options.pop("train_dataset", None), epochs=2, log_steps=1000, **options).train()
    expected = torch.arange(24.0).repeat(2)
    assert torch.equal(torch.stack(model.seen).cpu(), torch.stack([expected, expected], dim=1))


class Refills:
    """A loader of sentences with unequally many labels, in new tensors each time or in the same ones."""

    def __init__(self, reuses: bool) -> None:
        data = Sentences(16)
        self.reuses, self.ids, self.labels = reuses, data.ids, data.labels

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        buffers = {"ids": torch.empty_like(self.ids[:2]), "labels": torch.empty_like(self.labels[:2])}
        for start in range(0, 16, 2):
            batch = {"ids": self.ids[start : start + 2], "labels": self.labels[start : start + 2]}
            yield {name: buffers[name].copy_(batch[name]) for name in buffers} if self.reuses else batch


def test_batch_weight_is_read_before_buffer_reuse(device: torch.device, kind: str) -> None:
    ends = []
    for reuses in (False, True):
        trainer = make(kind, device, Tagger(dtype=FP32), None, train_loader=Refills(reuses), epochs=2)
        history = trainer.train()["train_metrics_history"]
        ends.append(([row["train_loss"] for row in history], trainer.progress.tokens, trainer.progress.samples))
    assert ends[0] == ends[1]


class InPlace(nn.Module):
    """Changes its input in place, or a copy of it."""

    def __init__(self, copies: bool) -> None:
        super().__init__()
        self.inner, self.copies = t16(dtype=FP32), copies

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner((x.clone() if self.copies else x).mul_(0.5))


@pytest.mark.parametrize("options", [{"algorithms": [SAM()]}, {"optimizer": torch.optim.LBFGS}], ids=["SAM", "LBFGS"])
def test_each_pass_gets_unchanged_batch(device: torch.device, kind: str, options: dict[str, Any]) -> None:
    ends = []
    for copies in (True, False):
        trainer = fit(make(
            kind, device, InPlace(copies), rows(16, FP32), loss_fn=F.mse_loss, max_grad_norm=None, **options
        ))  # fmt: skip
        ends.append(weights(trainer.get_model()))
    assert same(*ends)


@pytest.mark.parametrize("has_own", [False, True])
def test_custom_prepare_batch_gets_host_batches(device: torch.device, kind: str, has_own: bool) -> None:
    calls: list[tuple[str, bool]] = []

    class Prepares(trainer_class(kind)):  # type: ignore[misc]
        def _prepare_batch(self, batch: Any) -> Any:
            calls.append((batch[0].device.type, batch[0].is_pinned()))
            return super()._prepare_batch(batch)

    def note_place(trainer: Any, batch: Any) -> Any:
        """Note where a batch is when the model is about to see it."""
        places.add(batch[0].device.type)
        return batch

    places, ends = set[str](), []
    for trainer_type in (Prepares if has_own else trainer_class(kind), trainer_class(kind)):
        place = {"device": device} if kind == "native" else {}
        trainer = fit(trainer_type(
            t16(dtype=FP32), rows(40, FP32), loss_fn=F.mse_loss, learning_rate=0.01, epochs=1, progress_bar=False,
            algorithms=[callback(Algorithm, transform_batch=note_place)], **place,
        ))  # fmt: skip
        ends.append(weights(trainer.get_model()))
    assert places == {device.type}
    assert set(calls) == ({("cpu", device.type == "cuda")} if has_own else set())
    assert same(*ends)


@pytest.mark.processes
def test_workers_and_pinned_memory_change_no_number(device: torch.device, kind: str) -> None:
    ends = []
    for options in ({}, {"num_workers": 2}, {"pin_memory": False}, {"num_workers": 2, "pin_memory": False}):
        trainer = fit(make(kind, device, t16(dtype=FP32), rows(60, FP32), epochs=2, **options))
        ends.append(weights(trainer.get_model()))
    assert all(same(ends[0], end) for end in ends[1:])


# --- kernels


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad"])
def test_sparse_gradients_train_as_dense_ones(device: torch.device, kind: str, optimizer: str) -> None:
    ends = []
    for sparse in (True, False):
        options: dict[str, Any] = {"batch_size": 8, "optimizer": optimizer, "loss_fn": F.mse_loss, "epochs": 2}
        ends.append(weights(fit(make(kind, device, Bags(sparse), bags(22), **options)).get_model()))
    assert distance(*ends) < 1e-12


class Words(nn.Module):
    """Looks few words up many times: the gradients of an embedding are added up in no order of their own on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.out = nn.Embedding(3, 64), nn.Linear(64, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.words(x).tanh()).mean(dim=1)


def test_deterministic_runs_are_bit_equal(device: torch.device, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)  # it is the trainer that sets it
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randint(0, 3, (64, 512), generator=generator), torch.randn(64, 1, generator=generator))
    ends = []
    for _ in range(3):
        trainer = make(kind, device, Words(), data, loss_fn=F.mse_loss, epochs=3, batch_size=16, deterministic=True)
        trainer.train()
        ends.append(weights(trainer.get_model()))
        assert not torch.are_deterministic_algorithms_enabled()
    assert same(ends[0], ends[1]) and same(ends[0], ends[2])
    assert distance(ends[0], weights(Words().to(device))) > 1e-3


@pytest.mark.gpu
def test_deterministic_rejects_missing_kernel(kind: str) -> None:
    device, error = torch.device("cuda"), "does not have a deterministic implementation"
    model = nn.Sequential(
        nn.Linear(49, 49), nn.Unflatten(1, (1, 7, 7)), nn.AdaptiveAvgPool2d(3), nn.Flatten(), nn.Linear(9, 1)
    )
    trainer = make(kind, device, model, TensorDataset(torch.randn(8, 49), torch.randn(8, 1)), deterministic=True)
    with pytest.raises(RuntimeError, match=error):
        trainer.train()
    assert not torch.are_deterministic_algorithms_enabled()
