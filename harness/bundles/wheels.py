"""The files that locks name for a machine that is not this one, fetched with their hashes checked.

pip downloads wheels for another Python and platform than its own, which uv does not; uv resolves.
"""

from __future__ import annotations

import platform as this
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from itertools import zip_longest
from pathlib import Path

import requests
from packaging.requirements import Requirement
from packaging.version import Version

from harness.builders import TAIL, explain
from harness.bundles.parts import BLOCK, file_sha256, write_blocks
from harness.bundles.wheelhouse import release_of
from harness.errors import BuildError, ConfigurationError, InfrastructureError
from harness.images import BuildOptions
from harness.lockfile import parse_lock, wanted
from harness.locks import run_compile
from harness.recipes import Copy, Install, Run, Step

PLATFORM = "x86_64-manylinux_2_28"
OLDEST = (3, 11)  # what the harness itself runs on
SECONDS = 3600  # for some files on a slow network
_DISTRIBUTION = "vllm-matrix"
_FIRST_GLIBC = {"x86_64": 5, "aarch64": 17}  # 2.x that wheels can name at all
_LEGACY = {17: "manylinux2014", 12: "manylinux2010", 5: "manylinux1"}


@dataclass(frozen=True)
class Machine:
    """What a bundle is for: a minor version of Python, and a platform as uv names it: `x86_64-manylinux_2_28`."""

    python: str
    platform: str

    @property
    def architecture(self) -> str:
        return self.platform.partition("-")[0]

    def tags(self) -> tuple[str, ...]:
        """Platforms of wheels that run there, the best first."""
        newest = int(self.platform.rpartition("_")[2])
        minors = range(newest, _FIRST_GLIBC[self.architecture] - 1, -1)
        names = (name for minor in minors for name in (f"manylinux_2_{minor}", _LEGACY.get(minor)) if name)
        return tuple(f"{name}_{self.architecture}" for name in (*names, "linux"))

    def environments(self) -> Iterator[dict[str, str]]:
        """The variables of PEP 508 there, of the first and the last patch release: which one it has is not known."""
        for patch in ("0", "99"):
            full = f"{self.python}.{patch}"
            yield {
                "implementation_name": "cpython",
                "implementation_version": full,
                "os_name": "posix",
                "platform_machine": self.architecture,
                "platform_python_implementation": "CPython",
                "platform_release": "",
                "platform_system": "Linux",
                "platform_version": "",
                "python_full_version": full,
                "python_version": self.python,
                "sys_platform": "linux",
                "extra": "",
            }


def machine(python: str, platform: str) -> Machine:
    """Raises ConfigurationError for what no bundle can be made for here."""
    found = re.fullmatch(r"([a-z0-9_]+)-manylinux_2_(\d{1,2})", platform)
    if found is None or int(found[2]) < _FIRST_GLIBC.get(found[1], 99):
        raise ConfigurationError(
            f"--platform {platform!r} is none that bundles are made for", f"It looks like {PLATFORM}, or aarch64-…."
        )
    if found[1] != this.machine():
        raise ConfigurationError(
            f"--platform {platform}: this machine is of the kind {this.machine()}", "Make the bundle on one like it."
        )
    if tuple(map(int, python.split("."))) < OLDEST:
        raise ConfigurationError(f"--python {python}: the harness itself needs 3.11 or later")
    return Machine(python, platform)


@dataclass(frozen=True, kw_only=True)
class Network:
    """How packages are reached: an index (None: as pip is configured), and certificates to trust."""

    index_url: str | None = None
    ca_bundle: Path | None = None

    @classmethod
    def of(cls, options: BuildOptions, environ: Mapping[str, str]) -> Network:
        own = environ.get("UV_DEFAULT_INDEX") or environ.get("UV_INDEX_URL")
        return cls(index_url=options.index_url or own or None, ca_bundle=options.ca_bundle)


