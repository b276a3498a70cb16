"""Episodes of agents that know nothing but an API: each has a session of the gateway, and its turns are recorded."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Sequence
from typing import Protocol, TypeAlias

from forge_rl.data.tokenizer import Tokenizer
from forge_rl.errors import DeadlineError, ReplicaError
from forge_rl.gateway.backend import Backend
from forge_rl.gateway.config import GatewayConfig
from forge_rl.gateway.server import Gateway
from forge_rl.gateway.sessions import Session
from forge_rl.types import Chunk, Episode, Outcome, Sampling, Task

Agent: TypeAlias = Callable[[Task, Session], Awaitable[str | None]]
"""Works on a task with the policy that it finds at session.base_url under session.key. Returns what is to be scored;
None stands for the policy's last answer. What blocks for long must run in a thread or a process."""


class PolicyClient(Protocol):
    """An episode's way to the engines."""

    @property
    def sampling(self) -> Sampling:
        """How its answers are drawn."""

    def stream(self, prompt_ids: Sequence[int], sampling: Sampling) -> AsyncGenerator[Chunk, None]:
        """Decode an answer; one at a time."""


class Scorer(Protocol):
    """What scores an episode."""

    async def score(self, task: Task, text: str) -> float: ...


class SessionBackend:
    """Answers of sessions from the engines that their episodes are granted; of others as `outside` has them.

    Args:
        outside: decodes what is of no session.
    """

    def __init__(self, outside: Backend) -> None:
        self.model = outside.model
        self.max_model_tokens = outside.max_model_tokens
        self._outside = outside
        self._clients: dict[str, tuple[PolicyClient, asyncio.Lock]] = {}

    @contextlib.contextmanager
    def seated(self, session: Session, client: PolicyClient) -> Iterator[None]:
        """While the body runs, a session's answers come by this client."""
        self._clients[session.key] = (client, asyncio.Lock())
        try:
            yield
        finally:
            del self._clients[session.key]

    async def stream(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, session: str | None
    ) -> AsyncGenerator[Chunk, None]:
        """See Backend.stream. Answers of one session are decoded one after the other."""
        if session is None:
            answer = self._outside.stream(prompt_ids, sampling, session=None)
            async with contextlib.aclosing(answer) as chunks:
                async for chunk in chunks:
                    yield chunk
            return
        client, turn = self._clients[session]
        async with turn, contextlib.aclosing(client.stream(prompt_ids, sampling)) as chunks:
            async for chunk in chunks:
                yield chunk


class AgentEpisodeRunner:
    """Attempts at tasks by an agent, each in a session of its own.

    Args:
        agent: makes them.
        gateway: that it finds the policy at.
        backend: of that gateway.
        reward: scores what the agent returns.
        deadline_s: longest time for an attempt, with all that it waits for.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        agent: Agent,
        gateway: Gateway,
        backend: SessionBackend,
        reward: Scorer,
        *,
        deadline_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._agent = agent
        self._gateway = gateway
        self._backend = backend
        self._reward = reward
        self._deadline_s = deadline_s
        self._clock = clock

    async def __call__(self, task: Task, client: PolicyClient) -> Episode:
        """One attempt. Whatever the agent or a service fails at is an outcome."""
        began = self._clock()
        session = self._gateway.open(task.id, sampling=client.sampling)

        def ended(outcome: Outcome, reward: float = 0.0, problem: str = "") -> Episode:
            return Episode(
                task=task,
                turns=session.turns,
                reward=reward,
                outcome=outcome,
                problem=problem,
                seconds=self._clock() - began,
            )

        with self._backend.seated(session, client):
            outcome, text, problem = await self._work(task, session)
        if not outcome.scored:
            return ended(outcome, problem=problem)
        try:
            return ended(outcome, await self._reward.score(task, text))
        except Exception as error:
            died = isinstance(error, ReplicaError | DeadlineError)
            return ended(Outcome.INFRASTRUCTURE_ERROR if died else Outcome.JUDGE_ERROR, problem=str(error))

    async def _work(self, task: Task, session: Session) -> tuple[Outcome, str, str]:
        """How the agent's work ended, with what text, and what went wrong. The session is closed afterwards."""
        text, failure = None, ""
        try:
            async with asyncio.timeout(self._deadline_s) as limit:
                text = await self._agent(task, session)
        except Exception as error:
            if limit.expired():
                return Outcome.INFRASTRUCTURE_ERROR, "", f"the agent took longer than {self._deadline_s:g} s"
            failure = f"the agent raised {type(error).__name__}: {error}"
        finally:
            session.close()
            # Nothing of it may be on an engine when the episode is over.
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
    agent: Agent, config: GatewayConfig, outside: Backend, tokenizer: Tokenizer, reward: Scorer
) -> AsyncIterator[AgentEpisodeRunner]:
    """A gateway for the attempts of an agent.

    Raises:
        ConfigError: it cannot listen.
    """
    backend = SessionBackend(outside)
    async with Gateway(config, backend, tokenizer) as gateway:
        yield AgentEpisodeRunner(agent, gateway, backend, reward, deadline_s=config.agent_deadline_s)
