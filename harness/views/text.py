"""What the views say alike: words for squares, counts and quantities, and what needs a look."""

from __future__ import annotations

from collections import Counter

from harness.matrix import JudgedCheck, Matrix, Square
from harness.status import Status, Verdict

MARK = {
    Verdict.OK: "✔",
    Verdict.EXPECTED: "✔",
    Verdict.FLAKY: "~",
    Verdict.FIXED: "▲",
    Verdict.REGRESSION: "✘",
    Verdict.UNKNOWN: "?",
}

ABSENT = "–"  # NA is expected where probing found it, and never a pass


def square_text(square: Square) -> str:
    """`✘ FAIL 8/9`, `✔ FAIL 8/9 expected`, `✔ PASS 9/9`, `– NA 0/13 expected`, `? NOTRUN`."""
    passed, total = square.passed
    parts = [ABSENT if square.status == Status.NA else MARK[square.verdict], square.status]
    if total:
        parts.append(f"{passed}/{total}")
    if square.verdict not in (Verdict.OK, Verdict.UNKNOWN):
        parts.append(square.verdict)
    if square.stale:
        parts.append("STALE" + (f" {square.age.days} d" if square.age else ""))
    if square.record and square.record.attempt > 1:
        parts.append(f"{nth(square.record.attempt)} attempt")  # the ones before were a MISS, or cut short
    if square.record and square.record.backend == "local":
        parts.append("local")  # no container: its limits and its isolation were not there
    return " ".join(parts)


def summary(matrix: Matrix) -> str:
    """`4 cells: 2 ok, 2 expected`, `5 cells: 5 ok; 15 more cells elsewhere`"""
    counts = Counter(str(square.verdict) for square in matrix.squares)
    cells = f"{len(matrix.squares)} cell{'s' if len(matrix.squares) != 1 else ''}"
    rest = f"; {many(matrix.elsewhere, 'more cell')} elsewhere" if matrix.elsewhere else ""
    return f"{cells}: " + ", ".join(f"{count} {name}" for name, count in counts.items()) + rest


def cause(judged: JudgedCheck) -> str:
    """One line: what the check says went wrong."""
    check = judged.check
    if check.error is not None:
        first = check.error.message.strip().splitlines()
        return f"{check.error.type}: {first[0] if first else ''}"
    return check.reason or ""


def nth(number: int) -> str:
    """`1st`, `2nd`, `11th`, `22nd`"""
    suffix = {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{'th' if number % 100 in (11, 12, 13) else suffix}"


def many(count: int, noun: str, plural: str = "") -> str:
    return f"{count} {noun if count == 1 else plural or f'{noun}s'}"


def duration(seconds: float) -> str:
    """`0.08 s`, `2.5 s`, `40 s`, `1 min 50 s`, `2 h 05 min`"""
    if seconds < 59.5:
        return f"{seconds:.2f} s" if seconds < 0.995 else f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02} min"


def size(count: float) -> str:
    """Bytes, in units of 1024."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:,.1f} TiB"


def cut(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[:length]}… ({many(len(text) - length, 'character')} more)"
