"""Runs an agent function in its own process, with the task on stdin.

python -m forge_rl.gateway.agent_child MODULE:FUNCTION

With --check, only loads the function.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import sys
from dataclasses import dataclass
from typing import Any

from forge_rl.errors import ConfigError
from forge_rl.flags.user_code import load
from forge_rl.types import Task


@dataclass(frozen=True, kw_only=True)
class AgentSession:
    """URL and key of the policy for an agent's episode."""

    base_url: str
    """URL for OpenAI's clients."""
    key: str
    """API key."""

    @property
    def anthropic_url(self) -> str:
        """URL for Anthropic's clients, which append the version themselves."""
        return self.base_url.removesuffix("/v1")


def main(name: str, *flags: str) -> None:
    """Run the function, plain or async, with the task, and the session if it takes two arguments; print its result."""
    agent: Any = load(name, "agent")
    if not callable(agent):
        raise ConfigError(f"the agent {name} is not a function", hint="name a function of (task) or (task, session)")
    if "--check" in flags:
        return
    request = json.loads(sys.stdin.read())
    task = request["task"]
    # The task comes without its truth: an agent must not see the answer that it is scored by.
    agent_task = Task(
        id=task["id"], source=task["source"], messages=tuple(task["messages"]), tools=tuple(task["tools"])
    )
    num_parameters = len(inspect.signature(agent).parameters)
    answer = agent(*(agent_task, AgentSession(**request["session"]))[:num_parameters])
    if inspect.isawaitable(answer):
        # asyncio.run takes coroutines only, and a function may return any awaitable.
        answer = asyncio.run(_result(answer))
    # A line of its own, and the last one; the function may have printed one without an end.
    print()
    print(json.dumps({"answer": None if answer is None else str(answer)}))


async def _result(answer: Any) -> Any:
    return await answer


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except ConfigError as error:
        sys.exit(f"{error.message}\n{error.hint}")
