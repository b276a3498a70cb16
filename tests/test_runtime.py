"""Services on real processes: calls, every way to fail, and that nothing is left."""

import asyncio
import contextlib
import os
import pwd
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial, partialmethod
from pathlib import Path
from typing import Any, cast

import psutil
import pytest

from forge_rl.errors import ConfigError, DeadlineError, ForgeError, ReplicaError, ServiceError
from forge_rl.runtime import replica as replica_module
from forge_rl.runtime.cluster import THIS_HOST, Cluster, SpawnedMesh
from forge_rl.runtime.service import Service
from tests.conftest import ROOT
from tests.fake_actors import (
    FakeActor,
    cluster,
    cluster_of,
    fake_service,
    new_service_name,
    pid_of,
    send_signal,
)
from tests.processes import lives

pytestmark = pytest.mark.usefixtures("nothing_left")

LONG_S = 120.0
"""A deadline that no test reaches: what fails must be noticed, not waited for."""


async def in_flight(service: Service, method: str, *args: object, deadline_s: float = LONG_S) -> asyncio.Task:
    """A call that has reached the actor's process."""
    replica = service.replicas[0]
    task = asyncio.create_task(replica.call(method, *args, deadline_s=deadline_s))
    await replica.call("echo", 0, deadline_s=LONG_S)
    return task


async def test_calls_are_answered(tmp_path: Path):
    async with fake_service(tmp_path, replicas=2) as (service, faults):
        first, second = service.replicas
        assert await first.call("echo", {"a": (1, 2)}, deadline_s=LONG_S) == ("actor 0", {"a": (1, 2)})
        assert await second.call("echo", None, deadline_s=LONG_S) == ("actor 1", None)
        assert len({os.getpid(), await pid_of(service, 0), await pid_of(service, 1)}) == 3
        assert faults.seen == []
        assert faults.waiting_for() is None

        # Many at a time, on one replica: nothing waits for what hangs.
        hanging = await in_flight(service, "hang")
        answers = [first.call("echo", i, deadline_s=LONG_S) for i in range(20)]
        assert [value for _, value in await asyncio.gather(*answers)] == list(range(20))
        assert first.in_flight == 1
        # The idle one is preferred.
        assert await service.route("answer", 1, deadline_s=LONG_S) == ("actor 1", 1)
        await first.call("release", deadline_s=LONG_S)
        assert await hanging is None
        assert first.in_flight == 0
        assert await service.route("answer", 1, deadline_s=LONG_S) == ("actor 0", 1)


async def test_errors_cross_with_what_they_carry(tmp_path: Path):
    async with fake_service(tmp_path) as (service, faults):
        (replica,) = service.replicas
        sent_error = DeadlineError("late", service="sandbox", replica=4, call="run", hint="wait")
        sent_error.phase = "rollout"
        for error in (ConfigError("3 is too few", hint="set --n to 4"), sent_error):
            with pytest.raises(ForgeError) as caught:
                await replica.call("fail", error, deadline_s=LONG_S)
            assert type(caught.value) is type(error)
            assert vars(caught.value) == vars(error)

        with pytest.raises(ServiceError, match="ValueError: no such thing") as other:
            await replica.call("fail", ValueError("no such thing"), deadline_s=LONG_S)
        assert type(other.value) is ServiceError
        assert (other.value.service, other.value.replica, other.value.call) == (service.name, 0, "fail")
        assert other.value.hint == f"see {tmp_path}/{service.name}-0.log"

        # None of these is the replica's death.
        assert replica.alive
        assert faults.seen == []
        assert await replica.call("echo", 1, deadline_s=LONG_S) == ("actor 0", 1)


