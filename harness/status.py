"""Statuses in roll-up order, and verdicts."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum


class Status(StrEnum):
    """What happened. The order of definition is the roll-up order: a cell is as bad as its worst check."""

    FAIL = "FAIL"  # an oracle says no, or the version under test raised
    CRASH = "CRASH"  # a signal; the process that held the engine died
    OOM = "OOM"  # host or device: the reason says which
    TIMEOUT = "TIMEOUT"  # the outside clock
    ERROR = "ERROR"  # the scenario's own fault
    MISS = "MISS"  # harness or infrastructure, with positive evidence: the scenario never ran
    PASS = "PASS"
    NA = "NA"  # the feature does not exist in this version, found by probing
    SKIP = "SKIP"  # deselected, or hardware absent


NOTRUN = "NOTRUN"  # planned, never started or interrupted: a state of the matrix, never of a record

RED = frozenset({Status.FAIL, Status.CRASH, Status.OOM, Status.TIMEOUT, Status.ERROR})  # ran, and did not pass

NEVER_REUSED = frozenset({Status.MISS, Status.TIMEOUT})


class Verdict(StrEnum):
    """Status × expectation. The order of definition is the roll-up order."""

    REGRESSION = "regression"  # worse than expected, or another cause than expected
    FIXED = "fixed"  # better than expected: the expectation has to go
    UNKNOWN = "unknown"  # nothing can be said: MISS, NOTRUN
    FLAKY = "flaky"  # a known intermittent status, not the typical one
    EXPECTED = "expected"  # not a PASS, and known
    OK = "ok"


UNEXPECTED = frozenset({Verdict.REGRESSION, Verdict.FIXED})


_STATUSES = {status: number for number, status in enumerate(Status)}
_VERDICTS = {verdict: number for number, verdict in enumerate(Verdict)}


def worst_status(statuses: Iterable[Status]) -> Status:
    return min(statuses, key=_STATUSES.__getitem__)


def worst_verdict(verdicts: Iterable[Verdict]) -> Verdict:
    return min(verdicts, key=_VERDICTS.__getitem__)
