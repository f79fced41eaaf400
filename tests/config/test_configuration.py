from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

import named
import pytest
import torch
from torch import nn

from omnitrain import AccelerateTrainer, Callback, ConfigError, HFTrainer, Trainer, instantiate
from omnitrain.config.configuration import Config, merge_files
from omnitrain.config.parts import text_mode
from omnitrain.config.plain_yaml import write

BASE: dict[str, Any] = {
    "model": "named.Net", "train_dataset": "named.rows", "loss_fn": "named.loss", "epochs": 1, "progress_bar": False,
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def config(folder: Path, trust: bool = False, **arguments: Any) -> Config:
    values = {name: value for name, value in {**BASE, **arguments}.items() if value != "left out"}
    (folder / "a.yaml").write_text(write({"trainer": values}))
    return Config.read("a.yaml", trust=trust)


def made(folder: Path, **arguments: Any) -> Any:
    return config(folder, **arguments).make_trainer()


def part(class_path: str, **init_args: Any) -> dict[str, Any]:
    return {"class_path": class_path, "init_args": init_args}


def test_model_from_class_or_function(folder: Path) -> None:
    assert isinstance(made(folder).model, named.Net)
    options = {"width": 3, "activation": "torch.nn.Tanh", "kind": "deep", "sizes": [4, 3], "scale": 2, "folder": "a/b"}
    model = made(folder, model=part("named.Net", init="torch.nn.init.zeros_", **options)).model
    assert isinstance(model.activation, nn.Tanh) and model.body[0].weight.shape == (3, 4)
    assert (model.kind, model.scale, model.folder, model.sizes) == ("deep", 2, Path("a/b"), (4, 3))
    assert not model.body[0].weight.any()
    linear = part("Linear", in_features=4, out_features=2)
    stack = made(folder, model={"class_path": "Sequential", "init_args": [linear]}).model
    assert isinstance(stack, nn.Sequential) and isinstance(stack[0], nn.Linear)


def test_arguments_are_converted_to_annotations(folder: Path) -> None:
    def converted(**arguments: Any) -> dict[str, Any]:
        return made(folder, model=part("named.Typed", **arguments)).model.given

    for text, color in (("RED", named.Color.RED), (1, named.Color.RED), ("blue", named.Color.BLUE)):
        assert converted(color=text)["color"] is color
    assert converted(options={"width": 3})["options"] == named.Options(3)
    assert converted(device="cuda:0")["device"] == torch.device("cuda:0")
    assert converted(functions={"a": "named.loss"})["functions"] == {"a": named.loss}
    assert isinstance(converted(modules={"a": "Tanh"})["modules"]["a"], nn.Tanh)
    assert converted(kind="torch.nn.Tanh")["kind"] is nn.Tanh  # a class stays one
    assert converted(weight=part("torch.tensor", data=[1, 2]))["weight"].tolist() == [1, 2]


def test_meaning_of_text_follows_annotation() -> None:
    modes: dict[Any, str] = {
        Callable[[list[int]], str]: "function", dict[str, Callable[..., Any]]: "function", "type[nn.Module]": "class",
        Mapping[str, Any]: "text", "Tensor | Sequence[float] | None": "object", nn.Module | None: "object",
        "Mapping[Any, int] | int": "text", "list[dict[str, nn.Module]]": "object", Literal["a"]: "text",
        str | Path: "text", Iterable[Callback]: "object", TypeVar("T"): "text",
        "Callable[[Callable[[int], str]], bool] | None": "function",
    }  # fmt: skip
    assert {annotation: text_mode(annotation) for annotation in modes} == modes


TEXTS: dict[str, Any] = {
    "untyped": "007", "anything": "true", "maybe": "null", "either": "1e3", "choice": "true", "listed": ["007", 7],
    "bare": ["no", "~"], "pair": [7, "08"], "mapped": {"a": "1", "b": 2}, "nested": {"a": ["off", {"b": "2024-01-01"}]},
    "number": 7, "switch": True,
}  # fmt: skip
"""Quoted texts that would be something else without the quotes."""


def test_texts_stay_texts_where_admitted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = {**TEXTS, "pair": (7, "08")}
    trainer = made(folder, model=part("named.Texts", **TEXTS), save_dir="a")
    assert trainer.model.given == expected
    trainer.train()
    assert Config.read("a/config.yaml").make_trainer().model.given == expected
    model, data = instantiate("named.Texts", expected), instantiate("named.rows")
    Trainer(model, data, loss_fn=named.loss, epochs=1, progress_bar=False, save_dir="b").train()
    assert Config.read("b/config.yaml").make_trainer().model.given == expected
    converted = made(folder, model=part("named.Texts", number="7", switch="true", either="x")).model.given
    assert (converted["number"], converted["switch"], converted["either"]) == (7, True, "x")
    monkeypatch.setenv("WORD", "007")
    texts = made(folder, model=part("named.Texts", maybe="${env:WORD}", listed=["${env:WORD}"])).model.given
    assert texts["maybe"] == "007" and texts["maybe"].reference == texts["listed"][0].reference == "${env:WORD}"


def test_data_functions_and_classes_are_made(folder: Path) -> None:
    trainer = made(
        folder, train_dataset=part("named.rows", size=12), test_dataset="named.CONSTANT",
        eval_dataset={"a": "named.rows", "b": part("named.rows", size=4)},
    )  # fmt: skip
    assert len(trainer.train_dataset) == 12 and trainer.test_dataset is named.CONSTANT
    assert {name: len(dataset) for name, dataset in trainer.eval_dataset.items()} == {"a": 32, "b": 4}
    loader = part("named.loader", dataset=part("named.rows", size=8), batch_size=2)
    assert len(made(folder, train_dataset="left out", train_loader=loader).train_loader) == 4
    assert made(folder).loss_fn is named.loss
    assert isinstance(made(folder, loss_fn="CrossEntropyLoss").loss_fn, nn.CrossEntropyLoss)
    assert made(folder, loss_fn=part("torch.nn.CrossEntropyLoss", label_smoothing=0.1)).loss_fn.label_smoothing == 0.1
    weighted = made(folder, loss_fn=part("named.weighted_loss", weight=0.5)).loss_fn
    assert isinstance(weighted, functools.partial) and weighted.keywords == {"weight": 0.5}
    collate = part("named.make_collate", times=2.0)
    assert made(folder, data_collator=collate).data_collator.keywords == {"times": 2.0}
    assert made(folder, data_collator="named.collate").data_collator is named.collate
    metric = {"import_path": "named.share_of_ones"}
    for value, expected in ((metric, named.share_of_ones), ("named.share_of_ones", named.share_of_ones),
                            (["accuracy", metric], ["accuracy", named.share_of_ones])):  # fmt: skip
        assert made(folder, compute_metrics=value).compute_metrics == expected
    stopping = made(folder, eval_dataset="named.rows", early_stopper="named.stop_early")
    assert stopping.settings.early_stopper is named.stop_early


def test_optimizer_and_schedule_are_built_by_trainer(folder: Path) -> None:
    optimizer, schedule = part("torch.optim.SGD", lr=1e-1, momentum=0.9), part("StepLR", step_size=1, gamma=0.5)
    trainer = made(folder, optimizer=optimizer, lr_scheduler=schedule)
    trainer.train()
    assert type(trainer.optimizer) is torch.optim.SGD and trainer.optimizer.param_groups[0]["lr"] == 0.1 * 0.5**4
    for name, kind in (("sgd", torch.optim.SGD), ("named.MySGD", named.MySGD)):
        assert type(made(folder, optimizer=name, learning_rate=0.1).optimizer) is kind
    by_name = made(folder, lr_scheduler="cosine", lr_scheduler_kwargs={"min_lr": 1e-6}, warmup_steps="0.1dur")
    assert by_name.settings.lr_scheduler == "cosine"
    ours = made(folder, lr_scheduler=part("CosineAnnealingScheduler", t_max="0.5dur"))
    assert str(ours.settings.lr_scheduler.t_max) == "0.5dur"


def test_callbacks_algorithms_and_loggers_by_name(folder: Path) -> None:
    trainer = made(
        folder, eval_dataset="named.rows", callbacks=["named.Counts", part("EarlyStopping", patience=3)],
        algorithms=["EMA", part("omnitrain.LabelSmoothing", num_classes=2, smoothing=0.1)], save_dir="run",
        loggers=["csv", part("omnitrain.TensorBoardLogger", log_dir="tb")],
    )  # fmt: skip
    assert {"Counts", "EarlyStopping"} <= {type(callback).__name__ for callback in trainer.lifecycle.callbacks}
    assert [type(algorithm).__name__ for algorithm in trainer.algorithms] == ["EMA", "LabelSmoothing"]
    trainer.train()
    assert (folder / "tb").is_dir() and (folder / "run" / "metrics.csv").is_file()


@pytest.mark.parametrize(("name", "kind"), [
    ("Trainer", Trainer), ("AccelerateTrainer", AccelerateTrainer), ("omnitrain.HFTrainer", HFTrainer),
    ("named.MyTrainer", named.MyTrainer),
])  # fmt: skip
def test_trainer_by_class(folder: Path, name: str, kind: type) -> None:
    assert type(made(folder, class_path=name)) is kind
    (folder / "b.yaml").write_text(write({"trainer": {"class_path": name, "init_args": BASE}}))
    assert type(Config.read("b.yaml").make_trainer()) is kind


def test_training_arguments_inline_or_in_file(folder: Path) -> None:
    values = {"output_dir": "hf", "num_train_epochs": 1, "use_cpu": True, "report_to": "none", "seed": 7}
    (folder / "args.yaml").write_text(write(values))
    (folder / "args.json").write_text('{"output_dir": "hf", "use_cpu": true, "seed": 7}')
    inline = values, part("transformers.TrainingArguments", **values), part("HFTrainingArguments", **values)
    for arguments in (*inline, "args.yaml", "args.json"):
        trainer = made(folder, class_path="HFTrainer", training_args=arguments, epochs="left out")
        assert trainer.training_args.seed == 7
    wrong = config(folder, class_path="HFTrainer", training_args={**values, "num_train_epoch": 3}, epochs="left out")
    (error,) = wrong.check()
    assert "a.yaml" in str(error) and "Did you mean 'num_train_epochs'?" in str(error)


def test_parts_are_seeded_and_preserve_rng_state(folder: Path) -> None:
    state = torch.get_rng_state()
    first, second = (
        made(folder, train_dataset="named.drawn", model=model) for model in ("named.Net", part("named.Net", width=8))
    )
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first.model.body[0].weight, second.model.body[0].weight)
    assert torch.equal(first.train_dataset.tensors[0], second.train_dataset.tensors[0])
    assert not torch.equal(first.model.body[0].weight, made(folder, seed=7).model.body[0].weight)


