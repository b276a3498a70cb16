"""Token logprobs, entropy and the gap between trainer and engine, against torch's own log_softmax."""

import math

import pytest
import torch

from forge_rl.algorithms.logprobs import Scoring, logprob_gap, token_scores
from forge_rl.errors import ConfigError


def example(tokens: int = 7, vocabulary: int = 11) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    logits = 3 * torch.randn(tokens, vocabulary, generator=generator)
    return logits, torch.randint(vocabulary, (tokens,), generator=generator)


def test_hand_worked_logprob_and_entropy():
    # softmax of [ln 1, ln 3] is [1/4, 3/4]
    logprobs, entropy, *_ = token_scores(torch.tensor([[0.0, math.log(3)]] * 2), torch.tensor([0, 1]), Scoring())
    torch.testing.assert_close(logprobs, torch.tensor([math.log(0.25), math.log(0.75)]))
    expected = -(0.25 * math.log(0.25) + 0.75 * math.log(0.75))
    torch.testing.assert_close(entropy, torch.tensor([expected] * 2))


def test_temperature_flattens_the_distribution():
    # at temperature 2, [0, ln 9] becomes [0, ln 3]
    logprobs, *_ = token_scores(torch.tensor([[0.0, math.log(9)]]), torch.tensor([1]), Scoring(temperature=2.0))
    torch.testing.assert_close(logprobs, torch.tensor([math.log(0.75)]))


@pytest.mark.parametrize("chunk_tokens", [1, 3, 7, 1024])
def test_chunks_change_neither_values_nor_gradients(chunk_tokens):
    logits, targets = example()
    weights = torch.linspace(-1, 2, len(targets))
    reference = logits.clone().requires_grad_()
    distribution = torch.distributions.Categorical(logits=reference / 0.7)
    expected = distribution.log_prob(targets)
    (weights * expected).sum().backward()

    logits.requires_grad_()
    logprobs, entropy, *_ = token_scores(logits, targets, Scoring(temperature=0.7), chunk_tokens=chunk_tokens)
    (weights * logprobs).sum().backward()
    torch.testing.assert_close(logprobs, expected)
    torch.testing.assert_close(entropy, distribution.entropy())
    torch.testing.assert_close(logits.grad, reference.grad)


def test_the_gradient_agrees_with_finite_differences():
    logits, targets = example(3, 4)

    def total(x: torch.Tensor) -> float:
        return token_scores(x, targets, Scoring(temperature=1.5))[0].sum().item()

    logits.requires_grad_()
    token_scores(logits, targets, Scoring(temperature=1.5))[0].sum().backward()
    step = torch.zeros(3, 4)
    step[1, 2] = 1e-2
    slope = (total(logits.detach() + step) - total(logits.detach() - step)) / 2e-2
    assert logits.grad[1, 2].item() == pytest.approx(slope, abs=1e-3)


def test_bfloat16_logits_are_scored_in_float32():
    logits, targets = example()
    half = logits.to(torch.bfloat16).requires_grad_()
    logprobs, entropy, *_ = token_scores(half, targets)
    exact = torch.log_softmax(half.detach().float(), dim=1).gather(1, targets[:, None]).squeeze(1)
    assert logprobs.dtype == entropy.dtype == torch.float32
    torch.testing.assert_close(logprobs.detach(), exact)
    logprobs.sum().backward()
    assert half.grad.dtype == torch.bfloat16


def test_entropy_carries_no_gradient():
    logits, targets = example()
    logprobs, entropy, *_ = token_scores(logits.requires_grad_(), targets)
    assert logprobs.requires_grad
    assert not entropy.requires_grad


def test_forbidden_tokens_leave_logprob_entropy_and_gradient_finite():
    logits = torch.tensor([[0.0, 0.0, float("-inf")]], requires_grad=True)
    logprobs, entropy, *_ = token_scores(logits, torch.tensor([0]))
    logprobs.sum().backward()
    assert logprobs.item() == pytest.approx(math.log(0.5))
    assert entropy.item() == pytest.approx(math.log(2))
    torch.testing.assert_close(logits.grad, torch.tensor([[0.5, -0.5, 0.0]]))


