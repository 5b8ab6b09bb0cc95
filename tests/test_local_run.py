"""`vllm-matrix run --backend local` as a user runs it: a real process on a terminal, real cells, Ctrl-C, `--resume`.

A throw-away rig stands in for the real one, and a virtual environment that borrows the tests' packages for a target's.
"""

from __future__ import annotations

import contextlib
import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import sysconfig
import threading
import time
import venv
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from harness.environments import MARKER
from harness.project import Project, build_options, images_for
from harness.records import records_of, runs_of
from tests.bench import carriers, wait_for
from tests.test_run import project  # noqa: F401 - a fixture

# What the host has to bring and the models are other tests' business.
ENTRY = """
from harness import models, workplace
workplace.check_host = lambda devices: None
models.generate = lambda root: {}
from harness.cli import main
main()
"""

RIG = """
import hashlib, json, os, pathlib, signal, subprocess, time
cell = json.loads(pathlib.Path(os.environ["VLLM_MATRIX_IN"], "cell.json").read_text())
out = pathlib.Path(os.environ["VLLM_MATRIX_OUT"])
project = pathlib.Path(__file__).parents[2]

def say(kind, **fields):
    common = {"schema": 1, "seq": 0, "pid": 7, "rank": 0, "mono_ns": 1, "utc": "2026-11-30T00:00:00Z", "type": kind}
    with (out / "events.jsonl").open("a") as file:
        file.write(json.dumps({**common, **fields}) + "\\n")

say("hello", python="3.11.2", platform="linux", distributions={})
say("plan", checks=["a"])
say("start", check="a")
if cell["scenario"] != "cold_start" and not (project / "go").exists():
    if (project / "deaf").exists():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    subprocess.Popen(["sleep", "600"], start_new_session=True)
    (project / "sleeping").touch()
    time.sleep(600)
(out / "artifacts" / "reference.json").write_text("{}")
say("artifact", path="reference.json", sha256=hashlib.sha256(b"{}").hexdigest(), bytes=2)
say("end", check="a", outcome="passed", seconds=0.1)
(out / "DONE").write_text('{"schema": 1, "exit": 0, "checks": 1}')
"""


@dataclass
class Terminal:
    """A process, and what it has said so far."""

    process: subprocess.Popen[bytes]
    descriptor: int
    said: bytearray = field(default_factory=bytearray)

    def __post_init__(self) -> None:
        self.reader = threading.Thread(target=self._read, daemon=True)

    def keys(self, pressed: bytes) -> None:
        with contextlib.suppress(OSError):  # nobody listens any more
            os.write(self.descriptor, pressed)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.reader.join(10)
        os.close(self.descriptor)

    def _read(self) -> None:
        try:
            while chunk := os.read(self.descriptor, 1 << 16):
                self.said += chunk
        except OSError:  # a terminal whose last process has gone
            pass


@dataclass
class User:
    """Somebody in the project's folder."""

    root: Path
    environ: dict[str, str]
    started: list[Terminal] = field(default_factory=list)

    def run(self, *arguments: str, on_a_terminal: bool = False) -> Terminal:
        words = [sys.executable, "-c", ENTRY, "run", *arguments]
        if on_a_terminal:
            ours, theirs = pty.openpty()
            words = ["setsid", "-c", *words]  # the terminal is the one that Ctrl-C is typed at
            stdin = theirs
        else:
            ours, theirs = os.pipe()
            stdin = subprocess.DEVNULL
        process = subprocess.Popen(words, cwd=self.root, env=self.environ, stdin=stdin, stdout=theirs, stderr=theirs)
        os.close(theirs)
        made = Terminal(process, ours)
        made.reader.start()
        self.started.append(made)
        return made

    def asleep(self) -> None:
        """Until a cell is in the middle of its work."""
        wait_for((self.root / "sleeping").exists, 60)

    def cells(self) -> list[str]:
        return carriers(f"VLLM_MATRIX_OUT={self.root}")


