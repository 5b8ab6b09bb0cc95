"""What a check can ask for. Nothing here imports torch, transformers or vLLM before a check needs it."""

from __future__ import annotations

import functools
from types import TracebackType
from typing import TYPE_CHECKING, Any, Mapping

import pytest

from rig import events as rig_events
from rig.cell import Cell, read_cell
from rig.errors import DEVICE_FAULT
from rig.events import Events
from rig.outcomes import OracleError, Skipped
from rig.reference import Reference, read_reference

if TYPE_CHECKING:
    from rig.engine import Engine


class Engines:
    """The one engine of this process: made on first use, made anew after it died, never tried twice in vain."""

    def __init__(self) -> None:
        self._engine: Engine | None = None
        self._failure: tuple[BaseException, TracebackType | None] | None = None
        self.spent = False  # this process can have no further engine

    def get(self, cell: Cell, options: Mapping[str, Any] | None = None) -> Engine:
        """A living engine, started with ``options`` on top of the cell's.

        Raises what its init raised, for every check again but without paying for it again.
        """
        if self._failure is not None:
            exc, trace = self._failure
            raise exc.with_traceback(trace)
        if self._engine is not None and not self._engine.alive:
            self.close()
        if self._engine is None:
            self._engine = self._start(cell, options or {})
        return self._engine

    def close(self) -> None:
        """End the engine, if there is one; that it would not end well is a fact, and no check's failure."""
        engine, self._engine = self._engine, None
        try:
            if engine is not None:
                engine.close()
        except Exception as exc:
            rig_events.writer().property("engine.close.error", f"{type(exc).__name__}: {exc}", check=None)

    def give_up(self) -> None:
        """The same for an engine beyond repair. Where it slept in this process, no second one may follow in it.

        "Sleep mode can only be used for one instance per process." (0.8.2's AssertionError; cumem.py has one allocator)
        """
        facts = self._engine.properties() if self._engine is not None else {}
        own = facts.get("engine.layout") in ("in-process", "InprocClient")
        self.spent = own and "enable_sleep_mode=True" in facts.get("engine.options", ())
        self.close()

    def _start(self, cell: Cell, options: Mapping[str, Any]) -> Engine:
        from rig.engine import Engine

        try:
            return Engine(cell.model_dir(), cell.device, {**cell.engine_options, **options})
        except (Exception, Skipped) as exc:
            self._failure = (exc, exc.__traceback__)
            raise


_engines = Engines()


def close_engine() -> None:
    """When all checks have ended, not in the last check's teardown: closing is not what that check asked about."""
    _engines.close()


def is_spent() -> bool:
    """Whether this process can have no further engine, and the checks that are left need a fresh one."""
    return _engines.spent


def refuse(check: str) -> None:
    """Instead of a check, in a process whose device has failed in ``check`` and that no fresh one can follow."""
    raise OracleError(DEVICE_FAULT, f"not run: the device failed in {check}, and there is no fresh process left")


@functools.lru_cache(maxsize=None)
def _cell() -> Cell:
    return read_cell()


@pytest.fixture(scope="session")
def cell() -> Cell:
    """What this cell is."""
    return _cell()


@pytest.fixture(scope="session")
def events() -> Events:
    """The event writer of this process."""
    return rig_events.writer()


@pytest.fixture(scope="session")
def engines() -> Engines:
    """The holder of the engine, for a check that goes on after it killed one."""
    return _engines


@pytest.fixture
def engine_options() -> dict[str, Any]:
    """What the scenario asks of its engine beyond the cell's own options; a scenario file overrides this one."""
    return {}


@pytest.fixture
def engine(cell: Cell, engine_options: dict[str, Any]) -> Engine:
    """The living engine of this process, shared by all checks of the scenario."""
    return _engines.get(cell, engine_options)


@functools.lru_cache(maxsize=None)
def _processor(model_dir: str) -> Any:
    with rig_events.writer().phase("processor"):
        from transformers import AutoProcessor

        return AutoProcessor.from_pretrained(model_dir)


@pytest.fixture  # not of the session: pytest would load it before the engine, and its imports hide in no phase
def processor(cell: Cell) -> Any:
    """The Hugging Face processor of the model (the tokenizer, for a model without images): the independent count."""
    return _processor(str(cell.model_dir()))


@pytest.fixture(scope="session")
def reference(cell: Cell) -> Reference:
    """What a cold start of the same weights answered; raises OracleError ``no-reference`` when none was handed in."""
    return read_reference(cell)
