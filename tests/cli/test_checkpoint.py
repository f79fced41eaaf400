"""`omnitrain checkpoint`: what it answers about real checkpoints, complete and damaged ones."""

import functools
import importlib.metadata
import itertools
import json
import os
import platform
import re
import shutil
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from forging import content_of, shard, spoil
from recipes import assert_equal, rows, small_trainer, trainer_on_cpu
from rich import filesize
from safetensors.torch import load_file, save_file
from stores import save_files
from tiny import Tokens, gpt

from omnitrain import Trainer, __version__
from omnitrain.checkpoint import sharded_files
from omnitrain.checkpoint.store import Store

ROOT = Path(__file__).resolve().parents[2]


RUN: dict[str, Any] = {"epochs": 3, "learning_rate": 0.05, "eval_dataset": rows(8)}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "[a]"  # brackets mean something to rich
    small_trainer(save_dir=folder, **RUN).train()
    return folder


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A run of three checkpoints, at steps 4, 8 and 12, that a test may spoil."""
    return shutil.copytree(trained, tmp_path / "[a]")


@pytest.fixture
def checkpoint(command: Any) -> Any:
    return functools.partial(command, "checkpoint")


def flip(path: Path) -> None:
    spoil(path, "flip", path.stat().st_size - 1)


def assert_same_tensors(actual: Path, expected: Path) -> None:
    assert_equal(*(load_file(folder / "model.safetensors") for folder in (actual, expected)))


def assert_rows(out: str, rows: dict[str, list[str]]) -> None:
    assert {name: row_of(out, name)[1:] for name in rows} == rows


def row_of(out: str, name: str) -> list[str]:
    """The cells of the row that begins with `name`; cells are two spaces apart."""
    line = next(line for line in out.splitlines() if line.split("  ")[0] == name)
    return [cell.strip() for cell in line.split("  ") if cell.strip()]


def test_ls_has_row_per_checkpoint(run: Path, checkpoint: Any) -> None:
    store, folder = Store(run), run / "checkpoint-8"
    code, out, _ = checkpoint("ls", run)
    assert code == 0 and "score: loss, lower is better" in out
    lines = out.splitlines()[1:4]
    steps = [["checkpoint-4", "4", "1"], ["checkpoint-8", "8", "2"], ["checkpoint-12", "12", "3"]]
    assert [line.split()[:3] for line in lines] == steps
    cells = row_of(out, "checkpoint-8")
    assert cells[3] == f"{store.verify(folder)['score']:.6g}" and cells[-3] == filesize.decimal(size_of(folder))
    assert cells[-2].startswith("20") and cells[-1] == "complete"
    for pointer in ("last", "best"):
        target, _ = store.resolve(pointer)  # type: ignore[misc]
        assert [line.split()[0] for line in lines if pointer in line] == [target.name]
    out = checkpoint("ls", folder)[1]
    assert [line.split()[0] for line in out.splitlines() if line.startswith("checkpoint-")] == ["checkpoint-8"]


def size_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def test_damaged_checkpoints_are_marked_and_rejected(run: Path, tmp_path: Path, checkpoint: Any) -> None:
    flip(run / "checkpoint-12" / "model.safetensors")
    code, out, err = checkpoint("show", run)
    assert code == 1 and not out and "'model.safetensors'" in err and "checkpoint-8" in err
    assert checkpoint("export", run, tmp_path / "out")[0] == 1 and not (tmp_path / "out").exists()
    spoil(run / "checkpoint-8" / "model.safetensors", "truncate", -1)
    (run / "checkpoint-12" / "omnitrain.json").unlink()
    code, out, _ = checkpoint("ls", run)
    assert code == 0 and "'model.safetensors' has" in out and row_of(out, "checkpoint-12")[1] == "12"
    states = [row_of(out, f"checkpoint-{name}")[-1] for name in (4, 8, 12)]
    assert states == ["complete", "damaged", "damaged"]


def test_show_prints_settings_versions_and_tensors(run: Path, checkpoint: Any) -> None:
    folder = run / "checkpoint-8"
    code, out, _ = checkpoint("show", folder)
    assert code == 0 and "model.safetensors: 4 tensors" in out
    versions = {"torch": [importlib.metadata.version("torch")], "python": [platform.python_version()]}
    settings = {"step": ["8"], "metric": ["loss"], "learning_rate": ["0.05"], "world_size": ["1"]}
    tensors = {"0.weight": ["F64", "[16, 4]"], "3.bias/exp_avg": ["F64", "[1]"]}
    assert_rows(out, {**settings, **versions, "omnitrain": [__version__], **tensors})
    shown = json.loads(checkpoint("show", "--json", folder)[1])
    assert shown["step"] == shown["progress"]["step"] == 8 and shown["bytes"] == size_of(folder)
    assert shown["settings"]["batch_size"] and shown["objective"]["metric"] == "loss" and shown["record"]["command"]
    shapes = {name: entry["shape"] for name, entry in shown["tensors"]["model.safetensors"].items()}
    assert shapes == {name: [*tensor.shape] for name, tensor in load_file(folder / "model.safetensors").items()}


def test_ls_without_evaluations(tmp_path: Path, checkpoint: Any) -> None:
    small_trainer(save_dir=tmp_path, epochs=1).train()
    code, out, _ = checkpoint("ls", tmp_path)
    assert code == 0 and row_of(out, "checkpoint-4")[3:5] == ["-", "last"]
    assert checkpoint("show", tmp_path / "best")[0] == 1


def test_pipes_and_terminals_get_fitting_tables(run: Path, checkpoint: Any, monkeypatch: Any) -> None:
    plain = checkpoint("show", run)[1]
    monkeypatch.setenv("FORCE_COLOR", "1")  # as Jupyter's kernels and many CI systems do
    assert checkpoint("show", run)[1] == plain and plain.isascii() and "\x1b" not in plain
    assert all(line == line.rstrip() for line in plain.splitlines())
    options = next(line for line in plain.splitlines() if line.startswith("optimizer_groups"))
    assert options.endswith("}]") and len(options) > 120
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "90")
    header, rule, *_ = checkpoint("ls", run)[1].splitlines()
    assert "\x1b[1m" in header and set(rule) == {"─"} and len(rule) <= 90
    monkeypatch.setenv("COLUMNS", "40")  # a narrow one loses nothing
    out = checkpoint("ls", run)[1]
    assert all(word in out for word in ("checkpoint-8", " 8 ", " kB ", "complete"))


def test_verify_reports_flipped_bit_and_missing_file(run: Path, checkpoint: Any) -> None:
    code, out, _ = checkpoint("verify", run)
    assert code == 0 and out.splitlines()[-1] == "3 of 3 complete."
    for file in ("model.safetensors", "optimizer/state.safetensors", "rng/state.safetensors", "omnitrain.json"):
        flip(run / "checkpoint-8" / file)
        code, out, _ = checkpoint("verify", run)
        (damaged,) = [line for line in out.splitlines() if line.startswith("damaged")]
        assert code == 1 and "checkpoint-8" in damaged and repr(file) in damaged
        assert out.splitlines()[-1] == "2 of 3 complete."
        hidden = (run / "checkpoint-8" / file).rename(run / "hidden")
        code, out, _ = checkpoint("verify", run / "checkpoint-8")
        assert code == 1 and f"{file!r} is missing" in out and "0 of 1 complete." in out
        flip(hidden.rename(run / "checkpoint-8" / file))
    assert checkpoint("verify", run)[0] == 0


def test_show_and_ls_print_the_date_of_the_save(run: Path, checkpoint: Any) -> None:
    store, folder = Store(run), run / "checkpoint-8"
    date = datetime.fromisoformat(content_of(folder)["saved_at"]).astimezone().strftime("%Y-%m-%d %H:%M")
    os.utime(folder / "omnitrain.json", (0, 0))  # as in a copy
    assert f", saved {date}, " in checkpoint("show", folder)[1]
    save_files(store, 99, lambda folder: (folder / "a").touch())  # without a date, as earlier versions did
    os.utime(store.path(99) / "omnitrain.json", (1e9, 1e9))
    out = checkpoint("ls", run)[1]
    assert row_of(out, folder.name)[-2] == date and row_of(out, "checkpoint-99")[-2].startswith("2001-09-0")


def test_show_takes_runs_pointers_and_relative_paths(run: Path, checkpoint: Any, monkeypatch: Any) -> None:
    for name in ("last", "best"):
        folder, _ = Store(run).resolve(name)  # type: ignore[misc]
        assert checkpoint("show", run / name)[1].startswith(f"{folder}:")
    assert checkpoint("show", run)[1].startswith(f"{run / 'checkpoint-12'}:")
    monkeypatch.chdir(run / "checkpoint-8")
    assert checkpoint("show", ".")[1].startswith(f"{run / 'checkpoint-8'}:")
    assert "3 of 3 complete." in checkpoint("verify", "..")[1]


@pytest.mark.parametrize("limit", [None, 2000], ids=["unsharded", "several files"])
def test_export_opens_with_from_pretrained(
    limit: int | None, tmp_path: Path, checkpoint: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tiny model of transformers whose output layer is tied to its embedding."""
    run, out, model = tmp_path / "run", tmp_path / "new" / "out", gpt()
    trainer_on_cpu(Trainer, model, Tokens(8), epochs=1, batch_size=8, save_dir=run).train()
    if limit is not None:
        shard(next(run.glob("checkpoint-*")))
        assert sharded_files.write_full_files.__defaults__ == (sharded_files.LARGEST_FILE,)
        monkeypatch.setattr(sharded_files.write_full_files, "__defaults__", (limit,))
    code, _, error = checkpoint("export", run, out)
    loaded, info = type(model).from_pretrained(out, output_loading_info=True)
    assert (code, error) == (0, "") and not any(info.values())
    assert_equal(loaded.state_dict(), model.state_dict())
    assert (out / "model.safetensors").exists() == (limit is None)


