"""Combines several rewards into a weighted sum."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from forge_rl.errors import ConfigError, ForgeError
from forge_rl.flags.user_code import name_of, shown
from forge_rl.rewards.protocol import Form, PeerReward, RewardFunction, Shaping, form_of
from forge_rl.types import Score

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


@dataclass(frozen=True)
class WeightedSum:
    """Weighted sum of rewards of any form, each a named part of the score.

        WeightedSum({"correct": (correct, 1.0), "format": (tagged, 0.2)})

    The Reward service calls the parts concurrently, sync and async ones alike.

    Raises:
        ConfigError: the sum has no parts, a part cannot be called as a reward, or a part depends on a missing one.
    """

    parts: Mapping[str, tuple[RewardFunction, float]]
    """Function and weight of each part."""

    def __post_init__(self) -> None:
        if not self.parts:
            raise ConfigError("a sum of rewards has no parts", hint="give at least one reward")
        self.form  # noqa: B018  checks that each part can be called
        plain = [name for name, (function, _) in self.parts.items() if not isinstance(function, Shaping)]
        for name, (function, _) in self.parts.items():
            if isinstance(function, Shaping) and (not plain or function.of not in ("", *plain)):
                problem = f"no part {function.of!r}" if function.of else "no other part"
                raise ConfigError(
                    f"--reward {name} depends on another part of the reward, but there is {problem}",
                    hint=f"name one of: {', '.join(plain)}" if plain else f"add one, such as --reward auto {name}:...",
                )

    @property
    def form(self) -> Form:
        """The most general form among the parts."""
        forms = {form_of(function) for function, _ in self.parts.values()}
        return "group" if "group" in forms else "episode" if "episode" in forms else "text"

    def combine_all(self, scores: Mapping[str, Sequence[Score]]) -> list[Score]:
        """Shape and combine the scores of a task's episodes, by part; see `Shaping` and `combine`."""
        count = len(next(iter(scores.values())))
        plain = [name for name, (function, _) in self.parts.items() if not isinstance(function, Shaping)]
        sums = [_sum(self.parts[name][1] * scores[name][place].total for name in plain) for place in range(count)]
        shaped_scores = dict(scores)
        for name, (function, _) in self.parts.items():
            if isinstance(function, Shaping):
                # Shaped parts read the unshaped scores, so that the order of the parts does not matter.
                base_rewards = [float(score.total) for score in scores[function.of]] if function.of else sums
                totals = function.shape(scores[name], base_rewards)
                shaped_scores[name] = [
                    replace(score, total=total) for score, total in zip(scores[name], totals, strict=True)
                ]
        return [self.combine({name: shaped_scores[name][place] for name in self.parts}) for place in range(count)]

    def combine(self, scores: Mapping[str, Score]) -> Score:
        """Combine an episode's scores by part into one; the answer is the first that a part found, feedback is joined.

        Raises:
            ForgeError: parts have values for different numbers of turns, or of a turn's tokens.
        """
        parts: dict[str, float] = {}
        for name, score in scores.items():
            parts[name] = score.total
            parts |= {f"{name}/{inner}": value for inner, value in score.parts.items()}
        _check_lengths("turns", {name: [len(score.turns)] for name, score in scores.items() if len(score.turns)})
        _check_lengths("tokens", {name: [*map(len, score.tokens)] for name, score in scores.items() if score.tokens})
        # Parts without turns or tokens are left out of those sums, which differs from a part that scores all of them 0.
        weighted = [(scores[name], weight) for name, (_, weight) in self.parts.items()]
        turns = [[weight * value for value in score.turns] for score, weight in weighted if len(score.turns)]
        tokens = [[weight * np.asarray(turn) for turn in score.tokens] for score, weight in weighted if score.tokens]
        in_total = [score.turns_in_total for score, _ in weighted if len(score.turns)]
        # `turns_in_total` says whether the turns' values are already inside of `total`. Parts that disagree would count
        # some values twice or not at all.
        if any(in_total) and not all(in_total):
            raise ForgeError(
                "some parts of a reward include `turns` in their total and others do not, so their sum is undefined",
                hint="set Score.turns_in_total alike in all parts that have turns",
            )
        return Score(
            total=_sum(weight * score.total for score, weight in weighted),
            parts=parts,
            turns=tuple(map(math.fsum, zip(*turns, strict=True))),
            turns_in_total=bool(in_total) and all(in_total),
            tokens=tuple(map(_sum_of_values, zip(*tokens, strict=True))),
            answer=next((score.answer for score, _ in weighted if score.answer), ""),
            feedback="\n\n".join(score.feedback for score, _ in weighted if score.feedback),
        )


def _check_lengths(field: str, lengths: Mapping[str, Sequence[int]]) -> None:
    """Raise ForgeError if parts do not have values for the same turns or tokens."""
    if any(counts != next(iter(lengths.values())) for counts in lengths.values()):
        listing = ", ".join(f"{name} {list(counts)}" for name, counts in lengths.items())
        raise ForgeError(
            f"parts of a reward have different numbers of values in `{field}`: {listing}",
            hint=f"set Score.{field} to one entry per turn of the episode in each part, or leave it empty",
        )


def _sum(values: Iterable[float]) -> float:
    """Sum with one rounding: 0.7 + 0.2 + 0.1 is 1. Values that are not finite add up as in `sum`."""
    summands = list(values)
    return math.fsum(summands) if all(map(math.isfinite, summands)) else sum(summands)


def _sum_of_values(values: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """Sum values of the same tokens; NaN where all are NaN."""
    stacked = np.stack(values)
    return np.where(np.isnan(stacked).all(axis=0), np.nan, np.nansum(stacked, axis=0))


def described(function: RewardFunction | WeightedSum) -> str:
    """Describe a reward for users: as in `--reward` if it was named by its file or module, or by its type.

    described(build_reward(["mine.py:score"]))  # "mine.py:score"
    """
    if isinstance(function, WeightedSum):
        parts = ((described(part), weight) for part, weight in function.parts.values())
        return " ".join(f"{name}*{weight:g}" if weight != 1 else name for name, weight in parts)
    if text := name_of(function.function if isinstance(function, PeerReward) else function):
        return shown(text)
    return type(function).__name__ if is_dataclass(function) else _ADDRESS.sub("", repr(function))
