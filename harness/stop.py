"""Ctrl-C: the first is a request, every further one means now, and none of them cuts the winding down short."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

_T = TypeVar("_T")
_POLL = 0.5  # seconds: a signal that another thread of ours was given does not wake a wait without an end
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stop:
    """The wish to end a run: asked once, cells get their grace; asked again, they are killed at once."""

    def __init__(self) -> None:
        self._asked = threading.Event()
        self._at_once = threading.Event()

    @property
    def asked(self) -> bool:
        return self._asked.is_set()

    @property
    def at_once(self) -> bool:
        return self._at_once.is_set()

    def ask(self) -> None:
        (self._at_once if self.asked else self._asked).set()

    @contextlib.contextmanager
    def on_signals(self) -> Iterator[None]:
        """SIGINT, SIGTERM and SIGHUP ask. The first raises KeyboardInterrupt as well, where nothing had been asked.

        Once asked, they are ignored afterwards: what is left is to end, and the interpreter's own end takes a handler
        of ours away too early.
        Signals that the caller has set to be ignored (nohup, a shell's background) stay ignored. Outside of the main
        thread, where no handler can be set, this does nothing.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        ours = [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        before = [(number, signal.signal(number, self._signalled)) for number in ours]
        try:
            yield
        finally:
            for number, handler in before:
                signal.signal(number, signal.SIG_IGN if self.asked else handler)

    def _signalled(self, _number: int, _frame: object) -> None:
        begun = self.asked
        self.ask()
        if not begun:
            raise KeyboardInterrupt


def aside(work: Callable[[], _T], stop: Stop, name: str) -> _T:
    """Do it in a thread, to its end: Ctrl-C, an exception in this one, must not part what is held from who holds it.

    It asks `stop`, and is raised when the work has ended.
    """
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix=name) as pool:
        try:
            future = pool.submit(work)
            while not future.done():
                wait([future], timeout=_POLL)
            return future.result()
        except KeyboardInterrupt:
            if not stop.asked:  # a second time would mean, at once
                stop.ask()
            raise
