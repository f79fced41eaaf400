"""Small models of transformers, and token sequences for them."""

from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

VOCABULARY = 40


def llama(seed: int = 0, vocabulary: int = VOCABULARY) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=1, max_position_embeddings=64, bos_token_id=1, eos_token_id=2, pad_token_id=0,
        )
    ).double()  # fmt: skip


def t5(seed: int = 0, dropout: float = 0.0, vocabulary: int = VOCABULARY) -> T5ForConditionalGeneration:
    torch.manual_seed(seed)
    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=vocabulary, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, dropout_rate=dropout,
            decoder_start_token_id=0, pad_token_id=0, eos_token_id=2,
        )
    ).double()  # fmt: skip


def bert(seed: int = 0, **options: Any) -> BertForSequenceClassification:
    torch.manual_seed(seed)
    options = {"num_hidden_layers": 1, "num_labels": 3, "vocab_size": VOCABULARY, **options}
    return BertForSequenceClassification(
        BertConfig(
            hidden_size=16, num_attention_heads=2, intermediate_size=16, hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            **{"max_position_embeddings": 16, **options},
        )
    ).double()  # fmt: skip


class Tokens(Dataset[dict[str, torch.Tensor]]):
    """Sequences of 9 tokens that begin with a prompt without labels; some are nothing else."""

    def __init__(self, size: int, kind: str = "tokens") -> None:
        self.kind = kind
        generator = torch.Generator().manual_seed(1)
        self.ids = torch.randint(3, VOCABULARY, (size, 9), generator=generator)
        self.labels = self.ids.clone()
        for index in range(size):
            self.labels[index, : 1 + index * 5 % 12] = -100

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids, labels = self.ids[index], self.labels[index]
        if self.kind == "classes":
            return {"input_ids": ids, "labels": ids[0] % 3}
        if self.kind == "pairs":  # as from a collator for sequence to sequence
            shifted = torch.cat([torch.zeros(1, dtype=torch.int64), ids[:-1]])
            return {"input_ids": ids, "labels": labels, "decoder_input_ids": shifted}
        if self.kind == "prompts":
            return {"input_ids": ids}
        return {"input_ids": ids, "labels": labels}


def gpt(seed: int = 0, vocabulary: int = VOCABULARY) -> GPT2LMHeadModel:
    torch.manual_seed(seed)
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=vocabulary, n_embd=16, n_layer=1, n_head=2, n_positions=128, resid_pdrop=0.0, embd_pdrop=0.0,
            attn_pdrop=0.0, bos_token_id=1, eos_token_id=2, pad_token_id=0,
        )
    ).double()  # fmt: skip


class Short(list[dict[str, Any]]):
    """Sequences of 4 to 8 tokens, to be packed into one row."""

    def __init__(self, size: int) -> None:
        super().__init__({"input_ids": ids[: 4 + i % 5].tolist()} for i, ids in enumerate(Tokens(size).ids))
