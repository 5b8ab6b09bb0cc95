"""The fingerprint of a failure: equal for the same cause, whatever numbers, addresses and paths it names. Pure.

It is made when it is asked for, and no part of a record: so records of all ages can be compared with each other, also
when the rules below get better.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from harness.events import ErrorInfo
from harness.records import CheckRecord

LENGTH = 300  # characters of a message, of what is left when it is normalised
_PATTERN = 160  # characters of a pattern
_NOT_REACHED = "not-reached: "
_OF_A_RANK = re.compile(r"rank \d+: ")

_NUMBER = r"(?<!\w)[-+]?\d+(?:[._]\d+)*(?:[eE][-+]?\d+)?"
_ITEM = rf"(?:{_NUMBER}|None|True|False|nan|inf)"
_VARYING = re.compile(
    "|".join(
        (
            rf"[\[(] ?{_ITEM}(?:, ?(?:{_ITEM}|\.\.\.))*,? ?[\])]",  # a shape, a list of ids
            r"\b[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\b",  # a UUID
            r"\b0x[0-9a-fA-F]+\b",
            r"\b(?=[a-f]*\d)[0-9a-f]{8,}\b",  # a hash
            r"(?<![\w.])(?:/[\w.+@~-]+)+/",  # the folder of an absolute path
            _NUMBER,
        )
    )
)


def normalised(text: str) -> str:
    """In one line, with `#` for all that may differ between two failures of one cause; digits inside of names stay."""
    return " ".join(_VARYING.sub(_placeholder, text[: 8 * LENGTH]).split())[:LENGTH]


def _placeholder(match: re.Match[str]) -> str:
    found = match[0]
    if found[0] in "[(":
        return f"{found[0]}#{found[-1]}"
    return "…/" if found.endswith("/") else "#"


def fingerprint(check: CheckRecord) -> str:
    """`RuntimeError: shape '[#]' is invalid for input of size # @ vllm/…/rotary_embedding.py:forward`,
    `OracleError not-freed: # of # GiB KV cache came back`, `signal: SIGSEGV`; empty where nothing is said.

    A check that was never reached has that of what kept it from being reached.
    """
    error = check.error
    if error is None:
        return normalised(own_reason(check))
    kind = error.type.rpartition(".")[2]
    code = f" {error.reason}" if error.reason else ""
    return f"{kind}{code}: {normalised(own_message(error))}{_place(error)}"


def fingerprints(checks: Sequence[CheckRecord]) -> tuple[str, ...]:
    """Of the checks of one cell. What was not reached has that of the check which kept it from it, if that was one."""
    raised = {check.reason: fingerprint(check) for check in reversed(checks) if check.reason and check.error}
    return tuple(
        raised[own_reason(check)] if check.error is None and own_reason(check) in raised else fingerprint(check)
        for check in checks
    )


def own_reason(check: CheckRecord) -> str:
    """The reason; of a check that was never reached, that of what kept it from it."""
    return (check.reason or "").removeprefix(_NOT_REACHED)


def own_message(error: ErrorInfo) -> str:
    """Without which rank said so."""
    return _OF_A_RANK.sub("", error.message, count=1) if _OF_A_RANK.match(error.message) else error.message


def _place(error: ErrorInfo) -> str:
    """Where it was raised: the last frame of an installed package, or of Python. The rig's and the suite's own are left
    out: theirs is the message, and their functions get other names."""
    for where in ("site", "python"):
        for frame in reversed(error.frames):
            if frame.where == where:
                return f" @ {frame.file}:{frame.function}"
    return ""


def pattern(message: str) -> str:
    """A regular expression that finds the message, and what is equal to it when normalised, from its begin on.

    What follows after some 160 characters is left out.
    """
    parts: list[str] = []
    for piece, meaning in _pieces(message.strip()):
        if sum(map(len, parts)) + len(piece) > _PATTERN and parts:
            break
        parts.append(meaning(piece))
    return "".join(parts)


def _pieces(text: str) -> list[tuple[str, Callable[[str], str]]]:
    """Word by word, each with how it stands in a pattern: text as it is, space as any, what varies as anything."""
    pieces: list[tuple[str, Callable[[str], str]]] = []
    end = 0
    for match in _VARYING.finditer(text):
        pieces += _words(text[end : match.start()])
        pieces.append((match[0], _anything))
        end = match.end()
    return pieces + _words(text[end:])


def _words(text: str) -> list[tuple[str, Callable[[str], str]]]:
    return [(word, _space if word.isspace() else _escaped) for word in re.split(r"(\s+)", text) if word]


def _anything(piece: str) -> str:
    if piece[0] in "[(":
        return rf"\{piece[0]}.+\{piece[-1]}"
    return ".*/" if piece.endswith("/") else ".+"


def _space(piece: str) -> str:
    return " " if piece == " " else r"\s+"


def _escaped(piece: str) -> str:
    return re.sub(r"([\\.^$*+?{}\[\]|()])", r"\\\1", piece)