async def test_what_takes_too_long_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    # A process that cannot be stopped is waited for, and then killed.
    monkeypatch.setattr(Cluster, "stop", partialmethod(Cluster.stop, deadline_s=1.0))
    async with fake_service(tmp_path) as (service, faults):
        (replica,) = service.replicas
        with pytest.raises(DeadlineError, match=r"no answer within 0.2 s") as call:
            await replica.call("hang", deadline_s=0.2)
        assert (call.value.service, call.value.replica, call.value.call) == (service.name, 0, "hang")
        await asyncio.sleep(0)
        assert not [task for task in asyncio.all_tasks() if "_call_one" in repr(task)], "it is given up"

        late = r"phase train did not end within its 0.2 s"
        with pytest.raises(DeadlineError, match=late) as phase, faults.deadline("train", 0.2):
            await replica.call("hang", deadline_s=LONG_S)
        assert (phase.value.service, phase.value.replica, phase.value.call) == (service.name, 0, "hang")
        assert replica.in_flight == 0
        assert faults.waiting_for() is None
        assert await replica.call("echo", 1, deadline_s=LONG_S) == ("actor 0", 1)

        # A process that has just been stopped is not dead; whoever calls it is told.
        send_signal(await pid_of(service), signal.SIGSTOP)
        with pytest.raises(DeadlineError) as stopped:
            await replica.call("echo", 1, deadline_s=0.1)
        assert (stopped.value.service, stopped.value.replica, stopped.value.call) == (service.name, 0, "echo")
        # It is still stopped when the service stops, and must end all the same.


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGABRT])
async def test_a_process_killed_during_a_call_is_named_with_its_cause(number: signal.Signals, tmp_path: Path):
    async with fake_service(tmp_path) as (service, faults):
        (replica,) = service.replicas
        hanging = await in_flight(service, "hang")
        os.kill(await pid_of(service), number)
        with pytest.raises(ReplicaError, match=number.name) as caught:
            await hanging
        assert (caught.value.service, caught.value.replica, caught.value.call) == (service.name, 0, "hang")
        assert [(fault.service, fault.replica) for fault in faults.seen] == [(service.name, 0)]
        assert number.name in faults.seen[0].cause
        assert not replica.alive
        with pytest.raises(ServiceError, match=number.name):
            await replica.call("echo", 1, deadline_s=LONG_S)


def test_a_process_whose_log_cannot_be_written_goes_on():
    prints = "print('a' * 100_000); print('b', file=sys.stderr, flush=True); sys.stdout.flush(); os._exit(7)"
    run = "import os, sys; from forge_rl.runtime.children import start_child; start_child('/dev/full', (), (), {}); "
    assert subprocess.run([sys.executable, "-c", run + prints], cwd=ROOT, timeout=60).returncode == 7


async def test_an_exit_during_a_call_is_named_with_its_status(tmp_path: Path):
    async with fake_service(tmp_path) as (service, faults):
        with pytest.raises(ReplicaError, match="its process exited with status 7") as caught:
            await service.replicas[0].call("exit", 7, deadline_s=LONG_S)
        assert (caught.value.service, caught.value.replica, caught.value.call) == (service.name, 0, "exit")
        assert (await faults.wait()).message == "its process exited with status 7"


async def test_a_process_killed_while_idle_is_noticed_and_left_out(tmp_path: Path):
    async with fake_service(tmp_path, replicas=2) as (service, faults):
        os.kill(await pid_of(service, 0), signal.SIGKILL)
        error = await asyncio.wait_for(faults.wait(), LONG_S)
        assert (error.service, error.replica) == (service.name, 0)
        assert "SIGKILL" in error.message
        assert [replica.alive for replica in service.replicas] == [False, True]
        for i in range(3):
            assert await service.route("answer", i, deadline_s=LONG_S) == ("actor 1", i)
        os.kill(await pid_of(service, 1), signal.SIGKILL)
        await asyncio.wait_for(asyncio.shield(service.replicas[1].death), LONG_S)
        with pytest.raises(ServiceError, match=r"no replica is left; replica 0: .*SIGKILL.*; replica 1: ") as dead:
            await service.route("answer", 1, deadline_s=LONG_S)
        assert (dead.value.service, dead.value.replica) == (service.name, None)
        assert not isinstance(dead.value, ReplicaError)
        # A new replica takes its place.
        fresh = service.spawn(FakeActor, "fresh")
        await service.watch(fresh, deadline_s=LONG_S)
        assert await service.route("answer", 1, deadline_s=LONG_S) == ("fresh", 1)


