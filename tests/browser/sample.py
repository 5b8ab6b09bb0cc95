"""A run with a cell of every kind, as it might lie on disk: what the page is tested and looked at with."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, date, datetime, timedelta
from pathlib import Path

from harness.cells import Cell, Deadlines, Resources
from harness.events import ErrorInfo, Frame
from harness.expectations import Expectation, Match
from harness.matrix import Matrix, build_matrix
from harness.records import CheckRecord, ExitState, Host, ImageRef, MetricRecord, Record, Revision, attempt_folder
from harness.status import Status, worst_status
from tests.browser import sample_targets

RUN = "20261130T142424Z-5466"
NOW = datetime(2026, 11, 30, 14, 40, tzinfo=UTC)
MAX_AGE = timedelta(days=7)
TORCH = {"0.6.3": "2.4.0", "0.7.3": "2.5.1", "0.8.2": "2.6.0", "0.8.5": "2.6.0", "0.10.0": "2.7.1"}
MIXED = "RuntimeError", "shape '[96, -1, 64]' is invalid for input of size 39936"
ADDRESS = "https://github.com/example/engine/pull/8770"
HOSTILE = "<script>alert(1)</script>\x1b[31m\x00\u202e\"'><img src=x onerror=alert(2)>"

DOCSTRING = '''"""Does a rollout with images in its prompts give what a cold start gives?

One engine answers all checks, as in a training step. Kept as ``reference.json``: ids equal to a cold start.

