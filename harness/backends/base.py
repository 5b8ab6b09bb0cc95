"""What a back end is: it starts one cell in isolation and says how it ended. The folder is the only other channel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from harness.cells import Resources
from harness.records import ExitState

COMMAND = ("python3", "-m", "rig")
MAX_OUTPUT = 8 << 20  # bytes kept of each of stdout and stderr: the head


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One attempt, ready to start. `folder` holds `in/` and `out/`; `image` is an image ID, never a tag."""

    name: str
    image: str
    folder: Path
    suite: Path
    models: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    resources: Resources
    gpus: tuple[str, ...] = ()  # UUIDs


class Running(Protocol):
    """A started attempt. Every method may be called again and none hangs for ever."""

    def ended(self, seconds: float) -> bool:
        """Wait at most `seconds`; whether it has ended."""

    def stop(self, grace: float) -> None:
        """SIGTERM, and SIGKILL after `grace` seconds."""

    def close(self) -> ExitState:
        """How it ended; afterwards nothing of it is left."""


class Backend(Protocol):
    """Raises InfrastructureError from both methods where it does not work here."""

    name: str

    def check(self, scratch: Path, image: str) -> None:
        """Whether cells can be run here at all: what `image` sees of `scratch` must be what we put there."""

    def start(self, launch: Launch) -> Running:
        """Start the cell; its first 8 MiB of output go to stdout.log and stderr.log in `launch.folder`."""
