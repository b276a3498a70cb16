"""The clipped surrogate and the KL penalty, against hand-worked numbers, TRL's formulas and exact expectations."""

import math
import pickle
from typing import Any

import pytest
import torch

from forge_rl.algorithms.aggregation import Aggregation, Counts
from forge_rl.algorithms.kl import kl_estimates, kl_penalty
from forge_rl.algorithms.losses import ClippedSurrogate
from forge_rl.algorithms.protocol import LossInputs
from forge_rl.algorithms.user_loss import call_loss
from forge_rl.errors import ConfigError


def evaluate(
    loss: ClippedSurrogate,
    logprobs: torch.Tensor,
    behaviour: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    reference: torch.Tensor | None = None,
    **others: torch.Tensor,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss on a row whose tokens all have weight 1, unless others say otherwise."""
    ids = torch.zeros(mask.shape, dtype=torch.int32)
    columns = dict.fromkeys(("versions", "episodes", "turns", "segments"), ids) | others
    episodes = columns["episodes"]
    lengths = torch.stack([(mask & (episodes == episode)).sum() for episode in episodes])
    inputs = LossInputs(
        logprobs=logprobs,
        behaviour=behaviour,
        advantages=advantages,
        mask=mask,
        reference=reference,
        lengths=lengths.clamp(min=1),
        counts=Counts(tokens=int(mask.sum()), sequences=1),
        **{"weights": torch.ones(mask.shape), "entropy": torch.linspace(0, 1, len(mask)), **columns},
    )
    return call_loss(loss, inputs)  # type: ignore[return-value]


def example(tokens: int = 64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    logprobs = -3 * torch.rand(tokens, generator=generator)
    behaviour = logprobs + 0.5 * torch.randn(tokens, generator=generator)
    advantages = torch.randn(tokens, generator=generator)
    mask = torch.rand(tokens, generator=generator) < 0.7
    reference = logprobs + 0.3 * torch.randn(tokens, generator=generator)
    return logprobs.requires_grad_(), behaviour, advantages, mask, reference


def trl_loss(
    per_token_logps: torch.Tensor,
    old_per_token_logps: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    ref_per_token_logps: torch.Tensor,
    *,
    eps_low: float,
    eps_high: float,
) -> torch.Tensor:
    """TRL's GRPO loss without its KL term, per token and masked, as a reference."""
    coef_1 = torch.exp(per_token_logps - old_per_token_logps)
    coef_2 = torch.clamp(coef_1, 1 - eps_low, 1 + eps_high)
    return -torch.min(coef_1 * advantages, coef_2 * advantages) * mask.float()


def gradient(total: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    (result,) = torch.autograd.grad(total, by)
    return result


def test_hand_worked_tokens_on_both_sides_of_the_clip():
    ratio = torch.tensor([1.0, 1.5, 1.5, 0.5, 0.5])
    advantages = torch.tensor([2.0, 1.0, -1.0, 1.0, -1.0])
    logprobs = ratio.log().requires_grad_()
    loss, sums = evaluate(ClippedSurrogate(), logprobs, torch.zeros(5), advantages, torch.ones(5, dtype=torch.bool))
    # -2, -1.28 (clipped high), +1.5, -0.5, +0.8 (clipped low)
    assert loss.item() == pytest.approx(-2 - 1.28 + 1.5 - 0.5 + 0.8)
    # gradient -r * A where the clip is not in force
    torch.testing.assert_close(gradient(loss, logprobs), torch.tensor([-2.0, 0.0, 1.5, -0.5, 0.0]))
    assert sums["clipped"].item() == 2
    assert sums["ratio"].item() == pytest.approx(5.0)
    assert sums["surrogate"].item() == pytest.approx(loss.item())


@pytest.mark.parametrize("log_ratio", [10.0, 100.0])
def test_a_bad_answer_that_became_far_likelier_has_no_gradient(log_ratio: float):
    logprobs = torch.tensor([0.0, 0.0, 0.0], requires_grad=True)
    behaviour = torch.tensor([-log_ratio, -math.log(2.5), -log_ratio])
    loss, sums = evaluate(
        ClippedSurrogate(), logprobs, behaviour, torch.tensor([-2.0, -2.0, 0.0]), torch.ones(3, dtype=torch.bool)
    )
    # 3 * 2 where the ratio is above 3; 2.5 * 2 below; nothing without an advantage
    assert loss.item() == pytest.approx(6 + 5)
    torch.testing.assert_close(gradient(loss, logprobs), torch.tensor([0.0, 5.0, 0.0]))
    assert (sums["clipped"].item(), sums["dual_clipped"].item()) == (1, 1)


def test_without_the_dual_clip_the_gradient_is_the_ratio():
    logprobs = torch.tensor([0.0], requires_grad=True)
    loss, _ = evaluate(
        ClippedSurrogate(dual_clip=math.inf),
        logprobs,
        torch.tensor([-10.0]),
        torch.tensor([-1.0]),
        torch.tensor([True]),
    )
    assert gradient(loss, logprobs).item() == pytest.approx(math.exp(10), rel=1e-5)


def test_bad_answers_that_are_far_off_policy_are_dropped_as_a_whole():
    # means of behaviour - logprobs by sequence: 0.5, 2 and 2, with advantages -1, -1 and 1; the masked 99 is left out
    gaps = torch.tensor([0.0, 1.0, 4.0, 0.0, 2.0, 99.0])
    logprobs = torch.full((6,), -5.0, requires_grad=True)
    advantages = torch.tensor([-1.0, -1.0, -1.0, -1.0, 1.0, -1.0])
    mask = torch.tensor([True] * 5 + [False])
    ids = {"episodes": torch.tensor([0, 0, 1, 1, 2, 0]).int(), "segments": torch.tensor([0, 1, 0, 0, 0, 0]).int()}
    loss = ClippedSurrogate(off_policy_bound=1.0, clip_low=1.0)
    total, sums = evaluate(loss, logprobs, logprobs.detach() + gaps, advantages, mask, **ids)
    expected = torch.tensor([1.0, math.exp(-1), 0.0, 0.0, -math.exp(-2), 0.0])
    torch.testing.assert_close(gradient(total, logprobs), expected)
    assert sums["off_policy_masked"].item() == 2
    assert "off_policy_masked" not in evaluate(ClippedSurrogate(), logprobs, logprobs.detach(), advantages, mask)[1]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"entropy_coef": -1}, "entropy_coef is -1"),
        ({"off_policy_bound": 0}, "off_policy_bound is 0"),
    ],
)
def test_bounds_that_make_no_sense_are_named(flags: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        ClippedSurrogate(**flags)


def test_the_loss_of_a_token_counts_by_its_weight():
    logprobs, behaviour, advantages, mask, reference = example()
    weights = torch.rand(len(mask), generator=torch.Generator().manual_seed(5))
    config = ClippedSurrogate(kl_coef=0.1)
    loss, sums = evaluate(config, logprobs, behaviour, advantages, mask, reference, weights=weights)
    expected = sum(
        weights[t]
        * evaluate(config, *(x[t : t + 1] for x in (logprobs, behaviour, advantages, mask, reference)))[0].detach()
        for t in range(len(mask))
    )
    torch.testing.assert_close(loss.detach(), expected)
    assert sums == evaluate(config, logprobs, behaviour, advantages, mask, reference)[1], "metrics are not weighted"


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        (Aggregation(), (1 + 2 + 3 + 6) / 4),
        (Aggregation(kind="sequence_mean"), ((1 + 2 + 3) / 3 + 6) / 2),
        (Aggregation(kind="constant", tokens=5), (1 + 2 + 3 + 6) / (2 * 5)),
    ],
)
def test_aggregations_of_two_hand_worked_sequences(aggregation: Aggregation, expected: float):
    losses, lengths = torch.tensor([1.0, 2.0, 3.0, 6.0]), torch.tensor([3, 3, 3, 1], dtype=torch.int32)
    total = (losses * aggregation.weights(lengths)).sum() / aggregation.divisor(Counts(tokens=4, sequences=2))
    assert total.item() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("options", "flag"),
    [
        ({"kind": "sum"}, "aggregation.kind"),
        ({"kind": "constant"}, "aggregation.tokens"),
        ({"tokens": 7}, "aggregation.kind=constant"),
    ],
)
def test_an_aggregation_that_says_too_little_or_too_much_is_refused(options: dict[str, Any], flag: str):
    with pytest.raises(ConfigError) as caught:
        Aggregation(**options)
    assert flag in caught.value.hint


