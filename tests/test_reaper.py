"""What is taken for left behind, and what is somebody else's. Killed harnesses for real: test_backend_contract.py."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import platformdirs
import pytest
from docker.errors import DockerException, NotFound
from typer.testing import CliRunner

from harness import reaper, workplace
from harness.backends import local, size
from harness.backends import owner as owners
from harness.backends.owner import FILE, LABEL, Owner, owner
from harness.cli import app
from harness.errors import DockerMissingError, InfrastructureError
from harness.images import lock_of
from harness.project import Project
from harness.share import VARIABLE
from tests.bench import carriers, wait_for
from tests.test_local_run import User, user  # noqa: F401 - a fixture
from tests.test_run import project  # noqa: F401 - a fixture

ME = owners._self()
BOOT = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
BEFORE, AFTER = BOOT - 60, BOOT + 60
LIVES = owner()
DEAD = f"{ME.boot} {ME.namespace} {ME.pid} {ME.started + 1}"  # its PID is another process's now
INIT = f"{ME.boot} {ME.namespace} 4194305 1"  # beyond what a PID can be
OUT_OF_SIGHT = f"{ME.boot} pid:[1] {ME.pid} 1"
OTHER_BOOT = f"other {ME.namespace} {ME.pid} {ME.started}"


@pytest.mark.parametrize(
    ("mark", "made", "runs", "ended"),
    [
        (LIVES, AFTER, False, False),
        (DEAD, AFTER, True, True),
        (INIT, AFTER, False, True),
        (OUT_OF_SIGHT, BEFORE, False, False),
        (OTHER_BOOT, BEFORE, False, True),
        (OTHER_BOOT, BEFORE, True, False),  # runs on: on another machine
        (OTHER_BOOT, AFTER, False, False),  # made since we booted: there as well
    ],
    ids=["lives", "ended", "never was", "out of sight", "another boot", "another machine", "since this boot"],
)
def test_who_has_ended(mark: str, made: float, runs: bool, ended: bool) -> None:
    whose = Owner.parse(mark)
    assert whose is not None
    assert whose.has_ended(made, runs) == ended
    assert str(whose) == mark
    assert whose.is_me == (mark == LIVES)


@pytest.mark.parametrize("mark", ["", "me", "a b c d", "a b 1", "a b 1 -2", "a b 1 2 3", "\0", "a b ² 1"])
def test_what_is_no_mark_is_nobodys(mark: str) -> None:
    assert Owner.parse(mark) is None


def test_a_zombie_has_ended() -> None:
    code = "from harness.backends.owner import owner; print(owner())"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        whose = Owner.parse(process.stdout.read())
        assert whose is not None
        wait_for(lambda: whose.has_ended(AFTER))
        assert Path(f"/proc/{process.pid}/stat").exists()


# --- folders ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """TMPDIR."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def folder(parent: Path, mark: str | None, name: str = "vllm-matrix-x") -> Path:
    made = parent / name
    (made / "cache").mkdir(parents=True)
    if mark is not None:
        (made / FILE).write_text(mark)
    return made


def reaped(ours: bool = False, dry_run: bool = False) -> list[str]:
    return list(reaper.reap([reaper.folders], ours, dry_run))


def test_folders_of_the_dead_go(scratch: Path) -> None:
    dead = folder(scratch, DEAD)
    (dead / "cache").chmod(0)  # a cell may do that
    lives = folder(scratch, LIVES, "vllm-matrix-y")
    assert reaped(dry_run=True) == [f"left: folder {dead}"]
    assert dead.exists()
    assert reaped() == [f"removed: folder {dead}"]
    assert not dead.exists()
    assert lives.exists()
    assert reaped(ours=True) == [f"removed: folder {lives}"]
    assert not lives.exists()


