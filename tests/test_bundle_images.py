"""Bundles of images: taken apart as an engine saves them, put together as one loads them; at last on a real one."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import posixpath
import random
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from docker.client import DockerClient
from docker.errors import APIError, ImageNotFound
from rich.console import Console

from harness import models
from harness.backends.docker import connect
from harness.bundles import images, make, node
from harness.bundles.archives import as_it_is
from harness.bundles.index import FILE, PARTS, ImageArchive, Index, TargetContents, read_index, write_index
from harness.bundles.make import Request, make_bundle
from harness.bundles.node import Node, Wish, load_node_project, open_node, plan_here, run_bundle, verify_bundle
from harness.bundles.wheels import PLATFORM, Machine
from harness.bundles.writer import Writer
from harness.cells import Selection
from harness.errors import BuildError, ConfigurationError, DockerMissingError, InfrastructureError, MatrixError
from harness.images import BuildOptions, BuiltImage, Image, find_image
from harness.packs import unpack
from harness.plan import Planned
from harness.planfile import read_plan
from harness.project import Project, build_options, images_for, load_project
from harness.status import Status
from tests.chaos.engine import make_image
from tests.chaos.world import template
from tests.test_bundle_make import Home, address, cache, home  # noqa: F401 - fixtures

TARGETS = ("vllm-0.8.5", "vllm-0.10.0")
EPOCH = "1970-01-01T00:00:00Z"


def noise(seed: int, size: int) -> bytes:
    return random.Random(seed).randbytes(size)  # noqa: S311 - the same each time


SHARED, TINY = noise(1, 5 << 18), b"a layer of a few bytes"


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


Entries = list[tuple[str, bytes | str | None]]  # files, where links lead to, folders


def tar_of(entries: Entries) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, what in entries:
            info = tarfile.TarInfo(name)
            info.mtime = 1_700_000_000
            if what is None:
                info.type = tarfile.DIRTYPE
            elif isinstance(what, str):
                info.type, info.linkname = tarfile.SYMTYPE, what
            else:
                info.size = len(what)
            tar.addfile(info, io.BytesIO(what) if isinstance(what, bytes) else None)
    return buffer.getvalue()


def config_of(layers: list[bytes]) -> bytes:
    return json.dumps(
        {"created": EPOCH, "rootfs": {"type": "layers", "diff_ids": [sha256(one) for one in layers]}}
    ).encode()


def legacy(layers: list[bytes]) -> bytes:
    """As engine 20.10 saves an image by its ID: a layer that it has twice is a link."""
    config = config_of(layers)
    entries: Entries = []
    paths: list[str] = []
    for number, layer in enumerate(layers):
        folder = sha256(f"{number}".encode() + layer)
        paths.append(f"{folder}/layer.tar")
        entries += [(f"{folder}/", None), (f"{folder}/VERSION", b"1.0"), (f"{folder}/json", b"{}")]
        first = paths[layers.index(layer)]
        entries.append((paths[-1], layer if first == paths[-1] else f"../{first}"))
    manifest = [{"Config": f"{sha256(config)}.json", "RepoTags": None, "Layers": paths}]
    return tar_of([*entries, (f"{sha256(config)}.json", config), ("manifest.json", json.dumps(manifest).encode())])


def oci(layers: list[bytes]) -> bytes:
    """As engines since 25 do."""
    config = config_of(layers)
    blobs: Entries = [(f"blobs/sha256/{sha256(data)}", data) for data in dict.fromkeys([*layers, config])]
    paths = [f"blobs/sha256/{sha256(layer)}" for layer in layers]
    manifest = [{"Config": f"blobs/sha256/{sha256(config)}", "RepoTags": None, "Layers": paths}]
    index = json.dumps({"schemaVersion": 2, "manifests": []}).encode()
    return tar_of(
        [
            ("blobs/", None),
            ("blobs/sha256/", None),
            *blobs,
            ("index.json", index),
            ("manifest.json", json.dumps(manifest).encode()),
            ("oci-layout", b"{}"),
        ]
    )


@dataclass
class Engine:
    """As much of an engine as bundles touch, by the SDK's names. `tags`: IDs."""

    saved: dict[str, bytes] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    loads: int = 0
    other: str = ""  # gives the images that it loads other IDs

    @property
    def images(self) -> Any:
        return SimpleNamespace(get=self.get, load=self.load)

    @property
    def api(self) -> Any:
        return SimpleNamespace(get_image=self.save, tag=self.tag, base_url="http+docker://localhost")

    def add(self, tag: str, archive: bytes) -> None:
        found = self.id_of(archive)
        self.saved[found] = archive
        self.tags[tag] = found

    def id_of(self, archive: bytes) -> str:
        """Raises KeyError for a layer that is not there, or is another one."""
        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            (entry,) = json.load(tar.extractfile("manifest.json"))  # type: ignore[arg-type]
            config = tar.extractfile(entry["Config"]).read()  # type: ignore[union-attr]
            for path, told in zip(entry["Layers"], json.loads(config)["rootfs"]["diff_ids"], strict=True):
                member = tar.getmember(path)
                if member.issym():
                    member = tar.getmember(posixpath.normpath(posixpath.join(posixpath.dirname(path), member.linkname)))
                assert sha256(tar.extractfile(member).read()) == told  # type: ignore[union-attr]
        return f"sha256:{sha256(config)}"

    def get(self, name: str) -> Any:
        found = self.tags.get(name, name)
        if found not in self.saved:
            raise ImageNotFound("no such image")
        return SimpleNamespace(id=found, attrs={"Size": len(self.saved[found])})

    def save(self, name: str) -> Iterator[bytes]:
        data = self.saved[name]
        return (data[start : start + 100_001] for start in range(0, len(data), 100_001))

    def load(self, chunks: Iterator[bytes]) -> list[Any]:
        archive = b"".join(chunks)
        self.loads += 1
        found = self.other or self.id_of(archive)
        self.saved[found] = archive
        return [SimpleNamespace(id=found)]

    def tag(self, name: str, repository: str, tag: str) -> None:
        self.tags[f"{repository}:{tag}"] = self.get(name).id

    def info(self) -> dict[str, str]:
        return {}

    def version(self) -> dict[str, str]:
        return {"Version": "20.10"}

    def close(self) -> None:
        pass


