"""Processes of other hosts: an agent there notices that they end or hang, and ends them. Hosts are Monarch's own."""

import asyncio
import contextlib
import inspect
import os
import signal
import subprocess
import time
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest

from forge_rl.errors import ServiceError
from forge_rl.runtime import host_logs, host_watcher
from forge_rl.runtime.cluster import Cluster
from forge_rl.runtime.fork_messages import MARK
from forge_rl.runtime.host_agent import Event, HostAgent, is_marked
from forge_rl.runtime.host_logs import GatheredLogs, own_logs
from forge_rl.runtime.host_watcher import HostWatcher
from forge_rl.runtime.replica import Replica
from forge_rl.runtime.service import Service
from tests.fake_actors import FakeActor, cluster_of, hosts_of, new_service_name, pid_of, send_signal
from tests.processes import lives

pytestmark = pytest.mark.usefixtures("nothing_left")

LONG_S = 120.0


async def death_of(replica: Replica) -> str:
    return await asyncio.wait_for(asyncio.shield(replica.death), LONG_S)


async def gone(pid: int) -> None:
    """Wait until a process has ended, whoever reaps it."""
    async with asyncio.timeout(LONG_S):
        while lives(pid):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def agent_of(cluster: Cluster, host: str, before: int = 0) -> int:
    """The process of a host's agent, once it is another one than before."""
    async with asyncio.timeout(LONG_S):
        while True:
            with contextlib.suppress(ServiceError):
                if (pid := await cluster.watcher(host)._call("process_id", deadline_s=1.0)) != before:
                    return int(pid)
            await asyncio.sleep(0.1)


@pytest.mark.long
async def test_processes_of_other_hosts_are_watched_and_ended_by_an_agent(tmp_path: Path) -> None:
    async with cluster_of(tmp_path, "a", "b") as (cluster, faults):
        cluster.sharing.discard("b")  # its disks are its own
        hosts = {name: psutil.Process(pid) for name, pid in hosts_of(os.getpid()).items()}
        service = Service(new_service_name(), cluster, faults, recoverable=True)

        async def start(host: str, index: int | None = None) -> tuple[Replica, int]:
            replica = service.spawn(FakeActor, host=host, index=index)
            await service.watch(replica, deadline_s=LONG_S)
            return replica, await pid_of(service, replica.index)

        # One that is killed, and one that is stopped, which would hold its device for ever.
        for ending, message in ((signal.SIGKILL, "killed by SIGKILL"), (signal.SIGSTOP, "hung: its process was st")):
            replica, pid = await start("a", None if not service.replicas else 0)
            assert replica.tree.roots == {}, "the controller does not watch it itself"
            send_signal(pid, ending)
            assert message in await death_of(replica)
            await gone(pid)

        # An agent that is killed or stopped is replaced, and costs nobody else anything.
        replica, pid = await start("a", 0)
        child = await replica.ask("start_child", deadline_s=LONG_S)
        for ending in (signal.SIGKILL, signal.SIGSTOP):
            agent = await agent_of(cluster, "a")
            send_signal(agent, ending)
            await agent_of(cluster, "a", before=agent)
            await gone(agent)
        assert replica.alive
        assert cluster.hosts == ("local", "a", "b")
        send_signal(child, signal.SIGSTOP)
        assert "was stopped" in await death_of(replica), "children count as well"
        await gone(pid)
        await service.processes.clean_up(replica)
        await gone(child)

        # A host all of whose processes are stopped is lost, with everything on it; the other is not.
        replica, pid = await start("a", 0)
        other, _ = await start("b")
        assert not other.log.read_text()
        await other.call("say", "on b", deadline_s=LONG_S)
        async with asyncio.timeout(LONG_S):
            while other.log.read_text() != "on b\nnatively on b\nchild on b\n":  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        stopped = [hosts["a"], *hosts["a"].children(recursive=True)]
        for process in stopped:
            process.suspend()
        assert await death_of(replica) == "host a is gone: it has not answered for 3 s"
        assert cluster.hosts == ("local", "b")
        assert other.alive
        for process in stopped:
            process.kill()

        # So is one that is killed.
        hosts["b"].kill()
        await death_of(other)
        async with asyncio.timeout(LONG_S):
            while "b" in cluster.hosts:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        faults.closing = True
        await service.stop()


def test_a_process_whose_pid_was_reused_is_not_taken_for_the_former() -> None:
    with subprocess.Popen(["sleep", "60"], env={**os.environ, MARK: "b/replica-0"}) as process:
        try:
            while not psutil.Process(process.pid).environ():  # for a moment after exec, it has none
                time.sleep(0.01)
            assert is_marked(process.pid, MARK, "b/replica-0")
            assert not is_marked(process.pid, MARK, "a/replica-0")
        finally:
            process.kill()
    with pytest.raises(psutil.NoSuchProcess):
        is_marked(2**22 - 1, MARK, "a/replica-0")


