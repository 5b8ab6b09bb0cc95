"""What a scenario may need, as questions to the vLLM that is installed. Never answered from its version.

A question is answered by ``said``, a few words, or by NotAvailable. What vLLM itself refuses, in words of its own, is
an answer too; whatever else is raised is none.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Callable

from rig import cache, engine, probe
from rig.errors import locate, raised_in
from rig.outcomes import NotAvailable
from rig.spmd import require_external_launcher

REFUSALS = (ValueError, NotImplementedError)
REFUSERS = ("vllm", "pydantic")  # whose code says no; a library's own ValueError that comes through vLLM is a defect
RANKS = 2  # of the one engine that external_launcher is asked for

# Where "not supported" is what vLLM makes of any error in the import of a model: it has it, and cannot load it.
_INSPECTION = "vllm/model_executor/models/registry.py"


@dataclass(frozen=True)
class Question:
    """``by`` names what is looked at."""

    name: str
    by: str
    ask: Callable[[], str]


def of_the_api(device: str) -> list[Question]:
    """What signatures, fields and files tell."""
    import vllm

    llm = vllm.LLM
    return [
        Question("sleep_levels", "signature of LLM.sleep", lambda: _takes(llm, "sleep", "level")),
        Question("wake_tags", "signature of LLM.wake_up", lambda: _takes(llm, "wake_up", "tags")),
        *(Question(name, f"LLM.{name}", _has(llm, name)) for name in _METHODS),
        Question("worker_extension", _OPTIONS, lambda: _option("worker_extension_cls")),
        Question("logprobs_mode", _OPTIONS, lambda: _option("logprobs_mode")),
        Question("bad_words", "SamplingParams fields", _bad_words),
        Question("prefix_caching", "rig.cache.no_prefix_caching", lambda: _prefix_caching(device)),
    ]


_METHODS = ("collective_rpc", "apply_model", "reset_prefix_cache")
_OPTIONS = "EngineArgs fields and LLM.__init__ parameters"


def of_the_engine(device: str, model: Path) -> list[Question]:
    """What an engine's configuration tells, asked with a checkpoint that this version knows. Nothing is started."""
    config = "VLLM_USE_V1={}; EngineArgs().create_engine_config(), its worker and attention"
    asleep = "EngineArgs(enable_sleep_mode=True).create_model_config()"
    return [
        Question("engine.v0", config.format(0), lambda: _core("V0", device, model)),
        Question("engine.v1", config.format(1), lambda: _core("V1", device, model)),
        Question("sleep_mode", asleep, lambda: _sleep(device, model)),
        Question(
            "external_launcher",
            "EngineArgs(distributed_executor_backend='external_launcher').create_engine_config()",
            lambda: _external_launcher(device, model),
        ),
    ]


def of_a_model(device: str, name: str, checkpoint: Path) -> Question:
    """Whether this version knows the architecture of a checkpoint, and takes its configuration."""
    by = "ModelRegistry.get_supported_archs(); EngineArgs().create_model_config()"
    return Question(f"model.{name}", by, lambda: _model(device, checkpoint))


def finding(question: Question) -> dict[str, Any]:
    """``available`` and what was ``said``; or a ``fault``, where nobody can tell."""
    try:
        available, said = True, question.ask()
    except NotAvailable as exc:
        available, said = False, exc.reason
    except Exception as exc:
        if not is_refusal(exc):
            return {"fault": f"{question.name}: {type(exc).__name__}: {words(exc)}"}
        available, said = False, words(exc)
    return {"name": question.name, "available": available, "said": said, "by": question.by}


def is_refusal(exc: BaseException) -> bool:
    """Whether vLLM says no. What breaks in it, or in our own question, says nothing about what it has."""
    files = [Path(locate(frame)[1]) for frame in raised_in(exc)]
    through_vllm = any("vllm" in file.parts for file in files)
    by_refuser = not {*REFUSERS}.isdisjoint(files[-1].parts) and not files[-1].as_posix().endswith(_INSPECTION)
    return isinstance(exc, REFUSALS) and through_vllm and by_refuser


def words(exc: BaseException) -> str:
    """One line: what an exception says. Of a validation by pydantic its first fault, which is the engine's own text."""
    try:
        text = str(exc.errors()[0]["msg"])  # type: ignore[attr-defined]
    except (AttributeError, LookupError, TypeError):
        text = str(exc)
    return " ".join(text.replace("Value error, ", "").split())[:500]


def architectures_of(checkpoint: Path) -> list[str]:
    """What the checkpoint says it is."""
    return list(_config(checkpoint).get("architectures") or [])


