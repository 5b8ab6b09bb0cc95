"""Nothing of a cell outlives it: real processes that hide, linger, ignore, stand still, or start others for ever."""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import subprocess
import sys
import textwrap
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rig import shm, sweep

from tests.rig.run import SUITE, Ran, command, prepare, run_cell
from tests.rig.test_rig_runner import alive, wait_for

BEGIN = '''"""Throw-away?"""
import os, signal, subprocess, sys, time

def start(events, name, life):
    """A grandchild in a session of its own, whose parent ends at once."""
    reads, writes = os.pipe()
    middle = os.fork()
    if middle == 0:
        os.setsid()
        pid = os.fork()
        if pid:
            os.write(writes, str(pid).encode())
            os._exit(0)
        try:
            life()
        finally:
            os._exit(0)
    os.waitpid(middle, 0)
    pid = int(os.read(reads, 20))
    events.property(name, pid)
    return pid
'''

LEAVES = """
def ignores():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(300)

def stops():
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(300)

def keeps_a_zombie():
    if os.fork() == 0:
        os._exit(0)
    time.sleep(300)

def storms():
    for _ in range(49):
        if os.fork() == 0:
            break
    end = time.monotonic() + 30  # should nobody end it
    while time.monotonic() < end:  # a new process each time, and the old one gone
        time.sleep(0.5)
        if os.fork():
            os._exit(0)

def test_leaves(events):
    for life in (ignores, stops, keeps_a_zombie, storms):
        start(events, life.__name__, life)
    cleared = subprocess.Popen(["/bin/sleep", "301"], env={}, start_new_session=True)
    events.property("cleared", cleared.pid)

def test_an_orphan_that_has_ended_is_taken_in_meanwhile(events):
    pid = start(events, "orphan", lambda: None)
    end = time.monotonic() + 20
    while os.path.exists(f"/proc/{pid}"):
        assert time.monotonic() < end, "a zombie"
        time.sleep(0.05)
"""


def of_the_cell(out: Path) -> list[int]:
    wanted = os.fsencode(f"VLLM_MATRIX_OUT={out}")
    return [pid for pid in sweep.living(sweep.table()) if wanted in sweep.read(pid, "environ").split(b"\0")]


@pytest.fixture
def strangers(tmp_path: Path) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    """Processes that don't descend from the cell: with its marks, with those of the same cell in another folder."""
    cell = {"VLLM_MATRIX_CELL": "fake@cpu/test_x.py"}
    marks = {"ours": tmp_path / "cell" / "out", "theirs": tmp_path / "elsewhere" / "out"}
    started = {
        name: subprocess.Popen(["/bin/sleep", "300"], env={**cell, "VLLM_MATRIX_OUT": str(out)})
        for name, out in marks.items()
    }
    yield started
    for process in started.values():
        process.kill()
        process.wait()


def test_everything_ends_with_its_cell(
    suite: Path, tmp_path: Path, strangers: dict[str, subprocess.Popen[bytes]]
) -> None:
    (suite / "test_x.py").write_text(BEGIN + LEAVES)
    ran = run_cell(tmp_path / "cell", "test_x.py", suite)
    assert ran.code == 0
    assert set(ran.outcomes.values()) == {"passed"}
    pids = {event["name"]: event["value"] for event in ran.of("property") if isinstance(event["value"], int)}
    assert len(pids) == 6
    assert not [name for name, pid in pids.items() if alive(pid)]
    assert strangers["ours"].wait(5) == -signal.SIGKILL
    assert strangers["theirs"].poll() is None
    assert of_the_cell(ran.out) == []
    (left,) = named(ran, "leftover.processes")
    assert {"/bin/sleep 300", "/bin/sleep 301"} <= set(left)
    (count,) = [event["value"] for event in ran.of("metric") if event["name"] == "leftover.processes.count"]
    assert count >= 5
    assert not (ran.out / "artifacts" / "stacks").exists()


def named(ran: Ran, name: str) -> list[Any]:
    return [event["value"] for event in ran.of("property") if event["name"] == name]


def test_what_ends_by_itself_in_time_was_not_left(suite: Path, tmp_path: Path) -> None:
    (suite / "test_x.py").write_text(BEGIN + "def test_a(events):\n    start(events, 'a', lambda: time.sleep(0.7))\n")
    ran = run_cell(tmp_path / "cell", "test_x.py", suite)
    assert named(ran, "leftover.processes") == []


