"""Answers of targets beside their predecessors': kinds, ties, order, damaged references, and the verb's exit codes."""

from __future__ import annotations

import hashlib
import json
import random
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from harness.cells import Cell
from harness.cli import app
from harness.drift import TOLERANCE, Drift, Kind, drift
from harness.errors import NothingSelectedError
from harness.plan import Planned
from harness.planfile import write_plan
from harness.project import Project, load_project
from harness.records import Record, attempt_folder, write_record
from harness.references import MAX_REFERENCE, Answered, Reference, read_references
from harness.views import drift as view
from tests.conftest import ROOT
from tests.nights import make_project, plain_record

RUN = "20261130T020000Z-0001"
FAR, NEAR = (-0.5, -2.0), (-0.7, -0.70001)  # of float32: no tie, a tie


def done(*ids: int, top2: Sequence[Sequence[float]] | None = None, prompt: int = 9) -> dict[str, Any]:
    pairs = [list(FAR)] * len(ids) if top2 is None else [list(pair) for pair in top2]
    return {"ids": list(ids), "finish": "length", "prompt_tokens": prompt, "top2": pairs}


def batch(*completions: dict[str, Any]) -> dict[str, Any]:
    return {"outputs": [[one] for one in completions]}


RAISED = {"error": {"type": "RuntimeError", "message": "shape\nis \x1b[31minvalid"}}
PLAIN = batch(done(1, 2, 3))


def document(text: Any = PLAIN, **more: Any) -> dict[str, Any]:
    return {"schema": 2, "model": "tiny", "dtype": "float32", "weights": {"w1": {"text": text, **more}}}


@pytest.fixture
def project(tmp_path: Path) -> Project:
    """Versions 0.1.0, 0.10.0 and 0.3.0; s0 is what s1 has its references from."""
    root = tmp_path / "project"
    make_project(root)
    path = root / "matrix.toml"
    text = path.read_text().replace("[scenarios.s1]\n", '[scenarios.s1]\nreference = "s0"\n')
    path.write_text(text.replace("0.2.0", "0.10.0"))
    return load_project(path)


def cells_of(project: Project) -> list[Cell]:
    return [cell for cell in project.cells if cell.scenario == "s0"]


def answered(project: Project, documents: Sequence[Mapping[str, Any]], **axes: str) -> list[Answered]:
    common = {"device": "cpu/x86_64", "model": "tiny", "dtype": "float32", **axes}
    return [
        Answered(cell=cell, axes=common, reference=Reference.model_validate_json(json.dumps(one)))
        for cell, one in zip(cells_of(project), documents, strict=False)
    ]


def between(project: Project, before: Any, after: Any) -> Drift:
    """One version answered `before`, the next one `after`, to the batch `text`."""
    return drift("run", answered(project, [document(before), document(after)]))


@pytest.mark.parametrize(
    ("before", "after", "kind", "position", "off"),
    [
        (done(1, 2, 3), done(1, 2, 3), Kind.EQUAL, None, 0.0),
        (done(1, 2, 3), done(1, 7, 3), Kind.TOKENS, 1, 0.0),
        (done(1, 2, top2=[FAR, NEAR]), done(1, 7, top2=[FAR, NEAR]), Kind.TIE, 1, 0.0),
        (done(1, 2, top2=[NEAR, FAR]), done(1, 7, top2=[NEAR, NEAR]), Kind.TOKENS, 1, 0.2),  # the predecessor's gap
        (done(1, 2, top2=[]), done(1, 7, top2=[]), Kind.TOKENS, 1, None),  # an unknown gap excuses nothing
        (done(1, 2), done(1), Kind.TOKENS, 1, 0.0),
        (done(1), done(1, 2), Kind.TOKENS, 1, 0.0),
        (done(1, 2), done(1, 2, top2=[FAR, (-0.6, -2.0)]), Kind.LOGPROBS, None, 0.1),
        (done(1, 2), done(1, 2, top2=[FAR, (-0.50001, -2.0)]), Kind.EQUAL, None, 0.00001),
        (done(1, 2), done(1, 2, top2=[FAR, (-0.5, -9.0)]), Kind.EQUAL, None, 0.0),  # the best one's is compared
        (done(1, 2, top2=[FAR, NEAR]), done(1, 7, top2=[(-0.6, -2.0), NEAR]), Kind.LOGPROBS, 1, 0.1),
        # what follows the first difference has another context
        (done(1, 2, 3, top2=[NEAR, FAR, FAR]), done(7, 2, 3, top2=[NEAR, FAR, (-9.0, -9.0)]), Kind.TIE, 0, 0.0),
        (done(1, top2=[NEAR]), done(2, top2=[NEAR], prompt=10), Kind.PROMPT, None, None),
    ],
)
def test_a_continuation(project: Project, before: Any, after: Any, kind: Kind, position: int | None, off: Any) -> None:
    found = between(project, batch(done(5), before), batch(done(5), after))
    first, second = found.pairs[0].findings
    assert (first.kind, first.place.prompt) == (Kind.EQUAL, 0)
    assert (second.kind, second.place.prompt, second.position) == (kind, 1, position)
    assert second.off == (off if off is None else pytest.approx(off, abs=1e-12))
    assert found.exit_code == (0 if kind in (Kind.EQUAL, Kind.TIE) else 1)


