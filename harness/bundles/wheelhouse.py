"""What a bundle has for one target, as files from which uv installs without an index.

A wheel was packed again on its way, so that its hash is no longer the lock's. The lock is written again with the hashes
of what is here: bundle.json tells them, and which of the lock's own hashes each file had before.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from packaging.utils import (
    InvalidSdistFilename,
    InvalidWheelFilename,
    canonicalize_name,
    parse_sdist_filename,
    parse_wheel_filename,
)
from packaging.version import Version

from harness.bundles.borrow import lend
from harness.bundles.index import PARTS, Content, Index, TargetContents
from harness.bundles.parts import assemble, file_sha256
from harness.errors import BuildError
from harness.lockfile import wanted

Say = Callable[[str], None]
Release = tuple[str, Version]  # of a distribution, by its canonical name
MAX_THREADS = 16
MAX_RECORD = 64 << 20  # bytes


@dataclass(frozen=True, kw_only=True)
class Packages:
    """The packages of `target` (`vllm-0.8.5@cpu`) in the bundle `bundle`; their wheels are put together in `folder`.

    `site` holds what is borrowed: site-packages of a Python of this machine.
    """

    bundle: Path
    index: Index
    target: str
    folder: Path
    site: Path | None = None

    @property
    def _own(self) -> TargetContents:
        return self.index.targets[self.target]

    def fetch(self, say: Say) -> None:
        """See to it that the wheels are there, whole. Raises InfrastructureError for a missing or damaged part."""
        self.folder.mkdir(parents=True, exist_ok=True)
        wheels = [(sha256, self.index.contents[sha256]) for sha256 in self._own.contents]
        size = sum(content.bytes for _, content in wheels)
        say(f"{self.target}: {len(wheels)} wheels, {size / 1e9:.2f} GB unpacked")
        with ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1)) as pool:
            for _ in pool.map(self._fetch, sorted(wheels, key=lambda item: -item[1].bytes)):
                pass

    def _fetch(self, wheel: tuple[str, Content]) -> None:
        sha256, content = wheel
        path = self.folder / content.name
        if not (path.is_file() and path.stat().st_size == content.bytes and file_sha256(path) == sha256):
            assemble(self.bundle / PARTS, sha256, content, self.index.parts, path)

    def release(self, needed: Collection[str]) -> None:
        """Remove the wheels, but those that any of the targets `needed` has too: uv's cache has what is in them."""
        keep = {name for target in needed for name in self._names(target)}
        for name in set(self._names(self.target)) - keep:
            (self.folder / name).unlink(missing_ok=True)

    def _names(self, target: str) -> Iterator[str]:
        return (self.index.contents[sha256].name for sha256 in self.index.targets[target].contents)

    def lend(self, site_packages: Path, say: Say) -> None:
        """Put what is borrowed into an environment. Raises BuildError for the first file that is not the wheel's."""
        for name, borrowed in self._own.borrowed.items():
            if self.site is None:
                raise BuildError(
                    f"the bundle leaves {name} to the machine, and no folder of it was named",
                    "Pass --borrow-from with the site-packages that hold it.",
                )
            record = self._text(borrowed.record)
            how = lend(f"{name} {borrowed.version}", record, self.site, site_packages)
            say(f"{name} {borrowed.version} borrowed from {self.site}: {how}")

    def _text(self, sha256: str) -> str:
        content, path = self.index.contents[sha256], self.folder / f".{sha256}"
        if content.bytes > MAX_RECORD:
            raise BuildError(f"{content.name} is larger than {MAX_RECORD >> 20} MiB", "Make the bundle again.")
        assemble(self.bundle / PARTS, sha256, content, self.index.parts, path)
        try:
            return path.read_text(encoding="utf-8", errors="strict")
        except UnicodeDecodeError as error:
            raise BuildError(f"{content.name} is no text: {error}", "Make the bundle again.") from error
        finally:
            path.unlink()

    def rewritten(self, lock: Path, markers: Mapping[str, str]) -> str:
        """The lock where `markers` hold (variables of PEP 508), without what is borrowed, by the hashes of our files.

        Raises BuildError where the bundle has no file that the lock names.
        """
        text, files = lock.read_text(encoding="utf-8"), self._releases()
        lines = []
        for name, version in wanted(text, markers).items():
            if self._is_borrowed(name, version, lock):
                continue
            here = [sha256 for sha256, origin in files.get((name, Version(version)), ()) if f"sha256:{origin}" in text]
            if not here:
                raise BuildError(
                    f"the bundle has no {name} {version} for {self.target}", f"{lock} names it. Make the bundle again."
                )
            lines.append(" ".join([f"{name}=={version}", *(f"--hash=sha256:{sha256}" for sha256 in here)]))
        return "".join(f"{line}\n" for line in lines)

    def _is_borrowed(self, name: str, version: str, lock: Path) -> bool:
        borrowed = self._own.borrowed.get(name)
        if borrowed is None:
            return False
        if Version(borrowed.version) != Version(version):
            what = f"the bundle borrows {name} {borrowed.version}, and {lock} names {version}"
            raise BuildError(what, "Make the bundle again.")
        return True

    def _releases(self) -> dict[Release, list[tuple[str, str]]]:
        """Files of each release: their sha256, and the one that the lock knows."""
        found: dict[Release, list[tuple[str, str]]] = {}
        for sha256 in self._own.contents:
            content = self.index.contents[sha256]
            found.setdefault(release_of(content.name), []).append((sha256, content.origin or sha256))
        return found


def release_of(name: str) -> Release:
    """What a file of a package index holds. Raises BuildError for a name that none has."""
    try:
        if name.endswith(".whl"):
            project, version, _, _ = parse_wheel_filename(name)
        else:
            project, version = parse_sdist_filename(name)
    except (InvalidWheelFilename, InvalidSdistFilename) as error:
        raise BuildError(f"{name} is no name of a wheel or a source", "Make the bundle again.") from error
    return canonicalize_name(project), version
