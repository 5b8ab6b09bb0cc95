"""Environments: a Dockerfile as steps, names by content, and one that is really made by uv, from a wheel made here."""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from harness import environments
from harness.environments import INSTALL, check_host, environment_of, find_python, make_environment
from harness.errors import BuildError, ConfigurationError, InfrastructureError
from harness.images import BuildOptions, BuiltImage, image_for
from harness.recipes import VENV, Install, Run, steps

DOCKER = Path(__file__).parents[1] / "docker"
DOCKERFILES = sorted(DOCKER.glob("vllm-*/Dockerfile"))
MINOR = f"{sys.version_info.major}.{sys.version_info.minor}"


# --- the recipe ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.parent.name)
def test_every_dockerfile_can_be_followed(dockerfile: Path) -> None:
    found = steps(dockerfile, DOCKER)
    assert dockerfile.parent / "cpu.lock" in [step.lock for step in found if isinstance(step, Install)]
    scripts = {path for path in (DOCKER / "shared").glob("*.py") if path.name in dockerfile.read_text()}
    run = {Path(word) for step in found if isinstance(step, Run) for word in step.arguments if word.endswith(".py")}
    assert run == scripts


def test_the_steps_of_one_in_order() -> None:
    assert steps(DOCKER / "vllm-0.8.5" / "Dockerfile", DOCKER) == (
        Install(DOCKER / "shared/torch-2.6.0-cpu.lock"),
        Run((f"{DOCKER}/shared/cuda_stubs.py",)),
        Install(DOCKER / "vllm-0.8.5/cpu.lock"),
        Run(
            (
                f"{DOCKER}/shared/weak_version.py",
                "GLIBCXX_3.4.32",
                f"{VENV}/lib/python3*/site-packages/vllm/_C.abi3.so",
            )
        ),
        Run(("-c", "import vllm")),
    )


@pytest.mark.parametrize(
    "line",
    [
        "ENV VLLM_X=1",
        "RUN apt-get install -y g++",
        "RUN install-locked /lock; python3 -c 1",
        "RUN install-locked /lock | tee log",
        "RUN install-locked /other",
        "RUN python3",
        "RUN python3 /etc/passwd",
        "RUN rm -rf /",
        "RUN X=1 python3 -c 1",
        "RUN (install-locked /lock)",
        "RUN install-locked $LOCK",
        "COPY --from=other lock /lock",
        "COPY folder /folder",
        "WORKDIR /x",
    ],
)
def test_what_is_not_understood_is_an_error_that_names_it(tmp_path: Path, line: str) -> None:
    (tmp_path / "lock").write_text("")
    (tmp_path / "folder").mkdir()
    dockerfile = tmp_path / "Dockerfile"
    dockerfile.write_text(f"ARG BASE\nFROM ${{BASE}}\nUSER 0\nCOPY lock /lock\n{line}\n")
    with pytest.raises(ConfigurationError, match=r"cannot be followed without Docker: .+\n.*--backend docker"):
        steps(dockerfile, tmp_path)


def test_packages_are_installed_with_the_options_of_the_images() -> None:
    command = re.search(r"exec uv pip install (.+) -r", (DOCKER / "base" / "install-locked").read_text())
    assert command is not None
    assert [word if word != "copy" else "hardlink" for word in shlex.split(command[1])] == list(INSTALL)


# --- names -----------------------------------------------------------------------------------------------------------


def test_a_name_follows_from_what_goes_in(tmp_path: Path) -> None:
    folder = tmp_path / "t"
    folder.mkdir()
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "Dockerfile").write_text("FROM scratch\n")
    (folder / "Dockerfile").write_text("ARG BASE\nFROM ${BASE}\nCOPY t/cpu.lock /\nRUN install-locked /cpu.lock\n")
    (folder / "cpu.lock").write_text("a")

    def name(python: str = "3.11", base: str = "debian") -> str:
        options = BuildOptions(docker_dir=tmp_path, base=base)
        return environment_of(
            image_for("t", "cpu", folder / "Dockerfile", folder / "cpu.lock", options), python, options
        ).tag

    first = name()
    assert re.fullmatch(r"t-cpu-[0-9a-f]{12}", first)
    assert name(base="ubuntu") == first, "the base is no part of it"
    assert name(python="3.12") != first
    (folder / "cpu.lock").write_text("b")
    assert name() != first


# --- what the host has to bring --------------------------------------------------------------------------------------


@pytest.mark.parametrize("tool", ["gcc", "g++", "readelf"])
def test_a_missing_tool_is_one_clear_error(tool: str) -> None:
    with pytest.raises(InfrastructureError, match=rf"need {re.escape(tool)},.*\n.*apt-get install g\+\+"):
        check_host(lambda name: None if name == tool else f"/usr/bin/{name}")


def test_a_missing_libnuma_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(InfrastructureError, match=r"libnuma\.so\.1.*\n.*libnuma1"):
        check_host(lambda name: name)


def test_a_missing_python_is_one_clear_error() -> None:
    with pytest.raises(BuildError, match=r"needs Python 3\.99.*\n.*python3\.99-dev.*uv python install 3\.99"):
        find_python("3.99")


def test_a_python_without_headers_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uv = tmp_path / "uv"
    uv.write_text("#!/bin/sh\necho /bin/false\n")
    uv.chmod(0o755)
    monkeypatch.setattr(environments, "_uv", lambda: str(uv))
    with pytest.raises(BuildError, match=r"/bin/false has no headers \(Python\.h\)"):
        find_python("3.11")


