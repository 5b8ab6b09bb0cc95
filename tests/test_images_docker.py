"""Images on a real engine (`pytest -m docker`): small ones built here, and the targets' as users get them."""

# ruff: noqa: S607 - the docker of PATH is the one that is meant

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import tarfile
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from harness.backends.docker import connect
from harness.errors import BuildError
from harness.images import (
    BuildOptions,
    BuiltImage,
    Image,
    build,
    ca_bundle,
    find_builder,
    find_image,
    image_for,
    labels_of,
)
from harness.inventory import rows
from harness.project import build_options, load_project

pytestmark = [pytest.mark.docker, pytest.mark.timeout(1800)]

DOCKER = Path(__file__).parents[1] / "docker"
TARGETS = sorted(path.parent.name for path in DOCKER.glob("*/cpu.lock"))

# As cells run, but for the mounts.
SANDBOX = [
    *("--rm", "--network=none", "--read-only", "--cap-drop=ALL", "--security-opt=no-new-privileges"),
    *("--user=1234:1234", "--tmpfs=/tmp:exec,size=1g"),
    *("--env=HOME=/tmp", "--env=USER=matrix", "--env=LOGNAME=matrix", "--env=XDG_CACHE_HOME=/tmp/cache"),
    *("--env=TORCHINDUCTOR_CACHE_DIR=/tmp/cache/inductor", "--env=VLLM_NO_USAGE_STATS=1"),
]

PROBE = """
import importlib.metadata, json, os, torch, torchvision, vllm
from vllm.platforms import current_platform
compiled = torch.compile(lambda x: x.sin() + 1)(torch.zeros(8)).tolist()
try:
    torch.zeros(1, device="cuda")
except RuntimeError as error:
    cuda = str(error)
print("\\n" + json.dumps({
    "uid": os.getuid(), "vllm": vllm.__version__, "cpu": current_platform.is_cpu(),
    "cuda": cuda, "available": torch.cuda.is_available(), "compiled": compiled,
    "nms": torchvision.ops.nms(torch.tensor([[0.0, 0, 1, 1]]), torch.tensor([1.0]), 0.5).tolist(),
    "rig": importlib.metadata.version("pytest-xdist"),
}))
"""


def options(folder: Path = DOCKER) -> BuildOptions:
    return BuildOptions(docker_dir=folder, ca_bundle=ca_bundle(None, os.environ))


@cache
def distributions() -> dict[str, str]:
    """What matrix.toml says is installed, by target."""
    with (DOCKER.parent / "matrix.toml").open("rb") as file:
        targets = tomllib.load(file)["targets"]
    devices = {name: target["devices"] for name, target in targets.items() if "cpu" in target.get("devices", {})}
    return {name: each["cpu"]["distribution"] for name, each in devices.items()}


@cache
def here() -> tuple[str, ...]:
    """Targets whose images are there already: a test of all of them would compile for half an hour."""
    with contextlib.closing(connect()) as client:
        return tuple(target for target in TARGETS if find_image(client, target_image(target).tag))


def need(target: str) -> None:
    if target not in here():
        pytest.skip(f"its image is not here: vllm-matrix run --target {target}")


def target_image(target: str, folder: Path = DOCKER) -> Image:
    dockerfile, lock = folder / target / "Dockerfile", folder / target / "cpu.lock"
    return image_for(target, "cpu", dockerfile, lock, options(folder), distributions().get(target))


def built(image: Image, folder: Path, log: Path) -> BuiltImage:
    return build(image, find_builder(os.environ), options(folder), log, lambda line: None)


