"""The terminal's words on targets: short, for they stand above the table. Markdown, HTML and JSON have all of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from harness.matrix import Matrix
from harness.status import Verdict
from harness.targets import TargetFacts
from harness.views.targets import (
    NAMED,
    Trait,
    change_text,
    changes,
    flat,
    identity,
    mark,
    places,
    short_names,
    traits,
    troubles,
    words,
)
from harness.views.text import MARK, many

FACTS = ("installed", *NAMED, "image", "build")  # fits 80 columns
NAMES = 1  # packages that a line names of a change


def targets_report(matrix: Matrix) -> Iterator[RenderableType]:
    """What each target is, what not all of them can do, and what their locks change; nothing where nothing is known."""
    if not matrix.targets:
        return
    yield _identities(matrix.targets)
    yield from (Text(f"? {row}: {flat(why)}", "magenta") for row, why in troubles(matrix))
    yield from _traits(matrix.targets)
    yield from _changes(matrix.targets)


def _identities(targets: Sequence[TargetFacts]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("target", no_wrap=True)
    for name in FACTS:
        table.add_column(name, overflow="fold")
    for facts in targets:
        found = identity(facts)
        table.add_row(Text(facts.row), *(Text(flat(found[name])) for name in FACTS))
    return table


def _traits(targets: Sequence[TargetFacts]) -> Iterator[RenderableType]:
    found = traits(targets)
    partly = [trait for trait in found if not trait.everywhere]
    same = len(found) - len(partly)
    if partly:
        yield _trait_table(partly, [facts.row for facts in targets])
    if found:
        what = "more" if partly else "capability" if same == 1 else "capabilities"
        yield Text(f"{same} {what} in all that were probed; the engines' own words: matrix.md", "dim")


def _trait_table(found: Sequence[Trait], rows: Sequence[str]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("capability", no_wrap=True)
    for name in short_names(rows).values():
        table.add_column(Text(name, overflow="fold"), justify="center")
    for trait in found:
        marks = (Text(mark(some), "" if some is None or some.available else "dim") for some in trait.found)
        table.add_row(Text(trait.name[:60]), *marks)
    return table


def _changes(targets: Sequence[TargetFacts]) -> Iterator[Text]:
    """A line each, cut where the terminal ends."""
    names = short_names([facts.row for facts in targets])
    for changed in changes(targets):
        change = changed.change
        where = places(changed.rows, targets, names)
        line = f"changed: {change.name} ({where}): {change_text(change, NAMES)}: {change.reason}"
        yield Text(flat(line), "dim", no_wrap=True, overflow="ellipsis")


def target_detail(facts: TargetFacts) -> Iterator[RenderableType]:
    """For `show`: what the cell's target is, and what it has not, in its own words."""
    found = {name: flat(value) for name, value in identity(facts).items() if value}
    yield Text("\n" + ", ".join(f"{name} {value}" for name, value in found.items()), "dim")
    for some in facts.capabilities:
        if not some.available:
            yield Text(f"{mark(some)} {some.name}: {words(some)[:300]}", "dim")
    have = sum(some.available for some in facts.capabilities)
    if have:
        yield Text(f"{MARK[Verdict.OK]} {many(have, 'more capability', 'more capabilities')}", "dim")
