"""Leases: real locks, real processes, two users."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from harness import leases as module
from harness.cells import Resources
from harness.errors import InfrastructureError
from harness.leases import Lease, Leases, Wish
from tests.conftest import ROOT

A, B, C = (f"GPU-{letter * 8}-0000-0000-0000-000000000000" for letter in "abc")
GIB = 1 << 30
ALL = (A, B, C)
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be two users")

# Imports first: another user may not be able to read where we are installed.
WORKER = """
import os, sys
from pathlib import Path
from harness.leases import Leases, Wish
folder, uid, umask = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3], 8)
os.umask(umask)
if uid != os.geteuid():
    os.setgroups([]); os.setgid(uid); os.setuid(uid)
leases = Leases(4, 8 << 30, folder)
held = None
for line in sys.stdin:
    word, *rest = line.split()
    if word == "take":
        wish = Wish(gpus=int(rest[0]), cpus=int(rest[1]), memory=int(rest[2]) << 30, among=tuple(rest[3:]))
        held = leases.attempt(wish, f"cell-of-{uid}")
        print(",".join(held.gpus) or "slots" if held else "busy", flush=True)
    else:
        held.release()
        print("released", flush=True)
"""

HAMMER = """
import os, sys, time
from pathlib import Path
from harness.leases import Leases, Wish
folder, rounds, gpus = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
for _ in range(rounds):
    wish = Wish(gpus=len(gpus), among=tuple(gpus), cpus=1, memory=1)
    leases = Leases(2, 2 << 30, folder)
    while (lease := leases.attempt(wish, "hammer")) is None:
        time.sleep(0.01)
    with lease:
        marks = [folder / f"mine-{uuid}" for uuid in lease.gpus]
        for mark in marks:
            os.close(os.open(mark, os.O_CREAT | os.O_EXCL))  # fails if anybody else believes to hold it
        for mark in marks:
            mark.unlink()
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """Not below tmp_path, which other users cannot enter."""
    parent = Path(tempfile.mkdtemp(prefix="test-leases-"))
    parent.chmod(0o777)
    yield parent / "leases"
    shutil.rmtree(parent)


@pytest.fixture
def leases(folder: Path) -> Leases:
    return Leases(4, 8 * GIB, folder)


class Worker:
    """Another process that holds leases, maybe as another user."""

    def __init__(self, folder: Path, uid: int, umask: str = "022") -> None:
        command = [sys.executable, "-c", WORKER, str(folder), str(uid), umask]
        self.process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, line: str) -> str:
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()


@pytest.fixture
def worker(folder: Path) -> Iterator[Callable[..., Worker]]:
    started: list[Worker] = []

    def start(uid: int = os.geteuid(), umask: str = "022") -> Worker:
        started.append(Worker(folder, uid, umask))
        return started[-1]

    yield start
    for one in started:
        one.process.kill()
        one.process.communicate()


def gpus(count: int, *among: str) -> Wish:
    return Wish(gpus=count, among=among or ALL)


def take(leases: Leases, wish: Wish, cell: str = "x") -> Lease:
    lease = leases.attempt(wish, cell)
    assert lease, leases.holders(wish)
    return lease


def is_free(leases: Leases, wish: Wish) -> bool:
    with leases.attempt(wish, "x") or contextlib.nullcontext() as lease:
        return lease is not None


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_all_or_nothing(leases: Leases) -> None:
    before = descriptors()
    first = take(leases, gpus(2), "x")
    assert first.gpus == (A, B)
    assert first.intact
    assert not is_free(leases, gpus(2))
    third = take(leases, gpus(1), "y")
    assert third.gpus == (C,)
    first.release()
    first.release()
    third.release()
    assert not first.intact
    assert descriptors() == before
    with take(leases, gpus(3), "z") as all_of_them:
        assert all_of_them.gpus == ALL


def test_the_best_are_taken_first(leases: Leases) -> None:
    with take(leases, gpus(2, C, A, B), "x") as lease:
        assert lease.gpus == (C, A)
        with take(leases, gpus(1, C, A, B), "y") as other:
            assert other.gpus == (B,)


