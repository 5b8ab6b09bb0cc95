"""A checkpoint's tensors, as a trainer would send them to an engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Iterator, Tuple


def tensors(folder: Path) -> Iterator[Tuple[str, Any]]:
    """(name, torch tensor) of every parameter, file by file."""
    from safetensors import safe_open

    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(str(path), framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (no mapping: it has no iterator)
                yield name, file.get_tensor(name)
