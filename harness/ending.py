"""How a cell ended: signals and exit codes by name, the counters of its cgroup, and where its ranks stood. Pure, but
for one file that is read without trust."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from harness import events as ev
from harness.records import ExitState, LastMark, MemoryState

BARRIER = "barrier"  # the name of the marks at which ranks meet
RANKS = 8  # of so many a reason names the marks
_CGROUP = 4 << 10  # bytes
_OURS = ("SIGTERM", "SIGKILL")  # what the harness sends

# What codes of a container say that are no signal: the rig's own, and those of whoever starts its first process.
_CODES = {
    64: "the rig was given no cell that it can read",
    70: "the runner of the checks failed",
    125: "the container could not be made",
    126: "its command cannot be executed",
    127: "its command was not found",
}


def signal_number(exit_code: int) -> int | None:
    """The signal behind a container's exit code (128 + n), or None."""
    return exit_code - 128 if 128 < exit_code < 128 + signal.NSIG else None


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def signal_of(exit_code: int | None) -> str:
    """`SIGSEGV` of 139; empty where the code is of no signal."""
    number = signal_number(exit_code) if exit_code is not None else None
    return signal_name(number) if number is not None else ""


def code_words(exit_code: int) -> str:
    """`code 127: its command was not found`"""
    return f"code {exit_code}" + (f": {_CODES[exit_code]}" if exit_code in _CODES else "")


def by_us(state: ExitState) -> bool:
    """Whether the signal that ended it was ours: a fault of its own while we waited is not."""
    return bool(state.killed) and signal_of(state.exit_code) in _OURS


def read_memory(out: Path) -> MemoryState | None:
    """`/out/cgroup.json`, or None where it is missing or not what the contract says."""
    data = ev.read_untrusted(out / "cgroup.json", _CGROUP)
    try:
        return MemoryState.model_validate_json(data) if data is not None else None
    except ValidationError:
        return None


def kernel_kills(state: ExitState) -> int:
    """How many processes of the cell the kernel killed for memory, by the counters of its own cgroup."""
    return state.oom.oom_kill if state.oom is not None and state.oom.version else 0


# --- ranks ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Meeting:
    """A barrier that ranks wait at, and those that never came to it."""

    n: int
    inside: Sequence[int]
    absent: Sequence[int]


def meeting(state: ExitState) -> Meeting | None:
    """The barrier at which ranks stood in the end; None if at none, or if there is but one rank."""
    waiting = {rank: mark.n for rank, mark in state.last_marks.items() if mark and waits(mark)}
    if not waiting or len(state.last_marks) < 2:
        return None
    n = max(waiting.values())
    came = {rank for rank, mark in state.last_barriers.items() if mark.n >= n}
    inside = sorted(rank for rank, there in waiting.items() if there == n)
    return Meeting(n, inside, sorted({*state.last_marks} - came - {*inside}))


def waits(mark: LastMark) -> bool:
    return mark.name == BARRIER and mark.state == "enter"


def stood(mark: LastMark | None, end: float | None) -> str:
    """Where a rank stood: `in barrier 3 for 41 s`, `last left barrier 2`, `without a mark`."""
    if mark is None:
        return "without a mark"
    what = f"{mark.name[:60]} {str(mark.n)[:20]}"
    if mark.state == "leave":
        return f"last left {what}"
    if mark.state is None:
        return f"last at {what}"
    return f"in {what}" + (f" for {max(0.0, end - mark.at_seconds):.0f} s" if end is not None else "")


def whereabouts(state: ExitState) -> str:
    """Where all ranks stood: `rank 1 did not come to barrier 3; rank 0 in barrier 3 for 41 s, rank 1 last left …`."""
    if not state.last_marks:
        return f"last mark: {state.last_mark or 'none'}"
    if len(state.last_marks) == 1:
        return stood(next(iter(state.last_marks.values())), state.seconds)
    each = [f"rank {rank} {stood(mark, state.seconds)}" for rank, mark in sorted(state.last_marks.items())]
    some = ", ".join(each[:RANKS]) + (f" and {len(each) - RANKS} more" if len(each) > RANKS else "")
    met = meeting(state)
    return f"{_missing(met)}{some}" if met else some


def _missing(met: Meeting) -> str:
    if not met.absent:
        return ""
    return f"rank {names(met.absent)} did not come to barrier {str(met.n)[:20]}; "


def names(ranks: Sequence[int]) -> str:
    """`1, 2 and 3`, `0, 1, 2, 3, 4, 5, 6, 7 and 8 more`"""
    shown = [str(rank) for rank in ranks[:RANKS]]
    last = [f"{len(ranks) - RANKS} more"] if len(ranks) > RANKS else shown[-1:]
    rest = shown if len(ranks) > RANKS else shown[:-1]
    return " and ".join(filter(None, [", ".join(rest), *last]))


def marks_by_rank(marks: Mapping[int, LastMark | None]) -> str | None:
    """The last mark; of several ranks all of them, `rank 0: barrier 3 enter; rank 1: none`."""
    if len(marks) < 2:
        mark = next(iter(marks.values()), None)
        return None if mark is None else str(mark)
    return "; ".join(f"rank {rank}: {mark or 'none'}" for rank, mark in sorted(marks.items()))
