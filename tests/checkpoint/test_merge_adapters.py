"""`omnitrain checkpoint` with checkpoints that have a part of a model: export, merge, show, diff."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from adapting import adapted, agree, lora, reopened, run, weights_of
from forging import shard, spoil
from marks import make_small
from recipes import fit, rows, t16
from safetensors.torch import load_file
from tiny import Tokens, bert, llama
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from omnitrain import Trainer

Command = Callable[..., tuple[int, str]]


@pytest.fixture
def command(command: Callable[..., tuple[int, str, str]]) -> Command:
    """`omnitrain checkpoint`, which returns its exit code and what it prints."""

    def call(*words: object) -> tuple[int, str]:
        code, output, errors = command("checkpoint", *words)
        return code, output + errors

    return call


@pytest.fixture
def export(command: Command, tmp_path: Path) -> Callable[..., str]:
    """Export the run in `tmp_path` to an empty folder "out" there, which must succeed; returns what is printed."""

    def call(*words: object, run: Path = tmp_path / "run") -> str:
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        code, output = command("export", run, tmp_path / "out", *words)
        assert code == 0, output
        return output

    return call


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "base"
    llama().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run with adapters and a trained head."""
    folder = tmp_path_factory.mktemp("runs") / "lora"
    return run("native", adapted(modules_to_save=["lm_head"]), folder, epochs=1)


def check_logits(folder: Path, trainer: Any, auto: Any = AutoModelForCausalLM) -> None:
    """Check that transformers opens a merged model in a folder, which predicts what the trained one does."""
    merged, ids = auto.from_pretrained(folder), Tokens(4).ids
    assert "lora" not in str(merged) and merged.dtype == torch.float64
    with torch.no_grad():
        results = [model.eval()(input_ids=ids).logits for model in (merged, trainer.get_model())]
    assert torch.allclose(*results, atol=1e-12)


def check_weights(folder: Path, trainer: Any) -> None:
    """Check that transformers opens a merged model in a folder with the trained weights."""
    merged = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    assert agree(dict(merged.named_parameters()), weights_of(trainer))


def test_export_writes_or_merges_adapters(trained: Any, base: Path, export: Any, tmp_path: Path) -> None:
    assert "belong to no adapter" not in export(run=trained.save_dir)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    assert agree(reopened(tmp_path / "out"), weights_of(trained))
    export("--merge", base, run=trained.save_dir)
    check_logits(tmp_path / "out", trained)


def test_export_reports_trained_weights_outside_adapters(base: Path, tmp_path: Path, export: Any, caplog: Any) -> None:
    model = adapted(modules_to_save=["lm_head"])
    model.base_model.model.model.norm.requires_grad_(True)
    trainer = run("native", model, tmp_path / "run", epochs=1)
    trainer.save_model(tmp_path / "model")
    assert "1 weights that train belong to no adapter" in caplog.text and "model.norm.weight" in caplog.text
    assert "1 tensors of the checkpoint belong to no adapter and are left out: base_model" in export()
    export("--merge", base)  # which has a place for them
    check_logits(tmp_path / "out", trainer)


def test_merge_with_or_without_the_base_in_the_checkpoint(base: Path, tmp_path: Path, export: Any) -> None:
    """The latter with adapters of transformers' own integration."""
    trainer = run("native", adapted(modules_to_save=["lm_head"]), tmp_path / "run", save_frozen=True, epochs=1)
    export("--merge")
    check_logits(tmp_path / "out", trainer)
    model = llama()
    model.add_adapter(lora())
    trainer = run("native", model, tmp_path / "other", epochs=1)
    export("--merge", base, run=tmp_path / "other")
    check_logits(tmp_path / "out", trainer)


def test_merge_a_classifier_with_more_classes(tmp_path: Path, export: Any) -> None:
    import peft

    def trainer(epochs: int) -> Trainer:
        """A trainer in a new process would have another random head, too."""
        model = AutoModelForSequenceClassification.from_pretrained(
            tmp_path / "base", num_labels=3, ignore_mismatched_sizes=True, dtype=torch.float64
        )
        model = peft.get_peft_model(model, lora(task_type="SEQ_CLS", target_modules=["query"]))
        return make_small("native", model, Tokens(8, "classes"), epochs=epochs, save_dir=tmp_path / "run", loss_fn=None)

    bert(num_labels=2).save_pretrained(tmp_path / "base")
    trainer(1).train()
    resumed = fit(trainer(2), resume_from="auto")
    export("--merge", tmp_path / "base")
    check_logits(tmp_path / "out", resumed, AutoModelForSequenceClassification)


