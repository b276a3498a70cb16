"""Episodes of agents that only use an API: each runs in a gateway session, which records its turns."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from forge_rl.errors import ContextError, ForgeError, InfrastructureError, PoisonError, ReplicaError
from forge_rl.flags.user_code import line_of
from forge_rl.gateway.agent_command import AgentCommand, AgentError, AgentFunction, AgentStartError
from forge_rl.gateway.errors import ENDS_ENGINES
from forge_rl.gateway.gateway_config import GatewayConfig
from forge_rl.gateway.server import Gateway
from forge_rl.gateway.sessions import SESSION_FULL, Session
from forge_rl.rewards.scorer import scored
from forge_rl.rollout.dispatcher import PolicyClient
from forge_rl.services.completion import Observer
from forge_rl.services.policy_backend import Backend
from forge_rl.system.encodable import encodable
from forge_rl.system.tasks import EndableTask, left_behind_late
from forge_rl.token_arrays import TokenIds
from forge_rl.tokens.thoughts import without_thoughts
from forge_rl.tokens.tokenizer import Tokenizer
from forge_rl.types import Episode, Outcome, Sampling, Score, Task

if TYPE_CHECKING:
    from forge_rl.services.reward import RewardService

_GRACE_S = 1.0
"""Time for an agent to end once it is cancelled, before it is left behind."""
_LEFT_S = 30.0
"""Time for an agent that was left behind to close its connections and files, before it is ended."""
_MOST_LEFT = 32
"""Most agents left behind in this process before the run ends."""
_LOOKS = 50
"""Number of checks of an episode's own time before its deadline."""

Agent: TypeAlias = Callable[[Task, Session], Awaitable[str | Score | None]]
"""Function that works on a task with the policy at session.base_url, using session.key. Returns the text to score,
None for the policy's last answer, or a Score that replaces the reward's. Blocking work must run in a thread or a
process; a ReplicaError means that such a process died, an InfrastructureError that a sandbox failed, and the episode
is retried. It must end when it is cancelled; one that is named, as MODULE:FUNCTION, has a process of its own and is
ended with it. If one in this process ignores its cancellation, its coroutine is ended, but threads and tasks that it
started continue."""

_LEFT_HINT = (
    "let it raise CancelledError (`except Exception:` does, `except:` does not), or start it with "
    "agent='FILE.py:FUNCTION': in a process of its own, which can be ended"
)


class SessionBackend:
    """Decodes sessions' requests through their episodes' clients, and all others on another backend.

    Args:
        outside: backend for requests outside of sessions.
    """

    def __init__(self, outside: Backend) -> None:
        self.model = outside.model
        self.max_model_len = outside.max_model_len
        self._outside = outside
        self._clients: dict[str, PolicyClient] = {}

    @contextlib.contextmanager
    def connected(self, session: Session, client: PolicyClient) -> Iterator[None]:
        """Decode a session's requests through `client` inside the context."""
        self._clients[session.key] = client
        try:
            yield
        finally:
            del self._clients[session.key]

    async def decode(
        self, prompt_ids: TokenIds, sampling: Sampling, observe: Observer, *, session: str | None, gather_s: float
    ) -> None:
        """Decode a completion, see `Backend.decode`. Requests of one session are decoded one at a time."""
        if session is None:
            await self._outside.decode(prompt_ids, sampling, observe, session=None, gather_s=gather_s)
        else:
            await self._clients[session](prompt_ids, sampling, observe=observe, gather_s=gather_s)


