"""Dockerfiles as far as a tag needs them: which files of the context one copies, and a hash of files. No engine."""

from __future__ import annotations

import hashlib
import os
import re
import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path

from harness.errors import ConfigurationError

# Mounts of a RUN that bring nothing in: all but `bind`, which is also what a mount without a type is.
_HARMLESS_MOUNT = re.compile(r"--mount=(?=\S*\btype=(?:cache|secret|tmpfs|ssh)\b)(?!\S*\bfrom=)")


def copied(dockerfile: Path, context: Path) -> tuple[Path, ...]:
    """The files of the context that a Dockerfile copies in any of its stages, sorted: folders and patterns expanded."""
    found: set[Path] = set()
    for source in _sources(dockerfile):
        matches = [path for match in context.glob(source.lstrip("/")) for path in (match, *match.rglob("*"))]
        files = [path for path in matches if path.is_file()]
        if not files:
            raise ConfigurationError(f"{dockerfile} copies {source}, which is not in {context}")
        found.update(files)
    return tuple(sorted(found))


def _sources(dockerfile: Path) -> Iterator[str]:
    """The sources of each COPY. What would bring in files unseen by the tag is refused."""
    stages: set[str] = set()
    for line in instructions(text_of(dockerfile)):
        keyword, _, rest = line.partition(" ")
        if named := stage_of(line):
            stages.add(named)
        words = shlex.split(rest) if keyword.upper() == "COPY" else []
        flags = [word for word in words if word.startswith("--")]
        source = next((flag.removeprefix("--from=") for flag in flags if flag.startswith("--from=")), None)
        if _goes_past(keyword, rest) or (source is not None and source.lower() not in stages):
            raise ConfigurationError(
                f"{dockerfile}: {line[:60]!r} takes files past the image's tag",
                "Use COPY, from the context or from an earlier stage by its name: those files are part of it.",
            )
        if not words or source is not None:
            continue
        if words[len(flags)].startswith("["):
            raise ConfigurationError(f"{dockerfile}: write COPY in its plain form, without [ ]")
        yield from words[len(flags) : -1]


def _goes_past(keyword: str, rest: str) -> bool:
    """Whether an instruction brings in files that are neither of the context's COPYs nor of a stage's."""
    if keyword.upper() == "ADD":
        return True
    mounts = [word for word in rest.split() if word.startswith("--mount")] if keyword.upper() == "RUN" else []
    return not all(_HARMLESS_MOUNT.match(mount) for mount in mounts)


def stage_of(line: str) -> str | None:
    """The name that an instruction gives to a stage: y of `FROM x AS y`."""
    match = re.fullmatch(r"from \S+ as (\S+)", line.lower())
    return match[1] if match else None


def instructions(text: str) -> list[str]:
    """A Dockerfile's instructions, one a line: comments dropped, continued lines joined."""
    kept = "\n".join(line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#"))
    return [re.sub(r"\s+", " ", line).strip() for line in re.sub(r"\\[ \t]*\n", " ", kept).splitlines()]


def text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path} cannot be read: {error}") from error


def digest(folder: Path, files: Iterable[Path], extra: Iterable[str]) -> str:
    """12 hex digits of names, contents and execute bits of `files`, and of `extra`."""
    total = hashlib.sha256()
    for path in files:
        name = path.relative_to(folder).as_posix() if path.is_relative_to(folder) else path.name
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        total.update(f"{name}\0{content}\0{os.access(path, os.X_OK):d}\n".encode())
    total.update("\0".join(extra).encode())
    return total.hexdigest()[:12]
