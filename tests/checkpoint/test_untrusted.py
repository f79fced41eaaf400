"""Run folders and stores that somebody else made: nothing outside of the run folder is written."""

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import fsspec
import programs
import pytest
import torch
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem
from marks import TRAINERS, make_small, thinned
from recipes import rows, t16

from omnitrain import Callback, CheckpointError, Profiler
from omnitrain.checkpoint.manifest import MANIFEST, encode
from omnitrain.cli.main import main
from omnitrain.core.files import is_inside

ADDRESS = "memory://bucket/run"
FOLDERS = ("tensorboard", "profile")
LINKS = ("metrics.jsonl", "metrics.csv", "run.json", "run.json.tmp", "metrics.csv.tmp", "last", "best")
PIPES = ("metrics.jsonl", "metrics.csv", "run.json.tmp")


def run(kind: Any, folder: str | Path, resume_from: str | None = None, **options: Any) -> None:
    options = {"epochs": 1, "save_steps": 2, "log_steps": 1, "loggers": ["csv"], **options}
    trainer = make_small(kind, t16(dtype=torch.float32), rows(16, torch.float32), save_dir=folder, **options)
    trainer.train(resume_from=resume_from)


@pytest.fixture
def bucket(configured_objects: tuple[str, dict[str, bytes]], tmp_path: Path, monkeypatch: Any) -> dict[str, Any]:
    """A run in a bucket to which somebody adds objects."""
    monkeypatch.setenv("OMNITRAIN_LOCAL_DIR", str(tmp_path / "local"))
    monkeypatch.setenv("OMNITRAIN_UPLOAD_WAIT", "0.1")
    monkeypatch.setattr(MemoryFileSystem, "store", {})
    for key, data in configured_objects[1].items():
        add(MemoryFileSystem.store, key, data)
    return MemoryFileSystem.store


def add(bucket: dict[str, Any], key: str, data: bytes = b"evil") -> None:
    path = f"/bucket/run/{key}"
    bucket[path] = MemoryFile(fsspec.filesystem("memory"), path, data)


