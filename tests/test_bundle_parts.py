"""Parts of a bundle, and wheels packed again: cut, found lacking, put together, and never believed."""

from __future__ import annotations

import hashlib
import os
import subprocess
import warnings
import zipfile
from pathlib import Path
from typing import Any

import pytest
from uv import find_uv_bin

from harness.bundles.index import Content
from harness.bundles.parts import assemble, file_sha256, lacking, put
from harness.bundles.repack import encode, stored
from harness.errors import InfrastructureError

DATA = b"".join(hashlib.sha256(bytes([n])).digest() for n in range(80))[:2_500] + bytes(5_000)


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class Box:
    """A folder of parts with one content."""

    def __init__(self, root: Path, carried: bytes = DATA, limit: int = 1_000, **facts: Any) -> None:
        self.folder, self.source, self.target = root / "parts", root / "source", root / "made" / "target"
        self.source.write_bytes(carried)
        self.names = put(self.folder, self.source, limit)
        self.content = Content(**{"name": "x-1", "bytes": len(DATA), "encoding": "raw", "parts": self.names, **facts})
        self.parts = {name: (self.folder / name).stat().st_size for name in self.names}

    def make(self, told: str = sha256(DATA)) -> bytes:
        assemble(self.folder, told, self.content, self.parts, self.target)
        return self.target.read_bytes()

    def refuses(self, match: str, told: str = sha256(DATA)) -> None:
        with pytest.raises(InfrastructureError, match=match):
            self.make(told)
        assert not self.target.exists()
        assert list(self.target.parent.iterdir()) == [], "nothing half made stays"


def packed(root: Path, data: bytes) -> bytes:
    (root / "plain").write_bytes(data)
    encode(root / "plain", root / "packed")
    return (root / "packed").read_bytes()


@pytest.mark.parametrize("limit", [1, 999, 1_000, 7_500, 1 << 40])
def test_it_is_put_together_as_it_was(tmp_path: Path, limit: int) -> None:
    box = Box(tmp_path, DATA[-3_000:] if limit == 1 else DATA, limit, bytes=3_000 if limit == 1 else len(DATA))
    assert all(size <= limit for size in box.parts.values())
    assert {path.name for path in box.folder.iterdir()} == set(box.names)
    assert box.make(file_sha256(box.source)) == box.source.read_bytes()


def test_an_empty_file_is_one_empty_part(tmp_path: Path) -> None:
    box = Box(tmp_path, b"", bytes=0)
    assert box.names == (sha256(b""),)
    assert box.make(sha256(b"")) == b""


def test_equal_parts_are_there_once_and_kept(tmp_path: Path) -> None:
    box = Box(tmp_path)
    assert len(box.names) == 8
    assert len(set(box.names)) < 8
    before = {name: (box.folder / name).stat().st_mtime_ns for name in box.names}
    again = Box(tmp_path)
    assert {name: (again.folder / name).stat().st_mtime_ns for name in again.names} == before


@pytest.mark.parametrize("damage", [b"", b"short", bytes(1_001), bytes(range(250)) * 4])
def test_a_damaged_part_is_found_told_and_made_again(tmp_path: Path, damage: bytes) -> None:
    box = Box(tmp_path)
    part = box.names[1]
    (box.folder / part).write_bytes(damage)
    assert lacking(box.folder, box.parts, verify=True) == {part: "damaged"}
    assert lacking(box.folder, box.parts, verify=False) == ({} if len(damage) == 1_000 else {part: "damaged"})
    box.refuses(f"part {part} of x-1 is damaged\n.*verify")
    assert lacking(box.folder, Box(tmp_path).parts, verify=True) == {}


def test_a_missing_part_is_told(tmp_path: Path) -> None:
    box = Box(tmp_path)
    first, last = box.names[0], box.names[-1]
    (box.folder / first).unlink()
    (box.folder / last).rename(tmp_path / "elsewhere")
    (box.folder / last).symlink_to(tmp_path / "elsewhere")
    assert lacking(box.folder, box.parts, verify=False) == {first: "missing", last: "missing"}
    box.refuses(f"part {first} of x-1 is missing")


def test_an_index_that_does_not_fit_its_parts_is_told(tmp_path: Path) -> None:
    Box(tmp_path, bytes=len(DATA) - 1).refuses("larger than 7499 bytes")
    Box(tmp_path, bytes=len(DATA) + 1).refuses("its bytes are others")
    Box(tmp_path).refuses("its bytes are others", told=sha256(b""))


