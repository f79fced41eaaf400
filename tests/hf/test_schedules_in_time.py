"""Schedules that training arguments name, in runs whose steps are unknown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from recipes import Sentences, Tagger, Trace
from transformers import TrainingArguments

from omnitrain import HFTrainer, Trainer


def rates(trainer_class: Any, *args: Any, **options: Any) -> list[float]:
    trace = Trace()
    trainer = trainer_class(
        Tagger(), *args, train_dataset=Sentences(20), callbacks=[trace], max_duration="200tok", log_steps=1, **options
    )
    trainer.train()
    return [row["learning_rate"] for row in trace.logs if "learning_rate" in row]


@pytest.mark.parametrize(
    ("name", "options"), [("cosine_with_min_lr", {"min_lr": 0.005}), ("linear", {}), ("cosine", {"num_cycles": 0.4})]
)
def test_they_span_the_tokens_of_a_run_with_a_share_as_warm_up(name: str, options: Any, tmp_path: Path) -> None:
    def sgd(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.05)

    args = TrainingArguments(
        str(tmp_path), use_cpu=True, report_to="none", per_device_train_batch_size=4, learning_rate=0.05,
        lr_scheduler_type=name, lr_scheduler_kwargs=options, warmup_steps=0.2, save_strategy="no", disable_tqdm=True,
        optim="sgd",
    )  # fmt: skip
    expected = rates(
        Trainer, batch_size=4, optimizer=sgd, lr_scheduler=name, lr_scheduler_kwargs=options, warmup_steps=0.2,
        device="cpu", progress_bar=False,
    )  # fmt: skip
    assert rates(HFTrainer, args) == expected and len(set(expected)) > 5
