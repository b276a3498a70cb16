"""Python as a tool of many turns: the model writes code, sees its output, and answers; state stays between turns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from forge_rl.envs.tool import Tool
from forge_rl.errors import check_flags
from forge_rl.sandbox import DurableSession, DurableSessions, Result, shared_pool
from forge_rl.sandbox.fences import PYTHON
from forge_rl.sandbox.shared import check_shared_pool
from forge_rl.system.result_cache import ResultCache
from forge_rl.types import Message, Task
from forge_rl.worlds.code_world import CodeSession, CodeSettings, CodeWorld, shown_output

_IN_BLOCKS = (
    "You can run Python. Write code in a block that begins with ```python, and you are shown its output. Variables "
    "stay. Write the answer without code."
)


@dataclass(frozen=True, kw_only=True)
class PythonEnv:
    """Makes environments in which the model runs Python in a sandbox session of the episode's own.

        python -m recipes.grpo --tasks data.jsonl --env python:max_turns=4

    A completion with code in fenced blocks, or a call of the tool `python`, runs it, and the next message is its
    output, the value of its last expression, and its error. Any other completion is the answer, which the reward
    scores. A session starts with the first code of an episode and ends with the episode. If the code kills it, the
    output reports that, and the next code gets a new one. If the sandbox loses it, the episode's code is rerun.
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
    pure: bool = False
    """Keep what code shows, and show it again, without running, where the same code follows the same code in the same
    order, also in later runs. Random numbers and the time are then the same ones, too."""
    cache: str = "~/.cache/forge_rl/tools"
    """Folder of kept results, shared by all runs; empty keeps them in memory only."""
    cache_mib: int = 1024
    """Maximum MiB in that folder; the least recently used are evicted."""
    settings: CodeSettings = field(init=False, repr=False)
    _sessions: list[DurableSessions] = field(default_factory=list, init=False, repr=False, compare=False)
    """Sessions of the pool in use, once opened."""

    def __post_init__(self) -> None:
        """Raises SandboxError if this machine cannot isolate what runs."""
        check_flags(self, "--env python:", minimum={"cache_mib": 1})
        check_shared_pool()
        settings = CodeSettings(
            flag="--env python:",
            max_turns=self.max_turns,
            timeout_s=self.timeout_s,
            max_output_chars=self.max_output_chars,
            instruction=("" if self.tool else _IN_BLOCKS) if self.instruction is None else self.instruction,
            examples=self.examples,
            languages=() if self.tool else PYTHON,
            shows_schema=self.tool,
        )
        object.__setattr__(self, "settings", settings)

    @property
    def runs_blocks(self) -> bool:
        """Whether a completion with a block of Python is run, and so cannot be the answer."""
        return not self.tool

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_sessions": []}  # sessions belong to one process

    def __call__(self, task: Task) -> CodeWorld:
        """Make the environment of one episode."""
        return CodeWorld(self.settings, task, tool=_TOOL, session=PythonSession(self))

    async def open(self) -> DurableSession:
        """Return a new session, which starts nothing before it runs code.

        Raises:
            SandboxError: this machine cannot isolate sessions, or the sandbox did not start.
        """
        # A pool that was lost is replaced by another, in which the old sessions do not exist.
        pool = await shared_pool()
        if not self._sessions or self._sessions[0].pool is not pool:
            self._sessions[:] = [DurableSessions(pool, cache=self._made_cache())]
        return self._sessions[0].open()

    def _made_cache(self) -> ResultCache | None:
        folder = Path(self.cache).expanduser() if self.cache else None
        return ResultCache(folder, most_bytes=self.cache_mib << 20) if self.pure else None


class PythonSession(CodeSession):
    """The Python of one episode."""

    def __init__(self, config: PythonEnv, session: DurableSession | None = None) -> None:
        self._config, self._session = config, session

    async def run(self, code: str) -> str:
        """Run Python code, and return its output and the value of its last line. Variables stay for later calls.

        Args:
            code: the code.

        Raises:
            SandboxError: the sandbox failed, and with it the episode's state.
        """
        if self._session is None:
            # Opened with the first code: an episode without any takes no session.
            self._session = await self._config.open()
        result = await self._session.run(code, wall_s=self._config.timeout_s)
        self.was_kept = self._session.was_kept
        if not self._session.alive and result.error is not None:  # its own code ended it: the next code starts another
            await self.close()
            self._session, self.was_kept = None, None
            return f"error: {result.error.name}: {result.error.message}\nVariables and files are gone."
        return _shown(result)

    async def fork(self) -> PythonSession:
        """Return a session with a copy of this one's state."""
        return PythonSession(self._config, None if self._session is None else await self._session.fork())

    async def close(self) -> None:
        """End the session."""
        if self._session is not None:
            await self._session.close()


_TOOL = Tool(PythonSession.run, is_method=True, alias="python")


def _shown(result: Result) -> str:
    """Return a result as the model sees it, like a notebook."""
    error = result.error
    ending = "" if error is None else error.traceback or f"{error.name}: {error.message}"
    return shown_output(result, result.value or "", ending)
