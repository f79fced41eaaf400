"""Tiny models of the classes of transformers that return a loss, made from their default configurations."""

import contextlib
import copy
import functools
import inspect
import logging
import math
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

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
    (r"num_(hidden|encoder|decoder)_blocks|num_stages|num_experts_per_tok|moe_topk|moe_k", 2),
    (r"(num_|n_)(attention_|encoder_|decoder_|attn_|index_|linear_key_|linear_value_)*(heads?|attention_heads)", 4),
    (r"(encoder|decoder)_attention_heads|num_key_value_heads|linear_num_((key|value)_)?heads|attention_window", 4),
    (r"num_query_tokens|block_size|image_seq_length|num_(local_)?experts|n_routed_experts|moe_num_experts", 4),
    (r"hidden_size|d_model|n_embd|embed_dim|emb_dim|dim|hidden_dim|embedding_size|word_embed_proj_dim|.*_ffn_dim", 32),
    (r"(encoder_|decoder_)?(intermediate_size|ffn_dim|ffn_hidden_size|d_ff|n_inner|d_inner|mlp_dim|ffn_size)", 32),
    (r"shared_expert_intermediate_size|moe_.*_size|projection_size|visual_feat_dim|visual_embedding_dim", 32),
    (r"feed_forward_size|.*out_hidden_size|projection_dim|classifier_proj_size|hidden_size_per_layer_input", 32),
    (r"base_channels|encoder_hidden_dim|vision_output_dim|projector_(input|output)_dim|expert_ffn_hidden_size", 32),
    (r"aspp_out_channels|fusion_hidden_size", 32),
    (r"hidden_sizes|embed_dims|neck_hidden_sizes", 16),
    (r".*_d_state|state_size|attention_head_size|linear_((key|value)_)?head_dim|(mamba_)?chunk_size|patch_size", 8),
    (r"(global_)?head_dim|d_kv|(qk|v)_head_dim|d_head|mamba_d_head|attention_head_dim|(q|kv)_lora_rank", 8),
    (r"qk_(rope|nope)_head_dim", 8),
    (r"(.*_)?vocab_size|vocab_size_per_layer_input|num_embeddings|codebook_size", VOCABULARY),
    (r"max_position_embeddings|n_positions|max_source_positions|max_target_positions|max_seq_len|n_ctx", 64),
    (r"image_size|input_size", IMAGE),
    (r"depths|num_blocks|n_group|topk_group|first_k_dense_replace", 1),
    (r"num_queries", 5),
    (r".*dropout.*|.*layerdrop.*|.*_pdrop|.*drop_path.*|mask_time_prob", 0.0),
    (r"apply_spec_augment", False),
]  # fmt: skip
"""Patterns of the names of options, and their small values."""


DEFAULTS = {"head_dim": 8, "num_key_value_heads": 4}
"""Values for sizes that are none by default."""
NOT_ARGUMENTS = ("model_type", "transformers_version")
"""What configurations write and do not read."""

MEDIA_TOKENS = (
    "image_token_id", "image_token_index", "video_token_id", "audio_token_id", "video_token_index",
    "audio_token_index", "vision_start_token_id", "vision_end_token_id", "boi_token_id", "eoi_token_id",
)  # fmt: skip
"""Tokens that no sample has."""


