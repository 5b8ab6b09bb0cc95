"""Memory measured outside of the engine: real processes and pages, a scripted driver."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rig import memory
from rig.events import Events
from rig.memory import MIB, Meter, Sample
from rig.outcomes import OracleError

from tests.rig.run import read_events

HOLD = "import sys; block = bytearray(b'x') * (64 << 20); print('held', flush=True); sys.stdin.read()"


class Driver:
    """NVML with two GPUs: 1 MiB and 2 MiB in use."""

    def __init__(self) -> None:
        self.open = 0

    def nvmlInit(self) -> None:
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, number: int) -> int:
        return number

    def nvmlDeviceGetHandleByUUID(self, name: str) -> int:
        return {"GPU-a": 0, "GPU-b": 1}[name]

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return SimpleNamespace(used=(handle + 1) * MIB)


@pytest.fixture
def child(out: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process of this attempt, in a session of its own."""
    held = subprocess.Popen(
        [sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    )
    assert held.stdout is not None
    assert held.stdout.readline() == b"held\n"
    yield held
    held.kill()
    held.communicate()


def scripted(monkeypatch: pytest.MonkeyPatch, *used: int) -> None:
    """The next samples of a GPU; the last one stays."""
    left = list(used)
    monkeypatch.setattr(memory, "sample", lambda device: Sample(left.pop(0) if len(left) > 1 else left[0], 5, 0))
    monkeypatch.setattr(memory, "SETTLE_SECONDS", 0.3)


def reason(call: Any, *args: Any) -> str:
    with pytest.raises(OracleError) as caught:
        call(*args)
    return caught.value.reason


def test_pages_of_another_process_count_until_it_lets_go(child: subprocess.Popen[bytes]) -> None:
    before = memory.sample("cpu")
    assert child.pid in memory.processes()
    child.kill()
    child.wait()
    after = memory.sample("cpu")
    assert after.device is None
    assert 50 * MIB < before.rss - after.rss < 100 * MIB


def test_pages_that_are_only_reserved_do_not_count() -> None:
    before = memory.sample("cpu").rss
    with mmap.mmap(-1, 64 * MIB) as reserved:
        assert memory.sample("cpu").rss - before < 10 * MIB
        reserved.write(b"x" * (64 * MIB))
        assert memory.sample("cpu").rss - before > 50 * MIB


@pytest.mark.parametrize(
    ("named", "used"), [("", 3), ("0", 1), ("1", 2), ("GPU-b", 2), ("GPU-a,GPU-b", 3), ("0, 1", 3)]
)
def test_visible_gpus_by_number_and_by_uuid(monkeypatch: pytest.MonkeyPatch, named: str, used: int) -> None:
    driver = Driver()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    assert memory._by_nvml(driver) == used * MIB
    assert driver.open == 0


def test_without_nvml_by_nvidia_smi(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho '0, GPU-a, 1'\necho '1, GPU-b, 2'\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for named, used in (("", 3), ("1", 2), ("GPU-a", 1)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
        assert memory._by_smi() == used * MIB


def test_nobody_to_ask_is_no_measurement(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeError, match="neither pynvml nor nvidia-smi"):
        memory._by_smi()


def test_freed_late_is_freed(monkeypatch: pytest.MonkeyPatch, out: Path) -> None:
    scripted(monkeypatch, 100, 100, 30)
    assert Meter(Events(out), "cuda", 80).frees("asleep", before=100) == 30
    said = {event["name"]: event["value"] for event in read_events(out)}
    assert said == {"memory.asleep.device": 30, "memory.asleep.rss": 5, "memory.asleep.shm": 0}


def test_less_than_the_cache_is_not_freed(monkeypatch: pytest.MonkeyPatch, out: Path) -> None:
    scripted(monkeypatch, 40)
    assert reason(Meter(Events(out), "cuda", 80).frees, "asleep", 100) == "not-freed"


def test_what_nobody_asked_for_must_stay(monkeypatch: pytest.MonkeyPatch, out: Path) -> None:
    scripted(monkeypatch, 95)
    meter = Meter(Events(out), "cuda", 80)
    monkeypatch.setattr(memory, "KEEP_SECONDS", 0.1)
    assert meter.keeps("unflagged", 100) == 95
    assert reason(meter.keeps, "unflagged", 104) == "freed"


@pytest.mark.parametrize(
    ("device", "rss", "grows"),
    [
        ([0, 100, 100, 101], [0, 500, 500, 510], None),
        ([0, 10, 20, 30], [0, 0, 0, 0], "device"),
        ([5, 5, 5, 5], [0, 100, 200, 300], "rss"),
        ([None] * 4, [0, 100, 200, 300], "rss"),
    ],
)
def test_growth_is_seen_after_the_first_cycle(
    monkeypatch: pytest.MonkeyPatch, out: Path, device: list[int | None], rss: list[int], grows: str | None
) -> None:
    samples = [Sample(d and d * MIB, r * MIB, 0) for d, r in zip(device, rss, strict=True)]
    monkeypatch.setattr(memory, "sample", lambda _: samples.pop(0))
    meter = Meter(Events(out), "cuda", 0)
    for _ in range(4):
        meter.used("asleep")
    if grows is None:
        meter.level("asleep")
        return
    with pytest.raises(OracleError, match=f"asleep: {grows} ") as caught:
        meter.level("asleep")
    assert caught.value.reason == "grows"