@dataclass(frozen=True)
class AgentEpisodeRunner:
    """Runs episodes of an agent, each in its own gateway session."""

    agent: Agent
    gateway: Gateway
    backend: SessionBackend
    """The gateway's backend."""
    reward: RewardService
    """Scores the text that the agent returns."""
    deadline_s: float
    """Maximum own time of an episode, in seconds."""
    warn: Callable[[str], None] = lambda text: None
    """Called with a line for the user."""
    _left: dict[asyncio.Future[str | Score | None], EndableTask[str | Score | None] | None] = field(
        default_factory=dict
    )
    """Agents that ignore their cancellation, and their endable tasks; None for a process, which ends itself."""
    _counts: Counter[str] = field(default_factory=Counter)
    """Agents left behind, and ended, since the last metrics."""

    def metrics(self) -> dict[str, float]:
        """Return how many agents were left behind and how many of those were ended, since the last call."""
        values = {f"agents/{name}": float(count) for name, count in self._counts.items()}
        self._counts.clear()
        return values

    async def __call__(self, task: Task, client: PolicyClient) -> Episode:
        """Run one episode. Failures of the agent or of a service become its outcome.

        Raises:
            ContextError: the agent's first prompt leaves no room for an answer.
            PoisonError: a request of the agent crashed several engines.
            SpendingError: a judge's budget is spent.
            AgentStartError: the agent's processes keep failing at start.
            ForgeError: too many agents ignore their cancellation.
        """
        if len(self._left) >= _MOST_LEFT:
            await self._end_left()
        if len(self._left) >= _MOST_LEFT:
            raise ForgeError(f"{len(self._left)} agents ignore their cancellation and keep running", hint=_LEFT_HINT)
        began, began_at = time.monotonic(), time.time()
        session = self.gateway.open(task.id, sampling=client.sampling.updated(seed=client.seed))
        with self.backend.connected(session, client):
            outcome, result, problem = await self._work(task, session, client)
        # The text that an agent returns may be the policy's, with its thoughts.
        own_score, text = (result, None) if isinstance(result, Score) else (None, result and without_thoughts(result))
        text = encodable(text)  # an agent may read lone surrogates from JSON
        episode = Episode(task=task, turns=session.turns, outcome=outcome, problem=problem, output=text)
        if outcome.scored:
            episode = await scored(episode, self.reward, own_score)
        return episode.updated(seconds=time.monotonic() - began, began=began_at)

    async def _work(
        self, task: Task, session: Session, client: PolicyClient
    ) -> tuple[Outcome, str | Score | None, str]:
        """Run the agent and close the session; return the outcome, the agent's result, and the problem, "" if none."""
        text, failure, died = None, "", False
        deadline = _OwnTime(self.deadline_s, client.used_s, session)
        try:
            with deadline:
                async with deadline.limit:
                    text = await self._agent_of(task, session)
        except AgentStartError:
            raise
        except AgentError as error:
            failure = error.message
        except Exception as error:
            died = isinstance(error, ReplicaError | InfrastructureError)
            failure = str(error) if died else f"the agent raised {type(error).__name__}: {error}{_line_of(error)}"
        finally:
            session.close()
            # No request of the session may be on an engine after the episode.
            await session.ended()
        last = session.turns[-1] if session.turns else None
        # An agent that kept calling the policy is truncated and scored. One that hung is not the policy's failure.
        if deadline.limit.expired():
            if last is not None and not deadline.hangs:
                return Outcome.TRUNCATED, None, ""
            hangs = "and did not call the policy for half of that time"
            return Outcome.ENVIRONMENT_ERROR, "", f"the agent took longer than {self.deadline_s:g} s, {hangs}"
        if died:
            return Outcome.INFRASTRUCTURE_ERROR, "", failure
        # The agent failed after the gateway refused its last request: the refusal decides the outcome, not the agent.
        if failure and session.refusal is not None:
            if session.refusal.code == "context_length_exceeded" and last is None:
                raise ContextError(session.refusal.message, hint="raise --generator.max-model-len")
            if session.refusal.code in ("context_length_exceeded", SESSION_FULL) and last is not None:
                return Outcome.TRUNCATED, None, ""
            if session.refusal.code == ENDS_ENGINES:
                raise PoisonError(session.refusal.message, service="generator")
            if session.refusal.status >= 500 or session.refusal.status == 429:
                return Outcome.INFRASTRUCTURE_ERROR, "", failure
        if failure or last is None:
            return Outcome.ENVIRONMENT_ERROR, "", failure or "the agent got no completion from the policy"
        return Outcome.TRUNCATED if last.truncated else Outcome.COMPLETED, text, ""

    async def _agent_of(self, task: Task, session: Session) -> str | Score | None:
        """Run the agent, leave it behind if it ignores its cancellation, and later end it."""
        work, endable = self.agent(task, session), None
        # A process is killed when its call is cancelled; only a coroutine may have to be ended from here.
        if inspect.iscoroutine(work) and not isinstance(self.agent, AgentCommand):
            endable = EndableTask(work)
        agent_task = asyncio.ensure_future(work) if endable is None else endable.task
        try:
            return await left_behind_late(agent_task, _GRACE_S)
        finally:
            if not agent_task.done():
                self._leave_behind(task, agent_task, endable)

    def _leave_behind(
        self,
        task: Task,
        agent_task: asyncio.Future[str | Score | None],
        endable: EndableTask[str | Score | None] | None,
    ) -> None:
        self._left[agent_task] = endable
        self._counts["left_behind"] += 1
        timer = None if endable is None else asyncio.get_running_loop().call_later(_LEFT_S, endable.end)

        def forget(_: object) -> None:
            del self._left[agent_task]
            if timer is not None:
                timer.cancel()
            if endable is not None and endable.is_ended:
                self._counts["ended"] += 1

        agent_task.add_done_callback(forget)
        then = "keeps running" if endable is None else f"is ended in {_LEFT_S:g} s if it keeps running"
        self.warn(
            f"the agent {self.name} ignores its cancellation, of {task.source} {task.id}, and {then}; {_LEFT_HINT}"
        )

    async def _end_left(self) -> None:
        """End all agents that were left behind, and wait for them for a moment."""
        # A process has no endable task, and ends itself.
        for endable in self._left.values():
            if endable is not None:
                endable.end()
        await asyncio.wait([*self._left], timeout=_GRACE_S)

    @property
    def name(self) -> str:
        """The agent's function, file and line, for messages."""
        code = getattr(self.agent, "__code__", None)
        place = f" ({code.co_filename}:{code.co_firstlineno})" if code else ""
        return f"{getattr(self.agent, '__qualname__', type(self.agent).__name__)}{place}"


