"""Actor next to another one in its process, which passes requests for files on to the controller; see `far_files`."""

from __future__ import annotations

from monarch.actor import Actor, concurrent_endpoint

from forge_rl.runtime.far_files import Answer, FileRequest, process_desk


class FilesActor(Actor):
    """Passes requests on while the other actor's event loop is busy, as each actor has its own."""

    @concurrent_endpoint
    async def open(self) -> None:
        process_desk().open()

    @concurrent_endpoint
    async def exchange(self, answer: Answer) -> FileRequest | None:
        return await process_desk().exchange(answer)
