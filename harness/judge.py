"""Events + how the container ended → status, reason and advice. Pure; one truth table, tested row by row.

Nothing is judged from stdout, nor from an exit code alone. Where evidence is missing the answer is never PASS.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from harness import events as ev
from harness.events import ErrorInfo
from harness.records import CheckRecord, ExitState
from harness.status import Status, worst_status

_NEVER_STARTED = ExitState(started=False)
_NOT_REACHED = "not-reached"
CELL = "<cell>"  # the check that stands for what happened outside the checks


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """All that is known about an attempt. `infra` is the harness's own failure before anything started, `lacking` what
    a probe did not find and the cell needs, so that nothing was started; or empty."""

    events: Sequence[ev.Event] = ()
    faults: Sequence[str] = ()
    done: ev.Done | None = None
    exit: ExitState = _NEVER_STARTED
    infra: str = ""
    lacking: str = ""


@dataclass(frozen=True, kw_only=True)
class Judgement:
    status: Status
    reason: str | None
    advice: str | None
    checks: tuple[CheckRecord, ...]


@dataclass(frozen=True)
class _Cause:
    """Why checks that should have ended did not."""

    status: Status
    reason: str


def judge(evidence: Evidence) -> Judgement:
    """The truth table. Checks run in one process, which writes as rank 0: no other rank can end one."""
    if evidence.lacking:
        absent = CheckRecord(id=CELL, status=Status.NA, reason=evidence.lacking)
        return Judgement(status=Status.NA, reason=absent.reason, advice=None, checks=(absent,))
    evidence = replace(evidence, events=[event for event in evidence.events if event.rank == 0])
    cause = _cause(evidence)
    if not any(isinstance(event, ev.Hello) for event in evidence.events):
        checks: tuple[CheckRecord, ...] = (_without_hello(evidence, cause),)
    else:
        checks = (*_checks(evidence, cause), *dict.fromkeys(_cell_faults(evidence, cause)))
    status = worst_status(check.status for check in checks)
    worst = min((c for c in checks if c.status is status), key=lambda c: (c.reason or "").startswith(_NOT_REACHED))
    return Judgement(
        status=status,
        reason=worst.reason if status is not Status.PASS else None,
        advice=_ADVICE.get((worst.reason or "").split(":")[0]) or _ADVICE_BY_STATUS.get(status),
        checks=checks,
    )


def _cause(evidence: Evidence) -> _Cause | None:
    """What ended the container, where it did not end by itself with exit code 0."""
    state = evidence.exit
    if evidence.infra:
        return _Cause(Status.MISS, evidence.infra)
    if state.oom_killed:
        return _Cause(Status.OOM, "host: killed for memory")
    if state.killed == "silence":
        return _Cause(Status.TIMEOUT, f"hang: no event within the deadline; last mark: {state.last_mark or 'none'}")
    if state.killed == "total":
        return _Cause(Status.TIMEOUT, "deadline: still running when its time was up")
    if state.error:
        return _Cause(Status.MISS, f"engine-of-containers: {state.error}")
    if state.exit_code is None:
        return _Cause(Status.FAIL, "no-evidence: the container's end was not seen")
    number = signal_number(state.exit_code)
    if number is not None:
        return _Cause(Status.CRASH, f"signal: {signal_name(number)}")
    if state.exit_code != 0:
        return _Cause(Status.CRASH, f"exit: the rig ended with code {state.exit_code}")
    return None


def _without_hello(evidence: Evidence, cause: _Cause | None) -> CheckRecord:
    """The checks' process never spoke: MISS needs somebody's word that the container did not work."""
    collected = [event.error for event in evidence.events if isinstance(event, ev.CollectError)]
    if collected:
        return _raised(CELL, collected[0], reason="collect")
    if cause and cause.status in (Status.MISS, Status.OOM, Status.TIMEOUT):
        return CheckRecord(id=CELL, status=cause.status, reason=cause.reason)
    how = f" ({cause.reason})" if cause else ""
    return CheckRecord(id=CELL, status=Status.FAIL, reason=f"no-evidence: it ended without a word{how}")


def _checks(evidence: Evidence, cause: _Cause | None) -> tuple[CheckRecord, ...]:
    ends = {event.check: event for event in evidence.events if isinstance(event, ev.End)}
    started = {event.check for event in evidence.events if isinstance(event, ev.Start)}
    downs = {event.check: event for event in evidence.events if isinstance(event, ev.Down) and event.check}
    planned = [check for event in evidence.events if isinstance(event, ev.PlanEvent) for check in event.checks]
    names = dict.fromkeys([*planned, *ends, *downs, *(e.check for e in evidence.events if isinstance(e, ev.Start))])
    return tuple(_check(name, ends.get(name), downs.get(name), name in started, evidence, cause) for name in names)


def _check(
    name: str, end: ev.End | None, down: ev.Down | None, started: bool, evidence: Evidence, cause: _Cause | None
) -> CheckRecord:
    if end is not None:
        return _ended(end, evidence)
    if down is not None:
        return _died(name, down, evidence)
    if cause is None:
        return CheckRecord(id=name, status=Status.ERROR, reason="not-run: the suite ended without it")
    reason = cause.reason if started else f"{_NOT_REACHED}: {cause.reason}"
    return CheckRecord(id=name, status=cause.status, reason=reason)


def _ended(end: ev.End, evidence: Evidence) -> CheckRecord:
    if end.outcome == "raised":
        if end.error is None:
            return CheckRecord(id=end.check, status=Status.ERROR, reason="corrupt-evidence: raised, but not what")
        if end.error.reason == _RANK_DIED and evidence.exit.oom_killed:
            return CheckRecord(id=end.check, status=Status.OOM, reason="host: killed for memory", error=end.error)
        return _raised(end.check, end.error, seconds=end.seconds)
    status = {"passed": Status.PASS, "na": Status.NA, "skipped": Status.SKIP}[end.outcome]
    return CheckRecord(id=end.check, status=status, reason=end.reason, seconds=end.seconds)


def _died(name: str, down: ev.Down, evidence: Evidence) -> CheckRecord:
    """The process of the checks died in this one, and the runner lived to say so."""
    if evidence.exit.oom_killed:
        return CheckRecord(id=name, status=Status.OOM, reason="host: killed for memory")
    if down.returncode is None:
        return CheckRecord(id=name, status=Status.CRASH, reason="exit: the process vanished, its code is unknown")
    if down.returncode < 0:
        return CheckRecord(id=name, status=Status.CRASH, reason=f"signal: {signal_name(-down.returncode)}")
    return CheckRecord(id=name, status=Status.CRASH, reason=f"exit: the process ended with code {down.returncode}")


def _raised(name: str, error: ErrorInfo, reason: str | None = None, seconds: float | None = None) -> CheckRecord:
    status, code = classify(error)
    return CheckRecord(id=name, status=status, reason=code or error.reason or reason, error=error, seconds=seconds)


def classify(error: ErrorInfo) -> tuple[Status, str | None]:
    """FAIL, OOM or ERROR of an exception, and a reason code where there is one.

    The version under test is at fault if an oracle of the suite said no, if the exception came through a call of the
    engine adapter, or if a name of vLLM is missing. Everything else that the suite raises is its own fault.
    """
    if _is_device_oom(error):
        return Status.OOM, "device"
    if error.type.endswith("EngineDeadError"):  # V1's front end survives its engine's process, and says only that
        return Status.CRASH, "engine-died"
    origin = error.frames[-1].where if error.frames else "python"
    if "AssertionError" in (error.type.rpartition(".")[2], *error.bases) and origin in ("suite", "rig"):
        return Status.CRASH if error.reason == _RANK_DIED else Status.FAIL, None
    if any(frame.where == "rig" and frame.file in _ADAPTER_FILES for frame in error.frames):
        return Status.FAIL, None
    if error.type in _NAME_ERRORS and re.search(r"\bvllm\b", error.message):
        return Status.FAIL, "missing-name"
    return Status.ERROR, None


_RANK_DIED = "rank-died"  # the launcher's word; the checks themselves run on
_ADAPTER_FILES = frozenset({"engine.py"})
_NAME_ERRORS = frozenset({"AttributeError", "ImportError", "ModuleNotFoundError"})


def _is_device_oom(error: ErrorInfo) -> bool:
    return error.type.endswith("OutOfMemoryError") or "CUDA out of memory" in error.message


def _cell_faults(evidence: Evidence, cause: _Cause | None) -> Iterable[CheckRecord]:
    """What went wrong with the cell though its checks may all have ended well."""
    if not any(isinstance(event, ev.PlanEvent) and event.checks for event in evidence.events):
        yield _without_plan(evidence, cause)
    elif cause is not None:
        yield CheckRecord(id=CELL, status=cause.status, reason=cause.reason)
    elif evidence.done is None:
        yield CheckRecord(id=CELL, status=Status.ERROR, reason="no-done: exit code 0, but DONE was not written")
    for event in evidence.events:
        if isinstance(event, ev.Down) and event.check is None:
            yield _died(CELL, event, evidence)
    for fault in (*evidence.faults, *_unplanned(evidence))[:1]:
        yield CheckRecord(id=CELL, status=Status.ERROR, reason=f"corrupt-evidence: {fault}")


def _unplanned(evidence: Evidence) -> Iterable[str]:
    """Checks that ended though the runner never planned them, or though they had not begun: not the rig's doing."""
    planned = {check for event in evidence.events if isinstance(event, ev.PlanEvent) for check in event.checks}
    started = {event.check for event in evidence.events if isinstance(event, ev.Start)}
    for event in evidence.events:
        if planned and isinstance(event, ev.End) and not {event.check} <= planned & started:
            yield f"the check {event.check[:80]!r} ended without having been planned and started"


