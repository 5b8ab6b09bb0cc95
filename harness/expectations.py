"""expectations.toml: what we knew beforehand, and status × expectation → verdict."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Literal

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from harness.cells import Cell, matches
from harness.errors import ConfigurationError
from harness.fingerprint import own_reason
from harness.records import CheckRecord, Record
from harness.spec import parse, read_toml
from harness.status import Status, Verdict

# What a `when` may ask. The first two are known before a cell runs, the others only from its record: also its Python,
# for without a container it may be another one than the target's own.
STATIC_AXES = ("vllm", "device")
RECORDED_AXES = ("python", "torch", "transformers", "verl", "driver")


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


def _pattern(value: str) -> str:
    try:
        re.compile(value)
    except re.error as error:
        raise ValueError(f"{value!r} is not a regular expression: {error}") from error
    return value


class Match(_Model):
    """The signature of the expected failure: without it any other fault would hide behind the expectation.

    `reason` is a code (`signal`), or more of what the check's reason begins with (`signal: SIGSEGV`). A check that was
    never reached has the reason of what kept it from it.
    """

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
        if expectation.expires and expectation.expires < today:
            raise ConfigurationError(
                f"{path}: {_named(expectations, number)} expired on {expectation.expires}",
                "Look whether it still holds; renew it or remove it.",
            )
    if fault := first_fault(expectations, cells):
        raise ConfigurationError(f"{path}: {fault.message}", fault.hint)
    return expectations


@dataclass(frozen=True)
class Fault:
    """What is wrong with entries that are each well formed, and what to do about it."""

    message: str
    hint: str


def first_fault(expectations: Sequence[Expectation], cells: Sequence[Cell], since: int = 0) -> Fault | None:
    """An entry that no cell can meet, that contradicts another, or that others leave nothing to decide; where those
    before `since` are known to be in order, of the others only."""
    concerned = [frozenset(cell.id for cell in cells if concerns(entry, cell)) for entry in expectations]
    for number, own in enumerate(concerned):
        if number < since:
            continue
        if not own:
            where = _named(expectations, number)
            return Fault(f"{where} matches no cell of matrix.toml", "Mend its globs or conditions.")
        for before, others in enumerate(concerned[:number]):
            if own & others and (fault := _fault_of_two(expectations, number, before, own >= others, own <= others)):
                return fault
    return None


def _fault_of_two(
    expectations: Sequence[Expectation], number: int, before: int, wider: bool, narrower: bool
) -> Fault | None:
    """Of two entries that concern the same cells; `wider`, `narrower`: the first concerns all cells of the other."""
    entry, other = expectations[number], expectations[before]
    if _contradict(entry, other):
        return Fault(
            f"{_named(expectations, number)} contradicts expect[{before}]: both can meet the same check, and they "
            "expect different things of it",
            "Narrow one of them, or put both statuses into one entry.",
        )
    for idle, covering, covered in ((number, before, narrower), (before, number, wider)):
        if covered and _leaves_nothing(expectations[covering], expectations[idle]):
            return Fault(
                f"{_named(expectations, idle)} decides nothing: expect[{covering}] covers all that it could meet",
                "Remove one of them.",
            )
    return None


def _named(expectations: Sequence[Expectation], number: int) -> str:
    return f"expect[{number}] ({expectations[number].scenario} / {expectations[number].check})"


def _contradict(one: Expectation, other: Expectation) -> bool:
    """Whether both can meet one check of a cell that both concern, as far as that is seen beforehand: globs that cover
    each other, equal facts."""
    if (one.status, one.match) == (other.status, other.match):
        return False
    alike = matches(one.check, other.check) or matches(other.check, one.check)
    return alike and recorded(one) == recorded(other)


def _leaves_nothing(wider: Expectation, entry: Expectation) -> bool:
    """Whether `wider` meets every check that `entry` meets, of the cells that both concern, and expects the same."""
    same = (wider.status, wider.match) == (entry.status, entry.match)
    return same and _covers(wider.check, entry.check) and recorded(wider).items() <= recorded(entry).items()


def recorded(entry: Expectation) -> dict[str, str]:
    """Its conditions over facts that only a record has."""
    return {axis: condition for axis, condition in entry.when.items() if axis in RECORDED_AXES}


def _covers(wider: str, narrower: str) -> bool:
    """Whether a glob selects all that another one selects: with nothing in the place of the other's `*`, and with more
    there than any `?` could be."""
    concrete = narrower.replace("?", "\0")
    return all(matches(wider, concrete.replace("*", some)) for some in ("", "\0" * (len(wider) + 1)))


def concerns(expectation: Expectation, cell: Cell) -> bool:
    """Whether it may decide about a check of the cell, by what is known before the cell runs."""
    static = {axis: condition for axis, condition in expectation.when.items() if axis in STATIC_AXES}
    return matches(expectation.scenario, cell.question) and _holds(static, {"vllm": cell.vllm, "device": cell.device})


def fits(expectation: Expectation, question: str, check: str, axes: Mapping[str, str]) -> bool:
    """Whether it is about this check: globs and conditions."""
    return matches(expectation.check, check) and _is_about(expectation, question, axes)


def _is_about(expectation: Expectation, question: str, axes: Mapping[str, str]) -> bool:
    return matches(expectation.scenario, question) and _holds(expectation.when, axes)


def about(expectations: Sequence[Expectation], question: str, axes: Mapping[str, str]) -> tuple[Expectation, ...]:
    """Those that are about some check of a cell: so many fewer to look at for each of its checks."""
    return tuple(entry for entry in expectations if _is_about(entry, question, axes))


def _holds(when: Mapping[str, str], axes: Mapping[str, str]) -> bool:
    """Whether every condition holds; one over a fact that is not known does not."""
    return all(axis in axes and _satisfies(axis, axes[axis], condition) for axis, condition in when.items())


@lru_cache(maxsize=4096)
def _satisfies(axis: str, value: str, condition: str) -> bool:
    if axis == "device":
        return value == condition
    try:
        return SpecifierSet(condition).contains(Version(value.removesuffix("+")), prereleases=True)  # Debian's 3.13.0+
    except InvalidVersion:
        return False


def axes_of(record: Record) -> dict[str, str]:
    """What the conditions of expectations can ask of a record. Its Python is the one that spoke, if one did."""
    measured = {name: value for name, value in record.distributions.items() if name in RECORDED_AXES}
    driver = record.properties.get("driver")
    known = {"vllm": record.vllm, "python": record.axes.get("python", record.python), "device": record.device}
    return measured | known | ({"driver": driver} if isinstance(driver, str) else {})


def verdict(
    check: CheckRecord, question: str, axes: Mapping[str, str], expectations: Sequence[Expectation]
) -> tuple[Verdict, Expectation | None]:
    """The verdict on one check, and the expectation that decided it.

    Raises ConfigurationError where two expectations contradict each other on this check.
    """
    fitting = [entry for entry in expectations if fits(entry, question, check.id, axes)]
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
    if match.reason is not None and not f"{own_reason(check)}:".startswith(f"{match.reason}:"):
        return False
    if match.type is None:
        return True
    if check.error is None or check.error.type.rpartition(".")[2] != match.type.rpartition(".")[2]:
        return False
    return match.message is None or re.search(match.message, check.error.message) is not None
