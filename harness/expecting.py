"""What was seen in runs → the expectations to have: those that are there as far as they still hold, and an irredundant
set of new ones, each of which decides about a check that no other does. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, timedelta

from packaging.version import Version

from harness.cells import Cell
from harness.expectations import (
    RECORDED_AXES,
    Expectation,
    Match,
    axes_of,
    concerns,
    first_fault,
    fits,
    recorded,
    verdict,
)
from harness.fingerprint import fingerprints, own_message, own_reason, pattern
from harness.judge import CELL
from harness.records import CheckRecord, Record
from harness.status import UNEXPECTED, Status, Verdict

EXPIRY = timedelta(days=90)  # of a new entry: until then somebody says why
_SAID = 160  # characters of a fingerprint in a reason
_SEEN_IN = "seen in run"  # so begins the reason of a new entry
_WELL = (Status.PASS, Status.NA)
_UNTRIED = (Status.MISS, Status.SKIP)


@dataclass(frozen=True, kw_only=True)
class Seen:
    """A check of a cell's record, and the facts that conditions can ask for."""

    cell: Cell
    question: str
    run: str
    axes: Mapping[str, str]
    check: CheckRecord
    fingerprint: str


@dataclass(frozen=True, kw_only=True)
class Fate:
    """What becomes of an entry that is there: it stays (`entry` as it was), is narrowed, or goes (None). `why` is empty
    where it stays and there is nothing to be said of that."""

    entry: Expectation | None
    why: str


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """`fates` in the order of the entries that are there. `apart`: red checks which no condition tells from others."""

    fates: tuple[Fate, ...]
    new: tuple[Expectation, ...]
    apart: tuple[Seen, ...] = ()

    @property
    def entries(self) -> tuple[Expectation, ...]:
        return (*(fate.entry for fate in self.fates if fate.entry is not None), *self.new)


def sightings(cells: Iterable[Cell], records: Mapping[str, Record]) -> tuple[Seen, ...]:
    """All checks of the cells that have a record (`records` by cell id), and still stand for its release line."""
    return tuple(
        Seen(
            cell=cell,
            question=cell.question,
            run=record.reused_from or record.run,
            axes=axes_of(record),
            check=check,
            fingerprint=said,
        )
        for cell in cells
        if (record := records.get(cell.id)) is not None and record.vllm == cell.vllm
        for check, said in zip(record.checks, fingerprints(record.checks), strict=True)
    )


def propose(seen: Sequence[Seen], expectations: Sequence[Expectation], cells: Sequence[Cell], today: date) -> Proposal:
    """The expectations under which nothing that was seen is unexpected.

    Entries that are there stay as they are, as long as they are true of all that was seen, or could be of cells that
    were not; one that is not is narrowed to other versions, and what it rightly said of these is said anew, in its
    words. `cells` are all of matrix.toml. A MISS or a SKIP says nothing for or against an entry.
    """
    fates = _without_idle(expectations, [_fate(entry, seen, cells) for entry in expectations], cells)
    standing = [fate.entry for fate in fates if fate.entry is not None]
    new: list[Expectation] = []
    apart: list[Seen] = []
    red = (it for it in seen if it.check.status not in _WELL and _verdict(it, standing) is Verdict.REGRESSION)
    wanted = [(it, _model(it, expectations, today)) for it in red]
    while wanted:
        entry = _best(wanted, seen, [*standing, *new], cells)
        if entry is None:
            apart.append(wanted.pop(0)[0])
        else:
            new.append(entry)
            wanted = [(it, model) for it, model in wanted if not _fits(entry, it)]
    return Proposal(fates=fates, new=needed(new, standing, seen), apart=tuple(apart))


def _verdict(it: Seen, expectations: Sequence[Expectation]) -> Verdict:
    return verdict(it.check, it.question, it.axes, expectations)[0]


def _fits(entry: Expectation, it: Seen) -> bool:
    return fits(entry, it.question, it.check.id, it.axes)


def needed(
    new: Sequence[Expectation], standing: Sequence[Expectation], seen: Sequence[Seen]
) -> tuple[Expectation, ...]:
    """Without those that a later one, which met more, has made idle."""
    kept = list(new)
    for entry in reversed(new):
        rest = [other for other in kept if other is not entry]
        if all(_verdict(it, [*standing, *kept]) is _verdict(it, [*standing, *rest]) for it in seen if _fits(entry, it)):
            kept = rest
    return tuple(kept)


# --- entries that are there -------------------------------------------------------------------------------------------


def _fate(entry: Expectation, seen: Sequence[Seen], cells: Sequence[Cell]) -> Fate:
    met = [it for it in seen if _fits(entry, it)]
    wrong = [it for it in met if _verdict(it, [entry]) in UNEXPECTED]
    if not wrong:
        return Fate(entry=entry, why="") if met else _unmet(entry, seen, cells)
    seen_ids = {it.cell.id for it in seen}
    narrowed = max(_narrowings(entry, wrong, cells), key=lambda other: len(_about(other, cells) - seen_ids))
    rest = _fate(narrowed, seen, cells).entry if _about(narrowed, cells) else None
    return Fate(entry=rest, why=f"{_why(wrong)}{_lost(entry, rest, seen, cells)}")


