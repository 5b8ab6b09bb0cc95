"""Follow the growing events files of a running cell: what it does now, and when it last spoke."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from harness import events as ev
from harness.ending import BARRIER
from harness.records import LastMark

PHASES = 1_000  # of an engine's phases so many may be open at once


@dataclass
class Live:
    """What is known of a running cell; times are seconds from its start, by our own clock.

    `spoke_at`: the last event of the processes that hold engines, of any rank: a cell in which one rank gets on has not
    stopped, and ranks that wait for each other fall silent together. `marks` is each rank's last one, `barriers` its
    last one at a barrier. `phases`: those that have begun and not ended, by rank, process and name, and since when.
    `heard` counts the events in rank 0's file.
    """

    spoke_at: float = 0.0
    heard: int = 0
    greeted: bool = False
    doing: str = "starting"
    marks: dict[int, LastMark | None] = field(default_factory=dict)
    barriers: dict[int, LastMark] = field(default_factory=dict)
    phases: dict[tuple[int, int, str], float] = field(default_factory=dict)


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
    """Reads the events of all of a cell's ranks. The cell starts when this is made."""

    def __init__(self, out: Path, ranks: int = 1, clock: Callable[[], float] = time.monotonic) -> None:
        self.live = Live(marks=dict.fromkeys(range(ranks)))
        self._files = {rank: _File(out / ev.file_name(rank)) for rank in range(ranks)}
        self._clock = clock
        self._begin = clock()

    @property
    def elapsed(self) -> float:
        return self._clock() - self._begin

    def read(self) -> Live:
        """Take in what is new."""
        now = self.elapsed
        for rank, file in self._files.items():
            for event in file.read():
                self._take(rank, event, now)
        return self.live

    def drain(self) -> Live:
        """Take in all that is there: more than a piece, where it came faster than it was read."""
        before = -1
        while before != (before := sum(file.offset for file in self._files.values())):
            self.read()
        return self.live

    def _take(self, rank: int, event: ev.Event, now: float) -> None:
        live = self.live
        if event.rank != rank:
            return  # forged; judged later
        live.heard += rank == 0
        if rank == 0 and isinstance(event, (ev.End, ev.Down)):
            live.phases.clear()  # also those of processes that died in one
        if isinstance(event, (ev.PlanEvent, ev.Down, ev.CollectError)):
            return  # the runner's, which may live while the engine hangs
        live.spoke_at = now
        if isinstance(event, ev.Mark):
            self._mark(rank, event, now)
        elif isinstance(event, ev.Phase):
            self._phase(rank, event, now)
        elif rank == 0 and isinstance(event, ev.Hello):
            live.greeted = True
        elif rank == 0 and isinstance(event, ev.Start):
            live.doing = event.check

    def _mark(self, rank: int, event: ev.Mark, now: float) -> None:
        mark = LastMark(name=event.name, n=event.n, state=event.state, at_seconds=round(now, 1))
        self.live.marks[rank] = mark
        if event.name == BARRIER:
            self.live.barriers[rank] = mark

    def _phase(self, rank: int, event: ev.Phase, now: float) -> None:
        key = (rank, event.pid, event.name)
        if event.state == "end":
            self.live.phases.pop(key, None)
            return
        if len(self.live.phases) < PHASES:
            self.live.phases.setdefault(key, now)
        if rank == 0:
            self.live.doing = event.name
