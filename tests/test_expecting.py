"""The expectations that runs lead to: true of all that was seen, none of them idle; and the file they stand in."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import replace
from datetime import date
from typing import Any

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from harness.cells import Cell, Deadlines, Resources
from harness.errors import ConfigurationError
from harness.events import ErrorInfo
from harness.expectations import Expectation, ExpectationsFile, first_fault, verdict
from harness.expectfile import edited, toml
from harness.expecting import EXPIRY, Proposal, Seen, needed, propose
from harness.fingerprint import fingerprint
from harness.records import CheckRecord
from harness.status import UNEXPECTED, Status, Verdict

TODAY = date(2026, 11, 30)
VERSIONS = ("0.6.3", "0.7.3", "0.8.2", "0.8.5", "0.10.0")
RESOURCES = Resources(cpus=1, memory=1, shm=1, gpus=0)


def cell(version: str, device: str = "cpu", scenario: str = "cache", **params: str) -> Cell:
    return Cell(
        target=f"vllm-{version}",
        vllm=version,
        python="3.11",
        device=device,
        scenario=scenario,
        file=f"test_{scenario}.py",
        params=params or {"mode": "plain"},
        resources=RESOURCES,
        deadlines=Deadlines(total=1, silence=1),
    )


def seen(of: Cell, check: CheckRecord, **axes: str) -> Seen:
    return Seen(
        cell=of,
        question=of.question,
        run="r1",
        axes={"vllm": of.vllm, "device": of.device, **axes},
        check=check,
        fingerprint=fingerprint(check),
    )


def passed(check: str = "drop") -> CheckRecord:
    return CheckRecord(id=check, status=Status.PASS)


def fails(check: str = "drop", message: str = "shape '[96, 1]' is invalid", kind: str = "RuntimeError") -> CheckRecord:
    return CheckRecord(id=check, status=Status.FAIL, error=ErrorInfo(type=kind, message=message))


def entry(**fields: Any) -> Expectation:
    match = {"type": "RuntimeError", "message": "shape .* is invalid"}
    base = {"scenario": "cache[*", "check": "drop", "status": ("FAIL",), "match": match, "link": "x"}
    return Expectation(**{**base, "reason": "known for a long time", **fields})


def said(proposal: Proposal) -> list[tuple[str, str, dict[str, str]]]:
    return [(new.scenario, new.check, dict(new.when)) for new in proposal.new]


def across(checks: Sequence[CheckRecord]) -> list[Seen]:
    return [seen(cell(version), check) for version, check in zip(VERSIONS, checks, strict=True)]


ALL = [cell(version, device) for version in VERSIONS for device in ("cpu", "cuda")]


def test_one_cause_on_several_versions_is_one_entry_that_covers_just_them() -> None:
    found = across([fails(message=f"shape '[{n}, 1]' is invalid") for n in range(4)] + [passed()])
    proposal = propose(found, (), ALL, TODAY)
    assert said(proposal) == [("cache[mode=plain]", "drop", {"vllm": ">=0.6.3,<=0.8.5", "device": "cpu"})]
    new = proposal.new[0]
    assert new.match is not None
    assert (new.match.type, new.match.message) == ("RuntimeError", r"shape '\[.+\]' is invalid")
    assert new.expires == TODAY + EXPIRY
    assert new.reason == "seen in run r1: RuntimeError: shape '[#]' is invalid; say why, and give a link"


def test_a_version_in_between_that_does_not_show_it_is_left_out() -> None:
    found = across([fails(), fails(), passed(), fails(), passed()])
    assert said(propose(found, (), ALL, TODAY))[0][2]["vllm"] == ">=0.6.3,<=0.8.5,!=0.8.2"


def test_parameters_become_globs_where_all_of_them_show_it() -> None:
    of = cell("0.8.5")
    both = [fails("drop[a]"), fails("drop[b]"), passed("keep")]
    assert said(propose([seen(of, it) for it in both], (), ALL, TODAY))[0][1] == "drop[*"
    one = [fails("drop[a]"), passed("drop[b]")]
    assert said(propose([seen(of, it) for it in one], (), ALL, TODAY))[0][1] == "drop[a]"
    modes = [seen(cell("0.8.5", mode=mode), fails()) for mode in ("plain", "sleep")]
    assert said(propose(modes, (), [cell("0.8.5", mode=mode) for mode in ("plain", "sleep")], TODAY))[0][0] == "cache[*"


def test_a_cell_that_crashed_is_one_entry_with_what_was_not_reached() -> None:
    crash = [("a", "signal: SIGSEGV"), ("b", "not-reached: signal: SIGSEGV"), ("<cell>", "signal: SIGSEGV")]
    checks = [CheckRecord(id=name, status=Status.CRASH, reason=reason) for name, reason in crash]
    proposal = propose([seen(cell("0.8.5"), check) for check in checks], (), ALL, TODAY)
    assert [(new.check, new.match and new.match.reason) for new in proposal.new] == [("*", "signal: SIGSEGV")]


def test_devices_are_told_apart() -> None:
    found = [seen(cell("0.8.5"), fails()), seen(cell("0.8.5", "cuda"), passed())]
    assert said(propose(found, (), ALL, TODAY))[0][2] == {"vllm": "==0.8.5", "device": "cpu"}


def test_where_the_version_does_not_tell_more_is_asked_for() -> None:
    of = cell("0.8.5")
    other = replace(of, target="vllm-0.8.5-new")
    found = [
        seen(of, fails(), torch="2.6.0+cpu", python="3.11.2"),
        seen(other, passed(), torch="2.7.0", python="3.11.2"),
    ]
    when = said(propose(found, (), [of, other], TODAY))[0][2]
    assert when == {"vllm": "==0.8.5", "device": "cpu", "python": "==3.11.2", "torch": "==2.6.0+cpu"}


def test_what_nothing_tells_apart_is_told() -> None:
    of = cell("0.8.5")
    proposal = propose([seen(of, fails()), seen(replace(of, target="x"), passed())], (), [of], TODAY)
    assert (proposal.new, [it.cell.target for it in proposal.apart]) == ((), ["vllm-0.8.5"])


def test_what_later_entries_made_idle_is_left_out() -> None:
    of = cell("0.8.5")
    found = [seen(of, fails(name)) for name in ("a", "b", "c")]
    one, two, three = entry(check="?"), entry(check="a"), entry(check="[bc]")
    assert needed([two, one], (), found) == (one,)
    assert needed([two], (one,), found) == ()
    assert needed([two, three], (), found) == (two,), "a bracket is a bracket"


# --- entries that are there ---


def test_what_still_decides_stays_and_nothing_is_added() -> None:
    known = entry(when={"vllm": "<0.9"})
    proposal = propose(across([fails()] * 4 + [passed()]), (known,), ALL, TODAY)
    assert (proposal.entries, proposal.fates[0].why) == ((known,), "")


def test_what_passes_now_goes_and_is_said() -> None:
    known = entry(when={"vllm": "==0.8.5", "device": "cpu"})
    proposal = propose(across([passed()] * 5), (known,), ALL, TODAY)
    assert proposal.entries == ()
    assert proposal.fates[0].why == "drop of vllm-0.8.5@cpu/cache[mode=plain] passes"


def test_what_concerns_cells_that_were_not_run_stays_for_them() -> None:
    known = entry(when={"vllm": "<0.9", "device": "cpu"})
    assert propose([seen(cell("0.10.0"), passed())], (known,), ALL, TODAY).entries == (known,)
    proposal = propose([seen(cell("0.8.5"), passed())], (known,), ALL, TODAY)
    assert [dict(it.when) for it in proposal.entries] == [{"vllm": "<0.9,!=0.8.5", "device": "cpu"}]


def test_of_several_ways_to_narrow_it_the_one_that_loses_least_is_taken() -> None:
    known = entry(when={"vllm": "==0.8.5"})
    proposal = propose([seen(cell("0.8.5"), passed())], (known,), ALL, TODAY)
    assert [dict(it.when) for it in proposal.entries] == [{"vllm": "==0.8.5", "device": "cuda"}]
    cells = [cell("0.8.5", mode=mode) for mode in ("plain", "sleep")]
    proposal = propose([seen(cells[0], passed())], (known,), cells, TODAY)
    assert [it.scenario for it in proposal.entries] == ["cache[mode=sleep]"]


def test_what_narrowed_says_no_more_than_another_one_goes() -> None:
    wide, other = entry(check="*", when={"vllm": ">=0.7"}), entry()
    proposal = propose([seen(cell("0.6.3"), passed())], (wide, other), ALL, TODAY)
    assert proposal.entries == (wide,)
    assert proposal.fates[1].why.startswith("drop of vllm-0.6.3@cpu/cache[mode=plain] passes")


def test_what_it_no_longer_speaks_of_without_having_been_seen_is_said() -> None:
    known = entry(when={"vllm": "<0.9"})
    proposal = propose([seen(cell("0.8.5"), passed())], (known,), ALL[4:8], TODAY)
    assert [dict(it.when) for it in proposal.entries] == [{"vllm": "<0.9,!=0.8.5"}]
    assert proposal.fates[0].why == (
        "drop of vllm-0.8.5@cpu/cache[mode=plain] passes; "
        "it no longer speaks of vllm-0.8.5@cuda/cache[mode=plain], not seen"
    )


def test_what_is_half_true_is_narrowed_and_says_the_rest_in_its_own_words() -> None:
    known = entry(check="drop[*", when={"vllm": "<=0.8.5"})
    found = [seen(cell("0.8.5"), fails("drop[a]")), seen(cell("0.8.5"), passed("drop[b]"))]
    proposal = propose(found, (known,), ALL, TODAY)
    assert [(dict(it.when)["vllm"], it.check, it.reason, it.link, it.match) for it in proposal.entries] == [
        ("<=0.8.5,!=0.8.5", "drop[*", known.reason, "x", known.match),
        ("==0.8.5", "drop[a]", known.reason, "x", known.match),
    ]


def test_another_fault_than_the_known_one_takes_its_place() -> None:
    known = entry(when={"vllm": "==0.8.5", "device": "cpu"})
    proposal = propose([seen(cell("0.8.5"), fails(message="size is wrong"))], (known,), ALL, TODAY)
    assert [it.match and it.match.message for it in proposal.entries] == ["size is wrong"]
    assert proposal.fates[0].why.endswith("is FAIL: RuntimeError: size is wrong")


def test_an_intermittent_one_stays_whether_it_shows_or_not() -> None:
    known = entry(status=("PASS", "FAIL"), when={"device": "cpu"})
    for check in (passed(), fails()):
        assert propose(across([check] * 5), (known,), ALL, TODAY).entries == (known,)


@pytest.mark.parametrize("status", [Status.MISS, Status.SKIP])
def test_what_did_not_run_says_nothing(status: Status) -> None:
    known = entry(when={"vllm": "==0.8.5"})
    for check in ("<cell>", "drop"):
        missed = CheckRecord(id=check, status=status, reason="build: no")
        found = [seen(cell("0.8.5", device), missed) for device in ("cpu", "cuda")]
        assert propose(found, (known,), ALL, TODAY).entries == (known,)
        assert propose(found, (), ALL, TODAY).entries == ()


def test_an_entry_for_no_check_goes_where_all_its_cells_were_seen() -> None:
    known = entry(check="dorp", when={"vllm": "==0.8.5", "device": "cpu"})
    proposal = propose(across([passed()] * 5), (known,), ALL, TODAY)
    assert (proposal.entries, proposal.fates[0].why) == ((), "no check of its cells is 'dorp'")
    died = CheckRecord(id="<cell>", status=Status.MISS, reason="lease: no")
    assert propose(across([died] * 5), (known,), ALL, TODAY).entries == (known,)
    elsewhere = known.model_copy(update={"when": {**known.when, "torch": "<2"}})
    assert propose(across([passed()] * 5), (elsewhere,), ALL, TODAY).entries == (elsewhere,)


# --- whatever was seen ---

MESSAGES = ("shape '[96, 1]' is invalid", "shape '[8]' is invalid", "no such thing")
OUTCOMES = st.one_of(
    st.just(("PASS", None, None)),
    st.sampled_from(("NA", "MISS", "SKIP")).map(lambda status: (status, "wanted: x", None)),
    st.sampled_from(MESSAGES).map(lambda message: ("FAIL", None, message)),
    st.sampled_from(("signal: SIGSEGV", "not-reached: signal: SIGSEGV", "exit: 3")).map(
        lambda why: ("CRASH", why, None)
    ),
)
QUESTIONS = (("cache", "plain"), ("cache", "sleep"), ("ranks", "dp2"))
CHECKS = ("drop[a]", "drop[b]", "keep")
CELLS = tuple(
    cell(version, device, scenario, mode=mode)
    for version in VERSIONS[:4]
    for device in ("cpu", "cuda")
    for scenario, mode in QUESTIONS
)


@st.composite
def sights(draw: st.DrawFn) -> list[Seen]:
    found = []
    for of in draw(st.lists(st.sampled_from(CELLS), min_size=1, max_size=8, unique_by=lambda of: of.id)):
        for name in CHECKS:
            status, reason, message = draw(OUTCOMES)
            error = ErrorInfo(type="RuntimeError", message=message) if message else None
            check = CheckRecord(id=name, status=Status(status), reason=reason, error=error)
            found.append(seen(of, check, torch=draw(st.sampled_from(("2.5.1", "2.6.0")))))
    return found


ENTRIES = st.builds(
    entry,
    scenario=st.sampled_from(("*", "cache[*", "cache[mode=plain]", "ranks*")),
    check=st.sampled_from(("*", "drop[*", "drop[a]", "keep")),
    when=st.fixed_dictionaries(
        {},
        optional={
            "vllm": st.sampled_from(("<0.8", ">=0.7", "==0.8.2", "!=0.7.3")),
            "device": st.sampled_from(("cpu", "cuda")),
            "torch": st.sampled_from((">=2.6", "<2.6")),
        },
    ),
    status=st.sampled_from((("FAIL",), ("FAIL", "PASS"), ("PASS", "FAIL"))),
    reason=st.sampled_from(("known for a long time", "known for another reason")),
)


def consistent(found: Sequence[Seen], known: Sequence[Expectation]) -> bool:
    try:
        return first_fault(known, CELLS) is None and bool([verdict_of(it, known) for it in found])
    except ConfigurationError:
        return False


def verdict_of(it: Seen, entries: Sequence[Expectation]) -> Verdict:
    return verdict(it.check, it.cell.question, it.axes, entries)[0]


@settings(max_examples=70, deadline=None)
@given(sights(), st.lists(ENTRIES, max_size=3))
@example(
    [seen(CELLS[0], passed("drop[a]")), seen(CELLS[0], fails("keep"))],
    [entry(scenario="*", check="drop[*"), entry(check="*")],
)
def test_nothing_is_unexpected_under_what_is_proposed_and_no_new_entry_is_idle(
    found: list[Seen], known: list[Expectation]
) -> None:
    assume(consistent(found, known))
    proposal = propose(found, known, CELLS, TODAY)
    assert first_fault(proposal.entries, CELLS) is None, "the file can be read again"
    assert proposal.apart == (), "each cell was seen once, so its version, device and question tell it apart"
    verdicts = [verdict_of(it, proposal.entries) for it in found]
    assert not UNEXPECTED & set(verdicts)
    for new in proposal.new:
        rest = [other for other in proposal.entries if other is not new]
        assert [verdict_of(it, rest) for it in found] != verdicts
    for old, fate in zip(known, proposal.fates, strict=True):
        assert fate.entry == old or fate.why, "nothing changes without a word"


@settings(max_examples=30, deadline=None)
@given(sights(), st.lists(ENTRIES, max_size=3))
def test_a_second_time_it_has_nothing_to_say(found: list[Seen], known: list[Expectation]) -> None:
    assume(consistent(found, known))
    once = propose(found, known, CELLS, TODAY).entries
    again = propose(found, once, CELLS, TODAY)
    assert (again.entries, again.new) == (once, ())


# --- the file ---

FILE = """# What is known.
schema = 1

