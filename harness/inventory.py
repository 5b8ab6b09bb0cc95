"""Which images of the project are there, and what room they take: what `vllm-matrix images` shows."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import requests
from docker.client import DockerClient
from docker.errors import DockerException

from harness.backends.docker import connect
from harness.errors import InfrastructureError
from harness.images import BuildOptions, Image
from harness.project import Project, images_for


@dataclass(frozen=True, kw_only=True)
class Row:
    """The image of a target on a device. Everything after `tag` is None where there is none.

    `unique` are the bytes in layers that no other image of this engine has, whosever it is: what its removal gives
    back. `shared` are the others, and the same bytes stand in the row of each image that has them: sizes of several
    images must not be added. The two are None too where the engine does not tell them apart.
    """

    target: str
    device: str
    tag: str
    id: str | None = None
    bytes: int | None = None
    unique: int | None = None
    shared: int | None = None
    created: datetime | None = None

    @property
    def built(self) -> bool:
        return self.id is not None


def rows(project: Project, options: BuildOptions) -> tuple[Row, ...]:
    """One for each target and device that cells of the project need, in the order of matrix.toml.

    Raises ConfigurationError for a file that is missing, InfrastructureError if Docker does not answer.
    """
    images = images_for(project, project.cells, options, "docker")
    with closing(connect()) as client:
        found = _found(client)
    return tuple(row_of(image, found) for image in images.values())


def _found(client: DockerClient) -> dict[str, Mapping[str, Any]]:
    """What the engine says of each image, by tag."""
    try:
        answer = client.df()
    except (DockerException, requests.RequestException) as error:
        raise InfrastructureError(f"Docker does not say which images it has: {error}", "See `docker info`.") from error
    if "Images" not in answer:
        raise InfrastructureError(
            "this Docker does not say what its images take in the form that is known here (API 1.53 on)",
            "`docker system df -v` has it.",
        )
    return {tag: image for image in answer["Images"] or () for tag in image.get("RepoTags") or ()}


def row_of(image: Image, found: Mapping[str, Mapping[str, Any]]) -> Row:
    """`found` as the engine's own report of its use of the disk has it (`/system/df`), by tag."""
    facts = found.get(image.tag)
    if facts is None:
        return Row(target=image.target, device=image.device, tag=image.tag)
    size, shared = int(facts["Size"]), int(facts.get("SharedSize", -1))
    return Row(
        target=image.target,
        device=image.device,
        tag=image.tag,
        id=str(facts["Id"]),
        bytes=size,
        unique=size - shared if shared >= 0 else None,
        shared=shared if shared >= 0 else None,
        created=datetime.fromtimestamp(int(facts["Created"]), UTC),
    )
