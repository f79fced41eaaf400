"""Tiny models of the classes of transformers that return a loss, made from their default configurations."""

from __future__ import annotations

import copy
import inspect
import logging
import re
from typing import Any

import torch
import transformers
from transformers.models.auto import modeling_auto

from omnitrain import ConfigError, Trainer

VOCABULARY = 64
CLASSES = 5
LENGTH = 8
IMAGE = 32

SIZES: list[tuple[str, Any]] = [
    (r"(num_|n_)?(hidden_|encoder_|decoder_|local_|text_|relational_|entity_|x_|l_|r_|mtp_)*layers?(_num)?", 2),
    (r"num_(hidden|encoder|decoder)_blocks|n_layers?|num_stages|num_hidden_groups", 2),
    (r"(num_|n_)(attention_|encoder_|decoder_|attn_|index_|linear_key_|linear_value_)*(heads?|attention_heads)", 4),
    (r"(encoder|decoder|num)_attention_heads|n_head|num_heads|num_key_value_heads|n_heads", 4),
    (r"hidden_size|d_model|n_embd|embed_dim|emb_dim|dim|hidden_dim|model_dim|d_embed|embedding_size", 32),
    (r"word_embed_proj_dim", 32),
    (r"(encoder_|decoder_)?(intermediate_size|ffn_dim|ffn_hidden_size|d_ff|n_inner|d_inner|mlp_dim|ffn_size)", 32),
    (r"moe_intermediate_size|shared_expert_intermediate_size|hidden_dim_ff|moe_.*_size|.*_ffn_dim", 32),
    (r"projection_dim|proj_size|classifier_proj_size|hidden_size_per_layer_input|multimodal_projector_dim", 32),
    (r"vocab_size|decoder_vocab_size|vocab_size_per_layer_input|text_vocab_size", VOCABULARY),
    (r"max_position_embeddings|n_positions|max_source_positions|max_target_positions|max_seq_len|n_ctx", 64),
    (r"image_size|input_size", IMAGE),
    (r"patch_size", 8),
    (r"head_dim|d_kv|qk_head_dim|v_head_dim|d_head", 8),
    (r"q_lora_rank|kv_lora_rank|qk_rope_head_dim|qk_nope_head_dim", 8),
    (r"num_(local_)?experts|n_routed_experts|moe_num_experts", 4),
    (r"num_experts_per_tok|num_experts_per_token|moe_topk|top_k|moe_k", 2),
    (r"n_group|topk_group|first_k_dense_replace", 1),
    (r".*dropout.*|.*drop_rate|.*drop_prob|.*layerdrop.*|.*_pdrop|.*drop_path.*", 0.0),
    (r"mask_time_prob|mask_feature_prob", 0.0),
    (r"apply_spec_augment|use_timm_backbone|use_pretrained_backbone", False),
]  # fmt: skip
"""Patterns of the names of options, and their small values."""


MEDIA = (
    "image_token_id", "image_token_index", "video_token_id", "audio_token_id", "video_token_index",
    "audio_token_index", "vision_start_token_id", "vision_end_token_id", "boi_token_id", "eoi_token_id",
)  # fmt: skip
"""Tokens that no sample has."""


