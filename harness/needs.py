"""What cells need of their target, and which of them therefore do not exist there: NA, and nothing is started."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from harness import models
from harness.cells import Cell
from harness.errors import ConfigurationError
from harness.images import Image
from harness.locks import changes_of
from harness.plan import Unmet
from harness.probes import Known, differences, shelf, unexplained
from harness.spec import MatrixSpec, ScenarioSpec

Pair = tuple[str, str]  # target, device


def needs_of(spec: MatrixSpec, cell: Cell) -> tuple[str, ...]:
    """Capabilities without which the cell cannot be: its model's, its own, those of the reference that it reads."""
    scenario = spec.scenarios[cell.scenario]
    model = (f"model.{cell.params['model']}",) if "model" in cell.params else ()
    reference = _asked(spec.scenarios[scenario.reference], cell.params) if scenario.reference else ()
    return tuple(dict.fromkeys((*model, *_asked(scenario, cell.params), *reference)))


def _asked(scenario: ScenarioSpec, params: Mapping[str, str]) -> tuple[str, ...]:
    conditions = {"*", *(f"{name}={value}" for name, value in params.items())}
    return tuple(name for condition, names in scenario.needs.items() if condition in conditions for name in names)


def unmet(spec: MatrixSpec, cells: Iterable[Cell], known: Mapping[Pair, Known]) -> dict[str, Unmet]:
    """By cell id: what is lacking, for each cell of which a probe says so. What was not probed lacks nothing."""
    found = {}
    for cell in cells:
        probe = known.get((cell.target, cell.device))
        if probe is not None and (reason := probe.probe.lack(needs_of(spec, cell))):
            found[cell.id] = Unmet(reason=reason, known=probe)
    return found


def kept(spec: MatrixSpec, suite: Path, images: Mapping[Pair, Image]) -> dict[Pair, Known]:
    """Earlier probes of these images that still say what the locks say. Starts nothing."""
    from_earlier = shelf(suite, models.digest())
    found = {}
    for pair, image in images.items():
        known = from_earlier.find(image.tag, pair[1], spec.environment_of(*pair))
        if known is not None and not _differs(spec, pair, image, known):
            found[pair] = known
    return found


def _differs(spec: MatrixSpec, pair: Pair, image: Image, known: Known) -> bool:
    try:
        return bool(differs(spec, pair, image, known))
    except ConfigurationError:
        return True


def differs(spec: MatrixSpec, pair: Pair, image: Image, known: Known) -> tuple[str, ...]:
    """What is installed otherwise than lock and matrix.toml say, or its packages ask for.

    Raises ConfigurationError for a broken lock.
    """
    own = spec.targets[pair[0]].on(pair[1])
    stack = spec.stacks[own.stack].requires if own.stack else ()
    changes = [change for _, change in changes_of(spec, own)]
    lock = image.lock.read_text(encoding="utf-8")
    return (
        *differences(known.probe, lock, own.distribution, own.unlocked),
        *unexplained(known.probe, changes, stack),
    )
