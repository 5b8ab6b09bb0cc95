"""The queue: which cell runs when. References first, within the host's CPUs and memory; a MISS is tried again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

from harness.attempt import InterruptedAttempt
from harness.cells import Cell, Resources
from harness.plan import Planned
from harness.records import Record
from harness.status import Status
from harness.stop import Stop

Attempt = Callable[[Planned], Record]


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """What the host gives to cells at the same time: CPUs, and bytes of memory."""

    cpus: float
    memory: int

    def holds(self, running: Sequence[Resources], wanted: Resources) -> bool:
        """Whether one more fits. A cell that wants more than there is runs alone."""
        if not running:
            return True
        cpus = sum(resources.cpus for resources in running) + wanted.cpus
        memory = sum(resources.memory for resources in running) + wanted.memory
        return cpus <= self.cpus and memory <= self.memory


def run_all(
    queue: Sequence[Planned],
    finished: Mapping[str, Record],
    attempt: Attempt,
    capacity: Capacity,
    stop: Stop,
) -> dict[str, Record]:
    """Run every cell of the queue to a record; cells interrupted by `stop` have none. `finished`: reused records.

    An exception of `attempt` stops the others and is raised again, as is KeyboardInterrupt once all have ended.
    """
    return _Run(list(queue), dict(finished), attempt, capacity, stop).to_the_end()


def order(queue: Sequence[Planned], done: Mapping[str, object]) -> list[Planned]:
    """Cells that can start now: those whose reference is done, or not among the cells still to come."""
    waiting = {planned.cell.id for planned in queue}
    return [p for p in queue if p.cell.reference is None or p.cell.reference in done or p.cell.reference not in waiting]


class _Run:
    def __init__(
        self,
        queue: list[Planned],
        done: dict[str, Record],
        attempt: Attempt,
        capacity: Capacity,
        stop: Stop,
    ) -> None:
        self._queue = queue
        self._done = done
        self._attempt = attempt
        self._capacity = capacity
        self._stop = stop
        self._running: dict[Future[Record], Cell] = {}

    def to_the_end(self) -> dict[str, Record]:
        with ThreadPoolExecutor(max_workers=32, thread_name_prefix="cell") as pool:
            try:
                while self._queue or self._running:
                    self._start(pool)
                    self._collect()
            except BaseException:
                if not self._stop.asked:  # a second time would mean, at once
                    self._stop.ask()
                raise
        return self._done

    def _start(self, pool: ThreadPoolExecutor) -> None:
        blocked = {cell.id for cell in self._running.values()}
        for planned in order(self._queue, self._done):
            busy = [cell.resources for cell in self._running.values()]
            if self._stop.asked or planned.cell.reference in blocked:
                continue
            if self._capacity.holds(busy, planned.cell.resources):
                self._queue.remove(planned)
                self._running[pool.submit(self._attempt, planned)] = planned.cell

    def _collect(self) -> None:
        if self._stop.asked:
            self._queue.clear()
        finished, _ = wait(self._running, timeout=1.0, return_when=FIRST_COMPLETED)
        for future in finished:
            cell = self._running.pop(future)
            try:
                self._done[cell.id] = future.result()
            except InterruptedAttempt:
                continue


def with_retries(attempt: Attempt, retries: int, stop: Stop) -> Attempt:
    """The same attempt, tried again while it ends in MISS, retries are left and nobody wants to stop."""

    def retrying(planned: Planned) -> Record:
        for _ in range(retries):
            record = attempt(planned)
            if record.status is not Status.MISS or stop.asked:
                return record
        return attempt(planned)

    return retrying
