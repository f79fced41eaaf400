"""All that can be tested and measured on one GPU, in one report: `tests/gpu`, then the throughput of the trainers.

    python benchmarks/gpu.py [--out DIR] [--minutes 9] [--only tests throughput] [--compile] [--quick]

Writes gpu.json and gpu.md into the folder, again after each part, so that an end before its time leaves what was found
until then. What crashes or hangs is named, and costs only itself. The exit code is 1 if something failed, and 0 if
everything that could run passed; on a machine without a GPU that is nothing, and the report says what was skipped.

Nothing here imports torch: whatever uses the GPU runs in a process of its own.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from _report import show_throughput, table

ROOT = Path(__file__).resolve().parent.parent
HERE = Path(__file__).resolve().parent
TESTS = ROOT / "tests" / "gpu"
PACKAGES = ("torch", "accelerate", "transformers", "deepspeed", "triton", "numpy", "safetensors")
NEEDED = ("torch", "pytest", "hypothesis", "accelerate", "safetensors", "sklearn", "rich")
"""What the tests cannot do without."""

LONGEST_TEST = 120.0
"""Seconds after which a test counts as hung."""
POISON = ("CUDA error", "device-side assert", "AcceleratorError", "CUBLAS_STATUS", "an illegal memory access")
"""What a failure says after which the GPU is of no more use to its process."""


# --- what is run


@dataclass(slots=True)
class Group:
    """Test files that run in one process.

    Attributes:
        seconds: What they are to have at least; what those before them have left comes on top.
    """

    name: str
    files: list[str]
    seconds: float


GROUPS = [
    Group("steps", ["test_loop_gpu", "test_accelerated_gpu", "test_precision_gpu", "test_watching_gpu"], 110),
    Group(
        "memory and checkpoints",
        ["test_memory_gpu", "test_checkpoints_gpu", "test_hf_gpu", "test_diagnostics_gpu"],
        120,
    ),
    Group("compiled models", ["test_compile_gpu"], 60),
    Group("sharding", ["test_sharding_gpu"], 120),
]
"""The most important first. Files that are not named here come last."""
BEFORE_THROUGHPUT = 2
"""Groups of tests that come before the throughput."""
THROUGHPUT = 130.0
COMPILED = 240.0
"""Seconds that the throughput of plain and of compiled models is to have at least."""


@dataclass(slots=True)
class Test:
    """A test, and what came of it: passed, failed, skipped, crashed, hung or not run."""

    name: str
    status: str
    seconds: float = 0.0
    text: str = ""


@dataclass(slots=True)
class Part:
    """A part of the report.

    Attributes:
        kind: "tests" or "throughput".
        status: passed, failed, skipped, running or not run.
        reason: Why, where the tests do not say so.
        found: What `throughput.py` found.
    """

    name: str
    kind: str
    status: str = "not run"
    reason: str = ""
    seconds: float = 0.0
    tests: list[Test] = field(default_factory=list)
    found: dict[str, Any] | None = None


BAD = ("failed", "crashed", "hung")


def status_of(tests: Sequence[Test]) -> str:
    """Return what came of several tests together."""
    statuses = {test.status for test in tests}
    if statuses & set(BAD):
        return "failed"
    return next((status for status in ("passed", "not run", "skipped") if status in statuses), "skipped")


# --- processes


@contextmanager
def process(command: Sequence[str], log: Path, cwd: Path = ROOT, **variables: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process that leaves nothing behind: those that it has started end with it."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", **variables}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    with log.open("ab") as file:
        child = subprocess.Popen(
            command, cwd=cwd, env=environment, stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
        try:
            yield child
        finally:
            end(child)


def end(child: subprocess.Popen[bytes]) -> None:
    """End a process and those that it has started."""
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def tail_of(log: Path, size: int = 2000) -> str:
    """Return the end of what a process has printed; of a crash what Python says of it, which begins with the place."""
    text = log.read_text(errors="replace") if log.exists() else ""
    crash = text.rfind("Fatal Python error")
    return text[-size:] if crash < 0 else text[max(crash - size // 2, 0) : crash + size]


def ended_by(code: int | None) -> str:
    """Return how a process ended, in words."""
    if code is None:
        return "it was ended"
    if code >= 0:
        return f"exit code {code}"
    return f"signal {signal.Signals(-code).name}"


# --- the machine

FACTS = """
import json, platform, torch
found = {"cuda": torch.version.cuda, "gpu": None}
if torch.cuda.is_available():
    properties = torch.cuda.get_device_properties(0)
    capability = f"{properties.major}.{properties.minor}"
    found |= {
        "gpu": properties.name, "memory": properties.total_memory, "capability": capability,
        "gpus": torch.cuda.device_count(), "cudnn": torch.backends.cudnn.version(),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
    }
