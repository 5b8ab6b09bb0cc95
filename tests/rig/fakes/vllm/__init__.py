"""A scripted vLLM. FAKE_VLLM (JSON) says which: ``core`` (v0, v1), ``inproc``, ``bugs``, ``counter`` (a file).

``rpc``: V1's client has collective_rpc, as in 0.8.5; 0.8.2's has not.
``ranks``: further bugs by rank, ``{"1": ["hangs"]}``.
``sleep``: its LLM has sleep, tags and reset_prefix_cache; ``sleep_mode``: its platform, then a GPU, has it too.
"""

import atexit
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy
import tiny

from vllm import worker
from vllm.model_executor.models import registry

if "does-not-import" in json.loads(os.environ.get("FAKE_VLLM", "{}")).get("bugs", []):
    raise ImportError("libnuma.so.1: cannot open shared object file")

DEFAULT = {"core": "v0", "inproc": False, "rpc": True, "bugs": [], "sleep": False, "sleep_mode": False}
SCRIPT = {**DEFAULT, **json.loads(os.environ.get("FAKE_VLLM", "{}"))}
BUGS = SCRIPT["bugs"] + SCRIPT.get("ranks", {}).get(os.environ.get("VLLM_MATRIX_RANK"), [])
MODEL = SimpleNamespace(dtype="torch.float32", max_model_len=2048)


@dataclasses.dataclass
class EngineArgs:
    model: str
    dtype: str = "auto"
    seed: int = 0
    limit_mm_per_prompt: dict | None = None
    enable_prefix_caching: bool = False
    enable_sleep_mode: bool = False
    num_gpu_blocks_override: int | None = None
    worker_extension_cls: str = ""
    tensor_parallel_size: int = 1
    distributed_executor_backend: str | None = None

    def create_model_config(self):
        if "not-loadable" in BUGS:
            registry.raise_for_unsupported()
        if "breaks" in BUGS:
            raise RuntimeError("Failed to infer device type")
        if "hangs-in-config" in BUGS:
            time.sleep(3600)
        if "dies-in-config" in BUGS:
            os.kill(os.getpid(), signal.SIGSEGV)
        if self.enable_sleep_mode and not SCRIPT["sleep_mode"]:
            raise ValueError("1 validation error\n  Value error, Sleep mode is not supported on current platform.")

    def create_engine_config(self):
        if "no-launcher" in BUGS:
            raise ValueError("Unrecognized distributed executor backend external_launcher. Supported values are ...")
        v1 = os.environ.get("VLLM_USE_V1") == "1"
        if v1 and {"refuses-v1", "refuses-float32"} & {*BUGS} and self.dtype == "float32":
            raise NotImplementedError("VLLM_USE_V1=1 is not supported with --dtype torch.float32.")
        if v1 and "refuses-v1" in BUGS:
            raise NotImplementedError("VLLM_USE_V1=1 is not supported with device type=cpu.")
        backend = "mp" if "falls-back" in BUGS else self.distributed_executor_backend
        worker_cls = "vllm.worker.V1Worker" if v1 and "no-v1-worker" not in BUGS else "vllm.worker.Worker"
        return SimpleNamespace(
            parallel_config=SimpleNamespace(distributed_executor_backend=backend, worker_cls=worker_cls),
            model_config=SimpleNamespace(get_head_size=lambda: 8, dtype=self.dtype),
            cache_config=SimpleNamespace(block_size=None),
        )


@dataclasses.dataclass
class SamplingParams:
    temperature: float = 1.0
    max_tokens: int = 16
    n: int = 1
    seed: int | None = None
    logprobs: int | None = None
    detokenize: bool = True


class ModelRegistry:
    @staticmethod
    def get_supported_archs():
        return [] if "no-model" in BUGS else ["TinyVL"]


class BaseEngine:
    def abort_request(self, ids):
        for request_id in [] if "never-aborts" in BUGS else list(ids):
            del self.running[request_id]

    def has_unfinished_requests(self):
        return bool(self.running)


class V0Engine(BaseEngine):
    def __init__(self, config, executor):
        self.cache_config, self.model_config, self.model_executor = config, MODEL, executor

    @property
    def scheduler(self):
        groups = [SimpleNamespace(request_id=request_id) for request_id in self.running]
        return [SimpleNamespace(waiting=[], running=groups, swapped=[])]

    def fail(self, error):
        raise error