Not shown.
"""
raise RuntimeError("imported")
'''


def cell(vllm: str, scenario: str, **params: str) -> Cell:
    return Cell(
        target=f"vllm-{vllm}",
        vllm=vllm,
        python="3.11",
        device="cpu",
        scenario=scenario,
        file=f"test_{scenario}.py",
        params=params,
        resources=Resources(cpus=2, memory=6 << 30, shm=1 << 30, gpus=0),
        deadlines=Deadlines(total=900, silence=300),
    )


def passed(name: str, seconds: float = 1.25) -> CheckRecord:
    return CheckRecord(id=name, status=Status.PASS, seconds=seconds)


def raised(name: str, kind: str, message: str, depth: int = 3) -> CheckRecord:
    frames = (
        Frame(where="suite", file="test_multimodal_rollout.py", line=40, function="__call__"),
        Frame(where="rig", file="engine.py", line=92, function="generate"),
        Frame(where="site", file="vllm/model_executor/layers/rotary_embedding.py", line=989, function="forward"),
    )
    lines = "".join(
        f'  File "/opt/venv/lib/python3.11/site-packages/vllm/worker/model_runner.py", line {1000 + number}, in step\n'
        f"    hidden_states = model_executable(input_ids, positions, intermediate_tensors)\n"
        for number in range(depth)
    )
    traceback = f"Traceback (most recent call last):\n{lines}{kind}: {message}\n"
    error = ErrorInfo(type=kind, bases=("Exception",), message=message, frames=frames, traceback=traceback)
    return CheckRecord(id=name, status=Status.FAIL, seconds=0.886, error=error)


def plain(name: str, status: Status, reason: str) -> CheckRecord:
    return CheckRecord(id=name, status=status, reason=reason)


def record(of: Cell, *checks: CheckRecord, **changes: object) -> Record:
    started = NOW - timedelta(minutes=14)
    status = worst_status(check.status for check in checks)
    fields: dict[str, object] = {
        "run": RUN,
        "cell": of.id,
        "attempt": 1,
        "target": of.target,
        "vllm": of.vllm,
        "python": of.python,
        "device": of.device,
        "scenario": of.scenario,
        "params": dict(of.params),
        "axes": {"device": "cpu/x86_64", "model": "qwen2_vl", "dtype": "float32", "python": "3.11.2", "engine": "V0"},
        "digest": "f384e06bb8f01bdc4a9897d740ffee1c309f0352cd39a00885dbe24df2d15d98",
        "facts": {},
        "backend": "docker",
        "started": started,
        "ended": started + timedelta(seconds=109.8),
        "status": status,
        "reason": next((check.reason for check in checks if check.status is status), None),
        "checks": checks,
        "metrics": (
            MetricRecord(name="kv_cache", value=1 << 30, unit="bytes"),
            MetricRecord(name="tokens", value=4096, unit="tokens", check="text"),
            MetricRecord(name="rss_slope", value=-0.03125, unit="MiB/cycle"),
        ),
        "properties": {
            "cap.sleep": True,
            "cap.option.logprobs_mode": False,
            "engine.attention": "TORCH_SDPA",
            "engine.kv_blocks": 32768,
            "engine.options": ("dtype=float32", "enforce_eager=True", "limit_mm_per_prompt={'image': 4}", "seed=0"),
        },
        "phases": {"import": 7.86, "init": 20.728, "processor": 0.015, "close": 0.394},
        "distributions": {"vllm": f"{of.vllm}+cpu", "torch": TORCH.get(of.vllm, "2.8.0"), "transformers": "4.52.3"},
        "image": ImageRef(tag=f"vllm-matrix/{of.target}:cpu-e76a7a16eff7", id="sha256:349bf7ba7a784d15c9de1761b7a0bb"),
        "exit": ExitState(started=True, exit_code=0, last_mark="generate 37 leave"),
        "revision": Revision(version="0.1.0", commit="ee77ab24d2c7783081a9e7567fe3ae83b9ce2010", dirty=True),
        "host": Host(machine="x86_64", cpus=2, memory=24 << 30, engine="docker 20.10.24"),
    }
    return Record.model_validate(fields | changes)


def expectations() -> tuple[Expectation, ...]:
    mixed = Match(type="RuntimeError", message="is invalid for input of size")
    return (
        Expectation(
            scenario="multimodal_rollout*",
            check="*mixed*",
            when={"vllm": "<0.8.5"},
            status=(Status.FAIL,),
            match=mixed,
            reason="the V0 engine on the CPU takes plain positions or those of `M-RoPE`, never both in one batch",
            link=ADDRESS,
            expires=date(2027, 5, 31),
        ),
        Expectation(
            scenario="cache_cycles*",
            check="wakes",
            when={"vllm": "==0.8.2"},
            status=(Status.FAIL, Status.PASS),
            match=Match(reason="hang"),
            reason="waking up hangs now and then in this release",
            link="javascript:alert(1)",
        ),
        Expectation(
            scenario="cache_cycles*",
            check="frees",
            when={"vllm": "==0.8.5"},
            status=(Status.FAIL,),
            match=mixed,
            reason="memory was not given back before this release",
            expires=date(2027, 5, 31),
        ),
    )


def _names() -> list[str]:
    kinds = ("prompt_length", "image_matters", "repeat", "cold_start")
    return [
        "text",
        "one_image",
        "sizes",
        *(f"{kind}[{of}]" for kind in kinds for of in ("text", "sizes", "two_images")),
    ]


def _rollout(of: Cell, fails: bool) -> Record:
    good = [passed(name) for name in _names()]
    if not fails:
        return record(of, *good, passed("mixed_batch"))
    return record(
        of, *good, raised("cold_start[mixed]", *MIXED, depth=60), raised("mixed_batch", MIXED[0], MIXED[1] + "1")
    )


def _cycles(of: Cell) -> Record | None:
    names = [passed("sleeps"), passed("frees")]
    na = plain("wakes", Status.NA, "no such method: LLM.wake_up")
    oom = {"reason": "host: killed for memory", "advice": "The cell's memory limit was reached; raise `memory` of it."}
    killed = ExitState(started=True, exit_code=137, oom_killed=True)
    return {
        "0.6.3": None,
        "0.7.3": record(of, *names, na),
        "0.8.2": record(of, *names, passed("wakes"), reused_from="20261128T020000Z-1a2b"),
        "0.8.5": record(of, *names, passed("wakes"), attempt=2),
        "0.10.0": record(of, *names, plain("<cell>", Status.OOM, oom["reason"]), exit=killed, **oom),
    }[of.vllm]


def _ranks(of: Cell) -> Record | None:
    miss = "engine-of-containers: the container could not be started: no space left on device"
    old = NOW - timedelta(days=9)
    died = [
        passed("tensor_parallel"),
        plain("same_ids", Status.CRASH, "signal: SIGKILL"),
        plain("same_blocks", Status.CRASH, "not-reached: signal: SIGKILL"),
    ]
    return {
        "0.6.3": record(of, plain("<cell>", Status.MISS, miss), attempt=2, image=None, exit=None, axes={}, phases={}),
        "0.7.3": record(of, passed("same_ids"), started=old, ended=old + timedelta(seconds=71)),
        "0.8.2": record(of, *died),
        "0.8.5": record(of, passed("same_ids"), raised(HOSTILE, "Weird", HOSTILE)),
        "0.10.0": record(of, passed("same_ids"), plain("same_blocks", Status.CRASH, "signal: SIGKILL")),
    }[of.vllm]


def records(cells: tuple[Cell, ...]) -> Mapping[str, Record]:
    found: dict[str, Record | None] = {}
    for of in cells:
        if of.scenario == "cold_start":
            found[of.id] = record(of, passed("starts", 22.46), passed("answers[text]"), passed("records", 9.959))
        elif of.scenario == "multimodal_rollout":
            found[of.id] = _rollout(of, fails=of.vllm not in ("0.10.0", "0.6.3") and of.params["model"] == "qwen2_vl")
        else:
            found[of.id] = _cycles(of) if of.scenario == "cache_cycles" else _ranks(of)
    return {name: some for name, some in found.items() if some is not None}


def cells() -> tuple[Cell, ...]:
    models = ("qwen2_vl", "qwen2_5_vl")
    questions = [
        *(("cold_start", {"model": model}) for model in models),
        *(("multimodal_rollout", {"model": model}) for model in models),
        ("cache_cycles", {"level": "2"}),
        ("spmd_ranks", {}),
    ]
    every = [cell(vllm, name, **params) for vllm in TORCH for name, params in questions]
    return tuple(of for of in every if not (of.vllm == "0.6.3" and of.params.get("model") == "qwen2_5_vl"))


def sample() -> Matrix:
    planned = cells()
    known = sample_targets.targets(list(TORCH))
    return build_matrix(RUN, planned, records(planned), expectations(), NOW, MAX_AGE, ["vllm-0.11.0"], known)


def full() -> Matrix:
    """Seven targets by nine columns, with words as long as they get."""
    models = ("qwen2_vl", "qwen2_5_vl")
    questions = [
        *(("cold_start", {"model": model}) for model in models),
        *(("cache_cycles", {"model": "qwen2_vl", "mode": mode}) for mode in ("plain", "sleep")),
        *(("multimodal_rollout", {"model": model}) for model in models),
        *(("spmd_barriers", {"layout": layout, "model": "qwen2_vl"}) for layout in ("dp2", "tp2")),
        ("weight_update", {"model": "qwen2_vl"}),
    ]
    versions = [*TORCH, *sample_targets.NEW]
    planned = tuple(cell(vllm, name, **params) for vllm in versions for name, params in questions)
    many = [passed(f"check-{number}") for number in range(26)]
    ends = (plain("last", Status.NA, "no"), plain("last", Status.TIMEOUT, "silence"), raised("last", *MIXED), many[0])
    found = {of.id: record(of, *many, ends[number % 4], attempt=2) for number, of in enumerate(planned)}
    known = sample_targets.targets(versions)
    return build_matrix(RUN, planned, found, expectations(), NOW, MAX_AGE, (), known)


def write(results: Path, matrix: Matrix) -> tuple[Path, Path]:
    """Lay logs and scenario files where a run has them. Returns the run's folder and the suite's."""
    suite = results / "suite"
    suite.mkdir()
    (suite / "test_multimodal_rollout.py").write_text(DOCSTRING)
    for square in matrix.squares:
        if square.record is None:
            continue
        folder = attempt_folder(results, RUN, square.cell.id, square.record.attempt)
        folder.mkdir(parents=True)
        (folder / "record.json").write_text(square.record.model_dump_json(by_alias=True))
        lines = "".join(f"INFO 11-30 14:27:{number % 60:02} [core.py:{number}] a line\n" for number in range(400))
        (folder / "stderr.log").write_text(
            "\x1b[31mred\x1b[0m\n" + lines + "load 10%\rload 100%\r\n</pre><script>x</script>"
        )
        (folder / "stdout.log").write_text("")
    return results / "runs" / RUN, suite
