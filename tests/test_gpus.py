"""The inventory, CUDA_VISIBLE_DEVICES and the gates, against a scripted NVML with the real library's errors."""

from __future__ import annotations

import os
import pwd
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from harness import gpus as module
from harness.errors import ConfigurationError, InfrastructureError
from harness.gpus import (
    Gpu,
    GpuBusyError,
    Inventory,
    Nvml,
    Refused,
    allowed,
    idle_first,
    left_behind,
    take_inventory,
    visible_to_cuda,
    wait_until_free,
)
from tests.conftest import ROOT

MIB, GIB = 1 << 20, 1 << 30
A = "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6"
B = "GPU-89aaaaaa-0000-4106-c12f-20bd9faed9f6"
C = "GPU-1bbbbbbb-0000-4106-c12f-20bd9faed9f6"
NEVER: Callable[[], bool] = lambda: False  # noqa: E731


@dataclass
class Card:
    """A scripted device. `used` is what is in use at each asking, the last one for ever."""

    uuid: str
    name: str = "NVIDIA H200"
    bus: str = "00000000:0F:00.0"
    capability: tuple[int, int] = (9, 0)
    used: list[int] = field(default_factory=lambda: [0])
    mig: bool | None = False  # None: cannot be divided
    parts: tuple[str, ...] = ()
    processes: list[SimpleNamespace] = field(default_factory=list)
    broken: type[Exception] | None = None


class ScriptedNvml:
    """The functions that are called, over `cards`; everything else, errors and constants, is the real library's."""

    def __init__(self, cards: Sequence[Card] = (), missing: type[Exception] | None = None, old: bool = False) -> None:
        self.cards = list(cards)
        self.missing = missing
        self.old = old
        self.open = 0

    def __getattr__(self, name: str) -> Any:
        assert not name.startswith("nvmlDevice"), f"not scripted: {name}"
        return getattr(pynvml, name)

    def nvmlInit(self) -> None:
        if self.missing:
            raise self.missing
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlSystemGetDriverVersion(self) -> str:
        return "580.159.04"

    def nvmlDeviceGetCount(self) -> int:
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Card:
        card = self.cards[index]
        if card.broken:
            raise card.broken
        return card

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Card:
        for card in self.cards:
            if card.uuid == uuid and not card.broken:
                return card
        raise pynvml.NVMLError_NotFound

    def nvmlDeviceGetUUID(self, card: Card | str) -> str:
        return card if isinstance(card, str) else card.uuid

    def nvmlDeviceGetName(self, card: Card | str) -> str:
        return "NVIDIA H200 MIG 1g.18gb" if isinstance(card, str) else card.name

    def nvmlDeviceGetPciInfo(self, card: Card) -> SimpleNamespace:
        return SimpleNamespace(busId=card.bus)

    def nvmlDeviceGetCudaComputeCapability(self, card: Card) -> list[int]:
        return list(card.capability)

    def nvmlDeviceGetMemoryInfo(self, card: Card, version: int | None = None) -> SimpleNamespace:
        if self.old and version:
            raise pynvml.NVMLError_FunctionNotFound
        used = card.used.pop(0) if len(card.used) > 1 else card.used[0]
        return SimpleNamespace(total=140 * GIB, used=used + (0 if version else 600 * MIB))

    def nvmlDeviceGetMigMode(self, card: Card) -> list[int]:
        if card.mig is None:
            raise pynvml.NVMLError_NotSupported
        return [int(card.mig), int(card.mig)]

    def nvmlDeviceGetMaxMigDeviceCount(self, card: Card) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, card: Card, number: int) -> str:
        if number >= len(card.parts):
            raise pynvml.NVMLError_NotFound
        return card.parts[number]

    def nvmlDeviceGetComputeRunningProcesses(self, card: Card) -> list[SimpleNamespace]:
        if self.old:
            raise pynvml.NVMLLibraryMismatchError
        return card.processes

    def nvmlDeviceGetGraphicsRunningProcesses(self, card: Card) -> list[SimpleNamespace]:
        raise pynvml.NVMLError_NotSupported


def process(pid: int, used: int | None) -> SimpleNamespace:
    return SimpleNamespace(pid=pid, usedGpuMemory=used)


def inventory(*cards: Card) -> Inventory:
    return take_inventory(ScriptedNvml(cards))


