"""The Matrix as one HTML page that needs nothing beside it: the table, and the evidence behind every square. Pure."""

from __future__ import annotations

import hashlib
import re
import shlex
from base64 import b64encode
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from harness import events as ev
from harness.cells import slug
from harness.expectations import Expectation
from harness.fingerprint import fingerprint
from harness.judge import CELL
from harness.matrix import JudgedCheck, Matrix, Square
from harness.records import PropertyValue, Record
from harness.status import UNEXPECTED, Status, Verdict
from harness.views.causes import ABSENT, MEANING, Cause, causes, distinct, tally
from harness.views.ending import Standing, ending, standings
from harness.views.material import Excerpt, Material, attempt_path
from harness.views.stacks import Stack, shown
from harness.views.targets import change_text, changes, identity, places, traits, troubles, words
from harness.views.text import cause, cut, duration, many, nth, size

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup

# What the page shows of each thing; the record beside it has all of it.
TRACEBACK = 6_000  # characters
TRACEBACKS = 6  # a cell, one for each cause
ROWS = 300  # of a table

NEXT = {  # what to do where the record has no advice of its own
    Verdict.FIXED: "Remove the entry from `expectations.toml`, or narrow its condition.",
    Verdict.REGRESSION: "See whether the version is at fault. If so, `expectations.toml` takes an entry for it.",
    Verdict.UNKNOWN: "Run it again.",
}

# --- the page's parts -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the grid; None where the target has no such cell. `versions` are those that all its cells share."""

    target: str
    device: str
    versions: tuple[str, ...]
    squares: tuple[Square | None, ...]


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line of the table of checks. A traceback that another line already shows is not shown again."""

    judged: JudgedCheck
    cause: str = ""
    raised_in: tuple[str, ...] = ()
    traceback: str = ""
    left_out: int = 0
    same_as: str = ""


@dataclass(frozen=True, kw_only=True)
class Detail:
    """Everything about one cell."""

    square: Square
    question: Sequence[str]
    siblings: tuple[Square, ...]
    causes: tuple[Cause, ...]
    lines: tuple[Line, ...]
    expectations: tuple[Expectation, ...]
    excerpts: Sequence[Excerpt]
    ending: tuple[str, ...]
    standings: tuple[Standing, ...]
    stacks: tuple[Stack, ...]
    stackless: tuple[Stack, ...]
    commands: tuple[tuple[str, str], ...]


def rows(matrix: Matrix) -> tuple[Row, ...]:
    squares = {(square.row, square.column): square for square in matrix.squares}
    return tuple(_row([squares.get((name, column)) for column in _columns(matrix)]) for name in matrix.rows)


def _columns(matrix: Matrix) -> list[str]:
    """Those of one scenario side by side, also where the first target lacks some of them."""
    scenarios = list(dict.fromkeys(square.cell.scenario for square in matrix.squares))
    return sorted(matrix.columns, key=lambda column: scenarios.index(column.partition("[")[0]))


def _row(squares: Sequence[Square | None]) -> Row:
    there = [square for square in squares if square]
    records = [square.record for square in there if square.record]
    versions = {name: {record.distributions.get(name) for record in records} for name in ("verl", "torch")}
    shared = tuple(
        f"{name} {next(iter(some))}" for name, some in versions.items() if len(some) == 1 and None not in some
    )
    cell = there[0].cell
    return Row(target=cell.target, device=cell.device, versions=shared, squares=tuple(squares))


def heads(matrix: Matrix) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Scenarios, each with the parameters of its columns."""
    split = [column.rstrip("]").partition("[") for column in _columns(matrix)]
    return tuple((name, tuple(part[2] for part in some)) for name, some in groupby(split, key=lambda part: part[0]))


def detail(square: Square, matrix: Matrix, material: Material) -> Detail:
    state = square.record.exit if square.record else None
    stacks, stackless = shown(material.stacks.get(square.cell.id, ()))
    return Detail(
        square=square,
        question=material.questions.get(square.cell.file, ()),
        siblings=tuple(other for other in matrix.squares if other.column == square.column),
        causes=causes([square]),
        lines=lines(square.checks),
        expectations=distinct(judged.expectation for judged in square.checks),
        excerpts=material.excerpts.get(square.cell.id, ()),
        ending=ending(state),
        standings=standings(state),
        stacks=stacks,
        stackless=stackless,
        commands=commands(square, matrix.run),
    )


def lines(checks: Sequence[JudgedCheck]) -> tuple[Line, ...]:
    shown: dict[str, str] = {}  # fingerprint → the check whose traceback is shown
    found = []
    for judged in checks:
        text, key = cause(judged), fingerprint(judged.check)
        error = judged.check.error
        if error is None or not error.traceback:
            found.append(Line(judged=judged, cause=text))
        elif key in shown or len(shown) == TRACEBACKS:
            found.append(Line(judged=judged, cause=text, raised_in=_raised_in(error), same_as=shown.get(key, "")))
        else:
            shown[key] = judged.check.id
            left_out = max(0, len(error.traceback) - TRACEBACK)
            tail = error.traceback[left_out:].rstrip()
            found.append(
                Line(judged=judged, cause=text, raised_in=_raised_in(error), traceback=tail, left_out=left_out)
            )
    return tuple(found)


def _raised_in(error: ev.ErrorInfo) -> tuple[str, ...]:
    """The suite's own line that led there, and the line that raised."""
    suite = [frame for frame in error.frames if frame.where == "suite"][-1:]
    return tuple(dict.fromkeys(f"{f.file}:{f.line} {f.function}" for f in (*suite, *error.frames[-1:])))


