"""Imported by every Python of a cell: its stacks go to ``artifacts/stacks/<pid>.txt`` on SIGUSR2.

By faulthandler, so that a process that hangs in C answers too. SIGUSR1 is vLLM's own in 0.7.3-0.8.2. Outside of a cell,
and where the folder cannot be written, nothing happens: no program may fail by what only looks at it.
"""

import contextlib
import os


def _open() -> None:
    import faulthandler
    import signal

    folder = os.path.join(os.environ["VLLM_MATRIX_OUT"], "artifacts", "stacks")  # noqa: PTH118 - pathlib costs 10 ms
    os.makedirs(folder, exist_ok=True)  # noqa: PTH103
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
    file = os.open(os.path.join(folder, f"{os.getpid()}.txt"), flags, 0o644)  # noqa: PTH118
    global _file
    _file, former = file, _file
    faulthandler.register(signal.SIGUSR2, file=file, all_threads=True)
    if former is not None:  # after a fork: the parent's
        os.close(former)


def _quietly() -> None:
    with contextlib.suppress(Exception):
        _open()


_file = None
if "VLLM_MATRIX_CELL" in os.environ and "VLLM_MATRIX_OUT" in os.environ:  # the supervisor's mark: it tidies up
    _quietly()
    os.register_at_fork(after_in_child=_quietly)
