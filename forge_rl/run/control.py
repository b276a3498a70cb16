"""Live control: answers who has attached to a run, over a Unix socket in its folder; see forge_rl.run.attach.

A connection is one request and its reply, each one line of JSON: `{"do": "set_weight", "with": {"source": "maths",
"weight": 0.7}}`, then `{"result": ...}` or `{"error": "...", "hint": "..."}`,
with `"busy": true` where another try may help.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import json
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge_rl.data.adaptive import Adapting
from forge_rl.errors import ConfigError, ForgeError
from forge_rl.metrics.sinks import episode_sample
from forge_rl.run.live import LiveSettings, changes_by
from forge_rl.runtime.local_socket import listening, peer_is_own

if TYPE_CHECKING:
    from forge_rl.run.policy_gateway import PolicyGateway
    from forge_rl.run.run import Run

SOCKET = "control.sock"
"""Name of the socket in a run folder."""
MOST_BYTES = 1 << 18
"""Longest request."""
_MOST_CLIENTS = 16
"""Most connections at a time."""
_READ_S = _WRITE_S = 10.0
"""Longest time for a client to send its request, and to take its reply."""
_SAMPLES = 8
"""Episodes of the last batch that are shown."""
_MOST_TEXT = 4000
"""Letters of a prompt or an answer that are shown."""


class Control:
    """Answers somebody who has attached to a run; each public method is a request."""

    def __init__(self, run: Run[Any], live: LiveSettings, gateway: PolicyGateway) -> None:
        self._run = run
        self._live = live
        self._gateway = gateway
        self._changing = asyncio.Lock()
        """Changes are made one after another, in the order in which they came."""

    async def status(self) -> dict[str, object]:
        """How far the run is, and all that can be changed."""
        run, rollouts = self._run, self._run.rollouts.status()
        rewards = [episode.reward for episode in run.last_batch.episodes] if run.last_batch else []
        return {
            "folder": str(run.folder.resolve()),
            "step": run.step,
            "steps": run.config.steps,
            "phase": run.current_phase,
            "version": run.trainer.version,
            "engines": f"{rollouts.engines_serving}/{rollouts.engines}",
            "rollouts": str(rollouts),
            "reward": self._live.reward,
            "reward_mean": sum(rewards) / len(rewards) if rewards else None,
            "weights": {name: run.mixture[name] for name in run.mixture},
            "mixture": repr(run.mixture),
            "schedule": vars(run.rollouts.config),
        }

    async def set_weight(self, source: str, weight: float) -> None:
        """Change a weight of the mixture."""
        if isinstance(weight, bool) or not isinstance(weight, int | float):
            raise ConfigError(f"the weight of {source!r} is {weight!r}", hint="choose a number from 0 up")
        async with self._changing:
            self._run.mixture[source] = weight

    async def adapt(self, **settings: Any) -> None:
        """Let the mixture adapt, or stay as it is."""
        try:
            config = Adapting(**settings)
        except TypeError as error:
            raise ConfigError(f"the mixture cannot adapt by {settings}: {error}") from error
        async with self._changing:
            self._run.mixture.adapt(config)

    async def set_reward(self, texts: list[str]) -> None:
        """Score with another reward."""
        if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
            raise ConfigError(f"the reward is set to {texts!r}", hint="set it to a text such as file.py:function")
        async with self._changing:
            await self._live.replace_reward(texts)

    async def set_schedule(self, name: str, value: float) -> None:
        """Change a bound of the schedule."""
        async with self._changing:
            setattr(self._live.schedule, str(name), value)

    async def chat(self, message: str | list[Any], max_tokens: int | None = None, temperature: float = 0.0) -> str:
        """Ask the current policy."""
        return await self._run.generator.chat(message, max_tokens=max_tokens, temperature=temperature)

    async def open_gateway(self) -> dict[str, object]:
        """Serve the current policy over OpenAI's API; says where, and with which key."""
        return await self._gateway.open()

    async def last_batch(self) -> dict[str, object]:
        """Describe the batch of the last step."""
        batch = self._run.last_batch
        if batch is None:
            return {"step": self._run.step, "groups": [], "samples": []}
        chosen = batch.episodes[:: max(1, len(batch.episodes) // _SAMPLES)][:_SAMPLES]
        return {
            "step": self._run.step,
            "groups": [{"source": each.task.source, "rewards": list(each.rewards)} for each in batch.groups],
            "samples": [{name: _cut(value) for name, value in episode_sample(episode).items()} for episode in chosen],
        }

    async def checkpoint(self) -> str:
        """Write a checkpoint after the step that is going on."""
        checkpoint = await self._run.after_step(functools.partial(self._run.checkpoint, wait=True))
        assert checkpoint is not None, "it was waited for"
        return str(checkpoint.folder)

    async def evaluate(self) -> object:
        """Evaluate after the step that is going on."""
        return await self._run.after_step(functools.partial(self._run.evaluate, wait=True))

    async def stop(self) -> None:
        """Save and end, as SIGTERM does."""
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            raise ConfigError("the run is in an interactive session", hint="end it there: await run.close()")
        asyncio.get_running_loop().call_later(0.2, os.kill, os.getpid(), signal.SIGTERM)


@contextlib.asynccontextmanager
async def serving_control(folder: Path, control: object, warn: Callable[[str], None]) -> AsyncIterator[None]:
    """Answer requests while the body runs; where the folder cannot hold a socket, it runs without.

    Args:
        control: its public async methods are what may be asked.
        warn: takes a line for the user.
    """
    server = _Server(control, warn)
    async with contextlib.AsyncExitStack() as stack:
        try:
            listener = stack.enter_context(listening(folder, SOCKET))
        except OSError as error:
            warn(f"nobody can attach to this run: no socket can be made in {folder}: {error.strerror or error}")
        else:
            listening_at = await asyncio.start_unix_server(server.handle, sock=listener, limit=MOST_BYTES)
            stack.push_async_callback(server.close)
            stack.callback(listening_at.close)
        yield


class _Server:
    def __init__(self, control: object, warn: Callable[[str], None]) -> None:
        self._control = control
        self._warn = warn
        self._clients: set[asyncio.Task[None]] = set()
        self._closing = False

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection; whatever its client does, the run goes on."""
        client = asyncio.current_task()
        assert client is not None
        try:
            if not peer_is_own(writer.get_extra_info("socket")):
                return
            if len(self._clients) >= _MOST_CLIENTS:
                reply: dict[str, object] = {"error": f"{_MOST_CLIENTS} clients are attached", "busy": True}
            else:
                self._clients.add(client)
                reply = await self._reply(reader)
            async with asyncio.timeout(_WRITE_S):
                writer.write(_encoded(reply))
                await writer.drain()
        except (OSError, TimeoutError):
            pass  # it went away, or does not read
        except asyncio.CancelledError:
            if not self._closing:  # asyncio's streams would log it
                raise
        finally:
            self._clients.discard(client)
            writer.transport.abort() if writer.transport.get_write_buffer_size() else writer.close()

    async def close(self) -> None:
        """End the requests that are still answered."""
        self._closing = True
        waiting = list(self._clients)
        for client in waiting:
            client.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)

    async def _reply(self, reader: asyncio.StreamReader) -> dict[str, object]:
        try:
            async with asyncio.timeout(_READ_S):
                line = await reader.readline()
        except TimeoutError:
            return {"error": f"no request came within {_READ_S:g} s"}
        except ValueError:
            return {"error": f"the request is longer than {MOST_BYTES} bytes"}
        try:
            work = self._find(line)
            with changes_by("attached"):
                return {"result": await work()}
        except ForgeError as error:
            return {"error": error.message, "hint": error.hint}
        except Exception as error:
            self._warn(f"a request of somebody who has attached failed: {type(error).__name__}: {error}")
            return {"error": f"{type(error).__name__}: {error}"}

    def _find(self, line: bytes) -> Callable[[], Awaitable[object]]:
        """Find what a request asks for.

        Raises:
            ConfigError: it is no request.
        """
        try:
            request = json.loads(line)
        except (ValueError, RecursionError):
            raise ConfigError("the request is no JSON") from None
        match request:
            case {"do": str(name), "with": dict(arguments)} if not name.startswith("_"):
                method = getattr(type(self._control), name, None)
                if inspect.iscoroutinefunction(method):
                    bound = getattr(self._control, name)
                    try:
                        inspect.signature(bound).bind(**arguments)
                    except TypeError as error:
                        raise ConfigError(f"the request {name!r}: {error}") from None
                    return lambda: bound(**arguments)
        raise ConfigError("there is no such request", hint="attach with the version of forge_rl that the run has")


def _encoded(reply: Mapping[str, object]) -> bytes:
    # A lone surrogate, which a model can spell, is an escape in ASCII.
    return (json.dumps(reply, default=str) + "\n").encode("ascii")


def _cut(value: object) -> object:
    return f"{value[:_MOST_TEXT]}..." if isinstance(value, str) and len(value) > _MOST_TEXT else value
