"""A target's Dockerfile as steps that make the same environment without a container.

The Dockerfile is the one place that says what a target is made of. It is read here in the small vocabulary that ours
are written in; a word outside of it is an error, never left out: an environment is what the image is, or is not made.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from harness.dockerfiles import instructions, text_of
from harness.errors import ConfigurationError

VENV = "/opt/venv"  # of an image; in a step's arguments it stands for the environment's folder

# FROM: the base is Python, a compiler and an empty environment. USER, LABEL, ARG: of images and of their building only.
_WITHOUT_EFFECT = frozenset({"FROM", "USER", "LABEL", "ARG"})


@dataclass(frozen=True)
class Install:
    """Install what a lock says, hashes checked, nothing resolved."""

    lock: Path


@dataclass(frozen=True)
class Run:
    """Run the environment's Python with these arguments; those that begin with VENV may be patterns of files."""

    arguments: tuple[str, ...]


Step = Install | Run


def steps(dockerfile: Path, context: Path) -> tuple[Step, ...]:
    """What the Dockerfile does to its environment, in order. Raises ConfigurationError for what cannot be followed."""
    files: dict[str, Path] = {}
    found: list[Step] = []
    for line in instructions(text_of(dockerfile)):
        try:
            found += _follow(line, files, context)
        except ValueError as error:
            raise ConfigurationError(
                f"{dockerfile} cannot be followed without Docker: {error}",
                "It knows COPY, and RUN with install-locked and python3, joined by &&; or run with --backend docker.",
            ) from error
    return tuple(found)


def _follow(line: str, files: dict[str, Path], context: Path) -> list[Step]:
    """The steps of one instruction; what it copies goes into `files`. Raises ValueError with the words not known."""
    keyword, _, rest = line.partition(" ")
    if keyword == "COPY":
        files |= _copied(rest, context)
    elif keyword == "RUN":
        return [step for words in _commands(rest) for step in _steps_of(words, files)]
    elif keyword not in _WITHOUT_EFFECT:
        raise ValueError(line)
    return []


def _copied(rest: str, context: Path) -> dict[str, Path]:
    """Path in the image → file of the context."""
    *sources, target = shlex.split(rest)
    if any(source.startswith("--") or not (context / source).is_file() for source in sources):
        raise ValueError(f"COPY {rest}")
    folder = target.endswith("/")
    return {f"{target}{Path(source).name}" if folder else target: context / source for source in sources}


def _commands(rest: str) -> Iterator[Sequence[str]]:
    """The commands of a RUN, as words; mounts and settings of HOME are left out."""
    lexer = shlex.shlex(rest, posix=True, punctuation_chars=True)
    lexer.whitespace_split, lexer.commenters = True, ""
    for is_and, words in groupby(lexer, lambda word: word == "&&"):
        if not is_and:
            yield [word for word in words if not re.match(r"--mount=|HOME=", word)]


def _steps_of(words: Sequence[str], files: Mapping[str, Path]) -> Iterator[Step]:
    match list(words):
        case ["install-locked", lock] if lock in files:
            yield Install(files[lock])
        case ["python3", *arguments] if arguments:
            yield Run(tuple(_argument(word, files) for word in arguments))
        case ["rm", "-rf", "/tmp/*"]:  # noqa: S108 - what a layer should not keep
            return
        case _:
            raise ValueError(shlex.join(words))


def _argument(word: str, files: Mapping[str, Path]) -> str:
    if word in files:
        return str(files[word])
    if word.startswith("/") and not word.startswith(f"{VENV}/"):
        raise ValueError(word)
    return word
