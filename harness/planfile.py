"""plan.json: written before anything runs, so that every planned cell ends in exactly one state."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from harness.cells import Cell
from harness.errors import ConfigurationError
from harness.events import clean
from harness.plan import Action, Planned
from harness.records import write_atomic
from harness.spec import Name

Clean = Annotated[str, AfterValidator(clean)]  # the file may have been damaged since it was written

_NAME: TypeAdapter[str] = TypeAdapter(Name)


def _named(cell: Cell) -> Cell:
    """What stands in matrix.toml has no other names: tables, slugs and links are made of them."""
    for name in (cell.target, cell.device, cell.scenario, *cell.params, *cell.params.values()):
        _NAME.validate_python(name)
    return cell


class PlannedEntry(BaseModel):
    """One cell in plan.json. `facts` are what its digest is made of."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    cell: Annotated[Cell, AfterValidator(_named)]
    digest: str
    facts: dict[str, str] = {}
    action: Action
    reason: Clean
    selected: bool


class PlanFile(BaseModel):
    """The whole of plan.json."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_version: Annotated[Literal[1], Field(alias="schema")] = 1
    run: Clean
    created: datetime
    not_runnable: tuple[Clean, ...] = ()
    cells: tuple[PlannedEntry, ...]

    @property
    def own(self) -> tuple[PlannedEntry, ...]:
        """The cells that this run is to have records of."""
        return tuple(entry for entry in self.cells if entry.action != "elsewhere")


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
    write_document(folder, document)


def write_document(folder: Path, document: PlanFile) -> None:
    write_atomic(folder / "plan.json", document.model_dump_json(by_alias=True, indent=1) + "\n")


def read_plan(folder: Path) -> PlanFile:
    """Raises ConfigurationError where the folder holds no run."""
    try:
        return TypeAdapter(PlanFile).validate_json((folder / "plan.json").read_bytes())
    except (OSError, ValidationError) as error:
        raise ConfigurationError(
            f"{folder} holds no run that can be read", "plan.json is missing or broken."
        ) from error
