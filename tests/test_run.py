"""The whole flow with a scripted back end: every end a cell can have, and what is left of it."""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from harness import models
from harness.backends.base import Launch
from harness.cells import Deadlines, Selection
from harness.errors import BuildError
from harness.images import BuiltImage, Image
from harness.matrix import Square
from harness.plan import Planned
from harness.project import Project, build_options, load_project, make_plan
from harness.records import ExitState, Record, records_of
from harness.resume import backend_of, rest_of
from harness.run import Build, Outcome, Tools, execute
from harness.status import Status
from harness.stop import Stop
from harness.views.terminal import Progress
from tests import scripted
from tests.conftest import SPEC
from tests.scripted import RefusingBackend, Script, ScriptedBackend


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    return make_project(tmp_path, monkeypatch)


def make_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    (tmp_path / "matrix.toml").write_text(SPEC)
    for target in ("vllm-0.8.5", "vllm-0.10.0"):
        folder = tmp_path / "docker" / target
        folder.mkdir(parents=True)
        (folder / "Dockerfile").write_text(f"ARG BASE\nFROM ${{BASE}}\nCOPY {target}/cpu.lock /\n")
        (folder / "cpu.lock").write_text("")
    (tmp_path / "docker" / "base").mkdir()
    (tmp_path / "docker" / "base" / "Dockerfile").write_text("FROM scratch\n")
    suite = tmp_path / "scenarios"
    suite.mkdir()
    for name in ("cold_start", "multimodal_rollout"):
        (suite / f"test_{name}.py").write_text("def test_a(): ...\n")
    monkeypatch.setattr(models, "default_root", lambda: tmp_path / "models")
    monkeypatch.setattr(models, "generate", lambda root: {})
    return load_project(tmp_path / "matrix.toml")


def builds(image: Image, log: Path, say: Callable[[str], None]) -> BuiltImage:
    return BuiltImage(tag=image.tag, id="sha256:0", bytes=1, seconds=0.1, cached=False)


def go(
    project: Project,
    backend: ScriptedBackend,
    build: Build = builds,
    select: Selection | None = None,
    deadlines: Deadlines | None = None,
    fresh: bool = False,
    resumed: Path | None = None,
    stop: Stop | None = None,
) -> Outcome:
    options = build_options(project)
    if resumed:
        plan = rest_of(project, resumed, options, backend_of(resumed)).plan
    else:
        plan = make_plan(project, select or Selection(), None, fresh, options)
    if deadlines:
        plan = tuple(replace(p, cell=replace(p.cell, deadlines=deadlines)) for p in plan)
    return go_with(project, backend, plan, resumed, build, stop)


def go_with(
    project: Project,
    backend: ScriptedBackend,
    plan: Sequence[Planned],
    resumed: Path | None = None,
    build: Build = builds,
    stop: Stop | None = None,
) -> Outcome:
    options, progress = build_options(project), Progress(Console(quiet=True))
    tools = Tools(backend=backend, build=build, options=options, progress=progress, engine="none", stop=stop or Stop())
    return execute(project, plan, tools, resumed)


def squares(outcome: Outcome) -> dict[str, Square]:
    return {square.cell.id: square for square in outcome.matrix.squares}


def scripts(**by_scenario: Script) -> Script:
    def run(launch: Launch, stopped: threading.Event) -> ExitState:
        cell = json.loads((launch.folder / "in" / "cell.json").read_text())
        return by_scenario.get(cell["scenario"], scripted.passes)(launch, stopped)

    return run


def test_all_green(project: Project) -> None:
    backend = ScriptedBackend(scripted.passes)
    outcome = go(project, backend)
    assert outcome.exit_code == 0
    assert {square.status for square in outcome.matrix.squares} == {Status.PASS}
    assert json.loads((outcome.folder / "matrix.json").read_text())["green"] is True
    assert "multimodal\\_rollout" in (outcome.folder / "matrix.md").read_text()
    assert backend.alive == 0


