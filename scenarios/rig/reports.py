"""What a rank found, from its process to the one that compares: a JSON file a stage, whole or not there.

A fact that this version does not have crosses too (``na``), and so does what a rank raised (``failed``): it is judged
like an exception of the check that reads it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Callable, Mapping

from rig import errors
from rig.outcomes import NotAvailable, RankError, Skipped

FAILED = "failed"


class Reports:
    """The reports in a folder that all ranks share."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, rank: int, stage: str, data: Mapping[str, Any]) -> None:
        """Rank ``rank`` ended ``stage`` and found ``data`` (JSON)."""
        path = self._path(rank, stage)
        part = path.with_suffix(".part")
        part.write_text(json.dumps(data, allow_nan=False), encoding="utf-8")
        part.replace(path)

    def read(self, rank: int, stage: str) -> dict[str, Any] | None:
        """None as long as there is none."""
        try:
            found: dict[str, Any] = json.loads(self._path(rank, stage).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        return found

    def fail(self, rank: int, exc: BaseException) -> None:
        """Rank ``rank`` raised, or found out that it cannot be asked."""
        if isinstance(exc, NotAvailable):
            self.write(rank, FAILED, {"na": [exc.reason, exc.probe]})
        elif isinstance(exc, Skipped):
            self.write(rank, FAILED, {"skipped": str(exc)})
        else:
            self.write(rank, FAILED, {"raised": errors.describe(exc)})

    def _path(self, rank: int, stage: str) -> Path:
        return self.folder / f"rank{rank}.{stage}.json"


def exception(rank: int, failed: Mapping[str, Any]) -> BaseException:
    """What ``fail`` was given, as an exception of this process."""
    if "na" in failed:
        return NotAvailable(*failed["na"])
    if "skipped" in failed:
        return Skipped(failed["skipped"])
    return RankError(rank, failed["raised"])


def fact(look: Callable[[], Any]) -> dict[str, Any]:
    """What ``look`` returns, or that there is no such thing in this version."""
    try:
        return {"value": look()}
    except NotAvailable as exc:
        return {"na": [exc.reason, exc.probe]}


def value(found: Mapping[str, Any]) -> Any:
    """What ``fact`` kept; raises NotAvailable again."""
    if "na" in found:
        raise NotAvailable(*found["na"])
    return found["value"]
