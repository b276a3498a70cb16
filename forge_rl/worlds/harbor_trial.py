"""The shell of one episode of a Harbor task, and the task's own test script, which scores it.

A task without an image works in a session of this machine's programs; one with an image in a session of that.
"""

from __future__ import annotations

import io
import json
import math
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forge_rl.errors import TaskError
from forge_rl.sandbox import DurableSession, DurableSessions, Limits, PoolSession, SandboxError, shared_pool
from forge_rl.sandbox.durable import DivergedError
from forge_rl.types import Task
from forge_rl.worlds.code_world import CodeSession
from forge_rl.worlds.shell import shown_commands

_WORK, _TESTS, _LOGS = "/app", "/tests", "/logs"
_PROCESSES, _FILES, _SHARE = 128, 20_000, 4
TESTS_S = 600.0
"""Harbor's default for a verifier's timeout."""
_SHIFTS = {"K": 10, "M": 20, "G": 30}
"""Powers of two of Harbor's units of memory."""
_MOST_LOST = 8
"""Maximum losses of the sandbox's server during the tests of one episode."""
_UNPACK = ("tar", "-x", "--no-same-owner", "-f", "-", "-C")
_VERIFY = """mkdir -p /logs/verifier /logs/agent /logs/artifacts && chmod +x /tests/test.sh || exit 125
/tests/test.sh > /logs/verifier/test-stdout.txt 2>&1"""
_READ = """for name in reward.json reward.txt; do
  if [ -e "/logs/verifier/$name" ]; then echo "$name"; exec head -c 65536 "/logs/verifier/$name"; fi
done
tail -c 2000 /logs/verifier/test-stdout.txt; exit 1"""
UNTRUSTED = {"PYTHONNOUSERSITE": "1", "PYTHONDONTWRITEBYTECODE": "1"}
"""Variables of the tests, so that their Python runs nothing from the model's home folder."""


class HarborSession(CodeSession):
    """The session in which the model works on one task. It starts with the first commands, or else with the tests.

    Args:
        timeout_s: seconds that the commands of one completion may run.
        memory_mib: memory of a session whose task sets none.
    """

    def __init__(self, task: Task, *, timeout_s: float, memory_mib: int, session: DurableSession | None = None) -> None:
        self._task, self._timeout_s, self._memory_mib = task, timeout_s, memory_mib
        truth: Mapping[str, Any] = task.truth
        self._folder = Path(truth["folder"])
        self._about: Mapping[str, Any] = truth["config"].get("environment") or {}
        self._verifier: Mapping[str, Any] = truth["config"].get("verifier") or {}
        self._work = working_folder(self._about)
        self._variables = {str(name): str(value) for name, value in (self._about.get("env") or {}).items()}
        self._session = session

    async def run(self, commands: str) -> str:
        """Run command lines in the task's folder; return what the model is shown.

        Raises:
            SandboxError: the sandbox failed; a `DivergedError` if the files were lost, and commands showed something
                else when they were rerun.
        """
        session = self._session or await self._open()
        folders = {self._work: "work", _LOGS: "logs"}
        result = await session.run(
            commands, wall_s=self._timeout_s, env=self._variables, folder=self._work, folders=folders
        )
        return shown_commands(session, result)

    async def fork(self) -> HarborSession:
        """Return a session with a copy of this one's files."""
        session = None if self._session is None else await self._session.fork()
        return HarborSession(self._task, timeout_s=self._timeout_s, memory_mib=self._memory_mib, session=session)

    async def close(self) -> None:
        """End the session."""
        if self._session is not None:
            await self._session.close()

    async def _open(self) -> DurableSession:
        """Open the model's session, with the files of the task's folder `environment`."""
        memory = memory_bytes(self._about, self._memory_mib)
        limits = Limits(
            memory_bytes=memory,
            cpus=float(self._about.get("cpus") or 1),
            processes=_PROCESSES,
            scratch_bytes=memory // _SHARE,
            scratch_files=_FILES,
        )
        self._session = DurableSessions(await shared_pool(profile="process")).open(limits=limits)
        if (environment_folder := self._folder / "environment").is_dir():
            # Unpacked inside, as the session's user and under its limits.
            result = await self._session.run(
                [*_UNPACK, self._work], stdin=_packed(environment_folder), folders={self._work: "work"}
            )
            _check_unpacked(environment_folder, result.status, result.stderr)
        return self._session

    async def score(self) -> tuple[float, Mapping[str, float]]:
        """Run the tests on a copy of the session's files, in a fresh session; return the reward and its parts."""
        is_untouched = self._session is None
        try:
            return await self._judged()
        except (TaskError, SandboxError) as error:
            if is_untouched or isinstance(error, DivergedError):
                raise
        # What the model left cannot be judged, as where it has filled its disk. If the task's own files can, this is
        # the model's doing.
        await self.close()  # its place in the pool is needed
        original = HarborSession(self._task, timeout_s=self._timeout_s, memory_mib=self._memory_mib)
        try:
            await original._judged()
        finally:
            await original.close()
        return 0.0, {}

    async def _judged(self) -> tuple[float, Mapping[str, float]]:
        # An episode without commands is tested as well, on the task's own files.
        model = self._session or await self._open()
        for retries_left in range(_MOST_LOST, -1, -1):
            # A copy, so that tests which lose their server start again from the files that the model left.
            async with await model.branch() as session:
                try:
                    return await self._verify(session)
                except SandboxError:
                    if not retries_left or not session.lost:
                        raise
        raise AssertionError("unreachable")

    async def _verify(self, session: PoolSession) -> tuple[float, dict[str, float]]:
        # The folders behind /tests and /logs are new: what the model left in its own /logs is not seen.
        folders = {self._work: "work", _TESTS: "tests", _LOGS: "verifier"}
        tests = self._folder / "tests"
        result = await session.run([*_UNPACK, _TESTS], stdin=_packed(tests), folders=folders)
        _check_unpacked(tests, result.status, result.stderr)
        variables = {str(name): str(value) for name, value in (self._verifier.get("env") or {}).items()}
        result = await session.run(
            ["/bin/sh", "-c", _VERIFY],
            wall_s=float(self._verifier.get("timeout_sec") or TESTS_S),
            env={**self._variables, **UNTRUSTED, **variables},
            folder=self._work,
            folders=folders,
        )
        # Tests that do not end are the fault of what they test; without a reward they are the task's.
        if result.error is not None and result.error.name == "CellOverrun":
            return 0.0, {}
        read_result = await session.run(["/bin/sh", "-c", _READ], folders=folders)
        if read_result.error is not None or read_result.status != 0:
            output = result.error.message if result.error else read_result.stdout.strip()[-600:]
            raise TaskError(
                f"tests/test.sh of {self._task.id} wrote no reward: {output or 'it printed nothing'}",
                hint="tests run without a network and without an image: see docs/doors/world.md",
            )
        return parsed_reward(read_result.stdout, self._task.id)