def test_on_policy_the_gradient_is_that_of_reinforce():
    logprobs, _, advantages, mask, _ = example()
    loss, _ = evaluate(ClippedSurrogate(), logprobs, logprobs.detach(), advantages, mask)
    torch.testing.assert_close(gradient(loss, logprobs), -advantages * mask)


def test_value_and_gradient_match_trl_with_global_token_normalisation():
    logprobs, behaviour, advantages, mask, reference = example()
    loss, sums = evaluate(ClippedSurrogate(clip_low=0.15, clip_high=0.25), logprobs, behaviour, advantages, mask)
    per_token = trl_loss(logprobs, behaviour, advantages, mask, reference, eps_low=0.15, eps_high=0.25)
    expected = per_token.sum() / mask.sum()
    assert 0 < sums["clipped"] < mask.sum()
    torch.testing.assert_close(loss / mask.sum(), expected)
    torch.testing.assert_close(gradient(loss / mask.sum(), logprobs), gradient(expected, logprobs))


def test_k3_penalty_matches_trl_with_bias_correction():
    logprobs, behaviour, advantages, mask, reference = example()
    config = ClippedSurrogate(clip_low=0.2, clip_high=0.2, kl_coef=0.1, kl_kind="k3")
    loss, _ = evaluate(config, logprobs, behaviour, advantages, mask, reference)
    per_token = trl_loss(logprobs, behaviour, advantages, mask, reference, eps_low=0.2, eps_high=0.2)
    per_token_kl = torch.exp(reference - logprobs) - (reference - logprobs) - 1
    expected = (per_token + 0.1 * mask * per_token_kl * torch.exp(logprobs - behaviour)).sum()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradient(loss, logprobs), gradient(expected, logprobs))


