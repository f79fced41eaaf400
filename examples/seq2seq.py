"""Sequence to sequence: an encoder reads a date in words, and a decoder writes it in numbers.

    python examples/seq2seq.py

"thursday, march 05, 1987" becomes "1987-03-05". Training uses teacher forcing; afterwards `generate` writes a date
letter by letter. Both sequences are padded by the default collator.
In plain PyTorch: about 43 lines for padding, loops, evaluation and the best weights; with the trainer 11.
"""

from __future__ import annotations

import random
from datetime import date, timedelta

import torch
from torch import Tensor, nn

from omnitrain import Trainer


def make_samples(count: int) -> list[dict[str, list[int]]]:
    chance, spellings = random.Random(0), ["%A, %B %d, %Y", "%d %B %Y", "%b %d %Y", "%d/%m/%Y"]
    days = [date(1950, 1, 1) + timedelta(days=chance.randrange(36500)) for _ in range(count)]
    pairs = [(day.strftime(chance.choice(spellings)).lower(), day.isoformat()) for day in days]
    return [{"source": list(words.encode()), "labels": list(numbers.encode())} for words, numbers in pairs]


class Translator(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(128, width, padding_idx=0)
        self.reader = nn.GRU(width, width // 2, batch_first=True, bidirectional=True)
        self.writer = nn.GRU(width, width, batch_first=True)
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.output = nn.Linear(2 * width, 128)

    def forward(self, source: Tensor, labels: Tensor) -> dict[str, Tensor]:
        written = labels.clamp(min=0).roll(1, dims=1).index_fill(1, torch.tensor(0, device=labels.device), 1)
        logits = self.next_letters(source, written)
        return {"loss": nn.functional.cross_entropy(logits.transpose(1, 2), labels), "logits": logits}

    def next_letters(self, source: Tensor, written: Tensor) -> Tensor:
        memory, _ = self.reader(self.embedding(source))
        states, _ = self.writer(self.embedding(written))
        context, _ = self.attention(states, memory, memory, key_padding_mask=source == 0, need_weights=False)
        return self.output(torch.cat([states, context], dim=2))

    @torch.no_grad()
    def generate(self, source: list[int], length: int = 10) -> bytes:
        read = torch.tensor([source], device=self.output.weight.device)
        written = torch.ones_like(read[:, :1])  # writing begins with a 1
        for _ in range(length):
            written = torch.cat([written, self.next_letters(read, written)[:, -1:].argmax(dim=2)], dim=1)
        return bytes(written[0, 1:].tolist())


def main(epochs: int = 4, count: int = 4000) -> float:
    samples = make_samples(count)
    torch.manual_seed(0)  # the weights that the model starts from
    model = Translator()
    trainer = Trainer(
        model,
        samples[200:],
        samples[:200],
        compute_metrics="accuracy",
        epochs=epochs,
        batch_size=64,
        learning_rate=5e-3,
        log_steps="1ep",
    )
    letters = trainer.train()["best_valid"]["accuracy"]  # each after the right ones
    right = sum(model.generate(sample["source"]) == bytes(sample["labels"]) for sample in samples[:200]) / 200
    print(f"letters right: {letters:.3f}; whole dates right: {right:.3f}")
    print(bytes(samples[0]["source"]).decode(), "->", model.generate(samples[0]["source"]).decode())
    return right


if __name__ == "__main__":
    main()
