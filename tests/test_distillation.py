"""Distillation against divergences in NumPy float64: values and gradients, exact with the whole vocabulary."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from forge_rl.algorithms.aggregation import Aggregation, Counts
from forge_rl.algorithms.distillation import Distillation, teacher_advantages, with_tail
from forge_rl.algorithms.loss_flag import build_loss
from forge_rl.algorithms.protocol import LossInputs
from forge_rl.algorithms.user_loss import call_loss, try_loss
from forge_rl.errors import ConfigError
from tests.fakes import batch_of

Array = np.ndarray[Any, Any]


def log_softmax(logits: Array) -> Array:
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def merged(logprobs: Array, ids: Array) -> Array:
    """Probabilities of the tokens `ids` of each position, and of all others together."""
    top_probabilities = np.take_along_axis(np.exp(logprobs), ids, -1)
    rest = np.exp(logprobs).copy()
    np.put_along_axis(rest, ids, 0.0, -1)
    return np.concatenate([top_probabilities, rest.sum(-1, keepdims=True)], -1)


def kl(p: Array, q: Array) -> Array:
    """KL of the rows; terms with p = 0 are 0."""
    safe = np.where(p > 0, p, 1)
    return np.where(p > 0, p * (np.log(safe) - np.log(np.where(q > 0, q, 1))), 0).sum(-1)


def divergence(p: Array, q: Array, beta: float) -> Array:
    """GKD section 2, with its limits at the ends as TRL and SDPO take them."""
    if beta in (0, 1):
        return kl(p, q) if beta == 0 else kl(q, p)
    m = beta * p + (1 - beta) * q
    return beta * kl(p, m) + (1 - beta) * kl(q, m)


def on_logits(
    loss: Distillation,
    logits: torch.Tensor,
    teacher: torch.Tensor,
    ids: torch.Tensor,
    mask: torch.Tensor | None = None,
    **others: torch.Tensor,
) -> tuple[torch.Tensor, Any]:
    """The loss of [L, V] logits, with the policy's softmax taken as the trainer does; `teacher` is [L, k]."""
    count = len(logits)
    scored = logits.log_softmax(-1)
    zeros, index = torch.zeros(count, dtype=logits.dtype), torch.zeros(count, dtype=torch.int32)
    fields = {
        "logprobs": scored[:, 0],
        "behaviour": scored[:, 0].detach(),
        "advantages": zeros,
        "weights": zeros + 1,
        "versions": index,
        "episodes": index,
        "turns": index,
        "segments": index,
        "lengths": index + count,
    }
    inputs = LossInputs(
        **({"top_logprobs": scored.gather(1, ids)} | fields | others),
        mask=torch.ones(count, dtype=torch.bool) if mask is None else mask,
        counts=Counts(tokens=count, sequences=1),
        columns={"top_ids": ids.int(), "top_teacher": teacher},
    )
    return call_loss(loss, inputs)


