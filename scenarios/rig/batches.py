"""The named prompt batches: the same prompts and pictures for every version, from fixed integer arithmetic."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Mapping, Sequence

if TYPE_CHECKING:
    from PIL.Image import Image

# One pad an image: the engine expands it. Handing in expanded pads together with the pictures is another question
# (expanded twice: trl#6294, verl#5241).
IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"

# log-probabilities of the two best candidates come with every token: they tell a tie from a difference
GREEDY: Mapping[str, Any] = {"temperature": 0.0, "max_tokens": 12, "logprobs": 2, "detokenize": False}
SAMPLED: Mapping[str, Any] = {**GREEDY, "temperature": 1.0, "n": 3, "seed": 1234}

# (width, height) in pixels. A merged patch is 28 x 28: some are no multiple of it and get resized, one is upscaled
# from below the smallest allowed area, one is scaled down from above the largest.
SIZES = ((56, 56), (112, 56), (56, 140), (84, 84), (100, 75), (61, 199), (30, 41), (320, 200))


@dataclass(frozen=True)
class Prompt:
    """One prompt: text with one image pad an image, and the pictures as (width, height, variant)."""

    text: str
    pictures: tuple[tuple[int, int, int], ...] = ()

    @property
    def images(self) -> list[Image]:
        return [draw(*picture) for picture in self.pictures]


@dataclass(frozen=True)
class Batch:
    """Prompts that go into one ``generate``; ``token_ids``: in the form of verl's rollout workers."""

    name: str
    prompts: tuple[Prompt, ...]
    sampling: Mapping[str, Any]
    token_ids: bool = False

    @property
    def n(self) -> int:
        """Completions a prompt."""
        return int(self.sampling.get("n", 1))

    @property
    def greedy(self) -> bool:
        return bool(self.sampling["temperature"] == 0.0)

    def requests(self, processor: Any) -> list[dict[str, Any]]:
        """vLLM prompt dicts. verl's form (since verl PR#386): ids with one pad an image, beside the pictures."""
        return [_request(prompt, processor if self.token_ids else None) for prompt in self.prompts]


def draw(width: int, height: int, variant: int) -> Image:
    """An RGB picture: a colour gradient with bars, another for every variant."""
    import numpy as np
    from PIL import Image

    y, x, channel = np.ogrid[:height, :width, :3]
    pixels = (x * (3 + variant) + y * (5 + 2 * variant) + channel * (70 + 31 * variant) + (x // 7 % 2) * 90) % 256
    return Image.fromarray(pixels.astype(np.uint8))


def prompt_lengths(batch: Batch, processor: Any) -> list[int]:
    """Tokens a prompt has, by the Hugging Face processor: the independent count, image pads expanded."""
    return [_length(prompt, processor) for prompt in batch.prompts]


def _length(prompt: Prompt, processor: Any) -> int:
    if not prompt.pictures:
        return len(_ids(prompt.text, processor))
    return len(processor(text=[prompt.text], images=prompt.images)["input_ids"][0])


def _request(prompt: Prompt, processor: Any | None) -> dict[str, Any]:
    request: dict[str, Any] = {"multi_modal_data": {"image": prompt.images}} if prompt.pictures else {}
    if processor is None:
        return {"prompt": prompt.text, **request}
    return {"prompt_token_ids": _ids(prompt.text, processor), **request}


def _ids(text: str, processor: Any) -> list[int]:
    tokenizer = getattr(processor, "tokenizer", processor)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _ask(question: str, *pictures: tuple[int, int, int]) -> Prompt:
    return Prompt(CHAT.format(IMAGE * len(pictures) + question), pictures)


_TEXTS = ("What is two plus two?", "Name a colour.", "Write one line about the sea, then stop.")
# Eight of them are longer than a block of any KV cache (128 tokens with IPEX, else 16), and shared by all prompts.
_STORY = "A boat left the harbour at noon and came back at night. "
_ONE = _ask("What is in the picture?", (112, 84, 0))
_TWO = _ask("Which picture is darker?", (56, 84, 1), (84, 56, 2))


def _batches() -> Sequence[Batch]:
    texts = tuple(_ask(text) for text in _TEXTS)
    sizes = tuple(_ask(f"Picture {i}?", (width, height, i)) for i, (width, height) in enumerate(SIZES))
    mixed = (texts[0], _ONE, texts[1], _TWO)
    return (
        Batch("text", texts, GREEDY),
        Batch("long", tuple(_ask(f"{_STORY * 8}{text}") for text in _TEXTS), GREEDY),
        Batch("one_image", (_ONE,), GREEDY),
        Batch("sizes", sizes, GREEDY),
        Batch("two_images", (_TWO,), GREEDY),
        Batch("token_ids", (_ONE, _TWO), GREEDY, token_ids=True),
        Batch("n3", (_ONE,), SAMPLED),
        # last: on V0 the engine may have to get rid of what this one leaves behind
        Batch("mixed", mixed, GREEDY),
    )


BATCHES: Mapping[str, Batch] = {batch.name: batch for batch in _batches()}


def batches_for(multimodal: bool) -> list[Batch]:
    """The batches that a model can be asked, in order: those without pictures only, for a text model."""
    return [b for b in BATCHES.values() if multimodal or not any(prompt.pictures for prompt in b.prompts)]


def repainted(batch: Batch, which: int) -> Batch:
    """The same prompts with another picture, of the same size, in place of each one's picture ``which``."""

    def repaint(prompt: Prompt) -> Prompt:
        width, height, variant = prompt.pictures[which]
        other = (width, height, variant + len(SIZES))
        return replace(prompt, pictures=(*prompt.pictures[:which], other, *prompt.pictures[which + 1 :]))

    return replace(batch, name=f"{batch.name}.repainted", prompts=tuple(map(repaint, batch.prompts)))
