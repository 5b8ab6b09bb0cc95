"""Environments: a Dockerfile as steps, names by content, and one that is really made by uv, from a wheel made here."""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from harness import environments
from harness.dockerfiles import copied
from harness.environments import INSTALL, check_headers, check_host, environment_of, find_python, make_environment
from harness.errors import BuildError, ConfigurationError, InfrastructureError
from harness.images import BuildOptions, BuiltImage, image_for
from harness.recipes import VENV, Copy, Install, Run, Step, made_from_source, steps

DOCKER = Path(__file__).parents[1] / "docker"
DOCKERFILES = sorted(DOCKER.glob("vllm-*/Dockerfile"))
MINOR = f"{sys.version_info.major}.{sys.version_info.minor}"


# --- the recipe ------------------------------------------------------------------------------------------------------


def within(recipe: tuple[Step, ...]) -> Iterator[Step]:
    """The steps, and those of the stages that they copy from."""
    for step in recipe:
        yield step
        if isinstance(step, Copy):
            yield from within(step.steps)


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.parent.name)
def test_every_dockerfile_can_be_followed(dockerfile: Path) -> None:
    found = steps(dockerfile, DOCKER)
    assert dockerfile.parent / "cpu.lock" in [step.lock for step in found if isinstance(step, Install)]
    assert made_from_source(found) == (dockerfile.parent / "cpu-source.lock").exists()
    used = {step.lock for step in within(found) if isinstance(step, Install)}
    runs = [step for step in within(found) if isinstance(step, Run)]
    used |= {word for step in runs for word in step.arguments if isinstance(word, Path)}
    assert used == set(copied(dockerfile, DOCKER)), "what is copied is used, or there would be no need to copy it"


def test_the_steps_of_one_in_order() -> None:
    assert steps(DOCKER / "vllm-0.8.5" / "Dockerfile", DOCKER) == (
        Install(DOCKER / "shared/torch-2.6.0-cpu.lock"),
        Run((DOCKER / "shared/cuda_stubs.py",)),
        Install(DOCKER / "vllm-0.8.5/cpu.lock"),
        Run(
            (
                DOCKER / "shared/weak_version.py",
                "GLIBCXX_3.4.32",
                f"{VENV}/lib/python3*/site-packages/vllm/_C.abi3.so",
            )
        ),
        Run(("-c", "import vllm")),
    )


STAGES = """\
ARG BASE=base
FROM ${BASE} AS torch
USER 0
COPY torch.lock stubs.py /opt/vllm-matrix/
RUN install-locked /opt/vllm-matrix/torch.lock && python3 /opt/vllm-matrix/stubs.py

FROM torch AS built
COPY tools.lock source.lock build.py /opt/build/
RUN install-locked /opt/build/tools.lock && python3 /opt/build/build.py /opt/build/source.lock /opt/built

FROM torch
COPY cpu.lock /opt/vllm-matrix/
RUN install-locked /opt/vllm-matrix/cpu.lock
COPY --from=built /opt/built/ /opt/venv/lib/python3.11/site-packages/
USER 1000
"""


@pytest.fixture
def stages(tmp_path: Path) -> Path:
    for name in ("torch.lock", "stubs.py", "tools.lock", "source.lock", "build.py", "cpu.lock"):
        (tmp_path / name).write_text("")
    dockerfile = tmp_path / "Dockerfile"
    dockerfile.write_text(STAGES)
    return dockerfile


def test_a_stage_is_followed_where_it_is_copied_from(stages: Path) -> None:
    here = stages.parent
    torch: tuple[Step, ...] = (Install(here / "torch.lock"), Run((here / "stubs.py",)))
    build = Run((here / "build.py", here / "source.lock", "/opt/built"))
    assert steps(stages, here) == (
        *torch,
        Install(here / "cpu.lock"),
        Copy((*torch, Install(here / "tools.lock"), build), "/opt/built"),
    )