print("FACTS" + json.dumps(found))
"""


def said_by(*command: str, limit: float = 30.0) -> str:
    """Return what a command prints; nothing if there is no such command, or it fails."""
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=limit)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def facts() -> dict[str, Any]:
    """Return what the results depend on; `gpu` is None without one, and `error` says what went wrong with PyTorch."""
    report: dict[str, Any] = {"gpu": None}
    if find_spec("torch") is None:
        report["error"] = "torch is not installed"
    else:
        output = said_by(sys.executable, "-c", FACTS, limit=120.0)
        if "FACTS" in output:
            report |= json.loads(output.partition("FACTS")[2].splitlines()[0])
        else:
            report["error"] = "importing torch and looking for a GPU failed"
    report["driver"] = said_by("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").partition("\n")[0]
    report["versions"] = {name: _version(name) for name in PACKAGES}
    changed = said_by("git", "status", "--porcelain", "--untracked-files=no")
    report |= {
        "python": platform.python_version(),
        "system": platform.platform(),
        "cpu": _processor(),
        "cores": os.cpu_count(),
        "commit": said_by("git", "rev-parse", "--short", "HEAD") + (" and changes" if changed else ""),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
    return report


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


# --- tests


def run_tests(
    files: Sequence[Path],
    seconds: float,
    *options: str,
    root: Path = ROOT,
    longest: float = LONGEST_TEST,
    tell: Callable[[list[Test]], None] = lambda tests: None,
) -> tuple[list[Test], str]:
    """Run test files, and return their tests and, if these could not all be told, why.

    A crash, a hang and an error that leaves the GPU of no use end the process; the tests that are left go on in
    another one.

    Args:
        files: The files.
        seconds: For all of them; tests for which no time is left are "not run".
        options: More words for pytest.
        root: Where the names of the tests begin.
        longest: Seconds after which a test counts as hung.
        tell: Called with what has come of the tests so far, from time to time.
    """
    deadline = time.monotonic() + seconds
    done: dict[str, Test] = {}
    names: list[str] | None = None
    why, ended = "", ""
    with tempfile.TemporaryDirectory() as scratch:
        for attempt in range(100):
            lines, log = Path(scratch, f"{attempt}.jsonl"), Path(scratch, f"{attempt}.log")
            targets = [*map(str, files)] if names is None else [name for name in names if name not in done]
            command = [
                sys.executable, "-m", "pytest", "-p", "_pytest_lines", "--lines", str(lines), "-q", "--tb=short",
                "--continue-on-collection-errors", "-p", "no:cacheprovider", "--rootdir", str(root),
                "-o", "addopts=--import-mode=importlib", *options, *targets,
            ]  # fmt: skip
            before = len(done)
            with process(command, log, root, PYTHONFAULTHANDLER="1") as child:
                collected, code = _watch(child, lines, log, done, deadline, longest, tell)
            names = names if names is not None else collected
            ended = f"{ended_by(code)}: {tail_of(log)}"
            if code in (3, 4):  # an error of pytest's own, or of how it was called
                why = f"pytest could not do its work: {ended}"
                break
            if names is None or all(name in done for name in names) or time.monotonic() >= deadline:
                break
            if len(done) == before:
                why = f"some tests could not be run: {ended}"
                break
    if names is None:
        return [*done.values()], f"the tests could not be found: {ended}"
    not_run = [Test(name, "not run", text="out of time") for name in names if name not in done]
    return [*done.values(), *not_run], why


def _watch(
    child: subprocess.Popen[bytes],
    lines: Path,
    log: Path,
    done: dict[str, Test],
    deadline: float,
    longest: float,
    tell: Callable[[list[Test]], None],
) -> tuple[list[str] | None, int | None]:
    """Read what a run of pytest writes until it ends or has to be ended; return its tests' names and its exit code."""
    names: list[str] | None = None
    running, since, position = "", 0.0, 0
    while True:
        code = child.poll()
        text = lines.read_bytes()[position:] if lines.exists() else b""
        whole = text[: text.rfind(b"\n") + 1]
        position += len(whole)
        for line in map(json.loads, whole.splitlines()):
            if "collected" in line:
                names = line["collected"]
            elif "started" in line:
                running, since = line["started"], time.monotonic()
            else:
                running = ""
                done[line["ended"]] = Test(line["ended"], line["status"], line["seconds"], line["text"])
                if line["status"] == "failed" and any(word in line["text"] for word in POISON):
                    return names, code
        clock = time.monotonic()
        if whole:
            tell([*done.values()])
        if code is not None and running:
            done[running] = Test(running, "crashed", clock - since, f"{ended_by(code)}\n{tail_of(log)}")
        elif code is None and running and clock - since > longest:
            why = f"it had not ended after {longest:.0f} s"
            done[running] = Test(running, "hung", clock - since, f"{why}\n{tail_of(log)}")
            return names, code
        if code is not None or clock >= deadline:
            return names, code
        time.sleep(0.1)


