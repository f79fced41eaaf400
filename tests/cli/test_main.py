import contextlib
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import programs
import pytest
from recipes import small_trainer

import omnitrain
from omnitrain import CheckpointError, ConfigError
from omnitrain.cli import demo, main

ROOT = Path(__file__).resolve().parents[2]


def start(*arguments: str, cwd: Path) -> contextlib.AbstractContextManager[subprocess.Popen[str]]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return programs.started(sys.executable, *arguments, cwd=cwd, env=environment, **pipes)


@pytest.mark.parametrize(("words", "expected"), [
    ("dmo x", "there is no command 'dmo'. Did you mean 'demo'?"), ("bananas", "'bananas'. There are demo, train,"),
    ("demo --trainer magic", "'native'"), ("demo --out", "--out"),
    ("demo --data mnist", "--data"), ("demo --train hf", "--train"),
    ("checkpoint", "usage: omnitrain checkpoint"), ("launch", "script"), ("launch -n two train.py", "'two'"),
    ("launch --zero 4 train.py", "invalid choice: 4"), ("launch --fsdp --zero 3 train.py", "not allowed with"),
    ("launch --nproc-per-node 2 train.py", "--nproc-per-node"), ("schedule", "NAME"),
    ("schedule cosine --max-step 9", "--max-step"), ("schedule cosin --epochs 3", "Did you mean 'cosine'?"),
    ("schedule cosine --epochs 3", "Give `steps_per_epoch`"),
    ("schedule cosine min_lr --max-steps 3", "'min_lr' is no option of a schedule. Write it as name=value"),
    ("schedule cosine min_rl=3 --max-steps 3", "Did you mean 'min_lr'?"),
    ("schedule linear --max-duration 2h --warmup 100", "Pass `seconds_per_step`"),
])  # fmt: skip
def test_cli_rejects_wrong_words(words: str, expected: str, capsys: Any) -> None:
    try:
        code = main.main(words.split())
    except SystemExit as end:  # raised by argparse
        code = end.code
    assert code == 2
    assert expected in capsys.readouterr().err


def test_cli_without_words_prints_help(capsys: Any) -> None:
    assert main.main([]) == 0
    printed = capsys.readouterr()
    assert not printed.err
    lines = printed.out.splitlines()
    listed = [line.split()[0] for line in lines[lines.index("train:") :] if line.startswith("  ")]
    assert sorted(listed) == sorted(main._parser()[1]) and all(len(line) <= 120 for line in lines)


@pytest.mark.parametrize(("words", "moved"), [("schedule", "config schedule"), ("show run", "checkpoint record")])
def test_cli_takes_earlier_spellings(words: str, moved: str, capsys: Any) -> None:
    helps = []
    for spelling in (words, moved):
        with pytest.raises(SystemExit, match="0"):
            main.main([*spelling.split(), "--help"])
        helps.append(capsys.readouterr().out)
    assert helps[0] == helps[1] and f"omnitrain {moved}" in helps[0]


def test_cli_help_lists_choices(capsys: Any) -> None:
    with pytest.raises(SystemExit) as exit_:
        main.main(["demo", "--help"])
    assert exit_.value.code == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in (*main.TRAINERS, "runs/demo"))
    assert set(main.TRAINERS.values()) <= set(omnitrain.__all__)


@pytest.mark.processes
def test_cli_imports_torch_only_where_needed(tmp_path: Path) -> None:
    """Nor modules of users: not for help, for errors in files, and for what `checkpoint` reads, except `diff`."""
    done = programs.run(sys.executable, "-m", "omnitrain", "--version", cwd=ROOT)
    assert (done.returncode, done.stdout) == (0, f"omnitrain {omnitrain.__version__}\n")
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
    words = ["demo --help", "train --help", "train a.yaml", "config check a.yaml --trainer.max_steps 3"]
    words += [f"checkpoint {command}" for command in ("ls run", "verify run", "show run", "export run out")]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    done = programs.run(sys.executable, "-c", textwrap.dedent(code), *words, cwd=tmp_path, env=environment)
    assert all(f"{line} False" in done.stdout.splitlines() for line in words), done.stdout + done.stderr
    assert "`epochs` must be" in done.stderr and (tmp_path / "out" / "model.safetensors").exists()


