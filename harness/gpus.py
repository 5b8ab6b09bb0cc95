"""The GPUs of this host as NVML tells of them: which are there, which are allowed, and what is in use on them.

`python -m harness.gpus` prints it. Nothing here imports torch or calls nvidia-smi. NVML numbers GPUs in the order of
their PCI addresses, CUDA by a guess at their speed unless CUDA_DEVICE_ORDER=PCI_BUS_ID; so everything goes by UUID,
but for what a process without a container is told (`visible_to_cuda`).
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pwd
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.errors import ConfigurationError, InfrastructureError

IDLE = 512 << 20  # bytes: up to here a GPU counts as free; a desktop or a daemon holds some
TOLERANCE = 64 << 20  # bytes that a GPU may hold more after a cell than before it
_MIB = 1 << 20
_POLL = 0.5  # seconds
_MIG_MODE = "it is in MIG mode, and only whole GPUs are leased: turn the mode off, or leave this GPU out"
_MIG_PART = "it is a part of a GPU (MIG), and only whole ones are leased"

# NVML's own codes → what is wrong, and what to do
_WHY_NOT = {
    "NVML_ERROR_LIBRARY_NOT_FOUND": "there is no NVIDIA driver here (no libnvidia-ml.so.1): install one",
    "NVML_ERROR_DRIVER_NOT_LOADED": "the NVIDIA driver is not loaded: try `modprobe nvidia`, and see `dmesg`",
    "NVML_ERROR_NO_PERMISSION": "this user may not use the NVIDIA driver: see who may open /dev/nvidiactl",
    "NVML_ERROR_LIB_RM_VERSION_MISMATCH": "the NVIDIA driver was updated while it was loaded: restart the machine",
    # In a container: nvidia-container-toolkit#48.
    "NVML_ERROR_UNKNOWN": "the NVIDIA driver does not answer: see `dmesg`; inside of a container, start a new one",
}


class GpuBusyError(InfrastructureError):
    """A leased GPU's memory is in use by somebody who keeps to no lease; the message names them where they are seen."""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A whole GPU. `index` is NVML's, `total` and `used` are bytes, `capability` is CUDA's, as in `9.0`."""

    uuid: str
    index: int
    bus: str
    name: str
    total: int
    used: int
    capability: str


@dataclass(frozen=True, kw_only=True)
class Refused:
    """A device that is there and not used. What NVML does not tell is empty."""

    index: int
    uuid: str
    name: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Inventory:
    """What is there. `reason` says why there are no GPUs, where there are none, and what to do about it."""

    gpus: tuple[Gpu, ...] = ()
    refused: tuple[Refused, ...] = ()
    driver: str = ""
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class Process:
    """Somebody on a GPU. `bytes` is None where NVML does not tell; user and command are empty where /proc does not."""

    pid: int
    bytes: int | None
    user: str
    command: str

    @property
    def text(self) -> str:
        """`pid 4711 (alice, python train.py) 70000 MiB`"""
        who = f"{self.user}, {self.command}" if self.user else "not visible from here"
        return f"pid {self.pid} ({who})" + ("" if self.bytes is None else f" {self.bytes // _MIB} MiB")


