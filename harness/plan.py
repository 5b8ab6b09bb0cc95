"""matrix.toml → cells → a plan that says of every cell whether it will run, be reused or be NA, and why. Pure."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timedelta
from typing import Literal

from harness.cells import Cell, Deadlines, Resources, Selection, cell_question, matches, select
from harness.errors import ConfigurationError, NothingSelectedError
from harness.probes import Known
from harness.records import Record
from harness.spec import MatrixSpec, ScenarioSpec, TargetSpec, parse_size
from harness.status import NEVER_REUSED, Status

Action = Literal["run", "reuse", "na", "elsewhere"]  # elsewhere: another run of the same plan has the cell
Facts = Mapping[str, str]  # what a digest is made of: name → value


@dataclass(frozen=True, kw_only=True)
class Unmet:
    """Why a cell does not exist in its target: a capability that its probe found lacking, in the words of the probe."""

    reason: str
    known: Known


@dataclass(frozen=True, kw_only=True)
class Planned:
    """What will be done about a cell. `reuse` names the record to take over, `unmet` what makes it NA."""

    cell: Cell
    digest: str
    facts: Facts
    action: Action
    reason: str
    selected: bool  # False: only here because another cell needs it as a reference
    reuse: Record | None = None
    unmet: Unmet | None = None


def expand(spec: MatrixSpec) -> tuple[Cell, ...]:
    """All cells of matrix.toml, references before the cells that read them. Raises ConfigurationError."""
    cells = [
        _cell(spec, target_id, target, device, name, scenario, dict(zip(scenario.parameters, values, strict=True)))
        for target_id, target in spec.targets.items()
        for device in target.devices
        for name, scenario in sorted(spec.scenarios.items(), key=lambda item: item[1].reference is not None)
        if device in scenario.devices
        for values in itertools.product(*scenario.parameters.values())
    ]
    for number, override in enumerate(spec.overrides):
        if not any(matches(override.select, cell.id) for cell in cells):
            raise ConfigurationError(f"matrix.toml: overrides[{number}].select = {override.select!r} matches no cell")
    return tuple(cells)


def _cell(
    spec: MatrixSpec,
    target_id: str,
    target: TargetSpec,
    device: str,
    name: str,
    scenario: ScenarioSpec,
    params: dict[str, str],
) -> Cell:
    cell_id = f"{target_id}@{device}/{cell_question(name, params)}"
    defaults = next((value for key, value in spec.devices.items() if key == device), None)
    options = {**(defaults.options if defaults else {}), **scenario.options}
    limits: dict[str, object] = {key: getattr(scenario, key) for key in _LIMITS}
    for override in spec.overrides:
        if matches(override.select, cell_id):
            options |= override.options
            limits |= {key: value for key in _LIMITS if (value := getattr(override, key)) is not None}
    return Cell(
        target=target_id,
        vllm=target.vllm,
        python=target.python,
        device=device,
        scenario=name,
        file=scenario.file or f"test_{name}.py",
        params=params,
        options=options,
        environment=spec.environment_of(target_id, device),
        ranks=scenario.ranks,
        resources=_resources(limits, scenario.gpus if device == "cuda" else 0),
        deadlines=_deadlines(limits, spec.run.timeout_multiplier),
        reference=_reference(spec, target_id, device, scenario, params),
    )


_LIMITS = ("cpus", "memory", "shm", "timeout", "silence", "start", "import_", "init")


def _resources(limits: Mapping[str, object], gpus: int) -> Resources:
    return Resources(
        cpus=float(str(limits["cpus"])),
        memory=parse_size(str(limits["memory"])),
        shm=parse_size(str(limits["shm"])),
        gpus=gpus,
    )


def _deadlines(limits: Mapping[str, object], multiplier: float) -> Deadlines:
    seconds = {name: float(str(limits[name])) for name in ("timeout", "silence", "start", "import_", "init")}
    return Deadlines(
        total=seconds["timeout"],
        silence=seconds["silence"],
        start=seconds["start"],
        phases={"import": seconds["import_"], "init": seconds["init"]},
    ).stretched(multiplier)


def _reference(
    spec: MatrixSpec, target_id: str, device: str, scenario: ScenarioSpec, params: Mapping[str, str]
) -> str | None:
    if scenario.reference is None:
        return None
    wanted = spec.scenarios[scenario.reference]
    shared = {name: params[name] for name in wanted.parameters}
    return f"{target_id}@{device}/{cell_question(scenario.reference, shared)}"


def choose(
    spec: MatrixSpec, cells: Sequence[Cell], selection: Selection, profile: str | None
) -> tuple[tuple[Cell, bool], ...]:
    """The cells to look at, each with whether it was selected (True) or is needed as a reference (False).

    Without a profile and without globs on ids, the default profile counts; without a device and without globs on ids,
    the default device; without globs on targets, those of the profile.
    Raises ConfigurationError for an unknown profile, NothingSelectedError for an idle selector.
    """
    name = profile or (None if selection.ids else spec.run.profile)
    devices = selection.devices or (() if selection.ids else (spec.run.device,))
    if name is not None and name not in spec.profiles:
        raise ConfigurationError(f"no such profile: {name}", f"Profiles in matrix.toml: {', '.join(spec.profiles)}.")
    _require_device(spec, devices)
    targets = selection.targets or (spec.profiles[name].targets if name is not None else ())
    chosen = select(
        cells, Selection(ids=selection.ids, targets=targets, devices=devices, scenarios=selection.scenarios)
    )
    if name is not None:
        globs = spec.profiles[name].select
        chosen = tuple(cell for cell in chosen if any(matches(glob, cell.id) for glob in globs))
        if not chosen:
            raise NothingSelectedError(f"profile {name} holds none of the selected cells", "Try `--profile full`.")
    ids = {cell.id for cell in chosen}
    needed = {cell.reference for cell in chosen if cell.reference} - ids
    return tuple((cell, cell.id in ids) for cell in cells if cell.id in ids or cell.id in needed)


def _require_device(spec: MatrixSpec, devices: Sequence[str]) -> None:
    offered = {device for target in spec.targets.values() for device in target.devices}
    for device in devices:
        if not any(matches(device, name) for name in offered):
            raise NothingSelectedError(
                f"no target has a lock for the device {device!r} yet",
                f"Devices that run today: {', '.join(sorted(offered)) or 'none'}.",
            )


def not_runnable(spec: MatrixSpec) -> tuple[str, ...]:
    """Targets that stand in matrix.toml but have no device to run on yet."""
    return tuple(name for name, target in spec.targets.items() if not target.devices)


def digest(facts: Facts) -> str:
    """sha256 over the facts, hex."""
    return hashlib.sha256(json.dumps(dict(facts), sort_keys=True).encode()).hexdigest()


def cell_facts(cell: Cell, shared: Facts) -> Facts:
    """What makes two runs of a cell the same: `shared` (image, suite, models, device class …) and the cell itself.

    Deadlines are left out: they only decide TIMEOUT, which is never reused.
    """
    return {
        **shared,
        "cell": cell.id,
        "options": _canonical({**cell.options}),
        "environment": _canonical({**cell.environment}),
        "resources": _canonical(asdict(cell.resources)),
        "seed": str(cell.seed),
        "ranks": str(cell.ranks),
    }


def _canonical(value: object) -> str:
    return json.dumps(value, sort_keys=True)


def decide(
    chosen: Iterable[tuple[Cell, bool]],
    facts: Mapping[str, Facts],
    earlier: Mapping[str, Sequence[Record]],
    now: datetime,
    max_age: timedelta,
    fresh: bool,
    unmet: Mapping[str, Unmet] | None = None,
) -> tuple[Planned, ...]:
    """The plan. `facts`, `earlier` (records of each cell, the newest first) and `unmet` are keyed by cell id.

    `fresh` forbids reuse. What is lacking goes first: it says the same as any record, or better.
    """
    plan: list[Planned] = []
    for cell, selected in chosen:
        own = dict(facts[cell.id])
        if cell.reference:
            own["reference"] = next(planned.digest for planned in plan if planned.cell.id == cell.reference)
        planned = Planned(cell=cell, digest=digest(own), facts=own, action="run", reason="", selected=selected)
        lacking = (unmet or {}).get(cell.id)
        if lacking is not None:
            plan.append(replace(planned, action="na", reason=lacking.reason, unmet=lacking))
            continue
        records = earlier.get(cell.id, ())
        same = next((record for record in records if record.digest == planned.digest), None)
        reason = "asked to run afresh" if fresh else _why_run(own, records, same, now, max_age)
        if reason is None:
            plan.append(replace(planned, action="reuse", reason=_why_reuse(same, now), reuse=same))
        else:
            plan.append(replace(planned, reason=reason))
    return tuple(plan)


def without_idle_references(plan: Sequence[Planned]) -> tuple[Planned, ...]:
    """The plan without what was only needed by cells that are NA by now."""
    wanted = {planned.cell.reference for planned in plan if planned.action != "na"}
    return tuple(planned for planned in plan if planned.selected or planned.cell.id in wanted)


def _why_run(
    facts: Facts, records: Sequence[Record], same: Record | None, now: datetime, max_age: timedelta
) -> str | None:
    """Why a cell has to run, or None where `same`, its newest record of equal digest, can be reused."""
    if same is None:
        return _what_changed(facts, records[0]) if records else "no record younger than the age limit"
    if same.status in NEVER_REUSED:
        return f"last time {same.status}"
    if same.status is Status.NA and same.exit is not None and not same.exit.started:
        return "last time NA without a start"  # by needs that were asked of it then: a digest knows nothing of them
    if same.started > now:
        return f"its last record is dated {same.started:%Y-%m-%d %H:%M}Z, which is still to come"
    if now - same.started > max_age:
        return f"last record is {_age(now - same.started)} old"
    return None


def _what_changed(facts: Facts, record: Record) -> str:
    names = sorted(key for key in {*facts, *record.facts} if facts.get(key) != record.facts.get(key))
    return f"changed since {record.started:%Y-%m-%d %H:%M}Z: {', '.join(names)}"


def _why_reuse(record: Record | None, now: datetime) -> str:
    return f"same inputs, {record.status} {_age(now - record.started)} ago" if record else ""


def _age(delta: timedelta) -> str:
    hours = delta.total_seconds() / 3600
    if hours < 1:
        return f"{delta.total_seconds() / 60:.0f} min"
    return f"{hours:.0f} h" if hours < 48 else f"{hours / 24:.0f} days"
