"""Who runs when: cells with real leases, in one process and in two."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import pytest

from harness.attempt import InterruptedAttempt
from harness.cells import Cell, Deadlines, Resources
from harness.errors import InfrastructureError
from harness.leases import Lease, Leases, Wish
from harness.plan import Planned
from harness.records import Host, Record, Revision
from harness.scheduler import run_all, with_retries
from harness.share import Share
from harness.status import Status
from harness.stop import Stop
from tests.conftest import ROOT

GIB = 1 << 30


def planned(name: str, cpus: float = 1, memory: int = GIB, reference: str | None = None) -> Planned:
    cell = Cell(
        target="t",
        vllm="0.8.5",
        python="3.11",
        device="cpu",
        scenario=name,
        file="test_a.py",
        resources=Resources(cpus=cpus, memory=memory, shm=1, gpus=0),
        deadlines=Deadlines(total=60, silence=60),
        reference=f"t@cpu/{reference}" if reference else None,
    )
    return Planned(cell=cell, selected=True, digest="d", facts={}, action="run", reason="")


def record(one: Planned, status: Status = Status.PASS) -> Record:
    now = datetime.now(UTC)
    return Record(
        run="r",
        cell=one.cell.id,
        attempt=1,
        target="t",
        vllm="0.8.5",
        python="3.11",
        device="cpu",
        scenario=one.cell.scenario,
        params={},
        axes={},
        digest="d",
        facts={},
        backend="scripted",
        started=now,
        ended=now,
        status=status,
        revision=Revision(version="0"),
        host=Host(machine="x", cpus=1, memory=1),
    )


@dataclass
class Cells:
    """Cells that take `seconds`, and notes on who ran beside whom."""

    seconds: float = 0.05
    act: Callable[[Planned], None] = lambda _: None
    running: list[str] = field(default_factory=list)
    most: int = 0
    together: list[set[str]] = field(default_factory=list)
    order: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    waited: list[tuple[str, tuple[str, ...]]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def attempt(self, one: Planned, lease: Lease) -> Record:
        assert lease.intact
        name = one.cell.scenario
        with self.lock:
            self.running.append(name)
            self.order.append(name)
            self.together.append(set(self.running))
            self.most = max(self.most, len(self.running))
        try:
            time.sleep(self.seconds)
            self.act(one)
        finally:
            with self.lock:
                self.running.remove(name)
        return record(one)

    def missed(self, one: Planned, error: InfrastructureError) -> Record:
        self.errors.append(error.message)
        return record(one, Status.MISS)

    def waits(self, cell: Cell, holders: Sequence[str]) -> None:
        self.waited.append((cell.scenario, tuple(holders)))


@pytest.fixture
def leases(leases_of_its_own: Path) -> Leases:
    return Leases(4, 8 * GIB, leases_of_its_own)


def is_free(leases: Leases) -> bool:
    lease = leases.attempt(Wish(cpus=4, memory=8 * GIB), "x")
    if lease is not None:
        lease.release()
    return lease is not None


def test_cells_run_side_by_side_up_to_what_there_is(leases: Leases) -> None:
    cells = Cells()
    done = run_all([planned(name) for name in "abcdefgh"], {}, cells, Share(leases), Stop())
    assert cells.most == 4
    assert {one.status for one in done.values()} == {Status.PASS}
    assert is_free(leases)


def test_memory_counts_as_cpus_do(leases: Leases) -> None:
    cells = Cells()
    run_all([planned(name, memory=4 * GIB) for name in "abcd"], {}, cells, Share(leases), Stop())
    assert cells.most == 2


@pytest.mark.parametrize("cpus", [1, 2])
def test_engines_run_one_at_a_time_on_few_cores(leases_of_its_own: Path, cpus: int) -> None:
    cells = Cells()
    share = Share(Leases(cpus, 64 * GIB, leases_of_its_own))
    run_all([planned(name, cpus=2) for name in "abcd"], {}, cells, share, Stop())
    assert cells.most == 1


def test_a_cell_that_wants_more_than_there_is_runs_alone(leases: Leases) -> None:
    cells = Cells()
    run_all([planned("a"), planned("big", cpus=64, memory=999 * GIB), planned("b")], {}, cells, Share(leases), Stop())
    assert sorted(cells.order) == ["a", "b", "big"]
    assert all(some == {"big"} for some in cells.together if "big" in some)


def test_references_come_first(leases: Leases) -> None:
    cells = Cells()
    run_all([planned("a", reference="c"), planned("b"), planned("c")], {}, cells, Share(leases), Stop())
    assert cells.order[-1] == "a"
    assert {"a", "c"} not in cells.together


def test_a_lease_ends_with_its_attempt_however_that_ends(leases: Leases) -> None:
    def interrupted(one: Planned) -> None:
        raise InterruptedAttempt

    def broken(one: Planned) -> None:
        raise ZeroDivisionError

    assert run_all([planned("a")], {}, Cells(act=interrupted), Share(leases), Stop()) == {}
    assert is_free(leases)
    with pytest.raises(ZeroDivisionError):
        run_all([planned("a"), planned("b")], {}, Cells(act=broken), Share(leases), Stop())
    assert is_free(leases)


def test_a_cell_waits_for_another_harness_and_says_for_whom(leases: Leases) -> None:
    share, cells, stop = Share(leases), Cells(), Stop()
    other = other_harness(leases)
    thread = threading.Thread(target=run_all, args=([planned("a")], {}, cells, share, stop))
    thread.start()
    wait_for(lambda: cells.waited)
    name, holders = cells.waited[0]
    assert name == "a"
    assert holders[0].startswith(f"4 of 4 CPUs are held by pid {other.pid} of ")
    assert holders[0].endswith("for theirs")
    assert cells.order == []
    other.kill()
    other.communicate()
    thread.join(20)
    assert cells.order == ["a"]


def test_waiting_for_cells_of_ones_own_names_nobody(leases: Leases) -> None:
    cells = Cells()
    run_all([planned("a", cpus=4), planned("b", cpus=4)], {}, cells, Share(leases), Stop())
    assert set(cells.waited) == {("b", ())}


def test_a_stop_ends_the_wait(leases: Leases) -> None:
    cells, stop = Cells(), Stop()
    other = other_harness(leases)
    begin = time.monotonic()
    threading.Timer(0.3, stop.ask).start()
    assert run_all([planned("a")], {}, cells, Share(leases), stop) == {}
    assert time.monotonic() - begin < 10
    assert cells.order == []
    other.kill()
    other.communicate()


def test_ctrl_c_ends_the_wait(leases: Leases) -> None:
    import _thread

    stop = Stop()
    other = other_harness(leases)
    threading.Timer(0.3, _thread.interrupt_main).start()
    with pytest.raises(KeyboardInterrupt):
        run_all([planned("a")], {}, Cells(), Share(leases), stop)
    assert stop.asked
    assert not stop.at_once
    other.kill()
    other.communicate()
    assert is_free(leases)


def test_leases_that_cannot_be_had_are_a_miss_and_end_nothing(leases_of_its_own: Path) -> None:
    leases_of_its_own.touch()
    cells = Cells()
    share = Share(Leases(4, GIB, leases_of_its_own))
    done = run_all([planned("a"), planned("b", reference="a")], {}, cells, share, Stop())
    assert [one.status for one in done.values()] == [Status.MISS, Status.MISS]
    assert "cannot be used for leases" in cells.errors[0]


def test_a_miss_is_tried_again_under_the_same_lease(leases: Leases) -> None:
    seen: list[Lease] = []

    def misses_once(one: Planned, lease: Lease) -> Record:
        assert lease.intact
        seen.append(lease)
        return record(one, Status.MISS if len(seen) == 1 else Status.PASS)

    with leases.attempt(Wish(cpus=1), "x") or pytest.fail("not free") as lease:
        assert with_retries(misses_once, 2, Stop())(planned("a"), lease).status is Status.PASS
    assert len(seen) == 2
    assert seen[0] is seen[1]


HOLDER = """
import sys
from pathlib import Path
from harness.leases import Leases, Wish
lease = Leases(4, 8 << 30, Path(sys.argv[1])).attempt(Wish(cpus=4), "theirs")
print(lease is not None, flush=True)
sys.stdin.read()
"""

# Every cell notes for how many CPUs it stands, under a lock of its own that has nothing to do with leases.
HARNESS = """
import fcntl, sys, time
from pathlib import Path
from harness.leases import Leases
from harness.scheduler import run_all
from harness.share import Share
from harness.stop import Stop
from tests.test_scheduler import Cells, planned
book = Path(sys.argv[2])

