"""Packs: one attempt of a run as one file, to be carried home from a machine that may vanish.

Nothing in it is believed. A pack is a tar archive under zstd: `plan.json`, what the run knows of the attempt's target,
and the attempt's folder. It is read header by header: regular files below these three places, and nothing else that
such an archive could hold.
"""

from __future__ import annotations

import io
import os
import re
import stat
import sys
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NoReturn

from harness.errors import ConfigurationError
from harness.events import MAX_FILE, clean, read_untrusted
from harness.evidence import no_evidence
from harness.plan import digest
from harness.planfile import PlanFile, PlannedEntry, read_plan
from harness.records import Record, is_at_home, read_record
from harness.targets import FOLDER, read_facts

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

SUFFIX = ".tar.zst"
MAX_PACKED = 1 << 30  # bytes
MAX_UNPACKED = 2 << 30  # bytes
MAX_MEMBERS = 10_000
MAX_NAME = 1_024  # bytes
_BLOCK = 1 << 20  # bytes read at once
_TAIL = 64 << 10  # bytes: what may follow the last file, all of it zeros
_OPTIONS: dict[int, int] = {zstd.CompressionParameter.checksum_flag: 1}
_RUN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_PLACES = re.compile(r"plan\.json|targets/[^/]+\.json|cells/[^/]+/attempt-[1-9][0-9]{0,5}/.+", re.DOTALL)


class RefusedError(ValueError):
    """A pack that is not taken; says why in a line."""


@dataclass(frozen=True, kw_only=True)
class Pack:
    """A pack that was unpacked to `folder` and holds together: its run's plan, and the record of its one attempt."""

    folder: Path
    plan: PlanFile
    record: Record

    @property
    def attempt(self) -> Path:
        return next(self.folder.glob("cells/*/attempt-*"))


def pack_new(run: Path, outbox: Path) -> tuple[Path, ...]:
    """Pack every attempt of a run that has a record and no pack yet; the packs that were made."""
    attempts = (path.parent for path in sorted(run.glob("cells/*/attempt-*/record.json")))
    new = [attempt for attempt in attempts if not (outbox / _name(run, attempt)).exists()]
    return tuple(pack(run, attempt, outbox) for attempt in new if read_record(attempt / "record.json"))


def pack(run: Path, attempt: Path, outbox: Path) -> Path:
    """Pack one attempt, by rename; a pack that is there already stays. The same files make the same bytes.

    Raises ConfigurationError where the attempt has no record.
    """
    path = outbox / _name(run, attempt)
    if path.exists():
        return path
    record = read_record(attempt / "record.json")
    if record is None:
        raise ConfigurationError(f"{attempt} has no record that can be read", "It was cut short: run it again.")
    outbox.mkdir(parents=True, exist_ok=True)
    temporary = outbox / f".{path.name}.{os.getpid()}"
    try:
        with zstd.ZstdFile(temporary, "w", options=_OPTIONS) as stream:
            _write(run, attempt, record, stream)
        temporary.replace(path)
    except OSError as error:  # a failed write names no file
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        temporary.unlink(missing_ok=True)
    return path


def _name(run: Path, attempt: Path) -> str:
    return f"{run.name}.{attempt.parent.name}.{attempt.name}{SUFFIX}"


def _write(run: Path, attempt: Path, record: Record, stream: io.BufferedIOBase) -> None:
    first = [run / "plan.json", run / FOLDER / f"{record.target}@{record.device}.json", attempt / "record.json"]
    # What a record is judged by goes before the rest, of which there may be more than fits
    rest = sorted(_evidence(attempt), key=lambda path: (not path.name.startswith(("events", "DONE")), path))
    rest = [path for path in rest if path not in first]
    left = MAX_UNPACKED
    with tarfile.open(fileobj=stream, mode="w|", format=tarfile.GNU_FORMAT) as archive:
        for path in [*first, *rest][:MAX_MEMBERS]:
            name = path.relative_to(run).as_posix()
            data = read_untrusted(path, MAX_FILE + 1)
            if data is None or not len(data) <= min(left, MAX_FILE) or not _is_name(name):
                continue
            left -= len(data)
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))


def _evidence(folder: Path) -> Iterator[Path]:
    for root, folders, files in os.walk(folder):
        left_out = {*no_evidence(root, [*folders, *files])}
        folders[:] = [name for name in folders if name not in left_out]  # what a link leads to is not walked into
        yield from (Path(root, name) for name in files if name not in left_out)


def _is_name(name: str) -> bool:
    """Of a file below one of the three places, that a terminal and a file system can bear."""
    parts = name.split("/")
    return (
        clean(name) == name
        and not {"\n", "\t"} & {*name}
        and len(name.encode()) <= MAX_NAME
        and all(part not in ("", ".", "..") and len(part.encode()) <= 255 for part in parts)
        and _PLACES.fullmatch(name) is not None
    )


def unpack(path: Path, folder: Path) -> Pack:
    """Unpack into a folder that is ours and empty, and see whether it holds together.

    Raises RefusedError; then what lies in the folder is to be thrown away.
    """
    with _opened(path) as file:
        try:
            with zstd.ZstdFile(file) as stream:
                _extract(stream, folder)
        except (zstd.ZstdError, EOFError, tarfile.HeaderError, UnicodeError) as error:
            _refuse(f"it is damaged, or no pack: {error}")
        except (FileExistsError, NotADirectoryError):
            _refuse("one of its files lies below another one")
    return _examined(folder)


