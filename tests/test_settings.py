"""Every wrong input is an error before the first step that names the value and the remedy; nothing is written."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate.utils
import pytest
import torch
import torch.nn.functional as F
from recipes import Holding, rows, t16
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR, ReduceLROnPlateau
from torch.utils.data import DataLoader, IterableDataset

from omnitrain import (
    AccelerateTrainer,
    Algorithm,
    Callback,
    ConfigError,
    DataError,
    HFTrainer,
    ObjectiveError,
    ShardedStream,
    Trainer,
)
from omnitrain.settings import Settings, resolve_accumulation, samples_of_step


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(zip(*rows(8).tensors, strict=True))


def foreign_scheduler() -> Any:
    return CosineAnnealingLR(SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1), 10)


def loader() -> DataLoader[Any]:
    return DataLoader(rows(8), 4)


MODEL = t16()
EVAL = {"eval_dataset": rows(4)}
BAD: dict[str, tuple[dict[str, Any] | Callable[[], dict[str, Any]], type[Exception], str]] = {
    # name: (arguments, error, words that must be in its message)
    "unknown argument": ({"learning_rte": 1}, TypeError, "learning_rte.*learning_rate"),
    "batch size of 0": ({"batch_size": 0}, ConfigError, "batch_size.*positive.*0"),
    "batch size of True": ({"batch_size": True}, ConfigError, "batch_size.*True"),
    "batch size in words": ({"batch_size": "8"}, ConfigError, "batch_size.*'8'"),
    "negative rate": ({"learning_rate": -1.0}, ConfigError, "learning_rate.*-1.0"),
    "rate that is not finite": ({"learning_rate": float("nan")}, ConfigError, "learning_rate.*nan"),
    "patience of 0": ({"patience": 0, **EVAL}, ConfigError, "patience.*0.*Leave it out"),
    "patience without evaluations": ({"patience": 3}, ConfigError, "patience=3.*eval_dataset"),
    "eval_steps without evaluations": ({"eval_steps": 5}, ConfigError, "eval_steps=5.*eval_dataset"),
    "evaluation interval of 0": ({"eval_steps": 0, **EVAL}, ConfigError, "eval_steps.*0"),
    "unknown unit of time": ({"max_duration": "3 parsecs"}, ConfigError, "max_duration.*parsecs.*ep"),
    "no epochs": ({"epochs": 0}, ConfigError, "epochs.*0"),
    "no steps": ({"max_steps": -5}, ConfigError, "max_steps.*-5"),
    "clip at 0": ({"max_grad_norm": 0}, ConfigError, "max_grad_norm.*0.*None"),
    "unknown precision": ({"autocast": "fp61"}, ConfigError, "fp61.*fp16"),
    "fp16 on a CPU": ({"autocast": "fp16"}, ConfigError, "fp16.*bf16"),
    "unknown device": ({"device": "gpuu"}, ConfigError, "gpuu"),
    "unknown policy": ({"on_nonfinite": "ignore"}, ConfigError, "raise.*skip.*warn.*ignore"),
    "unknown reduction": ({"grad_reduction": "average"}, ConfigError, "mean.*average"),
    "unknown interval of the schedule": ({"scheduler_interval": "batch"}, ConfigError, "step.*epoch.*batch"),
    "unknown direction": ({"optimization_direction": "up"}, ConfigError, "max.*min.*up"),
    "direction that nobody can tell": (
        {"optimization_metric": "foo", **EVAL},
        ObjectiveError,
        "foo.*optimization_direction",
    ),
    "metric that is not computed": (
        {"optimization_metric": "acc", "compute_metrics": "accuracy", **EVAL},
        ObjectiveError,
        "acc.*accuracy",
    ),
    "unknown metric": ({"compute_metrics": "acuracy", **EVAL}, ConfigError, "acuracy.*accuracy"),
    "two sets to train on": ({"train_loader": loader()}, ConfigError, "train_dataset.*train_loader"),
    "two sets to evaluate on": ({"eval_loader": loader(), **EVAL}, ConfigError, "eval_dataset.*eval_loader"),
    "empty training set": ({"train_dataset": []}, DataError, "train_dataset.*empty"),
    "empty evaluation set": ({"eval_dataset": []}, DataError, "eval_dataset.*empty"),
    "a data set that is none": ({"train_dataset": 7}, DataError, "train_dataset.*int"),
    "a generator as data set": ({"train_dataset": (x for x in [])}, DataError, "train_dataset.*generator"),
    "a model that is none": ({"model": "bert"}, ConfigError, "model.*str"),
    "a model without parameters": ({"model": torch.nn.ReLU()}, ConfigError, "nothing to train"),
    "shards of a global batch that does not divide": (
        lambda: {"train_dataset": ShardedStream([Stream(), Stream()]), "global_batch_size": 30},
        ConfigError,
        "30.*8 x 1 with a ShardedStream",
    ),
    "global batch of no sample": ({"global_batch_size": 0}, ConfigError, "global_batch_size"),
    "global batch that changes, not divisible": ({"global_batch_size": {0: 8, "1ep": 12}}, ConfigError, "8 x 1.*12"),
    "global batch that changes, without a start": ({"global_batch_size": {"1ep": 8}}, ConfigError, "begin with.* at 0"),
    "global batch that changes, empty": ({"global_batch_size": {}}, ConfigError, "begin with the number at 0"),
    "global batch that changes, no size": ({"global_batch_size": {0: 8, "1ep": "x"}}, ConfigError, "'x' at '1ep'"),
    "global batch that changes, no unit": ({"global_batch_size": {0: 8, 5: 16}}, ConfigError, "with its unit.*got 5"),
    "global batch that changes, in steps": ({"global_batch_size": {0: 8, "5ba": 16}}, ConfigError, "got '5ba'"),
    "global batch that changes, backwards": (
        {"global_batch_size": {0: 8, "2ep": 16, "1ep": 32}},
        ConfigError,
        "'1ep' after '2ep'",
    ),
    "global batch that changes, in two units": (
        {"global_batch_size": {0: 8, "2ep": 16, "90sp": 32}},
        ConfigError,
        "one unit.*'90sp' after '2ep'",
    ),
    "global batch that changes, at a share of steps": (
        {"global_batch_size": {0: 8, "0.5dur": 16}, "max_steps": 5, "epochs": None},
        ConfigError,
        "ends after '5ba'",
    ),
    "global batch that changes, and drop_last": (
        {"global_batch_size": {0: 8, "1ep": 16}, "drop_last": True},
        ConfigError,
        "drop_last=True.*several sizes",
    ),
    "global batch that changes, against accumulation": (
        {"global_batch_size": {0: 8, "1ep": 16}, "gradient_accumulation_steps": 2},
        ConfigError,
        "gradient_accumulation_steps=2.*global_batch_size",
    ),
    "global batch against accumulation": (
        {"global_batch_size": 32, "gradient_accumulation_steps": 3},
        ConfigError,
        "3.*32.*4",
    ),
    "rate beside an optimizer": (
        lambda: {"optimizer": AdamW(MODEL.parameters()), "learning_rate": 1e-3},
        ConfigError,
        "learning_rate=0.001.*optimizer",
    ),
    "decay beside an optimizer": (
        lambda: {"optimizer": AdamW(MODEL.parameters()), "weight_decay": 0.1},
        ConfigError,
        "weight_decay=0.1.*optimizer",
    ),
    "optimizer of another model": (
        lambda: {"optimizer": AdamW(t16().parameters())},
        ConfigError,
        "none of the model's",
    ),
    "optimizer that cannot be imported": ({"optimizer": "torch.optim.Sdg"}, ConfigError, "torch.optim.Sdg"),
    "schedule of another optimizer": ({"lr_scheduler": foreign_scheduler()}, ConfigError, "another optimizer"),
    "unknown schedule": ({"lr_scheduler": "cosin"}, ConfigError, "cosin.*cosine"),
    "warm-up of a schedule of one's own": (
        {"lr_scheduler": lambda o: CosineAnnealingLR(o, 5), "warmup_steps": 3},
        ConfigError,
        "warmup_steps=3",
    ),
    "warm-up longer than the run": ({"lr_scheduler": "cosine", "warmup_steps": 99}, ConfigError, "warmup_steps=99"),
    "schedule over an unknown length": (
        {"train_dataset": Stream(), "lr_scheduler": "linear"},
        ConfigError,
        "max_steps",
    ),
    "schedule per epoch without a schedule": ({"scheduler_interval": "epoch"}, ConfigError, "lr_scheduler"),
    "warm-up steps of a schedule per epoch": (
        {"scheduler_interval": "epoch", "lr_scheduler": "cosine", "warmup_steps": 2},
        ConfigError,
        "warmup_steps=2.*epoch",
    ),
    "plateau without evaluations": (
        {"lr_scheduler": ReduceLROnPlateau},
        ConfigError,
        "ReduceLROnPlateau.*eval_dataset",
    ),
    "prefetch without workers": ({"prefetch_factor": 2}, ConfigError, "prefetch_factor=2.*num_workers"),
    "unit beside a loss": ({"unit": lambda batch: 0}, ConfigError, "unit.*loss_fn"),
    "a class as a callback": ({"callbacks": [Callback]}, ConfigError, "callbacks.*Callback"),
    "a function as an algorithm": ({"algorithms": [print]}, ConfigError, "algorithms.*print"),
    "checkpoints without a place": ({"save_steps": 5}, ConfigError, "save_steps=5.*save_dir"),
    "retention without a place": ({"save_total_limit": 2}, ConfigError, "save_total_limit=2.*save_dir"),
    "batches beside a loader": (
        {"train_dataset": None, "train_loader": loader(), "batch_size": 4},
        ConfigError,
        "batch_size=4.*train_loader.*loader",
    ),
    "batches beside a loader, with evaluations": (
        {"train_dataset": loader(), "batch_size": 4, "eval_batch_size": 8, **EVAL},
        ConfigError,
        "batch_size=4.*train_dataset.*eval_batch_size",
    ),
    "workers beside a loader given as a dataset": (
        {"train_dataset": loader(), "num_workers": 2},
        ConfigError,
        "num_workers=2.*train_dataset",
    ),
    "pinning beside a loader": (
        {"train_dataset": None, "train_loader": loader(), "pin_memory": True},
        ConfigError,
        "pin_memory=True.*train_loader",
    ),
    "a metric to select by, without evaluations": (
        {"optimization_metric": "accuracy"},
        ConfigError,
        "optimization_metric='accuracy'.*eval_dataset",
    ),
    "a direction without evaluations": (
        {"optimization_direction": "min"},
        ConfigError,
        "optimization_direction='min'.*eval_dataset",
    ),
    "delta without patience": ({"delta": 0.1, **EVAL}, ConfigError, "delta=0.1.*patience"),
    "keeping the best without a place": ({"keep_best": 3}, ConfigError, "keep_best=3.*save_dir"),
    "keeping every of all": ({"keep_every": 3, "save_dir": "run"}, ConfigError, "keep_every=3.*save_total_limit"),
    "keeping every fifth of all": ({"keep_every": 5, "save_dir": "run"}, ConfigError, "keep_every=5.*save_total_limit"),
    "plateau per epoch": (
        {"lr_scheduler": ReduceLROnPlateau, "scheduler_interval": "epoch", **EVAL},
        ConfigError,
        "scheduler_interval='epoch'.*follows evaluations",
    ),
    "loss scale upside down": ({"fp16_loss_scale": (1.0, 2.0)}, ConfigError, "fp16_loss_scale"),
    "loss scale that never doubles": ({"fp16_loss_scale": (2.0, 1.0, 0)}, ConfigError, "fp16_loss_scale"),
    "loss scale of half a step": ({"fp16_loss_scale": (2.0, 1.0, 2.5)}, ConfigError, "fp16_loss_scale"),
    "a dtype of nothing": ({"dtypes": {"parameter": "bf16"}}, ConfigError, "Did you mean 'parameters'"),
    "no dtype": ({"dtypes": {"inputs": "int8"}}, ConfigError, r"dtypes\['inputs'\]` must be one of 'fp32'"),
    "dtypes of nothing": ({"dtypes": {}}, ConfigError, "must be a dict such as"),
    "parameters of fp16": ({"dtypes": {"parameters": "half"}}, ConfigError, "would not train.*autocast='fp16'"),
    "precision of products": ({"matmul_precision": "tf32"}, ConfigError, "'highest', 'high', 'medium'"),
    "seed that no generator takes": ({"seed": 2**64}, ConfigError, f"seed.*at most {2**64 - 1}"),
    "a model's class": ({"model": torch.nn.Linear}, ConfigError, r"model.*the class Linear.*Linear\(\.\.\.\)"),
    "a loss's class": (
        {"loss_fn": torch.nn.CrossEntropyLoss},
        ConfigError,
        r"loss_fn.*CrossEntropyLoss\(\.\.\.\)",
    ),
    "a path of a function": ({"optimizer": "os.system"}, ConfigError, "os.system.*not a subclass of torch.optim"),
    "a path of another class": ({"optimizer": "pathlib.Path"}, ConfigError, "pathlib.Path.*not a subclass"),
    "a path that was not imported": ({"optimizer": "antigravity.Optimizer"}, ConfigError, "antigravity.*imported"),
    "a path of a schedule that is none": ({"lr_scheduler": "os.system"}, ConfigError, "os.system.*LRScheduler"),
    "a short name that is misspelt": ({"optimizer": "adamww"}, ConfigError, "'sgd'.*adamww.*Did you mean 'adamw'"),
    "a schedule that needs more": (
        {"lr_scheduler": CosineAnnealingLR},
        ConfigError,
        "Cosine.*T_max.*lambda",
    ),
    "a metric that is no name": ({"optimization_metric": 3, **EVAL}, ConfigError, "optimization_metric.*3"),
    "callbacks that are no list": ({"callbacks": 7}, ConfigError, "callbacks.*list.*7"),
    "seed that is no integer": ({"seed": "x"}, ConfigError, "seed.*'x'"),
    "shuffling a loader": ({"train_dataset": None, "train_loader": loader(), "shuffle": False}, ConfigError, "shuffle"),
    "global batch of a loader": (
        {"train_dataset": None, "train_loader": loader(), "global_batch_size": 16},
        ConfigError,
        "global_batch_size",
    ),
    "a loss that is no function": ({"loss_fn": 3}, ConfigError, "loss_fn.*3"),
    "a collator that is no function": ({"data_collator": "x"}, ConfigError, "data_collator.*'x'"),
    "asynchronous saving without a place": ({"async_save": True}, ConfigError, "async_save=True.*save_dir"),
    "keeping every zeroth": ({"keep_every": 0}, ConfigError, "keep_every.*0"),
    "best weights without evaluations": ({"load_best_at_end": True}, ConfigError, "load_best_at_end=True.*eval"),
    "a switch in words": ({"deterministic": "yes"}, ConfigError, "deterministic.*'yes'"),
    "negative delta": ({"delta": -0.1, "patience": 2, **EVAL}, ConfigError, "delta.*-0.1"),
}


def test_settings_split_global_batch_size() -> None:
    settings = Settings(batch_size=2, global_batch_size=7)
    found = [(resolve_accumulation(settings, ranks), samples_of_step(settings, ranks)) for ranks in (1, 2, 3, 4, 7)]
    assert found == [(4, 7), (2, 7), (2, 7), (1, 7), (1, 7)]
    with pytest.raises(ConfigError, match=r"`global_batch_size=7` has no sample for each of 8 processes.* 7 processes"):
        resolve_accumulation(settings, 8)


@pytest.mark.parametrize("name", BAD)
def test_settings_reject_wrong_values(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    options, error, words = BAD[name]
    options = {
        "loss_fn": F.mse_loss,
        "device": "cpu",
        "model": MODEL,
        "train_dataset": rows(8),
        **(options() if callable(options) else options),
    }
    before = [parameter.clone() for parameter in MODEL.parameters()]
    with pytest.raises(error) as caught:
        Trainer(**options)
    assert re.search(words, str(caught.value), re.DOTALL), str(caught.value)
    assert all(torch.equal(a, b) for a, b in zip(before, MODEL.parameters(), strict=True))
    assert list(tmp_path.iterdir()) == []


def test_settings_reject_twenty_kinds() -> None:
    assert len(BAD) >= 20


def test_train_rejects_missing_data() -> None:
    with pytest.raises(ConfigError, match="train_dataset"):
        Trainer(t16(), eval_dataset=rows(4), loss_fn=F.mse_loss, device="cpu").train()


def test_callback_rejects_unknown_hook() -> None:
    with pytest.raises(ConfigError, match=r"on_steps_end.*Did you mean 'on_step_end'"):
        type("Typo", (Callback,), {"on_steps_end": lambda self, trainer: None})


def test_resolved_config_is_json() -> None:
    import json

    trainer = Trainer(t16(), rows(8), loss_fn=F.mse_loss, device="cpu", global_batch_size=16, batch_size=4)
    config = json.loads(json.dumps(trainer.resolved_config()))
    assert config["gradient_accumulation_steps"] == 4
    assert config["optimizer"].endswith("AdamW")
    assert config["optimization_direction"] == "min"


# --- settings after the trainer was made


TRAINERS = {"native": Trainer, "accelerate": AccelerateTrainer, "hf": HFTrainer}
MAY_BE_ASSIGNED = {"model", "optimizer", "lr_scheduler", "unit"}


@pytest.fixture(params=TRAINERS)
def trainer_class(request: pytest.FixtureRequest) -> Any:
    return TRAINERS[request.param]


def quiet(trainer_class: Any, model: Any = None, **options: Any) -> Any:
    options = {"train_dataset": rows(8), "loss_fn": F.mse_loss, "progress_bar": False, "epochs": 1, **options}
    placed = {"device": "cpu"} if trainer_class is Trainer else {}
    return trainer_class(model or t16(), **{**placed, **options})


def test_settings_none_means_default(trainer_class: Any) -> None:
    trainer = quiet(trainer_class, callbacks=None, algorithms=None, optimization_metric=None, eval_dataset=rows(4))
    assert trainer.algorithms == []
    assert trainer.objective.metric == "loss"
    trainer.train()


@pytest.mark.parametrize("argument", ["callbacks", "algorithms"])
def test_settings_reject_class_in_list(trainer_class: Any, argument: str) -> None:
    mine = type("Mine", (Callback if argument == "callbacks" else Algorithm,), {})
    with pytest.raises(ConfigError, match=rf"`{argument}` takes instances, got the class Mine. Pass Mine\(\.\.\.\)"):
        quiet(trainer_class, **{argument: [mine]})


def test_hf_trainer_rejects_positional_datasets(tmp_path: Path) -> None:
    from transformers import TrainingArguments

    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    with pytest.raises(TypeError, match=r"HFTrainer\(\): multiple values for argument 'training_args'.*by name"):
        HFTrainer(t16(), rows(8), rows(4), training_args=args)  # type: ignore[arg-type]


def test_settings_reject_assignment(trainer_class: Any) -> None:
    trainer = quiet(trainer_class)
    names = [name for name in inspect.signature(trainer_class.__init__).parameters if name not in ("self", "unknown")]
    for name in set(names) - MAY_BE_ASSIGNED - getattr(trainer_class, "ASSIGNABLE", frozenset()):
        for error in (ConfigError, AttributeError):
            with pytest.raises(error, match=f"`{name}` is fixed.*{trainer_class.__name__}\\(..., {name}=64"):
                setattr(trainer, name, 64)
    assert trainer.batch_size == 8
    trainer.own_attribute = 1


def test_settings_reject_assignment_in_subclass(trainer_class: Any) -> None:
    class Before(trainer_class):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.learning_rate = 0.5
            super().__init__(*args, **kwargs)

    class After(trainer_class):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.count = 0
            self.loss_fn = F.l1_loss

    for kind, name in ((Before, "learning_rate"), (After, "loss_fn")):
        with pytest.raises(AttributeError, match=f"`{name}` is fixed"):
            quiet(kind)


def test_settings_reject_assignment_in_callback(trainer_class: Any) -> None:
    class Grow(Callback):
        def on_step_end(self, trainer: Any) -> None:
            trainer.batch_size = 64

    with pytest.raises(ConfigError, match="`batch_size` is fixed") as caught:
        quiet(trainer_class, callbacks=[Grow()]).train()
    assert any("Grow.on_step_end" in note for note in caught.value.__notes__)


def test_assigned_optimizer_trains_on(trainer_class: Any) -> None:
    trainer = quiet(trainer_class)
    trainer.optimizer = SGD(trainer.model.parameters(), lr=0.5)
    for _ in range(2):
        trainer.train()
        assert type(trainer.optimizer) is SGD


def test_assigned_optimizer_rejects_old_schedule(trainer_class: Any) -> None:
    trainer = quiet(trainer_class, lr_scheduler="linear")
    trainer.optimizer = SGD(trainer.model.parameters(), lr=0.5)
    with pytest.raises(ConfigError, match=r"lr_scheduler.*another optimizer"):
        trainer.train()


# --- what would train nothing


def test_unit_rejects_other_model(trainer_class: Any) -> None:
    with pytest.raises(ConfigError, match=r"No parameter of the optimizer got a gradient.*unit"):
        quiet(trainer_class, unit=Holding(t16()), loss_fn=None).train()


def test_unfrozen_layers_are_reported_once(trainer_class: Any, caplog: pytest.LogCaptureFixture) -> None:
    model = t16()
    model[0].requires_grad_(False)
    trainer = quiet(trainer_class, model, epochs=2)
    model[0].requires_grad_(True)
    with caplog.at_level("WARNING", "omnitrain"):
        trainer.train()
    told = [record.getMessage() for record in caplog.records if "in no group of the optimizer" in record.getMessage()]
    assert len(told) == 1
    assert re.search(r"2 parameters.*0\.weight, 0\.bias.*add_param_group", told[0])


def test_unfrozen_layers_of_callback_are_reported(trainer_class: Any, caplog: pytest.LogCaptureFixture) -> None:
    class Unfreeze(Callback):
        def on_epoch_end(self, trainer: Any) -> None:
            trainer.model[0].requires_grad_(True)

    model = t16()
    model[0].requires_grad_(False)
    with caplog.at_level("WARNING", "omnitrain"):
        quiet(trainer_class, model, epochs=3, callbacks=[Unfreeze()]).train()
    assert sum("in no group of the optimizer" in record.getMessage() for record in caplog.records) == 1


def test_settings_reject_unused_loss_scale(trainer_class: Any) -> None:
    with pytest.raises(ConfigError, match=r"fp16_loss_scale=.*autocast='fp16'"):
        quiet(trainer_class, fp16_loss_scale=(8.0, 1.0)).train()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"find_unused_parameters": True}, "find_unused_parameters.*accelerator"),
        ({"parallelism_config": object()}, "parallelism_config.*accelerator"),
    ],
)
def test_settings_reject_conflict_with_accelerator(options: dict[str, Any], words: str) -> None:
    from accelerate import Accelerator

    with pytest.raises(ConfigError, match=words):
        quiet(AccelerateTrainer, accelerator=Accelerator(cpu=True), **options)


def test_hf_trainer_rejects_two_training_arguments(tmp_path: Path) -> None:
    from transformers import TrainingArguments

    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    with pytest.raises(ConfigError, match="`args` and `training_args`"):
        quiet(HFTrainer, args=args, training_args=args)


def test_parallelism_errors_are_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = getattr(accelerate.utils, "ParallelismConfig", None)
    if kind is not None:
        with pytest.raises(ConfigError, match="`parallelism_config` cannot be used here"):
            quiet(AccelerateTrainer, parallelism_config=kind(dp_replicate_size=2))
        monkeypatch.delattr(accelerate.utils, "ParallelismConfig")
    with pytest.raises(ConfigError, match=r"`parallelism_config` needs accelerate 1\.10 or newer, and this is"):
        quiet(AccelerateTrainer, parallelism_config=object())


@pytest.mark.parametrize("name", ["cp_size", "sp_size"])
def test_parallelism_rejects_sequence_meshes(name: str) -> None:
    from accelerate.utils import ParallelismConfig

    sizes: dict[str, Any] = {name: 2}
    with pytest.raises(ConfigError, match=f"{name}=2, which is not supported"):
        quiet(AccelerateTrainer, parallelism_config=ParallelismConfig(**sizes))
