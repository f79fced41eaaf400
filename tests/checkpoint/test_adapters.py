"""Adapters of PEFT are in PEFT's own form wherever they are saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from adapting import TRAINERS, adapted, agree, content_of, lora, make, reopened, run, weights_of
from safetensors.torch import load_file
from tiny import Tokens, llama
from torch import nn
from transformers import AutoModelForCausalLM, TrainingArguments
from transformers import Trainer as Stock

from omnitrain import ConfigError, HFTrainer

pytestmark = pytest.mark.filterwarnings("ignore:.*embedding layers found in `target_modules`")


@pytest.mark.parametrize("kind", TRAINERS)
def test_peft_opens_a_saved_model_and_a_checkpoint(kind: str, tmp_path: Path) -> None:
    trainer = run(kind, adapted(), tmp_path / "run")
    trainer.save_model(tmp_path / "model")
    for folder in (tmp_path / "model", tmp_path / "run" / "last"):
        assert agree(reopened(folder), weights_of(trainer)), folder
        assert not (folder / "config.json").exists()  # transformers would look for the base in the folder
    assert not (tmp_path / "model" / "model.safetensors").exists()


@pytest.mark.parametrize("kind", TRAINERS)
def test_each_of_several_adapters_is_saved_with_the_modules_that_are_trained_whole(kind: str, tmp_path: Path) -> None:
    model = adapted(modules_to_save=["lm_head"])
    model.add_adapter("other", lora(2, r=3))
    trainer = run(kind, model, tmp_path / "run")
    trainer.save_model(tmp_path / "model")
    after = weights_of(trainer)
    for folder in (tmp_path / "model", tmp_path / "run" / "last"):
        default, other = reopened(folder), reopened(folder, adapter="other")
        assert any("lm_head.modules_to_save.default" in name for name in default)
        found = {name: one for name, one in {**default, **other}.items() if name in after}
        adapters = {name for name in after if "lora_" in name or "modules_to_save" in name}
        assert adapters <= found.keys() and all(torch.equal(found[name], after[name]) for name in adapters)
    kept = content_of(tmp_path / "run" / "last")["frozen"]
    assert not any("lora_" in name or "modules_to_save" in name for name in kept)
    held = load_file(tmp_path / "run" / "last" / "model.safetensors")
    assert "base_model.model.lm_head.original_module.weight" in held  # a new head is made at random


@pytest.mark.parametrize("kind", TRAINERS)
def test_adapters_of_transformers_own_integration_are_saved_too(kind: str, tmp_path: Path) -> None:
    model = llama()
    model.add_adapter(lora())
    trainer = run(kind, model, tmp_path / "run")
    trainer.save_model(tmp_path / "model")
    after = {f"base_model.model.{name}": one for name, one in weights_of(trainer).items()}
    for folder in (tmp_path / "model", tmp_path / "run" / "last"):
        assert agree(reopened(folder), after), folder


def test_embeddings_with_new_rows_are_saved_with_the_adapters(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path / "base")

    def grown() -> Any:
        base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float64)
        torch.manual_seed(3)
        base.resize_token_embeddings(44, mean_resizing=False)
        return base

    trainer = run("native", adapted(grown()), tmp_path / "run")
    trainer.save_model(tmp_path / "model")
    torch.manual_seed(4)
    other = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float64)
    other.resize_token_embeddings(44, mean_resizing=False)
    for folder in (tmp_path / "model", tmp_path / "run" / "last"):
        assert agree(reopened(folder, other), weights_of(trainer)), folder


def test_adapters_of_a_model_that_is_none_of_transformers_are_saved(tmp_path: Path) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.embed, self.out = nn.Embedding(40, 8), nn.Linear(8, 40)

        def forward(self, input_ids: Any, labels: Any) -> Any:
            logits = self.out(self.embed(input_ids))
            return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}

    model = adapted(Net(), target_modules=["out"])
    trainer = run("native", model, tmp_path / "run")
    trainer.save_model(tmp_path / "model")
    for folder in (tmp_path / "model", tmp_path / "run" / "last"):
        assert agree(reopened(folder, Net()), weights_of(trainer)), folder


def test_a_learned_prompt_is_saved_in_peft_s_own_form(tmp_path: Path) -> None:
    torch.manual_seed(1)
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    trainer = run("native", peft.get_peft_model(llama(), config).double(), tmp_path / "run")
    after = weights_of(trainer)["prompt_encoder.default.embedding.weight"]
    again = reopened(tmp_path / "run" / "last")["prompt_encoder.default.embedding.weight"]
    assert torch.equal(again.float(), after.float())  # PEFT makes it in fp32


def test_a_checkpoint_in_the_background_has_the_adapters_of_its_own_step(tmp_path: Path) -> None:
    trainer = run("native", adapted(), tmp_path / "run", async_save=True, save_steps=1, max_steps=3)
    for step in (1, 2, 3):
        (folder,) = (tmp_path / "run").glob(f"checkpoint-*{step}")
        found = reopened(folder)
        straight = run("native", adapted(), max_steps=step, epochs=2)
        assert agree(found, weights_of(straight)), step
    assert trainer.progress.step == 3


@pytest.mark.parametrize("kind", TRAINERS)
def test_adapters_replace_nothing_unasked(kind: str, tmp_path: Path) -> None:
    model = peft.get_peft_model(llama(), lora(), adapter_name="named")
    trainer = make(kind, model)
    trainer.save_model(tmp_path / "model")
    with pytest.raises(ConfigError, match=r"named/adapter_config.json' already exists. Pass overwrite=True"):
        trainer.save_model(tmp_path / "model")
    trainer.save_model(tmp_path / "model", overwrite=True)
    make(kind, llama()).save_model(tmp_path / "plain")
    with pytest.raises(ConfigError, match=r"model.safetensors' already exists"):
        trainer.save_model(tmp_path / "plain")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="it is a file"):
        trainer.save_model(tmp_path / "file")


def test_a_stock_trainer_goes_on_from_a_checkpoint_without_the_base(tmp_path: Path) -> None:
    def arguments(name: str, steps: int) -> TrainingArguments:
        return TrainingArguments(
            str(tmp_path / name), max_steps=steps, per_device_train_batch_size=4, save_strategy="steps", save_steps=2,
            learning_rate=0.05, report_to="none", use_cpu=True, disable_tqdm=True,
        )  # fmt: skip

    ours = HFTrainer(adapted(), arguments("ours", 2), Tokens(8), stock_checkpoints=True)
    ours.train()
    stock: Any = Stock(adapted(seed=5), arguments("stock", 2), train_dataset=Tokens(8))
    stock.train(resume_from_checkpoint=str((tmp_path / "ours" / "last").resolve()))
    assert agree(dict(stock.model.named_parameters()), weights_of(ours))


def test_adapters_are_saved_from_modules_that_are_compiled(tmp_path: Path) -> None:
    model = adapted()
    layers = model.base_model.model.model.layers
    layers[0] = torch.compile(layers[0], backend="eager")
    trainer = run("native", model, tmp_path / "run", max_steps=1, epochs=None)
    trainer.save_model(tmp_path / "model")
    after = {name.replace("_orig_mod.", ""): one for name, one in weights_of(trainer).items()}
    for folder in (tmp_path / "model", tmp_path / "run" / "last"):
        assert agree(reopened(folder), after), folder
    resumed = make("native", adapted(), tmp_path / "run", epochs=1)
    resumed.load_checkpoint(tmp_path / "run" / "last")
    assert agree(weights_of(resumed), after)
