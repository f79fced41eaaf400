"""Work at intervals of a run: when it is done, what is restored, errors, limits, and texts of a model."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from recipes import StopAt, rows, same, t16, weights
from tiny import Tokens, llama

from omnitrain import (
    EMA,
    AccelerateTrainer,
    Callback,
    ConfigError,
    Distributions,
    HFTrainer,
    Periodic,
    Preview,
    Trainer,
)

TRAINERS = [Trainer, AccelerateTrainer, HFTrainer]


class Seen(Callback):
    """Keeps rows and reports."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []
        self.reports: list[tuple[int, dict[str, Any]]] = []

    def on_log(self, trainer: Any, logs: Mapping[str, float]) -> None:
        self.rows.append(dict(logs))

    def on_report(self, trainer: Any, values: Mapping[str, Any]) -> None:
        self.reports.append((trainer.progress.step, dict(values)))


def trained(kind: Any = Trainer, *callbacks: Callback, resume: Any = None, **options: Any) -> Any:
    options = {"epochs": 2, "log_steps": 2, "learning_rate": 0.01, **options}
    trainer = kind(
        t16(dropout=0.2), rows(24), batch_size=4, loss_fn=F.mse_loss, progress_bar=False, callbacks=callbacks, **options
    )
    trainer.train(resume_from=resume)
    return trainer


def draws(trainer: Any) -> dict[str, float]:
    assert not trainer.model.training
    return {"drawn": float(torch.rand(()))}


@pytest.mark.parametrize("kind", TRAINERS)
def test_a_run_is_the_same_to_the_bit_with_all_of_them(kind: Any) -> None:
    seen = Seen()
    watched = trained(
        kind, seen, Periodic(draws, "3ba"), Preview([1], "1ep", function=lambda model, prompt: str(torch.rand(()))),
        Distributions(of=("weights", "gradients", "updates", "activations")),
    )  # fmt: skip
    assert watched.model.training
    assert same(weights(watched.model), weights(trained(kind).model))
    assert [row["step"] for row in seen.rows if "drawn" in row] == [3, 6, 9, 12]
    assert [step for step, values in seen.reports if "preview/0" in values] == [6, 12]
    assert [row["step"] for row in seen.rows if "weights_norm/0.weight" in row] == [2, 4, 6, 8, 10, 12]


def test_values_at_the_end_of_an_epoch_are_in_the_row_of_its_last_step() -> None:
    seen = Seen()
    trained(Trainer, seen, Periodic(draws, "1ep"))
    assert [row["step"] for row in seen.rows if "drawn" in row] == [6, 12]


@pytest.mark.parametrize("every", ["1ep", "3ba"])
@pytest.mark.parametrize("stop", [4, 6])
def test_after_a_resume_nothing_is_done_twice_or_left_out(every: str, stop: int, tmp_path: Path) -> None:
    steps: list[int] = []

    def note(trainer: Any) -> None:
        steps.append(trainer.progress.step)

    trained(Trainer, Periodic(note, every), StopAt(stop), save_dir=tmp_path)
    trained(Trainer, Periodic(note, every), save_dir=tmp_path, resume="auto")
    assert steps == ([6, 12] if every == "1ep" else [3, 6, 9, 12])


def test_work_of_an_epoch_is_not_repeated_from_a_checkpoint_on_its_last_step(tmp_path: Path) -> None:
    steps: list[int] = []

    def note(trainer: Any) -> None:
        steps.append(trainer.progress.step)

    trained(Trainer, Periodic(note, "1ep"), save_dir=tmp_path, save_steps=6)
    steps.clear()
    trained(Trainer, Periodic(note, "1ep"), save_dir=tmp_path / "again", resume=tmp_path / "checkpoint-6")
    assert steps == [12]


def failing(trainer: Any) -> None:
    raise ValueError("no such benchmark")


def test_an_error_is_told_of_and_the_run_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "omnitrain"):
        trained(Trainer, Periodic(failing, 4))
    assert caplog.text.count("Periodic(failing) failed at step") == 3
    assert "the run goes on: ValueError: no such benchmark" in caplog.text


