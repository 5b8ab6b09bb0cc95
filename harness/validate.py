"""Is a candidate as good as the baseline? Both answer the same questions, and what differs decides.

`no-go`: something that is not expected fails, or what the baseline passes does not exist in the candidate any more.
`incomplete`: that cannot be told, for a cell without a result on either side. `go`: everything else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from enum import StrEnum
from pathlib import Path

from harness.candidate import Asked, Prepared, prepare
from harness.candidate_image import inspect, instead_of_building
from harness.cells import Selection
from harness.diff import ABSENT, CheckChange, Diff, Kind, diff
from harness.errors import BuildError, InfrastructureError, NothingSelectedError
from harness.images import BuildOptions
from harness.matrix import Matrix, Square
from harness.plan import Planned
from harness.project import Project, build_options, make_plan
from harness.run import Outcome, Tools, execute
from harness.status import NOTRUN, Status, Verdict
from harness.views.text import cause

FOLDER = "validate"  # of the results
_NOT_THERE = "does not exist any more"
_GONE = frozenset({Status.NA, Status.SKIP, ABSENT})


class Decision(StrEnum):
    GO = "go"
    NO_GO = "no-go"
    INCOMPLETE = "incomplete"


@dataclass(frozen=True, kw_only=True)
class Reason:
    """Why it is not `go`: what, where (a question, and checks of it; none: everywhere), in whose words."""

    decision: Decision
    what: str
    question: str = ""
    checks: tuple[str, ...] = ()
    words: str = ""


@dataclass(frozen=True, kw_only=True)
class Pair:
    """One question, asked of both; the two cells are called alike."""

    question: str
    baseline: Square
    candidate: Square


@dataclass(frozen=True, kw_only=True)
class Validation:
    """What it came to. `diff`: None where no cell can be compared. `run`: None where nothing was run; `moved` and
    `cutoff` as in Prepared. `failed_builds`: of which of the two; `interrupted`: by the user."""

    name: str
    candidate: str
    baseline: str
    device: str
    profile: str
    scenarios: tuple[str, ...]
    reasons: tuple[Reason, ...]
    target: str = ""
    distribution: str = ""
    line: str = ""
    moved: tuple[str, ...] = ()
    cutoff: date | None = None
    run: str | None = None
    pairs: tuple[Pair, ...] = ()
    diff: Diff | None = None
    failed_builds: tuple[str, ...] = ()
    interrupted: bool = False

    @property
    def decision(self) -> Decision:
        """What is known to be worse is no-go, whatever else is missing."""
        found = {reason.decision for reason in self.reasons}
        return next((one for one in (Decision.NO_GO, Decision.INCOMPLETE) if one in found), Decision.GO)

    @property
    def exit_code(self) -> int:
        """In the precedence of a run's: interrupted, no-go, build or lock, infrastructure, 0."""
        if self.interrupted:
            return 130
        if self.decision is Decision.NO_GO:
            return 1
        if self.decision is Decision.GO:
            return 0
        return BuildError.exit_code if self.failed_builds else InfrastructureError.exit_code


@dataclass(frozen=True, kw_only=True)
class Means:
    """What a validation touches the world with. `index_url` and `base` as for `run`; `open` makes a run's tools, and
    `planned` has the last word on the plan."""

    where: str
    open: Callable[[Project, BuildOptions], Tools]
    index_url: str | None = None
    base: str | None = None
    fresh: bool = False
    planned: Callable[[Sequence[Planned]], Sequence[Planned]] = field(default=lambda plan: plan)


def validate(project: Project, asked: Asked, name: str, means: Means) -> Validation:
    """Make the temporary project, run both targets in it, compare. Raises ConfigurationError and what a run raises."""
    known = Validation(
        name=name,
        candidate=asked.candidate.text,
        baseline=asked.baseline,
        device=asked.device,
        profile=asked.profile,
        scenarios=asked.scenarios,
        reasons=(),
    )
    try:
        index_url = means.index_url or project.spec.images.index_url
        made = prepare(project, asked, folder_of(project, name), index_url, inspect)
    except BuildError as error:
        words = "\n".join(part for part in (error.message, error.log_tail) if part)
        unresolved = Reason(decision=Decision.INCOMPLETE, what="its lock cannot be resolved", words=words)
        return replace(known, reasons=(unresolved,), failed_builds=(asked.candidate.text,))
    known = replace(
        known,
        target=made.target,
        distribution=made.distribution,
        line=made.line,
        moved=made.moved,
        cutoff=made.cutoff,
    )
    return judged(known, _run(made, means))


def folder_of(project: Project, name: str) -> Path:
    return project.results / FOLDER / name


def _run(made: Prepared, means: Means) -> Outcome:
    options = build_options(made.project, means.base, means.index_url)
    tools = means.open(made.project, options)
    if made.contents is not None:
        tools = replace(tools, build=instead_of_building(made.target, made.contents, tools.build))
    plan = tuple(map(_declared, make_plan(made.project, Selection(), None, means.fresh, options, means.where)))
    with tools.stop.on_signals():
        return execute(made.project, means.planned(plan), tools)