def _without_plan(evidence: Evidence, cause: _Cause | None) -> CheckRecord:
    collected = [event.error for event in evidence.events if isinstance(event, ev.CollectError)]
    if collected:
        return _raised(CELL, collected[0], reason="collect")
    if cause is not None:
        return CheckRecord(id=CELL, status=cause.status, reason=cause.reason)
    downs = [event for event in evidence.events if isinstance(event, ev.Down)]
    if downs:
        return _died(CELL, downs[0], evidence)
    if evidence.faults:
        return CheckRecord(id=CELL, status=Status.ERROR, reason=f"corrupt-evidence: {evidence.faults[0]}")
    return CheckRecord(id=CELL, status=Status.ERROR, reason="no-checks: the scenario has none")


def signal_number(exit_code: int) -> int | None:
    """The signal behind a container's exit code (128 + n), or None."""
    return exit_code - 128 if 128 < exit_code < 128 + signal.NSIG else None


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


_ADVICE_BY_STATUS = {
    Status.ERROR: "The scenario's own fault, not the version's; `vllm-matrix show CELL` has the traceback.",
}
_ADVICE = {
    "build": "`vllm-matrix logs CELL` shows the builder's last lines; all of them are in the run's folder, in images/.",
    "collect": "The scenario file does not import; `vllm-matrix show CELL` has the traceback.",
    "corrupt-evidence": "Something other than the rig wrote into events.jsonl; see the file in the attempt's folder.",
    "deadline": "Raise `timeout` of the scenario in matrix.toml, or use --timeout-multiplier on a slow machine.",
    "device": "The device's memory was full; see which check, and what else used the device.",
    "engine-of-containers": "The daemon refused or lost the container; its words are in the reason, more in its log.",
    "engine-died": "The process of the engine died; `vllm-matrix logs CELL` shows its last output.",
    "hang": "Nothing was heard within `silence` seconds; `vllm-matrix logs CELL` shows the last output.",
    "host": "The cell's memory limit was reached; raise `memory` of the scenario in matrix.toml if that is legitimate.",
    "no-checks": "Give the scenario file at least one test function.",
    "no-evidence": "Not one event was written; `vllm-matrix logs CELL` shows what the container printed, "
    "`vllm-matrix shell CELL` opens the same one.",
    "no-done": "The rig was cut short; `vllm-matrix logs CELL` shows the last output.",
    "rank-died": "A rank's process died; the message has every rank's last mark, `vllm-matrix logs CELL` what it "
    "printed.",
    "signal": "`vllm-matrix logs CELL` ends with the last output before the signal.",
}
