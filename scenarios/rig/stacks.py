"""Where the processes of a cell are: ``artifacts/stacks``, written before they are ended.

Every Python of the cell writes its own stacks on SIGUSR2 (``sitecustomize``). The rest is the kernel's word.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import stat
import subprocess
import time
from pathlib import Path
from typing import Any, Collection, Iterable, Mapping

from rig import sweep

SIGNAL = signal.SIGUSR2
FILE = "processes.json"
SCHEMA = 1
MAX_BYTES = 64 << 10  # a file
MAX_PROCESSES = 256
WAIT_SECONDS = 3.0
_TICK = 0.05
_ABLE = ("R", "S", "D", "I")  # to take a signal; one that is stopped or traced never will
_PY_SPY_SECONDS, _PY_SPY_EACH = 4.0, 2.0
_GAP = b"\n[...]\n"


def dump(pids: Collection[int], out: Path) -> dict[int, str]:
    """Have the processes ``pids`` write their stacks, and list all of them; file names by pid of those that did.

    What an earlier call told of others stays.
    """
    folder = _folder(out)
    folder.mkdir(parents=True, exist_ok=True)
    pids = list(pids)[:MAX_PROCESSES]
    processes = sweep.table()
    listed = {pid: _facts(pid, processes.get(pid)) for pid in pids}  # before they are disturbed
    able = [pid for pid in pids if listed[pid]["state"] in _ABLE and _listens(pid)]
    answered = _ask([pid for pid in able if _file(folder, pid).is_file()], folder)
    answered |= _spy((pid for pid in pids if pid not in answered), folder)
    for pid in answered:
        _cap(_file(folder, pid))
    found = {pid: _file(folder, pid).name for pid in pids if pid in answered}
    _list(folder, {pid: {**facts, "stack": found.get(pid)} for pid, facts in listed.items()})
    return found


def of(pid: int, out: Path) -> bytes:
    """What a process wrote."""
    return _read(_file(_folder(out), pid))


def tidy(out: Path) -> None:
    """Remove what nobody wrote to, the folder too."""
    folder = _folder(out)
    with contextlib.suppress(OSError):
        for path in folder.glob("*.txt"):
            if not path.lstat().st_size:
                path.unlink()
        folder.rmdir()


def _folder(out: Path) -> Path:
    return out / "artifacts" / "stacks"


def _file(folder: Path, pid: int) -> Path:
    return folder / f"{pid}.txt"


def _facts(pid: int, process: sweep.Process | None) -> dict[str, Any]:
    wchan = sweep.read(pid, "wchan").decode(errors="replace").strip()
    return {
        "pid": pid,
        "ppid": process.parent if process else None,
        "rank": _rank(pid),
        "state": process.state if process else None,
        "wchan": "" if wchan == "0" else wchan,
        "command": sweep.command(pid),
    }


def _rank(pid: int) -> int | None:
    """Of a rank, and of what it started: as the launcher or torchrun numbers them."""
    names = ["VLLM_MATRIX_RANK", *(["RANK"] if sweep.variable(pid, "VLLM_MATRIX_RANKS_FOLDER") else [])]
    given = (sweep.variable(pid, name) for name in names)
    return next((int(rank) for rank in given if rank and rank.isdecimal()), None)


def _listens(pid: int) -> bool:
    """Whether it handles the signal, which would end any other."""
    for line in sweep.read(pid, "status").splitlines():
        if line.startswith(b"SigCgt:"):
            return bool(int(line.split()[1], 16) >> (SIGNAL - 1) & 1)
    return False


def _ask(pids: list[int], folder: Path) -> set[int]:
    """Those that wrote, once all have, and have finished; or when the time is up."""
    before = {pid: _size(folder, pid) for pid in pids}
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, SIGNAL)
    end = time.monotonic() + WAIT_SECONDS
    former: dict[int, int] = {}
    now = before
    while now != former or any(now[pid] == before[pid] for pid in now):
        if time.monotonic() > end:
            break
        time.sleep(_TICK)
        former, now = now, {pid: _size(folder, pid) for pid in pids}
    return {pid for pid in pids if now[pid] > before[pid]}


def _size(folder: Path, pid: int) -> int:
    try:
        return _file(folder, pid).lstat().st_size
    except OSError:
        return 0


def _spy(pids: Iterable[int], folder: Path) -> set[int]:
    """Ask py-spy, where there is one, about Pythons that have not answered. It may not be allowed to look."""
    program = shutil.which("py-spy")
    end = time.monotonic() + _PY_SPY_SECONDS
    found = set()
    for pid in pids if program else ():
        left = end - time.monotonic()
        if left > 0 and _is_python(pid) and (text := _spied(str(program), pid, min(left, _PY_SPY_EACH))):
            _file(folder, pid).write_bytes(text)
            found.add(pid)
    return found


def _spied(program: str, pid: int, seconds: float) -> bytes:
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(
            [program, "dump", "--pid", str(pid)], capture_output=True, check=True, timeout=seconds
        ).stdout
    return b""


def _is_python(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/exe").readlink().name.startswith("python")
    except OSError:
        return False


def _cap(path: Path) -> None:
    """Both ends of it: the main thread is the last."""
    with contextlib.suppress(OSError):
        data = _read(path)
        if len(data) > MAX_BYTES:
            half = (MAX_BYTES - len(_GAP)) // 2
            _write(path, data[:half] + _GAP + data[-half:])


def _read(path: Path) -> bytes:
    """A file of stacks, at most some megabytes of it; nothing where it is no plain file."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:  # noqa: PTH123
        return file.read(MAX_BYTES << 6) if stat.S_ISREG(os.fstat(descriptor).st_mode) else b""


def _list(folder: Path, listed: Mapping[int, Mapping[str, Any]]) -> None:
    former: list[dict[str, Any]] = []
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        former = [each for each in json.loads(_read(folder / FILE))["processes"] if each["pid"] not in listed]
    found = {"schema": SCHEMA, "processes": [*former, *listed.values()][-MAX_PROCESSES:]}
    _write(folder / FILE, json.dumps(found, indent=1).encode() + b"\n")


def _write(path: Path, data: bytes) -> None:
    part = path.with_name(f"{path.name}.part")
    part.write_bytes(data)
    part.replace(path)