def commands(square: Square, run: str) -> tuple[tuple[str, str], ...]:
    """What can be done about the cell: purpose and command line. Without an image there is nothing to reproduce."""
    cell, which = shlex.quote(square.cell.id), f" --run {shlex.quote(run)}"
    again = ("Run it again", f"vllm-matrix run {cell} --fresh")
    if square.record is None:
        return (again,)
    logs = ("Read all that it printed", f"vllm-matrix logs {cell}{which}")
    if square.record.image is None:
        return (logs, again)
    return (
        ("Print the command that runs it again", f"vllm-matrix repro {cell}{which}"),
        ("Open a shell in the same container", f"vllm-matrix shell {cell}{which}"),
        logs,
    )


def why_not_green(matrix: Matrix) -> tuple[str, ...]:
    if not matrix.squares:
        return ("Nothing was planned, so nothing ran.",)
    counts = Counter(square.verdict for square in matrix.squares)
    bad = [verdict for verdict in Verdict if counts[verdict] and (verdict in UNEXPECTED or verdict is Verdict.UNKNOWN)]
    if not bad and not matrix.green:
        return ("Nothing was asked of any version: no cell exists in its target.",)
    return tuple(f"{v.capitalize()} in {many(counts[v], 'cell')}: {MEANING[v]}." for v in bad)


def started(run: str) -> datetime | None:
    """A run's name begins with the time of its start."""
    try:
        return datetime.strptime(run.partition("-")[0], "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
    except ValueError:
        return None


# --- words ------------------------------------------------------------------------------------------------------------


def age(record: Record, now: datetime) -> str:
    old = max(now - record.started, timedelta())
    if old.days:
        return f"{old.days} d old"
    return f"{old.seconds // 3600} h old" if old.seconds >= 3600 else f"{old.seconds // 60} min old"


def quantity(value: float, unit: str) -> str:
    if unit in ("B", "byte", "bytes"):
        return size(value)
    whole = abs(value) < 1e15 and value == int(value)
    return f"{int(value):,} {unit}" if whole else f"{value:,.4g} {unit}"


def fact(value: PropertyValue | tuple[PropertyValue, ...]) -> str:
    if isinstance(value, tuple):
        return ", ".join(map(fact, value)) or "none"
    if value is None:
        return "none"
    return str(value) if not isinstance(value, bool) else "yes" if value else "no"


def web(link: str | None) -> str | None:
    """The link if it leads to the web; anything else is shown as text."""
    try:
        parts = urlsplit(link or "")
    except ValueError:
        return None
    return link if parts.scheme in ("http", "https") and parts.hostname else None


# --- templates --------------------------------------------------------------------------------------------------------

_UNSAFE = re.compile("[\ud800-\udfff\u200e\u200f\u202a-\u202e\u2066-\u2069]")  # surrogates; what turns text around


def _safe(value: object) -> object:
    """Every value passes here on its way into the page, before it is escaped."""
    if isinstance(value, str) and not hasattr(value, "__html__"):
        return _UNSAFE.sub("\N{REPLACEMENT CHARACTER}", ev.clean(value))
    return value


def _code(text: str) -> Markup:
    """Text in which `such` pieces are code."""
    from markupsafe import Markup, escape

    pieces = re.split(r"``?([^`]+)``?", str(_safe(text)))
    return Markup("").join(
        Markup("<code>{}</code>").format(piece) if number % 2 else escape(piece) for number, piece in enumerate(pieces)
    )


@cache
def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("harness.views"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_safe,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters = (many, nth, duration, age, size, quantity, fact, cut, web, slug, change_text, identity, places, words)
    environment.filters |= {word.__name__: word for word in filters} | {"code": _code, "attempt": attempt_path}
    environment.globals |= {"MEANING": MEANING, "NEXT": NEXT, "Verdict": Verdict, "Status": Status}
    environment.globals |= {"ABSENT": ABSENT, "CELL": CELL, "ROWS": ROWS}
    environment.globals |= {"changes": changes, "traits": traits, "troubles": troubles}
    return environment


def _asset(name: str) -> tuple[Markup, str]:
    """A style sheet or script of ours, and the source expression that lets it, and nothing else, run."""
    from markupsafe import Markup

    text = (Path(__file__).parent / "templates" / name).read_text(encoding="utf-8")
    return Markup(text), f"'sha256-{b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"  # noqa: S704 - ours


def html(matrix: Matrix, material: Material, now: datetime) -> str:
    """The whole page. Text of records and logs is escaped; nothing is loaded, and nothing but our own script runs."""
    style, style_source = _asset("matrix.css")
    script, script_source = _asset("matrix.js")
    rules = ("default-src 'none'", f"style-src {style_source}", f"script-src {script_source}", "img-src data:")
    found = causes(matrix.squares)
    template = _environment().get_template("matrix.html.j2")
    return template.render(
        matrix=matrix,
        now=now,
        started=started(matrix.run),
        why_not_green=why_not_green(matrix),
        counts=Counter(square.verdict for square in matrix.squares),
        heads=heads(matrix),
        rows=rows(matrix),
        causes=found,
        tally=tally(found),
        affected=len({some.square.cell.id for one in found for some in one.affected}),
        details=[detail(square, matrix, material) for square in matrix.squares],
        style=style,
        script=script,
        policy="; ".join((*rules, "base-uri 'none'", "form-action 'none'")),
    )
