"""Protocols of rewards: functions of a task and its episode, of its last answer alone, or of its whole group."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Literal, Protocol, TypeAlias

from forge_rl.errors import ConfigError
from forge_rl.types import Episode, Score, Task


class Reward(Protocol):
    """Scores an episode. It must pickle, so that it can be called in another process; it may be async.

        def correct_and_brief(task: Task, episode: Episode) -> Score:
            correct = float(task.truth["answer"] in episode.text)
            return Score(total=correct - 0.1 * len(episode.turns), parts={"correct": correct})

    Its second parameter says what it is given: one that is called `episode`, or annotated as an Episode, the episode,
    whose reward is still 0; one that is called `episodes`, or annotated as a sequence of them, all episodes of the
    task's group, for which it returns as many scores; any other the text of the last answer.

    An object may also have
        load(folder): called once in each process that scores, before its first score, with a private folder of the run;
        deadline_s: longest time for one async score, in place of --reward.deadline-s;
        replicas: number of processes that are its own, such as those of a model that should be loaded but once;
        files: paths of files that its scores depend on, such as a rubric; a resumed run is told when they were edited.
    """

    def __call__(self, task: Task, episode: Episode) -> float | Score:
        """Return a finite number, by custom from 0 to 1, or a Score. Bad output of the model scores 0.0; a bug, or a
        task without its truth, raises."""


Form = Literal["text", "episode", "group"]
"""Argument of a reward function beside the task: the last answer, the episode, or all episodes of the group."""
_SEVERAL = re.compile(r"(?i)(sequence|list|tuple|iterable|collection)\[.*episode", flags=re.DOTALL)
Scored: TypeAlias = float | Score
RewardFunction: TypeAlias = (
    Callable[[Task, str], Scored | Awaitable[Scored]]
    | Callable[[Task, Episode], Scored | Awaitable[Scored]]
    | Callable[[Task, Sequence[Episode]], Sequence[Scored] | Awaitable[Sequence[Scored]]]
)
"""A reward in any of its forms; plain or async. It must pickle."""


def form_of(function: object) -> Form:
    """Tell which form a reward function has, by the name and the annotation of its second parameter.

    Raises:
        ConfigError: it cannot be called with a task and something else.
    """
    declared = getattr(function, "form", None)
    if declared in ("text", "episode", "group"):
        return declared
    try:
        if not callable(function):
            raise TypeError("it is no function")
        signature = inspect.signature(function)
        signature.bind(None, None)
    except (TypeError, ValueError) as error:
        name = getattr(function, "__name__", type(function).__name__)
        raise ConfigError(
            f"the reward {name} cannot be called with a task and its episode: {error}",
            hint="write it as `def score(task, episode)`, `def score(task, text)` or `def score(task, episodes)`",
        ) from error
    parameters = list(signature.parameters.values())
    second = parameters[1] if len(parameters) > 1 else parameters[0]  # of `def score(*given)`
    annotation = "" if second.annotation is second.empty else inspect.formatannotation(second.annotation)
    if second.name in ("episodes", "group") or _SEVERAL.search(annotation):
        return "group"
    return "episode" if second.name == "episode" or "Episode" in annotation else "text"


def is_async(function: RewardFunction) -> bool:
    """Tell whether calling a reward function returns an awaitable at once."""
    function = function.func if isinstance(function, functools.partial) else function
    call = getattr(function, "__call__", None)  # noqa: B004  of an object whose call is async
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)
