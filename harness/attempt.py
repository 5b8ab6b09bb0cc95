"""One attempt: prepare its folder, start it, watch its events and its deadlines, collect, judge, record."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from harness import events as ev
from harness import probes
from harness.backends.base import Backend, Launch, Running
from harness.cells import Cell
from harness.errors import InfrastructureError
from harness.job import Context, Job, cell_json, container_name, launch
from harness.judge import Evidence
from harness.plan import Planned, Unmet
from harness.recorder import make_record
from harness.records import ExitState, ImageRef, Record, attempt_folder, next_attempt, write_atomic, write_record
from harness.stop import Stop
from harness.tail import Live, Tail

GRACE = 20.0  # seconds between SIGTERM and SIGKILL: the rig sweeps its process tree in between


class InterruptedAttempt(Exception):  # noqa: N818 - no error of anybody's: the user asked for it
    """The run was stopped while this attempt ran: its cell stays NOTRUN."""


Watch = Callable[[Live], None]


def run_attempt(job: Job, context: Context, backend: Backend, watch: Watch, stop: Stop) -> Record:
    """Run it to its end, whatever that is, and write its record.

    Raises InterruptedAttempt when `stop` is set meanwhile; the container is gone then.
    """
    if stop.asked:
        raise InterruptedAttempt
    folder = attempt_folder(context.results, context.run, job.cell.id, job.number)
    _prepare(folder, job)
    started = datetime.now(UTC)
    infra, state = "", ExitState(started=False)
    try:
        running = backend.start(_launch(folder, job, context))
        state = _watch(running, job.cell, Tail(folder / "out", job.cell.ranks), watch, stop)
    except InfrastructureError as error:
        infra = f"engine-of-containers: {error.message}"
    evidence = _evidence(folder / "out", state, infra)
    record = make_record(job, context, backend.name, started, evidence)
    write_record(folder, record)
    return record


def _prepare(folder: Path, job: Job) -> None:
    for name in ("in", "out"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / "out" / "artifacts").mkdir(exist_ok=True)
    write_atomic(folder / "in" / "cell.json", json.dumps(cell_json(job.cell, job.reference is not None), indent=1))
    if job.reference is not None:
        write_atomic(folder / "in" / "reference.json", job.reference.read_text(encoding="utf-8"))


def _launch(folder: Path, job: Job, context: Context) -> Launch:
    labels = {"run": context.run, "cell": job.cell.id, "owner": context.owner}
    return launch(
        job.cell,
        job.image.id,
        folder,
        context.suite,
        context.models,
        container_name(context.run, job.cell.id, job.number),
        {f"vllm-matrix.{key}": value for key, value in labels.items()},
    )


def _watch(running: Running, cell: Cell, tail: Tail, watch: Watch, stop: Stop) -> ExitState:
    """Wait for the end, or bring it about: a deadline, the user's stop."""
    begin = heard = time.monotonic()
    spoke, killed, interrupted = 0, "", False
    try:
        while not (killed or interrupted or running.ended(0.5)):
            live = tail.read()
            watch(live)
            now = time.monotonic()
            if live.spoke > spoke:
                spoke, heard = live.spoke, now
            killed = _overdue(cell, now - begin, now - heard)
            interrupted = stop.asked
        if killed or interrupted:
            watch(replace(tail.live, doing="stopping; Ctrl-C kills it" if interrupted else "stopping"))
            _terminate(running, stop)
    finally:
        state = running.close()
    if interrupted and not killed:
        raise InterruptedAttempt
    return state.model_copy(update={"killed": killed, "last_mark": tail.read().mark})


def _terminate(running: Running, stop: Stop) -> None:
    running.terminate()
    end = time.monotonic() + GRACE
    while not (stop.at_once or running.ended(0.5) or time.monotonic() > end):
        pass


def _overdue(cell: Cell, elapsed: float, silent: float) -> str:
    if elapsed > cell.deadlines.total:
        return "total"
    return "silence" if silent > cell.deadlines.silence else ""


def _evidence(out: Path, state: ExitState, infra: str) -> Evidence:
    events, faults = ev.read_events(out)
    return Evidence(events=events, faults=faults, done=ev.read_done(out), exit=state, infra=infra)


def absent(planned: Planned, unmet: Unmet, context: Context, backend: str) -> Record:
    """The record of a cell that does not exist in its target; its evidence is the probe's file. Nothing is started."""
    number = next_attempt(context.results, context.run, planned.cell.id)
    job = Job(planned=planned, number=number, image=unmet.known.image, reference=None)
    folder = attempt_folder(context.results, context.run, planned.cell.id, number)
    _prepare(folder, job)
    write_atomic(folder / probes.FILE, probes.to_json(unmet.known.probe))
    record = make_record(job, context, backend, datetime.now(UTC), Evidence(lacking=unmet.reason))
    write_record(folder, record)
    return record


def missed(planned: Planned, context: Context, backend: str, reason: str, log: str) -> Record:
    """The record of a cell that could not be tried at all, as when its image did not build."""
    number = next_attempt(context.results, context.run, planned.cell.id)
    folder = attempt_folder(context.results, context.run, planned.cell.id, number)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "stderr.log").write_text(log, encoding="utf-8")
    job = Job(planned=planned, number=number, image=ImageRef(tag="", id=""), reference=None)
    record = make_record(job, context, backend, datetime.now(UTC), Evidence(infra=reason))
    write_record(folder, record)
    return record
