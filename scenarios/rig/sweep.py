"""The processes of a cell: which they are, and how all of them are ended.

Descent alone finds no process whose parent ended before there was a subreaper, the mark in the environment none that
cleared it. Sessions and groups tell nothing: torchrun's ranks and engine cores make their own.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Collection, Iterable, Mapping

MARKS = ("VLLM_MATRIX_CELL", "VLLM_MATRIX_OUT")  # the folder too: two harnesses may run the same cell on one host
COMMAND_CHARS = 200
_TICK = 0.02


@dataclass(frozen=True)
class Process:
    """A process as the kernel lists it; ``state`` is a letter, ``Z`` a zombie."""

    pid: int
    parent: int
    state: str


def mark(environ: Mapping[str, str]) -> frozenset[bytes]:
    """What all processes of the cell have in their environment; empty where there is no cell."""
    found = {os.fsencode(f"{name}={environ[name]}") for name in MARKS if name in environ}
    return frozenset(found) if len(found) == len(MARKS) else frozenset()


def members(root: int, marked: frozenset[bytes]) -> list[int]:
    """Pids below ``root``, zombies included, and those that are marked, with all below them; never ourselves, nor what
    we descend from."""
    processes = table()
    spared = _line(os.getpid(), processes)
    roots = [pid for pid in processes if pid not in spared and marked and marked <= set(_environ(pid))]
    found = dict.fromkeys([*descendants(root, processes), *roots])
    for pid in roots:
        found.update(dict.fromkeys(descendants(pid, processes)))
    return [pid for pid in found if pid not in spared]


def living(pids: Iterable[int]) -> list[int]:
    """Those of ``pids`` that have not ended: a zombie has."""
    processes = table()
    return [pid for pid in pids if pid in processes and processes[pid].state not in "ZX"]


def descendants(root: int, processes: Mapping[int, Process] | None = None) -> list[int]:
    """Pids of all processes below ``root``, zombies included."""
    children: dict[int, list[int]] = {}
    for process in (table() if processes is None else processes).values():
        children.setdefault(process.parent, []).append(process.pid)
    found: list[int] = []
    queue = [root]
    while queue:
        below = children.get(queue.pop(), [])
        found += below
        queue += below
    return found


def table() -> dict[int, Process]:
    """All processes that can be seen."""
    found = (_process(int(name)) for name in os.listdir("/proc") if name.isdigit())  # noqa: PTH208 - thrice as fast
    return {process.pid: process for process in found if process is not None}


def end(
    find: Callable[[], Collection[int]], seconds: float, grace: float = 0.0, reap: Callable[[], None] = lambda: None
) -> list[int]:
    """End whatever ``find`` finds: SIGTERM and ``grace`` seconds first if there is grace, then SIGKILL until nothing is
    left. What is left after ``seconds`` of that can't be killed (it waits in the kernel)."""
    if grace:
        _send(find(), signal.SIGTERM)
        _send(find(), signal.SIGCONT)  # one that stands still hears nothing
        limit = time.monotonic() + grace
        while find() and time.monotonic() < limit:
            reap()
            time.sleep(_TICK)
    limit = time.monotonic() + seconds
    while (left := find()) and time.monotonic() < limit:
        _send(left, signal.SIGSTOP)  # what stands still starts nothing that the list lacks
        _send(find(), signal.SIGKILL)
        reap()
        time.sleep(_TICK)
    return list(left)


def reap(keep: int = 0) -> None:
    """Take in all our children that have ended; but ``keep``, whose end is for somebody else to see."""
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and ended.si_pid != keep:
            os.waitpid(ended.si_pid, os.WNOHANG)


def command(pid: int) -> str:
    """Its command line, or its name in brackets where it has none; "" if it is gone."""
    line = read(pid, "cmdline").replace(b"\0", b" ").decode(errors="replace").strip()
    name = read(pid, "comm").decode(errors="replace").strip()
    return (line or (f"[{name}]" if name else ""))[:COMMAND_CHARS]


def commands(pids: Iterable[int]) -> list[str]:
    """What they are, each once; those that are gone by now are left out."""
    return list(dict.fromkeys(filter(None, map(command, sorted(pids)))))


def variable(pid: int, name: str) -> str | None:
    """Of the environment that it was started with."""
    start = os.fsencode(f"{name}=")
    return next((os.fsdecode(word[len(start) :]) for word in _environ(pid) if word.startswith(start)), None)


def read(pid: int, name: str) -> bytes:
    """A file of ``/proc/PID``; nothing where it is gone, or not ours to read."""
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


def _environ(pid: int) -> list[bytes]:
    return read(pid, "environ").split(b"\0")


def _process(pid: int) -> Process | None:
    try:  # the name in parentheses may hold anything, also blanks and parentheses
        state, parent = read(pid, "stat").rpartition(b")")[2].split()[:2]
        return Process(pid, int(parent), state.decode("ascii"))
    except ValueError:
        return None  # gone meanwhile


def _line(pid: int, processes: Mapping[int, Process]) -> set[int]:
    """``pid`` and all that it descends from."""
    found: set[int] = set()
    while pid in processes and pid not in found:
        found.add(pid)
        pid = processes[pid].parent
    return found


def _send(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)