def test_cli_passes_words_to_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(demo, "digits", lambda *args: calls.append(args))
    assert main.main(["demo"]) == 0
    assert main.main(["demo", "--trainer", "native", "--out", "here"]) == 0
    assert calls == [(omnitrain.Trainer, Path("runs/demo")), (omnitrain.Trainer, Path("here"))]


@pytest.mark.parametrize(("error", "code", "message"), [
    (ConfigError("what is wrong"), 2, "omnitrain: what is wrong\n"),
    (CheckpointError("what is damaged"), 1, "omnitrain: CheckpointError: what is damaged\n"),
    (OSError(28, "No space left on device"), 1, "No space left on device"),
    (KeyboardInterrupt(), 130, ""),
    (ZeroDivisionError(), None, ""),  # a bug keeps its traceback
])  # fmt: skip
def test_cli_exit_code_of_errors(error: Any, code: int | None, message: str, monkeypatch: Any, capsys: Any) -> None:
    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(demo, "digits", fail)
    with pytest.raises(ZeroDivisionError) if code is None else contextlib.nullcontext():
        assert main.main(["demo"]) == code
    assert message in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.skipif(sys.platform == "win32", reason="Windows has other signals")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_cli_saves_and_exits_on_signal(number: signal.Signals, code: int, tmp_path: Path) -> None:
    with start("-m", "omnitrain", "demo", cwd=tmp_path) as process:
        assert process.stdout is not None
        lines = iter(process.stdout.readline, "")
        assert any(line.startswith("step ") for line in lines)  # it trains
        process.send_signal(number)
        output, errors = process.communicate(timeout=programs.LIMIT)
    assert process.returncode == code
    assert "Traceback" not in errors
    last = output.splitlines()[-1]  # of a pipe
    assert last.startswith(f"end    {number.name} at step") and "saved in runs/demo/checkpoint-" in last
    assert list((tmp_path / "runs" / "demo").glob("checkpoint-*")), "nothing was saved"


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.skipif(sys.platform == "win32", reason="Windows has other pipes")
def test_cli_survives_closed_pipe(tmp_path: Path) -> None:
    code = "import sys; from omnitrain.cli import demo, main; demo.digits = lambda *_: print('line\\n' * 999_999)"
    with start("-c", f"{code}; sys.exit(main.main(['demo']))", cwd=tmp_path) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        errors = process.stderr.read()
        assert (process.wait(programs.LIMIT), errors) == (1, "")


@pytest.mark.processes
@pytest.mark.skipif(sys.platform == "win32", reason="Windows has other pipes")
@pytest.mark.parametrize("words", ["train --help", "--help", "checkpoint ls --help", "--version"])
def test_help_ends_quietly_if_nobody_reads_it(words: str, tmp_path: Path) -> None:
    code = "import sys; from omnitrain.cli import main; sys.exit(main.main())"
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-c", code, *words.split()]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": ""}
    with os.fdopen(writer) as closed:
        result = subprocess.run(
            command, cwd=tmp_path, env=environment, stdout=closed, stderr=subprocess.PIPE, text=True,
            timeout=programs.LIMIT,
        )  # fmt: skip
    assert (result.returncode, result.stderr) == (1, "")


def test_cli_prints_and_draws_schedule(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    words = "schedule multistep milestones=0.5dur,9ep gamma=0.1 --epochs 10 --steps-per-epoch 20 --warmup 0.1"
    assert main.main([*words.split(), "--rows", "5", "--plot", str(tmp_path / "rate.png")]) == 0
    out = capsys.readouterr().out
    table = [line.split() for line in out.splitlines()[:-1]]
    assert table == [
        ["run", "step", "learning", "rate"], ["0%", "0", "0"], ["25%", "50", "1"], ["50%", "100", "0.1"],
        ["75%", "150", "0.1"], ["100%", "200", "0.01"],
    ]  # fmt: skip
    assert str(tmp_path / "rate.png") in out and (tmp_path / "rate.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("flag", "length"), [("--samples-per-step", "40sp"), ("--tokens-per-step", "40tok"), ("--seconds-per-step", "40s")]
)
def test_cli_schedule_takes_pace_and_rate(flag: str, length: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["schedule", "constant", "--max-duration", length, "--warmup", "4", "--learning-rate", "0.5", "--rows", "9"]
    assert main.main([*words, flag, "5"]) == 0
    rates = [float(line.split()[-1]) for line in capsys.readouterr().out.splitlines()[1:]]
    assert rates == [0, 0.125, 0.25, 0.375, 0.5, 0.5, 0.5, 0.5, 0.5]
