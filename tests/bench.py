"""A place to try back ends in, and the table of what each of them was seen to do.

A throw-away `rig` stands in for the real one: the contract is about processes, files and limits, not about vLLM.
Only what names Docker needs it (`-m docker`); the rest runs with the tests' own interpreter as environment.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
from docker.client import DockerClient

from harness import reaper
from harness.backends import owner
from harness.backends.base import Backend, Launch
from harness.backends.docker import DockerBackend, connect
from harness.backends.local import LocalBackend
from harness.builders import find_builder
from harness.cells import Resources
from harness.images import build
from harness.project import build_options, images_for, load_project
from harness.records import ExitState

ROOT = Path(__file__).parent.parent
TARGET = "vllm-0.10.0"
LIMITS = Resources(cpus=1, memory=512 << 20, shm=64 << 20, gpus=0)
VENV = Path(sys.prefix)

DOCKER = [pytest.mark.docker, pytest.mark.timeout(900)]
PROPERTY = "promise"

_Test = TypeVar("_Test", bound=Callable[..., None])


def promise(text: str) -> Callable[[_Test], _Test]:
    """A row of the table; tests of the same promise share it."""

    def mark(test: _Test) -> _Test:
        test.__dict__[PROPERTY] = text
        return test

    return mark


def docker_only(test: _Test) -> _Test:
    for mark in DOCKER:
        test = mark(test)
    return test


@dataclass(frozen=True)
class Bench:
    """A back end, an image for it, and a place to work. `tag` is in the environment of everything that it starts.

    `maker` is an expression for the back end, for a harness of its own. `boot` stands for this machine's: what other
    harnesses on it see is not theirs to remove.
    """

    backend: Backend
    image: str
    folder: Path
    maker: str
    finds: tuple[reaper.Find, ...]
    boot: str
    tag: str = field(default_factory=lambda: uuid.uuid4().hex)

    def launch(self, code: str, resources: Resources = LIMITS, name: str = "vllm-matrix-contract") -> Launch:
        rig = self.folder / "suite" / "rig"
        rig.mkdir(parents=True)
        (rig / "__main__.py").write_text(textwrap.dedent(code))
        for name_of in ("work/in", "work/out/artifacts", "models"):
            (self.folder / name_of).mkdir(parents=True)
        (self.folder / "work/in/cell.json").write_text("{}")
        return Launch(
            name=f"{name}-{os.getpid()}",
            image=self.image,
            folder=self.folder / "work",
            suite=self.folder / "suite",
            models=self.folder / "models",
            environment={"ASKED_FOR": self.tag},
            labels={"vllm-matrix.run": "contract"},
            resources=resources,
        )

    def run(self, code: str, resources: Resources = LIMITS) -> ExitState:
        return self.run_launch(self.launch(code, resources))

    def run_command(self, *words: str) -> ExitState:
        """Another command of the same place."""
        return self.run_launch(replace(self.launch(""), command=words))

    def run_launch(self, launch: Launch) -> ExitState:
        running = self.backend.start(launch)
        try:
            assert running.ended(120), "still running after two minutes"
        finally:
            state = running.close()
        return state

    def output(self, name: str = "stdout.log") -> bytes:
        """What there is of it; nothing where it has not begun."""
        path = self.folder / "work" / name
        return path.read_bytes() if path.exists() else b""

    def left(self, name: str) -> Any:
        """What the cell left as JSON."""
        return json.loads((self.folder / "work/out" / name).read_text())

    def beside(self, name: str) -> Bench:
        """The same back end at another place."""
        return replace(self, folder=self.folder / name, tag=uuid.uuid4().hex)

    def elsewhere(self, launch: Launch, code: str) -> subprocess.Popen[str]:
        """A harness of its own, that starts the cell as `running` and goes on with the code."""
        begin = f"""
            import time
            from pathlib import Path, PosixPath
            from harness.backends import owner
            from harness.backends.base import Launch
            from harness.backends.docker import DockerBackend, connect
            from harness.backends.local import LocalBackend
            from harness.cells import Resources
            me = owner.Owner({self.boot!r}, owner._self().namespace, owner._self().pid, owner._self().started)
            owner._self = lambda: me
            backend = {self.maker}
            launch = {launch!r}
        """
        script = textwrap.dedent(begin) + textwrap.dedent(code)
        return subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)

    def reap(self, ours: bool = False) -> list[str]:
        return list(reaper.reap(self.finds, ours))


@pytest.fixture(scope="module")
def client() -> Iterator[DockerClient]:
    with contextlib.closing(connect()) as client:
        yield client


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The real image of a target, built if it is not there; VLLM_MATRIX_TEST_IMAGE names another with a Python."""
    if other := os.environ.get("VLLM_MATRIX_TEST_IMAGE"):
        return other
    project = load_project(ROOT / "matrix.toml")
    options = build_options(project)
    cells = [cell for cell in project.cells if cell.target == TARGET]
    wanted = images_for(project, cells, options, "docker")[TARGET, "cpu"]
    log = tmp_path_factory.mktemp("build") / "log"
    return build(wanted, find_builder(os.environ), options, log, lambda line: None).id


