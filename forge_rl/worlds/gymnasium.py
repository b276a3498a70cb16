"""Gymnasium environments played in text: observations are shown as text, and completions name actions."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from forge_rl.envs.protocol import Observation, Step
from forge_rl.envs.task_list import TaskList, seeded
from forge_rl.errors import ConfigError, check_installed
from forge_rl.types import Message, Task

_ACTIONS: Mapping[str, Sequence[str]] = {
    "Blackjack": ("stick", "hit"),
    "CliffWalking": ("up", "right", "down", "left"),
    "FrozenLake": ("left", "down", "right", "up"),
    "Taxi": ("south", "north", "east", "west", "pickup", "dropoff"),
}
"""Action names of Gymnasium's own text environments, by environment name without version."""
_COLOURED = re.compile(r"\x1b\[([\d;]+)m(.*)", re.DOTALL)
_PLAIN = "\x1b[0m"
_BRACKETS = {"4": "[]", "34": "()", "35": "{}"}
"""Brackets that replace ANSI colours: a background marks the player's position; blue and magenta mark objects."""


_MAX_NUMBERS = 1000
"""Longest observation of numbers; NumPy cuts the text of a longer array."""


def _has_pixels(space: Any) -> bool:
    """Return True if observations of a space are, or contain, an array that is too long for text."""
    inner_spaces = getattr(space, "spaces", None)
    if inner_spaces is not None:
        return any(map(_has_pixels, inner_spaces.values() if isinstance(inner_spaces, Mapping) else inner_spaces))
    return math.prod(getattr(space, "shape", None) or ()) > _MAX_NUMBERS


class GymnasiumEnv:
    """Makes episodes of a Gymnasium environment, one action per turn.

        GymnasiumEnv("FrozenLake-v1", is_slippery=False)  # --env gymnasium:FrozenLake-v1,is_slippery=false

    A text observation is shown as is; otherwise the environment's text rendering, or else the raw numbers. The last
    action that a completion names, by name or number, is taken; a completion without one gets an error message and
    costs a turn. Rewards come from the environment, per turn.

    Args:
        name: the environment, as in `gymnasium.make`: `module:Name-v0` imports the module first.
        actions: names of its actions, in order; by default numbers, except for Gymnasium's own environments.
        prompt: system message, such as the rules.
        max_turns: maximum completions per episode.
        tasks: number of seeds to train on when no tasks are set.
        held_out: number of additional held-out seeds.
        options: options of `gymnasium.make`.

    Raises:
        ConfigError: Gymnasium is not installed, it does not know the environment, the action space is neither discrete
            nor text, or observations are images or long arrays.
    """

    scores_itself = True

    def __init__(
        self,
        name: str,
        *,
        actions: Sequence[str] = (),
        prompt: str = "",
        max_turns: int = 32,
        tasks: int = 1000,
        held_out: int = 100,
        **options: Any,
    ) -> None:
        for option, value, minimum in (("max_turns", max_turns, 1), ("tasks", tasks, 1), ("held_out", held_out, 0)):
            if value < minimum:
                raise ConfigError(f"{option} is {value} in --env gymnasium", hint=f"choose {minimum} or more")
        self.name = name
        self.prompt = prompt
        self.max_turns = max_turns
        self._options = options
        self._tasks = tasks
        self._held_out = held_out
        # Made once here, so that wrong names, options and spaces fail before a run starts.
        env = self.make()
        space = env.action_space
        observation_space, renders_text = env.observation_space, env.render_mode == "ansi"
        env.close()
        if not renders_text and _has_pixels(observation_space):
            raise ConfigError(
                f"{name} shows {observation_space}, which as text would be cut to a few numbers",
                hint="wrap it to return its observations as text, or to render as ansi",
            )
        kind = type(space).__name__
        if kind not in ("Discrete", "Text"):
            raise ConfigError(
                f"the action space of {name} is {space}, which has no text form",
                hint="choose an environment with discrete actions",
            )
        # A discrete space need not begin at 0.
        self.first = int(space.start) if kind == "Discrete" else 0
        # Names belong to the environment's usual actions; options may change their number.
        default_actions = _ACTIONS.get(name.rpartition(":")[2].rpartition("-v")[0], ())
        count = int(space.n) if kind == "Discrete" else 0
        self.actions = tuple(actions) or (tuple(default_actions) if len(default_actions) == count else ())
        if kind == "Discrete" and not self.actions:
            self.actions = tuple(str(self.first + index) for index in range(count))
        if len(self.actions) != count:
            raise ConfigError(f"{name} has {count} actions, but actions has {len(actions)} names", hint="name each one")

    def __call__(self, task: Task) -> GymnasiumSession:
        """Make the environment of one episode."""
        return GymnasiumSession(self, task)

    def sources(self, seed: int) -> dict[str, TaskList]:
        """Return a task source of seeds."""
        name = f"gymnasium:{self.name}"
        return {name: seeded(name, tasks=self._tasks, held_out=self._held_out, prompt=self.prompt, seed=seed)}

    def make(self) -> Any:
        """Make the Gymnasium environment, with text rendering if it supports it."""
        check_installed("--env gymnasium", "gymnasium", "gymnasium")
        import gymnasium

        try:
            # Only an environment that has been made tells whether it can render text.
            env = gymnasium.make(self.name, **self._options)
            if "render_mode" not in self._options and "ansi" in env.metadata.get("render_modes", ()):
                env.close()
                env = gymnasium.make(self.name, render_mode="ansi", **self._options)
            return env
        except Exception as error:
            raise ConfigError(
                f"gymnasium cannot make {self.name!r}: {type(error).__name__}: {error}",
                hint="fix the name or the options, or install the package that has the environment",
            ) from None

    def action_of(self, completion: str) -> object:
        """Return the last action that a completion names, or None."""
        if not self.actions:
            return completion.strip()
        action_by_word = {name.lower(): index for index, name in enumerate(self.actions)}
        action_by_word |= {str(self.first + index): index for index in range(len(self.actions))}
        # Longest first, as a regex takes the first alternative that matches: "up" must not hide "up left".
        words = sorted(action_by_word, key=len, reverse=True)
        matches = re.findall(rf"(?<!\w)({'|'.join(map(re.escape, words))})(?!\w)", completion.lower())
        return self.first + action_by_word[matches[-1]] if matches else None


