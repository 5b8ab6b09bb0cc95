"""A cell of a run once more, outside of it: the command that `repro` prints, the shell that `shell` opens."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from harness import models
from harness.backends import docker, local
from harness.backends.base import Launch
from harness.environments import environments_root
from harness.errors import NothingSelectedError
from harness.job import launch
from harness.matrix import Square
from harness.project import Project
from harness.records import Record, attempt_folder, next_attempt


@dataclass(frozen=True, kw_only=True)
class Again:
    """`folders` have to be there before `words` are run."""

    folders: tuple[Path, ...]
    words: tuple[str, ...]


def again(project: Project, square: Square, interactive: bool = False) -> Again:
    """The command that runs the cell as its record says it ran, with a copy of what it was handed.

    Raises NothingSelectedError where it never came to run.
    """
    record = record_of(square)
    if record.image is None:
        raise NothingSelectedError(f"{record.cell} never had an image", record.reason)
    scratch = Path(tempfile.mkdtemp(prefix="vllm-matrix-"))
    shutil.copytree(evidence(project, record) / "in", scratch / "in")
    folders = (scratch, project.suite, models.default_root())
    launched = launch(square.cell, record.image.id, *folders, scratch.name, {}, gpus=_gpus(square, record))
    return _local(launched, interactive) if record.backend == "local" else _docker(launched, interactive)


def _gpus(square: Square, record: Record) -> tuple[str, ...]:
    """The UUIDs of those that it had; nothing that a cell without any may have written itself."""
    found = record.properties.get("gpu.uuids")
    return tuple(map(str, found)) if square.cell.resources.gpus and isinstance(found, tuple) else ()


def _docker(launched: Launch, interactive: bool) -> Again:
    words = docker.command_line(launched, interactive)
    return Again(folders=(launched.folder / "out" / "artifacts",), words=tuple(words))


def _local(launched: Launch, interactive: bool) -> Again:
    words = local.command_line(launched, environments_root(), interactive)
    return Again(folders=(launched.folder / "out" / "artifacts", launched.folder / "tmp"), words=tuple(words))


def record_of(square: Square) -> Record:
    """Raises NothingSelectedError where there is none."""
    if square.record is None:
        raise NothingSelectedError(f"{square.cell.id} has no record in this run", "It was never started.")
    return square.record


def evidence(project: Project, record: Record) -> Path:
    """The folder of the record's attempt."""
    return attempt_folder(project.results, record.run, record.cell, record.attempt)


def latest_evidence(project: Project, run: str, square: Square) -> Path | None:
    """The same, or the last attempt's of a cell that runs at the moment or was interrupted; None if none began."""
    if square.record is not None:
        return evidence(project, square.record)
    number = next_attempt(project.results, run, square.cell.id) - 1
    return attempt_folder(project.results, run, square.cell.id, number) if number else None