def three(**changes: Any) -> Inventory:
    """Alike, and NVML does not list them in the order of their addresses."""
    first = Card(A, bus="00000000:0F:00.0")
    return inventory(
        Card(B, bus="00000000:2a:00.0"), first, Card(**{"uuid": C, "bus": "00000000:5B:00.0", "mig": None, **changes})
    )


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_POLL", 0.01)


@pytest.fixture
def loud() -> Iterator[subprocess.Popen[bytes]]:
    """A process whose command line would paint on a terminal."""
    command = [sys.executable, "-c", "print(flush=True); input()", "\x1b[2J\u202e", "x" * 9999]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert child.stdout
    assert child.stdout.readline() == b"\n"  # for a moment after it started it has no command line
    yield child
    child.communicate()


def test_inventory() -> None:
    library = ScriptedNvml([Card(A, used=[4 * MIB]), Card(B, bus="00000000:0a:00.0", capability=(8, 6), mig=None)])
    found = take_inventory(library)
    assert library.open == 0
    assert found.driver == "580.159.04"
    assert found.reason == ""
    assert found.gpus == (
        Gpu(uuid=B, index=1, bus="00000000:0A:00.0", name="NVIDIA H200", total=140 * GIB, used=0, capability="8.6"),
        Gpu(
            uuid=A, index=0, bus="00000000:0F:00.0", name="NVIDIA H200", total=140 * GIB, used=4 * MIB, capability="9.0"
        ),
    )


def test_an_old_driver_counts_its_own_memory_as_used() -> None:
    (gpu,) = take_inventory(ScriptedNvml([Card(A, used=[4 * MIB])], old=True)).gpus
    assert gpu.used == 604 * MIB


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (pynvml.NVMLError_LibraryNotFound, "no NVIDIA driver here"),
        (pynvml.NVMLError_DriverNotLoaded, "not loaded"),
        (pynvml.NVMLError_NoPermission, "/dev/nvidiactl"),
        (pynvml.NVMLError_LibRmVersionMismatch, "restart the machine"),
        (pynvml.NVMLError_Unknown, "inside of a container, start a new one"),
        (pynvml.NVMLError_IrqIssue, "does not work: Interrupt Request Issue"),
    ],
)
def test_without_nvml_the_inventory_is_empty_and_says_why(error: type[Exception], words: str) -> None:
    found = take_inventory(ScriptedNvml(missing=error))
    assert (found.gpus, found.refused) == ((), ())
    assert words in found.reason
    assert allowed(found, {"CUDA_VISIBLE_DEVICES": "0"}).notes == (found.reason,)
    with pytest.raises(InfrastructureError, match=words):
        Nvml(ScriptedNvml(missing=error))


def test_a_driver_without_gpus() -> None:
    assert inventory().reason == "the NVIDIA driver knows no GPU"


def test_mig_devices_are_listed_and_refused() -> None:
    found = inventory(Card(A, mig=True, parts=("MIG-1", "MIG-2")), Card(B))
    assert [gpu.uuid for gpu in found.gpus] == [B]
    assert [(device.uuid, device.name) for device in found.refused] == [
        (A, "NVIDIA H200"),
        ("MIG-1", "NVIDIA H200 MIG 1g.18gb"),
        ("MIG-2", "NVIDIA H200 MIG 1g.18gb"),
    ]
    assert "MIG mode" in found.refused[0].reason
    assert "a part of a GPU" in found.refused[1].reason
    left = allowed(found, {})
    assert [gpu.uuid for gpu in left.gpus] == [B]
    assert len(left.notes) == 3


