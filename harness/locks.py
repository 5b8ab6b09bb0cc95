"""Locks: from matrix.toml to a file that names every distribution with its hashes, and back to what it was made from.

uv resolves, as of a day shortly after the release, from wheels only: nothing is ever built on the host to find out what
it asks for. A lock's first lines hold a hash of everything that it was made from, so that one that matrix.toml has left
behind is seen without resolving anything.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import date, timedelta
from pathlib import Path

from packaging.requirements import Requirement

from harness.cells import matches
from harness.errors import BuildError, ConfigurationError, InfrastructureError, NothingSelectedError
from harness.lockfile import parse_lock
from harness.spec import ChangeSpec, MatrixSpec, StackSpec, TargetDeviceSpec

NEVER = "python_version < '3'"  # a marker that is never true: how an override leaves a package out
_MADE = "# Made by `vllm-matrix lock`: change matrix.toml and make it again."
_INPUTS = re.compile(r"^# inputs sha256:([0-9a-f]{64})$", re.MULTILINE)
SECONDS = 900  # for one resolution on a slow network


@dataclass(frozen=True, kw_only=True)
class Question:
    """What one lock is made from. `path` is relative to the folder of matrix.toml.

    `cutoff` and `later` (by package) are the first days whose uploads are not looked at; `dependencies` False: what is
    required is complete; `left_out`: resolved with the rest, and installed by other means.
    """

    path: Path
    requires: tuple[str, ...]
    python: str
    overrides: tuple[str, ...] = ()
    cutoff: date | None = None
    later: Mapping[str, date] = field(default_factory=dict)
    index: str | None = None
    dependencies: bool = True
    left_out: tuple[str, ...] = ()

    @property
    def sha256(self) -> str:
        """Over everything but the place of the file."""
        facts = {name: value for name, value in asdict(self).items() if name != "path"}
        return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()


# --- matrix.toml → questions (pure) ----------------------------------------------------------------------------------


def stack_lock(name: str) -> Path:
    return Path("docker", "shared", f"{name}.lock")


def target_lock(target: str, device: str, own: TargetDeviceSpec) -> Path:
    return Path(own.lock or f"docker/{target}/{device}.lock")


def target_dockerfile(target: str, device: str, own: TargetDeviceSpec) -> Path:
    """What the lock is installed by: a file of its own for each device, since they stand on other stacks."""
    return Path(own.dockerfile or f"docker/{target}/Dockerfile{'' if device == 'cpu' else f'.{device}'}")


def questions(spec: MatrixSpec, target_id: str, device: str) -> tuple[Question, ...]:
    """The locks of a target on a device: its stack's, its own, and, if it is built, those of the build.

    Raises ConfigurationError where matrix.toml says too little.
    """
    target = spec.targets[target_id]
    own = target.on(device)
    path = target_lock(target_id, device, own)
    stack = spec.stacks[own.stack] if own.stack else None
    shared = [_stack_question(own.stack, stack, target.python)] if own.stack and stack else []
    asked = _target_question(spec, target_id, own, stack, path)
    return (*shared, asked, *(_build_questions(own, stack, path, asked) if own.build else ()))


def questions_of(spec: MatrixSpec, targets: Sequence[str], devices: Sequence[str]) -> tuple[Question, ...]:
    """The locks of all targets and devices that these globs match, each once. Raises NothingSelectedError for none."""
    pairs = [(name, device) for name, target in spec.targets.items() for device in target.devices]
    chosen = [(name, device) for name, device in pairs if _any(targets, name) and _any(devices, device)]
    known = ", ".join(dict.fromkeys(name for name, _ in pairs)) or "none"
    for pattern in targets:
        if not any(matches(pattern, name) for name, _ in pairs):
            raise NothingSelectedError(f"{pattern!r} matches no target that has a device", f"These have: {known}.")
    found = [question for pair in chosen for question in questions(spec, *pair)]
    return tuple({question.path: question for question in found}.values())


def _any(patterns: Sequence[str], text: str) -> bool:
    return any(matches(pattern, text) for pattern in patterns)


def _stack_question(name: str, stack: StackSpec, python: str) -> Question:
    return Question(
        path=stack_lock(name), requires=stack.requires, python=python, index=stack.index, dependencies=False
    )


def _target_question(
    spec: MatrixSpec, target_id: str, own: TargetDeviceSpec, stack: StackSpec | None, path: Path
) -> Question:
    changes = [change for _, change in changes_of(spec, own)]
    return Question(
        path=path,
        requires=(own.distribution, *spec.locks.tools, *(text for change in changes for text in change.add)),
        python=spec.targets[target_id].python,
        overrides=_overrides(changes, stack),
        cutoff=cutoff(spec, target_id),
        later=own.later,
        index=stack.index if stack else None,
        left_out=(Requirement(own.distribution).name,) if own.build else (),
    )


def _build_questions(
    own: TargetDeviceSpec, stack: StackSpec | None, path: Path, asked: Question
) -> tuple[Question, Question]:
    """What the builder needs, the stack with all that it asks for among it; and the source distribution alone."""
    tools = replace(
        asked,
        path=path.with_name(f"{path.stem}-build.lock"),
        requires=(*(stack.requires if stack else ()), *own.build),
        left_out=(),
    )
    source = replace(
        asked,
        path=path.with_name(f"{path.stem}-source.lock"),
        requires=(own.distribution,),
        overrides=(),
        dependencies=False,
        left_out=(),
    )
    return tools, source


def changes_of(spec: MatrixSpec, own: TargetDeviceSpec) -> tuple[tuple[str, ChangeSpec], ...]:
    """What this target's lock changes, by name: its stack's changes, then its own."""
    names = (*(spec.stacks[own.stack].changes if own.stack else ()), *own.changes)
    return tuple((name, spec.changes[name]) for name in dict.fromkeys(names))


def _overrides(changes: Iterable[ChangeSpec], stack: StackSpec | None) -> tuple[str, ...]:
    """What uv takes instead of what is asked for. What a stack names stands, whoever asks for something else."""
    taken = [*(stack.requires if stack else ())]
    dropped = []
    for change in changes:
        taken += change.take
        dropped += [f"{name} ; {NEVER}" for name in change.drop]
    return (*taken, *dropped)


def cutoff(spec: MatrixSpec, target_id: str) -> date:
    """The first day whose uploads a target's lock does not look at. Raises ConfigurationError where none follows."""
    target = spec.targets[target_id]
    if target.released is None:
        raise ConfigurationError(
            f"matrix.toml: targets.{target_id} has no `released`, and its lock is cut some days after it",
            "Give the day of the release, as in released = 2025-04-28.",
        )
    return target.released + timedelta(days=spec.locks.grace_days)


