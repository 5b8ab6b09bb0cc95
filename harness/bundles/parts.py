"""Files as parts that are named by what is in them: cut, found lacking, put together again.

Nothing is believed on the way back: every part, and what they come to, is checked by size and sha256, and nothing is
unpacked beyond the size that is known beforehand. `folder` is always the one that holds the parts themselves.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Literal

from harness.bundles.index import Content
from harness.errors import InfrastructureError
from harness.events import read_untrusted

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

Lack = Literal["missing", "damaged"]
BLOCK = 4 << 20  # bytes read, or unpacked, at once
_AGAIN = "Carry it over again; `python3 run verify` in the bundle's folder names all that is missing or damaged."


def put(folder: Path, source: Path, limit: int) -> tuple[str, ...]:
    """Cut a file into parts of at most `limit` bytes; their names, in order. What is there already is kept.

    An empty file is one empty part. A part that is there, but is not what its name says, is written anew.
    """
    folder.mkdir(parents=True, exist_ok=True)
    size = source.stat().st_size
    return tuple(_put_one(folder, source, start, min(limit, size - start)) for start in range(0, max(size, 1), limit))


def _put_one(folder: Path, source: Path, start: int, size: int) -> str:
    total = hashlib.sha256()
    for block in _blocks(source, start, size):
        total.update(block)
    name = total.hexdigest()
    if lacking(folder, {name: size}, verify=True):
        write_blocks(folder / name, _blocks(source, start, size))
    return name


def _blocks(path: Path, start: int = 0, size: int | None = None) -> Iterator[bytes]:
    """A regular file's bytes from `start` on, `size` of them or all; fewer where it is shorter, or none of the kind."""
    left = sys.maxsize if size is None else size
    while left and (block := read_untrusted(path, min(BLOCK, left), start)):
        yield block
        start += len(block)
        left -= len(block)


def write_blocks(path: Path, blocks: Iterable[bytes]) -> None:
    """Write by rename: what has the name is whole. Raises OSError that names the file."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            file.writelines(blocks)
        temporary.replace(path)
    except OSError as error:  # a failed write names no file
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        temporary.unlink(missing_ok=True)


def lacking(folder: Path, parts: Mapping[str, int], verify: bool) -> dict[str, Lack]:
    """Which of these parts (bytes by sha256) are not there, or not as they should be.

    Without `verify` only their sizes are looked at. A link counts as missing.
    """
    found: dict[str, Lack] = {}
    for name, size in parts.items():
        path = folder / name
        if path.is_symlink() or not path.is_file():
            found[name] = "missing"
        elif path.stat().st_size != size or (verify and _sha256(_blocks(path)) != name):
            found[name] = "damaged"
    return found


def _sha256(blocks: Iterable[bytes]) -> str:
    total = hashlib.sha256()
    for block in blocks:
        total.update(block)
    return total.hexdigest()


def file_sha256(path: Path) -> str:
    """Of a regular file, read in blocks."""
    return _sha256(_blocks(path))


def assemble(folder: Path, sha256: str, content: Content, parts: Mapping[str, int], target: Path) -> None:
    """Put a content together, by rename: `target` is whole, or not there. `parts`: bytes by sha256, of the index.

    Raises InfrastructureError that names the part that is missing or damaged, or the content whose parts come to
    something else.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    write_blocks(target, read(folder, sha256, content, parts))


def read(folder: Path, sha256: str, content: Content, parts: Mapping[str, int]) -> Iterator[bytes]:
    """A content's bytes, in blocks, with the errors of `assemble`: none of them counts before the last one is there."""
    packed = _checked(folder, content, parts)
    blocks = _unpacked(content, packed) if content.encoding == "zstd" else packed
    return _as_told(sha256, content, blocks)


def _checked(folder: Path, content: Content, parts: Mapping[str, int]) -> Iterator[bytes]:
    """The parts' bytes. What is wrong with a part shows at its end: nothing counts before the content's own check."""
    for name in content.parts:
        total, left = hashlib.sha256(), parts[name]
        if lack := lacking(folder, {name: left}, verify=False).get(name):
            raise InfrastructureError(f"part {name} of {content.name} is {lack}", _AGAIN)
        for block in _blocks(folder / name, size=left):
            total.update(block)
            yield block
        if total.hexdigest() != name:
            raise InfrastructureError(f"part {name} of {content.name} is damaged", _AGAIN)


def _unpacked(content: Content, packed: Iterable[bytes]) -> Iterator[bytes]:
    """One zstd stream, in blocks of bounded size, whatever it unpacks to."""
    stream = zstd.ZstdDecompressor()  # refuses a window of more than 128 MiB
    try:
        for block in packed:
            yield stream.decompress(block, BLOCK)
            while not (stream.needs_input or stream.eof):
                yield stream.decompress(b"", BLOCK)
            if stream.unused_data:
                raise _wrong(content, "something follows its end")
    except (zstd.ZstdError, EOFError) as error:
        raise _wrong(content, str(error)) from error
    if not stream.eof:
        raise _wrong(content, "it ends too early")


def _as_told(sha256: str, content: Content, blocks: Iterable[bytes]) -> Iterator[bytes]:
    total, left = hashlib.sha256(), content.bytes
    for block in blocks:
        left -= len(block)
        if left < 0:
            raise _wrong(content, f"it is larger than {content.bytes} bytes")
        total.update(block)
        yield block
    if left or total.hexdigest() != sha256:
        raise _wrong(content, "its bytes are others")


def _wrong(content: Content, what: str) -> InfrastructureError:
    """Every part is what its name says: the index itself does not fit them."""
    return InfrastructureError(
        f"the parts of {content.name} do not make what bundle.json says: {what}", "Make the bundle again."
    )
