"""What is not simply ok, grouped by cause: "37 checks, 2 causes". Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from harness.expectations import Expectation
from harness.matrix import JudgedCheck, Square
from harness.status import NOTRUN, Verdict, worst_status, worst_verdict
from harness.views.text import cause

MEANING = {
    Verdict.OK: "passed, as expected",
    Verdict.EXPECTED: "not a pass, but known",
    Verdict.FLAKY: "a known intermittent status, not the typical one",
    Verdict.FIXED: "better than expected; the expectation has to go",
    Verdict.REGRESSION: "worse than expected, or for another cause than expected",
    Verdict.UNKNOWN: "did not run, or is too old to count",
}

ABSENT = "Planned, but there is no record: it was never started, or interrupted"


@dataclass(frozen=True, kw_only=True)
class Affected:
    """A cell that a cause shows in, and the checks in which it does."""

    square: Square
    checks: tuple[JudgedCheck, ...] = ()

    @property
    def status(self) -> str:
        return worst_status(judged.check.status for judged in self.checks) if self.checks else self.square.status

    @property
    def verdict(self) -> Verdict:
        return worst_verdict(judged.verdict for judged in self.checks) if self.checks else self.square.verdict


@dataclass(frozen=True, kw_only=True)
class Cause:
    """What several checks have in common: exception type and message, or reason, without the numbers in them."""

    title: str
    verdict: Verdict
    affected: tuple[Affected, ...]

    @property
    def checks(self) -> int:
        return sum(len(affected.checks) for affected in self.affected)

    @property
    def expectations(self) -> tuple[Expectation, ...]:
        return distinct(judged.expectation for affected in self.affected for judged in affected.checks)


@dataclass(frozen=True, kw_only=True)
class _Remark:
    """What is to be said of a square, or of one of its checks. Those with the same key have the same cause."""

    key: str
    title: str
    verdict: Verdict
    square: Square
    judged: JudgedCheck | None = None


def causes(squares: Iterable[Square]) -> tuple[Cause, ...]:
    """All that is not simply ok, grouped by cause: the worst first, then what shows in most cells."""
    found: dict[str, list[_Remark]] = {}
    for square in squares:
        for remark in _remarks(square):
            found.setdefault(remark.key, []).append(remark)
    order = list(Verdict)
    return tuple(sorted(map(_cause, found.values()), key=lambda it: (order.index(it.verdict), -len(it.affected))))


def _cause(remarks: Sequence[_Remark]) -> Cause:
    squares = {remark.square.cell.id: remark.square for remark in remarks}
    checks: dict[str, list[JudgedCheck]] = {cell: [] for cell in squares}
    for remark in remarks:
        if remark.judged is not None:
            checks[remark.square.cell.id].append(remark.judged)
    return Cause(
        title=remarks[0].title,
        verdict=worst_verdict(remark.verdict for remark in remarks),
        affected=tuple(Affected(square=square, checks=tuple(checks[cell])) for cell, square in squares.items()),
    )


def _remarks(square: Square) -> Iterator[_Remark]:
    if square.record is None:
        yield _Remark(key=NOTRUN, title=ABSENT, verdict=Verdict.UNKNOWN, square=square)
    elif square.stale:
        yield _Remark(key="STALE", title="Too old to count", verdict=Verdict.UNKNOWN, square=square)
    for judged in square.checks:
        if judged.verdict is not Verdict.OK:
            title, key = _title(judged)
            yield _Remark(key=key, title=title, verdict=judged.verdict, square=square, judged=judged)


def _title(judged: JudgedCheck) -> tuple[str, str]:
    """The cause in one line, and its key. What a check never reached has the cause of what kept it from it."""
    said = cause(judged).removeprefix("not-reached: ")
    if said and judged.verdict is not Verdict.FIXED:
        return said, signature(said)
    plain = f"{judged.check.status}: {MEANING[judged.verdict]}"
    return plain, f"{plain} {judged.expectation.reason if judged.expectation else ''}"


_VARYING = re.compile(r"0x[0-9a-fA-F]+|\b[0-9a-f]{12,}\b|\d+(?:\.\d+)?")


def signature(text: str) -> str:
    """Equal for texts that differ in numbers, addresses and hashes only."""
    return _VARYING.sub("#", " ".join(text.split()))[:300]


def distinct(expectations: Iterable[Expectation | None]) -> tuple[Expectation, ...]:
    """Without None, each once, in order. (An Expectation holds a dict, so it cannot be a key.)"""
    found: list[Expectation] = []
    for expectation in expectations:
        if expectation is not None and expectation not in found:
            found.append(expectation)
    return tuple(found)
