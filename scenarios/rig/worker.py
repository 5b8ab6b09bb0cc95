"""What is done inside the engine's worker: plain functions of a vLLM worker, in whichever process it lives.

``Extension`` puts them on the worker class by name (``worker_extension_cls``, as verl does since 0.7), so that V1's
engine core, a process of its own, runs them through ``collective_rpc`` and no code has to be pickled. Arguments and
results are therefore JSON values.
"""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from typing import Any, Dict, List

from rig.checkpoint import tensors

# What a V0 worker itself holds of its KV cache; verl's engine A sets these to None (third_party/vllm, 0.3.1-0.6.3).
HOLDERS = ("cache_engine", "gpu_cache", "cpu_cache")


def facts(worker: Any) -> Dict[str, Any]:
    """``class`` of the worker; ``blocks`` (maybe None) and ``block_size`` in tokens; ``holders`` of the KV cache.

    The worker's word on them, since a front end in another process may not know what was chosen in the end.
    """
    holders = [name for name in HOLDERS if getattr(worker, name, None) is not None]
    return {
        "class": type(worker).__name__,
        "blocks": worker.cache_config.num_gpu_blocks,
        "block_size": worker.cache_config.block_size,
        "holders": holders + (["layers"] if _bound_layers(worker) else []),
    }


def drop_kv(worker: Any, layers: bool) -> None:
    """Let go of the KV cache as verl's engine A does; with ``layers``, of the attention layers' references too.

    From 0.7.3 on ``bind_kv_cache`` gives every layer a reference of its own: what the worker drops stays in use.
    """
    for name in HOLDERS:
        if hasattr(worker, name):
            setattr(worker, name, None)
    if layers:
        for layer in _bound_layers(worker):
            layer.kv_cache = [cache.new_empty(0) for cache in layer.kv_cache]
    _give_back()


def rebuild_kv(worker: Any) -> None:
    """Allocate the KV cache again, with as many blocks as before."""
    worker._init_cache_engine()


def load_weights(worker: Any, folder: str) -> int:
    """Load a checkpoint's weights into the live model; how many it says it took (-1: it does not say, 0.6.3)."""
    model = worker.get_model() if hasattr(worker, "get_model") else worker.model_runner.model
    loaded = model.load_weights(tensors(Path(folder)))
    return -1 if loaded is None else len(loaded)


class Extension:
    """Mixed into vLLM's worker class; the prefix keeps clear of vLLM's own names, which it checks."""

    rig_facts = facts
    rig_drop_kv = drop_kv
    rig_rebuild_kv = rebuild_kv
    rig_load_weights = load_weights


def _bound_layers(worker: Any) -> List[Any]:
    """Attention layers with a KV cache bound to them; [] where layers are handed theirs with every step (0.6.3)."""
    config = getattr(worker, "compilation_config", None)
    config = config or getattr(getattr(worker, "vllm_config", None), "compilation_config", None)
    bound = getattr(config, "static_forward_context", None) or {}
    return [layer for layer in bound.values() if isinstance(getattr(layer, "kv_cache", None), list)]


def _give_back() -> None:
    """Garbage first: what is still referenced by a cycle cannot be given back."""
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
