"""Worker processes for third-party code that reads model output: confined, without secrets, and killed on a timeout.

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

from forge_rl.errors import ForgeError, InfrastructureError
from forge_rl.rewards.confinement import confine, end_with_parent
from forge_rl.system.strict_json import parse_json

_START_S = 120.0
"""Timeout for starting a process, including imports."""
_TRIES = 2
"""Number of processes to try per call, as the first may have died for another reason; the last one is new."""
_EXIT_S = 5.0
"""Timeout for the exit of a process that has closed its output."""
_LENGTH = struct.Struct("=Q")
_MOST_TOLD = 500
"""Maximum length of a reported error, in characters."""


@dataclass(eq=False)
class Workers:
    """Calls a function in separate processes, one call at a time in each.

        workers = Workers("forge_rl.rewards.maths", "compare", processes=2, deadline_s=5, imports=("math_verify",))
        await workers(["1/2"], "0.5")  # [True, "1/2"]; None on a timeout

    Processes start on demand, with a fresh environment without secrets, and `confine` themselves before their first
    call. They exit with this process. Arguments are pickled, but results are JSON, as a process that has read hostile
    text is not trusted.
    """

    module: str
    function: str
    """Name of a function with picklable arguments and a JSON result."""
    processes: int
    """Maximum concurrent processes."""
    deadline_s: float
    """Timeout of a call, from when a process receives it; the process is then killed."""
    imports: tuple[str, ...] = ()
    """Packages that a process imports before it is ready, and whose files it may read later."""
    _idle: deque[asyncio.subprocess.Process] = field(default_factory=deque, init=False)
    _loop: asyncio.AbstractEventLoop | None = field(default=None, init=False)
    _room: asyncio.Semaphore = field(init=False)

    async def __call__(self, *arguments: object) -> object:
        """Return the function's result; None if it times out, exceeds its limits or makes its process die.

        Raises:
            InfrastructureError: the processes are killed from outside.
            ForgeError: no process starts, or the function raises.
        """
        # Processes and semaphores belong to the event loop that made them, and workers are shared by the whole process.
        if self._loop is not (loop := asyncio.get_running_loop()):
            self._loop, self._room = loop, asyncio.Semaphore(self.processes)
            self._idle.clear()
        call = pickle.dumps(arguments)
        async with self._room:
            for tries in range(1, _TRIES + 1):
                # All idle processes may have been killed while they waited, which says nothing about the answer.
                process = self._idle.pop() if self._idle and tries < _TRIES else await self._start()
                try:
                    # Counted from here, not from the wait for room, so that a long queue times nothing out.
                    async with asyncio.timeout(self.deadline_s):
                        answer = await _ask(process, call)
                except TimeoutError:
                    await _end(process)
                    return None
                # Cancelled between question and answer, the process would give the next caller this one's answer.
                except BaseException:
                    await _end(process)
                    raise
                if answer is not None:
                    self._idle.append(process)
                    break
                status = await _exit_status(process)
            else:
                # Unlike the signals of crashes and limits, no answer can cause this one in its confined process: it
                # comes from another process, or from a kernel that is out of memory.
                if status == -signal.SIGKILL:
                    raise InfrastructureError(
                        f"the processes of {self.module} were killed from outside {_TRIES} times",
                        hint="see the kernel's log; if it ran out of memory, use fewer processes",
                    )
                return None
        if "result" not in answer:
            message = str(answer.get("error"))[:_MOST_TOLD]
            raise ForgeError(f"{self.module}: {message}", hint="report it, with the answer that caused it")
        return answer["result"]

    async def _start(self) -> asyncio.subprocess.Process:
        run = "import sys; from forge_rl.rewards.workers import main; main(*sys.argv[1:])"
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", run, self.module, self.function, str(self.deadline_s), *self.imports),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            cwd="/",
            env={
                # An explicit environment: the parent's may hold API keys, which scored text must never reach.
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
                f"a process of {self.module} did not start: {line.decode().strip() or 'no output'}",
                hint="see the reward's log in the run folder",
            )
        return process


@functools.lru_cache(maxsize=16)
def shared_workers(
    module: str, function: str, processes: int, deadline_s: float, imports: tuple[str, ...] = ()
) -> Workers:
    """Return the workers shared by all rewards of this process with the same arguments."""
    return Workers(module, function, processes=processes, deadline_s=deadline_s, imports=imports)


async def _ask(process: asyncio.subprocess.Process, call: bytes) -> dict[str, object] | None:
    """Return a process's answer to a call; None if it died or its answer is malformed."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(_LENGTH.pack(len(call)) + call)
    with contextlib.suppress(ConnectionError):
        await process.stdin.drain()
    try:
        answer = parse_json(await process.stdout.readline())
    except (ValueError, RecursionError):  # ValueError: not JSON, or the line is too long
        return None
    return answer if isinstance(answer, dict) else None


async def _exit_status(process: asyncio.subprocess.Process) -> int | None:
    """End a process without an answer; return its exit status if it had exited."""
    assert process.stdout is not None
    if process.stdout.at_eof():
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_EXIT_S):
                await process.wait()
    status = process.returncode
    await _end(process)
    return status


async def _end(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    await process.wait()


def main(module: str, function: str, deadline_s: str, *imports: str) -> None:
    """Serve calls until stdin closes, answering each with a line of JSON; anything a call prints goes to stderr."""
    end_with_parent()
    # Answers get a descriptor of their own, and stdout goes to stderr: a library that prints would break the protocol.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to stop
    try:
        call = getattr(importlib.import_module(module), function)
        files = [importlib.import_module(name).__file__ for name in imports]
    except ImportError as error:
        print(error, file=answers, flush=True)
        return
    # Only after the imports, which read files and may start threads that the filter refuses.
    confine([Path(file).parent.parent for file in files if file])
    print("ready", file=answers, flush=True)
    while length := sys.stdin.buffer.read(_LENGTH.size):
        arguments = pickle.loads(sys.stdin.buffer.read(_LENGTH.unpack(length)[0]))
        # The kernel kills a process that hangs, even if the parent cannot.
        signal.setitimer(signal.ITIMER_REAL, float(deadline_s) + 1)
        try:
            answer = {"result": call(*arguments)}
        except RecursionError:
            # The answer is too deep, and must not escape its score by an error.
            answer = {"result": None}
        except MemoryError:
            # Answers before this one may have used the memory; the last try is in a new process.
            os._exit(1)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps(answer), file=answers, flush=True)
