"""The adapter, against a scripted vLLM: probing, completions, and what it does after a failure."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rig import probe, worker
from rig.batches import BATCHES
from rig.completion import completions
from rig.engine import Engine, in_worker, resolve
from rig.outcomes import NotAvailable

from tests.rig.fakes import tiny
from tests.rig.run import SUITE, read_events

GREEDY = {"temperature": 0.0, "max_tokens": 4, "logprobs": 2}
TEXT = {"prompt": "hello"}
FakeVllm = Callable[..., Any]


def image_prompt() -> dict[str, Any]:
    return BATCHES["one_image"].requests(None)[0]


@pytest.fixture
def start(out: Path, tmp_path: Path, fake_vllm: FakeVllm) -> Callable[..., Engine]:
    (tmp_path / "config.json").write_text(json.dumps(tiny.CONFIG))

    def start(options: Mapping[str, Any] | None = None, **script: Any) -> Engine:
        fake_vllm(**script)
        return Engine(tmp_path, "cpu", {"dtype": "float32"} if options is None else options)

    return start


def test_a_completion_has_all_that_oracles_need(start: Callable[..., Engine]) -> None:
    prompt = image_prompt()
    (row,) = start().generate([prompt], {**GREEDY, "n": 2})
    assert len(row) == 2
    assert len(row[0].ids) == len(row[0].top2) == 4
    assert row[0].finish == "length"
    assert row[0].top2[0][0] > row[0].top2[0][1]
    pads = tiny.pads(prompt["multi_modal_data"]["image"][0])
    assert row[0].prompt_ids.count(tiny.PAD) == pads
    assert row[0].prompt_tokens == len(row[0].prompt_ids)


def test_completions_come_in_the_order_of_their_index() -> None:
    def row(index: int, token: int) -> Any:
        return SimpleNamespace(index=index, token_ids=(token,), finish_reason="stop", logprobs=None)

    request = SimpleNamespace(prompt_token_ids=[1, 2], outputs=[row(1, 8), row(0, 7)])
    assert [done.ids for done in completions(request)] == [(7,), (8,)]


@pytest.mark.parametrize(
    ("logprobs", "top2"),
    [
        ([{5: -0.1, 6: -2.0, 7: -9.0}], ((-0.1, -2.0),)),
        ([{5: 0.0, 6: -9.0}], ((0.0, -9.0),)),
        ([{5: 0.0, 6: float("-inf")}], ()),
        ([{5: -0.1}], ()),
        (None, ()),
    ],
)
def test_top2(logprobs: list[dict[int, float]] | None, top2: tuple[tuple[float, float], ...]) -> None:
    entries = logprobs and [{k: SimpleNamespace(logprob=v) for k, v in row.items()} for row in logprobs]
    row = SimpleNamespace(index=0, token_ids=(5,), finish_reason="stop", logprobs=entries)
    assert completions(SimpleNamespace(prompt_token_ids=None, outputs=[row]))[0].top2 == top2


@pytest.mark.parametrize("core", ["v0", "v1"])
def test_properties_say_which_path_was_taken(start: Callable[..., Engine], out: Path, core: str) -> None:
    found = start(core=core).properties()
    assert found["engine.core"] == core.upper()
    assert found["engine.layout"] == {"v0": "in-process", "v1": "SyncMPClient"}[core]
    assert found.get("engine.path.executor") == {"v0": "llm_engine.model_executor", "v1": None}[core]
    assert found["engine.kv_blocks"] == 64
    assert found["engine.dtype"] == "float32"
    assert (found["cap.wake_up"], found["cap.wake_up.tags"], found["cap.sleep"]) == (True, False, False)
    assert found["engine.options"] == [
        "dtype=float32",
        "enable_prefix_caching=False",
        "limit_mm_per_prompt={'image': 4}",
        "worker_extension_cls=rig.worker.Extension",
    ]
    assert "enforce_eager" in found["engine.options.dropped"]
    events = read_events(out)
    said = {event["name"]: event["value"] for event in events if event["type"] == "property"}
    assert said == found
    phases = [(event["name"], event["state"]) for event in events if event["type"] == "phase"]
    assert phases == [("import", "begin"), ("import", "end"), ("init", "begin"), ("init", "end")]


@pytest.mark.parametrize(("inproc", "rpc"), [(True, True), (True, False), (False, True)])
def test_a_worker_is_reached_directly_or_through_the_core(
    start: Callable[..., Engine], inproc: bool, rpc: bool
) -> None:
    """V1's front end is not told how many blocks its core has made, where that is a process of its own (0.8.5)."""
    engine = start(core="v1", inproc=inproc, rpc=rpc)
    assert probe.kv_blocks(engine._llm) == (64 if inproc else None)
    assert engine.properties()["engine.kv_blocks"] == 64
    path, facts = engine.drive("inspect", lambda llm: in_worker(llm, worker.facts))
    assert path == ("llm_engine.model_executor.driver_worker" if inproc else "collective_rpc")
    assert (facts["class"], facts["blocks"], facts["block_size"]) == ("FakeWorker", 64, 16)


def test_a_core_without_collective_rpc_is_not_available_and_its_engine_starts(
    start: Callable[..., Engine], out: Path
) -> None:
    """0.8.2, where LLM.collective_rpc is there and raises."""
    engine = start(core="v1", rpc=False)
    assert engine.properties()["cap.collective_rpc"]
    with pytest.raises(AttributeError, match="model_executor"):
        engine._llm.collective_rpc("rig_facts")
    with pytest.raises(NotAvailable, match=r"without collective_rpc \(probed: llm_engine\.engine_core\)"):
        in_worker(engine._llm, worker.facts)
    assert "engine.kv_blocks" not in {event["name"] for event in read_events(out) if event["type"] == "property"}
    assert engine.generate([TEXT], GREEDY)


