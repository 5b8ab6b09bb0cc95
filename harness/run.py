"""`vllm-matrix run`: the flow from plan to Matrix. The stages are elsewhere; here they are put in a row."""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

from filelock import FileLock, Timeout

from harness import models
from harness.attempt import absent, missed
from harness.attempts import Attempts
from harness.backends.base import Backend
from harness.backends.owner import owner
from harness.errors import BuildError, ConfigurationError, InfrastructureError
from harness.evidence import copy_evidence
from harness.examination import Built, Examiner, unbuilt
from harness.images import BuildOptions, BuiltImage, Image
from harness.job import Context
from harness.matrix import Matrix, build_matrix
from harness.needs import Pair, unmet
from harness.plan import Planned, Unmet, not_runnable
from harness.planfile import read_plan, write_plan
from harness.probes import Known
from harness.project import Project, host, images_for
from harness.records import (
    ImageRef,
    Record,
    attempt_folder,
    records_of,
    write_atomic,
    write_record,
)
from harness.scheduler import run_all
from harness.share import Share, opened
from harness.status import Status
from harness.stop import Stop
from harness.targets import read_facts, write_facts
from harness.views.html import html
from harness.views.jsonview import to_json
from harness.views.markdown import markdown
from harness.views.material import gather
from harness.views.terminal import Progress

# image, its log, what to do with each line of the builder → what was built; raises BuildError
Build = Callable[[Image, Path, Callable[[str], None]], BuiltImage]


@dataclass(frozen=True, kw_only=True)
class Tools:
    """What a run touches the world with."""

    backend: Backend
    build: Build
    options: BuildOptions
    progress: Progress
    engine: str
    patience: float = 1.0  # stretches the deadlines of probes; those of cells are in their plan
    stop: Stop = field(default_factory=Stop)
    # Called with the run's folder whenever there are new records in it, from several threads.
    kept: Callable[[Path], None] = lambda _folder: None
    # Remove what killed harnesses left, and if so asked, what we did: a line for each.
    reap: Callable[[bool], Iterable[str]] = lambda _ours: ()


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a run came to. `failed_builds` and `interrupted` decide the exit code beside the Matrix."""

    folder: Path
    matrix: Matrix
    failed_builds: tuple[str, ...] = ()
    interrupted: bool = False

    @property
    def exit_code(self) -> int:
        """In this precedence: interrupted, unexpected, build failed, infrastructure, 0."""
        if self.interrupted:
            return 130
        if self.matrix.unexpected:
            return 1
        if self.failed_builds:
            return BuildError.exit_code
        return 0 if self.matrix.green else InfrastructureError.exit_code


def new_run(now: datetime) -> str:
    """Sorts by time, and never collides."""
    return f"{now:%Y%m%dT%H%M%SZ}-{secrets.token_hex(2)}"


def execute(project: Project, plan: Sequence[Planned], tools: Tools, resumed: Path | None = None) -> Outcome:
    """Carry a plan out. Every planned cell has a record afterwards, or is NOTRUN; the Matrix is written.

    `resumed` is the folder of a run to go on with, and `plan` what is left of it.
    """
    folder = resumed or project.results / "runs" / new_run(datetime.now(UTC))
    context = _context(project, folder.name, tools.engine)
    interrupted = False
    failed: dict[Pair, BuildError] = {}
    own = [planned for planned in plan if planned.action != "elsewhere"]
    cells = [planned.cell for planned in own if planned.action == "run"]
    with opened(cells, context.host, os.environ) as share, held(folder):
        if resumed is None:
            write_plan(folder, folder.name, plan, not_runnable(project.spec))
        try:
            _reap(tools)
            models.generate(context.models)
            done = finished(folder) if resumed else _take_over(plan, context, tools.progress)
            with tools.progress.shown():
                images = images_for(project, [p.cell for p in own], tools.options, tools.backend.name)
                lacking = {cell.id: why for cell in cells if (why := share.lacks(cell))}
                built, failed = _build([p for p in plan if p.cell.id not in lacking], images, tools, folder)
                plan, broken = _look(project, plan, images, built, failed, context, tools, share)
                failed |= broken
                done |= _missed(plan, failed, lacking, context, tools)
                done |= _absent(plan, context, tools)
                _run(project, plan, built, done, context, tools, share)
        except KeyboardInterrupt:
            interrupted = True
        finally:
            if not tools.stop.asked:
                tools.stop.ask()  # Ctrl-C from here on must not cost the table
            _reap(tools, ours=True)
            tools.kept(folder)
            matrix = load_matrix(project, folder)
            write_views(folder, matrix, project.suite)
    return Outcome(
        folder=folder,
        matrix=matrix,
        failed_builds=tuple(f"{target}@{device}" for target, device in failed),
        interrupted=interrupted,
    )


def _reap(tools: Tools, ours: bool = False) -> None:
    for line in tools.reap(ours):
        tools.progress.say(line)


@contextlib.contextmanager
def held(folder: Path) -> Iterator[None]:
    """The run in this folder is ours alone, until this process ends in whatever way. Raises ConfigurationError."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / ".lock", timeout=0)
    try:
        lock.acquire()
    except Timeout as error:
        raise ConfigurationError(f"run {folder.name} is still going on", "Wait for its end.") from error
    try:
        yield
    finally:
        lock.release()


