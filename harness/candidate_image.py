"""A candidate that is an image: what is in it, and taking it instead of building one."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import requests
from docker.client import DockerClient
from docker.errors import DockerException
from docker.types import LogConfig
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from harness.backends import owner
from harness.backends.docker import connect
from harness.errors import ConfigurationError, InfrastructureError
from harness.events import clean
from harness.images import BuiltImage, Image, find_image
from harness.run import Build

MAX = 1 << 20  # bytes of an image's answer
SECONDS = 120
_ASK = (
    "import importlib.metadata as m, json; "
    "print('vllm-matrix ' + json.dumps({d.metadata['Name']: d.version for d in m.distributions()}))"
)


@dataclass(frozen=True, kw_only=True)
class Contents:
    """An image's id, and the versions of the distributions in it, by canonical name."""

    id: str
    distributions: dict[str, str]


def inspect(name: str) -> Contents:
    """Raises ConfigurationError for an image that is not there or has no Python, InfrastructureError without Docker."""
    with closing(connect()) as client:
        found = find_image(client, name)
        if found is None:
            raise ConfigurationError(f"Docker has no image {name}", "Pull it, or load it, first.")
        return Contents(id=found.id, distributions=distributions(_answer(client, found.id, name)))


def _answer(client: DockerClient, image: str, name: str) -> bytes:
    try:
        container = client.containers.create(
            image,
            ["python3", "-c", _ASK],
            entrypoint=[],
            labels={owner.LABEL: owner.owner()},
            network_mode="none",
            cap_drop=["ALL"],
            security_opt=["no-new-privileges"],
            read_only=True,
            mem_limit="1g",
            pids_limit=64,
            log_config=LogConfig(type="json-file", config={"max-size": "8m", "max-file": "1"}),
        )
        try:
            container.start()
            container.wait(timeout=SECONDS)
            return bytes(container.logs(stdout=True, stderr=False))[-MAX:]
        finally:
            container.remove(force=True)
    except (DockerException, requests.RequestException) as error:
        raise ConfigurationError(
            f"{name} does not say what is installed in it: {clean(str(error))[:300]}",
            "Cells need python3, pytest and pytest-xdist in an image, on PATH.",
        ) from error


def distributions(said: bytes) -> dict[str, str]:
    """From what an image printed, which nobody vouches for. Raises ConfigurationError."""
    line = next((text for text in said.splitlines()[::-1] if text.startswith(b"vllm-matrix ")), b"")
    try:
        told = json.loads(line.partition(b" ")[2])
        return {canonicalize_name(_name(name)): str(Version(version)) for name, version in told.items()}
    except (ValueError, AttributeError, TypeError, InvalidVersion) as error:
        raise ConfigurationError("the image does not say in a form that can be read what is installed in it") from error


def _name(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,98}[A-Za-z0-9])?", name):
        raise ValueError(name)
    return name


def instead_of_building(target: str, contents: Contents, build: Build) -> Build:
    """Builds all targets but this one, whose image is there."""

    def take(image: Image, log: Path, say: Callable[[str], None]) -> BuiltImage:
        if image.target != target:
            return build(image, log, say)
        with closing(connect()) as client:
            found = find_image(client, contents.id)
        if found is None:
            raise InfrastructureError(f"Docker has no image {contents.id} any more")
        return BuiltImage(tag=image.tag, id=found.id, bytes=found.bytes, seconds=0.0, cached=True)

    return take