# --- CPU ---

# about the first
# and more of it
[[expect]]
scenario = "a*"  # any
check = "x"
when = { vllm = "<0.9" }  # since 0.6
status = ["FAIL"]
match = { reason = "no" }
reason = "it is the first of them"
link = "https://example.invalid/1"


# --- GPU ---

[[expect]]
scenario = "b*"
check = "y"
status = ["FAIL"]
reason = "it is the second of them"
expires = 2027-01-01
[expect.match]
reason = "no"
"""


def parsed(text: str) -> tuple[Expectation, ...]:
    return ExpectationsFile.model_validate(tomllib.loads(text)).expect


def test_a_file_that_does_not_change_does_not_change() -> None:
    assert edited(FILE, parsed(FILE), ()) == FILE


def test_an_entry_goes_with_its_comment_and_no_other() -> None:
    first, second = parsed(FILE)
    without_first = edited(FILE, [None, second], ())
    assert "about the first" not in without_first
    assert without_first.startswith("# What is known.\nschema = 1\n\n# --- CPU ---\n\n# --- GPU ---\n\n[[expect]]")
    without_second = edited(FILE, [first, None], ())
    assert without_second == FILE[: FILE.index('[[expect]]\nscenario = "b*"')]


def test_a_condition_is_changed_in_its_place() -> None:
    first, second = parsed(FILE)
    one = first.model_copy(update={"when": {"vllm": "<0.9,!=0.8.5"}})
    two = second.model_copy(update={"when": {"vllm": "!=0.8.5"}})
    text = edited(FILE, [one, two], ())
    assert 'when = { vllm = "<0.9,!=0.8.5" }  # since 0.6\n' in text
    assert '[[expect]]\nwhen = { vllm = "!=0.8.5" }\nscenario = "b*"' in text
    assert len(text.splitlines()) == len(FILE.splitlines()) + 1
    three = first.model_copy(update={"scenario": "a[x=1]"})
    assert edited(FILE, [three, second], ()) == FILE.replace('"a*"  # any', '"a[x=1]"  # any')


def test_new_entries_stand_at_the_end() -> None:
    new = entry(check="späť\x7f", match={"type": "E", "message": r"a\.b '\[.+\]'"}, expires=TODAY)
    text = edited(FILE, parsed(FILE), [new, entry()])
    assert text.startswith(FILE)
    assert parsed(text)[2:] == (new, entry())


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('when = { vllm = "<0.9" }  # since 0.6', 'when.vllm = "<0.9"'),
        ('when = { vllm = "<0.9" }  # since 0.6', '"when" = { vllm = "<0.9" }'),
        ('[[expect]]\nscenario = "a*"', '[["expect"]]\nscenario = "a*"'),
    ],
)
def test_a_file_that_cannot_be_edited_line_by_line_is_refused(old: str, new: str) -> None:
    text = FILE.replace(old, new)
    assert parsed(text) == parsed(FILE)
    first, second = parsed(text)
    with pytest.raises(ConfigurationError, match="line by line"):
        edited(text, [first.model_copy(update={"when": {"vllm": "<0.8"}}), second], ())


@given(st.text(min_size=10, max_size=40), st.text(max_size=20))
def test_any_text_comes_back(reason: str, check: str) -> None:
    new = entry(reason=reason.encode("utf-8", "replace").decode(), check=check.encode("utf-8", "replace").decode())
    assert parsed(f"schema = 1\n{toml(new)}\n") == (new,)
