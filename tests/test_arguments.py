"""Every wrong input is an error before the first step that names the value and the remedy; nothing is written."""

import functools
import inspect
import re
from pathlib import Path
from typing import Any

import accelerate.utils
import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from counting import Streamed
from recipes import Holding, callback, fit, rows, same, t16, trainer_on_cpu, weights
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR, ReduceLROnPlateau
from torch.utils.data import DataLoader

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
from omnitrain.arguments import Settings, resolve_accumulation, samples_of_step


def loader() -> DataLoader[Any]:
    return DataLoader(rows(8), 4)


MODEL = t16()
EVAL = {"eval_dataset": rows(4)}
CONFIG_ERRORS: list[tuple[dict[str, Any], str]] = [
    ({"batch_size": 0}, "batch_size.*positive.*0"),
    ({"learning_rate": -1.0}, "learning_rate.*-1.0"),
    ({"patience": 0, **EVAL}, "patience.*0.*Leave it out"),
    ({"patience": 3}, "patience=3.*eval_dataset"),
    ({"max_duration": "3 parsecs"}, "max_duration.*parsecs.*ep"),
    ({"max_grad_norm": 0}, "max_grad_norm.*0.*None"),
    ({"gradient_checkpointing": ["("]}, r"gradient_checkpointing.*got \['\('\] \(missing \)"),
    ({"freeze": ["a", "*"]}, r"freeze.*got \['a', '\*'\] \(nothing to repeat"),
    ({"param_groups": [{"match": "(", "lr": 1.0}]}, r"param_groups\[0\].*got '\(' \(missing \)"),
    ({"param_groups": [{"match": ".", "weight_decay": -1, "lr": -2}]}, "'lr' must be .* got -2"),
    ({"loss_fn": 2**63}, f"`loss_fn` must be callable, got {2**63}"),
    ({"global_batch_size": 2**63}, f"global_batch_size.*, at most {2**63 - 1}, got {2**63}"),
    ({"warmup_steps": None}, "warmup_steps.*got None. Leave it out for its default"),
    ({"autocast": "fp61"}, "fp61.*fp16"),
    ({"autocast": "fp16"}, "fp16.*bf16"),
    ({"device": "gpuu"}, "gpuu"),
    ({"on_nonfinite": "ignore"}, "raise.*skip.*warn.*ignore"),
    ({"optimization_direction": "up"}, "max.*min.*up"),
    ({"compute_metrics": "acuracy", **EVAL}, "acuracy.*accuracy"),
    ({"train_loader": loader()}, "train_dataset.*train_loader"),
    ({"model": "bert"}, "model.*str"),
    ({"model": torch.nn.LazyLinear(4)}, "lazy parameters, 'weight'"),
    ({"eval_dataset": {1: rows(4)}}, "names its sets by text.*got 1"),
    ({"train_dataset": Streamed(rows(8)), "drop_last": True}, "`drop_last=True` needs data with a length"),
    ({"train_dataset": None, "train_loader": loader(), "drop_last": True}, "has no effect on a `train_loader`"),
    ({"save_dir": ""}, "save_dir.*must be a path"),
    ({"save_dir": 3}, "save_dir.*must be a path"),
    ({"model": torch.nn.ReLU()}, "nothing to train"),
    ({"train_dataset": ShardedStream([Streamed(1)] * 2), "global_batch_size": 30}, "30.*8 x 1 with a ShardedStream"),
    ({"global_batch_size": {0: 8, "1ep": 12}}, "8 x 1.*12"),
    ({"global_batch_size": {"1ep": 8}}, "begin with.* at 0"),
    ({"global_batch_size": {0: 8, "1ep": "x"}}, "'x' at '1ep'"),
    ({"global_batch_size": {0: 8, 5: 16}}, "with its unit.*got 5"),
    ({"global_batch_size": {0: 8, "5ba": 16}}, "got '5ba'"),
    ({"global_batch_size": {0: 8, "2ep": 16, "1ep": 32}}, "'1ep' after '2ep'"),
    ({"global_batch_size": {0: 8, "2ep": 16, "90sp": 32}}, "one unit.*'90sp' after '2ep'"),
    ({"global_batch_size": {0: 8, "0.5dur": 16}, "max_steps": 5, "epochs": None}, "ends after '5ba'"),
    ({"global_batch_size": {0: 8, "1ep": 16, "5ep": 32}, "epochs": 2}, "becomes 32 at '5ep'.*ends after '2ep'.*never"),
    ({"global_batch_size": {0: 8, "3ep": 16}}, "becomes 16 at '3ep'.*ends after '3ep'"),
    ({"global_batch_size": {0: 8, "90sp": 16}, "epochs": 2}, "becomes 16 at '90sp'.*'2ep'"),
    ({"global_batch_size": {0: 8, "2ep": 16}, "epochs": None, "max_duration": "16sp"}, "at '2ep'.*after '16sp'"),
    ({"global_batch_size": {0: 8, "16sp": 16, "112sp": 32}, "max_steps": 7}, "becomes 32 at '112sp'.*after '7ba'"),
    ({"global_batch_size": {0: 8, "1dur": 16}}, "at '1dur'"),
    ({"global_batch_size": {0: 8, "1ep": 16}, "drop_last": True}, "drop_last=True.*several sizes"),
    ({"global_batch_size": {0: 8}, "gradient_accumulation_steps": 2}, "accumulation_steps=2.*global_batch_size"),
    ({"global_batch_size": 32, "gradient_accumulation_steps": 3}, "3.*32.*4"),
    ({"optimizer": AdamW(MODEL.parameters()), "learning_rate": 1e-3}, "learning_rate=0.001.*optimizer"),
    ({"train_dataset": Streamed(rows(8)), "lr_scheduler": "linear"}, "max_steps"),
    ({"scheduler_interval": "epoch"}, "lr_scheduler"),
    ({"scheduler_interval": "epoch", "lr_scheduler": "cosine", "warmup_steps": 2}, "warmup_steps=2.*epoch"),
    ({"lr_scheduler": ReduceLROnPlateau}, "ReduceLROnPlateau.*eval_dataset"),
    ({"prefetch_factor": 2}, "prefetch_factor=2.*num_workers"),
    ({"unit": lambda batch: 0}, "unit.*loss_fn"),
    ({"algorithms": [print]}, "algorithms.*print"),
    ({"save_steps": 5}, "save_steps=5.*save_dir"),
    ({"train_dataset": None, "train_loader": loader(), "batch_size": 4}, "batch_size=4.*train_loader.*loader"),
    ({"train_dataset": loader(), "batch_size": 4, "eval_batch_size": 8, **EVAL}, "batch_size=4.*eval_batch_size"),
    ({"optimization_metric": "accuracy"}, "optimization_metric='accuracy'.*eval_dataset"),
    ({"delta": 0.1, **EVAL}, "delta=0.1.*patience"),
    ({"keep_every": 3, "save_dir": "run"}, "keep_every=3.*save_total_limit"),
    ({"lr_scheduler": ReduceLROnPlateau, "scheduler_interval": "epoch", **EVAL}, "'epoch'.*follows evaluations"),
    ({"fp16_loss_scale": (1.0, 2.0)}, "fp16_loss_scale"),
    ({"dtypes": {"parameter": "bf16"}}, "Did you mean 'parameters'"),
    ({"dtypes": {}}, "must be a dict such as"),
    ({"dtypes": {"parameters": "half"}}, "would not train.*autocast='fp16'"),
    ({"matmul_precision": "tf32"}, "'highest', 'high', 'medium'"),
    ({"seed": 2**64}, f"seed.*at most {2**64 - 1}"),
    ({"model": torch.nn.Linear}, r"model.*the class Linear.*Linear\(\.\.\.\)"),
    ({"lr_scheduler": "os.system"}, "os.system.*LRScheduler"),
    ({"optimizer": "adamww"}, "'sgd'.*adamww.*Did you mean 'adamw'"),
    ({"lr_scheduler": CosineAnnealingLR}, "Cosine.*T_max.*lambda"),
    ({"timeout": "3ep"}, "timeout"),
    ({"deterministic": "yes"}, "deterministic.*'yes'"),
]  # fmt: skip
"""Arguments, and what the message must contain."""
OTHER_ERRORS: list[tuple[dict[str, Any], str, type[Exception]]] = [
    ({"learning_rte": 1}, "learning_rte.*learning_rate", TypeError),
    ({"optimization_metric": "foo", **EVAL}, "foo.*optimization_direction", ObjectiveError),
    ({"optimization_metric": "acc", "compute_metrics": "accuracy", **EVAL}, "acc.*accuracy", ObjectiveError),
    ({"train_dataset": []}, "train_dataset.*empty", DataError),
    ({"train_dataset": rows(7), "drop_last": True}, "7 samples, fewer than the 8 of a step", DataError),
    ({"train_dataset": (x for x in [])}, "train_dataset.*generator", DataError),
]  # fmt: skip