# --- files -----------------------------------------------------------------------------------------------------------


def is_current(text: str, question: Question) -> bool:
    """Whether a lock's first lines say that it was made from just this."""
    found = _INPUTS.search(text)
    return found is not None and found[1] == question.sha256


def require_current(spec: MatrixSpec, root: Path, target: str, device: str) -> None:
    """Raises ConfigurationError for a lock that `lock` made from something else than what matrix.toml says now.

    A lock that does not say what it was made from is somebody's own, and is taken as it is.
    """
    own = spec.targets[target].on(device)
    if _INPUTS.search(_read(root / target_lock(target, device, own)) or "") is None:
        return
    for question in questions(spec, target, device):
        text = read_lock(root, question)
        if text is None or not is_current(text, question):
            what = "does not exist" if text is None else "was not made from what matrix.toml says now"
            raise ConfigurationError(f"target {target}: {question.path} {what}", f"Make it: vllm-matrix lock {target}")


def read_lock(root: Path, question: Question) -> str | None:
    """The text of the lock that is there; None where there is none."""
    return _read(root / question.path)


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{path} is no text", "Make it again: vllm-matrix lock") from error


def pinned(text: str) -> dict[str, str]:
    """Package → what the lock says of it (version and marker). Raises ConfigurationError for what is no lock."""
    return {name: " | ".join(map(str, entries)) for name, entries in parse_lock(text).items()}


