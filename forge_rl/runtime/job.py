"""Hosts of a run, as a Monarch job gives them; here a job of processes of this machine."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING

from forge_rl.runtime.cluster import quiet_stderr, set_defaults
from forge_rl.runtime.processes import clean_up_after
from forge_rl.variables import kept_back

if TYPE_CHECKING:
    from monarch.actor import HostMesh


@contextlib.asynccontextmanager
async def local_hosts(names: Sequence[str]) -> AsyncIterator[dict[str, HostMesh]]:
    """Start hosts that are processes of this machine, so that what runs on several hosts can be tried on one.

        async with local_hosts(["a", "b"]) as hosts:
            cluster = Cluster(logs, hosts=hosts)

    They end with the body, or with this process, however it ends.

    Args:
        names: of the hosts; may be empty.

    Yields:
        Monarch's mesh of each host, by name.
    """
    if not names:
        yield {}
        return
    set_defaults()
    from monarch.job import ProcessJob

    scratch = tempfile.mkdtemp(prefix="hosts-")  # they leave folders behind; short, for names of sockets
    # It adds to this process's variables and cannot leave any out.
    job = ProcessJob(dict.fromkeys(names, 1), env={**dict.fromkeys(kept_back(), ""), "TMPDIR": scratch})
    guard = None
    try:
        with quiet_stderr():
            job.apply()
            # Monarch gives its hosts sessions of their own and lets them live on. Their children end with them.
            guard = clean_up_after([str(job._tmpdir), scratch], [host.pid for host in job._host_to_pid.values()])
            state = job.state(cached_path=None)
        yield {name: getattr(state, name) for name in names}
    finally:
        await asyncio.to_thread(job.kill)
        if guard is not None:
            guard.kill()
            guard.communicate()
        shutil.rmtree(scratch, ignore_errors=True)
