"""Images in a bundle: an archive of each as the engine saves it, taken apart here, and put together as it is loaded.

The large files of such an archive are layers, which images share: each is a content of its own, wherever it lies in
the archive (`<id>/layer.tar`, or `blobs/sha256/…` since engine 25). All small ones are one content, the frame. An image
is saved and loaded by its ID; its archive holds no tag, so that none is moved where it is loaded.
"""

from __future__ import annotations

import io
import json
import posixpath
import re
import shutil
import tarfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import IO, Any

import requests
from docker.client import DockerClient
from docker.errors import DockerException

from harness.bundles.archives import as_it_is
from harness.bundles.index import PARTS, PLACE, ImageArchive, Index
from harness.bundles.parts import BLOCK, file_sha256, read
from harness.bundles.repack import encode
from harness.bundles.store import Facts, Packed
from harness.bundles.writer import Writer
from harness.errors import BuildError, InfrastructureError
from harness.events import clean
from harness.images import BuiltImage, Image, check_space, find_image

Say = Callable[[str], None]
LARGE = 1 << 20  # bytes: what is larger is a content of its own
MAX_FRAME = 64 << 20  # bytes
_NAME = "io.containerd.image.name"  # annotation that OCI archives hold their tags in

_Small = Mapping[str, tuple[tarfile.TarInfo, bytes]]  # by name


# --- at home ---------------------------------------------------------------------------------------------------------


def save(client: DockerClient, image: BuiltImage, writer: Writer, folder: Path, say: Say) -> ImageArchive:
    """Put an image into the bundle. `folder` takes one layer at a time.

    Raises InfrastructureError where the engine does not give it, or in a form that cannot be carried.
    """
    check_space(client, image.bytes, "an image that is saved")  # engines write the archive to their disk first
    small: dict[str, tuple[tarfile.TarInfo, bytes]] = {}
    members: dict[str, str] = {}
    try:
        with closing(client.api.get_image(image.id)) as chunks, _opened(chunks) as tar:
            for member in tar:
                if member.size > LARGE:
                    members[_place(member)] = _add_layer(tar, member, writer, folder, say)
                elif not member.isdir():
                    small[_place(member)] = _bare(member), _content(tar, member)
        frame = _add_frame(small, writer, folder)
    except (DockerException, requests.RequestException) as error:
        raise InfrastructureError(f"Docker does not save {image.tag}: {error}", "See its log.") from error
    except (tarfile.TarError, ValueError) as error:
        raise InfrastructureError(f"Docker saves {image.tag} in a form that is not known: {error}") from error
    return ImageArchive(tag=image.tag, id=image.id, frame=frame, members=members)


def saved_before(old: Index | None, target: str, image: BuiltImage, writer: Writer) -> ImageArchive | None:
    """What the bundle holds of this very image already; None if it lacks any of it."""
    own = old.targets.get(target) if old else None
    archive = own.image if own else None
    if old is None or archive is None or (archive.id, archive.tag) != (image.id, image.tag):
        return None
    return archive if all(writer.keep(sha256, old.contents[sha256].name) for sha256 in archive.contents) else None


def _opened(chunks: Iterable[bytes]) -> tarfile.TarFile:
    return tarfile.open(fileobj=io.BufferedReader(_Chunks(chunks), BLOCK), mode="r|", bufsize=BLOCK)


class _Chunks(io.RawIOBase):
    """What an answer brings, as a file."""

    def __init__(self, chunks: Iterable[bytes]) -> None:
        self._chunks = filter(None, chunks)
        self._left = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._left = self._left or memoryview(next(self._chunks, b""))
        size = min(len(buffer), len(self._left))
        buffer[:size], self._left = self._left[:size], self._left[size:]
        return size


def _add_layer(tar: tarfile.TarFile, member: tarfile.TarInfo, writer: Writer, folder: Path, say: Say) -> str:
    """Its sha256 is known only when all of it is there: so nothing is packed that another image brought."""
    raw, packed = folder / "layer", folder / "packed"
    with _file(tar, member) as source, raw.open("wb") as copy:
        shutil.copyfileobj(source, copy, BLOCK)
    sha256 = file_sha256(raw)
    name = f"layer-{sha256[:12]}.tar"
    if writer.keep(sha256, name):
        say(f"{name}: {member.size / 1e6:.1f} MB, is there")
    else:
        encode(raw, packed)
        size = packed.stat().st_size
        facts = Facts(
            name=name, sha256=sha256, bytes=member.size, encoding="zstd", origin_bytes=member.size, data_bytes=size
        )
        writer.add(Packed(facts, packed))
        packed.unlink()
        say(f"{name}: {member.size / 1e6:.1f} MB, carried as {size / 1e6:.1f} MB")
    raw.unlink()
    return sha256


def _add_frame(small: _Small, writer: Writer, folder: Path) -> str:
    _check_frame(small, ())
    target = folder / "frame.tar"
    with tarfile.open(target, "w") as archive:
        for _, (member, data) in sorted(small.items()):
            archive.addfile(member, io.BytesIO(data))
    return writer.add(as_it_is(target))


# --- on the node -----------------------------------------------------------------------------------------------------


def not_loaded(client: DockerClient, index: Index, targets: Iterable[str]) -> tuple[str, ...]:
    """Those of the targets whose image the engine does not have."""
    images = {name: own.image for name in targets if (own := index.targets.get(name))}
    return tuple(name for name, image in images.items() if image and find_image(client, image.id) is None)


