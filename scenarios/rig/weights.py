"""A checksum of weights that does not change when an engine merges, splits, pads or reorders parameters.

vLLM holds q, k and v in one parameter, gate and up in another, and pads the vocabulary with zeros. So the checksum is a
sum, modulo 2**64, over the elements: the mixed bits of each, where all bits zero give zero. It sees a wrong, a missing
and a second copy of a value; it cannot see two values that changed places, which token ids do.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Iterable

from rig import probe
from rig.checkpoint import tensors
from rig.outcomes import NotAvailable

MODEL_PATHS = tuple(
    f"{executor}.{worker}.model_runner.model"
    for executor in probe.EXECUTOR_PATHS
    for worker in ("driver_worker.worker", "driver_worker")
)
_ELEMENTS = 1 << 22  # at a time
_UNSIGNED = {2: "uint16", 4: "uint32"}


def model(llm: Any) -> Any:
    """The model, where it lives in this process; NotAvailable where it lives in another one."""
    found = probe.walk(llm, *MODEL_PATHS)
    if found is None:
        raise NotAvailable("the model lives in another process", ", ".join(MODEL_PATHS))
    return found[1]


def engine_checksum(llm: Any) -> str:
    """Of all parameters of a running engine; NotAvailable where it keeps them in a form of its own."""
    parameters = [parameter for _, parameter in model(llm).named_parameters()]
    empty = sum(parameter.numel() == 0 for parameter in parameters)
    if empty:  # packed after loading, and the original given back (0.32.0 on a CPU)
        raise NotAvailable("the engine keeps packed weights", f"{empty} of {len(parameters)} parameters are empty")
    return checksum(parameters)


def checkpoint_checksum(llm: Any, folder: Path) -> str:
    """Of a checkpoint's tensors, as the engine must hold them: in the dtype of its first parameter."""
    dtype = next(iter(model(llm).named_parameters()))[1].dtype
    return checksum(tensor.to(dtype) for _, tensor in tensors(folder))


def checksum(tensors: Iterable[Any]) -> str:
    """16 hexadecimal digits, of torch tensors with elements of 2 or 4 bytes on any device."""
    return f"{sum(map(_sum, tensors)) % (1 << 64):016x}"


def _sum(tensor: Any) -> int:
    import torch

    signed = {2: torch.int16, 4: torch.int32}[tensor.element_size()]
    flat = tensor.detach().reshape(-1).view(signed)
    return sum(_mixed(piece.cpu().numpy().view(_UNSIGNED[tensor.element_size()])) for piece in flat.split(_ELEMENTS))


def _mixed(bits: Any) -> int:
    """Sum of the mixed elements of an array of unsigned integers (MurmurHash3's finaliser, which keeps 0)."""
    import numpy as np

    mixed = bits.astype(np.uint64)
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        mixed ^= mixed >> np.uint64(33)
        mixed *= np.uint64(factor)  # wraps
    mixed ^= mixed >> np.uint64(33)
    return int(mixed.sum(dtype=np.uint64))
