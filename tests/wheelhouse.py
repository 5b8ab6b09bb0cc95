"""A package index on this machine (PEP 691, with upload dates): what uv resolves from in tests."""

from __future__ import annotations

import hashlib
import io
import json
import threading
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass(frozen=True)
class Upload:
    """One distribution: a wheel (`files` in it, `platform` of a binary one), or a source never to be built."""

    name: str
    version: str
    day: str
    requires: Sequence[str] = ()
    sdist: bool = False
    files: Mapping[str, bytes] = field(default_factory=dict)
    platform: str = "any"

    @property
    def file(self) -> str:
        name = self.name.replace("-", "_")
        return f"{name}-{self.version}.tar.gz" if self.sdist else f"{name}-{self.version}-py3-none-{self.platform}.whl"

    @property
    def metadata(self) -> str:
        lines = ["Metadata-Version: 2.1", f"Name: {self.name}", f"Version: {self.version}"]
        return "\n".join([*lines, *(f"Requires-Dist: {text}" for text in self.requires)]) + "\n"

    @property
    def content(self) -> bytes:
        if self.sdist:
            return b"no archive at all"
        buffer, folder = io.BytesIO(), f"{self.name.replace('-', '_')}-{self.version}.dist-info"
        with zipfile.ZipFile(buffer, "w") as wheel:
            for path, data in self.files.items():
                wheel.writestr(zipfile.ZipInfo(path), data, zipfile.ZIP_DEFLATED)
            for name, text in (
                ("METADATA", self.metadata),
                ("WHEEL", f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-{self.platform}\n"),
                ("RECORD", "".join(f"{path},,\n" for path in self.files)),
            ):
                wheel.writestr(zipfile.ZipInfo(f"{folder}/{name}"), text)
        return buffer.getvalue()


@contextmanager
def index(uploads: Sequence[Upload]) -> Iterator[str]:
    """The address of an index that has these uploads."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            name = self.path.strip("/").split("/")[-1]
            files = [upload for upload in uploads if upload.file == name]
            project = [upload for upload in uploads if upload.name == name]
            if files:
                self._answer("application/octet-stream", files[0].content)
            elif project:
                self._answer("application/vnd.pypi.simple.v1+json", json.dumps(_project(name, project)).encode())
            else:
                self.send_error(404)

        def _answer(self, kind: str, body: bytes) -> None:
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "GET":
                with suppress(ConnectionError):  # uv hangs up once it has seen the metadata
                    self.wfile.write(body)

        do_HEAD = do_GET  # noqa: N815 - uv looks first whether it could read a part of a wheel

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/simple"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _project(name: str, uploads: Sequence[Upload]) -> dict[str, object]:
    files = [
        {
            "filename": upload.file,
            "url": f"/files/{upload.file}",
            "hashes": {"sha256": hashlib.sha256(upload.content).hexdigest()},
            "upload-time": f"{upload.day}T12:00:00Z",
        }
        for upload in uploads
    ]
    return {"meta": {"api-version": "1.1"}, "name": name, "versions": [u.version for u in uploads], "files": files}