def test_settings_split_global_batch_size() -> None:
    settings = Settings(batch_size=2, global_batch_size=7)
    splits = [(resolve_accumulation(settings, ranks), samples_of_step(settings, ranks)) for ranks in (1, 2, 3, 4, 7)]
    assert splits == [(4, 7), (2, 7), (2, 7), (1, 7), (1, 7)]
    with pytest.raises(ConfigError, match=r"`global_batch_size=7` has no sample for each of 8 processes.* 7 processes"):
        resolve_accumulation(settings, 8)


def test_settings_reject_wrong_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    before = weights(MODEL)
    for options, words, error in [*((*case, ConfigError) for case in CONFIG_ERRORS), *OTHER_ERRORS]:
        with pytest.raises(error, match=f"(?s){words}"):
            Trainer(**{"loss_fn": F.mse_loss, "device": "cpu", "model": MODEL, "train_dataset": rows(8), **options})
    for path in ("runs/a\0b", "runs/" + "x" * 256, "runs/" + "\u00e9" * 200 + "/a"):
        for trainer_class in (Trainer, HFTrainer):
            with pytest.raises(ConfigError, match=r"`save_dir=.* is no path that a file system takes"):
                trainer_class(t16(), rows(4), loss_fn=F.mse_loss, save_dir=path)
    assert same(before, MODEL.parameters()) and list(tmp_path.iterdir()) == []


