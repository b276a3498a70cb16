"""Work on a folder by requests, as ranks do on hosts that do not see the controller's disk."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from forge_rl.runtime.far_files import Answer, FarFolder, FileDesk, FolderServer

T = TypeVar("T")


def answered(folder: FolderServer, work: Callable[[FarFolder], T], *, max_requests: int = 200) -> T:
    """Do work in this thread, as a rank does, while another one answers its requests, as the controller does; at most
    so many."""
    desk, ready, requests = FileDesk(), threading.Event(), list[Any]()

    async def serve() -> None:
        desk.open()
        ready.set()
        answer: Answer = None
        while (request := await desk.exchange(answer)) is not None:
            answer = folder.answer(request)
            requests.append(request)

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    ready.wait()
    try:
        place = desk.place(Path("/far"))
        assert isinstance(place, FarFolder)
        return work(place)
    finally:
        desk.close()
        thread.join()
        assert len(requests) <= max_requests, "it asks for large pieces"
