"""Fixtures for all tests, and what must be true when they end: no process and no file of theirs is left."""

import asyncio
import contextlib
import getpass
import mmap
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import hypothesis  # noqa: F401  its pytest plugin would import it at the end, while Monarch's threads still run
import pytest

ROOT = Path(__file__).parent.parent
SESSION = f"FORGE_RL_TESTS={uuid.uuid4().hex}"
MONARCH_LOGS = Path(tempfile.gettempdir()) / getpass.getuser()

# Every process below this one inherits these: small models are quickest on one thread, actors of tests must be
# importable, and the mark tells our processes from anybody else's.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
os.environ["FORGE_RL_TESTS"] = SESSION.partition("=")[2]


def started_processes() -> set[int]:
    """Processes that this session started, also those whose parent has ended.

    Python's resource tracker is left out: it ends with pytest, and complains if it ends before.
    """
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended meanwhile, or is not ours
            ours = SESSION.encode() in (folder / "environ").read_bytes().split(b"\0")
            if ours and b"resource_tracker" not in (folder / "cmdline").read_bytes():
                found.add(int(folder.name))
    return found - {os.getpid()}


def pytest_sessionstart(session: pytest.Session) -> None:
    session.config.stash[_HAD_LOGS] = MONARCH_LOGS.is_dir() and any(MONARCH_LOGS.iterdir())


def pytest_sessionfinish(session: pytest.Session) -> None:
    for pid in started_processes():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    if not session.config.stash[_HAD_LOGS] and MONARCH_LOGS.is_dir():
        for path in MONARCH_LOGS.glob("monarch_log*"):
            path.unlink()
        with contextlib.suppress(OSError):  # somebody else's file is in it
            MONARCH_LOGS.rmdir()


_HAD_LOGS = pytest.StashKey[bool]()


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """Fails a test that leaves a process of its own behind."""
    before = started_processes()
    yield
    left = started_processes() - before
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert not left, f"processes are left: {sorted(left)}"


@pytest.fixture(scope="session")
def store_process() -> Iterator[None]:
    """The process that the tests' stores share, from before a test that looks for processes that are left."""
    from tests.fake_store import shared_process

    asyncio.run(shared_process().start())
    yield
    asyncio.run(shared_process().close())


@pytest.fixture
def shm() -> Iterator[Path]:
    """A folder in shared memory; fails a test that leaves something in it."""
    folder = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="tests-"))
    yield folder
    left = [str(path) for path in folder.rglob("*")]
    shutil.rmtree(folder)
    assert not left


@pytest.fixture
def small_shm() -> Iterator[Path]:
    """A file system in memory with room for 16 pages."""
    folder = Path(tempfile.mkdtemp())
    command = ["mount", "-t", "tmpfs", "-o", f"size={16 * mmap.PAGESIZE}", "tmpfs", folder]
    try:
        mounted = subprocess.run(command, capture_output=True, text=True)
        if mounted.returncode:
            pytest.skip(f"a small file system cannot be mounted here: {mounted.stderr.strip()}")
        yield folder
        left = [str(path) for path in folder.rglob("*")]
        subprocess.run(["umount", "-l", folder], check=True)
        assert not left
    finally:
        folder.rmdir()


@pytest.fixture(scope="module")
def process_group() -> Iterator[None]:
    """A process group of one, as a trainer of one rank has it."""
    import torch
    import torch.distributed as dist

    from forge_rl.engines.platform import init_distributed

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    init_distributed(0, 1, "", 0)
    yield
    dist.destroy_process_group()
    torch.set_num_threads(threads)


assert "forge_rl" not in sys.modules, "conftest imports nothing of ours: tests of imports count on it"
