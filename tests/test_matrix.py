"""When a Matrix is green, when what it says is too old, and how it groups what is red."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import pytest
from rich.console import Console

from harness.cells import Cell
from harness.matrix import Matrix, build_matrix
from harness.records import CheckRecord, Record
from harness.run import Outcome
from harness.status import Status, Verdict
from harness.views import terminal
from harness.views.causes import causes, tally
from harness.views.html import html, why_not_green
from harness.views.jsonview import to_json
from harness.views.markdown import markdown
from harness.views.material import Material
from harness.views.text import nth, square_text
from tests.browser import sample

CELLS = sample.cells()[:3]


def matrix(*checks: Sequence[CheckRecord] | None, elsewhere: int = 0, **changes: object) -> Matrix:
    """Of as many cells; None: the cell has no record."""
    cells = CELLS[: len(checks)]
    records = {of.id: record(of, some, **changes) for of, some in zip(cells, checks, strict=True) if some is not None}
    return build_matrix("r", cells, records, (), sample.NOW, sample.MAX_AGE, elsewhere=elsewhere)


def record(of: Cell, checks: Sequence[CheckRecord], **changes: object) -> Record:
    return sample.record(of, *checks, **changes)


def exit_code(found: Matrix) -> int:
    return Outcome(folder=Path("r"), matrix=found).exit_code


PASSED = (sample.passed("a"),)
NA = (sample.plain("<cell>", Status.NA, "sleep_mode: no (probed: x)"),)
MISS = (sample.plain("<cell>", Status.MISS, "lease: no"),)
FAILED = (sample.plain("a", Status.FAIL, "ids-differ"),)
OLD = sample.NOW - sample.MAX_AGE - timedelta(days=2)


@pytest.mark.parametrize(
    ("found", "code"),
    [
        (matrix(PASSED), 0),
        (matrix(PASSED, NA), 0),
        (matrix(), 5),
        (matrix(None), 5),
        (matrix(NA), 5),
        (matrix(NA, NA), 5),
        (matrix(MISS), 5),
        (matrix(PASSED, MISS), 5),
        (matrix(PASSED, None), 5),
        (matrix(PASSED, FAILED), 1),
        (matrix(FAILED, None), 1),
        (matrix(PASSED, started=OLD), 5),
        (matrix(FAILED, started=OLD), 1),
        (matrix(elsewhere=3), 5),
        (matrix(NA, elsewhere=3), 0),
    ],
    ids=lambda it: " ".join(map(square_text, it.squares)) or "nothing" if isinstance(it, Matrix) else None,
)
def test_only_what_was_asked_and_answered_as_expected_is_green(found: Matrix, code: int) -> None:
    assert (exit_code(found), found.green) == (code, code == 0)
    assert bool(why_not_green(found)) is not found.green


def test_what_is_too_old_says_how_old_and_no_longer_counts() -> None:
    square = matrix(PASSED, started=OLD).squares[0]
    assert (square.verdict, square_text(square)) == (Verdict.UNKNOWN, "? PASS 1/1 STALE 9 d")
    young = matrix(PASSED, started=sample.NOW - sample.MAX_AGE).squares[0]
    assert (young.verdict, square_text(young)) == (Verdict.OK, "✔ PASS 1/1")


def test_a_retry_that_recovered_shows_everywhere() -> None:
    found = matrix(PASSED, attempt=2)
    assert exit_code(found) == 0
    for text in views(found).values():
        assert "2nd attempt" in text or '"attempt": 2' in text
    assert [nth(n) for n in (1, 2, 3, 4, 11, 12, 13, 21, 102, 111)] == [
        "1st", "2nd", "3rd", "4th", "11th", "12th", "13th", "21st", "102nd", "111th",
    ]  # fmt: skip


def views(found: Matrix) -> dict[str, str]:
    console = Console(width=160, color_system=None)
    with console.capture() as capture:
        console.print(terminal.report(found))
    return {
        "terminal": capture.get(),
        "markdown": markdown(found),
        "html": html(found, Material(questions={}, excerpts={}), sample.NOW),
        "json": to_json(found),
    }


def test_what_is_red_is_grouped_by_fingerprint_in_every_view() -> None:
    shapes = [sample.raised(f"c{n}", "RuntimeError", f"shape '[{n}, 2]' is wrong") for n in range(4)]
    reasons = {"a": "signal: SIGSEGV", "b": "not-reached: signal: SIGSEGV"}
    died = [sample.plain(name, Status.CRASH, reason) for name, reason in reasons.items()]
    found = matrix(shapes[:2], (*shapes[2:], *died), NA)
    assert tally(causes(found.squares)) == "6 red checks in 2 cells, 2 causes"
    said = views(found)
    cells = json.loads(said.pop("json"))
    for text in said.values():
        assert "6 red checks in 2 cells, 2 causes" in text
    assert said["terminal"].count("is wrong") == said["markdown"].count("is wrong") == 1, "whatever its numbers"
    assert [len(cause["cells"]) for cause in cells["causes"]] == [2, 1, 1]
    assert [check["fingerprint"] for check in cells["cells"][1]["checks"][2:]] == ["signal: SIGSEGV"] * 2
    assert tally(causes(matrix(PASSED, NA).squares)) == ""