def test_what_is_ended_on_the_way_was_not_left(suite: Path, tmp_path: Path) -> None:
    text = "def test_a(events):\n    start(events, 'a', lambda: time.sleep(300))\n    time.sleep(300)\n"
    (suite / "test_x.py").write_text(BEGIN + text)
    environment = prepare(tmp_path / "cell", "test_x.py", suite)
    out = tmp_path / "cell" / "out"
    supervisor = subprocess.Popen(command(), env=environment, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    ran = Ran(0, out, "")
    wait_for(lambda: (out / "events.jsonl").exists() and bool(named(ran, "a")))
    supervisor.send_signal(signal.SIGTERM)
    assert supervisor.wait(25) == 128 + signal.SIGTERM
    assert of_the_cell(out) == []
    assert named(ran, "leftover.processes") == []


# --- by themselves ----------------------------------------------------------------------------------------------------


def reaper(code: str) -> None:
    """Run ``code`` in a process of its own, with children of its own."""
    begin = "import os, signal, time\nfrom rig import sweep\n"
    subprocess.run([sys.executable, "-c", begin + textwrap.dedent(code)], cwd=SUITE, check=True, timeout=60)


def test_zombies_are_taken_in_but_one() -> None:
    reaper("""
        kept, *others = [os.fork() or os._exit(0) for _ in range(5)]
        os.waitid(os.P_PID, others[-1], os.WEXITED | os.WNOWAIT)
        end = time.monotonic() + 10
        while len(sweep.descendants(os.getpid())) > 1 and time.monotonic() < end:
            sweep.reap(keep=kept)  # stops at that one, wherever the kernel lists it
            for pid in others:
                try: os.waitpid(pid, os.WNOHANG)
                except ChildProcessError: pass
        assert sweep.descendants(os.getpid()) == [kept]
        sweep.reap()
        assert sweep.descendants(os.getpid()) == []
    """)


def test_what_cannot_be_killed_is_named_within_the_bound() -> None:
    reaper("""
        zombie = os.fork() or os._exit(0)
        begun = time.monotonic()
        assert sweep.end(lambda: [zombie], 0.5) == [zombie]
        assert time.monotonic() - begun < 5
        assert sweep.end(lambda: [], 0.5) == []
    """)


def test_grace_is_for_those_who_take_it() -> None:
    reaper("""
        reads, writes = os.pipe()
        def child(handler):
            pid = os.fork()
            if pid == 0:
                signal.signal(signal.SIGTERM, handler)
                os.write(writes, b"x")
                time.sleep(300)
            os.read(reads, 1)
            return pid
        polite, deaf = child(lambda *_: os._exit(7)), child(signal.SIG_IGN)
        assert sweep.end(lambda: sweep.living([polite, deaf]), 5, grace=1) == []
        assert os.waitstatus_to_exitcode(os.waitpid(polite, 0)[1]) == 7
        assert os.waitstatus_to_exitcode(os.waitpid(deaf, 0)[1]) == -9
    """)


def test_no_mark_finds_nobody() -> None:
    assert sweep.mark({"VLLM_MATRIX_OUT": "/out"}) == frozenset()
    reaper("assert sweep.members(os.getpid(), frozenset()) == []")


def test_neither_we_nor_what_started_us_is_a_member(monkeypatch: pytest.MonkeyPatch) -> None:
    """However we are marked."""
    environ = {**os.environ, "VLLM_MATRIX_CELL": "x", "VLLM_MATRIX_OUT": "/nowhere"}
    code = "import os; from rig import sweep; print(sweep.members(os.getpid(), sweep.mark(os.environ)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=SUITE, env=environ, capture_output=True, check=True)
    assert done.stdout.strip() == b"[]"


# --- /dev/shm ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def names() -> Iterator[Callable[[str], Path]]:
    """Files in the real ``/dev/shm``, by a name that nobody else has."""
    made: list[Path] = []

    def name(prefix: str) -> Path:
        made.append(shm.FOLDER / f"{prefix}{uuid.uuid4().hex}")
        return made[-1]

    yield name
    for path in made:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()


HOLDS = """
import mmap, os, time

def test_a():
    file = os.open({segment!r}, os.O_RDWR | os.O_CREAT)
    os.ftruncate(file, 8192)
    held = mmap.mmap(file, 8192)
    os.close(file)
    held.write(b"x" * 8192)
    open({foreign!r}, "w").close()
    time.sleep(2)  # until it was seen whose it is
"""


def test_shared_memory_that_is_left_is_told_and_removed(
    suite: Path, tmp_path: Path, names: Callable[[str], Path]
) -> None:
    segment, foreign = names("psm_"), names("a-users-own-")
    (suite / "test_x.py").write_text(HOLDS.format(segment=str(segment), foreign=str(foreign)))
    ran = run_cell(tmp_path / "cell", "test_x.py", suite)
    assert (segment.exists(), foreign.exists()) == (False, True)
    assert named(ran, "leftover.shm") == [[segment.name]]
    assert [(e["value"], e["unit"]) for e in ran.of("metric") if e["name"] == "leftover.shm.size"] == [(8192, "B")]


def leftovers(folder: Path, alone: bool = False) -> shm.Leftovers:
    return shm.Leftovers(alone, lambda: [os.getpid()], folder)


def test_alone_everything_new_goes(tmp_path: Path) -> None:
    (tmp_path / "before").touch()
    found = leftovers(tmp_path, alone=True)
    (tmp_path / "anything").write_bytes(b"x" * 5000)
    (tmp_path / "folder" / "deep").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "before")
    assert set(found.remove()) == {"anything", "folder", "link"}
    assert [path.name for path in tmp_path.iterdir()] == ["before"]
    assert found.remove() == {}


@pytest.mark.parametrize("how", ["mapped", "open"])
def test_among_others_only_what_was_the_cells_and_is_nobodys_goes(tmp_path: Path, how: str) -> None:
    (tmp_path / "before").write_bytes(b"x" * 4096)
    found = leftovers(tmp_path)
    for name in ("cells", "users"):
        (tmp_path / name).write_bytes(b"x" * 4096)
    with holding(tmp_path / "cells", how), holding(tmp_path / "before", how):
        found.look()
        assert found.remove() == {}
    assert list(found.remove()) == ["cells"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["before", "users"]


@contextlib.contextmanager
def holding(path: Path, how: str) -> Iterator[None]:
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 4096):
        if how == "mapped":
            file.close()
        yield


def test_whose_a_file_is_is_not_asked_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    found = shm.Leftovers(False, lambda: asked, tmp_path)
    found.look()
    (tmp_path / "users").touch()
    monkeypatch.setattr(shm, "held_files", lambda *_: asked.append(1) or set())
    for _ in range(20):
        found.look()
    assert len(asked) == 10


def test_what_is_not_ours_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = leftovers(tmp_path, alone=True)
    (tmp_path / "psm_x").touch()
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    assert found.remove() == {}


def test_where_there_is_no_shared_memory(tmp_path: Path) -> None:
    assert leftovers(tmp_path / "none", alone=True).remove() == {}