def test_commands_take_sharded_checkpoint(run: Path, tmp_path: Path, checkpoint: Any) -> None:
    unsharded = shutil.copytree(run, tmp_path / "unsharded")
    shard(run / "checkpoint-8")
    assert checkpoint("verify", run)[0] == 0
    out, expected = (checkpoint("show", folder / "checkpoint-8")[1] for folder in (run, unsharded))
    lines = [line for line in expected.splitlines() if re.search(r" [FI]\d+ +\[", line)]
    assert lines and all(re.sub(" +", " ", line) in re.sub(" +", " ", out) for line in lines)
    assert "model: " in out and "rank-" not in out
    assert checkpoint("export", run / "checkpoint-8", tmp_path / "out")[0] == 0
    assert_same_tensors(tmp_path / "out", unsharded / "checkpoint-8")  # in one file
    assert "0 of 4 tensors differ" in checkpoint("diff", run / "checkpoint-8", unsharded / "checkpoint-8")[1]
    flip(run / "checkpoint-8" / "model" / "rank-00001.safetensors")
    code, out, _ = checkpoint("verify", run / "checkpoint-8")
    assert code == 1 and "model/rank-00001.safetensors" in out


def test_export_fills_empty_folders_only(run: Path, tmp_path: Path, checkpoint: Any, monkeypatch: Any) -> None:
    """And leaves nothing after a failure."""

    def fill(source: Path, target: Path) -> None:
        target.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    out = tmp_path / "out"
    out.mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copyfile", fill)
        code, _, err = checkpoint("export", run, out)
    assert code == 1 and "No space left" in err and not list(out.iterdir())
    assert checkpoint("export", run / "checkpoint-4", out)[0] == 0
    assert [path.name for path in out.iterdir()] == ["model.safetensors"]
    assert_same_tensors(run / "checkpoint-4", out)
    (tmp_path / "mine").write_text("mine")
    for target in (tmp_path, tmp_path / "mine"):
        code, _, err = checkpoint("export", run, target)
        assert code == 2 and "not overwritten" in err
    assert {path.name for path in tmp_path.iterdir()} == {"mine", "out", run.name}


