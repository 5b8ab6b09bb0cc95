"""One cell over all runs: what it came to in each, and between which two it turned. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise

from harness.expectations import Expectation
from harness.fingerprint import fingerprints
from harness.matrix import JudgedCheck, judged_checks
from harness.records import Record
from harness.status import RED, Status, Verdict, worst_verdict
from harness.traits import Difference, differences, unlike


@dataclass(frozen=True, kw_only=True)
class Moment:
    """A cell in one run, judged by today's expectations; its age decides nothing here.

    `causes`: the fingerprints of its red checks, by check.
    """

    run: str
    record: Record
    checks: tuple[JudgedCheck, ...]
    verdict: Verdict
    causes: dict[str, str]

    @property
    def reused(self) -> bool:
        """Whether the run took it over from another one."""
        return self.record.reused_from is not None

    @property
    def worst(self) -> JudgedCheck | None:
        """The first check that has the cell's verdict and is red, or else any red one."""
        red = [judged for judged in self.checks if judged.check.status in RED]
        return next((judged for judged in red if judged.verdict is self.verdict), red[0] if red else None)


@dataclass(frozen=True, kw_only=True)
class Turn:
    """Two neighbouring runs between which a cell turned; `differences`: in what its two records differ otherwise.

    `what`: of status, verdict and cause those that changed; `unlike`: the axes that are unequal.
    """

    before: Moment
    after: Moment
    what: tuple[str, ...]
    differences: tuple[Difference, ...]
    unlike: tuple[str, ...]

    @property
    def apart(self) -> timedelta:
        return self.after.record.started - self.before.record.started


def moments(records: Iterable[tuple[str, Record]], expectations: Sequence[Expectation]) -> tuple[Moment, ...]:
    """Of run and record, in their order. Raises ConfigurationError where expectations contradict each other."""
    return tuple(_moment(run, record, expectations) for run, record in records)


def _moment(run: str, record: Record, expectations: Sequence[Expectation]) -> Moment:
    checks = judged_checks(record, record.cell.partition("/")[2], expectations)
    prints = fingerprints([judged.check for judged in checks])
    return Moment(
        run=run,
        record=record,
        checks=checks,
        verdict=worst_verdict(judged.verdict for judged in checks),
        causes={
            judged.check.id: print_ for judged, print_ in zip(checks, prints, strict=True) if judged.check.status in RED
        },
    )


def turns(newest_first: Sequence[Moment]) -> tuple[Turn, ...]:
    """Where status, verdict or cause changed, the newest first. What was taken over is no news, and a MISS none of the
    version's: the run before it is the neighbour."""
    seen = {one.record.started: one for one in newest_first if one.record.status is not Status.MISS}  # the oldest run
    told = sorted(seen.values(), key=lambda one: one.record.started, reverse=True)
    found = []
    for after, before in pairwise(told):
        if what := _turned(before, after):
            found.append(_turn(before, after, what))
    return tuple(found)


def _turn(before: Moment, after: Moment, what: tuple[str, ...]) -> Turn:
    pair = before.record, after.record
    return Turn(before=before, after=after, what=what, differences=differences([pair]), unlike=unlike(*pair))


def _turned(before: Moment, after: Moment) -> tuple[str, ...]:
    both = {
        "status": (before.record.status, after.record.status),
        "verdict": (before.verdict, after.verdict),
        "cause": (before.causes, after.causes),
    }
    return tuple(name for name, (one, other) in both.items() if one != other)
