"""The command line: verbs, options and exit codes. No logic lives here."""

from __future__ import annotations

import errno
import json
import os
import shlex
import shutil
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.markup import escape

from harness import __version__, inventory, models
from harness.bundles.cli import app as bundle
from harness.cells import Selection, matches
from harness.commands import compare, drifting, judging, validating
from harness.errors import ConfigurationError, InfrastructureError, MatrixError, NothingSelectedError
from harness.events import clean
from harness.images import BuildOptions
from harness.locks import Question, differences, is_current, questions_of, read_lock, resolve
from harness.matrix import Matrix, Square
from harness.merged import merge as merge_runs
from harness.options import AsJson, Config, Devices, Fresh, Profile, Scenarios, Selectors, Targets
from harness.options import selection as as_selection
from harness.plan import Planned, not_runnable
from harness.plan import choose as choose_cells
from harness.project import Project, build_options, load_project, make_plan
from harness.records import find_run, write_atomic
from harness.relaunch import again, latest_evidence
from harness.resume import backend_of, rest_of
from harness.run import execute, load_matrix
from harness.shards import parse_shard, split
from harness.views import images as image_views
from harness.views import terminal
from harness.views.jsonview import plan_document
from harness.views.stacks import read_stacks
from harness.workplace import Choice, choose, clean_up, open_tools

app = typer.Typer(
    help="One scenario suite against many vLLM versions, each in its own container.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

BackendOption = Annotated[Choice, typer.Option(help="auto: docker, or local where there is no Docker.")]
Python = Annotated[str | None, typer.Option(help="Of all targets, instead of their own; without Docker only.")]
ShardOption = Annotated[str | None, typer.Option("--shard", help="2/4: the second of four parts of the cells.")]
CellArgument = Annotated[str, typer.Argument(help="A cell id, or a glob that selects one cell of the run.")]
RunOption = Annotated[str | None, typer.Option("--run", help="A run's name or folder; default: the newest.")]


compare.register(app)
drifting.register(app)
judging.register(app)
validating.register(app)
app.add_typer(bundle, name="bundle")

# What a user can mend: no room, no right, something else in the place of a folder.
_TOLD = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.ENOTDIR, errno.EEXIST, errno.ELOOP, errno.EISDIR}
)


def main() -> NoReturn:
    """Entry point: errors become one message and their exit code, never a traceback for a user's mistake."""
    signal.signal(signal.SIGTERM, _as_interrupt)
    try:
        app(standalone_mode=True)
    except MatrixError as error:
        _fail(str(error), error.exit_code)
    except KeyboardInterrupt:
        _fail("interrupted", 130)
    except OSError as error:
        if error.errno not in _TOLD:
            raise
        _fail(f"{error.filename or 'a file'}: {error.strerror}\n  Nothing that was recorded is lost.", 5)
    sys.exit(0)


def _as_interrupt(_number: int, _frame: object) -> NoReturn:
    raise KeyboardInterrupt


def _fail(message: str, code: int) -> NoReturn:
    Console(stderr=True).print(f"[bold red]error:[/] {escape(message)}", highlight=False, soft_wrap=True)
    sys.exit(code)


@app.callback(invoke_without_command=True)
def version(
    show_version: Annotated[bool, typer.Option("--version", help="Print the version.", is_eager=True)] = False,
) -> None:
    if show_version:
        typer.echo(f"vllm-matrix {__version__}")
        raise typer.Exit


@app.command()
def run(
    select: Selectors = None,
    target: Targets = None,
    device: Devices = None,
    scenario: Scenarios = None,
    profile: Profile = None,
    fresh: Fresh = False,
    base: Annotated[str | None, typer.Option(help="Base image instead of matrix.toml's.")] = None,
    index_url: Annotated[str | None, typer.Option(help="Package index for the builds.")] = None,
    timeout_multiplier: Annotated[float, typer.Option(min=0.01, max=1000, help="Stretches every deadline.")] = 1.0,
    backend: BackendOption = Choice.AUTO,
    python: Python = None,
    shard: ShardOption = None,
    resume: Annotated[str | None, typer.Option(help="Go on with an interrupted run: its name or folder.")] = None,
    config: Config = None,
) -> None:
    """Plan, build what is missing, run every cell in its container, judge, print and write the table."""
    project = load_project(config, python)
    options = build_options(project, base, index_url)
    options = replace(options, timeout=options.timeout * timeout_multiplier)
    selection = as_selection(select, target, device, scenario)
    console = terminal.make_console()
    resumed = _run_folder(project, resume) if resume else None
    if resumed is None:
        where = _choose(backend)
        plan = _part(project, selection, profile, shard, make_plan(project, selection, profile, fresh, options, where))
    else:
        if selection != Selection() or profile or fresh or shard:
            raise ConfigurationError(
                "--resume takes its cells from the run", "Leave out selectors, --shard and --fresh."
            )
        where, plan = _rest(project, resumed, options, backend)
    devices = {planned.cell.device for planned in plan if planned.action != "elsewhere"}
    tools = replace(open_tools(where, project, options, console, devices), patience=timeout_multiplier)
    with tools.stop.on_signals():
        outcome = execute(project, tuple(_stretched(p, timeout_multiplier) for p in plan), tools, resumed)
        terminal.print_outcome(console, outcome.matrix, outcome.folder)
    raise typer.Exit(outcome.exit_code)


