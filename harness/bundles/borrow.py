"""Distributions that a machine has already: taken into an environment file by file, if each is what its wheel holds.

A wheel's RECORD names every file with its sha256. So what is borrowed is the same, byte for byte, as what would have
been carried, wherever it came from; whatever else lies around it is not taken.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal

from harness.errors import BuildError

INSTALLER = "vllm-matrix"
MAX_THREADS = 16
How = Literal["hard link", "symbolic link", "copy"]

# The list and its signature cannot stand in it with their hashes; the others are an installer's, never a wheel's.
_UNLISTED = re.compile(r"[^/]+\.dist-info/(RECORD(\.jws|\.p7s)?|INSTALLER|REQUESTED|direct_url\.json)")
# Modules that a wheel names by where they belong; that is one folder on Linux.
_MODULES = re.compile(r"[^/]+\.data/(?:purelib|platlib)/")
# Left out. Scripts: an installer writes another first line into them, so they are no longer the wheel's, and cells
# start nothing but Python. Headers and manuals: nothing is compiled against what is borrowed.
_NOT_NEEDED = re.compile(r"\.\./\.\./\.\./bin/|[^/]+\.data/(scripts/|headers/|data/(share|etc)/)")


@dataclass(frozen=True)
class _File:
    """Where it lies below site-packages, and the sha256 (URL-safe base64 without padding) that it has to have."""

    path: str
    sha256: str


def lend(name: str, record: str, source: Path, target: Path) -> str:
    """Take the distribution `name` whose wheel has this RECORD from one site-packages into another; says how, in words.

    Raises BuildError that names the first file which is missing, or is not the wheel's; nothing is taken then.
    """
    files = tuple(_files(name, record))
    metadata = _metadata_of(name, files)
    with ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1)) as pool:
        for file, fault in zip(files, pool.map(lambda file: _fault(source, file), files), strict=True):
            if fault:
                raise BuildError(
                    f"{name} cannot be borrowed from {source}: {file.path} {fault}",
                    "Make the bundle without --borrow for it, or name another folder by --borrow-from.",
                )
    ways = {_take(source / file.path, target / file.path) for file in files}
    _write_metadata(files, target / metadata)
    return f"{len(files)} files by {' and '.join(sorted(ways))}"


def _files(name: str, record: str) -> Iterator[_File]:
    """The files to take. Raises BuildError for a line that no wheel has: nothing may be taken from elsewhere."""
    for row in csv.reader(record.splitlines()):
        path = _MODULES.sub("", row[0]) if row else ""
        if not path or _UNLISTED.fullmatch(path) or _NOT_NEEDED.match(path):
            continue
        method, _, digest = (row[1] if len(row) > 1 else "").partition("=")
        inside = not PurePosixPath(path).is_absolute() and ".." not in PurePosixPath(path).parts
        if not inside or method != "sha256" or re.match(r"[^/]+\.data/", path) or "\0" in path:
            raise BuildError(
                f"{name} cannot be borrowed: its RECORD has {','.join(row)!r:.200}", "Make the bundle without --borrow."
            )
        yield _File(path, digest)


def _metadata_of(name: str, files: Iterable[_File]) -> str:
    found = {folder for file in files if (folder := file.path.split("/")[0]).endswith(".dist-info")}
    if len(found) != 1:
        raise BuildError(
            f"{name} cannot be borrowed: its RECORD names no metadata", "Make the bundle without --borrow."
        )
    return found.pop()


def _fault(source: Path, file: _File) -> str:
    """What is wrong with the machine's file, or nothing."""
    try:
        with (source / file.path).open("rb") as stream:
            found = hashlib.file_digest(stream, "sha256").digest()
    except FileNotFoundError:
        return "is not there"
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    same = base64.urlsafe_b64encode(found).rstrip(b"=").decode() == file.sha256
    return "" if same else "is another one than the wheel's"


def _take(source: Path, target: Path) -> How:
    """By the cheapest way that the file systems allow; a file of somebody else's may often not be linked.

    Of a file that several distributions have, as `nvidia/__init__.py`, the last one counts.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    target.unlink(missing_ok=True)
    real = source.resolve()
    try:
        os.link(real, target)
    except OSError:
        pass
    else:
        return "hard link"
    try:
        target.symlink_to(real)
    except OSError:
        shutil.copyfile(real, target)
        return "copy"
    return "symbolic link"


def _write_metadata(files: Iterable[_File], folder: Path) -> None:
    """By these two, `importlib.metadata` and uv know the distribution as one that is installed."""
    (folder / "INSTALLER").write_text(f"{INSTALLER}\n", encoding="utf-8")
    with (folder / "RECORD").open("w", encoding="utf-8", newline="") as stream:
        rows = csv.writer(stream, lineterminator="\n")
        rows.writerows([file.path, f"sha256={file.sha256}", ""] for file in files)
        rows.writerows([f"{folder.name}/{own}", "", ""] for own in ("INSTALLER", "RECORD"))