def test_train_rejects_missing_data_and_unknown_hook() -> None:
    with pytest.raises(ConfigError, match="train_dataset"):
        Trainer(t16(), eval_dataset=rows(4), loss_fn=F.mse_loss, device="cpu").train()
    with pytest.raises(ConfigError, match=r"on_steps_end.*Did you mean 'on_step_end'"):
        type("Typo", (Callback,), {"on_steps_end": lambda self, trainer: None})


# --- settings after the trainer was made


MAY_BE_ASSIGNED = {"model", "optimizer", "lr_scheduler", "unit"}


def quiet(trainer_class: Any, model: Any = None, **options: Any) -> Any:
    data = options.pop("train_dataset", rows(8))
    return trainer_on_cpu(trainer_class, model or t16(), data, **{"loss_fn": F.mse_loss, "epochs": 1, **options})


def test_settings_take_numbers_of_numpy(trainer_class: Any, tmp_path: Path) -> None:
    """Of one bit pattern: a checkpoint, too, has them as JSON."""
    trainer = fit(quiet(
        trainer_class, batch_size=np.int64(4), seed=np.int32(3), learning_rate=np.float32(0.5), max_steps=np.int16(2),
        shuffle=np.bool_(False), save_dir=tmp_path,
    ))  # fmt: skip
    values = [getattr(trainer.settings, name) for name in ("batch_size", "seed", "learning_rate", "shuffle")]
    assert values == [4, 3, 0.5, False] and [type(value) for value in values] == [int, int, float, bool]


