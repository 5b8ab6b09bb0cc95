"""Oracles: "no exception" proves nothing, so every check asserts an effect. Each raises OracleError with a reason."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Collection, Mapping, Sequence

from rig.completion import Completion, Outputs
from rig.outcomes import OracleError

# Where the reference's two best log-probabilities lie closer than this, another order of summation may swap them.
# float32 noise of the tiny models on the CPU is about 1e-6. Their logits lie between 8 and 16, where neighbours in
# bfloat16 are 1/16 apart: each of two candidates may be off by one step (seen with two ranks on 0.24.0: a gap of 1/16).
TOLERANCE: Mapping[str, float] = {"float32": 1e-4, "float16": 1.6e-2, "bfloat16": 0.13}

FINISHED = ("stop", "length")

# Token ids, by their name in config.json, that the checkpoints ban: an engine that samples one has ignored a weight,
# and feeds itself an image it does not have (V1: "Attempted to assign N multimodal tokens to N+1 placeholders").
VISION_IDS = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id", "vision_token_id")


@dataclass(frozen=True)
class Divergence:
    """Where two greedy continuations of prompt ``prompt`` part: ids (None: ended), and the reference's top-two gap."""

    prompt: int
    completion: int
    position: int
    got: int | None
    want: int | None
    gap: float | None

    def __str__(self) -> str:
        gap = "unknown" if self.gap is None else f"{self.gap:.3g}"
        where = f"prompt {self.prompt} completion {self.completion} position {self.position}"
        return f"{where}: {self.got} instead of {self.want}, gap of the reference's two best {gap}"


def counts(outputs: Outputs, prompts: int, n: int = 1) -> None:
    """prompts x n completions, each with at least one token and finish reason stop or length."""
    if [len(row) for row in outputs] != [n] * prompts:
        raise OracleError("count", f"{prompts} prompts x {n} asked, got {[len(row) for row in outputs]}")
    for i, row in enumerate(outputs):
        for k, done in enumerate(row):
            if not done.ids:
                raise OracleError("empty", f"prompt {i} completion {k} has no token, finish reason {done.finish!r}")
            if done.finish not in FINISHED:
                raise OracleError("finish", f"prompt {i} completion {k} finished with {done.finish!r}")


def ids_equal(got: Outputs, want: Outputs, tolerance: float) -> list[Divergence]:
    """Token ids equal to the reference's. Returns the ties; raises ``ids-differ`` at the first real difference."""
    if [len(row) for row in got] != [len(row) for row in want]:
        message = f"{[len(row) for row in got]} completions, the reference has {[len(row) for row in want]}"
        raise OracleError("count", message)
    parted = divergences(got, want)
    real = [d for d in parted if d.gap is None or d.gap >= tolerance]
    if real:
        raise OracleError("ids-differ", f"{len(real)} of {sum(map(len, want))} differ, first: {real[0]}")
    return parted


def divergences(got: Outputs, want: Outputs) -> list[Divergence]:
    """The first divergence of each completion that has one; what follows it has another context and proves nothing."""
    found = []
    for i, rows in enumerate(zip(got, want, strict=True)):
        for k, (ours, theirs) in enumerate(zip(*rows, strict=True)):
            at = _first_difference(ours.ids, theirs.ids)
            if at is not None:
                found.append(Divergence(i, k, at, _at(ours.ids, at), _at(theirs.ids, at), _gap(theirs, at)))
    return found


def lengths_equal(outputs: Outputs, want: Sequence[int]) -> None:
    """The engine's prompt lengths equal the independent count, image pads expanded."""
    got = [row[0].prompt_tokens for row in outputs]
    if got != list(want):
        raise OracleError("prompt-length", f"the engine saw {got} prompt tokens, the processor counts {list(want)}")


def none_sampled(outputs: Outputs, banned: Collection[int]) -> None:
    """No banned id was generated."""
    for i, row in enumerate(outputs):
        for k, done in enumerate(row):
            hit = [(at, token) for at, token in enumerate(done.ids) if token in banned]
            if hit:
                raise OracleError("banned-id", f"prompt {i} completion {k} position {hit[0][0]}: banned {hit[0][1]}")


def all_moved(after: Outputs, before: Outputs, tolerance: float) -> int:
    """Every prompt has other ids or, beyond the noise, other log-probabilities. Returns how many have other ids."""
    parted = [any(x.ids != y.ids for x, y in zip(*rows, strict=True)) for rows in zip(after, before, strict=True)]
    still = [
        i for i, rows in enumerate(zip(after, before, strict=True)) if not parted[i] and _shift(*rows) <= tolerance
    ]
    if still:
        raise OracleError("image-ignored", f"another picture, the same answer: prompts {still}")
    return sum(parted)


def banned_ids(config: Mapping[str, Any]) -> frozenset[int]:
    """Vision ids of a checkpoint's config.json."""
    return frozenset(config[name] for name in VISION_IDS if isinstance(config.get(name), int))


def _first_difference(got: Sequence[int], want: Sequence[int]) -> int | None:
    for at, (a, b) in enumerate(zip(got, want, strict=False)):
        if a != b:
            return at
    return None if len(got) == len(want) else min(len(got), len(want))


def _at(ids: Sequence[int], position: int) -> int | None:
    return ids[position] if position < len(ids) else None


def _gap(done: Completion, position: int) -> float | None:
    if position >= len(done.top2):
        return None
    best, second = done.top2[position]
    return abs(best - second)


def _shift(after: Sequence[Completion], before: Sequence[Completion]) -> float:
    """Largest difference of the best two log-probabilities."""
    pairs = [pair for x, y in zip(after, before, strict=True) for pair in zip(x.top2, y.top2, strict=False)]
    return max((abs(a - b) for one, two in pairs for a, b in zip(one, two, strict=True)), default=0.0)
