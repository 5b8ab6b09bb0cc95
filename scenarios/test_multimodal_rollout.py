"""Does a rollout with images in its prompts give what a cold start gives?

One engine answers all checks, as it does within a training step: text, pictures of several sizes, two pictures a
prompt, text and pictures in one batch, verl's prompt form, n > 1. Each check asserts an effect: counts, prompt lengths
by the Hugging Face processor, ids equal to a cold start. Known: vllm#15185, vllm#19666 (placeholder counts of mixed
batches), vllm#13143, vllm#15364 (max_pixels), verl#805 (one image a prompt by default).
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from rig import oracles
from rig.asker import answers
from rig.batches import BATCHES, prompt_lengths, repainted
from rig.cell import Cell
from rig.completion import Outputs
from rig.engine import Engine
from rig.events import Events
from rig.outcomes import NotAvailable, OracleError
from rig.reference import Reference

# What kills an engine, or leaves a request behind in it, comes last: a failure should hide as little as it can.
SAFE = ["text", "one_image", "sizes", "two_images", "token_ids"]
GREEDY = [*SAFE, "mixed"]


class Asker:
    """Asks the shared engine a batch and checks what must hold for every answer."""

    def __init__(self, engine: Engine, processor: Any, banned: frozenset[int]) -> None:
        self.engine = engine
        self.processor = processor
        self.banned = banned

    def __call__(self, name: str) -> Outputs:
        outputs = answers(self.engine, self.processor, name)
        oracles.none_sampled(outputs, self.banned)
        return outputs


@pytest.fixture
def ask(cell: Cell, engine: Engine, processor: Any) -> Asker:
    config = json.loads((cell.model_dir() / "config.json").read_text(encoding="utf-8"))
    if "vision_config" not in config:
        raise NotAvailable("the model takes no images", "vision_config in config.json")
    return Asker(engine, processor, oracles.banned_ids(config))


@pytest.fixture
def tolerance(cell: Cell) -> float:
    return oracles.TOLERANCE[cell.dtype]


def test_text(ask: Asker) -> None:
    outputs = ask("text")
    if len({row[0].ids for row in outputs}) == 1:
        raise OracleError("same-answers", f"{len(outputs)} different prompts, one answer: {outputs[0][0].ids}")


def test_one_image(ask: Asker) -> None:
    ask("one_image")


def test_sizes(ask: Asker) -> None:
    ask("sizes")


def test_two_images(ask: Asker) -> None:
    ask("two_images")


def test_token_ids(ask: Asker) -> None:
    """verl's form is the same question: the engine must see the same prompt as with text."""
    by_ids = [row[0].prompt_ids for row in ask("token_ids")]
    by_text = [row[0].prompt_ids for name in ("one_image", "two_images") for row in ask(name)]
    if by_ids != by_text:
        lengths = [list(map(len, prompts)) for prompts in (by_ids, by_text)]
        raise OracleError("prompt-differs", f"prompt lengths by token ids {lengths[0]}, by text {lengths[1]}")


def test_n(ask: Asker, events: Events) -> None:
    """n > 1 at temperature 1 samples independently: three equal continuations of 12 tokens are no sample."""
    for row in ask("n3"):
        distinct = len({done.ids for done in row})
        events.property("n.distinct", distinct)
        if distinct == 1:
            raise OracleError("not-sampled", f"{len(row)} equal continuations at temperature 1: {row[0].ids}")


@pytest.mark.parametrize("name", SAFE)
def test_prompt_length(name: str, ask: Asker) -> None:
    oracles.lengths_equal(ask(name), prompt_lengths(BATCHES[name], ask.processor))


@pytest.mark.parametrize(("name", "which"), [("one_image", 0), ("sizes", 0), ("two_images", 0), ("two_images", 1)])
def test_image_matters(name: str, which: int, ask: Asker, tolerance: float, events: Events) -> None:
    """Another picture of the same size gives another answer: the engine has looked at it, also at the second one."""
    other = repainted(BATCHES[name], which)
    before = ask(name)
    after = ask.engine.generate(other.requests(ask.processor), other.sampling)
    oracles.counts(after, len(other.prompts))
    events.property("image_matters.other_ids", oracles.all_moved(after, before, tolerance))


@pytest.mark.parametrize("name", SAFE)
def test_repeat(name: str, ask: Asker, tolerance: float, events: Events) -> None:
    first = ask(name)
    _record_ties(oracles.ids_equal(ask(name), first, tolerance), events)


@pytest.mark.parametrize("name", GREEDY)
def test_cold_start(name: str, ask: Asker, reference: Reference, tolerance: float, events: Events) -> None:
    _record_ties(oracles.ids_equal(ask(name), reference.outputs(name), tolerance), events)


def test_mixed_batch(ask: Asker) -> None:
    """Text-only and image prompts in one batch, as a rollout over a mixed data set has them."""
    oracles.lengths_equal(ask("mixed"), prompt_lengths(BATCHES["mixed"], ask.processor))


def _record_ties(ties: list[oracles.Divergence], events: Events) -> None:
    if ties:
        events.property("ties", [str(tie) for tie in ties])
