"""What a target's probe left (`rig.examine`): read without trust, held against the lock, kept by image.

Nothing here starts a container but `run_probe`; nothing here decides what a cell's status is.
"""

from __future__ import annotations

import hashlib
import json
import platform
import re
import shutil
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import platformdirs
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from harness.backends.base import Backend, Launch
from harness.errors import InfrastructureError
from harness.events import Finite, LongText, Text, clean, read_untrusted
from harness.lockfile import public, wanted
from harness.records import Count, ImageRef, write_atomic
from harness.spec import ChangeSpec
from harness.stop import Stop

COMMAND = ("python3", "-m", "rig.examine")
FILE = "probe.json"
MAX_PROBE = 4 << 20  # bytes
DEADLINE = 300.0  # seconds in all
QUESTION = 60.0  # seconds for each question that the probe asks in a process of its own

# The files of the suite that the probe is made of; a test compares.
SOURCES = tuple(
    f"rig/{name}.py"
    for name in (
        "__init__", "apart", "barrier", "batches", "cache", "cell", "checkpoint", "completion", "engine", "errors",
        "events", "examine", "hello", "launcher", "marks", "outcomes", "probe", "questions", "reference", "reports",
        "spmd", "stacks", "sweep", "weights", "worker",
    )
)  # fmt: skip


class _Model(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True, populate_by_name=True)


class Markers(_Model):
    """The variables of PEP 508. All of them: one that is missing would be taken from this host."""

    os_name: Text
    sys_platform: Text
    platform_machine: Text
    platform_python_implementation: Text
    platform_release: Text
    platform_system: Text
    platform_version: Text
    python_version: Text
    python_full_version: Text
    implementation_name: Text
    implementation_version: Text


class Capability(_Model):
    """Something that scenarios may need. `said`: a few words on it, the engine's own where it refuses; `by`: what was
    looked at."""

    name: Annotated[Text, Field(min_length=1)]
    available: bool
    said: Text = ""
    by: Text

    @property
    def lack(self) -> str:
        """As the reason of an NA."""
        return f"{self.name}: {self.said or 'not available'} (probed: {self.by})"


class Unmet(_Model):
    """A requirement that what is installed does not meet: who asks for what, and what was found (empty: nothing)."""

    by: Text
    name: Text
    asks: Text
    found: Text = ""


class Probe(_Model):
    """The whole of probe.json. `complete`: it came to its end; `error`: the traceback where vLLM does not import."""

    schema_version: Annotated[Literal[1], Field(alias="schema")]
    device: Text
    complete: bool
    python: Text
    platform: Text
    machine: Text
    markers: Markers
    distributions: Annotated[dict[Text, Text], Field(max_length=5_000)]
    unmet: Annotated[tuple[Unmet, ...], Field(max_length=2_000)] = ()
    engine_options: Annotated[tuple[Text, ...], Field(max_length=2_000)] = ()
    sampling_options: Annotated[tuple[Text, ...], Field(max_length=2_000)] = ()
    methods: Annotated[dict[Text, Text], Field(max_length=2_000)] = {}
    architectures: Annotated[tuple[Text, ...], Field(max_length=5_000)] = ()
    capabilities: Annotated[tuple[Capability, ...], Field(max_length=500)] = ()
    faults: Annotated[tuple[Text, ...], Field(max_length=500)] = ()
    seconds: Annotated[dict[Text, Finite], Field(max_length=50)] = {}
    error: LongText = ""

    @field_validator("capabilities")
    @classmethod
    def _each_once(cls, found: tuple[Capability, ...]) -> tuple[Capability, ...]:
        if len({capability.name for capability in found}) != len(found):
            raise ValueError("a capability is there twice")
        return found

    @property
    def sound(self) -> bool:
        """Whether everything was found that can be: asked again, it would say the same."""
        return self.complete and not self.faults and not self.error

    @property
    def trouble(self) -> str:
        """One line on what is missing; empty if nothing is."""
        if self.error:
            return f"vLLM does not import: {(self.error.strip().splitlines() or ['it does not say why'])[-1]}"
        if not self.complete:
            return "it did not come to its end"
        return "; ".join(self.faults)

    def lack(self, needs: tuple[str, ...]) -> str:
        """Why a cell with these needs does not exist here; empty where it does, and where nobody can tell."""
        found = {capability.name: capability for capability in self.capabilities}
        lacking = (found[name].lack for name in needs if name in found and not found[name].available)
        return next(lacking, "")


def parse_probe(data: bytes | None) -> Probe:
    """Raises ValueError that says in one line why it cannot be used."""
    if data is None:
        raise ValueError(f"it left no {FILE}")
    if len(data) > MAX_PROBE:
        raise ValueError(f"its {FILE} is larger than {MAX_PROBE >> 20} MiB")
    try:
        return Probe.model_validate_json(data)
    except ValidationError as error:
        fault = error.errors()[0]
        where = ".".join(str(part) for part in fault["loc"]) or "(top)"
        raise ValueError(clean(f"its {FILE} is none: {where}: {fault['msg']}")[:300]) from error


def read_probe(out: Path) -> Probe:
    """What a container left. Raises ValueError."""
    return parse_probe(read_untrusted(out / FILE, MAX_PROBE + 1))


def to_json(probe: Probe) -> str:
    return probe.model_dump_json(by_alias=True, indent=1) + "\n"


# --- held against the lock --------------------------------------------------------------------------------------------


