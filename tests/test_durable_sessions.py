"""Durable sessions: rebuilt when their processes die, answered by the cache, and started only to run a cell."""

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from benchmarks.chaos import Config, children, kill_each, play_under_chaos, session_processes
from forge_rl.sandbox import DurableSession, DurableSessions, Pool, PoolSession, SandboxError
from forge_rl.sandbox.durable import DivergedError
from forge_rl.sandbox.inside.server import missing_layers
from forge_rl.sandbox.pool import Profile
from forge_rl.system.result_cache import ResultCache
from tests.sandbox_pool import SharedPool


def kill_sessions(pool: Pool) -> None:
    for host in pool.hosts:
        kill_each(session_processes(host))


def kill_keepers(pool: Pool) -> None:
    for host in pool.hosts:
        host.process.kill()


def kill_servers(pool: Pool) -> None:
    for host in pool.hosts:
        kill_each(children(host.process.pid))


def with_sessions(
    sandbox: SharedPool, work: Callable[[DurableSessions], Coroutine[Any, Any, None]], folder: Path | None = None
) -> None:
    """Run work with durable sessions of the shared pool, with a cache if there is a folder."""

    async def main() -> None:
        cache = None if folder is None else ResultCache(folder)
        sessions = DurableSessions(sandbox.pool, cache=cache)
        try:
            await work(sessions)
        finally:
            await sessions.close()
            if cache is not None:
                cache.close()

    sandbox.run(main())


@pytest.mark.parametrize("kill", [kill_sessions, kill_servers, kill_keepers])
@pytest.mark.parametrize("within", [False, True])
def test_a_session_whose_processes_are_killed_goes_on_with_its_state(
    sandbox: SharedPool, kill: Callable[[Pool], None], within: bool
):
    async def work(sessions: DurableSessions) -> None:
        async with sessions.open() as session:
            await session.put("numbers", b"1 2 3")
            await session.run("import time\ntotal = sum(map(int, open('numbers').read().split()))")
            assert (await session.run("total += 1; print(sorted({'a', 'b'}), {'a', 'b', 'c', 'd'}, object())")).stdout
            if within:
                last = asyncio.create_task(session.run("time.sleep(0.4); total *= 2; total"))
                await asyncio.sleep(0.2)
            kill(sandbox.pool)
            if not within:
                await asyncio.sleep(0.2)
                last = asyncio.create_task(session.run("total *= 2; total"))
            assert (await last).value == "14"
            assert await session.get("numbers") == b"1 2 3"
            assert sessions.counts["rebuilt"] >= 1
            assert sessions.counts["repeated"] >= 2

    with_sessions(sandbox, work)


def test_cells_that_differ_when_repeated_end_the_session(sandbox: SharedPool, tmp_path: Path):
    async def work(sessions: DurableSessions) -> None:
        async def play() -> str | None:
            async with sessions.open() as session:
                await session.run("import os")
                await session.run("os.urandom(4).hex()")
                return (await session.run("1")).value

        async with sessions.open() as session:
            first = await session.run("import os")
            drawn = await session.run("os.urandom(4).hex()")
            kill_sessions(sandbox.pool)
            with pytest.raises(DivergedError, match="cell 2 of a session gave"):
                await session.run("1")
            with pytest.raises(SandboxError, match="the session has ended"):
                await session.run("1")
            assert (first.error, len(drawn.value or "")) == (None, 10)
        assert await play() == "1"

    with_sessions(sandbox, work, tmp_path)


def test_kept_results_cost_no_session_and_a_miss_forks_the_nearest(sandbox: SharedPool, tmp_path: Path):
    cells = ["x = [1]", "x.append(2); print(x)", "1 / 0", "open('f', 'w').write('é')"]

    async def play(session: DurableSession, *more: str) -> list[object]:
        found: list[object] = []
        for code in (*cells, *more):
            result = await session.run(code)
            found.append((result.stdout, result.value, result.error and result.error.traceback, session.was_kept))
        return found

    async def work(sessions: DurableSessions) -> None:
        async with sessions.open() as first, sessions.open() as second:
            ran = await play(first)
            kept = await play(second)
            assert [each[:3] for each in ran] == [each[:3] for each in kept]  # type: ignore[index]
            assert [each[3] for each in (*ran, *kept)] == [False] * 4 + [True] * 4  # type: ignore[index]
            assert dict(sessions.counts) == {"opened": 1, "run": 4}
            assert (await second.run("x, open('f').read()")).value == "([1, 2], 'é')"
            assert (sessions.counts["opened"], sessions.counts["forked"], sessions.counts["repeated"]) == (1, 1, 0)
            async with await second.fork() as third:
                assert (await third.run("x.append(3); x")).value == "[1, 2, 3]"
            assert (await second.run("x")).value == "[1, 2]"
        async with sessions.open() as fourth:
            assert (await play(fourth, "x, open('f').read()", "x.append(3); x", "len(x)"))[-1][1] == "3"  # type: ignore[index]
            assert (sessions.counts["opened"], sessions.counts["repeated"]) == (1, 0), "a closed one was forked"

    async def work_of_next_run(sessions: DurableSessions) -> None:
        async with sessions.open() as session:
            assert (await play(session))[-1] == ("", "1", None, True)
            assert dict(sessions.counts) == {}
            assert (await session.run("x")).value == "[1, 2]"
            assert (sessions.counts["opened"], sessions.counts["repeated"]) == (1, 4)
        other = DurableSessions(sandbox.pool, cache=sessions.cache, version="2")
        async with other.open() as session:
            await session.run(cells[0])
            assert session.was_kept is False
        await other.close()

    with_sessions(sandbox, work, tmp_path)
    with_sessions(sandbox, work_of_next_run, tmp_path)


