"""`vllm-matrix run` where the disk of the results is full: one clear error, nothing lost, and it can be resumed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from harness.project import Project
from harness.records import records_of, runs_of
from harness.share import VARIABLE
from harness.status import Status
from tests.test_local_run import RIG, User, statuses, user  # noqa: F401 - a fixture
from tests.test_run import project  # noqa: F401 - a fixture

LAST = '(out / "artifacts" / "reference.json").write_text'
ITS_OWN_FAULT = {Status.FAIL, Status.CRASH}
FILLS = """
if cell["scenario"] != "cold_start" and (project / "fill").exists():
    (out / "artifacts" / "fill").write_bytes(bytes(8 << 20))
"""


@pytest.fixture
def full(user: User, project: Project, small_disk: Path) -> User:  # noqa: F811
    """A user whose cells fill the disk of the results."""
    user.environ[VARIABLE] = os.environ[VARIABLE]
    (project.root / "results").symlink_to(small_disk)
    begin, end = RIG.split(LAST)
    (project.suite / "rig" / "__main__.py").write_text(f"{begin}{FILLS}{LAST}{end}")
    for name in ("go", "fill"):
        (project.root / name).touch()
    return user


def said_by(user: User, code: int, *arguments: str) -> str:  # noqa: F811
    terminal = user.run("--backend", "local", *arguments)
    assert terminal.process.wait(90) == code, terminal.said.decode()
    terminal.reader.join(10)
    said = terminal.said.decode()
    assert "Traceback" not in said
    return said


def test_a_cell_that_fills_the_disk_fails_with_evidence(full: User, project: Project) -> None:  # noqa: F811
    """The room that is kept back is enough for its record and for the page."""
    said = said_by(full, 1, "--target", "vllm-0.10.0")
    assert "error:" not in said
    (folder,) = runs_of(project.results)
    before = records_of(folder)
    (failed,) = [record for record in before.values() if record.status is not Status.PASS]
    assert failed.status in ITS_OWN_FAULT
    assert failed.exit is not None
    assert failed.exit.exit_code == 1
    assert "a" in [check.id for check in failed.checks]
    assert b"No space left" in (next(folder.rglob("fill")).parents[2] / "stderr.log").read_bytes()
    assert statuses(folder) == {"PASS": 1, failed.status: 1}


def test_a_run_whose_disk_is_full_ends_with_one_error_and_is_resumed(full: User, project: Project) -> None:  # noqa: F811
    """Cells that run at the same time may have no room to begin."""
    said = said_by(full, 5)
    assert said.count("error:") == 1
    assert "No space left on device" in said
    assert "Nothing that was recorded is lost" in said
    (folder,) = runs_of(project.results)
    before = records_of(folder)
    assert len(before) >= 2
    assert list(folder.rglob(".room")) == []
    make_room(project, folder)
    terminal = full.run("--backend", "local", "--resume", folder.name)
    assert terminal.process.wait(90) in (0, 1)
    after = records_of(folder)
    assert len(after) == 4
    assert {cell: after[cell] for cell in before} == before
    assert set(statuses(folder)) <= {Status.PASS, *ITS_OWN_FAULT}


def make_room(project: Project, folder: Path) -> None:  # noqa: F811
    (project.root / "fill").unlink()
    for fill in folder.rglob("fill"):
        fill.unlink()


def test_a_disk_that_is_full_from_the_start_is_one_error(full: User, small_disk: Path) -> None:
    with pytest.raises(OSError, match="No space left"):
        (small_disk / "other").write_bytes(bytes(8 << 20))
    said = said_by(full, 5)
    assert said.count("error:") == 1
    assert "No space left on device" in said
