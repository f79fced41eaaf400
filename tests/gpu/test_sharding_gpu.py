"""FSDP 2 and ZeRO on one process: trained, saved, resumed, also offloaded to the CPU, against the native trainer.

One process has all parts of the weights, so that the numbers are the native trainer's, by the way of FSDP and ZeRO.
This file is also the script that is launched. Without a GPU it runs on two processes, for development:

    PYTHONPATH=.:tests omnitrain launch -n 2 --cpu --fsdp tests/gpu/test_sharding_gpu.py FOLDER fsdp2
"""

import json
import math
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import programs
import pytest
import torch
import torch.nn.functional as F
from recipes import StopAt, callback, rows
from torch import nn
from torch.utils.data import TensorDataset

from omnitrain import AccelerateTrainer, NonFiniteError, Trainer
from omnitrain.checkpoint.tensor_files import gather_to_host, load_tensors

OFFLOAD = {"device": "cpu"}
CONFIGS: dict[str, Any] = {
    "fsdp2": None,  # what the launcher says
    "fsdp2, offloaded": None,
    "zero1": None,
    "zero2": {"zero_optimization": {"stage": 2}},
    "zero3": {"zero_optimization": {"stage": 3}},
    # the optimizer is PyTorch's, so that DeepSpeed has nothing to compile
    "zero2, offloaded": {
        "zero_optimization": {"stage": 2, "offload_optimizer": OFFLOAD},
        "zero_force_ds_cpu_optimizer": False,
    },
    "zero3, offloaded": {
        "zero_optimization": {"stage": 3, "offload_optimizer": OFFLOAD, "offload_param": OFFLOAD},
        "zero_force_ds_cpu_optimizer": False,
    },
}
WRAPPED = {"FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP", "FSDP_TRANSFORMER_CLS_TO_WRAP": "Block"}
LAUNCHES: tuple[tuple[list[str], list[str], dict[str, str]], ...] = (
    (["fsdp2"], ["--fsdp"], WRAPPED),
    (["fsdp2, offloaded"], ["--fsdp"], {**WRAPPED, "FSDP_OFFLOAD_PARAMS": "true"}),
    (["zero1", "zero2", "zero3"], ["--zero", "1"], {}),
    (["zero2, offloaded", "zero3, offloaded"], ["--zero", "2"], {}),
)
"""Ways that share a launch, the words for the launcher, and what its configuration file would put there."""
WAYS = list(CONFIGS)


