"""What every back end has to do, seen with real processes: the suite that a new one must pass.

A throw-away `rig` stands in for the real one: the contract is about processes, files and limits, not about vLLM.
Three parts: what all promise, what only a container can promise, what only a cell without one needs to be promised.
Only what names Docker needs it (`-m docker`); the rest runs with the tests' own interpreter as environment.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from docker.client import DockerClient

from harness.backends import local
from harness.backends.base import MAX_OUTPUT, Backend, Launch, environment
from harness.backends.docker import DockerBackend, command_line, connect
from harness.backends.local import MARK, LocalBackend
from harness.builders import find_builder
from harness.cells import Resources
from harness.errors import InfrastructureError
from harness.images import build
from harness.project import build_options, images_for, load_project
from harness.records import ExitState
from tests.conftest import ROOT

TARGET = "vllm-0.10.0"
LIMITS = Resources(cpus=1, memory=512 << 20, shm=64 << 20, gpus=0)
VENV = Path(sys.prefix)

DOCKER = [
    pytest.mark.docker,
    pytest.mark.timeout(900),
    # the SDK closes the socket of an attached stream only when it is collected
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@dataclass(frozen=True)
class Bench:
    """A back end, an image for it, and a place to work. `tag` is in the environment of everything that it starts."""

    backend: Backend
    image: str
    folder: Path
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
        running = self.backend.start(self.launch(code, resources))
        try:
            assert running.ended(120), "still running after two minutes"
        finally:
            state = running.close()
        return state

    def run_command(self, *words: str) -> ExitState:
        """Another command of the same place."""
        running = self.backend.start(replace(self.launch(""), command=words))
        try:
            assert running.ended(120), "still running after two minutes"
        finally:
            state = running.close()
        return state

    def output(self, name: str = "stdout.log") -> bytes:
        return (self.folder / "work" / name).read_bytes()

    def left(self, name: str) -> Any:
        """What the cell left as JSON."""
        return json.loads((self.folder / "work/out" / name).read_text())


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
    wanted = images_for(project, cells, options, "docker")[TARGET, "cpu"]
    log = tmp_path_factory.mktemp("build") / "log"
    return build(wanted, find_builder(os.environ), options, log, lambda line: None).id


@pytest.fixture
def container(client: DockerClient, image: str, tmp_path: Path) -> Iterator[Bench]:
    yield Bench(DockerBackend(client), image, tmp_path)
    gc.collect()
    assert client.containers.list(all=True, filters={"label": "vllm-matrix.run=contract"}) == [], "left behind"


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Bench]:
    """Without a container; the tests' own virtual environment stands in for a target's."""
    bench = Bench(LocalBackend(VENV.parent), VENV.name, tmp_path)
    yield bench
    assert carriers(bench.tag) == [], "left behind"


@pytest.fixture(params=["local", pytest.param("docker", marks=DOCKER)])
def bench(request: pytest.FixtureRequest) -> Bench:
    """Every back end in turn."""
    name = "container" if request.param == "docker" else "host"
    made: Bench = request.getfixturevalue(name)
    return made


def carriers(text: str) -> list[str]:
    """Processes, zombies aside, with this text in their environment or command line."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                if text.encode() in (entry / "environ").read_bytes() + (entry / "cmdline").read_bytes():
                    found.append((entry / "cmdline").read_text().replace("\0", " "))
    return found