def test_diff_lists_changed_settings(run: Path, tmp_path: Path, checkpoint: Any) -> None:
    changes = {"weight_decay": 0.1, "max_grad_norm": None, "test_dataset": {"dev": rows(4)}}
    small_trainer(save_dir=tmp_path / "b", **RUN, **changes).train()
    code, out, _ = checkpoint("diff", run, tmp_path / "b")
    assert code == 0 and not any(line.startswith("learning_rate") for line in out.splitlines())
    assert_rows(out, {
        "weight_decay": ["0.0", "0.1"], "optimizer_groups.0.weight_decay": ["0.0", "0.1"],
        "max_grad_norm": ["1.0", "null"], "test_dataset": ["null", "(absent)"],
        "test_dataset.dev": ["(absent)", "torch.utils.data.dataset.TensorDataset"],
    })  # fmt: skip
    out = checkpoint("diff", run, run / "last")[1]
    assert "0 settings differ" in out and "0 of 4 tensors differ" in out


NAN, INF = float("nan"), float("inf")

DTYPES: list[tuple[torch.Tensor, torch.Tensor, str]] = [
    (torch.tensor([1.0, NAN]), torch.tensor([1.0, NAN]), ""),
    (torch.tensor([INF]), torch.tensor([INF]), ""),
    (torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int32), ""),
    (torch.empty(0), torch.empty(0), ""),
    (torch.tensor([INF]), torch.tensor([-INF]), "inf"),
    (torch.tensor([2**60 + 1]), torch.tensor([2**60]), "1"),
    (torch.tensor([2**63 - 1]), torch.tensor([-(2**63)]), f"{2.0**64:.6g}"),
    (torch.tensor([0, 200], dtype=torch.uint8), torch.tensor([250, 0], dtype=torch.uint8), "250"),
    (torch.tensor([-100], dtype=torch.int8), torch.tensor([100], dtype=torch.int8), "200"),
    (torch.tensor([2**64 - 1], dtype=torch.uint64), torch.tensor([0], dtype=torch.uint64), f"{2.0**64:.6g}"),
    (torch.tensor([-1], dtype=torch.int32), torch.tensor([True]), "2"),
    (torch.tensor([1.0], dtype=torch.bfloat16), torch.tensor([1.5]), "0.5"),
    (torch.tensor([3 + 4j]), torch.tensor([0j]), "5"),
]