@dataclass(frozen=True, kw_only=True, order=True)
class Release:
    """One distribution as a lock has it: any file with one of these hashes. `source`: not a wheel, but its source.

    `indexes` are those that the lock itself names.
    """

    name: str
    version: str
    hashes: tuple[str, ...]
    source: bool = False
    indexes: tuple[str, ...] = ()


def locks_of(steps: Iterable[Step]) -> Iterator[tuple[Path, bool]]:
    """The locks that the steps of a target need, and whether it is sources that they name: those that a step reads."""
    for step in steps:
        match step:
            case Install(lock):
                yield lock, False
            case Run(arguments):
                yield from ((word, True) for word in arguments if isinstance(word, Path) and word.suffix == ".lock")
            case Copy(inner):
                yield from locks_of(inner)


def releases(text: str, there: Machine, source: bool = False) -> tuple[Release, ...]:
    """What the lock installs there. Raises ConfigurationError for a lock that cannot be read, or has no hashes."""
    entries = parse_lock(text)
    indexes = tuple(re.findall(r"(?m)^--(?:extra-)?index-url[ =](\S+)", text))
    found = {pair: () for markers in there.environments() for pair in wanted(text, markers).items()}
    made = []
    for name, version in found:
        hashes = {digest for entry in entries[name] if entry.version == version for digest in entry.hashes}
        if not hashes:
            raise ConfigurationError(f"the lock has no hash for {name}=={version}", "Make it: vllm-matrix lock")
        made.append(Release(name=name, version=version, hashes=tuple(sorted(hashes)), source=source, indexes=indexes))
    return tuple(made)


def own_releases(there: Machine, network: Network) -> tuple[Release, ...]:
    """What the harness itself needs there, uv among it, resolved now. Raises BuildError where there is no solution."""
    try:
        asked = [Requirement(text) for text in metadata.requires(_DISTRIBUTION) or ()]
    except metadata.PackageNotFoundError as error:
        raise ConfigurationError(
            f"the distribution {_DISTRIBUTION} is not installed here, and says what the harness needs",
            "Install it, as the README says.",
        ) from error
    own = [str(one) for one in asked if one.marker is None or "extra" not in str(one.marker)]
    return releases(_compiled(own, there, network, ["--generate-hashes", "--only-binary=:all:"], _DISTRIBUTION), there)


def _compiled(wanted: Iterable[str], there: Machine, network: Network, options: Iterable[str], what: str) -> str:
    common = ("--no-config", "--quiet", "--no-header", "--no-annotate")
    where = (f"--python-version={there.python}", f"--python-platform={there.platform}")
    with tempfile.TemporaryDirectory(prefix="vllm-matrix-lock-") as folder:
        (Path(folder) / "requirements.in").write_text("".join(f"{line}\n" for line in wanted), encoding="utf-8")
        return run_compile([*common, *where, *options], Path(folder), what, network.index_url)


# --- fetching --------------------------------------------------------------------------------------------------------


def fetch(wanted: Sequence[Release], there: Machine, network: Network, folder: Path) -> dict[Release, Path]:
    """Download each release's file into the empty `folder`; every one is a file that its lock names.

    Raises BuildError where the index has none for that Python and platform, or another than the lock's.
    """
    wheels = [release for release in wanted if not release.source]
    for some in _rounds(wheels):
        _download(some, there, network, folder)
    named = {release_of(path.name): path for path in folder.iterdir()}
    found = {release: named[release.name, Version(release.version)] for release in wheels}
    found |= {release: _source(release, there, network, folder) for release in wanted if release.source}
    for release, path in found.items():
        if f"sha256:{file_sha256(path)}" not in release.hashes:
            raise BuildError(
                f"{path.name} is not the file that the lock names",
                "Look at the index: it serves a changed file, or the lock is damaged.",
            )
    return found


