"""CISPO, DPPO, GMPO, GSPO, SAPO, TOPR and VESPO against their papers' formulas in NumPy, and hand-worked gradients."""

import math
import re
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from forge_rl.algorithms.correction import Correction
from forge_rl.algorithms.losses import ClippedSurrogate, PolicyLoss
from forge_rl.algorithms.minibatch_losses import ClipCov, KlCov, M2po
from forge_rl.algorithms.policy_losses import Cispo, Dppo, Gmpo, Gspo, Reinforce, Sapo, Topr, Vespo
from forge_rl.algorithms.user_loss import try_loss
from forge_rl.errors import ConfigError, LossError
from tests.test_losses import evaluate, gradient

LOSSES = [
    Cispo(),
    Cispo(ratio_max=1.1),
    Dppo(),
    Dppo(divergence="kl", threshold=0.05),
    Gmpo(),
    Gspo(),
    Gspo(clip_high=0.3),
    Reinforce(),
    Sapo(),
    Topr(),
    Vespo(),
    Vespo(k_positive=1.0, lambda_positive=0.5, k_negative=2.0, lambda_negative=0.1),
]
MORE = [*LOSSES, ClippedSurrogate(top_entropy_quantile=0.5), ClipCov(), ClipCov(cov_low=0.0), KlCov(), M2po()]
"""With those whose formulas are tested elsewhere."""


def short(loss: object) -> str:
    """The class and its own settings, as the name of a test."""
    return (
        re.sub(r"(kl|correction).*aggregation=\w+\([^)]*\)(, )?", "", str(loss))
        if isinstance(loss, PolicyLoss)
        else str(loss)
    )


def example(tokens: int = 400) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, dict[str, Any]]:
    """Float64 logprobs, some of them far from the engine's, of 20 episodes of up to two segments, in mixed order. An
    episode has one advantage; some are 0."""
    drawn = torch.Generator().manual_seed(3)
    logprobs = -3 * torch.rand(tokens, generator=drawn, dtype=torch.float64)
    spread = torch.where(torch.rand(tokens, generator=drawn) < 0.1, 2.0, 0.3)
    behaviour = (logprobs + spread * torch.randn(tokens, generator=drawn, dtype=torch.float64)).clamp(max=-1e-6)
    episodes = torch.randint(20, (tokens,), generator=drawn, dtype=torch.int32)
    segments = torch.randint(2, (tokens,), generator=drawn, dtype=torch.int32) * (episodes % 3 == 0)
    column = torch.randn(20, generator=drawn, dtype=torch.float64).where(torch.arange(20) % 5 > 0, 0.0)
    mask = torch.rand(tokens, generator=drawn) < 0.7
    return (
        logprobs.requires_grad_(),
        behaviour,
        column[episodes],
        mask,
        {"episodes": episodes, "segments": segments.int()},
    )


def gradients(loss: PolicyLoss, p: np.ndarray, q: np.ndarray, a: np.ndarray, sequences: list[np.ndarray]) -> np.ndarray:
    """The gradient by the logprob of each token, from the papers, with p and q the probabilities; a loss by sequences
    has the sum of its tokens' losses. `sequences` has the places of each sequence's tokens."""
    r = p / q
    match loss:
        case Cispo():
            return -np.minimum(r, loss.ratio_max) * a
        case Dppo():
            tv, kl = abs(p - q), q * np.log(q / p) + (1 - q) * np.log((1 - q) / (1 - p))
            near = (tv if loss.divergence == "tv" else kl) <= loss.threshold
            is_trained = near | (a * (p - q) <= 0)
            return -np.minimum(r, loss.ratio_max) * a * is_trained
        case Reinforce():
            return -a
        case Sapo():
            tau = np.where(a > 0, loss.tau_positive, loss.tau_negative)
            gate = 1 / (1 + np.exp(-tau * (r - 1)))
            return -4 * gate * (1 - gate) * r * a
    slopes = np.zeros(len(p))
    for positions in sequences:
        size, advantage = len(positions), a[positions][0]
        match loss:
            case Gspo():
                s = np.prod(r[positions]) ** (1 / size)
                is_trained = s <= 1 + loss.clip_high if advantage > 0 else s >= 1 - loss.clip_low
                slopes[positions] = -s * advantage * is_trained
            case Gmpo():
                low, high = np.exp(-loss.clip), np.exp(loss.clip)
                bounded = np.minimum(r[positions], high) if advantage > 0 else np.maximum(r[positions], low)
                # the loss is -A times the geometric mean, once for each token; its derivative, a share of 1 / size
                slopes[positions] = -advantage * np.prod(bounded) ** (1 / size) * (bounded == r[positions])
            case Topr():
                slopes[positions] = -advantage * (1 if advantage > 0 else min(np.prod(r[positions]), 1))
            case Vespo():
                k, decay = loss.k_positive, loss.lambda_positive
                if advantage < 0:
                    k, decay = loss.k_negative, loss.lambda_negative
                w = np.prod(r[positions])
                slopes[positions] = -advantage * w**k * np.exp(decay * (1 - w))
    return slopes


