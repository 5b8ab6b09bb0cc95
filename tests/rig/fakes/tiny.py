"""A model small enough to be arithmetic: its tokenizer, its image pads, its continuations."""

from __future__ import annotations

import re
import zlib

SPECIAL = {"<|im_start|>": 300, "<|im_end|>": 301, "<|vision_start|>": 302, "<|vision_end|>": 303, "<|image_pad|>": 304}
PAD = SPECIAL["<|image_pad|>"]
CONFIG = {
    "architectures": ["TinyVL"],
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "hidden_size": 1024,
    "vision_config": {},
    "image_token_id": PAD,
    "vision_start_token_id": 302,
    "vision_end_token_id": 303,
}


def encode(text):
    parts = re.split(r"(<\|[a-z_]+\|>)", text)
    return [t for part in parts for t in ([SPECIAL[part]] if part in SPECIAL else part.encode())]


def pads(image):
    return max(1, image.width // 28) * max(1, image.height // 28)


def expand(ids, images):
    """Each pad becomes as many as its picture needs."""
    left = iter(images)
    return [t for token in ids for t in ([PAD] * pads(next(left)) if token == PAD else [token])]


def continuation(ids, images, length, salt=0):
    seen = zlib.crc32(repr((list(ids), [zlib.crc32(image.tobytes()) for image in images], salt)).encode())
    return [(seen >> (i % 20)) % 256 for i in range(length)]
