"""A cell: target × device × scenario × parameters; its id, its slug, and globs over ids."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from harness.errors import NothingSelectedError
from harness.spec import OptionValue


@dataclass(frozen=True, kw_only=True)
class Deadlines:
    """Seconds: `total` and `start` from the container's start, to its end and to its first word (`hello`); `silence`
    between two events of the processes that hold engines; `phases` from the begin of a phase to its end, by name."""

    total: float
    silence: float
    start: float = 120.0
    phases: Mapping[str, float] = field(default_factory=lambda: {"import": 300.0, "init": 600.0})

    def stretched(self, multiplier: float) -> Deadlines:
        return Deadlines(
            total=self.total * multiplier,
            silence=self.silence * multiplier,
            start=self.start * multiplier,
            phases={name: seconds * multiplier for name, seconds in self.phases.items()},
        )

    def by_name(self) -> dict[str, float]:
        """As cell.json and records have them."""
        return {"total": self.total, "silence": self.silence, "start": self.start, **self.phases}


@dataclass(frozen=True, kw_only=True)
class Resources:
    """What a cell needs of the host. `memory` and `shm` in bytes; `gpus` is 0 on the CPU."""

    cpus: float
    memory: int
    shm: int
    gpus: int


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One square of the matrix, with everything that its run depends on and no path of this machine."""

    target: str
    vllm: str
    python: str
    device: str
    scenario: str
    file: str
    params: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, OptionValue] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    ranks: int = 1
    seed: int = 0
    resources: Resources
    deadlines: Deadlines
    reference: str | None = None  # id of the cell whose reference.json this one reads

    @property
    def id(self) -> str:
        """`vllm-0.8.5@cpu/multimodal_rollout[model=qwen2_vl]`"""
        return f"{self.target}@{self.device}/{self.question}"

    def stretched(self, multiplier: float) -> Cell:
        """The same cell with longer deadlines."""
        return replace(self, deadlines=self.deadlines.stretched(multiplier))

    @property
    def question(self) -> str:
        """The column: scenario and parameters, `multimodal_rollout[model=qwen2_vl]`."""
        return cell_question(self.scenario, self.params)


def cell_question(scenario: str, params: Mapping[str, str]) -> str:
    inside = ",".join(f"{name}={value}" for name, value in params.items())
    return f"{scenario}[{inside}]" if inside else scenario


_SLUG = str.maketrans({"@": "--", "/": "__", "[": "..", "]": "", ",": ".-", "=": "-_"})


def slug(cell_id: str) -> str:
    """The id as a name of folders, containers and URLs.

    Injective: in a name punctuation is single and stands between letters or digits (`spec.Name`), so every run of two
    is one separator, and each separator has its own.
    """
    return cell_id.translate(_SLUG)


def matches(pattern: str, text: str) -> bool:
    """Whether a glob selects `text`: `*` and `?` are wild, `[` and `]` literal, case counts."""
    return fnmatch.fnmatchcase(text, pattern.replace("[", "[[]"))


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Globs on cell ids (any of them), and on single axes (all of them)."""

    ids: Sequence[str] = ()
    targets: Sequence[str] = ()
    devices: Sequence[str] = ()
    scenarios: Sequence[str] = ()


def select(cells: Sequence[Cell], selection: Selection) -> tuple[Cell, ...]:
    """The selected cells, in their order. Raises NothingSelectedError for a selector that matches no cell."""
    chosen = tuple(cells)
    axes = (
        ("--target", "target", selection.targets),
        ("--device", "device", selection.devices),
        ("--scenario", "scenario", selection.scenarios),
        ("selector", "id", selection.ids),
    )
    for option, key, patterns in axes:
        for pattern in patterns:
            _require_match(option, pattern, [getattr(cell, key) for cell in cells])
        chosen = tuple(c for c in chosen if not patterns or any(matches(p, getattr(c, key)) for p in patterns))
    if not chosen:
        raise NothingSelectedError(
            "the selectors match cells one by one, but no cell matches all of them",
            "Drop one of them, or see `vllm-matrix plan --profile full` for all cells.",
        )
    return chosen


def _require_match(option: str, pattern: str, known: Iterable[str]) -> None:
    names = list(dict.fromkeys(known))
    if any(matches(pattern, name) for name in names):
        return
    near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.4) or names[:3]
    raise NothingSelectedError(
        f"{option} {pattern!r} matches nothing among {len(names)}",
        "Near: " + ", ".join(near) if near else "There are no cells: no target has a device yet.",
    )
