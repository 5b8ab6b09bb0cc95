"""The event writer: facts out of a cell, one JSON object a line (docs/formats.md, section 2)."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Iterator, Sequence, Union

SCHEMA = 1
LINE_BYTES = 64 * 1024
TEXT_CHARS = 4_000

Scalar = Union[str, int, float, bool]


class EventError(ValueError):
    """An event that the contract does not allow, or that could not be written whole."""


class _Current:
    """Marks the default of ``check``: the check that runs now, or null outside of any."""


CURRENT = _Current()


class Events:
    """Appends events of one process to ``events.jsonl`` (``events.rankN.jsonl`` for rank N > 0).

    Nothing is buffered: a line is one ``write(2)`` on an O_APPEND descriptor, so lines of several processes never
    mix and what was said before a SIGKILL stays said. ``check`` is the id of the check that runs now.
    """

    def __init__(self, out: Path, rank: int = 0) -> None:
        self.out = Path(out)
        self.rank = rank
        self.check: str | None = None
        self._fd = os.open(self.out / file_name(rank), os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._pid = 0
        self._seq = 0
        self._marks: dict[str, int] = {}

    def emit(self, kind: str, **fields: Any) -> None:
        """Write one event; raises EventError when it is not JSON, holds a NaN, or cannot be made to fit."""
        if os.getpid() != self._pid:  # a forked child counts for itself
            self._pid, self._seq = os.getpid(), 0
        line = _encode({**self._common(), "type": kind, **fields})
        written = os.write(self._fd, line)
        if written != len(line):
            raise EventError(f"event {kind!r} cut after {written} of {len(line)} bytes: is the disk full?")
        self._seq += 1

    def metric(self, name: str, value: float, unit: str, check: str | _Current | None = CURRENT) -> None:
        """A finite number with its unit."""
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise EventError(f"metric {name!r}: a number is needed, not {value!r}")
        self.emit("metric", name=name, value=value, unit=unit, check=self._check(check))

    def property(self, name: str, value: Scalar | Sequence[Scalar], check: str | _Current | None = CURRENT) -> None:
        """A fact that is neither good nor bad: a JSON scalar or a list of scalars, never null."""
        many = isinstance(value, (list, tuple))
        values: list[Any] = list(value) if isinstance(value, (list, tuple)) else [value]
        if not all(isinstance(item, (str, int, float, bool)) for item in values):
            raise EventError(f"property {name!r}: a JSON scalar or a list of them is needed, not {value!r}")
        values = [cut_middle(item, TEXT_CHARS) if isinstance(item, str) else item for item in values]
        self.emit("property", name=name, value=values if many else values[0], check=self._check(check))

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """``begin`` and ``end`` (with seconds) around a block, also when the block raises."""
        begun = time.monotonic()
        self.emit("phase", name=name, state="begin")
        try:
            yield
        finally:
            self.emit("phase", name=name, state="end", seconds=round(time.monotonic() - begun, 3))

    @contextlib.contextmanager
    def marked(self, name: str) -> Iterator[int]:
        """``enter`` and ``leave`` around a block; yields how often this name was entered before."""
        n = self._marks.get(name, 0)
        self._marks[name] = n + 1
        self.emit("mark", name=name, n=n, state="enter")
        try:
            yield n
        finally:
            self.emit("mark", name=name, n=n, state="leave")

    def artifact(self, name: str, data: bytes) -> Path:
        """Write ``data`` as ``artifacts/<name>``, whole or not at all, and say so with its sha256."""
        root = (self.out / "artifacts").resolve()
        path = (root / name).resolve()
        if root not in path.parents:
            raise EventError(f"artifact {name!r} would leave {root}")
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(path.name + ".part")
        part.write_bytes(data)
        part.replace(path)
        digest = hashlib.sha256(data).hexdigest()
        self.emit("artifact", path=path.relative_to(root).as_posix(), sha256=digest, bytes=len(data))
        return path

    def _check(self, check: str | _Current | None) -> str | None:
        return self.check if isinstance(check, _Current) else check

    def _common(self) -> dict[str, Any]:
        utc = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        return {
            "schema": SCHEMA,
            "seq": self._seq,
            "pid": self._pid,
            "rank": self.rank,
            "mono_ns": time.monotonic_ns(),
            "utc": utc,
        }


def file_name(rank: int) -> str:
    """Where a rank's events lie, in ``/out``."""
    return "events.jsonl" if rank == 0 else f"events.rank{rank}.jsonl"


def _encode(event: dict[str, Any]) -> bytes:
    """One line of at most LINE_BYTES; long texts of ``error`` give way first, they are the only unbounded ones."""
    line = _line(event)
    while len(line) > LINE_BYTES and _shrink(event.get("error")):
        line = _line(event)
    if len(line) > LINE_BYTES:
        raise EventError(f"event {event['type']!r} has {len(line)} bytes, at most {LINE_BYTES} are allowed")
    return line


def _shrink(error: dict[str, Any] | None) -> bool:
    """Halve the longest text of an ``error``; False when there is nothing left to gain."""
    if not error:
        return False
    field = max(("traceback", "message"), key=lambda name: len(error.get(name) or ""))
    text = error.get(field) or ""
    error[field] = cut_middle(text, len(text) // 2)
    return len(text) >= 64


def _line(event: dict[str, Any]) -> bytes:
    try:
        text = json.dumps(event, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError) as err:
        raise EventError(f"event {event.get('type')!r}: {err}") from err
    return text.encode("utf-8", "replace") + b"\n"  # a lone surrogate is no UTF-8


def cut_middle(text: str, cap: int) -> str:
    """At most ``cap`` characters; what is cut is the middle, since both ends of a traceback matter."""
    if len(text) <= cap:
        return text
    gap = "\n[…]\n"
    tail = max(0, (cap - len(gap)) * 2 // 3)
    return text[: max(0, cap - len(gap) - tail)] + gap + text[len(text) - tail :]


_writer: Events | None = None


def writer() -> Events:
    """This process's writer, made on first use from VLLM_MATRIX_OUT and, in a rank, VLLM_MATRIX_RANK.

    Not torchrun's RANK: it must be gone before an engine starts, and a scheduler may have set it around all of us.
    """
    global _writer
    if _writer is None:
        _writer = Events(Path(os.environ["VLLM_MATRIX_OUT"]), int(os.environ.get("VLLM_MATRIX_RANK", "0")))
    return _writer
