"""The first process of a cell: starts the runner, waits, ends whatever is left, says DONE.

On SIGTERM it first has all processes of the cell write their stacks.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Callable, Mapping

from rig import cgroup, shm, stacks, sweep
from rig.cell import Cell, CellError, read_cell
from rig.events import Events

SUITE = Path(__file__).resolve().parents[1]

# A worker that dies takes one check with it and costs a fresh engine: bounded, so that a version that always dies in
# init ends within minutes.
WORKER_RESTARTS = 4
GRACE_SECONDS = 5.0
SWEEP_SECONDS = 15.0
LINGER_SECONDS = 2.0  # resource trackers and the like need a moment to notice that their parent has gone
LOOK_SECONDS = 0.5
NAMED = 20  # of what was left
_TICK = 0.05

# Exit codes of the rig itself. Whatever the checks said is 0: it is in the events.
RIG_FAILED = 70
BAD_CELL = 64
TERMINATED = 128 + signal.SIGTERM

_PR_SET_CHILD_SUBREAPER = 36
_INTERNAL_ERROR, _USAGE_ERROR = 3, 4  # pytest's own


def main() -> int:
    """Run the cell named by the environment; 0 if the runner ran, whatever the checks said."""
    try:
        cell = read_cell()
        return _run(cell)
    except CellError as err:
        _say(str(err))
        return BAD_CELL


def _run(cell: Cell) -> int:
    if not (SUITE / cell.file).is_file():
        raise CellError(f"no scenario {cell.file} in {SUITE}")
    _become_subreaper()
    stopped: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda got, _frame: stopped.append(got))
    attempt = Attempt(cell, stopped)
    code = attempt.run()
    if stopped:
        _say(f"stopped by signal {stopped[0]}")
        return TERMINATED
    _done(cell.out, code)
    if code < 0 or code in (_INTERNAL_ERROR, _USAGE_ERROR):
        _say(f"the runner itself failed, pytest's exit code is {code}")
        return RIG_FAILED
    return 0


class Attempt:
    """The runner, and all that comes of it. ``stopped`` gets the signals that tell us to stop."""

    def __init__(self, cell: Cell, stopped: list[int]) -> None:
        # in a container, where all that can be seen is the cell's; an orphan of the host has the same parent
        alone = cell.out == Path("/out") and 1 in (os.getpid(), os.getppid())
        self._out = cell.out
        self._stopped = stopped
        self._memory = cgroup.Watch(cell.out, alone)
        self._shm = shm.Leftovers(alone, self._members)
        environ = environment(cell, os.environ)
        self._mark = sweep.mark(environ)
        self._runner = subprocess.Popen(command(cell), env=environ, cwd=tempfile.gettempdir())

    def run(self) -> int:
        """Wait for the runner's end, or for ours; the runner's return code (negative: a signal). Nothing is left."""
        try:
            code = self._wait()
            if self._stopped:
                self._try(lambda: stacks.dump(self._members(), self._out))
            elif code >= 0:
                self._try(self._tell_leftovers)
            return code
        finally:
            self._end()

    def _wait(self) -> int:
        looked = time.monotonic()
        while not self._stopped and self._runner.poll() is None:
            sweep.reap(keep=self._runner.pid)
            time.sleep(_TICK)
            if time.monotonic() - looked > LOOK_SECONDS:
                self._memory.look()
                self._shm.look()
                looked = time.monotonic()
        return self._runner.poll() or 0

    def _members(self) -> list[int]:
        return sweep.members(os.getpid(), self._mark)

    def _tell_leftovers(self) -> None:
        """What the version under test has left running though nothing hurried it: a finding."""
        end = time.monotonic() + LINGER_SECONDS
        while (left := sweep.living(self._members())) and time.monotonic() < end and not self._stopped:
            sweep.reap()
            time.sleep(_TICK)
        commands = sweep.commands(left)
        if commands and not self._stopped:
            events = Events(self._out)
            events.property("leftover.processes", commands[:NAMED])
            events.metric("leftover.processes.count", len(left), "processes")

    def _end(self) -> None:
        left = sweep.end(self._members, SWEEP_SECONDS, GRACE_SECONDS if self._stopped else 0.0, sweep.reap)
        sweep.reap()
        if left:
            _say(f"cannot be killed: {'; '.join(sweep.commands(left))}")
        self._try(self._clear_shm)
        self._memory.look(always=True)
        stacks.tidy(self._out)

    def _clear_shm(self) -> None:
        removed = self._shm.remove()
        if removed and not self._stopped:
            events = Events(self._out)
            events.property("leftover.shm", sorted(removed)[:NAMED])
            events.metric("leftover.shm.size", sum(removed.values()), "B")

    def _try(self, work: Callable[[], object]) -> None:
        """A full disk must not keep a cell from its end."""
        try:
            work()
        except (OSError, ValueError) as err:
            _say(f"{type(err).__name__}: {err}")


def command(cell: Cell) -> list[str]:
    """The runner. ``-c`` on nothing: no configuration of a folder above the suite may change what a cell does."""
    plugins = ["-p", "no:cacheprovider", "-p", "xdist.plugin", "-p", "rig.fixtures", "-p", "rig.plugin"]
    workers = ["-n1", f"--max-worker-restart={WORKER_RESTARTS}"]
    roots = ["-c", os.devnull, f"--rootdir={SUITE}", f"--confcutdir={SUITE}"]
    return [sys.executable, "-m", "pytest", *plugins, *workers, *roots, "-s", "--tb=short", str(SUITE / cell.file)]


def environment(cell: Cell, outer: Mapping[str, str]) -> dict[str, str]:
    """The children's environment: the cell's mark on all of them, no bytecode beside a read-only suite."""
    kept = {name: value for name, value in outer.items() if name not in ("PYTEST_ADDOPTS", "PYTEST_PLUGINS")}
    paths = filter(None, kept.get("PYTHONPATH", "").split(os.pathsep))
    return {
        **kept,
        "VLLM_MATRIX_CELL": cell.id,
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": os.pathsep.join(dict.fromkeys([str(SUITE), *paths])),
    }


def _say(message: str) -> None:
    sys.stderr.write(f"rig: {message}\n")


def _become_subreaper() -> None:
    """Orphans come to us instead of to the container's init: that is how the sweep finds them."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        _say(f"no subreaper: {os.strerror(ctypes.get_errno())}")


def _done(out: Path, code: int) -> None:
    """``DONE``, by rename, as the last thing that is written."""
    part = out / "DONE.part"
    part.write_text(json.dumps({"schema": 1, "exit": code, "checks": _ended(out)}) + "\n")
    part.replace(out / "DONE")


def _ended(out: Path) -> int:
    try:
        lines = (out / "events.jsonl").read_bytes().splitlines()
    except FileNotFoundError:
        return 0
    return sum(b'"type":"end"' in line for line in lines)
