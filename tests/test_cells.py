"""Ids, slugs, globs, selection."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.cells import Selection, matches, select, slug
from harness.errors import NothingSelectedError
from harness.plan import expand
from harness.spec import MatrixSpec

names = st.from_regex(re.compile(r"[A-Za-z0-9]+([._-][A-Za-z0-9]+){0,3}", re.ASCII), fullmatch=True)
identifiers = st.from_regex(re.compile(r"[a-z][a-z0-9]{0,4}(_[a-z0-9]{1,3}){0,2}", re.ASCII), fullmatch=True)


@st.composite
def cell_ids(draw: st.DrawFn) -> str:
    params = draw(st.dictionaries(identifiers, names, max_size=3))
    inside = ",".join(f"{key}={value}" for key, value in params.items())
    return f"{draw(names)}@{draw(names)}/{draw(identifiers)}" + (f"[{inside}]" if inside else "")


@given(cell_ids(), cell_ids())
def test_slug_is_injective(one: str, other: str) -> None:
    assert (slug(one) == slug(other)) == (one == other)


@given(cell_ids())
def test_slug_names_containers_and_folders(cell_id: str) -> None:
    assert re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", slug(cell_id))


@given(cell_ids(), cell_ids())
def test_an_exact_id_selects_itself_and_nothing_else(one: str, other: str) -> None:
    assert matches(one, one)
    assert matches(one, other) == (one == other)


def test_brackets_are_literal() -> None:
    assert matches("*[model=qwen2_vl]", "t@cpu/s[model=qwen2_vl]")
    assert not matches("*[abc]", "t@cpu/a")


def test_selectors_meet(spec: MatrixSpec) -> None:
    cells = expand(spec)
    chosen = select(cells, Selection(targets=["vllm-0.8.*"], ids=["*/cold_start*"]))
    assert [cell.id for cell in chosen] == [
        "vllm-0.8.5@cpu/cold_start[model=qwen2_vl]",
        "vllm-0.8.5@cpu/cold_start[model=qwen2_5_vl]",
    ]


@pytest.mark.parametrize(
    ("selection", "said"),
    [
        (Selection(ids=["vllm-0.8.5@cpu/cold_strat[model=qwen2_vl]"]), "vllm-0.8.5@cpu/cold_start[model=qwen2_vl]"),
        (Selection(targets=["vllm-0.85"]), "vllm-0.8.5"),
        (Selection(scenarios=["cold"]), "cold_start"),
    ],
)
def test_an_idle_selector_is_an_error_with_near_misses(spec: MatrixSpec, selection: Selection, said: str) -> None:
    with pytest.raises(NothingSelectedError) as raised:
        select(expand(spec), selection)
    assert said in str(raised.value)


def test_selectors_that_only_match_apart(spec: MatrixSpec) -> None:
    with pytest.raises(NothingSelectedError, match="no cell matches all"):
        select(expand(spec), Selection(targets=["vllm-0.8.5"], ids=["vllm-0.10.0@*"]))
