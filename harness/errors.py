"""Errors a user can meet: one exit code a class, and a message that says what to do.

Where several apply in one run, the order of precedence is
configuration (2), nothing selected (3), interrupted (130), unexpected (1), build failed (4), infrastructure (5), 0.
"""

from __future__ import annotations


class MatrixError(Exception):
    """Base of all errors that are shown without a traceback.

    `hint` says what to do about it, in one sentence.
    """

    exit_code: int = 5

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n  {self.hint}" if self.hint else self.message


class ConfigurationError(MatrixError):
    """matrix.toml, expectations.toml, a scenario file or the command line is wrong."""

    exit_code = 2


class NothingSelectedError(MatrixError):
    """A selector matches no cell, or the plan is empty."""

    exit_code = 3


class BuildError(MatrixError):
    """An image could not be built; `log_tail` holds the last lines of the builder's output."""

    exit_code = 4

    def __init__(self, message: str, hint: str | None = None, log_tail: str = "") -> None:
        super().__init__(message, hint)
        self.log_tail = log_tail

    def __str__(self) -> str:
        return f"{super().__str__()}\n{self.log_tail}" if self.log_tail else super().__str__()


class InfrastructureError(MatrixError):
    """The engine of containers, the disk, or the host fails us; never the version under test."""

    exit_code = 5


class DockerMissingError(InfrastructureError):
    """There is no Docker here at all (as opposed to one that refuses us)."""
