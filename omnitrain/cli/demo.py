"""The `omnitrain demo` command: two small trainings on real data.

`digits` tells handwritten digits apart, `stdlib` learns to write like Python's standard library. Both use public names
only, and are meant to be read after the quickstart. Reading the command line belongs in `main.py`.
"""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset, random_split

from omnitrain import BaseTrainer, ConfigError, DataError, MissingExtraError, __version__

SEED = 0


# --- digits: which digit is on an image of 8 x 8 pixels?


def digits(trainer_class: type[BaseTrainer], out: Path, **changes: Any) -> BaseTrainer:
    """Train a small convolutional network on scikit-learn's 1,797 handwritten digits, and test it.

    Args:
        trainer_class: The trainer to use.
        out: The folder for weights, metrics and curves.
        changes: Arguments of the trainer that replace the demo's own.

    Raises:
        MissingExtraError: scikit-learn, which the images come with, is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise MissingExtraError("`omnitrain demo --data digits`", "scikit-learn", "metrics") from error

    pixels, labels = load_digits(return_X_y=True)
    images = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    samples = TensorDataset(images, torch.tensor(labels))
    train, valid, test = random_split(samples, [1200, 297, 300], torch.Generator().manual_seed(SEED))

    torch.manual_seed(SEED)
    model = nn.Sequential(
        *(nn.Conv2d(1, 16, kernel_size=3, padding=1), nn.ReLU()),
        *(nn.Conv2d(16, 32, kernel_size=3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Dropout(0.25), nn.Linear(32 * 4 * 4, 64), nn.ReLU(), nn.Linear(64, 10)),
    )
    arguments: dict[str, Any] = {
        "loss_fn": F.cross_entropy,
        "compute_metrics": "accuracy",
        "epochs": 30,
        "patience": 5,
        "batch_size": 32,
        "eval_batch_size": 300,
        "learning_rate": 2e-3,
        "log_steps": "1ep",
        "save_dir": out,
        "save_total_limit": 1,
        "overwrite": True,
        "seed": SEED,
    }
    trainer = trainer_class(model, train, valid, test, **(arguments | changes))
    prepare_folder(trainer, out, "digits")
    trainer.train()
    results = trainer.test()
    _keep_results(trainer, out)
    if trainer.is_main_process:
        print(f"test accuracy on {len(test)} images that it never saw: {results['test_accuracy']:.4f}")
    return trainer


# --- stdlib: which character comes next in a Python program?

MODULES = (
    *("argparse", "ast", "base64", "calendar", "configparser", "csv", "dataclasses", "difflib", "doctest"),
    *("fractions", "heapq", "inspect", "json", "logging", "optparse", "pdb", "random", "statistics", "tarfile"),
    *("textwrap", "traceback", "typing", "uuid", "zipfile"),
)
CHARACTERS_PER_MODULE = 24_000
BLOCK = 64
# All of ASCII; whatever else is in a text becomes a question mark.
VOCABULARY = 128


class CharacterGPT(nn.Module):
    """A transformer that predicts the next character from up to 64 before it.

    Args:
        width: The size of the vector that stands for a character.
        layers: How many transformer blocks.
        heads: How many attention heads in a block.

    >>> CharacterGPT()(torch.zeros(1, 10, dtype=torch.long)).shape
    torch.Size([1, 10, 128])
    """

    def __init__(self, width: int = 64, layers: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.characters: nn.Embedding = nn.Embedding(VOCABULARY, width)
        self.positions: nn.Embedding = nn.Embedding(BLOCK, width)
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.blocks: nn.TransformerEncoder = nn.TransformerEncoder(
            layer, layers, nn.LayerNorm(width), enable_nested_tensor=False
        )
        self.head: nn.Linear = nn.Linear(width, VOCABULARY)
        for embedding in (self.characters, self.positions):  # PyTorch's own 1.0 drowns what the blocks add at first
            nn.init.normal_(embedding.weight, std=0.1)

    def forward(self, characters: Tensor) -> Tensor:
        """Return logits of shape (texts, positions, vocabulary) for characters of shape (texts, positions)."""
        positions = self.positions.weight[: characters.shape[1]]
        mask = nn.Transformer.generate_square_subsequent_mask(len(positions), positions.device, positions.dtype)
        return self.head(self.blocks(self.characters(characters) + positions, mask, is_causal=True))

    @torch.no_grad()
    def write(self, start: str, length: int, temperature: float = 0.7) -> str:
        """Return `start` with `length` more characters, drawn one by one; the same ones every time."""
        self.eval()
        generator = torch.Generator().manual_seed(SEED)
        text = to_characters(start)
        for _ in range(length):
            logits = self(text[None, -BLOCK:].to(self.head.weight.device))[0, -1].float().cpu()
            drawn = torch.multinomial((logits / temperature).softmax(dim=-1), 1, generator=generator)
            text = torch.cat([text, drawn])
        return bytes(text.tolist()).decode("ascii").expandtabs(4)


def stdlib(trainer_class: type[BaseTrainer], out: Path, **changes: Any) -> BaseTrainer:
    """Train a tiny character-level GPT on the source text of Python's standard library, and let it write.

    Args:
        trainer_class: The trainer to use.
        out: The folder for weights, metrics and curves.
        changes: Arguments of the trainer that replace the demo's own.
    """
    characters = to_characters(read_sources())
    blocks = (len(characters) - 1) // BLOCK
    inputs, labels = characters[: blocks * BLOCK], characters[1 : blocks * BLOCK + 1]
    samples = TensorDataset(inputs.view(blocks, BLOCK), labels.view(blocks, BLOCK))
    train, valid, test = random_split(samples, [0.9, 0.05, 0.05], torch.Generator().manual_seed(SEED))

    torch.manual_seed(SEED)
    model = CharacterGPT()
    arguments: dict[str, Any] = {
        "loss_fn": next_character_loss,
        "epochs": 5,
        "batch_size": 16,
        "eval_batch_size": 64,
        "learning_rate": 5e-3,
        "weight_decay": 0.01,
        "lr_scheduler": "cosine",
        "warmup_steps": 50,
        "eval_steps": "0.5ep",
        "log_steps": 50,
        "save_dir": out,
        "save_total_limit": 1,
        "overwrite": True,
        "seed": SEED,
    }
    trainer = trainer_class(model, train, valid, test, **(arguments | changes))
    prepare_folder(trainer, out, "stdlib")
    if trainer.is_main_process:
        print(f"{len(characters):,} characters from the standard library's {', '.join(MODULES)}")
    trainer.train()
    results = trainer.test()
    _keep_results(trainer, out)
    if trainer.is_main_process:
        print(f"test loss, in nats per character (guessing: 4.85): {results['test_loss']:.4f}")
        print(f"\nwhat it writes after 'def ':\n\n{model.write('def ', 400)}")
    return trainer


def read_sources() -> str:
    """Return the beginnings of some modules of Python's standard library as one text, indented by tabs.

    One character for an indentation instead of four leaves the model more of the text to learn from.

    Raises:
        DataError: This Python came without the source of its library.
    """
    sources = []
    for name in MODULES:
        spec = find_spec(name)
        source = spec.loader.get_source(name) if spec and hasattr(spec.loader, "get_source") else None  # type: ignore
        if source is None:
            raise DataError(
                f"This Python has no source text of its module {name!r}. Try `omnitrain demo --data digits`."
            )
        sources.append(source.replace("    ", "\t")[:CHARACTERS_PER_MODULE])
    return "\n".join(sources)


def to_characters(text: str) -> Tensor:
    """Return the ASCII codes of a text."""
    return torch.tensor(list(text.encode("ascii", errors="replace")))


def next_character_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross entropy over all characters of a batch."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


# --- the folder that a demo leaves

_MARK = "demo.json"
_FILES = ("metrics.json", "metrics.jsonl", "curves.png", "model/model.safetensors")


def prepare_folder(trainer: BaseTrainer, out: Path, data: str) -> None:
    """Make the demo's folder, or clear the results of an earlier demo from it; nothing else is touched.

    Checkpoints of an earlier demo go when the trainer has one to put in their place (`overwrite=True`).

    Raises:
        ConfigError: The folder holds something else, or cannot be written.
    """
    if not trainer.is_main_process:
        return
    mark = out / _MARK
    try:
        if out.is_dir() and any(out.iterdir()) and not mark.exists():
            raise ConfigError(
                f"{str(out)!r} is not empty and was not made by the demo. Give a new folder with --out, or empty it."
            )
        out.mkdir(parents=True, exist_ok=True)
        made_by = {"made_by": f"omnitrain {__version__} demo", "trainer": type(trainer).__name__, "data": data}
        mark.unlink(missing_ok=True)
        with mark.open("x", encoding="utf-8") as file:  # not through a link that somebody may have put there
            file.write(json.dumps(made_by, indent=2) + "\n")
        for name in _FILES:
            (out / name).unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"Cannot write to {str(out)!r}: {error}. Give another folder with --out.") from error


def _keep_results(trainer: BaseTrainer, out: Path) -> None:
    trainer.save_model(out / "model", overwrite=True)
    if not trainer.is_main_process:
        return
    trainer.metrics.to_json(out / "metrics.json")
    try:
        trainer.metrics.plot(out / "curves.png")
    except MissingExtraError as error:
        print(f"No curves: {error}")
    print(f"\n{trainer.metrics}\n\nin {out}: {', '.join(sorted(path.name for path in out.iterdir()))}")
