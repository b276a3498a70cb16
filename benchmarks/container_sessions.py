"""Sessions of images: starts, a storm of live ones, their memory and diffs, next to bubblewrap alone.

python -m benchmarks.container_sessions --json out.json

Makes images of this machine's shell and programs, each with layers of its own above shared ones. A start is from the
request until the session has answered that it is ready. For the storm, all sessions are requested at once, over all
images; it ends when the last is ready, and then each answers with its own state. Memory is the drop of the machine's
MemAvailable divided by the sessions. The peer starts bubblewrap with the same root, which is not writable then.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.report import LEAST_REPEATS, BenchmarkConfig, BenchmarkError, Report, run_benchmark
from forge_rl.errors import check_flags
from forge_rl.sandbox import Limits, Pool, PoolSession
from forge_rl.sandbox.images import ContainerImage, ImageSettings

_PROGRAMS = ("bash", "cat", "ls", "mkdir", "rm", "seq", "touch")
_AT_A_TIME = 64
_LIMITS = Limits(memory_bytes=256 << 20, processes=32, scratch_files=10_000)


@dataclass(frozen=True, kw_only=True)
class Config(BenchmarkConfig):
    """Measure sessions of images."""

    sessions: int = 1000
    """Live sessions."""
    images: int = 20
    """Images that they are of."""
    layers: int = 12
    """Layers of each image."""
    starts: int = 300
    """Sessions that are started one after another."""
    changed_files: int = 1000
    """Files that a session adds, whose diff is taken."""
    repeats: int = 20
    """Diffs, and starts of the peer."""
    folder: Path | None = None
    """Folder for images; a temporary one by default."""

    def __post_init__(self) -> None:
        counts = dict.fromkeys(("sessions", "images", "starts", "changed_files"), 1)
        check_flags(self, "--", minimum=counts | {"layers": 2, "repeats": LEAST_REPEATS})


def measure(config: Config, report: Report) -> None:
    """Make the images, and measure sessions of them."""
    with tempfile.TemporaryDirectory(dir=config.folder, prefix="forge_rl-images-") as scratch:
        store = Path(scratch)
        images = _make_images(store, config.images, config.layers)
        _measure_peer(config, report, images[0])
        asyncio.run(measure_sessions(config, report, store, images))


async def measure_sessions(config: Config, report: Report, store: Path, images: Sequence[ContainerImage]) -> None:
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
        before, start_time = _available_mib(), time.perf_counter()
        chosen_images = [images[index % len(images)] for index in range(config.sessions)]
        sessions = await asyncio.gather(*(pool.open(image=image) for image in chosen_images))
        report.results[f"sessions_{config.sessions}_s"] = time.perf_counter() - start_time
        report.results["mib_a_session"] = (before - _available_mib()) / config.sessions
        start_time = time.perf_counter()
        await _answer_with_their_own_state(sessions)
        report.results["commands_per_s"] = 2 * config.sessions / (time.perf_counter() - start_time)
        report.results["mib_a_session_after_commands"] = (before - _available_mib()) / config.sessions


async def _measure_diffs(config: Config, report: Report, pool: Pool, image: ContainerImage) -> None:
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


def _measure_peer(config: Config, report: Report, image: ContainerImage) -> None:
    bubblewrap = shutil.which("bwrap")
    if bubblewrap is None:
        raise BenchmarkError("bubblewrap is not installed", hint="apt-get install bubblewrap")
    command = [bubblewrap, "--ro-bind", str(image.layers[0]), "/", "--unshare-all", "/bin/bash", "-c", ":"]
    durations = []
    for _ in range(config.repeats):
        start_time = time.perf_counter()
        subprocess.run(command, check=True)
        durations.append(1000 * (time.perf_counter() - start_time))
    report.measure("bubblewrap_command_ms", durations)


def _make_images(store: Path, count: int, layers: int) -> list[ContainerImage]:
    """Make images of this machine's shell; half of the layers of each are shared by all."""
    base = store / "base" / "files"
    paths = [path for name in _PROGRAMS if (path := shutil.which(name, path="/usr/bin:/bin"))]
    listed = subprocess.run(["ldd", *paths], capture_output=True, text=True, check=True).stdout
    for path in {*paths, *re.findall(r"(/\S+) \(0x", listed)}:
        (base / path[1:]).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, base / path[1:])
    if not (base / "bin" / "bash").exists():
        (base / "bin").mkdir(exist_ok=True)
        (base / "bin" / "bash").symlink_to("/usr/bin/bash")
    shared = [base, *(_make_layer(store, f"shared-{place}") for place in range(layers // 2 - 1))]
    images = []
    for number in range(count):
        place_names = [f"image-{number}-{place}" for place in range(layers - len(shared))]
        folders = (*shared, *(_make_layer(store, name) for name in place_names))
        digest = hashlib.sha256(str(number).encode()).hexdigest()
        settings = ImageSettings(working_folder="/root")
        images.append(
            ContainerImage(reference=f"{number}", digest=f"sha256:{digest}", layers=folders, settings=settings)
        )
    return images


def _make_layer(store: Path, name: str) -> Path:
    folder = store / name / "files"
    (folder / "opt" / name).mkdir(parents=True)
    for number in range(20):
        (folder / "opt" / name / str(number)).write_text(f"{name} {number}\n")
    return folder


def _available_mib() -> float:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable")) / 1024


if __name__ == "__main__":
    run_benchmark("container_sessions", Config, measure)
