"""How much room a cell takes, and a little of it kept back for what is to be said of the cell in the end."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

LIMIT = 4 << 30  # bytes that a cell may leave in /out
ROOM = 1 << 20  # bytes kept back: a record, and what goes with it
_BLOCK = 512
_EVERY = 2.0  # seconds between two looks
_ENTRY = 4096  # bytes that any file or folder is taken for at least: millions of empty ones fill a disk too
_ROOM = ".room"


def used(folder: Path, limit: int | None = None) -> int:
    """Bytes on the disk of all that is in the folder; beyond `limit` it no longer counts on.

    Of a folder that changes meanwhile, or holds what may not be read, it is what could be seen. No link is followed,
    a file with several names counts once. What a process has open and removed is not seen.
    """
    total = 0
    seen: set[tuple[int, int]] = set()
    for state in _states(folder):
        if state.st_nlink > 1 and (key := (state.st_dev, state.st_ino)) not in seen:
            seen.add(key)
        elif state.st_nlink > 1:
            continue
        total += max(state.st_blocks * _BLOCK, _ENTRY)
        if limit is not None and total > limit:
            break
    return total


class Guard:
    """Whether a cell has left too much, looked at now and then: it takes a second where there are many files."""

    def __init__(self, folder: Path, limit: int = LIMIT) -> None:
        self._folder = folder
        self._limit = limit
        self._next = 0.0

    def exceeded(self) -> bool:
        if time.monotonic() < self._next:
            return False
        begin = time.monotonic()
        found = used(self._folder, self._limit) > self._limit
        self._next = time.monotonic() + max(_EVERY, 10 * (time.monotonic() - begin))
        return found


def _states(folder: Path) -> Iterator[os.stat_result]:
    queue = [str(folder)]
    while queue:
        with contextlib.suppress(OSError), os.scandir(queue.pop()) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    yield entry.stat(follow_symlinks=False)
                    if entry.is_dir(follow_symlinks=False):
                        queue.append(entry.path)


def keep_room(folder: Path) -> None:
    """Take it, so that a cell that fills the disk leaves some. Raises OSError where there is none now."""
    try:
        (folder / _ROOM).write_bytes(os.urandom(ROOM))  # zeros take nothing on a disk that compresses
    except OSError as error:
        give_room(folder)
        raise OSError(error.errno, error.strerror, str(folder)) from error  # a failed write names no file


def give_room(folder: Path) -> None:
    """Give it back: the cell has ended."""
    with contextlib.suppress(OSError):
        (folder / _ROOM).unlink()
