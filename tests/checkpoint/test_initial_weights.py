"""Initial weights (`init_from`): checkpoints and files of other programs, in full or in part."""

import copy
import json
import logging
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from forging import content_of, seal, shard, spoil
from marks import make_small
from recipes import StopAt, distance, fit, rows, t16, weights
from resuming import Net, Overflowing
from safetensors.torch import save_file
from tiny import gpt
from torch import nn

from omnitrain import CheckpointError, ConfigError, HFTrainer


def make(kind: Any = "native", model: nn.Module | None = None, **options: Any) -> Any:
    options = {"epochs": 1, "batch_size": 8, "learning_rate": 0.05, **options}
    return make_small(kind, model or t16(seed=1), rows(16), **options)


def initialized(source: Any, model: nn.Module | None = None) -> Any:
    return make(model=model, init_from=source).model


def assert_equal(model: nn.Module, expected: nn.Module) -> None:
    """Assert that two models, or parts of them, have the same weights to the bit."""
    assert distance(weights(model), weights(expected)) == 0


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """The weights of the small model from seed 0; those of the trainers here are from seed 1."""
    path = tmp_path / "weights.safetensors"
    save_file(t16().state_dict(), path)
    return path


def test_init_from_loads_once_on_every_trainer(trainer_class: Any, file: Path) -> None:
    trainer, expected = make(trainer_class, init_from=file), make(trainer_class, t16())
    assert_equal(trainer.model, t16())
    for each in (trainer, expected):
        each.train()
        each.train()
    assert_equal(trainer.model, expected.model)
    config = trainer.resolved_config()["init_from"]
    assert config == {"path": str(file), "ignore": [], "convert": None} and json.dumps(config)


def test_init_from_reads_checkpoints_pointers_and_files(tmp_path: Path, file: Path) -> None:
    trainer = fit(make(model=t16(), save_dir=tmp_path / "run", eval_dataset=rows(8)))
    for name in ("checkpoint-2", "last", "best", "checkpoint-2/model.safetensors"):
        assert_equal(initialized(tmp_path / "run" / name), trainer.model)
    torch.save(t16().state_dict(), tmp_path / "plain.pt")
    torch.save({"step": 3, "state": t16().state_dict()}, tmp_path / "nested.bin")
    nested = {"path": tmp_path / "nested.bin", "convert": lambda content: content["state"]}
    for source in (str(file), tmp_path / "plain.pt", nested):
        assert_equal(initialized(source), t16())
    folder = tmp_path / "run" / "checkpoint-2"
    spoil(folder / "model.safetensors", "flip")
    with pytest.raises(CheckpointError, match=r"'model\.safetensors' does not match its sha256"):
        initialized(folder)
    seal(folder, content_of(folder) | {"extra_state": {"0": {"__tuple__": 3}}})
    with pytest.raises(CheckpointError, match=r"damaged: 'omnitrain.json' has extra_state\['0'\].__tuple__ = 3"):
        initialized(folder)


def test_init_from_reads_and_verifies_sharded_checkpoints(tmp_path: Path) -> None:
    trainer = fit(make(model=t16(), save_dir=tmp_path / "run"))
    folder = tmp_path / "run" / "checkpoint-2"
    shard(folder)
    with torch.device("meta"):
        empty = t16()
    for model in (None, empty):
        assert_equal(initialized(folder, model), trainer.model)
    spoil(folder / "model/rank-00001.safetensors", "flip")
    with pytest.raises(CheckpointError, match=r"'model/rank-00001.safetensors' does not match its sha256"):
        initialized(folder)


def test_init_from_reads_transformers_folders(tmp_path: Path) -> None:
    gpt(seed=3).float().save_pretrained(tmp_path / "single")
    gpt(seed=3).save_pretrained(tmp_path / "several", max_shard_size="5KB")
    assert len(list((tmp_path / "several").glob("*.safetensors"))) > 1
    for name, limit in (("several", 0), ("single", 1e-7)):  # tied weights are in the files once
        model = HFTrainer(gpt(), init_from=tmp_path / name, progress_bar=False).model
        assert distance(weights(model), weights(gpt(seed=3))) <= limit
    source = {"path": tmp_path / "single", "convert": lambda all: {"lm_head.weight": all["transformer.wte.weight"]}}
    assert_equal(initialized(source, gpt()).lm_head, gpt(seed=3).float().double().lm_head)
    next((tmp_path / "several").glob("*-00002-*")).unlink()
    with pytest.raises(CheckpointError, match=r"several' is incomplete: 'model-00002-of-.*' is missing"):
        HFTrainer(gpt(), init_from=tmp_path / "several")


