"""An exception as data: the ``error`` of ``end`` and ``collect_error`` events."""

from __future__ import annotations

import re
import sysconfig
import traceback
from pathlib import Path
from types import TracebackType
from typing import Any, Iterator

from rig.events import TEXT_CHARS, cut_middle
from rig.outcomes import OracleError, RankError

TRACEBACK_CHARS = 16_000
FRAMES = 60
NAME_CHARS = 200

DEVICE_FAULT, DEVICE_OOM = "device-fault", "device-oom"
_OUT_OF_MEMORY = re.compile(r"\b(CUDA|HIP)\b.{0,60}\bout of memory\b|\bcudaErrorMemoryAllocation\b", re.IGNORECASE)
_FAULT = re.compile(
    r"\b(CUDA|HIP) (error|failure)\b|illegal memory access|device-side assert|unspecified launch failure"
    r"|misaligned address|uncorrectable ECC|\bcudaError[A-Z]\w+|CU(BLAS|DNN)_STATUS_EXECUTION_FAILED"
    r"|unhandled cuda error|ncclUnhandledCudaError",
    re.IGNORECASE,
)
# Errors that leave the context as it was: the device was asked for what it has not.
_REFUSAL = re.compile(
    r"no kernel image is available|invalid (device ordinal|device function|argument|configuration argument)"
    r"|no CUDA-capable device|driver version is insufficient|operation not supported|initialization error",
    re.IGNORECASE,
)

RIG = Path(__file__).resolve().parent
SUITE = RIG.parent
STDLIB = Path(sysconfig.get_paths()["stdlib"]).resolve()

# The machinery between the runner and a check says nothing about the check.
_RUNNER = {"site": ("_pytest/", "pluggy/", "xdist/", "execnet/"), "rig": ("plugin.py",), "suite": (), "python": ()}


def describe(exc: BaseException) -> dict[str, Any]:
    """``exc`` as the contract's ``error``: type, bases, message, reason, frames, traceback, all capped."""
    if isinstance(exc, RankError):  # described where it was raised
        return exc.error
    bases = [base.__name__[:NAME_CHARS] for base in type(exc).__mro__[1:] if base is not object]
    return {
        "type": type(exc).__name__[:NAME_CHARS],
        "bases": bases[:20],
        "message": cut_middle(_message(exc), TEXT_CHARS),
        "reason": exc.reason if isinstance(exc, OracleError) else device_trouble(exc),
        "frames": _frames(exc),
        "traceback": cut_middle(_traceback(exc), TRACEBACK_CHARS),
    }


def device_trouble(exc: BaseException) -> str | None:
    """DEVICE_FAULT, DEVICE_OOM or None: what ``exc``, or what led to it, says of this process's device.

    After a fault nothing that this process asks of its device can be trusted. A rank's exception tells of another
    process, an oracle's words are its own.
    """
    if isinstance(exc, RankError):
        return None
    found = {_trouble(each) for each in _chain(exc) if not isinstance(each, AssertionError)}
    return next((trouble for trouble in (DEVICE_FAULT, DEVICE_OOM) if trouble in found), None)


def _trouble(exc: BaseException) -> str | None:
    message = _message(exc)
    if type(exc).__name__ == "OutOfMemoryError" or _OUT_OF_MEMORY.search(message):
        return DEVICE_OOM
    return DEVICE_FAULT if _FAULT.search(message) and not _REFUSAL.search(message) else None


def _chain(exc: BaseException) -> Iterator[BaseException]:
    """``exc`` and what it came from, as a traceback shows it."""
    seen: set[int] = set()
    each: BaseException | None = exc
    while each is not None and id(each) not in seen:
        seen.add(id(each))
        yield each
        each = each.__cause__ or (None if each.__suppress_context__ else each.__context__)


def _message(exc: BaseException) -> str:
    if isinstance(exc, SyntaxError):  # str() leaves the line itself out
        return "".join(traceback.format_exception_only(type(exc), exc)).strip()
    try:
        return str(exc)
    except Exception as err:  # a __str__ may raise anything
        return f"<str() raised {type(err).__name__}>"


def _traceback(exc: BaseException) -> str:
    try:
        return "".join(traceback.format_exception(type(exc), exc, _below_runner(exc.__traceback__)))
    except Exception as err:
        return f"<format_exception raised {type(err).__name__}>"


def _frames(exc: BaseException) -> list[dict[str, Any]]:
    frames = []
    for frame, line in traceback.walk_tb(exc.__traceback__):
        where, file = locate(frame.f_code.co_filename)
        if not _is_runner(where, file):
            function = frame.f_code.co_name[:NAME_CHARS]
            frames.append({"where": where, "file": file[-NAME_CHARS:], "line": line or 0, "function": function})
    if len(frames) > FRAMES:  # the outermost name the check, the innermost the cause
        frames = frames[: FRAMES // 3] + frames[-(FRAMES - FRAMES // 3) :]
    return frames


def raised_in(exc: BaseException) -> list[str]:
    """Code files from the outermost frame to the one that raised."""
    return [frame.f_code.co_filename for frame, _ in traceback.walk_tb(exc.__traceback__)]


def _below_runner(trace: TracebackType | None) -> TracebackType | None:
    """``trace`` without the runner's frames on top, unless there are no others."""
    below = trace
    while below is not None and _is_runner(*locate(below.tb_frame.f_code.co_filename)):
        below = below.tb_next
    return below or trace


def _is_runner(where: str, file: str) -> bool:
    return file.startswith(_RUNNER[where])


def locate(filename: str) -> tuple[str, str]:
    """(where, short path) of a code file: ``rig``, ``suite``, ``python`` or, for all else, ``site``.

    The suite wins over everything, wherever it is mounted; ``site`` is the rest on purpose: an editable checkout of
    vLLM is an installed package too.
    """
    if filename.startswith("<"):
        return "python", filename
    path = Path(filename)
    real = path.resolve()
    for where, root in (("rig", RIG), ("suite", SUITE)):
        if root in real.parents:
            return where, real.relative_to(root).as_posix()
    for folder in ("site-packages", "dist-packages"):  # of the path as it is: installers may link files into a cache
        if folder in path.parts:
            last = len(path.parts) - 1 - path.parts[::-1].index(folder)
            return "site", "/".join(path.parts[last + 1 :])
    if STDLIB in real.parents:
        return "python", real.relative_to(STDLIB).as_posix()
    return "site", "/".join(path.parts[-4:])
