"""`bundle`: targets, suite and plan as files for machines that have no network, nor Docker unless it brings images.

A few files of the index after the other are fetched, packed, cut into parts and forgotten: the disk holds what is
carried, and those. bundle.json comes last; what was there before it stays until `prune`.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

from harness.backends.docker import connect
from harness.bundles import launcher
from harness.bundles.archives import harness_tar, project_tar
from harness.bundles.images import save, saved_before
from harness.bundles.index import (
    FILE,
    PARTS,
    Borrowed,
    ImageArchive,
    Index,
    Kind,
    TargetContents,
    read_index,
    write_index,
)
from harness.bundles.store import Form, Packed, Store, open_store
from harness.bundles.wheels import Machine, Network, Release, fetch, locks_of, own_releases, releases
from harness.bundles.writer import Writer
from harness.cells import Selection, matches
from harness.errors import ConfigurationError, NothingSelectedError
from harness.images import BuildOptions, BuiltImage, Image, build, find_builder
from harness.plan import choose
from harness.project import Project, images_for, plan_cells
from harness.recipes import steps
from harness.workplace import Choice

Say = Callable[[str], None]
WHOLE = 1 << 49  # bytes: no file is cut
SMALLEST = 1 << 20  # bytes of a part: an index can name a million
BATCH = 8  # files that are fetched at once, while those before them are packed: pip takes a second to start
RUN, WORK = "run", "work"

_Item = TypeVar("_Item")
_Got = TypeVar("_Got")


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a user asks for. `config` is matrix.toml; `split`: bytes of a part, at most.

    `borrow`: globs on distributions that the node brings itself.
    """

    config: Path
    to: Path
    machine: Machine
    kind: Kind = "wheels"
    selection: Selection = field(default_factory=Selection)
    profile: str | None = None
    split: int = WHOLE
    borrow: tuple[str, ...] = ()
    prune: bool = False


@dataclass(frozen=True)
class Order:
    """A release, and what of it is carried."""

    release: Release
    form: Form


@dataclass(frozen=True, kw_only=True)
class Made:
    """What was made. `removed`: parts that no content names any more."""

    index: Index
    removed: int


def make_bundle(project: Project, request: Request, options: BuildOptions, say: Say) -> Made:
    """Write the bundle. Raises MatrixError for the first thing that it cannot be made with."""
    chosen = choose(project.spec, project.cells, request.selection, request.profile)
    backend = Choice.DOCKER if request.kind == "images" else Choice.LOCAL
    plan = plan_cells(project, chosen, options, backend, {}, fresh=True)  # references too that only NA cells read
    old = _old_index(request.to)
    network = Network.of(options, os.environ)
    images = images_for(project, [planned.cell for planned in plan], options, backend)
    wanted = _orders(images, request, options) if request.kind == "wheels" else {}
    built = _built(images.values(), project, options, say) if request.kind == "images" else {}
    own = [Order(release, "raw") for release in own_releases(request.machine, network)]
    orders = dict.fromkeys([*own, *(order for orders in wanted.values() for order in orders)])
    writer = Writer(request.to / PARTS, request.split, old)
    with open_store(say) as store:
        carried = {order: writer.add(packed) for order, packed in _packed(store, orders, request.machine, network, say)}
        with store.scratch() as folder:
            harness = writer.add(harness_tar(folder))
            archive = writer.add(project_tar(project, request.config, plan, images.values(), folder))
            saved = _saved(built, old, writer, folder, options.timeout, say)
    index = Index(
        kind=request.kind,
        python=request.machine.python,
        platform=request.machine.platform,
        created=datetime.now(UTC),
        revision=project.revision,
        contents=writer.contents,
        parts=writer.parts,
        launch=(*(carried[order] for order in own), harness),
        project=archive,
        targets={target: _target(some, carried) for target, some in wanted.items()} | saved,
    )
    return _finished(request, index)


def _old_index(folder: Path) -> Index | None:
    """Of the bundle that is there; None for a damaged one: its parts are known by their names, and are kept if whole.

    Raises ConfigurationError for a folder that holds something else.
    """
    if (folder / FILE).exists():
        with contextlib.suppress(ConfigurationError):
            return read_index(folder)
        return None
    if folder.exists() and (not folder.is_dir() or {path.name for path in folder.iterdir()} - {PARTS, RUN, WORK}):
        raise ConfigurationError(f"--to {folder} holds something that is no bundle", "Name an empty or a new folder.")
    return None


# --- what is needed --------------------------------------------------------------------------------------------------


def _orders(
    images: Mapping[tuple[str, str], Image], request: Request, options: BuildOptions
) -> dict[str, tuple[Order, ...]]:
    """What each target of the plan needs, by `target@device`. Raises NothingSelectedError for an idle --borrow."""
    found = {
        f"{target}@{device}": _of_locks(locks_of(steps(image.dockerfile, options.docker_dir)), request)
        for (target, device), image in images.items()
    }
    names = {order.release.name for orders in found.values() for order in orders}
    for pattern in request.borrow:
        if not any(matches(pattern, name) for name in names):
            raise NothingSelectedError(f"--borrow {pattern!r} matches nothing that these targets need")
    return found


def _of_locks(locks: Iterable[tuple[Path, bool]], request: Request) -> tuple[Order, ...]:
    found = [
        Order(release, _form(release, request.borrow))
        for path, source in locks
        for release in releases(path.read_text(encoding="utf-8"), request.machine, source)
    ]
    return tuple(dict.fromkeys(found))


