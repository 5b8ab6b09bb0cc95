"""The Matrix as Markdown: a table, and below it what is not simply ok."""

from __future__ import annotations

import re

from harness.matrix import Matrix
from harness.views.causes import Cause, causes
from harness.views.text import square_text, summary


def markdown(matrix: Matrix) -> str:
    """The whole report. Text from containers cannot break out of its line or its table."""
    lines = [f"# Matrix {matrix.run}", "", summary(matrix) + ".", ""]
    lines += _table(matrix)
    lines += _remarks(matrix)
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
    lines = [line for cause in causes(matrix.squares) for line in _cause(cause)]
    return ["", "## Not simply ok, by cause", "", *lines] if lines else []


def _cause(cause: Cause) -> list[str]:
    known = "".join(f" ({escape(it.reason)}{f', {it.link}' if it.link else ''})" for it in cause.expectations)
    lines = [f"- **{cause.verdict}**: {escape(cause.title)}{known}"]
    for affected in cause.affected:
        checks = ", ".join(escape(judged.check.id) for judged in affected.checks)
        lines.append(f"  - {affected.status} {escape(affected.square.cell.id)}" + (f": {checks}" if checks else ""))
    return lines


def escape(text: str) -> str:
    """One line of plain text: nothing in it is Markdown or HTML."""
    flat = " ".join(text.split())
    return re.sub(r"([\\`*_{}\[\]<>|#&])", r"\\\1", flat)