def test_a_stage_that_nothing_is_copied_from_is_left_out(stages: Path) -> None:
    stages.write_text(
        "\n".join(line for line in STAGES.splitlines() if "--from" not in line).replace(" /opt/built", "")
    )
    found = steps(stages, stages.parent)
    assert not made_from_source(found)
    assert [step.lock.name for step in found if isinstance(step, Install)] == ["torch.lock", "cpu.lock"]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("--from=built", "--from=other"),
        ("--from=built", "--from=1"),
        ("--from=built", "--from=debian:bookworm-slim"),
        ("--from=built", "--from=built --chown=1000"),
        ("--from=built", "--chown=1000 --from=built"),
        ("/opt/built/ /opt/venv/lib/python3.11/site-packages/", "/opt/built/ /opt/venv/lib/"),
        ("/opt/built/ /opt/venv/lib/python3.11/site-packages/", "/opt/built/ /usr/lib/python3.11/site-packages/"),
        ("--from=built /opt/built/", "--from=built /opt/build/ /opt/built/"),
        ("--from=built /opt/built/", "--from=built /opt/venv/"),
        ("--from=built /opt/built/", "--from=built /opt/../etc/"),
        ("--from=built /opt/built/", "--from=built /opt/other/"),  # then build.py writes where nobody looks
        ("source.lock /opt/built", "source.lock --to=/opt/built"),
        ("RUN install-locked /opt/vllm-matrix/cpu.lock", "RUN python3 -c 1 /opt/built"),
        ("RUN install-locked /opt/vllm-matrix/cpu.lock", "RUN install-locked /opt/build/tools.lock"),
        ("FROM torch AS built", "FROM debian AS built"),
        ("FROM torch AS built", "FROM --platform=linux/arm64 torch AS built"),
        ("FROM torch AS built", "FROM built AS built"),
        ("ARG BASE=base", "COPY cpu.lock /opt/"),
    ],
)
def test_stages_that_are_not_understood_are_an_error(stages: Path, old: str, new: str) -> None:
    assert STAGES.count(old) == 1
    stages.write_text(STAGES.replace(old, new))
    with pytest.raises(ConfigurationError, match=r"cannot be followed without Docker: .+\n.*--backend docker"):
        steps(stages, stages.parent)


def test_a_dockerfile_without_a_stage_is_an_error(stages: Path) -> None:
    stages.write_text("ARG BASE\n")
    with pytest.raises(ConfigurationError, match="it has no FROM"):
        steps(stages, stages.parent)


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
        "COPY --chown=1000 lock /other",
        "RUN python3 /lock --to=/etc",
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
    assert sorted(word if word != "copy" else "hardlink" for word in shlex.split(command[1])) == sorted(INSTALL)


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
        check_host({"cpu", "cuda"}, lambda name: None if name == tool else f"/usr/bin/{name}")


def test_cells_on_gpus_need_only_what_triton_compiles_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")  # libnuma cannot be loaded
    check_host({"cuda"}, lambda name: "/usr/bin/gcc" if name == "gcc" else None)
    with pytest.raises(InfrastructureError, match="need gcc,"):
        check_host({"cuda"}, lambda name: None)


def test_a_missing_libnuma_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(InfrastructureError, match=r"libnuma\.so\.1.*\n.*libnuma1"):
        check_host({"cpu"}, lambda name: name)


def test_a_missing_numa_header_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "g++"
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for code in (0, 1):
        compiler.write_text(f"#!/bin/sh\nexit {code}\n")
        compiler.chmod(0o755)
        if code:
            with pytest.raises(BuildError, match=r"compiled from its source and needs numa\.h.*\n.*libnuma-dev"):
                check_headers()
        else:
            check_headers()


def test_a_missing_python_is_one_clear_error() -> None:
    with pytest.raises(BuildError, match=r"needs Python 3\.99.*\n.*python3\.99-dev.*uv python install 3\.99"):
        find_python("3.99")


