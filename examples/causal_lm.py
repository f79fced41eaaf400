"""A causal language model: a small Llama learns to count in words, with all texts of a batch packed into one row.

    python examples/causal_lm.py

The texts have 2 to 12 numbers in a row, and begin anywhere below a thousand. Nothing is padded, no text sees another,
and each word weighs the same, however many a batch has. Needs the extra `hf`.
In plain PyTorch: about 39 lines for loops, weighing by tokens and the best weights; with the trainer 14.
"""

from __future__ import annotations

import random
from typing import Any

import torch
from transformers import DataCollatorWithFlattening, LlamaConfig, LlamaForCausalLM

from omnitrain import Trainer

UNITS = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen"
ONES = (UNITS + " seventeen eighteen nineteen").split()
TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
WORDS = ["<end>", ",", "hundred", *ONES, *TENS]


def spell(number: int) -> list[str]:
    hundreds, rest = divmod(number, 100)
    words = [ONES[hundreds - 1], "hundred"] if hundreds else []
    if rest >= 20:
        words, rest = [*words, TENS[rest // 10 - 2]], rest % 10
    return [*words, ONES[rest - 1]] if rest else words


def count(start: int, length: int) -> list[int]:
    """Return the tokens of some numbers in a row, with a comma after each and <end> around them."""
    words = [word for number in range(start, start + length) for word in [*spell(number), ","]]
    return [WORDS.index(word) for word in ["<end>", *words, "<end>"]]


def goes_on(model: Any, number: int) -> list[str]:
    """Return what the model writes after a number."""
    prompt = torch.tensor([count(number, 1)[:-1]], device=model.device)
    written = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=5, do_sample=False)
    words = [WORDS[token] for token in written[0, prompt.shape[1] :].tolist()]
    return words[: words.index(",")] if "," in words else words


def main(epochs: int = 3, size: int = 1600) -> dict[str, float]:
    chance = random.Random(0)
    starts = chance.sample(range(1, 988), 900)
    train = [{"input_ids": count(chance.choice(starts[100:]), chance.randint(2, 12))} for _ in range(size)]
    valid = [{"input_ids": count(start, 3)} for start in starts[:100]]
    torch.manual_seed(0)  # the weights that the model starts from
    shape: Any = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(WORDS), eos_token_id=0, pad_token_id=0, **shape))
    trainer = Trainer(
        model,
        train,
        valid,
        data_collator=DataCollatorWithFlattening(),
        compute_metrics="perplexity",
        epochs=epochs,
        batch_size=16,
        learning_rate=5e-3,
        lr_scheduler="cosine",
        warmup_steps=20,
        log_steps="1ep",
    )
    best = trainer.train()["best_valid"]
    right = sum(goes_on(model, start) == spell(start + 1) for start in starts[:100]) / 100
    print(f"perplexity of a word: {best['perplexity']:.2f}; counts on by one: {right:.0%}")
    print(*spell(starts[0]), "->", *goes_on(model, starts[0]))
    return {"right": right, "perplexity": best["perplexity"]}


if __name__ == "__main__":
    main()
