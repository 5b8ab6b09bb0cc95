"""Cells that were ended, or fell, as they might lie on disk: two ranks that hang, and other bad ends."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

from harness.cells import Cell
from harness.matrix import Matrix, build_matrix
from harness.records import ExitState, LastMark, MemoryState, Record, attempt_folder
from harness.status import Status
from tests.browser import sample

HUNG = "vllm-0.8.5@cpu/spmd_barriers[layout=dp2]"
HOSTILE = "</pre><script>alert(4)</script>\x1b[31m\x07\u202e{{ 1 }}"
DEADLINES = {"total": 900.0, "silence": 300.0, "start": 120.0, "import": 300.0, "init": 600.0}
REASON = (
    "hang: no event for 300 s; rank 1 did not come to barrier 3; rank 0 in barrier 3 for 301 s, "
    "rank 1 in generate 2 for 300 s"
)

_SITE = "/opt/venv/lib/python3.11/site-packages"
WAITING = f"""Thread 0x00007f10a2ffd640 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 324 in wait
  File "{_SITE}/tqdm/_monitor.py", line 60 in run

Current thread 0x00007f11b7c5d040 (most recent call first):
  File "/suite/rig/barrier.py", line 65 in wait
  File "/suite/rig/barrier.py", line 38 in __call__
  File "/suite/rig/spmd.py", line 141 in step
  File "<frozen runpy>", line 88 in _run_code
"""
ENGINE = (
    f"""Thread 0x00007f0c1b7fe640 (most recent call first):
  File "{_SITE}/torch/_inductor/compile_worker/subproc_pool.py", line 53 in _recv_msg

Current thread 0x00007f0d2c5d0040 (most recent call first):
  File "{_SITE}/vllm/attention/backends/torch_sdpa.py", line 512 in forward
  File "{_SITE}/vllm/model_executor/models/qwen2.py", line 187 in forward
  File "{_SITE}/vllm/worker/model_runner.py", line 1742 in execute_model
"""
    + "".join(f'  File "{_SITE}/vllm/engine/llm_engine.py", line {1400 + n} in step\n' for n in range(90))
    + f'  File "/suite/rig/engine.py", line 88 in generate\n  {HOSTILE}\n'
)


def cell(vllm: str, layout: str) -> Cell:
    return replace(sample.cell(vllm, "spmd_barriers", layout=layout), ranks=2)


def mark(name: str, n: int, state: str, seconds: float) -> LastMark:
    return LastMark.model_validate({"name": name, "n": n, "state": state, "at_seconds": seconds})


def killed(which: str, quiet: float, code: int = 143, **more: object) -> ExitState:
    given = {"started": True, "exit_code": code, "killed": which, "deadlines": DEADLINES, "quiet_seconds": quiet}
    return ExitState.model_validate({**given, "seconds": 361.4, **more})


def hung() -> ExitState:
    """Rank 0 waits at barrier 3, to which rank 1 never came."""
    marks = {0: mark("barrier", 3, "enter", 60.2), 1: mark("generate", 2, "enter", 61.0)}
    barriers = {0: marks[0], 1: mark("barrier", 2, "leave", 58.9)}
    memory = MemoryState(version=2, peak_bytes=3 << 30, limit_bytes=6 << 30)
    return killed("silence", 300.4, last_marks=marks, last_barriers=barriers, oom=memory)


def flood() -> ExitState:
    """More ranks, and longer names, than anybody has use for."""
    name = HOSTILE + "x" * 4_000
    marks = {rank: mark(name if rank % 2 else "barrier", 10**40, "enter", 1e300) for rank in range(200)}
    return killed("total", 250.0, last_marks=marks, last_barriers={0: marks[0]}, error=HOSTILE)


def _ended(of: Cell, status: Status, reason: str, state: ExitState) -> Record:
    checks = (sample.passed("same_weights"), sample.plain("same_ids", status, reason))
    ended = sample.NOW - timedelta(minutes=14) + timedelta(seconds=392)
    advice = "`vllm-matrix show CELL` has where its ranks stood."
    return sample.record(of, *checks, exit=state, ended=ended, advice=advice)


def records() -> dict[str, Record]:
    memory = MemoryState(version=1, oom_kill=2, oom=2, peak_bytes=6 << 30, limit_bytes=6 << 30)
    left = "the container x could not be removed: device or resource busy"
    ends = {
        ("0.8.5", "dp2"): (Status.TIMEOUT, REASON, hung()),
        ("0.8.5", "tp2"): (Status.TIMEOUT, "slow: at work, but not done within 900 s", killed("total", 1.0, 137)),
        ("0.8.2", "dp2"): (Status.OOM, "host: killed for memory, limit 6.0 GiB", killed("", 0.1, 0, oom=memory)),
        ("0.8.2", "tp2"): (Status.CRASH, "signal: SIGSEGV", ExitState(started=True, exit_code=139)),
        ("0.10.0", "dp2"): (Status.TIMEOUT, "hang: no event", flood()),
        ("0.10.0", "tp2"): (Status.TIMEOUT, "init: the engine was not ready", killed("init", 9.0, error=left)),
    }
    found = [_ended(cell(*where), *how) for where, how in ends.items()]
    return {record.cell: record for record in found}


def matrix() -> Matrix:
    cells = [cell(vllm, layout) for vllm in ("0.8.2", "0.8.5", "0.10.0") for layout in ("dp2", "tp2")]
    return build_matrix(sample.RUN, cells, records(), (), sample.NOW, sample.MAX_AGE)


def process(pid: int, rank: int | None, command: str, stack: bool = True, **more: object) -> dict[str, object]:
    file = f"{pid}.txt" if stack else None
    listed = {"pid": pid, "ppid": 1, "rank": rank, "state": "S", "wchan": "futex_wait_queue", "command": command}
    return {**listed, "stack": file, **more}


def write_stacks(out: Path) -> None:
    """What the rig leaves of the hung cell."""
    folder = out / "artifacts" / "stacks"
    folder.mkdir(parents=True)
    rank = "/opt/venv/bin/python3 -m rig.spmd"
    processes = [
        process(1, None, "python3 -m rig", stack=False, state="R", wchan=""),
        process(31, None, "/opt/venv/bin/python3 -m pytest -n1 /suite/test_spmd_barriers.py"),
        process(57, 0, rank),
        process(58, 1, rank, state="R", wchan=""),
        process(77, 1, "ninja", stack=False, state="Z", wchan=None),
        process(78, 1, HOSTILE, stack=False, state=HOSTILE, wchan=HOSTILE),
        process(90, None, "forged", stack="../../../../stderr.log"),
    ]
    processes[-1]["stack"] = "../../../../stderr.log"
    (folder / "processes.json").write_text(json.dumps({"schema": 1, "processes": processes}))
    for pid, text in ((31, WAITING.replace("rig/spmd", "rig/launcher")), (57, WAITING), (58, ENGINE)):
        (folder / f"{pid}.txt").write_text(text)


def write(results: Path, of: Matrix) -> tuple[Path, Path]:
    """Lay out the run. Returns the run's folder and the suite's."""
    found = sample.write(results, of)
    write_stacks(attempt_folder(results, sample.RUN, HUNG, 1) / "out")
    return found
