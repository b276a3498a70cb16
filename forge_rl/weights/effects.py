"""Attests versions by their effect: an engine's logprobs of fixed texts must follow the trainer's.

Value attestation compares the bytes that an engine read. The engine may still compute with something else: the adapter
of another version or none, one whose scale was forgotten, or weights that sleep has freed. That shows in its logprobs.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from forge_rl.errors import AttestationError

Logprobs = npt.NDArray[np.float64]
"""[N] logprobs of the probes' tokens."""

_EPS = {"float64": 2.0**-23, "float32": 2.0**-23, "bfloat16": 2.0**-7}
"""Distance from 1 to the next number; engines compute in float32 at most."""
_FIRST_EPS = 64
"""Maximum median gap at the first version, in epsilons: rounding gave 0.02 to 0.05 in bfloat16, and 1e-5 in float32."""
_LEAST_FIRST = 0.05
_TIMES = 8.0
"""Factor on the usual gap above which a gap cannot be rounding. The median of 100 tokens varies by a fifth."""
_POWER = 12.0
"""Number of standard errors by which "no change" and the trainer's change must differ to be distinguished."""
_OUTLIERS = 0.1
"""Share of tokens that a comparison leaves out."""
_KEPT = 8
"""Number of latest versions to compare with, besides the first one."""


@dataclass(frozen=True, kw_only=True)
class ProbedVersion:
    """The trainer's logprobs of the probes under a version."""

    version: int
    logprobs: Logprobs


@dataclass(frozen=True, kw_only=True)
class _Answer:
    """An engine's answers under the version it was asked to load."""

    probed: ProbedVersion
    logprobs: Logprobs

    @property
    def noise(self) -> float:
        return float(np.sqrt(np.mean((self.logprobs - self.probed.logprobs) ** 2)))


@dataclass
class _EngineHistory:
    first: _Answer | None = None
    latest: deque[_Answer] = field(default_factory=lambda: deque(maxlen=_KEPT))
    gaps: deque[float] = field(default_factory=lambda: deque(maxlen=4 * _KEPT))

    @property
    def answers(self) -> Iterator[_Answer]:
        """Earlier answers, the latest first."""
        yield from reversed(self.latest)
        if self.first is not None and self.first not in self.latest:
            yield self.first


