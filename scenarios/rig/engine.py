"""The adapter: one engine of whatever vLLM is installed, driven as a training loop drives it.

It takes the path that probing finds, says which one that was (``engine.*`` properties), and hides no failure: what the
version under test raises leaves the adapter unchanged.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import re
from pathlib import Path
from typing import Any, Callable, Mapping, Sequence, TypeVar

from rig import probe, worker
from rig.completion import Outputs, completions
from rig.events import writer
from rig.outcomes import NotAvailable

# Defaults that keep a tiny model small; any of them that this version does not know is dropped, and said to be.
DEFAULTS: dict[str, Any] = {
    "enforce_eager": True,
    "max_model_len": 2048,
    "max_num_seqs": 32,
    "enable_prefix_caching": False,
    "disable_log_stats": True,
    "worker_extension_cls": "rig.worker.Extension",  # the way into workers of another process, as verl has it
}
# Text models refuse it (0.6.3, 0.7.3: "limit_mm_per_prompt is only supported for multimodal models"); V0's own
# default is one image a prompt (verl#805).
MULTIMODAL_DEFAULTS: dict[str, Any] = {"limit_mm_per_prompt": {"image": 4}}
# A tiny model on a big GPU gets over a million blocks, which alone costs V0 about 20 s.
CUDA_DEFAULTS: dict[str, Any] = {"gpu_memory_utilization": 0.2, "num_gpu_blocks_override": 2048}

_ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
}
_CPU_ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1"}  # GiB; 4 by default

WORKER_PATHS = tuple(f"{path}.driver_worker{inner}" for path in probe.EXECUTOR_PATHS for inner in (".worker", ""))

T = TypeVar("T")


class Engine:
    """A started engine.

    ``options`` are asked for by the cell: one that this version does not have raises NotAvailable. Everything that
    vLLM raises in import or init passes through.
    """

    def __init__(self, model_dir: Path, device: str, options: Mapping[str, Any]) -> None:
        self._events = writer()
        self._vllm = load_vllm(device)
        config = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
        require_architecture(config)
        kwargs, dropped = resolve(options, defaults(device, "vision_config" in config), probe.engine_options())
        self._properties: dict[str, Any] = {
            **probe.capabilities(),
            "engine.options": [f"{name}={kwargs[name]}" for name in sorted(kwargs)],
            "engine.options.dropped": dropped,
        }
        self._say(self._properties)
        if device != "cuda" and kwargs.get("enable_sleep_mode"):
            require_sleep_mode(model_dir)
        with self._events.phase("init"):
            self._llm = self._vllm["LLM"](model=str(model_dir), **kwargs)
        facts = _facts(self._llm)
        self._properties.update(facts)
        self._say(facts)
        self.alive = True

    def properties(self) -> dict[str, Any]:
        """Everything that is known about this engine, by property name."""
        return dict(self._properties)

    def generate(self, prompts: Sequence[Mapping[str, Any]], sampling: Mapping[str, Any]) -> Outputs:
        """``outputs[i][k]``: the k-th completion of prompt i, for vLLM prompt dicts and SamplingParams arguments.

        What vLLM raises passes through, after the engine was made fit for the next call or marked as dead.
        """
        unknown = sorted(set(sampling) - probe.sampling_options())
        if unknown:
            raise NotAvailable(f"no sampling option {unknown[0]}", "SamplingParams fields")
        params = self._vllm["SamplingParams"](**sampling)
        try:
            with self._events.marked("generate"):
                requests = self._llm.generate(list(prompts), params, use_tqdm=False)
        except Exception as exc:
            self._recover(exc)
            raise
        return [completions(request) for request in requests]

    def drive(self, verb: str, action: Callable[[Any], T]) -> T:
        """``action(llm)``, marked ``verb``: whatever is done to the engine that is no ``generate``.

        What vLLM raises passes through. Whoever drives knows whether the engine is fit for use after that.
        """
        with self._events.marked(verb):
            return action(self._llm)

    def close(self) -> None:
        """End the engine and the processes it started."""
        self.alive = False
        with self._events.phase("close"):
            found = probe.walk(self._llm, "llm_engine.engine_core.shutdown", "llm_engine.model_executor.shutdown")
            if found:
                found[1]()
            del self._llm
            gc.collect()

    def _recover(self, exc: Exception) -> None:
        """V0 answers the failed request in the NEXT generate() unless it is aborted; a V1 core may be gone for good.

        V1 in-process never gets out of generate() again after an error in step(): that one is dead too.
        """
        engine = self._llm.llm_engine
        left: list[str] = []
        try:
            left = probe.unfinished(engine)
            if left:
                engine.abort_request(left)
            self.alive = not (is_dead(engine, exc) or engine.has_unfinished_requests())
        except Exception:  # a second error must not hide the first one
            self.alive = False
        self._say({"engine.aborted": len(left), "engine.alive": self.alive}, here=True)

    def _say(self, facts: Mapping[str, Any], here: bool = False) -> None:
        for name, value in facts.items():
            self._events.property(name, value, **({} if here else {"check": None}))


def load_vllm(device: str) -> dict[str, Any]:
    """What the rig uses of vLLM by name, imported under the environment that a device needs."""
    prepare_environment(device)
    with writer().phase("import"):
        import vllm

        # vLLM's package is lazy in 0.10.0: these names, not the package, are what takes the time
        return {name: getattr(vllm, name) for name in ("LLM", "EngineArgs", "SamplingParams", "ModelRegistry")}


def prepare_environment(device: str) -> None:
    """What must be set before vLLM is imported; what the harness has set stands."""
    for name, value in {**_ENVIRONMENT, **(_CPU_ENVIRONMENT if device == "cpu" else {})}.items():
        os.environ.setdefault(name, value)


def defaults(device: str, multimodal: bool) -> dict[str, Any]:
    """The rig's own wishes for a device and a kind of model."""
    images = MULTIMODAL_DEFAULTS if multimodal else {}
    return {**DEFAULTS, **images, **(CUDA_DEFAULTS if device == "cuda" else {})}


