"""What a training loop does to an engine between two rollouts: sleep and wake, drop and rebuild, load, reset.

Each verb takes the path that this version offers and says which (``cache.*`` properties). What vLLM raises passes
through.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any, Callable, Mapping

from rig import probe, worker
from rig.cell import Cell
from rig.engine import Engine, in_worker
from rig.events import writer
from rig.outcomes import NotAvailable

TAGS = ("weights", "kv_cache")

_ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
GIB = 1 << 30


class Cycle:
    """One engine between two rollouts, and the way back.

    ``weights``: the set in the engine, None when sleep level 2 has thrown it away; ``asleep``: tags not yet woken;
    ``dropped``: the KV cache was let go of; ``touched``: any of it was ever so.
    """

    def __init__(self, engine: Engine, cell: Cell) -> None:
        self.engine = engine
        self.cell = cell
        self.weights: str | None = "w1"
        self.asleep: set[str] = set()
        self.dropped = False
        self.touched = False

    @property
    def has_tags(self) -> bool:
        """Whether weights and KV cache can be woken one after the other."""
        return bool(self.engine.properties()["cap.wake_up.tags"])

    def kv_bytes(self, config: Mapping[str, Any]) -> int:
        """Size of the KV cache: the worker's number of tokens, times our own arithmetic."""
        found = self._in_worker("inspect", worker.facts)
        blocks = found["blocks"] or self.engine.properties()["engine.kv_blocks"]
        return int(blocks * found["block_size"] * token_bytes(config, self.cell.dtype))

    def sleep(self, level: int) -> None:
        """Level 1 keeps the weights on the host, level 2 throws them away."""
        self._need("cap.sleep", "no LLM.sleep")
        self.asleep, self.touched = set(TAGS), True
        if level > 1:
            self.weights = None
        self.engine.drive("sleep", lambda llm: llm.sleep(level=level))

    def wake(self, *tags: str) -> None:
        """All, or ``weights`` and ``kv_cache`` by turns (from 0.8.3 on: vllm#15500)."""
        if tags:
            self._need("cap.wake_up.tags", "wake_up has no tags")
        self.engine.drive("wake", lambda llm: llm.wake_up(tags=list(tags)) if tags else llm.wake_up())
        self.asleep -= set(tags or TAGS)

    def drop(self, layers: bool) -> None:
        """Let go of the KV cache, as verl's engine A does; NotAvailable where the worker is not built that way."""
        found = self._in_worker("inspect", worker.facts)
        probed = f"{found['class']}: cache_engine, static_forward_context; by {self._path}"
        if "cache_engine" not in found["holders"]:
            raise NotAvailable("the worker keeps no cache_engine", probed)
        if layers and "layers" not in found["holders"]:
            raise NotAvailable("the layers keep no KV cache", probed)
        writer().property("cache.holders", found["holders"])
        self.dropped = self.touched = True
        self._in_worker("drop", worker.drop_kv, layers)

    def rebuild(self) -> None:
        """Allocate the KV cache again. What prefixes are cached lies in the memory that is gone."""
        self._in_worker("rebuild", worker.rebuild_kv)
        self.dropped = False
        self.reset()

    def load(self, weights: str) -> None:
        """Load a weight set into the live model, the whole of it."""
        self.weights, self.touched = None, True
        loaded = self._in_worker("load", worker.load_weights, str(self.cell.model_dir(weights)))
        writer().metric("cache.loaded", loaded, "tensors")
        self.weights = weights

    def reset(self) -> list[str]:
        """Forget what was computed with other weights: cached prefixes and, where they are kept, encoder outputs."""
        called = self.engine.drive("reset", _reset)
        writer().property("cache.reset", called)
        return called

    def restore(self) -> None:
        """As the engine was started: awake, with a KV cache, weights w1 and nothing cached."""
        if self.asleep:
            self.wake(*(() if len(self.asleep) == len(TAGS) else sorted(self.asleep)))
        if self.dropped:
            self.rebuild()
        if self.weights != "w1":
            self.load("w1")
        self.reset()

    def _in_worker(self, verb: str, function: Callable[..., Any], *args: Any) -> Any:
        self._path, result = self.engine.drive(verb, lambda llm: in_worker(llm, function, *args))
        writer().property("cache.path", self._path)
        return result

    def _need(self, capability: str, reason: str) -> None:
        if not self.engine.properties().get(capability):
            raise NotAvailable(reason, capability)


def options(cell: Cell, config: Mapping[str, Any]) -> dict[str, Any]:
    """Engine options of a scenario that looks at caches; asks the vLLM that is installed, so import it before.

    A KV cache of about 1 GiB, so that nobody can overlook it: on the CPU it is the cell's environment that says so.
    """
    hurdle = no_prefix_caching(cell.device)
    writer().property("cache.prefixes", hurdle or "on", check=None)
    wanted: dict[str, Any] = {"enable_prefix_caching": hurdle is None}
    if cell.device == "cuda":
        wanted["num_gpu_blocks_override"] = GIB // (16 * token_bytes(config, cell.dtype))
    return wanted


def no_prefix_caching(device: str) -> str | None:
    """Why prefixes cannot be cached here, or None.

    The attention of V0's CPU back end needs a package for it that vLLM does not install (torch_sdpa.py: it raises
    ModuleNotFoundError in the first step, on 0.7.3 to 0.8.5).
    """
    import vllm

    if not hasattr(vllm.LLM, "reset_prefix_cache"):
        return "no LLM.reset_prefix_cache: what is cached would outlive its weights"
    sdpa = Path(vllm.__file__).parent / "attention" / "backends" / "torch_sdpa.py"
    if device == "cpu" and sdpa.is_file() and find_spec("intel_extension_for_pytorch") is None:
        return "torch_sdpa.py needs intel_extension_for_pytorch, which is not installed"
    return None


def token_bytes(config: Mapping[str, Any], dtype: str) -> int:
    """KV cache bytes a token: keys and values of all layers, by the checkpoint's config.json."""
    text = config.get("text_config", config)
    heads = text["num_attention_heads"]
    head_dim = text.get("head_dim") or text["hidden_size"] // heads
    return int(2 * text["num_hidden_layers"] * text.get("num_key_value_heads", heads) * head_dim * _ITEM_BYTES[dtype])


def _reset(llm: Any) -> list[str]:
    """What was called. The cache of preprocessed pictures stays: it depends on no weight, and resetting one side of
    it desynchronises the other (vllm#42995)."""
    called = []
    for name in ("reset_prefix_cache", "reset_encoder_cache"):
        found = probe.walk(llm, name, f"llm_engine.{name}")
        if found:
            found[1]()
            called.append(found[0])
    return called
