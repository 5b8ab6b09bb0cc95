"""A scripted vLLM. FAKE_VLLM (JSON) says which: ``core`` (v0, v1), ``inproc``, ``bugs``, ``counter`` (a file)."""

import dataclasses
import json
import os
import signal
from pathlib import Path
from types import SimpleNamespace

import tiny

SCRIPT = {"core": "v0", "inproc": False, "bugs": [], **json.loads(os.environ.get("FAKE_VLLM", "{}"))}
BUGS = SCRIPT["bugs"]
MODEL = SimpleNamespace(dtype="torch.float32", max_model_len=2048)


@dataclasses.dataclass
class EngineArgs:
    model: str
    dtype: str = "auto"
    seed: int = 0
    limit_mm_per_prompt: dict | None = None


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
        for request_id in list(ids):
            del self.running[request_id]

    def has_unfinished_requests(self):
        return bool(self.running)


class V0Engine(BaseEngine):
    def __init__(self, config):
        self.cache_config, self.model_config = config, MODEL
        self.model_executor = SimpleNamespace(shutdown=lambda: None)

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
        if "init-raises" in BUGS:
            raise ValueError("no such engine")
        EngineArgs(model=model, **kwargs)
        config = SimpleNamespace(num_gpu_blocks=64, block_size=16, enable_prefix_caching=False)
        BaseEngine.running = {}
        if SCRIPT["core"] == "v0":
            self.llm_engine = V0Engine(config)
        else:
            from vllm.v1.engine.llm_engine import LLMEngine

            self.llm_engine = LLMEngine(config, SCRIPT["inproc"])
        self.calls = 0

    def wake_up(self):
        """Without tags, as in 0.7.3."""

    def generate(self, prompts, sampling_params, use_tqdm=True):
        self.calls += 1
        engine = self.llm_engine
        if SCRIPT["core"] == "v1" and getattr(getattr(engine.engine_core, "resources", None), "engine_dead", False):
            engine.fail(RuntimeError("dead"))
        for i, prompt in enumerate(prompts):
            engine.running[f"{self.calls}-{i}"] = prompt
        self._break(prompts)
        done = [self._answer(prompt, sampling_params) for prompt in engine.running.values()]
        engine.running.clear()
        return done

    def _break(self, prompts):
        images = [bool(prompt.get("multi_modal_data")) for prompt in prompts]
        if "mixed-raises" in BUGS and any(images) and not all(images):
            self.llm_engine.fail(RuntimeError("shape '[96, -1, 64]' is invalid for input of size 39936"))
        if "mixed-kills" in BUGS and any(images) and not all(images):
            os.kill(os.getpid(), signal.SIGKILL)

    def _answer(self, prompt, params):
        images = prompt.get("multi_modal_data", {}).get("image", [])
        ids = prompt.get("prompt_token_ids") or tiny.encode(prompt["prompt"])
        ids = tiny.expand(ids, images) + [tiny.PAD] * ("one-pad-more" in BUGS and bool(images))
        seen = [] if "image-ignored" in BUGS else images[:1] if "second-image-ignored" in BUGS else images
        rows = [self._row(ids, seen, k, params) for k in range(params.n)]
        return SimpleNamespace(prompt_token_ids=ids, outputs=rows)

    def _row(self, ids, images, k, params):
        drift = self.calls if "drifts" in BUGS else 0
        tokens = tiny.continuation(ids, images, params.max_tokens, salt=(k if params.temperature else 0, drift))
        if "pad-sampled" in BUGS and images:
            tokens[2] = tiny.PAD
        tokens = [] if "empty" in BUGS else tokens
        pair = {1: SimpleNamespace(logprob=-0.5 - tokens[0] / 999 if tokens else 0.0), 2: SimpleNamespace(logprob=-2.5)}
        return SimpleNamespace(index=k, token_ids=tokens, finish_reason="length", logprobs=[pair] * len(tokens))
