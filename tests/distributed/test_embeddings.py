"""Sparse gradients of embeddings on two processes: as dense ones on one, or an error before the first step."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch.nn.functional as F
from backends import DTYPES, PROCESSES, Job, asked_for, dtype_of, gap, launch_all, make_trainer
from embeddings import Bags, bags
from marks import thinned
from recipes import StopAt, Trace
from torch import nn

from omnitrain.checkpoint.tensor_files import gather_to_host

HERE = "test_embeddings"
SHARDED = [name for name, processes in PROCESSES.items() if processes > 1 and name not in ("ddp", "hf2")]
KINDS: dict[str, dict[str, Any]] = {
    "plain": {"batch_size": 2}, "adagrad": {"optimizer": "adagrad"},
    "uneven": {"batch_size": 3, "global_batch_size": 7},
    "auto": {"batch_size": 4, "microbatch_size": "auto"}, "reductions": {"dtypes": {"reductions": "fp32"}},
}  # fmt: skip
REFERENCES = {"reductions": "plain"}
LEARN = [*(("ddp", kind) for kind in KINDS), ("hf2", "plain")]


def learn(backend: str, kind: str, sparse: bool = True, folder: str = "") -> dict[str, Any]:
    """Train in 6 steps; with a folder, in two runs, the second from the checkpoint of the first."""

    def run(*callbacks: Any, **options: Any) -> Any:
        trainer = make_trainer(
            backend, Bags(sparse), bags(22), loss_fn=F.mse_loss, epochs=2, learning_rate=0.1, max_grad_norm=0.3,
            callbacks=[trace, *callbacks],
            **{"optimizer": "sgd", "batch_size": 4, "global_batch_size": 8, **KINDS[kind], **options},
        )  # fmt: skip
        trainer.train(**({"resume_from": "auto"} if options else {}))
        return trainer

    trace = Trace()
    if folder:
        run(StopAt(4), save_dir=folder, save_steps=2)
    trainer = run(**({"save_dir": folder, "save_steps": 2} if folder else {}))
    return {
        "logs": [[row["loss"], row["grad_norm"]] for row in trace.logs],
        "tensors": {name: gather_to_host(one) for name, one in sorted(trainer.backend.model_tensors().items())},
    }


class Tied(nn.Module):
    """An embedding whose weight is that of a linear layer too."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(20, 4, sparse=True), nn.Linear(4, 20, bias=False)
        self.head.weight = self.table.weight

    def forward(self, indices: Any) -> Any:
        return self.head(self.table(indices)).mean((1, 2))


class Functional(nn.Module):
    """A table that no layer holds."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 4).weight

    def forward(self, indices: Any) -> Any:
        return F.embedding(indices, self.table, sparse=True).mean((1, 2))


def reject(backend: str, case: str, folder: str) -> dict[str, Any]:
    """Train what cannot be trained."""
    dtype = DTYPES[dtype_of(backend)]
    model = {"bags": lambda: Bags(True, dtype=dtype), "tied": Tied, "functional": Functional}.get(case)
    make_trainer(
        backend, Bags(False, dtype=dtype) if model is None else model(), bags(8, dtype), loss_fn=F.mse_loss, epochs=1,
        optimizer={"tied": "adamw", "sparseadam": "sparseadam"}.get(case, "sgd"), save_dir=folder,
    ).train()  # fmt: skip
    return {"error": "", "message": ""}


REJECTED = [
    *((backend, "bags") for backend in SHARDED), *((backend, "sparseadam") for backend in ("fsdp", "zero2")),
    ("ddp", "tied"), ("ddp", "functional"),
]  # fmt: skip
QUICK = [(backend, case) for backend, case in REJECTED if backend in ("fsdp", "zero3", "ddp")]
MESSAGES = {
    "bags": "'table.weight' are sparse, which cannot be trained here: .* sparse=False",
    "sparseadam": "takes sparse gradients only, and those of 'table.weight', .* are dense",
    "tied": "'table.weight' belongs to an embedding with sparse=True and to another layer",
    "functional": "A gradient is sparse of which DDP did not know",
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Any:
    folder, jobs = tmp_path_factory.mktemp("embeddings"), []
    learning: set[Any] = asked_for(request, "backend", "kind")
    for backend, kind in sorted(learning):
        jobs.append(Job(f"learn-{backend}-{kind}", backend, f"{HERE}:learn", {"kind": kind}))
    for kind in sorted({REFERENCES.get(kind, str(kind)) for _, kind in learning}):
        jobs.append(Job(f"dense-{kind}", "native", f"{HERE}:learn", {"kind": kind, "sparse": False}))
    jobs.append(Job("resumed", "ddp", f"{HERE}:learn", {"kind": "adagrad", "folder": str(folder / "resumed")}))
    for backend, case in sorted(asked_for(request, "backend", "case"), key=REJECTED.index):
        options = {"case": case, "folder": str(folder / f"{backend}-{case}")}
        jobs.append(Job(f"reject-{backend}-{case}", backend, f"{HERE}:reject", options))
    return {"folder": folder, "ran": launch_all(jobs, folder)}


@pytest.mark.parametrize(("backend", "kind"), LEARN)
def test_sparse_gradients_train_as_dense_on_one_process(results: Any, backend: str, kind: str) -> None:
    ranks = results["ran"][f"learn-{backend}-{kind}"]
    (reference,) = results["ran"][f"dense-{REFERENCES.get(kind, kind)}"]
    limit = 1e-6 if kind == "reductions" else 1e-12
    assert all(gap(rank, reference) < limit for rank in ranks)


def test_sparse_gradients_resume_under_ddp(results: Any) -> None:
    for resumed, straight in zip(results["ran"]["resumed"], results["ran"]["learn-ddp-adagrad"], strict=True):
        assert gap(resumed["tensors"], straight["tensors"]) == 0 and gap(resumed["logs"], straight["logs"]) == 0


@pytest.mark.parametrize(("backend", "case"), thinned(REJECTED, QUICK))
def test_what_cannot_be_trained_raises(results: Any, backend: str, case: str) -> None:
    for rank in results["ran"][f"reject-{backend}-{case}"]:
        assert rank["error"] == "ConfigError" and re.search(MESSAGES[case], rank["message"])
    assert not list((results["folder"] / f"{backend}-{case}").glob("checkpoint*"))
