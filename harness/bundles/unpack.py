"""The project out of a bundle: unpacked once, and again when another one comes; what was made there since stays."""

from __future__ import annotations

import json
import os
import shutil
import tarfile
from pathlib import Path, PurePosixPath

from harness.bundles.index import Index
from harness.bundles.parts import assemble
from harness.errors import ConfigurationError
from harness.events import read_untrusted
from harness.records import write_atomic

MARKER = ".bundle.json"
_MAX_MARKER = 1 << 20  # bytes


def unpack_once(parts: Path, index: Index, folder: Path) -> None:
    """See that `folder` holds the project of the index. Only what an earlier bundle brought is removed for it.

    Raises InfrastructureError for parts that are missing or damaged, ConfigurationError for an archive that holds
    anything but files below it.
    """
    content, names = _told(folder)
    if content == index.project:
        return
    archive = folder.with_name(f".{folder.name}.tar")
    assemble(parts, index.project, index.contents[index.project], index.parts, archive)
    try:
        with tarfile.open(archive, "r:") as tar:
            files = [(_place(member), member) for member in tar if not member.isdir()]
            coming = {place.parts[0] for place, _ in files}
            _tell(folder, "", coming | names)
            for name in names:
                _remove(folder / name)
            for place, member in files:
                _write(tar, member, folder / place)
    except tarfile.TarError as error:
        raise ConfigurationError(f"the bundle's project is no archive: {error}", "Make the bundle again.") from error
    finally:
        archive.unlink(missing_ok=True)
    _tell(folder, index.project, coming)


def _place(member: tarfile.TarInfo) -> PurePosixPath:
    place = PurePosixPath(member.name)
    if not member.isfile() or place.is_absolute() or not place.parts or ".." in place.parts:
        raise ConfigurationError(
            f"the bundle's project holds {member.name[:200]!r}, which is no file below it", "Make the bundle again."
        )
    return place


def _write(tar: tarfile.TarFile, member: tarfile.TarInfo, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    source = tar.extractfile(member)
    if source is None:
        raise tarfile.ReadError(f"{member.name} has no content")
    with source, target.open("wb") as file:
        shutil.copyfileobj(source, file)
        os.fchmod(file.fileno(), 0o755 if member.mode & 0o100 else 0o644)  # is part of an image's tag


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _told(folder: Path) -> tuple[str, set[str]]:
    """Which content the folder holds, nothing while one is being unpacked, and the names that bundles brought."""
    try:
        told = json.loads(read_untrusted(folder / MARKER, _MAX_MARKER) or b"{}")
        return str(told["content"]), set(map(str, told["names"]))
    except (ValueError, KeyError, TypeError):
        return "", set()


def _tell(folder: Path, content: str, names: set[str]) -> None:
    write_atomic(folder / MARKER, json.dumps({"content": content, "names": sorted(names)}) + "\n")
