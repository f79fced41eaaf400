"""Checkpoints and saved models with adapters, in PEFT's own format."""

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from adapting import adapted, agree, lora, make, reopened, run, weights_of
from forging import content_of
from marks import make_small
from recipes import fit, rows
from safetensors.torch import load_file
from tiny import Tokens, llama
from torch import nn
from transformers import AutoModelForCausalLM, TrainingArguments
from transformers import Trainer as Stock

from omnitrain import ConfigError, HFTrainer
from omnitrain.checkpoint.merge_adapters import adapter_folders

pytestmark = pytest.mark.filterwarnings("ignore:.*embedding layers found in `target_modules`")


def check_reopens(trainer: Any, folder: Path, expected: Any = None, base: Callable[[], Any] = llama) -> None:
    """Check that PEFT opens what `save_model` writes and the last checkpoint of the run in `folder / "run"`."""
    trainer.save_model(folder / "model")
    assert not (folder / "model" / "model.safetensors").exists()
    for path in (folder / "model", folder / "run" / "last"):
        assert agree(reopened(path, base()), weights_of(trainer) if expected is None else expected), path
        assert not (path / "config.json").exists()  # transformers would look for the base in the folder


def is_adapter(name: str) -> bool:
    return "lora_" in name or "modules_to_save" in name


def test_adapters_are_saved_per_name_with_full_modules(tmp_path: Path) -> None:
    model = adapted(modules_to_save=["lm_head"])
    model.add_adapter("other", lora(2, r=3))
    trainer, last = run("native", model, tmp_path / "run"), tmp_path / "run" / "last"
    trainer.save_model(tmp_path / "model")
    adapters = {name: tensor for name, tensor in weights_of(trainer).items() if is_adapter(name)}
    for folder in (tmp_path / "model", last):
        default, other = reopened(folder), reopened(folder, adapter="other")
        assert any("lm_head.modules_to_save.default" in name for name in default)
        assert agree({name: {**default, **other}[name] for name in adapters}, adapters)
    assert not any(map(is_adapter, content_of(last)["frozen"]))
    # a new head is random
    assert "base_model.model.lm_head.original_module.weight" in load_file(last / "model.safetensors")


@pytest.mark.parametrize("name", ["model", "0"])
def test_adapters_named_like_layers_reopen(name: str, tmp_path: Path) -> None:
    """Only what belongs to an adapter is saved, not what has its name: `base_model.model.model.layers.0` of Llama."""
    import peft

    trainer = run("native", peft.get_peft_model(llama(), lora(), adapter_name=name), tmp_path / "run")
    trainer.save_model(tmp_path / "model")
    checkpoint = tmp_path / "run" / "last"
    for folder in (tmp_path / "model", checkpoint):
        assert agree(reopened(folder, adapter=name), weights_of(trainer))
    tensors, content = load_file(checkpoint / "model.safetensors"), content_of(checkpoint)
    assert len(tensors) == 4 and all(".lora_" in tensor for tensor in tensors)
    assert len(content["frozen"]) == 12 and adapter_folders(content) == {name: name}


def test_adapters_of_transformers_integration_reopen(tmp_path: Path) -> None:
    model = llama()
    model.add_adapter(lora())
    trainer = run("hf", model, tmp_path / "run")
    check_reopens(trainer, tmp_path, {f"base_model.model.{name}": value for name, value in weights_of(trainer).items()})


def test_adapters_include_resized_embeddings(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path / "base")

    def resized(seed: int = 4) -> Any:
        base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float64)
        torch.manual_seed(seed)
        base.resize_token_embeddings(44, mean_resizing=False)
        return base

    check_reopens(run("native", adapted(resized(3)), tmp_path / "run"), tmp_path, base=resized)


def test_adapters_of_a_plain_module_reopen(tmp_path: Path) -> None:
    def base() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(OrderedDict(hidden=nn.Linear(4, 8), out=nn.Linear(8, 1))).double()

    model = adapted(base(), target_modules=["out"])
    trainer = fit(make_small("native", model, rows(8), save_dir=tmp_path / "run", epochs=1))
    check_reopens(trainer, tmp_path, base=base)


def test_adapters_of_prompt_tuning_reopen(tmp_path: Path) -> None:
    import peft

    torch.manual_seed(1)
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    trainer = run("native", peft.get_peft_model(llama(), config).double(), tmp_path / "run")
    name = "prompt_encoder.default.embedding.weight"
    saved = reopened(tmp_path / "run" / "last")[name]
    assert torch.equal(saved.float(), weights_of(trainer)[name].float())  # PEFT makes it in fp32


def test_adapters_of_compiled_modules_reopen_and_load(tmp_path: Path) -> None:
    model = adapted()
    layers = model.base_model.model.model.layers
    layers[0] = torch.compile(layers[0], backend="eager")
    trainer = make("native", model, tmp_path / "run")
    trainer.save_checkpoint()
    weights = {name.replace("_orig_mod.", ""): value for name, value in weights_of(trainer).items()}
    check_reopens(trainer, tmp_path, weights)
    resumed = make("native", adapted(), tmp_path / "run")
    resumed.load_checkpoint(tmp_path / "run" / "last")
    assert agree(weights_of(resumed), weights)


def test_adapters_of_async_saves_are_those_of_their_step(tmp_path: Path) -> None:
    run("accelerate", adapted(), tmp_path / "run", async_save=True, save_steps=1, max_steps=3)
    for step in (1, 3):
        straight = run("native", adapted(), max_steps=step, epochs=2)
        assert agree(reopened(tmp_path / "run" / f"checkpoint-{step}"), weights_of(straight)), step


def test_adapters_overwrite_only_if_asked(tmp_path: Path) -> None:
    import peft

    trainer = make("hf", peft.get_peft_model(llama(), lora(), adapter_name="named"))
    make("hf", llama()).save_model(tmp_path / "plain")
    (tmp_path / "file").touch()
    trainer.save_model(tmp_path / "model")
    for name, message in (
        ("model", "named/adapter_config.json' already exists"), ("plain", "model.safetensors' already exists"),
        ("file", "it is a file"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=message):
            trainer.save_model(tmp_path / name)
    trainer.save_model(tmp_path / "model", overwrite=True)


def test_adapters_resume_in_a_stock_trainer(tmp_path: Path) -> None:
    """transformers' own Trainer resumes from a checkpoint that does not contain the base model."""

    def arguments(name: str) -> TrainingArguments:
        return TrainingArguments(
            str(tmp_path / name), max_steps=2, per_device_train_batch_size=4, save_strategy="steps", save_steps=2,
            learning_rate=0.05, report_to="none", use_cpu=True, disable_tqdm=True,
        )  # fmt: skip

    trainer = HFTrainer(adapted(), arguments("ours"), Tokens(8), stock_checkpoints=True)
    trainer.train()
    stock: Any = Stock(adapted(seed=5), arguments("stock"), train_dataset=Tokens(8))
    stock.train(resume_from_checkpoint=str((tmp_path / "ours" / "last").resolve()))
    assert agree(dict(stock.model.named_parameters()), weights_of(trainer))
