"""Wheels packed again: their files stored as they are in a zip archive, and one zstd stream over that.

A wheel's own compression works file by file, with a window of 32 KiB; libraries of CUDA hold the same things many
times over. The archive is what is installed in the end, so it is made the same, byte for byte, wherever it is made.
"""

from __future__ import annotations

import os
import shutil
import sys
import zipfile
from pathlib import Path

from harness.bundles.parts import BLOCK
from harness.errors import InfrastructureError

if sys.version_info >= (3, 14):
    from compression.zstd import CompressionParameter, ZstdFile
else:
    from backports.zstd import CompressionParameter, ZstdFile

LEVEL = 9  # measured on CUDA wheels: 12 takes twice the time for 1.5 % of a wheel, 6 saves a third and costs 3 %
WINDOW = 27  # log2 of bytes: the most that a decoder takes without being asked to
_STAMP = (1980, 1, 1, 0, 0, 0)  # the oldest that the format knows
_UNIX = 3


def stored(wheel: Path, target: Path) -> None:
    """Write the wheel's files, by name, without compression, dates and owners; permissions are kept.

    Raises InfrastructureError for a wheel that is no archive, or holds one name twice.
    """
    try:
        with zipfile.ZipFile(wheel) as source, zipfile.ZipFile(target, "w") as archive:
            members = sorted((info for info in source.infolist() if not info.is_dir()), key=lambda info: info.filename)
            if len({info.filename for info in members}) < len(members):
                raise zipfile.BadZipFile("it holds one name twice")  # noqa: TRY301 - told as any other
            for info in members:
                with source.open(info) as file, archive.open(_anew(info), "w") as copy:
                    shutil.copyfileobj(file, copy, BLOCK)
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError) as error:
        raise InfrastructureError(f"{wheel.name} cannot be packed again: {error}", "Is it a wheel?") from error


def _anew(info: zipfile.ZipInfo) -> zipfile.ZipInfo:
    made = zipfile.ZipInfo(info.filename, _STAMP)
    made.create_system = _UNIX
    made.external_attr = info.external_attr & (0o777 << 16) or 0o644 << 16
    made.file_size = info.file_size  # decides about the format for more than 2 GiB
    return made


def encode(path: Path, target: Path, level: int = LEVEL) -> None:
    """One zstd stream of the file, with both the long window and every core; the same, however many there are."""
    options: dict[int, int] = {
        CompressionParameter.compression_level: level,
        CompressionParameter.window_log: WINDOW,
        CompressionParameter.enable_long_distance_matching: 1,
        CompressionParameter.nb_workers: os.cpu_count() or 1,
    }
    with path.open("rb") as source, ZstdFile(target, "w", options=options) as stream:
        shutil.copyfileobj(source, stream, BLOCK)
