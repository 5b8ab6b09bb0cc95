"""The kernel's counters of memory, wherever they are mounted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rig import cgroup
from rig.cgroup import Watch, locate

from tests.rig.run import SUITE, run_cell

ID = "/docker/abc"
V2 = {"memory.events": "low 0\nhigh 0\nmax 7\noom 2\noom_kill 1\n", "memory.max": "1000\n", "memory.peak": "900\n"}
V1 = {
    "memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n",
    "memory.failcnt": "9\n",
    "memory.max_usage_in_bytes": "800\n",
    "memory.limit_in_bytes": "9223372036854771712\n",
}


def fake(tmp_path: Path, groups: str, mounts: list[str], files: dict[str, str], where: str = "") -> Path:
    """A /proc/self and a cgroup; ``{}`` in ``mounts`` is where that is mounted."""
    folder = tmp_path / "cgroup dir" / where
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name).write_text(text)
    proc = tmp_path / "proc"
    proc.mkdir()
    (proc / "cgroup").write_text(groups)
    point = str(tmp_path / "cgroup dir").replace(" ", "\\040")
    (proc / "mountinfo").write_text("".join(f"30 1 0:1 {line.format(point)}\n" for line in mounts))
    return proc


CGROUP2 = "{} ro,nosuid shared:1 - cgroup2 cgroup rw"
MEMORY = "{} ro - cgroup cgroup rw,memory"
OTHERS = "/ /sys rw - tmpfs tmpfs rw"


@pytest.mark.parametrize(
    ("groups", "mounts", "where", "version"),
    [
        ("0::/\n", [OTHERS, f"/ {CGROUP2}"], "", 2),  # a container's own namespace
        (f"0::{ID}\n", [f"/ {CGROUP2}"], ID.strip("/"), 2),  # the host's
        (f"0::{ID}\n", [f"{ID} {CGROUP2}"], "", 2),
        ("0::/../elsewhere\n", [f"/ {CGROUP2}"], "", 2),
        (f"4:cpu:{ID}\n3:memory:{ID}\n", ["/ /other rw - cgroup cgroup rw,cpu", f"{ID} {MEMORY}"], "", 1),
        (f"3:memory:{ID}\n0::/\n", [f"/ {MEMORY}", "/ /unified rw - cgroup2 cgroup2 rw"], ID.strip("/"), 1),
    ],
)
def test_it_is_found(tmp_path: Path, groups: str, mounts: list[str], where: str, version: int) -> None:
    proc = fake(tmp_path, groups, mounts, V1 if version == 1 else V2, where)
    assert locate(proc) == (version, tmp_path / "cgroup dir" / where)


@pytest.mark.parametrize(("groups", "mounts"), [("", []), ("3:memory:/\n", [OTHERS]), ("4:cpu:/\n", [f"/ {MEMORY}"])])
def test_there_is_none(tmp_path: Path, groups: str, mounts: list[str]) -> None:
    assert locate(fake(tmp_path, groups, mounts, {})) is None
    Watch(tmp_path, True, tmp_path / "proc")
    assert read(tmp_path)["version"] == 0


def read(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "cgroup.json").read_text())


def test_version_2(tmp_path: Path) -> None:
    watch = Watch(tmp_path, True, fake(tmp_path, "0::/\n", [f"/ {CGROUP2}"], V2))
    known = {"schema": 1, "version": 2, "peak_bytes": 900, "limit_bytes": 1000}
    assert read(tmp_path) == {**known, "oom_kill": 0, "oom": 0, "limit_hits": 0}  # none since the cell began
    (tmp_path / "cgroup dir" / "memory.events").write_text("max 8\noom 4\noom_kill 3\n")
    watch.look()
    assert read(tmp_path) == {**known, "oom_kill": 2, "oom": 2, "limit_hits": 1}


def test_version_1_has_no_limit(tmp_path: Path) -> None:
    watch = Watch(tmp_path, True, fake(tmp_path, "3:memory:/\n", [f"/ {MEMORY}"], V1))
    (tmp_path / "cgroup dir" / "memory.oom_control").write_text("oom_kill 4\n")
    watch.look()
    counts = {"oom_kill": 1, "oom": 1, "limit_hits": 0}
    assert read(tmp_path) == {"schema": 1, "version": 1, **counts, "peak_bytes": 800, "limit_bytes": None}


def test_without_a_peak_the_highest_that_was_seen(tmp_path: Path) -> None:
    files = {name: text for name, text in V2.items() if name != "memory.peak"} | {"memory.current": "500\n"}
    watch = Watch(tmp_path, True, fake(tmp_path, "0::/\n", [f"/ {CGROUP2}"], files))
    for current in (700, 300):
        (tmp_path / "cgroup dir" / "memory.current").write_text(f"{current}\n")
        watch.look()
    watch.look(always=True)
    assert read(tmp_path)["peak_bytes"] == 700


def test_it_is_written_only_when_something_happened(tmp_path: Path) -> None:
    watch = Watch(tmp_path, True, fake(tmp_path, "0::/\n", [f"/ {CGROUP2}"], V2))
    (tmp_path / "cgroup.json").unlink()
    (tmp_path / "cgroup dir" / "memory.peak").write_text("901\n")
    watch.look()
    assert not (tmp_path / "cgroup.json").exists()
    watch.look(always=True)
    assert read(tmp_path)["peak_bytes"] == 901


@pytest.mark.parametrize(("others", "version"), [([], 2), ([1 << 30], 0)])
def test_a_group_that_others_share_is_not_the_cells(tmp_path: Path, others: list[int], version: int) -> None:
    """In a process of its own, which is alone in it or not."""
    proc = fake(tmp_path, "0::/\n", [f"/ {CGROUP2}"], V2)
    code = "import os, sys; from pathlib import Path; from rig.cgroup import Watch; out = Path(sys.argv[1])\n"
    code += "pids = [os.getpid(), os.getppid(), *map(int, sys.argv[2:])]\n"
    code += "(out / 'cgroup dir' / 'cgroup.procs').write_text('\\n'.join(map(str, pids)))\n"
    code += "Watch(out, False, out / 'proc')"
    subprocess.run([sys.executable, "-c", code, str(tmp_path), *map(str, others)], cwd=SUITE, check=True)
    assert read(proc.parent)["version"] == version


@pytest.mark.parametrize("name", ["memory.events", "memory.max"])
def test_what_cannot_be_read_is_not_guessed(tmp_path: Path, name: str) -> None:
    Watch(tmp_path, True, fake(tmp_path, "0::/\n", [f"/ {CGROUP2}"], {**V2, name: "rubbish\n"}))
    assert read(tmp_path)["version"] == 0


def test_a_full_disk_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cgroup, "write", full)
    Watch(tmp_path, True, fake(tmp_path, "0::/\n", [f"/ {CGROUP2}"], V2)).look(always=True)


def test_each_cell_leaves_one(suite: Path, tmp_path: Path) -> None:
    (suite / "test_x.py").write_text("def test_a():\n    pass\n")
    ran = run_cell(tmp_path / "cell", "test_x.py", suite)
    assert set(read(ran.out)) == {"schema", "version", "oom_kill", "oom", "limit_hits", "peak_bytes", "limit_bytes"}


def test_a_mount_without_a_source_hides_no_other() -> None:
    text = "36 35 0:30 / /mnt rw - tmpfs  rw,size=1k\n37 35 0:31 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"
    assert [mount.version for mount in cgroup._mounts(text)] == [2]
