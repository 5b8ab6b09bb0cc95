"""What only a cell without a container needs to be promised."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from harness.backends import local, owner
from harness.backends.base import environment
from harness.backends.local import MARK, LocalBackend
from harness.errors import InfrastructureError
from tests.bench import VENV, Bench, carriers, promise, wait_for


def test_it_is_swept_even_if_its_keeper_is_killed(host: Bench) -> None:
    running = host.backend.start(host.launch("import os, time; os.kill(os.getppid(), 9); time.sleep(600)"))
    assert running.ended(20)
    assert "keeper of the cell was killed by signal 9" in running.close().error
    assert carriers(host.tag) == []


@promise("ends with a harness that is killed")
def test_it_ends_with_a_harness_that_is_killed(host: Bench) -> None:
    launch = host.launch("import os, time; print(os.environ['HOME'], 'ready', flush=True); time.sleep(600)")
    with host.elsewhere(launch, "running = backend.start(launch); time.sleep(600)") as harness:
        wait_for(lambda: b"ready" in host.output())
        harness.send_signal(signal.SIGKILL)
    wait_for(lambda: carriers(f"ASKED_FOR={host.tag}") == [], 10)
    assert not Path(host.output().decode().split()[0]).exists()


@promise("its scratch folder goes with it")
def test_its_scratch_folder_goes_with_it(host: Bench) -> None:
    host.run("""
        import os, pathlib
        pathlib.Path(os.environ["VLLM_MATRIX_OUT"], "home").write_text(os.environ["HOME"])
        pathlib.Path(os.environ["HOME"], "core").write_text("x")
        assert os.getcwd() == os.environ["HOME"] == os.environ["TMPDIR"]
    """)
    home = Path((host.folder / "work/out/home").read_text())
    assert home.parent == Path(tempfile.gettempdir())
    assert not home.exists()


def test_its_variables_are_the_containers_and_a_few_more(host: Bench) -> None:
    launch = replace(host.launch(""), gpus=("GPU-a", "GPU-b"))
    given = local.variables(launch, VENV.parent, Path("/s"))
    common = environment(tmp="/s", suite="", inputs="", out="", models="")
    more = {"ASKED_FOR", "CUDA_VISIBLE_DEVICES", "LANG", "PATH", "TMPDIR", "VIRTUAL_ENV"}
    assert set(given) == set(common) | more
    assert given["CUDA_VISIBLE_DEVICES"] == "GPU-a,GPU-b"
    assert given["PATH"].startswith(f"{VENV}/bin:")
    assert local.variables(replace(launch, gpus=()), VENV.parent, Path("/s"))["CUDA_VISIBLE_DEVICES"] == "-1"


@promise("`repro` prints a command that starts the same")
def test_the_printed_command_starts_the_same_process(host: Bench) -> None:
    """`repro` promises the cell's own environment: every variable is compared."""
    launch = host.launch("""
        import json, os, sys
        seen = {n: v.replace(os.environ["HOME"], "HOME") for n, v in os.environ.items()} | {"argv": sys.orig_argv[1:]}
        print(json.dumps({**seen, "prefix": sys.prefix, "cwd": os.getcwd().replace(os.environ["HOME"], "HOME")}))
    """)
    running = host.backend.start(launch)
    assert running.ended(60)
    running.close()
    ours = json.loads(host.output())
    (launch.folder / "tmp").mkdir()
    printed = shlex.join(local.command_line(launch, VENV.parent))
    done = subprocess.run(["/bin/sh", "-c", printed], check=True, capture_output=True, env={"PATH": os.environ["PATH"]})
    theirs = json.loads(done.stdout)
    assert ours.pop(MARK).startswith(launch.name)
    assert ours.pop(owner.VARIABLE) == owner.owner()
    assert ours == theirs


def test_an_environment_that_does_not_work_is_infrastructure(host: Bench, tmp_path: Path) -> None:
    broken = tmp_path / "broken" / "bin"
    broken.mkdir(parents=True)
    (broken / "python3").symlink_to("/bin/false")
    with pytest.raises(InfrastructureError, match="does not work"):
        LocalBackend(tmp_path).check(tmp_path, "broken")


def test_a_folder_too_long_for_sockets_is_infrastructure(
    host: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("d" * 80)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with pytest.raises(InfrastructureError, match="Set TMPDIR to a shorter one"):
        host.backend.check(tmp_path, host.image)


@promise("a kill for memory is told")
def test_a_kill_for_memory_is_told_where_the_kernel_counts_it(host: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = iter([4, 5])
    monkeypatch.setattr(local, "_oom_kills", lambda: next(counts, 5))
    assert host.run("import os; os.kill(os.getpid(), 9)").oom_killed
