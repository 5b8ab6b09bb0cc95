"""What a back end is: it starts one cell in isolation and says how it ended. The folder is the only other channel."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from harness.cells import Resources
from harness.records import ExitState

COMMAND = ("python3", "-m", "rig")
LOGS = ("stdout.log", "stderr.log")
_WAITING = 64 << 10  # bytes of output that are not lost on a full disk
MAX_OUTPUT = 8 << 20  # bytes kept of each of stdout and stderr: the head


# Without USER and HOME vLLM 0.10.0 fails in getpwuid under a foreign uid; everything else keeps caches in one place,
# which can be thrown away, and traffic off the network.
def environment(*, tmp: str, suite: str, inputs: str, out: str, models: str) -> dict[str, str]:
    """The variables of a cell, wherever it runs: where its folders are, and what keeps it to them."""
    return {
        "PYTHONPATH": suite,
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONUNBUFFERED": "1",
        "HOME": tmp,
        "USER": "matrix",
        "LOGNAME": "matrix",
        "XDG_CACHE_HOME": f"{tmp}/cache",
        "TRITON_CACHE_DIR": f"{tmp}/cache/triton",
        "TORCHINDUCTOR_CACHE_DIR": f"{tmp}/cache/inductor",
        "VLLM_CACHE_ROOT": f"{tmp}/cache/vllm",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
        "VLLM_MATRIX_IN": inputs,
        "VLLM_MATRIX_OUT": out,
        "VLLM_MATRIX_MODELS": models,
    }


class Head:
    """The first MAX_OUTPUT bytes of a stream, in a file. Where the disk is full, a little waits for `close`."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb", buffering=0)
        self._left = MAX_OUTPUT
        self._is_full = False
        self._waiting = b""

    def write(self, chunk: bytes) -> None:
        """Raises nothing: the rest of the stream has to be read all the same."""
        chunk = chunk[: self._left]
        self._left -= len(chunk)
        while chunk and not self._is_full:
            try:
                chunk = chunk[self._file.write(chunk) :]
            except OSError:
                self._is_full = True
        self._waiting += chunk[: _WAITING - len(self._waiting)]

    def close(self) -> None:
        """To be called once there is room again, if there ever is. May be called again."""
        if not self._file.closed:
            with self._file, contextlib.suppress(OSError):
                self._file.write(self._waiting)


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One attempt, or a probe, ready to start. `folder` holds `in/` and `out/`.

    `image` is an image ID, never a tag; where there are no images, the name of an environment.
    """

    name: str
    image: str
    folder: Path
    suite: Path
    models: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    resources: Resources
    gpus: tuple[str, ...] = ()  # UUIDs
    command: tuple[str, ...] = COMMAND  # by the `python3` of the image or environment


class Running(Protocol):
    """A started attempt. Every method may be called again and none hangs for ever."""

    def ended(self, seconds: float) -> bool:
        """Wait at most `seconds`; whether it has ended."""

    def terminate(self) -> None:
        """SIGTERM to its first process; returns at once."""

    def close(self) -> ExitState:
        """How it ended, by SIGKILL if need be; afterwards nothing of it is left, or `error` says what is."""


class Backend(Protocol):
    """Raises InfrastructureError from both methods where it does not work here."""

    name: str

    def check(self, scratch: Path, image: str) -> None:
        """Whether cells can be run here at all: what `image` sees of `scratch` must be what we put there."""

    def start(self, launch: Launch) -> Running:
        """Start the cell; its first 8 MiB of output go to stdout.log and stderr.log in `launch.folder`."""
