"""Images on a real engine (`pytest -m docker`): small ones built here, and the targets' as users get them."""

# ruff: noqa: S607 - the docker of PATH is the one that is meant

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from harness.backends.docker import connect
from harness.errors import BuildError
from harness.images import BuildOptions, BuiltImage, Image, build, ca_bundle, find_builder, find_image, image_for

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
    "uid": os.getuid(), "vllm": importlib.metadata.version("vllm"), "cpu": current_platform.is_cpu(),
    "cuda": cuda, "available": torch.cuda.is_available(), "compiled": compiled,
    "nms": torchvision.ops.nms(torch.tensor([[0.0, 0, 1, 1]]), torch.tensor([1.0]), 0.5).tolist(),
    "rig": importlib.metadata.version("pytest-xdist"),
}))
"""


def options(folder: Path = DOCKER) -> BuildOptions:
    return BuildOptions(docker_dir=folder, ca_bundle=ca_bundle(None, os.environ))


def target_image(target: str, folder: Path = DOCKER) -> Image:
    return image_for(target, "cpu", folder / target / "Dockerfile", folder / target / "cpu.lock", options(folder))


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
        "base/Dockerfile": "ARG BASE\nFROM ${BASE}\nRUN --mount=type=secret,id=ca true\n",
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
        assert len(labels["vllm-matrix.lock.sha256"]) == 64
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
    layers = [inspect(built(target_image(t), DOCKER, tmp_path / "log").id)["RootFS"]["Layers"] for t in TARGETS]
    own = 2  # the lock, and what it installs
    for other in layers[1:]:
        assert other[:-own] == layers[0][:-own]
        assert other[-own:] != layers[0][-own:]
