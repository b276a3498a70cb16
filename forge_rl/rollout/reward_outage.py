"""Handles a failing reward: the run asks again until scores come, another reward is set, or the time is up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from forge_rl.errors import ForgeError, HangError, JudgeError, PoisonError, SpendingError, UngradedError, UnscoredError
from forge_rl.rewards.scorer import score_again

if TYPE_CHECKING:
    from forge_rl.rewards.scorer import Scorer
    from forge_rl.types import Episode

_FIRST_PAUSE_S = 1.0
"""Pause before the reward is asked again, doubled each time."""
_LONGEST_PAUSE_S = 60.0


@dataclass(frozen=True, kw_only=True)
class EpisodeScoring:
    """How a run scores its episodes."""

    reward: Scorer | None = None
    """Scores the episodes of a group together if they have no score yet; None if each comes with one."""
    wait_s: float = 0.0
    """Maximum seconds to retry a failing reward, or to wait for another one; 0 asks once."""


class RewardOutage:
    """Retries a reward that has failed.

    Args:
        scoring: the run's reward, and how long to ask it.
        warn: called with a line for the user.
        on_end: called when scores come again, or another reward is set, after `begin`.
        on_failure: called with the error once `wait_s` have passed.
    """

    def __init__(
        self,
        scoring: EpisodeScoring,
        *,
        warn: Callable[[str], None],
        on_end: Callable[[], None],
        on_failure: Callable[[ForgeError], None],
    ) -> None:
        self.unscored: tuple[Episode, ...] = ()
        """The last episode of a batch whose score failed since the reward was replaced, with its group's results."""
        self.scored: tuple[Episode, ...] = ()
        """The last episodes that the reward has scored together."""
        self._reward = scoring.reward
        self._wait_s = scoring.wait_s
        self._warn = warn
        self._on_end = on_end
        self._on_failure = on_failure
        self._asking: asyncio.Task[None] | None = None

    @property
    def lasts(self) -> bool:
        """True from `begin` until scores come again or the time is up."""
        return self._asking is not None

    def begin(self, error: UnscoredError) -> None:
        """Start to ask for the scores of `unscored` from time to time, because all scores of batches fail."""
        if not self._wait_s:
            self._on_failure(error)
        elif self._asking is None:
            self._asking = asyncio.get_running_loop().create_task(self._ask(error))
            self._warn(
                f"all scores fail, so the run waits {self._wait_s / 60:g} minutes for another reward, such as "
                "`forge_rl.attach(FOLDER).reward = 'mine.py:score'`, or for this one, which it asks again: "
                f"{error.message}"
            )

    def end(self) -> None:
        """Stop asking, because another reward is set or the rollouts restart."""
        if self._asking is not None:
            self._asking.cancel()
            self._asking = None

    async def is_over_for(self, episodes: Sequence[Episode]) -> bool:
        """Ask for the scores of an evaluation's episodes again; return True once they come.

        Returns False if the reward fails on these episodes only or has never worked, or if the time is up.
        """
        assert self._reward is not None, "only a reward's score fails"
        is_warned = False
        for pause_s in self._pauses():
            await asyncio.sleep(pause_s)
            try:
                await score_again(self._reward, episodes)
            except SpendingError:
                raise
            except (HangError, PoisonError, UngradedError):
                # These are errors of the episodes, and would recur.
                return False
            except Exception as error:
                # A judge that is away is known by its error. Its cached replies would still score other episodes.
                if not isinstance(error, JudgeError) and (not self.scored or await self._scores(self.scored)):
                    return bool(self.scored) and await self._scores(episodes)  # the reward may work again by now
                if not is_warned:
                    wait = f"{self._wait_s / 60:g} minutes"
                    self._warn(f"scores of an evaluation fail, and are asked for again for up to {wait}: {error}")
                is_warned = True
            else:
                return True
        return False

    async def _scores(self, episodes: Sequence[Episode]) -> bool:
        """Return whether the reward scores these episodes now."""
        assert self._reward is not None, "only a reward's score fails"
        try:
            await score_again(self._reward, episodes)
        except Exception:
            return False
        return True

    async def _ask(self, error: UnscoredError) -> None:
        """Ask until scores come or the time is up."""
        assert self._reward is not None, "only a reward's score fails"
        failure: ForgeError = error
        for pause_s in self._pauses():
            await asyncio.sleep(pause_s)
            try:
                await score_again(self._reward, self.unscored)
            except SpendingError as spending_error:
                # A spending limit does not end by waiting, unlike other failures.
                failure = spending_error
                break
            except Exception:
                continue
            self._asking = None
            self._warn("scores come again, so the run goes on")
            self._on_end()
            return
        self._asking = None
        self._on_failure(failure)

    def _pauses(self) -> Iterator[float]:
        """Yield the seconds to wait before each attempt; the last attempt is made when the time is up."""
        loop, pause_s = asyncio.get_running_loop(), _FIRST_PAUSE_S
        deadline = loop.time() + self._wait_s
        while (left_s := deadline - loop.time()) > 0:
            yield min(pause_s, left_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