@pytest.mark.parametrize(
    ("other", "looks"), [("none", 6), ("answers", 6), ("falls silent", 40), ("silent", 40), ("lost", 6)]
)
async def test_a_silent_host_is_given_longer_while_no_other_answers(
    other: str, looks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(*_: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(host_watcher, "_LOOK_S", 0.005)
    monkeypatch.setattr(host_watcher, "_LATELY_S", 0.01)
    answers = {"answers": 60.0, "falls silent": 0.001}
    heard = {} if other == "none" else {"b": asyncio.get_running_loop().time() + answers.get(other, -60.0)}
    cluster: Any = SimpleNamespace(lost_hosts={"b": "killed"} if other == "lost" else {}, heard=heard)
    watcher = HostWatcher("a", cluster)
    watcher._agent = SimpleNamespace(report=SimpleNamespace(call_one=never))
    with pytest.raises(ServiceError, match=f"not answered for {looks * 0.005:g} s"):
        await watcher._report()


@pytest.mark.parametrize(("signals", "starts"), [([11], True), ([11, 11], False)])
async def test_an_agent_that_a_signal_ends_at_its_start_is_started_once_more(signals: list[int], starts: bool) -> None:
    stopped, spawned = list[str](), list[str]()

    class Agent:
        def __init__(self) -> None:
            self.process_id = self.watch = self.report = SimpleNamespace(call_one=self.call)
            self.signal = signals.pop(0) if signals else 0

        async def call(self, *_: object) -> None:
            if self.signal:
                raise RuntimeError(f"the process this actor was running on failed: Killed(sig={self.signal})")

    class AgentCluster:
        lost_hosts: dict[str, str] = {}  # noqa: RUF012
        heard: dict[str, float] = {}  # noqa: RUF012

        def spawn(self, name: str, **_: object) -> Any:
            spawned.append(name)
            return SimpleNamespace(procs=SimpleNamespace(spawn=lambda *_: Agent()))

        async def stop(self, name: str) -> None:
            stopped.append(name)

    watcher = HostWatcher("a", AgentCluster())  # type: ignore[arg-type]
    watcher._poll = lambda: asyncio.sleep(LONG_S)  # type: ignore[method-assign]
    watch = host_watcher.Watch(
        mark="s/replica-0",
        pids=[1],
        descendants=False,
        on_end=lambda *_: None,
        on_stopped=lambda: None,
        probe=lambda: asyncio.sleep(0),
    )
    if starts:
        await watcher.watch(watch)
        assert watcher._mark == "agent-a-1"
    else:
        with pytest.raises(ServiceError, match="agent-a-1: its process was ended by SIGSEGV"):
            await watcher.watch(watch)
    assert spawned == ["agent-a-0", "agent-a-1"]
    assert stopped == ["agent-a-0"]
    await watcher.close()


async def test_quiet_reports_leave_no_tasks_and_the_next_event_ends_one_at_once() -> None:
    agent = object.__new__(HostAgent)
    agent._events, agent._news = deque(), asyncio.Event()
    report = inspect.unwrap(HostAgent.__dict__["report"]._method)
    for _ in range(3):
        assert await report(agent, 0.001) == []
    assert asyncio.all_tasks() == {asyncio.current_task()}
    waiting = asyncio.create_task(report(agent, LONG_S))
    await asyncio.sleep(0)
    agent._note("s/replica-0", 7, -9)
    assert await waiting == [("s/replica-0", 7, -9)]


async def test_an_end_is_told_although_others_print_without_pause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_logs.tempfile, "gettempdir", lambda: str(tmp_path))
    (tmp_path / "logs").mkdir()
    logs = GatheredLogs(tmp_path / "logs")
    ends, folder = asyncio.Event(), own_logs(logs.name)
    for name in ("noisy.log", "quiet.log"):
        logs.expect("a", name)
    (folder / "quiet.log").write_text("RuntimeError: the cause\n")

    async def new_output(name: str, offsets: dict[str, int]) -> dict[str, bytes]:
        with (folder / "noisy.log").open("ab") as file:
            file.write(bytes(host_logs.MOST_BYTES))
        return host_logs.new_output(name, offsets)

    async def report(_: float) -> list[Event]:
        return [Event("s/replica-0", 7, -9)]

    watcher = HostWatcher("a", cast(Any, SimpleNamespace(lost_hosts={}, heard={})), logs=logs)
    watcher._agent = SimpleNamespace(
        report=SimpleNamespace(call_one=report), new_output=SimpleNamespace(call_one=new_output)
    )
    watcher._watched["s/replica-0"] = cast(Any, SimpleNamespace(on_end=lambda *_: ends.set()))
    polling = asyncio.create_task(watcher._poll())
    async with asyncio.timeout(LONG_S / 10):
        await ends.wait()
    assert (tmp_path / "logs" / "quiet.log").read_text() == "RuntimeError: the cause\n", "it is known by then"
    polling.cancel()


async def test_a_host_that_was_slow_is_given_longer_until_it_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_watcher, "_LOOK_S", 0.02)
    seconds = 0.0

    async def report(*_: object) -> list[object]:
        await asyncio.sleep(seconds)
        return []

    cluster: Any = SimpleNamespace(lost_hosts={}, heard={"b": asyncio.get_running_loop().time() + 600})
    watcher = HostWatcher("a", cluster)
    watcher._agent = SimpleNamespace(report=SimpleNamespace(call_one=report))
    watcher._looks.append(5)
    seconds = 60.0
    with pytest.raises(ServiceError, match=r"not answered for 0\.2 s"):
        await watcher._report()
    seconds = 0.0
    for _ in range(20):
        await watcher._report()
    seconds = 60.0
    with pytest.raises(ServiceError, match=r"not answered for 0\.12 s"):
        await watcher._report()
