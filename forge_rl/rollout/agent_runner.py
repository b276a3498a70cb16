"""A run's view of agents, which play episodes through an API, and of the gateway that serves the API."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Protocol, Self, TypeAlias

from forge_rl.rollout.dispatcher import PolicyClient
from forge_rl.system.lazy import LazyNames
from forge_rl.types import Episode, Score, Task

Agent: TypeAlias = Callable[..., Awaitable[str | Score | None]]
"""Function of a task and a `forge_rl.Session`, which works on the task with the policy at session.base_url. Returns the
text to score, None for the policy's last answer, or a Score that replaces the reward's."""


class AgentRunner(Protocol):
    """Runs episodes of an agent."""

    async def __call__(self, task: Task, client: PolicyClient) -> Episode:
        """Run one episode. Failures of the agent or of a service become its outcome."""
        ...

    def metrics(self) -> dict[str, float]:
        """Return the agents' metrics since the last call."""
        ...


class AgentGateway(Protocol):
    """Settings of the gateway that serves the policy to agents, such as `forge_rl.GatewayConfig`."""

    def with_parser(self, name: str) -> Self:
        """Return these settings with a run's tool parser."""
        ...


GATEWAY: LazyNames[Callable[..., Any]] = LazyNames(
    {
        "GatewayConfig": "forge_rl.gateway.gateway_config:GatewayConfig",
        "Gateway": "forge_rl.gateway.server:Gateway",
        "serving_agents": "forge_rl.gateway.agents:serving_agents",
    }
)
"""The parts of the gateway that runs use: `serving_agents` yields an AgentRunner, `Gateway` serves programs of attached
clients."""