def _form(release: Release, borrow: Iterable[str]) -> Form:
    if release.source:
        return "raw"
    return "record" if any(matches(pattern, release.name) for pattern in borrow) else "packed"


def _target(orders: Iterable[Order], carried: Mapping[Order, str]) -> TargetContents:
    orders = tuple(orders)
    return TargetContents(
        contents=tuple(dict.fromkeys(carried[order] for order in orders if order.form != "record")),
        borrowed={
            order.release.name: Borrowed(version=order.release.version, record=carried[order])
            for order in orders
            if order.form == "record"
        },
    )


# --- fetching and packing --------------------------------------------------------------------------------------------


def _packed(
    store: Store, orders: Iterable[Order], there: Machine, network: Network, say: Say
) -> Iterator[tuple[Order, Packed]]:
    """Each order's content. A few files are fetched ahead; each is removed when it is packed."""
    new: dict[Release, list[Form]] = {}
    for order in orders:
        packed = store.find(order.release, there, order.form)
        if packed is None:
            new.setdefault(order.release, []).append(order.form)
        else:
            yield order, packed

    def get(batch: Sequence[Release]) -> dict[Release, Path]:
        return fetch(batch, there, network, Path(tempfile.mkdtemp(dir=folder)))

    with store.scratch() as folder:
        names = list(new)
        batches = [names[start : start + BATCH] for start in range(0, len(names), BATCH)]
        for number, (batch, files) in enumerate(_ahead(get, batches)):
            for count, release in enumerate(batch, start=number * BATCH + 1):
                for form in new[release]:
                    packed = store.add(release, there, form, files[release])
                    say(f"{count}/{len(names)} {_line(packed, form)}")
                    yield Order(release, form), packed
                files[release].unlink()


def _ahead(get: Callable[[_Item], _Got], items: Iterable[_Item]) -> Iterator[tuple[_Item, _Got]]:
    """What is got for each item, the next one's while this one is worked on."""
    last: tuple[_Item, Future[_Got]] | None = None
    with ThreadPoolExecutor(1) as pool:
        for item in items:
            coming = pool.submit(get, item)
            if last is not None:
                yield last[0], last[1].result()
            last = item, coming
        if last is not None:
            yield last[0], last[1].result()


def _line(packed: Packed, form: Form) -> str:
    facts = packed.facts
    if form == "record":
        return f"{facts.name}: borrowed, of {facts.origin_bytes / 1e6:.1f} MB"
    return f"{facts.name}: {facts.origin_bytes / 1e6:.1f} MB, carried as {facts.data_bytes / 1e6:.1f} MB"


# --- images ----------------------------------------------------------------------------------------------------------


def _built(images: Iterable[Image], project: Project, options: BuildOptions, say: Say) -> dict[str, BuiltImage]:
    """The images by `target@device`; those that are not there are built as for a run."""
    builder, found = find_builder(os.environ), {}
    for image in images:
        log = project.results / "images" / f"{image.target}-{image.device}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        say(f"image  {image.tag}; if it has to be built, the log is in {log}")
        found[f"{image.target}@{image.device}"] = build(image, builder, options, log, lambda _line: None)
    return found


def _saved(
    built: Mapping[str, BuiltImage], old: Index | None, writer: Writer, folder: Path, patience: float, say: Say
) -> dict[str, TargetContents]:
    """What each target's image came to. `patience`: seconds for an answer, which an engine may first copy it for."""
    archives: dict[str, ImageArchive] = {}
    for target, image in built.items():
        say(f"saving {image.tag}, {image.bytes / 1e9:.2f} GB")
        archive = saved_before(old, target, image, writer)
        if archive is None:
            with closing(connect(int(patience))) as client:
                archive = save(client, image, writer, folder, say)
        archives[target] = archive
    return {target: TargetContents(contents=archive.contents, image=archive) for target, archive in archives.items()}


# --- writing ---------------------------------------------------------------------------------------------------------


def _finished(request: Request, index: Index) -> Made:
    shutil.copyfile(launcher.__file__, request.to / RUN)
    (request.to / RUN).chmod(0o755)
    write_index(request.to, index)
    parts = [path for path in (request.to / PARTS).iterdir() if re.fullmatch(r"[0-9a-f]{64}", path.name)]
    strays = [path for path in parts if path.name not in index.parts] if request.prune else []
    for path in strays:
        path.unlink()
    return Made(index=index, removed=len(strays))


# --- what is said of it ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Share:
    """Bytes of parts that a target needs, and those that no other target of the bundle needs."""

    target: str
    contents: int
    borrowed: int
    bytes: int
    alone: int


def shares(index: Index) -> tuple[Share, ...]:
    """One a target; what all need, the harness and the project, is left out."""
    common = {*index.launch, index.project}
    needed = {name: set(index.parts_of(set(index.of([name])) - common)) for name in index.targets}
    found = []
    for name, target in index.targets.items():
        others = set().union(*(parts for other, parts in needed.items() if other != name))
        found.append(
            Share(
                target=name,
                contents=len(target.contents),
                borrowed=len(target.borrowed),
                bytes=sum(index.parts[part] for part in needed[name]),
                alone=sum(index.parts[part] for part in needed[name] - others),
            )
        )
    return tuple(found)
