"""Train a small language model on the source of Python's standard library.

    python examples/hf/causal_lm.py
    python examples/hf/causal_lm.py --max_steps 500 --bf16 --gradient_accumulation_steps 2

A script as transformers' users write them; `--help` lists its arguments, which are those of `TrainingArguments` and a
few of its own. The texts are joined and cut into blocks of equal length; nothing is downloaded, the tokenizer is made
here, and the model is a Llama of two layers that starts from nothing. Needs the extra `hf` and the package `datasets`.
"""

from __future__ import annotations

import math
import sysconfig
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset, disable_progress_bars
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    EvalPrediction,
    HfArgumentParser,
    LlamaConfig,
    PreTrainedTokenizerFast,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

from omnitrain import HFTrainer as Trainer  # or: from transformers import Trainer

PACKAGES = ("asyncio", "email", "http", "json", "logging", "unittest")


@dataclass
class ModelArguments:
    model_name_or_path: str | None = field(default=None, metadata={"help": "A model to go on from; else a new one."})
    hidden_size: int = field(default=64, metadata={"help": "Of a new model."})
    dropout: float = field(default=0.0, metadata={"help": "Of a new model."})


@dataclass
class DataArguments:
    block_size: int = field(default=64, metadata={"help": "Tokens of a block."})
    max_train_samples: int = field(default=1600, metadata={"help": "Blocks to train on."})
    max_eval_samples: int = field(default=200, metadata={"help": "Blocks to evaluate on."})
    prompt: str = field(default="    def __init__(self", metadata={"help": "What the model is to go on from."})


def load_texts() -> Dataset:
    """Return the sources of these packages, one a row."""
    library = Path(sysconfig.get_path("stdlib"))
    files = [file for package in PACKAGES for file in sorted(Path(library, package).rglob("*.py"))]
    return Dataset.from_list([{"text": file.read_text(encoding="utf-8")} for file in files])


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer made from these texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=1000, special_tokens=["<end>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<end>", eos_token="<end>")


def most_likely(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Keep one number of each token, instead of one for each entry of the vocabulary."""
    return logits.argmax(dim=-1)


def compute_metrics(evaluation: EvalPrediction) -> dict[str, float]:
    guesses, tokens = np.asarray(evaluation.predictions), np.asarray(evaluation.label_ids)
    return {"accuracy": float((guesses[:, :-1] == tokens[:, 1:]).mean())}  # each guess is of the next token


def main() -> None:
    parser = HfArgumentParser((ModelArguments, DataArguments, TrainingArguments))  # type: ignore[arg-type]
    parser.set_defaults(
        output_dir="runs/hf/causal_lm",
        do_train=True,
        do_eval=True,
        num_train_epochs=3,
        per_device_train_batch_size=16,
        per_device_eval_batch_size=64,
        learning_rate=3e-3,
        weight_decay=0.01,
        warmup_steps=0.05,
        logging_steps=50,
        save_strategy="epoch",
    )
    model_args, data_args, training_args = parser.parse_args_into_dataclasses()
    disable_progress_bars()
    set_seed(training_args.seed)

    texts = load_texts()
    tokenizer: Any
    model: Any
    if model_args.model_name_or_path is not None:
        tokenizer = AutoTokenizer.from_pretrained(model_args.model_name_or_path)
        model = AutoModelForCausalLM.from_pretrained(model_args.model_name_or_path)
    else:
        tokenizer = train_tokenizer(texts["text"])
        config = LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=model_args.hidden_size,
            intermediate_size=2 * model_args.hidden_size,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=2 * data_args.block_size,
            attention_dropout=model_args.dropout,
            tie_word_embeddings=True,
            bos_token_id=tokenizer.eos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
        model = AutoModelForCausalLM.from_config(config)

    def tokenized(rows: dict[str, list]) -> Any:
        return tokenizer([text + tokenizer.eos_token for text in rows["text"]])

    def group_texts(rows: dict[str, list]) -> dict[str, list]:
        """Join the texts, and cut them into blocks; what does not fill the last one is left out."""
        size = data_args.block_size
        joined = {name: list(chain.from_iterable(values)) for name, values in rows.items()}
        starts = range(0, len(joined["input_ids"]) - size + 1, size)
        blocks = {name: [values[start : start + size] for start in starts] for name, values in joined.items()}
        return {**blocks, "labels": blocks["input_ids"]}

    with training_args.main_process_first(desc="tokenizing"):
        blocks = texts.map(tokenized, batched=True, remove_columns="text").map(group_texts, batched=True)
    blocks = blocks.shuffle(seed=0)
    valid = blocks.select(range(data_args.max_eval_samples))
    rest = range(data_args.max_eval_samples, len(blocks))
    train = blocks.select(rest[: data_args.max_train_samples])

    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=train if training_args.do_train else None,
        eval_dataset=valid if training_args.do_eval else None,
        processing_class=tokenizer,
        data_collator=default_data_collator,
        compute_metrics=compute_metrics,
        preprocess_logits_for_metrics=most_likely,
    )

    if training_args.do_train:
        result = trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
        trainer.save_model()
        metrics = {**result.metrics, "train_samples": len(train)}
        trainer.log_metrics("train", metrics)
        trainer.save_metrics("train", metrics)
        trainer.save_state()

    if training_args.do_eval:
        metrics = trainer.evaluate()
        metrics["perplexity"] = math.exp(metrics["eval_loss"])
        trainer.log_metrics("eval", metrics)
        trainer.save_metrics("eval", metrics)

    if trainer.is_world_process_zero():
        prompt = tokenizer(data_args.prompt, return_tensors="pt").to(model.device)
        answer = model.eval().generate(**prompt, max_new_tokens=32, do_sample=False)
        print(tokenizer.decode(answer[0]))


if __name__ == "__main__":
    main()
