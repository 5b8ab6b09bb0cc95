"""Damage files, by a seed: bytes, lines, values of JSON, and what stands in a file's place."""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Sentinels: what the views must not show in this form.
TAG = "<fuzz onload=x>"
ATTRIBUTE = '" fuzz="x'
BREAKOUT = "</td></script></pre><fuzz>"
MARKUP = "[fuzz][/][link=http://fuzz.invalid]"
LINK = "[fuzz](javascript:fuzz)"
SCHEME = "javascript:fuzz"
ROW = "\n| fuzz | fuzz |\n|---|---|\n# fuzz\n"

TEXTS = (
    "", " ", "\n", "a\tb", "x" * 5_000, "x" * 300_000, "\ud800", "a\udfffb", "\x00", "\x07", "\x1b[31mred\x1b[0m",
    "\x1b]0;title\x07", "\r", "\x85", "\x9b31m", "\u202eevil", "\u2066", "\u200f", "\u061c", "\u2028", "\ufeff",
    "e\u0301" * 40, TAG, ATTRIBUTE, BREAKOUT, MARKUP, LINK, SCHEME, ROW, "|", "`", "```", "\\", "*_~", "%s%n{0}{x}",
    "{{ 7*7 }}", "..",
    ".", "/", "../../../../etc/passwd", "/etc/passwd", "a/../../b", "a\x00b", "NaN", "null", "PASS", "<cell>", "1", "0",
    "2026-11-30T00:00:00", "9999-12-31T23:59:59Z", "0001-01-01T00:00:00+14:00", "-1", "٣", "１",
    "vllm-0.8.5@cpu/cold_start",
)  # fmt: skip
NUMBERS: tuple[int | float, ...] = (
    0, 1, -1, 2, 255, 2**31, -(2**31), 2**63, -(2**63), 2**64, 10**400, 10**5000, 0.5, -0.0, 1e-320, 1e15, 1e308,
    -1e308, float("nan"), float("inf"), float("-inf"),
)  # fmt: skip
OTHERS: tuple[Any, ...] = (None, True, False, [], {}, [[]], [None], {"": None}, [1] * 5_000, {"schema": 2})
DEPTHS = (30, 2_000, 30_000)
LONG = 70_000  # bytes: longer than a line may be


