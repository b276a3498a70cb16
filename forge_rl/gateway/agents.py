"""Episodes of agents that only know an API: each has a session of the gateway, which records its turns."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

from forge_rl.data.tokenizer import Tokenizer
from forge_rl.errors import DeadlineError, ReplicaError
from forge_rl.gateway.backend import Backend
from forge_rl.gateway.config import GatewayConfig
from forge_rl.gateway.server import Gateway
from forge_rl.gateway.sessions import Session
from forge_rl.types import Chunk, Episode, Outcome, Sampling, Task, TokenIds

if TYPE_CHECKING:
    from forge_rl.services.reward import Reward

Agent: TypeAlias = Callable[[Task, Session], Awaitable[str | None]]
"""Works on a task with the policy at session.base_url, under session.key. Returns the text to score; None stands for
the policy's last answer. Blocking work must run in a thread or a process."""


class PolicyClient(Protocol):
    """An episode's client of the policy."""

    @property
    def sampling(self) -> Sampling:
        """Sampling settings of its turns."""

    def stream(self, prompt_ids: TokenIds, sampling: Sampling) -> AsyncGenerator[Chunk, None]:
        """Decode a completion; one at a time."""


class SessionBackend:
    """Decodes requests of sessions on the engines that their episodes are granted, and all others on another backend.

    Args:
        outside: decodes requests of no session.
    """

    def __init__(self, outside: Backend) -> None:
        self.model = outside.model
        self.max_model_tokens = outside.max_model_tokens
        self._outside = outside
        self._clients: dict[str, tuple[PolicyClient, asyncio.Lock]] = {}

    @contextlib.contextmanager
    def connected(self, session: Session, client: PolicyClient) -> Iterator[None]:
        """Decode a session's requests with this client while the body runs."""
        self._clients[session.key] = (client, asyncio.Lock())
        try:
            yield
        finally:
            del self._clients[session.key]

    def stream(self, prompt_ids: TokenIds, sampling: Sampling, *, session: str | None) -> AsyncGenerator[Chunk, None]:
        """Decode as Backend.stream says. Requests of one session are decoded one after the other."""
        if session is None:
            return self._outside.stream(prompt_ids, sampling, session=None)
        return self._in_turn(*self._clients[session], prompt_ids, sampling)

    async def _in_turn(
        self, client: PolicyClient, turn: asyncio.Lock, prompt_ids: TokenIds, sampling: Sampling
    ) -> AsyncGenerator[Chunk, None]:
        async with turn, contextlib.aclosing(client.stream(prompt_ids, sampling)) as chunks:
            async for chunk in chunks:
                yield chunk


@dataclass(frozen=True)
class AgentEpisodeRunner:
    """Runs episodes of an agent, each in a gateway session of its own."""

    agent: Agent
    gateway: Gateway
    backend: SessionBackend
    """Backend of that gateway."""
    reward: Reward
    """Scores the text that the agent returns."""
    deadline_s: float
    """Longest time for an episode, all waiting included."""

    async def __call__(self, task: Task, client: PolicyClient) -> Episode:
        """Run one episode. A failure of the agent or of a service is an outcome."""
        began = time.monotonic()
        session = self.gateway.open(task.id, sampling=client.sampling)
        reward = 0.0
        with self.backend.connected(session, client):
            outcome, text, problem = await self._work(task, session)
        if outcome.scored:
            try:
                reward = await self.reward.score(task, text)
            except Exception as error:
                died = isinstance(error, ReplicaError | DeadlineError)
                outcome, problem = Outcome.INFRASTRUCTURE_ERROR if died else Outcome.JUDGE_ERROR, str(error)
        turns, seconds = session.turns, time.monotonic() - began
        return Episode(task=task, turns=turns, reward=reward, outcome=outcome, problem=problem, seconds=seconds)

    async def _work(self, task: Task, session: Session) -> tuple[Outcome, str, str]:
        """Run the agent and close the session; returns the outcome, the text to score, and the problem if any."""
        text, failure = None, ""
        try:
            async with asyncio.timeout(self.deadline_s) as limit:
                text = await self.agent(task, session)
        except Exception as error:
            if limit.expired():
                return Outcome.INFRASTRUCTURE_ERROR, "", f"the agent took longer than {self.deadline_s:g} s"
            failure = f"the agent raised {type(error).__name__}: {error}"
        finally:
            session.close()
            # None of its requests may be on an engine when the episode is over.
            await session.ended()
        last = session.turns[-1] if session.turns else None
        if failure and session.refusal is not None:
            if session.refusal.code == "context_length_exceeded" and last is not None:
                return Outcome.TRUNCATED, last.text, ""
            if session.refusal.status >= 500 or session.refusal.status == 429:
                return Outcome.INFRASTRUCTURE_ERROR, "", failure
        if failure or last is None:
            return Outcome.ENVIRONMENT_ERROR, "", failure or "the agent got no answer"
        return Outcome.TRUNCATED if last.truncated else Outcome.COMPLETED, last.text if text is None else text, ""


@contextlib.asynccontextmanager
async def serving_agents(
    agent: Agent, config: GatewayConfig, outside: Backend, tokenizer: Tokenizer, reward: Reward
) -> AsyncIterator[AgentEpisodeRunner]:
    """Serve the policy to an agent at a gateway of its own, and yield what runs its episodes.

    Raises:
        ConfigError: it cannot listen.
    """
    backend = SessionBackend(outside)
    async with Gateway(config, backend, tokenizer) as gateway:
        yield AgentEpisodeRunner(agent, gateway, backend, reward, config.agent_deadline_s)
