"""The terminal: where the ranks of a cell stood in the end, and the stacks of its processes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from harness.records import ExitState
from harness.views.ending import standings
from harness.views.stacks import Stack, shown
from harness.views.text import cut, duration, many

LINES = 40  # of a stack


def ranks_detail(state: ExitState | None) -> Iterator[RenderableType]:
    rows = standings(state)
    if not rows:
        return
    table = Table("rank", "last mark", "at", "for", "barrier", box=None, pad_edge=False)
    for row in rows:
        at = "" if row.at is None else duration(row.at)
        ago = "" if row.ago is None else duration(row.ago)
        table.add_row(
            str(row.rank), Text(cut(row.mark, 60)), at, ago, Text(row.barrier, "bold red" if row.absent else "")
        )
    yield Text("\nwhere its ranks stood", "bold")
    yield table


def stacks_detail(stacks: Sequence[Stack]) -> Iterator[Text]:
    """The head of each stack: what its main thread did at the time."""
    with_text, without = shown(stacks)
    for stack in with_text:
        yield Text(f"\n{stack.title}", "bold").append(f"\n{cut(stack.process.command or '', 200)}", "not bold dim")
        lines = stack.text.splitlines()
        yield Text("\n".join(lines[:LINES]))
        if len(lines) > LINES or stack.left_out:
            yield Text("more of it is in the file", "dim")
    if without:
        yield Text(f"\n{many(len(without), 'process', 'processes')} without a stack here", "bold")
        for stack in without[:LINES]:
            yield Text(f"{stack.title}: {cut(stack.process.command or '', 160)}")
