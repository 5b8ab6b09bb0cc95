"""Oracles: each says yes to what is right and no, with its reason, to what is nearly right."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rig import oracles, reference
from rig.batches import BATCHES, Prompt, batches_for, repainted
from rig.cell import Cell, CellError, read_cell
from rig.completion import Completion
from rig.outcomes import OracleError


def done(*ids: int, finish: str | None = "length", prompt: int = 4, gaps: tuple[float, ...] = ()) -> Completion:
    top2 = tuple((-0.5, -0.5 - gap) for gap in gaps or (1.0,) * len(ids))
    return Completion(tuple(ids), finish, prompt, (), top2)


def reason(check: Callable[..., Any], *args: Any) -> str:
    with pytest.raises(OracleError) as info:
        check(*args)
    return info.value.reason


def test_counts() -> None:
    oracles.counts([[done(1), done(2, finish="stop")]], prompts=1, n=2)
    assert reason(oracles.counts, [[done(1)]], 2) == "count"
    assert reason(oracles.counts, [[done(1)], [done(1)]], 1) == "count"  # a request left behind by an earlier failure
    assert reason(oracles.counts, [[done(1)]], 1, 2) == "count"
    assert reason(oracles.counts, [[done()]], 1) == "empty"
    assert reason(oracles.counts, [[done(1, finish="abort")]], 1) == "finish"
    assert reason(oracles.counts, [[done(1, finish=None)]], 1) == "finish"


def test_equal_ids_have_no_ties() -> None:
    assert oracles.ids_equal([[done(1, 2)]], [[done(1, 2)]], 1e-4) == []


def test_a_difference_is_named() -> None:
    got, want = [[done(1)], [done(5, 7)]], [[done(1)], [done(5, 6, gaps=(0.5, 0.25))]]
    with pytest.raises(OracleError, match=r"prompt 1 completion 0 position 1: 7 instead of 6, gap .* 0.25") as info:
        oracles.ids_equal(got, want, 1e-4)
    assert info.value.reason == "ids-differ"


def test_a_tie_is_recorded_and_excuses_what_follows() -> None:
    ties = oracles.ids_equal([[done(5, 7, 8)]], [[done(5, 6, 9, gaps=(1.0, 1e-6, 1.0))]], 1e-4)
    assert [(tie.position, tie.got, tie.want) for tie in ties] == [(1, 7, 6)]


def test_the_gap_that_counts_is_at_the_first_divergence() -> None:
    assert reason(oracles.ids_equal, [[done(7, 7)]], [[done(6, 6, gaps=(1.0, 1e-6))]], 1e-4) == "ids-differ"


def test_a_gap_as_wide_as_the_tolerance_is_no_tie() -> None:
    want = [[Completion((6,), "length", 4, (), ((-1.0, -1.5),))]]
    assert reason(oracles.ids_equal, [[done(7)]], want, 0.5) == "ids-differ"


def test_a_tie_does_not_excuse_another_prompt() -> None:
    got = [[done(7)], [done(7)]]
    want = [[done(6, gaps=(1e-6,))], [done(6, gaps=(1.0,))]]
    with pytest.raises(OracleError, match="1 of 2 differ, first: prompt 1"):
        oracles.ids_equal(got, want, 1e-4)


@pytest.mark.parametrize(("got", "want"), [((1,), (1, 2)), ((1, 2), (1,))])
def test_a_shorter_answer_differs(got: tuple[int, ...], want: tuple[int, ...]) -> None:
    assert reason(oracles.ids_equal, [[done(*got)]], [[done(*want)]], 1e-4) == "ids-differ"


def test_without_log_probabilities_there_is_no_tie() -> None:
    assert reason(oracles.ids_equal, [[done(7)]], [[Completion((6,), "length", 4)]], 1e9) == "ids-differ"


def test_ids_equal_compares_counts_first() -> None:
    assert reason(oracles.ids_equal, [[done(1)]], [[done(1)], [done(1)]], 1e-4) == "count"


def test_prompt_lengths() -> None:
    oracles.lengths_equal([[done(1, prompt=3)], [done(1, prompt=9)]], [3, 9])
    assert reason(oracles.lengths_equal, [[done(1, prompt=3)]], [4]) == "prompt-length"


def test_banned_ids_come_from_the_config() -> None:
    banned = oracles.banned_ids({"image_token_id": 318, "video_token_id": 319, "eos_token_id": 1, "vocab_size": 320})
    assert banned == {318, 319}
    oracles.none_sampled([[done(1, 2)]], banned)
    assert reason(oracles.none_sampled, [[done(1)], [done(1, 318)]], banned) == "banned-id"


def test_another_picture_must_move_every_answer() -> None:
    same, other, shifted = done(1), done(2), done(1, gaps=(1.5,))
    assert oracles.all_moved([[other], [shifted]], [[same], [same]], 1e-4) == 1
    assert reason(oracles.all_moved, [[other], [same]], [[same], [same]], 1e-4) == "image-ignored"
    assert reason(oracles.all_moved, [[done(1, gaps=(1.00001,))]], [[same]], 1e-4) == "image-ignored"


def cell(tmp_path: Path, **changed: Any) -> Cell:
    fields: dict[str, Any] = {
        **dict.fromkeys(("id", "target", "vllm", "device", "scenario", "file"), "x"),
        "params": {"model": "m"},
        "options": {"dtype": "float32"},
        "seed": 0,
        "ranks": 1,
        **dict.fromkeys(("inputs", "out", "models"), tmp_path),
    }
    return Cell(**{**fields, **changed})


def test_the_reference_comes_back_as_it_went(tmp_path: Path) -> None:
    outputs = [[done(5, 9)]]
    batches = {"text": reference.answered(outputs), "mixed": reference.raised(RuntimeError("shape"))}
    (tmp_path / "reference.json").write_bytes(reference.dump_reference(cell(tmp_path), {"w1": batches}))
    found = reference.read_reference(cell(tmp_path))
    assert found.outputs("text") == outputs
    assert reason(found.outputs, "text", "w2") == "no-reference"
    assert reason(found.outputs, "mixed") == "reference-raised"
    assert reason(found.outputs, "absent") == "no-reference"


def test_a_reference_of_something_else_is_refused(tmp_path: Path) -> None:
    assert reason(reference.read_reference, cell(tmp_path)) == "no-reference"
    (tmp_path / "reference.json").write_bytes(reference.dump_reference(cell(tmp_path), {}))
    other = cell(tmp_path, options={"dtype": "bfloat16"})
    assert reason(reference.read_reference, other) == "reference-mismatch"


def test_pictures_are_the_same_everywhere() -> None:
    """Pinned: a picture that drifts with a library's version would make references of two hosts differ."""
    image = Prompt("", ((30, 41, 3),)).images[0]
    assert image.size == (30, 41)
    assert image.mode == "RGB"
    assert zlib.crc32(image.tobytes()) == 633488221


def test_batches() -> None:
    assert list(BATCHES)[-1] == "mixed"
    assert [batch.name for batch in batches_for(multimodal=False)] == ["text", "long"]
    assert {batch.name for batch in batches_for(multimodal=True)} == set(BATCHES)
    first, second = BATCHES["two_images"].prompts[0].pictures
    assert repainted(BATCHES["two_images"], 1).prompts[0].pictures == (first, (*second[:2], second[2] + 8))


def test_a_cell_that_is_none_says_why(tmp_path: Path) -> None:
    folders = {f"VLLM_MATRIX_{name}": str(tmp_path) for name in ("IN", "OUT", "MODELS")}
    with pytest.raises(CellError, match="VLLM_MATRIX_IN"):
        read_cell({})
    with pytest.raises(CellError, match=r"cell\.json"):
        read_cell(folders)
    for text, message in (
        ('{"schema": 2}', "schema 2"),
        ("{}", "missing: schema"),
        ("[]", "cell.json"),
        ("{", "JSON|Expecting"),
    ):
        (tmp_path / "cell.json").write_text(text)
        with pytest.raises(CellError, match=message):
            read_cell(folders)
