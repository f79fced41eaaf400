"""Work at intervals of a run, and generated texts."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from counting import Streamed
from recipes import StopAt, Trace, fit, rows, same, small_trainer, t16, weights
from resuming import Cut, Killed
from tiny import Tokens, llama

from omnitrain import EMA, Callback, ConfigError, Periodic, Preview, Trainer


def trained(kind: Any = Trainer, *callbacks: Callback, resume: Any = None, **options: Any) -> Any:
    options = {"model": t16(dropout=0.2), "data": rows(24), "log_steps": 2, "learning_rate": 0.01, **options}
    return fit(small_trainer(kind=kind, callbacks=callbacks, **options), resume_from=resume)


def draws(trainer: Any) -> dict[str, float]:
    assert not trainer.model.training
    return {"drawn": float(torch.rand(()))}


def last_step(trainer: Any) -> dict[str, float]:
    return {"last_step": trainer.progress.step}


def test_periodic_work_changes_no_weights(trainer_class: Any) -> None:
    listener, preview = Trace(), Preview([1], "1ep", function=lambda model, prompt: str(torch.rand(())))
    watched = trained(trainer_class, listener, Periodic(draws, "3ba"), Periodic(last_step, "1ep"), preview)
    assert watched.model.training
    assert same(weights(watched.model), weights(trained(trainer_class).model))
    assert [row["step"] for row in listener.logs if "drawn" in row] == [3, 6, 9, 12]
    assert [(row["step"], row["last_step"]) for row in listener.logs if "last_step" in row] == [(6, 6), (12, 12)]
    assert [step for step, values in listener.reports if "preview/0" in values] == [6, 12]


@pytest.mark.parametrize(
    ("every", "stop"), [("1ep", 4), ("1ep", 6), ("3ba", 4), ("3ba", 6), (["1ep", "4ba after 5ba"], 6)]
)
def test_resumed_run_repeats_and_skips_no_work(every: Any, stop: int, tmp_path: Path) -> None:
    steps: list[int] = []
    periodic = Periodic(lambda trainer: steps.append(trainer.progress.step), every)
    trained(Trainer, periodic, StopAt(stop), save_dir=tmp_path, save_steps=6)
    trained(Trainer, periodic, save_dir=tmp_path, resume="auto")
    assert steps == {"1ep": [6, 12], "3ba": [3, 6, 9, 12]}.get(str(every), [6, 8, 12])


def test_values_that_wait_for_a_row_are_resumed(trainer_class: Any, tmp_path: Path) -> None:
    """The end of a stream of unknown length comes after the row of its last step."""

    def train(folder: str, *callbacks: Callback, resume: Any = None) -> list[dict[str, float]]:
        listener = Trace()
        callbacks = (Periodic(last_step, "1ep"), listener, *callbacks)
        with contextlib.suppress(Killed):
            trained(trainer_class, *callbacks, data=Streamed(rows(24)), save_dir=tmp_path / folder, resume=resume)
        return [{name: row[name] for name in ("step", "last_step") if name in row} for row in listener.logs]

    straight = train("straight")
    train("cut", Cut("kill", 6))
    assert straight[3] == {"step": 8, "last_step": 6}
    assert train("cut", resume="auto") == straight[3:]


def test_main_only_is_rejected_with_sharded_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = trained(Trainer, Periodic(draws, "2ba", main_only=True), max_steps=2)
    monkeypatch.setattr(type(trainer.backend), "forward_is_collective", True, raising=False)
    trained(Trainer, Periodic(draws, "2ba"), max_steps=2)
    with pytest.raises(ConfigError, match="main_only=True"):
        trained(Trainer, Periodic(draws, "2ba", main_only=True), max_steps=2)


def failing(trainer: Any) -> None:
    raise ValueError("no such benchmark")


@pytest.mark.parametrize(("policy", "count"), [("warn", 3), ("disable", 1), ("raise", 0)])
def test_periodic_errors_are_handled_by_on_error(policy: Any, count: int, caplog: pytest.LogCaptureFixture) -> None:
    periodic = Periodic(failing, 4) if policy == "warn" else Periodic(failing, 4, on_error=policy)
    with pytest.raises(ValueError, match="no such benchmark") if policy == "raise" else contextlib.nullcontext():
        trained(Trainer, periodic)
    assert caplog.text.count("Periodic(failing) failed at step") == count
    assert ("the run continues: ValueError: no such benchmark" in caplog.text) == (policy != "raise")


def test_timeout_ends_a_generator_and_fails_a_function(monkeypatch: Any, caplog: pytest.LogCaptureFixture) -> None:
    clock = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])

    def parts(trainer: Any) -> Iterator[dict[str, float]]:
        yield {"first": 1.0}
        clock[0] += 0.3
        yield {"second": 2.0}
        raise AssertionError("it continues after its limit")

    def slow(trainer: Any) -> dict[str, float]:
        clock[0] += 0.3
        return {"slow": 1.0}

    listener = Trace()
    trained(Trainer, listener, Periodic(parts, 12, timeout=0.2), Periodic(slow, 12, timeout=0.2))
    (row,) = (row for row in listener.logs if "first" in row)
    assert row["second"] == 2.0 and "slow" not in row
    assert "was ended at step 12 by `timeout=0.2`" in caplog.text
    assert "it took longer than `timeout=0.2` seconds" in caplog.text


class Words:
    def __call__(self, text: str, return_tensors: str) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.tensor([[int(word) for word in text.split()]])}

    def decode(self, tokens: torch.Tensor, skip_special_tokens: bool) -> str:
        return "words " + " ".join(map(str, tokens.tolist()))


def texts_of(kind: Any, *previews: Callback, **options: Any) -> tuple[Any, Any]:
    listener = Trace()
    options = {"model": llama(), "data": Tokens(8), "epochs": 1, "learning_rate": 0.1, "loss_fn": None, **options}
    trainer = trained(kind, listener, *previews, **options)
    return trainer, [values["preview/0"] for _, values in listener.reports]


def test_preview_texts_are_those_of_generate(trainer_class: Any) -> None:
    trainer, texts = texts_of(trainer_class, Preview(["5 6"], 1, 4, processing_class=Words(), do_sample=False))
    trainer.model.eval()
    ids = trainer.model.generate(torch.tensor([[5, 6]]), max_new_tokens=4, do_sample=False)[0]
    assert len(texts) == 2 and texts[-1] == "words " + " ".join(map(str, ids.tolist()))
    _, texts = texts_of(trainer_class, Preview([[5, 6]], 2, 50, timeout=0.000001))
    assert len(texts[0].split()) == 3  # of the prompt, and one more


def test_preview_needs_generate_and_a_tokenizer() -> None:
    with pytest.raises(ConfigError, match="a model with a method `generate`, which Sequential lacks"):
        trained(Trainer, Preview([[1]], 1))
    with pytest.raises(ConfigError, match="holds texts, and the trainer has no tokenizer"):
        texts_of(Trainer, Preview(["5"], 1))


def norm(model: Any, prompt: Any) -> str:
    return str(model.lm_head.weight.detach().norm())


def test_preview_uses_averaged_weights() -> None:
    trainer, norms = texts_of(Trainer, Preview([0], "1ep", function=norm), algorithms=[EMA(decay=0.5)])
    assert norms == [norm(trainer.model, 0)]  # which the run leaves averaged
