"""Sandbox sessions: starts, memory, cells, forks and workspaces, next to cold Python, bubblewrap and Jupyter.

python -m benchmarks.sandbox --json out.json

A start is from the request until the session has answered that it is ready. For the storm, all sessions are requested
at once; it ends when the last is ready, and then each answers with its own state. Memory is each session's
proportional share (PSS), and the drop of the machine's MemAvailable divided by the sessions.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peer_environments import JUPYTER, ROOT, set_up
from benchmarks.report import BenchmarkConfig, BenchmarkError, Report, run_benchmark
from forge_rl.errors import check_flags
from forge_rl.sandbox import Limits, Pool, PoolSession
from forge_rl.sandbox.inside import cgroups
from forge_rl.sandbox.pool import Profile

_SPARE_FILES = 512
_KILLED_S = 600.0


@dataclass(frozen=True, kw_only=True)
class Config(BenchmarkConfig):
    """Measure sandbox sessions next to cold Python, bubblewrap and Jupyter kernels."""

    sessions: int = 4000
    """Live sessions of the profile `standard`."""
    strict_sessions: int = 1000
    """Live sessions of the profile `strict`."""
    process_sessions: int = 500
    """Live sessions of the profile `process`, whose cells are commands under bubblewrap; 0 leaves it out."""
    starts: int = 300
    """Sessions that are started one after another."""
    cells: int = 4000
    """Cells that `--sessions` run together, at most 64 at a time."""
    forks: int = 50
    """Forks of one session."""
    workspace_files: int = 20_000
    """Files of the folder that sessions share as a workspace."""
    workspace_sessions: int = 500
    """Sessions that are opened in it, one after another, and stay open."""
    peers: int = 20
    """Starts of each peer; 0 leaves the peers out."""

    def __post_init__(self) -> None:
        counts = ("sessions", "strict_sessions", "starts", "cells", "forks", "workspace_files", "workspace_sessions")
        check_flags(self, "--", minimum=dict.fromkeys(counts, 1) | {"process_sessions": 0, "peers": 0})


@dataclass(frozen=True)
class _Kind:
    """Cells, in Python or as commands."""

    prepare: str
    """Something that a fork copies."""
    keep: str
    """Makes a number a session's state."""
    show: str
    expected: str
    cell: str


_PYTHON = _Kind("x = list(range(1000))", "state = [{}]", "state", "[{}]", "state[0] + 1")
_COMMANDS = _Kind("seq 1000 > x", "echo {} > state", "cat state", "{}\n", "read x < state; echo $((x + 1))")


