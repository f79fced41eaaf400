"""Activation checkpointing: bit-identical results on every trainer, for any model."""

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accelerate import FullyShardedDataParallelPlugin
from recipes import rows, same, t16, trainer_on_cpu, weights
from tiny import Tokens, bert
from torch import nn
from transformers import TrainingArguments

from omnitrain import AccelerateTrainer, ConfigError, HFTrainer
from omnitrain.compute.activation_checkpointing import recompute_activations


class Block(nn.Module):
    """Has all that a second forward pass could change: dropout, running statistics, a spectral norm, an option."""

    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.utils.parametrizations.spectral_norm(nn.Linear(16, 16))
        self.norm, self.drop = nn.BatchNorm1d(16), nn.Dropout(0.3)

    def forward(self, x: torch.Tensor, *, scale: float, bias: torch.Tensor) -> torch.Tensor:
        Block.calls += 1
        return x + self.drop(self.norm(torch.tanh(self.layer(x)))) * scale + bias


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.begin, self.end = nn.Linear(4, 16), nn.Linear(16, 1)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.begin(x)
        for block in self.blocks:
            x = block(x, scale=0.5, bias=x.mean(0))
        return self.end(x)


def net() -> Net:
    torch.manual_seed(0)
    return Net().double()


def run(trainer_class: Any, model: nn.Module, data: Any = None, **options: Any) -> Any:
    options = {"max_steps": 3, "learning_rate": 1e-2, "eval_dataset": data or rows(24), **options}
    options |= {} if data else {"loss_fn": F.mse_loss}
    trainer = trainer_on_cpu(trainer_class, model, data or rows(24), **options)
    return trainer, trainer.train()


def test_checkpointing_keeps_bits_of_plain_model(trainer_class: Any) -> None:
    results = []
    for recomputes in (False, True):
        Block.calls, model = 0, net()
        options = {"gradient_accumulation_steps": 2, "batch_size": 4, "gradient_checkpointing": recomputes}
        _, metrics = run(trainer_class, model, **options)
        results.append((weights(model), list(model.buffers()), metrics["valid"], list(model.state_dict()), Block.calls))
    (*expected, calls), (*values, more_calls) = results
    assert same(expected[0], values[0]) and same(expected[1], values[1]) and expected[2:] == values[2:]
    assert more_calls - calls == 3 * 2 * 3  # steps, micro-batches, blocks
    models = t16(dropout=0.3), t16(dropout=0.3)
    run(trainer_class, models[0])
    run(trainer_class, models[1], gradient_checkpointing=["0", "2"])  # by the names of layers
    assert same(weights(models[0]), weights(models[1]))


def test_checkpointing_keeps_bits_of_transformers_model(trainer_class: Any) -> None:
    results = []
    for recomputes in (False, True):
        model = bert()
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.2
        run(trainer_class, model, data=Tokens(12, "classes"), gradient_checkpointing=recomputes)
        results.append(weights(model))
        assert any(getattr(module, "gradient_checkpointing", False) for module in model.modules()) is recomputes
    assert same(*results)


def test_checkpointing_frees_activations() -> None:
    sizes = []
    for recomputes in (False, True):
        model, saved = net(), list[torch.Tensor]()
        if recomputes:
            recompute_activations(model, True)
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor), lambda _: None):  # noqa: B023
            model(torch.randn(64, 4, dtype=torch.float64))
        sizes.append(sum(tensor.numel() for tensor in saved))
    assert sizes[1] < sizes[0] / 3


def recomputed(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if "forward" in vars(module)]


def layer() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.ReLU())


def test_checkpointing_finds_blocks() -> None:
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2), 2, enable_nested_tensor=False)
    stages = nn.Sequential(nn.Linear(2, 2), nn.Sequential(layer(), layer()), nn.Sequential(layer()))
    tree: Any = nn.ModuleDict({"features": layer(), "head": layer()})
    transformer: Any = bert()
    transformer.supports_gradient_checkpointing = False
    for model, names in ((encoder, ["layers.0", "layers.1"]), (stages, ["1.0", "1.1", "2.0"]),
                         (tree, ["features", "head"]), (transformer, ["bert.encoder.layer.0"])):  # fmt: skip
        recompute_activations(model, True)
        assert recomputed(model) == names
    model: Any = net()
    recompute_activations(model, [r"blocks\.[01]", r"blocks\.0\.norm", "end"])
    recompute_activations(model, ["end"])
    assert recomputed(model) == ["end", "blocks.0", "blocks.1"]
    assert not hasattr(model.end.forward.run, "run")  # once


def test_checkpointing_rejects_model_without_blocks(trainer_class: Any) -> None:
    for model, wrong, words in (
        (t16(), True, r"gradient_checkpointing=True.*no blocks in Sequential.*Name the modules"),
        (net(), [r"layer\d"], r"no module is called 'layer.*begin, end, blocks"),
        *((net(), value, "gradient_checkpointing") for value in ("blocks", [], ["("], 3)),
    ):
        with pytest.raises(ConfigError, match=words):
            run(trainer_class, model, gradient_checkpointing=wrong)


def test_checkpointing_survives_copy_and_pickle() -> None:
    model: Any = nn.Sequential(*(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)) for _ in range(2)))
    recompute_activations(model, True)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert other[0].forward.block is other[0]
        assert other[0].forward.run.__self__ is other[0]


def test_checkpointing_by_training_arguments(tmp_path: Any) -> None:
    models = net(), net()
    for recomputes, model in enumerate(models):
        args = TrainingArguments(
            str(tmp_path), use_cpu=True, report_to="none", max_steps=3, save_strategy="no",
            gradient_checkpointing=bool(recomputes),
        )  # fmt: skip
        Block.calls = 0
        trainer, _ = run(HFTrainer, model, args=args, max_steps=None, learning_rate=None)
    assert same(weights(models[0]), weights(models[1]))
    assert Block.calls == 3 * 2 * 3 and trainer.settings.gradient_checkpointing is True
    with pytest.raises(ConfigError, match="gradient_checkpointing"):
        run(HFTrainer, net(), args=args, gradient_checkpointing=False, max_steps=None, learning_rate=None)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, activation_checkpointing=True)
    with pytest.raises(ConfigError, match="activation_checkpointing are both set"):
        run(AccelerateTrainer, net(), fsdp_plugin=plugin, gradient_checkpointing=True)
