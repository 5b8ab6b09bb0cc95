"""The numbers: raw PCG64 output scaled by powers of two, and the ban.

Every value is exact in bfloat16, so float32 on a CPU and bfloat16 on a GPU compute with the same weights. Only
`random_raw` is used: numpy promises its stream, not those of the generators above it. A tensor is seeded by its own
name, so that adding one changes no other, and the unbanned twin shares everything but the ban.

The ban. One channel of the residual stream (`BAN_CHANNEL`) is the constant `BAN_LEVEL`: the embedding and the vision
merger's bias put it there, no layer of the decoder reads or writes it, and the final norm keeps its sign. `lm_head`
holds `-BAN_WEIGHT` there in the rows of special tokens, so that their logits lie far below all others whatever the
other channels hold. Special tokens include the ends of text and turn: a completion has exactly `max_tokens` tokens,
and a shorter one is a finding. (A scenario about stopping names a stop token of its own.) The unbanned twin holds a
small positive number in the row of the image pad instead, so that it samples one within a few tokens.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from harness.models.spec import HEAD_DIM, ModelSpec, TextSize, Variant, VisionSize
from harness.models.tokenizer import special_ids, vocab_size

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float32]

HEAD = "lm_head.weight"
BAN_CHANNEL = 0
BAN_LEVEL = 16.0
BAN_WEIGHT = 32.0
BAIT_WEIGHT = 2.5


@dataclass(frozen=True)
class Tensor:
    """How to make one tensor: uniform in (-bound, bound), or for gains in [0.5, 1.5).

    `bound` is a power of two. The bounds were chosen by trial: layers write about as much as the embedding does, so
    that greedy ids depend on the whole context and seldom repeat; attention is soft, since sharp attention multiplies
    the rounding errors of bfloat16; logits have a standard deviation of 4.5.
    `channel`, unless None, overwrites what the tensor holds for the banned channel, an index along `axis`.
    """

    name: str
    shape: tuple[int, ...]
    bound: float = 1.0
    gain: bool = False
    channel: float | None = None
    axis: int = 0


def serialize(spec: ModelSpec, variant: Variant) -> bytes:
    """`model.safetensors` of a variant.

    Written here and not by the library, whose header may be laid out anew in any release; the tests read it back with
    the library.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    chunks: list[bytes] = []
    offset = 0
    for tensor in tensors(spec):
        data = _bfloat16(values(spec, variant, tensor))
        span = [offset, offset + len(data)]
        header[tensor.name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": span}
        chunks.append(data)
        offset = span[1]
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the format aligns the data to eight bytes
    return len(text).to_bytes(8, "little") + text + b"".join(chunks)


def tensors(spec: ModelSpec) -> Iterator[Tensor]:
    """All tensors of an architecture, in file order."""
    hidden, vocab = spec.text.hidden, vocab_size()
    yield Tensor("model.embed_tokens.weight", (vocab, hidden), 2.0, channel=BAN_LEVEL, axis=1)
    for layer in range(spec.text.layers):
        yield from _text_layer(f"model.layers.{layer}", spec.text)
    yield Tensor("model.norm.weight", (hidden,), gain=True, channel=1.0)
    yield Tensor(HEAD, (vocab, hidden), 0.5, channel=0.0, axis=1)
    if spec.vision:
        gated = spec.name == "qwen2_5_vl"
        yield from _vision(spec.vision, hidden, gated)


def values(spec: ModelSpec, variant: Variant, tensor: Tensor) -> Floats:
    """One tensor's values, as float32 that are exact in bfloat16."""
    import numpy as np

    raw = _raw_bytes(f"{spec.name}/{variant.weights}/{tensor.name}", math.prod(tensor.shape))
    if tensor.gain:
        numbers = (raw >> 1).astype(np.float32) / np.float32(128) + np.float32(0.5)
    else:  # odd integers from -255 to 255
        numbers = (2 * raw.astype(np.float32) - 255) * np.float32(tensor.bound / 256)
    return _ban(numbers.reshape(tensor.shape), tensor, variant)


def _text_layer(prefix: str, text: TextSize) -> Iterator[Tensor]:
    hidden, inner, kv = text.hidden, text.intermediate, text.kv_heads * HEAD_DIM
    yield Tensor(f"{prefix}.input_layernorm.weight", (hidden,), gain=True, channel=0.0)
    for name, width in (("q", hidden), ("k", kv), ("v", kv)):
        yield Tensor(f"{prefix}.self_attn.{name}_proj.weight", (width, hidden), 0.25)
        yield Tensor(f"{prefix}.self_attn.{name}_proj.bias", (width,), 1.0)
    yield Tensor(f"{prefix}.self_attn.o_proj.weight", (hidden, hidden), 0.125, channel=0.0)
    yield Tensor(f"{prefix}.post_attention_layernorm.weight", (hidden,), gain=True, channel=0.0)
    yield Tensor(f"{prefix}.mlp.gate_proj.weight", (inner, hidden), 0.25)
    yield Tensor(f"{prefix}.mlp.up_proj.weight", (inner, hidden), 0.25)
    yield Tensor(f"{prefix}.mlp.down_proj.weight", (hidden, inner), 0.0625, channel=0.0)


def _vision(vision: VisionSize, out: int, gated: bool) -> Iterator[Tensor]:
    kernel = (vision.channels, vision.temporal_patch, vision.patch, vision.patch)
    merged = vision.hidden * vision.merge**2
    yield Tensor("visual.patch_embed.proj.weight", (vision.hidden, *kernel), 0.0625)
    for layer in range(vision.layers):
        yield from _vision_layer(f"visual.blocks.{layer}", vision, gated)
    yield from _norm("visual.merger.ln_q", vision.hidden, bias=not gated)
    yield from _linear("visual.merger.mlp.0", merged, merged, 0.125)
    yield from _linear("visual.merger.mlp.2", merged, out, 0.125, into_decoder=True)


def _vision_layer(prefix: str, vision: VisionSize, gated: bool) -> Iterator[Tensor]:
    hidden, inner = vision.hidden, vision.intermediate
    yield from _norm(f"{prefix}.norm1", hidden, bias=not gated)
    yield from _linear(f"{prefix}.attn.qkv", hidden, 3 * hidden, 0.125)
    yield from _linear(f"{prefix}.attn.proj", hidden, hidden, 0.125)
    yield from _norm(f"{prefix}.norm2", hidden, bias=not gated)
    if gated:
        yield from _linear(f"{prefix}.mlp.gate_proj", hidden, inner, 0.25)
        yield from _linear(f"{prefix}.mlp.up_proj", hidden, inner, 0.25)
        yield from _linear(f"{prefix}.mlp.down_proj", inner, hidden, 0.125)
    else:
        yield from _linear(f"{prefix}.mlp.fc1", hidden, inner, 0.25)
        yield from _linear(f"{prefix}.mlp.fc2", inner, hidden, 0.0625)


def _norm(prefix: str, width: int, bias: bool) -> Iterator[Tensor]:
    yield Tensor(f"{prefix}.weight", (width,), gain=True)
    if bias:
        yield Tensor(f"{prefix}.bias", (width,), 0.25)


def _linear(prefix: str, inputs: int, outputs: int, bound: float, *, into_decoder: bool = False) -> Iterator[Tensor]:
    yield Tensor(f"{prefix}.weight", (outputs, inputs), bound, channel=0.0 if into_decoder else None)
    yield Tensor(f"{prefix}.bias", (outputs,), 0.25, channel=BAN_LEVEL if into_decoder else None)


def _ban(numbers: Floats, tensor: Tensor, variant: Variant) -> Floats:
    """Sets what the tensor holds for the banned channel, in place."""
    if tensor.channel is not None:
        numbers.swapaxes(0, tensor.axis)[BAN_CHANNEL] = tensor.channel
    if tensor.name == HEAD:
        ids = special_ids()
        if variant.banned:
            numbers[list(ids.values()), BAN_CHANNEL] = -BAN_WEIGHT
        else:
            numbers[ids["<|image_pad|>"], BAN_CHANNEL] = BAIT_WEIGHT
    return numbers


def _raw_bytes(name: str, count: int) -> NDArray[np.uint8]:
    """`count` bytes of a PCG64 stream that belongs to `name`, the same on either byte order."""
    import numpy as np

    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:16], "little")
    words = np.random.PCG64(seed).random_raw(-(-count // 8))
    return words.astype("<u8").view(np.uint8)[:count]


def _bfloat16(numbers: Floats) -> bytes:
    """The upper halves of float32 values whose lower halves are zero."""
    import numpy as np

    bits = numbers.astype("<f4").view("<u4")
    if np.any(bits & 0xFFFF):
        raise ValueError("a weight is not exact in bfloat16")
    return (bits >> 16).astype("<u2").tobytes()