class Mutator:
    """The same seed damages the same bytes in the same way."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)  # noqa: S311 - to be repeated, not to be secret

    def some(self, most: int = 4) -> range:
        """One, rarely more."""
        return range(min(most, 1 + int(self.random.expovariate(1.0))))

    # --- bytes ---

    def damaged(self, data: bytes) -> bytes:
        """Some bytes of it flipped, gone, doubled, or others in their place."""
        for _ in self.some():
            data = self.random.choice(self._BYTES)(self, data)
        return data

    def _flip(self, data: bytes) -> bytes:
        if not data:
            return b"\x00"
        at = self.random.randrange(len(data))
        return data[:at] + bytes([data[at] ^ (1 << self.random.randrange(8))]) + data[at + 1 :]

    def _cut(self, data: bytes) -> bytes:
        return data[: self.random.randrange(len(data) + 1)]

    def _behead(self, data: bytes) -> bytes:
        return data[self.random.randrange(len(data) + 1) :]

    def _hole(self, data: bytes) -> bytes:
        begin, end = self._span(data)
        return data[:begin] + data[end:]

    def _double(self, data: bytes) -> bytes:
        begin, end = self._span(data)
        return data[:end] + data[begin:end] + data[end:]

    def _overwrite(self, data: bytes) -> bytes:
        begin, end = self._span(data)
        filler = self.random.choice(
            (b"\x00", b"\xff", b" ", b"\n", b"[", b"{", b'"', b"\xed\xa0\x80", b"\\u0000", b"9")
        )
        return data[:begin] + (filler * (end - begin))[: end - begin] + data[end:]

    def _span(self, data: bytes) -> tuple[int, int]:
        begin = self.random.randrange(len(data) + 1)
        return begin, min(len(data), begin + self.random.choice((1, 2, 8, 64, 512)))

    _BYTES = (_flip, _flip, _flip, _cut, _behead, _hole, _double, _overwrite)

    # --- JSON ---

    def value(self) -> Any:
        """Something of the wrong kind, size or alphabet."""
        kind = self.random.randrange(10)
        if kind == 0:
            return copy.deepcopy(self.random.choice(OTHERS))
        if kind == 1:
            return self._deep()
        return self.random.choice(NUMBERS) if kind < 5 else self.random.choice(TEXTS)

    def _deep(self) -> Any:
        value: Any = None
        for _ in range(self.random.choice((5, 50, 300))):
            value = [value] if self.random.random() < 0.5 else {"a": value}
        return value

    def document(self, data: bytes) -> bytes:
        """One JSON value with some of its parts changed, swapped, gone, doubled or renamed."""
        try:
            value = json.loads(data)
        except (ValueError, RecursionError):
            return self.damaged(data)
        for _ in self.some():
            value = self._changed(value)
        try:
            text = json.dumps(value, ensure_ascii=self.random.random() < 0.5)
        except (ValueError, RecursionError):  # a number of more digits than Python writes
            return self.damaged(data)
        if self.random.random() < 0.05:
            text = text.replace(":", f": {'[' * self.random.choice(DEPTHS)} ", 1)
        if self.random.random() < 0.05:  # the same name twice: readers differ in which one they believe
            text = text.replace("{", '{"schema": 2, ', 1)
        return text.encode("utf-8", "surrogatepass")

    def _changed(self, value: Any) -> Any:
        path = self.random.choice(list(_paths(value)) or [()])
        if not path:
            return self.value()
        holder = value
        for step in path[:-1]:
            holder = holder[step]
        self.random.choice(self._PARTS)(self, holder, path[-1])
        return value

    def _put(self, holder: Any, key: Any) -> None:
        holder[key] = self.value()

    def _swap(self, holder: Any, key: Any) -> None:
        other = self.random.choice(list(holder) if isinstance(holder, dict) else list(range(len(holder))))
        holder[key], holder[other] = holder[other], holder[key]

    def _drop(self, holder: Any, key: Any) -> None:
        del holder[key]

    def _rename(self, holder: Any, key: Any) -> None:
        if isinstance(holder, dict):
            text = self.random.choice(TEXTS)
            holder[text if len(text) < LONG else "x"] = holder.pop(key)

    def _near(self, holder: Any, key: Any) -> None:
        """A value of the same type, next to the one that was there."""
        value = holder[key]
        if isinstance(value, bool) or value is None:
            holder[key] = not value
        elif isinstance(value, (int, float)):
            step = self.random.choice((-1, 1, 0.5, -value, 1e300))
            holder[key] = value + (step if abs(value) < 1e300 else -value)  # an integer may be too large for a sum
        elif isinstance(value, str):
            holder[key] = value + self.random.choice(TEXTS)
        else:
            holder[key] = copy.deepcopy(self.random.choice(OTHERS))

    _PARTS = (_put, _put, _swap, _drop, _rename, _near)

    # --- lines of JSON ---

    def lines(self, data: bytes) -> bytes:
        """An events file with lines gone, doubled, moved, changed, glued together or too long."""
        for _ in self.some():
            lines = data.splitlines(keepends=True)
            change = self.random.choice(self._LINES)
            data = change(self, lines) if lines else self.damaged(data)
        return data

    def _line_gone(self, lines: list[bytes]) -> bytes:
        del lines[self._at(lines)]
        return b"".join(lines)

    def _line_doubled(self, lines: list[bytes]) -> bytes:
        lines.insert(self.random.randrange(len(lines) + 1), lines[self._at(lines)])
        return b"".join(lines)

    def _line_moved(self, lines: list[bytes]) -> bytes:
        line = lines.pop(self._at(lines))
        lines.insert(self.random.randrange(len(lines) + 1), line)
        return b"".join(lines)

    def _lines_shuffled(self, lines: list[bytes]) -> bytes:
        self.random.shuffle(lines)
        return b"".join(lines)

    def _line_changed(self, lines: list[bytes]) -> bytes:
        at = self._at(lines)
        lines[at] = self.document(lines[at]) + b"\n"
        return b"".join(lines)

    def _line_damaged(self, lines: list[bytes]) -> bytes:
        at = self._at(lines)
        lines[at] = self.damaged(lines[at])
        return b"".join(lines)

    def _line_long(self, lines: list[bytes]) -> bytes:
        at = self._at(lines)
        lines[at] = lines[at].rstrip(b"\n") + b" " * LONG + b"\n"
        return b"".join(lines)

    def _line_glued(self, lines: list[bytes]) -> bytes:
        at = self._at(lines)
        lines[at] = lines[at].rstrip(b"\n")
        return b"".join(lines)

    def _line_of_another_rank(self, lines: list[bytes]) -> bytes:
        at = self._at(lines)
        lines[at] = lines[at].replace(b'"rank":0', b'"rank":%d' % self.random.choice((1, 2, -1, 99999)))
        return b"".join(lines)

    def _tail_gone(self, lines: list[bytes]) -> bytes:
        return b"".join(lines[: self.random.randrange(len(lines) + 1)])

    def _bytes(self, lines: list[bytes]) -> bytes:
        return self.damaged(b"".join(lines))

    def _at(self, lines: list[bytes]) -> int:
        return self.random.randrange(len(lines))

    _LINES = (
        _line_gone, _line_gone, _line_doubled, _line_moved, _lines_shuffled, _line_changed, _line_changed,
        _line_changed, _line_damaged, _line_damaged, _line_long, _line_glued, _line_of_another_rank, _tail_gone, _bytes,
    )  # fmt: skip

    # --- what stands in a file's place ---

    def replace(self, path: Path) -> str:
        """Something else in the place of a file; what it is, in a word."""
        name = self.random.choice(list(PLACES))
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        path.unlink(missing_ok=True)
        PLACES[name](path)
        return name


def _paths(value: Any, path: tuple[Any, ...] = (), depth: int = 0) -> list[tuple[Any, ...]]:
    if depth > 12:
        return [path]
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    found = [path] if path else []
    for key, part in list(items)[:300]:
        found += _paths(part, (*path, key), depth + 1)
    return found


def _link_to_itself(path: Path) -> None:
    path.symlink_to(path.name)


def _socket(path: Path) -> None:
    """By a relative name: those of sockets are short."""
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(f"/proc/self/fd/{folder}/{path.name}")
    finally:
        os.close(folder)


PLACES: dict[str, Callable[[Path], object]] = {
    "nothing": lambda path: None,
    "nothing in it": lambda path: path.write_bytes(b""),
    "a folder": lambda path: path.mkdir(),
    "a pipe": os.mkfifo,
    "a socket": _socket,
    "a link to a file": lambda path: path.symlink_to("/etc/passwd"),
    "a link to a device": lambda path: path.symlink_to("/dev/zero"),
    "a link to nothing": lambda path: path.symlink_to("nowhere"),
    "a link to itself": _link_to_itself,
    "zeros": lambda path: path.write_bytes(b"\0" * 200_000),
    "lines of nothing": lambda path: path.write_bytes(b"\n" * 100_000),
}
