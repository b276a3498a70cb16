"""Starts Jupyter kernels one after another until each has answered a cell; runs in Jupyter's environment.

    python -m benchmarks.peers.jupyter_kernels COUNT

Prints seconds until the answer and MiB (PSS, all alive) of each kernel as JSON. Imports nothing from forge_rl.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from jupyter_client.manager import start_new_kernel


def main(count: int) -> None:
    kernels, starts = [], []
    try:
        for n in range(count):
            began = time.perf_counter()
            manager, client = start_new_kernel()
            kernels.append((manager, client))
            client.execute_interactive(f"x = {n}", timeout=60)
            starts.append(time.perf_counter() - began)
        mib = [_pss_mib(manager.provisioner.process.pid) for manager, _ in kernels]
    finally:
        for manager, client in kernels:
            client.stop_channels()
            manager.shutdown_kernel(now=True)
    print(json.dumps({"start_s": starts, "mib": mib}))


def _pss_mib(pid: int) -> float:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024


if __name__ == "__main__":
    main(int(sys.argv[1]))