def small(config_class: Any, given: dict[str, Any] | None = None, **options: Any) -> Any:
    """Return a configuration of this class with small sizes, and of its parts too."""
    config = config_class() if given is None else config_class(**{k: v for k, v in given.items() if k != "model_type"})
    values, changes = config.to_dict(), dict[str, Any]()
    for name, value in values.items():
        part: Any = getattr(config, name, None)
        if hasattr(part, "to_dict") and hasattr(part, "model_type"):
            changes[name] = small(type(part), part.to_dict())
        elif isinstance(value, bool):
            changes |= dict.fromkeys(
                [name for pattern, new in SIZES if new is False and re.fullmatch(pattern, name)], False
            )
        elif isinstance(value, (int, float)) and name.endswith("_token_id"):
            changes[name] = min(int(value), 3)
        elif isinstance(value, (int, float)):
            for pattern, new in SIZES:
                if not isinstance(new, bool) and re.fullmatch(pattern, name):
                    changes[name] = new if isinstance(new, float) else min(new, int(value)) or int(value)
                    break
    for name in MEDIA:
        if isinstance(values.get(name), int):
            changes[name] = VOCABULARY - 2
    if "layer_types" in values and isinstance(values["layer_types"], list):
        changes["layer_types"] = values["layer_types"][:1] + values["layer_types"][-1:]
    if isinstance(values.get("conv_dim"), (list, tuple)):
        changes["conv_dim"] = [8] * len(values["conv_dim"])
    if "encoder_stride" in values:
        changes["encoder_stride"] = changes.get("patch_size", values.get("patch_size"))
    if config.is_encoder_decoder or "decoder_start_token_id" in values:
        changes["decoder_start_token_id"] = 2
    kept = {name: value for name, value in (given or {}).items() if name not in ("model_type", "transformers_version")}
    return config_class(**{**kept, **changes, **options})


FAMILIES = {
    "CAUSAL_LM": "tokens", "SEQ_TO_SEQ_CAUSAL_LM": "tokens", "IMAGE_TEXT_TO_TEXT": "tokens", "MASKED_LM": "tokens",
    "TOKEN_CLASSIFICATION": "tags", "SEQUENCE_CLASSIFICATION": "class", "QUESTION_ANSWERING": "span",
    "MULTIPLE_CHOICE": "choice", "NEXT_SENTENCE_PREDICTION": "class", "PRETRAINING": "pretraining",
    "CTC": "tokens", "SPEECH_SEQ_2_SEQ": "tokens", "SEMANTIC_SEGMENTATION": "pixels", "IMAGE_CLASSIFICATION": "class",
    "MASKED_IMAGE_MODELING": "patches", "AUDIO_CLASSIFICATION": "class", "ZERO_SHOT_IMAGE_CLASSIFICATION": "pairs",
    "OBJECT_DETECTION": "boxes", "MULTIMODAL_LM": "tokens", "VISUAL_QUESTION_ANSWERING": "class",
}  # fmt: skip
"""The mappings of transformers' Auto classes, and the labels of their models."""


def classes() -> dict[str, str]:
    """Return the names of the classes that return a loss, and the mapping that each is in."""
    found = dict[str, str]()
    for family in FAMILIES:
        mapping = getattr(modeling_auto, f"MODEL_FOR_{family}_MAPPING_NAMES", {})
        for names in mapping.values():
            for name in names if isinstance(names, (tuple, list)) else (names,):
                if name.startswith(("TF", "Flax")) or not hasattr(transformers, name):
                    continue
                found.setdefault(name, family)
    return found


BACKBONE: Any = transformers.ResNetConfig(
    embedding_size=8,
    hidden_sizes=[8, 8, 8, 8],
    depths=[1, 1, 1, 1],
    layer_type="basic",
    **{"out_features": ["stage4"]},  # type: ignore[arg-type]
)
DETR = {"backbone_config": BACKBONE, "use_timm_backbone": False, "backbone": None, "num_queries": 5}
OPTIONS: dict[str, dict[str, Any]] = {
    "BeitForSemanticSegmentation": {"out_indices": [0, 1, 2, 3], "num_hidden_layers": 4},
    "Data2VecVisionForSemanticSegmentation": {"out_indices": [0, 1, 2, 3], "num_hidden_layers": 4},
    "DetrForObjectDetection": DETR,
    "ConditionalDetrForObjectDetection": DETR,
    "TableTransformerForObjectDetection": DETR,
    "GPTJForCausalLM": {"rotary_dim": 4},
    "CodeGenForCausalLM": {"rotary_dim": 4},
    "GPTNeoForCausalLM": {"attention_types": [[["global", "local"], 1]], "num_layers": 2},
    "MixtralForCausalLM": {"output_router_logits": True},
}
"""What classes need besides small sizes."""


