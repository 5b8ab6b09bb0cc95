"""The two walls between host and container, and the names that stay inside."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT

FORBIDDEN = {"harness": {"torch", "vllm", "verl", "rig", "scenarios"}, "scenarios": {"harness"}}


def imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield (node.module or "").split(".")[0]


@pytest.mark.parametrize("side", FORBIDDEN)
def test_wall(side: str) -> None:
    files = list((ROOT / side).rglob("*.py"))
    assert files
    for path in files:
        assert not FORBIDDEN[side] & set(imported(path)), path


def test_pandas_waits_until_a_table_is_pivoted() -> None:
    """`plan`, `show` and `logs` start in a fraction of the time that pandas takes to import."""
    code = "import sys, harness.cli; assert not {'pandas', 'numpy', 'torch'} & set(sys.modules), 'imported too early'"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
