"""A run asks its job for hosts in the place of those that die: few, at growing intervals, and not after its end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from forge_rl.errors import ConfigError
from forge_rl.run.run_config import RunConfig
from forge_rl.run.start.replacements import Replacements
from forge_rl.runtime.cluster import Cluster
from forge_rl.runtime.faults import Faults
from forge_rl.runtime.isolation import Isolation
from forge_rl.runtime.seats import ReplicaSize, Seats, ServiceHosts
from forge_rl.runtime.service import Service
from forge_rl.runtime.supervision import Restart
from forge_rl.runtime.supervisor import Supervisor
from forge_rl.services.trainer_config import TrainedModel, TrainerConfig
from forge_rl.services.trainer_ranks import TrainerRanks

ONE_HOST = SimpleNamespace(size=lambda: 1)
"""A mesh of one host, on which nothing is started."""


class FakeJob:
    """A job whose hosts end when the test says how."""

    def __init__(self, most_replaced: int, refusal: str = "") -> None:
        self.most_replaced = most_replaced
        self.refusal = refusal
        self.hosts: dict[str, asyncio.Future[str]] = {}
        self.given_back: list[str] = []

    async def replace(self, name: str, folder: Path, say: Callable[[str], None]) -> str:
        if self.refusal:
            raise ConfigError(self.refusal)
        self.hosts[name] = asyncio.get_running_loop().create_future()
        try:
            return await self.hosts[name]
        except asyncio.CancelledError:
            self.given_back.append(name)
            raise


class Asking:
    """Replacements of a run with the hosts a and b, and what they did."""

    def __init__(self, job: FakeJob, folder: Path) -> None:
        self.job = job
        self.cluster = Cluster(folder, cast(Any, dict.fromkeys("ab", ONE_HOST)))
        self.faults = Faults()
        self.said: list[str] = []
        self.slept: list[float] = []
        log = SimpleNamespace(event=self.said.append, warn=self.said.append)
        display = SimpleNamespace(startup=lambda *_: None)
        monitor = cast(Any, SimpleNamespace(log=log, display=display, faults=self.faults))
        self.replacements = Replacements(job, folder, self.cluster, monitor, sleep=self._sleep)

    async def _sleep(self, seconds: float) -> None:
        self.slept.append(seconds)

    def join(self, name: str) -> None:
        self.cluster.add(name, cast(Any, ONE_HOST))
        self.replacements.joined(name)

    async def settle(self) -> None:
        for _ in range(20):
            await asyncio.sleep(0)

    async def end(self, name: str, cause: str) -> None:
        self.job.hosts[name].set_result(cause)
        await self.settle()


@contextlib.asynccontextmanager
async def asking(folder: Path, max_jobs: int, refusal: str = "") -> AsyncIterator[Asking]:
    asking_cluster = Asking(FakeJob(max_jobs, refusal), folder)
    asking_cluster.replacements.begin(("a", "b"))
    try:
        yield asking_cluster
    finally:
        await asking_cluster.replacements.close()


async def test_a_host_that_dies_is_replaced_at_growing_intervals_up_to_the_bound(tmp_path: Path):
    async with asking(tmp_path, 3) as run:
        run.cluster.lose("a", "killed")
        assert run.cluster.awaited == {"a"}, "from the first moment on"
        await run.settle()
        assert list(run.job.hosts) == ["a.1"]
        assert (run.replacements.waiting, run.replacements.place_of("a.1")) == (["a.1"], "a")
        run.join("a.1")
        assert (run.replacements.waiting, run.cluster.awaited) == ([], set())
        run.cluster.lose("a.1", "killed")
        assert run.cluster.awaited == {"a"}
        await run.settle()
        assert list(run.job.hosts) == ["a.1"], "another one is asked for once its job has ended"
        await run.end("a.1", "Slurm job 7 lost a node")
        run.cluster.lose("b", "killed")
        await run.settle()
        assert list(run.job.hosts) == ["a.1", "a.2", "b.3"]
        await run.end("b.3", "it exited")
        assert list(run.job.hosts) == ["a.1", "a.2", "b.3"]
        assert run.said[-1] == "no host is asked for in the place of b: 3 were asked for, the most"
        assert run.cluster.awaited == {"a"}
        assert run.slept == [0.0, 10.0, 20.0]


async def test_intervals_grow_to_ten_minutes_and_refusals_end_the_questions(tmp_path: Path):
    async with asking(tmp_path, 100, "sbatch refused: no such account") as run:
        run.cluster.lose("a", "killed")
        await run.settle()
        assert "sbatch refused: no such account" in run.said[1]
        assert run.said[-1] == "no host is asked for in the place of a: the last questions were refused"
        assert run.cluster.awaited == set()
        run.job.refusal, first = "", list(run.slept)
    async with asking(tmp_path, 9) as run:
        run.cluster.lose("a", "killed")
        await run.settle()
        for number in range(1, 9):
            run.join(f"a.{number}")
            await run.end(f"a.{number}", "killed")
            assert run.cluster.lost_hosts[f"a.{number}"] == "killed"
        assert run.slept[-2:] == [600.0, 600.0]
    assert first == [0.0, 10.0, 20.0, 40.0, 80.0]


async def test_nothing_is_asked_for_hosts_that_are_let_go_or_after_the_end(tmp_path: Path):
    async with asking(tmp_path, 9) as run:
        run.cluster.leaving.add("a")
        run.cluster.lose("a", "it has left")
        await run.settle()
        assert not run.job.hosts
        run.cluster.lose("b", "killed")
        await run.settle()
        run.join("b.1")
        await run.end("b.1", "")
        assert list(run.job.hosts) == ["b.1"]
    async with asking(tmp_path, 9) as run:
        run.cluster.lose("a", "killed")
        await run.settle()
        run.faults.closing = True
        run.cluster.lose("b", "killed")
        await run.settle()
        assert list(run.job.hosts) == ["a.1"]
    assert run.job.given_back == ["a.1"]
    asking_cluster = Asking(FakeJob(0), tmp_path)
    asking_cluster.replacements.begin(("a",))
    asking_cluster.cluster.lose("a", "killed")
    await asking_cluster.settle()
    assert (asking_cluster.cluster.awaited, asking_cluster.job.hosts) == (set(), {})
    asking_cluster = Asking(FakeJob(1), tmp_path)
    asking_cluster.cluster.lose("a", "killed while the run started")
    asking_cluster.replacements.begin(("a",))
    await asking_cluster.settle()
    assert list(asking_cluster.job.hosts) == ["a.1"]
    await asking_cluster.replacements.close()


def ranks_on(cluster: Cluster, waits_s: float) -> TrainerRanks:
    """Two ranks of a trainer, on one host with two GPUs, which are never started."""
    hosts = ServiceHosts(names=("a",), gpus={"a": ("0", "1")})
    config = TrainerConfig(ranks=2, wait_for_host_s=waits_s)
    return TrainerRanks(
        config, Service("trainer", cluster, Faults()), hosts, model=TrainedModel(folder=Path()), start_deadline_s=1.0
    )


async def test_ranks_that_fit_nowhere_wait_for_a_host_that_was_asked_for(tmp_path: Path):
    async with asking(tmp_path, 1) as run:
        ranks = ranks_on(run.cluster, 60.0)
        await ranks.wait_for_room()
        run.cluster.lose("a", "killed")
        waiting = asyncio.create_task(ranks.wait_for_room())
        await run.settle()
        assert not waiting.done()
        ranks.join("a.1", ("0",), 1)
        await run.settle()
        assert not waiting.done(), "one GPU is not enough"
        ranks.join("a.2", ("0", "1"), 1)
        await run.settle()
        assert waiting.done()
    async with asking(tmp_path, 1) as run:
        run.cluster.lose("a", "killed")
        await run.settle()
        for waits_s in (0.0, 0.1):
            with pytest.raises(ConfigError, match=r"2 ranks do not fit .* none has joined within 0"):
                await ranks_on(run.cluster, waits_s).wait_for_room()
        waiting = asyncio.create_task(ranks_on(run.cluster, 60.0).wait_for_room())
        await run.settle()
        assert not waiting.done()
        await run.end("a.1", "it could not join")
        assert waiting.done(), "nobody comes: the ranks are started, which says why they cannot be"


async def test_a_replica_without_a_place_waits_for_a_host_that_was_asked_for(tmp_path: Path):
    async with asking(tmp_path, 1) as run:
        service = Service("generator", run.cluster, Faults())
        seats = Seats(run.cluster, ServiceHosts(names=("a",), gpus={"a": ("0",)}))
        supervisor = Supervisor(service, cast(Any, None), Restart(), seats=seats)
        seats.take(0)
        await supervisor._host_for(0)
        run.cluster.lose("a", "killed")
        waiting = asyncio.create_task(supervisor._host_for(0))
        await run.settle()
        assert not waiting.done()
        seats.add("a.1", ("0",), 1)
        await run.settle()
        assert waiting.done()
        assert seats.take(0).host == "a.1"


async def test_a_replica_on_two_hosts_waits_for_either_of_them_and_takes_the_room_that_it_waited_for(tmp_path: Path):
    async with asking(tmp_path, 1) as run:
        hosts = ServiceHosts(names=("a", "b"), gpus={"a": ("0",), "b": ("0",)})
        seats = Seats(run.cluster, hosts, ReplicaSize(hosts=2))
        supervisor = Supervisor(Service("generator", run.cluster, Faults()), cast(Any, None), Restart(), seats=seats)
        seats.take(0)
        run.cluster.lose("b", "killed")
        tasks = [asyncio.create_task(supervisor._host_for(index)) for index in (0, 1)]
        await run.settle()
        assert not any(task.done() for task in tasks)
        seats.add("b.1", ("0",), 1)
        await run.settle()
        assert [task.done() for task in tasks] == [True, False], "there is room for one"
        assert {part.host for part in seats.take(0).parts} == {"a", "b.1"}
        tasks[1].cancel()


def test_no_host_can_be_asked_for_into_a_private_network():
    with pytest.raises(ConfigError, match="no host can join a run in a private network"):
        RunConfig(job="process:2,most_replaced=1", isolation=Isolation(private_network=True))
