"""Leases of GPUs, CPUs and memory among all harnesses and users of a host: file locks that die with their holder.

All lock files stand in one folder, are open to every user, and are never removed by us. What is written in them says
who holds what, for people: nothing is ever decided by it. Whoever wants something takes the guard, tries what it needs
without waiting, and keeps all of it or nothing. Nobody waits while holding a lease, so there are no deadlocks.

It is an agreement among those who keep to it and no protection: any user can hold a lock for ever. What another user
cannot do is make us write elsewhere: links, and everything that is no regular file, are refused.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import pwd
import re
import stat
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from io import FileIO
from pathlib import Path
from typing import NamedTuple, TypeVar

from harness.cells import Resources
from harness.errors import InfrastructureError

# The same for every user, whatever TMPDIR says. Elsewhere than on Debian /run/lock is closed to users, and out of
# /dev/shm a user's files are removed when he logs out (RemoveIPC of systemd-logind).
FOLDER = Path("/tmp/vllm-matrix-leases")  # noqa: S108 - a meeting point, with planted files in mind

_GUARD, _LOCK, _SLOTS = "guard.lock", "{}.lock", "{}.slots"
_UNITS = {"cpus": "CPUs", "memory": "GiB of memory"}
_GPU = re.compile(r"GPU-[0-9A-Fa-f-]{1,64}")
_GIB = 1 << 30
_WIDTH = 256  # bytes of a slot in its file: they are what is locked, and say who holds it
_ELSEWHERE = "Leases need Linux 3.15 or newer, and /tmp on a disk of this machine."
_PATIENCE = 1.0  # seconds for what others are about to finish: making a file, or the guard

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class Wish:
    """What a cell wants to itself: `gpus` of those `among` (UUIDs, the best first), CPUs, and bytes of memory."""

    gpus: int = 0
    among: tuple[str, ...] = ()
    cpus: float = 0.0
    memory: int = 0

    @classmethod
    def of(cls, resources: Resources, among: Sequence[str] = ()) -> Wish:
        """What a cell's resources ask for."""
        return cls(gpus=resources.gpus, among=tuple(among), cpus=resources.cpus, memory=resources.memory)

    @property
    def candidates(self) -> list[str]:
        """GPUs in the order in which their locks are tried; none where none is wanted."""
        return sorted(set(self.among)) if self.gpus else []

    @property
    def slots(self) -> dict[str, int]:
        """How many of each kind, in the order in which they are taken."""
        counts = {"cpus": math.ceil(self.cpus), "memory": math.ceil(self.memory / _GIB)}
        return {kind: count for kind, count in counts.items() if count > 0}


