"""`bundle run`: cells of a bundle on a machine that has no network, nor Docker unless for images, and may vanish.

The project is unpacked, planned again and held against the plan that came along; then it is a run like any other,
whose packages, or images, come from the bundle. Every record is packed as soon as it is there.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from rich.console import Console

from harness.backends.docker import connect
from harness.bundles import images
from harness.bundles.index import PARTS, Index, identity, read_index
from harness.bundles.parts import lacking
from harness.bundles.unpack import unpack_once
from harness.bundles.wheelhouse import MAX_THREADS, Packages
from harness.cells import Selection, select
from harness.environments import environments_root, make_environment, size_told
from harness.errors import BuildError, ConfigurationError, InfrastructureError, MatrixError
from harness.images import BuildOptions, BuiltImage, Image, locked
from harness.packs import pack_new
from harness.plan import Planned
from harness.planfile import PlannedEntry, read_plan
from harness.project import Project, build_options, images_for, load_project, plan_cells
from harness.records import find_run, history
from harness.resume import rest_of
from harness.run import Build, Outcome, Tools, execute
from harness.shards import keep
from harness.spec import CONFIG_NAME
from harness.workplace import Choice, docker_tools, open_tools

Say = Callable[[str], None]
SHOWN = 20  # parts, or cells, that an error names


@dataclass(frozen=True, kw_only=True)
class Node:
    """A bundle on this machine. All that is made of it lies in `work`, on one file system: links need that."""

    bundle: Path
    work: Path
    index: Index

    @property
    def backend(self) -> Choice:
        return Choice.DOCKER if self.index.kind == "images" else Choice.LOCAL

    @property
    def python(self) -> str | None:
        """In the place of every target's own; images have theirs."""
        return None if self.index.kind == "images" else self.index.python

    @property
    def outbox(self) -> Path:
        return self.work / "outbox"

    @property
    def variables(self) -> Mapping[str, str]:
        """Where caches are, for this process and uv."""
        return {"XDG_CACHE_HOME": str(self.work / "cache"), "UV_CACHE_DIR": str(self.work / "uv-cache")}


def open_node(bundle: Path, work: Path | None) -> Node:
    """Raises ConfigurationError for a folder that holds no bundle."""
    bundle = bundle.resolve()
    return Node(bundle=bundle, work=(work or bundle / "work").resolve(), index=read_index(bundle))


def load_node_project(node: Node, say: Say) -> Project:
    """The bundle's project, unpacked if it is not there yet. Its results stay, whatever the bundle brings."""
    root = node.work / "project"
    with locked("bundle-project", say):
        unpack_once(node.bundle / PARTS, node.index, root)
    project = load_project(root / CONFIG_NAME, node.python)
    return replace(project, told=node.index.revision)


# --- the plan --------------------------------------------------------------------------------------------------------


def plan_here(
    project: Project, selection: Selection, fresh: bool, options: BuildOptions, backend: str = Choice.LOCAL
) -> tuple[Planned, ...]:
    """The bundle's plan, as it is carried out here: what was not selected is elsewhere.

    Raises ConfigurationError where a cell would be another one here than it was at home.
    """
    carried = read_plan(project.root)
    cells = {cell.id: cell for cell in project.cells}
    if gone := [entry.cell.id for entry in carried.cells if entry.cell.id not in cells]:
        raise ConfigurationError(f"the bundle's plan has {gone[0]}, and its matrix.toml has not", "Make it again.")
    chosen = [(cells[entry.cell.id], entry.selected) for entry in carried.cells]
    earlier = history(project.results, datetime.now(UTC) - project.max_age)
    plan = plan_cells(project, chosen, options, backend, earlier, fresh)
    require_same(carried.cells, plan)
    own = [cells[entry.cell.id] for entry in carried.own]
    return keep(plan, {cell.id for cell in select(own, selection)}, "not selected on this machine")