def small(config_class: Any, options: dict[str, Any] | None = None, part: Any = None) -> Any:
    """Return a configuration of this class, or like `part`, with small sizes, of its parts too, or with `options`."""
    options = options or {}
    config = config_class() if part is None else part
    written, changes = config.to_dict(), dict[str, Any]()
    if written.pop("per_layer_config", None):
        changes["per_layer_config"] = {}  # all layers alike
    fields: set[str] = set(getattr(config_class, "__dataclass_fields__", ())) or set(written)
    values = {name: value for name, value in written.items() if name in fields}
    for name, value in values.items():
        nested: Any = getattr(config, name, None) if isinstance(value, dict) else None
        if hasattr(nested, "to_dict") and hasattr(nested, "model_type"):
            of_part = options.get(name)
            changes[name] = of_part if hasattr(of_part, "to_dict") else small(type(nested), of_part, nested)
        elif isinstance(value, (int, float)) and name.endswith("_token_id"):
            changes[name] = min(int(value), 3)
        elif name == "pad_token_id" and value is None:
            changes[name] = 0
        elif name in DEFAULTS and value is None:
            changes[name] = DEFAULTS[name]
        elif isinstance(value, dict):
            changes[name] = _small_rotation(value)
        elif (new := _small_value(name, value)) is not value:
            changes[name] = new
    for name in MEDIA_TOKENS:
        if isinstance(values.get(name), int):
            changes[name] = VOCABULARY - 2
    changes |= _fewer_layers(values)
    if isinstance(values.get("conv_dim"), (list, tuple)):
        changes["conv_dim"] = [8] * len(values["conv_dim"])
    if "encoder_stride" in values:
        changes["encoder_stride"] = changes.get("patch_size", values.get("patch_size"))
    if config.is_encoder_decoder or "decoder_start_token_id" in values:
        changes["decoder_start_token_id"] = 2
    arguments = {} if part is None else {name: value for name, value in values.items() if name not in NOT_ARGUMENTS}
    if "out_features" in written and "depths" in values and part is not None:
        arguments["out_features"] = written["out_features"]
    parts = [name for name, value in changes.items() if hasattr(value, "to_dict")]
    rest = {name: value for name, value in options.items() if name not in parts}
    return config_class(**{**arguments, **changes, **rest})


def _small_rotation(value: dict[str, Any]) -> dict[str, Any]:
    """Return options of rotary positions whose sections share out half of a small head."""
    parts = {key: _small_rotation(entry) if isinstance(entry, dict) else entry for key, entry in value.items()}
    return {**parts, "mrope_section": [1, 1, 2]} if "mrope_section" in value else parts


def _small_value(name: str, value: Any) -> Any:
    """Return a small value for an option, or the same object."""
    for pattern, new in SIZES:
        if not re.fullmatch(pattern, name):
            continue
        if isinstance(new, bool) or isinstance(value, bool):
            return new if isinstance(new, bool) and isinstance(value, bool) else value
        if isinstance(value, (list, tuple)) and value and all(type(entry) is int for entry in value):
            return [1 if "heads" in name else min(new, entry) for entry in value]
        if isinstance(value, float) or (isinstance(new, float) and isinstance(value, int)):
            return type(value)(new)
        return min(new, value) or value if isinstance(value, int) else value
    return value


def _fewer_layers(values: dict[str, Any]) -> dict[str, Any]:
    """Return the options for as few layers as show each kind of layer: their number, and the lists of kinds."""
    names = [name for name in values if re.fullmatch(SIZES[0][0] + "|" + SIZES[1][0], name)]
    changes = dict[str, Any]()
    for name in names:
        count = values[name]
        lists = {
            key: entries for key, entries in values.items()
            if isinstance(entries, (list, tuple)) and len(entries) == count and type(count) is int and count > 2
        }  # fmt: skip
        kinds_of = [entries for key, entries in lists.items() if isinstance(entries[0], str) or "layer" in key]
        lists = {key: entries for key, entries in lists.items() if count > 4 or entries in kinds_of}
        if not kinds_of:
            continue
        kinds = [str([entries[index] for entries in kinds_of]) for index in range(count)]
        last = {kind: index for index, kind in enumerate(kinds)}
        chosen = sorted({0, count - 1, *last.values()})
        changes[name] = len(chosen)
        changes |= {key: [entries[index] for index in chosen] for key, entries in lists.items()}
    return changes


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
    families = dict[str, str]()
    names_of_transformers = set(dir(transformers))  # `hasattr` would import the module of each class
    for family in FAMILIES:
        mapping = getattr(modeling_auto, f"MODEL_FOR_{family}_MAPPING_NAMES", {})
        for names in mapping.values():
            for name in names if isinstance(names, (tuple, list)) else (names,):
                if name.startswith(("TF", "Flax")) or name not in names_of_transformers:
                    continue
                families.setdefault(name, family)
    return families


