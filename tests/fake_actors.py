"""A fake service of real actors on real processes. Imports little, as each of its processes imports it."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import itertools
import os
import signal
import subprocess
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
from monarch.actor import concurrent_endpoint, current_rank

from forge_rl.jobs.process import local_hosts
from forge_rl.runtime.cluster import Cluster, SpawnedMesh, _scratch
from forge_rl.runtime.faults import Faults
from forge_rl.runtime.fork_client import FORK_MODULES
from forge_rl.runtime.service import Service, ServiceActor

if TYPE_CHECKING:
    from forge_rl.weights.transports.protocol import Transport


_RUNS = (psutil.STATUS_RUNNING, psutil.STATUS_SLEEPING, psutil.STATUS_DISK_SLEEP)


class FakeActor(ServiceActor):
    """Does what it is told."""

    def __init__(self, name: str = "") -> None:
        self._name = name
        self._gate = asyncio.Event()
        self._ended: list[str] = []
        self._posts = 0

    @concurrent_endpoint
    async def echo(self, value: object) -> tuple[str, object]:
        return self._name, value

    @concurrent_endpoint
    async def fail(self, error: Exception) -> None:
        raise error

    @concurrent_endpoint
    async def hang(self) -> None:
        await self._gate.wait()

    @concurrent_endpoint
    async def release(self) -> None:
        """Let go on what waits now."""
        self._gate.set()
        self._gate = asyncio.Event()

    @concurrent_endpoint
    async def exit(self, status: int) -> None:
        os._exit(status)

    @concurrent_endpoint
    async def rank_of(self, rank: int, fails: int | None = None) -> int:
        """Its rank; or the rank that fails does, and all others hang, as in a collective."""
        if fails == rank:
            raise ValueError(f"rank {rank} says no")
        if fails is not None:
            await self._gate.wait()
        return rank

    @concurrent_endpoint
    async def say(self, text: str) -> None:
        """Print, natively and from a child too."""
        print(text, flush=True)
        os.write(2, f"natively {text}\n".encode())
        child = await asyncio.create_subprocess_exec("echo", f"child {text}")
        await child.wait()

    async def answer(self, value: object) -> tuple[str, object]:
        """Echo, over the link."""
        return self._name, value

    async def hold(self) -> str:
        """Wait for release, over the link."""
        try:
            await self._gate.wait()
        except asyncio.CancelledError:
            self._ended.append("hold")
            raise
        return self._name

    async def count(self, until: int, error: Exception | None = None) -> AsyncGenerator[int, None]:
        """Numbers all at once, then an error or, from a negative one on, a wait for release."""
        try:
            for number in range(abs(until)):
                yield number
            if error is not None:
                raise error
            if until < 0:
                await self._gate.wait()
        except (asyncio.CancelledError, GeneratorExit):
            self._ended.append("count")
            raise

    async def drip(self, until: int, every_s: float) -> AsyncGenerator[int, None]:
        """Numbers one by one."""
        for number in range(until):
            await asyncio.sleep(every_s)
            yield number

    async def ended(self) -> list[str]:
        """Names of the methods that were cancelled since this was last asked."""
        ended, self._ended = self._ended, []
        return ended

    async def run(self, function: Callable[[], object]) -> object:
        """Return what a function returns, or raise what it raises; await it if it can be."""
        result = function()
        return await result if inspect.isawaitable(result) else result

    async def rank(self) -> int:
        return int(current_rank().rank)

    async def posts(self) -> int:
        """Messages that came over the link so far."""
        return self._posts

    @concurrent_endpoint
    async def link_post(self, messages: bytes) -> None:
        self._posts += 1
        self._link_end.post(messages)

    async def start_child(self) -> int:
        """A child of a child, which would outlive the process."""
        child = await asyncio.create_subprocess_exec("sh", "-c", "sleep 600 & echo $!; wait", stdout=subprocess.PIPE)
        assert child.stdout is not None
        return int(await child.stdout.readline())

    async def block(self, seconds: float) -> None:
        """Block the event loop."""
        time.sleep(seconds)  # noqa: ASYNC251

    @concurrent_endpoint
    async def environment(self, name: str) -> str | None:
        return os.environ.get(name)

    @concurrent_endpoint
    async def fetch(self, transport: Transport, key: str) -> list[int]:
        return (await transport.get(key)).tolist()


async def pid_of(service: Service, replica: int = 0, rank: int = 0) -> int:
    """The process of a rank of a replica."""
    pid: int = await service.replicas[replica].call("process_id", deadline_s=60, rank=rank)
    return pid


def send_signal(pid: int, number: signal.Signals) -> None:
    """Send a process a signal; one that stops it takes a moment, which is waited for."""
    os.kill(pid, number)
    with contextlib.suppress(psutil.NoSuchProcess):  # whoever watches it has killed it
        while number == signal.SIGSTOP and psutil.Process(pid).status() in _RUNS:
            time.sleep(0.001)


def new_service_name() -> str:
    """Monarch tells of a dead mesh late, by its name, to whoever controls the process by then."""
    return f"fake{next(_NUMBERS)}"


TRAINER_MODULES = {FORK_MODULES: "forge_rl.engines.titan.train"}


class WarmCluster(Cluster):
    """A cluster whose trainers are forked by a process that has imported what they need, as a run's engines are."""

    def spawn(self, name: str, *, env: Mapping[str, str] | None = None, **settings: Any) -> SpawnedMesh:
        modules = TRAINER_MODULES if name.startswith("trainer") else {}
        return super().spawn(name, env=modules | dict(env or {}), **settings)

    async def import_for_trainer(self, ranks: int) -> None:
        """Wait until a trainer of some ranks can be forked."""
        from forge_rl.engines.factory import train_environment

        await self.import_first(TRAINER_MODULES | train_environment(ranks), deadline_s=300)


