"""A bundle on a machine without a network: unpacked, planned again, its environments made, its records packed."""

from __future__ import annotations

import base64
import hashlib
import io
import subprocess
import sys
import tarfile
import threading
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from harness import environments, models, workplace
from harness.backends.base import Launch
from harness.bundles import borrow, node
from harness.bundles.borrow import lend
from harness.bundles.index import Borrowed, Content, Index, TargetContents, write_index
from harness.bundles.node import (
    Node,
    Outbox,
    Wish,
    load_node_project,
    open_node,
    plan_here,
    require_parts,
    run_bundle,
    verify_bundle,
)
from harness.bundles.parts import put
from harness.bundles.repack import encode, stored
from harness.bundles.unpack import unpack_once
from harness.bundles.wheelhouse import release_of
from harness.cells import Selection
from harness.environments import markers_of
from harness.errors import BuildError, ConfigurationError, InfrastructureError, NothingSelectedError
from harness.images import BuiltImage, Image
from harness.packs import unpack
from harness.plan import Planned
from harness.planfile import write_plan
from harness.project import Project, build_options, images_for, load_project, make_plan
from harness.records import ExitState, Revision
from harness.run import Tools, execute
from harness.status import Status
from tests import scripted
from tests.conftest import SPEC
from tests.scripted import ScriptedBackend
from tests.test_run import builds

MINOR = f"{sys.version_info.major}.{sys.version_info.minor}"
HERE = "vllm-0.8.5@cpu"


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def record_of(files: Mapping[str, bytes], metadata: str) -> str:
    digests = {name: base64.urlsafe_b64encode(hashlib.sha256(data).digest()) for name, data in files.items()}
    lines = [f"{name},sha256={digest.rstrip(b'=').decode()},{len(files[name])}" for name, digest in digests.items()]
    return "\n".join([*lines, f"{metadata}/RECORD,,", ""])


