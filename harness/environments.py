"""Environments for the back end `local`: what an image holds, made by uv in the user's cache, without a container.

An environment is named by a hash of everything that goes into it, as an image is by its tag. It is made once, in its
place (an environment cannot be moved), and counts as there when its marker is, which is written last.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import platformdirs
from packaging.markers import default_environment

from harness.backends.local import TOOLS, scratch_folder, search_path
from harness.builders import Builder, run_build
from harness.bundles.wheelhouse import Packages
from harness.dockerfiles import digest
from harness.errors import BuildError, InfrastructureError
from harness.images import PROXIES, TIMES, BuildOptions, BuiltImage, Image, locked
from harness.recipes import VENV, Copy, Install, Run, Step, made_from_source, steps
from harness.records import write_atomic

MARKER = "vllm-matrix.json"
NEEDED = 8 << 30  # bytes free for one target: its packages, and as much again while they are unpacked
# As docker/base/install-locked does it, but for the links: a test compares.
_COMPILE = "--compile-bytecode"
INSTALL = ("--no-config", "--no-build", "--link-mode", "hardlink", _COMPILE, "--require-hashes", "--no-deps")
# Where uv finds packages, and how it gets there; not UV_PYTHON and others, which would lead it to another environment.
_NETWORK = re.compile(
    r"UV_(\w*INDEX\w*|\w*TLS|\w*CERTS?|HTTP_\w+|INSECURE_HOST|KEYRING_PROVIDER|FIND_LINKS|OFFLINE)|SSL_CERT_(FILE|DIR)"
)


def environments_root() -> Path:
    return platformdirs.user_cache_path("vllm-matrix") / "environments"


def environment_of(image: Image, python: str, options: BuildOptions) -> Image:
    """The environment that stands for an image: the same files, and a name that follows from them and the Python."""
    steps(image.dockerfile, options.docker_dir)
    facts = [image.target, image.device, python, platform.machine()]
    own = digest(options.docker_dir, [image.dockerfile, *image.inputs], facts)
    return replace(image, tag=f"{image.target}-{image.device}-{own}", base_tag="")


def check_host(devices: Collection[str], find: Callable[[str], str | None] = shutil.which) -> None:
    """Raises InfrastructureError for the first thing that environments for these devices need and this host lacks.

    On GPUs that is what Triton compiles its launchers with; the rest serves vLLM's extension for the CPU.
    """
    on_cpu = "cpu" in devices
    for tool in (*TOOLS, "readelf") if on_cpu else ("gcc",):
        if find(tool) is None:
            raise InfrastructureError(
                f"cells without a container need {tool}, and it is not on PATH",
                "Install it (Debian, Ubuntu: `apt-get install g++`), or use Docker.",
            )
    if on_cpu:
        _check_numa()


def _check_numa() -> None:
    load = [sys.executable, "-I", "-c", "import ctypes; ctypes.CDLL('libnuma.so.1')"]
    if subprocess.run(load, env={}, capture_output=True, timeout=60, check=False).returncode:
        raise InfrastructureError(
            "cells without a container need libnuma.so.1, and it cannot be loaded",
            "Install it (Debian, Ubuntu: `apt-get install libnuma1`), or use Docker.",
        )


def make_environment(
    image: Image,
    python: str,
    options: BuildOptions,
    root: Path,
    log: Path,
    on_line: Callable[[str], None],
    packages: Packages | None = None,
) -> BuiltImage:
    """See to it that the environment is there. Output goes to `log`, and line by line to `on_line`.

    Packages come from an index, or are `packages`. Two that want the same one make it once: the second waits.
    Raises BuildError for a missing Python or header and for a step that fails, InfrastructureError if the disk is too
    small.
    """
    started = time.monotonic()
    folder = root / image.tag
    with locked(image.tag, on_line):
        size = size_told(folder)
        cached = size is not None
        if size is None:
            _check_space(root, NEEDED * TIMES[image.device])
            recipe = steps(image.dockerfile, options.docker_dir)
            if made_from_source(recipe):
                check_headers()
            interpreter = find_python(python)
            if packages is not None:
                packages.fetch(_told(log, on_line))
            shutil.rmtree(folder, ignore_errors=True)
            _Maker(folder, options, log, on_line, packages).make(interpreter, recipe)
            size = _size(folder)
            write_atomic(folder / MARKER, json.dumps({"schema": 1, "name": image.tag, "bytes": size}) + "\n")
    return BuiltImage(tag=image.tag, id=image.tag, bytes=size, seconds=time.monotonic() - started, cached=cached)


def _told(log: Path, on_line: Callable[[str], None]) -> Callable[[str], None]:
    """Says a line of ours as those of the steps are said: it stands in the log, too."""

    def say(line: str) -> None:
        with log.open("a", encoding="utf-8") as file:
            file.write(f"{line}\n")
        on_line(line)

    return say


def size_told(folder: Path) -> int | None:
    """Bytes, as the marker says; None where the environment is unfinished, or its Python is gone."""
    try:
        size = int(json.loads((folder / MARKER).read_text(encoding="utf-8"))["bytes"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return size if (folder / "bin" / "python3").exists() else None


def _size(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_dir())


def _check_space(root: Path, needed: int) -> None:
    root.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(root).free
    if free < needed:
        raise InfrastructureError(
            f"{root} has {free / 1e9:.1f} GB free, and an environment needs {needed / 1e9:.1f} GB",
            "Make room there, or set XDG_CACHE_HOME to a folder with more.",
        )


def find_python(version: str) -> Path:
    """An interpreter of this minor version with its headers. Raises BuildError where there is none."""
    hint = (
        f"Install it (Debian, Ubuntu: `apt-get install python{version}-dev`, anywhere: `uv python install {version}`)."
    )
    found = [python for python in (_found_by_uv(version), _our_own(version)) if python is not None]
    if not found:
        raise BuildError(f"this target needs Python {version}, and it is not here", hint)
    for python in found:
        if _has_headers(python):
            return python
    raise BuildError(f"{found[0]} has no headers (Python.h), and engines compile with them at run time", hint)


def _found_by_uv(version: str) -> Path | None:
    words = [_uv(), "python", "find", "--no-config", "--no-python-downloads", "--system", version]
    try:
        return Path(subprocess.run(words, capture_output=True, text=True, timeout=60, check=True).stdout.strip())
    except (OSError, subprocess.SubprocessError):
        return None


def _our_own(version: str) -> Path | None:
    """The one that we run on ourselves, which need not be on PATH."""
    python = Path(sys.base_prefix, "bin", f"python{version}")
    return python if python.exists() else None


def _has_headers(python: Path) -> bool:
    code = "import os, sysconfig; os.stat(os.path.join(sysconfig.get_path('include'), 'Python.h'))"
    try:
        return not subprocess.run([python, "-I", "-c", code], capture_output=True, timeout=60, check=False).returncode
    except (OSError, subprocess.SubprocessError):
        return False


def markers_of(python: Path) -> dict[str, str]:
    """The variables of PEP 508 for an interpreter of this machine. Raises BuildError where it does not start."""
    code = "import platform; print(platform.python_version())"
    try:
        done = subprocess.run([python, "-I", "-c", code], capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise BuildError(f"{python} does not start: {error}", "Is its installation whole?") from error
    full = done.stdout.strip()
    own = {"python_full_version": full, "implementation_version": full, "python_version": ".".join(full.split(".")[:2])}
    return {**{name: str(value) for name, value in default_environment().items()}, **own}


def check_headers() -> None:
    """What vLLM's own code needs beyond what torch brings. Raises BuildError where it is missing."""
    words = ["g++", "-fsyntax-only", "-x", "c++", "-include", "numa.h", os.devnull]
    if subprocess.run(words, capture_output=True, timeout=60, check=False).returncode:
        raise BuildError(
            "this target is compiled from its source and needs numa.h, and g++ does not find it",
            "Install it (Debian, Ubuntu: `apt-get install libnuma-dev`), or use Docker.",
        )


