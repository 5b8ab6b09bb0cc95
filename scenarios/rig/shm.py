"""What a cell leaves in ``/dev/shm``: named, and removed.

In a container the folder is the cell's alone, and all that is new is its own. Elsewhere it is everybody's: there a file
goes only if it is new, was seen in the hands of a process of the cell, and is held by no living process.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections import Counter
from pathlib import Path
from typing import Callable, Collection, Iterable

FOLDER = Path("/dev/shm")  # noqa: S108
LOOKS = 10  # for the holder of a file that is new


class Leftovers:
    """Of one cell, which begins now. ``members`` finds its processes."""

    def __init__(self, alone: bool, members: Callable[[], Collection[int]], folder: Path = FOLDER) -> None:
        self._alone = alone
        self._members = members
        self._folder = folder
        self._before = set(self._names())
        self._seen: set[str] = set()
        self._looks: Counter[str] = Counter()

    def look(self) -> None:
        """Whose is what is new? Now and then, while the cell lives; afterwards nobody could tell."""
        if self._alone:
            return
        new = {name for name in self._new() if name not in self._seen and self._looks[name] < LOOKS}
        if new:
            self._seen |= new & held_files(self._folder, self._members())
            self._looks.update(new)

    def remove(self) -> dict[str, int]:
        """Remove what the cell has left; bytes by name of what was."""
        left = [name for name in self._new() if self._alone or name in self._seen]
        if left and not self._alone:
            held = held_files(self._folder)
            left = [name for name in left if name not in held]
        return {name: size for name in left if (size := self._remove(name)) is not None}

    def _new(self) -> list[str]:
        return [name for name in self._names() if name not in self._before and self._is_ours(name)]

    def _names(self) -> list[str]:
        try:
            return sorted(os.listdir(self._folder))  # noqa: PTH208
        except OSError:
            return []

    def _is_ours(self, name: str) -> bool:
        try:
            return (self._folder / name).lstat().st_uid == os.getuid()
        except OSError:
            return False

    def _remove(self, name: str) -> int | None:
        path = self._folder / name
        try:
            size = path.lstat().st_blocks * 512
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
        except OSError:
            return None  # gone meanwhile
        return size


def held_files(folder: Path, pids: Iterable[int] | None = None) -> set[str]:
    """Names of files in ``folder`` that a process has mapped or open: of ``pids``, or of all that we may see."""
    prefix = f"{folder}/"
    entries = Path("/proc").glob("[0-9]*") if pids is None else (Path(f"/proc/{pid}") for pid in pids)
    found = (path for entry in entries for path in (*_mapped(entry), *_open(entry)))
    return {path[len(prefix) :].split("/")[0] for path in found if path.startswith(prefix)}


def _mapped(entry: Path) -> list[str]:
    with contextlib.suppress(OSError):
        lines = (entry / "maps").read_bytes().splitlines()
        return [os.fsdecode(line[line.index(b"/") :]) for line in lines if b"/" in line]
    return []


def _open(entry: Path) -> list[str]:
    found = []
    with contextlib.suppress(OSError):
        for file in (entry / "fd").iterdir():
            with contextlib.suppress(OSError):
                found.append(str(file.readlink()))
    return found
