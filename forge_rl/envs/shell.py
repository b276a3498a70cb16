"""A shell as a tool of many turns: the model writes command lines, sees their output, and answers; files stay."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from forge_rl.envs.protocol import Observation, Step
from forge_rl.envs.tool import Tool
from forge_rl.envs.tools import ToolSettings, ToolUse
from forge_rl.errors import ConfigError, check_flags
from forge_rl.sandbox import Result, SandboxError, Session, shared_pool
from forge_rl.sandbox.fences import SHELL, fenced_code
from forge_rl.sandbox.host import check_layers
from forge_rl.types import Message, Task, ToolCall

_IN_BLOCKS = (
    "You can use a shell. Write commands in a block that begins with ```bash, and you are shown their output. Files "
    "stay. Write the answer without a block."
)
_QUEUE_S = 3600.0
"""Longest that a tool call lasts with the wait for a session; the call's own time is limited inside."""


@dataclass(frozen=True, kw_only=True)
class ShellEnv:
    """Makes environments in which the model uses a shell in a sandbox session of the episode's own.

        python -m recipes.grpo --tasks data.jsonl --env shell:max_turns=8

    A completion with commands in fenced blocks, or a call of the tool `shell`, runs them, and the next message is their
    output, and their status if it is not 0. Any other completion is the answer, which the reward scores. A session
    starts with the first commands of an episode and ends with it: files stay, programs left running do not.
    """

    max_turns: int = 8
    """Maximum completions per episode; an episode whose last completion runs commands has no answer."""
    timeout_s: float = 30.0
    """Seconds that the commands of one completion may run."""
    max_output_chars: int = 4000
    """Maximum characters of an output; the middle of a longer one is cut."""
    instruction: str | None = None
    """System message for tasks that have none; by default it explains the blocks, and is empty with `tool=true`."""
    tool: bool = False
    """Show the model the schema of the tool `shell`, for models trained to call tools. Blocks work as well."""
    examples: Sequence[Message] = ()
    """Messages shown before the task's question, such as commands with their output and an answer."""
    settings: ToolSettings = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Raises SandboxError if this machine cannot isolate what runs."""
        check_flags(self, "--env shell:", least={"max_turns": 1, "max_output_chars": 100}, above={"timeout_s": 0})
        check_layers("process")
        if self.timeout_s > _QUEUE_S:
            raise ConfigError(f"--env shell:timeout_s is {self.timeout_s:g}", hint=f"set it to {_QUEUE_S:g} or less")
        instruction = ("" if self.tool else _IN_BLOCKS) if self.instruction is None else self.instruction
        settings = ToolSettings(
            max_turns=self.max_turns,
            timeout_s=_QUEUE_S,
            max_output_chars=self.max_output_chars,
            instruction=instruction,
            examples=self.examples,
        )
        object.__setattr__(self, "settings", settings)

    def __call__(self, task: Task) -> ShellUse:
        """Make the environment of one episode."""
        return ShellUse(self, task)


class ShellUse:
    """One episode with a shell."""

    def __init__(self, config: ShellEnv, task: Task) -> None:
        self._config = config
        self._use = ToolUse(config.settings, task, {"shell": replace(_TOOL, owner=self)})
        self._session: Session | None = None

    async def reset(self) -> Observation:
        observation = await self._use.reset()
        return observation if self._config.tool else replace(observation, tools=())

    async def step(self, completion: str, *, truncated: bool, calls: Sequence[ToolCall]) -> Step:
        commands = [] if calls or truncated else fenced_code(completion, SHELL)
        if not commands:
            return await self._use.step(completion, truncated=truncated, calls=calls)
        call = ToolCall(id="block", name="shell", arguments=json.dumps({"commands": "\n".join(commands)}))
        step = await self._use.step(completion, truncated=False, calls=(call,))
        shown = tuple({"role": "user", "content": f"Output:\n{each['content']}"} for each in step.messages)
        return replace(step, messages=shown)

    async def run(self, commands: str) -> str:
        """Run command lines in the episode's session; return what the model is shown.

        Raises:
            SandboxError: the sandbox failed, and with it the episode's files.
        """
        if self._session is None:
            self._session = await (await shared_pool(profile="process")).open()
        result = await self._session.run(commands, wall_s=self._config.timeout_s)
        if not self._session.alive:  # commands cannot end it
            raise SandboxError(f"the session of the episode is gone: {result.error and result.error.message}")
        return _shown(result)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()


async def _shell(episode: ShellUse, commands: str) -> str:
    """Run command lines in bash, and return their output, and their exit status if it is not 0. Files stay for later
    calls; variables, the current folder and programs left running do not.

    Args:
        commands: the command lines.
    """
    return await episode.run(commands)


_shell.__name__ = "shell"
_TOOL = Tool(_shell, is_method=True)


def _shown(result: Result) -> str:
    """Return a result as the model sees it, like a terminal."""
    parts = [result.stdout, result.stderr]
    if result.error is not None:
        parts.append(f"error: {result.error.message}")
    elif result.status:
        parts.append(f"exit status {result.status}")
    text = "\n".join(part.rstrip("\n") for part in parts if part.strip())
    return text or "(no output)"