class _OwnTime:
    """Deadline on an episode's own time, active inside its context.

    Args:
        deadline_s: maximum time.
        used_s: returns the time so far.
        session: session that shows when the agent calls the policy.
    """

    def __init__(self, deadline_s: float, used_s: Callable[[], float], session: Session) -> None:
        self.limit = asyncio.timeout(None)
        self.hangs = False
        """True if the deadline passed and the agent did not call the policy in the last half of the time."""
        self._deadline_s = deadline_s
        self._used_s = used_s
        self._session = session
        self._turns = 0
        self._asked_s = 0.0
        """Own time when the agent was last seen calling the policy."""
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> None:
        self._look()

    def __exit__(self, *error: object) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        loop, used_s, turns = asyncio.get_running_loop(), self._used_s(), len(self._session.turns)
        # A request in flight counts as a call of the policy for as long as it takes.
        if self._session.running or turns > self._turns:
            self._asked_s, self._turns = used_s, turns
        if used_s < self._deadline_s:
            # Polled, as the episode's own time stops while it waits for an engine.
            self._timer = loop.call_later(self._deadline_s / _LOOKS, self._look)
            return
        self.hangs = used_s - self._asked_s > self._deadline_s / 2
        # Ends the context at once, with a TimeoutError.
        self.limit.reschedule(loop.time())


def _line_of(error: Exception) -> str:
    """Return the last line of the agent's code that an error came through."""
    line = line_of(error)
    return f" ({line})" if line else ""


@contextlib.asynccontextmanager
async def serving_agents(
    agent: Agent | str,
    config: GatewayConfig,
    outside: Backend,
    tokenizer: Tokenizer,
    reward: RewardService,
    warn: Callable[[str], None] = lambda text: None,
    logs: Path | None = None,
) -> AsyncIterator[AgentEpisodeRunner]:
    """Serve the policy to an agent at its own gateway, and yield the runner of its episodes.

    A string, MODULE:FUNCTION or FILE.py:FUNCTION, names an agent that runs in its own process. The stderr of agents'
    processes is written to agent.log in the folder `logs`, if given.

    Raises:
        ConfigError: the gateway cannot listen, or the agent cannot be loaded.
    """
    if isinstance(agent, str):
        agent = function = AgentFunction(agent, config.agent_limits)
        # A wrong name fails here, before the gateway and any episode start.
        await function.check()
    if isinstance(agent, AgentCommand) and logs is not None:
        agent = agent.logging_to(logs / "agent.log")
    backend = SessionBackend(outside)
    async with Gateway(config, backend, tokenizer, warn=warn) as gateway:
        yield AgentEpisodeRunner(agent, gateway, backend, reward, config.agent_deadline_s, warn)
