"""Versions attested by their effect, on drawn logprobs; tests/test_served_engine.py does so with real engines."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from forge_rl.errors import AttestationError
from forge_rl.weights.effects import Logprobs, ProbedVersion, VersionEffects

NOISE = {"float32": 2e-6, "bfloat16": 0.02}
"""Usual difference of a logprob between trainer and engine."""
TOKENS = {"float32": 16, "bfloat16": 48}
"""Of all texts, as a run has them by default."""


class Run:
    """A trainer whose logprobs move at each version, and an engine that follows it up to rounding."""

    def __init__(self, dtype: str, step: float, seed: int = 0) -> None:
        self.effects = VersionEffects(engines=dtype, trainer=dtype, changed="adapters of q_proj")
        self.drawn = np.random.default_rng(seed)
        self.noise, self.step, self.tokens = NOISE[dtype], step, TOKENS[dtype]
        self.trainer = [-5 * self.drawn.random(self.tokens)]

    def next(self) -> None:
        self.trainer.append(self.trainer[-1] + self.step * self.drawn.standard_normal(self.tokens))

    def rounded(self, logprobs: Logprobs) -> Logprobs:
        return logprobs + self.noise * self.drawn.standard_normal(self.tokens)

    def flipped(self, logprobs: Logprobs) -> Logprobs:
        """Some tokens went to other experts."""
        return logprobs + (self.drawn.random(self.tokens) < 0.04) * self.drawn.standard_normal(self.tokens)

    def attest(self, logprobs: Logprobs, engine: str = "engine 0") -> float:
        probed = ProbedVersion(version=len(self.trainer) - 1, logprobs=self.trainer[-1])
        return self.effects.attest(engine, 0, probed, logprobs)


@pytest.mark.parametrize("dtype", NOISE)
@pytest.mark.parametrize("step", [0.0, 1e-7, 1e-3, 0.1, 2.0])
def test_engines_that_follow_are_never_accused(dtype: str, step: float) -> None:
    for seed in range(5):
        run = Run(dtype, step, seed)
        for _ in range(100):
            for engine in ("engine 0", "engine 1"):
                answer = run.rounded(run.trainer[-1])
                assert run.attest(run.flipped(answer) if dtype == "bfloat16" else answer, engine) < 3 * run.noise
            run.next()


def test_a_policy_that_collapses_accuses_nobody() -> None:
    run = Run("float32", 1e-3)
    for _ in range(5):
        run.attest(run.rounded(run.trainer[-1]))
        run.next()
    run.trainer.append(20 * run.trainer[-1])
    run.noise *= 20
    run.attest(run.rounded(run.trainer[-1]))


MISTAKES: dict[str, Callable[[Run], Logprobs]] = {
    "the version before": lambda run: run.rounded(run.trainer[-2]),
    "the first version": lambda run: run.rounded(run.trainer[0]),
    "half the scale": lambda run: run.rounded((run.trainer[0] + run.trainer[-1]) / 2),
    "twice the scale": lambda run: run.rounded(2 * run.trainer[-1] - run.trainer[0]),
    "some other": lambda run: run.rounded(run.trainer[-1] + run.step * run.drawn.standard_normal(run.tokens)),
    "NaN": lambda run: np.full(run.tokens, np.nan),
}


@pytest.mark.parametrize(("dtype", "step"), [("float32", 1e-3), ("bfloat16", 0.4)])
@pytest.mark.parametrize("mistake", MISTAKES)
def test_each_mistake_is_named_at_its_version(dtype: str, step: float, mistake: str) -> None:
    run = Run(dtype, step)
    for _ in range(4):
        run.attest(run.rounded(run.trainer[-1]))
        run.next()
    with pytest.raises(AttestationError, match=r"version 4, .*adapters of q_proj") as raised:
        run.attest(MISTAKES[mistake](run))
    if mistake == "the version before":
        assert "they are like version 3's" in raised.value.message


def test_bits_that_stay_while_the_trainer_moves_are_an_error_and_the_error_says_so() -> None:
    run = Run("float32", 1e-4)
    answer = run.rounded(run.trainer[-1])
    run.attest(answer)
    run.next()
    run.effects._histories["engine 0", 0].gaps.append(1.0)  # a gap as large as this would be usual
    with pytest.raises(AttestationError, match="nothing changed since version 0"):
        run.attest(answer)


def test_small_updates_in_bfloat16_are_told_apart_once_they_add_up() -> None:
    run = Run("bfloat16", 0.01)
    stuck = run.trainer[0]

    def go_on() -> None:
        for _ in range(1000):
            run.attest(run.rounded(stuck))
            run.next()

    with pytest.raises(AttestationError, match="times as far as the trainer's since version 0"):
        go_on()
    assert 3 < len(run.trainer) < 500


def test_weights_that_do_not_move_accuse_nobody() -> None:
    run = Run("float32", 0.0)
    answer = run.rounded(run.trainer[-1])
    for _ in range(5):
        run.attest(answer)
        run.next()


def test_a_first_version_far_off_is_refused_unless_engines_round_weights() -> None:
    probed = ProbedVersion(version=0, logprobs=-np.ones(TOKENS["float32"]))
    with pytest.raises(AttestationError, match=r"more than rounding.s 0\.05"):
        VersionEffects(engines="float32", trainer="float32").attest(
            "engine 0", 0, probed, -2 * np.ones(TOKENS["float32"])
        )
    VersionEffects(engines="bfloat16", trainer="bfloat16", rounded=True).attest(
        "engine 0", 0, probed, -2 * np.ones(TOKENS["float32"])
    )
