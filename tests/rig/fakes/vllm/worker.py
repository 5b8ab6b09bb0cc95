"""The worker: weights, a KV cache that takes real memory on the CPU, sleep, and the faults that a script asks for."""

import importlib
from pathlib import Path
from types import SimpleNamespace

import tiny

DEVICE = {}  # bytes in use on the scripted GPU, by what uses them
TOKEN_BYTES = 2 * tiny.CONFIG["num_hidden_layers"] * tiny.CONFIG["hidden_size"] * 4


class Tensor:
    """Touched pages: what is only reserved is not resident."""

    def __init__(self, size):
        self.pages = bytearray(b"\1") * size

    def new_empty(self, size):
        return Tensor(0)


class Model:
    def __init__(self, folder, bugs=()):
        file = Path(folder) / "model.safetensors"
        self.weights = (file.read_text() if file.exists() else "") + "!" * ("one-weight-more" in bugs)

    def named_parameters(self):
        import torch

        return [("weight", torch.Tensor(self.weights))]

    def load_weights(self, weights):
        ((_, self.weights),) = weights
        return {"weight"}


class Worker:
    def __init__(self, model, blocks, bugs, device, sleep_mode):
        self.cache_config = SimpleNamespace(num_gpu_blocks=blocks, block_size=16)
        self.model_runner = SimpleNamespace(model=Model(model, bugs))
        self.bugs, self.device, self.sleep_mode = bugs, device, sleep_mode
        self.layers = [SimpleNamespace(kv_cache=[Tensor(0)])] if "layers-bound" in bugs else []
        self.compilation_config = SimpleNamespace(static_forward_context=dict(enumerate(self.layers)))
        self.lost = ""
        self.naps = 0
        self.allocate()
        if "blocks-unknown" in bugs:
            self.cache_config.num_gpu_blocks = None

    @property
    def weights(self):
        """What the answers depend on; lost buffers, or weights, are as good as other ones."""
        guessed = "lazy" in self.bugs and self.cache_engine is None
        return self.model_runner.model.weights, self.lost or "cache" * guessed

    def allocate(self):
        size = self.cache_config.num_gpu_blocks * 16 * TOKEN_BYTES
        self.kv = Tensor(0 if self.device == "cuda" else size)
        DEVICE["kv_cache"] = size

    def release(self):
        DEVICE["kv_cache"] = 0
        self.kv = None

    def sleep(self, level=1):
        if not self.sleep_mode and "flag-ignored" not in self.bugs:
            return
        self.naps += 1
        self.lost = self.lost or "weights" * (level == 2)
        if "sleep-frees-nothing" not in self.bugs:
            self.release()
        if "sleep-leaks" in self.bugs:
            DEVICE[f"leak-{self.naps}"] = 64 << 20

    def wake_up(self, tags=None):
        if tags is None or "kv_cache" in tags or "tags-ignored" in self.bugs:
            self.allocate()
        self.lost = self.lost or "weights" * ("wake-loses" in self.bugs)

    def load(self, weights):
        if "weights-not-loaded" not in self.bugs:
            self.lost = "buffers" if self.lost and "buffers-lost" in self.bugs else ""
            return self.model_runner.model.load_weights(weights)
        return {"weight"}

    def get_model(self):
        return SimpleNamespace(load_weights=self.load)


class V0Worker(Worker):
    def allocate(self):
        super().allocate()
        self._bind()

    def release(self):
        super().release()
        self.cache_engine = None

    def _init_cache_engine(self):
        self.allocate()
        self.lost = self.lost or "cache" * ("rebuild-garbage" in self.bugs)

    def _bind(self):
        self.cache_engine, self.cpu_cache = self.__dict__.pop("kv"), [1]
        for layer in self.layers:
            layer.kv_cache = [self.cache_engine]

    @property
    def usable(self):
        bound = self.layers and self.layers[0].kv_cache[0].pages
        return bool(self.cache_engine or bound) or "lazy" in self.bugs


class Executor:
    """Of one worker, in its own process."""

    def __init__(self, worker):
        self.driver_worker = worker

    def shutdown(self):
        pass

    def collective_rpc(self, method, args=()):
        return [getattr(self.driver_worker, method)(*args)]


def make(script, bugs, args, blocks):
    """The worker, with verl's kind of extension on its class where one is asked for."""
    bases = (V0Worker if script["core"] == "v0" else Worker,)
    if args.worker_extension_cls:
        module, _, name = args.worker_extension_cls.rpartition(".")
        bases += (getattr(importlib.import_module(module), name),)
    device = "cuda" if script["sleep_mode"] else "cpu"
    return type("FakeWorker", bases, {})(args.model, blocks, bugs, device, args.enable_sleep_mode)


class V1Worker(Worker):
    """A class that V1's core can ask."""

    def get_kv_cache_spec(self):
        return {}
