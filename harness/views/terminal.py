"""The terminal: the plan, the table, one cell in detail, and what runs at the moment."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live as RichLive
from rich.table import Column, Table
from rich.text import Text

from harness.events import clean
from harness.matrix import JudgedCheck, Matrix, Square
from harness.plan import Planned
from harness.records import Record
from harness.status import Status, Verdict
from harness.tail import Live
from harness.targets import TargetFacts
from harness.views.causes import Cause, causes, tally
from harness.views.ending import ending
from harness.views.stacks import Stack
from harness.views.terminal_ending import ranks_detail, stacks_detail
from harness.views.terminal_targets import target_detail, targets_report
from harness.views.text import cause, square_text, summary

if TYPE_CHECKING:
    import pandas as pd

STYLE = {
    Verdict.OK: "green",
    Verdict.EXPECTED: "green",
    Verdict.FLAKY: "yellow",
    Verdict.FIXED: "yellow",
    Verdict.REGRESSION: "bold red",
    Verdict.UNKNOWN: "magenta",
}


def make_console() -> Console:
    """Where there is no terminal, nothing is folded to a width that nobody has."""
    console = Console()
    return console if console.is_terminal else Console(width=max(console.width, 200))


def plan_table(plan: Sequence[Planned]) -> Table:
    table = Table(Column("cell", no_wrap=True), "", "why", box=None, pad_edge=False)
    for planned in plan:
        why = planned.reason if planned.selected else f"{planned.reason} (needed as a reference)"
        table.add_row(Text(planned.cell.id), planned.action, Text(why))
    return table


@dataclass(frozen=True)
class MatrixTable:
    """The table; in blocks below each other where a terminal has no room for all columns side by side."""

    matrix: Matrix

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        pivot = self.matrix.pivot()
        room = options.max_width - max(map(len, (*self.matrix.rows, "target"))) - FRAME - 1
        title = f"run {self.matrix.run}"
        for block in _blocks([_widths(pivot[column])[0] for column in pivot.columns], room) or [[]]:
            yield _table(pivot.iloc[:, block], title, room)
            title = "further columns"


FRAME = 3  # what a column of a table has beside its text


def _blocks(least: Sequence[int], room: int) -> list[list[int]]:
    """Numbers of columns that fit side by side; a column that is wider than all of the room stands alone."""
    blocks: list[list[int]] = []
    left = 0
    for number, width in enumerate(least):
        if not blocks or width + FRAME > left:
            blocks.append([])
            left = room
        blocks[-1].append(number)
        left -= width + FRAME
    return blocks


def _spread(widths: Sequence[tuple[int, int]], room: int) -> list[int]:
    """What is left of the room goes to those that can use it, a character each in turn."""
    given = [min(least, max(room - FRAME, 1)) for least, _ in widths]
    left = room - sum(width + FRAME for width in given)
    for _ in range(max(0, left)):
        needy = [number for number, (_, most) in enumerate(widths) if given[number] < most]
        if not needy:
            break
        given[min(needy, key=lambda number: given[number] - widths[number][0])] += 1
    return given


def _widths(column: pd.Series[Any]) -> tuple[int, int]:
    """The longest word, which a narrower column breaks, and the longest line."""
    texts = [_heading(str(column.name)), *(_square(value).plain for value in column)]
    words = (word for text in texts for word in text.split())
    return max(map(len, words)), max(len(line) for text in texts for line in text.splitlines())


def _table(pivot: pd.DataFrame, title: str, room: int) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("target", no_wrap=True)
    widths = _spread([_widths(pivot[column]) for column in pivot.columns], room)
    for column, width in zip(pivot.columns, widths, strict=True):
        table.add_column(Text(_heading(column)), overflow="fold", width=width)
    for name, row in zip(pivot.index, pivot.itertuples(index=False), strict=True):
        table.add_row(str(name), *(_square(value) for value in row))
    return table


def _heading(column: str) -> str:
    """The scenario, and each parameter on a line of its own."""
    return column.replace("[", "\n").replace(",", "\n").removesuffix("]")


def _square(value: object) -> Text:
    return Text(square_text(value), STYLE[value.verdict]) if isinstance(value, Square) else Text("")


def report(matrix: Matrix) -> RenderableType:
    """The targets, the table, the counts, and what is not simply ok by cause: what matters most stands last."""
    parts: list[RenderableType] = [*targets_report(matrix), MatrixTable(matrix), Text(summary(matrix))]
    found = causes(matrix.squares)
    if said := tally(found):
        parts.append(Text(said))
    parts += [_cause(one) for one in found]
    if matrix.elsewhere:
        parts.append(Text("`vllm-matrix merge` makes one table of this run and those of the other cells", "dim"))
    if matrix.not_runnable:
        parts.append(Text(f"not in the table, for want of a lock: {', '.join(matrix.not_runnable)}", "dim"))
    return Group(*parts)


def print_outcome(console: Console, matrix: Matrix, folder: Path) -> None:
    """The table of a run, and where its files are."""
    console.print(report(matrix))
    console.print(f"table: {folder / 'matrix.md'}", highlight=False, soft_wrap=True)
    console.print(f"       {folder / 'matrix.json'}", highlight=False, soft_wrap=True)
    console.print(f"page:  {folder / 'matrix.html'}", highlight=False, soft_wrap=True)


def _cause(found: Cause) -> Text:
    text = Text(f"{found.verdict:>10}  ", STYLE[found.verdict]).append(found.title[:300], "bold")
    for expectation in found.expectations:
        text.append(f"\n{'':12}known: {expectation.reason} {expectation.link or ''}", "dim")
    for affected in found.affected:
        checks = ", ".join(judged.check.id for judged in affected.checks)
        text.append(f"\n{'':12}{affected.status} {affected.square.cell.id}: {checks}", "default")
    return text


def cell_detail(
    square: Square, folder: str, target: TargetFacts | None = None, stacks: Sequence[Stack] = ()
) -> RenderableType:
    """`show CELL`: status, why, what to do, every check, where its ranks and processes stood, phases, what its target
    is and lacks, where it all lies."""
    record = square.record
    head = Text(f"{square.cell.id}\n", "bold").append(square_text(square), STYLE[square.verdict])
    if record is None:
        words = "Planned, but there is no record yet: it waits, runs, or was interrupted."
        return Group(head, Text(words), Text(f"Evidence so far: {folder}", "dim"))
    parts: list[RenderableType] = [head, *_why(record), _checks(square.checks)]
    for judged in square.checks:
        if judged.check.error is not None and judged.verdict is not Verdict.OK:
            parts += [Text(f"\n{judged.check.id}", "bold"), Text(judged.check.error.traceback.rstrip())]
    if square.status != Status.PASS:
        parts += [*ranks_detail(record.exit), *stacks_detail(stacks)]
    parts += [Text(""), _facts(record), *(target_detail(target) if target else ())]
    return Group(*parts, Text(f"\nEvidence: {folder}", "dim"))


def _why(record: Record) -> Iterator[Text]:
    if record.reason:
        yield Text(f"why: {record.reason}")
    if record.status is not Status.PASS and (words := "; ".join(ending(record.exit))):
        yield Text(f"its end: {words}")
    if record.advice:
        yield Text(f"what to do: {record.advice}")


def _checks(checks: Sequence[JudgedCheck]) -> Table:
    table = Table("check", "status", "verdict", "s", "why", box=None, pad_edge=False)
    for judged in checks:
        check = judged.check
        seconds = f"{check.seconds:.1f}" if check.seconds is not None else ""
        why = cause(judged)[:300]
        if judged.expectation:
            why += f"\nexpected: {judged.expectation.reason} {judged.expectation.link or ''}"
        table.add_row(Text(check.id), check.status, Text(judged.verdict, STYLE[judged.verdict]), seconds, Text(why))
    return table


def _facts(record: Record) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    seconds = (record.ended - record.started).total_seconds()
    phases = ", ".join(f"{name} {value:.1f} s" for name, value in record.phases.items())
    rows = {
        "started": f"{record.started:%Y-%m-%d %H:%M:%S}Z, {seconds:.0f} s, attempt {record.attempt}",
        "reused from": record.reused_from or "",
        "phases": phases,
        "backend": record.backend,
        "image": f"{record.image.tag} {record.image.id}" if record.image else "",
        "versions": ", ".join(f"{name} {version}" for name, version in sorted(record.distributions.items())),
        **{name: f"{value}" for name, value in record.properties.items()},
        **{metric.name: f"{metric.value:g} {metric.unit}" for metric in record.metrics},
    }
    for name, value in rows.items():
        if value != "":
            table.add_row(Text(name, "dim"), Text(value))
    return table


@dataclass
class Progress:
    """What runs, since when, and how many are left. A live table on a terminal, plain lines elsewhere."""

    console: Console
    total: int = 0
    _running: dict[str, tuple[float, str]] = field(default_factory=dict)
    _done: set[str] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @contextmanager
    def shown(self) -> Iterator[None]:
        if not self.console.is_terminal:
            yield
            return
        with RichLive(get_renderable=self._table, console=self.console, refresh_per_second=2, transient=True):
            yield

    def say(self, line: str) -> None:
        self.console.print(Text(line), soft_wrap=True)

    @contextmanager
    def doing(self, name: str) -> Iterator[Callable[[str], None]]:
        """Show that something other than a cell goes on; the function given takes its latest line."""
        begin = time.monotonic()

        def say(line: str) -> None:
            with self._lock:
                self._running[name] = (begin, clean(line)[:120])

        say("")
        try:
            yield say
        finally:
            with self._lock:
                self._running.pop(name, None)

    def started(self, name: str) -> None:
        with self._lock:
            self._running[name] = (time.monotonic(), "starting")
        self.say(f"start  {name}")

    def update(self, name: str, live: Live) -> None:
        with self._lock:
            since, before = self._running.get(name, (time.monotonic(), ""))
            self._running[name] = (since, live.doing)
        if live.doing != before and not self.console.is_terminal:
            self.say(f"       {name}: {live.doing}")

    def ended(self, name: str, record: Record | None) -> None:
        with self._lock:
            since, _ = self._running.pop(name, (time.monotonic(), ""))
            self._done.add(name)
            left = self.total - len(self._done)
        said = f"{record.status} {record.reason or ''}" if record else "interrupted"
        passed = sum(check.status is Status.PASS for check in record.checks) if record else 0
        checks = f" {passed}/{len(record.checks)}" if record else ""
        self.say(f"end    {name}: {said.strip()}{checks}, {time.monotonic() - since:.0f} s, {left} left")

    def _table(self) -> Table:
        table = Table("running", "does", "since", box=None, pad_edge=False)
        with self._lock:
            for name, (since, doing) in self._running.items():
                table.add_row(Text(name), Text(doing), f"{time.monotonic() - since:.0f} s")
            table.add_row(Text(f"{len(self._done)} of {self.total} cells done", "dim"))
        return table
