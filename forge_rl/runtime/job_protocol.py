"""Interface of jobs, which give a run its hosts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from monarch.actor import HostMesh


def _ignore(*_: str) -> None:
    pass


@dataclass(frozen=True, kw_only=True)
class JobListener:
    """Callbacks by which a job informs the run; each is called in the event loop and returns soon.

    JobListener(say=print, on_lost=lambda host, cause: print(f"{host} is gone: {cause}"))
    """

    say: Callable[[str], None] = _ignore
    """Called with a line that says what the job waits for, such as its place in a queue."""
    on_lost: Callable[[str, str], None] = _ignore
    """Called with a host's name and the cause, once the scheduler says that the host is gone for good."""


@runtime_checkable
class Job(Protocol):
    """Gives a run hosts in addition to the controller's.

    A kind of job is a frozen dataclass, whose fields are its options.

    job = build_job("process:2")
    async with job.open(JobListener(say=print)) as hosts:
        cluster = Cluster(logs, hosts=hosts)
    """

    def describe(self, command: Sequence[str]) -> str:
        """Return what --dry-run prints: a batch script, a manifest, or a table of processes; nothing is started.

        Args:
            command: the run's command, without --dry-run.
        """
        ...

    def open(self, listener: JobListener) -> AbstractAsyncContextManager[Mapping[str, HostMesh]]:
        """Acquire the hosts, and give them back after the body, or with this process, however it ends.

        While the body runs, each host that the scheduler counts as dead is reported to `listener.on_lost`, once.

        Returns:
            Each host's Monarch mesh, of one host, by the name by which --placement knows it. Names are letters, digits,
                hyphens and dots.

        Raises:
            ForgeError: the scheduler refused; says why, and which option to change.
        """
        ...


@runtime_checkable
class LedJob(Protocol):
    """A job that starts the command in several processes, one of which leads the run."""

    @property
    def leads(self) -> bool:
        """Whether this process leads; the others end at once."""
        ...


@runtime_checkable
class ReplacingJob(Protocol):
    """A job that can also get a live run another host to replace one that died."""

    @property
    def most_replaced(self) -> int:
        """Number of hosts that a run may ask for; 0 if it asks for none."""
        ...

    async def replace(self, name: str, folder: Path, say: Callable[[str], None]) -> str:
        """Have a host join a run, and wait until it is gone again; release it if cancelled.

        Args:
            name: name of the host, new to the run.
            folder: folder of the run.
            say: called with a line that says what the host waits for, such as its place in a queue.

        Returns:
            Why it is gone; "" if it was released on request.

        Raises:
            ForgeError: the scheduler refused; says why.
        """
        ...


@runtime_checkable
class SubmittedJob(Protocol):
    """Runs the run's whole command elsewhere, controller included, such as in a batch job of a cluster."""

    def describe(self, command: Sequence[str], folder: Path) -> str:
        """Return what --dry-run prints, as `Job.describe` does."""
        ...

    def submit(self, command: Sequence[str], folder: Path, say: Callable[[str], None]) -> int:
        """Submit the command, or attach to it if it already runs; show its output until it ends.

        Args:
            command: the run's command. Flags given later replace earlier ones, so that another --job may be appended.
            folder: the run's folder, which the command must be given by --out; it may not exist yet.
            say: called with a line that says what the job waits for.

        Returns:
            The command's exit status.

        Raises:
            ForgeError: the scheduler refused; says why, and which option to change.
            KeyboardInterrupt: Ctrl-C; the job is cancelled first.
        """
        ...
