"""The real scenario files against a scripted vLLM: they pass on a sound engine, and each bug reddens its checks."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.rig.run import Ran, run_cell

COLD = "test_cold_start.py"
ROLLOUT = "test_multimodal_rollout.py"


def bad(ran: Ran) -> dict[str, str]:
    """Reason, or exception type, of every check that did not pass."""
    ends = ran.ends.items()
    return {check: end["reason"] or end["error"]["type"] for check, end in ends if end["outcome"] != "passed"}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a sound cold start leaves."""
    ran = run_cell(tmp_path_factory.mktemp("cold"), COLD)
    checks = ["starts", "answers[text]", "answers[one_image]", "records", "second_weights"]
    assert ran.outcomes == dict.fromkeys(checks, "passed")
    return ran.out / "artifacts" / "reference.json"


def rollout(folder: Path, reference: Path | None, **fake: Any) -> Ran:
    (folder / "in").mkdir()
    if reference:
        shutil.copy(reference, folder / "in" / "reference.json")
    return run_cell(folder, ROLLOUT, fake=fake)


def test_reference_of_a_sound_engine(reference: Path) -> None:
    found = json.loads(reference.read_text())
    assert (found["schema"], found["model"], found["dtype"]) == (2, "tiny", "float32")
    batches = found["weights"]
    assert set(batches["w1"]) == set(batches["w2"])
    assert all("outputs" in batch for weights in batches.values() for batch in weights.values())
    first, second = (batches[weights]["text"]["outputs"][0][0] for weights in ("w1", "w2"))
    assert set(first) == {"ids", "finish", "prompt_tokens", "top2"}
    assert first["ids"] != second["ids"]


def test_a_second_cold_start_that_dies_costs_its_check_only(tmp_path: Path) -> None:
    ran = run_cell(tmp_path, COLD, fake={"bugs": ["other-weights-die"]})
    assert bad(ran) == {"second_weights": "no-answer"}
    assert list(json.loads((ran.out / "artifacts" / "reference.json").read_text())["weights"]) == ["w1"]


def test_a_batch_that_raises_is_kept_and_fails_nothing(tmp_path: Path) -> None:
    ran = run_cell(tmp_path, COLD, fake={"bugs": ["mixed-raises"]})
    assert bad(ran) == {}
    batches = json.loads((ran.out / "artifacts" / "reference.json").read_text())["weights"]["w1"]
    assert batches["mixed"]["error"]["type"] == "RuntimeError"
    assert any(event["name"] == "batch.mixed.raised" for event in ran.of("property"))


@pytest.mark.parametrize("core", ["v0", "v1"])
def test_a_sound_engine_passes(tmp_path: Path, reference: Path, core: str) -> None:
    ran = rollout(tmp_path, reference, core=core)
    assert bad(ran) == {}
    assert len(ran.ends) == len(ran.of("plan")[0]["checks"])


@pytest.mark.parametrize(
    ("bug", "reddened", "reason"),
    [
        ("image-ignored", {"image_matters[one_image-0]", "cold_start[one_image]"}, None),
        ("second-image-ignored", {"image_matters[two_images-1]"}, "image-ignored"),
        ("one-pad-more", {"prompt_length[sizes]", "prompt_length[token_ids]", "mixed_batch"}, "prompt-length"),
        ("drifts", {"repeat[text]", "cold_start[sizes]"}, "ids-differ"),
        ("pad-sampled", {"one_image", "sizes"}, "banned-id"),
        ("empty", {"text", "n"}, "empty"),
        ("mixed-raises", {"cold_start[mixed]", "mixed_batch"}, "RuntimeError"),
    ],
)
def test_a_bug_reddens_its_checks(tmp_path: Path, reference: Path, bug: str, reddened: set[str], reason: str) -> None:
    found = bad(rollout(tmp_path, reference, bugs=[bug]))
    assert reddened <= set(found)
    assert {found[check] for check in reddened} == ({reason} if reason else {"image-ignored", "ids-differ"})
    if bug == "mixed-raises":
        assert set(found) == reddened


def test_without_a_reference_only_the_comparison_fails(tmp_path: Path) -> None:
    found = bad(rollout(tmp_path, None))
    assert set(found.values()) == {"no-reference"}
    assert all(check.startswith("cold_start[") for check in found)


def test_v1_gets_a_fresh_engine_after_one_died(tmp_path: Path, reference: Path) -> None:
    counter = tmp_path / "inits"
    ran = rollout(tmp_path, reference, core="v1", bugs=["mixed-raises"], counter=str(counter))
    assert bad(ran) == {"cold_start[mixed]": "EngineDeadError", "mixed_batch": "EngineDeadError"}
    assert counter.read_text().splitlines() == ["init", "init"]


def test_a_killed_process_costs_its_check_only(tmp_path: Path, reference: Path) -> None:
    ran = rollout(tmp_path, reference, bugs=["mixed-kills"])
    assert [event["check"] for event in ran.of("down")] == ["cold_start[mixed]", "mixed_batch"]
    assert set(ran.outcomes.values()) == {"passed"}


def test_an_engine_that_does_not_start_is_tried_once(tmp_path: Path, reference: Path) -> None:
    counter = tmp_path / "inits"
    ran = rollout(tmp_path, reference, bugs=["init-raises"], counter=str(counter))
    assert counter.read_text() == "init\n"
    assert {(end["error"]["type"], end["error"]["message"]) for end in ran.ends.values()} == {
        ("ValueError", "no such engine")
    }
    frames = [end["error"]["frames"] for end in ran.ends.values()]
    assert {(row[-1]["where"], row[-1]["function"]) for row in frames} == {("site", "__init__")}
    assert len({len(row) for row in frames[1:]}) == 1  # remembered, not grown with every check


def test_a_model_that_does_not_exist_is_na(tmp_path: Path) -> None:
    ran = run_cell(tmp_path, COLD, fake={"bugs": ["no-model"]})
    assert set(ran.outcomes.values()) == {"na"}
