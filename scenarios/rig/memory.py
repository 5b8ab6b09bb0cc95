"""Memory in use, measured outside of the engine: an engine's own word that it freed something proves nothing.

Device: what the driver counts for the visible GPUs, all their processes together (the cell has them to itself).
Host: resident pages of every process of the cell, and what lies in /dev/shm.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import statistics
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable

from rig.events import Events
from rig.outcomes import OracleError
from rig.sweep import descendants

MIB = 1 << 20
GIB = 1 << 30

# Of a KV cache: what must come back, and what a measurement may be off by.
MUST_FREE = 0.8
NOISE = 0.1
# Bytes a cycle: the driver counts in 2 MiB, the host has allocators of its own.
SLOPE = {"device": 8 * MIB, "rss": 32 * MIB}

SETTLE_SECONDS = 5.0  # for memory that must go
KEEP_SECONDS = 1.0  # for memory that must not
_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Sample:
    """Bytes: ``device`` (None without a GPU), ``rss`` of the cell's processes, ``shm`` in /dev/shm."""

    device: int | None
    rss: int
    shm: int


class Meter:
    """Measures around one engine with a KV cache of ``kv`` bytes, and says so as metrics ``memory.<moment>.*``."""

    def __init__(self, events: Events, device: str, kv: int) -> None:
        self._events = events
        self._device = device
        self.kv = kv
        self._seen: dict[str, list[Sample]] = {}

    def used(self, moment: str) -> int:
        """Bytes in use where the KV cache lies."""
        return self._say(moment, sample(self._device))

    def frees(self, moment: str, before: int) -> int:
        """Within seconds a KV cache's worth is no longer in use; returns the bytes in use."""
        now = self._settled(moment, lambda used: before - used >= MUST_FREE * self.kv, SETTLE_SECONDS)
        if before - now < MUST_FREE * self.kv:
            raise OracleError("not-freed", f"{_gib(before - now)} of {_gib(self.kv)} GiB KV cache came back")
        return now

    def keeps(self, moment: str, before: int) -> int:
        """Nothing that is larger than noise was freed; returns the bytes in use."""
        now = self._settled(moment, lambda used: before - used > NOISE * self.kv, KEEP_SECONDS)
        if before - now > NOISE * self.kv:
            raise OracleError("freed", f"{_gib(before - now)} GiB came back that were not to be given")
        return now

    def level(self, moment: str) -> None:
        """No growth over what was seen at this moment; the first time pays for what is allocated once."""
        for kind, limit in SLOPE.items():
            values = [value for sample in self._seen[moment][1:] if (value := getattr(sample, kind)) is not None]
            if values:
                slope = statistics.linear_regression(range(len(values)), values).slope
                self._events.metric(f"memory.{moment}.{kind}.slope", slope, "bytes/cycle")
                if slope > limit:
                    listed = ", ".join(map(_gib, values))
                    raise OracleError("grows", f"{moment}: {kind} {slope / MIB:.1f} MiB a cycle, {listed} GiB")

    def _settled(self, moment: str, good: Callable[[int], bool], seconds: float) -> int:
        end = time.monotonic() + seconds
        found = sample(self._device)
        while not good(_relevant(found)) and time.monotonic() < end:
            time.sleep(0.1)
            found = sample(self._device)
        return self._say(moment, found)

    def _say(self, moment: str, found: Sample) -> int:
        self._seen.setdefault(moment, []).append(found)
        for name, value in (("device", found.device), ("rss", found.rss), ("shm", found.shm)):
            if value is not None:
                self._events.metric(f"memory.{moment}.{name}", value, "bytes")
        return _relevant(found)


def sample(device: str) -> Sample:
    """What is in use now; RuntimeError where there is a GPU and nobody to ask about it."""
    shm = os.statvfs("/dev/shm")  # noqa: S108 (measured, not used)
    return Sample(
        device=device_bytes() if device == "cuda" else None,
        rss=sum(map(_resident, processes())),
        shm=(shm.f_blocks - shm.f_bfree) * shm.f_frsize,
    )


def device_bytes() -> int:
    """Bytes in use on the visible GPUs, by NVML or else by nvidia-smi (in steps of 1 MiB)."""
    for name in ("pynvml", "vllm.third_party.pynvml"):
        with contextlib.suppress(ImportError):
            return _by_nvml(importlib.import_module(name))
    return _by_smi()


def visible() -> list[str] | None:
    """UUIDs or numbers of the GPUs that CUDA may use, or None: all. A container has only its own."""
    named = [part.strip() for part in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    return [part for part in named if part] or None


def _by_nvml(nvml: Any) -> int:
    nvml.nvmlInit()
    try:
        names = visible() or [str(number) for number in range(nvml.nvmlDeviceGetCount())]
        return sum(int(nvml.nvmlDeviceGetMemoryInfo(_handle(nvml, name)).used) for name in names)
    finally:
        nvml.nvmlShutdown()


def _handle(nvml: Any, name: str) -> Any:
    return nvml.nvmlDeviceGetHandleByIndex(int(name)) if name.isdigit() else nvml.nvmlDeviceGetHandleByUUID(name)


def _by_smi() -> int:
    words = ["nvidia-smi", "--query-gpu=index,uuid,memory.used", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError) as err:
        raise RuntimeError("device memory cannot be measured: neither pynvml nor nvidia-smi works here") from err
    rows = [[part.strip() for part in line.split(",")] for line in done.stdout.splitlines()]
    wanted = visible()
    return sum(int(used) * MIB for index, uuid, used in rows if wanted is None or {index, uuid} & set(wanted))


def processes() -> list[int]:
    """All processes of this attempt: those whose environment says so, this one, and whatever they started.

    The environment alone will not do: a process that sets its title (V1's engine core does) writes over it. Nor will
    the cell's id: without containers the same cell may run twice on a host, its out folder is one attempt's only.
    """
    mark = f"VLLM_MATRIX_OUT={os.environ.get('VLLM_MATRIX_OUT', '')}".encode()
    marked = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit() and _carries(entry, mark)]
    roots = {os.getpid(), *marked}
    return sorted(roots.union(*map(descendants, roots)))


def _carries(entry: Path, mark: bytes) -> bool:
    try:
        return mark in (entry / "environ").read_bytes().split(b"\0")
    except OSError:  # gone, or somebody else's
        return False


def _resident(pid: int) -> int:
    try:
        return int((Path("/proc") / str(pid) / "statm").read_text().split()[1]) * _PAGE
    except (OSError, IndexError):  # gone meanwhile; a zombie has no pages
        return 0


def _relevant(found: Sample) -> int:
    return found.rss if found.device is None else found.device


def _gib(value: float) -> str:
    return f"{value / GIB:.2f}"
