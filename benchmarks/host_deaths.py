"""Time until a host that dies, or stops to answer, counts as lost.

python -m benchmarks.host_deaths --json out.json

Each host is processes of this machine: an agent and a process of a service. They are ended (SIGKILL) or stopped
(SIGSTOP) together, and nothing tells the controller: it has to notice that nobody there answers.
"""

from __future__ import annotations

import asyncio
import signal
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil  # type: ignore[import-untyped]
from monarch.actor import concurrent_endpoint

from benchmarks.report import LEAST_REPEATS, BenchmarkConfig, BenchmarkError, Report, check_repeats, run_benchmark
from forge_rl.jobs.process import local_hosts
from forge_rl.runtime.cluster import Cluster
from forge_rl.runtime.faults import Faults
from forge_rl.runtime.service import Service, ServiceActor

SIGNALS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}
"""What ends a host, by the result's name."""
_WITNESS = "witness"
"""Host that always answers, so that silence is not this process's own."""
_DEADLINE_S = 600.0


@dataclass(frozen=True, kw_only=True)
class Config(BenchmarkConfig):
    """Measure how soon the death of a host is noticed."""

    repeats: int = LEAST_REPEATS
    """Hosts that are killed, and hosts that are stopped, one after the other."""
    smoke: bool = False
    """One host of each: checks that everything runs; measures nothing."""

    def __post_init__(self) -> None:
        check_repeats(self.repeats)


def measure(config: Config, report: Report) -> None:
    """Kill and stop all hosts but one."""
    if config.smoke:
        report.benchmark += " (smoke: no measurement)"
    for name, seconds in asyncio.run(_noticed_s(1 if config.smoke else config.repeats)).items():
        report.measure(f"noticed_s_{name}", seconds)
        report.results[f"noticed_s_{name}_max"] = max(seconds)


class IdleActor(ServiceActor):
    """A process of a service that has nothing to do."""

    @concurrent_endpoint
    async def ready(self) -> None:
        """Answer."""


async def _noticed_s(repeats: int) -> dict[str, list[float]]:
    """Return the seconds from a signal to all processes of a host until it counts as lost: `repeats` hosts for each of
    SIGNALS.

    Raises:
        BenchmarkError: a host was not noticed within ten minutes.
    """
    doomed_hosts = [f"{name}{number}" for name in SIGNALS for number in range(repeats)]
    seconds: dict[str, list[float]] = {name: [] for name in SIGNALS}
    with tempfile.TemporaryDirectory(prefix="host-deaths-") as logs:
        faults = Faults()
        faults.install()
        async with local_hosts([_WITNESS, *doomed_hosts]) as meshes:
            cluster = Cluster(Path(logs), hosts=meshes)
            service = Service("idle", cluster, faults)
            try:
                for host in (_WITNESS, *doomed_hosts):
                    await service.watch(service.spawn(IdleActor, host=host), deadline_s=_DEADLINE_S)
                pids = _pids_by_host()
                for host in doomed_hosts:
                    name = host.rstrip("0123456789")
                    seconds[name].append(await _seconds_until_lost(cluster, host, pids[host], SIGNALS[name]))
                    print(f"host {name}: noticed after {seconds[name][-1]:.2f} s", flush=True)
                await service.stop()
            finally:
                faults.closing = True
                await cluster.close()
    return seconds


async def _seconds_until_lost(cluster: Cluster, host: str, pid: int, number: signal.Signals) -> float:
    # Found before the first signal: children of a process that is gone belong to init.
    processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    began = time.perf_counter()
    try:
        for process in processes:
            process.send_signal(number)
        if not await cluster.is_lost(host, within_s=_DEADLINE_S):
            raise BenchmarkError(f"host {host} was not noticed within {_DEADLINE_S:g} s")
        return time.perf_counter() - began
    finally:
        for process in processes:
            if process.is_running():
                process.kill()


def _pids_by_host() -> dict[str, int]:
    """Return the first process of each host that `local_hosts` has started, by the name that Monarch gives it."""
    names = {child.environ().get("HYPERACTOR_PROCESS_NAME", ""): child.pid for child in psutil.Process().children()}
    return {name.rpartition("_")[0]: pid for name, pid in names.items() if name}


if __name__ == "__main__":
    run_benchmark("host_deaths", Config, measure)
