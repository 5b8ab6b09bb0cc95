"""`bundle SELECT… --to DIR` as a user gives it, with an index on this machine and targets of a few kilobytes."""

from __future__ import annotations

import hashlib
import os
import platform
import tarfile
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result
from uv import find_uv_bin

from harness import cli
from harness.bundles import archives, make, wheels
from harness.bundles.index import PARTS, Content, Index, identity, read_index
from harness.bundles.parts import assemble
from harness.bundles.wheels import Machine, machine, releases
from harness.cells import Selection
from harness.errors import ConfigurationError, MatrixError
from harness.planfile import read_plan
from harness.project import build_options, load_project, make_plan
from tests.conftest import SPEC
from tests.wheelhouse import Upload, index

ARCHITECTURE = platform.machine()
DAY = "2025-01-01"
LARGE = b"".join(hashlib.sha256(bytes([n])).digest() for n in range(250)) * 300  # deflate does not see that far


def binary(name: str, glibc: int, data: bytes) -> Upload:
    return Upload(name, "1.0", DAY, files={f"{name}.so": data}, platform=f"manylinux_2_{glibc}_{ARCHITECTURE}")


HEAVY = binary("heavy", 17, LARGE)
UV = f'#!/bin/sh\nexec {find_uv_bin()} "$@"\n'
UPLOADS = [
    HEAVY,
    binary("heavy", 35, b"too new"),
    Upload("only-new", "1.0", DAY, platform=f"manylinux_2_39_{ARCHITECTURE}"),
    Upload("light", "1.0", DAY, files={"light.py": b"x = 1\n"}),
    Upload("light", "2.0", DAY, files={"light.py": b"x = 2\n"}),
    Upload("old", "1.0", DAY),
    Upload("built", "1.0", DAY),
    Upload("built", "1.0", DAY, sdist=True),
    Upload("uv", "1.0", DAY, files={"uv-1.0.data/scripts/uv": UV.encode()}),
]


def line(name: str, version: str = "1.0", marker: str = "", sdist: bool = False) -> str:
    """As a lock has it: the hashes of all files."""
    found = [upload for upload in UPLOADS if (upload.name, upload.version) == (name, version)]
    hashes = [f"    --hash=sha256:{hashlib.sha256(upload.content).hexdigest()}" for upload in found]
    return " \\\n".join([f"{name}=={version}{f' ; {marker}' if marker else ''}", *hashes]) + "\n"


DOCKERFILE = """ARG BASE
FROM ${{BASE}} AS built
COPY {0}/source.lock {0}/step.py /opt/build/
RUN python3 /opt/build/step.py /opt/build/source.lock /opt/built
FROM ${{BASE}}
COPY {0}/cpu.lock /opt/
RUN install-locked /opt/cpu.lock
COPY --from=built /opt/built/ /opt/venv/lib/python3.11/site-packages/
"""
PLAIN = "ARG BASE\nFROM ${{BASE}}\nCOPY {0}/cpu.lock /opt/\nRUN install-locked /opt/cpu.lock\n"


# In the place of the harness: says what it was given.
STUB = """
import json, os, sys, harness
def main():
    import light
    print(json.dumps({"argv": sys.argv[1:], "environ": dict(os.environ), "prefix": sys.prefix, "x": light.x,
                      "file": harness.__file__, "python": list(sys.version_info[:2])}))
"""


