"""What a check may raise on purpose; everything else that it raises is a fact about the version under test."""

from __future__ import annotations

from typing import Any, Mapping

from _pytest.outcomes import Skipped as Skipped  # what pytest.skip raises


class OracleError(AssertionError):
    """An oracle says no. ``reason`` is a short stable code (``ids-differ``), the message names the evidence."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class NotAvailable(Skipped):
    """The feature does not exist in this version; ``probe`` names what was looked at to know that.

    A skip for pytest, so that it never reads as a failure; the plugin reports it as outcome ``na``.
    """

    def __init__(self, reason: str, probe: str) -> None:
        super().__init__(f"{reason} (probed: {probe})")
        self.reason = reason
        self.probe = probe


class RankError(Exception):
    """What a rank raised in its own process. ``error`` is that exception as the contract describes it, the rank named.

    Reported as that exception (``errors.describe``): where it came from decides what it means.
    """

    def __init__(self, rank: int, error: Mapping[str, Any]) -> None:
        super().__init__(f"rank {rank}: {error['type']}: {error['message']}")
        self.error = {**error, "message": f"rank {rank}: {error['message']}"}
