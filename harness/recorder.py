"""Evidence → record: everything that is known of an attempt, in one immutable file."""

from __future__ import annotations

import hashlib
import sys
from collections import defaultdict
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from harness import events as ev
from harness.cells import Cell
from harness.job import Context, Job
from harness.judge import Evidence, judge
from harness.records import Host, MetricRecord, PropertyValue, Record

MAX_ARTIFACT = 64 << 20  # bytes


def make_record(job: Job, context: Context, backend: str, started: datetime, evidence: Evidence) -> Record:
    """Judge the evidence and write down all of it that a reader may ask for."""
    cell = job.cell
    judgement = judge(evidence)
    hello = next((event for event in evidence.events if isinstance(event, ev.Hello)), None)
    properties = _properties(evidence)
    return Record(
        run=context.run,
        cell=cell.id,
        attempt=job.number,
        target=cell.target,
        vllm=cell.vllm,
        python=cell.python,
        device=cell.device,
        scenario=cell.scenario,
        params=dict(cell.params),
        axes=_axes(cell, context.host, hello, properties),
        digest=job.planned.digest,
        facts=dict(job.planned.facts),
        backend=backend,
        started=started,
        ended=datetime.now(UTC),
        status=judgement.status,
        reason=judgement.reason,
        advice=judgement.advice,
        checks=judgement.checks,
        metrics=tuple(
            MetricRecord(name=_named(event), value=event.value, unit=event.unit, check=event.check)
            for event in evidence.events
            if isinstance(event, ev.Metric)
        ),
        properties=properties,
        phases=_phases(evidence),
        distributions=dict(hello.distributions) if hello else {},
        distributions_sha256=hello.distributions_sha256 if hello else "",
        image=job.image if job.image.id else None,
        exit=evidence.exit,
        evidence_faults=tuple(evidence.faults),
        artifacts={event.path: event.sha256 for event in evidence.events if isinstance(event, ev.Artifact)},
        revision=context.revision,
        host=context.host,
    )


def _named(event: ev.Metric | ev.Property) -> str:
    """What other ranks than 0 said bears their number: `rank1.engine.kv_blocks`."""
    return f"rank{event.rank}.{event.name}" if event.rank else event.name


def _properties(evidence: Evidence) -> dict[str, PropertyValue | tuple[PropertyValue, ...]]:
    """Facts by name; those of one check are named `check.name`."""
    return {
        f"{event.check}.{_named(event)}" if event.check else _named(event): event.value
        for event in evidence.events
        if isinstance(event, ev.Property)
    }


def _phases(evidence: Evidence) -> dict[str, float]:
    """Seconds by phase, added up where a phase came more than once; the slowest of ranks that ran side by side."""
    total: defaultdict[tuple[str, int], float] = defaultdict(float)
    for event in evidence.events:
        if isinstance(event, ev.Phase) and event.seconds is not None:
            total[event.name, event.rank] += event.seconds
    slowest = {name: max(seconds for (other, _), seconds in total.items() if other == name) for name, _ in total}
    return {name: min(seconds, sys.float_info.max) for name, seconds in slowest.items()}  # a sum may be infinite


# axis → the property of the rig that tells it
_MEASURED = {"engine": "engine.core", "layout": "engine.layout", "driver": "driver"}


def _axes(cell: Cell, host: Host, hello: ev.Hello | None, properties: Mapping[str, object]) -> dict[str, str]:
    """The full tuple that two records must share to be compared; what was not seen is left out."""
    measured = {axis: properties.get(name) for axis, name in _MEASURED.items()}
    return {
        "device": f"{cell.device}/{host.machine}",
        "model": cell.params.get("model", ""),
        "dtype": str(cell.options.get("dtype", "")),
        **({"python": hello.python} if hello else {}),
        **{name: str(value) for name, value in measured.items() if value is not None},
    }


def artifact(folder: Path, record: Record, name: str) -> Path | None:
    """An artifact that the record names, if the file still is what its event said it was."""
    expected = record.artifacts.get(name)
    if expected is None or Path(name).name != name:
        return None
    data = ev.read_below(folder / "out", f"artifacts/{name}", MAX_ARTIFACT + 1)
    if data is None or len(data) > MAX_ARTIFACT or hashlib.sha256(data).hexdigest() != expected:
        return None
    return folder / "out" / "artifacts" / name