def test_command_downloads_only_files_of_the_run(bucket: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    add(bucket, "crowd/file")
    paths, get = [], MemoryFileSystem.get_file

    def get_file(self: Any, path: str, *args: Any, **options: Any) -> None:
        paths.append(path)
        get(self, path, *args, **options)

    monkeypatch.setattr(MemoryFileSystem, "get_file", get_file)
    assert main(["checkpoint", "verify", ADDRESS]) == 0
    assert any("model.safetensors" in path for path in paths) and not any("crowd" in path for path in paths)


def test_is_inside_accepts_names_within_the_folder() -> None:
    assert is_inside("model.safetensors") and is_inside("checkpoint-8/a b.json")
    assert not any(map(is_inside, ("..", "a/../b", "", ".", "./a", "/a", "a//b", "a\\b", "a\0b", "a/..")))


@pytest.mark.parametrize("kind", TRAINERS)
def test_run_writes_nothing_through_links(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """To files or folders; a link in the place of its lock is an error. Nor does it wait for a pipe."""
    folder, outside, victim = tmp_path / "run", tmp_path / "outside", tmp_path / "victim.txt"
    folder.mkdir(), outside.mkdir()
    victim.write_text("precious\n")
    (folder / "run.lock").symlink_to(victim)
    with pytest.raises(CheckpointError, match=r"run\.lock.*is a link to"):
        run(kind, folder)
    assert [path.name for path in folder.iterdir()] == ["run.lock"]
    (folder / "run.lock").unlink()
    for name in LINKS:
        (folder / name).symlink_to(victim)
    for name in FOLDERS:
        (folder / name).symlink_to(outside, target_is_directory=True)
    run(kind, folder, loggers=["csv", "tensorboard"], callbacks=[Profiler(skip=0, wait=0, warmup=1, active=1)])
    assert (folder / "last" / "model.safetensors").is_file() and caplog.text.count("is a link to") >= 2
    assert victim.read_text() == "precious\n" and list(outside.iterdir()) == []
    for name in PIPES:
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)
    run(kind, folder, overwrite=True)
    assert (folder / "last" / "model.safetensors").is_file()


def filled_with(content: bytes) -> Any:
    return lambda path, victim: path.write_bytes(content)


BYTES = {
    "noise": bytes(range(256)) * 12, "nested list": b"[" * 100_000, "number": b"9" * 10_000, "other type": b"[1, 2]",
}  # fmt: skip
DAMAGES: dict[str, Any] = {
    "pipe": lambda path, victim: os.mkfifo(path),
    "link": lambda path, victim: path.symlink_to(victim),
    "folder": lambda path, victim: path.mkdir(),
    "nested dict": filled_with(b'{"a":' * 50_000),
    **{name: filled_with(content) for name, content in BYTES.items()},
}
"""What somebody puts in the place of a file."""
DAMAGED = (
    "config.yaml", "run.json", "metrics.jsonl", "metrics.csv", "last", "checkpoint-4/omnitrain.json",
    "checkpoint-4/history.jsonl", "checkpoint-4/model.safetensors", "checkpoint-4/optimizer/state.safetensors",
    "checkpoint-4/rng/state.safetensors",
)  # fmt: skip
COMMANDS: dict[str, list[str]] = {
    "checkpoint ls": ["RUN"], "checkpoint show": ["RUN/last"], "checkpoint verify": ["RUN"],
    "checkpoint diff": ["RUN/last", "RUN/checkpoint-2"], "checkpoint export": ["RUN/last", "RUN/out"],
    "checkpoint record": ["RUN"], "compare": ["RUN"], "train": ["--resume", "RUN", "--trainer.epochs", "2"],
    "config check": ["RUN/config.yaml"],
}  # fmt: skip


def configuration(folder: Path, save_dir: object, size: int = 16, **options: Any) -> str:
    """Write a configuration file; return its path."""
    parts = {
        "class_path": "Trainer", "model": {"class_path": "recipes.t16"}, "epochs": 1, "batch_size": 4,
        "train_dataset": {"class_path": "recipes.rows", "init_args": {"size": size}}, "save_dir": str(save_dir),
        "loss_fn": {"class_path": "torch.nn.MSELoss"}, "progress_bar": False,
    }  # fmt: skip
    (folder / "config.yaml").write_text(json.dumps({"trainer": {**parts, **options}}))
    return str(folder / "config.yaml")


LOGGED = {"save_steps": 2, "log_steps": 1, "loggers": ["csv"]}


@pytest.fixture(scope="module")
def configured_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of `omnitrain train` in a folder "run", in whose files RUN stands for its place."""
    folder = tmp_path_factory.mktemp("configured") / "run"
    assert main(["train", configuration(folder.parent, folder, **LOGGED)]) == 0
    path = folder / "config.yaml"
    path.write_text(path.read_text().replace(str(folder), "RUN"))
    return folder


def exit_code_of(words: list[str]) -> Any:
    """Run a command; a wait that does not end kills the process."""
    signal.alarm(int(programs.LIMIT))
    try:
        return main(words)
    except SystemExit as error:
        return error.code
    finally:
        signal.alarm(0)


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(("number", "every"), thinned([(0, 3), (7, 3), (0, 1), (2, 1), (5, 1)], [(0, 3), (7, 3)]))
def test_command_survives_a_hostile_run(
    command: str, number: int, every: int, configured_run: Path, tmp_path: Path
) -> None:
    """It ends with a code and no error of Python's, and neither waits nor writes elsewhere."""
    victim = tmp_path / "victim"
    for place, name in [*enumerate(DAMAGED, number)][number % 5 :: every]:
        damage, run = list(DAMAGES)[place % len(DAMAGES)], tmp_path / f"run-{place}"
        if (command, damage, name) == ("config check", "pipe", "config.yaml"):
            continue  # a pipe that the user names is read
        shutil.copytree(configured_run, run, symlinks=True)
        config, file = run / "config.yaml", run / name
        config.write_text(config.read_text().replace("RUN", str(run)))
        victim.write_bytes(file.read_bytes() if file.is_file() else b"precious")
        file.unlink()  # it may be a link to a folder
        DAMAGES[damage](file, victim)
        before = victim.read_bytes()
        words = [*command.split(), *(word.replace("RUN", str(run)) for word in COMMANDS[command])]
        assert exit_code_of(words) in (0, 1, 2), (damage, name)
        assert victim.read_bytes() == before, (damage, name)
        assert {path.name for path in tmp_path.iterdir()} == {"victim", run.name}, (damage, name)
        shutil.rmtree(run)


# --- hostile buckets


def apply(attack: Any, bucket: dict[str, Any]) -> None:
    """Put an object into a bucket, remove it, or change a manifest, whose hash anyone can make right."""
    if isinstance(attack, dict):
        content = json.loads(bucket[f"/bucket/run/checkpoint-4/{MANIFEST}"].getvalue())
        entries = {name: value for name, value in content.items() if name not in ("sha256", "format_version")}
        files = attack.get("files", {})
        merged = {**content["files"], **files} if isinstance(files, dict) else files
        add(bucket, f"checkpoint-4/{MANIFEST}", encode({**entries, **attack, "files": merged}))
    elif attack[1] is None:
        bucket.pop(f"/bucket/run/{attack[0]}", None)
    else:
        add(bucket, *attack)


ENTRY = {"size": 1, "sha256": "0" * 64}
LEAD_OUT = ("../victim", "checkpoint-4/../../../../victim")
MODEL = "checkpoint-4/model.safetensors"
CONTENTS: dict[str, Any] = {
    **{f"key {key[:24]!r}": (key, b"evil") for key in (
        *LEAD_OUT, "/victim", "checkpoint-4//victim", "C:\\victim",
        "checkpoint-4\\..\\v", "checkpoint-4/a\0b", "x" * 300, "/".join(["y" * 200] * 30), "checkpoint-4/a\n\x1b[31mb",
        "\x1b[31mrow.jsonl", " ", f"{MODEL}/x", "checkpoint-4", "checkpoint-4/optimizer", "last/x", "config.yaml/x",
        "run.lock", "run.lock/x",
        f"checkpoint-{'9' * 20}/{MANIFEST}", f"checkpoint-4.old/{MANIFEST}", f"checkpoint-6/{MANIFEST}",
    )},
    **{f"{name} {damage}": (name, data) for name in (*DAMAGED, "best") for damage, data in (
        *BYTES.items(), ("empty", b""), ("path", b"../../victim"), ("control codes", b"\x1b[31mx"),
        ("length", (2**40).to_bytes(8, "little") + b"{}"), ("missing", None),
    )},
    "nothing": ("checkpoint-4/omnitrain.json.tmp", None),
    "manifest with a path": {"files": {"../victim": ENTRY}},
    "manifest with a root": {"files": {"/victim": ENTRY}},
    "manifest with a size": {"files": {"model.safetensors": {**ENTRY, "size": 2**62}}},
    "manifest with a list": {"files": []},
    "manifest with control codes": {"settings": {"\x1b[31ma\n": "\x1b[2J"}},
    **{f"manifest with {name}": {name: value} for name, value in (
        ("step", 10**30), ("sequence", -1), ("score", "x"), ("settings", "x"), ("progress", "x"), ("saved_at", "x"),
        ("objective", {"metric": 3}), ("for_best", []), ("frozen", {"a": 1}), ("versions", [1]),
    )},
}  # fmt: skip
"""A key and its object, which may be None; or changes of a manifest."""


def resized(size: Any) -> Any:
    return lambda listing: {name: {**info, "size": size(info["size"])} for name, info in listing.items()}


def with_replaced_model(listing: dict[str, Any]) -> dict[str, Any]:
    add(MemoryFileSystem.store, MODEL, b"x" * len(listing))
    return listing


def without_model(listing: dict[str, Any]) -> dict[str, Any]:
    MemoryFileSystem.store.pop(f"/bucket/run/{MODEL}", None)
    return listing


def with_crowd(listing: dict[str, Any]) -> dict[str, Any]:
    names = [f"/bucket/run/crowd/{number}" for number in range(20_000)]
    return listing | {name: {"name": name, "size": 1, "type": "file"} for name in names}


LISTINGS: dict[str, Any] = {
    "larger": resized(lambda size: size + 5), "huge": resized(lambda size: 2**50), "zero": resized(lambda size: 0),
    "negative": resized(lambda size: -1), "None": resized(lambda size: None), "text": resized(lambda size: "x"),
    "replaced": with_replaced_model, "gone": without_model, "crowd": with_crowd,
}  # fmt: skip
"""What a store answers that does not have what it lists."""
BUCKET_COMMANDS: dict[str, list[str]] = {
    **{name: [word.replace("RUN/out", "OUT").replace("RUN", ADDRESS) for word in words]
       for name, words in COMMANDS.items() if name != "config check"},
    "train of a file": ["CONFIG", "--train.resume_from", "auto", "--trainer.epochs", "2"],
    "train from weights": ["CONFIG", "--trainer.save_dir", "OUT", "--trainer.init_from", f"{ADDRESS}/last"],
}  # fmt: skip
ATTACKS = [
    (command, attack)
    for place, command in enumerate(BUCKET_COMMANDS) for number, attack in enumerate((*CONTENTS, *LISTINGS))
    if (number + place) % 4 == 0
]  # fmt: skip
CERTAIN = [(command, "nothing") for command in BUCKET_COMMANDS if command != "compare"] + [
    (command, f"key {key[:24]!r}") for key in LEAD_OUT
    for command in BUCKET_COMMANDS if command.startswith("checkpoint ") or command == "train of a file"
]  # fmt: skip
"""What ends well, or with an error that says why."""
QUICK_ATTACKS = [*ATTACKS[::23], *CERTAIN[::2]]


@pytest.fixture(scope="module")
def configured_objects(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, bytes]]:
    """The file of a run of `omnitrain train`, and what it uploads."""
    config = configuration(tmp_path_factory.mktemp("config"), ADDRESS, **LOGGED)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMNITRAIN_LOCAL_DIR", str(tmp_path_factory.mktemp("local")))
        patch.setattr(MemoryFileSystem, "store", {})
        assert main(["train", config]) == 0
        files = MemoryFileSystem.store.items()
        return config, {path.removeprefix("/bucket/run/"): file.getvalue() for path, file in files}


