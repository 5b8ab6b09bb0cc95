"""The stacks that the processes of a cell wrote before we ended it: read without trust, the engine's first."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from harness import events as ev

FOLDER = "artifacts/stacks"  # in `out/`
SHOWN = 12  # processes
TEXT = 6_000  # characters of each
_LIST = 512 << 10  # bytes
_STACK = 64 << 10  # bytes

# How the kernel calls what a process does (proc(5)).
STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "waiting for a disk or device",
    "Z": "dead, not yet waited for",
    "T": "stopped",
    "t": "traced",
    "I": "idle",
    "X": "dead",
}

Words = Annotated[str, AfterValidator(lambda text: " ".join(ev.clean(text).split())), Field(max_length=20_000)]


class _Model(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class Process(_Model):
    """A process of the cell, as the rig found it. `stack` names its file."""

    pid: Annotated[int, Field(ge=0, lt=1 << 31)]
    ppid: Annotated[int, Field(ge=0, lt=1 << 31)] | None = None
    rank: Annotated[int, Field(ge=0, lt=1 << 31)] | None = None
    state: Words | None = None
    wchan: Words | None = None
    command: Words | None = None
    stack: Words | None = None

    @property
    def does(self) -> str:
        """`sleeping in futex_wait_queue`"""
        state = STATES.get((self.state or "")[:1], self.state or "state not known")
        return f"{state} in {self.wchan}" if self.wchan else state


class Processes(_Model):
    """`processes.json` of docs/formats.md."""

    schema_version: Annotated[Literal[1], Field(alias="schema")]
    processes: Annotated[tuple[Process, ...], Field(max_length=4096)]


@dataclass(frozen=True, kw_only=True)
class Stack:
    """A process, and the end of the stacks that it wrote, if it did."""

    process: Process
    text: str = ""
    left_out: int = 0  # characters

    @property
    def title(self) -> str:
        """`rank 1, process 233: sleeping in futex_wait_queue`"""
        rank = f"rank {self.process.rank}, " if self.process.rank is not None else ""
        return f"{rank}process {self.process.pid}: {self.process.does}"


def read_stacks(out: Path) -> tuple[Stack, ...]:
    """What lies in a cell's `out/`; the process that holds the engine comes first. Empty where there is nothing."""
    data = ev.read_below(out, f"{FOLDER}/processes.json", _LIST)
    try:
        found = Processes.model_validate_json(data).processes if data is not None else ()
    except ValidationError:
        return ()
    return tuple(sorted((_stack(out, process) for process in found), key=_order))


def _stack(out: Path, process: Process) -> Stack:
    name = f"{process.pid}.txt"
    data = ev.read_below(out, f"{FOLDER}/{name}", _STACK + 1024) if process.stack == name else None
    text = _main_first(ev.clean((data or b"").decode(errors="replace"))).strip()
    return Stack(process=process, text=text[:TEXT], left_out=max(0, len(text) - TEXT))


_THREAD = re.compile(r"^(?=(?:Current thread|Thread) 0x)", re.MULTILINE)


def _main_first(text: str) -> str:
    """faulthandler ends with the thread that it ran in, which is most often the one that matters. Of several times that
    a process was asked, the last."""
    threads = [thread.strip() for thread in _THREAD.split(text) if thread.strip()]
    current = [number for number, thread in enumerate(threads) if thread.startswith("Current thread")]
    if not current:
        return text
    last, before = current[-1], (current[-2] if len(current) > 1 else -1)
    return "\n\n".join([threads[last], *threads[before + 1 : last], *threads[last + 1 :]])


def _order(stack: Stack) -> tuple[int, float, int]:
    """An engine core, what runs vLLM, what runs a check or a rank, other stacks, nothing; ranks in their order."""
    process, text = stack.process, f"{stack.process.command}\n{stack.text}"
    kind = next((n for n, signs in enumerate(_ENGINE) if stack.text and re.search(signs, text)), len(_ENGINE))
    rank = process.rank if process.rank is not None else float("inf")
    return (kind + (not stack.text), rank, process.pid)


# Signs of the process that holds the engine, the surest first.
_ENGINE = (
    r"\bEngineCore|\brun_(busy_loop|engine_core)\b",
    r"/vllm/",
    r"/test_\w+\.py\", line|/rig/(engine|spmd)\.py\"",
)


def shown(stacks: Sequence[Stack]) -> tuple[tuple[Stack, ...], tuple[Stack, ...]]:
    """Those with stacks, as many as are shown; and those that are only named."""
    with_text = tuple(stack for stack in stacks if stack.text)[:SHOWN]
    return with_text, tuple(stack for stack in stacks if stack not in with_text)