def test_init_from_logs_what_was_loaded_and_what_not(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    def initialize(source: Any) -> tuple[Any, Any]:
        caplog.clear()
        layers: Any = t16(seed=1).float()
        parts = {"body": layers[:3], "head": nn.Linear(16, 5)}
        model = initialized(source, nn.Sequential(OrderedDict(parts)))
        (record,) = [record for record in caplog.records if "begins with" in record.message]
        return model, record

    caplog.set_level(logging.INFO, "omnitrain")
    save_file({f"body.{name}": tensor for name, tensor in t16().state_dict().items()}, file)
    model, record = initialize(file)
    assert distance(weights(model.body), weights(t16().float())[:2]) == 0
    assert record.levelno == logging.WARNING
    assert record.message.splitlines()[1:] == [
        "  loaded: 2 tensors, 80 values, cast from torch.float64",
        "  not in the file, unchanged: 2: head.weight, head.bias",
        "  not in the model: 2: body.3.bias, body.3.weight",
    ]
    _, record = initialize({"path": file, "ignore": ["head.*", "body.3.*"]})
    assert record.levelno == logging.INFO and "ignored: 4: body.3.bias" in record.message


def test_init_from_loads_extra_state(trainer_class: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def counting(source: Any) -> Any:
        caplog.clear()
        return make(trainer_class, Overflowing(), init_from=source).get_model()

    trainer = fit(make(trainer_class, Overflowing(), save_dir=tmp_path / "run", max_steps=1))
    torch.save(trainer.get_model().state_dict(), tmp_path / "weights.pt")
    checkpoint = tmp_path / "run" / "last"
    for source in (checkpoint, tmp_path / "weights.pt", {"path": checkpoint, "convert": dict}):
        model = counting(source)
        assert model.count == 1 and "not in the file" not in caplog.text
        assert_equal(model, trainer.get_model())
    assert counting({"path": checkpoint, "ignore": ["*_state"]}).count == 0
    plain = {name: value for name, value in trainer.get_model().state_dict().items() if "extra" not in name}
    save_file(plain, tmp_path / "plain.safetensors")
    assert counting(tmp_path / "plain.safetensors").count == 0
    assert "unchanged: 1: _extra_state" in caplog.text
    make(trainer_class, Net(), init_from=checkpoint)


def test_init_from_rejects_other_shapes_unless_ignored(file: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0), nn.Linear(16, 2)).double()
    before = copy.deepcopy(model)
    message = r"3\.weight \(\[1, 16\] float64 there, \[2, 16\] float64 in the model\), 3\.bias .*Name them in 'ignore'"
    with pytest.raises(ConfigError, match=message):
        initialized(file, model)
    assert_equal(model, before)
    initialized({"path": file, "ignore": ["3.*"]}, model)
    assert_equal(model[0], t16()[0])  # type: ignore[index]
    assert_equal(model[3], before[3])


def test_init_from_gives_way_to_the_checkpoint_of_a_resume(
    trainer_class: Any, file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "omnitrain")
    options: dict[str, Any] = {"init_from": file, "save_dir": tmp_path / "run", "save_steps": 1}
    straight = fit(make(trainer_class, init_from=file))
    make(trainer_class, callbacks=[StopAt(1)], **options).train()
    resumed = fit(make(trainer_class, **options), resume_from="auto")
    assert "The weights of the checkpoint replace those of `init_from`" in caplog.text
    assert_equal(resumed.model, straight.model)


def test_init_from_supplies_frozen_weights_on_resume(file: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"save_dir": tmp_path / "run", "save_steps": 1, "save_frozen": False, "freeze": [r"^0\."]}
    make(init_from=file, callbacks=[StopAt(1)], **options).train()
    with pytest.raises(CheckpointError, match="saved without the weights that did not train"):
        make(**options).train(resume_from="auto")
    assert_equal(fit(make(init_from=file, **options), resume_from="auto").model[0], t16()[0])  # type: ignore[index]


class RunsCode:
    def __reduce__(self) -> Any:
        return print, ("code of a file has run",)


def test_init_from_rejects_sources_without_weights(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("empty", "adapter"):
        Path(name).mkdir()
    for name in ("adapter/adapter_model.safetensors", "text.txt"):
        Path(name).touch()
    torch.save({"weight": RunsCode()}, "code.pt")
    torch.save({"step": 1, "model": t16().state_dict()}, "nested.pt")
    save_file({f"model.{name}": tensor for name, tensor in t16().state_dict().items()}, "other.safetensors")
    make(save_dir=tmp_path / "run").train()
    other = {"path": "other.safetensors"}
    cases: list[tuple[Any, str]] = [
        ("nowhere", "nowhere'` does not exist"), ("empty", "has no weights"),
        ("run", r"is the folder of a run\. .*such as '.*checkpoint-2'"), ("adapter", "has only adapters of PEFT"),
        ("text.txt", "is not a supported file"), ("code.pt", "Files that would run code are rejected"),
        ("nested.pt", r"has no dict of tensors by name, but step, model\. .*content\['model'\]"),
        ("other.safetensors", r"has none of the model's weights\. Names there: model\.0\.bias, .*; in the model: 0"),
        ({**other, "convert": lambda tensors: 3}, "'convert' returned no dict of tensors by name"),
        ({**other, "ignore": ["nothing.*"]}, r"'ignore' has 'nothing\.\*', which is no name in"),
        ({**other, "ignor": ["x"]}, r"`init_from` has 'ignor'.* Did you mean 'ignore'\?"),
        ({**other, "ignore": "x"}, "'ignore' must be a list of names"),
        ({**other, "convert": "x"}, "'convert' must be a function"),
        ({"ignore": ["x"]}, "`init_from` must be a path, got None"),
    ]  # fmt: skip
    model = t16(seed=1)
    for source, message in cases:
        with pytest.raises(ConfigError, match=message):
            initialized(source, model)
    assert_equal(model, t16(seed=1))
    assert "has run" not in capsys.readouterr().out


def test_init_from_fills_a_model_on_the_meta_device(trainer_class: Any, file: Path) -> None:
    """Unless it has custom code for loading."""

    class Custom(nn.Linear):
        def _load_from_state_dict(self, *arguments: Any) -> None:
            raise AssertionError

    with torch.device("meta"):
        model, custom = t16(dtype=torch.float32), nn.Sequential(Custom(4, 16))
    for source in (file, {"path": file, "convert": dict}):
        filled = make(trainer_class, model, init_from=source).get_model()
        assert_equal(filled, t16().float())
        assert filled[0].weight.requires_grad
    with pytest.raises(ConfigError, match=r"Custom has custom loading code.*2 of its tensors are on the meta device"):
        make(trainer_class, custom, init_from=file)
