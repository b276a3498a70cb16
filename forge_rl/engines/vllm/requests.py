"""Converts requests and answers between vLLM's types and ours."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from vllm import SamplingParams
from vllm.logprobs import FlatLogprobs, Logprob
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

from forge_rl.errors import ConfigError
from forge_rl.token_arrays import Chunk, ScoredTokens
from forge_rl.types import Sampling

if TYPE_CHECKING:
    from vllm.outputs import CompletionOutput

PromptLogprobs = tuple[tuple[tuple[int, float, int], ...], ...]
"""(id, logprob, rank) triples at each position of a prompt."""
_ENCODER, _DECODER = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(SamplingParams)


def _parameters(sampling: Sampling, stream_interval: int = 1) -> SamplingParams:
    logprobs = None if sampling.temperature == 0 and not sampling.top_logprobs else sampling.top_logprobs
    extra = dict(sampling.extra)
    if isinstance(constraint := extra.get("structured_outputs"), Mapping):
        extra["structured_outputs"] = StructuredOutputsParams(**constraint)
    # `ignore_eos` asks for max_tokens in any case, so tokens that end a completion are left out as well.
    if not extra.get("ignore_eos"):
        requested: Any = extra.get("stop_token_ids")
        extra["stop_token_ids"] = [*(requested or ()), *sampling.stop_ids]
    return SamplingParams(
        temperature=sampling.temperature,
        max_tokens=sampling.max_tokens,
        seed=sampling.seed,
        stop=list(sampling.stop),
        logprobs=logprobs,
        flat_logprobs=True,
        stream_interval=stream_interval,
        output_kind=RequestOutputKind.DELTA,
        **extra,
    )


def checked_parameters(sampling: Sampling, stream_interval: int) -> SamplingParams:
    """Return vLLM's parameters after a trial run of its decoder: an error there would end the only thread that reads
    requests.

    Raises:
        ConfigError: they are malformed.
    """
    try:
        parameters = _parameters(sampling, stream_interval)
        _DECODER.decode(_ENCODER.encode(parameters))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ConfigError(f"vLLM does not take the request: {error}", hint="change the sampling") from error
    return parameters


def read_prompt_logprobs(positions: Sequence[Mapping[int, Logprob] | None]) -> PromptLogprobs:
    return tuple(
        tuple((token, entry.logprob, entry.rank or 0) for token, entry in (position or {}).items())
        for position in positions
    )


def check_finish(completion: CompletionOutput) -> None:
    """Check that a completion continues, or ended as it should.

    Raises:
        RuntimeError: vLLM gave it up; its tokens so far could pass for a short answer, or for a prompt's scores.
    """
    if completion.finish_reason not in (None, "stop", "length"):
        raise RuntimeError(f"vLLM ended a request with {completion.finish_reason!r}")


def scored_tokens(positions: object, count: int, top_k: int) -> ScoredTokens:
    """Read vLLM's logprobs of the last `count` tokens of a prompt: each token's own, followed by the top k."""
    assert isinstance(positions, FlatLogprobs), "flat_logprobs was asked for"
    end = len(positions.token_ids)
    # Each position has 1 + top_k entries: its own token first, then the likeliest.
    last = slice(end - count * (1 + top_k), end)
    ids = np.array(positions.token_ids[last], np.int32).reshape(count, 1 + top_k)
    logprobs = np.array(positions.logprobs[last], np.float32).reshape(count, 1 + top_k)
    return ScoredTokens(logprobs=logprobs[:, 0], top_ids=ids[:, 1:], top_logprobs=logprobs[:, 1:])


def _versions(starts: list[tuple[str, int]], first: int, end: int) -> list[int]:
    """Return the version of each token in [first, end); -1 where no version had been loaded."""
    versions = [-1] * (end - first)
    for version, start in starts:
        # A version that began before this chunk holds from its first token; later versions overwrite the rest.
        index = max(0, start - first)
        versions[index:] = [int(version) if version.isdecimal() else -1] * (len(versions) - index)
    return versions


def joined_chunk(
    completions: list[CompletionOutput], sampling: Sampling, starts: list[tuple[str, int]], num_sent: int
) -> Chunk:
    """Join vLLM's outputs since the last chunk, after `num_sent` earlier tokens."""
    ids = [token for completion in completions for token in completion.token_ids]
    logprobs, top = list[float](), list[tuple[tuple[int, float], ...]]()
    for completion in completions:
        part: Any = completion.logprobs or FlatLogprobs()
        for start, end in zip(part.start_indices, part.end_indices, strict=True):
            # The sampled token is first; where vLLM has joined outputs, it is not there again among the likeliest.
            logprobs.append(part.logprobs[start])
            if sampling.top_logprobs:
                alternatives = dict(zip(part.token_ids[start:end], part.logprobs[start:end], strict=True))
                top.append(tuple(sorted(alternatives.items(), key=lambda pair: -pair[1])[: sampling.top_logprobs]))
    if sampling.temperature == 0:
        # vLLM reports a greedy token's logprob, but it was not drawn from that distribution: see `Chunk.logprobs`.
        logprobs = [math.nan] * len(ids)
    reason = completions[-1].finish_reason
    return Chunk(
        token_ids=ids,
        logprobs=logprobs,
        versions=_versions(starts, num_sent, num_sent + len(ids)),
        text="".join(completion.text for completion in completions),
        finish="" if reason is None else "length" if reason == "length" else "stop",
        top=tuple(top),
    )
