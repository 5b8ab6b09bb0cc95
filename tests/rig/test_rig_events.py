"""The event writer: what is allowed, what fits, and that lines of many processes never mix."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path
from typing import Any

import pytest
from rig.events import LINE_BYTES, EventError, Events, cut_middle, writer

from tests.rig.run import read_events


@pytest.fixture
def events(tmp_path: Path) -> Events:
    return Events(tmp_path)


def test_common_fields(events: Events, tmp_path: Path) -> None:
    events.emit("start", check="a")
    events.emit("start", check="b")
    first, second = read_events(tmp_path)
    assert {"schema": 1, "rank": 0, "type": "start", "check": "a"}.items() <= first.items()
    assert (first["seq"], second["seq"]) == (0, 1)
    assert first["mono_ns"] <= second["mono_ns"]
    assert first["utc"].endswith("Z")
    assert len(first["utc"]) == len("2026-11-30T13:51:59.123456Z")


def test_a_rank_has_its_own_file(tmp_path: Path) -> None:
    Events(tmp_path, rank=3).emit("start", check="a")
    assert json.loads((tmp_path / "events.rank3.jsonl").read_text())["rank"] == 3


def test_check_of_a_property_is_the_running_one(events: Events, tmp_path: Path) -> None:
    events.property("a", True)
    events.check = "text"
    events.property("b", ["x", 1])
    events.property("c", 0.5, check=None)
    events.metric("d", 1, "s")
    assert [event["check"] for event in read_events(tmp_path)] == [None, "text", None, "text"]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), True, "1", None])
def test_a_metric_is_a_finite_number(events: Events, tmp_path: Path, value: Any) -> None:
    with pytest.raises(EventError):
        events.metric("m", value, "s")
    assert read_events(tmp_path) == []


@pytest.mark.parametrize("value", [None, {"a": 1}, [None], [[1]], object(), float("nan")])
def test_a_property_is_a_scalar_or_a_list_of_them(events: Events, value: Any) -> None:
    with pytest.raises(EventError):
        events.property("p", value)


def test_a_refused_event_leaves_no_gap(events: Events, tmp_path: Path) -> None:
    with pytest.raises(EventError):
        events.emit("metric", value=float("nan"))
    events.emit("start", check="a")
    assert read_events(tmp_path)[0]["seq"] == 0


@pytest.mark.parametrize("char", ["x", "é", "\x00", "\U0001f600", "\ud800"])
def test_an_error_is_cut_until_it_fits(events: Events, tmp_path: Path, char: str) -> None:
    error = {"type": "E", "message": char * 4_000, "traceback": "head" + char * 70_000 + "tail"}
    events.emit("end", check="a", outcome="raised", error=error)
    line = (tmp_path / "events.jsonl").read_bytes()
    assert len(line) <= LINE_BYTES
    kept = json.loads(line)["error"]["traceback"]
    assert kept.startswith("head")
    assert kept.endswith("tail")


def test_what_cannot_be_cut_is_refused(events: Events) -> None:
    with pytest.raises(EventError, match="bytes"):
        events.emit("plan", checks=["x" * LINE_BYTES])


def test_a_long_property_is_cut(events: Events, tmp_path: Path) -> None:
    events.property("p", "x" * 10_000)
    assert len(read_events(tmp_path)[0]["value"]) == 4_000


def test_phase_and_mark_end_also_when_the_block_raises(events: Events, tmp_path: Path) -> None:
    for _ in range(2):
        with pytest.raises(ZeroDivisionError), events.phase("init"), events.marked("generate"):
            _ = 1 // 0
    found = [(e["type"], e["name"], e["state"], e.get("n")) for e in read_events(tmp_path)]
    phase, mark = ("phase", "init"), ("mark", "generate")
    once = [(*phase, "begin", None), (*mark, "enter", 0), (*mark, "leave", 0), (*phase, "end", None)]
    assert found[:4] == once
    assert found[5] == (*mark, "enter", 1)
    assert read_events(tmp_path)[3]["seconds"] >= 0


def test_an_artifact_names_its_content(events: Events, tmp_path: Path) -> None:
    events.artifact("deep/reference.json", b"{}")
    event = read_events(tmp_path)[0]
    assert event["path"] == "deep/reference.json"
    assert event["bytes"] == 2
    assert event["sha256"] == "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"
    assert [path.name for path in (tmp_path / "artifacts" / "deep").iterdir()] == ["reference.json"]


@pytest.mark.parametrize("name", ["../x", "/etc/x", "a/../../x", "."])
def test_an_artifact_stays_in_its_folder(events: Events, name: str) -> None:
    with pytest.raises(EventError, match="leave"):
        events.artifact(name, b"")


def _write(folder: Path, name: str) -> None:
    events = Events(folder)
    for _ in range(200):
        events.emit("start", check=name * 1_000)


def test_many_processes_one_file(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=_write, args=(tmp_path, name)) for name in "abc"]
    for process in writers:
        process.start()
    for process in writers:
        process.join()
    found = read_events(tmp_path)
    assert len(found) == 600
    assert all(len(set(event["check"])) == 1 for event in found)
    for pid in {event["pid"] for event in found}:
        assert [event["seq"] for event in found if event["pid"] == pid] == list(range(200))


def test_the_process_has_one_writer(out: Path) -> None:
    assert writer() is writer()
    assert writer().out == out


@pytest.mark.parametrize("cap", [5, 10, 100])
def test_cut_middle(cap: int) -> None:
    text = "a" * 60 + "b" * 60
    cut = cut_middle(text, cap)
    assert len(cut) <= max(cap, len("\n[…]\n"))
    assert cut_middle("short", 5) == "short"
