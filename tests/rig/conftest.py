"""The rig is not installed on the host: its tests find it where the containers mount it from."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.rig.run import FAKES, SUITE

sys.path.insert(0, str(SUITE))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    """NotAvailable is a skip to pytest, and here a failure: a test that expects it catches it."""
    from rig.outcomes import NotAvailable

    try:
        return (yield)
    except NotAvailable as exc:
        raise AssertionError(f"NotAvailable: {exc.msg}") from exc


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    """A suite with the real rig and no scenario."""
    shutil.copytree(SUITE / "rig", tmp_path / "suite" / "rig", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(SUITE / "sitecustomize.py", tmp_path / "suite")
    return tmp_path / "suite"


@pytest.fixture
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An out folder, and a fresh writer for this process that writes there."""
    from rig import events

    monkeypatch.setenv("VLLM_MATRIX_OUT", str(tmp_path))
    monkeypatch.setattr(events, "_writer", None)
    return tmp_path


@pytest.fixture
def fake_vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """``fake_vllm(core="v1", bugs=[...])`` makes that fake the ``vllm`` of this process until the test ends."""

    def clean() -> None:
        for name in [name for name in sys.modules if name.split(".")[0] in ("vllm", "tiny", "safetensors", "pynvml")]:
            del sys.modules[name]

    def script(**settings: Any) -> Any:
        clean()
        monkeypatch.setenv("FAKE_VLLM", json.dumps(settings))
        monkeypatch.syspath_prepend(str(FAKES))
        import vllm

        return vllm

    yield script
    clean()
