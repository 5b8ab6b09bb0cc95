"""What this cell is: ``cell.json`` and the folders named by the environment (docs/formats.md, section 1)."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Mapping

SCHEMA = 1


class CellError(ValueError):
    """The harness handed in something that is no cell; the message says what."""


@dataclass(frozen=True)
class Cell:
    """One cell. ``vllm`` is the declared release line: a fact to record, never to branch on."""

    id: str
    target: str
    vllm: str
    device: str
    scenario: str
    file: str
    params: Mapping[str, str]
    options: Mapping[str, Any]
    seed: int
    ranks: int
    inputs: Path
    out: Path
    models: Path
    deadlines: Mapping[str, float] = field(default_factory=dict)  # seconds, the host's: ``total``, ``silence``

    @property
    def model(self) -> str:
        """Name of the model, a folder of ``models``."""
        return self.params.get("model", "qwen2")

    @property
    def dtype(self) -> str:
        return str(self.options.get("dtype", "float32" if self.device == "cpu" else "bfloat16"))

    @property
    def engine_options(self) -> dict[str, Any]:
        """What every engine of this cell is started with; the options of the cell win over its seed and dtype."""
        return {"dtype": self.dtype, "seed": self.seed, **self.options}

    def model_dir(self, variant: str = "w1") -> Path:
        """The checkpoint of a weight set (``w1``, ``w2``, ``w1-unbanned``)."""
        path = self.models / self.model / variant
        if not (path / "config.json").is_file():
            raise CellError(f"no checkpoint at {path}")
        return path


def read_cell(environ: Mapping[str, str] = os.environ) -> Cell:
    """The cell handed in; raises CellError when a variable, the file or a field is missing or of another schema."""
    try:
        inputs, out, models = (Path(environ[f"VLLM_MATRIX_{name}"]) for name in ("IN", "OUT", "MODELS"))
        raw = json.loads((inputs / "cell.json").read_text(encoding="utf-8"))
        if raw["schema"] != SCHEMA:
            raise CellError(f"cell.json has schema {raw['schema']!r}, this rig reads {SCHEMA}")
        if Path(raw["file"]).name != raw["file"]:
            raise CellError(f"cell.json: file {raw['file']!r} is not a name in the suite")
        return Cell(
            id=raw["cell"],
            params=dict(raw["params"]),
            options=dict(raw["options"]),
            seed=int(raw["seed"]),
            ranks=int(raw["ranks"]),
            inputs=inputs,
            out=out,
            models=models,
            deadlines=dict(raw["deadlines"]),
            **{name: raw[name] for name in ("target", "vllm", "device", "scenario", "file")},
        )
    except KeyError as err:
        raise CellError(f"missing: {err.args[0]}") from err
    except (OSError, TypeError, json.JSONDecodeError) as err:
        raise CellError(f"cell.json: {err}") from err
