"""What every back end promises, seen with real processes: the suite that a new one must pass."""

from __future__ import annotations

import os
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from harness import events
from harness.backends import size
from harness.backends.base import MAX_OUTPUT, environment
from harness.errors import InfrastructureError
from harness.records import ExitState
from tests.bench import Bench, carriers, carrying, promise, wait_for


@promise("starts the command that it is given, by the target's Python")
def test_another_command_of_the_same_python(bench: Bench) -> None:
    code = "import os, sys; open(os.environ['VLLM_MATRIX_OUT'] + '/seen.json', 'w').write('[\"%s\"]' % sys.argv[1])"
    assert bench.run_command("python3", "-c", code, "cpu").exit_code == 0
    assert bench.left("seen.json") == ["cpu"]


@promise("hands in folders and variables, and nothing of the caller's")
def test_what_it_is_handed(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "CUDA_VISIBLE_DEVICES", "SECRET", "LD_PRELOAD_", "HTTP_PROXY"):
        monkeypatch.setenv(name, "leaks")
    state = bench.run("""
        import json, os, pathlib, tempfile
        folder = {name: pathlib.Path(os.environ["VLLM_MATRIX_" + name]) for name in ("IN", "OUT", "MODELS")}
        home = pathlib.Path(os.environ["HOME"])
        (home / "written").write_text("x")
        (folder["OUT"] / "seen.json").write_text(json.dumps({
            "cell": (folder["IN"] / "cell.json").read_text(),
            "models": folder["MODELS"].is_dir(),
            "asked": os.environ.get("ASKED_FOR"),
            "leaked": sorted(name for name, value in os.environ.items() if value == "leaks"),
            "names": sorted(os.environ),
            "caches_at_home": all(os.environ[n].startswith(str(home)) for n in os.environ if "CACHE" in n),
            "temporary": str(pathlib.Path(tempfile.gettempdir())) == str(home),
            "stdin": os.read(0, 1).decode(),
        }))
    """)
    assert state == ExitState(started=True, exit_code=0)
    seen = bench.left("seen.json")
    names = seen.pop("names")
    assert set(environment(tmp="", suite="", inputs="", out="", models="")) <= set(names)
    assert seen == {
        "cell": "{}", "models": True, "asked": bench.tag, "leaked": [], "caches_at_home": True, "temporary": True,
        "stdin": "",
    }  # fmt: skip
    (bench.folder / "work/out/seen.json").unlink()  # whoever started it may remove what it left


@promise("tells exit codes and signals")
@pytest.mark.parametrize(
    ("code", "state"),
    [
        ("import sys; sys.exit(7)", ExitState(started=True, exit_code=7)),
        ("import os; os.kill(os.getpid(), 9)", ExitState(started=True, exit_code=137)),
        ("import os; os.abort()", ExitState(started=True, exit_code=134)),
    ],
)
def test_how_it_ended(bench: Bench, code: str, state: ExitState) -> None:
    assert bench.run(code) == state


@promise("SIGTERM reaches the rig, which may end in its own way")
def test_sigterm_reaches_the_rig(bench: Bench) -> None:
    running = bench.backend.start(
        bench.launch("""
        import signal, sys, time
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
        print("ready", flush=True)
        time.sleep(600)
    """)
    )
    wait_for(lambda: b"ready" in bench.output())
    running.terminate()
    assert running.ended(20)
    assert running.close() == ExitState(started=True, exit_code=3)


@promise("one that does not listen is killed")
def test_one_that_sleeps_and_does_not_listen_is_killed(bench: Bench) -> None:
    running = bench.backend.start(
        bench.launch("""
        import signal, subprocess, sys, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
        print("ready", flush=True)
        time.sleep(600)
    """)
    )
    wait_for(lambda: b"ready" in bench.output())
    begin = time.monotonic()
    running.terminate()
    assert not running.ended(0.5)
    assert running.close().exit_code == 137
    assert time.monotonic() - begin < 60


