"""config.json and its neighbours, in the spelling of the published Qwen checkpoints.

Every transformers from 4.45 to 5 reads what the vendor published, so the keys are the vendor's (a flat text
configuration, `rope_scaling` with `type`), not what one release would save.
"""

from __future__ import annotations

from typing import Any

from harness.models.spec import ModelSpec, TextSize, VisionSize
from harness.models.tokenizer import END_OF_TEXT, END_OF_TURN, special_ids, vocab_size

Json = dict[str, Any]

MAX_POSITIONS = 8192
MIN_IMAGE_TOKENS, MAX_IMAGE_TOKENS = 4, 64  # after merging; engines profile with the largest image


def config_files(spec: ModelSpec) -> dict[str, Json]:
    """The JSON files that describe the model and its image processing."""
    ids = special_ids()
    files: dict[str, Json] = {
        "config.json": _config(spec),
        "generation_config.json": {
            "bos_token_id": ids[END_OF_TEXT],
            "eos_token_id": [ids[END_OF_TURN], ids[END_OF_TEXT]],
            "pad_token_id": ids[END_OF_TEXT],
        },
    }
    if spec.vision:
        pixels = _preprocessor(spec, spec.vision)
        files["preprocessor_config.json"] = {"image_processor_type": "Qwen2VLImageProcessor", **pixels}
        files["video_preprocessor_config.json"] = {"video_processor_type": "Qwen2VLVideoProcessor", **pixels}
    return files


def _config(spec: ModelSpec) -> Json:
    ids = special_ids()
    config: Json = {
        "architectures": [spec.architecture],
        "model_type": spec.name,
        "bos_token_id": ids[END_OF_TEXT],
        "eos_token_id": ids[END_OF_TURN],
        **_text_config(spec.text),
    }
    if spec.vision:
        config |= {
            "image_token_id": ids["<|image_pad|>"],
            "video_token_id": ids["<|video_pad|>"],
            "vision_start_token_id": ids["<|vision_start|>"],
            "vision_end_token_id": ids["<|vision_end|>"],
            "vision_token_id": ids["<|vision_pad|>"],
            "rope_scaling": {"type": "mrope", "mrope_section": list(spec.text.mrope_section)},
            "vision_config": _vision_config(spec, spec.vision),
        }
    return config


def _text_config(text: TextSize) -> Json:
    return {
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "hidden_size": text.hidden,
        "initializer_range": 0.02,
        "intermediate_size": text.intermediate,
        "max_position_embeddings": MAX_POSITIONS,
        "max_window_layers": text.layers,
        "num_attention_heads": text.heads,
        "num_hidden_layers": text.layers,
        "num_key_value_heads": text.kv_heads,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "sliding_window": MAX_POSITIONS,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": vocab_size(),
    }


def _vision_config(spec: ModelSpec, vision: VisionSize) -> Json:
    common: Json = {
        "depth": vision.layers,
        "num_heads": vision.heads,
        "in_channels": vision.channels,
        "in_chans": vision.channels,  # as real checkpoints have it: vLLM 0.6.3 reads this one
        "patch_size": vision.patch,
        "spatial_merge_size": vision.merge,
        "spatial_patch_size": vision.patch,
        "temporal_patch_size": vision.temporal_patch,
    }
    if spec.name == "qwen2_vl":  # here hidden_size is the width of the decoder
        ratio = vision.intermediate // vision.hidden
        return common | {"embed_dim": vision.hidden, "hidden_size": spec.text.hidden, "mlp_ratio": ratio}
    return common | {
        "hidden_act": "silu",
        "hidden_size": vision.hidden,
        "intermediate_size": vision.intermediate,
        "out_hidden_size": spec.text.hidden,
        "window_size": vision.window,
        "fullatt_block_indexes": list(vision.full_attention_layers),
        "tokens_per_second": 2,
    }


def _preprocessor(spec: ModelSpec, vision: VisionSize) -> Json:
    token_pixels = (vision.patch * vision.merge) ** 2
    return {
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
        "processor_class": "Qwen2VLProcessor" if spec.name == "qwen2_vl" else "Qwen2_5_VLProcessor",
        "merge_size": vision.merge,
        "min_pixels": MIN_IMAGE_TOKENS * token_pixels,
        "max_pixels": MAX_IMAGE_TOKENS * token_pixels,
        "patch_size": vision.patch,
        "temporal_patch_size": vision.temporal_patch,
    }