def _part(
    project: Project, selection: Selection, profile: str | None, shard: str | None, plan: tuple[Planned, ...]
) -> tuple[Planned, ...]:
    if shard is None:
        return plan
    chosen = [cell for cell, _ in choose_cells(project.spec, project.cells, selection, profile)]
    part = split(plan, chosen, parse_shard(shard))
    own = sum(planned.action != "elsewhere" for planned in part)
    typer.echo(f"shard {shard}: {own} of {len(part)} cells; merge the others' runs with `vllm-matrix merge`", err=True)
    return part


def _rest(project: Project, folder: Path, options: BuildOptions, backend: Choice) -> tuple[str, tuple[Planned, ...]]:
    where = backend_of(folder) if backend is Choice.AUTO else str(backend)
    rest = rest_of(project, folder, options, where)
    typer.echo(str(rest))
    return where, rest.plan


def _choose(asked: Choice) -> str:
    where, sentence = choose(asked)
    if sentence:
        typer.echo(sentence, err=True)  # `plan --json` goes to stdout
    return where


def _stretched(planned: Planned, multiplier: float) -> Planned:
    return replace(planned, cell=planned.cell.stretched(multiplier))


@app.command()
def plan(
    select: Selectors = None,
    target: Targets = None,
    device: Devices = None,
    scenario: Scenarios = None,
    profile: Profile = None,
    fresh: Fresh = False,
    as_json: AsJson = False,
    backend: BackendOption = Choice.AUTO,
    python: Python = None,
    shard: ShardOption = None,
    config: Config = None,
) -> None:
    """Print the cells, and why each would run or be reused. Starts nothing."""
    project = load_project(config, python)
    selection, options = as_selection(select, target, device, scenario), build_options(project)
    planned = make_plan(project, selection, profile, fresh, options, _choose(backend))
    planned = _part(project, selection, profile, shard, planned)
    if as_json:
        typer.echo(json.dumps(plan_document(planned, not_runnable(project.spec)), indent=1))
        return
    console = terminal.make_console()
    console.print(terminal.plan_table(planned))
    if idle := not_runnable(project.spec):
        console.print(f"not runnable yet, for want of a lock: {', '.join(idle)}", style="dim")


@app.command()
def merge(
    runs: Annotated[list[str], typer.Argument(help="Names or folders of runs of one plan, such as its shards.")],
    config: Config = None,
) -> None:
    """Make one run of several: finds cells that are missing, done twice, or at odds; prints and writes the table."""
    project = load_project(config)
    outcome, union = merge_runs(project, [_run_folder(project, name) for name in runs])
    for line in union.lines():
        typer.echo(line)
    terminal.print_outcome(terminal.make_console(), outcome.matrix, outcome.folder)
    raise typer.Exit(outcome.exit_code)


@app.command()
def lock(
    target: Annotated[list[str] | None, typer.Argument(help="Globs on targets; default: all.")] = None,
    device: Devices = None,
    check: Annotated[bool, typer.Option("--check", help="Write nothing; say what would change.")] = False,
    index_url: Annotated[str | None, typer.Option(help="Package index to resolve from.")] = None,
    config: Config = None,
) -> None:
    """Make the locks of targets as matrix.toml says: dated, hashed, for Python 3.11 and later, from wheels only."""
    project = load_project(config)
    index = index_url or project.spec.images.index_url
    changed = False
    for question in questions_of(project.spec, target or ("*",), device or ("*",)):
        changed |= _lock(project.root, question, index, check)
    raise typer.Exit(1 if changed and check else 0)


