"""Verbs that compare runs: diff, history, find. Options and exit codes only."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from harness.cells import matches
from harness.diff import Diff
from harness.diff import diff as compare
from harness.errors import ConfigurationError, NothingSelectedError
from harness.options import AsJson, Config
from harness.outliers import Outlier, outliers
from harness.project import Project, load_project
from harness.records import Record, find_run, records_of_cell, runs_of, uncollected
from harness.run import load_matrix
from harness.timeline import Moment, moments, turns
from harness.views import diff as view
from harness.views import timeline
from harness.views.terminal import make_console

AsMarkdown = Annotated[bool, typer.Option("--markdown", help="Print Markdown.")]
Cell = Annotated[str, typer.Argument(help="A cell id, or a glob that selects one cell of matrix.toml.")]
Older = Annotated[str, typer.Argument(help="The older run: its name or folder.")]
Newer = Annotated[str, typer.Argument(help="The newer run: its name or folder.")]


def register(app: typer.Typer) -> None:
    for verb in (diff, history, find):
        app.command()(verb)


def diff(
    older: Older, newer: Newer, as_json: AsJson = False, as_markdown: AsMarkdown = False, config: Config = None
) -> None:
    """What changed between two runs, newly failing first, and what else differs between them. 1: something fails."""
    if as_json and as_markdown:
        raise ConfigurationError("--json and --markdown cannot both be printed", "Leave one of them out.")
    project = load_project(config)
    result = compare_runs(project, *(find_run(project.results, name) for name in (older, newer)))
    if as_json or as_markdown:
        typer.echo(view.to_json(result) if as_json else view.markdown(result), nl=False)
    else:
        make_console().print(view.terminal(result), soft_wrap=True, highlight=False)
    raise typer.Exit(result.exit_code)


@uncollected()
def compare_runs(project: Project, older: Path, newer: Path) -> Diff:
    """Of two runs' folders, judged by today's expectations; ranges of metrics are those of the project's runs before
    the newer one."""
    before, after = load_matrix(project, older), load_matrix(project, newer)
    records = [square.record for square in after.squares if square.record is not None]
    runs = [run for run in runs_of(project.results) if run.name < after.run]
    return compare(before, after, _outliers(records, runs))


def _outliers(records: Sequence[Record], runs: Sequence[Path]) -> Iterator[Outlier]:
    for record in records:
        yield from outliers(record, (other for _, other in records_of_cell(runs, record.cell)))


def history(cell: Cell, as_json: AsJson = False, config: Config = None) -> None:
    """One cell over all runs, the newest first: status, verdict, cause, versions."""
    name, found = _moments(load_project(config), cell)
    if as_json:
        typer.echo(json.dumps(timeline.history_document(name, found), indent=1))
        return
    make_console().print(timeline.history_table(found, datetime.now(UTC)))


def find(cell: Cell, as_json: AsJson = False, config: Config = None) -> None:
    """Between which two runs a cell turned (status, verdict or cause), and what differed between these."""
    name, found = _moments(load_project(config), cell)
    turned = turns(found)
    if as_json:
        typer.echo(json.dumps(timeline.turns_document(name, turned), indent=1))
        return
    make_console().print(timeline.turns_report(name, found, turned), soft_wrap=True, highlight=False)


def _moments(project: Project, pattern: str) -> tuple[str, tuple[Moment, ...]]:
    name = _cell(project, pattern)
    found = moments(records_of_cell(runs_of(project.results), name), project.expectations)
    if not found:
        raise NothingSelectedError(
            f"no run in {project.results} has a record of {name}", "`vllm-matrix run` makes one."
        )
    return name, found


def _cell(project: Project, pattern: str) -> str:
    """The id of the one cell that is meant; one that has left matrix.toml is meant by its whole id."""
    names = [cell.id for cell in project.cells]
    found = [name for name in names if matches(pattern, name)]
    if len(found) == 1:
        return found[0]
    if not found and any(True for _ in records_of_cell(runs_of(project.results), pattern)):
        return pattern
    near = found or difflib.get_close_matches(pattern, names, n=5, cutoff=0.4) or names[:5]
    what = "matches several cells" if found else "matches no cell"
    raise NothingSelectedError(f"{pattern!r} {what} of matrix.toml", "Name one, such as:\n  " + "\n  ".join(near[:20]))
