"""The truth table, row by row: events × how the container ended → status."""

from __future__ import annotations

from typing import Any

import pytest

from harness.events import Done, parse
from harness.judge import CELL, Evidence, Judgement, judge
from harness.records import ExitState
from harness.status import Status
from tests.conftest import error, event_line

HELLO = event_line("hello", python="3.11.2", platform="linux")
PLAN = event_line("plan", checks=["a", "b"])
A = event_line("start", check="a") + event_line(
    "end", check="a", outcome="passed", seconds=1.0, reason=None, error=None
)
START_B = event_line("start", check="b")
B = START_B + event_line("end", check="b", outcome="passed", seconds=1.0)
ALL = HELLO + PLAN + A + B
CLEAN = ExitState(started=True, exit_code=0)
DONE = Done(schema=1, exit=0, checks=2)


def verdict_on(data: bytes, state: ExitState = CLEAN, done: Done | None = DONE, infra: str = "") -> Judgement:
    events, faults = parse(data)
    return judge(Evidence(events=events, faults=faults, done=done, exit=state, infra=infra))


def ended(**how: Any) -> ExitState:
    return ExitState(started=True, **how)


def raised(**fields: Any) -> bytes:
    return (
        HELLO + PLAN + A + START_B + event_line("end", check="b", outcome="raised", seconds=1.0, error=error(**fields))
    )