def test_a_python_without_headers_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uv = tmp_path / "uv"
    uv.write_text("#!/bin/sh\necho /bin/false\n")
    uv.chmod(0o755)
    monkeypatch.setattr(environments, "_uv", lambda: str(uv))
    with monkeypatch.context() as patch:
        patch.setattr(sys, "base_prefix", str(tmp_path))
        with pytest.raises(BuildError, match=r"/bin/false has no headers \(Python\.h\)"):
            find_python(MINOR)
    assert find_python(MINOR) == Path(sys.base_prefix, "bin", f"python{MINOR}"), "our own will do"


# --- making one ------------------------------------------------------------------------------------------------------


@dataclass
class Workshop:
    """A context with one target, whose lock names a wheel that was made here."""

    root: Path
    lines: list[str] = field(default_factory=list)

    def make(self) -> BuiltImage:
        bundle = Path("/etc/ssl/certs/ca-certificates.crt")
        options = BuildOptions(docker_dir=self.root / "docker", index_url="http://localhost:1/simple", ca_bundle=bundle)
        target = self.root / "docker" / "t"
        image = environment_of(
            image_for("t", "cpu", target / "Dockerfile", target / "cpu.lock", options), MINOR, options
        )
        return make_environment(image, MINOR, options, self.root / "made", self.root / "log", self.lines.append)

    def stage(
        self, command: str, copy: str = "--from=built /opt/built/ /opt/venv/lib/python3.11/site-packages/"
    ) -> None:
        """A Dockerfile whose first stage runs `command`, with build.py, and whose last copies from it."""
        (self.root / "docker/t/Dockerfile").write_text(
            "ARG BASE\nFROM ${BASE} AS torch\nCOPY t/cpu.lock t/change.py /opt/vllm-matrix/\n"
            f"RUN install-locked /opt/vllm-matrix/cpu.lock && {CHANGE}\n"
            f"FROM torch AS built\nCOPY t/build.py t/cpu.lock /opt/build/\nRUN {command}\n"
            f"FROM torch\nCOPY {copy}\n"
        )

    def left(self) -> list[str]:
        """What stands where environments are, hidden or not."""
        return sorted(path.name for path in (self.root / "made").iterdir())

    def dockerfile(self, *steps: str) -> None:
        text = " && ".join(["install-locked /opt/vllm-matrix/cpu.lock", *steps])
        copies = "COPY t/cpu.lock t/change.py /opt/vllm-matrix/"
        (self.root / "docker/t/Dockerfile").write_text(f"ARG BASE\nFROM ${{BASE}}\n{copies}\nRUN {text}\n")


# As build_vllm.py does it: by uv, which has to be on PATH, into a folder; and a file that its own environment has too.
BUILD = """
import os, subprocess, sys, thing
lock, target = sys.argv[1:]
assert thing.x == 22, "the stage stands on the other one"
assert not {"USER_SECRET", "UV_PYTHON"} & set(os.environ)
subprocess.run(["uv", "pip", "install", "--no-config", "--no-deps", "--require-hashes", "--target", target, "-r", lock],
               check=True)
os.makedirs(f"{target}/made")
open(f"{target}/made/where.py", "w").write(f"where = {sys.prefix!r}\\n")
os.symlink("where.py", f"{target}/made/link.py")
print("uv reads", os.environ["UV_DEFAULT_INDEX"], os.environ["SSL_CERT_FILE"])
"""
BUILT = "python3 /opt/build/build.py /opt/build/cpu.lock /opt/built"
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
    (target / "build.py").write_text(BUILD)
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "uv"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(environments, "NEEDED", 0)
    monkeypatch.setattr(environments, "find_python", lambda version: Path(sys.executable))
    monkeypatch.setattr(environments, "check_headers", lambda: None)
    monkeypatch.setenv("USER_SECRET", "x")
    monkeypatch.setenv("UV_PYTHON", "/usr/bin/false")
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


# --- stages ----------------------------------------------------------------------------------------------------------


