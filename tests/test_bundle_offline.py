"""A bundle from end to end: made, carried, and run by its launcher in a network namespace that leads nowhere.

The engine is a script, and the harness's own packages are those of the tests, as wheels again; all else is real.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from harness import __version__
from harness.bundles.parts import file_sha256
from harness.environments import NEEDED, check_host, find_python
from harness.errors import MatrixError
from harness.records import records_of, runs_of
from tests.conftest import ROOT, SPEC
from tests.test_bundle_node import MINOR, wheel
from tests.wheelhouse import Upload, index

RIG = """
import hashlib, json, os, pathlib, pytest, sys
cell = json.loads(pathlib.Path(os.environ["VLLM_MATRIX_IN"], "cell.json").read_text())
given = pathlib.Path(os.environ["VLLM_MATRIX_IN"], "reference.json")
out = pathlib.Path(os.environ["VLLM_MATRIX_OUT"])

def say(kind, **fields):
    common = {"schema": 1, "seq": 0, "pid": 7, "rank": 0, "mono_ns": 1, "utc": "2026-11-30T00:00:00Z", "type": kind}
    with (out / "events.jsonl").open("a") as file:
        file.write(json.dumps({**common, **fields}) + "\\n")

say("hello", python="%d.%d.%d" % sys.version_info[:3], platform="linux", distributions={})
say("plan", checks=["a"])
say("start", check="a")
say("property", name="pytest", value=pytest.__version__)
ids = json.dumps({"ids": [5, 9, len(os.listdir(os.environ["VLLM_MATRIX_MODELS"]))]})
if cell["scenario"] == "cold_start":
    (out / "artifacts" / "reference.json").write_text(ids)
    say("artifact", path="reference.json", sha256=hashlib.sha256(ids.encode()).hexdigest(), bytes=len(ids))
else:
    assert given.read_text() == ids
say("end", check="a", outcome="passed", seconds=0.1)
(out / "DONE").write_text('{"schema": 1, "exit": 0, "checks": 1}')
"""
HARNESS = [sys.executable, "-c", "from harness.cli import main; main()"]
DAY = "2026-01-01"
DOCKERFILE = "ARG BASE\nFROM ${{BASE}}\nCOPY {target}/cpu.lock /opt/\nRUN install-locked /opt/cpu.lock\n"

# Up with the one device that there is, and then the command: nothing that it sends leaves the machine.
NOWHERE = """
import fcntl, os, socket, struct, sys
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
    fcntl.ioctl(one, 0x8914, struct.pack("16sh", b"lo", 1))
    try:
        one.connect(("192.0.2.1", 53))
        sys.exit("there is a route")
    except OSError:
        pass
