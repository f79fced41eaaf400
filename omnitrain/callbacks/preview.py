"""Texts that the model generates in the course of a run, for people to read."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from omnitrain.callbacks.periodic import OnError, Periodic
from omnitrain.checkpoint.state_dicts import unwrap
from omnitrain.core.duration import Duration
from omnitrain.core.errors import ConfigError
from omnitrain.core.events import Histogram, TrainerLike
from omnitrain.model.units import generated


class Preview(Periodic):
    """Generates texts at an interval, with the weights that evaluations show, and sends them to every logger.

    They are reported as "preview/0", "preview/1", ... The model is in evaluation mode and in autocast; modes, weights
    and random numbers are restored, and each preview draws the same random numbers, so that two differ by the weights
    alone. Where the weights are sharded (FSDP 2, ZeRO) all ranks generate together, otherwise the main rank does.

    Args:
        prompts: Texts, which need a tokenizer, or token ids: lists of integers, tensors of one or two dimensions, or
            dicts of inputs for `model.generate`. With `function`, whatever it takes.
        every: The interval: steps, or a string such as "1ep", "500ba" or "0.1dur".
        max_new_tokens: How many tokens at most.
        processing_class: The tokenizer; None is that of the trainer, if it has one. Without one, texts are token ids.
        function: `function(model, prompt)` returns the text, for models without `generate`.
        timeout: How long all of it may take, such as "30s"; a text that is being generated ends there, and those
            after it are left out. None is no limit.
        on_error: What an error does: "raise" ends the run, "warn" logs it, and "disable" logs it and ends this
            callback for the rest of the run. An error on one rank counts on all of them.
        generate_options: Other arguments of `model.generate`, such as do_sample=True.

    Raises:
        ConfigError: If an argument is wrong.

    >>> callbacks = [Preview([[1, 5, 7]], every="500ba")]  # Trainer(..., callbacks=callbacks)
    """

    def __init__(
        self,
        prompts: Sequence[Any],
        every: int | str | Duration,
        max_new_tokens: int = 32,
        *,
        processing_class: Any = None,
        function: Callable[[Any, Any], str] | None = None,
        timeout: int | float | str | Duration | None = None,
        on_error: OnError = "warn",
        **generate_options: Any,
    ) -> None:
        super().__init__(function, every, timeout, on_error)
        if isinstance(prompts, (str, Mapping)) or not len(prompts):
            raise ConfigError(f"`prompts` must be a list of prompts, at least one, got {prompts!r:.200}.")
        if isinstance(max_new_tokens, bool) or not isinstance(max_new_tokens, int) or max_new_tokens < 1:
            raise ConfigError(f"`max_new_tokens` must be a positive integer, got {max_new_tokens!r}.")
        if function is not None and generate_options:
            raise ConfigError(
                f"{sorted(generate_options)[0]!r} is an argument of `model.generate`, which `function` replaces. Leave "
                "one of them out."
            )
        self.prompts: list[Any] = list(prompts)
        self.processing_class = processing_class
        self.options: dict[str, Any] = {"max_new_tokens": max_new_tokens, **generate_options}

    @property
    def name(self) -> str:
        """What messages call it."""
        return "Preview"

    def check(self, trainer: TrainerLike) -> None:
        """Refuse a model that cannot generate, and texts without a tokenizer.

        Raises:
            ConfigError: Naming the argument.
        """
        super().check(trainer)
        if self.function is not None:
            return
        model = unwrap(trainer.model)
        if not callable(getattr(model, "generate", None)):
            raise ConfigError(
                f"Preview needs a model with a method `generate`, which {type(model).__name__} has not. Pass "
                "function=f, with f(model, prompt) returning the text."
            )
        if self._tokenizer(trainer) is None and any(isinstance(one, str) for one in self.prompts):
            raise ConfigError(
                "`prompts` of Preview holds texts, and there is no tokenizer. Pass it as `processing_class`, or give "
                "token ids."
            )

    def runs_on_main_only(self, trainer: TrainerLike) -> bool:
        run: Any = trainer
        return not run.backend.forward_is_collective

    def work(self, trainer: TrainerLike) -> Iterator[Mapping[str, float] | None]:
        """Generate text by text, and report those that there are, even after an error or at the limit of time."""
        model, texts = unwrap(trainer.model), dict[str, str | Histogram]()
        try:
            for number, prompt in enumerate(self.prompts):
                text = self._text(trainer, model, prompt) if self.function is None else self.function(model, prompt)
                texts[f"preview/{number}"] = str(text)
                yield None
        finally:
            if texts:
                trainer.lifecycle.report(texts)

    def _tokenizer(self, trainer: TrainerLike) -> Any:
        return self.processing_class or getattr(trainer, "processing_class", None)

    def _text(self, trainer: TrainerLike, model: Any, prompt: Any) -> str:
        run, tokenizer = _parts(trainer), self._tokenizer(trainer)
        inputs = tokenizer(prompt, return_tensors="pt") if isinstance(prompt, str) else _inputs(prompt)
        inputs = {name: one.to(trainer.device) if hasattr(one, "to") else one for name, one in inputs.items()}
        options = {**self.options, "stopping_criteria": self._criteria(trainer)}
        tokens = generated(model, inputs, run.backend.forward_is_collective, options)
        texts = [
            " ".join(map(str, one.tolist())) if tokenizer is None else tokenizer.decode(one, skip_special_tokens=True)
            for one in tokens
        ]
        return "\n".join(texts)

    def _criteria(self, trainer: TrainerLike) -> Any:
        """Return what ends a text at the limit of time; it also tells other ranks that this one makes progress."""
        from transformers import StoppingCriteria, StoppingCriteriaList

        ranks, until = _parts(trainer).ranks, self._until

        class InTime(StoppingCriteria):
            def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
                ranks.progress_count += 1
                return torch.full((len(input_ids),), time.monotonic() > until, device=input_ids.device)

        own = self.options.get("stopping_criteria") or []
        return StoppingCriteriaList([*own, InTime()])


def _parts(trainer: TrainerLike) -> Any:
    return trainer


def _inputs(prompt: Any) -> Mapping[str, Any]:
    """Return token ids as inputs of `model.generate`."""
    if isinstance(prompt, Mapping):
        return prompt
    ids = torch.as_tensor(prompt)
    return {"input_ids": ids if ids.ndim == 2 else ids[None]}
