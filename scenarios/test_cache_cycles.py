"""Does an engine give its memory back, take it again, take new weights, and answer as if nothing had happened?

A training step as RL frameworks drive it: generate, give memory back, train, load weights, take memory, generate.
Half of the known faults raise nothing, so every check asserts an effect: bytes measured outside of the engine, and
token ids equal to a cold start of the weights that should be in it. Known: vllm#16564 and vllm#29341 (level 2 loses
buffers, or needs a reload), vllm#17103 and NVIDIA-NeMo/RL#97 (cached prefixes outlive their weights), vllm#42995 (the
picture caches of two processes disagree after a sleep), verl#1414 and verl#5738 (the flag has no effect).

The axis ``mode`` is the engine's configuration: ``plain``, and ``sleep`` with ``enable_sleep_mode``.
"""

from __future__ import annotations

import json
from typing import Any, Callable, Iterator

import pytest

from rig import cache, oracles
from rig.asker import Asker
from rig.cell import Cell
from rig.engine import Engine, load_vllm
from rig.events import Events
from rig.fixtures import Engines
from rig.memory import Meter
from rig.outcomes import NotAvailable, OracleError
from rig.reference import Reference

# ``long`` is longer than a block of the KV cache, so that its prefix is cached; the picture's encoding may be.
NAMES = ["text", "long", "one_image"]
CYCLES = 4

plain = pytest.mark.only(mode="plain")
sleeping = pytest.mark.only(mode="sleep")
by_whom = pytest.mark.parametrize("layers", [False, True], ids=["worker", "layers"])


@pytest.fixture(scope="module")
def config(cell: Cell) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((cell.model_dir() / "config.json").read_text(encoding="utf-8"))
    return loaded


@pytest.fixture(scope="module")
def engine_options(cell: Cell, config: dict[str, Any]) -> dict[str, Any]:
    load_vllm(cell.device)
    wanted = cache.options(cell, config)
    return {**wanted, "enable_sleep_mode": True} if cell.params["mode"] == "sleep" else wanted


@pytest.fixture
def ask(engine: Engine, cell: Cell, processor: Any, reference: Reference, events: Events) -> Asker:
    return Asker(engine, processor, reference, oracles.TOLERANCE[cell.dtype], events)


@pytest.fixture
def cycle(ask: Asker, cell: Cell, engines: Engines, events: Events) -> Iterator[cache.Cycle]:
    """The engine as it was started: what a check leaves behind is undone, or the next check gets a fresh engine.

    Undone is what answers as a cold start again: buffers that a sleep has lost come back with no reload.
    """
    driven = cache.Cycle(ask.engine, cell)
    yield driven
    try:
        if driven.touched and ask.engine.alive:
            driven.restore()
            ask.same("text", "one_image")
    except Exception as exc:  # the check has spoken already; that its engine is beyond repair is a fact beside it
        events.property("engine.beyond_repair", f"{type(exc).__name__}: {exc}")
        engines.give_up()


@pytest.fixture
def meter(cycle: cache.Cycle, cell: Cell, config: dict[str, Any], events: Events) -> Meter:
    return Meter(events, cell.device, cycle.kv_bytes(config))


@pytest.mark.parametrize("name", NAMES)
def test_cold_start(name: str, ask: Asker) -> None:
    """Twice: the second time prefixes and pictures come out of caches."""
    ask.same(name, name)


def test_new_weights(ask: Asker, cycle: cache.Cycle) -> None:
    _require_two_weight_sets(ask.reference)
    ask.same(*NAMES)  # the caches are full of what weights w1 have computed
    cycle.load("w2")
    cycle.reset()
    ask.same(*NAMES, weights="w2")


@plain
@pytest.mark.parametrize("name", ["long", "one_image"])
def test_without_reset(name: str, ask: Asker, cycle: cache.Cycle, events: Events) -> None:
    """No failure: whoever loads weights has to reset. Says whether this version has something to reset (``stale``)."""
    _require_prefix_caching(ask.engine)
    ask.same(name)
    cycle.load("w2")
    events.property("stale", ask.differs(name, weights="w2"))


@plain
def test_sleep_without_flag(ask: Asker, cycle: cache.Cycle, meter: Meter, events: Events) -> None:
    """Refused, or without effect: memory that nobody asked back must stay, and so must the answers (verl#1414)."""
    before = meter.used("awake")
    refusal = _raised(lambda: cycle.sleep(1))
    events.property("sleep.without_flag", refusal or "accepted")
    meter.keeps("unflagged", before)
    if refusal:
        cycle.asleep.clear()
    else:
        cycle.wake()
    ask.same(*NAMES)


@plain
@by_whom
def test_drop_frees(layers: bool, cycle: cache.Cycle, meter: Meter) -> None:
    before = meter.used("held")
    cycle.drop(layers)
    meter.frees("dropped", before)


@plain
@by_whom
def test_rebuilt_answers(layers: bool, ask: Asker, cycle: cache.Cycle, meter: Meter) -> None:
    for _ in range(CYCLES):
        cycle.drop(layers)
        cycle.rebuild()
        ask.same("text", "one_image")
        meter.used("rebuilt")
    meter.level("rebuilt")