def test_the_tolerance_is_the_dtypes_and_itself_no_tie(project: Project) -> None:
    for dtype, tolerance in TOLERANCE.items():
        for gap, kind in ((tolerance * 0.99, Kind.TIE), (tolerance, Kind.TOKENS)):
            old, new = (document(batch(done(one, top2=[(0.0, -gap)]))) for one in (1, 2))
            found = drift("run", answered(project, [old, new], dtype=dtype))
            assert [one.kind for one in found.pairs[0].findings] == [kind], dtype
    unknown = drift("run", answered(project, [document(), document()], dtype="float8"))
    assert (len(unknown.pairs), len(unknown.left_out), unknown.exit_code) == (0, 2, 3)


def test_other_numbers_of_completions_drift_and_sampled_ones_are_no_matter(project: Project) -> None:
    fewer = between(project, batch(done(1), done(2)), batch(done(1)))
    assert [(one.kind, one.before, one.after) for one in fewer.pairs[0].findings] == [(Kind.COUNT, 2, 1)]
    assert fewer.exit_code == 1
    sampled = between(project, {"outputs": [[done(1), done(2)]]}, {"outputs": [[done(3), done(4)]]})
    assert (sampled.pairs[0].findings, sampled.exit_code) == ((), 3)
    assert between(project, {"outputs": [[done(1), done(2)]]}, batch(done(1))).exit_code == 1


def test_what_one_of_them_could_not_answer_is_said_and_no_drift(project: Project) -> None:
    old, new = document(mixed=RAISED, both=RAISED, gone=PLAIN), document(mixed=PLAIN, both=RAISED)
    pair = drift("run", answered(project, [old, new])).pairs[0]
    said = [(one.place.batch, one.before.partition(":")[0], one.after) for one in pair.turned]
    assert said == [("mixed", "raised RuntimeError", "answered"), ("gone", "answered", "absent")]
    assert (pair.unanswered, pair.drifts) == (1, False)
    assert between(project, RAISED, PLAIN).exit_code == 3  # nothing that both answered


def pairs(found: Drift) -> list[tuple[str, str]]:
    return [(pair.older.cell.vllm, pair.newer.cell.vllm) for pair in found.pairs]


def test_the_predecessor_is_the_next_older_version_with_equal_axes(project: Project) -> None:
    three = answered(project, [document()] * 3)
    assert pairs(drift("run", three)) == [("0.1.0", "0.3.0"), ("0.3.0", "0.10.0")]  # not as texts are in order
    for axis, value in (("gpu", "NVIDIA H200"), ("device", "cpu/aarch64"), ("model", "other"), ("dtype", "float16")):
        other = Answered(cell=three[2].cell, axes={**three[2].axes, axis: value}, reference=three[2].reference)
        found = drift("run", [*three[:2], other])
        assert pairs(found) == [("0.1.0", "0.10.0")], axis
        assert [one.cell for one in found.left_out] == [other.cell.id], axis
    python = Answered(cell=three[2].cell, axes={**three[2].axes, "python": "3.12.3"}, reference=three[2].reference)
    assert len(drift("run", [*three[:2], python]).pairs) == 2


def test_the_first_of_a_second_group_is_said_to_have_no_predecessor(project: Project) -> None:
    old, ten, three = answered(project, [document()] * 3)
    again = [Answered(cell=one.cell, axes={**one.axes, "gpu": "H200"}, reference=one.reference) for one in (three, ten)]
    found = drift("run", [old, old, *again])
    assert pairs(found) == [("0.1.0", "0.1.0"), ("0.3.0", "0.10.0")]
    assert [one.cell for one in found.left_out] == [three.cell.id]