def wait_for(condition: Callable[[], object], seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


# --- what every back end promises ------------------------------------------------------------------------------------


def test_another_command_of_the_same_python(bench: Bench) -> None:
    code = "import os, sys; open(os.environ['VLLM_MATRIX_OUT'] + '/seen.json', 'w').write('[\"%s\"]' % sys.argv[1])"
    assert bench.run_command("python3", "-c", code, "cpu").exit_code == 0
    assert bench.left("seen.json") == ["cpu"]


def test_what_it_is_handed(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "CUDA_VISIBLE_DEVICES", "SECRET", "LD_PRELOAD_", "HTTP_PROXY"):
        monkeypatch.setenv(name, "leaks")
    state = bench.run("""
        import json, os, pathlib, tempfile
        folder = {name: pathlib.Path(os.environ["VLLM_MATRIX_" + name]) for name in ("IN", "OUT", "MODELS")}
        home = pathlib.Path(os.environ["HOME"])
        (home / "written").write_text("x")
        (folder["OUT"] / "seen.json").write_text(json.dumps({
            "cell": (folder["IN"] / "cell.json").read_text(),
            "models": folder["MODELS"].is_dir(),
            "asked": os.environ.get("ASKED_FOR"),
            "leaked": sorted(name for name, value in os.environ.items() if value == "leaks"),
            "names": sorted(os.environ),
            "caches_at_home": all(os.environ[n].startswith(str(home)) for n in os.environ if "CACHE" in n),
            "temporary": str(pathlib.Path(tempfile.gettempdir())) == str(home),
            "stdin": os.read(0, 1).decode(),
        }))
    """)
    assert state == ExitState(started=True, exit_code=0)
    seen = bench.left("seen.json")
    names = seen.pop("names")
    assert set(environment(tmp="", suite="", inputs="", out="", models="")) <= set(names)
    assert seen == {
        "cell": "{}", "models": True, "asked": bench.tag, "leaked": [], "caches_at_home": True, "temporary": True,
        "stdin": "",
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


def test_sigterm_reaches_the_rig(bench: Bench) -> None:
    running = bench.backend.start(
        bench.launch("""
        import signal, sys, time
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
        print("ready", flush=True)
        time.sleep(600)
    """)
    )
    wait_for(lambda: b"ready" in bench.output())
    running.terminate()
    assert running.ended(20)
    assert running.close() == ExitState(started=True, exit_code=3)


def test_one_that_sleeps_and_does_not_listen_is_killed(bench: Bench) -> None:
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
    begin = time.monotonic()
    running.terminate()
    assert not running.ended(0.5)
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
    assert running.close() == running.close()


def test_an_image_that_is_gone_is_infrastructure(bench: Bench) -> None:
    gone = replace(bench, image="sha256:" + "0" * 64)
    with pytest.raises(InfrastructureError, match="is gone"):
        gone.backend.start(gone.launch(""))


def test_it_can_say_whether_it_works(bench: Bench) -> None:
    bench.backend.check(bench.folder, bench.image)


# --- what only a container promises ----------------------------------------------------------------------------------


def docker_only(test: Callable[..., None]) -> Callable[..., None]:
    for mark in DOCKER:
        test = mark(test)
    return test


@docker_only
def test_walls(container: Bench) -> None:
    state = container.run("""
        import json, os, pathlib, socket
        def fails(action):
            try:
                action()
            except OSError as error:
                return type(error).__name__
            return None
        pathlib.Path("/out/seen.json").write_text(json.dumps({
            "root": fails(lambda: open("/etc/x", "w")),
            "suite": fails(lambda: open("/suite/x", "w")),
            "in": fails(lambda: open("/in/x", "w")),
            "models": fails(lambda: open("/models/x", "w")),
            "network": fails(lambda: socket.create_connection(("192.0.2.1", 80), 3)),
            "uid": os.getuid(),
            "capabilities": [l.split()[1] for l in open("/proc/self/status") if l.startswith("CapEff")][0],
            "shm": os.statvfs("/dev/shm").f_blocks * os.statvfs("/dev/shm").f_frsize,
            "exec_tmp": "noexec" not in [l for l in open("/proc/mounts") if l.split()[1] == "/tmp"][0].split()[3],
        }))
    """)
    assert state == ExitState(started=True, exit_code=0)
    assert container.left("seen.json") == {
        "root": "OSError", "suite": "OSError", "in": "OSError", "models": "OSError", "network": "OSError",
        "uid": os.getuid(), "capabilities": "0" * 16, "shm": 64 << 20, "exec_tmp": True,
    }  # fmt: skip


@docker_only
def test_memory_beyond_the_limit_is_told_as_such(container: Bench) -> None:
    state = container.run("x = bytearray(2 << 30)")
    assert state.oom_killed
    assert state.exit_code == 137


@docker_only
def test_a_name_that_is_taken_is_infrastructure(container: Bench) -> None:
    launch = container.launch("import time; time.sleep(600)")
    running = container.backend.start(launch)
    try:
        with pytest.raises(InfrastructureError, match="already in use"):
            container.backend.start(launch)
    finally:
        running.close()


@docker_only
def test_a_folder_that_the_daemon_does_not_see(container: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Path.write_text
    monkeypatch.setattr(Path, "write_text", lambda path, text: real(path, text[::-1]))  # another folder than ours
    with pytest.raises(InfrastructureError, match="does not see"):
        container.backend.check(container.folder, container.image)


@docker_only
def test_the_printed_command_makes_the_same_container(container: Bench, client: DockerClient) -> None:
    """`repro` promises the cell's own container: every setting is compared."""
    launch = container.launch("import time; time.sleep(600)")
    running = container.backend.start(launch)
    try:
        ours = client.containers.get(launch.name).attrs
    finally:
        running.close()
    words = command_line(launch)
    words[1:2] = ["create"]
    words.remove("--rm")
    words[words.index("create") + 1 : words.index("create") + 1] = ["--label", "vllm-matrix.run=contract"]
    subprocess.run(words, check=True, capture_output=True)
    made = client.containers.get(launch.name)
    try:
        theirs = made.attrs
    finally:
        made.remove(force=True)
    assert diff(ours["HostConfig"], theirs["HostConfig"]) == {}
    for key in ("User", "Cmd", "Image"):
        assert ours["Config"][key] == theirs["Config"][key]
    assert sorted(ours["Config"]["Env"]) == sorted(theirs["Config"]["Env"])


def diff(one: dict[str, object], other: dict[str, object]) -> dict[str, tuple[object, object]]:
    """What differs; empty values of any kind are equal, and `repro` leaves the log to the daemon's default."""
    names = set(one) - {"LogConfig", "ContainerIDFile", "ConsoleSize", "RestartPolicy"}
    return {name: (one[name], other[name]) for name in names if (one[name] or None) != (other[name] or None)}


# --- what a cell without a container needs to be promised ------------------------------------------------------------

# Out of reach of the process group, of the session and of the mark in the environment, as ranks and engine cores get.
ESCAPES = """
    import os, signal, subprocess, sys, time
    for session in (False, True):
        child = subprocess.Popen(
            ["env", "-i", sys.executable, "-c", "import os, time; os.fork(); time.sleep(600)", "TAG"],
            start_new_session=session,
        )
    print("ready", flush=True)
    END
"""


@pytest.mark.parametrize("end", ["sys.exit(0)", "os.kill(os.getpid(), 9)", "time.sleep(600)"])
def test_nothing_of_it_is_left_whatever_sessions_it_made(host: Bench, end: str) -> None:
    running = host.backend.start(host.launch(ESCAPES.replace("TAG", host.tag).replace("END", end)))
    wait_for(lambda: b"ready" in host.output())
    running.ended(1)
    state = running.close()
    assert state.error == ""
    assert state.exit_code == (0 if "exit" in end else 137)
    assert carriers(host.tag) == []


def test_it_is_swept_even_if_its_keeper_is_killed(host: Bench) -> None:
    running = host.backend.start(host.launch("import os, time; os.kill(os.getppid(), 9); time.sleep(600)"))
    assert running.ended(20)
    assert "keeper of the cell was killed by signal 9" in running.close().error
    assert carriers(host.tag) == []


def test_it_ends_with_a_harness_that_is_killed(host: Bench) -> None:
    launch = host.launch("import os, time; print(os.environ['HOME'], 'ready', flush=True); time.sleep(600)")
    code = f"""
        import time
        from pathlib import Path, PosixPath
        from harness.backends.base import Launch
        from harness.backends.local import LocalBackend
        from harness.cells import Resources
        running = LocalBackend(Path({str(VENV.parent)!r})).start({launch!r})
        time.sleep(600)
    """
    harness = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)])
    try:
        wait_for(lambda: (host.folder / "work/stdout.log").exists() and b"ready" in host.output())
    finally:
        harness.send_signal(signal.SIGKILL)
        harness.wait()
    wait_for(lambda: carriers(f"ASKED_FOR={host.tag}") == [], 10)
    assert not Path(host.output().decode().split()[0]).exists()


