"""matrix.toml: its models, and the one error message a broken file gets."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, cast, get_args

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from harness.errors import ConfigurationError

SCHEMA = 1
CONFIG_NAME = "matrix.toml"

Device = Literal["cpu", "cuda"]
DEVICES: tuple[str, ...] = get_args(Device)

# What a cell id is made of. Punctuation stands alone and inside, which is what makes `cells.slug` injective.
Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9]+([._-][A-Za-z0-9]+)*$", max_length=64)]
Identifier = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9]*(_[a-z0-9]+)*$", max_length=48)]
Capability = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_]*(\.[a-z0-9_]+)?$", max_length=64)]
OptionValue = bool | int | float | str
Positive = Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)]


def _relative(value: str) -> str:
    path = Path(value)
    if path.is_absolute() or ".." in path.parts:
        raise ValueError("must be a path inside the folder of matrix.toml")
    return value


def _version(value: str) -> str:
    try:
        Version(value)
    except InvalidVersion as error:
        raise ValueError(f"{value!r} is not a version (PEP 440)") from error
    return value


def _size(value: str) -> str:
    parse_size(value)
    return value


def _requirement(value: str) -> str:
    try:
        Requirement(value)
    except InvalidRequirement as error:
        raise ValueError(f"{value!r} is not a requirement (PEP 508): {str(error).splitlines()[0]}") from error
    return value


def _exact(value: str) -> str:
    specifiers = list(Requirement(_requirement(value)).specifier)
    if len(specifiers) != 1 or specifiers[0].operator != "==" or "*" in specifiers[0].version:
        raise ValueError(f"{value!r} must name one version exactly, as in torch==2.6.0")
    return value


def _package(value: str) -> str:
    return canonicalize_name(value, validate=True)


RelativePath = Annotated[str, AfterValidator(_relative)]
VersionText = Annotated[str, AfterValidator(_version)]
Size = Annotated[str, AfterValidator(_size)]
RequirementText = Annotated[str, AfterValidator(_requirement)]
ExactRequirement = Annotated[str, AfterValidator(_exact)]
PackageName = Annotated[str, AfterValidator(_package)]
Reason = Annotated[str, StringConstraints(min_length=1, max_length=500)]

M = TypeVar("M", bound=BaseModel)

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


def parse_size(text: str) -> int:
    """Bytes of `6g`, `512m`, `64k`, `1024`. Raises ValueError."""
    match = re.fullmatch(r"(\d+)([kmg]?)", text.lower())
    if not match:
        raise ValueError(f"{text!r} is not a size such as 512m or 6g")
    return int(match[1]) * _UNITS[match[2]]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class RunSpec(_Model):
    profile: Identifier = "quick"
    device: Device = "cpu"
    max_age_days: Annotated[float, Field(gt=0, le=3650, allow_inf_nan=False)] = 7.0
    infra_retries: Annotated[int, Field(ge=0, le=5)] = 1
    timeout_multiplier: Positive = 1.0


class ImagesSpec(_Model):
    """`timeout` in seconds, for each build."""

    base: str = "debian:bookworm-slim"
    index_url: str | None = None
    timeout: Positive = 3600.0


class LocksSpec(_Model):
    """What all locks have in common. A package in a lock is at most `grace_days` younger than the vLLM release."""

    grace_days: Annotated[int, Field(ge=0, le=365)] = 28
    tools: tuple[RequirementText, ...] = ()


class ChangeSpec(_Model):
    """What locks change in what their packages ask for, and why.

    `take` is installed instead of whatever is asked for under that name, `drop` is left out whoever asks for it, `add`
    is installed although nobody asks for it.
    """

    take: tuple[RequirementText, ...] = ()
    drop: tuple[PackageName, ...] = ()
    add: tuple[RequirementText, ...] = ()
    reason: Reason
    link: str | None = None

    @model_validator(mode="after")
    def _changes_something(self) -> ChangeSpec:
        if not (self.take or self.drop or self.add):
            raise ValueError("changes nothing: give `take`, `drop` or `add`")
        return self


class StackSpec(_Model):
    """What is heavy and common: a lock of its own, installed first. `requires` is complete: nothing is resolved.

    `index` is asked before the common index, in the locks of all targets on this stack.
    """

    requires: Annotated[tuple[ExactRequirement, ...], Field(min_length=1)]
    changes: tuple[Identifier, ...] = ()
    index: str | None = None


class TargetDeviceSpec(_Model):
    """How a target is installed for one device. `lock` defaults to docker/<target>/<device>.lock, `dockerfile` to
    docker/<target>/Dockerfile for the CPU, Dockerfile.<device> for others.

    `build`: the target is built from its source distribution, with these tools. `later`: cut-off dates of single
    packages. `unlocked`: what is found installed although no lock names it, and why. `environment`: what cells of the
    target get besides, or instead of, the device's.
    """

    distribution: ExactRequirement
    stack: Name | None = None
    build: tuple[RequirementText, ...] = ()
    changes: tuple[Identifier, ...] = ()
    later: dict[PackageName, date] = {}
    unlocked: dict[PackageName, Reason] = {}
    environment: dict[str, str] = {}
    dockerfile: RelativePath | None = None
    lock: RelativePath | None = None


class TargetSpec(_Model):
    """`vllm` is the declared release line, `released` the day of the release whose distribution is installed.

    `candidate`: it declares a line that its version need not be of, as a build of a branch does.
    """

    vllm: VersionText
    candidate: bool = False
    python: Annotated[str, StringConstraints(pattern=r"^3\.\d+$")]
    released: date | None = None
    verl: VersionText | None = None
    devices: dict[Device, TargetDeviceSpec] = {}

    def on(self, device: str) -> TargetDeviceSpec:
        """How it is installed for that device. Raises KeyError where it has none."""
        return self.devices[cast("Device", device)]


class DeviceSpec(_Model):
    options: dict[Identifier, OptionValue] = {}
    environment: dict[str, str] = {}


class ScenarioSpec(_Model):
    """Deadlines in seconds: `timeout` and `start` from the container's start, to its end and to its first word;
    `silence` between two events; `import` and `init` for each phase of that name, as vLLM's import and an engine's.

    `needs`: capabilities that the probe has to find, by `*` or by `parameter=value`; without them a cell is NA.
    """

    file: RelativePath | None = None
    devices: tuple[Device, ...] = ("cpu", "cuda")
    parameters: dict[Identifier, Annotated[tuple[Name, ...], Field(min_length=1)]] = {}
    options: dict[Identifier, OptionValue] = {}
    needs: dict[str, tuple[Capability, ...]] = {}
    reference: Identifier | None = None
    gpus: Annotated[int, Field(ge=0)] = 1
    ranks: Annotated[int, Field(ge=1)] = 1
    cpus: Positive = 2.0
    memory: Size = "6g"
    shm: Size = "1g"
    timeout: Positive = 900.0
    silence: Positive = 300.0
    start: Positive = 120.0
    import_: Annotated[Positive, Field(alias="import")] = 300.0
    init: Positive = 600.0


class ProfileSpec(_Model):
    """Globs on cell ids, any of which selects; `targets`: globs on targets, one of which has to match too."""

    select: Annotated[tuple[str, ...], Field(min_length=1)]
    targets: tuple[str, ...] = ()


class OverrideSpec(_Model):
    """What cells matching `select` do otherwise; later overrides win."""

    select: str
    options: dict[Identifier, OptionValue] = {}
    cpus: Positive | None = None
    memory: Size | None = None
    shm: Size | None = None
    timeout: Positive | None = None
    silence: Positive | None = None
    start: Positive | None = None
    import_: Annotated[Positive | None, Field(alias="import")] = None
    init: Positive | None = None


class MatrixSpec(_Model):
    """The whole of matrix.toml."""

    schema_version: Annotated[Literal[1], Field(alias="schema")]
    suite: RelativePath = "scenarios"
    results: RelativePath = "results"
    expectations: RelativePath = "expectations.toml"
    run: RunSpec = RunSpec()
    images: ImagesSpec = ImagesSpec()
    locks: LocksSpec = LocksSpec()
    changes: dict[Identifier, ChangeSpec] = {}
    stacks: dict[Name, StackSpec] = {}
    targets: Annotated[dict[Name, TargetSpec], Field(min_length=1)]
    devices: dict[Device, DeviceSpec] = {}
    scenarios: Annotated[dict[Identifier, ScenarioSpec], Field(min_length=1)]
    profiles: dict[Identifier, ProfileSpec]
    overrides: tuple[OverrideSpec, ...] = ()

    def environment_of(self, target: str, device: str) -> dict[str, str]:
        """What all cells of a target on a device, and its probe, have in their environment."""
        shared = next((own.environment for name, own in self.devices.items() if name == device), {})
        return {**shared, **self.targets[target].on(device).environment}

    @model_validator(mode="after")
    def _names_resolve(self) -> MatrixSpec:
        if self.run.profile not in self.profiles:
            raise ValueError(_unknown("run.profile", self.run.profile, self.profiles))
        for name, scenario in self.scenarios.items():
            _check_reference(name, scenario, self.scenarios)
            _check_needs(name, scenario)
        for name, stack in self.stacks.items():
            _check_changes(f"stacks.{name}", stack.changes, self.changes)
        for name, target in self.targets.items():
            for device, own in target.devices.items():
                _check_target(f"targets.{name}.devices.{device}", target, own, self)
        return self


def _check_target(where: str, target: TargetSpec, own: TargetDeviceSpec, spec: MatrixSpec) -> None:
    _check_changes(where, own.changes, spec.changes)
    if own.stack is not None and own.stack not in spec.stacks:
        raise ValueError(_unknown(f"{where}.stack", own.stack, spec.stacks))
    line = Version(target.vllm).release
    release = Version(next(iter(Requirement(own.distribution).specifier)).version).release
    if not target.candidate and release[: len(line)] != line:
        raise ValueError(f"{where}.distribution: {own.distribution} is not of the release line {target.vllm}")


def _check_changes(where: str, names: tuple[str, ...], known: Mapping[str, object]) -> None:
    for name in names:
        if name not in known:
            raise ValueError(_unknown(f"{where}.changes", name, known))


def _check_needs(name: str, scenario: ScenarioSpec) -> None:
    known = {"*", *(f"{key}={value}" for key, values in scenario.parameters.items() for value in values)}
    for condition in scenario.needs:
        if condition not in known:
            raise ValueError(_unknown(f"scenarios.{name}.needs", condition, dict.fromkeys(sorted(known))))


def _check_reference(name: str, scenario: ScenarioSpec, scenarios: Mapping[str, ScenarioSpec]) -> None:
    where = f"scenarios.{name}.reference"
    if scenario.reference is None:
        return
    reference = scenarios.get(scenario.reference)
    if reference is None:
        raise ValueError(_unknown(where, scenario.reference, scenarios))
    if reference.reference is not None:
        raise ValueError(f"{where}: {scenario.reference} asks for a reference itself; a reference stands alone")
    for parameter, values in reference.parameters.items():
        missing = [v for v in scenario.parameters.get(parameter, ()) if v not in values]
        if missing or parameter not in scenario.parameters:
            raise ValueError(
                f"{where}: {scenario.reference} has the parameter {parameter} = {list(values)}; "
                f"{name} must have it too, with values among these"
            )


def _unknown(where: str, name: str, known: Mapping[str, object]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
    return f"{where}: no such name {name!r}; {hint}"


def read_toml(path: Path) -> dict[str, Any]:
    """Raises ConfigurationError that names the file and the line."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigurationError(f"{path} does not exist") from error
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{path} is not UTF-8 (byte {error.start})", "Save it as UTF-8.") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigurationError(f"{path} is not valid TOML: {error}", "Mend that line and run again.") from error
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror}") from error


