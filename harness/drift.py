"""References of a run's targets → in what each answers otherwise than its predecessor. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

from packaging.version import Version

from harness.references import Answer, Answered, Completion, LeftOut

# By dtype: log-probabilities that lie closer may be swapped by another order of summation. As the suite's own checks
# have it (scenarios/rig/oracles.py says why).
TOLERANCE: Mapping[str, float] = {"float32": 1e-4, "float16": 1.6e-2, "bfloat16": 0.13}

AXES = ("device", "model", "dtype", "gpu")  # unequal in one of them, two targets are not compared

_Outputs = Sequence[Sequence[Completion]]


class Kind(StrEnum):
    """What became of one continuation; in the order in which it is said."""

    COUNT = "other number of completions"
    PROMPT = "other prompt"  # the engines saw prompts of unequal length: nothing that follows is a tie
    TOKENS = "other tokens"
    LOGPROBS = "other log-probabilities"  # by the tolerance or more, up to where the tokens part
    TIE = "tie"  # the tokens part where the predecessor's two best lie closer than the tolerance
    EQUAL = "equal"


@dataclass(frozen=True, kw_only=True)
class Place:
    weights: str
    batch: str
    prompt: int = 0
    completion: int = 0


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One continuation beside the predecessor's.

    `before` and `after`: numbers of completions or of the prompt's tokens, or the ids at `position`, the first that
    differ (None: that one had ended). `gap`: of the predecessor's two best there. `off`: the largest difference of the
    best log-probability up to and with that position, `off_at` where; None where one of them gave none.
    """

    kind: Kind
    place: Place
    before: int | None = None
    after: int | None = None
    position: int | None = None
    gap: float | None = None
    off: float | None = None
    off_at: int | None = None


@dataclass(frozen=True, kw_only=True)
class Turned:
    """A batch that only one of the two has an answer to; `before`, `after`: `answered`, `raised …`, `absent`."""

    place: Place
    before: str
    after: str


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A target and its predecessor. `findings` has every greedy continuation that both have, `turned` the batches that
    one of them has no answer to, `unanswered` counts those that neither has."""

    older: Answered
    newer: Answered
    tolerance: float
    findings: tuple[Finding, ...]
    turned: tuple[Turned, ...]
    unanswered: int

    def of(self, kind: Kind) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.kind is kind)

    @property
    def drifts(self) -> bool:
        return any(finding.kind not in (Kind.TIE, Kind.EQUAL) for finding in self.findings)

    @property
    def off(self) -> float | None:
        """The largest difference of all; None where no log-probabilities could be compared."""
        return max((finding.off for finding in self.findings if finding.off is not None), default=None)


@dataclass(frozen=True, kw_only=True)
class Drift:
    """Of one run: pairs in the order of versions, and the cells that are in none of them as the newer one, and why."""

    run: str
    pairs: tuple[Pair, ...]
    left_out: tuple[LeftOut, ...]

    @property
    def exit_code(self) -> int:
        """0 nothing drifts, 1 a target does, 3 there was nothing to compare."""
        if not any(pair.findings for pair in self.pairs):
            return 3
        return 1 if any(pair.drifts for pair in self.pairs) else 0


def drift(run: str, answered: Iterable[Answered], left_out: Iterable[LeftOut] = ()) -> Drift:
    """Each target against the next older one, by declared version, of the same question, device and axes; of equal
    versions, the plan's order counts."""
    left, groups = list(left_out), dict[tuple[str, ...], list[Answered]]()
    for one in answered:
        if one.axes.get("dtype") in TOLERANCE:
            groups.setdefault(_like(one), []).append(one)
        else:
            left.append(LeftOut(cell=one.cell.id, reason=f"no tolerance is known for {one.axes.get('dtype')!r}"))
    ordered = [sorted(group, key=_version) for group in groups.values()]
    everyone = [one for group in ordered for one in group]
    left += [_alone(group[0]) for group in ordered if len(group) == 1 or _has_older(group[0], everyone)]
    pairs = tuple(_pair(older, newer) for group in ordered for older, newer in pairwise(group))
    return Drift(run=run, pairs=pairs, left_out=tuple(left))


def _version(one: Answered) -> Version:
    return Version(one.cell.vllm)


def _like(one: Answered) -> tuple[str, ...]:
    return (one.cell.device, one.cell.question, *(one.axes.get(axis, "") for axis in AXES))


