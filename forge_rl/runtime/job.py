"""Monarch hosts simulated by processes of this machine."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING

from forge_rl.runtime.cluster import quiet_stderr, set_defaults
from forge_rl.runtime.processes import clean_up_after
from forge_rl.system.variables import kept_back

if TYPE_CHECKING:
    from monarch.actor import HostMesh


@contextlib.asynccontextmanager
async def local_hosts(names: Sequence[str]) -> AsyncIterator[dict[str, HostMesh]]:
    """Start hosts as processes of this machine, to try multi-host runs on one host.

        async with local_hosts(["a", "b"]) as hosts:
            cluster = Cluster(logs, hosts=hosts)

    They end with the body, or with this process, however it ends.

    Args:
        names: host names; may be empty.

    Yields:
        Each host's Monarch mesh, by name.
    """
    if not names:
        yield {}
        return
    set_defaults()
    from monarch.job import ProcessJob

    scratch = tempfile.mkdtemp(prefix="hosts-")  # hosts leave folders behind; short, for socket names
    # ProcessJob adds to this process's variables and cannot remove any, so secrets are set to "".
    job = ProcessJob(dict.fromkeys(names, 1), env={**dict.fromkeys(kept_back(), ""), "TMPDIR": scratch})
    guard = None
    try:
        with quiet_stderr():
            job.apply()
            # Monarch's hosts have their own sessions and would outlive this process. Their children end with them.
            guard = clean_up_after([str(job._tmpdir), scratch], [host.pid for host in job._host_to_pid.values()])
            state = job.state(cached_path=None)
        yield {name: getattr(state, name) for name in names}
    finally:
        await asyncio.to_thread(job.kill)
        if guard is not None:
            guard.kill()
            guard.communicate()
        shutil.rmtree(scratch, ignore_errors=True)
