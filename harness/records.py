"""Records: what an attempt left behind. Immutable, self-contained, schema-versioned."""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from harness.cells import slug
from harness.events import MAX_FILE, ErrorInfo, read_untrusted
from harness.status import Status

SCHEMA = 1

PropertyValue = bool | int | float | str | None


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)


class CheckRecord(_Model):
    """One check of a cell. The check `<cell>` stands for what happened to the cell outside its checks."""

    id: str
    status: Status
    reason: str | None = None
    seconds: float | None = None
    error: ErrorInfo | None = None


class ExitState(_Model):
    """How the container ended. `error` is the engine of containers' own word, `killed` the harness's own reason."""

    started: bool
    exit_code: int | None = None
    oom_killed: bool = False
    error: str = ""
    killed: Literal["", "total", "silence"] = ""
    last_mark: str | None = None


class ImageRef(_Model):
    tag: str
    id: str
    lock_sha256: str = ""


class MetricRecord(_Model):
    name: str
    value: float
    unit: str
    check: str | None = None


class Revision(_Model):
    """Which harness wrote the record."""

    version: str
    commit: str | None = None
    dirty: bool | None = None


class Host(_Model):
    machine: str
    cpus: int
    memory: int
    engine: str = ""


class Record(_Model):
    """Facts of one attempt, and the status judged from them. Times are UTC."""

    schema_version: Annotated[Literal[1], Field(alias="schema")] = 1
    run: str
    cell: str
    attempt: int
    target: str
    vllm: str
    python: str
    device: str
    scenario: str
    params: dict[str, str]
    axes: dict[str, str]
    digest: str
    facts: dict[str, str]
    backend: str
    started: datetime
    ended: datetime
    status: Status
    reason: str | None = None
    advice: str | None = None
    checks: tuple[CheckRecord, ...] = ()
    metrics: tuple[MetricRecord, ...] = ()
    properties: dict[str, PropertyValue | tuple[PropertyValue, ...]] = {}
    phases: dict[str, float] = {}
    distributions: dict[str, str] = {}
    distributions_sha256: str = ""
    image: ImageRef | None = None
    exit: ExitState | None = None
    evidence_faults: tuple[str, ...] = ()
    artifacts: dict[str, str] = {}  # path below out/artifacts → sha256
    revision: Revision
    host: Host
    reused_from: str | None = None


def write_atomic(path: Path, text: str) -> None:
    """Write by rename: a reader, or a crash, sees the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def write_record(folder: Path, record: Record) -> None:
    write_atomic(folder / "record.json", record.model_dump_json(by_alias=True, indent=1) + "\n")


def read_record(path: Path) -> Record | None:
    """None where the file is missing, broken, or of a schema this version does not know."""
    data = read_untrusted(path, MAX_FILE)  # a pipe in its place must not hang whoever looks for records
    try:
        return Record.model_validate_json(data) if data is not None else None
    except ValidationError:
        return None


def records_of(run: Path) -> dict[str, Record]:
    """The last attempt's record of every cell of a run, by cell id."""
    last: dict[str, Record] = {}
    for path in sorted(run.glob("cells/*/attempt-*/record.json")):
        record = read_record(path)
        if record and (record.cell not in last or last[record.cell].attempt < record.attempt):
            last[record.cell] = record
    return last


def attempt_folder(results: Path, run: str, cell_id: str, attempt: int) -> Path:
    return results / "runs" / run / "cells" / slug(cell_id) / f"attempt-{attempt}"


def next_attempt(results: Path, run: str, cell_id: str) -> int:
    """The number after the highest that has a folder: an attempt that was cut short keeps its own."""
    cell = attempt_folder(results, run, cell_id, 1).parent
    numbers = [int(path.name.removeprefix("attempt-")) for path in cell.glob("attempt-*")]
    return max(numbers, default=0) + 1


def runs_of(results: Path) -> tuple[Path, ...]:
    """Run folders, the newest first: their names begin with the UTC time."""
    folder = results / "runs"
    if not folder.is_dir():
        return ()
    return tuple(sorted((path for path in folder.iterdir() if (path / "plan.json").is_file()), reverse=True))


def history(results: Path, since: datetime) -> dict[str, list[Record]]:
    """Records by cell id, the newest first, from runs begun after `since`."""
    found: dict[str, list[Record]] = {}
    for record in _recent(results, since):
        found.setdefault(record.cell, []).append(record)
    return {cell: sorted(some, key=lambda r: r.started, reverse=True) for cell, some in found.items()}


def _recent(results: Path, since: datetime) -> Iterator[Record]:
    oldest = since.strftime("%Y%m%dT%H%M%SZ")
    for run in runs_of(results):
        if run.name < oldest:
            return
        yield from records_of(run).values()
