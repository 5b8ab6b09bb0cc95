"""Images and the room that they take, for a terminal; in GB, as Docker itself tells it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.table import Column, Table
from rich.text import Text

from harness.inventory import Row


def table(found: Sequence[Row]) -> Table:
    """One line an image; a dash for what is not known."""
    numbers = [Column(name, justify="right", no_wrap=True) for name in ("size", "unique", "shared")]
    result = Table("target", Column("image", no_wrap=True), *numbers, "made", box=None, pad_edge=False)
    for row in found:
        sizes = [_gigabytes(number) for number in (row.bytes, row.unique, row.shared)]
        made = f"{row.created:%Y-%m-%d %H:%M} UTC" if row.created else "not yet"
        style = "" if row.built else "dim"
        result.add_row(Text(f"{row.target}@{row.device}"), Text(row.tag), *sizes, made, style=style)
    return result


def totals(found: Iterable[Row]) -> str:
    """`2 of 5 images are there; 2.99 GB are in one of them only`"""
    every = list(found)
    there = [row for row in every if row.built]
    alone = sum(row.unique or 0 for row in there)
    return f"{len(there)} of {len(every)} images are there; {_gigabytes(alone)} are in one of them only"


def _gigabytes(number: int | None) -> str:
    return "–" if number is None else f"{number / 1e9:.2f} GB"
