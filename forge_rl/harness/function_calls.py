"""Reward for single function calls, as in the Berkeley Function-Calling Leaderboard."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from forge_rl.errors import TaskError
from forge_rl.system.strict_json import parse_json
from forge_rl.types import Episode, Score, Task, ToolCall

_IGNORED = str.maketrans(dict.fromkeys(" ,./-_*^") | {"'": '"'})
"""Characters of strings that do not count in a comparison, as on the leaderboard."""
_MOST_CALLS = 64


@dataclass(frozen=True, kw_only=True)
class FunctionCalls:
    """Scores 1.0 if the last answer calls the right functions with accepted arguments, in any order; else 0.0.

        --reward function_calls:truth=ground_truth

    The truth is a list with an object for each call: {"area": {"base": [10], "unit": ["units", ""]}} accepts
    area(base=10) and area(base=10, unit="units"); "" among the accepted values lets an argument be left out. An empty
    list means that nothing may be called. Nothing is run. Dots in names count as underscores, which APIs allow.
    """

    truth: str = "ground_truth"
    """Entry of the task's truth with the right calls."""

    def __call__(self, task: Task, episode: Episode) -> Score:
        """Raises TaskError for a task without right calls."""
        true_calls = self._right(task)
        calls = episode.turns[-1].calls if episode.turns else ()
        problem = _compared(true_calls, calls)
        answer = ", ".join(f"{call.name}({call.arguments:.100})" for call in calls[:8])
        return Score(total=float(not problem), parts={"calls": float(len(calls))}, answer=answer, feedback=problem)

    def _right(self, task: Task) -> list[Mapping[str, Mapping[str, object]]]:
        calls = task.truth.get(self.truth)
        if not isinstance(calls, list) or not all(
            isinstance(call, Mapping) and all(isinstance(arguments, Mapping) for arguments in call.values())
            for call in calls
        ):
            raise TaskError(
                f"--reward function_calls: {self.truth!r} of task {task.id!r} is {calls!r:.80}",
                hint='give it as [{"NAME": {"ARGUMENT": [ACCEPTED, ...]}}]',
            )
        # One object may hold several calls; each becomes an entry of its own.
        return [{name: arguments} for call in calls for name, arguments in call.items()]


def _compared(true_calls: Sequence[Mapping[str, Mapping[str, object]]], calls: Sequence[ToolCall]) -> str:
    """Return how the calls differ from the right ones; "" if they do not."""
    # Compared by pairs below, which is quadratic: the number of calls is the model's choice.
    if len(calls) != len(true_calls) or len(calls) > _MOST_CALLS:
        return f"{len(calls)} calls instead of {len(true_calls)}"
    problems: list[list[str]] = []
    # Index of the call by that of the right call that it matches, one to one: a call made twice does not count twice.
    matches: dict[int, int] = {}

    def is_matched(place: int, tried_calls: set[int]) -> bool:
        # Kuhn's augmenting path: if the call that has this right call also fits another one, it moves there.
        for expected, problem in enumerate(problems[place]):
            if not problem and expected not in tried_calls:
                tried_calls.add(expected)
                if expected not in matches or is_matched(matches[expected], tried_calls):
                    matches[expected] = place
                    return True
        return False

    for place, call in enumerate(calls):
        problems.append([_differs(expected, call) for expected in true_calls])
        if not is_matched(place, set()):
            return next(problem for expected, problem in enumerate(problems[place]) if expected not in matches)
    return ""


def _differs(true_call: Mapping[str, Mapping[str, object]], call: ToolCall) -> str:
    [(name, accepted)] = true_call.items()
    if name.replace(".", "_") != call.name.replace(".", "_"):
        return f"{call.name} instead of {name}"
    try:
        arguments = parse_json(call.arguments or "{}")
    except (ValueError, RecursionError):
        return f"the arguments of {name} are not JSON"
    if not isinstance(arguments, dict):
        return f"the arguments of {name} are not an object"
    for key, value in arguments.items():
        if key not in accepted:
            return f"{name} has no argument {key}"
        if not _is_accepted(value, accepted[key]):
            return f"{key} of {name} is {value!r:.80}"
    for key, values in accepted.items():
        if key not in arguments and not (isinstance(values, list) and "" in values):
            return f"{name} lacks {key}"
    return ""


def _is_accepted(value: object, accepted: object, depth: int = 0) -> bool:
    """Return whether a value is one of the accepted ones."""
    # Bounded, as accepted values are as deep as their file says.
    if depth > 8 or not isinstance(accepted, list):
        return False
    return any(_is_equal(value, candidate, depth) for candidate in accepted)


def _is_equal(value: object, candidate: object, depth: int) -> bool:
    """Return whether a value is an accepted one: an object that has a list of accepted values for each field, a list of
    such objects in their order, or a plain value."""
    if isinstance(value, list) and isinstance(candidate, list):
        pairs = zip(value, candidate, strict=False)
        return depth <= 8 and len(value) == len(candidate) and all(_is_equal(*pair, depth + 1) for pair in pairs)
    if isinstance(value, Mapping) and isinstance(candidate, Mapping):
        # Objects inside of an accepted object are plain values in the leaderboard's files.
        if not all(isinstance(inner, list) for inner in candidate.values()):
            return _plain(value) == _plain(candidate)
        is_complete = all(key in value or "" in inner for key, inner in candidate.items())
        return is_complete and all(
            key in candidate and _is_accepted(inner, candidate[key], depth + 1) for key, inner in value.items()
        )
    return _plain(value) == _plain(candidate)


def _plain(value: object, depth: int = 0) -> object:
    """Return a value in which strings that count as equal are equal."""
    if isinstance(value, str):
        return value.translate(_IGNORED).lower()
    if isinstance(value, bool):
        return "true" if value else "false", bool  # in Python, True == 1
    if isinstance(value, list) and depth < 8:
        return [_plain(item, depth + 1) for item in value]
    if isinstance(value, Mapping) and depth < 8:
        return {name: _plain(item, depth + 1) for name, item in value.items()}
    return value
