"""What every back end has to do, seen with real processes: the suite that a new one must pass.

A throw-away `rig` stands in for the real one: the contract is about processes, files and limits, not about vLLM.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import subprocess
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from docker.client import DockerClient

from harness.backends.base import MAX_OUTPUT, Backend, Launch
from harness.backends.docker import DockerBackend, command_line, connect
from harness.builders import find_builder
from harness.cells import Resources
from harness.errors import InfrastructureError
from harness.images import build
from harness.project import build_options, images_for, load_project
from harness.records import ExitState
from tests.conftest import ROOT

pytestmark = [
    pytest.mark.docker,
    pytest.mark.timeout(900),
    # the SDK closes the socket of an attached stream only when it is collected
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

TARGET = "vllm-0.10.0"
LIMITS = Resources(cpus=1, memory=512 << 20, shm=64 << 20, gpus=0)


@dataclass(frozen=True)
class Bench:
    """A back end, an image for it, and a place to work."""

    backend: Backend
    image: str
    folder: Path

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
            environment={"ASKED_FOR": "1"},
            labels={"vllm-matrix.run": "contract"},
            resources=resources,
        )

    def run(self, code: str, resources: Resources = LIMITS) -> ExitState:
        running = self.backend.start(self.launch(code, resources))
        try:
            assert running.ended(120), "still running after two minutes"
        finally:
            state = running.close()
        return state

    def output(self, name: str = "stdout.log") -> bytes:
        return (self.folder / "work" / name).read_bytes()


@pytest.fixture(scope="module")
def client() -> Iterator[DockerClient]:
    with contextlib.closing(connect()) as client:
        yield client


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The real image of a target, built if it is not there."""
    project = load_project(ROOT / "matrix.toml")
    options = build_options(project)
    cells = [cell for cell in project.cells if cell.target == TARGET]
    wanted = images_for(project, cells, options)[TARGET, "cpu"]
    log = tmp_path_factory.mktemp("build") / "log"
    return build(wanted, find_builder(os.environ), options, log, lambda line: None).id


@pytest.fixture
def bench(client: DockerClient, image: str, tmp_path: Path) -> Iterator[Bench]:
    yield Bench(DockerBackend(client), image, tmp_path)
    gc.collect()
    assert client.containers.list(all=True, filters={"label": "vllm-matrix.run=contract"}) == [], "left behind"


def test_what_it_sees(bench: Bench) -> None:
    state = bench.run("""
        import json, os, pathlib, socket
        def fails(action):
            try:
                action()
            except OSError as error:
                return type(error).__name__
            return None
        pathlib.Path("/out/seen.json").write_text(json.dumps({
            "cell": pathlib.Path(os.environ["VLLM_MATRIX_IN"], "cell.json").read_text(),
            "asked": os.environ.get("ASKED_FOR"),
            "leaked": sorted(set(os.environ) & {"PYTORCH_CUDA_ALLOC_CONF", "SECRET"}),
            "root": fails(lambda: open("/etc/x", "w")),
            "suite": fails(lambda: open("/suite/x", "w")),
            "in": fails(lambda: open("/in/x", "w")),
            "models": fails(lambda: open("/models/x", "w")),
            "tmp": fails(lambda: open("/tmp/x", "w")),
            "network": fails(lambda: socket.create_connection(("192.0.2.1", 80), 3)),
            "uid": os.getuid(),
            "capabilities": [l.split()[1] for l in open("/proc/self/status") if l.startswith("CapEff")][0],
            "shm": os.statvfs("/dev/shm").f_blocks * os.statvfs("/dev/shm").f_frsize,
            "exec_tmp": "noexec" not in [l for l in open("/proc/mounts") if l.split()[1] == "/tmp"][0].split()[3],
        }))
    """)
    assert state == ExitState(started=True, exit_code=0)
    seen = json.loads((bench.folder / "work/out/seen.json").read_text())
    assert seen == {
        "cell": "{}", "asked": "1", "leaked": [], "root": "OSError", "suite": "OSError", "in": "OSError",
        "models": "OSError", "tmp": None, "network": "OSError", "uid": os.getuid(), "capabilities": "0" * 16,
        "shm": 64 << 20, "exec_tmp": True,
    }  # fmt: skip
    (bench.folder / "work/out/seen.json").unlink()  # whoever started it may remove what it left


