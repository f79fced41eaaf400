"""`omnitrain checkpoint`: what it answers about real checkpoints, whole and damaged ones."""

from __future__ import annotations

import importlib.metadata
import json
import logging
import os
import platform
import re
import shutil
import sys
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import programs
import pytest
import torch
import torch.nn.functional as F
from recipes import rows, t16
from safetensors.torch import load_file, save_file

from omnitrain import Trainer, __version__, checkpoint_cli
from omnitrain.checkpoint import shards, state
from omnitrain.checkpoint.disk import FileSystem
from omnitrain.checkpoint.manifest import encode
from omnitrain.checkpoint.shards import Block, own_blocks, write_shards
from omnitrain.checkpoint.store import Store
from omnitrain.checkpoint.tensors import Gathered, TensorFile
from omnitrain.cli import main

ROOT = Path(__file__).resolve().parent.parent


def train(folder: Path, **options: Any) -> Trainer:
    trainer = Trainer(
        t16(), rows(16), rows(8), loss_fn=F.mse_loss, batch_size=4, epochs=3, learning_rate=0.05, save_dir=folder,
        device="cpu", progress_bar=False, **options,
    )  # fmt: skip
    trainer.train()
    return trainer


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "[a]"  # brackets mean something to rich
    train(folder)
    return folder


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A run of three checkpoints, at steps 4, 8 and 12, that a test may spoil."""
    return shutil.copytree(trained, tmp_path / "[a]")


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def answer(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    capsys.readouterr()
    code = main(["checkpoint", *map(str, words)])
    out, err = capsys.readouterr()
    return code, out, err


def row_of(out: str, name: str) -> list[str]:
    """The cells of the row that begins with `name`; cells are two spaces apart."""
    line = next(line for line in out.splitlines() if line.split("  ")[0] == name)
    return [cell.strip() for cell in line.split("  ") if cell.strip()]


# --- ls


def test_ls_has_row_per_checkpoint(run: Path, capsys: Any) -> None:
    code, out, _ = answer(capsys, "ls", run)
    assert code == 0
    assert [line.split()[:3] for line in out.splitlines()[1:4]] == [
        ["checkpoint-4", "4", "1"],
        ["checkpoint-8", "8", "2"],
        ["checkpoint-12", "12", "3"],
    ]


def test_pipe_gets_plain_columns(run: Path, capsys: Any, monkeypatch: Any) -> None:
    _, plain, _ = answer(capsys, "ls", run)
    monkeypatch.setenv("FORCE_COLOR", "1")  # as Jupyter's kernels and many CI systems do
    _, forced, _ = answer(capsys, "ls", run)
    assert forced == plain and "\x1b" not in forced


def test_ls_prints_score_size_date_and_state(run: Path, capsys: Any) -> None:
    content = Store(run).verify(run / "checkpoint-8")
    _, out, _ = answer(capsys, "ls", run)
    cells = row_of(out, "checkpoint-8")
    size = sum(file.stat().st_size for file in (run / "checkpoint-8").rglob("*") if file.is_file())
    assert cells[3] == f"{content['score']:.6g}"
    assert cells[-3] == f"{size / 1000:.3g} kB"
    assert cells[-2].startswith("20") and cells[-1] == "complete"
    assert "score: loss, lower is better" in out


def test_ls_marks_last_and_best(run: Path, capsys: Any) -> None:
    store = Store(run)
    last, best = (found[0].name for found in map(store.resolve, ("last", "best")) if found)
    _, out, _ = answer(capsys, "ls", run)
    marks = {line.split()[0]: line for line in out.splitlines() if line.startswith("checkpoint-")}
    assert [name for name, line in marks.items() if "last" in line] == [last]
    assert [name for name, line in marks.items() if "best" in line] == [best]


def test_ls_of_checkpoint(run: Path, capsys: Any) -> None:
    _, out, _ = answer(capsys, "ls", run / "checkpoint-8")
    assert [line.split()[0] for line in out.splitlines() if line.startswith("checkpoint-")] == ["checkpoint-8"]


def test_ls_marks_damaged_checkpoint(run: Path, capsys: Any) -> None:
    weights = run / "checkpoint-8" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    code, out, _ = answer(capsys, "ls", run)
    assert code == 0
    assert row_of(out, "checkpoint-8")[-1] == "damaged"
    assert row_of(out, "checkpoint-4")[-1] == "complete"
    assert "'model.safetensors' has" in out


def test_ls_lists_checkpoint_without_manifest(run: Path, capsys: Any) -> None:
    (run / "checkpoint-8" / "omnitrain.json").unlink()
    _, out, _ = answer(capsys, "ls", run)
    assert row_of(out, "checkpoint-8")[1] == "8"
    assert row_of(out, "checkpoint-8")[-1] == "damaged"


def test_ls_without_evaluations(tmp_path: Path, capsys: Any) -> None:
    Trainer(
        t16(), rows(8), loss_fn=F.mse_loss, epochs=1, save_dir=tmp_path / "a", device="cpu", progress_bar=False
    ).train()
    code, out, _ = answer(capsys, "ls", tmp_path / "a")
    assert code == 0
    assert row_of(out, "checkpoint-1")[3:5] == ["-", "last"]
    assert answer(capsys, "show", tmp_path / "a" / "best")[0] == 1


def test_pipe_gets_no_colours_or_frames(run: Path, capsys: Any) -> None:
    _, out, _ = answer(capsys, "show", run)
    assert out.isascii() and "\x1b" not in out
    assert all(line == line.rstrip() for line in out.splitlines())
    options = next(line for line in out.splitlines() if line.startswith("optimizer_groups"))
    assert options.endswith("}]") and len(options) > 120


def test_terminal_gets_fitting_tables(run: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "90")
    _, out, _ = answer(capsys, "ls", run)
    header, rule, *_ = out.splitlines()
    assert "\x1b[1m" in header and set(rule) == {"─"} and len(rule) <= 90


def test_narrow_terminal_loses_nothing(run: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "40")
    _, out, _ = answer(capsys, "ls", run)
    assert all(word in out for word in ("checkpoint-8", " 8 ", " kB ", "complete"))


# --- verify


def test_verify_run(run: Path, capsys: Any) -> None:
    code, out, _ = answer(capsys, "verify", run)
    assert code == 0
    assert out.splitlines()[-1] == "3 of 3 complete."


FILES = ["model.safetensors", "optimizer/state.safetensors", "rng/state.safetensors", "omnitrain.json"]


@pytest.mark.parametrize("file", FILES)
def test_verify_reports_flipped_bit(file: str, run: Path, capsys: Any) -> None:
    flip(run / "checkpoint-8" / file)
    code, out, _ = answer(capsys, "verify", run)
    damaged = [line for line in out.splitlines() if line.startswith("damaged")]
    assert code == 1
    assert len(damaged) == 1 and "checkpoint-8" in damaged[0] and repr(file) in damaged[0]
    assert out.splitlines()[-1] == "2 of 3 complete."


@pytest.mark.parametrize("file", FILES)
def test_verify_reports_missing_file(file: str, run: Path, capsys: Any) -> None:
    (run / "checkpoint-8" / file).unlink()
    code, out, _ = answer(capsys, "verify", run / "checkpoint-8")
    assert code == 1
    assert f"{file!r} is missing" in out and "0 of 1 complete." in out


def test_verify_checkpoint(run: Path, capsys: Any) -> None:
    flip(run / "checkpoint-12" / "model.safetensors")
    assert answer(capsys, "verify", run / "checkpoint-8")[0] == 0


# --- show


def test_show_prints_all_sections(run: Path, capsys: Any) -> None:
    code, out, _ = answer(capsys, "show", run / "checkpoint-8")
    assert code == 0
    assert row_of(out, "step") == ["step", "8"]
    assert row_of(out, "metric") == ["metric", "loss"]
    assert row_of(out, "learning_rate") == ["learning_rate", "0.05"]
    assert row_of(out, "torch") == ["torch", importlib.metadata.version("torch")]
    assert row_of(out, "world_size") == ["world_size", "1"]
    assert row_of(out, "omnitrain") == ["omnitrain", __version__]
    assert row_of(out, "python") == ["python", platform.python_version()]


def test_show_date_survives_copy(run: Path, capsys: Any) -> None:
    folder = run / "checkpoint-8"
    content = Store(run).verify(folder)
    saved = datetime.fromisoformat(content["saved_at"]).astimezone().strftime("%Y-%m-%d %H:%M")
    os.utime(folder / "omnitrain.json", (0, 0))
    assert f", saved {saved}, " in answer(capsys, "show", folder)[1]
    assert row_of(answer(capsys, "ls", run)[1], folder.name)[-2] == saved


def test_show_date_of_old_checkpoint(run: Path, capsys: Any) -> None:
    store = Store(run)
    store.save(99, lambda folder: (folder / "a").touch(), {})
    os.utime(store.path(99) / "omnitrain.json", (1e9, 1e9))
    assert row_of(answer(capsys, "ls", run)[1], "checkpoint-99")[-2].startswith("2001-09-0")


def test_show_lists_tensors(run: Path, capsys: Any) -> None:
    _, out, _ = answer(capsys, "show", run)
    assert row_of(out, "0.weight") == ["0.weight", "F64", "[16, 4]"]
    assert row_of(out, "3.bias/exp_avg") == ["3.bias/exp_avg", "F64", "[1]"]
    assert "model.safetensors: 4 tensors" in out


def test_show_of_run(run: Path, capsys: Any) -> None:
    _, out, _ = answer(capsys, "show", run)
    assert out.startswith(f"{run / 'checkpoint-12'}:")


@pytest.mark.parametrize("which", ["last", "best"])
def test_show_takes_pointer(which: str, run: Path, capsys: Any) -> None:
    found = Store(run).resolve(which)
    assert found
    _, out, _ = answer(capsys, "show", run / which)
    assert out.startswith(f"{found[0]}:")


def test_show_inside_folder(run: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run / "checkpoint-8")
    assert answer(capsys, "show", ".")[1].startswith(f"{run / 'checkpoint-8'}:")
    assert "3 of 3 complete." in answer(capsys, "verify", "..")[1]


def test_show_rejects_damaged_checkpoint(run: Path, capsys: Any) -> None:
    flip(run / "checkpoint-12" / "model.safetensors")
    code, out, err = answer(capsys, "show", run)
    assert code == 1 and not out
    assert "'model.safetensors'" in err and "checkpoint-8" in err


# --- export


@pytest.fixture(scope="module")
def transformers_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A checkpoint of a tiny model of transformers whose output layer is tied to its embedding."""
    transformers = pytest.importorskip("transformers")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    folder = tmp_path_factory.mktemp("runs") / "gpt2"
    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 2}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    data = [{"input_ids": ids, "labels": ids} for ids in torch.randint(0, 40, (8, 8))]
    Trainer(model, data, epochs=1, learning_rate=0.01, save_dir=folder, device="cpu", progress_bar=False).train()
    return folder, model


