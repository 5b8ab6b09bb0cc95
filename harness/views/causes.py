"""What is not simply ok, grouped by cause: "37 red checks in 12 cells, 2 causes". Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from harness.expectations import Expectation
from harness.fingerprint import fingerprints
from harness.matrix import JudgedCheck, Square
from harness.status import NOTRUN, Status, Verdict, worst_status, worst_verdict
from harness.views.text import cause, many

MEANING = {
    Verdict.OK: "passed, as expected",
    Verdict.EXPECTED: "not a pass, but known",
    Verdict.FLAKY: "a known intermittent status, not the typical one",
    Verdict.FIXED: "better than expected; the expectation has to go",
    Verdict.REGRESSION: "worse than expected, or for another cause than expected",
    Verdict.UNKNOWN: "did not run, or is too old to count",
}

RED = frozenset({Status.FAIL, Status.CRASH, Status.OOM, Status.TIMEOUT, Status.ERROR})

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
    """What several checks have in common: their fingerprint, or what is otherwise to be said of them. `title` is of the
    first of them, with its numbers."""

    key: str
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
        key=remarks[0].key,
        title=remarks[0].title,
        verdict=worst_verdict(remark.verdict for remark in remarks),
        affected=tuple(Affected(square=square, checks=tuple(checks[cell])) for cell, square in squares.items()),
    )


def _remarks(square: Square) -> Iterator[_Remark]:
    if square.record is None:
        yield _Remark(key=NOTRUN, title=ABSENT, verdict=Verdict.UNKNOWN, square=square)
    elif square.stale:
        yield _Remark(key="STALE", title="Too old to count", verdict=Verdict.UNKNOWN, square=square)
    for judged, key in zip(square.checks, fingerprints([it.check for it in square.checks]), strict=True):
        if judged.verdict is not Verdict.OK:
            yield _remark(square, judged, key)


def _remark(square: Square, judged: JudgedCheck, key: str) -> _Remark:
    """The cause in one line. What a check never reached has the cause of what kept it from it."""
    title = cause(judged).removeprefix("not-reached: ")
    if not title or judged.verdict is Verdict.FIXED:
        title = f"{judged.check.status}: {MEANING[judged.verdict]}"
        key = f"{title} {judged.expectation.reason if judged.expectation else ''}"
    return _Remark(key=key, title=title, verdict=judged.verdict, square=square, judged=judged)


def tally(found: Iterable[Cause]) -> str:
    """`37 red checks in 12 cells, 2 causes`; empty where nothing is red, whether it was known or not."""
    red = [(one.key, some.square.cell.id, judged.check.id) for one in found for some, judged in _red(one)]
    if not red:
        return ""
    keys, cells = {key for key, _, _ in red}, {cell for _, cell, _ in red}
    return f"{many(len(red), 'red check')} in {many(len(cells), 'cell')}, {many(len(keys), 'cause')}"


def _red(found: Cause) -> Iterator[tuple[Affected, JudgedCheck]]:
    return ((some, judged) for some in found.affected for judged in some.checks if judged.check.status in RED)


def distinct(expectations: Iterable[Expectation | None]) -> tuple[Expectation, ...]:
    """Without None, each once, in order. (An Expectation holds a dict, so it cannot be a key.)"""
    found: list[Expectation] = []
    for expectation in expectations:
        if expectation is not None and expectation not in found:
            found.append(expectation)
    return tuple(found)