def project_of(made: Home) -> Project:
    return load_project(made.root / "matrix.toml")


def images_of(project: Project) -> dict[tuple[str, str], Image]:
    cells = [cell for cell in project.cells if cell.target in TARGETS]
    return images_for(project, cells, build_options(project), "docker")


@pytest.fixture(params=[legacy])
def away(request: pytest.FixtureRequest, home: Home, monkeypatch: pytest.MonkeyPatch) -> Engine:  # noqa: F811
    """The engine at home, with images of both targets; and nothing has to be built."""
    (home.root / "docker" / "base" / "Dockerfile").chmod(0o755)  # a tag is made of that too
    engine = Engine()
    for number, image in enumerate(images_of(project_of(home)).values()):
        engine.add(image.tag, request.param([SHARED, TINY, noise(number + 2, 9 << 17), TINY]))

    def build(image: Image, *_: object) -> BuiltImage:
        found = engine.get(image.tag)
        return BuiltImage(tag=image.tag, id=found.id, bytes=found.attrs["Size"], seconds=0, cached=True)

    monkeypatch.setattr(make, "own_releases", lambda *_: ())
    monkeypatch.setattr(make, "connect", lambda timeout=0: engine)
    monkeypatch.setattr(make, "find_builder", lambda environ: None)
    monkeypatch.setattr(make, "build", build)
    monkeypatch.setattr(images, "check_space", lambda *_: None)
    return engine


@pytest.fixture
def bundle(away: Engine, home: Home) -> Index:  # noqa: F811
    return home.made("--kind", "image", "--target", "vllm-*", "--split", "1M")


