"""A plan split over machines: disjoint, complete, references with their readers; and a run of one shard."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.cells import Cell, Deadlines, Resources, Selection
from harness.errors import ConfigurationError, NothingSelectedError
from harness.plan import Planned
from harness.planfile import read_plan
from harness.project import Project, build_options, make_plan
from harness.records import records_of
from harness.resume import rest_of
from harness.run import Outcome
from harness.shards import Shard, keep, parse_shard, shard_ids, split
from harness.status import Status
from tests import scripted
from tests.scripted import RefusingBackend, ScriptedBackend
from tests.test_run import go_with, project  # noqa: F401 - a fixture


def cell(target: int, scenario: str, seconds: float, reference: str | None = None) -> Cell:
    name = f"t{target}"
    return Cell(
        target=name,
        vllm="0.8.5",
        python="3.11",
        device="cpu",
        scenario=scenario,
        file="test_x.py",
        resources=Resources(cpus=1, memory=1, shm=1, gpus=0),
        deadlines=Deadlines(total=seconds, silence=1),
        reference=f"{name}@cpu/{reference}" if reference else None,
    )


@st.composite
def cells(draw: st.DrawFn) -> tuple[Cell, ...]:
    """Targets, each with a reference, some cells that read it and some that don't, in any order."""
    made: list[Cell] = []
    for target in range(draw(st.integers(1, 6))):
        times = st.lists(st.sampled_from([1.0, 2.5, 60.0, 900.0]), max_size=4)
        made += [cell(target, "ref", draw(st.sampled_from([1.0, 30.0])))] if draw(st.booleans()) else []
        made += [cell(target, f"reads{n}", seconds, "ref") for n, seconds in enumerate(draw(times))]
        made += [cell(target, f"alone{n}", seconds) for n, seconds in enumerate(draw(times))]
    return tuple(draw(st.permutations(made)))


def planned(some: tuple[Cell, ...]) -> tuple[Planned, ...]:
    return tuple(Planned(cell=c, digest=c.id, facts={}, action="run", reason="", selected=True) for c in some)


@given(cells(), st.integers(1, 7))
def test_shards_are_disjoint_complete_and_hold_references_together(some: tuple[Cell, ...], of: int) -> None:
    shards = [shard_ids(some, Shard(number, of)) for number in range(1, of + 1)]
    assert sorted(name for shard in shards for name in shard) == sorted(one.id for one in some)
    assert shards == [shard_ids(some[::-1], Shard(number, of)) for number in range(1, of + 1)], "order must not matter"
    for shard in shards:
        for one in some:
            if one.id in shard and one.reference in {other.id for other in some}:
                assert one.reference in shard


@given(cells(), st.integers(1, 7))
def test_every_shard_names_all_cells_and_does_its_own(some: tuple[Cell, ...], of: int) -> None:
    whole, done = planned(some), []
    for number in range(1, of + 1):
        try:
            part = split(whole, some, Shard(number, of))
        except NothingSelectedError:
            assert not shard_ids(some, Shard(number, of))
            continue
        assert [(p.cell, p.digest) for p in part] == [(p.cell, p.digest) for p in whole]
        done += [p.cell.id for p in part if p.action == "run"]
        assert {p.reason for p in part if p.action == "elsewhere"} <= {f"not in shard {number}/{of}"}
    assert sorted(done) == sorted(one.id for one in some)


def test_the_load_is_about_the_same() -> None:
    some = tuple(cell(n, "alone", seconds) for n, seconds in enumerate([900, 500, 400, 300, 200, 100]))
    loads = [sum(c.deadlines.total for c in some if c.id in shard_ids(some, Shard(n, 2))) for n in (1, 2)]
    assert loads == [1200, 1200]


