"""What the fuzzers share: a run's folder with damaged cells in it, its views, and what a view must never show."""

from __future__ import annotations

import io
import json
import re
import shutil
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

from markdown_it import MarkdownIt
from rich.console import Console, RenderableType

from harness import events as ev
from harness.cells import Cell, Deadlines, Resources
from harness.ending import read_memory
from harness.job import Context, Job
from harness.judge import Evidence
from harness.matrix import Matrix, build_matrix
from harness.plan import Planned
from harness.records import ExitState, Host, ImageRef, Revision, attempt_folder, records_of
from harness.targets import TargetFacts
from harness.views import terminal
from harness.views.html import html
from harness.views.jsonview import to_json
from harness.views.markdown import markdown
from harness.views.material import Material, gather

CORPUS = Path(__file__).parent / "corpus"
NOW = datetime(2026, 12, 1, tzinfo=UTC)
RUN = "20261130T120000Z-f022"
CLEAN = ExitState(started=True, exit_code=0)


def cell(number: int) -> Cell:
    return Cell(
        target="vllm-0.8.5",
        vllm="0.8.5",
        python="3.11",
        device="cpu",
        scenario="fuzz",
        file="test_fuzz.py",
        params={"case": str(number)},
        resources=Resources(cpus=1, memory=1 << 30, shm=1 << 20, gpus=0),
        deadlines=Deadlines(total=60, silence=30),
    )


def job(number: int) -> Job:
    planned = Planned(cell=cell(number), digest="d", facts={}, action="run", reason="", selected=True)
    return Job(planned=planned, number=1, image=ImageRef(tag="t", id="sha256:0"), reference=None)


def context(results: Path) -> Context:
    return Context(
        run=RUN,
        results=results,
        suite=results / "suite",
        models=results / "models",
        revision=Revision(version="0"),
        host=Host(machine="x86_64", cpus=2, memory=1 << 34),
        owner="",
    )


def attempt(results: Path, number: int) -> Path:
    return attempt_folder(results, RUN, cell(number).id, 1)


def matrix_of(results: Path, numbers: Sequence[int], targets: Sequence[TargetFacts] = ()) -> Matrix:
    """As `run` and `report` make it, from what lies in the run's folder."""
    records = records_of(results / "runs" / RUN)
    cells = [cell(number) for number in numbers]
    return build_matrix(RUN, cells, records, (), NOW, timedelta(days=3650), (), targets)


# --- views ------------------------------------------------------------------------------------------------------------

# What no view may hold: controls but newline and tab, surrogates, what turns the direction of the text around it.
_BIDI = {"\u061c", "\u200e", "\u200f", *map(chr, range(0x202A, 0x202F)), *map(chr, range(0x2066, 0x206A))}


def unsafe(text: str) -> str:
    """The characters of a text that must not reach anybody's screen."""
    found = {c for c in set(text) if (unicodedata.category(c) in ("Cc", "Cs") and c not in "\n\t") or c in _BIDI}
    return " ".join(sorted(f"U+{ord(c):04X}" for c in found))


def printed(what: RenderableType) -> str:
    console = Console(width=120, color_system=None, file=io.StringIO(), legacy_windows=False)
    with console.capture() as capture:
        console.print(what)
    return capture.get()


def texts(value: Any) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, part in value.items():
            yield from (key, *texts(part))
    elif isinstance(value, list):
        for part in value:
            yield from texts(part)


def check_terminal(matrix: Matrix, material: Material) -> None:
    text = printed(terminal.report(matrix))
    assert not unsafe(text), f"terminal: {unsafe(text)}"
    target = next(iter(matrix.targets), None)
    # of many only each fourth: `show` takes as long as all else
    for square in matrix.squares[:: 4 if len(matrix.squares) > 8 else 1]:
        shown = printed(terminal.cell_detail(square, "folder", target, material.stacks.get(square.cell.id, ())))
        assert not unsafe(shown), f"show: {unsafe(shown)}"