def build(name: str, family: str, **options: Any) -> Any:
    """Return a tiny model of a class of transformers, in double precision and without dropout."""
    model_class = getattr(transformers, name)
    torch.manual_seed(0)
    count = 2 if family in ("QUESTION_ANSWERING", "NEXT_SENTENCE_PREDICTION") else CLASSES
    config = small(model_class.config_class, num_labels=count, **OPTIONS.get(name, {}), **options)
    model = model_class(config)
    for module in model.modules():
        if isinstance(module, torch.nn.modules.dropout._DropoutNd):
            module.p = 0.0
        if isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
            module.eval()
        if hasattr(getattr(module, "config", None), "_experts_implementation"):
            vars(module)["config"]._experts_implementation = "eager"  # the fast ones take no double precision
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():  # so that losses of samples differ
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model.double()


def samples(name: str, model: Any, family: str) -> list[dict[str, Any]]:
    """Return eight samples for a model, whose labels differ in number."""
    takes, kind = inspect.signature(model.forward).parameters, FAMILIES[family]
    generator = torch.Generator().manual_seed(2)
    random = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    config = getattr(model.config, "vision_config", model.config)
    made = []
    for index in range(8):
        ids = torch.randint(4, VOCABULARY - 4, (LENGTH,), generator=generator)
        sample: dict[str, Any] = {}
        main = model.main_input_name
        is_text = main == "input_ids" or ("input_ids" in takes and kind == "tokens" and family != "MULTIMODAL_LM")
        if kind == "pairs" or is_text:
            sample["input_ids"] = ids
        if (not is_text and main == "pixel_values") or kind == "pairs":
            size = getattr(config, "image_size", IMAGE)
            size = size if isinstance(size, int) else size[0]
            sample["pixel_values"] = random(getattr(config, "num_channels", 3), max(size, IMAGE), max(size, IMAGE))
        elif main == "input_values":
            sample["input_values"] = random(4000)
        elif main == "input_features":
            bins = getattr(model.config, "num_mel_bins", getattr(model.config, "feature_size", 80))
            frames = 2 * getattr(model.config, "max_source_positions", 32)
            sample["input_features"] = random(bins, frames) if "Whisper" in name else random(frames, bins)
        if kind == "tokens":
            sample["labels"] = ids.clone()
            if family == "CTC":
                sample["labels"][1 + index % 4 :] = -100
                sample["labels"] = sample["labels"].clamp(max=CLASSES + 20)
            else:
                sample["labels"][: index * 5 % 7] = -100
        elif kind == "tags":
            sample["labels"] = ids % CLASSES
            sample["labels"][: index * 5 % 7] = -100
        elif kind == "class":
            sample["labels"] = ids[0] % (2 if family == "NEXT_SENTENCE_PREDICTION" else CLASSES)
        elif kind == "span":
            sample |= {"start_positions": ids[0] % LENGTH, "end_positions": ids[1] % LENGTH}
        elif kind == "choice":
            sample |= {"input_ids": torch.stack([ids, ids.flip(0)]), "labels": ids[0] % 2}
        elif kind == "pretraining":
            if "labels" in takes:
                sample["labels"] = ids.clone()
                sample["labels"][: index * 5 % 7] = -100
            for label in ("next_sentence_label", "sentence_order_label"):
                if label in takes:
                    sample[label] = ids[0] % 2
            if "Electra" in name or "Funnel" in name:  # whether each token was replaced
                sample["labels"] = ids % 2
        elif kind == "pixels":
            side = sample["pixel_values"].shape[-1]
            sample["labels"] = torch.randint(0, CLASSES, (side, side), generator=generator)
            sample["labels"][: 3 * index] = 255
        elif kind == "patches":
            patches = (sample["pixel_values"].shape[-1] // config.patch_size) ** 2
            sample["bool_masked_pos"] = torch.arange(patches) < 2 + index % 5
        elif kind == "pairs":
            sample["return_loss"] = True
        elif kind == "boxes":
            count = 1 + index % 3
            boxes = torch.rand(count, 4, generator=generator, dtype=torch.float64) * 0.4 + 0.2
            sample["labels"] = {"class_labels": torch.arange(count) % CLASSES, "boxes": boxes}
        made.append(sample)
    return made


def collate(batch: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a batch; labels that are dicts stay a list, and flags flags."""
    first = batch[0]
    return {
        key: [sample[key] for sample in batch]
        if isinstance(value, dict)
        else (value if isinstance(value, bool) else torch.stack([sample[key] for sample in batch]))
        for key, value in first.items()
    }


SPLITS = ((8, 1), (4, 2), (2, 4), (1, 8))
"""Samples of a micro-batch, and micro-batches of a step."""
LARGEST = 8_000_000
"""Parameters of a model that is still tiny."""


class NotTried(Exception):
    """A class of which no tiny model, or no batch with a loss, could be made."""


def tried(name: str, family: str) -> tuple[Any, list[dict[str, Any]]]:
    """Return a tiny model and samples of which it returns a loss.

    Raises:
        NotTried: If there are none.
    """
    try:
        model = build(name, family)
        data = samples(name, model, family)
        try:
            loss = model(**collate(data))["loss"]
        except RuntimeError as error:
            if not re.search("Double but found Float|float != double|Float but found Double", str(error)):
                raise
            model, data = model.float(), [_single(sample) for sample in data]
            loss = model(**collate(data))["loss"]
    except Exception as error:
        raise NotTried(f"{type(error).__name__}: {error}") from error
    size = sum(parameter.numel() for parameter in model.parameters())
    if size > LARGEST or not isinstance(loss, torch.Tensor) or loss.ndim or not loss.isfinite():
        raise NotTried(f"{size} parameters, and the loss {loss!r:.80}")
    return model, data


def verdict(name: str, family: str, splits: Any = SPLITS) -> str:
    """Return whether a class trains alike in every split: "right", "rejected", "batch" if it compares samples.

    Raises:
        AssertionError: If gradients or losses move with the split, and nobody says so.
    """
    model, data = tried(name, family)
    start = _flat(model).clone()
    steps, losses = [], []
    handler = _Messages()
    logging.getLogger("omnitrain").setLevel(logging.INFO)
    logging.getLogger("omnitrain").addHandler(handler)
    try:
        for batch, accumulation in splits:
            trainer = Trainer(
                copy.deepcopy(model), data, optimizer="sgd", learning_rate=1.0, max_grad_norm=None, max_steps=1,
                batch_size=batch, gradient_accumulation_steps=accumulation, shuffle=False, data_collator=collate,
                device="cpu", progress_bar=False,
            )  # fmt: skip
            trainer.train()
            steps.append(_flat(trainer.model) - start)
        for batch, _ in splits:
            trainer = Trainer(
                copy.deepcopy(model), eval_batch_size=batch, data_collator=collate, device="cpu", progress_bar=False
            )
            losses.append(trainer.evaluate(data)["eval_loss"])
    except ConfigError as error:
        if "is no mean over the labels or the rows" not in str(error):
            raise
        return "rejected"
    finally:
        logging.getLogger("omnitrain").removeHandler(handler)
    if any(re.search("compares the samples of a batch|balances experts", text) for text in handler.texts):
        return "batch"
    moved = max(float((step - steps[0]).norm() / steps[0].norm()) for step in steps)
    assert moved <= 1e-4, f"the gradients of {name} differ by {moved:.1e}"
    assert max(abs(loss - losses[0]) for loss in losses) <= 1e-5 * abs(losses[0]), f"the losses of {name}: {losses}"
    return "right"


def _single(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _single(entry) for key, entry in value.items()}
    return value.float() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def _flat(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


class _Messages(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())
