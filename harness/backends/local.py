"""Cells as processes of this host, in environments made by uv: for hosts where Docker is not allowed.

What a container gives and this does not: no limit on memory or CPUs, no closed network, no read-only folders, no
/dev/shm and no ports of its own. What it does give: an environment that holds nothing of the caller's, a scratch
folder for home and caches that is gone afterwards, and an end to the last process.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from harness.backends import keeper, owner
from harness.backends.base import LOGS, Head, Launch, Running, environment
from harness.backends.size import give_room, keep_room
from harness.errors import InfrastructureError
from harness.gpus import take_inventory, visible_to_cuda
from harness.records import ExitState

MARK = "VLLM_MATRIX_ATTEMPT"  # on every process of a cell, and on no other
PREFIX = "vllm-matrix-"  # of scratch folders in TMPDIR
TOOLS = ("g++", "gcc")  # what the V1 engine compiles with
_SOCKET = 107 - len("/") - 36  # bytes for a folder of vLLM's sockets: sun_path, less the uuid that names one
_KILL = 30.0  # seconds in which a killed cell has to be gone


class LocalBackend:
    """The back end `local`. `root` is the folder of the environments, by whose names cells are launched."""

    name = "local"

    def __init__(self, root: Path) -> None:
        self._root = root

    def check(self, scratch: Path, image: str) -> None:  # noqa: ARG002 - it is ours: there is no other side to see it
        """See that the environment's Python starts, and that its sockets will have names that are short enough."""
        with scratch_folder() as folder:
            if len(os.fsencode(folder)) > _SOCKET:
                raise InfrastructureError(
                    f"{folder.parent} is too long a name for a folder of sockets", "Set TMPDIR to a shorter one."
                )
            words = [str(_python(self._root, image)), "-c", "import pytest"]
            try:
                subprocess.run(words, check=True, capture_output=True, timeout=120, env={}, cwd=folder)
            except (OSError, subprocess.SubprocessError) as error:
                raise InfrastructureError(
                    f"the environment {image} does not work: {error}", f"Remove {self._root / image} and run again."
                ) from error

    def start(self, launch: Launch) -> Running:
        python = _python(self._root, launch.image)
        mark = f"{launch.name}-{uuid.uuid4().hex}"
        with contextlib.ExitStack() as undo:
            undo.callback(give_room, launch.folder)
            keep_room(launch.folder)
            heads = [undo.enter_context(contextlib.closing(Head(launch.folder / name))) for name in LOGS]
            folder = _make_scratch()
            undo.callback(shutil.rmtree, folder, ignore_errors=True)
            given = {**variables(launch, self._root, folder), MARK: mark, owner.VARIABLE: owner.owner()}
            try:
                process = subprocess.Popen(
                    [sys.executable, "-I", keeper.__file__, str(folder), str(python), *launch.command[1:]],
                    env=given,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    start_new_session=True,  # Ctrl-C is the harness's: it ends its cells in its own way
                )
            except OSError as error:
                raise InfrastructureError(f"the cell could not be started: {error}", "See `ulimit -a`.") from error
            undo.pop_all()
        return _LocalRunning(process, mark, folder, launch.folder, heads)


def _python(root: Path, image: str) -> Path:
    python = root / image / "bin" / "python3"
    if not python.exists():
        raise InfrastructureError(f"the environment {image} is gone", "Run again: it will be made again.")
    return python


@contextlib.contextmanager
def scratch_folder(parent: Path | None = None) -> Iterator[Path]:
    """A folder in TMPDIR, or in `parent`, gone afterwards. It says whose it is: he may be killed."""
    folder = _make_scratch(parent)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _make_scratch(parent: Path | None = None) -> Path:
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
    try:
        (folder / owner.FILE).write_text(owner.owner(), encoding="ascii")
    except OSError:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return folder


def variables(launch: Launch, root: Path, scratch: Path) -> dict[str, str]:
    """The whole environment of the cell: the one of a container, with folders of this host, and nothing else."""
    venv = root / launch.image
    inside = environment(
        tmp=str(scratch),
        suite=str(launch.suite),
        inputs=str(launch.folder / "in"),
        out=str(launch.folder / "out"),
        models=str(launch.models),
    )
    return {
        **inside,
        "LANG": "C.UTF-8",
        "PATH": search_path(venv),
        "VIRTUAL_ENV": str(venv),
        "TMPDIR": str(scratch),
        **_devices(launch.gpus),
        **launch.environment,
    }


def _devices(gpus: Sequence[str]) -> dict[str, str]:
    """An empty value hides all devices too, but vLLM 0.10.0 takes it for a worker of Ray and believes in Triton."""
    return visible_to_cuda(gpus, take_inventory()) if gpus else {"CUDA_VISIBLE_DEVICES": "-1"}


