"""``python3 -m rig.spmd``: what every rank does, single program, multiple data.

Stages, each behind a barrier and reported when it ends: ``start`` an engine, answer ``greedy`` and ``sampled`` prompts,
look at ``weights``, meet ``idle`` a few times, end the engine. Nothing is compared here: a rank knows only itself.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import sys
from pathlib import Path
from typing import Any, Callable

from rig import launcher
from rig.barrier import Barrier, Gloo
from rig.batches import BATCHES, SAMPLED, batches_for
from rig.cell import Cell, read_cell
from rig.engine import Engine, load_vllm, prepare_environment
from rig.events import Events, writer
from rig.outcomes import NotAvailable, Skipped
from rig.reference import answered
from rig.reports import Reports, fact
from rig.weights import checkpoint_checksum, engine_checksum

GREEDY = ("text", "one_image", "two_images")
IDLE_BARRIERS = 20

# From LLM.sample to torch's global generator: only the engine's seed decides (vllm#15895: ranks without one part).
UNSEEDED = {name: value for name, value in SAMPLED.items() if name != "seed"}

IN_PROCESS = ("in-process", "InprocClient")  # engine.layout where the engine samples in this process


def main() -> int:
    """Run one rank to its end; 1 when it raised, or found that it cannot be asked."""
    rank = int(os.environ.get("VLLM_MATRIX_RANK") or os.environ["RANK"])  # ours, or torchrun's
    os.environ["VLLM_MATRIX_RANK"] = str(rank)
    reports = Reports(Path(os.environ[launcher.FOLDER]))
    reports.write(rank, launcher.ALIVE, {"pid": os.getpid()})
    try:
        Rank(read_cell(), rank, reports, writer()).run()
    except (Exception, Skipped) as exc:
        reports.fail(rank, exc)
        return 1
    return 0


class Rank:
    """One rank of a cell: ``layout`` dp (an engine a rank) or tp (one engine over all ranks)."""

    def __init__(self, cell: Cell, rank: int, reports: Reports, events: Events) -> None:
        self.cell = cell
        self.rank = rank
        self._reports = reports
        self._events = events
        self._engine: Engine

    def run(self) -> None:
        """All stages. The engine is in-process on V1 too, as in a training loop that reaches into it (verl)."""
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        prepare_environment(self.cell.device)
        self._require()
        with self._events.phase("group"):
            self._barrier = Barrier(self._transport(), self._events)
        for stage in (self.start, self.greedy, self.sampled, self.weights, self.idle):
            self._stage(stage)
        self._engine.close()
        self._reports.write(self.rank, launcher.FINISHED, {"barrier": self._barrier()})

    def start(self) -> dict[str, Any]:
        """Facts of the started engine."""
        self._engine = Engine(self.cell.model_dir(), self.cell.device, {**self.cell.engine_options, **self._options()})
        facts = {name: value for name, value in self._engine.properties().items() if name.startswith("engine.")}
        return {"pid": os.getpid(), "facts": facts, "device": fact(self._device), "rng": fact(self._rng)}

    def greedy(self) -> dict[str, Any]:
        """Answers by batch name; those with images only where the model takes them."""
        config = json.loads((self.cell.model_dir() / "config.json").read_text(encoding="utf-8"))
        asked = [batch for batch in batches_for("vision_config" in config) if batch.name in GREEDY]
        answers = {b.name: answered(self._engine.generate(b.requests(None), b.sampling)) for b in asked}
        return {"batches": answers, "rng": fact(self._rng)}

    def sampled(self) -> dict[str, Any]:
        """The text batch at temperature 1, without a seed of its own."""
        outputs = self._engine.generate(BATCHES["text"].requests(None), UNSEEDED)
        return {"batches": {"text": answered(outputs)}, "rng": fact(self._rng)}

    def weights(self) -> dict[str, Any]:
        """Checksums of the engine's weights and, by rank 0 for all, of the checkpoint."""
        folder = self.cell.model_dir()
        drive = self._engine.drive
        found = {"engine": fact(lambda: drive("checksum", engine_checksum))}
        if self.rank == 0:
            found["checkpoint"] = fact(lambda: drive("checksum", lambda llm: checkpoint_checksum(llm, folder)))
        return found

    def idle(self) -> dict[str, Any]:
        """The numbers of barriers without work between them."""
        return {"barriers": [self._barrier() for _ in range(IDLE_BARRIERS)]}

    def _stage(self, work: Callable[[], dict[str, Any]]) -> None:
        name = work.__name__
        barrier = self._barrier()
        with self._events.marked(name):
            found = work()
        self._reports.write(self.rank, name, {"barrier": barrier, **found})

    def _transport(self) -> Gloo:
        # longer than anybody waits: who ends a hang is the launcher, which sees all ranks
        return Gloo(self._reports.folder, self.rank, self.cell.ranks, self.cell.deadlines["total"])

    def _require(self) -> None:
        """Before ranks meet: devices enough, and for one engine over all ranks a platform that has it."""
        tensor_parallel = self.cell.params.get("layout", "").startswith("tp")
        if self.cell.device == "cuda":
            _require_devices(self.cell.ranks if tensor_parallel else 1)
        if tensor_parallel and self.rank == 0:
            require_external_launcher(self.cell.device, self.cell.model_dir(), self.cell.ranks)

    def _options(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if self.cell.device == "cuda":  # the blocks must be counted by each rank for a comparison to say anything
            found["num_gpu_blocks_override"] = None
        if self.cell.params.get("layout", "").startswith("tp"):
            found |= {"tensor_parallel_size": self.cell.ranks, "distributed_executor_backend": "external_launcher"}
        return found

    def _device(self) -> str:
        if self.cell.device != "cuda":
            raise NotAvailable("a CPU has no identity", "device of the cell")
        import torch

        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        if not hasattr(properties, "uuid"):
            raise NotAvailable("torch does not tell a device's UUID", "torch.cuda.get_device_properties")
        return str(properties.uuid)

    def _rng(self) -> dict[str, str]:
        """A digest of each random generator that an engine in this process may seed or draw from."""
        layout = self._engine.properties()["engine.layout"]
        if layout not in IN_PROCESS:
            raise NotAvailable("the engine samples in another process", f"engine.layout={layout}")
        import numpy as np
        import torch

        _, keys, *rest = np.random.get_state()
        states: dict[str, Any] = {"python": random.getstate(), "numpy": [keys.tolist(), *rest]}
        states["torch"] = torch.get_rng_state().tolist()
        if torch.cuda.is_available():
            states["cuda"] = torch.cuda.get_rng_state().tolist()
        return {name: _digest(state) for name, state in states.items()}


def require_external_launcher(device: str, model_dir: Path, count: int) -> None:
    """Raises NotAvailable where the version has no such executor, or the platform puts another one in its place.

    Asked of the configuration itself: 0.6.3 refuses the word, the CPU platform of later ones falls back to ``mp``.
    """
    args = load_vllm(device)["EngineArgs"]
    probe = "EngineArgs(distributed_executor_backend='external_launcher').create_engine_config()"
    wanted = {"tensor_parallel_size": count, "distributed_executor_backend": "external_launcher", "seed": 0}
    try:
        config = args(model=str(model_dir), **wanted).create_engine_config()
    except ValueError as exc:
        if "distributed executor backend" not in str(exc).lower():
            raise
        raise NotAvailable("no executor external_launcher", probe) from exc
    found = config.parallel_config.distributed_executor_backend
    if found != "external_launcher":
        raise NotAvailable(f"the platform runs external_launcher as {found}", probe)


def _require_devices(count: int) -> None:
    import torch

    seen = torch.cuda.device_count()
    if seen < count:
        raise Skipped(f"a rank needs {count} visible GPUs, here it sees {seen}")


def _digest(state: Any) -> str:
    return hashlib.sha256(repr(state).encode()).hexdigest()[:16]


if __name__ == "__main__":
    sys.exit(main())