def working_folder(environment: Mapping[str, Any]) -> str:
    """Return the folder in which a task's commands start."""
    return str(environment.get("workdir") or _WORK)


def memory_bytes(environment: Mapping[str, Any], otherwise_mib: int) -> int:
    """Return the memory of a task's session: its `memory_mb`, or `memory` as older tasks have it, such as "2G".

    Raises:
        TypeError, ValueError, OverflowError: it is not a positive size.
    """
    size = environment.get("memory_mb") or environment.get("memory") or otherwise_mib
    # A size in text ends in its unit; a number counts MiB.
    number, unit = (size[:-1], size[-1].upper()) if isinstance(size, str) else (size, "M")
    if unit not in _SHIFTS or (memory := int(float(number) * 2 ** _SHIFTS[unit])) <= 0:
        raise ValueError(f"the memory is {size!r:.80}, not a size such as '2G'")
    return memory


def parsed_reward(text: str, task: str) -> tuple[float, dict[str, float]]:
    """Read a reward file as Harbor does: reward.txt has a number, reward.json an object of numbers.

    Args:
        text: the file's name on the first line, then its content.
        task: the task's name, for errors.

    Returns:
        The value of `reward`, or else the mean of all; and each value if there are several.

    Raises:
        TaskError: the file has something else, or a number that is not finite.
    """
    name, _, content = text.partition("\n")
    try:
        values = json.loads(content) if name == "reward.json" else {"reward": float(content)}
        if not isinstance(values, dict) or not values:
            raise ValueError("it is not an object of numbers")
        numbers = {str(key): float(value) for key, value in values.items() if isinstance(value, int | float)}
        if len(numbers) < len(values) or not all(map(math.isfinite, numbers.values())):
            raise ValueError("a value is not a finite number")
    except (ValueError, RecursionError, OverflowError) as error:
        raise TaskError(
            f"{name} of {task} has no reward: {error}: {content[:80]!r}", hint="tests/test.sh must write numbers"
        ) from None
    total = numbers.get("reward", sum(numbers.values()) / len(numbers))
    return total, numbers if len(numbers) > 1 else {}


def _packed(folder: Path) -> bytes:
    """Return a folder's files, folders and links as a tar archive."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        archive.add(
            folder,
            arcname=".",
            # Devices and pipes have no place in a session.
            filter=lambda member: member if member.isreg() or member.isdir() or member.issym() else None,
        )
    return file.getvalue()


def _check_unpacked(folder: Path, status: int | None, stderr: str) -> None:
    if status != 0:
        raise TaskError(
            f"{folder} does not fit into the session: {stderr.strip()[-300:]}",
            hint="raise memory_mb in task.toml: a quarter of it is for files",
        )