def test_a_cell_is_handed_the_reference_that_its_reference_cell_left(project: Project) -> None:
    backend = ScriptedBackend(scripted.passes)
    go(project, backend)
    handed = {
        launch.labels["vllm-matrix.cell"]: (launch.folder / "in" / "reference.json").exists()
        for launch in backend.launches
    }
    assert {cell: has for cell, has in handed.items() if "multimodal" in cell} != {}
    assert all(has == ("multimodal" in cell) for cell, has in handed.items())


def test_a_reference_that_is_not_what_its_record_says_is_not_handed_in(project: Project) -> None:
    def tampered(launch: Launch, stopped: threading.Event) -> ExitState:
        state = scripted.passes(launch, stopped)
        (launch.folder / "out" / "artifacts" / "reference.json").write_text("{}")
        return state

    backend = ScriptedBackend(scripts(cold_start=tampered))
    go(project, backend)
    assert not any((launch.folder / "in" / "reference.json").exists() for launch in backend.launches)


ENDS: dict[str, tuple[Script, Status, str]] = {
    "writes nothing": (scripted.silent, Status.FAIL, "no-evidence"),
    "killed by signal 9": (scripted.signal_9, Status.CRASH, "signal: SIGKILL"),
    "a truncated events line": (scripted.truncated, Status.CRASH, "signal: SIGKILL"),
    "a forged line": (scripted.forged, Status.ERROR, "corrupt-evidence"),
}


@pytest.mark.parametrize("name", ENDS)
def test_bad_ends(project: Project, name: str) -> None:
    script, status, reason = ENDS[name]
    outcome = go(project, ScriptedBackend(scripts(multimodal_rollout=script)), select=Selection(targets=["vllm-0.8.5"]))
    square = squares(outcome)["vllm-0.8.5@cpu/multimodal_rollout[model=qwen2_vl]"]
    assert square.record is not None
    assert (square.status, outcome.exit_code) == (status, 1)
    assert (square.record.reason or "").startswith(reason)
    assert square.record.advice, "a red cell says what to do"


def test_one_that_sleeps_for_ever_ends_in_timeout_with_its_last_mark(project: Project) -> None:
    backend = ScriptedBackend(scripts(cold_start=scripted.sleeps))
    outcome = go(
        project, backend, deadlines=Deadlines(total=60, silence=0.2), select=Selection(scenarios=["cold_start"])
    )
    for square in outcome.matrix.squares:
        assert square.record is not None
        assert square.status == Status.TIMEOUT
        assert re.fullmatch(r"hang: no event for \d s; in barrier 3 for \d s", square.record.reason or "")
        state = square.record.exit
        assert state is not None
        assert (state.killed, state.signal, state.last_mark) == ("silence", "SIGKILL", "barrier 3 enter")
        assert state.deadlines["silence"] == 0.2 <= (state.quiet_seconds or 0)
    assert backend.alive == 0


def test_a_hang_of_ranks_keeps_what_each_did_last(project: Project) -> None:
    path = project.root / "matrix.toml"
    path.write_text(path.read_text().replace("[scenarios.cold_start]", "[scenarios.cold_start]\nranks = 2"))
    outcome = go(
        load_project(path),
        ScriptedBackend(scripts(cold_start=scripted.ranks_sleep)),
        deadlines=Deadlines(total=60, silence=0.2),
        select=Selection(scenarios=["cold_start"]),
    )
    record = outcome.matrix.squares[0].record
    assert record is not None
    assert record.exit is not None
    assert record.exit.last_mark == "rank 0: barrier 3 enter; rank 1: generate 2 enter"
    stood = r"rank 1 did not come to barrier 3; rank 0 in barrier 3 for \d s, rank 1 in generate 2 for \d s"
    assert re.fullmatch(rf"hang: no event for \d s; {stood}", record.reason or "")
    assert {rank: str(mark) for rank, mark in record.exit.last_marks.items()} == {
        0: "barrier 3 enter",
        1: "generate 2 enter",
    }
    assert set(record.exit.last_barriers) == {0}
    assert (record.properties["blocks"], record.properties["rank1.blocks"]) == (64, 63)
    assert record.phases["init"] == 2.5  # side by side, not one after the other