def test_the_logits_are_not_changed():
    logits, targets = example()
    before = logits.clone()
    logits.requires_grad_()
    token_scores(logits, targets)[0].sum().backward()
    assert torch.equal(logits.detach(), before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_gradient_written_over_the_logits_is_used_once(dtype, temperature):
    logits, targets = example()
    weights, gradients = torch.linspace(-1, 2, len(targets)), []
    for overwrite in (False, True):
        inputs = logits.clone().to(dtype).requires_grad_()
        computed, scoring = inputs * 1, Scoring(temperature=temperature)
        logprobs, *_ = token_scores(computed, targets, scoring, chunk_tokens=3, overwrite_logits=overwrite)
        (weights * logprobs).sum().backward(retain_graph=True)
        gradients.append(inputs.grad.clone())
        assert torch.equal(computed.detach(), (gradients if overwrite else [logits.to(dtype)])[-1])
    assert torch.equal(*gradients)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        logprobs.sum().backward()


def test_no_tokens_give_no_logprobs():
    logprobs, entropy, *_ = token_scores(torch.zeros(0, 5, requires_grad=True), torch.zeros(0, dtype=torch.int64))
    assert logprobs.shape == entropy.shape == (0,)
    logprobs.sum().backward()


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan"), float("inf")])
def test_a_temperature_that_is_no_distribution_is_refused(temperature):
    with pytest.raises(ConfigError, match="temperature"):
        Scoring(temperature=temperature)


def test_logprob_gap_hand_worked_and_blind_to_what_is_masked():
    gap = logprob_gap(
        torch.tensor([-1.0, -2.0, float("nan"), -4.0]),
        torch.tensor([-1.5, -2.0, -1.0, float("-inf")]),
        torch.tensor([True, True, False, False]),
    )
    assert {name: value.item() for name, value in gap.items()} == {"abs_sum": 0.5, "max": 0.5, "count": 2.0}


def test_logprob_gap_of_nothing_is_zero():
    gap = logprob_gap(torch.zeros(0), torch.zeros(0), torch.zeros(0, dtype=torch.bool))
    assert {name: value.item() for name, value in gap.items()} == {"abs_sum": 0.0, "max": 0.0, "count": 0.0}


@pytest.mark.parametrize("chunk_tokens", [2, 64])
def test_entropy_has_a_gradient_if_asked_over_shared_distributions(chunk_tokens: int):
    logits, targets = example(7, 5)
    logits[2, 3] = -math.inf
    several = torch.stack([targets, (targets + 1) % 5, (targets + 2) % 5], dim=1)
    several[2] = several[2].where(several[2] != 3, 0)
    slopes, entropy_slopes = torch.randn(7, 3), torch.randn(7)
    results: list[torch.Tensor] = []
    for ours in (True, False):
        inputs = logits.double().requires_grad_()
        if ours:
            scoring = Scoring(temperature=0.7, entropy_gradient=True, squares=True)
            logprobs, entropy, squares, _ = token_scores(inputs, several, scoring, chunk_tokens=chunk_tokens)
        else:
            p = (inputs / 0.7).softmax(dim=1)
            logp = p.clamp(min=1e-300).log()
            logprobs, entropy, squares = logp.gather(1, several), -(p * logp).sum(dim=1), p.square().sum(dim=1)
        ((slopes * logprobs).sum() + (entropy_slopes * entropy).sum()).backward()
        results.append(torch.cat([inputs.grad, logprobs, entropy[:, None], squares[:, None]], dim=1).detach())
    torch.testing.assert_close(*results, rtol=1e-10, atol=1e-10)
    assert not token_scores(logits.requires_grad_(), targets).entropy.requires_grad