@pytest.fixture
def there(bundle: Index, home: Home, monkeypatch: pytest.MonkeyPatch) -> Node:  # noqa: F811
    made = open_node(home.carry, None)
    for name, value in made.variables.items():
        monkeypatch.setenv(name, value)
    return made


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    """The node's, with nothing in it."""
    made = Engine()
    monkeypatch.setattr(node, "connect", lambda timeout=0: made)
    return made


def planned(here: Node) -> tuple[Project, BuildOptions, tuple[Planned, ...]]:
    project = load_node_project(here, print)
    options = build_options(project)
    return project, options, plan_here(project, Selection(), True, options, here.backend)


def loaded(here: Node, target: str = TARGETS[0]) -> BuiltImage:
    project, options, plan = planned(here)
    tools = node.node_tools(here, project, plan, options, Console(quiet=True), None)
    return tools.build(images_of(project)[target, "cpu"], here.work / "log", print)


# --- at home ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("away", [legacy, oci], indirect=True)
def test_a_layer_of_two_images_is_carried_once_and_small_files_together(bundle: Index, home: Home) -> None:  # noqa: F811
    assert bundle.kind == "images"
    large = {sha256(data): data for data in (SHARED, noise(2, 9 << 17), noise(3, 9 << 17))}
    for own in bundle.targets.values():
        assert own.image is not None
        assert set(own.contents) == {own.image.frame, *own.image.members.values()}
        assert sha256(SHARED) in own.image.members.values()
        assert len(own.image.members) == 2
    layers = {sha: content for sha, content in bundle.contents.items() if content.name.startswith("layer-")}
    assert set(layers) == set(large)
    assert {content.encoding for content in layers.values()} == {"zstd"}
    assert home.read(bundle, sha256(SHARED)) == SHARED
    assert "vllm-0.8.5@cpu: image in 3 contents" in "\n".join(home.said)
    assert f"with Python {bundle.python} and Docker" in home.said[-1]


