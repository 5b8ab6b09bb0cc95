"""What one attempt is given: its cell, its image, its place; what all attempts of a run share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.backends.base import Launch
from harness.cells import Cell, slug
from harness.plan import Planned
from harness.records import Host, ImageRef, Revision


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
        "deadlines": {"total": cell.deadlines.total, "silence": cell.deadlines.silence},
        "reference": has_reference,
    }


def launch(
    cell: Cell, image: str, folder: Path, suite: Path, models: Path, name: str, labels: Mapping[str, str]
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
    )


def container_name(run: str, cell_id: str, attempt: int) -> str:
    """The same for the same attempt, so that a container whose creation timed out can be found again."""
    return f"vllm-matrix-{run}-{slug(cell_id)}-{attempt}"