def test_a_lost_gpu_costs_no_other() -> None:
    found = inventory(Card(A, broken=pynvml.NVMLError_GpuIsLost), Card(B))
    assert [gpu.uuid for gpu in found.gpus] == [B]
    assert found.refused == (
        Refused(index=0, uuid="", name="", reason="NVML does not tell what is needed: GPU is lost"),
    )
    alone = inventory(Card(A, broken=pynvml.NVMLError_NoPermission))
    assert alone.reason == "none of the GPUs here can be used"
    assert "Insufficient Permissions" in allowed(alone, {}).notes[0]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, [A, B, C]),
        ("", []),
        (" ", []),
        ("-1", []),
        ("none", []),
        ("NoDevFiles", []),
        ("0", [A]),
        ("2,0", [C, A]),
        (" 1 , 2", [B, C]),
        ("0,2,-1,1", [A, C]),
        ("0,3,1", [A]),
        ("0,,1", [A]),
        ("1x,2", [B, C]),
        ("+1", [B]),
        ("0,0", []),
        ("0,1,0", []),
        ("²", []),
        (A, [A]),
        ("GPU-8932,GPU-1", [A, C]),
        ("GPU-1,GPU-8932f937", [C, A]),
        ("GPU-1, GPU-8932f937", [C]),  # a blank is part of the name
        (" GPU-1", []),
        ("GPU-", []),
        ("GPU-89", []),
        ("GPU-1,GPU-89,GPU-8932", [C]),
        ("GPU-1,GPU-7,GPU-8932", [C]),
        ("GPU-8932F937", [A]),
        ("gpu-8932f937", [A]),
        ("GPU-1,0", [C]),
        ("0,GPU-1", [A]),
        ("GPU-8932,GPU-8932f937", []),
        ("MIG-1", []),
        ("GPU-1,MIG-1", [C]),
        ("0,MIG-1", [A]),
    ],
)
def test_cuda_visible_devices(value: str | None, expected: list[str]) -> None:
    left = allowed(three(), {} if value is None else {"CUDA_VISIBLE_DEVICES": value})
    assert [gpu.uuid for gpu in left.gpus] == expected
    complete = value is None or len(expected) == len(value.split(","))
    assert bool(left.notes) is not complete
    assert all("CUDA_VISIBLE_DEVICES" in note for note in left.notes)


