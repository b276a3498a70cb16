"""Samples by seed and position in vLLM's first model runner; runs in vLLM's workers.

The token at a position is the argmax of logits plus Gumbel noise that depends only on the request's seed and the
position. So a drafted token is right exactly if it is the one sampled in its place. Neither drafts, other requests, nor
a change of engine or version alter a completion, except through the rounding of its logits.

vLLM's first runner instead keeps a generator for each request, whose state depends on how often it was used, and
accepts drafts at random. It runs on CPU, and on CUDA with drafts of `Drafter`. On CUDA without drafts, vLLM uses its
second runner, which draws by seed and position; here, the first runner draws with the second one's kernel. Tested with
vLLM 0.32.0.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from vllm.v1.sample import rejection_sampler
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
from vllm.v1.sample.rejection_sampler import GREEDY_TEMPERATURE, PLACEHOLDER_TOKEN_ID

from forge_rl.engines.vllm.internals import check_names

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
"""Step of SplitMix64's counter (Steele et al., 2014)."""


@dataclass(frozen=True)
class Streams:
    """Each request's seed and position in a batch, which vLLM's sampler gets in place of generators."""

    seeds: torch.Tensor
    """`[R] int64`."""
    positions: torch.Tensor
    """`[R] int64`, the position of each request's last computed token."""


def sample_by_position(runner: Any) -> None:
    """Make a worker's model runner sample by seed and position; the second runner already does."""
    if hasattr(runner, "prompt_logprobs_worker"):
        return
    batch = ("input_batch.req_ids", "input_batch.generators", "input_batch.sampling_metadata")
    check_names(runner, ("_sample", "requests", "positions", "query_start_loc.gpu", *batch))
    check_names(runner, ("sampler.topk_topp_sampler.forward", "sampler.topk_topp_sampler.logprobs_mode"))
    sampler = runner.sampler.topk_topp_sampler
    sampler.forward = functools.partial(_sample, sampler.logprobs_mode)
    patched: Any = rejection_sampler
    patched.rejection_sample = verify
    original = runner._sample

    def sample(logits: torch.Tensor | None, drafts: Any) -> Any:
        # vLLM would rewind the generators of requests whose prompt is computed in parts, and on CPU fail.
        runner.input_batch.generators.clear()
        runner.input_batch.sampling_metadata.generators = _streams(runner)
        return original(logits, drafts)

    runner._sample = sample


def _streams(runner: Any) -> Streams:
    """Return the streams of the batch about to be sampled. A request without a seed gets a new one in each step."""
    requests = runner.input_batch.req_ids
    seeds = [runner.requests[request].sampling_params.seed for request in requests]
    fresh = torch.randint(-(1 << 63), (1 << 63) - 1, (len(seeds),)).tolist() if None in seeds else seeds
    values = [new if seed is None else seed for seed, new in zip(seeds, fresh, strict=True)]
    last = runner.query_start_loc.gpu[1 : len(seeds) + 1] - 1
    positions = runner.positions[last]
    return Streams(torch.tensor(values, dtype=torch.int64).to(positions.device), positions)


def _sample(
    logprobs_mode: str, logits: torch.Tensor, streams: Streams, k: torch.Tensor | None, p: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Sample the token after each request's last one; replaces `TopKTopPSampler.forward`."""
    logits = apply_top_k_top_p(logits, k, p)
    scores = logits.log_softmax(-1, torch.float32) if logprobs_mode == "processed_logprobs" else logits
    return draw(logits.float(), streams), scores if logprobs_mode.startswith("processed") else None


def draw(logits: torch.Tensor, streams: Streams) -> torch.Tensor:
    """Sample a token for each row of logits, `[R, V] float32`; returns `[R] int64`."""
    tokens: torch.Tensor
    if logits.device.type == "cpu":
        tokens = torch.ops._C.fused_gumbel_argmax(logits, _keys(streams))
        return tokens
    from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample

    rows = torch.arange(len(logits), device=logits.device)
    ones = torch.ones(len(logits), device=logits.device)
    tokens = gumbel_sample(
        logits, rows, ones, streams.seeds, streams.positions, apply_temperature=False, is_drafting=False
    )
    return tokens


def _keys(streams: Streams) -> torch.Tensor:
    """Return the seed of each row's noise, `[R] int64`: positions of SplitMix64's counter, which starts at a different
    place for each seed. The kernel mixes the seed once more, and continues SplitMix64 from there for the row's
    tokens."""
    # SplitMix64's finalizer, in wrapping 64-bit arithmetic.
    mixed: npt.NDArray[Any] = streams.seeds.numpy().view(np.uint64) + _GAMMA
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    keys = (mixed ^ (mixed >> np.uint64(31))) + streams.positions.numpy().view(np.uint64) * _GAMMA
    return torch.from_numpy(keys.view(np.int64))


def requests_of(ends: torch.Tensor, count: int) -> torch.Tensor:
    """Return the request index of each of `count` drafted tokens, whose cumulative counts are `ends`."""
    rows = torch.arange(len(ends), device=ends.device)
    return rows.repeat_interleave(ends.diff(prepend=ends.new_zeros(1)), output_size=count)


def verify(
    drafted: torch.Tensor,
    counts: list[int],
    max_drafted: int,
    ends: torch.Tensor,
    draft_probs: None,
    logits: torch.Tensor,
    bonus: torch.Tensor,
    sampling: Any,
    **_: object,
) -> torch.Tensor:
    """Accept drafted tokens up to the first that is not the one sampled in its place; replaces `rejection_sample`.

    A token is thus accepted with its probability, as by Leviathan et al. (arXiv:2211.17192) with one-hot drafts.

    Args:
        drafted: `[N]`, the drafted tokens of R requests, one request after another; -1 is rejected.
        counts: number of each request's drafted tokens, at most `max_drafted`; `ends` are their cumulative sums.
        logits: `[N, V] float32`, after all of vLLM's processors.
        bonus: `[R, 1]`, the tokens that follow drafts of which all are accepted.
        sampling: vLLM's settings of the requests, with `Streams`.

    Returns:
        `[R, max_drafted + 1] int32`: each request's new tokens, padded with -1.
    """
    assert draft_probs is None, "drafts come without probabilities"
    requests, places = requests_of(ends, len(drafted)), torch.arange(len(drafted), device=ends.device)
    if sampling.all_greedy:
        sampled = logits.argmax(-1)
    else:
        streams = sampling.generators
        # The logits of a draft's last token are one position before those of the bonus token.
        positions = streams.positions[requests] - (ends[requests] - places)
        sampled = draw(logits, Streams(streams.seeds[requests], positions))
        if not sampling.all_random:
            greedy = sampling.temperature[requests] == GREEDY_TEMPERATURE
            sampled = torch.where(greedy, logits.argmax(-1), sampled)
    # [R] drafted tokens of each request, and each drafted token's column in its request's row.
    lengths = ends.diff(prepend=ends.new_zeros(1)).long()
    columns = places - (ends - lengths)[requests]
    tokens = torch.full((len(counts), max_drafted + 1), PLACEHOLDER_TOKEN_ID, dtype=torch.int32, device=ends.device)
    tokens[requests, columns] = sampled.int()
    # The bonus token comes right after the draft, and counts only if the whole draft is right.
    tokens.scatter_(1, lengths[:, None], bonus.int())
    right = torch.zeros_like(tokens, dtype=torch.bool)
    right[:, 0] = True
    # A place holds if all drafted tokens before it were right; the first sampled token always does.
    right[requests, columns + 1] = sampled == drafted
    return torch.where(right.cumprod(1).bool(), tokens, PLACEHOLDER_TOKEN_ID)
