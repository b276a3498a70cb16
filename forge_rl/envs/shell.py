"""A shell as a tool of many turns: the model writes command lines, sees their output, and answers; files stay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from forge_rl.envs.code_blocks import BlockUse, block_settings
from forge_rl.envs.protocol import Observation, Step
from forge_rl.envs.tool import Tool
from forge_rl.envs.tools import ToolSettings
from forge_rl.sandbox import DurableSession, DurableSessions, Result, SandboxError, shared_pool
from forge_rl.sandbox.fences import SHELL
from forge_rl.sandbox.host import check_layers
from forge_rl.types import Message, Task, ToolCall

_IN_BLOCKS = (
    "You can use a shell. Write commands in a block that begins with ```bash, and you are shown their output. Files "
    "stay. Write the answer without a block."
)


@dataclass(frozen=True, kw_only=True)
class ShellEnv:
    """Makes environments in which the model uses a shell in a sandbox session of the episode's own.

        python -m recipes.grpo --tasks data.jsonl --env shell:max_turns=8

    A completion with commands in fenced blocks, or a call of the tool `shell`, runs them, and the next message is their
    output, and their status if it is not 0. Any other completion is the answer, which the reward scores. A session
    starts with the first commands of an episode and ends with it: files stay, programs left running do not. If the
    sandbox loses it, the episode's commands are rerun.
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
        check_layers("process")
        instruction = ("" if self.tool else _IN_BLOCKS) if self.instruction is None else self.instruction
        object.__setattr__(self, "settings", block_settings("shell", self, instruction))

    def __call__(self, task: Task) -> ShellUse:
        """Make the environment of one episode."""
        return ShellUse(self, task)


class ShellUse:
    """One episode with a shell."""

    def __init__(self, config: ShellEnv, task: Task) -> None:
        self._config, self._task = config, task
        tool = replace(TOOL, owner=self)
        self._use = BlockUse(config.settings, task, tool, languages=SHELL, shows_schema=config.tool)
        self._session: DurableSession | None = None

    async def reset(self) -> Observation:
        return await self._use.reset()

    async def step(self, completion: str, *, truncated: bool, calls: Sequence[ToolCall]) -> Step:
        return await self._use.step(completion, truncated=truncated, calls=calls)

    async def run(self, commands: str) -> str:
        """Run command lines in the episode's session; return what the model is shown.

        Raises:
            SandboxError: the sandbox failed, and with it the episode's files; a `DivergedError` if they were lost, and
                the commands showed something else when they were rerun.
        """
        if self._session is None:
            self._session = DurableSessions(await shared_pool(profile="process")).open()
        result = await self._session.run(commands, wall_s=self._config.timeout_s)
        if not self._session.alive:  # it was lost with the same commands again and again, which cannot end it
            raise SandboxError(f"the session of the episode is gone: {result.error and result.error.message}")
        return shown_result(result)

    async def fork(self) -> ShellUse:
        """Return an episode with a copy of this one's session."""
        copy = ShellUse(self._config, self._task)
        copy._use.continue_from(self._use)
        if self._session is not None:
            copy._session = await self._session.fork()
        return copy

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()


class ShellEpisode(Protocol):
    """An episode in which command lines run."""

    async def run(self, commands: str) -> str:
        """Run command lines; return what the model is shown."""


async def _shell(episode: ShellEpisode, commands: str) -> str:
    """Run command lines in bash, and return their output, and their exit status if it is not 0. Files stay for later
    calls; variables, the current folder and programs left running do not.

    Args:
        commands: the command lines.
    """
    return await episode.run(commands)


_shell.__name__ = "shell"
TOOL = Tool(_shell, is_method=True)
"""The tool of a `ShellEpisode`, which owns it."""


def shown_result(result: Result) -> str:
    """Return a result as the model sees it, like a terminal."""
    parts = [result.stdout, result.stderr]
    if result.error is not None:
        parts.append(f"error: {result.error.message}")
    elif result.status:
        parts.append(f"exit status {result.status}")
    text = "\n".join(part.rstrip("\n") for part in parts if part.strip())
    return text or "(no output)"
