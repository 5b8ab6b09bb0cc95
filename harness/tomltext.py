"""Values as TOML text. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any


def toml(table: Mapping[str, Any], path: tuple[str, ...] = ()) -> str:
    """A document of what JSON has, without null: each table inside of it under a heading of its own."""
    plain = {key: value for key, value in table.items() if not isinstance(value, dict)}
    lines = [f"[{'.'.join(map(_key, path))}]"] if path and (plain or not table) else []
    lines += [f"{_key(key)} = {_value(value)}" for key, value in plain.items()]
    inner = [toml(value, (*path, key)) for key, value in table.items() if isinstance(value, dict)]
    return "".join([*(f"{line}\n" for line in lines), *inner])


def _value(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{_key(key)} = {_value(item)}" for key, item in value.items()) + " }"
    return quoted(value) if isinstance(value, str) else json.dumps(value)


def _key(text: str) -> str:
    return text if re.fullmatch(r"[A-Za-z0-9_-]+", text) else quoted(text)


def quoted(text: str) -> str:
    """A string; a literal one where that reads better: patterns are full of backslashes."""
    if "\\" in text and "'" not in text and text.isprintable():
        return f"'{text}'"
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
