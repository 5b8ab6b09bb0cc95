"""plan.json: written before anything runs, so that every planned cell ends in exactly one state."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from harness.cells import Cell
from harness.errors import ConfigurationError
from harness.plan import Planned
from harness.records import write_atomic


class PlannedEntry(BaseModel):
    """One cell in plan.json. `facts` are what its digest is made of."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    cell: Cell
    digest: str
    facts: dict[str, str] = {}
    action: Literal["run", "reuse", "na"]
    reason: str
    selected: bool


class PlanFile(BaseModel):
    """The whole of plan.json."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_version: Annotated[Literal[1], Field(alias="schema")] = 1
    run: str
    created: datetime
    not_runnable: tuple[str, ...] = ()
    cells: tuple[PlannedEntry, ...]


def write_plan(folder: Path, run: str, plan: Sequence[Planned], idle: Sequence[str]) -> None:
    entries = tuple(
        PlannedEntry(
            cell=p.cell,
            digest=p.digest,
            facts=dict(p.facts),
            action=p.action,
            reason=p.reason,
            selected=p.selected,
        )
        for p in plan
    )
    document = PlanFile(run=run, created=datetime.now(UTC), not_runnable=tuple(idle), cells=entries)
    write_atomic(folder / "plan.json", document.model_dump_json(by_alias=True, indent=1) + "\n")


def read_plan(folder: Path) -> PlanFile:
    """Raises ConfigurationError where the folder holds no run."""
    try:
        return TypeAdapter(PlanFile).validate_json((folder / "plan.json").read_bytes())
    except (OSError, ValidationError) as error:
        raise ConfigurationError(
            f"{folder} holds no run that can be read", "plan.json is missing or broken."
        ) from error
