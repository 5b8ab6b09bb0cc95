"""What is made: three architectures, three variants each, all of them tiny."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ModelName = Literal["qwen2", "qwen2_vl", "qwen2_5_vl"]

HEAD_DIM = 64  # text and vision: a head size that every attention kernel since 0.6.3 takes


@dataclass(frozen=True)
class Variant:
    """One checkpoint of an architecture. Equal `weights` means equal numbers, except for what the ban sets."""

    name: str
    weights: str
    banned: bool = True


@dataclass(frozen=True)
class TextSize:
    """The decoder. Heads, key/value heads and widths divide by two ranks."""

    hidden: int = 256
    intermediate: int = 256
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    mrope_section: tuple[int, int, int] = (8, 12, 12)  # sums to HEAD_DIM / 2


@dataclass(frozen=True)
class VisionSize:
    """The image encoder: 14-pixel patches, merged two by two."""

    hidden: int = 128
    intermediate: int = 512
    layers: int = 2
    heads: int = 2
    patch: int = 14
    temporal_patch: int = 2
    channels: int = 3
    merge: int = 2
    window: int = 112  # pixels; Qwen2.5-VL only
    full_attention_layers: tuple[int, ...] = (1,)  # Qwen2.5-VL only: the other layer attends within windows


@dataclass(frozen=True)
class ModelSpec:
    """An architecture and the checkpoints made of it; `<root>/<name>/<variant>/` holds one."""

    name: ModelName
    architecture: str
    variants: tuple[Variant, ...]
    text: TextSize = TextSize()
    vision: VisionSize | None = None


# w2 is another set of numbers for whatever updates weights; w1-unbanned is w1 without the ban.
VARIANTS = (Variant("w1", "w1"), Variant("w2", "w2"), Variant("w1-unbanned", "w1", banned=False))

MODELS: tuple[ModelSpec, ...] = (
    ModelSpec("qwen2", "Qwen2ForCausalLM", VARIANTS),
    ModelSpec("qwen2_vl", "Qwen2VLForConditionalGeneration", VARIANTS, vision=VisionSize()),
    ModelSpec("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration", VARIANTS, vision=VisionSize(intermediate=256)),
)