@contextlib.asynccontextmanager
async def cluster(
    logs: Path, clock: Callable[[], float] = time.monotonic, *, trainer_ranks: int = 0
) -> AsyncIterator[tuple[Cluster, Faults]]:
    """A cluster and its faults, as a controller has them; a trainer of `trainer_ranks` is forked, not executed."""
    run_cluster, faults = WarmCluster(logs) if trainer_ranks else Cluster(logs), Faults(clock)
    faults.install()  # stays: Monarch's own hook would interrupt the tests that follow
    try:
        if isinstance(run_cluster, WarmCluster):
            await run_cluster.import_for_trainer(trainer_ranks)
        yield run_cluster, faults
    finally:
        faults.closing = True
        await run_cluster.close()


@contextlib.asynccontextmanager
async def cluster_of(logs: Path, *names: str) -> AsyncIterator[tuple[Cluster, Faults]]:
    """A cluster with other hosts beside this one, each a Monarch host of its own; nothing of them is left."""
    faults = Faults()
    faults.install()
    _scratch()  # what removes it ends with this process
    before = set(psutil.Process().children(recursive=True))
    async with local_hosts(names) as hosts:
        run_cluster = Cluster(logs, hosts=hosts)
        run_cluster.sharing.update(names)
        try:
            yield run_cluster, faults
        finally:
            processes = set(psutil.Process().children(recursive=True)) - before
            faults.closing = True
            await run_cluster.close()
    _, alive = await asyncio.to_thread(psutil.wait_procs, processes, timeout=120)
    assert not alive, f"processes are left: {alive}"


def hosts_of(pid: int) -> dict[str, int]:
    """PIDs of the hosts that a process has started by `local_hosts`, by name."""
    pids = {}
    for child in psutil.Process(pid).children():
        with contextlib.suppress(psutil.NoSuchProcess):  # another child that ends meanwhile
            if name := child.environ().get("HYPERACTOR_PROCESS_NAME"):
                pids[name.rpartition("_")[0]] = child.pid
    return pids


@contextlib.asynccontextmanager
async def fake_service(
    logs: Path, *, replicas: int = 1, ranks: int = 1, clock: Callable[[], float] = time.monotonic, **settings: Any
) -> AsyncIterator[tuple[Service, Faults]]:
    """A service of FakeActors, watched."""
    async with cluster(logs, clock) as (run_cluster, faults):
        service = Service(new_service_name(), run_cluster, faults, **settings)
        try:
            for index in range(replicas):
                await service.watch(service.spawn(FakeActor, f"actor {index}", ranks=ranks), deadline_s=60)
            yield service, faults
        finally:
            faults.closing = True
            await service.stop()


_NUMBERS = itertools.count()