# --- the suite --------------------------------------------------------------------------------------------------------

_SUITE = """
import json, sys
from rig.batches import BATCHES
from rig.completion import Completion
from rig.oracles import TOLERANCE, divergences

def outputs(rows):
    return [[Completion(tuple(o["ids"]), o["finish"], o["prompt_tokens"], (), tuple(map(tuple, o["top2"])))
             for o in row] for row in rows]

found = [divergences(outputs(new), outputs(old)) for old, new in json.load(sys.stdin)]
greedy = {name: [batch.greedy, batch.n] for name, batch in BATCHES.items()}
parted = [[[d.prompt, d.position, d.want, d.got, d.gap] for d in one] for one in found]
print(json.dumps([dict(TOLERANCE), greedy, parted]))
"""


def test_the_suite_says_the_same(project: Project) -> None:
    """Its tolerances, where answers part and by what gap, and that exactly the greedy batches have one completion."""
    chance = random.Random(0)  # noqa: S311
    cases = [[[[_any(chance)] for _ in range(4)] for _ in range(2)] for _ in range(100)]
    words = [sys.executable, "-c", _SUITE]
    ran = subprocess.run(
        words, input=json.dumps(cases), cwd=ROOT / "scenarios", capture_output=True, text=True, check=True
    )
    tolerances, batches, parted = json.loads(ran.stdout)
    assert tolerances == TOLERANCE
    assert all(greedy == (n == 1) for greedy, n in batches.values())
    for (old, new), theirs in zip(cases, parted, strict=True):
        found = between(project, {"outputs": old}, {"outputs": new}).pairs[0].findings
        ours = [[one.place.prompt, one.position, one.before, one.after, one.gap] for one in found]
        assert [one for one in ours if one[1] is not None] == theirs
    assert sum(map(len, parted)) > 100


def _any(chance: random.Random) -> dict[str, Any]:
    length = chance.randint(1, 4)
    top2 = [sorted((-chance.random(), -chance.random()), reverse=True) for _ in range(chance.choice([0, length]))]
    return done(*(chance.randint(1, 2) for _ in range(length)), top2=top2)


# --- on disk ----------------------------------------------------------------------------------------------------------


def put(project: Project, documents: Sequence[Mapping[str, Any] | bytes | None]) -> list[Path]:
    """A run of the reference cells, in matrix.toml's order; None: no record. Its attempts' folders."""
    cells = cells_of(project)
    plan = [Planned(cell=one, digest="d", facts={}, action="run", reason="new", selected=True) for one in cells]
    write_plan(project.results / "runs" / RUN, RUN, plan, ())
    folders = []
    for cell, content in zip(cells, documents, strict=True):
        folders.append(attempt_folder(project.results, RUN, cell.id, 1))
        if content is not None:
            data = content if isinstance(content, bytes) else json.dumps(content).encode()
            _leave(folders[-1], plain_record(cell), data)
    return folders


def _leave(folder: Path, record: Record, data: bytes) -> None:
    path = folder / "out/artifacts/reference.json"
    path.parent.mkdir(parents=True)
    path.write_bytes(data)
    artifacts = {"reference.json": hashlib.sha256(data).hexdigest()}
    write_record(folder, record.model_copy(update={"run": RUN, "artifacts": artifacts}))


def call(project: Project, *words: str) -> Result:
    return CliRunner().invoke(app, ["drift", *words, "--config", str(project.root / "matrix.toml")])


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "damaged"),
        (b"[" * 100_000, "damaged"),
        (b"{}", "damaged: schema"),
        (document() | {"schema": 1}, "damaged: schema"),
        (document() | {"model": "other"}, "is of other in float32, the record of tiny in float32"),
        (document() | {"dtype": "bfloat16"}, "is of tiny in bfloat16"),
        (document({}), "outputs or an error"),
        (document({**PLAIN, **RAISED}), "outputs or an error"),
        (document({"outputs": []}), "damaged: weights.w1.text.outputs"),
        (document({"outputs": [[]]}), "damaged: weights.w1.text.outputs"),
        (document(batch(done(-1))), "ids.0"),
        (document(batch({**done(1), "ids": ["1"]})), "ids.0"),
        (document(batch(done(1, top2=[(-0.1, -0.2, -0.3)]))), "top2.0"),
        (json.dumps(document(batch(done(1, top2=[(-0.1, float("nan"))])))).encode(), "top2.0"),
        (document() | {"weights": {"\x1b[31mred\nline": 7}}, "damaged: weights.red line: "),
        (b" " * MAX_REFERENCE + json.dumps(document()).encode(), "more than 2 MiB"),
    ],
)
def test_a_damaged_reference_is_refused_and_the_next_one_is_compared(
    project: Project, data: Mapping[str, Any] | bytes, reason: str
) -> None:
    put(project, [document(), document(), data])
    found = drift(RUN, *read_references(project.results / "runs" / RUN, {"s0"}))
    assert [(one.cell, reason in one.reason) for one in found.left_out] == [(cells_of(project)[2].id, True)], (
        found.left_out
    )
    assert pairs(found) == [("0.1.0", "0.10.0")]
    assert not {*found.left_out[0].reason} & {"\x1b", "\n"}


