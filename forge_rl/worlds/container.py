"""The shell of one episode in a session of an image, and the fresh session in which its tests run."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from forge_rl.errors import TaskError
from forge_rl.sandbox import DurableSession, Limits, PoolSession, Result, SandboxError
from forge_rl.sandbox.images import ImageError
from forge_rl.sandbox.images.references import LocalReference, parse_reference
from forge_rl.sandbox.providers.containers import RentedSession
from forge_rl.sandbox.providers.roots import UnreadableRootError
from forge_rl.sandbox.workspaces.changes import Change
from forge_rl.sandbox.workspaces.image_programs import RootNames
from forge_rl.worlds.code_world import CodeSession
from forge_rl.worlds.container_places import place_of
from forge_rl.worlds.shell import shown_commands

_MOST_LOST = 8
"""Maximum losses of the sandbox's server during the tests of one episode."""
_MOST_FAILURES = 2
"""Failures of the tests' session, while its server lives, after which the tests have failed."""

_SPENT = "error: files and processes exceeded the session's limits, and it has ended"


class _TestsEndedError(SandboxError):
    """The session of the tests failed each time."""


@dataclass(frozen=True, kw_only=True)
class Container:
    """A task's settings for the container in which the model works.

    container = Container(reference="ubuntu:24.04", store="~/images", limits=Limits(), timeout_s=60)
    """

    reference: str
    """Reference of the image."""
    store: str
    """Folder of images."""
    limits: Limits
    timeout_s: float
    """Seconds that the commands of one completion may run."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of commands, in addition to the image's."""
    folder: str = ""
    """Where commands start; "" for the image's working folder."""
    provider: str = ""
    """Name of the provider that runs containers; "" for sessions of this machine."""


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """The model's changes to the image, which the tests judge."""

    root: RootNames
    """Names in the image's root."""
    changes: Sequence[Change]
    """All of its changes to the image's root."""


JudgeSession: TypeAlias = PoolSession | RentedSession
"""A fresh session, in which tests run."""
Judge = Callable[[JudgeSession, Attempt], Awaitable[tuple[float, Mapping[str, float]]]]
"""Runs the tests of a task in a fresh session; returns the reward and its parts."""


