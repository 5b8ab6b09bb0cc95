"""Runs united: whose record is taken; what is missing, double or at odds is found, and nothing missing is green."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
from click.testing import Result
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from harness.backends.base import Launch
from harness.cells import Selection
from harness.cli import app
from harness.errors import ConfigurationError
from harness.merge import NOWHERE, Part, unite
from harness.merged import merge
from harness.plan import digest
from harness.planfile import PlanFile, PlannedEntry
from harness.project import Project, build_options, make_plan
from harness.records import CheckRecord, ExitState, Host, Record, Revision, records_of, write_record
from harness.resume import rest_of
from harness.run import Outcome
from harness.status import NOTRUN, Status
from tests import scripted
from tests.scripted import RefusingBackend, ScriptedBackend
from tests.test_cli import Said, cli  # noqa: F401 - a fixture
from tests.test_plan import NOW
from tests.test_run import go, go_with, project  # noqa: F401 - a fixture
from tests.test_shards import cell, sharded

REF, READS, ALONE = cell(0, "ref", 1), cell(0, "reads", 1, "ref"), cell(0, "alone", 1)


def part(name: str, records: dict[str, Status] | None = None, age: int = 0, **actions: str) -> Part:
    """A run of the three cells. `records`, `actions` and what is not in the plan ("-") by scenario."""
    entries = [
        PlannedEntry(
            cell=c,
            digest=digest({"image": actions.get("image", "i")}),
            facts={"image": actions.get("image", "i")},
            action=actions.get(c.scenario, "run"),  # type: ignore[arg-type]
            reason="",
            selected=c is not REF,
        )
        for c in (REF, READS, ALONE)
        if actions.get(c.scenario) != "-"
    ]
    made = {
        e.cell.id: record(e, name, records[e.cell.scenario], age) for e in entries if e.cell.scenario in (records or {})
    }
    plan = PlanFile(run=name, created=NOW, cells=tuple(entries), not_runnable=("old",))
    return Part(name=name, folder=Path(name), plan=plan, records=made)


def record(entry: PlannedEntry, run: str, status: Status, age: int) -> Record:
    c, started = entry.cell, NOW - timedelta(hours=age)
    return Record(
        run=run, cell=c.id, attempt=1, target=c.target, vllm=c.vllm, python="3.11", device=c.device,
        scenario=c.scenario, params={}, axes={}, digest=entry.digest, facts=entry.facts, backend="local",
        started=started, ended=started, status=status, checks=(CheckRecord(id="a", status=status),),
        revision=Revision(version="0"), host=Host(machine="x86_64", cpus=2, memory=1),
    )  # fmt: skip


ALL = dict.fromkeys(("ref", "reads", "alone"), Status.PASS)


def test_shards_come_to_the_whole() -> None:
    one = part("one", {"ref": Status.PASS, "reads": Status.FAIL}, alone="elsewhere")
    two = part("two", {"alone": Status.PASS}, ref="elsewhere", reads="elsewhere")
    for union in (unite([one, two]), unite([two, one])):
        assert {name: part.name for name, part in union.taken.items()} == {
            REF.id: "one", READS.id: "one", ALONE.id: "two",
        }  # fmt: skip
        assert {(e.action, e.reason) for e in union.entries} == {("run", "")}
        assert [e.selected for e in union.entries] == [False, True, True]
        assert (union.doubled, union.missing, union.not_runnable) == ((), (), ("old",))


def test_what_no_run_has_is_missing() -> None:
    one = part("one", {"ref": Status.PASS}, alone="elsewhere")
    two = part("two", {}, ref="elsewhere", reads="elsewhere", alone="elsewhere")
    union = unite([one, two])
    assert union.missing == (READS.id, ALONE.id)
    assert [(e.action, e.reason) for e in union.entries] == [("run", ""), ("run", ""), ("run", NOWHERE)]
    assert f"{ALONE.id}: no record in any of the runs" in union.lines()


def test_a_reference_that_nobody_reads_any_more_is_not_missing() -> None:
    knew = part("knew", {"reads": Status.NA}, ref="-", reads="na", alone="elsewhere")
    other = part("other", {"alone": Status.PASS}, ref="elsewhere", reads="elsewhere")
    assert unite([knew, other]).missing == ()
    assert [e.cell.id for e in unite([knew, other]).entries] == [READS.id, ALONE.id]
    unread = part("knew", {"reads": Status.MISS}, ref="-", reads="na", alone="elsewhere")
    union = unite([unread, other])
    assert [e.cell.id for e in union.entries] == [REF.id, READS.id, ALONE.id], "references first"
    assert union.missing == (REF.id,)


def test_doubled_the_older_is_kept_and_said() -> None:
    older, newer = part("older", ALL, 2), part("newer", ALL, 1)
    for union in (unite([older, newer]), unite([newer, older])):
        assert {part.name for part in union.taken.values()} == {"older"}
        assert len(union.doubled) == 3
        assert f"{REF.id}: the same in older, which is older and kept, and in newer" in union.doubled


def test_one_record_that_both_took_over_is_no_double() -> None:
    assert unite([part("one", ALL), part("two", ALL)]).doubled == ()


def test_a_conflict_names_both_and_what_to_do() -> None:
    with pytest.raises(ConfigurationError) as caught:
        unite([part("one", ALL, 2), part("two", ALL | {"reads": Status.FAIL}, 1)])
    assert f"{READS.id}: one says PASS (PASS a); two says FAIL (FAIL a)" in str(caught.value)
    assert "leave one run out" in str(caught.value)
    assert caught.value.exit_code == 2


def test_the_same_status_with_other_checks_is_a_conflict() -> None:
    one, two = part("one", {"alone": Status.FAIL}), part("two", {"alone": Status.FAIL}, 1)
    other = two.records[ALONE.id].model_copy(update={"checks": (CheckRecord(id="b", status=Status.FAIL),)})
    with pytest.raises(
        ConfigurationError, match=r"two says FAIL \(NOTRUN a, FAIL b\); one says FAIL \(FAIL a, NOTRUN b\)"
    ):
        unite([one, Part(name="two", folder=Path("two"), plan=two.plan, records={ALONE.id: other})])


@pytest.mark.parametrize("status", [Status.PASS, Status.FAIL, Status.TIMEOUT, Status.NA])
def test_beside_a_miss_the_final_record_wins(status: Status) -> None:
    missed, final = part("missed", {"alone": Status.MISS}, 2), part("final", {"alone": status}, 1)
    for union in (unite([missed, final]), unite([final, missed])):
        assert (union.taken[ALONE.id].name, union.doubled) == ("final", ())
    newer = part("newer", {"alone": Status.MISS}, 1)
    assert unite([missed, newer]).taken[ALONE.id].name == "newer"


def test_another_digest_names_the_cell_and_what_differs() -> None:
    with pytest.raises(ConfigurationError) as caught:
        unite([part("one", ALL), part("two", {}, image="j", ref="elsewhere")])
    assert f"{REF.id} in one and in two: image" in str(caught.value)


def test_a_record_of_something_else_than_was_planned() -> None:
    one, strange = part("one", {}), part("strange", ALL, image="j")
    with pytest.raises(ConfigurationError, match=r"in one: its record is not of what was planned"):
        unite([Part(name="one", folder=Path("one"), plan=one.plan, records=strange.records)])


@given(st.lists(st.tuples(*[st.sampled_from([None, Status.PASS, Status.MISS])] * 3), min_size=1, max_size=5))
def test_every_cell_is_in_exactly_one_state(runs: list[tuple[Status | None, ...]]) -> None:
    parts = [
        part(str(n), {s: status for s, status in zip(("ref", "reads", "alone"), some, strict=True) if status}, n)
        for n, some in enumerate(runs)
    ]
    union = unite(parts)
    for number, one in enumerate((REF, READS, ALONE)):
        seen = {some[number] for some in runs}
        if one.id in union.taken:
            status = union.taken[one.id].records[one.id].status
            assert status is (Status.PASS if Status.PASS in seen else Status.MISS)
        else:
            assert seen == {None}
        named = one.id in {e.cell.id for e in union.entries}
        assert (one.id in union.missing) == (named and one.id not in union.taken)
        assert named or one is REF


# --- folders ----------------------------------------------------------------------------------------------------------


def evidence(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.glob("cells/**/*") if path.is_file() and path.name != "record.json"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_merged_shards_are_the_run_of_all(project: Project) -> None:  # noqa: F811
    parts = [sharded(project, ScriptedBackend(scripted.passes), f"{n}/2") for n in (1, 2)]
    outcome, union = merge(project, [one.folder for one in parts])
    whole = go(project, ScriptedBackend(scripted.passes), fresh=True)
    assert union.lines() == []
    assert (outcome.exit_code, outcome.matrix.green, outcome.matrix.elsewhere) == (0, True, 0)
    assert [s.cell for s in outcome.matrix.squares] == [s.cell for s in whole.matrix.squares]
    assert evidence(outcome.folder) == evidence(parts[0].folder) | evidence(parts[1].folder)
    assert [t.row for t in outcome.matrix.targets] == [t.row for t in whole.matrix.targets]
    names = {one.matrix.run for one in parts}
    records = records_of(outcome.folder).values()
    assert {record.run for record in records} == {outcome.folder.name}
    assert {record.reused_from for record in records} == names
    assert {"matrix.json", "matrix.md", "matrix.html"} <= {path.name for path in outcome.folder.iterdir()}
    assert not (project.results / ".merge").exists()


def test_a_merged_run_is_resumed_and_reused_as_any_other(project: Project) -> None:  # noqa: F811
    first = sharded(project, ScriptedBackend(scripted.passes), "1/2")
    second = sharded(project, RefusingBackend(99), "2/2")
    outcome, _ = merge(project, [first.folder, second.folder])
    assert outcome.exit_code == 5
    rest = rest_of(project, outcome.folder, build_options(project), "docker")
    assert len(rest.plan) == 2
    done = go_with(project, ScriptedBackend(scripted.passes), rest.plan, outcome.folder)
    assert done.exit_code == 0
    assert {record.attempt for record in records_of(outcome.folder).values()} == {1, 3}
    again = make_plan(project, Selection(), None, False, build_options(project))
    assert {p.action for p in again} == {"reuse"}


def test_what_is_missing_is_not_run_and_never_green(project: Project) -> None:  # noqa: F811
    one, two = (sharded(project, ScriptedBackend(scripted.passes), "1/2", fresh=True) for _ in range(2))
    outcome, union = merge(project, [one.folder, two.folder])
    assert [s.status for s in outcome.matrix.squares].count(NOTRUN) == len(union.missing) == len(union.doubled) == 2
    assert (outcome.matrix.green, outcome.exit_code) == (False, 5)


def fails(launch: Launch, stopped: threading.Event) -> ExitState:
    return scripted.signal_9(launch, stopped)


def test_nothing_is_written_where_runs_are_at_odds(project: Project) -> None:  # noqa: F811
    one = go(project, ScriptedBackend(scripted.passes))
    two = go(project, ScriptedBackend(fails), fresh=True)
    before = sorted(project.results.rglob("*"))
    with pytest.raises(ConfigurationError, match="different ends"):
        merge(project, [one.folder, two.folder])
    assert sorted(project.results.rglob("*")) == before


def test_all_attempts_of_the_run_that_counts_and_earlier_misses_of_others(project: Project) -> None:  # noqa: F811
    """The last attempt is the one that counts."""
    one = Selection(targets=["vllm-0.8.5"], scenarios=["cold_start"])
    missed = go(project, RefusingBackend(99), select=one)  # attempts 1 and 2
    other = go(project, RefusingBackend(99), select=one)
    recovered = go(project, RefusingBackend(1), select=one, fresh=True)
    assert attempts(recovered) == ["attempt-1", "attempt-2"]
    outcome, _ = merge(project, [missed.folder, recovered.folder])
    assert attempts(outcome) == ["attempt-1", "attempt-2"]
    (record,) = records_of(outcome.folder).values()
    assert (record.status, record.attempt) == (Status.PASS, 2)
    again = go(project, ScriptedBackend(scripted.passes), resumed=other.folder)  # attempt 3
    drop_first(again.folder)
    outcome, _ = merge(project, [missed.folder, again.folder])
    assert attempts(outcome) == ["attempt-1", "attempt-2", "attempt-3"]


def drop_first(folder: Path) -> None:
    for number in (1, 2):
        (path,) = folder.glob(f"cells/*/attempt-{number}/record.json")
        path.unlink()
        path.parent.rename(folder / f"gone-{number}")


def attempts(outcome: Outcome) -> list[str]:
    return sorted(path.name for path in outcome.folder.glob("cells/*/attempt-*"))


def test_the_command(project: Project) -> None:  # noqa: F811
    one, two = (sharded(project, ScriptedBackend(scripted.passes), f"{n}/2") for n in (1, 2))
    done = said(project, "merge", one.folder.name, str(two.folder))
    assert (done.exit_code, "4 cells: 4 ok" in done.output) == (0, True), done
    newest = max((project.results / "runs").iterdir(), key=lambda path: path.stat().st_mtime)
    merged = json.loads((newest / "matrix.json").read_text())
    assert (merged["green"], len(merged["cells"])) == (True, 4)
    assert "PASS" in said(project, "show", "vllm-0.8.5*multi*", "--run", newest.name).output
    for names, words in (((one.folder.name,) * 2, "there is nothing to merge"), (("x", "y"), "no such run: x")):
        assert words in str(said(project, "merge", *names).exception)
    half = said(project, "merge", one.folder.name, str(copy_of(one.folder, project)))
    assert half.exit_code == 5
    assert half.output.count("no record in any of the runs") == 2
    assert half.output.count("which is older and kept") == 2


def said(project: Project, *arguments: str) -> Result:  # noqa: F811
    return CliRunner().invoke(app, [*arguments, "--config", str(project.root / "matrix.toml")])


def copy_of(folder: Path, project: Project) -> Path:  # noqa: F811
    """The same run under another name, half an hour older."""
    target = project.root / "carried"
    shutil.copytree(folder, target)
    for path in target.glob("cells/*/attempt-*/record.json"):
        own = Record.model_validate_json(path.read_bytes())
        write_record(path.parent, own.model_copy(update={"started": own.started - timedelta(minutes=30)}))
    return target


def test_plan_by_shard(cli: Callable[..., Said], project: Project) -> None:  # noqa: F811
    said = cli("plan", "--json", "--shard", "2/2")
    assert "shard 2/2: 2 of 4 cells" in said.err
    actions = [cell["action"] for cell in json.loads(said.out)["cells"]]
    assert sorted(actions) == ["elsewhere", "elsewhere", "run", "run"]
    empty = cli("plan", "--shard", "3/3")
    assert (empty.code, "Take fewer shards" in empty.err) == (3, True)
    resumed = cli("run", "--resume", go(project, ScriptedBackend(scripted.passes)).folder.name, "--shard", "1/2")
    assert (resumed.code, "Leave out selectors" in resumed.err) == (2, True)