class GymnasiumSession:
    """One episode."""

    def __init__(self, config: GymnasiumEnv, task: Task) -> None:
        self._config = config
        self._task = task
        self._env: Any = None
        self._turns = 0

    async def reset(self) -> Observation:
        """Make the environment, reset it with the task's seed, and show the observation and the actions."""
        seed = self._task.truth.get("seed")
        self._env = await asyncio.to_thread(self._config.make)
        observation, _ = await asyncio.to_thread(self._env.reset, seed=seed if isinstance(seed, int) else None)
        instruction = f"Answer with one of: {', '.join(self._config.actions)}." if self._config.actions else ""
        message: Message = {
            "role": "user",
            "content": "\n\n".join(filter(None, (self._told(observation), instruction))),
        }
        return Observation(messages=(*self._task.messages, message))

    async def step(self, completion: str, *, truncated: bool) -> Step:
        """Take the action that the completion names."""
        self._turns += 1
        # An empty truncated completion means that the context has no room for another turn.
        is_last = self._turns == self._config.max_turns or (truncated and not completion)
        action = self._config.action_of(completion) if completion or not truncated else None
        if action is None:
            reminder: Message = {"role": "user", "content": f"Name one action: {', '.join(self._config.actions)}."}
            return Step(done=is_last, messages=() if is_last else (reminder,), reward=0.0, parts={"no_action": 1.0})
        # In a thread: a step may take long, and other episodes share the event loop.
        observation, reward, terminated, is_truncated, _ = await asyncio.to_thread(self._env.step, action)
        is_done = bool(terminated or is_truncated or is_last)
        message: Message = {"role": "user", "content": self._told(observation)}
        return Step(done=is_done, messages=() if is_done else (message,), reward=float(reward))

    def close(self) -> None:
        """Close the environment."""
        if self._env is not None:
            self._env.close()

    def _told(self, observation: object) -> str:
        if isinstance(observation, str):
            return observation
        rendering = self._env.render() if self._env.render_mode == "ansi" else None
        if not isinstance(rendering, str):
            return f"You see {observation}."
        *coloured, rest = rendering.split(_PLAIN)  # a regex for each colour's end would take quadratic time
        return "".join([*(_COLOURED.sub(_in_brackets, text) for text in coloured), rest]).strip("\n")


def _in_brackets(match: re.Match[str]) -> str:
    codes, text = match[1].split(";"), match[2]
    marks = next((_BRACKETS[key] for code in codes for key in (code, code[:1]) if key in _BRACKETS), "")
    return f"{marks[0]}{text}{marks[1]}" if marks else text