def _uv() -> str:
    from uv import find_uv_bin

    return str(find_uv_bin())


@dataclass(frozen=True)
class _Maker:
    """One environment in the making.

    `outside` is set for a stage's, which is thrown away: the folder that stands for the root of the stage's image.
    """

    folder: Path
    options: BuildOptions
    log: Path
    on_line: Callable[[str], None]
    packages: Packages | None = None
    outside: Path | None = None

    def make(self, python: Path, recipe: tuple[Step, ...]) -> None:
        self._run([_uv(), "venv", "--no-config", "--python", str(python), str(self.folder)], self._for_uv())
        if self.packages is not None:
            self.packages.lend(self._site_packages(), _told(self.log, self.on_line))
        for step in recipe:
            match step:
                case Install(lock):
                    self._install(lock)
                case Run():
                    self._python(step)
                case Copy():
                    self._copy(python, step)

    def _install(self, lock: Path) -> None:
        # Byte code takes most of the time, and a stage imports next to nothing
        options = [word for word in INSTALL if word != _COMPILE or self.outside is None]
        options += ["--no-index"] if self.packages is not None else []
        words = [_uv(), "pip", "install", *options, "--python", str(self.folder), "-r", str(self._at_hand(lock))]
        self._run(words, self._for_uv())

    def _at_hand(self, lock: Path) -> Path:
        """The lock, or one that names the packages which are here in place of the index's."""
        if self.packages is None:
            return lock
        here = self.folder / "locks" / lock.name
        write_atomic(here, self.packages.rewritten(lock, markers_of(self.folder / "bin" / "python3")))
        return here

    def _site_packages(self) -> Path:
        (found,) = self.folder.glob("lib/python3*/site-packages")
        return found

    def _copy(self, python: Path, step: Copy) -> None:
        """Make the stage in a folder beside ours, so that uv can link there too, and take what it was made for."""
        with _thrown_away(_stage_of(self.folder)) as root:
            stage = replace(self, folder=_under(root, VENV), outside=root)
            stage.make(python, step.steps)
            source = _under(root, step.source)
            if not source.is_dir():
                raise BuildError(f"the stage left no {step.source}", f"Its Dockerfile copies it; see {self.log}.")
            try:
                shutil.copytree(
                    source, self._site_packages(), symlinks=True, dirs_exist_ok=True, copy_function=_replace
                )
            except OSError as error:
                raise BuildError(f"{step.source} cannot be copied into the environment: {error}") from error

    def _python(self, step: Run) -> None:
        """A step writes into the file that it is given: never into one that uv's cache shares with others."""
        arguments = [word for argument in step.arguments for word in self._expanded(argument)]
        for path in map(Path, arguments):
            if path.is_relative_to(self.folder) and (path.is_symlink() or path.stat().st_nlink > 1):
                _detach(path)
        with scratch_folder(self.outside) as home:
            # Python looks for modules in its working folder first: it must not be ours
            self._run(
                ["env", f"--chdir={home}", str(self.folder / "bin" / "python3"), *arguments], self._for_step(str(home))
            )

    def _expanded(self, argument: str | Path) -> Iterator[str]:
        if isinstance(argument, Path) and argument.suffix == ".lock":
            yield str(self._at_hand(argument))
        elif isinstance(argument, Path) or not argument.startswith("/"):
            yield str(argument)
        elif argument.startswith(f"{VENV}/"):
            yield from self._found(argument.removeprefix(f"{VENV}/"))
        elif self.outside is not None:
            place = _under(self.outside, argument)
            place.parent.mkdir(parents=True, exist_ok=True)
            yield str(place)
        else:
            raise AssertionError(argument)  # the recipe has let none of these through

    def _found(self, pattern: str) -> list[str]:
        """The environment has one Python; a minor version in a path is the image's."""
        found = sorted(map(str, self.folder.glob(re.sub(r"^lib/python3[^/]*/", "lib/python3*/", pattern))))
        if not found:
            raise BuildError(f"the environment has no {pattern}", f"Its Dockerfile asks for it; see {self.log}.")
        return found

    def _run(self, words: list[str], given: Mapping[str, str]) -> None:
        run_build(Builder(command=(words[0],)), words[1:], given, self.log, self.on_line, self.options.timeout)

    def _for_uv(self) -> dict[str, str]:
        """The user's own settings of uv, proxies and certificates; the index and the bundle as for images.

        Where packages are at hand, there is no index.
        """
        given = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
        if self.packages is not None:
            given = {name: value for name, value in given.items() if not _NETWORK.fullmatch(name)}
            return given | {"UV_OFFLINE": "1", "UV_FIND_LINKS": str(self.packages.folder)}
        if self.options.index_url:
            given["UV_DEFAULT_INDEX"] = self.options.index_url
        if self.options.ca_bundle:
            given["SSL_CERT_FILE"] = str(self.options.ca_bundle)
        return given

    def _for_step(self, home: str) -> dict[str, str]:
        """As in an image: uv is on PATH, and reaches the index; of the rest of the user's variables it has nothing."""
        tools = Path(home, "tools")
        tools.mkdir()
        (tools / "uv").symlink_to(_uv())
        network = {
            name: value for name, value in self._for_uv().items() if _NETWORK.fullmatch(name) or name.upper() in PROXIES
        }
        return {
            **network,
            "PATH": os.pathsep.join([search_path(self.folder), str(tools)]),
            "VIRTUAL_ENV": str(self.folder),
            "HOME": home,
            "TMPDIR": home,
            "LANG": "C.UTF-8",
        }


def _stage_of(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.stage")


def stages(root: Path) -> Iterator[tuple[Path, str]]:
    """Folders in which stages were made, and the names under which their making is locked (`images.lock_of`)."""
    for folder in root.glob(".*.stage"):
        yield folder, folder.name[1:].removesuffix(".stage")


@contextlib.contextmanager
def _thrown_away(folder: Path) -> Iterator[Path]:
    """An empty folder, gone afterwards; what an end by SIGKILL left of it goes before."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _under(root: Path, path: str) -> Path:
    """Where an absolute path of an image is, if `root` is its root."""
    return root / path.removeprefix("/")


def _detach(path: Path) -> None:
    """Give the file an inode of its own."""
    _replace(path, path)


def _replace(source: str | Path, target: str | Path) -> None:
    """Copy into a new inode: the one that is there may be a link into uv's cache."""
    own = Path(target).with_name(f".{Path(target).name}.own")
    shutil.copy2(source, own)
    own.replace(target)
