"""Where cells run: in containers of Docker, or, where there is none, as processes of this host."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import closing
from enum import StrEnum
from importlib import metadata

from docker.client import DockerClient
from rich.console import Console

from harness.backends.docker import DockerBackend, connect
from harness.backends.local import LocalBackend
from harness.environments import check_host, environments_root, make_environment
from harness.errors import BuildError, DockerMissingError, InfrastructureError
from harness.images import BuildOptions, build, find_builder
from harness.project import Project
from harness.reaper import Find, containers, folders, making, processes, reap
from harness.run import Build, Tools
from harness.views.terminal import Progress


class Choice(StrEnum):
    """What a user may ask for."""

    AUTO = "auto"
    DOCKER = "docker"
    LOCAL = "local"


def choose(asked: Choice) -> tuple[str, str]:
    """The name of the back end, and a sentence if it is another one than a user would expect.

    `auto` is docker, and local only where there is no Docker at all: one that refuses us stays an error, which comes
    when it is used.
    """
    if asked is not Choice.AUTO:
        return asked, ""
    try:
        with closing(connect()):
            find_builder(os.environ)
    except DockerMissingError as error:
        where = "cells run as processes of this host, in environments made by uv, without a container's limits"
        return Choice.LOCAL, f"{error.message}: {where} (docs/local.md)"
    except (InfrastructureError, BuildError):
        pass
    return Choice.DOCKER, ""


def open_tools(
    backend: str, project: Project, options: BuildOptions, console: Console, devices: Collection[str]
) -> Tools:
    """For cells on these devices. Raises InfrastructureError, or BuildError, for the first thing that is missing."""
    if backend != Choice.LOCAL:
        return _docker(options, console)
    check_host(devices)
    return _local(project, options, console)


def _docker(options: BuildOptions, console: Console) -> Tools:
    client, builder = connect(), find_builder(os.environ)
    return docker_tools(client, lambda image, log, say: build(image, builder, options, log, say), options, console)


def docker_tools(client: DockerClient, make: Build, options: BuildOptions, console: Console) -> Tools:
    """For containers of images that `make` brings."""
    return Tools(
        backend=DockerBackend(client),
        build=make,
        options=options,
        progress=Progress(console),
        engine=f"docker {client.version()['Version']}",
        reap=_reaper([containers(client), *_on_host()]),
    )


def _local(project: Project, options: BuildOptions, console: Console) -> Tools:
    root, python = environments_root(), project.python_of
    return Tools(
        backend=LocalBackend(root),
        build=lambda image, log, say: make_environment(image, python(image.target), options, root, log, say),
        options=options,
        progress=Progress(console),
        engine=f"uv {metadata.version('uv')}",
        reap=_reaper(_on_host()),
    )


def _on_host() -> list[Find]:
    return [processes, folders, making(environments_root())]


def _reaper(finds: Iterable[Find]) -> Callable[[bool], Iterator[str]]:
    return lambda ours: reap(finds, ours)


def clean_up(dry_run: bool) -> Iterator[str]:
    """Remove what killed harnesses left, with Docker and without; a line for each."""
    try:
        with closing(connect()) as client:
            yield from reap([containers(client)], dry_run=dry_run)
    except DockerMissingError:
        pass
    except InfrastructureError as error:
        yield f"containers cannot be looked for: {error.message}"
    yield from reap(_on_host(), dry_run=dry_run)
