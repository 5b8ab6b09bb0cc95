"""One cell over all runs: what it came to, between which two it turned, and that nothing else is read for it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

import harness.records
from harness.project import Project
from harness.records import Record, records_of_cell, runs_of, write_record
from harness.status import Status
from harness.timeline import moments, turns
from tests.nights import add_nights, make_project, raised, with_check
from tests.test_diff import invoke

CELL = "vllm-0.2.0@cpu/s0[model=tiny]"
RED = raised("text", "RuntimeError", "no room for 17 blocks")


@dataclass(frozen=True)
class Nights:
    project: Project
    names: tuple[str, ...]


@pytest.fixture(scope="module")
def nights(tmp_path_factory: pytest.TempPathFactory) -> Nights:
    """Seven nights: 3 a MISS, from 4 on another torch and a red check, in 6 for another cause."""
    project = make_project(tmp_path_factory.mktemp("project"))

    def story(record: Record, night: int) -> Record:
        if record.cell != CELL or night < 3:
            return record
        if night == 3:
            check = record.checks[0].model_copy(update={"id": "<cell>", "status": Status.MISS})
            return record.model_copy(update={"checks": (check,), "status": Status.MISS})
        later = record.model_copy(update={"distributions": {**record.distributions, "torch": "2.7.0"}})
        return with_check(later, RED if night < 6 else raised("text", "ValueError", "x"))

    return Nights(project, add_nights(project, 7, story))


def read(nights: Nights) -> tuple[tuple[str, Record], ...]:
    return tuple(records_of_cell(runs_of(nights.project.results), CELL))


def test_the_newest_stands_first_and_is_judged(nights: Nights) -> None:
    found = moments(read(nights), nights.project.expectations)
    assert [moment.run for moment in found] == list(reversed(nights.names))
    assert [moment.record.status for moment in found] == ["FAIL", "FAIL", "FAIL", "MISS", "PASS", "PASS", "PASS"]
    assert [moment.verdict for moment in found][1:5] == ["regression", "regression", "unknown", "ok"]
    assert found[1].causes == found[2].causes != found[0].causes


def test_it_turned_where_status_or_cause_changed_and_a_miss_is_passed_over(nights: Nights) -> None:
    found = turns(moments(read(nights), nights.project.expectations))
    assert [(turn.before.run, turn.after.run, turn.what) for turn in found] == [
        (nights.names[5], nights.names[6], ("cause",)),
        (nights.names[2], nights.names[4], ("status", "verdict", "cause")),
    ]
    assert [(each.name, each.before, each.after) for each in found[1].differences] == [("torch", "2.6.0", "2.7.0")]
    assert found[0].differences == () and found[0].unlike == ()


def test_what_was_taken_over_is_no_turn_of_its_own(nights: Nights, tmp_path: Path) -> None:
    (_, newest), *_, (run, oldest) = read(nights)
    taken = oldest.model_copy(update={"run": "zzz", "reused_from": run})
    found = moments([("zzz", taken), ("new", newest), (run, oldest)], nights.project.expectations)
    assert [moment.reused for moment in found] == [True, False, False]
    assert [(turn.before.run, turn.after.run) for turn in turns(found)] == [(run, "new")]
    only = moments([("zzz", taken), ("new", newest)], nights.project.expectations)  # the run it is of was removed
    assert [(turn.before.run, turn.after.run) for turn in turns(only)] == [("zzz", "new")]


def test_nothing_of_other_cells_is_read(nights: Nights, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Path] = []
    real = harness.records.read_untrusted

    def spy(path: Path, limit: int) -> bytes | None:
        opened.append(path)
        return real(path, limit)

    monkeypatch.setattr("harness.records.read_untrusted", spy)
    read(nights)
    assert len(opened) == 7
    assert {path.parent.parent.name for path in opened} == {"vllm-0.2.0--cpu__s0..model-_tiny"}


def test_history_says_a_line_a_run(nights: Nights) -> None:
    said = invoke(nights.project, "history", "*0.2.0*s0*")
    assert said.exit_code == 0, said.output
    lines = said.output.splitlines()
    assert lines[0].split()[:5] == ["when", "age", "run", "status", "verdict"]
    assert all(f" {name} " in line for name, line in zip(reversed(nights.names), lines[1:], strict=True))
    assert "2026-11-30 02:00Z" in lines[1] and "FAIL" in lines[1] and "9/10" in lines[1] and "ValueError: x" in lines[1]
    document = json.loads(invoke(nights.project, "history", CELL, "--json").output)
    assert [run["torch"] for run in document["runs"]] == ["2.7.0"] * 3 + ["2.6.0"] * 4


def test_find_says_between_which_two(nights: Nights) -> None:
    said = invoke(nights.project, "find", CELL)
    assert said.exit_code == 0, said.output
    lines = said.output.splitlines()
    assert lines[0] == f"turned between {nights.names[5]} and {nights.names[6]}, 24 h 00 min later:"
    assert lines[3] == "  nothing else that was recorded differs"
    assert lines[5:] == [
        "  before  PASS 10/10 ok",
        "  after   FAIL 9/10 regression: RuntimeError: no room for 17 blocks",
        "  differs torch 2.6.0 → 2.7.0",
    ]
    document = json.loads(invoke(nights.project, "find", CELL, "--json").output)
    assert [turn["what"] for turn in document["turns"]] == [["cause"], ["status", "verdict", "cause"]]
    steady = invoke(nights.project, "find", "vllm-0.3.0*s1*")
    assert steady.output == (
        "vllm-0.3.0@cpu/s1[model=tiny] has not turned in all of its 7 runs since 2026-11-24: PASS 10/10 ok\n"
    )


def test_a_cell_that_left_the_matrix_is_meant_by_its_id(nights: Nights) -> None:
    cell = "vllm-0.0.1@cpu/s9"
    record = read(nights)[0][1].model_copy(update={"cell": cell})
    folder = nights.project.results / "runs" / nights.names[0] / "cells" / "vllm-0.0.1--cpu__s9" / "attempt-1"
    write_record(folder, record)
    assert len(json.loads(invoke(nights.project, "history", cell, "--json").output)["runs"]) == 1


@pytest.mark.parametrize(
    ("pattern", "said"), [("vllm-0.2*", "matches several cells"), ("nothing", "matches no cell"), ("../..", "no cell")]
)
def test_a_pattern_that_means_no_one_cell_is_an_error(nights: Nights, pattern: str, said: str) -> None:
    error = invoke(nights.project, "find", pattern).exception
    assert getattr(error, "exit_code", None) == 3 and said in str(error)