def test_k2_penalty_adds_the_log_ratio_to_the_gradient():
    logprobs, behaviour, advantages, mask, reference = example()
    plain, _ = evaluate(ClippedSurrogate(), logprobs, behaviour, advantages, mask)
    loss, sums = evaluate(ClippedSurrogate(kl_coef=0.1), logprobs, behaviour, advantages, mask, reference)
    added = gradient(loss, logprobs) - gradient(plain, logprobs)
    torch.testing.assert_close(added, 0.1 * mask * (logprobs.detach() - reference))
    assert sums["surrogate"].item() == plain.item()


def test_a_reference_without_a_coefficient_changes_nothing():
    logprobs, behaviour, advantages, mask, reference = example()
    plain, _ = evaluate(ClippedSurrogate(), logprobs, behaviour, advantages, mask)
    loss, _ = evaluate(ClippedSurrogate(), logprobs, behaviour, advantages, mask, reference)
    assert loss.item() == plain.item()


@pytest.mark.parametrize("kl_kind", ["k2", "k3"])
@pytest.mark.parametrize("cuts", [[32, 32], [1, 60, 3], [16, 16, 16, 16]])
def test_microbatches_give_the_gradient_of_the_whole_batch(kl_kind, cuts):
    logprobs, behaviour, advantages, mask, reference = example()
    config = ClippedSurrogate(kl_coef=0.05, kl_kind=kl_kind)
    tokens = mask.sum()
    total, sums = evaluate(config, logprobs, behaviour, advantages, mask, reference)
    expected = gradient(total / tokens, logprobs)

    parts = zip(*(x.split(cuts) for x in (logprobs, behaviour, advantages, mask, reference)), strict=True)
    clipped_tokens = torch.zeros(())
    for part in parts:
        loss, part_sums = evaluate(config, *part)
        (loss / tokens).backward()
        clipped_tokens += part_sums["clipped"]
    torch.testing.assert_close(logprobs.grad, expected)
    assert clipped_tokens == sums["clipped"]


@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("kl_kind", ["k2", "k3"])
def test_masked_garbage_reaches_neither_loss_nor_gradient(garbage, kl_kind):
    logprobs, behaviour, advantages, mask, reference = example()
    config = ClippedSurrogate(kl_coef=0.1, kl_kind=kl_kind)
    clean, clean_sums = evaluate(config, logprobs, behaviour, advantages, mask, reference)
    clean_gradient = gradient(clean, logprobs)
    dirty = [torch.where(mask, x.detach(), garbage) for x in (logprobs, behaviour, advantages, reference)]
    dirty[0].requires_grad_()
    loss, sums = evaluate(config, dirty[0], dirty[1], dirty[2], mask, dirty[3])
    assert loss.item() == clean.item()
    assert torch.equal(gradient(loss, dirty[0]), clean_gradient)
    assert sums == clean_sums


