"""Sessions of images: starts, a storm of live ones, their memory and diffs, next to bubblewrap alone."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from benchmarks.report import BenchmarkError, Report
from forge_rl.sandbox import Limits, Pool, PoolSession
from forge_rl.sandbox.images import ContainerImage

_AT_A_TIME = 64
_LIMITS = Limits(memory_bytes=256 << 20, processes=32, scratch_files=10_000)


class SessionCounts(Protocol):
    """How many sessions to measure; see the flags of `benchmarks.containers`."""

    @property
    def sessions(self) -> int: ...
    @property
    def starts(self) -> int: ...
    @property
    def changed_files(self) -> int: ...
    @property
    def repeats(self) -> int: ...


async def measure_sessions(
    config: SessionCounts, report: Report, store: Path, images: Sequence[ContainerImage]
) -> None:
    """Measure sessions of images, which have a shell.

    Args:
        store: folder that has their layers.
    """
    async with Pool(profile="process", images=store, limits=_LIMITS, warm=0, sessions=config.sessions + 2) as pool:
        starts = []
        for index in range(config.starts):
            start_time = time.perf_counter()
            session = await pool.open(image=images[index % len(images)])
            starts.append(1000 * (time.perf_counter() - start_time))
            await session.close()
        ordered = sorted(starts)
        report.results["start_p50_ms"] = ordered[len(ordered) // 2]
        report.results["start_p99_ms"] = ordered[len(ordered) * 99 // 100]
        await _measure_diffs(config, report, pool, images[0])
        before, start_time = available_mib(), time.perf_counter()
        chosen_images = [images[index % len(images)] for index in range(config.sessions)]
        sessions = await asyncio.gather(*(pool.open(image=image) for image in chosen_images))
        report.results[f"sessions_{config.sessions}_s"] = time.perf_counter() - start_time
        report.results["mib_a_session"] = (before - available_mib()) / config.sessions
        start_time = time.perf_counter()
        await _answer_with_their_own_state(sessions)
        report.results["commands_per_s"] = 2 * config.sessions / (time.perf_counter() - start_time)
        report.results["mib_a_session_after_commands"] = (before - available_mib()) / config.sessions


async def _measure_diffs(config: SessionCounts, report: Report, pool: Pool, image: ContainerImage) -> None:
    diffs = []
    async with pool.session(image=image) as session:
        await session.run(f"mkdir /work; cd /work; for n in $(seq {config.changed_files}); do echo $n > $n; done")
        for _ in range(config.repeats):
            start_time = time.perf_counter()
            text = await session.diff()
            diffs.append(1000 * (time.perf_counter() - start_time))
            if text.count("diff --git") != config.changed_files:
                raise BenchmarkError(f"the diff has {text.count('diff --git')} of {config.changed_files} files")
    report.measure(f"diff_{config.changed_files}_files_ms", diffs)


async def _answer_with_their_own_state(sessions: Sequence[PoolSession]) -> None:
    slots = asyncio.Semaphore(_AT_A_TIME)

    async def ask(index: int, session: PoolSession) -> None:
        async with slots:
            await session.run(f"echo {index} > state")
            answer = await session.run("cat state")
        if answer.stdout != f"{index}\n":
            raise BenchmarkError(f"session {index} answered {answer.stdout!r}, {answer.error}")

    await asyncio.gather(*(ask(index, session) for index, session in enumerate(sessions)))


def measure_bubblewrap(report: Report, image: ContainerImage, repeats: int) -> None:
    """Run a command with the lowest layer of an image as root, which has a shell."""
    bubblewrap = shutil.which("bwrap")
    if bubblewrap is None:
        raise BenchmarkError("bubblewrap is not installed", hint="apt-get install bubblewrap")
    command = [bubblewrap, "--ro-bind", str(image.layers[0]), "/", "--unshare-all", "/bin/sh", "-c", ":"]
    durations = []
    for _ in range(repeats):
        start_time = time.perf_counter()
        subprocess.run(command, check=True)
        durations.append(1000 * (time.perf_counter() - start_time))
    report.measure("bubblewrap_command_ms", durations)


def available_mib() -> float:
    """Return the memory that this machine could give to programs."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable")) / 1024
