"""What changed between two runs: kinds, order, marks, ranges of metrics, and the verb with its exit codes."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from harness.cli import app
from harness.diff import Diff, Kind, diff
from harness.errors import NothingSelectedError
from harness.expectations import Expectation, Match
from harness.judge import CELL
from harness.matrix import Matrix, build_matrix
from harness.outliers import LEAST, MOST, outliers
from harness.project import Project
from harness.records import (
    CheckRecord,
    MetricRecord,
    Record,
    Revision,
    _cleaned,
    attempt_folder,
    find_run,
    read_record,
    record_of,
    records_of,
    write_record,
)
from harness.status import Status
from harness.traits import differences, unlike
from harness.views import diff as view
from tests.nights import LAST, add_nights, make_project, plain_record, raised, with_check

PASS, NA, FAIL, CRASH = Status.PASS, Status.NA, Status.FAIL, Status.CRASH


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    return make_project(tmp_path_factory.mktemp("project"))


def matrix(project: Project, name: str, changes: Mapping[str, Record | None], absent: Sequence[str] = ()) -> Matrix:
    """Of plain records; `changes` by cell id take their place, None: there is none."""
    records = {cell.id: plain_record(cell) for cell in project.cells} | {**changes}
    known = {cell: record for cell, record in records.items() if record is not None}
    cells = [cell for cell in project.cells if cell.id not in absent]
    return build_matrix(name, cells, known, project.expectations, LAST + timedelta(days=90), timedelta(days=7))


def plain(project: Project, number: int = 2) -> Record:
    """Of vllm-0.2.0, where everything passes; 0 is of vllm-0.1.0, where `mixed` is known to fail."""
    return plain_record(project.cells[number])


def status(check: str, status: Status, reason: str | None = None) -> CheckRecord:
    return CheckRecord(id=check, status=status, reason=reason)


def between(project: Project, older: Record | None, newer: Record | None) -> Diff:
    cell = (older or newer or plain(project)).cell
    return diff(matrix(project, "a", {cell: older}), matrix(project, "b", {cell: newer}))


def told(found: Diff) -> list[tuple[Kind, str, str, str]]:
    return [(change.kind, change.check, change.before, change.after) for change in found.checks]


RED = raised("text", "RuntimeError", "no room for 17 blocks")
OTHER = raised("text", "ValueError", "no room for 17 blocks")
ALIKE = raised("text", "RuntimeError", "no room for 4096 blocks")
KNOWN = raised("mixed", "RuntimeError", "shape '[1]' is invalid for input of size 7")
UNKNOWN = raised("mixed", "RuntimeError", "another fault")


@pytest.mark.parametrize(
    ("number", "old", "new", "kind"),
    [
        (2, status("text", PASS), RED, Kind.FAILING),
        (2, status("text", NA), RED, Kind.FAILING),
        (2, status("text", CRASH, "signal: SIGSEGV"), RED, Kind.FAILING),  # a regression that got worse
        (2, RED, status("text", CRASH, "signal: SIGSEGV"), Kind.CAUSE),
        (2, RED, OTHER, Kind.CAUSE),
        (2, RED, ALIKE, None),
        (2, RED, status("text", PASS), Kind.FIXED),
        (2, RED, status("text", NA), Kind.STATUS),
        (2, status("text", PASS), status("text", NA), Kind.STATUS),
        (2, status("text", NA), status("text", PASS), Kind.STATUS),
        (2, status("text", PASS), status("text", PASS), None),
        (0, KNOWN, UNKNOWN, Kind.FAILING),  # as red as before, but for a cause that is not known
        (0, UNKNOWN, KNOWN, Kind.CAUSE),
        (0, status("mixed", PASS), KNOWN, Kind.STATUS),  # red, and known
        (0, KNOWN, status("mixed", PASS), Kind.FIXED),
        (0, KNOWN, KNOWN, None),
    ],
)
def test_what_became_of_a_check(
    project: Project, number: int, old: CheckRecord, new: CheckRecord, kind: Kind | None
) -> None:
    record = plain(project, number)
    found = between(project, with_check(record, old), with_check(record, new))
    assert told(found) == ([(kind, old.id, old.status, new.status)] if kind else [])
    assert found.exit_code == (1 if kind is Kind.FAILING else 0)
    assert found.compared == len(project.cells)


def test_a_new_check_that_fails_is_newly_failing_and_one_that_passes_is_nothing(project: Project) -> None:
    record = plain(project)
    more = record.model_copy(update={"checks": (*record.checks, status("more", PASS))})
    assert told(between(project, record, more)) == []
    assert told(between(project, more, record)) == [(Kind.STATUS, "more", PASS, "absent")]
    crash = with_check(more, status("more", CRASH, "signal: SIGSEGV"))
    assert told(between(project, record, crash)) == [(Kind.FAILING, "more", "absent", CRASH)]


def test_what_happened_outside_the_checks_is_fixed_when_it_is_gone(project: Project) -> None:
    record = plain(project)
    broken = with_check(
        record.model_copy(update={"checks": (status(CELL, PASS),)}), status(CELL, FAIL, "no-evidence: x")
    )
    assert told(between(project, broken, record)) == [(Kind.FIXED, CELL, FAIL, PASS)]
    assert (Kind.FAILING, CELL, "absent", FAIL) in told(between(project, record, broken))
    still = with_check(record, RED)
    assert [kind for kind, *_ in told(between(project, broken, still))] == [Kind.FAILING]


def test_a_cell_without_a_result_is_never_compared_and_never_silent(project: Project) -> None:
    record = plain(project)
    missed = record.model_copy(update={"checks": (status(CELL, Status.MISS),), "status": Status.MISS})
    for nothing, word in ((None, "NOTRUN"), (missed, "MISS")):
        found = between(project, record, nothing)
        assert told(found) == [(Kind.STATUS, "", PASS, word)]
        assert found.compared == len(project.cells) - 1
        assert told(between(project, nothing, with_check(record, RED))) == [(Kind.FAILING, "text", word, FAIL)]
        assert told(between(project, nothing, record)) == [(Kind.STATUS, "", word, PASS)]
    assert told(between(project, None, None)) == []


def test_nothing_compared_is_an_error(project: Project) -> None:
    nothing = matrix(project, "b", dict.fromkeys((cell.id for cell in project.cells), None))
    with pytest.raises(NothingSelectedError, match="no cell of which both a and b have a result"):
        diff(matrix(project, "a", {}), nothing)


def test_new_and_gone_cells_are_neither_failing_nor_fixed(project: Project) -> None:
    cell = project.cells[2].id
    red = with_check(plain(project), RED)
    some = matrix(project, "a", {}, absent=[cell])
    found = diff(some, matrix(project, "b", {cell: red}))
    assert ([square.cell.id for square in found.new], found.gone, found.checks) == ([cell], (), ())
    assert "new cell: vllm-0.2.0@cpu/s0[model=tiny]: FAIL regression" in " ".join(plainly(found))
    back = diff(matrix(project, "a", {cell: red}), some)
    assert ([square.cell.id for square in back.gone], back.new, back.checks) == ([cell], (), ())


def test_unequal_axes_are_compared_and_marked(project: Project) -> None:
    record = plain(project)
    other = with_check(record, RED).model_copy(update={"axes": {**record.axes, "python": "3.11.9", "driver": "580"}})
    found = between(project, record, other)
    assert [change.unlike for change in found.of(Kind.FAILING)] == [("python",)]
    assert found.unlike == {record.cell: ("python",)}
    assert found.exit_code == 1
    lines = plainly(found)
    assert "python 3.11.2 → 3.11.9: unequal axis, in 1 cell of vllm-0.2.0@cpu, not like with like" in lines[2]
    assert any("PASS → FAIL [not like with like: python]: RuntimeError" in line for line in lines)


def test_an_axis_that_only_one_of_them_tells_is_not_unequal(project: Project) -> None:
    record = plain(project)
    short = record.model_copy(update={"axes": {"device": "cpu/x86_64"}, "distributions": {}})
    assert unlike(record, short) == unlike(short, record) == ()
    assert differences([(record, short)]) == ()


def test_what_else_differs_stands_once_with_its_cells_and_axes_first(project: Project) -> None:
    a, b = plain(project, 2), plain(project, 4)
    later: dict[str, object] = {
        "revision": Revision(version="0.1.0", commit="c" * 40, dirty=True),
        "host": a.host.model_copy(update={"cpus": 4, "engine": "docker 27"}),
    }
    images = [one.image.model_copy(update={"lock_sha256": "ab" * 32}) for one in (a, b) if one.image]
    one = a.model_copy(update={**later, "image": images[0], "axes": {**a.axes, "engine": "V0"}})
    packages = {**b.distributions, "torch": "2.7.0", "ray": "2.0"}
    two = b.model_copy(update={**later, "image": images[1], "distributions": packages})
    found = differences([(a, one), (b, two)])
    assert [(each.name, each.axis, each.rows) for each in found[:1]] == [("engine", True, ("vllm-0.2.0@cpu",))]
    known = {each.name: (each.before, each.after, len(each.cells)) for each in found[1:]}
    assert known["host"] == ("x86_64, 2 CPUs, 24.0 GiB, docker 20.10.24", "x86_64, 4 CPUs, 24.0 GiB, docker 27", 2)
    assert known["harness"] == ("0.1.0 51b33808081e", "0.1.0 cccccccccccc changed", 2)
    assert (known["torch"], known["ray"]) == (("2.6.0", "2.7.0", 1), ("", "2.0", 1))
    assert known["lock"] == ("fd" * 32, "ab" * 32, 2)
    assert set(known) == {"host", "harness", "lock", "torch", "ray"}


def test_properties_that_changed_and_those_of_one_run_only(project: Project) -> None:
    record = plain(project)
    properties = dict(record.properties)
    other = {**properties, "engine.attention": "FLASH", "more": None, "gpu.uuids": "GPU-1"}
    del other["cap.sleep"]
    newer = record.model_copy(update={"properties": other})
    found = {change.name: (change.before, change.after) for change in between(project, record, newer).properties}
    assert found == {
        "engine.attention": (("TORCH_SDPA",), ("FLASH",)),
        "cap.sleep": ((True,), ()),
        "more": ((), (None,)),
    }
    broke_off = with_check(newer, RED)  # says less, or more, for another reason
    assert [change.name for change in between(project, record, broke_off).properties] == ["engine.attention"]


# --- ranges of metrics ---


def night(project: Project, number: int, **values: float) -> Record:
    metrics = tuple(MetricRecord(name=name, value=value, unit="MiB") for name, value in values.items())
    return plain(project).model_copy(update={"metrics": metrics, "started": LAST - timedelta(days=number)})


def test_a_metric_outside_of_five_earlier_records(project: Project) -> None:
    earlier = [night(project, number, rss=100.0 + number, shm=4.0) for number in range(1, 6)]
    found = outliers(night(project, 0, rss=107.0, shm=4.0), earlier)
    assert [(one.name, one.value, one.low, one.high, one.records) for one in found] == [("rss", 107.0, 101.0, 105.0, 5)]
    assert found[0].beyond == 0.5
    assert outliers(night(project, 0, rss=105.0, shm=4.0), earlier) == ()
    assert outliers(night(project, 0, shm=4.1), earlier)[0].beyond == float("inf")
    assert outliers(night(project, 0, rss=107.0), earlier[: LEAST - 1]) == ()


def test_what_chance_does_is_counted_only(project: Project) -> None:
    far, near = (
        outliers(night(project, 0, rss=value), [night(project, number, rss=100.0 + number) for number in range(1, 8)])
        for value in (110.0, 109.9)
    )
    assert (far[0].far, near[0].far) == (True, False)
    sides = matrix(project, "a", {}), matrix(project, "b", {})
    found = diff(*sides, [*near, *far])
    assert view.summary(found) == "6 cells compared: 1 metric out of range"
    lines = plainly(found)[2:]
    assert [line.rpartition("; ")[0] for line in lines[:1]] == ["metric out of range: rss: 110 MiB"]
    assert lines[1].startswith("metric out of range: 1 more by less than half of the range's width")
    assert [one["value"] for one in view.document(found)["metrics"]] == [110.0, 109.9]


def test_only_equal_axes_count_and_what_was_taken_over_counts_once(project: Project) -> None:
    now = night(project, 0, rss=107.0)
    earlier = [night(project, number, rss=100.0) for number in range(1, 6)]
    assert outliers(now, [earlier[0]] * 5) == ()
    other = earlier[0].model_copy(update={"axes": {**now.axes, "python": "3.12.1"}})
    assert outliers(now, [other, *earlier[1:]]) == ()
    missed = earlier[0].model_copy(update={"status": Status.MISS})
    assert outliers(now, [missed, *earlier[1:]]) == ()
    later = night(project, -1, rss=107.0)
    assert len(outliers(now, [now, later, *earlier])) == 1  # neither itself nor what came after it


def test_no_more_is_read_than_can_change_anything(project: Project) -> None:
    endless = (night(project, number, rss=100.0) for number in itertools.count(1))
    assert outliers(night(project, 0, rss=100.0), endless) == ()
    assert next(endless).started == LAST - timedelta(days=2)
    assert outliers(night(project, 0, rss=101.0), endless)[0].records == MOST


# --- the views and the verb ---


def plainly(found: Diff) -> list[str]:
    """A line each, with its section's title before it; the first two are the head."""
    lines = [f"{section.title}: {line.text}" for section in view.sections(found) for line in section.lines]
    return [found.older, view.summary(found), *lines]


