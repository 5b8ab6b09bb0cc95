"""`vllm-matrix bundle`: options and exit codes. What is no subcommand's name is what a bundle is to be made of."""

from __future__ import annotations

import os
import re
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from packaging.version import Version
from typer.core import TyperGroup

from harness.bundles.index import Index, Kind, identity
from harness.bundles.make import SMALLEST, WHOLE, Made, Request, Share, make_bundle, shares
from harness.bundles.node import Wish, open_node, run_bundle, verify_bundle
from harness.bundles.wheels import PLATFORM, machine
from harness.errors import ConfigurationError
from harness.imports import import_packs
from harness.options import Config, Devices, Fresh, Profile, Scenarios, Selectors, Targets, selection
from harness.project import build_options, find_config, load_project
from harness.records import find_run
from harness.views.terminal import make_console, print_outcome

_SIZE = re.compile(r"(\d{1,12})([KMG]?)(?:i?B)?", re.IGNORECASE)
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


class Carried(StrEnum):
    """What --kind takes."""

    WHEEL = "wheel"
    IMAGE = "image"


_KINDS: dict[Carried, Kind] = {Carried.WHEEL: "wheels", Carried.IMAGE: "images"}

To = Annotated[Path, typer.Option("--to", help="The bundle's folder; one that is there is brought up to date.")]
KindOf = Annotated[
    Carried, typer.Option("--kind", help="Wheels, or for nodes with Docker the images, built first where they lack.")
]
Split = Annotated[str | None, typer.Option("--split", help="Largest part, as 64M or 1G; default: files are not cut.")]
Python = Annotated[
    str | None, typer.Option("--python", help="Of the node; default: the newest that a target asks for.")
]
Platform = Annotated[str, typer.Option("--platform", help="The oldest that it has to run on, as uv names it.")]
Borrow = Annotated[list[str] | None, typer.Option("--borrow", help="Glob on packages that the node has; repeatable.")]
IndexUrl = Annotated[str | None, typer.Option("--index-url", help="Package index to fetch from.")]
Prune = Annotated[bool, typer.Option("--prune", help="Remove parts of earlier bundles that this one does not need.")]


