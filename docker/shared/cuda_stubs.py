#!/usr/bin/env python3
"""Put empty CUDA libraries into torch/lib, so that the CUDA wheel of torch loads on a machine without CUDA.

The wheel's libraries name libcudart, libcublas … as needed, and the loader wants each of them, with the versions of
the symbols that are asked for. Each missing one is made here from what the wheel itself asks of it: every function
answers "no CUDA device", so that `torch.cuda.is_available()` is False and a mistaken `.cuda()` raises.
That saves 3 GB an image. Needs gcc and binutils, once, at build time.
"""

# ruff: noqa: S607, T201 - a tool of the build: it runs in a container and talks to the log

from __future__ import annotations

import importlib.util
import re
import subprocess
import tempfile
from pathlib import Path

NO_DEVICE = 100  # cudaErrorNoDevice
# The driver's library is not part of any package: the wheel opens it only when there is a device.
DRIVER = "libcuda.so.1"


def readelf(option: str, library: Path) -> str:
    return subprocess.run(["readelf", "-W", option, str(library)], check=True, capture_output=True, text=True).stdout


def needed(library: Path) -> set[str]:
    """Names of the libraries that `library` asks the loader for."""
    return set(re.findall(r"\(NEEDED\).*\[(.+)\]", readelf("-d", library)))


def undefined(library: Path) -> set[str]:
    """Symbols that `library` takes from others, as `name` or `name@version`."""
    rows = (line.split() for line in readelf("--dyn-syms", library).splitlines())
    return {row[7] for row in rows if len(row) > 7 and row[6] == "UND"}


def is_cuda(soname: str) -> bool:
    return soname.startswith(("libcu", "libnccl", "libnv")) and soname != DRIVER


def wanted_of(soname: str, symbols: set[str]) -> list[str]:
    """The symbols that `soname` has to define: those that carry its name as version, or begin like it."""
    stem = soname.removeprefix("lib").split(".")[0]
    found = set()
    for symbol in symbols:
        name, _, version = symbol.partition("@")
        if version == soname or (not version and name.startswith(stem)):
            found.add(name)
    return sorted(found)


def source(names: list[str]) -> str:
    """C source that defines `names`: all one function, but for those that return a text."""
    lines = [
        f"long no_device(void) {{ return {NO_DEVICE}; }}",
        'const char *no_device_text(void) { return "no CUDA device (this is a CPU image)"; }',
    ]
    for name in names:
        text = re.search(r"Error(String|Name)$", name) is not None
        kind, alias = ("const char *", "no_device_text") if text else ("long ", "no_device")
        lines.append(f'{kind}{name}(void) __attribute__((alias("{alias}")));')
    return "\n".join(lines) + "\n"


def make_stub(soname: str, names: list[str], folder: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        code, versions = Path(scratch, "stub.c"), Path(scratch, "versions")
        code.write_text(source(names))
        # The packages use a library's own name as the version of all its symbols.
        versions.write_text(f"{soname} {{ global: *; }};\n")
        link = [f"-Wl,-soname,{soname}", f"-Wl,--version-script,{versions}"]
        subprocess.run(
            ["gcc", "-shared", "-fPIC", "-nostdlib", *link, "-o", str(folder / soname), str(code)], check=True
        )


def main() -> None:
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise SystemExit("cuda_stubs.py: torch is not installed here")
    folder = Path(spec.origin).parent / "lib"
    libraries = sorted(folder.glob("*.so*"))
    symbols = set[str]().union(*map(undefined, libraries))
    missing = {name for name in set[str]().union(*map(needed, libraries)) if is_cuda(name)}
    for soname in sorted(missing - {library.name for library in libraries}):
        names = wanted_of(soname, symbols)
        make_stub(soname, names, folder)
        print(f"{soname}: {len(names)} functions")


if __name__ == "__main__":
    main()