def test_what_is_kept_takes_its_reference_along_and_nothing_else_of_others() -> None:
    some = (cell(0, "ref", 1), cell(0, "a", 1, "ref"), cell(0, "b", 1, "ref"), cell(1, "ref", 1))
    part = keep(planned(some), {"t0@cpu/a"}, "not selected")
    assert [p.action for p in part] == ["run", "run", "elsewhere", "elsewhere"]
    na = tuple(replace(p, action="na") for p in planned(some))
    assert {p.action for p in keep(na, {"t1@cpu/ref"}, "not selected")} == {"na", "elsewhere"}
    with pytest.raises(NothingSelectedError):
        keep(planned(some), {"t9@cpu/ref"}, "not selected")


@pytest.mark.parametrize("text", ["", "2", "0/4", "5/4", "1/0", "-1/2", "1/2/3", "a/b", "1.0/2", "1 /2", "٣/٤"])
def test_what_is_no_shard(text: str) -> None:
    with pytest.raises(ConfigurationError, match="is no shard") as caught:
        parse_shard(text)
    assert caught.value.exit_code == 2


def test_a_shard(project: Project) -> None:  # noqa: F811
    backend = ScriptedBackend(scripted.passes)
    outcome = sharded(project, backend, "2/2")
    assert outcome.exit_code == 0
    assert len(backend.launches) == len(outcome.matrix.squares) == len(records_of(outcome.folder)) == 2
    assert (outcome.matrix.elsewhere, outcome.matrix.green) == (2, True)
    plan = read_plan(outcome.folder)
    assert [entry.action for entry in plan.cells].count("elsewhere") == 2
    assert len({cell.target for cell in (entry.cell for entry in plan.own)}) == 1
    assert [path.name for path in (outcome.folder / "targets").iterdir()] == [f"{plan.own[0].cell.target}@cpu.json"]
    assert json.loads((outcome.folder / "matrix.json").read_text())["elsewhere"] == 2
    assert "2 cells: 2 ok; 2 more cells elsewhere" in (outcome.folder / "matrix.md").read_text()


def sharded(project: Project, backend: ScriptedBackend, shard: str, fresh: bool = False) -> Outcome:  # noqa: F811
    plan = make_plan(project, Selection(), None, fresh, build_options(project))
    return go_with(project, backend, split(plan, [p.cell for p in plan], parse_shard(shard)))


def test_a_reused_record_of_another_shard_stays_where_it_is(project: Project) -> None:  # noqa: F811
    sharded(project, ScriptedBackend(scripted.passes), "1/2")
    again = sharded(project, idle := ScriptedBackend(scripted.passes), "1/2")
    assert (idle.launches, len(records_of(again.folder))) == ([], 2)
    other = sharded(project, ScriptedBackend(scripted.passes), "2/2")
    assert not set(records_of(other.folder)) & set(records_of(again.folder))


def test_resume_leaves_what_is_elsewhere(project: Project) -> None:  # noqa: F811
    first = sharded(project, RefusingBackend(2), "1/2")
    assert {square.status for square in first.matrix.squares} == {Status.MISS, Status.PASS}
    rest = rest_of(project, first.folder, build_options(project), "docker")
    assert [p.cell.id for p in rest.plan] == [s.cell.id for s in first.matrix.squares if s.status == Status.MISS]
    second = go_with(project, backend := ScriptedBackend(scripted.passes), rest.plan, first.folder)
    assert (second.exit_code, len(backend.launches), len(records_of(first.folder))) == (0, 1, 2)


def test_a_resumed_run_without_the_reference_of_its_na_cells(project: Project) -> None:  # noqa: F811
    """What only NA cells would have read is in no plan; their digests need it all the same."""
    (cells_,) = [
        make_plan(project, Selection(ids=["vllm-0.8.5@cpu/multi*qwen2_vl]"]), None, True, build_options(project))
    ]
    first = go_with(project, ScriptedBackend(scripted.passes), [p for p in cells_ if p.selected])
    assert rest_of(project, first.folder, build_options(project), "docker").plan == ()
