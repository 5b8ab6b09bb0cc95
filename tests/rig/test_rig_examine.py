"""The probe against a scripted vLLM: what it finds, what counts as a refusal, and what a question that dies costs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from rig import questions
from rig.apart import Apart, ApartError
from rig.examine import unmet
from rig.outcomes import NotAvailable
from rig.questions import Question, finding

from harness.probes import SOURCES, read_probe
from tests.rig.run import SUITE, prepare


def examine(folder: Path, *bugs: str, seconds: float = 20.0, device: str = "cpu", **fake: Any) -> dict[str, Any]:
    """probe.json of a scripted vLLM with one model."""
    environment = prepare(folder, "test_cold_start.py", fake={**fake, "bugs": list(bugs)})
    command = [sys.executable, "-m", "rig.examine", device, str(seconds)]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    found = json.loads((folder / "out" / "probe.json").read_text())
    assert found["complete"]
    assert read_probe(folder / "out").model_dump(by_alias=True, mode="json").items() >= found.items()
    return dict(found)


def capabilities(found: dict[str, Any]) -> dict[str, tuple[bool, str]]:
    return {each["name"]: (each["available"], each["said"]) for each in found["capabilities"]}


def test_it_tells_what_is_installed_and_what_the_api_takes(tmp_path: Path) -> None:
    found = examine(tmp_path, sleep=True)
    assert found["distributions"]["pytest"]
    assert found["markers"]["python_version"] == ".".join(map(str, sys.version_info[:2]))
    assert {"enable_sleep_mode", "seed"} <= set(found["engine_options"])
    assert "logprobs" in found["sampling_options"]
    assert found["methods"]["LLM.generate"] == "(prompts, sampling_params, use_tqdm=True)"
    assert found["architectures"] == ["TinyVL"]
    assert (found["faults"], "error" in found) == ([], False)
    assert set(found["seconds"]) == {"import", "config"}


def test_what_packages_ask_for_and_do_not_find_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, version, requires in (
        (
            "engine",
            "1.0",
            ["torch==2.6.0+cpu", "light", "gone>=2 ; python_version > '3'", "win ; sys_platform == 'win32'"],
        ),
        ("torch", "2.6.0", ["engine>=1", "extra-only ; extra == 'all'"]),
        ("Light", "0.1rc1", []),
    ):
        folder = tmp_path / f"{name}-{version}.dist-info"
        folder.mkdir()
        lines = [f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}", *(f"Requires-Dist: {r}" for r in requires)]
        (folder / "METADATA").write_text("\n".join(lines) + "\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    mine = [each for each in unmet() if each["by"] in ("engine 1.0", "torch 2.6.0", "Light 0.1rc1")]
    assert mine == [
        {"by": "engine 1.0", "name": "gone", "asks": "gone>=2", "found": ""},
        {"by": "engine 1.0", "name": "torch", "asks": "torch==2.6.0+cpu", "found": "2.6.0"},
    ]


def test_capabilities_are_found_by_asking(tmp_path: Path) -> None:
    found = capabilities(examine(tmp_path))
    assert found["model.tiny"] == (True, "TinyVL")
    assert found["engine.v0"] == (True, "Worker, TinyBackend")
    assert found["engine.v1"] == (True, "V1Worker, TinyBackend")
    assert found["external_launcher"] == (True, "")
    assert found["worker_extension"] == (True, "")
    assert found["sleep_mode"] == (False, "Sleep mode is not supported on current platform.")
    assert found["wake_tags"] == (False, "LLM.wake_up() takes no tags")
    assert found["sleep_levels"] == (False, "no LLM.sleep")
    assert found["bad_words"] == (False, "no sampling option bad_words")
    assert found["logprobs_mode"] == (False, "no engine option logprobs_mode")
    assert found["prefix_caching"][0] is False


REFUSED = {
    "no-model": ("model.tiny", "no model TinyVL"),
    "refuses-v1": ("engine.v1", "VLLM_USE_V1=1 is not supported with device type=cpu."),
    "refuses-float32": ("engine.v1", "VLLM_USE_V1=1 is not supported with --dtype torch.float32."),
    "no-v1-worker": ("engine.v1", "Worker has no get_kv_cache_spec"),
    "v1-only": ("engine.v0", "CPU backend only supports V1."),
    "no-launcher": ("external_launcher", "no executor external_launcher"),
    "falls-back": ("external_launcher", "the platform runs external_launcher as mp"),
    "one-core": ("engine.v0", "this version knows only V1"),
}


@pytest.mark.parametrize("bug", REFUSED)
def test_what_vllm_refuses_is_not_available_in_its_own_words(tmp_path: Path, bug: str) -> None:
    name, said = REFUSED[bug]
    assert capabilities(examine(tmp_path, bug))[name] == (False, said)


@pytest.mark.parametrize("bug", ["breaks", "not-loadable"])
def test_what_breaks_is_no_answer(tmp_path: Path, bug: str) -> None:
    """A model that is registered and does not load is broken, whatever vLLM calls it: its cells have to show that."""
    found = examine(tmp_path, bug)
    assert "model.tiny" not in capabilities(found)
    assert any(fault.startswith("model.tiny: ") for fault in found["faults"])


@pytest.mark.parametrize(("bug", "how"), [("hangs-in-config", "did not answer in time"), ("dies-in-config", "SIGSEGV")])
def test_a_question_that_dies_or_hangs_costs_only_itself(tmp_path: Path, bug: str, how: str) -> None:
    begun = time.monotonic()
    found = examine(tmp_path, bug, seconds=1.0)
    assert time.monotonic() - begun < 20
    assert "sleep_levels" in capabilities(found)
    assert {"model.tiny", "sleep_mode"}.isdisjoint(capabilities(found))
    assert any(how in fault for fault in found["faults"])


def test_a_vllm_that_does_not_import_is_told_with_its_traceback(tmp_path: Path) -> None:
    found = examine(tmp_path, "does-not-import")
    assert found["error"].rstrip().endswith("ImportError: libnuma.so.1: cannot open shared object file")
    assert found["capabilities"] == []
    assert found["distributions"]


def test_on_a_gpu_a_refusal_of_sleep_mode_is_a_failure_and_no_lack(tmp_path: Path) -> None:
    assert capabilities(examine(tmp_path, device="cuda"))["sleep_mode"] == (True, "")


def test_the_host_knows_the_files_that_the_probe_is_made_of() -> None:
    code = "import sys, rig.examine; print(*(m.__file__ for n, m in sys.modules.items() if n.split('.')[0] == 'rig'))"
    done = subprocess.run([sys.executable, "-c", code], cwd=SUITE, capture_output=True, text=True, check=True)
    assert sorted(Path(file).relative_to(SUITE).as_posix() for file in done.stdout.split()) == sorted(SOURCES)


def asked(exc: BaseException) -> dict[str, Any]:
    def raises() -> str:
        raise exc

    return finding(Question("thing", "a look", raises))


def test_a_finding_is_an_answer_or_a_fault() -> None:
    assert finding(Question("thing", "a look", lambda: "(x)")) == {
        "name": "thing",
        "available": True,
        "said": "(x)",
        "by": "a look",
    }
    assert asked(NotAvailable("no thing", "elsewhere"))["available"] is False
    assert asked(ValueError("our own")) == {"fault": "thing: ValueError: our own"}


def test_the_words_of_a_validation_are_the_engines() -> None:
    class ValidationError(ValueError):
        def errors(self) -> list[dict[str, str]]:
            return [{"msg": "Value error, Sleep mode is\n not supported."}]

    assert questions.words(ValidationError("1 validation error for ModelConfig")) == "Sleep mode is not supported."
    assert questions.words(ValueError("a\n b")) == "a b"


def test_what_a_child_does_stays_in_it() -> None:
    child = Apart(lambda: [os.environ.setdefault("RIG_TEST_APART", "x"), "é" * 300_000])
    assert child.result(time.monotonic() + 20) == ["x", "é" * 300_000]
    assert "RIG_TEST_APART" not in os.environ


def test_a_child_ends_with_all_that_it_started(tmp_path: Path) -> None:
    def starts_another() -> None:
        process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        (tmp_path / "pid").write_text(str(process.pid))
        time.sleep(600)

    child = Apart(starts_another)
    with pytest.raises(ApartError, match="did not answer in time"):
        child.result(time.monotonic() + 2)
    pid = int((tmp_path / "pid").read_text())
    until = time.monotonic() + 10
    while Path(f"/proc/{pid}/cmdline").exists() and Path(f"/proc/{pid}/cmdline").read_bytes():
        assert time.monotonic() < until, "the grandchild lives on"
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("life", "told"),
    [(lambda: os.kill(os.getpid(), signal.SIGTERM), "SIGTERM"), (lambda: 1 / 0, "without an answer")],
)
def test_a_child_without_an_answer_says_how_it_ended(life: Any, told: str) -> None:
    child = Apart(life)
    with pytest.raises(ApartError, match=told):
        child.result(time.monotonic() + 20)