class Nvml:
    """NVML, open: where no daemon keeps the driver awake, every start of it takes a second or two.

    Raises InfrastructureError, with the reason, where there is none; its methods do where a GPU no longer answers.
    """

    def __init__(self, library: Any = None) -> None:
        self._nvml = library or importlib.import_module("pynvml")
        self._errors = (self._nvml.NVMLError, self._nvml.NVMLLibraryMismatchError)
        try:
            self._nvml.nvmlInit()
        except self._errors as error:
            raise InfrastructureError(self._why_not(error)) from error

    def _why_not(self, error: Exception) -> str:
        known = {getattr(self._nvml, name): text for name, text in _WHY_NOT.items()}
        return known.get(getattr(error, "value", None), f"the NVIDIA driver does not work: {error}; see `dmesg`")

    def close(self) -> None:
        with contextlib.suppress(*self._errors):
            self._nvml.nvmlShutdown()

    def inventory(self) -> Inventory:
        """All devices, with their memory in use as of now."""
        try:
            driver = str(self._nvml.nvmlSystemGetDriverVersion())
            count = int(self._nvml.nvmlDeviceGetCount())
        except self._errors as error:
            return Inventory(reason=self._why_not(error))
        found = [device for index in range(count) for device in self._device(index)]
        gpus = sorted((device for device in found if isinstance(device, Gpu)), key=lambda gpu: gpu.bus)
        refused = tuple(device for device in found if isinstance(device, Refused))
        reason = "" if gpus else "none of the GPUs here can be used" if refused else "the NVIDIA driver knows no GPU"
        return Inventory(gpus=tuple(gpus), refused=refused, driver=driver, reason=reason)

    def used(self, uuid: str) -> int:
        """Bytes in use on a GPU, without what the driver keeps for itself."""
        with self._answering(uuid) as handle:
            return self._memory(handle)[1]

    def processes(self, uuid: str) -> tuple[Process, ...]:
        """Who is on a GPU, the largest first: as far as NVML shows them, which in a container may be nobody."""
        found: dict[int, int | None] = {}
        with self._answering(uuid) as handle:
            for kind in ("Graphics", "Compute"):
                with contextlib.suppress(*self._errors):
                    listed = getattr(self._nvml, f"nvmlDeviceGet{kind}RunningProcesses")(handle)
                    found |= {int(process.pid): process.usedGpuMemory for process in listed}
        largest = sorted(found.items(), key=lambda item: -(item[1] or 0))
        return tuple(Process(pid=pid, bytes=used, user=_user(pid), command=_command(pid)) for pid, used in largest)

    @contextlib.contextmanager
    def _answering(self, uuid: str) -> Iterator[Any]:
        try:
            yield self._nvml.nvmlDeviceGetHandleByUUID(uuid)
        except self._errors as error:
            raise InfrastructureError(
                f"GPU {uuid} does not answer: {error}", "See `nvidia-smi` and `dmesg`."
            ) from error

    def _device(self, index: int) -> Iterator[Gpu | Refused]:
        uuid = name = ""
        try:
            handle = self._nvml.nvmlDeviceGetHandleByIndex(index)
            uuid = str(self._nvml.nvmlDeviceGetUUID(handle))
            name = str(self._nvml.nvmlDeviceGetName(handle))
            if self._in_mig_mode(handle):
                yield Refused(index=index, uuid=uuid, name=name, reason=_MIG_MODE)
                yield from self._parts(index, handle)
            else:
                yield self._gpu(index, handle, uuid, name)
        except self._errors as error:
            yield Refused(index=index, uuid=uuid, name=name, reason=f"NVML does not tell what is needed: {error}")

    def _gpu(self, index: int, handle: Any, uuid: str, name: str) -> Gpu:
        total, used = self._memory(handle)
        major, minor = self._nvml.nvmlDeviceGetCudaComputeCapability(handle)
        bus = str(self._nvml.nvmlDeviceGetPciInfo(handle).busId).upper()
        return Gpu(uuid=uuid, index=index, bus=bus, name=name, total=total, used=used, capability=f"{major}.{minor}")

    def _memory(self, handle: Any) -> tuple[int, int]:
        """Total and used. The first version of the call counts as used what the driver reserves, hundreds of MiB."""
        try:
            memory = self._nvml.nvmlDeviceGetMemoryInfo(handle, version=self._nvml.nvmlMemory_v2)
        except self._errors:  # drivers before 510, WSL
            memory = self._nvml.nvmlDeviceGetMemoryInfo(handle)
        return int(memory.total), int(memory.used)

    def _in_mig_mode(self, handle: Any) -> bool:
        with contextlib.suppress(*self._errors):  # a GPU that cannot be divided
            return bool(self._nvml.nvmlDeviceGetMigMode(handle)[0] == self._nvml.NVML_DEVICE_MIG_ENABLE)
        return False

    def _parts(self, index: int, handle: Any) -> Iterator[Refused]:
        for number in range(int(self._nvml.nvmlDeviceGetMaxMigDeviceCount(handle))):
            with contextlib.suppress(*self._errors):  # places for parts that are not there
                part = self._nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number)
                uuid, name = str(self._nvml.nvmlDeviceGetUUID(part)), str(self._nvml.nvmlDeviceGetName(part))
                yield Refused(index=index, uuid=uuid, name=name, reason=_MIG_PART)


def take_inventory(library: Any = None) -> Inventory:
    """What is there now. Raises nothing: without NVML it is empty, and says why."""
    try:
        nvml = Nvml(library)
    except InfrastructureError as error:
        return Inventory(reason=error.message)
    with contextlib.closing(nvml):
        return nvml.inventory()


def _user(pid: int) -> str:
    with contextlib.suppress(OSError):
        uid = Path(f"/proc/{pid}").stat().st_uid
        with contextlib.suppress(KeyError):
            return pwd.getpwuid(uid).pw_name
        return f"uid {uid}"
    return ""


