"""Uploads to the Hub, which is a folder here."""

import shutil
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from huggingface_hub.utils import filter_repo_objects
from marks import thinned
from recipes import callback, fit, same, weights
from tiny import bert
from transformers import BertForSequenceClassification, ByT5Tokenizer

from omnitrain import HFTrainer, HFTrainingArguments
from omnitrain.core.errors import ConfigError

TOKENIZER = ByT5Tokenizer()


class Hub:
    """Keeps what is uploaded under `folder`, at once or when `finish` is called, and lists it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.is_slow, self.is_down = folder, False, False
        self.sent: list[tuple[str, str]] = []
        """Where to in the repository, and the message of the commit."""
        self.made: list[str] = []
        self.waiting: list[tuple[Future[str], Any]] = []

    def create_repo(self, name: str, **options: Any) -> Any:
        self.made.append(name)
        return SimpleNamespace(repo_id=name)

    def upload_folder(self, *, run_as_future: bool = False, **options: Any) -> Any:
        self.sent.append((options.get("path_in_repo") or "", options["commit_message"]))
        if not run_as_future:
            return self._take(**options)
        future: Future[str] = Future()
        self.waiting.append((future, options))
        if not self.is_slow:
            self.finish()
        return future

    def finish(self) -> None:
        for future, options in self.waiting:
            if self.is_down:
                future.set_exception(OSError("no route to host"))
            else:
                future.set_result(self._take(**options))
        self.waiting.clear()

    def _take(
        self, repo_id: str, folder_path: str, path_in_repo: str = "", ignore_patterns: Any = None, **options: Any
    ) -> str:
        source = Path(folder_path)
        assert source.is_dir(), f"{source} has gone before it was uploaded"
        names = [str(path.relative_to(source)) for path in source.glob("**/*") if path.is_file()]
        for name in filter_repo_objects(names, ignore_patterns=ignore_patterns):
            target = self.folder / path_in_repo / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source / name, target)
        return "done"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    hub = Hub(tmp_path / "hub")
    functions = {"upload_folder": hub.upload_folder, "create_repo": hub.create_repo, "hf_api": lambda: hub}
    for name, function in functions.items():  # the first two in older versions, the last in newer ones
        if hasattr(transformers.trainer, name):
            monkeypatch.setattr(transformers.trainer, name, function)
    return hub


DEFAULTS = {
    "max_steps": 6, "per_device_train_batch_size": 4, "save_steps": 2, "save_strategy": "steps", "push_to_hub": True,
    "learning_rate": 0.01, "hub_model_id": "me/mine", "eval_strategy": "steps", "eval_steps": 2,
}  # fmt: skip
LINES = [{**TOKENIZER("abcdefghijklmnopq"[index:]), "label": index % 2} for index in range(16)]


def classifier() -> Any:
    return bert(num_labels=2, vocab_size=len(TOKENIZER), max_position_embeddings=32).float()


@pytest.fixture
def build(arguments: Any) -> Any:
    """Makes a trainer of 6 steps of 4 samples, with a checkpoint every other step."""

    def make(folder: str = "run", stock: bool = False, callbacks: Any = (), **fields: Any) -> HFTrainer:
        options = {"processing_class": TOKENIZER, "progress_bar": False, "callbacks": callbacks}
        return HFTrainer(classifier(), arguments(folder, **fields), LINES, LINES, stock_checkpoints=stock, **options)

    return make


def opened(folder: Path) -> list[torch.Tensor]:
    """The weights that from_pretrained finds."""
    assert ByT5Tokenizer.from_pretrained(folder)("a") == TOKENIZER("a")
    return weights(BertForSequenceClassification.from_pretrained(folder))


def test_every_save_uploads_the_model(hub: Hub, build: Any, tmp_path: Path) -> None:
    """With the arguments of the user."""
    trainer = build(hub_strategy="every_save", max_steps=5, max_grad_norm=0.5, stock=True)
    assert hub.made == ["me/mine"] and not hub.sent
    trainer.train()
    assert hub.sent == [("", f"Training in progress, step {step}") for step in (2, 4, 5)]
    assert same(opened(hub.folder), weights(trainer.get_model()))
    assert not [path for path in hub.folder.glob("**/*") if "checkpoint" in path.name]
    for folder in (hub.folder, tmp_path / "run" / "checkpoint-2"):
        written = torch.load(folder / "training_args.bin", weights_only=False)
        assert (written.max_grad_norm, written.max_steps, written.save_steps) == (0.5, 5, 2)


def test_end_strategy_uploads_on_save_model_and_push(hub: Hub, build: Any, tmp_path: Path) -> None:
    trainer = fit(build(hub_strategy="end", max_steps=2))
    assert not hub.sent
    trainer.save_model(tmp_path / "final")
    assert hub.sent == [("", "Model save")]
    assert same(opened(hub.folder), weights(trainer.get_model()))
    assert same(opened(tmp_path / "final"), weights(trainer.get_model()))
    trainer.push_to_hub()
    assert hub.sent[1:] == [("", "End of training")]
    uploaded, ours = {path.name for path in hub.folder.rglob("*")}, {"run.json", "config.yaml", "metrics.jsonl"}
    assert all((Path(trainer.save_dir) / name).is_file() for name in ours)
    assert {"model.safetensors", "config.json", "README.md", "training_args.bin"} <= uploaded
    assert not uploaded & {*ours, "run.lock"}


def test_nothing_is_uploaded_without_push_to_hub(hub: Hub, build: Any, tmp_path: Path) -> None:
    trainer = fit(build(push_to_hub=False, max_steps=2))
    trainer.save_model(tmp_path / "final")
    trainer.create_model_card(model_name="a name")
    card = (tmp_path / "run" / "README.md").read_text()
    assert "# a name" in card and "- training_steps: 2" in card
    assert not hub.sent and not hub.made


@pytest.mark.parametrize(
    ("strategy", "limit"), thinned([("checkpoint", 1), ("all_checkpoints", None)], [("checkpoint", 1)])
)
def test_uploaded_checkpoints_can_be_resumed(hub: Hub, build: Any, strategy: str, limit: Any) -> None:
    folders = ["last-checkpoint"] * 2 if strategy == "checkpoint" else ["checkpoint-2", "checkpoint-3"]
    build(hub_strategy=strategy, save_total_limit=limit, max_steps=3).train()
    assert [folder for folder, _ in hub.sent] == [entry for folder in folders for entry in ("", folder)]
    more = build(push_to_hub=False, max_steps=4, folder="more")
    more.train(resume_from=hub.folder / folders[-1], allow_change={"lr_scheduler"})
    assert more.progress.step == 4


def test_save_during_an_upload_is_left_out_but_the_last(hub: Hub, build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.is_slow = True
    waits: list[int] = []
    real = transformers.Trainer._finish_current_push

    def finish(engine: Any) -> None:
        if hub.waiting:
            waits.append(engine.trainer.progress.step)
            hub.finish()
        real(engine)

    monkeypatch.setattr(transformers.Trainer, "_finish_current_push", finish)
    trainer = fit(build(max_steps=5))
    assert [message[-6:] for _, message in hub.sent] == ["step 2", "step 5"]
    assert waits == [5, 5]  # for that of step 2 before the last save is sent, and for the last
    assert same(opened(hub.folder), weights(trainer.get_model()))


def test_checkpoint_is_not_deleted_during_its_upload(hub: Hub, build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.is_slow = True
    real = transformers.Trainer._finish_current_push
    monkeypatch.setattr(transformers.Trainer, "_finish_current_push", lambda engine: (hub.finish(), real(engine)))
    build(hub_strategy="all_checkpoints", save_total_limit=1, eval_strategy="no").train()
    assert sorted(path.name for path in hub.folder.glob("checkpoint-*")) == [f"checkpoint-{step}" for step in (2, 4, 6)]


@pytest.mark.parametrize("is_started", [True, False])
def test_upload_that_fails_is_logged_and_ends_no_run(
    hub: Hub, build: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, is_started: bool
) -> None:
    trainer, message = build(max_steps=2), "upload to the Hub has failed: no route to host"
    hub.is_down = is_started
    if not is_started:
        error = OSError(28, "No space left on device")
        monkeypatch.setattr(trainer.engine, "_push_from_checkpoint", mock.Mock(side_effect=error))
        message = "could not be sent to the Hub: [Errno 28]"
    assert trainer.train()["stop_reason"] == "max_steps"
    assert sum(message in text for text in caplog.messages) == 1


def test_signal_leaves_the_last_checkpoint_on_disk(hub: Hub, build: Any) -> None:
    def interrupt(trainer: Any) -> None:
        if trainer.progress.step == 3:
            trainer.control.stop, trainer.control.signal = "signal", 15

    trainer = build(callbacks=[callback(on_step_end=interrupt)])
    with pytest.raises(SystemExit):
        trainer.train()
    assert hub.sent == [("", "Training in progress, step 2")]
    assert trainer.store.checkpoints()[-1].name == "checkpoint-3"


def test_model_card_has_the_numbers_of_the_run(hub: Hub, build: Any) -> None:
    options = {"num_train_epochs": 2, "gradient_accumulation_steps": 2, "seed": 7}
    options |= {"save_strategy": "epoch", "eval_strategy": "epoch", "max_steps": -1}
    trainer = build(kind=HFTrainingArguments, **options)
    metrics = trainer.train()
    assert hub.sent == [("", "Training in progress, epoch 1"), ("", "Training in progress, epoch 2")]
    trainer.push_to_hub(tags="small", language="en")
    card = (hub.folder / "README.md").read_text()
    for text in ("- learning_rate: 0.01", "- train_batch_size: 4", "- seed: 7", "- num_epochs: 2",
                 "- total_train_batch_size: 8", "# mine", "- small", "- en"):  # fmt: skip
        assert text in card
    assert f"{metrics['valid'][-1]['eval_loss']:.4f}" in card
    assert trainer.engine.args.num_train_epochs > 2  # which is what their loop has


@pytest.mark.parametrize(("options", "texts"), [
    ({"batch_size": 4, "global_batch_size": 7}, ["train_batch_size: 4", "total_train_batch_size: 7"]),
    ({"batch_size": 4, "global_batch_size": 3}, ["train_batch_size: 4", "total_train_batch_size: 3"]),
    ({"batch_size": 2, "epochs": 5, "seed": 8}, ["train_batch_size: 2", "seed: 8", "num_epochs: 5"]),
], ids=["step of 7", "step of 3", "all"])  # fmt: skip
def test_model_card_has_our_arguments(hub: Hub, tmp_path: Path, options: dict[str, Any], texts: list[str]) -> None:
    trainer = HFTrainer(classifier(), None, LINES, processing_class=TOKENIZER, save_dir=tmp_path, **options)
    trainer.create_model_card()
    assert {f"- {text}" for text in texts} <= {*(tmp_path / "README.md").read_text().splitlines()}


def test_push_to_hub_needs_a_name() -> None:
    with pytest.raises(ConfigError, match=r"no name on the Hub.*hub_model_id"):
        HFTrainer(classifier(), None, LINES, progress_bar=False).push_to_hub()


def test_upload_writes_nothing_through_a_link(hub: Hub, build: Any, tmp_path: Path) -> None:
    victim = tmp_path / "victim.txt"
    victim.write_text("precious")
    trainer = build(max_steps=2)
    Path(trainer.save_dir).mkdir(exist_ok=True)
    (Path(trainer.save_dir) / "model.safetensors").symlink_to(victim)
    trainer.train()
    with pytest.raises(OSError, match="is a link to"):
        trainer.push_to_hub()
    assert victim.read_text() == "precious"
