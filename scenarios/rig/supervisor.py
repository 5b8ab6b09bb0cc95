"""The first process of a cell: starts the runner, waits, ends whatever is left, says DONE."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Mapping

from rig.cell import Cell, CellError, read_cell

SUITE = Path(__file__).resolve().parents[1]

# A worker that dies takes one check with it and costs a fresh engine: bounded, so that a version that always dies in
# init ends within minutes.
WORKER_RESTARTS = 4
GRACE_SECONDS = 5.0
SWEEP_SECONDS = 15.0

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
    runner = subprocess.Popen(command(cell), env=environment(cell, os.environ), cwd=tempfile.gettempdir())
    code = _wait(runner, stopped)
    _sweep(GRACE_SECONDS if stopped else 0.0)
    if stopped:
        _say(f"stopped by signal {stopped[0]}")
        return TERMINATED
    _done(cell.out, code)
    if code < 0 or code in (_INTERNAL_ERROR, _USAGE_ERROR):
        _say(f"the runner itself failed, pytest's exit code is {code}")
        return RIG_FAILED
    return 0


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


def _wait(runner: subprocess.Popen[bytes], stopped: list[int]) -> int:
    """The runner's return code (negative: a signal), or, once we are told to stop, whatever it is by then."""
    while not stopped and runner.poll() is None:
        time.sleep(0.05)
    return runner.poll() or 0


def _sweep(grace: float) -> None:
    """End every descendant: SIGTERM and ``grace`` seconds first if there is grace, then SIGKILL until none is left."""
    if grace:
        _signal_all(signal.SIGTERM)
        _reap_until(time.monotonic() + grace)
    end = time.monotonic() + SWEEP_SECONDS
    while time.monotonic() < end and descendants(os.getpid()):
        _signal_all(signal.SIGKILL)
        _reap_until(time.monotonic() + 0.2)


def _signal_all(number: int) -> None:
    for pid in descendants(os.getpid()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _reap_until(end: float) -> None:
    while time.monotonic() < end:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            time.sleep(0.02)


def descendants(root: int) -> list[int]:
    """Pids of all processes below ``root``, zombies included."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        parent = _parent(entry) if entry.name.isdigit() else None
        if parent is not None:
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
        return int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, IndexError, ValueError):
        return None  # gone meanwhile


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
