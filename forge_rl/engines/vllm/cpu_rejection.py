"""Verifies drafts on CPU, where the kernels of vLLM's rejection sampler do not run.

Tested with vLLM 0.32.0.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample import rejection_sampler
from vllm.v1.sample.rejection_sampler import GREEDY_TEMPERATURE, PLACEHOLDER_TOKEN_ID


def verify_drafts() -> None:
    """Have vLLM's rejection samplers verify by this module's functions, in this process; idempotent.

    Without Triton, vLLM's launcher fails to read the signatures of the kernels, and of its C++ kernels the one that
    repeats temperatures writes to a copy.
    """
    patched: Any = rejection_sampler
    for name in ("_sample_recovered_tokens", "_rejection_greedy_sample", "_rejection_random_sample"):
        setattr(patched, name, SimpleNamespace(register_warmup=_no_warmup))  # called by each sampler that is made
    expand: Any = _expand
    expand.register_warmup = _no_warmup
    patched._expand = expand
    patched.rejection_sample = _rejection_sample
    sampler = patched.RejectionSampler
    if not hasattr(sampler._get_logprobs_tensors, "__wrapped__"):
        sampler._get_logprobs_tensors = _without_ranks(sampler._get_logprobs_tensors)


def _no_warmup(**_: object) -> None:
    pass


def _expand(
    output: torch.Tensor, values: torch.Tensor, ends: torch.Tensor, replace_from: float, replace_to: float
) -> None:
    """Repeat each request's value for each of its drafted tokens, `[N]`, of which `ends` are cumulative counts."""
    output.copy_(torch.where(values == replace_from, replace_to, values)[_requests(ends)])


def _requests(ends: torch.Tensor) -> torch.Tensor:
    """Return the request of each drafted token, `[N]`, from the cumulative counts."""
    return torch.arange(len(ends)).repeat_interleave(ends.diff(prepend=ends.new_zeros(1)))


def _rejection_sample(
    drafted: torch.Tensor,
    counts: list[int],
    most: int,
    ends: torch.Tensor,
    draft_probs: None,
    logits: torch.Tensor,
    bonus: torch.Tensor,
    sampling: Any,
    **_: object,
) -> torch.Tensor:
    """Accept each drafted token with its probability (Leviathan et al., arXiv:2211.17192, with one-hot drafts).

    In place of a request's first rejected token another one is sampled. Greedy requests accept the likeliest tokens.

    Args:
        drafted: `[N]`, the drafted tokens of R requests, one request after another; -1 is rejected.
        counts: number of each request's drafted tokens, at most `most`; `ends` are their cumulative sums.
        logits: `[N, V] float32`, after all of vLLM's processors.
        bonus: `[R, 1]`, the tokens that follow drafts of which all are accepted.

    Returns:
        `[R, most + 1] int32`: each request's new tokens, padded with -1.
    """
    assert draft_probs is None, "drafts come without probabilities"
    places = drafted.long().clamp(min=0)[:, None]
    chances = logits.log_softmax(-1).gather(1, places)[:, 0].exp()
    accepted = (chances.double() > torch.rand(len(drafted), dtype=torch.float64)) & (drafted >= 0)
    greedy = sampling.temperature == GREEDY_TEMPERATURE if sampling.temperature is not None else None
    if not sampling.all_random:
        likeliest = drafted == logits.argmax(-1)
        accepted = likeliest if greedy is None else torch.where(greedy[_requests(ends)], likeliest, accepted)
    output = torch.full((len(counts), most + 1), PLACEHOLDER_TOKEN_ID, dtype=torch.int32)
    rejected: list[tuple[int, int, int]] = []
    for row, end in enumerate(ends.tolist()):
        start = end - counts[row]
        taken = int(accepted[start:end].long().cumprod(0).sum())
        output[row, :taken] = drafted[start : start + taken]
        if start + taken < end:
            rejected.append((row, taken, start + taken))
        else:
            output[row, taken] = bonus[row, 0]
    if rejected:
        rows, columns, at = torch.tensor(rejected).unbind(1)
        rest = logits[at]
        rest.scatter_(1, places[at], torch.where(drafted[at, None] >= 0, -torch.inf, rest.gather(1, places[at])))
        instead = torch.ops._C.fused_gumbel_argmax(rest, torch.randint(1 << 31, (len(rest),)))
        if not sampling.all_random:
            instead = rest.argmax(-1) if greedy is None else torch.where(greedy[rows], rest.argmax(-1), instead)
        output[rows, columns] = instead.int()
    return output


def _without_ranks(original: Callable[..., LogprobsTensors]) -> Callable[..., LogprobsTensors]:
    """Have the logprobs of new tokens read from their own rows; vLLM copies the rows of all drafted tokens several
    times, and ranks each token among all others, which engines do not report.

    Returns log softmax of the given logits in every logprobs mode of vLLM.
    """

    @functools.wraps(original)
    def get_logprobs(
        self: Any,
        most: int,
        metadata: Any,
        logits: torch.Tensor,
        target_logits: torch.Tensor,
        bonus_logits: torch.Tensor,
        tokens: torch.Tensor,
    ) -> LogprobsTensors:
        if most:
            return original(self, most, metadata, logits, target_logits, bonus_logits, tokens)
        ends = metadata.cu_num_draft_tokens
        counts = ends.diff(prepend=ends.new_zeros(1)).long()
        rows, every = _requests(ends), torch.arange(len(tokens))
        columns = torch.arange(len(target_logits)) - (ends - counts)[rows]
        known = tokens.long().clamp(min=0)
        found = torch.zeros(tokens.shape)
        for of_rows, of_columns, scores in ((rows, columns, target_logits), (every, counts, bonus_logits)):
            chosen = known[of_rows, of_columns]
            found[of_rows, of_columns] = scores.log_softmax(-1, torch.float32).gather(1, chosen[:, None])[:, 0]
        flat = tokens.flatten()
        return LogprobsTensors(flat.clamp(min=0)[:, None], found.flatten()[:, None], torch.zeros_like(flat))

    return get_logprobs
