"""What the ranks of a cell say while they run: their own events files, read back as they grow."""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Mapping

from rig.events import file_name


@dataclass(frozen=True)
class Mark:
    """A ``mark`` event of a rank. ``ns``: CLOCK_MONOTONIC, the same clock for all processes of a host."""

    name: str
    n: int
    state: str
    ns: int

    def __str__(self) -> str:
        return f"{self.name} {self.n} {self.state}"


class Listener:
    """Follows ``count`` ranks' events files from where they end now; ``marks[rank]`` in the order written."""

    def __init__(self, out: Path, count: int) -> None:
        self.marks: dict[int, list[Mark]] = {rank: [] for rank in range(count)}
        self._paths = [out / file_name(rank) for rank in range(count)]
        self._offsets = [path.stat().st_size if path.exists() else 0 for path in self._paths]

    def listen(self) -> int:
        """Take in what is new; the bytes heard, of all ranks together."""
        return sum(self._listen(rank) for rank in self.marks)

    def last(self) -> dict[int, Mark | None]:
        """Each rank's last mark."""
        return {rank: marks[-1] if marks else None for rank, marks in self.marks.items()}

    def _listen(self, rank: int) -> int:
        heard = 0
        with contextlib.suppress(FileNotFoundError), self._paths[rank].open("rb") as file:
            file.seek(self._offsets[rank])
            whole = file.read().rpartition(b"\n")[0]  # a line that is being written is for the next time
            heard = len(whole) + 1 if whole else 0
            self._take(rank, whole)
        self._offsets[rank] += heard
        return heard

    def _take(self, rank: int, lines: bytes) -> None:
        for line in lines.splitlines():
            event = json.loads(line)
            if event["type"] == "mark":
                self.marks[rank].append(Mark(event["name"], event["n"], event["state"], event["mono_ns"]))


def each(values: Mapping[int, Any]) -> str:
    """``rank 0: barrier 3 enter; rank 1: none``"""
    return "; ".join(f"rank {rank}: {'none' if value is None else value}" for rank, value in sorted(values.items()))