OF_BACKBONE: Any = {"depths": [1, 1, 1, 1], "layer_type": "basic", "out_features": ["stage4"]}
BACKBONE: Any = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 8, 8, 8], **OF_BACKBONE)
DETR = {"backbone_config": BACKBONE, "use_timm_backbone": False, "backbone": None, "num_queries": 5}
EFFICIENT = {"width_coefficient": 0.25, "depth_coefficient": 0.1, "hidden_dim": 320, "image_size": 32}
HGNET = {
    "stem_channels": [3, 8, 8], "stage_in_channels": [8, 16, 16, 16], "stage_mid_channels": [8, 8, 8, 8],
    "stage_out_channels": [16, 16, 16, 16], "stage_num_blocks": [1, 1, 1, 1], "stage_numb_of_layers": [1, 1, 1, 1],
}  # fmt: skip
QUERY_INDEXER = {
    "indexer_budget": 8, "indexer_compress_ratio": 2, "indexer_n_heads": 4, "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
}  # fmt: skip
ROTARY = {"rope_type": "default", "rope_theta": 1e4}
MROPE = {**ROTARY, "mrope_section": [1, 1, 2]}
WITH_MROPE = "glm46v glm4v paddleocr_vl qwen2_5_omni_thinker qwen2_5_vl qwen2_vl ernie4_5_vl_moe hunyuan_vl"
CHANNELS = {"encoder_in_channels": [16, 16, 16], "decoder_in_channels": [32, 32, 32], "num_denoising": 0}
WINDOWS = {"depths": [1, 1], "num_heads": [1, 1], "window_size": 2, "patch_size": 4, "encoder_stride": 8}
PAIR = {"pad_token_id": 0, "decoder_start_token_id": 2}
OPTIONS: dict[str, dict[str, Any]] = {
    "BeitForSemanticSegmentation": {"out_indices": [0, 1, 2, 3], "num_hidden_layers": 4},
    "Data2VecVisionForSemanticSegmentation": {"out_indices": [0, 1, 2, 3], "num_hidden_layers": 4},
    "DetrForObjectDetection": DETR,
    "ConditionalDetrForObjectDetection": DETR,
    "TableTransformerForObjectDetection": DETR,
    "gptj": {"rotary_dim": 4},
    "codegen": {"rotary_dim": 4},
    "bamba": {"mamba_n_heads": 8, "attn_layer_indices": [1]},
    "granitemoehybrid": {"mamba_n_heads": 8, "layer_types": ["mamba", "attention"]},
    "mamba2": {"num_heads": 8},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "dbrx": {"attn_config": {"rope_theta": 1e4, "clip_qkv": 8.0}},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "reformer": {
        "axial_pos_shape": [2, 4], "axial_pos_embds_dim": [16, 16], "local_attn_chunk_length": 4,
        "attn_layers": ["local", "local"],
    },
    "ReformerModelWithLMHead": {"is_decoder": True},
    "xmod": {"default_language": "en_XX"},
    "esm": {"vocab_size": VOCABULARY, "pad_token_id": 1, "mask_token_id": 3},
    "pvt": {"image_size": 64, "sequence_reduction_ratios": [1, 1, 1, 1]},
    **{name: {"text_config": {"rope_parameters": MROPE}} for name in WITH_MROPE.split()},
    "glm4v_moe": {
        "text_config": {"rope_parameters": {**MROPE, "mrope_section": [1, 1, 0], "partial_rotary_factor": 0.5}},
    },
    "glm_ocr": {"text_config": {"rope_parameters": MROPE, "head_dim": 8}},
    "lilt": {"hidden_size": 48, "intermediate_size": 48},
    "AlbertForPreTraining": {"num_labels": 2},
    "dots3_note_text": {"head_dim": 16},
    "qwen4_exp_text": QUERY_INDEXER,
    "qwen4_exp": {"text_config": QUERY_INDEXER},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid"] * 2, "num_hidden_layers": 4},
    "chameleon": {"vocabulary_map": {"<image>": VOCABULARY - 2}},
    "emu3": {"vocabulary_map": {"<image>": VOCABULARY - 2}},
    "hiera": {"image_size": [64, 64], "decoder_hidden_size": 32, "decoder_depth": 1, "decoder_num_heads": 2},
    "bros": {"hidden_size": 64},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {**ROTARY}}},
    "cohere_compass": {"text_config": {"rope_parameters": {"full_attention": {**ROTARY}}}},
    "dpt": {"num_hidden_layers": 4, "backbone_out_indices": [0, 1, 2, 3], "fusion_hidden_size": 16},
    "tipsv2_dpt": {"backbone_config": {"num_hidden_layers": 4, "out_indices": [1, 2, 3, 4]}},
    "mobilevitv2": {"image_size": 64, "n_attn_blocks": [1, 1, 1], "base_attn_unit_dims": [16, 16, 16]},
    "perceiver": {
        "d_latents": 32, "num_latents": 4, "num_self_attends_per_block": 1, "num_cross_attention_heads": 1,
        "num_self_attention_heads": 1, "max_position_embeddings": LENGTH,
    },
    "dab-detr": DETR,
    "deformable_detr": {**DETR, "num_feature_levels": 1},
    "longcat_flash": {"qk_head_dim": 16, "zero_expert_num": 2},
    "deepseek_ocr2": {"text_config": {"mlp_layer_types": ["dense", "sparse"], "num_experts_per_tok": 2}},
    "xlstm": {"mode": "train", "hidden_size": 128, "embedding_dim": 128, "num_heads": 2},
    "blip-2": {"image_token_index": VOCABULARY - 2},
    "instructblip": {"image_token_index": VOCABULARY - 2},
    "instructblipvideo": {"video_token_index": VOCABULARY - 2},
    "inkling2": {"vision_config": {"text_hidden_size": 32}},
    "molmo2": {"adapter_config": {"vision_feature_layer": [0, 1]}},
    "kosmos-2": {"latent_query_num": 2},
    "step3p7": {"text_config": {"sliding_window": 4}},
    "neomme": {
        "sliding_window": 4,
        "rope_parameters": {
            kind: {**ROTARY, "partial_rotary_factor": 1.0} for kind in ("sliding_attention", "full_attention")
        },
    },
    "fun_asr_nano": {"adaptor_config": {"intermediate_size": 8}},
    "wav2vec2-bert": {"vocab_size": VOCABULARY},
    "wav2vec2-conformer": {"vocab_size": VOCABULARY},
    "moonshine_streaming": {"num_key_value_heads": 4},
    "bit": {"num_groups": 4, "embedding_size": 16},
    "efficientnet": EFFICIENT,
    "lw_detr": {
        "backbone_config": {
            "num_hidden_layers": 2, "num_windows": 4, "out_indices": [1, 2], "window_block_indices": [0],
        },
        "projector_scale_factors": [1.0], "group_detr": 2,
    },
    "rf_detr": {"group_detr": 2},
    "hgnet_v2": HGNET,
    **dict.fromkeys(("rt_detr", "rt_detr_v2"), CHANNELS),
    **{key: {"backbone_config": HGNET, **CHANNELS} for key in ("d_fine", "deimv2")},
    **dict.fromkeys(("swin", "swinv2", "donut-swin"), WINDOWS),
    "focalnet": {
        "depths": [1, 1], "patch_size": 4, "hidden_sizes": [16, 32], "embed_dim": 16, "focal_levels": [1, 1],
        "focal_windows": [3, 3], "encoder_stride": 8,
    },
    "mimo_v2_flash": {"num_key_value_heads": 2},
    "textnet": {"stem_out_channels": 16},
    "vision-encoder-decoder": PAIR,
    "speech-encoder-decoder": PAIR,
    "layoutlmv3": {"coordinate_size": 4, "shape_size": 8},
    "musicgen_decoder": {"num_codebooks": 1, "bos_token_id": 1},
    "musicgen_melody_decoder": {"num_codebooks": 1},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2},
    "MixtralForCausalLM": {"output_router_logits": True},
}  # fmt: skip
"""What classes need besides small sizes, by the type of the model or the name of the class."""


