"""What a type checker and an editor see of the public API: planted mistakes, and scripts that are right.

pyright looks at each script below as at a user's own. A line that ends in `# wrong` must have an error, no other may.
"""

from __future__ import annotations

import inspect
import json
import re
import shutil
import sys
from pathlib import Path

import programs
import pytest

from omnitrain import AccelerateTrainer, HFTrainer, Trainer
from omnitrain.trainer.base import BaseTrainer

pytestmark = pytest.mark.processes

TRAINERS = [Trainer, AccelerateTrainer, HFTrainer]
EXAMPLES = sorted((Path(__file__).resolve().parent.parent / "examples" / "hf").glob("*.py"))
PYRIGHT = shutil.which("pyright", path=Path(sys.executable).parent)

CONSTRUCTOR = """
from collections.abc import Callable
from pathlib import Path
import numpy, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from omnitrain import {trainer} as Cls, Duration, EarlyStopping

model, data = nn.Linear(4, 2), TensorDataset(torch.ones(8, 4), torch.zeros(8))
loss_fn: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = nn.CrossEntropyLoss()

Cls(model, train_dataset=data, eval_dataset=data, batchsize=4)  # wrong
Cls(model, train_dataset=data, eval_dataset=data, lr_scheduler="lineer")  # wrong
Cls(model, train_dataset=data, eval_dataset=data, optimization_direction="maximum")  # wrong
Cls(model, train_dataset=data, eval_dataset=data, batch_size="32")  # wrong
Cls(model, train_dataset=data, eval_dataset=data, patience=2.5)  # wrong
Cls(model, train_dataset=data, eval_dataset=data, loss_fn="cross_entropy")  # wrong
Cls(model, train_dataset=data, eval_dataset=data, callbacks=EarlyStopping(3))  # wrong
Cls(model, train_dataset=data, eval_dataset=data, callbacks=[EarlyStopping])  # wrong
Cls(model, train_dataset=data, eval_dataset=data, algorithms=[EarlyStopping(3)])  # wrong
Cls("gpt2", train_dataset=data)  # wrong
Cls(model, None, data, data, data, 32)  # wrong

Cls(model, train_dataset=data, epochs=None, max_steps=10, max_duration="2ep", eval_steps=Duration(10, "ba"))
Cls(model, train_loader=DataLoader(data), eval_loader={{"a": DataLoader(data), "b": [1, 2]}}, save_dir=Path("x"))
Cls(model, train_dataset=data, optimizer=torch.optim.AdamW(model.parameters()), lr_scheduler="cosine", warmup_steps=10)
Cls(model, train_dataset=data, optimizer="SGD", lr_scheduler=lambda opt: torch.optim.lr_scheduler.StepLR(opt, 1))
Cls(model, train_dataset=data, optimizer=torch.optim.SGD, loss_fn=nn.MSELoss(), max_grad_norm=None)
Cls(model, train_dataset=data, loss_fn=loss_fn, compute_metrics=["f1"], optimization_metric="f1", patience=3)
Cls(model, train_dataset=data, callbacks=[EarlyStopping(3)], learning_rate=1, log_steps="1ep")
"""

OF_TRANSFORMERS = """
import transformers
from torch import nn
from omnitrain import EarlyStopping, HFTrainer

class Watch(transformers.TrainerCallback):
    pass

def score(evaluation: transformers.EvalPrediction) -> dict[str, float]:
    return {}

model, args = nn.Linear(4, 2), transformers.TrainingArguments("run")
HFTrainer(model, args, callbacks=[EarlyStopping])  # wrong
HFTrainer(model, args, callbacks=Watch())  # wrong

HFTrainer(model, args, callbacks=[transformers.EarlyStoppingCallback(3)])
HFTrainer(model, args, callbacks=[Watch, Watch(), EarlyStopping(3)], optimizers=(None, None))
trainer = HFTrainer(model=model, args=args, callbacks=None, compute_metrics=score)
step, loss, metrics = trainer.train(resume_from_checkpoint=True)
trainer.add_callback(Watch)
trainer.log_metrics("test", trainer.predict([1], metric_key_prefix="test").metrics)
trainer.evaluate([1], ["hidden_states"], "test")
print(trainer.state.global_step, trainer.args.learning_rate, trainer.control.should_save)

class Own(HFTrainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        self.control.should_log = True
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    def create_optimizer(self, model=None):
        return super().create_optimizer(model)

    def answers(self):
        scores, self.compute_metrics = self.compute_metrics, None
        loader = self.get_eval_dataloader()
        return self.evaluation_loop(loader, "evaluation", metric_key_prefix="eval").predictions
"""

