"""expectations.toml as text: entries taken out, narrowed and added, and every other line as it was. Pure."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from datetime import date

from harness.errors import ConfigurationError
from harness.expectations import Expectation, ExpectationsFile
from harness.tomltext import quoted

_HEADER = "[[expect]]"


def edited(text: str, entries: Sequence[Expectation | None], new: Sequence[Expectation]) -> str:
    """The file with its entries as given, in their order: None is taken out, one with another `when` or `scenario` gets
    that.

    An entry goes with the comment right above it. Raises ConfigurationError where the file is written in a way that
    cannot be edited line by line.
    """
    before = _parsed(text) or ()
    head, *blocks = _blocks(text)
    if len(blocks) != len(before):
        raise ConfigurationError("the entries cannot be told apart line by line", f"Write each under its {_HEADER}.")
    parts = [
        _tail(block) if entry is None else block if entry == old else _changed(block, old, entry)
        for block, old, entry in zip(blocks, before, entries, strict=True)
    ]
    result = head + "".join(parts)
    for entry in new:
        result = f"{result.rstrip()}\n\n{toml(entry)}\n"
    if _parsed(result) != (*(entry for entry in entries if entry is not None), *new):
        raise ConfigurationError(
            "the entries cannot be changed line by line", "Write `scenario` and `when` in a line of their own each."
        )
    return result


def _parsed(text: str) -> tuple[Expectation, ...] | None:
    try:
        return ExpectationsFile.model_validate(tomllib.loads(text)).expect
    except ValueError:
        return None


def _blocks(text: str) -> list[str]:
    """What stands before the first entry, then each entry with the comment right above it."""
    lines = text.splitlines(keepends=True)
    begins = [0]
    for number, line in enumerate(lines):
        if line.split("#")[0].strip() == _HEADER:
            begins.append(_above(lines, number, begins[-1]))
    ends = [*begins[1:], len(lines)]
    return ["".join(lines[begin:end]) for begin, end in zip(begins, ends, strict=True)]


def _above(lines: Sequence[str], number: int, least: int) -> int:
    """Where the comment begins that stands right above a line."""
    while number > least and lines[number - 1].startswith("#"):
        number -= 1
    return number


def _tail(block: str) -> str:
    """What follows an entry, where that is a comment which stands by itself."""
    lines = block.splitlines(keepends=True)
    last = max(number for number, line in enumerate(lines) if line.strip() and line[0] != "#")
    rest = "".join(lines[last + 1 :])
    return rest.lstrip("\n") if rest.strip() else ""


def _changed(block: str, old: Expectation, new: Expectation) -> str:
    """What stands behind a value in its line stays."""
    if new.when != old.when:
        line = f"when = {_table(new.when)}"
        if re.search(r"^when\s*=", block, re.MULTILINE):
            block = _replaced(block, r"^when\s*=\s*\{.*?\}", line)
        else:
            block = block.replace(_HEADER, f"{_HEADER}\n{line}", 1)
    if new.scenario != old.scenario:
        block = _replaced(block, r"""^scenario\s*=\s*("[^"]*"|'[^']*')""", f"scenario = {quoted(new.scenario)}")
    return block


def _replaced(block: str, pattern: str, line: str) -> str:
    return re.sub(pattern, lambda _: line, block, count=1, flags=re.MULTILINE)


def toml(entry: Expectation) -> str:
    """An entry as one writes it by hand."""
    fields: dict[str, str | None] = {
        "scenario": quoted(entry.scenario),
        "check": quoted(entry.check),
        "when": _table(entry.when) if entry.when else None,
        "status": f"[{', '.join(quoted(status) for status in entry.status)}]",
        "match": _table(entry.match.model_dump(exclude_none=True)) if entry.match else None,
        "reason": quoted(entry.reason),
        "link": quoted(entry.link) if entry.link is not None else None,
        "expires": _date(entry.expires) if entry.expires else None,
    }
    return "\n".join([_HEADER, *(f"{name} = {value}" for name, value in fields.items() if value is not None)])


def _table(values: Mapping[str, str]) -> str:
    return "{ " + ", ".join(f"{name} = {quoted(value)}" for name, value in values.items()) + " }"


def _date(value: date) -> str:
    return value.isoformat()
