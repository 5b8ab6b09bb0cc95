"""Going on with a run that was interrupted: the cells that have no record, or only a MISS, as they were planned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from harness.errors import ConfigurationError
from harness.images import BuildOptions
from harness.plan import Planned
from harness.planfile import PlannedEntry, read_plan
from harness.project import Project, plan_cells
from harness.run import finished


@dataclass(frozen=True, kw_only=True)
class Rest:
    """What is left of a run: `kept` are the ids of the cells that have their record."""

    folder: Path
    kept: tuple[str, ...]
    plan: tuple[Planned, ...]

    def __str__(self) -> str:
        left = ", ".join(planned.cell.id for planned in self.plan) or "nothing"
        return f"resume {self.folder.name}: {len(self.kept)} cells keep their record; left to run: {left}"


def backend_of(folder: Path) -> str:
    """The back end that the run was planned for."""
    return next((entry.facts.get("backend", "docker") for entry in read_plan(folder).cells), "docker")


def rest_of(project: Project, folder: Path, options: BuildOptions, backend: str) -> Rest:
    """Plan the rest of a run again. Raises ConfigurationError where it would no longer be the run that was planned."""
    if folder.resolve().parent != (project.results / "runs").resolve():
        raise ConfigurationError(f"{folder} is no run of {project.root}", "A run is resumed where it was begun.")
    entries = read_plan(folder).own
    kept = finished(folder)
    today = _today(project, folder, entries, options, backend)
    left = [entry for entry in entries if entry.cell.id not in kept]
    changed = [e for e in left if e.digest != today[e.cell.id].digest]
    if changed:
        head = f"run {folder.name} cannot be resumed: what would run now is not what it planned"
        raise ConfigurationError(
            "\n  ".join([head, *(_change(entry, today[entry.cell.id]) for entry in changed)]),
            "Undo the change, or start a new run: it reuses every record whose cell did not change.",
        )
    plan = tuple(_left(entry, today[entry.cell.id]) for entry in left)
    return Rest(folder=folder, kept=tuple(kept), plan=plan)


def _left(entry: PlannedEntry, today: Planned) -> Planned:
    reason = today.reason if today.action == "na" else "left by an interrupted run"
    return replace(today, cell=entry.cell, reason=reason, selected=entry.selected)


def _today(
    project: Project, folder: Path, entries: Sequence[PlannedEntry], options: BuildOptions, backend: str
) -> Mapping[str, Planned]:
    cells = {cell.id: cell for cell in project.cells}
    if gone := [entry.cell.id for entry in entries if entry.cell.id not in cells]:
        raise ConfigurationError(f"matrix.toml no longer has {gone[0]} of run {folder.name}", "Start a new run.")
    selected = {entry.cell.id: entry.selected for entry in entries}
    readers = {cells[name].reference for name in selected} - {None, *selected}  # only NA cells read it: it was left out
    chosen = [(cell, selected.get(name, False)) for name, cell in cells.items() if name in selected or name in readers]
    return {planned.cell.id: planned for planned in plan_cells(project, chosen, options, backend, {}, fresh=True)}


def _change(entry: PlannedEntry, today: Planned) -> str:
    names = sorted(n for n in {*entry.facts, *today.facts} if entry.facts.get(n) != today.facts.get(n))
    return f"{entry.cell.id}: {', '.join(names)}"
