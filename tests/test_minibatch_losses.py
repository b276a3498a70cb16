"""Losses that choose tokens by the whole minibatch: against the papers' formulas in NumPy."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from forge_rl.algorithms.losses import ClippedSurrogate, quantile
from forge_rl.algorithms.minibatch_losses import ClipCov, KlCov, M2po
from forge_rl.algorithms.protocol import Loss
from forge_rl.system.seeds import derive_seed
from tests.test_losses import evaluate, gradient


def example(tokens: int = 600) -> dict[str, Any]:
    """Float64 values of tokens of which some are masked, with NaN in their places."""
    drawn = np.random.default_rng(7)
    logprobs = -3 * drawn.random(tokens)
    values = {
        "logprobs": logprobs,
        "behaviour": np.minimum(
            logprobs + drawn.choice([0.05, 1.0], tokens, p=[0.9, 0.1]) * drawn.normal(size=tokens), 0
        ),
        "advantages": drawn.normal(size=tokens) * (drawn.random(tokens) < 0.8),
        "entropy": drawn.exponential(size=tokens),
    }
    mask = drawn.random(tokens) < 0.7
    return {name: np.where(mask, column, np.nan) for name, column in values.items()} | {"mask": mask}


def compare(loss: Loss, expected: Any) -> dict[str, float]:
    """Compare loss and gradient with those of a function of the trained tokens' values; returns the sums."""
    columns = example()
    tensors = {name: torch.from_numpy(column) for name, column in columns.items()}
    logprobs = tensors.pop("logprobs").requires_grad_()
    total, sums = evaluate(loss, logprobs, **tensors)  # type: ignore[arg-type]
    mask = columns.pop("mask")
    losses, slopes = expected(**{name: column[mask] for name, column in columns.items()})
    np.testing.assert_allclose(total.item(), losses.sum(), rtol=1e-12)
    np.testing.assert_allclose(gradient(total, logprobs).numpy()[mask], slopes, rtol=1e-12, atol=1e-15)
    assert not gradient(evaluate(loss, logprobs, **tensors)[0], logprobs)[~torch.from_numpy(mask)].any()  # type: ignore[arg-type]
    return {name: value.item() for name, value in sums.items()}


def surrogate(r: np.ndarray, a: np.ndarray, high: float = 0.2) -> tuple[np.ndarray, np.ndarray]:
    """PPO's clipped loss and its derivative by the logprob."""
    is_clipped = ((a > 0) & (r > 1 + high)) | ((a < 0) & (r < 0.8))
    return -np.minimum(r * a, np.clip(r, 0.8, 1 + high) * a), np.where(is_clipped, 0, -r * a)


@pytest.mark.parametrize("bound", [0.002, 0.04, 10.0])
def test_m2po_drops_the_largest_until_the_mean_is_within_the_bound(bound: float):
    def expected(logprobs: np.ndarray, behaviour: np.ndarray, advantages: np.ndarray, entropy: np.ndarray) -> Any:
        log_ratio = logprobs - behaviour
        is_trained = np.ones(len(log_ratio), bool)
        trusted = {t for t in range(len(is_trained)) if log_ratio[t] * advantages[t] > 0}
        while trusted and np.mean([log_ratio[t] ** 2 for t in trusted]) > bound:
            worst = max(trusted, key=lambda t: log_ratio[t] ** 2)
            is_trained[worst] = False
            trusted.remove(worst)
        loss = -np.exp(log_ratio) * advantages * is_trained
        dropped.append(int((~is_trained).sum()))
        return loss, loss

    dropped: list[int] = []
    sums = compare(M2po(m2_bound=bound), expected)
    assert sums["clipped"] == dropped[0]
    assert (dropped[0] > 0) == (bound < 1)


def covariances(advantages: np.ndarray, logprobs: np.ndarray) -> np.ndarray:
    return (advantages - advantages.mean()) * (logprobs - logprobs.mean())


def test_kl_cov_penalises_the_highest_covariances():
    def expected(logprobs: np.ndarray, behaviour: np.ndarray, advantages: np.ndarray, entropy: np.ndarray) -> Any:
        log_ratio, count = logprobs - behaviour, int(0.05 * len(logprobs))
        # tokens without an advantage have no loss, and so no penalty
        covariance = np.where(advantages == 0, 0, covariances(advantages, logprobs))
        is_penalised = np.isin(np.arange(len(logprobs)), np.argsort(-covariance)[:count])
        loss = -np.exp(log_ratio) * advantages
        return loss + 0.5 * abs(log_ratio) * is_penalised, loss + 0.5 * np.sign(log_ratio) * is_penalised

    assert compare(KlCov(cov_ratio=0.05, penalty=0.5), expected)["penalised"] > 10