@pytest.fixture
def boot(monkeypatch: pytest.MonkeyPatch) -> str:
    """Another boot than the real one, for us."""
    me = replace(owner._self(), boot=f"test-{uuid.uuid4().hex}")
    monkeypatch.setattr(owner, "_self", lambda: me)
    return me.boot


@pytest.fixture
def container(
    client: DockerClient,
    image: str,
    boot: str,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    record_property: Callable[..., None],
) -> Iterator[Bench]:
    engine = "podman" if "podman" in str(client.version()).lower() else "docker"
    _seen(record_property, request, engine)
    finds = (reaper.containers(client),)
    bench = Bench(DockerBackend(client), image, tmp_path, "DockerBackend(connect())", finds, boot)
    yield bench
    gc.collect()
    left = client.containers.list(all=True, filters={"label": "vllm-matrix.run=contract"}, ignore_removed=True)
    for one in left:
        one.remove(force=True)
    assert left == [], "left behind"


@pytest.fixture
def host(
    boot: str, tmp_path: Path, request: pytest.FixtureRequest, record_property: Callable[..., None]
) -> Iterator[Bench]:
    """Without a container; the tests' own virtual environment stands in for a target's."""
    _seen(record_property, request, "local")
    maker = f"LocalBackend(Path({str(VENV.parent)!r}))"
    finds = (reaper.processes, reaper.folders)
    bench = Bench(LocalBackend(VENV.parent), VENV.name, tmp_path, maker, finds, boot)
    yield bench
    assert carriers(bench.tag) == [], "left behind"


@pytest.fixture(params=["local", pytest.param("docker", marks=DOCKER)])
def bench(request: pytest.FixtureRequest) -> Bench:
    """Every back end in turn."""
    name = "container" if request.param == "docker" else "host"
    made: Bench = request.getfixturevalue(name)
    return made


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of four megabytes."""
    disk = tmp_path / "disk"
    disk.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(disk)]
    try:
        subprocess.run(words, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("a disk can be mounted by root only")
    yield disk
    subprocess.run([words[0].replace("mount", "umount"), "--lazy", str(disk)], check=True)


def _seen(record_property: Callable[..., None], request: pytest.FixtureRequest, column: str) -> None:
    if text := getattr(request.function, PROPERTY, None):
        record_property(PROPERTY, (text, column))


def table(reports: list[pytest.TestReport]) -> list[str]:
    """What was seen, in Markdown: promises by back ends."""
    seen: dict[str, dict[str, bool]] = {}
    for report in reports:
        for text, column in (value for name, value in report.user_properties if name == PROPERTY):
            row = seen.setdefault(text, {})
            row[column] = row.get(column, True) and report.passed
    columns = sorted({column for row in seen.values() for column in row})
    lines = [f"| | {' | '.join(columns)} |", f"|---|{'---|' * len(columns)}"]
    for text, row in seen.items():
        lines.append(f"| {text} | {' | '.join(_word(row.get(column)) for column in columns)} |")
    return lines if seen else []


def _word(passed: bool | None) -> str:
    return "" if passed is None else "yes" if passed else "**no**"


def carriers(text: str) -> list[str]:
    """Processes, zombies aside, with this text in their environment or command line."""
    return [line for _, line in carrying(text)]


def carrying(text: str) -> list[tuple[int, str]]:
    """The same with their PIDs."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                if text.encode() in (entry / "environ").read_bytes() + (entry / "cmdline").read_bytes():
                    found.append((int(entry.name), (entry / "cmdline").read_text().replace("\0", " ")))
    return found


def wait_for(condition: Callable[[], object], seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)
