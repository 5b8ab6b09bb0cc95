"""Kill what takes part in a run, at any moment, and go on: no record is lost, nothing is left, the table is the same.

A round is a seed: which back end, which victim, which signal, when. `--chaos N`: how many; `--seed S`: the first.

After the kill the harness may end in any way. Then `run --resume` (or, where it was killed before it had a plan, a new
run) has to come to its end, and
- every record that was complete at the kill is still there, byte for byte;
- no process, container or scratch folder of any cell is left;
- every cell has the status of an undisturbed run; only the one cell in which something was killed may have a worse one,
  as may the cell that reads what it would have left, and these have the undisturbed one when they run afresh.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from docker.client import DockerClient
from docker.errors import APIError

from tests.chaos import engine
from tests.chaos.world import World, template, wait_for, world

EXPECTED = {"calm": "PASS", "reader": "PASS", "red": "FAIL", "ranks": "PASS"}
BAD = {"CRASH", "FAIL", "ERROR", "MISS", "TIMEOUT", "OOM", "NOTRUN"}
READS = {"calm": "reader"}  # the reference of whom it is
WHOLE_RUN = 6.0  # seconds, about; a kill of the harness comes somewhere in it

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.timeout(600),
]


@dataclass
class Round:
    """What a seed says, and what came of it."""

    world: World
    random: random.Random
    hit: set[str] = field(default_factory=set)  # scenarios in whose cell something was killed
    killed: str = ""


# --- victims ----------------------------------------------------------------------------------------------------------


def harness(round_: Round, number: int) -> None:
    time.sleep(round_.random.uniform(0.3, WHOLE_RUN))
    round_.world.started[-1].send_signal(number)


def found_in_time(round_: Round, look: Callable[[], bool]) -> bool:
    """Wait for something to kill, then some moment more; whether there is anything before the harness ends."""

    def looks() -> bool:
        return look() or round_.world.started[-1].poll() is not None

    time.sleep(round_.random.uniform(0.0, 1.5))
    wait_for(looks, 60)
    time.sleep(round_.random.uniform(0.0, 0.4))
    wait_for(looks, 60)
    if not look():
        round_.killed = "none: it was over"
        return False
    return True


def of_a_cell(words: str) -> Callable[[Round, int], None]:
    """A process with these words in its command line, of any cell, some moment after there is one."""

    def kill(round_: Round, number: int) -> None:
        found: list[int] = []

        def look() -> bool:
            found[:] = sorted(pid for pid, command in round_.world.processes().items() if words in command)
            return bool(found)

        if not found_in_time(round_, look):
            return
        pid = round_.random.choice(found)
        round_.hit |= _scenario(pid)
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            round_.killed = "none: it was over"

    return kill


def _scenario(pid: int) -> set[str]:
    """Whose cell a process belongs to, by its environment or that of its parents; any, if nothing tells."""
    for _ in range(6):
        try:
            environ = Path(f"/proc/{pid}/environ").read_bytes()
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            break
        for name in EXPECTED:
            if f"@cpu/{name}\0".encode() in environ or f"cpu__{name}/".encode() in environ:
                return {name}
    return set(EXPECTED)


def keeper_and_harness(round_: Round, number: int) -> None:
    """Both that would clean up: what is left is the reaper's."""
    kill = of_a_cell("keeper.py")
    kill(round_, number)
    round_.world.started[-1].send_signal(signal.SIGKILL)


def container(round_: Round, number: int) -> None:
    """By the daemon, or its removal by somebody else."""
    found: dict[str, str] = {}

    def look() -> bool:
        found.clear()
        found.update(round_.world.containers())
        return bool(found)

    if not found_in_time(round_, look):
        return
    key = round_.random.choice(sorted(found))
    round_.hit |= {name for name in EXPECTED if f"__{name}-" in found[key]} or set(EXPECTED)
    with contextlib.closing(round_.world.client()) as client:
        try:
            if number == 0:
                client.api.remove_container(key, force=True)
            else:
                client.api.kill(key, signal=number)
        except APIError:
            round_.killed = "none: it was over"


KILL, TERM, INT = signal.SIGKILL, signal.SIGTERM, signal.SIGINT
Victim = tuple[str, Callable[[Round, int], None], tuple[int, ...]]
IN_CELLS: tuple[Victim, ...] = (
    ("supervisor", of_a_cell("-m rig"), (KILL, TERM, INT)),
    ("runner", of_a_cell("-m pytest"), (KILL,)),
    ("rank", of_a_cell("chaos_rank"), (KILL,)),
    ("any process of a cell", of_a_cell("python"), (KILL,)),
)
VICTIMS: dict[str, tuple[Victim, ...]] = {
    "local": (
        ("harness", harness, (KILL, KILL, TERM, INT)),
        ("harness", harness, (KILL, KILL, TERM, INT)),
        ("keeper", of_a_cell("keeper.py"), (KILL, TERM)),
        ("keeper and harness", keeper_and_harness, (KILL,)),
        *IN_CELLS,
    ),
    "docker": (
        ("harness", harness, (KILL, KILL, TERM, INT)),
        ("harness", harness, (KILL, KILL, TERM, INT)),
        ("container", container, (KILL, TERM, 0)),
        *IN_CELLS,
    ),
}


