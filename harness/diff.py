"""Two runs → what changed between them, and what else differs between them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from harness.errors import NothingSelectedError
from harness.fingerprint import fingerprints
from harness.judge import CELL
from harness.matrix import JudgedCheck, Matrix, Square
from harness.outliers import Outlier
from harness.records import PropertyValue, Record
from harness.status import RED, Status, Verdict
from harness.traits import Difference, differences, unlike

ABSENT = "absent"  # in the place of a status: that run has no such check


class Kind(StrEnum):
    """What became of a check, or of a cell as a whole; in the order in which it is said."""

    FAILING = "newly failing"  # a regression that was none; or one whose status got worse
    FIXED = "fixed"  # did not pass, and passes
    STATUS = "other status"  # neither of the two: as NA by now, or not run any more
    CAUSE = "changed cause"  # passes as little as before, but for another cause


@dataclass(frozen=True, kw_only=True)
class CheckChange:
    """A check before and after; `check` is empty for a cell as a whole.

    `before` and `after` are statuses, NOTRUN or `absent`; `old` and `new` are the checks, where there are any.
    `unlike`: the axes in which the two records differ, so that like is not compared with like.
    """

    kind: Kind
    cell: str
    check: str
    before: str
    after: str
    old: JudgedCheck | None = None
    new: JudgedCheck | None = None
    fingerprint: str = ""
    unlike: tuple[str, ...] = ()


Value = PropertyValue | tuple[PropertyValue, ...]


@dataclass(frozen=True, kw_only=True)
class PropertyChange:
    """A fact that is neither good nor bad, before and after; empty: it was not there."""

    cell: str
    name: str
    before: tuple[Value, ...]
    after: tuple[Value, ...]
    unlike: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Diff:
    """What changed from the older run to the newer one. `compared`: the cells of which both have a result; `unlike`:
    the axes that are unequal, by cell, where there are any."""

    older: str
    newer: str
    compared: int
    differences: tuple[Difference, ...]
    unlike: Mapping[str, tuple[str, ...]]
    checks: tuple[CheckChange, ...]
    properties: tuple[PropertyChange, ...]
    outliers: tuple[Outlier, ...]
    new: tuple[Square, ...]
    gone: tuple[Square, ...]

    def of(self, kind: Kind) -> tuple[CheckChange, ...]:
        return tuple(change for change in self.checks if change.kind is kind)

    @property
    def exit_code(self) -> int:
        """1 where something is newly failing, also where like was not compared with like."""
        return 1 if self.of(Kind.FAILING) else 0


@dataclass(frozen=True, kw_only=True)
class _Side:
    """A cell in one of the runs. `record` is None where it says nothing of the version under test."""

    square: Square
    record: Record | None
    checks: Mapping[str, JudgedCheck]
    prints: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class _Both:
    """A cell that both runs have."""

    cell: str
    old: _Side
    new: _Side
    unlike: tuple[str, ...]


def diff(older: Matrix, newer: Matrix, outliers: Iterable[Outlier] = ()) -> Diff:
    """Both judged by the same expectations; `outliers` are of the newer run's records.

    Raises NothingSelectedError where no cell can be compared.
    """
    before = {square.cell.id: square for square in older.squares}
    after = {square.cell.id: square for square in newer.squares}
    both = [_both(before[name], square) for name, square in after.items() if name in before]
    pairs = [(one.old.record, one.new.record) for one in both if one.old.record and one.new.record]
    if not pairs:
        raise NothingSelectedError(
            f"there is no cell of which both {older.run} and {newer.run} have a result",
            "Compare runs that share cells; `vllm-matrix show CELL --run RUN` says what became of one.",
        )
    checks = [change for one in both for change in _check_changes(one)]
    order = list(Kind)
    return Diff(
        older=older.run,
        newer=newer.run,
        compared=len(pairs),
        differences=differences(pairs),
        unlike={one.cell: one.unlike for one in both if one.unlike},
        checks=tuple(sorted(checks, key=lambda change: order.index(change.kind))),
        properties=tuple(change for one in both for change in _property_changes(one)),
        outliers=tuple(sorted(outliers, key=lambda one: -one.beyond)),
        new=tuple(square for name, square in after.items() if name not in before),
        gone=tuple(square for name, square in before.items() if name not in after),
    )


def _both(before: Square, after: Square) -> _Both:
    old, new = _side(before), _side(after)
    axes = unlike(old.record, new.record) if old.record and new.record else ()
    return _Both(cell=after.cell.id, old=old, new=new, unlike=axes)


def _side(square: Square) -> _Side:
    record = square.record if square.record and square.record.status is not Status.MISS else None
    checks = square.checks if record else ()
    red = record is not None and record.status in RED  # only then a cause is asked for
    prints = fingerprints([judged.check for judged in checks]) if red else ()
    return _Side(
        square=square,
        record=record,
        checks={judged.check.id: judged for judged in checks},
        prints=dict(zip((judged.check.id for judged in checks), prints, strict=False)),
    )


def _check_changes(both: _Both) -> Iterator[CheckChange]:
    """Where one of the runs says nothing, the cell as a whole changed; but what it fails in now is said by check."""
    told = both.old.record is not None and both.new.record is not None
    changes = [_change(both, name) for name in dict.fromkeys([*both.new.checks, *both.old.checks])]
    found = [change for change in changes if change and (told or change.kind is Kind.FAILING)]
    yield from found
    before, after = both.old.square.status, both.new.square.status
    if not told and not found and before != after:
        yield CheckChange(kind=Kind.STATUS, cell=both.cell, check="", before=before, after=after)


def _change(both: _Both, check: str) -> CheckChange | None:
    old, new = both.old.checks.get(check), both.new.checks.get(check)
    before, after = both.old.prints.get(check, ""), both.new.prints.get(check, "")
    gone = ABSENT
    if check == CELL and new is None:  # it is only there where something happened outside the checks
        gone = both.new.square.status
        kind = Kind.FIXED if old is not None and old.check.status in RED and gone not in RED else None
    else:
        kind = _kind(old, new, before == after)
    if kind is None:
        return None
    return CheckChange(
        kind=kind,
        cell=both.cell,
        check=check,
        before=old.check.status if old else ABSENT if both.old.record else both.old.square.status,
        after=new.check.status if new else gone,
        old=old,
        new=new,
        fingerprint=before if kind is Kind.FIXED else after,
        unlike=both.unlike,
    )


def _kind(old: JudgedCheck | None, new: JudgedCheck | None, same_cause: bool) -> Kind | None:
    """The truth table of a check in two runs: the first line that fits."""
    was, now = old.check.status if old else None, new.check.status if new else None
    regressed = new is not None and new.verdict is Verdict.REGRESSION
    if regressed and (old is None or old.verdict is not Verdict.REGRESSION or _worse(now, was)):
        return Kind.FAILING
    if was is None:
        return None  # a new check that is no regression
    if was in RED and now is Status.PASS:
        return Kind.FIXED
    if was in RED and now in RED:
        return None if was is now and same_cause else Kind.CAUSE
    return None if was is now else Kind.STATUS


def _worse(now: Status | None, was: Status | None) -> bool:
    order = list(Status)
    return now is not None and was is not None and order.index(now) < order.index(was)


# Which devices a cell got, and what it left on them, is another thing in every run.
_OF_A_RUN = frozenset({"gpu.uuids", "leftover.gpu", "lease.lost"})


def _property_changes(both: _Both) -> Iterator[PropertyChange]:
    """What only one of them says counts where both came to the same end: a cell that broke off says less."""
    if both.old.record is None or both.new.record is None:
        return
    old, new = both.old.record.properties, both.new.record.properties
    same_end = both.old.record.status is both.new.record.status
    for name in dict.fromkeys([*old, *new]):
        known = name in old and name in new
        if name in _OF_A_RUN or (old[name] == new[name] if known else not same_end):
            continue
        yield PropertyChange(
            cell=both.cell,
            name=name,
            before=(old[name],) if name in old else (),
            after=(new[name],) if name in new else (),
            unlike=both.unlike,
        )
