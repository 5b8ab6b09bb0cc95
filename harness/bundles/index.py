"""bundle.json: what a bundle holds, which parts each target needs, and what it was made from. Pure but for the file.

A bundle is a folder: `bundle.json`, the launcher `run`, and `parts/`, files named by their sha256. Contents are cut
into parts no larger than was asked for; what two targets share is there once, and a part that has been carried over
once does not have to be carried again for the next bundle.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from harness.errors import ConfigurationError, NothingSelectedError
from harness.events import Text, read_untrusted
from harness.records import Revision, write_atomic

FILE = "bundle.json"
PARTS = "parts"
MAX_INDEX = 64 << 20  # bytes

Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Bytes = Annotated[int, Field(ge=0, lt=1 << 50)]
Kind = Literal["wheels", "images"]
# A file of a wheelhouse, or of an archive; never a path.
FileName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._+!@-]*$", max_length=255)]

# A file in the archive of an image: below its folder, and no name is hidden.
PLACE = r"^[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)*$"
Place = Annotated[str, StringConstraints(pattern=PLACE, max_length=255)]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)


class Content(_Model):
    """One file: its name, and how it is put together again. `bytes` of the whole file, `parts` in their order.

    `zstd`: the parts one after the other are one zstd stream of it. `origin`: sha256 of the file as the package index
    gave it, where it was packed again: a lock names that one.
    """

    name: FileName
    bytes: Bytes
    encoding: Literal["raw", "zstd"]
    parts: Annotated[tuple[Sha256, ...], Field(min_length=1, max_length=100_000)]
    origin: Sha256 | None = None


class Borrowed(_Model):
    """A distribution that the node brings itself. `record`: the content that holds its wheel's RECORD."""

    version: Text
    record: Sha256


class ImageArchive(_Model):
    """An image as Docker saves it, a tar archive taken apart.

    `frame`: the content that holds its small files, a tar archive too. `members`: contents of the large ones, by where
    they lie in the archive.
    """

    tag: Annotated[
        str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9./_-]*:[A-Za-z0-9_][A-Za-z0-9._-]*$", max_length=255)
    ]
    id: Annotated[str, StringConstraints(pattern=r"^sha256:[0-9a-f]{64}$")]
    frame: Sha256
    members: Annotated[dict[Place, Sha256], Field(max_length=1_000)]

    @property
    def contents(self) -> tuple[Sha256, ...]:
        return tuple(dict.fromkeys([self.frame, *self.members.values()]))


class TargetContents(_Model):
    """What a target on a device needs beyond what all need; distributions are named canonically.

    `image`: how its contents make an image, in a bundle of images.
    """

    contents: tuple[Sha256, ...]
    borrowed: dict[Text, Borrowed] = {}
    image: ImageArchive | None = None


class Index(_Model):
    """The whole of bundle.json. `contents` by their sha256, `parts`: bytes by sha256, `targets` by `target@device`.

    `launch`: what the launcher takes, uv and the harness with what it imports, raw; `project`: the folder of
    matrix.toml, with the plan, as a tar archive. `platform` is the oldest that the wheels run on, as uv names it.
    """

    schema_version: Annotated[Literal[1], Field(alias="schema")] = 1
    kind: Kind
    python: Annotated[str, StringConstraints(pattern=r"^3\.\d+$")]
    platform: Text
    created: AwareDatetime
    revision: Revision
    contents: Annotated[dict[Sha256, Content], Field(max_length=100_000)]
    parts: Annotated[dict[Sha256, Bytes], Field(max_length=1_000_000)]
    launch: tuple[Sha256, ...]
    project: Sha256
    targets: dict[Text, TargetContents]

    @model_validator(mode="after")
    def _names_resolve(self) -> Index:
        named = {*self.launch, self.project}
        for name, target in self.targets.items():
            if (target.image is not None) != (self.kind == "images"):
                raise ValueError(f"a bundle of {self.kind} does not hold what it says of {name}")
            if target.image is not None and set(target.image.contents) - set(target.contents):
                raise ValueError(f"the image of {name} is made of contents that are not the target's")
            named.update(target.contents, (borrowed.record for borrowed in target.borrowed.values()))
        if strangers := named - set(self.contents):
            raise ValueError(f"content {min(strangers)} is named and not described")
        for sha256, content in self.contents.items():
            if missing := set(content.parts) - set(self.parts):
                raise ValueError(f"part {min(missing)} of content {sha256} is not described")
        return self

    def of(self, targets: Iterable[str]) -> tuple[Sha256, ...]:
        """The contents that these targets need, each once: the launcher's, the project's, theirs.

        Raises NothingSelectedError for a target that the bundle does not hold.
        """
        needed = [*self.launch, self.project]
        for name in targets:
            if name not in self.targets:
                raise NothingSelectedError(
                    f"the bundle does not hold {name}", f"It holds {', '.join(self.targets) or 'no target'}."
                )
            own = self.targets[name]
            needed += [*own.contents, *(borrowed.record for borrowed in own.borrowed.values())]
        return tuple(dict.fromkeys(needed))

    def parts_of(self, contents: Iterable[Sha256]) -> Mapping[Sha256, int]:
        """Bytes by part, each once, in the order in which they are needed."""
        return {part: self.parts[part] for sha256 in contents for part in self.contents[sha256].parts}


def write_index(folder: Path, index: Index) -> None:
    write_atomic(folder / FILE, index.model_dump_json(by_alias=True, indent=1) + "\n")


def read_index(folder: Path) -> Index:
    """Raises ConfigurationError where the folder holds no bundle, or one that this version cannot read."""
    data = read_untrusted(folder / FILE, MAX_INDEX)
    if data is None:
        raise ConfigurationError(f"{folder} holds no bundle", f"It has no {FILE} that can be read.")
    try:
        return Index.model_validate_json(data)
    except ValidationError as error:
        fault = error.errors()[0]
        where = ".".join(str(part) for part in fault["loc"]) or "(top)"
        raise ConfigurationError(
            f"{folder / FILE}: {where}: {fault['msg']}"[:500], "Carry the bundle over again, or make it again."
        ) from error


def identity(index: Index) -> str:
    """16 hexadecimal digits over everything but the day on which it was made."""
    facts = index.model_dump(mode="json", by_alias=True, exclude={"created"})
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
