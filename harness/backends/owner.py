"""Who started a cell, so that it can be told later, by somebody else, whether he still lives."""

from __future__ import annotations

import contextlib
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path

LABEL = "vllm-matrix.owner"  # of a container
VARIABLE = "VLLM_MATRIX_OWNER"  # of every process of a cell without one
FILE = ".owner"  # in its scratch folder


def owner() -> str:
    """Ours: boot, PID namespace, PID, start time of the process in ticks since boot."""
    return str(_self())


@dataclass(frozen=True)
class Owner:
    """A process of some boot and some PID namespace, of this machine or of another."""

    boot: str
    namespace: str
    pid: int
    started: int

    @classmethod
    def parse(cls, text: str) -> Owner | None:
        """None for what is no owner's mark: that is nobody's to remove."""
        words = text.split()
        if len(words) != 4 or not all(re.fullmatch(r"[0-9]{1,19}", word) for word in words[2:]):
            return None
        return cls(words[0], words[1], int(words[2]), int(words[3]))

    def __str__(self) -> str:
        return f"{self.boot} {self.namespace} {self.pid} {self.started}"

    @property
    def is_me(self) -> bool:
        return self == _self()

    def has_ended(self, made: float, runs: bool = False) -> bool:
        """Whether it is sure that it has; `made` is when its property was (seconds since the epoch), `runs` if it does.

        Of another PID namespace nothing is known. Of another boot it is sure only where the property is older than
        ours, and has not gone on: else it belongs to another machine.
        """
        mine = _self()
        if self.boot != mine.boot:
            return not runs and made < time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
        return self.namespace == mine.namespace and _started(self.pid) != self.started


def _self() -> Owner:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    namespace = Path("/proc/self/ns/pid").readlink()
    return Owner(boot, str(namespace), os.getpid(), _started(os.getpid()) or 0)


def _started(pid: int) -> int | None:
    """When a process was; None if there is none, or only what is left of one until somebody asks how it ended."""
    with contextlib.suppress(OSError, IndexError, ValueError):
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        return None if fields[0] in "ZX" else int(fields[19])
    return None