os.execvp(sys.argv[1], sys.argv[1:])
"""


def unshare() -> list[str]:
    """How to start something in a namespace of its own; skips where that is not allowed."""
    for words in (["unshare", "-n"], ["unshare", "-rn"]):
        with contextlib.suppress(OSError):
            if subprocess.run([*words, "true"], capture_output=True, check=False).returncode == 0:
                return [*words, sys.executable, "-c", NOWHERE]
    pytest.skip("no network namespace may be made here (`unshare -rn`)")


@dataclass(frozen=True)
class Kept(Upload):
    """A wheel that is a file already."""

    path: Path = Path()

    @property
    def file(self) -> str:
        return self.path.name

    @property
    def content(self) -> bytes:
        return self.path.read_bytes()


def again(name: str, folder: Path) -> Kept:
    """An installed distribution as a wheel again."""
    found = metadata.distribution(name)
    tags = re.findall(r"^Tag: (\S+)$", found.read_text("WHEEL") or "", re.MULTILINE)
    stem = f"{re.sub(r'[-.]', '_', found.name)}-{found.version}"
    path = folder / f"{stem}-{tags[-1]}.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for file in found.files or ():
            if file.name in ("INSTALLER", "REQUESTED", "direct_url.json") or file.suffix in (".pyc", ".virtualenv"):
                continue
            if not Path(str(file.locate())).is_file():
                continue  # virtualenv lists folders of its pip
            script = str(file).startswith("../")
            if script and name != "uv":
                continue  # is made of the entry points
            archive.write(str(file.locate()), f"{stem}.data/scripts/{file.name}" if script else str(file))
    return Kept(name, found.version, DAY, path=path)


def needed(name: str, found: set[str]) -> None:
    for text in metadata.requires(name) or ():
        requirement = Requirement(text)
        other = canonicalize_name(requirement.name)
        if (requirement.marker is None or requirement.marker.evaluate({"extra": ""})) and other not in found:
            found.add(other)
            needed(other, found)


@dataclass(frozen=True)
class Country:
    """A project at home, and its bundle."""

    project: Path
    bundle: Path
    index: str

    def at_home(self, *words: str) -> None:
        cache = self.project.parent / "cache"
        given = {"XDG_CACHE_HOME": str(cache), "UV_CACHE_DIR": str(cache / "uv"), "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [*HARNESS, *words], cwd=self.project, env={**os.environ, **given}, capture_output=True, check=False
        )
        assert done.returncode == 0, done.stdout.decode() + done.stderr.decode()

    def run(self, *words: str) -> subprocess.CompletedProcess[bytes]:
        kept = {name: os.environ[name] for name in ("PATH", "HOME", "VLLM_MATRIX_LEASES") if name in os.environ}
        start = [*unshare(), sys.executable, str(self.bundle / "run"), *words]
        return subprocess.run(start, env=kept, capture_output=True, timeout=200, check=False)

    @property
    def work(self) -> Path:
        return self.bundle / "work"


@pytest.fixture
def country(tmp_path: Path) -> Iterator[Country]:
    unshare()
    try:
        check_host({"cpu"})
        find_python(MINOR)
    except MatrixError as error:
        pytest.skip(str(error))
    if shutil.disk_usage(tmp_path).free < NEEDED:
        pytest.skip(f"environments want {NEEDED >> 30} GiB free")
    stub, data, _ = wheel("pytest", "1.0", "__version__ = '1.0'\n")
    (tmp_path / stub).write_bytes(data)
    _write_project(tmp_path / "home", file_sha256(tmp_path / stub))
    own = set[str]()
    needed("vllm-matrix", own)
    uploads = [again(name, tmp_path) for name in sorted(own)]
    with index([Kept("pytest", "1.0", DAY, path=tmp_path / stub), *uploads]) as address:
        yield Country(tmp_path / "home", tmp_path / "bundle", address)
    shutil.rmtree(tmp_path)


def _write_project(root: Path, sha256: str) -> None:
    for target in ("vllm-0.8.5", "vllm-0.10.0"):
        folder = root / "docker" / target
        folder.mkdir(parents=True)
        (folder / "Dockerfile").write_text(DOCKERFILE.format(target=target))
        (folder / "cpu.lock").write_text(f"pytest==1.0 --hash=sha256:{sha256}\n")
    (root / "docker" / "base").mkdir()
    (root / "docker" / "base" / "Dockerfile").write_text("FROM scratch\n")
    (root / "matrix.toml").write_text(SPEC)
    (root / "scenarios" / "rig").mkdir(parents=True)
    (root / "scenarios" / "rig" / "__main__.py").write_text(RIG)
    for scenario in ("cold_start", "multimodal_rollout"):
        (root / "scenarios" / f"test_{scenario}.py").write_text("def test_a(): ...\n")


def cells_of(folder: Path) -> dict[str, tuple[Any, ...]]:
    """What the matrix of a run says of each cell, and what does not differ from one run to the next in its record."""
    matrix = json.loads((folder / "matrix.json").read_text())
    records = records_of(folder)
    found = {}
    for square in matrix["cells"]:
        record = records[square["cell"]]
        checks = [(check.id, check.status, check.reason) for check in record.checks]
        facts = (record.digest, record.axes, record.properties, record.artifacts, record.python)
        found[square["cell"]] = (square["status"], square["verdict"], checks, *facts)
    return found


@pytest.mark.timeout(400)
def test_the_matrix_of_a_bundle_without_a_network_is_the_direct_one(country: Country) -> None:
    older = f"{platform.machine()}-manylinux_2_28"
    fetched = ("--python", MINOR, "--index-url", country.index)
    country.at_home("bundle", "--to", str(country.bundle), "--platform", older, "--split", "4M", *fetched)
    country.at_home("run", "--backend", "local", *fetched)
    (direct,) = runs_of(country.project / "results")

    first = country.run("--target", "vllm-0.8.5")
    assert first.returncode == 0, first.stdout.decode() + first.stderr.decode()
    (run,) = runs_of(country.work / "project" / "results")
    expected = cells_of(direct)
    half = {cell: told for cell, told in expected.items() if cell.startswith("vllm-0.8.5@")}
    assert cells_of(run) == half
    plan = {entry["cell"]["target"]: entry["action"] for entry in json.loads((run / "plan.json").read_text())["cells"]}
    assert plan == {"vllm-0.8.5": "run", "vllm-0.10.0": "elsewhere"}

    rest = country.run()
    assert rest.returncode == 0, rest.stdout.decode() + rest.stderr.decode()
    newest = runs_of(country.work / "project" / "results")[0]
    assert cells_of(newest) == expected
    reused = {record.cell for record in records_of(newest).values() if record.reused_from}
    assert reused == set(half), "a second run takes over what is there"

    packs = list((country.work / "outbox").iterdir())
    assert len(packs) == len(half) + len(expected), "one for each record of each run"
    country.at_home("bundle", "import", str(country.work / "outbox"))
    imported = runs_of(country.project / "results")[0]
    assert cells_of(imported) == expected
    assert {record.revision.version for record in records_of(imported).values()} == {__version__}
