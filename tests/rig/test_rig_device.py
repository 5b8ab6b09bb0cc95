"""After a fault of the device the checks that follow get a process that they can trust."""

from __future__ import annotations

from pathlib import Path

import pytest
from rig import errors
from rig.outcomes import OracleError, RankError

from tests.rig.run import Ran, run_cell

ILLEGAL = "CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be asynchronously reported"
NCCL = "NCCL error in: ProcessGroupNCCL.cpp:3384, unhandled cuda error (run with NCCL_DEBUG=INFO for details)"


@pytest.mark.parametrize(
    ("message", "trouble"),
    [
        (ILLEGAL, "device-fault"),
        ("CUDA error: device-side assert triggered", "device-fault"),
        ("CUDA error: unspecified launch failure", "device-fault"),
        ("cudaErrorLaunchFailure", "device-fault"),
        ("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm(`", "device-fault"),
        (NCCL, "device-fault"),
        ("NCCL error in: x.cpp:1, unhandled system error, NCCL version 2.21.5", None),
        ("CUDA out of memory. Tried to allocate 20.00 MiB.", "device-oom"),
        ("CUDA error: out of memory", "device-oom"),
        ("CUDA Error: out of memory at /workspace/csrc/cumem_allocator.cpp:62", "device-oom"),
        ("NCCL error: unhandled cuda error, Cuda failure 2 'out of memory'", "device-oom"),
        ("CUDA error: no kernel image is available for execution on the device", None),
        ("CUDA error: invalid device ordinal", None),
        ("Torch not compiled with CUDA enabled", None),
        ("DefaultCPUAllocator: can't allocate memory", None),
        ("'cuda' is no device here", None),
    ],
)
def test_what_an_exception_says_of_the_device(message: str, trouble: str | None) -> None:
    assert errors.device_trouble(RuntimeError(message)) == trouble
    assert errors.describe(RuntimeError(message))["reason"] == trouble


def test_torchs_own_class_says_it_by_its_name() -> None:
    class OutOfMemoryError(RuntimeError):
        pass

    assert errors.describe(OutOfMemoryError("Allocation on device"))["reason"] == "device-oom"


def chained(outer: BaseException, inner: BaseException, how: str) -> BaseException:
    try:
        try:
            raise inner
        except RuntimeError:
            if how == "none":
                raise outer from None
            if how == "cause":
                raise outer from inner
            raise outer  # noqa: B904 - the context is what is tested
    except type(outer) as exc:
        return exc


@pytest.mark.parametrize(("how", "trouble"), [("cause", "device-fault"), ("context", "device-fault"), ("none", None)])
def test_what_led_to_it_counts(how: str, trouble: str | None) -> None:
    assert errors.device_trouble(chained(ValueError("engine died"), RuntimeError(ILLEGAL), how)) == trouble


def test_a_fault_outweighs_a_lack_of_memory() -> None:
    both = chained(ValueError("CUDA out of memory"), RuntimeError(ILLEGAL), "cause")
    assert errors.device_trouble(both) == "device-fault"


def test_an_oracle_keeps_its_reason_and_is_believed() -> None:
    assert errors.device_trouble(OracleError("ids-differ", ILLEGAL)) is None
    found = chained(OracleError("no-answer", "of the engine"), RuntimeError(ILLEGAL), "cause")
    assert errors.device_trouble(found) == "device-fault"
    assert errors.describe(found)["reason"] == "no-answer"


def test_a_ranks_fault_is_not_of_this_process() -> None:
    error = errors.describe(RuntimeError(ILLEGAL))
    found = RankError(1, error)
    assert errors.device_trouble(found) is None
    assert errors.describe(found)["reason"] == "device-fault"


BEGIN = f'''"""Throw-away?"""
import os
import pytest

class OutOfMemoryError(RuntimeError):
    pass

def fault():
    raise RuntimeError({ILLEGAL!r})
'''

ONCE = """
def test_before(events):
    events.property("pid", os.getpid())

def test_faults(events):
    if os.fork() == 0:  # an engine core that holds the device
        os.setsid()
        import time
        time.sleep(300)
    fault()

def test_after(events):
    events.property("pid", os.getpid())

def test_oom():
    raise OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

def test_same(events):
    events.property("pid", os.getpid())

@pytest.fixture
def late():
    yield
    fault()

def test_in_teardown(late):
    pass

def test_last(events):
    events.property("pid", os.getpid())
"""


def run_text(suite: Path, tmp_path: Path, text: str) -> Ran:
    (suite / "test_x.py").write_text(BEGIN + text)
    return run_cell(tmp_path / "cell", "test_x.py", suite)


def test_the_checks_after_a_fault_run_in_a_fresh_process(suite: Path, tmp_path: Path) -> None:
    ran = run_text(suite, tmp_path, ONCE)
    bad = {check: end["error"]["reason"] for check, end in ran.ends.items() if end["outcome"] == "raised"}
    assert bad == {"faults": "device-fault", "oom": "device-oom", "in_teardown": "device-fault"}
    assert sorted(ran.outcomes) == sorted(ran.of("plan")[0]["checks"])
    pids = {event["check"]: event["value"] for event in ran.of("property") if event["name"] == "pid"}
    assert pids["before"] not in (pids["after"], pids["same"], pids["last"])
    told = [(event["name"], event["check"]) for event in ran.of("property") if event["name"] != "pid"]
    replaced = [("device.fault", "faults"), ("worker.replaced", "faults"), ("worker.outlived_by", "faults")]
    assert told == [*replaced, ("device.fault", "in_teardown"), ("worker.replaced", "in_teardown")]
    assert ran.of("down") == []
    assert len({event["pid"] for event in ran.of("hello")}) == 3
    assert (ran.code, ran.done) == (0, {"schema": 1, "exit": 1, "checks": 7})


def test_where_no_fresh_process_is_left_the_checks_are_refused(suite: Path, tmp_path: Path) -> None:
    many = "@pytest.mark.parametrize('n', range(7))\ndef test_f(n):\n    fault()\n"
    ran = run_text(suite, tmp_path, many)
    assert len(ran.of("hello")) == 5  # the first, and as many as may follow
    assert {end["error"]["reason"] for end in ran.ends.values()} == {"device-fault"}
    last = [check for check, end in ran.ends.items() if end["error"]["type"] == "RuntimeError"][4]
    refused = [end["error"] for end in ran.ends.values() if end["error"]["type"] == "OracleError"]
    words = f"not run: the device failed in {last}, and there is no fresh process left"
    assert [error["message"] for error in refused] == [words] * 2
    assert {error["frames"][-1]["where"] for error in refused} == {"rig"}
    assert len(ran.ends) == 7
    assert ran.code == 0
