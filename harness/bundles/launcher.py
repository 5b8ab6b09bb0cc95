#!/usr/bin/env python3
"""Start the cells of the bundle that this file lies in, on a machine with nothing but Python 3.10 or later,
and Docker where they are cells of images.

    python3 run [SELECT ...] [--work FOLDER] [OPTIONS of `vllm-matrix bundle run`]
    python3 run verify

The first start puts the harness into an environment of its own, in the work folder (default: `work`, beside this file),
with the uv that the bundle carries. `verify` says which parts are missing or damaged, target by target.
Exit codes are those of vllm-matrix: 2 a bundle or a command line that does not fit, 5 parts, disk or machine.
"""

# ruff: noqa: T201 - it talks to a terminal

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

HERE = Path(__file__).resolve().parent
MAX_INDEX = 64 << 20  # bytes
BLOCK = 4 << 20
CONFIGURATION, INFRASTRUCTURE = 2, 5
_SHA256 = re.compile(r"[0-9a-f]{64}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+!@-]{0,254}")
_WHEEL = re.compile(r"([A-Za-z0-9._]+)-([A-Za-z0-9._+!]+)(-\d[^-]*)?-[^-]+-[^-]+-[^-]+\.whl")
_START = "import sys; sys.argv[0] = 'vllm-matrix'; from harness.cli import main; main()"


class BundleError(Exception):
    """What a user is told, and the exit code."""

    def __init__(self, message: str, hint: str, code: int) -> None:
        super().__init__(f"{message}\n  {hint}")
        self.code = code


# --- bundle.json: nothing in it is believed --------------------------------------------------------------------------


def broken(what: str) -> BundleError:
    return BundleError(
        f"{HERE / 'bundle.json'}: {what}", "Carry the bundle over again, or make it again.", CONFIGURATION
    )


def read_index() -> dict[str, Any]:
    """What bundle.json says, where it is fit for use: no name in it leads out of its folder."""
    path = HERE / "bundle.json"
    if not path.is_file():
        raise broken("it is not there")
    with path.open("rb") as file:
        data = file.read(MAX_INDEX)
    try:
        index: dict[str, Any] = json.loads(data)
        checked(index)
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise broken(f"it is damaged: {type(error).__name__} {ascii(str(error))[:100]}") from None
    return index


def checked(index: dict[str, Any]) -> None:
    """Raises ValueError, or what Python raises for another type, where anything is not as the rest relies on."""
    require(index["schema"] == 1, f"schema {index['schema']}, and this launcher knows 1")
    require(re.fullmatch(r"3\.\d{1,3}", index["python"]), "python")
    for part, size in index["parts"].items():
        require(_SHA256.fullmatch(part) and type(size) is int, part)
    for sha256, content in index["contents"].items():
        require(_SHA256.fullmatch(sha256) and _NAME.fullmatch(content["name"]), sha256)
        require(all(part in index["parts"] for part in content["parts"]), sha256)
    require(all(index["contents"][sha256]["encoding"] == "raw" for sha256 in index["launch"]), "launch")


def require(fit: object, what: str) -> None:
    if not fit:
        raise ValueError(what)


# --- parts -----------------------------------------------------------------------------------------------------------


def blocks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while True:
            block = file.read(BLOCK)
            if not block:
                return
            yield block


def lack(part: str, size: int) -> str | None:
    """What is wrong with a part; None: nothing."""
    path = HERE / "parts" / part
    if path.is_symlink() or not path.is_file():
        return "missing"
    total = hashlib.sha256()
    if path.stat().st_size == size:
        for block in blocks(path):
            total.update(block)
    return None if total.hexdigest() == part else "damaged"


def assemble(index: dict[str, Any], sha256: str, target: Path) -> None:
    content = index["contents"][sha256]
    total = hashlib.sha256()
    with target.open("wb") as file:
        for part in content["parts"]:
            what = lack(part, index["parts"][part])
            if what:
                raise BundleError(
                    f"part {part} of {content['name']} is {what}",
                    "Carry it over again; `python3 run verify` names all that are missing or damaged.",
                    INFRASTRUCTURE,
                )
            for block in blocks(HERE / "parts" / part):
                total.update(block)
                file.write(block)
    if total.hexdigest() != sha256:
        raise broken(f"the parts of {content['name']} do not make it")


