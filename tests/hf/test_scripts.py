"""The scripts of `examples/hf`, with the import of HFTrainer, and with that of transformers in its place.

Losses are compared where the order of samples has no effect: with the full set in each step.
"""

import functools
import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import transformers
import transformers.trainer
from marks import thinned

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "hf"
IMPORT = re.compile(r"^from omnitrain import HFTrainer as (\w+)  # or: (from transformers import \1)$", re.M)
SMALL = {
    "text_classification": ("--max_seq_length", "24", "--max_predict_samples", "12"),
    "causal_lm": ("--block_size", "16"),
    "token_classification": ("--max_seq_length", "32", "--max_predict_samples", "12"),
    "question_answering": ("--max_seq_length", "48", "--max_predict_samples", "12"),
    "summarization": ("--max_source_length", "24", "--max_predict_samples", "12"),
}
"""The scripts, with arguments that make them quick."""
ALIKE = ("--hidden_size", "16", "--dropout", "0", "--max_train_samples", "24", "--max_eval_samples", "12")


@functools.cache
def data_of(name: str, *sizes: int) -> Any:
    """Return what a script makes for data, of a part of the library."""
    module = module_of(name)
    if hasattr(module, "load_texts"):
        module.PACKAGES = ("json",)
        return module.load_texts()
    if name in ("token_classification", "question_answering"):
        module.PACKAGES = ("json", "logging")
    return module.load_data(*sizes)


def module_of(name: str, stock: bool = False) -> Any:
    """Return a script as a module, with the one line changed if it is to train with transformers."""
    text = (FOLDER / f"{name}.py").read_text(encoding="utf-8")
    assert len(IMPORT.findall(text)) == 1
    text = IMPORT.sub(r"\2", text) if stock else text
    assert ("omnitrain import" in text) != stock
    module = ModuleType(f"script_{name}")
    sys.modules[module.__name__] = module  # where its dataclasses are looked up
    exec(compile(text, str(FOLDER / f"{name}.py"), "exec"), vars(module))
    return module


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs a script with arguments, and returns the folder that it wrote into."""
    monkeypatch.setattr(transformers.trainer, "round", lambda value, digits=None: value, raising=False)  # all digits

    def run(name: str, stock: bool, *arguments: Any, folder: str = "run") -> Path:
        module, place = module_of(name, stock), tmp_path / f"{folder}-{'stock' if stock else 'ours'}"
        for maker in ("load_data", "load_texts"):
            monkeypatch.setattr(module, maker, functools.partial(data_of, name), raising=False)
        options = ["--output_dir", place, "--use_cpu", "--disable_tqdm", "True", *SMALL[name], *ALIKE, *arguments]
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *map(str, options)])
        module.main()
        return place

    return run


def history(folder: Path, key: str = "loss") -> list[float]:
    """Return what `trainer_state.json` has of a number."""
    rows = json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))["log_history"]
    return [row[key] for row in rows if key in row]


def results(folder: Path) -> dict[str, float]:
    """Return the metrics that a script has saved, without the times that they took."""
    metrics: dict[str, float] = {}
    for split in ("eval", "predict"):
        path = folder / f"{split}_results.json"
        metrics |= json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    of_time = ("_runtime", "_per_second", "_time", "epoch", "flos")
    return {name: value for name, value in metrics.items() if not name.endswith(of_time)}


WHOLE = ("--per_device_train_batch_size", 64, "--num_train_epochs", 4, "--logging_steps", 1)
RESUMED = ("--per_device_train_batch_size", 4, "--max_steps", 6, "--save_steps", 2, "--save_strategy", "steps")


@pytest.mark.parametrize("name", thinned(SMALL, ["question_answering"]))
def test_script_has_the_losses_of_transformers(run: Any, name: str) -> None:
    """Where the order of samples has no effect."""
    if name == "causal_lm" and tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 10):
        pytest.skip("transformers divided by the first token of a text too, for which there is no loss")
    ours, stock = (run(name, stock, *WHOLE, "--save_strategy", "no") for stock in (False, True))
    losses = history(ours), history(stock)
    assert len(losses[0]) == len(losses[1]) == 4
    assert losses[0][-1] < losses[0][0]
    assert losses[0] == pytest.approx(losses[1], abs=2e-6)
    assert results(ours) == pytest.approx(results(stock), rel=1e-5)


@pytest.mark.parametrize("name", thinned(["text_classification", "summarization"], ["text_classification"]))
def test_script_resumes_only_from_a_checkpoint_argument(run: Any, name: str) -> None:
    options = (*RESUMED, "--max_steps", 4, "--logging_steps", 1)
    first = run(name, False, *options)
    losses, metrics = history(first), results(first)
    assert len(losses) == 4 and {path.name for path in first.glob("checkpoint-*")} == {"checkpoint-2", "checkpoint-4"}
    run(name, False, *options, "--do_train", "False", "--model_name_or_path", first)
    assert results(first) == pytest.approx(metrics, rel=1e-5)  # of the model that it has saved
    run(name, False, *options)
    assert (history(first), results(first)) == (losses, metrics)
    run(name, False, *options, "--resume_from_checkpoint", first / "checkpoint-2", folder="resumed")
    resumed = first.parent / "resumed-ours"
    assert (history(resumed), results(resumed)) == (losses, metrics)
