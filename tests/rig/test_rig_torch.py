"""What only a real torch can show; skipped where there is none (``pytest tests/rig/test_rig_torch.py`` elsewhere)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.rig.run import SUITE

torch = pytest.importorskip("torch")

MEET = """
import sys
from pathlib import Path
from rig.barrier import Barrier, Gloo
from rig.events import Events
import torch.distributed
rank = int(sys.argv[1])
barrier = Barrier(Gloo(Path(sys.argv[2]), rank, 2, 30), Events(Path(sys.argv[2]), rank))
assert [barrier() for _ in range(5)] == [0, 1, 2, 3, 4]
assert not torch.distributed.is_initialized()
"""


def test_gloo_ranks_meet_without_a_default_group(tmp_path: Path) -> None:
    from rig.barrier import meetings
    from rig.marks import Listener

    listener = Listener(tmp_path, 2)
    environ = {**os.environ, "PYTHONPATH": str(SUITE), "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-c", MEET]
    ranks = [subprocess.Popen([*command, str(rank), str(tmp_path)], env=environ) for rank in range(2)]
    assert [rank.wait(timeout=90) for rank in ranks] == [0, 0]
    listener.listen()
    assert sorted(meetings(listener.marks)) == list(range(5))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_checksum_of_merged_and_padded_parameters(dtype: str) -> None:
    from rig.weights import checksum

    q, k = (torch.randn(8, 4).to(getattr(torch, dtype)) for _ in range(2))
    merged = torch.cat([q, k, torch.zeros(3, 4, dtype=q.dtype)])
    assert checksum([q, k]) == checksum([merged]) == checksum([merged.t()])
    k[0, 0] += 1
    assert checksum([q, k]) != checksum([merged])
