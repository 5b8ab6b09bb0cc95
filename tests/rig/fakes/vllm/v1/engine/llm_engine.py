"""V1's front end: its requests are known to an output processor, its core may die."""

from types import SimpleNamespace

from vllm import MODEL, BaseEngine


class EngineDeadError(Exception):
    pass


class SyncMPClient:
    def __init__(self):
        self.resources = SimpleNamespace(engine_dead=False)

    def shutdown(self):
        self.resources.engine_dead = True


class InprocClient:
    def shutdown(self):
        pass


class LLMEngine(BaseEngine):
    def __init__(self, config, inproc):
        self.vllm_config = SimpleNamespace(cache_config=config, model_config=MODEL, parallel_config=SimpleNamespace())
        self.output_processor = SimpleNamespace(request_states=self.running)
        self.engine_core = InprocClient() if inproc else SyncMPClient()

    def fail(self, error):
        if isinstance(self.engine_core, SyncMPClient):
            self.engine_core.resources.engine_dead = True
            raise EngineDeadError("EngineCore encountered an issue.") from error
        raise error