@pytest.mark.parametrize("loss", LOSSES, ids=short)
def test_gradients_are_the_papers(loss: PolicyLoss):
    logprobs, behaviour, advantages, mask, ids = example()
    total, _ = evaluate(loss, logprobs, behaviour, advantages, mask, **ids)  # type: ignore[arg-type]
    keys = ids["episodes"].tolist()
    trained = set(mask.nonzero().flatten().tolist())
    sequences = [
        np.array([t for t, key in enumerate(keys) if key == sequence and t in trained])
        for sequence in sorted(set(keys))
    ]
    arrays = [x.detach().numpy() for x in (logprobs.exp(), behaviour.exp(), advantages)]
    expected = gradients(loss, *arrays, [positions for positions in sequences if len(positions)])
    assert np.abs(expected[mask]).max() > 0.5
    np.testing.assert_allclose(gradient(total, logprobs), np.where(mask, expected, 0), rtol=1e-5, atol=1e-7)


def test_sapos_loss_is_its_gate():
    logprobs = torch.tensor([0.5, 2.0, 2.0]).log().requires_grad_()
    total, _ = evaluate(
        Sapo(), logprobs, torch.zeros(3), torch.tensor([1.0, 1.0, -2.0]), torch.ones(3, dtype=torch.bool)
    )
    gates = [4 / (1 + math.exp(0.5)), 4 / (1 + math.exp(-1)), 4 / 1.05 / (1 + math.exp(-1.05))]
    assert total.item() == pytest.approx(-gates[0] - gates[1] + 2 * gates[2])


def test_what_is_clipped_is_counted():
    mask = torch.ones(3, dtype=torch.bool)
    ratio, advantages = torch.tensor([6.0, 6.0, 4.0]), torch.tensor([1.0, 0.0, 1.0])
    _, sums = evaluate(Cispo(), ratio.log().requires_grad_(), torch.zeros(3), advantages, mask)
    assert sums["clipped"].item() == 1
    # 0.1 to 0.9 goes away for A > 0 and comes back for A < 0; 0.5 to 0.6 is near
    p, q = torch.tensor([0.9, 0.9, 0.6]), torch.tensor([0.1, 0.1, 0.5])
    logprobs = p.log().requires_grad_()
    loss, sums = evaluate(Dppo(), logprobs, q.log(), torch.tensor([1.0, -1.0, 1.0]), mask)
    torch.testing.assert_close(gradient(loss, logprobs), torch.tensor([0.0, 9.0, -1.2]))
    assert sums["clipped"].item() == 1


@pytest.mark.parametrize("loss", MORE, ids=short)
@pytest.mark.parametrize("masked", [math.nan, math.inf, -math.inf])
def test_masked_garbage_and_extreme_ratios_leave_a_finite_gradient(loss: PolicyLoss, masked: float):
    logprobs = torch.tensor([masked, -1e-7, -80.0, 0.0], requires_grad=True)
    behaviour = torch.tensor([masked, -80.0, -1e-7, 0.0])
    mask = torch.tensor([False, True, True, True])
    for advantage in (1.0, -1.0):
        total, sums = evaluate(loss, logprobs, behaviour, torch.full((4,), advantage), mask)
        slopes = gradient(total, logprobs)
        assert math.isfinite(total.item())
        assert slopes.isfinite().all()
        assert slopes[0] == 0
        assert all(value.isfinite() for value in sums.values())


