"""What a page shows beside the Matrix: the end of each log, stacks, the question of each scenario. Reads files only."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from inspect import cleandoc
from io import BytesIO
from pathlib import Path

from harness import events as ev
from harness.cells import slug
from harness.matrix import Matrix, Square
from harness.status import Status, Verdict
from harness.views.stacks import Stack, read_stacks

LOG = (8 << 10, 60)  # bytes, lines
QUIET_LOG = (2 << 10, 15)  # of a cell that is simply ok


@dataclass(frozen=True, kw_only=True)
class Excerpt:
    """The end of a log; `left_out` bytes before it are in the file only."""

    name: str
    text: str
    left_out: int = 0


@dataclass(frozen=True, kw_only=True)
class Material:
    """What is shown beside the Matrix: paragraphs by scenario file, excerpts and stacks by cell id."""

    questions: Mapping[str, Sequence[str]]
    excerpts: Mapping[str, Sequence[Excerpt]]
    stacks: Mapping[str, Sequence[Stack]] = field(default_factory=dict)


def gather(matrix: Matrix, folder: Path, suite: Path) -> Material:
    """Read what `html` and `markdown` need from the run's folder and the suite. What cannot be read is left out."""
    files = {square.cell.file for square in matrix.squares}
    return Material(
        questions={name: question(suite / name) for name in files},
        excerpts={square.cell.id: _excerpts(square, folder) for square in matrix.squares if square.record},
        stacks={square.cell.id: some for square in matrix.squares if (some := _stacks(square, folder))},
    )


def _stacks(square: Square, folder: Path) -> tuple[Stack, ...]:
    if square.record is None or square.status == Status.PASS:
        return ()
    return read_stacks(folder / attempt_path(square) / "out")


def question(path: Path) -> tuple[str, ...]:
    """The first two paragraphs of a scenario's docstring. It is parsed, never imported."""
    try:
        docstring = ast.get_docstring(ast.parse(path.read_bytes()), clean=False) or ""
    except (OSError, SyntaxError, ValueError, RecursionError):
        return ()
    paragraphs = re.split(r"\n\s*\n", cleandoc(docstring))
    return tuple(" ".join(text.split()) for text in paragraphs[:2] if text.strip())


def _excerpts(square: Square, folder: Path) -> tuple[Excerpt, ...]:
    limits = QUIET_LOG if square.verdict is Verdict.OK else LOG
    attempt = folder / attempt_path(square)
    found = (excerpt(attempt / name, *limits) for name in ("stdout.log", "stderr.log"))
    return tuple(some for some in found if some is not None)


def attempt_path(square: Square) -> str:
    """The attempt's folder, relative to the run's: host-made names only, none read from a record."""
    number = square.record.attempt if square.record else 1
    return f"cells/{slug(square.cell.id)}/attempt-{number}"


def excerpt(path: Path, limit: int, lines: int) -> Excerpt | None:
    """The last `lines` lines within the last `limit` bytes of a log; None where there is no such file."""
    try:
        start = max(0, path.lstat().st_size - limit)
    except OSError:
        return None
    data = ev.read_untrusted(path, limit, start)
    if data is None:
        return None
    kept = BytesIO(data).readlines()
    if start and len(kept) > 1:
        kept = kept[1:]  # the first line was cut in its middle
    kept = kept[-lines:]
    left_out = start + len(data) - sum(map(len, kept))
    return Excerpt(name=path.name, text=printed(b"".join(kept).decode(errors="replace")), left_out=left_out)


def printed(text: str) -> str:
    """What a terminal would show of a log: of a progress bar the last state, nothing that controls the terminal."""
    return ev.clean("\n".join(line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n"))).strip("\n")
