"""Files for processes on hosts that do not see the controller's disks, and copies of its folders there."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from forge_rl.errors import ReplicaError
from forge_rl.models.copies import contents_of
from forge_rl.runtime.cluster import SpawnedMesh
from forge_rl.runtime.far_files import Answer, FileRequest, FolderServer
from forge_rl.runtime.files_actor import FilesActor
from forge_rl.runtime.processes import cause_of
from forge_rl.runtime.replica import Replica
from forge_rl.runtime.service import Service
from forge_rl.services.host_actor import HostActor
from forge_rl.system.tasks import task_group

_OPEN_S = 60.0
_NOTICE_S = 3.0
"""Maximum delay until the death of a process is noticed after a failed call."""


async def open_files(service: Service, replica: Replica, meshes: Iterable[SpawnedMesh], files: FolderServer) -> None:
    """Give each process in these meshes of a replica access to a folder, until it closes its `process_desk`.

    A process that can no longer be served counts as dead.

    Raises:
        ReplicaError: the replica died, or does not answer.
    """
    for mesh in meshes:
        actors: Any = mesh.procs.spawn(f"files_{uuid.uuid4().hex}", FilesActor)
        try:
            async with asyncio.timeout(_OPEN_S):
                await actors.open.call()
        except Exception as error:  # Monarch raises several unrelated classes
            await _dead(service, replica, error)
            cause = replica.death.result()
            raise ReplicaError(cause, service=service.name, replica=replica.index, hint=f"see {replica.log}") from error
        for rank in range(mesh.ranks):
            serving = _serve(service, replica, actors.slice(ranks=rank), files)
            service.in_background(serving, replica.index, "files are no longer served")


async def _serve(service: Service, replica: Replica, actor: Any, files: FolderServer) -> None:
    """Answer the requests of a process until its work has ended, or the replica is dead."""
    answer: Answer = None
    try:
        while True:
            # Each call carries the last answer and returns the next request, so the process needs no way to call this
            # one.
            exchange = asyncio.ensure_future(_exchange(actor, answer))
            try:
                await asyncio.wait((exchange, replica.death), return_when=asyncio.FIRST_COMPLETED)
                # The replica died, or the process has closed its desk.
                if not exchange.done() or (request := exchange.result()) is None:
                    return
            finally:
                exchange.cancel()
            # Disks may be slow, and the controller's loop must not wait for them.
            answer = await asyncio.to_thread(files.answer, request)
    except Exception as error:  # Monarch raises several unrelated classes
        await _dead(service, replica, error)


async def _dead(service: Service, replica: Replica, error: Exception) -> None:
    """Wait briefly for the cause of a replica's death after a failed call; mark it as failed if it still counts as
    alive."""
    await asyncio.wait((replica.death,), timeout=_NOTICE_S)
    if replica.alive:
        cause = cause_of(str(error)) or type(error).__name__
        service.mark_failed(replica, f"files cannot be sent to it: {cause}")


async def _exchange(actor: Any, answer: Answer) -> FileRequest | None:
    """Wrap Monarch's future in a coroutine, as asyncio requires."""
    request: FileRequest | None = await actor.exchange.call_one(answer)
    return request


async def copy_folders(
    service: Service, hosts: Collection[str], folders: Collection[Path], cache: Path | None, *, deadline_s: float
) -> dict[tuple[str, Path], Path]:
    """Copy folders of models into the cache of each host, concurrently, unless it has them.

    Args:
        service: runs a process on each host; to be stopped by the caller.
        cache: folder of the hosts' caches; None for each user's own.
        deadline_s: maximum seconds of a copy.

    Returns:
        The path of each copy, by host and original.

    Raises:
        ForgeError: a host has no space, or does not answer.
    """
    # Read once for all hosts, which compare their caches with it.
    contents = {folder: await asyncio.to_thread(contents_of, folder) for folder in folders}

    async def copy_to(host: str) -> dict[tuple[str, Path], Path]:
        replica = service.spawn(HostActor, host=host)
        await service.watch(replica, deadline_s=deadline_s)
        copies = {}
        for folder, expected in contents.items():
            await open_files(service, replica, replica.meshes, FolderServer(folder, read_only=True))
            copies[host, folder] = await replica.call("copy", folder, expected, cache, deadline_s=deadline_s)
        return copies

    async with task_group() as group:
        tasks = [group.create_task(copy_to(host)) for host in hosts]
    return {place: path for task in tasks for place, path in task.result().items()}
