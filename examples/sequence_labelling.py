"""Label every token of a sequence: a bidirectional GRU finds the ends of words in text without spaces.

    python examples/sequence_labelling.py

The data are comments from Python's standard library. The default collator pads tokens with 0 and labels with -100,
which the loss, the metrics and the weights of the batches leave out.
In plain PyTorch: about 40 lines for padding, loops, scores and the best weights; with the trainer 15.
"""

from __future__ import annotations

import random
import re
import sysconfig
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from omnitrain import Trainer


def load_sentences(limit: int) -> list[str]:
    """Return comments from the standard library, in lower case and with single spaces."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = "\n".join(file.read_text(encoding="utf-8") for file in files)
    comments = re.findall(r"^ *# ([A-Za-z][a-z]* [a-z ,.']{25,80})$", text, re.MULTILINE)
    return random.Random(0).sample(sorted({" ".join(comment.lower().split()) for comment in comments}), limit)


def to_sample(sentence: str) -> dict[str, Any]:
    """Return the letters of a sentence as tokens, with a label each: 1 where a word ends."""
    words = sentence.split()
    labels = [int(place == len(word) - 1) for word in words for place in range(len(word))]
    return {"tokens": list("".join(words).encode()), "labels": labels}


class Tagger(nn.Module):
    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.embedding = nn.Embedding(128, 32, padding_idx=0)
        self.layers = nn.GRU(32, width, batch_first=True, bidirectional=True)
        self.output = nn.Linear(2 * width, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.output(self.layers(self.embedding(tokens))[0]).transpose(1, 2)  # (samples, classes, length)


def main(epochs: int = 4, limit: int = 2000) -> dict[str, float]:
    sentences = load_sentences(limit)
    valid = len(sentences) // 8
    torch.manual_seed(0)  # the weights that the model starts from
    trainer = Trainer(
        Tagger(),
        list(map(to_sample, sentences[valid:])),
        list(map(to_sample, sentences[:valid])),
        loss_fn=nn.functional.cross_entropy,
        compute_metrics=["f1", "precision", "recall"],
        optimization_metric="f1",
        epochs=epochs,
        batch_size=32,
        learning_rate=5e-3,
        lr_scheduler="cosine",
        log_steps="1ep",
    )
    best = trainer.train()["best_valid"]
    sample = to_sample("the words of this sentence are found again")
    ends = trainer.predict([{"tokens": sample["tokens"]}]).predictions[0].argmax(axis=0)
    letters = zip(bytes(sample["tokens"]).decode(), ends, strict=True)

    print(f"{len(sentences)} sentences; the end of a word: F1 {best['f1']:.3f}, recall {best['recall']:.3f}")
    print("".join(letter + " " * int(is_end) for letter, is_end in letters))
    return dict(best)


if __name__ == "__main__":
    main()
