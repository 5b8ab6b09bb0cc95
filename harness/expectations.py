"""expectations.toml: what we knew beforehand, and status × expectation → verdict."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Annotated, Literal

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from harness.cells import Cell, matches
from harness.errors import ConfigurationError
from harness.records import CheckRecord, Record
from harness.spec import parse, read_toml
from harness.status import Status, Verdict

# What a `when` may ask. The first three are known before a cell runs, the others only from its record.
STATIC_AXES = ("vllm", "python", "device")
RECORDED_AXES = ("torch", "transformers", "verl", "driver")


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


def _pattern(value: str) -> str:
    try:
        re.compile(value)
    except re.error as error:
        raise ValueError(f"{value!r} is not a regular expression: {error}") from error
    return value


class Match(_Model):
    """The signature of the expected failure: without it any other fault would hide behind the expectation."""

    type: str | None = None
    message: Annotated[str, AfterValidator(_pattern)] | None = None
    reason: str | None = None

    @model_validator(mode="after")
    def _something(self) -> Match:
        if self.type is None and self.reason is None:
            raise ValueError("needs an exception `type` (with a `message` pattern) or a `reason` code")
        return self


class Expectation(_Model):
    """`scenario` is a glob on the column (`multimodal_rollout[model=qwen2_vl]`), `check` one on the check's id."""

    scenario: str
    check: str
    when: Mapping[str, str] = {}
    status: Annotated[tuple[Status, ...], Field(min_length=1)]
    match: Match | None = None
    reason: Annotated[str, Field(min_length=10)]
    link: str | None = None
    expires: date | None = None

    @model_validator(mode="after")
    def _complete(self) -> Expectation:
        if self.link is None and self.expires is None:
            raise ValueError("needs a `link` or a date in `expires`")
        if self.match is None and any(status not in (Status.PASS, Status.NA) for status in self.status):
            raise ValueError("needs a `match`: the exception's type and message pattern, or a reason code")
        for axis, condition in self.when.items():
            _check_condition(axis, condition)
        return self


def _check_condition(axis: str, condition: str) -> None:
    if axis not in (*STATIC_AXES, *RECORDED_AXES):
        raise ValueError(f"when.{axis}: unknown; known: {', '.join((*STATIC_AXES, *RECORDED_AXES))}")
    if axis == "device":
        if condition not in ("cpu", "cuda"):
            raise ValueError(f"when.device: {condition!r} is neither cpu nor cuda")
        return
    try:
        SpecifierSet(condition)
    except InvalidSpecifier as error:
        raise ValueError(f"when.{axis}: {condition!r} is not a PEP 440 specifier such as '<0.9'") from error


class ExpectationsFile(_Model):
    schema_version: Annotated[Literal[1], Field(alias="schema")]
    expect: tuple[Expectation, ...] = ()


def load_expectations(
    path: Path, cells: Sequence[Cell], today: date, required: bool = False
) -> tuple[Expectation, ...]:
    """Raises ConfigurationError for a broken file, an entry that is expired, that no cell can meet, or contradicts."""
    if not path.exists() and not required:
        return ()
    expectations = parse(ExpectationsFile, read_toml(path), path).expect
    for number, expectation in enumerate(expectations):
        where = f"{path}: expect[{number}] ({expectation.scenario} / {expectation.check})"
        if expectation.expires and expectation.expires < today:
            raise ConfigurationError(
                f"{where} expired on {expectation.expires}", "Look whether it still holds; renew it or remove it."
            )
        if not any(_concerns(expectation, cell) for cell in cells):
            raise ConfigurationError(f"{where} matches no cell of matrix.toml", "Mend its globs or conditions.")
        for other in expectations[:number]:
            if _contradict(expectation, other, cells):
                raise ConfigurationError(
                    f"{where} contradicts expect[{expectations.index(other)}]: both can meet the same check, and they "
                    "expect different things of it",
                    "Narrow one of them, or put both statuses into one entry.",
                )
    return expectations


def _contradict(one: Expectation, other: Expectation, cells: Sequence[Cell]) -> bool:
    """Whether both can meet one check, as far as that is seen beforehand: globs that cover each other, equal facts."""
    if (one.status, one.match) == (other.status, other.match):
        return False
    recorded = [{k: v for k, v in entry.when.items() if k in RECORDED_AXES} for entry in (one, other)]
    alike = matches(one.check, other.check) or matches(other.check, one.check)
    return alike and recorded[0] == recorded[1] and any(_concerns(one, c) and _concerns(other, c) for c in cells)


def _concerns(expectation: Expectation, cell: Cell) -> bool:
    axes = {"vllm": cell.vllm, "python": cell.python, "device": cell.device}
    static = {axis: condition for axis, condition in expectation.when.items() if axis in STATIC_AXES}
    return matches(expectation.scenario, cell.question) and _holds(static, axes)


def _holds(when: Mapping[str, str], axes: Mapping[str, str]) -> bool:
    """Whether every condition holds; one over a fact that is not known does not."""
    return all(axis in axes and _satisfies(axis, axes[axis], condition) for axis, condition in when.items())


def _satisfies(axis: str, value: str, condition: str) -> bool:
    if axis == "device":
        return value == condition
    try:
        return SpecifierSet(condition).contains(Version(value), prereleases=True)
    except InvalidVersion:
        return False


def axes_of(record: Record) -> dict[str, str]:
    """What the conditions of expectations can ask of a record."""
    measured = {name: value for name, value in record.distributions.items() if name in RECORDED_AXES}
    driver = record.properties.get("driver")
    known = {"vllm": record.vllm, "python": record.python, "device": record.device}
    return measured | known | ({"driver": driver} if isinstance(driver, str) else {})


def verdict(
    check: CheckRecord, question: str, axes: Mapping[str, str], expectations: Sequence[Expectation]
) -> tuple[Verdict, Expectation | None]:
    """The verdict on one check, and the expectation that decided it.

    Raises ConfigurationError where two expectations contradict each other on this check.
    """
    fitting = [
        entry
        for entry in expectations
        if matches(entry.scenario, question) and matches(entry.check, check.id) and _holds(entry.when, axes)
    ]
    if len({(entry.status, entry.match) for entry in fitting}) > 1:
        raise ConfigurationError(
            f"expectations.toml: {len(fitting)} entries contradict each other on {question} / {check.id}"
        )
    if check.status in (Status.MISS, Status.SKIP):
        return Verdict.UNKNOWN, None
    if not fitting:
        return _unforeseen(check.status), None
    return _foreseen(check, fitting[0]), fitting[0]


def _unforeseen(status: Status) -> Verdict:
    if status is Status.PASS:
        return Verdict.OK
    return Verdict.EXPECTED if status is Status.NA else Verdict.REGRESSION


def _foreseen(check: CheckRecord, expectation: Expectation) -> Verdict:
    if check.status not in expectation.status:
        return Verdict.FIXED if check.status is Status.PASS else Verdict.REGRESSION
    if check.status not in (Status.PASS, Status.NA) and not _same_signature(check, expectation.match):
        return Verdict.REGRESSION
    if check.status is not expectation.status[0]:
        return Verdict.FLAKY
    return Verdict.OK if check.status is Status.PASS else Verdict.EXPECTED


def _same_signature(check: CheckRecord, match: Match | None) -> bool:
    if match is None:
        return False
    if match.reason is not None and (check.reason or "").split(":")[0] != match.reason:
        return False
    if match.type is None:
        return True
    if check.error is None or check.error.type.rpartition(".")[2] != match.type.rpartition(".")[2]:
        return False
    return match.message is None or re.search(match.message, check.error.message) is not None
