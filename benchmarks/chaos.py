"""Sandbox servers and sessions killed while episodes use them: every episode ends with its right result, nothing stays.

python -m benchmarks.chaos --json out.json

Each episode runs cells that depend on all cells before, in a durable session. Kills are spread evenly over the cells:
of a fork server, of the process that keeps it, of one session, or of half of the sessions. With `--images`, sessions
are of images, of which the store has room for a part, and every other kill is of a pull: its connection, the process
that unpacks, or another process that pulls into the same store.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.chaos_images import ChaosImages, chaos_images
from benchmarks.report import BenchmarkConfig, BenchmarkError, Report, run_benchmark
from forge_rl.errors import check_flags
from forge_rl.sandbox import DurableSessions, Limits, Pool, Result
from forge_rl.sandbox.durable import MAX_DEATHS
from forge_rl.sandbox.host import Host
from forge_rl.sandbox.inside import cgroups
from forge_rl.sandbox.pool import Profile

_CELLS = ("import time\nx = [{}]", "time.sleep(0.01); x.append(3 * x[-1] + 1); x[-1]", "len(x)")
_COMMANDS = ("echo {} > x", "sleep 0.01; echo $((3 * $(tail -n 1 x) + 1)) | tee -a x", "wc -l < x")
"""The first cell of an episode, those that add a number, and the last."""


@dataclass(frozen=True, kw_only=True)
class Config(BenchmarkConfig):
    """Kill sandbox servers and sessions while episodes use them."""

    episodes: int = 500
    """Number of episodes."""
    kills: int = 100
    """Number of kills."""
    at_once: int = 32
    """Concurrent episodes."""
    cells: int = 6
    """Cells of an episode."""
    seed: int = 0
    """Seed of the kills."""
    profile: Profile = "standard"
    """Profile of the sessions; in `process`, each cell is a command line."""
    images: int = 0
    """Number of images of the sessions; 0 for none."""

    def __post_init__(self) -> None:
        check_flags(self, "--", minimum={"episodes": 1, "kills": 0, "at_once": 1, "cells": 1, "images": 0})
        if self.images and self.profile != "process":
            raise BenchmarkError(f"sessions of {self.profile} have no image", hint="add --profile process")


def measure(config: Config, report: Report) -> None:
    """Play all episodes, once without kills."""
    # The difference in time is what the kills cost.
    calm = asyncio.run(play_under_chaos(replace(config, kills=0)))
    outcome = asyncio.run(play_under_chaos(config))
    report.results |= outcome | {"calm_s": calm["seconds"]}
    wrong = outcome["episodes"] - outcome["right"]
    if wrong or outcome["twice"] or outcome["left"]:
        raise BenchmarkError(
            f"{wrong:g} episodes are wrong, {outcome['twice']:g} came twice, {outcome['left']:g} are left"
        )


async def play_under_chaos(config: Config) -> dict[str, float]:
    """Play episodes under kills; return how many ended right and came twice, and the leftovers of their sessions."""
    with chaos_images(config.images, config.seed) as images:
        return await _play(config, images)


async def _play(config: Config, images: ChaosImages | None) -> dict[str, float]:
    before, rng = _mounts() | _shared_memory(), random.Random(config.seed)
    limits = Limits(wall_s=20, memory_bytes=96 << 20, processes=24, scratch_bytes=4 << 20)
    ended: Counter[int] = Counter()
    right: set[int] = set()
    starts: dict[int, str] = {}
    trees: set[str] = set()
    first_command, middle_command, last_command = _COMMANDS if config.profile == "process" else _CELLS
    began = time.perf_counter()
    store = "" if images is None else str(images.folder)
    async with Pool(
        profile=config.profile, limits=limits, sessions=2 * config.at_once, servers=2, warm=2, images=store
    ) as pool:
        sessions, numbers = DurableSessions(pool), iter(range(config.episodes))
        cells = kills = 0
        session_kills: dict[int, int] = {}  # by episode, since its latest cell ended

        def after_a_cell(number: int) -> None:
            nonlocal cells, kills
            cells += 1
            session_kills[number] = 0
            # Kills keep pace with cells: kill k comes once its share of all cells has ended. 0.98 leaves room for the
            # last one.
            while kills < config.kills and cells * config.kills >= (kills + 1) * config.episodes * config.cells * 0.98:
                trees.update(host.tree for host in pool.hosts)
                starts.update((pid, _state(pid)[2]) for host in pool.hosts for pid in processes(host))
                if images is not None and kills % 2:
                    images.cut_a_pull(rng)
                # Never as often as MAX_DEATHS between two ends of a cell: the pool would blame the cell, and rightly.
                elif kill(pool, rng, with_sessions=max(session_kills.values()) < MAX_DEATHS - 1):
                    session_kills.update({episode: deaths + 1 for episode, deaths in session_kills.items()})
                kills += 1

        async def play() -> None:
            for number in numbers:
                async with contextlib.AsyncExitStack() as stack:
                    image = None if images is None else await stack.enter_async_context(images.use(number))
                    session = await stack.enter_async_context(sessions.open(image=image))
                    expected, is_right, session_kills[number] = number, True, 0
                    await session.run(first_command.format(number))
                    for _ in range(config.cells - 1):
                        expected = 3 * expected + 1
                        is_right &= _shown(await session.run(middle_command)) == str(expected)
                        after_a_cell(number)
                    is_right &= _shown(await session.run(last_command)) == str(config.cells)
                    after_a_cell(number)
                del session_kills[number]
                ended[number] += 1
                if is_right:
                    right.add(number)

        async with asyncio.TaskGroup() as group:
            for _ in range(config.at_once):
                group.create_task(play())
        trees.update(host.tree for host in pool.hosts)
        starts.update((pid, _state(pid)[2]) for host in pool.hosts for pid in processes(host))
    left = len((_mounts() | _shared_memory()) - before) + _left(trees, starts)
    pulls = {}
    if images is not None:
        pulls = {"pulls_cut": float(images.cut), "registry_requests": float(images.server.requests.total())}
        left += await images.left()
    return {
        "episodes": float(len(ended)),
        "right": float(len(right)),
        "twice": float(sum(count > 1 for count in ended.values())),
        "kills": float(kills),
        "rebuilt": float(sessions.counts["rebuilt"]),
        "cells_repeated": float(sessions.counts["repeated"]),
        **pulls,
        "left": float(left),
        "seconds": time.perf_counter() - began,
    }


def _shown(result: Result) -> str:
    return result.value or result.stdout.strip()


def kill(pool: Pool, rng: random.Random, *, with_sessions: bool) -> bool:
    """Kill a server, its keeper, a session, or half of the sessions; return True if sessions were killed.

    Processes that a command itself has started are spared: their deaths are a part of its result.

    Args:
        with_sessions: whether sessions may be killed; a cell that loses its session `MAX_DEATHS` times counts as the
            cause.
    """
    host = rng.choice(pool.hosts)
    depths = {pid: _namespaces(pid) for pid in session_processes(host)}
    # The outermost processes of sessions; deeper PID namespaces are those of what commands have started.
    keeper, sessions = host.process.pid, [pid for pid, depth in depths.items() if depth == min(depths.values())]
    servers = [[keeper], children(keeper)]
    half = rng.sample(sessions, len(sessions) // 2)
    victims = rng.choice([*servers, sessions[:1], half] if with_sessions else servers)
    kill_each(victims)
    return victims not in servers


def kill_each(pids: Iterable[int]) -> None:
    """Kill processes, of which some may have ended meanwhile."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _namespaces(pid: int) -> int:
    """Return how many PID namespaces a process is in; a large number if it has ended."""
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        return next((len(line.split()) - 1 for line in lines if line.startswith("NSpid:")), 1)
    return 99