@promise("keeps the first 8 MiB of either output, whatever comes after")
def test_a_hundred_megabytes_of_output_keep_their_head_and_stop_nothing(bench: Bench) -> None:
    state = bench.run("""
        import sys
        line = b"x" * 1023 + b"\\n"
        sys.stdout.buffer.write(b"first line\\n")
        for _ in range(100 << 10):
            sys.stdout.buffer.write(line)
        sys.stderr.write("last words\\n")
    """)
    assert state.exit_code == 0
    assert len(bench.output()) == MAX_OUTPUT
    assert bench.output().startswith(b"first line\n")
    assert bench.output("stderr.log") == b"last words\n"


@promise("ends what still runs, once, however often it is asked")
def test_close_ends_what_still_runs(bench: Bench) -> None:
    running = bench.backend.start(bench.launch("import time; time.sleep(600)"))
    assert running.close() == running.close()


@promise("an image that is gone, and a back end that does not work, are told as such")
def test_an_image_that_is_gone_is_infrastructure(bench: Bench) -> None:
    gone = replace(bench, image="sha256:" + "0" * 64)
    with pytest.raises(InfrastructureError, match="is gone"):
        gone.backend.start(gone.launch(""))


@promise("an image that is gone, and a back end that does not work, are told as such")
def test_it_can_say_whether_it_works(bench: Bench) -> None:
    bench.backend.check(bench.folder, bench.image)


# Out of reach of the process group, of the session and of the mark in the environment, as ranks and engine cores get.
ESCAPES = """
    import os, signal, subprocess, sys, time
    for session in (False, True):
        child = subprocess.Popen(
            ["env", "-i", sys.executable, "-c", "import os, time; os.fork(); time.sleep(600)", "TAG"],
            start_new_session=session,
        )
    print("ready", flush=True)
    END
"""


@promise("sessions, double forks and cleared environments are swept")
@pytest.mark.parametrize("end", ["sys.exit(0)", "os.kill(os.getpid(), 9)", "time.sleep(600)"])
def test_nothing_of_it_is_left_whatever_sessions_it_made(bench: Bench, end: str) -> None:
    running = bench.backend.start(bench.launch(ESCAPES.replace("TAG", bench.tag).replace("END", end)))
    wait_for(lambda: b"ready" in bench.output())
    running.ended(1)
    state = running.close()
    assert state.error == ""
    assert state.exit_code == (0 if "exit" in end else 137)
    assert carriers(bench.tag) == []


@promise("its output can be read while it runs, and waiting for its end has its own end")
def test_output_streams_and_waiting_ends(bench: Bench) -> None:
    running = bench.backend.start(
        bench.launch("""
        import sys, time
        for number in range(600):
            print("line", number, flush=True)
            print("fault", number, file=sys.stderr, flush=True)
            time.sleep(0.1)
    """)
    )
    try:
        wait_for(lambda: b"line 3" in bench.output() and b"fault 3" in bench.output("stderr.log"))
        begin = time.monotonic()
        assert not running.ended(0.7)
        assert 0.6 < time.monotonic() - begin < 5
        assert b"line 7" in bench.output()
    finally:
        running.close()


@promise("a gigabyte of output costs at most 64 MiB of memory")
@pytest.mark.timeout(600)
def test_a_gigabyte_of_output(bench: Bench) -> None:
    launch = bench.launch("""
        import sys
        chunk = b"x" * (1 << 20)
        for _ in range(1 << 10):
            sys.stdout.buffer.write(chunk)
    """)
    code = """
        def peak():
            return int([line for line in open("/proc/self/status") if line.startswith("VmHWM")][0].split()[1])
        before = peak()
        running = backend.start(launch)
        ended = running.ended(500)
        state = running.close()
        print(ended, state.exit_code, peak() - before)
    """
    with bench.elsewhere(launch, code) as harness:
        said, _ = harness.communicate()
    ended, exit_code, kibibytes = said.split()
    assert (ended, exit_code) == ("True", "0")
    assert int(kibibytes) < 64 << 10
    assert len(bench.output()) == MAX_OUTPUT


