"""Environments and rewards that fail on orders. Processes of services import this."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from pathlib import Path

from forge_rl.envs.protocol import Observation, Step
from forge_rl.envs.single_turn import SingleTurn
from forge_rl.types import Task


def task_of(**truth: object) -> Task:
    """Makes a task whose environment or reward finds its orders in the truth."""
    return Task(id="t", source="s", messages=({"role": "user", "content": "go"},), truth=truth)


async def obey(order: str) -> None:
    """Fail in the way that an order names."""
    match order.split():
        case ["raise", text]:
            raise ValueError(text)
        case ["exit", status]:
            os._exit(int(status))
        case ["block", seconds]:
            time.sleep(float(seconds))  # noqa: ASYNC251  it blocks its process
        case ["hang"]:
            await asyncio.Event().wait()


class NotingEnv:
    """Notes its resets and closes in a file that its task names. Each answer is an order."""

    replayable = False

    def __init__(self, task: Task) -> None:
        self._task = task
        self._said: list[str] = []

    async def reset(self) -> Observation:
        self._note("reset")
        await obey(str(self._task.truth.get("reset", "")))
        return Observation(messages=({"role": "system", "content": str(os.getpid())},))

    async def step(self, answer: str) -> Step:
        self._said.append(answer)
        await obey(answer)
        if answer in ("done", "wrong"):
            return Step(done=True, reward=float(len(self._said)), model_error=answer == "wrong")
        return Step(done=False, messages=({"role": "user", "content": " ".join(self._said)},))

    async def close(self) -> None:
        await asyncio.sleep(0)
        self._note("close")

    def _note(self, what: str) -> None:
        with Path(str(self._task.truth["notes"])).open("a") as file:
            file.write(f"{what} {os.getpid()} {' '.join(self._said)}".strip() + "\n")


class PlainlyClosed(NotingEnv):
    """An environment whose close is not async."""

    def close(self) -> None:  # type: ignore[override]
        self._note("plainly")


class Unclosed:
    """An environment without a close."""

    def __init__(self, task: Task) -> None:
        pass

    async def reset(self) -> Observation:
        return Observation(messages=({"role": "user", "content": "hi"},))

    async def step(self, answer: str) -> Step:
        return Step(done=True)


def length(task: Task, text: str) -> float:
    """Return the length; or die, once, if the task names a file to note it in."""
    once = task.truth.get("once")
    if once is not None:
        with contextlib.suppress(FileExistsError):  # of two replicas one dies
            os.close(os.open(str(once), os.O_CREAT | os.O_EXCL))
            os._exit(5)
    return float(len(text))


def pid(task: Task, text: str) -> float:
    return float(os.getpid())


def negative(task: Task, text: str) -> float:
    return -1.0


def obedient(task: Task, text: str) -> float:
    """Obey the text, in the thread of plain functions."""
    match text.split():
        case ["sleep", seconds]:
            time.sleep(float(seconds))
        case ["number", value]:
            return float(value)
        case ["raise", message]:
            raise ValueError(message)
    return 1.0


class Meeting:
    """An async reward that returns only once two calls are in flight."""

    def __init__(self) -> None:
        self._here = 0
        self._both = None

    async def __call__(self, task: Task, text: str) -> float:
        self._both = self._both or asyncio.Event()
        self._here += 1
        if self._here == 2:
            self._both.set()
        await self._both.wait()
        return 2.0


class Alone:
    """A plain reward that returns how many calls are in flight."""

    def __init__(self) -> None:
        self._here = 0

    def __call__(self, task: Task, text: str) -> float:
        self._here += 1
        time.sleep(0.05)
        most = self._here
        self._here -= 1
        return float(most)


class Elsewhere(SingleTurn):
    """One turn, in a process of its own."""

    in_process = False
