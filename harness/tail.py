"""Follow a growing events file while its cell runs: what it does now, and when it last spoke."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from harness import events as ev


@dataclass
class Live:
    """What is known of a running cell. `spoke` counts the events of the process that holds the engine."""

    spoke: int = 0
    doing: str = "starting"
    mark: str | None = None


@dataclass
class Tail:
    """Reads `events.jsonl` a piece at a time, without trust and within bounds."""

    out: Path
    live: Live = field(default_factory=Live)
    _offset: int = 0
    _rest: bytes = b""

    def read(self) -> Live:
        """Take in what is new."""
        data = self._rest + self._piece()
        *lines, self._rest = data.split(b"\n")
        if len(self._rest) > ev.MAX_LINE:
            self._rest = b""
        for line in lines:
            try:
                self._take(ev.parse_line(line))
            except ValueError:
                continue  # judged later, from the whole file
        return self.live

    def _piece(self) -> bytes:
        if self._offset > ev.MAX_FILE:
            return b""
        piece = ev.read_untrusted(self.out / "events.jsonl", 1 << 20, self._offset) or b""
        self._offset += len(piece)
        return piece

    def _take(self, event: ev.Event) -> None:
        if isinstance(event, (ev.PlanEvent, ev.Down, ev.CollectError)):
            return  # the runner's, which may live while the engine hangs
        self.live.spoke += 1
        if isinstance(event, ev.Start):
            self.live.doing = event.check
        elif isinstance(event, ev.Phase) and event.state == "begin":
            self.live.doing = event.name
        elif isinstance(event, ev.Mark):
            self.live.mark = f"{event.name} {event.n} {event.state or ''}".strip()