def test_slots_are_whole_cpus_and_gibibytes(leases: Leases) -> None:
    small = Wish(cpus=1.5, memory=5 * GIB + 1)
    first = take(leases, small, "x")
    assert not is_free(leases, small)  # 2 of 4 CPUs are left, but 2 of 8 GiB
    with take(leases, Wish(cpus=2, memory=2 * GIB), "y"):  # so those two CPUs were given back
        assert not is_free(leases, Wish(cpus=0.1))
        first.release()
        assert is_free(leases, Wish(cpus=0.1))


def test_gpus_are_given_back_where_slots_are_missing(leases: Leases) -> None:
    with take(leases, Wish(cpus=4), "x"):
        assert not is_free(leases, Wish(gpus=1, among=(A,), cpus=1))
        assert is_free(leases, gpus(1, A))


def test_a_cell_that_wants_more_than_there_is_runs_alone(leases: Leases) -> None:
    big = Wish(cpus=64, memory=64 * GIB)
    with take(leases, big, "x"):
        assert not is_free(leases, Wish(cpus=1))
    with take(leases, Wish(cpus=1), "y"):
        assert not is_free(leases, big)
    assert is_free(leases, big)


def test_a_wish_of_resources(leases: Leases) -> None:
    resources = Resources(cpus=2, memory=GIB, shm=1, gpus=1)
    wish = Wish.of(resources, [A])
    assert wish == Wish(gpus=1, among=(A,), cpus=2, memory=GIB)
    assert gpus(1, C, A, B, A).candidates == [A, B, C]  # sorted, whatever is preferred
    assert Wish.of(Resources(cpus=0.5, memory=1, shm=1, gpus=0)).slots == {"cpus": 1, "memory": 1}
    nothing = take(leases, Wish(), "x")
    assert nothing.intact


def test_wishes_that_cannot_come_true(leases: Leases) -> None:
    with pytest.raises(InfrastructureError, match="2 GPUs are wanted, and there are 1 to choose from"):
        leases.attempt(gpus(2, A, A), "x")
    with pytest.raises(ValueError, match="no UUIDs"):
        leases.attempt(gpus(1, "../../etc/passwd"), "x")


def test_who_holds_it_is_told_and_gives_it_back_by_ending(leases: Leases, worker: Callable[..., Worker]) -> None:
    other = worker()
    assert other.ask(f"take 1 3 0 {A}") == A
    wish = Wish(gpus=1, among=(A,), cpus=2)
    assert leases.attempt(wish, "x") is None
    who = rf"held by pid {other.process.pid} of \S+ since \S+Z for cell-of-"
    held = "; ".join(leases.holders(wish))
    assert re.search(f"{A} is {who}", held)
    assert re.search(f"3 of 4 CPUs are {who}", held)
    other.process.kill()  # in whatever way it ends, its lease ends with it
    other.process.wait()
    with leases.attempt(Wish(gpus=1, among=(A,), cpus=4), "x") or pytest.fail("not free") as lease:
        assert lease.gpus == (A,)


def test_the_dead_hold_nothing(leases: Leases, worker: Callable[..., Worker]) -> None:
    other = worker()
    assert other.ask(f"take 2 4 8 {A} {B}") == f"{A},{B}"
    assert not is_free(leases, gpus(1, A, B))
    assert not is_free(leases, Wish(memory=1))
    other.process.send_signal(signal.SIGKILL)
    other.process.wait()
    assert is_free(leases, Wish(gpus=3, among=ALL, cpus=4, memory=8 * GIB))


def test_a_forked_child_holds_nothing_once_it_is_released(leases: Leases) -> None:
    lease = take(leases, Wish(gpus=1, among=(A,), cpus=4), "x")
    kept = [os.dup(file.fileno()) for file in lease._files.values()]  # as a child has them that did not exec
    try:
        lease.release()
        assert is_free(leases, Wish(gpus=1, among=(A,), cpus=4))
    finally:
        for descriptor in kept:
            os.close(descriptor)


def test_overlapping_wishes_neither_deadlock_nor_collide(folder: Path) -> None:
    pairs = [(A, B), (B, C), (C, A)]
    command = [sys.executable, "-c", HAMMER, str(folder), "25"]
    running = [subprocess.Popen([*command, *pair], cwd=ROOT) for pair in pairs]
    assert [process.wait(100) for process in running] == [0, 0, 0]


