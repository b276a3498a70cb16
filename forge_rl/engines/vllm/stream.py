"""Streams one completion of vLLM: each step's tokens with their logprobs and the version that produced them."""

from __future__ import annotations

import contextlib
import math
import uuid
from bisect import bisect_right
from collections.abc import AsyncGenerator, Sequence
from typing import TYPE_CHECKING, Literal

from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import RequestOutputKind

from forge_rl.engines.vllm.internals import version_starts
from forge_rl.errors import ConfigError
from forge_rl.types import Chunk, Sampling

if TYPE_CHECKING:
    from vllm.outputs import CompletionOutput
    from vllm.v1.engine.async_llm import AsyncLLM


async def decode(llm: AsyncLLM, prompt_ids: Sequence[int], sampling: Sampling) -> AsyncGenerator[Chunk, None]:
    """Decode one completion; when this generator is closed, vLLM drops the request.

    Raises:
        ConfigError: vLLM does not take such a request.
        RuntimeError: vLLM ended it without a completion.
    """
    request = uuid.uuid4().hex
    prompt = {"type": "token", "prompt_token_ids": list(prompt_ids)}
    sent = 0
    try:
        async with contextlib.aclosing(llm.generate(prompt, _parameters(sampling), request_id=request)) as outputs:
            async for output in outputs:
                (completion,) = output.outputs
                if completion.finish_reason not in (None, "stop", "length"):
                    raise RuntimeError(f"vLLM ended a request with {completion.finish_reason!r}")
                starts = version_starts(llm, request, completion)
                count = len(completion.token_ids)
                chunk = _chunk(completion, sampling, _versions(starts, sent, sent + count))
                sent += count
                yield chunk
    except VLLMValidationError as error:
        raise ConfigError(
            f"vLLM does not take the request: {error}", hint="change the prompt or the sampling"
        ) from error


def _parameters(sampling: Sampling) -> SamplingParams:
    logprobs = None if sampling.temperature == 0 and not sampling.top_logprobs else sampling.top_logprobs
    return SamplingParams(
        temperature=sampling.temperature,
        max_tokens=sampling.max_tokens,
        seed=sampling.seed,
        stop=list(sampling.stop),
        logprobs=logprobs,
        output_kind=RequestOutputKind.DELTA,
    )


def _versions(starts: list[tuple[str, int]], first: int, end: int) -> tuple[int, ...]:
    """Return the version of each token from `first` up to `end`; -1 where the engine had loaded none."""
    places = [start for _, start in starts]
    spans = [bisect_right(places, token) - 1 for token in range(first, end)]
    return tuple(int(starts[span][0]) if span >= 0 and starts[span][0].isdecimal() else -1 for span in spans)


def _chunk(completion: CompletionOutput, sampling: Sampling, versions: tuple[int, ...]) -> Chunk:
    ids = tuple(completion.token_ids)
    steps = (
        []
        if completion.logprobs is None
        else [{token: entry.logprob for token, entry in step.items()} for step in completion.logprobs]
    )
    if sampling.temperature == 0:
        logprobs = (math.nan,) * len(ids)
    else:
        logprobs = tuple(step[token] for step, token in zip(steps, ids, strict=True))
    top: tuple[tuple[tuple[int, float], ...], ...] = ()
    if sampling.top_logprobs:
        likeliest = (sorted(step.items(), key=lambda pair: -pair[1]) for step in steps)
        top = tuple(tuple(pairs[: sampling.top_logprobs]) for pairs in likeliest)
    finish: Literal["", "stop", "length"] = ""
    if completion.finish_reason is not None:
        finish = "length" if completion.finish_reason == "length" else "stop"
    return Chunk(token_ids=ids, logprobs=logprobs, versions=versions, text=completion.text, finish=finish, top=top)