def files_of(group: Group) -> list[Path]:
    """Return the files of a group."""
    return [TESTS / f"{name}.py" for name in group.files]


def all_groups() -> list[Group]:
    """Return the groups, and one of the files that none of them names."""
    names = {name for group in GROUPS for name in group.files}
    rest = [path.stem for path in sorted(TESTS.glob("test_*.py")) if path.stem not in names]
    return [*GROUPS, *([Group("others", rest, 120)] if rest else [])]


# --- the throughput


def run_throughput(part: Part, seconds: float, *words: str) -> None:
    """Run `throughput.py`, and note what it found, also where it did not come to its end."""
    with tempfile.TemporaryDirectory() as scratch:
        written, log = Path(scratch, "throughput.json"), Path(scratch, "log")
        inner = max(seconds - 30.0, 10.0)  # to start, and for a round that takes longer than the one before
        command = [
            sys.executable, str(HERE / "throughput.py"), "--json", str(written), "--seconds", f"{inner:.0f}", *words,
        ]  # fmt: skip
        with process(command, log) as child:
            try:
                code: int | None = child.wait(timeout=seconds)
            except subprocess.TimeoutExpired:
                code = None
        if written.exists():
            part.found = json.loads(written.read_text())
        bad = [row for row in (part.found or {"rows": []})["rows"] if row["status"] in ("failed", "not comparable")]
        if code == 0 or (code is None and part.found is not None and not bad):
            part.status = "passed"
            part.reason = "" if code == 0 else f"ended after {seconds:.0f} s, before its last round was over"
        elif code is None and part.found is None:
            part.status, part.reason = "not run", f"out of time: it had measured nothing after {seconds:.0f} s"
        else:
            part.status = "failed"
            part.reason = f"{ended_by(code)}: {tail_of(log)}" if not bad else "see its rows"


# --- the report


