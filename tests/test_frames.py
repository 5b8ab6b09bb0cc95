"""`harness.load`, and the examples of docs/compare.md: they are run, and print what stands there."""

from __future__ import annotations

import doctest
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from typer.testing import CliRunner

import harness
from harness.cli import app
from harness.errors import ConfigurationError, NothingSelectedError
from harness.project import Project
from harness.records import Record
from tests.conftest import ROOT
from tests.nights import add_nights, make_project, raised, with_check

DOC = ROOT / "docs" / "compare.md"
CELL = "vllm-0.3.0@cpu/s0[model=tiny]"


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """Eight nights. In the last one another torch came in 0.3.0; there a check fails, and a property is another one."""
    project = make_project(tmp_path_factory.mktemp("project"))

    def story(record: Record, night: int) -> Record:
        if night < 7 or record.cell != CELL:
            return record
        properties = {**record.properties, "engine.attention": "FLASH_ATTN"}
        distributions = {**record.distributions, "torch": "2.7.0"}
        changed = record.model_copy(update={"properties": properties, "distributions": distributions})
        return with_check(changed, raised("text", "RuntimeError", "no room for 17 blocks"))

    add_nights(project, 8, story)
    return project


@pytest.fixture
def inside(project: Project, monkeypatch: pytest.MonkeyPatch) -> Project:
    monkeypatch.chdir(project.root)
    return project


def text() -> str:
    return DOC.read_text(encoding="utf-8")


def blocks(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```$", text(), flags=re.MULTILINE | re.DOTALL)


def test_the_examples_in_python_print_what_stands_there(inside: Project) -> None:
    source = "\n".join(blocks("pycon"))
    example = doctest.DocTestParser().get_doctest(source, {}, DOC.name, str(DOC), 0)
    said: list[str] = []
    with pd.option_context("display.width", 120, "display.max_columns", 20):
        result = doctest.DocTestRunner(optionflags=FLAGS).run(example, out=said.append)
    assert result.attempted >= 10
    assert not result.failed, "".join(said)


FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def test_the_commands_print_what_stands_there(inside: Project) -> None:
    wrong = [difference for block in blocks("console") for difference in _differences(block)]
    assert blocks("console") and not wrong, "\n".join(wrong)


def _differences(block: str) -> list[str]:
    wrong = []
    for command, expected in re.findall(r"^\$ vllm-matrix (.+)\n((?:(?!\$ ).*\n)*)", block, flags=re.MULTILINE):
        said = CliRunner().invoke(app, shlex.split(command)).output
        if not expected or not doctest.OutputChecker().check_output(expected, said, FLAGS):
            wrong.append(f"$ vllm-matrix {command}\n{said}")
    return wrong


def test_every_column_stands_in_the_docs_with_its_type(inside: Project) -> None:
    frames = harness.load()
    found = {name: dict(getattr(frames, name).dtypes.astype(str)) for name in NAMES}
    tables = re.findall(r"^`(\w+)`, a row .*?\n\n((?:\|.*\n)+)", text(), flags=re.MULTILINE)
    written = {name: dict(re.findall(r"^\| `(\w+)` \| ([^|]+?) \|", rows, flags=re.MULTILINE)) for name, rows in tables}
    assert written == found


NAMES = ("records", "checks", "metrics", "properties")


def test_a_row_for_all_there_is(inside: Project) -> None:
    frames = harness.load("20261130T020000Z-0007")
    assert [len(getattr(frames, name)) for name in NAMES] == [6, 60, 120, 6 * 40]
    row = frames.records.set_index("cell").loc[CELL]
    assert (row.status, row.verdict, row.passed, row.checks) == ("FAIL", "regression", 9, 10)
    assert (row.seconds, row.params, pd.isna(row.reused_from)) == (110.0, {"model": "tiny"}, True)
    check = frames.checks.query("cell == @CELL and check == 'text'").iloc[0]
    assert (check.error, check.message) == ("RuntimeError", "no room for 17 blocks")
    passing = frames.checks.query("cell == @CELL and check == 'loads'").iloc[0]
    assert pd.isna(passing.error) and pd.isna(passing.fingerprint)


def test_runs_by_name_and_folder_each_once_and_the_newest_without_a_name(inside: Project) -> None:
    runs = inside.results / "runs"
    some = harness.load("20261129T020000Z-0006", runs / "20261128T020000Z-0005", "20261129T020000Z-0006")
    assert list(some.records.run.unique()) == ["20261129T020000Z-0006", "20261128T020000Z-0005"]
    assert list(harness.load().records.run.unique()) == ["20261130T020000Z-0007"]


def test_from_anywhere_by_its_configuration(project: Project, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigurationError, match=r"no matrix\.toml"):
        harness.load()
    assert len(harness.load(config=project.root / "matrix.toml").records) == 6
    with pytest.raises(NothingSelectedError, match="no such run: none"):
        harness.load("none", config=project.root / "matrix.toml")


def test_the_types_hold_where_there_is_no_row(inside: Project) -> None:
    full = harness.load()
    folder = inside.results / "runs" / "empty"
    folder.mkdir()
    (folder / "plan.json").write_text("{}")
    try:
        empty = harness.load("empty")
    finally:
        shutil.rmtree(folder)
    for name in NAMES:
        assert len(getattr(empty, name)) == 0
        assert dict(getattr(empty, name).dtypes) == dict(getattr(full, name).dtypes), name


def test_pandas_waits_until_something_is_loaded() -> None:
    code = "import sys, harness; assert 'pandas' not in sys.modules and 'pydantic' not in sys.modules; harness.load"
    subprocess.run([sys.executable, "-c", f"{code}; assert 'pandas' in sys.modules"], check=True, cwd=ROOT)
    with pytest.raises(AttributeError, match="no attribute 'lode'"):
        harness.lode  # type: ignore[attr-defined]  # noqa: B018
