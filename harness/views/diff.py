"""What changed between two runs: the terminal, Markdown and JSON. Pure."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from harness.diff import CheckChange, Diff, Kind, PropertyChange, Value
from harness.events import clean
from harness.matrix import JudgedCheck, Square
from harness.outliers import Outlier
from harness.status import worst_verdict
from harness.traits import Difference
from harness.views.markdown import escape
from harness.views.text import cause, cut, many, size

UNLIKE = "not like with like"
APART = "what else differs"
_STYLE = {Kind.FAILING: "bold red", Kind.FIXED: "yellow", Kind.STATUS: "magenta", Kind.CAUSE: "magenta"}
_SHOWN = 20  # lines of a section on the terminal
_CELLS = 6  # cells of a line there


@dataclass(frozen=True)
class Line:
    """A sentence, and the cells that it is about, each with its checks where they matter."""

    text: str
    cells: tuple[str, ...] = ()


@dataclass(frozen=True)
class Section:
    """Lines under a title; none of them is ever empty."""

    title: str
    style: str
    lines: tuple[Line, ...]


def summary(diff: Diff) -> str:
    """`1798 cells compared, 60 of them not like with like: 2 checks newly failing, 1 fixed, 1 new cell`"""
    kinds = Counter(change.kind for change in diff.checks)
    counts = [f"{kinds[kind]} {kind}" for kind in Kind if kinds[kind]]
    far = sum(one.far for one in diff.outliers)
    counts += [many(len(diff.properties), "changed property", "changed properties")] if diff.properties else []
    counts += [f"{many(far, 'metric')} out of range"] if far else []
    counts += [many(len(diff.new), "new cell")] if diff.new else []
    counts += [many(len(diff.gone), "gone cell")] if diff.gone else []
    of_them = f", {len(diff.unlike)} of them {UNLIKE}" if diff.unlike else ""
    return f"{many(diff.compared, 'cell')} compared{of_them}: {', '.join(counts) or 'nothing changed'}"


def sections(diff: Diff) -> tuple[Section, ...]:
    """What there is to say, in order: what else differs first, then the worst first."""
    found = [Section(APART, "bold", tuple(map(_difference, diff.differences)))]
    found += [Section(kind, _STYLE[kind], tuple(_check_lines(diff.of(kind)))) for kind in Kind]
    found += [
        Section("changed property", "bold", tuple(_property_lines(diff.properties))),
        Section("metric out of range", "bold", tuple(_outlier_lines(diff.outliers))),
        Section("new cell", "bold", tuple(map(_cell, diff.new))),
        Section("gone cell", "bold", tuple(map(_cell, diff.gone))),
    ]
    return tuple(section for section in found if section.lines)


def terminal(diff: Diff) -> RenderableType:
    """Long lists are cut: Markdown and JSON have all of them."""
    return Group(Text(f"{diff.older} → {diff.newer}\n{summary(diff)}"), *shown(sections(diff)))


def shown(found: Iterable[Section]) -> list[Text]:
    """Sections for the terminal."""
    parts = []
    for section in found:
        parts.append(Text(f"\n{section.title}", style=section.style))
        for line in section.lines[:_SHOWN]:
            parts.append(Text(f"  {clean(line.text)}"))
            parts += [Text(f"      {clean(cell)}") for cell in line.cells[:_CELLS]]
            parts += _more(len(line.cells) - _CELLS, "cell", "      ")
        parts += _more(len(section.lines) - _SHOWN, "line", "  ")
    return parts


def _more(count: int, noun: str, indent: str) -> list[Text]:
    return [Text(f"{indent}{many(count, f'more {noun}')}; --markdown has all", style="dim")] if count > 0 else []


def markdown(diff: Diff) -> str:
    """All of it. Text from containers cannot break out of its line."""
    lines = [f"# {escape(diff.older)} → {escape(diff.newer)}", "", f"{escape(summary(diff))}."]
    return "\n".join([*lines, *listed(sections(diff), "##")]) + "\n"


def listed(found: Iterable[Section], heading: str) -> Iterator[str]:
    """Sections as lines of Markdown, each under a heading of this level."""
    for section in found:
        yield from ("", f"{heading} {section.title[0].upper()}{section.title[1:]}", "")
        for line in section.lines:
            yield f"- {escape(line.text)}"
            yield from (f"  - {escape(cell)}" for cell in line.cells)


def difference(one: Difference) -> str:
    """`driver 570 → 580: unequal axis`, `lock fdfa81cc → none`"""
    texts = (cut(_short(text), 200) if text else "none" for text in (one.before, one.after))
    return f"{one.name} {next(texts)} → {next(texts)}{': unequal axis' if one.axis else ''}"


def _difference(one: Difference) -> Line:
    where = (
        "in all cells" if len(one.cells) == one.of else f"in {many(len(one.cells), 'cell')} of {', '.join(one.rows)}"
    )
    return Line(f"{difference(one)}, {where}" + (f", {UNLIKE}" if one.axis else ""))


def _short(text: str) -> str:
    """Hashes by their begin."""
    bare = text.removeprefix("sha256:")
    return bare[:12] if len(bare) >= 32 and set(bare) <= set("0123456789abcdef") else text


def _check_lines(changes: Iterable[CheckChange]) -> Iterator[Line]:
    """Equal changes for an equal cause once."""
    groups: dict[tuple[str, ...], list[CheckChange]] = {}
    for change in changes:
        key = (change.before, change.after, change.fingerprint, *change.unlike)
        groups.setdefault(key, []).append(change)
    for group in groups.values():
        cells: dict[str, list[str]] = {}
        for change in group:
            cells.setdefault(change.cell, []).append(change.check)
        named = (f"{cell}: {', '.join(checks)}" if any(checks) else cell for cell, checks in cells.items())
        yield Line(_check_text(group[0]), tuple(named))


def _check_text(change: CheckChange) -> str:
    was, now = _cause(change.old), _cause(change.new)
    if change.kind is Kind.CAUSE:
        said = f"{now or 'no cause given'}; was: {was or 'no cause given'}"
    else:
        said = was if change.kind is Kind.FIXED else now
    apart = f" [{UNLIKE}: {', '.join(change.unlike)}]" if change.unlike else ""
    return f"{change.before} → {change.after}{apart}{f': {said}' if said else ''}"


def _cause(judged: JudgedCheck | None) -> str:
    return cut(cause(judged), 300) if judged else ""


def _property_lines(changes: Iterable[PropertyChange]) -> Iterator[Line]:
    groups: dict[str, list[str]] = {}
    for change in changes:
        apart = f" [{UNLIKE}: {', '.join(change.unlike)}]" if change.unlike else ""
        text = f"{change.name}: {_value(change.before)} → {_value(change.after)}{apart}"
        groups.setdefault(text, []).append(change.cell)
    return (Line(text, tuple(cells)) for text, cells in groups.items())


def _value(found: Sequence[Value]) -> str:
    return cut(json.dumps(found[0], ensure_ascii=False), 200) if found else "none"


def _outlier_lines(outliers: Sequence[Outlier]) -> Iterator[Line]:
    far = [one for one in outliers if one.far]
    yield from map(_outlier, far)
    if near := len(outliers) - len(far):
        yield Line(f"{near} more by less than half of the range's width, as chance does it: --json has them")


def _outlier(one: Outlier) -> Line:
    of = f" of {one.check}" if one.check else ""
    widths = "and never varied" if math.isinf(one.beyond) else f"{one.beyond:.1f} of that width beyond it"
    seen = f"{_amount(one.low, one.unit)} to {_amount(one.high, one.unit)} in {one.records} earlier records, {widths}"
    return Line(f"{one.name}{of}: {_amount(one.value, one.unit)}; {seen}", (one.cell,))


def _amount(value: float, unit: str) -> str:
    return size(value) if unit == "bytes" else f"{value:,.6g} {unit}"


def _cell(square: Square) -> Line:
    verdicts = [judged.verdict for judged in square.checks]
    return Line(f"{square.cell.id}: {square.status}" + (f" {worst_verdict(verdicts)}" if verdicts else ""))


def to_json(diff: Diff) -> str:
    return clean(json.dumps(document(diff), indent=1, ensure_ascii=False, allow_nan=False)) + "\n"


def document(diff: Diff) -> dict[str, Any]:
    """See docs/compare.md."""
    return {
        "schema": 1,
        "older": diff.older,
        "newer": diff.newer,
        "compared": diff.compared,
        "differences": [difference_document(one) for one in diff.differences],
        "unlike": {cell: list(axes) for cell, axes in diff.unlike.items()},
        "checks": [_check_document(change) for change in diff.checks],
        "properties": [_property_document(change) for change in diff.properties],
        "metrics": [_outlier_document(one) for one in diff.outliers],
        "new": [_square_document(square) for square in diff.new],
        "gone": [_square_document(square) for square in diff.gone],
    }


def difference_document(one: Difference) -> dict[str, Any]:
    return {
        "name": one.name,
        "before": one.before or None,
        "after": one.after or None,
        "axis": one.axis,
        "cells": list(one.cells),
    }


def _check_document(change: CheckChange) -> dict[str, Any]:
    return {
        "kind": change.kind,
        "cell": change.cell,
        "check": change.check or None,
        "before": change.before,
        "after": change.after,
        "verdict_before": change.old.verdict if change.old else None,
        "verdict_after": change.new.verdict if change.new else None,
        "cause_before": _cause(change.old) or None,
        "cause_after": _cause(change.new) or None,
        "unlike": list(change.unlike),
    }


def _property_document(change: PropertyChange) -> dict[str, Any]:
    """`before` and `after` are left out where there was none: null is a value."""
    sides = {"before": change.before, "after": change.after}
    known = {name: found[0] for name, found in sides.items() if found}
    return {"cell": change.cell, "name": change.name, **known, "unlike": list(change.unlike)}


def _outlier_document(one: Outlier) -> dict[str, Any]:
    return {
        "cell": one.cell,
        "check": one.check or None,
        "name": one.name,
        "unit": one.unit,
        "value": one.value,
        "low": one.low,
        "high": one.high,
        "records": one.records,
    }


def _square_document(square: Square) -> dict[str, Any]:
    verdicts = [judged.verdict for judged in square.checks]
    return {
        "cell": square.cell.id,
        "status": square.status,
        "verdict": worst_verdict(verdicts) if verdicts else None,
    }