def test_folders_of_others_stay(scratch: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = folder(tmp_path_factory.mktemp("elsewhere"), DEAD)
    (scratch / "vllm-matrix-link").symlink_to(elsewhere)
    (scratch / "vllm-matrix-file").write_text(DEAD)
    folder(scratch, None, "vllm-matrix-repro")
    folder(scratch, "nonsense", "vllm-matrix-nonsense")
    folder(scratch, OUT_OF_SIGHT, "vllm-matrix-container")
    folder(scratch, OTHER_BOOT, "vllm-matrix-machine")
    folder(scratch, DEAD, "other-program")
    pipe = folder(scratch, None, "vllm-matrix-pipe")
    os.mkfifo(pipe / FILE)
    before = sorted(scratch.rglob("*"))
    assert reaped() == []
    assert sorted(scratch.rglob("*")) == before
    assert elsewhere.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_folders_of_other_users_stay(scratch: Path) -> None:
    os.chown(folder(scratch, DEAD), 12345, 12345)
    assert reaped() == []


def test_a_scratch_folder_says_whose_it_is(scratch: Path) -> None:
    with local.scratch_folder() as made:
        assert (made / FILE).read_text() == LIVES
    assert not made.exists()


def test_stages_that_nobody_makes_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platformdirs, "user_cache_path", lambda name: tmp_path / "cache")
    root = tmp_path / "environments"
    left = folder(root, None, ".vllm-0.7.3-cpu-1.stage")
    made = folder(root, None, ".vllm-0.7.3-cpu-2.stage")
    environment = folder(root, None, "vllm-0.7.3-cpu-1")
    with lock_of("vllm-0.7.3-cpu-2"):
        assert list(reaper.reap([reaper.making(root)])) == [f"removed: folder {left}"]
    assert not left.exists()
    assert made.exists()
    assert environment.exists()


# --- processes -------------------------------------------------------------------------------------------------------


Start = Callable[[str], str]


@pytest.fixture
def cell() -> Iterator[Start]:
    """Starts a process as a cell leaves it, and a child of it that has cleared its environment; their mark."""
    started: dict[str, subprocess.Popen[bytes]] = {}

    def start(owned_by: str) -> str:
        mark = f"cell-{uuid.uuid4().hex}"
        child = [sys.executable, "-c", "import time; time.sleep(600)", mark]
        code = f"import subprocess; subprocess.run({child}, env={{}})"
        environ = {local.MARK: mark, owners.VARIABLE: owned_by}
        started[mark] = subprocess.Popen([sys.executable, "-c", code], env=environ, start_new_session=True)
        wait_for(lambda: len(carriers(mark)) == 2)
        return mark

    yield start
    for mark, process in started.items():
        local.sweep(mark)
        process.wait()


def test_processes_of_the_dead_go(cell: Start, boot: str) -> None:
    dead, *others = [cell(mark.replace(ME.boot, boot)) for mark in (DEAD, LIVES, OUT_OF_SIGHT, OTHER_BOOT, "")]
    assert list(reaper.reap([reaper.processes], dry_run=True)) == [f"left: processes of {dead}"]
    assert list(reaper.reap([reaper.processes])) == [f"removed: processes of {dead}"]
    wait_for(lambda: carriers(dead) == [])
    assert [len(carriers(mark)) for mark in others] == [2, 2, 2, 2]


# --- containers ------------------------------------------------------------------------------------------------------


class Daemon:
    """Answers as Docker does: a list without users, and one container at a time with."""

    def __init__(self, *rows: dict[str, Any]) -> None:
        self.rows = {f"{index:064x}": row for index, row in enumerate(rows)}
        self.api = self.containers = self
        self.name = ""

    def __call__(self, *, all: bool, filters: dict[str, str]) -> list[dict[str, Any]]:  # noqa: A002 - as there
        assert (all, filters) == (True, {"label": LABEL})
        return [{"Id": name, **row} for name, row in self.rows.items()]

    def inspect_container(self, name: str) -> dict[str, Any]:
        return {"Config": {"User": self.rows[name]["User"]}}

    def get(self, name: str) -> Daemon:
        self.name = name
        return self

    def remove(self, *, force: bool, v: bool) -> None:
        assert (force, v) == (True, True)
        if self.rows.pop(self.name, None) is None:
            raise NotFound("no such container")


def row(
    name: str, mark: str, state: str = "running", made: float = AFTER, runs_as: str | None = None
) -> dict[str, Any]:
    own = f"{os.getuid()}:{os.getgid()}"
    return {
        "Names": [f"/{name}"],
        "Labels": {LABEL: mark},
        "State": state,
        "Created": int(made),
        "User": own if runs_as is None else runs_as,
    }


