"""Rewards for an episode's length, in completion tokens over all turns."""

from __future__ import annotations

from dataclasses import dataclass

from forge_rl.errors import ConfigError, check_flags
from forge_rl.types import Episode, Task


@dataclass(frozen=True, kw_only=True)
class Overlong:
    """Soft overlong penalty of DAPO (arXiv 2503.14476, equation 13): 0 up to `max_tokens - cache_tokens`, then linear
    down to -1 at `max_tokens`, and -1 beyond.

    Overlong(max_tokens=100, cache_tokens=20)(task, episode)  # -0.5 for 90 tokens
    """

    max_tokens: int
    """Length at which the full penalty applies; L_max in the paper."""
    cache_tokens: int
    """Length of the interval below max_tokens over which the penalty grows; L_cache in the paper."""

    def __post_init__(self) -> None:
        check_flags(self, "--reward overlong:", minimum={"max_tokens": 1, "cache_tokens": 1})
        if self.cache_tokens > self.max_tokens:
            raise ConfigError(
                f"--reward overlong: cache_tokens is {self.cache_tokens}, more than max_tokens {self.max_tokens}",
                hint="set cache_tokens to a fraction of max_tokens, such as a fifth",
            )

    def __call__(self, task: Task, episode: Episode) -> float:
        """Return a number from -1 to 0."""
        excess = episode.response_tokens - (self.max_tokens - self.cache_tokens)
        return -min(1.0, max(0, excess) / self.cache_tokens)


@dataclass(frozen=True, kw_only=True)
class Length:
    """Scores the share of a token budget that an episode used; a negative weight favours short episodes.

    Length(tokens=200)(task, episode)  # 0.25 for 50 tokens
    """

    tokens: int
    """Token budget; episodes at or above it score 1.0."""

    def __post_init__(self) -> None:
        check_flags(self, "--reward length:", minimum={"tokens": 1})

    def __call__(self, task: Task, episode: Episode) -> float:
        """Return a number from 0 to 1."""
        return min(1.0, episode.response_tokens / self.tokens)