def processes(host: Host) -> Iterator[int]:
    """Yield all processes of a server: its keeper, itself, and its sessions'."""
    yield host.process.pid
    yield from children(host.process.pid)
    yield from session_processes(host)


def session_processes(host: Host) -> Iterator[int]:
    """Yield the processes in the cgroups of a server's sessions."""
    pids: set[int] = set()
    for cgroup in cgroups.here():
        with contextlib.suppress(FileNotFoundError):  # the server ended meanwhile, and its cgroups were removed
            for file in sorted(Path(cgroup.folder, host.tree).glob("*/cgroup.procs")):
                with contextlib.suppress(OSError):
                    pids.update(map(int, file.read_text().split()))
    yield from sorted(pids)


def children(pid: int) -> list[int]:
    """Return the child processes of one."""
    with contextlib.suppress(OSError):
        return [int(pid) for pid in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def _left(trees: set[str], starts: Mapping[int, str]) -> int:
    """Count the cgroups and processes that are left of some servers; another process may have a pid by now."""
    folders = [path for tree in trees for cgroup in cgroups.here() for path in Path(cgroup.folder).glob(f"{tree}*")]
    return len(folders) + sum(_runs(pid, start) for pid, start in starts.items())


def _runs(pid: int, start: str) -> bool:
    """Return whether a process exists. An ended one counts until reaped, unless init is to reap it."""
    state, parent, current_start = _state(pid)
    return current_start == start != "" and (state, parent) != ("Z", "1")


def _state(pid: int) -> tuple[str, str, str]:
    """Return a process's state, parent and start in ticks since the machine's; "" if it has ended."""
    with contextlib.suppress(OSError):
        # Behind the last bracket, as the program's name may contain blanks and brackets.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return fields[0], fields[1], fields[19]
    return "", "", ""


def _shared_memory() -> set[str]:
    return {str(path) for path in Path("/dev/shm").glob("forge*")}


def _mounts() -> set[str]:
    return set(Path("/proc/self/mounts").read_text().splitlines())


if __name__ == "__main__":
    run_benchmark("chaos", Config, measure)
