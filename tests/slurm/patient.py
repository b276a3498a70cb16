"""A recipe that only waits, with a process on each host, and counts on in its folder like a run that is resumed.

python -m tests.slurm.patient --out FOLDER --job slurm:nodes=2
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass
from pathlib import Path

from monarch.actor import Actor, endpoint

from forge_rl.run.launch import launch
from forge_rl.runtime.job_flag import build_job
from forge_rl.runtime.job_protocol import Job, JobListener


class Where(Actor):
    """Tells on which node it is."""

    @endpoint
    async def node(self) -> str:
        return os.environ.get("SLURMD_NODENAME", "")


@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of the recipe."""

    job: str = "local"
    """Where hosts come from."""
    out: Path | None = None
    """The folder."""
    dry_run: bool = False
    """Whether to show what the job would start."""
    seconds: float = 600.0
    """How long to wait."""
    fail: bool = False
    """Whether to exit with status 7 then."""


async def main(config: Config) -> None:
    job = build_job(config.job)
    assert isinstance(job, Job)
    assert config.out is not None
    lost = asyncio.Event()

    def gone(name: str, cause: str) -> None:
        print(f"{name} is lost: {cause}", flush=True)
        lost.set()

    async with job.open(JobListener(say=print, on_lost=gone)) as hosts:
        nodes = [
            await host.slice(hosts=0).spawn_procs(per_host={"ranks": 1}).spawn("where", Where).node.call_one()
            for host in hosts.values()
        ]
        saved = config.out / "saved"
        step = int(saved.read_text()) if saved.exists() else 0
        print(f"goes on from {step} on {' '.join(nodes)}", flush=True)
        try:
            async with asyncio.timeout(config.seconds):
                await lost.wait()
            raise ExceptionGroup("a host is lost", [RuntimeError()])
        except TimeoutError:
            if config.fail:
                os._exit(7)
            print("done", flush=True)
        except asyncio.CancelledError:
            await asyncio.sleep(1)  # a save takes a while
            saved.write_text(str(step + 1))
            print(f"saved {step + 1}", flush=True)
            raise


if __name__ == "__main__":
    launch(Config, main)
