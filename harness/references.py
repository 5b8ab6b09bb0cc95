"""reference.json as the cold starts of a run left it: read without trust, refused with a reason where it is damaged."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from packaging.version import InvalidVersion, Version
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from harness.attempts import REFERENCE
from harness.cells import Cell, slug
from harness.events import Finite, LongText, Text, clean, read_below
from harness.planfile import read_plan
from harness.recorder import artifact
from harness.records import Record, record_of
from harness.status import NOTRUN, Status

MAX_REFERENCE = 2 << 20  # bytes; a real one has about 32 KiB

_Token = Annotated[int, Field(ge=0, lt=1 << 31)]
# Of a long list one fault is enough: all of them take hundreds of times its size in memory.
_Rows = Annotated[tuple["Completion", ...], Field(min_length=1, fail_fast=True)]


class _Model(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)


class Completion(_Model):
    """One continuation: token ids, the prompt's tokens as the engine saw it, and for each generated token the
    log-probabilities of the two best candidates, the best first (none where the engine gave fewer)."""

    ids: Annotated[tuple[_Token, ...], Field(fail_fast=True)]
    prompt_tokens: _Token
    top2: Annotated[tuple[tuple[Finite, Finite], ...], Field(fail_fast=True)]


class Raised(_Model):
    """What a batch raised."""

    type: Text
    message: LongText = ""


class Answer(_Model):
    """What became of a batch: `outputs[prompt][k]`, or an error."""

    outputs: Annotated[tuple[_Rows, ...], Field(min_length=1, fail_fast=True)] | None = None
    error: Raised | None = None

    @model_validator(mode="after")
    def _one_of_them(self) -> Answer:
        if (self.outputs is None) == (self.error is None):
            raise ValueError("a batch has outputs or an error")
        return self


class Reference(_Model):
    """All that the file says: `weights[weight set][batch]`."""

    schema_version: Annotated[Literal[2], Field(alias="schema")]
    model: Text
    dtype: Text
    weights: dict[Text, dict[Text, Answer]]


@dataclass(frozen=True, kw_only=True)
class Answered:
    """A target's cell, the axes of its record, and its reference."""

    cell: Cell
    axes: Mapping[str, str]
    reference: Reference


@dataclass(frozen=True, kw_only=True)
class LeftOut:
    """A cell that is not compared, and why."""

    cell: str
    reason: str


def read_references(run: Path, scenarios: Collection[str]) -> tuple[tuple[Answered, ...], tuple[LeftOut, ...]]:
    """Of the run's cells of these scenarios, in the plan's order. Raises ConfigurationError where it is no run."""
    cells = [entry.cell for entry in read_plan(run).own if entry.cell.scenario in scenarios]
    found = [_read(run, cell) for cell in cells]
    return tuple(one for one in found if isinstance(one, Answered)), tuple(
        one for one in found if isinstance(one, LeftOut)
    )


def _read(run: Path, cell: Cell) -> Answered | LeftOut:
    record = record_of(run, cell.id)
    if record is None:
        return LeftOut(cell=cell.id, reason=f"{NOTRUN}: no record")
    found = _reference(run, record)
    reason = found if isinstance(found, str) else _mismatch(cell, record, found)
    if isinstance(found, str) or reason:
        return LeftOut(cell=cell.id, reason=reason)
    return Answered(cell=cell, axes=record.axes, reference=found)


def _reference(run: Path, record: Record) -> Reference | str:
    """Or, in words, why there is none that can be believed."""
    if record.status is Status.MISS or REFERENCE not in record.artifacts:
        return f"{record.status}: it left no {REFERENCE}"
    folder = run / "cells" / slug(record.cell) / f"attempt-{record.attempt}"
    if artifact(folder, record, REFERENCE) is None:
        return f"its {REFERENCE} is gone, or not what its record says"
    data = read_below(folder / "out", f"artifacts/{REFERENCE}", MAX_REFERENCE + 1) or b""
    if len(data) > MAX_REFERENCE:
        return f"its {REFERENCE} has more than {MAX_REFERENCE >> 20} MiB"
    try:
        return Reference.model_validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = " ".join(clean(".".join(map(str, first["loc"]))).split())[:200]  # the file's own keys
        return f"its {REFERENCE} is damaged: {f'{place}: ' if place else ''}{first['msg']}"


def _mismatch(cell: Cell, record: Record, reference: Reference) -> str:
    """Why it cannot be this cell's; empty where it can."""
    want = (record.axes.get("model", ""), record.axes.get("dtype", ""))
    got = (reference.model, reference.dtype)
    if got != want:
        return f"its {REFERENCE} is of {' in '.join(got)}, the record of {' in '.join(want)}"
    try:
        Version(cell.vllm)
    except InvalidVersion:
        return f"{cell.vllm!r} is no version"
    return ""
