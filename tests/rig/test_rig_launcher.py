"""The launcher with throw-away ranks: they meet, one dies, one never comes, one raises; none is ever left."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rig import errors, launcher
from rig.events import Events
from rig.launcher import Limits, Ranks, cause, environment, hang, one_each, scrubbed, torchrun
from rig.marks import Mark
from rig.outcomes import NotAvailable, RankError, Skipped

from tests.rig.run import FAKES

PROGRAM = """
import os, signal, subprocess, sys, time
from pathlib import Path
from rig import launcher
from rig.barrier import Barrier, Gloo
from rig.events import writer
from rig.outcomes import NotAvailable, Skipped
from rig.reports import Reports

rank = int(os.environ["VLLM_MATRIX_RANK"])
reports = Reports(Path(os.environ[launcher.FOLDER]))
reports.write(rank, launcher.ALIVE, {"pid": os.getpid()})
barrier = Barrier(Gloo(reports.folder, rank, 2, 60), writer())


try:
    reports.write(rank, "first", {"barrier": barrier(), "rank": rank})
    if rank == 1:
        %s
    reports.write(rank, "second", {"barrier": barrier()})
except (Exception, Skipped) as exc:
    reports.fail(rank, exc)
    sys.exit(1)
reports.write(rank, launcher.FINISHED, {})
"""
Start = Callable[..., Ranks]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    monkeypatch.setattr(launcher, "SETTLE_SECONDS", 0.5)
    out = tmp_path / "out"
    out.mkdir()
    started: list[Ranks] = []

    def start(second_rank: str = "pass", quiet: float = 30.0, total: float = 60.0) -> Ranks:
        (tmp_path / "program.py").write_text(PROGRAM % second_rank)
        paths = os.pathsep.join([str(tmp_path), str(FAKES)])
        outer = {"PATH": os.environ["PATH"], "PYTHONPATH": paths, "VLLM_MATRIX_OUT": str(out), "RANK": "7"}
        outer["VLLM_MATRIX_CELL"] = "fake"  # as the supervisor has it: Pythons of a cell have stacks
        ranks = Ranks(one_each("program", 2, "cpu", outer), Events(out), Limits(quiet, total))
        started.append(ranks)
        return ranks

    yield start
    for ranks in started:
        ranks.end()
        assert ranks.left() == []
        assert not ranks.folder.exists()


def finding(ranks: Ranks, stage: str = "second") -> Any:
    """What ``wait`` raises; by then nobody is alive, and it raises the same again."""
    with pytest.raises(BaseException) as raised:  # a skip is no Exception
        ranks.wait(stage)
    assert ranks.left() == []
    with pytest.raises(type(raised.value)) as again:
        ranks.wait("another")
    assert again.value is raised.value
    return raised.value


def test_ranks_meet_report_and_end(start: Start) -> None:
    ranks = start()
    assert {rank: found["rank"] for rank, found in ranks.wait("first").items()} == {0: 0, 1: 1}
    ranks.wait("second")
    assert ranks.exits() == {"rank 0": 0, "rank 1": 0}
    assert [str(mark) for mark in ranks.marks[1]] == [
        f"barrier {n} {state}" for n in (0, 1) for state in ("enter", "leave")
    ]


def test_one_that_dies_is_named_with_everybodys_last_mark(start: Start) -> None:
    ranks = start("os.kill(os.getpid(), signal.SIGKILL)")
    found = finding(ranks)
    assert found.reason == "rank-died"
    assert str(found) == "rank 1 ended by SIGKILL; last marks: rank 0: barrier 1 enter; rank 1: barrier 0 leave"
    assert ranks.wait("first")[1]["rank"] == 1  # what was reported before stays


def test_one_that_leaves_early_died_too(start: Start) -> None:
    assert "rank 1 ended with code 0" in str(finding(start("sys.exit(0)")))


def test_one_that_never_comes_is_named_within_the_deadline(start: Start) -> None:
    begun = time.monotonic()
    found = finding(start("time.sleep(600)", quiet=1.5))
    assert found.reason == "hang"
    assert str(found).startswith(
        "rank 1 did not come; last marks: rank 0: barrier 1 enter; rank 1: barrier 0 leave (no word of any rank for"
    )
    assert time.monotonic() - begun < 30


def test_one_that_talks_for_ever_meets_the_total_deadline(start: Start) -> None:
    talks = "[(time.sleep(0.05), writer().property('still', True)) for _ in range(10000)]"
    assert finding(start(talks, quiet=10.0, total=3.0)).reason == "hang"


def test_the_stacks_of_a_hang_are_kept(start: Start) -> None:
    ranks = start("time.sleep(600)", quiet=1.5)
    finding(ranks)
    ranks.end()
    artifacts = ranks._events.out / "artifacts"
    assert "in wait" in (artifacts / "stacks.rank0.txt").read_text()
    assert "program.py" in (artifacts / "stacks.rank1.txt").read_text()
    assert json.loads((artifacts / "ranks.json").read_text())["rank1.first"]["rank"] == 1
    listed = json.loads((artifacts / "stacks" / "processes.json").read_text())["processes"]
    assert {each["rank"] for each in listed} == {0, 1}
    assert all((artifacts / "stacks" / each["stack"]).read_bytes() for each in listed)


def test_what_a_rank_raised_keeps_its_frames(start: Start) -> None:
    found = finding(start("raise KeyError('lost')"))
    assert isinstance(found, RankError)
    error = errors.describe(found)
    assert (error["type"], error["message"]) == ("KeyError", "rank 1: 'lost'")
    assert "program.py" in error["frames"][-1]["file"]


@pytest.mark.parametrize(
    ("raises", "kind"), [("NotAvailable('no sleep', 'LLM.sleep')", NotAvailable), ("Skipped('no GPU')", Skipped)]
)
def test_a_rank_that_cannot_be_asked_skips(start: Start, raises: str, kind: type[BaseException]) -> None:
    found = finding(start(f"raise {raises}"))
    assert type(found) is kind


def test_a_process_in_a_session_of_its_own_is_found_and_ended(start: Start) -> None:
    ranks = start("subprocess.Popen(['sleep', '600'], start_new_session=True)")
    assert ranks.exits() == {"rank 0": 0, "rank 1": 0}
    assert [line.partition(": ")[2] for line in ranks.left()] == ["sleep 600"]


def test_foreign_launchers_leave_no_trace() -> None:
    outer = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "3", "MASTER_ADDR": "h", "MASTER_PORT": "1", "PATH": "/bin"}
    outer |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "VLLM_DP_SIZE": "2", "VLLM_MATRIX_OUT": "/out", "ROLE_RANK": "0"}
    assert scrubbed(outer) == {"PATH": "/bin", "VLLM_MATRIX_OUT": "/out"}
    for child in (*one_each("p", 2, "cpu", outer), *torchrun("p", 2, outer)):
        assert not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_USE_AGENT_STORE"} & set(child.environment)


def test_each_rank_has_a_device_or_a_thread_of_its_own() -> None:
    assert environment(1, "cuda", {})["CUDA_VISIBLE_DEVICES"] == "1"
    assert environment(1, "cuda", {"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b"})["CUDA_VISIBLE_DEVICES"] == "GPU-b"
    assert environment(1, "cuda", {"CUDA_VISIBLE_DEVICES": "3"})["CUDA_VISIBLE_DEVICES"] == ""
    cpu = environment(1, "cpu", {"OMP_NUM_THREADS": "8"})
    assert (cpu["OMP_NUM_THREADS"], cpu["VLLM_MATRIX_RANK"]) == ("1", "1")


def raised(reason: str | None, message: str) -> dict[str, Any]:
    return {"raised": {"type": "X", "message": message, "reason": reason}}


LAST = {0: Mark("barrier", 3, "enter", 0), 1: Mark("generate", 2, "enter", 0)}
BROKEN = raised("barrier-broken", "closed")


@pytest.mark.parametrize(
    ("failed", "gone", "message"),
    [
        ({0: BROKEN}, {(0,): 1, (1,): -11}, "rank 1 ended by SIGSEGV; last marks: rank 0: barrier 3 enter; rank 1:"),
        ({0: BROKEN, 1: raised(None, "boom")}, {(0,): 1, (1,): 1}, "rank 1: X: boom"),
        ({0: BROKEN}, {(0, 1): 1}, "rank 0: X: closed; last marks: rank 0: barrier 3 enter; rank 1: generate 2 enter"),
        ({}, {(0, 1): 1}, "the launcher of ranks 0, 1 ended with code 1"),
    ],
)
def test_the_cause_is_told_not_what_followed_from_it(failed: Any, gone: Any, message: str) -> None:
    assert str(cause(failed, gone, LAST)).startswith(message)


def test_a_hang_names_who_did_not_come() -> None:
    assert str(hang(LAST, 90.4, 120.0)) == (
        "rank 1 did not come; last marks: rank 0: barrier 3 enter; rank 1: generate 2 enter "
        "(no word of any rank for 90 s, 120 s after the start)"
    )
    everybody = {0: LAST[0], 1: LAST[0]}
    assert str(hang(everybody, 1, 1)).startswith("last marks: rank 0: barrier 3 enter; rank 1: barrier 3 enter")
    assert "last marks: rank 0: none" in str(hang({0: None}, 1, 1))