def freeze(module: torch.nn.Module) -> None:
    """Have a module stay in evaluation mode while its model is trained."""
    module_class: Any = type(module)
    train = {"train": lambda self, mode=True: module_class.train(self, False), "__module__": module_class.__module__}
    module.__class__ = type(module_class.__name__, (module_class,), train)
    module.eval()


def options_of(name: str, config_class: Any) -> dict[str, Any]:
    """Return the options that a class needs, by its type of model and its name."""
    return {**OPTIONS.get(getattr(config_class, "model_type", ""), {}), **OPTIONS.get(name, {})}


def build(name: str, family: str, **options: Any) -> Any:
    """Return a tiny model of a class of transformers, in double precision and without dropout."""
    model_class = getattr(transformers, name)
    torch.manual_seed(0)
    count = 2 if family in ("QUESTION_ANSWERING", "NEXT_SENTENCE_PREDICTION") else CLASSES
    config = small(
        model_class.config_class, {"num_labels": count, **options_of(name, model_class.config_class), **options}
    )
    model = model_class(config)
    for module in model.modules():
        if isinstance(module, torch.nn.modules.dropout._DropoutNd):
            module.p = 0.0
        if isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
            freeze(module)
        if hasattr(getattr(module, "config", None), "_experts_implementation"):
            vars(module)["config"]._experts_implementation = "eager"  # the fast ones take no double precision
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():  # so that losses of samples differ
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
        for module in model.modules():
            if isinstance(module, torch.nn.modules.conv._ConvNd):  # without normalization, activations would explode
                module.weight.div_(0.3 * math.sqrt(module.weight[0].numel()))
    return model.double()