LABELS = r"looks like its labels. Pass both as one dataset: train_dataset=\(X, y\)"
ERRORS_OF_ALL: list[tuple[dict[str, Any], str]] = [
    ({"train_dataset": np.ones((8, 4)), "eval_dataset": np.ones(8)}, LABELS),
    ({"train_dataset": np.ones((8, 4)), "eval_dataset": np.ones((8, 1))}, LABELS),
    ({"callbacks": [type("Mine", (Callback,), {})]}, r"`callbacks` takes instances, got the class Mine.*Mine\("),
    ({"algorithms": [type("Mine", (Algorithm,), {})]}, r"`algorithms` takes instances, got the class Mine"),
    ({"unit": Holding(t16()), "loss_fn": None}, "No parameter of the optimizer got a gradient.*unit"),
    ({"fp16_loss_scale": (8.0, 1.0)}, r"fp16_loss_scale=.*autocast='fp16'"),
    ({"save_dir": "nosuch://bucket/run"}, "save_dir.*knows no file system"),
    ({"save_dir": __file__}, "save_dir.*is a file"),
]  # fmt: skip


def test_settings_reject_wrong_values_on_all_trainers(trainer_class: Any) -> None:
    for options, words in ERRORS_OF_ALL:
        with pytest.raises(ConfigError, match=words):
            quiet(trainer_class, **options).train()


def test_settings_none_means_default(trainer_class: Any) -> None:
    trainer = quiet(trainer_class, callbacks=None, algorithms=None, optimization_metric=None, eval_dataset=rows(4))
    assert trainer.algorithms == []
    assert trainer.objective.metric == "loss"
    trainer.train()


def test_hf_trainer_rejects_ambiguous_arguments(tmp_path: Path) -> None:
    args = transformers.TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    with pytest.raises(TypeError, match=r"HFTrainer\(\): multiple values for argument 'training_args'.*by name"):
        HFTrainer(t16(), rows(8), rows(4), training_args=args)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="`args` and `training_args`"):
        quiet(HFTrainer, args=args, training_args=args)


def test_settings_reject_assignment(trainer_class: Any) -> None:
    trainer = quiet(trainer_class)
    names = [name for name in inspect.signature(trainer_class.__init__).parameters if name not in ("self", "unknown")]
    for name in set(names) - MAY_BE_ASSIGNED - getattr(trainer_class, "ASSIGNABLE", frozenset()):
        for error in (ConfigError, AttributeError):
            with pytest.raises(error, match=f"`{name}` is fixed.*{trainer_class.__name__}\\(..., {name}=64"):
                setattr(trainer, name, 64)
    assert trainer.batch_size == 8
    trainer.own_attribute = 1


def test_settings_reject_assignment_in_subclass_and_callback(trainer_class: Any) -> None:
    def set_before(self: Any, *args: Any, **options: Any) -> None:
        self.learning_rate = 0.5
        trainer_class.__init__(self, *args, **options)

    def set_after(self: Any, *args: Any, **options: Any) -> None:
        trainer_class.__init__(self, *args, **options)
        self.loss_fn = F.l1_loss

    for initialize, name in ((set_before, "learning_rate"), (set_after, "loss_fn")):
        with pytest.raises(AttributeError, match=f"`{name}` is fixed"):
            quiet(type("Own", (trainer_class,), {"__init__": initialize}))
    grow = callback(on_step_end=lambda trainer: setattr(trainer, "batch_size", 64))
    with pytest.raises(ConfigError, match="`batch_size` is fixed"):
        quiet(trainer_class, callbacks=[grow]).train()


def test_assigned_optimizer_trains_on_without_old_schedule(trainer_class: Any) -> None:
    trainer = quiet(trainer_class, lr_scheduler="linear")
    trainer.optimizer = SGD(trainer.model.parameters(), lr=0.5)
    with pytest.raises(ConfigError, match=r"lr_scheduler.*another optimizer"):
        trainer.train()
    trainer.lr_scheduler = None
    for _ in range(2):
        trainer.train()
        assert type(trainer.optimizer) is SGD


# --- what would train nothing


