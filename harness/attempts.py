"""The attempts of a run: each in its place, with its reference and its GPUs, and tried again on MISS."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.attempt import InterruptedAttempt, missed, run_attempt
from harness.backends.base import Backend
from harness.cells import Cell
from harness.errors import InfrastructureError
from harness.job import Context, Job
from harness.leases import Lease
from harness.needs import Pair
from harness.plan import Planned
from harness.recorder import artifact
from harness.records import ImageRef, Record, attempt_folder, next_attempt, records_of
from harness.scheduler import with_retries
from harness.share import Share, waiting
from harness.status import Status
from harness.stop import Stop
from harness.tail import Live
from harness.views.terminal import Progress

REFERENCE = "reference.json"


@dataclass(frozen=True, kw_only=True)
class Attempts:
    """What the scheduler calls, for the cells of one run. `kept` is called when a record has been written."""

    images: Mapping[Pair, ImageRef]
    context: Context
    backend: Backend
    progress: Progress
    share: Share
    stop: Stop
    retries: int
    kept: Callable[[], None] = lambda: None

    def attempt(self, planned: Planned, lease: Lease) -> Record:
        return with_retries(self._once, self.retries, self.stop)(planned, lease)

    def missed(self, planned: Planned, error: InfrastructureError) -> Record:
        record = self._missed(planned, f"lease: {error.message}")
        self.progress.ended(planned.cell.id, record)
        return record

    def waits(self, cell: Cell, holders: Sequence[str]) -> None:
        """Shown where another harness is the reason; that others of this run are first can be seen."""
        if holders:
            self.progress.update(cell.id, Live(doing=waiting(holders)))

    def _once(self, planned: Planned, lease: Lease) -> Record:
        name = planned.cell.id
        self.progress.started(name)
        record = None
        try:
            record = self._record(planned, lease)
            self.kept()
        finally:
            self.progress.ended(name, record)
        return record

    def _record(self, planned: Planned, lease: Lease) -> Record:
        name = planned.cell.id
        if lease.gpus:
            self.progress.update(name, Live(doing="waits for free memory on its GPUs"))
        try:
            gpus = self.share.ready(lease, self.stop)
        except InfrastructureError as error:
            return self._missed(planned, f"gpu: {error.message}")
        if gpus is None:
            raise InterruptedAttempt
        job = Job(
            planned=planned,
            number=next_attempt(self.context.results, self.context.run, name),
            image=self.images[planned.cell.target, planned.cell.device],
            reference=find_reference(self.context, planned.cell),
            gpus=gpus,
            leased=lambda: lease.intact,
        )
        return run_attempt(job, self.context, self.backend, lambda live: self.progress.update(name, live), self.stop)

    def _missed(self, planned: Planned, reason: str) -> Record:
        return missed(planned, self.context, self.backend.name, reason, "")


def find_reference(context: Context, cell: Cell) -> Path | None:
    """The reference.json that this run's reference cell left, if it did and it is what its record says."""
    if cell.reference is None:
        return None
    record = records_of(context.results / "runs" / context.run).get(cell.reference)
    if record is None or record.status is Status.MISS:
        return None
    return artifact(attempt_folder(context.results, record.run, record.cell, record.attempt), record, REFERENCE)