Draw = Callable[..., torch.Tensor]


def _image(config: Any, random: Draw, sample: dict[str, Any]) -> dict[str, Any]:
    return {"pixel_values": random(3, IMAGE, IMAGE)}


def _image_tokens(config: Any, random: Draw, sample: dict[str, Any]) -> dict[str, Any]:
    ids, queries = sample.get("input_ids", torch.arange(4, 4 + LENGTH)), torch.full((4,), VOCABULARY - 2)
    ids = torch.cat([queries, ids])
    labels = torch.cat([torch.full((4,), -100), sample["labels"]])
    return {"input_ids": ids, "labels": labels, "qformer_input_ids": ids[4:]}


def _masked_frames(config: Any, random: Draw, sample: dict[str, Any]) -> dict[str, Any]:
    return {"attention_mask": torch.ones(len(sample["input_features"])).long()}


def _codebooks(config: Any, random: Draw, sample: dict[str, Any]) -> dict[str, Any]:
    return {"labels": sample["labels"][:, None]}


def _global_attention(config: Any, random: Draw, sample: dict[str, Any]) -> dict[str, Any]:
    mask = torch.zeros_like(sample["input_ids"])
    mask[..., 0] = 1
    return {"global_attention_mask": mask}


EXTRA: dict[str, Callable[[Any, Draw, dict[str, Any]], dict[str, Any]]] = {
    "git": _image,
    "idefics": lambda config, random, sample: {
        "pixel_values": random(1, 3, IMAGE, IMAGE), "image_attention_mask": torch.ones(LENGTH, 1).long(),
    },
    "ViltForQuestionAnswering": lambda config, random, sample: {
        **_image(config, random, sample), "labels": torch.arange(CLASSES).eq(sample["labels"]).double()
    },
    "instructblip": _image_tokens,
    "instructblipvideo": lambda config, random, sample: {
        **_image_tokens(config, random, sample), "pixel_values": random(1, 3, IMAGE, IMAGE)
    },
    "BlipForQuestionAnswering": lambda config, random, sample: {
        "labels": torch.cat([sample["input_ids"][:4], sample["input_ids"][4:] * 0 + config.text_config.pad_token_id])
    },
    "kosmos-2": lambda config, random, sample: {
        **_image(config, random, sample), "image_embeds_position_mask": torch.arange(LENGTH) < 2,
        "input_ids": torch.arange(4, 4 + LENGTH),
    },
    "LxmertForQuestionAnswering": lambda config, random, sample: {
        "visual_feats": random(3, config.visual_feat_dim), "visual_pos": random(3, 4), "start_positions": None,
        "end_positions": None, "labels": sample["input_ids"][0] % CLASSES,
    },
    "LxmertForPreTraining": lambda config, random, sample: {
        "visual_feats": random(3, config.visual_feat_dim), "visual_pos": random(3, 4),
        "matched_label": sample["input_ids"][0] % 2,
    },
    "visual_bert": lambda config, random, sample: {
        "visual_embeds": random(3, config.visual_embedding_dim), "visual_attention_mask": torch.ones(3).long(),
        "attention_mask": torch.ones(LENGTH).long(), "labels": torch.cat([sample["labels"], torch.full((3,), -100)]),
    },
    "SplinterForPreTraining": lambda config, random, sample: {
        "question_positions": torch.tensor([4, 5]), "start_positions": sample["input_ids"][:2] % LENGTH,
        "end_positions": sample["input_ids"][2:4] % LENGTH,
    },
    "RoCBertForPreTraining": lambda config, random, sample: {
        f"{kind}_input{name}": sample["input_ids"]
        for kind in ("labels", "attack") for name in ("_ids", "_shape_ids", "_pronunciation_ids")
    } | {"labels_attention_mask": torch.ones(LENGTH), "attack_attention_mask": torch.ones(LENGTH)},
    "pix2struct": lambda config, random, sample: {
        "flattened_patches": torch.cat([torch.arange(1, 5)[:, None].expand(4, 2), random(4, 768)], 1)
    },
    "PerceiverForSequenceClassification": lambda config, random, sample: {
        "inputs": (random(LENGTH).abs() * 10).long() + 4
    },
    **{
        f"PerceiverForImageClassification{kind}": lambda config, random, sample: {"inputs": random(3, IMAGE, IMAGE)}
        for kind in ("Learned", "Fourier", "ConvProcessing")
    },
    "audio-spectrogram-transformer": lambda config, random, sample: {
        "input_values": random(config.max_length, config.num_mel_bins)
    },
    "videomae": lambda config, random, sample: {
        "pixel_values": random(config.num_frames, 3, IMAGE, IMAGE),
        "bool_masked_pos": torch.arange(config.num_frames // 2 * (IMAGE // config.patch_size) ** 2) < 5,
    },
    "videoprism": lambda config, random, sample: {
        "pixel_values_videos": random(config.vision_config.num_frames, 3, IMAGE, IMAGE), "pixel_values": None
    },
    "siglip2": lambda config, random, sample: {
        "pixel_values": random(4, 3 * config.vision_config.patch_size**2), "pixel_attention_mask": torch.ones(4).long(),
        "spatial_shapes": torch.tensor([2, 2]),
    },
    "speech-encoder-decoder": lambda config, random, sample: {"input_values": random(4000), "input_ids": None},
    "lasr_ctc": _masked_frames,
    "parakeet_ctc": _masked_frames,
    "voxtral_realtime": lambda config, random, sample: {"input_features": random(option(config, "num_mel_bins"), 64)},
    "molmo2": lambda config, random, sample: {"mm_token_type_ids": torch.zeros(LENGTH).long()},
    "musicgen_decoder": _codebooks,
    "musicgen_melody_decoder": _codebooks,
    "LongformerForQuestionAnswering": _global_attention,
    "LongformerForMultipleChoice": _global_attention,
}  # fmt: skip
"""Inputs of types of models, or of classes, besides the usual ones: from the configuration, numbers and the sample."""


def option(config: Any, *names: str, default: Any = None) -> Any:
    """Return the first of these options that a configuration has, or one of its parts."""
    configs = [config, *(part for part in vars(config).values() if hasattr(part, "model_type"))]
    values = [getattr(part, name, None) for part in configs for name in names]
    return next((value for value in values if value is not None), default)


@contextlib.contextmanager
def short_chunks(model: torch.nn.Module) -> Iterator[None]:
    """Have functions of a model take chunks of few tokens: they loop over the 64 of a chunk in Python."""
    with contextlib.ExitStack() as stack:
        for name in {type(module).__module__ for module in model.modules()}:
            for key, function in inspect.getmembers(sys.modules[name], callable):
                if "delta_rule" in key and "chunk_size" in inspect.signature(function).parameters:
                    short = functools.partial(function, chunk_size=LENGTH)
                    stack.enter_context(mock.patch.object(sys.modules[name], key, short))
        yield


def samples(name: str, model: Any, family: str) -> list[dict[str, Any]]:
    """Return eight samples for a model, whose labels differ in number."""
    takes, kind = inspect.signature(model.forward).parameters, FAMILIES[family]
    generator = torch.Generator().manual_seed(2)
    random = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    config: Any = getattr(model.config, "vision_config", model.config)
    unknown = {"qformer_input_ids"} - set(takes)
    extra_of = EXTRA.get(name) or EXTRA.get(model.config.model_type)
    result = []
    for index in range(8):
        ids = torch.randint(4, VOCABULARY - 4, (LENGTH,), generator=generator)
        if kind == "class" and model.config.is_encoder_decoder:
            ids[-1] = model.config.eos_token_id
        sample: dict[str, Any] = {}
        main = model.main_input_name
        needed = {key for key, value in takes.items() if value.default is value.empty}
        is_text = main == "input_ids" or ("input_ids" in takes and kind == "tokens" and family != "MULTIMODAL_LM")
        if kind == "pairs" or is_text:
            sample["input_ids"] = ids
        if (not is_text and main == "pixel_values") or kind == "pairs" or "pixel_values" in needed:
            size = option(config, "image_size", default=IMAGE)
            size = size if isinstance(size, int) else size[0]
            channels = option(config, "num_channels", "in_channels", default=3)
            sample["pixel_values"] = random(channels, max(size, IMAGE), max(size, IMAGE))
        elif main == "input_values":
            sample["input_values"] = random(4000)
        elif main == "input_features":
            names = ("num_mel_bins", "feature_projection_input_dim", "input_dim", "feature_size")
            bins = option(model.config, *names, default=80)
            frames = 2 * (option(model.config, "max_source_positions") or 32)
            sample["input_features"] = random(bins, frames) if "Whisper" in name else random(frames, bins)
        if "bbox" in takes:
            corners = torch.randint(0, 50, (LENGTH, 4), generator=generator)
            corners[:, 2:] += corners[:, :2]
            sample["bbox"] = corners / 100.0 if name.startswith(("Bros", "Udop")) else corners
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
        if extra_of is not None:
            sample |= extra_of(model.config, random, sample)
        result.append({key: value for key, value in sample.items() if value is not None and key not in unknown})
    return result


def collate(batch: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a batch; labels that are dicts stay a list, and flags flags."""
    first = batch[0]
    return {
        key: [sample[key] for sample in batch]
        if isinstance(value, dict)
        else (value if isinstance(value, bool) else torch.stack([sample[key] for sample in batch]))
        for key, value in first.items()
    }


SPLITS = ((8, 1), (1, 8))
"""Samples of a micro-batch, and micro-batches of a step."""
LARGEST = 20_000_000
"""Parameters of a model that is still tiny."""


class NotTried(Exception):
    """A class of which no tiny model, or no batch with a loss, could be made."""


def tried(name: str, family: str) -> tuple[Any, list[dict[str, Any]]]:
    """Return a tiny model and samples of which it returns a loss; raises `NotTried` if there are none."""
    try:
        model = build(name, family)
        data = samples(name, model, family)
        trial = copy.deepcopy(model)  # some keep what they computed
        try:
            loss = trial(**collate(data))["loss"]
            failure = None if loss.isfinite() else "a loss that is not finite"
        except RuntimeError as error:
            loss, failure = None, error
        if failure is not None:  # some classes have constants of single precision
            model, data = model.float(), [_single(sample) for sample in data]
            trial = copy.deepcopy(model)
            loss = trial(**collate(data))["loss"]
        if loss != copy.deepcopy(model)(**collate(data))["loss"]:  # such as noise of a router
            freeze(model)
    except Exception as error:
        raise NotTried(f"{type(error).__name__}: {error}") from error
    size = sum(parameter.numel() for parameter in model.parameters())
    if size > LARGEST or not isinstance(loss, torch.Tensor) or loss.ndim or not loss.isfinite():
        raise NotTried(f"{size} parameters, and the loss {loss!r:.80}")
    return model, data


def verdict(name: str, family: str) -> str:
    """Return whether a class trains alike in the two splits: "right", "rejected", "batch" if it compares samples."""
    model, data = tried(name, family)
    start = _flat(model).clone()
    steps, losses = [], []
    handler = _Messages()
    logging.getLogger("omnitrain").setLevel(logging.INFO)
    logging.getLogger("omnitrain").addHandler(handler)
    chunks = contextlib.ExitStack()
    chunks.enter_context(short_chunks(model))
    try:
        for batch, accumulation in SPLITS:
            trainer = Trainer(
                copy.deepcopy(model), data, optimizer="sgd", learning_rate=1.0, max_grad_norm=None, max_steps=1,
                batch_size=batch, gradient_accumulation_steps=accumulation, shuffle=False, data_collator=collate,
                device="cpu", progress_bar=False,
            )  # fmt: skip
            trainer.train()
            steps.append(_flat(trainer.model) - start)
        for batch, _ in SPLITS:
            trainer = Trainer(
                copy.deepcopy(model), eval_batch_size=batch, data_collator=collate, device="cpu", progress_bar=False
            )
            losses.append(trainer.evaluate(data)["eval_loss"])
    except ConfigError as error:
        if "is no mean over the labels or the rows" not in str(error):
            raise
        return "rejected"
    finally:
        chunks.close()
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
