"""Follow the growing events files of a running cell: what it does now, and when it last spoke."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from harness import events as ev


@dataclass
class Live:
    """What is known of a running cell.

    `spoke` counts the events of the processes that hold engines, of any rank: a cell in which one rank gets on has not
    stopped, and ranks that wait for each other fall silent together. `marks` is each rank's last one.
    """

    spoke: int = 0
    doing: str = "starting"
    marks: dict[int, str | None] = field(default_factory=dict)

    @property
    def mark(self) -> str | None:
        """The last mark; of several ranks all of them, `rank 0: barrier 3 enter; rank 1: none`."""
        if len(self.marks) < 2:
            return next(iter(self.marks.values()), None)
        return "; ".join(f"rank {rank}: {mark or 'none'}" for rank, mark in sorted(self.marks.items()))


@dataclass
class _File:
    """One rank's events file, read a piece at a time, without trust and within bounds."""

    path: Path
    offset: int = 0
    rest: bytes = b""

    def read(self) -> Iterator[ev.Event]:
        """What is new, but for lines that are none: those are judged later, from the whole file."""
        data = self.rest + self._piece()
        *lines, self.rest = data.split(b"\n")
        if len(self.rest) > ev.MAX_LINE:
            self.rest = b""
        for line in lines:
            try:
                yield ev.parse_line(line)
            except ValueError:
                continue

    def _piece(self) -> bytes:
        if self.offset > ev.MAX_FILE:
            return b""
        piece = ev.read_untrusted(self.path, 1 << 20, self.offset) or b""
        self.offset += len(piece)
        return piece


class Tail:
    """Reads the events of all of a cell's ranks."""

    def __init__(self, out: Path, ranks: int = 1) -> None:
        self.live = Live(marks=dict.fromkeys(range(ranks)))
        self._files = {rank: _File(out / ev.file_name(rank)) for rank in range(ranks)}

    def read(self) -> Live:
        """Take in what is new."""
        for rank, file in self._files.items():
            for event in file.read():
                self._take(rank, event)
        return self.live

    def _take(self, rank: int, event: ev.Event) -> None:
        if isinstance(event, (ev.PlanEvent, ev.Down, ev.CollectError)):
            return  # the runner's, which may live while the engine hangs
        self.live.spoke += 1
        if isinstance(event, ev.Mark):
            self.live.marks[rank] = f"{event.name} {event.n} {event.state or ''}".strip()
        elif rank == 0 and isinstance(event, ev.Start):
            self.live.doing = event.check
        elif rank == 0 and isinstance(event, ev.Phase) and event.state == "begin":
            self.live.doing = event.name