async def test_ranks_are_called_side_by_side_and_the_first_failure_ends_the_wait(tmp_path: Path):
    async with fake_service(tmp_path, ranks=2) as (service, faults):
        (replica,) = service.replicas
        assert await pid_of(service, rank=0) != await pid_of(service, rank=1)
        assert await replica.call_ranks("rank_of", lambda rank: (rank,), deadline_s=LONG_S) == [0, 1]
        for failing_rank in (0, 1):
            with pytest.raises(ServiceError, match=f"ValueError: rank {failing_rank} says no"):
                await replica.call_ranks("rank_of", lambda rank, bad=failing_rank: (rank, bad), deadline_s=LONG_S)
        assert replica.in_flight == 0

        # One rank's death is the replica's.
        calls = asyncio.create_task(replica.call_ranks("hang", lambda _: (), deadline_s=LONG_S))
        await replica.call("echo", 0, deadline_s=LONG_S, rank=0)
        os.kill(await pid_of(service, rank=1), signal.SIGKILL)
        with pytest.raises(ServiceError, match="SIGKILL"):
            await calls
        assert not replica.alive
        assert len(faults.seen) == 1


async def test_a_call_that_is_given_up_in_its_mesh_names_its_replica(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    async def given_up(*_: object) -> None:
        raise asyncio.CancelledError

    async with fake_service(tmp_path, ranks=2) as (service, _):
        replica = service.replicas[0]
        monkeypatch.setattr(replica_module, "_call_one", given_up)
        with pytest.raises(ReplicaError, match="its mesh has stopped"):
            await replica.call_ranks("rank_of", lambda rank: (rank,), deadline_s=LONG_S)
        monkeypatch.undo()


async def test_output_goes_to_the_log(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    async with fake_service(tmp_path) as (service, _):
        (replica,) = service.replicas
        await replica.call("say", "hello", deadline_s=LONG_S)
        assert replica.log == tmp_path / f"{service.name}-0.log"
        assert {"hello", "natively hello", "child hello"} <= set(replica.log.read_text().splitlines())
    assert "hello" not in "".join(capfd.readouterr())


async def test_stopping_ends_the_processes_and_is_no_fault(tmp_path: Path):
    async with fake_service(tmp_path, replicas=2) as (service, faults):
        processes = [psutil.Process(await pid_of(service, replica)) for replica in range(2)]
        faults.closing = True
        await service.stop()
        assert service.replicas == []
        _, alive = psutil.wait_procs(processes, timeout=60)
        assert alive == []
        assert faults.seen == []
        with pytest.raises(ServiceError, match="the service has been stopped"):
            await service.route("answer", 1, deadline_s=LONG_S)


async def test_each_mesh_has_its_own_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/torchinductor_me")  # as torch does
    kept_back = ["AWS_ACCESS_KEY_ID", "DATABASE_URL", "HTTPS_PROXY", "FAKE_API_KEY"]
    for name in kept_back:
        monkeypatch.setenv(name, SECRET)

    async def main() -> None:
        async with cluster(tmp_path) as (meshes, faults):
            service = Service(new_service_name(), meshes, faults)
            for value in ("a", None):
                env = {"FORGE_RL_FAKE": value} if value else None
                # Other machines may reach what listens here later, such as a gateway when an engine starts again.
                with contextlib.nullcontext() if value else socket.create_server(("0.0.0.0", 0)):
                    await service.watch(service.spawn(FakeActor, env=env, secrets=not value), deadline_s=LONG_S)
            for replica, secret in zip(service.replicas, (None, SECRET), strict=True):
                for name in kept_back:
                    assert await replica.call("environment", name, deadline_s=LONG_S) == secret
                environ_path = Path(f"/proc/{await replica.call('process_id', deadline_s=LONG_S)}/environ")
                with contextlib.suppress(PermissionError):  # only root may read that of one that has secrets
                    assert SECRET.encode() not in await asyncio.to_thread(environ_path.read_bytes)
                    assert not secret or os.geteuid() == 0
            variables = [await r.call("environment", "FORGE_RL_FAKE", deadline_s=LONG_S) for r in service.replicas]
            assert variables == ["a", None]
            assert "FORGE_RL_FAKE" not in os.environ
            # Where nobody else puts anything: code that is loaded, sockets, what one service's processes open.
            ask = partial(service.replicas[0].call, "environment", deadline_s=LONG_S)
            assert (await ask("TORCHINDUCTOR_CACHE_DIR")).startswith(str(Path.home()))
            assert os.stat(await ask("TMPDIR")).st_mode & 0o077 == 0
            assert await ask("GLOO_SOCKET_IFNAME") == "lo"
            began = psutil.Process(await service.replicas[0].call("process_id", deadline_s=LONG_S)).environ()
            assert began["GLOO_SOCKET_IFNAME"] == "lo", "it would set it beside threads that read the environment"
            assert began["TORCHINDUCTOR_CACHE_DIR"] == await ask("TORCHINDUCTOR_CACHE_DIR")
            faults.closing = True
            await service.stop()

    await main()


async def test_busy_time_is_that_with_a_call_in_flight(tmp_path: Path):
    clock_s = 0.0
    async with cluster(tmp_path, lambda: clock_s) as (meshes, faults):
        service = Service(new_service_name(), meshes, faults)
        replica = service.spawn(FakeActor)
        await service.watch(replica, deadline_s=LONG_S)
        assert service.drain_busy_s() == [0]
        clock_s += 5
        hanging = await in_flight(service, "hang")
        clock_s += 2
        assert service.drain_busy_s() == [2]
        clock_s += 4
        await replica.call("release", deadline_s=LONG_S)
        await hanging
        clock_s += 8
        assert service.drain_busy_s() == [4]
        faults.closing = True
        await service.stop()


async def test_replicas_run_on_the_hosts_they_are_given(tmp_path: Path):
    async with cluster_of(tmp_path, "a", "b") as (meshes, faults):
        assert meshes.hosts == (THIS_HOST, "a", "b")
        service = Service(new_service_name(), meshes, faults)
        with pytest.raises(ConfigError, match="there is no host 'c'") as unknown:
            service.spawn(FakeActor, host="c")
        assert "local, a, b" in unknown.value.hint
        assert service.replicas == []

        for host in ("a", "b", THIS_HOST):
            env = {"FORGE_RL_FAKE": host}
            replica = service.spawn(FakeActor, f"on {host}", ranks=2, env=env, host=host)
            await service.watch(replica, deadline_s=LONG_S)
            assert replica.host == host
            assert dict(replica.meshes[0].procs.extent) == {"ranks": 2}
            assert await replica.call("environment", "FORGE_RL_FAKE", deadline_s=LONG_S, rank=1) == host
            assert await replica.call_ranks("rank_of", lambda rank: (rank,), deadline_s=LONG_S) == [0, 1]
            await replica.call("say", f"hello from {host}", deadline_s=LONG_S, rank=1)
            assert {f"hello from {host}", f"child hello from {host}"} <= set(replica.log.read_text().splitlines())
        parents = [psutil.Process(await pid_of(service, i, rank)).ppid() for i in range(3) for rank in range(2)]
        assert len(set(parents[0:2])) == len(set(parents[2:4])) == 1
        assert len({os.getpid(), *parents}) == 3
        assert set(parents[4:6]) == {os.getpid()}

        # One replica may be on several hosts.
        wide = Service(new_service_name(), meshes, faults, recoverable=True)
        replica = wide.spawn(FakeActor, "wide", ranks={"b": 1, "a": 2})
        await wide.watch(replica, deadline_s=LONG_S)
        assert (replica.hosts, replica.host) == (("b", "a", "a"), "b")
        wide_pids = await replica.call_ranks("process_id", lambda _: (), deadline_s=LONG_S)
        assert [psutil.Process(pid).ppid() for pid in wide_pids] == [parents[2], parents[0], parents[0]]
        assert await replica.ask("answer", 3, deadline_s=LONG_S) == ("wide", 3)

        # A death there is noticed as it is here.
        os.kill(await pid_of(service, 0, rank=1), signal.SIGKILL)
        error = await asyncio.wait_for(faults.wait(), LONG_S)
        assert (error.service, error.replica) == (service.name, 0)
        assert "SIGKILL" in error.message
        assert [replica.alive for replica in service.replicas] == [False, True, True]
        # So is that of a whole host.
        os.kill(parents[2], signal.SIGKILL)
        await asyncio.wait_for(asyncio.shield(service.replicas[1].death), LONG_S)
        await asyncio.wait_for(asyncio.shield(replica.death), LONG_S)
        await wide.stop()
        assert not any(map(lives, wide_pids))

        # Nor does anything live on a host that the job says is gone.
        other = Service(new_service_name(), meshes, faults, recoverable=True)
        replica = other.spawn(FakeActor, host="a")
        await other.watch(replica, deadline_s=LONG_S)
        meshes.lose("a", "the scheduler took it back")
        assert "a" not in meshes.hosts
        assert replica.death.result() == "host a is gone: the scheduler took it back"
        with pytest.raises(ConfigError, match="the scheduler took it back"):
            other.spawn(FakeActor, host="a", index=0)
        await other.stop()
        faults.closing = True
        await service.stop()


class Hosts:
    """Hosts as a Monarch job gives them."""

    def __init__(self, count: int) -> None:
        self._count = count

    def size(self) -> int:
        return self._count


def test_hosts_are_named_one_by_one(tmp_path: Path):
    assert Cluster(tmp_path, hosts={"a": Hosts(1)}).hosts == (THIS_HOST, "a")
    with pytest.raises(ConfigError, match="'a' names 2 hosts"):
        Cluster(tmp_path, hosts={"a": Hosts(2)})
    with pytest.raises(ConfigError, match="'local' is the name of the controller's host"):
        Cluster(tmp_path, hosts={THIS_HOST: Hosts(1)})


SECRET = "nobody-elses-to-read"
CONTROLLER = """
import asyncio, sys
from pathlib import Path
import psutil
from forge_rl.runtime.service import Service
from tests.fake_actors import FakeActor, cluster_of, new_service_name

async def main():
    async with cluster_of(Path(sys.argv[1]), *sys.argv[2:]) as (cluster, faults):
        service = Service(new_service_name(), cluster, faults)
        for host in cluster.hosts:
            await service.watch(service.spawn(FakeActor, host=host), deadline_s=60)
        print(*[process.pid for process in psutil.Process().children(recursive=True)], flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.fixture
def scratch() -> Iterator[Path]:
    """A folder with a path so short that sockets can be named in it."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


@pytest.mark.parametrize("hosts", [(), ("a", "b")])
def test_processes_end_with_a_controller_that_is_killed(hosts: tuple[str, ...], tmp_path: Path, scratch: Path):
    log = Path("/tmp", pwd.getpwuid(os.getuid()).pw_name, "monarch_log.log")  # wherever TMPDIR is
    logged_before = log.stat().st_size if log.exists() else 0
    controller = subprocess.Popen(
        [sys.executable, "-c", CONTROLLER, str(tmp_path), *hosts],
        cwd=ROOT,
        env={
            **os.environ,
            "TMPDIR": str(scratch),
            "FORGE_RL_FAKE": SECRET,
            "FAKE_API_KEY": "for-few",
            "MONARCH_FILE_LOG": "info",
        },
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert controller.stdout is not None
        children = [psutil.Process(int(pid)) for pid in controller.stdout.readline().split()]
        assert len(children) >= 1 + 2 * len(hosts) + bool(hosts)
        assert all(child.is_running() for child in children)
        actors = [child.environ() for child in children if "FORGE_RL_REPLICA" in child.environ()]
        assert [actor["FORGE_RL_FAKE"] for actor in actors] == [SECRET] * (1 + 2 * len(hosts)), "agents too"
        assert not any("FAKE_API_KEY" in actor for actor in actors), "only services that need secrets have them"
        assert not any("for-few" in child.environ().values() for child in children), "nor do hosts"
        for _ in range(300):  # Monarch writes it in the background
            with log.open("rb") as file:
                file.seek(logged_before)
                logged = file.read()
            if b"LaunchOptions" in logged or hosts:
                break
            time.sleep(0.1)
        assert b"LaunchOptions" in logged or hosts, logged[-3000:]  # other hosts' may come much later
        assert SECRET.encode() not in logged, "Monarch's log, which every user can read, tells the environment"
        folders = [*scratch.glob("monarch_process_job_*"), *scratch.glob("forgerl-*")]
        assert len(folders) == (3 if hosts else 1)
        assert all(folder.stat().st_mode & 0o077 == 0 for folder in folders)
        controller.kill()
        controller.wait()
        _, alive = psutil.wait_procs(children, timeout=60)
        assert alive == []
        assert not any(folder.exists() for folder in folders)
    finally:
        with contextlib.suppress(ProcessLookupError):
            controller.kill()
        controller.wait()
        controller.stdout.close()


@pytest.mark.parametrize("error", [asyncio.CancelledError(), RuntimeError("supervision"), None])
async def test_a_mesh_that_fails_to_stop_cancels_nobody(error: BaseException | None, tmp_path: Path) -> None:
    class Procs:
        async def stop(self) -> None:
            if error is None:
                await asyncio.sleep(60)
            else:
                raise error

    cluster = Cluster(tmp_path)
    cluster._meshes["gone"] = SpawnedMesh(name="gone", procs=cast(Any, Procs()), host="", ranks=1, log=tmp_path)
    await cluster.stop("gone", deadline_s=0.01)