def test_a_rank_that_gets_on_keeps_its_cell_alive(project: Project) -> None:
    """Ranks that wait are silent; only when the last one falls silent has the cell stopped."""
    path = project.root / "matrix.toml"
    path.write_text(path.read_text().replace("[scenarios.cold_start]", "[scenarios.cold_start]\nranks = 2"))

    def works_on(launch: Launch, stopped: threading.Event) -> ExitState:
        for n in range(30):
            scripted.write_events(launch, scripted.event_line("mark", rank=1, name="generate", n=n), rank=1)
            if stopped.wait(0.02):
                return scripted.KILLED
        return scripted.passes(launch, stopped)

    select = Selection(targets=["vllm-0.8.5"], scenarios=["cold_start"])
    outcome = go(
        load_project(path), ScriptedBackend(works_on), deadlines=Deadlines(total=60, silence=0.3), select=select
    )
    assert {square.status for square in outcome.matrix.squares} == {Status.PASS}


def test_its_total_time_ends_a_cell_that_goes_on_talking(project: Project) -> None:
    def chatters(launch: Launch, stopped: threading.Event) -> ExitState:
        scripted.write_events(launch, scripted.HELLO)
        while not stopped.wait(0.01):
            scripted.write_events(launch, scripted.event_line("metric", name="m", value=1, unit="s"))
        return scripted.KILLED

    outcome = go(project, ScriptedBackend(chatters), deadlines=Deadlines(total=0.4, silence=30))
    assert {square.status for square in outcome.matrix.squares} == {Status.TIMEOUT}
    assert {square.record.reason for square in outcome.matrix.squares if square.record} == {
        "slow: at work, but not done within 0.4 s"
    }


def one(project: Project, script: Script, **deadlines: Any) -> Record:
    """The record of one cell under these deadlines."""
    given = Deadlines(**{"total": 60.0, "silence": 30.0, **deadlines})
    select = Selection(targets=["vllm-0.8.5"], scenarios=["cold_start"])
    (square,) = go(project, ScriptedBackend(script), deadlines=given, select=select).matrix.squares
    assert square.record is not None
    return square.record


def begins(*lines: bytes) -> Script:
    def run(launch: Launch, stopped: threading.Event) -> ExitState:
        scripted.write_events(launch, *lines)
        stopped.wait()
        return scripted.KILLED

    return run


PLANNED = scripted.event_line("plan", checks=["a"]) + scripted.event_line("start", check="a")


def phase(name: str, state: str = "begin", pid: int = 7) -> bytes:
    return scripted.event_line("phase", name=name, state=state, pid=pid)


@pytest.mark.parametrize("name", ["import", "init"])
def test_a_phase_has_a_deadline_of_its_own(project: Project, name: str) -> None:
    lines = (
        scripted.HELLO,
        PLANNED,
        phase("import"),
        *((phase("import", "end"), phase(name)) if name == "init" else ()),
    )
    phases = {"import": 30.0, "init": 30.0, name: 0.2}
    record = one(project, begins(*lines), phases=phases)
    assert record.exit is not None
    assert (record.status, record.exit.killed) == (Status.TIMEOUT, name)
    assert (record.reason or "").startswith(f"{name}: ")


def test_no_hello_in_time(project: Project) -> None:
    record = one(project, begins(scripted.event_line("plan", checks=["a"])), start=0.2)
    assert (record.status, record.reason) == (
        Status.TIMEOUT,
        "start: the process of the checks did not say hello within 0.2 s",
    )
    assert record.advice


