"""Workers: scripts under another interpreter that answer calls in JSON lines, killed together with their children."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import subprocess
from collections.abc import Sequence
from pathlib import Path

from forge_rl.errors import ForgeError, ReplicaError
from forge_rl.system.supervised import supervised
from forge_rl.system.variables import handed_on

_LINE_BYTES = 64 << 20
"""Maximum length of a worker's line."""
_LAST_LINES = 12
"""Number of log lines shown in an error."""


class Worker:
    """One process of a script that answers concurrent calls; made by `start`.

        worker = await Worker.start("verifiers", [python, script, config], log=folder / "verifiers-0.log")
        result = await worker.call({"run": task})
        worker.kill()

    The script reads `{"id": 1, **call}` lines from its stdin and writes `{"id": 1, "result": ...}` or `{"id": 1,
    "error": "..."}` to its stdout; `{"cancel": 1}` cancels a call. It writes `{"id": 0}` when it is ready, and exits
    when its stdin closes, which also happens when this process dies.

    Args:
        name: name for errors.
        process: process of the script.
        lines: its stdout.
        calls: its stdin.
        log: file for the stderr of the script and its descendants.
    """

    def __init__(
        self,
        name: str,
        process: subprocess.Popen[bytes],
        lines: asyncio.StreamReader,
        calls: asyncio.WriteTransport,
        log: Path,
    ) -> None:
        self.name = name
        self.log = log
        self._process = process
        self._lines = lines
        self._pipe = calls
        self._ids = itertools.count(1)
        # The answer with id 0 reports that the script is ready.
        self._calls: dict[int, asyncio.Future[object]] = {0: asyncio.get_running_loop().create_future()}
        self._reading = asyncio.get_running_loop().create_task(self._read())

    @classmethod
    async def start(cls, name: str, command: Sequence[str], *, log: Path, deadline_s: float = 300.0) -> Worker:
        """Start a worker and wait until it is ready.

        Raises:
            ForgeError: the worker cannot be started, exited, reported an error, or took too long.
        """
        try:
            log.parent.mkdir(parents=True, exist_ok=True)
            process = _spawn(command, log)
            loop, lines = asyncio.get_running_loop(), asyncio.StreamReader(limit=_LINE_BYTES)
            await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), process.stdout)
            calls, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, process.stdin)
        except OSError as error:
            raise ForgeError(f"{name} cannot be started: {error}", hint="free processes, memory or disk") from error
        worker = cls(name, process, lines, calls, log)
        try:
            async with asyncio.timeout(deadline_s):
                await worker._calls[0]
        # Also when the start is cancelled: nobody else knows of the process yet.
        except BaseException as error:
            await worker.close()
            if isinstance(error, TimeoutError):
                raise ForgeError(f"{name} was not ready after {deadline_s:g} s", hint=f"see {log}") from None
            if isinstance(error, ReplicaError):
                raise ForgeError(f"{name} did not start: {error.message}", hint=error.hint) from None
            raise
        return worker

    @property
    def alive(self) -> bool:
        """True until the process exits."""
        return not self._reading.done()

    async def call(self, call: dict[str, object]) -> object:
        """Return the result of a call; cancelling it cancels it in the worker too.

        Raises:
            ForgeError: the script answered with an error.
            ReplicaError: the process exited.
        """
        if not self.alive:
            raise self._died()
        number = next(self._ids)
        # Answers may come in any order; the number tells them apart.
        answer = self._calls[number] = asyncio.get_running_loop().create_future()
        try:
            self._send({"id": number, **call})
            return await answer
        except asyncio.CancelledError:
            self._send({"cancel": number})
            raise
        finally:
            self._calls.pop(number, None)

    async def ended(self, *, within_s: float) -> bool:
        """Wait up to `within_s` seconds for the process to exit; return whether it has."""
        await asyncio.wait([self._reading], timeout=within_s)
        return not self.alive

    async def close(self) -> None:
        """Kill the processes and wait for their end."""
        self.kill()
        await asyncio.wait([self._reading])

    def kill(self) -> None:
        """Kill the process and all its descendants; calls in flight fail."""
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()  # its supervisor kills what it watches

    def _send(self, line: dict[str, object]) -> None:
        if not self._pipe.is_closing():
            self._pipe.write(json.dumps(line).encode() + b"\n")

    async def _read(self) -> None:
        try:
            async for line in self._lines:
                answer = json.loads(line)
                call = self._calls.get(answer["id"])
                # The call was cancelled, and its answer crossed the cancellation.
                if call is None or call.done():
                    continue
                if "error" in answer:
                    call.set_exception(ForgeError(answer["error"], hint=f"see {self.log}"))
                else:
                    call.set_result(answer.get("result"))
        finally:
            self.kill()  # it may have closed its stdout, or written an invalid answer
            await asyncio.to_thread(self._process.wait)
            self._pipe.close()
            for call in self._calls.values():
                if not call.done():
                    call.set_exception(self._died())

    def _died(self) -> ReplicaError:
        status = self._process.returncode  # also 0 if Monarch reaped it first
        ending = f"exited with status {status}" if status else "ended"
        ending = f"was killed by signal {-status}" if status and status < 0 else ending
        log_lines = self.log.read_text(errors="replace").splitlines()[-_LAST_LINES:] if self.log.exists() else []
        return ReplicaError("\n".join([f"its process {ending}", *log_lines]), service=self.name, hint=f"see {self.log}")


def _spawn(command: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    """Start a process; not with asyncio, which would warn about processes that Monarch has reaped."""
    with log.open("ab") as file:
        return subprocess.Popen(
            supervised(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=file,
            env=handed_on(),
            start_new_session=True,  # Ctrl-C is for this process, which then kills it
        )