def test_containers_of_the_dead_go() -> None:
    daemon = Daemon(
        row("dead", DEAD),
        row("lives", LIVES),
        row("user", DEAD, runs_as="12345:12345"),
        row("root", DEAD, runs_as=""),
        row("namespace", OUT_OF_SIGHT, "exited", BEFORE),
        row("boot", OTHER_BOOT, "exited", BEFORE),
        row("machine", OTHER_BOOT, "running", BEFORE),
        row("recent", OTHER_BOOT, "exited", AFTER),
        row("nobody", "?", "exited", BEFORE),
    )
    finds = [reaper.containers(daemon)]  # type: ignore[arg-type]
    assert list(reaper.reap(finds, dry_run=True)) == ["left: container dead", "left: container boot"]
    assert len(daemon.rows) == 9
    assert list(reaper.reap(finds)) == ["removed: container dead", "removed: container boot"]
    assert list(reaper.reap(finds, ours=True)) == ["removed: container lives"]
    assert len(daemon.rows) == 6


def test_a_daemon_that_fails_is_a_line_and_the_rest_goes_on(scratch: Path) -> None:
    def breaks(_ours: bool) -> Iterator[reaper.Remnant]:
        raise DockerException("broken")

    folder(scratch, DEAD)
    said = list(reaper.reap([breaks, reaper.folders]))
    assert said == ["what is left cannot be looked for: broken", f"removed: folder {scratch / 'vllm-matrix-x'}"]


# --- the verb --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [DockerMissingError("no Docker"), InfrastructureError("it refuses us")])
def test_clean_says_what_it_does(scratch: Path, monkeypatch: pytest.MonkeyPatch, error: InfrastructureError) -> None:
    def connect() -> None:
        raise error

    monkeypatch.setattr(workplace, "connect", connect)
    monkeypatch.setattr(workplace, "environments_root", lambda: scratch)
    dead = folder(scratch, DEAD)
    refused = [] if isinstance(error, DockerMissingError) else ["containers cannot be looked for: it refuses us"]

    def said(*words: str) -> list[str]:
        result = CliRunner().invoke(app, ["clean", *words])
        assert result.exit_code == 0
        return result.output.splitlines()

    assert said("--dry-run") == [*refused, f"left: folder {dead}"]
    assert said() == [*refused, f"removed: folder {dead}"]
    assert said() == (refused or ["nothing is left of any harness that has ended"])


def test_a_run_removes_it_too(user: User, project: Project) -> None:  # noqa: F811
    (project.root / "go").touch()
    with tempfile.TemporaryDirectory(dir="/tmp") as short:  # sockets have their names in there
        user.environ |= {"TMPDIR": short, VARIABLE: os.environ[VARIABLE]}
        dead = folder(Path(short), DEAD)
        terminal = user.run("--backend", "local", "--target", "vllm-0.10.0")
        assert terminal.process.wait(90) == 0
        wait_for(lambda: f"removed: folder {dead}" in terminal.said.decode())
        assert list(Path(short).iterdir()) == []


# --- how much a cell takes -------------------------------------------------------------------------------------------


def test_used_counts_what_is_there_once(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "a").write_bytes(b"x" * (1 << 20))
    os.link(tmp_path / "deep" / "a", tmp_path / "b")
    (tmp_path / "c").symlink_to("/proc")
    os.mkfifo(tmp_path / "d")
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(1 << 40)
    assert 1 << 20 <= size.used(tmp_path) <= (1 << 20) + 6 * 4096
    assert size.used(tmp_path / "gone") == 0


def test_empty_files_count_too_and_counting_stops_at_the_limit(tmp_path: Path) -> None:
    for number in range(100):
        (tmp_path / str(number)).touch()
    assert size.used(tmp_path) == 100 * 4096
    assert size.used(tmp_path, limit=10 * 4096) == 11 * 4096


def test_the_guard_looks_now_and_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(size, "_EVERY", 0.3)
    guard = size.Guard(tmp_path, limit=1 << 16)
    assert not guard.exceeded()
    (tmp_path / "a").write_bytes(bytes(1 << 17))
    assert not guard.exceeded()
    time.sleep(0.35)
    assert guard.exceeded()