def test_the_same_again_saves_nothing(
    bundle: Index,
    away: Engine,
    home: Home,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(images, "save", None)
    monkeypatch.setattr(make, "save", None)
    again = home.made("--kind", "image", "--target", "vllm-*", "--split", "1M")
    assert (again.targets, again.contents, again.parts) == (bundle.targets, bundle.contents, bundle.parts)


def test_a_part_that_is_gone_is_made_again_and_alone(
    bundle: Index,
    away: Engine,
    home: Home,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    part = bundle.contents[sha256(SHARED)].parts[0]
    (home.carry / PARTS / part).unlink()
    packed: list[Path] = []
    encode = images.encode
    monkeypatch.setattr(images, "encode", lambda path, target: (packed.append(path), encode(path, target)))
    again = home.made("--kind", "image", "--target", "vllm-*", "--split", "1M")
    assert again.parts == bundle.parts
    assert len(packed) == 1
    assert (home.carry / PARTS / part).exists()


def test_packages_of_an_image_cannot_be_borrowed(home: Home) -> None:  # noqa: F811
    assert "--borrow is for wheels" in str(home.refused("--kind", "image", "--borrow", "heavy"))


def _fails(name: str) -> Iterator[bytes]:
    raise APIError("no space left on device")
    yield b""


ODD: dict[str, Callable[[bytes], bytes]] = {
    "cut": lambda data: data[: 2 << 20],
    "nothing": lambda data: b"",
    "a path": lambda data: tar_of([("../x", b""), ("manifest.json", b"[]")]),
    "without images": lambda data: tar_of([("x", b"")]),
    "other JSON": lambda data: tar_of([("manifest.json", b"[1]")]),
    "no JSON": lambda data: tar_of([("manifest.json", b"[")]),
}


@pytest.mark.parametrize("name", ODD)
def test_an_archive_of_another_form_is_not_carried(away: Engine, home: Home, name: str) -> None:  # noqa: F811
    away.saved = {key: ODD[name](data) for key, data in away.saved.items()}
    with pytest.raises(InfrastructureError, match=r"saves vllm-matrix/vllm-0\.8\.5:\S+ in a form that is not known"):
        raise home.refused("--kind", "image", "--target", "vllm-0.8.5")
    assert not (home.carry / FILE).exists()


def test_an_engine_that_does_not_save_is_told(away: Engine, home: Home, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    monkeypatch.setattr(Engine, "save", lambda self, name: _fails(name))
    with pytest.raises(InfrastructureError, match=r"does not save vllm-matrix/.*no space left"):
        raise home.refused("--kind", "image", "--target", "vllm-0.8.5")


# --- on the node -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("away", [legacy, oci], indirect=True)
def test_what_is_loaded_is_what_was_saved_and_only_once(there: Node, engine: Engine, away: Engine) -> None:
    project, options, plan = planned(there)
    assert [entry.digest for entry in read_plan(project.root).cells] == [one.digest for one in plan]
    assert {one.facts["backend"] for one in plan} == {"docker"}
    for target in TARGETS:
        tag = images_of(project)[target, "cpu"].tag
        first, second = loaded(there, target), loaded(there, target)
        assert (first.cached, second.cached) == (False, True)
        assert first.id == second.id == away.tags[tag] == engine.tags[tag]
    assert engine.loads == 2
    assert (there.work / "log").read_text() == f"{first.id} was there\n"
    assert node._waiting(there, project, plan, options) == ()


def test_what_is_there_by_id_needs_no_parts(there: Node, engine: Engine, away: Engine) -> None:
    project, options, plan = planned(there)
    assert node._waiting(there, project, plan, options) == ("vllm-0.8.5@cpu", "vllm-0.10.0@cpu")
    own = there.index.targets["vllm-0.8.5@cpu"].image
    assert own is not None
    engine.saved[own.id] = b""
    assert node._waiting(there, project, plan, options) == ("vllm-0.10.0@cpu",)
    assert loaded(there).cached
    assert engine.tags == {own.tag: own.id}, "it had no tag"


def test_a_tag_is_not_believed_and_not_taken_away(there: Node, engine: Engine) -> None:
    tag = images_of(load_node_project(there, print))[TARGETS[0], "cpu"].tag
    engine.add(tag, legacy([b"another one"]))
    before = engine.tags[tag]
    made = loaded(there)
    assert not made.cached
    assert made.id != before
    assert engine.tags == {tag: before}


def test_an_engine_that_gives_other_ids_is_told(there: Node, engine: Engine) -> None:
    engine.other = f"sha256:{'0' * 64}"
    with pytest.raises(BuildError, match=rf"came to {engine.other}, and not to sha256:\w+\n.*Storage Driver"):
        loaded(there)
    assert engine.tags == {}


def test_a_daemon_that_refuses_fails_this_target(there: Node, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Engine, chunks: Iterator[bytes]) -> None:
        raise APIError("no space left on device\x1b[31m")

    monkeypatch.setattr(Engine, "load", full)
    with pytest.raises(
        BuildError, match=r"does not load vllm-matrix/vllm-0\.8\.5:\S+: no space left on device\n"
    ) as caught:
        loaded(there)
    assert "\x1b" not in str(caught.value)


def test_a_damaged_part_is_never_loaded(there: Node, engine: Engine) -> None:
    part = there.index.contents[sha256(SHARED)].parts[-1]
    path = there.bundle / PARTS / part
    path.write_bytes(bytes(path.stat().st_size))
    with pytest.raises(InfrastructureError, match=f"part {part} of layer-.* is damaged"):
        loaded(there)
    assert engine.saved == {}
    with pytest.raises(InfrastructureError, match=f"{part} is damaged"):
        run_bundle(there, Wish(), Console(quiet=True))
    with pytest.raises(InfrastructureError, match=f"{part} is damaged"):
        verify_bundle(there, Selection(), print)


def test_without_docker_the_run_says_so(there: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(timeout: int = 0) -> None:
        raise DockerMissingError("there is no Docker on this machine")

    monkeypatch.setattr(node, "connect", none)
    with pytest.raises(DockerMissingError):
        run_bundle(there, Wish(), Console(quiet=True))
    assert verify_bundle(there, Selection(), print) > 0, "to look at parts it takes none"


def test_an_image_that_the_index_calls_otherwise_is_refused(there: Node, engine: Engine) -> None:
    image = images_of(load_node_project(there, print))[TARGETS[0], "cpu"]
    own = there.index.targets["vllm-0.8.5@cpu"]
    assert own.image is not None
    other = own.model_copy(update={"image": own.image.model_copy(update={"tag": "vllm-matrix/x:1"})})
    for targets in ({}, {"vllm-0.8.5@cpu": other}):
        index = there.index.model_copy(update={"targets": targets})
        with pytest.raises(BuildError, match="does not hold"):
            images.load(engine, there.bundle, index, image, print)  # type: ignore[arg-type]


# --- nothing is believed ---------------------------------------------------------------------------------------------

FAULTS: dict[str, Callable[[dict[str, Any], dict[str, Any]], object]] = {
    "a path above": lambda own, _: own["members"].update({"../x": own["frame"]}),
    "an absolute path": lambda own, _: own["members"].update({"/etc/x": own["frame"]}),
    "a path in disguise": lambda own, _: own["members"].update({"a/../../x": own["frame"]}),
    "no ID": lambda own, _: own.update(id="latest"),
    "no tag": lambda own, _: own.update(tag="--help"),
    "a stranger": lambda own, index: own["members"].update({"x": index["project"]}),
    "wheels": lambda _, index: index.update(kind="wheels"),
    "no image": lambda _, index: next(iter(index["targets"].values())).update(image=None),
}


def index_of(folder: Path, frame: bytes) -> Index:
    """Of a bundle of one image that has this frame, and one layer."""
    writer = Writer(folder / PARTS, 1 << 20, None)
    for file, data in {"frame": frame, "layer": b"x", "project": b""}.items():
        (folder / file).write_bytes(data)
    own, layer, project = (writer.add(as_it_is(folder / file)) for file in ("frame", "layer", "project"))
    image = ImageArchive(tag="x:1", id=f"sha256:{'0' * 64}", frame=own, members={"layer.tar": layer})
    return Index.model_validate(
        {
            "kind": "images",
            "python": "3.12",
            "platform": PLATFORM,
            "created": EPOCH,
            "revision": {"version": "1"},
            "contents": writer.contents,
            "parts": writer.parts,
            "launch": (),
            "project": project,
            "targets": {"x@cpu": TargetContents(contents=image.contents, image=image)},
        }
    )


@pytest.mark.parametrize("name", FAULTS)
def test_an_index_that_no_bundle_has_is_refused(tmp_path: Path, name: str) -> None:
    write_index(tmp_path, index_of(tmp_path, b"frame"))
    index = json.loads((tmp_path / FILE).read_text())
    FAULTS[name](index["targets"]["x@cpu"]["image"], index)
    (tmp_path / FILE).write_text(json.dumps(index))
    with pytest.raises(ConfigurationError, match="Carry the bundle over again"):
        read_index(tmp_path)


MANIFEST = ("manifest.json", b"[]")
FRAMES: dict[str, bytes] = {
    "a path above": tar_of([MANIFEST, ("../x", b"")]),
    "an absolute path": tar_of([MANIFEST, ("/x", b"")]),
    "a folder": tar_of([MANIFEST, ("x", None)]),
    "a link above": tar_of([MANIFEST, ("a/x", "../../x")]),
    "an absolute link": tar_of([MANIFEST, ("x", "/etc/passwd")]),
    "a layer twice": tar_of([MANIFEST, ("layer.tar", b"")]),
    "tags": tar_of([("manifest.json", b'[{"RepoTags": ["debian:latest"]}]')]),
    "old tags": tar_of([MANIFEST, ("repositories", b"{}")]),
    "new tags": tar_of([MANIFEST, ("index.json", b'{"io.containerd.image.name": "debian:latest"}')]),
    "no manifest": tar_of([("x", b"")]),
    "other JSON": tar_of([("manifest.json", b"{}")]),
    "no JSON": tar_of([("manifest.json", b"\xff")]),
    "no archive": b"x" * 2000,
}


@pytest.mark.parametrize("name", FRAMES)
def test_a_frame_that_no_image_has_is_refused(tmp_path: Path, name: str) -> None:
    index = index_of(tmp_path, FRAMES[name])
    image = index.targets["x@cpu"].image
    assert image is not None
    with pytest.raises(BuildError, match="frame of x:1 is none"):
        list(images.archive_of(tmp_path / PARTS, index, image))


# --- a real engine ---------------------------------------------------------------------------------------------------


@pytest.fixture
def real(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[DockerClient, Path, str]]:
    """A project whose cells run without vLLM, and the image of its target."""
    root = tmp_path / "home"
    template(root)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(make, "own_releases", lambda *_: ())  # the harness runs as it is
    monkeypatch.setattr(make, "find_builder", lambda environ: None)
    monkeypatch.setattr(models, "generate", lambda folder: folder.mkdir(parents=True, exist_ok=True) or {})
    project = load_project(root / "matrix.toml")
    (image,) = images_for(project, project.cells, build_options(project), "docker").values()
    with contextlib.closing(connect()) as client:
        made = make_image(client, "vllm-matrix-bundled")
        repository, _, tag = image.tag.rpartition(":")
        client.api.tag(made, repository, tag)
        try:
            yield client, root, image.tag
        finally:
            for name in (image.tag, made):
                with contextlib.suppress(ImageNotFound):
                    client.images.remove(name, force=True)


@pytest.mark.docker
@pytest.mark.timeout(600)
def test_an_image_is_bundled_removed_and_runs_from_the_bundle(
    real: tuple[DockerClient, Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, root, tag = real
    before = find_image(client, tag)
    assert before is not None
    project = load_project(root / "matrix.toml")
    there = Machine("3.12", PLATFORM)
    chosen = Selection(ids=["*/calm", "*/reader"])
    request = Request(
        config=root / "matrix.toml",
        to=tmp_path / "carry",
        machine=there,
        kind="images",
        selection=chosen,
        split=4 << 20,
    )
    made = make_bundle(project, request, build_options(project), print)
    client.images.remove(before.id, force=True)
    assert find_image(client, before.id) is None

    here = open_node(tmp_path / "carry", tmp_path / "work")
    for name, value in here.variables.items():
        monkeypatch.setenv(name, value)
    outcome = run_bundle(here, Wish(), Console(quiet=True))
    assert find_image(client, tag) == before, "the same ID, and its tag again"
    assert {square.status for square in outcome.matrix.squares} == {Status.PASS}
    packs = [unpack(path, tmp_path / "in" / path.name) for path in here.outbox.iterdir()]
    assert {pack.record.image.id for pack in packs if pack.record.image} == {before.id}
    digests = {one.cell.id: one.digest for one in read_plan(load_node_project(here, print).root).cells}
    assert {pack.record.cell: pack.record.digest for pack in packs} == digests

    client.images.remove(before.id, force=True)
    sizes = {part: size for part, size in made.index.parts.items() if size > 1 << 20}
    damaged = here.bundle / PARTS / next(reversed(sizes))
    damaged.write_bytes(bytes(damaged.stat().st_size))
    with pytest.raises(MatrixError, match="layer-"):
        loaded_really(here, tag)
    assert find_image(client, before.id) is None


def loaded_really(here: Node, tag: str) -> None:
    """Past the look at all parts that comes before."""
    project = load_node_project(here, print)
    plan = plan_here(project, Selection(), True, build_options(project), here.backend)
    tools = node.node_tools(here, project, plan, build_options(project), Console(quiet=True), None)
    (image,) = images_for(project, project.cells, build_options(project), "docker").values()
    assert image.tag == tag
    tools.build(image, here.work / "log", print)