def measure(config: Config, report: Report) -> None:
    """Measure the peers, then each profile."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < config.sessions + _SPARE_FILES:
        raise BenchmarkError(f"only {hard} files may be open", hint="raise `ulimit -Hn`, or lower --sessions")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, config.sessions + _SPARE_FILES), hard))
    if config.peers:
        _peers(config, report)
    asyncio.run(_profile(config, report, "standard", config.sessions))
    asyncio.run(_profile(config, report, "strict", config.strict_sessions))
    if config.process_sessions and shutil.which("bwrap"):
        asyncio.run(_profile(config, report, "process", config.process_sessions))
    with tempfile.TemporaryDirectory(dir=ROOT.parent) as folder:  # /tmp may be in memory
        asyncio.run(_workspaces(config, report, Path(folder)))


def _peers(config: Config, report: Report) -> None:
    python = getattr(sys, "_base_executable", sys.executable)
    report.measure("cold_python_start_ms", [1000 * _run([python, "-I", "-c", "1"]) for _ in range(config.peers)])
    if (bwrap := shutil.which("bwrap")) is None:
        print("bubblewrap is not installed: not measured")
    else:
        binds = [
            flag
            for folder in ("/usr", "/lib", "/lib64", "/bin", sys.base_prefix)
            if Path(folder).exists()
            for flag in ("--ro-bind", folder, folder)
        ]
        command = [bwrap, *binds, "--proc", "/proc", "--dev", "/dev", "--unshare-all", python, "-I", "-c", "1"]
        report.measure("bubblewrap_start_ms", [1000 * _run(command) for _ in range(config.peers)])
    jupyter = set_up(JUPYTER)
    command = [str(jupyter), "-m", "benchmarks.peers.jupyter_kernels", str(config.peers)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=_KILLED_S)
    if done.returncode:
        raise BenchmarkError(f"Jupyter's kernels failed: {done.stderr.strip().splitlines()[-1]}")
    kernel_times = json.loads(done.stdout)
    report.versions["jupyter"] = dict(package.split("==") for package in JUPYTER.packages)
    report.measure("jupyter_start_ms", [1000 * seconds for seconds in kernel_times["start_s"]])
    report.measure("jupyter_mib_a_session", kernel_times["mib"])


def _run(command: list[str]) -> float:
    began = time.perf_counter()
    subprocess.run(command, check=True)
    return time.perf_counter() - began


async def _profile(config: Config, report: Report, profile: Profile, count: int) -> None:
    suffix = "" if profile == "standard" else f"_{profile}"
    kind = _COMMANDS if profile == "process" else _PYTHON
    limits = Limits(memory_bytes=256 << 20, processes=32)
    async with Pool(profile=profile, limits=limits, warm=0, sessions=count + config.forks + 1) as pool:
        starts, forks = [], []
        for _ in range(config.starts):
            began = time.perf_counter()
            session = await pool.open()
            starts.append(1000 * (time.perf_counter() - began))
            await session.close()
        ordered = sorted(starts)
        report.results[f"start_p50_ms{suffix}"] = ordered[len(ordered) // 2]
        report.results[f"start_p99_ms{suffix}"] = ordered[len(ordered) * 99 // 100]
        async with pool.session() as session:
            await session.run(kind.prepare)
            for _ in range(config.forks):
                began = time.perf_counter()
                fork = await session.fork()
                forks.append(1000 * (time.perf_counter() - began))
                await fork.close()
        report.measure(f"fork_session_ms{suffix}", forks)

        before, began = _available_mib(), time.perf_counter()
        sessions = await asyncio.gather(*(pool.open() for _ in range(count)))
        storm_s = time.perf_counter() - began
        report.results[f"sessions_{count}_s{suffix}"] = storm_s
        report.results[f"starts_per_s_and_core{suffix}"] = count / storm_s / len(os.sched_getaffinity(0))
        await _answer_with_their_own_state(sessions, kind)
        report.results[f"mib_a_session_available{suffix}"] = (before - _available_mib()) / count
        shares = list(_shares_mib(pool))
        report.results[f"mib_a_session_pss{suffix}"] = sum(shares) / count
        began = time.perf_counter()
        await _cells(sessions, config.cells, kind)
        report.results[f"cells_per_s{suffix}"] = config.cells / (time.perf_counter() - began)


async def _workspaces(config: Config, report: Report, folder: Path) -> None:
    """Open sessions in a shared folder; each changes a file, and the diffs of some are taken.

    Memory is the kernel's, files in memory included; the sessions' without a workspace is subtracted.
    The peer is a copy of the folder.
    """
    for number in range(config.workspace_files):
        path = folder / f"{number // 100}" / f"{number}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"x = {number}\n" * 50)
    began = time.perf_counter()
    shutil.copytree(folder, folder.with_name(f"{folder.name}-copy"))
    report.results["workspace_copy_ms"] = 1000 * (time.perf_counter() - began)
    shutil.rmtree(folder.with_name(f"{folder.name}-copy"))
    count, bytes_a_session = config.workspace_sessions, {}
    for workspace in (None, folder):
        async with Pool(limits=Limits(memory_bytes=256 << 20, processes=32), warm=0, sessions=count) as pool:
            opened, sessions, before = [], list[PoolSession](), _kernel_bytes()
            for _ in range(count):
                began = time.perf_counter()
                sessions.append(await pool.open(workspace=workspace))
                opened.append(1000 * (time.perf_counter() - began))
            slots = asyncio.Semaphore(64)
            await asyncio.gather(*(_change(session, index, slots) for index, session in enumerate(sessions)))
            bytes_a_session[workspace] = (_kernel_bytes() - before) / count
            if workspace is None:
                continue
            ordered, diffs = sorted(opened), []
            for index, session in enumerate(sessions[:50]):
                began = time.perf_counter()
                text = await session.diff()
                diffs.append(1000 * (time.perf_counter() - began))
                if f"+mine = {index}\n" not in text or text.count("diff --git") != 1:
                    raise BenchmarkError(f"session {index} has the diff {text!r:.200}")
    report.results["workspace_open_ms"] = ordered[len(ordered) // 2]
    report.results["workspace_open_p99_ms"] = ordered[len(ordered) * 99 // 100]
    report.results["workspace_bytes_a_session"] = bytes_a_session[folder] - bytes_a_session[None]
    report.measure("workspace_diff_ms", diffs)


async def _change(session: PoolSession, index: int, slots: asyncio.Semaphore) -> None:
    async with slots:
        result = await session.run(
            f"import os\nos.makedirs('3', exist_ok=True)\nopen('3/333.py', 'a').write('mine = {index}\\n')"
        )
    if result.error is not None:
        raise BenchmarkError(f"session {index}: {result.error.message}")


async def _answer_with_their_own_state(sessions: list[PoolSession], kind: _Kind) -> None:
    slots = asyncio.Semaphore(64)

    async def ask(index: int, session: PoolSession) -> None:
        async with slots:
            await session.run(kind.keep.format(index))
        async with slots:
            answer = await session.run(kind.show)
        if (answer.value or answer.stdout) != kind.expected.format(index):
            raise BenchmarkError(f"session {index} answered {answer.value!r}, {answer.error}")

    await asyncio.gather(*(ask(index, session) for index, session in enumerate(sessions)))


async def _cells(sessions: list[PoolSession], count: int, kind: _Kind) -> None:
    left = iter(range(count))

    async def work(worker_sessions: list[PoolSession]) -> None:
        for index in left:
            await worker_sessions[index % len(worker_sessions)].run(kind.cell)

    # Each worker has sessions of its own, as a session runs one cell at a time.
    workers = min(64, len(sessions))
    await asyncio.gather(*(work(sessions[index::workers]) for index in range(workers)))


def _kernel_bytes() -> int:
    """Return the bytes of files in memory, and of the kernel's own structures, such as mounts and open files."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(("Shmem:", "Slab:", "Percpu:")))


def _available_mib() -> float:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable")) / 1024


def _shares_mib(pool: Pool) -> Iterator[float]:
    """Yield the proportional share of each process in the sessions' cgroups, and of each init outside of them."""
    pids: set[str] = set()
    for cgroup in cgroups.here():
        for host in pool.hosts:
            for file in Path(cgroup.folder, host.tree).glob("*/cgroup.procs"):
                pids |= set(file.read_text().split())
    for pid in list(pids):  # an init is its session's parent, and the server is not one
        parent = Path(f"/proc/{pid}/status").read_text().split("PPid:\t")[1].split()[0]
        if Path(f"/proc/{parent}/status").read_text().split("NSpid:\t")[1].splitlines()[0].count("\t") > 1:
            pids.add(parent)
    for pid in pids:
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            yield next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024


if __name__ == "__main__":
    run_benchmark("sandbox", Config, measure)