def test_a_cell_that_fills_the_disk_is_ended(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.backends.size.Guard.exceeded", lambda self: self._folder.name == "out")
    outcome = go(project, ScriptedBackend(scripted.sleeps))
    records = records_of(outcome.folder).values()
    assert {(record.status, (record.reason or "").split(":")[0]) for record in records} == {(Status.FAIL, "disk")}


def test_a_phase_that_died_with_its_process_has_no_deadline(project: Project) -> None:
    """Another process goes on; the one that had begun cannot end its phase any more."""

    def replaced(launch: Launch, stopped: threading.Event) -> ExitState:
        down = scripted.event_line("down", returncode=-9, check="a")
        scripted.write_events(launch, scripted.HELLO, PLANNED, phase("init"), down, scripted.HELLO)
        assert not stopped.wait(0.4)
        scripted.done(launch)
        return scripted.CLEAN

    record = one(project, replaced, phases={"init": 0.2})
    assert (record.status, record.reason) == (Status.CRASH, "signal: SIGKILL")


def test_what_our_own_signal_does_to_a_check_is_not_its_fault(project: Project) -> None:
    def falls(launch: Launch, stopped: threading.Event) -> ExitState:
        scripted.write_events(launch, scripted.HELLO, PLANNED)
        scripted.write_events(launch, scripted.event_line("mark", name="generate", n=0, state="enter"))
        stopped.wait()
        scripted.write_events(launch, scripted.event_line("mark", name="generate", n=0, state="leave"))
        scripted.write_events(launch, scripted.event_line("down", returncode=-15, check="a"))
        (launch.folder / "out" / "cgroup.json").write_text('{"schema": 1, "version": 2, "oom": 1}')
        return ExitState(started=True, exit_code=143)

    record = one(project, falls, silence=0.2)
    assert record.exit is not None
    assert (record.status, record.exit.killed, record.exit.signal) == (Status.TIMEOUT, "silence", "SIGTERM")
    assert str(record.exit.last_marks[0]) == "generate 0 enter"
    assert record.exit.oom is not None and record.exit.oom.oom == 1


def test_a_miss_is_tried_again_and_shows_that_it_was(project: Project) -> None:
    outcome = go(project, RefusingBackend(1), select=Selection(targets=["vllm-0.8.5"], scenarios=["cold_start"]))
    (square,) = outcome.matrix.squares
    assert square.record is not None
    assert (square.status, square.record.attempt, outcome.exit_code) == (Status.PASS, 2, 0)
    assert len(list(outcome.folder.glob("cells/*/attempt-*/record.json"))) == 2


def test_a_lease_whose_files_were_removed_meanwhile_is_told(project: Project, leases_of_its_own: Path) -> None:
    def removes(launch: Launch, stopped: threading.Event) -> ExitState:
        for path in leases_of_its_own.iterdir():
            path.unlink()
        return scripted.passes(launch, stopped)

    only = Selection(targets=["vllm-0.8.5"], scenarios=["cold_start"])
    for script, told in ((scripted.passes, False), (removes, True)):
        (square,) = go(project, ScriptedBackend(script), select=only, fresh=True).matrix.squares
        assert square.record is not None
        assert (square.status, "lease.lost" in square.record.properties) == (Status.PASS, told)


def test_a_miss_that_stays_is_infrastructure_and_never_red(project: Project) -> None:
    outcome = go(project, RefusingBackend(99), select=Selection(targets=["vllm-0.8.5"], scenarios=["cold_start"]))
    (square,) = outcome.matrix.squares
    assert (square.status, square.verdict, outcome.exit_code) == (Status.MISS, "unknown", 5)


def test_a_failed_build_costs_only_its_own_target(project: Project) -> None:
    def breaks(image: Image, log: Path, say: Callable[[str], None]) -> BuiltImage:
        if image.target == "vllm-0.8.5":
            raise BuildError("exit code 1", "see the log", log_tail="E: hash mismatch")
        return builds(image, log, say)

    outcome = go(project, ScriptedBackend(scripted.passes), breaks)
    statuses = {square.cell.target: square.status for square in outcome.matrix.squares}
    assert statuses == {"vllm-0.8.5": Status.MISS, "vllm-0.10.0": Status.PASS}
    assert outcome.exit_code == 4
    log = next(outcome.folder.glob("cells/vllm-0.8.5*/attempt-1/stderr.log"))
    assert log.read_text() == "E: hash mismatch"


def test_red_outranks_a_failed_build(project: Project) -> None:
    def breaks(image: Image, log: Path, say: Callable[[str], None]) -> BuiltImage:
        if image.target == "vllm-0.8.5":
            raise BuildError("exit code 1")
        return builds(image, log, say)

    assert go(project, ScriptedBackend(scripted.signal_9), breaks).exit_code == 1


def test_what_a_cell_left_besides_files_does_not_stop_a_reuse(project: Project) -> None:
    backend = ScriptedBackend(scripted.passes)
    first = go(project, backend)
    out = next(first.folder.glob("cells/*cold_start*/attempt-1/out"))
    os.mkfifo(out / "pipe")
    (out / "link").symlink_to("/nowhere")
    with (out / "huge").open("wb") as file:
        file.truncate(1 << 40)
    second = go(project, backend)
    copied = next(second.folder.glob(f"cells/{out.parents[1].name}/attempt-1/out"))
    assert {path.name for path in copied.iterdir()} >= {"events.jsonl", "link"}
    assert not {path.name for path in copied.iterdir()} & {"pipe", "huge"}
    assert [record.reused_from for record in records_of(second.folder).values()] == [first.folder.name] * 4


def test_reuse_takes_the_evidence_along_and_a_change_runs_again(project: Project) -> None:
    first = go(project, ScriptedBackend(scripted.passes))
    idle = ScriptedBackend(scripted.passes)
    second = go(project, idle)
    assert idle.launches == []
    assert second.exit_code == 0
    for record in records_of(second.folder).values():
        assert record.reused_from == first.matrix.run
    third = go(project, ScriptedBackend(scripted.passes))
    assert {r.reused_from for r in records_of(third.folder).values()} == {first.matrix.run}
    (project.suite / "test_multimodal_rollout.py").write_text("def test_b(): ...\n")
    changed = ScriptedBackend(scripted.passes)
    go(project, changed)
    assert {json.loads((x.folder / "in/cell.json").read_text())["scenario"] for x in changed.launches} == {
        "multimodal_rollout"
    }


def test_an_interrupt_leaves_records_and_not_run(project: Project) -> None:
    backend: Any = None

    def interrupts(launch: Launch, stopped: threading.Event) -> ExitState:
        return scripted.sleeps(launch, stopped)

    class Interrupting(ScriptedBackend):
        def start(self, launch: Launch) -> Any:
            running = super().start(launch)
            if len(self.launches) == 2:
                import _thread

                _thread.interrupt_main()
            return running

    def first_passes(launch: Launch, stopped: threading.Event) -> ExitState:
        return scripted.passes(launch, stopped) if len(backend.launches) == 1 else interrupts(launch, stopped)

    backend = Interrupting(first_passes)
    outcome = go(project, backend)
    states = [square.status for square in outcome.matrix.squares]
    assert outcome.exit_code == 130
    assert states.count("PASS") == 1
    assert states.count("NOTRUN") == 3
    assert backend.alive == 0
    assert json.loads((outcome.folder / "matrix.json").read_text())["green"] is False


def test_a_run_in_which_nothing_ran_is_not_green(project: Project) -> None:
    def breaks(image: Image, log: Path, say: Callable[[str], None]) -> BuiltImage:
        raise BuildError("exit code 1")

    outcome = go(project, ScriptedBackend(scripted.passes), breaks)
    assert not outcome.matrix.green
    assert outcome.exit_code == 4


def test_the_plan_is_on_disk_before_anything_runs(project: Project) -> None:
    seen: list[bool] = []

    def looks(launch: Launch, stopped: threading.Event) -> ExitState:
        seen.append((launch.folder.parent.parent.parent / "plan.json").is_file())
        return scripted.passes(launch, stopped)

    go(project, ScriptedBackend(looks))
    assert seen
    assert all(seen)