def inspect(tag: str) -> dict[str, Any]:
    done = subprocess.run(["docker", "image", "inspect", tag], capture_output=True, text=True, check=True)
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found[0]


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A docker/ folder whose base and target take no time."""
    for name, text in {
        "base/Dockerfile": "ARG BASE\nFROM ${BASE}\nLABEL org.opencontainers.image.description=base\n"
        "RUN --mount=type=secret,id=ca true\n",
        "small/Dockerfile": "ARG BASE\nFROM ${BASE}\nCOPY small/cpu.lock /opt/\nRUN echo hello\n",
        "small/cpu.lock": str(tmp_path),  # unique, so that nothing is there before
    }.items():
        path = tmp_path / "docker" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "docker"


def remove(*tags: str) -> None:
    subprocess.run(["docker", "rmi", "--force", *tags], check=False, capture_output=True)


def test_build_then_find(small: Path, tmp_path: Path) -> None:
    image = target_image("small", small)
    try:
        first = built(image, small, tmp_path / "log")
        assert not first.cached
        assert first.bytes > 0
        assert "hello" in (tmp_path / "log").read_text()
        labels = inspect(image.tag)["Config"]["Labels"]
        assert labels["org.opencontainers.image.version"] == "small"
        assert labels.items() >= labels_of(image, options(small)).items()
        assert "base" not in labels["org.opencontainers.image.description"], "that is the base's own"
        again = built(image, small, tmp_path / "log")
        assert again.cached
        assert again.id == first.id == inspect(image.tag)["Id"]
    finally:
        remove(image.tag, image.base_tag)


def test_a_failing_instruction(small: Path, tmp_path: Path) -> None:
    (small / "small/Dockerfile").write_text(
        "ARG BASE\nFROM ${BASE}\nCOPY small/cpu.lock /opt/\nRUN echo this is why >&2; exit 7\n"
    )
    image = target_image("small", small)
    try:
        with pytest.raises(BuildError) as caught:
            built(image, small, tmp_path / "log")
        assert "this is why" in caught.value.log_tail
        assert find_image(connect(), image.tag) is None
    finally:
        remove(image.base_tag)


@pytest.mark.parametrize("target", TARGETS)
def test_target_works_closed_off_under_a_foreign_user(target: str, tmp_path: Path) -> None:
    """vLLM finds its platform, nothing finds CUDA, the compiler works: under the settings of a cell."""
    need(target)
    image = built(target_image(target), DOCKER, tmp_path / "log")
    command = ["docker", "run", *SANDBOX, image.id, "python3", "-c", PROBE]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    assert "No CUDA GPUs are available" in seen.pop("cuda")
    assert seen.pop("vllm").startswith(target.removeprefix("vllm-"))
    assert seen.pop("rig") >= "3.6"
    assert seen == {"uid": 1234, "cpu": True, "available": False, "compiled": [1.0] * 8, "nms": [0]}


def test_targets_share_the_layer_of_torch(tmp_path: Path) -> None:
    """Those of one stack have the base's layers, the copied lock and what it installs in common, and no more."""
    common: dict[str, set[tuple[str, ...]]] = {}
    own: list[str] = []
    for target in here():
        image = target_image(target)
        layers = inspect(built(image, DOCKER, tmp_path / "log").id)["RootFS"]["Layers"]
        shared = len(inspect(image.base_tag)["RootFS"]["Layers"]) + 2
        (stack,) = [path.name for path in image.inputs if path.match("shared/*.lock")]
        common.setdefault(stack, set()).add(tuple(layers[:shared]))
        own += layers[shared:]
    assert {stack: len(found) for stack, found in common.items()} == dict.fromkeys(common, 1)
    assert len(set(own)) == len(own)


@pytest.mark.parametrize("target", TARGETS)
def test_a_target_says_what_it_is(target: str, tmp_path: Path) -> None:
    need(target)
    image = target_image(target)
    labels = inspect(built(image, DOCKER, tmp_path / "log").id)["Config"]["Labels"]
    assert labels.items() >= labels_of(image, options()).items()
    assert labels["vllm-matrix.distribution"] == distributions()[target]


# What a build leaves behind if nobody takes care. Paths in a layer have no slash in front.
LEFT_BEHIND = re.compile(
    r"(root|home/[^/]+)/\.cache/|tmp/|var/tmp/|run/secrets/|var/lib/apt/lists/|var/cache/apt/(.*\.bin$|archives/.*\.deb$)"
    r"|.*/(pip|uv)/(http|http-v2|wheels|cache|archive-v\d+)/|.*/site-packages/.*\.(whl|o)$|opt/(build|built)/"
)


def layer_entries(*tags: str) -> Iterator[tuple[str, tarfile.TarInfo]]:
    """Every entry of every layer, each layer once, also those that a later one hides: they are in the image too."""
    with subprocess.Popen(["docker", "image", "save", *tags], stdout=subprocess.PIPE) as saving:
        assert saving.stdout is not None
        with tarfile.open(fileobj=saving.stdout, mode="r|") as outer:
            for member in outer:
                content = outer.extractfile(member) if member.isfile() else None
                if content is None or member.name.endswith((".json", "VERSION")):
                    continue
                try:
                    with tarfile.open(fileobj=content, mode="r|*") as layer:
                        yield from ((member.name, entry) for entry in layer)
                except tarfile.ReadError:
                    continue  # a configuration or a manifest, where they are blobs too
    assert saving.returncode == 0


def test_no_layer_carries_a_cache(tmp_path: Path) -> None:
    if not here():
        pytest.skip("no target's image is here: vllm-matrix run")
    images = [built(target_image(target), DOCKER, tmp_path / "log") for target in here()]
    seen: set[str] = set()
    left: list[str] = []
    for layer, entry in layer_entries(*(image.tag for image in images)):
        seen.add(entry.name)
        if not entry.isdir() and entry.size and LEFT_BEHIND.match(entry.name):
            left.append(f"{entry.name} in {layer}: {entry.size} bytes")
    assert "opt/vllm-matrix/cpu.lock" in seen
    assert "opt/venv/lib/python3.11/site-packages/vllm/__init__.py" in seen, "the layers were read"
    assert left == []


@pytest.mark.parametrize("target", TARGETS)
def test_a_target_is_not_for_root(target: str, tmp_path: Path) -> None:
    image = built(target_image(target), DOCKER, tmp_path / "log")
    assert inspect(image.id)["Config"]["User"] not in ("", "0", "root")


def test_the_inventory_agrees_with_the_engine(tmp_path: Path) -> None:
    project = load_project(DOCKER.parent / "matrix.toml")
    image = target_image(TARGETS[-1])
    found = built(image, DOCKER, tmp_path / "log")
    (row,) = [row for row in rows(project, build_options(project)) if row.target == TARGETS[-1]]
    assert (row.tag, row.id, row.bytes) == (image.tag, found.id, found.bytes)
    assert row.unique is not None
    assert row.shared is not None
    assert 0 < row.unique < found.bytes == row.unique + row.shared
    assert row.shared >= inspect(image.base_tag)["Size"], "the base is shared, if only with itself"
    assert row.created is not None
