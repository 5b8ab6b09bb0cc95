"""Records: what an attempt left behind. Immutable, self-contained, schema-versioned."""

from __future__ import annotations

import gc
import json
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field

from harness.cells import slug
from harness.errors import NothingSelectedError
from harness.events import MAX_FILE, ErrorInfo, Finite, Text, clean, read_untrusted
from harness.status import Status, worst_status

SCHEMA = 1

Count = Annotated[int, Field(ge=0, lt=1 << 63)]
PropertyValue = bool | int | float | str | None


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True, allow_inf_nan=False)


class CheckRecord(_Model):
    """One check of a cell. The check `<cell>` stands for what happened to the cell outside its checks."""

    id: str
    status: Status
    reason: str | None = None
    seconds: float | None = None
    error: ErrorInfo | None = None


Killed = Literal["", "total", "silence", "start", "import", "init", "disk", "interrupted"]


class MemoryState(_Model):
    """The memory counters of the cell's cgroup, as its first process left them in cgroup.json; version 0: none seen."""

    model_config = ConfigDict(extra="ignore", frozen=True, populate_by_name=True)

    version: Literal[0, 1, 2]
    oom_kill: Count = 0
    oom: Count = 0
    peak_bytes: Count | None = None
    limit_bytes: Count | None = None


class LastMark(_Model):
    """A mark of a rank; `at_seconds`: when it was heard, from the start of the cell on."""

    name: str
    n: int
    state: Literal["enter", "leave"] | None = None
    at_seconds: Finite

    def __str__(self) -> str:
        return f"{self.name} {self.n} {self.state or ''}".strip()


class ExitState(_Model):
    """How the container ended. `error` is the engine of containers' own word, `killed` the harness's own reason.

    `signal` is what the exit code says of one. `last_marks`, and `last_barriers` among them, are each rank's; where we
    ended the cell, those before that. `seconds` from its start to its end, or to ours; `quiet_seconds` of these without
    an event; `heard`: how many of rank 0's events came before ours, and are to be believed. `deadlines` were in force.
    """

    started: bool
    exit_code: int | None = None
    signal: str = ""
    oom_killed: bool = False
    oom: MemoryState | None = None
    error: str = ""
    killed: Killed = ""
    last_mark: str | None = None
    last_marks: dict[int, LastMark | None] = {}
    last_barriers: dict[int, LastMark] = {}
    seconds: Finite | None = None
    quiet_seconds: Finite | None = None
    heard: Count | None = None
    deadlines: dict[str, Finite] = {}


class ImageRef(_Model):
    """Its texts are safe for a terminal wherever one is read from: files may have been damaged since."""

    tag: Text
    id: Text
    lock_sha256: Text = ""


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
    cpus: Count
    memory: Count
    engine: str = ""


class Record(_Model):
    """Facts of one attempt, and the status judged from them. Times are UTC."""

    schema_version: Annotated[Literal[1], Field(alias="schema")] = 1
    run: str
    cell: str
    attempt: Count
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
    started: AwareDatetime
    ended: AwareDatetime
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
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:  # a failed write names no file
        temporary.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from error


def write_record(folder: Path, record: Record) -> None:
    write_atomic(folder / "record.json", record.model_dump_json(by_alias=True, indent=1) + "\n")


def read_record(path: Path) -> Record | None:
    """None where the file is missing, broken, of a schema this version does not know, or not what its checks say."""
    data = read_untrusted(path, MAX_FILE)  # a pipe in its place must not hang whoever looks for records
    try:
        record = _parsed(data) if data is not None else None
    except (ValueError, RecursionError):
        return None
    if record is None or not record.checks:
        return None
    return record if record.status is worst_status(check.status for check in record.checks) else None


def _parsed(data: bytes) -> Record:
    """Raises ValueError. Texts are gone through only where there is something to clean: half of the time, otherwise."""
    if _is_clean(data):
        return Record.model_validate_json(data)
    return Record.model_validate(_cleaned(json.loads(data)))