def require_same(carried: Sequence[PlannedEntry], plan: Sequence[Planned]) -> None:
    """Raises ConfigurationError that names the facts which differ between home and here."""
    other = [(entry, planned) for entry, planned in zip(carried, plan, strict=True) if entry.digest != planned.digest]
    if other:
        lines = [f"{entry.cell.id}: {_differences(entry, planned)}" for entry, planned in other[:SHOWN]]
        more = [f"and {len(other) - SHOWN} more"] if len(other) > SHOWN else []
        raise ConfigurationError(
            "\n  ".join(["these cells would not be here what was planned at home", *lines, *more]),
            "Make the bundle on a machine of this kind, and run it as it was made.",
        )


def _differences(entry: PlannedEntry, planned: Planned) -> str:
    home, here = entry.facts, planned.facts
    names = sorted(name for name in {*home, *here} if home.get(name) != here.get(name))
    return "; ".join(f"{name} is {_short(home.get(name))} at home, {_short(here.get(name))} here" for name in names)


def _short(value: str | None) -> str:
    return "nothing" if value is None else value if len(value) <= 40 else f"{value[:16]}…"


# --- parts -----------------------------------------------------------------------------------------------------------


def targets_of(plan: Iterable[Planned]) -> tuple[str, ...]:
    """Targets with cells to run, as the index names them."""
    return tuple(dict.fromkeys(_pair(p.cell.target, p.cell.device) for p in plan if p.action == "run"))


def _pair(target: str, device: str) -> str:
    return f"{target}@{device}"


def not_made(project: Project, plan: Sequence[Planned], options: BuildOptions) -> tuple[str, ...]:
    """Those of them whose environment is not there yet."""
    cells = [planned.cell for planned in plan if planned.action == "run"]
    found = images_for(project, cells, options, Choice.LOCAL)
    root = environments_root()
    return tuple(_pair(*pair) for pair, image in found.items() if size_told(root / image.tag) is None)


def _waiting(node: Node, project: Project, plan: Sequence[Planned], options: BuildOptions) -> tuple[str, ...]:
    """Targets with cells to run whose environment, or image, is not there yet."""
    if node.backend == Choice.LOCAL:
        return not_made(project, plan, options)
    with closing(connect()) as client:
        return images.not_loaded(client, node.index, targets_of(plan))


def require_parts(node: Node, targets: Iterable[str]) -> int:
    """See that all parts which these targets need are there and whole; their bytes.

    Raises InfrastructureError that lists the others, NothingSelectedError for a target that the bundle does not hold.
    """
    parts = node.index.parts_of(node.index.of(targets))

    def look(part: tuple[str, int]) -> dict[str, str]:
        return dict(lacking(node.bundle / PARTS, dict([part]), verify=True))

    with ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1)) as pool:
        faults = {name: lack for found in pool.map(look, parts.items()) for name, lack in found.items()}
    if faults:
        total = sum(parts[name] for name in faults)
        lines = [f"{name} is {lack} ({parts[name]} bytes)" for name, lack in list(faults.items())[:SHOWN]]
        more = [f"and {len(faults) - SHOWN} more"] if len(faults) > SHOWN else []
        head = f"{len(faults)} of {len(parts)} parts, {total / 1e6:.1f} MB, are not as they should be:"
        raise InfrastructureError(
            "\n  ".join([head, *lines, *more]), f"Carry them over again, to {node.bundle / PARTS}."
        )
    return sum(parts.values())


# --- the run ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Wish:
    """What a user asks of a bundle on this machine. `site` is the folder of packages to borrow from."""

    selection: Selection = field(default_factory=Selection)
    fresh: bool = False
    resume: str | None = None
    site: Path | None = None
    multiplier: float = 1.0


