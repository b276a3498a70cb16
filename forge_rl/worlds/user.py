"""Multi-turn conversations of the policy with a user simulated by a second model."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any

from forge_rl.envs.protocol import Observation, Step
from forge_rl.errors import ForgeError, check_flags, check_installed
from forge_rl.system.encodable import encodable
from forge_rl.system.variables import api_key
from forge_rl.types import Message, Task

if TYPE_CHECKING:
    from openai import AsyncOpenAI

_INSTRUCTION = """You play a user who talks to an assistant. You want this:
{goal}

Write only the user's next message, short and in plain words. Don't help the assistant, and don't tell all at once. When
you have what you want, or it is clear that you won't get it, write {done}."""


@dataclass(frozen=True, kw_only=True)
class SimulatedUser:
    """Makes conversations with a user simulated by a model at an OpenAI-compatible endpoint.

        python -m recipes.grpo --env user:model=qwen3,base_url=http://localhost:8000/v1,api_key_env=

    The policy sees the task's messages, then the user's. The user's goal is the task's truth["goal"], or else its
    question. The verifier scores the episode once the user writes DONE, or after `max_turns`. For a frozen copy of the
    policy as the user, start `python -m apps.gateway` on the run's initial model.

    Raises:
        ConfigError: the key's environment variable is not set.
    """

    model: str
    """Model name at the endpoint."""
    base_url: str = ""
    """URL of the endpoint, including /v1; OpenAI's by default."""
    api_key_env: str = "OPENAI_API_KEY"
    """Environment variable with the API key; empty if the endpoint needs none."""
    instruction: str = _INSTRUCTION
    """System prompt of the simulated user; {goal} and {done} are filled in."""
    done: str = "DONE"
    """Word with which the user ends the conversation."""
    max_turns: int = 6
    """Maximum completions per episode."""
    max_tokens: int = 256
    """Maximum tokens of a user message."""
    temperature: float = 1.0
    """Sampling temperature of the user."""
    retries: int = 3
    """Retries per request."""
    timeout_s: float = 60.0
    """Timeout of one user message; a timeout or a failed endpoint is an environment error."""

    def __post_init__(self) -> None:
        check_installed("--env user", "openai", "openai")
        check_flags(
            self, "--env user: ", minimum={"max_turns": 1, "max_tokens": 1, "retries": 0}, above={"timeout_s": 0}
        )
        api_key("--env user", self.api_key_env)

    def __call__(self, task: Task) -> UserConversation:
        return UserConversation(self, task)

    def __getstate__(self) -> dict[str, object]:
        # Without the cached client, whose connections belong to one process.
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @cached_property
    def client(self) -> AsyncOpenAI:
        """Client shared by all conversations of a process."""
        from openai import AsyncOpenAI

        key = api_key("--env user", self.api_key_env) or "none"
        return AsyncOpenAI(base_url=self.base_url or None, api_key=key, max_retries=self.retries)

    async def reply(self, messages: Sequence[Message]) -> str:
        """Return the user's next message.

        Raises:
            ForgeError: the endpoint failed or was too slow, or the user's thoughts left no room for a message.
        """
        import openai

        request_messages: Any = list(messages)
        # OpenAI's newer models refuse `max_tokens`, and many other servers know only this name.
        length: Any = {"max_tokens" if self.base_url else "max_completion_tokens": self.max_tokens}
        try:
            async with asyncio.timeout(self.timeout_s):
                completion = await self.client.chat.completions.create(
                    model=self.model, messages=request_messages, temperature=self.temperature, **length
                )
        except (openai.OpenAIError, TimeoutError) as error:
            cause = str(error) or f"no reply within {self.timeout_s:g} s"
            raise ForgeError(
                f"the simulated user {self.model} failed: {cause}", hint="check the endpoint of --env user"
            ) from None
        choice = completion.choices[0]
        # Without this error, a model that thinks would end each conversation at its first message.
        if not choice.message.content and choice.finish_reason == "length":
            raise ForgeError(
                f"the simulated user {self.model} wrote no message within {self.max_tokens} tokens",
                hint="raise max_tokens of --env user, or serve the model without thoughts",
            )
        # A reply is also sent back with the next request.
        return encodable(choice.message.content or "")


class UserConversation:
    """One conversation."""

    def __init__(self, config: SimulatedUser, task: Task) -> None:
        self._config, self._task, self._turns = config, task, 0
        goal = encodable(str(task.truth.get("goal") or task.prompt))
        instruction = config.instruction.replace("{goal}", goal).replace("{done}", config.done)
        # To the model that plays the user, the user's messages have the role assistant.
        self._seen: list[Message] = [{"role": "system", "content": instruction}]
        self._seen += [
            {"role": "assistant" if message["role"] == "user" else "user", "content": message["content"]}
            for message in task.messages
            if message["role"] in ("user", "assistant")
        ]

    replayable = False  # the user's model would say something else

    async def reset(self) -> Observation:
        return Observation(messages=self._task.messages)

    async def step(self, completion: str, *, truncated: bool) -> Step:
        self._turns += 1
        # A user does not answer a message that was cut off.
        if truncated or self._turns == self._config.max_turns:
            return Step(done=True)
        self._seen.append({"role": "user", "content": completion})
        reply = await self._config.reply(self._seen)
        # With an empty reply, too, the user has nothing more to say.
        if self._config.done in reply or not reply.strip():
            return Step(done=True)
        self._seen.append({"role": "assistant", "content": reply})
        return Step(done=False, messages=({"role": "user", "content": reply},))
