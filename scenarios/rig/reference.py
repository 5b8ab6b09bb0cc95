"""``reference.json``: what a cold start of the same weights, on the same version, answered (docs/formats.md)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Mapping, Sequence

from rig.cell import Cell
from rig.completion import Completion, Outputs
from rig.outcomes import OracleError

SCHEMA = 2


@dataclass(frozen=True)
class Reference:
    """The answers of cold starts: ``weights[weight set][batch name]``."""

    weights: Mapping[str, Mapping[str, Any]]

    def outputs(self, batch: str, weights: str = "w1") -> Outputs:
        """What was answered; raises OracleError when the batch is absent or raised in the cold start."""
        entry = self.weights.get(weights, {}).get(batch)
        if entry is None:
            raise OracleError("no-reference", f"the reference has no batch {batch!r} of weights {weights}")
        if "outputs" not in entry:
            error = entry.get("error", {})
            message = f"in the cold start {batch!r} raised {error.get('type')}: {error.get('message')}"
            raise OracleError("reference-raised", message)
        return [[_load(completion) for completion in row] for row in entry["outputs"]]


def read_reference(cell: Cell) -> Reference:
    """The reference handed in; OracleError ``no-reference``, or ``reference-mismatch`` when it is of another model."""
    path = cell.inputs / "reference.json"
    if not path.is_file():
        raise OracleError("no-reference", "no reference.json was handed in")
    raw = json.loads(path.read_text(encoding="utf-8"))
    want = {"schema": SCHEMA, **_identity(cell)}
    got = {name: raw.get(name) for name in want}
    if got != want:
        raise OracleError("reference-mismatch", f"the reference is of {got}, this cell needs {want}")
    return Reference(raw["weights"])


def dump_reference(cell: Cell, weights: Mapping[str, Mapping[str, Any]]) -> bytes:
    """``reference.json`` of ``weights[weight set][batch name]``: ``answered(...)`` or ``raised(...)``."""
    document = {"schema": SCHEMA, **_identity(cell), "weights": weights}
    return (json.dumps(document, allow_nan=False) + "\n").encode()


def answered(outputs: Outputs) -> dict[str, Any]:
    """A batch that was answered, as the reference keeps it."""
    return {"outputs": [[_dump(completion) for completion in row] for row in outputs]}


def raised(exc: BaseException) -> dict[str, Any]:
    """A batch that raised, as the reference keeps it."""
    return {"error": {"type": type(exc).__name__, "message": str(exc)[:1000]}}


def _identity(cell: Cell) -> dict[str, str]:
    return {"model": cell.model, "dtype": cell.dtype}


def _dump(done: Completion) -> dict[str, Any]:
    top2 = [list(pair) for pair in done.top2]
    return {"ids": list(done.ids), "finish": done.finish, "prompt_tokens": done.prompt_tokens, "top2": top2}


def _load(raw: Mapping[str, Any]) -> Completion:
    top2: Sequence[Sequence[float]] = raw["top2"]
    pairs = tuple((float(pair[0]), float(pair[1])) for pair in top2)
    return Completion(tuple(raw["ids"]), raw["finish"], raw["prompt_tokens"], (), pairs)