class Lease:
    """What is held until `release`, the end of a `with`, or the end of this process in whatever way."""

    def __init__(self, gpus: Sequence[str], folder: Path, files: dict[str, FileIO]) -> None:
        self.gpus = tuple(gpus)  # UUIDs, the best first
        self._folder = folder
        self._files = files

    @property
    def intact(self) -> bool:
        """Whether the files that hold it still are where others look for them: somebody may have removed them."""
        return all(not file.closed and _in_place(self._folder / name, file) for name, file in self._files.items())

    def release(self) -> None:
        """Give everything back. May be called again."""
        for file in self._files.values():
            _unlock(file)

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class Leases:
    """The leases of this host. `cpus` and `memory` (bytes) are what its harnesses share: the same for all of them.

    CPUs are leased as whole ones and memory as whole GiB, rounded up. A cell that wants more than there is gets all of
    it. There is no queue: one that wants much can be passed by small ones.
    Every method raises InfrastructureError where the folder or a file in it cannot be used.
    """

    def __init__(self, cpus: float, memory: int, folder: Path = FOLDER) -> None:
        self._folder = folder
        self._totals = {"cpus": max(1, int(cpus)), "memory": max(1, memory // _GIB)}

    def attempt(self, wish: Wish, cell: str) -> Lease | None:
        """All that is wished for, or None. It waits for nothing but the end of another one's attempt.

        Raises InfrastructureError also where more GPUs are wished for than there are to choose from.
        """
        _check(wish)
        who = _identity(cell)
        with _folder(self._folder) as folder, _guard(folder) as guarded, contextlib.ExitStack() as undo:
            gpus = _take_gpus(folder, wish, who, undo) if guarded else None
            slots = self._take_slots(folder, wish, who, undo) if gpus is not None else None
            if gpus is None or slots is None:
                return None
            undo.pop_all()
        files = {_LOCK.format(uuid): file for uuid, file in gpus.items()}
        return Lease(list(gpus), self._folder, files | slots)

    def holders(self, wish: Wish) -> tuple[str, ...]:
        """Who holds some of what is wished for, in the holders' own words: for people."""
        _check(wish)
        with _folder(self._folder) as folder, _guard(folder) as guarded:
            if not guarded:
                return (f"somebody holds {self._folder / _GUARD}",)
            lines = [line for uuid in wish.candidates for line in _gpu_holder(folder, uuid)]
            lines += [line for kind in wish.slots for line in _slot_holders(folder, kind, self._totals[kind])]
        return tuple(lines)

    def _take_slots(
        self, folder: _Folder, wish: Wish, who: bytes, undo: contextlib.ExitStack
    ) -> dict[str, FileIO] | None:
        taken: dict[str, FileIO] = {}
        for kind, count in wish.slots.items():
            # A shared lock on the whole keeps systemd-tmpfiles away; the slots in it are locked by ranges.
            file = _locked(folder, _SLOTS.format(kind), fcntl.LOCK_SH)
            if file is None:
                return None
            undo.callback(_unlock, file)
            if not _take(file, self._totals[kind], min(count, self._totals[kind]), who):
                return None
            taken[_SLOTS.format(kind)] = file
        return taken


def _check(wish: Wish) -> None:
    if strange := [uuid for uuid in wish.among if not _GPU.fullmatch(uuid)]:
        raise ValueError(f"{strange} are no UUIDs of GPUs")
    if wish.gpus > len(set(wish.among)):
        raise InfrastructureError(
            f"{wish.gpus} GPUs are wanted, and there are {len(set(wish.among))} to choose from",
            "`python -m harness.gpus` says which GPUs there are, and what CUDA_VISIBLE_DEVICES leaves of them.",
        )


def _take_gpus(folder: _Folder, wish: Wish, who: bytes, undo: contextlib.ExitStack) -> dict[str, FileIO] | None:
    """Lock all that are free, and keep the best; the guard hides from the others that it were more for a moment."""
    free: dict[str, FileIO] = {}
    for uuid in wish.candidates:
        file = _locked(folder, _LOCK.format(uuid), fcntl.LOCK_EX)
        if file is not None:
            undo.callback(_unlock, file)
            free[uuid] = file
    best = [uuid for uuid in dict.fromkeys(wish.among) if uuid in free][: wish.gpus]
    for uuid, file in free.items():
        if uuid in best:
            _write(file, 0, who)
        else:
            _unlock(file)
    return {uuid: free[uuid] for uuid in best} if len(best) == wish.gpus else None


def _gpu_holder(folder: _Folder, uuid: str) -> list[str]:
    file = _locked(folder, _LOCK.format(uuid), fcntl.LOCK_EX)
    if file is not None:
        _unlock(file)
    return [] if file else [f"{uuid} is held by {_read(folder, _LOCK.format(uuid))}"]


def _range(kind: int, start: int, length: int) -> bytes:
    """`struct flock` of 64-bit Linux: type, whence, start, length, pid.

    Slots are ranges of one file: a file a GiB would need more descriptors than a process may have. Their locks are of
    the open file description: POSIX ones would not hold between threads, and end with any close().
    """
    return struct.pack("hhqqi0q", kind, os.SEEK_SET, start, length, 0)


def _lock_slot(file: FileIO, slot: int) -> bool:
    try:
        fcntl.fcntl(file, fcntl.F_OFD_SETLK, _range(fcntl.F_WRLCK, slot * _WIDTH, _WIDTH))
    except (BlockingIOError, PermissionError):  # EAGAIN or EACCES, says fcntl(2)
        return False
    except OSError as error:
        raise InfrastructureError(f"ranges of a file cannot be locked here: {error.strerror}", _ELSEWHERE) from error
    return True


def _take(file: FileIO, total: int, count: int, who: bytes) -> bool:
    taken = 0
    for slot in range(total):
        if taken < count and _lock_slot(file, slot):
            _write(file, slot, who)
            taken += 1
    return taken == count


def _slot_holders(folder: _Folder, kind: str, total: int) -> list[str]:
    name = _SLOTS.format(kind)
    file = _locked(folder, name, fcntl.LOCK_SH)
    if file is None:
        return [f"somebody holds {folder.path / name}"]
    try:
        counts = Counter(_said(file, slot) for slot in range(total) if not _lock_slot(file, slot))
    finally:
        _unlock(file)
    return [f"{count} of {total} {_UNITS[kind]} are held by {who}" for who, count in counts.items()]


def _identity(cell: str) -> bytes:
    try:
        user = pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        user = f"uid {os.geteuid()}"
    text = f"pid {os.getpid()} of {user} since {datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ} for {cell}".encode()
    return text[: _WIDTH - 1].ljust(_WIDTH - 1) + b"\n"


def _write(file: FileIO, slot: int, who: bytes) -> None:
    with contextlib.suppress(OSError):  # a full disk: the lock holds without it
        os.pwrite(file.fileno(), who, slot * _WIDTH)


def _read(folder: _Folder, name: str) -> str:
    with contextlib.suppress(OSError, InfrastructureError, _NotYetError), _open(folder, name) as file:
        return _said(file, 0)
    return "somebody"


def _said(file: FileIO, slot: int) -> str:
    """What the holder wrote, fit for a terminal: anybody can write anything there."""
    text = ""
    with contextlib.suppress(OSError):
        text = os.pread(file.fileno(), _WIDTH, slot * _WIDTH).decode(errors="replace").strip()
    return "".join(char if char.isprintable() else "?" for char in text) or "somebody"


class _Folder(NamedTuple):
    """The folder, and a descriptor of it: names are looked up in what was checked, not in what replaced it."""

    path: Path
    descriptor: int


class _NotYetError(Exception):
    """Another process may be about to change it. The text says what is wrong if it doesn't."""


def _patiently(attempt: Callable[[], _T]) -> _T:
    """Try until it works, for a second. Raises InfrastructureError with the last complaint."""
    until = time.monotonic() + _PATIENCE
    while True:
        try:
            return attempt()
        except _NotYetError as error:
            if time.monotonic() >= until:
                raise InfrastructureError(str(error), "Remove it, or have its owner do so.") from error
        time.sleep(0.005)


@contextlib.contextmanager
def _folder(path: Path) -> Iterator[_Folder]:
    descriptor = _patiently(lambda: _open_folder(path))
    try:
        yield _Folder(path=path, descriptor=descriptor)
    finally:
        os.close(descriptor)


def _open_folder(path: Path) -> int:
    try:
        with contextlib.suppress(FileExistsError):
            path.mkdir()
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except (FileNotFoundError, PermissionError) as error:
        raise _NotYetError(f"{path} cannot be used for leases: {error.strerror}") from error
    except OSError as error:  # a link gives ENOTDIR
        raise InfrastructureError(f"{path} cannot be used for leases: {error.strerror}", "Remove it.") from error
    if not _is_ours(descriptor):
        os.close(descriptor)
        raise InfrastructureError(
            f"{path} is not a folder of leases", "Name an empty folder, or one that is not there."
        )
    if _opened_up(descriptor, 0o1777):
        return descriptor
    os.close(descriptor)
    raise _NotYetError(f"{path} is not open to all users")


def _is_ours(descriptor: int) -> bool:
    """Whether it may be opened to all: it is already, or there is nothing in it but leases."""
    if stat.S_IMODE(os.fstat(descriptor).st_mode) == 0o1777:
        return True
    return all(name.endswith((".lock", ".slots")) for name in os.listdir(descriptor))


def _opened_up(descriptor: int, mode: int) -> bool:
    """Whether it has this mode now. Who makes a file can't give it at once: the umask takes from it."""
    if stat.S_IMODE(os.fstat(descriptor).st_mode) == mode:
        return True
    with contextlib.suppress(PermissionError):  # its owner's to do
        os.fchmod(descriptor, mode)
        return True
    return False


def _open(folder: _Folder, name: str) -> FileIO:
    """Open a lock file, made if need be. Raises _NotYetError, or InfrastructureError for what somebody has planted.

    Never with O_CREAT alone: in a sticky folder that is forbidden for files of others (fs.protected_regular).
    """
    path = folder.path / name
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    try:
        try:
            descriptor = os.open(name, flags, dir_fd=folder.descriptor)
        except FileNotFoundError:
            descriptor = os.open(name, flags | os.O_CREAT | os.O_EXCL, 0o666, dir_fd=folder.descriptor)
    except (FileExistsError, FileNotFoundError, PermissionError) as error:
        raise _NotYetError(f"{path} cannot be opened: {error.strerror}") from error
    except OSError as error:  # a link gives ELOOP, a folder EISDIR, a socket ENXIO; or the disk is full
        raise InfrastructureError(f"{path} cannot be used as a lock: {error.strerror}", "Remove it.") from error
    state = os.fstat(descriptor)
    if not stat.S_ISREG(state.st_mode) or state.st_nlink > 1:
        os.close(descriptor)
        raise InfrastructureError(f"{path} is no plain file of its own", "Somebody has put it there: remove it.")
    _opened_up(descriptor, 0o666)
    return FileIO(descriptor, "r+")


def _locked(folder: _Folder, name: str, how: int) -> FileIO | None:
    """The file under an flock, or None if somebody holds it; never one that was removed meanwhile."""

    def attempt() -> FileIO | None:
        file = _open(folder, name)
        try:
            fcntl.flock(file, how | fcntl.LOCK_NB)
        except OSError as error:
            file.close()
            if isinstance(error, BlockingIOError):
                return None
            raise InfrastructureError(f"{folder.path / name} cannot be locked: {error.strerror}", _ELSEWHERE) from error
        if _in_place(folder.path / name, file):
            return file
        _unlock(file)
        raise _NotYetError(f"{folder.path / name} is removed again and again")

    return _patiently(attempt)


def _in_place(path: Path, file: FileIO) -> bool:
    try:
        return os.path.samestat(path.lstat(), os.fstat(file.fileno()))
    except OSError:
        return False


def _unlock(file: FileIO) -> None:
    """Also where a forked child has it open as well. May be called again."""
    if not file.closed:
        with file, contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_UN)
            fcntl.fcntl(file, fcntl.F_OFD_SETLK, _range(fcntl.F_UNLCK, 0, 0))


@contextlib.contextmanager
def _guard(folder: _Folder) -> Iterator[bool]:
    """Whether we have the guard: others hold it for milliseconds, unless one of them was stopped in the middle."""
    until = time.monotonic() + _PATIENCE
    while (file := _locked(folder, _GUARD, fcntl.LOCK_EX)) is None and time.monotonic() < until:
        time.sleep(0.005)
    with contextlib.ExitStack() as undo:
        if file is not None:
            undo.callback(_unlock, file)
        yield file is not None