def wheel(name: str, version: str, text: str = "x = 1\n", **more: bytes) -> tuple[str, bytes, str]:
    """Name, bytes and RECORD of a wheel with one module."""
    metadata = f"{name}-{version}.dist-info"
    files = {
        f"{name}.py": text.encode(),
        **more,
        f"{metadata}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".encode(),
        f"{metadata}/WHEEL": b"Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = record_of(files, metadata)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as file:
        for path, data in {**files, f"{metadata}/RECORD": record.encode()}.items():
            file.writestr(zipfile.ZipInfo(path), data, zipfile.ZIP_DEFLATED)
    return f"{name}-{version}-py3-none-any.whl", buffer.getvalue(), record


@dataclass
class Home:
    """Where a bundle is made: a project of two targets, and what the bundle holds so far."""

    root: Path
    bundle: Path
    contents: dict[str, Content] = field(default_factory=dict)
    parts: dict[str, int] = field(default_factory=dict)
    targets: dict[str, TargetContents] = field(default_factory=dict)

    def add(self, name: str, data: bytes, zstd: bool = False, origin: str | None = None) -> str:
        scratch = self.root / "scratch"
        scratch.write_bytes(data)
        packed = scratch
        if zstd:
            packed = self.root / "packed"
            encode(scratch, packed)
        names = put(self.bundle / "parts", packed, 1000)
        self.parts |= {part: (self.bundle / "parts" / part).stat().st_size for part in names}
        made = sha256(data)
        encoding: Any = "zstd" if zstd else "raw"
        self.contents[made] = Content(name=name, bytes=len(data), encoding=encoding, parts=names, origin=origin)
        return made

    def add_wheel(self, name: str, data: bytes) -> str:
        """As `bundle` packs it: stored, and one zstd stream over that."""
        (self.root / name).write_bytes(data)
        stored(self.root / name, self.root / "stored.whl")
        return self.add(name, (self.root / "stored.whl").read_bytes(), zstd=True, origin=sha256(data))

    def write(self, python: str = MINOR, **more: bytes) -> Node:
        """The bundle of all cells of the profile."""
        project = load_project(self.root / "project" / "matrix.toml", python)
        plan = make_plan(project, Selection(), None, True, build_options(project), "local")
        write_plan(project.root, "home", plan, ())
        files = {
            path.relative_to(project.root).as_posix(): path.read_bytes()
            for path in sorted(project.root.rglob("*"))
            if path.is_file()
        }
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as tar:
            for name, data in {**files, **more}.items():
                info = tarfile.TarInfo(name)
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
        return self.index(self.add("project.tar", buffer.getvalue()), python)

    def index(self, project: str, python: str = MINOR) -> Node:
        made = Index(
            kind="wheels",
            python=python,
            platform="x86_64-unknown-linux-gnu",
            created=datetime.now(UTC),
            revision=Revision(version="1", commit="c0ffee", dirty=False),
            contents=self.contents,
            parts=self.parts,
            launch=(),
            project=project,
            targets=self.targets,
        )
        write_index(self.bundle, made)
        return open_node(self.bundle, None)


LOCK = "thing==1.0 \\\n    --hash=sha256:{sha}\nelsewhere==2.0 ; sys_platform == 'win32' --hash=sha256:{sha}\n"
DOCKERFILE = (
    "ARG BASE\nFROM ${{BASE}}\nCOPY {target}/cpu.lock {target}/step.py /opt/\n"
    "RUN install-locked /opt/cpu.lock && python3 /opt/step.py /opt/cpu.lock\n"
)
STEP = "import pathlib, sys\npathlib.Path(sys.prefix, 'seen').write_text(open(sys.argv[1]).read())\n"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    made = Home(tmp_path / "home", tmp_path / "bundle")
    name, data, _ = wheel("thing", "1.0")
    project = made.root / "project"
    for target in ("vllm-0.8.5", "vllm-0.10.0"):
        folder = project / "docker" / target
        folder.mkdir(parents=True)
        (folder / "Dockerfile").write_text(DOCKERFILE.format(target=target))
        (folder / "cpu.lock").write_text(LOCK.format(sha=sha256(data)))
        (folder / "step.py").write_text(STEP)
    (project / "docker" / "base").mkdir()
    (project / "docker" / "base" / "Dockerfile").write_text("FROM scratch\n")
    (project / "matrix.toml").write_text(SPEC)
    (project / "scenarios").mkdir()
    for scenario in ("cold_start", "multimodal_rollout"):
        (project / "scenarios" / f"test_{scenario}.py").write_text("def test_a(): ...\n")
    shared = made.add_wheel(name, data)
    made.targets = {target: TargetContents(contents=(shared,)) for target in (HERE, "vllm-0.10.0@cpu")}
    monkeypatch.setattr(environments, "NEEDED", 0)
    monkeypatch.setattr(environments, "find_python", lambda version: Path(sys.executable))
    monkeypatch.setattr(workplace, "check_host", lambda devices: None)
    monkeypatch.setenv("UV_DEFAULT_INDEX", "http://localhost:1/simple")
    return made


@pytest.fixture
def here(home: Home, monkeypatch: pytest.MonkeyPatch) -> Node:
    """The bundle, on a machine."""
    return on(home.write(), monkeypatch)


def on(made: Node, monkeypatch: pytest.MonkeyPatch) -> Node:
    for name, value in made.variables.items():
        monkeypatch.setenv(name, value)
    return made


# --- the project -----------------------------------------------------------------------------------------------------


def test_the_project_is_the_bundles_and_says_where_it_is_from(here: Node) -> None:
    project = load_node_project(here, print)
    assert project.root == here.work / "project"
    assert project.revision == Revision(version="1", commit="c0ffee", dirty=False)
    assert project.python_of("vllm-0.8.5") == MINOR
    assert {cell.python for cell in project.cells} == {MINOR}


def test_another_bundle_replaces_the_project_and_no_result(
    home: Home, here: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = load_node_project(here, print)
    result = project.results / "runs" / "x" / "plan.json"
    result.parent.mkdir(parents=True)
    result.write_text("{}")
    (home.root / "project" / "scenarios" / "test_cold_start.py").rename(home.root / "project" / "scenarios" / "rig.py")
    (home.root / "project" / "scenarios" / "test_cold_start.py").write_text("def test_new(): ...\n")
    load_node_project(home.write(extra=b"1"), print)
    assert "test_new" in (project.suite / "test_cold_start.py").read_text()
    assert (project.root / "extra").exists()
    (home.root / "project" / "scenarios" / "rig.py").unlink()
    again = home.write()
    load_node_project(again, print)
    assert not (project.suite / "rig.py").exists()
    assert not (project.root / "extra").exists()
    assert result.read_text() == "{}"


def test_unpacking_that_was_cut_short_is_begun_again(here: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = here.work / "project"

    def broken(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("harness.bundles.unpack._write", broken)
        with pytest.raises(OSError, match="No space left"):
            load_node_project(here, print)
    (folder / "docker").mkdir()
    (folder / "docker" / "rubbish").write_text("")
    load_node_project(here, print)
    assert not (folder / "docker" / "rubbish").exists()
    assert not list(here.work.glob(".*.tar"))


def _link(info: tarfile.TarInfo) -> None:
    info.type, info.linkname = tarfile.SYMTYPE, "/etc"


HOSTILE: dict[str, tuple[str, Callable[[tarfile.TarInfo], None]]] = {
    "above": ("../matrix.toml", lambda info: None),
    "absolute": ("/tmp/x", lambda info: None),
    "deep": ("a/../../x", lambda info: None),
    "a link": ("a", _link),
    "a pipe": ("a", lambda info: setattr(info, "type", tarfile.FIFOTYPE)),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_only_files_below_the_project_are_unpacked(home: Home, tmp_path: Path, name: str) -> None:
    path, change = HOSTILE[name]
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        info = tarfile.TarInfo(path)
        change(info)
        tar.addfile(info, io.BytesIO(b""))
    made = home.index(home.add("project.tar", buffer.getvalue()))
    with pytest.raises(ConfigurationError, match="no file below it"):
        unpack_once(made.bundle / "parts", made.index, tmp_path / "node" / "project")
    assert not (tmp_path / "node" / "project").exists()


def test_what_is_no_archive_is_one_clear_error(home: Home) -> None:
    made = home.index(home.add("project.tar", b"x" * 2000))
    with pytest.raises(ConfigurationError, match="no archive"):
        load_node_project(made, print)


# --- the plan --------------------------------------------------------------------------------------------------------


def test_the_plan_is_the_one_that_was_made_at_home(here: Node) -> None:
    project = load_node_project(here, print)
    plan = plan_here(project, Selection(), False, build_options(project))
    assert {planned.action for planned in plan} == {"run"}
    assert len(plan) == 4


def test_what_is_not_selected_is_elsewhere_but_for_references(here: Node) -> None:
    project = load_node_project(here, print)
    plan = plan_here(project, Selection(ids=["vllm-0.8.5@cpu/multi*"]), False, build_options(project))
    assert {planned.cell.id: planned.action for planned in plan} == {
        "vllm-0.8.5@cpu/cold_start[model=qwen2_vl]": "run",
        "vllm-0.8.5@cpu/multimodal_rollout[model=qwen2_vl]": "run",
        "vllm-0.10.0@cpu/cold_start[model=qwen2_vl]": "elsewhere",
        "vllm-0.10.0@cpu/multimodal_rollout[model=qwen2_vl]": "elsewhere",
    }
    with pytest.raises(NothingSelectedError):
        plan_here(project, Selection(targets=["vllm-9*"]), False, build_options(project))


def test_a_cell_that_would_be_another_one_here_is_refused_and_says_why(
    here: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = load_node_project(here, print)
    (project.suite / "test_cold_start.py").write_text("def test_other(): ...\n")
    what = r"(?s)would not be here.*cold_start\[model=qwen2_vl\]: suite is \w+… at home, \w+… here"
    with pytest.raises(ConfigurationError, match=what):
        plan_here(project, Selection(), False, build_options(project))
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    with pytest.raises(ConfigurationError, match=r"device_class is cpu/x86_64 at home, cpu/aarch64 here"):
        plan_here(project, Selection(), False, build_options(project))


# --- parts -----------------------------------------------------------------------------------------------------------


def test_parts_that_are_missing_or_damaged_are_listed_with_their_bytes(here: Node) -> None:
    assert require_parts(here, [HERE]) > 0
    missing, damaged = sorted(here.index.parts_of([here.index.project]))[:2]
    (here.bundle / "parts" / missing).unlink()
    path = here.bundle / "parts" / damaged
    path.write_bytes(b"x" * path.stat().st_size)
    with pytest.raises(InfrastructureError) as caught:
        require_parts(here, [HERE])
    said = str(caught.value)
    assert f"{missing} is missing ({here.index.parts[missing]} bytes)" in said
    assert f"{damaged} is damaged ({here.index.parts[damaged]} bytes)" in said
    assert "2 of" in said
    with pytest.raises(NothingSelectedError):
        require_parts(here, ["vllm-9@cpu"])


# --- environments ----------------------------------------------------------------------------------------------------


def build(here: Node, site: Path | None = None, target: str = "vllm-0.8.5") -> tuple[BuiltImage, Path]:
    project = load_node_project(here, print)
    options = build_options(project)
    plan = plan_here(project, Selection(), False, options)
    tools = node.node_tools(here, project, plan, options, Console(quiet=True), site)
    image = images_for(project, [planned.cell for planned in plan], options, "local")[target, "cpu"]
    made = tools.build(image, here.work / "log", print)
    return made, here.work / "cache" / "vllm-matrix" / "environments" / made.id


def test_an_environment_is_made_of_the_bundles_wheels_alone(here: Node) -> None:
    made, folder = build(here)
    assert not made.cached
    (module,) = folder.glob("lib/python3*/site-packages/thing.py")
    assert module.stat().st_nlink > 1, "hard links: it takes no room of its own"
    names = [p.name for p in (here.work / "wheels").iterdir()]
    assert names == ["thing-1.0-py3-none-any.whl"], "the other target needs it too"
    (content,) = here.index.targets[HERE].contents
    rewritten = f"thing==1.0 --hash=sha256:{content}\n"
    assert (folder / "locks" / "cpu.lock").read_text() == rewritten
    assert (folder / "seen").read_text() == rewritten, "a step that is given the lock gets this one"
    _, second = build(here, target="vllm-0.10.0")
    (shared,) = second.glob("lib/python3*/site-packages/thing.py")
    assert shared.stat().st_ino == module.stat().st_ino, "environments share what they have in common"
    assert list((here.work / "wheels").iterdir()) == []
    assert build(here)[0].cached


def test_one_that_is_there_needs_no_parts(here: Node) -> None:
    build(here)
    project = load_node_project(here, print)
    options = build_options(project)
    plan = plan_here(project, Selection(targets=["vllm-0.8.5"]), False, options)
    assert node.targets_of(plan) == (HERE,)
    assert node.not_made(project, plan, options) == ()


def test_a_wheel_that_is_another_one_is_put_together_again(here: Node) -> None:
    path = here.work / "wheels" / "thing-1.0-py3-none-any.whl"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"x")
    build(here)


def test_a_lock_that_names_another_file_is_refused(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    for lock in (home.root / "project" / "docker").rglob("cpu.lock"):
        lock.write_text(LOCK.format(sha="0" * 64))
    with pytest.raises(BuildError, match=r"no thing 1\.0 for vllm-0\.8\.5@cpu"):
        build(on(home.write(), monkeypatch))


def test_a_target_that_is_not_in_the_bundle_is_refused(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    del home.targets[HERE]
    with pytest.raises(BuildError, match=r"does not hold vllm-0\.8\.5@cpu"):
        build(on(home.write(), monkeypatch))


def test_a_file_of_an_index_is_known_by_its_name() -> None:
    assert str(release_of("Foo_bar-1.0.post1-py3-none-any.whl")[1]) == "1.0.post1"
    assert release_of("Foo_bar-1.0-py3-none-any.whl")[0] == release_of("foo-bar-1.0.tar.gz")[0] == "foo-bar"
    with pytest.raises(BuildError, match="no name of a wheel"):
        release_of("project.tar")


def test_markers_are_those_of_the_interpreter() -> None:
    found = markers_of(Path(sys.executable))
    assert found["python_version"] == MINOR
    assert found["python_full_version"].startswith(f"{MINOR}.")
    assert found["sys_platform"] == "linux"
    with pytest.raises(BuildError, match="does not start"):
        markers_of(Path("/nonexistent"))


# --- borrowing -------------------------------------------------------------------------------------------------------

FILES = {
    "big.py": b"y = 2\n",
    "big/lib.so": b"\x7fELF",
    "big-3.0.dist-info/METADATA": b"Metadata-Version: 2.1\nName: big\nVersion: 3.0\n",
    "big-3.0.data/scripts/big": b"#!python\n",
    "big-3.0.data/platlib/more.py": b"z = 3\n",
}
RECORD = record_of(FILES, "big-3.0.dist-info")


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """Site-packages that hold `big` as an installer left it, and something else."""
    site = tmp_path / "machine"
    for name, data in {**FILES, "more.py": b"z = 3\n", "stranger.py": b""}.items():
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_bytes(data)
    for name in ("RECORD", "INSTALLER", "REQUESTED"):
        (site / "big-3.0.dist-info" / name).write_text("pip\n")
    return site


def taken(target: Path) -> list[str]:
    return sorted(path.relative_to(target).as_posix() for path in target.rglob("*") if path.is_file())


WHOLE = ["big-3.0.dist-info/INSTALLER", "big-3.0.dist-info/METADATA", "big-3.0.dist-info/RECORD", "big.py"]
WHOLE = [*WHOLE, "big/lib.so", "more.py"]


def test_what_is_borrowed_is_linked_and_known_as_installed(machine: Path, tmp_path: Path) -> None:
    target = tmp_path / "site-packages"
    assert lend("big 3.0", RECORD, machine, target) == "4 files by hard link"
    assert taken(target) == WHOLE
    assert (target / "big.py").stat().st_ino == (machine / "big.py").stat().st_ino
    code = "from importlib.metadata import distribution as of; d = of('big'); print(d.version, len(d.files))"
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": str(target)}, capture_output=True, check=True
    )
    assert done.stdout == b"3.0 6\n"
    assert (target / "big-3.0.dist-info" / "INSTALLER").read_text() == "vllm-matrix\n"
    assert (machine / "big-3.0.dist-info" / "RECORD").read_text() == "pip\n"


def test_what_an_installer_wrote_is_neither_taken_nor_written_to(machine: Path, tmp_path: Path) -> None:
    listed = "big-3.0.dist-info/INSTALLER,sha256=x,4\n../../../bin/big,sha256=x,1\nbig-3.0.dist-info/REQUESTED,,\n"
    target = tmp_path / "site-packages"
    for _ in range(2):  # the second time all of it is there, as what other distributions have too
        lend("big 3.0", f"{RECORD}{listed}{RECORD}", machine, target)
        assert taken(target) == WHOLE
        assert (machine / "big-3.0.dist-info" / "INSTALLER").read_text() == "pip\n"


@pytest.mark.parametrize(("lacks", "how"), [(("link",), "symbolic link"), (("link", "symlink"), "copy")])
def test_where_there_can_be_no_hard_link_it_says_what_there_is(
    machine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lacks: tuple[str, ...], how: str
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    for name in lacks:
        monkeypatch.setattr(borrow.os, name, refused)
    target = tmp_path / "site-packages"
    assert lend("big 3.0", RECORD, machine, target) == f"4 files by {how}"
    assert taken(target) == WHOLE
    assert (target / "big.py").read_bytes() == FILES["big.py"]


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda site: (site / "big" / "lib.so").unlink(), r"big/lib\.so is not there"),
        (lambda site: (site / "big.py").write_text("y = 3\n"), r"big\.py is another one than the wheel's"),
        (
            lambda site: (site / "big-3.0.dist-info" / "METADATA").write_text(""),
            "METADATA is another one than the wheel's",
        ),
    ],
)
def test_a_file_that_is_not_the_wheels_stops_it(
    machine: Path, tmp_path: Path, change: Callable[[Path], object], what: str
) -> None:
    change(machine)
    with pytest.raises(BuildError, match=rf"big 3\.0 cannot be borrowed from .+{what}\n.*without --borrow"):
        lend("big 3.0", RECORD, machine, tmp_path / "site-packages")
    assert taken(tmp_path) == taken(tmp_path) and not (tmp_path / "site-packages").exists()


@pytest.mark.parametrize(
    "line",
    [
        "../other.py,sha256=x,1",
        "/etc/passwd,sha256=x,1",
        "a/../../b,sha256=x,1",
        "a.py,,",
        "a.py,md5=x,1",
        "a.py",
        "big-3.0.data/data/lib/liba.so,sha256=x,1",
        "big-3.0.data/platlib/../../b,sha256=x,1",
    ],
)
def test_a_record_that_no_wheel_has_is_refused(machine: Path, tmp_path: Path, line: str) -> None:
    with pytest.raises(BuildError, match=r"its RECORD has"):
        lend("big 3.0", f"{RECORD}{line}\n", machine, tmp_path / "site-packages")
    with pytest.raises(BuildError, match=r"names no metadata"):
        lend("big 3.0", "\n".join(RECORD.splitlines()[:1]), machine, tmp_path / "site-packages")


def borrowing(home: Home, version: str = "3.0") -> Node:
    """The first target's lock names `big`, which the bundle leaves to the machine."""
    _, data, _ = wheel("thing", "1.0")
    lock = home.root / "project" / "docker" / "vllm-0.8.5" / "cpu.lock"
    lock.write_text(f"{LOCK.format(sha=sha256(data))}big==3.0 --hash=sha256:{'0' * 64}\n")
    record = home.add("big-3.0.RECORD", RECORD.encode())
    own = home.targets[HERE]
    home.targets[HERE] = own.model_copy(update={"borrowed": {"big": Borrowed(version=version, record=record)}})
    return home.write()


def test_a_borrowed_distribution_stands_in_the_environment(
    home: Home, machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, folder = build(on(borrowing(home), monkeypatch), machine)
    done = subprocess.run([folder / "bin" / "python3", "-c", "import big, thing; print(big.y)"], capture_output=True)
    assert done.stdout == b"2\n"
    assert "big" not in (folder / "locks" / "cpu.lock").read_text()
    log = (folder.parents[3] / "log").read_text()
    assert f"big 3.0 borrowed from {machine}: 4 files by hard link" in log


def test_without_a_folder_to_borrow_from_it_says_what_to_pass(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BuildError, match=r"leaves big to the machine.*\n.*--borrow-from"):
        build(on(borrowing(home), monkeypatch))


def test_a_borrowed_version_that_is_not_the_locks_is_refused(
    home: Home, machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(BuildError, match=r"borrows big 3\.1, and .+ names 3\.0"):
        build(on(borrowing(home, "3.1"), monkeypatch), machine)


def test_a_step_changes_nothing_that_was_borrowed(home: Home, machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = home.root / "project" / "docker" / "vllm-0.8.5"
    (folder / "step.py").write_text("import sys\nopen(sys.argv[1], 'r+').write('y = 5')\n")
    text = (folder / "Dockerfile").read_text()
    (folder / "Dockerfile").write_text(
        text.replace("step.py /opt/cpu.lock", "step.py /opt/venv/lib/python3*/site-packages/big.py")
    )
    for lacks in (False, True):
        if lacks:
            monkeypatch.setattr(borrow.os, "link", lambda *_: (_ for _ in ()).throw(OSError(18, "no")))
        _, environment = build(on(borrowing(home), monkeypatch), machine)
        (own,) = environment.glob("lib/python3*/site-packages/big.py")
        assert own.read_text() == "y = 5\n"
        assert (machine / "big.py").read_bytes() == FILES["big.py"]
        (environment / environments.MARKER).unlink()


# --- what a user asks for ---------------------------------------------------------------------------------------------


@dataclass
class Executed:
    """What would have been run."""

    plans: list[Sequence[Planned]] = field(default_factory=list)
    resumed: list[Path | None] = field(default_factory=list)

    def __call__(self, project: Project, plan: Sequence[Planned], tools: Tools, resumed: Path | None) -> None:
        self.plans.append(plan)
        self.resumed.append(resumed)


@pytest.fixture
def executed(monkeypatch: pytest.MonkeyPatch) -> Executed:
    made = Executed()
    monkeypatch.setattr(node, "execute", made)
    return made


def test_a_run_is_verified_planned_and_stretched(here: Node, executed: Executed) -> None:
    wish = Wish(selection=Selection(targets=["vllm-0.8.5"]), multiplier=2.0)
    run_bundle(here, wish, Console(quiet=True))
    assert executed.resumed == [None]
    at_home = {cell.id: cell for cell in load_node_project(here, print).cells}
    for planned in executed.plans[0]:
        assert planned.cell.deadlines.total == 2 * at_home[planned.cell.id].deadlines.total
        assert planned.action == ("run" if planned.cell.target == "vllm-0.8.5" else "elsewhere")
    assert verify_bundle(here, Selection(targets=["vllm-0.8.5"]), print) > 0
    for sha256 in here.index.targets[HERE].contents:
        for part in here.index.contents[sha256].parts:
            (here.bundle / "parts" / part).unlink()
    for ask in (lambda: run_bundle(here, wish, Console(quiet=True)), lambda: verify_bundle(here, Selection(), print)):
        with pytest.raises(InfrastructureError, match="is missing"):
            ask()
    assert len(executed.plans) == 1


def test_a_run_of_some_cells_is_resumed_with_these(here: Node, executed: Executed) -> None:
    project = load_node_project(here, print)
    folder = project.results / "runs" / "r1"
    plan = plan_here(project, Selection(targets=["vllm-0.8.5"]), False, build_options(project))
    write_plan(folder, "r1", plan, ())
    run_bundle(here, Wish(resume="r1"), Console(quiet=True))
    assert executed.resumed == [folder]
    assert {planned.cell.target for planned in executed.plans[0]} == {"vllm-0.8.5"}
    with pytest.raises(ConfigurationError, match="takes its cells from the run"):
        run_bundle(here, Wish(resume="r1", fresh=True), Console(quiet=True))
    with pytest.raises(NothingSelectedError, match="no such run"):
        run_bundle(here, Wish(resume="r2"), Console(quiet=True))


# --- packs -----------------------------------------------------------------------------------------------------------


def test_what_cannot_be_packed_now_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    calls: list[Path] = []

    def full(run: Path, outbox: Path) -> None:
        calls.append(run)
        if len(calls) == 1:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(node, "pack_new", full)
    outbox = Outbox(tmp_path, said.append)
    outbox(tmp_path / "run")
    outbox(tmp_path / "run")
    assert len(calls) == 2
    assert len(said) == 1
    assert "No space left" in said[0]


def test_every_record_is_packed_at_once_and_none_is_left_out(
    here: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "generate", lambda root: {})
    seen: dict[str, list[str]] = {}

    def looks(launch: Launch, stopped: threading.Event) -> ExitState:
        cell = launch.labels["vllm-matrix.cell"]
        seen[cell] = [path.name for path in here.outbox.glob("*")]
        return scripted.passes(launch, stopped)

    def fails_one(image: Image, log: Path, say: Callable[[str], None]) -> BuiltImage:
        if image.target == "vllm-0.10.0":
            raise BuildError("no luck")
        return builds(image, log, say)

    backend = ScriptedBackend(looks)
    backend.name = "local"
    project = load_node_project(here, print)
    options = build_options(project)
    plan = plan_here(project, Selection(), False, options)
    tools = node.node_tools(here, project, plan, options, Console(quiet=True), None)
    outcome = execute(project, plan, replace(tools, backend=backend, build=fails_one))
    reader = seen["vllm-0.8.5@cpu/multimodal_rollout[model=qwen2_vl]"]
    assert any("cold_start" in name and "vllm-0.8.5" in name for name in reader), "its reference's was packed before"
    records = list(outcome.folder.glob("cells/*/attempt-*/record.json"))
    packs = [unpack(path, tmp_path / "in" / path.name) for path in here.outbox.iterdir()]
    assert len(records) == len(packs)
    assert {(pack.record.cell, pack.record.status) for pack in packs} == {
        (square.cell.id, square.status) for square in outcome.matrix.squares
    }
    assert {pack.record.status for pack in packs} == {Status.PASS, Status.MISS}


# --- another Python ---------------------------------------------------------------------------------------------------


def test_another_python_is_another_environment_and_shows_in_records(home: Home) -> None:
    path = home.root / "project" / "matrix.toml"
    plans = {}
    for python in (None, "3.12"):
        project = load_project(path, python)
        plans[python] = make_plan(project, Selection(), None, True, build_options(project), "local")
    for own, other in zip(plans[None], plans["3.12"], strict=True):
        assert (own.cell.python, other.cell.python) == ("3.11", "3.12")
        assert own.digest != other.digest
        changed = {name for name in own.facts if own.facts[name] != other.facts[name]}
        assert changed <= {"image", "reference"}


@pytest.mark.parametrize(
    ("python", "backend", "what"),
    [
        ("3.12", "docker", "is for cells without a container"),
        ("3.10", "local", r"--python 3\.10: vllm-0\.10\.0 needs 3\.11 or later"),
        ("3.9", "local", r"--python 3\.9: .* needs 3\.11 or later"),
        ("3", "local", "no minor version"),
        ("3.12.1", "local", "no minor version"),
    ],
)
def test_a_python_that_cannot_be_is_refused(home: Home, python: str, backend: str, what: str) -> None:
    with pytest.raises(ConfigurationError, match=what):
        project = load_project(home.root / "project" / "matrix.toml", python)
        make_plan(project, Selection(), None, True, build_options(project), backend)
