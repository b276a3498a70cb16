"""Environment protocols: an Env lives for one episode, and a factory makes one per episode. Checked calls of both."""

from __future__ import annotations

import asyncio
import copy
import functools
import inspect
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Protocol, TypeAlias, runtime_checkable

from forge_rl.errors import ConfigError, ForgeError
from forge_rl.system.encodable import encodable
from forge_rl.token_arrays import CompactRecord
from forge_rl.types import Episode, Message, Score, Task, ToolCall

Parsed: TypeAlias = tuple[str, tuple[ToolCall, ...]]
"""Content and tool calls of a completion."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Observation(CompactRecord):
    """The messages that start an episode, and the tools."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, object], ...] = ()
    """JSON schemas of the tools that the model may call, in the format of chat templates."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Step(CompactRecord):
    """The environment's response to a completion."""

    messages: tuple[Message, ...] = ()
    """Messages to show the model after this completion and before the next."""
    calls: tuple[ToolCall, ...] = ()
    """The completion's tool calls with their times and errors, for people who look at the episode; by default as they
    were parsed."""
    done: bool
    """True if the episode is over."""
    reward: float | None = None
    """The environment's reward for the completion. The sum over turns is the episode's reward and replaces the
    verifier's. If a step before the last has a reward, each turn's tokens are also credited with the turn's reward."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Named parts of the environment's reward, each a metric; summed over steps."""
    output: str | None = None
    """Text that the verifier scores instead of the last completion; "" if the episode ended without an answer, for
    example in a tool call. Only when done."""
    history: tuple[Message, ...] | None = None
    """A conversation that replaces everything the model has seen and written so far, such as a summary; the episode
    continues in a new segment. `messages` must be empty."""
    branches: int = 1
    """Number of episodes that continue from here, each with a copy of the world: this one, and others of its group.
    There are fewer if the tree would exceed the factory's `leaves`. In evaluations only this episode continues."""
    forks: int = 0
    """Number of other episodes of the group that start within this completion, at its most surprising tokens, and
    rewrite the rest; each in a world made again up to the completion before. Fewer start if the tree would exceed the
    factory's `leaves`, and none in evaluations. Only when done."""
    continues: bool = False
    """True to let the model continue its last message, which a token limit cut; `messages` must be empty."""
    model_error: bool = False
    """True if the model broke the environment's protocol, for example with an unparsable call; only when done. The
    episode is scored as usual, and counted."""

    def __post_init__(self) -> None:
        assert self.done or not self.model_error, "a model error ends the episode"
        shown_messages = self.messages or self.history
        assert self.done or shown_messages or self.continues, "an episode that continues must show the model something"
        assert not (self.continues and (shown_messages or self.done)), "a message that goes on is followed by no other"
        assert not (self.done and self.branches > 1), "an episode that is over has no branches"
        assert self.done or not self.forks, "an episode forks within its last completion"
        assert not (self.messages and self.history), "a new history already includes the messages that follow"


class Env(Protocol):
    """The environment of one episode: `reset` once, then `step` until done; never reused.

        class Echo:
            def __init__(self, task: Task) -> None:
                self.task = task

            async def reset(self) -> Observation:
                return Observation(messages=self.task.messages)

            async def step(self, completion: str) -> Step:
                return Step(done=True, reward=float(completion == self.task.truth["answer"]))

    If `step` has a parameter `truncated`, it says whether a token limit cut the completion; `step` decides either way
    whether the episode continues. If it has a parameter `calls`, it receives the tool calls that the model family's
    parser found in the completion, and the completion comes without them; return a tool's output as a message {"role":
    "tool", "tool_call_id": call.id, ...}. When the context has no room for another completion, `step` is called one
    last time with "" and truncated=True, so that it can return a reward; the episode then ends regardless.

    If the process of an environment dies, a new one in another process is given the episode's completions again, and
    the episode resumes; if it then shows something else, the episode restarts. Set `replayable = False` if steps
    must not be repeated, for example in a shared world: the episode then starts again at once. An optional method
    `resume(completion, step, calls)`, plain or async, brings an environment past a completion whose `Step` is known,
    without doing the work again; it returns False to have `step` called instead.

    If a step has `branches`, the episode forks: an optional method `fork`, plain or async, returns an independent copy
    of the environment. Without one, and if the step has `forks`, each copy is made from the task and given the same
    completions again.

    An optional method `close`, plain or async, is called at the end, however the episode ends. Run blocking code in a
    thread: it would block all environments of the process. The constructor already runs in a thread, so open objects
    that are bound to their thread, such as an sqlite3 connection, in `reset`.
    """

    async def reset(self) -> Observation:
        """Begin the episode."""

    @property
    def step(self) -> Callable[..., Awaitable[Step]]:
        """Respond to the model's completion: `async def step(self, completion: str, *, truncated: bool, calls:
        Sequence[ToolCall]) -> Step`; `truncated` and `calls` are optional."""