@pytest.mark.parametrize("loss", MORE, ids=short)
@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("column", ["logprobs", "behaviour", "reference", "proximal"])
def test_tokens_with_non_finite_logprobs_are_left_out_and_counted(loss: PolicyLoss, broken: float, column: str):
    loss = replace(loss, kl_coef=0.1, correction=Correction.presets["decoupled"], off_policy_bound=9.0)
    values = {name: torch.tensor([-1.0, -1.2, -0.9]) for name in ("logprobs", "behaviour", "reference", "proximal")}
    values[column][1] = broken
    logprobs = values.pop("logprobs").requires_grad_()
    behaviour, reference = values.pop("behaviour"), values.pop("reference")
    mask, advantages = torch.ones(3, dtype=torch.bool), torch.tensor([1.0, 1.0, -1.0])
    total, sums = evaluate(loss, logprobs, behaviour, advantages, mask, reference, **values)  # type: ignore[arg-type]
    slopes = gradient(total, logprobs)
    assert math.isfinite(total.item())
    assert slopes.isfinite().all()
    assert slopes[1] == 0
    assert sums.pop("not_finite").item() == 1
    assert all(
        torch.stack(sums_of_kind if isinstance(sums_of_kind, tuple) else (sums_of_kind,)).isfinite().all()
        for sums_of_kind in sums.values()
    )


@pytest.mark.parametrize("loss", MORE, ids=short)
def test_a_token_without_advantage_has_no_gradient(loss: PolicyLoss):
    logprobs, behaviour, advantages, mask, _ = example()
    total, _ = evaluate(loss, logprobs, behaviour, advantages * 0, mask)  # type: ignore[arg-type]
    assert not gradient(total, logprobs).any()


@pytest.mark.parametrize("kind", [Cispo, ClipCov, Dppo, Gmpo, Gspo, KlCov, M2po, Reinforce, Sapo, Topr, Vespo])
def test_each_takes_the_common_flags_and_is_accepted_by_the_trainer(kind: Any):
    loss = kind(kl_coef=0.1, correction=Correction.presets["sequence_masked_tis"])
    assert set(loss.needs) == {"reference", "proximal"}
    try_loss(loss)


@pytest.mark.parametrize(
    ("kind", "flags", "message"),
    [
        (Cispo, {"ratio_max": 0}, ": ratio_max is 0"),
        (Dppo, {"threshold": math.inf}, ": threshold is inf"),
        (Dppo, {"divergence": "js"}, "divergence is 'js'"),
        (Gspo, {"clip_low": 2}, ": clip_low is 2"),
        (Gmpo, {"clip": 0}, ": clip is 0"),
        (Sapo, {"tau_negative": -1}, ": tau_negative is -1"),
        (Vespo, {"k_negative": -1}, ": k_negative is -1"),
        (M2po, {"m2_bound": 0}, ": m2_bound is 0"),
        (ClipCov, {"cov_high": 0.5}, ": cov_high is 0.5"),
        (KlCov, {"cov_ratio": 2}, ": cov_ratio is 2"),
        (Cispo, {"top_entropy_quantile": 0}, ": top_entropy_quantile is 0"),
        (Sapo, {"kl_kind": "k3"}, "kl_kind k3 has no effect"),
    ],
)
def test_a_setting_out_of_range_is_named(kind: Any, flags: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        kind(**flags)


@dataclass(frozen=True, kw_only=True)
class Unfinished(PolicyLoss):
    """A method without its function."""


def test_a_method_without_its_function_is_refused_before_the_start():
    with pytest.raises(LossError, match="NotImplementedError"):
        try_loss(Unfinished())
