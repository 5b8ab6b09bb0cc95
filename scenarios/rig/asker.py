"""Asks an engine named batches, and whether it answers as a cold start does."""

from __future__ import annotations

from typing import Any

from rig import oracles
from rig.batches import BATCHES
from rig.completion import Outputs
from rig.engine import Engine
from rig.events import Events
from rig.outcomes import OracleError
from rig.reference import Reference


def answers(engine: Engine, processor: Any, name: str) -> Outputs:
    """The engine's answers to a named batch: as many as were asked for, none of them empty."""
    batch = BATCHES[name]
    outputs = engine.generate(batch.requests(processor), batch.sampling)
    oracles.counts(outputs, len(batch.prompts), batch.n)
    return outputs


class Asker:
    """One engine, and the cold starts of its version to compare it with."""

    def __init__(self, engine: Engine, processor: Any, reference: Reference, tolerance: float, events: Events) -> None:
        self.engine = engine
        self.processor = processor
        self.reference = reference
        self.tolerance = tolerance
        self.events = events

    def __call__(self, name: str) -> Outputs:
        return answers(self.engine, self.processor, name)

    def same(self, *names: str, weights: str = "w1") -> None:
        """The answers to these batches are those of a cold start of ``weights``."""
        for name in names:
            ties = oracles.ids_equal(self(name), self.reference.outputs(name, weights), self.tolerance)
            if ties:
                self.events.property(f"ties.{name}", [str(tie) for tie in ties])

    def differs(self, name: str, weights: str = "w1") -> bool:
        """Whether the answer is another one; nothing that is wrong with it raises."""
        try:
            self.same(name, weights=weights)
        except OracleError as err:
            self.events.property(f"differs.{name}", f"{err.reason}: {err}"[:500])
            return True
        return False