def resolve(
    options: Mapping[str, Any], wishes: Mapping[str, Any], known: frozenset[str]
) -> tuple[dict[str, Any], list[str]]:
    """(arguments for ``LLM``, wishes dropped); an option of the cell that is not known raises NotAvailable."""
    for name in sorted(set(options) - known):
        raise NotAvailable(f"no engine option {name}", "EngineArgs fields and LLM.__init__ parameters")
    dropped = sorted(set(wishes) - known)
    return {**{name: value for name, value in wishes.items() if name in known}, **options}, dropped


def require_architecture(config: Mapping[str, Any]) -> None:
    """Raises NotAvailable when no architecture of the checkpoint is in vLLM's registry."""
    wanted = config.get("architectures") or []
    if wanted and not set(wanted) & probe.architectures():
        raise NotAvailable(f"no model {wanted[0]}", "ModelRegistry.get_supported_archs()")


def require_sleep_mode(model_dir: Path) -> None:
    """Raises NotAvailable, with the engine's own words, where this platform has no sleep mode.

    Not to be asked on CUDA: there a refusal is a failure. "Sleep mode is only supported on CUDA devices." (0.7.3),
    "Sleep mode is not supported on current platform." (0.8.5; from 0.10.0 on inside of a longer validation error).
    """
    import vllm

    try:
        vllm.EngineArgs(model=str(model_dir), enable_sleep_mode=True).create_model_config()
    except ValueError as exc:
        said = re.search(r"sleep mode[^.]*\.", str(exc), re.IGNORECASE)
        if said is None:
            raise
        raise NotAvailable(said[0], "EngineArgs(enable_sleep_mode=True).create_model_config()") from exc


def in_worker(llm: Any, function: Callable[..., Any], *args: Any) -> tuple[str, Any]:
    """(path taken, result) of a function of ``rig.worker``: directly where the worker is in this process."""
    found = probe.walk(llm, *WORKER_PATHS)
    if found:
        return found[0], function(found[1], *args)
    client = probe.walk(llm, "llm_engine.engine_core")
    if client and not probe.walk(llm, *probe.EXECUTOR_PATHS) and not hasattr(client[1], "collective_rpc"):
        # 0.8.2, whose LLM.collective_rpc raises AttributeError
        raise NotAvailable("V1's core is a process of its own without collective_rpc", client[0])
    if "worker_extension_cls" not in probe.engine_options():
        raise NotAvailable("no way into the worker", f"{', '.join(WORKER_PATHS)}; worker_extension_cls")
    return "collective_rpc", llm.collective_rpc(f"rig_{function.__name__}", args=args)[0]


def _facts(llm: Any) -> dict[str, Any]:
    """What the engine turned out to be. A front end may not be told how many blocks its core made (0.8.5's V1)."""
    facts: dict[str, Any] = probe.engine_facts(llm)
    if "engine.kv_blocks" not in facts:
        with contextlib.suppress(NotAvailable):
            facts["engine.kv_blocks"] = in_worker(llm, worker.facts)[1]["blocks"]
    return {name: value for name, value in facts.items() if value is not None}


def is_dead(engine: Any, exc: BaseException) -> bool:
    """Whether no further request can be answered after ``exc``."""
    if any(base.__name__ == "EngineDeadError" for base in type(exc).__mro__):
        return True
    flag = probe.walk(engine, "engine_core.resources.engine_dead")
    if flag is not None and flag[1]:
        return True
    return probe.core(engine) == "V1" and probe.layout(engine) == "InprocClient"
