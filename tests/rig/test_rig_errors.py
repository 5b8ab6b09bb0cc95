"""An exception as data: whose code raised, through whose call."""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rig import errors
from rig.outcomes import NotAvailable, OracleError

from tests.rig.run import SUITE


def caught(function: Callable[[], Any]) -> BaseException:
    with pytest.raises(BaseException) as info:
        function()
    return info.value


def test_type_bases_message() -> None:
    found = errors.describe(caught(lambda: {}["key"]))
    assert found["type"] == "KeyError"
    assert found["bases"] == ["LookupError", "Exception", "BaseException"]
    assert found["message"] == "'key'"
    assert found["reason"] is None
    assert "KeyError: 'key'" in found["traceback"]


def test_an_oracle_gives_its_reason() -> None:
    found = errors.describe(OracleError("ids-differ", "5 instead of 6"))
    assert (found["reason"], found["message"]) == ("ids-differ", "5 instead of 6")
    assert "AssertionError" in found["bases"]


def test_only_an_oracle_gives_a_reason() -> None:
    """UnicodeDecodeError, URLError and SSLError have a ``reason`` of their own."""
    assert errors.describe(caught(lambda: b"\xff".decode()))["reason"] is None


def test_frames_run_from_the_outermost_to_the_one_that_raised() -> None:
    frames = errors.describe(caught(lambda: json.loads("{")))["frames"]
    assert [frame["where"] for frame in frames[-2:]] == ["python", "python"]
    assert frames[-1]["file"] == "json/decoder.py"
    assert frames[-1]["function"] == "raw_decode"


def test_frames_of_the_runner_are_left_out() -> None:
    frames = errors.describe(caught(lambda: pytest.importorskip("a..b")))["frames"]
    assert frames
    assert not any(frame["file"].startswith("_pytest/") for frame in frames)


@pytest.mark.parametrize(
    ("filename", "expected"),
    [
        (str(SUITE / "test_x.py"), ("suite", "test_x.py")),
        (str(SUITE / "rig" / "engine.py"), ("rig", "engine.py")),
        ("/opt/venv/lib/python3.11/site-packages/vllm/llm.py", ("site", "vllm/llm.py")),
        ("/usr/lib/python3/dist-packages/yaml/__init__.py", ("site", "yaml/__init__.py")),
        ("/src/vllm/vllm/entrypoints/llm.py", ("site", "vllm/vllm/entrypoints/llm.py")),
        (sysconfig.get_paths()["stdlib"] + "/asyncio/events.py", ("python", "asyncio/events.py")),
        ("<frozen importlib._bootstrap>", ("python", "<frozen importlib._bootstrap>")),
    ],
)
def test_where(filename: str, expected: tuple[str, str]) -> None:
    assert errors.locate(filename) == expected


def test_a_linked_package_is_still_installed(tmp_path: Path) -> None:
    cache = tmp_path / "cache" / "llm.py"
    link = tmp_path / "site-packages" / "vllm" / "llm.py"
    for path in (cache, link):
        path.parent.mkdir(parents=True)
    cache.touch()
    link.symlink_to(cache)
    assert errors.locate(str(link)) == ("site", "vllm/llm.py")


def test_caps() -> None:
    def deep(n: int) -> None:
        if n == 0:
            raise RuntimeError("first" + "x" * 100_000 + "last")
        deep(n - 1)

    found = errors.describe(caught(lambda: deep(500)))
    assert len(found["frames"]) == errors.FRAMES
    assert len(found["message"]) == 4_000
    assert found["message"].endswith("last")
    assert len(found["traceback"]) <= errors.TRACEBACK_CHARS


def test_a_broken_str_is_no_second_failure() -> None:
    class Broken(Exception):  # noqa: N818
        def __str__(self) -> str:
            raise ValueError

    assert errors.describe(Broken())["message"] == "<str() raised ValueError>"


def test_not_available_names_its_probe() -> None:
    exc = NotAvailable("no wake_up", "LLM.wake_up")
    assert str(exc) == "no wake_up (probed: LLM.wake_up)"
    assert not isinstance(exc, Exception)  # no ``except Exception`` may swallow it
