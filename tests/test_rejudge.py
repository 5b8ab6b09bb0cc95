"""Records judged again: the same from the same evidence, by the rules of today, untouched where it is gone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from harness import rejudge as again
from harness.cells import Selection
from harness.cli import app
from harness.judge import judge
from harness.project import Project
from harness.records import Record, attempt_folder, records_of, write_record
from harness.rejudge import rejudge
from harness.run import Outcome
from harness.status import Status
from tests import scripted, test_run
from tests.scripted import RefusingBackend, ScriptedBackend
from tests.test_run import go, scripts

project = test_run.project

ROLLOUT = "vllm-0.8.5@cpu/multimodal_rollout[model=qwen2_vl]"


def ran(project: Project, **by_scenario: Any) -> Outcome:
    return go(project, ScriptedBackend(scripts(**by_scenario)), select=Selection(targets=["vllm-0.8.5"]))


def folder_of(project: Project, outcome: Outcome) -> Path:
    return attempt_folder(project.results, outcome.folder.name, ROLLOUT, 1)


def called(project: Project, *arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, [*arguments, "--config", str(project.root / "matrix.toml")])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.output


@pytest.mark.parametrize("script", [scripted.passes, scripted.silent, scripted.signal_9, scripted.forged])
def test_the_same_evidence_is_judged_the_same(project: Project, script: scripted.Script) -> None:
    outcome = ran(project, multimodal_rollout=script)
    found = rejudge(outcome.folder)
    assert [(one.new, one.kept) for one in found] == [(one.old, "") for one in found]
    assert len(found) == 2


def test_what_was_missed_or_never_started_is_judged_the_same(project: Project) -> None:
    outcome = go(project, RefusingBackend(1), select=Selection(targets=["vllm-0.8.5"]))
    found = rejudge(outcome.folder)
    assert [one.old.status for one in found].count(Status.MISS) == 1
    assert all(one.new == one.old and not one.kept for one in found)


def test_an_unmet_need_is_judged_the_same(project: Project) -> None:
    outcome = ran(project)
    record = records_of(outcome.folder)[ROLLOUT]
    state = {"started": False}
    absent = record.model_dump(by_alias=True) | {"status": "NA", "reason": "sleep_mode: no", "exit": state, "axes": {}}
    absent |= {"checks": [{"id": "<cell>", "status": "NA", "reason": "sleep_mode: no"}], "evidence_faults": []}
    write_record(folder_of(project, outcome), Record.model_validate(absent))
    found = {one.old.cell: one for one in rejudge(outcome.folder)}[ROLLOUT]
    assert (found.new, found.kept) == (found.old, "")


def test_the_rules_of_today_count_and_nothing_else_changes(project: Project) -> None:
    outcome = ran(project)
    folder = folder_of(project, outcome)
    record = records_of(outcome.folder)[ROLLOUT]
    wrong = record.checks[0].model_copy(update={"status": Status.ERROR, "reason": "as it was judged then"})
    write_record(folder, record.model_copy(update={"status": Status.ERROR, "checks": (wrong,)}))
    before = {path: path.read_bytes() for path in outcome.folder.rglob("*") if path.is_file()}

    code, said = called(project, "judge", outcome.folder.name)
    assert code == 0, "what is seen today is green"
    assert f"{ROLLOUT}: a: status ERROR → PASS; reason as it was judged then → none" in said
    assert "2 records judged again, 1 changed, none written" in said
    assert {path: path.read_bytes() for path in before} == before

    assert called(project, "judge", outcome.folder.name, "--write")[0] == 0
    assert records_of(outcome.folder)[ROLLOUT] == record.model_copy(update={"checks": record.checks})
    assert json.loads((outcome.folder / "matrix.json").read_text())["green"] is True


def without_events(out: Path) -> None:
    (out / "events.jsonl").unlink()


def without_end(out: Path) -> None:
    lines = (out / "events.jsonl").read_bytes().splitlines(keepends=True)
    (out / "events.jsonl").write_bytes(b"".join(line for line in lines if b'"end"' not in line))


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (without_events, "its events are gone"),
        (without_end, "some of its events are gone"),
        (lambda out: (out / "DONE").unlink(), "its DONE is gone"),
        (shutil.rmtree, "what its cell left is gone"),
    ],
)
def test_where_the_evidence_is_gone_the_record_stands(project: Project, spoil: Any, why: str) -> None:
    outcome = ran(project)
    spoil(folder_of(project, outcome) / "out")
    found = {one.old.cell: one for one in rejudge(outcome.folder)}[ROLLOUT]
    assert (found.new, found.kept) == (found.old, why)
    assert f"{ROLLOUT}, attempt 1: stays PASS: {why}" in called(project, "judge", outcome.folder.name)[1]


def test_only_the_last_attempt_decides_but_all_are_judged(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = go(project, RefusingBackend(1), select=Selection(targets=["vllm-0.8.5"]))
    seen = []
    monkeypatch.setattr(again, "judge", lambda evidence: (seen.append(evidence), judge(evidence))[1])
    assert called(project, "judge")[0] == outcome.exit_code == 0
    assert len(seen) == 3


EXPECTED = """schema = 1
[[expect]]
scenario = "multimodal_rollout*"
check = "*"
status = ["CRASH"]
match = { reason = "signal: SIGKILL" }
reason = "it was killed by hand"
expires = 2100-01-01
"""


def test_the_expectations_of_today_count(project: Project) -> None:
    outcome = ran(project, multimodal_rollout=scripted.signal_9)
    assert outcome.exit_code == 1
    (project.root / "expectations.toml").write_text(EXPECTED)
    code, said = called(project, "judge", outcome.folder.name)
    assert code == 0
    assert f"{ROLLOUT}: a: verdict regression → expected" in said
    assert f"{ROLLOUT}: b: verdict regression → expected" in said
    assert "2 cells: 1 ok, 1 expected; 3 red checks in 1 cell, 1 cause" in said


# --- expect ---


def test_expect_shows_checks_and_writes(project: Project) -> None:
    outcome = ran(project, multimodal_rollout=scripted.signal_9)
    path = project.root / "expectations.toml"
    path.write_text("# Ours.\nschema = 1\n")
    code, said = called(project, "expect", "--from", outcome.folder.name)
    assert (code, path.read_text()) == (0, "# Ours.\nschema = 1\n")
    assert '+match = { reason = "signal: SIGKILL" }' in said
    assert said.endswith("2 cells seen: 0 entries as they were, 1 new\n")
    assert called(project, "expect", "--check")[0] == 1
    elsewhere = path.rename(project.root / "ours.toml")
    path.symlink_to(elsewhere)
    code, said = called(project, "expect", "--write", "--from", outcome.folder.name)
    assert (code, path.is_symlink()) == (0, True)
    assert said.endswith("expectations.toml: written\n")
    assert path.read_text().startswith("# Ours.\nschema = 1\n\n[[expect]]\n")
    assert called(project, "judge")[0] == 0
    assert called(project, "expect", "--check") == (0, "2 cells seen: 1 entry as they were, 0 new\n")


def test_of_several_runs_the_newest_record_counts(project: Project) -> None:
    first = ran(project, multimodal_rollout=scripted.signal_9).folder.name
    second = go(
        project, ScriptedBackend(scripted.passes), select=Selection(targets=["vllm-0.8.5"]), fresh=True
    ).folder.name
    line = 'check = "*"\nwhen = { vllm = "==0.8.5" }'
    (project.root / "expectations.toml").write_text(EXPECTED.replace('check = "*"', line))
    for order in ((first, second), (second, first)):
        code, said = called(project, "expect", "--check", "--from", *order)
        assert code == 1
        assert f"multimodal_rollout* / * is narrowed: a of {ROLLOUT} passes" in said
        assert '-scenario = "multimodal_rollout*"\n+scenario = "multimodal_rollout[model=qwen2_5_vl]"\n' in said
