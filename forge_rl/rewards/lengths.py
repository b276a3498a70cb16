"""Rewards of an episode's length, in tokens that the model wrote, over all turns."""

from __future__ import annotations

from dataclasses import dataclass

from forge_rl.errors import ConfigError, check_flags
from forge_rl.types import Episode, Task


@dataclass(frozen=True, kw_only=True)
class Overlong:
    """Punishes long episodes softly, as DAPO does (arXiv 2503.14476, equation 13): 0 up to `max_tokens - cache_tokens`,
    from there falling evenly to -1 at `max_tokens`, and -1 beyond.

    Overlong(max_tokens=100, cache_tokens=20)(task, episode)  # -0.5 for 90 tokens
    """

    max_tokens: int
    """Length from which the whole punishment is due; L_max in the paper."""
    cache_tokens: int
    """Length below it over which the punishment grows; L_cache in the paper."""

    def __post_init__(self) -> None:
        check_flags(self, "--reward overlong:", least={"max_tokens": 1, "cache_tokens": 1})
        if self.cache_tokens > self.max_tokens:
            raise ConfigError(
                f"--reward overlong: cache_tokens is {self.cache_tokens}, more than max_tokens {self.max_tokens}",
                hint="set cache_tokens to a part of max_tokens, such as a fifth",
            )

    def __call__(self, task: Task, episode: Episode) -> float:
        """Return a number from -1 to 0."""
        over = episode.response_tokens - (self.max_tokens - self.cache_tokens)
        return -min(1.0, max(0, over) / self.cache_tokens)


@dataclass(frozen=True, kw_only=True)
class Length:
    """Share of a budget of tokens that an episode took: give it a negative weight to favour brief ones.

    Length(tokens=200)(task, episode)  # 0.25 for 50 tokens
    """

    tokens: int
    """Budget; episodes of as many tokens or more score 1.0."""

    def __post_init__(self) -> None:
        check_flags(self, "--reward length:", least={"tokens": 1})

    def __call__(self, task: Task, episode: Episode) -> float:
        """Return a number from 0 to 1."""
        return min(1.0, episode.response_tokens / self.tokens)
