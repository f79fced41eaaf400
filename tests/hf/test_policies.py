"""`eval_delay` of transformers' arguments: when the first evaluation of a run comes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers
from recipes import StopAt
from tiny import Tokens, bert
from transformers import TrainingArguments

from omnitrain import Callback, HFTrainer


@pytest.fixture
def arguments(tmp_path: Path) -> Any:
    def make(folder: str = "run", **options: Any) -> TrainingArguments:
        defaults = {
            "use_cpu": True, "report_to": "none", "save_strategy": "no", "per_device_train_batch_size": 2,
            "num_train_epochs": 3, "disable_tqdm": True,
        }  # fmt: skip
        return TrainingArguments(str(tmp_path / folder), **{**defaults, **options})

    return make


class Evaluations(transformers.TrainerCallback):
    """Writes down the steps at which there was an evaluation."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.steps.append(state.global_step)


STEPS = {"eval_strategy": "steps", "eval_steps": 2}  # of 12 in all, 4 in an epoch


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({**STEPS, "eval_delay": 5}, [6, 8, 10, 12]),
        ({**STEPS, "eval_delay": 6}, [6, 8, 10, 12]),
        ({**STEPS, "eval_delay": 12}, [12]),
        ({**STEPS, "eval_delay": 13}, []),
        ({**STEPS, "eval_delay": 9, "eval_on_start": True}, [0, 10, 12]),
        ({"eval_strategy": "epoch", "eval_delay": 2}, [8, 12]),
        ({"eval_strategy": "epoch", "eval_delay": 1.5}, [8, 12]),
        ({"eval_strategy": "epoch", "eval_delay": 4}, []),
        ({"eval_strategy": "epoch", "eval_delay": 1, "max_steps": 6}, [4, 6]),
        ({"eval_strategy": "epoch", "eval_delay": 2, "max_steps": 6}, []),
    ],
    ids=str,
)
def test_the_evaluations_of_a_run_are_those_of_a_stock_trainer(
    arguments: Any, said: dict[str, Any], expected: list[int]
) -> None:
    for kind in (transformers.Trainer, HFTrainer):
        seen = Evaluations()
        data = Tokens(8, "classes")
        trainer: Any = kind(bert(), arguments(**said), train_dataset=data, eval_dataset=data, callbacks=[seen])
        trainer.train()
        assert seen.steps == expected, kind


def test_the_end_of_a_run_is_evaluated_at_only_after_the_delay(arguments: Any) -> None:
    for delay, expected in ((8, [9, 12]), (11, [12]), (13, [])):
        data = Tokens(8, "classes")
        args = arguments(eval_strategy="steps", eval_steps=9, eval_delay=delay)
        metrics = HFTrainer(bert(), args, data, data).train()
        assert [row["step"] for row in metrics["valid"]] == expected


@pytest.mark.parametrize("cut", [3, 7])
def test_the_delay_counts_from_the_beginning_of_the_run_and_not_from_a_resume(arguments: Any, cut: int) -> None:
    data = Tokens(8, "classes")
    options = {**STEPS, "eval_delay": 6, "save_strategy": "steps", "save_steps": 100}
    HFTrainer(bert(), arguments(**options), data, data, callbacks=[StopAt(cut)]).train()
    metrics = HFTrainer(bert(), arguments(**options), data, data).train(resume_from="auto")
    assert [row["step"] for row in metrics["valid"]] == [6, 8, 10, 12]


@pytest.mark.parametrize("place", [0, 10])
def test_an_evaluation_that_a_callback_asks_for_is_made_all_the_same(arguments: Any, place: int) -> None:
    class Asks(Callback):
        order = place

        def on_step_end(self, trainer: Any) -> None:
            if trainer.progress.step == 3:
                trainer.request_evaluate()

    data = Tokens(8, "classes")
    trainer = HFTrainer(bert(), arguments(**STEPS, eval_delay=11), data, data, callbacks=[Asks()])
    assert [row["step"] for row in trainer.train()["valid"]] == [3, 12]


def test_a_run_without_an_evaluation_has_no_best_and_keeps_its_last_weights(arguments: Any) -> None:
    data = Tokens(8, "classes")
    args = arguments(**STEPS, eval_delay=50, save_strategy="steps", save_steps=4, load_best_model_at_end=True)
    trainer = HFTrainer(bert(), args, data, data)
    metrics = trainer.train()
    assert metrics["stop_reason"] == "epochs" and metrics["best_valid"] == {} and trainer.progress.step == 12


def test_an_evaluation_before_the_first_step_is_told_once_and_not_in_a_later_run(arguments: Any) -> None:
    data, seen = Tokens(8, "classes"), Evaluations()
    args = arguments(**STEPS, eval_on_start=True, max_steps=1)
    trainer = HFTrainer(bert(), args, data, data, callbacks=[seen])
    trainer.train()
    assert seen.steps == [0, 1]
    trainer.train()
    assert seen.steps == [0, 1, 0, 1]
    assert [row["step"] for row in trainer.engine.state.log_history if "eval_loss" in row] == [0, 1]
