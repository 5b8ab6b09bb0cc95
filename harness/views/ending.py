"""How a cell ended, in words, and where each of its ranks stood then. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from harness.ending import BARRIER, by_us, code_words, kernel_kills, meeting, signal_of, waits
from harness.events import clean
from harness.records import ExitState, LastMark
from harness.views.text import duration, many, size

ROWS = 64  # ranks

_KILLED = {
    "total": "its time was up",
    "silence": "nothing was heard of it any more",
    "start": "it did not say hello in time",
    "import": "its import of vLLM took too long",
    "init": "the start of its engine took too long",
    "disk": "it left too much in /out",
    "interrupted": "the run was to stop",
}


@dataclass(frozen=True, kw_only=True)
class Standing:
    """A rank in the end: its last mark, when that was and how long ago (seconds), and whether others wait for it."""

    rank: int
    mark: str
    at: float | None
    ago: float | None
    barrier: str
    absent: bool
    waits: bool

    def share(self, seconds: float) -> tuple[float, float]:
        """Where in the cell's time its last mark lies, and how much of it came after, in percent."""
        begin = min(max(100 * (self.at or 0.0) / max(seconds, 0.001), 0.0), 100.0)
        return begin, 100.0 - begin


def standings(state: ExitState | None) -> tuple[Standing, ...]:
    """Where all ranks stood, one a row; empty where no rank has left a mark."""
    if state is None or not any(state.last_marks.values()):
        return ()
    met = meeting(state)
    absent, n = (met.absent, met.n) if met else ((), 0)
    return tuple(
        _standing(state, rank, mark, rank in absent, n) for rank, mark in sorted(state.last_marks.items())[:ROWS]
    )


def _standing(state: ExitState, rank: int, mark: LastMark | None, absent: bool, n: int) -> Standing:
    ago = max(0.0, state.seconds - mark.at_seconds) if mark and state.seconds is not None else None
    last = state.last_barriers.get(rank)
    barrier = f"left {BARRIER} {last.n}" if last and last.state == "leave" else f"in {BARRIER} {last.n}" if last else ""
    return Standing(
        rank=rank,
        mark=clean(str(mark)) if mark else "none",
        at=mark.at_seconds if mark else None,
        ago=ago,
        barrier=f"never came to {BARRIER} {n}" if absent else barrier,
        absent=absent,
        waits=mark is not None and waits(mark),
    )


def ending(state: ExitState | None) -> tuple[str, ...]:
    """How it ended, a sentence each: who ended it, by what, what the kernel did, what is left."""
    return tuple(_ending(state)) if state is not None and state.started else ()


def _ending(state: ExitState) -> Iterator[str]:
    if state.killed:
        given = f" ({state.deadlines[state.killed]:g} s)" if state.killed in state.deadlines else ""
        yield f"stopped by us, {_KILLED[state.killed]}{given}"
    if state.exit_code is None:
        yield "its exit code was not seen"
    elif signal := signal_of(state.exit_code):
        yield f"exit code {state.exit_code}: {signal}" + (", sent by us" if by_us(state) else "")
    else:
        yield f"exit {code_words(state.exit_code)}"
    if kills := kernel_kills(state):
        yield f"the kernel killed {many(kills, 'process', 'processes')} of it for memory{_limits(state)}"
    elif state.oom_killed:
        yield f"killed for memory{_limits(state)}"
    if state.quiet_seconds is not None and state.killed:
        yield f"last heard of {duration(state.quiet_seconds)} before"
    if state.error:
        yield f"the engine of containers says: {clean(state.error)}"


def _limits(state: ExitState) -> str:
    if state.oom is None:
        return ""
    known = {"limit": state.oom.limit_bytes, "peak": state.oom.peak_bytes}
    words = ", ".join(f"{name} {size(count)}" for name, count in known.items() if count)
    return f" ({words})" if words else ""