def run_bundle(node: Node, wish: Wish, console: Console) -> Outcome:
    """Verify what the selected targets need, make their environments, run their cells, pack what they leave."""
    tell = partial(console.print, highlight=False, soft_wrap=True, markup=False)
    project = load_node_project(node, tell)
    options = build_options(project)
    options = replace(options, timeout=options.timeout * wish.multiplier)
    plan, resumed = _planned(node, project, wish, options, tell)
    size = require_parts(node, _waiting(node, project, plan, options))
    tell(f"bundle {identity(node.index)}: {size / 1e9:.2f} GB of parts are as they should be")
    plan = tuple(replace(planned, cell=planned.cell.stretched(wish.multiplier)) for planned in plan)
    tools = replace(node_tools(node, project, plan, options, console, wish.site), patience=wish.multiplier)
    with tools.stop.on_signals():
        return execute(project, plan, tools, resumed)


def verify_bundle(node: Node, selection: Selection, say: Say) -> int:
    """Bytes of what the selected targets need, all of it there and whole. Raises InfrastructureError that lists it."""
    project = load_node_project(node, say)
    plan = plan_here(project, selection, True, build_options(project), node.backend)
    return require_parts(node, targets_of(plan))


def _planned(
    node: Node, project: Project, wish: Wish, options: BuildOptions, say: Say
) -> tuple[tuple[Planned, ...], Path | None]:
    """The plan, and the folder of the run that is gone on with."""
    if wish.resume is None:
        return plan_here(project, wish.selection, wish.fresh, options, node.backend), None
    if wish.selection != Selection() or wish.fresh:
        raise ConfigurationError("--resume takes its cells from the run", "Leave out selectors and --fresh.")
    folder = find_run(project.results, wish.resume)
    rest = rest_of(project, folder, options, node.backend)
    say(str(rest))
    return rest.plan, folder


def node_tools(
    node: Node, project: Project, plan: Sequence[Planned], options: BuildOptions, console: Console, site: Path | None
) -> Tools:
    """Tools that take packages, or images, from the bundle, and pack every record. `site`: to borrow from.

    Raises InfrastructureError for what this machine lacks.
    """
    if node.backend == Choice.DOCKER:
        tools = docker_tools(connect(), _loader(node, options.timeout), options, console)
    else:
        devices = {planned.cell.device for planned in plan if planned.action != "elsewhere"}
        tools = open_tools(Choice.LOCAL, project, options, console, devices)
        tools = replace(tools, build=_builder(node, project, options, list(not_made(project, plan, options)), site))
    return replace(tools, kept=Outbox(node.outbox, tools.progress.say))


def _loader(node: Node, patience: float) -> Build:
    """Loads images one after the other. `patience`: seconds that an engine may take for a step of it."""

    def build(image: Image, log: Path, say: Say) -> BuiltImage:
        with locked(image.tag, say), closing(connect(int(patience))) as client:
            made = images.load(client, node.bundle, node.index, image, say)
        log.write_text(f"{made.id} {'was there' if made.cached else f'loaded from {node.bundle}'}\n", encoding="utf-8")
        return made

    return build


def _builder(node: Node, project: Project, options: BuildOptions, waiting: list[str], site: Path | None) -> Build:
    """Makes environments one after the other; wheels go when no target that is `waiting` needs them any more."""
    root = environments_root()

    def build(image: Image, log: Path, say: Say) -> BuiltImage:
        target = _pair(image.target, image.device)
        if target not in node.index.targets:
            raise BuildError(f"the bundle does not hold {target}", "Make it again.")
        packages = Packages(bundle=node.bundle, index=node.index, target=target, folder=node.work / "wheels", site=site)
        with locked("bundle-wheels", say):  # another run here must not lose what it installs from
            made = make_environment(image, project.python_of(image.target), options, root, log, say, packages)
            waiting[:] = [name for name in waiting if name != target]
            packages.release(waiting)
        return made

    return build


class Outbox:
    """Packs what has a record and no pack yet; what cannot be packed now is tried again with the next record."""

    def __init__(self, folder: Path, say: Say) -> None:
        self._folder = folder
        self._say = say
        self._lock = threading.Lock()

    def __call__(self, run: Path) -> None:
        with self._lock:
            try:
                pack_new(run, self._folder)
            except (OSError, MatrixError) as error:  # the record is still in the run's folder: no reason to stop
                self._say(f"pack   not now: {error}")
