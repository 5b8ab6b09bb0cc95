"""Does the engine start cold and answer?

Every named batch is generated once, in a fresh engine, and kept as ``reference.json``: what other scenarios of the
same target, device, model and dtype must give again. The same for the second weight set, in a process of its own:
what an engine must answer once it was given these weights. A batch that raises is kept as an error and fails nothing
here; without an answer to plain text and to one image there is no reference, so these two must not raise.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rig import cold, oracles
from rig.batches import BATCHES, batches_for
from rig.cell import Cell
from rig.engine import Engine
from rig.events import Events
from rig.fixtures import Engines
from rig.outcomes import NotAvailable, OracleError
from rig.reference import answered, dump_reference

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
            _kept[batch.name] = cold.attempt(batch, engines.get(cell), processor)
    events.artifact("reference.json", dump_reference(cell, {"w1": _kept}))
    answers = [name for name, entry in _kept.items() if "outputs" in entry]
    if "text" not in answers:
        raise OracleError("no-answer", f"answered: {answers}")


@pytest.mark.usefixtures("engine")  # without one there is nothing to ask
def test_second_weights(engines: Engines, cell: Cell, events: Events, tmp_path: Path) -> None:
    """Last: it ends the engine, so that two never share a device's memory."""
    engines.close()
    second = cold.elsewhere("w2", tmp_path)
    events.artifact("reference.json", dump_reference(cell, {"w1": _kept, "w2": second}))
    answers = [name for name, entry in second.items() if "outputs" in entry]
    if "text" not in answers:
        raise OracleError("no-answer", f"answered: {answers}")
