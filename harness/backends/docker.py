"""Cells in containers of Docker: run by image ID, closed to the network, gone when they end."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import requests
from docker.client import DockerClient
from docker.errors import APIError, DockerException, ImageNotFound, NotFound
from docker.models.containers import Container
from docker.types import CancellableStream, DeviceRequest, LogConfig, Mount

from harness.backends import owner
from harness.backends.base import LOGS, Head, Launch, Running, environment
from harness.backends.size import give_room, keep_room
from harness.errors import DockerMissingError, InfrastructureError
from harness.records import ExitState

_INSTALL = "Install it (Debian, Ubuntu: `apt-get install docker.io`) and start its daemon, then run again."
_TMP = "/tmp"  # noqa: S108 - a path inside the container

ENVIRONMENT = environment(tmp=_TMP, suite="/suite", inputs="/in", out="/out", models="/models")
LAUNCH = "vllm-matrix.launch"  # label: by which of our requests the container was made
_REMOVAL = 15.0  # seconds in which a container has to be gone once it is to go
_LATE = 15.0  # seconds for what a daemon may still be about, after its answer was lost
_POLL = 0.25


def connect(timeout: int = 120) -> DockerClient:
    """A client of the daemon that DOCKER_HOST names, which may take `timeout` seconds for an answer.

    Raises DockerMissingError where there is none, InfrastructureError where there is one that refuses us.
    """
    try:
        client = DockerClient.from_env(timeout=timeout)
        client.ping()
    except (DockerException, requests.RequestException) as error:
        raise _unreachable(error) from error
    return client


def _unreachable(error: Exception) -> InfrastructureError:
    text = str(error)
    if "Permission denied" in text:
        return InfrastructureError(
            "Docker is here but refuses this user",
            "Add the user to the group `docker` and log in again, or run as root.",
        )
    if shutil.which("docker") is None and not os.environ.get("DOCKER_HOST"):
        return DockerMissingError("there is no Docker on this machine", _INSTALL)
    host = os.environ.get("DOCKER_HOST", "its default socket")
    if any(word in text for word in ("No such file", "Connection refused", "FileNotFoundError")):
        if "DOCKER_HOST" in os.environ:
            return InfrastructureError(f"no Docker daemon answers on {host}", "Start it, or mend DOCKER_HOST.")
        return DockerMissingError("no Docker daemon runs on this machine", _INSTALL)
    return InfrastructureError(f"Docker does not work on {host}: {text}", "See `docker info`.")


class DockerBackend:
    """The back end `docker`."""

    name = "docker"

    def __init__(self, client: DockerClient) -> None:
        self._client = client

    def check(self, scratch: Path, image: str) -> None:
        """See that a container finds what we wrote: where it does not, the daemon is on another machine."""
        nonce = uuid.uuid4().hex
        probe = scratch / f".nonce-{nonce}"
        probe.mkdir(parents=True)
        try:
            (probe / "nonce").write_text(nonce)
            seen = self._sees(image, probe, nonce)
        finally:
            shutil.rmtree(probe, ignore_errors=True)
        if not seen:
            raise InfrastructureError(
                f"the Docker daemon does not see {scratch}: it is on another machine, or in another mount namespace",
                "Use a daemon of this machine, or put the results where it sees them.",
            )

    def _sees(self, image: str, probe: Path, nonce: str) -> bool:
        """By exit code: the log of a container is no safe channel (docker-py#2575)."""
        mount = Mount("/probe", str(probe), type="bind", read_only=True)
        words = ["grep", "-qx", nonce, "/probe/nonce"]
        with _infrastructure("a container could not be run"):
            container = self._client.containers.create(
                image, words, entrypoint=[], mounts=[mount], network_mode="none", user=_user(), labels=_labels()
            )
            try:
                container.start()
                return bool(container.wait(timeout=60)["StatusCode"] == 0)
            except APIError as error:
                if "bind source path does not exist" in str(error):
                    return False
                raise
            finally:
                container.remove(force=True, v=True)

    def start(self, launch: Launch) -> Running:
        with _infrastructure("the container could not be created"):
            container = self._create(launch)
        running = _DockerRunning(container, launch.folder)
        try:
            with _infrastructure("the container could not be started"):
                running.start()
        except BaseException:
            running.discard()
            raise
        return running

    def _create(self, launch: Launch) -> Container:
        """Where the answer is lost, the container may be there all the same, or in a moment: it is looked for."""
        settings = _settings(launch)
        mark = settings["labels"][LAUNCH]
        try:
            return self._client.containers.create(launch.image, list(launch.command), **settings)
        except (requests.RequestException, APIError) as error:
            if isinstance(error, APIError) and error.is_client_error():
                raise
            found = self._find(launch.name, mark)
            if found is None:
                raise
            return found

    def _find(self, name: str, mark: str) -> Container | None:
        until = time.monotonic() + _LATE
        while True:
            with contextlib.suppress(NotFound, DockerException, requests.RequestException):
                found = self._client.containers.get(name)
                return found if found.labels.get(LAUNCH) == mark else None
            if time.monotonic() >= until:
                return None
            time.sleep(_POLL)


def _user() -> str:
    """What a container writes can be removed by whoever started us."""
    return f"{os.getuid()}:{os.getgid()}"


def _labels() -> dict[str, str]:
    return {owner.LABEL: owner.owner(), LAUNCH: uuid.uuid4().hex}


@contextlib.contextmanager
def _infrastructure(what: str) -> Iterator[None]:
    try:
        yield
    except ImageNotFound as error:
        raise InfrastructureError(f"{what}: its image is gone", "Run again: it will be built again.") from error
    except (DockerException, requests.RequestException) as error:
        said = error.explanation if isinstance(error, APIError) else error
        raise InfrastructureError(f"{what}: {said}", "See the log of the Docker daemon.") from error


def _settings(launch: Launch) -> dict[str, Any]:
    """Keyword arguments of `containers.create`; compare DESIGN: every line is there for a reason."""
    resources = launch.resources
    return {
        "name": launch.name,
        "entrypoint": [],
        "environment": ENVIRONMENT | dict(launch.environment),
        "labels": {**_labels(), **launch.labels},
        "mounts": mounts(launch),
        "user": _user(),
        "network_mode": "none",
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges"],
        "read_only": True,
        "tmpfs": {_TMP: "exec,size=2g,mode=1777"},  # exec: Docker's default noexec breaks JIT compilers
        "init": True,  # reaps zombies and passes SIGTERM on
        "mem_limit": resources.memory,
        "memswap_limit": resources.memory,
        "nano_cpus": int(min(resources.cpus, os.cpu_count() or 1) * 1e9),
        "pids_limit": 4096,
        "shm_size": resources.shm,
        "log_config": LogConfig(type="local", config={"max-size": "8m", "max-file": "1", "compress": "false"}),
        "device_requests": [DeviceRequest(device_ids=list(launch.gpus), capabilities=[["gpu"]])] if launch.gpus else [],
    }


def command_line(launch: Launch, interactive: bool = False) -> list[str]:
    """The same container by the docker command line: what `repro` prints and `shell` runs."""
    settings = _settings(launch)
    resources = launch.resources
    words = ["docker", "run", "--rm", *(["-it"] if interactive else []), "--name", launch.name, "--entrypoint", ""]
    words += ["--user", settings["user"], "--network", "none", "--cap-drop", "ALL"]
    words += ["--security-opt", "no-new-privileges", "--read-only", "--init", "--pids-limit", "4096"]
    words += ["--tmpfs", f"{_TMP}:{settings['tmpfs'][_TMP]}", "--shm-size", str(resources.shm)]
    words += ["--memory", str(resources.memory), "--memory-swap", str(resources.memory)]
    words += ["--cpus", f"{settings['nano_cpus'] / 1e9:g}"]
    for mount in settings["mounts"]:
        mode = ",readonly" if mount["ReadOnly"] else ""
        words += ["--mount", f"type=bind,source={mount['Source']},target={mount['Target']}{mode}"]
    for name, value in settings["environment"].items():
        words += ["--env", f"{name}={value}"]
    if launch.gpus:
        words += ["--gpus", f'"device={",".join(launch.gpus)}"']
    return [*words, launch.image, *(("bash",) if interactive else launch.command)]


def mounts(launch: Launch) -> list[Mount]:
    """The boundary: three folders in, one out."""
    return [
        Mount("/suite", str(launch.suite), type="bind", read_only=True),
        Mount("/models", str(launch.models), type="bind", read_only=True),
        Mount("/in", str(launch.folder / "in"), type="bind", read_only=True),
        Mount("/out", str(launch.folder / "out"), type="bind"),
    ]


class _DockerRunning:
    """A container, and the thread that keeps the head of its output."""

    def __init__(self, container: Container, folder: Path) -> None:
        self._container = container
        self._folder = folder
        self._heads: Sequence[Head] = ()
        self._reader: threading.Thread | None = None
        self._lost = ""
        self._state: ExitState | None = None

    def start(self) -> None:
        keep_room(self._folder)
        self._read()
        try:
            self._container.start()
        except requests.RequestException:  # the answer was lost; a second request could start it a second time
            if not self._started():
                raise
            if self._reader is not None and not self._reader.is_alive():
                self._read(from_its_log=True)

    def _read(self, from_its_log: bool = False) -> None:
        stream = self._container.attach(stdout=True, stderr=True, stream=True, demux=True, logs=from_its_log)
        self._heads = [Head(self._folder / name) for name in LOGS]
        self._reader = threading.Thread(target=_keep_heads, args=(stream, self._heads), daemon=True)
        self._reader.start()

    def _started(self) -> bool:
        until = time.monotonic() + _LATE
        while time.monotonic() < until:
            with contextlib.suppress(DockerException, requests.RequestException):
                self._container.reload()
                if not self._container.attrs["State"]["StartedAt"].startswith("0001-"):
                    return True
            time.sleep(_POLL)
        return False

    def ended(self, seconds: float) -> bool:
        until = time.monotonic() + seconds
        while not self._is_over():
            left = until - time.monotonic()
            if left <= 0:
                return False
            self._pause(min(left, 0.25))
        return True

    def _pause(self, seconds: float) -> None:
        """The end of its output is the first sign of a container's end; after it the daemon needs a moment."""
        if self._reader is not None and self._reader.is_alive():
            self._reader.join(seconds)
        else:
            time.sleep(min(seconds, 0.05))

    def _is_over(self) -> bool:
        try:
            self._container.reload()
        except NotFound:
            self._lost = "the container was removed by somebody else"
        except (DockerException, requests.RequestException) as error:
            self._lost = f"the daemon no longer answers: {error}"
        return bool(self._lost) or self._container.status in ("exited", "dead")

    def terminate(self) -> None:
        self._signal("SIGTERM")

    def _signal(self, name: str) -> None:
        with contextlib.suppress(DockerException, requests.RequestException):
            self._container.kill(name)

    def close(self) -> ExitState:
        if self._state is None:
            self._state = self._end()
        return self._state

    def _end(self) -> ExitState:
        if not self._is_over():
            self._signal("SIGKILL")
            self.ended(_REMOVAL)
        state = self._exit_state()
        if self._reader is not None:
            self._reader.join(timeout=10)
        left = self.discard()
        return state.model_copy(update={"error": left}) if left and not state.error else state

    def _exit_state(self) -> ExitState:
        if self._lost:
            return ExitState(started=True, error=self._lost)
        state = self._container.attrs["State"]
        code = state["ExitCode"] if state["Status"] in ("exited", "dead") else None
        return ExitState(started=True, exit_code=code, oom_killed=state["OOMKilled"], error=state["Error"] or "")

    def discard(self) -> str:
        """Remove what there is of it; what the daemon says if it is not gone afterwards."""
        give_room(self._folder)
        for head in self._heads:
            head.close()
        fault = remove(self._container)
        return f"the container {self._container.name} could not be removed: {fault}" if fault else ""


def remove(container: Container) -> str:
    """Remove it and see that it is gone; what the daemon says instead."""
    until = time.monotonic() + _REMOVAL
    while True:
        try:
            container.remove(force=True, v=True)
        except NotFound:
            return ""
        except (DockerException, requests.RequestException) as error:  # a removal under way already, for one
            if time.monotonic() >= until:
                return str(error)
            time.sleep(_POLL)


def _keep_heads(stream: CancellableStream[tuple[bytes | None, bytes | None]], heads: Sequence[Head]) -> None:
    """Keep the head of either stream, and read on: a full pipe would stop the cell."""
    broken = (DockerException, requests.RequestException, OSError, ValueError)
    with contextlib.suppress(*broken):
        for pair in stream:
            for chunk, head in zip(pair, heads, strict=True):
                head.write(chunk or b"")
    with contextlib.suppress(*broken):
        stream.close()
