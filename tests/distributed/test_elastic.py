"""Two machines, played by two of torchrun's agents on this one; and processes that are killed and started anew."""

from __future__ import annotations

import contextlib
import signal
import sys
from pathlib import Path
from typing import Any

import programs
import pytest
import torch
from forking import Case, Outcome, play
from safetensors.torch import load_file
from test_launching import SCRIPT, run, said, started

TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
OMNITRAIN = [sys.executable, "-m", "omnitrain.cli", "launch"]
pytestmark = [
    pytest.mark.skipif(sys.platform == "win32", reason="Windows has other signals, and no gloo over loopback"),
]


def on_two_machines(*command: str, cwd: Path) -> str:
    """Start the command once for each machine, and return what was printed."""
    folders = [cwd / "first", cwd / "second"]
    with contextlib.ExitStack() as stack:
        agents = []
        for folder in folders:
            folder.mkdir()
            agents.append(stack.enter_context(started(*command, cwd=folder)))
        codes = [agent.wait(programs.LIMIT) for agent in agents]
    output = "".join((folder / "output.txt").read_text() for folder in folders)
    assert codes == [0, 0], output
    return output


def state(run: Path) -> dict[str, torch.Tensor]:
    """Return the weights that a run ended with, and its optimizer's state."""
    last = run / "last"
    return load_file(last / "model.safetensors") | load_file(last / "optimizer" / "state.safetensors")


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """How the run ends on one machine with two processes that nothing disturbs."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    assert [one.code for one in forked(folder, [str(folder)])] == [0, 0]
    return state(folder / "run")


def forked(folder: Path, words: list[str]) -> list[Outcome]:
    """Run the script on two processes without torchrun."""
    name = f"{len(list(folder.glob('forked-*')))}"
    return play([Case(name, "launched:main", {"words": words})], folder / f"forked-{name}")[name]


def nodes_and_restarts(folder: Path) -> list[tuple[Any, Any]]:
    return [(one["node"], one["restarts"]) for one in said(folder)]


@pytest.mark.slow
def test_two_machines_end_with_the_weights_of_one(tmp_path: Path, uninterrupted: dict[str, torch.Tensor]) -> None:
    words = ["--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d"]
    endpoint = f"localhost:{programs.free_port()}"
    on_two_machines(*TORCHRUN, *words, "--rdzv-endpoint", endpoint, SCRIPT, str(tmp_path), cwd=tmp_path)
    assert nodes_and_restarts(tmp_path) == [("0", "0"), ("1", "0")]
    assert_equal(state(tmp_path / "run"), uninterrupted)


def test_a_machine_without_the_shared_folder_is_no_hindrance(
    tmp_path: Path, uninterrupted: dict[str, torch.Tensor]
) -> None:
    """Only the main process writes checkpoints, and reads them; the others get what they need from it."""
    words = [str(tmp_path), "--own-folders", "--kill", "6"]
    killed = forked(tmp_path, words)
    assert (killed[0].code, killed[1].code) == (1, -signal.SIGKILL), killed
    again = forked(tmp_path, words)
    assert [one.code for one in again] == [0, 0], again
    assert_equal(state(tmp_path / "run-0"), uninterrupted)
    assert not (tmp_path / "run-1").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "rendezvous",
    [
        pytest.param(["--standalone"], id="c10d"),
        pytest.param(["--master-port"], id="static"),
    ],
)
def test_a_run_whose_worker_is_killed_is_started_anew_and_ends_with_the_same_weights(
    rendezvous: list[str], tmp_path: Path, uninterrupted: dict[str, torch.Tensor]
) -> None:
    if rendezvous == ["--master-port"]:  # what accelerate launch does: one store through all restarts, at a known port
        rendezvous = ["--master-port", str(programs.free_port())]
    words = ["--nproc-per-node", "2", "--max-restarts", "2", SCRIPT, str(tmp_path), "--kill", "6"]
    code, output = run(*TORCHRUN, *rendezvous, *words, cwd=tmp_path)
    assert code == 0, output
    assert (tmp_path / "killed").exists()
    # an attempt that found what the one before it has left would fail, and so would all that are allowed
    assert nodes_and_restarts(tmp_path) in ([("0", "1")] * 2, [("0", "2")] * 2), output
    assert_equal(state(tmp_path / "run"), uninterrupted)


def test_a_killed_worker_takes_both_machines_back_to_the_last_checkpoint(
    tmp_path: Path, uninterrupted: dict[str, torch.Tensor]
) -> None:
    words = ["-n", "1", "--nnodes", "2", "--rdzv-endpoint", f"localhost:{programs.free_port()}", "--max-restarts", "2"]
    on_two_machines(*OMNITRAIN, *words, SCRIPT, str(tmp_path), "--kill", "6", cwd=tmp_path)
    assert (tmp_path / "killed").exists()
    assert_equal(state(tmp_path / "run"), uninterrupted)
