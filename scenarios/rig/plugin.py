"""The pytest plugin that turns checks into events. Loaded by name: ``-p rig.plugin``.

Under ``pytest-xdist -n1`` it lives in two processes. The worker runs the checks and holds the engine: it writes
``hello``, ``start`` and ``end``. The controller outlives it: it writes ``plan``, ``down`` and ``collect_error``.
Without xdist (``-p no:xdist``, for a local try) one process writes all of them.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from typing import Any, Generator

import pytest

from rig import errors, events, fixtures, hello, sweep
from rig.cell import read_cell
from rig.outcomes import NotAvailable, Skipped

# A worker gone for good leaves its return code within moments; its children cannot delay that.
REAP_SECONDS = 10.0
SWEEP_SECONDS = 10.0

# How a worker ends that leaves the checks after it to a fresh one: its device failed, or it can have no further engine.
FAULT_CODE, SPENT_CODE = 93, 94
_REPLACED = {FAULT_CODE: errors.DEVICE_FAULT, SPENT_CODE: "engine-spent"}


def check_id(nodeid: str) -> str:
    """``test_x.py::test_sizes[a]`` -> ``sizes[a]``."""
    name, bracket, param = nodeid.partition("[")
    return name.split("::")[-1].removeprefix("test_") + bracket + param


def pytest_configure(config: pytest.Config) -> None:
    """Register the half, or the two halves, that this process plays."""
    config.addinivalue_line("markers", "only(**params): a check of the cells that have these parameters")
    worker = hasattr(config, "workerinput")
    distributed = not worker and getattr(config.option, "dist", "no") != "no"
    if worker or not distributed:
        config.pluginmanager.register(Checks(events.writer()), "rig-checks")
    if not worker:
        config.pluginmanager.register(Runner(events.writer()), "rig-runner")
    if distributed:
        config.pluginmanager.register(Workers(events.writer()), "rig-workers")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A check marked ``only(mode="sleep")`` is no check of a cell with another mode: neither planned nor skipped."""
    here = read_cell().params.items()
    foreign = [item for item in items if any(mark.kwargs.items() - here for mark in item.iter_markers("only"))]
    if foreign:
        config.hook.pytest_deselected(items=foreign)
        items[:] = [item for item in items if item not in foreign]