ROWS: dict[str, tuple[bytes, ExitState, Done | None, Status, str]] = {
    # the checks spoke
    "all passed": (ALL, CLEAN, DONE, Status.PASS, ""),
    "an oracle said no": (raised(kind="OracleError", reason="ids-differ"), CLEAN, DONE, Status.FAIL, "ids-differ"),
    "plain assert in the suite": (raised(kind="AssertionError"), CLEAN, DONE, Status.FAIL, ""),
    "the version raised": (raised(where=("suite", "rig", "site")), CLEAN, DONE, Status.FAIL, ""),
    "assert inside vLLM": (raised(kind="AssertionError", where=("suite", "rig", "site")), CLEAN, DONE, Status.FAIL, ""),
    "a vLLM name is gone": (
        raised(kind="ImportError", message="cannot import name 'x' from 'vllm.y'"), CLEAN, DONE, Status.FAIL, "missing-name",
    ),
    "a name of something else": (raised(kind="AttributeError", message="'int' has no x"), CLEAN, DONE, Status.ERROR, ""),
    "the suite raised": (raised(kind="KeyError"), CLEAN, DONE, Status.ERROR, ""),
    "assert in a library of the suite": (
        raised(kind="AssertionError", where=("suite", "python")), CLEAN, DONE, Status.ERROR, "",
    ),
    "device out of memory": (raised(kind="torch.OutOfMemoryError"), CLEAN, DONE, Status.OOM, "device"),
    "the engine's process died": (
        raised(kind="EngineDeadError", where=("suite", "rig", "site")), CLEAN, DONE, Status.CRASH, "engine-died",
    ),
    "not available": (
        HELLO + PLAN + A + START_B + event_line("end", check="b", outcome="na", seconds=0.1, reason="no wake_up"),
        CLEAN, DONE, Status.PASS, "",
    ),
    "another rank cannot end a check": (
        HELLO + PLAN + A + event_line("end", rank=1, check="b", outcome="passed", seconds=1.0), CLEAN, DONE, Status.ERROR, "not-run",
    ),
    "a rank died": (raised(kind="OracleError", reason="rank-died", where=("suite", "rig")), CLEAN, DONE, Status.CRASH, "rank-died"),
    "a rank was killed for memory": (
        raised(kind="OracleError", reason="rank-died", where=("suite", "rig")),
        ended(exit_code=0, oom_killed=True), DONE, Status.OOM, "host",
    ),
    "a rank hangs": (raised(kind="OracleError", reason="hang", where=("suite", "rig")), CLEAN, DONE, Status.FAIL, "hang"),
    "a check is missing": (HELLO + PLAN + A, CLEAN, DONE, Status.ERROR, "not-run"),
    # the process of the checks died, the runner lived
    "killed by signal 9": (
        HELLO + PLAN + A + START_B + event_line("down", returncode=-9, check="b"), CLEAN, DONE, Status.CRASH, "signal: SIGKILL",
    ),
    "segmentation fault": (
        HELLO + PLAN + A + START_B + event_line("down", returncode=-11, check="b"), CLEAN, DONE, Status.CRASH, "signal: SIGSEGV",
    ),
    "exited hard": (
        HELLO + PLAN + A + START_B + event_line("down", returncode=3, check="b"), CLEAN, DONE, Status.CRASH, "exit",
    ),
    "died between checks": (ALL + event_line("down", returncode=-11, check=None), CLEAN, DONE, Status.CRASH, "signal: SIGSEGV"),
    "child killed for memory": (
        HELLO + PLAN + A + START_B + event_line("down", returncode=-9, check="b"),
        ended(exit_code=0, oom_killed=True), DONE, Status.OOM, "host",
    ),
    # the container ended under it
    "container killed": (HELLO + PLAN + A + START_B, ended(exit_code=137), None, Status.CRASH, "signal: SIGKILL"),
    "container out of memory": (HELLO + PLAN + A, ended(exit_code=137, oom_killed=True), None, Status.OOM, "host"),
    "silent too long": (HELLO + PLAN + A + START_B, ended(exit_code=137, killed="silence"), None, Status.TIMEOUT, "hang"),
    "ran too long": (HELLO + PLAN + A + START_B, ended(exit_code=137, killed="total"), None, Status.TIMEOUT, "deadline"),
    "all passed, then its time was up": (ALL, ended(exit_code=137, killed="total"), None, Status.TIMEOUT, "deadline"),
    "daemon lost": (HELLO + PLAN + A, ended(error="the daemon no longer answers"), None, Status.MISS, "engine-of-containers"),
    "end not seen": (HELLO + PLAN + A, ended(), None, Status.FAIL, "no-evidence"),
    "rig failed": (ALL, ended(exit_code=3), None, Status.CRASH, "exit"),
    "no DONE": (ALL, CLEAN, None, Status.ERROR, "no-done"),
    # nothing was said
    "wrote nothing": (b"", CLEAN, None, Status.FAIL, "no-evidence"),
    "wrote nothing and was killed": (b"", ended(exit_code=137), None, Status.FAIL, "no-evidence"),
    "wrote nothing for ever": (b"", ended(exit_code=137, killed="silence"), None, Status.TIMEOUT, "hang"),
    "never started": (b"", ended(error="OCI runtime error"), None, Status.MISS, "engine-of-containers"),
    "no checks": (HELLO + event_line("plan", checks=[]), CLEAN, DONE, Status.ERROR, "no-checks"),
    "file does not parse": (event_line("collect_error", error=error("SyntaxError")), CLEAN, DONE, Status.ERROR, "collect"),
    "import of a lost vLLM name": (
        HELLO + event_line("collect_error", error=error("ImportError", "No module named 'vllm.worker'")),
        CLEAN, DONE, Status.FAIL, "missing-name",
    ),
    "died while the scenario was imported": (
        HELLO + event_line("down", returncode=0, check=None) * 5, CLEAN, DONE, Status.CRASH, "exit",
    ),
    # evidence that cannot be trusted
    "a check that nobody planned": (
        ALL + event_line("start", check="x") + event_line("end", check="x", outcome="passed", seconds=0.1), CLEAN, DONE,
        Status.ERROR, "corrupt-evidence",
    ),
    "an end without a start": (
        HELLO + PLAN + A + event_line("end", check="b", outcome="passed", seconds=0.1), CLEAN, DONE,
        Status.ERROR, "corrupt-evidence",
    ),
    "a plan that is too long to be read": (
        HELLO + event_line("plan", checks=["x" * 70_000]), CLEAN, DONE, Status.ERROR, "corrupt-evidence",
    ),
    "a forged line": (ALL + b"all tests passed\n", CLEAN, DONE, Status.ERROR, "corrupt-evidence"),
    "cut in the last line": (HELLO + PLAN + A + B[:-10], ended(exit_code=137), None, Status.CRASH, "signal"),
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_row(name: str) -> None:
    data, state, done, status, reason = ROWS[name]
    judgement = verdict_on(data, state, done)
    assert judgement.status is status
    assert (judgement.reason or "").startswith(reason)


def test_infrastructure_alone_is_a_miss() -> None:
    judgement = verdict_on(b"", ExitState(started=False), None, infra="build: exit code 1")
    assert (judgement.status, judgement.reason) == (Status.MISS, "build: exit code 1")


def test_a_check_that_was_never_reached_says_so() -> None:
    judgement = verdict_on(HELLO + PLAN + event_line("start", check="a"), ended(exit_code=139), None)
    by_id = {check.id: check for check in judgement.checks}
    assert by_id["a"].reason == "signal: SIGSEGV"
    assert by_id["b"].reason == "not-reached: signal: SIGSEGV"


def test_the_cell_itself_is_no_check_when_all_is_well() -> None:
    assert [check.id for check in verdict_on(ALL).checks] == ["a", "b"]
    assert CELL in [check.id for check in verdict_on(ALL, ended(exit_code=1)).checks]


def test_a_process_killed_in_mid_write_never_passes() -> None:
    """A truncated file is never PASS, at whatever byte it was cut, nor does it raise."""
    for cut in range(len(ALL)):
        judgement = verdict_on(ALL[:cut], ended(exit_code=137), None)
        assert judgement.status in (Status.FAIL, Status.CRASH), cut


def test_every_red_status_of_the_table_has_advice_or_an_error() -> None:
    for name, (data, state, done, status, _) in ROWS.items():
        judgement = verdict_on(data, state, done)
        if status not in (Status.PASS, Status.NA):
            told = judgement.advice or any(check.error for check in judgement.checks) or judgement.reason
            assert told, name
