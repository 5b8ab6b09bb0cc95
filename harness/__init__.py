"""Runs one scenario suite against many vLLM versions, each in its own container."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from harness.frames import load

__all__ = ["__version__", "load"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """`harness.load`, when it is first asked for: pandas takes half a second to import."""
    if name != "load":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from harness.frames import load

    return load