@plain
@by_whom
def test_while_dropped(layers: bool, ask: Asker, cycle: cache.Cycle, events: Events) -> None:
    """Without its KV cache an engine refuses, or (where the drop had no effect) answers right: never wrong.

    That a drop has no effect is the fault that ``drop_frees`` finds; here it shows as ``while_dropped=answered``.
    """
    cycle.drop(layers)
    refusal = _raised(lambda: ask.same("text"))
    events.property("while_dropped", refusal or "answered")
    _require_alive(ask.engine, refusal)
    cycle.rebuild()
    ask.same(*NAMES)


@plain
def test_after_failed_step(ask: Asker, cycle: cache.Cycle, events: Events) -> None:
    """V0 keeps a request that failed in step(), and would answer it in the next generate() (see engine.aborted)."""
    failure = _fail_a_step(ask, cycle)
    events.property("failed_step", failure)
    _require_alive(ask.engine, failure)
    cycle.restore()
    ask.same(*NAMES)


@sleeping
@pytest.mark.parametrize("level", [1, 2])
def test_sleep_frees(level: int, cycle: cache.Cycle, meter: Meter) -> None:
    before = meter.used("awake")
    cycle.sleep(level)
    meter.frees("asleep", before)


@sleeping
def test_awake_answers(ask: Asker, cycle: cache.Cycle) -> None:
    """The same prompts and the byte-identical picture on both sides of a sleep (vllm#17103, vllm#42995)."""
    ask.same(*NAMES)
    cycle.sleep(1)
    cycle.wake()
    ask.same(*NAMES)


@sleeping
def test_tagged_wake(ask: Asker, cycle: cache.Cycle, meter: Meter) -> None:
    """Weights first, so that a trainer can load them while the KV cache still takes no room (vllm#15500)."""
    before = meter.used("awake")
    cycle.sleep(1)
    meter.frees("asleep", before)
    cycle.wake("weights")
    meter.frees("weights_awake", before)
    cycle.wake("kv_cache")
    meter.used("all_awake")
    ask.same(*NAMES)


@sleeping
def test_level2_without_reload(ask: Asker, cycle: cache.Cycle, events: Events) -> None:
    """No failure: level 2 throws the weights away, by its documentation (vllm#29341)."""
    cycle.sleep(2)
    cycle.wake()
    events.property("level2.differs", ask.differs("text"))


@sleeping
def test_level2_reloaded(ask: Asker, cycle: cache.Cycle) -> None:
    """Parameters are all that a trainer sends: what else the model holds, wake_up has to restore (vllm#16564)."""
    ask.same(*NAMES)
    cycle.sleep(2)
    cycle.wake()
    cycle.load("w1")
    cycle.reset()
    ask.same(*NAMES)


@sleeping
def test_level2_new_weights(ask: Asker, cycle: cache.Cycle) -> None:
    """verl's order: weights awake, weights loaded, KV cache awake; all awake first where wake_up has no tags."""
    _require_two_weight_sets(ask.reference)
    ask.same(*NAMES)
    first, then = (("weights",), ("kv_cache",)) if cycle.has_tags else ((), None)
    cycle.sleep(2)
    cycle.wake(*first)
    cycle.load("w2")
    if then:
        cycle.wake(*then)
    cycle.reset()
    ask.same(*NAMES, weights="w2")


@sleeping
def test_cycles(ask: Asker, cycle: cache.Cycle, meter: Meter) -> None:
    """Neither the device's memory asleep grows nor the host's, where level 1 keeps the weights."""
    for _ in range(CYCLES):
        cycle.sleep(1)
        meter.used("asleep")
        cycle.wake()
        ask.same("text", "one_image")
    meter.level("asleep")


def _fail_a_step(ask: Asker, cycle: cache.Cycle) -> str:
    """What was raised by what is known to fail inside step(): text and pictures in one batch, or no KV cache."""
    failure = _raised(lambda: ask("mixed"))
    if failure is None:
        try:
            cycle.drop(layers=True)
        except NotAvailable as exc:
            raise NotAvailable("no step is known to fail", f"text and pictures in one batch; {exc.reason}") from exc
        failure = _raised(lambda: ask("text"))
    if failure is None:
        raise NotAvailable("no step is known to fail", "text and pictures in one batch; no KV cache")
    return failure


def _raised(action: Callable[[], object]) -> str | None:
    """What the engine raised, in words; an oracle's word is not the engine's and passes through."""
    try:
        action()
    except OracleError:
        raise
    except Exception as exc:
        return f"{type(exc).__name__}: {exc}"[:500]
    return None


def _require_alive(engine: Engine, failure: str | None) -> None:
    if not engine.alive:
        raise OracleError("engine-died", f"the engine did not survive: {failure}")


def _require_two_weight_sets(reference: Reference) -> None:
    """Else a weight update could not be seen."""
    for name in NAMES:
        if not oracles.divergences(reference.outputs(name, "w2"), reference.outputs(name)):
            raise OracleError("weights-alike", f"cold starts of w1 and w2 answer {name!r} alike")


def _require_prefix_caching(engine: Engine) -> None:
    if not engine.properties().get("engine.prefix_caching"):
        raise NotAvailable("no prefix is cached here", "engine.prefix_caching; see cache.prefixes")
