"""What was fetched and packed for bundles before, in the user's cache: making one again, or going on, takes seconds."""

from __future__ import annotations

import contextlib
import csv
import hashlib
import io
import json
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import platformdirs
from packaging.utils import canonicalize_name
from pydantic import BaseModel, ConfigDict, ValidationError

from harness.bundles.index import Bytes, FileName, Sha256
from harness.bundles.parts import file_sha256
from harness.bundles.repack import LEVEL, encode, stored
from harness.bundles.wheels import Machine, Release
from harness.errors import InfrastructureError
from harness.images import locked
from harness.records import write_atomic

_DATA, _FACTS, _WORK = "data", "facts.json", ".work-"
MAX_RECORD = 64 << 20  # bytes

Form = Literal["packed", "raw", "record"]


class Facts(BaseModel):
    """A content's, of index.py, without its parts. `origin_bytes` of the file that the index gave."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: FileName
    sha256: Sha256
    bytes: Bytes
    encoding: Literal["raw", "zstd"]
    origin: Sha256 | None = None
    origin_bytes: Bytes
    data_bytes: Bytes


@dataclass(frozen=True)
class Packed:
    """A content as it is carried: `file` is what is cut into parts."""

    facts: Facts
    file: Path


@dataclass(frozen=True)
class Store:
    """One folder for each file of an index and form of it, and what releases came to on which machine."""

    root: Path
    level: int = LEVEL

    def find(self, release: Release, there: Machine, form: Form) -> Packed | None:
        """What this release was packed to before; None where it is not known, or not whole."""
        try:
            origin = json.loads(self._choice(release, there).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return self._packed(str(origin), form) if f"sha256:{origin}" in release.hashes else None

    def add(self, release: Release, there: Machine, form: Form, file: Path) -> Packed:
        """Pack the file that the release came to, if it is not there by another name."""
        origin = file_sha256(file)
        packed = self._packed(origin, form) or self._pack(origin, form, file)
        write_atomic(self._choice(release, there), json.dumps(origin))
        return packed

    def _choice(self, release: Release, there: Machine) -> Path:
        asked = json.dumps([release.name, release.version, release.hashes, release.source, there.python, there.tags()])
        return self.root / "choices" / hashlib.sha256(asked.encode()).hexdigest()

    def _folder(self, origin: str, form: Form) -> Path:
        return self.root / "files" / f"{origin}-{f'zstd{self.level}' if form == 'packed' else form}"

    def _packed(self, origin: str, form: Form) -> Packed | None:
        folder = self._folder(origin, form)
        with contextlib.suppress(OSError, ValidationError):
            facts = Facts.model_validate_json((folder / _FACTS).read_bytes())
            if (folder / _DATA).stat().st_size == facts.data_bytes:
                return Packed(facts, folder / _DATA)
        return None

    def _pack(self, origin: str, form: Form, file: Path) -> Packed:
        """By rename of the whole folder: one that has the name is whole."""
        folder = self._folder(origin, form)
        with self.scratch() as work:
            facts = self._written(origin, form, file, work / _DATA)
            write_atomic(work / _FACTS, facts.model_dump_json())
            shutil.rmtree(folder, ignore_errors=True)
            folder.parent.mkdir(parents=True, exist_ok=True)
            work.rename(folder)
        return Packed(facts, folder / _DATA)

    def _written(self, origin: str, form: Form, file: Path, target: Path) -> Facts:
        if form == "record":
            return _take_record(file, target)
        return _keep(origin, file, target) if form == "raw" else self._pack_wheel(origin, file, target)

    def _pack_wheel(self, origin: str, wheel: Path, target: Path) -> Facts:
        archive, size = target.with_name("archive"), wheel.stat().st_size
        if wheel.suffix != ".whl":
            return _keep(origin, wheel, target)
        stored(wheel, archive)
        encode(archive, target, self.level)
        if target.stat().st_size >= size:
            archive.unlink()
            return _keep(origin, wheel, target)
        made, length = file_sha256(archive), archive.stat().st_size
        archive.unlink()
        return Facts(
            name=wheel.name,
            sha256=made,
            bytes=length,
            encoding="zstd",
            origin=origin,
            origin_bytes=size,
            data_bytes=target.stat().st_size,
        )

    @contextlib.contextmanager
    def scratch(self) -> Iterator[Path]:
        """An empty folder beside the others, gone afterwards unless it was renamed."""
        folder = Path(tempfile.mkdtemp(prefix=_WORK, dir=self.root))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def open_store(say: Callable[[str], None], level: int = LEVEL) -> Iterator[Store]:
    """The user's store, for one at a time: what another one that was killed left half made is removed."""
    root = platformdirs.user_cache_path("vllm-matrix") / "bundles"
    root.mkdir(parents=True, exist_ok=True)
    with locked("bundles", say):
        for remnant in root.glob(f"{_WORK}*"):
            shutil.rmtree(remnant, ignore_errors=True)
        yield Store(root, level)


def _keep(origin: str, file: Path, target: Path) -> Facts:
    size = file.stat().st_size
    target.unlink(missing_ok=True)
    target.hardlink_to(file)  # of one folder, and about to be removed there
    return _raw(file.name, origin, size, size)


def _take_record(wheel: Path, target: Path) -> Facts:
    """Of a wheel only the list of its files and their hashes."""
    project, version = wheel.name.split("-")[:2]
    data = read_record(wheel)
    target.write_bytes(data)
    name = f"{canonicalize_name(project)}-{version}.RECORD"
    return _raw(name, hashlib.sha256(data).hexdigest(), len(data), wheel.stat().st_size)


def _raw(name: str, sha256: str, size: int, origin_bytes: int) -> Facts:
    return Facts(name=name, sha256=sha256, bytes=size, encoding="raw", origin_bytes=origin_bytes, data_bytes=size)


def read_record(wheel: Path) -> bytes:
    """Raises InfrastructureError for a wheel without a list of its files that can be used."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            (info,) = (info for info in archive.infolist() if _is_record(info.filename))
            if info.file_size > MAX_RECORD:
                raise ValueError(f"it has {info.file_size} bytes")  # noqa: TRY301 - told as any other
            data = archive.read(info)
        if not list(csv.reader(io.StringIO(data.decode()))):
            raise ValueError("it is empty")  # noqa: TRY301
    except (zipfile.BadZipFile, ValueError, csv.Error) as error:
        raise InfrastructureError(
            f"{wheel.name} has no RECORD that can be read: {error}", "It cannot be borrowed."
        ) from error
    return data


def _is_record(name: str) -> bool:
    folder, _, rest = name.partition("/")
    return folder.endswith(".dist-info") and rest == "RECORD"
