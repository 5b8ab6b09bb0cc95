"""What a container gets of GPUs, on a host that has none (`pytest -m docker`).

Docker hands GPUs on by a hook, `nvidia-container-runtime-hook` on the PATH of its daemon, which runs with the container
made and not yet started. Here it is a stub that writes down what the real one would act on.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from docker.client import DockerClient

from harness.backends.base import Launch
from harness.backends.docker import DockerBackend, command_line
from harness.cells import Resources
from tests.chaos.engine import Daemon, can_have_a_daemon, make_image
from tests.test_gpus import A, B, C

pytestmark = [
    pytest.mark.docker,
    pytest.mark.timeout(300),
]

# runc gives it the state of the container, which names the folder of its specification
HOOK = """#!{python} -I
import json, pathlib, sys
state = json.load(sys.stdin)
spec = json.loads(pathlib.Path(state["bundle"], "config.json").read_text())
found = {{"arguments": sys.argv[1:], "status": state["status"], "environment": spec["process"]["env"]}}
pathlib.Path({folder!r}, state["id"] + ".json").write_text(json.dumps(found))
"""
SAYS = "import os; print(os.environ.get('NVIDIA_VISIBLE_DEVICES'), os.environ.get('CUDA_VISIBLE_DEVICES'))"


@pytest.fixture(scope="module")
def hooked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the stub, and of what it writes down."""
    folder = tmp_path_factory.mktemp("hook")
    hook = folder / "nvidia-container-runtime-hook"
    hook.write_text(HOOK.format(python=Path(sys.executable).resolve(), folder=str(folder)))
    hook.chmod(0o755)
    return folder


@pytest.fixture(scope="module")
def daemon(hooked: Path) -> Iterator[Daemon]:
    if not can_have_a_daemon():
        pytest.skip("a daemon of our own takes root, dockerd and unshare")
    made = Daemon()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PATH", f"{hooked}:{os.environ['PATH']}")
            made.start()
        yield made
    finally:
        made.close()
        assert not made.folder.exists()


@pytest.fixture(scope="module")
def client(daemon: Daemon) -> Iterator[DockerClient]:
    with contextlib.closing(DockerClient(base_url=daemon.host)) as made:
        yield made


@pytest.fixture(scope="module")
def image(client: DockerClient) -> str:
    return make_image(client)


@pytest.fixture
def launch(image: str, tmp_path: Path) -> Launch:
    for name in ("in", "out", "suite", "models"):
        (tmp_path / name).mkdir()
    return Launch(
        name=f"vllm-matrix-test-{tmp_path.name}",
        image=image,
        folder=tmp_path,
        suite=tmp_path / "suite",
        models=tmp_path / "models",
        resources=Resources(cpus=1, memory=512 << 20, shm=64 << 20, gpus=2),
        gpus=(C, A),
        command=("python3", "-c", SAYS),
    )


def given(hooked: Path) -> list[dict[str, Any]]:
    """What the stub has written down since it was last asked."""
    found = []
    for path in sorted(hooked.glob("*.json")):
        found.append(json.loads(path.read_text()))
        path.unlink()
    return found


def devices(found: dict[str, Any]) -> list[str]:
    return [line for line in found["environment"] if line.startswith("NVIDIA_")]


def run(client: DockerClient, launch: Launch) -> str:
    running = DockerBackend(client).start(launch)
    try:
        assert running.ended(60)
    finally:
        state = running.close()
    assert (state.exit_code, state.error) == (0, ""), (launch.folder / "stderr.log").read_text()
    return (launch.folder / "stdout.log").read_text().strip()


def test_a_container_gets_exactly_its_gpus_by_uuid(client: DockerClient, hooked: Path, launch: Launch) -> None:
    assert run(client, launch) == f"{C},{A} None"
    (found,) = given(hooked)
    assert found["arguments"] == ["prestart"]
    assert found["status"] in ("creating", "created")
    assert f"NVIDIA_VISIBLE_DEVICES={C},{A}" in devices(found)
    assert len([line for line in devices(found) if line.startswith("NVIDIA_VISIBLE_DEVICES=")]) == 1
    assert B not in json.dumps(found)


def test_a_container_without_gpus_never_meets_the_hook(client: DockerClient, hooked: Path, launch: Launch) -> None:
    assert run(client, replace(launch, gpus=())) == "None None"
    assert given(hooked) == []


def test_the_command_that_repro_prints_asks_for_the_same(daemon: Daemon, hooked: Path, launch: Launch) -> None:
    words = command_line(launch)
    done = subprocess.run(
        words, env={**os.environ, "DOCKER_HOST": daemon.host}, capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stdout.strip()) == (0, f"{C},{A} None"), done.stderr
    (found,) = given(hooked)
    assert f"NVIDIA_VISIBLE_DEVICES={C},{A}" in devices(found)