@promise("goes on where the disk of its logs is full, and leaves room for its record")
def test_logs_on_a_full_disk(bench: Bench, small_disk: Path) -> None:
    launch = bench.launch("""
        import os, pathlib, sys
        out = pathlib.Path(os.environ["VLLM_MATRIX_OUT"])
        try:
            (out / "fill").write_bytes(bytes(8 << 20))
        except OSError as error:
            print(error.strerror, file=sys.stderr, flush=True)
        for _ in range(100):
            sys.stdout.buffer.write(bytes(1 << 20))
        sys.exit(3)
    """)
    work = small_disk / "work"
    shutil.copytree(launch.folder, work)
    state = bench.run_launch(replace(launch, folder=work))
    assert state == ExitState(started=True, exit_code=3)
    assert size.used(work) > 2 << 20
    assert (work / "stderr.log").read_text() == "No space left on device\n"
    (work / "record.json").write_bytes(bytes(size.ROOM - (192 << 10)))
    with pytest.raises(OSError, match="No space left"):
        bench.backend.start(replace(launch, folder=work))
    assert not (work / ".room").exists()


@promise("an /out that the cell took away or made unreadable is no evidence, and no fault of ours")
def test_results_that_are_lost(bench: Bench) -> None:
    state = bench.run("""
        import os, pathlib, shutil
        out = pathlib.Path(os.environ["VLLM_MATRIX_OUT"])
        shutil.rmtree(out / "artifacts")
        (out / "events.jsonl").mkdir()
        (out / "DONE").symlink_to("/dev/zero")
        os.mkfifo(out / "events.rank1.jsonl")
        shutil.rmtree(out, ignore_errors=True)
        if out.exists():
            out.chmod(0)
    """)
    out = bench.folder / "work/out"
    assert state == ExitState(started=True, exit_code=0)
    assert size.used(out) == 0
    assert events.read_events(out)[0] == ()
    assert events.read_done(out) is None


@promise("what a killed harness left is removed by the next, and of a living one nothing")
def test_what_a_killed_harness_leaves(bench: Bench) -> None:
    places = [bench.beside(name) for name in ("dies", "lives")]
    code = "import os, time; print(os.environ['HOME'], 'ready', flush=True); time.sleep(600)"
    launches = [place.launch(code, name=f"vllm-matrix-{place.folder.name}") for place in places]
    starts = "running = backend.start(launch); time.sleep(600)"
    harnesses = [place.elsewhere(launch, starts) for place, launch in zip(places, launches, strict=True)]
    try:
        wait_for(lambda: all(b"ready" in place.output() for place in places), 60)
        _kill_keeper(places[0])  # else it would leave nothing
        harnesses[0].kill()  # and nobody has asked how it ended, so far
        wait_for(lambda: _state(harnesses[0].pid) == "Z")
        assert carriers(f"ASKED_FOR={places[0].tag}") != []
        assert [line for line in bench.reap() if launches[0].name in line] != []
        assert carriers(f"ASKED_FOR={places[0].tag}") == []
        assert carriers(f"ASKED_FOR={places[1].tag}") != []
        assert [line for line in bench.reap() if launches[1].name in line] == []
    finally:
        for harness, place in zip(harnesses, places, strict=True):
            _kill_keeper(place)
            harness.kill()
            harness.communicate()
        bench.reap()
    assert carriers(f"ASKED_FOR={places[1].tag}") == []
    if bench.backend.name == "local":
        assert [place for place in places if Path(place.output().decode().split()[0]).exists()] == []


def _kill_keeper(place: Bench) -> None:
    for pid, line in carrying(place.tag):
        if "keeper.py" in line:
            os.kill(pid, signal.SIGKILL)


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
