"""Preferences: DPO teaches a language model which of two texts is the better one, next to a frozen copy of itself.

    python examples/preferences.py

A tiny GPT-2 learns to count in minutes, either way, and then from pairs of texts to prefer forwards. The reference
belongs to the unit: neither the optimizer nor a checkpoint has it. Needs the extra `hf`.
In plain PyTorch: about 40 lines for two loops, the loss and the best weights; with unit and trainer 26.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel

from omnitrain import StepOutput, Trainer

MINUTES = torch.arange(60)
SHAPE: dict[str, Any] = {"vocab_size": 60, "n_positions": 8, "n_embd": 48, "n_layer": 1, "n_head": 2}


def count(starts: Tensor, change: int) -> Tensor:
    return (starts[:, None] + change * torch.arange(6)) % 60


class Preference:
    """DPO (arXiv:2305.18290): a text is worth how much more likely the policy finds it than the reference does."""

    def __init__(self, policy: Any, beta: float = 0.5) -> None:
        self.policy, self.beta = policy, beta
        self.reference = copy.deepcopy(policy).eval().requires_grad_(False)

    def evaluate(self, batch: dict[str, Tensor]) -> StepOutput:
        texts = torch.cat([batch["rejected"], batch["chosen"]])
        gains = self.log_likelihood(self.policy, texts) - self.log_likelihood(self.reference, texts)
        rewards = self.beta * gains.view(2, -1).T  # a score for each of the two classes
        chosen = torch.ones(len(rewards), dtype=torch.long, device=rewards.device)
        return StepOutput(F.cross_entropy(rewards, chosen), rewards, chosen)  # -log sigmoid of the difference

    __call__ = evaluate

    def log_likelihood(self, model: Any, texts: Tensor) -> Tensor:
        scores = model(input_ids=texts, use_cache=False).logits[:, :-1]  # the first token is the prompt
        return -F.cross_entropy(scores.transpose(1, 2), texts[:, 1:], reduction="none").sum(1)


@torch.no_grad()
def written_shares(model: Any) -> dict[str, float]:
    prompts = MINUTES[:, None].repeat(5, 1).to(model.device)
    options = {"attention_mask": torch.ones_like(prompts), "max_new_tokens": 5, "do_sample": True, "pad_token_id": 0}
    texts = model.generate(prompts, **options).cpu()
    exact = {"forwards": count(texts[:, 0], 1), "backwards": count(texts[:, 0], -1)}
    return {name: (texts == expected).all(1).float().mean().item() for name, expected in exact.items()}


def main(epochs: int = 15) -> dict[str, float]:
    torch.manual_seed(0)  # the weights that the model starts from
    policy = GPT2LMHeadModel(GPT2Config(**SHAPE, bos_token_id=None, eos_token_id=None))
    forwards, backwards = count(MINUTES, 1), count(MINUTES, -1)
    common: dict[str, Any] = {"batch_size": 10, "lr_scheduler": "linear", "progress_bar": False}
    texts = {name: torch.cat([forwards, backwards]) for name in ("input_ids", "labels")}
    Trainer(policy, texts, epochs=60, learning_rate=5e-3, log_steps="20ep", **common).train()
    results = {f"{direction} before": share for direction, share in written_shares(policy).items()}
    held_out = MINUTES % 4 == 0
    train, valid = ({"chosen": forwards[part], "rejected": backwards[part]} for part in (~held_out, held_out))
    common |= {"unit": Preference(policy), "compute_metrics": "accuracy", "log_steps": "5ep"}
    best = Trainer(policy, train, valid, epochs=epochs, learning_rate=7e-4, **common).train()["best_valid"]
    results |= {f"{direction} after": share for direction, share in written_shares(policy).items()}
    print(f"preferred text recognized, of minutes held out: {best['accuracy']:.0%}")
    print("texts that count", ", ".join(f"{name}: {share:.0%}" for name, share in results.items()))
    return {"accuracy": best["accuracy"], **results}


if __name__ == "__main__":
    main()
