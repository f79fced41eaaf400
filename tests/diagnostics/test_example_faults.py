"""State that copies of the examples forget in a resume, and what a drill reports of it."""

import re
import shutil
import sys
from pathlib import Path

import programs
import pytest

FOLDER = Path(__file__).parent
EXAMPLES = FOLDER.parents[1] / "examples"
HEAD = "from __future__ import annotations\n"
IMPORT = {HEAD: f"{HEAD}import faults\n"}
SHORT: dict[str, dict[str, str]] = {
    "native_digits.yaml": {"epochs: 20": "epochs: 2"},
    "hf/text_classification.py": {
        **IMPORT, "num_train_epochs=4": "num_train_epochs=3", "train_batch_size=32": "train_batch_size=16",
        "hidden_size: int = field(default=64": "hidden_size: int = field(default=16", "default=2400": "default=240",
        "eval_samples: int = field(default=600": "eval_samples: int = field(default=48",
        "runs/hf/text_classification": "run",
        'save_strategy="epoch",': 'save_strategy="steps", save_steps=6, eval_strategy="epoch", use_cpu=True,',
    },
    "multi_gpu.py": {
        **IMPORT, "type=int, default=10": "type=int, default=3",
        'type=Path, default=Path("runs/multi_gpu")': 'type=Path, default=Path("run")',
    },
}  # fmt: skip
"""What makes each example short, and gives it the module of the faults."""
LOG, STEPS, TOKENIZER = 'log_steps="1ep",', "log_steps: 50", "        processing_class=tokenizer,\n"
FORGETS = {
    "native_digits.yaml": {STEPS: f"{STEPS}\n  callbacks: [{{class_path: faults.GradientWarmup}}]"},
    "hf/text_classification.py": {TOKENIZER: f"{TOKENIZER}        callbacks=[faults.HeadDecay()],\n"},
    "multi_gpu.py": {LOG: f"{LOG} callbacks=[faults.RankNoise()],"},
}
REPORTS = {
    "native_digits.yaml": [
        r"since step \d+: it has other weights \(same batch, loss, learning rate, random state\)",
        "suspect: callback GradientWarmup: its 'count' is 76 undisturbed",
    ],
    "hf/text_classification.py": [
        r"since step \d+: it has another loss \(same batch, learning rate, random state\)",
        "suspect: TrainerCallback HeadDecay: its 'count' is 45 undisturbed, .* have it inherit .*ExportableState",
    ],
    "multi_gpu.py": [
        r"it has another random state \(.*\), on rank 1", "suspect: callback RankNoise of rank 1: its 'count'",
    ],
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("example", SHORT)
def test_drill_finds_what_an_example_forgets(example: str, tmp_path: Path) -> None:
    """In a configuration, a script of transformers, and on one of two ranks."""
    text, script = (EXAMPLES / example).read_text(encoding="utf-8"), Path(example)
    for old, new in {**SHORT[example], **FORGETS[example]}.items():
        assert text.count(old) == 1, f"{example} has {old!r} {text.count(old)} times"
        text = text.replace(old, new)
    (tmp_path / script.name).write_text(text, encoding="utf-8")
    shutil.copy(FOLDER / "faults.py", tmp_path)
    if script.suffix == ".yaml":  # which names functions of a module
        (tmp_path / "examples").mkdir()
        shutil.copy(EXAMPLES / f"{script.stem}.py", tmp_path / "examples")
    words = ["--kills", "1", "--signals", "kill", *(["-n", "2"] if example == "multi_gpu.py" else [])]
    options = {"OMP_NUM_THREADS": "1", "COLUMNS": "200", "ACCELERATE_USE_CPU": "true", "TMPDIR": str(tmp_path)}
    environment = programs.launch_environment(**options)
    command = [sys.executable, "-m", "omnitrain", "drill", *words, script.name]
    done = programs.run(*command, cwd=tmp_path, env=environment, timeout=900)
    output = " ".join((done.stdout + done.stderr).split())
    assert done.returncode == 1 and "Traceback" not in output, output
    assert all(re.search(pattern, output) for pattern in REPORTS[example]), output