def _command(pid: int) -> str:
    """Its command line, as others may see it: cut, and without what a terminal could obey."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes()[:400]
    except OSError:
        return ""
    text = words.replace(b"\0", b" ").decode(errors="replace").strip()
    return "".join(char if char.isprintable() else "?" for char in text)[:100] or "a process without a command line"


@dataclass(frozen=True, kw_only=True)
class Allowed:
    """The GPUs that may be used, in the order given, and a note on everything that was left out."""

    gpus: tuple[Gpu, ...] = ()
    notes: tuple[str, ...] = ()


def allowed(inventory: Inventory, environ: Mapping[str, str]) -> Allowed:
    """What CUDA would see under this environment, less what is refused.

    Unset is all; CUDA stops at the first entry that names no GPU, and sees nothing where one is named twice.
    Indices are taken in the order of PCI addresses. That is CUDA's own where CUDA_DEVICE_ORDER=PCI_BUS_ID, and where
    all GPUs are alike. Raises ConfigurationError where it may not be.
    """
    value = environ.get("CUDA_VISIBLE_DEVICES")
    if inventory.reason and not inventory.refused:
        return Allowed(notes=(inventory.reason,))
    if value is None:
        return Allowed(gpus=inventory.gpus, notes=tuple(_refusal(device) for device in inventory.refused))
    if not value.strip():
        return Allowed(notes=("CUDA_VISIBLE_DEVICES is empty: no GPU is allowed",))
    entries = value.split(",")
    by_uuid = entries[0].upper().startswith("GPU-")
    if not by_uuid:
        _require_clear_order(inventory, environ, entries)
    found, notes = _listed(inventory, entries, by_uuid)
    if len(set(found)) < len(found):
        return Allowed(notes=(f"CUDA_VISIBLE_DEVICES={value} names a GPU twice: CUDA sees none then",))
    usable = {gpu.uuid: gpu for gpu in inventory.gpus}
    refused = [_refusal(device) for device in inventory.refused if device.uuid in found]
    return Allowed(gpus=tuple(usable[uuid] for uuid in found if uuid in usable), notes=(*refused, *notes))


def _refusal(device: Refused) -> str:
    return f"GPU {device.index} {device.uuid or '(UUID unknown)'}: {device.reason}"


# What CUDA takes, seen with driver 580: a number as strtol reads it, whatever follows; the beginning of a UUID in
# letters of any case, at least a digit of it, and no blank before.
_INDEX = re.compile(r"\s*([+-]?[0-9]{1,99})")
_UUID = re.compile(r"GPU-[0-9a-f-]+", re.IGNORECASE)


def _listed(inventory: Inventory, entries: Sequence[str], by_uuid: bool) -> tuple[list[str], list[str]]:
    """UUIDs up to where CUDA stops, and what is to be said about that."""
    found: list[str] = []
    for entry in entries:
        uuid, why_not = _named(inventory, entry, by_uuid)
        if why_not:
            return found, [f"CUDA_VISIBLE_DEVICES: {entry or 'an empty entry'!r} {why_not}; CUDA stops there"]
        found.append(uuid)
    return found, []


def _named(inventory: Inventory, entry: str, by_uuid: bool) -> tuple[str, str]:
    """The UUID that an entry names by its beginning or by index, or why it names none."""
    if entry.startswith("MIG-"):
        return "", "is a part of a GPU, and only whole ones are leased"
    if by_uuid:
        uuids = [gpu.uuid for gpu in inventory.gpus] + [device.uuid for device in inventory.refused]
        matching = [uuid for uuid in uuids if _UUID.fullmatch(entry) and uuid.lower().startswith(entry.lower())]
        why_not = "is the beginning of several UUIDs" if matching else "is no UUID of a GPU here"
        return (matching[0], "") if len(matching) == 1 else ("", why_not)
    number = _INDEX.match(entry)
    if number is None or not 0 <= int(number[1]) < len(inventory.gpus):
        return "", "is no index of a GPU here"
    return inventory.gpus[int(number[1])].uuid, ""


def visible_to_cuda(uuids: Sequence[str], inventory: Inventory) -> dict[str, str]:
    """The variables with which a process sees these GPUs and no others, in this order.

    By index, since vLLM up to 0.10 takes an entry for a number, and NVML's for CUDA's; by UUID where they may differ.
    """
    indices = {gpu.uuid: gpu.index for gpu in inventory.gpus}
    clear = not inventory.refused and [*indices.values()] == [*range(len(indices))]
    if not clear or not indices.keys() >= set(uuids):
        return {"CUDA_VISIBLE_DEVICES": ",".join(uuids)}
    return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": ",".join(str(indices[uuid]) for uuid in uuids)}


def _require_clear_order(inventory: Inventory, environ: Mapping[str, str], entries: Sequence[str]) -> None:
    """Indices are clear if every device counts, and either their order is given or it does not matter."""
    number = _INDEX.match(entries[0])
    mixed = len({(gpu.name, gpu.capability) for gpu in inventory.gpus}) > 1
    given = environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    if number is None or int(number[1]) < 0 or (not inventory.refused and (given or not mixed)):
        return
    why = "some of the devices here are refused" if inventory.refused else "the GPUs here differ, and CUDA sorts them"
    also = "" if inventory.refused else ", or set CUDA_DEVICE_ORDER=PCI_BUS_ID"
    usable = ", ".join(f"{gpu.uuid} ({gpu.name})" for gpu in inventory.gpus) or "none of them can be used"
    raise ConfigurationError(
        f"CUDA_VISIBLE_DEVICES={','.join(entries)}: which GPUs these indices are can't be told, since {why}",
        f"Name them by UUID{also}: {usable}.",
    )


def idle_first(gpus: Iterable[Gpu], limit: int = IDLE) -> tuple[str, ...]:
    """UUIDs, those in use last: what a lease should choose from, in that order."""
    return tuple(gpu.uuid for gpu in sorted(gpus, key=lambda gpu: (gpu.used > limit, gpu.bus)))


@dataclass(frozen=True, kw_only=True)
class Leftover:
    """Memory of a GPU that did not come back after a cell."""

    uuid: str
    bytes: int
    seconds: float
    processes: tuple[Process, ...]

    @property
    def text(self) -> str:
        what = f"{self.bytes // _MIB} MiB of {self.uuid}"
        return f"{what} did not come back within {self.seconds:.0f} s: {_who(self.processes)}"


def wait_until_free(
    nvml: Nvml, gpus: Iterable[str], seconds: float, stop: Callable[[], bool], limit: int = IDLE
) -> bool:
    """Whether no more than `limit` bytes are in use on each; False if `stop` ended the waiting.

    Raises GpuBusyError when they still are after `seconds`: nobody with a lease holds them, so somebody without one.
    """
    over = _over(nvml, dict.fromkeys(gpus, limit), seconds, stop)
    if not over:
        return True
    if stop():
        return False
    held = [f"{uuid} has {used // _MIB} MiB in use by {_who(nvml.processes(uuid))}" for uuid, used in over.items()]
    raise GpuBusyError(
        f"not free within {seconds:.0f} s: {'; '.join(held)}",
        "End these processes, or leave the GPU out of CUDA_VISIBLE_DEVICES.",
    )


def left_behind(
    nvml: Nvml, before: Mapping[str, int], seconds: float, stop: Callable[[], bool], tolerance: int = TOLERANCE
) -> tuple[Leftover, ...]:
    """What did not come back, after at most `seconds`; `before` are the bytes in use before the cell, by UUID."""
    over = _over(nvml, {uuid: used + tolerance for uuid, used in before.items()}, seconds, stop)
    return tuple(
        Leftover(uuid=uuid, bytes=used - before[uuid], seconds=seconds, processes=nvml.processes(uuid))
        for uuid, used in over.items()
    )


def _over(nvml: Nvml, limits: Mapping[str, int], seconds: float, stop: Callable[[], bool]) -> dict[str, int]:
    """Bytes in use on GPUs that are above their limits, and stay so for `seconds` or until `stop` says so."""
    until = time.monotonic() + seconds
    while True:
        used = {uuid: nvml.used(uuid) for uuid in limits}
        over = {uuid: count for uuid, count in used.items() if count > limits[uuid]}
        left = until - time.monotonic()
        if not over or left <= 0 or stop():
            return over
        time.sleep(min(_POLL, left))


def _who(processes: Iterable[Process]) -> str:
    return ", ".join(process.text for process in processes) or "processes that can't be seen from here"


def _report(inventory: Inventory, environ: Mapping[str, str]) -> Iterator[str]:
    yield f"driver  {inventory.driver or 'none'}"
    for gpu in inventory.gpus:
        memory = f"{gpu.used // _MIB} of {gpu.total // _MIB} MiB in use"
        yield f"GPU {gpu.index}   {gpu.uuid}  {gpu.bus}  {gpu.name}, compute capability {gpu.capability}, {memory}"
    yield from (f"refused {_refusal(device)}" for device in inventory.refused)
    if inventory.reason:
        yield f"no GPU  {inventory.reason}"
    settings = [f"{name}={environ[name]}" for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER") if name in environ]
    yield f"under   {' '.join(settings) or 'no CUDA_VISIBLE_DEVICES: all are allowed'}"
    left = allowed(inventory, environ)
    yield from (f"note    {note}" for note in left.notes)
    yield f"allowed {', '.join(gpu.uuid for gpu in left.gpus) or 'none'}"


def main() -> int:
    """Print what is there and what is allowed; the exit code of the error that says why that is not clear."""
    try:
        sys.stdout.writelines(f"{line}\n" for line in _report(take_inventory(), os.environ))
    except ConfigurationError as error:
        sys.stdout.write(f"error   {error}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
