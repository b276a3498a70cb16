"""What an environment is: an Env lives for one episode, and a factory makes one for each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from forge_rl.types import Message, Task


@dataclass(frozen=True, kw_only=True)
class Observation:
    """What the model is shown first."""

    messages: tuple[Message, ...]


@dataclass(frozen=True, kw_only=True)
class Step:
    """What follows an answer of the model."""

    messages: tuple[Message, ...] = ()
    """Shown to the model, behind its answer, before it answers again."""
    done: bool
    """Whether the episode is over."""
    reward: float | None = None
    """A reward of the environment's own for the whole episode, which replaces the verifier's; only when done."""
    model_error: bool = False
    """The model broke the environment's protocol, such as by a call that cannot be parsed; only when done. The episode
    is scored like others, and counted."""

    def __post_init__(self) -> None:
        assert self.done or not self.model_error, "an error of the model ends the episode"
        assert self.done or self.messages, "an episode that goes on must show the model something"
        assert self.done or self.reward is None, "a reward is for the whole episode: give it when done"


class Env(Protocol):
    """One episode's world: `reset` once, then `step` until it is done; never used again.

    If it has a method `close`, plain or async, that is called in the end, however the episode ends. What blocks for
    long must run in a thread: other worlds share the process.
    """

    async def reset(self) -> Observation:
        """Begin the episode."""

    async def step(self, answer: str) -> Step:
        """Take the model's answer."""


class EnvFactory(Protocol):
    """Makes a new Env for each episode of a task. It must pickle, so that it can be called in another process."""

    def __call__(self, task: Task) -> Env:
        """An environment that is used for one episode."""