@pytest.mark.parametrize(("arguments", "words"), [
    ({"learning_rat": 1}, "a.yaml:7: Trainer has no argument 'learning_rat'. Did you mean 'learning_rate'?"),
    ({"num_train_epochs": 1}, "a.yaml:7: Trainer has no argument 'num_train_epochs'. Here it is `epochs`."),
    ({"epochs": "three"}, "a.yaml:5: `epochs` must be a positive number or None, got 'three'."),
    ({"batch_size": "1e-4"}, "a.yaml:7: `batch_size` must be a positive integer, got '1e-4'."),
    ({"patience": 3}, "a.yaml:7: `patience=3` needs evaluations"),
    ({"model": "???"}, "a.yaml:2: `trainer.model` has no value (???)"),
    ({"class_path": "Trayner"}, "a.yaml:7: there is no trainer 'Trayner'"),
    ({"class_path": "named.Net"}, "a.yaml:7: named.Net is no trainer: it does not derive from BaseTrainer."),
    ({"class_path": "HFTrainer", "device": "cpu"}, "a.yaml:8: `device` is an argument of Trainer."),
    ({"model": "named.Nett"}, "a.yaml:2: named has no 'Nett', which 'named.Nett' needs. Did you mean 'Net'?"),
    ({"model": "nothing_here.Net"}, "a.yaml:2: there is no module 'nothing_here'"),
    ({"model": "named.deeper.Net"}, "a.yaml:2: named has no 'deeper'"),
    ({"model": "__main__.Net"}, "Move it into a module."),
    ({"loss_fn": "CrossEntropyLos"}, "Did you mean 'CrossEntropyLoss'?"),
    ({"model": part("named.Net", width="wide")}, "a.yaml:5: `width` of named.Net must be int, got 'wide'."),
    ({"model": part("named.Net", kind="flat")}, "a.yaml:5: `kind` of named.Net must be Literal['plain', 'deep']"),
    ({"model": part("named.Net", sizes=[1])}, "a.yaml:5: `sizes` of named.Net must be tuple with 2 elements"),
    ({"model": part("named.Net", widht=3)}, "a.yaml:5: named.Net has no argument 'widht'. Did you mean 'width'?"),
    ({"model": part("named.Net", activation="torch.nn.Tahn")}, "Did you mean 'Tanh'?"),
    ({"model": part("torch.nn.Linear", in_features=4)}, "a.yaml:2: torch.nn.Linear needs 'out_features'"),
    ({"train_dataset": part("named.loader")}, "named.loader needs 'dataset': give a value under `init_args`."),
    ({"model": {"class_path": "named.Net", "width": 3}}, "a.yaml:4: next to `class_path` only `init_args`"),
    ({"model": {"class_path": "named.Net", "import_path": "named.Net"}}, "next to `import_path` nothing"),
    ({"model": {"class_path": 3}}, "a.yaml:2: a class or function is named by a text, got 3."),
    ({"model": {"class_path": "named.Net", "init_args": 3}}, "a.yaml:4: the arguments of named.Net are names"),
    ({"model": {"import_path": "named.Net", "init_args": {}}}, "a.yaml:4: next to `import_path` nothing can be set"),
    ({"model": part("named.CONSTANT")}, "cannot be called. Use `import_path` for the thing itself."),
    ({"model": part("named.Typed", first=1)}, "positional only"),
    ({"model": part("named.Typed", options={"widht": 3})}, "no argument 'widht'. Did you mean 'width'?"),
    ({"model": part("named.Typed", color="PINK")}, "RED,BLUE"),
    ({"model": part("named.Typed", device="warp")}, "'warp' is no device"),
    ({"optimizer": part("torch.optim.SGD", lr="fast")}, "`lr` of torch.optim.SGD must be float"),
    ({"optimizer": "adamv"}, "a.yaml:7: `optimizer` must be"),
    ({"optimizer": "named.Nothing"}, "a.yaml:7: named has no 'Nothing'"),
    ({"lr_scheduler": "cosin"}, "a.yaml:7: there is no schedule 'cosin', but "),
    ({"callbacks": ["EarlyStoping"]}, "a.yaml:8: there is nothing called 'EarlyStoping'"),
    ({"callbacks": [part("EarlyStopping", patienc=1)]}, "a.yaml:10: omnitrain.EarlyStopping has no"),
    ({"callbacks": "EarlyStopping"}, "a.yaml:7: `callbacks` must be a list, got 'EarlyStopping'. Make it an"),
    ({"algorithms": {"a": 1}}, "a.yaml:7: `algorithms` must be a list, got {'a': 1}."),
    ({"loggers": 3}, "a.yaml:7: `loggers` must be a list, got 3."),
    ({"model": None}, "a.yaml:2: Trainer needs `model`. Write it under `trainer`."),
    ({"callbacks": ["Throughput", {"patience": 1}]}, "a.yaml:9: `callbacks` holds objects, each named by a text"),
    ({"loggers": [3]}, "a.yaml:8: `loggers` holds objects, each named by a text"),
])  # fmt: skip
def test_error_reports_file_line_value_and_remedy(folder: Path, arguments: Any, words: str) -> None:
    wrong, before = config(folder, **arguments), sorted(folder.iterdir())
    try:
        message = " ".join(map(str, wrong.check()))
    except ConfigError as error:
        message = str(error)
    assert words in message
    with pytest.raises(ConfigError):
        wrong.make_trainer()
    assert sorted(folder.iterdir()) == before


