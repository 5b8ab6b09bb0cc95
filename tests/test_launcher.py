"""The launcher: from a bundle's folder to the harness, with nothing but a Python; what does not fit is told."""

from __future__ import annotations

import ast
import errno
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

from harness.bundles import launcher
from harness.bundles.index import Index, read_index
from tests.test_bundle_make import Home, address, cache, home  # noqa: F401 - fixtures

MINOR = f"{sys.version_info.major}.{sys.version_info.minor}"
OLDEST = (3, 10)
MACHINE = platform.machine()


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("template") / "carry"


@pytest.fixture
def bundle(home: Home, template: Path) -> Index:  # noqa: F811
    """Made once, and carried over for each test."""
    if not template.exists():
        home.made("--target", "vllm-0.8.5", "--python", MINOR, "--split", "1M")
        home.carry.rename(template)
    shutil.copytree(template, home.carry)
    return read_index(home.carry)


class Start(Exception):  # noqa: N818 - what would have become of this process
    pass


Launch = Callable[..., tuple[int, str]]


@pytest.fixture
def launch(
    home: Home,  # noqa: F811
    bundle: Index,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Launch:
    """Start the launcher in this process; its exit code and what it said. Start stands for the harness."""

    def become(*_: object) -> None:
        raise Start

    def start(*words: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["run", *words])
        with pytest.raises(SystemExit) as ended:
            launcher.main()
        said = capsys.readouterr()
        return int(ended.value.code or 0), said.out + said.err

    monkeypatch.setattr(launcher, "HERE", home.carry)
    monkeypatch.setattr(os, "execve", become)
    return start


def changed(folder: Path, **values: Any) -> None:
    path = folder / "bundle.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


# --- it starts -------------------------------------------------------------------------------------------------------


def run(python: str, home: Home, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:  # noqa: F811
    command = [python, str(home.carry / "run"), *words]
    return subprocess.run(command, env={**os.environ, **environ}, capture_output=True, text=True, check=False)


def test_it_becomes_the_harness_and_the_second_time_at_once(home: Home, bundle: Index) -> None:  # noqa: F811
    first = run(sys.executable, home, "*/cold_start*", "--fresh", PYTHONPATH="/nonexistent", UV_OFFLINE="")
    assert first.returncode == 0, first.stderr
    work = home.carry / "work"
    said = json.loads(first.stdout)
    assert said["argv"] == ["bundle", "run", str(home.carry), "*/cold_start*", "--fresh"]
    assert said["environ"]["XDG_CACHE_HOME"] == str(work / "cache")
    assert said["environ"]["UV_CACHE_DIR"] == str(work / "uv-cache")
    assert said["environ"]["VLLM_MATRIX_BORROW_FROM"] == sysconfig.get_path("platlib")
    assert "PYTHONPATH" not in said["environ"]
    assert said["file"].startswith(said["prefix"])
    assert Path(said["prefix"]).parent == work / "harness"
    assert said["x"] == 1
    assert "setting up" in first.stderr
    again = run(sys.executable, home)
    assert (again.returncode, again.stderr) == (0, "")
    assert json.loads(again.stdout)["prefix"] == said["prefix"]
    assert [path.name for path in (work / "harness").iterdir()] == [Path(said["prefix"]).name]


def test_work_may_lie_elsewhere(home: Home, bundle: Index, tmp_path: Path) -> None:  # noqa: F811
    done = run(sys.executable, home, f"--work={tmp_path / 'there'}")
    assert Path(json.loads(done.stdout)["prefix"]).is_relative_to(tmp_path / "there")
    assert not (home.carry / "work").exists()


def test_the_oldest_python_that_may_start_it_does(home: Home, bundle: Index, tmp_path: Path) -> None:  # noqa: F811
    oldest = shutil.which(f"python{OLDEST[0]}.{OLDEST[1]}")
    if oldest is None or not launcher.works(oldest, "{}.{}".format(*OLDEST)):
        pytest.skip("there is no Python 3.10 here")
    path = tmp_path / "bin"
    path.mkdir()
    (path / f"python{MINOR}").symlink_to(sys.executable)
    done = run(oldest, home, PATH=f"{path}:{os.environ['PATH']}")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["python"] == list(sys.version_info[:2])
    assert "VLLM_MATRIX_BORROW_FROM" not in said["environ"]


def test_it_is_written_for_the_oldest_python_and_imports_nothing_of_others() -> None:
    tree = ast.parse(Path(launcher.__file__).read_text(), feature_version=OLDEST)
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {alias.name for node in imports if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in imports if isinstance(node, ast.ImportFrom)}
    assert {name.split(".")[0] for name in names} <= sys.stdlib_module_names


# --- verify ----------------------------------------------------------------------------------------------------------


def test_verify_names_what_is_missing_or_damaged(launch: Launch, home: Home, bundle: Index) -> None:  # noqa: F811
    assert launch("verify", "this")[0] == 2
    code, said = launch("verify")
    assert (code, said) == (0, "vllm-0.8.5@cpu: whole\n")
    first, second = list(bundle.parts)[:2]
    (home.carry / "parts" / first).unlink()
    (home.carry / "parts" / second).write_bytes(bytes(bundle.parts[second]))
    code, said = launch("verify")
    assert code == 5
    assert f"missing: parts/{first} ({bundle.parts[first]} bytes)\n" in said
    assert f"damaged: parts/{second} ({bundle.parts[second]} bytes)\n" in said
    assert re.search(r"vllm-0\.8\.5@cpu: 2 of \d+ parts are missing or damaged", said)


# --- it does not start -----------------------------------------------------------------------------------------------


def test_a_damaged_part_is_told_and_leaves_nothing(launch: Launch, home: Home, bundle: Index) -> None:  # noqa: F811
    part = bundle.contents[bundle.launch[0]].parts[0]
    (home.carry / "parts" / part).write_bytes(bytes(bundle.parts[part]))
    code, said = launch()
    assert code == 5
    assert f"part {part} of light-1.0-py3-none-any.whl is damaged" in said
    assert list((home.carry / "work" / "harness").iterdir()) == []


@pytest.mark.parametrize(
    ("values", "code", "message"),
    [
        ({"platform": f"{MACHINE}-manylinux_2_99"}, 2, "needs glibc 2.99 or later"),
        ({"platform": "pdp11-manylinux_2_28"}, 2, f"for Linux on pdp11, and this is Linux on {MACHINE}"),
        ({"platform": "../../x"}, 2, "no platform that is known"),
        ({"python": "3.99"}, 5, "for Python 3.99, and there is none here"),
        ({"python": "3.11/../x"}, 2, "it is damaged"),
        ({"schema": 2}, 2, "schema 2, and this launcher knows 1"),
        ({"parts": {"../../etc/passwd": 1}}, 2, "it is damaged"),
        ({"parts": []}, 2, "it is damaged"),
        ({"contents": {"0" * 64: {"name": "../x", "parts": []}}}, 2, "it is damaged"),
        ({"launch": ["0" * 64]}, 2, "it is damaged"),
        ({"launch": []}, 2, "it holds no harness"),
    ],
)
def test_a_bundle_that_does_not_fit_is_told(
    launch: Launch,
    home: Home,  # noqa: F811
    values: dict[str, Any],
    code: int,
    message: str,
) -> None:
    changed(home.carry, **values)
    found, said = launch()
    assert message in said
    assert found == code
    assert "Traceback" not in said
    assert said.count("error:") == 1


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "null", '{"schema": 1}'])
def test_a_damaged_index_is_told(launch: Launch, home: Home, text: str) -> None:  # noqa: F811
    (home.carry / "bundle.json").write_text(text)
    code, said = launch("verify")
    assert code == 2
    assert "it is damaged" in said
    (home.carry / "bundle.json").unlink()
    assert "it is not there" in launch()[1]


def test_a_full_disk_is_told(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> Iterator[bytes]:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(launcher, "take", full)
    code, said = launch()
    assert code == 5
    assert "No space left on device\n  Make room" in said


@pytest.mark.parametrize("name", ["../x.py", "harness/../../x.py", "/tmp/x.py", "other/x.py"])
def test_only_files_of_the_harness_are_unpacked(tmp_path: Path, name: str) -> None:
    archive = tmp_path / "harness.tar"
    with tarfile.open(archive, "w") as tar:
        tar.addfile(tarfile.TarInfo(name), BytesIO(b""))
    with pytest.raises(launcher.BundleError, match="no file of it"):
        launcher.unpack(archive, tmp_path / "site")


def test_a_name_on_path_that_is_no_python_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the stand-ins of version managers are."""
    for name in ("python3.99", "uv"):
        (tmp_path / name).write_text("#!/bin/sh\nexit 127\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(launcher.BundleError, match=r"put it on PATH as python3\.99"):
        launcher.find_python("3.99", tmp_path / "uv")
