"""Lets vLLM's rejection sampler run on CPU, where its kernels do not run: `sampling.verify` replaces them.

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

from forge_rl.engines.vllm.sampling import requests_of


def run_without_kernels() -> None:
    """Replace the kernels of vLLM's rejection samplers in this process; idempotent.

    Without Triton, vLLM's launcher fails to read the kernels' signatures. Of its C++ kernels, the one that repeats
    temperatures writes to a copy.
    """
    patched: Any = rejection_sampler
    for name in ("_sample_recovered_tokens", "_rejection_greedy_sample", "_rejection_random_sample"):
        setattr(patched, name, SimpleNamespace(register_warmup=_no_warmup))  # called by each sampler that is made
    expand: Any = _expand
    expand.register_warmup = _no_warmup
    patched._expand = expand
    sampler = patched.RejectionSampler
    if not hasattr(sampler._get_logprobs_tensors, "__wrapped__"):
        sampler._get_logprobs_tensors = _without_ranks(sampler._get_logprobs_tensors)


def _no_warmup(**_: object) -> None:
    pass


def _expand(
    output: torch.Tensor, values: torch.Tensor, ends: torch.Tensor, replace_from: float, replace_to: float
) -> None:
    """Repeat each request's value for each of its drafted tokens, `[N]`; `ends` are the cumulative counts of these."""
    output.copy_(torch.where(values == replace_from, replace_to, values)[requests_of(ends, len(output))])


def _without_ranks(original: Callable[..., LogprobsTensors]) -> Callable[..., LogprobsTensors]:
    """Read the logprobs of new tokens from their own rows. vLLM copies the rows of all drafted tokens several times and
    ranks each token among all others, and engines do not report ranks.

    Returns log softmax of the given logits in all of vLLM's logprobs modes.
    """

    @functools.wraps(original)
    def get_logprobs(
        self: Any,
        max_num_logprobs: int,
        metadata: Any,
        logits: torch.Tensor,
        target_logits: torch.Tensor,
        bonus_logits: torch.Tensor,
        tokens: torch.Tensor,
    ) -> LogprobsTensors:
        if max_num_logprobs:
            return original(self, max_num_logprobs, metadata, logits, target_logits, bonus_logits, tokens)
        ends = metadata.cu_num_draft_tokens
        counts = ends.diff(prepend=ends.new_zeros(1)).long()
        rows, all_rows = requests_of(ends, len(target_logits)), torch.arange(len(tokens))
        # Column of each drafted token in its request's row; the bonus token's is the row's length.
        columns = torch.arange(len(target_logits)) - (ends - counts)[rows]
        # Rejected places are -1, which is no index: they get the logprob of token 0.
        token_ids = tokens.long().clamp(min=0)
        logprobs = torch.zeros(tokens.shape)
        for row_indices, column_indices, scores in ((rows, columns, target_logits), (all_rows, counts, bonus_logits)):
            sampled_ids = token_ids[row_indices, column_indices]
            logprobs[row_indices, column_indices] = scores.log_softmax(-1, torch.float32).gather(
                1, sampled_ids[:, None]
            )[:, 0]
        flat = tokens.flatten()
        return LogprobsTensors(flat.clamp(min=0)[:, None], logprobs.flatten()[:, None], torch.zeros_like(flat))

    return get_logprobs
