"""Locks as they are written: what one names, at which version, and where. Pure; nothing is resolved."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from packaging.markers import Marker, UndefinedComparison, UndefinedEnvironmentName
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name, canonicalize_version
from packaging.version import InvalidVersion, Version

from harness.errors import ConfigurationError


@dataclass(frozen=True)
class Locked:
    """One entry: the version, the marker that says where it counts (None: everywhere), and the hashes of its files."""

    version: str
    marker: Marker | None
    hashes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.version} ; {self.marker}" if self.marker else self.version


def parse_lock(text: str) -> dict[str, tuple[Locked, ...]]:
    """Entries by canonical name; a lock for several platforms may have several of one name.

    Raises ConfigurationError for a line that names no exact version: a lock that is read in part proves nothing.
    """
    found: dict[str, tuple[Locked, ...]] = {}
    for line in _lines(text):
        name, entry = _entry(line)
        found[name] = (*found.get(name, ()), entry)
    return found


def _lines(text: str) -> list[str]:
    """Requirements with their hashes, without comments; continued lines joined."""
    joined = re.sub(r"\\[ \t]*\n", " ", re.sub(r"(?m)(^|\s)#.*$", "", text))
    lines = (line.strip() for line in joined.splitlines())
    return [line for line in lines if line and not line.startswith("-")]


def _entry(line: str) -> tuple[str, Locked]:
    try:
        requirement = Requirement(re.sub(r"\s--[a-z-]+[= ]\S+", "", line).strip())
    except InvalidRequirement as error:
        raise ConfigurationError(f"not a line of a lock: {line[:100]!r}") from error
    specifiers = list(requirement.specifier)
    if len(specifiers) != 1 or specifiers[0].operator != "==" or "*" in specifiers[0].version:
        raise ConfigurationError(f"a lock names exact versions, and not {line[:100]!r}")
    hashes = tuple(re.findall(r"\s--hash[= ](\S+)", line))
    return canonicalize_name(requirement.name), Locked(specifiers[0].version, requirement.marker, hashes)


def wanted(text: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Version by canonical name of what the lock installs where `environment` holds (variables of PEP 508).

    Raises ConfigurationError for a lock that cannot be read, or two versions of one name.
    """
    found: dict[str, str] = {}
    for name, entries in parse_lock(text).items():
        versions = {entry.version for entry in entries if _counts(entry, environment)}
        if len(versions) > 1:
            raise ConfigurationError(f"the lock names several versions of {name}: {', '.join(sorted(versions))}")
        found.update(dict.fromkeys([name] if versions else [], *versions))
    return found


def _counts(entry: Locked, environment: Mapping[str, str]) -> bool:
    if entry.marker is None:
        return True
    try:
        return entry.marker.evaluate(dict(environment))
    except (UndefinedComparison, UndefinedEnvironmentName, InvalidVersion) as error:
        raise ConfigurationError(f"the lock's marker {str(entry.marker)!r} cannot be told: {error}") from error


def public(version: str) -> str:
    """A version without its local part, in the one form that equal versions share; other text stays as it is."""
    try:
        return canonicalize_version(Version(version).public)
    except InvalidVersion:
        return version
