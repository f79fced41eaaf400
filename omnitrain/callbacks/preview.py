"""Sample texts generated at intervals of a run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from omnitrain.callbacks.periodic import OnError, Periodic
from omnitrain.checkpoint.state_dicts import unwrap
from omnitrain.core.duration import Duration, Interval
from omnitrain.core.errors import ConfigError, check_number
from omnitrain.core.events import Histogram, TrainerLike
from omnitrain.model.units import generated


class Preview(Periodic):
    """Generates texts at an interval, with the weights used in evaluations, and sends them to every logger.

    They are reported as "preview/0", "preview/1", ... The model is in evaluation mode and in autocast; modes, weights
    and random numbers are restored, and each preview draws the same random numbers, so that two differ only by the
    weights. With sharded weights (FSDP 2, ZeRO) all ranks generate together, otherwise only the main rank does.

    Args:
        prompts: Texts, which need a tokenizer, or token ids: lists of integers, tensors of one or two dimensions, or
            dicts of inputs for `model.generate`. With `function`, anything that it takes.
        every: The interval, as for `Periodic`.
        max_new_tokens: Maximum number of generated tokens.
        processing_class: The tokenizer; None is the trainer's. Without one, texts are token ids.
        function: `function(model, prompt)` returns the text, for models without `generate`.
        timeout: The longest duration of a preview, such as "30s"; the current text ends there, and later ones are
            skipped. None is no limit.
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
        every: Interval,
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
        check_number("max_new_tokens", max_new_tokens, least=1, is_whole=True)
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
        """The name in messages."""
        return "Preview"

    def check(self, trainer: TrainerLike) -> None:
        """Reject a model without `generate`, and texts without a tokenizer.

        Raises:
            ConfigError: If an argument does not work with this trainer.
        """
        super().check(trainer)
        if self.function is not None:
            return
        model = unwrap(trainer.model)
        if not callable(getattr(model, "generate", None)):
            raise ConfigError(
                f"Preview needs a model with a method `generate`, which {type(model).__name__} lacks. Pass "
                "function=f, with f(model, prompt) returning the text."
            )
        if self._tokenizer(trainer) is None and any(isinstance(prompt, str) for prompt in self.prompts):
            raise ConfigError(
                "`prompts` of Preview holds texts, and the trainer has no tokenizer. Pass `processing_class`, or give "
                "token ids."
            )

    def runs_on_main_only(self, trainer: Any) -> bool:
        return not trainer.backend.forward_is_collective

    def work(self, trainer: TrainerLike) -> Iterator[Mapping[str, float] | None]:
        """Generate the texts, and report those that are complete, even after an error or a timeout."""
        model, texts = unwrap(trainer.model), dict[str, str | Histogram]()
        try:
            for number, prompt in enumerate(self.prompts):
                text = self._generate(trainer, model, prompt) if self.function is None else self.function(model, prompt)
                texts[f"preview/{number}"] = str(text)
                yield None
        finally:
            if texts:
                trainer.lifecycle.report(texts)

    def _tokenizer(self, trainer: TrainerLike) -> Any:
        return self.processing_class or getattr(trainer, "processing_class", None)

    def _generate(self, trainer: Any, model: Any, prompt: Any) -> str:
        tokenizer, inputs = self._tokenizer(trainer), prompt
        if isinstance(prompt, str):
            inputs = tokenizer(prompt, return_tensors="pt")
        elif not isinstance(prompt, Mapping):
            ids = torch.as_tensor(prompt)
            inputs = {"input_ids": ids if ids.ndim == 2 else ids[None]}
        inputs = {name: x.to(trainer.device) if hasattr(x, "to") else x for name, x in inputs.items()}
        options = {**self.options, "stopping_criteria": self._stopping_criteria(trainer)}
        tokens = generated(model, inputs, trainer.backend.forward_is_collective, options)
        return "\n".join(
            " ".join(map(str, row.tolist())) if tokenizer is None else tokenizer.decode(row, skip_special_tokens=True)
            for row in tokens
        )

    def _stopping_criteria(self, trainer: Any) -> Any:
        """Return the criteria that end a text at the timeout; each token also counts as progress of this rank."""
        from transformers import StoppingCriteria, StoppingCriteriaList

        ranks, deadline = trainer.ranks, self._deadline

        class DeadlineCriteria(StoppingCriteria):
            def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
                ranks.progress_count += 1
                return torch.full((len(input_ids),), time.monotonic() > deadline, device=input_ids.device)

        return StoppingCriteriaList([*(self.options.get("stopping_criteria") or []), DeadlineCriteria()])