def search_path(venv: Path) -> str:
    """PATH of a cell: its environment, the compilers wherever they are, and a system's own folders."""
    found = (shutil.which(tool) for tool in TOOLS)
    compilers = [str(Path(tool).parent) for tool in found if tool]
    system = [str(Path(prefix, name)) for prefix in ("/usr/local", "/usr", "/") for name in ("sbin", "bin")]
    return os.pathsep.join(dict.fromkeys([str(venv / "bin"), *compilers, *system]))


def command_line(launch: Launch, root: Path, interactive: bool = False) -> list[str]:
    """The same process by a command line: what `repro` prints and `shell` runs. Its scratch folder has to be made."""
    scratch = launch.folder / "tmp"
    given = variables(launch, root, scratch)
    if interactive:
        given["TERM"] = os.environ.get("TERM", "dumb")
    words = ["env", "-i", f"--chdir={scratch}", *(f"{name}={value}" for name, value in given.items())]
    return [*words, *(("bash",) if interactive else (str(_python(root, launch.image)), *launch.command[1:]))]


class _LocalRunning:
    """A keeper with its cell, and the threads that keep the heads of its output."""

    def __init__(
        self, process: subprocess.Popen[bytes], mark: str, scratch: Path, folder: Path, heads: Sequence[Head]
    ) -> None:
        self._process = process
        self._mark = mark
        self._scratch = scratch
        self._folder = folder
        self._heads = heads
        self._ooms = _oom_kills()
        self._state: ExitState | None = None
        self._readers = [
            threading.Thread(target=_keep_head, args=(stream, head), daemon=True)
            for stream, head in zip((process.stdout, process.stderr), heads, strict=True)
        ]
        for reader in self._readers:
            reader.start()

    def ended(self, seconds: float) -> bool:
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def terminate(self) -> None:
        self._process.terminate()

    def close(self) -> ExitState:
        if self._state is None:
            self._state = self._end()
        return self._state

    def _end(self) -> ExitState:
        if self._process.stdin is not None:
            self._process.stdin.close()  # the keeper's sign to kill whatever still runs
        if not self.ended(_KILL):
            self._process.kill()
            self._process.wait()
        left = sweep(self._mark)
        for reader in self._readers:
            reader.join(timeout=10)
        with contextlib.suppress(RecursionError):
            shutil.rmtree(self._scratch, ignore_errors=True)  # the keeper's to do, if it lived
        give_room(self._folder)
        for head in self._heads:
            head.close()
        return self._exit_state(left)

    def _exit_state(self, left: list[int]) -> ExitState:
        code = self._process.returncode
        if code < 0:
            error = f"the keeper of the cell was killed by signal {-code}"
            return ExitState(started=True, error=error)
        return ExitState(
            started=True,
            exit_code=code,
            # whose process it was the kernel doesn't say: only where ours was killed as well is it taken for ours
            oom_killed=code == 128 + signal.SIGKILL and _oom_kills() > self._ooms,
            error=f"processes that cannot be killed: {', '.join(map(str, left))}" if left else "",
        )


def _keep_head(stream: IO[bytes], head: Head) -> None:
    """Keep the head of it, and read on: a full pipe would stop the cell."""
    with stream:
        while chunk := os.read(stream.fileno(), 1 << 16):
            head.write(chunk)


def sweep(mark: str) -> list[int]:
    """Kill what carries the mark, and what descends from it: only a keeper that was killed itself leaves anything.

    What is left in the end.
    """
    until = time.monotonic() + _KILL
    while (left := marked(mark)) and time.monotonic() < until:
        for pid in {*left, *(below for one in left for below in keeper.descendants(one))}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    return left


def marked(mark: str) -> list[int]:
    """Processes of this user whose environment carries the mark."""
    return [pid for pid, found, _ in marks() if found == mark]


def marks() -> Iterator[tuple[int, str, str]]:
    """Of every process of a cell of this user: PID, the mark of its cell, and who started that."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            found = {name: value for name, _, value in (pair.partition("=") for pair in _environ(entry))}
            if MARK in found:
                yield int(entry.name), found[MARK], found.get(owner.VARIABLE, "")


def _environ(entry: Path) -> list[str]:
    try:
        if entry.stat().st_uid != os.geteuid():
            return []
        return (entry / "environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []  # gone meanwhile, or not ours


def _oom_kills() -> int:
    """How many processes the kernel has killed for memory since it started; 0 where it does not count."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/vmstat").read_text(encoding="ascii").splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0
