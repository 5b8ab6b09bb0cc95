"""Ctrl-C: once, twice, and while the harness winds down."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from harness import attempt
from harness.project import Project
from harness.records import records_of
from harness.stop import Stop
from tests import scripted
from tests.scripted import ScriptedBackend
from tests.test_run import go, project  # noqa: F401 - a fixture

NUMBERS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = [(number, signal.getsignal(number)) for number in NUMBERS]
    yield
    for number, handler in before:
        signal.signal(number, handler)


def test_handlers_are_put_back_and_nothing_is_heard_once_it_was_asked() -> None:
    before = [signal.getsignal(number) for number in NUMBERS]
    with Stop().on_signals():
        pass
    assert [signal.getsignal(number) for number in NUMBERS] == before
    stop = Stop()
    with stop.on_signals():
        stop.ask()
    os.kill(os.getpid(), signal.SIGINT)
    assert not stop.at_once


@pytest.mark.parametrize("number", NUMBERS)
def test_the_first_raises_and_the_second_only_hurries(number: int) -> None:
    stop = Stop()
    with stop.on_signals():
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
        assert stop.asked
        assert not stop.at_once
        os.kill(os.getpid(), number)
        assert stop.at_once
        os.kill(os.getpid(), number)


def test_a_signal_after_a_fault_only_hurries() -> None:
    stop = Stop()
    stop.ask()
    with stop.on_signals():
        os.kill(os.getpid(), signal.SIGINT)
    assert stop.at_once


def test_what_nohup_ignores_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Stop().on_signals():
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


def press(backend: ScriptedBackend, times: int, probe: bool = False) -> threading.Thread:
    """Ctrl-C, `times` times, once a cell, or a probe, runs."""

    def presses() -> None:
        while not (backend.probes if probe else backend.launches):
            time.sleep(0.01)
        for _ in range(times):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.2)

    thread = threading.Thread(target=presses)
    thread.start()
    return thread


def test_once_waits_for_the_grace(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    monkeypatch.setattr(attempt, "GRACE", 1.5)
    backend = ScriptedBackend(scripted.deaf)
    thread = press(backend, 1)
    begin, stop = time.monotonic(), Stop()
    with stop.on_signals():
        outcome = go(project, backend, stop=stop)
        thread.join()
    assert outcome.exit_code == 130
    assert backend.alive == 0
    assert 1.5 < time.monotonic() - begin < 20


def test_twice_kills_at_once_and_still_writes_the_table(project: Project) -> None:  # noqa: F811
    backend = ScriptedBackend(scripted.deaf)
    thread = press(backend, 3)
    begin, stop = time.monotonic(), Stop()
    with stop.on_signals():
        outcome = go(project, backend, stop=stop)
        assert time.monotonic() - begin < attempt.GRACE / 2
        thread.join()
    assert outcome.exit_code == 130
    assert backend.alive == 0
    assert records_of(outcome.folder) == {}
    assert (outcome.folder / "matrix.md").is_file()
    assert {square.status for square in outcome.matrix.squares} == {"NOTRUN"}


@pytest.mark.parametrize("times", [1, 3])
def test_a_probe_is_ended_at_once(project: Project, times: int) -> None:  # noqa: F811
    backend = ScriptedBackend(scripted.passes, scripted.deaf)
    thread = press(backend, times, probe=True)
    begin, stop = time.monotonic(), Stop()
    with stop.on_signals():
        outcome = go(project, backend, stop=stop)
        assert time.monotonic() - begin < attempt.GRACE / 2
        thread.join()
    assert (outcome.exit_code, backend.alive, backend.launches) == (130, 0, [])


def test_an_interrupted_build_is_an_interrupted_run(project: Project) -> None:  # noqa: F811
    def builds(*_: object) -> object:
        os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError("not reached")

    stop = Stop()
    with stop.on_signals():
        outcome = go(project, ScriptedBackend(scripted.passes), builds, stop=stop)  # type: ignore[arg-type]
    assert outcome.exit_code == 130
