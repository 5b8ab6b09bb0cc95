"""Records judged again, from the evidence beside them, by the truth table of today: nothing is run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path

from pydantic import BaseModel

from harness import events as ev
from harness.fingerprint import fingerprints
from harness.judge import CELL, Evidence, judge
from harness.matrix import Matrix, Square
from harness.records import ExitState, Record, is_at_home, read_record
from harness.status import Status


@dataclass(frozen=True, kw_only=True)
class Rejudged:
    """A record as it is and as it would be today. `kept`: why it stands as it is, where its evidence is gone."""

    folder: Path
    old: Record
    new: Record
    kept: str = ""


def rejudge(run: Path) -> tuple[Rejudged, ...]:
    """All records of a run, also those of attempts that were followed by another."""
    found = []
    for path in sorted(run.glob("cells/*/attempt-*/record.json")):
        record = read_record(path)
        if record is not None and is_at_home(record, path):
            found.append(judged_again(record, path.parent))
    return tuple(found)


def judged_again(record: Record, folder: Path) -> Rejudged:
    """One record, from the evidence in the folder of its attempt."""
    evidence = _evidence(record, folder / "out")
    if isinstance(evidence, str):
        return Rejudged(folder=folder, old=record, new=record, kept=evidence)
    judgement = judge(evidence)
    update = {
        "status": judgement.status,
        "reason": judgement.reason,
        "advice": judgement.advice,
        "checks": judgement.checks,
        "evidence_faults": tuple(evidence.faults),
    }
    return Rejudged(folder=folder, old=record, new=record.model_copy(update=update))


def _evidence(record: Record, out: Path) -> Evidence | str:
    """What the cell left and, from the record, what cannot be seen twice: its end, what a probe or the harness said.
    Or, in words, why that is no longer there."""
    state = record.exit or ExitState(started=False)
    if not state.started and record.status is Status.NA:
        return Evidence(lacking=record.reason or "")
    infra = "" if state.started else _infra(record)
    if not state.started and not infra:
        return "it does not say how its attempt ended"
    events, faults = ev.read_events(out)
    evidence = Evidence(events=events, faults=faults, done=ev.read_done(out), exit=state, infra=infra)
    return _lost(record, evidence, out) or evidence


def _lost(record: Record, evidence: Evidence, out: Path) -> str:
    """What the record was made from and is no longer there, in words; empty where all of it is."""
    if evidence.exit.started and not out.is_dir():
        return "what its cell left is gone"
    heard = any(isinstance(event, ev.Hello) for event in evidence.events)
    if "python" in record.axes and not heard:
        return "its events are gone"
    ended = {event.check for event in evidence.events if isinstance(event, ev.End)}
    if any(check.seconds is not None and check.id not in ended for check in record.checks):
        return "some of its events are gone"
    return "its DONE is gone" if record.status is Status.PASS and evidence.done is None else ""


def _infra(record: Record) -> str:
    """The harness's own failure, where that is why nothing was started."""
    missed = [check.reason for check in record.checks if check.status is Status.MISS and check.id == CELL]
    return missed[0] or "" if missed else ""


def latest(rejudged: Iterable[Rejudged]) -> dict[str, Record]:
    """The new record of every cell's last attempt, by cell id."""
    return {one.new.cell: one.new for one in sorted(rejudged, key=lambda one: one.new.attempt)}


# --- what changes -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Said:
    """What is said of a check; None where it says nothing, or is not there."""

    status: str | None = None
    verdict: str | None = None
    reason: str | None = None
    cause: str | None = None


@dataclass(frozen=True, kw_only=True)
class Change:
    """What is said otherwise today of a check of a cell."""

    cell: str
    check: str
    old: Said
    new: Said

    def __str__(self) -> str:
        pairs = [(it.name, getattr(self.old, it.name), getattr(self.new, it.name)) for it in fields(Said)]
        said = (f"{name} {old or 'none'} → {new or 'none'}" for name, old, new in pairs if old != new)
        return f"{self.cell}: {self.check}: {'; '.join(said)}"


def changes(before: Matrix, after: Matrix, verdicts: Mapping[tuple[str, str], str]) -> Iterator[Change]:
    """Check by check, of two Matrices of the same cells. `verdicts` are those that the run had, by cell and check;
    where it has none, they are today's on what was recorded."""
    for old, new in zip(before.squares, after.squares, strict=True):
        then, now = _said(old), _said(new)
        for check in dict.fromkeys([*then, *now]):
            was, today = then.get(check, Said()), now.get(check, Said())
            was = replace(was, verdict=verdicts.get((old.cell.id, check), was.verdict))
            if was != today:
                yield Change(cell=old.cell.id, check=check, old=was, new=today)


def _said(square: Square) -> dict[str, Said]:
    causes = fingerprints([judged.check for judged in square.checks])
    return {
        judged.check.id: Said(
            status=judged.check.status, verdict=judged.verdict, reason=judged.check.reason, cause=cause or None
        )
        for judged, cause in zip(square.checks, causes, strict=True)
    }


def verdicts_of(run: Path) -> dict[tuple[str, str], str]:
    """Those in the run's matrix.json, by cell and check; empty where there is none that can be read."""
    data = ev.read_untrusted(run / "matrix.json", ev.MAX_FILE)
    try:
        cells = _Table.model_validate_json(data or b"").cells
    except ValueError:
        return {}
    return {(cell.cell, check.id): check.verdict for cell in cells for check in cell.checks}


class _Check(BaseModel):
    id: ev.Text
    verdict: ev.Text


class _Cell(BaseModel):
    cell: ev.Text
    checks: tuple[_Check, ...]


class _Table(BaseModel):
    """As much of matrix.json as is asked for here."""

    cells: tuple[_Cell, ...]
