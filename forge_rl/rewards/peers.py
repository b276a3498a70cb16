"""Reward functions written for TRL or verl, called as their own trainers call them."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast

from forge_rl.errors import ForgeError, TaskError
from forge_rl.rewards.protocol import Form, RewardFunction, form_of, parameters_of, peer_of
from forge_rl.types import Episode, Score, Task

if TYPE_CHECKING:
    from forge_rl.rewards.composition import WeightedSum


R = TypeVar("R", bound="RewardFunction | WeightedSum")


def as_reward(function: R) -> R:
    """Wrap a function written for TRL or verl as a reward; return any other reward unchanged.

        as_reward(accuracy)  # def accuracy(completions, solution, **kwargs), as for TRL's GRPOTrainer

    Raises:
        ConfigError: it has neither our form nor TRL's or verl's.
    """
    wrapper = {"TRL": TrlReward, "verl": VerlReward}.get(peer_of(function))
    if wrapper is not None:
        return cast(R, wrapper(cast(Callable[..., Any], function)))
    form_of(function)
    return function


@dataclass(frozen=True)
class TrlReward:
    """A reward of TRL's GRPOTrainer, `f(prompts, completions, completion_ids, **columns)`, called once per group.

    Each argument is a list with one entry per episode; a column of the task's row has the same value in all of them.
    Prompts and completions are texts if the row's prompt is a text, and lists of messages otherwise. None, TRL's "not
    applicable", counts as 0, as in the sum of its rewards.
    """

    function: Callable[..., Any]
    form: ClassVar[Form] = "group"
    peer: ClassVar[str] = "TRL"

    def __call__(self, task: Task, episodes: Sequence[Episode]) -> Any:
        """Return a score for each episode; awaitable if the function is async."""
        texts = [episode.whole_text for episode in episodes]
        chats = [[{"role": "assistant", "content": text}] for text in texts]
        columns = {name: [value] * len(episodes) for name, value in task.truth.items()}
        result = _call(
            self.function,
            task,
            {
                **columns,
                "prompts": [task.prompt if task.prompt_is_text else list(task.messages)] * len(episodes),
                "completions": texts if task.prompt_is_text else chats,
                "completion_ids": [_token_ids(episode) for episode in episodes],
            },
        )
        return _then(result, lambda scores: _zero_for_none(task, scores))


@dataclass(frozen=True)
class VerlReward:
    """A reward of verl, `compute_score(data_source, solution_str, ground_truth, extra_info)`.

    It returns a number, or a dict with "score". The arguments are the columns of verl's data: `data_source`, or else
    the task's source; `reward_model.ground_truth`, or else `ground_truth` or `answer`; and `extra_info`. Other numbers
    in the dict become parts of the score.
    """

    function: Callable[..., Any]
    form: ClassVar[Form] = "text"
    peer: ClassVar[str] = "verl"
    thoughts: ClassVar[bool] = True  # as verl shows them

    def __call__(self, task: Task, text: str) -> Any:
        """Return the score; awaitable if the function is async."""
        truth = task.truth
        nested = truth.get("reward_model")
        ground_truths = [
            columns[name]
            for columns, name in ((nested, "ground_truth"), (truth, "ground_truth"), (truth, "answer"))
            if isinstance(columns, Mapping) and name in columns
        ]
        if not ground_truths:
            raise TaskError(
                f"the task {task.id} of {task.source} has no ground truth for a reward of verl's form",
                hint="name its column, as in --tasks FILE:answer=COLUMN, or give rows verl's reward_model.ground_truth",
            )
        result = _call(
            self.function,
            task,
            {
                "data_source": truth.get("data_source", task.source),
                "solution_str": text,
                "ground_truth": ground_truths[0],
                "extra_info": truth.get("extra_info"),
            },
        )
        return _then(result, _from_dict)


def _call(function: Callable[..., Any], task: Task, arguments: Mapping[str, object]) -> Any:
    """Call a function with the arguments that it takes, and ignore other arguments.

    Raises:
        TaskError: it needs an argument for which the task's row has no column.
    """
    parameters = parameters_of(function)
    # Without **kwargs a function gets only what it names, so rewards of either framework need not list every column.
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    names = {parameter.name for parameter in parameters}
    missing = [
        parameter.name
        for parameter in parameters
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        and parameter.name not in arguments
    ]
    if missing:
        columns = ", ".join(task.truth) or "none"
        raise TaskError(
            f"the reward needs {', '.join(missing)}, but the task {task.id} of {task.source} has no such column",
            hint=f"add the column to the rows; they have: {columns}",
        )
    return function(**{name: value for name, value in arguments.items() if takes_all or name in names})


def _then(result: Any, convert: Callable[[Any], Any]) -> Any:
    """Convert a function's result; if that is awaitable, return a coroutine that awaits and converts it."""

    async def awaited() -> Any:
        return convert(await result)

    return awaited() if inspect.isawaitable(result) else convert(result)


def _zero_for_none(task: Task, scores: Any) -> list[Any]:
    if isinstance(scores, str | float | int) or not hasattr(scores, "__iter__"):
        raise ForgeError(
            f"the reward of {task.id} is {scores!r:.100}, not a list of scores",
            hint="return a list with one number for each of `completions`, as TRL's rewards do",
        )
    return [0.0 if score is None else score for score in scores]


def _from_dict(result: Any) -> Any:
    if not isinstance(result, Mapping):
        return result
    if "score" not in result:
        raise ForgeError(f"the reward returned {dict(result)!r:.100}", hint='return a dict with "score", as for verl')
    parts = {
        str(name): float(value)
        for name, value in result.items()
        if name != "score" and isinstance(value, bool | int | float) and math.isfinite(value)
    }
    return Score(total=float(result["score"]), parts=parts)


def _token_ids(episode: Episode) -> list[int]:
    return [int(token) for turn in episode.turns for token in turn.token_ids]