def differences(old: str, new: str) -> tuple[str, ...]:
    """`xgrammar 0.1.16 → 0.1.17`, one a package whose version, marker or hashes differ."""
    try:
        before = pinned(old)
    except ConfigurationError:
        return ("what was there could not be read as a lock",)
    after = pinned(new)
    names = sorted({*before, *after})
    found = [f"{n} {before.get(n, '–')} → {after.get(n, '–')}" for n in names if before.get(n) != after.get(n)]
    if not found and _content(old) != _content(new):
        found = ["the same versions with other files (hashes)"]
    return tuple(found)


def _content(text: str) -> list[str]:
    return [line for line in text.splitlines() if not line.lstrip().startswith("#")]


# --- uv --------------------------------------------------------------------------------------------------------------


def resolve(question: Question, index_url: str | None = None) -> str:
    """The lock's text. Raises BuildError with uv's own words where there is no solution."""
    extra = [f"--extra-index-url {question.index}"] if question.index else []
    return "\n".join([_MADE, f"# inputs sha256:{question.sha256}", *extra, compiled(question, index_url)])


def compiled(question: Question, index_url: str | None = None, kept: str = "") -> str:
    """The lines of a lock. What `kept`, another lock, names keeps its version and hashes, where that is a solution.

    Raises BuildError with uv's own words where there is none.
    """
    with tempfile.TemporaryDirectory(prefix="vllm-matrix-lock-") as folder:
        scratch = Path(folder)
        (scratch / "requirements.in").write_text("\n".join(question.requires) + "\n", encoding="utf-8")
        (scratch / "overrides.txt").write_text("\n".join(question.overrides) + "\n", encoding="utf-8")
        made = scratch / "made.lock"  # uv prefers what stands in the file that it writes
        made.write_text(kept, encoding="utf-8")
        arguments = [*_arguments(question), f"--output-file={made.name}"]
        run_compile(arguments, scratch, str(question.path), index_url)
        body = made.read_text(encoding="utf-8")
    return body.replace("-r requirements.in", "matrix.toml").replace("--override overrides.txt", "matrix.toml")


def _arguments(question: Question) -> list[str]:
    """Of `uv pip compile`."""
    newer = [f"--exclude-newer={question.cutoff}"] if question.cutoff else []
    return [
        *("--no-config", "--quiet", "--no-header", "--generate-hashes", "--only-binary=:all:", "--universal"),
        f"--python-version={question.python}",
        "--overrides=overrides.txt",
        *newer,
        *(f"--exclude-newer-package={name}={day}" for name, day in sorted(question.later.items())),
        *(f"--no-emit-package={name}" for name in question.left_out),
        *([] if question.dependencies else ["--no-deps"]),
        *([f"--index={question.index}"] if question.index else []),
    ]


def run_compile(arguments: Sequence[str], scratch: Path, what: str, index_url: str | None) -> str:
    """What `uv pip compile` makes of requirements.in in `scratch`; `what` names it in errors."""
    from uv import find_uv_bin

    environment = {**os.environ, **({"UV_DEFAULT_INDEX": index_url} if index_url else {})}
    command = [find_uv_bin(), "pip", "compile", *arguments, "requirements.in"]
    try:
        done = subprocess.run(
            command, cwd=scratch, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise InfrastructureError(f"uv did not resolve {what} within {SECONDS} s", "Is the index reachable?") from error
    if done.returncode:
        raise BuildError(
            f"{what} cannot be resolved",
            "If a package is gone or asks for one that is, matrix.toml takes another or drops it in [changes].",
            done.stderr.strip(),
        )
    return done.stdout
