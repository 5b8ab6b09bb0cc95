"""Packs from another machine, as a run here: each is unpacked and examined apart, and what holds together counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from harness.errors import ConfigurationError, NothingSelectedError
from harness.events import clean
from harness.merge import Part, Union, unite
from harness.merged import add, new, part_of, scratch
from harness.packs import SUFFIX, Pack, RefusedError, unpack
from harness.project import Project
from harness.records import Record, records_of, runs_of, write_record
from harness.rejudge import judged_again
from harness.run import Outcome, load_matrix
from harness.status import Status
from harness.targets import FOLDER
from harness.views.text import many


@dataclass(frozen=True, kw_only=True)
class Refused:
    """A pack that was not taken, and why."""

    path: Path
    reason: str

    def __str__(self) -> str:
        return f"refused {clean(self.path.name)}: {self.reason}"


@dataclass(frozen=True, kw_only=True)
class Imported:
    """What came of it. `outcome`: the run that has the packs' records now, None where all packs were refused; `union`:
    what they came to; `changed`: False where all of it was there already; `corrected`: a line for each record that its
    own evidence did not bear out."""

    packs: int
    refused: tuple[Refused, ...]
    corrected: tuple[str, ...] = ()
    outcome: Outcome | None = None
    union: Union | None = None
    changed: bool = False

    @property
    def exit_code(self) -> int:
        """2 if a pack was refused, else the run's."""
        return ConfigurationError.exit_code if self.refused or self.outcome is None else self.outcome.exit_code

    def lines(self) -> list[str]:
        """What there is to say before the table."""
        taken = f"{self.packs - len(self.refused)} of {many(self.packs, 'pack')} taken"
        if self.outcome is None or self.union is None:
            return [*map(str, self.refused), *self.corrected, taken]
        where = f"run {self.outcome.folder.name}"
        what = f"{taken} into {where}" if self.changed else f"{taken}; {where} has all of it already"
        said = self.union.lines() if self.changed else self.union.doubled  # of what was there already: its own table
        return [*map(str, self.refused), *self.corrected, *said, what]


def import_packs(project: Project, paths: Sequence[Path], into: Path | None = None) -> Imported:
    """Make a run of packs (files, or folders of them), or add them to the run in the folder `into`.

    Raises NothingSelectedError where there is no pack, and ConfigurationError where the runs are at odds with each
    other, or with that one; then nothing is written.
    """
    files = _files(paths)
    with scratch(project) as room:
        packs, refused = _unpacked(files, room / "packs")
        corrected = _borne_out(packs, refused)
        parts = [_run(some, room / "runs" / str(number)) for number, some in enumerate(_by_run(packs, refused))]
        told = tuple(refused[path] for path in files if path in refused)
        done = Imported(packs=len(files), refused=told, corrected=corrected)
        if not parts:
            return done
        if into is not None:
            outcome, union, changed = add(project, into, parts, room)
        else:
            union = unite(parts)
            there = _there_already(project, parts)
            outcome, changed = (there, False) if there else (new(project, parts, union, room), True)
    return replace(done, outcome=outcome, union=union, changed=changed)


def _files(paths: Iterable[Path]) -> tuple[Path, ...]:
    files = dict.fromkeys(file for path in paths for file in _below(path))
    if not files:
        raise NothingSelectedError(f"there is no pack: no file that ends in {SUFFIX}", "Name packs, or their folder.")
    return tuple(files)


def _below(path: Path) -> Iterator[Path]:
    if not path.is_dir():
        yield path
        return
    yield from sorted(file for file in path.iterdir() if file.name.endswith(SUFFIX) and not file.name.startswith("."))


def _unpacked(files: Sequence[Path], room: Path) -> tuple[dict[Path, Pack], dict[Path, Refused]]:
    packs: dict[Path, Pack] = {}
    refused: dict[Path, Refused] = {}
    for number, path in enumerate(files):
        try:
            packs[path] = unpack(path, room / str(number))
        except RefusedError as error:
            refused[path] = Refused(path=path, reason=str(error))
    return packs, refused


def _borne_out(packs: dict[Path, Pack], refused: dict[Path, Refused]) -> tuple[str, ...]:
    """Judge each attempt again by what its cell left: that counts, whatever the record says. A PASS that nothing bears
    out is refused; what else has lost its evidence stands."""
    told = []
    for path, pack in [*packs.items()]:
        again = judged_again(pack.record, pack.attempt)
        if again.kept and pack.record.status is Status.PASS:
            refused[path] = Refused(path=path, reason=f"its record says PASS, and {again.kept}")
            del packs[path]
        elif _ends(again.new) != _ends(pack.record):
            write_record(pack.attempt, again.new)
            packs[path] = replace(pack, record=again.new)
            told.append(
                f"{again.new.cell}: {again.new.status} by what its cell left; its record said {again.old.status}"
            )
    return tuple(told)


def _ends(record: Record) -> tuple[Status, dict[str, Status]]:
    return record.status, {check.id: check.status for check in record.checks}


def _by_run(packs: dict[Path, Pack], refused: dict[Path, Refused]) -> Iterator[list[Pack]]:
    """The packs of each run. They have one plan; a pack with another one than most, or with the attempt of another
    pack, is refused."""
    runs: dict[str, dict[Path, Pack]] = {}
    for path, pack in packs.items():
        runs.setdefault(pack.plan.run, {})[path] = pack
    for name, some in runs.items():
        ((plan, _),) = Counter(_plan_bytes(pack) for pack in some.values()).most_common(1)
        taken: dict[tuple[str, int], Pack] = {}
        for path, pack in some.items():
            attempt = (pack.record.cell, pack.record.attempt)
            if _plan_bytes(pack) != plan:
                refused[path] = Refused(path=path, reason=f"its plan is not that of the other packs of run {name}")
            elif attempt in taken and taken[attempt].record != pack.record:
                refused[path] = Refused(path=path, reason=f"another pack of run {name} has the same attempt otherwise")
            else:
                taken.setdefault(attempt, pack)
        yield list(taken.values())


def _plan_bytes(pack: Pack) -> bytes:
    return (pack.folder / "plan.json").read_bytes()


def _run(packs: Sequence[Pack], folder: Path) -> Part:
    """One run's folder of the packs of one; what is known of a target as the last of them has it."""
    for pack in sorted(packs, key=lambda pack: pack.record.ended):
        attempt = pack.attempt
        target = folder / attempt.relative_to(pack.folder)
        target.parent.mkdir(parents=True, exist_ok=True)
        attempt.rename(target)
        for name in ("plan.json", f"{FOLDER}/{pack.record.target}@{pack.record.device}.json"):
            if (pack.folder / name).is_file():
                (folder / name).parent.mkdir(exist_ok=True)
                (pack.folder / name).replace(folder / name)
    return part_of(folder, packs[0].plan.run)


def _there_already(project: Project, parts: Sequence[Part]) -> Outcome | None:
    """The newest run that has every record of these."""
    wanted = [_identity(record) for part in parts for record in part.records.values()]
    for folder in runs_of(project.results):
        known = {name: _identity(record) for name, record in records_of(folder).items()}
        if all(known.get(record.cell) == record for record in wanted):
            return Outcome(folder=folder, matrix=load_matrix(project, folder))
    return None


def _identity(record: Record) -> Record:
    """All that it says but in which run it stands: one that says something else of the same attempt is not there."""
    return record.model_copy(update={"run": "", "reused_from": None})