class MakeByDefault(TyperGroup):
    """`bundle SELECT… --to DIR` is `bundle make SELECT… --to DIR`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in (*self.commands, *self.get_help_option_names(ctx)):
            args = ["make", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=MakeByDefault,
    no_args_is_help=True,
    help="Targets, suite and plan as files, for machines without a network. "
    "`bundle SELECT… --to DIR` makes them: `bundle make --help`.",
)


# --- make ------------------------------------------------------------------------------------------------------------


@app.command()
def make(
    to: To,
    select: Selectors = None,
    target: Targets = None,
    device: Devices = None,
    scenario: Scenarios = None,
    profile: Profile = None,
    kind: KindOf = Carried.WHEEL,
    split: Split = None,
    python: Python = None,
    platform: Platform = PLATFORM,
    borrow: Borrow = None,
    index_url: IndexUrl = None,
    prune: Prune = False,
    config: Config = None,
) -> None:
    """Fetch what the locks of the selected cells name, pack it, and put it into parts with the plan and a launcher."""
    if borrow and kind is Carried.IMAGE:
        raise ConfigurationError("--borrow is for wheels", "An image has its own packages.")
    path = (config or find_config(Path.cwd())).resolve()
    version = python or _newest_python(path)
    project = load_project(path, version if kind is Carried.WHEEL else None)
    request = Request(
        config=path,
        to=to,
        machine=machine(version, platform),
        kind=_KINDS[kind],
        selection=selection(select, target, device, scenario),
        profile=profile,
        split=_bytes(split),
        borrow=tuple(borrow or ()),
        prune=prune,
    )
    made = make_bundle(project, request, build_options(project, index_url=index_url), typer.echo)
    for line in _lines(made, to):
        typer.echo(line)


def _newest_python(config: Path) -> str:
    return max((target.python for target in load_project(config).spec.targets.values()), key=Version)


def _bytes(text: str | None) -> int:
    if text is None:
        return WHOLE
    found = _SIZE.fullmatch(text)
    size = int(found[1]) * _UNITS[found[2].upper()] if found else 0
    if not SMALLEST <= size <= WHOLE:
        raise ConfigurationError(f"--split {text!r} is no size of a part", "It looks like 64M, and is 1M or more.")
    return size


def _lines(made: Made, folder: Path) -> list[str]:
    index = made.index
    per_target = shares(index)
    total = sum(index.parts.values())
    common = sum(index.parts_of([*index.launch, index.project]).values())
    return [
        *(_share_line(share, index.kind) for share in per_target),
        f"harness and project: {_mb(common)}",
        f"bundle {identity(index)}: {len(index.contents)} contents in {len(index.parts)} parts, {_mb(total)}",
        f"shared between targets: {_mb(total - common - sum(share.alone for share in per_target))}",
        *([f"removed: {made.removed} parts that this bundle does not need"] if made.removed else []),
        f"Carry {folder} over to a machine with {_needs(index)}; there: python3 {folder.resolve().name}/run",
    ]


def _needs(index: Index) -> str:
    return f"Python {index.python}{' and Docker' if index.kind == 'images' else ''}"


def _share_line(share: Share, kind: Kind) -> str:
    borrowed = f", {share.borrowed} borrowed" if share.borrowed else ""
    what = f"image in {share.contents} contents" if kind == "images" else f"{share.contents} packages"
    return f"{share.target}: {what}{borrowed}, {_mb(share.bytes)}, {_mb(share.alone)} for it alone"


def _mb(size: int) -> str:
    return f"{size / 1e6:.1f} MB"


# --- run -------------------------------------------------------------------------------------------------------------

Work = Annotated[Path | None, typer.Option("--work", help="Where all is made; default: `work` in the bundle's folder.")]
Resume = Annotated[str | None, typer.Option("--resume", help="Go on with an interrupted run: its name or folder.")]
BorrowFrom = Annotated[
    Path | None,
    typer.Option(
        "--borrow-from",
        envvar="VLLM_MATRIX_BORROW_FROM",
        help="Site-packages that hold what the bundle borrows; default: those of the Python that started the launcher.",
    ),
]
Multiplier = Annotated[
    float, typer.Option("--timeout-multiplier", min=0.01, max=1000, help="Stretches every deadline.")
]
VerifyOnly = Annotated[bool, typer.Option("--verify-only", help="Look at the parts that are needed; run nothing.")]


@app.command()
def run(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The bundle's folder.")],
    select: Selectors = None,
    target: Targets = None,
    work: Work = None,
    fresh: Fresh = False,
    resume: Resume = None,
    borrow_from: BorrowFrom = None,
    timeout_multiplier: Multiplier = 1.0,
    verify_only: VerifyOnly = False,
) -> None:
    """Run cells of a bundle on this machine, without a network; pack each record as soon as it is there."""
    node = open_node(folder, work)
    os.environ.update(node.variables)
    chosen = selection(select, target, None, None)
    console = make_console()
    if verify_only:
        size = verify_bundle(node, chosen, typer.echo)
        typer.echo(f"bundle {identity(node.index)}: {size / 1e6:.1f} MB of parts are there and whole")
        return
    wish = Wish(selection=chosen, fresh=fresh, resume=resume, site=borrow_from, multiplier=timeout_multiplier)
    outcome = run_bundle(node, wish, console)
    print_outcome(console, outcome.matrix, outcome.folder)
    typer.echo(f"packs: {node.outbox}")
    raise typer.Exit(outcome.exit_code)


# --- import ----------------------------------------------------------------------------------------------------------

Into = Annotated[str | None, typer.Option("--into", help="Add to this run, by its name or folder; default: a new one.")]


@app.command("import")
def take(
    packs: Annotated[list[Path], typer.Argument(metavar="PACK…", help="Packs, or folders of them.")],
    into: Into = None,
    config: Config = None,
) -> None:
    """Make a run of packs that were carried home, or add them to one. Each is examined; none is believed."""
    project = load_project(config)
    done = import_packs(project, packs, find_run(project.results, into) if into else None)
    for line in done.lines():
        typer.echo(line)
    if done.outcome is not None:
        print_outcome(make_console(), done.outcome.matrix, done.outcome.folder)
    raise typer.Exit(done.exit_code)
