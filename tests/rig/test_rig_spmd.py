"""The scenario of ranks against a scripted vLLM: sound ranks pass, and one that is not like the other is seen."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rig import weights

from tests.rig.run import Ran, run_cell

SPMD = "test_spmd_barriers.py"
COMPARED = ("greedy[text]", "greedy[one_image]", "greedy[two_images]")
COLD = tuple(name.replace("greedy", "cold_start") for name in COMPARED)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_cell(tmp_path_factory.mktemp("cold"), "test_cold_start.py").out / "artifacts" / "reference.json"


def spmd(
    folder: Path, reference: Path, layout: str = "dp2", silence: float = 30.0, device: str = "cpu", **fake: Any
) -> Ran:
    (folder / "in").mkdir()
    shutil.copy(reference, folder / "in" / "reference.json")
    fields = {"params": {"layout": layout, "model": "tiny"}, "ranks": 2, "device": device}
    return run_cell(folder, SPMD, fake=fake, deadlines={"total": 60.0, "silence": silence}, **fields)


def bad(ran: Ran) -> dict[str, str]:
    """Message of every check that raised."""
    return {check: end["error"]["message"] for check, end in ran.ends.items() if end["outcome"] == "raised"}


def reasons(ran: Ran) -> set[str]:
    return {end["reason"] for end in ran.ends.values() if end["outcome"] == "raised"}


@pytest.mark.parametrize("layout", ["dp2", "tp2"])
@pytest.mark.parametrize("core", ["v0", "v1"])
def test_sound_ranks_pass(tmp_path: Path, reference: Path, layout: str, core: str) -> None:
    ran = spmd(tmp_path, reference, layout, core=core, inproc=True)
    assert bad(ran) == {}
    assert list(ran.outcomes) == ran.of("plan")[0]["checks"]
    unasked = {check for check, outcome in ran.outcomes.items() if outcome != "passed"}
    assert unasked == {"devices"}
    metrics = {event["name"]: (event["value"], event["unit"]) for event in ran.of("metric")}
    assert metrics["barrier.latency.median"][0] >= 0
    assert {unit for _, unit in metrics.values()} == {"ms"}
    assert {event["rank"] for event in ran.events} == {0}
    assert '"rank":1' in (ran.out / "events.rank1.jsonl").read_text()


def test_what_lives_in_another_process_is_na(tmp_path: Path, reference: Path) -> None:
    """But for the number of blocks, which its worker is asked for."""
    ran = spmd(tmp_path, reference, core="v1", inproc=False)
    assert bad(ran) == {}
    unasked = {check for check, outcome in ran.outcomes.items() if outcome == "na"}
    assert unasked == {"devices", "weights", "random_state"}


@pytest.mark.parametrize(("layout", "red"), [("dp2", {}), ("tp2", {"kv_blocks": "KV blocks: rank 0: 64; rank 1: 63"})])
def test_only_ranks_of_one_engine_must_have_as_many_blocks(
    tmp_path: Path, reference: Path, layout: str, red: dict[str, str]
) -> None:
    """Engines of their own measure each what memory there is."""
    ran = spmd(tmp_path, reference, layout, ranks={"1": ["fewer-blocks"]})
    assert {check: message for check, message in bad(ran).items() if check == "kv_blocks"} == red


@pytest.mark.parametrize(
    ("bug", "reddened", "reason", "named"),
    [
        ("drifts", {*COMPARED[1:], *COLD, "sampled"}, "ids-differ", "rank 1: "),
        ("samples-other", {"sampled"}, "ids-differ", "rank 1: "),
        ("other-seed", {"random_state"}, "ranks-differ", "state of numpy after start: rank 0: "),
        ("leaves-a-process", {"ends"}, "left-behind", ""),
        ("ends-badly", {"ends"}, "rank-died", "'rank 1': 3"),
    ],
)
def test_a_rank_that_is_not_like_the_other_is_seen(
    tmp_path: Path, reference: Path, bug: str, reddened: set[str], reason: str, named: str
) -> None:
    ran = spmd(tmp_path, reference, ranks={"1": [bug]})
    found = bad(ran)
    assert reddened <= set(found) <= reddened | {COMPARED[0]}
    assert reasons(ran) == {reason}
    assert all(named in message for message in found.values())


@pytest.mark.parametrize(("whose", "reason"), [({"1": ["one-weight-more"]}, "ranks-differ"), ({}, "weights-differ")])
def test_weights_that_are_not_the_checkpoints_are_seen(
    tmp_path: Path, reference: Path, whose: dict[str, Any], reason: str
) -> None:
    ran = spmd(tmp_path, reference, ranks=whose, bugs=[] if whose else ["one-weight-more"])
    assert ran.ends["weights"]["reason"] == reason
    assert set(bad(ran)) == {"weights", *COLD} | ({*COMPARED, "sampled"} if whose else set())


def test_a_rank_that_never_enters_is_a_finding_of_every_check_that_waits_for_it(
    tmp_path: Path, reference: Path
) -> None:
    ran = spmd(tmp_path, reference, silence=6.0, ranks={"1": ["hangs"]})
    found = bad(ran)
    assert reasons(ran) == {"hang"}
    assert {ran.outcomes["starts"], ran.outcomes["kv_blocks"]} == {"passed"}  # they had their answers
    assert set(COMPARED) | {"barriers", "ends"} <= set(found)
    assert found["ends"].startswith("last marks: rank 0: generate 0 leave") or "rank 1 did not come" in found["ends"]
    assert "rank 1: generate 0 enter" in found["ends"]
    assert "_misbehave" in (ran.out / "artifacts" / "stacks.rank1.txt").read_text()


def test_a_rank_that_dies_takes_no_check_along(tmp_path: Path, reference: Path) -> None:
    ran = spmd(tmp_path, reference, ranks={"1": ["dies"]})
    assert reasons(ran) == {"rank-died"}
    assert ran.of("down") == []
    assert all("rank 1 ended by SIGKILL" in message for message in bad(ran).values())


def test_what_vllm_raises_in_a_rank_is_told_with_its_frames(tmp_path: Path, reference: Path) -> None:
    error = spmd(tmp_path, reference, ranks={"1": ["init-raises"]}).ends["starts"]["error"]
    assert (error["type"], error["message"]) == ("ValueError", "rank 1: no such engine")
    assert ("rig", "engine.py") in {(frame["where"], frame["file"]) for frame in error["frames"]}


@pytest.mark.parametrize(
    ("bug", "reason"),
    [
        ("no-launcher", "no executor external_launcher (probed: EngineArgs("),
        ("falls-back", "the platform runs external_launcher as mp (probed: EngineArgs("),
    ],
)
def test_without_an_external_launcher_tp2_is_na(tmp_path: Path, reference: Path, bug: str, reason: str) -> None:
    ran = spmd(tmp_path, reference, "tp2", bugs=[bug])
    assert set(ran.outcomes.values()) == {"na"}
    assert all(end["reason"].startswith(reason) for end in ran.ends.values())


@pytest.mark.parametrize(("layout", "needed"), [("dp2", 1), ("tp2", 2)])
def test_without_devices_it_is_skipped(tmp_path: Path, reference: Path, layout: str, needed: int) -> None:
    ran = spmd(tmp_path, reference, layout, device="cuda")
    assert set(ran.outcomes.values()) == {"skipped"}
    assert all(f"a rank needs {needed} visible GPUs, here it sees 0" in end["reason"] for end in ran.ends.values())


def test_the_checksum_does_not_see_how_weights_are_cut_and_padded() -> None:
    bits = np.arange(1, 1001, dtype=np.uint16)
    whole = weights._mixed(bits)
    assert whole % (1 << 64) == (weights._mixed(bits[:300]) + weights._mixed(bits[300:])) % (1 << 64)
    assert weights._mixed(np.concatenate([bits[::-1], np.zeros(24, np.uint16)])) == whole
    changed = bits.copy()
    changed[500] ^= 1
    assert weights._mixed(changed) != whole
    assert weights._mixed(np.append(bits, bits[:1])) != whole