def test_clip_cov_drops_some_of_those_within_its_bounds():
    loss = ClipCov(cov_ratio=0.05, cov_low=0.3, cov_high=1.5)

    def expected(logprobs: np.ndarray, behaviour: np.ndarray, advantages: np.ndarray, entropy: np.ndarray) -> Any:
        covariance, r = covariances(advantages, logprobs), np.exp(logprobs - behaviour)
        losses, slopes = surrogate(r, advantages)
        able = np.flatnonzero((covariance > 0.3) & (covariance < 1.5) & ((slopes != 0) | (advantages == 0)))
        count = int(0.05 * len(r))
        assert len(able) > 2 * count
        drawn = torch.Generator().manual_seed(derive_seed(0, "token choice", len(r)))  # of version 0
        token_indices = able[torch.randperm(len(able), generator=drawn).numpy()[:count]]
        losses[token_indices] = slopes[token_indices] = 0
        return losses, slopes

    trained = example()["mask"].sum()
    assert compare(loss, expected)["cov_clipped"] == int(0.05 * trained)


def test_clip_cov_chooses_at_least_one_token_and_others_in_another_version():
    columns = {name: torch.from_numpy(column) for name, column in example().items()}
    logprobs = columns.pop("logprobs").requires_grad_()

    def found(**versions: torch.Tensor) -> torch.Tensor:
        total, sums = evaluate(ClipCov(cov_low=0.0), logprobs, **columns, **versions)  # type: ignore[arg-type]
        assert sums["cov_clipped"].item() == 1
        return gradient(total, logprobs)

    first = found()
    assert torch.equal(first, found())
    assert not torch.equal(first, found(versions=torch.ones(600, dtype=torch.int32)))


@pytest.mark.parametrize("share", [0.2, 0.5])
def test_only_tokens_of_high_entropy_have_a_gradient(share: float):
    def expected(logprobs: np.ndarray, behaviour: np.ndarray, advantages: np.ndarray, entropy: np.ndarray) -> Any:
        is_uncertain = entropy >= np.quantile(entropy, 1 - share)
        assert is_uncertain.mean() == pytest.approx(share, abs=0.01)
        losses, slopes = surrogate(np.exp(logprobs - behaviour), advantages, 0.28)
        return losses * is_uncertain, slopes * is_uncertain

    compare(ClippedSurrogate(top_entropy_quantile=share, dual_clip=math.inf), expected)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.8, 1.0])
@pytest.mark.parametrize("count", [1, 2, 7])
def test_a_quantile_is_numpys(share: float, count: int):
    values = np.random.default_rng(count).normal(size=count)
    assert quantile(torch.from_numpy(values), share).item() == pytest.approx(np.quantile(values, share), rel=1e-12)


def test_an_entropy_bonus_has_the_losss_mean_and_trains_all_groups():
    columns = {name: torch.from_numpy(column) for name, column in example().items()}
    logprobs, entropy = (columns.pop(name).requires_grad_() for name in ("logprobs", "entropy"))
    weights = torch.rand(600, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    plain, _ = evaluate(ClippedSurrogate(), logprobs, **columns, weights=weights)  # type: ignore[arg-type]
    loss = ClippedSurrogate(entropy_coef=0.1)
    total, _ = evaluate(loss, logprobs, **columns, weights=weights, entropy=entropy)  # type: ignore[arg-type]
    assert total.item() - plain.item() == pytest.approx(-0.1 * (weights * entropy)[columns["mask"]].sum().item())
    torch.testing.assert_close(gradient(total, entropy), (-0.1 * weights).where(columns["mask"], 0.0))
    assert list(loss.needs) == ["entropy_gradient"]
    assert loss.keeps_uniform
    assert not ClippedSurrogate().keeps_uniform


def test_a_loss_by_minibatch_and_episode_has_the_wider_scope():
    assert ClippedSurrogate(top_entropy_quantile=0.2, off_policy_bound=1.0).scope == "minibatch"
    assert ClippedSurrogate(off_policy_bound=1.0).scope == "episode"
