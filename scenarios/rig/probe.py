"""What this vLLM can do, found by looking at it: signatures, dataclass fields, registries. Never by its version.

Every function takes or imports what is installed and returns plain facts; nothing here changes an engine.
"""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any, Iterable

from rig.events import Scalar

# Where the executor lives: V0 and V1 in-process; in-process V1 without the alias. A V1 engine core in a process of
# its own has none of them.
EXECUTOR_PATHS = ("llm_engine.model_executor", "llm_engine.engine_core.engine_core.model_executor")

# From the executor to the attention backend: V0 (wrapped worker or not), then V1.
_ATTENTION_PATHS = (
    "driver_worker.worker.model_runner.attn_backend",
    "driver_worker.model_runner.attn_backend",
    "driver_worker.worker.model_runner.attn_backends",
)


def walk(root: Any, *paths: str) -> tuple[str, Any] | None:
    """(path, value) of the first dotted path that leads to something, or None."""
    for path in paths:
        value = root
        for name in path.split("."):
            value = getattr(value, name, None)
            if value is None:
                break
        else:
            return path, value
    return None


def parameters(function: Any) -> frozenset[str]:
    """Names that a function or a class takes; empty when it has no signature to look at."""
    try:
        return frozenset(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return frozenset()


def signature(function: Any) -> str:
    """``(level: int = 1)``, as of a method that is called on an object; empty when it has none to look at."""
    try:
        found = inspect.signature(function)
    except (TypeError, ValueError):
        return ""
    kept = [parameter for name, parameter in found.parameters.items() if name != "self"]
    return str(found.replace(parameters=kept))


def engine_options() -> frozenset[str]:
    """What ``LLM(...)`` accepts: its own parameters and, through ``**kwargs``, the fields of ``EngineArgs``."""
    import vllm

    own = parameters(vllm.LLM.__init__) - {"self", "kwargs", "args"}
    return own | frozenset(field.name for field in dataclasses.fields(vllm.EngineArgs))


def sampling_options() -> frozenset[str]:
    """What ``SamplingParams(...)`` accepts (a msgspec struct since 0.5.4, so a signature is not certain)."""
    import vllm

    return parameters(vllm.SamplingParams) | frozenset(getattr(vllm.SamplingParams, "__struct_fields__", ()))


def architectures() -> frozenset[str]:
    """Model architectures in the registry."""
    import vllm

    return frozenset(vllm.ModelRegistry.get_supported_archs())


def capabilities() -> dict[str, Scalar]:
    """Facts about the installed vLLM that scenarios choose their path by, as ``cap.*`` properties."""
    import vllm
    from vllm import inputs

    options = engine_options()
    sleep = parameters(getattr(vllm.LLM, "sleep", None))
    wake = parameters(getattr(vllm.LLM, "wake_up", None))
    named = ("enable_sleep_mode", "logprobs_mode", "limit_mm_per_prompt", "mm_processor_kwargs")
    caches = ("disable_mm_preprocessor_cache", "mm_processor_cache_gb")
    return {
        "cap.sleep": hasattr(vllm.LLM, "sleep"),
        "cap.sleep.level": "level" in sleep,
        "cap.wake_up": hasattr(vllm.LLM, "wake_up"),
        "cap.wake_up.tags": "tags" in wake,
        "cap.collective_rpc": hasattr(vllm.LLM, "collective_rpc"),
        "cap.apply_model": hasattr(vllm.LLM, "apply_model"),
        "cap.prompt.token_ids": "prompt_token_ids" in _annotations(getattr(inputs, "TokensPrompt", None)),
        "cap.sampling.bad_words": "bad_words" in sampling_options(),
        **{f"cap.option.{name}": name in options for name in (*named, *caches)},
    }


def engine_facts(llm: Any) -> dict[str, Scalar]:
    """What the started engine turned out to be, as ``engine.*`` properties; a fact not found is left out."""
    engine = llm.llm_engine
    facts: dict[str, Any] = {"engine.core": core(engine), "engine.layout": layout(engine)}
    found = walk(llm, *EXECUTOR_PATHS)
    if found:
        path, executor = found
        facts.update({"engine.path.executor": path, "engine.executor": type(executor).__name__})
        facts["engine.attention"] = _attention(executor)
    else:
        facts["engine.executor"] = _named(walk(engine, "vllm_config.parallel_config.distributed_executor_backend"))
    model = walk(engine, "model_config", "vllm_config.model_config")
    cache = walk(engine, "cache_config", "vllm_config.cache_config")
    facts["engine.dtype"] = str(getattr(model[1], "dtype", "")).replace("torch.", "") if model else None
    facts["engine.max_model_len"] = getattr(model[1], "max_model_len", None) if model else None
    facts["engine.prefix_caching"] = bool(getattr(cache[1], "enable_prefix_caching", None)) if cache else None
    facts["engine.block_size"] = getattr(cache[1], "block_size", None) if cache else None
    facts["engine.kv_blocks"] = kv_blocks(llm)
    return {name: value for name, value in facts.items() if value not in (None, "")}


def core(engine: Any) -> str:
    """``V0`` or ``V1``: V1 has an ``llm_engine`` module of its own."""
    return "V1" if type(engine).__module__.startswith("vllm.v1.") else "V0"


def layout(engine: Any) -> str:
    """Class of the client to V1's engine core (``InprocClient``, ``SyncMPClient``); ``in-process`` for V0."""
    client = getattr(engine, "engine_core", None)
    return "in-process" if client is None else type(client).__name__


def kv_blocks(llm: Any) -> int | None:
    """Blocks of the KV cache. V0 on the CPU counts its memory as the GPU's, like every device does."""
    cache = walk(llm.llm_engine, "cache_config", "vllm_config.cache_config")
    blocks = getattr(cache[1], "num_gpu_blocks", None) if cache else None
    return int(blocks) if blocks is not None else None


def unfinished(engine: Any) -> list[str]:
    """Ids of requests that the engine still works on.

    V0 keeps a request that failed in step() in ``scheduler[i].running``; V1 in the front end's output processor.
    """
    states = walk(engine, "output_processor.request_states")
    if states:
        return list(states[1])
    found = []
    for scheduler in getattr(engine, "scheduler", None) or ():
        for queue in ("waiting", "running", "swapped"):
            found += [group.request_id for group in getattr(scheduler, queue, ())]
    return found


def _attention(executor: Any) -> str | None:
    found = walk(executor, *_ATTENTION_PATHS)
    if not found:
        return None
    backend = found[1][0] if isinstance(found[1], (list, tuple)) and found[1] else found[1]
    return str(backend.get_name()) if hasattr(backend, "get_name") else _named((found[0], backend))


def _named(found: tuple[str, Any] | None) -> str | None:
    if found is None:
        return None
    return found[1] if isinstance(found[1], str) else getattr(found[1], "__name__", type(found[1]).__name__)


def _annotations(*classes: Any) -> Iterable[str]:
    return {name for cls in classes for base in getattr(cls, "__mro__", (cls,)) for name in _own(base)}


def _own(cls: Any) -> Iterable[str]:
    return getattr(cls, "__annotations__", {})