def _lock(root: Path, question: Question, index: str | None, check: bool) -> bool:
    """Make one lock, or only look at it; whether it differs from the file that is there."""
    new, old = resolve(question, index), read_lock(root, question)
    if new == old:
        typer.echo(f"{question.path}: as it was")
        return False
    stale = old is not None and not is_current(old, question)
    what = "is missing" if old is None else "matrix.toml says something else" if stale else "resolves otherwise"
    typer.echo(f"{question.path}: {what}" if check else f"{question.path}: written")
    for line in differences(old, new) if old is not None else ():
        typer.echo(f"  {line}")
    if not check:
        write_atomic(root / question.path, new)
    return True


@app.command()
def images(config: Config = None) -> None:
    """Which images of the targets are there, their sizes, and the bytes that are in no other image."""
    project = load_project(config)
    found = inventory.rows(project, build_options(project))
    console = terminal.make_console()
    console.print(image_views.table(found))
    console.print(image_views.totals(found), style="dim")


@app.command("models")
def make_models(
    to: Annotated[Path | None, typer.Option(help="Folder; default: the user's cache.")] = None,
) -> None:
    """Make the tiny models: the same bytes on every machine, checked against the committed checksums."""
    root = to or models.default_root()
    files = models.generate(root)
    typer.echo(f"{len(files)} files in {root}, checksums as committed")


@app.command("clean")
def remove_remnants(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Remove nothing; say what there is.")] = False,
) -> None:
    """Remove containers, processes and folders that harnesses left which were killed; `run` does it too."""
    lines = [clean(line) for line in clean_up(dry_run)]
    for line in lines or ["nothing is left of any harness that has ended"]:
        typer.echo(line)


@app.command()
def show(cell: CellArgument, run: RunOption = None, config: Config = None) -> None:
    """Everything about one cell of a run: status, cause, checks, phases, versions, where the evidence lies."""
    project, matrix, square = _square(cell, run, config)
    folder = str(latest_evidence(project, matrix.run, square) or "none: it has not begun")
    target = next((facts for facts in matrix.targets if facts.row == square.row), None)
    terminal.make_console().print(terminal.cell_detail(square, folder, target, read_stacks(Path(folder, "out"))))


@app.command()
def logs(cell: CellArgument, run: RunOption = None, config: Config = None) -> None:
    """The head of what the cell's last attempt printed, also while it runs: stdout, then stderr."""
    project, matrix, square = _square(cell, run, config)
    folder = latest_evidence(project, matrix.run, square)
    if folder is None:
        what = f"{square.cell.id} has not begun in run {matrix.run}"
        raise NothingSelectedError(what, "`vllm-matrix show` says more.")
    for stream in ("stdout.log", "stderr.log"):
        path = folder / stream
        if path.is_file():
            typer.echo(f"--- {path}")
            with path.open("r", encoding="utf-8", errors="replace") as file:
                for line in file:
                    typer.echo(clean(line), nl=False)


@app.command()
def repro(cell: CellArgument, run: RunOption = None, config: Config = None) -> None:
    """Print the command that runs this cell again, outside of vllm-matrix."""
    project, _, square = _square(cell, run, config)
    made = again(project, square)
    typer.echo(shlex.join(["mkdir", "-p", *map(str, made.folders)]))
    typer.echo(shlex.join(made.words))


@app.command()
def shell(cell: CellArgument, run: RunOption = None, config: Config = None) -> None:
    """A shell in a container, or an environment, like the cell's. `python3 -m rig` is the cell."""
    project, _, square = _square(cell, run, config)
    made = again(project, square, interactive=True)
    for folder in made.folders:
        folder.mkdir(parents=True, exist_ok=True)
    program = shutil.which(made.words[0])
    if program is None:
        raise InfrastructureError(f"`shell` needs {made.words[0]} on PATH", "Docker's is in docker.io or docker-cli.")
    os.execv(program, made.words)  # noqa: S606 - a terminal for the user


def _square(pattern: str, run: str | None, config: Path | None) -> tuple[Project, Matrix, Square]:
    project = load_project(config)
    matrix = load_matrix(project, _run_folder(project, run))
    found = [square for square in matrix.squares if matches(pattern, square.cell.id)]
    if len(found) == 1:
        return project, matrix, found[0]
    names = "\n  ".join(square.cell.id for square in found or matrix.squares)
    what = "matches several cells" if found else "matches no cell"
    raise NothingSelectedError(f"{pattern!r} {what} of run {matrix.run}:\n  {names}")


def _run_folder(project: Project, name: str | None) -> Path:
    return find_run(project.results, name)
