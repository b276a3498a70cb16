"""Corrections of the mismatch between engine and trainer: weights, rejection and the proximal policy, in NumPy."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from forge_rl.algorithms.correction import Correction, loglinear
from forge_rl.algorithms.losses import ClippedSurrogate
from forge_rl.algorithms.policy_losses import Reinforce
from forge_rl.algorithms.protocol import LossInputs
from forge_rl.algorithms.user_loss import call_loss
from forge_rl.errors import ConfigError
from tests.test_losses import evaluate, gradient

EPISODES = np.array([0, 0, 0, 1, 1, 2, 3, 3, 3, 3])
MASK = np.array([True, True, False, True, True, True, True, True, True, True])


def example() -> dict[str, np.ndarray]:
    """Logprobs of the policy, the proximal policy and the engine, of four episodes; NaN where masked."""
    drawn = np.random.default_rng(4)
    proximal = -1 - drawn.random(10)
    values = {
        "logprobs": proximal + 0.1 * drawn.normal(size=10),
        "proximal": proximal,
        "behaviour": proximal + np.array([0.2, 0.3, 0, -0.1, 0.1, 1.5, 0.01, -0.02, 0.02, 0.01]),
    }
    return {name: np.where(MASK, column, np.nan) for name, column in values.items()}


def factors(correction: Correction) -> tuple[np.ndarray, dict[str, Any]]:
    """The factor of each token's surrogate, as the gradient of REINFORCE with advantages of -1, and the sums."""
    columns = {name: torch.from_numpy(column) for name, column in example().items()}
    logprobs = columns.pop("logprobs").requires_grad_()
    total, sums = evaluate(
        Reinforce(correction=correction),  # type: ignore[arg-type]
        logprobs,
        columns.pop("behaviour"),
        torch.full((10,), -1.0, dtype=torch.float64),
        torch.from_numpy(MASK),
        episodes=torch.from_numpy(EPISODES).int(),
        **columns,
    )
    return gradient(total, logprobs).numpy(), sums


def by_sequence(values: np.ndarray, reduce: Any) -> np.ndarray:
    """Reduce the trained tokens of each episode; [10], NaN where masked."""
    sequence_values = np.full(10, np.nan)
    for episode in set(EPISODES):
        in_episode = (episode == EPISODES) & MASK
        sequence_values[in_episode] = reduce(values[in_episode])
    return sequence_values


@pytest.mark.parametrize("mode", ["truncate", "mask"])
@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_weights_by_level_and_mode(level: Any, mode: Any):
    values = example()
    ratio = np.exp(values["proximal"] - values["behaviour"])
    weight = {
        "token": ratio,
        "sequence": by_sequence(ratio, np.prod),
        "geometric": by_sequence(ratio, lambda own: np.prod(own) ** (1 / len(own))),
    }[level]
    low, high = 0.78, 1.03
    outside = MASK & ~((weight >= low) & (weight <= high))
    expected = np.clip(weight, low, high) if mode == "truncate" else np.where(outside, 0, weight)
    expected = np.where(MASK, expected, 0)
    weights, sums = factors(Correction(proximal="recompute", level=level, mode=mode, low=low, high=high))
    assert 0 < outside.sum() < MASK.sum()
    np.testing.assert_allclose(weights, expected, rtol=1e-12)
    assert sums["correction/out_of_bounds"].item() == outside.sum()
    assert sums["correction/weight"].item() == pytest.approx(expected.sum())
    total, squares, count = (part.item() for part in sums["correction/ess"])
    assert (total, squares, count) == (pytest.approx(expected.sum()), pytest.approx((expected**2).sum()), MASK.sum())


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
@pytest.mark.parametrize("level", ["token", "seq_sum", "seq_mean", "seq_max"])
@pytest.mark.parametrize("proximal", ["recompute", "behaviour"])
def test_rejection_by_level_and_estimate(level: str, kind: str, proximal: Any):
    if (level, kind) == ("seq_max", "k1"):
        with pytest.raises(ConfigError, match="seq_max_k1"):
            Correction(reject="seq_max_k1:0.5_2")
        return
    values = example()
    d = values["proximal" if proximal == "recompute" else "logprobs"] - values["behaviour"]
    estimate = {"k1": -d, "k2": d**2 / 2, "k3": np.exp(d) - 1 - d}[kind]
    if level != "token":
        reduce: Any = {"seq_sum": np.sum, "seq_mean": np.mean, "seq_max": np.max}[level]
        estimate = by_sequence(estimate, reduce)
    rejected = MASK & ~(
        (math.log(0.95) <= estimate) & (estimate <= math.log(1.2)) if kind == "k1" else estimate <= 0.03
    )
    bound = "0.95_1.2" if kind == "k1" else "0.03"
    accepted_tokens, sums = factors(Correction(proximal=proximal, reject=f"{level}_{kind}:{bound}"))
    assert 0 < rejected.sum() < MASK.sum()
    np.testing.assert_array_equal(accepted_tokens, MASK & ~rejected)
    assert sums["correction/rejected"].item() == rejected.sum()


def test_criteria_are_chained_and_stand_beside_weights():
    parts = [factors(Correction(proximal="recompute", reject=text))[0] for text in ("token_k3:0.02", "seq_sum_k2:0.02")]
    weights, _ = factors(Correction(proximal="recompute", mode="truncate", high=1.05))
    combined_weights, _ = factors(
        Correction(proximal="recompute", mode="truncate", high=1.05, reject="token_k3:0.02+seq_sum_k2:0.02")
    )
    assert (parts[0] != parts[1]).any()
    np.testing.assert_allclose(combined_weights, weights * parts[0] * parts[1])


