"""V1's front end: its requests are known to an output processor, its core may die.

A core in a process of its own is out of reach but for its client, and its front end is not told how many blocks of KV
cache there are (0.8.5).
"""

from types import SimpleNamespace

from vllm import MODEL, SCRIPT, BaseEngine


class EngineDeadError(Exception):
    pass


class Client:
    def __init__(self, executor):
        if SCRIPT["rpc"]:
            self.collective_rpc = executor.collective_rpc


class SyncMPClient(Client):
    def __init__(self, executor):
        super().__init__(executor)
        self.resources = SimpleNamespace(engine_dead=False)

    def shutdown(self):
        self.resources.engine_dead = True


class InprocClient(Client):
    def __init__(self, executor):
        super().__init__(executor)
        self.engine_core = SimpleNamespace(model_executor=executor)

    def shutdown(self):
        self.engine_core.model_executor.shutdown()


class LLMEngine(BaseEngine):
    def __init__(self, config, executor):
        if SCRIPT["inproc"]:
            self.engine_core, self.model_executor = InprocClient(executor), executor
        else:
            self.engine_core = SyncMPClient(executor)
            config = SimpleNamespace(**{**vars(config), "num_gpu_blocks": None})
        self.vllm_config = SimpleNamespace(cache_config=config, model_config=MODEL, parallel_config=SimpleNamespace())
        self.output_processor = SimpleNamespace(request_states=self.running)

    def fail(self, error):
        if isinstance(self.engine_core, SyncMPClient):
            self.engine_core.resources.engine_dead = True
            raise EngineDeadError("EngineCore encountered an issue.") from error
        raise error
