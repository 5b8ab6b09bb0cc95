"""``python3 -m rig.examine DEVICE [SECONDS]``: what is installed here and what it can do, as ``probe.json``.

No engine is started. What is asked of vLLM beyond its API is asked in forked children, each of which has SECONDS. The
file is written anew after each stage, so that a process that dies in the next one has said what it knew.
"""

from __future__ import annotations

import inspect
import json
import os
import platform
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from rig import hello, probe, questions
from rig.apart import Apart, ApartError
from rig.engine import prepare_environment
from rig.errors import describe
from rig.questions import Question, finding

SCHEMA = 1
FILE = "probe.json"
SECONDS = 60.0
SIGNATURE_CHARS = 1_000


def main(device: str, seconds: float = SECONDS) -> int:
    """Examine, and write what was found; 0 also where vLLM does not import: that is in the file."""
    examination = Examination(device, Path(os.environ["VLLM_MATRIX_MODELS"]), seconds)
    out = Path(os.environ["VLLM_MATRIX_OUT"])
    for stage in (examination.python, examination.api, examination.engine, examination.end):
        stage()
        write(out / FILE, examination.found)
    return 0


class Examination:
    """``found`` is the document, and grows stage by stage."""

    def __init__(self, device: str, models: Path, seconds: float) -> None:
        self._device = device
        self._models = models
        self._seconds = seconds
        self.found: dict[str, Any] = {
            "schema": SCHEMA,
            "device": device,
            "complete": False,
            "capabilities": [],
            "faults": [],
            "seconds": {},
        }

    def python(self) -> None:
        """The interpreter and all distributions; before vLLM is imported, which may end this process."""
        self.found |= {
            "python": platform.python_version(),
            "platform": platform.platform(),
            "machine": platform.machine(),
            "markers": markers(),
            "distributions": dict(sorted(hello.installed().items())),
        }
        try:
            self.found["unmet"] = unmet()
        except Exception as exc:  # metadata that nobody could foresee must not cost the rest
            self.found["faults"].append(f"requirements: {type(exc).__name__}: {exc}"[:2_000])

    def api(self) -> None:
        """Import vLLM, and look at it."""
        prepare_environment(self._device)
        begun = time.monotonic()
        try:
            import vllm

            self.found |= {
                "engine_options": sorted(probe.engine_options()),
                "sampling_options": sorted(probe.sampling_options()),
                "methods": methods("LLM", vllm.LLM),
                "architectures": sorted(probe.architectures()),
            }
        except (Exception, SystemExit) as exc:
            self.found["error"] = describe(exc)["traceback"]
            return
        finally:
            self._took("import", begun)
        self._take([finding(question) for question in questions.of_the_api(self._device)])

    def engine(self) -> None:
        """What configurations tell: a model a child, and in one of them, where its class is known by then, the rest."""
        if "error" in self.found:
            return
        begun = time.monotonic()
        checkpoints = self._checkpoints()
        first = next((name for name, path in checkpoints.items() if self._known(path)), None)
        if first is None:
            self._take([{"fault": "no model that this version knows: the engine was not asked"}])
        children = {name: Apart(self._work(name, path, name == first)) for name, path in checkpoints.items()}
        until = begun + 2.5 * self._seconds  # the first one's own children have as long as any
        for name, child in children.items():
            self._take(answers(name, child, until))
        self._took("config", begun)

    def end(self) -> None:
        """Nothing is missing that could be found."""
        self.found["complete"] = True

    def _work(self, name: str, checkpoint: Path, first: bool) -> Any:
        model = questions.of_a_model(self._device, name, checkpoint)
        others = questions.of_the_engine(self._device, checkpoint) if first else []
        return lambda: [finding(model), *apart(others, time.monotonic() + self._seconds)]

    def _checkpoints(self) -> dict[str, Path]:
        folders = (path / "w1" for path in sorted(self._models.iterdir()) if not path.name.startswith("."))
        return {folder.parent.name: folder for folder in folders if (folder / "config.json").is_file()}

    def _known(self, checkpoint: Path) -> bool:
        return bool(set(questions.architectures_of(checkpoint)) & set(self.found["architectures"]))

    def _take(self, findings: list[dict[str, Any]]) -> None:
        for each in findings:
            if "fault" in each:
                self.found["faults"].append(each["fault"][:2_000])
            else:
                self.found["capabilities"].append(each)

    def _took(self, what: str, begun: float) -> None:
        self.found["seconds"][what] = round(time.monotonic() - begun, 2)


def apart(asked: list[Question], until: float) -> list[dict[str, Any]]:
    """Findings of questions, each in a child of its own: an answer to one must not change the next one's."""
    children = [(question.name, Apart(lambda question=question: [finding(question)])) for question in asked]
    return [each for name, child in children for each in answers(name, child, until)]


def answers(name: str, child: Apart, until: float) -> list[dict[str, Any]]:
    """What a child found; that it found nothing is a fault, and no answer."""
    try:
        found: list[dict[str, Any]] = child.result(until)
    except ApartError as exc:
        return [{"fault": f"{name}: the question {exc}"}]
    return found


def methods(name: str, owner: Any) -> dict[str, str]:
    """Signatures of a class's public methods."""
    public = ((key, value) for key, value in inspect.getmembers(owner, callable) if not key.startswith("_"))
    return {f"{name}.{key}": probe.signature(value)[:SIGNATURE_CHARS] for key, value in public}


def unmet() -> list[dict[str, str]]:
    """What distributions ask for and do not find: ``by`` whom, ``name``, what it ``asks`` for, what is ``found``.

    As ``pip check`` says it. Extras are nobody's need.
    """
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    versions = hello.installed()
    missing = []
    for dist in metadata.distributions():
        for requirement in map(Requirement, dist.requires or ()):
            if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
                continue
            name = canonicalize_name(requirement.name)
            found = versions.get(name, "")
            if not found or not requirement.specifier.contains(found, prereleases=True):
                asks = f"{requirement.name}{requirement.specifier}"
                missing.append({"by": f"{dist.name} {dist.version}", "name": name, "asks": asks, "found": found})
    return sorted(missing, key=lambda each: (each["name"], each["by"]))


def markers() -> dict[str, str]:
    """What the markers of a lock are evaluated against (PEP 508), of this interpreter."""
    version = sys.implementation.version
    kind = "" if version.releaselevel == "final" else f"{version.releaselevel[0]}{version.serial}"
    return {
        "os_name": os.name,
        "sys_platform": sys.platform,
        "platform_machine": platform.machine(),
        "platform_python_implementation": platform.python_implementation(),
        "platform_release": platform.release(),
        "platform_system": platform.system(),
        "platform_version": platform.version(),
        "python_version": ".".join(platform.python_version_tuple()[:2]),
        "python_full_version": platform.python_version(),
        "implementation_name": sys.implementation.name,
        "implementation_version": f"{version.major}.{version.minor}.{version.micro}{kind}",
    }


def write(path: Path, found: dict[str, Any]) -> None:
    """Whole or not at all."""
    part = path.with_name(f"{path.name}.part")
    part.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    part.replace(path)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], *map(float, sys.argv[2:3])))
