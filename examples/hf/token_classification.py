"""Tell of each token of Python source what kind it is: a function that is called, an argument, an attribute, ...

    python examples/hf/token_classification.py
    python examples/hf/token_classification.py --eval_strategy steps --eval_steps 50 --load_best_model_at_end

A script as transformers' users write them; `--help` lists its arguments, which are those of `TrainingArguments` and a
few of its own. The tokens are those of Python's own `tokenize`, from the source of its standard library; the tokenizer
that cuts them further is made here, and the model is a BERT of two layers that starts from nothing. Needs the extra
`hf` and the package `datasets`.
"""

from __future__ import annotations

import io
import keyword
import random
import sysconfig
import tokenize
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset, disable_progress_bars
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForTokenClassification,
    AutoTokenizer,
    BertConfig,
    DataCollatorForTokenClassification,
    EvalPrediction,
    HfArgumentParser,
    PreTrainedTokenizerFast,
    TrainingArguments,
    set_seed,
)

from omnitrain import HFTrainer as Trainer  # or: from transformers import Trainer

KINDS = ("other", "definition", "call", "attribute", "keyword argument", "name", "keyword", "literal")
PACKAGES = ("asyncio", "email", "http", "json", "logging", "unittest")


@dataclass
class ModelArguments:
    model_name_or_path: str | None = field(default=None, metadata={"help": "A model to go on from; else a new one."})
    hidden_size: int = field(default=64, metadata={"help": "Of a new model."})
    dropout: float = field(default=0.1, metadata={"help": "Of a new model."})


@dataclass
class DataArguments:
    max_seq_length: int = field(default=64, metadata={"help": "Tokens of a sample; the rest is left out."})
    max_train_samples: int = field(default=2000, metadata={"help": "Samples to train on."})
    max_eval_samples: int = field(default=300, metadata={"help": "Samples to evaluate on."})
    max_predict_samples: int = field(default=300, metadata={"help": "Samples to predict."})


def kind_of(before: str, token: tokenize.TokenInfo, after: str) -> str:
    """Return the kind of a token between two others."""
    if token.type in (tokenize.NUMBER, tokenize.STRING):
        return "literal"
    if token.type != tokenize.NAME:
        return "other"
    if keyword.iskeyword(token.string):
        return "keyword"
    if before in ("def", "class"):
        return "definition"
    if after == "(":
        return "call"
    if before == ".":
        return "attribute"
    return "keyword argument" if before in ("(", ",") and after == "=" else "name"


def load_data(*sizes: int) -> list[Any]:
    """Return sets of these sizes, which have no sample in common: lists of tokens, and the kind of each."""
    rows = {}
    for package in PACKAGES:
        for module in sorted(Path(sysconfig.get_path("stdlib"), package).rglob("*.py")):
            source = io.StringIO(module.read_text(encoding="utf-8"))
            tokens = [token for token in tokenize.generate_tokens(source.readline) if token.string.strip()]
            tokens = [token for token in tokens if token.type != tokenize.COMMENT and len(token.string) < 20]
            words = [token.string for token in tokens]
            kinds = [
                KINDS.index(kind_of(*token)) for token in zip(["", *words], tokens, [*words[1:], ""], strict=False)
            ]
            for start in range(0, len(words) - 24, 24):
                rows[tuple(words[start : start + 24])] = kinds[start : start + 24]
    chosen = random.Random(0).sample(list(rows), sum(sizes))
    whole = Dataset.from_list([{"tokens": words, "kinds": rows[words]} for words in chosen])
    return [whole.select(range(sum(sizes[:i]), sum(sizes[: i + 1]))) for i in range(len(sizes))]


def train_tokenizer(samples: list[list[str]]) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer made from these tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=1000, special_tokens=["[PAD]"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator((" ".join(sample) for sample in samples), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]")


def compute_metrics(evaluation: EvalPrediction) -> dict[str, float]:
    predictions: Any = evaluation.predictions
    guesses, kinds = predictions.argmax(axis=-1), np.asarray(evaluation.label_ids)
    counts = kinds != -100
    scores = []
    for kind in np.unique(kinds[counts]):
        right = ((guesses == kind) & (kinds == kind)).sum()
        scores.append(2 * right / (((guesses == kind) & counts).sum() + (kinds == kind).sum()))
    return {"accuracy": float((guesses == kinds)[counts].mean()), "f1": float(np.mean(scores))}


def main() -> None:
    parser = HfArgumentParser((ModelArguments, DataArguments, TrainingArguments))  # type: ignore[arg-type]
    parser.set_defaults(
        output_dir="runs/hf/token_classification",
        do_train=True,
        do_eval=True,
        do_predict=True,
        num_train_epochs=2,
        per_device_train_batch_size=16,
        per_device_eval_batch_size=64,
        learning_rate=2e-3,
        warmup_steps=0.1,
        logging_steps=50,
        save_strategy="epoch",
        metric_for_best_model="f1",
    )
    model_args, data_args, training_args = parser.parse_args_into_dataclasses()
    disable_progress_bars()
    set_seed(training_args.seed)

    train, valid, test = load_data(
        data_args.max_train_samples, data_args.max_eval_samples, data_args.max_predict_samples
    )
    tokenizer: Any
    model: Any
    if model_args.model_name_or_path is not None:
        tokenizer = AutoTokenizer.from_pretrained(model_args.model_name_or_path)
        model = AutoModelForTokenClassification.from_pretrained(model_args.model_name_or_path)
    else:
        tokenizer = train_tokenizer(train["tokens"])
        config = BertConfig(
            vocab_size=len(tokenizer),
            hidden_size=model_args.hidden_size,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=2 * model_args.hidden_size,
            max_position_embeddings=data_args.max_seq_length,
            hidden_dropout_prob=model_args.dropout,
            attention_probs_dropout_prob=model_args.dropout,
            pad_token_id=tokenizer.pad_token_id,
            id2label=dict(enumerate(KINDS)),
            label2id={kind: number for number, kind in enumerate(KINDS)},
        )
        model = AutoModelForTokenClassification.from_config(config)

    def tokenized(rows: dict[str, list]) -> Any:
        """Cut tokens further; the first part has the kind as its label, the others have none."""
        features = tokenizer(
            rows["tokens"], is_split_into_words=True, truncation=True, max_length=data_args.max_seq_length
        )
        features["labels"] = []
        for i, kinds in enumerate(rows["kinds"]):
            words = features.word_ids(i)
            pairs = zip([None, *words[:-1]], words, strict=True)
            features["labels"].append([-100 if word in (None, before) else kinds[word] for before, word in pairs])
        return features

    with training_args.main_process_first(desc="tokenizing"):
        columns = train.column_names
        train, valid, test = (
            part.map(tokenized, batched=True, remove_columns=columns) for part in (train, valid, test)
        )

    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=train if training_args.do_train else None,
        eval_dataset=valid if training_args.do_eval else None,
        processing_class=tokenizer,
        data_collator=DataCollatorForTokenClassification(tokenizer),
        compute_metrics=compute_metrics,
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
        trainer.log_metrics("eval", metrics)
        trainer.save_metrics("eval", metrics)

    if training_args.do_predict:
        output: Any = trainer.predict(test, metric_key_prefix="predict")
        trainer.log_metrics("predict", output.metrics)
        trainer.save_metrics("predict", output.metrics)
        if trainer.is_world_process_zero():
            rows = [
                " ".join(KINDS[guess] for guess in row[kinds != -100])
                for row, kinds in zip(output.predictions.argmax(axis=-1), output.label_ids, strict=True)
            ]
            Path(training_args.output_dir, "predictions.txt").write_text("\n".join(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
