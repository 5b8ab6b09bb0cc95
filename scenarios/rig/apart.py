"""A function in a forked child with a deadline: for what may spoil this process, kill it, or never come back."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import time
from typing import Any, Callable, NoReturn

from rig.sweep import descendants

_PIECE = 1 << 16


class ApartError(Exception):
    """The child left no answer; the message says what became of it."""


class Apart:
    """A started child. What ``function`` returns comes back as JSON, in one line of a pipe."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._pipe, write = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        self._pid = os.fork()
        if self._pid == 0:
            os.close(self._pipe)
            _answer(function, write)
        os.close(write)

    def result(self, until: float) -> Any:
        """What the function returned; nothing of the child is left. Raises ApartError if it ends without a word, or
        is still silent at ``until`` (of ``time.monotonic``)."""
        try:
            line = self._read(until)
        finally:
            os.close(self._pipe)
            status = self._end()
        if line is not None:
            return json.loads(line)
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) != signal.SIGKILL:
            raise ApartError(f"ended by {signal.Signals(os.WTERMSIG(status)).name}")
        raise ApartError("ended without an answer" if time.monotonic() < until else "did not answer in time")

    def _read(self, until: float) -> bytes | None:
        """One whole line: its end and not the pipe's, which the child's own children may hold open."""
        data = b""
        while not data.endswith(b"\n"):
            ready, _, _ = select.select([self._pipe], [], [], max(0.0, until - time.monotonic()))
            piece = os.read(self._pipe, _PIECE) if ready else b""
            if not piece:
                return None
            data += piece
        return data

    def _end(self) -> int:
        """End the child and all below it; its wait status."""
        for pid in [*descendants(self._pid), self._pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return os.waitpid(self._pid, 0)[1]


def _answer(function: Callable[[], Any], pipe: int) -> NoReturn:
    """The child's life. Nothing of the parent's may run when it ends: no handler, no buffer, no ``finally``."""
    code = 1
    try:
        line = json.dumps(function()).encode() + b"\n"
        while line:
            line = line[os.write(pipe, line) :]
        code = 0
    except BaseException as exc:  # whatever it is, it ends here
        sys.stderr.write(f"rig: {type(exc).__name__}: {exc}\n")
        sys.stderr.flush()
    finally:
        os._exit(code)
