"""The command that builds: which `docker` here can use BuildKit, and how one of its builds is run and read."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from harness.errors import BuildError, DockerMissingError

GRACE = 10.0  # seconds that a builder has to wind down
TIMEOUT = 3600.0  # seconds
TAIL = 40  # lines of a failed build's output that its error carries
MAX_LINE = 64 << 10  # bytes read at once: a builder may draw a progress bar without any line end
FIRST_WITHOUT_BUILTIN = 23  # from this release of the client on, BuildKit is in the buildx plugin only

_CONTROL = re.compile(r"\x1b\[[0-9;]*[A-Za-z]|[\x00-\x08\x0b-\x1f\x7f-\x9f]")

# What a builder says, and what it means to the user; the first that matches is shown.
_CAUSES: tuple[tuple[str, str, str], ...] = (
    (
        r"no space left on device",
        "the disk is full",
        "Make room where images are kept (`docker system df` says what takes it), or environments (`uv cache dir`).",
    ),
    (
        r"certificate verify failed|invalid peer certificate|self.signed certificate",
        "a server's certificate is not trusted in the build",
        "Behind a proxy that signs itself, name its bundle of certificates in VLLM_MATRIX_CA_BUNDLE.",
    ),
    (
        r"hash mismatch|do not match the hashes",
        "a package is not the one that the lock names",
        "Look at the index: it serves a changed file, or the lock is damaged.",
    ),
    (
        r"failed to resolve source metadata|pull access denied|failed to do request",
        "the image to build on can't be had from a registry",
        "`.ci/base-image` makes debian:bookworm-slim from Debian packages; --base names another.",
    ),
)


@dataclass(frozen=True, kw_only=True)
class Builder:
    """A docker client that can build: `command` up to its options, and what it needs in the environment."""

    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)


def find_builder(environ: Mapping[str, str]) -> Builder:
    """The first client on PATH with buildx, else the first with BuildKit built in; DOCKER_HOST and others pass through.

    Raises DockerMissingError where there is no client at all, BuildError where none can use BuildKit.
    """
    clients = _clients(environ.get("PATH", os.defpath))
    if not clients:
        raise DockerMissingError(
            "there is no docker on PATH",
            "Install it (Debian, Ubuntu: `apt-get install docker.io`) and run again.",
        )
    for client in clients:
        if _answer([client, "buildx", "version"], environ) is not None:
            # The context's own builder, whatever `buildx use` chose: others do not see the base image of this engine.
            context = _answer([client, "context", "show"], environ) or "default"
            return Builder(command=(client, "buildx", "build", "--builder", context, "--load"))
    for client in clients:
        if _major(_answer([client, "--version"], environ)) < FIRST_WITHOUT_BUILTIN:
            return Builder(command=(client, "build"), environment={"DOCKER_BUILDKIT": "1"})
    raise BuildError(
        f"no docker client here can use BuildKit ({', '.join(clients)})",
        "Install the buildx plugin (Debian, Ubuntu: `apt-get install docker-buildx`, Docker's own repository: "
        "docker-buildx-plugin) and run again.",
    )


def _clients(path: str) -> list[str]:
    """Every `docker` on PATH, in order, each file once."""
    found: dict[Path, str] = {}
    for folder in filter(None, path.split(os.pathsep)):
        candidate = Path(folder, "docker")
        if candidate.is_file() and os.access(candidate, os.X_OK):
            found.setdefault(candidate.resolve(), str(candidate))
    return list(found.values())


def _answer(command: Sequence[str], environ: Mapping[str, str]) -> str | None:
    """What a command prints, without white space around; None if it fails."""
    try:
        done = subprocess.run(command, env=dict(environ), capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _major(version: str | None) -> int:
    """23 of `Docker version 23.0.1, build …`; of anything else (podman's imitation, too) a number too high."""
    match = re.match(r"Docker version (\d+)\.", version or "")
    return int(match[1]) if match else FIRST_WITHOUT_BUILTIN


def run_build(
    builder: Builder,
    arguments: Sequence[str],
    environ: Mapping[str, str],
    log: Path,
    on_line: Callable[[str], None],
    timeout: float = TIMEOUT,
) -> None:
    """Run one build; its output goes to the end of `log` and, line by line, to `on_line`.

    Raises BuildError with the cause, if its output shows one, and with its last lines; also when `timeout` seconds are
    up: the builder and all that it started are ended then.
    """
    until = time.monotonic() + timeout
    tail: deque[str] = deque(maxlen=TAIL)
    cause: tuple[str, str] | None = None
    with log.open("ab", buffering=0) as file, _start([*builder.command, *arguments], environ, builder) as process:
        try:
            for raw in _pieces(process, until):
                file.write(raw)
                line = _CONTROL.sub("", raw.decode("utf-8", "replace")).rstrip()
                tail.append(line)
                cause = cause or explain(line)
                on_line(line)
            process.wait(max(0.0, until - time.monotonic()))
        except (TimeoutError, subprocess.TimeoutExpired) as error:
            _end(process)
            raise BuildError(
                f"the build was not done within {timeout:g} s",
                f"Its output so far is in {log}; `timeout` of [images] in matrix.toml gives it longer.",
                "\n".join(tail),
            ) from error
        except BaseException:  # Ctrl-C among them: the builder must not go on behind our back
            _end(process)
            raise
    if process.returncode:
        message, hint = cause or (f"the builder ended with {process.returncode}", f"Its whole output is in {log}.")
        raise BuildError(message, hint, "\n".join(tail))


def explain(line: str) -> tuple[str, str] | None:
    """What a line of a builder's output means to the user, and what to do about it; None if nothing is known."""
    for pattern, message, hint in _CAUSES:
        if re.search(pattern, line, re.IGNORECASE):
            return message, hint
    return None


def _start(command: Sequence[str], environ: Mapping[str, str], builder: Builder) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            command,
            env={**environ, **builder.environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so that it can be ended with all that it started: compilers, a plugin
        )
    except OSError as error:
        raise BuildError(
            f"{command[0]} does not start: {error.strerror}", "See whether `docker version` works."
        ) from error


def _end(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM to it and all that it started, SIGKILL to what is left."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)


def _pieces(process: subprocess.Popen[bytes], until: float) -> Iterator[bytes]:
    """The output as it comes: lines, or parts of one that is very long. Raises TimeoutError when the time is up."""
    rest = b""
    for chunk in _chunks(process, until):
        *lines, rest = (rest + chunk).split(b"\n")
        for line in (*(line + b"\n" for line in lines), *([rest] if len(rest) >= MAX_LINE else [])):
            yield from (line[start : start + MAX_LINE] for start in range(0, len(line), MAX_LINE))
        if len(rest) >= MAX_LINE:
            rest = b""
    if rest:
        yield rest


def _chunks(process: subprocess.Popen[bytes], until: float) -> Iterator[bytes]:
    output = process.stdout
    if output is None:
        return
    ready = select.poll()
    ready.register(output, select.POLLIN)
    while True:
        left = until - time.monotonic()
        if left <= 0 or not ready.poll(left * 1000):
            raise TimeoutError
        chunk = os.read(output.fileno(), MAX_LINE)
        if not chunk:
            return
        yield chunk
