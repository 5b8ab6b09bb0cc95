"""Verbs that turn records into decisions: judge, expect. Options, exit codes and what is printed."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from harness.errors import NothingSelectedError
from harness.events import clean
from harness.expectfile import edited
from harness.expecting import Proposal, propose, sightings
from harness.options import Config
from harness.project import Project, load_project
from harness.records import Record, find_run, records_of, write_atomic, write_record
from harness.rejudge import Rejudged, changes, latest, rejudge, verdicts_of
from harness.run import Outcome, held, load_matrix, write_views
from harness.views.causes import causes, tally
from harness.views.text import many, summary

From = Annotated[list[str] | None, typer.Option("--from", help="A run's name or folder; default: the newest.")]
More = Annotated[list[str] | None, typer.Argument(metavar="[RUN]...", help="Further runs.", show_default=False)]
Run = Annotated[str | None, typer.Argument(help="A run's name or folder; default: the newest.")]


def register(app: typer.Typer) -> None:
    for verb in (judge, expect):
        app.command()(verb)


def judge(
    run: Run = None,
    write: Annotated[bool, typer.Option("--write", help="Write the records and the run's table anew.")] = False,
    config: Config = None,
) -> None:
    """Judge a run's records again, from their evidence, by today's rules and expectations. Runs nothing. Exit code as
    of `run`."""
    project = load_project(config)
    folder = find_run(project.results, run)
    rejudged = rejudge(folder)
    matrix = load_matrix(project, folder, latest(rejudged))
    for change in changes(load_matrix(project, folder), matrix, verdicts_of(folder)):
        typer.echo(clean(str(change)))
    for one in rejudged:
        if one.kept:
            typer.echo(f"{one.old.cell}, attempt {one.old.attempt}: stays {one.old.status}: {one.kept}")
    differ = [one for one in rejudged if one.new != one.old]
    if write:
        _write(project, folder, differ)
    typer.echo(
        f"{many(len(rejudged), 'record')} judged again, {len(differ)} changed{'' if write else ', none written'}"
    )
    typer.echo("; ".join(filter(None, [summary(matrix), tally(causes(matrix.squares))])))
    raise typer.Exit(Outcome(folder=folder, matrix=matrix).exit_code)


def _write(project: Project, folder: Path, differ: Iterable[Rejudged]) -> None:
    with held(folder):
        for one in differ:
            write_record(one.folder, one.new)
        write_views(folder, load_matrix(project, folder), project.suite)


def expect(
    runs: From = None,
    more: More = None,
    check: Annotated[bool, typer.Option("--check", help="Exit code 1 if the file would change.")] = False,
    write: Annotated[bool, typer.Option("--write", help="Write expectations.toml; else it is only shown.")] = False,
    config: Config = None,
) -> None:
    """Expectations under which nothing in these runs is unexpected, as a change of expectations.toml. Of a cell that
    several of them have, the newest record counts."""
    project = load_project(config)
    names = [*(runs or ()), *(more or ())]
    records = _newest([find_run(project.results, name) for name in names or [None]])
    if not records:
        raise NothingSelectedError(
            "there is no record to expect anything from", "Name runs whose cells came to an end."
        )
    seen = sightings(project.cells, records)
    proposal = propose(seen, project.expectations, project.cells, datetime.now(UTC).date())
    path = project.root / project.spec.expectations
    old = path.read_text(encoding="utf-8") if path.exists() else "schema = 1\n"
    new = edited(old, [fate.entry for fate in proposal.fates], proposal.new)
    typer.echo("".join(_difference(old, new, path.name)), nl=False)
    for line in _report(project, proposal, records):
        typer.echo(clean(line))
    if write and new != old:
        whole = path.resolve()  # a link stays one
        write_atomic(whole, new)
        typer.echo(f"{path.name}: written")
    raise typer.Exit(1 if check and new != old else 0)


def _newest(folders: Sequence[Path]) -> dict[str, Record]:
    newest: dict[str, Record] = {}
    for folder in folders:
        for cell, record in records_of(folder).items():
            if cell not in newest or newest[cell].started < record.started:
                newest[cell] = record
    return newest


def _difference(old: str, new: str, name: str) -> Iterable[str]:
    return difflib.unified_diff(old.splitlines(True), new.splitlines(True), name, f"{name} (proposed)")


def _report(project: Project, proposal: Proposal, records: dict[str, Record]) -> Iterable[str]:
    for old, fate in zip(project.expectations, proposal.fates, strict=True):
        if fate.why:
            what = "goes" if fate.entry is None else "stays" if fate.entry == old else "is narrowed"
            yield f"{old.scenario} / {old.check} {what}: {fate.why}"
    for it in proposal.apart:
        yield f"{it.cell.id}: {it.check.id} stays red: no condition tells it from what is not"
    known = {cell.id for cell in project.cells}
    for cell in sorted({*records} - known):
        yield f"{cell} is left out: matrix.toml has it no longer"
    stay = sum(fate.entry == old for old, fate in zip(project.expectations, proposal.fates, strict=True))
    seen = many(len(known & {*records}), "cell")
    yield f"{seen} seen: {many(stay, 'entry', 'entries')} as they were, {len(proposal.new)} new"
