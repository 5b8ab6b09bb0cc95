"""Plugin and supervisor end to end: throw-away scenarios, real pytest and xdist, real processes and signals."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.rig.run import Ran, command, prepare, read_events, run_cell

EVERYTHING = '''"""Throw-away?"""
import json, os, signal, sys, time
import pytest
from rig.outcomes import NotAvailable, OracleError

@pytest.fixture
def broken():
    raise RuntimeError("fixture")

@pytest.fixture
def late():
    yield
    raise RuntimeError("teardown")

def test_passes(events):
    assert "torch" not in sys.modules
    print("said to stdout")
    events.property("fact", 1)

def test_oracle():
    raise OracleError("ids-differ", "5 instead of 6")

def test_raises():
    int("x")

@pytest.mark.parametrize("what", ["a::b", "c"])
def test_na(what):
    raise NotAvailable("no wake_up", "LLM.wake_up")

def test_skips():
    pytest.skip("why")

def test_setup(broken):
    pass

def test_teardown(late):
    pass

def test_both(late):
    raise ValueError("call")

def test_exits():
    sys.exit(3)
'''

KILLED = '''
def test_killed(events):
    """As vLLM 0.8.x: killed, with a forked engine core that lives on and holds all that it inherited."""
    child = os.fork()
    if child == 0:
        os.setsid()
        time.sleep(100)
        os._exit(0)
    events.property("child", child)
    os.kill(os.getpid(), signal.SIGKILL)

def test_after(events):
    """The engine core is gone before a fresh worker needs its memory."""
    said = [json.loads(line) for line in (events.out / "events.jsonl").read_text().splitlines()]
    child = next(event["value"] for event in said if event.get("name") == "child")
    assert not os.path.exists(f"/proc/{child}")
'''

OUTCOMES = {
    "passes": "passed",
    "oracle": "raised",
    "raises": "raised",
    "na[a::b]": "na",
    "na[c]": "na",
    "skips": "skipped",
    "setup": "raised",
    "teardown": "raised",
    "both": "raised",
    "exits": "raised",
}


def alive(pid: int) -> bool:
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_for(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


def run_text(suite: Path, tmp_path: Path, text: str) -> Ran:
    (suite / "test_x.py").write_text(text)
    return run_cell(tmp_path / "cell", "test_x.py", suite)


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """Everything that a check can do, in one cell."""
    import shutil

    from tests.rig.run import SUITE

    folder = tmp_path_factory.mktemp("everything")
    shutil.copytree(SUITE / "rig", folder / "suite" / "rig", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(SUITE / "sitecustomize.py", folder / "suite")
    return run_text(folder / "suite", folder, EVERYTHING + KILLED)


def test_every_check_ends_once_but_the_killed_one(ran: Ran) -> None:
    assert ran.outcomes == {**OUTCOMES, "after": "passed"}
    assert [event["checks"] for event in ran.of("plan")] == [[*OUTCOMES, "killed", "after"]]
    assert [event["check"] for event in ran.of("start")] == [*OUTCOMES, "killed", "after"]


def test_the_rig_is_fine_whatever_the_checks_said(ran: Ran) -> None:
    assert ran.code == 0
    assert ran.done == {"schema": 1, "exit": 1, "checks": len(OUTCOMES) + 1}


def test_a_killed_worker_is_down_with_its_signal(ran: Ran) -> None:
    assert [(event["returncode"], event["check"]) for event in ran.of("down")] == [(-signal.SIGKILL, "killed")]


def test_a_fresh_worker_says_hello(ran: Ran) -> None:
    first, second = ran.of("hello")
    assert first["pid"] != second["pid"]
    assert {"python", "platform", "distributions", "distributions_sha256"} <= set(first)
    assert first["distributions"]["pytest"] == pytest.__version__
    assert ran.events[0]["type"] == "hello"


def test_nothing_is_left_running(ran: Ran) -> None:
    child = next(event["value"] for event in ran.of("property") if event["name"] == "child")
    assert not alive(child)
    (outlived,) = [event for event in ran.of("property") if event["name"] == "worker.outlived_by"]
    assert outlived["check"] == "killed"
    assert len(outlived["value"]) == 1
    assert not [event for event in ran.of("property") if event["name"].startswith("leftover.")]


def test_nobody_was_asked_for_stacks(ran: Ran) -> None:
    assert not (ran.out / "artifacts" / "stacks").exists()


def test_errors_are_the_original_ones(ran: Ran) -> None:
    errors = {check: event["error"] for check, event in ran.ends.items() if event["error"]}
    found = {check: (error["type"], error["message"], error["reason"]) for check, error in errors.items()}
    assert found == {
        "oracle": ("OracleError", "5 instead of 6", "ids-differ"),
        "raises": ("ValueError", "invalid literal for int() with base 10: 'x'", None),
        "setup": ("RuntimeError", "fixture", None),
        "teardown": ("RuntimeError", "teardown", None),
        "both": ("ValueError", "call", None),
        "exits": ("SystemExit", "3", None),
    }
    frames = [(frame["where"], frame["file"], frame["function"]) for frame in errors["raises"]["frames"]]
    assert frames == [("suite", "test_x.py", "test_raises")]
    assert "_pytest" not in errors["raises"]["traceback"]


def test_reasons(ran: Ran) -> None:
    assert ran.ends["oracle"]["reason"] == "ids-differ"
    assert ran.ends["na[c]"]["reason"] == "no wake_up (probed: LLM.wake_up)"
    assert ran.ends["skips"]["reason"] == "why"


def test_stdout_of_a_worker_is_kept(ran: Ran) -> None:
    assert "said to stdout" in ran.stderr


def test_the_suite_stays_clean(ran: Ran) -> None:
    """It is mounted read-only; a scenario's bytecode would be written by whoever may write there."""
    assert not list((ran.out.parents[1] / "suite").rglob("test_x*.pyc"))