def finished(folder: Path) -> dict[str, Record]:
    """The records of a run that need no further attempt, by cell id."""
    return {name: record for name, record in records_of(folder).items() if record.status is not Status.MISS}


def _context(project: Project, run: str, engine: str) -> Context:
    return Context(
        run=run,
        results=project.results,
        suite=project.suite,
        models=models.default_root(),
        revision=project.revision,
        host=host(engine),
        owner=owner(),
    )


def _take_over(plan: Sequence[Planned], context: Context, progress: Progress) -> dict[str, Record]:
    """Copy the records that are reused, with their evidence: a run's folder is complete by itself."""
    taken: dict[str, Record] = {}
    for planned in plan:
        if planned.reuse is None:
            continue
        old = planned.reuse
        source = attempt_folder(context.results, old.run, old.cell, old.attempt)
        target = attempt_folder(context.results, context.run, old.cell, old.attempt)
        copy_evidence(source, target, f"{old.cell} in run {old.run}")
        record = old.model_copy(update={"run": context.run, "reused_from": old.reused_from or old.run})
        write_record(target, record)
        taken[old.cell] = record
        progress.say(f"reuse  {old.cell}: {old.status} of run {record.reused_from}")
    return taken


def _build(
    plan: Sequence[Planned], images: Mapping[Pair, Image], tools: Tools, folder: Path
) -> tuple[dict[Pair, Built], dict[Pair, BuildError]]:
    """Build what the cells to run need. A failed build stops no other target."""
    wanted = {(p.cell.target, p.cell.device) for p in plan if p.action == "run"}
    built: dict[Pair, Built] = {}
    failed: dict[Pair, BuildError] = {}
    for pair, image in images.items():
        if pair not in wanted:
            continue
        try:
            built[pair] = _build_one(image, tools, folder)
        except BuildError as error:
            failed[pair] = error
            tools.progress.say(f"build  {image.tag} failed: {error.message}\n{error.log_tail}")
    return built, failed


def _build_one(image: Image, tools: Tools, folder: Path) -> Built:
    log = folder / "images" / f"{image.target}-{image.device}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    tools.progress.say(f"build  {image.tag}, log in {log}")
    with tools.progress.doing(image.tag) as say:
        result = tools.build(image, log, say)
    how = "was there" if result.cached else f"built in {result.seconds:.0f} s"
    tools.progress.say(f"image  {image.tag} {how}, {result.bytes / 1e9:.2f} GB")
    lock = hashlib.sha256(image.lock.read_bytes()).hexdigest()
    reference = ImageRef(tag=result.tag, id=result.id, lock_sha256=lock)
    return Built(image=reference, bytes=result.bytes, seconds=None if result.cached else result.seconds)


