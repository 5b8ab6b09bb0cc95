"""`run --resume`: the rest of an interrupted run, in its own folder, and only if it still is what was planned."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
from filelock import FileLock

from harness.backends.base import Launch
from harness.cells import Selection
from harness.errors import ConfigurationError
from harness.project import Project, build_options, make_plan
from harness.records import ExitState, records_of
from harness.resume import Rest, rest_of
from harness.run import Outcome
from harness.status import Status
from tests import scripted
from tests.scripted import RefusingBackend, ScriptedBackend
from tests.test_run import go, project  # noqa: F401 - a fixture


def interrupted(project: Project) -> Outcome:  # noqa: F811
    """A run of which only the first cell was done."""
    import _thread

    def second_interrupts(launch: Launch, stopped: threading.Event) -> ExitState:
        if len(backend.launches) == 1:
            return scripted.passes(launch, stopped)
        _thread.interrupt_main()
        return scripted.sleeps(launch, stopped)

    backend = ScriptedBackend(second_interrupts)
    outcome = go(project, backend)
    assert outcome.exit_code == 130
    assert len(records_of(outcome.folder)) == 1
    return outcome


def evidence(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.glob("cells/*/attempt-*/record.json")}


def test_the_rest_runs_in_the_same_folder_and_what_is_done_is_kept(project: Project) -> None:  # noqa: F811
    first = interrupted(project)
    before, plan = evidence(first.folder), (first.folder / "plan.json").read_bytes()
    backend = ScriptedBackend(scripted.passes)
    second = go(project, backend, resumed=first.folder)
    assert (second.exit_code, second.folder) == (0, first.folder)
    assert len(backend.launches) == 3
    assert {square.status for square in second.matrix.squares} == {Status.PASS}
    after = evidence(first.folder)
    assert len(after) == 4
    assert before.items() <= after.items()
    assert (first.folder / "plan.json").read_bytes() == plan
    assert {record.run for record in records_of(first.folder).values()} == {first.matrix.run}


def rest(project: Project, outcome: Outcome) -> Rest:  # noqa: F811
    return rest_of(project, outcome.folder, build_options(project), "docker")


def test_what_was_cut_short_keeps_its_folder(project: Project) -> None:  # noqa: F811
    first = interrupted(project)
    cut = [
        path.parent for path in first.folder.glob("cells/*/attempt-1/in") if not (path.parent / "record.json").exists()
    ]
    second = go(project, ScriptedBackend(scripted.passes), resumed=first.folder)
    assert cut
    for folder in cut:
        assert (folder / "out" / "events.jsonl").is_file()
        assert (folder.with_name("attempt-2") / "record.json").is_file()
    assert second.exit_code == 0


def test_the_reference_is_the_one_that_the_run_has(project: Project) -> None:  # noqa: F811
    backend = ScriptedBackend(scripted.passes)
    go(project, backend, resumed=interrupted(project).folder)
    handed = [launch for launch in backend.launches if "multimodal" in launch.labels["vllm-matrix.cell"]]
    assert handed
    assert all((launch.folder / "in" / "reference.json").exists() for launch in handed)


def test_a_miss_is_run_again_with_all_its_retries(project: Project) -> None:  # noqa: F811
    one = Selection(targets=["vllm-0.8.5"], scenarios=["cold_start"])
    first = go(project, RefusingBackend(99), select=one)
    assert {square.status for square in first.matrix.squares} == {Status.MISS}
    second = go(project, RefusingBackend(1), resumed=first.folder)
    (square,) = second.matrix.squares
    assert square.record is not None
    assert (square.status, square.record.attempt) == (Status.PASS, 4)


def test_nothing_left_is_no_error(project: Project) -> None:  # noqa: F811
    first = go(project, ScriptedBackend(scripted.passes))
    idle = ScriptedBackend(scripted.passes)
    assert go(project, idle, resumed=first.folder).exit_code == 0
    assert idle.launches == []
    assert str(rest(project, first)).endswith("4 cells keep their record; left to run: nothing")


def test_a_change_refuses_and_says_what_changed(project: Project) -> None:  # noqa: F811
    first = interrupted(project)
    (project.suite / "test_multimodal_rollout.py").write_text("def test_b(): ...\n")
    with pytest.raises(ConfigurationError, match=r"multimodal_rollout\[model=qwen2_vl\]: suite\n") as caught:
        rest(project, first)
    assert caught.value.exit_code == 2
    assert "start a new run" in str(caught.value)
    with pytest.raises(ConfigurationError, match="backend"):
        rest_of(project, first.folder, build_options(project), "local")


def test_a_change_of_what_is_done_does_not_matter(project: Project) -> None:  # noqa: F811
    first = go(project, ScriptedBackend(scripted.passes))
    (project.suite / "test_multimodal_rollout.py").write_text("def test_b(): ...\n")
    assert rest(project, first).plan == ()


def test_a_run_that_still_goes_on_is_left_alone(project: Project) -> None:  # noqa: F811
    first = interrupted(project)
    with FileLock(first.folder / ".lock"), pytest.raises(ConfigurationError, match="still going on"):
        go(project, ScriptedBackend(scripted.passes), resumed=first.folder)


def test_a_run_of_another_project_is_refused(project: Project, tmp_path: Path) -> None:  # noqa: F811
    first = interrupted(project)
    moved = first.folder.rename(tmp_path / "elsewhere")
    with pytest.raises(ConfigurationError, match="is no run of"):
        rest_of(project, moved, build_options(project), "docker")


def test_a_record_of_one_back_end_is_never_reused_for_another(project: Project) -> None:  # noqa: F811
    go(project, ScriptedBackend(scripted.passes))
    options = build_options(project)
    same = make_plan(project, Selection(), None, False, options, "docker")
    other = make_plan(project, Selection(), None, False, options, "local")
    assert {planned.action for planned in same} == {"reuse"}
    assert {planned.action for planned in other} == {"run"}
    assert (
        json.loads((project.results / "runs").glob("*/plan.json").__next__().read_text())["cells"][0]["facts"][
            "backend"
        ]
        == "docker"
    )