def test_the_host_reads_it(ran: Ran) -> None:
    """The contract, by the reader on its other side."""
    from harness import events

    found, faults = events.parse((ran.out / "events.jsonl").read_bytes())
    assert not faults
    assert len(found) == len(ran.events)


def test_without_xdist(suite: Path, tmp_path: Path) -> None:
    (suite / "test_x.py").write_text(EVERYTHING)
    environment = {**prepare(tmp_path / "cell", "test_x.py", suite), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    words = ["-p", "no:cacheprovider", "-p", "rig.fixtures", "-p", "rig.plugin", "-c", os.devnull, "test_x.py"]
    subprocess.run([*command()[:2], "pytest", *words], env=environment, cwd=suite, check=False, capture_output=True)
    ran = Ran(0, tmp_path / "cell" / "out", "")
    assert ran.outcomes == OUTCOMES
    assert [event["checks"] for event in ran.of("plan")] == [list(OUTCOMES)]
    assert len(ran.of("hello")) == 1


@pytest.mark.parametrize(
    ("text", "kind"),
    [("def test_a(:\n", "SyntaxError"), ("import nothing_of_that_name\n", "ModuleNotFoundError")],
)
def test_a_file_that_does_not_import(suite: Path, tmp_path: Path, text: str, kind: str) -> None:
    ran = run_text(suite, tmp_path, text)
    assert [event["error"]["type"] for event in ran.of("collect_error")] == [kind]
    assert ran.of("end") == []
    assert ran.code == 0
    assert ran.done is not None


def test_a_file_that_kills_its_process(suite: Path, tmp_path: Path) -> None:
    ran = run_text(suite, tmp_path, "import os\nos.kill(os.getpid(), 11)\n")
    assert ran.of("down")
    assert {(event["returncode"], event["check"]) for event in ran.of("down")} == {(-11, None)}


def test_pytest_exit_ends_the_run_and_its_check(suite: Path, tmp_path: Path) -> None:
    ran = run_text(
        suite, tmp_path, "import pytest\ndef test_a():\n    pytest.exit('enough')\ndef test_b():\n    pass\n"
    )
    assert ran.ends["a"]["error"]["type"] == "Exit"
    assert ran.code == 0
    assert ran.of("down") == []


def test_sigterm_ends_all_processes(suite: Path, tmp_path: Path) -> None:
    hang = "def test_hangs(events):\n    import os, signal, time\n    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    hang += "    events.property('pid', os.getpid())\n    if os.fork() == 0:\n        os.setsid()\n"
    hang += "        events.property('pid', os.getpid())\n    time.sleep(100)\n"
    (suite / "test_x.py").write_text(hang)
    environment = prepare(tmp_path / "cell", "test_x.py", suite)
    out = tmp_path / "cell" / "out"
    supervisor = subprocess.Popen(command(), env=environment, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL)

    def pids() -> list[int]:
        events = read_events(out) if (out / "events.jsonl").exists() else []
        return [event["value"] for event in events if event["type"] == "property"]

    wait_for(lambda: len(pids()) == 2)
    supervisor.send_signal(signal.SIGTERM)
    _, stderr = supervisor.communicate(timeout=25)
    assert supervisor.returncode == 128 + signal.SIGTERM
    assert b"rig: stopped by signal 15" in stderr
    assert not [pid for pid in pids() if alive(pid)]
    assert not (out / "DONE").exists()


def test_a_cell_that_is_none(tmp_path: Path) -> None:
    environment = prepare(tmp_path, "test_x.py")
    (tmp_path / "in" / "cell.json").write_text('{"schema": 99}')
    ran = subprocess.run(command(), env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 64
    assert "rig: cell.json has schema 99" in ran.stderr


def test_a_scenario_that_is_not_there(tmp_path: Path) -> None:
    ran = run_cell(tmp_path / "cell", "test_absent.py")
    assert ran.code == 64
    assert "rig: no scenario test_absent.py" in ran.stderr


def test_a_runner_that_fails_is_the_rigs_failure(suite: Path, tmp_path: Path) -> None:
    """A broken plugin, a broken pytest: exit code and reason, never a cell that looks as if it had run."""
    (suite / "rig" / "plugin.py").write_text("raise RuntimeError('broken')\n")
    ran = run_text(suite, tmp_path, "def test_a():\n    pass\n")
    assert ran.code == 70
    assert "rig: the runner itself failed" in ran.stderr
