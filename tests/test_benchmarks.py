"""The benchmarks run: tiny sizes, no look at any time. The probes of other trainers are judged right on ours."""

import importlib
import inspect
import json
import os
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import programs
import pytest
import torch
from compiled import compile_once
from marks import thinned

ROOT = Path(__file__).resolve().parent.parent
BENCHMARKS = ROOT / "benchmarks"
PROBES = [f"R{number}" for number in range(1, 10)]


def run(*command: str | Path, cwd: Path, timeout: float = 1200, **variables: str) -> str:
    """Return what a script prints."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    child = programs.run(sys.executable, *command, cwd=cwd, env=environment, timeout=timeout)
    assert child.returncode == 0, child.stderr
    return child.stdout


def figures_of(script: str, *options: str, folder: Path) -> dict[str, Any]:
    """Return the figures that a benchmark writes."""
    run(BENCHMARKS / script, *options, "--json", "out.json", cwd=folder)
    assert [path.name for path in folder.iterdir()] == ["out.json"]
    return json.loads((folder / "out.json").read_text())


def fixture_of(script: str, folder: Path = BENCHMARKS) -> Any:
    """Make a fixture of a script as a module."""

    @pytest.fixture(name=script)
    def module(monkeypatch: pytest.MonkeyPatch) -> Any:
        monkeypatch.setattr(os, "environ", dict(os.environ))  # of which some scripts change some
        monkeypatch.syspath_prepend(str(folder))
        return importlib.import_module(script)

    return module


gpu, throughput, probes = fixture_of("gpu"), fixture_of("throughput"), fixture_of("probes", BENCHMARKS / "peers")
chaos, performance = fixture_of("chaos"), fixture_of("performance")


def test_performance_page_has_figures_of_its_file(performance: Any) -> None:
    rows = json.loads(performance.RESULTS.read_text())["rows"]
    assert performance.page_of(rows) == performance.PAGE.read_text(encoding="utf-8")


@pytest.mark.processes
@pytest.mark.parametrize(
    "script", thinned([path.name for path in sorted(BENCHMARKS.glob("[!_]*.py"))], ["performance.py"])
)
def test_benchmark_starts_outside_of_the_tests(script: str, tmp_path: Path) -> None:
    lines = run(BENCHMARKS / script, "--help", cwd=tmp_path).splitlines()
    assert any(line.startswith("usage: ") for line in lines)  # libraries may write lines before


@pytest.mark.slow
@pytest.mark.processes
def test_overhead_and_distributed_measure_every_case(tmp_path: Path) -> None:
    cases = {row["case"] for row in figures_of("overhead.py", "--quick", folder=tmp_path)["rows"]}
    assert {"tensors", "dicts", "transformer", "hf", "hf-transformer", "evaluation", "imports"} <= cases
    (tmp_path / "out.json").unlink()
    rows = figures_of("distributed.py", "--quick", folder=tmp_path)["rows"]
    ours = ("tiny MLP", "AccelerateTrainer"), ("small transformer", "AccelerateTrainer")
    assert {("tiny MLP", "accelerate by hand"), *ours} <= {(row["case"], row["variant"]) for row in rows}


@pytest.mark.slow
def test_checkpoint_measures_every_case(tmp_path: Path) -> None:
    figures = figures_of("checkpoint.py", "--quick", folder=tmp_path)
    asynchronous = ("save, on disk", "omnitrain, async_save=True, later")
    variants = {("save", "torch.save"), ("save", "omnitrain"), asynchronous}
    assert variants <= {(row["case"], row["variant"]) for row in figures["rows"]}
    ours = next(row for row in figures["files"] if row["name"] == "omnitrain")
    assert (ours["failed_save"], ours["flipped_bit"], ours["pickle"]) == ("kept", "noticed", False)
    reads, looks = figures["seek"], 2 * 32  # for a fingerprint of the data
    assert reads["omnitrain, from the start, 0 workers"] == 8 + looks
    assert reads["omnitrain, resumed, 0 workers"] == 8 + looks
    assert reads["omnitrain, resumed, 2 workers"] <= 8 * (1 + 2 * 2) + 2 * looks  # what the two workers fetch ahead


@pytest.mark.slow
def test_soak_grows_only_history(tmp_path: Path) -> None:
    rows = figures_of("soak.py", "--steps", "20000", folder=tmp_path)["rows"]
    first, last = rows[1], rows[-1]
    assert last["steps"] > 5 * first["steps"]
    assert last["resident"] < first["resident"] + 10
    assert (last["threads"], last["descriptors"]) == (first["threads"], first["descriptors"])
    assert last["files"] == rows[len(rows) // 2]["files"]  # from when as many checkpoints are there as are kept


# --- runs that are interrupted


def test_chaos_plan_covers_backends_and_faults(chaos: Any) -> None:
    for seed in range(2):
        plan = chaos.planned(chaos.pairs_of(chaos.BACKENDS, chaos.FAULTS), 30, random.Random(seed))
        backends, faults, _ = zip(*plan, strict=True)
        assert ({*backends}, {*faults}) == ({*chaos.BACKENDS}, {*chaos.FAULTS})
        assert len({*zip(backends, faults, strict=True)}) == 30


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(3600)
def test_chaos_ends_with_the_bits_of_undisturbed_runs(tmp_path: Path) -> None:
    compile_once()
    words = (BENCHMARKS / "chaos.py", "--json", "out.json", "--trials", "30", "--seed", str(os.getpid()))
    with tempfile.TemporaryDirectory() as folder:  # pytest's path would be too long for the sockets of workers
        run(*words, cwd=tmp_path, timeout=3500, TMPDIR=folder)
        assert not os.listdir(folder)
    trials = json.loads((tmp_path / "out.json").read_text())
    assert len(trials) == 30 and all(trial["same"] for trial in trials)


# what runs on a GPU, without one


def test_gpu_groups_have_each_file_once(gpu: Any) -> None:
    files = [file for group in gpu.GROUPS for file in group.files]
    assert sorted(files) == sorted(path.stem for path in (ROOT / "tests" / "gpu").glob("test_*.py"))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_gpu_reports_skipped_tests(tmp_path: Path) -> None:
    printed = run(BENCHMARKS / "gpu.py", "--out", "out", cwd=tmp_path, CUDA_VISIBLE_DEVICES="")
    report = json.loads((tmp_path / "out/gpu.json").read_text())
    assert report["is_complete"] and not report["failed"] and report["about"]["gpu"] is None
    tests, throughput = report["parts"]
    assert (tests["status"], throughput["status"], throughput["reason"]) == ("skipped", "skipped", "no GPU")
    files = {f"tests/gpu/{path.name}" for path in (ROOT / "tests/gpu").glob("test_*.py")}
    assert {test["name"].split("::")[0] for test in tests["tests"]} == files
    assert all(test["status"] == "skipped" and "needs" in test["text"] for test in tests["tests"])
    written = (tmp_path / "out/gpu.md").read_text()
    assert written.strip() in printed
    assert "| throughput | skipped |" in written and " x needs a GPU" in written


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_gpu_measures_throughput(tmp_path: Path) -> None:
    words = (BENCHMARKS / "gpu.py", "--out", "out", "--only", "throughput", "--quick")
    printed = run(*words, cwd=tmp_path, CUDA_VISIBLE_DEVICES="")
    (part,) = json.loads((tmp_path / "out/gpu.json").read_text())["parts"]
    rows = {row["variant"]: row for row in part["found"]["rows"]}
    assert list(rows) == [
        "hand-written loop", "hand-written loop again (A/A)", "Trainer", "AccelerateTrainer", "HFTrainer",
        "transformers.Trainer",
    ]  # fmt: skip
    assert {row["status"] for row in rows.values()} == {"measured"}, printed
    losses = [row["losses"][-1] for row in rows.values()]
    assert max(losses) - min(losses) < 1e-3 and losses[0] < rows["Trainer"]["losses"][0]
    assert rows["Trainer"]["to_hand"][0] > 0 and rows["HFTrainer"]["to_stock"][0] > 0
    assert "| HFTrainer |" in printed and "unknown device" in printed


ENDS = """
import os, signal, time