_PLAIN = bytes(range(0x20, 0x7F)) + b"\n\t"
_ESCAPED = re.compile(rb"\\[bfru]")  # the escapes of JSON that may stand for what `clean` takes out


def _is_clean(data: bytes) -> bool:
    """Whether no text of this JSON can hold anything that `clean` takes out."""
    if _ESCAPED.search(data):
        return False
    if data.isascii():
        return not data.translate(None, _PLAIN)
    text = data.decode(errors="surrogateescape")
    return clean(text) == text


def _cleaned(value: Any) -> Any:
    """JSON whose texts are safe for a terminal: the file may have been damaged since it was written."""
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, list):
        return [_cleaned(item) for item in value]
    return {clean(key): _cleaned(item) for key, item in value.items()} if isinstance(value, dict) else value


def records_of(run: Path) -> dict[str, Record]:
    """The last attempt's record of every cell of a run, by cell id."""
    with uncollected():
        found = [_last_record(run, name) for name in sorted(_names(run / "cells"))]
        return {record.cell: record for record in found if record is not None}


@contextmanager
def uncollected() -> Iterator[None]:
    """Without the search for garbage in cycles: among many records that stay, and have none, it takes up to as long as
    the reading."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def record_of(run: Path, cell_id: str) -> Record | None:
    """The last attempt's record of one cell of a run; reads nothing of its other cells."""
    return _last_record(run, slug(cell_id))


def _last_record(run: Path, name: str) -> Record | None:
    """Of the attempts that have one, in a cell's folder of this name."""
    cell = run / "cells" / name
    for number in sorted(_attempts(cell), reverse=True):
        record = read_record(cell / f"attempt-{number}/record.json")
        if record is not None and (slug(record.cell), record.attempt) == (name, number):
            return record
    return None


def _attempts(cell: Path) -> list[int]:
    return [int(match[1]) for match in map(_ATTEMPT.fullmatch, _names(cell)) if match]


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)  # noqa: PTH208 - names only, without a stat each
    except OSError:
        return []


_ATTEMPT = re.compile(r"attempt-(0|[1-9]\d{0,8})")


def is_at_home(record: Record, path: Path) -> bool:
    """Whether it lies in the folder of its own cell and attempt."""
    folder = path.parent
    return (folder.parent.name, folder.name) == (slug(record.cell), f"attempt-{record.attempt}")


def attempt_folder(results: Path, run: str, cell_id: str, attempt: int) -> Path:
    return results / "runs" / run / "cells" / slug(cell_id) / f"attempt-{attempt}"


def next_attempt(results: Path, run: str, cell_id: str) -> int:
    """The number after the highest that has a folder: an attempt that was cut short keeps its own."""
    return max(_attempts(attempt_folder(results, run, cell_id, 1).parent), default=0) + 1


def runs_of(results: Path) -> tuple[Path, ...]:
    """Run folders, the newest first: their names begin with the UTC time."""
    folder = results / "runs"
    if not folder.is_dir():
        return ()
    return tuple(sorted((path for path in folder.iterdir() if (path / "plan.json").is_file()), reverse=True))


def find_run(results: Path, name: str | None) -> Path:
    """The folder of a run by its name or folder; the newest where there is neither. Raises NothingSelectedError."""
    if name is None:
        runs = runs_of(results)
        if not runs:
            raise NothingSelectedError(f"there is no run in {results}", "Start one: vllm-matrix run")
        return runs[0]
    for folder in (results / "runs" / name, Path(name)):
        if (folder / "plan.json").is_file():
            return folder
    raise NothingSelectedError(f"no such run: {name}", f"Runs are folders of {results / 'runs'}.")


def records_of_cell(runs: Iterable[Path], cell_id: str) -> Iterator[tuple[str, Record]]:
    """The record of one cell in each run that has one, with the run's name; each is read when it is asked for."""
    name = slug(cell_id)
    for run in runs:
        record = _last_record(run, name)
        if record is not None:
            yield run.name, record


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
