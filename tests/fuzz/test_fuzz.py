"""Damaged files never crash the harness, never make a PASS, never reach a reader's screen as more than text.

Real files (`corpus/`) are damaged by a seed (`mutate.py`). `--fuzz N`: how many of each kind; `--seed S`: the first.

What is promised of a PASS, and checked here against a second, independent reading of the bytes (`not_whole`):
every file of events is a regular file of valid lines, there is a hello and a plan of at least one check, each planned
check has its start and its end, none raised, nothing went down, DONE is there and agrees, and the end was clean. So
damage to a hello, a plan, a start, an end or DONE, or its loss, is never a PASS, whatever else happened to the file.

What nobody can promise: evidence that is whole and says something else than was true. A file in which an end has become
`passed`, or in which a plan has lost a check, is a forgery (`forged`); those are left out, and nothing else is.
"""

from __future__ import annotations

import json
import os
import shutil
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from harness import events as ev
from harness.errors import ConfigurationError
from harness.imports import import_packs
from harness.judge import Evidence, judge
from harness.matrix import build_matrix
from harness.packs import pack_new, zstd
from harness.plan import digest
from harness.planfile import PlanFile, PlannedEntry, read_plan, write_document
from harness.probes import MAX_PROBE, Probe, differences, parse_probe, read_probe, unexplained
from harness.project import Project
from harness.recorder import artifact, make_record
from harness.records import ExitState, Record, history, read_record, records_of, write_record
from harness.spec import ChangeSpec, load_spec
from harness.status import Status
from harness.tail import Tail
from harness.targets import TargetFacts, found, read_facts, write_facts
from harness.views.markdown import escape
from harness.views.material import excerpt, printed
from tests.conftest import SPEC, event_line
from tests.fuzz import bench
from tests.fuzz.bench import CLEAN, CORPUS, NOW, RUN, Batch
from tests.fuzz.mutate import TEXTS, Mutator

pytestmark = pytest.mark.timeout(4 * 3600)  # as long as `--fuzz` makes it
SHARDS = 16
BATCH = 32
CELLS = sorted(path.name for path in (CORPUS / "cells").iterdir())
RECORDS = sorted(path.name for path in CORPUS.glob("record-*.json"))
ENDS = (
    ExitState(started=True, exit_code=137),
    ExitState(started=True, exit_code=0, oom_killed=True),
    ExitState(started=True, exit_code=0, error="lost"),
    ExitState(started=True, exit_code=143, killed="silence"),
    ExitState(started=True),
    ExitState(started=False),
)
NAMES = ("..", ".", "", "/", "../record.json", "/etc/passwd", "a/b", "reference.json", "reference.json/", "\0", "~")


@pytest.fixture(params=range(SHARDS), ids=lambda shard: f"shard{shard}")
def seeds(request: pytest.FixtureRequest) -> list[list[int]]:
    """This shard's seeds, in batches."""
    first, count = request.config.getoption("--seed"), request.config.getoption("--fuzz")
    mine = range(first + request.param, first + count, SHARDS)
    return [list(mine[at : at + BATCH]) for at in range(0, len(mine), BATCH)]


# --- what a cell leaves -----------------------------------------------------------------------------------------------


