"""What stands between the harness and a cell without a container, as an init does inside of one.

`python keeper.py SCRATCH COMMAND…` runs the command, in a session of its own and in the folder SCRATCH, and ends with
its exit code: 128 + n for a signal. The cell's orphans come to it, whatever sessions they made for themselves; nothing
of the cell outlives it, and the folder is removed. SIGTERM goes on to the command; when standard input ends, because
the harness closed it or died, everything is killed.

It is a process of its own because a subreaper gets the orphans of all its descendants: in the harness, those of cells
that run at the same time could not be told apart. Standard library only: it is run as a file.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import select
import shutil
import signal
import sys
import time
from pathlib import Path

TICK = 0.05  # seconds
SWEEP = 15.0  # seconds in which killed processes have to be gone
_PR_SET_CHILD_SUBREAPER = 36


def main(scratch: str, command: list[str]) -> int:
    """Run the command to its end; its exit code as a shell says it."""
    os.chdir(scratch)
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # an engine's core dump has gigabytes, and nobody asks for it
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _frame: asked.append(number))
    null = (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)
    child = os.posix_spawn(
        command[0], command, os.environ, setsid=True, setsigdef=[signal.SIGTERM, signal.SIGPIPE], file_actions=[null]
    )
    code = os.waitstatus_to_exitcode(_wait(child, asked))
    sweep(time.monotonic() + SWEEP)
    with contextlib.suppress(RecursionError):  # a chain of folders that is deeper than Python's stack
        shutil.rmtree(scratch, ignore_errors=True)
    return code if code >= 0 else 128 - code


def _wait(child: int, asked: list[int]) -> int:
    """The child's wait status; every other child is an orphan, and only taken note of."""
    lifeline = [0]
    while True:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == child:
            return status
        if pid:
            continue
        while asked:
            os.kill(child, asked.pop())  # not reaped yet, so the pid is still its own
        readable, _, _ = select.select(lifeline, [], [], TICK)
        if readable and not os.read(0, 1):
            lifeline = []
            os.kill(child, signal.SIGKILL)


def sweep(until: float) -> None:
    """SIGKILL for all descendants, again and again: what is killed may just have started another."""
    while time.monotonic() < until and (pids := descendants(os.getpid())):
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        _reap()
        time.sleep(TICK / 5)


def _reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return


def descendants(root: int) -> list[int]:
    """Pids of all processes below `root`."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (parent := _parent(entry)) is not None:
            children.setdefault(parent, []).append(int(entry.name))
    found: list[int] = []
    queue = [root]
    while queue:
        below = children.get(queue.pop(), [])
        found += below
        queue += below
    return found


def _parent(entry: Path) -> int | None:
    try:  # the name in parentheses may hold anything, also blanks and parentheses
        return int((entry / "stat").read_bytes().rpartition(b")")[2].split()[1])
    except (OSError, IndexError, ValueError):
        return None  # gone meanwhile


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
