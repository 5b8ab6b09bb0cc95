"""What one attempt is given: its cell, its image, its place; what all attempts of a run share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.backends.base import Launch
from harness.cells import Cell, slug
from harness.plan import Planned
from harness.records import Host, ImageRef, Record, Revision
from harness.share import NO_GPUS, OnGpus


@dataclass(frozen=True, kw_only=True)
class Context:
    """What all attempts of a run share."""

    run: str
    results: Path
    suite: Path
    models: Path
    revision: Revision
    host: Host
    owner: str  # label: who may remove the containers


@dataclass(frozen=True, kw_only=True)
class Job:
    """One attempt to make. `reference` is the file to hand in as /in/reference.json."""

    planned: Planned
    number: int
    image: ImageRef
    reference: Path | None
    gpus: OnGpus = NO_GPUS
    leased: Callable[[], bool] = lambda: True  # whether its lease still is where other harnesses look for it

    @property
    def cell(self) -> Cell:
        return self.planned.cell


def cell_json(cell: Cell, has_reference: bool) -> dict[str, Any]:
    """`/in/cell.json`, see docs/formats.md."""
    return {
        "schema": 1,
        "cell": cell.id,
        "target": cell.target,
        "vllm": cell.vllm,
        "device": cell.device,
        "scenario": cell.scenario,
        "file": cell.file,
        "params": dict(cell.params),
        "options": dict(cell.options),
        "seed": cell.seed,
        "ranks": cell.ranks,
        "deadlines": cell.deadlines.by_name(),
        "reference": has_reference,
    }


def launch(
    cell: Cell,
    image: str,
    folder: Path,
    suite: Path,
    models: Path,
    name: str,
    labels: Mapping[str, str],
    gpus: tuple[str, ...] = (),
) -> Launch:
    """What a back end needs to start the cell. `folder` holds `in/` and `out/`."""
    return Launch(
        name=name,
        image=image,
        folder=folder,
        suite=suite,
        models=models,
        environment=dict(cell.environment),
        labels=labels,
        resources=cell.resources,
        gpus=gpus,
    )


def findings(job: Job, record: Record) -> Record:
    """The record with what its GPUs were, what memory of theirs did not come back (it waits for that), and whether it
    had to itself what it leased."""
    found = job.gpus.findings() if job.gpus.uuids else {}
    if not job.leased():
        found["lease.lost"] = "lock files were removed while it ran: others may have had the same CPUs or GPUs"
    if not found:
        return record
    properties = {**record.properties, **found}
    return record.model_copy(update={"properties": properties, "axes": {**record.axes, **job.gpus.axes}})


def container_name(run: str, cell_id: str, attempt: int) -> str:
    """The same for the same attempt, so that a container whose creation timed out can be found again."""
    return f"vllm-matrix-{run}-{slug(cell_id)}-{attempt}"