def test_merge_one_of_several_adapters(base: Path, tmp_path: Path, export: Any, command: Command) -> None:
    model = adapted()
    model.add_adapter("other", lora(2, r=3))
    trainer = run("native", model, tmp_path / "run", epochs=1)
    for words, message in (
        (["--merge", base], "has the adapters default, other. Say which: --adapter NAME."),
        (["--merge", base, "--adapter", "others"], "has no adapter 'others', only default, other"),
        (["--adapter", "other"], "--adapter"),
    ):
        code, output = command("export", tmp_path / "run", tmp_path / "out", *words)
        assert code == 2 and message in output
    export("--merge", base, "--adapter", "other")
    trainer.get_model().set_adapter("other")
    check_logits(tmp_path / "out", trainer)
    assert command("export", tmp_path / "run", tmp_path / "all")[0] == 0
    assert "base_model.model.lm_head.weight" in reopened(tmp_path / "all", adapter="other")


def test_merge_rejects_other_bases(trained: Any, base: Path, tmp_path: Path, command: Command) -> None:
    llama(7).save_pretrained(tmp_path / "other")
    shutil.copytree(base, tmp_path / "quantised")
    config = json.loads((base / "config.json").read_text()) | {"quantization_config": {"quant_method": "gptq"}}
    (tmp_path / "quantised" / "config.json").write_text(json.dumps(config))
    out = tmp_path / "out"
    for options, code, message in (
        ([tmp_path / "other"], 1, "the first of them 'base_model.model."),
        ([tmp_path / "quantised"], 2, "The base is quantized"),
        ([tmp_path / "nowhere"], 2, "which is not a folder"),
        ([], 2, "Pass the folder that the base of the run was loaded from: --merge BASE."),
    ):
        exit_code, output = command("export", trained.save_dir, out, "--merge", *options)
        assert exit_code == code and message in output, output
        assert not out.exists() or not list(out.iterdir())


def test_merge_rejects_other_kinds(base: Path, tmp_path: Path, command: Command) -> None:
    import peft

    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    run("native", peft.get_peft_model(llama(), config).double(), tmp_path / "prompts", epochs=1)
    for name, model in (("rows", adapted(t16(), target_modules=["0"])), ("plain", t16())):
        make_small("native", model, rows(8), save_dir=tmp_path / name, epochs=1).train()
    for name, message in (
        ("prompts", "PEFT cannot merge adapters of the kind PROMPT_TUNING"), ("rows", "only your code can build it"),
        ("plain", "nothing has to be merged"),
    ):  # fmt: skip
        code, output = command("export", tmp_path / name, tmp_path / "out", "--merge", base)
        assert code == 2 and message in output


@pytest.fixture
def headed() -> Any:
    """A model of which only the head trains."""
    model = llama()
    model.model.requires_grad_(False)
    return model


@pytest.mark.parametrize("files", ["several", "bin"])
def test_merge_frozen_weights_from_a_base(files: str, headed: Any, tmp_path: Path, export: Any, command: Any) -> None:
    base = tmp_path / "base"
    if files == "bin":
        base.mkdir()
        torch.save(headed.state_dict(), base / "pytorch_model.bin")
    else:
        headed.save_pretrained(base, max_shard_size="2KB")
    assert not (base / "model.safetensors").exists()
    trainer = run("native", headed, tmp_path / "run", epochs=1, save_frozen=False)
    code, output = command("export", tmp_path / "run", tmp_path / "out")
    assert code == 2 and "--merge BASE" in output
    export("--merge", base)
    if files == "bin":  # without a config
        assert agree(load_file(tmp_path / "out" / "model.safetensors"), weights_of(trainer))
    else:
        check_weights(tmp_path / "out", trainer)


def test_merge_verifies_a_sharded_base(headed: Any, tmp_path: Path, export: Any, command: Command) -> None:
    run("native", llama(), tmp_path / "base", epochs=1)
    base = (tmp_path / "base" / "last").resolve()
    headed.load_state_dict(load_file(base / "model.safetensors"))
    trainer = run("native", headed, tmp_path / "run", epochs=1, save_frozen=False)
    shard(base)
    export("--merge", base)
    check_weights(tmp_path / "out", trainer)
    spoil(base / "model" / "rank-00001.safetensors", "flip")
    code, output = command("export", tmp_path / "run", tmp_path / "again", "--merge", base)
    assert code == 1 and "'model/rank-00001.safetensors' does not match its sha256" in output
    assert not list((tmp_path / "again").iterdir())


def test_show_and_diff_include_frozen_weights(tmp_path: Path, command: Command) -> None:
    run("native", adapted(), tmp_path / "a", epochs=1)
    run("native", adapted(), tmp_path / "full", epochs=1, save_frozen=True)
    other: Any = llama()
    nn.init.zeros_(other.model.norm.weight)
    run("native", adapted(other), tmp_path / "b", epochs=1)
    assert "without the 12 tensors that did not train" in command("show", tmp_path / "a")[1]
    output = command("diff", tmp_path / "a", tmp_path / "b")[1]
    assert "1 of 12 tensors that did not train differ\nbase_model.model.model.norm.weight" in output
    output = command("diff", tmp_path / "a", tmp_path / "full")[1]
    assert "0 of 4 tensors differ" in output and "0 of 12 tensors that did not" in output and "only in" not in output
