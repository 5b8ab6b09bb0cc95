"""Does the engine start cold and answer?

Every named batch is generated once, in a fresh engine, and kept as ``reference.json``: what other scenarios of the
same target, device, model and dtype must give again. A batch that raises is kept as an error and fails nothing here;
without an answer to plain text and to one image there is no reference, so these two must not raise.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from rig import oracles
from rig.batches import BATCHES, Batch, batches_for
from rig.cell import Cell
from rig.engine import Engine
from rig.events import Events
from rig.fixtures import Engines
from rig.outcomes import NotAvailable, OracleError
from rig.reference import answered, dump_reference, raised

_kept: dict[str, dict[str, Any]] = {}


@pytest.fixture(scope="module")
def config(cell: Cell) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((cell.model_dir() / "config.json").read_text(encoding="utf-8"))
    return loaded


def test_starts(engine: Engine, cell: Cell) -> None:
    found = engine.properties()
    if found.get("engine.dtype") != cell.dtype:
        raise OracleError("dtype", f"asked for {cell.dtype}, the engine runs {found.get('engine.dtype')}")
    if not found.get("engine.kv_blocks"):
        raise OracleError("no-kv-blocks", f"KV blocks: {found.get('engine.kv_blocks')}")


@pytest.mark.parametrize("name", ["text", "one_image"])
def test_answers(name: str, engine: Engine, processor: Any, config: dict[str, Any]) -> None:
    batch = BATCHES[name]
    if batch not in batches_for("vision_config" in config):
        raise NotAvailable("the model takes no images", "vision_config in config.json")
    outputs = engine.generate(batch.requests(processor), batch.sampling)
    oracles.counts(outputs, len(batch.prompts), batch.n)
    oracles.none_sampled(outputs, oracles.banned_ids(config))
    _kept[name] = answered(outputs)


def test_records(engines: Engines, cell: Cell, processor: Any, config: dict[str, Any], events: Events) -> None:
    for batch in batches_for("vision_config" in config):
        if batch.name not in _kept:
            _kept[batch.name] = _try(batch, engines.get(cell), processor, events)
    events.artifact("reference.json", dump_reference(cell, _kept))
    answers = [name for name, entry in _kept.items() if "outputs" in entry]
    if "text" not in answers:
        raise OracleError("no-answer", f"answered: {answers}")


def _try(batch: Batch, engine: Engine, processor: Any, events: Events) -> dict[str, Any]:
    try:
        outputs = engine.generate(batch.requests(processor), batch.sampling)
    except Exception as exc:  # whatever it is, it is what a cold start does with this batch
        events.property(f"batch.{batch.name}.raised", f"{type(exc).__name__}: {exc}"[:500])
        return raised(exc)
    oracles.counts(outputs, len(batch.prompts), batch.n)
    return answered(outputs)
