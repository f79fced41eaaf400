"""A language model of characters: a small transformer learns to write Python from the standard library.

    python examples/character_model.py

A sample is a function of some module. Most are shorter than the 128 characters that the model sees at once,
and some are longer: `PackedDataset` splits these, and puts several side by side in a row, each with its own positions
and seen by itself alone. Muon steps the matrices, AdamW all else.
In plain PyTorch: about 70 lines for loops, packing, both optimizers and the evaluation; with the trainer 17.
"""

from __future__ import annotations

import ast
import inspect
import sysconfig
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from omnitrain import CrossEntropy, PackedDataset, Trainer

LENGTH, WIDTH, HEADS = 128, 64, 4


def functions(modules: int, part: slice = slice(None)) -> list[dict[str, list[int]]]:
    """Return the functions, or a part of them, of the first modules of the standard library, as ASCII codes."""
    texts = [path.read_text("utf-8", "replace") for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))]
    nodes = [(text, node) for text in texts[:modules] for node in ast.walk(ast.parse(text))]
    sources = [ast.get_source_segment(text, node) for text, node in nodes if isinstance(node, ast.FunctionDef)]
    return [{"input_ids": list(inspect.cleandoc(source or "").encode("ascii", "replace"))} for source in sources[part]]


class Writer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.characters, self.positions = nn.Embedding(128, WIDTH), nn.Embedding(LENGTH, WIDTH)
        options: Any = {"dropout": 0.0, "activation": "gelu", "batch_first": True, "norm_first": True}
        blocks = [nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, **options) for _ in range(2)]
        self.blocks, self.head = nn.ModuleList(blocks), nn.Linear(WIDTH, 128)

    def forward(self, input_ids: Tensor, position_ids: Tensor, sequence_ids: Tensor) -> Tensor:
        x = self.characters(input_ids) + self.positions(position_ids)
        visible = (sequence_ids[:, :, None] == sequence_ids[:, None, :]).tril().repeat_interleave(HEADS, dim=0)
        for block in self.blocks:
            x = block(x, src_mask=~visible)
        return self.head(x)


def main(modules: int = 15) -> dict[str, float]:
    samples = functions(modules)
    options: Any = {"overlong": "split", "borders": ("position_ids", "sequence_ids")}
    train, valid = (PackedDataset(part, LENGTH, **options) for part in (samples[50:], samples[:50]))
    print(f"{len(samples)} functions in {len(train) + len(valid)} rows, {train.padding:.1%} of them padding")
    torch.manual_seed(0)  # the weights that the model starts from
    trainer = Trainer(
        Writer(),
        train,
        valid,
        loss_fn=CrossEntropy(shift=True),
        optimizer="muon",
        epochs=1,
        batch_size=16,
        learning_rate=1e-2,
        lr_scheduler="cosine",
        warmup_steps=0.05,
        log_steps="0.2dur",
    )
    best = trainer.train()["best_valid"]
    print(f"{best['loss'] / 0.6931:.2f} bits a character; 7 before training")
    return dict(best)


if __name__ == "__main__":
    main()