def lines_of(out: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Every line of rank 0, and what is wrong with any rank's: read here without the harness's own reader."""
    own: list[dict[str, Any]] = []
    wrong = []
    for path in sorted(out.glob("events*.jsonl")):
        if path.is_symlink() or not path.is_file():
            wrong.append(f"{path.name} is no regular file")
            continue
        for line in path.read_bytes().split(b"\n")[:-1]:
            try:
                value = json.loads(line)
                {"hello": 1, "plan": 1, "start": 1, "phase": 1, "metric": 1, "property": 1, "mark": 1, "artifact": 1,
                 "end": 1, "down": 1, "collect_error": 1}[value["type"]]  # fmt: skip
                if path.name == "events.jsonl":
                    own.append(value)
            except Exception as error:  # whatever is wrong with it
                wrong.append(f"{path.name}: {error!r:.80}")
    return own, wrong


def planned(own: list[dict[str, Any]]) -> set[str]:
    return {check for line in own if line["type"] == "plan" for check in line["checks"]}


def passed(own: list[dict[str, Any]]) -> set[str]:
    return {line["check"] for line in own if line["type"] == "end" and line["outcome"] == "passed"}


def not_whole(out: Path, state: ExitState) -> str:
    """Why this can be no PASS; empty where it can be one."""
    own, wrong = lines_of(out)
    kinds = [line["type"] for line in own]
    ends = [line for line in own if line["type"] == "end"]
    started = {line["check"] for line in own if line["type"] == "start"}
    done = out / "DONE"
    said = json.loads(done.read_bytes()) if done.is_file() and not done.is_symlink() else {}
    reasons = {
        "a line is damaged: " + "; ".join(wrong[:1]): wrong,
        "no hello": "hello" not in kinds,
        "no plan": not planned(own),
        "a process went down": "down" in kinds,
        "the file did not import": "collect_error" in kinds,
        "a check has no end": planned(own) - {end["check"] for end in ends},
        "a check did not start": planned(own) - started,
        "a check was not planned": {end["check"] for end in ends} - planned(own),
        "a check raised": any(end["outcome"] == "raised" for end in ends),
        "nothing passed": not passed(own),
        "DONE is not what it should be": said.get("schema") != 1,
        "DONE has another count of ends": said.get("checks") != len(ends),
        "DONE says that not all passed": said.get("exit") != 0,
        "the end was not clean": state != CLEAN,
    }
    return "; ".join(reason for reason, holds in reasons.items() if holds)


def forged(out: Path, original: Path) -> bool:
    """Whether the evidence is whole and says what the original did not: that nobody can tell."""
    now, then = lines_of(out)[0], lines_of(original)[0]
    return bool(passed(now) - passed(then)) or planned(now) != planned(then)


def damage(mutator: Mutator, original: Path, out: Path) -> ExitState:
    """What the cell left, with some of it damaged; how it ended."""
    out.mkdir(parents=True)
    (out / "artifacts").mkdir()
    (out / "artifacts" / "reference.json").write_bytes(b"{}")
    names = [path.name for path in sorted(original.iterdir())]
    chosen = mutator.random.choice([*names, "events.jsonl", "events.jsonl", "events.jsonl"])
    for name in names:
        data = (original / name).read_bytes()
        if name == chosen:
            data = mutator.document(data) if name == "DONE" else mutator.lines(data)
        (out / name).write_bytes(data)
    beside = _beside(mutator, out)
    if mutator.random.random() < 0.1:
        mutator.replace(out / mutator.random.choice([*names, "events.rank1.jsonl", "artifacts", *beside]))
    return mutator.random.choice(ENDS) if mutator.random.random() < 0.1 else CLEAN


STACK = """Thread 0x00007f12 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 327 in wait

Current thread 0x00007f34 (most recent call first):
  File "/suite/rig/barrier.py", line 40 in meet
"""


def _beside(mutator: Mutator, out: Path) -> list[str]:
    """What the first process leaves of a cell that had to be ended: stacks, and the counters of its memory."""
    folder = out / "artifacts" / "stacks"
    folder.mkdir()
    listed = (CORPUS / "processes.json").read_bytes()
    (folder / "processes.json").write_bytes(mutator.document(listed) if mutator.random.random() < 0.5 else listed)
    for name in ("31.txt", "32.txt"):
        text = STACK + mutator.random.choice(TEXTS) + "\n````\n~~~\n" * (mutator.random.random() < 0.2)
        (folder / name).write_bytes(mutator.damaged(text.encode(errors="replace")))
    memory = (CORPUS / "cgroup.json").read_bytes()
    (out / "cgroup.json").write_bytes(mutator.document(memory) if mutator.random.random() < 0.2 else memory)
    return ["cgroup.json", "artifacts/stacks", "artifacts/stacks/processes.json", "artifacts/stacks/31.txt"]


def build_cell(results: Path, number: int) -> None:
    mutator = Mutator(number)
    original = CORPUS / "cells" / CELLS[number % len(CELLS)]
    folder = bench.attempt(results, number)
    out = folder / "out"
    state = damage(mutator, original, out)
    tail = Tail(out, 2)
    tail.read()
    assert not bench.unsafe(f"{tail.live.doing} {tail.live.marks}")
    live = {"last_marks": tail.live.marks, "last_barriers": tail.live.barriers, "seconds": 61.0}
    some = bench.evidence(out, state.model_copy(update=live) if state.killed else state)
    record = make_record(bench.job(number), bench.context(results), "local", NOW, some)
    assert_no_wrong_pass(record.status, out, original, state)
    write_record(folder, record)
    assert read_record(folder / "record.json") == record, "the record cannot be read again"
    (folder / "stdout.log").write_bytes(mutator.damaged((original / "events.jsonl").read_bytes()))
    (folder / "stderr.log").write_text(mutator.random.choice(TEXTS), errors="replace")
    if mutator.random.random() < 0.05:
        mutator.replace(folder / "stdout.log")
    named = record.model_copy(update={"artifacts": {**record.artifacts, **dict.fromkeys(NAMES, "0" * 64)}})
    for name in named.artifacts:
        path = artifact(folder, named, name)
        assert path is None or path.resolve().parent == (out / "artifacts").resolve()


def assert_no_wrong_pass(status: Status, out: Path, original: Path, state: ExitState) -> None:
    if status is not Status.PASS:
        return
    assert not_whole(out, state) == ""
    before = judge(bench.evidence(original, CLEAN)).status
    assert before is Status.PASS or forged(out, original), f"PASS, and the original was {before}"


def test_what_a_cell_leaves(seeds: list[list[int]], tmp_path: Path) -> None:
    batch = Batch(tmp_path, build_cell)
    for some in seeds:
        batch.check(some)


def test_the_corpus_itself_is_judged_as_it_was(tmp_path: Path) -> None:
    seen = {name: judge(bench.evidence(CORPUS / "cells" / name, CLEAN)).status for name in CELLS}
    assert seen == {
        "collect": Status.ERROR,
        "died": Status.CRASH,
        "passed": Status.PASS,
        "raised": Status.FAIL,
        "raised-in-engine": Status.FAIL,
        "two-ranks": Status.NA,
    }
    assert not_whole(CORPUS / "cells" / "passed", CLEAN) == ""


ESSENTIAL = ("hello", "plan", "start", "end")


def _losses() -> list[tuple[int, str]]:
    data = (CORPUS / "cells" / "passed" / "events.jsonl").read_bytes()
    kinds = [json.loads(line)["type"] for line in data.splitlines()]
    return [(number, kind) for number, kind in enumerate(kinds) if kind in ESSENTIAL]


@pytest.mark.parametrize(("number", "kind"), _losses())
def test_each_line_that_matters_is_missed(number: int, kind: str, tmp_path: Path) -> None:
    """Gone, cut, of another rank, with each of its bytes that matters changed: never a PASS."""
    whole = (CORPUS / "cells" / "passed" / "events.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "DONE").write_bytes((CORPUS / "cells" / "passed" / "DONE").read_bytes())
    line = whole[number]
    begin = line.index(b'"type"')
    others = [b"", line[: len(line) // 2] + b"\n", line.replace(b'"rank":0', b'"rank":1')]
    others += [line[:at] + b"~" + line[at + 1 :] for at in range(begin, begin + len(b'"type":"') + len(kind))]
    for other in others:
        (tmp_path / "events.jsonl").write_bytes(b"".join([*whole[:number], other, *whole[number + 1 :]]))
        assert judge(bench.evidence(tmp_path, CLEAN)).status is not Status.PASS, other


# --- what stands on the host's disk -----------------------------------------------------------------------------------


def build_record(results: Path, number: int) -> None:
    """A record that was damaged after it was written."""
    mutator = Mutator(number)
    value = json.loads((CORPUS / RECORDS[number % len(RECORDS)]).read_bytes())
    own = bench.cell(number)
    value |= {"cell": own.id, "scenario": own.scenario, "params": dict(own.params), "run": RUN, "attempt": 1}
    data = json.dumps(value, indent=1).encode()
    folder = bench.attempt(results, number)
    folder.mkdir(parents=True)
    path = folder / "record.json"
    path.write_bytes(mutator.damaged(data) if mutator.random.random() < 0.3 else mutator.document(data))
    if mutator.random.random() < 0.03:
        mutator.replace(path)
    record = read_record(path)
    if record is not None and record.status is Status.PASS:
        statuses = {check.status for check in record.checks}
        assert Status.PASS in statuses <= {Status.PASS, Status.NA, Status.SKIP}, "PASS, and its checks are not"
    run = results / "runs" / RUN
    (run / "plan.json").write_bytes((CORPUS / "plan.json").read_bytes())
    history(results, NOW.replace(year=2020))


def test_records_that_were_damaged(seeds: list[list[int]], tmp_path: Path) -> None:
    batch = Batch(tmp_path, build_record)
    for some in seeds:
        batch.check(some)


def test_a_record_that_lies_in_anothers_folder_is_none(tmp_path: Path) -> None:
    """Nor does a damaged id or number make one cell's PASS another's."""
    value = json.loads((CORPUS / "record-passed.json").read_bytes())
    for number, change in enumerate(({"cell": bench.cell(1).id}, {"attempt": 7})):
        data = {**value, "cell": bench.cell(0).id, "attempt": 1, **change}
        folder = bench.attempt(tmp_path / str(number), 0)
        folder.mkdir(parents=True)
        (folder / "record.json").write_text(json.dumps(data))
        assert records_of(tmp_path / str(number) / "runs" / RUN) == {}


NAN, INF = float("nan"), float("inf")
DAMAGES: dict[str, dict[str, Any]] = {
    "a start without a zone": {"started": "2026-11-30T00:00:00"},
    "no zone at all": {"started": "2026-11-30T00:00:00", "ended": "2026-11-30T00:00:00"},
    "the first year": {"started": "0001-01-01T00:00:00+14:00"},
    "the last year": {"started": "9999-12-31T23:59:59Z"},
    "no checks": {"checks": []},
    "a check that took no number": {"checks": [{"id": "a", "status": "PASS", "seconds": NAN}]},
    "a check without end": {"checks": [{"id": "a", "status": "PASS", "seconds": INF}]},
    "a check of ages": {"checks": [{"id": "a", "status": "PASS", "seconds": 1e308}]},
    "a phase that took no number": {"phases": {"init": NAN}},
    "a phase without end": {"phases": {"init": -INF}},
    "a property that is no number": {"properties": {"x": NAN, "y": [INF], "z": 10**400}},
    "a metric that is no number": {"metrics": [{"name": "m", "value": INF, "unit": "bytes"}]},
    "an attempt beyond counting": {"attempt": 10**30},
    "a PASS over checks that failed": {"checks": [{"id": "a", "status": "FAIL"}]},
    "controls": {
        "reason": "\x1b[2J\x9b31m",
        "advice": "\u202e",
        "properties": {"\x07": "\u061c"},
        "axes": {"dtype": "\x00"},
    },
}


@pytest.mark.parametrize("what", DAMAGES)
def test_a_damaged_record_is_shown_or_is_none(what: str, tmp_path: Path) -> None:
    """It stops no verb, and is no PASS if its checks are not."""
    value = json.loads((CORPUS / "record-passed.json").read_bytes())
    folder = bench.attempt(tmp_path, 0)
    folder.mkdir(parents=True)
    value |= {"cell": bench.cell(0).id, "attempt": 1, "run": RUN, **DAMAGES[what]}
    (folder / "record.json").write_text(json.dumps(value))
    (tmp_path / "runs" / RUN / "plan.json").touch()
    history(tmp_path, NOW.replace(year=2020))
    matrix = bench.matrix_of(tmp_path, [0])
    bench.check_views(matrix, tmp_path / "runs" / RUN)
    (square,) = matrix.squares
    assert square.status != Status.PASS or {judged.check.status for judged in square.checks} == {Status.PASS}


def test_numbers_at_the_edge_make_a_record_that_can_be_read_again(tmp_path: Path) -> None:
    """1e308 and 1e308 is infinity, which no JSON holds."""
    folder = bench.attempt(tmp_path, 0)
    (folder / "out").mkdir(parents=True)
    ages = [event_line("phase", name="init", state="end", seconds=1e308)] * 2
    lines = [
        event_line("hello", python="3", platform="x"),
        event_line("plan", checks=["a"]),
        event_line("start", check="a"),
        *ages,
        event_line("property", name="big", value=10**400),
        event_line("mark", name="m", n=10**4_000),
        event_line("metric", name="m", value=1e308, unit="s"),
        event_line("end", check="a", outcome="passed", seconds=1e308),
    ]
    (folder / "out" / "events.jsonl").write_bytes(b"".join(lines))
    (folder / "out" / "DONE").write_text('{"schema": 1, "exit": 0, "checks": 1}')
    some = bench.evidence(folder / "out", CLEAN)
    record = make_record(bench.job(0), bench.context(tmp_path), "local", NOW, some)
    write_record(folder, record)
    assert read_record(folder / "record.json") == record
    bench.check_views(bench.matrix_of(tmp_path, [0]), tmp_path / "runs" / RUN)


PROBE_LOCK = "numpy==1.26.4\ntorch==2.6.0+cpu\npytest==8.3.5\n"


def build_probe(results: Path, number: int) -> None:
    """A probe's answer, damaged; what is left of it stands in the run as what is known of a target."""
    mutator = Mutator(number)
    out = bench.attempt(results, number) / "out"
    out.mkdir(parents=True)
    (out / "probe.json").write_bytes(_damaged_file(mutator, "probe.json"))
    if mutator.random.random() < 0.03:
        mutator.replace(out / "probe.json")
    try:
        probe = read_probe(out)
    except ValueError as error:
        assert "\n" not in str(error)
        assert not bench.unsafe(str(error))
        return
    _ask(probe)
    write_facts(results / "runs" / RUN, found(_facts(number), probe))
    assert read_facts(results / "runs" / RUN, [(f"vllm-{number}", "cpu")]), "it cannot be read again"


def _ask(probe: Probe) -> None:
    differences(probe, PROBE_LOCK, "vllm==0.7.3", {"pip": "x"})
    unexplained(probe, [ChangeSpec(drop=("x",), reason="y")], ["torch==2.6.0"])
    assert not bench.unsafe(probe.trouble + probe.lack(tuple(c.name for c in probe.capabilities)))


def _facts(number: int) -> TargetFacts:
    return TargetFacts(target=f"vllm-{number}", device="cpu", vllm="0.7.3", distribution="vllm==0.7.3")


def _damaged_file(mutator: Mutator, name: str) -> bytes:
    data = (CORPUS / name).read_bytes()
    return mutator.damaged(data) if mutator.random.random() < 0.3 else mutator.document(data)


def targets_of(numbers: Sequence[int]) -> Callable[[Path], Sequence[TargetFacts]]:
    return lambda run: read_facts(run, [(f"vllm-{number}", "cpu") for number in numbers])


def test_probes(seeds: list[list[int]], tmp_path: Path) -> None:
    for some in _a_tenth(seeds):
        Batch(tmp_path, build_probe, targets_of(some)).check(some)


def build_facts(results: Path, number: int) -> None:
    """targets/*.json, damaged after it was written."""
    mutator = Mutator(number)
    path = results / "runs" / RUN / "targets" / f"vllm-{number}@cpu.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(_damaged_file(mutator, "targets.json"))
    if mutator.random.random() < 0.03:
        mutator.replace(path)


def test_what_is_known_of_targets(seeds: list[list[int]], tmp_path: Path) -> None:
    for some in _a_tenth(seeds):
        Batch(tmp_path, build_facts, targets_of(some)).check(some)


def test_plans(seeds: list[list[int]], tmp_path: Path) -> None:
    """Either it is a plan, and a table can be made of it, or it says that it is none."""
    for number in (number for some in _a_tenth(seeds) for number in some):
        (tmp_path / "plan.json").write_bytes(_damaged_file(Mutator(number), "plan.json"))
        try:
            try:
                plan = read_plan(tmp_path)
            except ConfigurationError:
                continue
            cells = [entry.cell for entry in plan.cells]
            if len({cell.id for cell in cells}) == len(cells):  # two of one id are no damage but another plan
                bench.check_views(build_matrix(RUN, cells, {}, (), NOW, NOW - NOW, plan.not_runnable), tmp_path)
        except Exception as error:
            raise AssertionError(bench.again(number, error)) from error


# --- packs ------------------------------------------------------------------------------------------------------------


def two_packs(room: Path) -> dict[str, bytes]:
    """The files of one pack and, as `good`, another pack of the same run: both say FAIL."""
    run = room / "runs" / RUN
    failed = json.loads((CORPUS / "record-failed.json").read_bytes())
    entries = []
    for number in (0, 1):
        own, facts = bench.cell(number), {"case": str(number)}
        entries.append(
            PlannedEntry(cell=own, digest=digest(facts), facts=facts, action="run", reason="", selected=True)
        )
        value = failed | {
            "cell": own.id,
            "scenario": own.scenario,
            "params": dict(own.params),
            "run": RUN,
            "attempt": 1,
        }
        value |= {"target": own.target, "vllm": own.vllm, "device": own.device, "digest": digest(facts), "facts": facts}
        write_record(bench.attempt(room, number), Record.model_validate(value))
        (bench.attempt(room, number) / "stdout.log").write_text("last words\n")
    write_document(run, PlanFile(run=RUN, created=NOW, cells=tuple(entries)))
    write_facts(run, TargetFacts(target="vllm-0.8.5", device="cpu", vllm="0.8.5", distribution="vllm==0.8.5"))
    one, other = pack_new(run, room / "outbox")
    with zstd.ZstdFile(one) as stream, tarfile.open(fileobj=stream, mode="r|") as archive:
        files = {info.name: archive.extractfile(info).read() for info in archive}  # type: ignore[union-attr]
    return files | {"good": other.read_bytes()}


def damaged_pack(mutator: Mutator, files: dict[str, bytes]) -> bytes:
    """One of its files, a name, a header, the archive or the stream is damaged."""
    kind = mutator.random.randrange(5)
    files = dict(files)
    name = mutator.random.choice(list(files))
    if kind == 0:
        files[name] = mutator.document(files[name])
    elif kind == 1:
        files[mutator.random.choice((*TEXTS, *NAMES, f"{name}/x"))[:4_000]] = files.pop(name)
    raw = b"".join(_member(name, data) for name, data in files.items())
    if kind == 2:
        at = 512 * mutator.random.randrange(len(raw) // 512)
        raw = raw[:at] + _summed(mutator.damaged(raw[at : at + 512])[:512].ljust(512, b"\0")) + raw[at + 512 :]
    raw += b"\0" * 1_024
    data = zstd.compress(mutator.damaged(raw) if kind == 3 else raw)
    return mutator.damaged(data) if kind == 4 else data


def _member(name: str, data: bytes) -> bytes:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    return info.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogatepass") + data + b"\0" * (-len(data) % 512)


def _summed(header: bytes) -> bytes:
    """With a checksum that fits, so that the rest of it is looked at."""
    return header[:148] + b"%06o\0 " % (sum(header[:148]) + 256 + sum(header[156:])) + header[156:]


def build_import(project: Project, files: dict[str, bytes], number: int) -> None:
    files = dict(files)
    inbox = project.root / "inbox"
    inbox.mkdir()
    project.results.mkdir()
    (inbox / "a.tar.zst").write_bytes(files.pop("good"))
    (inbox / "b.tar.zst").write_bytes(damaged_pack(Mutator(number), files))
    outside = sorted(path for path in project.root.rglob("*") if project.results not in path.parents)
    try:
        done = import_packs(project, [inbox])
    except ConfigurationError as error:  # whole, and of something else than the good one
        assert not bench.unsafe(str(error))
        return
    finally:
        assert {path.name for path in project.results.iterdir()} <= {"runs", ".merge.lock"}
        assert sorted(path for path in project.root.rglob("*") if project.results not in path.parents) == outside
        shutil.rmtree(inbox)
    assert not bench.unsafe("".join(map(str, done.refused)))
    assert {refused.path.name for refused in done.refused} <= {"b.tar.zst"}
    assert done.outcome is not None
    assert Status.PASS not in {square.status for square in done.outcome.matrix.squares}
    if not done.refused:
        bench.check_views(done.outcome.matrix, done.outcome.folder)


def test_packs(seeds: list[list[int]], tmp_path: Path) -> None:
    """Each is taken or refused; the other one is taken, nothing is written outside of the results, nothing passes."""
    (tmp_path / "matrix.toml").write_text(SPEC)
    spec = load_spec(tmp_path / "matrix.toml")
    files = two_packs(tmp_path / "node")
    project = Project(root=tmp_path, spec=spec, cells=(), expectations=())
    for number in (number for some in _a_tenth(seeds) for number in some[::2]):
        try:
            build_import(project, files, number)
        except Exception as error:
            raise AssertionError(bench.again(number, error)) from error
        finally:
            shutil.rmtree(project.results)


def _a_tenth(seeds: list[list[int]]) -> list[list[int]]:
    return seeds[: max(1, len(seeds) // 10)]


# --- one by one -------------------------------------------------------------------------------------------------------


def test_files_of_a_terabyte_cost_what_their_caps_allow(tmp_path: Path) -> None:
    for name in ("events.jsonl", "events.rank1.jsonl", "DONE", "probe.json", "record.json", "stdout.log"):
        (tmp_path / name).touch()
        os.truncate(tmp_path / name, 1 << 40)
    events, faults = ev.read_events(tmp_path)
    assert events == ()
    assert any("larger than" in fault for fault in faults)
    assert ev.read_done(tmp_path) is None
    assert read_record(tmp_path / "record.json") is None
    with pytest.raises(ValueError, match="larger than"):
        read_probe(tmp_path)
    tail = Tail(tmp_path, 2)
    for _ in range(3):
        tail.read()
    shown = excerpt(tmp_path / "stdout.log", 8 << 10, 60)
    assert shown is None or len(shown.text) <= 8 << 10


@pytest.mark.parametrize("name", ["events.jsonl", "events.rank1.jsonl", "DONE", "artifacts"])
@pytest.mark.parametrize("attempt", range(11))
def test_other_things_in_the_place_of_files(name: str, attempt: int, tmp_path: Path) -> None:
    for path in (CORPUS / "cells" / "passed").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    Mutator(attempt).replace(tmp_path / name)
    Tail(tmp_path, 2).read()
    status = judge(bench.evidence(tmp_path, CLEAN)).status
    assert status is not Status.PASS or name in ("artifacts", "events.rank1.jsonl")


def test_a_second_end_that_says_otherwise_is_no_pass() -> None:
    """Which of the two is true nobody can tell."""
    hello = event_line("hello", python="3.11.2", platform="linux")
    begin = [hello, event_line("plan", checks=["a"]), event_line("start", check="a")]
    wrong = {"type": "AssertionError", "message": "no"}
    raised = event_line("end", check="a", outcome="raised", seconds=1, error=wrong)
    fine = event_line("end", check="a", outcome="passed", seconds=1)
    for ends in ([raised, fine], [fine, raised]):
        events, faults = ev.parse(b"".join([*begin, *ends]))
        done = ev.Done(schema=1, exit=1, checks=2)
        assert judge(Evidence(events=events, faults=faults, done=done, exit=CLEAN)).status is not Status.PASS


# --- hypothesis: what no seed of ours thought of ----------------------------------------------------------------------

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(exclude_categories=())),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
EXAMPLES = tuple(
    json.loads(line)
    for name in CELLS
    for line in (CORPUS / "cells" / name / "events.jsonl").read_bytes().splitlines()[:40]
)
EVENTS = st.sampled_from(EXAMPLES).flatmap(
    lambda event: st.dictionaries(st.sampled_from(sorted(event)), JSON, max_size=3).map(lambda new: {**event, **new})
)
ANY_TEXT = st.text(st.characters(exclude_categories=()))


def explore(request: pytest.FixtureRequest, strategy: st.SearchStrategy[Any], test: Callable[[Any], None]) -> None:
    """As many examples as `--fuzz` asks for, the same ones for the same `--seed`."""
    count, first = request.config.getoption("--fuzz"), request.config.getoption("--seed")
    limits = settings(max_examples=count, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    seed(first)(limits(given(strategy)(test)))()


def test_events_of_any_values(request: pytest.FixtureRequest) -> None:
    def one(event: dict[str, Any]) -> None:
        line = json.dumps(event).encode()
        try:
            parsed = ev.parse_line(line)
        except ValueError as error:
            str(error).encode(errors="strict")
            return
        assert not bench.unsafe("".join(bench.texts(ev.dump(parsed)))), "an event holds what no screen should show"

    explore(request, EVENTS, one)


def test_texts_of_any_characters(request: pytest.FixtureRequest) -> None:
    def one(text: str) -> None:
        sound = text.encode(errors="replace").decode()  # surrogates are refused before, or replaced
        assert not bench.unsafe(ev.clean(sound))
        assert not bench.unsafe(printed(sound))
        assert "\n" not in escape(ev.clean(sound))
        assert ev.clean(ev.clean(sound)) == ev.clean(sound)

    explore(request, ANY_TEXT, one)


def test_bytes_of_any_kind(request: pytest.FixtureRequest) -> None:
    def one(data: bytes) -> None:
        ev.parse(data)
        try:
            parse_probe(data)
        except ValueError as error:
            assert len(str(error)) <= 300

    explore(request, st.binary(max_size=2_000), one)


def test_probes_of_any_values(request: pytest.FixtureRequest) -> None:
    example = json.loads((CORPUS / "probe.json").read_bytes())
    assert len(json.dumps(example)) < MAX_PROBE

    def one(new: dict[str, Any]) -> None:
        try:
            probe = parse_probe(json.dumps({**example, **new}).encode())
        except ValueError:
            return
        _ask(probe)

    explore(request, st.dictionaries(st.sampled_from(sorted(example)), JSON, max_size=3), one)