def test_export_opens_with_from_pretrained(transformers_run: tuple[Path, Any], tmp_path: Path, capsys: Any) -> None:
    folder, model = transformers_run
    code, _, _ = answer(capsys, "export", folder, tmp_path / "new" / "out")
    again, info = type(model).from_pretrained(tmp_path / "new" / "out", output_loading_info=True)
    assert code == 0
    assert not any(info.values())
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in model.state_dict().items())


def shard(folder: Path, ranks: int = 2) -> None:
    """Make a checkpoint one whose ranks have written their parts of the weights and of the optimizer's tensors."""
    content = json.loads((folder / "omnitrain.json").read_text())
    for whole, part in (("model.safetensors", "model"), ("optimizer/state.safetensors", "optimizer")):
        if content["files"].pop(whole, None) is None:
            continue
        tensors = load_file(folder / whole)
        (folder / whole).unlink()
        (folder / part).mkdir(exist_ok=True)
        for rank in range(ranks):
            blocks: dict[str, list[Block]] = {}
            for name, one in tensors.items():
                begin, end = (one.numel() * (rank + step) // ranks for step in (0, 1))
                own = Gathered(tuple(one.shape), one.dtype, one.clone, flat=partial(slice_of, one, begin, end))
                blocks[name] = own_blocks(own, rank)
            entries = write_shards(blocks, folder / part, rank, FileSystem())
            content["files"] |= {f"{part}/{name}": entry for name, entry in entries.items()}
    own_keys = ("format_version", "sha256")
    text = encode({name: one for name, one in content.items() if name not in own_keys})
    (folder / "omnitrain.json").write_bytes(text)


def slice_of(tensor: torch.Tensor, begin: int, end: int) -> tuple[int, torch.Tensor]:
    return begin, tensor.reshape(-1)[begin:end]


@pytest.mark.parametrize("limit", [5 * 10**9, 2000])
def test_export_consolidates_shards(
    limit: int, transformers_run: tuple[Path, Any], tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, model = transformers_run
    shard(next(shutil.copytree(folder, tmp_path / "run").glob("checkpoint-*")))
    defaults = dict(zip(("limit",), shards.write_whole.__defaults__ or (), strict=True))
    assert defaults == {"limit": shards.LARGEST_FILE}
    monkeypatch.setattr(shards.write_whole, "__defaults__", (limit,))
    code, _, error = answer(capsys, "export", tmp_path / "run", tmp_path / "out")
    again, info = type(model).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert (code, error) == (0, "") and not any(info.values())
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in model.state_dict().items())
    assert (tmp_path / "out" / "model.safetensors").exists() == (limit > 2000)


def test_commands_take_sharded_checkpoint(run: Path, tmp_path: Path, capsys: Any) -> None:
    whole = shutil.copytree(run, tmp_path / "whole")
    shard(run / "checkpoint-8")
    assert answer(capsys, "verify", run)[0] == 0
    shown, before = (answer(capsys, "show", folder / "checkpoint-8")[1] for folder in (run, whole))
    rows = [line for line in before.splitlines() if re.search(r" [FI]\d+ +\[", line)]
    assert rows and all(re.sub(" +", " ", row) in re.sub(" +", " ", shown) for row in rows)
    assert "model: " in shown and "rank-" not in shown
    assert "0 of 4 tensors differ" in answer(capsys, "diff", run / "checkpoint-8", whole / "checkpoint-8")[1]
    flip(run / "checkpoint-8" / "model" / "rank-00001.safetensors")
    code, out, _ = answer(capsys, "verify", run / "checkpoint-8")
    assert code == 1 and "model/rank-00001.safetensors" in out


def test_export_writes_named_checkpoint(run: Path, tmp_path: Path, capsys: Any) -> None:
    answer(capsys, "export", run / "checkpoint-4", tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]
    there, exported = (load_file(f / "model.safetensors") for f in (run / "checkpoint-4", tmp_path / "out"))
    assert all(torch.equal(there[name], exported[name]) for name in there)


def test_export_does_not_overwrite(run: Path, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine").write_text("mine")
    code, _, err = answer(capsys, "export", run, out)
    assert code == 2
    assert "not overwritten" in err
    assert [path.name for path in out.iterdir()] == ["mine"]
    assert answer(capsys, "export", run, out / "mine")[0] == 2


def test_export_fills_empty_folder(run: Path, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "out").mkdir()
    assert answer(capsys, "export", run, tmp_path / "out")[0] == 0


def test_export_rejects_damaged_checkpoint(run: Path, tmp_path: Path, capsys: Any) -> None:
    flip(run / "checkpoint-12" / "model.safetensors")
    assert answer(capsys, "export", run, tmp_path / "out")[0] == 1
    assert not (tmp_path / "out").exists()


def test_export_leaves_nothing_after_failure(
    run: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(source: Path, target: Path) -> None:
        target.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shutil, "copyfile", full)
    code, _, err = answer(capsys, "export", run, tmp_path / "out")
    assert code == 1
    assert "No space left" in err
    assert not list((tmp_path / "out").iterdir())


# --- diff


def test_diff_lists_changed_settings(run: Path, tmp_path: Path, capsys: Any) -> None:
    train(tmp_path / "b", weight_decay=0.1, max_grad_norm=None)
    code, out, _ = answer(capsys, "diff", run, tmp_path / "b")
    assert code == 0
    assert row_of(out, "weight_decay") == ["weight_decay", "0.0", "0.1"]
    assert row_of(out, "max_grad_norm") == ["max_grad_norm", "1.0", "null"]
    assert row_of(out, "optimizer_groups.0.weight_decay")[1:] == ["0.0", "0.1"]
    assert not any(line.startswith("learning_rate") for line in out.splitlines())


def test_diff_lists_settings_of_one_side(run: Path, tmp_path: Path, capsys: Any) -> None:
    train(tmp_path / "b", test_dataset={"dev": rows(4)})
    _, out, _ = answer(capsys, "diff", run, tmp_path / "b")
    assert row_of(out, "test_dataset.dev")[1:] == ["(absent)", "torch.utils.data.dataset.TensorDataset"]
    assert row_of(out, "test_dataset") == ["test_dataset", "null", "(absent)"]


def test_diff_orders_tensors(run: Path, capsys: Any) -> None:
    a, b = (load_file(run / f"checkpoint-{step}" / "model.safetensors") for step in (4, 12))
    largest = {name: float((a[name] - b[name]).abs().max()) for name in a}
    expected = sorted(largest, key=lambda name: -largest[name])
    _, out, _ = answer(capsys, "diff", run / "checkpoint-4", run)
    lines = out.split("4 of 4 tensors differ\n")[1].splitlines()[1:]
    assert [line.split()[0] for line in lines] == expected
    assert row_of(out, expected[0])[-1] == f"{largest[expected[0]]:.6g}"


def test_diff_of_same_checkpoint(run: Path, capsys: Any) -> None:
    _, out, _ = answer(capsys, "diff", run, run / "last")
    assert "0 settings differ" in out and "0 of 4 tensors differ" in out


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        (torch.tensor([1.0, float("nan")]), torch.tensor([1.0, float("nan")]), 0.0),
        (torch.tensor([float("inf")]), torch.tensor([float("inf")]), 0.0),
        (torch.tensor([float("inf")]), torch.tensor([-float("inf")]), float("inf")),
        (torch.tensor([2**40 + 1]), torch.tensor([2**40]), 1.0),
        (torch.tensor([2**60 + 1]), torch.tensor([2**60]), 1.0),
        (torch.tensor([2**63 - 1]), torch.tensor([-(2**63)]), 2.0**64),
        (torch.tensor([0, 200], dtype=torch.uint8), torch.tensor([250, 0], dtype=torch.uint8), 250.0),
        (torch.tensor([-100], dtype=torch.int8), torch.tensor([100], dtype=torch.int8), 200.0),
        (torch.tensor([2**64 - 1], dtype=torch.uint64), torch.tensor([0], dtype=torch.uint64), 2.0**64),
        (torch.tensor([-1], dtype=torch.int32), torch.tensor([True]), 2.0),
        (torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int32), 0.0),
        (torch.tensor([True, False]), torch.tensor([True, True]), 1.0),
        (torch.tensor([1.0], dtype=torch.bfloat16), torch.tensor([1.5]), 0.5),
        (torch.tensor([3 + 4j]), torch.tensor([0j]), 5.0),
        (torch.empty(0), torch.empty(0), 0.0),
    ],
)
def test_diff_of_every_dtype(a: torch.Tensor, b: torch.Tensor, expected: float) -> None:
    assert checkpoint_cli._largest_difference(a, b) == expected


