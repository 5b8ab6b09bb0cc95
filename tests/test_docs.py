"""What is generated or told in the docs is current."""

from __future__ import annotations

import re

import pytest
from typer.testing import CliRunner

from harness.cli import app
from harness.schemas import FOLDER, schemas
from tests.conftest import ROOT


@pytest.mark.parametrize("name", schemas())
def test_schemas_are_current(name: str) -> None:
    committed = (ROOT / FOLDER / name).read_text(encoding="utf-8")
    assert committed == schemas()[name], "run: python -m harness.schemas"


def test_every_verb_is_in_the_readme() -> None:
    help_text = CliRunner().invoke(app, ["--help"], terminal_width=200).output
    verbs = re.findall(r"^│ ([a-z]+) ", help_text, flags=re.MULTILINE)
    assert "run" in verbs
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [verb for verb in verbs if f"vllm-matrix {verb}" not in readme] == []


def test_the_readme_holds_the_two_commands_that_ci_runs() -> None:
    lines = [line for line in (ROOT / "README.md").read_text().splitlines() if line.startswith("$(command -v sudo)")]
    assert [line.rpartition("&& ")[2] for line in lines] == [".venv/bin/tox run -e matrix", ".venv/bin/tox run"]


def test_the_docs_name_no_place_of_a_machine() -> None:
    for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "matrix.toml"]:
        assert not re.search(r"/(root|work|tmp)/\w", path.read_text(encoding="utf-8")), path


def test_the_docs_hold_every_promise_of_a_back_end() -> None:
    written = re.findall(r'^@promise\("(.+)"\)$|^LOST = "(.+)"$', _suite(), flags=re.MULTILINE)
    rows = re.findall(
        r"^\| ([^|]+) \|", (ROOT / "docs" / "backends.md").read_text(encoding="utf-8"), flags=re.MULTILINE
    )
    assert sorted(rows) == sorted({one or other for one, other in written})


def _suite() -> str:
    names = ("backend_contract", "containers", "without_containers")
    return "\n".join((ROOT / "tests" / f"test_{name}.py").read_text(encoding="utf-8") for name in names)
