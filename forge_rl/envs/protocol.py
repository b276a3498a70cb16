"""Protocol of environments: an Env lives for one episode, and a factory makes one for each."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from forge_rl.types import Episode, Message, Score, Task


@dataclass(frozen=True, kw_only=True)
class Observation:
    """First messages that the model is shown, and its tools."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, object], ...] = ()
    """JSON schemas of the tools that the model may call, as chat templates take them."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """Reply of the environment to a completion."""

    messages: tuple[Message, ...] = ()
    """Messages that follow the completion and are shown to the model before its next one."""
    done: bool
    """True if the episode is over."""
    reward: float | None = None
    """The environment's own reward for the completion. The sum over the episode's turns is the episode's reward, and
    takes the place of the verifier's. Where it is given before the episode is done, the tokens of each turn are
    credited with their own as well."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Named parts of the environment's reward, each a metric; those of all steps are added up."""
    output: str | None = None
    """Text that the verifier scores, instead of the last completion: "" where the episode ended without an answer, such
    as in a tool call; only when done."""
    history: tuple[Message, ...] | None = None
    """A conversation that takes the place of all that the model was shown and has written so far, such as a summary:
    what follows is a new segment of the episode. `messages` must be empty."""
    model_error: bool = False
    """True if the model broke the environment's protocol, such as by a call that cannot be parsed; only when done. The
    episode is scored like others, and counted."""

    def __post_init__(self) -> None:
        assert self.done or not self.model_error, "an error of the model ends the episode"
        assert self.done or self.messages or self.history, "an episode that goes on must show the model something"
        assert not (self.messages and self.history), "a new history has the messages that follow in it"


class Env(Protocol):
    """The environment of one episode: `reset` once, then `step` until it is done; never used again.

        class Echo:
            def __init__(self, task: Task) -> None:
                self.task = task

            async def reset(self) -> Observation:
                return Observation(messages=self.task.messages)

            async def step(self, completion: str) -> Step:
                return Step(done=True, reward=float(completion == self.task.truth["answer"]))

    A `step` that takes `truncated` as well is told whether the completion was cut by a token limit; either way it
    decides whether the episode goes on. One that takes `calls` is given the tool calls that the model family's parser
    found in the completion, which is then without them; a tool's output is the content of a message {"role": "tool",
    "tool_call_id": call.id, ...}. Where the context has no room for another completion, `step` is called a last time
    with "", which is truncated, so that it can give its reward; the episode then ends whatever it returns.

    If it has a method `close`, plain or async, that is called in the end, however the episode ends. Code that blocks
    should run in a thread: other environments of the process wait meanwhile.
    """

    async def reset(self) -> Observation:
        """Begin the episode."""

    @property
    def step(self) -> Callable[..., Awaitable[Step]]:
        """Respond to the model's completion: `async def step(self, completion: str, *, truncated: bool, calls:
        Sequence[ToolCall]) -> Step`, of which `truncated` and `calls` may be left out."""


class EnvFactory(Protocol):
    """Makes a new Env for each episode of a task. It must pickle, so that it can be called in another process.

    One with the attribute `in_process = True` makes environments that only show something, and run in the controller.
    """

    def __call__(self, task: Task) -> Env:
        """Return an environment that is used for one episode."""


class Policy(Protocol):
    """A place at which the policy answers, as an episode's session at the gateway is."""

    @property
    def base_url(self) -> str:
        """URL for OpenAI's clients."""

    @property
    def key(self) -> str:
        """API key of the episode's requests."""


class AgentEnvironment(Protocol):
    """An environment that plays its episodes itself, against the policy at the gateway; `start(environment=...)`."""

    async def agent(self, task: Task, policy: Policy) -> Score:
        """Play one episode. A ReplicaError says that a process died; the episode is then played again."""

    @property
    def reward(self) -> Callable[[Task, Episode], Score]:
        """Score an episode whose time was over before it had a score; it must pickle."""

    def serving(self, logs: Path) -> AbstractAsyncContextManager[None]:
        """Run what the episodes need while the body runs; processes print to files in that folder."""
