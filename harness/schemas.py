"""JSON Schemas of every file the project reads or writes, generated from the models that validate them.

`python -m harness.schemas` writes docs/schemas/; a test says whether they are current.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from harness.bundles.index import Index
from harness.events import Done, Event
from harness.expectations import ExpectationsFile
from harness.planfile import PlanFile
from harness.probes import Probe
from harness.records import Record
from harness.spec import MatrixSpec
from harness.targets import TargetFacts

FOLDER = Path("docs/schemas")

ADAPTERS: dict[str, TypeAdapter[Any]] = {
    "matrix.toml": TypeAdapter(MatrixSpec),
    "expectations.toml": TypeAdapter(ExpectationsFile),
    "event": TypeAdapter(Event),
    "done": TypeAdapter(Done),
    "plan": TypeAdapter(PlanFile),
    "record": TypeAdapter(Record),
    "probe": TypeAdapter(Probe),
    "target": TypeAdapter(TargetFacts),
    "bundle": TypeAdapter(Index),
}


def schemas() -> dict[str, str]:
    """File name → JSON text."""
    return {f"{name}.schema.json": _text(adapter.json_schema(by_alias=True)) for name, adapter in ADAPTERS.items()}


def _text(schema: object) -> str:
    return json.dumps(schema, indent=1, ensure_ascii=False, sort_keys=True) + "\n"


if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, text in schemas().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
