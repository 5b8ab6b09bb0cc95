"""``cache_cycles`` against a scripted vLLM: sound engines pass, and each fault reddens the checks that are about it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from rig import cache
from rig.cell import Cell

from tests.rig.fakes import tiny
from tests.rig.run import Ran, run_cell
from tests.rig.test_rig_scenarios import COLD, bad

CYCLES = "test_cache_cycles.py"
V0 = {"core": "v0", "sleep": True, "bugs": []}
V1 = {"core": "v1", "sleep": True, "bugs": []}
DROPS = {
    f"{check}[{who}]" for check in ("drop_frees", "rebuilt_answers", "while_dropped") for who in ("worker", "layers")
}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Cold starts of both weight sets."""
    return run_cell(tmp_path_factory.mktemp("cold"), COLD).out / "artifacts" / "reference.json"


def cycles(folder: Path, reference: Path, mode: str, fake: dict[str, Any], *bugs: str) -> Ran:
    """One cell; the mode ``sleep`` has a scripted GPU."""
    (folder / "in").mkdir(parents=True)
    shutil.copy(reference, folder / "in" / "reference.json")
    gpu = mode == "sleep" and "refuses" not in fake
    script = {**fake, "bugs": [*fake["bugs"], *bugs], "sleep_mode": gpu}
    device = "cuda" if gpu else "cpu"
    return run_cell(folder, CYCLES, fake=script, device=device, params={"model": "tiny", "mode": mode})


def na(ran: Ran) -> set[str]:
    return {check for check, outcome in ran.outcomes.items() if outcome == "na"}


def red(ran: Ran) -> dict[str, str]:
    return {check: reason for check, reason in bad(ran).items() if check not in na(ran)}


def properties(ran: Ran, name: str) -> dict[str, Any]:
    """Its value by check."""
    return {event["check"]: event["value"] for event in ran.of("property") if event["name"] == name}


@pytest.mark.parametrize("bound", [False, True])
def test_a_sound_v0_passes(tmp_path: Path, reference: Path, bound: bool) -> None:
    """Where layers have a reference of their own to the KV cache, only dropping theirs too is sound."""
    ran = cycles(tmp_path, reference, "plain", V0, *(["layers-bound"] if bound else []))
    assert red(ran) == ({"drop_frees[worker]": "not-freed"} if bound else {})
    layers = set() if bound else {check for check in DROPS if "layers" in check}
    failing_step = set() if bound else {"after_failed_step"}
    assert na(ran) == layers | failing_step
    assert properties(ran, "stale") == {"without_reset[long]": True, "without_reset[one_image]": False}
    without = {False: "TypeError: 'NoneType' object is not subscriptable", True: "answered"}
    assert properties(ran, "while_dropped")["while_dropped[worker]"] == without[bound]
    assert properties(ran, "sleep.without_flag") == {
        "sleep_without_flag": "AssertionError: Sleep mode is not enabled in the model config"
    }


def test_a_sound_v1_passes(tmp_path: Path, reference: Path) -> None:
    """Its worker lives elsewhere, and has no cache engine that could be dropped."""
    ran = cycles(tmp_path, reference, "plain", V1)
    assert red(ran) == {}
    assert na(ran) == DROPS | {"after_failed_step"}
    assert set(properties(ran, "cache.path").values()) == {"collective_rpc"}
    assert "no cache_engine" in ran.ends["drop_frees[worker]"]["reason"]


def test_a_core_that_nobody_can_reach_into_is_na_where_that_is_needed(tmp_path: Path, reference: Path) -> None:
    """0.8.2 in a process of its own: it sleeps and answers, and takes no weights."""
    ran = cycles(tmp_path, reference, "plain", {**V1, "rpc": False})
    assert red(ran) == {}
    assert ran.outcomes["cold_start[long]"] == "passed"
    assert ran.ends["new_weights"]["outcome"] == "na"
    assert "without collective_rpc (probed: llm_engine.engine_core)" in ran.ends["new_weights"]["reason"]


@pytest.mark.parametrize("core", [V0, V1])
def test_sound_sleep_passes(tmp_path: Path, reference: Path, core: dict[str, Any]) -> None:
    ran = cycles(tmp_path, reference, "sleep", core)
    assert bad(ran) == {}
    assert "sleep_frees[2]" in ran.outcomes
    assert "drop_frees[worker]" not in ran.outcomes
    assert properties(ran, "level2.differs") == {"level2_without_reload": True}


def test_sleep_that_the_platform_refuses_is_na(tmp_path: Path, reference: Path) -> None:
    ran = cycles(tmp_path, reference, "sleep", {**V1, "refuses": True})
    assert set(ran.outcomes.values()) == {"na"}
    assert "Sleep mode is not supported" in ran.ends["sleep_frees[1]"]["reason"]