class VersionEffects:
    """Compares engines' answers under each version with the trainer's, and with earlier versions' answers.

        effects = VersionEffects(engines="bfloat16", trainer="bfloat16")
        effects.attest("generator/0", 0, probed, logprobs)  # at each version

    An engine fails if its logprobs did not change although the trainer's did, if they moved by less than half or more
    than one and a half times as far, or if they are off by more than eight times the usual gap. Each test decides only
    where the trainer's change exceeds rounding by so much that chance cannot explain it. In bfloat16, the change of a
    single small update often does not, but the sum of several does.

    Args:
        engines, trainer: dtypes that they compute in.
        rounded: engines round weights to 8 bits, so that their gap has no bound at the first version.
        changed: what a version changes, for errors, such as "adapters of q_proj, v_proj".
    """

    def __init__(self, *, engines: str, trainer: str, rounded: bool = False, changed: str = "weights") -> None:
        self._eps = max(_EPS[engines], _EPS[trainer])
        self._first_bound = np.inf if rounded else max(_LEAST_FIRST, _FIRST_EPS * self._eps)
        self._changed = changed
        self._histories: dict[tuple[str, int], _EngineHistory] = {}

    def of(self, changed: str) -> VersionEffects:
        """Return an instance for something else in the same engines, such as an adapter by name."""
        # The same dtypes and bounds, without the history.
        effects = copy.copy(self)
        effects._changed, effects._histories = changed, {}
        return effects

    def attest(self, engine: str, incarnation: int, probed: ProbedVersion, logprobs: Logprobs) -> float:
        """Compare an engine's logprobs under a version with the trainer's; returns the median absolute difference.

        Args:
            incarnation: number of the engine's restarts; another one begins without a history.

        Raises:
            AttestationError: it computes with other weights than the version's; names the likely ones.
        """
        history = self._histories.setdefault((engine, incarnation), _EngineHistory())
        answer = _Answer(probed=probed, logprobs=logprobs)
        gap = float(np.median(np.abs(logprobs - probed.logprobs)))
        # Rounding is relative: a policy that becomes sure, or collapses, has larger logits and gaps.
        scale = max(1.0, float(np.abs(probed.logprobs).mean()))
        # Never below two epsilons: gaps of 0 over a few versions do not forbid rounding at the next.
        usual = max(2 * self._eps, scale * float(np.median(history.gaps)) if history.gaps else 0.0)
        # The first version has no usual gap to compare with, only a bound for its dtype.
        bound = _TIMES * usual if history.gaps else self._first_bound
        problem = "" if gap <= bound else f"its logprobs differ by {gap:.2g}, more than rounding's {bound:.2g}"
        if not np.isfinite(gap):
            problem = "its logprobs are not finite"
        # The rounding of a few tokens may be small by chance, but not over several versions. The first version is
        # compared by its own alone: an engine that fell behind has large gaps since, which must not count as rounding.
        noises = [earlier.noise for earlier in history.latest]
        usual_noise = float(np.sqrt(np.mean(np.square(noises)))) if noises else 0.0
        # Latest first, and the first version last: errors of single updates that rounding hides add up since then.
        for earlier in history.answers:
            least_noise = 0.0 if earlier is history.first else usual_noise
            problem = problem or self._stale(answer, earlier, least_noise)
        if problem:
            raise AttestationError(
                f"{engine} does not compute with version {probed.version}, though it read its bytes: {problem}"
                f"{self._likeness(answer, gap)}; what changed are {self._changed}",
                hint="do not trust samples from it; report this with the run folder's logs, or go on with "
                "--weights.probes 0",
            )
        # Only answers that passed become history.
        history.first = history.first or answer
        history.latest.append(answer)
        history.gaps.append(gap / scale)
        return gap

    def forget(self) -> None:
        """Forget earlier versions, after a rollback gives their numbers to others."""
        self._histories.clear()

    def _stale(self, answer: _Answer, earlier: _Answer, least_noise: float) -> str:
        """Say how an engine's change since an earlier version contradicts the trainer's; "" if it does not.

        The engine's change x = d + e is the trainer's, d, and rounding e. Its projection on d, <x, d> / <d, d>, is 1 up
        to |e| / |d|, and 0 if nothing changed. The tenth of tokens with the largest e is left out: rounding sends some
        to another expert.
        """
        moved = answer.probed.logprobs - earlier.probed.logprobs
        change = answer.logprobs - earlier.logprobs
        errors = np.abs(change - moved)
        usable = errors <= np.quantile(errors, 1 - _OUTLIERS)
        moved, change = moved[usable], change[usable]
        # x is a difference of two answers, and both are rounded: variances add.
        noise = np.sqrt(2) * max(earlier.noise, least_noise, 2 * self._eps)
        # The standard error of the projection is noise / |d|: below _POWER, 0 and 1 cannot be told apart.
        if float(np.linalg.norm(moved)) <= _POWER * noise:
            return ""
        # <x, d> / <d, d>
        share = float(change @ moved / (moved @ moved))
        if 0.5 <= share <= 1.5:
            return ""
        since = f"since version {earlier.probed.version}"
        if not change.any():
            return f"nothing changed {since}, and the trainer's logprobs did, by {np.abs(moved).mean():.2g} on average"
        return f"its logprobs moved {share:.2g} times as far as the trainer's {since}"

    def _likeness(self, answer: _Answer, gap: float) -> str:
        """Name the version that an answer looks like, if it is another one."""
        gaps = {
            earlier.probed.version: float(np.median(np.abs(answer.logprobs - earlier.probed.logprobs)))
            for history in self._histories.values()
            for earlier in history.answers
        }
        likely = min(gaps, key=gaps.__getitem__, default=None)
        return f"; they are like version {likely}'s" if likely is not None and gaps[likely] < gap / 4 else ""