RUN = """
from typing import Any
import torch
from omnitrain import {trainer} as Cls, Algorithm, Callback

def use(trainer: Cls) -> None:
    history = trainer.train()
    trainer.trian()  # wrong
    trainer.train(resume="last")  # wrong
    history.to_jsn()  # wrong
    history["best_valid"] + 1  # wrong
    history["best_step"].upper()  # wrong

    rows: list[float] = [row["eval_loss"] for row in history["valid"]]
    best: float = history["best_valid"]["accuracy"]
    at: int = history["best_step"]
    why: str = history["stop_reason"].upper()
    for name in history:
        print(history[name])
    metrics: dict[str, float] = trainer.evaluate()
    trainer.save_model("x")
    trainer.stop("enough")

class Watch(Callback):
    def on_step_end(self, trainer) -> None:
        trainer.request_evalute()  # wrong
        trainer.progress.stepp  # wrong
        trainer.request_evaluate()
        print(trainer.progress.step, trainer.metrics["valid"], trainer.model, trainer.optimizer.param_groups)

    def on_log(self, trainer, logs) -> None:
        logs.appendd  # wrong
        print(logs["loss"] * 2)

class Missing(Callback):
    def on_eval_end(self, trainer) -> None:  # wrong
        pass

class Scale(Algorithm):
    def transform_loss(self, trainer, loss) -> torch.Tensor:
        loss.bacward()  # wrong
        return loss * 2

class Text(Algorithm):
    def transform_loss(self, trainer, loss) -> str:  # wrong
        return "loss"

class Own(Cls):
    def _train_step(self, window) -> str:  # wrong
        return "yes"

    def _forward(self, batch: Any) -> Any:  # wrong
        return batch
"""


Errors = dict[str, dict[int, str]]


def mistakes(script: str) -> dict[int, str]:
    """Return the lines of a script that are marked as wrong."""
    return {n: line for n, line in enumerate(script.splitlines(), 1) if line.endswith("# wrong")}


@pytest.fixture(scope="module")
def errors_by_script(tmp_path_factory: pytest.TempPathFactory) -> Errors:
    """Return the lines that pyright finds an error in, of each script."""
    if PYRIGHT is None:
        pytest.skip("pyright is not installed")
    folder = tmp_path_factory.mktemp("scripts")
    for trainer in TRAINERS:
        for name, script in (("constructor", CONSTRUCTOR), ("run", RUN)):
            (folder / f"{name}_{trainer.__name__}.py").write_text(script.format(trainer=trainer.__name__))
    (folder / "of_transformers.py").write_text(OF_TRANSFORMERS)
    for path in EXAMPLES:
        # a trainer of transformers' for questions has other arguments than its base, which a stricter mode would report
        text = f"# pyright: basic\n{path.read_text(encoding='utf-8')}"
        (folder / f"{path.stem}_ours.py").write_text(text)
        stock = re.sub(r"^from omnitrain import .*# or: (.*)$", r"\1", text, flags=re.M)
        (folder / f"{path.stem}_stock.py").write_text(stock)
    ran = programs.run(PYRIGHT, "--outputjson", "--pythonpath", sys.executable, ".", cwd=folder)
    errors: Errors = {path.stem: {} for path in folder.glob("*.py")}
    for report in json.loads(ran.stdout)["generalDiagnostics"]:
        if report["severity"] == "error":
            errors[Path(report["file"]).stem].setdefault(report["range"]["start"]["line"] + 1, report["message"])
    return errors


@pytest.mark.parametrize("trainer", TRAINERS)
@pytest.mark.parametrize("name", ["constructor", "run"])
def test_pyright_finds_planted_mistakes(errors_by_script: Errors, name: str, trainer: type[BaseTrainer]) -> None:
    wrong = mistakes(CONSTRUCTOR if name == "constructor" else RUN)
    errors = errors_by_script[f"{name}_{trainer.__name__}"]
    assert [line for n, line in wrong.items() if n not in errors] == []
    assert {n: message for n, message in errors.items() if n not in wrong} == {}


def test_pyright_accepts_transformers_names(errors_by_script: Errors) -> None:
    assert errors_by_script["of_transformers"].keys() == mistakes(OF_TRANSFORMERS).keys()


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_pyright_accepts_either_import(errors_by_script: Errors, path: Path) -> None:
    assert (errors_by_script[f"{path.stem}_ours"], errors_by_script[f"{path.stem}_stock"]) == ({}, {})


@pytest.mark.parametrize("trainer", TRAINERS)
def test_arguments_are_typed_and_documented(trainer: type[BaseTrainer]) -> None:
    """Editors show the first line of the docstring of `__init__` in which `name:` stands.

    So the description has to fit on one line, and no line before it may end in the name of another argument.
    """
    arguments, shared = (dict(inspect.signature(kind).parameters) for kind in (trainer, BaseTrainer))
    assert set(shared) - set(getattr(trainer, "REFUSED", {})) <= set(arguments)
    assert [name for name, argument in arguments.items() if argument.annotation is argument.empty] == []
    assert not any(str(argument).startswith("*") for argument in arguments.values())
    lines = [line.strip() for line in inspect.cleandoc(trainer.__init__.__doc__ or "").splitlines()]
    descriptions = {name: next((line for line in lines if re.search(rf"{name}\s*:", line)), "") for name in arguments}
    assert [name for name, line in descriptions.items() if not re.match(rf"{name}: \S.*\.$", line)] == []