@pytest.fixture
def diff(checkpoint: Any, tmp_path: Path) -> Any:
    """Save the weights as checkpoints, and return what `diff` prints about them."""

    def run(**checkpoints: dict[str, torch.Tensor]) -> str:
        for name, tensors in checkpoints.items():
            save_files(Store(tmp_path / name), 1, lambda path, x=tensors: save_file(x, path / "model.safetensors"))
        return checkpoint("diff", *(tmp_path / name for name in checkpoints))[1]

    return run


def test_diff_of_every_dtype(diff: Any) -> None:
    a, b = ({f"w{number}": case[side] for number, case in enumerate(DTYPES)} for side in (0, 1))
    out = diff(a=a, b=b)
    assert f"9 of {len(DTYPES)} tensors differ" in out
    for number, (*_, difference) in enumerate(DTYPES):
        assert not difference or row_of(out, f"w{number}")[-1] == difference


MARKUP = "[red]layers[0]:smile:"


@pytest.mark.parametrize(("a", "b", "fragments"), [
    ({"w": torch.zeros(2, 3)}, {"w": torch.zeros(3, 3)}, ["w: shape [2, 3] in A, [3, 3] in B"]),
    ({"old": torch.zeros(1)}, {"new": torch.zeros(1)}, ["only in A: old", "only in B: new"]),
    ({MARKUP: torch.zeros(1)}, {MARKUP: torch.ones(1)}, [f"\n{MARKUP} [1] 1\n"]),
    (
        {name: torch.zeros(2) for name in "abc"},
        {"a": torch.ones(2), "b": torch.tensor([0.0, NAN]), "c": torch.full((2,), INF)},
        ["\nb ", "\nc ", "\na "],
    ),
    (
        {f"w{i}": torch.zeros(1) for i in range(13)},
        {f"w{i}": torch.full((1,), float(i)) for i in range(13)},
        ["12 of 13 tensors differ", *(f"\nw{i} " for i in range(12, 2, -1)), "and 2 more that differ less"],
    ),
], ids=["shapes", "names", "markup", "nan first", "many"])  # fmt: skip
def test_diff_prints_in_order(a: Any, b: Any, fragments: list[str], diff: Any) -> None:
    out = re.sub(" +", " ", diff(a=a, b=b))
    positions = [out.find(fragment) for fragment in fragments]
    assert -1 not in positions and positions == sorted(positions), out
    assert "\nw2 " not in out


def test_commands_reject_other_paths(tmp_path: Path, checkpoint: Any) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    messages = {"nowhere": "does not exist", "file": "is no folder", "empty": "holds no checkpoints"}
    for command, name in itertools.product(["ls", "verify", "show", "export", "diff"], messages):
        words = {"export": ["out"], "diff": [tmp_path / name]}.get(command, [])
        code, out, err = checkpoint(command, tmp_path / name, *words)
        assert code == 2 and not out and repr(str(tmp_path / name)) in err and messages[name] in err, command


def test_format_page_describes_every_field(run: Path) -> None:
    page = (ROOT / "docs" / "checkpoint-format.md").read_text(encoding="utf-8").split("## omnitrain.json")[1]
    names = re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)
    assert sorted(names) == sorted([*content_of(run / "checkpoint-12"), "parts"])
