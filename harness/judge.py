"""Events + how the container ended → status, reason and advice. Pure; one truth table, tested row by row.

Nothing is judged from stdout, nor from an exit code alone. Where evidence is missing the answer is never PASS.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from harness import events as ev
from harness.backends.size import LIMIT
from harness.ending import code_words, kernel_kills, signal_name, signal_of, whereabouts
from harness.events import ErrorInfo
from harness.records import CheckRecord, ExitState
from harness.status import Status, worst_status

_NEVER_STARTED = ExitState(started=False)
_NOT_REACHED = "not-reached"
_HOST = "host: killed for memory"
_DEVICE_FAULT = "device-fault"
_TOLD = "device.fault"  # the property that tells of one, whatever the check makes of it
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
    evidence = replace(evidence, events=[event for event in evidence.events if event.rank == 0][: evidence.exit.heard])
    cause = _cause(evidence)
    if not any(isinstance(event, ev.Hello) for event in evidence.events):
        checks: tuple[CheckRecord, ...] = (_without_hello(evidence, cause),)
    else:
        course = _course(evidence.events)
        checks = (*_checks(evidence, course, cause), *dict.fromkeys(_cell_faults(evidence, course, cause)))
        checks = (*checks, *_disagreement(evidence, checks))
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
    if state.killed == "interrupted":
        return _Cause(Status.MISS, "interrupted: it was ended because the run was to stop")
    if state.killed == "disk":
        return _Cause(Status.FAIL, f"disk: it left more than {LIMIT >> 30} GiB in /out")
    deadline = _deadline(state)
    lost = deadline is not None or signal_of(state.exit_code) == "SIGKILL"
    if state.oom_killed or (lost and kernel_kills(state)):
        return _Cause(Status.OOM, _host(state) + (f"; then {deadline.reason}" if deadline else ""))
    if deadline is not None:
        return deadline
    if state.error:
        return _Cause(Status.MISS, f"engine-of-containers: {state.error}")
    if state.exit_code is None:
        return _Cause(Status.FAIL, "no-evidence: the container's end was not seen")
    if signal := signal_of(state.exit_code):
        return _Cause(Status.CRASH, f"signal: {signal}")
    if state.exit_code != 0:
        return _Cause(Status.CRASH, f"exit: the rig ended with {code_words(state.exit_code)}")
    return None


def _deadline(state: ExitState) -> _Cause | None:
    """The deadline at which we ended it: where nothing moved any more it is a hang, and says where all ranks stood."""
    if state.killed in ("", "interrupted", "disk"):
        return None
    given, quiet = state.deadlines, state.quiet_seconds
    limit = f" within {given[state.killed]:g} s" if state.killed in given else " in time"
    still = f"no event for {quiet:.0f} s" if quiet is not None else "no event within the deadline"
    stopped = quiet is not None and quiet >= given.get("silence", float("inf")) / 2
    where = whereabouts(state)
    return _Cause(
        Status.TIMEOUT,
        {
            "start": f"start: the process of the checks did not say hello{limit}",
            "import": f"import: vLLM was not imported{limit}; {where}",
            "init": f"init: the engine was not ready{limit}; {where}",
            "silence": f"hang: {still}; {where}",
            "total": f"hang: not done{limit}, {still}; {where}" if stopped else f"slow: at work, but not done{limit}",
        }[state.killed],
    )


def _host(state: ExitState) -> str:
    limit = state.oom.limit_bytes if state.oom else None
    return _HOST + (f", limit {limit / (1 << 30):.1f} GiB" if limit else "")


def _without_hello(evidence: Evidence, cause: _Cause | None) -> CheckRecord:
    """The checks' process never spoke: MISS needs somebody's word that the container did not work."""
    collected = [event.error for event in evidence.events if isinstance(event, ev.CollectError)]
    if collected:
        return _raised(CELL, collected[0], reason="collect")
    if cause and cause.status in (Status.MISS, Status.OOM, Status.TIMEOUT):
        return CheckRecord(id=CELL, status=cause.status, reason=cause.reason)
    how = f" ({cause.reason})" if cause else ""
    return CheckRecord(id=CELL, status=Status.FAIL, reason=f"no-evidence: it ended without a word{how}")


@dataclass
class _Course:
    """What was said of the checks that can be believed. After a device fault a process says nothing more that can be:
    its further checks count if they ran again in a fresh one; `spoiled` are those that ran in it all the same."""

    names: dict[str, None] = field(default_factory=dict)
    ends: dict[str, ev.End] = field(default_factory=dict)
    started: set[str] = field(default_factory=set)
    downs: list[ev.Down] = field(default_factory=list)
    spoiled: set[str] = field(default_factory=set)
    twice: set[str] = field(default_factory=set)
    fault: bool = False
    _told: set[int] = field(default_factory=set)  # processes that met a device fault, in a check that has not ended
    _faulty: set[int] = field(default_factory=set)  # processes that are not to be believed
    _ending: bool = False  # one of them, and no fresh one has come yet

    def take(self, event: ev.Event) -> None:
        if isinstance(event, ev.Hello):
            self._told.discard(event.pid)
            self._faulty.discard(event.pid)
            self._ending = False
        elif isinstance(event, ev.Property) and event.name == _TOLD:
            self._told.add(event.pid)
        elif isinstance(event, ev.PlanEvent):
            self.names |= dict.fromkeys(event.checks)
        elif isinstance(event, ev.Down):
            self._down(event)
        elif isinstance(event, (ev.Start, ev.End)):
            self.names[event.check] = None
            if event.pid in self._faulty:
                self.spoiled.add(event.check)
            elif isinstance(event, ev.Start):
                self.started.add(event.check)
            else:
                self._end(event)

    def _end(self, event: ev.End) -> None:
        if event.check in self.ends:
            self.twice.add(event.check)
        self.ends.setdefault(event.check, event)
        error = event.error
        if event.pid in self._told or (error and error.reason == _DEVICE_FAULT and not _of_a_rank(error)):
            self._faulty.add(event.pid)
            self.fault = self._ending = True

    def _down(self, event: ev.Down) -> None:
        if event.check:
            self.names[event.check] = None
        if not self._ending:
            self.downs.append(event)
        elif event.check:  # begun in a process that had to go
            self.spoiled.add(event.check)
            self.started.discard(event.check)


def _course(events: Iterable[ev.Event]) -> _Course:
    course = _Course()
    for event in events:
        course.take(event)
    return course


def _checks(evidence: Evidence, course: _Course, cause: _Cause | None) -> tuple[CheckRecord, ...]:
    downs = {down.check: down for down in course.downs if down.check}
    return tuple(_check(name, downs.get(name), course, evidence, cause) for name in course.names)


def _check(name: str, down: ev.Down | None, course: _Course, evidence: Evidence, cause: _Cause | None) -> CheckRecord:
    if name in course.ends:
        return _ended(course.ends[name], evidence)
    if down is not None:
        return _died(name, down, evidence)
    started = name in course.started
    if not started and (name in course.spoiled or (course.fault and cause is None)):
        return CheckRecord(id=name, status=Status.FAIL, reason=f"{_NOT_REACHED}: {_DEVICE_FAULT}")
    if cause is None:
        return CheckRecord(id=name, status=Status.ERROR, reason="not-run: the suite ended without it")
    reason = cause.reason if started else f"{_NOT_REACHED}: {cause.reason}"
    return CheckRecord(id=name, status=cause.status, reason=reason)


def _ended(end: ev.End, evidence: Evidence) -> CheckRecord:
    if end.outcome == "raised":
        if end.error is None:
            return CheckRecord(id=end.check, status=Status.ERROR, reason="corrupt-evidence: raised, but not what")
        if _told_of_memory(end.error, evidence.exit):
            return CheckRecord(id=end.check, status=Status.OOM, reason=_host(evidence.exit), error=end.error)
        return _raised(end.check, end.error, seconds=end.seconds)
    status = {"passed": Status.PASS, "na": Status.NA, "skipped": Status.SKIP}[end.outcome]
    return CheckRecord(id=end.check, status=status, reason=end.reason, seconds=end.seconds)


def _told_of_memory(error: ErrorInfo, state: ExitState) -> bool:
    """Whether it tells of the end of another process, a rank or an engine, that the kernel killed for memory."""
    if error.reason == _RANK_DIED:
        return state.oom_killed or (kernel_kills(state) > 0 and "SIGKILL" in error.message)
    return _is_engine_death(error) and (state.oom_killed or kernel_kills(state) > 0)


def _died(name: str, down: ev.Down, evidence: Evidence) -> CheckRecord:
    """The process of the checks died in this one, and the runner lived to say so."""
    state = evidence.exit
    if down.returncode in (None, -_SIGKILL) and (state.oom_killed or kernel_kills(state)):
        return CheckRecord(id=name, status=Status.OOM, reason=_host(state))
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
    if _is_engine_death(error):
        return Status.CRASH, "engine-died"
    if error.reason == _DEVICE_FAULT:  # the rig's word; whose line it was that met it says nothing
        return Status.FAIL, _DEVICE_FAULT
    origin = error.frames[-1].where if error.frames else "python"
    if "AssertionError" in (error.type.rpartition(".")[2], *error.bases) and origin in ("suite", "rig"):
        return Status.CRASH if error.reason == _RANK_DIED else Status.FAIL, None
    if any(frame.where == "rig" and frame.file in _ADAPTER_FILES for frame in error.frames):
        return Status.FAIL, None
    if error.type in _NAME_ERRORS and re.search(r"\bvllm\b", error.message):
        return Status.FAIL, "missing-name"
    return Status.ERROR, None


_SIGKILL = 9
_RANK_DIED = "rank-died"  # the launcher's word; the checks themselves run on
_ADAPTER_FILES = frozenset({"engine.py"})
_NAME_ERRORS = frozenset({"AttributeError", "ImportError", "ModuleNotFoundError"})


def _is_engine_death(error: ErrorInfo) -> bool:
    """V1's front end survives its engine's process, and says only that."""
    return error.type.endswith("EngineDeadError")


def _is_device_oom(error: ErrorInfo) -> bool:
    if error.reason == "device-oom" or any(name.endswith("OutOfMemoryError") for name in (error.type, *error.bases)):
        return True
    return re.search(r"\b(CUDA|HIP) (error: )?out of memory\b", error.message) is not None


def _of_a_rank(error: ErrorInfo) -> bool:
    """Raised in a process of its own, and only told here."""
    return re.match(r"rank \d+: ", error.message) is not None


def _cell_faults(evidence: Evidence, course: _Course, cause: _Cause | None) -> Iterable[CheckRecord]:
    """What went wrong with the cell though its checks may all have ended well."""
    if not any(isinstance(event, ev.PlanEvent) and event.checks for event in evidence.events):
        yield _without_plan(evidence, cause)
    elif cause is not None:
        yield CheckRecord(id=CELL, status=cause.status, reason=cause.reason)
    elif evidence.done is None:
        yield CheckRecord(id=CELL, status=Status.ERROR, reason="no-done: exit code 0, but DONE was not written")
    for down in course.downs:
        if down.check is None:
            yield _died(CELL, down, evidence)
    twice = (f"the check {check[:80]!r} ended twice" for check in course.twice)
    for fault in (*evidence.faults, *_unplanned(evidence), *twice)[:1]:
        yield CheckRecord(id=CELL, status=Status.ERROR, reason=f"corrupt-evidence: {fault}")


def _disagreement(evidence: Evidence, checks: Sequence[CheckRecord]) -> Iterable[CheckRecord]:
    """Where the runner does not say in DONE that all went well, though every check seems to have."""
    done, ends = evidence.done, sum(isinstance(event, ev.End) for event in evidence.events)
    if done is None or not all(check.status in (Status.PASS, Status.NA, Status.SKIP) for check in checks):
        return
    if (done.exit, done.checks) != (0, ends):
        said = f"DONE says exit code {done.exit} after {done.checks} checks; {ends} ended, none badly"
        yield CheckRecord(id=CELL, status=Status.ERROR, reason=f"corrupt-evidence: {said}")


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


_ADVICE_BY_STATUS = {
    Status.ERROR: "The scenario's own fault, not the version's; `vllm-matrix show CELL` has the traceback.",
}
_ADVICE = {
    "build": "`vllm-matrix logs CELL` shows the builder's last lines; all of them are in the run's folder, in images/.",
    "collect": "The scenario file does not import; `vllm-matrix show CELL` has the traceback.",
    "corrupt-evidence": "Something other than the rig wrote into events.jsonl; see the file in the attempt's folder.",
    "disk": "`du` in the attempt's folder says what it is; the limit keeps one cell from filling the disk of all.",
    _DEVICE_FAULT: "The device's context was lost; checks after it count only where they ran in a fresh process.",
    "device": "The device's memory was full; see which check, and what else used the device.",
    "engine-of-containers": "The daemon refused or lost the container; its words are in the reason, more in its log.",
    "engine-died": "The process of the engine died; `vllm-matrix logs CELL` shows its last output.",
    "gpu": "`python -m harness.gpus` says which GPUs there are, which of them may be used, and what is in use on each.",
    "hang": "Nothing moved any more; `vllm-matrix show CELL` has where its ranks stood, and its processes' stacks.",
    "host": "The cell's memory limit was reached; raise `memory` of the scenario in matrix.toml if that is legitimate.",
    "import": "Raise `import` of the scenario in matrix.toml, or use --timeout-multiplier on a slow machine; "
    "`vllm-matrix show CELL` has the stacks.",
    "init": "Raise `init` of the scenario in matrix.toml, or use --timeout-multiplier on a slow machine; "
    "`vllm-matrix show CELL` has the stacks.",
    "lease": "The lock files of the leases cannot be used; VLLM_MATRIX_LEASES names another folder for all harnesses.",
    "no-checks": "Give the scenario file at least one test function.",
    "no-evidence": "Not one event was written; `vllm-matrix logs CELL` shows what the container printed, "
    "`vllm-matrix shell CELL` opens the same one.",
    "no-done": "The rig was cut short; `vllm-matrix logs CELL` shows the last output.",
    "rank-died": "A rank's process died; the message has every rank's last mark, `vllm-matrix logs CELL` what it "
    "printed.",
    "slow": "Raise `timeout` of the scenario in matrix.toml, or use --timeout-multiplier on a slow machine.",
    "start": "Raise `start` of the scenario in matrix.toml if the machine is slow; `vllm-matrix logs CELL` shows what "
    "it printed before its first word.",
    "signal": "`vllm-matrix logs CELL` ends with the last output before the signal.",
}