def verify(index: dict[str, Any], words: list[str]) -> int:
    """Look at every part, say what is wrong, and what of it each target needs; there are no further words."""
    if words:
        raise BundleError("verify looks at all parts", "Pass nothing after it.", CONFIGURATION)
    common = [*index["launch"], index["project"]]
    faults = {
        part: what for part, what in ((part, lack(part, index["parts"][part])) for part in index["parts"]) if what
    }
    for part, what in faults.items():
        print(f"{what}: parts/{part} ({index['parts'][part]} bytes)")
    for name, target in index["targets"].items():
        records = [borrowed["record"] for borrowed in target["borrowed"].values()]
        contents = [index["contents"][sha256] for sha256 in [*common, *target["contents"], *records]]
        needed = {part for content in contents for part in content["parts"]}
        wrong = needed & set(faults)
        size = sum(index["parts"][part] for part in wrong)
        state = f"{len(wrong)} of {len(needed)} parts are missing or damaged, {size / 1e6:.1f} MB" if wrong else "whole"
        print(f"{ascii(name)[1:-1]}: {state}")
    return INFRASTRUCTURE if faults else 0


# --- the machine -----------------------------------------------------------------------------------------------------


def check_machine(wanted: str) -> None:
    """Whether wheels for the platform `x86_64-manylinux_2_28` run here."""
    match = re.fullmatch(r"(\w+?)-manylinux_2_(\d+)", wanted)
    if match is None:
        raise broken("it names no platform that is known")
    kind, glibc = match[1], (2, int(match[2]))
    if platform.system() != "Linux" or platform.machine() != kind:
        what = f"the bundle is for Linux on {kind}, and this is {platform.system()} on {platform.machine()}"
        raise BundleError(what, "Make one on a machine like this one.", CONFIGURATION)
    library, version = platform.libc_ver()
    found = re.match(r"(\d+)\.(\d+)", version)
    if library == "glibc" and found and (int(found[1]), int(found[2])) >= glibc:
        return
    what = (
        f"the bundle needs glibc 2.{glibc[1]} or later, and this machine has {library or 'another C library'} {version}"
    )
    raise BundleError(what, f"Make one with --platform {kind}-manylinux_2_28, or an older one.", CONFIGURATION)


def find_python(version: str, uv: Path) -> str:
    """The interpreter that runs this, one on PATH, or one that uv knows."""
    if is_ours(version):
        return sys.executable
    found = shutil.which(f"python{version}")
    if found and works(found, version):
        return found
    words = [str(uv), "python", "find", "--no-config", "--no-python-downloads", "--system", version]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode == 0 and works(done.stdout.strip(), version):
        return done.stdout.strip()
    what = f"the bundle is for Python {version}, and there is none here"
    hint = f"Install it, put it on PATH as python{version}, or make the bundle with --python of what this machine has."
    raise BundleError(what, hint, INFRASTRUCTURE)


def is_ours(version: str) -> bool:
    return version == "{}.{}".format(*sys.version_info[:2])


def works(python: str, version: str) -> bool:
    """A name on PATH may be a stand-in that only says that there is none."""
    code = "import sys; print('{}.{}'.format(*sys.version_info[:2]))"
    try:
        done = subprocess.run([python, "-I", "-c", code], capture_output=True, text=True, check=False)
    except OSError:
        return False
    return done.returncode == 0 and done.stdout.strip() == version


# --- the harness's environment ---------------------------------------------------------------------------------------


def environment(index: dict[str, Any], work: Path) -> Path:
    """The folder of an environment that holds the harness; made by rename, so that one that is there is whole."""
    facts = json.dumps([sorted(index["launch"]), index["python"]])
    folder = work / "harness" / hashlib.sha256(facts.encode()).hexdigest()[:16]
    if (folder / "bin" / "python").exists():
        return folder
    print(f"setting up the harness in {folder}", file=sys.stderr)
    folder.parent.mkdir(parents=True, exist_ok=True)
    if folder.exists():  # its Python is gone
        shutil.rmtree(folder)
    with tempfile.TemporaryDirectory(prefix=".new-", dir=folder.parent) as scratch:
        made = install(index, Path(scratch), work)
        with contextlib.suppress(OSError):  # somebody else was faster
            made.rename(folder)
    return folder


def install(index: dict[str, Any], scratch: Path, work: Path) -> Path:
    """An environment with uv, the carried wheels and the harness, in a folder of `scratch`."""
    wheels = scratch / "wheels"
    wheels.mkdir()
    archive, requirements = take(index, wheels)
    (scratch / "requirements.txt").write_text(requirements, encoding="utf-8")
    uv = take_uv(wheels, scratch / "uv")
    made = scratch / "environment"
    caches = {"UV_CACHE_DIR": str(work / "uv-cache"), "UV_NO_CONFIG": "1", "UV_OFFLINE": "1"}
    run_uv([str(uv), "venv", "--python", find_python(index["python"], uv), str(made)], caches)
    options = ["--no-index", "--find-links", str(wheels), "--require-hashes", "--no-deps", "--no-build"]
    python = ["--python", str(made / "bin" / "python")]
    run_uv([str(uv), "pip", "install", *options, *python, "-r", str(scratch / "requirements.txt")], caches)
    (site,) = made.glob("lib/python3*/site-packages")
    unpack(archive, site)
    return made