def _look(
    project: Project,
    plan: Sequence[Planned],
    images: Mapping[Pair, Image],
    built: Mapping[Pair, Built],
    failed: Mapping[Pair, BuildError],
    context: Context,
    tools: Tools,
    share: Share,
) -> tuple[tuple[Planned, ...], dict[Pair, BuildError]]:
    """Write down what is known of each target; the plan by what was found, and images that are not what they should be.

    Probes run one after the other, before any cell: they would be in each other's way.
    """
    folder = context.results / "runs" / context.run
    if built:
        tools.backend.check(project.results, next(iter(built.values())).image.id)
    examiner = Examiner(
        spec=project.spec,
        context=context,
        backend=tools.backend,
        progress=tools.progress,
        stop=tools.stop,
        folder=folder,
        share=share,
        patience=tools.patience * project.spec.run.timeout_multiplier,
    )
    known: dict[Pair, Known] = {}
    broken: dict[Pair, BuildError] = {}
    for pair, image in images.items():
        error = failed.get(pair)
        look = unbuilt(project.spec, pair, error) if error else examiner.look(pair, image, built.get(pair))
        write_facts(folder, look.facts)
        if look.failed is not None and pair in built:
            broken[pair] = look.failed
            tools.progress.say(f"build  {image.tag}: {look.failed.message}")
        elif look.known is not None:
            known[pair] = look.known
    lacking = unmet(project.spec, [p.cell for p in plan if p.action == "run"], known)
    return tuple(_without(planned, lacking.get(planned.cell.id)) for planned in plan), broken


def _without(planned: Planned, lacking: Unmet | None) -> Planned:
    return planned if lacking is None else replace(planned, action="na", reason=lacking.reason, unmet=lacking)


def _absent(plan: Sequence[Planned], context: Context, tools: Tools) -> dict[str, Record]:
    """Records of the cells that do not exist in their target."""
    records = {}
    for planned in plan:
        if planned.unmet is not None:
            records[planned.cell.id] = absent(planned, planned.unmet, context, tools.backend.name)
            tools.progress.say(f"na     {planned.cell.id}: {planned.reason}")
    return records


def _missed(
    plan: Sequence[Planned],
    failed: Mapping[Pair, BuildError],
    lacking: Mapping[str, str],
    context: Context,
    tools: Tools,
) -> dict[str, Record]:
    """Records of the cells that cannot be tried: their image did not build, or they lack GPUs (why, by cell id)."""
    records = {}
    for planned in plan:
        cell = planned.cell
        error = failed.get((cell.target, cell.device))
        if planned.action != "run" or (error is None and cell.id not in lacking):
            continue
        reason, log = (f"build: {error.message}", error.log_tail) if error else (lacking[cell.id], "")
        records[cell.id] = missed(planned, context, tools.backend.name, reason, log)
        if error is None:
            tools.progress.say(f"miss   {cell.id}: {reason}")
    return records


def _run(
    project: Project,
    plan: Sequence[Planned],
    built: Mapping[Pair, Built],
    done: Mapping[str, Record],
    context: Context,
    tools: Tools,
    share: Share,
) -> None:
    queue = [p for p in plan if p.action == "run" and p.cell.id not in done]
    if not queue:
        return
    tools.progress.total = len(queue)
    attempts = Attempts(
        images={pair: one.image for pair, one in built.items()},
        context=context,
        backend=tools.backend,
        progress=tools.progress,
        share=share,
        stop=tools.stop,
        retries=project.spec.run.infra_retries,
        kept=lambda: tools.kept(context.results / "runs" / context.run),
    )
    run_all(queue, done, attempts, share, tools.stop)


def load_matrix(project: Project, folder: Path, records: Mapping[str, Record] | None = None) -> Matrix:
    """The Matrix of a run's folder, judged by today's expectations; of its records, or of others by cell id."""
    plan = read_plan(folder)
    return build_matrix(
        plan.run,
        [entry.cell for entry in plan.own],
        records_of(folder) if records is None else records,
        project.expectations,
        datetime.now(UTC),
        project.max_age,
        plan.not_runnable,
        read_facts(folder, [(entry.cell.target, entry.cell.device) for entry in plan.own]),
        len(plan.cells) - len(plan.own),
    )


def write_views(folder: Path, matrix: Matrix, suite: Path) -> None:
    """The page comes last: a fault in it must not cost the other two."""
    write_atomic(folder / "matrix.json", to_json(matrix))
    material = gather(matrix, folder, suite)
    write_atomic(folder / "matrix.md", markdown(matrix, material))
    write_atomic(folder / "matrix.html", html(matrix, material, datetime.now(UTC)))
