"""Run every script of `examples`, several at a time, each in a process of its own.

The processes are forked from one that has imported the libraries, which takes longer than most scripts.

    python .ci/examples.py [WORKERS]
"""

from __future__ import annotations

import os
import runpy
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parent.parent
LIMIT_S = 600.0
LONGEST = ("killed_and_moved.py", "character_model.py")
"""They begin first, so that all workers end together."""
ARGUMENTS = {"hf": ["--num_train_epochs", "1"]}
"""What the scripts of a folder are given: more epochs run no other line."""


def run(script: Path, output: IO[bytes]) -> None:
    """Run a script as `python SCRIPT` does, with its output in a file; this ends the process."""
    for descriptor in (1, 2):
        os.dup2(output.fileno(), descriptor)
    sys.argv, sys.path[0], code = [str(script), *ARGUMENTS.get(script.parent.name, [])], str(script.parent), 0
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main(workers: int) -> int:
    """Run all scripts, print what each has written and how long it took, and return how many failed."""
    import accelerate  # noqa: F401
    import sklearn.datasets  # noqa: F401
    import torch
    import transformers.trainer  # noqa: F401

    torch.set_num_threads(1)
    scripts = [*ROOT.glob("examples/*.py"), *ROOT.glob("examples/hf/*.py")]
    waiting = sorted(scripts, key=lambda script: (script.name not in LONGEST, script))
    running: dict[int, tuple[Path, IO[bytes], float]] = {}
    failed = 0
    while waiting or running:
        while waiting and len(running) < workers:
            script, output = waiting.pop(0), tempfile.TemporaryFile()  # noqa: SIM115
            sys.stdout.flush()
            child = os.fork()
            if not child:
                run(script, output)
            running[child] = script, output, time.monotonic()
        child, status = os.waitpid(-1, os.WNOHANG)
        for overdue in [pid for pid, (_, _, start) in running.items() if time.monotonic() - start > LIMIT_S]:
            os.kill(overdue, 9)
        if not child:
            time.sleep(0.05)
            continue
        script, output, start = running.pop(child)
        output.seek(0)
        code = os.waitstatus_to_exitcode(status)
        failed += code != 0
        seconds, ending = time.monotonic() - start, f", exit code {code}" if code else ""
        print(f"== {script.relative_to(ROOT)} ({seconds:.0f} s{ending})")
        print(output.read().decode(errors="replace"), flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 2))