def load_spec(path: Path) -> MatrixSpec:
    """Read and validate matrix.toml. Raises ConfigurationError with one line a fault."""
    return parse(MatrixSpec, read_toml(path), path)


def parse(model: type[M], data: object, path: Path) -> M:
    """Validate what was read from `path`. Raises ConfigurationError with one line a fault."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        lines = [_line(model, dict(fault)) for fault in error.errors()]
        text = f"{path} has {len(lines)} fault{'s' if len(lines) > 1 else ''}:"
        raise ConfigurationError("\n  ".join([text, *lines])) from error


def _line(model: type[BaseModel], fault: dict[str, Any]) -> str:
    where = ".".join(str(part) for part in fault["loc"] if part != "[key]") or "(top)"
    message = str(fault["msg"]).removeprefix("Value error, ")
    if fault["type"] == "extra_forbidden":
        near = difflib.get_close_matches(str(fault["loc"][-1]), sorted(_all_keys(model)), n=1)
        message = "unknown key" + (f"; did you mean {near[0]!r}?" if near else "")
    return message if where == "(top)" else f"{where}: {message}"


def _all_keys(model: type[BaseModel]) -> set[str]:
    """Every field name in this model and the models below it: what a mistyped key may have meant."""
    keys: set[str] = set()
    for name, field in model.model_fields.items():
        keys.add(field.alias or name)
        for inner in _models_in(field.annotation):
            keys |= _all_keys(inner)
    return keys


def _models_in(annotation: object) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for arg in get_args(annotation) for model in _models_in(arg)]