def test_a_stopped_holder_of_the_guard_blocks_for_a_second_only(leases: Leases, folder: Path) -> None:
    with module._folder(folder) as opened, module._guard(opened) as guarded:
        assert guarded
        begin = time.monotonic()
        assert not is_free(leases, gpus(1))
        assert 0.9 < time.monotonic() - begin < 5
        assert leases.holders(gpus(1)) == (f"somebody holds {folder}/guard.lock",)


@as_root
@pytest.mark.parametrize("umask", ["022", "077"])
def test_two_users(folder: Path, worker: Callable[..., Worker], umask: str) -> None:
    one, two, root = worker(20001, umask), worker(20002, umask), worker(0, umask)
    assert one.ask(f"take 1 2 4 {A} {B} {C}") == A
    assert two.ask(f"take 1 2 4 {A} {B} {C}") == B
    assert root.ask(f"take 1 0 0 {A} {B}") == "busy"
    assert root.ask("take 0 1 0") == "busy"
    assert one.ask("release") == "released"
    assert two.ask("release") == "released"
    assert two.ask(f"take 2 4 8 {A} {C}") == f"{A},{C}"  # files that the other one made
    assert one.ask(f"take 1 0 0 {A}") == "busy"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o1777
    files = [path.stat() for path in folder.iterdir()]
    assert {stat.S_IMODE(state.st_mode) for state in files} == {0o666}
    assert {state.st_uid for state in files} <= {20001, 20002}
    two.process.kill()
    two.process.wait()
    assert one.ask(f"take 1 4 8 {A}") == A


