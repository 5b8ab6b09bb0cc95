"""A byte-level BPE tokenizer with a fixed vocabulary: nothing is trained, and every file is written here.

Ids: 0-255 bytes (in GPT-2's order), 256-305 merges, 306-319 special tokens. The library that reads `tokenizer.json`
is never asked to write it: what it writes changes from release to release.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

Json = dict[str, Any]

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
END_OF_TEXT, END_OF_TURN = "<|endoftext|>", "<|im_end|>"

_SPACE = "\u0120"  # how byte-level BPE spells a space
_BIGRAMS = ("th", "he", "in", "er", "an", "re", "on", "at", "en", "nd", "ti", "es",
            "or", "te", "of", "ed", "is", "it", "al", "ar", "st", "to", "nt", "ng")  # fmt: skip
MERGES = tuple((_SPACE, chr(c)) for c in range(ord("a"), ord("z") + 1)) + tuple((b[0], b[1]) for b in _BIGRAMS)

# Qwen2's own, word for word: newer transformers rebuild the tokenizer from vocab.json with this pattern.
_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# Qwen2-VL's template: text, or a list of text, image and video parts.
CHAT_TEMPLATE = (
    "{% set image_count = namespace(value=0) %}{% set video_count = namespace(value=0) %}"
    "{% for message in messages %}"
    "{% if loop.first and message['role'] != 'system' %}"
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}"
    "<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}<|im_end|>\n"
    "{% else %}{% for content in message['content'] %}"
    "{% if content['type'] == 'image' or 'image' in content or 'image_url' in content %}"
    "{% set image_count.value = image_count.value + 1 %}"
    "{% if add_vision_id %}Picture {{ image_count.value }}: {% endif %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif content['type'] == 'video' or 'video' in content %}"
    "{% set video_count.value = video_count.value + 1 %}"
    "{% if add_vision_id %}Video {{ video_count.value }}: {% endif %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% elif 'text' in content %}{{ content['text'] }}{% endif %}"
    "{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def vocabulary() -> dict[str, int]:
    """Bytes, then merges: token to id, without the special tokens."""
    tokens = [*_byte_symbols(), *(left + right for left, right in MERGES)]
    return {token: i for i, token in enumerate(tokens)}


def special_ids() -> dict[str, int]:
    """Special token to id; they follow the vocabulary."""
    first = len(vocabulary())
    return {token: first + i for i, token in enumerate(SPECIAL_TOKENS)}


def vocab_size() -> int:
    """Number of ids, specials included: nothing is left that a model could sample and a tokenizer not read."""
    return len(vocabulary()) + len(SPECIAL_TOKENS)


def tokenizer_files(with_vision: bool) -> dict[str, Json | str]:
    """The tokenizer's files, by name: JSON documents, and `merges.txt` as text."""
    files: dict[str, Json | str] = {
        "tokenizer.json": _tokenizer_json(),
        "tokenizer_config.json": _tokenizer_config(),
        "special_tokens_map.json": {
            "additional_special_tokens": list(SPECIAL_TOKENS[1:]),
            "eos_token": END_OF_TURN,
            "pad_token": END_OF_TEXT,
        },
        "vocab.json": vocabulary(),
        "merges.txt": "#version: 0.2\n" + "".join(f"{left} {right}\n" for left, right in MERGES),
    }
    if with_vision:  # processors look for the template in a file of its own
        files["chat_template.json"] = {"chat_template": CHAT_TEMPLATE}
    return files


def _byte_symbols() -> Iterator[str]:
    """GPT-2's printable stand-ins for the 256 bytes: printable Latin-1 first, the others from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    yield from map(chr, printable)
    yield from (chr(0x100 + i) for i in range(256 - len(printable)))


def _added_token(content: str) -> Json:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {"content": content, **flags}


def _tokenizer_config() -> Json:
    return {
        "add_prefix_space": False,
        "added_tokens_decoder": {str(i): _added_token(token) for token, i in special_ids().items()},
        "additional_special_tokens": list(SPECIAL_TOKENS[1:]),
        "bos_token": None,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": END_OF_TURN,
        "errors": "replace",
        "model_max_length": 32768,
        "pad_token": END_OF_TEXT,
        "split_special_tokens": False,
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": None,
    }


def _tokenizer_json() -> Json:
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": _PATTERN}, "behavior": "Isolated", "invert": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, **_added_token(token)} for token, i in special_ids().items()],
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "post_processor": byte_level,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": vocabulary(),
            "merges": [f"{left} {right}" for left, right in MERGES],  # this spelling is read by all releases
        },
    }
