"""A cold start of one weight set in a process of its own: ``python3 -m rig.cold w2 FILE``.

Two engines never share a process: V0 keeps global state, and sleep mode allows one instance a process.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Iterable

from rig import oracles
from rig.batches import Batch, batches_for
from rig.cell import Cell, read_cell
from rig.engine import Engine
from rig.events import writer
from rig.outcomes import OracleError
from rig.reference import answered, raised

# An engine's start and a handful of tokens: two minutes on two slow cores.
SECONDS = 600.0


def elsewhere(weights: str, folder: Path) -> dict[str, Any]:
    """What a cold start of ``weights`` answers, by batch name; the process and its deadline are plain ones.

    What it leaves behind, an engine core for one, is the supervisor's to end. OracleError ``hang`` or ``no-answer``.
    """
    file = folder / f"cold.{weights}.json"
    try:
        done = subprocess.run([sys.executable, "-m", "rig.cold", weights, str(file)], timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired as err:
        raise OracleError("hang", f"a cold start of {weights} did not end within {SECONDS:.0f} s") from err
    if done.returncode or not file.is_file():
        raise OracleError("no-answer", f"a cold start of {weights} ended with code {done.returncode}")
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found


def answers(batches: Iterable[Batch], engine: Engine, processor: Any) -> dict[str, Any]:
    """As the reference keeps them; ends where the engine dies."""
    kept: dict[str, Any] = {}
    for batch in batches:
        if engine.alive:
            kept[batch.name] = attempt(batch, engine, processor)
    return kept


def attempt(batch: Batch, engine: Engine, processor: Any) -> dict[str, Any]:
    """One batch as the reference keeps it: what was answered, or what was raised."""
    try:
        outputs = engine.generate(batch.requests(processor), batch.sampling)
    except Exception as exc:  # whatever it is, it is what a cold start does with this batch
        writer().property(f"batch.{batch.name}.raised", f"{type(exc).__name__}: {exc}"[:500])
        return raised(exc)
    oracles.counts(outputs, len(batch.prompts), batch.n)
    return answered(outputs)


def start(cell: Cell, weights: str) -> dict[str, Any]:
    """Start an engine with ``weights`` here, ask it everything, end it."""
    folder = cell.model_dir(weights)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    engine = Engine(folder, cell.device, cell.engine_options)
    from transformers import AutoProcessor

    found = answers(batches_for("vision_config" in config), engine, AutoProcessor.from_pretrained(str(folder)))
    engine.close()
    return found


def main(weights: str, file: Path) -> None:
    """Writes the answers to ``file``, whole or not at all."""
    found = start(read_cell(), weights)
    part = file.with_name(file.name + ".part")
    part.write_text(json.dumps(found, allow_nan=False), encoding="utf-8")
    part.replace(file)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
