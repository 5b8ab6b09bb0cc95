"""Tiny random checkpoints, made on the host without torch, transformers or a download, the same bytes everywhere."""

from __future__ import annotations

from harness.models.spec import MODELS, ModelSpec, Variant
from harness.models.store import default_root, digest, generate, verify
from harness.models.tokenizer import special_ids

__all__ = ["MODELS", "ModelSpec", "Variant", "default_root", "digest", "generate", "special_ids", "verify"]