@pytest.mark.parametrize(
    ("code", "error", "ran"),
    [
        ("import os; os._exit(3)", "Ended", 3),
        ("x = b'x' * (200 << 20)", "OutOfMemory", 1),
        ("while True: pass", "CellOverrun", 1),
    ],
)
def test_a_fatal_or_slow_cell_is_a_result_and_is_not_kept(
    sandbox: SharedPool, code: str, error: str, ran: int, tmp_path: Path
):
    async def work(sessions: DurableSessions) -> None:
        for _ in range(2):
            async with sessions.open() as session:
                result = await session.run(code, wall_s=0.5 if error == "CellOverrun" else 60)
                assert (result.error and result.error.name, session.was_kept) == (error, False)
                assert session.alive == (error == "CellOverrun")
        assert sessions.counts["run"] == 2 * ran

    with_sessions(sandbox, work, tmp_path)


def test_a_session_that_is_closed_during_a_cell_is_not_rebuilt(sandbox: SharedPool):
    async def work(sessions: DurableSessions) -> None:
        session = sessions.open()
        await session.run("import time")
        running = asyncio.create_task(session.run("time.sleep(1000)"))
        while sessions.counts["run"] < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        await session.close()
        with pytest.raises(SandboxError, match="it is closed"):
            await asyncio.wait_for(running, 60)
        # One that is closed while it waits for its processes ends them.
        session = sessions.open()
        opened, ready = asyncio.Event(), asyncio.Event()
        nearest = sessions.nearest

        async def late(*arguments: Any) -> tuple[PoolSession, int]:
            session_and_place = await nearest(*arguments)
            opened.set()
            await ready.wait()
            return session_and_place

        sessions.nearest = late  # type: ignore[method-assign]
        running = asyncio.create_task(session.run("1"))
        await opened.wait()
        await session.close()
        ready.set()
        with pytest.raises(SandboxError, match="it is closed"):
            await asyncio.wait_for(running, 60)

    places = sandbox.pool._places._value
    with_sessions(sandbox, work)
    assert sandbox.pool._places._value == places


def test_sets_have_the_same_order_in_every_server(sandbox: SharedPool):
    async def work(sessions: DurableSessions) -> None:
        found = set()
        for _ in range(3):
            async with sessions.open() as session:
                found.add((await session.run("list({str(n) for n in range(20)})")).value)
            kill_servers(sandbox.pool)
        assert len(found) == 1

    with_sessions(sandbox, work)


@pytest.mark.long
@pytest.mark.parametrize("profile", ["standard", "strict", "process"])
async def test_killed_servers_and_sessions_cost_no_episode_and_leave_nothing(profile: Profile):
    """The same with 500 episodes and 100 kills: `python -m benchmarks.chaos`."""
    if missing := missing_layers(profile):
        pytest.skip(f"sandbox sessions cannot be isolated here: {missing}")
    found = await play_under_chaos(Config(episodes=60, kills=24, at_once=12, profile=profile))
    assert found["kills"] == 24
    assert found["right"] == found["episodes"] == 60
    assert found["twice"] == 0
    assert found["left"] == 0
    assert found["rebuilt"] > 0


@pytest.mark.parametrize("cached", [False, True])
def test_a_file_that_cannot_be_written_is_one_error_and_the_session_goes_on(
    sandbox: SharedPool, cached: bool, tmp_path: Path
):
    async def work(sessions: DurableSessions) -> None:
        async with sessions.open() as session:
            await session.run("x = 20")
            for path, data in (("before", b"1"), ("/proc/mine", b""), ("after", b"21")):
                await session.put(path, data)
            with pytest.raises(SandboxError, match="/proc/mine"):
                await session.run("x")
            # The files around it are there, and so is the state of the cells before.
            cell = "x + int(open('before').read()) + int(open('after').read())"
            assert (await session.run(cell)).value == "42"
            kill_sessions(sessions.pool)
            assert (await session.run("x + int(open('after').read())")).value == "41"

    with_sessions(sandbox, work, tmp_path if cached else None)
