import contextlib
import os
import sys
import textwrap
from pathlib import Path
from typing import Any
from unittest import mock

import programs
import pytest
from recipes import small_trainer

import omnitrain
from omnitrain import CheckpointError, ConfigError
from omnitrain.cli import demo, main


@pytest.mark.parametrize(("words", "expected"), [
    ("dmo x", "there is no command 'dmo'. Did you mean 'demo'?"), ("bananas", "'bananas'. There are demo, train,"),
    ("demo --trainer magic", "'native'"), ("demo --out", "--out"),
    ("demo --data mnist", "--data"), ("demo --train hf", "--train"),
    ("checkpoint", "usage: omnitrain checkpoint"), ("launch", "script"), ("launch -n two train.py", "'two'"),
    ("launch --zero 4 train.py", "invalid choice: 4"), ("launch --fsdp --zero 3 train.py", "not allowed with"),
    ("launch --nproc-per-node 2 train.py", "--nproc-per-node"), ("config schedule", "NAME"),
    ("config schedule cosine --max-step 9", "--max-step"),
    ("config schedule cosin --epochs 3", "Did you mean 'cosine'?"),
    ("config schedule cosine --epochs 3", "Give `steps_per_epoch`"),
    ("config schedule cosine min_lr --max-steps 3", "'min_lr' is no option of a schedule. Write it as name=value"),
    ("config schedule cosine min_rl=3 --max-steps 3", "Did you mean 'min_lr'?"),
    ("config schedule linear --max-duration 2h --warmup 100", "Pass `seconds_per_step`"),
])  # fmt: skip
def test_cli_rejects_wrong_words(words: str, expected: str, capsys: Any) -> None:
    try:
        code = main.main(words.split())
    except SystemExit as end:  # raised by argparse
        code = end.code
    assert code == 2 and expected in capsys.readouterr().err


def test_cli_without_words_prints_help(command: Any) -> None:
    code, out, error = command()
    lines = out.splitlines()
    listed = [line.split()[0] for line in lines[lines.index("train:") :] if line.startswith("  ")]
    assert sorted(listed) == sorted(main._parser()[1]) and all(len(line) <= 120 for line in lines)
    assert (code, error) == (0, "")


@pytest.mark.processes
def test_cli_imports_torch_only_where_needed(tmp_path: Path) -> None:
    """Nor modules of users: not for help, for errors in files, and for what `checkpoint` reads, except `diff`."""
    small_trainer(save_dir=tmp_path / "run").train()
    (tmp_path / "a.yaml").write_text("trainer: {model: named.Net, epochs: x}")
    code = """
        import sys
        from omnitrain.cli.main import main

        for words in sys.argv[1:]:
            try:
                main(words.split())
            except SystemExit:
                pass
            print(words, "torch" in sys.modules or "named" in sys.modules)
    """
    words = ["--version", "demo --help", "train --help", "train a.yaml", "config check a.yaml --trainer.max_steps 3"]
    words += [f"checkpoint {command}" for command in ("ls run", "verify run", "show run", "export run out")]
    environment = programs.launch_environment()
    done = programs.run(sys.executable, "-c", textwrap.dedent(code), *words, cwd=tmp_path, env=environment)
    assert all(f"{line} False" in done.stdout.splitlines() for line in words), done.stdout + done.stderr
    assert done.stdout.startswith(f"omnitrain {omnitrain.__version__}\n")
    assert "`epochs` must be" in done.stderr and (tmp_path / "out" / "model.safetensors").exists()


def test_cli_passes_words_to_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "digits", digits := mock.Mock())
    assert main.main(["demo"]) == main.main(["demo", "--trainer", "native", "--out", "here"]) == 0
    assert digits.call_args_list == [mock.call(omnitrain.Trainer, Path(place)) for place in ("runs/demo", "here")]


@pytest.mark.parametrize(("error", "code", "message"), [
    (ConfigError("what is wrong"), 2, "omnitrain: what is wrong\n"),
    (CheckpointError("what is damaged"), 1, "omnitrain: CheckpointError: what is damaged\n"),
    (OSError(28, "No space left on device"), 1, "No space left on device"),
    (KeyboardInterrupt(), 130, ""),
    (ZeroDivisionError(), None, ""),  # a bug keeps its traceback
])  # fmt: skip
def test_cli_exit_code_of_errors(error: Any, code: int | None, message: str, monkeypatch: Any, command: Any) -> None:
    monkeypatch.setattr(demo, "digits", mock.Mock(side_effect=error))
    with pytest.raises(ZeroDivisionError) if code is None else contextlib.nullcontext():
        end, _, printed = command("demo")
        assert end == code and message in printed


@pytest.mark.processes
@pytest.mark.skipif(sys.platform == "win32", reason="Windows has other pipes")
@pytest.mark.parametrize("words", ["demo", "train --help", "--help", "checkpoint ls --help", "--version"])
def test_cli_ends_quietly_if_nobody_reads_it(words: str, tmp_path: Path) -> None:
    """In the middle of its output, or at its end."""
    code = "import sys; from omnitrain.cli import main"
    if words == "demo":  # which imports torch
        code += ", demo; demo.digits = lambda *_: print('line\\n' * 999_999)"
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-c", f"{code}; sys.exit(main.main())", *words.split()]
    environment = programs.launch_environment(PYTHONUNBUFFERED="")
    with os.fdopen(writer) as closed:
        result = programs.run(*command, cwd=tmp_path, env=environment, stdout=closed)
    assert (result.returncode, result.stderr) == (1, "")


def test_cli_prints_and_draws_schedule(tmp_path: Path, command: Any) -> None:
    words = "multistep milestones=0.5dur,9ep gamma=0.1 --epochs 10 --steps-per-epoch 20 --warmup 0.1 --rows 5"
    code, out, _ = command("config", "schedule", *words.split(), "--plot", picture := tmp_path / "rate.png")
    *table, last = [line.split() for line in out.splitlines()]
    assert code == 0 and table == [
        ["run", "step", "learning", "rate"], ["0%", "0", "0"], ["25%", "50", "1"], ["50%", "100", "0.1"],
        ["75%", "150", "0.1"], ["100%", "200", "0.01"],
    ]  # fmt: skip
    assert str(picture) in " ".join(last) and picture.stat().st_size > 1000


@pytest.mark.parametrize(
    ("flag", "length"), [("--samples-per-step", "40sp"), ("--tokens-per-step", "40tok"), ("--seconds-per-step", "40s")]
)
def test_cli_schedule_takes_pace_and_rate(flag: str, length: str, command: Any) -> None:
    words = f"config schedule constant --max-duration {length} --warmup 4 --learning-rate 0.5 --rows 9 {flag} 5"
    code, out, _ = command(*words.split())
    rates = [float(line.split()[-1]) for line in out.splitlines()[1:]]
    assert code == 0 and rates == [0, 0.125, 0.25, 0.375, 0.5, 0.5, 0.5, 0.5, 0.5]
