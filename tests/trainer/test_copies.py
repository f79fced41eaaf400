"""Trainers that are pickled, copied, or sent to another process."""

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch.nn.functional as F
from recipes import callback, fit, rows, same, t16, weights

from omnitrain import AccelerateTrainer, ConfigError, HFTrainer, Trainer


class Sums:
    """What a subclass adds: an attribute, and a method that is an argument."""

    def __init__(self, *args: Any, factor: float = 1.0, **options: Any) -> None:
        self.factor = factor
        super().__init__(*args, compute_metrics=self.score, **options)

    def score(self, y_true: Any, y_pred: Any) -> dict[str, float]:
        return {"sum": float(self.factor * y_pred.sum())}


class NativeSums(Sums, Trainer): ...


class AccelerateSums(Sums, AccelerateTrainer): ...


class HFSums(Sums, HFTrainer): ...


def by_joblib(trainer: Any) -> Any:
    joblib, stream = pytest.importorskip("joblib"), io.BytesIO()
    joblib.dump(trainer, stream)
    stream.seek(0)
    return joblib.load(stream)


def by_pickle(trainer: Any) -> Any:
    return pickle.loads(pickle.dumps(trainer))


def build(trainer_class: Any, **options: Any) -> Any:
    options = {"loss_fn": F.mse_loss, "max_steps": 3, "progress_bar": False, "factor": 2.0, **options}
    return trainer_class(t16(), rows(8), rows(4), batch_size=4, **options)


@pytest.mark.parametrize(("trainer_class", "clone"), [
    (NativeSums, by_joblib), (AccelerateSums, by_pickle), (HFSums, by_pickle), (HFSums, copy.deepcopy),
])  # fmt: skip
def test_trainer_is_copied_before_and_after_training(trainer_class: Any, clone: Any, tmp_path: Path) -> None:
    trainer = build(trainer_class, save_dir=tmp_path / "run", overwrite=True)
    twin = clone(trainer)
    assert twin.model is not trainer.model and twin.factor == 2.0
    trainer.train(), twin.train()
    assert same(weights(trainer.model), weights(twin.model))
    assert twin.metrics["valid"] == trainer.metrics["valid"] and "eval_sum" in twin.metrics["valid"][0]
    later = clone(trainer)
    assert later.metrics == trainer.metrics and later.progress.step == 3 and later.stop_reason == "max_steps"
    assert (later.predict(rows(4)).predictions == trainer.predict(rows(4)).predictions).all()
    with pytest.raises(ConfigError, match="this trainer is a copy"):
        later.train(more=1)
    later.train(), trainer.train()
    assert same(weights(trainer.model), weights(later.model))


@pytest.mark.parametrize("trainer_class", [NativeSums, AccelerateSums, HFSums])
def test_trainer_is_not_copied_in_a_run(trainer_class: Any) -> None:
    copying = callback(on_step_end=lambda trainer: copy.deepcopy(trainer))
    with pytest.raises(TypeError, match=r"cannot be pickled or copied while it trains\. Save a checkpoint"):
        build(trainer_class, callbacks=[copying]).train()


def test_copy_of_model_init_has_the_trained_weights() -> None:
    options = {"loss_fn": F.mse_loss, "max_steps": 2, "learning_rate": 0.1, "progress_bar": False}
    trainer = fit(HFTrainer(model_init=lambda: t16(), train_dataset=rows(8), **options))
    assert same(weights(trainer.model), weights(copy.deepcopy(trainer).model))
