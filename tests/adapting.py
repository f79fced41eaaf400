"""Small models with adapters of PEFT, and runs of them."""

from pathlib import Path
from typing import Any

import torch
from marks import TRAINERS
from recipes import fit, trainer_on_cpu
from tiny import Tokens, llama


def lora(seed: int = 1, **options: Any) -> Any:
    """Return a configuration of adapters that are not zero, and seed their initialization."""
    import peft

    torch.manual_seed(seed)
    return peft.LoraConfig(
        **{"r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False, **options}
    )


def adapted(base: Any = None, **options: Any) -> Any:
    """Return a small language model with adapters."""
    import peft

    return peft.get_peft_model(llama() if base is None else base, lora(**options))


def make(kind: str, model: Any, save_dir: Path | None = None, **options: Any) -> Any:
    """Return a trainer of 4 sequences a step, 2 steps an epoch."""
    options = {"batch_size": 4, "learning_rate": 0.05, "epochs": 2, **options}
    return trainer_on_cpu(TRAINERS[kind], model, Tokens(8), save_dir=save_dir, **options)


def run(kind: str, model: Any, save_dir: Path | None = None, **options: Any) -> Any:
    """Train, and return the trainer."""
    return fit(make(kind, model, save_dir, **options))


def reopened(folder: Path, base: Any = None, adapter: str = "default") -> dict[str, torch.Tensor]:
    """Return the weights that PEFT loads from a checkpoint."""
    import peft

    base = llama() if base is None else base
    folder = folder if adapter == "default" else folder / adapter
    return dict(peft.PeftModel.from_pretrained(base, folder, adapter_name=adapter).named_parameters())


def weights_of(trainer: Any) -> dict[str, torch.Tensor]:
    """Return the trainer's weights by name."""
    return dict(trainer.get_model().named_parameters())


def agree(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    """Whether both have the same names, and tensors equal to the bit."""
    return actual.keys() == expected.keys() and all(torch.equal(actual[name], expected[name]) for name in actual)