class EnvFactory(Protocol):
    """Makes a new Env for each episode of a task. Must pickle, as it may be called in another process.

    With the attribute `in_process = True`, its environments run in the controller; use it if they only show messages.
    Its environments see completions without the model's thoughts, as drafts are not to be acted on; with `thoughts =
    True` they see these too. A method `prepare(tasks)` is called in each of its processes with the tasks that
    come next; it begins to fetch their files without waiting for them, and returns counts since the last call, which
    become metrics. If it is a `SharesFiles`, hosts get such files from each other. With `leaves = L`, an episode may
    grow into a tree of up to L of its group's episodes, see `Step.branches` and `Step.forks`. With `scores_itself =
    True` their steps give every episode its reward, so that flags which name another are refused.
    """

    def __call__(self, task: Task) -> Env:
        """Return an environment for one episode."""


# Checked with isinstance, so that a factory needs no base class.
@runtime_checkable
class SharesFiles(Protocol):
    """A factory whose processes on several hosts pass each other the files that they fetched for tasks."""

    def serve_files(self, address: str, key: str) -> Sequence[str]:
        """Serve this process's files at an address of its host, to clients that send the key; return the URLs."""

    def ask_peers(self, urls: Sequence[str], key: str) -> None:
        """Ask other hosts, at these URLs, before a file's source."""


class Policy(Protocol):
    """An endpoint of the policy, such as an episode's session at the gateway."""

    @property
    def base_url(self) -> str:
        """URL for OpenAI's clients."""

    @property
    def key(self) -> str:
        """API key of the episode's requests."""


class AgentEnvironment(Protocol):
    """An environment that runs its own episodes against the policy at the gateway; see `start(environment=...)`."""

    async def agent(self, task: Task, policy: Policy) -> Score:
        """Run one episode. A ReplicaError means that a process died; the episode is then retried."""

    @property
    def reward(self) -> Callable[[Task, Episode], Score]:
        """Score an episode that timed out before it had a score; must pickle."""

    def serving(self, logs: Path) -> AbstractAsyncContextManager[None]:
        """Run the processes that the episodes need while the body runs; they log to files in `logs`."""


def leaves_of(factory: EnvFactory) -> int:
    """Return the most episodes of a tree that a factory's environments may fork into; 1 if they may not fork.

    Raises:
        ConfigError: its `leaves` is not a positive integer.
    """
    leaves = getattr(_base_factory(factory), "leaves", 1)
    if type(leaves) is not int or leaves < 1:
        raise ConfigError(
            f"the environment's `leaves` is {leaves!r:.80}", hint="set it to the most episodes of a tree, such as 4"
        )
    return leaves


def sees_thoughts(factory: EnvFactory) -> bool:
    """Return True if a factory's environments see the model's thoughts."""
    return bool(getattr(_base_factory(factory), "thoughts", False))


def _base_factory(factory: EnvFactory) -> object:
    """Return the factory without options: `--env FILE.py:NAME,KEY=VALUE` binds them with a partial, which lacks the
    factory's attributes."""
    return factory.func if isinstance(factory, functools.partial) else factory


def make_env(factory: EnvFactory, task: Task) -> Env:
    """Make a task's environment.

    Raises:
        ForgeError: the factory returned something else.
    """
    env = factory(task)
    # A user's factory may return anything, such as a coroutine if it is async.
    if not (hasattr(env, "reset") and hasattr(env, "step")):
        raise ForgeError(
            f"the environment's factory returned {env!r:.80}, which lacks reset or step",
            hint="return an object with `async def reset(self)` and `async def step(self, completion)`",
        )
    return env


def prepare_env(factory: EnvFactory, tasks: Sequence[Task]) -> Mapping[str, float]:
    """Let a factory with a `prepare` begin to fetch what coming tasks need; return its counts."""
    base_factory = _base_factory(factory)
    prepare = getattr(base_factory, "prepare", None)
    # In a class that is its own factory, `prepare` can only be a method of one episode's environment.
    if prepare is None or isinstance(base_factory, type) or not tasks:
        return {}
    counts: Mapping[str, float] = prepare(tasks)
    return counts


async def make_env_beside(
    factory: EnvFactory, task: Task, in_thread: Callable[[Callable[[], Env]], Awaitable[Env]] = asyncio.to_thread
) -> Env:
    """Make a task's environment in a thread, as constructors may load for long, and the event loop has other episodes.

    One that needs the event loop, such as for an HTTP client, is made there.

    Args:
        in_thread: calls a function in a thread.

    Raises:
        ForgeError: the factory returned something else.
    """
    try:
        return await in_thread(functools.partial(_raised_env, factory, task))
    except RuntimeError as error:
        # asyncio raises "no running event loop" in a thread; other errors are the constructor's own.
        if "event loop" not in str(error):
            raise
    # In the event loop, although it blocks it: the constructor needs the loop.
    return make_env(factory, task)


