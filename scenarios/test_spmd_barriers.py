"""Do ranks that run the same program stay the same?

``layout=dp2``: an engine a rank, started by the rig; ``layout=tp2``: one engine over all ranks, started by torchrun, as
verl runs a rollout (``external_launcher``). Every rank reports what it found, and each check compares all of them:
token ids, sampled ids without a seed a request (vllm#15895, verl#974), KV blocks, weights, devices (verl#913), random
state. Barriers are numbered, so that a hang (vllm#13642) is a finding with every rank's last mark.
"""

from __future__ import annotations

import os
import statistics
from typing import Any, Iterator

import pytest

from rig import oracles
from rig.barrier import meetings
from rig.cell import Cell
from rig.completion import Outputs
from rig.events import Events
from rig.launcher import Limits, Ranks, one_each, torchrun
from rig.marks import each
from rig.outcomes import NotAvailable, OracleError
from rig.reference import Reference, read_reference
from rig.reports import value
from rig.spmd import GREEDY

PROGRAM = "rig.spmd"
SHARE = 0.75  # of the host's deadlines: a hang is to be found here, with what the ranks said, not out there


@pytest.fixture(scope="module")
def ranks(cell: Cell, events: Events) -> Iterator[Ranks]:
    limits = Limits(quiet=SHARE * cell.deadlines["silence"], total=SHARE * cell.deadlines["total"])
    if cell.params["layout"].startswith("tp"):
        children = torchrun(PROGRAM, cell.ranks, os.environ)
    else:
        children = one_each(PROGRAM, cell.ranks, cell.device, os.environ)
    started = Ranks(children, events, limits)
    try:
        yield started
    finally:
        started.end()


@pytest.fixture
def tolerance(cell: Cell) -> float:
    return oracles.TOLERANCE[cell.dtype]


def test_starts(ranks: Ranks, cell: Cell) -> None:
    facts = {rank: found["facts"] for rank, found in ranks.wait("start").items()}
    for name in ("engine.core", "engine.layout", "engine.options"):
        agree(name, {rank: some.get(name) for rank, some in facts.items()})
    dtypes = {rank: some.get("engine.dtype") for rank, some in facts.items()}
    if set(dtypes.values()) != {cell.dtype}:
        raise OracleError("dtype", f"asked for {cell.dtype}, got {each(dtypes)}")


def test_kv_blocks(ranks: Ranks, cell: Cell) -> None:
    """Alike on all ranks of one engine. Engines of their own measure each its memory (H200: 4 apart of 1.7 million)."""
    blocks = {rank: found["facts"].get("engine.kv_blocks") for rank, found in ranks.wait("start").items()}
    if cell.params["layout"].startswith("tp"):
        agree("KV blocks", blocks)
    if not all(blocks.values()):
        raise OracleError("no-kv-blocks", each(blocks))


def test_devices(ranks: Ranks) -> None:
    """Each rank has a device of its own (verl#913, verl#2967: all ranks on the first one)."""
    uuids = {rank: value(found["device"]) for rank, found in ranks.wait("start").items()}
    if len(set(uuids.values())) != len(uuids):
        raise OracleError("device-shared", each(uuids))


@pytest.mark.parametrize("name", GREEDY)
def test_greedy(name: str, ranks: Ranks, tolerance: float, events: Events) -> None:
    answers = outputs(ranks, "greedy", name)
    for found in answers.values():
        oracles.counts(found, len(answers[0]))
    compare(answers, answers[0], tolerance, events)


@pytest.mark.parametrize("name", GREEDY)
def test_cold_start(name: str, ranks: Ranks, cell: Cell, tolerance: float, events: Events) -> None:
    answers = outputs(ranks, "greedy", name)  # first: where ranks cannot be asked, a reference does not matter
    compare(answers, read_reference(cell).outputs(name), tolerance, events)


def test_sampled(ranks: Ranks, events: Events) -> None:
    """Temperature 1, n = 3: ranks with the same seed draw the same, and do draw. Nothing here is a tie."""
    answers = outputs(ranks, "sampled", "text")
    compare(answers, answers[0], 0.0, events)
    if all(len({done.ids for done in row}) == 1 for row in answers[0]):
        raise OracleError("not-sampled", "equal continuations at temperature 1 for every prompt")


