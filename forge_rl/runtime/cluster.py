"""Hosts, and the named process meshes that services spawn on them."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from monarch.actor import ProcMesh


_LARGE_MESSAGES = ("HYPERACTOR_CODEC_MAX_FRAME_LENGTH", "910737418240")
"""Monarch's bound on the bytes of a message; torchstore wants this one, and sets it aloud where it is not set."""


class Cluster:
    """The machine that this process runs on, as a place for process meshes.

    Args:
        logs: folder for what the processes print, one file for each; it exists.

    Every process ends with this one, however this one ends.
    """

    def __init__(self, logs: Path) -> None:
        os.environ.setdefault(*_LARGE_MESSAGES)
        self._logs = logs
        self._meshes: dict[str, ProcMesh] = {}

    def log_file(self, name: str) -> Path:
        """Where the processes of a mesh print to."""
        return self._logs / f"{name}.log"

    def spawn(
        self, name: str, *, ranks: int = 1, env: Mapping[str, str] | None = None, imports: Sequence[str] = ()
    ) -> ProcMesh:
        """A mesh of processes with one axis, `ranks`.

        Args:
            name: unique among the living meshes.
            ranks: how many processes.
            env: added to the environment of each.
            imports: modules that each imports first. Actors that share a process unpickle side by side, and would
                otherwise find modules half imported.
        """
        with _quiet_stderr():  # Monarch announces its log file there, in the middle of the display
            from monarch.actor import default_bootstrap_cmd, this_host

            command = default_bootstrap_cmd().with_env({**os.environ, **(env or {})})
            mesh = this_host().spawn_procs(
                per_host={"ranks": ranks},
                bootstrap=functools.partial(_start_child, str(self.log_file(name)), tuple(imports)),
                bootstrap_command=lambda _: command,
                name=name.replace("/", "_"),
            )
        self._meshes[name] = mesh
        return mesh

    async def stop(self, name: str, *, deadline_s: float = 10.0) -> None:
        """End a mesh's processes. One that does not end in time ends with the controller."""
        mesh = self._meshes.pop(name, None)
        if mesh is not None:
            with contextlib.suppress(Exception):  # a mesh that has failed already cannot be stopped again
                await asyncio.wait_for(mesh.stop(), deadline_s)

    async def close(self) -> None:
        """End all meshes."""
        async with asyncio.TaskGroup() as group:
            for name in list(self._meshes):
                group.create_task(self.stop(name))


def _start_child(log_file: str, imports: Sequence[str]) -> None:
    """First thing in every process: its output, and that of its own children, goes to its log file."""
    sys.stdout.flush()
    sys.stderr.flush()
    fd = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
    for module in imports:
        importlib.import_module(module)


@contextlib.contextmanager
def _quiet_stderr():  # type: ignore[no-untyped-def]
    """Drop what native code prints to stderr meanwhile."""
    sys.stderr.flush()
    saved, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    os.close(null)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