def _narrowings(entry: Expectation, wrong: Sequence[Seen], cells: Sequence[Cell]) -> Iterable[Expectation]:
    """The same without what it is wrong about: for all other versions, for another device, for another question."""
    before = [entry.when["vllm"]] if "vllm" in entry.when else []
    versions = [*before, *(f"!={version}" for version in _ordered(it.axes["vllm"] for it in wrong))]
    yield entry.model_copy(update={"when": {**entry.when, "vllm": ",".join(versions)}})
    about = [cell for cell in cells if concerns(entry, cell)]
    for device in sorted({cell.device for cell in about} - {it.cell.device for it in wrong}):
        yield entry.model_copy(update={"when": {**entry.when, "device": device}})
    for question in sorted({cell.question for cell in about} - {it.question for it in wrong}):
        yield entry.model_copy(update={"scenario": question})


def _about(entry: Expectation | None, cells: Sequence[Cell]) -> set[str]:
    return {cell.id for cell in cells if entry is not None and concerns(entry, cell)}


def _lost(entry: Expectation, rest: Expectation | None, seen: Sequence[Seen], cells: Sequence[Cell]) -> str:
    """Of which cells it no longer speaks though they were not seen."""
    lost = sorted(_about(entry, cells) - _about(rest, cells) - {it.cell.id for it in seen})
    return f"; it no longer speaks of {', '.join(lost)}, not seen" if lost else ""


def _without_idle(before: Sequence[Expectation], fates: Sequence[Fate], cells: Sequence[Cell]) -> tuple[Fate, ...]:
    """Without what, narrowed, says no more than another entry."""
    left = list(fates)
    for number, fate in enumerate(fates):
        if (
            fate.entry != before[number]
            and first_fault([other.entry for other in left if other.entry is not None], cells) is not None
        ):
            left[number] = Fate(entry=None, why=fate.why)
    return tuple(left)


def _why(wrong: Sequence[Seen]) -> str:
    it = wrong[0]
    more = f", and {len(wrong) - 1} more" if len(wrong) > 1 else ""
    said = "passes" if it.check.status is Status.PASS else f"is {it.check.status}: {it.fingerprint[:_SAID]}"
    return f"{it.check.id} of {it.cell.id} {said}{more}"


def _unmet(entry: Expectation, seen: Sequence[Seen], cells: Sequence[Cell]) -> Fate:
    """No check that was seen is its own: it goes if there is none, and stays if there may be one elsewhere."""
    about = _about(entry, cells)
    told = [it for it in seen if it.cell.id in about]
    cut_short = any(it.check.id == CELL and it.check.status not in _WELL for it in told)
    if not told or cut_short or recorded(entry):
        return Fate(entry=entry, why="")
    if about - {it.cell.id for it in told}:
        return Fate(entry=entry, why=f"no check of those of its cells that were seen is {entry.check!r}")
    return Fate(entry=None, why=f"no check of its cells is {entry.check!r}")


def _ordered(versions: Iterable[str]) -> list[str]:
    return sorted(set(versions), key=Version)


# --- new entries ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Draft:
    """A new entry that could be, the checks that it would newly decide about, and how general it is."""

    entry: Expectation
    meets: int
    general: tuple[int, ...]


def _best(
    wanted: Sequence[tuple[Seen, Expectation]],
    seen: Sequence[Seen],
    standing: Sequence[Expectation],
    cells: Sequence[Cell],
) -> Expectation | None:
    """The entry that decides about most of what has the signature of the first, and is true of all that it meets. Of
    those that decide about as much, the narrowest. Each that is wanted comes with an entry about it alone."""
    first, model = wanted[0][0].cell, wanted[0][1]
    where = (first.scenario, first.device)
    about = [cell for cell in cells if cell.scenario == first.scenario]  # no entry of ours speaks of others
    rivals = [entry for entry in standing if any(concerns(entry, cell) for cell in about)]
    near = [it for it in seen if (it.cell.scenario, it.cell.device) == where]
    alike = [it for it, own in wanted if (it.cell.scenario, it.cell.device) == where and _is_alike(own, model)]
    known = {cell.vllm for cell in about if cell.device == first.device}
    drafts = [draft for base in _bases(model, alike) for draft in _drafts(base, alike, near, rivals, known)]
    for draft in sorted(drafts, key=lambda draft: (-draft.meets, draft.general)):
        if first_fault([*rivals, draft.entry], cells, since=len(rivals)) is None:
            return draft.entry
    return None


def _is_alike(one: Expectation, other: Expectation) -> bool:
    """Whether one entry could speak of both: new ones say only what was seen, old ones why."""
    same = (one.status, one.match) == (other.status, other.match)
    return same and (one.reason == other.reason or (_is_new(one) and _is_new(other)))