def test_nothing_trained_gives_zero_loss_and_zero_gradient():
    logprobs = torch.full((6,), -1.0, requires_grad=True)
    zeros = torch.zeros(6)
    loss, sums = evaluate(
        ClippedSurrogate(kl_coef=0.1), logprobs, zeros, zeros, torch.zeros(6, dtype=torch.bool), zeros
    )
    assert loss.item() == 0
    assert torch.equal(gradient(loss, logprobs), zeros)
    assert sums["clipped"] == sums["ratio"] == 0


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("kl_kind", ["k2", "k3"])
@pytest.mark.parametrize(("logprob", "behaviour"), [(-0.1, -200.0), (-200.0, -0.1)])
def test_ratios_that_would_overflow_stay_finite(advantage, kl_kind, logprob, behaviour):
    logprobs = torch.tensor([logprob], requires_grad=True)
    mask = torch.tensor([True])
    loss, _ = evaluate(
        ClippedSurrogate(kl_coef=0.1, kl_kind=kl_kind),
        logprobs,
        torch.tensor([behaviour]),
        torch.tensor([advantage]),
        mask,
        torch.tensor([behaviour]),
    )
    assert math.isfinite(loss.item())
    assert math.isfinite(gradient(loss, logprobs).item())


def test_metrics_carry_no_gradient():
    _, sums = evaluate(ClippedSurrogate(kl_coef=0.1), *example())
    clipped = {"clipped", "clipped_high", "clipped_low", "dual_clipped"}
    assert set(sums) == {"surrogate", "ratio", "not_finite", *clipped}
    assert all(not value.requires_grad and value.dtype == torch.float32 and value.ndim == 0 for value in sums.values())


def test_the_loss_survives_pickling():
    loss = ClippedSurrogate(clip_high=0.3, kl_coef=0.01)
    assert pickle.loads(pickle.dumps(loss)) == loss


@pytest.mark.parametrize(("kl_coef", "needed"), [(0.0, False), (1e-6, True)])
def test_a_penalty_needs_a_reference(kl_coef, needed):
    assert ("reference" in ClippedSurrogate(kl_coef=kl_coef).needs) is needed


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("clip_low", -0.1),
        ("clip_low", 1.1),
        ("clip_high", -0.1),
        ("clip_high", float("nan")),
        ("kl_coef", -1.0),
        ("kl_coef", float("inf")),
        ("kl_kind", "k1"),
        ("dual_clip", 1.0),
    ],
)
def test_a_bad_field_is_refused_with_its_flag_and_value(field, value):
    with pytest.raises(ConfigError) as error:
        ClippedSurrogate(**{field: value})
    assert f"{field} is " in str(error.value)
    assert str(value) in str(error.value)


def test_a_penalty_without_a_reference_is_refused():
    logprobs, behaviour, advantages, mask, _ = example()
    with pytest.raises(ConfigError, match=r"kl_coef=0"):
        evaluate(ClippedSurrogate(kl_coef=0.1), logprobs, behaviour, advantages, mask)


def test_kl_estimates_of_a_hand_worked_token():
    # d = ln 2 - 0 = 0.6931
    d = math.log(2)
    policy, reference = torch.tensor(d), torch.tensor(0.0)
    assert kl_estimates(policy, reference)["k3"].item() == pytest.approx(0.5 + d - 1)
    assert kl_penalty(policy, reference, torch.tensor(0.0), "k2").item() == pytest.approx(d * d / 2)


def test_estimates_of_the_kl_are_right_on_average_or_nearly():
    logits, reference, _, _ = categorical()
    policy = logits.log_softmax(0).detach()
    exact = (policy.exp() * (policy - reference)).sum()
    means = {kind: (policy.exp() * estimate).sum() for kind, estimate in kl_estimates(policy, reference).items()}
    torch.testing.assert_close(means["k1"], exact)
    torch.testing.assert_close(means["k3"], exact)
    d = policy - reference
    torch.testing.assert_close(means["k2"], (policy.exp() * d * d / 2).sum())


@pytest.mark.parametrize("distance", [4.0, 25.0, -4.0, -25.0])
def test_a_penalty_pulls_distant_tokens_back_although_ratios_are_clamped(distance: float):
    logprobs = torch.tensor([-30.0], dtype=torch.float64, requires_grad=True)
    mask, none = torch.tensor([True]), torch.zeros(1, dtype=torch.float64)
    reference, behaviour = logprobs.detach() - distance, logprobs.detach()
    slopes = {}
    for kind in ("k2", "k3"):
        loss = ClippedSurrogate(kl_coef=0.5, kl_kind=kind)
        total, _ = evaluate(loss, logprobs, behaviour, none, mask, reference)
        slopes[kind] = gradient(total, logprobs).item()
    assert slopes["k2"] == pytest.approx(0.5 * distance)
    # on-policy, ratio * k3 has the derivative k3 + k3', with k3 along its tangent beyond 3
    edge = math.copysign(3.0, distance)
    slope = 1 - math.exp(-edge)
    assert slopes["k3"] == pytest.approx(0.5 * (math.exp(-edge) - 1 + edge + slope * (distance - edge) + slope))


