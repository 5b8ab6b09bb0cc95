"""Runs united, as a run's folder like any other: read from folders, and written into one."""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

from filelock import FileLock, Timeout

from harness.cells import slug
from harness.errors import ConfigurationError
from harness.evidence import copy_evidence
from harness.merge import Part, Union, unite
from harness.planfile import PlanFile, read_plan, write_document
from harness.project import Project
from harness.records import Record, read_record, records_of, write_record
from harness.run import Outcome, held, load_matrix, new_run, write_views
from harness.status import Status
from harness.targets import read_facts, write_facts


def part_of(folder: Path, name: str = "") -> Part:
    """A run, as `unite` takes it. Raises ConfigurationError where the folder holds none."""
    return Part(name=name or folder.name, folder=folder, plan=read_plan(folder), records=records_of(folder))


def merge(project: Project, folders: Sequence[Path]) -> tuple[Outcome, Union]:
    """A new run of what these came to. Raises ConfigurationError where they are at odds; then nothing is written."""
    if len({folder.resolve() for folder in folders}) < 2:
        raise ConfigurationError("there is nothing to merge", "Name two runs or more.")
    parts = [part_of(folder) for folder in folders]
    union = unite(parts)
    with scratch(project) as room:
        return new(project, parts, union, room), union


@contextlib.contextmanager
def scratch(project: Project) -> Iterator[Path]:
    """A folder on the disk of the results, for what is not a run yet. One at a time: so what a killed one left is
    known, and goes. Raises ConfigurationError."""
    project.results.mkdir(parents=True, exist_ok=True)
    room = project.results / ".merge"
    lock = FileLock(room.with_suffix(".lock"), timeout=0)
    try:
        lock.acquire()
    except Timeout as error:
        raise ConfigurationError(f"{project.results} has a merge or an import going on", "Wait for its end.") from error
    try:
        shutil.rmtree(room, ignore_errors=True)
        room.mkdir()
        yield room
    finally:
        shutil.rmtree(room, ignore_errors=True)
        lock.release()


def new(project: Project, parts: Sequence[Part], union: Union, room: Path) -> Outcome:
    """Write the united run, and put it in its place as a whole."""
    name = new_run(datetime.now(UTC))
    made = room / name
    _write_plan(made, name, union)
    for cell in union.taken:
        _write_cell(made, name, cell, parts, union)
    _write_targets(made, parts, union)
    matrix = load_matrix(project, made)
    write_views(made, matrix, project.suite)
    target = project.results / "runs" / name
    target.parent.mkdir(exist_ok=True)
    made.rename(target)
    return Outcome(folder=target, matrix=matrix)


def add(project: Project, folder: Path, parts: Sequence[Part], room: Path) -> tuple[Outcome, Union, bool]:
    """Write into a run what others have beyond it; whether there was any.

    The plan goes first, and each cell as a whole: where this is cut short, the same again does the rest.
    Raises ConfigurationError where the runs are at odds, or this one goes on or is of another project.
    """
    if folder.resolve().parent != (project.results / "runs").resolve():
        raise ConfigurationError(f"{folder} is no run of {project.root}", "A new run is made without --into.")
    with held(folder):
        into = part_of(folder)
        union = unite([into, *parts])
        cells = [cell for cell, part in union.taken.items() if part is not into]
        changed = bool(cells) or union.entries != into.plan.cells
        if changed:
            for cell in cells:
                _write_cell(room / "new", folder.name, cell, [into, *parts], union)
            _write_plan(folder, folder.name, union)
            for path in sorted(room.glob("new/cells/*")):
                _put(path, folder / "cells" / path.name, room / "old")
            _write_targets(folder, [into, *parts], union)
            write_views(folder, load_matrix(project, folder), project.suite)
    return Outcome(folder=folder, matrix=load_matrix(project, folder)), union, changed


def _put(made: Path, target: Path, old: Path) -> None:
    target.parent.mkdir(exist_ok=True)
    if target.exists():
        old.mkdir(exist_ok=True)
        target.rename(old / target.name)
    made.rename(target)


def _write_plan(folder: Path, run: str, union: Union) -> None:
    now = datetime.now(UTC)
    write_document(folder, PlanFile(run=run, created=now, not_runnable=union.not_runnable, cells=union.entries))


def _write_cell(run: Path, name: str, cell: str, parts: Sequence[Part], union: Union) -> None:
    for source in _attempts(cell, parts, union.taken[cell]):
        target = run / "cells" / source.parent.name / source.name
        copy_evidence(source, target, f"{cell} in {source.parent.parent.parent.name}")
        record = read_record(source / "record.json")
        if record is not None:
            write_record(target, _moved(record, name))


def _write_targets(run: Path, parts: Sequence[Part], union: Union) -> None:
    """What is known of each target by a run whose records of it are taken, or by any."""
    owners: dict[tuple[str, str], list[Part]] = {(e.cell.target, e.cell.device): [] for e in union.entries}
    for entry in union.entries:
        if entry.cell.id in union.taken:
            owners[entry.cell.target, entry.cell.device].append(union.taken[entry.cell.id])
    for pair, some in owners.items():
        known = (facts for part in [*some, *parts] for facts in read_facts(part.folder, [pair]))
        if facts := next(known, None):
            write_facts(run, facts)


def _moved(record: Record, run: str) -> Record:
    return record.model_copy(update={"run": run, "reused_from": record.reused_from or record.run})


def _attempts(cell: str, parts: Sequence[Part], taken: Part) -> list[Path]:
    """The folders of a cell: all of the run whose record is taken, and of the others the MISS attempts whose number
    is lower than these and free, so that the last one is the one that counts."""
    own = _numbered(taken.folder, cell)
    found = dict(own)
    for part in parts:
        for number, folder in _numbered(part.folder, cell).items():
            record = read_record(folder / "record.json")
            if number < min(own) and record is not None and record.status is Status.MISS:
                found.setdefault(number, folder)
    return [found[number] for number in sorted(found)]


def _numbered(run: Path, cell: str) -> dict[int, Path]:
    found = ((re.fullmatch(r"attempt-(\d+)", path.name), path) for path in (run / "cells" / slug(cell)).glob("*"))
    return {int(match[1]): path for match, path in found if match}
