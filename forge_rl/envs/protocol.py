"""Protocol of environments: an Env lives for one episode, and a factory makes one for each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from forge_rl.types import Message, Task


@dataclass(frozen=True, kw_only=True)
class Observation:
    """First messages that the model is shown."""

    messages: tuple[Message, ...]


@dataclass(frozen=True, kw_only=True)
class Step:
    """Reply of the environment to a completion."""

    messages: tuple[Message, ...] = ()
    """Messages that follow the completion and are shown to the model before its next one."""
    done: bool
    """True if the episode is over."""
    reward: float | None = None
    """The environment's own reward for the whole episode, which replaces the verifier's; only when done."""
    model_error: bool = False
    """True if the model broke the environment's protocol, such as by a call that cannot be parsed; only when done. The
    episode is scored like others, and counted."""

    def __post_init__(self) -> None:
        assert self.done or not self.model_error, "an error of the model ends the episode"
        assert self.done or self.messages, "an episode that goes on must show the model something"
        assert self.done or self.reward is None, "a reward is for the whole episode: give it when done"


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
    decides whether the episode goes on. Where the context has no room for another completion, `step` is called a last
    time with "", which is truncated, so that it can give its reward; the episode then ends whatever it returns.

    If it has a method `close`, plain or async, that is called in the end, however the episode ends. Code that blocks
    should run in a thread: other environments of the process wait meanwhile.
    """

    async def reset(self) -> Observation:
        """Begin the episode."""

    async def step(self, completion: str, *, truncated: bool = False) -> Step:
        """Respond to the model's completion; `truncated` may be left out of the parameters."""


class EnvFactory(Protocol):
    """Makes a new Env for each episode of a task. It must pickle, so that it can be called in another process.

    One with the attribute `in_process = True` makes environments that only show something, and run in the controller.
    """

    def __call__(self, task: Task) -> Env:
        """Return an environment that is used for one episode."""