def take(index: dict[str, Any], folder: Path) -> tuple[Path, str]:
    """Put together what is needed here: the archive of the harness, and the wheels as lines of a requirements file."""
    archive, lines = None, []
    for sha256 in index["launch"]:
        name = index["contents"][sha256]["name"]
        assemble(index, sha256, folder / name)
        match = _WHEEL.fullmatch(name)
        if match:
            lines.append(f"{match[1]}=={match[2]} --hash=sha256:{sha256}\n")
        else:
            archive = folder / name
    if archive is None:
        raise broken("it holds no harness")
    return archive, "".join(lines)


def take_uv(wheels: Path, target: Path) -> Path:
    for wheel in wheels.glob("uv-*.whl"):
        with zipfile.ZipFile(wheel) as file:
            for name in file.namelist():
                if re.fullmatch(r"uv-[^/]+\.data/scripts/uv", name):
                    with file.open(name) as source, target.open("wb") as copy:
                        shutil.copyfileobj(source, copy, BLOCK)
                    target.chmod(0o755)
                    return target
    raise broken("it holds no uv")


def run_uv(words: list[str], variables: dict[str, str]) -> None:
    given = {name: value for name, value in os.environ.items() if not name.startswith(("UV_", "PYTHON", "VIRTUAL_ENV"))}
    try:
        done = subprocess.run(
            words, env={**given, **variables}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
        )
    except OSError as error:
        raise BundleError(
            f"the bundle's uv does not start: {error}", "May files of the work folder be run?", 5
        ) from None
    if done.returncode:
        said = done.stdout.decode("utf-8", "replace")[-2000:]
        if "No space left" in said:
            raise OSError(28, "No space left on device", words[-1])
        raise BundleError(
            f"the harness's environment could not be made:\n{said}", "Name another --work.", INFRASTRUCTURE
        )


def unpack(archive: Path, folder: Path) -> None:
    """The package `harness`: files below it and nothing else."""
    try:
        with tarfile.open(archive, "r:") as tar:
            for member in tar:
                names = member.name.split("/")
                if not member.isfile() or names[0] != "harness" or {"", ".", ".."} & set(names):
                    raise broken(f"the harness holds {ascii(member.name)[:100]}, which is no file of it")
                source = tar.extractfile(member)
                if source is not None:
                    target = folder.joinpath(*names)
                    target.parent.mkdir(parents=True, exist_ok=True)
                    with target.open("wb") as copy:
                        shutil.copyfileobj(source, copy, BLOCK)
    except tarfile.TarError as error:
        raise broken(f"the harness is no archive: {error}") from None


# --- the start -------------------------------------------------------------------------------------------------------


def work_folder(arguments: list[str]) -> Path:
    """What --work names, else `work` beside this file; the harness reads the option itself."""
    for number, word in enumerate(arguments):
        if word == "--work" and number + 1 < len(arguments):
            return Path(arguments[number + 1]).resolve()
        if word.startswith("--work="):
            return Path(word[len("--work=") :]).resolve()
    return HERE / "work"


def start(index: dict[str, Any], arguments: list[str]) -> NoReturn:
    """Become the harness."""
    check_machine(index["platform"])
    work = work_folder(arguments)
    python = environment(index, work) / "bin" / "python"
    given = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    given.update(XDG_CACHE_HOME=str(work / "cache"), UV_CACHE_DIR=str(work / "uv-cache"))
    if is_ours(index["python"]):  # what another Python has installed is of no use to the bundle's
        given.setdefault("VLLM_MATRIX_BORROW_FROM", sysconfig.get_path("platlib"))
    words = [str(python), "-P", "-c", _START, "bundle", "run", str(HERE), *arguments]
    sys.stdout.flush()
    os.execve(str(python), words, given)  # noqa: S606 - a list, no shell line


def main() -> NoReturn:
    arguments = sys.argv[1:]
    if arguments and arguments[0] in ("-h", "--help"):
        print(__doc__)
        sys.exit(0)
    try:
        index = read_index()
        if arguments[:1] == ["verify"]:
            sys.exit(verify(index, arguments[1:]))
        start(index, arguments)
    except BundleError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.code)
    except OSError as error:
        print(f"error: {error.filename or HERE}: {error.strerror}", file=sys.stderr)
        print("  Make room or mend it, and start again; --work names another folder.", file=sys.stderr)
        sys.exit(INFRASTRUCTURE)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