# --- a round ----------------------------------------------------------------------------------------------------------


def play(round_: Round, backend: str, kill: Callable[[], None], record: Callable[[str, object], None]) -> None:
    """Start, kill, wait, go on, look."""
    world_ = round_.world
    process = world_.harness("run", "--backend", backend)
    kill()
    before = world_.records()
    ended = wait_for(lambda: process.poll() is not None, 90)
    assert ended, f"the harness did not end\n{world_.log()}"
    before |= {path: data for path, data in world_.records().items() if path not in before}
    folder = world_.newest()
    world_.run("run", *(["--resume", folder.name] if folder else ["--backend", backend]))
    after = world_.records()
    lost = [str(path) for path, data in before.items() if after.get(path) != data]
    record("lost", len(lost))
    orphans = world_.left()
    record("orphans", len(orphans))
    statuses = world_.statuses()
    differs = {name for name in EXPECTED if statuses.get(name) != EXPECTED[name]}
    worse = {name for name in differs if statuses.get(name) in BAD - {"NOTRUN"}}
    excused = round_.hit | {READS[name] for name in round_.hit if name in READS}
    wrong = {name: statuses.get(name) for name in differs if name not in (excused & worse)}
    record("mismatches", len(wrong))
    assert (lost, orphans, wrong) == ([], [], {}), world_.log()
    if differs:
        world_.run("run", "--backend", backend, "--fresh", *(f"vllm-0.10.0@cpu/{name}" for name in sorted(differs)))
        again = world_.statuses()
        assert {name: again.get(name) for name in differs} == {name: EXPECTED[name] for name in differs}, world_.log()
        assert world_.left() == []


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Of ten rounds five are local, four in containers, and one kills a daemon of our own."""
    if "seed" in metafunc.fixturenames:
        kind = metafunc.function.kind
        first, count = metafunc.config.getoption("--seed"), metafunc.config.getoption("--chaos")
        seeds = [seed for seed in range(first, first + count) if KINDS[seed % 10] == kind]
        metafunc.parametrize("seed", seeds)


KINDS = ("daemon", "local", "docker", "local", "docker", "local", "docker", "local", "docker", "local")


def of_kind(kind: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    def mark(test: Callable[..., None]) -> Callable[..., None]:
        test.kind = kind  # type: ignore[attr-defined]
        return test

    return mark


@pytest.fixture(scope="session")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("project")
    template(folder)
    return folder


@pytest.fixture(scope="session")
def image() -> Iterator[str]:
    """Of the daemon that is there: CI has one."""
    with contextlib.closing(DockerClient.from_env()) as client:
        made = engine.make_image(client)
        yield made
        client.images.remove(made, force=True)


def victims(round_: Round, backend: str, record: Callable[[str, object], None]) -> Callable[[], None]:
    def kill() -> None:
        name, victim, signals = round_.random.choice(VICTIMS[backend])
        number = round_.random.choice(signals)
        round_.killed = name
        victim(round_, number)
        record("victim", round_.killed)

    return kill


@of_kind("daemon")
@pytest.mark.xdist_group("daemon")
def test_the_daemon_is_killed(
    seed: int, project: Path, daemon: engine.Daemon, record_property: Callable[[str, object], None]
) -> None:
    with world(project, "docker", _image_of(daemon), daemon.host) as made:
        round_ = Round(made, random.Random(seed))  # noqa: S311 - to be repeated, not to be secret
        round_.hit = set(EXPECTED)  # all that run then

        def kill() -> None:
            time.sleep(round_.random.uniform(1.0, WHOLE_RUN))
            daemon.kill(round_.random.choice((KILL, KILL, TERM)))
            record_property("victim", "daemon")
            time.sleep(round_.random.uniform(0.0, 3.0))
            daemon.start()

        play(round_, "docker", kill, record_property)


@of_kind("local")
def test_local(seed: int, project: Path, record_property: Callable[[str, object], None]) -> None:
    with world(project, "local") as made:
        round_ = Round(made, random.Random(seed))  # noqa: S311
        play(round_, "local", victims(round_, "local", record_property), record_property)


@of_kind("docker")
def test_docker(seed: int, project: Path, image: str, record_property: Callable[[str, object], None]) -> None:
    with world(project, "docker", image) as made:
        round_ = Round(made, random.Random(seed))  # noqa: S311
        play(round_, "docker", victims(round_, "docker", record_property), record_property)


@pytest.fixture(scope="session")
def daemon() -> Iterator[engine.Daemon]:
    if not engine.can_have_a_daemon():
        pytest.skip("a daemon of our own takes root, dockerd and unshare")
    made = engine.Daemon()
    try:
        made.start()
        yield made
    finally:
        made.close()


def _image_of(daemon: engine.Daemon) -> str:
    with contextlib.closing(DockerClient(base_url=daemon.host)) as client:
        found = client.images.list(engine.TAG)
        return str(found[0].id) if found else engine.make_image(client)
