"""What only a container promises."""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import requests
from docker.client import DockerClient

from harness.backends import docker
from harness.backends.docker import ENVIRONMENT, command_line
from harness.cells import Resources
from harness.errors import InfrastructureError
from harness.records import ExitState
from tests.bench import Bench, docker_only, promise, wait_for


@docker_only
@promise("closed network, read-only folders, no capabilities, its own /dev/shm")
def test_walls(container: Bench) -> None:
    state = container.run("""
        import json, os, pathlib, socket
        def fails(action):
            try:
                action()
            except OSError as error:
                return type(error).__name__
            return None
        pathlib.Path("/out/seen.json").write_text(json.dumps({
            "root": fails(lambda: open("/etc/x", "w")),
            "suite": fails(lambda: open("/suite/x", "w")),
            "in": fails(lambda: open("/in/x", "w")),
            "models": fails(lambda: open("/models/x", "w")),
            "network": fails(lambda: socket.create_connection(("192.0.2.1", 80), 3)),
            "uid": os.getuid(),
            "capabilities": [l.split()[1] for l in open("/proc/self/status") if l.startswith("CapEff")][0],
            "shm": os.statvfs("/dev/shm").f_blocks * os.statvfs("/dev/shm").f_frsize,
            "exec_tmp": "noexec" not in [l for l in open("/proc/mounts") if l.split()[1] == "/tmp"][0].split()[3],
        }))
    """)
    assert state == ExitState(started=True, exit_code=0)
    assert container.left("seen.json") == {
        "root": "OSError", "suite": "OSError", "in": "OSError", "models": "OSError", "network": "OSError",
        "uid": os.getuid(), "capabilities": "0" * 16, "shm": 64 << 20, "exec_tmp": True,
    }  # fmt: skip


@docker_only
@promise("a kill for memory is told")
def test_memory_beyond_the_limit_is_told_as_such(container: Bench) -> None:
    state = container.run("x = bytearray(2 << 30)")
    assert state.oom_killed
    assert state.exit_code == 137


@docker_only
def test_a_name_that_is_taken_is_infrastructure(container: Bench) -> None:
    launch = container.launch("import time; time.sleep(600)")
    running = container.backend.start(launch)
    try:
        with pytest.raises(InfrastructureError, match="already in use"):
            container.backend.start(launch)
    finally:
        running.close()


