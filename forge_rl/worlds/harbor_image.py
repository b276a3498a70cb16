"""Runs the tests of a Harbor task with an image: in a fresh session of it, on the model's changes."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forge_rl.errors import TaskError
from forge_rl.sandbox import Limits, SandboxError
from forge_rl.sandbox.workspaces.changes import Change
from forge_rl.sandbox.workspaces.image_changes import counted, folder_changes
from forge_rl.types import Task
from forge_rl.worlds.container import Attempt, Container, ContainerSession, JudgeSession
from forge_rl.worlds.harbor_trial import TESTS_S, UNTRUSTED, memory_bytes, parsed_reward

_LOGS = ("/logs/verifier", "/logs/agent", "/logs/artifacts")
_OUTPUT = "/logs/verifier/test-stdout.txt"
_VERIFY = f"cd . && /tests/test.sh > {_OUTPUT} 2>&1"
_PROCESSES, _FILES, _SHARE = 256, 100_000, 2
_SIGNALS = 128
"""Exit statuses above this say which signal ended a program."""


def harbor_container(
    task: Task, *, timeout_s: float, memory_mib: int, store: str, provider: str = ""
) -> ContainerSession:
    """Return the shell of one episode of a task with an image.

    Args:
        timeout_s: seconds that the commands of one completion may run.
        memory_mib: memory of a session whose task sets none; half of it is for files.
        store: folder of images.
        provider: who runs containers; "" for this machine.
    """
    truth: Mapping[str, Any] = task.truth
    about: Mapping[str, Any] = truth["config"].get("environment") or {}
    memory = memory_bytes(about, memory_mib)
    limits = Limits(
        memory_bytes=memory,
        cpus=float(about.get("cpus") or 1),
        processes=_PROCESSES,
        scratch_bytes=memory // _SHARE,
        scratch_files=_FILES,
        transfer_bytes=memory // _SHARE,
    )
    container = Container(
        reference=truth["image"],
        store=store,
        limits=limits,
        timeout_s=timeout_s,
        env={str(name): str(value) for name, value in (about.get("env") or {}).items()},
        folder=str(about.get("workdir") or ""),
        provider=provider,
    )
    return ContainerSession(container, _Verifier(task, container))


class _Verifier:
    """Runs tests/test.sh of a task, and reads the reward that it writes."""

    def __init__(self, task: Task, container: Container) -> None:
        self._task, self._container = task, container
        truth: Mapping[str, Any] = task.truth
        self._tests = Path(truth["folder"]) / "tests"
        self._settings: Mapping[str, Any] = truth["config"].get("verifier") or {}

    async def __call__(self, session: JudgeSession, attempt: Attempt) -> tuple[float, Mapping[str, float]]:
        """Run the tests; see `worlds.container.Judge`."""
        # Asked before the model's changes, which may name another home in /etc/passwd.
        answer = await session.run(["/bin/sh", "-c", 'printf "%s\\n%s" "$HOME" "$PWD"'], env=self._container.env)
        home, _, work = answer.stdout.partition("\n")
        # PYTHONSAFEPATH keeps modules in the working folder from shadowing the tests' imports.
        variables = {**self._container.env, **UNTRUSTED, "PYTHONSAFEPATH": "1"}
        if home:
            variables.setdefault("HOME", home)
        variables |= {str(name): str(value) for name, value in (self._settings.get("env") or {}).items()}
        # Changes that would run before or with the tests are left out, so that they cannot decide the reward.
        changes = await asyncio.to_thread(
            counted,
            attempt.changes,
            attempt.root,
            variables=variables,
            home=variables.get("HOME", ""),
            work=self._container.folder or work,
        )
        try:
            await session.apply(changes)
        except SandboxError:
            if session.lost or not session.alive:
                raise
            return 0.0, {}  # the model's changes do not fit into a fresh session
        await self._put_tests(session)
        result = await session.run(
            ["/bin/sh", "-c", _VERIFY],
            wall_s=float(self._settings.get("timeout_sec") or TESTS_S),
            env=variables,
            folder=self._container.folder,
        )
        # A signal that ends the tests is blamed on the code that they test.
        is_killed = result.status is not None and result.status > _SIGNALS
        if is_killed or (result.error is not None and result.error.name in ("CellOverrun", "OutOfMemory")):
            return 0.0, {}
        for name in ("reward.json", "reward.txt"):
            try:
                content = await session.get(f"/logs/verifier/{name}")
            except SandboxError:
                if session.lost or not session.alive:
                    raise
                continue
            return parsed_reward(f"{name}\n{content[: 1 << 16].decode('utf-8', 'replace')}", self._task.id)
        raise TaskError(
            f"tests/test.sh of {self._task.id} wrote no reward: {await self._output(session, result.stderr)}",
            hint="tests run without a network: see docs/doors/world.md",
        )

    async def _put_tests(self, session: JudgeSession) -> None:
        changes: list[Change] = folder_changes(self._tests, "/tests")
        for folder in _LOGS:
            changes += folder_changes(self._tests, folder)[: folder.count("/")]
        try:
            await session.apply(changes)
        except SandboxError as error:
            if session.lost or not session.alive:
                raise
            raise TaskError(
                f"{self._tests} does not fit into the session: {error.message}", hint="raise memory_mb in task.toml"
            ) from None

    async def _output(self, session: JudgeSession, otherwise: str) -> str:
        try:
            text = (await session.get(_OUTPUT)).decode("utf-8", "replace")
        except SandboxError:
            text = otherwise
        return text.strip()[-600:] or "it printed nothing"
