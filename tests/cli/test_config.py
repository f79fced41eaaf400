import inspect
import json
import re
import shlex
import shutil
import signal
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import named
import programs
import pytest
from marks import TRAINERS
from recipes import assert_equal
from safetensors.torch import load_file
from stores import shelf_of, watching

from omnitrain import ConfigError, SearchResult, Trainer
from omnitrain.checkpoint import run_record
from omnitrain.cli.config import format_trainer_help
from omnitrain.cli.main import main
from omnitrain.config.plain_yaml import write
from omnitrain.config.reading import read
from omnitrain.core.paths import local_folder

ROOT = Path(__file__).resolve().parent.parent.parent
TRAINER: dict[str, Any] = {
    "model": {"class_path": "named.Net", "init_args": {"width": 4}}, "train_dataset": "named.rows",
    "eval_dataset": {"class_path": "named.rows", "init_args": {"seed": 1}}, "loss_fn": "named.loss",
    "callbacks": [{"class_path": "EarlyStopping", "init_args": {"patience": 5}}], "learning_rate": 1e-2, "epochs": 2,
    "batch_size": 8, "progress_bar": False, "save_dir": "runs/a",
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("OMNITRAIN_LOCAL_DIR", str(tmp_path / "local"))
    changed_config(tmp_path)
    return tmp_path


def changed_config(folder: Path, name: str = "a.yaml", **changes: Any) -> None:
    values = {key: value for key, value in {**TRAINER, **changes}.items() if value is not None}
    (folder / name).write_text(write({"trainer": values}))


def assert_same_weights(*folders: Path) -> None:
    first, *rest = (load_file(folder / "model.safetensors") for folder in folders)
    for weights in rest:
        assert_equal(weights, first)


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


def trainer_in(path: Path | str) -> dict[str, Any]:
    return read(path).values["trainer"]


def test_train_words_override_file(folder: Path) -> None:
    words = "--trainer AccelerateTrainer --trainer.epochs=1 --trainer.model.width 6 --trainer.callbacks.0.patience 2"
    words += " --trainer.learning-rate 1e-3 --trainer.overwrite --trainer.eval_dataset.seed 3 --trainer.batch_size!"
    words += " --trainer.loss_fn CrossEntropyLoss --trainer.loss_fn.label_smoothing 0.1"
    assert main(["train", "a.yaml", *words.split()]) == 0
    trainer = trainer_in(folder / "runs" / "a" / "config.yaml")
    parts = (trainer["model"], trainer["callbacks"][0], trainer["eval_dataset"], trainer["loss_fn"])
    assert [part["init_args"] for part in parts] == [
        {"width": 6}, {"patience": 2}, {"seed": 3}, {"label_smoothing": 0.1}
    ]  # fmt: skip
    names = ("class_path", "epochs", "learning_rate", "overwrite")
    assert [trainer[name] for name in names] == ["AccelerateTrainer", 1, 1e-3, True]
    assert trainer["loss_fn"]["class_path"] == "torch.nn.CrossEntropyLoss" and "batch_size" not in trainer


def test_sweep_passes_sampler_and_pruner_to_search(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    search = mock.Mock(side_effect=ConfigError("seen"))
    monkeypatch.setattr("omnitrain.sweeps.search.search", search)
    words = "--trainer.learning_rate 0.1,0.2 --trials 2 --sampler random --pruner none"
    assert main(["sweep", "a.yaml", *words.split()]) == 2
    assert search.call_args.kwargs.items() >= {"trials": 2, "sampler": "random", "pruner": "none"}.items()


HOSTILE = {
    "object": "{call: !!python/object/apply:os.system ['touch pwned']}", "name": "[!!python/name:os.system]",
    "open nesting": "{a: " * 3000, "zero byte": "\0", "control codes": '{"\\e[31mx": "\\e[2J"}',
    "reference": f"${{trainer.callbacks.{'9' * 10_000}}}", "references": "'" + "${" * 3000 + "}" * 3000 + "'",
    "no module": "{class_path: a.}", "module": "{class_path: os}", "constant": "{class_path: math.pi}",
    "path of a number": "{class_path: 3}", "long path": f"{{class_path: {'a.' * 3000}b}}",
    "target": "{_target_: os.system, command: touch pwned}", "file": "{class_path: Net, import_path: /etc/passwd}",
}  # fmt: skip
"""Values of a file that nobody wrote in good faith; those that are no values at all are in config/test_reading.py."""
READERS = {
    "check": ["config", "check", "evil.yaml"], "print": ["train", "evil.yaml", "--print_config"],
    "train": ["train", "evil.yaml"], "convert": ["config", "convert", "evil.yaml"],
    "sweep": ["sweep", "evil.yaml", "--trainer.learning_rate", "0.1,0.2", "--save_dir", "sweep"],
    "resume": ["train", "--resume", "run"], "second": ["train", "a.yaml", "-f", "evil.yaml", "--print_config"],
}  # fmt: skip
CASES = [(command, value) for number, command in enumerate(READERS) for value in list(HOSTILE)[number::7]]


@pytest.mark.parametrize(("reader", "value"), CASES)
def test_command_survives_a_hostile_file(reader: str, value: str, folder: Path, command: Any) -> None:
    """It ends with a code and no error of Python's, runs nothing and writes nothing."""
    text = write({"trainer": {name: part for name, part in TRAINER.items() if name not in ("save_dir", "callbacks")}})
    (folder / "run").mkdir()
    for path in (folder / "evil.yaml", folder / "run" / "config.yaml"):
        path.write_text(f"{text}  callbacks: {HOSTILE[value]}\n")
    before = sorted(folder.rglob("*"))
    signal.alarm(60)
    try:
        code, out, error = command(*READERS[reader])
    finally:
        signal.alarm(0)
    assert code in ((0, 1, 2) if reader in ("print", "second", "convert") else (1, 2))
    assert sorted(folder.rglob("*")) == before and "\x1b" not in out + error


def test_train_check_and_plan_train_nothing(folder: Path, command: Any) -> None:
    """The exit code is 1 if something is wrong, and 2 without a result that `--json` could print."""
    code, out, _ = command("train", "a.yaml", "--check", "--plan")
    assert code == 0 and "nothing found, in " in out and "8 steps, 2 epochs" in out and not (folder / "runs").exists()
    code, out, _ = command("train", "a.yaml", "--check", "--json", "--trainer.learning_rate", "100")
    result = json.loads(out)["check"]
    assert code == 1 and not result["ok"] and {finding["check"] for finding in result["findings"]} == {"rate"}
    code, _, error = command("train", "a.yaml", "--json")
    assert code == 2 and "--check or --plan" in error


def test_print_config_merges_files_and_words(folder: Path, command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_WORD", "horse")
    second = "trainer: {model: {init_args: {width: '${vars.width}'}}, epochs: 1, trial_name: '${env:MY_WORD}-1'}"
    (folder / "b.yaml").write_text(f"vars: {{width: 3}}\n{second}\n")
    code, out, _ = command("train", "a.yaml", "b.yaml", "--vars.width", "9", "--print_config")
    assert code == 0 and "trial_name: ${env:MY_WORD}-1\n" in out  # no value of the environment
    (folder / "c.yaml").write_text(out)
    trainer = trainer_in("c.yaml")
    assert (trainer["model"]["init_args"], trainer["epochs"], trainer["batch_size"]) == ({"width": 9}, 1, 8)
    assert not (folder / "runs").exists()


def test_train_finds_files_anywhere(folder: Path, command: Any) -> None:
    words = ("train", "--trainer.epochs", "7", "--print_config")
    answers = [command(*words, *file, "--trainer.delta", "-1")
               for file in (["-f", "a.yaml"], ["--config", "a.yaml"], ["a.yaml"])]  # fmt: skip
    assert answers[0] == answers[1] == answers[2] and answers[0][0] == 0 and "epochs: 7" in answers[0][1]


def test_train_records_git_of_configuration(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The script is omnitrain's command, whose folder is the environment."""
    git = mock.Mock(wraps=programs.AnsweredGit)
    monkeypatch.setattr(run_record, "Git", git)
    (folder / "conf").mkdir()
    (folder / "a.yaml").rename(folder / "conf" / "a.yaml")
    short = ["--trainer.epochs", "1"]
    assert main(["train", "conf/a.yaml", *short]) == 0
    assert main(["train", "--resume", "runs/a", "--trainer.epochs", "2"]) == 0
    assert main(["sweep", "conf/a.yaml", *short, "--trainer.learning_rate", "1e-3,1e-2", "--save_dir", "s"]) == 0
    first, second, *others = [call.args[0] for call in git.call_args_list]
    assert {first, *others} == {folder / "conf"} and second == folder and len(others) >= 2
    monkeypatch.setattr(run_record, "_script_path", lambda: folder / "other" / "train.py")
    Trainer(named.Net(4), named.rows(), loss_fn=named.loss, epochs=1, progress_bar=False, save_dir="b").train()
    assert git.call_args.args[0] == folder / "other"


def test_train_resumes_without_file(folder: Path) -> None:
    assert main(["train", "a.yaml", "--trainer.epochs", "1", "--trainer.save_dir", "runs/b"]) == 0
    (folder / "runs" / "b").rename(folder / "moved")
    assert main(["train", "--resume", "moved", "--trainer.epochs", "2"]) == 0
    assert main(["train", "a.yaml"]) == 0
    words = ["--trainer.save_dir", "third", "--trainer.epochs", "2"]
    assert main(["train", "--resume", "moved/checkpoint-4", *words]) == 0
    assert_same_weights(*(folder / run / "checkpoint-8" for run in ("runs/a", "moved", "third")))


@pytest.mark.parametrize("which", ["/", "/checkpoint-4"])
def test_train_resumes_from_remote_store(which: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in shelf_of(folder / "shelf").items():
        monkeypatch.setenv(name, value)
    with watching():
        place = "watched://bucket/run"
        assert main(["train", "a.yaml", "--trainer.epochs", "1", "--trainer.save_dir", place]) == 0
        shutil.rmtree(folder / "local")
        assert main(["train", "--resume", f"{place}{which}", "--trainer.epochs", "2"]) == 0
        assert not list((folder / "local").rglob("*.tmp"))
        resumed = local_folder(place)
        assert rows(resumed)[-1]["step"] == 8
        assert main(["train", "a.yaml"]) == 0
        assert_same_weights(folder / "runs/a/checkpoint-8", resumed / "checkpoint-8")


def test_train_takes_training_arguments(folder: Path) -> None:
    arguments = {"output_dir": "hf", "num_train_epochs": 2, "use_cpu": True, "report_to": "none", "disable_tqdm": True}
    unused = dict.fromkeys(["eval_dataset", "callbacks", "learning_rate", "epochs", "batch_size", "save_dir"])
    changed_config(folder, "hf.yaml", class_path="HFTrainer", training_args=arguments, **unused)
    words = "--per_device_train_batch_size 4 --learning_rate=1e-3 --num_train_epochs 1"
    assert main(["train", "hf.yaml", *words.split()]) == 0
    written = trainer_in(folder / "hf" / "config.yaml")["training_args"]["init_args"]
    options = {"per_device_train_batch_size": 4, "learning_rate": 1e-3, "num_train_epochs": 1}
    assert written.items() >= options.items() and rows(folder / "hf")[-1]["step"] == 8
    (folder / "hf").rename(folder / "moved")
    assert main(["train", "--resume", "moved", "--num_train_epochs", "2"]) == 0
    assert rows(folder / "moved")[-1]["step"] == 16 and not (folder / "hf").exists()


def test_train_takes_deepspeed_config_path(folder: Path, command: Any) -> None:
    (folder / "ds.json").write_text('{"zero_optimization": {"stage": 7}}')
    words = ["--trainer.deepspeed_config", "ds.json"]
    assert command("config", "check", "a.yaml", "--trainer", "AccelerateTrainer", *words)[0] == 0
    code, _, error = command("config", "check", "a.yaml", *words)
    assert code == 2 and "--trainer.deepspeed_config: " in error


def test_train_runs_file_of_docs(folder: Path) -> None:
    page = (ROOT / "docs" / "configuration.md").read_text()
    (folder / "digits.py").write_text(page.partition("```python\n")[2].partition("```")[0])
    (folder / "digits.yaml").write_text(page.partition("```yaml\n")[2].partition("```")[0])
    assert main(["train", "digits.yaml", "--trainer.epochs", "1", "--trainer.callbacks.0.patience", "3"]) == 0
    assert rows(folder / "runs" / "digits")[-1]["step"] == 24


@pytest.mark.parametrize(("words", "expected"), [
    ("train", "Name a file, such as config.yaml, or a run to resume: --resume runs/a."),
    ("train nothing.yaml", "'nothing.yaml' cannot be read as a configuration"),
    ("train a.yaml --epochs 3", "options begin with --vars., --trainer., --train.. Write --trainer.epochs."),
    ("train a.yaml --trainer.epochs 3 4", "'4' cannot be read as a configuration"),
    ("train a.yaml -x 4", "'-x' is no option. Values are given as --trainer.epochs 3"),
    ("train -f", "-f needs a file, such as config.yaml."),
    ("train a.yaml --trainer.epoch 3", "--trainer.epoch: Trainer has no argument 'epoch'."),
    ("train a.yaml --trainer.epochs x", "--trainer.epochs: `epochs` must be a positive number or None, got 'x'."),
    ("train a.yaml --trainer.epochz!", "there is no 'trainer.epochz' to remove. Did you mean 'epochs'?"),
    ("train a.yaml --trainer.callbacks.3.patience 1", "'3' is not a position"),
    ("train a.yaml --trainer.model.widht 1", "--trainer.model.widht: named.Net has no argument 'widht'."),
    ("train --resume nowhere", "--resume nowhere: there is no 'config.yaml' in 'nowhere'."),
    ("train a.yaml --train.resume_frm last", "train() has no argument 'resume_frm'. Did you mean 'resume_from'?"),
    ("train --resume memory://bucket/nowhere", "'memory://bucket/nowhere/config.yaml' does not exist, or is empty."),
    ("train --resume mem://bucket/nowhere", "fsspec knows no file system 'mem'"),
    ("sweep a.yaml --trainer.epochs 3", "Nothing is searched."),
    ("sweep a.yaml --trainer.epochs 3,x", "--trainer.epochs: `epochs` must be a positive number or None, got 'x'."),
    ("sweep a.yaml --trainer.delta '{low: 3, high: 1}'", "'low' must be below 'high'"),
    ("sweep a.yaml --trainer.delta '{low: 0.1, high: 1}'", "`trials` is the total number of trials"),
    ("sweep a.yaml --trainer.epochs 1,2 --trials 0", "`trials` must be an integer of at least 1"),
])  # fmt: skip
def test_commands_reject_wrong_words(words: str, expected: str, folder: Path, command: Any) -> None:
    code, _, error = command(*shlex.split(words))
    assert code == 2 and expected in error
    assert not (folder / "local").exists() and not list(folder.rglob("*.safetensors"))


def test_check_lists_all_errors_with_lines(folder: Path, command: Any) -> None:
    assert command("config", "check", "a.yaml")[:2] == (0, "Nothing is wrong.\n")
    model = {"class_path": "named.Net", "init_args": {"width": "a", "kind": "b"}}
    for count, changes in (
        (3, {"epochs": "x", "batch_size": 0, "shufle": False}),
        (4, {"model": model, "callbacks": ["EarlyStoping"], "loss_fn": "x.y"}),
    ):
        changed_config(folder, "b.yaml", **changes)
        code, _, error = command("config", "check", "b.yaml")
        assert code == 2 and re.fullmatch(rf"omnitrain: {count} errors:\n(  b\.yaml:\d+: .*\n){{{count}}}", error)


@pytest.mark.parametrize("trainer", TRAINERS)
def test_check_finds_missing_model_and_data(trainer: str, folder: Path, command: Any) -> None:
    kind = TRAINERS[trainer].__name__
    for missing, words in (("model", f"{kind} needs `model`"), ("train_dataset", "here is nothing to train on")):
        changed_config(folder, class_path=kind, **{missing: None})
        for check in (["config", "check"], ["train"]):
            code, _, error = command(*check, "a.yaml")
            assert code == 2 and words in error


def test_help_lists_all_arguments() -> None:
    text = format_trainer_help()
    for kind in TRAINERS.values():
        for name in inspect.signature(kind).parameters:
            assert re.search(rf"^  {name} +\S", text, re.M), name


def test_sweep_tries_every_value(folder: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SearchResult, "plot", lambda self, path: None)  # which takes longer than the trials
    words = "--trainer.learning_rate 1e-4,1e-1 --trainer.model.width 4,8 --trainer.epochs 1 --save_dir s"
    for _ in range(2):  # the second time, nothing is left to do
        assert main(["sweep", "a.yaml", *words.split()]) == 0
    out = capsys.readouterr().out
    assert "trainer.learning_rate" in out and "The best is in" in out and (folder / "s" / "search.txt").exists()
    trials = [folder / "s" / f"trial-000{number}" for number in range(4)]
    tried = [trainer_in(trial / "config.yaml") for trial in trials]
    values = [(trainer["learning_rate"], trainer["model"]["init_args"]["width"]) for trainer in tried]
    assert values == [(1e-4, 4), (1e-4, 8), (1e-1, 4), (1e-1, 8)]
    assert [len(json.loads((trial / "run.json").read_text())["starts"]) for trial in trials] == [1] * 4
