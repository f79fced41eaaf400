"""`compile=`: what runs is compiled, on every trainer, and everything else is as without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from recipes import Graphs, Holding, StopAt, rows, same, t16, weights
from safetensors.torch import load_file
from torch import nn
from transformers import TrainingArguments

from omnitrain import AccelerateTrainer, ConfigError, HFTrainer, Trainer

TRAINERS = {"native": Trainer, "accelerate": AccelerateTrainer, "hf": HFTrainer}


@pytest.fixture(params=TRAINERS)
def kind(request: pytest.FixtureRequest) -> Any:
    return TRAINERS[request.param]


def make(kind: Any, model: nn.Module, *args: Any, **options: Any) -> Any:
    options |= {"device": "cpu"} if kind is Trainer else {}
    options = {"progress_bar": False, "learning_rate": 1e-2, "loss_fn": F.mse_loss, **options}
    return kind(model, *args, train_dataset=rows(24), eval_dataset=rows(8), **options)


def test_compiled_run_equals_plain(kind: Any, tmp_path: Path) -> None:
    compiler, plain, model = Graphs(), t16(dropout=0.2), t16(dropout=0.2)
    expected = make(kind, plain, epochs=2).train()
    options: dict[str, Any] = {"compile": {"backend": compiler}, "epochs": 2, "save_dir": tmp_path}
    make(kind, t16(dropout=0.2), callbacks=[StopAt(4)], **options).train()
    assert compiler.count
    trainer = make(kind, model, **options)
    assert trainer.train(resume_from="auto")["valid"] == expected["valid"]
    assert same(weights(plain), weights(model))
    assert trainer.model is model and trainer.model_wrapped._orig_mod is model
    assert set(load_file(tmp_path / "checkpoint-6" / "model.safetensors")) == set(plain.state_dict())
    trainer.model = other = t16(seed=1)
    assert trainer.model is other and trainer.model_wrapped._orig_mod is other


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"compile": "yes"}, "compile.*True, False or a dict.*'yes'"),
        ({"compile": {"bakend": "eager"}}, "compile.*bakend"),
        ({"compile": {"backend": "nowhere"}}, "compile.*nowhere"),
        ({"compile": True, "unit": Holding(t16()), "loss_fn": None}, "compile.*unit"),
    ],
)
def test_compile_rejects_wrong_values(kind: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make(kind, t16(), **options)


def test_compile_rejects_compiled_model(kind: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="compiled already"):
        make(kind, torch.compile(t16(), backend="eager"), compile=True)  # type: ignore[arg-type]
    if kind is HFTrainer:
        args = TrainingArguments(str(tmp_path), torch_compile=True, use_cpu=True, report_to="none")
        with pytest.raises(ConfigError, match="torch_compile=True"):
            make(kind, t16(), args, compile=True, learning_rate=None)