_MARKDOWN = MarkdownIt("commonmark", {"html": True}).enable("table")


def check_markdown(matrix: Matrix, material: Material) -> None:
    """As a renderer reads it: no tag, no link or picture, no heading of a cell's own."""
    text = markdown(matrix, material)
    text.encode()
    assert not unsafe(text), f"markdown: {unsafe(text)}"
    tokens = _MARKDOWN.parse(text)
    for before, token in pairwise([None, *tokens]):
        kinds = {token.type, *(child.type for child in token.children or ())}
        assert not kinds & {"html_block", "html_inline", "image"}, f"markdown: {kinds}"
        links = [str(child.attrs["href"]) for child in token.children or () if child.type == "link_open"]
        assert not any("fuzz" in link or not link.startswith("http") for link in links), f"markdown: {links}"
        heads = before is not None and before.type in ("heading_open", "th_open")
        assert not (heads and token.content == "fuzz"), "markdown: text broke out of its line"


def check_html(matrix: Matrix, material: Material) -> None:
    text = html(matrix, material, NOW)
    text.encode()
    assert not unsafe(text), f"html: {unsafe(text)}"
    assert "<fuzz" not in text, "html: a tag"
    assert '" fuzz="' not in text, "html: an attribute"
    assert not re.search(r"(href|src)=.?\s*(javascript|data:text)", text), "html: a link that runs"


def check_json(matrix: Matrix) -> None:
    text = to_json(matrix)
    text.encode()
    value = json.loads(text, parse_constant=_not_json)
    found = unsafe("".join(texts(value)))
    assert not found, f"json: {found}"


def _not_json(name: str) -> None:
    raise AssertionError(f"json: {name} is no JSON")


def check_views(matrix: Matrix, folder: Path) -> None:
    """All views render, and show nothing that a cell could harm a reader with."""
    material = gather(matrix, folder, folder)
    check_markdown(matrix, material)
    check_html(matrix, material)
    check_json(matrix)
    check_terminal(matrix, material)


# --- many cases in one run --------------------------------------------------------------------------------------------


@dataclass
class Batch:
    """Cases that are rendered together, since a page costs more than all that comes before it."""

    folder: Path
    build: Callable[[Path, int], None]  # results, seed: leaves the case's files in the run's folder
    targets: Callable[[Path], Sequence[TargetFacts]] = lambda run: ()

    def check(self, seeds: Sequence[int]) -> None:
        """Raises AssertionError that names the seed."""
        for seed in seeds:
            try:
                self.build(self.folder, seed)
            except Exception as error:
                raise AssertionError(again(seed, error)) from error
        try:
            self._views(seeds)
        except Exception:
            self._blame(seeds)
            raise
        finally:
            shutil.rmtree(self.folder / "runs", ignore_errors=True)

    def _views(self, seeds: Sequence[int]) -> None:
        run = self.folder / "runs" / RUN
        check_views(matrix_of(self.folder, seeds, self.targets(run)), run)

    def _blame(self, seeds: Sequence[int]) -> None:
        for seed in seeds:
            shutil.rmtree(self.folder / "runs", ignore_errors=True)
            self.build(self.folder, seed)
            try:
                self._views([seed])
            except Exception as error:
                raise AssertionError(again(seed, error)) from error


def again(seed: int, error: BaseException) -> str:
    """How to see a failure again."""
    return f"seed {seed}: {type(error).__name__}: {error!s:.500}\n  again: pytest tests/fuzz -n0 --seed {seed} --fuzz 1"


def evidence(out: Path, state: ExitState) -> Evidence:
    """As an attempt gathers it."""
    events, faults = ev.read_events(out)
    state = state.model_copy(update={"oom": read_memory(out)})
    return Evidence(events=events, faults=faults, done=ev.read_done(out), exit=state)
