"""The verb that asks whether a candidate is as good as a baseline. Options and exit codes only."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from harness.candidate import Asked, Candidate, parse_candidate
from harness.cells import Selection
from harness.errors import ConfigurationError, NothingSelectedError
from harness.images import BuildOptions
from harness.options import Config, Fresh, Profile, Scenarios
from harness.plan import choose as choose_cells
from harness.project import Project, load_project
from harness.records import write_atomic
from harness.run import Tools, new_run
from harness.spec import MatrixSpec
from harness.validate import Means, folder_of
from harness.validate import validate as validate_candidate
from harness.views import terminal
from harness.views import validation as view
from harness.workplace import Choice, choose, open_tools

Spec = Annotated[
    str, typer.Option("--candidate", help="A version, name==version, a wheel, index:URL#name==version, or image:TAG.")
]
Baseline = Annotated[str, typer.Option("--baseline", help="The target of matrix.toml that it has to be as good as.")]
OnDevice = Annotated[str | None, typer.Option("--device", help="cpu or cuda; default: run.device.")]
Line = Annotated[
    str | None, typer.Option("--line", help="The release line that it stands for; default: its version's.")
]
Released = Annotated[
    datetime | None,
    typer.Option(formats=["%Y-%m-%d"], help="Its day: other packages change to none that is much younger."),
]
Markdown = Annotated[Path | None, typer.Option("--markdown", help="Write a comment for a pull request there.")]


def register(app: typer.Typer) -> None:
    app.command()(validate)


def validate(
    candidate: Spec,
    baseline: Baseline,
    device: OnDevice = None,
    profile: Profile = None,
    scenario: Scenarios = None,
    line: Line = None,
    released: Released = None,
    fresh: Fresh = False,
    backend: Annotated[Choice, typer.Option(help="auto: docker, or local where there is no Docker.")] = Choice.AUTO,
    base: Annotated[str | None, typer.Option(help="Base image instead of matrix.toml's.")] = None,
    index_url: Annotated[str | None, typer.Option(help="Package index for the lock and the builds.")] = None,
    timeout_multiplier: Annotated[float, typer.Option(min=0.01, max=1000, help="Stretches every deadline.")] = 1.0,
    markdown: Markdown = None,
    config: Config = None,
) -> None:
    """Run a vLLM that is in no matrix.toml beside a target that is, and say go, no-go or incomplete, and why."""
    project = load_project(config)
    asked = _asked(project, candidate, baseline, device or project.spec.run.device, profile, scenario, line)
    asked = replace(asked, released=released.date() if released else None)
    where = _where(backend, asked.candidate)
    console = terminal.make_console()

    def tools(made: Project, options: BuildOptions) -> Tools:
        stretched = replace(options, timeout=options.timeout * timeout_multiplier)
        return replace(open_tools(where, made, stretched, console, {asked.device}), patience=timeout_multiplier)

    means = Means(
        where=where,
        open=tools,
        index_url=index_url,
        base=base,
        fresh=fresh,
        planned=lambda plan: tuple(replace(one, cell=one.cell.stretched(timeout_multiplier)) for one in plan),
    )
    name = new_run(datetime.now(UTC))
    result = validate_candidate(project, asked, name, means)
    write_atomic(folder_of(project, name) / "validation.json", view.to_json(result))
    if markdown is not None:
        write_atomic(markdown, view.markdown(result))
    console.print(view.terminal(result), soft_wrap=True, highlight=False)
    raise typer.Exit(result.exit_code)


def _asked(
    project: Project,
    candidate: str,
    baseline: str,
    device: str,
    profile: str | None,
    scenario: list[str] | None,
    line: str | None,
) -> Asked:
    spec = project.spec
    if line is not None and not re.fullmatch(r"\d+(\.\d+){1,2}", line):
        raise ConfigurationError(f"--line {line!r} is no release line", "It looks like 0.10.1.")
    distribution = _distribution(spec, baseline, device)
    selection = Selection(targets=(baseline,), devices=(device,), scenarios=scenario or ())
    chosen = choose_cells(spec, project.cells, selection, profile)
    return Asked(
        candidate=parse_candidate(candidate, distribution),
        baseline=baseline,
        device=device,
        profile=profile or spec.run.profile,
        scenarios=tuple(scenario or ()),
        cells=tuple(cell for cell, selected in chosen if selected),
        line=line,
    )


def _distribution(spec: MatrixSpec, baseline: str, device: str) -> str:
    """The baseline's own. Raises NothingSelectedError for one that is not there."""
    able = [name for name, target in spec.targets.items() if device in target.devices]
    if baseline not in able:
        raise NothingSelectedError(
            f"--baseline {baseline!r} is no target on {device}", f"There are: {', '.join(able) or 'none'}."
        )
    return spec.targets[baseline].on(device).distribution


def _where(backend: Choice, candidate: Candidate) -> str:
    if candidate.kind == "image" and backend is Choice.LOCAL:
        raise ConfigurationError("an image as a candidate needs Docker", "Leave out --backend local.")
    where, sentence = choose(Choice.DOCKER if candidate.kind == "image" else backend)
    if sentence:
        typer.echo(sentence, err=True)
    return where
