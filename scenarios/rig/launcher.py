"""Starts the ranks of a cell, listens to them, and ends them whatever happened.

The process that launches holds no engine: a rank that dies or hangs is a finding of the check that waits for it, with
every rank's last mark, and never takes the checks along.

The rig starts the ranks itself where each has an engine of its own. Under torchrun such engines hang (seen on 0.6.3,
0.8.5 and 0.10.0): TORCHELASTIC_USE_AGENT_STORE makes vLLM's own store wait for ever for a server that
serves another one. Only one engine over all ranks, by vLLM's ``external_launcher``, is torchrun's.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Mapping, Sequence

from rig import reports, stacks
from rig.barrier import NAME as BARRIER
from rig.errors import SUITE
from rig.events import Events
from rig.marks import Listener, Mark, each
from rig.outcomes import OracleError
from rig.reports import FAILED, Reports

ALIVE = "alive"  # a rank's first report: its pid
FINISHED = "finished"  # a rank's last report: it has nothing left to do but to exit
FOLDER = "VLLM_MATRIX_RANKS_FOLDER"  # where they report, and by whom a process was started

POLL_SECONDS = 0.1
SETTLE_SECONDS = 2.0  # one rank's death is the next one's exception: wait for the cause before naming one
EXIT_SECONDS = 60.0
END_SECONDS = 10.0
LINGER_SECONDS = 5.0

# Left by a launcher around us (a cluster's, or torchrun's): an engine would take them for its own ranks. VLLM_DP_SIZE
# alone hangs after generation (vllm#13642).
_FOREIGN = frozenset({"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"})
_FOREIGN_PREFIXES = ("TORCHELASTIC_", "MASTER_", "ROLE_", "PET_", "VLLM_DP_")


@dataclass(frozen=True)
class Child:
    """A process to start, and the ranks that it is, or that it starts in turn."""

    ranks: tuple[int, ...]
    command: Sequence[str]
    environment: Mapping[str, str]


@dataclass(frozen=True)
class Limits:
    """Seconds: ``quiet`` without a word of any rank, ``total`` from the start. Below the host's own deadlines, so that
    a hang is a finding of a check. One rank that talks on is progress: ranks that wait for it must not count."""

    quiet: float
    total: float


def one_each(program: str, count: int, device: str, outer: Mapping[str, str]) -> list[Child]:
    """``count`` processes of the module ``program``; on CUDA each sees one device."""
    command = [sys.executable, "-m", program]
    return [Child((rank,), command, environment(rank, device, outer)) for rank in range(count)]


def torchrun(program: str, count: int, outer: Mapping[str, str]) -> list[Child]:
    """One ``torchrun`` that starts ``count`` processes of the module ``program``; each sees every device."""
    options = ["--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={count}", "--max-restarts=0"]
    command = [sys.executable, "-m", "torch.distributed.run", *options, "-m", program]
    return [Child(tuple(range(count)), command, scrubbed(outer))]


def scrubbed(outer: Mapping[str, str]) -> dict[str, str]:
    """``outer`` without what launchers leave in it."""
    return {k: v for k, v in outer.items() if k not in _FOREIGN and not k.startswith(_FOREIGN_PREFIXES)}


def environment(rank: int, device: str, outer: Mapping[str, str]) -> dict[str, str]:
    """One rank's environment: its number; its own device, or one thread and no pinning to cores of other cells."""
    kept = {**scrubbed(outer), "VLLM_MATRIX_RANK": str(rank)}
    if device == "cuda":
        visible = outer.get("CUDA_VISIBLE_DEVICES", "")
        devices = visible.split(",") if visible else [str(n) for n in range(rank + 1)]
        return {**kept, "CUDA_VISIBLE_DEVICES": devices[rank] if rank < len(devices) else ""}
    # "auto", 0.10.0's default, would give every rank all cores of a NUMA node, and as many threads
    return {**kept, "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "all"}


class Ranks:
    """Started ranks. ``wait`` raises what is wrong with them; ``end`` leaves none alive."""

    def __init__(self, children: Sequence[Child], events: Events, limits: Limits) -> None:
        self.numbers = sorted(rank for child in children for rank in child.ranks)
        self.folder = Path(tempfile.mkdtemp(prefix="vllm-matrix-ranks-"))
        self._events = events
        self._reports = Reports(self.folder)
        self._listener = Listener(events.out, len(self.numbers))
        self._limits = limits
        self._finding: BaseException | None = None
        self._begun = self._heard = time.monotonic()
        self._running = [(child, _start(child, self.folder)) for child in children]

    @property
    def marks(self) -> dict[int, list[Mark]]:
        """Each rank's marks until now."""
        self._listener.listen()
        return self._listener.marks

    def wait(self, stage: str) -> dict[int, dict[str, Any]]:
        """What every rank reports of ``stage``; raises the finding if one never will."""
        while True:
            found = {rank: self._reports.read(rank, stage) for rank in self.numbers}
            done = {rank: data for rank, data in found.items() if data is not None}
            if len(done) == len(found):
                return done
            self._raise_finding()
            time.sleep(POLL_SECONDS)

    def exits(self) -> dict[str, int | None]:
        """Return codes (negative: a signal; None: it would not end) of the started processes, all ranks finished."""
        self.wait(FINISHED)
        end = time.monotonic() + EXIT_SECONDS
        while time.monotonic() < end and any(process.poll() is None for _, process in self._running):
            time.sleep(POLL_SECONDS)
        return {_name(child.ranks): process.poll() for child, process in self._running}

    def left(self) -> list[str]:
        """What the ranks have started and left behind, as ``pid: command``; resource trackers get time to notice."""
        end = time.monotonic() + LINGER_SECONDS
        while self._alive() and time.monotonic() < end:
            time.sleep(POLL_SECONDS)
        return [f"{pid}: {_command(pid)}" for pid in self._alive()]

    def end(self) -> None:
        """Kill what still runs, wherever it has moved to; keep what the ranks said as evidence."""
        self._kill()
        self._keep()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _raise_finding(self) -> None:
        if self._finding is None:
            self._finding = self._look()
        if self._finding is not None:
            self._kill()
            raise self._finding.with_traceback(None)

    def _look(self) -> BaseException | None:
        """What is wrong, if anything is."""
        now = time.monotonic()
        if self._listener.listen():
            self._heard = now
        if self._failed() or self._gone():
            time.sleep(SETTLE_SECONDS)
            self._listener.listen()
            return cause(self._failed(), self._gone(), self._listener.last())
        quiet, total = now - self._heard, now - self._begun
        if quiet > self._limits.quiet or total > self._limits.total:
            self._dump_stacks()
            return hang(self._listener.last(), quiet, total)
        return None

    def _failed(self) -> dict[int, dict[str, Any]]:
        found = {rank: self._reports.read(rank, FAILED) for rank in self.numbers}
        return {rank: failed for rank, failed in found.items() if failed is not None}

    def _gone(self) -> dict[tuple[int, ...], int]:
        """Return codes of processes that ended before their ranks had finished."""
        codes = {child.ranks: process.poll() for child, process in self._running}
        ended = {ranks: code for ranks, code in codes.items() if code is not None}
        return {ranks: code for ranks, code in ended.items() if not all(map(self._finished, ranks))}

    def _finished(self, rank: int) -> bool:
        return self._reports.read(rank, FINISHED) is not None

    def _alive(self) -> list[int]:
        """Every process that descends from the ranks: parents and groups change, what they inherited does not."""
        wanted = f"{FOLDER}={self.folder}".encode()
        return [int(path.name) for path in Path("/proc").glob("[0-9]*") if wanted in _environ(int(path.name))]

    def _kill(self) -> None:
        end = time.monotonic() + END_SECONDS
        while (alive := self._alive()) and time.monotonic() < end:
            for pid in alive:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)
        for _, process in self._running:
            process.poll()  # no zombies

    def _dump_stacks(self) -> None:
        """Of all processes of the ranks; a rank's own also under its number."""
        found = stacks.dump(self._alive(), self._events.out)
        for rank in self.numbers:
            alive = self._reports.read(rank, ALIVE)
            if alive and alive["pid"] in found:
                self._events.artifact(f"stacks.rank{rank}.txt", stacks.of(alive["pid"], self._events.out))

    def _keep(self) -> None:
        """All reports in one artifact."""
        found = {path.stem: json.loads(path.read_bytes()) for path in sorted(self.folder.glob("rank*.json"))}
        self._events.artifact("ranks.json", json.dumps(found).encode())