def test_one_bound_of_k1_is_for_both_sides():
    assert Correction(reject="token_k1:2").criteria == Correction(reject="token_k1:0.5_2").criteria


def test_the_loss_clips_against_the_proximal_policy():
    # ratios to the proximal policy: 1, 1.5, 1.5, 1; of it to the engine's: 2, 0.5, 4, 9 (left out, as above 5)
    proximal = torch.tensor([-1.0, -2.0, -1.5, -1.0])
    logprobs = (proximal + torch.tensor([1.0, 1.5, 1.5, 1.0]).log()).requires_grad_()
    behaviour = proximal - torch.tensor([2.0, 0.5, 4.0, 9.0]).log()
    decoupled = ClippedSurrogate(correction=Correction.presets["decoupled"])
    advantages, mask = torch.tensor([1.0, 1.0, -1.0, 1.0]), torch.ones(4, dtype=torch.bool)
    loss, _ = evaluate(decoupled, logprobs, behaviour, advantages, mask, proximal=proximal)
    assert loss.item() == pytest.approx(2 * -1 + 0.5 * -1.28 + 4 * 1.5)
    torch.testing.assert_close(gradient(loss, logprobs), torch.tensor([-2.0, 0.0, 6.0, 0.0]))
    assert list(decoupled.needs) == ["proximal"]
    assert not ClippedSurrogate().needs


def test_what_is_rejected_counts_in_the_mean_and_keeps_its_penalty():
    columns = {name: torch.from_numpy(column) for name, column in example().items()}
    logprobs = columns.pop("logprobs").requires_grad_()
    rest = columns.pop("behaviour"), torch.ones(10, dtype=torch.float64), torch.from_numpy(MASK), columns["proximal"]
    ids = {"episodes": torch.from_numpy(EPISODES).int(), **columns}
    all_rejected = Reinforce(kl_coef=0.1, correction=Correction(reject="token_k2:1e-300"))
    total, _ = evaluate(all_rejected, logprobs, *rest, **ids)  # type: ignore[arg-type]
    penalty = 0.05 * (logprobs - columns["proximal"])[rest[2]].square().sum()
    assert total.item() == pytest.approx(penalty.item())


def test_the_proximal_policy_is_interpolated_by_versions():
    logprobs, behaviour = torch.full((4,), -1.0, dtype=torch.float64), torch.full((4,), -2.0, dtype=torch.float64)
    sampled = torch.tensor([3, 2, 0, 4])  # the last cannot be
    # at the first update, the proximal policy is the current one
    torch.testing.assert_close(loglinear(logprobs, behaviour, sampled, 3.0), logprobs)
    # then a = (3 - sampled) / (3.5 - sampled); a token of the version itself is the engine's
    expected = -2 + torch.tensor([0.0, 1 / 1.5, 3 / 3.5, 1.0], dtype=torch.float64)
    torch.testing.assert_close(loglinear(logprobs, behaviour, sampled, 3.5), expected)


def test_a_loglinear_policy_needs_no_pass_but_a_version():
    loss = ClippedSurrogate(correction=Correction.presets["loglinear"], dual_clip=math.inf)
    logprobs = torch.tensor([-1.0, -1.0], requires_grad=True)
    mask, ids = torch.ones(2, dtype=torch.bool), torch.zeros(2, dtype=torch.int32)
    inputs = LossInputs(
        logprobs=logprobs,
        behaviour=torch.tensor([-1.1, -1.1]),
        advantages=torch.ones(2),
        weights=torch.ones(2),
        mask=mask,
        versions=torch.tensor([2, 0], dtype=torch.int32),
        episodes=ids,
        turns=ids,
        segments=ids,
        lengths=torch.full((2,), 2),
        counts=None,  # type: ignore[arg-type]
        version=2.5,
    )
    total, _ = call_loss(loss, inputs)
    # a is 0 and 0.8: r = exp(0.1) with weight 1, and r = exp(0.02) with weight exp(0.08); the derivatives are -w r
    torch.testing.assert_close(gradient(total, logprobs), torch.full((2,), -math.exp(0.1)))
    assert total.item() == pytest.approx(-2 * math.exp(0.1))
    assert not loss.needs
    with pytest.raises(ConfigError, match="were not published before this batch"):
        call_loss(loss, replace(inputs, version=None))


@pytest.mark.parametrize("name", Correction.presets)
def test_presets_have_the_scope_of_their_levels(name: str):
    preset = Correction.presets[name]
    by_sequence = "sequence" in name or "geometric" in name or name == "mis"
    assert ClippedSurrogate(correction=preset).scope == ("episode" if by_sequence else "")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"proximal": "old"}, "proximal is 'old'"),
        ({"proximal": "recompute", "mode": "clip"}, "mode is 'clip'"),
        ({"proximal": "recompute", "mode": "mask", "level": "turn"}, "level is 'turn'"),
        ({"proximal": "recompute", "mode": "mask", "low": 6.0, "high": 5.0}, r"correction.low is 6"),
        ({"proximal": "recompute", "mode": "mask", "high": 0.0}, r"correction.high is 0"),
        ({"mode": "mask"}, "no effect while correction.proximal"),
        ({"high": 2.0}, "no effect while correction.mode"),
        *(
            ({"reject": text}, "correction.reject has")
            for text in ("k1:2", "token_k4:1", "token_k3:0.1_0.2", "token_k1:2_1", "token_k1:-1", "token_k3:a", "+")
        ),
        ({"reject": "token_k1:0.5"}, "correction.reject has"),
    ],
)
def test_a_correction_that_makes_no_sense_is_refused(fields: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        Correction(**fields)
