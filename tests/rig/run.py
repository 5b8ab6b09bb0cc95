"""Runs a cell through ``python -m rig`` as a container would, and reads back what it left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SUITE = ROOT / "scenarios"
FAKES = Path(__file__).parent / "fakes"


@dataclass(frozen=True)
class Ran:
    """What a cell left behind."""

    code: int
    out: Path
    stderr: str

    @property
    def events(self) -> list[dict[str, Any]]:
        return read_events(self.out)

    @property
    def done(self) -> dict[str, Any] | None:
        path = self.out / "DONE"
        return json.loads(path.read_text()) if path.exists() else None

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["type"] == kind]

    @property
    def ends(self) -> dict[str, dict[str, Any]]:
        """``end`` by check; fails when a check has two."""
        ends = self.of("end")
        assert len({event["check"] for event in ends}) == len(ends)
        return {event["check"]: event for event in ends}

    @property
    def outcomes(self) -> dict[str, str]:
        return {check: event["outcome"] for check, event in self.ends.items()}


def read_events(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]


def prepare(
    folder: Path, file: str, suite: Path = SUITE, fake: Mapping[str, Any] | None = None, **fields: Any
) -> dict[str, str]:
    """The folders of a cell, whose ``fields`` win over the usual ones, and the environment that names them."""
    from tests.rig.fakes import tiny

    for name in ("in", "out"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    for weights in ("w1", "w2"):
        model = folder / "models" / "tiny" / weights
        model.mkdir(parents=True, exist_ok=True)
        (model / "config.json").write_text(json.dumps(tiny.CONFIG))
        (model / "model.safetensors").write_text(weights)
    cell = {
        "schema": 1,
        "cell": f"fake@cpu/{file}",
        "target": "fake",
        "vllm": "0.0.0",
        "device": "cpu",
        "scenario": file.removeprefix("test_").removesuffix(".py"),
        "file": file,
        "params": {"model": "tiny"},
        "options": {"dtype": "float32"},
        "seed": 0,
        "ranks": 1,
        "deadlines": {"total": 60.0, "silence": 30.0},
        "reference": False,
        **fields,
    }
    (folder / "in" / "cell.json").write_text(json.dumps(cell))
    inherited = ("PATH", "HOME", "TMPDIR", "LANG")
    return {
        **{name: os.environ[name] for name in inherited if name in os.environ},
        "PYTHONPATH": os.pathsep.join([str(suite), str(FAKES)]),
        "VLLM_MATRIX_IN": str(folder / "in"),
        "VLLM_MATRIX_OUT": str(folder / "out"),
        "VLLM_MATRIX_MODELS": str(folder / "models"),
        "FAKE_VLLM": json.dumps(dict(fake or {})),
    }


def command() -> Sequence[str]:
    return [sys.executable, "-m", "rig"]


def run_cell(folder: Path, file: str, suite: Path = SUITE, fake: Mapping[str, Any] | None = None, **fields: Any) -> Ran:
    """Run one scenario file to its end."""
    environment = prepare(folder, file, suite, fake, **fields)
    done = subprocess.run(command(), env=environment, cwd=folder, capture_output=True, text=True, timeout=60)
    return Ran(done.returncode, folder / "out", done.stderr + done.stdout)