def test_what_is_not_what_its_record_says_is_refused(project: Project) -> None:
    folders = put(project, [document(), document(), None])
    path = folders[1] / "out/artifacts/reference.json"
    path.write_bytes(path.read_bytes() + b" ")
    _, left = read_references(project.results / "runs" / RUN, {"s0"})
    assert [one.reason for one in left] == [
        "its reference.json is gone, or not what its record says",
        "NOTRUN: no record",
    ]
    path.unlink()
    path.symlink_to(folders[0] / "out/artifacts/reference.json")
    assert len(read_references(project.results / "runs" / RUN, {"s0"})[1]) == 2


@pytest.mark.parametrize(
    ("documents", "code"),
    [
        ([document(), document(), document()], 0),
        ([document(batch(done(1, top2=[NEAR]))), None, document(batch(done(2, top2=[NEAR])))], 0),
        ([document(), document(batch(done(1, 7, 3))), document()], 1),
        ([document(RAISED), document(RAISED), document()], 3),
    ],
)
def test_the_verb(project: Project, documents: Sequence[Mapping[str, Any] | None], code: int) -> None:
    put(project, documents)
    results = [call(project), call(project, RUN, "--json"), call(project, "--markdown")]
    assert [one.exit_code for one in results] == [code] * 3, results[0].output
    shown = json.loads(results[1].stdout)
    assert (shown["schema"], shown["run"], len(shown["pairs"])) == (1, RUN, sum(map(bool, documents)) - 1)
    assert any(pair["drifts"] for pair in shown["pairs"]) == (code == 1)
    assert results[2].stdout.startswith(f"# Drift in {RUN}\n")


def test_a_run_of_one_target_has_nothing_to_compare(project: Project) -> None:
    put(project, [document(), None, None])
    result = call(project)
    assert isinstance(result.exception, NothingSelectedError)
    assert result.exception.exit_code == 3
    assert "vllm-0.3.0@cpu/s0[model=tiny]: NOTRUN: no record" in str(result.exception)
    assert "no predecessor with the same axes (cpu/x86_64, tiny, float32)" in str(result.exception)


def test_what_is_printed(project: Project) -> None:
    old = document(batch(done(1, 2), done(1, 2, top2=[FAR, NEAR]), done(4)), mixed=RAISED)
    new = document(batch(done(1, 7), done(1, 3, top2=[FAR, NEAR]), done(4, prompt=8)), mixed=PLAIN)
    found = drift(RUN, answered(project, [old, new]))
    (section,) = view.sections(found)
    apart = "best log-probabilities up to 0 apart"
    until = f"apart; until there {apart} (at token 0)"
    assert section.title == "vllm-0.1.0 → vllm-0.10.0: drifts (s0[model=tiny], cpu/x86_64, float32)"
    assert [line.text for line in section.lines] == [
        f"3 greedy continuations: 1 tie, 1 other tokens, 1 other prompt; {apart}, tolerance 0.0001",
        "other prompt: weights w1, batch text, prompt 2: 9 → 8 tokens",
        f"other tokens: weights w1, batch text, prompt 0, token 1: 2 → 7, the predecessor's two best 1.5 {until}",
        f"tie: weights w1, batch text, prompt 1, token 1: 2 → 3, the predecessor's two best 1e-05 {until}",
        "weights w1, batch mixed: raised RuntimeError: shape is invalid → answered",
    ]
    assert view.summary(found) == "1 target compared with the predecessor: 1 drifts"
    assert [one["kind"] for one in view.document(found)["pairs"][0]["findings"]] == [
        "other tokens",
        "tie",
        "other prompt",
    ]
