"""A cell over all runs: the terminal and JSON. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from harness.events import clean
from harness.matrix import passed
from harness.timeline import Moment, Turn
from harness.views.diff import UNLIKE, difference, difference_document
from harness.views.terminal import STYLE
from harness.views.text import cause, cut, duration

_HEAD = ("when", "age", "run", "status", "verdict", "checks", "vllm", "torch", "driver", "cause")


def history_table(newest_first: Sequence[Moment], now: datetime) -> Table:
    """A line a run."""
    table = Table(*(Column(name, no_wrap=name != "cause") for name in _HEAD), box=None, pad_edge=False)
    for moment in newest_first:
        record = moment.record
        good, of = passed(moment.checks)
        table.add_row(
            f"{record.started:%Y-%m-%d %H:%M}Z",
            _age(now - record.started),
            _run(moment),
            record.status,
            Text(moment.verdict, style=STYLE[moment.verdict]),
            f"{good}/{of}" if of else "",
            record.distributions.get("vllm", record.vllm),
            record.distributions.get("torch", ""),
            record.axes.get("driver", ""),
            Text(clean(_cause(moment))),
        )
    return table


def _run(moment: Moment) -> str:
    return f"{moment.run} (reused)" if moment.reused else moment.run


def _age(age: timedelta) -> str:
    days = age.total_seconds() / 86400
    return f"{days:.0f} days" if days >= 2 else duration(max(0.0, age.total_seconds()))


def _cause(moment: Moment) -> str:
    return cut(cause(moment.worst), 200) if moment.worst else ""


def turns_report(cell: str, newest_first: Sequence[Moment], turns: Sequence[Turn]) -> RenderableType:
    """Where it turned, the newest first, and what differed there; or that it never did."""
    if not turns:
        return Text(f"{cell} has not turned in {_span(newest_first)}: {_state(newest_first[0])}")
    parts: list[RenderableType] = []
    for turn in turns:
        apart = duration(max(0.0, turn.apart.total_seconds()))
        parts.append(Text(f"turned between {turn.before.run} and {turn.after.run}, {apart} later:", style="bold"))
        parts += [Text(f"  before  {_state(turn.before)}"), Text(f"  after   {_state(turn.after)}")]
        parts += [Text(f"  {clean(line)}") for line in _otherwise(turn)]
    return Group(*parts)


def _span(newest_first: Sequence[Moment]) -> str:
    count, first = len(newest_first), newest_first[-1].record.started
    return "its only run" if count == 1 else f"all of its {count} runs since {first:%Y-%m-%d}"


def _state(moment: Moment) -> str:
    good, of = passed(moment.checks)
    said = _cause(moment)
    checks = f" {good}/{of}" if of else ""
    return clean(f"{moment.record.status}{checks} {moment.verdict}{f': {said}' if said else ''}")


def _otherwise(turn: Turn) -> list[str]:
    lines = [f"differs {difference(one)}" for one in turn.differences]
    if turn.unlike:
        lines.append(f"{UNLIKE}: {', '.join(turn.unlike)}")
    return lines or ["nothing else that was recorded differs"]


def history_document(cell: str, newest_first: Sequence[Moment]) -> dict[str, Any]:
    """See docs/compare.md."""
    return {"schema": 1, "cell": cell, "runs": [_moment(moment) for moment in newest_first]}


def turns_document(cell: str, turns: Sequence[Turn]) -> dict[str, Any]:
    """See docs/compare.md."""
    return {
        "schema": 1,
        "cell": cell,
        "turns": [
            {
                "before": _moment(turn.before),
                "after": _moment(turn.after),
                "what": list(turn.what),
                "unlike": list(turn.unlike),
                "differences": [difference_document(one) for one in turn.differences],
            }
            for turn in turns
        ],
    }


def _moment(moment: Moment) -> dict[str, Any]:
    record = moment.record
    good, of = passed(moment.checks)
    return {
        "run": moment.run,
        "reused_from": record.reused_from,
        "started": record.started.isoformat(),
        "status": record.status,
        "verdict": moment.verdict,
        "passed": good,
        "checks": of,
        "causes": moment.causes,
        "vllm": record.distributions.get("vllm", record.vllm),
        "torch": record.distributions.get("torch"),
        "driver": record.axes.get("driver"),
    }
