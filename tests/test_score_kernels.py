"""The GPU's scoring kernels, run by Triton's interpreter on CPU, against float64."""

import os
import subprocess
import sys

import torch

from forge_rl.algorithms import logprobs
from forge_rl.algorithms.logprobs import Scoring, logits_gradient, score_logits, token_scores
from forge_rl.engines.titan import head
from forge_rl.engines.titan.head import score_in_chunks

VOCABULARY = 5000
"""More than a kernel holds at a time, and no multiple of it."""


def check(dtype: torch.dtype, targets_each: int, *, entropy_gradient: bool) -> None:
    """Compare scores and gradients of the kernels with those of float64, in which torch computes."""
    generator = torch.Generator().manual_seed(0)
    logits = (4 * torch.randn(6, VOCABULARY, generator=generator)).to(dtype)
    logits[1, 100:4999] = -torch.inf
    logits[2] = 3.0
    logits[3, 17] = 60.0
    targets = torch.randint(VOCABULARY, (6, targets_each), generator=generator)
    targets[1], targets[3] = 7, 17
    targets = targets[:, 0] if targets_each == 1 else targets
    scoring = Scoring(temperature=0.7, entropy_gradient=entropy_gradient, squares=True)
    exact = logits.double().requires_grad_()
    expected = token_scores(exact, targets, scoring)
    grads = torch.randn(targets.shape, generator=generator), torch.randn(6, generator=generator)
    total = (grads[0] * expected.logprobs).sum()
    (total + (grads[1] * expected.entropy).sum() if entropy_gradient else total).backward()
    assert exact.grad is not None
    scores, distributions = score_logits(logits, targets, scoring, 16)
    assert distributions.log_total is not None, "the kernels ran"
    for value, expected_value in zip(scores[:3], expected[:3], strict=True):
        torch.testing.assert_close(value, expected_value.float(), rtol=1e-5, atol=2e-5)
    for out in (torch.empty_like(logits, dtype=torch.float32), torch.empty_like(logits, dtype=torch.bfloat16), logits):
        logits_gradient(logits, targets, distributions, grads, scoring, chunk_tokens=16, out=out)
        tolerance = 2e-5 if out.dtype == torch.float32 else 5e-3
        torch.testing.assert_close(out.double(), exact.grad, rtol=tolerance, atol=tolerance)


def check_chunks() -> None:
    """Scores in chunks are those of the whole, with their gradients."""
    generator = torch.Generator().manual_seed(1)
    hidden, weight = torch.randn(7, 12, generator=generator), torch.randn(VOCABULARY, 12, generator=generator)
    targets = torch.randint(VOCABULARY, (7,), generator=generator)
    inputs, exact_inputs = (
        [x.detach().to(dtype, copy=True).requires_grad_() for x in (hidden, weight)]
        for dtype in (torch.float32, torch.float64)
    )
    scores = score_in_chunks(*inputs, targets, 3)
    expected = token_scores(exact_inputs[0] @ exact_inputs[1].t(), targets)
    grads = torch.randn(7, generator=generator)
    scores.logprobs.backward(grads)
    expected.logprobs.backward(grads.double())
    values = [scores.logprobs, scores.entropy, *(x.grad for x in inputs)]
    for value, expected_value in zip(values, [*expected[:2], *(x.grad for x in exact_inputs)], strict=True):
        assert value is not None
        assert expected_value is not None
        torch.testing.assert_close(value.double(), expected_value, rtol=1e-4, atol=1e-4)


def check_bad_logits() -> None:
    """A position with NaN spoils its own scores, and no other's."""
    logits = torch.zeros(3, VOCABULARY)
    logits[1, 4500] = torch.nan
    scores, _ = score_logits(logits, torch.zeros(3, dtype=torch.int64), Scoring(), 16)
    assert scores.logprobs.isfinite().tolist() == scores.entropy.isfinite().tolist() == [True, False, True]


def test_the_kernels_agree_with_float64():
    environment = os.environ | {"TRITON_INTERPRET": "1"}  # read when Triton is imported
    done = subprocess.run([sys.executable, "-m", "tests.test_score_kernels"], env=environment, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()[-2000:]


if __name__ == "__main__":
    logprobs.has_score_kernels = lambda logits: logits.dtype != torch.float64
    check(torch.float32, 1, entropy_gradient=False)
    check(torch.float32, 3, entropy_gradient=True)
    check(torch.bfloat16, 1, entropy_gradient=True)
    check_bad_logits()
    head.has_score_kernels = logprobs.has_score_kernels
    check_chunks()