def _is_new(entry: Expectation) -> bool:
    return entry.reason.startswith(_SEEN_IN)


def _model(it: Seen, before: Sequence[Expectation], today: date) -> Expectation:
    """An entry about this check alone: in the words of one that was right about it, or new."""
    source = next((old for old in before if _fits(old, it) and _verdict(it, [old]) not in UNEXPECTED), None)
    if source is not None:
        return source.model_copy(update={"scenario": it.question, "check": it.check.id})
    title = it.fingerprint if len(it.fingerprint) <= _SAID else f"{it.fingerprint[:_SAID]}…"
    return Expectation(
        scenario=it.question,
        check=it.check.id,
        status=(it.check.status,),
        match=_match(it.check),
        reason=f"{_SEEN_IN} {it.run}: {title}; say why, and give a link",
        expires=today + EXPIRY,
    )


def _match(check: CheckRecord) -> Match:
    """The code where an oracle or the harness gave one; else what was raised."""
    reason, error = own_reason(check), check.error
    if error is None or (error.reason and "AssertionError" in (error.type, *error.bases)):
        code = reason.split(":")[0]
        return Match(reason=reason if re.fullmatch(r"signal: \w+", reason) else code)
    return Match(type=error.type.rpartition(".")[2], message=pattern(own_message(error)) or None)


def _bases(model: Expectation, alike: Sequence[Seen]) -> Iterable[_Draft]:
    """Entries with globs from the narrowest to the widest, and no condition yet but the device."""
    when = {"device": alike[0].cell.device}
    found: dict[tuple[str, str], int] = {}
    for it in alike:
        for wide, scenario in enumerate(_globs(it.question)):
            for wider, check in enumerate([*_globs(it.check.id), "*"]):
                found.setdefault((scenario, check), wide + wider)
    for (scenario, check), general in found.items():
        entry = model.model_copy(update={"scenario": scenario, "check": check, "when": when})
        yield _Draft(entry=entry, meets=0, general=(general,))


def _drafts(
    base: _Draft, alike: Sequence[Seen], near: Sequence[Seen], rivals: Sequence[Expectation], known: Collection[str]
) -> Iterable[_Draft]:
    """The base with each condition under which it is true of all that it meets."""
    met = [it for it in near if _fits(base.entry, it)]
    false = [it for it in met if not _is_true(base.entry, it, rivals)]
    shown = {it.axes["vllm"] for it in met if it.check.status not in _UNTRIED} - {it.axes["vllm"] for it in false}
    mine = [it for it in alike if _fits(base.entry, it)]
    for number, when in enumerate(_conditions(mine, shown, {it.axes["vllm"] for it in near}, known)):
        entry = base.entry.model_copy(update={"when": {**when, **base.entry.when}})
        meets = sum(_fits(entry, it) for it in mine)
        if meets and not any(_fits(entry, it) for it in false):
            yield _Draft(entry=entry, meets=meets, general=(number, *base.general))


def _globs(name: str) -> list[str]:
    """The name, and where it has parameters, all of the same name."""
    stem, bracket, _ = name.partition("[")
    return [name, f"{stem}[*"] if bracket else [name]


def _is_true(entry: Expectation, it: Seen, standing: Sequence[Expectation]) -> bool:
    """Whether it is right about the check, and says of it what others say."""
    if it.check.status in _WELL or _verdict(it, [entry]) in UNEXPECTED:
        return False
    return all((o.status, o.match) == (entry.status, entry.match) for o in standing if _fits(o, it))


def _conditions(
    mine: Sequence[Seen], shown: Collection[str], looked: Collection[str], known: Collection[str]
) -> Iterable[dict[str, str]]:
    """Conditions from the widest to the narrowest: over all versions that showed it, without and with those between
    them that nobody looked at; over one of them; and where that does not do, over more facts."""
    if shown:
        yield {"vllm": _specifier(shown, looked)}
        yield {"vllm": _specifier(shown, {*looked, *known})}
    for version in _ordered(it.axes["vllm"] for it in mine):
        yield {"vllm": f"=={version}"}
    for it in mine:
        if it.axes["vllm"] not in shown:
            when = {"vllm": f"=={it.axes['vllm']}"}
            for axis in (axis for axis in RECORDED_AXES if axis in it.axes):
                when[axis] = f"=={it.axes[axis].removesuffix('+')}"
                yield dict(when)


def _specifier(shown: Collection[str], looked: Collection[str]) -> str:
    """`>=0.6.3,<=0.8.5,!=0.8.2`: all of `shown`, and nothing else of `looked`."""
    ordered = _ordered(shown)
    if len(ordered) == 1:
        return f"=={ordered[0]}"
    low, high = Version(ordered[0]), Version(ordered[-1])
    holes = [v for v in _ordered(looked) if low < Version(v) < high and v not in shown]
    return ",".join([f">={ordered[0]}", f"<={ordered[-1]}", *(f"!={version}" for version in holes)])