def test_equal_changes_stand_once_in_order_and_long_lists_are_cut(project: Project) -> None:
    cells = {cell.id: with_check(plain_record(cell), RED) for cell in project.cells}
    found = diff(matrix(project, "a", {}), matrix(project, "b", cells))
    (section,) = view.sections(found)
    (line,) = section.lines
    assert line.text == "PASS → FAIL: RuntimeError: no room for 17 blocks"
    assert line.cells == tuple(f"{cell}: text" for cell in cells)
    assert view.summary(found) == "6 cells compared: 6 newly failing"


def test_hostile_words_break_no_line_of_markdown(project: Project) -> None:
    record = plain(project)
    bad = raised("text", "RuntimeError", "a\x1b[31m | <b> `c`")
    text = view.markdown(between(project, record, with_check(record, bad)))
    assert "\x1b" not in text and "<b>" not in text and "`c`" not in text


def invoke(project: Project, *arguments: str) -> Result:
    return CliRunner().invoke(app, [*arguments, "--config", str(project.root / "matrix.toml")])


@pytest.fixture(scope="module")
def told_nights(tmp_path_factory: pytest.TempPathFactory) -> tuple[Project, tuple[str, ...]]:
    """Eight nights; in the last one a check of 0.3.0 fails, and a metric of 0.2.0 is out of its range."""
    project = make_project(tmp_path_factory.mktemp("told"))

    def story(record: Record, number: int) -> Record:
        if number < 7:
            return record
        if record.cell == "vllm-0.3.0@cpu/s0[model=tiny]":
            return with_check(record, RED)
        high = tuple(metric.model_copy(update={"value": 5000.0}) for metric in record.metrics[:1])
        return record.model_copy(update={"metrics": high}) if record.target == "vllm-0.2.0" else record

    return project, add_nights(project, 8, story)


