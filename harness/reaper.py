"""What harnesses left behind that were killed: found by its owner's mark, and removed.

It is never somebody else's: not what belongs to a harness that lives, to another user, to a PID namespace that cannot
be looked into, or to nobody that is named.
"""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import requests
from docker.client import DockerClient
from docker.errors import DockerException, NotFound
from filelock import Timeout

from harness.backends import docker, owner
from harness.backends.local import PREFIX, marks, sweep
from harness.backends.owner import Owner
from harness.environments import stages
from harness.errors import InfrastructureError
from harness.events import read_untrusted
from harness.images import lock_of


@dataclass(frozen=True)
class Remnant:
    """One thing that is left. `remove` says why it is still there, or nothing."""

    name: str
    remove: Callable[[], str]


# Whether what is ours counts too: at exit, when nothing of it should be left → what there is
Find = Callable[[bool], Iterable[Remnant]]


def reap(finds: Iterable[Find], ours: bool = False, dry_run: bool = False) -> Iterator[str]:
    """Remove what they find; a line for each, also for what could not be removed. Raises nothing."""
    for find in finds:
        try:
            for remnant in find(ours):
                fault = "" if dry_run else remnant.remove()
                yield f"{'left' if dry_run or fault else 'removed'}: {remnant.name}{fault and f', it {fault}'}"
        except (DockerException, requests.RequestException, OSError, InfrastructureError) as error:
            yield f"what is left cannot be looked for: {error}"


def containers(client: DockerClient) -> Find:
    """Finds containers by their label."""

    def find(ours: bool) -> Iterator[Remnant]:
        listed: list[dict[str, Any]] = client.api.containers(all=True, filters={"label": owner.LABEL})
        for row in listed:
            runs = row["State"] not in ("created", "exited", "dead")
            if _is_left(row["Labels"][owner.LABEL], row["Created"], ours, runs) and _is_this_users(client, row["Id"]):
                name = row["Names"][0].removeprefix("/") if row["Names"] else row["Id"][:12]
                yield Remnant(f"container {name}", partial(_remove_container, client, row["Id"]))

    return find


def _is_this_users(client: DockerClient, container: str) -> bool:
    """By the user that cells run as: it is the one that started them."""
    try:
        user: str = client.api.inspect_container(container)["Config"]["User"]
    except NotFound:
        return False
    return user.partition(":")[0] == str(os.getuid())


def _remove_container(client: DockerClient, container: str) -> str:
    try:
        fault = docker.remove(client.containers.get(container))
    except NotFound:
        return ""
    return f"cannot be removed: {fault}" if fault else ""


def processes(ours: bool) -> Iterator[Remnant]:
    """Finds cells that run without a container, whose keeper was killed as well: else it would have ended them."""
    found = {mark: whose for _, mark, whose in marks() if _is_left(whose, 0.0, ours, runs=True)}
    for mark in sorted(found):
        yield Remnant(f"processes of {mark}", partial(_end, mark))


def _end(mark: str) -> str:
    left = sweep(mark)
    return f"cannot be killed: {left}" if left else ""


def folders(ours: bool) -> Iterator[Remnant]:
    """Finds the scratch folders of such cells, and of steps that make environments."""
    for folder in sorted(Path(tempfile.gettempdir()).glob(f"{PREFIX}*")):
        made = _made(folder)
        whose = read_untrusted(folder / owner.FILE, 200) if made is not None else None
        if made is not None and whose is not None and _is_left(whose.decode(errors="replace"), made, ours):
            yield Remnant(f"folder {folder}", partial(_remove_folder, folder))


def _made(folder: Path) -> float | None:
    """When it last got or lost an entry; None if it is no folder of this user."""
    try:
        state = folder.lstat()
    except OSError:
        return None
    return state.st_mtime if stat.S_ISDIR(state.st_mode) and state.st_uid == os.geteuid() else None


def _remove_folder(folder: Path) -> str:
    shutil.rmtree(folder, ignore_errors=True)
    if folder.exists():  # a cell may have taken our rights away
        folder.chmod(0o700)
        for path, names, _ in os.walk(folder):
            for child in (Path(path, name) for name in names):
                if not child.is_symlink():
                    child.chmod(0o700)
        shutil.rmtree(folder, ignore_errors=True)
    return "cannot be removed" if folder.exists() else ""


def making(root: Path) -> Find:
    """Finds stages of environments in `root` that nobody makes: a lock that ends with its holder tells."""

    def find(_ours: bool) -> Iterator[Remnant]:
        for folder, tag in stages(root):
            if not _unlocked(tag, str):
                yield Remnant(f"folder {folder}", partial(_unlocked, tag, partial(_remove_folder, folder)))

    return find


def _unlocked(tag: str, action: Callable[[], str]) -> str:
    try:
        with lock_of(tag).acquire(timeout=0):
            return action()
    except Timeout:
        return "is being made"


def _is_left(mark: str, made: float, ours: bool, runs: bool = False) -> bool:
    whose = Owner.parse(mark)
    return whose is not None and ((ours and whose.is_me) or whose.has_ended(made, runs))
