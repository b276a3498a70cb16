"""Python as a tool of many turns: the model writes code, sees its output, and answers; state stays between turns."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from forge_rl.envs.protocol import Observation, Step
from forge_rl.envs.tool import Tool
from forge_rl.envs.tools import ToolSettings, ToolUse
from forge_rl.errors import ConfigError, check_flags
from forge_rl.sandbox import CellError, Result, SandboxError, Session, shared_pool
from forge_rl.sandbox.fences import fenced_code
from forge_rl.sandbox.host import check_layers
from forge_rl.types import Message, Task, ToolCall

_IN_BLOCKS = (
    "You can run Python. Write code in a block that begins with ```python, and you are shown its output. Variables "
    "stay. Write the answer without code."
)
_QUEUE_S = 3600.0
"""Longest that a tool call lasts with the wait for a session; the call's own time is limited inside."""


@dataclass(frozen=True, kw_only=True)
class PythonEnv:
    """Makes environments in which the model runs Python in a sandbox session of the episode's own.

        python -m recipes.grpo --tasks data.jsonl --env python:max_turns=4

    A completion with code in fenced blocks, or a call of the tool `python`, runs it, and the next message is its
    output, the value of its last expression, and its error. Any other completion is the answer, which the reward
    scores. A session starts with the first code of an episode and ends with the episode. If the code kills it, the
    output says so, and the next code has a new one.
    """

    max_turns: int = 4
    """Maximum completions per episode; an episode whose last completion runs code has no answer."""
    timeout_s: float = 10.0
    """Seconds that the code of one completion may run."""
    max_output_chars: int = 2000
    """Maximum characters of an output; the middle of a longer one is cut."""
    instruction: str | None = None
    """System message for tasks that have none; by default it explains the blocks, or is empty with `tool=true`."""
    tool: bool = False
    """Run calls of the tool `python` alone, whose schema the model is shown: for models that were trained to call
    tools, and for tasks whose answer is a block of code."""
    examples: Sequence[Message] = ()
    """Messages shown before the task's question, such as code with its output and an answer."""
    settings: ToolSettings = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Raises SandboxError if this machine cannot isolate what runs."""
        check_flags(self, "--env python:", least={"max_turns": 1, "max_output_chars": 100}, above={"timeout_s": 0})
        check_layers("standard")
        if self.timeout_s > _QUEUE_S:
            raise ConfigError(f"--env python:timeout_s is {self.timeout_s:g}", hint=f"set it to {_QUEUE_S:g} or less")
        instruction = ("" if self.tool else _IN_BLOCKS) if self.instruction is None else self.instruction
        settings = ToolSettings(
            max_turns=self.max_turns,
            timeout_s=_QUEUE_S,
            max_output_chars=self.max_output_chars,
            instruction=instruction,
            examples=self.examples,
        )
        object.__setattr__(self, "settings", settings)

    def __call__(self, task: Task) -> PythonUse:
        """Make the environment of one episode."""
        return PythonUse(self, task)


class PythonUse:
    """One episode with Python."""

    def __init__(self, config: PythonEnv, task: Task) -> None:
        self._config = config
        self._use = ToolUse(config.settings, task, {"python": replace(_TOOL, owner=self)})
        self._session: Session | None = None

    async def reset(self) -> Observation:
        observation = await self._use.reset()
        return observation if self._config.tool else replace(observation, tools=())

    async def step(self, completion: str, *, truncated: bool, calls: Sequence[ToolCall]) -> Step:
        code = [] if calls or truncated or self._config.tool else fenced_code(completion)
        if not code:
            return await self._use.step(completion, truncated=truncated, calls=calls)
        call = ToolCall(id="block", name="python", arguments=json.dumps({"code": "\n".join(code)}))
        step = await self._use.step(completion, truncated=False, calls=(call,))
        shown = tuple({"role": "user", "content": f"Output:\n{each['content']}"} for each in step.messages)
        return replace(step, messages=shown)

    async def run(self, code: str) -> str:
        """Run code in the episode's session; return what the model is shown.

        Raises:
            SandboxError: the sandbox failed, and with it the episode's state.
        """
        if self._session is None:
            self._session = await (await shared_pool()).open()
        session = self._session
        if not session.alive and not session.lost:  # a thread or program of the code has killed it since
            return await self._replace(CellError(name="Ended", message="the session has ended"))
        result = await session.run(code, wall_s=self._config.timeout_s)
        if session.lost:
            raise SandboxError(f"the session of the episode is gone: {session.lost}")
        if not session.alive and result.error is not None:
            return await self._replace(result.error)
        return _shown(result)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def _replace(self, error: CellError) -> str:
        """Drop a session that its own code ended; the next code starts another."""
        assert self._session is not None
        await self._session.close()
        self._session = None
        return f"error: {error.name}: {error.message}\nVariables and files are gone."


async def _python(episode: PythonUse, code: str) -> str:
    """Run Python code, and return its output and the value of its last line. Variables stay for later calls.

    Args:
        code: the code.
    """
    return await episode.run(code)


_python.__name__ = "python"
_TOOL = Tool(_python, is_method=True)


def _shown(result: Result) -> str:
    """Return a result as the model sees it, like a notebook."""
    parts = [result.stdout, result.stderr, result.value or ""]
    if result.error is not None:
        parts.append(result.error.traceback or f"{result.error.name}: {result.error.message}")
    text = "\n".join(part.rstrip("\n") for part in parts if part.strip())
    return text or "(no output)"
