"""Reward protocol: functions of a task and its episode, only its last answer, or its whole group."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias, runtime_checkable

from forge_rl.errors import ConfigError
from forge_rl.tokens.thoughts import without_thoughts
from forge_rl.types import Episode, Score, Task


class Reward(Protocol):
    """Scores an episode; sync or async, and picklable, because another process calls it.

        def correct_and_brief(task: Task, episode: Episode) -> Score:
            correct = float(task.truth["answer"] in episode.text)
            return Score(total=correct - 0.1 * len(episode.turns), parts={"correct": correct})

    The second parameter determines the argument. Named `episode` or annotated as an Episode, it is the episode, not
    scored yet. Named `episodes` or annotated as a sequence of them, it is all episodes of the task's group, and
    the function returns one score per episode. Otherwise it is the text of the last answer, without the model's
    thoughts; "" if these are unfinished.

    An object may also have
        load(folder): called once in each scoring process before its first score, with a private folder of the run;
        deadline_s: deadline of one async score, instead of --reward.deadline-s;
        replicas: number of dedicated processes, for example for a model that should be loaded only once;
        files: paths of files that its scores depend on, such as a rubric; a resumed run reports if they were edited;
        thoughts: True if its text is to include the model's thoughts.
    """

    def __call__(self, task: Task, episode: Episode) -> float | Score:
        """Return a finite number, by convention from 0 to 1, or a Score. Bad model output scores 0.0; a bug, or a task
        without its truth, raises."""


@dataclass(frozen=True, kw_only=True)
class TextReward:
    """Options of all bundled rewards that score text: `--reward math:thoughts=true`."""

    thoughts: bool = False
    """Score the model's thoughts too, which come before the answer."""

    def graded(self, text: str) -> str:
        """Return the part of a completion that is scored; a run hands over text without thoughts already."""
        return text if self.thoughts else without_thoughts(text)


@runtime_checkable
class Shaping(Protocol):
    """A part of a sum whose value depends on the other parts, such as a penalty that counts only for right answers.

    Like a reward, it is called with the task and the episode, or with the whole group; its score is then only a
    measurement, such as the episode's length, from which `shape` computes the value of the part. `shape` runs in the
    controller, so it must be fast.
    """

    of: str
    """Name of the part to depend on, unweighted; "" for the weighted sum of all parts that do not shape."""

    def shape(self, measured: Sequence[Score], base_rewards: Sequence[float]) -> Sequence[float]:
        """Return the value of this part for each episode.

        Args:
            measured: this part's own score of each episode.
            base_rewards: value of the part `of` for each episode.
        """


@runtime_checkable
class PeerReward(Protocol):
    """A reward that calls a function as another framework's trainer would."""

    peer: str
    """Name of the framework."""
    function: Callable[..., object]


Form = Literal["text", "episode", "group"]
"""Second argument of a reward function: the last answer, the episode, or all episodes of the group."""
_BATCH_NAMES = {"prompts", "responses", "solution_str", "solution_strs", "data_source", "ground_truth", "data", "batch"}
"""Names of parameters of other frameworks' rewards."""
_HINT = "write it as `def score(task, episode)`, `def score(task, text)` or `def score(task, episodes)`"
_SEVERAL = re.compile(r"(?i)(sequence|list|tuple|iterable|collection)\[.*episode", flags=re.DOTALL)
Scored: TypeAlias = float | Score
RewardFunction: TypeAlias = (
    Callable[[Task, str], Scored | Awaitable[Scored]]
    | Callable[[Task, Episode], Scored | Awaitable[Scored]]
    | Callable[[Task, Sequence[Episode]], Sequence[Scored] | Awaitable[Sequence[Scored]]]
)
"""A reward in any of its forms, sync or async; must be picklable."""


def form_of(function: object) -> Form:
    """Return the form of a reward function, by the name and annotation of its second parameter.

    Raises:
        ConfigError: the function cannot be called with two arguments.
    """
    # An explicit `form` wins, as sums and wrapped functions have no parameters that could tell.
    declared: Form | None = getattr(function, "form", None)
    if declared in ("text", "episode", "group"):
        return declared
    name = getattr(function, "__name__", type(function).__name__)
    if peer := peer_of(function):
        raise ConfigError(
            f"the reward {name} has the form of {peer}'s rewards",
            hint="name it in --reward or give it to start(), or wrap it with forge_rl.rewards.peers.as_reward",
        )
    try:
        if not callable(function):
            raise TypeError("it is not a function")
        signature = inspect.signature(function)
        signature.bind(None, None)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"the reward {name} cannot be called with a task and its episode: {error}",
            hint=_HINT,
        ) from error
    parameters = list(signature.parameters.values())
    if batched := [parameter.name for parameter in parameters[:2] if parameter.name in _BATCH_NAMES]:
        raise ConfigError(
            f"the reward {name} takes {batched[0]!r}, which no reward is called with",
            hint=f"{_HINT}; or as TRL's f(prompts, completions, **kwargs) or verl's f(data_source, solution_str, "
            "ground_truth, extra_info)",
        )
    second = parameters[1] if len(parameters) > 1 else parameters[0]  # of `def score(*given)`
    # Annotations may be strings or types; formatted, both are text that can be searched.
    annotation = "" if second.annotation is second.empty else inspect.formatannotation(second.annotation)
    if second.name in ("episodes", "group") or _SEVERAL.search(annotation):
        return "group"
    return "episode" if second.name == "episode" or "Episode" in annotation else "text"


def peer_of(function: object) -> Literal["TRL", "verl", ""]:
    """Return the framework for which a reward function is written, by the names of its parameters; "" for ours."""
    if getattr(function, "form", None) is not None:
        return ""
    names = {parameter.name for parameter in parameters_of(function)}
    if "completions" in names:
        return "TRL"
    return "verl" if {"solution_str", "ground_truth"} <= names else ""


def parameters_of(function: object) -> list[inspect.Parameter]:
    """Return the parameters of a function or callable object; none if they are unknown."""
    try:
        return [*inspect.signature(function).parameters.values()]  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return []


def sees_thoughts(function: object) -> bool:
    """Return True if the text that a reward scores includes the model's thoughts."""
    return bool(getattr(function, "thoughts", False))


def text_for(function: object, episode: Episode) -> str:
    """Return the text of an episode for a reward of the form "text"."""
    return episode.whole_text if sees_thoughts(function) else episode.text


def is_async(function: RewardFunction) -> bool:
    """Return True if a reward function, or an object's `__call__`, is a coroutine function."""
    # inspect sees neither through a partial to its coroutine function nor through an object to its `__call__`.
    function = function.func if isinstance(function, functools.partial) else function
    call = getattr(function, "__call__", None)  # noqa: B004  for objects with an async __call__
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)
