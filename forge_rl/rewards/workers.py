"""Processes for verifiers that may hang, crash, or want the main thread for themselves: killed when they are late.

python -c "from forge_rl.rewards.workers import main; main('forge_rl.rewards.maths', 'compare', 10)" answers JSON lines.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import os
import resource
import signal
import sys
from collections import deque
from dataclasses import dataclass, field

from forge_rl.errors import ForgeError

_START_S = 120.0
"""Longest time for a process until it is there, imports and all."""
_MOST_BYTES = 8 << 30
"""Most address space of a process."""


@dataclass(eq=False)
class Workers:
    """Calls a function in processes of its own, each of which takes one call at a time.

        workers = Workers("forge_rl.rewards.maths", "compare", processes=2, deadline_s=5)
        await workers(["1/2"], "0.5")  # [True, "1/2"]; None where there was no answer in time

    Processes start when they are needed, without the environment of this one and so without its secrets. They end with
    it, at the latest a deadline after.
    """

    module: str
    function: str
    """Takes and returns what JSON can hold."""
    processes: int
    """Most processes at a time."""
    deadline_s: float
    """Longest time for a call, from when a process has it. The process is then killed."""
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
        async with self._room:
            process = self._idle.pop() if self._idle else await self._start()
            try:
                assert process.stdin is not None
                assert process.stdout is not None
                process.stdin.write(json.dumps(arguments).encode() + b"\n")
                async with asyncio.timeout(self.deadline_s):
                    with contextlib.suppress(ConnectionError):
                        await process.stdin.drain()
                    line = await process.stdout.readline()
            except TimeoutError:
                line = b""
            except BaseException:
                await _end(process)
                raise
            if not line:
                await _end(process)
                return None
            self._idle.append(process)
        answer = json.loads(line)
        if "error" in answer:
            raise ForgeError(f"{self.module}: {answer['error']}", hint="report it, with the answer that it was about")
        return answer["result"]

    async def _start(self) -> asyncio.subprocess.Process:
        run = (
            "import sys; from forge_rl.rewards.workers import main; main(sys.argv[1], sys.argv[2], float(sys.argv[3]))"
        )
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", run, self.module, self.function, str(self.deadline_s)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONUNBUFFERED": "1"},
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


async def _end(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    await process.wait()


def main(module: str, function: str, deadline_s: float) -> None:
    """Answer calls, a line of JSON each, until stdin ends; whatever a call prints goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    resource.setrlimit(resource.RLIMIT_AS, (_MOST_BYTES, _MOST_BYTES))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent says when to end
    try:
        call = getattr(importlib.import_module(module), function)
    except ImportError as error:
        print(error, file=answers, flush=True)
        return
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        # The system ends a process that hangs, also where nobody is left to do it.
        signal.setitimer(signal.ITIMER_REAL, deadline_s + 1)
        try:
            answer = {"result": call(*json.loads(line))}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps(answer), file=answers, flush=True)
