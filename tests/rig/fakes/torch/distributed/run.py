"""torchrun: starts the ranks with its own variables, ends them all when one fails."""

import os
import subprocess
import sys
import time

count = int(next(word for word in sys.argv if word.startswith("--nproc-per-node=")).partition("=")[2])
module = sys.argv[sys.argv.index("-m") + 1]
common = {**os.environ, "WORLD_SIZE": str(count), "TORCHELASTIC_USE_AGENT_STORE": "True"}
ranks = [
    subprocess.Popen([sys.executable, "-m", module], env={**common, "RANK": str(rank)}, start_new_session=True)
    for rank in range(count)
]
while any(rank.poll() is None for rank in ranks) and not any(rank.poll() for rank in ranks):
    time.sleep(0.02)
for rank in ranks:
    rank.kill()
sys.exit(int(any(rank.wait() for rank in ranks)))
