"""Single-player games of the textarena package."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import io
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

from forge_rl.envs.protocol import Observation, Step
from forge_rl.envs.task_list import TaskList, seeded
from forge_rl.errors import ConfigError, ForgeError, TaskError, check_flags, check_installed
from forge_rl.types import Task


@dataclass(frozen=True)
class TextArena:
    """Makes episodes of a TextArena game for one player.

        TextArena("GuessTheNumber-v0")  # --env textarena:GuessTheNumber-v0

    The reward is the game's, from -1 or 0 to 1.

    Raises:
        ConfigError: textarena is not installed, the game does not exist, or it is not for one player.
    """

    scores_itself: ClassVar[bool] = True
    """See `EnvFactory`."""
    game: str
    """Game id, such as GuessTheNumber-v0."""
    _: KW_ONLY
    max_turns: int = 30
    """Maximum completions per episode."""
    tasks: int = 1000
    """Number of seeds to train on when no tasks are set."""
    held_out: int = 100
    """Number of additional held-out seeds."""

    def __post_init__(self) -> None:
        check_flags(self, "--env textarena:", minimum={"max_turns": 1, "tasks": 1, "held_out": 0})
        # A game that does not exist, or is not for one player, fails before a run starts. What it says while it tries
        # to download data is hidden here alone: `redirect_stderr` is of the whole process, and episodes start at once.
        with contextlib.redirect_stderr(io.StringIO()):
            self.start(0)

    def __call__(self, task: Task) -> TextArenaGame:
        return TextArenaGame(self, task)

    def sources(self, seed: int) -> dict[str, TaskList]:
        """Return a task source of seeds."""
        return {self.game: seeded(self.game, tasks=self.tasks, held_out=self.held_out, prompt="", seed=seed)}

    def start(self, seed: int) -> Any:
        """Make textarena's environment and reset it."""
        check_installed("--env textarena", "textarena", "textarena")
        try:
            textarena: Any = importlib.import_module("textarena")
        except ImportError as error:
            raise ConfigError(f"textarena cannot be imported: {error}", hint="pip install textarena") from None
        try:
            # The raw game attributes each message to its sender; otherwise each turn repeats everything as one text.
            env = textarena.make(f"{self.game}-raw")
            env.reset(num_players=1, seed=seed)
        except Exception as error:
            cause = next((line.strip(" *") for line in str(error).splitlines() if line.strip(" *")), repr(error))
            raise ConfigError(
                f"textarena cannot make {self.game!r} for one player: {cause}",
                hint="choose a single-player game, such as GuessTheNumber-v0; some games need NLTK data",
            ) from None
        return env


class TextArenaGame:
    """One game."""

    def __init__(self, config: TextArena, task: Task) -> None:
        seed = task.truth.get("seed")
        if not isinstance(seed, int):
            raise TaskError(f"the task {task.id!r} has no game seed", hint="omit --tasks: textarena has its own")
        self._config, self._seed, self._turns = config, seed, 0
        self._game: Any = None

    async def reset(self) -> Observation:
        self._game = await asyncio.to_thread(self._config.start, self._seed)  # some games load data
        return Observation(messages=({"role": "user", "content": self._said()},))

    async def step(self, completion: str) -> Step:
        self._turns += 1
        try:
            done, _ = self._game.step(completion)
        except ValueError as error:  # of a move that the game cannot read
            is_last = self._turns >= self._config.max_turns
            messages = ({"role": "user", "content": f"error: {error}"},)
            return Step(done=is_last, messages=() if is_last else messages, reward=0.0 if is_last else None)
        if not done and self._turns < self._config.max_turns:
            # A step that does not end the episode must show something, and a game may say nothing.
            return Step(done=False, messages=({"role": "user", "content": self._said() or "Go on."},))
        # A game that is cut off has no rewards of its own.
        rewards, _ = self._game.close() if done else ({0: 0.0}, {})
        if not isinstance(rewards, Mapping) or 0 not in rewards:
            raise ForgeError(f"{self._config.game} returned no reward: {rewards!r}", hint="report it to textarena")
        return Step(done=True, reward=float(rewards[0]))

    def _said(self) -> str:
        """Return the game's text since the model's last turn."""
        _, events = self._game.get_observation()
        return "\n".join(str(text) for sender, text, *_ in events if sender != 0)
