#!/usr/bin/env python3
"""build_vllm.py LOCK TARGET: put vLLM into the folder TARGET, from the source that LOCK names, compiled for the CPU.

There is no wheel for the CPU of old releases. Their own way to build one, CMake, wants a torch for the CPU, which the
common index does not have. So the Python part is installed as it is, and the extension is compiled here as vLLM's
cmake/cpu_extension.cmake does it for a machine with AVX2 and without AVX-512, whatever the machine is that builds: the
same flags and the same files, and no oneDNN, which only quantized models on AVX-512 use. Nothing in vLLM is changed.

Needs uv, g++, libnuma's headers, and an environment with torch and setuptools whose Python runs this.
A certificate bundle (build secret `ca`) and an index (build argument INDEX_URL) are honoured where they are given.
"""

# ruff: noqa: T201 - a tool of the build: it runs in a container and talks to the log

from __future__ import annotations

import csv
import importlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

JOBS = 2  # a job takes up to 2 GB
SECRET = Path("/run/secrets/ca")
FLAGS = ("-O2", "-DNDEBUG", "-std=gnu++17", "-fPIC", "-fopenmp", "-mavx2", "-mf16c")
DEFINES = ("-DVLLM_CPU_EXTENSION", "-DTORCH_EXTENSION_NAME=_C", "-DPy_LIMITED_API=0x03000000")
AVX512_ONLY = "quant.cpp"


def version_of(lock: str) -> str:
    """The release that a lock names. Raises ValueError unless vLLM is all that it names, exactly and with a hash."""
    names = re.findall(r"^(?![#\s])(\S+)", lock, re.MULTILINE)
    match = re.fullmatch(r"vllm==([\w.]+)", names[0]) if len(names) == 1 else None
    if match is None or "--hash=sha256:" not in lock:
        raise ValueError(f"the lock has to name vllm==… with a hash, and nothing else; it names {names}")
    return match[1]


def install_command(lock: Path, target: Path, cache: Path) -> list[str]:
    """Install the Python part, built by the tools of this environment; the sources stay in `cache`."""
    command = ["uv", "pip", "install", "--no-config", "--cache-dir", str(cache), "--link-mode", "copy"]
    command += ["--compile-bytecode", "--require-hashes", "--no-deps", "--no-binary", "vllm", "--no-build-isolation"]
    return [*command, "--target", str(target), "-r", str(lock)]


def install_environment(version: str, given: dict[str, str], secret: Path = SECRET) -> dict[str, str]:
    """vLLM takes itself for a build for the CPU if its version says so, and compiles nothing for the device `empty`."""
    environment = given | {"SETUPTOOLS_SCM_PRETEND_VERSION": f"{version}+cpu", "VLLM_TARGET_DEVICE": "empty"}
    if os.access(secret, os.R_OK):
        environment["SSL_CERT_FILE"] = str(secret)
    if given.get("INDEX_URL"):
        environment["UV_DEFAULT_INDEX"] = given["INDEX_URL"]
    return environment


def source_of(cache: Path) -> Path:
    """The folder of vLLM's sources that uv has unpacked. Raises ValueError unless there is exactly one."""
    found = [folder.parents[1] for folder in cache.rglob("csrc/cpu") if (folder / "torch_bindings.cpp").is_file()]
    if len(found) != 1:
        raise ValueError(f"{cache} has {len(found)} sources of vLLM for the CPU")
    return found[0]


def sources(folder: Path) -> list[Path]:
    """What is compiled, the largest file first: it takes longest."""
    found = [path for path in (folder / "csrc" / "cpu").glob("*.cpp") if path.name != AVX512_ONLY]
    return sorted(found, key=lambda path: (-path.stat().st_size, path.name))


def compile_command(source: str, target: str, includes: list[str], cxx11_abi: bool) -> list[str]:
    """Paths in it are relative to the source, so that those in messages do not depend on where it lies."""
    search = [word for folder in includes for word in ("-isystem", folder)]
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(cxx11_abi)}"
    return ["g++", *FLAGS, *DEFINES, abi, "-Icsrc", *search, "-c", source, "-o", target]


def link_command(objects: list[str], target: str, libraries: str) -> list[str]:
    torch = ["-ltorch", "-ltorch_cpu", "-lc10"]
    return ["g++", "-shared", "-fopenmp", "-s", *objects, "-o", target, f"-L{libraries}", *torch, "-lnuma"]


def build_extension(folder: Path, target: Path) -> None:
    extensions = importlib.import_module("torch.utils.cpp_extension")
    includes = [*extensions.include_paths(), sysconfig.get_path("include")]
    abi = importlib.import_module("torch").compiled_with_cxx11_abi()
    files = sources(folder)
    objects = [f"{path.stem}.o" for path in files]

    def compile_one(pair: tuple[Path, str]) -> None:
        started = time.monotonic()
        source = str(pair[0].relative_to(folder))
        subprocess.run(compile_command(source, pair[1], includes, abi), cwd=folder, check=True)
        print(f"{source}: {time.monotonic() - started:.0f} s", flush=True)

    with ThreadPoolExecutor(JOBS) as pool:
        list(pool.map(compile_one, zip(files, objects, strict=True)))
    subprocess.run(link_command(objects, str(target), extensions.TORCH_LIB_PATH), cwd=folder, check=True)
    # A symbol that is missing shows now, not in the first cell
    load = "import sys, torch; torch.ops.load_library(sys.argv[1])"
    subprocess.run([sys.executable, "-c", load, str(target)], check=True)


def finish(target: Path, version: str) -> None:
    """Call the distribution what it is: vLLM's setup.py appends `.empty` to the version, for the device.

    The list of files is written anew, with the extension and without the scripts: they are not where they would work.
    """
    shutil.rmtree(target / "bin", ignore_errors=True)
    (target / ".lock").unlink(missing_ok=True)
    (found,) = target.glob("vllm-*.dist-info")
    folder = found.rename(target / f"vllm-{version}+cpu.dist-info")
    metadata = folder / "METADATA"
    text, changes = re.subn(r"(?m)^Version: .*$", f"Version: {version}+cpu", metadata.read_text(), count=1)
    if changes != 1:
        raise ValueError(f"{metadata} names no version")
    metadata.write_text(text)
    files = sorted(str(path.relative_to(target)) for path in target.rglob("*") if path.is_file())
    with (folder / "RECORD").open("w", newline="") as stream:
        csv.writer(stream, lineterminator="\n").writerows([name, "", ""] for name in files)


def main(lock: Path, target: Path) -> None:
    version = version_of(lock.read_text())
    with tempfile.TemporaryDirectory(prefix="build-vllm-") as cache:
        command = install_command(lock, target, Path(cache))
        subprocess.run(command, env=install_environment(version, dict(os.environ)), check=True)
        build_extension(source_of(Path(cache)), target / "vllm" / "_C.abi3.so")
    finish(target, version)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
