"""Names of other trainers: what is not there says what it is called here, and real errors stay as they are."""

import importlib
from typing import Any

import pytest
import torch.nn.functional as F
from marks import TRAINERS
from recipes import rows, t16, trainer_on_cpu

import omnitrain
from omnitrain import BaseTrainer, EarlyStopping, Trainer
from omnitrain.core.foreign_names import ATTRIBUTES, CALLS, IMPORTS, explain_call


def make(kind: str) -> Any:
    return trainer_on_cpu(TRAINERS[kind], t16(), rows(8), loss_fn=F.mse_loss, max_steps=1)


@pytest.mark.parametrize("kind", TRAINERS)
def test_foreign_attributes_exist_or_name_ours(kind: str) -> None:
    trainer = make(kind)
    missing = [name for name in ATTRIBUTES if not hasattr(trainer, name)]  # HFTrainer has some, such as `args`
    assert len(missing) > {"native": 130, "accelerate": 130, "hf": 90}[kind]
    for name in missing:
        with pytest.raises(AttributeError) as caught:
            getattr(trainer, name)
        assert str(caught.value) == f"{type(trainer).__name__} has no attribute {name!r}. {ATTRIBUTES[name]}"
    assert not hasattr(trainer, "fit") and getattr(trainer, "fit", 3) == 3
    with pytest.raises(AttributeError, match=r"object has no attribute 'no_such_name'$"):
        _ = trainer.no_such_name


def test_attribute_error_inside_property_stays() -> None:
    class Mine(Trainer):
        history = property(lambda self: self.rows_of_mine)

    trainer = trainer_on_cpu(Mine, t16(), rows(8), loss_fn=F.mse_loss, max_steps=1)
    with pytest.raises(AttributeError, match="rows_of_mine"):
        _ = trainer.history


@pytest.mark.parametrize("function", CALLS)
def test_foreign_arguments_name_ours(function: str) -> None:
    call = getattr(make("native") if hasattr(BaseTrainer, function) else omnitrain, function)
    for name, remedy in CALLS[function].items():
        with pytest.raises(TypeError) as caught:
            call(**{name: 1})
        assert f"`{name}`: {remedy} It is called as {function}(" in str(caught.value)


def test_call_that_does_not_fit_shows_how_it_is_called() -> None:
    trainer = make("native")
    with pytest.raises(TypeError, match=r"'path'. It is called as save_model\(path, overwrite=False\)."):
        trainer.save_model()
    with pytest.raises(TypeError, match=r"It is called as save_checkpoint\(\)."):
        trainer.save_checkpoint("model.ckpt")
    with pytest.raises(TypeError, match=r"It is called as EarlyStopping\(patience=None, stopper=None\)."):
        EarlyStopping(1, None, "loss")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"^object of type 'int' has no len\(\)$"):
        explain_call(lambda number: len(number))(3)  # an error of the function itself stays


def test_foreign_imports_name_ours() -> None:
    assert not IMPORTS.keys() & set(omnitrain.__all__)
    for name, remedy in IMPORTS.items():
        with pytest.raises(ImportError) as caught:
            exec(f"from omnitrain import {name}")
        assert str(caught.value) == f"omnitrain has no {name}. {remedy}"
    with pytest.raises(ImportError, match=r"omnitrain\.callbacks has no ModelCheckpoint. `save_dir`"):
        exec("from omnitrain.callbacks import ModelCheckpoint")
    assert not hasattr(omnitrain, "no_such_name")


@pytest.mark.parametrize("package", ["algorithms", "callbacks", "loggers"])
def test_packages_have_their_public_names(package: str) -> None:
    module = importlib.import_module(f"omnitrain.{package}")
    names = " ".join(text for part, text in omnitrain._EXPORTS.items() if part.startswith(f"{package}.")).split()
    assert len(names) > 2 and all(getattr(module, name) is getattr(omnitrain, name) for name in names)
    with pytest.raises(AttributeError, match=f"module 'omnitrain.{package}' has no attribute 'Trainer'"):
        _ = module.Trainer


@pytest.mark.parametrize("remedies", [ATTRIBUTES, IMPORTS, *CALLS.values()])
def test_remedies_hold_no_further_names(remedies: dict[str, str]) -> None:
    assert not [remedy for remedy in remedies.values() if " ->" in remedy]