def _declared(planned: Planned) -> Planned:
    """Not reused where the record was judged as of another line: expectations go by the line that it has."""
    if planned.reuse is None or planned.reuse.vllm == planned.cell.vllm:
        return planned
    reason = f"its last record is of the line {planned.reuse.vllm}"
    return replace(planned, action="run", reason=reason, reuse=None)


# --- what it came to (pure) ------------------------------------------------------------------------------------------


def judged(known: Validation, outcome: Outcome) -> Validation:
    """With the verdict on what was run."""
    before = _of(outcome.matrix, known.baseline, known.target)
    after = _of(outcome.matrix, known.target, known.target)
    pairs = tuple(
        Pair(question=old.cell.question, baseline=old, candidate=new)
        for old in before.squares
        for new in after.squares
        if old.cell.id == new.cell.id
    )
    try:
        found = diff(before, after)
    except NothingSelectedError:
        found = None
    known = replace(
        known,
        run=outcome.folder.name,
        pairs=pairs,
        diff=found,
        failed_builds=outcome.failed_builds,
        interrupted=outcome.interrupted,
    )
    return replace(known, reasons=(*_worse(known), *_missing(known)))


def _of(matrix: Matrix, target: str, named: str) -> Matrix:
    """One target's part; its cells are called as the other's, so that the two can be compared."""
    own = [square for square in matrix.squares if square.cell.target == target]
    squares = tuple(replace(square, cell=replace(square.cell, target=named)) for square in own)
    return replace(matrix, run=target, squares=squares)


def _worse(known: Validation) -> Iterator[Reason]:
    """Newly failing; failing as the baseline does and in no expectation; and what is gone."""
    changes = known.diff.checks if known.diff else ()
    failing = [change for change in changes if change.kind is Kind.FAILING]
    yield from _grouped("newly failing", failing)
    said = {(change.cell, change.check) for change in failing}
    for pair in known.pairs:
        for judged in pair.candidate.checks:
            if judged.verdict is Verdict.REGRESSION and (pair.candidate.cell.id, judged.check.id) not in said:
                yield Reason(
                    decision=Decision.NO_GO,
                    what="fails, and not only here, for a cause that is not expected",
                    question=pair.question,
                    checks=(judged.check.id,),
                    words=f"{judged.check.status}: {cause(judged)}",
                )
    yield from _gone(known, changes)


def _gone(known: Validation, changes: Iterable[CheckChange]) -> Iterator[Reason]:
    """What passes in the baseline and does not exist in the candidate; of a whole cell once, in its own words."""
    gone = [change for change in changes if change.before == Status.PASS and change.after in _GONE]
    whole = {pair.candidate.cell.id: pair for pair in known.pairs if pair.candidate.status in _GONE}
    yield from _grouped(_NOT_THERE, (change for change in gone if change.cell not in whole))
    for cell in dict.fromkeys(change.cell for change in gone if change.cell in whole):
        old, new = whole[cell].baseline, whole[cell].candidate
        why = _why(new)
        words = f"{old.status} → {new.status}" + (f": {why}" if why else "")
        yield Reason(decision=Decision.NO_GO, what=_NOT_THERE, question=new.cell.question, words=words)


def _grouped(what: str, changes: Iterable[CheckChange]) -> Iterator[Reason]:
    """Equal changes of one cell for an equal cause once."""
    groups: dict[tuple[str, str, str, str], list[CheckChange]] = {}
    for change in changes:
        groups.setdefault((change.cell, change.before, change.after, change.fingerprint), []).append(change)
    for (cell, before, after, _), group in groups.items():
        said = cause(group[0].new) if group[0].new else ""
        yield Reason(
            decision=Decision.NO_GO,
            what=what,
            question=cell.partition("/")[2],
            checks=tuple(change.check for change in group if change.check),
            words=f"{before} → {after}" + (f": {said}" if said else ""),
        )


def _missing(known: Validation) -> Iterator[Reason]:
    """What stands in the way of `go` besides."""
    if known.interrupted:
        yield Reason(decision=Decision.INCOMPLETE, what="interrupted")
    for name, target in (("the baseline", known.baseline), ("the candidate", known.target)):
        squares = [pair.baseline if target == known.baseline else pair.candidate for pair in known.pairs]
        if f"{target}@{known.device}" in known.failed_builds:
            words = next((_why(square) for square in squares if square.status == Status.MISS), "")
            yield Reason(decision=Decision.INCOMPLETE, what=f"{name} cannot be built", words=words)
            continue
        for square in squares:
            if square.status in (NOTRUN, Status.MISS) or square.verdict is Verdict.UNKNOWN:
                yield Reason(
                    decision=Decision.INCOMPLETE,
                    what=f"no result of {name}",
                    question=square.cell.question,
                    words=": ".join(part for part in (square.status, _why(square)) if part),
                )
    if all(pair.baseline.status in _GONE for pair in known.pairs):
        yield Reason(decision=Decision.INCOMPLETE, what="nothing that the baseline has was asked")


def _why(square: Square) -> str:
    return next((cause(judged) for judged in square.checks if cause(judged)), "")