def load(client: DockerClient, bundle: Path, index: Index, image: Image, say: Say) -> BuiltImage:
    """See to it that the engine has the bundle's image of a target. Only its ID is believed, never a tag.

    Raises BuildError where the bundle has none, or what it has is another one.
    """
    started = time.monotonic()
    target = f"{image.target}@{image.device}"
    archive = index.targets[target].image if target in index.targets else None
    if archive is None or archive.tag != image.tag:
        raise BuildError(f"the bundle does not hold {image.tag}, the image of {target}", "Make it again.")
    found = find_image(client, archive.id)
    cached = found is not None
    if found is None:
        size = sum(index.contents[sha256].bytes for sha256 in archive.contents)
        check_space(client, 2 * size, f"{target}, unpacked and loaded,")
        say(f"loading {image.tag}, {size / 1e9:.2f} GB")
        came = _load(client, image.tag, archive_of(bundle / PARTS, index, archive))
        found = find_image(client, archive.id)
        if found is None:
            raise BuildError(
                f"the bundle's {image.tag} came to {clean(', '.join(came)) or 'nothing'}, and not to {archive.id}",
                "An engine that keeps images in another way (`docker info`: Storage Driver) gives them other IDs.",
            )
    _tag(client, found.id, image.tag)
    return BuiltImage(tag=image.tag, id=found.id, bytes=found.bytes, seconds=time.monotonic() - started, cached=cached)


def _load(client: DockerClient, tag: str, archive: Iterator[bytes]) -> list[str]:
    """The IDs of what came of it, as the engine says."""
    try:
        sent: Any = archive  # as it comes, whatever a stub of the SDK says of its type
        return [str(image.id) for image in client.images.load(sent)]
    except (DockerException, requests.RequestException) as error:
        raise BuildError(f"Docker does not load {tag}: {clean(str(error))[:500]}", "See its log.") from error


def _tag(client: DockerClient, image: str, tag: str) -> None:
    """For people, and so that no `docker image prune` takes it: cells run by ID. What has the tag keeps it."""
    try:
        if find_image(client, tag) is None:
            repository, _, name = tag.rpartition(":")
            client.api.tag(image, repository, name)
    except (DockerException, requests.RequestException) as error:
        raise BuildError(f"Docker does not tag {tag}: {clean(str(error))[:500]}", "See its log.") from error


def archive_of(parts: Path, index: Index, image: ImageArchive) -> Iterator[bytes]:
    """An image's archive, in blocks. What is wrong with a content shows at its end, before the archive's.

    Raises InfrastructureError that names the part, BuildError for a frame that holds what no image's does.
    """
    for member, data in _frame_of(parts, index, image).values():
        yield member.tobuf() + data + _padding(len(data))
    for place, sha256 in image.members.items():
        content = index.contents[sha256]
        member = tarfile.TarInfo(place)
        member.size = content.bytes
        yield member.tobuf()
        yield from read(parts, sha256, content, index.parts)
        yield _padding(content.bytes)
    yield bytes(2 * tarfile.BLOCKSIZE)


def _padding(size: int) -> bytes:
    return bytes(-size % tarfile.BLOCKSIZE)


def _frame_of(parts: Path, index: Index, image: ImageArchive) -> _Small:
    content = index.contents[image.frame]
    try:
        if content.bytes > MAX_FRAME:
            raise ValueError(f"it has {content.bytes} bytes")  # noqa: TRY301 - told as any other
        data = b"".join(read(parts, image.frame, content, index.parts))
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as tar:
            small = {_place(member): (_bare(member), _content(tar, member)) for member in tar}
        _check_frame(small, image.members)
    except (tarfile.TarError, ValueError) as error:
        raise BuildError(f"the bundle's frame of {image.tag} is none: {error}", "Make the bundle again.") from error
    return small


# --- frames ----------------------------------------------------------------------------------------------------------


def _check_frame(small: _Small, large: Iterable[str]) -> None:
    """Raises ValueError for what is there twice, leads out of the archive, or would give a tag to an image."""
    if "manifest.json" not in small:
        raise ValueError("it has no manifest.json")
    if twice := set(small) & set(large):
        raise ValueError(f"{min(twice)} is there twice")
    for name, (member, data) in small.items():
        if member.issym() and not re.fullmatch(PLACE, _leads_to(member)):
            raise ValueError(f"{name} leads to {member.linkname[:200]!r}")
        if name == "repositories" or (name == "index.json" and _NAME.encode() in data):
            raise ValueError(f"{name} holds tags")
        if name == "manifest.json" and any(entry.get("RepoTags") for entry in _manifest(data)):
            raise ValueError(f"{name} holds tags")


def _leads_to(member: tarfile.TarInfo) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(member.name), member.linkname))


def _manifest(data: bytes) -> list[dict[str, Any]]:
    found = json.loads(data)
    if not isinstance(found, list) or not all(isinstance(entry, dict) for entry in found):
        raise ValueError("manifest.json is no list of images")
    return found


def _place(member: tarfile.TarInfo) -> str:
    if not re.fullmatch(PLACE, member.name) or not (member.isreg() or (member.issym() and not member.size)):
        raise ValueError(f"it holds {member.name[:200]!r}, which is no file below it")
    return member.name


def _bare(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """Without owners and times: the same image, the same bytes."""
    made = tarfile.TarInfo(member.name)
    made.type, made.linkname, made.size = member.type, member.linkname, member.size
    return made


def _content(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    if member.issym():
        return b""
    with _file(tar, member) as file:
        return file.read()


def _file(tar: tarfile.TarFile, member: tarfile.TarInfo) -> IO[bytes]:
    file = tar.extractfile(member)
    if file is None:
        raise tarfile.ReadError(f"{member.name} has no content")
    return file
