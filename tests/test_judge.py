"""The truth table, row by row: events × how the container ended → status."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.ending import by_us, kernel_kills, read_memory
from harness.events import Done, parse
from harness.judge import CELL, Evidence, Judgement, judge
from harness.records import ExitState, LastMark, MemoryState
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


DEADLINES = {"total": 900.0, "silence": 300.0, "start": 120.0, "import": 300.0, "init": 600.0}
KERNEL = MemoryState(version=2, oom_kill=1, oom=1, limit_bytes=6 << 30)  # a process of the cell was killed for memory


def at(name: str, n: int, state: str | None, seconds: float) -> LastMark:
    return LastMark.model_validate({"name": name, "n": n, "state": state, "at_seconds": seconds})


def overdue(which: str, quiet: float = 300.0, **more: Any) -> ExitState:
    """Ended by us, with two ranks, of which the second has not come to barrier 3."""
    marks = {0: at("barrier", 3, "enter", 360.0), 1: at("barrier", 2, "leave", 101.0)}
    given = {"exit_code": 137, "seconds": 401.0, "last_marks": marks, "last_barriers": marks, "deadlines": DEADLINES}
    return ended(killed=which, quiet_seconds=quiet, **{**given, **more})


STOOD = "rank 1 did not come to barrier 3; rank 0 in barrier 3 for 41 s, rank 1 last left barrier 2"


def fault(pid: int = 7, check: str = "b") -> bytes:
    """A check that met a device fault, and ended in it."""
    told = event_line("property", pid=pid, name="device.fault", value="CUDA error", check=check)
    start = event_line("start", pid=pid, check=check)
    return start + told + ends(check, pid, "raised", error("RuntimeError", "CUDA error: x", reason="device-fault"))


def ends(check: str, pid: int = 7, outcome: str = "passed", what: Any = None) -> bytes:
    return event_line("end", pid=pid, check=check, outcome=outcome, seconds=1.0, error=what)


def ran(check: str, pid: int = 7, outcome: str = "passed", what: Any = None) -> bytes:
    return event_line("start", pid=pid, check=check) + ends(check, pid, outcome, what)


ABC = HELLO + event_line("plan", checks=["a", "b", "c"]) + A
FRESH = event_line("hello", pid=9, python="3.11.2", platform="linux")


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
    "device out of memory, by the rig's word": (
        raised(kind="ValueError", reason="device-oom"), CLEAN, DONE, Status.OOM, "device",
    ),
    "device out of memory, of an older torch": (
        raised(kind="RuntimeError", message="CUDA error: out of memory"), CLEAN, DONE, Status.OOM, "device",
    ),
    "device out of memory, by a kind of it": (
        raised(kind="Mine", bases=["OutOfMemoryError", "RuntimeError"]), CLEAN, DONE, Status.OOM, "device",
    ),
    "device fault": (HELLO + PLAN + A + fault(), CLEAN, DONE, Status.FAIL, "device-fault"),
    "device fault, and the rest in a fresh process": (
        ABC + fault() + FRESH + ran("c", 9), CLEAN, DONE, Status.FAIL, "device-fault",
    ),
    "the engine's process was killed for memory": (
        raised(kind="EngineDeadError", where=("suite", "rig", "site")), ended(exit_code=0, oom=KERNEL), DONE, Status.OOM, "host",
    ),
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
    "a rank was killed for memory, by the cgroup's count": (
        raised(kind="OracleError", reason="rank-died", message="rank 1 ended by SIGKILL", where=("suite", "rig")),
        ended(exit_code=0, oom=KERNEL), DONE, Status.OOM, "host",
    ),
    "a rank died of something else, though another process was killed for memory": (
        raised(kind="OracleError", reason="rank-died", message="rank 1 ended by SIGSEGV", where=("suite", "rig")),
        ended(exit_code=0, oom=KERNEL), DONE, Status.CRASH, "rank-died",
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
    "child alone killed for memory, by the cgroup's count": (
        HELLO + PLAN + A + START_B + event_line("down", returncode=-9, check="b"),
        ended(exit_code=0, oom=KERNEL), DONE, Status.OOM, "host: killed for memory, limit 6.0 GiB",
    ),
    "segmentation fault of a child, though another was killed for memory": (
        HELLO + PLAN + A + START_B + event_line("down", returncode=-11, check="b"),
        ended(exit_code=0, oom=KERNEL), DONE, Status.CRASH, "signal: SIGSEGV",
    ),
    "killed, while memory was only scarce": (
        HELLO + PLAN + A + START_B + event_line("down", returncode=-9, check="b"),
        ended(exit_code=0, oom=MemoryState(version=2, oom=4)), DONE, Status.CRASH, "signal: SIGKILL",
    ),
    "the counters are of no cgroup of its own": (
        HELLO + PLAN + A + START_B + event_line("down", returncode=-9, check="b"),
        ended(exit_code=0, oom=MemoryState(version=0, oom_kill=1)), DONE, Status.CRASH, "signal: SIGKILL",
    ),
    "all passed, though the kernel killed something": (ALL, ended(exit_code=0, oom=KERNEL), DONE, Status.PASS, ""),
    # the container ended under it
    "container killed": (HELLO + PLAN + A + START_B, ended(exit_code=137), None, Status.CRASH, "signal: SIGKILL"),
    "container out of memory": (HELLO + PLAN + A, ended(exit_code=137, oom_killed=True), None, Status.OOM, "host"),
    "segmentation fault of the container": (HELLO + PLAN + A + START_B, ended(exit_code=139), None, Status.CRASH, "signal: SIGSEGV"),
    "ended by somebody else": (HELLO + PLAN + A + START_B, ended(exit_code=143), None, Status.CRASH, "signal: SIGTERM"),
    "container out of memory, by the cgroup's count": (
        HELLO + PLAN + A, ended(exit_code=137, oom=KERNEL), None, Status.OOM, "host: killed for memory, limit 6.0 GiB",
    ),
    # we ended it
    "silent too long": (HELLO + PLAN + A + START_B, overdue("silence"), None, Status.TIMEOUT, f"hang: no event for 300 s; {STOOD}"),
    "silent too long, and nothing more is known": (
        HELLO + PLAN + A + START_B, ended(exit_code=137, killed="silence", last_mark="wake 1 enter"), None,
        Status.TIMEOUT, "hang: no event within the deadline; last mark: wake 1 enter",
    ),
    "ran too long": (HELLO + PLAN + A + START_B, overdue("total", 2.0), None, Status.TIMEOUT, "slow: at work, but not done within 900 s"),
    "ran too long, and nothing moved": (
        HELLO + PLAN + A + START_B, overdue("total", 150.0), None, Status.TIMEOUT,
        f"hang: not done within 900 s, no event for 150 s; {STOOD}",
    ),
    "all passed, then its time was up": (ALL, overdue("total", 2.0), None, Status.TIMEOUT, "slow"),
    "all passed, then it hung": (ALL, overdue("silence"), None, Status.TIMEOUT, "hang"),
    "imported for too long": (
        HELLO + PLAN + A + START_B, overdue("import"), None, Status.TIMEOUT, "import: vLLM was not imported within 300 s; rank 1",
    ),
    "started an engine for too long": (
        HELLO + PLAN + A + START_B, overdue("init"), None, Status.TIMEOUT, "init: the engine was not ready within 600 s; rank 1",
    ),
    "a check failed, then it hung": (raised(kind="OracleError"), overdue("silence"), None, Status.FAIL, ""),
    "hung after a process of it was killed for memory": (
        HELLO + PLAN + A + START_B, overdue("silence", oom=KERNEL), None, Status.OOM, "host: killed for memory, limit 6.0 GiB; then hang: no",
    ),
    "what died by our own signal": (
        HELLO + PLAN + A + START_B + event_line("down", returncode=-15, check="b"), overdue("silence", heard=5), None,
        Status.TIMEOUT, "hang",
    ),
    "what raised because of our own signal": (
        raised(kind="SystemExit"), overdue("total", 2.0, heard=5), None, Status.TIMEOUT, "slow",
    ),
    "what had died before we ended it": (
        HELLO + PLAN + A + START_B + event_line("down", returncode=-11, check="b"), overdue("silence", heard=6), None,
        Status.CRASH, "signal: SIGSEGV",
    ),
    "left too much": (HELLO + PLAN + A + START_B, ended(exit_code=143, killed="disk"), None, Status.FAIL, "disk: it left more than 4 GiB in /out"),
    "the run was to stop": (HELLO + PLAN + A + START_B, ended(exit_code=143, killed="interrupted"), None, Status.MISS, "interrupted"),
    "what we ended could not be removed": (
        HELLO + PLAN + A + START_B, overdue("silence", error="the container x could not be removed"), None, Status.TIMEOUT, "hang",
    ),
    "daemon lost": (HELLO + PLAN + A, ended(error="the daemon no longer answers"), None, Status.MISS, "engine-of-containers"),
    "end not seen": (HELLO + PLAN + A, ended(), None, Status.FAIL, "no-evidence"),
    "rig failed": (ALL, ended(exit_code=70), None, Status.CRASH, "exit: the rig ended with code 70: the runner of the checks failed"),
    "no such command": (ALL, ended(exit_code=127), None, Status.CRASH, "exit: the rig ended with code 127: its command was not found"),
    "no DONE": (ALL, CLEAN, None, Status.ERROR, "no-done"),
    # nothing was said
    "wrote nothing": (b"", CLEAN, None, Status.FAIL, "no-evidence"),
    "wrote nothing and was killed": (b"", ended(exit_code=137), None, Status.FAIL, "no-evidence"),
    "wrote nothing for ever": (b"", ended(exit_code=137, killed="silence"), None, Status.TIMEOUT, "hang"),
    "said no hello in time": (
        b"", overdue("start"), None, Status.TIMEOUT, "start: the process of the checks did not say hello within 120 s",
    ),
    "wrote nothing, and was killed for memory": (b"", ended(exit_code=137, oom=KERNEL), None, Status.OOM, "host"),
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
    "a check that ended twice, well the second time": (
        HELLO + PLAN + A + ran("b", outcome="raised", what=error("OracleError")) + ends("b"), CLEAN, DONE, Status.FAIL, "",
    ),
    "a check that ended twice, well both times": (ALL + ends("b"), CLEAN, DONE, Status.ERROR, "corrupt-evidence"),
    "all passed, and the runner says that something failed": (ALL, CLEAN, Done(schema=1, exit=1, checks=2), Status.ERROR, "corrupt-evidence: DONE"),
    "all passed, and the runner has seen another number": (ALL, CLEAN, Done(schema=1, exit=0, checks=3), Status.ERROR, "corrupt-evidence: DONE"),
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


def by_id(data: bytes, state: ExitState = CLEAN) -> dict[str, tuple[Status, str | None]]:
    return {check.id: (check.status, check.reason) for check in verdict_on(data, state, DONE).checks}


UNTRUSTED = (Status.FAIL, "not-reached: device-fault")


def test_after_a_device_fault_only_a_fresh_process_is_believed() -> None:
    """Whatever the process said of later checks, good or bad; what ran again counts as it ran then."""
    later = ran("c") + event_line("start", check="d")
    plan = HELLO + event_line("plan", checks=["a", "b", "c", "d", "e"]) + A
    alone = by_id(plan + fault() + later)
    assert alone["a"] == (Status.PASS, None)
    assert alone["b"] == (Status.FAIL, "device-fault")
    assert [alone[name] for name in "cde"] == [UNTRUSTED] * 3
    assert CELL not in alone
    again = by_id(plan + fault() + later + FRESH + ran("c", 9, "raised", error("KeyError")) + ran("d", 9))
    assert (again["c"][0], again["d"], again["e"]) == (Status.ERROR, (Status.PASS, None), UNTRUSTED)


def test_a_process_that_has_to_go_for_a_device_fault_is_no_crash() -> None:
    for down in ("c", None):
        gone = event_line("start", check="c") + event_line("down", returncode=1, check=down)
        assert CELL not in by_id(ABC + fault() + gone + FRESH + ran("c", 9))
        assert by_id(ABC + fault() + gone)["c"] == UNTRUSTED
    died = event_line("start", pid=9, check="c") + event_line("down", returncode=-11, check="c")
    assert by_id(ABC + fault() + FRESH + died)["c"] == (Status.CRASH, "signal: SIGSEGV")


def test_a_device_fault_of_a_rank_is_another_process() -> None:
    told = error("RuntimeError", "rank 1: CUDA error: x", reason="device-fault")
    found = by_id(ABC + ran("b", 7, "raised", told) + ran("c"))
    assert (found["b"], found["c"]) == ((Status.FAIL, "device-fault"), (Status.PASS, None))


def test_a_check_that_says_nothing_of_the_fault_it_met_spoils_its_process_too() -> None:
    told = event_line("property", name="device.fault", value="CUDA error", check="b")
    found = by_id(ABC + START_B + told + ends("b", outcome="raised", what=error("OracleError")) + ran("c"))
    assert (found["b"][0], found["c"]) == (Status.FAIL, UNTRUSTED)


def test_a_hang_after_a_device_fault() -> None:
    found = by_id(ABC + fault() + FRESH + event_line("start", pid=9, check="c"), overdue("silence"))
    assert found["c"][0] is Status.TIMEOUT
    assert (found["c"][1] or "").startswith("hang")


@pytest.mark.parametrize(
    ("marks", "said"),
    [
        ({}, "last mark: none"),
        ({0: None}, "without a mark"),
        ({0: at("wake", 1, "enter", 390.0)}, "in wake 1 for 11 s"),
        ({0: at("note", 1, None, 390.0)}, "last at note 1"),
        ({0: None, 1: at("wake", 1, "leave", 9.0)}, "rank 0 without a mark, rank 1 last left wake 1"),
        (
            {0: at("barrier", 3, "enter", 360.0), 1: at("generate", 2, "enter", 355.0), 2: None},
            (
                "rank 1 and 2 did not come to barrier 3; rank 0 in barrier 3 for 41 s, rank 1 in generate 2 for 46 s, "
                "rank 2 without a mark"
            ),
        ),
        (
            {0: at("barrier", 3, "enter", 360.0), 1: at("barrier", 3, "enter", 361.0)},
            "rank 0 in barrier 3 for 41 s, rank 1 in barrier 3 for 40 s",
        ),
        (
            {rank: at("barrier", 0, "enter", 1.0) if rank == 40 else None for rank in range(41)},
            "rank 0, 1, 2, 3, 4, 5, 6, 7 and 32 more did not come to barrier 0; "
            + ", ".join(f"rank {rank} without a mark" for rank in range(8))
            + " and 33 more",
        ),
    ],
)
def test_where_ranks_stood(marks: dict[int, LastMark | None], said: str) -> None:
    barriers = {rank: mark for rank, mark in marks.items() if mark and mark.name == "barrier"}
    state = overdue("silence", last_marks=marks, last_barriers=barriers)
    assert verdict_on(HELLO + PLAN + A + START_B, state).reason == f"hang: no event for 300 s; {said}"


def test_only_our_own_signals_are_ours() -> None:
    assert by_us(overdue("silence", exit_code=143)) and by_us(overdue("total", exit_code=137))
    assert not by_us(overdue("silence", exit_code=139)) and not by_us(ended(exit_code=137))


@pytest.mark.parametrize(
    ("text", "kills"),
    [
        (b'{"schema": 1, "version": 2, "oom_kill": 3, "oom": 3, "peak_bytes": 9, "limit_bytes": null, "more": 1}', 3),
        (b'{"schema": 1, "version": 0, "oom_kill": 3}', 0),
        (b'{"schema": 1, "version": 2, "oom_kill": -3}', 0),
        (b'{"schema": 1, "version": 7, "oom_kill": 3}', 0),
        (b'{"schema": 1, "version": 2, "oom_kill": 1e400}', 0),
        (b"\xff", 0),
        (b"[" * 9_999, 0),
    ],
)
def test_the_counters_of_a_cgroup_are_read_without_trust(tmp_path: Path, text: bytes, kills: int) -> None:
    (tmp_path / "cgroup.json").write_bytes(text)
    assert kernel_kills(ended(oom=read_memory(tmp_path))) == kills


def test_no_counters_and_a_link_in_their_place(tmp_path: Path) -> None:
    assert read_memory(tmp_path) is None
    (tmp_path / "real").write_text('{"schema": 1, "version": 2, "oom_kill": 3}')
    (tmp_path / "cgroup.json").symlink_to("real")
    assert read_memory(tmp_path) is None