def _raised_env(factory: EnvFactory, task: Task) -> Env:
    """Make an environment in a thread, whose future cannot hold a StopIteration."""
    try:
        return make_env(factory, task)
    except StopIteration as error:
        raise ForgeError("the environment's constructor raised StopIteration", hint="give next() a default") from error


async def reset_env(env: Env) -> Observation:
    """Begin the episode; lone surrogates in the observation become question marks, as `step_env` does with a step's.

    Raises:
        ForgeError: `reset` returned no Observation.
    """
    observation = await env.reset()
    if not isinstance(observation, Observation):
        raise ForgeError(
            f"{type(env).__name__}.reset returned {observation!r:.80}, not an Observation",
            hint="return Observation(messages=...)",
        )
    texts = {"messages": observation.messages, "tools": observation.tools}
    encodable_texts = encodable(texts)
    return observation if encodable_texts is texts else observation.updated(**encodable_texts)


async def step_env(env: Env, completion: str, truncated: bool = False, parsed: Parsed | None = None) -> Step:
    """Respond to a completion, with the optional arguments that the environment's `step` takes.

    Lone surrogates in the step's texts, such as the name of a file that is not UTF-8, become question marks: no prompt
    can hold them, and the model may have caused them.

    Raises:
        ForgeError: `step` returned no Step.
    """
    option_names = _wanted(type(env))
    kwargs: dict[str, object] = {"truncated": truncated} if "truncated" in option_names else {}
    if "calls" in option_names:
        # A parsed completion comes without its calls.
        completion, kwargs["calls"] = parsed or (completion, ())
    step = await env.step(completion, **kwargs)
    if not isinstance(step, Step):
        raise ForgeError(
            f"{type(env).__name__}.step returned {step!r:.80}, not a Step", hint="return Step(done=..., messages=...)"
        )
    texts = {"messages": step.messages, "history": step.history, "output": step.output}
    encodable_texts = encodable(texts)
    return step if encodable_texts is texts else step.updated(**encodable_texts)


Given: TypeAlias = tuple[str, bool, Parsed | None]
"""The arguments of `step_env` after the environment."""

Exchange: TypeAlias = tuple[str, bool, Parsed | None, Step]
"""The arguments of `step_env` after the environment, and its result."""


async def replay_env(env: Env, observation: Observation, log: Sequence[Exchange]) -> str:
    """Bring a new environment to the state of another one; return the first difference in its output, or ""."""
    if _shown(new_observation := await reset_env(env)) != _shown(observation):
        return f"it began with {new_observation.messages!r:.200}, not {observation.messages!r:.200}"
    resume = getattr(env, "resume", None)
    for turn, (completion, truncated, parsed, step) in enumerate(log, 1):
        content, calls = parsed or (completion, ())
        # An environment may decline by returning False; the turn is then stepped and compared.
        if resume is not None:
            resumed = resume(content, step, calls)
            if await resumed if inspect.isawaitable(resumed) else resumed:
                continue
        if _shown(new_step := await step_env(env, completion, truncated, parsed)) != _shown(step):
            return f"its turn {turn} gave {new_step.messages!r:.200}, not {step.messages!r:.200}"
    return ""


def _shown(output: Observation | Step) -> str:
    """Return what the model and the score see, without addresses of objects."""
    # Calls differ in their times, and addresses between processes.
    names = [f.name for f in fields(output) if f.name != "calls"]
    return re.sub(r"\b0x[0-9a-f]{6,16}\b", "0x", repr([getattr(output, name) for name in names]))


async def fork_env(env: Env) -> Env:
    """Return an independent copy of an environment: by its own `fork`, or else a deep copy.

    Raises:
        ForgeError: `fork` returned no other environment.
    """
    if (fork := getattr(env, "fork", None)) is None:
        return copy.deepcopy(env)
    env_copy = fork()
    env_copy = await env_copy if inspect.isawaitable(env_copy) else env_copy
    # Branches that shared a world would change one another's.
    if env_copy is env or not (hasattr(env_copy, "reset") and hasattr(env_copy, "step")):
        raise ForgeError(
            f"{type(env).__name__}.fork returned {env_copy!r:.80}, which is not another environment",
            hint="return a new object that shares nothing that steps change",
        )
    forked: Env = env_copy
    return forked


async def close_env(env: object) -> None:
    """Call an environment's `close`, if it has one."""
    close = getattr(env, "close", None)
    if close is not None and inspect.isawaitable(close_result := close()):
        await close_result


# By class, as every step of every episode asks.
@functools.cache
def _wanted(kind: type[Env]) -> frozenset[str]:
    """Return the optional arguments that an environment class's `step` takes."""
    parameters = inspect.signature(kind.step).parameters.values()
    # A `step` with **kwargs takes both.
    optional = {"truncated", "calls"}
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    return frozenset(optional if takes_all else optional & {parameter.name for parameter in parameters})