class LLM:
    def __init__(self, model, **kwargs):
        if "counter" in SCRIPT:
            with Path(SCRIPT["counter"]).open("a") as file:
                file.write("init\n")
        if "init-raises" in BUGS or ("other-weights-die" in BUGS and Path(model).name != "w1"):
            raise ValueError("no such engine")
        self.args = args = EngineArgs(model=model, **kwargs)
        args.create_model_config()
        numpy.random.seed(args.seed + ("other-seed" in BUGS))
        blocks = 63 if "fewer-blocks" in BUGS else args.num_gpu_blocks_override or 64
        config = SimpleNamespace(num_gpu_blocks=blocks, block_size=16, enable_prefix_caching=args.enable_prefix_caching)
        self._worker = worker.make(SCRIPT, BUGS, args, blocks)
        self._prefixes = {}
        BaseEngine.running = {}
        if SCRIPT["core"] == "v0":
            self.llm_engine = V0Engine(config, worker.Executor(self._worker))
        else:
            from vllm.v1.engine.llm_engine import LLMEngine

            self.llm_engine = LLMEngine(config, worker.Executor(self._worker))
        self.calls = 0

    def wake_up(self):
        """Without tags, as in 0.7.3."""

    def collective_rpc(self, method, args=()):
        """Where V1's client has none, it reaches for the executor, which only an engine in this process has (0.8.2)."""
        core = getattr(self.llm_engine, "engine_core", None)
        way = core if hasattr(core, "collective_rpc") else self.llm_engine.model_executor
        return way.collective_rpc(method, args)

    def generate(self, prompts, sampling_params, use_tqdm=True):
        self.calls += 1
        engine = self.llm_engine
        if SCRIPT["core"] == "v1" and getattr(getattr(engine.engine_core, "resources", None), "engine_dead", False):
            engine.fail(RuntimeError("dead"))
        for i, prompt in enumerate(prompts):
            engine.running[f"{self.calls}-{i}"] = prompt
        self._break(prompts)
        if not getattr(self._worker, "usable", True):
            engine.fail(TypeError("'NoneType' object is not subscriptable"))
        self._misbehave()
        done = [self._answer(prompt, sampling_params) for prompt in engine.running.values()]
        engine.running.clear()
        return done

    def _break(self, prompts):
        images = [bool(prompt.get("multi_modal_data")) for prompt in prompts]
        if "mixed-raises" in BUGS and any(images) and not all(images):
            self.llm_engine.fail(RuntimeError("shape '[96, -1, 64]' is invalid for input of size 39936"))
        if "mixed-kills" in BUGS and any(images) and not all(images):
            os.kill(os.getpid(), signal.SIGKILL)

    def _misbehave(self):
        if "hangs" in BUGS:
            time.sleep(3600)
        if "dies" in BUGS:
            os.kill(os.getpid(), signal.SIGKILL)
        if "leaves-a-process" in BUGS:
            subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"], start_new_session=True)
        if "ends-badly" in BUGS:
            atexit.register(os._exit, 3)

    def _answer(self, prompt, params):
        images = prompt.get("multi_modal_data", {}).get("image", [])
        ids = prompt.get("prompt_token_ids") or tiny.encode(prompt["prompt"])
        ids = tiny.expand(ids, images) + [tiny.PAD] * ("one-pad-more" in BUGS and bool(images))
        seen = [] if "image-ignored" in BUGS else images[:1] if "second-image-ignored" in BUGS else images
        rows = [self._row(ids, seen, k, params) for k in range(params.n)]
        return SimpleNamespace(prompt_token_ids=ids, outputs=rows)

    def _row(self, ids, images, k, params):
        drifting = "drifts" in BUGS or ("samples-other" in BUGS and params.temperature)
        drift = self.calls if drifting else 0
        weights = self._worker.weights
        if self.args.enable_prefix_caching and len(ids) > 128:
            weights = self._prefixes.setdefault(tuple(ids), weights)
        salt = (k if params.temperature else 0, drift, weights)
        tokens = tiny.continuation(ids, images, params.max_tokens, salt=salt)
        if "pad-sampled" in BUGS and images:
            tokens[2] = tiny.PAD
        tokens = [] if "empty" in BUGS else tokens
        pair = {1: SimpleNamespace(logprob=-0.5 - tokens[0] / 999 if tokens else 0.0), 2: SimpleNamespace(logprob=-2.5)}
        return SimpleNamespace(index=k, token_ids=tokens, finish_reason="length", logprobs=[pair] * len(tokens))


class SleepingLLM(LLM):
    """The allocator that sleep mode needs is one a process: with the core in it, a second engine has no luck."""

    instances = 0

    def __init__(self, model, **kwargs):
        super().__init__(model, **kwargs)
        if self.args.enable_sleep_mode and (SCRIPT["core"] == "v0" or SCRIPT["inproc"]):
            assert not SleepingLLM.instances, "Sleep mode can only be used for one instance per process."
            SleepingLLM.instances += 1

    def reset_prefix_cache(self):
        if "prefix-not-reset" not in BUGS:
            self._prefixes.clear()

    def sleep(self, level=1):
        assert self.args.enable_sleep_mode or "flag-ignored" in BUGS, "Sleep mode is not enabled in the model config"
        self.reset_prefix_cache()
        self._worker.sleep(level)

    def wake_up(self, tags=None):
        self._worker.wake_up(tags)


if SCRIPT["sleep"]:
    LLM = SleepingLLM
