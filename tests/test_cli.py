"""The command line as a user meets it: one message, one exit code, no traceback for a user's mistake."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from harness.project import Project
from harness.records import records_of
from tests import scripted
from tests.conftest import SPEC
from tests.scripted import ScriptedBackend
from tests.test_run import go, project, scripts  # noqa: F401 - a fixture

ENTRY = [sys.executable, "-c", "from harness.cli import main; main()"]


@dataclass(frozen=True)
class Said:
    code: int
    out: str
    err: str


@pytest.fixture
def cli(project: Project, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Said]:  # noqa: F811
    """Runs the real entry point in a process of its own, in the project's folder, without any Docker."""

    def run(*arguments: str, **env: str) -> Said:
        environment = {"PATH": "/nonexistent", "HOME": str(project.root), "PYTHONPATH": str(Path.cwd()), **env}
        done = subprocess.run(
            [*ENTRY, *arguments], cwd=project.root, env=environment, capture_output=True, text=True, timeout=60
        )
        assert "Traceback" not in done.stderr, done.stderr
        return Said(done.returncode, done.stdout, done.stderr)

    return run


def test_plan(cli: Callable[..., Said]) -> None:
    said = cli("plan")
    assert said.code == 0
    assert "vllm-0.8.5@cpu/cold_start[model=qwen2_vl]" in said.out
    assert "not runnable yet, for want of a lock: vllm-0.6.3" in said.out
    document = json.loads(cli("plan", "--json", "--profile", "full").out)
    assert len(document["cells"]) == 8
    assert {cell["action"] for cell in document["cells"]} == {"run"}


def test_configuration_is_2(cli: Callable[..., Said], project: Project) -> None:  # noqa: F811
    (project.root / "matrix.toml").write_text(SPEC.replace("profile =", "profil ="))
    said = cli("plan")
    assert said.code == 2
    assert "unknown key; did you mean 'profile'?" in said.err


def test_a_scenario_that_does_not_parse_on_310_is_2(cli: Callable[..., Said], project: Project) -> None:  # noqa: F811
    (project.suite / "test_cold_start.py").write_text("x = 1\ntype Y = int\n")
    said = cli("run")
    assert said.code == 2
    assert "test_cold_start.py, line 2" in said.err
    assert "Python 3.10" in said.err


def test_unknown_target_is_3_with_near_misses(cli: Callable[..., Said]) -> None:
    said = cli("run", "--target", "vllm-0.85")
    assert said.code == 3
    assert "Near: vllm-0.8.5" in said.err


def test_unknown_option_is_2(cli: Callable[..., Said]) -> None:
    assert cli("run", "--colour").code == 2


def test_outside_of_a_project_is_2(cli: Callable[..., Said], tmp_path_factory: pytest.TempPathFactory) -> None:
    said = cli("plan", "--config", str(tmp_path_factory.mktemp("none") / "matrix.toml"))
    assert said.code == 2
    assert "does not exist" in said.err


def test_a_docker_that_refuses_is_5(cli: Callable[..., Said]) -> None:
    said = cli("run", DOCKER_HOST="tcp://127.0.0.1:1")
    assert said.code == 5
    assert "mend DOCKER_HOST" in said.err


def test_show_and_logs(cli: Callable[..., Said], project: Project) -> None:  # noqa: F811
    def dies(launch: object, stopped: object) -> object:
        state = scripted.signal_9(launch, stopped)  # type: ignore[arg-type]
        (launch.folder / "stdout.log").write_bytes(b"\x1b[31mlast\x1b[0m words\x07\r100%\n")  # type: ignore[attr-defined]
        return state

    outcome = go(project, ScriptedBackend(scripts(multimodal_rollout=dies)))  # type: ignore[arg-type]
    assert outcome.exit_code == 1
    said = cli("show", "vllm-0.8.5*multi*")
    assert said.code == 0
    assert "CRASH" in said.out
    assert "what to do: `vllm-matrix logs CELL`" in said.out
    logs = cli("logs", "vllm-0.8.5*multi*")
    assert "last words\N{REPLACEMENT CHARACTER}\n100%\n" in logs.out


def test_a_cell_that_is_not_one_is_3(cli: Callable[..., Said], project: Project) -> None:  # noqa: F811
    assert "there is no run" in cli("show", "*").err
    go(project, ScriptedBackend(scripted.passes))
    many = cli("show", "*")
    assert many.code == 3
    assert "matches several cells" in many.err
    assert cli("show", "x").code == 3
    assert cli("show", "x", "--run", "y").code == 3


def test_repro_prints_a_command(cli: Callable[..., Said], project: Project) -> None:  # noqa: F811
    outcome = go(project, ScriptedBackend(scripted.passes))
    cell = next(iter(records_of(outcome.folder)))
    said = cli("repro", cell)
    assert said.code == 0
    assert "docker run --rm" in said.out
    assert said.out.rstrip().endswith("sha256:0 python3 -m rig")


def test_models(cli: Callable[..., Said], tmp_path: Path) -> None:
    said = cli("models", "--to", str(tmp_path / "made"))
    assert said.code == 0
    assert (tmp_path / "made" / "qwen2_vl" / "w1" / "config.json").is_file()


@pytest.mark.parametrize("number", ["inf", "nan", "0", "-1"])
def test_a_multiplier_that_is_no_number_to_multiply_with_is_2(cli: Callable[..., Said], number: str) -> None:
    assert cli("run", "--timeout-multiplier", number).code == 2


def test_pipes_among_the_results_hang_nobody(cli: Callable[..., Said], project: Project) -> None:  # noqa: F811
    outcome = go(project, ScriptedBackend(scripted.passes))
    record = next(outcome.folder.glob("cells/vllm-0.8.5*cold*/attempt-1/record.json"))
    record.unlink()
    os.mkfifo(record)
    assert cli("plan").code == 0
    assert "no record yet" in cli("show", "vllm-0.8.5*cold*").out


def test_logs_of_a_cell_that_has_no_record_yet(cli: Callable[..., Said], project: Project) -> None:  # noqa: F811
    outcome = go(project, ScriptedBackend(scripted.passes))
    folder = next(outcome.folder.glob("cells/vllm-0.8.5*cold*/attempt-1"))
    (folder / "record.json").unlink()
    (folder / "stdout.log").write_text("so far\n")
    assert "so far" in cli("logs", "vllm-0.8.5*cold*").out


def test_a_file_in_place_of_the_results_is_5(cli: Callable[..., Said], project: Project) -> None:  # noqa: F811
    (project.root / "results").write_text("")
    said = cli("run", "--backend", "local")
    assert said.code in (4, 5)
    assert "error:" in said.err
