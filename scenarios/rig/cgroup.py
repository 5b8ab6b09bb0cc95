"""What the kernel says of the cell's memory, read while the cell is alive: ``cgroup.json``.

A container's state tells of an OOM kill only if its first process fell; that a child alone was killed stands here.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Iterator

FILE = "cgroup.json"
SCHEMA = 1
_UNLIMITED = 1 << 60  # v1 says "none" by the largest number of pages


@dataclass(frozen=True)
class Memory:
    """``version`` of the cgroup that is the cell's own (0: none can be read). ``oom_kill`` counts processes killed,
    ``oom`` how often memory was out, ``limit_hits`` how often the limit was met, which by itself is no trouble."""

    version: int = 0
    oom_kill: int = 0
    oom: int = 0
    limit_hits: int = 0
    peak_bytes: int | None = None
    limit_bytes: int | None = None


class Watch:
    """Of the cell's counters, from now on; ``alone``: that we are the first process of a container."""

    def __init__(self, out: Path, alone: bool, proc: Path = Path("/proc/self")) -> None:
        self._out = out
        found = locate(proc)
        self._where = found if found and (alone or _is_own(found[1])) else None
        self._base = self._read()
        self._peak = 0
        self._last = Memory()
        self.look(always=True)

    def look(self, always: bool = False) -> None:
        """Write the counters if one of them has changed. A full disk is somebody else's finding."""
        now = self._now()
        changed = (now.oom_kill, now.oom) != (self._last.oom_kill, self._last.oom)
        if changed or always:
            with contextlib.suppress(OSError):
                write(self._out / FILE, now)
                self._last = now

    def _now(self) -> Memory:
        now, base = self._read(), self._base
        self._peak = max(self._peak, now.peak_bytes or 0)
        return replace(
            now,
            oom_kill=now.oom_kill - base.oom_kill,
            oom=now.oom - base.oom,
            limit_hits=now.limit_hits - base.limit_hits,
            peak_bytes=self._peak or None,
        )

    def _read(self) -> Memory:
        if self._where is None:
            return Memory()
        version, folder = self._where
        try:
            return _version_2(folder) if version == 2 else _version_1(folder)
        except (OSError, ValueError, KeyError):
            return Memory()


def write(path: Path, memory: Memory) -> None:
    """Whole or not at all."""
    part = path.with_name(f"{path.name}.part")
    part.write_text(json.dumps({"schema": SCHEMA, **asdict(memory)}) + "\n", encoding="utf-8")
    part.replace(path)


def locate(proc: Path) -> tuple[int, Path] | None:
    """Version and folder of the cgroup that counts the memory of ``proc``; v1 where both are mounted and it counts."""
    try:
        groups = [line.split(":", 2) for line in (proc / "cgroup").read_text().splitlines()]
        mounts = list(_mounts((proc / "mountinfo").read_text()))
    except (OSError, ValueError):
        return None
    by_controller = {name: path for _, names, path in groups for name in names.split(",")}
    for version, controller in ((1, "memory"), (2, "")):
        for mount in mounts:
            if controller in by_controller and mount.version == version:
                return version, mount.folder(by_controller[controller])
    return None


@dataclass(frozen=True)
class _Mount:
    version: int
    root: str
    point: Path

    def folder(self, group: str) -> Path:
        """Where ``group`` is seen. A container sees its own at the mount point, whatever its name is outside."""
        below = os.path.relpath(group, self.root)
        inside = self.point / below
        return inside if not below.startswith("..") and inside.is_dir() else self.point


def _mounts(text: str) -> Iterator[_Mount]:
    """Those of cgroup v2, and of v1's memory controller."""
    for line in text.splitlines():
        own, _, described = line.partition(" - ")
        root, point = (_unescaped(word) for word in own.split()[3:5])
        kind, _, options = described.split(" ", 2)
        if kind == "cgroup2":
            yield _Mount(2, root, Path(point))
        elif kind == "cgroup" and "memory" in options.split(","):
            yield _Mount(1, root, Path(point))


def _unescaped(word: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), word)


def _is_own(folder: Path) -> bool:
    """Whether nobody else is counted: only we and the process that keeps us. 0 is one that cannot be seen from here."""
    try:
        counted = set(map(int, (folder / "cgroup.procs").read_text().split()))
    except (OSError, ValueError):
        return False
    return counted <= {os.getpid(), os.getppid()} - {0}


def _version_2(folder: Path) -> Memory:
    events = _pairs(folder / "memory.events")
    peak = folder / "memory.peak"  # since Linux 5.19
    limit = (folder / "memory.max").read_text().strip()
    return Memory(
        version=2,
        oom_kill=events["oom_kill"],
        oom=events["oom"],
        limit_hits=events["max"],
        peak_bytes=_number(peak if peak.exists() else folder / "memory.current"),
        limit_bytes=None if limit == "max" else int(limit),
    )


def _version_1(folder: Path) -> Memory:
    kills = _pairs(folder / "memory.oom_control").get("oom_kill", 0)  # since Linux 4.13
    limit = _number(folder / "memory.limit_in_bytes")
    return Memory(
        version=1,
        oom_kill=kills,
        oom=kills,  # v1 counts no other
        limit_hits=_number(folder / "memory.failcnt"),
        peak_bytes=_number(folder / "memory.max_usage_in_bytes"),
        limit_bytes=limit if limit < _UNLIMITED else None,
    )


def _pairs(path: Path) -> dict[str, int]:
    return {name: int(value) for name, value in (line.split() for line in path.read_text().splitlines())}


def _number(path: Path) -> int:
    return int(path.read_text())