# --- making one ------------------------------------------------------------------------------------------------------


@dataclass
class Workshop:
    """A context with one target, whose lock names a wheel that was made here."""

    root: Path

    def make(self) -> BuiltImage:
        options = BuildOptions(docker_dir=self.root / "docker")
        target = self.root / "docker" / "t"
        image = environment_of(
            image_for("t", "cpu", target / "Dockerfile", target / "cpu.lock", options), MINOR, options
        )
        lines: list[str] = []
        return make_environment(image, MINOR, options, self.root / "made", self.root / "log", lines.append)

    def dockerfile(self, *steps: str) -> None:
        text = " && ".join(["install-locked /opt/vllm-matrix/cpu.lock", *steps])
        copies = "COPY t/cpu.lock t/change.py /opt/vllm-matrix/"
        (self.root / "docker/t/Dockerfile").write_text(f"ARG BASE\nFROM ${{BASE}}\n{copies}\nRUN {text}\n")


CHANGE = "python3 /opt/vllm-matrix/change.py /opt/venv/lib/python3*/site-packages/thing.py"


@pytest.fixture
def workshop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workshop:
    target = tmp_path / "docker" / "t"
    target.mkdir(parents=True)
    (tmp_path / "docker" / "base").mkdir()
    (tmp_path / "docker" / "base" / "Dockerfile").write_text("FROM scratch\n")
    wheel = tmp_path / "thing-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr("thing.py", "x = 1\n")
        file.writestr("thing-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: thing\nVersion: 1.0\n")
        file.writestr("thing-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr("thing-1.0.dist-info/RECORD", "")
    sha = hashlib.sha256(wheel.read_bytes()).hexdigest()
    (target / "cpu.lock").write_text(f"thing @ {wheel.as_uri()} --hash=sha256:{sha}\n")
    (target / "change.py").write_text("import sys\nopen(sys.argv[1], 'r+').write('x = 22\\n')\n")
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "uv"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(environments, "NEEDED", 0)
    monkeypatch.setattr(environments, "find_python", lambda version: Path(sys.executable))
    made = Workshop(tmp_path)
    made.dockerfile(CHANGE, "HOME=/tmp/home python3 -c 'import thing; assert thing.x == 22'", "rm -rf /tmp/*")
    return made


def test_it_is_made_once_and_what_it_changes_is_not_the_caches(workshop: Workshop) -> None:
    first = workshop.make()
    assert (first.tag, first.id, first.cached) == (first.id, first.tag, False)
    folder = workshop.root / "made" / first.id
    (changed,) = folder.glob("lib/python3*/site-packages/thing.py")
    assert changed.read_text() == "x = 22\n"
    assert changed.stat().st_nlink == 1
    (metadata,) = folder.glob("lib/python3*/site-packages/thing-1.0.dist-info/METADATA")
    assert metadata.stat().st_nlink > 1, "hard links: it takes no room of its own"
    cached = {path.read_text() for path in (workshop.root / "uv").rglob("thing.py")}
    assert cached == {"x = 1\n"}
    again = workshop.make()
    assert again.cached
    assert (again.id, again.bytes) == (first.id, first.bytes)
    done = subprocess.run(
        [folder / "bin" / "python3", "-c", "import thing; print(thing.x)"], capture_output=True, check=True
    )
    assert done.stdout == b"22\n"


def test_one_that_was_cut_short_is_made_again(workshop: Workshop) -> None:
    folder = workshop.root / "made" / workshop.make().id
    (folder / environments.MARKER).unlink()
    (folder / "rubbish").write_text("x")
    assert not workshop.make().cached
    assert not (folder / "rubbish").exists()


def test_one_whose_python_is_gone_is_made_again(workshop: Workshop) -> None:
    folder = workshop.root / "made" / workshop.make().id
    (folder / "bin" / "python3").unlink()
    (folder / "bin" / "python3").symlink_to("/nonexistent")
    assert not workshop.make().cached


def test_a_step_that_fails_says_so_and_leaves_nothing_that_counts(workshop: Workshop) -> None:
    workshop.dockerfile("python3 -c 'raise SystemExit(\"no such luck\")'")
    with pytest.raises(BuildError) as caught:
        workshop.make()
    assert "no such luck" in caught.value.log_tail
    assert list((workshop.root / "made").glob(f"*/{environments.MARKER}")) == []


def test_a_file_that_is_not_there_is_a_failed_build(workshop: Workshop) -> None:
    workshop.dockerfile(CHANGE.replace("thing.py", "other.py"))
    with pytest.raises(BuildError, match=r"the environment has no lib/python3\*/site-packages/other\.py"):
        workshop.make()


def test_a_wheel_that_is_not_the_locks_is_refused(workshop: Workshop) -> None:
    with zipfile.ZipFile(workshop.root / "thing-1.0-py3-none-any.whl", "a") as file:
        file.writestr("more.py", "")
    with pytest.raises(BuildError, match="not the one that the lock names"):
        workshop.make()


def test_a_full_disk_is_infrastructure(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environments, "NEEDED", 1 << 60)
    with pytest.raises(InfrastructureError, match="set XDG_CACHE_HOME"):
        workshop.make()


def test_no_module_of_the_callers_folder_gets_in(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    (workshop.root / "thing.py").write_text("x = 3\n")
    monkeypatch.chdir(workshop.root)
    monkeypatch.setenv("PYTHONPATH", os.fspath(workshop.root))
    workshop.make()