def _rounds(wanted: Iterable[Release]) -> Iterator[list[Release]]:
    """pip takes one version of a name at once."""
    by_name: dict[str, list[Release]] = {}
    for release in wanted:
        by_name.setdefault(release.name, []).append(release)
    for some in zip_longest(*by_name.values()):
        yield [release for release in some if release is not None]


def _line(release: Release) -> str:
    return " ".join([f"{release.name}=={release.version}", *(f"--hash={digest}" for digest in release.hashes)])


def _download(wanted: Sequence[Release], there: Machine, network: Network, folder: Path) -> None:
    with tempfile.NamedTemporaryFile("w", prefix="vllm-matrix-", suffix=".txt") as requirements:
        requirements.writelines(f"{_line(release)}\n" for release in wanted)
        requirements.flush()
        words = [sys.executable, "-m", "pip", *_pip_options(wanted, there, network, folder), "-r", requirements.name]
        try:
            done = subprocess.run(words, capture_output=True, text=True, timeout=SECONDS, check=False)
        except subprocess.TimeoutExpired as error:
            what = f"{len(wanted)} wheels, {wanted[0].name} the first, were not there within {SECONDS} s"
            raise InfrastructureError(what, "Is the index reachable?") from error
    if done.returncode:
        raise _not_had(there, done.stderr)


def _pip_options(wanted: Iterable[Release], there: Machine, network: Network, folder: Path) -> list[str]:
    return [
        *("download", "--quiet", "--no-input", "--disable-pip-version-check", "--progress-bar=off"),
        *("--no-deps", "--require-hashes", "--only-binary=:all:", "--ignore-requires-python"),
        *("--implementation=cp", f"--python-version={there.python}", f"--abi=cp{there.python.replace('.', '')}"),
        *(f"--platform={tag}" for tag in there.tags()),
        *([f"--index-url={network.index_url}"] if network.index_url else []),
        *(f"--extra-index-url={url}" for url in dict.fromkeys(url for one in wanted for url in one.indexes)),
        *([f"--cert={network.ca_bundle}"] if network.ca_bundle else []),
        f"--dest={folder}",
    ]


def _not_had(there: Machine, said: str) -> BuildError:
    """pip's own words, with the cause where they show one."""
    lines = [line for line in said.splitlines() if line.strip() and not line.startswith("WARNING")][-TAIL:]
    causes = (explain(line) for line in lines)
    cause, hint = next((found for found in causes if found), ("", "Is the index reachable, and has it this release?"))
    gone = re.search(r"No matching distribution found for (\S+)", said)
    if gone:
        cause = f"there is none of {gone[1]}"
        hint = "Try a --platform with a newer glibc, as x86_64-manylinux_2_31, if the node has it, or another --python."
    what = f"wheels for Python {there.python} on {there.platform} could not be had"
    return BuildError(f"{what}: {cause}" if cause else what, hint, "\n".join(lines))


def _source(release: Release, there: Machine, network: Network, folder: Path) -> Path:
    """pip would build a source to see what it asks for: uv says where it is, and it is fetched as any file."""
    options = ["--no-deps", "--format=pylock.toml"]
    what = f"{release.name} {release.version}"
    url = _source_url(_compiled([_line(release)], there, network, options, what), what)
    path = folder / url.partition("#")[0].rpartition("/")[2]
    try:
        verify = str(network.ca_bundle) if network.ca_bundle else True
        with requests.get(url, stream=True, timeout=60, verify=verify) as answer:
            answer.raise_for_status()
            write_blocks(path, answer.iter_content(BLOCK))
    except requests.RequestException as error:
        raise BuildError(f"the source of {what} could not be had: {error}", "Is the index reachable?") from error
    return path


def _source_url(pylock: str, what: str) -> str:
    (package,) = tomllib.loads(pylock)["packages"]
    url = package.get("sdist", {}).get("url")
    if not isinstance(url, str):
        raise BuildError(f"the index has no source of {what}", "Its target is compiled from it; see its lock.")
    return url