def test_the_verb_and_its_exit_codes(told_nights: tuple[Project, tuple[str, ...]]) -> None:
    project, nights = told_nights
    quiet = invoke(project, "diff", *nights[5:7])
    assert quiet.exit_code == 0, quiet.output
    loud = invoke(project, "diff", *nights[6:])
    assert loud.exit_code == 1
    assert "6 cells compared: 1 newly failing" in loud.output
    assert "vllm-0.3.0@cpu/s0[model=tiny]: text" in loud.output
    markdown = invoke(project, "diff", *nights[6:], "--markdown")
    assert markdown.exit_code == 1 and markdown.output.startswith(f"# {nights[6]} → {nights[7]}\n")
    document = json.loads(invoke(project, "diff", *nights[6:], "--json").output)
    assert [(check["kind"], check["cell"], check["check"]) for check in document["checks"]] == [
        ("newly failing", "vllm-0.3.0@cpu/s0[model=tiny]", "text")
    ]
    far = [one for one in document["metrics"] if one["value"] == 5000.0]
    assert [(one["cell"], one["check"], one["name"], one["records"]) for one in far] == [
        (f"vllm-0.2.0@cpu/{scenario}[model=tiny]", "loads", "rss.awake", 7) for scenario in ("s0", "s1")
    ]
    assert json.loads(invoke(project, "diff", *nights[:2], "--json").output)["metrics"] == []  # too few before