def test_an_error_disables_it_or_ends_the_run_if_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "omnitrain"):
        trained(Trainer, Periodic(failing, 4, on_error="disable"))
    assert caplog.text.count("Periodic(failing) failed at step") == 1
    with pytest.raises(ValueError, match="no such benchmark"):
        trained(Trainer, Periodic(failing, 4, on_error="raise"))


def test_work_that_yields_ends_at_the_limit_and_other_work_is_an_error(caplog: pytest.LogCaptureFixture) -> None:
    def parts(trainer: Any) -> Iterator[dict[str, float]]:
        yield {"first": 1.0}
        time.sleep(0.3)
        yield {"second": 2.0}
        raise AssertionError("it goes on after its limit")

    def slow(trainer: Any) -> dict[str, float]:
        time.sleep(0.3)
        return {"slow": 1.0}

    seen = Seen()
    with caplog.at_level(logging.WARNING, "omnitrain"):
        trained(Trainer, seen, Periodic(parts, 12, timeout=0.2), Periodic(slow, 12, timeout=0.2))
    (row,) = (row for row in seen.rows if "first" in row)
    assert row["second"] == 2.0 and "slow" not in row
    assert "was ended at step 12 by `timeout=0.2`" in caplog.text
    assert "it took longer than `timeout=0.2` seconds" in caplog.text


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ConfigError, match="`on_error` must be 'raise', 'warn' or 'disable', got 'warm'"):
        Periodic(draws, 1, on_error="warm")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="`timeout` must be a time"):
        Periodic(draws, 1, timeout="3ep")
    with pytest.raises(ConfigError, match="`prompts` must be a list"):
        Preview("text", 1)
    with pytest.raises(ConfigError, match="needs a model with a method `generate`, which Sequential has not"):
        trained(Trainer, Preview([[1]], 1))


# --- texts


class Words:
    """A tokenizer of numbers."""

    def __call__(self, text: str, return_tensors: str) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.tensor([[int(word) for word in text.split()]])}

    def decode(self, tokens: torch.Tensor, skip_special_tokens: bool) -> str:
        return "words " + " ".join(map(str, tokens.tolist()))


def texts_of(kind: Any, *previews: Callback, **options: Any) -> tuple[Any, Any]:
    seen = Seen()
    trainer = kind(
        llama(), Tokens(8), batch_size=4, epochs=1, learning_rate=0.1, progress_bar=False, callbacks=[seen, *previews],
        **options,
    )  # fmt: skip
    trainer.train()
    return trainer, [values["preview/0"] for _, values in seen.reports]


@pytest.mark.parametrize("kind", TRAINERS)
def test_texts_are_those_that_the_model_would_generate(kind: Any) -> None:
    trainer, texts = texts_of(kind, Preview(["5 6"], 1, 4, processing_class=Words(), do_sample=False))
    trainer.model.eval()
    ids = trainer.model.generate(torch.tensor([[5, 6]]), max_new_tokens=4, do_sample=False)[0]
    assert len(texts) == 2
    assert texts[-1] == "words " + " ".join(map(str, ids.tolist()))


def test_texts_are_of_the_averaged_weights() -> None:
    norms: list[float] = []

    def note(model: Any, prompt: Any) -> str:
        norms.append(float(model.lm_head.weight.detach().norm()))
        return "text"

    trainer, _ = texts_of(Trainer, Preview([0], "1ep", function=note), algorithms=[EMA(decay=0.5)])
    assert norms == [float(trainer.model.lm_head.weight.detach().norm())]  # which the run leaves averaged


def test_a_text_ends_at_the_limit_of_time() -> None:
    _, texts = texts_of(Trainer, Preview([[5, 6]], 2, 50, timeout=0.000001))
    assert len(texts[0].split()) == 3  # of the prompt, and one more


def test_texts_need_a_tokenizer() -> None:
    with pytest.raises(ConfigError, match="holds texts, and there is no tokenizer"):
        texts_of(Trainer, Preview(["5"], 1))