def test_a_weight_of_0_keeps_infinite_terms_out():
    """0 * inf is NaN: coefficients, advantages and weights of 0 must not meet infinities."""
    logprobs = torch.tensor([-1.0, -500.0, -1.0], requires_grad=True)
    behaviour, reference = torch.tensor([-500.0, -1.0, -1.0]), torch.tensor([-1e30, -1.0, -500.0])
    mask, weights = torch.ones(3, dtype=torch.bool), torch.tensor([1.0, 0.0, 1.0])
    for kl_coef in (0.0, 0.1):
        loss = ClippedSurrogate(kl_coef=kl_coef, kl_kind="k3" if kl_coef else "k2", dual_clip=math.inf)
        total, sums = evaluate(loss, logprobs, behaviour, torch.zeros(3), mask, reference, weights=weights)
        assert math.isfinite(total.item())
        assert gradient(total, logprobs).isfinite().all()
        assert all(value.isfinite() for value in sums.values())


def test_an_unknown_kl_kind_is_refused():
    with pytest.raises(ConfigError, match="k1"):
        kl_penalty(torch.zeros(1), torch.zeros(1), torch.ones(1), "k1")


def categorical() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits of a policy, the logprobs of a reference and of a behaviour policy, and the exact gradient of the KL."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(6, generator=generator, dtype=torch.float64, requires_grad=True)
    reference = torch.randn(6, generator=generator, dtype=torch.float64).log_softmax(0)
    behaviour = torch.randn(6, generator=generator, dtype=torch.float64).log_softmax(0)
    logprobs = logits.log_softmax(0)
    exact = gradient((logprobs.exp() * (logprobs - reference)).sum(), logits)
    return logits, reference, behaviour, exact


def expected_gradient(logits: torch.Tensor, sampled_from: torch.Tensor, penalty: torch.Tensor) -> torch.Tensor:
    """Expectation, over every token of the vocabulary, of the gradient of its penalty."""
    return gradient((sampled_from.detach().exp() * penalty).sum(), logits)


def test_expected_gradient_of_k2_on_policy_is_that_of_the_kl():
    logits, reference, _, exact = categorical()
    logprobs = logits.log_softmax(0)
    penalty = kl_penalty(logprobs, reference, logprobs - logprobs.detach(), "k2")
    torch.testing.assert_close(expected_gradient(logits, logprobs, penalty), exact)


def test_the_expected_gradient_of_ratio_times_k3_is_the_kls():
    logits, reference, other, exact = categorical()
    for behaviour in (logits.detach().log_softmax(0), other):
        logprobs = logits.log_softmax(0)
        penalty = kl_penalty(logprobs, reference, logprobs - behaviour, "k3")
        torch.testing.assert_close(expected_gradient(logits, behaviour, penalty), exact)


def test_expected_gradient_of_plain_k3_is_not_that_of_the_kl():
    logits, reference, _, exact = categorical()
    logprobs = logits.log_softmax(0)
    wrong = expected_gradient(logits, logprobs, kl_estimates(logprobs, reference)["k3"])
    assert (wrong - exact).norm() > 0.1 * exact.norm()


def test_a_detached_ratio_spoils_k3():
    logits, reference, _, exact = categorical()
    logprobs = logits.log_softmax(0)
    penalty = kl_penalty(logprobs, reference, torch.zeros(6, dtype=torch.float64), "k3")
    assert (expected_gradient(logits, logprobs, penalty) - exact).norm() > 0.1 * exact.norm()


def test_k3_of_a_token_that_policies_disagree_about_is_bounded():
    logprobs = torch.tensor([-0.1, -20.0, -0.1], requires_grad=True)
    reference = torch.tensor([-20.0, -0.1, -0.1])
    penalty = kl_penalty(logprobs, reference, torch.tensor([15.0, 0.0, 15.0]) + logprobs - logprobs.detach(), "k3")
    max_ratio = math.exp(3)  # the ratio's bound, and that of the slope of k3
    # 19.9 above the reference: its slope of 1 - e^-3 goes on from 3; 19.9 below: 1 - e^3 from -3; equal: 0
    above, below = math.exp(-3) + 2 + (1 - math.exp(-3)) * 16.9, max_ratio - 4 + (max_ratio - 1) * 16.9
    torch.testing.assert_close(penalty, torch.tensor([max_ratio * above, below, 0.0]))
    expected = torch.tensor(
        [max_ratio * (1 - math.exp(-3)), below + 1 - max_ratio, 0.0]
    )  # the ratio of the second has one too
    torch.testing.assert_close(gradient(penalty.sum(), logprobs), expected)