def add(cpus):
    with book.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        used = sum(map(int, file.read().split())) + cpus
        print(cpus, file=file, flush=True)
    assert 0 <= used <= 4, used

def act(one):
    cpus = int(one.cell.resources.cpus)
    add(cpus)
    time.sleep(0.02)
    add(-cpus)

queue = [planned(f"c{number}", cpus=1 + number % 3) for number in range(12)]
done = run_all(queue, {}, Cells(seconds=0, act=act), Share(Leases(4, 64 << 30, Path(sys.argv[1]))), Stop())
assert len(done) == 12
"""


def other_harness(leases: Leases) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", HOLDER, str(leases._folder)]
    other = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert other.stdout
    assert other.stdout.readline().strip() == "True"
    return other


def wait_for(happened: Callable[[], object]) -> None:
    until = time.monotonic() + 20
    while not happened():
        assert time.monotonic() < until
        time.sleep(0.02)


def test_two_harnesses_never_use_more_cpus_than_there_are(leases_of_its_own: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", HARNESS, str(leases_of_its_own), str(tmp_path / "book")]
    both = [subprocess.Popen(command, cwd=ROOT) for _ in range(2)]
    assert [process.wait(100) for process in both] == [0, 0]
    entries = [int(line) for line in (tmp_path / "book").read_text().split()]
    assert (len(entries), sum(entries)) == (48, 0)
