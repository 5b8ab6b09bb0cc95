"""What two records of a cell were made with, and in what that differs: axes, host, locks, revisions. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from harness.records import Host, ImageRef, Record, Revision

Pair = tuple[Record, Record]  # of one cell; the older first

# Facts of the digest that say nothing beside what is said anyhow: the cell's own id, and what follows from others.
_FOLLOWS = frozenset({"cell", "reference", "device_class", "image", "backend", "schema"})


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Something that differs between the runs, and the cells in which it does, of `of` that were compared.

    `axis`: one of those that make records of a cell unequal. `before` or `after` is empty where there was none.
    """

    name: str
    before: str
    after: str
    axis: bool
    cells: tuple[str, ...]
    of: int

    @property
    def rows(self) -> tuple[str, ...]:
        """Where the cells are: `vllm-0.8.5@cpu`."""
        return tuple(dict.fromkeys(cell.partition("/")[0] for cell in self.cells))


def unlike(older: Record, newer: Record) -> tuple[str, ...]:
    """The axes that are unequal. One that only one of them tells is not: a cell that broke off early tells less."""
    return tuple(axis for axis, value in older.axes.items() if newer.axes.get(axis, value) != value)


def differences(pairs: Iterable[Pair]) -> tuple[Difference, ...]:
    """The same difference of several cells once; axes first, and what has one name side by side."""
    found: dict[tuple[bool, str, str, str], list[str]] = {}
    count = 0
    for older, newer in pairs:
        count += 1
        for key in _differing(older, newer):
            found.setdefault(key, []).append(newer.cell)
    order = {(axis, name): number for number, (axis, name) in enumerate(dict.fromkeys(key[:2] for key in found))}
    return tuple(
        Difference(
            name=name, before=before, after=after, axis=axis, cells=tuple(found[axis, name, before, after]), of=count
        )
        for axis, name, before, after in sorted(found, key=lambda key: (not key[0], order[key[:2]]))
    )


def _differing(older: Record, newer: Record) -> Iterator[tuple[bool, str, str, str]]:
    for axis in unlike(older, newer):
        yield True, axis, older.axes[axis], newer.axes[axis]
    for before, after in _traits(older, newer):
        for name in dict.fromkeys([*before, *after]) if before != after else ():
            if before.get(name) != after.get(name):
                yield False, name, before.get(name, ""), after.get(name, "")


def _traits(older: Record, newer: Record) -> Iterator[tuple[dict[str, str], dict[str, str]]]:
    """By name, what the two were made with; what was never told by one of them is left out."""
    yield _made(older), _made(newer)
    if older.image and newer.image:  # an attempt that was never started has none
        yield _image(older.image), _image(newer.image)
    yield _facts(older), _facts(newer)
    if older.distributions and newer.distributions:  # what never said hello has none
        yield older.distributions, newer.distributions


def _made(record: Record) -> dict[str, str]:
    return {"host": _host(record.host), "harness": revision(record.revision), "backend": record.backend}


def _image(image: ImageRef) -> dict[str, str]:
    return {"image": image.tag, "image id": image.id, "lock": image.lock_sha256}


def _facts(record: Record) -> dict[str, str]:
    return {name: value for name, value in record.facts.items() if name not in _FOLLOWS}


def _host(host: Host) -> str:
    return f"{host.machine}, {host.cpus} CPUs, {host.memory / (1 << 30):.1f} GiB, {host.engine or 'no engine'}"


def revision(known: Revision) -> str:
    """`0.1.0 51b33808081e`, and `changed` where its tree was dirty."""
    return " ".join([known.version, (known.commit or "")[:12], "changed" if known.dirty else ""]).strip()
