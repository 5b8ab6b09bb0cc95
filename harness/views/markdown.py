"""The Matrix as Markdown: a table, and below it what is not simply ok, and what the targets are."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from harness.events import clean
from harness.matrix import Matrix, Square
from harness.status import Verdict
from harness.targets import TargetFacts
from harness.views.causes import Cause, causes, tally
from harness.views.ending import ending, standings
from harness.views.material import Material
from harness.views.stacks import FOLDER, Stack, shown
from harness.views.targets import change_text, changes, identity, mark, places, traits, troubles, words
from harness.views.text import ABSENT, MARK, cut, duration, many, square_text, summary

STACKS, STACK_LINES = 4, 24  # of a cell, of each
STACKS_FOLDER = f"`out/{FOLDER}`"


def markdown(matrix: Matrix, material: Material | None = None) -> str:
    """The whole report. Text from containers cannot break out of its line, its table or its block."""
    lines = [f"# Matrix {matrix.run}", "", summary(matrix) + ".", ""]
    lines += _table(matrix)
    lines += _remarks(matrix)
    lines += _stopped(matrix, material.stacks if material else {})
    lines += _targets(matrix)
    if matrix.not_runnable:
        lines += ["", f"Not in the table, for want of a lock: {', '.join(matrix.not_runnable)}."]
    return "\n".join(lines) + "\n"


def _table(matrix: Matrix) -> list[str]:
    table = matrix.pivot()
    head = "| target | " + " | ".join(escape(column) for column in table.columns) + " |"
    rows = [
        f"| {escape(str(name))} | " + " | ".join(square_text(s) if s == s else "" for s in row) + " |"  # NaN != NaN
        for name, row in zip(table.index, table.itertuples(index=False), strict=True)
    ]
    return [head, "|---" * (len(table.columns) + 1) + "|", *rows]


def _remarks(matrix: Matrix) -> list[str]:
    found = causes(matrix.squares)
    said = tally(found)
    lines = [*([f"{said}.", ""] if said else []), *(line for cause in found for line in _cause(cause))]
    return ["", "## Not simply ok, by cause", "", *lines] if lines else []


def _cause(cause: Cause) -> list[str]:
    known = "".join(f" ({escape(it.reason)}{f', {it.link}' if it.link else ''})" for it in cause.expectations)
    lines = [f"- **{cause.verdict}**: {escape(cause.title)}{known}"]
    for affected in cause.affected:
        checks = ", ".join(escape(judged.check.id) for judged in affected.checks)
        lines.append(f"  - {affected.status} {escape(affected.square.cell.id)}" + (f": {checks}" if checks else ""))
    return lines


def _stopped(matrix: Matrix, stacks: Mapping[str, Sequence[Stack]]) -> list[str]:
    """The cells that we had to end: how they ended, where their ranks stood, what their processes did."""
    stopped = [
        square for square in matrix.squares if square.record and square.record.exit and square.record.exit.killed
    ]
    lines = [line for square in stopped for line in _stop(square, stacks.get(square.cell.id, ()))]
    return ["", "## Stopped at a deadline", *lines] if lines else []


def _stop(square: Square, stacks: Sequence[Stack]) -> list[str]:
    state = square.record.exit if square.record else None
    lines = ["", f"### {escape(square.cell.id)}", "", escape(f"{'; '.join(ending(state))}.")]
    if rows := standings(state):
        table = [[str(row.rank), cut(row.mark, 60), _ago(row.ago), row.barrier] for row in rows]
        lines += ["", *_pipes(["rank", "last mark", "for", "barrier"], table)]
    with_text, without = shown(stacks)
    for stack in with_text[:STACKS]:
        head = "\n".join(f"    {line}" for line in stack.text.splitlines()[:STACK_LINES])
        lines += ["", f"{escape(cut(stack.title, 160))}, {escape(cut(stack.process.command or '', 160))}:", "", head]
    if left := len(with_text[STACKS:]) + len(without):
        lines += ["", f"{many(left, 'process', 'processes')} more: {STACKS_FOLDER} in the cell's folder."]
    return lines


def _ago(seconds: float | None) -> str:
    return "" if seconds is None else duration(seconds)


def _targets(matrix: Matrix) -> list[str]:
    """What each target is, what it can do, and what its lock changes."""
    if not matrix.targets:
        return []
    lines = ["", "## Targets", "", *_identities(matrix.targets)]
    if found := troubles(matrix):
        lines += ["", *(f"- {escape(row)}: {escape(why)}" for row, why in found)]
    return [*lines, *_capabilities(matrix.targets), *_changes(matrix.targets)]


def _identities(targets: Sequence[TargetFacts]) -> list[str]:
    rows = [{"target": facts.row, **identity(facts)} for facts in targets]
    return _pipes(list(rows[0]), [list(row.values()) for row in rows])


def _capabilities(targets: Sequence[TargetFacts]) -> list[str]:
    """All rows; below them the words of those that are not there."""
    found = traits(targets)
    if not found:
        return []
    rows = [[trait.name, *map(mark, trait.found)] for trait in found]
    lines = ["", "### Capabilities", "", f"{MARK[Verdict.OK]} is there, {ABSENT} is not, empty: nobody could tell.", ""]
    lines += _pipes(["capability", *(facts.row for facts in targets)], rows)
    said = [(trait, some) for trait in found for some in trait.said if not some.found.available]
    words_of = [
        f"- {escape(trait.name)}, {ABSENT} in {escape(places(some.rows, targets))}: {escape(words(some.found))}"
        for trait, some in said
    ]
    return [*lines, "", *words_of] if said else lines


def _changes(targets: Sequence[TargetFacts]) -> list[str]:
    lines = []
    for changed in changes(targets):
        change = changed.change
        link = f", {_link(change.link)}" if change.link else ""
        lines.append(
            f"- **{escape(change.name)}**: {escape(change_text(change))}: {escape(change.reason)}{link} "
            f"({escape(places(changed.rows, targets))})"
        )
    return ["", "### What the locks change in what their packages ask for", "", *lines] if lines else []


def _link(text: str) -> str:
    return f"<{text}>" if re.fullmatch(r"https?://[^\s<>|]+", text) else escape(text)


def _pipes(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [
        "| " + " | ".join(map(escape, head)) + " |",
        "|---" * len(head) + "|",
        *("| " + " | ".join(map(escape, row)) + " |" for row in rows),
    ]


def escape(text: str) -> str:
    """One line of plain text: nothing in it is Markdown or HTML."""
    flat = " ".join(clean(text).split())
    return re.sub(r"([\\`*_{}\[\]<>|#&])", r"\\\1", flat)
