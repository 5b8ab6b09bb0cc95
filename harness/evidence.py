"""What an attempt left, copied to another run or packed: what of it is evidence, and what is not."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from harness.errors import InfrastructureError
from harness.events import MAX_FILE


def copy_evidence(source: Path, target: Path, whose: str) -> None:
    """Copy an attempt's folder; `whose` says which in the error. Raises InfrastructureError."""
    try:
        shutil.copytree(source, target, symlinks=True, ignore=no_evidence)
    except (shutil.Error, RecursionError) as error:
        what = f"the evidence of {whose} cannot be copied: {str(error)[:200]}"
        raise InfrastructureError(what, "Make room, or run with --fresh.") from error


def no_evidence(folder: str, names: list[str]) -> list[str]:
    """What a cell left that cannot be copied, or must not be: pipes, sockets, what is closed to us, what is huge."""

    def kept(path: Path) -> bool:
        if path.is_symlink():
            return True
        if path.is_dir():
            return os.access(path, os.R_OK | os.X_OK)
        return path.is_file() and os.access(path, os.R_OK) and path.stat().st_size <= MAX_FILE

    return [name for name in names if not kept(Path(folder, name))]
