"""Events as a container left them: read without trust, validated line by line."""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

MAX_LINE = 64 << 10  # bytes
MAX_FILE = 64 << 20  # bytes

_SEQUENCE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")  # colours and cursor movements of terminals
# controls but for newline and tab, what turns the direction of the text around it, and halves of characters
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def clean(text: str) -> str:
    """Text from a container without control characters (newline and tab stay): safe for a terminal."""
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", _SEQUENCE.sub("", text))


Text = Annotated[str, AfterValidator(clean), Field(max_length=4_096)]
LongText = Annotated[str, AfterValidator(clean), Field(max_length=20_000)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Scalar = bool | int | Finite | Text | None


class _Model(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class Frame(_Model):
    where: Literal["suite", "rig", "site", "python"]
    file: Text
    line: int
    function: Text


class ErrorInfo(_Model):
    """An exception raised in the container; `frames` run from the outermost to the one that raised."""

    type: Text
    bases: tuple[Text, ...] = ()
    message: LongText
    reason: Text | None = None
    frames: tuple[Frame, ...] = ()
    traceback: LongText = ""


class _Event(_Model):
    schema_version: Annotated[Literal[1], Field(alias="schema")]
    seq: int
    pid: int
    rank: int = 0
    mono_ns: int
    utc: Text


class Hello(_Event):
    type: Literal["hello"]
    python: Text
    platform: Text
    distributions: dict[Text, Text] = {}
    distributions_sha256: Text = ""


class PlanEvent(_Event):
    type: Literal["plan"]
    checks: tuple[Text, ...]


class Start(_Event):
    type: Literal["start"]
    check: Text


class Phase(_Event):
    type: Literal["phase"]
    name: Text
    state: Literal["begin", "end"]
    seconds: Finite | None = None


class Metric(_Event):
    type: Literal["metric"]
    name: Text
    value: Finite
    unit: Text
    check: Text | None = None


class Property(_Event):
    type: Literal["property"]
    name: Text
    value: Scalar | tuple[Scalar, ...]
    check: Text | None = None


class Mark(_Event):
    type: Literal["mark"]
    name: Text
    n: int
    state: Literal["enter", "leave"] | None = None


class Artifact(_Event):
    type: Literal["artifact"]
    path: Text
    sha256: Text
    bytes: int


class End(_Event):
    type: Literal["end"]
    check: Text
    outcome: Literal["passed", "raised", "na", "skipped"]
    seconds: Finite
    reason: Text | None = None
    error: ErrorInfo | None = None


class Down(_Event):
    type: Literal["down"]
    returncode: int | None = None
    check: Text | None = None


class CollectError(_Event):
    type: Literal["collect_error"]
    error: ErrorInfo


Event = Hello | PlanEvent | Start | Phase | Metric | Property | Mark | Artifact | End | Down | CollectError
_ADAPTER: TypeAdapter[Event] = TypeAdapter(Annotated[Event, Field(discriminator="type")])


class Done(_Model):
    """Numbers that are numbers: what reads like one was not written by the rig."""

    schema_version: Annotated[Literal[1], Field(alias="schema")]
    exit: Annotated[int, Field(strict=True)]
    checks: Annotated[int, Field(strict=True)]


def parse_line(line: bytes) -> Event:
    """Raises ValueError that says what is wrong with the line."""
    if len(line) > MAX_LINE:
        raise ValueError(f"longer than {MAX_LINE} bytes")
    try:
        return _ADAPTER.validate_python(json.loads(line))
    except ValidationError as error:
        fault = error.errors()[0]
        where = ".".join(str(part) for part in fault["loc"])
        raise ValueError(f"{where}: {fault['msg']}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from error


def parse(data: bytes) -> tuple[tuple[Event, ...], tuple[str, ...]]:
    """Events and faults of one events file.

    A last line without its newline was cut by the process's death: it is dropped, and is no fault.
    """
    events: list[Event] = []
    faults: list[str] = []
    lines = data.split(b"\n")
    for number, line in enumerate(lines[:-1], start=1):
        try:
            events.append(parse_line(line))
        except ValueError as error:
            faults.append(clean(f"line {number}: {error}")[:300])
    return tuple(events), tuple(faults)


def read_untrusted(path: Path, limit: int, start: int = 0) -> bytes | None:
    """`limit` bytes from `start` of a regular file; None where there is none (a link or a device counts as none)."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        seen = os.fstat(descriptor)
        # never more than is there: a buffer of the limit's size costs more than most files
        return (
            os.pread(descriptor, min(limit, max(0, seen.st_size - start)), start)
            if stat.S_ISREG(seen.st_mode)
            else None
        )
    finally:
        os.close(descriptor)


def read_below(root: Path, name: str, limit: int) -> bytes | None:
    """Like `read_untrusted`, of a file below `root` that is ours: no folder on the way may be a link either."""
    parts = name.split("/")
    if not all(parts) or {".", ".."} & {*parts}:
        return None
    opened: list[int] = []
    try:
        opened.append(os.open(root, _FOLDER))
        for part in parts[:-1]:
            opened.append(os.open(part, _FOLDER | os.O_NOFOLLOW, dir_fd=opened[-1]))
        return read_untrusted(Path(f"/proc/self/fd/{opened[-1]}", parts[-1]), limit)
    except (OSError, ValueError):
        return None
    finally:
        for descriptor in opened:
            os.close(descriptor)


_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


def file_name(rank: int) -> str:
    return "events.jsonl" if rank == 0 else f"events.rank{rank}.jsonl"


def read_events(out: Path) -> tuple[tuple[Event, ...], tuple[str, ...]]:
    """Everything that all ranks left in `/out`, rank by rank in the order written, and what was wrong with it."""
    events: list[Event] = []
    faults: list[str] = []
    for rank, path in _event_files(out):
        data = read_untrusted(path, MAX_FILE + 1)
        if data is None:
            faults.append(f"{path.name}: not a regular file")
            continue
        if len(data) > MAX_FILE:
            faults.append(f"{path.name}: larger than {MAX_FILE >> 20} MiB; the rest was not read")
            data = data[:MAX_FILE]
        some, wrong = parse(data)
        events.extend(event for event in some if event.rank == rank)
        strangers = {event.rank for event in some} - {rank}
        faults.extend(f"{path.name}: holds events of rank {stranger}" for stranger in sorted(strangers)[:20])
        faults.extend(f"{path.name}, {text}" for text in wrong[:20])
    return tuple(events), tuple(faults)


def _event_files(out: Path) -> Iterator[tuple[int, Path]]:
    found = (re.fullmatch(r"events(?:\.rank([1-9]\d{0,3}))?\.jsonl", name) for name in _listdir(out))
    ranks = sorted(int(match[1] or 0) for match in found if match)
    return ((rank, out / file_name(rank)) for rank in ranks)


def _listdir(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)  # noqa: PTH208 - names only, without a stat each
    except OSError:
        return []


def read_done(out: Path) -> Done | None:
    """`/out/DONE`, or None where it is missing or not what the contract says."""
    data = read_untrusted(out / "DONE", MAX_LINE)
    try:
        return Done.model_validate_json(data) if data is not None else None
    except ValidationError:
        return None


def dump(event: Event) -> dict[str, Any]:
    return event.model_dump(by_alias=True)