@pytest.mark.parametrize(("values", "words"), [
    ({"trainer": {"epochs": 1}, "epochs": 3}, "a.yaml:3: unknown section 'epochs'. There are vars"),
    ({"traner": {}}, "Did you mean 'trainer'?"),
    *(({"trainer": {"class_path": kind, "init_args": {**BASE, "lr": 1, "bananas": 1}}},
       f"2 errors:\n  a.yaml:9: {kind} has no argument 'lr'. Here it is `learning_rate`.\n"
       f"  a.yaml:10: {kind} has no argument 'bananas'.") for kind in ("Trainer", "AccelerateTrainer", "HFTrainer")),
    ({"vars": {}}, "there is no `trainer:`"),
    ({"trainer": 3}, "a.yaml:1: `trainer` must hold names with values, got 3."),
    ({"trainer": BASE, "train": {"resume": 1}}, "train() has no argument 'resume'. Did you mean 'resume_from'?"),
    ({"trainer": BASE, "train": {"resume_from": 3}}, "a.yaml:8: `resume_from` must be a text, got 3."),
    ({"trainer": {"init_args": BASE, "epochs": 1}}, "'epochs' stands under `trainer` as well"),
])  # fmt: skip
def test_wrong_sections_are_errors(folder: Path, values: Any, words: str) -> None:
    (folder / "a.yaml").write_text(write(values))
    with pytest.raises(ConfigError) as caught:
        Config.read("a.yaml").make_trainer()
    assert words in str(caught.value)


