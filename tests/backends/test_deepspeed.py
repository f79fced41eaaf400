"""What is told of DeepSpeed before it begins, and what it and accelerate say besides our arguments."""

import functools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from accelerate.state import PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from recipes import rows
from torch.distributed.fsdp import MixedPrecisionPolicy

from omnitrain import AccelerateTrainer, ConfigError, HFTrainer, HFTrainingArguments
from omnitrain.backends.deepspeed import fill_config, merge_config
from omnitrain.backends.zero import LossScale, Zero


def test_deepspeed_config_misspelt_suggests_nearest() -> None:
    pytest.importorskip("deepspeed")
    known = ("zero_optimization", "wall_clock_breakdown", "flops_profiler", "bf16", "my_own_notes")
    merge_config(SimpleNamespace(deepspeed_config={name: {} for name in known}), {})
    plugin = SimpleNamespace(deepspeed_config={"zero_optimisation": {"stage": 3}})
    with pytest.raises(ConfigError, match=r"'zero_optimisation', which it ignores. Did you mean 'zero_optimization'"):
        merge_config(plugin, {})


@pytest.fixture
def without_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("deepspeed")
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")  # which the trainer would leave in the environment


def test_deepspeed_without_a_launcher_is_rejected(without_launcher: None, monkeypatch: pytest.MonkeyPatch) -> None:
    message = r"no RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT. Start .* `omnitrain launch -n 1`"
    for words in (message, "no LOCAL_RANK, WORLD_SIZE"):
        with pytest.raises(ConfigError, match=words):
            AccelerateTrainer(torch.nn.Linear(2, 1), deepspeed_config={})
        monkeypatch.setenv("RANK", "0")


@pytest.mark.parametrize(("stage", "kind"), [
    (2, transformers.TrainingArguments), (2, HFTrainingArguments), (3, HFTrainingArguments),
])  # fmt: skip
def test_training_arguments_without_a_launcher_are_rejected(
    stage: int, kind: Any, without_launcher: None, tmp_path: Path
) -> None:
    """Under ZeRO 3 before `from_pretrained`, which goes by the arguments and would end in an error about MPI."""
    config = {"zero_optimization": {"stage": stage}, "train_micro_batch_size_per_gpu": "auto"}
    make = functools.partial(kind, str(tmp_path), deepspeed=config, report_to=[])
    if stage == 2:
        data = [(torch.zeros(2), torch.zeros(1))]
        make = functools.partial(HFTrainer, torch.nn.Linear(2, 1), make(), data, loss_fn=torch.nn.MSELoss())
    with pytest.raises(ConfigError, match=r"Start .* `omnitrain launch -n 1`"):
        make()


def test_deepspeed_config_loss_scale_conflict() -> None:
    def own() -> Any:
        counts = {"cur_iter": 7, "last_overflow_iter": 1, "cur_hysteresis": 2, "delayed_shift": 2}
        return SimpleNamespace(cur_scale=256.0, scale_window=4, scale_factor=2.0, min_scale=1, dynamic=True, **counts)

    config = {"enabled": True, "loss_scale_window": 4, "hysteresis": "auto"}
    with pytest.raises(ConfigError, match=r"`fp16_loss_scale=.* sets 'loss_scale_window' of 'fp16'"):
        LossScale((8.0, 1.0)).attach(own(), config)
    adopted, configured = own(), own()
    scale = LossScale((65536.0, 1e-4))
    assert not scale.is_enabled() and scale.get_scale() == 1.0 and scale.state_dict() == {}
    scale.attach(adopted, config)
    assert scale.is_enabled() and vars(adopted) == vars(own())
    left_out: Any = SimpleNamespace(scaler=scale, device=torch.device("cpu"))  # an update that is not made
    Zero.reset_scaler(left_out)
    assert vars(adopted) == vars(own())
    LossScale((8.0, 1.0, 3)).attach(configured, {"enabled": True})
    values = configured.cur_scale, configured.scale_window, configured.min_scale, configured.delayed_shift
    assert values == (8.0, 3, 0.0, 1)
    native = torch.amp.GradScaler("cpu")
    native.load_state_dict(scale.state_dict())  # DeepSpeed has doubled in the fifth step, PyTorch in the fourth
    assert (native.get_scale(), native.state_dict()["_growth_tracker"]) == (256.0, 0)
    scale.load_state_dict({**native.state_dict(), "_growth_tracker": 2})
    assert adopted.cur_iter - adopted.last_overflow_iter - 1 == 3


def test_sums_in_two_dtypes_are_rejected() -> None:
    plugin = SimpleNamespace(deepspeed_config={"communication_data_type": "fp16"})
    with pytest.raises(ConfigError, match=r"communication_data_type='fp16', and `dtypes` sets 'reductions' to 'bf16'"):
        fill_config(plugin, 8, None, 1, "bf16")
    fill_config(plugin, 8, None, 1, "fp16")
    assert plugin.deepspeed_config["communication_data_type"] == "fp16"
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    fsdp = FullyShardedDataParallelPlugin(fsdp_version=2, mixed_precision_policy=policy)
    with pytest.raises(ConfigError, match="'reductions' to 'bf16', and `fsdp_plugin` has a mixed_precision_policy"):
        AccelerateTrainer(torch.nn.Linear(2, 1), fsdp_plugin=fsdp, dtypes={"reductions": "bf16"})


def test_new_accelerator_forgets_fsdp_of_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU accelerate notes FSDP for the process, and takes no plugin of the next accelerator."""
    options = {"loss_fn": torch.nn.MSELoss(), "max_steps": 1, "progress_bar": False}
    kind = AccelerateTrainer(torch.nn.Linear(4, 1), rows(8, torch.float32), **options).accelerator.distributed_type
    monkeypatch.setitem(PartialState._shared_state, "distributed_type", DistributedType.FSDP)
    trainer = AccelerateTrainer(torch.nn.Linear(4, 1), rows(8, torch.float32), **options)
    assert trainer.accelerator.distributed_type == kind != DistributedType.FSDP
    trainer.train()