def test_its_scratch_folder_goes_with_it(host: Bench) -> None:
    host.run("""
        import os, pathlib
        pathlib.Path(os.environ["VLLM_MATRIX_OUT"], "home").write_text(os.environ["HOME"])
        pathlib.Path(os.environ["HOME"], "core").write_text("x")
        assert os.getcwd() == os.environ["HOME"] == os.environ["TMPDIR"]
    """)
    home = Path((host.folder / "work/out/home").read_text())
    assert home.parent == Path(tempfile.gettempdir())
    assert not home.exists()


def test_its_variables_are_the_containers_and_a_few_more(host: Bench) -> None:
    launch = replace(host.launch(""), gpus=("GPU-a", "GPU-b"))
    given = local.variables(launch, VENV.parent, Path("/s"))
    common = environment(tmp="/s", suite="", inputs="", out="", models="")
    more = {"ASKED_FOR", "CUDA_VISIBLE_DEVICES", "LANG", "PATH", "TMPDIR", "VIRTUAL_ENV"}
    assert set(given) == set(common) | more
    assert given["CUDA_VISIBLE_DEVICES"] == "GPU-a,GPU-b"
    assert given["PATH"].startswith(f"{VENV}/bin:")
    assert local.variables(replace(launch, gpus=()), VENV.parent, Path("/s"))["CUDA_VISIBLE_DEVICES"] == "-1"