def test_random_state(ranks: Ranks, events: Events) -> None:
    """After the same work the generators of numpy and torch stand at the same place.

    Python's own is recorded only: libraries draw names of files and ports from it.
    """
    moments = {stage: ranks.wait(stage) for stage in ("start", "greedy", "sampled")}
    states = {stage: {rank: value(found["rng"]) for rank, found in some.items()} for stage, some in moments.items()}
    before, after = states["greedy"][0], states["sampled"][0]
    events.property("rng.moved_by_sampling", [name for name in after if after[name] != before[name]])
    last = states["sampled"].values()
    events.property("rng.differs", [name for name in after if len({state[name] for state in last}) > 1])
    for stage, by_rank in states.items():
        for name in sorted(set(by_rank[0]) - {"python"}):
            agree(f"state of {name} after {stage}", {rank: state[name] for rank, state in by_rank.items()})


@pytest.mark.only(layout="dp2")  # with tensor parallelism each rank holds another part
def test_weights(ranks: Ranks) -> None:
    """Every rank holds the checkpoint's weights."""
    found = ranks.wait("weights")
    sums = {rank: value(report["engine"]) for rank, report in found.items()}
    agree("checksum of the weights", sums)
    wanted = value(found[0]["checkpoint"])
    if sums[0] != wanted:
        raise OracleError("weights-differ", f"checksum of the checkpoint {wanted}, of the engines {sums[0]}")


def test_barriers(ranks: Ranks, events: Events) -> None:
    """No rank leaves before the last one has entered; what that costs is a metric."""
    idle = ranks.wait("idle")
    agree("numbers of barriers", {rank: found["barriers"] for rank, found in idle.items()})
    ranks.wait("finished")
    met = meetings(ranks.marks)
    waits = [met[n] for n in idle[0]["barriers"]]
    latency = [ms for meeting in waits for ms in meeting.latency.values()]
    events.metric("barrier.latency.median", statistics.median(latency), "ms")
    events.metric("barrier.latency.max", max(latency), "ms")
    events.metric("barrier.skew.median", statistics.median(meeting.skew for meeting in waits), "ms")
    for stage, after in (("start", "greedy"), ("greedy", "sampled"), ("sampled", "weights")):
        events.metric(f"barrier.skew.{stage}", met[ranks.wait(after)[0]["barrier"]].skew, "ms")


def test_ends(ranks: Ranks) -> None:
    """Every process ends by itself, with code 0, and leaves none behind."""
    codes = ranks.exits()
    if any(code is None for code in codes.values()):
        raise OracleError("hang", f"return codes after all work was done: {codes}")
    if any(codes.values()):
        raise OracleError("rank-died", f"return codes after all work was done: {codes}")
    left = ranks.left()
    if left:
        raise OracleError("left-behind", "; ".join(left))


def agree(what: str, by_rank: dict[int, Any]) -> None:
    if any(found != by_rank[0] for found in by_rank.values()):
        raise OracleError("ranks-differ", f"{what}: {each(by_rank)}")


def outputs(ranks: Ranks, stage: str, batch: str) -> dict[int, Outputs]:
    """What each rank answered; NotAvailable when the model could not be asked."""
    found = {rank: report["batches"] for rank, report in ranks.wait(stage).items()}
    if batch not in found[0]:
        raise NotAvailable("the model takes no images", "vision_config in config.json")
    return {rank: Reference({"w1": answers}).outputs(batch) for rank, answers in found.items()}


def compare(answers: dict[int, Outputs], want: Outputs, tolerance: float, events: Events) -> None:
    """Every rank's ids equal ``want``; the message names the rank, ties are recorded."""
    for rank, got in answers.items():
        try:
            ties = oracles.ids_equal(got, want, tolerance)
        except OracleError as exc:
            raise OracleError(exc.reason, f"rank {rank}: {exc}") from exc
        if ties:
            events.property(f"ties.rank{rank}", [str(tie) for tie in ties])
