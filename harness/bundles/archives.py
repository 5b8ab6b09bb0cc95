"""What a bundle carries beside wheels: the project with its plan, and the harness. Same files, same bytes."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import harness
from harness.bundles.parts import file_sha256
from harness.bundles.store import Facts, Packed
from harness.images import Image
from harness.plan import Planned, not_runnable
from harness.planfile import read_plan, write_document, write_plan
from harness.project import Project
from harness.spec import CONFIG_NAME

HARNESS, PROJECT = "harness.tar", "project.tar"
_PLAN = "plan.json"
_NO_DAY = datetime(1980, 1, 1, tzinfo=UTC)  # the same plan is the same bundle, whenever it is made


def harness_tar(folder: Path) -> Packed:
    """The package itself, as it runs here."""
    root = Path(harness.__file__).parent
    return _packed(
        folder / HARNESS, {f"{root.name}/{path.relative_to(root).as_posix()}": path for path in _files(root)}
    )


def project_tar(
    project: Project, config: Path, plan: Sequence[Planned], images: Iterable[Image], folder: Path
) -> Packed:
    """matrix.toml and what it names, and the plan: what the same cells are planned from elsewhere."""
    write_plan(folder, "bundle", plan, not_runnable(project.spec))
    write_document(folder, read_plan(folder).model_copy(update={"created": _NO_DAY}))
    own = [path for image in images for path in (image.dockerfile, image.lock)]
    expectations = project.root / project.spec.expectations
    named = [*own, *_files(project.root / "docker"), *_files(project.suite), *filter(Path.is_file, [expectations])]
    files = {path.relative_to(project.root).as_posix(): path for path in named}
    return _packed(folder / PROJECT, {**files, CONFIG_NAME: config, _PLAN: folder / _PLAN})


def _files(root: Path) -> Iterator[Path]:
    """All but hidden ones and what Python makes of them."""
    for path in root.rglob("*"):
        names = path.relative_to(root).parts
        if path.is_file() and "__pycache__" not in names and not any(name.startswith(".") for name in names):
            yield path


def _packed(target: Path, files: Mapping[str, Path]) -> Packed:
    """Names sorted; no owners, no times."""
    with tarfile.open(target, "w") as archive:
        for name, path in sorted(files.items()):
            data = path.read_bytes()
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(data), 0o755 if path.stat().st_mode & 0o100 else 0o644
            archive.addfile(member, io.BytesIO(data))
    return as_it_is(target)


def as_it_is(file: Path) -> Packed:
    """A file as a content that is carried raw."""
    size = file.stat().st_size
    facts = Facts(
        name=file.name,
        sha256=file_sha256(file),
        bytes=size,
        encoding="raw",
        origin_bytes=size,
        data_bytes=size,
    )
    return Packed(facts, file)