def test_error_of_user_code_reports_caller_and_module(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A check calls nothing."""
    assert config(folder, model="named.slow", train_dataset="named.fails", save_dir="run").check() == []
    assert not (folder / "run").exists()
    with pytest.raises(RuntimeError, match="no data today") as caught:
        made(folder, train_dataset="named.fails")
    assert "a.yaml:3, where named.fails is called" in caught.value.__notes__[0]
    (folder / "breaks.py").write_text("import nothing_like_this\n")
    (folder / "raises.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(str(folder))
    assert "No module named 'nothing_like_this'" in str(config(folder, model="breaks.Net").check()[0])
    assert "ZeroDivisionError in raises" in str(config(folder, model="raises.Net").check()[0])


def test_foreign_code_needs_trust(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere, current = tmp_path / "elsewhere", tmp_path / "here"
    for place in (elsewhere, current):
        place.mkdir()
        code = f"open(r'{tmp_path}/ran-{place.name}', 'w').close()\nfrom named import Net\n"
        (place / f"of_{place.name}.py").write_text(code)
    monkeypatch.chdir(current)
    monkeypatch.syspath_prepend(str(elsewhere))
    monkeypatch.syspath_prepend(str(current))
    assert config(current, model="of_here.Net").check() == [] and (tmp_path / "ran-here").exists()
    typed = ({"functions": {"a": "of_elsewhere.f"}}, {"kind": "of_elsewhere.Net"}, {"either": "of_elsewhere.Net"},
             {"pair": ["of_elsewhere.f", 3]}, {"lists": [["of_elsewhere.f"]]})  # fmt: skip
    for arguments in ({"model": "of_elsewhere.Net"}, {"optimizer": {"import_path": "of_elsewhere.Net"}},
                      *({"model": part("named.Typed", **values)} for values in typed)):  # fmt: skip
        (error,) = config(current, **arguments).check()
        assert "neither installed nor in the current folder" in str(error) and "--trust" in str(error)
    assert not (tmp_path / "ran-elsewhere").exists()
    assert config(current, trust=True, model="of_elsewhere.Net").check() == [] and (tmp_path / "ran-elsewhere").exists()


def test_values_changed_in_python(folder: Path) -> None:
    config(folder)
    changed = Config.read("a.yaml", overrides={"trainer.epochs": 2, "trainer.model": part("named.Net", width=3)})
    trainer: Any = changed.make_trainer()
    assert trainer.epochs == 2 and trainer.model.body[0].weight.shape == (3, 4)
    assert changed.train()["stop_reason"] == "epochs"
    (error,) = Config.read("a.yaml", overrides={"trainer.epochs": -1}).check()
    assert str(error).startswith("the overrides: `epochs`")


def test_overrides_leave_the_tree_unchanged(folder: Path) -> None:
    config(folder, model=part("named.Net", width=3))
    tree = merge_files(["a.yaml"])
    (folder / "a.yaml").unlink()
    for overrides, epochs, width in (({"trainer.model.width": 5, "trainer.epochs": 7}, 7, 5), ({}, 1, 3)):
        arguments = Config.from_tree(tree, overrides).arguments
        assert (arguments["epochs"], arguments["model"]["init_args"]) == (epochs, {"width": width})