def _refuse(why: str) -> NoReturn:
    raise RefusedError(clean(" ".join(why.split()))[:300])


def _opened(path: Path) -> IO[bytes]:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        _refuse(f"it cannot be read: {error.strerror}")
    state = os.fstat(descriptor)
    if stat.S_ISREG(state.st_mode) and state.st_size <= MAX_PACKED:
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    _refuse(f"it is no file, or larger than {MAX_PACKED >> 20} MiB")


def _extract(stream: io.BufferedIOBase, folder: Path) -> None:
    names: set[str] = set()
    left = MAX_UNPACKED
    while (header := _header(stream)) is not None:
        name, size = header
        left -= size
        if not _is_name(name) or name in names:
            _refuse(f"it holds {name[:100]!r}, which is no name in a pack, or there twice")
        if not 0 <= size <= MAX_FILE or left < 0:
            _refuse(f"it is too large: {MAX_UNPACKED >> 30} GiB in all, {MAX_FILE >> 20} MiB a file")
        names.add(name)
        if len(names) > MAX_MEMBERS:
            _refuse(f"it holds more than {MAX_MEMBERS} files")
        _write_file(stream, size, folder / name)
    rest = stream.read(_TAIL + 1)
    if len(rest) > _TAIL or rest.strip(b"\0") or stream.read(1):
        _refuse("something follows its last file")


def _header(stream: io.BufferedIOBase) -> tuple[str, int] | None:
    """Name and size of the next file, or None at the end. Raises RefusedError for what is no regular file."""
    info, name = _info(stream), None
    if info is not None and info.type == tarfile.GNUTYPE_LONGNAME:
        if not 0 < info.size <= MAX_NAME + 1:
            _refuse("it holds a name that is too long")
        name = _exactly(stream, _padded(info.size))[: info.size].rstrip(b"\0").decode()
        info = _info(stream)
    if info is None:
        if name is not None:
            _refuse("it ends after a name")
        return None
    name = info.name if name is None else name
    if info.type != tarfile.REGTYPE:
        _refuse(f"it holds {name[:100]!r}, which is no regular file")
    return name, info.size


def _info(stream: io.BufferedIOBase) -> tarfile.TarInfo | None:
    block = _exactly(stream, tarfile.BLOCKSIZE)
    return tarfile.TarInfo.frombuf(block, "utf-8", "strict") if block.strip(b"\0") else None


def _padded(size: int) -> int:
    return -(-size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE


def _exactly(stream: io.BufferedIOBase, size: int) -> bytes:
    data = stream.read(size)
    while len(data) < size:
        more = stream.read(size - len(data))
        if not more:
            raise EOFError("it ends too early")
        data += more
    return data


def _write_file(stream: io.BufferedIOBase, size: int, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("xb") as file:
        for start in range(0, size, _BLOCK):
            file.write(_exactly(stream, min(_BLOCK, size - start)))
    _exactly(stream, _padded(size) - size)


def _examined(folder: Path) -> Pack:
    """Whether the parts of a pack belong to each other. Raises RefusedError."""
    plan = _plan(folder)
    attempts = sorted(folder.glob("cells/*/attempt-*"))
    if len(attempts) != 1:
        _refuse(f"it holds {len(attempts)} attempts instead of one")
    record = read_record(attempts[0] / "record.json")
    if record is None:
        _refuse("its record is missing or broken")
    if record.run != plan.run or not is_at_home(record, attempts[0] / "record.json"):
        _refuse("its record is of another run, cell or attempt")
    entry = next((entry for entry in plan.own if entry.cell.id == record.cell), None)
    if entry is None or not _is_of(record, entry):
        _refuse(f"its record is not of what its plan has for {record.cell}")
    pair = (record.target, record.device)
    files = [path.name for path in folder.glob(f"{FOLDER}/*")]
    facts = read_facts(folder, [pair])
    if files and (files != ["@".join(pair) + ".json"] or [(f.target, f.device) for f in facts] != [pair]):
        _refuse("what it says of its target is broken, or of another one")
    return Pack(folder=folder, plan=plan, record=record)


def _plan(folder: Path) -> PlanFile:
    try:
        plan = read_plan(folder)
        PlanFile.model_validate_json(plan.model_dump_json(by_alias=True))  # infinity can be read, and not be written
    except (ConfigurationError, ValueError):
        _refuse("its plan.json is missing or broken")
    if not _RUN.fullmatch(plan.run):
        _refuse("its plan.json names no run")
    if len({entry.cell.id for entry in plan.cells}) < len(plan.cells):
        _refuse("its plan.json has a cell twice")
    if any(digest(entry.facts) != entry.digest for entry in plan.cells):
        _refuse("its plan.json has a digest that is not that of its facts")
    return plan


def _is_of(record: Record, entry: PlannedEntry) -> bool:
    cell = entry.cell
    same = (record.digest, record.facts) == (entry.digest, entry.facts)
    own = (record.target, record.device, record.scenario, record.params, record.vllm)
    return same and own == (cell.target, cell.device, cell.scenario, {**cell.params}, cell.vllm)
