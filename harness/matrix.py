"""Records × expectations → the Matrix: every planned cell in exactly one state. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from harness.cells import Cell
from harness.expectations import Expectation, about, axes_of, verdict
from harness.records import CheckRecord, Record
from harness.status import NOTRUN, UNEXPECTED, Status, Verdict, worst_verdict
from harness.targets import TargetFacts

if TYPE_CHECKING:
    import pandas as pd

_NO_ANSWER = (NOTRUN, Status.MISS, Status.NA, Status.SKIP)


@dataclass(frozen=True, kw_only=True)
class JudgedCheck:
    """A check, the verdict on it and why."""

    check: CheckRecord
    verdict: Verdict
    expectation: Expectation | None


def passed(checks: Sequence[JudgedCheck]) -> tuple[int, int]:
    """How many checks passed, of how many."""
    own = [judged.check for judged in checks if judged.check.id != "<cell>"]
    return sum(check.status is Status.PASS for check in own), len(own)


@dataclass(frozen=True, kw_only=True)
class Square:
    """One cell of the Matrix. `status` is a Status, or NOTRUN where there is no record."""

    cell: Cell
    status: str
    verdict: Verdict
    checks: tuple[JudgedCheck, ...] = ()
    record: Record | None = None
    stale: bool = False
    age: timedelta | None = None  # of the record

    @property
    def row(self) -> str:
        return f"{self.cell.target}@{self.cell.device}"

    @property
    def column(self) -> str:
        return self.cell.question

    @property
    def passed(self) -> tuple[int, int]:
        return passed(self.checks)


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """A run: its squares in the plan's order, the targets that could not be planned, what is known of the others.

    `elsewhere`: how many cells of the plan are left to other runs. They are no squares, and decide nothing here.
    """

    run: str
    squares: tuple[Square, ...]
    not_runnable: tuple[str, ...] = ()
    targets: tuple[TargetFacts, ...] = ()
    elsewhere: int = 0

    @property
    def rows(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(square.row for square in self.squares))

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(square.column for square in self.squares))

    @property
    def unexpected(self) -> tuple[Square, ...]:
        return tuple(square for square in self.squares if square.verdict in UNEXPECTED)

    @property
    def green(self) -> bool:
        """Whether every cell has its record and nothing was unexpected. A run in which nothing ran is never green; of
        one that is part of another, all cells may be NA."""
        verdicts = [square.verdict for square in self.squares]
        enough = self.tried or bool(verdicts and self.elsewhere)
        return enough and not any(v in UNEXPECTED or v is Verdict.UNKNOWN for v in verdicts)

    @property
    def tried(self) -> bool:
        """Whether anything was asked of any version: that a feature does not exist (NA) is no answer."""
        return any(square.status not in _NO_ANSWER for square in self.squares)

    def pivot(self) -> pd.DataFrame:
        """Versions by scenarios: one row a target and device, one column a scenario, the squares inside."""
        import pandas as pd

        frame = pd.DataFrame(
            {
                "row": [square.row for square in self.squares],
                "column": [square.column for square in self.squares],
                "square": list(self.squares),
            }
        )
        table = frame.pivot(index="row", columns="column", values="square")
        return table.reindex(index=list(self.rows), columns=list(self.columns))


def build_matrix(
    run: str,
    cells: Sequence[Cell],
    records: Mapping[str, Record],
    expectations: Sequence[Expectation],
    now: datetime,
    max_age: timedelta,
    not_runnable: Sequence[str] = (),
    targets: Sequence[TargetFacts] = (),
    elsewhere: int = 0,
) -> Matrix:
    """The Matrix of a run's own cells. Raises ConfigurationError where expectations contradict each other."""
    squares = tuple(_square(cell, records.get(cell.id), expectations, now, max_age) for cell in cells)
    return Matrix(
        run=run, squares=squares, not_runnable=tuple(not_runnable), targets=tuple(targets), elsewhere=elsewhere
    )


def _square(
    cell: Cell, record: Record | None, expectations: Sequence[Expectation], now: datetime, max_age: timedelta
) -> Square:
    if record is None:
        return Square(cell=cell, status=NOTRUN, verdict=Verdict.UNKNOWN)
    checks = judged_checks(record, cell.question, expectations)
    stale = now - record.started > max_age
    return Square(
        cell=cell,
        status=record.status,
        verdict=_cell_verdict(checks, stale),
        checks=checks,
        record=record,
        stale=stale,
        age=now - record.started,
    )


def judged_checks(record: Record, question: str, expectations: Sequence[Expectation]) -> tuple[JudgedCheck, ...]:
    """The checks of a record, judged. Raises ConfigurationError where expectations contradict each other."""
    axes = axes_of(record)
    own = about(expectations, question, axes)
    return tuple(_judged(check, question, axes, own) for check in record.checks)


def _judged(
    check: CheckRecord, question: str, axes: Mapping[str, str], expectations: Sequence[Expectation]
) -> JudgedCheck:
    said, expectation = verdict(check, question, axes, expectations)
    return JudgedCheck(check=check, verdict=said, expectation=expectation)


def _cell_verdict(checks: Sequence[JudgedCheck], stale: bool) -> Verdict:
    """The worst verdict of the checks; an old PASS is no longer one, and a record without checks says nothing."""
    if not checks:
        return Verdict.UNKNOWN
    worst = worst_verdict(judged.verdict for judged in checks)
    return Verdict.UNKNOWN if stale and worst not in UNEXPECTED else worst
