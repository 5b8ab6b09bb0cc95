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
from harness.backends.size import Guard
from harness.cells import Cell, Deadlines
from harness.ending import marks_by_rank, read_memory, signal_of
from harness.errors import InfrastructureError
from harness.job import Context, Job, cell_json, container_name, findings, launch
from harness.judge import Evidence
from harness.plan import Planned, Unmet
from harness.recorder import make_record
from harness.records import (
    ExitState,
    ImageRef,
    Killed,
    Record,
    attempt_folder,
    next_attempt,
    write_atomic,
    write_record,
)
from harness.stop import Stop
from harness.tail import Live, Tail

GRACE = 30.0  # seconds between SIGTERM and SIGKILL: the rig writes stacks in between, then sweeps its process tree
TICK = 0.5  # seconds between two looks at a running cell


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
        out = folder / "out"
        state = _watch(running, job.cell, Tail(out, job.cell.ranks), Guard(out), watch, stop)
    except InfrastructureError as error:
        infra = f"engine-of-containers: {error.message}"
    evidence = _evidence(folder / "out", state, infra)
    record = findings(job, make_record(job, context, backend.name, started, evidence))
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
        gpus=job.gpus.uuids,
    )


def _watch(running: Running, cell: Cell, tail: Tail, guard: Guard, watch: Watch, stop: Stop) -> ExitState:
    """Wait for the end, or bring it about: a deadline, too much in /out, the user's stop."""
    killed: Killed = ""
    seen: dict[str, object] = {}
    try:
        while not (killed or running.ended(TICK)):
            watch(tail.read())
            killed = overdue(tail.live, cell.deadlines, tail.elapsed)
            killed = killed or ("disk" if guard.exceeded() else "") or ("interrupted" if stop.asked else "")
        if killed:
            seen = {**_seen(tail), "heard": tail.live.heard}  # before it hears of our signal, and speaks again
            words = "stopping; Ctrl-C kills it" if killed == "interrupted" else f"stopping, limit: {killed}"
            watch(replace(tail.live, doing=words))
            _terminate(running, stop)
    finally:
        state = running.close()
    if killed == "interrupted":
        raise InterruptedAttempt
    update = {"killed": killed, "signal": signal_of(state.exit_code), "deadlines": cell.deadlines.by_name()}
    return state.model_copy(update={**update, **(seen or _seen(tail))})


def _seen(tail: Tail) -> dict[str, object]:
    """What is known of a cell at this moment, and where its ranks stand."""
    live, now = tail.drain(), tail.elapsed
    return {
        "last_mark": marks_by_rank(live.marks),
        "last_marks": dict(live.marks),
        "last_barriers": dict(live.barriers),
        "seconds": round(now, 1),
        "quiet_seconds": round(now - live.spoke_at, 1),
    }


def _terminate(running: Running, stop: Stop) -> None:
    running.terminate()
    end = time.monotonic() + GRACE
    while not (stop.at_once or running.ended(TICK) or time.monotonic() > end):
        pass


_PHASES: tuple[Killed, ...] = ("import", "init")  # that have a deadline of their own


def overdue(live: Live, deadlines: Deadlines, elapsed: float) -> Killed:
    """The deadline that has passed, the one that says most first; or empty."""
    if not live.greeted and elapsed > deadlines.start:
        return "start"
    for phase in _PHASES:
        begun = [since for (_, _, name), since in live.phases.items() if name == phase]
        if begun and elapsed - min(begun) > deadlines.phases.get(phase, elapsed):
            return phase
    if elapsed - live.spoke_at > deadlines.silence:
        return "silence"
    return "total" if elapsed > deadlines.total else ""


def _evidence(out: Path, state: ExitState, infra: str) -> Evidence:
    state = state.model_copy(update={"oom": read_memory(out)}) if state.started else state
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
