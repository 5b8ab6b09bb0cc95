"""Drift from version to version: the terminal, Markdown and JSON. Pure."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from harness.drift import AXES, Drift, Finding, Kind, Pair, Place, Turned
from harness.events import clean
from harness.views.diff import Line, Section, shown
from harness.views.markdown import escape
from harness.views.text import cut, many


def summary(drift: Drift) -> str:
    """`3 targets compared with their predecessors: 1 drifts, 1 has ties only; 1 cell left out`"""
    drifting = sum(pair.drifts for pair in drift.pairs)
    tied = sum(bool(pair.of(Kind.TIE)) and not pair.drifts for pair in drift.pairs)
    said = [many(drifting, "drifts", "drift")] if drifting else []
    said += [many(tied, "has ties only", "have ties only")] if tied else []
    left = f"; {many(len(drift.left_out), 'cell')} left out" if drift.left_out else ""
    compared = f"{many(len(drift.pairs), 'target')} compared with the predecessor"
    nothing = "nothing drifts" if drift.exit_code == 0 else "nothing that both answered"
    return f"{compared}: {', '.join(said) or nothing}{left}"


def sections(drift: Drift) -> tuple[Section, ...]:
    found = [Section(title(pair), "bold red" if pair.drifts else "bold", tuple(_lines(pair))) for pair in drift.pairs]
    left = tuple(Line(f"{one.cell}: {one.reason}") for one in drift.left_out)
    return (*found, *([Section("left out", "bold", left)] if left else []))


def title(pair: Pair) -> str:
    """`vllm-0.8.2 → vllm-0.8.5: drifts (cold_start[model=qwen2_vl], cuda/x86_64, bfloat16, NVIDIA H200)`"""
    axes = (pair.newer.axes[axis] for axis in AXES if axis != "model" and pair.newer.axes.get(axis))
    where = ", ".join([pair.newer.cell.question, *axes])
    return clean(f"{pair.older.cell.target} → {pair.newer.cell.target}: {_word(pair)} ({where})")


def _word(pair: Pair) -> str:
    if not pair.findings:
        return "nothing to compare"
    return "drifts" if pair.drifts else "ties only" if pair.of(Kind.TIE) else "no drift"


def _lines(pair: Pair) -> Iterator[Line]:
    yield Line(_counts(pair))
    for kind in Kind:
        if kind is not Kind.EQUAL:
            yield from (Line(_finding(finding)) for finding in pair.of(kind))
    yield from (Line(_turned(one)) for one in pair.turned)


def _counts(pair: Pair) -> str:
    """`44 greedy continuations: 41 equal, 3 tie; best log-probabilities up to 0.0625 apart, tolerance 0.13`"""
    kinds = Counter(finding.kind for finding in pair.findings)
    counts = ", ".join(f"{kinds[kind]} {kind}" for kind in reversed(Kind) if kinds[kind])
    listed = f"{many(len(pair.findings), 'greedy continuation')}{f': {counts}' if counts else ''}"
    neither = f"; {many(pair.unanswered, 'batch', 'batches')} that neither answered" if pair.unanswered else ""
    return f"{listed}; {_apart(pair.off)}, tolerance {pair.tolerance:g}{neither}"


def _apart(off: float | None) -> str:
    return "no log-probabilities to compare" if off is None else f"best log-probabilities up to {off:.3g} apart"


def _finding(finding: Finding) -> str:
    where = f"{finding.kind}: {_place(finding.place)}"
    if finding.kind is Kind.COUNT:
        return f"{where}: {finding.before} → {finding.after}"
    where += f", prompt {finding.place.prompt}"
    if finding.kind is Kind.PROMPT:
        return f"{where}: {finding.before} → {finding.after} tokens"
    apart = _apart(finding.off) + ("" if finding.off_at is None else f" (at token {finding.off_at})")
    if finding.position is None:
        return f"{where}: the same tokens, {apart}"
    gap = "at an unknown distance" if finding.gap is None else f"{finding.gap:.3g} apart"
    ids = " → ".join("ended" if token is None else str(token) for token in (finding.before, finding.after))
    return f"{where}, token {finding.position}: {ids}, the predecessor's two best {gap}; until there {apart}"


def _turned(one: Turned) -> str:
    before, after = (cut(" ".join(text.split()), 200) for text in (one.before, one.after))
    return f"{_place(one.place)}: {before} → {after}"


def _place(place: Place) -> str:
    return f"weights {place.weights}, batch {place.batch}"


def terminal(drift: Drift) -> RenderableType:
    """Long lists are cut: Markdown and JSON have all of them."""
    return Group(Text(f"{drift.run}\n{summary(drift)}"), *shown(sections(drift)))


def markdown(drift: Drift) -> str:
    """All of it. Text from containers cannot break out of its line."""
    lines = [f"# Drift in {escape(drift.run)}", "", f"{escape(summary(drift))}."]
    for section in sections(drift):
        lines += ["", f"## {escape(section.title)}", "", *(f"- {escape(line.text)}" for line in section.lines)]
    return "\n".join(lines) + "\n"


def to_json(drift: Drift) -> str:
    return clean(json.dumps(document(drift), indent=1, ensure_ascii=False, allow_nan=False)) + "\n"


def document(drift: Drift) -> dict[str, Any]:
    """See docs/compare.md."""
    return {
        "schema": 1,
        "run": drift.run,
        "pairs": [_pair_document(pair) for pair in drift.pairs],
        "left_out": [{"cell": one.cell, "reason": one.reason} for one in drift.left_out],
    }


def _pair_document(pair: Pair) -> dict[str, Any]:
    return {
        "older": pair.older.cell.id,
        "newer": pair.newer.cell.id,
        "axes": {axis: pair.newer.axes[axis] for axis in AXES if axis in pair.newer.axes},
        "tolerance": pair.tolerance,
        "drifts": pair.drifts,
        "continuations": len(pair.findings),
        "off": pair.off,
        "findings": [_finding_document(one) for one in pair.findings if one.kind is not Kind.EQUAL],
        "turned": [
            {"weights": one.place.weights, "batch": one.place.batch, "before": one.before, "after": one.after}
            for one in pair.turned
        ],
        "unanswered": pair.unanswered,
    }


def _finding_document(one: Finding) -> dict[str, Any]:
    return {
        "kind": one.kind,
        "weights": one.place.weights,
        "batch": one.place.batch,
        "prompt": one.place.prompt,
        "completion": one.place.completion,
        "position": one.position,
        "before": one.before,
        "after": one.after,
        "gap": one.gap,
        "off": one.off,
        "off_at": one.off_at,
    }