class Report:
    """Everything that was found, written whenever something is new."""

    def __init__(self, out: Path, minutes: float) -> None:
        self.out, self.minutes = out, minutes
        self.about: dict[str, Any] = {"gpu": None}
        self.parts: list[Part] = []
        self.is_complete = False
        self._started = time.monotonic()
        out.mkdir(parents=True, exist_ok=True)

    @property
    def seconds(self) -> float:
        """Since it began."""
        return time.monotonic() - self._started

    @property
    def left(self) -> float:
        """Seconds that are left of all that there were."""
        return self.minutes * 60 - self.seconds

    @property
    def failed(self) -> bool:
        """Whether anything did."""
        return any(part.status == "failed" for part in self.parts)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON types."""
        return {
            "about": self.about,
            "seconds": round(self.seconds, 1),
            "minutes": self.minutes,
            "is_complete": self.is_complete,
            "failed": self.failed,
            "parts": [asdict(part) for part in self.parts],
        }

    def write(self) -> None:
        """Write both files, each at once."""
        content = {"gpu.json": json.dumps(self.to_dict(), indent=2) + "\n", "gpu.md": self.markdown()}
        for name, text in content.items():
            part = self.out / f"{name}.part"
            part.write_text(text, encoding="utf-8")
            part.replace(self.out / name)

    def markdown(self) -> str:
        """Return the report for people."""
        return "\n".join([*self._head(), *self._summary(), *self._throughput(), *self._bad(), *self._tests()]) + "\n"

    def _head(self) -> list[str]:
        about = self.about
        lines = [f"# {about['gpu'] or 'No GPU'}", ""]
        if about["gpu"]:
            gpus = f", 1 of {about['gpus']}" if about["gpus"] > 1 else ""
            lines.append(
                f"{about['memory'] / 2**30:.0f} GiB, compute capability {about['capability']}{gpus}, driver "
                f"{about['driver'] or 'unknown'}, CUDA {about['cuda']}, NCCL {about['nccl']}."
            )
        elif about.get("error"):
            lines.append(f"{about['error']}.")
        installed = [f"{name} {value}" for name, value in about["versions"].items() if value]
        missing = [name for name, value in about["versions"].items() if not value]
        lines += [
            f"{about['cpu']}, {about['cores']} cores. Python {about['python']}, {', '.join(installed)}"
            f"{'; not installed: ' + ', '.join(missing) if missing else ''}.",
            f"Commit {about['commit'] or 'unknown'}, {about['date']}, "
            f"{self.seconds:.0f} s{'' if self.is_complete else ' so far'}.",
            "",
        ]
        return lines

    def _summary(self) -> list[str]:
        rows = []
        for part in self.parts:
            counts = Counter(test.status for test in part.tests)
            bad = sum(counts[status] for status in BAD)
            cells = [str(counts["passed"]), str(bad), str(counts["skipped"]), str(counts["not run"])]
            cells = cells if part.kind == "tests" else [""] * 4
            rows.append([part.name, part.status, *cells, f"{part.seconds:.0f}", part.reason.partition("\n")[0][:200]])
        head = ["part", "result", "passed", "failed", "skipped", "not run", "s", ""]
        reasons = Counter(test.text for part in self.parts for test in part.tests if test.status == "skipped")
        listed = [f"* {count} x {reason}" for reason, count in reasons.most_common()]
        return [*table(head, rows, (2, 3, 4, 5, 6)), "", *(["Skipped:", "", *listed, ""] if listed else [])]

    def _throughput(self) -> list[str]:
        lines: list[str] = []
        for part in self.parts:
            if part.found is not None:
                lines += [f"## {part.name[0].upper()}{part.name[1:]}", "", *show_throughput(part.found), ""]
        return lines

    def _bad(self) -> list[str]:
        lines: list[str] = []
        for part in self.parts:
            for test in part.tests:
                if test.status in BAD:
                    name = test.name.removeprefix("tests/gpu/")
                    lines += [f"### {test.status}: {name}", "", "```text", test.text.strip()[-2500:], "```", ""]
            if part.status == "failed" and "\n" in part.reason:
                lines += [f"### failed: {part.name}", "", "```text", part.reason.strip()[-2500:], "```", ""]
        return ["## What failed", "", *lines] if lines else []

    def _tests(self) -> list[str]:
        rows = [
            [test.name.removeprefix("tests/gpu/"), test.status, f"{test.seconds:.1f}"]
            for part in self.parts
            for test in part.tests
        ]
        return ["## Tests", "", *table(["test", "result", "s"], rows, (2,))] if rows else []


# --- all of it


@dataclass(slots=True)
class Step:
    """A part that is to come.

    Attributes:
        seconds: What it is to have at least.
        run: Fills the part, in so many seconds.
    """

    part: Part
    seconds: float
    run: Callable[[Part, float], None]


def run_group(report: Report, group: Group, part: Part, seconds: float) -> None:
    """Run a group of tests as a part of the report."""
    lacking = [name for name in NEEDED if find_spec(name) is None]
    if lacking:
        part.status, part.reason = "skipped", f"not installed: {', '.join(lacking)}"
        return

    def tell(tests: list[Test]) -> None:
        part.tests = tests
        report.write()

    part.tests, part.reason = run_tests(files_of(group), seconds, "-m", "gpu", tell=tell)
    part.status = "failed" if part.reason else status_of(part.tests)
    if part.status == "skipped" and report.about["gpu"] is None:
        part.reason = "no GPU"


def steps_of(report: Report, only: Sequence[str], quick: bool, compiles: bool) -> list[Step]:
    """Return what is to be done, the most important first."""
    has_gpu = report.about["gpu"] is not None
    groups = all_groups() if "tests" in only else []
    if groups and not has_gpu:  # nothing can crash: one process tells them all
        groups = [Group("tests", [name for group in groups for name in group.files], 240)]

    def test(group: Group) -> Step:
        return Step(Part(group.name, "tests"), group.seconds, lambda *to: run_group(report, group, *to))

    def measure(name: str, least: float, *words: str) -> Step:
        def run(part: Part, seconds: float) -> None:
            if has_gpu or quick:
                run_throughput(part, seconds, *words, *(["--quick"] if quick else []))
            else:
                part.status, part.reason = "skipped", "no GPU"

        return Step(Part(name, "throughput"), least, run)

    steps = [test(group) for group in groups]
    if "throughput" in only:
        steps.insert(BEFORE_THROUGHPUT, measure("throughput", THROUGHPUT))
        if compiles:
            steps.append(measure("throughput, compiled", COMPILED, "--compile", "--rounds", "1"))
    return steps


def run_all(report: Report, steps: list[Step]) -> None:
    """Do one after the other; what a step leaves of its time is there for those after it."""
    report.parts = [step.part for step in steps]
    for number, step in enumerate(steps):
        part, later = step.part, sum(step_after.seconds for step_after in steps[number + 1 :])
        seconds_left = report.left - 5  # to write the report
        if seconds_left < 15:
            part.status, part.reason = "not run", "out of time"
        else:
            part.status, started = "running", time.monotonic()
            print(f"{report.seconds:4.0f} s  {part.name} ...", file=sys.stderr, flush=True)
            step.run(part, min(max(step.seconds, seconds_left - later), seconds_left))
            part.seconds = round(time.monotonic() - started, 1)
        print(f"{report.seconds:4.0f} s  {part.name}: {part.status}", file=sys.stderr, flush=True)
        report.write()
    report.is_complete = True


def main() -> int:
    """Run everything, print the report, and return 1 if something failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "gpu", metavar="DIR", help="default: runs/gpu")
    parser.add_argument("--minutes", type=float, default=9.0, help="for everything together, default: 9")
    parser.add_argument("--only", nargs="+", choices=("tests", "throughput"), default=["tests", "throughput"])
    parser.add_argument("--compile", action="store_true", help="the throughput of compiled models too, if time is left")
    parser.add_argument("--quick", action="store_true", help="the throughput of a tiny model, also without a GPU")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is ended, too
    report = Report(options.out, options.minutes)
    report.about = facts()
    try:
        run_all(report, steps_of(report, options.only, options.quick, options.compile))
    finally:
        report.write()
    print(report.markdown())
    return int(report.failed)


if __name__ == "__main__":
    raise SystemExit(main())
