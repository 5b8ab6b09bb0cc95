"""What the rounds in containers need: a small image out of this host's own Python, and a daemon that may be killed."""

from __future__ import annotations

import contextlib
import io
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

from docker.client import DockerClient

TAG = "vllm-matrix-chaos"
_LEFT_OUT = {
    "test",
    "tests",
    "idlelib",
    "site-packages",
    "dist-packages",
    "ensurepip",
    "tkinter",
    "lib2to3",
}


def make_image(client: DockerClient, repository: str = TAG) -> str:
    """The image's id. Python and grep with the libraries that they load, and nothing else: no registry is asked."""
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        python = Path(sys.executable).resolve()
        library = Path(sysconfig.get_path("stdlib", vars={"installed_base": sys.base_prefix, "base": sys.base_prefix}))
        modules = [path for path in library.rglob("*") if path.is_file() and not _left_out(path.relative_to(library))]
        tools = [Path(found) for found in map(shutil.which, ("grep",)) if found]
        loaders = [python, *(path.resolve() for path in tools), *(path for path in modules if path.suffix == ".so")]
        for path in dict.fromkeys([python, *modules, *_libraries(loaders)]):
            _add(tar, path, str(path))
        for tool in tools:
            _add(tar, tool.resolve(), f"/usr/bin/{tool.name}")
        link = tarfile.TarInfo("usr/bin/python3")
        link.type, link.linkname = tarfile.SYMTYPE, str(python)
        tar.addfile(link)
    archive.seek(0)
    client.api.import_image_from_data(archive.getvalue(), repository=repository, tag="latest")
    found: str = client.images.get(f"{repository}:latest").id
    return found


def _left_out(path: Path) -> bool:
    return bool(_LEFT_OUT & {*path.parts}) or path.parts[0].startswith("config-") or path.suffix == ".a"


def _libraries(paths: Iterable[Path]) -> list[Path]:
    """What the loader would load for them, itself included."""
    found: dict[Path, None] = {}
    for path in paths:
        said = subprocess.run(["ldd", str(path)], capture_output=True, text=True, check=False).stdout  # noqa: S607
        found |= dict.fromkeys(Path(name) for name in re.findall(r"(/\S+) \(0x", said))
    return list(found)


def _add(tar: tarfile.TarFile, path: Path, name: str) -> None:
    """For whoever a cell runs as: the folders of a home may be closed to others."""
    info = tar.gettarinfo(path.resolve(), arcname=name)
    info.mode |= 0o555 if info.mode & 0o100 else 0o444
    info.uid = info.gid = 0
    with path.open("rb") as file:
        tar.addfile(info, file)


def can_have_a_daemon() -> bool:
    return os.geteuid() == 0 and bool(shutil.which("dockerd")) and bool(shutil.which("unshare"))


class Daemon:
    """A dockerd of our own, in namespaces of its own: one without a bridge deletes the docker0 of its network."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="dockerd-"))
        self._name = f"chaos-{secrets.token_hex(4)}"
        self.host = f"unix://{self.folder}/sock"
        self._log = (self.folder / "log").open("wb")
        words = ["unshare", "-n", "-m", "--propagation", "private", "sleep", "infinity"]
        self._namespaces = subprocess.Popen(words, start_new_session=True)
        self._apart()
        self._process: subprocess.Popen[bytes] | None = None

    def _apart(self) -> None:
        """Wait until the namespaces are not the host's: a daemon that came too early would take the host's bridge."""
        end = time.monotonic() + 20
        for name in ("net", "mnt"):
            theirs, ours = Path(f"/proc/{self._namespaces.pid}/ns/{name}"), Path(f"/proc/self/ns/{name}")
            while theirs.readlink() == ours.readlink():
                assert time.monotonic() < end and self._namespaces.poll() is None, "unshare did not work"
                time.sleep(0.01)

    def start(self) -> None:
        words = ["nsenter", f"--target={self._namespaces.pid}", "-n", "-m", "dockerd"]
        words += ["--data-root", f"{self.folder}/data", "--exec-root", f"{self.folder}/exec"]
        words += ["--pidfile", f"{self.folder}/pid", "-H", self.host, "--bridge=none", "--iptables=false"]
        # where the system has a containerd, dockerd shares it: by names of its own
        words += ["--containerd-namespace", self._name, "--containerd-plugins-namespace", f"{self._name}-plugins"]
        self._process = subprocess.Popen(words, stdout=self._log, stderr=self._log, start_new_session=True)
        end = time.monotonic() + 60
        while not self.answers():
            assert time.monotonic() < end, (self.folder / "log").read_text(errors="replace")[-2_000:]
            time.sleep(0.1)

    def answers(self) -> bool:
        with contextlib.suppress(Exception), contextlib.closing(DockerClient(base_url=self.host, timeout=5)) as client:
            return bool(client.ping())
        return False

    def kill(self, number: int) -> None:
        """And with it the containerd that it started, as a service manager does; what runs in containers goes on."""
        assert self._process is not None
        self._process.send_signal(number)
        self._process.wait(60)
        for pid in self._ours(b"containerd.toml"):
            os.kill(pid, signal.SIGKILL)
        # a dead one that nobody has waited for yet counts as running, and would be waited for
        (self.folder / "exec" / "containerd" / "containerd.pid").unlink(missing_ok=True)

    def close(self) -> None:
        """Also what outlives it: the shims of containers live in its namespaces."""
        if self._process is not None and self._process.poll() is None:
            self.kill(signal.SIGTERM)
        for pid in self._ours(b""):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._namespaces.kill()
        self._namespaces.wait()
        self._log.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _ours(self, words: bytes) -> list[int]:
        """Processes that name our folder, and these words."""
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                command = (entry / "cmdline").read_bytes() if entry.name.isdigit() else b""
                if os.fsencode(self.folder) in command and words in command:
                    found.append(int(entry.name))
        return found
