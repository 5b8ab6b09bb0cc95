"""Several runs of one plan → one: whose record is taken for each cell; what is missing, double or at odds. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.errors import ConfigurationError
from harness.planfile import PlanFile, PlannedEntry
from harness.records import Record
from harness.status import NOTRUN, Status

NOWHERE = "in none of the merged runs"


@dataclass(frozen=True, kw_only=True)
class Part:
    """One of the runs: what it is called here, its folder, its plan, the last record of each of its cells."""

    name: str
    folder: Path
    plan: PlanFile
    records: Mapping[str, Record]


@dataclass(frozen=True, kw_only=True)
class Union:
    """What the runs come to. `taken`: the part whose record counts, by cell id; `doubled`: a line for each cell of
    which two runs say the same; `missing`: the ids of cells of which no run has a record."""

    entries: tuple[PlannedEntry, ...]
    not_runnable: tuple[str, ...]
    taken: Mapping[str, Part]
    doubled: tuple[str, ...]
    missing: tuple[str, ...]

    def lines(self) -> list[str]:
        """What there is to say of it."""
        return [*self.doubled, *(f"{name}: no record in any of the runs" for name in self.missing)]


def unite(parts: Sequence[Part]) -> Union:
    """Raises ConfigurationError where the runs planned a cell differently, or came to different ends of one."""
    named = _named(parts)
    _require_equal(named)
    taken: dict[str, Part] = {}
    doubled, conflicts = [], []
    for name, some in named.items():
        found = sorted((part for part, _ in some if name in part.records), key=lambda part: _rank(part.records[name]))
        if not found:
            continue
        taken[name] = found[0]
        for other in found[1:]:
            if line := _conflict(name, found[0], other):
                conflicts.append(line)
            elif _is_double(found[0].records[name], other.records[name]):
                doubled.append(f"{name}: the same in {found[0].name}, which is older and kept, and in {other.name}")
    if conflicts:
        raise ConfigurationError(
            "\n  ".join(["the runs came to different ends", *conflicts]), "Look at both; then leave one run out."
        )
    entries = _without_idle({name: _entry(name, some, taken) for name, some in named.items()}, taken)
    return Union(
        entries=_references_first(entries),
        not_runnable=tuple(dict.fromkeys(target for part in parts for target in part.plan.not_runnable)),
        taken={name: part for name, part in taken.items() if name in entries},
        doubled=tuple(doubled),
        missing=tuple(name for name in entries if name not in taken),
    )


Named = Mapping[str, Sequence[tuple[Part, PlannedEntry]]]  # by cell id: who plans it, and how


def _named(parts: Iterable[Part]) -> Named:
    named: dict[str, list[tuple[Part, PlannedEntry]]] = {}
    for part in parts:
        for entry in part.plan.cells:
            named.setdefault(entry.cell.id, []).append((part, entry))
    return named


def _require_equal(named: Named) -> None:
    lines = []
    for name, ((first, own), *rest) in named.items():
        for other, entry in rest:
            if entry.digest != own.digest:
                facts = {key for key in {*own.facts, *entry.facts} if own.facts.get(key) != entry.facts.get(key)}
                lines.append(f"{name} in {first.name} and in {other.name}: {', '.join(sorted(facts))}")
        for part, entry in [(first, own), *rest]:
            if name in part.records and part.records[name].digest != entry.digest:
                lines.append(f"{name} in {part.name}: its record is not of what was planned")
    if lines:
        raise ConfigurationError(
            "\n  ".join(["the runs are not of the same cells; what differs:", *lines]),
            "Merge runs of the same state of the project, or leave one out.",
        )


def _rank(record: Record) -> tuple[bool, float]:
    """The oldest that is final goes first; of those that are not, the newest."""
    missed, started = record.status is Status.MISS, record.started.timestamp()
    return missed, -started if missed else started


def _conflict(cell: str, first: Part, other: Part) -> str | None:
    one, two = _ends(first.records[cell]), _ends(other.records[cell])
    if one == two or Status.MISS in (one[""], two[""]):
        return None
    differing = sorted({check for check in {*one, *two} if one.get(check) != two.get(check)} - {""})
    return f"{cell}: {first.name} says {_said(one, differing)}; {other.name} says {_said(two, differing)}"


def _said(ends: Mapping[str, Status], checks: Sequence[str]) -> str:
    return f"{ends['']} ({', '.join(f'{ends.get(check, NOTRUN)} {check}' for check in checks)})"


def _ends(record: Record) -> dict[str, Status]:
    """The statuses of the checks by their ids, and the cell's own by the empty one."""
    return {"": record.status, **{check.id: check.status for check in record.checks}}


def _is_double(kept: Record, other: Record) -> bool:
    """Whether they are of two attempts that came to the same; one record that both runs took over is no two."""
    return other.status is not Status.MISS and kept.started != other.started


def _entry(name: str, some: Sequence[tuple[Part, PlannedEntry]], taken: Mapping[str, Part]) -> PlannedEntry:
    """As the run has it whose record is taken, else as one that was to run it."""
    by_part = {part.folder: entry for part, entry in some}
    own = [entry for entry in by_part.values() if entry.action != "elsewhere"]
    chosen = by_part[taken[name].folder] if name in taken else next(iter(own or by_part.values()))
    selected = any(entry.selected for entry in by_part.values())
    if chosen.action == "elsewhere":
        return chosen.model_copy(update={"action": "run", "reason": NOWHERE, "selected": selected})
    return chosen.model_copy(update={"selected": selected})


def _without_idle(entries: Mapping[str, PlannedEntry], taken: Mapping[str, Part]) -> dict[str, PlannedEntry]:
    """A reference that was never made is not missing where each cell that would have read it came to its end: one run
    knew that these are NA, and had no use for it; the others did not know, and named it."""
    wanted = {
        entry.cell.reference
        for name, entry in entries.items()
        if name not in taken or taken[name].records[name].status is Status.MISS
    }
    return {name: entry for name, entry in entries.items() if entry.selected or name in taken or name in wanted}


def _references_first(entries: Mapping[str, PlannedEntry]) -> tuple[PlannedEntry, ...]:
    names = (name for entry in entries.values() for name in (entry.cell.reference or "", entry.cell.id))
    return tuple(entries[name] for name in dict.fromkeys(names) if name in entries)