class Checks:
    """In the process that runs the checks: who it is, and one ``start`` and one ``end`` a check."""

    def __init__(self, writer: events.Events) -> None:
        self.writer = writer
        self.raised: BaseException | None = None
        self.skipped: Skipped | None = None
        self.faulted: str | None = None
        self.replaceable = False

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionstart(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workerinput"):
            # execnet has sent stdout to /dev/null, -s or not; what vLLM logs there is the only word of some failures
            os.dup2(2, 1)
            _keep_pipes_from_forks(session.config)
            self.replaceable = _is_replaceable(session.config)
        self.writer.emit("hello", **hello.facts())

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        self.raised = self.skipped = None
        self.writer.check = check_id(item.nodeid)
        begun = time.monotonic()
        self.writer.emit("start", check=self.writer.check)
        try:
            return (yield)
        except BaseException as exc:  # pytest.exit and Ctrl-C end the run, the check still has its end
            self.raised = self.raised or exc
            raise
        finally:
            self._end(time.monotonic() - begun)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        if self.faulted:
            fixtures.refuse(self.faulted)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
        exc = call.excinfo.value if call.excinfo else None
        if isinstance(exc, Skipped):
            self.skipped = self.skipped or exc
        elif exc is not None:  # the first one is the cause: setup before call before teardown
            self.raised = self.raised or exc
        return (yield)

    def pytest_sessionfinish(self) -> None:
        fixtures.close_engine()

    def _end(self, seconds: float) -> None:
        outcome, reason, error = "passed", None, None
        if self.raised is not None:
            outcome, error = "raised", errors.describe(self.raised)
            reason = error["reason"]
        elif self.skipped is not None:
            outcome = "na" if isinstance(self.skipped, NotAvailable) else "skipped"
            reason = events.cut_middle(str(self.skipped), events.TEXT_CHARS)
        fields = {"outcome": outcome, "seconds": round(seconds, 3), "reason": reason, "error": error}
        fault = self.raised is not None and errors.device_trouble(self.raised) == errors.DEVICE_FAULT
        if fault:
            self.writer.property("device.fault", str(self.raised) or type(self.raised).__name__)
        self.writer.emit("end", check=self.writer.check, **fields)
        if fault and self.replaceable:
            _leave(FAULT_CODE)
        if fixtures.is_spent() and self.replaceable:
            _leave(SPENT_CODE)
        if fault:
            self.faulted = self.writer.check
        self.writer.check = self.raised = self.skipped = None


class Runner:
    """Where pytest was started: what was collected, or why nothing was."""

    def __init__(self, writer: events.Events) -> None:
        self.writer = writer

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        if session.items:  # none in a controller: its workers collect
            self.writer.emit("plan", checks=[check_id(item.nodeid) for item in session.items])

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            unknown = errors.describe(RuntimeError(str(report.longrepr)))
            self.writer.emit("collect_error", error=getattr(report, "rig_error", unknown))


class Workers:
    """In the controller: what the workers collected, and how one of them ended."""

    def __init__(self, writer: events.Events) -> None:
        self.writer = writer
        self.planned = False
        self.running: str | None = None
        self.latest: str | None = None

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        if not self.planned:  # a worker that replaces a dead one collects the same file again
            self.planned = True
            self.writer.emit("plan", checks=[check_id(nodeid) for nodeid in ids])

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.running = self.latest = check_id(nodeid)

    def pytest_runtest_logfinish(self) -> None:
        self.running = None

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        if error and error != "keyboard-interrupt":  # that one has stopped and lives
            code = _returncode(node.gateway._io.popen)
            why = _REPLACED.get(code)
            if why is not None:
                self.writer.property("worker.replaced", why, check=self.latest)
            else:
                self.writer.emit("down", returncode=code, check=self.running)
            self._sweep(self.running if why is None else self.latest)
            self.running = None

    def _sweep(self, check: str | None) -> None:
        """An engine core may have outlived the worker, with the memory that the next one needs."""
        marked = sweep.mark(os.environ)
        outlived = sweep.living(sweep.members(os.getpid(), marked))
        commands = sweep.commands(outlived)
        sweep.end(lambda: sweep.living(sweep.members(os.getpid(), marked)), SWEEP_SECONDS)
        if commands:
            self.writer.property("worker.outlived_by", commands[:20], check=check)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, Any, Any]:
    """Keep the exception itself: a report that crosses from worker to controller carries plain data only."""
    report = yield
    excinfo = getattr(getattr(report, "call", None), "excinfo", None)
    if report.failed and excinfo is not None:
        exc = excinfo.value
        if isinstance(exc, pytest.Collector.CollectError) and exc.__cause__ is not None:
            exc = exc.__cause__
        report.rig_error = errors.describe(exc)
    return report


def _returncode(popen: subprocess.Popen[bytes]) -> int | None:
    """How a worker ended; None if it only let go of its pipe, which would be a bug of ours.

    xdist 3.8 knows no more than "Not properly terminated": the process itself says how.
    """
    try:
        return popen.wait(timeout=REAP_SECONDS)
    except subprocess.TimeoutExpired:
        return None


def _is_replaceable(config: pytest.Config) -> bool:
    """Whether the controller will start another worker after this one; their ids count from gw0."""
    number = config.workerinput["workerid"].removeprefix("gw")  # type: ignore[attr-defined]
    return number.isdecimal() and int(number) < int(config.option.maxworkerrestart or 0)


def _leave(code: int) -> None:
    """End this process within the check, so that xdist takes that one for lost, and no other."""
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _keep_pipes_from_forks(config: pytest.Config) -> None:
    """A forked engine process must not hold the worker's pipes open.

    It may outlive the worker (vLLM 0.8.x: an engine core survives a parent that was killed), and the controller knows
    a worker's death only by the end of its pipe: no ``down``, no fresh worker, a cell that hangs until its deadline.
    """
    io = next((p.channel.gateway._io for p in config.pluginmanager.get_plugins() if hasattr(p, "channel")), None)
    if io is None:
        return
    pipes = [io.infile.fileno(), io.outfile.fileno()]
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)

    def let_go() -> None:
        for pipe in pipes:
            os.dup2(null, pipe, inheritable=False)  # not closed: the number must not be given out again

    os.register_at_fork(after_in_child=let_go)
