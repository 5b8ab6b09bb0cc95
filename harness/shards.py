"""A plan split over machines: each has some of the cells, knows of all, and leaves the others elsewhere. Pure.

The split goes by what matrix.toml says alone, never by records or probes, which differ from machine to machine: cells
that read the same reference stay together with it, and such groups go, the one with the longest deadlines first, each
to the shard that has the least so far.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from harness.cells import Cell
from harness.errors import ConfigurationError, NothingSelectedError
from harness.plan import Planned


@dataclass(frozen=True)
class Shard:
    """`number` of `of`, from 1 on."""

    number: int
    of: int

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"


def parse_shard(text: str) -> Shard:
    """`2/4`. Raises ConfigurationError."""
    found = re.fullmatch(r"([0-9]{1,4})/([0-9]{1,4})", text)
    shard = Shard(int(found[1]), int(found[2])) if found else Shard(0, 0)
    if not 1 <= shard.number <= shard.of:
        raise ConfigurationError(f"--shard {text!r} is no shard", "It looks like 2/4: the second of four.")
    return shard


def shard_ids(cells: Iterable[Cell], shard: Shard) -> frozenset[str]:
    """The ids of the cells that are this shard's; over all shards each cell is in exactly one."""
    groups = _groups(cells)
    weight = {name: sum(cell.deadlines.total for cell in some) for name, some in groups.items()}
    loads = [0.0] * shard.of
    own: set[str] = set()
    for name in sorted(groups, key=lambda name: (-weight[name], name)):
        lightest = min(range(shard.of), key=loads.__getitem__)
        loads[lightest] += weight[name]
        if lightest == shard.number - 1:
            own.update(cell.id for cell in groups[name])
    return frozenset(own)


def _groups(cells: Iterable[Cell]) -> dict[str, list[Cell]]:
    """By the id of the reference that they read, or are."""
    groups: dict[str, list[Cell]] = {}
    for cell in cells:
        groups.setdefault(cell.reference or cell.id, []).append(cell)
    return groups


def keep(plan: Sequence[Planned], ids: Collection[str], why: str) -> tuple[Planned, ...]:
    """The plan with only these cells, and the references that they read, left to do here; the others are elsewhere.

    `why` is their reason. Raises NothingSelectedError where nothing is left to do.
    """
    needed = {*ids, *(planned.cell.reference for planned in plan if planned.cell.id in ids)}
    kept = tuple(planned if planned.cell.id in needed else _elsewhere(planned, why) for planned in plan)
    if all(planned.action == "elsewhere" for planned in kept):
        raise NothingSelectedError(f"none of {len(kept)} cells is to be run here: {why}", "Select others.")
    return kept


def _elsewhere(planned: Planned, why: str) -> Planned:
    return replace(planned, action="elsewhere", reason=why, reuse=None, unmet=None)


def split(plan: Sequence[Planned], chosen: Iterable[Cell], shard: Shard) -> tuple[Planned, ...]:
    """This shard's part of a plan that was made of the `chosen` cells. Raises NothingSelectedError for an empty one."""
    groups = len(_groups(chosen := tuple(chosen)))
    if shard.number > groups:
        what = f"shard {shard} is empty: the cells make {groups} groups that can be split"
        raise NothingSelectedError(what, "Take fewer shards.")
    return keep(plan, shard_ids(chosen, shard), f"not in shard {shard}")