@as_root
def test_files_of_others_are_opened_as_a_sticky_folder_allows_it(
    folder: Path, worker: Callable[..., Worker], leases: Leases, monkeypatch: pytest.MonkeyPatch
) -> None:
    """fs.protected_regular forbids O_CREAT without O_EXCL there, even to root."""
    assert worker(20001).ask(f"take 1 1 1 {A}") == A
    real = os.open

    def strict(path: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if flags & os.O_CREAT and not flags & os.O_EXCL:
            raise PermissionError(13, "Permission denied")
        return real(path, flags, mode, dir_fd=dir_fd)

    monkeypatch.setattr(os, "open", strict)
    with take(leases, Wish(gpus=1, among=(A, B), cpus=1, memory=1), "x") as lease:
        assert lease.gpus == (B,)


@as_root
def test_a_folder_that_another_user_closed_is_an_error(folder: Path, worker: Callable[..., Worker]) -> None:
    folder.mkdir(mode=0o755)
    os.chown(folder, 20002, 20002)
    folder.chmod(0o755)
    other = worker(20001)
    assert other.ask("take 0 1 0") == ""  # it ended by the error
    assert other.process.wait() == 1


def test_half_made_files_are_mended_by_their_owner(folder: Path, leases: Leases) -> None:
    """As a process leaves them that was killed between making one and opening it up."""
    folder.mkdir(mode=0o700)
    (folder / f"{A}.lock").touch(mode=0o600)
    with take(leases, gpus(1, A), "x"):
        assert stat.S_IMODE((folder / f"{A}.lock").stat().st_mode) == 0o666
        assert stat.S_IMODE(folder.stat().st_mode) == 0o1777


def plant_link(path: Path) -> None:
    path.symlink_to(path.parent.parent / "precious")


def plant_dangling_link(path: Path) -> None:
    path.symlink_to(path.parent.parent / "not-there")


def plant_hard_link(path: Path) -> None:
    path.hardlink_to(path.parent.parent / "precious")


def plant_pipe(path: Path) -> None:
    os.mkfifo(path)


def plant_folder(path: Path) -> None:
    path.mkdir()


@pytest.mark.parametrize("plant", [plant_link, plant_dangling_link, plant_hard_link, plant_pipe, plant_folder])
@pytest.mark.parametrize("name", [f"{A}.lock", "cpus.slots", "guard.lock"])
def test_what_is_planted_is_refused(
    folder: Path, leases: Leases, plant: Callable[[Path], None], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_PATIENCE", 0.05)
    precious = folder.parent / "precious"
    precious.write_text("precious")
    precious.chmod(0o600)
    folder.mkdir()
    plant(folder / name)
    before = descriptors()
    with pytest.raises(InfrastructureError, match=name):
        leases.attempt(Wish(gpus=1, among=(B, A), cpus=1), "x")
    assert descriptors() == before
    assert precious.read_text() == "precious"
    assert stat.S_IMODE(precious.stat().st_mode) == 0o600
    assert not (folder.parent / "not-there").exists()
    (folder / name).rmdir() if plant is plant_folder else (folder / name).unlink()
    assert is_free(leases, Wish(gpus=2, among=(B, A), cpus=4))  # nothing stayed locked


@pytest.mark.parametrize("what", ["link", "file", "no parent"])
def test_a_folder_that_is_none_is_refused(folder: Path, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PATIENCE", 0.05)
    if what == "link":
        folder.symlink_to(folder.parent)
    elif what == "file":
        folder.touch()
    else:
        folder = folder / "deeper"
    with pytest.raises(InfrastructureError, match="cannot be used for leases"):
        Leases(4, GIB, folder).attempt(Wish(cpus=1), "x")


def test_a_file_removed_before_it_is_locked_is_made_again(
    folder: Path, leases: Leases, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, removed = module.fcntl.flock, []

    def late(file: object, how: int) -> None:
        path = folder / f"{A}.lock"
        if path.exists() and not removed:
            path.unlink()
            removed.append(path)
        real(file, how)  # type: ignore[arg-type]

    monkeypatch.setattr(module.fcntl, "flock", late)
    with take(leases, gpus(1, A), "x") as lease:
        assert removed
        assert lease.intact
        assert not is_free(leases, gpus(1, A))


def test_a_lease_whose_files_were_removed_says_so(folder: Path, leases: Leases) -> None:
    for wish in (gpus(1, A), Wish(cpus=1)):
        lease = take(leases, wish, "x")
        assert lease.intact
        shutil.rmtree(folder)
        assert not lease.intact
        again = take(leases, wish, "y")
        assert again.intact
        assert not lease.intact
        lease.release()
        assert again.intact
        again.release()


def test_what_holders_write_is_not_believed(folder: Path, leases: Leases) -> None:
    with take(leases, Wish(gpus=1, among=(A,), cpus=1), "a cell " + "é" * 300):
        (line, _) = leases.holders(Wish(gpus=1, among=(A,), cpus=1))
        assert f"pid {os.getpid()} of " in line
        (folder / f"{A}.lock").write_bytes(b"\x1b[2J nobody\n\xe2\x80\xae" + b"x" * 9999)
        (line, _) = leases.holders(Wish(gpus=1, among=(A,), cpus=1))
        assert line.startswith(f"{A} is held by ?[2J nobody??x")
        assert len(line) < 320
        (folder / f"{A}.lock").write_bytes(b"")
        assert leases.holders(gpus(1, A)) == (f"{A} is held by somebody",)
        assert not is_free(leases, gpus(1, A))


def test_a_full_disk_does_not_cost_the_lease(leases: Leases, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with take(leases, Wish(gpus=1, among=(A,), cpus=1), "x"):
        assert not is_free(leases, gpus(1, A))


def test_a_kernel_without_such_locks_is_an_infrastructure_error(
    leases: Leases, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(*_: object) -> int:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(module.fcntl, "fcntl", unknown)
    with pytest.raises(InfrastructureError, match="cannot be locked here"):
        leases.attempt(Wish(cpus=1), "x")
    monkeypatch.setattr(module.fcntl, "flock", unknown)
    with pytest.raises(InfrastructureError, match=r"guard.lock cannot be locked: Invalid argument"):
        leases.attempt(Wish(cpus=1), "x")


def test_a_folder_of_somebody_is_not_opened_to_all(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    (home / "letters").write_text("dear")
    with pytest.raises(InfrastructureError, match="not a folder of leases"):
        Leases(1, 1 << 30, home).attempt(Wish(cpus=1), "x")
    assert stat.S_IMODE(home.stat().st_mode) == 0o700
