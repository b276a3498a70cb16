"""Runs in the guest of test_sandbox_unified.py: prints as JSON what came of attacks on memory and processes."""

import asyncio
import json
import os
import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from forge_rl.sandbox import Limits, Pool, SandboxError

LIMITS = Limits(wall_s=30, memory_bytes=96 << 20, processes=16, scratch_bytes=4 << 20, scratch_files=64)
MEMORY = "x = bytearray(b'x') * (300 << 20)"
FORKS = "import os\nwhile True:\n  try: os.fork()\n  except OSError: break\nwhile True: pass"
READ = ("memory.max", "memory.oom.group", "pids.max", "cpu.max")


def groups() -> list[Path]:
    """All cgroups of sandbox servers."""
    return list(Path("/sys/fs/cgroup").rglob("forge_rl-sandbox-*"))


async def main(profile: str) -> dict[str, object]:
    report: dict[str, object] = {"profile": profile, "uid": os.geteuid()}
    try:
        async with Pool(profile=profile, servers=1, warm=0):
            pass
    except SandboxError as error:
        report["refused"] = str(error)
    try:
        async with Pool(profile=profile, limits=LIMITS, servers=1, warm=0, without=["landlock"]) as pool:
            for name, code, wall_s in (("memory", MEMORY, 30), ("forks", FORKS, 1)):
                async with pool.session() as session:
                    run = ["python3", "-c", code] if profile == "process" else code
                    [group] = groups()[0].glob("[0-9]*")
                    report["limits"] = {limit: (group / limit).read_text().strip() for limit in READ}
                    result = await session.run(run, wall_s=wall_s)
                    report[name] = result.error and result.error.name
                    report[f"alive after {name}"] = session.alive
    except SandboxError as error:
        report["refused again"] = str(error)
    return report | {"left": len(groups())}


warnings.simplefilter("ignore")
print("FOUND", json.dumps(asyncio.run(main(sys.argv[1]))), flush=True)