def test_diff_puts_nan_first(tmp_path: Path, capsys: Any) -> None:
    names = ["a", "b", "c"]
    save_file({name: torch.zeros(2) for name in names}, tmp_path / "a")
    changed = {"a": torch.ones(2), "b": torch.tensor([0.0, float("nan")]), "c": torch.full((2,), float("inf"))}
    save_file(changed, tmp_path / "b")
    checkpoint_cli._print_weight_differences(TensorFile(tmp_path / "a"), TensorFile(tmp_path / "b"))
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[-3:]] == ["b", "c", "a"]


def test_diff_of_other_models(tmp_path: Path, capsys: Any) -> None:
    save_file({"w": torch.zeros(2, 3), "old": torch.zeros(1)}, tmp_path / "a")
    save_file({"w": torch.zeros(3, 3), "new": torch.zeros(1)}, tmp_path / "b")
    checkpoint_cli._print_weight_differences(TensorFile(tmp_path / "a"), TensorFile(tmp_path / "b"))
    out = capsys.readouterr().out
    assert "w: shape [2, 3] in A, [3, 3] in B" in out
    assert "only in A: old" in out and "only in B: new" in out


def test_names_are_printed_unchanged(tmp_path: Path, capsys: Any) -> None:
    name = "[red]layers[0]:smile:"
    save_file({name: torch.zeros(1)}, tmp_path / "a")
    save_file({name: torch.ones(1)}, tmp_path / "b")
    checkpoint_cli._print_weight_differences(TensorFile(tmp_path / "a"), TensorFile(tmp_path / "b"))
    assert row_of(capsys.readouterr().out, name) == [name, "[1]", "1"]


