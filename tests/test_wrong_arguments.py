"""Whatever is passed for an argument: it works, or an error of ours names the argument; nothing is written."""

import inspect
import math
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from marks import TRAINERS, thinned
from recipes import rows, t16
from torch import nn

from omnitrain import Callback, Trainer
from omnitrain.core.errors import OmnitrainError

NUMBERS: dict[str, Any] = {
    "0": 0, "-1": -1, "-2": -2, "1": 1, "0.5": 0.5, "-0.5": -0.5, "nan": math.nan, "inf": math.inf, "-inf": -math.inf,
    "2**63": 2**63, "2**64": 2**64, "10**400": 10**400, "1e308": 1e308, "1+1j": 1 + 1j, "True": True, "False": False,
}  # fmt: skip
OTHERS: dict[str, Any] = {
    "None": None, "empty string": "", "word": "wrong", "path of a function": "os.system", "path of a module": "os.path",
    "path of a class": "collections.OrderedDict", "dots": "...", "null": "a\0b", "bytes": b"x", "list": [], "tuple": (),
    "dict": {}, "list of a number": [1], "list of None": [None], "dict of a number": {"a": 1}, "set": {1},
    "object": object(), "class": Callback, "type": int, "a loss as a class": nn.CrossEntropyLoss, "module": math,
    "tensor": torch.tensor([1.0, 2.0]), "generator": (x for x in [1]), "path": Path("nowhere"),
    "a list of a class": [Callback], "a layer": nn.ReLU(), "device": torch.device("cpu"), "dtype": torch.float64,
    "slice": slice(1), "long string": "x" * 5000,
}  # fmt: skip
VALUES = NUMBERS | OTHERS
SKIPPED = {
    ("num_workers", "2**63"), ("num_workers", "2**64"), ("num_workers", "10**400"),  # would start so many
    ("compile", "True"), ("compile", "dict"),  # needs a compiler
    ("deepspeed_config", "dict"), ("deepspeed_config", "dict of a number"),  # needs processes
}  # fmt: skip
ALSO = {
    "args": ["training_args"], "training_args": ["train_dataset"], "optimization_metric": ["optimization_direction"],
}  # fmt: skip
"""What an error may name instead."""
OF_THE_USER = (
    "data_collator", "loss_fn", "unit", "compute_metrics", "early_stopper", "preprocess_logits_for_metrics",
    "log_steps", "eval_steps", "save_steps",
)  # fmt: skip
"""What is called with the user's data, or the progress, and may raise what it likes there."""


def arguments_of(kind: type) -> list[str]:
    names = inspect.signature(kind.__init__).parameters
    return [name for name in names if name not in ("self", "unknown", "save_dir")]


def outcome(kind: Any, name: str, value: Any) -> str:
    """Return "" if an argument is accepted or rejected well, else what went wrong."""
    options: dict[str, Any] = {
        "model": t16(), "train_dataset": rows(8), "eval_dataset": rows(4), "loss_fn": F.mse_loss, "progress_bar": False,
        "batch_size": 4, "epochs": 1, **({"device": "cpu"} if kind is Trainer else {}),
        **({"max_steps": 2} if name == "epochs" else {}), **({"save_dir": "run"} if name == "save_total_limit" else {}),
    }  # fmt: skip
    if name in ("train_loader", "eval_loader"):
        del options[name.replace("loader", "dataset")], options["batch_size"]
    doing = "constructed"
    try:
        trainer = kind(**{**options, name: value})
        doing = "trained"
        if not name.endswith(("_dataset", "_loader", "training_args")):
            trainer.train()
    except Exception as error:
        if doing == "trained" and name in OF_THE_USER:
            return ""
        file = traceback.extract_tb(error.__traceback__)[-1].filename
        is_ours = isinstance(error, OmnitrainError) or (isinstance(error, TypeError) and "omnitrain" in file)
        is_reported = any(argument in str(error) for argument in (name, *ALSO.get(name, ())))
        if not is_ours or not (is_reported or doing == "trained"):
            return f"{doing}: {type(error).__name__} {str(error)[:150]!r} in {file}"
    return ""


CASES = [("native", name) for name in arguments_of(Trainer)]
"""All arguments of `Trainer`; of the others only their own ones, and for `HFTrainer` half of the shared ones."""
for kind, shared in (("accelerate", []), ("hf", arguments_of(Trainer)[1::2])):
    CASES += [(kind, name) for name in arguments_of(TRAINERS[kind]) if name in shared or ("native", name) not in CASES]
QUICK = [("native", "optimizer"), ("accelerate", "accelerator"), ("hf", "args")]


@pytest.mark.parametrize(("kind", "name"), thinned(CASES, QUICK))
@pytest.mark.filterwarnings("ignore")
def test_any_value_works_or_is_rejected_by_name(
    kind: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    wrong = {}
    for shown, value in VALUES.items():
        if (name, shown) not in SKIPPED:
            failure = outcome(TRAINERS[kind], name, value)
            wrong |= {shown: failure} if failure else {}
    assert not wrong
    if name != "save_total_limit":
        assert list(tmp_path.iterdir()) == []
