"""What the verbs over many runs cost: 108,000 records, 30 versions × 60 scenarios × 60 nights, of a real one's size.

    python -m benchmarks.scale [--versions 30] [--scenarios 60] [--nights 60] [--folder FOLDER]

For a quarter of the nights, half of them and all: the last of them is judged and made a Matrix of, compared with the
night before it, and one cell is looked at over all of them. Of several rounds the fastest counts. Takes about 3 GB of
TMPDIR, and removes them; in FOLDER they are kept, and taken from there the next time.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.commands.compare import compare_runs
from harness.project import Project, load_project
from harness.records import records_of_cell, runs_of
from harness.run import load_matrix
from harness.timeline import moments, turns
from tests.nights import add_nights, make_project

ROOM = 28 << 10  # bytes that a record takes of a disk, with its two folders and its share of plan.json
ROUNDS = 3
NEWEST_SECONDS, HISTORY_SECONDS = 5.0, 0.2  # what is aimed at


@dataclass(frozen=True)
class Cost:
    """Seconds on the clock, and of a processor: the same where nobody else uses it."""

    clock: float
    processor: float

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.clock + other.clock, self.processor + other.processor)

    def __str__(self) -> str:
        return f"{self.clock:6.3f} ({self.processor:.3f})"


@dataclass(frozen=True)
class Costs:
    """Of the Matrix of the last night, its diff to the night before, one cell over all nights."""

    nights: int
    records: int
    matrix: Cost
    diff: Cost
    history: Cost


def measure(project: Project, nights: Sequence[Path]) -> Costs:
    """`nights`: the folders of the runs that count, the newest first."""
    return Costs(
        nights=len(nights),
        records=len(nights) * len(project.cells),
        matrix=cost(lambda: load_matrix(project, nights[0]).pivot()),
        diff=cost(lambda: compare_runs(project, nights[1], nights[0])),
        history=cost(lambda: history(project, nights)),
    )


def history(project: Project, nights: Sequence[Path]) -> None:
    """Everything that `history` and `find` do but for the printing."""
    cell = project.cells[len(project.cells) // 2].id
    turns(moments(records_of_cell(nights, cell), project.expectations))


def cost(action: Callable[[], object]) -> Cost:
    rounds = []
    for _ in range(ROUNDS):
        begin = time.perf_counter(), time.process_time()
        action()
        rounds.append(Cost(time.perf_counter() - begin[0], time.process_time() - begin[1]))
    return Cost(min(one.clock for one in rounds), min(one.processor for one in rounds))


def made(folder: Path, versions: int, scenarios: int, nights: int) -> Project:
    """The project with its nights, which may be there already. Exits where the disk has no room for them."""
    if (folder / "matrix.toml").is_file():
        return load_project(folder / "matrix.toml")
    needed, free = versions * scenarios * nights * ROOM + (1 << 30), shutil.disk_usage(folder).free
    if free < needed:
        raise SystemExit(f"{folder} has {free / 2**30:.1f} GiB free, {needed / 2**30:.1f} are needed: set TMPDIR")
    project = make_project(folder, versions, scenarios)
    add_nights(project, nights)
    return project


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--versions", type=int, default=30)
    parser.add_argument("--scenarios", type=int, default=60)
    parser.add_argument("--nights", type=int, default=60)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="scale-") as name:
        folder = options.folder or Path(name)
        project = made(folder, options.versions, options.scenarios, options.nights)
        runs = runs_of(project.results)
        parts = sorted({max(2, len(runs) // 4), max(2, len(runs) // 2), len(runs)})
        report([measure(project, runs[len(runs) - part :]) for part in parts])


def report(costs: Sequence[Costs]) -> None:
    print("seconds on the clock (of a processor), the fastest of several rounds")
    print("nights  records           matrix             diff          history")
    for one in costs:
        figures = "".join(f"{each!s:>17}" for each in (one.matrix, one.diff, one.history))
        print(f"{one.nights:>6}  {one.records:>7}{figures}")
    newest, cell = costs[-1].matrix + costs[-1].diff, costs[-1].history
    for name, seconds, aim in (("matrix and diff", newest, NEWEST_SECONDS), ("history", cell, HISTORY_SECONDS)):
        print(f"{name}: {seconds} s of {aim} s: {'met' if seconds.clock <= aim else 'missed'}")


if __name__ == "__main__":
    main()