def test_the_printed_command_starts_the_same_process(host: Bench) -> None:
    """`repro` promises the cell's own environment: every variable is compared."""
    launch = host.launch("""
        import json, os, sys
        seen = {n: v.replace(os.environ["HOME"], "HOME") for n, v in os.environ.items()} | {"argv": sys.orig_argv[1:]}
        print(json.dumps({**seen, "prefix": sys.prefix, "cwd": os.getcwd().replace(os.environ["HOME"], "HOME")}))
    """)
    running = host.backend.start(launch)
    assert running.ended(60)
    running.close()
    ours = json.loads(host.output())
    (launch.folder / "tmp").mkdir()
    printed = shlex.join(local.command_line(launch, VENV.parent))
    done = subprocess.run(["/bin/sh", "-c", printed], check=True, capture_output=True, env={"PATH": os.environ["PATH"]})
    theirs = json.loads(done.stdout)
    assert ours.pop(MARK).startswith(launch.name)
    assert ours == theirs


def test_an_environment_that_does_not_work_is_infrastructure(host: Bench, tmp_path: Path) -> None:
    broken = tmp_path / "broken" / "bin"
    broken.mkdir(parents=True)
    (broken / "python3").symlink_to("/bin/false")
    with pytest.raises(InfrastructureError, match="does not work"):
        LocalBackend(tmp_path).check(tmp_path, "broken")


def test_a_folder_too_long_for_sockets_is_infrastructure(
    host: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("d" * 80)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with pytest.raises(InfrastructureError, match="Set TMPDIR to a shorter one"):
        host.backend.check(tmp_path, host.image)


def test_a_kill_for_memory_is_told_where_the_kernel_counts_it(host: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = iter([4, 5])
    monkeypatch.setattr(local, "_oom_kills", lambda: next(counts, 5))
    assert host.run("import os; os.kill(os.getpid(), 9)").oom_killed
