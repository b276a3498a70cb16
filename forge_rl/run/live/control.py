"""Live control: answers requests of clients that are attached to a run; see `forge_rl.run.live.attach`.

`control_server` receives them. The numbers that clients may set, and their bounds, are in `knobs.BOUNDS`.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import os
import signal
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from forge_rl.errors import ConfigError, ForgeError
from forge_rl.metrics.episode_files import write_episodes
from forge_rl.run.live.settings import LiveSettings
from forge_rl.run.records.recording import trained_episodes
from forge_rl.run.service_set import nothing_generated

if TYPE_CHECKING:
    from forge_rl.run.live.policy_gateway import PolicyGateway
    from forge_rl.run.run import Run

_MOST_TEMPERATURE = 10.0
_MOST_PROMPTS = 1024


class HostRegistry(Protocol):
    """Adds hosts to a live run and removes them, as `ElasticHosts` does."""

    def states(self) -> dict[str, str]: ...
    def meeting_point(self) -> dict[str, str]: ...
    async def join(self, name: str, address: str, services: Sequence[str] = ()) -> str: ...
    async def leave(self, name: str) -> None: ...


class Control:
    """Answers requests of attached clients; each public method is a request."""

    def __init__(self, run: Run[Any], live: LiveSettings, gateway: PolicyGateway | None, hosts: HostRegistry) -> None:
        self._run = run
        self._hosts = hosts
        self._live = live
        self._gateway = gateway
        self._numbers = itertools.count(1)
        self._signalled = False
        """Whether a client has ended the run by a signal."""

    async def status(self) -> dict[str, object]:
        """Return the run's progress, and the current values of everything that can be changed."""
        run, rollouts = self._run, self._run.batches.status()
        episodes = run.last_batch.episodes if run.last_batch else ()
        # Failed episodes have no score and stay out of the mean.
        rewards = [episode.reward for episode in episodes if episode.score is not None]
        return {
            "folder": str(run.folder.resolve()),
            "step": run.step,
            "steps": run.config.steps,
            "phase": run.current_phase,
            "paused": run.paused,
            "version": run.trainer.version,
            "engines": f"{rollouts.engines_serving}/{rollouts.engines}",
            "rollouts": str(rollouts),
            "reward_mean": sum(rewards) / len(rewards) if rewards else None,
            **self._live.read(),
        }

    async def set(self, knob: str, values: dict[str, Any]) -> None:
        """Change the mixture, the schedule, the reward, the optimizer or the replicas; see `LiveSettings.knobs`."""
        await self._live.write(knob, values)

    async def hosts(self) -> dict[str, object]:
        """Return the state of each host, and the address that a joining host needs; see `ElasticHosts`."""
        return {"hosts": self._hosts.states(), **self._hosts.meeting_point()}

    async def join(self, name: str, address: str, services: list[Any]) -> str:
        """Add a host; returns a line that names its services."""
        return await self._hosts.join(name, address, services)

    async def leave(self, name: str) -> None:
        """Let a host go; returns once nothing of the run is left there."""
        await self._hosts.leave(name)

    async def chat(self, message: str | list[Any], max_tokens: int | None = None, temperature: float = 0.0) -> str:
        """Chat with the current policy."""
        if not isinstance(message, str) and not (message and all(isinstance(item, dict) for item in message)):
            raise ConfigError(
                f"the message is {message!r:.60}", hint='send a text, or messages: [{"role": "user", "content": "Hi"}]'
            )
        max_model_len = self._run.generator.max_model_len
        if max_tokens is not None:
            _check("max_tokens", max_tokens, 1, max_model_len)
        _check("temperature", temperature, 0, _MOST_TEMPERATURE)
        return await self._run.generator.chat(message, max_tokens=max_tokens, temperature=temperature)

    async def open_gateway(self) -> dict[str, object]:
        """Serve the current policy over OpenAI's API; returns URL and key."""
        if self._gateway is None:
            raise nothing_generated()
        return await self._gateway.open()

    async def last_batch(self) -> str | None:
        """Write the batch of the last step to a file for the client, which deletes it; returns its name."""
        batch = self._run.last_batch
        if batch is None:
            return None
        # Numbered, so that clients that ask at the same time get files of their own.
        name = f".last-batch-{next(self._numbers)}.parquet"
        records = trained_episodes(self._run.step, batch, None, None)
        try:
            await asyncio.to_thread(write_episodes, self._run.folder / name, records)
        except OSError as error:
            raise ForgeError(f"the batch cannot be written to {self._run.folder}: {error}") from error
        return name

    async def checkpoint(self) -> str:
        """Write a checkpoint after the current step; returns its folder."""
        # The end of the step would only come after `resume`, so the client would wait without a word.
        if self._run.paused and self._run.current_phase == "rollout":
            raise ConfigError(
                "the run is paused in the middle of a rollout, and checkpoints are written between steps",
                hint="resume it first",
            )
        checkpoint = await self._run.after_step(functools.partial(self._run.checkpoint, wait=True))
        assert checkpoint is not None, "checkpoint(wait=True) returns it"
        return str(checkpoint.folder)

    async def evaluate(self) -> object:
        """Evaluate after the current step."""
        if self._run.paused:
            raise ConfigError("the run is paused, and an evaluation needs its engines", hint="resume it first")
        return await self._run.after_step(functools.partial(self._run.evaluate, wait=True))

    async def explain_gap(self, prompts: int = 16) -> str:
        """Explain the gap between engines and trainer after the current step, as text."""
        _check("prompts", prompts, 1, _MOST_PROMPTS)
        return repr(await self._run.after_step(functools.partial(self._run.explain_gap, prompts)))

    async def pause(self) -> None:
        """Pause at the next boundary."""
        self._run.pause()

    async def resume(self) -> None:
        """Continue a paused run."""
        self._run.resume()

    async def stop(self, now: bool = False) -> None:
        """End the run after the current step, or now: save and exit as on SIGTERM."""
        if not now:
            self._run.stop()
            return
        # The default action would kill the process without saving; only `launch` installs another.
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            raise ConfigError("the run is in an interactive session", hint="end it there: await run.close()")
        # A second signal would end the run at once, without what the first one has it save.
        if self._signalled:
            raise ConfigError("the run is ending already", hint="wait until it has saved its steps")
        self._signalled = True
        # Late enough for the reply to reach the client before the server closes.
        asyncio.get_running_loop().call_later(0.2, os.kill, os.getpid(), signal.SIGTERM)


def _check(name: str, value: object, minimum: float, maximum: float) -> None:
    """Check a number of a request.

    Raises:
        ConfigError: it is not a number within bounds.
    """
    # JSON's true is an int in Python.
    if isinstance(value, bool) or not isinstance(value, int | float) or not minimum <= value <= maximum:
        raise ConfigError(f"{name} is {value!r}", hint=f"choose a number from {minimum:g} to {maximum:g}")