@dataclass
class Home:
    """A project, and somebody in its folder."""

    root: Path
    environ: dict[str, str]
    said: list[str] = field(default_factory=list)

    @property
    def carry(self) -> Path:
        return self.root / "carry"

    def target(self, name: str, dockerfile: str, lock: str, source: str = "") -> None:
        folder = self.root / "docker" / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "Dockerfile").write_text(dockerfile.format(name))
        (folder / "cpu.lock").write_text(lock)
        (folder / "source.lock").write_text(source)
        (folder / "step.py").write_text("")

    def bundle(self, *words: str) -> Result:
        arguments = ["bundle", "--to", str(self.carry), "--config", str(self.root / "matrix.toml"), *words]
        return CliRunner().invoke(cli.app, arguments, env=self.environ)

    def made(self, *words: str) -> Index:
        done = self.bundle(*words)
        assert done.exit_code == 0, (done.output, done.exception)
        self.said = done.output.splitlines()
        return read_index(self.carry)

    def refused(self, *words: str) -> MatrixError:
        done = self.bundle(*words)
        assert isinstance(done.exception, MatrixError), (done.output, done.exception)
        return done.exception

    def read(self, made: Index, sha256: str) -> bytes:
        target = self.root / "assembled"
        assemble(self.carry / PARTS, sha256, made.contents[sha256], made.parts, target)
        return target.read_bytes()

    def archive(self, made: Index, sha256: str) -> dict[str, bytes]:
        with tarfile.open(fileobj=BytesIO(self.read(made, sha256))) as tar:
            return {member.name: tar.extractfile(member).read() for member in tar}  # type: ignore[union-attr]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with index(UPLOADS) as found:
        yield found


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def home(tmp_path: Path, address: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    environ = {
        "UV_DEFAULT_INDEX": address,
        "UV_CACHE_DIR": str(cache / "uv"),
        "XDG_CACHE_HOME": str(cache),
        "PIP_CONFIG_FILE": os.devnull,  # indexes of whoever runs the tests
        "PIP_FIND_LINKS": "",
    }
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    made = Home(tmp_path, environ)
    (tmp_path / "matrix.toml").write_text(SPEC)
    shared = line("heavy") + line("old", marker="python_version < '3.11'")
    made.target("vllm-0.8.5", PLAIN, shared + line("light"))
    made.target("vllm-0.10.0", DOCKERFILE, shared + line("light", "2.0"), line("built"))
    (tmp_path / "docker" / "base").mkdir()
    (tmp_path / "docker" / "base" / "Dockerfile").write_text("FROM scratch\n")
    (tmp_path / "scenarios" / "rig" / "__pycache__").mkdir(parents=True)
    (tmp_path / "scenarios" / "rig" / "__pycache__" / "x.pyc").write_text("")
    for name in ("cold_start", "multimodal_rollout"):
        (tmp_path / "scenarios" / f"test_{name}.py").write_text("def test_a(): ...\n")
    stub = tmp_path / "stub" / "harness"
    stub.mkdir(parents=True)
    (stub / "__init__.py").write_text("")
    (stub / "cli.py").write_text(STUB)
    monkeypatch.setattr(archives.harness, "__file__", str(stub / "__init__.py"))
    monkeypatch.setattr(wheels.metadata, "requires", lambda name: ["uv>=1", "light<2", "old; extra == 'test'"])
    return made


def named(made: Index, name: str) -> tuple[str, Content]:
    ((sha256, content),) = [item for item in made.contents.items() if item[1].name.startswith(f"{name}-")]
    return sha256, content


def origin(upload: Upload) -> str:
    return hashlib.sha256(upload.content).hexdigest()


# --- what is in it ---------------------------------------------------------------------------------------------------


def test_each_target_has_what_its_locks_name_and_what_is_shared_is_there_once(home: Home) -> None:
    made = home.made("--target", "vllm-*", "--split", "1M")
    heavy, content = named(made, "heavy")
    assert content.origin == origin(HEAVY), "the newest that runs there, not the newest"
    assert content.encoding == "zstd"
    assert sum(made.parts[part] for part in content.parts) < len(HEAVY.content) / 2
    with zipfile.ZipFile(BytesIO(home.read(made, heavy))) as wheel:
        assert wheel.read("heavy.so") == LARGE
    names = {
        target: sorted(made.contents[sha256].name.split("-")[0] for sha256 in own.contents)
        for target, own in made.targets.items()
    }
    assert names == {"vllm-0.8.5@cpu": ["heavy", "light"], "vllm-0.10.0@cpu": ["built", "heavy", "light"]}
    assert all(heavy in own.contents for own in made.targets.values())
    built, source = named(made, "built")
    assert (source.name, source.encoding, home.read(made, built)) == ("built-1.0.tar.gz", "raw", b"no archive at all")
    assert {path.name for path in (home.carry / PARTS).iterdir()} == set(made.parts)
    said = "\n".join(home.said)
    assert f"bundle {identity(made)}: {len(made.contents)} contents in {len(made.parts)} parts" in said
    assert "python3 carry/run" in said


def test_the_launcher_finds_uv_and_the_harness_raw(home: Home) -> None:
    made = home.made("--target", "vllm-0.8.5")
    names = [made.contents[sha256].name for sha256 in made.launch]
    assert names == ["light-1.0-py3-none-any.whl", "uv-1.0-py3-none-any.whl", "harness.tar"]
    assert {made.contents[sha256].encoding for sha256 in made.launch} == {"raw"}
    assert home.archive(made, made.launch[-1]) == {"harness/__init__.py": b"", "harness/cli.py": STUB.encode()}
    assert os.access(home.carry / "run", os.X_OK)


def test_the_project_comes_with_the_plan_that_it_makes(home: Home, tmp_path: Path) -> None:
    made = home.made("*vllm-0.8.5*/multimodal*qwen2_vl]", "--python", "3.12")
    files = home.archive(made, made.project)
    assert {"matrix.toml", "plan.json", "docker/vllm-0.8.5/cpu.lock", "scenarios/test_cold_start.py"} <= set(files)
    assert not [name for name in files if "__pycache__" in name]
    there = tmp_path / "there"
    for name, data in files.items():
        (there / name).parent.mkdir(parents=True, exist_ok=True)
        (there / name).write_bytes(data)
    entries = read_plan(there).cells
    assert [(entry.cell.scenario, entry.selected) for entry in entries] == [
        ("cold_start", False),
        ("multimodal_rollout", True),
    ]
    project = load_project(there / "matrix.toml", made.python)
    ids = Selection(ids=[entry.cell.id for entry in entries])
    again = make_plan(project, ids, None, True, build_options(project), "local")
    assert [planned.digest for planned in again] == [entry.digest for entry in entries]


def test_what_is_borrowed_is_not_carried_but_its_record(home: Home) -> None:
    made = home.made("--target", "vllm-0.8.5", "--borrow", "hea*")
    target = made.targets["vllm-0.8.5@cpu"]
    borrowed = target.borrowed["heavy"]
    assert borrowed.version == "1.0"
    assert [made.contents[sha256].name for sha256 in target.contents] == ["light-1.0-py3-none-any.whl"]
    assert home.read(made, borrowed.record) == b"heavy.so,,\n"
    assert made.contents[borrowed.record].name == "heavy-1.0.RECORD"
    assert "1 borrowed" in "\n".join(home.said)
    assert "matches nothing" in str(home.refused("--target", "vllm-0.8.5", "--borrow", "torch"))


# --- making it again -------------------------------------------------------------------------------------------------


def test_the_same_again_fetches_and_writes_nothing(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    first = home.made("--target", "vllm-*")
    before = {path: path.stat().st_mtime_ns for path in (home.carry / PARTS).iterdir()}

    def no(*_: object) -> None:
        raise AssertionError("fetched again")

    monkeypatch.setattr(make, "fetch", no)
    again = home.made("--target", "vllm-*")
    assert identity(again) == identity(first)
    assert {path: path.stat().st_mtime_ns for path in (home.carry / PARTS).iterdir()} == before
    elsewhere = home.root / "elsewhere"
    home.carry.rename(elsewhere)
    assert identity(home.made("--target", "vllm-*")) == identity(first)
    assert {path.name for path in (elsewhere / PARTS).iterdir()} == {path.name for path in before}


def test_one_that_was_broken_off_goes_on(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(make, "BATCH", 1)
    home.environ["XDG_CACHE_HOME"] = str(home.root / "cache")
    fetched: list[tuple[str, str]] = []
    fetch = make.fetch

    def counted(wanted: Sequence[wheels.Release], *rest: object) -> object:
        fetched.extend((release.name, release.version) for release in wanted)
        if len(fetched) == 3:
            raise KeyboardInterrupt
        return fetch(wanted, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(make, "fetch", counted)
    assert home.bundle("--target", "vllm-*").exit_code != 0
    assert not (home.carry / "bundle.json").exists()
    first = list(fetched)
    home.made("--target", "vllm-*")
    assert sorted(set(first[:2]) & set(fetched[3:])) == []
    assert not list((home.root / "cache" / "vllm-matrix" / "bundles").glob(".work-*"))


def test_what_an_earlier_bundle_brought_stays_until_it_is_pruned(home: Home) -> None:
    both = home.made("--target", "vllm-*")
    one = home.made("--target", "vllm-0.8.5")
    there = {path.name for path in (home.carry / PARTS).iterdir()}
    assert set(both.parts) <= there
    (home.carry / PARTS / "mine.txt").write_text("no part")
    home.made("--target", "vllm-0.8.5", "--prune")
    assert {path.name for path in (home.carry / PARTS).iterdir()} == {*one.parts, "mine.txt"}
    assert "removed" in "\n".join(home.said)


def test_one_whose_index_was_damaged_is_made_again(home: Home) -> None:
    whole = home.made("--target", "vllm-0.8.5")
    (home.carry / "bundle.json").write_text("{}")
    (home.carry / "work").mkdir()
    assert home.made("--target", "vllm-0.8.5").parts == whole.parts
    (home.carry / "bundle.json").unlink()
    assert home.made("--target", "vllm-0.8.5").parts == whole.parts


def test_smaller_parts_are_cut_anew_and_a_missing_one_is_made_again(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("harness.bundles.cli.SMALLEST", 1)
    whole = home.made("--target", "vllm-0.8.5")
    cut = home.made("--target", "vllm-0.8.5", "--split", "1k")
    assert max(cut.parts.values()) <= 1024 < max(whole.parts.values())
    heavy, content = named(cut, "heavy")
    (home.carry / PARTS / content.parts[0]).unlink()
    again = home.made("--target", "vllm-0.8.5", "--split", "1k")
    assert len(home.read(again, heavy)) == content.bytes


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--target", "vllm-0.6.3"], "matches nothing"),
        (["--device", "cuda"], "no target has a lock for the device 'cuda'"),
        (["--python", "3.10"], "the harness itself needs 3.11"),
        (["--python", "3"], "no minor version"),
        (["--platform", "win_amd64"], "none that bundles are made for"),
        (["--platform", f"{ARCHITECTURE}-manylinux_2_1"], "none that bundles are made for"),
        (["--split", "1k"], "no size of a part"),
        (["--split", "large"], "no size of a part"),
    ],
)
def test_what_cannot_be_made_is_told_before_anything_is(home: Home, words: list[str], message: str) -> None:
    with pytest.raises(MatrixError, match=message):
        raise home.refused(*words)
    assert not home.carry.exists()


def test_a_python_below_the_targets_is_refused(home: Home) -> None:
    (home.root / "matrix.toml").write_text(SPEC.replace('"3.11"', '"3.12"'))
    assert "needs 3.12 or later" in str(home.refused("--target", "vllm-0.8.5", "--python", "3.11"))


def test_a_folder_of_something_else_is_left_alone(home: Home) -> None:
    home.carry.mkdir()
    (home.carry / "thesis.tex").write_text("")
    assert "holds something that is no bundle" in str(home.refused("--target", "vllm-0.8.5"))


def test_a_wheel_that_does_not_run_there_is_told(home: Home) -> None:
    home.target("vllm-0.8.5", PLAIN, line("only-new"))
    assert "there is none of only-new==1.0" in str(home.refused("--target", "vllm-0.8.5"))
    home.made("--target", "vllm-0.8.5", "--platform", f"{ARCHITECTURE}-manylinux_2_39")


def test_a_file_that_is_not_the_locks_is_refused(home: Home) -> None:
    other = hashlib.sha256(b"").hexdigest()
    home.target("vllm-0.8.5", PLAIN, f"light==1.0 --hash=sha256:{other}\n")
    assert "not the one that the lock names" in str(home.refused("--target", "vllm-0.8.5"))
    home.target("vllm-0.10.0", DOCKERFILE, line("light"), f"built==1.0 --hash=sha256:{other}\n")
    refused = str(home.refused("--target", "vllm-0.10.0"))
    assert other not in refused
    assert "built" in refused
    home.target("vllm-0.8.5", PLAIN, "light==1.0\n")
    assert "no hash for light==1.0" in str(home.refused("--target", "vllm-0.8.5"))


# --- another machine's wheels ----------------------------------------------------------------------------------------


def test_tags_are_all_that_run_there_the_best_first() -> None:
    tags = Machine("3.12", "x86_64-manylinux_2_18").tags()
    assert tags[:4] == (
        "manylinux_2_18_x86_64",
        "manylinux_2_17_x86_64",
        "manylinux2014_x86_64",
        "manylinux_2_16_x86_64",
    )
    assert tags[-3:] == ("manylinux_2_5_x86_64", "manylinux1_x86_64", "linux_x86_64")
    arm = Machine("3.12", "aarch64-manylinux_2_18").tags()
    assert arm == ("manylinux_2_18_aarch64", "manylinux_2_17_aarch64", "manylinux2014_aarch64", "linux_aarch64")


def test_a_marker_that_a_patch_release_decides_carries_both() -> None:
    sha = "0" * 64
    text = (
        f"a==1.0 ; python_full_version < '3.11.3' --hash=sha256:{sha}\n"
        f"a==2.0 ; python_full_version >= '3.11.3' --hash=sha256:{sha}\n"
        f"b==1.0 ; sys_platform == 'win32' --hash=sha256:{sha}\n"
        f"--extra-index-url https://localhost/simple\n"
    )
    found = releases(text, Machine("3.11", "x86_64-manylinux_2_28"))
    assert [(one.name, one.version) for one in found] == [("a", "1.0"), ("a", "2.0")]
    assert {one.indexes for one in found} == {("https://localhost/simple",)}


def test_bundles_are_made_on_their_own_kind_of_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheels.this, "machine", lambda: "riscv64")
    with pytest.raises(ConfigurationError, match="of the kind riscv64"):
        machine("3.12", "x86_64-manylinux_2_28")
