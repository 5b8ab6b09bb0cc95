"""The verb that compares what the targets of a run answered: drift. Options and exit codes only."""

from __future__ import annotations

import typer

from harness.commands.compare import AsMarkdown
from harness.commands.judging import Run
from harness.drift import Drift
from harness.drift import drift as compare
from harness.errors import ConfigurationError, NothingSelectedError
from harness.options import AsJson, Config
from harness.project import load_project
from harness.records import find_run
from harness.references import read_references
from harness.views import drift as view
from harness.views.terminal import make_console


def register(app: typer.Typer) -> None:
    app.command()(drift)


def drift(run: Run = None, as_json: AsJson = False, as_markdown: AsMarkdown = False, config: Config = None) -> None:
    """Greedy tokens and log-probabilities of each target of a run against its predecessor. 1: a target drifts."""
    if as_json and as_markdown:
        raise ConfigurationError("--json and --markdown cannot both be printed", "Leave one of them out.")
    project = load_project(config)
    folder = find_run(project.results, run)
    scenarios = {scenario.reference for scenario in project.spec.scenarios.values() if scenario.reference}
    result = compare(folder.name, *read_references(folder, scenarios))
    if not result.pairs:
        raise _nothing(result)
    if as_json or as_markdown:
        typer.echo(view.to_json(result) if as_json else view.markdown(result), nl=False)
    else:
        make_console().print(view.terminal(result), soft_wrap=True, highlight=False)
    raise typer.Exit(result.exit_code)


def _nothing(result: Drift) -> NothingSelectedError:
    why = "".join(f"\n  {one.cell}: {one.reason}" for one in result.left_out)
    return NothingSelectedError(
        f"run {result.run} has no two targets whose references can be compared{why}",
        "Run cold_start of two targets with the same model, dtype and device class.",
    )
