"""`eval_delay` and `eval_on_start`: the first evaluation of a run."""

from __future__ import annotations

from typing import Any

import pytest
import transformers
from marks import thinned
from recipes import StopAt
from tiny import Tokens, bert

from omnitrain import Callback, HFTrainer

DEFAULTS = {"per_device_train_batch_size": 2, "num_train_epochs": 3, "disable_tqdm": True}


def classifier(args: Any, *callbacks: Any, kind: Any = HFTrainer) -> Any:
    """A trainer of 12 steps, 4 in an epoch."""
    data = Tokens(8, "classes")
    return kind(bert(), args, train_dataset=data, eval_dataset=data, callbacks=[*callbacks])


class Evaluations(transformers.TrainerCallback):
    """The steps of evaluations."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.steps.append(state.global_step)


STEPS = {"eval_strategy": "steps", "eval_steps": 2}
EPOCHS = {"eval_strategy": "epoch"}


DELAYS: list[Any] = [
    ({**STEPS, "eval_delay": 5}, [6, 8, 10, 12]),
    ({**STEPS, "eval_delay": 6}, [6, 8, 10, 12]),
    ({**STEPS, "eval_delay": 12}, [12]),
    ({**STEPS, "eval_delay": 13}, []),
    ({**STEPS, "eval_delay": 9, "eval_on_start": True}, [0, 10, 12]),
    ({**EPOCHS, "eval_delay": 2}, [8, 12]),
    ({**EPOCHS, "eval_delay": 1.5}, [8, 12]),
    ({**EPOCHS, "eval_delay": 4}, []),
    ({**EPOCHS, "eval_delay": 1, "max_steps": 6}, [4, 6]),
    ({**EPOCHS, "eval_delay": 2, "max_steps": 6}, []),
]


@pytest.mark.parametrize(("fields", "expected"), thinned(DELAYS, [DELAYS[1], DELAYS[4], DELAYS[8]]), ids=str)
def test_eval_delay_has_the_evaluations_of_a_stock_trainer(
    arguments: Any, fields: dict[str, Any], expected: list[int]
) -> None:
    for kind in (transformers.Trainer, HFTrainer):
        evaluations = Evaluations()
        classifier(arguments(**fields), evaluations, kind=kind).train()
        assert evaluations.steps == expected, kind


@pytest.mark.parametrize(("delay", "expected"), thinned([(8, [9, 12]), (11, [12]), (13, [])], [(11, [12])]))
def test_eval_delay_holds_for_the_end_of_a_run(arguments: Any, delay: int, expected: list[int]) -> None:
    metrics = classifier(arguments(eval_strategy="steps", eval_steps=9, eval_delay=delay)).train()
    assert [row["step"] for row in metrics["valid"]] == expected


@pytest.mark.parametrize("cut", thinned([3, 7], [3]))
def test_eval_delay_counts_from_the_start_and_not_from_a_resume(arguments: Any, cut: int) -> None:
    args = arguments(**STEPS, eval_delay=6, save_strategy="steps", save_steps=100)
    classifier(args, StopAt(cut)).train()
    metrics = classifier(args).train(resume_from="auto")
    assert [row["step"] for row in metrics["valid"]] == [6, 8, 10, 12]


@pytest.mark.parametrize("order", thinned([0, 10], [10]))
def test_eval_delay_does_not_hold_for_requests(arguments: Any, order: int) -> None:
    class Requests(Callback):
        def on_step_end(self, trainer: Any) -> None:
            if trainer.progress.step == 3:
                trainer.request_evaluate()

    Requests.order = order
    metrics = classifier(arguments(**STEPS, eval_delay=11), Requests()).train()
    assert [row["step"] for row in metrics["valid"]] == [3, 12]


def test_run_without_an_evaluation_has_no_best(arguments: Any) -> None:
    args = arguments(**STEPS, eval_delay=50, save_strategy="steps", save_steps=4, load_best_model_at_end=True)
    trainer = classifier(args)
    metrics = trainer.train()
    assert metrics["stop_reason"] == "epochs" and metrics["best_valid"] == {} and trainer.progress.step == 12


def test_eval_on_start_evaluates_once_in_each_run(arguments: Any) -> None:
    evaluations = Evaluations()
    trainer = classifier(arguments(**STEPS, eval_on_start=True, max_steps=1), evaluations)
    for steps in ([0, 1], [0, 1, 0, 1]):
        trainer.train()
        assert evaluations.steps == steps
    assert [row["step"] for row in trainer.state.log_history if "eval_loss" in row] == [0, 1]
