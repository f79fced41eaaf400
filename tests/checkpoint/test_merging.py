"""`omnitrain checkpoint` and checkpoints that hold a part of a model: exported, merged, shown, compared."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.nn.functional as F
from adapting import adapted, agree, lora, make, reopened, run, weights_of
from forging import content_of, seal
from recipes import rows, t16
from safetensors.torch import load_file
from tiny import Tokens, bert, llama
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from omnitrain import Trainer
from omnitrain.checkpoint.disk import FileSystem
from omnitrain.checkpoint.shards import own_blocks, write_shards
from omnitrain.cli import main


def answer(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str]:
    capsys.readouterr()
    code = main(["checkpoint", *map(str, words)])
    told = capsys.readouterr()
    return code, told.out + told.err


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "base"
    llama().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor], torch.Tensor]:
    """A run of adapters and a head of its own; its weights, and what it predicts."""
    folder = tmp_path_factory.mktemp("runs") / "lora"
    trainer = run("native", adapted(modules_to_save=["lm_head"]), folder)
    return folder, weights_of(trainer), logits(trainer.get_model())


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=Tokens(4).ids).logits


def test_export_writes_adapters_that_peft_opens(trained: Any, tmp_path: Path, capsys: Any) -> None:
    folder, weights, _ = trained
    code, told = answer(capsys, "export", folder, tmp_path / "out")
    assert code == 0 and "none of the adapters'" not in told
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    assert agree(reopened(tmp_path / "out"), weights)


def test_what_trained_beside_adapters_is_told_of_where_it_has_no_place_and_merged(
    base: Path, tmp_path: Path, capsys: Any, caplog: Any
) -> None:
    model = adapted(modules_to_save=["lm_head"])
    model.base_model.model.model.norm.requires_grad_(True)
    trainer = run("native", model, tmp_path / "run")
    trainer.save_model(tmp_path / "model")
    assert "1 weights that train are none of the adapters'" in caplog.text and "model.norm.weight" in caplog.text
    code, told = answer(capsys, "export", tmp_path / "run", tmp_path / "out")
    assert code == 0 and "1 tensors of the checkpoint are none of the adapters', and are not in it: base_model" in told
    code, told = answer(capsys, "export", tmp_path / "run", tmp_path / "merged", "--merge", base)
    assert code == 0 and torch.allclose(
        logits(AutoModelForCausalLM.from_pretrained(tmp_path / "merged")), logits(trainer.get_model()), atol=1e-12
    )


def test_adapters_are_merged_into_a_base_from_its_folder(trained: Any, base: Path, tmp_path: Path, capsys: Any) -> None:
    code, told = answer(capsys, "export", trained[0], tmp_path / "out", "--merge", base)
    assert code == 0, told
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert "lora" not in str(merged) and merged.dtype == torch.float64
    assert torch.allclose(logits(merged), trained[2], atol=1e-12)


def test_adapters_are_merged_into_the_base_in_the_checkpoint(tmp_path: Path, capsys: Any) -> None:
    trainer = run("native", adapted(modules_to_save=["lm_head"]), tmp_path / "run", save_frozen=True)
    code, told = answer(capsys, "export", tmp_path / "run", tmp_path / "out", "--merge")
    assert code == 0, told
    assert torch.allclose(
        logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out")), logits(trainer.get_model()), atol=1e-12
    )


def test_a_classifier_of_more_classes_than_its_base_says_is_merged(tmp_path: Path, capsys: Any) -> None:
    bert(num_labels=2).save_pretrained(tmp_path / "base")

    def build(labels: int) -> Any:
        return AutoModelForSequenceClassification.from_pretrained(
            tmp_path / "base", num_labels=labels, ignore_mismatched_sizes=True, dtype=torch.float64
        )

    config = lora(task_type="SEQ_CLS", target_modules=["query"])
    trainer = Trainer(
        peft.get_peft_model(build(3), config), Tokens(8, "classes"), epochs=1, save_dir=tmp_path / "run", device="cpu",
        learning_rate=0.05, progress_bar=False,
    )  # fmt: skip
    trainer.train()
    # the head of another process is another one, as it is made at random
    again = Trainer(
        peft.get_peft_model(build(3), config), Tokens(8, "classes"), epochs=2, save_dir=tmp_path / "run", device="cpu",
        learning_rate=0.05, progress_bar=False,
    )  # fmt: skip
    again.train(resume_from="auto")
    code, told = answer(capsys, "export", tmp_path / "run", tmp_path / "out", "--merge", tmp_path / "base")
    assert code == 0, told
    merged = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    assert torch.allclose(logits(merged), logits(again.get_model()), atol=1e-12)


def test_one_of_several_adapters_is_merged(base: Path, tmp_path: Path, capsys: Any) -> None:
    model = adapted()
    model.add_adapter("other", lora(2, r=3))
    trainer = run("native", model, tmp_path / "run")
    code, told = answer(capsys, "export", tmp_path / "run", tmp_path / "out", "--merge", base)
    assert code == 2 and "has the adapters default, other. Say which: --adapter NAME." in told
    code, told = answer(capsys, "export", tmp_path / "run", tmp_path / "out", "--merge", base, "--adapter", "others")
    assert code == 2 and "has no adapter 'others', only default, other" in told
    code, told = answer(capsys, "export", tmp_path / "run", tmp_path / "out", "--merge", base, "--adapter", "other")
    assert code == 0, told
    trainer.get_model().set_adapter("other")
    assert torch.allclose(
        logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out")), logits(trainer.get_model()), atol=1e-12
    )
    assert answer(capsys, "export", tmp_path / "run", tmp_path / "all")[0] == 0
    assert "base_model.model.lm_head.weight" in reopened(tmp_path / "all", adapter="other")
    assert answer(capsys, "export", tmp_path / "run", tmp_path / "x", "--adapter", "other")[0] == 2


def test_adapters_of_transformers_own_integration_are_merged(base: Path, tmp_path: Path, capsys: Any) -> None:
    model = llama()
    model.add_adapter(lora())
    trainer = run("native", model, tmp_path / "run")
    code, told = answer(capsys, "export", tmp_path / "run", tmp_path / "out", "--merge", base)
    assert code == 0, told
    assert torch.allclose(
        logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out")), logits(trainer.get_model()), atol=1e-12
    )


def test_another_base_a_quantised_one_and_none_are_refused(
    trained: Any, base: Path, tmp_path: Path, capsys: Any
) -> None:
    folder, out = trained[0], tmp_path / "out"
    llama(7).save_pretrained(tmp_path / "other")
    shutil.copytree(base, tmp_path / "quantised")
    config = json.loads((base / "config.json").read_text()) | {"quantization_config": {"quant_method": "gptq"}}
    (tmp_path / "quantised" / "config.json").write_text(json.dumps(config))
    for options, code, words in (
        ([tmp_path / "other"], 1, "the first of them 'base_model.model."),
        ([tmp_path / "quantised"], 2, "The base is quantised"),
        ([tmp_path / "nowhere"], 2, "which is not a folder"),
        ([], 2, "Pass the folder that the base of the run was loaded from: --merge BASE."),
    ):
        found, told = answer(capsys, "export", folder, out, "--merge", *options)
        assert found == code and words in told, told
        assert not out.exists() or not list(out.iterdir())


def test_what_peft_or_we_cannot_merge_is_refused(base: Path, tmp_path: Path, capsys: Any) -> None:
    torch.manual_seed(1)
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    run("native", peft.get_peft_model(llama(), config).double(), tmp_path / "prompt")
    code, told = answer(capsys, "export", tmp_path / "prompt", tmp_path / "out", "--merge", base)
    assert code == 2 and "PEFT cannot merge adapters of the kind PROMPT_TUNING" in told
    net = peft.get_peft_model(t16(), lora(target_modules=["0"]))
    options: dict[str, Any] = {"loss_fn": F.mse_loss, "device": "cpu", "progress_bar": False, "epochs": 1}
    Trainer(net, rows(8), save_dir=tmp_path / "plain", **options).train()
    code, told = answer(capsys, "export", tmp_path / "plain", tmp_path / "out", "--merge", base)
    assert code == 2 and "only your own code can build it" in told
    Trainer(t16(), rows(8), save_dir=tmp_path / "whole", **options).train()
    code, told = answer(capsys, "export", tmp_path / "whole", tmp_path / "out", "--merge", base)
    assert code == 2 and "there is nothing to merge" in told


@pytest.mark.parametrize("files", ["one", "several"])
def test_what_trained_and_what_did_not_become_one_model(files: str, tmp_path: Path, capsys: Any) -> None:
    model = llama()
    model.save_pretrained(tmp_path / "base", max_shard_size="2KB" if files == "several" else "1GB")
    assert (tmp_path / "base" / "model.safetensors").exists() is (files == "one")
    model.model.requires_grad_(False)
    trainer = run("native", model, tmp_path / "run", save_frozen=False)
    code, told = answer(capsys, "export", tmp_path / "run", tmp_path / "out")
    assert code == 2 and "--merge BASE" in told
    code, told = answer(capsys, "export", tmp_path / "run", tmp_path / "out", "--merge", tmp_path / "base")
    assert code == 0, told
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float64)
    assert agree(dict(again.named_parameters()), weights_of(trainer))


def divide(folder: Path) -> None:
    """Make of a checkpoint with whole weights what two ranks write."""
    content, weights = content_of(folder), load_file(folder / "model.safetensors")
    for path in folder.glob("model.safetensors*"):
        path.unlink()
        del content["files"][path.name]
    (folder / "model").mkdir()
    for rank, names in enumerate((sorted(weights)[::2], sorted(weights)[1::2])):
        blocks = {name: own_blocks(weights[name], 0) for name in names}
        entries = write_shards(blocks, folder / "model", rank, FileSystem())
        content["files"] |= {f"model/{name}": entry for name, entry in entries.items()}
    seal(folder, content)


def test_a_checkpoint_in_parts_is_a_base(tmp_path: Path, capsys: Any) -> None:
    model = llama()
    run("native", model, tmp_path / "base", epochs=1)
    model.model.requires_grad_(False)
    trainer = run("native", model, tmp_path / "run", epochs=1, save_frozen=False)
    base = (tmp_path / "base" / "last").resolve()
    divide(base)
    code, told = answer(capsys, "export", tmp_path / "run", tmp_path / "out", "--merge", base)
    assert code == 0, told
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float64)
    assert agree(dict(again.named_parameters()), weights_of(trainer))
    part = base / "model" / "rank-00001.safetensors"
    damaged = bytearray(part.read_bytes())
    damaged[-1] ^= 1
    part.write_bytes(damaged)
    code, told = answer(capsys, "export", tmp_path / "run", tmp_path / "again", "--merge", base)
    assert code == 1 and "'model/rank-00001.safetensors' does not match its sha256" in told
    assert not list((tmp_path / "again").iterdir())


def test_a_base_may_be_a_file_that_pytorch_has_written(tmp_path: Path, capsys: Any) -> None:
    model = llama()
    (tmp_path / "base").mkdir()
    torch.save(model.state_dict(), tmp_path / "base" / "pytorch_model.bin")
    model.model.requires_grad_(False)
    trainer = run("native", model, tmp_path / "run", epochs=1, save_frozen=False)
    code, told = answer(capsys, "export", tmp_path / "run", tmp_path / "out", "--merge", tmp_path / "base")
    assert code == 0, told
    assert agree(load_file(tmp_path / "out" / "model.safetensors"), weights_of(trainer))


def test_weights_that_did_not_train_are_told_and_compared(tmp_path: Path, capsys: Any) -> None:
    run("native", adapted(), tmp_path / "a", epochs=1)
    run("native", adapted(), tmp_path / "whole", epochs=1, save_frozen=True)
    other: Any = llama()
    nn.init.zeros_(other.model.norm.weight)
    run("native", adapted(other), tmp_path / "b", epochs=1)
    assert "without the 12 tensors that did not train" in answer(capsys, "show", tmp_path / "a")[1]
    _, told = answer(capsys, "diff", tmp_path / "a", tmp_path / "b")
    assert "1 of 12 tensors that did not train differ\nbase_model.model.model.norm.weight" in told
    _, told = answer(capsys, "diff", tmp_path / "a", tmp_path / "whole")
    assert "0 of 4 tensors differ" in told and "0 of 12 tensors that did not" in told and "only in" not in told


def as_it_was_saved_before(folder: Path) -> None:
    """Make of a whole checkpoint of adapters what the first versions have written."""
    content = content_of(folder)
    del content["frozen"], content["settings"]["save_frozen"]
    content["files"]["config.json"] = content["files"].pop("base_model/config.json")
    (folder / "base_model" / "config.json").rename(folder / "config.json")
    for name in ("README.md", "adapter_config.json", "adapter_model.safetensors", "base_model/generation_config.json"):
        content["files"].pop(name, None)
        (folder / name).unlink(missing_ok=True)
    seal(folder, content)


def test_a_checkpoint_of_adapters_from_before_is_resumed_and_exported_without_a_config_that_misreads_it(
    tmp_path: Path, capsys: Any
) -> None:
    straight = run("native", adapted())
    whole = run("native", adapted(), tmp_path / "run", save_frozen=True, epochs=1)
    as_it_was_saved_before((tmp_path / "run" / "last").resolve())
    code, told = answer(capsys, "export", tmp_path / "run", tmp_path / "out")
    assert code == 0, told
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]
    assert agree(load_file(tmp_path / "out" / "model.safetensors"), weights_of(whole))
    resumed = make("native", adapted(), tmp_path / "run")
    resumed.train(resume_from="auto")
    assert agree(weights_of(resumed), weights_of(straight))
