"""An actor on each host at the start of a run, which reports the host's devices and the files that it sees."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Sequence
from pathlib import Path

from monarch.actor import concurrent_endpoint

from forge_rl.engines.host import HostInfo
from forge_rl.runtime.service import ServiceActor


class HostActor(ServiceActor):
    """One process on a host, at the start of a run."""

    @concurrent_endpoint
    async def info(self) -> HostInfo:
        return HostInfo.of_this_host()

    @concurrent_endpoint
    async def missing(self, paths: Sequence[Path]) -> list[Path]:
        """Return the paths that this host does not see."""
        return [path for path in paths if not path.exists()]

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