def test_a_stream_is_unpacked_no_further_than_told(tmp_path: Path) -> None:
    bomb = packed(tmp_path, bytes(64 << 20))
    assert len(bomb) < 10_000
    Box(tmp_path, bomb, encoding="zstd").refuses("larger than 7500 bytes")


def test_a_stream_is_whole_and_alone(tmp_path: Path) -> None:
    stream = packed(tmp_path, DATA)
    assert Box(tmp_path, stream, encoding="zstd").make() == DATA
    (tmp_path / "made" / "target").unlink()
    for carried, match in (
        (stream[:-1], "ends too early"),
        (stream + b"x", "something follows"),
        (b"x" + stream, "do not make what bundle.json says"),
        (b"", "ends too early"),
    ):
        Box(tmp_path, carried, 1 << 20, encoding="zstd").refuses(match)


# --- wheels ----------------------------------------------------------------------------------------------------------

METADATA = "Metadata-Version: 2.1\nName: thing\nVersion: 1.0\n"
FILES = {
    "thing.py": ("x = 1\n", 0o644),
    "thing-1.0.data/scripts/tool": ("#!/bin/sh\n", 0o755),
    "thing-1.0.dist-info/METADATA": (METADATA, 0o644),
    "thing-1.0.dist-info/WHEEL": ("Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n", 0o644),
    "thing-1.0.dist-info/RECORD": ("", 0o664),
}


def wheel(path: Path, year: int, names: list[str], compression: int = zipfile.ZIP_DEFLATED) -> Path:
    with zipfile.ZipFile(path, "w", compression) as file:
        file.mkdir("thing-1.0.dist-info")
        for name in names:
            text, mode = FILES[name]
            info = zipfile.ZipInfo(name, (year, 1, 1, 0, 0, 0))
            info.external_attr = mode << 16
            file.writestr(info, text, compression)
    return path


def test_a_wheel_is_packed_the_same_wherever_it_was_made(tmp_path: Path) -> None:
    one, two = tmp_path / "one.zip", tmp_path / "two.zip"
    stored(wheel(tmp_path / "a.whl", 2020, list(FILES)), one)
    stored(wheel(tmp_path / "b.whl", 2024, list(reversed(FILES)), zipfile.ZIP_STORED), two)
    assert one.read_bytes() == two.read_bytes()
    with zipfile.ZipFile(one) as file:
        assert {info.filename: info.external_attr >> 16 for info in file.infolist()} == {
            name: mode for name, (_, mode) in FILES.items()
        }
        assert {info.compress_type for info in file.infolist()} == {zipfile.ZIP_STORED}
    assert packed(tmp_path, one.read_bytes()) == packed(tmp_path, two.read_bytes())


def test_what_was_packed_again_is_a_wheel(tmp_path: Path) -> None:
    original = wheel(tmp_path / "thing-1.0-py3-none-any.whl", 2020, list(FILES))
    again = tmp_path / "again" / original.name
    again.parent.mkdir()
    stored(original, again)
    lock = tmp_path / "lock"
    lock.write_text(f"thing==1.0 --hash=sha256:{file_sha256(again)}\n")
    install = [
        find_uv_bin(),
        "pip",
        "install",
        "--no-config",
        "--no-index",
        f"--find-links={again.parent}",
        "--no-deps",
    ]
    words = [*install, "--require-hashes", "-r", str(lock), "--target", str(tmp_path / "site")]
    subprocess.run(words, check=True, env={**os.environ, "UV_CACHE_DIR": str(tmp_path / "uv")}, capture_output=True)
    assert (tmp_path / "site" / "thing.py").read_text() == "x = 1\n"
    assert (tmp_path / "site" / "bin" / "tool").stat().st_mode & 0o111


def test_what_is_no_wheel_is_told(tmp_path: Path) -> None:
    (tmp_path / "x.whl").write_bytes(b"no archive")
    with pytest.raises(InfrastructureError, match=r"x\.whl cannot be packed again"):
        stored(tmp_path / "x.whl", tmp_path / "target")
    with warnings.catch_warnings(action="ignore"):
        wheel(tmp_path / "twice.whl", 2020, [*FILES, "thing.py"])
    with pytest.raises(InfrastructureError, match="one name twice"):
        stored(tmp_path / "twice.whl", tmp_path / "target")
