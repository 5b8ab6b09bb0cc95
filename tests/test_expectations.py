"""expectations.toml: refused where it could hide something, and the verdicts it leads to."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import Any

import pytest

from harness.errors import ConfigurationError
from harness.events import ErrorInfo
from harness.expectations import Expectation, axes_of, fits, load_expectations, verdict
from harness.plan import expand
from harness.records import CheckRecord
from harness.spec import MatrixSpec, load_spec
from harness.status import Status, Verdict
from tests.browser import sample
from tests.conftest import ROOT

TODAY = date(2026, 11, 30)
ENTRY = """schema = 1
[[expect]]
scenario = "multimodal_rollout*"
check = "mixed_batch"
when = { vllm = "<0.9", device = "cpu" }
status = ["FAIL"]
match = { type = "RuntimeError", message = "shape .* is invalid" }
reason = "V0 cannot mix text and images in one batch"
link = "https://example.invalid/1"
"""


def load(tmp_path: Path, spec: MatrixSpec, text: str) -> tuple[Expectation, ...]:
    path = tmp_path / "expectations.toml"
    path.write_text(text)
    return load_expectations(path, expand(spec), TODAY)


def test_the_committed_file_is_valid() -> None:
    load_expectations(ROOT / "expectations.toml", expand(load_spec(ROOT / "matrix.toml")), TODAY)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('link = "https://example.invalid/1"', "", "needs a `link` or a date"),
        ('link = "https://example.invalid/1"', "expires = 2026-11-29", "expired on 2026-11-29"),
        ('match = { type = "RuntimeError", message = "shape .* is invalid" }', "", "needs a `match`"),
        ('message = "shape .* is invalid"', 'message = "("', "not a regular expression"),
        ("multimodal_rollout*", "multimodal_rolout*", "matches no cell"),
        ('vllm = "<0.9"', 'vllm = "<0.7"', "matches no cell"),
        ('vllm = "<0.9"', 'vllm = "0.9"', "not a PEP 440 specifier"),
        ('vllm = "<0.9"', 'cuda = "<0.9"', "when.cuda: unknown"),
        ('device = "cpu"', 'device = "tpu"', "neither cpu nor cuda"),
        ("mixed_batch", "mixed_batch\ncolour = 1", "expectations.toml is not valid TOML"),
        ('["FAIL"]', '["FAILED"]', "expect.0.status.0"),
    ],
)
def test_an_entry_that_cannot_hold_is_refused(tmp_path: Path, spec: MatrixSpec, old: str, new: str, said: str) -> None:
    assert old in ENTRY
    with pytest.raises(ConfigurationError) as raised:
        load(tmp_path, spec, ENTRY.replace(old, new))
    assert said in str(raised.value)


def test_no_file_is_no_expectation(tmp_path: Path, spec: MatrixSpec) -> None:
    assert load_expectations(tmp_path / "none.toml", expand(spec), TODAY) == ()


def check(status: Status, message: str = "shape '[1]' is invalid for input", kind: str = "RuntimeError") -> CheckRecord:
    error = ErrorInfo(type=kind, message=message) if status is Status.FAIL else None
    return CheckRecord(id="mixed_batch", status=status, error=error, reason="signal: SIGKILL" if not error else None)


AXES = {"vllm": "0.8.5", "python": "3.11", "device": "cpu"}


@pytest.mark.parametrize(
    ("found", "axes", "said"),
    [
        (check(Status.FAIL), AXES, Verdict.EXPECTED),
        (check(Status.FAIL, message="another fault"), AXES, Verdict.REGRESSION),
        (check(Status.FAIL, kind="ValueError"), AXES, Verdict.REGRESSION),
        (check(Status.CRASH), AXES, Verdict.REGRESSION),
        (check(Status.PASS), AXES, Verdict.FIXED),
        (check(Status.MISS), AXES, Verdict.UNKNOWN),
        (check(Status.FAIL), {**AXES, "vllm": "0.10.0"}, Verdict.REGRESSION),
        (check(Status.PASS), {**AXES, "vllm": "0.10.0"}, Verdict.OK),
        (check(Status.NA), {**AXES, "vllm": "0.10.0"}, Verdict.EXPECTED),
    ],
)
def test_verdicts(tmp_path: Path, spec: MatrixSpec, found: CheckRecord, axes: dict[str, str], said: Verdict) -> None:
    expectations = load(tmp_path, spec, ENTRY)
    assert verdict(found, "multimodal_rollout[model=qwen2_vl]", axes, expectations)[0] is said


def entry(**fields: Any) -> Expectation:
    base = {"scenario": "*", "check": "*", "reason": "for the sake of the test", "link": "x"}
    return Expectation(**{**base, **fields})


def test_a_known_intermittent_status_is_flaky() -> None:
    known = entry(status=("PASS", "CRASH"), match={"reason": "signal"})
    assert verdict(check(Status.PASS), "s", AXES, [known])[0] is Verdict.OK
    assert verdict(check(Status.CRASH), "s", AXES, [known])[0] is Verdict.FLAKY


def test_a_condition_over_a_fact_not_known_does_not_hold() -> None:
    known = entry(status=("CRASH",), match={"reason": "signal"}, when={"torch": ">=2.6"})
    assert verdict(check(Status.CRASH), "s", AXES, [known])[0] is Verdict.REGRESSION
    assert verdict(check(Status.CRASH), "s", {**AXES, "torch": "2.6.0+cpu"}, [known])[0] is Verdict.EXPECTED


def test_contradicting_entries_are_an_error() -> None:
    one, other = entry(status=("PASS",)), entry(status=("CRASH",), match={"reason": "signal"})
    with pytest.raises(ConfigurationError, match="contradict"):
        verdict(check(Status.PASS), "s", AXES, [one, other])


def test_entries_that_contradict_are_refused_before_anything_runs(tmp_path: Path, spec: MatrixSpec) -> None:
    other = ENTRY.partition("\n")[2].replace('["FAIL"]', '["CRASH"]').replace("mixed_batch", "mixed*")
    with pytest.raises(ConfigurationError, match=r"expect\[1\].* contradicts expect\[0\]"):
        load(tmp_path, spec, ENTRY + other)
    load(tmp_path, spec, ENTRY + other.replace('vllm = "<0.9"', 'vllm = ">=0.9"'))


OTHER = ENTRY.partition("\n")[2]


@pytest.mark.parametrize(
    ("old", "new", "idle"),
    [
        ("", "", 1),  # the same again
        ("mixed_batch", "mixed*", 0),
        ("multimodal_rollout*", "*", 0),
        ('vllm = "<0.9", ', "", 0),  # there is but 0.8.5 and 0.10.0 here
        ('vllm = "<0.9"', 'vllm = "<0.9", torch = ">=2.6"', 1),
        ('"multimodal_rollout*"', '"multimodal_rollout[model=qwen2_vl]"', 1),
        ("V0 cannot mix", "Another reason: it cannot mix", 1),
    ],
)
def test_an_entry_that_another_one_leaves_nothing_is_refused(
    tmp_path: Path, spec: MatrixSpec, old: str, new: str, idle: int
) -> None:
    with pytest.raises(ConfigurationError, match=rf"expect\[{idle}\].* decides nothing: expect\[{1 - idle}\] covers"):
        load(tmp_path, spec, ENTRY + OTHER.replace(old, new))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("mixed_batch", "text"),
        ("mixed_batch", "m?xed"),
        ('vllm = "<0.9"', 'vllm = ">=0.9"'),
        ('vllm = "<0.9", device = "cpu"', 'vllm = ">=0.9"'),
        ("multimodal_rollout*", "cold_start*"),
    ],
)
def test_entries_that_both_have_something_to_decide_are_not(
    tmp_path: Path, spec: MatrixSpec, old: str, new: str
) -> None:
    assert len(load(tmp_path, spec, ENTRY + OTHER.replace(old, new))) == 2


def test_two_conditions_over_what_was_found_may_both_be_needed(tmp_path: Path, spec: MatrixSpec) -> None:
    two = [text.replace('vllm = "<0.9"', f'torch = "{torch}"') for text, torch in ((ENTRY, "<2.6"), (OTHER, ">=2.6"))]
    assert len(load(tmp_path, spec, "".join(two))) == 2


def test_a_question_mark_covers_no_star(tmp_path: Path, spec: MatrixSpec) -> None:
    wide, narrow = ENTRY.replace("mixed_batch", "mixed?*"), OTHER.replace("mixed_batch", "mixed*")
    with pytest.raises(ConfigurationError, match=r"expect\[0\].* decides nothing: expect\[1\]"):
        load(tmp_path, spec, wide + narrow)


def test_a_python_is_the_one_that_ran(tmp_path: Path, spec: MatrixSpec) -> None:
    """Without a container it may be another one than any target's own, so that no cell of matrix.toml tells."""
    (found,) = load(tmp_path, spec, ENTRY.replace('vllm = "<0.9"', 'python = ">=3.12"'))
    of = next(of for of in sample.cells() if of.vllm == "0.8.5")
    record = sample.record(of, sample.passed("a"))
    for python, holds in (("3.12.3", True), ("3.13.0+", True), ("3.11.2", False)):
        other = record.model_copy(update={"python": "3.11", "axes": {**record.axes, "python": python}})
        assert fits(found, "multimodal_rollout[model=qwen2_vl]", "mixed_batch", axes_of(other)) is holds
    silent = record.model_copy(update={"python": "3.12", "axes": {}})
    assert axes_of(silent)["python"] == "3.12", "what never spoke has the one that it was planned with"


@pytest.mark.parametrize(
    ("reason", "wanted", "same"),
    [
        ("signal: SIGSEGV", "signal", True),
        ("signal: SIGSEGV", "signal: SIGSEGV", True),
        ("signal: SIGSEGV", "signal: SIG", False),
        ("signal: SIGSEGV", "sig", False),
        ("not-reached: signal: SIGSEGV", "signal: SIGSEGV", True),
        ("not-reached: signal: SIGKILL", "signal: SIGSEGV", False),
        ("ids-differ", "ids-differ", True),
    ],
)
def test_a_reason_is_a_code_or_more_of_it(reason: str, wanted: str, same: bool) -> None:
    known = entry(status=("CRASH",), match={"reason": wanted})
    found = CheckRecord(id="a", status=Status.CRASH, reason=reason)
    assert verdict(found, "s", AXES, [known])[0] is (Verdict.EXPECTED if same else Verdict.REGRESSION)


def test_a_file_that_is_named_has_to_be_there(tmp_path: Path, spec: MatrixSpec) -> None:
    with pytest.raises(ConfigurationError, match="does not exist"):
        load_expectations(tmp_path / "none.toml", expand(spec), TODAY, required=True)