@pytest.mark.parametrize(("command", "attack"), thinned(dict.fromkeys([*ATTACKS, *CERTAIN]), QUICK_ATTACKS))
@pytest.mark.filterwarnings("ignore")
def test_command_survives_a_hostile_bucket(
    command: str, attack: str, configured_objects: tuple[str, Any], bucket: Any, tmp_path: Path, capsys: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """It ends with a code and no error of Python's, and neither waits nor writes elsewhere."""
    temporary = tmp_path / "a" / "b" / "c"
    temporary.mkdir(parents=True)
    (tmp_path / "victim").write_text("precious")
    monkeypatch.chdir(temporary)
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    if attack in CONTENTS:
        apply(CONTENTS[attack], bucket)
    else:
        find = MemoryFileSystem.find
        monkeypatch.setattr(MemoryFileSystem, "find", lambda *args, **options: LISTINGS[attack](find(*args, **options)))
    words = [word.replace("OUT", str(tmp_path / "out")).replace("CONFIG", configured_objects[0]) for word in
             [*command.partition(" of ")[0].partition(" from ")[0].split(), *BUCKET_COMMANDS[command]]]  # fmt: skip
    code, printed = exit_code_of(words), capsys.readouterr()
    assert code in (0, 1, 2) and "\x1b" not in printed.out + printed.err
    if (command, attack) in CERTAIN:
        assert code == 0 if attack == "nothing" else code and "leads out of its folder" in printed.err
    assert (tmp_path / "victim").read_text() == "precious"
    assert {path.name for path in tmp_path.iterdir()} <= {"victim", "a", "local", "out"}
    assert not [path for path in (tmp_path / "a").rglob("*") if path.is_file()]


class Notify(Callback):
    def __init__(self, url: str, token: str, mail: str) -> None:
        self.url = url


def test_values_of_the_environment_are_written_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_WORD", "horse-battery")
    monkeypatch.setattr("recipes.Notify", Notify, raising=False)
    monkeypatch.setattr(Notify, "__module__", "recipes")
    part = {"class_path": "recipes.Notify", "init_args": {
        "url": "https://${env:MY_WORD}@host", "token": "${env:MY_WORD}", "mail": "${env:MY_WORD} at home",
    }}  # fmt: skip
    assert main(["train", configuration(tmp_path, tmp_path / "run", 8, callbacks=[part])]) == 0
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert not [path.name for path in files if b"horse-battery" in path.read_bytes()]
    config = (tmp_path / "run" / "config.yaml").read_text()
    assert "token: ${env:MY_WORD}" in config and "mail: ${env:MY_WORD} at home" in config
