"""A project and its nightly runs as they might lie on disk, small for tests and large for `benchmarks/scale.py`."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from harness.cells import Cell
from harness.events import ErrorInfo, Frame
from harness.plan import Planned
from harness.planfile import write_plan
from harness.project import Project, load_project
from harness.records import (
    CheckRecord,
    ExitState,
    Host,
    ImageRef,
    MetricRecord,
    Record,
    Revision,
    attempt_folder,
    write_record,
)
from harness.status import Status, worst_status

LAST = datetime(2026, 11, 30, 2, tzinfo=UTC)  # when the newest night begins
CHECKS = ("loads", "answers", "sleeps", "wakes", "updates", "frees", "text", "one_image", "two_images", "mixed")
METRICS = ("rss.awake", "rss.asleep", "rss.slope", "shm", "tokens")
PACKAGES = ("transformers", "tokenizers", "numpy", "pillow", "xgrammar", "outlines", "msgspec", "pyzmq", "protobuf")

Story = Callable[[Record, int], Record | None]  # a record, and the night it is of → as it was, or that it never came


def untouched(record: Record, _night: int) -> Record:
    return record


def make_project(root: Path, versions: int = 3, scenarios: int = 2) -> Project:
    """vLLM 0.1.0, 0.2.0 … on the CPU, and scenarios s0, s1 …; one check that is known to fail in all of 0.1.0."""
    lines = ["schema = 1", "[profiles.quick]", 'select = ["*"]']
    for number in range(1, versions + 1):
        lines += [f'[targets."vllm-0.{number}.0"]', f'vllm = "0.{number}.0"', 'python = "3.11"']
        lines += [f'devices.cpu.distribution = "vllm==0.{number}.0"']
    lines += [line for number in range(scenarios) for line in (f"[scenarios.s{number}]", 'parameters.model = ["tiny"]')]
    suite = root / "scenarios"
    suite.mkdir(parents=True)
    for number in range(scenarios):
        (suite / f"test_s{number}.py").write_text("def test_loads(): ...\n")
    (root / "matrix.toml").write_text("\n".join(lines) + "\n")
    (root / "expectations.toml").write_text(
        'schema = 1\n[[expect]]\nscenario = "*"\ncheck = "mixed"\nwhen = { vllm = "<0.2" }\nstatus = ["FAIL"]\n'
        'match = { type = "RuntimeError", message = "shape .* is invalid" }\n'
        'reason = "texts and images in one batch are refused"\nlink = "https://example.invalid/1"\n'
    )
    return load_project(root / "matrix.toml")


def add_nights(
    project: Project, nights: int, story: Story = untouched, last: datetime = LAST, first: int = 0
) -> tuple[str, ...]:
    """The names of `nights` runs of all cells, the oldest first; `first` is the number of the oldest."""
    sample = {cell.id: plain_record(cell) for cell in project.cells}
    plan = [_planned(cell, sample[cell.id]) for cell in project.cells]
    names = []
    for night in range(first, first + nights):
        began = last - timedelta(days=first + nights - 1 - night)
        names.append(f"{began:%Y%m%dT%H%M%SZ}-{night:04x}")
        _add(project, names[-1], story, night, began, plan, sample)
    return tuple(names)


def _planned(cell: Cell, record: Record) -> Planned:
    return Planned(cell=cell, digest=record.digest, facts=record.facts, action="run", reason="new", selected=True)


def _add(
    project: Project,
    name: str,
    story: Story,
    night: int,
    began: datetime,
    plan: Sequence[Planned],
    sample: dict[str, Record],
) -> None:
    noise = random.Random(night)  # noqa: S311 - the same nights every time
    folder = project.results / "runs" / name
    write_plan(folder, name, plan, ())
    for number, record in enumerate(sample.values()):
        started = began + timedelta(seconds=number)
        times = {"run": name, "started": started, "ended": started + timedelta(seconds=110)}
        told = story(record.model_copy(update={**times, "metrics": _noisy(record, noise)}), night)
        if told is not None:
            write_record(attempt_folder(project.results, name, told.cell, told.attempt), told)


def _noisy(record: Record, noise: random.Random) -> tuple[MetricRecord, ...]:
    """Memory and slopes vary by a percent; counts do not."""
    return tuple(
        metric
        if metric.unit == "tokens"
        else MetricRecord.model_construct(
            name=metric.name, value=metric.value * noise.uniform(0.99, 1.01), unit=metric.unit, check=metric.check
        )
        for metric in record.metrics
    )


def with_check(record: Record, check: CheckRecord) -> Record:
    """The record with another end of one of its checks."""
    checks = tuple(check if one.id == check.id else one for one in record.checks)
    return record.model_copy(update={"checks": checks, "status": worst_status(one.status for one in checks)})


def raised(check: str, kind: str, message: str, file: str = "vllm/worker/model_runner.py") -> CheckRecord:
    """A check that failed since the version under test raised."""
    frames = (
        Frame(where="suite", file="test_s0.py", line=40, function=f"test_{check}"),
        Frame(where="rig", file="engine.py", line=92, function="generate"),
        Frame(where="site", file=file, line=989, function="forward"),
    )
    text = "".join(f'  File "{frame.file}", line {frame.line}, in {frame.function}\n' for frame in frames * 6)
    text = f"Traceback (most recent call last):\n{text}{kind}: {message}\n"
    error = ErrorInfo(type=kind, bases=("Exception",), message=message, frames=frames, traceback=text)
    return CheckRecord(id=check, status=Status.FAIL, seconds=0.886, error=error)


def plain_record(cell: Cell) -> Record:
    """All passes, but for what is known of 0.1.0."""
    checks = [CheckRecord(id=name, status=Status.PASS, seconds=1.25) for name in CHECKS]
    if cell.vllm == "0.1.0":
        checks[-1] = raised("mixed", "RuntimeError", "shape '[96, -1, 64]' is invalid for input of size 39936")
    return Record(
        run="",
        cell=cell.id,
        attempt=1,
        target=cell.target,
        vllm=cell.vllm,
        python=cell.python,
        device=cell.device,
        scenario=cell.scenario,
        params=dict(cell.params),
        axes={"device": "cpu/x86_64", "model": "tiny", "dtype": "float32", "python": "3.11.2", "engine": "V1"},
        digest="f384e06bb8f01bdc4a9897d740ffee1c309f0352cd39a00885dbe24df2d15d98",
        facts={
            "backend": "docker",
            "image": f"vllm-matrix/{cell.target}:cpu-e76a7a16eff7",
            "suite": "d803339d1654cd92605ef62562f16cadddd704630963d05feaf617bd92fdf2ab",
            "models": "a1c7b0aae18e37256bd776f8ac7784d207627a32245b5cb1429c912733863c48",
            "cell": cell.id,
            "options": '{"dtype": "float32"}',
            "environment": '{"VLLM_CPU_KVCACHE_SPACE": "1"}',
            "resources": '{"cpus": 2.0, "gpus": 0, "memory": 6442450944, "shm": 1073741824}',
        },
        backend="docker",
        started=LAST,
        ended=LAST,
        status=worst_status(check.status for check in checks),
        checks=tuple(checks),
        metrics=tuple(
            MetricRecord(name=name, value=1000.0, unit="tokens" if name == "tokens" else "MiB", check=check)
            for check in CHECKS[:4]
            for name in METRICS
        ),
        properties=_properties(),
        phases={"import": 7.86, "init": 20.728, "processor": 0.015, "close": 0.394},
        distributions={"vllm": cell.vllm, "torch": "2.6.0", **dict.fromkeys(PACKAGES, "1.2.3")},
        image=ImageRef(
            tag=f"vllm-matrix/{cell.target}:cpu-e76a7a16eff7", id=f"sha256:{'7a' * 32}", lock_sha256="fd" * 32
        ),
        exit=ExitState(started=True, exit_code=0, last_mark="generate 37 leave", seconds=109.8, quiet_seconds=3.5),
        revision=Revision(version="0.1.0", commit="51b33808081e8031df7179f6c3fad4d5e48b052b", dirty=False),
        host=Host(machine="x86_64", cpus=2, memory=24 << 30, engine="docker 20.10.24"),
    )


def _properties() -> dict[str, bool | int | str | tuple[str, ...]]:
    """About as many as real cells have."""
    options = ("disable_log_stats=True", "dtype=float32", "enforce_eager=True", "max_model_len=2048", "seed=0")
    known: dict[str, bool | int | str | tuple[str, ...]] = {
        "engine.attention": "TORCH_SDPA",
        "engine.kv_blocks": 32768,
        "engine.options": options,
    }
    caps = ("sleep", "sleep.level", "wake_up", "wake_up.tags", "collective_rpc", "apply_model", "prompt.token_ids")
    known |= {f"cap.{name}": True for name in caps}
    paths = ("cache.path", "cache.holders", "cache.reset")
    return known | {f"{check}.{path}": f"llm_engine.model_executor.{path}" for check in CHECKS for path in paths}