def test_wrong_words_are_one_error(told_nights: tuple[Project, tuple[str, ...]]) -> None:
    project, nights = told_nights
    assert invoke(project, "diff", nights[0], "none").exception.exit_code == 3  # type: ignore[union-attr]
    both = invoke(project, "diff", *nights[:2], "--json", "--markdown")
    assert both.exception.exit_code == 2  # type: ignore[union-attr]


# --- reading records ---


def test_a_run_is_found_by_name_or_folder(told_nights: tuple[Project, tuple[str, ...]]) -> None:
    project, nights = told_nights
    folder = project.results / "runs" / nights[0]
    assert find_run(project.results, nights[0]) == find_run(project.results, str(folder)) == folder
    assert find_run(project.results, None).name == nights[-1]


@pytest.mark.parametrize(
    "text", ["plain", "a\\nb", "\\u001b[31mred", "\\u202eright", "\\b\\f\\r", "…", "\x7f", "\u009b1m"]
)
def test_reading_fast_and_reading_with_care_come_to_the_same(project: Project, tmp_path: Path, text: str) -> None:
    record = plain(project)
    path = tmp_path / "record.json"
    whole = record.model_dump_json(by_alias=True, indent=1).replace('"TORCH_SDPA"', f'"{text}"')
    path.write_text(whole, encoding="utf-8")
    assert read_record(path) == Record.model_validate(_cleaned(json.loads(whole)))