def example(count: int = 12, vocab: int = 9) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of a policy, with gradient, and logprobs of a teacher, [count, vocab] float64."""
    drawn = torch.Generator().manual_seed(1)
    logits = 2 * torch.randn(count, vocab, generator=drawn, dtype=torch.float64)
    teacher = (2 * torch.randn(count, vocab, generator=drawn, dtype=torch.float64)).log_softmax(-1)
    return logits.requires_grad_(), teacher


def numeric_gradient(logits: Array, function: Any, step: float = 1e-6) -> Array:
    """Central differences of the sum of `of` over the rows."""
    gradient = np.zeros_like(logits)
    for place in np.ndindex(*logits.shape):
        up, down = logits.copy(), logits.copy()
        up[place] += step
        down[place] -= step
        gradient[place] = (function(up).sum() - function(down).sum()) / (2 * step)
    return gradient


@pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("k", [1, 3, 8, 9])
def test_value_and_gradient_are_those_of_the_merged_distributions(k: int, beta: float):
    logits, teacher = example()
    top, ids = teacher.topk(k, dim=1)
    total, sums = on_logits(Distillation(k=k, beta=beta), logits, top, ids)
    p = merged(teacher.numpy(), ids.numpy())

    def expected(of: Array) -> Array:
        return divergence(p, merged(log_softmax(of), ids.numpy()), beta)

    student_logits = logits.detach().numpy()
    assert total.item() == pytest.approx(expected(student_logits).sum(), rel=1e-9)
    assert sums["divergence"].item() == pytest.approx(total.item())
    (gradient,) = torch.autograd.grad(total, logits)
    np.testing.assert_allclose(gradient.numpy(), numeric_gradient(student_logits, expected), atol=1e-7)
    if k == 9:  # the whole vocabulary: exact
        total_divergence = divergence(np.exp(teacher.numpy()), np.exp(log_softmax(student_logits)), beta).sum()
        assert total.item() == pytest.approx(total_divergence, rel=1e-9)


def test_the_ends_of_beta_are_the_limits_of_the_divergence():
    # GKD: the divergence over beta tends to the forward KL, over 1 - beta to the reverse KL
    logits, teacher = example()
    top, ids = teacher.topk(4, dim=1)
    for end, near, slope in ((0.0, 1e-6, 1e-6), (1.0, 1 - 1e-6, 1e-6)):
        limit, _ = on_logits(Distillation(k=4, beta=end), logits, top, ids)
        close, _ = on_logits(Distillation(k=4, beta=near), logits, top, ids)
        assert close.item() / slope == pytest.approx(limit.item(), rel=1e-3)


def test_a_small_tail_is_exact_in_float64_and_bounded_in_float32():
    tail = 1e-9
    top = torch.tensor([[0.75, 0.25 - tail]], dtype=torch.float64).log()
    assert with_tail(top)[0, -1].exp().item() == pytest.approx(tail, rel=1e-6)
    assert 1e-7 < with_tail(top.float())[0, -1].exp().item() < 3e-6
    overfull_logits = torch.tensor(
        [[0.0, -20.0]], requires_grad=True
    )  # rounding has made the sum of probabilities more than 1
    (gradient,) = torch.autograd.grad(with_tail(overfull_logits)[0, -1], overfull_logits)
    assert gradient.isfinite().all()
    assert gradient[0, 0] < 0, "probability can leave the top k"


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_a_certain_policy_has_the_softmax_gradient_in_float32(beta: float):
    # The teacher has 0.3 in its tail, of which the policy has e^-14, close to the rounding of 1 in float32. The least
    # tail is above that, so the gradient of the forward KL is up to half too small, but has its direction.
    logits = torch.tensor([[14.0, 0.0, -1.0]], requires_grad=True)
    ids = torch.tensor([[0]])
    total, _ = on_logits(Distillation(k=1, beta=beta), logits, torch.tensor([[0.7]]).log(), ids)
    (gradient,) = torch.autograd.grad(total, logits)
    exact = numeric_gradient(
        np.array([[14.0, 0.0, -1.0]]),
        lambda of: divergence(np.array([[0.7, 0.3]]), merged(log_softmax(of), ids.numpy()), beta),
    )
    np.testing.assert_allclose(gradient.numpy(), exact, rtol=0.5, atol=3e-3)
    assert gradient[0, 0] > 0


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_hostile_values_leave_value_and_gradient_finite(beta: float):
    logits, _ = example(6, 5)
    ids = torch.arange(3).expand(6, 3)
    teacher = torch.tensor(
        [
            [-0.5, -1.5, -math.inf],  # a token that the teacher excludes
            [0.0, -math.inf, -math.inf],  # certain
            [math.nan, -1.0, -2.0],  # without a teacher
            [math.nan] * 3,
            [-math.inf] * 3,  # all of it in the tail
            [-0.1, -3.0, math.nan],  # not trained
        ],
        dtype=torch.float64,
    )
    mask = torch.tensor([True, True, True, True, True, False])
    poisoned = logits + torch.tensor([0.0, 0, 0, 0, 0, math.nan], dtype=torch.float64)[:, None]
    total, sums = on_logits(Distillation(k=3, beta=beta, ratio_max=2), poisoned, teacher, ids, mask)
    assert total.isfinite()
    assert total > 0
    assert sums["unscored"].item() == 2
    (gradient,) = torch.autograd.grad(total, logits)
    assert gradient[:5].isfinite().all()
    assert (gradient[2:4] == 0).all()
    assert (gradient[[0, 1, 4]] != 0).any(dim=1).all()


def test_a_policy_without_a_token_of_the_teacher_has_a_finite_loss():
    logits = torch.tensor([[1.0, -math.inf, 0.0]], requires_grad=True)
    ids = torch.tensor([[0, 1]])
    top = torch.tensor([[0.5, 0.4]]).log()
    for beta in (0.0, 0.5, 1.0):
        total, _ = on_logits(Distillation(k=2, beta=beta), logits, top, ids)
        assert total.isfinite()


def test_a_clip_bounds_each_entrys_term():
    logits, teacher = example()
    top, ids = teacher.topk(4, dim=1)
    total, _ = on_logits(Distillation(k=4, beta=0, clip=0.05), logits, top, ids)
    p, q = merged(teacher.numpy(), ids.numpy()), merged(log_softmax(logits.detach().numpy()), ids.numpy())
    assert total.item() == pytest.approx(np.minimum(p * np.log(p / q), 0.05).sum())


def test_ratios_weight_tokens_up_to_their_cap():
    logits, teacher = example()
    top, ids = teacher.topk(4, dim=1)
    ratio = torch.linspace(0.5, 4, 12, dtype=torch.float64)
    behaviour = logits.detach().log_softmax(-1)[:, 0] - ratio.log()
    total, sums = on_logits(Distillation(k=4, beta=0.5, ratio_max=2), logits, top, ids, behaviour=behaviour)
    p, q = merged(teacher.numpy(), ids.numpy()), merged(log_softmax(logits.detach().numpy()), ids.numpy())
    assert total.item() == pytest.approx((ratio.clamp(max=2).numpy() * divergence(p, q, 0.5)).sum())
    assert sums["ratio_capped"].item() == (ratio > 2).sum().item()


def test_the_weights_are_the_aggregations():
    logits, teacher = example()
    top, ids = teacher.topk(4, dim=1)
    weights = torch.linspace(0, 1, 12, dtype=torch.float64)
    loss = Distillation(k=4, beta=1, aggregation=Aggregation(kind="sequence_mean"))
    total, _ = on_logits(loss, logits, top, ids, weights=weights)
    p, q = merged(teacher.numpy(), ids.numpy()), merged(log_softmax(logits.detach().numpy()), ids.numpy())
    assert total.item() == pytest.approx((weights.numpy() * kl(q, p)).sum())
    assert loss.divisor(Counts(tokens=12, sequences=3)) == 3


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_the_loss_is_accepted_before_a_start_and_named_by_a_flag(beta: float):
    try_loss(Distillation(beta=beta))
    assert build_loss([f"distill:k=5,beta={beta}"]) == Distillation(k=5, beta=beta)
    assert Distillation(k=5).columns == {"top_ids": 5, "top_teacher": 5}
    assert Distillation().keeps_uniform


def test_a_batch_without_a_teachers_scores_is_refused():
    logits, teacher = example()
    top, ids = teacher.topk(4, dim=1)
    with pytest.raises(ConfigError, match="no scores of a teacher"):
        on_logits(Distillation(k=4), logits, top, ids, top_logprobs=None)  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [{"k": 0}, {"k": 2000}, {"beta": -0.1}, {"beta": 1.5}, {"clip": 0.0}])
def test_a_wrong_option_names_its_flag(wrong: dict[str, float]):
    (name,) = wrong
    with pytest.raises(ConfigError, match=rf"^Distillation\({name}=\.\.\.\): {name} is"):
        Distillation(**wrong)  # type: ignore[arg-type]


def test_logprob_difference_advantages_give_the_reverse_kl_gradient():
    batch = batch_of([(0.0, [([1, 2], [3, 4]), ([1, 2, 3, 4, 5], [6])])])
    (episode,) = batch.episodes
    policy = np.concatenate([turn.logprobs for turn in episode.turns])
    teacher = policy + np.array([0.5, -np.inf, np.nan], np.float32)
    ((advantages,),) = teacher_advantages(batch, [[teacher]], coef=2)
    assert advantages.dtype == np.float32
    assert advantages.tolist() == pytest.approx([1.0, 0.0, 0.0]), "neither infinity nor NaN is a logprob"
    # sum over the vocabulary of q * A * grad log q is the gradient of -KL(q || p) by the logits
    logits, log_p = np.array([0.3, -1.0, 0.8]), log_softmax(np.array([1.0, 0.2, -0.4]))
    log_q = log_softmax(logits)
    q = np.exp(log_q)
    policy_gradient = ((log_p - log_q) * q) @ (np.eye(3) - q)
    exact = numeric_gradient(logits[None], lambda of: -kl(np.exp(log_softmax(of)), np.exp(log_p)))[0]
    np.testing.assert_allclose(policy_gradient, exact, atol=1e-8)
