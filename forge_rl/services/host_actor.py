"""An actor on each host at the start of a run, which reports the host's devices and the files that it sees."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from monarch.actor import concurrent_endpoint

from forge_rl.engines.host import HostInfo
from forge_rl.errors import ModelError
from forge_rl.models.bundled import default_cache
from forge_rl.models.copies import Contents, copy_of
from forge_rl.runtime.far_files import FarFolder, process_desk
from forge_rl.runtime.host_facts import Clock, HostFacts
from forge_rl.runtime.replica import Replica
from forge_rl.runtime.service import ServiceActor

_CLOCK_TRIES = 5
_SEEN_S = 10.0
"""Time in which a file that another host wrote must appear on a shared file system."""


class HostActor(ServiceActor):
    """One process on a host, at the start of a run."""

    @concurrent_endpoint
    async def info(self) -> HostInfo:
        return HostInfo.of_this_host()

    @concurrent_endpoint
    async def facts(self) -> HostFacts:
        return await asyncio.to_thread(HostFacts.of_this_host)

    @concurrent_endpoint
    async def clock(self) -> float:
        """Return the host's time, in seconds since 1970."""
        return time.time()

    @concurrent_endpoint
    async def missing(self, paths: Sequence[Path]) -> list[Path]:
        """Return the paths that this host does not see."""
        return [path for path in paths if not path.exists()]

    @concurrent_endpoint
    async def copy(self, folder: Path, contents: Contents, cache: Path | None) -> Path:
        """Copy a folder that the controller opened into this host's cache, and return its path; see `copy_of`."""
        desk = process_desk()
        place = desk.place(folder)
        assert isinstance(place, FarFolder), "the controller opens it first"
        try:
            return await asyncio.to_thread(copy_of, contents, lambda name: place.open(name, "rb"), cache)
        except OSError as error:
            raise ModelError(
                f"the model cannot be copied to {cache or default_cache()}: {error.strerror or error}",
                hint="choose a --cache in which this user may write on all hosts",
            ) from error
        finally:
            desk.close()

    @concurrent_endpoint
    async def answer_probe(self, probe: Path, answer: Path) -> str:
        """Read a file that the controller wrote, and copy it to another, which the controller reads.

        Returns:
            "", or why that did not work.
        """
        try:
            await asyncio.to_thread(shutil.copyfile, probe, answer)
        except OSError as error:
            return str(error.strerror or error)
        return ""


async def appears(path: Path, text: str) -> bool:
    """Wait until a file that a host wrote holds a text here too, which on a shared file system may take seconds."""
    for _ in range(int(_SEEN_S * 10)):
        with contextlib.suppress(OSError):
            if await asyncio.to_thread(path.read_text) == text:
                return True
        await asyncio.sleep(0.1)
    return False


async def ask_facts(replica: Replica, *, deadline_s: float) -> tuple[HostFacts, Clock]:
    """Ask a HostActor for the facts of its host, and compare its clock with this one's.

    Raises:
        ForgeError: it does not answer.
    """
    facts: HostFacts = await replica.call("facts", deadline_s=deadline_s)
    clocks = []
    for _ in range(_CLOCK_TRIES):
        before = time.time()
        host_time: float = await replica.call("clock", deadline_s=deadline_s)
        after = time.time()
        # As in NTP: the host's clock was read between `before` and `after`, so half the round trip bounds the error.
        clocks.append(Clock(offset_s=host_time - (before + after) / 2, error_s=(after - before) / 2))
    # The shortest round trip bounds the clock's error best.
    return facts, min(clocks, key=lambda clock: clock.error_s)
