"""Processes for code of others that reads what a model wrote: confined, without secrets, and killed when they are late.

python -c "from forge_rl.rewards.workers import main; main('forge_rl.rewards.maths', 'compare', 10, 'math_verify')"
answers calls on stdin.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib
import json
import os
import pickle
import signal
import struct
import sys
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

from forge_rl.errors import ForgeError
from forge_rl.rewards.confinement import confine, end_with_parent

_START_S = 120.0
"""Longest time for a process until it is there, imports and all."""
_TRIES = 2
"""Processes that may die of one call: the first may have been killed by others."""
_LENGTH = struct.Struct("=Q")
_MOST_TOLD = 500
"""Longest error of a process that is reported, in letters."""


@dataclass(eq=False)
class Workers:
    """Calls a function in processes of its own, each of which takes one call at a time.

        workers = Workers("forge_rl.rewards.maths", "compare", processes=2, deadline_s=5, imports=("math_verify",))
        await workers(["1/2"], "0.5")  # [True, "1/2"]; None where there was no answer in time

    Processes start when they are needed, with an environment of their own and so without secrets, and `confine`
    themselves before their first call. They end with this one. Arguments travel pickled; results are JSON, as a
    process that has read hostile text is not trusted.
    """

    module: str
    function: str
    """Name of a function whose arguments pickle and whose result is JSON."""
    processes: int
    """Most processes at a time."""
    deadline_s: float
    """Longest time for a call, from when a process has it. The process is then killed."""
    imports: tuple[str, ...] = ()
    """Packages that a process imports before it is ready, and may import more of later."""
    _idle: deque[asyncio.subprocess.Process] = field(default_factory=deque, init=False)
    _loop: asyncio.AbstractEventLoop | None = field(default=None, init=False)
    _room: asyncio.Semaphore = field(init=False)

    async def __call__(self, *arguments: object) -> object:
        """Return what the function returns; None where it is late, or its process died of it.

        Raises:
            ForgeError: no process starts, or the function raises.
        """
        if self._loop is not (loop := asyncio.get_running_loop()):
            self._loop, self._room = loop, asyncio.Semaphore(self.processes)
            self._idle.clear()
        call = pickle.dumps(arguments)
        async with self._room:
            for _ in range(_TRIES):
                process = self._idle.pop() if self._idle else await self._start()
                try:
                    async with asyncio.timeout(self.deadline_s):
                        answer = await _ask(process, call)
                except TimeoutError:
                    await _end(process)
                    return None
                except BaseException:
                    await _end(process)
                    raise
                if answer is not None:
                    self._idle.append(process)
                    break
                await _end(process)
            else:
                return None
        if "result" not in answer:
            said = str(answer.get("error"))[:_MOST_TOLD]
            raise ForgeError(f"{self.module}: {said}", hint="report it, with the answer that it was about")
        return answer["result"]

    async def _start(self) -> asyncio.subprocess.Process:
        run = "import sys; from forge_rl.rewards.workers import main; main(*sys.argv[1:])"
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", run, self.module, self.function, str(self.deadline_s), *self.imports),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            cwd="/",
            env={
                "PYTHONPATH": os.pathsep.join(filter(None, map(os.path.abspath, sys.path))),
                "PYTHONUNBUFFERED": "1",
                "PYTHONDONTWRITEBYTECODE": "1",
                "OPENBLAS_NUM_THREADS": "1",
                "OMP_NUM_THREADS": "1",
            },
        )
        line = b""
        try:
            assert process.stdout is not None
            async with asyncio.timeout(_START_S):
                line = await process.stdout.readline()
        finally:
            if not line:
                await _end(process)
        if line != b"ready\n":
            await _end(process)
            raise ForgeError(
                f"a process of {self.module} did not start: {line.decode().strip() or 'it said nothing'}",
                hint="see the reward's log in the run folder",
            )
        return process


@functools.lru_cache(maxsize=16)
def shared_workers(
    module: str, function: str, processes: int, deadline_s: float, imports: tuple[str, ...] = ()
) -> Workers:
    """Return the workers that all rewards of a process with the same wishes share."""
    return Workers(module, function, processes=processes, deadline_s=deadline_s, imports=imports)


async def _ask(process: asyncio.subprocess.Process, call: bytes) -> dict[str, object] | None:
    """Return a process's answer to a call; None if it died or answered nonsense."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(_LENGTH.pack(len(call)) + call)
    with contextlib.suppress(ConnectionError):
        await process.stdin.drain()
    try:
        answer = json.loads(await process.stdout.readline())
    except (ValueError, RecursionError):  # also of a line that is too long
        return None
    return answer if isinstance(answer, dict) else None


async def _end(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    await process.wait()


def main(module: str, function: str, deadline_s: str, *imports: str) -> None:
    """Answer calls, a line of JSON each, until stdin ends; whatever a call prints goes to stderr."""
    end_with_parent()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent says when to end
    try:
        call = getattr(importlib.import_module(module), function)
        files = [importlib.import_module(each).__file__ for each in imports]
    except ImportError as error:
        print(error, file=answers, flush=True)
        return
    confine([Path(file).parent.parent for file in files if file])
    print("ready", file=answers, flush=True)
    while length := sys.stdin.buffer.read(_LENGTH.size):
        arguments = pickle.loads(sys.stdin.buffer.read(_LENGTH.unpack(length)[0]))
        # The system ends a process that hangs, also where nobody is left to do it.
        signal.setitimer(signal.ITIMER_REAL, float(deadline_s) + 1)
        try:
            answer = {"result": call(*arguments)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps(answer), file=answers, flush=True)
