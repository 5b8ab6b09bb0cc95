"""Look at each target once before its cells run: is it what its lock says, and what can it do?"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from harness import models
from harness.backends.base import Backend, Launch
from harness.cells import Resources
from harness.errors import BuildError, ConfigurationError, InfrastructureError
from harness.images import Image
from harness.job import Context
from harness.needs import Pair, differs
from harness.probes import COMMAND, DEADLINE, QUESTION, Known, Probe, run_probe, shelf
from harness.records import ImageRef
from harness.share import Share
from harness.spec import MatrixSpec
from harness.stop import Stop, aside
from harness.targets import TargetFacts, declared, examined
from harness.views.terminal import Progress

RESOURCES = Resources(cpus=2.0, memory=6 << 30, shm=1 << 30, gpus=0)
SHOWN = 10  # differences that an error names


@dataclass(frozen=True, kw_only=True)
class Built:
    """The image of a target; `seconds`: None where it was there."""

    image: ImageRef
    bytes: int
    seconds: float | None


@dataclass(frozen=True, kw_only=True)
class Look:
    """What is known of a target on a device. `failed`: its cells must not run; `known`: what its probe found."""

    facts: TargetFacts
    known: Known | None = None
    failed: BuildError | None = None


@dataclass(frozen=True, kw_only=True)
class Examiner:
    """Probes targets in the folder of a run, or takes what is kept of an earlier probe of the same image."""

    spec: MatrixSpec
    context: Context
    backend: Backend
    progress: Progress
    stop: Stop
    folder: Path
    share: Share
    patience: float = 1.0  # stretches the deadline

    def look(self, pair: Pair, image: Image, built: Built | None) -> Look:
        """All about a target; without an image built in this run, only what is kept.

        Raises KeyboardInterrupt when the run is to stop.
        """
        facts = declared(self.spec, *pair)
        if built is not None:
            update = {"image": built.image, "image_bytes": built.bytes, "build_seconds": built.seconds}
            facts = facts.model_copy(update=update)
        try:
            known = self._known(pair, image, built)
        except ValueError as error:
            self.progress.say(f"probe  {_name(pair)} left nothing of use, its cells run as they are: {error}")
            return Look(facts=facts.model_copy(update={"error": f"not probed: {error}"}))
        if known is None:
            return Look(facts=facts)
        facts = examined(facts, known)
        failed = self._held_against_lock(pair, image, known)
        if failed is not None:
            facts = facts.model_copy(update={"error": failed.message})
        return Look(facts=facts, known=known, failed=failed)

    def _known(self, pair: Pair, image: Image, built: Built | None) -> Known | None:
        kept = shelf(self.context.suite, models.digest())
        environment = self.spec.environment_of(*pair)
        known = kept.find(image.tag, pair[1], environment, built.image.id if built else None)
        if known is None and built is not None:
            known = self._probe(pair, built, environment)
            kept.keep(known, environment)
        return known

    def _probe(self, pair: Pair, built: Built, environment: Mapping[str, str]) -> Known:
        name = _name(pair)
        with self.progress.doing(f"probe {name}") as say:
            probe, seconds = aside(lambda: self._leased(pair, built, environment, say), self.stop, "probe")
        lacking = [capability.name for capability in probe.capabilities if not capability.available]
        told = probe.trouble or (f"without {', '.join(lacking)}" if lacking else "lacks nothing")
        self.progress.say(f"probe  {name}, {seconds:.0f} s: {told}")
        return Known(image=built.image, image_bytes=built.bytes, seconds=seconds, probe=probe)

    def _leased(
        self, pair: Pair, built: Built, environment: Mapping[str, str], say: Callable[[str], None]
    ) -> tuple[Probe, float]:
        """The probe and its seconds, with what it needs of the host: a GPU of its own on a device that has some."""
        try:
            with self.share.wait(_resources(pair), f"the probe of {_name(pair)}", say, self.stop) as lease:
                gpus = self.share.ready(lease, self.stop)
                if gpus is None:
                    raise KeyboardInterrupt
                say("")
                begun = time.monotonic()
                launch = self._launch(pair, built, environment, gpus.uuids)
                probe = run_probe(self.backend, launch, DEADLINE * self.patience, self.stop)
                return probe, round(time.monotonic() - begun, 1)
        except InfrastructureError as error:
            raise ValueError(error.message) from error

    def _launch(self, pair: Pair, built: Built, environment: Mapping[str, str], gpus: tuple[str, ...] = ()) -> Launch:
        name = f"vllm-matrix-{self.context.run}-probe-{pair[0]}--{pair[1]}-{secrets.token_hex(2)}"
        labels = {"run": self.context.run, "probe": _name(pair), "owner": self.context.owner}
        return Launch(
            name=name,
            image=built.image.id,
            folder=self.folder / "probes" / _name(pair),
            suite=self.context.suite,
            models=self.context.models,
            environment=environment,
            labels={f"vllm-matrix.{key}": value for key, value in labels.items()},
            resources=_resources(pair),
            gpus=gpus,
            command=(*COMMAND, pair[1], f"{QUESTION * self.patience:g}"),
        )

    def _held_against_lock(self, pair: Pair, image: Image, known: Known) -> BuildError | None:
        try:
            lines = differs(self.spec, pair, image, known)
        except ConfigurationError as error:
            return BuildError(f"{image.lock}: {error.message}", "Make it again: `vllm-matrix lock`.")
        if not lines:
            return None
        more = (f"and {len(lines) - SHOWN} more",) if len(lines) > SHOWN else ()
        return BuildError(
            f"what is installed is not what the lock says: {'; '.join((*lines[:SHOWN], *more))}",
            "Mend the Dockerfile, or name in `unlocked` what is meant to be there.",
            log_tail="\n".join(lines),
        )


def unbuilt(spec: MatrixSpec, pair: Pair, error: BuildError) -> Look:
    """All that is known of a target without an image."""
    return Look(facts=declared(spec, *pair).model_copy(update={"error": f"build: {error.message}"}), failed=error)


def _resources(pair: Pair) -> Resources:
    return replace(RESOURCES, gpus=1) if pair[1] == "cuda" else RESOURCES


def _name(pair: Pair) -> str:
    return "@".join(pair)
