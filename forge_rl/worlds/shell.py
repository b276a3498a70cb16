"""A shell as a tool of many turns: the model writes command lines, sees their output, and answers; files stay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from forge_rl.envs.tool import Tool
from forge_rl.sandbox import DurableSession, DurableSessions, Result, SandboxError, shared_pool
from forge_rl.sandbox.fences import SHELL
from forge_rl.sandbox.host import check_layers
from forge_rl.sandbox.providers.containers import RentedSession
from forge_rl.types import Message, Task
from forge_rl.worlds.code_world import CodeSession, CodeSettings, CodeWorld, shown_output

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
    settings: CodeSettings = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Raises SandboxError if this machine cannot isolate what runs."""
        check_layers("process")
        settings = CodeSettings(
            flag="--env shell:",
            max_turns=self.max_turns,
            timeout_s=self.timeout_s,
            max_output_chars=self.max_output_chars,
            instruction=("" if self.tool else _IN_BLOCKS) if self.instruction is None else self.instruction,
            examples=self.examples,
            languages=SHELL,
            shows_schema=self.tool,
        )
        object.__setattr__(self, "settings", settings)

    def __call__(self, task: Task) -> CodeWorld:
        """Make the environment of one episode."""
        return CodeWorld(self.settings, task, tool=SHELL_TOOL, session=ShellSession(self.timeout_s))


class ShellSession(CodeSession):
    """The shell of one episode.

    Args:
        timeout_s: seconds that the commands of one completion may run.
    """

    def __init__(self, timeout_s: float, session: DurableSession | None = None) -> None:
        self._timeout_s, self._session = timeout_s, session

    async def run(self, commands: str) -> str:
        """Run command lines in bash, and return their output, and their exit status if it is not 0. Files stay for
        later calls; variables, the current folder and programs left running do not.

        Args:
            commands: the command lines.

        Raises:
            SandboxError: the sandbox failed, and with it the episode's files; a `DivergedError` if they were lost, and
                the commands showed something else when they were rerun.
        """
        if self._session is None:
            # Opened with the first commands: an episode without any takes no session.
            self._session = DurableSessions(await shared_pool(profile="process")).open()
        return shown_commands(self._session, await self._session.run(commands, wall_s=self._timeout_s))

    async def fork(self) -> ShellSession:
        """Return a session with a copy of this one's files."""
        return ShellSession(self._timeout_s, None if self._session is None else await self._session.fork())

    async def close(self) -> None:
        """End the session."""
        if self._session is not None:
            await self._session.close()


SHELL_TOOL = Tool(ShellSession.run, is_method=True, alias="shell")
"""The tool of episodes in which command lines run."""


def shown_commands(session: DurableSession | RentedSession, result: Result) -> str:
    """Return a result as the model sees it, like a terminal.

    Raises:
        SandboxError: the session is gone.
    """
    # Commands cannot end a session: its server was lost with the same ones again and again.
    if not session.alive:
        raise SandboxError(f"the session of the episode is gone: {result.error and result.error.message}")
    if result.error is not None:
        return shown_output(result, f"error: {result.error.message}")
    # As in a terminal, success says nothing.
    return shown_output(result, f"exit status {result.status}" if result.status else "")