def test_the_last_attempt_counts_and_a_damaged_one_is_none(project: Project, tmp_path: Path) -> None:
    record = plain(project)
    for number in (2, 10):
        write_record(attempt_folder(tmp_path, "r", record.cell, number), record.model_copy(update={"attempt": number}))
    run = tmp_path / "runs" / "r"
    (run / "cells" / "stranger").mkdir()
    (run / "cells" / "file").write_text("")
    found = record_of(run, record.cell)
    assert found is not None and found.attempt == 10
    (attempt_folder(tmp_path, "r", record.cell, 10) / "record.json").write_text("{")
    assert {name: one.attempt for name, one in records_of(run).items()} == {record.cell: 2}
    assert record_of(run, "other") is None


def test_flaky_and_expected_are_no_regressions(project: Project) -> None:
    """A status that an entry lists beside its typical one is not newly failing."""
    entry = Expectation(
        scenario="*",
        check="text",
        status=(PASS, FAIL),
        match=Match(type="RuntimeError"),
        reason="fails now and then",
        link="https://example.invalid/2",
    )
    record = plain(project)
    sides = (
        build_matrix("x", project.cells, {record.cell: one}, [entry], LAST, timedelta(days=7))
        for one in (record, with_check(record, RED))
    )
    assert told(diff(*sides)) == [(Kind.STATUS, "text", PASS, FAIL)]