def test_what_the_worker_does_not_know_either_is_left_out(start: Callable[..., Engine]) -> None:
    engine = start(core="v1", bugs=["blocks-unknown"])
    assert "engine.kv_blocks" not in engine.properties()
    assert engine.generate([TEXT], GREEDY)


@pytest.mark.parametrize(("core", "blocks"), [("v0", 64), ("v1", None)])
def test_a_version_without_worker_extensions_gets_none(
    start: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, core: str, blocks: int | None
) -> None:
    """0.6.3 has its worker in this process; where it lived elsewhere, there would be no way to it."""
    known = probe.engine_options
    monkeypatch.setattr(probe, "engine_options", lambda: known() - {"worker_extension_cls"})
    engine = start(core=core)
    found = engine.properties()
    assert "worker_extension_cls" in found["engine.options.dropped"]
    assert not any(option.startswith("worker_extension_cls") for option in found["engine.options"])
    assert found.get("engine.kv_blocks") == blocks
    if core == "v1":
        with pytest.raises(NotAvailable, match=r"no way into the worker \(probed: .*worker_extension_cls\)"):
            in_worker(engine._llm, worker.facts)


def test_workers_of_vllm_import_next_to_nothing_of_the_rig() -> None:
    """What each of them, in whichever process, imports by ``worker_extension_cls``."""
    code = "import sys, rig.worker; print(*sorted(name for name in sys.modules if name.split('.')[0] == 'rig'))"
    done = subprocess.run([sys.executable, "-S", "-c", code], cwd=SUITE, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["rig", "rig.checkpoint", "rig.worker"]


def test_an_option_of_the_cell_that_does_not_exist_is_not_available(start: Callable[..., Engine]) -> None:
    with pytest.raises(NotAvailable, match="no engine option enable_expert_parallel"):
        start({"enable_expert_parallel": True})


def test_sleep_mode_that_the_platform_refuses_is_not_available(start: Callable[..., Engine]) -> None:
    with pytest.raises(NotAvailable, match=r"Sleep mode is not supported on current platform\. \(probed: EngineArgs"):
        start({"enable_sleep_mode": True})


def test_what_drives_the_engine_is_marked_and_hides_nothing(start: Callable[..., Engine], out: Path) -> None:
    engine = start()
    assert engine.drive("look", lambda llm: llm.calls) == 0
    with pytest.raises(AttributeError):
        engine.drive("look", lambda llm: llm.absent)
    marks = [(event["name"], event["n"], event["state"]) for event in read_events(out) if event["type"] == "mark"]
    assert marks == [("look", n, state) for n in (0, 1) for state in ("enter", "leave")]


def test_a_sampling_option_that_does_not_exist_is_not_available(start: Callable[..., Engine]) -> None:
    with pytest.raises(NotAvailable, match="no sampling option bad_words"):
        start().generate([TEXT], {**GREEDY, "bad_words": []})


def test_a_model_that_is_not_in_the_registry_is_not_available(start: Callable[..., Engine]) -> None:
    with pytest.raises(NotAvailable, match=r"no model TinyVL .*get_supported_archs"):
        start(bugs=["no-model"])


def test_options_of_the_cell_win_over_wishes() -> None:
    known = frozenset({"dtype", "seed"})
    assert resolve({"seed": 1}, {"seed": 0, "dtype": "x", "odd": 1}, known) == ({"seed": 1, "dtype": "x"}, ["odd"])


def test_v0_answers_only_what_was_asked_after_a_failure(start: Callable[..., Engine], out: Path) -> None:
    """0.6.3-0.8.5: the outputs of a failed request come out of the next generate(), unless it is aborted."""
    engine = start(bugs=["mixed-raises"])
    with pytest.raises(RuntimeError, match="shape"):
        engine.generate([TEXT, image_prompt()], GREEDY)
    assert engine.alive
    assert len(engine.generate([TEXT], GREEDY)) == 1
    last = {event["name"]: event["value"] for event in read_events(out) if event["type"] == "property"}
    assert (last["engine.aborted"], last["engine.alive"]) == (2, True)


@pytest.mark.parametrize("inproc", [False, True])
def test_v1_is_dead_after_a_failure_in_its_core(start: Callable[..., Engine], inproc: bool) -> None:
    """In-process it would spin for ever in the next generate(), in a process of its own it is gone."""
    engine = start(core="v1", inproc=inproc, bugs=["mixed-raises"])
    with pytest.raises(Exception, match=r"shape|EngineCore"):
        engine.generate([TEXT, image_prompt()], GREEDY)
    assert not engine.alive


def test_generate_is_marked(start: Callable[..., Engine], out: Path) -> None:
    engine = start()
    for _ in range(2):
        engine.generate([TEXT], GREEDY)
    marks = [(event["n"], event["state"]) for event in read_events(out) if event["type"] == "mark"]
    assert marks == [(0, "enter"), (0, "leave"), (1, "enter"), (1, "leave")]


def test_close_ends_the_core(start: Callable[..., Engine]) -> None:
    engine = start(core="v1")
    resources = engine._llm.llm_engine.engine_core.resources
    engine.close()
    assert resources.engine_dead
    assert not engine.alive


def test_walk_stops_at_nothing() -> None:
    root = SimpleNamespace(a=SimpleNamespace(b=None, c=False))
    assert probe.walk(root, "a.b.x", "a.c") == ("a.c", False)
    assert probe.walk(root, "x", "a.b") is None