def differences(probe: Probe, lock: str, distribution: str, unlocked: Mapping[str, str]) -> tuple[str, ...]:
    """What is installed otherwise than the lock says, a line each; `distribution` is vLLM's, with its version.

    Versions are compared without their local part. Raises ConfigurationError for a lock that cannot be read.
    """
    asked = Requirement(distribution)
    vllm: dict[str, str] = {canonicalize_name(asked.name): next(iter(asked.specifier)).version}
    installed: dict[str, str] = {canonicalize_name(name): version for name, version in probe.distributions.items()}
    named = wanted(lock, probe.markers.model_dump())
    lines = []
    for name, version in sorted((named | vllm).items()):
        if name not in installed:
            lines.append(f"{name} {version} is not installed")
        elif public(installed[name]) != public(version):
            lines.append(f"{name} is {installed[name]}, and should be {version}")
    strangers = sorted(set(installed) - set(named) - set(vllm) - {canonicalize_name(name) for name in unlocked})
    return (*lines, *(f"{name} {installed[name]} is in no lock" for name in strangers))


def unexplained(probe: Probe, changes: Iterable[ChangeSpec], stack: Iterable[str]) -> tuple[str, ...]:
    """Requirements that are not met, and that no change of matrix.toml stands for, a line each.

    A stack's packages may be of another build than is asked for (2.6.0 for 2.6.0+cpu), never of another release: an
    override silences the resolver, and what was compiled against torch 2.6 ends a process with torch 2.7.
    """
    changes = tuple(changes)
    dropped = {name for change in changes for name in change.drop}
    taken = {canonicalize_name(Requirement(text).name) for change in changes for text in change.take}
    stacked = {canonicalize_name(Requirement(text).name) for text in stack}

    def explained(unmet: Unmet) -> bool:
        if not unmet.found:
            return unmet.name in dropped
        return unmet.name in taken or (unmet.name in stacked and _same_release(unmet))

    return tuple(
        f"{unmet.by} asks for {unmet.asks}, and {f'it is {unmet.found}' if unmet.found else 'it is not there'}"
        for unmet in probe.unmet
        if not explained(unmet)
    )


def _same_release(unmet: Unmet) -> bool:
    """Whether it would be met if no build was asked for."""
    try:
        return Requirement(re.sub(r"\+[A-Za-z0-9.]+", "", unmet.asks)).specifier.contains(public(unmet.found), True)
    except (InvalidRequirement, InvalidVersion):
        return False


# --- kept by image ----------------------------------------------------------------------------------------------------


class Known(_Model):
    """A probe that was made, and of what."""

    schema_version: Annotated[Literal[1], Field(alias="schema")] = 1
    image: ImageRef
    image_bytes: Count
    seconds: float  # that it took, container included
    probe: Probe


@dataclass(frozen=True, kw_only=True)
class Shelf:
    """Where probes are kept that this suite would make again in the same words, with these models."""

    root: Path
    suite: Path
    models: str

    def find(self, tag: str, device: str, environment: Mapping[str, str], image_id: str | None = None) -> Known | None:
        """None where there is none, where it is damaged, and where the image of that tag is now another one."""
        data = read_untrusted(self._path(tag, device, environment), 2 * MAX_PROBE)
        try:
            known = Known.model_validate_json(data) if data is not None else None
        except ValidationError:
            return None
        if known is None or known.image.tag != tag or known.probe.device != device or not known.probe.sound:
            return None
        return known if image_id in (None, known.image.id) else None

    def keep(self, known: Known, environment: Mapping[str, str]) -> None:
        """Only what would come out the same again. A full disk costs the next run a probe, and nothing else."""
        if known.probe.sound:
            text = known.model_dump_json(by_alias=True, indent=1) + "\n"
            try:
                write_atomic(self._path(known.image.tag, known.probe.device, environment), text)
            except OSError:
                return

    def _path(self, tag: str, device: str, environment: Mapping[str, str]) -> Path:
        sources = [hashlib.sha256((self.suite / name).read_bytes()).hexdigest() for name in self._sources()]
        facts = [tag, device, platform.machine(), sorted(environment.items()), self.models, sources]
        return self.root / f"{hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:24]}.json"

    def _sources(self) -> list[str]:
        return [name for name in SOURCES if (self.suite / name).is_file()]


def shelf(suite: Path, models: str) -> Shelf:
    """The user's own."""
    return Shelf(root=platformdirs.user_cache_path("vllm-matrix") / "probes", suite=suite, models=models)


# --- made -------------------------------------------------------------------------------------------------------------


def run_probe(backend: Backend, launch: Launch, deadline: float, stop: Stop) -> Probe:
    """Start it, wait, and read what it left. Raises ValueError in one line where that is nothing of use.

    Raises KeyboardInterrupt, when nothing of it is left, where `stop` is set.
    """
    shutil.rmtree(launch.folder, ignore_errors=True)
    for name in ("in", "out"):
        (launch.folder / name).mkdir(parents=True)
    try:
        running = backend.start(launch)
    except InfrastructureError as error:
        raise ValueError(f"it could not be started: {error.message}") from error
    end = time.monotonic() + deadline
    late = False
    try:
        while not (stop.asked or late or running.ended(0.5)):
            late = time.monotonic() > end
    finally:
        state = running.close()
    if stop.asked:
        raise KeyboardInterrupt
    try:
        return read_probe(launch.folder / "out")
    except ValueError as error:
        how = f"ended after {deadline:.0f} s" if late else state.error or f"exit code {state.exit_code}"
        raise ValueError(f"{error} ({how})") from error
