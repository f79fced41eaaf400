"""Speech recognition with CTC: sound of unequal length in, digits out; where each digit is sounding, nobody says.

    python examples/speech_ctc.py

The sound is made here: digits as the pairs of tones of a telephone's keys, of any length and pitch, with pauses
and noise. The collator pads both sound and digits; the loss is told the lengths, so padding does not count.
In plain PyTorch: about 50 lines for padding, loops, error rate and the best weights; with unit and trainer 36.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from omnitrain import StepOutput, Trainer

RATE, LOW, HIGH = 4000, (697, 770, 852, 941), (1209, 1336, 1477)  # of the keys' rows and columns, in hertz
KEYS = [(3, 1), *((key // 3, key % 3) for key in range(9))]  # of the digits 0 to 9


def speak(generator: torch.Generator) -> dict[str, Any]:
    """Return the log spectrum of one to six digits, a row for each 32 ms, and the digits."""

    def between(low: float, high: float) -> float:
        return low + (high - low) * float(torch.rand((), generator=generator))

    digits = torch.randint(10, (int(between(1, 7)),), generator=generator)
    pitch, pieces = between(0.97, 1.03), []
    for row, column in (KEYS[digit] for digit in digits.tolist()):
        time = torch.arange(int(RATE * between(0.08, 0.2))) / RATE
        tones = [torch.sin(2 * math.pi * pitch * hertz * time) for hertz in (LOW[row], HIGH[column])]
        pieces += [sum(tones) * between(0.3, 1.0), torch.zeros(int(RATE * between(0.06, 0.15)))]
    sound = torch.cat(pieces)
    sound = sound + 0.3 * torch.randn(sound.shape, generator=generator)
    spectrum = torch.stft(sound, 256, 128, window=torch.hann_window(256), return_complex=True).abs()
    return {"input_features": spectrum.T.log1p(), "input_lengths": spectrum.shape[1], "labels": digits}


class Recognizer(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.entrance = nn.Conv1d(129, width, 3, padding=1)
        self.memory = nn.GRU(width, width, batch_first=True)  # in both directions, it would begin with the padding
        self.head = nn.Linear(width, 11)  # ten digits, and the blank

    def forward(self, input_features: Tensor) -> Tensor:
        features = self.entrance(input_features.transpose(1, 2)).relu().transpose(1, 2)
        return self.head(features + self.memory(features)[0]).log_softmax(-1)


class CTC:
    """The loss of all digits of a batch, and in an evaluation the digits that were understood."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __call__(self, batch: dict[str, Tensor]) -> StepOutput:
        scores, labels = self.model(batch["input_features"]), batch["labels"]
        lengths, counts = batch["input_lengths"], (labels >= 0).sum(1)  # the collator pads labels with -100
        loss = F.ctc_loss(scores.transpose(0, 1), labels.clamp(min=0), lengths, counts, blank=10, reduction="sum")
        return StepOutput(loss, scores, labels, num_targets=counts.sum())

    def evaluate(self, batch: dict[str, Tensor]) -> StepOutput:
        output = self(batch)
        best = [row[:length] for row, length in zip(output.outputs.argmax(-1), batch["input_lengths"], strict=True)]
        digits = [row.unique_consecutive() for row in best]
        output.outputs = pad_sequence([row[row < 10] for row in digits], batch_first=True, padding_value=-100)
        return output


def distance(first: list[int], second: list[int]) -> int:
    """Return how many digits must be put in, taken out or changed to turn one list into the other."""
    costs = list(range(len(second) + 1))
    for i, a in enumerate(first, 1):
        previous, costs = costs, [i]
        for j, b in enumerate(second, 1):
            costs.append(min(previous[j] + 1, costs[-1] + 1, previous[j - 1] + (a != b)))
    return costs[-1]


def lists(rows: Any) -> list[list[int]]:
    return [row[row >= 0].tolist() for row in rows]


def error_rate(eval_pred: Any) -> dict[str, float]:
    pairs = list(zip(*map(lists, eval_pred), strict=True))
    return {"digit_error_rate": sum(distance(*pair) for pair in pairs) / sum(len(digits) for _, digits in pairs)}


def main(epochs: int = 6) -> dict[str, float]:
    generator = torch.Generator().manual_seed(0)
    train, valid = ([speak(generator) for _ in range(count)] for count in (800, 200))
    torch.manual_seed(0)  # the weights that the model starts from
    model = Recognizer()
    trainer = Trainer(
        model,
        train,
        valid,
        unit=CTC(model),
        compute_metrics=error_rate,
        optimization_metric="digit_error_rate",
        epochs=epochs,
        batch_size=16,
        eval_batch_size=100,
        learning_rate=3e-3,
        lr_scheduler="cosine",
    )
    best = trainer.train()["best_valid"]
    print(f"best evaluation: epoch {best['epoch']}, {best['digit_error_rate']:.1%} of the digits wrong")
    heard = lists(trainer.predict(valid[:4]).predictions)
    for sample, digits in zip(valid, heard, strict=False):
        print(f"{sample['input_lengths']:3} frames: said {sample['labels'].tolist()}, heard {digits}")
    return best


if __name__ == "__main__":
    main()
