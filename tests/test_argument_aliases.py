"""The names of other trainers' arguments: errors for unknown arguments, and the page that lists them."""

import ast
import functools
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import omnitrain
from omnitrain import AccelerateTrainer, BaseTrainer, ConfigError, HFTrainer, HFTrainingArguments, Trainer
from omnitrain.argument_aliases import VOCABULARY, advice
from omnitrain.cli.main import main
from omnitrain.contrib import nnscaler
from omnitrain.core.foreign_names import ATTRIBUTES, CALLS, IMPORTS

ROOT = Path(__file__).resolve().parent.parent
TRAINERS: dict[str, Any] = {kind.__name__: kind for kind in (Trainer, AccelerateTrainer, HFTrainer)}
NAMES = {name: meaning for names in VOCABULARY.values() for name, meaning in names.items()}


@functools.cache
def arguments_of(kind: Any) -> set[str]:
    return set(inspect.signature(kind.__init__).parameters) - {"self", "unknown"}


ALIASES = {
    "lr": "learning_rate", "per_device_train_batch_size": "batch_size", "grad_clip": "max_grad_norm",
    "max_epochs": "epochs", "save_folder": "save_dir", "validation_data": "eval_dataset",
    "mixed_precision": "autocast", "keep_last_n_checkpoints": "save_total_limit",
    "total_batch_size": "global_batch_size", "grad_accumulation_steps": "gradient_accumulation_steps",
}  # fmt: skip


@pytest.mark.parametrize("kind", TRAINERS)
def test_unknown_arguments_are_in_one_error_with_our_names(kind: str) -> None:
    for name, ours in ALIASES.items():
        with pytest.raises(TypeError, match=f"unexpected argument {name!r}. Here it is `{ours}`"):
            TRAINERS[kind](None, **{name: 1})
    wrong = {"unit": None, "data_reader": 1, "gamma": 1, "learning_rte": 1, "bananas": None, "max_num_steps": 30}
    with pytest.raises(TypeError) as caught:
        TRAINERS[kind](None, **wrong)
    assert str(caught.value).splitlines() == [
        f"{kind}() got 5 unexpected arguments:",
        "  'data_reader'. Here it is `train_loader`.",
        "  'gamma'. There is none: Pass it in `lr_scheduler_kwargs`, with the name of a schedule.",
        "  'learning_rte'. Did you mean 'learning_rate'?",
        "  'bananas'.",
        "  'max_num_steps'. Here it is `max_steps`.",
    ]


@pytest.mark.parametrize("kind", ["AccelerateTrainer", "HFTrainer"])
def test_argument_of_another_trainer_is_in_the_same_error(kind: str) -> None:
    with pytest.raises(TypeError, match=r"got 2 unexpected arguments:\n  'lr'.*\n  `device='cpu'` is an argument of"):
        TRAINERS[kind](None, lr=1, device="cpu")
    with pytest.raises(TypeError, match="got an unexpected argument 'lr'"):
        TRAINERS[kind](None, lr=1, device=None)
    with pytest.raises(ConfigError, match=r"^`device='cpu'` is an argument of Trainer"):
        TRAINERS[kind](None, device="cpu")


def test_all_unknown_training_arguments_are_in_one_error() -> None:
    with pytest.raises(TypeError) as caught:
        HFTrainingArguments("a", num_train_epoch=1, evaluation_strategy="no", bananas=2)
    assert str(caught.value).splitlines() == [
        "HFTrainingArguments() got 2 unexpected arguments:",
        "  'num_train_epoch'. Did you mean 'num_train_epochs'?",
        "  'bananas'.",
    ]


def test_aliases_point_to_existing_names() -> None:
    assert len(NAMES) == sum(map(len, VOCABULARY.values())) >= 300  # no name is there twice
    for name, meaning in NAMES.items():
        kind, _, ours = meaning.ours.rpartition(".")
        if ours.endswith("()"):
            assert callable(getattr(BaseTrainer, ours.removesuffix("()"))), name
        elif ours:
            assert ours in arguments_of(TRAINERS.get(kind, BaseTrainer)) and (name != ours or kind), name
        else:
            assert meaning.word, name
        assert name not in arguments_of(Trainer)


def test_hint_fits_by_argument() -> None:
    hints = {name: advice(name, [*arguments_of(Trainer)]) for name in NAMES}
    assert all(hints.values())
    for name in ("limit_val_batches", "eval_subset_num_batches", "max_val_steps", "max_evaluation_steps"):
        assert hints[name].startswith(" Here it is `eval_dataset`") and "EvalSet(dataset, subset=1000)" in hints[name]
    for name, text in {
        "limit_test_batches": "`test_dataset`", "num_sanity_val_steps": "`sanity`", "no_save": "`save_dir` (leave",
        "gradient_clip_algorithm": '`[GradientClipping("value", 0.5)]`', "save_best": "`keep_best`",
        "init_env_fn": "before the trainer is made", "deepspeed_config": "AccelerateTrainer",
        "args": "HFTrainer: `training_args`", "max_train_steps_per_epoch": "`torch.utils.data.Subset`",
    }.items():  # fmt: skip
        assert text in hints[name], name


