"""What a run gets of its host: CPUs, memory and GPUs by leases, and GPUs on which nobody else is.

All harnesses of a host share them, so none of it is counted in here: the lock files of `leases` decide.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from harness.cells import Cell, Resources
from harness.errors import InfrastructureError
from harness.gpus import IDLE, Gpu, Nvml, allowed, idle_first, left_behind, wait_until_free
from harness.leases import FOLDER, Lease, Leases, Wish
from harness.records import Host, PropertyValue
from harness.stop import Stop

VARIABLE = "VLLM_MATRIX_LEASES"  # another folder for the leases; all who share the host have to name the same
OVERHEAD = 2 << 30  # bytes of the host's memory that cells leave alone
BEFORE, AFTER = 60.0, 30.0  # seconds for memory of a GPU to become free: before a cell, and after it
_POLL = 0.5  # seconds

Findings = dict[str, PropertyValue | tuple[PropertyValue, ...]]


@dataclass(frozen=True, kw_only=True)
class OnGpus:
    """The GPUs of one attempt. `findings` is called when nothing of the attempt is left, and may take AFTER seconds."""

    uuids: tuple[str, ...] = ()
    axes: Mapping[str, str] = field(default_factory=dict)
    findings: Callable[[], Findings] = dict


NO_GPUS = OnGpus()


class Share:
    """One run's view of its host. `gpus` are those that it may use, `notes` say why there are no more.

    Where the folder of the leases cannot be used, every method that leases raises InfrastructureError.
    """

    def __init__(
        self, leases: Leases, gpus: Iterable[Gpu] = (), nvml: Nvml | None = None, notes: Iterable[str] = ()
    ) -> None:
        self._leases = leases
        self._gpus = tuple(gpus)
        self._nvml = nvml
        self._notes = tuple(notes)

    def lacks(self, cell: Cell) -> str:
        """Why the cell cannot get its GPUs however long it waits, or nothing. Of the rest it gets all there is."""
        wanted, there = cell.resources.gpus, len(self._gpus)
        if wanted <= there:
            return ""
        why = "; ".join(self._notes) or f"this host has {there}"
        return f"gpu: the cell needs {_counted(wanted)}, and {there or 'none'} may be used here: {why}"

    def lease(self, resources: Resources, who: str) -> Lease | None:
        """All that is wanted or None; it does not wait. `who` is what others are shown."""
        among = self._choice(resources.gpus)
        return None if among is None else self._leases.attempt(Wish.of(resources, among), who)

    def wait(self, resources: Resources, who: str, say: Callable[[str], None], stop: Stop) -> Lease:
        """The same, however long it takes; `say` is told what for. Raises KeyboardInterrupt once `stop` is set."""
        while not stop.asked:
            lease = self.lease(resources, who)
            if lease is not None:
                return lease
            say(waiting(self.in_the_way(resources)))
            time.sleep(_POLL)
        raise KeyboardInterrupt

    def in_the_way(self, resources: Resources) -> tuple[str, ...]:
        """Which other harnesses hold some of what is wanted, for people."""
        held = self._leases.holders(Wish.of(resources, [gpu.uuid for gpu in self._gpus]))
        return tuple(line for line in held if f"held by pid {os.getpid()} of " not in line)

    def ready(self, lease: Lease, stop: Stop) -> OnGpus | None:
        """Wait until the memory of the leased GPUs is free; None if `stop` ended the waiting.

        Raises GpuBusyError that names who is on them, InfrastructureError where one no longer answers.
        """
        if not lease.gpus or self._nvml is None:
            return NO_GPUS
        if not wait_until_free(self._nvml, lease.gpus, BEFORE, lambda: stop.asked):
            return None
        before = {uuid: self._nvml.used(uuid) for uuid in lease.gpus}
        names = {gpu.name for gpu in self._gpus if gpu.uuid in lease.gpus}
        return OnGpus(
            uuids=lease.gpus,
            axes={"gpu": ", ".join(sorted(names))},
            findings=lambda: self._findings(before, stop),
        )

    def _findings(self, before: Mapping[str, int], stop: Stop) -> Findings:
        """Which GPUs it was, and what memory of theirs did not come back."""
        found: Findings = {"gpu.uuids": tuple(before)}
        if self._nvml is None:
            return found
        try:
            left = tuple(one.text for one in left_behind(self._nvml, before, AFTER, lambda: stop.asked))
        except InfrastructureError as error:
            left = (error.message,)
        return found | {"leftover.gpu": left} if left and not stop.asked else found

    def _choice(self, count: int) -> tuple[str, ...] | None:
        """GPUs to choose from, the best first; None where it is better to wait.

        One with memory in use that nobody leases is somebody's who keeps to no lease. It is taken only when there is no
        lease whose end would give a better one: then the wait for its memory says who it is.
        """
        if not count:
            return ()
        now = [replace(gpu, used=self._used(gpu)) for gpu in self._gpus]
        idle = idle_first(gpu for gpu in now if gpu.used <= IDLE)
        if len(idle) >= count:
            return idle
        uuids = idle_first(now)
        return None if self._leases.holders(Wish(gpus=1, among=uuids)) else uuids

    def _used(self, gpu: Gpu) -> int:
        with contextlib.suppress(InfrastructureError):  # one that is lost is not chosen if there are others
            return self._nvml.used(gpu.uuid) if self._nvml else gpu.used
        return gpu.total


def _counted(gpus: int) -> str:
    return "a GPU" if gpus == 1 else f"{gpus} GPUs"


def waiting(holders: Iterable[str]) -> str:
    """What a cell without a lease does, in words."""
    return f"waits: {'; '.join(holders) or 'for other cells'}"


@contextlib.contextmanager
def opened(cells: Iterable[Cell], host: Host, environ: Mapping[str, str]) -> Iterator[Share]:
    """This host, for these cells; its GPUs are looked at only where one of them may need any.

    Raises ConfigurationError where it is not clear which GPUs CUDA_VISIBLE_DEVICES means.
    """
    leases = Leases(host.cpus, host.memory - OVERHEAD, Path(environ.get(VARIABLE) or FOLDER))
    if not any(cell.resources.gpus or cell.device == "cuda" for cell in cells):
        yield Share(leases)
        return
    try:
        nvml = Nvml()
    except InfrastructureError as error:
        yield Share(leases, notes=(error.message,))
        return
    with contextlib.closing(nvml):
        may = allowed(nvml.inventory(), environ)
        yield Share(leases, may.gpus, nvml, may.notes)