def _has_older(one: Answered, others: Iterable[Answered]) -> bool:
    asked = (one.cell.device, one.cell.question)
    return any(
        (other.cell.device, other.cell.question) == asked and _version(other) < _version(one) for other in others
    )


def _alone(one: Answered) -> LeftOut:
    axes = ", ".join(one.axes[axis] for axis in AXES if one.axes.get(axis))
    return LeftOut(cell=one.cell.id, reason=f"no predecessor with the same axes ({axes}) has answers")


def _pair(older: Answered, newer: Answered) -> Pair:
    tolerance = TOLERANCE[newer.axes["dtype"]]
    findings, turned, unanswered = list[Finding](), list[Turned](), 0
    for place, before, after in _batches(older, newer):
        if before and after and before.outputs and after.outputs:
            findings += _batch(place, before.outputs, after.outputs, tolerance)
        elif (before and before.outputs) or (after and after.outputs):
            turned.append(Turned(place=place, before=_became(before), after=_became(after)))
        else:
            unanswered += 1
    return Pair(
        older=older,
        newer=newer,
        tolerance=tolerance,
        findings=tuple(findings),
        turned=tuple(turned),
        unanswered=unanswered,
    )


def _batches(older: Answered, newer: Answered) -> Iterator[tuple[Place, Answer | None, Answer | None]]:
    before, after = older.reference.weights, newer.reference.weights
    for weights in dict.fromkeys([*before, *after]):
        ours, theirs = before.get(weights, {}), after.get(weights, {})
        for name in dict.fromkeys([*ours, *theirs]):
            yield Place(weights=weights, batch=name), ours.get(name), theirs.get(name)


def _became(answer: Answer | None) -> str:
    if answer is None:
        return "absent"
    return f"raised {answer.error.type}: {answer.error.message}" if answer.error else "answered"


def _batch(place: Place, before: _Outputs, after: _Outputs, tolerance: float) -> Iterator[Finding]:
    """Several completions of every prompt were sampled, since greedy there is only one: these are no matter here."""
    if all(len(row) > 1 for row in (*before, *after)):
        return
    ours, theirs = [len(row) for row in before], [len(row) for row in after]
    if ours != theirs:
        yield Finding(kind=Kind.COUNT, place=place, before=sum(ours), after=sum(theirs))
        return
    for prompt, rows in enumerate(zip(before, after, strict=True)):
        for number, (old, new) in enumerate(zip(*rows, strict=True)):
            where = Place(weights=place.weights, batch=place.batch, prompt=prompt, completion=number)
            yield _continuation(where, old, new, tolerance)


def _continuation(place: Place, old: Completion, new: Completion, tolerance: float) -> Finding:
    """What follows the first token that differs has another context, and proves nothing."""
    if old.prompt_tokens != new.prompt_tokens:
        return Finding(kind=Kind.PROMPT, place=place, before=old.prompt_tokens, after=new.prompt_tokens)
    at = _first_difference(old.ids, new.ids)
    off, off_at = _largest(old, new, len(old.ids) if at is None else at + 1)
    gap = abs(old.top2[at][0] - old.top2[at][1]) if at is not None and at < len(old.top2) else None
    return Finding(
        kind=_kind(at, gap, off, tolerance),
        place=place,
        before=_at(old.ids, at),
        after=_at(new.ids, at),
        position=at,
        gap=gap,
        off=off,
        off_at=off_at,
    )


def _kind(at: int | None, gap: float | None, off: float | None, tolerance: float) -> Kind:
    if at is not None and (gap is None or gap >= tolerance):
        return Kind.TOKENS
    if off is not None and off >= tolerance:
        return Kind.LOGPROBS
    return Kind.EQUAL if at is None else Kind.TIE


def _first_difference(old: Sequence[int], new: Sequence[int]) -> int | None:
    for at, (ours, theirs) in enumerate(zip(old, new, strict=False)):
        if ours != theirs:
            return at
    return None if len(old) == len(new) else min(len(old), len(new))


def _largest(old: Completion, new: Completion, length: int) -> tuple[float | None, int | None]:
    """The largest difference of the best log-probability among the first `length` tokens, and where."""
    pairs = zip(old.top2[:length], new.top2[:length], strict=False)
    found = [(abs(ours[0] - theirs[0]), at) for at, (ours, theirs) in enumerate(pairs)]
    return max(found, key=lambda one: one[0], default=(None, None))


def _at(ids: Sequence[int], position: int | None) -> int | None:
    return ids[position] if position is not None and position < len(ids) else None