@docker_only
@promise("a daemon on another machine is told")
def test_a_folder_that_the_daemon_does_not_see(container: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Path.write_text
    monkeypatch.setattr(Path, "write_text", lambda path, text: real(path, text[::-1]))  # another folder than ours
    with pytest.raises(InfrastructureError, match="does not see"):
        container.backend.check(container.folder, container.image)


@docker_only
@promise("`repro` prints a command that starts the same")
def test_the_printed_command_makes_the_same_container(container: Bench, client: DockerClient) -> None:
    """`repro` promises the cell's own container: every setting is compared."""
    launch = container.launch("import time; time.sleep(600)")
    running = container.backend.start(launch)
    try:
        ours = client.containers.get(launch.name).attrs
    finally:
        running.close()
    words = command_line(launch)
    words[1:2] = ["create"]
    words.remove("--rm")
    words[words.index("create") + 1 : words.index("create") + 1] = ["--label", "vllm-matrix.run=contract"]
    subprocess.run(words, check=True, capture_output=True)
    made = client.containers.get(launch.name)
    try:
        theirs = made.attrs
    finally:
        made.remove(force=True)
    assert diff(ours["HostConfig"], theirs["HostConfig"]) == {}
    for key in ("User", "Cmd", "Image"):
        assert ours["Config"][key] == theirs["Config"][key]
    assert sorted(ours["Config"]["Env"]) == sorted(theirs["Config"]["Env"])


def diff(one: dict[str, object], other: dict[str, object]) -> dict[str, tuple[object, object]]:
    """What differs; empty values of any kind are equal, and `repro` leaves the log to the daemon's default."""
    names = set(one) - {"LogConfig", "ContainerIDFile", "ConsoleSize", "RestartPolicy"}
    return {name: (one[name], other[name]) for name in names if (one[name] or None) != (other[name] or None)}


@docker_only
@promise("every setting is as the daemon says it back")
def test_the_settings_of_a_real_container(container: Bench, client: DockerClient) -> None:
    launch = container.launch(
        "import time; time.sleep(600)", Resources(cpus=0.5, memory=300 << 20, shm=32 << 20, gpus=0)
    )
    running = container.backend.start(launch)
    try:
        seen = client.containers.get(launch.name).attrs
    finally:
        running.close()
    host, config = seen["HostConfig"], seen["Config"]
    assert {name: host[name] for name in WANTED} == WANTED
    assert not host["Privileged"]
    assert not host["CapAdd"]
    assert not host["Devices"]
    assert not host["DeviceRequests"]
    assert not host["Binds"]
    assert not host["PortBindings"]
    assert host["RestartPolicy"]["Name"] in ("", "no")
    assert (host["LogConfig"]["Type"], host["LogConfig"]["Config"]["max-size"]) == ("local", "8m")
    assert {mount["Destination"]: mount["RW"] for mount in seen["Mounts"] if mount["Type"] == "bind"} == {
        "/suite": False, "/models": False, "/in": False, "/out": True,
    }  # fmt: skip
    assert seen["Image"] == container.image
    assert config["User"] == f"{os.getuid()}:{os.getgid()}"
    assert config["Cmd"] == ["python3", "-m", "rig"]
    assert not config["Entrypoint"]
    assert not config["Tty"]
    assert not config["OpenStdin"]
    assert {*(f"{k}={v}" for k, v in ENVIRONMENT.items()), f"ASKED_FOR={container.tag}"} <= set(config["Env"])
    assert config["Labels"]["vllm-matrix.run"] == "contract"
    assert len(config["Labels"]["vllm-matrix.owner"].split()) == 4


WANTED = {
    "Init": True,
    "NetworkMode": "none",
    "CapDrop": ["ALL"],
    "SecurityOpt": ["no-new-privileges"],
    "ReadonlyRootfs": True,
    "Tmpfs": {"/tmp": "exec,size=2g,mode=1777"},
    "Memory": 300 << 20,
    "MemorySwap": 300 << 20,
    "NanoCpus": 500_000_000,
    "PidsLimit": 4096,
    "ShmSize": 32 << 20,
    "AutoRemove": False,
    "IpcMode": "private",
}


# --- an answer of the daemon that is lost -----------------------------------------------------------------------------


@pytest.fixture
def lose(client: DockerClient, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """The daemon does what a request asks for, `late` seconds after we gave it up, and its answer never comes."""
    monkeypatch.setattr(docker, "_LATE", 3.0)
    real = client.api.send

    def arm(part: str, late: float | None = 0.0) -> None:
        def send(request: requests.PreparedRequest, **options: Any) -> requests.Response:
            if request.method != "POST" or part not in str(request.url):
                return real(request, **options)
            monkeypatch.setattr(client.api, "send", real)
            if late:
                threading.Timer(late, real, (request,), options).start()
                raise requests.ReadTimeout("timed out")
            if late is not None:
                real(request, **options)
            raise requests.ConnectionError("connection reset by peer")

        monkeypatch.setattr(client.api, "send", send)

    return arm


COUNTS = "open('/out/count', 'a').write('x')"
LOST = "a container whose creation or start was not answered is found by its name, never started twice"


@docker_only
@promise(LOST)
@pytest.mark.parametrize("late", [0.0, 1.0])
@pytest.mark.parametrize("part", ["/containers/create", "/start"])
def test_an_answer_that_is_lost(container: Bench, lose: Callable[..., None], part: str, late: float) -> None:
    lose(part, late)
    assert container.run(f"{COUNTS}; print('said')") == ExitState(started=True, exit_code=0)
    assert (container.folder / "work/out/count").read_text() == "x"
    assert container.output() == b"said\n"


@docker_only
@promise(LOST)
@pytest.mark.parametrize("part", ["/containers/create", "/start"])
def test_a_request_that_never_arrives(container: Bench, lose: Callable[..., None], part: str) -> None:
    lose(part, None)
    with pytest.raises(InfrastructureError, match="connection reset by peer"):
        container.run(COUNTS)
    assert not (container.folder / "work/out/count").exists()
    assert not (container.folder / "work/.room").exists()


@docker_only
@promise(LOST)
def test_a_container_that_comes_after_we_gave_up_goes_at_exit(
    container: Bench,
    client: DockerClient,
    lose: Callable[..., None],
) -> None:
    lose("/containers/create", 5.0)
    launch = container.launch(COUNTS)
    with pytest.raises(InfrastructureError, match="timed out"):
        container.backend.start(launch)
    wait_for(lambda: client.containers.list(all=True, filters={"name": launch.name}, ignore_removed=True))
    assert container.reap() == [], "its owner lives"
    assert container.reap(ours=True) == [f"removed: container {launch.name}"]


@docker_only
@promise(LOST)
def test_somebody_elses_container_of_that_name_is_left_alone(
    container: Bench,
    client: DockerClient,
    lose: Callable[..., None],
) -> None:
    launch = container.launch(COUNTS)
    other = client.containers.create(container.image, ["true"], name=launch.name)
    try:
        lose("/containers/create")
        with pytest.raises(InfrastructureError):
            container.backend.start(launch)
        other.reload()
        assert other.status == "created"
    finally:
        with contextlib.suppress(Exception):
            other.remove(force=True)
