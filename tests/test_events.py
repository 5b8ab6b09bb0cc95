"""What a container may leave behind: read without trust."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness import events as ev
from tests.conftest import event_line

GOOD = event_line("start", check="a")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"not json", "not JSON"),
        (b"[1]", "dictionary"),
        (b"{}", "discriminator"),
        (event_line("hacked").rstrip(), "does not match any of the expected tags"),
        (event_line("metric", name="m", value=float("nan"), unit="s").rstrip(), "finite"),
        (event_line("start").rstrip(), "Field required"),
        (GOOD.replace(b'"schema": 1', b'"schema": 2').rstrip(), "Input should be 1"),
        (b"x" * (ev.MAX_LINE + 1), "longer than"),
        (b"[" * 60_000, "not JSON"),
        (b"\xff\xfe", "not JSON"),
    ],
)
def test_a_bad_line_is_a_fault_and_hides_no_other(line: bytes, said: str) -> None:
    events, faults = ev.parse(GOOD + line + b"\n" + GOOD)
    assert len(events) == 2
    assert len(faults) == 1
    assert faults[0].startswith("line 2: ")
    assert said in faults[0]


@given(st.binary(max_size=300))
def test_garbage_never_raises(data: bytes) -> None:
    ev.parse(data)


@given(st.integers(0, len(GOOD) - 1))
def test_a_last_line_without_its_end_is_dropped_without_a_fault(cut: int) -> None:
    events, faults = ev.parse(GOOD + GOOD[:cut])
    assert (len(events), faults) == (1, ())


def test_control_characters_do_not_reach_a_terminal() -> None:
    (event,), _ = ev.parse(event_line("start", check="\x1b[31mred\x1b[0m\x07\u202e]0;x\nline"))
    assert isinstance(event, ev.Start)
    assert event.check == "red\N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER}]0;x\nline"


def test_links_pipes_and_folders_are_not_read(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(GOOD)
    out = tmp_path / "out"
    out.mkdir()
    (out / "events.jsonl").symlink_to(secret)
    os.mkfifo(out / "events.rank1.jsonl")
    (out / "events.rank2.jsonl").mkdir()
    (out / "DONE").symlink_to(secret)
    events, faults = ev.read_events(out)
    assert events == ()
    assert [fault.split(":")[0] for fault in faults] == ["events.jsonl", "events.rank1.jsonl", "events.rank2.jsonl"]
    assert ev.read_done(out) is None


def test_what_lies_below_a_folder_is_read_through_no_link(tmp_path: Path) -> None:
    out = tmp_path / "out"
    (out / "a" / "b").mkdir(parents=True)
    (out / "a" / "b" / "file").write_bytes(b"1234")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").write_bytes(b"secret")
    (out / "link").symlink_to(tmp_path / "other")
    (out / "a" / "file").symlink_to("b/file")
    assert ev.read_below(out, "a/b/file", 3) == b"123"
    for name in ("link/file", "a/file", "a/../a/b/file", "/etc/hostname", "a//b/file", "a/b", "", "absent/x", "a\0b"):
        assert ev.read_below(out, name, 9) is None, name
    assert ev.read_below(tmp_path / "absent", "a", 9) is None


def test_ranks_come_in_their_order_and_each_speaks_for_itself(tmp_path: Path) -> None:
    for rank in (0, 2, 10):
        (tmp_path / ev.file_name(rank)).write_bytes(event_line("start", rank=rank, check="a"))
    (tmp_path / ev.file_name(3)).write_bytes(event_line("start", rank=0, check="forged"))
    (tmp_path / "events.rank00.jsonl").write_bytes(GOOD)
    events, faults = ev.read_events(tmp_path)
    assert [event.rank for event in events] == [0, 2, 10]
    assert faults == ("events.rank3.jsonl: holds events of rank 0",)


def test_a_huge_file_is_read_to_its_cap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ev, "MAX_FILE", 10 * len(GOOD))
    (tmp_path / "events.jsonl").write_bytes(GOOD * 20)
    events, faults = ev.read_events(tmp_path)
    assert len(events) == 10
    assert "larger than" in faults[0]


def test_done(tmp_path: Path) -> None:
    (tmp_path / "DONE").write_text(json.dumps({"schema": 1, "exit": 0, "checks": 3}))
    assert ev.read_done(tmp_path) == ev.Done(schema=1, exit=0, checks=3)
    for other in ({"exit": "0"}, {"checks": 3.0}, {"exit": True}):
        (tmp_path / "DONE").write_text(json.dumps({"schema": 1, "exit": 0, "checks": 3, **other}))
        assert ev.read_done(tmp_path) is None
    (tmp_path / "DONE").write_text("{}")
    assert ev.read_done(tmp_path) is None