@pytest.fixture
def user(project: Project, monkeypatch: pytest.MonkeyPatch) -> Iterator[User]:  # noqa: F811
    rig = project.suite / "rig"
    rig.mkdir()
    (rig / "__main__.py").write_text(RIG)
    cache = project.root / "cache"
    options = build_options(project)
    for image in images_for(project, project.cells, options, "local").values():
        folder = cache / "vllm-matrix" / "environments" / image.tag
        venv.create(folder, symlinks=True)
        (site,) = folder.glob("lib/python3*/site-packages")
        (site / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
        (folder / MARKER).write_text('{"bytes": 1}')
    environ = {"PATH": os.environ["PATH"], "HOME": str(project.root), "XDG_CACHE_HOME": str(cache)}
    environ |= {"PYTHONPATH": str(Path.cwd()), "TERM": "xterm", "COLUMNS": "200"}
    user = User(project.root, environ)
    yield user
    for terminal in user.started:
        terminal.close()
    wait_for(lambda: user.cells() == [])


def statuses(folder: Path) -> dict[str, int]:
    cells = json.loads((folder / "matrix.json").read_text())["cells"]
    found = [cell["status"] for cell in cells]
    return {status: found.count(status) for status in found}


CTRL_C = b"\x03"
WAYS: dict[str, tuple[bool, Callable[[Terminal], object]]] = {
    "Ctrl-C at a terminal": (True, lambda terminal: terminal.keys(CTRL_C)),
    "SIGINT without a terminal": (False, lambda terminal: terminal.process.send_signal(signal.SIGINT)),
    "SIGTERM": (False, lambda terminal: terminal.process.send_signal(signal.SIGTERM)),
}


@pytest.mark.parametrize("way", WAYS)
def test_interrupted_in_mid_cell_and_resumed(user: User, project: Project, way: str) -> None:  # noqa: F811
    on_a_terminal, interrupt = WAYS[way]
    terminal = user.run("--backend", "local", on_a_terminal=on_a_terminal)
    user.asleep()
    assert user.cells() != []
    interrupt(terminal)
    assert terminal.process.wait(15) == 130
    assert user.cells() == []
    (folder,) = runs_of(project.results)
    done = records_of(folder)
    assert done
    assert {record.backend for record in done.values()} == {"local"}
    wait_for(lambda: b"matrix.json" in terminal.said)
    said = terminal.said.decode()
    assert f"run {folder.name}" in said
    assert "NOTRUN" in said
    assert "1/1 local" in said
    assert "Traceback" not in said
    assert on_a_terminal or "stopping; Ctrl-C kills it" in said
    assert statuses(folder) == {"PASS": len(done), "NOTRUN": 4 - len(done)}
    (project.root / "go").touch()
    again = user.run("--resume", folder.name)
    assert again.process.wait(60) == 0
    wait_for(lambda: b"matrix.json" in again.said)
    assert f"resume {folder.name}: {len(done)} cells keep their record" in again.said.decode()
    assert runs_of(project.results) == (folder,)
    assert statuses(folder) == {"PASS": 4}
    for cell, record in done.items():
        assert records_of(folder)[cell] == record


def test_ctrl_c_again_and_again_leaves_nothing_behind(user: User, project: Project) -> None:  # noqa: F811
    (project.root / "deaf").touch()
    terminal = user.run("--backend", "local", on_a_terminal=True)
    user.asleep()
    begin = time.monotonic()
    for _ in range(5):
        terminal.keys(CTRL_C)
        time.sleep(0.3)
    assert terminal.process.wait(15) == 130
    assert time.monotonic() - begin < 15, "the grace of 20 seconds was cut short"
    assert user.cells() == []
    wait_for(lambda: b"matrix.json" in terminal.said)


def test_a_killed_harness_takes_its_cells_along(user: User) -> None:
    terminal = user.run("--backend", "local")
    user.asleep()
    terminal.process.kill()
    wait_for(lambda: user.cells() == [], 10)


def test_without_docker_it_says_where_cells_run(user: User, project: Project) -> None:  # noqa: F811
    (project.root / "go").touch()
    user.environ["PATH"] = os.path.dirname(sys.executable)  # noqa: PTH120
    terminal = user.run()
    assert terminal.process.wait(60) == 0
    wait_for(lambda: b"matrix.json" in terminal.said)
    assert "there is no docker on PATH: cells run as processes of this host" in terminal.said.decode()
    (folder,) = runs_of(project.results)
    assert {record.backend for record in records_of(folder).values()} == {"local"}


def test_repro_of_a_local_record_is_a_local_command(user: User, project: Project) -> None:  # noqa: F811
    (project.root / "go").touch()
    assert user.run("--backend", "local", "--scenario", "cold_start").process.wait(60) == 0
    (folder,) = runs_of(project.results)
    cell, record = next(iter(records_of(folder).items()))
    assert record.image is not None
    words = [sys.executable, "-c", ENTRY, "repro", cell]
    printed = subprocess.run(words, cwd=user.root, env=user.environ, capture_output=True, text=True, check=True).stdout
    assert f"{record.image.id}/bin/python3 -m rig" in printed
    subprocess.run(["/bin/sh", "-ec", printed], check=True, capture_output=True, env={"PATH": os.environ["PATH"]})
    out = Path(printed.split("VLLM_MATRIX_OUT=")[1].split()[0])
    assert json.loads((out / "DONE").read_text())["exit"] == 0
    shutil.rmtree(out.parent)


def test_a_cell_without_a_container_shows_as_such(user: User, project: Project) -> None:  # noqa: F811
    (project.root / "go").touch()
    assert user.run("--backend", "local").process.wait(60) == 0
    (folder,) = runs_of(project.results)
    assert "PASS 1/1 local" in (folder / "matrix.md").read_text()


def test_resume_takes_its_cells_from_the_run(user: User, project: Project) -> None:  # noqa: F811
    (project.root / "go").touch()
    assert user.run("--backend", "local", "--scenario", "cold_start").process.wait(60) == 0
    (folder,) = runs_of(project.results)
    for arguments in (["--fresh"], ["--scenario", "cold_start"], ["--profile", "full"]):
        refused = user.run("--resume", folder.name, *arguments)
        assert refused.process.wait(60) == 2
        wait_for(lambda said=refused.said: b"takes its cells from the run" in said)
    assert user.run("--resume", "no-such-run").process.wait(60) == 3
