"""The suite runs on the oldest Python of the targets."""

from __future__ import annotations

import ast
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.rig.run import SUITE

FILES = sorted(path for path in SUITE.rglob("*.py") if "__pycache__" not in path.parts)
HOST_ONLY = {"harness", "pydantic", "tomllib", "docker"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(SUITE).as_posix())
def test_parses_on_python_3_10(path: Path) -> None:
    ast.parse(path.read_text(), filename=str(path), feature_version=(3, 10))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(SUITE).as_posix())
def test_imports_nothing_of_the_host(path: Path) -> None:
    tree = ast.parse(path.read_text())
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not HOST_ONLY & {name.split(".")[0] for name in names}


@pytest.mark.parametrize("path", sorted(SUITE.glob("test_*.py")), ids=lambda path: path.name)
def test_a_scenario_begins_with_its_question(path: Path) -> None:
    first = (ast.get_docstring(ast.parse(path.read_text())) or "").splitlines()[0]
    assert first.endswith("?")


def test_imports_on_python_3_10() -> None:
    """Grammar is not all: what is evaluated at import must exist there too."""
    python = shutil.which("python3.10")
    if not python or subprocess.run([python, "--version"], capture_output=True, check=False).returncode != 0:
        pytest.skip("no Python 3.10 here")
    code = "import rig.events, rig.errors, rig.cell, rig.completion, rig.probe, rig.hello, rig.supervisor, rig.batches"
    code += ", rig.launcher, rig.barrier, rig.marks, rig.reports, rig.weights, rig.spmd"
    subprocess.run([python, "-B", "-c", code], cwd=SUITE, check=True)
