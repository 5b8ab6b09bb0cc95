import json
import os

_bugs = json.loads(os.environ.get("FAKE_VLLM", "{}")).get("bugs", [])
environment_variables = {} if "one-core" in _bugs else {"VLLM_USE_V1": lambda: os.environ.get("VLLM_USE_V1") == "1"}
