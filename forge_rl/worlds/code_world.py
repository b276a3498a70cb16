"""Environments in which code runs: the model writes it in fenced blocks or as a tool call, and is shown its output."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from forge_rl.envs.protocol import Observation, Step
from forge_rl.envs.tool import Tool
from forge_rl.envs.tools import UNREADABLE_CALL, attempts_call, clipped, first_messages, not_run
from forge_rl.errors import check_flags
from forge_rl.sandbox import Result
from forge_rl.sandbox.fences import fenced_code
from forge_rl.types import Message, Task, ToolCall

_QUEUE_S = 3600.0
"""Maximum seconds of a call, including the wait for a session; the session itself limits the time of the code."""


@dataclass(frozen=True, kw_only=True)
class CodeSettings:
    """Settings of the episodes of an environment that runs code.

    Raises:
        ConfigError: one is out of range; names the option.
    """

    flag: str
    """Start of its options on the command line, such as --env python:, for errors."""
    max_turns: int
    """Maximum completions per episode."""
    timeout_s: float
    """Seconds that the code of one completion may run. Each of its calls may take as long, and no further one is run
    once those after the first have taken it together."""
    max_output_chars: int = 4000
    """Maximum characters of an output; the middle of a longer one is cut."""
    instruction: str = ""
    """System message for tasks that have none."""
    examples: Sequence[Message] = ()
    """Messages shown before the task's question."""
    languages: Collection[str] = ()
    """Languages of the fenced blocks that are run; none to run tool calls only."""
    shows_schema: bool = False
    """Show the model the tool's schema."""

    def __post_init__(self) -> None:
        minimum = {"max_turns": 1, "max_output_chars": 100}
        check_flags(self, self.flag, minimum=minimum, above={"timeout_s": 0}, maximum={"timeout_s": _QUEUE_S})


class CodeSession(Protocol):
    """The session in which an episode's code runs; starts nothing before the first code."""

    was_kept: bool | None = None
    """True if the latest code was not run, as its output was in the cache; None without a cache."""

    async def run(self, code: str, /) -> str:
        """Run code; return what the model is shown.

        Raises:
            SandboxError: the sandbox failed, and with it the episode's state.
        """

    async def fork(self) -> CodeSession:
        """Return a session with a copy of this one's state."""

    async def score(self) -> tuple[float, Mapping[str, float]] | None:
        """Return the reward and its parts once the episode is over; None if the run's reward scores the answer."""
        return None

    async def close(self) -> None:
        """End the session, if it was started."""


class CodeWorld:
    """One episode in which code runs: the environment of `--env python`, `shell`, `repository` and `harbor`.

        CodeWorld(settings, task, tool=Tool(PythonSession.run, is_method=True, alias="python"), session=session)

    A completion with code in fenced blocks, or with calls of the tool, runs it, and its output is the next message. Any
    other completion is the answer and ends the episode.

    Args:
        tool: the session's `run` as the model calls it, with one argument of text; gives its schema, and reads its
            arguments.
        session: runs the code.
    """

    def __init__(self, settings: CodeSettings, task: Task, *, tool: Tool, session: CodeSession) -> None:
        self.session = session
        self._settings, self._task, self._tool = settings, task, tool
        function: Any = tool.schema["function"]
        # Unpacked as a list: the tool must have exactly one argument.
        [self._argument] = function["parameters"]["properties"]
        self._turns = 0

    async def reset(self) -> Observation:
        """Return the first observation."""
        messages = first_messages(self._task, self._settings.instruction, self._settings.examples)
        return Observation(messages=tuple(messages), tools=(self._tool.schema,) if self._settings.shows_schema else ())

    async def step(self, completion: str, *, truncated: bool, calls: Sequence[ToolCall]) -> Step:
        """Run a completion's calls, or else its blocks."""
        self._turns += 1
        blocks = [] if calls or truncated else fenced_code(completion, self._settings.languages)
        if truncated or not (blocks or attempts_call(completion, calls)):  # a truncated one may have lost code
            return await self._end(completion)
        # The model would never see the output of code in its last turn, so that the code is not run.
        if self._turns == self._settings.max_turns:
            return await self._end("")
        if blocks:
            # All blocks of a completion are one run, with one output and one time limit.
            code = "\n".join(blocks)
            # The record of an episode shows code in blocks as it shows code in calls.
            call = ToolCall(id="block", name=self._tool.name, arguments=json.dumps({self._argument: code}))
            text, finished_call = await self._run(call, code)
            messages: tuple[Message, ...] = ({"role": "user", "content": f"Output:\n{text}"},)
            return Step(done=False, messages=messages, calls=(finished_call,))
        if not calls:
            return Step(done=False, messages=({"role": "user", "content": UNREADABLE_CALL},))
        pairs, spent_s = list[tuple[str, ToolCall]](), 0.0
        for call in calls:
            # The time of the first call is no measure of its code, as it may have waited for a session.
            if spent_s < self._settings.timeout_s:
                text, finished_call = await self._run(call)
            else:
                text = not_run(self._settings.timeout_s)
                finished_call = replace(call, error=text)
            spent_s += (finished_call.seconds or 0.0) if pairs else 0.0
            pairs.append((text, finished_call))
        return Step(
            done=False,
            messages=tuple(
                {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": text} for text, call in pairs
            ),
            calls=tuple(call for _, call in pairs),
        )

    async def fork(self) -> CodeWorld:
        """Return an episode with a copy of this one's session."""
        fork = CodeWorld(self._settings, self._task, tool=self._tool, session=await self.session.fork())
        fork._turns = self._turns
        return fork

    async def close(self) -> None:
        """End the session."""
        await self.session.close()

    async def _run(self, call: ToolCall, code: str | None = None) -> tuple[str, ToolCall]:
        """Run a call, or code from blocks; return what the model is shown, and the finished call."""
        start_time, was_kept, text = time.monotonic(), None, ""
        # A wrong name or wrong arguments are answered with an error, from which the model may recover.
        if call.name != self._tool.name:
            text = f"error: there is no tool {call.name!r:.80}; there are: {self._tool.name}"
        elif code is None:
            try:
                [code] = self._tool.read(call.arguments).values()
            except ValueError as error:
                text = str(error)
        if code is not None:
            try:
                # The session limits the code's own time; this bounds the wait for a place in the pool.
                async with asyncio.timeout(_QUEUE_S):
                    text = await self.session.run(code)
                was_kept = self.session.was_kept
            except TimeoutError:
                text = f"error: {self._tool.name} took longer than {_QUEUE_S:g} s"
        text = clipped(text, self._settings.max_output_chars)
        error_text = text if text.startswith("error: ") else ""
        return text, replace(call, seconds=time.monotonic() - start_time, error=error_text, cached=was_kept)

    async def _end(self, answer: str) -> Step:
        # Python and the plain shell leave the score to the run's reward.
        if (score := await self.session.score()) is None:
            return Step(done=True, output=answer)
        reward, parts = score
        return Step(done=True, output=answer, reward=reward, parts=parts)


def shown_output(result: Result, *endings: str) -> str:
    """Return what a result printed and these endings, each on lines of its own, as a terminal shows them."""
    parts = [result.stdout, result.stderr, *endings]
    return "\n".join(part.rstrip("\n") for part in parts if part.strip()) or "(no output)"
