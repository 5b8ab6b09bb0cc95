"""A barrier of the suite's own between ranks, and what their marks say about it.

Never the default process group: vLLM 0.6.3 breaks when there is one before its own, and later versions must be free to
make theirs. So the group here is a Gloo group over a store of its own, which no ``torch.distributed`` call finds.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Mapping, Protocol, Sequence

from rig.events import Events
from rig.marks import Mark, each
from rig.outcomes import OracleError

NAME = "barrier"  # of its marks


class Transport(Protocol):
    """Something that ranks meet at."""

    def wait(self) -> None:
        """Return when every rank has called it as often as this one; raises when one never will."""


class Barrier:
    """A numbered barrier; each call leaves the marks ``enter`` and, if the ranks have met, ``leave``."""

    def __init__(self, transport: Transport, events: Events) -> None:
        self._transport = transport
        self._events = events
        self._n = 0

    def __call__(self) -> int:
        """Meet the other ranks; the number of this barrier, from 0. OracleError ``barrier-broken`` if they do not."""
        n, self._n = self._n, self._n + 1
        self._events.emit("mark", name=NAME, n=n, state="enter")
        try:
            self._transport.wait()
        except Exception as exc:  # most often a neighbour that died: whoever watches the ranks knows better
            raise OracleError("barrier-broken", f"barrier {n}: {type(exc).__name__}: {exc}") from exc
        self._events.emit("mark", name=NAME, n=n, state="leave")
        return n


class Gloo:
    """Ranks of one host over the loopback device (GLOO_SOCKET_IFNAME), introduced to each other by files."""

    def __init__(self, folder: Path, rank: int, count: int, timeout: float) -> None:
        from torch.distributed import FileStore, ProcessGroupGloo

        self._store = FileStore(str(folder / "store"), count)
        self._group = ProcessGroupGloo(self._store, rank, count, timedelta(seconds=timeout))

    def wait(self) -> None:
        self._group.barrier().wait()


@dataclass(frozen=True)
class Meeting:
    """One barrier, in ms. ``skew``: from the first enter to the last, work that was not equally long;
    ``latency``: each rank's leave minus the last enter, the barrier's own cost (with the writing of one mark)."""

    skew: float
    latency: Mapping[int, float]


def meetings(marks: Mapping[int, Sequence[Mark]]) -> dict[int, Meeting]:
    """Every barrier by its number, from each rank's marks.

    Raises OracleError: ``barrier-incomplete`` where a rank did not enter and leave once, ``barrier-leaks`` where one
    left before the last had entered.
    """
    times = {rank: _times(some) for rank, some in marks.items()}
    numbers = sorted({n for entered, left in times.values() for n in (*entered, *left)})
    return {n: _meeting(n, times) for n in numbers}


def _times(marks: Sequence[Mark]) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
    """Nanoseconds of (enters, leaves) by barrier number."""
    entered: dict[int, list[int]] = {}
    left: dict[int, list[int]] = {}
    for mark in marks:
        if mark.name == NAME:
            (entered if mark.state == "enter" else left).setdefault(mark.n, []).append(mark.ns)
    return entered, left


def _meeting(n: int, times: Mapping[int, tuple[dict[int, list[int]], dict[int, list[int]]]]) -> Meeting:
    counts = {rank: (len(entered.get(n, ())), len(left.get(n, ()))) for rank, (entered, left) in times.items()}
    if any(count != (1, 1) for count in counts.values()):
        raise OracleError("barrier-incomplete", f"barrier {n}, times entered and left: {each(counts)}")
    enters = {rank: entered[n][0] for rank, (entered, _) in times.items()}
    last = max(enters.values())
    latency = {rank: (left[n][0] - last) / 1e6 for rank, (_, left) in times.items()}
    if min(latency.values()) < 0:
        early = {rank: f"left {ms:+.3f} ms" for rank, ms in latency.items()}
        raise OracleError("barrier-leaks", f"barrier {n}, measured from the last enter: {each(early)}")
    return Meeting((last - min(enters.values())) / 1e6, latency)