def test_what_a_stage_made_is_taken_in_and_the_stage_is_gone(workshop: Workshop) -> None:
    workshop.stage(BUILT)
    made = workshop.make()
    assert workshop.left() == [made.id]
    (site,) = (workshop.root / "made" / made.id).glob("lib/python3*/site-packages")
    where = (site / "made/where.py").read_text()
    assert f".{made.id}.stage/opt/venv" in where, "made in an environment of its own"
    assert (site / "made/link.py").is_symlink()
    # what the stage brings replaces what the environment had, and neither the environment's nor uv's is written into
    assert (site / "thing.py").read_text() == "x = 1\n"
    assert {path.read_text() for path in (workshop.root / "uv").rglob("thing.py")} == {"x = 1\n"}
    assert (site / "thing.py").stat().st_nlink == 1
    assert "uv reads http://localhost:1/simple /etc/ssl/certs/ca-certificates.crt" in workshop.lines
    assert workshop.make().cached


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (f"{BUILT} && python3 -c 'raise SystemExit(7)'", "ended with 7"),
        ("python3 -c 'import thing'", "the stage left no /opt/built"),
    ],
)
def test_a_stage_that_fails_leaves_nothing(workshop: Workshop, command: str, message: str) -> None:
    workshop.stage(command)
    with pytest.raises(BuildError, match=message):
        workshop.make()
    assert not [name for name in workshop.left() if name.startswith(".")]
    assert list((workshop.root / "made").glob(f"*/{environments.MARKER}")) == []


def test_a_stage_needs_headers_and_nothing_is_made_without_them(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> None:
        raise BuildError("no header")

    monkeypatch.setattr(environments, "check_headers", missing)
    workshop.make()  # has no stage: nothing is compiled
    before = workshop.left()
    workshop.stage(BUILT)
    with pytest.raises(BuildError, match="no header"):
        workshop.make()
    assert workshop.left() == before


def test_what_an_end_by_sigkill_left_of_a_stage_is_removed(workshop: Workshop) -> None:
    workshop.stage(BUILT)
    name = workshop.make().id
    (workshop.root / "made" / name / environments.MARKER).unlink()
    rubbish = workshop.root / "made" / f".{name}.stage" / "opt" / "built" / "rubbish.py"
    rubbish.parent.mkdir(parents=True)
    rubbish.write_text("")
    assert not workshop.make().cached
    assert workshop.left() == [name]
    assert not list((workshop.root / "made" / name).rglob("rubbish.py"))


def test_an_interrupted_stage_is_gone_with_all_that_it_started(workshop: Workshop) -> None:
    """As Ctrl-C, which raises in the thread that reads; the stage's own child is not ours to find by its parent."""
    (workshop.root / "docker/t/build.py").write_text(
        "import subprocess, sys, time\nprint('started', subprocess.Popen(['sleep', '600']).pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    workshop.stage(BUILT)

    class Interrupting(list[str]):
        def append(self, line: str) -> None:
            super().append(line)
            if line.startswith("started"):
                raise KeyboardInterrupt

    workshop.lines = Interrupting()
    with pytest.raises(KeyboardInterrupt):
        workshop.make()
    pid = workshop.lines[-1].split()[1]
    until = time.monotonic() + 5
    while Path("/proc", pid).exists() and "Z" not in Path("/proc", pid, "stat").read_text().split()[2]:
        assert time.monotonic() < until, "what the stage started still runs"
        time.sleep(0.02)
    assert not [name for name in workshop.left() if name.startswith(".")]


@pytest.mark.parametrize("changed", ["t/build.py", "t/cpu.lock", "t/Dockerfile"])
def test_what_goes_into_a_stage_is_part_of_the_name(workshop: Workshop, changed: str) -> None:
    workshop.stage(BUILT)
    options = BuildOptions(docker_dir=workshop.root / "docker")
    target = options.docker_dir / "t"

    def name() -> str:
        image = image_for("t", "cpu", target / "Dockerfile", target / "cpu.lock", options)
        return environment_of(image, MINOR, options).tag

    before = name()
    path = options.docker_dir / changed
    path.write_text(path.read_text() + "# changed\n")
    assert name() != before
