"""Contents and parts as they are put into a bundle's folder."""

from __future__ import annotations

from pathlib import Path

from harness.bundles.index import Content, Index
from harness.bundles.parts import lacking, put
from harness.bundles.store import Packed


class Writer:
    """What was put there so far, described; what the old index says is there in full, is left alone."""

    def __init__(self, folder: Path, limit: int, old: Index | None) -> None:
        self.contents: dict[str, Content] = {}
        self.parts: dict[str, int] = {}
        self._folder, self._limit, self._old = folder, limit, old

    def add(self, packed: Packed) -> str:
        """The content's sha256."""
        facts = packed.facts
        if not self.keep(facts.sha256, facts.name):
            parts = put(self._folder, packed.file, self._limit)
            content = Content(
                name=facts.name, bytes=facts.bytes, encoding=facts.encoding, parts=parts, origin=facts.origin
            )
            self._describe(facts.sha256, content)
        return facts.sha256

    def keep(self, sha256: str, name: str) -> bool:
        """Take over a content that is there already, by this bundle or the old one; whether it is."""
        content = self.contents.get(sha256) or self._kept(sha256, name)
        if content is not None:
            self._describe(sha256, content)
        return content is not None

    def _kept(self, sha256: str, name: str) -> Content | None:
        content = self._old.contents.get(sha256) if self._old else None
        if self._old is None or content is None or content.name != name:
            return None
        parts = self._old.parts_of([sha256])
        fits = max(parts.values()) <= self._limit
        return content if fits and not lacking(self._folder, parts, verify=False) else None

    def _describe(self, sha256: str, content: Content) -> None:
        self.contents[sha256] = content
        self.parts |= {part: (self._folder / part).stat().st_size for part in content.parts}
