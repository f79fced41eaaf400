"""Metrics of text by name: from texts, tokens and scores, on every trainer and in any split."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from tiny import Tokens, t5
from torch import nn
from torchmetrics.text import CharErrorRate, CHRFScore, SacreBLEUScore, WordErrorRate
from transformers import Seq2SeqTrainingArguments

from omnitrain import HFTrainer, StepOutput
from omnitrain.core.errors import ConfigError, DataError, MissingExtraError
from omnitrain.metrics.scorer import make_scorer

NAMES = ["wer", "cer", "bleu", "chrf"]
SAID = ["the cat sat on a mat", "it is raining again today", "no", "completely other words than before"]
MEANT = ["the cat sat on the mat", "it is raining again", "no", "none of these is right"]


class Words:
    """A tokenizer whose tokens are words; 0 is its padding."""

    def batch_decode(self, rows: Any, skip_special_tokens: bool = False, **options: Any) -> list[str]:
        assert skip_special_tokens
        return [" ".join(f"w{token}" for token in row if token) for row in rows]

    save_pretrained = print


class Letters(Words):
    """A tokenizer of CTC, which merges repeated tokens unless told not to."""

    word_delimiter_token = "|"

    def batch_decode(self, rows: Any, skip_special_tokens: bool = False, group_tokens: bool = True) -> list[str]:
        rows = [[t for i, t in enumerate(row) if not group_tokens or not i or row[i - 1] != t] for row in rows]
        return super().batch_decode(rows, skip_special_tokens)


def expected() -> dict[str, float]:
    several = [[reference] for reference in MEANT]
    metrics = {"wer": WordErrorRate(), "cer": CharErrorRate(), "bleu": SacreBLEUScore(), "chrf": CHRFScore(6, 0)}
    return {name: float(m(SAID, several if name in ("bleu", "chrf") else MEANT)) for name, m in metrics.items()}


def test_text_metrics_are_those_of_the_whole_set() -> None:
    scorers = [make_scorer(NAMES) for _ in range(3)]
    scorers[0].update(SAID[:1], MEANT[:1])
    scorers[1].update(SAID[1:], MEANT[1:])  # the third rank has no samples
    for scorer in scorers[1:]:
        scorers[0].merge(scorer.states())
    assert scorers[0].compute() == expected() and scorers[0].names == NAMES
    assert scorers[0].higher_is_better == {"wer": False, "cer": False, "bleu": True, "chrf": True}
    assert make_scorer("wer").compute() == {}


def test_text_metrics_decode_tokens_and_scores() -> None:
    labels = torch.tensor([[3, 4, 5, 0], [6, -100, -100, -100]])
    tokens = torch.tensor([[3, 4, 7, 0, 0], [6, 0, 0, 0, 0]])  # generated ones have a width of their own
    scores = nn.functional.one_hot(torch.tensor([[3, 4, 7, 0], [6, 9, 9, 9]]), 10).float()
    cases: list[Any] = [(Words(), out, labels, 0.25) for out in (tokens, scores, (scores, None), {"logits": scores})]
    path = nn.functional.one_hot(torch.tensor([[3, 3, 0, 3, 4]]), 6).float()  # of CTC: repetitions are merged
    cases.append((Letters(), path, torch.tensor([[3, 3, 4, -100, -100]]), 0.0))
    for processing_class, outputs, targets, expected in cases:
        scorer = make_scorer("wer", processing_class=processing_class)
        scorer.update(outputs, targets)
        assert scorer.compute() == {"wer": expected}


@pytest.mark.parametrize(("outputs", "processing_class", "error", "message"), [
    (torch.zeros(2, 3, 4), None, DataError, "needs texts or tokens, and the outputs are a tensor of shape .2, 3"),
    (torch.zeros(2), Words(), DataError, "needs texts or tokens"),
    (torch.zeros(2, 3, 4), object(), ConfigError, "object has no method `batch_decode`"),
])  # fmt: skip
def test_text_metrics_reject(outputs: Any, processing_class: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        make_scorer("wer", processing_class=processing_class).update(outputs, torch.zeros(2, 3, dtype=torch.long))


def test_text_metrics_need_torchmetrics(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torchmetrics" else find(name))
    with pytest.raises(MissingExtraError, match=r"'wer' needs torchmetrics.*pip install torchmetrics"):
        make_scorer(["accuracy", "wer"])
    with pytest.raises(ConfigError, match="Did you mean 'chrf'"):
        make_scorer("chrff")


class Speaker(nn.Module):
    """A unit that reads texts: it says MEANT or SAID, by the sample."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def __call__(self, batch: Any) -> Any:
        return self.weight * batch["number"].float().mean()

    def evaluate(self, batch: Any) -> StepOutput:
        numbers = batch["number"].tolist()
        return StepOutput(self(batch), [SAID[n] for n in numbers], [MEANT[n] for n in numbers])


def test_trainers_take_text_metrics_by_name(trainer_class: Any) -> None:
    rows, unit = [{"number": number} for number in range(4)], Speaker()
    options: dict[str, Any] = {"unit": unit, "compute_metrics": NAMES, "optimization_metric": "wer"}
    for size in (1, 3):
        results = trainer_class(unit, rows, rows, progress_bar=False, eval_batch_size=size, **options).evaluate()
        assert {name: results[f"eval_{name}"] for name in NAMES} == expected()


def test_generated_answers_are_scored_by_name(tmp_path: Any) -> None:
    arguments = Seq2SeqTrainingArguments(
        output_dir=str(tmp_path), predict_with_generate=True, generation_max_length=6, report_to=[], disable_tqdm=True
    )
    trainer = HFTrainer(t5(), arguments, compute_metrics=["wer", "chrf"], processing_class=Words())
    predictions, labels, metrics = trainer.predict(Tokens(5, "pairs"))
    texts = (Words().batch_decode(tokens.clip(0).tolist(), True) for tokens in (predictions, labels))
    assert metrics["test_wer"] == float(WordErrorRate()(*texts))