class Block(nn.Module):
    """What is wrapped by itself."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).tanh())


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), Block(16), Block(16), nn.Linear(16, 1))


# --- the script


def train(way: str, folder: Path, *guests: Any, resume: str | None = None, **options: Any) -> Any:
    """Train 2 epochs of 8 steps with accumulation, clipping and a schedule, and save in the middle of the second."""
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    defaults = {
        "loss_fn": F.mse_loss, "learning_rate": 0.01, "epochs": 2, "lr_scheduler": "cosine", "warmup_steps": 2,
        "max_grad_norm": 0.5, "progress_bar": False, "save_steps": 1000, "save_dir": folder, "global_batch_size": 8,
        "callbacks": guests,
    }  # fmt: skip
    data = options.pop("data", None) or rows(64, torch.float32)
    if way == "native":
        device = "cuda" if torch.cuda.is_available() else "cpu"
        defaults["save_dir"] = f"{folder}-{os.environ.get('RANK', '0')}"  # each process has a run of its own
        trainer: Any = Trainer(net(), data, batch_size=4, device=device, **{**defaults, **options})
    else:
        engine = {} if CONFIGS[way] is None else {"deepspeed_config": CONFIGS[way]}
        trainer = AccelerateTrainer(net(), data, batch_size=4 // processes, **{**defaults, **engine, **options})
    trainer.train(resume_from=resume)
    return trainer


def state_of(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: gather_to_host(tensor).clone() for name, tensor in trainer.backend.model_tensors().items()}


def apart(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> float:
    assert first.keys() == second.keys(), (sorted(first), sorted(second))
    return max(float((first[name] - second[name]).abs().max()) for name in first)


def examine(way: str, folder: Path) -> dict[str, Any]:
    """Run everything that is to be tested of a way; what raises is noted, and the rest goes on."""
    results: dict[str, Any] = {}
    states: dict[str, Any] = {}

    def straight() -> dict[str, Any]:
        trainer = train(way, folder / "straight")
        states["straight"] = state_of(trainer)
        states["native"] = state_of(train("native", folder / "native"))
        parameter = next(trainer.model.parameters())
        trainer.save_model(folder / "model")
        return {
            "step": trainer.progress.step,
            "world_size": trainer.world_size,
            "device": trainer.device.type,
            "sharding": trainer.backend.sharding,
            "parameter": type(parameter).__name__,
            "parameter_device": parameter.device.type,
            "from_native": apart(states["straight"], states["native"]),
            "saved": sorted(load_tensors(folder / "model" / "model.safetensors")),
            "from_saved": apart(states["straight"], load_tensors(folder / "model" / "model.safetensors")),
        }

    def resumed() -> dict[str, Any]:
        train(way, folder / "parts", StopAt(11))
        trainer = train(way, folder / "parts", resume="auto")
        return {"step": trainer.progress.step, "from_straight": apart(states["straight"], state_of(trainer))}

    def moved() -> dict[str, Any]:
        native = train("native", folder / "moved", resume=str(folder / "parts/checkpoint-11"))
        train("native", folder / "there", StopAt(11))
        back = train(way, folder / "back", resume=str(folder / "there-0/checkpoint-11"))
        return {
            "to_native": apart(states["native"], state_of(native)),
            "from_native": apart(states["native"], state_of(back)),
        }

    def poisoned() -> dict[str, Any]:
        x, y = (tensor.clone() for tensor in rows(64, torch.float32).tensors)
        y[:] = math.nan  # from the first step on, so that the weights are to stay those of the beginning
        trainers, message = list[Any](), ""
        try:
            train(way, folder / "poisoned", callback(on_train_start=trainers.append), data=TensorDataset(x, y))
        except NonFiniteError as error:
            message = str(error)
        return {"said": message, "from_start": apart(state_of(trainers[0]), dict(net().named_parameters()))}

    def in_precision(precision: str) -> Callable[[], dict[str, Any]]:
        def work() -> dict[str, Any]:
            trainer = train(way, folder / precision, autocast=precision, epochs=6)
            history = trainer.metrics["train_metrics_history"]
            dtypes = {str(tensor.dtype) for tensor in state_of(trainer).values()}
            steps = trainer.progress.step + trainer.progress.skipped_steps
            return {"losses": [row["train_loss"] for row in history], "steps": steps, "dtypes": sorted(dtypes)}

        return work

    works = {"straight": straight, "resumed": resumed, "moved": moved, "bf16": in_precision("bf16")}
    if torch.cuda.is_available():
        works["fp16"] = in_precision("fp16")
    works["poisoned"] = poisoned  # the last one, as it ends by an error
    for name, work in works.items():
        try:
            results[name] = work()
        except Exception:
            results[name] = {"error": traceback.format_exc()[-3000:]}
    return results


def main() -> None:
    """Examine the ways one after the other, and write the results of each."""
    out, *ways = sys.argv[1:]
    for way in ways:
        result = examine(way, Path(out) / way)
        if os.environ.get("RANK", "0") == "0":
            (Path(out) / f"{way}.json").write_text(json.dumps(result, indent=2))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


# --- the tests


def launch(ways: list[str], words: list[str], says: dict[str, str], out: Path) -> str:
    """Examine these ways in one process, and return how the launch ended."""
    command = [sys.executable, "-m", "omnitrain", "launch", "-n", "1", *words, __file__, str(out), *ways]
    try:
        done = programs.run(*command, env=programs.launch_environment(**says), timeout=100, stderr=subprocess.STDOUT)
    except subprocess.TimeoutExpired as error:
        return f"it had not ended after 100 s:\n{str(error.output)[-3000:]}"
    return "" if done.returncode == 0 else f"exit code {done.returncode}:\n{done.stdout[-3000:]}"


_examined: dict[str, tuple[dict[str, Any], str]] = {}
"""The results of each way, and how its launch ended."""


@pytest.fixture(scope="module", params=WAYS)
def way(request: pytest.FixtureRequest) -> str:
    if request.param.startswith("zero") and find_spec("deepspeed") is None:
        pytest.skip("ZeRO needs deepspeed, which is not installed")
    return request.param


@pytest.fixture
def result_of(way: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    """Return the result of a launch, by its name; the first that asks launches."""
    if way not in _examined:
        out = tmp_path_factory.mktemp("sharding")
        ways, words, says = next(group for group in LAUNCHES if way in group[0])
        ended = launch(ways, words, says, out)
        for way_run in ways:
            path = out / f"{way_run}.json"
            _examined[way_run] = (json.loads(path.read_text()) if path.exists() else {}, ended)
    results, ended = _examined[way]

    def of(name: str) -> dict[str, Any]:
        assert name in results, f"the launch said nothing of it: {ended}"
        assert "error" not in results[name], results[name]["error"]
        return results[name]

    return of


pytestmark = [pytest.mark.gpu, pytest.mark.processes]


def test_sharded_training_equals_native(way: str, result_of: Any) -> None:
    """Where its parameters were asked for; they are saved under the names of the bare model."""
    straight = result_of("straight")
    assert (straight["step"], straight["world_size"], straight["device"]) == (16, 1, "cuda")
    assert straight["sharding"] == ("FSDP" if way.startswith("fsdp") else "DEEPSPEED")
    assert straight["from_native"] < 1e-5
    assert (straight["parameter"] == "DTensor") == way.startswith("fsdp")
    if way.startswith("fsdp"):
        assert straight["parameter_device"] == ("cpu" if "offloaded" in way else "cuda")
    assert straight["saved"] == sorted(name for name, _ in net().named_parameters())
    assert straight["from_saved"] == 0.0


def test_sharded_run_resumes(way: str, result_of: Any) -> None:
    resumed = result_of("resumed")
    assert resumed["step"] == 16 and resumed["from_straight"] < 1e-6


def test_sharded_checkpoints_move_to_native_and_back(way: str, result_of: Any) -> None:
    moved = result_of("moved")
    assert max(moved["to_native"], moved["from_native"]) < 1e-5


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_sharded_low_precision_saves_fp32(way: str, result_of: Any, precision: str) -> None:
    if (way, precision) == ("fsdp2, offloaded", "fp16"):
        pytest.skip("PyTorch's loss scaler does not wait for what a fused optimizer on the CPU is to know of it")
    run = result_of(precision)
    assert run["steps"] == 48 and run["dtypes"] == ["torch.float32"]
    assert run["losses"][-1] < run["losses"][0]


def test_sharded_nan_ends_run_before_update(way: str, result_of: Any) -> None:
    poisoned = result_of("poisoned")
    assert "not finite at step 1 " in poisoned["said"]
    assert poisoned["from_start"] == 0.0


if __name__ == "__main__":
    main()