def test_diff_limits_tensors(tmp_path: Path, capsys: Any) -> None:
    save_file({f"w{i}": torch.zeros(1) for i in range(13)}, tmp_path / "a")
    save_file({f"w{i}": torch.full((1,), float(i)) for i in range(13)}, tmp_path / "b")
    checkpoint_cli._print_weight_differences(TensorFile(tmp_path / "a"), TensorFile(tmp_path / "b"))
    out = capsys.readouterr().out
    assert "12 of 13 tensors differ" in out and "and 2 more that differ less" in out
    assert row_of(out, "w12") and "w3 " in out and "w2 " not in out


# --- paths and costs


@pytest.mark.parametrize("command", ["ls", "verify", "show", "export", "diff"])
def test_commands_reject_other_paths(command: str, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    for name, what in (("nowhere", "does not exist"), ("file", "is no folder"), ("empty", "holds no checkpoints")):
        words = {"export": ["out"], "diff": [tmp_path / name]}.get(command, [])
        code, out, err = answer(capsys, command, tmp_path / name, *words)
        assert code == 2 and not out
        assert repr(str(tmp_path / name)) in err and what in err


def test_checkpoint_without_command(capsys: Any) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["checkpoint"])
    assert ended.value.code == 2
    assert "usage: omnitrain checkpoint" in capsys.readouterr().err


@pytest.mark.processes
def test_only_diff_imports_torch(run: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from omnitrain.cli import main\n"
        "for words in (['ls'], ['verify'], ['show'], ['export', sys.argv[2]]):\n"
        "    assert main(['checkpoint', words[0], sys.argv[1], *words[1:]]) == 0\n"
        "print('torch' in sys.modules)"
    )
    words = [sys.executable, "-c", code, str(run), str(tmp_path / "out")]
    done = programs.run(*words, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "False"


def test_model_file_name(run: Path) -> None:
    assert checkpoint_cli.WEIGHTS == state.WEIGHTS
    assert state.WEIGHTS in json.loads((run / "checkpoint-12" / "omnitrain.json").read_text())["files"]


def test_format_page_describes_every_field(run: Path) -> None:
    page = (ROOT / "docs" / "checkpoint-format.md").read_text(encoding="utf-8").split("## omnitrain.json")[1]
    described = re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)
    assert sorted(described) == sorted(json.loads((run / "checkpoint-12" / "omnitrain.json").read_text()))
