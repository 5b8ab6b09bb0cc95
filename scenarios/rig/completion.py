"""What an engine answered, in one form for every version."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, List


@dataclass(frozen=True)
class Completion:
    """One sampled continuation.

    ``ids``: generated token ids; ``finish``: ``stop``, ``length``, another word of the engine's, or None;
    ``prompt_ids``: the prompt as the engine saw it, image pads expanded; ``prompt_tokens``: their number;
    ``top2``: for each generated token the log-probabilities of the two best candidates, best first.
    """

    ids: tuple[int, ...]
    finish: str | None
    prompt_tokens: int
    prompt_ids: tuple[int, ...] = ()
    top2: tuple[tuple[float, float], ...] = ()


Outputs = List[List[Completion]]  # [prompt][k-th of n]


def completions(request: Any) -> list[Completion]:
    """The completions of one vLLM ``RequestOutput``, in the order of their index."""
    prompt = tuple(int(token) for token in request.prompt_token_ids or ())
    rows = sorted(request.outputs, key=lambda row: row.index)
    return [
        Completion(tuple(map(int, row.token_ids)), row.finish_reason, len(prompt), prompt, _top2(row.logprobs))
        for row in rows
    ]


def _top2(logprobs: Any) -> tuple[tuple[float, float], ...]:
    """Two best log-probabilities a token; () when the engine gave fewer (they only excuse ties, never a failure).

    vLLM gives a dict a position: token id -> Logprob, with the sampled token added when it is not among the best.
    """
    pairs = []
    for candidates in logprobs or ():
        values = sorted(filter(math.isfinite, (float(entry.logprob) for entry in candidates.values())), reverse=True)
        if len(values) < 2:
            return ()
        pairs.append((values[0], values[1]))
    return tuple(pairs)