def test_first():
    pass

def test_crashes():
    os.kill(os.getpid(), signal.SIGSEGV)

def test_fails():
    assert 1 == 2

def test_hangs():
    time.sleep(100)

def test_leaves_the_gpu_of_no_use():
    raise RuntimeError("CUDA error: device-side assert triggered")

def test_of_another_process(tmp_path_factory):
    assert "PID" not in os.environ

def test_last(request):
    import pytest
    pytest.skip("for a reason")
"""


@pytest.mark.slow
@pytest.mark.processes
def test_gpu_continues_after_crash_hang_or_error(gpu: Any, tmp_path: Path) -> None:
    (tmp_path / "test_broken.py").write_text("import no_such_module\n")
    (tmp_path / "test_ends.py").write_text(ENDS)
    (tmp_path / "test_lacking.py").write_text("import pytest\npytest.importorskip('no_such_module')\n")
    counts: list[int] = []
    files = sorted(tmp_path.glob("test_*.py"))
    tests, why = gpu.run_tests(files, 60, root=tmp_path, longest=3, tell=lambda tests: counts.append(len(tests)))
    assert not why and counts == sorted(counts)
    assert {test.name.split("::")[-1]: test.status for test in tests} == {
        "test_broken.py": "failed", "test_lacking.py": "skipped", "test_first": "passed", "test_crashes": "crashed",
        "test_fails": "failed", "test_hangs": "hung", "test_leaves_the_gpu_of_no_use": "failed",
        "test_of_another_process": "passed", "test_last": "skipped",
    }  # fmt: skip
    texts = {test.name.split("::")[-1]: test.text for test in tests}
    assert "SIGSEGV" in texts["test_crashes"] and "test_crashes" in texts["test_crashes"]
    assert "assert 1 == 2" in texts["test_fails"] and texts["test_last"] == "for a reason"
    assert "no_such_module" in texts["test_lacking.py"] and gpu.status_of(tests) == "failed"
    tests, why = gpu.run_tests([tmp_path / "nowhere.py"], 60, root=tmp_path)
    assert not tests and "exit code" in why and "nowhere.py" in why


def test_throughput_flops_equal_pytorch(throughput: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    monkeypatch.setattr(throughput, "find_spec", lambda name: None)
    work = throughput.Work(2, 256, 4, 512, 128, 1, 8, 2, 2, torch.device("cpu"))
    model = throughput.make_model(work)
    assert isinstance(model, throughput.PlainGPT)
    ids = torch.randint(0, 512, (1, 128))
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(ids, ids)["loss"].backward()
    assert throughput.flops_per_token(model, work) * 128 == pytest.approx(counter.get_total_flops(), rel=0.01)


# the probes of other trainers


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("name", PROBES)
def test_probe_accepts_omnitrain(name: str, probes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    probe = getattr(importlib.import_module("on_omnitrain"), name.lower())
    facts = probe(tmp_path) if inspect.signature(probe).parameters else probe()
    is_right, result = probes.PROBES[name].judge(json.loads(json.dumps(facts)))
    assert is_right, result


BAD: dict[str, list[dict[str, Any]]] = {
    "R1": [{"difference": 2e-6, "update": 1e-2}],
    "R2": [{"gradients": [1.0, 0.5]}, {"gradients": [1.0]}],
    "R3": [{"plain data, 0 workers": 0.0, "random data, 2 workers": 1e-9}],
    "R4": [{"before": [*range(28)], "after": [*range(32)], "said": []}, {"before": [0], "after": [], "said": []}],
    "R5": [
        {"a": {"error": "ValueError"}},
        {"a": {"first_step": 11, "said": [], "difference": 1e-3}},
        {"a": {"first_step": 6, "said": [], "difference": 0.0}},
        {"a": {"first_step": 1, "said": ["no checkpoint"], "difference": 0.0}},
    ],
    "R7": [{"steps": steps, "of": 30, "finite": False, "error": error} for steps, error in ((30, ""), (3, "E"))],
    "R8": [{"difference": 1e-2}],
    "R9": [{"straight": 8, "resumed": 12}],
}


def test_probe_rejects_bad_result(probes: Any) -> None:
    directions = dict(importlib.import_module("material").DIRECTIONS)
    guesses = [{**directions, "foo": "max"}, {**directions, "foo": "ObjectiveError", "wer": "max"}]
    for name, cases in {**BAD, "R6": guesses}.items():
        for facts in cases:
            assert not probes.PROBES[name].judge(facts)[0], facts
    assert probes.PROBES["R6"].judge({**directions, "foo": "ObjectiveError"})[0]
