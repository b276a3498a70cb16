"""Services whose replicas come and go with hosts: how many there should be, and what becomes of their work."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from forge_rl.engines.host import HostInfo
from forge_rl.errors import ConfigError, ReplicaError
from forge_rl.run.live.knobs import Knob, is_live_state
from forge_rl.run.live.settings import replicas_knob
from forge_rl.run.start.elastic import ElasticHosts
from forge_rl.runtime.cluster import THIS_HOST, Cluster
from forge_rl.runtime.faults import Faults
from forge_rl.runtime.joining import attach_host
from forge_rl.runtime.replica import ReplicaState
from forge_rl.runtime.seats import ReplicaSize, Seats, ServiceHosts
from forge_rl.runtime.service import Service
from forge_rl.runtime.supervision import Restart
from forge_rl.runtime.supervisor import Supervisor
from forge_rl.services.generator_config import GeneratorConfig
from tests.fake_actors import FakeActor, cluster_of, new_service_name, pid_of

LONG_S = 60.0
"""A deadline that no test reaches."""


class Hosts:
    """The part of a cluster that seats need."""

    def __init__(self, *names: str) -> None:
        self.hosts = (THIS_HOST, *names)
        self.lost_hosts: dict[str, str] = {}
        self.leaving: set[str] = set()

    def tell_change(self) -> None:
        """Nobody waits."""


def seats_of(cluster: Hosts, hosts: ServiceHosts, *, gpus: int = 1, **settings: int) -> Seats:
    return Seats(cast(Any, cluster), hosts, ReplicaSize(gpus=gpus), **settings)


def test_the_number_of_replicas_follows_the_hosts_between_its_bounds():
    cluster = Hosts("a", "b")
    seats = seats_of(cluster, ServiceHosts(names=("a", "b")), replicas=2, min_replicas=1, max_replicas=3)
    assert seats.wanted == 2
    seats.add("c")
    assert seats.wanted == 3
    seats.add("d")
    assert seats.wanted == 3, "the most"
    cluster.lost_hosts |= {"a": "killed", "c": "killed"}
    cluster.leaving.add("d")
    assert seats.wanted == 1
    cluster.lost_hosts["b"] = "killed"
    assert seats.wanted == 1, "the least, which wait for a host"
    fixed = seats_of(Hosts("a", "b"), ServiceHosts(names=("a", "b")), replicas=3)
    fixed.add("c")
    assert fixed.wanted == 3, "without bounds hosts that join only stand by"


def test_gpus_count_and_not_hosts():
    cluster = Hosts("a")
    gpus = {"a": ("0", "1", "2", "3")}
    seats = seats_of(cluster, ServiceHosts(names=("a",), gpus=gpus), gpus=2, replicas=1, min_replicas=1, max_replicas=8)
    seats.add("b", ("0", "1", "2", "3", "4", "5", "6", "7"))
    assert seats.wanted == 3, "half of six places"
    seats.scale(6)
    assert seats.wanted == 6
    with pytest.raises(ConfigError, match="GPUs for 6 replicas, not for 7"):
        seats.scale(7)
    cluster.leaving.add("b")
    assert seats.wanted == 2


def test_a_user_scales_within_reason_and_beyond_the_bounds():
    cluster = Hosts("a")
    fixed = seats_of(cluster, ServiceHosts(names=("a",)), replicas=1)
    fixed.scale(3)
    fixed.add("b")
    assert (fixed.wanted, fixed.max_per_host) == (3, 2)
    bounded = seats_of(cluster, ServiceHosts(names=("a",)), replicas=2, min_replicas=1, max_replicas=2)
    bounded.scale(4)
    assert bounded.wanted == 4
    cluster.lost_hosts["a"] = "killed"
    assert bounded.wanted == 1
    for wrong in (0, -1, True, "2", 2000):
        with pytest.raises(ConfigError, match="the number of replicas is set"):
            bounded.scale(cast(int, wrong))


async def test_hosts_that_are_gone_take_no_cores_from_one_that_joins():
    joined: list[int] = []

    async def add(host: str) -> None:
        """The store has room on any host."""

    info = HostInfo(kind="cpu", gpus=(), cores=12, gpu_bytes=0, memory_bytes=0, space="one machine")
    infos = dict.fromkeys((THIS_HOST, "a", "b"), info) | {"c": replace(info, space="another")}
    cluster = Hosts("a", "b", "c")
    generator = SimpleNamespace(join=lambda host, gpus, cores: joined.append(cores))
    services = SimpleNamespace(
        rollout=SimpleNamespace(generator=generator, weights=SimpleNamespace(add=add)), trainers=()
    )
    hosts = SimpleNamespace(cluster=cluster, placed=SimpleNamespace(infos=infos, hosts={}))
    elastic_hosts = ElasticHosts(*cast(Any, (None, None, hosts, None, services, {})))
    for lost_hosts in (dict[str, str](), {"a": "killed"}):
        cluster.lost_hosts = lost_hosts
        await elastic_hosts._start("d", info, ("generator",), 0)
    assert joined == [12 // 3, 12 // 2]


@pytest.mark.parametrize("state", [ReplicaState.RETIRED, ReplicaState.QUARANTINED])
async def test_a_seat_is_freed_before_its_next_replica_takes_it(state: ReplicaState, tmp_path: Path):
    """A service of two engines on two GPUs is scaled down and up again while the second is cleaned up."""
    service = Service("generator", Cluster(tmp_path), Faults())
    seats = Seats(service.cluster, ServiceHosts(gpus={THIS_HOST: ("0", "1")}), replicas=2)
    cleaned, is_started, started = asyncio.Event(), asyncio.Event(), list[tuple[int, int]]()

    def spawn(index: int, state: ReplicaState) -> Any:
        alive = state is ReplicaState.SERVING
        return SimpleNamespace(index=index, state=state, alive=alive, serving=alive, hosts=(THIS_HOST,))

    calls = itertools.count()

    async def clean_up(_: object) -> None:
        if not next(calls):  # a second call leaves to the first what that has begun, and does not wait for it
            await cleaned.wait()

    async def start_one(index: int) -> None:
        started.append((index, seats.take(index).place))
        service.replicas[index:] = [spawn(index, ReplicaState.SERVING)]
        is_started.set()

    service.processes = cast(Any, SimpleNamespace(clean_up=clean_up))
    service.start_serving = lambda _: None  # type: ignore[method-assign]
    supervisor = Supervisor(service, start_one, Restart(), seats=seats)
    for index in (0, 1):
        service.replicas.append(spawn(index, ReplicaState.SERVING))
        service.wanted.add(index)
        seats.take(index)
    service.replicas[1] = spawn(1, state)
    seats.scale(1)
    if state is ReplicaState.RETIRED:
        service.wanted.discard(1)
        supervisor._on_end(service.replicas[1])
    else:
        supervisor.rescale()
    await asyncio.sleep(0)
    seats.scale(2)
    supervisor.rescale()
    for _ in range(20):
        await asyncio.sleep(0)
    cleaned.set()
    async with asyncio.timeout(LONG_S):
        await is_started.wait()
    for _ in range(20):
        await asyncio.sleep(0)
    assert started == [(1, 1)]
    with pytest.raises(ConfigError, match="room for another replica"):
        seats.take(2)


def test_bounds_that_exclude_the_start_are_refused():
    assert GeneratorConfig(replicas=2, min_replicas=1, max_replicas=4).max_replicas == 4
    for settings in ({"min_replicas": 3}, {"max_replicas": 1}):
        with pytest.raises(ConfigError, match=r"--generator\.replicas is 2, and not from"):
            GeneratorConfig(replicas=2, **settings)


@contextlib.asynccontextmanager
async def elastic(
    logs: Path, *hosts: str, replicas: int, min_replicas: int, max_replicas: int
) -> AsyncIterator[tuple[Service, Supervisor, Seats, Faults]]:
    """A service of fakes on real hosts."""
    async with cluster_of(logs, *hosts) as (cluster, faults):
        service = Service(new_service_name(), cluster, faults)
        used = hosts[:1] or (THIS_HOST,)
        seats = Seats(
            cluster, ServiceHosts(names=used), replicas=replicas, min_replicas=min_replicas, max_replicas=max_replicas
        )

        async def start_one(index: int) -> None:
            replica = service.spawn(FakeActor, f"actor {index}", host=seats.take(index).host, index=index)
            await service.watch(replica, deadline_s=LONG_S)

        supervisor = Supervisor(service, start_one, Restart(), seats=seats)
        await supervisor.start(replicas)
        try:
            yield service, supervisor, seats, faults
        finally:
            faults.closing = True
            await service.stop()


async def until(service: Service, condition: Any) -> None:
    async with asyncio.timeout(LONG_S):
        while not condition():
            await service.change()


def serving(service: Service) -> dict[int, str]:
    return {replica.index: replica.host for replica in service.replicas if replica.serving}


@pytest.mark.usefixtures("nothing_left")
async def test_replicas_are_added_and_retired_and_their_work_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    async with elastic(tmp_path, replicas=1, min_replicas=1, max_replicas=1) as (
        service,
        supervisor,
        seats,
        faults,
    ):
        seats.scale(3)
        supervisor.rescale()
        assert not service.complete
        await until(service, lambda: service.complete)
        assert serving(service) == dict.fromkeys(range(3), THIS_HOST)
        first, second, third = service.replicas
        first.held = 9  # so that the work goes to the others
        work = [asyncio.create_task(service.route("hold", deadline_s=LONG_S)) for _ in range(2)]
        idle = asyncio.create_task(service.route("answer", 1, deadline_s=LONG_S))
        assert (await idle)[0] == "actor 1"
        held_call = asyncio.create_task(second.ask("hold", deadline_s=LONG_S))
        for replica in (second, third):
            await replica.ask("answer", 0, deadline_s=LONG_S)  # what was sent before it has begun
        assert (second.in_flight, third.in_flight) == (2, 1)

        seats.scale(1)
        supervisor.rescale()
        assert serving(service) == {0: THIS_HOST}, "retired ones get nothing new at once"
        assert service.complete
        await third.call("release", deadline_s=LONG_S)
        await until(service, lambda: not third.alive)  # it has ended what it began
        assert second.state is ReplicaState.RETIRED
        assert second.alive
        second.ends_by = 0.0  # its time is over
        await until(service, lambda: not second.alive)
        await first.ask("answer", 0, deadline_s=LONG_S)
        assert first.in_flight == 1, "what it had not ended goes on elsewhere"
        await first.call("release", deadline_s=LONG_S)
        assert sorted([await call for call in work]) == ["actor 0", "actor 2"]
        with pytest.raises(ReplicaError) as ended:
            await held_call
        assert ended.value.blamed is False
        assert faults.seen == [], "it was no fault"

        seats.scale(2)
        supervisor.rescale()
        await until(service, lambda: service.complete)
        assert serving(service).keys() == {0, 1}
        assert service.replicas[1].incarnation == 1


@pytest.mark.usefixtures("nothing_left")
async def test_replicas_come_with_a_host_and_go_with_it(tmp_path: Path):
    async with elastic(tmp_path, "a", "b", "c", replicas=1, min_replicas=1, max_replicas=2) as (
        service,
        supervisor,
        seats,
        faults,
    ):
        cluster = service.cluster
        seats.add("b")
        supervisor.rescale()
        await until(service, lambda: service.complete)
        assert serving(service) == {0: "a", 1: "b"}
        # The host that leaves has the lower index, which moves to the one that stays only if none else is there.
        cluster.leaving.add("a")
        await asyncio.wait_for(supervisor.leave("a"), LONG_S)
        assert serving(service) == {1: "b"}
        cluster.lose("a", "it has left")
        assert faults.seen == []
        seats.add("c")
        supervisor.rescale()
        await until(service, lambda: service.complete)
        assert serving(service) == {0: "c", 1: "b"}
        os.kill(await pid_of(service, 1), signal.SIGKILL)
        await until(service, lambda: not service.replicas[1].alive)
        cluster.lose("b", "killed")  # one that is dead goes first, whichever its index
        await until(service, lambda: service.complete and service.replicas[1].state is ReplicaState.RETIRED)
        assert serving(service) == {0: "c"}
        cluster.leaving.add("c")  # the last: its replica moves
        await asyncio.wait_for(supervisor.leave("c"), LONG_S)
        await until(service, lambda: service.complete)
        assert serving(service) == {0: THIS_HOST}


@pytest.mark.usefixtures("nothing_left")
async def test_a_replica_that_cannot_start_costs_only_itself(tmp_path: Path):
    async with elastic(tmp_path, replicas=1, min_replicas=1, max_replicas=1) as (
        service,
        supervisor,
        seats,
        faults,
    ):
        take, refused = seats.take, [True]

        def full(index: int) -> Any:
            if refused[0]:
                raise ConfigError("no host has room for another replica")
            return take(index)

        seats.take = full  # type: ignore[method-assign]
        seats.scale(3)
        supervisor.rescale()
        await until(service, lambda: service.complete)
        assert serving(service) == {0: THIS_HOST}
        assert [fault.fatal for fault in faults.seen] == [False, False]
        assert await service.route("answer", 1, deadline_s=LONG_S) == ("actor 0", 1)
        refused[0] = False
        supervisor.rescale()
        await until(service, lambda: service.complete)
        assert len(serving(service)) == 3


def test_only_private_addresses_and_own_sockets_are_attached(tmp_path: Path):
    (tmp_path / "file").touch()
    for address in (
        "tcp://8.8.8.8:26600",
        "ipc:///nowhere/host",
        f"ipc://{tmp_path}/file",
        "unix:///tmp/a",
        "tcp://name:1",
        "metatls://10.0.0.1:1",
        cast(str, None),
    ):
        with pytest.raises(ConfigError, match=r"neither a private address|not a socket of this user"):
            attach_host("a", address, may_be_public=False)
    with pytest.raises(ConfigError, match="serves only its own machine"):
        attach_host("a", "tcp://10.0.0.1:26600", may_be_public=False)


class Scaled:
    """Stands for a service."""

    def __init__(self, replicas: int) -> None:
        self.replicas = replicas

    def scale(self, replicas: int) -> None:
        if replicas > 4:
            raise ConfigError("no room")
        self.replicas = replicas


def test_a_resumed_run_keeps_replica_counts_unless_flags_change():
    texts: list[str] = []

    def knob(engines: int = 1, environments: int = 1) -> Knob:
        services = {"engines": Scaled(engines), "environments": Scaled(environments)}
        return replicas_knob(services, texts.append, texts.append)

    before = knob()
    asyncio.run(before.write({"engines": 3, "environments": 2}))
    for wrong in ({"reward": 2}, {"engines": 9}):
        with pytest.raises(ConfigError):
            asyncio.run(before.write(wrong))
    assert before.changes() == {"engines": 3, "environments": 2}
    state = {"given": before.given, "changes": before.changes()}
    mixture = {"given": {"weights": {}, "adapting": {}}, "changes": {}}
    assert is_live_state({"mixture": mixture, "replicas": state})
    assert not is_live_state({"mixture": mixture, "replicas": {"given": {}, "changes": {"engines": "3"}}})
    texts.clear()
    after = knob(environments=4)
    asyncio.run(after.resume(state["given"], state["changes"]))
    assert after.read() == {"engines": 3, "environments": 4}
    assert texts == [
        "the current flags set environments 4, which overrides the live change to 2",
        "engines 1 -> 3",
    ]
    small: Any = SimpleNamespace(replicas=1, scale=Scaled(1).scale)
    asyncio.run(replicas_knob({"engines": small}, texts.append, texts.append).resume({"engines": 1}, {"engines": 9}))
    assert texts[-1] == "the live change to engines 9 no longer applies: no room"