def test_every_key_of_nnscaler_has_hint() -> None:
    assert set(nnscaler._KEYS[""]) <= NAMES.keys() | arguments_of(Trainer)
    common = {"no_save", "save_best", "save_last", "save_type", "every_n_epochs", "keep_last_n_checkpoints"}
    assert common <= set(nnscaler._KEYS["checkpoint"]) & NAMES.keys()


REMEDIES = [
    *(meaning.word for meaning in NAMES.values()), *ATTRIBUTES.values(), *IMPORTS.values(),
    *(remedy for names in CALLS.values() for remedy in names.values()),
]  # fmt: skip
CODE = sorted({code for remedy in REMEDIES for code in re.findall(r"`([^`]+)`", remedy)})
"""What hints quote as code."""
OF_THEIR_OWN = {"WithWarmup", "eval_", "*", "metrics.jsonl", "best", "last", "trainer:", "from_pretrained"}
PLACEHOLDERS = {
    "dataset", "folder", "parameters", "outputs", "labels", "batch", "length", "num_classes", "options", "path",
    "config", "trainer", "ignore",  "evaluate", "warmup", "Accelerator", "ParallelismConfig", "get_peft_model",
    "os", "int", "scipy", "backend", "log_values", "predictions", "settings", "transformers",
}  # fmt: skip
"""Names in an example that stand for a value, or are of a package that the hint names."""


def missing_names(code: str) -> set[str]:
    """Return the names in an example that do not exist, those of arguments of ours too."""
    modules = {"torch": torch, "nn": torch.nn, "trainer": BaseTrainer}
    known = set().union(*map(arguments_of, TRAINERS.values())) | {*dir(BaseTrainer), *modules, *PLACEHOLDERS}
    for name in CALLS:
        known |= {*inspect.signature(getattr(BaseTrainer, name, None) or getattr(omnitrain, name)).parameters}
    loading = vars(torch.utils.data)
    missing = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Name) and not (node.id in known or hasattr(omnitrain, node.id) or node.id in loading):
            missing.add(node.id)
        elif isinstance(node, ast.Attribute):
            root, *path = ast.unparse(node).split(".")
            thing = modules.get(root)
            for name in path if thing is not None else ():
                thing = getattr(thing, name, None)
                missing |= {ast.unparse(node)} if thing is None else set()
        elif isinstance(node, ast.Call) and (name := ast.unparse(node.func)) in omnitrain.__all__:
            parameters = inspect.signature(getattr(omnitrain, name)).parameters
            is_open = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
            missing |= {str(keyword.arg) for keyword in node.keywords if keyword.arg and not is_open} - {*parameters}
    return missing


def test_code_in_hints_exists(capsys: pytest.CaptureFixture[str]) -> None:
    for code in CODE:
        command, *words = code.split()
        if command == "omnitrain":
            with pytest.raises(SystemExit):
                main([words[0], "--help"])
            usage = capsys.readouterr().out
            assert all(word in usage for word in words if word.startswith("-")), code
        elif code not in (*OF_THEIR_OWN, "torchrun", "accelerate launch"):
            assert missing_names(code) == set(), code
    for name, code in (
        ("max_grad_nrm", "{}"), ("torch.nn.SyncBatchNrm", "{}(model)"), ("trainer.request_logs", "{}()"),
        ("subsets", "EvalSet(dataset, {}=3)"),
    ):  # fmt: skip
        assert missing_names(code.format(name)) == {name}


def chapters() -> dict[str, str]:
    """Return the chapters of the page with an example for each source of names."""
    page = (ROOT / "docs" / "coming-from.md").read_text(encoding="utf-8")
    return dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL))


SOURCES = [source for source in VOCABULARY if source != "Loops by hand"]
OF_OTHERS = {
    "Lightning": {"shuffle"}, "Composer": {"sampler", "batch_size"}, "accelerate": {"shuffle"},
    "fairseq2": {"reduction"}, "nnScaler": {"type", "args", "split", "val_args"},
}  # fmt: skip
"""What is no argument of a trainer in the examples of theirs."""


@pytest.mark.parametrize("source", SOURCES)
def test_coming_from_page_uses_aliases(source: str) -> None:
    assert set(chapters()) == {"Plain PyTorch", *SOURCES}
    text = chapters()[source]
    assert f"](names.md#{source.lower()})" in text
    (theirs, *printed), (ours, *_) = (
        re.findall(rf"^```{kind}\n(.*?)^```$", text, re.M | re.S) for kind in ("text", "python")
    )
    assert len(theirs.splitlines()) <= 13 and printed
    used = {*re.findall(r"[(\s{](\w+)=(?!=)", theirs)}
    used |= {*re.findall(r"[{\s](\w+): ", theirs)} if source == "nnScaler" else set()
    known = {*VOCABULARY[source], *NAMES, *arguments_of(Trainer)} | OF_OTHERS.get(source, set())
    assert used and used - known == set()
    assert re.search(r"Trainer\(", ours)