class ContainerSession(CodeSession):
    """The shell of one episode, opened with its first commands.

    Args:
        judge: scores what the commands have changed, in another session, once this one has ended.
        hidden: paths that are deleted before the first commands, such as tests that the image has.
    """

    def __init__(
        self,
        container: Container,
        judge: Judge,
        *,
        hidden: Sequence[str] = (),
        session: DurableSession | RentedSession | None = None,
    ) -> None:
        self._container, self._judge = container, judge
        self._hidden = hidden
        self._session = session
        self._opening = asyncio.Lock()
        self._opener: asyncio.Task[DurableSession | RentedSession] | None = None
        self._place = place_of(
            container.reference, container.limits, store=container.store, provider=container.provider
        )
        self._is_spent = False
        """Whether the session has ended: by its commands, or closed."""

    async def run(self, commands: str) -> str:
        """Run command lines in the image's shell; return what the model is shown.

        Raises:
            SandboxError: the image cannot be fetched, or the sandbox failed; a `DivergedError` if the files were lost
                and commands showed something else when they were rerun.
        """
        result = await self.execute(commands)
        return _SPENT if result is None or self._session is None else shown_commands(self._session, result)

    async def execute(
        self, command: str | Sequence[str], *, env: Mapping[str, str] | None = None, folder: str = ""
    ) -> Result | None:
        """Run a program with its arguments, or command lines in the image's shell.

        Args:
            env: variables besides the container's.
            folder: where it starts; "" for the container's.

        Returns:
            The result; None if the session has ended: it exceeded its memory, or a command took too long at a provider.

        Raises:
            SandboxError: as `run`.
        """
        # An agent may send its first commands at once: they share one session.
        async with self._opening:
            if self._is_spent:
                return None
            if self._session is None:
                self._opener = asyncio.ensure_future(self._open())
                try:
                    await self._opener
                except asyncio.CancelledError:
                    task = asyncio.current_task()
                    if task is not None and not task.cancelling():  # `close` cut off the opening alone
                        return None
                    raise
            session = self._session
            assert session is not None
        container = self._container
        result = await session.run(
            command,
            wall_s=container.timeout_s,
            env={**container.env, **(env or {})},
            folder=folder or container.folder,
        )
        if not session.alive and result.error is not None and result.error.name == "OutOfMemory":
            # Files in memory count too: this is the model's doing, and no failure of the sandbox.
            self._is_spent = True
            return None
        if isinstance(session, RentedSession) and not session.alive:
            self._is_spent = True
            return None
        # Commands cannot end a session of this machine: its server was lost with the same ones again and again.
        if not session.alive:
            raise SandboxError(f"the session of the episode is gone: {result.error and result.error.message}")
        return result

    async def fork(self) -> ContainerSession:
        """Return a session with a copy of this one's files."""
        session = None if self._session is None or self._is_spent else await self._session.fork()
        fork = ContainerSession(self._container, self._judge, hidden=self._hidden, session=session)
        fork._is_spent = self._is_spent
        if session is not None:
            # The fork keeps the image in place itself, as it may outlive this session.
            await fork._place.hold()
        return fork

    async def close(self) -> None:
        """End the session."""
        self._is_spent = True
        # The command of an agent that was killed may still wait for an image.
        if self._opener is not None:
            self._opener.cancel()
        async with self._opening:
            try:
                if self._session is not None:
                    await self._session.close()
            finally:
                await self._place.close()

    async def _open(self) -> DurableSession | RentedSession:
        async with contextlib.AsyncExitStack() as stack:
            session = await self._place.open()
            stack.push_async_callback(session.close)
            if self._hidden:
                # Tests that the image holds would show the model what it is judged by.
                result = await session.run(["rm", "-rf", "--", *self._hidden], folder="/")
                if result.status != 0:
                    raise TaskError(
                        f"{self._hidden[0]} cannot be hidden in {self._container.reference}: {result.stderr[-200:]}",
                        hint="the image needs rm, and a user who may delete its tests",
                    )
            # Set once the tests are hidden: a command after one that was cut off here must not see them.
            self._session = session
            stack.pop_all()
        return session

    async def score(self) -> tuple[float, Mapping[str, float]]:
        """Stop the model's session, and judge its changes in a fresh one; return the reward and its parts."""
        # The model's own commands ended the session, and no files are left to judge.
        if self._is_spent:
            return 0.0, {}
        changes: Sequence[Change] = ()
        await self._place.hold()
        if self._session is not None:
            # Ended before the tests start, so that nothing the model left running sees or touches them.
            model, self._session = self._session, None
            try:
                async with model:
                    changes = (await model.changes()).changes
            # What the model left in the container cannot be listed, so that it cannot be judged.
            except UnreadableRootError:
                return 0.0, {}
        root = self._place.root()
        try:
            return await self._judged(Attempt(root=root, changes=changes))
        except (TaskError, _TestsEndedError):
            if not changes:
                raise
            # Tests that cannot judge what the model left, but the image as it was, failed because of the model.
            await self._judged(Attempt(root=root, changes=()))
            return 0.0, {}

    async def _judged(self, attempt: Attempt) -> tuple[float, Mapping[str, float]]:
        failures = 0
        for retries_left in range(_MOST_LOST, -1, -1):
            async with self._place.session() as session:
                try:
                    return await self._judge(session, attempt)
                except SandboxError as error:
                    # A lost server says nothing about the tests, and is allowed more often than a failing session.
                    failures += not session.lost
                    if failures == _MOST_FAILURES:
                        raise _TestsEndedError(error.message, hint=error.hint) from error
                    if not retries_left:
                        raise
        raise AssertionError("unreachable")


def task_image(reference: str, *, local: bool, provider: str = "") -> str:
    """Check the image that a task names, and return its name.

    The task's author would otherwise decide which files this machine reads and, with a Dockerfile, which programs run.

    Raises:
        ImageError: it is not an image of a registry, and either not a file of this machine, or `local` is False, or a
            provider is to fetch it.
    """
    parsed = parse_reference(reference)
    if provider and isinstance(parsed, LocalReference):
        raise ImageError(f"a task names the image {reference!r:.200}", hint=f"{provider} needs one of a registry")
    if isinstance(parsed, LocalReference) and (parsed.kind == "dockerfile" or not local):
        raise ImageError(
            f"a task names the image {reference!r:.200}, which is not a registry's",
            hint="allow files of this machine with local=true if the tasks are yours"
            if parsed.kind != "dockerfile"
            else "build it before, and name the result",
        )
    return reference