@pytest.mark.parametrize(
    ("code", "state"),
    [
        ("import sys; sys.exit(7)", ExitState(started=True, exit_code=7)),
        ("import os; os.kill(os.getpid(), 9)", ExitState(started=True, exit_code=137)),
        ("import os; os.abort()", ExitState(started=True, exit_code=134)),
    ],
)
def test_how_it_ended(bench: Bench, code: str, state: ExitState) -> None:
    assert bench.run(code) == state


def test_memory_beyond_the_limit_is_told_as_such(bench: Bench) -> None:
    state = bench.run("x = bytearray(2 << 30)")
    assert state.oom_killed
    assert state.exit_code == 137


def test_one_that_sleeps_and_does_not_listen_is_stopped(bench: Bench) -> None:
    running = bench.backend.start(
        bench.launch("""
        import signal, subprocess, sys, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
        print("ready", flush=True)
        time.sleep(600)
    """)
    )
    wait_for(lambda: b"ready" in bench.output())
    assert not running.ended(0.5)
    begin = time.monotonic()
    running.stop(1)
    assert running.ended(10)
    assert running.close().exit_code == 137
    assert time.monotonic() - begin < 60


def test_a_hundred_megabytes_of_output_keep_their_head_and_stop_nothing(bench: Bench) -> None:
    state = bench.run("""
        import sys
        line = b"x" * 1023 + b"\\n"
        sys.stdout.buffer.write(b"first line\\n")
        for _ in range(100 << 10):
            sys.stdout.buffer.write(line)
        sys.stderr.write("last words\\n")
    """)
    assert state.exit_code == 0
    assert len(bench.output()) == MAX_OUTPUT
    assert bench.output().startswith(b"first line\n")
    assert bench.output("stderr.log") == b"last words\n"


def test_close_ends_what_still_runs(bench: Bench) -> None:
    running = bench.backend.start(bench.launch("import time; time.sleep(600)"))
    running.close()
    running.close()


def test_a_name_that_is_taken_is_infrastructure(bench: Bench) -> None:
    launch = bench.launch("import time; time.sleep(600)")
    running = bench.backend.start(launch)
    try:
        with pytest.raises(InfrastructureError, match="already in use"):
            bench.backend.start(launch)
    finally:
        running.close()


def test_an_image_that_is_gone_is_infrastructure(bench: Bench) -> None:
    gone = Bench(bench.backend, "sha256:" + "0" * 64, bench.folder)
    with pytest.raises(InfrastructureError, match="its image is gone"):
        gone.backend.start(gone.launch(""))


def test_a_folder_that_the_daemon_does_not_see(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.backend.check(bench.folder, bench.image)
    real = Path.write_text
    monkeypatch.setattr(Path, "write_text", lambda path, text: real(path, text[::-1]))  # another folder than ours
    with pytest.raises(InfrastructureError, match="does not see"):
        bench.backend.check(bench.folder, bench.image)


def test_the_printed_command_makes_the_same_container(bench: Bench, client: DockerClient) -> None:
    """`repro` promises the cell's own container: every setting is compared."""
    launch = bench.launch("import time; time.sleep(600)")
    running = bench.backend.start(launch)
    try:
        ours = client.containers.get(launch.name).attrs
    finally:
        running.close()
    words = command_line(launch)
    words[1:2] = ["create"]
    words.remove("--rm")
    words[words.index("create") + 1 : words.index("create") + 1] = ["--label", "vllm-matrix.run=contract"]
    subprocess.run(words, check=True, capture_output=True)
    container = client.containers.get(launch.name)
    try:
        theirs = container.attrs
    finally:
        container.remove(force=True)
    assert diff(ours["HostConfig"], theirs["HostConfig"]) == {}
    for key in ("User", "Cmd", "Image"):
        assert ours["Config"][key] == theirs["Config"][key]
    assert sorted(ours["Config"]["Env"]) == sorted(theirs["Config"]["Env"])


def diff(one: dict[str, object], other: dict[str, object]) -> dict[str, tuple[object, object]]:
    """What differs; empty values of any kind are equal, and `repro` leaves the log to the daemon's default."""
    names = set(one) - {"LogConfig", "ContainerIDFile", "ConsoleSize", "RestartPolicy"}
    return {name: (one[name], other[name]) for name in names if (one[name] or None) != (other[name] or None)}


def wait_for(condition: Callable[[], bool], seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)