def _config(checkpoint: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    return found


def _takes(owner: Any, method: str, parameter: str) -> str:
    found = _has(owner, method)()
    if parameter not in probe.parameters(getattr(owner, method)):
        raise NotAvailable(f"LLM.{method}{found} takes no {parameter}", "signature")
    return found


def _has(owner: Any, name: str) -> Callable[[], str]:
    def ask() -> str:
        if not hasattr(owner, name):
            raise NotAvailable(f"no LLM.{name}", "attribute")
        return probe.signature(getattr(owner, name))

    return ask


def _option(name: str) -> str:
    if name not in probe.engine_options():
        raise NotAvailable(f"no engine option {name}", _OPTIONS)
    return ""


def _bad_words() -> str:
    if "bad_words" not in probe.sampling_options():
        raise NotAvailable("no sampling option bad_words", "SamplingParams fields")
    return ""


def _prefix_caching(device: str) -> str:
    hurdle = cache.no_prefix_caching(device)
    if hurdle:
        raise NotAvailable(hurdle, "rig.cache.no_prefix_caching")
    return ""


def _model(device: str, checkpoint: Path) -> str:
    engine.require_architecture(_config(checkpoint))
    _arguments(device, checkpoint).create_model_config()
    return ", ".join(architectures_of(checkpoint))


def _arguments(device: str, checkpoint: Path, dtype: str = "") -> Any:
    import vllm

    return vllm.EngineArgs(model=str(checkpoint), dtype=dtype or ("float32" if device == "cpu" else "bfloat16"))


def _sleep(device: str, checkpoint: Path) -> str:
    said = _option("enable_sleep_mode")
    if device != "cuda":  # a refusal there is a failure, and no lack
        engine.require_sleep_mode(checkpoint)
    return said


def _external_launcher(device: str, checkpoint: Path) -> str:
    require_external_launcher(device, checkpoint, RANKS)
    return ""


def _core(core: str, device: str, checkpoint: Path) -> str:
    """Both cores, where there are two, take the same configuration; whether they work here shows in what it names."""
    from vllm import envs

    if "VLLM_USE_V1" in envs.environment_variables:
        os.environ["VLLM_USE_V1"] = core[1:]
    else:
        only = "V1" if find_spec("vllm.v1") else "V0"
        if core != only:
            raise NotAvailable(f"this version knows only {only}", "VLLM_USE_V1 in vllm.envs")
    config = _configured(device, checkpoint)
    worker = _worker(config)
    if core == "V1" and not hasattr(worker, "get_kv_cache_spec"):  # V1's core begins with this call
        raise NotAvailable(f"{worker.__name__} has no get_kv_cache_spec", "parallel_config.worker_cls")
    return ", ".join(part.__name__ for part in (worker, _attention(config)) if part is not None)


def _configured(device: str, checkpoint: Path) -> Any:
    """The engine's configuration for cells. A refusal that has nothing to do with their type of numbers says more."""
    try:
        return _arguments(device, checkpoint).create_engine_config()
    except REFUSALS:
        _arguments(device, checkpoint, "auto").create_engine_config()
        raise


def _worker(config: Any) -> Any:
    """The class that the platform has put into the configuration; None where that is the executor's (0.6.3)."""
    found = getattr(config.parallel_config, "worker_cls", None)
    if not isinstance(found, str):
        return found
    module, _, name = found.rpartition(".")
    return getattr(importlib.import_module(module), name)


def _attention(config: Any) -> Any:
    """The attention backend that the platform gives to this core: V0's is refused only here on 0.10.0's CPU."""
    selector = _selector()
    known = {
        "head_size": config.model_config.get_head_size(),
        "dtype": config.model_config.dtype,
        "kv_cache_dtype": "auto",
        "block_size": config.cache_config.block_size or 16,
        "is_attention_free": False,
        "sliding_window": None,
    }
    wanted = probe.parameters(selector.get_attn_backend)
    with _current(config):
        return selector.get_attn_backend(**{name: value for name, value in known.items() if name in wanted})


def _current(config: Any) -> Any:
    """Newer versions (0.32.0) look up what they are not handed in the configuration that is current."""
    found = getattr(importlib.import_module("vllm.config"), "set_current_vllm_config", None)
    return found(config) if found else contextlib.nullcontext()


def _selector() -> Any:
    try:
        return importlib.import_module("vllm.attention.selector")
    except ModuleNotFoundError:  # moved (0.32.0)
        return importlib.import_module("vllm.v1.attention.selector")
