"""A back end whose cells are Python functions: what the harness does with every kind of end, without Docker."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from pathlib import Path

from harness.backends.base import COMMAND, Launch
from harness.errors import InfrastructureError
from harness.events import file_name
from harness.records import ExitState
from tests.conftest import event_line

CLEAN = ExitState(started=True, exit_code=0)
KILLED = ExitState(started=True, exit_code=137)

Script = Callable[[Launch, threading.Event], ExitState]


class ScriptedBackend:
    """Runs `script(launch, stopped)` in a thread; `stopped` is set by SIGTERM. `close` waits for no script.

    Probes run `probe` instead, and are no `launches`; by itself it leaves nothing, and nothing is known of a target.
    """

    name = "scripted"

    def __init__(self, script: Script, probe: Script | None = None) -> None:
        self.script = script
        self.probe = probe or silent
        self.launches: list[Launch] = []
        self.probes: list[Launch] = []
        self.alive = 0

    def check(self, scratch: Path, image: str) -> None:
        pass

    def start(self, launch: Launch) -> ScriptedRunning:
        (self.launches if launch.command == COMMAND else self.probes).append(launch)
        return ScriptedRunning(self, launch)


class ScriptedRunning:
    def __init__(self, backend: ScriptedBackend, launch: Launch) -> None:
        self._backend = backend
        self._stopped = threading.Event()
        self._state = KILLED
        self._thread = threading.Thread(target=self._run, args=(launch,), daemon=True)
        backend.alive += 1
        self._thread.start()

    def _run(self, launch: Launch) -> None:
        script = self._backend.script if launch.command == COMMAND else self._backend.probe
        self._state = script(launch, self._stopped)

    def ended(self, seconds: float) -> bool:
        self._thread.join(min(seconds, 0.02))
        return not self._thread.is_alive()

    def terminate(self) -> None:
        self._stopped.set()

    def close(self) -> ExitState:
        self._backend.alive -= 1
        return KILLED if self._thread.is_alive() else self._state


def write_events(launch: Launch, *lines: bytes, rank: int = 0) -> None:
    with (launch.folder / "out" / file_name(rank)).open("ab") as file:
        for line in lines:
            file.write(line)


def done(launch: Launch) -> None:
    (launch.folder / "out" / "DONE").write_text('{"schema": 1, "exit": 0, "checks": 1}')


HELLO = event_line("hello", python="3.11.2", platform="linux", distributions={"torch": "2.6.0"})


def passes(launch: Launch, stopped: threading.Event) -> ExitState:
    """Also leaves the reference that other cells ask for."""
    content = b'{"schema": 1}'
    (launch.folder / "out" / "artifacts" / "reference.json").write_bytes(content)
    write_events(launch, HELLO, event_line("plan", checks=["a"]), event_line("start", check="a"))
    write_events(launch, event_line("metric", name="tokens", value=16, unit="tokens", check="a"))
    write_events(launch, event_line("property", name="engine", value="V0", check=None))
    sha = hashlib.sha256(content).hexdigest()
    write_events(launch, event_line("artifact", path="reference.json", sha256=sha, bytes=len(content)))
    write_events(launch, event_line("end", check="a", outcome="passed", seconds=0.1))
    done(launch)
    return CLEAN


def silent(launch: Launch, stopped: threading.Event) -> ExitState:
    """Writes nothing, ends well."""
    return CLEAN


def signal_9(launch: Launch, stopped: threading.Event) -> ExitState:
    write_events(launch, HELLO, event_line("plan", checks=["a", "b"]), event_line("start", check="a"))
    return KILLED


def sleeps(launch: Launch, stopped: threading.Event) -> ExitState:
    """Sleeps for ever, in the middle of a barrier."""
    write_events(launch, HELLO, event_line("plan", checks=["a"]), event_line("start", check="a"))
    write_events(launch, event_line("mark", name="barrier", n=3, state="enter"))
    stopped.wait()
    return KILLED


def ranks_sleep(launch: Launch, stopped: threading.Event) -> ExitState:
    """Two ranks, of which the second does not come to the barrier."""
    waits = event_line("mark", name="barrier", n=3, state="enter")
    write_events(launch, HELLO, event_line("plan", checks=["a"]), event_line("start", check="a"), waits)
    for rank, seconds in ((0, 1.0), (1, 2.5)):
        write_events(launch, event_line("phase", rank=rank, name="init", state="end", seconds=seconds), rank=rank)
        write_events(launch, event_line("property", rank=rank, name="blocks", value=64 - rank), rank=rank)
    write_events(launch, event_line("mark", rank=1, name="generate", n=2, state="enter"), rank=1)
    stopped.wait()
    return KILLED


def deaf(launch: Launch, stopped: threading.Event) -> ExitState:
    """Sleeps, whatever it is told."""
    threading.Event().wait()
    return KILLED


def truncated(launch: Launch, stopped: threading.Event) -> ExitState:
    write_events(launch, HELLO, event_line("plan", checks=["a"]), event_line("start", check="a")[:-9])
    return KILLED


def forged(launch: Launch, stopped: threading.Event) -> ExitState:
    passes(launch, stopped)
    write_events(launch, b"PASSED all\n")
    return CLEAN


class RefusingBackend(ScriptedBackend):
    """The engine of containers says no `refusals` times, then works."""

    def __init__(self, refusals: int) -> None:
        super().__init__(passes)
        self.refusals = refusals

    def start(self, launch: Launch) -> ScriptedRunning:
        if self.refusals and launch.command == COMMAND:
            self.refusals -= 1
            raise InfrastructureError("no space left on device")
        return super().start(launch)
