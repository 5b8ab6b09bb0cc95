"""Barriers between ranks, and what their marks say: no torch needed, the transport is a parameter."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
from rig.barrier import Barrier, meetings
from rig.events import Events, file_name
from rig.marks import Listener, Mark, each
from rig.outcomes import OracleError

MS = 1_000_000


class Threads:
    """Ranks that are threads."""

    def __init__(self, parties: int) -> None:
        self._barrier = threading.Barrier(parties)

    def wait(self) -> None:
        self._barrier.wait(timeout=10)


class Broken:
    def wait(self) -> None:
        raise RuntimeError("Connection closed by peer")


def barrier(n: int, enter: float, leave: float) -> list[Mark]:
    return [Mark("barrier", n, "enter", int(enter * MS)), Mark("barrier", n, "leave", int(leave * MS))]


def test_latency_is_counted_from_the_last_enter_and_skew_is_not_part_of_it() -> None:
    """Rank 0 came 90 ms early: what it waited for rank 1 is skew."""
    found = meetings({0: barrier(0, 10, 100.5), 1: barrier(0, 100, 100.25)})
    assert found[0].skew == 90
    assert found[0].latency == {0: 0.5, 1: 0.25}


def test_every_barrier_is_met_by_its_number_and_other_marks_do_not_count() -> None:
    other = [Mark("generate", 0, "enter", 0), Mark("generate", 0, "leave", 5)]
    first = [*barrier(0, 1, 2), *other, *barrier(1, 3, 4)]
    assert sorted(meetings({0: first, 1: [*barrier(0, 1, 2), *barrier(1, 3, 4)]})) == [0, 1]


@pytest.mark.parametrize(
    ("second", "reason", "message"),
    [
        (barrier(0, 60, 70), "barrier-leaks", r"barrier 0.*rank 0: left -9\.000 ms"),
        (barrier(0, 50, 70)[:1], "barrier-incomplete", r"rank 0: \(1, 1\); rank 1: \(1, 0\)"),
        ([], "barrier-incomplete", r"rank 1: \(0, 0\)"),
        ([*barrier(0, 50, 51), *barrier(0, 50, 51)], "barrier-incomplete", r"rank 1: \(2, 2\)"),
        ([*barrier(0, 50, 51), *barrier(1, 52, 53)], "barrier-incomplete", r"barrier 1.*rank 0: \(0, 0\)"),
    ],
)
def test_what_is_no_barrier_is_told(second: list[Mark], reason: str, message: str) -> None:
    with pytest.raises(OracleError, match=message) as raised:
        meetings({0: barrier(0, 50, 51), 1: second})
    assert raised.value.reason == reason


def test_ranks_meet_and_each_leaves_its_own_marks(tmp_path: Path) -> None:
    listener = Listener(tmp_path, 2)
    transport = Threads(2)
    barriers = [Barrier(transport, Events(tmp_path, rank)) for rank in range(2)]
    threads = [threading.Thread(target=lambda b=b: [b() for _ in range(5)]) for b in barriers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert listener.listen()
    assert sorted(meetings(listener.marks)) == list(range(5))
    for rank in range(2):
        lines = [json.loads(line) for line in (tmp_path / file_name(rank)).read_text().splitlines()]
        assert {line["rank"] for line in lines} == {rank}


def test_a_broken_barrier_was_not_left(tmp_path: Path) -> None:
    """Else the last mark would say that the ranks had met."""
    listener = Listener(tmp_path, 1)
    with pytest.raises(OracleError, match="barrier 0: RuntimeError: Connection closed") as raised:
        Barrier(Broken(), Events(tmp_path))()
    assert raised.value.reason == "barrier-broken"
    listener.listen()
    assert str(listener.last()[0]) == "barrier 0 enter"


def test_a_listener_hears_what_is_new_and_whole(tmp_path: Path) -> None:
    Events(tmp_path).emit("mark", name="old", n=0, state="enter")
    listener = Listener(tmp_path, 2)
    path = tmp_path / file_name(1)
    assert (listener.listen(), each(listener.last())) == (0, "rank 0: none; rank 1: none")
    Events(tmp_path, 1).emit("mark", name="new", n=3, state="enter")
    line = path.read_bytes()
    path.write_bytes(line[:-5])
    assert listener.listen() == 0
    path.write_bytes(line + line[:7])
    assert listener.listen() == len(line)
    assert listener.listen() == 0
    assert each(listener.last()) == "rank 0: none; rank 1: new 3 enter"