def cause(
    failed: Mapping[int, Mapping[str, Any]], gone: Mapping[tuple[int, ...], int], last: Mapping[int, Mark | None]
) -> BaseException:
    """Which of several troubles is the one to report: a death without a word, then an exception, then a neighbour's
    exception about a broken barrier, which is only how it learned of another's end."""
    mute = {ranks: code for ranks, code in gone.items() if not set(ranks) & set(failed)}
    if mute:
        ends = ", ".join(f"{_name(ranks)} ended {_how(code)}" for ranks, code in mute.items())
        return OracleError("rank-died", f"{ends}; last marks: {each(last)}")
    real = {rank: report for rank, report in failed.items() if not _broken(report)}
    rank = min(real or failed)
    found = reports.exception(rank, failed[rank])
    return found if real else OracleError("barrier-broken", f"{found}; last marks: {each(last)}")


def hang(last: Mapping[int, Mark | None], quiet: float, total: float) -> OracleError:
    """Who did not come to the barrier that another one waits at, if there is one."""
    waiting = [rank for rank, mark in last.items() if mark and (mark.name, mark.state) == (BARRIER, "enter")]
    missing = [str(rank) for rank in last if rank not in waiting] if waiting else []
    who = f"rank {', '.join(missing)} did not come; " if missing else ""
    since = f"no word of any rank for {quiet:.0f} s, {total:.0f} s after the start"
    return OracleError("hang", f"{who}last marks: {each(last)} ({since})")


def _broken(failed: Mapping[str, Any]) -> bool:
    return "raised" in failed and failed["raised"]["reason"] == "barrier-broken"


def _start(child: Child, folder: Path) -> subprocess.Popen[bytes]:
    paths = filter(None, child.environment.get("PYTHONPATH", "").split(os.pathsep))
    path = os.pathsep.join(dict.fromkeys([str(SUITE), *paths]))
    environ = {**child.environment, FOLDER: str(folder), "PYTHONPATH": path}
    return subprocess.Popen(child.command, env=environ, cwd=folder, stdin=subprocess.DEVNULL)


def _name(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"the launcher of ranks {', '.join(map(str, ranks))}"


def _how(code: int) -> str:
    return f"with code {code}" if code >= 0 else f"by {signal.Signals(-code).name}"


def _environ(pid: int) -> list[bytes]:
    """A process's environment; [] for a zombie, one of somebody else's, or one that is gone."""
    return _read(pid, "environ").split(b"\0")


def _command(pid: int) -> str:
    return _read(pid, "cmdline").replace(b"\0", b" ").decode(errors="replace").strip()[:200]


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""