def test_indices_of_different_gpus_want_an_order() -> None:
    mixed = three(name="NVIDIA A100", capability=(8, 0))
    with pytest.raises(ConfigurationError, match="can't be told") as caught:
        allowed(mixed, {"CUDA_VISIBLE_DEVICES": "0"})
    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" in str(caught.value)
    assert f"{C} (NVIDIA A100)" in str(caught.value)
    with pytest.raises(ConfigurationError):
        allowed(mixed, {"CUDA_VISIBLE_DEVICES": "0", "CUDA_DEVICE_ORDER": "FASTEST_FIRST"})
    by_pci = {"CUDA_VISIBLE_DEVICES": "2,0", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert [gpu.uuid for gpu in allowed(mixed, by_pci).gpus] == [C, A]
    for value, expected in {"-1": [], "": [], "GPU-1": [C], "none": []}.items():
        assert [gpu.uuid for gpu in allowed(mixed, {"CUDA_VISIBLE_DEVICES": value}).gpus] == expected


def test_a_process_is_given_indices_where_they_are_clear_and_uuids_where_not() -> None:
    alike = inventory(Card(A, bus="00000000:0F:00.0"), Card(B, bus="00000000:2A:00.0"))
    assert visible_to_cuda([B, A], alike) == {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": "1,0"}
    by_uuid = {"CUDA_VISIBLE_DEVICES": f"{B},{A}"}
    assert visible_to_cuda([B, A], three()) == by_uuid, "NVML's indices are not CUDA's there"
    divided = inventory(Card(A, bus="00000000:0F:00.0"), Card(B), Card(C, bus="00000000:5B:00.0", mig=True))
    assert visible_to_cuda([B, A], divided) == by_uuid
    assert visible_to_cuda([B, A], inventory(Card(A))) == by_uuid
    assert visible_to_cuda([B, A], Inventory(reason="no driver")) == by_uuid


@pytest.mark.parametrize("order", [{}, {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}])
def test_indices_beside_refused_devices_are_not_believed(order: dict[str, str]) -> None:
    found = three(mig=True, parts=("MIG-1",))
    with pytest.raises(ConfigurationError, match="refused") as caught:
        allowed(found, {"CUDA_VISIBLE_DEVICES": "1", **order})
    assert "CUDA_DEVICE_ORDER" not in str(caught.value)
    left = allowed(found, {"CUDA_VISIBLE_DEVICES": "GPU-8932,GPU-1", **order})
    assert [gpu.uuid for gpu in left.gpus] == [A]
    assert "MIG mode" in left.notes[0]


def test_gpus_in_use_come_last() -> None:
    found = inventory(Card(A, used=[GIB]), Card(B, bus="00000000:2A:00.0", used=[MIB]), Card(C, bus="00000000:1A:00.0"))
    assert idle_first(found.gpus) == (C, B, A)


def test_the_gate_waits_for_memory() -> None:
    nvml = Nvml(ScriptedNvml([Card(A, used=[GIB, GIB, 2 * MIB]), Card(B)]))
    assert wait_until_free(nvml, [A, B], 10, NEVER) is True


def test_the_gate_names_who_is_on_the_gpu(loud: subprocess.Popen[bytes]) -> None:
    there = [process(loud.pid, 3 * GIB), process(2**22 + 1, None)]
    nvml = Nvml(ScriptedNvml([Card(A, used=[4 * GIB], processes=there), Card(B)]))
    with pytest.raises(GpuBusyError) as caught:
        wait_until_free(nvml, [A, B], 0.05, NEVER)
    message = caught.value.message
    user = pwd.getpwuid(os.geteuid()).pw_name
    assert f"{A} has 4096 MiB in use by pid {loud.pid} ({user}, {sys.executable[:90]}" in message
    assert "3072 MiB, pid 4194305 (not visible from here)" in message
    assert B not in message


def test_the_gate_says_that_nobody_is_seen() -> None:
    nvml = Nvml(ScriptedNvml([Card(A, used=[4 * GIB])], old=True))
    with pytest.raises(GpuBusyError, match="processes that can't be seen from here"):
        wait_until_free(nvml, [A], 0, NEVER)


def test_the_gate_ends_when_it_is_told_to() -> None:
    asked = iter([False, False, True, True])
    nvml = Nvml(ScriptedNvml([Card(A, used=[GIB])]))
    assert wait_until_free(nvml, [A], 60, lambda: next(asked)) is False


def test_a_gpu_that_is_lost_at_the_gate() -> None:
    nvml = Nvml(ScriptedNvml([Card(A, broken=pynvml.NVMLError_GpuIsLost)]))
    with pytest.raises(InfrastructureError, match="does not answer"):
        wait_until_free(nvml, [A], 0, NEVER)
    with pytest.raises(InfrastructureError, match="does not answer"):
        nvml.processes(A)


def test_memory_that_comes_back_late_is_no_finding() -> None:
    nvml = Nvml(ScriptedNvml([Card(A, used=[90 * GIB, GIB, 60 * MIB])]))
    assert left_behind(nvml, {A: 4 * MIB}, 10, NEVER) == ()


def test_memory_that_does_not_come_back() -> None:
    held = [process(os.getpid(), GIB)]
    nvml = Nvml(ScriptedNvml([Card(A, used=[90 * GIB, 5 * GIB], processes=held), Card(B)]))
    (left,) = left_behind(nvml, {A: GIB, B: 0}, 0.1, NEVER)
    assert (left.uuid, left.bytes) == (A, 4 * GIB)
    assert left.text.startswith(f"4096 MiB of {A} did not come back within 0 s: pid {os.getpid()} (")


def test_command_lines_of_others_are_fit_for_a_terminal(loud: subprocess.Popen[bytes]) -> None:
    nvml = Nvml(ScriptedNvml([Card(A, processes=[process(loud.pid, MIB)])]))
    (found,) = nvml.processes(A)
    assert found.text.isprintable()
    assert len(found.command) == 100


def test_the_diagnostic_runs_here_whatever_there_is() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "harness.gpus"],
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == "allowed none"
    assert "under   CUDA_VISIBLE_DEVICES=" in done.stdout
    assert done.stderr == ""


def test_the_diagnostic(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    there = inventory(Card(A), Card(B, bus="00000000:2A:00.0", name="NVIDIA A100", capability=(8, 0)))
    monkeypatch.setattr(module, "take_inventory", lambda: there)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-8932")
    assert module.main() == 0
    assert capsys.readouterr().out.splitlines() == [
        "driver  580.159.04",
        f"GPU 0   {A}  00000000:0F:00.0  NVIDIA H200, compute capability 9.0, 0 of 143360 MiB in use",
        f"GPU 1   {B}  00000000:2A:00.0  NVIDIA A100, compute capability 8.0, 0 of 143360 MiB in use",
        "under   CUDA_VISIBLE_DEVICES=GPU-8932",
        f"allowed {A}",
    ]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert module.main() == ConfigurationError.exit_code
    assert "error   CUDA_VISIBLE_DEVICES=0: which GPUs" in capsys.readouterr().out
