"""Rewards that depend on whether the answer is right: by its length, its repetitions, or how it ended.

Each is a part of a sum and reads another part, see `protocol.Shaping`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from forge_rl.errors import ConfigError, check_flags
from forge_rl.rewards.protocol import Form
from forge_rl.types import Episode, Outcome, Score, Task


@dataclass(frozen=True, kw_only=True)
class StopProperly:
    """Scales the reward of an answer that was cut by a token limit, as the stop-properly penalty of ProRL v2 does.

    --reward math=1 format=0.2 stop_properly:factor=0.1

    Its part of the sum is (factor - 1) r for a cut answer with another reward r above 0, else 0. A reward of 0 or below
    is left alone, as scaling it would reward the cut. Values of turns and tokens stay as they are.
    """

    factor: float = 0.0
    """Factor of a cut answer's reward: 0 takes all of it, 1 nothing."""
    of: str = ""
    """Name of the part to scale; by default the weighted sum of all parts that depend on no other."""

    def __post_init__(self) -> None:
        check_flags(self, "--reward stop_properly:", minimum={"factor": 0}, maximum={"factor": 1})

    def __call__(self, task: Task, episode: Episode) -> float:
        """Return 1.0 if the answer was cut, else 0.0."""
        cut = bool(episode.turns) and episode.turns[-1].truncated
        return float(cut or episode.outcome is Outcome.TRUNCATED)

    def shape(self, measured: Sequence[Score], base_rewards: Sequence[float]) -> list[float]:
        """Return the difference that the factor makes."""
        return [
            (self.factor - 1) * max(base_reward, 0.0) * cut.total
            for cut, base_reward in zip(measured, base_rewards, strict=True)
        ]


@dataclass(frozen=True, kw_only=True)
class CosineLength:
    """Rewards short right answers and long wrong ones, by "Demystifying Long Chain-of-Thought Reasoning in LLMs" (arXiv
    2502.03373, section 4).

    --reward math=0 cosine:of=math,max_tokens=8192

    The reward of an answer of n tokens moves along half a cosine from its value at length 0 to its value at max_tokens:
    long + (short - long) (1 + cos(pi n / max_tokens)) / 2, with one pair of values for right and one for wrong answers.
    An answer of max_tokens or more gets `exceeded`. A shorter wrong answer loses `repetition` times the share of its
    n-grams that are repeated, as in the authors' code. Defaults are the paper's, for lengths of up to 14,336 tokens.
    """

    max_tokens: int
    """Length from which an answer gets `exceeded`; L_max in the paper."""
    of: str = ""
    """Name of the part that tells right from wrong; by default the weighted sum of all parts that depend on no other.
    Give it the weight 0 if the cosine is to replace it."""
    right: float = 1.0
    """Minimum value of that part for a right answer."""
    right_short: float = 2.0
    """Reward of a right answer of length 0; r_0^c in the paper."""
    right_long: float = 1.0
    """Reward of a right answer just below max_tokens; r_L^c in the paper."""
    wrong_short: float = -10.0
    """Reward of a wrong answer of length 0; r_0^w in the paper."""
    wrong_long: float = 0.0
    """Reward of a wrong answer just below max_tokens; r_L^w in the paper."""
    exceeded: float = -10.0
    """Reward of an answer of max_tokens or more; r_e in the paper."""
    repetition: float = 0.0
    """Penalty of a wrong answer in which all n-grams are repeated."""
    ngram: int = 40
    """Length of an n-gram, in tokens."""

    def __post_init__(self) -> None:
        minima = {"max_tokens": 1, "ngram": 1, "repetition": 0}
        check_flags(self, "--reward cosine:", minimum=minima, maximum={"ngram": 1000})
        for name in ("right", "right_short", "right_long", "wrong_short", "wrong_long", "exceeded", "repetition"):
            if not math.isfinite(value := getattr(self, name)):
                raise ConfigError(f"--reward cosine: {name} is {value}", hint=f"set {name} to a finite number")

    def __call__(self, task: Task, episode: Episode) -> Score:
        """Return the length in tokens, and the share of repeated n-grams as a part."""
        repeated = repeated_share(episode, self.ngram) if self.repetition else 0.0
        return Score(total=float(episode.response_tokens), parts={"repeated": repeated})

    def shape(self, measured: Sequence[Score], base_rewards: Sequence[float]) -> list[float]:
        """Return the reward of each answer."""
        return [
            self._value(measurement, base_reward >= self.right)
            for measurement, base_reward in zip(measured, base_rewards, strict=True)
        ]

    def _value(self, measured: Score, is_right: bool) -> float:
        if measured.total >= self.max_tokens:
            return self.exceeded
        short, long = (self.right_short, self.right_long) if is_right else (self.wrong_short, self.wrong_long)
        value = long + (short - long) * (1 + math.cos(math.pi * measured.total / self.max_tokens)) / 2
        return value if is_right else value - self.repetition * measured.parts["repeated"]


@dataclass(frozen=True, kw_only=True)
class AdaptiveLength:
    """Length of an answer, times the share of its group that is right: with a negative weight, the penalty of "Just
    Enough Thinking" (arXiv 2506.05256) and of prime-rl, which presses on tasks that the policy solves anyway.

    --reward math=1 adaptive_length:of=math,tokens=8192*-0.2

    An answer of n tokens in a group of K, of which the share p is right, scores n / tokens * max(p, 1 / K), without an
    upper bound; the paper's beta is the negative weight divided by `tokens`. Lengths differ, so rewards of a group are
    hardly ever equal with it, and --schedule.dynamic-sampling replaces hardly any group unless
    --schedule.least-advantage is above the differences that lengths make.
    """

    form: ClassVar[Form] = "group"
    tokens: int
    """Length that scores 1 in a group that is all right."""
    of: str = ""
    """Name of the part that tells right from wrong; by default the weighted sum of all that depend on no other."""
    right: float = 1.0
    """Minimum value of that part for a right answer."""

    def __post_init__(self) -> None:
        check_flags(self, "--reward adaptive_length:", minimum={"tokens": 1})
        if not math.isfinite(self.right):
            raise ConfigError(f"--reward adaptive_length: right is {self.right}", hint="set right to a finite number")

    def __call__(self, task: Task, episodes: Sequence[Episode]) -> list[float]:
        """Return the length of each episode, in units of `tokens`."""
        return [episode.response_tokens / self.tokens for episode in episodes]

    def shape(self, measured: Sequence[Score], base_rewards: Sequence[float]) -> list[float]:
        """Return the lengths, scaled by the pass rate of the group."""
        # At least 1 / K, so that a group without a right answer still prefers short ones.
        pass_rate = max(sum(base_reward >= self.right for base_reward in base_rewards), 1) / len(base_rewards)
        return [length.total * pass_rate for length in measured]


def repeated_share(episode: Episode, size: int) -> float:
    """Return the share of an episode's n-grams that occurred before in the same turn; 0 if it has none."""
    total = repeated = 0
    for turn in episode.turns:
        # A set of hashes: the n-grams themselves would take `size` times the memory of the turn.
        tokens = turn.token_ids.tobytes()
        width = turn.token_ids.itemsize
        count = max(0, len(turn.token_ids) - size + 1)
        hashes = {hash(tokens[place * width : (place + size) * width]) for place in range(count)}
        total += count
        repeated += count - len(hashes)
    return repeated / total if total else 0.0
