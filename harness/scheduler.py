"""The queue: which cell runs when. References first, each with its lease of the host; a MISS is tried again."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Protocol

from harness.attempt import InterruptedAttempt
from harness.cells import Cell, Resources
from harness.errors import InfrastructureError
from harness.leases import Lease
from harness.plan import Planned
from harness.records import Record
from harness.share import Share
from harness.status import Status
from harness.stop import Stop, aside

WORKERS = 32  # cells at the same time
POLL = 0.5  # seconds after which a lease is asked for again that another harness held

Attempt = Callable[[Planned, Lease], Record]


class Callbacks(Protocol):
    """What a cell's turn means; called in several threads."""

    def attempt(self, planned: Planned, lease: Lease) -> Record:
        """Run it to a record. Raises InterruptedAttempt where the run is to stop."""

    def missed(self, planned: Planned, error: InfrastructureError) -> Record:
        """Its lease cannot be had at all."""

    def waits(self, cell: Cell, holders: Sequence[str]) -> None:
        """It could run and has no lease; `holders`: the other harnesses that hold what it wants, if they do."""


def run_all(
    queue: Sequence[Planned], finished: Mapping[str, Record], callbacks: Callbacks, share: Share, stop: Stop
) -> dict[str, Record]:
    """Run every cell of the queue to a record; cells interrupted by `stop` have none. `finished`: reused records.

    A cell holds its lease until its attempt has ended, in whatever way.
    An exception of `attempt` stops the others and is raised again, as is KeyboardInterrupt once all have ended.
    """
    run = _Run(list(queue), dict(finished), callbacks, share, stop)
    return aside(run.to_the_end, stop, "queue")


def order(queue: Sequence[Planned], done: Mapping[str, object]) -> list[Planned]:
    """Cells that can start now: those whose reference is done, or not among the cells still to come."""
    waiting = {planned.cell.id for planned in queue}
    return [p for p in queue if p.cell.reference is None or p.cell.reference in done or p.cell.reference not in waiting]


class _Run:
    def __init__(
        self, queue: list[Planned], done: dict[str, Record], callbacks: Callbacks, share: Share, stop: Stop
    ) -> None:
        self._queue = queue
        self._done = done
        self._callbacks = callbacks
        self._share = share
        self._stop = stop
        self._running: dict[Future[Record], Cell] = {}

    def to_the_end(self) -> dict[str, Record]:
        with ThreadPoolExecutor(max_workers=WORKERS, thread_name_prefix="cell") as pool:
            try:
                while self._queue or self._running:
                    self._start(pool)
                    self._collect()
            except BaseException:
                if not self._stop.asked:
                    self._stop.ask()
                raise
        return self._done

    def _start(self, pool: ThreadPoolExecutor) -> None:
        blocked = {cell.id for cell in self._running.values()}
        refused: set[Resources] = set()
        for planned in order(self._queue, self._done):
            cell = planned.cell
            if self._stop.asked or len(self._running) == WORKERS:
                return
            if cell.reference in blocked or cell.resources in refused:
                continue
            try:
                self._start_one(pool, planned, refused)
            except InfrastructureError as error:
                self._queue.remove(planned)
                self._done[cell.id] = self._callbacks.missed(planned, error)

    def _start_one(self, pool: ThreadPoolExecutor, planned: Planned, refused: set[Resources]) -> None:
        resources = planned.cell.resources
        lease = self._share.lease(resources, planned.cell.id)
        if lease is not None:
            self._queue.remove(planned)
            self._running[pool.submit(self._hold, planned, lease)] = planned.cell
            return
        if not refused:  # the next in the queue; it stands for those behind it
            self._callbacks.waits(planned.cell, self._share.in_the_way(resources))
        refused.add(resources)

    def _hold(self, planned: Planned, lease: Lease) -> Record:
        with lease:
            return self._callbacks.attempt(planned, lease)

    def _collect(self) -> None:
        if self._stop.asked:
            self._queue.clear()
        if not self._running:
            time.sleep(POLL if self._queue else 0)
        finished, _ = wait(self._running, timeout=POLL, return_when=FIRST_COMPLETED)
        for future in finished:
            cell = self._running.pop(future)
            try:
                self._done[cell.id] = future.result()
            except InterruptedAttempt:
                continue


def with_retries(attempt: Attempt, retries: int, stop: Stop) -> Attempt:
    """The same attempt, tried again while it ends in MISS, retries are left and nobody wants to stop."""

    def retrying(planned: Planned, lease: Lease) -> Record:
        for _ in range(retries):
            record = attempt(planned, lease)
            if record.status is not Status.MISS or stop.asked:
                return record
        return attempt(planned, lease)

    return retrying
