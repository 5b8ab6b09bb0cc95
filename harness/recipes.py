"""A target's Dockerfile as steps that make the same environment without a container.

The Dockerfile is the one place that says what a target is made of. It is read here in the small vocabulary that ours
are written in; a word outside of it is an error, never left out: an environment is what the image is, or is not made.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

from harness.dockerfiles import instructions, text_of
from harness.errors import ConfigurationError

VENV = "/opt/venv"  # of an image; in a step's arguments it stands for the environment's folder

# Of images and of their building only.
_WITHOUT_EFFECT = frozenset({"USER", "LABEL", "ARG"})
_FROM = re.compile(r"(?P<parent>\$\{BASE\}|\$BASE|[a-z][\w.-]*)(?: AS (?P<name>[a-z][\w.-]*))?")
_COPY_FROM = re.compile(r"--from=(?P<stage>\S+) (?P<source>\S+) (?P<target>\S+)")
_SITE_PACKAGES = re.compile(rf"{VENV}/lib/python3\.\d+/site-packages/?")


@dataclass(frozen=True)
class Install:
    """Install what a lock says, hashes checked, nothing resolved."""

    lock: Path


@dataclass(frozen=True)
class Run:
    """Run the environment's Python with these arguments.

    A Path is a file of the context. A string that begins with VENV may be a pattern of files of the environment; one
    that begins with another folder of an image is a place for what a stage makes.
    """

    arguments: tuple[str | Path, ...]


@dataclass(frozen=True)
class Copy:
    """Copy into site-packages what is in `source`, a folder that `steps` make in an environment of their own."""

    steps: tuple[Step, ...]
    source: str


Step = Install | Run | Copy


def steps(dockerfile: Path, context: Path) -> tuple[Step, ...]:
    """What the Dockerfile does to its environment, in order. Raises ConfigurationError for what cannot be followed."""
    try:
        return _followed(_last_stage(instructions(text_of(dockerfile))), context, ())
    except ValueError as error:
        raise ConfigurationError(
            f"{dockerfile} cannot be followed without Docker: {error}",
            "It knows stages, COPY, and RUN of install-locked and python3, joined by &&; or run with --backend docker.",
        ) from error


def made_from_source(recipe: Iterable[Step]) -> bool:
    """Whether something is made in a stage of its own: only compiling is worth one."""
    return any(isinstance(step, Copy) for step in recipe)


# --- stages ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Stage:
    """One FROM: the stage that it stands on (None: the base), those that it may copy from, and its instructions.

    The base is Python, a compiler and an empty environment: the host's part.
    """

    name: str | None
    parent: _Stage | None
    earlier: Mapping[str, _Stage]
    lines: list[str] = field(default_factory=list)

    def chain(self) -> Iterator[tuple[_Stage, str]]:
        """All instructions from the base on, each with the stage that it stands in."""
        if self.parent is not None:
            yield from self.parent.chain()
        for line in self.lines:
            yield self, line


def _last_stage(lines: Iterable[str]) -> _Stage:
    named: dict[str, _Stage] = {}
    stage: _Stage | None = None
    for line in lines:
        keyword, _, rest = line.partition(" ")
        if keyword == "FROM":
            stage = _begun(rest, named)
            if stage.name is not None:
                named[stage.name] = stage
        elif stage is not None:
            stage.lines.append(line)
        elif keyword != "ARG":
            raise ValueError(line)
    if stage is None:
        raise ValueError("it has no FROM")
    return stage


def _begun(rest: str, named: Mapping[str, _Stage]) -> _Stage:
    match = _FROM.fullmatch(rest)
    on_base = match is not None and match["parent"].startswith("$")
    if match is None or not (on_base or match["parent"] in named):
        raise ValueError(f"FROM {rest}")
    return _Stage(match["name"], None if on_base else named[match["parent"]], dict(named))


def _followed(stage: _Stage, context: Path, outputs: Sequence[str]) -> tuple[Step, ...]:
    """The steps of a stage, those of the stages under it first. `outputs` are the folders that it is made for."""
    files: dict[str, Path] = {}
    found: list[Step] = []
    for owner, line in stage.chain():
        keyword, _, rest = line.partition(" ")
        if keyword == "COPY" and rest.startswith("--from="):
            found.append(_copy(rest, owner, context))
        elif keyword == "COPY":
            files |= _copied(rest, context)
        elif keyword == "RUN":
            found += [step for words in _commands(rest) for step in _steps_of(words, files, outputs)]
        elif keyword not in _WITHOUT_EFFECT:
            raise ValueError(line)
    return tuple(found)


def _copy(rest: str, stage: _Stage, context: Path) -> Copy:
    """What an earlier stage made goes into site-packages, whatever minor version of Python its path names."""
    match = _COPY_FROM.fullmatch(rest)
    if match is None or match["stage"] not in stage.earlier or not _SITE_PACKAGES.fullmatch(match["target"]):
        raise ValueError(f"COPY {rest}")
    source = match["source"].removesuffix("/")
    if not re.fullmatch(r"/opt/[\w-]+", source) or source == VENV:
        raise ValueError(f"COPY {rest}")
    return Copy(_followed(stage.earlier[match["stage"]], context, (source,)), source)


# --- instructions ----------------------------------------------------------------------------------------------------


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


def _steps_of(words: Sequence[str], files: Mapping[str, Path], outputs: Sequence[str]) -> Iterator[Step]:
    match list(words):
        case ["install-locked", lock] if lock in files:
            yield Install(files[lock])
        case ["python3", *arguments] if arguments:
            yield Run(tuple(_argument(word, files, outputs) for word in arguments))
        case ["rm", "-rf", "/tmp/*"]:  # noqa: S108 - what a layer should not keep
            return
        case _:
            raise ValueError(shlex.join(words))


def _argument(word: str, files: Mapping[str, Path], outputs: Sequence[str]) -> str | Path:
    if word in files:
        return files[word]
    known = word in outputs or word.startswith(f"{VENV}/")
    if (word.startswith("/") and not known) or "=/" in word:
        raise ValueError(word)
    return word
