"""`examples/resume.py`: real SIGKILLs of a real run."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import programs
import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.skipif(not hasattr(os, "fork"), reason="a process that kills itself has another exit code on Windows")
def test_example_resume_ends_with_the_same_weights(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = programs.run(sys.executable, ROOT / "examples" / "resume.py", cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    kills = [line.split(",")[0].strip() for line in done.stdout.splitlines() if "killed after" in line]
    assert kills == [f"killed after step {step}" for step in (23, 67, 110)]
    assert done.stdout.count("equal to the bit") == 2
    assert not list(tmp_path.iterdir())