@pytest.mark.parametrize("in_callback", [False, True])
def test_unfrozen_layers_are_reported_once(
    trainer_class: Any, in_callback: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model = t16()
    model[0].requires_grad_(False)
    unfreeze = callback(on_epoch_end=lambda trainer: model[0].requires_grad_(True))
    trainer = quiet(trainer_class, model, epochs=3, callbacks=[unfreeze] if in_callback else [])
    model[0].requires_grad_(not in_callback)
    with caplog.at_level("WARNING", "omnitrain"):
        trainer.train()
    (message,) = [text for text in caplog.messages if "in no group of the optimizer" in text]
    assert re.search(r"2 parameters.*0\.weight, 0\.bias.*add_param_group", message)


@pytest.mark.parametrize(("options", "message"), [
    ({"accelerator": {"static_grph": True}}, "`accelerator` has 'static_grph'.*Did you mean 'static_graph'"),
    ({"accelerator": {"bucket_cap_mb": 0}}, r"`accelerator\['bucket_cap_mb'\]` must be a positive integer, got 0"),
    ({"accelerator": {"static_graph": 1}}, "must be True or False, got 1"),
    ({"accelerator": {"find_unused_parameters": True}, "find_unused_parameters": True}, "is given twice"),
    ({"accelerator": {"static_graph": True}, "parallelism_config": object()}, "exclude each other"),
    ({"accelerator": {"static_graph": True}, "fsdp_plugin": object()}, "exclude each other"),
    ({"accelerator": 3}, "or a dict of DDP's options"),
])  # fmt: skip
def test_options_of_ddp_are_validated(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        AccelerateTrainer(t16(), **options)


@pytest.mark.parametrize("options", [{"find_unused_parameters": True}, {"parallelism_config": object()}])
def test_settings_reject_conflict_with_accelerator(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(options))}.*accelerator"):
        quiet(AccelerateTrainer, accelerator=accelerate.Accelerator(cpu=True), **options)


def test_settings_take_accumulation_of_accelerator() -> None:
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    make = functools.partial(quiet, AccelerateTrainer, accelerator=accelerator)
    assert make().gradient_accumulation_steps == 2
    assert make(global_batch_size=24).gradient_accumulation_steps == 3
    with pytest.raises(
        ConfigError, match=r"`gradient_accumulation_steps=4` contradicts that of `accelerator`.* is 2\."
    ):
        make(gradient_accumulation_steps=4)


def test_parallelism_errors_are_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    if kind := getattr(accelerate.utils, "ParallelismConfig", None):
        for sizes, words in (
            ({"cp_size": 2}, "cp_size=2, which is not sup"), ({"sp_size": 2}, "sp_size=2, which is not supported"),
            ({"dp_replicate_size": 2}, "`parallelism_config` cannot be used here"),
        ):  # fmt: skip
            with pytest.raises(ConfigError, match=words):
                quiet(AccelerateTrainer, parallelism_config=kind(**sizes))
        monkeypatch.delattr(accelerate.utils, "ParallelismConfig")
    with pytest.raises(ConfigError, match=r"`parallelism_config` needs accelerate 1\.10 or newer, and this is"):
        quiet(AccelerateTrainer, parallelism_config=object())


@pytest.mark.parametrize("cls", [Trainer, AccelerateTrainer, HFTrainer])
def test_docstring_has_the_ten_first_and_all_in_order(cls: Any) -> None:
    """The ten are those of docs/arguments.md, and the entries have the order of the signature."""
    text, parameters = inspect.getdoc(cls.__init__) or "", inspect.signature(cls).parameters
    ten = re.findall(r"`(\w+)`", text.partition("Args:")[0].partition("matter first:")[2].partition(".")[0])
    page = (Path(__file__).parent.parent / "docs" / "arguments.md").read_text(encoding="utf-8")
    assert ten == re.findall(r'^    "(\w+)":', page, flags=re.M) and len(ten) == 10 and set(ten) <= set(parameters)
    entries = [
        name for name in re.findall(r"^    (\w+): ", text.partition("Args:")[2], flags=re.M) if name in parameters
    ]
    common = [name for name in parameters if name in inspect.signature(Trainer).parameters and name in entries]
    assert [name for name in entries if name in common] == common