@pytest.mark.parametrize(
    ("bugs", "reddened"),
    [
        (["weights-not-loaded"], {"new_weights": "ids-differ"}),
        (["prefix-not-reset"], {"new_weights": "ids-differ"}),
        (["rebuild-garbage"], {f"{check}[worker]": "ids-differ" for check in ("rebuilt_answers", "while_dropped")}),
        (["lazy"], {"while_dropped[worker]": "ids-differ"}),
        (["flag-ignored"], {"sleep_without_flag": "freed"}),
        (
            ["mixed-raises", "never-aborts"],
            dict.fromkeys(["after_failed_step", "while_dropped[worker]"], "engine-died"),
        ),
        (["empty"], {"cold_start[text]": "empty", "new_weights": "empty", "rebuilt_answers[worker]": "empty"}),
    ],
)
def test_a_fault_reddens_its_checks(tmp_path: Path, reference: Path, bugs: list[str], reddened: dict[str, str]) -> None:
    found = red(cycles(tmp_path, reference, "plain", V0, *bugs))
    assert reddened.items() <= found.items()
    if "empty" not in bugs:
        assert found == reddened


@pytest.mark.parametrize(
    ("bug", "reddened"),
    [
        ("sleep-frees-nothing", {"sleep_frees[1]", "sleep_frees[2]", "tagged_wake"}),
        ("tags-ignored", {"tagged_wake"}),
        ("sleep-leaks", {"cycles"}),
        ("buffers-lost", {"level2_reloaded", "level2_new_weights"}),
        ("wake-loses", {"awake_answers", "tagged_wake", "cycles", "level2_new_weights"}),
        ("weights-not-loaded", {"new_weights", "level2_reloaded", "level2_new_weights"}),
        ("prefix-not-reset", {"new_weights", "level2_new_weights"}),
    ],
)
def test_a_fault_of_sleep_reddens_its_checks(tmp_path: Path, reference: Path, bug: str, reddened: set[str]) -> None:
    found = red(cycles(tmp_path, reference, "sleep", V1, bug))
    assert set(found) == reddened
    memory = {"sleep-frees-nothing": "not-freed", "tags-ignored": "not-freed", "sleep-leaks": "grows"}
    assert set(found.values()) == {memory.get(bug, "ids-differ")}


def test_a_failed_step_leaves_nothing_behind(tmp_path: Path, reference: Path) -> None:
    ran = cycles(tmp_path, reference, "plain", V0, "mixed-raises")
    assert ran.outcomes["after_failed_step"] == "passed"
    assert properties(ran, "engine.aborted")["after_failed_step"] == 4


def test_an_engine_beyond_repair_is_replaced(tmp_path: Path, reference: Path) -> None:
    """Level 2 loses what no reload brings back: the checks after it must not inherit that."""
    ran = cycles(tmp_path, reference, "sleep", V1, "buffers-lost")
    assert ran.outcomes["cycles"] == "passed"


def test_an_engine_that_slept_in_this_process_is_replaced_in_a_fresh_one(tmp_path: Path, reference: Path) -> None:
    """Sleep mode is for one engine a process (vLLM 0.8.2 on an H200)."""
    ran = cycles(tmp_path, reference, "sleep", {**V1, "inproc": True}, "buffers-lost")
    lost = {check for check in ran.outcomes if "level2_" in check and "without" not in check}
    assert set(red(ran)) == lost
    assert set(red(ran).values()) == {"ids-differ"}
    replaced = properties(ran, "worker.replaced")
    assert set(replaced.values()) == {"engine-spent"}
    assert {"sleep_frees[2]"} <= set(replaced) == set(properties(ran, "engine.beyond_repair"))
    assert ran.of("down") == []
    assert (ran.code, ran.outcomes["cycles"]) == (0, "passed")


def test_weight_sets_that_answer_alike_prove_nothing(tmp_path: Path, reference: Path) -> None:
    import json

    found = json.loads(reference.read_text())
    found["weights"]["w2"] = found["weights"]["w1"]
    (tmp_path / "alike.json").write_text(json.dumps(found))
    ran = cycles(tmp_path / "cell", tmp_path / "alike.json", "plain", V1)
    assert red(ran) == {"new_weights": "weights-alike"}


def test_a_cache_that_nobody_can_overlook(fake_vllm: Any, out: Path) -> None:
    """1 GiB by the engine's block size of 16; on the CPU the cell's environment says how much."""
    fake_vllm(sleep=True)
    cell = Cell("c", "t", "0", "cuda", "s", "f", {}, {}, 0, 1, out, out, out)
    assert cache.token_bytes(tiny.CONFIG, "bfloat16") == 2 * 8 * 8 * 128 * 2
    assert (
        cache.token_bytes({"text_config": {**tiny.CONFIG, "num_key_value_heads": 2}}, "float32") == 2 * 8 * 2 * 128 * 4
    )
    assert cache.options(cell, tiny.CONFIG) == {
        "enable_prefix_caching": True,
        "num_gpu_blocks_override": 2048,
    }


def test_no_prefixes_where_nothing_could_forget_them(fake_vllm: Any) -> None:
    fake_vllm()
    assert "reset_prefix_cache" in str(cache.no_prefix_caching("cuda"))
