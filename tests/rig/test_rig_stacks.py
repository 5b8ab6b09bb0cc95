"""Where everybody stood when a cell was ended: written first, and by whoever can."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rig import stacks

from tests.rig.run import SUITE, command, prepare, read_events
from tests.rig.test_rig_runner import wait_for

HANGS = '''"""Throw-away?"""
import os, signal, subprocess, sys, time

def the_forked_one():
    time.sleep(300)

def the_stopped_one():
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(300)

def fork(life):
    pid = os.fork()
    if pid == 0:
        os.setsid()
        life()
        os._exit(0)
    return pid

def test_hangs(events):
    code = "def the_spawned_one():\\n    import time\\n    time.sleep(300)\\nthe_spawned_one()"
    rank = {**os.environ, "VLLM_MATRIX_RANK": "1"}
    pids = {
        "forked": fork(the_forked_one),
        "stopped": fork(the_stopped_one),
        "spawned": subprocess.Popen([sys.executable, "-c", code], env=rank).pid,
        "mute": subprocess.Popen([sys.executable, "-I", "-c", code]).pid,
        "other": subprocess.Popen(["sleep", "300"]).pid,
        "worker": os.getpid(),
    }
    time.sleep(1)  # until they stand where they are to be seen
    for name, pid in pids.items():
        events.property(name, pid)
    time.sleep(300)
'''

PY_SPY = """#!/bin/sh
[ "$1 $2" = "dump --pid" ] && echo "spied on $3"
"""


@pytest.fixture(scope="module")
def hung(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The out folder of a cell that hung until it was told to stop."""
    folder = tmp_path_factory.mktemp("hung")
    suite = folder / "suite"
    shutil.copytree(SUITE / "rig", suite / "rig", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(SUITE / "sitecustomize.py", suite)
    (suite / "test_x.py").write_text(HANGS)
    (folder / "bin").mkdir()
    (folder / "bin" / "py-spy").write_text(PY_SPY)
    (folder / "bin" / "py-spy").chmod(0o755)
    environment = prepare(folder / "cell", "test_x.py", suite)
    environment["PATH"] = f"{folder / 'bin'}{os.pathsep}{environment['PATH']}"
    out = folder / "cell" / "out"
    assert stop_in_the_middle(environment, out) == 128 + signal.SIGTERM
    return out


def stop_in_the_middle(environment: dict[str, str], out: Path) -> int:
    supervisor = subprocess.Popen(command(), env=environment, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    wait_for(lambda: (out / "events.jsonl").exists() and "worker" in pids(out), 40)
    supervisor.send_signal(signal.SIGTERM)
    return supervisor.wait(30)


def pids(out: Path) -> dict[str, int]:
    return {event["name"]: event["value"] for event in read_events(out) if event["type"] == "property"}


def listed(out: Path) -> dict[int, dict[str, Any]]:
    found = json.loads((out / "artifacts" / "stacks" / "processes.json").read_text())
    assert found["schema"] == 1
    return {each["pid"]: each for each in found["processes"]}


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("worker", "in test_hangs"),
        ("forked", "in the_forked_one"),
        ("spawned", "in the_spawned_one"),
        ("mute", "spied on {pid}"),
        ("stopped", "spied on {pid}"),
    ],
)
def test_each_python_says_where_it_is(hung: Path, name: str, told: str) -> None:
    pid = pids(hung)[name]
    file = listed(hung)[pid]["stack"]
    assert file == f"{pid}.txt"
    assert told.format(pid=pid) in (hung / "artifacts" / "stacks" / file).read_text()


def test_a_fork_says_nothing_in_its_parents_file(hung: Path) -> None:
    assert "the_forked_one" not in (hung / "artifacts" / "stacks" / f"{pids(hung)['worker']}.txt").read_text()


def test_every_process_is_listed(hung: Path) -> None:
    found, named = listed(hung), pids(hung)
    assert set(named.values()) <= set(found)
    assert len(found) == len(named) + 1  # and the runner
    assert found[named["stopped"]]["state"] == "T"
    assert (found[named["other"]]["state"], found[named["other"]]["stack"]) == ("S", None)
    assert found[named["other"]]["command"] == "sleep 300"
    assert found[named["other"]]["ppid"] == named["worker"]
    assert {found[pid]["rank"] for name, pid in named.items() if name != "spawned"} == {None}
    assert found[named["spawned"]]["rank"] == 1
    assert all(isinstance(each["wchan"], str) for each in found.values())


def test_nothing_is_left_empty(hung: Path) -> None:
    assert all(path.stat().st_size for path in (hung / "artifacts" / "stacks").iterdir())


def test_what_is_written_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "1.txt"
    path.write_bytes(b"first" + b"x" * 200_000 + b"last")
    stacks._cap(path)
    data = path.read_bytes()
    assert len(data) <= 64 << 10
    assert data.startswith(b"first")
    assert data.endswith(b"last")


def test_an_earlier_word_stays(tmp_path: Path) -> None:
    """A hang that a check found, before the cell itself was ended."""
    words = ["/bin/sleep", "300"]
    with subprocess.Popen(words) as first, subprocess.Popen(words) as second:
        stacks.dump([first.pid, second.pid], tmp_path)
        first.kill()
        first.wait()
        stacks.dump([second.pid], tmp_path)
        second.kill()
    assert [(pid, each["state"]) for pid, each in listed(tmp_path).items()] == [(first.pid, "S"), (second.pid, "S")]


def test_a_list_that_is_none_is_written_anew(tmp_path: Path) -> None:
    (tmp_path / "artifacts" / "stacks").mkdir(parents=True)
    (tmp_path / "artifacts" / "stacks" / "processes.json").write_text('["rubbish"]')
    assert stacks.dump([], tmp_path) == {}
    assert listed(tmp_path) == {}


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    folder = tmp_path / "artifacts" / "stacks"
    folder.mkdir(parents=True)
    (tmp_path / "secret").write_bytes(b"x" * 100_000)
    (folder / "1.txt").symlink_to(tmp_path / "secret")
    stacks._cap(folder / "1.txt")
    assert (tmp_path / "secret").stat().st_size == 100_000


@pytest.mark.parametrize("variables", [("CELL",), ("OUT",), ("CELL", "OUT")])
def test_no_python_fails_by_it(tmp_path: Path, variables: tuple[str, ...]) -> None:
    (tmp_path / "out").touch()  # no folder can be made below a file
    given = {f"VLLM_MATRIX_{name}": str(tmp_path / "out") for name in variables}
    code = "import os, sys; print('sitecustomize' in sys.modules); pid = os.fork(); pid and os.waitpid(pid, 0)"
    environ = {"PYTHONPATH": str(SUITE), **given}
    done = subprocess.run([sys.executable, "-B", "-c", code], env=environ, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("True")
    assert done.stderr == ""
