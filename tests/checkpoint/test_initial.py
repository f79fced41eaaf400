"""`init_from`: weights that a model begins with, whole or in part, of checkpoints and of files of other programs."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from forging import content_of, seal
from recipes import StopAt, distance, rows, t16, weights
from safetensors.torch import save_file
from tiny import gpt
from torch import nn

from omnitrain import AccelerateTrainer, CheckpointError, ConfigError, HFTrainer, Trainer
from omnitrain.checkpoint.disk import FileSystem
from omnitrain.checkpoint.shards import Block, write_shards

TRAINERS = {"native": Trainer, "accelerate": AccelerateTrainer, "hf": HFTrainer}


@pytest.fixture(params=TRAINERS)
def trainer_class(request: pytest.FixtureRequest) -> Any:
    return TRAINERS[request.param]


def make(kind: Any = Trainer, model: nn.Module | None = None, **options: Any) -> Any:
    defaults: dict[str, Any] = {"loss_fn": F.mse_loss, "epochs": 1, "learning_rate": 0.05, "progress_bar": False}
    place = {"device": "cpu"} if kind is Trainer else {}
    return kind(model or t16(seed=1), rows(16), **{**defaults, **place, **options})


def begun(source: Any, model: nn.Module | None = None) -> nn.Module:
    return make(model=model, init_from=source).model


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """The weights of the small model from seed 0; those that trainers get here are from seed 1."""
    path = tmp_path / "weights.safetensors"
    save_file(t16().state_dict(), path)
    return path


def test_every_trainer_begins_with_the_weights_and_no_run_loads_them_again(trainer_class: Any, file: Path) -> None:
    trainer, expected = make(trainer_class, init_from=file), make(trainer_class, t16())
    assert distance(weights(trainer.model), weights(t16())) == 0
    for one in (trainer, expected):
        one.train()
        one.train()
    assert distance(weights(trainer.model), weights(expected.model)) == 0
    said = trainer.resolved_config()["init_from"]
    assert said == {"path": str(file), "ignore": [], "convert": None} and json.dumps(said)


def test_a_checkpoint_its_pointers_and_other_files_are_read(tmp_path: Path, file: Path) -> None:
    run = make(model=t16(), save_dir=tmp_path / "run", eval_dataset=rows(8))
    run.train()
    trained = weights(run.model)
    for place in ("checkpoint-2", "last", "best", "checkpoint-2/model.safetensors"):
        assert distance(weights(begun(tmp_path / "run" / place)), trained) == 0
    torch.save(t16().state_dict(), tmp_path / "plain.pt")
    torch.save({"step": 3, "state": t16().state_dict()}, tmp_path / "nested.bin")
    inner = {"path": tmp_path / "nested.bin", "convert": lambda content: content["state"]}
    for source in (str(file), tmp_path / "plain.pt", inner):
        assert distance(weights(begun(source)), weights(t16())) == 0


def test_a_checkpoint_in_shards_is_read_and_a_damaged_one_is_refused(tmp_path: Path, file: Path) -> None:
    run = make(model=t16(), save_dir=tmp_path / "run")
    run.train()
    folder = tmp_path / "run" / "checkpoint-2"
    content = content_of(folder)
    del content["files"]["model.safetensors"]
    (folder / "model.safetensors").unlink()
    (folder / "model").mkdir()
    for rank in range(2):
        blocks: dict[str, list[Block]] = {}
        for name, one in run.model.state_dict().items():
            begin, end = (len(one) * part // 2 for part in (rank, rank + 1))
            offsets = (begin, *(0 for _ in one.shape[1:]))
            blocks[name] = [Block(offsets, one[begin:end], tuple(one.shape))] if end > begin else []
        written = write_shards(blocks, folder / "model", rank, FileSystem())
        content["files"] |= {f"model/{name}": entry for name, entry in written.items()}
    seal(folder, content)
    with torch.device("meta"):
        empty = t16()
    for model in (None, empty):
        assert distance(weights(begun(folder, model)), weights(run.model)) == 0
    data = bytearray((folder / "model/rank-00001.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "model/rank-00001.safetensors").write_bytes(data)
    with pytest.raises(CheckpointError, match=r"'model/rank-00001.safetensors' does not match its sha256"):
        begun(folder)


def test_a_folder_of_transformers_is_read_in_one_file_or_several(tmp_path: Path) -> None:
    gpt(seed=3).float().save_pretrained(tmp_path / "one")
    gpt(seed=3).save_pretrained(tmp_path / "several", max_shard_size="5KB")
    assert len(list((tmp_path / "several").glob("*.safetensors"))) > 1
    for folder, limit in (("several", 0), ("one", 1e-7)):  # tied weights lie in the files once
        model = HFTrainer(gpt(), init_from=tmp_path / folder, progress_bar=False).model
        assert distance(weights(model), weights(gpt(seed=3))) <= limit
    other = {"path": tmp_path / "one", "convert": lambda all: {"lm_head.weight": all["transformer.wte.weight"]}}
    assert torch.equal(begun(other, gpt()).lm_head.weight, gpt(seed=3).float().double().lm_head.weight)  # type: ignore[union-attr]
    next((tmp_path / "several").glob("*-00002-*")).unlink()
    with pytest.raises(CheckpointError, match=r"several' is incomplete: 'model-00002-of-.*' is missing"):
        HFTrainer(gpt(), init_from=tmp_path / "several")


def test_a_part_is_loaded_and_one_table_says_what_was_and_what_was_not(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Wider(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = t16(seed=1).float()[:3], nn.Linear(16, 5)  # type: ignore[index]

    model = Wider()
    head = weights(model.head)
    save_file({"body." + name: one for name, one in t16().state_dict().items()}, file)
    begun(file, model)
    assert distance(weights(model.body), weights(t16().float())[:2]) == 0 and distance(weights(model.head), head) == 0
    (record,) = [one for one in caplog.records if "begins with" in one.message]
    assert record.levelno == logging.WARNING
    assert record.message.splitlines()[1:] == [
        "  loaded: 2 tensors, 80 values, cast from torch.float64",
        "  not in the file, and left as they are: 2: head.weight, head.bias",
        "  not in the model: 2: body.3.bias, body.3.weight",
    ]
    caplog.clear()
    with caplog.at_level(logging.INFO, "omnitrain"):
        begun({"path": file, "ignore": ["head.*", "body.3.*"]}, Wider())
    (record,) = [one for one in caplog.records if "begins with" in one.message]
    assert record.levelno == logging.INFO and "ignored: 4: body.3.bias" in record.message


class Counting(nn.Linear):
    """A layer with a state of its own, which is no tensor."""

    def __init__(self, count: int = 0) -> None:
        super().__init__(4, 1)
        self.count = count
        self.double()

    def get_extra_state(self) -> dict[str, Any]:
        return {"count": self.count}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


def test_the_state_of_modules_is_loaded_by_the_modules(
    trainer_class: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = make(trainer_class, nn.Sequential(Counting(3)), save_dir=tmp_path / "run")
    trainer.train()
    torch.save(trainer.get_model().state_dict(), tmp_path / "weights.pt")
    checkpoint = tmp_path / "run" / "last"
    for source in (checkpoint, tmp_path / "weights.pt", {"path": checkpoint, "convert": dict}):
        caplog.clear()
        began = make(trainer_class, nn.Sequential(Counting(5)), init_from=source).get_model()
        assert began[0].count == 3 and distance(weights(began), weights(trainer.get_model())) == 0
        assert "left as they are" not in caplog.text
    began = make(trainer_class, nn.Sequential(Counting(5)), init_from={"path": checkpoint, "ignore": ["*_state"]})
    assert began.get_model()[0].count == 5
    plain = {name: one for name, one in trainer.get_model().state_dict().items() if "extra" not in name}
    save_file(plain, tmp_path / "plain.safetensors")
    began = make(trainer_class, nn.Sequential(Counting(5)), init_from=tmp_path / "plain.safetensors")
    assert began.get_model()[0].count == 5 and "left as they are: 1: 0._extra_state" in caplog.text
    make(trainer_class, nn.Sequential(nn.Linear(4, 1).double()), init_from=checkpoint)
    assert "not in the model: 1: 0._extra_state" in caplog.text


def test_weights_of_another_shape_are_named_and_nothing_is_loaded_unless_they_are_ignored(file: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0), nn.Linear(16, 2)).double()
    before = weights(model)
    words = r"3\.weight \(\[1, 16\] float64 there, \[2, 16\] float64 in the model\), 3\.bias .*Name them in 'ignore'"
    with pytest.raises(ConfigError, match=words):
        begun(file, model)
    assert distance(weights(model), before) == 0
    begun({"path": file, "ignore": ["3.*"]}, model)
    assert distance(weights(model)[:2], weights(t16())[:2]) == 0 and distance(weights(model)[2:], before[2:]) == 0


def test_a_resume_has_the_weights_of_its_checkpoint_and_says_so(
    trainer_class: Any, file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    given: dict[str, Any] = {"init_from": file, "save_dir": tmp_path / "run", "save_steps": 1}
    straight = make(trainer_class, init_from=file)
    straight.train()
    make(trainer_class, callbacks=[StopAt(1)], **given).train()
    with caplog.at_level(logging.INFO, "omnitrain"):
        resumed = make(trainer_class, **given)
        resumed.train(resume_from="auto")
    assert "The weights are those of the checkpoint, and no longer those of `init_from`" in caplog.text
    assert distance(weights(resumed.model), weights(straight.model)) == 0


def test_weights_that_a_checkpoint_leaves_out_come_from_init_from_on_a_resume(file: Path, tmp_path: Path) -> None:
    given: dict[str, Any] = {"save_dir": tmp_path / "run", "save_steps": 1, "save_frozen": False, "freeze": [r"^0\."]}
    make(init_from=file, callbacks=[StopAt(1)], **given).train()
    with pytest.raises(CheckpointError, match="saved without the weights that did not train"):
        make(**given).train(resume_from="auto")
    resumed = make(init_from=file, **given)
    resumed.train(resume_from="auto")
    assert distance(weights(resumed.model)[:2], weights(t16())[:2]) == 0


class Runs:
    def __reduce__(self) -> Any:
        return print, ("code of a file has run",)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("nowhere", r"`init_from='.*nowhere'` does not exist, or cannot be looked at\. Pass a checkpoint"),
        ("empty", r"has no weights in it: none of 'model\.safetensors'"),
        ("run", r"is the folder of a run\. Pass one of its checkpoints, such as '.*checkpoint-2'"),
        ("adapter", r"holds adapters of PEFT alone\. .*PeftModel\.from_pretrained"),
        ("text.txt", r"'text\.txt' is of no kind that is read"),
        ("code.pt", r"'code\.pt' cannot be read as weights alone .*Files that would run code are refused"),
        ("nested.pt", r"there is no dict of tensors by name, but step, model\. Have .*content: content\['model'\]"),
        ("other.safetensors", r"has none of the model's weights\. Names there: model\.0\.bias, .*; in the model: 0"),
        ({"path": "other.safetensors", "convert": lambda tensors: 3}, "'convert' returned no dict of tensors by name"),
        ({"path": "other.safetensors", "ignore": ["nothing.*"]}, r"'ignore' has 'nothing\.\*', which is no name in"),
        ({"path": "other.safetensors", "ignor": ["x"]}, r"`init_from` has 'ignor'.* Did you mean 'ignore'\?"),
        ({"path": "other.safetensors", "ignore": "x"}, "'ignore' must be a list of names"),
        ({"path": "other.safetensors", "convert": "x"}, "'convert' must be a function"),
        ({"ignore": ["x"]}, "`init_from` must be a path, got None"),
    ],
)  # fmt: skip
def test_what_has_no_weights_is_refused_with_the_reason(
    source: Any, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_model.safetensors").write_bytes(b"")
    (tmp_path / "text.txt").write_text("none")
    torch.save({"weight": Runs()}, tmp_path / "code.pt")
    torch.save({"step": 1, "model": t16().state_dict()}, tmp_path / "nested.pt")
    save_file({"model." + name: one for name, one in t16().state_dict().items()}, tmp_path / "other.safetensors")
    if source == "run":
        make(save_dir="run").train()
    model = t16(seed=1)
    with pytest.raises(ConfigError, match=words):
        begun(source, model)
    assert distance(weights(model), weights(t16(seed=1))) == 0 and "has run" not in capsys.readouterr().out
    prefix = {"path": "other.safetensors", "convert": lambda all: {key[6:]: one for key, one in all.items()}}
    assert distance(weights(begun(prefix)), weights(t16())) == 0


def test_a_checkpoint_that_has_changed_is_refused(tmp_path: Path) -> None:
    make(save_dir=tmp_path / "run").train()
    folder = tmp_path / "run" / "checkpoint-2"
    shutil.copytree(folder, tmp_path / "copy")
    data = bytearray((tmp_path / "copy" / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (tmp_path / "copy" / "model.safetensors").write_bytes(bytes(data))
    with pytest.raises(CheckpointError, match=r"'model\.safetensors' does not match its sha256"):
        begun(tmp_path / "copy")


def test_a_model_without_memory_gets_the_weights_when_it_is_in_its_place(trainer_class: Any, file: Path) -> None:
    with torch.device("meta"):
        model = t16(dtype=torch.float32)
    for source in (file, {"path": file, "convert": dict}):
        found = make(trainer_class, model, init_from=source).get_model()
        assert distance(weights(found), weights(t16().float())) == 0 and found[0].weight.requires_grad


def test_a_model_without_memory_that_loads_in_its_own_way_is_refused(file: Path) -> None:
    class Own(nn.Linear):
        def _load_from_state_dict(self, *arguments: Any) -> None:
            raise AssertionError

    with torch.device("meta"):
        model = nn.Sequential(Own(4, 16))
    with pytest.raises(ConfigError, match=r"Own has loading code of its own.*2 of its tensors are on the meta device"):
        begun(file, model)


def test_after_training_without_a_folder_the_test_set_sees_the_best_weights(trainer_class: Any) -> None:
    trainer = make(
        trainer_class, eval_dataset=rows(8), test_dataset=rows(8), eval_steps=1, epochs=3, learning_rate=3.0,
        compute_metrics="mae",
    )  # fmt: skip
    metrics = trainer.train()
    assert metrics["best_step"] < trainer.progress.step
    assert trainer.test()["test_loss"] == pytest.approx(metrics["best_valid"]["eval_loss"], rel=1e-12)
    assert metrics["test"][-1]["step"] == metrics["best_step"]
